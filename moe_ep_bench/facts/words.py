"""The sentences of results: how and on what a comparison's numbers came about, composed from its facts.

Tables, figures, answers and the page print them. Nothing reads them: a decision is taken from ``facts``.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from moe_ep_bench.errors import brief, did_you_mean, in_ranges
from moe_ep_bench.facts import (
    MEASURED_ELSEWHERE,
    PARTLY_ELSEWHERE,
    AskedLayers,
    Assumption,
    CaseFacts,
    ComparisonFacts,
    Component,
    CountedLayers,
    DeviceFacts,
    Environment,
    ExchangeFacts,
    ExpertFacts,
    JudgedFacts,
    LinkFacts,
    LinksFacts,
    MeasuredBy,
    MissingRows,
    ModelExtent,
    PeakLoads,
    Recording,
    Rest,
    RoutedFacts,
    Rows,
    RunFacts,
    ServedFacts,
    SkewFacts,
    SkewLayers,
    Subject,
    TimedFacts,
    Workload,
)
from moe_ep_bench.models.memory import Fit
from moe_ep_bench.policies.contract import ByLayer, Setting

MODE_WORDS = {
    "run": "measured",
    "emulated": "emulated (one device for all ranks, the all-to-all is modelled)",
    "route": "routing only (nothing was timed)",
    "quality": "answers (nothing was timed)",
    "serve": "measured by a client, from sending to the last token",
    "rehearsal": "rehearsal (ranks shared a device, so nothing was timed)",
}
MODELLED = "modelled (nothing was run)"
ELSEWHERE = "partly measured elsewhere, the rest modelled (nothing was run)"
_SHORT = {"bfloat16": "bf16", "float32": "fp32"}
# What modelled links carry, by what a token has a copy for.
_SENT = {
    "pair": "NCCL all-to-all, one copy per (token, expert) pair",
    "rank": "one copy per (token, rank) and (token, other node), modelled over links",
}
OVERLAP_WORDS = {
    "none": "no overlap",
    "shared": "shared experts during dispatch",
    "two_batch": "two micro-batches that overlap",
}
_FRAMEWORKS = {"vllm": "vLLM", "trtllm": "TensorRT-LLM", "sglang": "SGLang", "nccl": "NCCL"}
# What a token has a copy for, in a line and in a sentence.
_COPIES = {"rank": "(token, rank)", "node": "(token, other node)", "pair": "(token, expert) pair"}
_ONE_FOR_EACH = {"rank": "rank", "node": "other node", "pair": "expert"}


Parts = tuple[str, ...]
"""What stands between the commas of a line; several lines say what they share once (``said_once``)."""


class Line(NamedTuple):
    """A sentence below a table or an answer, as people read it.

    Attributes:
        is_warning: it forbids or weakens a reading.
        place: of its kind among all sentences; what voids a result has the first.
    """

    text: str
    is_warning: bool = False
    place: int = 0

    def __str__(self) -> str:
        return f"{'warning: ' * self.is_warning}{self.text}"


def tokens_words(num_tokens: int) -> str:
    """``1 token``, ``4,096 tokens``."""
    return f"{num_tokens:,} token{'' if num_tokens == 1 else 's'}"


# ---- labels of cases -------------------------------------------------------------------------------------------------

_REFERENCES = {"noise": ("native", "again"), "balanced": ("balanced",)}
# What balances without loss, and who chooses among replicas.
_PLANS = {
    "eplb": ("EPLB",),
    "variance": ("variance", "plan"),
    "llep": ("LLEP",),
    "ultra": ("UltraEP",),
    "moonep": ("MoonEP",),
    "epic": ("EPIC",),
    "waterfill": ("shared", "experts", "by", "water-filling"),
}
_UNSOLVED = ("waterfill",)  # what takes no time to solve
_BALANCERS = {"static": (), "lp": ("+", "LP"), "activated": ("+", "fewest", "activated")}
# How a setting is named in short, ``{}`` being its value.
_SHORT_FORMS = {
    "capacity_factor": ("{}",),
    "granularity": ("per", "{}"),
    "scope": ("per", "{}"),
    "metric": ("{}",),
    "modality": ("{}",),
    "request_budget": ("budget={}",),
    "rank_budget": ("budget={}",),
    "similarity": (),
}
SHORTER = tuple(
    map(
        frozenset,
        (
            {"capacity_factor"},
            {"granularity", "scope"},
            {"metric", "modality"},
            {"request_budget", "rank_budget"},
            {"similarity"},
            {"spare_per_rank"},
            {"solve_us"},
            {"no solve_us"},
        ),
    )
)
"""Steps in which a label is made shorter: settings that ``label_parts`` then names in short, or not at all."""
_MOST_BANDS = 4  # of layers that a label spells out


def label_words(policy: str, settings: Iterable[Setting], role: str, **how: Collection[str]) -> str:
    """A case's label (``label_parts``)."""
    return " ".join(label_parts(policy, settings, role, **how))


