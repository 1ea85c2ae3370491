#!/usr/bin/env python
"""What does routing by each policy cost beside plain top-k? Ratios of one run, on the CPU or on a GPU.

    python benchmarks/policies.py [--gpu] [--quick] [--rounds 7] [--out DIR]

All policies route the same scores, interleaved with the yardsticks: ``torch.topk`` alone, and the straightforward
formulations of Token Drop and Expanded Drop (arXiv 2503.05066, Algorithms 1 and 2: top-k, scatter, top-k over the
tokens of every expert, scatter). Ratios are medians over rounds. On the CPU numba's loops run on one thread and on all.

``--gpu`` times the Triton kernels. First each must choose the same pairs as the formulation in torch (or numba, where
torch would go token by token), on the very scores that are timed; one that does not is not timed. A form is timed as
Python launches it on an idle device (*launched*), which contains the host's time, and as a CUDA graph replays it
(*graph*), which is what the kernels take, and of which ratios are; all else is queued behind a hold of the device.
Torch's form is replayed from a graph too (*torch graph*); where it cannot be captured a line says why.
Rates count the least that must move: scores read, map and weights written, once.

--rehearse runs Triton's interpreter on the CPU at toy sizes: it tries ``--gpu``, and measures nothing.
Exit status: 0 all forms agree, 1 one does not.
"""

from __future__ import annotations

import os
import statistics
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

if "--rehearse" in sys.argv:
    os.environ["TRITON_INTERPRET"] = "1"  # before anything imports triton

import pandas as pd
import torch
from interleaved import device_of, interleaved, keep, median_ratio, parser_of, replayed
from torch import Tensor

from moe_ep_bench import kernels
from moe_ep_bench.config import label_of
from moe_ep_bench.machine import provenance
from moe_ep_bench.policies import POLICIES, Policy, RoutingContext, make_policy
from moe_ep_bench.policies.laser import LoadAwarePolicy
from moe_ep_bench.timing.device import measure_ceilings
from moe_ep_bench.timing.timer import HOLD_US, clock_for, time_us

TOP_K = NUM_RANKS = 8
# Tokens and experts, by what is timed and whether quickly.
DECODE = [(1, 128), (16, 128), (64, 128), (512, 128)]
SHAPES = {
    ("cpu", False): [(65_536, 64), (65_536, 128), (524_288, 64), (524_288, 128), *DECODE],
    ("cpu", True): [(4_096, 64), (64, 128)],
    ("gpu", False): [(65_536, 64), (524_288, 64), (524_288, 128), *DECODE],
    ("gpu", True): [(65_536, 64), (16, 128)],
    ("rehearsal", False): [(70, 16), (4, 16)],
    ("rehearsal", True): [(4, 16)],
}
MOST_DECODE_TOKENS = 1024
# Token by token, for scores of a whole prefill, they would take this script's time on a GPU.
MOST_SEQUENTIAL_TOKENS = 65_536
# What a graph holds of a decode step, so that replaying it takes the host less than the device.
REPEATED = 20

SPECS = [
    {"name": "topk"},
    {"name": "token_drop", "capacity_factor": 1.0},
    {"name": "expanded_drop", "capacity_factor": 1.0},
    {"name": "expert_drop"},
    {"name": "budget_drop", "max_lost_mass": 0.01},
    {"name": "pruned", "k0": 4, "p": 0.7},
    {"name": "oea", "k0": 4},
    {"name": "oea", "k0": 4, "p": 0.7},
    {"name": "laser", "eps_high": 0.5, "t_fix": 0.5, "c": 16},
    {"name": "laser", "eps_high": 0.9, "t_fix": 0.01, "c": 16},
    {"name": "load_only"},
    {"name": "xshare", "k0": 1, "budget": 16},
    {"name": "xshare", "k0": 1, "scope": "request", "request_budget": 2},
    {"name": "xshare", "k0": 1, "scope": "rank", "rank_budget": 4},
    {"name": "lynx", "num_dropped": 8},
    {"name": "dynamic_skip", "beta": 0.3},
]
PLAIN = "torch.topk"
ALGORITHMS = {"token_drop": "Algorithm 1 as published", "expanded_drop": "Algorithm 2 as published"}

