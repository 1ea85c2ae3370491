#!/usr/bin/env python
"""What a GPU makes of experts, permutation, routing and attention: what a file of data/devices/ states, and rates.

    python benchmarks/device.py [--out DIR] [--rehearse]
    python benchmarks/device.py --fit device.csv [--device NAME]    # anywhere: the figures of a file, and their errors

``experts`` stand as in moe_perf.parquet (cost_model/tables.py): one GPU in the place of rank 0 of ``ep_size``, with the
pairs of its own experts under ``balanced`` scores, and as many pairs under a power law. Rows of experts hold no
permutation. ``backends`` are all experts of a layer at one size. ``decode`` are experts of a decode step, the cache
flushed before each call: 16 tokens on ever more experts, by which an expert's time is a slope, then ever more tokens.
Policies and decode steps are replayed from CUDA graphs. Times are medians in microseconds, of forms interleaved. Prints
a summary, rates beside those of a square matmul and a copy; with --out writes device.csv, a row for each point, and the
environment beside it.

--rehearse runs toy sizes on the CPU: it tries this script, and measures nothing.
"""

from __future__ import annotations

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
from interleaved import device_of, interleaved, keep, parser_of, replayed
from numpy.typing import NDArray
from scipy.stats import linregress
from tables import as_yaml, fit_roofline

from moe_ep_bench.cost_model.devices import Device
from moe_ep_bench.cost_model.expert_rows import BALANCED
from moe_ep_bench.cost_model.expert_table import balanced_loads
from moe_ep_bench.errors import UserError
from moe_ep_bench.kernels import form_of
from moe_ep_bench.kernels.experts import first_rows
from moe_ep_bench.layer.backend import LayerBackend
from moe_ep_bench.layer.components import DecodeExperts, GroupedExperts, expert_major_pairs, sum_per_token
from moe_ep_bench.layer.host import device_scope
from moe_ep_bench.layer.megatron import expert_parallel_groups, moe_utils
from moe_ep_bench.layer.passes import SdpaAttention
from moe_ep_bench.layer.stack import Stack
from moe_ep_bench.machine import provenance
from moe_ep_bench.models import ModelSpec, load_model
from moe_ep_bench.policies import RoutingContext, make_policy
from moe_ep_bench.runtime.ranks import join
from moe_ep_bench.timing.device import CacheFlush, Ceilings, measure_ceilings
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
BACKEND_TOKENS = 65_536
# Layers of the papers' decode tables: a preset, and the ranks among which an expert's FFN is split.
DECODED = (("qwen3-30b-a3b", 1), ("qwen3-235b-a22b", 8), ("gpt-oss-120b", 1))
STEP_TOKENS, ACTIVATED = 16, (8, 16, 32, 49, 64, 96, 128)
TOKENS = (1, 4, 16, 64, 128, 256, 512, 1024)
CHOSEN, RANDOM = "so many experts", "random"

Runs = dict[str, Callable[[], object]]
Row = dict[str, Any]