def case_label(case: CaseFacts, **how: Collection[str]) -> str:
    """The label of a case of run.json (``label_parts``)."""
    return label_words(case.policy, case.settings, case.role, **how)


def label_parts(
    policy: str, settings: Iterable[Setting], role: str, *, short: Collection[str] = (), without: Collection[str] = ()
) -> list[str]:
    """The words of a label: what runs, and the settings that differ from their defaults.

    Args:
        short: keys of ``SHORTER`` that are named in short.
        without: keys that are not named.
    """
    if role in _REFERENCES:
        return [*_REFERENCES[role]]
    if role == "replication":
        return _plan_parts(policy, {one.key: one for one in settings if one.key not in without}, short)
    named = (one for one in settings if not one.is_default and one.key not in without)
    return [policy, *(word for one in named for word in _setting_parts(one, short))]


def family_words(policy: str, params: Mapping[str, Any]) -> str:
    """The policy and all that is set of it, but for the capacity factor."""
    named = sorted((key, value) for key, value in params.items() if key != "capacity_factor" and value is not None)
    return " ".join([policy, *(f"{key}={value}" for key, value in named)])


def _setting_parts(setting: Setting, short: Collection[str]) -> list[str]:
    forms = _SHORT_FORMS[setting.key] if setting.key in short else (f"{setting.key}={{}}",)
    return [form.format(_value_words(setting)) for form in forms]


def _value_words(setting: Setting) -> str:
    """A value; of what differs by layer its bands, or where they are many the ends of its range and a checksum."""
    if setting.is_file:
        return Path(str(setting.value)).stem
    if not setting.is_by_layer:
        return str(setting.value)
    values = ByLayer.of(setting.value)
    if len(bands := values.bands()) <= _MOST_BANDS:
        return "/".join(f"{band}:{value:g}" for band, value in bands.items())
    return f"{min(values):g}..{max(values):g}#{zlib.crc32(repr(tuple(values)).encode()) % 65536:04x}"


def _plan_parts(name: str, settings: Mapping[str, Setting], short: Collection[str]) -> list[str]:
    """What balances without loss: who plans and chooses, the time to solve, spare slots and what else is set."""
    values: dict[str, Any] = {key: one.value for key, one in settings.items()}
    spare, solve_us = values.get("spare_per_rank"), values.get("solve_us")
    parts = [[*_PLANS.get(name, (name,)), *_BALANCERS[values.get("balancer", "static")]]]
    if solve_us is not None and name not in _UNSOLVED and "no solve_us" not in short:
        parts[0] += [f"({solve_us:g}", *(("us)",) if "solve_us" in short else ("us", "to", "solve)"))]
    if spare is not None:
        parts.append([f"{spare}", "spare", *(() if "spare_per_rank" in short else ("per", "rank"))])
    if (budget := values.get("spare_budget")) is not None:
        parts.append([f"{budget:g}", "spare", "per", "layer", *(() if "spare_per_rank" in short else ("and", "rank"))])
    said = ("plan", "balancer", "spare_per_rank", "spare_budget", "solve_us")
    parts += [[f"{key}={one.value}"] for key, one in settings.items() if key not in said and not one.is_default]
    return [*(word for part in parts[:-1] for word in (*part[:-1], f"{part[-1]},")), *parts[-1]]


# ---- what ran --------------------------------------------------------------------------------------------------------


def how_parts(run: RunFacts, facts: ComparisonFacts) -> Parts:
    """How the numbers came about."""
    words = MODE_WORDS[run.mode]
    if isinstance(facts, TimedFacts):
        if facts.mixes_machines:
            return mixed_parts(run.scope, facts.scale)
        if facts.device is not None:
            words = ELSEWHERE if facts.is_elsewhere else MODELLED
    return (*["whole models"] * (run.scope == "model" and run.mode != "serve"), words)


def mixed_parts(scope: str, scale: float) -> Parts:
    """How numbers came about whose experts are of a CPU and whose links are of GPUs."""
    machines = f"MIXED MACHINES: experts of this CPU ({scale_words(scale)}) behind links of GPUs"
    return (*["whole models"] * (scope == "model"), MODE_WORDS["emulated"], machines)


