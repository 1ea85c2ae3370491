"""What results/reference/h100.md and h200.md say, made of the files beside them: sentences, and tables row by row."""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest
from results_builder import samples
from scipy.stats import linregress

from moe_ep_bench.analysis.cases import cases, load
from moe_ep_bench.analysis.store import Store
from moe_ep_bench.cost_model.devices import Device
from moe_ep_bench.cost_model.expert_rows import load_device
from moe_ep_bench.models import load_model
from moe_ep_bench.papers import numbers

ROOT = Path(__file__).parent.parent
REFERENCE = ROOT / "results" / "reference"
GPUS = {"h100": "deepseek-v2-lite-h100-emulated", "h200": "olmoe-h200-emulated"}
OLMOE, LITE = "OLMoE-1B-7B", "DeepSeek-V2-Lite"
DROP, EXPANDED = (f"{name} capacity_factor=1.0" for name in ("token_drop", "expanded_drop"))
FACTORS = ("1.0", "1.5", "2.0")
# Of the decode tables: a preset, and the ranks among which an expert's FFN is split.
DECODED = {
    "Qwen3-30B-A3B": ("qwen3-30b-a3b", 1),
    "Qwen3-235B-A22B, 1 of 8 TP ranks": ("qwen3-235b-a22b", 8),
    "GPT-OSS-120B": ("gpt-oss-120b", 1),
}


@cache
def table(gpu: str, name: str) -> pd.DataFrame:
    return pd.read_csv(REFERENCE / gpu / f"{name}.csv")


@cache
def store_of(name: str) -> Store:
    return load(REFERENCE / name)


@cache
def frame(name: str) -> pd.DataFrame:
    """``cases`` of a results directory."""
    return cases(store_of(name))


def row_of(*cells: str) -> str:
    return f"|{'|'.join(f' {cell} ' if cell else ' ' for cell in cells)}|"


def ends(values: Iterable[float], form: str = ".0f", scale: float = 1) -> str:
    """``0.9 to 1.1``, or the one number that both ends come to."""
    sized = sorted(scale * value for value in values)
    low, high = (f"{sized[end]:{form}}" for end in (0, -1))
    return low if low == high else f"{low} to {high}"


@cache
def machine(gpu: str) -> tuple[dict, list[dict]]:
    """The environment, and the ceilings of every program and job."""
    told = json.loads((REFERENCE / gpu / "environment.json").read_text())
    found = [one["ceilings"] for one in told.values() if "ceilings" in one]
    for path in sorted(REFERENCE.glob(f"*{gpu}*/cases/*.parquet")):
        conditions = json.loads((path.parents[1] / "conditions" / f"{path.stem}.json").read_text())
        found += [one for rank in conditions["ranks"] if (one := rank["ceilings"])]
    return next(iter(told.values()))["environment"], found


def of_machine(gpu: str) -> list[str]:
    about, found = machine(gpu)
    (one,) = about["gpus"]
    rates = [ends((each[name] for each in found), ",.0f") for name in ("matmul_tflops", "copy_gbps", "read_gbps")]
    return [
        f"driver {one['driver']}, power limit {one['power_limit_w']:.0f} W) in a virtual machine with "
        f"{about['num_cores']} cores, torch {about['torch']}, Triton {about['triton']}, megatron-core "
        f"{about['megatron_core']}, no Transformer Engine, no Apex.",
        f"Square matmul {rates[0]} TFLOP/s, copy {rates[1]} GB/s (read and written), read {rates[2]} GB/s",
    ]


# ---- layers ----------------------------------------------------------------------------------------------------------


@cache
def phases_ms(gpu: str) -> pd.DataFrame:
    """By model and label: medians over iterations with probes, one column a phase."""
    rows = samples(store_of(f"gpu-check-{gpu}")).query("kind == 'breakdown'")
    sums_us = rows.groupby(["case_id", "launch", "batch", "iteration", "phase"])["time_us"].sum().unstack()
    about = frame(f"gpu-check-{gpu}").set_index("case_id")[["model", "label"]]
    return (sums_us.groupby("case_id").median() / 1e3).join(about).set_index(["model", "label"])


def check(gpu: str, model: str) -> pd.DataFrame:
    return frame(f"gpu-check-{gpu}").query("model == @model").set_index("label")


