"""Papers' numbers and ours, of claims that ``papers`` left: a frame with a row per claim, policy and traffic.

Ours is a layer or, with ``scope: model``, a pass of a whole model; where the paper measured the other, the row says so.
Comparisons that differ in their seed alone are draws of one traffic: their mean is ours. The traffic that was chosen
beforehand is primary; the others are a range. No row is left out because it does not fit.
"""

from __future__ import annotations

from collections.abc import Hashable
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from moe_ep_bench.analysis.cases import COMPARISON, cases, comparisons, differs_from_topk, load, routing, timings
from moe_ep_bench.analysis.columns import (
    LOST,
    NONE,
    Column,
    Row,
    Table,
    lost_columns,
    missing,
    number,
    render,
    text,
)
from moe_ep_bench.analysis.notes import (
    CLAIMS_OF_LAYERS,
    CLAIMS_OF_MODELS,
    NOT_CHOSEN,
    OURS,
    OVER_TOPK,
    UNCLAIMED,
    WHY_THEY_DIFFER,
    layers_words,
)
from moe_ep_bench.analysis.store import ITERATION, Store, with_draws_apart
from moe_ep_bench.facts import JsonRecord
from moe_ep_bench.facts.words import how_parts, links_parts, said_once
from moe_ep_bench.files import write_text
from moe_ep_bench.papers.claims import CLAIMED, SHARES, MetricName, claims_path
from moe_ep_bench.results import ResultsError, read_document
from moe_ep_bench.schema import ALL, MOE
from moe_ep_bench.timing.statistics import estimate_median, paired_ratios

METRICS = {name: metric.words for name, metric in CLAIMED.items()}
# Quantities of the paper, and of ours.
_OF = {"layer": "", "end_to_end": ", end to end", "not_stated": ", layer or end to end not stated"}
_OURS_OF = {"layer": "a layer", "end_to_end": "end to end", "layers": "all MoE layers"}
# Microseconds and experts: one decimal is enough.
_COARSE = ("time_us", "num_activated")
# Behind a traffic that is shown, though it was not chosen.
_FIRST = "(first)"
_VALUES = ["ours", "ours_low", "ours_high"]
_MEANS = ["ours", "over_topk", *LOST]
_NUMBERS = ["paper_low", "paper_high", *_VALUES[1:], *_MEANS]
_CSV = [
    "source", "of", "ours_of", "metric", "policy", "versus", "comparison", "traffic", "primary", "paper_low",
    "paper_high", *_VALUES, "difference", *LOST, "mode", "device", "links", "draws",
]  # fmt: skip

# Microseconds by case id and quantity, each by launch, batch and iteration.
Times = dict[tuple[Hashable, ...], pd.Series]


class _Row(JsonRecord):  # ``papers.run``
    number: int
    source: str
    of: str
    metric: MetricName
    paper: tuple[float | None, float | None] | None
    note: str
    comparison_id: str
    case_id: str
    versus_id: str | None
    setting: dict[str, Any]
    traffic: str
    primary: bool
    primary_because: str | None


class _File(JsonRecord):
    claims: list[_Row]


@lru_cache(maxsize=4)
def claims(store: Store) -> pd.DataFrame:
    """A row per claim, policy and traffic of the directories that ``papers`` left; none of others.

    Columns: ``directory``; what the claim says (``number`` counts claims x policies); ``ours`` with the ends of its
    interval, of its samples where batches are too few, or of its draws; ``over_topk``, the same over ``topk`` where
    that is another number; ``difference`` from the paper's nearest end; ``unmeasured``, why there is no ``ours``.

    Raises:
        ResultsError: one line that names the file and what is wrong with it.
    """
    claimed = [one.folder for one in store.directories if claims_path(one.folder).is_file()]
    if not claimed:
        return pd.DataFrame(columns=_CSV)
    apart = [one for one in with_draws_apart(store).directories if one.folder in claimed]
    return pd.concat([_claims_of(Store((one,), are_draws_joined=False)) for one in apart], ignore_index=True)


