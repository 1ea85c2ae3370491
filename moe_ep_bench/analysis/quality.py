"""What policies cost answers, from what ``quality`` wrote: texts, papers' claims on them, tasks beside papers' numbers.

Costs are compared with the unpatched model's on the same sequence, scores on the same questions: the text's own
difficulty drops out. Sequences of one batch were routed together, so that they are not independent of each other:
intervals of costs are over batches, from ten of them on, as those of times. Routing is that of one batch (or
step) of one layer first, all ranks together; then the mean over batches, then over layers.

A claim (``papers.orderings``) names two kinds of cases. They are compared sequence by sequence: the mean difference
with its 95 % interval over batches says that the claim *holds*, *does not hold*, or is *inconclusive* on these
sequences. Comparisons that differ in the checkpoint alone, seeds of one training say, are put together: before each
one's verdict stands that over checkpoints, by Student's t over their mean differences.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd
import pyarrow as pa
from pydantic import ConfigDict, Field, model_validator
from scipy.special import stdtrit  # Student's quantile; scipy.stats imports slowly

from moe_ep_bench.analysis.columns import NONE, Column, Row, missing, number, percentage, text
from moe_ep_bench.analysis.labels import short_label
from moe_ep_bench.analysis.notes import chance_words
from moe_ep_bench.analysis.reading import ResultsError, check_counts, read_part, read_run_json, typed
from moe_ep_bench.analysis.render import Table
from moe_ep_bench.errors import UserError
from moe_ep_bench.facts import CaseFacts, Count, JsonRecord
from moe_ep_bench.papers.orderings import ORDERINGS, SET
from moe_ep_bench.policies import POLICIES
from moe_ep_bench.results import RunDirectory
from moe_ep_bench.schema import TABLES
from moe_ep_bench.timing.statistics import MIN_BATCHES

_OF_A_CHECKPOINT = {"name", "model", "title", "order"}
_CASE = ["comparison_id", "label", "role", "policy", "policy_params", "phase"]
_IMBALANCES = {"peak_load": "expert_imbalance", "rank_peak_load": "rank_imbalance"}
_ROUTED = ["dropped_fraction", "retained_mass_topk", "experts_per_token", "activated_experts", *_IMBALANCES.values()]
_ROUTING_NEEDS = ("layer", "num_tokens", "load_E", "num_topk_pairs", "num_dropped_pairs")
_SCORE = ["task", "metric", "filter", "num_fewshot", "num_samples", "value", "stderr"]


class _Number(JsonRecord):  # ``quality.tasks.published_numbers``
    policy: str
    policy_params: dict[str, Any]
    metric: str
    num_fewshot: int | None
    percent: float


class _Published(JsonRecord):
    model_config = ConfigDict(extra="allow")

    numbers: list[_Number] = Field([])
    unstated: list[str] = Field([])


class _Facts(JsonRecord):  # ``quality.session``; a text's comparison has ``text``, a task's has ``task``
    model_config = ConfigDict(extra="allow")

    title: str
    model: str
    order: int
    num_experts: Count
    num_ranks: Count
    top_k: Count
    batch_size: Count
    text: str = ""
    task: str = ""
    metric: str | None = None
    limit: int | float | None = None
    published: _Published | None = None

    @model_validator(mode="after")
    def _check(self) -> _Facts:
        if ("text" in self.model_fields_set) == ("task" in self.model_fields_set):
            raise UserError("expected either text or task")
        if "task" in self.model_fields_set and not {"metric", "limit", "published"} <= self.model_fields_set:
            raise UserError("expected metric, limit and published beside task")
        return self


class _Case(CaseFacts):
    order: int
    phase: str | None


class _RunFacts(JsonRecord):
    mode: Literal["quality"]
    comparisons: dict[str, _Facts]
    cases: dict[str, _Case]


@dataclass(frozen=True, eq=False)
class Quality:
    """What is done of a directory, in the order of its config; the unpatched model is each comparison's first case.

    Attributes:
        facts: what run.json says of each comparison, by its id; one of a text has ``text``, one of a task ``task``.
        cases: comparison_id, label, role, policy, policy_params (a dict) and phase, indexed by case_id.
        scores, routing: the tables ``quality`` and ``quality_routing`` of the schema.
    """

    facts: dict[str, dict[str, Any]]
    cases: pd.DataFrame
    scores: pd.DataFrame
    routing: pd.DataFrame

    @property
    def groups(self) -> list[list[str]]:
        """Ids of the texts' comparisons; those that differ in the checkpoint alone together."""
        groups: dict[str, list[str]] = {}
        for comparison_id, facts in self.facts.items():
            if "text" in facts:
                others = {key: value for key, value in facts.items() if key not in _OF_A_CHECKPOINT}
                groups.setdefault(json.dumps(others, sort_keys=True), []).append(comparison_id)
        return list(groups.values())

    def title(self, group: list[str]) -> str:
        """A comparison's title; of several one that counts their checkpoints."""
        facts = self.facts[group[0]]
        title = str(facts["title"])
        return title if len(group) == 1 else title.replace(str(facts["model"]), f"{len(group)} checkpoints", 1)