def of_layers(gpu: str) -> list[str]:
    rows, named = [], {"native": "native", "topk": "`topk`", DROP: "Token Drop 1.0", EXPANDED: "Expanded Drop 1.0"}
    for model in (OLMOE, LITE):
        for label, name in named.items():
            ms, case = phases_ms(gpu).loc[(model, label)], check(gpu, model).loc[label]
            shared = "" if model == OLMOE else f"{ms['shared']:.2f}"
            parts = [f"{ms['gate']:.3f}", f"{ms['policy']:.3f}", f"{ms['permute']:.2f}", f"{ms['experts']:.2f}"]
            over = [
                "1" if pd.isna(case[column]) else f"{case[column]:.3f}"
                for column in ("speedup_median", "over_topk_median")
            ]
            first = f"{model.removesuffix('-1B-7B')}, {name}" if label == "native" else name
            rows.append(row_of(first, shared, *parts, f"{case['median_ms']:.2f}", *over))
    of = frame(f"gpu-check-{gpu}")
    shares = [
        [
            phases_ms(gpu).loc[(model, label), "gate"] / check(gpu, model).loc[label, "median_ms"]
            for model in (OLMOE, LITE)
        ]
        for label in ("native", DROP)
    ]
    again, policies = of.query("role == 'noise'"), of.query("role == 'policy'")
    computed = of[of["experts_per_token"].notna()]
    sizes = computed["model"].map(
        lambda model: load_model(model.lower()).hidden_size * load_model(model.lower()).ffn_hidden_size
    )
    rates = 6e-9 * computed["num_tokens"] * computed["experts_per_token"] * sizes / computed["experts_ms"]
    matmul = [one["matmul_tflops"] for one in machine(gpu)[1]]
    return [
        *rows,
        f"native against native {ends(again['speedup_median'], '.3f')} (floor {floor(of)}), unaccounted "
        f"{ends(of['breakdown_unaccounted_share'], '.1f', 100)} %, probes {ends(of['probe_overhead'], '.1f', 100)} %, "
        f"smallest detectable speedup {ends(policies['detectable'], '.3f')}",
        f"multiplies in float32, {ends(shares[0], '.1f', 100)} % of native's layers and "
        f"{ends(shares[1], '.1f', 100)} % of Token Drop's",
        f"Experts reach {ends(rates)} TFLOP/s, {100 * min(rates) / max(matmul):.0f} to "
        f"{100 * max(rates) / min(matmul):.0f} % of the square matmul",
        f"Token Drop gains by what it drops ({ends(of.query('label == @DROP')['dropped_share'], '.0f', 100)} %)",
    ]


def of_emulated(gpu: str) -> list[str]:
    rows = frame(GPUS[gpu]).set_index("label")
    by = {
        name: [rows.loc[f"{policy} capacity_factor={factor}", "speedup_median"] for factor in FACTORS]
        for name, policy in (("Token Drop", "token_drop"), ("Expanded Drop", "expanded_drop"))
    }
    drop, expanded = ([f"{value:.2f}" for value in by[name]] for name in by)
    balanced = f"{rows.loc['balanced', 'speedup_median']:.2f}"
    model = {"h100": LITE, "h200": "OLMoE-Instruct"}[gpu]
    figure = [
        [
            numbers("capacity", item="Figure 4", metric="speedup", model=model, method=method, gamma=float(factor))
            for method in by
        ]
        for factor in FACTORS
    ]
    published = ["; ".join(f"{one.value:.2f}" for (one,) in pair) for pair in figure]
    return [
        row_of("Token Drop", f"{rows.loc['native', 'median_ms']:.1f} ms", *drop, balanced),
        row_of("Expanded Drop", "", *expanded, ""),
        row_of("paper, Token Drop; Expanded Drop", "", *published, ""),
    ]


# ---- decode ----------------------------------------------------------------------------------------------------------


def graphs(gpu: str) -> pd.DataFrame:
    """Decode steps from CUDA graphs, by tokens and label."""
    rows = table(gpu, "decode_graph") if gpu == "h100" else frame("decode-graph-h200")
    rows = rows if gpu == "h100" else rows[rows["title"].str.contains("CUDA graph")]
    return rows.set_index(["num_tokens", "label"])


def floor(rows: pd.DataFrame) -> str:
    return f"{rows['floor_low'].min():.3f} to {rows['floor_high'].max():.3f}"


