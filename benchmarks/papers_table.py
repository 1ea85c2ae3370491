"""Put the numbers of several ``papers`` runs into one table, and set Figure 4's 24 bars beside ours.

    moe-ep-bench papers configs/papers/capacity-figure4.yaml --out DIR/capacity-figure4        # and the others
    python benchmarks/papers_table.py DIR/* --out results/reference/papers-modelled

writes ``papers-modelled.csv``, a row for each claim, policy and traffic of every directory with the commit that ran it,
and ``papers-modelled.md``. What the CSV has of other configs stays. The page is made from the CSV alone, also without
directories.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd

from moe_ep_bench.analysis.claims import number_words
from moe_ep_bench.analysis.claims_report import METRIC_WORDS
from moe_ep_bench.analysis.columns import missing
from moe_ep_bench.config import Experiment, load_experiments
from moe_ep_bench.papers.claims import NATIVE_METRICS, OWN_METRICS

COLUMNS = (
    *("source", "of", "ours_of", "metric", "policy", "versus", "traffic", "primary", "paper_low", "paper_high", "ours"),
    *("ours_low", "ours_high", "difference", "draws", "dropped_share", "fullest_expert", "fullest_rank"),
    *("needed_scattered_fullest_expert", "needed_adjacent_fullest_expert", "moe_speedup_needed"),
)
DIGITS = 6
ROOT = Path(__file__).parents[1]
CONFIGS = ROOT / "configs" / "papers"
HEAD = """# Published numbers beside ours, modelled

**Nothing here was run.** Routing was computed; times come from a roofline and modelled links, most of whose
efficiencies are assumed. Made by benchmarks/papers_table.py from [papers-modelled.csv](papers-modelled.csv), which has
every traffic's number with its draws. Why the two may differ is in each config's notes.
[docs/papers.md](../../docs/papers.md) says how far to trust it.

