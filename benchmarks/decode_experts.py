#!/usr/bin/env python
"""What do a decode step's experts take, over the experts that it activates? The decode kernels beside grouped GEMMs.

    python benchmarks/decode_experts.py [--rounds 30] [--out DIR] [--rehearse]

Two tables per shape, medians of one run, forms interleaved, the cache flushed before every call, each form replayed
from a CUDA graph. First 16 tokens on ever more experts: a line with R2, and its slope as bytes per second beside what
this device reads. Then steps of 1 to 1,024 tokens that choose at random. *decode* is the whole: both products and the
sums per token; *grouped* is given sorted rows and leaves sums to others.

--rehearse runs the CPU's forms at toy sizes without graphs: it tries this script, and measures nothing.
Exit status: 0 all forms agree with a loop over experts, 1 one does not.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pandas as pd
import torch
from interleaved import device_of, interleaved, keep, replayed
from scipy.stats import linregress
from scipy.stats import t as student
from torch import Tensor

from moe_ep_bench.kernels.experts import decode_experts, weighted_swiglu
from moe_ep_bench.layer.experts import TOLERANCE, ExpertWeights, apply_expert
from moe_ep_bench.machine import provenance
from moe_ep_bench.models import ModelSpec, load_model
from moe_ep_bench.timing.device import CacheFlush, measure_ceilings
from moe_ep_bench.timing.timer import clock_for, time_us

# Preset and the ranks among which an expert's FFN is split: the layers of the papers' tables.
LAYERS = (("qwen3-30b-a3b", 1), ("qwen3-235b-a22b", 8), ("gpt-oss-120b", 1))
STEP_TOKENS = 16
ACTIVATED = (8, 16, 32, 49, 64, 96, 128)
TOKENS = (1, 4, 16, 64, 128, 256, 512, 1024)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rehearse", action="store_true", help="toy sizes on the CPU: tries this script")
    options = parser.parse_args(arguments)
    device, dtype = device_of(parser, options.rehearse), torch.float32 if options.rehearse else torch.bfloat16
    read_gbps = measure_ceilings(device, dtype).read_gbps
    print(f"{provenance.describe(device)['device_name']}; it reads {read_gbps:,.0f} GB/s")
    tables, wrong = [], []
    with torch.inference_mode():
        for preset, shard in LAYERS:
            model = load_model(preset).sharded(shard).scaled(1 / 64 if options.rehearse else 1.0)
            bench = Bench(model, device, dtype, options.rounds)
            wrong += bench.check()
            tables += [bench.over_experts(read_gbps), bench.over_tokens()]
            keep(options.out, "decode_experts", pd.concat(tables), device)
            del bench
            if device.type == "cuda":
                torch.cuda.empty_cache()
    print("\n" + ("all forms agree with a loop over experts" if not wrong else f"WRONG: {'; '.join(wrong)}"))
    return int(bool(wrong))


class Bench:
    """Both forms on one layer's experts."""

    def __init__(self, model: ModelSpec, device: torch.device, dtype: torch.dtype, rounds: int) -> None:
        self.model, self.device, self.dtype, self.rounds = model, device, dtype, rounds
        self.generator = torch.Generator(device).manual_seed(0)
        experts, hidden, ffn = model.num_experts, model.hidden_size, model.ffn_hidden_size
        self.gate_up_L2FD = self._normal(experts, 2 * ffn, hidden) * hidden**-0.5
        self.down_LDF = self._normal(experts, hidden, ffn) * ffn**-0.5
        self.flush = CacheFlush(device)
        print(f"\n{model.name}: {experts} experts, top-{model.top_k}, {hidden} x {ffn}, {dtype}")

    def _normal(self, *shape: int) -> Tensor:
        values = torch.empty(shape, dtype=self.dtype, device=self.device)
        for one in values if len(shape) == 3 else (values,):  # expert by expert: no float32 copy of them all
            one.copy_(torch.randn(one.shape, generator=self.generator, device=self.device))
        return values

    def step(self, num_tokens: int, activated: int | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Hidden states, map and weights of a step; every one of ``activated`` experts has a token."""
        experts = self.model.num_experts if activated is None else activated
        keys_TE = torch.rand(num_tokens, experts, generator=self.generator, device=self.device)
        top_k = min(self.model.top_k, experts)
        if activated is not None:  # Tokens in turn take the next ones first: all are taken while there are pairs.
            pair = torch.arange(min(experts, num_tokens * top_k), device=self.device)
            keys_TE[pair // top_k, pair] += 1
        map_TE = torch.zeros(num_tokens, self.model.num_experts, dtype=torch.bool, device=self.device)
        map_TE.scatter_(1, keys_TE.topk(top_k, dim=1).indices, True)
        weights_TE = torch.rand(map_TE.shape, generator=self.generator, device=self.device) * map_TE
        return self._normal(num_tokens, self.model.hidden_size), map_TE, weights_TE

    def forms(self, step: tuple[Tensor, Tensor, Tensor]) -> dict[str, Callable[[], Tensor]]:
        hidden_TD, map_TE, weights_TE = step
        expert_N, token_N = map_TE.T.nonzero(as_tuple=True)
        rows_ND, weights_N = hidden_TD[token_N], weights_TE[token_N, expert_N]
        ends_L = map_TE.sum(0).cumsum(0).to(torch.int32)

        def grouped() -> Tensor:
            multiply = torch.nn.functional.grouped_mm
            gate_up_N2F = multiply(rows_ND, self.gate_up_L2FD.transpose(1, 2), offs=ends_L)
            return multiply(weighted_swiglu(gate_up_N2F, weights_N), self.down_LDF.transpose(1, 2), offs=ends_L)

        return {"decode": lambda: decode_experts(*step, self.gate_up_L2FD, self.down_LDF), "grouped": grouped}

    def check(self) -> list[str]:
        """Which forms are wrong, in words."""
        hidden_TD, map_TE, weights_TE = step = self.step(STEP_TOKENS)
        expert_N, token_N = map_TE.T.nonzero(as_tuple=True)
        rows = [
            apply_expert(hidden_TD[map_TE[:, e]], ExpertWeights(self.gate_up_L2FD[e], self.down_LDF[e]))
            for e in range(self.model.num_experts)
        ]
        expected_ND = torch.cat(rows) * weights_TE[token_N, expert_N].unsqueeze(1)
        expected_TD = torch.zeros(hidden_TD.shape, device=self.device).index_add_(0, token_N, expected_ND)
        wrong = []
        for name, form in self.forms(step).items():
            expected = expected_ND if name == "grouped" else expected_TD
            error = float((form().float() - expected).norm() / expected.norm())
            if error > TOLERANCE[self.dtype]:
                wrong.append(f"{self.model.name}, {name}: off by {error:.2g}")
        return wrong

    def over_experts(self, read_gbps: float) -> pd.DataFrame:
        """Times of 16 tokens on ever more experts, and what the line says."""
        most = min(self.model.num_experts, STEP_TOKENS * self.model.top_k)
        counts = [count for count in ACTIVATED if count <= most]
        table = pd.DataFrame({"activated": count, **self._times(self.step(STEP_TOKENS, count))} for count in counts)
        print(table.to_string(index=False, float_format="{:.1f}".format))
        expert_bytes = 3 * self.model.hidden_size * self.model.ffn_hidden_size * self.dtype.itemsize
        for name in table.columns[1:]:
            line = linregress(table["activated"], table[name])
            rate = expert_bytes / line.slope / 1e3
            half = student.ppf(0.975, len(table) - 2) * line.stderr  # of the slope's 95 % interval
            print(
                f"{name}: {line.intercept:.1f} us + {line.slope:.3f} us [{line.slope - half:.3f},"
                f" {line.slope + half:.3f}] an expert, R2 {line.rvalue**2:.4f}; {rate:,.0f} GB/s,"
                f" {rate / read_gbps:.0%} of what this device reads"
            )
        return table.assign(shape=self.model.name, num_tokens=STEP_TOKENS)

    def over_tokens(self) -> pd.DataFrame:
        """Times of steps whose tokens choose at random."""
        rows = []
        for num_tokens in TOKENS:
            step = self.step(num_tokens)
            mean_rows = num_tokens * self.model.top_k / self.model.num_experts
            about = {"num_tokens": num_tokens, "activated": int(step[1].any(0).sum()), "rows an expert": mean_rows}
            rows.append(about | self._times(step))
        table = pd.DataFrame(rows)
        print(table.to_string(index=False, float_format="{:.2f}".format))
        return table.assign(shape=self.model.name)

    def _times(self, step: tuple[Tensor, Tensor, Tensor]) -> dict[str, float]:
        """Medians in microseconds, forms interleaved."""
        is_gpu, clock = self.device.type == "cuda", clock_for(self.device)

        def measure(_: str, run: Callable[[], object]) -> float:
            self.flush()
            return time_us(run, clock)

        runs = {name: replayed(form) if is_gpu else form for name, form in self.forms(step).items()}
        times = interleaved(runs, self.rounds, measure, uncounted=2)
        return {name: statistics.median(values) for name, values in times.items()}


if __name__ == "__main__":
    sys.exit(main())
