"""What ``moe-ep-bench quality`` prints of texts: what each policy costs a model's answers, and what it does to loads.

Cross-entropies are compared sequence by sequence, with the unpatched model's on the same sequence: the text's own noise
drops out. Intervals are Student's t over sequences, from ten of them on. Routing is of one batch (or step) of one
layer first, all ranks together; then the mean over batches, then over layers.
"""

from __future__ import annotations

import json
import math
import re
import textwrap
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
from numpy.typing import NDArray
from scipy import stats

from moe_ep_bench.analysis.parts import ResultsError, read_table
from moe_ep_bench.results import RunDirectory
from moe_ep_bench.schema import QUALITY_ROUTING_SCHEMA, QUALITY_SCHEMA

WIDTH = 120
LEAST_SEQUENCES = 10


@dataclass(frozen=True, eq=False)
class JudgedCase:
    """One case: its answers by sequence, its routing by batch and layer."""

    label: str
    role: str
    policy: str
    params: dict[str, Any]
    phase: str
    answers: pd.DataFrame
    routing: pd.DataFrame
    """Of the unpatched model in both phases: it is one choice, and its loads depend on what is routed together."""

    def mean(self, column: str) -> float:
        """Of the routing in the case's phase: over batches, then over layers."""
        routing = self.routing[self.routing["phase"] == self.phase]
        return float(routing.groupby("layer")[column].mean().mean())


@dataclass(frozen=True, eq=False)
class JudgedComparison:
    """Cases that read the same text, the unpatched model first."""

    facts: dict[str, Any]
    native: JudgedCase
    cases: list[JudgedCase]


def load_quality_results(directory: Path) -> list[JudgedComparison]:
    """Read what is done of texts in a directory that ``quality`` wrote, in the order of its config.

    Raises:
        ResultsError: see ``finished_comparisons``.
    """
    found = []
    for facts, cases in finished_comparisons(directory):
        if "text" in facts:
            native, *others = [_case(*parts) for parts in cases]
            found.append(JudgedComparison(facts, native, others))
    return found


Finished = tuple[dict[str, Any], list[tuple[dict[str, Any], pd.DataFrame, pd.DataFrame]]]
"""A comparison's facts and its finished cases: what each is, its scores, and its routing, which is empty of tasks."""


def finished_comparisons(directory: Path) -> list[Finished]:
    """All comparisons whose unpatched model is done, which comes first among their cases.

    Raises:
        ResultsError: the directory is not one of ``quality``, is damaged, or has nothing to compare yet.
    """
    files = RunDirectory(directory)
    found: list[Finished] = []
    try:
        described = json.loads(files.run_json.read_text())
        cases = sorted(described["cases"].items(), key=lambda item: (item[1]["role"] != "baseline", item[1]["order"]))
        for comparison_id, facts in sorted(described["comparisons"].items(), key=lambda item: item[1]["order"]):
            done = [
                (
                    case,
                    _read(files.path("quality", case_id), QUALITY_SCHEMA),
                    _read(files.path("quality_routing", case_id), QUALITY_ROUTING_SCHEMA)
                    if "text" in facts
                    else pd.DataFrame(),
                )
                for case_id, case in cases
                if case["comparison_id"] == comparison_id and files.is_done("quality", case_id)
            ]
            if done and done[0][0]["role"] == "baseline":
                found.append((facts, done))
    except ResultsError:
        raise
    except (OSError, ValueError, KeyError, TypeError, pa.ArrowException) as error:
        raise ResultsError(f"{directory}: damaged, or not written by `quality`: {error}") from None
    if not found:
        raise ResultsError(f"{directory}: no comparison has its unpatched model yet; the same command goes on")
    return found


def _read(path: Path, schema: pa.Schema) -> pd.DataFrame:
    return read_table(path, schema).to_pandas()


def _case(case: dict[str, Any], scores: pd.DataFrame, routing: pd.DataFrame) -> JudgedCase:
    answers = scores.pivot(index="item", columns="metric", values="value").rename_axis("sequence").reset_index()
    return JudgedCase(
        case["label"], case["role"], case["policy"], case["policy_params"], case["phase"], answers, routing
    )


def added_cross_entropy(case: JudgedCase, native: JudgedCase) -> tuple[float, float | None]:
    """What a case adds to the unpatched model's cross-entropy, nats per token, and half its 95 % interval.

    The interval is None below ten sequences.
    """
    paired = case.answers.set_index("sequence")["cross_entropy"] - native.answers.set_index("sequence")["cross_entropy"]
    return float(paired.mean()), half_interval(paired.to_numpy()) if len(paired) >= LEAST_SEQUENCES else None


def half_interval(values: NDArray[np.float64]) -> float:
    """Half of Student's 95 % interval of a mean; infinite where there is one value."""
    if len(values) < 2:
        return math.inf
    return float(stats.t.ppf(0.975, len(values) - 1) * values.std(ddof=1) / math.sqrt(len(values)))


def quality_table(comparisons: list[JudgedComparison]) -> str:
    """Render every comparison as a table of at most ``WIDTH`` columns."""
    return "\n\n".join(_block(comparison) for comparison in comparisons)


