"""What policies cost answers, from what ``quality`` wrote: texts, papers' claims on them, and tasks.

Costs are compared with the unpatched model's on the same sequence, scores on the same questions: the text's own
difficulty drops out. Sequences of one batch were routed together, so that they are not independent of each other:
intervals of costs are over batches, from ten of them on, as those of times. Routing is that of one batch (or
step) of one layer first, all ranks together; then the mean over batches, then over layers.

A claim (``papers.Ordering``) names two kinds of cases. They are compared sequence by sequence: the mean
difference with its 95 % interval over batches says that the claim *holds*, *does not hold*, or is *inconclusive* on
these sequences. Comparisons that differ in the checkpoint alone, seeds of one training say, are a ``group``: before
each one's verdict stands that over checkpoints, by Student's t over their mean differences.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from scipy.special import stdtrit  # Student's quantile; scipy.stats imports slowly

from moe_ep_bench.analysis.columns import (
    COLUMNS,
    LOST,
    NONE,
    Column,
    Row,
    Table,
    lost_shown,
    missing,
    number,
    percentage,
    short_labels,
    text,
)
from moe_ep_bench.analysis.notes import chance_words
from moe_ep_bench.analysis.store import MISSING, ResultsError, facts_of, read_document, read_part
from moe_ep_bench.facts import JudgedFacts, RunFacts
from moe_ep_bench.papers import orderings
from moe_ep_bench.policies import POLICIES
from moe_ep_bench.results import RunDirectory
from moe_ep_bench.schema import TABLES
from moe_ep_bench.timing.statistics import MIN_BATCHES

_FACTS = ["title", "model", "text", "task", "limit", "batch_size", "num_ranks"]
_OF_A_CHECKPOINT = {"name", "model", "title", "order"}
_CASE = ["comparison_id", "label", "role", "policy", "policy_params", "phase"]
_GROUP = ["title", "group", "comparison", "checkpoints"]
_IMBALANCES = {"peak_load": "expert_imbalance", "rank_peak_load": "rank_imbalance"}
_ROUTED = [*LOST, "retained_mass_topk", "experts_per_token", "activated_experts", *_IMBALANCES.values()]
_SCORE = ["task", "metric", "filter", "num_fewshot", "num_samples", "value", "stderr"]


class Quality(NamedTuple):
    """What is done of a directory.

    Attributes:
        cases: indexed by case_id, in the order of the config; of each comparison the unpatched model, the baseline,
            first. ``_CASE``; and columns of ``_comparisons``.
        scores, routing: the tables ``quality`` and ``quality_routing`` of the schema.
    """

    cases: pd.DataFrame
    scores: pd.DataFrame
    routing: pd.DataFrame

    @property
    def has_texts(self) -> bool:
        return bool(self.cases["text"].notna().any())


def beside(qualities: Mapping[Path, Quality]) -> Quality:
    """Several directories beside each other: what is of one says so, and nothing of two is compared."""
    if len(qualities) == 1:
        return next(iter(qualities.values()))
    parts, num_groups = [], 0
    for place, (directory, one) in enumerate(qualities.items()):
        ids = {key: lambda rows, key=key, of=place: f"{of}/" + rows[key] for key in ("comparison_id", "case_id")}
        said = {key: one.cases[key] + f", from {directory.name}" for key in ("title", "comparison")}
        cases = one.cases.assign(**said, group=one.cases["group"] + num_groups).reset_index().assign(**ids)
        parts.append(Quality(cases.set_index("case_id"), one.scores.assign(**ids), one.routing.assign(**ids)))
        num_groups = cases["group"].max() + 1
    return Quality(*map(pd.concat, zip(*parts, strict=True)))


# ---- reading ---------------------------------------------------------------------------------------------------------


def read_quality(directory: Path) -> Quality:
    """Read every comparison whose unpatched model is done.

    Raises:
        ResultsError: the directory is not one of ``quality``, is damaged, or has nothing to compare yet.
    """
    files = RunDirectory(directory)
    run = read_document(files.run_json, RunFacts)
    if run.mode != "quality":
        raise ResultsError(f"{files.run_json}: mode: expected quality, got {run.mode}")
    facts, listed = facts_of(files.run_json, run)
    scores, routing = (_rows_of(files, table) for table in ("quality", "quality_routing"))
    cases = pd.DataFrame([{"case_id": case_id, **case.model_dump()} for case_id, case in listed.items()])
    cases = cases[cases["case_id"].isin(scores["case_id"])] if len(cases) else pd.DataFrame(columns=["role"])
    natives = cases[cases["role"] == "baseline"]
    if natives.empty:
        raise ResultsError(f"{directory}: no comparison has its unpatched model yet; the same command goes on")
    begun = {key: facts[key] for key in sorted(natives["comparison_id"], key=lambda key: facts[key].order)}
    place = cases["comparison_id"].map({key: place for place, key in enumerate(begun)})
    cases = cases.assign(place=place).dropna(subset="place").sort_values(["place", "order"], kind="stable")
    cases = cases.set_index("case_id")[_CASE].join(_comparisons(begun), on="comparison_id")
    return Quality(cases, *(rows[rows["case_id"].isin(cases.index)] for rows in (scores, routing)))


def _rows_of(files: RunDirectory, table: str) -> pd.DataFrame:
    """All parts of a table."""
    parts = [read_part(table, path) for paths in files.parts(table).values() for path in paths]
    return pd.concat(parts, ignore_index=True) if parts else pd.DataFrame(columns=TABLES[table].schema.names)


def _comparisons(facts: Mapping[str, JudgedFacts]) -> pd.DataFrame:
    """What run.json says of comparisons, by id: ``_FACTS``, ``text`` or ``asked_task`` null.

    Comparisons that differ in nothing but the checkpoint are a ``group``: its number, how many ``checkpoints`` it has,
    and as ``comparison`` its title.
    """
    frame = pd.DataFrame([one.model_dump() for one in facts.values()], list(facts))[_FACTS]
    others = [one.model_dump_json(exclude=_OF_A_CHECKPOINT) for one in facts.values()]
    group = pd.Series(pd.factorize(np.array(others))[0], frame.index)
    first = frame[["title", "model"]].groupby(group).transform("first")
    frame = frame.assign(group=group, checkpoints=group.map(group.value_counts()))
    frame["comparison"] = [
        title if number == 1 else str(title).replace(str(model), f"{number} checkpoints", 1)
        for title, model, number in zip(first["title"], first["model"], frame["checkpoints"], strict=True)
    ]
    return frame.rename(columns={"task": "asked_task"})


# ---- texts -----------------------------------------------------------------------------------------------------------


def half_over_batches(values: pd.DataFrame) -> pd.Series:
    """Half of the 95 % interval of each column's mean, of values indexed by ``batch``; NaN below ten batches.

    Of equal batches it is Student's t over their means. Of unequal ones the mean over sequences, which counts each
    alike, is the ratio of two sums over batches, and its error that of a ratio estimate (Cochran, Sampling Techniques,
    1977, section 6.4); a mean of batches' means would count a sequence of a short batch for more.
    """
    by_batch = values.groupby(level="batch")
    sums, counts = by_batch.sum(), by_batch.count()
    number = (counts > 0).sum()
    number = number.where(number >= MIN_BATCHES)
    squares = ((sums - values.mean() * counts) ** 2).sum()
    return stdtrit(number - 1, 0.975) * np.sqrt(number / (number - 1) * squares) / values.count()


def half_interval(values: pd.Series) -> float:
    """Half of Student's 95 % interval of a mean of independent values; infinite where there is one value."""
    if len(values) < 2:
        return math.inf
    return float(stdtrit(len(values) - 1, 0.975) * np.std(values, ddof=1) / math.sqrt(len(values)))