def read_quality(directory: Path) -> Quality:
    """Read every comparison whose unpatched model is done.

    Raises:
        ResultsError: the directory is not one of ``quality``, is damaged, or has nothing to compare yet.
    """
    files = RunDirectory(directory)
    path = files.run_json
    written = typed(_RunFacts, path, "", read_run_json(path))
    by_order = sorted(written.comparisons.items(), key=lambda item: item[1].order)
    facts = {comparison_id: one.model_dump(exclude_unset=True) for comparison_id, one in by_order}
    order = list(facts)
    for case_id, case in written.cases.items():
        if case.comparison_id not in facts:
            raise ResultsError(f"{path}: cases.{case_id}.comparison_id: no comparison {case.comparison_id!r}")
    rows = [
        {"case_id": case_id, **case.model_dump()}
        for case_id, case in written.cases.items()
        if files.is_done("quality", case_id)
    ]
    rows.sort(key=lambda case: (order.index(case["comparison_id"]), case["role"] != "baseline", case["order"]))
    begun = {case["comparison_id"] for case in rows if case["role"] == "baseline"}
    if not begun:
        raise ResultsError(f"{directory}: no comparison has its unpatched model yet; the same command goes on")
    cases = pd.DataFrame(case for case in rows if case["comparison_id"] in begun).set_index("case_id")[_CASE]
    has_text = cases["comparison_id"].map(lambda comparison_id: "text" in facts[comparison_id])
    return Quality(
        {comparison_id: facts[comparison_id] for comparison_id in order if comparison_id in begun},
        cases,
        _read(files, "quality", cases, facts),
        _read(files, "quality_routing", cases[has_text], facts),
    )


def _read(files: RunDirectory, table: str, cases: pd.DataFrame, facts: dict[str, dict[str, Any]]) -> pd.DataFrame:
    schema = TABLES[table].schema
    parts = [
        _sound(files.path(table, case_id), schema, case_id, facts[comparison_id]["num_experts"])
        for case_id, comparison_id in cases["comparison_id"].items()
    ]
    return pa.concat_tables([schema.empty_table(), *parts]).to_pandas()


def _sound(path: Path, schema: pa.Schema, case_id: str, num_experts: int) -> pa.Table:
    """A case's part, all of whose numbers can be."""
    table = read_part(path, schema, {"case_id": case_id})
    for field in schema:
        if pa.types.is_floating(field.type) and not np.isfinite(table[field.name].drop_null().to_numpy()).all():
            raise ResultsError(f"{path}: {field.name}: expected finite numbers")
    keys = [key for key in ("phase", "task", "item", "metric", "filter", "batch", "layer") if key in table.column_names]
    if table.group_by(keys, use_threads=False).aggregate([]).num_rows < table.num_rows:
        raise ResultsError(f"{path}: {', '.join(keys)}: expected one row for each, got several")
    if "load_E" in table.column_names:
        check_counts(path, table.to_pandas(), {"load_E": num_experts}, _ROUTING_NEEDS)
    return table