def measured(store: Store) -> pd.DataFrame:
    """The claims that have a number of ours."""
    rows = claims(store)
    return rows[rows["ours"].notna()]


def _claims_of(store: Store) -> pd.DataFrame:
    """The claims of one directory, whose draws stand apart."""
    (directory,) = store.directories
    path = claims_path(directory.folder)
    activated = routing(store).groupby("case_id")["activated_fullest_rank"].mean()
    rows = cases(store).assign(
        activated=lambda rows: rows["case_id"].map(activated), differs_from_topk=differs_from_topk
    )
    by_id = rows.set_index("case_id", drop=False).to_dict("index")
    natives = {row["comparison_id"]: row for row in by_id.values() if row["role"] == "baseline"}
    topks = {row["comparison_id"]: row for row in by_id.values() if row["policy"] == "topk"}
    times = dict(iter(timings(store).set_index(ITERATION).groupby(["case_id", "quantity"], sort=False)["time_us"]))
    found = []
    try:
        for claim in read_document(path, _File).claims:
            against = by_id[claim.versus_id] if claim.versus_id else natives.get(claim.comparison_id)
            found.append(_row(claim, by_id[claim.case_id], against, topks.get(claim.comparison_id), times))
    except KeyError as error:
        raise ResultsError(f"{path}: of another run than run.json, or damaged: {error!r}"[:300]) from None
    joined = _over_draws(pd.DataFrame(found).astype(dict.fromkeys(_NUMBERS, float)))
    return joined.assign(directory=cases(store)["directory"].iloc[0])


def _row(claim: _Row, case: Row, against: Row | None, topk: Row | None, times: Times) -> Row:
    """A row of ``claims`` before draws are joined."""
    metric = CLAIMED[claim.metric]
    ours_of = "layer" if case["scope"] != "model" else "end_to_end" if metric.of == ALL else "layers"
    value = None
    if against is not None and case["status"] == against["status"] == "ok":
        value = _value(claim, case, against, times)
    is_over_native = value is not None and claim.versus_id is None and metric.of == ALL and metric.value != "number"
    is_other = topk is not None and is_over_native and case["differs_from_topk"]
    over_topk = _value(claim, case, topk, times) if topk is not None and is_other else None
    of = _OF[claim.of] + (f" (ours: {_OURS_OF[ours_of]})" if claim.of != ours_of else "")
    versus = against["label"] if claim.versus_id and against else None
    setting = ", ".join(f"{key.rpartition('.')[2].replace('_', ' ')} {one}" for key, one in claim.setting.items())
    return {
        **claim.model_dump(exclude={"paper", "versus_id", "case_id", "setting"}),
        "claim": claim.source + of + (f" ({setting})" if setting else ""),
        "policy": case["label"],
        "versus": versus,
        "case": f"{case['label']} against {versus}" if versus else case["label"],
        "ours_of": ours_of,
        "comparison": case["title"],
        **dict(zip(("paper_low", "paper_high"), claim.paper or (None, None), strict=True)),
        **dict(zip(_VALUES, value or (None,) * 3, strict=True)),
        "over_topk": over_topk and over_topk[0],
        **{name: value and case[name] for name in LOST},
        "mode": case["how"],
        "device": case["device"],
        "links": case["links"],
        "unmeasured": None if value else _why_not(case, against),
    }


def _why_not(case: Row, against: Row | None) -> str:
    """Why a claim has no number of ours."""
    lost = [row for row in (case, against) if row is not None and row["status"] != "ok"]
    reasons = [f"{row['label']}: {row['status']}: {row['reason']}" for row in lost]
    return "; ".join(reasons) or UNCLAIMED


