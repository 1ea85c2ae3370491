"""Dropping beside what loses nothing: one table over recordings and power laws.

    .venv/bin/python benchmarks/lossless.py TRACES

TRACES is a folder of moe-trace-v1 recordings; those of ``RECORDED`` are taken. Every traffic is modelled on 8 H200
(``emulate``), and writes ``lossless.csv``, ``lossless.md`` and the figure ``lossless.png``. Plans know batches ahead of
those that they serve; ``lossless.md`` also has what they are worth to other domains. Solvers are shown at 0 us and at
the 100 us of a GPU that configs assume. Takes two to four minutes on two cores.
"""

from __future__ import annotations

import argparse
import functools
import math
import tempfile
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import yaml

from moe_ep_bench.analysis.cases import cases, load
from moe_ep_bench.analysis.columns import labels
from moe_ep_bench.bench.point import MOST_OF_MEAN
from moe_ep_bench.cli import main as command
from moe_ep_bench.models import ModelSpec
from moe_ep_bench.placement import (
    fullest_by_spare,
    plan_ahead,
    rank_load,
    replicate,
    replicate_by_risk,
    spread_over_layers,
)
from moe_ep_bench.workload.trace import open_trace

ROOT = Path(__file__).parents[1]
LAYERS = [2, 8, 14, 20]
# File, model, tokens of a batch, batches that are served, and batches ahead of them that plans know.
RECORDED = {
    **{
        f"DeepSeek-V2-Lite, {domain}": (f"deepseek-v2-lite-{domain}", "deepseek-v2-lite", 1024, 4, 3)
        for domain in ("intent", "summary", "translation")
    },
    "GPT-OSS-20B, mixed": ("gpt-oss-20b-mixed", "gpt-oss-20b", 4096, 5, 4),
}
DOMAINS = [file for file, *_ in RECORDED.values()][:3]
POWER_LAWS = {f"gpt-oss-120b, power law 1.2, {tokens:,} a rank": tokens for tokens in (2048, 16384)}
# By what labels begin with: what it is called, colour and marker. What loses nothing stands side by side, left of 0.
LOOKS = {
    "token_drop.*device": ("Token Drop by device, 1.0 and 1.2", "#D55E00", "s"),
    r"token_drop capacity_factor=[\d.]+$": ("Token Drop by expert, 1.0 to 2.0", "#B03000", "d"),
    "budget_drop": ("budget_drop, 1 % and 5 %", "#E69F00", "^"),
    "EPLB,": ("EPLB: memory", "#0072B2", "o"),
    "variance": ("variance plan: memory", "#56B4E9", "v"),
    r"EPLB \+ LP": ("EPLB + LP: memory, solver of 0 to 100 us", "#0072B2", "x"),
    r"EPLB \+ fewest": ("EPLB + fewest activated: the same", "#0072B2", "+"),
    "LLEP": ("LLEP: weights moved, solver of 0 to 100 us", "#009E73", "<"),
    "UltraEP": ("UltraEP: the same", "#009E73", ">"),
    "shared": ("shared experts by water-filling: rows", "#CC79A7", "*"),
}
POLICIES = [
    {"name": "token_drop", "capacity_factor": [1.0, 1.2], "granularity": "device"},
    {"name": "token_drop", "capacity_factor": [1.0, 1.5, 2.0]},
    {"name": "budget_drop", "max_lost_mass": [0.01, 0.05]},
]
SOLVE_US = 0, 100
REPLICATION: list[dict[str, Any]] = [{"spare_per_rank": 1, **more} for more in ({}, {"plan": "variance"})]
REPLICATION += [{"spare_per_rank": 1, "balancer": "lp", "solve_us": us} for us in SOLVE_US]
REBALANCE: list[dict[str, Any]] = [
    {"name": name, "spare_per_rank": 4, "solve_us": us} for name in ("llep", "ultra") for us in SOLVE_US
]
# 10 us is the other end that configs/papers/metro-decode.yaml assumes.
DECODE = [{**REPLICATION[0], "balancer": "activated", "solve_us": us} for us in (0, 10, 100)]