def half_over_batches(values: pd.Series) -> float:
    """Half of the 95 % interval of the mean of values that are indexed by ``batch``; NaN below ten batches.

    Of equal batches it is Student's t over their means. Of unequal ones the mean over sequences, which counts each
    alike, is the ratio of two sums over batches, and its error that of a ratio estimate (Cochran, Sampling Techniques,
    1977, section 6.4); a mean of batches' means would count a sequence of a short batch for more.
    """
    batches = values.groupby(level="batch").agg(["sum", "count"])
    number = len(batches)
    if number < MIN_BATCHES:
        return math.nan
    residual = batches["sum"] - values.mean() * batches["count"]
    error = math.sqrt(number / (number - 1) * (residual**2).sum()) / len(values)
    return float(stdtrit(number - 1, 0.975)) * error


def half_interval(values: pd.Series) -> float:
    """Half of Student's 95 % interval of a mean of independent values; infinite where there is one value."""
    if len(values) < 2:
        return math.inf
    return float(stdtrit(len(values) - 1, 0.975) * np.std(values, ddof=1) / math.sqrt(len(values)))


def costs_by_sequence(quality: Quality, comparison_id: str) -> pd.DataFrame:
    """A row per batch and sequence; columns (metric, case_id), where ``added`` is what a case adds to native's
    cross-entropy.
    """
    rows = quality.scores[quality.scores["comparison_id"] == comparison_id]
    costs = rows.pivot(index=["batch", "item"], columns=["metric", "case_id"], values="value")
    native = quality.cases.index[quality.cases["comparison_id"] == comparison_id][0]
    added = costs["cross_entropy"].sub(costs["cross_entropy", native], axis=0)
    return costs.join(pd.concat({"added": added}, axis=1))


@lru_cache(maxsize=2)
def text_costs(quality: Quality) -> pd.DataFrame:
    """A row per case of a text, in config order; of the unpatched model one for each phase in which others are judged.

    Not to be written to.

    Columns: what the case is; ``comparison`` and ``checkpoints``, the title and number of those that differ in the
    checkpoint alone, and ``group``, which tells them apart; ``cross_entropy``, ``kl`` (nats per token), ``perplexity``,
    ``agreement``; ``cross_entropy_added`` to the unpatched model's, and ``_half`` its interval (missing below ten
    batches); ``num_sequences``, ``num_batches``; means of the routing; ``fullest_rank``, its pairs over native's mean,
    and ``expert_imbalance`` and ``rank_imbalance``, over the mean of the pairs that are computed.
    """
    frames = [
        _costs_of(quality, comparison_id).assign(
            title=quality.facts[comparison_id]["title"],
            group=number,
            comparison=quality.title(group),
            checkpoints=len(group),
        )
        for number, group in enumerate(quality.groups)
        for comparison_id in group
    ]
    return pd.concat(frames, ignore_index=True) if frames else pd.DataFrame()