Call = Callable[[], Any]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--gpu", action="store_true", help="time the Triton kernels")
    parser.add_argument("--quick", action="store_true", help="few or small shapes")
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args(arguments)
    assert {spec["name"] for spec in SPECS} == POLICIES.keys() - {"sere"}, "sere needs a checkpoint's file"
    by_triton = options.gpu or options.rehearse
    device = device_of(parser, options.rehearse) if by_triton else torch.device("cpu")
    copy_gbps = measure_ceilings(device, torch.float32).copy_gbps if by_triton else None
    print(provenance.describe(device)["device_name"])
    kind = "rehearsal" if options.rehearse else "gpu" if options.gpu else "cpu"
    all_threads, tables, wrong = torch.get_num_threads(), [], []
    with torch.inference_mode():
        for num_threads in [all_threads] if by_triton else sorted({1, all_threads}):
            torch.set_num_threads(num_threads)
            for num_tokens, num_experts in SHAPES[kind, options.quick]:
                bench = Bench(device, num_tokens, num_experts, by_triton)
                title = f"{num_tokens:,} tokens, {num_experts} experts, top-{TOP_K}, {num_threads} threads"
                wrong += [f"{label}: {title}" for label in bench.wrong]
                table = bench.table(options.rounds, copy_gbps)
                print(f"\n{title}\n{table.to_string(index=False, float_format='{:.3g}'.format, na_rep='')}", flush=True)
                about = {"num_tokens": num_tokens, "num_experts": num_experts, "num_threads": num_threads}
                tables.append(table.assign(**about))
                # A later shape that fails costs nothing.
                keep(options.out, "policies_gpu" if by_triton else "policies", pd.concat(tables), device)
    if by_triton:
        print("\n" + (f"DISAGREE, not timed: {'; '.join(wrong)}" if wrong else "all Triton forms agree"))
    return int(bool(wrong))