def _added(quality: Quality) -> pd.DataFrame:
    """What each case of a text, a column, adds to the unpatched cross-entropy of a sequence, a row; null of others."""
    is_cost = quality.scores["metric"] == "cross_entropy"
    costs = quality.scores[is_cost].pivot(index=["batch", "item"], columns="case_id", values="value")
    cases = quality.cases.loc[costs.columns]
    natives = cases[cases["role"] == "baseline"].reset_index().set_index("comparison_id")["case_id"]
    return costs - costs[cases["comparison_id"].map(natives)].to_numpy()


def text_costs(quality: Quality) -> pd.DataFrame:
    """A row per case of a text and phase in which it is judged, the unpatched model in those of the others.

    Columns: what the case is; of its comparison ``title``, ``comparison``, ``checkpoints`` and ``group``;
    ``cross_entropy``, ``kl`` (nats per token), ``perplexity``, ``agreement``; ``cross_entropy_added`` to the unpatched
    model's, and ``_half`` its interval (missing below ten batches); ``num_sequences``, ``num_batches``; means of the
    routing; ``fullest_rank``, its pairs over native's mean, and ``expert_imbalance`` and ``rank_imbalance``, over the
    mean of the pairs that are computed.
    """
    if not quality.has_texts:
        return pd.DataFrame()
    added = _added(quality)
    answers = quality.scores.groupby(["case_id", "metric"])["value"].mean().unstack()
    answers = answers.loc[added.columns, ["cross_entropy", "kl", "agreement"]].assign(
        num_sequences=added.count(),
        num_batches=(added.groupby(level="batch").count() > 0).sum(),
        perplexity=lambda rows: np.exp(rows["cross_entropy"]),
        cross_entropy_added=added.mean(),
        cross_entropy_added_half=half_over_batches(added),
    )
    is_native = quality.cases["role"] == "baseline"
    of_native = answers.index.isin(quality.cases.index[is_native])
    answers.loc[of_native, ["cross_entropy_added", "cross_entropy_added_half"]] = np.nan
    about = [*(name for name in _CASE if name != "phase"), *_GROUP]
    rows = quality.cases[about].join(_routing_means(quality.routing), how="inner").reset_index()
    judged = quality.cases[~is_native].groupby("comparison_id")["phase"].agg(set)
    is_shown = [row.phase in judged.get(row.comparison_id, {row.phase}) for row in rows.itertuples()]
    rows = rows[is_shown].join(answers, on="case_id")
    return rows.assign(policy_params=rows["policy_params"].map(json.dumps)).reset_index(drop=True)