def of_decode(gpu: str) -> list[str]:
    steps = graphs(gpu)
    shown = [*(f"oea k0={k0}" for k0 in (3, 5, 7)), *(f"xshare k0=1 budget={budget}" for budget in (32, 8))]
    rows = []
    for tokens in (1, 4, 16, 64, 256, 512):
        cells = []
        for label in shown:
            case = steps.loc[(tokens, label)]
            kept = f" ({100 * case['retained_mass']:.0f} %)" if case["retained_mass"] < 0.995 else ""
            cells.append(f"{case['speedup_median']:.2f}; {case['over_topk_median']:.2f}{kept}")
        native, topk = steps.loc[(tokens, "native")], steps.loc[(tokens, "topk")]
        rows.append(row_of(str(tokens), f"{1e3 * native['median_ms']:.0f} us", f"{topk['speedup_median']:.2f}", *cells))
    over = [1 / steps.loc[(16, f"oea k0={k0}"), "over_topk_median"] for k0 in range(3, 8)]
    paper = [numbers("oea", item="Table 3", k0=k0, metric="layer time over vanilla")[0].value for k0 in range(3, 8)]
    return [
        *rows,
        row_of("paper", *(f"{value:.2f}" for value in paper), "48.8"),
        row_of(
            "here, over `topk`",
            *(f"{value:.2f}" for value in over),
            f"{steps.loc[(16, 'native'), 'activated_experts']:.1f}",
        ),
        f"Noise floors {floor(steps.loc[[(1, 'native')]])} at 1 token, "
        f"{floor(steps.loc[[(tokens, 'native') for tokens in (16, 64, 256, 512)]])} from 16 on",
    ]


def of_decode_experts(gpu: str) -> list[str]:
    """Lines over activated experts, and the share of the datasheet's bandwidth that their slopes come to."""
    peak_tbps, rows, first = Device.load(f"{gpu}-sxm").memory_tbps, [], {}
    for name, (preset, ranks) in DECODED.items():
        model, points = load_model(preset).sharded(ranks), table(gpu, "decode_experts").query("shape == @name")
        chosen, drawn = points[points["rows an expert"].isna()], points[points["rows an expert"].notna()]
        cells = []
        for form in ("decode", "grouped"):
            line = linregress(chosen["activated"], chosen[form])
            share = 6 * model.hidden_size * model.ffn_hidden_size / line.slope / 1e6 / peak_tbps
            fit = f"{line.intercept:.1f} us + {line.slope:.3f} us an expert, R2 {line.rvalue**2:.4f}"
            of = f" of {peak_tbps} TB/s" if name.startswith("Qwen3-30B") and form == "decode" else ""
            cells.append(f"{fit}: {100 * share:.0f} %{of}")
        rows.append(row_of(name, *cells))
        slower = drawn[drawn["decode"] > drawn["grouped"]]["num_tokens"]
        first[name] = slower.min(), drawn[drawn["num_tokens"] < slower.min()]["num_tokens"].max()
    (begin, last), wide, oss = first.values()
    others = f"Qwen3-235B: {wide[0]}, " if wide[0] != begin else ""
    return [
        *rows,
        f"Decode kernels are faster up to {last} tokens, grouped GEMMs from {begin} on ({others}"
        f"GPT-OSS-120B: beyond {oss[1]})",
    ]


# ---- kernels ---------------------------------------------------------------------------------------------------------

SCORES = ((524_288, 64), (131_072, 128), (65_536, 64), (16_384, 256))
ROUTED = ("torch top-k", "topk", "token_drop", "expanded_drop")


def routed_us(gpu: str) -> pd.DataFrame:
    """By tokens and experts: torch's top-k alone, ours, Token Drop and Expanded Drop."""
    rows = table(gpu, "device").query("what == 'routing'")
    prompts = rows.pivot(index=["num_tokens", "num_experts"], columns="form", values="us")[list(ROUTED)].loc[[*SCORES]]
    step = table(gpu, "policies_gpu").query("num_tokens == 16 and num_experts == 128").set_index("what")
    names = ("torch.topk", "topk", DROP, EXPANDED)
    us = [step.loc[name, "torch us" if name == "torch.topk" else "graph us"] for name in names]
    return pd.concat([prompts, pd.DataFrame([us], index=[(16, 128)], columns=list(ROUTED))])


