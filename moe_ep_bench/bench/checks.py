"""Refuse what a config asks for and a backend cannot do: one line that names key, value and what is allowed.

Checks are made in turn, so that one may take for granted what those before it found.

Shapes: B = batches, R = ranks.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moe_ep_bench.config import MEASURED, TWO_BATCH, Experiment, SyntheticConfig
from moe_ep_bench.cost_model.devices import FP8_BLOCK, RUN_DTYPES
from moe_ep_bench.cost_model.links import Links
from moe_ep_bench.errors import UserError
from moe_ep_bench.machine.provenance import version_of
from moe_ep_bench.models import ModelSpec

RANKS, VIRTUAL, MODELLED, ROUTING = "ranks", "virtual", "modelled", "routing"


def refuse(is_wrong: object, key: str, expected: object, got: object) -> None:
    """Raise UserError where a key's value is wrong."""
    if is_wrong:
        raise UserError(f"expected {expected}, got {got}", key)


def check_experiment(experiment: Experiment, backend: str, world_size: int) -> None:
    """All that an experiment's own values show: nothing of a batch, a link or a device is made or read."""
    layer, model = experiment.layer, experiment.model.spec()
    is_emulated, ep_size = backend in (VIRTUAL, MODELLED), layer.ep_size or world_size
    if backend == ROUTING:
        refuse(experiment.scope != "layer", "scope", "layer for this command", experiment.scope)
    if not is_emulated:
        context = 0 if experiment.scope == "model" else experiment.whole.context_length
        refuse(context, "whole.context_length", "0 with scope layer, but for emulate", context)
    if is_emulated:
        _check_emulated(experiment)
    hint = "--nproc starts more; the command emulate lays out any number on one device"
    refuse(world_size % ep_size, "layer.ep_size", f"a divisor of the {world_size} ranks", f"{ep_size}; {hint}")
    divisor = f"a divisor of the {model.num_experts} experts of {model.name}"
    refuse(model.num_experts % ep_size, "layer.ep_size", divisor, f"{ep_size}{'' if layer.ep_size else ' (all ranks)'}")
    runs_here = backend == RANKS or (is_emulated and experiment.emulate.device == MEASURED)
    allowed = f"{' or '.join(RUN_DTYPES)} where nothing stands for the device; others with emulate.device"
    refuse(runs_here and layer.dtype not in RUN_DTYPES, "layer.dtype", allowed, layer.dtype)
    if runs_here and layer.dtype == "fp8_block":
        _check_fp8(model, experiment.scope)
    sent = "null with real ranks, which send hidden states as they are"
    refuse(backend == RANKS and layer.dispatch_dtype, "layer.dispatch_dtype", sent, layer.dispatch_dtype)
    gated = "gated experts where layers run; plain ones are modelled (emulate.device)"
    refuse(runs_here and model.activation == "plain", "model", gated, f"the plain ones of {model.name}")
    own_width = "routed experts as wide as the layer, if layers run; others are modelled (emulate.device)"
    refuse(runs_here and model.latent_size is not None, "model", own_width, f"those of {model.name}")
    rooted, version = model.score_function == "sqrtsoftplus", version_of("megatron-core") or "0"
    newer = "softmax or sigmoid scores where layers run before Megatron-Core 0.18; others are modelled (emulate.device)"
    lacks = runs_here and rooted and tuple(map(int, version.split(".")[:2])) < (0, 18)
    refuse(lacks, "model", newer, f"sqrtsoftplus of {model.name} and Megatron-Core {version}")
    if backend != ROUTING:
        _check_baseline(experiment)
    if backend != RANKS:
        _check_replicas(experiment, backend, ep_size)
    if experiment.scope == "model":
        check_whole_model(model, experiment)
        _check_whole_batches(experiment)


def _check_fp8(model: ModelSpec, scope: str) -> None:
    """What no layer in blocks of FP8 can be built of."""
    rest = "float32 or bfloat16 with scope model, whose attention and dense layers have no FP8 here"
    refuse(scope == "model", "layer.dtype", rest, "fp8_block")
    sizes = model.hidden_size, model.ffn_hidden_size
    whole = f"float32 or bfloat16 where hidden and FFN size are no multiples of {FP8_BLOCK}, the blocks of FP8"
    cut = any(size % FP8_BLOCK for size in sizes)
    refuse(cut, "layer.dtype", whole, f"fp8_block, and sizes {sizes[0]} and {sizes[1]} of {model.name}")