_OF_TEXT = ("of text", "%")
# What makes room for it, and for the longer labels of policies that know modalities.
_NOT_OF_IMAGES = (("experts", "/token"), ("activated", "experts"))
# Heading in two lines, and a case's number in words.
_COLUMNS: tuple[tuple[tuple[str, str], Callable[[JudgedCase, JudgedCase], str]], ...] = (
    (("", "phase"), lambda case, native: case.phase),
    (("text", "ppl"), lambda case, native: f"{math.exp(case.answers['cross_entropy'].mean()):.2f}"),
    (("cross-entropy", "+ nats"), lambda case, native: _added(case, native)),
    (("KL", "nats"), lambda case, native: f"{case.answers['kl'].mean():.4f}"),
    (("top-1", "agree %"), lambda case, native: f"{100 * case.answers['agreement'].mean():.1f}"),
    (("dropped", "%"), lambda case, native: f"{100 * case.mean('dropped_fraction'):.1f}"),
    (_OF_TEXT, lambda case, native: _dropped_text(case)),
    (("mass", "kept %"), lambda case, native: f"{100 * case.mean('retained_mass_topk'):.1f}"),
    (("experts", "/token"), lambda case, native: f"{case.mean('experts_per_token'):.2f}"),
    (("activated", "experts"), lambda case, native: f"{case.mean('activated_experts'):.1f}"),
    (("fullest", "rank"), lambda case, native: f"{case.mean('rank_peak_load'):.2f}"),
)


def _dropped_text(case: JudgedCase) -> str:
    """Of the text tokens' top-k pairs, all passes and layers; a dash where no token has a modality."""
    routing = case.routing[case.routing["phase"] == case.phase]
    if routing["num_image_tokens"].isna().any():
        return "-"
    text_pairs = routing["num_topk_pairs"] * (1 - routing["num_image_tokens"] / routing["num_tokens"])
    dropped = routing["num_dropped_pairs"] - routing["num_dropped_image_pairs"]
    return f"{100 * dropped.sum() / text_pairs.sum():.1f}" if text_pairs.sum() else "-"


def _added(case: JudgedCase, native: JudgedCase) -> str:
    if case.role == "baseline":
        return "-"
    mean, half = added_cross_entropy(case, native)
    return f"{mean:+.4f}" + ("" if half is None else f" +-{half:.4f}")


def _block(comparison: JudgedComparison) -> str:
    facts, native = comparison.facts, comparison.native
    images = facts.get("image_prefix")
    left_out = _NOT_OF_IMAGES if images else (_OF_TEXT,)
    columns = [column for column in _COLUMNS if column[0] not in left_out]
    header = [["", *(name[0] for name, _ in columns)], ["policy", *(name[1] for name, _ in columns)]]
    phases = dict.fromkeys(case.phase for case in comparison.cases) or [native.phase]
    cases = [*(replace(native, phase=phase) for phase in phases), *comparison.cases]
    rows = [[short_label(case.label), *(of(case, native) for _, of in columns)] for case in cases]
    widths = [max(len(row[column]) for row in [*header, *rows]) for column in range(len(header[0]))]
    room = WIDTH - sum(widths[1:]) - len(columns)
    widths[0] = min(widths[0], room)
    table = []
    for row in [*header, *rows]:
        first, *more = label_lines(row[0], room)
        numbers = [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        table += [" ".join([first.ljust(widths[0]), *numbers]), *more]
    heading = f"{facts['title']}: answers of the whole model, routing of {facts['num_ranks']} virtual ranks; not timed"
    notes = [
        "ppl: perplexity of the text; cross-entropy: what is added to the unpatched model's on the same sequences"
        + (
            ", with its 95 % interval (Student's t over sequences)"
            if len(native.answers) >= LEAST_SEQUENCES
            else f" (no interval below {LEAST_SEQUENCES} sequences)"
        )
        + "; KL and top-1: of the answers from the unpatched model's",
        *(
            [
                f"every sequence follows {images['tokens']} image tokens, which are synthetic: "
                f"{images['num_patterns']} patterns of {images['pattern_length']} tokens, repeated. Only the text is "
                "judged; dropped, of text: of the text tokens' own pairs"
            ]
            if images
            else []
        ),
        "prefill: all tokens of a batch are routed together; decode: those of each position, as in a step of "
        f"{facts['batch_size']} requests. Activated experts (of {facts['num_experts']}) and the fullest rank are means "
        "over these, over batches and over layers",
    ]
    wrapped = [
        line for note in notes for line in textwrap.wrap(note, WIDTH, initial_indent="  ", subsequent_indent="    ")
    ]
    return "\n".join([*textwrap.wrap(heading, WIDTH, subsequent_indent="  "), "", *table, "", *wrapped])


def label_lines(label: str, room: int) -> list[str]:
    """A label in lines of at most ``room``, broken between words; at least one."""
    return textwrap.wrap(label, room, subsequent_indent="  ", break_on_hyphens=False) or [""]


def short_label(label: str) -> str:
    """A case's label with shorter names of fields."""
    for key, short in (
        ("granularity=", "per "),
        ("metric=", ""),
        ("modality=", ""),
        ("num_candidates", "m"),
    ):
        label = label.replace(key, short)
    return re.sub(r"(capacity_factor=\d+)\.0\b", r"\1", label)


__all__ = [
    "LEAST_SEQUENCES",
    "JudgedCase",
    "JudgedComparison",
    "added_cross_entropy",
    "finished_comparisons",
    "half_interval",
    "label_lines",
    "load_quality_results",
    "quality_table",
    "short_label",
]