def modelled_line(facts: Iterable[ComparisonFacts]) -> str:
    """The first line of an answer whose links are modelled: what is sent and how; empty where nothing is modelled."""
    modelled = [one for one in facts if isinstance(one, TimedFacts) and one.links is not None]
    sent = dict.fromkeys(_sent_words(one) for one in modelled)
    what = "Modelled" if any(one.device is not None for one in modelled) else "Modelled links"
    if any(one.is_elsewhere for one in modelled):
        what = f"{what}, {PARTLY_ELSEWHERE}"
    how = dict.fromkeys(_SENT[one.copies] if one.exchange is None else exchange_name(one.exchange) for one in modelled)
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
        experts = f"experts of {facts.expert_rows.name.partition('/')[2]}, "
    permuted = {"fused": "fused permutation", "none": "no permutation"}.get(facts.permute.ran, "unfused permutation")
    return f"{experts}{permuted}"


def ran_on_parts(environment: Environment, facts: ComparisonFacts, *, in_short: bool = False) -> Parts:
    """The devices and how many ranks used them, without what carried the collectives; empty where nothing ran."""
    if isinstance(facts, ServedFacts):
        return (environment.device_name if facts.url is None else facts.url,)
    if not isinstance(facts, TimedFacts):
        return ()
    if facts.device is not None:
        described = modelled_device(facts.device, facts.expert_rows) if in_short else (device_words(facts),)
        return (f"{facts.world_size} ranks", *described)
    if facts.links is not None:
        return (f"{environment.device_name} in place of {facts.world_size} ranks",)
    ranks = f"{environment.device_name} x {facts.world_size} rank{'' if facts.world_size == 1 else 's'}"
    if facts.backend != "nccl":
        return (ranks, facts.backend)
    nccl = f"{facts.backend} {environment.nccl}" if environment.nccl else facts.backend
    return (ranks, nccl, *([f"driver {environment.driver}"] if environment.driver else []))


def said_once(lines: Iterable[Parts]) -> str:
    """What several lines share at either end is said once; of many the first and the last."""
    different = list(filter(None, dict.fromkeys(lines)))
    start = _shared_start(different)
    end = _shared_start([parts[len(start) :][::-1] for parts in different])[::-1]
    if len(different) > 1 and len(start) + len(end) in map(len, different):
        start, end = [], []
    own = [", ".join(parts[len(start) : len(parts) - len(end)]) for parts in different]
    if len(own) > 3:
        own[1:-1] = [f"{len(own) - 2} more"]
    return ", ".join(filter(None, [*start, " / ".join(own), *end]))


def _shared_start(lists: Sequence[Sequence[str]]) -> list[str]:
    """What all lists begin with."""
    return [first for first, *_ in itertools.takewhile(lambda same: len(set(same)) == 1, zip(*lists, strict=False))]


# ---- devices and links that are not here -----------------------------------------------------------------------------


def measured_by_words(by: MeasuredBy) -> str:
    """The package, the framework and the system (``h100_sxm`` as H100 SXM), or a user's own words."""
    if not isinstance(by, Rows):
        return by
    framework, system = _FRAMEWORKS.get(by.framework, by.framework), by.system.upper().replace("_", " ")
    return f"{by.package} {by.package_version}, {framework} {by.version} on {system}"


def device_name(device: DeviceFacts, experts: ExpertFacts | None) -> str:
    """A modelled device in a column of a table: its file, or whose experts it has."""
    return device.name if experts is None else f"experts {_elsewhere(experts)}"


def modelled_device(device: DeviceFacts, experts: ExpertFacts | None) -> Parts:
    """The same in a line of its own."""
    if experts is None:
        return (f"modelled by devices/{device.name}",)
    return device_name(device, experts), "the rest modelled"


def device_words(facts: TimedFacts) -> str:
    """Which model of a device, and which rows, made a number: to stand beside it."""
    assert facts.device is not None
    return describe_device(facts.device, facts.expert_rows, whole=facts.whole is not None, num_tokens=facts.num_tokens)


