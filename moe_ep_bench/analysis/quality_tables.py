"""The tables of a quality directory: texts by policy, the papers' orderings, tasks by policy beside papers' numbers."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import pandas as pd

from moe_ep_bench.analysis.quality_frames import Quality, task_scores, text_costs
from moe_ep_bench.analysis.quality_orderings import orderings, short_label
from moe_ep_bench.analysis.render import NONE, Column, Table, missing, number, percentage, text
from moe_ep_bench.analysis.words import chance_words
from moe_ep_bench.timing.statistics import MIN_BATCHES

_POLICY = Column("policy", lambda row: short_label(row["label"]), is_words=True)


def _with_error(name: str, error: str, header: str, form: str, scale: float = 1.0) -> Column:
    """A number and behind it its error, where there is one: ``+0.30 +-0.02``."""

    def cell(row: dict) -> str:
        if missing(row[name]):
            return NONE
        shown = form.format(scale * row[name])
        return shown if missing(row[error]) else f"{shown} +-{form.replace('+', '').format(scale * row[error])}"

    return Column(header, cell)


_TEXT = (
    _POLICY,
    text("phase"),
    number("perplexity", "ppl", "{:.2f}"),
    _with_error("cross_entropy_added", "cross_entropy_added_half", "cross-entropy + nats", "{:+.4f}"),
    number("kl", "KL nats", "{:.4f}"),
    percentage("agreement", "top-1 agree %"),
    percentage("dropped_fraction", "dropped %"),
    percentage("text_dropped_fraction", "of text %"),
    percentage("retained_mass_topk", "mass kept %"),
    number("experts_per_token", "experts/token", "{:.2f}"),
    number("activated_experts", "activated", "{:.1f}"),
    number("fullest_rank", "fullest rank", "{:.2f}"),
)
_ORDERING = (
    text("checkpoint"),
    Column("verdict", lambda row: row["verdict"], is_words=True),
    _with_error("worse_costs_more", "half_width", "second costs more", "{:+.4f}"),
    text("better", "first"),
    text("worse", "second"),
)
_TASK = (
    _POLICY,
    text("task"),
    Column("metric", lambda row: row["metric"] + ("" if row["filter"] == "none" else f" ({row['filter']})"), True),
    number("num_fewshot", "shots", "{}"),
    number("num_samples", "questions", "{:,}"),
    _with_error("value", "stderr", "ours %", "{:.1f}", 100),
    _with_error("added", "added_stderr", "over unpatched", "{:+.1f}", 100),
    percentage("paper", "paper %"),
    Column("ours - paper (std. errors)", lambda row: _against_paper(row)),
    percentage("dropped_fraction", "dropped %"),
    percentage("retained_mass_topk", "mass kept %"),
)
_MEAN = (
    Column("mean over tasks", _POLICY.cell, is_words=True),
    number("tasks", form="{}"),
    _with_error("value", "stderr", "ours %", "{:.1f}", 100),
    percentage("paper", "paper %"),
    Column("ours - paper (std. errors)", lambda row: _against_paper(row)),
)


def quality_tables(quality: Quality) -> list[Table]:
    """All tables; the column ``table`` says of a row which kind it is of: texts, orderings, tasks or means."""
    return [*_text_tables(quality), *_ordering_tables(quality), *_task_tables(quality)]


def _text_tables(quality: Quality) -> Iterator[Table]:
    costs = text_costs(quality)
    for comparison_id, rows in costs.groupby("comparison_id", sort=False) if len(costs) else ():
        facts = quality.facts[str(comparison_id)]
        has_modality = rows["text_dropped_fraction"].notna().any()
        least = rows["num_batches"].min()
        interval = "with its 95 % interval, Student's t over batches, whose sequences were routed together"
        if least < MIN_BATCHES:
            interval = f"no interval, and no verdict on orderings, below {MIN_BATCHES} batches; got {least:.0f}"
        notes = [
            f"cross-entropy: added to the unpatched model's on the same sequences ({interval})",
            "ppl: perplexity of the text; KL and top-1: of the answers from the unpatched model's",
            "prefill: all tokens of a batch are routed together; decode: those of each position, as in a step of "
            f"{facts['batch_size']} requests",
            f"activated experts (of {facts['num_experts']}) and the fullest rank, its pairs over native's mean: means "
            "over these, batches and layers",
        ]
        if images := facts.get("image_prefix"):
            notes.append(
                f"every sequence follows {images['tokens']} image tokens, which are synthetic: "
                f"{images['num_patterns']} patterns of {images['pattern_length']} tokens, repeated; only the text is "
                "judged; dropped, of text: of the text tokens' own pairs"
            )
        yield Table(
            _named("texts", rows),
            [column for column in _TEXT if has_modality or column.header != "of text %"],
            f"{facts['title']}: answers of the whole model, routing of {facts['num_ranks']} virtual ranks; not timed",
            notes,
            caption=notes[:1],
        )


def _ordering_tables(quality: Quality) -> Iterator[Table]:
    frame = orderings(quality)
    for (_, comparison), group in frame.groupby(["group", "comparison"], sort=False) if len(frame) else ():
        note = (
            f"orderings on {comparison}: does the first cost less than the second? +-: 95 % interval, Student's t over "
            "batches, of all checkpoints over their means"
        )
        by_chance = chance_words(int(group["is_overall"].sum()))
        for words, rows in group.groupby(["ordering", "source", "unit"], sort=False):
            is_last = rows.index[-1] == group.index[-1]
            yield Table(
                _named("orderings", rows),
                _ORDERING,
                "{} ({}), {}".format(*words),
                [note, *by_chance] if is_last else [],
            )


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