def _costs_of(quality: Quality, comparison_id: str) -> pd.DataFrame:
    cases = quality.cases[quality.cases["comparison_id"] == comparison_id]
    native, *others = cases.index
    costs = costs_by_sequence(quality, comparison_id)
    added = costs["added"]
    answers = pd.DataFrame(
        {
            "num_sequences": costs["cross_entropy"].count(),
            "num_batches": costs.index.get_level_values("batch").nunique(),
            "perplexity": np.exp(costs["cross_entropy"].mean()),
            **{name: costs[name].mean() for name in ("cross_entropy", "kl", "agreement")},
            "cross_entropy_added": added.mean(),
            "cross_entropy_added_half": added.apply(half_over_batches),
        }
    )
    answers.loc[native, ["cross_entropy_added", "cross_entropy_added_half"]] = math.nan
    phases = dict.fromkeys(cases["phase"].iloc[1:]) or [cases["phase"].iloc[0]]
    keys = [*((native, phase) for phase in phases), *zip(others, cases["phase"].iloc[1:], strict=True)]
    routing = _routing_means(quality.routing[quality.routing["comparison_id"] == comparison_id])
    routing = routing.reindex(pd.MultiIndex.from_tuples(keys, names=["case_id", "phase"])).reset_index()
    of_cases = cases.drop(columns="phase").assign(policy_params=cases["policy_params"].map(json.dumps))
    return routing[["case_id"]].join(of_cases, on="case_id").join(answers, on="case_id").join(routing.iloc[:, 1:])


def _routing_means(routing: pd.DataFrame) -> pd.DataFrame:
    """Means over batches, then over layers, by case and phase."""
    case = ["case_id", "phase"]
    routing = routing.rename(columns=_IMBALANCES)
    computed = routing["num_pairs"] / routing["num_topk_pairs"]
    by_layer = routing.assign(fullest_rank=routing["rank_imbalance"] * computed).groupby([*case, "layer"])
    by_layer = by_layer[[*_ROUTED, "fullest_rank"]].mean()
    return by_layer.groupby(case).mean()


def task_scores(quality: Quality) -> pd.DataFrame:
    """A row per case and metric of a task that the config asks for (where it names a metric: that one); shares.

    Columns: what the case is; task, metric, filter, num_fewshot, num_samples; ``value`` and ``stderr``; ``added`` to
    the unpatched model's and ``added_stderr``, paired by question; ``paper``, the published number of the same task,
    shots, metric and policy, and ``paper_stderrs``, the difference to it in our standard errors; the task's routing.
    """
    rows = []
    for comparison_id, facts in quality.facts.items():
        if "task" not in facts:
            continue
        cases = quality.cases[quality.cases["comparison_id"] == comparison_id]
        scores = dict(list(quality.scores.groupby("case_id")))
        of_native = scores[cases.index[0]]
        for case_id, case in cases.iterrows():
            of_case = scores[case_id]
            routing = of_case[of_case["item"].isna() & of_case["filter"].isna()].set_index("metric")["value"]
            asked = of_case[of_case["item"].isna() & of_case["filter"].notna() & of_case["is_asked"].eq(True)]
            if (asked["metric"] == facts["metric"]).any():
                asked = asked[asked["metric"] == facts["metric"]]
            for row in asked.itertuples():
                paper = _paper(facts, case, row)
                added = _added(row, of_case, of_native) if case_id != cases.index[0] else (math.nan, math.nan)
                rows.append(
                    {
                        "case_id": case_id,
                        **case,
                        "policy_params": json.dumps(case["policy_params"]),
                        **{name: getattr(row, name) for name in _SCORE},
                        **dict(zip(("added", "added_stderr"), added, strict=True)),
                        "paper": paper,
                        "paper_stderrs": (row.value - paper) / row.stderr if row.stderr else math.nan,
                        **routing,
                    }
                )
    return pd.DataFrame(rows).astype({"num_fewshot": "Int64", "num_samples": "Int64"}) if rows else pd.DataFrame()