def describe_device(
    device: DeviceFacts, experts: ExpertFacts | None = None, *, whole: bool = False, num_tokens: int | None = None
) -> str:
    """The same of a layer, or of a ``whole`` model.

    Args:
        num_tokens: of all ranks; where they are beyond the rows of experts the words say so.
    """
    attention = ""
    if whole and device.attention_efficiency is not None:
        attention = (
            f"; core attention at {device.attention_efficiency:.0%} of the arithmetic ({device.attention_basis});"
            " launches not counted"
        )
    gate = f" gate at {device.gate_tflops:g} TFLOP/s ({device.gate_basis});" if device.gate_tflops else ""
    speeds = ", ".join(f"{dtype} {speed:g}" for dtype, speed in device.speeds.items())
    speeds = f" GEMMs of {speeds} times as fast ({device.speeds_basis});" if speeds else ""
    passes = " Transformer Engine's passes between GEMMs (modelled);" if device.experts_as == "te" else ""
    slow = f", {', '.join(device.slow_policies)} take longer, as on an H200" if device.slow_policies else ""
    source = "modelled by" if experts is None else f"{_expert_words(experts, num_tokens)}; the rest modelled by"
    return (
        f"{source} devices/{device.name}: roofline of {device.bf16_tflops:g} bf16 TFLOP/s,"
        f" up to {device.most_efficiency:.0%} reached ({device.arithmetic_basis}), and {device.memory_tbps:g} TB/s,"
        f" {device.memory_efficiency:.0%} reached ({device.memory_basis});"
        f" {device.overhead_us:g} us a pass ({device.overhead_basis});{speeds}{passes}{gate}"
        f" routing {device.routing_native_us:g} us and {device.routing_native_ps:g} ps a score"
        f" ({device.routing_native_basis}), by a policy {device.routing_policy_us:g} us and"
        f" {device.routing_policy_ps:g} ps ({device.routing_policy_basis}){slow}; {device.permute} permutation at"
        f" {device.permute_efficiency:.0%} of the memory's TB/s ({device.permute_basis}); {device.memory_gb:g} GB"
        f"{attention}"
    )


def shape_words(shape: Sequence[object]) -> str:
    """A layer's hidden size, expert FFN size, experts and top-k."""
    return "{} x {}, {} experts, top-{}".format(*shape)


def _elsewhere(experts: ExpertFacts) -> str:
    return f"{MEASURED_ELSEWHERE} ({measured_by_words(experts.measured_by)}, {experts.dtype})"


def _expert_words(experts: ExpertFacts, num_tokens: int | None) -> str:
    """Whose rows these are, and whether so many tokens of all ranks are beyond them."""
    beyond = f", extrapolated to {num_tokens:,}" if num_tokens and num_tokens > experts.most_tokens else ""
    shape = shape_words((experts.hidden_size, experts.ffn_hidden_size, experts.num_experts, experts.top_k))
    rows = f"{experts.num_rows} rows of {experts.fewest_tokens:,.0f} to {experts.most_tokens:,.0f} tokens{beyond}"
    return f"experts {_elsewhere(experts)}: {shape}, EP {experts.ep_size}: {rows}"


def links_parts(facts: ComparisonFacts, *, in_column: bool = False) -> Parts:
    """Links that are modelled, in a line of their own or in a column of a table; empty where none is."""
    if not isinstance(facts, TimedFacts) or facts.links is None:
        return ()
    return _links_parts(facts.links, facts.exchange, in_column=in_column)


def _links_parts(links: LinksFacts, exchange: ExchangeFacts | None, *, in_column: bool = False) -> Parts:
    """Their file and its scale, or who measured them."""
    by = links.measured_by if exchange is None else exchange.measured_by
    if by is not None:
        return (f"{MEASURED_ELSEWHERE} ({measured_by_words(by)})",)
    name, scale = f"{'' if in_column else 'modelled by links/'}{links.name}", links.bandwidth_scale
    return (name, *([] if scale == 1 else [f"bandwidth x {scale:g}"]))


def describe_links(links: LinksFacts, exchange: ExchangeFacts | None = None) -> str:
    """Which model of links, and which rows of an exchange, made a number: to stand beside it."""
    name = ", ".join(_links_parts(links, exchange))
    if exchange is not None:
        return f"{name}: {exchange_words(exchange)}; others {describe_links(links)}"
    if links.measured_by is not None:
        how = "all-to-all, all-gather and all-reduce of nccl-tests, over bytes; uneven splits by each rank's larger"
        return f"{name}: {how} direction; {links.name}"
    sides = ((f"inside a node of {links.ranks_per_node}", links.intra), ("between nodes", links.inter))
    return f"{name}: {'; '.join(f'{where} {_link_words(link)}' for where, link in sides if link is not None)}"


def _link_words(link: LinkFacts) -> str:
    curve = "" if link.num_sizes is None else f", as a curve of {link.num_sizes} sizes"
    return (
        f"{link.latency_us:.4g} us ({link.latency_basis})"
        f" + bytes at {link.bandwidth_gbps:.4g} GB/s x {link.efficiency:.3g} ({link.efficiency_basis})"
        f"{', half duplex' if link.duplex == 'half' else ''}{curve}"
    )


def exchange_name(exchange: ExchangeFacts) -> str:
    """An exchange in the first line of an answer."""
    return f"{exchange.name.partition('/')[2]}, one copy per {_COPIES[exchange.copies]}"