HEAD = """\
# Dropping compared with balancing without loss

Modelled on 8 H200 by `python benchmarks/lossless.py`. Recordings: layers 2, 8, 14 and 20, with requests in
recorded order and 4 batches (GPT-OSS-20B 5, decode 10); GPT-OSS-20B was recorded in decode. Plans know the 3
batches before these (4, 10), and no token that they serve. Power laws: one layer and 20 batches, each with other
busy experts; plans know all but the served one. Weights travel before rows, on the same links, and nothing hides
them. Solving times are assumed. LLEP and UltraEP move no weights for fewer than 1,024 pairs.

A cell is the speedup of one layer, in square brackets its 95 % range over layers and batches, and in round
brackets the mass lost. `*`: inconclusive, or below what the model can tell. Ranges cover traffic, not errors of
the model."""
HELD_OUT = """\
Fullest rank over the mean, in batches of 1,024 tokens that no plan knows: all layers, EP 8, one spare slot. Plans
were made on the first half of the batches of `planned on`, and serve the second half of `served`."""

DIVIDED = """\
The same for EPLB, planned on a recording's first half and serving its second, by the mean number of spare slots of
a rank and layer: equally many in each layer (alike), or divided among layers by what the first half gains
(`spare_budget`)."""


def configs(traces: Path) -> dict[str, dict[str, Any]]:
    """A config of every traffic by its name."""
    found = {}
    for name, (file, preset, num_tokens, num_batches, window) in RECORDED.items():
        recorded = {"kind": "recorded", "trace": str(traces / f"{file}.safetensors"), "layer": LAYERS[0], "seed": 1}
        recorded |= {"tail": "popularity", "num_tokens": num_tokens, "num_batches": num_batches}
        recorded |= {"topk_share": 0.7} if "gpt-oss" in file else {}  # assumed: it records the top-4 alone
        shared = [{"name": "waterfill"}] if ModelSpec.named(preset).shared_ffn_hidden_size else []
        replication = [{**one, "window": window, "plan_ms": 0} for one in [*REPLICATION, {"spare_budget": 0.5}]]
        found[f"{name}, {num_tokens // 8:,} a rank"] = config(preset, recorded, replication, REBALANCE + shared)
    decode = recorded | {"arrangement": "decode", "num_tokens": 64, "num_batches": 10}
    replication = [{**one, "window": 10, "plan_ms": 0} for one in REPLICATION + DECODE]
    found["GPT-OSS-20B, decode, 8 a rank"] = config(preset, decode, replication, [])
    for name, tokens in POWER_LAWS.items():
        drawn = {"kind": "synthetic", "skew": "power_law_1.2", "tokens_per_rank": tokens, "num_batches": 20}
        found[name] = config("gpt-oss-120b", drawn | {"seed": 1}, REPLICATION, REBALANCE)
    return found


def config(preset: str, workload: dict[str, Any], replication: list, rebalance: list) -> dict[str, Any]:
    emulate = {"links": "h100-nvlink4", "device": "h200-sxm", "replication": replication, "rebalance": rebalance}
    layer = {"ep_size": 8, "dtype": "bfloat16"}
    parts = {"layer": layer, "policies": POLICIES, "emulate": emulate}
    sweep = {"workload.layer": LAYERS} if workload["kind"] == "recorded" else {}
    return {"name": "lossless", "model": {"preset": preset}, "workload": workload, "sweep": sweep, **parts}


def modelled(traffics: dict[str, dict[str, Any]], folder: Path) -> pd.DataFrame:
    """A row per traffic and case."""
    rows = []
    for name, values in traffics.items():
        file, directory = folder / "config.yaml", folder / name.replace(", ", "-").replace(" ", "_")
        file.write_text(yaml.safe_dump(values))
        assert command(["emulate", str(file), "--out", str(directory)]) == 0
        rows.append(cases(load([directory])).assign(traffic=name))
    rows = pd.concat(rows, ignore_index=True)
    return rows.assign(label=labels(rows, without=("window", "plan_ms")))  # which are each traffic's