def _added(row: Any, of_case: pd.DataFrame, of_native: pd.DataFrame) -> tuple[float, float]:
    """What a case adds to the unpatched model's number, and its standard error over questions.

    The error is missing where the number is not the mean over the questions of the task and its parts.
    """
    values = []
    for rows in (of_case, of_native):
        alike = rows[(rows["metric"] == row.metric) & (rows["filter"] == row.filter)]
        own = alike[alike["task"] == row.task]
        questions = own if own["item"].notna().any() else alike
        values.append(
            (own[own["item"].isna()]["value"], questions.dropna(subset="item").set_index(["task", "item"])["value"])
        )
    (_, ours), (native, theirs) = values
    if native.empty:
        return math.nan, math.nan
    added = float(row.value - native.iloc[0])
    is_mean = len(ours) > 1 and ours.index.equals(theirs.index) and math.isclose(ours.mean(), row.value, abs_tol=1e-9)
    return added, float((ours - theirs).std() / math.sqrt(len(ours))) if is_mean else math.nan


def _paper(facts: dict[str, Any], case: pd.Series, row: Any) -> float:
    """A share; missing where the paper states no shots, and of the parts of a task."""
    published = facts.get("published") or {}
    params = {key: value for key, value in case["policy_params"].items() if key not in published.get("unstated", ())}
    for printed in published.get("numbers", ()):
        is_case = printed["policy"] == case["policy"] and printed["policy_params"] == params
        shots = printed["num_fewshot"]
        is_metric = printed["metric"] == row.metric and shots is not None and shots == row.num_fewshot
        if is_case and is_metric and row.task == facts["task"]:
            return printed["percent"] / 100
    return math.nan


# ---- papers' claims on texts -----------------------------------------------------------------------------------------


def claims(quality: Quality) -> pd.DataFrame:
    """A row per claim and pair of cases that all checkpoints of a group have.

    ``worse_costs_more`` is the cross-entropy that ``worse`` adds less what ``better`` adds, nats per token, and
    ``half_width`` half its 95 % interval (none below ten batches); ``agree`` of ``checkpoints`` have the ``verdict`` by
    themselves; ``group`` is that of ``text_costs``.
    """
    costs, rows = text_costs(quality), []
    for place, group in enumerate(quality.groups):
        about = {"group": place, "comparison": quality.title(group), "checkpoints": len(group)}
        for comparison_id in group:
            own = costs[costs["comparison_id"] == comparison_id].to_dict("records")
            rows += [about | pair for pair in _pairs(quality, comparison_id, own)]
    frame = pd.DataFrame(rows)
    if frame.empty:
        return frame
    pairs = frame.groupby(["group", "claim", "better", "worse"], sort=False)
    more = pairs["worse_costs_more"]
    found = pairs[["comparison", "source", "checkpoints"]].first().assign(worse_costs_more=more.mean())
    found["half_width"] = pairs["half_width"].first().where(found["checkpoints"] == 1, more.agg(half_interval))
    found["verdict"] = _verdict(found)
    alone = (
        _verdict(frame) == frame.merge(found["verdict"], left_on=pairs.keys, right_index=True, how="left")["verdict"]
    )
    found["agree"] = alone.groupby([frame[key] for key in pairs.keys], sort=False).sum()
    return found[(pairs.size() == found["checkpoints"]) & found["half_width"].notna()].reset_index()


def _verdict(rows: pd.DataFrame) -> pd.Series:
    more, half = rows["worse_costs_more"], rows["half_width"]
    found = np.select([more > half, more < -half], ["holds", "does not hold"], "inconclusive")
    return pd.Series(found, rows.index)


def _pairs(quality: Quality, comparison_id: str, rows: list[Row]) -> Iterator[Row]:
    """All pairs of a comparison that a claim is about."""
    added = costs_by_sequence(quality, comparison_id)["added"]
    fields = [_fields(row) for row in rows]
    for claim in ORDERINGS:
        named = claim.better.keys() | claim.worse.keys()
        for worse, theirs in zip(rows, fields, strict=True):
            for better, ours in zip(rows, fields, strict=True):
                shared = (ours.keys() & theirs.keys()) - named
                if (
                    _suits(theirs, claim.worse)
                    and _suits(ours, claim.better)
                    and better["phase"] == worse["phase"]
                    and all(ours[key] == theirs[key] for key in shared)
                ):
                    difference = (added[worse["case_id"]] - added[better["case_id"]]).dropna()
                    yield {
                        **{"claim": claim.words, "source": claim.source},
                        **{"better": short_label(better["label"]), "worse": short_label(worse["label"])},
                        "worse_costs_more": float(difference.mean()),
                        "half_width": half_over_batches(difference),
                    }


