"""Laws: what must hold of layers and models on several ranks, as functions that every rank runs together.

Importing Megatron-Core and starting ranks takes seconds. So one job runs all laws of a suite on as many ranks, when a
test first asks for one of them. A law takes its suite's ``Lab`` and raises AssertionError.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch

from moe_ep_bench.layer.host import device_scope
from moe_ep_bench.runtime.ranks import join

HAS_TE = importlib.util.find_spec("transformer_engine") is not None
# Modules of each suite; the first has its ``Lab``.
SUITES = {
    "layer": ("layer_laws", "runner_laws", "graph_laws"),
    "model": ("transformer_laws",),
    "virtual": ("virtual_laws", "runner_laws", "virtual_transformer_laws"),
}


Check = Callable[[Any], None]


class Law(NamedTuple):
    check: Check
    ranks: tuple[int, ...]
    """On how many ranks tests run it."""
    on_one: bool
    """One rank can show it, such as a GPU."""
    with_te: bool
    """It needs a GPU with Transformer Engine, and is of no CPU."""


_LAWS: dict[str, Law] = {}


def law(*ranks: int, on_one: bool = True, with_te: bool = False) -> Callable[[Check], Check]:
    """Declare a law that tests run on so many ranks, by default two."""

    def declare(check: Check) -> Check:
        _LAWS[f"{check.__module__}.{check.__name__}"] = Law(check, () if with_te else ranks or (2,), on_one, with_te)
        return check

    return declare


def laws_of(suite: str) -> dict[str, Law]:
    for module in SUITES[suite]:
        importlib.import_module(module)
    return {name: one for name, one in _LAWS.items() if name.partition(".")[0] in SUITES[suite]}


def cases(suite: str) -> list[tuple[int, str]]:
    """Numbers of ranks, and the names of their laws."""
    return [(number, name) for name, one in laws_of(suite).items() for number in _ranks(suite, one)]


def _ranks(suite: str, one: Law) -> tuple[int, ...]:
    """Virtual ranks are one process, however many they are."""
    return (1,) if suite == "virtual" else one.ranks


def check(suite: str, num_ranks: int, name: str) -> None:
    """Fail where a law did not hold, or was not reached."""
    found = _results(suite, num_ranks)
    assert name in found, f"the law did not finish:\n{found['output']}"
    assert found[name] is None, found[name]


@cache
def _results(suite: str, num_ranks: int) -> dict[str, str | None]:
    """{law: error or null} of one job, and what it printed."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}"]
        paths = [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]  # The package need not be installed.
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
        job = subprocess.run([*command, __file__, suite, report], capture_output=True, text=True, timeout=1800, env=env)
        found = json.loads(report.read_text()) if report.exists() else {}
    return {**found, "output": job.stdout[-2000:] + job.stderr[-4000:]}


def run(suite: str, report: Path) -> None:
    """Run a suite's laws on every rank; rank 0 writes {law: error or null}."""
    ranks = join(60)
    # How a BLAS shares a product among threads may change from call to call, and with it the last bit.
    torch.set_num_threads(1)
    all_laws, number = laws_of(suite), ranks.world_size
    is_gpu = ranks.device.type == "cuda"
    if (suite, number) != ("layer", 1):  # Each job would compile for seconds what one shows.
        torch.compiler.set_stance("force_eager")
    lab = sys.modules[SUITES[suite][0]].Lab(ranks)
    results: dict[str, str | None] = {}
    with device_scope(), torch.inference_mode():
        for name, one in all_laws.items():
            if not (one.on_one if is_gpu and number == 1 else number in _ranks(suite, one)):
                continue
            if one.with_te and not HAS_TE:
                continue
            try:
                one.check(lab)
                error = ""
            except Exception:
                error = traceback.format_exc()[-1500:]
            errors = [f"rank {rank}: {text}" for rank, text in enumerate(ranks.all_gather(error)) if text]
            results[name] = "\n".join(errors) or None
            if ranks.is_first:
                report.write_text(json.dumps(results))
    ranks.close()


if __name__ == "__main__":
    importlib.import_module("laws").run(sys.argv[1], Path(sys.argv[2]))  # This is a second copy of that module.