def of_kernels(gpu: str) -> list[str]:
    rows = [
        row_of(f"T = {tokens:,}, E = {experts:.0f}", *(f"{one:,.{1 if tokens == 16 else 0}f}" for one in us))
        for (tokens, experts), us in zip(routed_us(gpu).index, routed_us(gpu).to_numpy(), strict=True)
    ]
    device = table(gpu, "device")
    moved = device.query("what == 'permutation' and model == @OLMOE and num_tokens == 65536").set_index("form")["us"]
    prompts = device.query("what == 'attention' and form == 'own keys'")
    rates = [f"{rate:.0f}" for rate in prompts["flops"] / prompts["us"] / 1e6]
    return [
        *rows,
        "Permuting and back at 65,536 tokens of OLMoE: "
        f"{moved[['pairs by expert', 'permute', 'unpermute']].sum() / 1e3:.2f} ms",
        f"Attention on whole prompts, causal half: {rates[0]} TFLOP/s at 512 tokens, {rates[1]} at 2,048, "
        f"{rates[2]} at 8,192",
    ]


# ---- the model of it -------------------------------------------------------------------------------------------------


@cache
def errors(gpu: str, device: str) -> tuple[float, float]:
    """Median and mean of |predicted / measured - 1| of grouped experts."""
    rows = table(gpu, "device").query("what == 'experts' and form == 'grouped'")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "benchmarks"))
        loads_of, of = importlib.import_module("device")._loads_of, Device.load(device)
    shapes = zip(rows["hidden_size"], rows["ffn_hidden_size"], rows.itertuples(), strict=True)
    predicted = np.array([of.experts_us(int(hidden), int(ffn), loads_of(row)) for hidden, ffn, row in shapes])
    found = np.abs(predicted / rows["us"] - 1)
    return found.median(), found.mean()


def of_model(gpu: str) -> list[str]:
    points = table(gpu, "device").query("what == 'experts' and form == 'grouped'")
    words = {6: "six", 7: "seven"}[points["model"].nunique()]
    text = (ROOT / "moe_ep_bench" / "data" / "devices" / f"{gpu}-sxm-measured.yaml").read_text()
    unseen = re.search(r"Of a model that the fit has not seen: median error ([\d.]+ %)", text)[1]
    by = {
        f"`{gpu}-sxm`, fitted to vLLM's and TensorRT-LLM's tables": errors(gpu, f"{gpu}-sxm"),
        f"`{gpu}-sxm-measured`, fitted to these points": errors(gpu, f"{gpu}-sxm-measured"),
    }
    return [
        f"{len(points)} points ({words} models, EP 1 to 32, balanced and power-law loads)",
        *(row_of(name, *(f"{100 * value:.1f} %" for value in both)) for name, both in by.items()),
        row_of("the same, on a model that its fit has not seen", unseen, ""),
        *of_modelled(gpu),
    ]


def measured_layers(gpu: str) -> dict[str, pd.DataFrame]:
    """Measured layers, by the title of what models them; of few tokens other_runs.csv has the H100's."""
    found = {f"{model}, EP 1, 32,768 tokens": check(gpu, model) for model in (OLMOE, LITE)}
    if gpu == "h100":
        few = table(gpu, "other_runs").query("run == 'quickstart, EP 8 emulated'")
        found[f"{LITE}, EP 8, 16,384 tokens a rank"] = few.set_index("label")
    model = {"h100": LITE, "h200": OLMOE}[gpu]
    found[f"{model}, EP 8, 65,536 tokens a rank"] = frame(GPUS[gpu]).set_index("label")
    return found


def of_modelled(gpu: str) -> list[str]:
    modelled = table(gpu, "modelled").set_index(["layer", "label"])
    rows = []
    for name, layer in measured_layers(gpu).items():
        of = modelled.loc[name]
        # The same traffic: what chance decides makes no difference.
        assert abs(of.loc[DROP, "missing_share"] - layer.loc[DROP, "dropped_share"]) < 1e-4
        ratio = [f"{of.loc[label, 'median_ms'] / layer.loc[label, 'median_ms']:.2f}" for label in ("native", DROP)]
        both = [
            f"{of.loc[label, 'speedup_median']:.2f}; {layer.loc[label, 'speedup_median']:.2f}"
            for label in (DROP, EXPANDED)
        ]
        over = [
            "; ".join(f"{one.loc[DROP, 'over_topk_median']:.2f}" for one in (of, layer))
            if "topk" in layer.index
            else ""
        ]
        rows.append(row_of(name.replace("-1B-7B", ""), *ratio, both[0], *over, both[1]))
    return rows


