"""Costs of policies in a model's answers (``quality``): frames of texts, of papers' claims on them, and of tasks.

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
import math
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from itertools import product
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from scipy.special import stdtrit  # Student's quantile; scipy.stats imports slowly

from moe_ep_bench.analysis.cases import of_each, params_json, values_of
from moe_ep_bench.analysis.columns import LOST, Row, labels, short_labels
from moe_ep_bench.analysis.reduce import over_layers
from moe_ep_bench.analysis.store import MISSING, Directory, Store
from moe_ep_bench.facts import JudgedFacts
from moe_ep_bench.facts.words import title_words
from moe_ep_bench.papers import orderings
from moe_ep_bench.policies import POLICIES
from moe_ep_bench.timing.statistics import MIN_BATCHES

_FACTS = ["title", "model", "text", "task", "limit", "batch_size", "num_ranks"]
_OF_A_CHECKPOINT = {"name", "model", "title", "order"}
_CASE = ["comparison_id", "label", "role", "policy", "policy_params", "settings", "stage"]
_GROUP = ["title", "group", "comparison", "checkpoints"]
_IMBALANCES = {"peak_load": "expert_imbalance", "rank_peak_load": "rank_imbalance"}
_ROUTED = [*LOST, "retained_mass_topk", "experts_per_token", "activated_experts", *_IMBALANCES.values()]
_OF_TASK = ["dropped_share", "rerouted_share", "retained_mass_topk"]
_SCORE = ["task", "metric", "filter", "num_fewshot", "num_samples", "value", "stderr"]


class Answers(NamedTuple):
    """Answers of one directory whose comparisons have their unpatched model.

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


@lru_cache(maxsize=8)
def answers_of(directory: Directory) -> Answers:
    """A directory's cases and rows, of comparisons whose unpatched model is done."""
    listed = directory.cases[directory.cases["status"] == "ok"]
    cases = pd.DataFrame([values_of("", case, [*_CASE, "order"]) for case in listed["facts"]])
    cases = cases.assign(label=labels(cases), case_id=listed["case_id"].array, place=listed["comparison"].array)
    cases = cases[cases["place"].isin(cases.loc[cases["role"] == "baseline", "place"])]
    cases = cases.sort_values(["place", "order"], kind="stable").set_index("case_id")
    begun = [directory.comparisons[place] for place in cases["place"].unique()]
    cases = cases[_CASE].join(_comparisons({one.comparison_id: one.facts for one in begun}), on="comparison_id")
    tables = (directory.quality, directory.quality_routing)
    named = (rows.assign(case_id=rows["case"].map(listed["case_id"])).drop(columns="case") for rows in tables)
    return Answers(cases, *(rows[rows["case_id"].isin(cases.index)] for rows in named))


def _comparisons(facts: Mapping[str, JudgedFacts]) -> pd.DataFrame:
    """Facts of comparisons, by id: ``_FACTS``, ``text`` or ``asked_task`` null.

    Comparisons that differ in nothing but the checkpoint are a ``group``: its number, how many ``checkpoints`` it has,
    and as ``comparison`` its title.
    """
    rows = [one.model_dump() | {"title": title_words(one)} for one in facts.values()]
    frame = pd.DataFrame(rows, list(facts), columns=_FACTS)
    others = [one.model_dump_json(exclude=_OF_A_CHECKPOINT) for one in facts.values()]
    group = pd.Series(pd.factorize(np.array(others, dtype=object))[0], frame.index)
    first = frame[["title", "model"]].groupby(group).transform("first")
    frame = frame.assign(group=group, checkpoints=group.map(group.value_counts()))
    frame["comparison"] = [
        title if number == 1 else str(title).replace(str(model), f"{number} checkpoints", 1)
        for title, model, number in zip(first["title"], first["model"], frame["checkpoints"], strict=True)
    ]
    return frame.rename(columns={"task": "asked_task"})


# ---- frames of a store -----------------------------------------------------------------------------------------------