class Bench:
    """All forms of all policies on the same scores.

    Attributes:
        wrong: labels of the policies whose Triton form fails or chooses other pairs.
    """

    def __init__(self, device: torch.device, num_tokens: int, num_experts: int, by_triton: bool) -> None:
        self.device, self.num_tokens, self.by_triton = device, num_tokens, by_triton
        self.is_decode = num_tokens <= MOST_DECODE_TOKENS
        generator = torch.Generator(device).manual_seed(0)
        logits_TE = torch.randn(num_tokens, num_experts, generator=generator, device=device)
        logits_TE += torch.randn(num_experts, generator=generator, device=device)  # some experts are sought after
        self.scores_TE = logits_TE.softmax(dim=1)
        request_T = torch.arange(num_tokens, device=device) // (1 if by_triton and self.is_decode else 256)
        self.context = RoutingContext(top_k=TOP_K, num_ranks=NUM_RANKS, request_id_T=request_T)
        specs = [{**spec, "c": min(spec["c"], num_experts)} if "c" in spec else spec for spec in SPECS]
        all_timed = not by_triton or num_tokens <= MOST_SEQUENTIAL_TOKENS
        self.policies = [p for p in map(make_policy, specs) if all_timed or not isinstance(p, LoadAwarePolicy)]
        self.compiled = {label_of(policy): self._compiled(policy) for policy in self.policies} if by_triton else {}
        self.wrong = [label_of(policy) for policy in self.policies if by_triton and not self._agrees(policy)]

    def _compiled(self, policy: Policy) -> Call | None:
        module = kernels.triton_forms().get(type(policy))
        by_request = getattr(policy, "scope", None) == "request" and not self.is_decode
        return (
            None if module is None or by_request else partial(module.select, policy, self.scores_TE, self.context, None)
        )

    def _plain(self, policy: Policy) -> Call:
        return lambda: kernels.oracle_for(policy, self.device).select(self.scores_TE, self.context)

    def _agrees(self, policy: Policy) -> bool:
        compiled = self.compiled[label_of(policy)]
        if compiled is None:
            return True
        try:
            ours, expected = compiled(), self._plain(policy)()
            near = torch.allclose(ours.weights_TE, expected.weights_TE, rtol=1e-5, atol=1e-30)
            return near and all(torch.equal(map_TE, ours.map_TE) for map_TE in (compiled().map_TE, expected.map_TE))
        except Exception as error:
            print(f"{label_of(policy)}: {type(error).__name__}: {error}", file=sys.stderr)
            return False

    def _contenders(self) -> dict[tuple[str, str], Call]:
        """The yardsticks and every policy, by label and form."""
        num_local = self.scores_TE.shape[1] // NUM_RANKS
        contenders: dict[tuple[str, str], Call] = {
            (PLAIN, "torch"): lambda: self.scores_TE.topk(TOP_K, dim=1),
            (ALGORITHMS["token_drop"], "torch"): partial(published, self.scores_TE, 0),
            (ALGORITHMS["expanded_drop"], "torch"): partial(published, self.scores_TE, num_local),
        }
        pool = torch.cuda.graph_pool_handle() if self.device.type == "cuda" else None
        for policy in self.policies:
            if not self.by_triton:
                policy.check(self.scores_TE, self.context)
                form = kernels.form_of(policy, "cpu")
                contenders[label_of(policy), form.runs(*self.scores_TE.shape)] = partial(
                    form.select, self.scores_TE, self.context
                )
                continue
            # Seconds on the host, at prefill, that no ratio needs.
            if self.is_decode or not isinstance(policy, LoadAwarePolicy):
                contenders[label_of(policy), "torch"] = self._plain(policy)
                if self.device.type == "cuda" and (captured := self._captured(policy, pool)) is not None:
                    contenders[label_of(policy), "torch graph"] = captured
            compiled = self.compiled[label_of(policy)]
            if compiled is not None and label_of(policy) not in self.wrong:
                contenders[label_of(policy), "launched"] = compiled
                if self.device.type == "cuda":
                    contenders[label_of(policy), "graph"] = replayed(compiled, self._repeated)
        return contenders

    def _captured(self, policy: Policy, pool: Any) -> Call | None:
        """Torch's form from a CUDA graph; None where it cannot be captured, which is said."""
        try:
            return replayed(self._plain(policy), self._repeated, pool)
        except Exception as error:  # the capture's end fails too, and has the cause behind it
            (cause, *_) = str(error.__context__ or error).splitlines()
            print(f"{label_of(policy)}: torch's form is not captured: {cause}", file=sys.stderr)
            return None

    @property
    def _repeated(self) -> int:
        return REPEATED if self.is_decode else 1

    def table(self, rounds: int, copy_gbps: float | None) -> pd.DataFrame:
        """Medians in microseconds and ratios, a row for each policy; ``copy_gbps``: rates are set beside a copy's."""
        clock = clock_for(self.device)

        def measure(name: tuple[str, str], run: Call) -> float:
            taken_us = time_us(run, clock, hold_us=0.0 if name[1] == "launched" else HOLD_US)
            return taken_us / (self._repeated if name[1].endswith("graph") else 1)

        times = interleaved(self._contenders(), rounds, measure)
        rows: dict[str, dict[str, Any]] = {}
        for (label, form), of_form in times.items():
            row = rows.setdefault(label, {"what": label})
            row[f"{form} us"] = statistics.median(of_form)
            if self.by_triton and form.startswith("torch") and label in self.compiled:
                continue
            row["over top-k"] = median_ratio(of_form, times[PLAIN, "torch"])
            if (label, "torch") in times and label in self.compiled:
                row["over torch"] = median_ratio(of_form, times[label, "torch"])
            if (label, "torch graph") in times:
                row["over torch graph"] = median_ratio(of_form, times[label, "torch graph"])
            if (algorithm := ALGORITHMS.get(label.split()[0])) is not None:
                row["over published"] = median_ratio(of_form, times[algorithm, "torch"])
            row["tokens/us"] = self.num_tokens / row[f"{form} us"]
            if copy_gbps is not None and not self.is_decode:
                row["GB/s"] = (4 + 1 + 4) * self.scores_TE.numel() / row[f"{form} us"] / 1e3
                row["of copy"] = row["GB/s"] / copy_gbps
        return pd.DataFrame(rows.values())


def published(scores_TE: Tensor, num_local: int) -> Tensor:
    """Algorithm 1 (no local experts) or 2 of arXiv 2503.05066 with capacity factor 1 for rank 0: weights [T, E]."""
    num_tokens, num_experts = scores_TE.shape
    top = scores_TE.topk(TOP_K, dim=1)
    candidates_TE = torch.zeros_like(scores_TE).scatter(1, top.indices, top.values)
    candidates_TE[:, :num_local] = scores_TE[:, :num_local]
    kept = candidates_TE.topk(num_tokens * TOP_K // num_experts, dim=0)
    return torch.zeros_like(scores_TE).scatter(0, kept.indices, kept.values)


if __name__ == "__main__":
    sys.exit(main())