def _check_emulated(experiment: Experiment) -> None:
    """What only real ranks do, and a config without links."""
    layer, launches = experiment.layer, experiment.measure.launches
    known = f"one of {', '.join(Links.names())}, or a path to such a file (calibrate)"
    refuse(experiment.emulate.links is None, "emulate.links", known, "none")
    refuse(launches != 1, "measure.launches", "1, for emulate makes one launch", launches)
    refuse(layer.cuda_graph, "layer.cuda_graph", "false, for emulate runs eagerly", "true")
    overlap, is_measured = experiment.emulate.overlap, experiment.emulate.device == MEASURED
    _check_sample(experiment)
    halves = "none or shared where layers are measured, for halves of a batch are modelled (emulate.device)"
    refuse(overlap == TWO_BATCH and is_measured, "emulate.overlap", halves, overlap)
    stands_in = "any but decode, because emulate models an all-to-all"
    gathers = layer.experts == "decode" and experiment.emulate.device == MEASURED
    refuse(gathers, "layer.experts", stands_in, "decode, to which all tokens are gathered")


def _check_baseline(experiment: Experiment) -> None:
    """Models that Megatron-Core's router, the baseline, would route in another way."""
    model = experiment.model.spec()
    is_softmax, name = model.score_function == "softmax", f"model: {model.name}"
    biased = "sigmoid scores with a selection bias, as Megatron-Core has it"
    refuse(model.selection_bias and is_softmax, name, biased, "softmax")
    unnormalised = not is_softmax and not model.normalize and model.top_k > 1
    refuse(unnormalised, name, "sigmoid weights to be normalised, as Megatron-Core always does", "normalize false")
    by_logits = "normalize false or no groups, for Megatron-Core compares groups by logits where weights are normalised"
    is_grouped = model.num_groups is not None and is_softmax and model.normalize
    refuse(is_grouped, name, by_logits, f"{model.num_groups} groups")


def _check_replicas(experiment: Experiment, backend: str, ep_size: int) -> None:
    """More spare experts than the model has others; replicas of a whole model, or of layers that run."""
    model, emulate = experiment.model.spec(), experiment.emulate
    num_experts, fills = model.num_experts, any(one.name == "waterfill" for one in emulate.rebalance)
    lacks = f"no waterfill, for {model.name} has no shared experts"
    refuse(fills and not model.shared_ffn_hidden_size, "emulate.rebalance", lacks, "some")
    most = num_experts - num_experts // ep_size
    for key in ("replication", "rebalance"):
        wanted = getattr(emulate, key)
        refuse(wanted and experiment.scope == "model", f"emulate.{key}", "none with scope model", "some")
        for one, name in itertools.product(wanted, ("spare_per_rank", "spare_budget")):
            held = f"at most {most}, with which every rank holds all {num_experts} experts"
            spare = getattr(one, name, None)
            refuse(spare and spare > most, f"emulate.{key}: {name}", held, spare)
        is_measured = backend != ROUTING and emulate.device == MEASURED
        refuse(wanted and is_measured, "emulate.device", f"a modelled one beside emulate.{key}", MEASURED)


def check_whole_model(model: ModelSpec, experiment: Experiment) -> None:
    """A model that is not stated as a whole, or cannot be built so."""
    name, whole = f"model: {model.name}", experiment.whole
    dense = model.dense_ffn_hidden_size or model.num_moe_layers == model.num_layers
    stated: dict[str, Any] = {"attention": model.attention, "vocab_size": model.vocab_size}
    for what, value in {**stated, "dense_ffn_hidden_size": dense}.items():
        refuse(not value, name, f"its {what} with scope model", "none")
    refuse(model.tensor_parallel > 1, "model.tensor_parallel", "1 with scope model", model.tensor_parallel)
    graph = experiment.layer.cuda_graph and not whole.context_length
    refuse(graph, "layer.cuda_graph", "whole.context_length of at least 1: decode steps are replayed, no prompts", 0)
    fewest, built = model.moe_layers[0] + 1, whole.num_layers
    depth = f"{fewest} to {model.num_layers} layers of {model.name}, so that one is an MoE layer"
    refuse(built is not None and not fewest <= built <= model.num_layers, "whole.num_layers", depth, built)