def _of_store(table: str, frame_of: Callable[[Answers], pd.DataFrame]) -> Callable[[Store], pd.DataFrame]:
    """A frame of all directories; further columns: ``directory``, and ``table``, which kind a row is of.

    Titles of several directories end in the directory's name, for nothing of two is compared.
    """

    @of_each
    def of_directory(directory: Directory) -> pd.DataFrame:
        rows = frame_of(answers_of(directory)) if len(directory.quality) else pd.DataFrame()
        return rows.assign(directory=directory.comparisons[0].directory, table=table)

    def of_store(store: Store) -> pd.DataFrame:
        rows = of_directory(store)
        if rows["directory"].nunique() < 2:
            return rows
        titles = [name for name in ("title", "comparison") if name in rows]
        return rows.assign(**{name: rows[name] + ", from " + rows["directory"] for name in titles})

    return of_store


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


def _added(answers: Answers) -> pd.DataFrame:
    """Cross-entropy that a case (column) adds to the unpatched model's on a sequence (row); null of other texts."""
    is_cost = answers.scores["metric"] == "cross_entropy"
    costs = answers.scores[is_cost].pivot(index=["batch", "item"], columns="case_id", values="value")
    cases = answers.cases.loc[costs.columns]
    natives = cases[cases["role"] == "baseline"].reset_index().set_index("comparison_id")["case_id"]
    return costs - costs[cases["comparison_id"].map(natives)].to_numpy()


def text_costs(answers: Answers) -> pd.DataFrame:
    """A row per case of a text and stage in which it is judged, the unpatched model in those of the others.

    Columns: what the case is; of its comparison ``title``, ``comparison``, ``checkpoints`` and ``group``;
    ``cross_entropy``, ``kl`` (nats per token), ``perplexity``, ``agreement``; ``cross_entropy_added`` to the unpatched
    model's, and ``_half`` its interval (missing below ten batches); ``num_sequences``, ``num_batches``; means of the
    routing; ``fullest_rank``, its pairs over native's mean, and ``expert_imbalance`` and ``rank_imbalance``, over the
    mean of the pairs that are computed.
    """
    if not answers.has_texts:
        return pd.DataFrame()
    added = _added(answers)
    costs = answers.scores.groupby(["case_id", "metric"])["value"].mean().unstack()
    costs = costs.loc[added.columns, ["cross_entropy", "kl", "agreement"]].assign(
        num_sequences=added.count(),
        num_batches=(added.groupby(level="batch").count() > 0).sum(),
        perplexity=lambda rows: np.exp(rows["cross_entropy"]),
        cross_entropy_added=added.mean(),
        cross_entropy_added_half=half_over_batches(added),
    )
    is_native = answers.cases["role"] == "baseline"
    of_native = costs.index.isin(answers.cases.index[is_native])
    costs.loc[of_native, ["cross_entropy_added", "cross_entropy_added_half"]] = np.nan
    about = [*(name for name in _CASE if name != "stage"), *_GROUP]
    rows = answers.cases[about].join(_routing_means(answers.routing), how="inner").reset_index()
    judged = answers.cases[~is_native].groupby("comparison_id")["stage"].agg(set)
    of_rows = zip(rows["comparison_id"], rows["stage"], strict=True)
    is_shown = [stage in judged.get(comparison, {stage}) for comparison, stage in of_rows]
    rows = rows[is_shown].join(costs, on="case_id")
    return rows.assign(policy_params=rows["policy_params"].map(params_json)).reset_index(drop=True)


def _routing_means(routing: pd.DataFrame) -> pd.DataFrame:
    """Means over batches, then over layers; by case, with the stage."""
    routing = routing.rename(columns=_IMBALANCES)
    computed = routing["num_pairs"] / routing["num_topk_pairs"]
    routing = routing.assign(missing_share=routing[MISSING] / routing["num_topk_pairs"])
    routing = routing.assign(fullest_rank=routing["rank_imbalance"] * computed)
    means = over_layers(routing, ["case_id", "stage"], [*_ROUTED, "fullest_rank"], "dropped_share")
    return means.reset_index("stage")


