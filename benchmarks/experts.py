#!/usr/bin/env python
"""How near do the expert backends come to a square matmul? Ratios of one run, on the device that is here.

    python benchmarks/experts.py [--model olmoe-1b-7b] [--tokens 65536] [--rounds 20] [--out DIR]

Every backend computes the same experts on the same rows, interleaved with the square matmul that
is the yardstick. For ``grouped`` its steps are timed too: they say where the rest of the time goes.
Permutations, there and back, stand beside a copy of as many rows as they must read and write.
A copy after each kind of cache flush says what dirty lines cost what is timed behind them.
Prints a table; with --out writes it as experts.csv and the environment beside it.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
import torch
from interleaved import interleaved, keep

from moe_ep_bench.errors import UserError
from moe_ep_bench.kernels.swiglu import weighted_swiglu
from moe_ep_bench.layer.dispatchers import expert_major_pairs, sum_per_token
from moe_ep_bench.layer.experts import DTYPES
from moe_ep_bench.layer.host import device_scope
from moe_ep_bench.layer.megatron import expert_parallel_groups, moe_utils
from moe_ep_bench.layer.parts import Parts
from moe_ep_bench.layer.stack import Stack
from moe_ep_bench.machine import provenance
from moe_ep_bench.models import ModelSpec, load_model
from moe_ep_bench.runtime.ranks import join
from moe_ep_bench.timing.memory import CacheFlush
from moe_ep_bench.timing.timer import clock_for, time_us


@dataclass(frozen=True)
class Contender:
    name: str
    run: Callable[[], object]
    flops: float
    """Floating-point operations of one call; 0 where it is memory that counts."""
    bytes: float = 0.0
    before: Callable[[], object] | None = None
    """Runs ahead of each call, untimed."""


COPY = "copy of permuted rows"
# Of the copy behind a flush: some 20 us of an H100, as a decode step's kernel takes.
SMALL_BYTES = 32 * 2**20


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="olmoe-1b-7b")
    parser.add_argument("--scale", type=float, default=1.0, help="hidden sizes as a share of the true ones")
    parser.add_argument("--tokens", type=int, default=65536)
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="bfloat16")
    parser.add_argument("--skew", type=float, default=1.0, help="fullest expert over the mean, at least 1")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--square", type=int, default=8192, help="size of the square matmul")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(arguments)
    try:
        model = load_model(options.model).scaled(options.scale)
    except ValueError as error:
        print(f"{parser.prog}: --model: {error}", file=sys.stderr)
        return 2
    ranks = join(120)
    with device_scope(), torch.inference_mode():
        contenders = _contenders(model, DTYPES[options.dtype], ranks.device, options)
        contenders += permutations(model, options.tokens, DTYPES[options.dtype], ranks.device)
        contenders += flushes(ranks.device)
        times = timed(contenders, ranks.device, options.rounds)
    table = _table(contenders, times)
    title = f"{model.name} x {model.scale:g}, {options.tokens:,} tokens, {options.dtype}, skew {options.skew:g}"
    print(f"{title}\n{provenance.describe(ranks.device)['device_name']}, medians of {options.rounds} rounds\n")
    print(table.to_string(index=False, float_format="{:.3g}".format))
    if why := no_transformer_engine(ranks.device):
        print(f"\npermute and unpermute, fused: not timed; {why}")
    keep(options.out, "experts", table, ranks.device, title=title)
    ranks.close()
    return 0


def _contenders(
    model: ModelSpec, dtype: torch.dtype, device: torch.device, options: argparse.Namespace
) -> list[Contender]:
    groups = expert_parallel_groups(1, 120)
    counts_E = _counts(model, options.tokens, options.skew)
    num_pairs = int(counts_E.sum())
    generator = torch.Generator(device).manual_seed(0)
    hidden_ND = torch.randn(num_pairs, model.hidden_size, generator=generator, device=device).to(dtype)
    weights_N = torch.rand(num_pairs, generator=generator, device=device)
    flops = 6.0 * num_pairs * model.hidden_size * model.ffn_hidden_size

    square = torch.randn(options.square, options.square, generator=generator, device=device).to(dtype)
    product = torch.empty_like(square)
    contenders = [Contender("square matmul", lambda: torch.mm(square, square, out=product), 2.0 * options.square**3)]
    backends = ["sequential", "grouped"]
    if not no_transformer_engine(device):
        backends.append("te")
    for backend in backends:
        experts = Stack(model, dtype, device, groups, 0, Parts(backend, "indexed")).forms[None].native.experts
        run = lambda experts=experts: experts(hidden_ND, counts_E, weights_N)  # noqa: E731
        contenders.append(Contender(backend, run, flops))
        if backend == "grouped":
            grouped = experts
    ends_E = counts_E.cumsum(0).to(device=device, dtype=torch.int32)
    gate_up_N2F = torch.randn(num_pairs, 2 * model.ffn_hidden_size, generator=generator, device=device).to(dtype)
    activated_NF = weighted_swiglu(gate_up_N2F, weights_N)
    multiply = torch.nn.functional.grouped_mm
    return [
        *contenders,
        Contender(
            "grouped: gate and up GEMM",
            lambda: multiply(hidden_ND, grouped.gate_up_L2FD.transpose(1, 2), offs=ends_E),
            flops * 2 / 3,
        ),
        Contender(
            "grouped: activation",
            lambda: weighted_swiglu(gate_up_N2F, weights_N),
            0.0,
            bytes=gate_up_N2F.nbytes + activated_NF.nbytes + weights_N.nbytes,
        ),
        Contender(
            "grouped: down GEMM",
            lambda: multiply(activated_NF, grouped.down_LDF.transpose(1, 2), offs=ends_E),
            flops / 3,
        ),
    ]


def permutations(model: ModelSpec, num_tokens: int, dtype: torch.dtype, device: torch.device) -> list[Contender]:
    """A copy, then each way to permute tokens of random experts and to sum the rows up again; all move as many bytes.

    A permutation reads T tokens and writes N = T * K rows; the way back reads N and writes T. So the copy is of N + T.
    """
    generator = torch.Generator(device).manual_seed(1)
    hidden_TD = torch.randn(num_tokens, model.hidden_size, generator=generator, device=device).to(dtype)
    scores_TE = torch.rand(num_tokens, model.num_experts, generator=generator, device=device)
    chosen_TK = scores_TE.topk(model.top_k, dim=1).indices
    map_TE = torch.zeros_like(scores_TE, dtype=torch.bool).scatter_(1, chosen_TK, True)
    num_pairs = num_tokens * model.top_k
    rows_ND = hidden_TD.new_zeros(num_tokens + num_pairs, model.hidden_size)
    copied_ND = torch.empty_like(rows_ND)

    def indexed() -> torch.Tensor:
        expert_N, token_N = expert_major_pairs(map_TE, num_pairs)
        permuted_ND = hidden_TD.index_select(0, token_N)
        return sum_per_token(permuted_ND, map_TE, token_N * model.num_experts + expert_N)

    def megatron(fused: bool) -> torch.Tensor:
        permuted = moe_utils.permute(hidden_TD, map_TE, num_out_tokens=num_pairs, fused=fused)
        return moe_utils.unpermute(permuted[0], permuted[2], hidden_TD.shape, routing_map=map_TE, fused=fused)

    ways: dict[str, Callable[[], torch.Tensor]] = {"indexed": indexed, "megatron": lambda: megatron(False)}
    if not no_transformer_engine(device):
        ways["fused"] = lambda: megatron(True)
    moved = 2.0 * rows_ND.nbytes
    return [
        Contender(COPY, lambda: copied_ND.copy_(rows_ND), 0.0, moved),
        *(Contender(f"permute and unpermute, {name}", run, 0.0, moved) for name, run in ways.items()),
    ]


def no_transformer_engine(device: torch.device) -> str:
    """Why Transformer Engine's parts of a layer cannot run here; empty where they can."""
    try:
        Parts.choose("te", on_cpu=device.type == "cpu")
    except UserError as error:
        return str(error)
    return ""


