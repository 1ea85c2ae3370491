#!/usr/bin/env python
"""How near do the expert backends come to a square matmul? Ratios of one run, on the device that is here.

    python benchmarks/experts.py [--model olmoe-1b-7b] [--tokens 65536] [--out DIR] [--rehearse]

Every backend computes the same experts on the same rows, interleaved with the square matmul that is the yardstick.
Permutations, there and back, stand beside a copy of as many rows as they must read and write. Prints a table; with
--out writes it as experts.csv and the environment beside it. --rehearse takes toy sizes in float32.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import pandas as pd
import torch
from interleaved import interleaved, keep

from moe_ep_bench.errors import UserError
from moe_ep_bench.layer.dispatchers import expert_major_pairs, sum_per_token
from moe_ep_bench.layer.host import device_scope
from moe_ep_bench.layer.megatron import expert_parallel_groups, moe_utils
from moe_ep_bench.layer.parts import Parts
from moe_ep_bench.layer.stack import Stack
from moe_ep_bench.machine import provenance
from moe_ep_bench.models import ModelSpec, load_model
from moe_ep_bench.runtime.ranks import join
from moe_ep_bench.timing.timer import clock_for, time_us


class Contender(NamedTuple):
    run: Callable[[], object]
    flops: float = 0.0
    """Floating-point operations of one call; 0 where it is memory that counts."""
    bytes: float = 0.0


SQUARE, COPY = "square matmul", "copy of permuted rows"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="olmoe-1b-7b")
    parser.add_argument("--tokens", type=int, default=65536)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rehearse", action="store_true", help="toy sizes: tries this script")
    options = parser.parse_args(arguments)
    small = options.rehearse
    model, num_tokens = load_model(options.model).scaled(1 / 32 if small else 1.0), 512 if small else options.tokens
    ranks = join(120)
    device, dtype, rounds = ranks.device, torch.float32 if small else torch.bfloat16, 3 if small else 20
    with device_scope(), torch.inference_mode():
        contenders = backends(model, num_tokens, dtype, device, 256 if small else 8192)
        contenders |= permutations(model, num_tokens, dtype, device)
        clock, runs = clock_for(device), {name: contender.run for name, contender in contenders.items()}
        times = interleaved(runs, rounds, lambda _, run: time_us(run, clock), uncounted=3)
    table = compared(contenders, {name: statistics.median(values) for name, values in times.items()})
    title = f"{model.name} x {model.scale:g}, {num_tokens:,} tokens, {dtype}"
    print(f"{title}\n{provenance.describe(device)['device_name']}, medians of {rounds} rounds\n")
    print(table.to_string(index=False, float_format="{:.3g}".format))
    if why := no_transformer_engine(device):
        print(f"\npermute and unpermute, fused: not timed; {why}")
    keep(options.out, "experts", table, device, title=title)
    ranks.close()
    return 0


def backends(
    model: ModelSpec, num_tokens: int, dtype: torch.dtype, device: torch.device, square_size: int
) -> dict[str, Contender]:
    """The yardstick, and every backend on equally many rows an expert."""
    groups = expert_parallel_groups(1, 120)
    counts_E = torch.full((model.num_experts,), num_tokens * model.top_k // model.num_experts)
    num_pairs = int(counts_E.sum())
    generator = torch.Generator(device).manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device).to(dtype)

    hidden_ND, square = normal(num_pairs, model.hidden_size), normal(square_size, square_size)
    weights_N = torch.rand(num_pairs, generator=generator, device=device)
    flops = 6.0 * num_pairs * model.hidden_size * model.ffn_hidden_size
    product = torch.empty_like(square)
    contenders = {SQUARE: Contender(lambda: torch.mm(square, square, out=product), 2.0 * square_size**3)}
    for backend in ("sequential", *([] if no_transformer_engine(device) else ["te"]), "grouped"):
        experts = Stack(model, dtype, device, groups, 0, Parts(backend)).forms[None].native.experts
        contenders[backend] = Contender(lambda experts=experts: experts(hidden_ND, counts_E, weights_N), flops)
    return contenders


def permutations(model: ModelSpec, num_tokens: int, dtype: torch.dtype, device: torch.device) -> dict[str, Contender]:
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
    ways = {f"permute and unpermute, {name}": run for name, run in ways.items()}
    ways = {COPY: lambda: copied_ND.copy_(rows_ND), **ways}
    return {name: Contender(run, bytes=2.0 * rows_ND.nbytes) for name, run in ways.items()}


def no_transformer_engine(device: torch.device) -> str:
    """Why Transformer Engine's parts of a layer cannot run here; empty where they can."""
    try:
        Parts.choose("te", on_cpu=device.type == "cpu")
    except UserError as error:
        return str(error)
    return ""


def compared(contenders: dict[str, Contender], median_us: dict[str, float]) -> pd.DataFrame:
    """A row for each contender: rates, beside the square matmul's and the copy's."""
    table = pd.DataFrame([one._asdict() for one in contenders.values()], index=[*contenders]).drop(columns="run")
    us = pd.Series(median_us)
    flops, num_bytes = (table[name].where(table[name] > 0) for name in ("flops", "bytes"))
    columns = {
        "ms": us / 1e3,
        "TFLOP/s": flops / us / 1e6,
        "of square matmul": flops / us / (flops[SQUARE] / us[SQUARE]),
        "GB/s": num_bytes / us / 1e3,
        "times the copy": (us / us[COPY]).where(us.index.str.startswith("permute")),
    }
    return pd.DataFrame(columns).rename_axis("what").reset_index()


if __name__ == "__main__":
    sys.exit(main())