def _value(claim: _Row, case: Row, against: Row, times: Times) -> tuple[float, float, float] | None:
    """Value, low and high by the claim's metric; None where it was not measured."""
    metric = CLAIMED[claim.metric]
    if metric.of in (ALL, MOE):
        ours_us, against_us = (times.get((row["case_id"], metric.of)) for row in (case, against))
        if ours_us is None or against_us is None:
            return None
        pair = (ours_us, against_us) if metric.value == "ratio" else (against_us, ours_us)
        found = estimate_median(ours_us if metric.value == "number" else paired_ratios(*pair))
        return found and (found.median, found.low, found.high)
    ours, theirs = (np.nan if missing(row.get(metric.of)) else row[metric.of] for row in (case, against))
    values = {"ratio": ours / (theirs or np.nan), "inverse": theirs / (ours or np.nan)}
    value = values.get(metric.value, ours)
    return None if missing(value) else (float(value), float(value), float(value))


def _over_draws(frame: pd.DataFrame) -> pd.DataFrame:
    """A row per claim and traffic: means over its draws that were measured, the difference, and which is ``shown``.

    That is the primary traffic; of a number for which none was chosen beforehand the first of the config.
    """
    traffic = ["number", "traffic"]
    has_ours = frame.groupby(traffic)["ours"].transform("count") > 0
    groups = frame[frame["ours"].notna() | ~has_ours].groupby(traffic, sort=False)
    rows, draws = groups.nth(0).set_index(traffic), groups["ours"].count().clip(lower=1)
    several = draws.index[draws > 1]
    rows.loc[several, _MEANS] = groups[_MEANS].mean().loc[several]
    rows.loc[several, ["ours_low", "ours_high"]] = groups["ours"].agg(["min", "max"]).loc[several].to_numpy()
    rows = rows.assign(draws=draws).reset_index()
    below, above = rows["ours"] - rows["paper_low"], rows["ours"] - rows["paper_high"]
    difference = below.clip(upper=0).fillna(0) + above.clip(lower=0).fillna(0)
    is_known = rows["ours"].notna() & (rows["paper_low"].notna() | rows["paper_high"].notna())
    chosen = rows.groupby("number")["primary"].transform("any")
    return rows.assign(
        difference=difference.where(is_known),
        shown=rows["primary"].where(chosen, ~rows.duplicated("number")).astype(bool),
    )


# ---- tables ----------------------------------------------------------------------------------------------------------


def load_claims(directory: Path) -> Store:
    """Read a directory that ``papers`` left, its draws apart.

    Raises:
        ResultsError: one line that names the file and what is wrong with it.
    """
    read_document(claims_path(directory), _File)
    return load(directory, join_draws=False)


def write_claims(store: Store) -> str:
    """Write ``claims.txt`` and ``claims.csv`` of one directory; return the text."""
    shown = claims_text(store)
    written = {"claims.txt": f"{shown}\n"}
    if len(rows := measured(store)):
        written["claims.csv"] = render([Table(rows[_CSV], ())], "csv")
    for name, content in written.items():
        write_text(store.directories[0].folder / name, content)
    return shown


def claims_text(store: Store) -> str:
    """The claims, the largest disagreement first; and reasons."""
    rows = _shown(claims(store))
    return render([_claims_table(store, rows), _reasons(rows)], "text")


def number_words(metric: str, value: float) -> str:
    """A value by a claim's metric, with its unit where it is a share."""
    if metric in SHARES:
        return f"{100 * value:.1f} %"
    return f"{value:.1f}" if metric in _COARSE else f"{value:.2f}"


def paper_words(row: Row) -> str:
    """The number, ``above`` or ``below`` one, or from one to another."""
    low, high = (
        None if missing(row[end]) else number_words(row["metric"], row[end]) for end in ("paper_low", "paper_high")
    )
    if low is None or high is None:
        return "not stated" if low == high else f"below {high}" if low is None else f"above {low}"
    return low if low == high else f"{low} to {high}"