def exchange_words(exchange: ExchangeFacts) -> str:
    """Which rows of an exchange they are, and what becomes of them."""
    known, nodes = exchange.sms, exchange.num_nodes
    sms = f", {known[0]} to {known[-1]} SMs" if len(known) > 1 else f", {known[0]} SMs" if known else ""
    sent = f", sent as {exchange.sent_as}" if exchange.sent_as else ""
    scales = {"dispatch": exchange.dispatch_scale, "combine": exchange.combine_scale}
    scaled = "".join(f"; {phase} x {scale:.3g} by bytes (modelled)" for phase, scale in scales.items() if scale != 1)
    return (
        f"dispatch and combine of {exchange.name}, {nodes} node{'s' * (nodes > 1)}, hidden size"
        f" {exchange.hidden_size}, top-{exchange.top_k} of {exchange.num_experts}{sent}{sms}; scaled by the fullest"
        f" rank's copies of tokens, one for each {_ONE_FOR_EACH[exchange.copies]} (modelled){scaled}"
    )


# ---- what else is known ----------------------------------------------------------------------------------------------


def fit_words(fit: Fit) -> str:
    """That a model does not fit, by how much, and where it would; empty where it fits."""
    if fit.holds():
        return ""
    names = ("experts", "other weights", "cache", "rows of a layer")
    sizes = (fit.expert_bytes, fit.other_weight_bytes, fit.cache_bytes, fit.row_bytes)
    listed = ", ".join(f"{name} {size / 1e9:.3g}" for name, size in zip(names, sizes, strict=True) if size >= 5e7)
    size = fit.fitting_ep_size
    at = "it fits at no EP size" if size is None else f"the smallest EP size at which it fits is {size}"
    return (
        f"does not fit: {'' if fit.is_whole else 'at least '}{fit.num_bytes / 1e9:.3g} GB on each of "
        f"{fit.ep_size} ranks in {fit.dtype} ({listed}), {fit.device} has {fit.device_bytes / 1e9:.3g} GB; {at}"
    )


# What a candidate of ``advise`` needs, and why it is left out where that is not so.
_LACKING = {
    "decode": "no gain at prefill, where a batch activates all experts",
    "prefill": "a step of decode is too short to move weights",
    "scores": "looks past the top-k, of which the recording has no scores",
    "requests": "needs several tokens of a request in a step",
    "ranks": "replicas and moved weights need one layer on several ranks",
}


def assumption_words(assumed: Assumption) -> str:
    """What ``advise`` assumes or leaves out."""
    names = ", ".join(assumed.names)
    if assumed.kind == "no_skew":
        return "assumed: traffic without skew, as the config sets none (sweep workload.peak_load)"
    if assumed.kind == "traffics":
        _, typical, hard = assumed.peak_loads
        known = f"balanced traffic, typical (peak load {typical:g}) and hard (peak load {hard:g})"
        yours = "your server's counts of experts say which is yours (--counts, docs/servers.md)"
        whole = "with one of them (--peak-load) the answer has all candidates, reasons and where it turns"
        return f"no traffic was given: assumed: {known}, as recorded of {names}; {yours}; {whole}"
    if assumed.kind == "counted_layers":
        assert assumed.counted is not None
        return f"{assumed.counted.file}: {counted_words(assumed.counted)}"
    if assumed.kind == "asked_layers":
        assert assumed.layers is not None
        return _layers_asked_words(assumed.layers)
    if assumed.kind == "topk_share":
        equal = ", equal over the top-k, so that the mass kept only counts pairs" if assumed.scores_are_assumed else ""
        return f"assumed: top-k score mass {assumed.topk_share:g}{equal}"
    if assumed.kind == "decode_as_prompts":
        return "assumed: requests that decode route as their prompts did"
    if assumed.kind == "tokens_are_requests":
        return "assumed: tokens are requests of a step, as the recording is of decode"
    if assumed.kind == "shuffled":
        assert assumed.num_batches is not None
        needed, possible = assumed.num_batches
        plans = ", so that plans have seen tokens that they serve" if assumed.names else ""
        return f"assumed: requests repeat, as the recording has {possible} of the {needed} batches needed{plans}"
    if assumed.kind == "batches":
        assert assumed.num_batches is not None
        asked, taken = assumed.num_batches
        return f"workload.num_batches: {taken} of each draw or layer in place of {asked}, for fewer give no intervals"
    if assumed.kind == "modelled":
        assert assumed.missing is not None
        return f"{' and '.join(assumed.names)} modelled: {missing_words(assumed.missing)}"
    assert assumed.need is not None
    return f"left out: {names}: {_LACKING[assumed.need]}"


