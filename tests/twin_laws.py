"""What holds for a compiled twin of a policy: it routes like the formulation in torch, on the CPU and on a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from policy_cases import Arguments, Spec, context_of, fitted
from torch import Tensor

from moe_ep_bench.policies import Policy, Routing, RoutingContext, make_policy

Select = Callable[[Policy, Tensor, RoutingContext, Tensor | None], Routing]
Stats = Callable[[Policy, Tensor, RoutingContext], Tensor]


def assert_routes_like_torch(
    select: Select, stats: Stats | None, spec: Spec, scores_TE: Tensor, case: Arguments
) -> None:
    """Equal maps; weights within rounding; statistics, where there are any, equal where their sums are exact.

    The twin is called with statistics of its own making, and with none.
    """
    policy = make_policy(fitted(spec, scores_TE, case))
    stats_SE = policy.batch_stats(scores_TE, context_of(case))
    expected = policy.route(scores_TE, context_of(case), stats_SE)
    given = [None]
    if stats is not None:
        ours_SE = stats(policy, scores_TE, context_of(case))
        assert ours_SE.dtype == torch.float64
        torch.testing.assert_close(ours_SE, stats_SE, rtol=1e-12, atol=1e-12)
        given.append(ours_SE)
    for one_SE in given:
        assert_same_choice(select(policy, scores_TE, context_of(case), one_SE), expected)


def assert_same_choice(ours: Routing, expected: Routing) -> None:
    """The same pairs to the bit; weights within the rounding of a sum of a few float32."""
    assert ours.map_TE.dtype == torch.bool
    assert ours.weights_TE.dtype == torch.float32
    assert torch.equal(ours.map_TE, expected.map_TE)
    torch.testing.assert_close(ours.weights_TE, expected.weights_TE, rtol=2e-6, atol=1e-30)
    assert not ours.weights_TE[~ours.map_TE].any()


def report_of(script_name: str, folder: Path, *arguments: Path) -> dict[str, Any]:
    """Run a script of this folder in a process of its own, for this one may be the interpreter's; return its report."""
    script = Path(__file__).with_name(script_name)
    environment = {**os.environ, "TRITON_CACHE_DIR": str(folder / "cache"), "PYTHONPATH": str(script.parents[1])}
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, script, folder / "report.json", *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{done.stdout[-500:]}{done.stderr[-3000:]}"
    print(done.stdout, done.stderr)
    return json.loads((folder / "report.json").read_text())
