"""What holds for a form of a policy in Triton: it routes like the formulation in torch, on the CPU and on a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from policy_cases import Arguments, Spec, context_of, fitted
from torch import Tensor

from moe_ep_bench.kernels.dispatch import triton_twins
from moe_ep_bench.policies import Routing, make_policy


def assert_routes_like_torch(spec: Spec, scores_TE: Tensor, case: Arguments) -> Routing:
    """Equal maps; weights within rounding; statistics, where there are any, equal where their sums are exact.

    The twin is called with statistics of its own making, and with none. It draws what the torch form draws.
    """
    policy = make_policy(fitted(spec, scores_TE, case))
    twin, context = triton_twins()[type(policy)], context_of(case)
    stats_SE = policy.batch_stats(scores_TE, context)
    expected = policy.route(scores_TE, context, stats_SE)
    given = [None]
    if stats_SE is not None:
        ours_SE = twin.stats(policy, scores_TE, context_of(case))
        assert ours_SE.dtype == torch.float64
        torch.testing.assert_close(ours_SE, stats_SE, rtol=1e-12, atol=1e-12)
        given.append(ours_SE)
    for one_SE in given:
        ours = context_of(case)
        assert_same_choice(twin.select(policy, scores_TE, ours, one_SE), expected)
        assert torch.equal(ours.generator.get_state(), context.generator.get_state())
    return expected


def assert_same_choice(ours: Routing, expected: Routing) -> None:
    """The same pairs to the bit; weights within the rounding of a sum of a few float32."""
    assert ours.map_TE.dtype == torch.bool
    assert ours.weights_TE.dtype == torch.float32
    assert torch.equal(ours.map_TE, expected.map_TE)
    torch.testing.assert_close(ours.weights_TE, expected.weights_TE, rtol=2e-6, atol=1e-30)
    assert not ours.weights_TE[~ours.map_TE].any()


def report_of(script_name: str, folder: Path) -> dict[str, Any]:
    """Run a script of this folder in a process of its own, for this one may be the interpreter's; return its report."""
    script = Path(__file__).with_name(script_name)
    environment = {**os.environ, "TRITON_CACHE_DIR": str(folder / "cache"), "PYTHONPATH": str(script.parents[1])}
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, script, folder / "report.json"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{done.stdout[-500:]}{done.stderr[-3000:]}"
    print(done.stdout, done.stderr)
    return json.loads((folder / "report.json").read_text())