class Bench:
    """A device, and how its points are timed."""

    def __init__(self, device: torch.device, rehearse: bool) -> None:
        self.device, self.rounds, self.rehearse = device, 1 if rehearse else 7, rehearse
        self.dtype = torch.float32 if rehearse else torch.bfloat16
        self.generator = torch.Generator(device).manual_seed(0)
        self.clock, self.flush = clock_for(device), CacheFlush(device)
        self.fused = ["te"] if has_transformer_engine(device) else []

    def normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.generator, device=self.device, dtype=self.dtype)

    def uniform(self, *shape: int) -> torch.Tensor:
        return torch.rand(shape, generator=self.generator, device=self.device)

    def timed(self, runs: Runs, about: Row, *, cold: bool = False) -> Iterator[Row]:
        """A row for each form: its median, and the least and most of all rounds; ``cold``: the cache is flushed."""

        def measure(_: str, run: Callable[[], object]) -> float:
            if cold:
                self.flush()
            return time_us(run, self.clock)

        for form, values in interleaved(runs, self.rounds, measure, uncounted=2).items():
            yield {**about, "form": form, "us": statistics.median(values), "least": min(values), "most": max(values)}

    def new_experts(self, kind: type[GroupedExperts], number: int, model: ModelSpec) -> GroupedExperts:
        config = SimpleNamespace(
            moe_ffn_hidden_size=model.ffn_hidden_size,
            hidden_size=model.hidden_size,
            use_cpu_initialization=self.device.type == "cpu",
            params_dtype=self.dtype,
        )
        experts = kind(number, config)
        for matrix in (matrix for matrices in (experts.gate_up_L2FD, experts.down_LDF) for matrix in matrices):
            matrix.normal_(std=matrix.shape[1] ** -0.5, generator=self.generator)
        return experts

    def experts(self, model: ModelSpec) -> Iterator[Row]:
        """Experts of a rank of each EP size, at ever more rows of each."""
        hidden, ffn = model.hidden_size, model.ffn_hidden_size
        for ep_size in EP_SIZES:
            if model.num_experts % ep_size or model.num_experts // ep_size < 2:
                continue
            num_local = model.num_experts // ep_size
            grouped = self.new_experts(GroupedExperts, num_local, model)
            for rows in ROWS[:: 4 if self.rehearse else 1]:
                num_tokens = rows * model.num_experts // model.top_k
                if rows * num_local * hidden > MOST_VALUES or (self.rehearse and rows > 64):
                    break
                for loads_L, name in loads(model, ep_size, num_tokens):
                    pairs = int(loads_L.sum())
                    hidden_ND, counts_L = self.normal(pairs, hidden), torch.as_tensor(loads_L).to(self.device)
                    runs: Runs = {"grouped": partial(grouped, hidden_ND, counts_L, self.uniform(pairs))}
                    told = {"num_tokens": num_tokens, "distribution": name, "pairs": pairs, "fullest": loads_L.max()}
                    about = {"what": "experts", **shape_of(model), "ep_size": ep_size, **told}
                    yield from self.timed(runs, {**about, "flops": 6.0 * pairs * hidden * ffn})

    def backends(self, model: ModelSpec) -> Iterator[Row]:
        """Every backend of a layer's experts on equally many rows of each."""
        num_tokens = 64 if self.rehearse else BACKEND_TOKENS
        pairs = num_tokens * model.top_k
        counts_E = torch.full((model.num_experts,), pairs // model.num_experts)
        inputs = self.normal(pairs, model.hidden_size), counts_E, self.uniform(pairs)
        about = {"what": "backends", **shape_of(model), "num_tokens": num_tokens}
        with device_scope():
            groups, names = expert_parallel_groups(1, 120), ["sequential", *self.fused, "grouped"]
            stacks = {name: Stack(model, self.dtype, self.device, groups, 0, LayerBackend(name)) for name in names}
            runs: Runs = {name: partial(stack.forms[None].native.experts, *inputs) for name, stack in stacks.items()}
            flops = 6.0 * pairs * model.hidden_size * model.ffn_hidden_size
            yield from self.timed(runs, about | {"flops": flops})

    def decode(self, model: ModelSpec) -> Iterator[Row]:
        """All experts of a layer by a map of few tokens, and by sorted rows whose sums are left to others."""
        experts = self.new_experts(DecodeExperts, model.num_experts, model)
        most = min(model.num_experts, STEP_TOKENS * model.top_k)
        steps = [(STEP_TOKENS, number, CHOSEN) for number in ACTIVATED if number <= most]
        steps += [(num_tokens, model.num_experts, RANDOM) for num_tokens in TOKENS]
        for num_tokens, number, name in steps[:: 3 if self.rehearse else 1]:
            top_k = min(model.top_k, number)
            keys_TE = self.uniform(num_tokens, number)
            if name == CHOSEN:  # Tokens in turn take the next ones first: all are taken while there are pairs.
                pair = torch.arange(min(number, num_tokens * top_k), device=self.device)
                keys_TE[pair // top_k, pair] += 1
            map_TE = torch.zeros(num_tokens, model.num_experts, dtype=torch.bool, device=self.device)
            map_TE.scatter_(1, keys_TE.topk(top_k, dim=1).indices, True)
            hidden_TD, weights_TE = self.normal(num_tokens, model.hidden_size), self.uniform(*map_TE.shape) * map_TE
            expert_N, token_N = map_TE.T.nonzero(as_tuple=True)
            rows = hidden_TD[token_N], map_TE.sum(0), weights_TE[token_N, expert_N]
            runs: Runs = {
                "decode": partial(experts, hidden_TD, map_TE, weights_TE),
                "grouped": partial(GroupedExperts.forward, experts, *rows),
            }
            activated = int(map_TE.any(0).sum())
            num_bytes = 3.0 * model.hidden_size * model.ffn_hidden_size * self.dtype.itemsize * activated
            told = {"num_tokens": num_tokens, "distribution": name, "activated": activated, "bytes": num_bytes}
            runs = runs if self.rehearse else {form: replayed(run) for form, run in runs.items()}
            yield from self.timed(runs, {"what": "decode", **shape_of(model), **told}, cold=True)

    def permutation(self, model: ModelSpec) -> Iterator[Row]:
        """Rows to their experts, and summed up again: T tokens read, N rows written, and back; a copy of as many."""
        for num_tokens in (64, 2048) if self.rehearse else (64, 1024, 8192, 65_536):
            if num_tokens * model.top_k * model.hidden_size > MOST_VALUES:
                continue
            hidden_TD, num_pairs = self.normal(num_tokens, model.hidden_size), num_tokens * model.top_k
            scores_TE = self.uniform(num_tokens, model.num_experts)
            map_TE = torch.zeros_like(scores_TE, dtype=torch.bool)
            map_TE.scatter_(1, scores_TE.topk(model.top_k, dim=1).indices, True)
            expert_N, token_N = expert_major_pairs(map_TE, num_pairs)
            key_N, rows_ND = token_N * model.num_experts + expert_N, hidden_TD.index_select(0, token_N)
            copied_ND = self.normal(num_tokens + num_pairs, model.hidden_size)
            whole = torch.tensor(num_pairs, device=self.device)
            runs: Runs = {
                "pairs by expert": partial(expert_major_pairs, map_TE, num_pairs),
                "permute": partial(hidden_TD.index_select, 0, token_N),
                **{
                    f"permute, {share:.0%} chosen": partial(first_rows, hidden_TD, token_N, (share * whole).long())
                    for share in (1.0, 0.6)
                },
                "unpermute": partial(sum_per_token, rows_ND, map_TE, key_N),
                "copy": partial(copied_ND.copy_, copied_ND.clone()),
            }
            for name in ("megatron", *self.fused):
                both = partial(there_and_back, hidden_TD, map_TE, num_pairs, fused=name != "megatron")
                runs[f"{name}, there and back"] = both
            shape = {"model": model.name, "hidden_size": model.hidden_size, "num_experts": model.num_experts}
            about = {"what": "permutation", **shape, "top_k": model.top_k, "num_tokens": num_tokens}
            yield from self.timed(runs, about | {"bytes": float(hidden_TD.nbytes + rows_ND.nbytes)})

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


def shape_of(model: ModelSpec) -> Row:
    shape = {"model": model.name, "hidden_size": model.hidden_size, "ffn_hidden_size": model.ffn_hidden_size}
    return {**shape, "num_experts": model.num_experts, "top_k": model.top_k}


def has_transformer_engine(device: torch.device) -> bool:
    """Whether its layer backend can run here."""
    try:
        LayerBackend.choose("te", on_cpu=device.type == "cpu")
    except UserError:
        return False
    return True


def there_and_back(hidden_TD: torch.Tensor, map_TE: torch.Tensor, num_pairs: int, *, fused: bool) -> torch.Tensor:
    """Megatron-Core's permutation and its inverse."""
    rows_ND, _, order_N, *_ = moe_utils.permute(hidden_TD, map_TE, num_out_tokens=num_pairs, fused=fused)
    return moe_utils.unpermute(rows_ND, order_N, hidden_TD.shape, routing_map=map_TE, fused=fused)


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
    parser = parser_of(__doc__)
    parser.add_argument("--fit", type=Path, metavar="FILE", help="fit a roofline's figures to an earlier device.csv")
    parser.add_argument("--device", default="h200-sxm-measured", help="with --fit: whose other figures stand")
    options = parser.parse_args(arguments)
    if options.fit:
        print("\n".join(fitted(pd.read_csv(options.fit), Device.load(options.device))))
        return 0
    device = device_of(parser, options.rehearse)
    bench, ranks = Bench(device, options.rehearse), join(120)
    ceilings = measure_ceilings(device, bench.dtype)
    print(f"{provenance.describe(device)['device_name']}: square matmul {ceilings.matmul_tflops:,.0f} TFLOP/s, copy"
          f" {ceilings.copy_gbps:,.0f} GB/s, read {ceilings.read_gbps:,.0f} GB/s")  # fmt: skip
    scale = 1 / 64 if options.rehearse else 1.0
    models = [load_model(name).scaled(scale) for name in MODELS]
    decoded = [load_model(name).sharded(shard).scaled(scale) for name, shard in DECODED]
    calls: dict[str, Callable[[], Iterator[Row]]] = {"routing": bench.routing, "attention": bench.attention}
    for part, shapes in (
        (bench.decode, decoded), (bench.backends, models[:1]), (bench.permutation, models), (bench.experts, models)
    ):  # fmt: skip
        calls |= {f"{part.__name__}, {model.name}": partial(part, model) for model in shapes}
    rows: list[Row] = []
    failed = []
    with torch.inference_mode():
        for name, call in calls.items():
            try:
                rows.extend(call())
            except Exception as error:  # What was measured is kept, and the rest is tried.
                failed.append(f"{name}: {type(error).__name__}: {error}")
            keep(options.out, "device", pd.DataFrame(rows), device, ceilings=vars(ceilings), failed=failed)
            if device.type == "cuda":
                torch.cuda.empty_cache()
    ranks.close()
    table = pd.DataFrame(rows)
    print(summary(table, ceilings).to_string(index=False, float_format="{:.3g}".format, na_rep=""))
    print("\n".join([*slopes(table), *failed]))
    return int(bool(failed))


def summary(table: pd.DataFrame, ceilings: Ceilings) -> pd.DataFrame:
    """The best rate of each model and form, beside a square matmul and a copy, and what its shortest point takes."""
    table = table.reindex(columns=["what", "model", "form", "distribution", "us", "flops", "bytes"])
    table = table[table["distribution"] != SKEWED].fillna({"model": ""})
    table = table.assign(tflops=table["flops"] / table["us"] / 1e6, gbps=table["bytes"] / table["us"] / 1e3)
    best = table.groupby(["what", "model", "form"], sort=False).agg(
        points=("us", "size"), least_us=("us", "min"), tflops=("tflops", "max"), gbps=("gbps", "max")
    )
    ratios = {"of matmul": best["tflops"] / ceilings.matmul_tflops, "of copy": best["gbps"] / ceilings.copy_gbps}
    return best.assign(**ratios).reset_index()


def slopes(table: pd.DataFrame) -> Iterator[str]:
    """What an activated expert of a decode step takes."""
    for (model, form), rows in table[table["distribution"] == CHOSEN].groupby(["model", "form"], sort=False):
        line = linregress(rows["activated"], rows["us"])
        rate = rows["bytes"].iloc[0] / rows["activated"].iloc[0] / line.slope / 1e3
        took = f"{line.intercept:.1f} us + {line.slope:.3f} us an expert, R2 {line.rvalue**2:.4f}"
        yield f"{model}, {form}: {took}; {rate:,.0f} GB/s"


if __name__ == "__main__":
    sys.exit(main())