def _check_whole_batches(experiment: Experiment) -> None:
    """Batches of a whole model that are neither prompts nor one token of each request."""
    config, context = experiment.workload, experiment.whole.context_length
    refuse(config.padding_per_rank, "workload.padding_per_rank", "0 with scope model", config.padding_per_rank)
    if isinstance(config, SyntheticConfig):
        key, per_request, single = "workload.sequence_length", config.sequence_length, "1"
    else:
        key, per_request = "workload.tokens_per_request", config.tokens_per_request
        single = "1 and workload.arrangement: decode"
        refuse(config.is_step and per_request > 1, key, "1 with scope model", per_request)
    step = f"{single}, for whole.context_length={context} makes a batch one decode step"
    refuse(context and not config.is_step, key, step, per_request)
    least = "at least 1, where a batch is one token per request"
    refuse(config.is_step and not context, "whole.context_length", least, 0)


def _check_sample(experiment: Experiment) -> None:
    """Tokens that stand for others: nothing is computed of them, and they are drawn alike."""
    sample, workload = experiment.emulate.sample_tokens, experiment.workload
    if sample is not None:
        key = "emulate.sample_tokens"
        refuse(experiment.emulate.device == MEASURED, key, "null where layers are measured (emulate.device)", sample)
        refuse(experiment.scope != "layer", key, "null with scope model", sample)
        refuse(not isinstance(workload, SyntheticConfig), key, "null with recorded tokens, which are not alike", sample)
        own = workload.tokens_of_ranks is not None or workload.padding_per_rank
        refuse(own, key, "null where ranks have tokens or padding of their own", sample)
    sources, num_ranks = experiment.emulate.sample_ranks, experiment.virtual_ranks
    if sources is not None:
        refuse(sample is None, "emulate.sample_ranks", "null without emulate.sample_tokens", sources)
        refuse(num_ranks % sources, "emulate.sample_ranks", f"a divisor of the {num_ranks} ranks", sources)


def check_batches(experiment: Experiment, ep_size: int, num_layers: int | None, tokens_BR: NDArray[np.int64]) -> None:
    """What opened workloads show: of which layers scores are, and how tokens are dealt.

    Args:
        num_layers: MoE layers among which a layer's place is known; None = it is not.
    """
    for policy in experiment.make_policies():
        for field, of_layers in policy.layered.items():
            key, got = f"policies: {policy.name}.{field}", f"values for {of_layers}"
            single = "one value, for synthetic scores are of no layer (scope: model has all"
            single += "; layer chooses one)" if "layer" in policy.params() else ")"
            refuse(num_layers is None, key, single, got)
            refuse(of_layers != num_layers, key, f"values for the {num_layers} MoE layers", got)
    for number, one in enumerate(experiment.emulate.replication):
        if one.spare_budget is not None and num_layers is not None:
            least = f"at least 1 / {num_layers}, a slot for one of the recorded layers"
            key = f"emulate.replication.{number}.spare_budget"
            refuse(one.spare_budget * num_layers < 1 - 1e-9, key, least, one.spare_budget)
    for batch, rank in np.argwhere(tokens_BR == 0) if experiment.scope == "model" else ():
        # A rank's attention has nothing to do.
        refuse(True, "workload", "more tokens, so that every rank has some", f"none for rank {rank} in batch {batch}")
    _check_dealing(experiment, ep_size, tokens_BR)


def _check_dealing(experiment: Experiment, ep_size: int, tokens_BR: NDArray[np.int64]) -> None:
    """Padding that leaves a rank with tokens no valid one; unequal ranks that are gathered, which they cannot be."""
    num_padding = experiment.workload.padding_per_rank
    for batch, rank in np.argwhere((tokens_BR > 0) & (tokens_BR <= num_padding)):
        most = f"less than the {tokens_BR[batch, rank]} tokens that rank {rank} has in batch {batch}"
        refuse(True, "workload.padding_per_rank", most, num_padding)
    if (experiment.layer.experts == "decode" or experiment.layer.cuda_graph) and ep_size > 1:
        for number, (least, most) in enumerate(zip(tokens_BR.min(axis=1), tokens_BR.max(axis=1), strict=True)):
            got = f"{least} to {most} tokens of batch {number} on a rank, which layer.experts: decode gathers"
            refuse(least < most, "workload.num_tokens", "as many for every rank", got)