def missing_words(missing: MissingRows) -> str:
    """What tables have no rows of; an error and an answer say it alike."""
    if missing.kind == "package":
        extra = ", ".join(missing.known)
        return f"{missing.name} is not installed; expected: launch/setup.sh --with tables, or pip install '{extra}'"
    if missing.kind == "part":
        got = f"{brief(missing.name)}{did_you_mean(missing.name, missing.known)}"
        return f"expected a {missing.part} of {', '.join(missing.known) or 'none'}; got {got}"
    assert missing.shape is not None
    if missing.kind == "experts":
        what = f"measured experts of {shape_words(missing.shape)}, EP {missing.ep_size}, {missing.dtype}"
    else:
        what = f"exchange measured at {missing.stage} of hidden size {missing.shape[0]}, EP {missing.ep_size}"
    return f"{missing.name} has no {what}"


def _layers_asked_words(layers: AskedLayers) -> str:
    """How many layers stand for all, and how far all differ."""
    loads = layers.fullest_rank.items()
    several = len(loads) > 1
    all_of_them = " and ".join(
        f"{least:.2f} to {most:.2f} times the mean{several * f' at EP {ep_size}'} (median {median:.2f})"
        for ep_size, (least, median, most) in loads
    )
    which = f"{len(layers.asked)} of {layers.num_layers} layers, chosen by load"
    return f"{which} (--set workload.layer=all: all); over all layers native's fullest rank has {all_of_them}"


def counted_words(counted: CountedLayers) -> str:
    """Of how many layers a file of counts is used, and why of others not; some are not."""
    dense, missing = counted.dense, counted.missing
    whole = counted.used + len(dense) + len(missing)
    why = []
    for layers, one, several in (
        (dense, "is dense in this model", "are dense in this model"),
        (missing, "has no counts", "have no counts"),
    ):
        if layers:
            why.append(f"layer{'s' * (len(layers) > 1)} {in_ranges(layers)} {one if len(layers) == 1 else several}")
    return f"{counted.used} of {whole} layers used: {', '.join(why)}"


def rest_words(rest: Rest) -> str:
    """Whose attention is in the modelled rest of a pass; empty where that is not stated."""
    if rest.context_length:
        return f"a step after {tokens_words(rest.context_length)}"
    if rest.prompt_lengths is None:
        return ""
    least, most = rest.prompt_lengths
    return f"prompts of {f'{least:,} to ' if least < most else ''}{tokens_words(most)}"


def graph_words(facts: TimedFacts) -> str:
    """What CUDA graphs hold; empty where a layer ran eagerly."""
    if facts.cuda_graph is None:
        return ""
    return f"the whole {facts.cuda_graph}{' with its collectives' * (facts.num_ranks > 1)}"


def basis_words(skew: SkewFacts) -> str:
    """What a named skew was calibrated to."""
    tokens = "unknown" if skew.num_tokens is None else f"{skew.num_tokens:,}"
    return f"calibrated to {skew.name} ({skew.basis}: {skew.source}; tokens: {tokens})"


def peak_words(peaks: PeakLoads) -> str:
    """What of native's fullest expert is chance; empty where little is."""
    if not peaks.have_chance():
        return ""
    if peaks.traffic is None:
        return f"no skew was asked for: by chance native's fullest expert has {peaks.batches:.3g} times the mean"
    mean = f"{peaks.batches:.3g}, as chance adds to it"
    return f"peak load {peaks.traffic:.4g} holds in the long run; native's batches average {mean}"


def skew_words(layers: SkewLayers) -> str:
    """How far the layers differ that a named skew stands for."""
    least, median, greatest = layers.relief
    return (
        f"one layer stands for {layers.num_layers}: capacity factor 1 reduces their fullest ranks by factors "
        f"of {least:.2f} to {greatest:.2f} (median {median:.2f})"
    )


def spare_words(spare_by_layer: Sequence[int], model_layers: Sequence[int] = ()) -> str:
    """Which layers of a recording got how many slots of a budget.

    Args:
        model_layers: what the model calls all of them; else they are named by their rows.
    """
    numbers = sorted({*spare_by_layer} - {0}, reverse=True)
    names = list(zip(model_layers or range(len(spare_by_layer)), spare_by_layer, strict=True))
    layers = {number: [name for name, spare in names if spare == number] for number in numbers}
    noun = "layer" if model_layers else "row"
    given = "; ".join(
        f"{number} in {noun}{'s' if len(listed) > 1 else ''} {', '.join(map(str, listed))}"
        for number, listed in layers.items()
    )
    num_given = sum(map(len, layers.values()))
    total = f"{sum(spare_by_layer)} spare slots of a rank in {num_given} of {len(spare_by_layer)} recorded layers"
    return f"{total}{given and f' ({given})'}"


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


# ---- titles and workloads --------------------------------------------------------------------------------------------


def title_words(facts: Subject | JudgedFacts | ServedFacts) -> str:
    """Model, extent, sizes and traffic."""
    return ", ".join(title_parts(facts))