# ---- pages -----------------------------------------------------------------------------------------------------------


def of_h100() -> list[str]:
    other = table("h100", "other_runs").set_index(["run", "num_tokens", "label"]).sort_index()
    before, after = "eager decode, before the mend", "eager decode, after it"
    native, topk = (other.loc[(after, 256, label)] for label in ("native", "topk"))
    few = other.loc[("quickstart, EP 8 emulated", 131_072)]
    gains = [
        " / ".join(f"{few.loc[f'{policy} capacity_factor={factor}', 'speedup_median']:.2f}" for factor in FACTORS)
        for policy in ("token_drop", "expanded_drop")
    ]
    model = table("h100", "other_runs").query("run == 'OLMoE, four layers' and title.str.contains('CUDA graph')")
    ratio = (routed_us("h100") / routed_us("h200")).iloc[:, 1:]
    bandwidths = [Device.load(f"{gpu}-sxm").memory_tbps for gpu in ("h200", "h100")]
    return [
        *of_machine("h100"),
        f"and {bandwidths[0] / bandwidths[1]:.1f} times the memory bandwidth",
        f"eager decode of 256 tokens gave `topk` {other.loc[(before, 256, 'topk'), 'speedup_median']:.2f} times "
        f"native's speed (graphs: {graphs('h100').loc[(256, 'topk'), 'speedup_median']:.2f}), and native differed from "
        f"itself by {1 / other.loc[(before, 512, 'native again'), 'speedup_median']:.2f} at 512 tokens.",
        f"{topk['speedup_median']:.2f} (median of pairs) at 256 tokens, where both times are the host's "
        f"({native['median_ms']:.2f} and {topk['median_ms']:.2f} ms), native against itself "
        f"{other.loc[(after, 256, 'native again'), 'speedup_median']:.2f}.",
        *of_layers("h100")[:-1],  # of what is dropped the H200's page speaks
        *of_emulated("h100"),
        f"{gains[0]} and {gains[1]}; `topk` is {few.loc['topk', 'speedup_median']:.3f} times native there.",
        *of_decode("h100"),
        f"OEA k0=3 is {model.set_index('label').loc['oea k0=3', 'over_topk_median']:.3f} times `topk` end to end",
        *of_decode_experts("h100"),
        *of_kernels("h100"),
        f"(at most {100 * (ratio.to_numpy().max() - 1):.0f} % longer)",
        *of_model("h100"),
    ]


def _te_modelled(rows: pd.DataFrame) -> list[str]:
    """How the model of Transformer Engine's layers does on them."""

    def over(dtype: str, label: str, part: str = "median") -> str:
        of = rows.xs((dtype, label), level=("dtype", "label"))
        return ends(of[f"modelled_{part}_ms"] / of[f"{part}_ms"], ".2f")

    gained = []
    for title in (OLMOE, LITE):
        native, drop = (rows.loc[(title, "bfloat16", label)] for label in ("native", DROP))
        gained += [native[ms] / drop[ms] for ms in ("modelled_median_ms", "median_ms")]
    native, experts, permutation = (over("bfloat16", "native", part) for part in ("median", "experts", "permute"))
    return [
        f"native is modelled at {native} of its time (experts {experts}, permutation {permutation}), Token Drop 1.0 "
        f"gains {gained[0]:.2f} where {gained[1]:.2f} was measured (OLMoE) and {gained[2]:.2f} where "
        f"{gained[3]:.2f} was",
        f"native {over('fp8_block', 'native')}, Token Drop {over('fp8_block', DROP)}.",
    ]


