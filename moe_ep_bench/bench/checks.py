"""Refuse what a config asks for and a backend or a subject cannot do: each check raises one line naming key and value.

Shapes: B = batches, R = ranks.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from moe_ep_bench.config import Experiment, SyntheticConfig
from moe_ep_bench.cost_model.devices import VALUE_BYTES
from moe_ep_bench.cost_model.links import Links
from moe_ep_bench.layer.expert_placement import ExpertPlacement
from moe_ep_bench.models import ModelSpec

# Of a row, in bytes: what grouped_mm wants.
_GEMM_ALIGNMENT = 16


def check_scope(experiment: Experiment) -> None:
    """Refuse a whole model for a command that routes layers."""
    if experiment.scope != "layer":
        raise ValueError(f"scope: expected layer for this command, got {experiment.scope}")


def check_ranks(experiment: Experiment, world_size: int, ep_size: int) -> None:
    """Refuse experts, slices or tokens that cannot be divided among the ranks."""
    model, num_slices = experiment.model.spec(), experiment.layer.expert_tensor_parallel
    check_slices(experiment, world_size)
    if world_size % (ep_size * num_slices):
        groups = "" if num_slices == 1 else f" over layer.expert_tensor_parallel: {num_slices}"
        raise ValueError(f"layer.ep_size: expected a divisor of the {world_size} ranks{groups}, got {ep_size}")
    if model.num_experts % ep_size:
        raise ValueError(
            f"layer.ep_size: expected a divisor of the {model.num_experts} experts of {model.name}, got {ep_size}"
            + ("" if experiment.layer.ep_size else " (all ranks)")
        )
    shares = experiment.workload.rank_shares
    if shares is not None and not any(shares[rank % len(shares)] for rank in range(world_size)):
        raise ValueError(f"workload.rank_shares: expected one above 0 among the {world_size} ranks, got {list(shares)}")


def check_slices(experiment: Experiment, world_size: int) -> None:
    """Refuse slices of experts that the ranks, the model or the GEMM cannot have."""
    num_slices, model = experiment.layer.expert_tensor_parallel, experiment.model.spec()
    key = f"layer.expert_tensor_parallel: expected {{}}, got {num_slices}"
    if num_slices == 1:
        return
    if model.tensor_parallel > 1:
        raise ValueError(key.format(f"1 with model.tensor_parallel: {model.tensor_parallel}"))
    if world_size % num_slices:
        raise ValueError(key.format(f"a divisor of the {world_size} ranks"))
    if model.ffn_hidden_size % num_slices:
        raise ValueError(key.format(f"a divisor of the ffn_hidden_size {model.ffn_hidden_size} of {model.name}"))
    values = model.ffn_hidden_size // num_slices
    if experiment.layer.experts != "sequential" and values * VALUE_BYTES[experiment.layer.dtype] % _GEMM_ALIGNMENT:
        raise ValueError(
            key.format(f"slices of a multiple of {_GEMM_ALIGNMENT} bytes (or layer.experts: sequential)")
            + f", which are {values} values of {experiment.layer.dtype}"
        )


def check_whole_experts(experiment: Experiment, command: str) -> None:
    """Refuse slices of experts for a command that lays out whole experts."""
    num_slices = experiment.layer.expert_tensor_parallel
    if num_slices > 1:
        raise ValueError(f"layer.expert_tensor_parallel: expected 1, for {command} whole experts; got {num_slices}")


def check_baseline(experiment: Experiment, ep_size: int) -> None:
    """Refuse models that Megatron-Core's router, the baseline, would route in another way, and flex on one rank."""
    model = experiment.model.spec()
    if experiment.layer.dispatcher == "flex" and ep_size == 1:
        raise ValueError("layer.dispatcher: flex needs several ranks in layer.ep_size; expected alltoall on one")
    if model.selection_bias and model.score_function != "sigmoid":
        raise ValueError(f"model: {model.name}: a selection bias needs sigmoid scores in Megatron-Core, got softmax")
    if model.score_function == "sigmoid" and not model.normalize and model.top_k > 1:
        raise ValueError(f"model: {model.name}: Megatron-Core always normalises sigmoid weights; got normalize false")
    if model.num_groups is not None and model.score_function == "softmax" and model.normalize:
        raise ValueError(
            f"model: {model.name}: Megatron-Core compares groups by logits where softmax weights are normalised; "
            "expected normalize false or no groups"
        )


def check_padding(padding: int, tokens_BR: NDArray[np.int64]) -> None:
    """Refuse padding that leaves a rank with tokens no valid one, in any batch."""
    for batch, rank in np.argwhere((tokens_BR > 0) & (tokens_BR <= padding)):
        raise ValueError(
            f"workload.padding_per_rank: expected less than the {tokens_BR[batch, rank]} tokens that rank {rank} has"
            f" in batch {batch}, got {padding}"
        )


def check_gathering(tokens_BR: NDArray[np.int64]) -> None:
    """Refuse unequal numbers of tokens on ranks, which the allgather dispatcher cannot have."""
    for number, tokens_R in enumerate(tokens_BR):
        if min(tokens_R) < max(tokens_R):
            raise ValueError(
                f"layer.dispatcher: allgather needs as many tokens on every rank; batch {number} deals"
                f" {min(tokens_R)} to {max(tokens_R)}: expected alltoall, or other workload.num_tokens"
            )


# ---- virtual ranks ---------------------------------------------------------------------------------------------------


