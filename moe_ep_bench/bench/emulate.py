"""``emulate``: one device stands in for all expert-parallel ranks, one after another.

For each batch every virtual rank runs the same layer on its own tokens, with as many rows arriving
at its experts as all ranks' routing would send it (``layer.virtual``). What it takes is measured with the
same phases and clock as in ``run``; the runs are then set side by side (``cost_model.timeline``), where
waiting appears, and what moves between ranks is modelled from the bytes (``links``). With ``emulate.device``
nothing is run, and the phases are modelled too (``cost_model.layer``).

Before anything is timed, the same policies on the same number of ranks are held against the dense
reference at a small hidden size, with real rows in the exchange.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from moe_ep_bench.bench.plan import VIRTUAL, Plan, plan
from moe_ep_bench.bench.run import dry_run_virtual, emulate_plan


def plan_virtual(config: Path, overrides: Sequence[str]) -> Plan:
    """Plan a config for this device; ValueError where it does not fit."""
    return plan(config, overrides, VIRTUAL, on_cpu=not torch.cuda.is_available())


def emulate(config: Path, out: Path, overrides: Sequence[str], *, force: bool = False) -> int:
    """Measure all comparisons of ``config`` on virtual ranks; return the exit status, 128 + signal where one ended it.

    Raises:
        ValueError: the config cannot be used; one line.
    """
    return emulate_plan(plan_virtual(config, overrides), out, force=force)


def dry_run(config: Path, overrides: Sequence[str]) -> int:
    """Print the cases and how often a layer would be run; run nothing."""
    return dry_run_virtual(plan_virtual(config, overrides))