def flushes(device: torch.device) -> list[Contender]:
    """One small copy after a flush that ends with a read-only sweep, and after one that leaves dirty lines."""
    source = torch.zeros(SMALL_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return [
        Contender(f"copy after a flush {name}", lambda: target.copy_(source), 0.0, 2.0 * SMALL_BYTES, flush)
        for name, flush in (
            ("with its sweep", CacheFlush(device)),
            ("without its sweep", CacheFlush(device, sweeps=False)),
        )
    ]


def _counts(model: ModelSpec, num_tokens: int, skew: float) -> torch.Tensor:
    """Rows per expert, int64 [E]: one expert ``skew`` times the mean, the others alike."""
    total = num_tokens * model.top_k
    counts_E = torch.full((model.num_experts,), total // model.num_experts, dtype=torch.int64)
    hot = int(total / model.num_experts * skew)
    counts_E[1:] = (total - hot) // (model.num_experts - 1)
    counts_E[0] = total - int(counts_E[1:].sum())
    return counts_E


def timed(contenders: Sequence[Contender], device: torch.device, rounds: int) -> dict[str, list[float]]:
    """Microseconds of every call, after three that are not counted."""
    clock, by_name = clock_for(device), {contender.name: contender for contender in contenders}

    def measure(name: str, run: Callable[[], object]) -> float:
        if (before := by_name[name].before) is not None:
            before()
        return time_us(run, clock)

    runs = {name: contender.run for name, contender in by_name.items()}
    return interleaved(runs, rounds, measure, uncounted=3)


def _table(contenders: Sequence[Contender], times: dict[str, list[float]]) -> pd.DataFrame:
    medians = {name: statistics.median(values) for name, values in times.items()}
    yardstick = contenders[0].flops / medians[contenders[0].name]
    rows = []
    for contender in contenders:
        median = medians[contender.name]
        permutes = contender.name.startswith("permute")
        rate = contender.flops / median
        rows.append(
            {
                "what": contender.name,
                "ms": median / 1e3,
                "TFLOP/s": rate / 1e6 if contender.flops else float("nan"),
                "of square matmul": rate / yardstick if contender.flops else float("nan"),
                "GB/s": contender.bytes / median / 1e3 if contender.bytes else float("nan"),
                "times the copy": median / medians[COPY] if permutes else float("nan"),
            }
        )
    return pd.DataFrame(rows)


if __name__ == "__main__":
    sys.exit(main())
