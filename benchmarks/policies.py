#!/usr/bin/env python
"""What does routing by each policy cost beside plain top-k? Ratios of one run, on the CPU.

    python benchmarks/policies.py [--quick] [--rounds 7] [--out DIR]

All policies route the same scores, interleaved with the yardsticks: ``torch.topk`` alone, and the
straightforward formulations of Token Drop and Expanded Drop (arXiv 2503.05066, Algorithms 1 and 2:
top-k, scatter, top-k over the tokens of every expert, scatter). Prefill and decode shapes, on one
thread and on all. Machines with other work on them: trust the ratios, not the milliseconds.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pandas as pd
import torch
from interleaved import interleaved, keep, median_ratio
from torch import Tensor

from moe_ep_bench.kernels import form_of
from moe_ep_bench.policies import POLICIES, RoutingContext, make_policy

TOP_K = 8
NUM_RANKS = 8
PREFILL = [(65_536, 64), (65_536, 128), (524_288, 64), (524_288, 128)]
DECODE = [(1, 128), (8, 128), (64, 128), (512, 128)]
QUICK = [(4_096, 64), (64, 128)]

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


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="small shapes, to see that it works")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(arguments)
    assert {spec["name"] for spec in SPECS} == POLICIES.keys() - {"sere"}, "sere needs a checkpoint's file"
    all_threads = torch.get_num_threads()
    tables = []
    for num_threads in sorted({1, all_threads}):
        torch.set_num_threads(num_threads)
        for num_tokens, num_experts in QUICK if options.quick else [*PREFILL, *DECODE]:
            table = _table(interleaved(_contenders(num_tokens, num_experts), options.rounds, _seconds), num_tokens)
            print(f"\n{num_tokens:,} tokens, {num_experts} experts, top-{TOP_K}, {num_threads} threads")
            print(table.to_string(index=False, float_format="{:.3g}".format, na_rep=""), flush=True)
            tables.append(table.assign(num_tokens=num_tokens, num_experts=num_experts, num_threads=num_threads))
    keep(options.out, "policies", pd.concat(tables), torch.device("cpu"))
    return 0


def _contenders(num_tokens: int, num_experts: int) -> dict[str, Callable[[], object]]:
    """The yardsticks and every policy, by label, on the same scores."""
    generator = torch.Generator().manual_seed(0)
    logits_TE = torch.randn(num_tokens, num_experts, generator=generator)
    logits_TE += torch.randn(num_experts, generator=generator)  # some experts are sought after
    scores_TE = logits_TE.softmax(dim=1)
    context = RoutingContext(
        top_k=TOP_K, num_ranks=NUM_RANKS, generator=generator, request_id_T=torch.arange(num_tokens) // 256
    )
    contenders: dict[str, Callable[[], object]] = {
        PLAIN: lambda: scores_TE.topk(TOP_K, dim=1),
        ALGORITHMS["token_drop"]: lambda: published(scores_TE, num_local=0),
        ALGORITHMS["expanded_drop"]: lambda: published(scores_TE, num_local=num_experts // NUM_RANKS),
    }
    for policy in map(make_policy, SPECS):
        policy.check(scores_TE, context)
        contenders[policy.label] = functools.partial(form_of(policy, "cpu").select, scores_TE, context)
    return contenders


def published(scores_TE: Tensor, num_local: int) -> Tensor:
    """Algorithm 1 (no local experts) or 2 of arXiv 2503.05066 with capacity factor 1 for rank 0: weights [T, E]."""
    num_tokens, num_experts = scores_TE.shape
    top = scores_TE.topk(TOP_K, dim=1)
    candidates_TE = torch.zeros_like(scores_TE).scatter(1, top.indices, top.values)
    candidates_TE[:, :num_local] = scores_TE[:, :num_local]
    kept = candidates_TE.topk(num_tokens * TOP_K // num_experts, dim=0)
    return torch.zeros_like(scores_TE).scatter(0, kept.indices, kept.values)


def _seconds(_: str, run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def _table(times: dict[str, list[float]], num_tokens: int) -> pd.DataFrame:
    """Medians; ratios are medians over rounds, so that a disturbance strikes both sides."""
    rows = []
    for name, seconds in times.items():
        ratios = {"over top-k": times[PLAIN]}
        algorithm = ALGORITHMS.get(name.split()[0])
        if algorithm is not None:
            ratios["over published"] = times[algorithm]
        medians = {column: median_ratio(seconds, yardstick) for column, yardstick in ratios.items()}
        median = statistics.median(seconds)
        rows.append({"what": name, "ms": 1e3 * median, "tokens/us": num_tokens / median / 1e6, **medians})
    return pd.DataFrame(rows)


if __name__ == "__main__":
    sys.exit(main())