def title_parts(facts: Subject | JudgedFacts | ServedFacts) -> Parts:
    """The same in parts."""
    if facts.title is not None:
        return (facts.title,)
    if isinstance(facts, RoutedFacts):
        return (facts.model, tokens_words(facts.num_tokens), f"EP {facts.num_ranks}", *traffic_parts(facts.workload))
    if isinstance(facts, JudgedFacts):
        return (facts.model, f"EP {facts.num_ranks}", *_asked_parts(facts))
    if isinstance(facts, ServedFacts):
        load = f"{facts.rate:g} requests/s" if facts.concurrency is None else f"{facts.concurrency} in flight"
        return (facts.model, load, f"{facts.num_batches} rounds of {facts.requests} requests")
    workload = facts.workload
    return (
        facts.model + (f" x {facts.scale:g}" if facts.scale not in (1, None) else ""),
        *(_extent_parts(facts.whole) if facts.whole else ()),
        *sizes_parts(facts),
        *traffic_parts(workload),
        *([_layer_words(workload.layer, workload)] if workload.layer is not None and not facts.whole else []),
        *["CUDA graph"] * bool(facts.cuda_graph),
    )


def _asked_parts(facts: JudgedFacts) -> Parts:
    """The text, and how much of it at a time; or the task."""
    if facts.task is not None:
        return facts.task, "its own shots" if facts.num_fewshot is None else f"{facts.num_fewshot}-shot"
    size = f"{facts.num_sequences} sequences of {facts.sequence_length} tokens"
    return str(facts.text), size, f"{facts.batch_size} at a time"


def _extent_parts(whole: ModelExtent) -> Parts:
    """How much of a whole model, and its stage."""
    cut = f"first {whole.num_layers} of" if whole.num_layers < whole.of_layers else "all"
    stage = f"decode after {tokens_words(whole.context_length)}" if whole.context_length else "prefill"
    return f"{cut} {whole.of_layers} layers", stage


def sizes_parts(facts: Subject) -> Parts:
    """Ranks, tokens of all of them together, and those of a rank, from the least to the most."""
    if facts.sizes is not None:
        return (facts.sizes,)
    ranks, tokens = f"EP {facts.num_ranks}", tokens_words(facts.num_tokens)
    if facts.rank_tokens is None:
        return ranks, tokens
    least, most = facts.rank_tokens
    return ranks, f"{tokens} ({f'{least:,}' if least == most else f'{least:,} to {most:,}'} a rank)"


def traffic_words(workload: Workload) -> str:
    """Where tokens come from: a skew, or recordings with their stage; and the padding."""
    return ", ".join(traffic_parts(workload))


def traffic_parts(workload: Workload) -> Parts:
    """The same in parts."""
    skew, counted, peak = workload.skew, workload.counted, _peak_words(workload)
    if workload.recording is not None:
        parts = [" + ".join(source.domain for source in workload.recording.sources)]
        parts += [str(workload.stage), _tail_words(workload)]
    elif workload.is_balanced:
        parts = ["balanced loads"]
    elif (pattern := workload.targets.get("pattern") if skew is None else skew.name) is not None:
        of = f" skew of {skew.of}" if skew is not None and skew.of else ""
        parts = [pattern.replace("_", " ") + of, *filter(None, [peak])]
    elif counted is not None:
        parts = [f"loads of {_layer_words(counted.layer, workload)} of {counted.file}"]
    else:
        parts = [peak or "no skew"]
    if workload.is_one_draw:
        parts += ["experts placed at random", f"{len(workload.seeds)} draws" if workload.seeds else "one draw"]
    num_padding = (workload.padding or {}).get("per_rank")
    return (*parts, *([f"{num_padding:,} padding a rank"] if num_padding else []))


def _peak_words(workload: Workload) -> str:
    """The peak load that was asked for; empty where none was."""
    if workload.batch_peak_load is not None:
        return f"peak load {workload.batch_peak_load:g} in each batch"
    return "" if workload.peak_load is None else f"peak load {workload.peak_load:g}"


def workload_parts(facts: ComparisonFacts | JudgedFacts | ServedFacts) -> Parts:
    """Where tokens and scores come from; a model of the tail is named, for it shapes what is measured."""
    if not isinstance(facts, ComparisonFacts):
        return ()
    workload, is_routed = facts.workload, isinstance(facts, RoutedFacts)
    first, *parts = _workload_parts(facts, is_named=not is_routed)
    if not is_routed:
        first = f"{workload.kind} workload: {first}"
        parts += [f"tail model: {workload.tail_model}"] * (workload.kind == "recorded" and bool(workload.tail_model))
    if facts.routing_checksum is not None:
        parts.append(f"routing checksum {facts.routing_checksum}")
    if facts.load_overlap is not None:
        parts.append(f"neighbouring batches share {facts.load_overlap:.0%} of their loads")
    return (first, *parts)


