"""The scripts for a machine with a GPU turn wrong commands away before they do anything; CI rehearses the rest."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

LAUNCH = Path(__file__).parents[1] / "launch"
SCRIPTS = ["gpu_check.sh", "gpu_decode.sh", "gpu_emulate.sh", "gpu_kernels.sh"]

WRONG = {
    "no folder": ([], "expected DIR"),
    "option first": (["--rehearse", "{out}"], "[options of launch/setup.sh], got '--rehearse'"),
    "folder in use": (["{used}"], "is not a new or empty folder"),
    "a file": (["{used}/file"], "is not a new or empty folder"),
    "unknown option": (["{out}", "--fast"], "unknown argument '--fast'"),
}  # fmt: skip


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_command_is_one_line_and_leaves_nothing(name: str, script: str, tmp_path: Path) -> None:
    arguments, expected = WRONG[name]
    used, out = tmp_path / "used", tmp_path / "out"
    used.mkdir()
    (used / "file").touch()
    command = ["bash", LAUNCH / script, *(argument.format(used=used, out=out) for argument in arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert expected in done.stderr
    # What setup.sh turns away it says itself.
    assert done.stderr.startswith((f"{script}: ", "setup.sh: "))
    assert not out.exists()