def draw(rows: pd.DataFrame, out: Path) -> None:
    """A panel per traffic: speedup over mass lost; what loses nothing stands in the grey, each at its own place."""
    traffics = list(dict.fromkeys(rows["traffic"]))
    figure, axes_N = plt.subplots(2, -(-len(traffics) // 2), figsize=(12, 6.4), squeeze=False)
    for axes, traffic in zip(axes_N.flat, traffics, strict=False):
        own = rows[rows["traffic"] == traffic].assign(lost=lambda own: 100 * (1 - own["retained_mass"]))
        place = 0.0
        for start, (words, colour, marker) in LOOKS.items():
            points = own[own["label"].str.match(start)].sort_values("lost")
            place -= 0 if "drop" in start else 0.8
            lost = points["lost"] if "drop" in start else np.full(len(points), place)
            line = "" if start.startswith("budget") else "-"
            axes.plot(lost, points["speedup_median"], line, color=colour, marker=marker, label=words, ms=6, lw=1)
        axes.axvspan(place - 1, 0, color="grey", alpha=0.12, lw=0)
        (balanced,) = own.loc[own["label"] == "balanced", "speedup_median"]
        axes.axhline(balanced, color="grey", linestyle=":", label="balance alone")
        axes.axhline(1, color="black", linewidth=0.8)
        axes.set_title(traffic, fontsize=8)
        axes.set_xlim(place - 1, 30)
        axes.set_ylim(top=1.08 * max(own.loc[own["lost"] < 30, "speedup_median"].max(), balanced))
    for axes in axes_N.flat[len(traffics) :]:
        axes.axis("off")
    figure.supxlabel("score mass lost, %", fontsize=9)
    figure.supylabel("speedup of a layer", fontsize=9)
    figure.legend(*axes_N[0][0].get_legend_handles_labels(), loc="lower right", fontsize=8)
    figure.suptitle("Dropping beside what loses nothing, in the grey (modelled, 8 H200)", x=0.01, ha="left")
    figure.tight_layout()
    figure.savefig(out / "lossless.png", dpi=110)


@functools.cache
def recorded_loads(path: Path, num_tokens: int) -> np.ndarray:
    """Pairs of every expert, ``[layers, batches, experts]``, in batches of consecutive tokens."""
    trace, load_LBE = open_trace(path), []
    for layer in range(trace.num_layers):
        expert_TK, _ = trace.read_layer(layer)
        whole_TK = expert_TK[: len(expert_TK) // num_tokens * num_tokens]
        batches = np.split(whole_TK, len(whole_TK) // num_tokens)
        load_LBE.append([np.bincount(batch.ravel(), minlength=trace.num_experts) for batch in batches])
    return np.array(load_LBE)


def halves(load_LBE: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Batches that came first, and those after them."""
    return tuple(np.array_split(load_LBE, 2, axis=1))


def held_out(traces: Path, num_tokens: int = 1024, num_ranks: int = 8) -> pd.DataFrame:
    """Fullest rank over the mean: plans know the first half of ``planned on``, and serve the second of ``served``.

    One spare slot a rank, mean over all layers.
    """
    loads = {file: recorded_loads(traces / f"{file}.safetensors", num_tokens) for file, *_ in RECORDED.values()}
    rows = []
    for files in [*([file] for file in loads), DOMAINS]:
        known_LBE = np.concatenate([halves(loads[file])[0] for file in files], axis=1)
        sizes = {"num_slots": known_LBE.shape[2] + num_ranks, "num_ranks": num_ranks}
        plans = [
            {"EPLB": replicate(known_BE.mean(axis=0), **sizes), "variance": replicate_by_risk(known_BE, **sizes)}
            for known_BE in known_LBE
        ]
        for served in DOMAINS if files[0] in DOMAINS else files:
            found: dict[str, list[float]] = {"native": [], "EPLB": [], "variance": []}
            for judged_BE, planned in zip(halves(loads[served])[1], plans, strict=True):
                ranks = {name: rank_load(judged_BE, plan, num_ranks) for name, plan in planned.items()}
                ranks["native"] = judged_BE.reshape(len(judged_BE), num_ranks, -1).sum(axis=2)
                for name, load_BR in ranks.items():
                    found[name].append((load_BR.max(axis=1) / load_BR.mean(axis=1)).mean())
            words = "all three domains" if len(files) > 1 else files[0]
            rows.append(
                {"planned on": words, "served": served} | {name: np.mean(values) for name, values in found.items()}
            )
    return pd.DataFrame(rows)


def divided(traces: Path, num_tokens: int = 1024, num_ranks: int = 8) -> pd.DataFrame:
    """Fullest rank over the mean of all layers together, by spare slots a layer: alike, or divided among layers."""
    rows, sizes = [], {"num_ranks": num_ranks, "num_groups": 1}
    for file in dict.fromkeys(file for file, *_ in RECORDED.values()):
        known_LBE, judged_LBE = halves(recorded_loads(traces / f"{file}.safetensors", num_tokens).astype(float))
        num_layers = len(known_LBE)
        fullest_LF = np.array([fullest_by_spare("eplb", known_BE, most=8, **sizes) for known_BE in known_LBE])
        for mean in (0, 0.25, 0.5, 1, 2):
            among = spread_over_layers(fullest_LF[:, : MOST_OF_MEAN * math.ceil(mean) + 1], int(mean * num_layers))
            ways = {"divided": among} | ({"alike": [int(mean)] * num_layers} if mean == int(mean) else {})
            row = {"recording": file, "mean": f"{mean:g}", "alike": "-"}
            for way, spare_L in ways.items():
                load_LBR = [
                    rank_load(judged_BE, plan_ahead("eplb", known_BE, spare_per_rank=spare, **sizes), num_ranks)
                    for known_BE, judged_BE, spare in zip(known_LBE, judged_LBE, spare_L, strict=True)
                ]
                row[way] = f"{np.mean([load_BR.max(axis=1) / load_BR.mean(axis=1) for load_BR in load_LBR]):.3f}"
            rows.append(row | {"layers with slots": f"{np.count_nonzero(among)} of {num_layers}"})
    return pd.DataFrame(rows)[["recording", "mean", "alike", "divided", "layers with slots"]]


def markdown(rows: pd.DataFrame, held: pd.DataFrame, budgets: pd.DataFrame) -> str:
    """Tables of speedups with what they cost, of fullest ranks, and of plans in another domain."""
    rows = rows[rows["label"] != "native again"]
    rows = rows.assign(speedup=rows.apply(_speed, axis=1), moved_mib=1024 * rows["moved_gib"])
    is_solved_slowly = rows["label"].str.contains(r"\([1-9]\d* us")  # with the loads of one that takes no time
    is_balancing = ~rows["label"].str.contains("drop") & (rows["label"] != "balanced")
    balancing = rows[is_balancing & ~is_solved_slowly]
    moved, held_more = (balancing[balancing[column] > 0] for column in ("moved_mib", "extra_gib_per_rank"))
    planned = balancing[balancing["rearrange_ms"] > 0]
    tables = [
        _by_traffic("speedup of a layer", rows[rows["label"] != "native"], "speedup", "{}"),
        _by_traffic("fullest rank over the mean", balancing, "rank_imbalance", "{:.2f}"),
        _by_traffic("weights moved (MiB a batch)", moved, "moved_mib", "{:.0f}"),
        _by_traffic("more memory (GiB a rank)", held_more, "extra_gib_per_rank", "{:.2f}"),
        _by_traffic("weights of a new plan over links (ms a layer)", planned, "rearrange_ms", "{:.2f}"),
    ]
    foreign = _table(held.map(lambda cell: cell if isinstance(cell, str) else f"{cell:.3f}"))
    return "\n\n".join([HEAD, *tables, HELD_OUT, foreign, DIVIDED, _table(budgets)]) + "\n"


def _by_traffic(title: str, rows: pd.DataFrame, column: str, form: str) -> str:
    """A table with a row per label and a column per traffic, in their order."""
    values = rows.pivot(index="label", columns="traffic", values=column)
    values = values.reindex(index=rows["label"].unique(), columns=rows["traffic"].unique())
    return _table(values.map(form.format, na_action="ignore").fillna("-").rename_axis(title).reset_index())


def _table(cells: pd.DataFrame) -> str:
    rows = [list(cells), ["---"] * len(cells.columns), *cells.to_numpy().tolist()]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _speed(row: pd.Series) -> str:
    lost = 1 - row["retained_mass"] if pd.notna(row["retained_mass"]) else 0
    surely = "" if row["verdict"] in ("faster", "slower") else "*"
    ends = f"[{row['speedup_low']:.2f}, {row['speedup_high']:.2f}]"
    return f"{row['speedup_median']:.2f}{surely} {ends}" + (f" ({100 * lost:.1f} %)" if lost > 5e-4 else "")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("traces", type=Path, help="a folder of moe-trace-v1 recordings")
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "reference", help="folder (%(default)s)")
    parser.add_argument("--only", default="", help="traffics whose name has this")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    traffics = {name: values for name, values in configs(options.traces).items() if options.only in name}
    with tempfile.TemporaryDirectory() as folder:
        rows = modelled(traffics, Path(folder))
    names = ["traffic", "label", "median_ms", "speedup_median", "speedup_low", "speedup_high", "verdict"]
    names += ["rank_imbalance", "activated_fullest_rank", "dropped_share", "retained_mass"]
    names += ["extra_gib_per_rank", "moved_gib", "rearrange_ms", "rearranged_gib"]
    rows[names].round(6).to_csv(options.out / "lossless.csv", index=False)
    draw(rows, options.out)
    text = markdown(rows, held_out(options.traces), divided(options.traces))
    (options.out / "lossless.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