def describe_workload(facts: Subject) -> str:
    """The batches in one line: what they were drawn from, targets, sizes and the seed."""
    return ", ".join(_workload_parts(facts))


def _workload_parts(facts: Subject, *, is_named: bool = False) -> Parts:
    """The same in parts.

    Args:
        is_named: the workload's kind stands ahead of it.
    """
    workload = facts.workload
    if workload.description is not None:  # of an older version, which begins with the kind
        return (workload.description.removeprefix(f"{workload.kind} ") if is_named else workload.description,)
    if workload.recording is not None:
        return _recorded_parts(workload, workload.recording)
    counted, skew = workload.counted, workload.skew
    drawn = "softmax scores" if is_named else "synthetic softmax scores"
    source = []
    if counted is not None:
        few = f" ({counted_words(counted)})" if counted.dense or counted.missing else ""
        of = f"loads of {_layer_words(counted.layer, workload)} counted in {counted.file}{few}"
        source = ["synthetic", f"{of}; synthetic softmax scores"]
    elif skew is not None:
        source = ["synthetic", f"{basis_words(skew)}; synthetic softmax scores"]
    return (
        *(source or [drawn]),
        *(list(_target_words(workload)) or ["no skew asked for"]),
        f"{facts.num_experts} experts",
        f"top-{facts.top_k}",
        f"{workload.num_batches} x {workload.num_tokens} tokens in sequences of {workload.sequence_length}",
        _seed_words(workload),
    )


def _target_words(workload: Workload) -> Iterator[str]:
    """What a synthetic workload was solved to."""
    targets = workload.targets
    loads, motion = targets.get("rank_load") or {}, targets.get("motion") or {}
    said = {
        "pattern": targets.get("pattern"),
        "balanced": "loads" if workload.is_balanced else None,
        "peak load": None if workload.is_balanced else targets.get("peak_load"),
        "batch peak load": None if workload.is_balanced else targets.get("batch_peak_load"),
        "experts' loads": None if targets.get("expert_loads") is None else "as counted",
        "rank load": next((f"{load:g} on {ranks} ranks" for ranks, load in loads.items()), None),
        **{f"dropped at factor {factor}": f"{cut[0]:.1%}" for factor, cut in (targets.get("cuts") or {}).items()},
        "motion": next((f"{kind} of {number:g} batches" for kind, number in motion.items()), None),
        "top-k share": targets.get("topk_share"),
        "neighbour overlap": targets.get("neighbour_overlap"),
    }
    for name, value in said.items():
        if value is not None:
            yield f"{name} {value}"


def _recorded_parts(workload: Workload, recording: Recording) -> Parts:
    sources = recording.sources
    if workload.tokens_per_request is not None:
        requests, tokens = (workload.num_tokens or 0) // workload.tokens_per_request, workload.tokens_per_request
        size = f"decoding steps of {requests} requests x {tokens} token{'s' * (tokens > 1)}"
    else:
        recorded = sum(source.num_tokens for source in sources)
        size = f"x {workload.num_tokens} tokens in whole sequences of {recorded} recorded tokens"
    origins = dict.fromkeys(f"{source.stage} by {source.source} ({source.licence})" for source in sources)
    ahead = f" after {workload.num_history} batches that plans know" if workload.num_history else ""
    return (
        recording.model,
        _layer_words(workload.layer, workload),
        *["scores assumed"] * workload.scores_assumed,
        " + ".join(source.domain for source in sources),
        f"recorded in {' and '.join(origins)}",
        f"{workload.num_batches} {size}",
        *[f"in order of arrival{ahead}"] * (workload.order == "arrival"),
        _tail_words(workload),
        _seed_words(workload),
    )


def _tail_words(workload: Workload) -> str:
    return f"{workload.tail_model} tail" if workload.tail_model else "all scores recorded"


def _layer_words(layer: int | None, workload: Workload) -> str:
    """Which layers, as the model counts them where that is known; then also which rows of a recording these are."""
    rows, layers = workload.layers, workload.model_layers
    if len(rows) > 1:
        named = layers or rows
        recorded = f" (recorded rows {min(rows)} to {max(rows)})" if layers else ""
        return f"{len(rows)} layers from {min(named)} to {max(named)}{recorded}"
    return f"layer {layers[0]} (recorded row {layer})" if layers else f"layer {layer}"


def _seed_words(workload: Workload) -> str:
    seeds = workload.seeds
    return f"{len(seeds)} seeds from {min(seeds)} to {max(seeds)}" if len(seeds) > 1 else f"seed {workload.seed}"