def _routing_means(routing: pd.DataFrame) -> pd.DataFrame:
    """Means over batches, then over layers; by case, with the phase."""
    case = ["case_id", "phase"]
    routing = routing.rename(columns=_IMBALANCES)
    computed = routing["num_pairs"] / routing["num_topk_pairs"]
    routing = routing.assign(missing_share=routing[MISSING] / routing["num_topk_pairs"])
    is_unknown = routing["dropped_share"].isna().groupby([routing[key] for key in case]).any()
    by_layer = routing.assign(fullest_rank=routing["rank_imbalance"] * computed).groupby([*case, "layer"])
    means = by_layer[[*_ROUTED, "fullest_rank"]].mean().groupby(case).mean()
    means.loc[is_unknown, ["dropped_share", "rerouted_share"]] = np.nan  # a mean over the others would be none
    return means.reset_index("phase")


# ---- tasks -----------------------------------------------------------------------------------------------------------


def task_scores(quality: Quality) -> pd.DataFrame:
    """A row per case and metric of a task that the config asks for; shares.

    Columns: what the case is; task, metric, filter, num_fewshot, num_samples; ``value`` and ``stderr``; ``added`` to
    the unpatched model's and ``added_stderr``, paired by question; the task's routing.
    """
    cases = quality.cases[quality.cases["asked_task"].notna()]
    if cases.empty:
        return pd.DataFrame()
    scores = quality.scores.drop(columns=["comparison_id", "phase"], errors="ignore")
    scores = scores.join(cases[["comparison_id", "role"]], on="case_id", how="inner")
    number = ["comparison_id", "task", "metric", "filter", "item"]
    natives = scores.loc[scores["role"] == "baseline", [*number, "value"]]
    scores = scores.merge(natives, on=number, how="left", suffixes=("", "_native"))
    whole, questions = scores[scores["item"].isna()], scores[scores["item"].notna()]
    routing = whole[whole["filter"].isna()].pivot(index="case_id", columns="metric", values="value")
    rows = whole.loc[whole["filter"].notna() & whole["is_asked"].eq(True), ["case_id", *_SCORE, "value_native"]]
    rows = cases.join(rows.set_index("case_id"), how="inner").rename_axis("case_id").reset_index()
    rows = rows.assign(
        policy_params=rows["policy_params"].map(json.dumps),
        added=(rows["value"] - rows["value_native"]).mask(rows["role"] == "baseline"),
        added_stderr=[_paired_stderr(row, questions) for row in rows.itertuples()],
    )
    rows = rows[["case_id", *_CASE, *_SCORE, "added", "added_stderr"]]
    rows = rows.join(_with_missing(routing), on="case_id").reset_index(drop=True)
    return rows.astype({"num_fewshot": "Int64", "num_samples": "Int64"})