def of_te() -> list[str]:
    """Layers of Transformer Engine, in bfloat16 and in FP8."""
    rows, all_rows = [], table("h200", "te").set_index(["title", "dtype", "label"])
    for title, dtype in ((OLMOE, "bfloat16"), (OLMOE, "fp8_block"), (LITE, "bfloat16")):
        for label, name in (("native", "native"), (DROP, "Token Drop 1.0"), ("balanced", "balanced")):
            case = all_rows.loc[(title, dtype, label)]
            first = f"{title.removesuffix('-1B-7B')}, {'FP8' if dtype == 'fp8_block' else dtype}, {name}"
            parts = [
                f"{case[f'{part}_ms']:.{digits}f}" for part, digits in (("gate", 2), ("permute", 2), ("experts", 2))
            ]
            over = "1" if label == "native" else f"{case['speedup_median']:.2f}"
            rows.append(
                row_of(
                    first if label == "native" else name,
                    *parts,
                    *(f"{case[f'{part}_ms']:.2f}" for part in ("median", "host_busy")),
                    over,
                )
            )
    native = all_rows.xs("native", level="label")
    error = {dtype: rows["reference_error"].max() for dtype, rows in all_rows.groupby("dtype")}
    plain, fp8 = (native.loc[(OLMOE, dtype)] for dtype in ("bfloat16", "fp8_block"))
    memory = [one["peak_memory_bytes"] / 2**30 for one in (fp8, plain)]
    even = all_rows.loc[(OLMOE, "fp8_block", "balanced")]
    ours_ms = phases_ms("h200").loc[(OLMOE, "native"), "permute"]
    rows_moved = 32768 * (2 + 6 * 8)  # Each token is read and written once, each of its eight rows six times.
    rate = rows_moved * 2 * 2048 / plain["permute_ms"] / 1e9
    fitted = load_device("h100-sxm-te")
    host = all_rows.xs("fp8_block", level="dtype")["host_busy_ms"]
    return [
        *rows,
        f"{plain['permute_ms'] / ours_ms:.1f} times ours",
        f"Its four steps move {rate:.1f} TB/s; `h100-sxm-te`, fitted to layers on an H100, has "
        f"{fitted.memory_tbps * fitted.permute_efficiency:.1f}.",
        *_te_modelled(all_rows),
        f"so the host takes {ends(host, '.1f')} ms a layer",
        f"off by {error['fp8_block']:.3f} (0.12 is allowed, bfloat16 {error['bfloat16']:.4f})",
        f"Uneven experts take {fp8['experts_ms']:.2f} ms, even ones {even['experts_ms']:.2f}",
        f"held twice: {memory[0]:.1f} GiB against {memory[1]:.1f}",
    ]


