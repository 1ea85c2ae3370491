"""The tables of ``moe-ep-bench route``: one per group of layers; and which figures were drawn.

Every number is of one batch of one layer first, all ranks together; then the mean over batches, then over layers.
"""

from __future__ import annotations

import json
import os
import textwrap
from collections.abc import Sequence
from pathlib import Path

from moe_ep_bench.analysis.notes import READING
from moe_ep_bench.analysis.render import Column, Table, number, percentage
from moe_ep_bench.analysis.route_load import ROUTED, RouteGroup, RouteRun, short
from moe_ep_bench.analysis.words import MODE_WORDS
from moe_ep_bench.metrics import uniform_activated_experts

_WIDTH = 120
_COLUMNS = (
    Column("policy", lambda row: short(row["label"]), is_words=True),
    number("expert_imbalance", "fullest expert", "{:.2f}"),
    number("rank_imbalance", "fullest rank", "{:.2f}"),
    percentage("dropped_share", "dropped %"),
    percentage("retained_mass", "mass kept %"),
    number("experts_per_token", "experts/token", "{:.2f}"),
    number("activated", "activated", "{:.1f}"),
    number("fullest_activated", "on one rank", "{:.1f}"),
)


def route_tables(run: RouteRun) -> list[Table]:
    """One table per group of layers; a row of the frame is a case, named as in ``frames.speedups``."""
    return [_table(group) for group in run.groups]


def _table(group: RouteGroup) -> Table:
    facts = group.facts
    about = {
        "mode": "route",
        "title": group.title,
        "model": facts.model,
        "num_ranks": facts.num_ranks,
        "num_tokens": facts.num_tokens,
        "num_batches": facts.num_batches,
        "layers": ", ".join(group.layer_names),
        "placement": facts.placement.name,
        "workload": facts.workload.kind,
        "policy": group.cases["policy"],
        "policy_params": group.cases["params"].map(lambda params: json.dumps(params, sort_keys=True)),
    }
    frame = group.cases[list(ROUTED)].assign(**about)[[*about, *ROUTED]].reset_index()
    layers = [] if group.layers == (None,) else group.layer_names
    over = f"; layer{'s' * (len(layers) > 1)} {_listed(layers)}" if layers else ""
    title = (
        f"{group.title}{over}: {MODE_WORDS['route']}, {facts.num_batches} batch{'es' * (facts.num_batches > 1)}, "
        f"{facts.placement.name} placement"
    )
    return Table(frame, _COLUMNS, title, _notes(group))


def _notes(group: RouteGroup) -> list[str]:
    facts = group.facts
    looks_past = group.cases["looks_past_top_k"].any()
    uniform = uniform_activated_experts(facts.num_experts, facts.top_k, facts.num_tokens)
    notes = [
        "fullest: pairs over the mean expert's or rank's, of each batch, then means over batches and layers",
        f"activated: experts with a token, of {facts.num_experts} ({uniform:.1f} if tokens chose independently and "
        "uniformly), and on the rank with most of them",
    ]
    if looks_past:
        notes.append("dropped: of the model's own pairs, also where a policy computes others in their place")
    if facts.workload.padding is not None:
        notes.append(READING)
    if facts.workload.tail_model and looks_past:
        notes.append(f"scores below the recorded top-k are those of the {facts.workload.tail_model} tail model")
    if facts.placement.name != "contiguous":
        notes.append(
            "policies that look at ranks (local scope, devices, rank budgets) take experts to lie contiguously"
        )
    if facts.image_share is not None:
        notes.append(f"assumed: the first {facts.image_share:.0%} of every sequence's tokens are an image's")
    return notes


def _listed(names: Sequence[str]) -> str:
    numbers = [int(name) for name in names]
    if len(numbers) > 2 and numbers == list(range(numbers[0], numbers[-1] + 1)):
        return f"{numbers[0]} to {numbers[-1]}"
    return ", ".join(names)


def drawn_words(written: Sequence[Path], lacking: Sequence[str]) -> str:
    """Say which figures there are now, and for which the rows lack what they need."""
    drawn = list(dict.fromkeys(path.stem for path in written))
    folder = os.path.relpath(written[0].parent) if written else ""
    lines = [f"figures in {folder}: {', '.join(drawn)}" if drawn else "no figure was drawn"]
    if lacking:
        lines.append(f"not drawn, the rows hold nothing for them: {', '.join(lacking)}")
    return "\n".join(["", *(line for text in lines for line in textwrap.wrap(text, _WIDTH, subsequent_indent="  "))])