def _suits(fields: Row, wanted: Row) -> bool:
    return all(
        key in fields and (fields[key] is not None if value is SET else fields[key] == value)
        for key, value in wanted.items()
    )


def _fields(case: Row) -> Row:
    """A case's policy and fields, those included that it leaves out because they have their default."""
    policy = POLICIES.get(case["policy"])
    fields = dataclasses.fields(policy) if policy else ()
    defaults = {one.name: one.default for one in fields if one.name in policy.optional}
    return {"name": case["policy"], **defaults, **json.loads(case["policy_params"])}


# ---- tables ----------------------------------------------------------------------------------------------------------

_POLICY = Column("label", "policy", cell=lambda row: short_label(row["label"]))


def _with_error(name: str, error: str, header: str, form: str, scale: float = 1.0) -> Column:
    """A number and behind it its error, where there is one: ``+0.30 +-0.02``."""

    def cell(row: dict) -> str:
        if missing(row[name]):
            return NONE
        shown = form.format(scale * row[name])
        return shown if missing(row[error]) else f"{shown} +-{form.replace('+', '').format(scale * row[error])}"

    return Column(name, header, cell=cell)


_TEXT = (
    _POLICY,
    text("phase"),
    number("perplexity", "ppl", "{:.2f}"),
    _with_error("cross_entropy_added", "cross_entropy_added_half", "cross-entropy + nats", "{:+.4f}"),
    number("kl", "KL nats", "{:.4f}"),
    percentage("agreement", "top-1 agree"),
    percentage("dropped_fraction", "dropped"),
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
    _POLICY,
    text("task"),
    Column(
        "metric", "metric", cell=lambda row: row["metric"] + ("" if row["filter"] == "none" else f" ({row['filter']})")
    ),
    number("num_fewshot", "shots", "{}"),
    number("num_samples", "questions", "{:,}"),
    _with_error("value", "stderr", "ours %", "{:.1f}", 100),
    _with_error("added", "added_stderr", "over unpatched", "{:+.1f}", 100),
    percentage("paper", "paper"),
    Column("paper", "ours - paper (std. errors)", cell=lambda row: _against_paper(row)),
    percentage("dropped_fraction", "dropped"),
    percentage("retained_mass_topk", "mass kept"),
)
_MEAN = (
    Column("label", "mean over tasks", cell=_POLICY.cell),
    number("tasks", form="{}"),
    _with_error("value", "stderr", "ours %", "{:.1f}", 100),
    percentage("paper", "paper"),
    Column("paper", "ours - paper (std. errors)", cell=lambda row: _against_paper(row)),
)


def quality_tables(quality: Quality) -> list[Table]:
    """All tables; the column ``table`` says of a row which kind it is of: texts, claims, tasks or means."""
    return [*_text_tables(quality), *_claim_tables(quality), *_task_tables(quality)]


def _text_tables(quality: Quality) -> Iterator[Table]:
    costs = text_costs(quality)
    for comparison_id, rows in costs.groupby("comparison_id", sort=False) if len(costs) else ():
        facts = quality.facts[str(comparison_id)]
        least = rows["num_batches"].min()
        interval = "with its 95 % interval, Student's t over batches, whose sequences were routed together"
        if least < MIN_BATCHES:
            interval = f"no interval, and no verdict on claims, below {MIN_BATCHES} batches; got {least:.0f}"
        notes = [
            f"cross-entropy: added to the unpatched model's on the same sequences ({interval})",
            "ppl: perplexity of the text; KL and top-1: of the answers from the unpatched model's",
            "prefill: all tokens of a batch are routed together; decode: those of each position, as in a step of "
            f"{facts['batch_size']} requests",
            f"activated experts (of {facts['num_experts']}) and the fullest rank, its pairs over native's mean: means "
            "over these, batches and layers",
        ]
        yield Table(
            _named("texts", rows),
            _TEXT,
            f"{facts['title']}: answers of the whole model, routing of {facts['num_ranks']} virtual ranks; not timed",
            notes,
            caption=notes[:1],
        )


