"""What ``moe-ep-bench route`` prints: a table per group of layers, and which figures were drawn.

Every number is of one batch of one layer first, all ranks together; then the mean over batches, then over layers.
"""

from __future__ import annotations

import os
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from moe_ep_bench.analysis.padding import READING
from moe_ep_bench.analysis.route_load import RoutedCase, RouteGroup, RouteRun, short
from moe_ep_bench.analysis.words import MODE_WORDS, percent
from moe_ep_bench.metrics import uniform_activated_experts

WIDTH = 120
_GAP = "  "
_LABEL_WIDTH = 54

# Heading in two lines, and a case's numbers per batch: [B].
_COLUMNS: tuple[tuple[tuple[str, str], Callable[[RoutedCase], np.ndarray], Callable[[float], str]], ...] = (
    (("fullest", "expert"), lambda case: case.expert_imbalance, lambda value: f"{value:.2f}"),
    (("fullest", "rank"), lambda case: case.rank_imbalance, lambda value: f"{value:.2f}"),
    (("dropped", "%"), lambda case: case.dropped_share, percent),
    (("mass", "kept %"), lambda case: case.retained_mass, percent),
    (("experts", "/token"), lambda case: case.experts_per_token, lambda value: f"{value:.2f}"),
    (("activated", "experts"), lambda case: case.activated, lambda value: f"{value:.1f}"),
    (("on one", "rank"), lambda case: case.fullest_activated, lambda value: f"{value:.1f}"),
)


def route_table(run: RouteRun) -> str:
    """Render every group of layers as a table of at most ``WIDTH`` columns."""
    return "\n\n".join(_block(group) for group in run.groups)


def _block(group: RouteGroup) -> str:
    facts = group.facts
    layers = [name for name in group.layer_names if name != "-"]
    over = f"; layer{'s' * (len(layers) > 1)} {_listed(layers)}" if layers else ""
    heading = (
        f"{group.title}{over}: {MODE_WORDS['route']}, {facts.num_batches} batch{'es' * (facts.num_batches > 1)}, "
        f"{facts.placement.name} placement"
    )
    header = [["", *(name[0] for name, _, _ in _COLUMNS)], ["policy", *(name[1] for name, _, _ in _COLUMNS)]]
    rows = [
        [
            short(label) if len(short(label)) <= _LABEL_WIDTH else short(label)[: _LABEL_WIDTH - 3] + "...",
            *(show(float(np.mean([of(case).mean() for case in group.cases(label)]))) for _, of, show in _COLUMNS),
        ]
        for label in group.labels
    ]
    widths = [max(len(row[column]) for row in [*header, *rows]) for column in range(len(header[0]))]
    table = [
        _GAP.join(
            [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        )
        for row in [*header, *rows]
    ]
    uniform = uniform_activated_experts(facts.num_experts, facts.top_k, facts.num_tokens)
    notes = [
        "fullest: pairs over the mean expert's or rank's, of each batch, then means over batches and layers; "
        f"activated: experts with a token, of {facts.num_experts} ({uniform:.1f} if tokens chose independently and "
        "uniformly), and on the rank with most of them",
    ]
    if any(case.looks_past_top_k for case in group.layers[0].cases.values()):
        notes.append("dropped: of the model's own pairs, also where a policy computes others in their place")
    if facts.workload.padding is not None:
        notes.append(READING)
    if facts.workload.tail_model and any(case.looks_past_top_k for case in group.layers[0].cases.values()):
        notes.append(f"scores below the recorded top-k are those of the {facts.workload.tail_model} tail model")
    if facts.placement.name != "contiguous":
        notes.append(
            "policies that look at ranks (local scope, devices, rank budgets) take experts to lie contiguously"
        )
    if facts.image_share is not None:
        notes.append(f"assumed: the first {facts.image_share:.0%} of every sequence's tokens are an image's")
    wrapped = [
        line for note in notes for line in textwrap.wrap(note, WIDTH, initial_indent="  ", subsequent_indent="    ")
    ]
    return "\n".join([*textwrap.wrap(heading, WIDTH, subsequent_indent="  "), "", *table, "", *wrapped])


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
    return "\n".join(["", *(line for text in lines for line in textwrap.wrap(text, WIDTH, subsequent_indent="  "))])
