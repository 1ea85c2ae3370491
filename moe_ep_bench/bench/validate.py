"""Run a config on real ranks and emulate as many on this machine, for ``analysis.validate`` to compare.

Both into one directory, each skipped where it was finished before. The emulation has a process of its own, with as many
compute threads as one real rank has. Its links are those that ``calibrate`` measured between these ranks.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from moe_ep_bench.bench import checks
from moe_ep_bench.bench.comparison import RANKS, VIRTUAL, Comparison
from moe_ep_bench.bench.plan import plan
from moe_ep_bench.bench.run import launch
from moe_ep_bench.config import EmulateConfig
from moe_ep_bench.errors import CASES_FAILED, OK, UserError, naming
from moe_ep_bench.files import make_folder, writing_to
from moe_ep_bench.results import RunDirectory, ValidationDirectory


def validate(
    config: Path,
    out: Path,
    overrides: Sequence[str],
    num_ranks: int,
    *,
    force: bool = False,
    margin: float,
) -> int:
    """Measure on ``num_ranks`` real ranks and emulate as many; return the exit status.

    ``margin`` is by how much speedups may differ and be equivalent; ``analysis.validate`` reads it.

    That is ``OK`` where both runs measured all cases, whatever the verdict; ``CASES_FAILED`` where some could not be;
    else the status of the step that failed.

    Raises:
        ValueError: the config or the directory cannot be used; one line, before anything is run.
    """
    if num_ranks < 2:
        raise UserError(f"--nproc: expected at least 2 ranks to hold emulated ones against, got {num_ranks}")
    real = plan(config, overrides, RANKS, num_ranks)
    with naming(str(config)):
        for comparison in real:
            _check_comparable(comparison, num_ranks)
    # JSON is YAML whatever characters a path has.
    alike = {"layer.ep_size": num_ranks, "measure.launches": 1}
    as_real = [*overrides, *(f"{key}={json.dumps(value)}" for key, value in alike.items())]
    emulated, files = plan(config, as_real, VIRTUAL), ValidationDirectory(out)
    if RunDirectory(out).run_json.exists():
        raise UserError(f"--out {out}: holds the results of another command; choose another directory")
    make_folder(out, "--out")
    with writing_to(out, "--out"):
        for report in (files.pairs, files.text, files.table):
            report.unlink(missing_ok=True)  # of runs that may be about to change
    steps: dict[str, Callable[[], int]] = {
        f"the real run on {num_ranks} ranks ({files.real})": lambda: (
            launch(config, files.real, overrides, num_ranks, force=force).status
        ),
        f"the emulated run ({files.emulated})": partial(
            _emulate, config, files.emulated, as_real, num_ranks, force=force
        ),
    }
    worst = OK
    for step, take in steps.items():
        print(f"moe-ep-bench: validate: {step}", file=sys.stderr, flush=True)
        status = take()
        if status not in (OK, CASES_FAILED):
            failed = f"{step} failed with exit status {status}; nothing was compared"
            print(f"moe-ep-bench: validate: {failed}", file=sys.stderr)
            return status
        worst = max(worst, status)
    pairs = [(ran.comparison_id, other.comparison_id) for ran, other in zip(real, emulated, strict=True)]
    assert emulated[0].links is not None
    files.write_pairs(pairs, emulated[0].links.describe(), margin)
    return worst


def _emulate(config: Path, out: Path, overrides: Sequence[str], num_ranks: int, *, force: bool) -> int:
    """``emulate`` in a process that takes the share of this machine that one of so many ranks has."""
    arguments = ["emulate", str(config), "--out", str(out), *(f"--set={override}" for override in overrides)]
    # What torchrun tells a rank; the process itself is no rank.
    share = {"LOCAL_WORLD_SIZE": str(num_ranks), "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    command = [sys.executable, "-m", "moe_ep_bench", *arguments, *["--force"] * force]
    status = subprocess.run(command, env={**os.environ, **share}, stdout=subprocess.DEVNULL, check=False).returncode
    return 128 - status if status < 0 else status


def _check_comparable(comparison: Comparison, num_ranks: int) -> None:
    """Refuse what real ranks would not do as emulated ones are asked to."""
    every = f"{num_ranks}, which are all ranks, or null"
    checks.refuse(comparison.ep_size != num_ranks, "layer.ep_size", every, comparison.ep_size)
    plain = EmulateConfig().model_dump()
    for key, value in comparison.experiment.emulate.model_dump(exclude={"links"}).items():
        checks.refuse(
            value != plain[key], f"emulate.{key}", f"{plain[key]!r}, which is what real ranks do", repr(value)
        )