def _shown(frame: pd.DataFrame) -> pd.DataFrame:
    """A row per number of a paper: ours under the traffic that is shown, and the ends of ours under all."""
    by_number = frame.groupby("number")["ours"]
    rows = frame.assign(least=by_number.transform("min"), most=by_number.transform("max"))
    rows = rows[rows["shown"]]
    size = (rows["difference"] / rows[["paper_low", "paper_high"]].mean(axis=1)).abs()
    suffix = rows["metric"].map(lambda name: "" if name == "speedup" else f": {METRICS[name]}", "ignore")
    return rows.assign(claim=rows["claim"] + suffix).iloc[size.fillna(-1).argsort(kind="stable")[::-1]]


def _claims_table(store: Store, rows: pd.DataFrame) -> Table:
    of_topk = rows["over_topk"].notna().any()
    columns = [
        number("number", " ", "{}"),
        text("claim"),
        text("case", "policy"),
        Column("paper_low", "paper", cell=paper_words),
        Column("ours", "ours", cell=lambda row: _ours(row, "ours")),
        *([Column("over_topk", "over topk", cell=lambda row: _ours(row, "over_topk", NONE))] if of_topk else []),
        Column("difference", "ours - paper", cell=_difference),
        Column(
            "least",
            "range",
            cell=lambda row: f"{_ours(row, 'least')} to {_ours(row, 'most')}" if row["least"] < row["most"] else NONE,
        ),
        Column("traffic", "traffic", cell=lambda row: row["traffic"] + ("" if row["primary"] else f" {_FIRST}")),
        Column("draws", "draws", cell=_draws),
        *lost_columns(rows),
    ]
    notes = [OURS, *[OVER_TOPK] * bool(of_topk)]
    known = rows[rows["primary"] & rows["primary_because"].notna()].drop_duplicates(["traffic", "primary_because"])
    notes += [f"{row.traffic} was chosen: {row.primary_because}" for row in known.itertuples()]
    if not rows["primary"].all():
        notes.append(f"{_FIRST}: {NOT_CHOSEN}")
    claimed = set(rows["comparison_id"])
    facts_of = (one.facts for one in with_draws_apart(store).comparisons if one.comparison_id in claimed)
    notes += dict.fromkeys(f"{facts.model}: {words}" for facts in facts_of if (words := layers_words(facts)))
    title = CLAIMS_OF_LAYERS if rows["ours_of"].eq("layer").all() else CLAIMS_OF_MODELS
    about = comparisons(with_draws_apart(store)).set_index(COMPARISON)
    ran = about.loc[list(measured(store)[COMPARISON].itertuples(index=False, name=None))]
    device = said_once((name,) for name in ran["device"].dropna())
    links = said_once(links_parts(facts, in_column=True) for facts in ran["facts"])
    how = [
        said_once(map(how_parts, ran["run"], ran["facts"])),
        device and f"device {device}",
        links and f"links {links}",
    ]
    return Table(rows, columns, title.format("; ".join(filter(None, how))), notes)


def _ours(row: Row, column: str, none: str = "not measured") -> str:
    return none if missing(row[column]) else number_words(row["metric"], row[column])


def _draws(row: Row) -> str:
    """How many there are of the traffic, and how far they differ."""
    if row["draws"] < 2:
        return NONE
    return f"{row['draws']}: {_ours(row, 'ours_low')} to {_ours(row, 'ours_high')}"


def _difference(row: Row) -> str:
    """Signed, in the number's unit; of a range whether it holds."""
    if missing(row["difference"]):
        return NONE
    if row["paper_low"] != row["paper_high"]:
        return "holds" if row["difference"] == 0 else "does not hold"
    factor = 100 if row["metric"] in SHARES else 1
    digits = 1 if row["metric"] in (*SHARES, *_COARSE) else 2
    return f"{factor * row['difference']:+.{digits}f}"


def _reasons(rows: pd.DataFrame) -> Table:
    """Each reason once, with the numbers of its claims."""
    by_note = rows.sort_values("number").groupby("note", sort=False)["number"]
    lines = [f"{', '.join(map(str, numbers))}: {str(note).strip()}" for note, numbers in by_note]
    return Table(pd.DataFrame(), (), WHY_THEY_DIFFER, lines)