def _claim_tables(quality: Quality) -> Iterator[Table]:
    frame = claims(quality)
    for (_, comparison), rows in frame.groupby(["group", "comparison"], sort=False) if len(frame) else ():
        notes = [
            "A keeps at least as much of the answers as B, papers say; B costs more: nats per token; +-: "
            "95 % interval, Student's t over batches, of all checkpoints over their means",
            "checkpoints: of which so many say the same by themselves",
            *chance_words(len(rows)),
        ]
        yield Table(_named("claims", rows), _CLAIM, f"Papers' claims on {comparison}", notes)


def _task_tables(quality: Quality) -> Iterator[Table]:
    scores = task_scores(quality)
    if scores.empty:
        return
    for comparison_id, rows in scores.groupby("comparison_id", sort=False):
        facts = quality.facts[str(comparison_id)]
        columns = [column for column in _TASK if column.header != "task" or rows["task"].nunique() > 1]
        notes = [
            "+-: standard errors over questions, of a difference to the unpatched model over the same ones, where the "
            "number is their mean; that requests of a batch share their routing is not in them",
            f"{facts['batch_size']} requests are routed together, on {facts['num_ranks']} virtual ranks; dropped pairs "
            "and kept mass are of all passes of a task, over all layers; nothing was timed",
        ]
        if facts["limit"]:
            notes.append(f"the first {facts['limit']} questions of each task only")
        if paper := facts["published"]:
            notes.append(
                f"paper: {paper['source']}, {paper['model']}; the difference is in our standard errors, the paper "
                f"states none. {paper['note']}"
            )
        yield Table(_named("tasks", rows), columns, facts["title"], notes)
    means, left_out = task_means(scores)
    if len(means):
        why = "left out of the means, for which of its numbers the paper's stands for is not stated"
        yield Table(_named("means", means), _MEAN, notes=[f"{task}: {why}" for task in left_out])


def task_means(scores: pd.DataFrame) -> tuple[pd.DataFrame, list[str]]:
    """A row per policy: means over the tasks that both we and the paper have one number of, from two tasks on.

    Returns:
        The means, and the tasks left out because we have several numbers for the paper's one.
    """
    beside = scores[scores["paper"].notna()]
    is_one = beside.groupby(["comparison_id", "label"])["value"].transform("size") == 1
    by_label = beside[is_one].groupby("label", sort=False)
    means = by_label[["value", "paper"]].mean().assign(tasks=by_label.size())
    squares = (beside["stderr"] ** 2).groupby(beside["label"][is_one]).sum(min_count=1)
    means["stderr"] = np.sqrt(squares) / means["tasks"]
    means["stderr"] = means["stderr"].where(by_label["stderr"].count() == means["tasks"])
    means["paper_stderrs"] = (means["value"] - means["paper"]) / means["stderr"].where(means["stderr"] > 0)
    return means[means["tasks"] > 1].reset_index(), list(dict.fromkeys(beside["task"][~is_one]))


def _against_paper(row: dict) -> str:
    if math.isnan(row["paper"]):
        return NONE
    errors = "" if missing(row["paper_stderrs"]) else f" ({row['paper_stderrs']:+.1f})"
    return f"{100 * (row['value'] - row['paper']):+.1f}{errors}"


def _named(kind: str, rows: pd.DataFrame) -> pd.DataFrame:
    return pd.concat([pd.Series(kind, index=rows.index, name="table"), rows], axis=1)