def _with_missing(routing: pd.DataFrame) -> pd.DataFrame:
    """A task's routing with ``missing_share``; what version 4 called dropped pairs were all missing ones."""
    if "dropped_fraction" in routing:
        lacking = routing["dropped_fraction"]
        lost = {name: lacking.where(lacking == 0) for name in ("dropped_share", "rerouted_share")}
        return routing.drop(columns="dropped_fraction").assign(**lost, missing_share=lacking)
    return routing.assign(missing_share=routing["dropped_share"] + routing["rerouted_share"])


def _paired_stderr(row: Any, questions: pd.DataFrame) -> float:
    """Standard error over questions of what a case adds to the unpatched model's number.

    Missing of that itself, and where the number is not the mean over the questions of the task, or of its parts.
    """
    alike = questions[(questions[["case_id", "metric", "filter"]] == [row.case_id, row.metric, row.filter]).all(axis=1)]
    questions = alike[alike["task"] == row.task] if (alike["task"] == row.task).any() else alike
    ours, theirs = questions["value"], questions["value_native"]
    is_mean = len(ours) > 1 and theirs.notna().all() and math.isclose(ours.mean(), row.value, abs_tol=1e-9)
    is_mean = is_mean and row.role != "baseline"
    return float((ours - theirs).std() / math.sqrt(len(ours))) if is_mean else math.nan


# ---- papers' claims on texts -----------------------------------------------------------------------------------------


