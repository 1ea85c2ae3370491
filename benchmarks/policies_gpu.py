#!/usr/bin/env python
"""What does routing by each policy cost on a GPU: as torch operations, as Triton kernels, and inside a CUDA graph?

    python benchmarks/policies_gpu.py [--quick] [--rounds 9] [--out DIR] [--rehearse]

First every Triton form must choose the same pairs as the formulation in torch (or numba, where torch would go token by
token), on the very scores that are timed; one that does not is not timed. Then all forms of all policies run
interleaved with two yardsticks, ``torch.topk`` alone and the published Algorithms 1 and 2 (arXiv 2503.05066). A Triton
form is timed as Python launches it on an idle device and as a CUDA graph replays it: the first contains the host's
time, the second is what the kernels take. All else is queued behind a hold of the device, too. Ratios are of the
second, medians over rounds of one run. Rates count the least that must move: scores read, map and weights written,
once.

--rehearse runs Triton's interpreter on the CPU at toy sizes: it tries this script, and measures nothing.
Exit status: 0 all forms agree, 1 one does not.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

if "--rehearse" in sys.argv:
    os.environ["TRITON_INTERPRET"] = "1"  # before anything imports triton

import pandas as pd
import torch
from interleaved import device_of, interleaved, keep, median_ratio, replayed
from policies import ALGORITHMS, NUM_RANKS, PLAIN, SPECS, TOP_K, published

from moe_ep_bench import kernels
from moe_ep_bench.machine import provenance
from moe_ep_bench.policies import Policy, RoutingContext, make_policy
from moe_ep_bench.policies.laser import LoadAwarePolicy
from moe_ep_bench.timing.device import measure_ceilings
from moe_ep_bench.timing.timer import HOLD_US, clock_for, time_us

PREFILL = [(65_536, 64), (524_288, 64), (524_288, 128)]
DECODE = [(1, 128), (16, 128), (64, 128), (512, 128)]
QUICK = [(65_536, 64), (16, 128)]
REHEARSAL = [(70, 16), (4, 16)]
MOST_DECODE_TOKENS = 1024
# Token by token, for scores of a whole prefill, they would take this script's time.
MOST_SEQUENTIAL_TOKENS = 65_536
# What a graph holds of a decode step, so that replaying it takes the host less than the device.
REPEATED = 20


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="one prefill and one decode shape")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rehearse", action="store_true", help="toy sizes on the CPU: tries this script")
    options = parser.parse_args(arguments)
    device = device_of(parser, options.rehearse)
    copy_gbps = measure_ceilings(device, torch.float32).copy_gbps
    print(f"{provenance.describe(device)['device_name']}; a copy moves {copy_gbps:,.0f} GB/s")
    if options.rehearse:
        shapes = REHEARSAL[-1:] if options.quick else REHEARSAL
    else:
        shapes = QUICK if options.quick else [*PREFILL, *DECODE]
    tables: list[pd.DataFrame] = []
    disagreeing: list[str] = []
    with torch.inference_mode():
        for num_tokens, num_experts in shapes:
            bench = Bench(device, num_tokens, num_experts)
            wrong = bench.check()
            disagreeing += [f"{label} at T = {num_tokens:,}, E = {num_experts}" for label in wrong]
            table = bench.table(options.rounds, copy_gbps)
            print(f"\n{num_tokens:,} tokens, {num_experts} experts, top-{TOP_K}")
            print(table.to_string(index=False, float_format="{:.3g}".format, na_rep=""), flush=True)
            tables.append(table.assign(num_tokens=num_tokens, num_experts=num_experts))
            keep(options.out, "policies_gpu", pd.concat(tables), device)  # a later shape that fails costs nothing
    print("\n" + ("all Triton forms agree" if not disagreeing else f"DISAGREE, not timed: {'; '.join(disagreeing)}"))
    return int(bool(disagreeing))


class Bench:
    """All forms of all policies on the same scores."""

    def __init__(self, device: torch.device, num_tokens: int, num_experts: int) -> None:
        self.device, self.num_tokens, self.num_experts = device, num_tokens, num_experts
        generator = torch.Generator(device).manual_seed(0)
        logits_TE = torch.randn(num_tokens, num_experts, generator=generator, device=device)
        logits_TE += torch.randn(num_experts, generator=generator, device=device)  # some experts are sought after
        self.scores_TE = logits_TE.softmax(dim=1)
        request_T = torch.arange(num_tokens, device=device) // (1 if num_tokens <= MOST_DECODE_TOKENS else 256)
        self.context = RoutingContext(top_k=TOP_K, num_ranks=NUM_RANKS, request_id_T=request_T)
        specs = [{**spec, "c": min(spec["c"], num_experts)} if "c" in spec else spec for spec in SPECS]
        few = num_tokens <= MOST_SEQUENTIAL_TOKENS
        self.policies = [one for one in map(make_policy, specs) if few or not isinstance(one, LoadAwarePolicy)]
        self.wrong: list[str] = []

    def _triton(self, policy: Policy) -> Callable[[], Any] | None:
        twin = kernels.triton_twins().get(type(policy))
        by_request = getattr(policy, "scope", None) == "request" and self.num_tokens > MOST_DECODE_TOKENS
        return None if twin is None or by_request else lambda: twin.select(policy, self.scores_TE, self.context, None)

    def _plain(self, policy: Policy) -> Callable[[], Any]:
        return lambda: kernels.oracle_for(policy, self.device).select(self.scores_TE, self.context)

    def check(self) -> list[str]:
        """Labels of the policies whose Triton form fails or chooses other pairs; they are not timed."""
        for policy in self.policies:
            compiled = self._triton(policy)
            if compiled is None:
                continue
            try:
                ours, expected = compiled(), self._plain(policy)()
                near = torch.allclose(ours.weights_TE, expected.weights_TE, rtol=1e-5, atol=1e-30)
                same_again = torch.equal(compiled().map_TE, ours.map_TE)
                agrees = near and same_again and torch.equal(ours.map_TE, expected.map_TE)
            except Exception as error:
                print(f"{policy.label}: {type(error).__name__}: {error}", file=sys.stderr)
                agrees = False
            if not agrees:
                self.wrong.append(policy.label)
        return self.wrong

    def table(self, rounds: int, copy_gbps: float) -> pd.DataFrame:
        """Medians in microseconds, a row per policy, a column per form."""
        is_decode = self.num_tokens <= MOST_DECODE_TOKENS
        contenders: dict[tuple[str, str], Callable[[], Any]] = {
            (PLAIN, "torch"): lambda: self.scores_TE.topk(TOP_K, dim=1),
            (ALGORITHMS["token_drop"], "torch"): lambda: published(self.scores_TE, 0),
            (ALGORITHMS["expanded_drop"], "torch"): lambda: published(self.scores_TE, self.num_experts // NUM_RANKS),
        }
        repeated = REPEATED if is_decode else 1
        for policy in self.policies:
            # Seconds on the host, at prefill, that no ratio needs.
            if is_decode or not isinstance(policy, LoadAwarePolicy):
                contenders[policy.label, "torch"] = self._plain(policy)
            compiled = self._triton(policy)
            if compiled is not None and policy.label not in self.wrong:
                contenders[policy.label, "launched"] = compiled
                if self.device.type == "cuda":
                    contenders[policy.label, "graph"] = replayed(compiled, repeated)
        clock = clock_for(self.device)

        def measure(name: tuple[str, str], run: Callable[[], Any]) -> float:
            hold_us = 0.0 if name[1] == "launched" else HOLD_US
            return time_us(run, clock, hold_us=hold_us) / (repeated if name[1] == "graph" else 1)

        times = interleaved(contenders, rounds, measure)
        least_bytes = (4 + 1 + 4) * self.scores_TE.numel()
        rows = []
        for label in dict.fromkeys(label for label, _ in contenders):
            row: dict[str, Any] = {"what": label}
            for form in ("torch", "launched", "graph"):
                if (label, form) in times:
                    row[f"{form} us"] = statistics.median(times[label, form])
            best = times.get((label, "graph"), times.get((label, "launched")))
            if best is not None:
                if (label, "torch") in times:
                    row["over torch"] = median_ratio(best, times[label, "torch"])
                row["over top-k"] = median_ratio(best, times[PLAIN, "torch"])
                algorithm = ALGORITHMS.get(label.split()[0])
                if algorithm is not None:
                    row["over published"] = median_ratio(best, times[algorithm, "torch"])
                if not is_decode:
                    row["GB/s"] = least_bytes / statistics.median(best) / 1e3
                    row["of copy"] = row["GB/s"] / copy_gbps
            rows.append(row)
        return pd.DataFrame(rows)


if __name__ == "__main__":
    sys.exit(main())