*Ours* is the mean over draws under the traffic that was fixed beforehand; the range is that of the means under all
traffics. The largest disagreement, as a share of the paper's number, comes first. *Peak needed*: the load of the
busiest expert that would give the paper's number, busy experts scattered; adjacent. *MoE share needed*: what part of
the paper's whole time MoE layers as fast as ours would be.
"""


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directories", nargs="*", type=Path, help="left by `papers`")
    parser.add_argument("--out", type=Path, required=True, help="the files' path without its ending")
    args = parser.parse_args(arguments)
    csv = args.out.with_suffix(".csv")
    if args.directories:
        rows = merged(read(csv) if csv.exists() else None, [rows_of(directory) for directory in args.directories])
        rows.to_csv(csv, index=False, float_format=f"%.{DIGITS}g")
    args.out.with_suffix(".md").write_text(page(read(csv)))
    return 0


def read(csv: Path) -> pd.DataFrame:
    """The table as it was written."""
    return pd.read_csv(csv, dtype={"changes": str}).fillna({"changes": ""})


def merged(before: pd.DataFrame | None, new: list[pd.DataFrame]) -> pd.DataFrame:
    """The new rows in place of those of the same configs; config by config."""
    rows = pd.concat(new)
    if before is not None:
        rows = pd.concat([before[~before["config"].isin(rows["config"])], rows])
    return rows.sort_values("config", kind="stable")


def rows_of(directory: Path) -> pd.DataFrame:
    """The claims of one directory, with what ran them; its ``claims.csv`` has them in order, traffic by traffic."""
    rows = pd.read_csv(directory / "claims.csv")
    described = json.loads((directory / "run.json").read_text())
    environment, points = described["environment"], described["config"]
    told_by = rows[["source", "of", "metric", "policy", "versus"]].astype(object).fillna("")
    claim = list(told_by.itertuples(index=False, name=None))
    numbers, seen, last = [], set(), None
    for one, traffic in zip(claim, rows["traffic"], strict=True):
        if one != last or traffic in seen:  # The next number begins.
            seen = set()
            numbers.append(numbers[-1] + 1 if numbers else 1)
        else:
            numbers.append(numbers[-1])
        seen.add(traffic)
        last = one
    return rows[list(COLUMNS)].assign(
        config=points[0]["name"],
        number=numbers,
        about=rows["comparison"].str.rpartition(", ")[0],
        device=rows["device"].map(_short),
        links=rows["links"].map(_short),
        changes=" ".join(_changes(points[0]["name"], points)),
        commit=environment["git_commit"][:7] + ("+" if environment["git_dirty"] else ""),
        date=described["created"][:10],
    )


def page(rows: pd.DataFrame) -> str:
    """The page of a table of claims."""
    primary = _primary(rows)
    of_claims = {path.stem for path in CONFIGS.rglob("*.yaml") if path.parent.name != "accuracy"}
    missing_ones = ", ".join(f"`{name}`" for name in sorted(of_claims - {*rows["config"]}))
    not_run = [f"**Not run for this table**, for time: {missing_ones}.\n"] if missing_ones else []
    parts = [HEAD, *not_run, *_figure_4(primary)]
    for config, of_config in primary.groupby("config", sort=False):
        first = of_config.iloc[0]
        parts.append(f"## {config}\n")
        how = f"Modelled by {first['device']}, {first['links']}, {_draws(int(first['draws']))}"
        parts.append(f"{how}. Commit {first['commit']}, {first['date']}:\n")
        command = " ".join(["moe-ep-bench papers", str(_path(config).relative_to(ROOT)), first["changes"]]).strip()
        parts.append(f"```\n{command}\n```\n")
        parts.append(_table(of_config))
    return "\n".join(parts)


def _draws(draws: int) -> str:
    return f"{draws} draws" if draws > 1 else "one draw (of whole models: a draw for each layer)"


def _changes(name: str, points: list[dict[str, Any]]) -> Iterator[str]:
    """What was asked for otherwise than the config of this name says, as options of the command.

    Args:
        points: of the sweep, as ``run.json`` has them.
    """
    asked = load_experiments(_path(name), on_cpu=False)
    keys = {"workload.num_batches": False} | {key: True for key, _ in asked[0].point}
    for key, is_swept in keys.items():
        wanted, ran = ([_value(point, key) for point in those] for those in (_dumped(asked), points))
        if set(map(str, wanted)) != set(map(str, ran)):
            values = ", ".join(dict.fromkeys(map(str, ran)))
            yield f"--set 'sweep.{key}=[{values}]'" if is_swept else f"--set {key}={values}"


def _dumped(experiments: list[Experiment]) -> list[dict[str, Any]]:
    return [experiment.model_dump(mode="json") for experiment in experiments]


def _value(point: dict[str, Any], dotted: str) -> Any:
    found: Any = point
    for part in dotted.split("."):
        found = found[part]
    return found


def _path(name: str) -> Path:
    return next(CONFIGS.rglob(f"{name}.yaml"))


def _primary(rows: pd.DataFrame) -> pd.DataFrame:
    """A row per number, with the ends of ours under all traffics; the largest disagreement first in each config."""
    ours = rows.groupby(["config", "number"])["ours"]
    rows = rows.assign(least=ours.transform("min"), most=ours.transform("max"))
    rows = rows[rows["primary"]]
    size = (rows["difference"] / rows[["paper_low", "paper_high"]].mean(axis=1)).abs().fillna(-1)
    order = rows.assign(size=size, place=pd.factorize(rows["config"])[0])
    return order.sort_values(["place", "size"], ascending=[True, False], kind="stable")


def _figure_4(primary: pd.DataFrame) -> Iterator[str]:
    bars = primary[primary["source"].str.startswith("Figure 4, ") & (primary["metric"] == "speedup")]
    if bars.empty:
        return
    bars = bars.assign(
        model=bars["source"].str.removeprefix("Figure 4, "),
        factor=bars["policy"].str.extract(r"capacity_factor=([\d.]+)", expand=False).astype(float),
        method=bars["policy"].str.split().str[0],
    )
    bars = bars.sort_values(["model", "method", "factor"], ascending=[True, False, False], kind="stable")
    lines = ["| modelled: model, policy, factor | paper | ours | error | fixed share |", "|---|---|---|---|---|"]
    for bar in bars.to_dict("records"):
        fixed = fixed_share(bar["paper_low"], bar["ours"])
        words = "-" if fixed is None else f"{fixed:.2f}"
        name = f"{bar['model']}, {bar['method']} {bar['factor']:.1f}"
        lines.append(f"| {name} | {bar['paper_low']:.2f} | {bar['ours']:.2f} | {bar['difference']:+.2f} | {words} |")
    yield f"## Figure 4 of arXiv 2503.05066: {len(bars)} bars\n"
    yield errors_of_bars(bars) + "\n"
    yield (
        "*Fixed share*: the part of native's layer that no drop would shorten, were ours to become the paper's "
        "(Amdahl); where ours is the larger gain.\n"
    )
    yield "\n".join(lines) + "\n"


def errors_of_bars(bars: pd.DataFrame) -> str:
    """Mean absolute and mean error of all bars, without Mixtral's, and by model."""
    alone = bars[bars["model"].str.contains("Mixtral")]
    others = bars.drop(alone.index)
    by_model = bars.groupby("model")["difference"].mean()
    means = ", ".join(f"{model} {error:+.2f}" for model, error in by_model.items())
    return (
        f"Mean absolute error of {len(bars)} bars: {bars['difference'].abs().mean():.2f}; of the {len(others)} without "
        f"Mixtral: {others['difference'].abs().mean():.2f}. Mean error by model: {means}."
    )


