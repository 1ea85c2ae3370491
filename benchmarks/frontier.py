"""What a budget of lost score mass buys: one factor, factors by layer, budget_drop, and the frontier of dropping.

    .venv/bin/python benchmarks/frontier.py TRACES

For every moe-trace-v1 recording in the folder TRACES and several budgets, factors are derived from every second batch,
and all methods are judged on the others (``moe_ep_bench.workload.derived``). Writes ``frontier.csv``, which frontier.md
reads, and ``frontier.svg``. Routing alone: nothing is timed. Takes about ten minutes on one core.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import matplotlib.pyplot as plt
import pandas as pd

from moe_ep_bench.policies import make_policy
from moe_ep_bench.workload.derived import Setting, compared_policies, derive_factors, judge
from moe_ep_bench.workload.trace import open_trace

ROOT = Path(__file__).parents[1]
BUDGETS = (0.002, 0.01, 0.05)
BINS = (1, 2, 32)  # beside the default, 8
SETTINGS = {name: Setting(num_tokens=1024, granularity=name) for name in ("device", "expert")}
LOOKS = {
    "one factor, expert": ("#D55E00", "s"),
    "one factor, device": ("#E69F00", "o"),
    "by layer, device": ("#009E73", "^"),
    "budget_drop": ("#0072B2", "D"),
    "frontier": ("black", ""),
}


def compare(path: Path) -> pd.DataFrame:
    """A row per budget and method of one recording."""
    trace, rows = open_trace(path), []
    num_batches = len(SETTINGS["device"].batches(trace))
    for budget in BUDGETS:
        policies = {}
        for name, setting in SETTINGS.items():
            made = compared_policies(budget, derive_factors(path, budget, setting), setting)
            policies |= {"native": made["native"], "budget_drop": made["budget_drop"]}
            policies |= {f"{method}, {name}": made[method] for method in ("one factor", "by layer")}
        for bins in BINS if budget == 0.01 else ():
            spec = {"name": "budget_drop", "max_lost_mass": budget, "bins_per_octave": bins}
            policies[f"budget_drop, {bins} bins"] = make_policy(spec)
        about = {"recording": path.stem, "held_out_batches": num_batches // 2, "budget": budget}
        judged = judge(path, budget, SETTINGS["device"], policies)
        rows.append(pd.DataFrame(about, index=judged.index).join(judged))
        print(f"{path.stem}: budget {budget:g}", file=sys.stderr, flush=True)
    return pd.concat(rows, ignore_index=True)


def draw(rows: pd.DataFrame, out: Path) -> None:
    """A panel per recording: fullest rank over mass lost."""
    recordings = list(rows["recording"].unique())
    figure, axes_N = plt.subplots(1, len(recordings), figsize=(3.1 * len(recordings), 3.4), squeeze=False)
    for axes, recording in zip(axes_N[0], recordings, strict=True):
        own = rows[rows["recording"] == recording]
        native = own.loc[own["method"] == "native", "fullest"].iloc[0]
        for method, (colour, marker) in LOOKS.items():
            points = own[own["method"] == method].sort_values("lost")
            look = {"color": colour, "marker": marker, "linestyle": "-" if marker else "--", "markersize": 4}
            axes.plot([0, *(100 * points["lost"])], [native, *points["fullest"]], linewidth=1.2, label=method, **look)
        axes.set_title(recording, fontsize=8)
        axes.set_xlabel("score mass lost, %")
    axes_N[0][0].set_ylabel("fullest rank over the mean")
    axes_N[0][-1].legend(fontsize=7)
    words = "Routed, EP 8, held-out batches. With the same loss in each batch, no policy that only drops lies below "
    figure.text(0.01, 0.01, f"{words}the dashed line.", fontsize=7)
    figure.tight_layout(rect=(0, 0.04, 1, 1))
    figure.savefig(out, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("traces", type=Path, help="a folder of moe-trace-v1 recordings")
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "reference", help="folder (%(default)s)")
    options = parser.parse_args()
    plt.rcParams["svg.hashsalt"] = "frontier"
    rows = pd.concat([compare(path) for path in sorted(options.traces.glob("*.safetensors"))], ignore_index=True)
    rows.round(5).to_csv(options.out / "frontier.csv", index=False)
    print(rows.to_string(index=False, float_format="{:.4f}".format))
    draw(rows, options.out / "frontier.svg")


if __name__ == "__main__":
    main()
