"""The seam to Megatron-Core: laws of real layers and whole models on gloo ranks, and of virtual ones in one process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import laws
import pytest

pytestmark = pytest.mark.seam


@pytest.mark.parametrize(
    ("suite", "num_ranks", "name"), [(suite, *case) for suite in laws.SUITES for case in laws.cases(suite)]
)
def test_law(suite: str, num_ranks: int, name: str) -> None:
    laws.check(suite, num_ranks, name)


@pytest.mark.parametrize("is_there", [True, False])
def test_tests_run_the_megatron_core_that_is_asked_for_or_end(is_there: bool, tmp_path: Path) -> None:
    core = tmp_path / "megatron" / "core"
    core.mkdir(parents=True)
    if is_there:
        (core / "__init__.py").touch()
        (core / "package_info.py").write_text("__shortversion__ = '9.9.9'")
    command = [sys.executable, "-m", "pytest", "--co", "-q", "-v", Path(__file__).parent / "test_imports.py"]
    env = {**os.environ, "MOE_EP_BENCH_MEGATRON": str(tmp_path)}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=100)
    told = done.stdout + done.stderr
    if is_there:
        assert f"megatron-core: 9.9.9 in {core}" in told
    else:
        assert f"MOE_EP_BENCH_MEGATRON: expected a folder with megatron/core, got {tmp_path}; found " in told
    assert (done.returncode == 0) == is_there
