"""Words that the table and the figures share, so that both say the same of one run."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from moe_ep_bench.analysis.load import Comparison, Part, Run
from moe_ep_bench.analysis.render import NONE
from moe_ep_bench.analysis.render import milliseconds as milliseconds
from moe_ep_bench.cost_model.links import Links
from moe_ep_bench.timing.statistics import MIN_BATCHES

MODE_WORDS = {
    "run": "measured",
    "emulated": "emulated (one device for all ranks, the all-to-all is modelled)",
    "route": "routing only (nothing was timed)",
}
MODELLED = "modelled (nothing was run)"
MODEL_CAVEAT = "Intervals are over batches only: what the model leaves out, or has wrong, is in none of them."
OVERSUBSCRIBED = "more ranks than cores: they share time slices, and no straggler speedup is claimed"
OVERLAP = (
    "shared experts run beside the transfers in plain iterations, and before them in breakdowns, which may last longer"
)
NOT_FUSED = "permutation is not fused: phase shares are not to be set beside a paper's"

# How times came about, and where router scores were taken from: the tags of a figure, in the words of ``marks``.
HOW = ("measured", "emulated", "modelled", "routed")
WORKLOADS = ("recorded", "synthetic")


@dataclass(frozen=True)
class Origin:
    """One of ``HOW``, and one of ``WORKLOADS``; None where a figure has no times, or no scores."""

    how: str | None
    workload: str | None


class Footer(list[str]):
    """The lines under a figure, and the origins that they put into words."""

    def __init__(self, lines: Iterable[str], origins: Iterable[Origin]) -> None:
        super().__init__(lines)
        self.origins = tuple(dict.fromkeys(origins))


def tags_of(origins: Iterable[Origin]) -> list[str]:
    """The words that a sheet is tagged with: how, then on which scores, each once."""
    found = {word for one in origins for word in (one.how, one.workload)}
    return [word for word in (*HOW, *WORKLOADS) if word in found]


def origin(run: Run, facts: Comparison) -> str:
    """How a comparison's times came about: measured, emulated or modelled; routed where there are none."""
    if facts.device is not None:
        return "modelled"
    return {"run": "measured", "emulated": "emulated", "route": "routed"}[run.mode]


def origins_of(run: Run, comparisons: Sequence[Comparison]) -> list[Origin]:
    """How each comparison's numbers came about, and on which scores."""
    return [Origin(origin(run, one), one.workload.kind) for one in comparisons]


def footer_lines(run: Run, comparisons: Sequence[Comparison], warnings: Sequence[str] = ()) -> Footer:
    """The two lines under a figure: how, on what, which model, which workload; then what weakens it."""
    facts = [
        [mode_words(run, comparison) for comparison in comparisons],
        [device_words(run, comparison) for comparison in comparisons],
        [c.links for c in comparisons if c.links is not None],
        [f"{c.model}, {scale_words(c.scale)}, {c.dtype}" for c in comparisons],
        ["random weights" for c in comparisons if c.random_weights],
        [workload_words(comparison) for comparison in comparisons],
    ]
    lines = [" | ".join([*([run.named] if run.named else []), *(_said_once(values) for values in facts if values)])]
    notes = [*([count_words(run)] if not all(case.is_ok for case in run.cases) else []), *warnings]
    lines += [f"Note: {'; '.join(note.removesuffix('.') for note in notes)}."] if notes else []
    return Footer(lines, origins_of(run, comparisons))


def _said_once(values: Sequence[str]) -> str:
    """What comparisons share is said once; of more than two different values the first and the last."""
    different = list(dict.fromkeys(values))
    if len(different) > 2:
        different[1:-1] = [f"{len(different) - 2} more"]
    return " / ".join(different)


def mode_words(run: Run, comparison: Comparison) -> str:
    """How the numbers came about."""
    words = MODELLED if comparison.device is not None else MODE_WORDS[run.mode]
    if comparison.device is None and comparison.backend == "gloo" and _links_name(comparison) in Links.names():
        words += f", MIXED MACHINES: experts of this CPU ({scale_words(comparison.scale)}) behind links of GPUs"
    return f"whole models, {words}" if run.scope == "model" else words


def hardware_words(run: Run, comparison: Comparison) -> str:
    """The devices, how many ranks used them, and what carried the collectives."""
    return ", ".join([device_words(run, comparison), *([comparison.links] if comparison.links else [])])


def device_words(run: Run, comparison: Comparison) -> str:
    """The same without modelled links."""
    if comparison.device is not None:
        return f"{comparison.world_size} ranks {comparison.device}"
    if comparison.links is not None:
        return f"{run.device_name} in place of {comparison.world_size} ranks"
    ranks = f"{comparison.world_size} rank{'' if comparison.world_size == 1 else 's'}"
    words = f"{run.device_name} x {ranks}, {comparison.backend}"
    if comparison.backend != "nccl":
        return words
    return words + (f" {run.nccl}" if run.nccl else "") + (f", driver {run.driver}" if run.driver else "")


def _links_name(comparison: Comparison) -> str:
    """The file of modelled links, without a factor on their bandwidth; empty where there are none."""
    return re.split("[:,]", (comparison.links or "").removeprefix("modelled by links/"))[0]


def scale_words(scale: float) -> str:
    """Whether the model has its true sizes."""
    return "true sizes" if scale == 1 else f"sizes x {scale:g} of the true ones"


def part_words(part: Part) -> str:
    """What ran, what was asked for where that was left open, and why."""
    why = f": {part.why}" if part.why else ""
    return part.ran if part.ran == part.requested else f"{part.ran} (asked for {part.requested}{why})"


def workload_words(comparison: Comparison) -> str:
    """Where tokens and scores come from; a model of the tail is named, for it shapes what is measured."""
    workload = comparison.workload
    tail = f", tail model: {workload.tail_model}" if workload.kind == "recorded" and workload.tail_model else ""
    return f"{workload.kind} workload: {workload.description.removeprefix(f'{workload.kind} ')}{tail}"


def count_words(run: Run) -> str:
    """How many cases were measured, and what became of the others."""
    counts = Counter(case.status for case in run.cases)
    lost = ", ".join(f"{number} {status}" for status, number in sorted(counts.items()) if status != "ok")
    num_lost = len(run.cases) - counts["ok"]
    return f"{len(run.cases)} cases: {counts['ok']} measured, {num_lost} not" + (f" ({lost})" if lost else "")


def is_modelled_phase(run: Run, comparison: Comparison, group: str) -> bool:
    """Whether a group of phases was computed: of a modelled device all, of emulated ranks what moves between them."""
    return comparison.device is not None or (run.mode == "emulated" and group == "comm")


def interval_words(is_interval: Sequence[bool], mark: str = "Whiskers") -> str:
    """What the lines about a speedup are: an interval, or the ends of the samples where batches are too few for one."""
    if all(is_interval):
        return f"{mark}: 95 % interval."
    few = f"fewer than {MIN_BATCHES} batches"
    if not any(is_interval):
        return f"{mark}: smallest and largest pair ({few} give no interval)."
    return f"{mark}: 95 % interval, or smallest and largest pair where there are {few}."


def percent(share: float) -> str:
    """A share as a percentage with one decimal, without the sign; a dash where there is none."""
    return NONE if math.isnan(share) else f"{100 * share:.1f}"
