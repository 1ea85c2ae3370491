"""How and on what a comparison's numbers came about, in the words that tables, figures and the page share."""

from __future__ import annotations

import re
from collections.abc import Iterable

from moe_ep_bench.cost_model.links import MEASURED_ELSEWHERE, Links
from moe_ep_bench.facts import OVERLAP_WORDS, ComparisonFacts, Component, RoutedFacts, RunFacts, TimedFacts

MODE_WORDS = {
    "run": "measured",
    "emulated": "emulated (one device for all ranks, the all-to-all is modelled)",
    "route": "routing only (nothing was timed)",
}
MODELLED = "modelled (nothing was run)"
ELSEWHERE = "partly measured elsewhere, the rest modelled (nothing was run)"
PARTLY_ELSEWHERE = "partly measured elsewhere"
# How times came about: the values of the column ``origin``.
ORIGINS = ("measured", "emulated", PARTLY_ELSEWHERE, "modelled", "routed")
_SHORT = {"bfloat16": "bf16", "float32": "fp32"}
# What modelled links carry, by what a token has a copy for.
_SENT = {
    "pair": "NCCL all-to-all, one copy per (token, expert) pair",
    "rank": "one copy per (token, rank) and (token, other node), modelled over links",
}
# Of a device that is not here.
NOTHING_RAN = (PARTLY_ELSEWHERE, "modelled")


def origin_of(run: RunFacts, facts: ComparisonFacts) -> str:
    """One of ``ORIGINS``; routed where there are no times."""
    if isinstance(facts, TimedFacts) and facts.device is not None:
        return PARTLY_ELSEWHERE if is_elsewhere(facts) else "modelled"
    return {"run": "measured", "emulated": "emulated", "route": "routed"}[run.mode]


def is_same_model(named: str, model: str) -> bool:
    """Whether a file's word for a model means this one: case, signs and the hub's owner aside, one holds the other."""
    of_file, own = ("".join(filter(str.isalnum, name.rpartition("/")[2].lower())) for name in (named, model))
    return of_file in own or own in of_file


def is_elsewhere(facts: TimedFacts) -> bool:
    """Whether others measured the experts or the links of a device that is not here."""
    return facts.device is not None and any(
        f"{MEASURED_ELSEWHERE} (" in (words or "") for words in (facts.device, facts.links)
    )


def phase_origin(run: RunFacts, facts: TimedFacts, group: str) -> str:
    """How a group of phases came about: measured, measured elsewhere or modelled.

    Of a device that is not here all is modelled but what a table holds; of emulated ranks what moves between them.
    """
    words = facts.links if group == "comm" else facts.device if group == "experts" else None
    if words is not None and f"{MEASURED_ELSEWHERE} (" in words:
        return MEASURED_ELSEWHERE
    modelled = facts.device is not None or (run.mode == "emulated" and group == "comm")
    return "modelled" if modelled else "measured"


def how_words(run: RunFacts, facts: ComparisonFacts) -> str:
    """How the numbers came about."""
    words = MODE_WORDS[run.mode]
    if isinstance(facts, TimedFacts):
        if facts.device is not None:
            words = ELSEWHERE if is_elsewhere(facts) else MODELLED
        elif facts.backend == "gloo" and (file_of(facts.links) or "").partition(",")[0] in Links.names():
            words += f", MIXED MACHINES: experts of this CPU ({scale_words(facts.scale)}) behind links of GPUs"
    return f"whole models, {words}" if run.scope == "model" else words


def modelled_line(facts: Iterable[ComparisonFacts]) -> str:
    """The first line of an answer whose links are modelled: what is sent and how; empty where nothing is modelled."""
    modelled = [one for one in facts if isinstance(one, TimedFacts) and one.links is not None]
    sent = dict.fromkeys(_sent_words(one) for one in modelled)
    what = "Modelled" if any(one.device is not None for one in modelled) else "Modelled links"
    if any(map(is_elsewhere, modelled)):
        what = f"{what}, {PARTLY_ELSEWHERE}"
    how = dict.fromkeys(_SENT[one.copies] if one.exchange is None else one.exchange.words for one in modelled)
    layers = dict.fromkeys(layer_words(one) for one in modelled if one.device is not None)
    overlap = dict.fromkeys(OVERLAP_WORDS[one.overlap] for one in modelled)
    parts = filter(None, map(" / ".join, (sent, how, layers, overlap)))
    return f"{what}: {', '.join(parts)}." if sent else ""


def _sent_words(facts: TimedFacts) -> str:
    """The dtype, and what rows are dispatched as where that was asked for."""
    words = _SHORT.get(facts.dtype, facts.dtype)
    return f"{words}, dispatched as {facts.dispatch_dtype}" if facts.dispatch_dtype else words


def layer_words(facts: TimedFacts) -> str:
    """Which layer is modelled: whose experts, where these are no roofline, and how rows are permuted."""
    experts = "Transformer Engine's experts, " if facts.experts.ran == "te" else ""
    if facts.expert_rows is not None:
        experts = f"{facts.expert_rows.words}, "
    permuted = {"fused": "fused permutation", "none": "no permutation"}.get(facts.permute.ran, "unfused permutation")
    return f"{experts}{permuted}"


def device_words(run: RunFacts, facts: ComparisonFacts) -> str:
    """The devices and how many ranks used them, without what carried the collectives; empty where nothing ran."""
    if not isinstance(facts, TimedFacts):
        return ""
    environment = run.environment
    if facts.device is not None:
        return f"{facts.world_size} ranks, {facts.device}"
    if facts.links is not None:
        return f"{environment.device_name} in place of {facts.world_size} ranks"
    words = (
        f"{environment.device_name} x {facts.world_size} rank{'' if facts.world_size == 1 else 's'}, {facts.backend}"
    )
    if facts.backend != "nccl":
        return words
    words += f" {environment.nccl}" if environment.nccl else ""
    return words + (f", driver {environment.driver}" if environment.driver else "")


def said_once(values: Iterable[str | None]) -> str:
    """What comparisons share is said once, without what a model is made of; of many the first and the last."""
    different = list(dict.fromkeys(_short(value) for value in values if isinstance(value, str)))
    if len(different) > 2:
        different[1:-1] = [f"{len(different) - 2} more"]
    return " / ".join(different)


def _short(words: str) -> str:
    is_model = "modelled by" in words or MEASURED_ELSEWHERE in words
    short = words.partition(": ")[0] if is_model else words
    return f"{short}, the rest modelled" if f"experts {MEASURED_ELSEWHERE} (" in short else short


def file_of(described: str | None) -> str | None:
    """The file of a modelled device, or of links with a factor on their bandwidth; None where there is none."""
    return None if described is None else re.sub("^modelled by (devices|links)/", "", described.partition(": ")[0])


def scale_words(scale: float) -> str:
    """Whether the model has its true sizes."""
    return "true sizes" if scale == 1 else f"sizes x {scale:g} of the true ones"


def component_words(component: Component) -> str:
    """What ran, what was asked for where that was left open, and why."""
    why = f": {component.why}" if component.why else ""
    return (
        component.ran
        if component.ran == component.requested
        else f"{component.ran} (asked for {component.requested}{why})"
    )


def workload_words(facts: ComparisonFacts) -> str:
    """Where tokens and scores come from; a model of the tail is named, for it shapes what is measured."""
    workload = facts.workload
    if isinstance(facts, RoutedFacts):
        return workload.description
    tail = f", tail model: {workload.tail_model}" if workload.kind == "recorded" and workload.tail_model else ""
    return f"{workload.kind} workload: {workload.description.removeprefix(f'{workload.kind} ')}{tail}"