def check_emulated(experiment: Experiment) -> None:
    """Refuse what only real ranks do, and a config without links."""
    if experiment.emulate.links is None:
        raise ValueError(
            f"emulate.links: expected one of {', '.join(Links.names())}, or a path to such a file; got none"
        )
    if experiment.measure.launches != 1:
        raise ValueError(f"measure.launches: emulate makes one launch; expected 1, got {experiment.measure.launches}")
    if experiment.layer.cuda_graph:
        raise ValueError("layer.cuda_graph: true is for run; expected false, for emulate runs eagerly")
    if experiment.layer.dispatcher != "alltoall":
        raise ValueError(
            "layer.dispatcher: emulate stands in for the all-to-all; expected alltoall,"
            f" got {experiment.layer.dispatcher}"
        )


def check_placed(experiment: Experiment, slots: ExpertPlacement) -> None:
    """Refuse more spare experts than the model has others; of a whole model replicas, placements and chunks."""
    if experiment.scope == "model":
        _check_placed_model(experiment, slots)
        return
    num_experts = experiment.model.spec().num_experts
    most = num_experts - num_experts // slots.num_ranks
    for wanted in experiment.emulate.replication:
        if wanted.spare_per_rank > most:
            raise ValueError(
                f"emulate.replication: spare_per_rank: expected at most {most}, with which every rank holds all"
                f" {num_experts} experts; got {wanted.spare_per_rank}"
            )


def _check_placed_model(experiment: Experiment, slots: ExpertPlacement) -> None:
    if experiment.emulate.replication:
        raise ValueError("emulate.replication: expected none with scope model, where experts are not replicated")
    if not slots.is_contiguous:
        raise ValueError("route.placement: expected contiguous with scope model")
    if experiment.emulate.chunk_tokens is not None:
        raise ValueError(
            "emulate.chunk_tokens: expected null with scope model, where a pass is run whole;"
            f" got {experiment.emulate.chunk_tokens}"
        )


# ---- routing ---------------------------------------------------------------------------------------------------------


def check_layer_weights(experiment: Experiment, num_layers: int) -> None:
    """Refuse layer weights of another number than there are layers."""
    weights = experiment.route.layer_weights
    if weights is not None and (len(weights) != num_layers or not any(weights)):
        raise ValueError(
            f"route.layer_weights: expected {num_layers} numbers (layers), some above 0, got {list(weights)}"
        )


# ---- whole models ----------------------------------------------------------------------------------------------------


def check_model(model: ModelSpec, experiment: Experiment) -> None:
    """Refuse a model that is not stated as a whole, or cannot be built so."""
    for what, value in (
        ("attention", model.attention),
        ("vocab_size", model.vocab_size),
        ("dense_ffn_hidden_size", model.dense_ffn_hidden_size or model.first_dense_layers == 0),
    ):
        if not value:
            raise ValueError(f"model: {model.name}: scope model needs its {what}, which is not stated")
    if model.tensor_parallel > 1:
        raise ValueError(f"model.tensor_parallel: expected 1 with scope model, got {model.tensor_parallel}")
    if experiment.layer.cuda_graph and not experiment.whole.context_length:
        raise ValueError(
            "layer.cuda_graph: true with scope model needs whole.context_length of at least 1: decode steps are "
            "replayed, prompts are not; got 0"
        )
    fewest, built = model.first_dense_layers + 1, experiment.whole.num_layers
    if built is not None and not fewest <= built <= model.num_layers:
        raise ValueError(
            f"whole.num_layers: expected {fewest} to {model.num_layers} layers of {model.name}, so that one is an MoE "
            f"layer; got {built}"
        )


def check_batches(experiment: Experiment) -> None:
    """Refuse batches that are neither prompts nor one token of each request."""
    config, context = experiment.workload, experiment.whole.context_length
    if config.padding_per_rank:
        raise ValueError(f"workload.padding_per_rank: expected 0 with scope model, got {config.padding_per_rank}")
    if isinstance(config, SyntheticConfig):
        key, per_request = "workload.sequence_length", config.sequence_length
        decodes = per_request == 1
    else:
        key, per_request = "workload.tokens_per_request", config.tokens_per_request
        decodes = config.arrangement == "decode" and per_request == 1
        if config.arrangement == "decode" and per_request > 1:
            raise ValueError(f"{key}: expected 1 with scope model, got {per_request}")
    if context and not decodes:
        wanted = "1" if isinstance(config, SyntheticConfig) else "1 and workload.arrangement: decode"
        raise ValueError(
            f"{key}: expected {wanted}, for whole.context_length={context} makes a batch one decode step; "
            f"got {per_request}"
        )
    if decodes and not context:
        raise ValueError(
            "whole.context_length: expected at least 1, for a batch of one token per request decodes; got 0"
        )


def check_dealing(tokens_BR: NDArray[np.int64]) -> None:
    """Refuse batches that leave a rank without tokens: its attention has nothing to do."""
    for number, tokens_R in enumerate(tokens_BR):
        if min(tokens_R) == 0:
            raise ValueError(
                f"workload: expected tokens for every rank, but batch {number} has none for rank "
                f"{int(np.argmin(tokens_R))}: expected more sequences, or rank_shares above 0"
            )


def check_whole_recording(model: ModelSpec, num_moe: int, num_recorded: int) -> None:
    """Refuse a recording with fewer layers than MoE layers are built."""
    if num_recorded < num_moe:
        raise ValueError(
            f"workload.trace: expected the {num_moe} MoE layers that are built of {model.name}, got "
            f"{num_recorded}; whole.num_layers builds fewer"
        )
