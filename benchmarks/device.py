#!/usr/bin/env python
"""What a file of data/devices/ states, measured on the GPU that is here: experts, permutation, routing, attention.

    python benchmarks/device.py [--out DIR] [--rehearse]
    python benchmarks/device.py --fit device.csv [--device NAME]    # anywhere: the figures of a file, and their errors

Experts stand as in moe_perf.parquet (cost_model/tables.py): one GPU in the place of rank 0 of ``ep_size``, with the
pairs of its own experts under ``balanced`` scores, and as many pairs under a power law. Rows of experts hold no
permutation. Policies are replayed from CUDA graphs. Times are medians in microseconds, of forms interleaved. Prints a
summary; with --out writes device.csv, a row for each point, and the environment beside it.

--rehearse runs toy sizes on the CPU: it tries this script, and measures nothing.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import torch
from interleaved import device_of, interleaved, keep, replayed
from numpy.typing import NDArray
from tables import as_yaml, fit_roofline

from moe_ep_bench.cost_model.devices import Device
from moe_ep_bench.cost_model.expert_table import balanced_loads
from moe_ep_bench.cost_model.tables import BALANCED
from moe_ep_bench.kernels import form_of
from moe_ep_bench.layer.attention import SdpaAttention
from moe_ep_bench.layer.backends import GroupedExperts
from moe_ep_bench.layer.dispatchers import expert_major_pairs, sum_per_token
from moe_ep_bench.machine import provenance
from moe_ep_bench.models import ModelSpec, load_model
from moe_ep_bench.policies import RoutingContext, make_policy
from moe_ep_bench.timing.device import measure_ceilings
from moe_ep_bench.timing.timer import clock_for, time_us

MODELS = ("olmoe-1b-7b", "deepseek-v2-lite", "qwen3-30b-a3b", "mixtral-8x7b", "gpt-oss-120b", "qwen3-235b-a22b",
          "deepseek-v3")  # fmt: skip
EP_SIZES = (1, 8, 32)
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
SKEWED = "power_law_1.01"
# Pairs times hidden size of the largest point: what rows and activations take, beside weights of up to 45 GB.
MOST_VALUES = 2**30
SCORES = ((1024, 64), (16_384, 64), (65_536, 64), (524_288, 64), (16_384, 128), (131_072, 128), (16_384, 256))
PROMPTS = ((32, 512), (8, 2048), (2, 8192))  # requests, tokens of each

Runs = dict[str, Callable[[], object]]
Row = dict[str, Any]


class Bench:
    """A device, and how its points are timed."""

    def __init__(self, device: torch.device, rehearse: bool) -> None:
        self.device, self.rounds, self.rehearse = device, 1 if rehearse else 7, rehearse
        self.dtype = torch.float32 if rehearse else torch.bfloat16
        self.generator = torch.Generator(device).manual_seed(0)
        self.clock = clock_for(device)

    def normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.generator, device=self.device, dtype=self.dtype)

    def timed(self, runs: Runs, about: Row) -> Iterator[Row]:
        """A row for each form: its median, and the least and most of all rounds."""
        times = interleaved(runs, self.rounds, lambda _, run: time_us(run, self.clock), uncounted=2)
        for form, values in times.items():
            yield {**about, "form": form, "us": statistics.median(values), "least": min(values), "most": max(values)}

    def experts(self, model: ModelSpec) -> Iterator[Row]:
        """Experts of a rank of each EP size, at ever more rows of each."""
        hidden, ffn = model.hidden_size, model.ffn_hidden_size
        config = SimpleNamespace(
            moe_ffn_hidden_size=ffn,
            hidden_size=hidden,
            use_cpu_initialization=self.device.type == "cpu",
            params_dtype=self.dtype,
        )
        for ep_size in EP_SIZES:
            if model.num_experts % ep_size or model.num_experts // ep_size < 2:
                continue
            num_local = model.num_experts // ep_size
            grouped = GroupedExperts(num_local, config)
            for matrices in (grouped.gate_up_L2FD, grouped.down_LDF):
                for matrix in matrices:
                    matrix.normal_(std=matrix.shape[1] ** -0.5, generator=self.generator)
            for rows in ROWS[:: 4 if self.rehearse else 1]:
                num_tokens = rows * model.num_experts // model.top_k
                if rows * num_local * hidden > MOST_VALUES or (self.rehearse and rows > 64):
                    break
                for loads_L, name in loads(model, ep_size, num_tokens):
                    pairs = int(loads_L.sum())
                    hidden_ND, counts_L = self.normal(pairs, hidden), torch.as_tensor(loads_L).to(self.device)
                    weights_N = torch.rand(pairs, generator=self.generator, device=self.device)
                    runs: Runs = {"grouped": partial(grouped, hidden_ND, counts_L, weights_N)}
                    shape = {"model": model.name, "hidden_size": hidden, "ffn_hidden_size": ffn}
                    shape |= {"num_experts": model.num_experts, "top_k": model.top_k, "ep_size": ep_size}
                    told = {"num_tokens": num_tokens, "distribution": name, "pairs": pairs, "fullest": loads_L.max()}
                    flops = 6.0 * pairs * hidden * ffn
                    yield from self.timed(runs, {"what": "experts", **shape, **told, "flops": flops})

    def permutation(self, model: ModelSpec) -> Iterator[Row]:
        """Rows to their experts, and summed up again: T tokens read, N rows written, and back."""
        for num_tokens in (64, 2048) if self.rehearse else (64, 1024, 8192, 65_536):
            if num_tokens * model.top_k * model.hidden_size > MOST_VALUES:
                continue
            hidden_TD, num_pairs = self.normal(num_tokens, model.hidden_size), num_tokens * model.top_k
            scores_TE = torch.rand(num_tokens, model.num_experts, generator=self.generator, device=self.device)
            map_TE = torch.zeros_like(scores_TE, dtype=torch.bool)
            map_TE.scatter_(1, scores_TE.topk(model.top_k, dim=1).indices, True)
            expert_N, token_N = expert_major_pairs(map_TE, num_pairs)
            key_N, rows_ND = token_N * model.num_experts + expert_N, hidden_TD.index_select(0, token_N)
            runs: Runs = {
                "pairs by expert": lambda: expert_major_pairs(map_TE, num_pairs),  # noqa: B023
                "permute": lambda: hidden_TD.index_select(0, token_N),  # noqa: B023
                "unpermute": lambda: sum_per_token(rows_ND, map_TE, key_N),  # noqa: B023
            }
            num_bytes = float(hidden_TD.nbytes + rows_ND.nbytes)
            shape = {"model": model.name, "hidden_size": model.hidden_size, "num_experts": model.num_experts}
            about = {"what": "permutation", **shape, "top_k": model.top_k, "num_tokens": num_tokens, "bytes": num_bytes}
            yield from self.timed(runs, about)

    def routing(self) -> Iterator[Row]:
        """The model's own top-k, and Token Drop and Expanded Drop by the form that a layer runs."""
        for num_tokens, num_experts in ((64, 16),) if self.rehearse else SCORES:
            logits_TE = torch.randn(num_tokens, num_experts, generator=self.generator, device=self.device)
            scores_TE = logits_TE.softmax(dim=1)
            context = RoutingContext(top_k=8, num_ranks=8)
            runs: Runs = {"torch top-k": lambda: scores_TE.topk(8, dim=1)}  # noqa: B023
            for name in ("topk", "token_drop", "expanded_drop"):
                factor = {} if name == "topk" else {"capacity_factor": 1.0}
                form = form_of(make_policy({"name": name, **factor}), self.device.type)
                run = partial(form.select, scores_TE, context)
                runs[name] = run if self.rehearse else replayed(run)
            yield from self.timed(runs, {"what": "routing", "num_tokens": num_tokens, "num_experts": num_experts})

    def attention(self) -> Iterator[Row]:
        """Causal attention over whole prompts, every head with its own keys and with shared ones; half of all pairs."""
        heads, size = (2, 8) if self.rehearse else (32, 128)
        attend = SdpaAttention(SimpleNamespace(kv_channels=size))
        for requests, length in ((1, 16),) if self.rehearse else PROMPTS:
            query, key = (self.normal(length, requests, number, size) for number in (heads, heads))
            shared = self.normal(length, requests, max(heads // 8, 1), size)
            runs: Runs = {
                "own keys": lambda: attend(query, key, key, None),  # noqa: B023
                "shared keys": lambda: attend(query, shared, shared, None),  # noqa: B023
            }
            flops = 2.0 * requests * heads * length**2 * size
            yield from self.timed(runs, {"what": "attention", "num_tokens": requests * length, "top_k": length,
                                         "flops": flops})  # fmt: skip


def loads(model: ModelSpec, ep_size: int, num_tokens: int) -> Iterator[tuple[NDArray[np.int64], str]]:
    """Rows of rank 0's experts: balanced, and as many pairs by a power law."""
    num_local = model.num_experts // ep_size
    balanced_L = balanced_loads(num_tokens, model.num_experts, model.top_k, num_local)
    if not balanced_L.sum():
        return
    yield balanced_L, BALANCED
    shares_L = np.random.default_rng(num_tokens).pareto(1.01, num_local) + 1
    skewed_L = np.random.default_rng(1).multinomial(balanced_L.sum(), shares_L / shares_L.sum())
    yield skewed_L, SKEWED


def fitted(table: pd.DataFrame, device: Device) -> Iterator[str]:
    """Figures of the experts by all points of ``grouped``, and their errors; and those of a fit without the model."""
    rows = table[(table["what"] == "experts") & (table["form"] == "grouped")].reset_index(drop=True)
    loads_NL = [_loads_of(row) for row in rows.itertuples()]

    def predicted(device: Device, numbers: Sequence[int]) -> NDArray[np.float64]:
        points = rows.loc[numbers, ["hidden_size", "ffn_hidden_size"]].itertuples()
        return np.array([device.experts_us(int(hidden), int(ffn), loads_NL[at]) for at, hidden, ffn in points])

    def fit(numbers: Sequence[int]) -> Device:
        return fit_roofline(device, lambda made: predicted(made, numbers), rows.loc[numbers, "us"], smoothness=0.1)

    yield from as_yaml(fit(rows.index))
    others = pd.Series(0.0, rows.index)
    for _, of_model in rows.groupby("model"):
        others[of_model.index] = predicted(fit(rows.index.difference(of_model.index)), of_model.index)
    times = pd.DataFrame({"as it is": predicted(device, rows.index), "without the model": others})
    ratios = times.div(rows["us"], axis=0)
    active = np.array([(load_L > 0).sum() for load_L in loads_NL])
    by = [rows["distribution"], pd.cut(rows["pairs"] / active, [0, 8, 64, 512, np.inf]).rename("rows an expert")]
    errors = (ratios - 1).abs().add_suffix(", error").join(ratios.add_suffix(", ratio"))
    yield errors.groupby(by, observed=True).median().to_string(float_format="{:.3f}".format)
    yield f"median and mean error: {errors.filter(like='error').agg(['median', 'mean']).round(3).to_dict('list')}"


def _loads_of(row: Any) -> NDArray[np.int64]:
    shape = SimpleNamespace(num_experts=int(row.num_experts), top_k=int(row.top_k))
    both = {name: load_L for load_L, name in loads(shape, int(row.ep_size), int(row.num_tokens))}
    return both[row.distribution]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rehearse", action="store_true", help="toy sizes on the CPU: tries this script")
    parser.add_argument("--fit", type=Path, metavar="FILE", help="fit a roofline's figures to an earlier device.csv")
    parser.add_argument(
        "--device", default="h200-sxm-measured", help="with --fit: whose data sheet and other figures stand"
    )
    options = parser.parse_args(arguments)
    if options.fit:
        print("\n".join(fitted(pd.read_csv(options.fit), Device.load(options.device))))
        return 0
    device = device_of(parser, options.rehearse)
    bench = Bench(device, options.rehearse)
    ceilings = measure_ceilings(device, bench.dtype)
    print(f"{provenance.describe(device)['device_name']}: square matmul {ceilings.matmul_tflops:,.0f} TFLOP/s, copy"
          f" {ceilings.copy_gbps:,.0f} GB/s, read {ceilings.read_gbps:,.0f} GB/s")  # fmt: skip
    models = [load_model(name).scaled(1 / 64 if options.rehearse else 1.0) for name in MODELS]
    parts = [("routing", bench.routing), ("attention", bench.attention)]
    parts += [(f"permutation, {model.name}", lambda model=model: bench.permutation(model)) for model in models]
    parts += [(f"experts, {model.name}", lambda model=model: bench.experts(model)) for model in models]
    rows: list[Row] = []
    failed = []
    with torch.inference_mode():
        for name, part in parts:
            try:
                rows.extend(part())
            except Exception as error:  # What was measured is kept, and the rest is tried.
                failed.append(f"{name}: {type(error).__name__}: {error}")
            keep(options.out, "device", pd.DataFrame(rows), device, ceilings=vars(ceilings), failed=failed)
            if device.type == "cuda":
                torch.cuda.empty_cache()
    print(summary(pd.DataFrame(rows)).to_string(index=False, float_format="{:.3g}".format, na_rep=""))
    print("\n".join(failed))
    return int(bool(failed))


def summary(table: pd.DataFrame) -> pd.DataFrame:
    """The best rate of each model and form, and what a point at its fewest rows takes."""
    table = table.reindex(columns=["what", "model", "form", "distribution", "us", "flops", "bytes"])
    table = table[table["distribution"] != SKEWED].fillna({"model": ""})
    table = table.assign(tflops=table["flops"] / table["us"] / 1e6, gbps=table["bytes"] / table["us"] / 1e3)
    best = table.groupby(["what", "model", "form"], sort=False)
    return best.agg(
        points=("us", "size"), least_us=("us", "min"), tflops=("tflops", "max"), gbps=("gbps", "max")
    ).reset_index()


if __name__ == "__main__":
    sys.exit(main())
