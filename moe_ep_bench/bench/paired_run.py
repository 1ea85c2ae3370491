"""Run a config on real ranks and emulate as many on this machine, for ``analysis.compare`` to set side by side.

Both into one directory, each skipped where it was finished before. The emulation has a process of its own, with as many
compute threads as one real rank has. Its links are those that ``calibrate`` measured between these ranks.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from moe_ep_bench.bench.checks import refuse
from moe_ep_bench.bench.commands import launch
from moe_ep_bench.bench.description import links_facts
from moe_ep_bench.bench.plan import plan
from moe_ep_bench.bench.point import RANKS, VIRTUAL
from moe_ep_bench.config import MEASURED
from moe_ep_bench.errors import CASES_FAILED, OK, UserError, naming
from moe_ep_bench.files import make_folder, writing_to
from moe_ep_bench.results import RunDirectory, ValidationDirectory
from moe_ep_bench.runtime.sharing import Sharing

# What real ranks do, whatever the config would have emulated ones do; links are the config's.
_PLAIN = {"device": MEASURED, "bandwidth_scale": 1, "replication": [], "rebalance": []}


def validate(
    config: Path,
    out: Path,
    overrides: Sequence[str],
    num_ranks: int,
    *,
    force: bool = False,
    margin: float,
    sharing: Sharing | None = None,
) -> int:
    """Measure on ``num_ranks`` real ranks and emulate as many; return the exit status.

    Where real ranks share GPUs (``sharing``), both runs are rehearsed and nothing is compared.
    ``margin`` is by how much speedups may differ and be equivalent; ``analysis.compare`` reads it.

    That is ``OK`` where both runs measured all cases, whatever the verdict; ``CASES_FAILED`` where some could not be;
    else the status of the step that failed.

    Raises:
        ValueError: the config or the directory cannot be used; one line, before anything is run.
    """
    if num_ranks < 2:
        raise UserError(f"--nproc: expected at least 2 ranks to hold emulated ones against, got {num_ranks}")
    plain = [f"emulate.{key}={json.dumps(value)}" for key, value in _PLAIN.items()]
    as_real = [*overrides, f"layer.ep_size={num_ranks}", "measure.launches=1", *plain]
    real = plan(config, overrides, RANKS, num_ranks, sharing=sharing)
    emulated = plan(config, as_real, VIRTUAL)
    every = f"{num_ranks}, which are all ranks, or null"
    with naming(str(config)):
        for comparison in real:
            refuse(comparison.ep_size != num_ranks, "layer.ep_size", every, comparison.ep_size)
    refuse(margin == 0, "--margin", "more than 0", margin)
    files = ValidationDirectory(out)
    if RunDirectory(out).run_json.exists():
        raise UserError(f"--out {out}: holds the results of another command; choose another directory")
    make_folder(out, "--out")
    with writing_to(out, "--out"):
        for report in (files.pairs, files.text, files.table):
            report.unlink(missing_ok=True)  # of runs that may be about to change
    runs = {
        "real": (partial(_run, sharing=sharing), files.real, overrides),
        "emulated": (_emulate, files.emulated, as_real),
    }
    worst = OK
    for what, (take, directory, how) in runs.items():
        step = f"the {what} run on {num_ranks} ranks ({directory})"
        print(f"moe-ep-bench: validate: {step}", file=sys.stderr, flush=True)
        status = take(config, directory, how, num_ranks, force)
        if status not in (OK, CASES_FAILED):
            failed = f"{step} failed with exit status {status}; nothing was compared"
            print(f"moe-ep-bench: validate: {failed}", file=sys.stderr)
            return status
        worst = max(worst, status)
    if sharing is not None:
        why = "real ranks shared a device, so nothing was compared"
        print(f"moe-ep-bench: validate: rehearsal: both runs ended ({files.real}, {files.emulated}); {why}")
        return worst
    pairs = [(ran.comparison_id, other.comparison_id) for ran, other in zip(real, emulated, strict=True)]
    assert emulated[0].links is not None
    files.write_pairs(pairs, links_facts(emulated[0]), margin)
    return worst


def _run(
    config: Path, out: Path, overrides: Sequence[str], num_ranks: int, force: bool, *, sharing: Sharing | None
) -> int:
    return launch(config, out, overrides, num_ranks, force=force, sharing=sharing).status


def _emulate(config: Path, out: Path, overrides: Sequence[str], num_ranks: int, force: bool) -> int:
    """``emulate`` in a process that takes the share of this machine that one of so many ranks has."""
    arguments = ["emulate", str(config), "--out", str(out), *(f"--set={override}" for override in overrides)]
    # What torchrun tells a rank; the process itself is no rank.
    share = {"LOCAL_WORLD_SIZE": str(num_ranks), "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    command = [sys.executable, "-m", "moe_ep_bench", *arguments, *["--force"] * force]
    status = subprocess.run(command, env={**os.environ, **share}, stdout=subprocess.DEVNULL, check=False).returncode
    return 128 - status if status < 0 else status