def fixed_share(paper: float, ours: float) -> float | None:
    """The share x of native's time with 1 / paper = (1 - x) / ours + x; None where ours is not the larger gain."""
    return (1 / paper - 1 / ours) / (1 - 1 / ours) if ours > paper and ours > 1 else None


def _table(rows: pd.DataFrame) -> str:
    head = [
        "modelled: item",
        "policy",
        "paper",
        "ours",
        "range",
        "ours - paper",
        "dropped %",
        "peak needed",
        "MoE share needed",
    ]
    lines = []
    # Where one claim is about several comparisons, they are named.
    several = rows.groupby(["source", "of", "metric", "policy"])["about"].transform("nunique") > 1
    rows = rows.assign(item=rows["source"] + rows.apply(_end_to_end, axis=1))
    rows["item"] = rows["item"].where(~several, rows["item"] + " (" + rows["about"] + ")")
    for row in rows.to_dict("records"):
        metric = "" if row["metric"] == "speedup" else f": {METRIC_WORDS[row['metric']]}"
        needed = [row[f"needed_{one}_fullest_expert"] for one in ("scattered", "adjacent")]
        low, high = (number_words(row["metric"], row[end]) for end in ("least", "most"))
        cells = [
            f"{row['item']}{metric}",
            row["policy"],
            _paper(row),
            number_words(row["metric"], row["ours"]),
            "-" if low == high else f"{low} to {high}",
            _difference(row),
            "-" if missing(row["dropped_share"]) else f"{100 * row['dropped_share']:.1f}",
            "; ".join(f"{peak:.1f}" for peak in needed if not missing(peak)) or "-",
            _share_needed(row),
        ]
        lines.append(cells)
    used = [at for at, name in enumerate(head) if at < 6 or any(line[at] != "-" for line in lines)]
    wanted = [head, ["---"] * len(head), *lines]
    return "\n".join("| " + " | ".join(line[at] for at in used) + " |" for line in wanted) + "\n"


def _end_to_end(row: pd.Series) -> str:
    """What the paper measured, where ours is not the same."""
    if row["of"] == "layer":
        return ""
    ours = {"layer": " (ours: a layer)", "layers": " (ours: all MoE layers)", "end_to_end": ""}[row["ours_of"]]
    return ", end to end" + ours if row["of"] == "end_to_end" else ", of what is not stated" + ours


def _paper(row: dict[str, Any]) -> str:
    ends = [None if missing(row[end]) else number_words(row["metric"], row[end]) for end in ("paper_low", "paper_high")]
    low, high = ends
    if low is None or high is None:
        return "not stated" if low == high else f"above {low}" if high is None else f"below {high}"
    return low if low == high else f"{low} to {high}"


def _difference(row: dict[str, Any]) -> str:
    if missing(row["difference"]):
        return "-"
    factor, digits = (100, 1) if row["metric"] in OWN_METRICS else (1, 1 if row["metric"] in NATIVE_METRICS else 2)
    return f"{factor * row['difference']:+.{digits}f}"


def _share_needed(row: dict[str, Any]) -> str:
    """What part of the paper's time MoE layers would be, were they as fast as ours."""
    paper, ours = row["paper_low"], row["ours"]
    if row["of"] != "end_to_end" or row["ours_of"] != "layer" or paper != row["paper_high"]:
        return "-"
    if row["metric"] == "speedup":
        paper, ours = 1 / paper, 1 / ours
    return f"{(1 - paper) / (1 - ours):.2f}" if ours < paper < 1 else "-"


def _short(words: object) -> str:
    """The name alone of ``modelled by devices/h20: a roofline of ...``."""
    return str(words).partition(":")[0].removeprefix("modelled by ")


if __name__ == "__main__":
    raise SystemExit(main())