def claims(quality: Quality) -> pd.DataFrame:
    """A row per claim and pair of cases that all checkpoints of a group have.

    ``worse_costs_more`` is the cross-entropy that ``worse`` adds less what ``better`` adds, nats per token, and
    ``half_width`` half its 95 % interval (none below ten batches); ``agree`` of ``checkpoints`` have the ``verdict`` by
    themselves; ``group`` is that of ``Quality.comparisons``.
    """
    if not quality.has_texts:
        return pd.DataFrame()
    added = _added(quality)
    cases = quality.cases[quality.cases.index.isin(added.columns) & (quality.cases["role"] != "baseline")]
    frame = pd.DataFrame([pair for _, of_one in cases.groupby("comparison_id", sort=False) for pair in _pairs(of_one)])
    if frame.empty:
        return frame
    differences = pd.DataFrame(added[list(frame["b"])].to_numpy() - added[list(frame["a"])].to_numpy(), added.index)
    frame = frame.assign(
        worse_costs_more=differences.mean().to_numpy(), half_width=half_over_batches(differences).to_numpy()
    ).join(quality.cases[_GROUP], on="a")
    pairs = frame.groupby(["group", "claim", "better", "worse"], sort=False)
    more = pairs["worse_costs_more"]
    found = pairs[["comparison", "source", "checkpoints"]].first().assign(worse_costs_more=more.mean())
    found["half_width"] = pairs["half_width"].first().where(found["checkpoints"] == 1, more.agg(half_interval))
    found["verdict"] = _verdict(found)
    overall = frame.merge(found["verdict"], left_on=pairs.keys, right_index=True, how="left")["verdict"]
    found["agree"] = (_verdict(frame) == overall).groupby([frame[key] for key in pairs.keys], sort=False).sum()
    return found[(pairs.size() == found["checkpoints"]) & found["half_width"].notna()].reset_index()


def _verdict(rows: pd.DataFrame) -> pd.Series:
    more, half = rows["worse_costs_more"], rows["half_width"]
    return pd.Series(np.select([more > half, more < -half], ["holds", "does not hold"], "inconclusive"), rows.index)


def _pairs(cases: pd.DataFrame) -> Iterator[Row]:
    """All pairs of a comparison's cases that a claim is about; ``a`` and ``b`` are their ids."""
    cases = cases[_CASE].reset_index().assign(short=short_labels(cases["label"]).array)
    rows = [row | {"fields": _fields(row)} for row in cases.to_dict("records")]
    for source, claim in orderings():
        named = claim.better.keys() | claim.worse.keys()
        worse, better = ([row for row in rows if _suits(row["fields"], kind)] for kind in (claim.worse, claim.better))
        for b, a in product(worse, better):
            shared = (a["fields"].keys() & b["fields"].keys()) - named
            if a["phase"] == b["phase"] and all(a["fields"][key] == b["fields"][key] for key in shared):
                ids = {"comparison_id": a["comparison_id"], "a": a["case_id"], "b": b["case_id"]}
                yield {"claim": claim.says, "source": source, **ids, "better": a["short"], "worse": b["short"]}


def _suits(fields: Row, wanted: Row) -> bool:
    known = ((value, fields[key]) for key, value in wanted.items() if key in fields)
    return wanted.keys() <= fields.keys() and all(
        found is not None if value == "set" else found == value for value, found in known
    )


def _fields(case: Row) -> Row:
    """A case's policy and fields, those included that it leaves out because they have their default."""
    policy = POLICIES.get(case["policy"])
    known = dataclasses.fields(policy) if policy else ()
    defaults = {field.name: field.default for field in known}
    return {"name": case["policy"], **defaults, **case["policy_params"]}


# ---- tables ----------------------------------------------------------------------------------------------------------


def _with_error(name: str, error: str, header: str, form: str, scale: float = 1.0) -> Column:
    """A number and behind it its error, where there is one: ``+0.30 +-0.02``."""

    def cell(row: Row) -> str:
        if missing(row[name]):
            return NONE
        shown = form.format(scale * row[name])
        return shown if missing(row[error]) else f"{shown} +-{form.replace('+', '').format(scale * row[error])}"

    return Column(name, header, cell=cell)


def _policy(rows: pd.DataFrame) -> Column:
    """The rows' labels as tables show them; files hold them whole."""
    shown = dict(zip(rows["label"], short_labels(rows["label"]), strict=True))
    return Column("label", "policy", cell=lambda row: shown[row["label"]])