# ---- tasks -----------------------------------------------------------------------------------------------------------


def task_scores(answers: Answers) -> pd.DataFrame:
    """A row per case and metric of a task that the config asks for; shares.

    Columns: what the case is; task, metric, filter, num_fewshot, num_samples; ``value`` and ``stderr``; ``added`` to
    the unpatched model's and ``added_stderr``, paired by question; the task's routing.
    """
    cases = answers.cases[answers.cases["asked_task"].notna()]
    if cases.empty:
        return pd.DataFrame()
    scores = answers.scores.drop(columns=["comparison_id", "stage"], errors="ignore")
    scores = scores.join(cases[["comparison_id", "role"]], on="case_id", how="inner")
    number = ["comparison_id", "task", "metric", "filter", "item"]
    natives = scores.loc[scores["role"] == "baseline", [*number, "value"]]
    scores = scores.merge(natives, on=number, how="left", suffixes=("", "_native"))
    whole, questions = scores[scores["item"].isna()], scores[scores["item"].notna()]
    routing = whole[whole["filter"].isna()].pivot(index="case_id", columns="metric", values="value")
    routing = routing.reindex(columns=[*dict.fromkeys([*routing, *_OF_TASK])])  # a server tells none
    rows = whole.loc[whole["filter"].notna() & whole["is_asked"].eq(True), ["case_id", *_SCORE, "value_native"]]
    rows = cases.join(rows.set_index("case_id"), how="inner").rename_axis("case_id").reset_index()
    rows = rows.assign(
        policy_params=rows["policy_params"].map(params_json),
        added=(rows["value"] - rows["value_native"]).mask(rows["role"] == "baseline"),
        added_stderr=[_paired_stderr(row, questions) for row in rows.itertuples()],
    )
    rows = rows[["case_id", *_CASE, *_SCORE, "added", "added_stderr"]]
    routing = routing.assign(missing_share=routing["dropped_share"] + routing["rerouted_share"])
    rows = rows.join(routing, on="case_id").reset_index(drop=True)
    return rows.astype({"num_fewshot": "Int64", "num_samples": "Int64"})


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


def claims(answers: Answers) -> pd.DataFrame:
    """A row per claim and pair of cases that all checkpoints of a group have.

    ``worse_costs_more`` is the cross-entropy that ``worse`` adds less what ``better`` adds, nats per token, and
    ``half_width`` half its 95 % interval (none below ten batches); ``agree`` of ``checkpoints`` have the ``verdict`` by
    themselves; ``group`` is that of ``Quality.comparisons``.
    """
    if not answers.has_texts:
        return pd.DataFrame()
    added = _added(answers)
    cases = answers.cases[answers.cases.index.isin(added.columns) & (answers.cases["role"] != "baseline")]
    frame = pd.DataFrame([pair for _, of_one in cases.groupby("comparison_id", sort=False) for pair in _pairs(of_one)])
    if frame.empty:
        return frame
    differences = pd.DataFrame(added[list(frame["b"])].to_numpy() - added[list(frame["a"])].to_numpy(), added.index)
    frame = frame.assign(
        worse_costs_more=differences.mean().to_numpy(), half_width=half_over_batches(differences).to_numpy()
    ).join(answers.cases[_GROUP], on="a")
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
    cases = cases[_CASE].reset_index().assign(short=short_labels(cases).array)
    rows = [row | {"fields": _fields(row)} for row in cases.to_dict("records")]
    for source, claim in orderings():
        named = claim.better.keys() | claim.worse.keys()
        worse, better = ([row for row in rows if _suits(row["fields"], kind)] for kind in (claim.worse, claim.better))
        for b, a in product(worse, better):
            shared = (a["fields"].keys() & b["fields"].keys()) - named
            if a["stage"] == b["stage"] and all(a["fields"][key] == b["fields"][key] for key in shared):
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


texts = _of_store("texts", text_costs)
orderings_met = _of_store("claims", claims)
tasks = _of_store("tasks", task_scores)