def of_h200() -> list[str]:
    experts = table("h200", "experts").set_index("what")
    whole = table("h200", "decode_experts").query("shape == 'Qwen3-30B-A3B'")
    step, last = (whole.query(where).iloc[0] for where in ("activated == 49", "num_tokens == 1024"))
    policies = table("h200", "policies_gpu")
    large = policies.query("num_tokens == 65536 and kernel.isna()").set_index("what")
    small = policies.query("num_tokens == 16 and kernel.isna()").set_index("what")
    laser = large[large.index.str.match(r"laser (?!.*chunk)|load_only")]["graph us"] / 1e3
    by_request = "xshare k0=1 scope=request request_budget=2"
    drop, expanded = routed_us("h200").iloc[0, 2:]
    cases_of_steps = frame("decode-graph-h200")
    eager = cases_of_steps.query("num_tokens in (256, 512) and ~title.str.contains('graph')")
    eager = eager[eager["label"].str.startswith("oea")]["speedup_median"]
    about = cases_of_steps.query("title.str.contains('graph') and num_tokens == 16").set_index("case_id")["label"]
    rows = samples(store_of("decode-graph-h200")).query("kind == 'breakdown' and phase == 'policy'")
    router = rows[rows["case_id"].isin(about.index)].groupby("case_id")["time_us"].median().rename(about)
    peaks, graph = {}, []
    for path in REFERENCE.glob("*-h200/cases/*.parquet"):
        (rank,) = json.loads((path.parents[1] / "conditions" / f"{path.stem}.json").read_text())["ranks"]
        model = pq.read_table(path, columns=["model"])["model"][0].as_py()
        peaks[model] = max(peaks.get(model, 0), rank["peak_memory_bytes"] / 2**20)
        graph += [rank["cuda_graphs"]] if "cuda_graphs" in rank else []
    assert {one["count"] for one in graph} == {220}
    return [
        *of_machine("h200"),
        *of_layers("h200"),
        *of_emulated("h200"),
        f"there OEA is {ends(eager, '.2f')} at 256 and 512 tokens",
        *of_decode("h200"),
        f"({router['native']:.0f} us there, {router['topk']:.0f} ours at 16 tokens)",
        *of_te(),
        *of_decode_experts("h200"),
        f"With 49 of them the kernels take {step['decode']:.1f} us",
        f"{last['grouped']:.0f} us against {last['decode']:.0f} at 1,024",
        *of_kernels("h200"),
        f"target 400 us at T = 524,288; Expanded Drop is {expanded / drop:.2f} times Token Drop, target 1.3",
        f"OEA {small.loc['oea k0=4', 'graph us']:.1f}, XShare {small.loc['xshare k0=1 budget=16', 'graph us']:.1f}, "
        f"LASER {ends(small[small.index.str.startswith('laser')]['graph us'])}",
        f"Token Drop in plain torch takes {large.loc[DROP, 'torch us']:,.0f} us at T = 65,536, the published algorithm "
        f"{large.loc['Algorithm 1 as published', 'torch us']:.0f}. LASER token by token takes {ends(laser)} ms there.",
        f"By requests XShare takes {large.loc[by_request, 'graph us'] / 1e3:.2f} ms (256 requests), `budget_drop` "
        f"{large.loc['budget_drop max_lost_mass=0.01', 'graph us'] / 1e3:.2f} ms",
        f"(`experts.csv`: {experts.loc['permute and unpermute, indexed', 'ms']:.2f}, "
        f"{experts.loc['permute and unpermute, indexed', 'times the copy']:.2f} times a copy of the same bytes; "
        f"Megatron-Core's own {experts.loc['permute and unpermute, megatron', 'ms']:.1f})",
        f"OLMoE {peaks[OLMOE]:,.0f} MiB, DeepSeek-V2-Lite {peaks[LITE]:,.0f}, decode {peaks['Qwen3-30B-A3B']:,.0f}",
        f"220 graphs of a decode layer took {ends((one['pool_bytes'] for one in graph), '.0f', 2**-20)} MiB (1 to 512 "
        f"tokens), the driver {max(one['driver_bytes'] for one in graph) / 2**20:.0f} MiB once",
        *of_model("h200"),
    ]


# What no file has to hold: names and sources, then settings and aims.
SETTINGS = (
    *(r"\bH[12]00[\w-]*", r"80GB HBM3", r"141 GB", r"Qwen3-[\w-]+", r"DeepSeek-V2-Lite", r"arXiv [\d.]+"),
    *(r"(Figure|Table|section) \d", r"[\w-]+-h[12]00(-emulated)?\b", r"\[h[12]00[\w.-]*", r"[Cc]ommit [\da-f]{8}"),
    *(r"(gpu-check: |Since )[\da-f]{8}", r"[\d,]+ tokens( a rank)?", r"peak load 4", r"EP [18]\b", r"\u03b3 [\d.]+"),
    *(r"k0 ?= ?\d( to 7)?", r"XShare \d+", r"T = 16", r"\| 3 \| 4 \| 5 \| 6 \| 7 \|", r"(Token|Expanded) Drop 1\.0"),
    *(r"8 to 128 activated", r"- 1\|", r"here 65,536 were routed", r"aim on an H200: 120", r"At 16 tokens 5 us"),
    *(
        r"copy for comparison takes 2 GiB",
        r"FP8|TF32|([Bb]f|f)loat(16|32)|64 experts",
        r"Transformer Engine 2\.20\.2",
        r"NCCL 2\.32\.3",
        r"torch 2\.11",
        r"memory \(4\.8 TB/s\)",
    ),
)
# What was seen and is in no file; the page names the commit.
SEEN = (
    *(r"\*\*208 passed\*\*", r"183 of 183 tests, 194 with", r"mended \([\da-f]{8}\)", r"held for 300 us"),
    *(r"launches take 360 us and a whole layer 2 ms", r"\| 300 us \| 2.28 ms \| 2.21 ms \| 1.04 \|"),
    *(
        r"off by 0\.0013",
        r"allowed 0\.0001",
        r"off by 0\.0044 at most, 0\.03 is allowed",
        r"28 to 66 s",
        r"All 222 tests",
    ),
    *(r"\| 1,500 us \| 1.87 ms \| 1.37 ms \| 1.34 \|", r"it is 2,000 us", r"hold of 300 us, under 1 %"),
)