_TEXT = (
    text("phase"),
    number("perplexity", "ppl", "{:.2f}"),
    _with_error("cross_entropy_added", "cross_entropy_added_half", "cross-entropy + nats", "{:+.4f}"),
    number("kl", "KL nats", "{:.4f}"),
    percentage("agreement", "top-1 agree"),
    *(COLUMNS[name] for name in LOST),
    percentage("retained_mass_topk", "mass kept"),
    number("experts_per_token", "experts/token", "{:.2f}"),
    number("activated_experts", "activated", "{:.1f}"),
    number("fullest_rank", "fullest rank", "{:.2f}"),
)
_CLAIM = (
    text("claim"),
    text("better", "A"),
    text("worse", "B"),
    _with_error("worse_costs_more", "half_width", "B costs more", "{:+.4f}"),
    text("verdict"),
    Column("agree", "checkpoints", cell=lambda row: f"{row['agree']} of {row['checkpoints']}"),
)
_TASK = (
    text("task"),
    Column("metric", "metric", cell=lambda row: row["metric"] + f" ({row['filter']})" * (row["filter"] != "none")),
    number("num_fewshot", "shots", "{}"),
    number("num_samples", "questions", "{:,}"),
    _with_error("value", "stderr", "score %", "{:.1f}", 100),
    _with_error("added", "added_stderr", "over unpatched", "{:+.1f}", 100),
    *(COLUMNS[name] for name in LOST),
    percentage("retained_mass_topk", "mass kept"),
)


def _said(rows: pd.DataFrame, columns: Sequence[Column]) -> list[Column]:
    """Columns without those of lost pairs that say nothing."""
    shown = lost_shown(rows)
    return [column for column in columns if column.name not in LOST or column.name in shown]


def quality_tables(quality: Quality) -> list[Table]:
    """All tables; the column ``table`` says of a row which kind it is of: texts, claims or tasks."""
    tables = []
    for kind, frame, key, table_of in (
        ("texts", text_costs(quality), "comparison_id", _text_table),
        ("claims", claims(quality), "group", _claim_table),
        ("tasks", task_scores(quality), "comparison_id", _task_table),
    ):
        for name, rows in frame.groupby(key, sort=False) if len(frame) else ():
            facts = quality.cases[quality.cases[key] == name].iloc[0].to_dict()
            tables.append(table_of(rows.assign(table=kind), facts))
    return tables


def _text_table(rows: pd.DataFrame, facts: Row) -> Table:
    interval = "with its 95 % interval, Student's t over batches, whose sequences were routed together"
    if (least := rows["num_batches"].min()) < MIN_BATCHES:
        interval = f"no interval, and no verdict on claims, below {MIN_BATCHES} batches; got {least:.0f}"
    note = f"cross-entropy: added to the unpatched model's on the same sequences ({interval})"
    how = f"answers of the whole model, routing of {facts['num_ranks']:.0f} virtual ranks; not timed"
    return Table(rows, [_policy(rows), *_said(rows, _TEXT)], f"{facts['title']}: {how}", [note])


def _claim_table(rows: pd.DataFrame, facts: Row) -> Table:
    notes = [
        "A keeps at least as much of the answers as B, papers say; B costs more: nats per token; +-: "
        "95 % interval, Student's t over batches, of all checkpoints over their means",
        *chance_words(len(rows)),
    ]
    return Table(rows, _CLAIM, f"Papers' claims on {facts['comparison']}", notes)


def _task_table(rows: pd.DataFrame, facts: Row) -> Table:
    columns = [column for column in _said(rows, _TASK) if column.name != "task" or rows["task"].nunique() > 1]
    notes = [
        "+-: standard errors over questions, of a difference to the unpatched model over the same ones, where the "
        "number is their mean; that requests of a batch share their routing is not in them",
        f"{facts['batch_size']:.0f} requests are routed together, on {facts['num_ranks']:.0f} virtual ranks; "
        "lost pairs and kept mass are of all passes of a task, over all layers; nothing was timed",
    ]
    if not missing(facts["limit"]):
        notes.append(f"the first {facts['limit']:.0f} questions of each task only")
    return Table(rows, [_policy(rows), *columns], facts["title"], notes)
