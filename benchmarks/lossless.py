"""Dropping beside what loses nothing: one table over recordings and power laws, and what each balancer takes to plan.

    .venv/bin/python benchmarks/lossless.py TRACES

TRACES is a folder of moe-trace-v1 recordings; those of ``RECORDED`` are taken. Every traffic is modelled on 8 H200
(``emulate``), and writes ``lossless.csv``, ``lossless.md`` and the figure ``lossless.png``.
Plans know the other batches alone. ``lossless.md`` has the fullest rank too, and this CPU's time to plan a batch,
which is not counted: configs assume 100 us of a GPU. Takes about ten minutes on two cores.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import yaml

from moe_ep_bench.analysis.cases import cases, load
from moe_ep_bench.analysis.columns import short_label
from moe_ep_bench.balancers import MOVING, OVER_REPLICAS, with_free_slots
from moe_ep_bench.cli import main as command
from moe_ep_bench.models import ModelSpec
from moe_ep_bench.placement import replicate, replicate_by_risk
from moe_ep_bench.workload.trace import open_trace

ROOT = Path(__file__).parents[1]
LAYERS = [2, 8, 14, 20]
RECORDED = {
    **{
        f"DeepSeek-V2-Lite, {domain}": (f"deepseek-v2-lite-{domain}", "deepseek-v2-lite", 2048, 4)
        for domain in ("intent", "summary", "translation")
    },
    "GPT-OSS-20B, mixed": ("gpt-oss-20b-mixed", "gpt-oss-20b", 8192, 4),
}
POWER_LAWS = {f"gpt-oss-120b, power law 1.2, {tokens:,} a rank": tokens for tokens in (2048, 16384)}
# By what labels begin with: what it is called, colour and marker.
LOOKS = {
    "token_drop.*device": ("Token Drop by device, 1.0 and 1.2", "#D55E00", "s"),
    r"token_drop capacity_factor=[\d.]+$": ("Token Drop by expert, 1.0 to 2.0", "#B03000", "d"),
    "budget_drop": ("budget_drop, 1 % and 5 %", "#E69F00", "^"),
    "EPLB,": ("EPLB: memory", "#0072B2", "o"),
    "variance": ("variance plan: memory", "#56B4E9", "v"),
    r"EPLB \+ LP": ("EPLB + LP: memory, solver", "#0072B2", "x"),
    r"EPLB \+ fewest": ("EPLB + fewest activated: memory, solver", "#0072B2", "+"),
    "LLEP": ("LLEP: weights moved, solver", "#009E73", "<"),
    "UltraEP": ("UltraEP: weights moved, solver", "#009E73", ">"),
    "shared": ("shared experts by water-filling: rows", "#CC79A7", "*"),
}
POLICIES = [
    {"name": "token_drop", "capacity_factor": [1.0, 1.2], "granularity": "device"},
    {"name": "token_drop", "capacity_factor": [1.0, 1.5, 2.0]},
    {"name": "budget_drop", "max_lost_mass": [0.01, 0.05]},
]
REPLICATION: list[dict[str, Any]] = [{"spare_per_rank": 1, **more} for more in ({}, {"plan": "variance"})]
REPLICATION.append({"spare_per_rank": 1, "balancer": "lp"})
REBALANCE: list[dict[str, Any]] = [{"name": "llep", "spare_per_rank": 4}, {"name": "ultra", "spare_per_rank": 4}]
DECODE = [{**REPLICATION[0], "balancer": "activated"}]


def configs(traces: Path) -> dict[str, dict[str, Any]]:
    """A config of every traffic by its name."""
    found = {}
    for name, (file, preset, num_tokens, num_batches) in RECORDED.items():
        recorded = {"kind": "recorded", "trace": str(traces / f"{file}.safetensors"), "layer": LAYERS, "seed": 1}
        recorded |= {"tail": "popularity", "num_tokens": num_tokens, "num_batches": num_batches}
        recorded |= {"topk_share": 0.7} if "gpt-oss" in file else {}  # assumed: it records the top-4 alone
        shared = [{"name": "waterfill"}] if ModelSpec.named(preset).shared_ffn_hidden_size else []
        found[f"{name}, {num_tokens // 8:,} a rank"] = config(preset, recorded, REPLICATION, REBALANCE + shared)
    decode = recorded | {"arrangement": "decode", "num_tokens": 256, "num_batches": 10}
    found["GPT-OSS-20B, decode, 32 a rank"] = config(preset, decode, REPLICATION + DECODE, [])
    for name, tokens in POWER_LAWS.items():
        drawn = {"kind": "synthetic", "skew": "power_law_1.2", "tokens_per_rank": tokens, "num_batches": 4, "seed": 1}
        found[name] = config("gpt-oss-120b", drawn, REPLICATION, REBALANCE)
    return found


def config(preset: str, workload: dict[str, Any], replication: list, rebalance: list) -> dict[str, Any]:
    emulate = {"links": "h100-nvlink4", "device": "h200-sxm", "replication": replication, "rebalance": rebalance}
    parts = {"layer": {"ep_size": 8}, "policies": POLICIES, "emulate": emulate}
    return {"name": "lossless", "model": {"preset": preset}, "workload": workload, **parts}


def modelled(traffics: dict[str, dict[str, Any]], folder: Path) -> pd.DataFrame:
    """A row per traffic and case."""
    rows = []
    for name, values in traffics.items():
        file, directory = folder / "config.yaml", folder / name.replace(", ", "-").replace(" ", "_")
        file.write_text(yaml.safe_dump(values))
        assert command(["emulate", str(file), "--out", str(directory)]) == 0
        rows.append(cases(load([directory])).assign(traffic=name))
    return pd.concat(rows, ignore_index=True)


def draw(rows: pd.DataFrame, out: Path) -> None:
    """A panel per traffic: speedup over mass lost; what loses nothing stands at 0, by what it is paid with."""
    traffics = list(dict.fromkeys(rows["traffic"]))
    figure, axes_N = plt.subplots(2, -(-len(traffics) // 2), figsize=(12, 6.4), squeeze=False)
    for axes, traffic in zip(axes_N.flat, traffics, strict=False):
        own = rows[rows["traffic"] == traffic].assign(lost=lambda own: 100 * (1 - own["retained_mass"]))
        for start, (words, colour, marker) in LOOKS.items():
            points = own[own["label"].str.match(start)].sort_values("lost")
            line = "-" if start.startswith("token") else ""
            axes.plot(points["lost"], points["speedup_median"], line, color=colour, marker=marker, label=words, ms=6)
        (balanced,) = own.loc[own["label"] == "native, balanced scores", "speedup_median"]
        axes.axhline(balanced, color="grey", linestyle=":", label="balance alone")
        axes.axhline(1, color="black", linewidth=0.8)
        axes.set_title(traffic, fontsize=8)
        axes.set_xlim(-1.5, 30)
        axes.set_ylim(top=1.08 * max(own.loc[own["lost"] < 30, "speedup_median"].max(), balanced))
    for axes in axes_N.flat[len(traffics) :]:
        axes.axis("off")
    figure.supxlabel("score mass lost, %", fontsize=9)
    figure.supylabel("speedup of a layer", fontsize=9)
    figure.legend(*axes_N[0][0].get_legend_handles_labels(), loc="lower right", fontsize=8)
    figure.suptitle("Dropping beside what loses nothing (modelled, 8 H200)", x=0.01, ha="left")
    figure.tight_layout()
    figure.savefig(out / "lossless.png", dpi=110)


def planning_ms(repeats: int = 5) -> dict[str, float]:
    """Milliseconds of this CPU for one batch of 256 experts on 64 ranks, median."""
    generator = np.random.default_rng(0)
    load_BE = 4e4 * generator.dirichlet(np.full(256, 0.5), 16)
    counts_RE = generator.multinomial(16384 * 8, load_BE[0] / load_BE[0].sum(), 64)
    sizes = {"num_slots": 256 + 64, "num_ranks": 64}
    slots_P, free_P = replicate(load_BE.mean(axis=0), **sizes).slot_expert_LP[0], with_free_slots(256, 64, 2)
    planned: dict[str, Callable[[], object]] = {
        "plan eplb, a layer": lambda: replicate(load_BE.mean(axis=0), **sizes),
        "plan variance, a layer": lambda: replicate_by_risk(load_BE, **sizes),
        **{name: lambda f=OVER_REPLICAS[name]: f(slots_P, counts_RE) for name in ("lp", "activated")},
        **{name: lambda f=f: f(free_P, counts_RE, least_pairs=64, threshold=1.0) for name, f in MOVING.items()},
    }
    found = {}
    for name, plan in planned.items():
        plan()
        times = []
        for _ in range(repeats):
            start = time.perf_counter()
            plan()
            times.append(time.perf_counter() - start)
        found[name] = 1e3 * float(np.median(times))
    return found


def held_out(traces: Path, num_tokens: int = 1024) -> pd.DataFrame:
    """Fullest rank over the mean of every second batch, planned on the others: one spare slot, EP 8, all layers."""
    rows = {}
    for file, *_ in RECORDED.values():
        trace, found = open_trace(traces / f"{file}.safetensors"), {"native": [], "eplb": [], "variance": []}
        for layer in range(trace.num_layers):
            expert_TK, _ = trace.read_layer(layer)
            batches = np.split(expert_TK[: len(expert_TK) // num_tokens * num_tokens], len(expert_TK) // num_tokens)
            load_BE = np.stack([np.bincount(batch.ravel(), minlength=trace.num_experts) for batch in batches])
            known_BE, judged_BE = load_BE[::2], load_BE[1::2]
            sizes = {"num_slots": trace.num_experts + 8, "num_ranks": 8}
            plans = {
                "eplb": replicate(known_BE.mean(axis=0), **sizes),
                "variance": replicate_by_risk(known_BE, **sizes),
            }
            ranks = {name: plan.rank_load(judged_BE[:, None])[:, 0] for name, plan in plans.items()}
            ranks["native"] = judged_BE.reshape(len(judged_BE), 8, -1).sum(axis=2)
            for name, load_BR in ranks.items():
                found[name].append((load_BR.max(axis=1) / load_BR.mean(axis=1)).mean())
        rows[file] = {name: np.mean(values) for name, values in found.items()}
    return pd.DataFrame(rows).T


def markdown(rows: pd.DataFrame, planned: dict[str, float], held: pd.DataFrame) -> str:
    """Tables of speedups with what they cost, and of fullest ranks."""
    labels = [label for label in dict.fromkeys(rows["label"]) if not label.startswith("native")]
    labels.append("native, balanced scores")
    shown = {name: own.set_index("label") for name, own in rows.groupby("traffic", sort=False)}
    lines = [
        "# Dropping beside what loses nothing",
        "",
        "Modelled, 8 H200; made by `python benchmarks/lossless.py`.",
        "",
    ]
    lines += [_row(["speedup (mass lost)", *shown]), _row(["---"] * (len(shown) + 1))]
    for label in labels:
        lines.append(
            _row(
                [short_label(label), *(_speed(own.loc[label]) if label in own.index else "-" for own in shown.values())]
            )
        )
    lines += ["", _row(["fullest rank over the mean", *shown]), _row(["---"] * (len(shown) + 1))]
    for label in ("native", *(label for label in labels if "drop" not in label and "balanced" not in label)):
        cells = (f"{own.loc[label, 'rank_imbalance']:.2f}" if label in own.index else "-" for own in shown.values())
        lines.append(_row([short_label(label), *cells]))
    lines += ["", _row(["weights moved (MiB a batch)", *shown]), _row(["---"] * (len(shown) + 1))]
    for label in (label for label in labels if label.startswith(("LLEP", "Ultra"))):
        cells = (f"{1024 * own.loc[label, 'moved_gib']:.0f}" if label in own.index else "-" for own in shown.values())
        lines.append(_row([short_label(label), *cells]))
    lines += ["", "Fullest rank over the mean, held-out batches of 1,024 tokens, all layers, one spare slot a rank", ""]
    lines += [_row(["recording", *held]), _row(["---"] * 4)]
    lines += [
        _row([file, *(f"{value:.3f}" for value in values)])
        for file, values in zip(held.index, held.to_numpy(), strict=True)
    ]
    lines += ["", "| time to plan on this CPU, 256 experts on 64 ranks | ms |", "|---|---|"]
    lines += [_row([name, f"{time_ms:.3g}"]) for name, time_ms in planned.items()]
    return "\n".join(lines) + "\n"


def _row(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _speed(row: pd.Series) -> str:
    lost = 1 - row["retained_mass"] if pd.notna(row["retained_mass"]) else 0
    return f"{row['speedup_median']:.2f}" + (f" ({100 * lost:.1f} %)" if lost > 5e-4 else "")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("traces", type=Path, help="a folder of moe-trace-v1 recordings")
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "reference", help="folder (%(default)s)")
    parser.add_argument("--only", default="", help="traffics whose name has this")
    options = parser.parse_args()
    traffics = {name: values for name, values in configs(options.traces).items() if options.only in name}
    with tempfile.TemporaryDirectory() as folder:
        rows = modelled(traffics, Path(folder))
    names = ["traffic", "label", "median_ms", "speedup_median", "speedup_low", "speedup_high", "verdict"]
    names += ["rank_imbalance", "activated_fullest_rank", "dropped_share", "retained_mass"]
    rows[[*names, "extra_gib_per_rank", "moved_gib"]].round(6).to_csv(options.out / "lossless.csv", index=False)
    draw(rows, options.out)
    text = markdown(rows, planning_ms(), held_out(options.traces))
    (options.out / "lossless.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
