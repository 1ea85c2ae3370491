"""Refuse what a config asks for and a backend or a subject cannot do: one line that names key and value.

Shapes: B = batches, R = ranks.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from moe_ep_bench.config import Experiment, SyntheticConfig
from moe_ep_bench.cost_model.devices import RUN_DTYPES
from moe_ep_bench.cost_model.links import Links
from moe_ep_bench.errors import UserError
from moe_ep_bench.files import free_memory_bytes
from moe_ep_bench.layer.expert_placement import ExpertPlacement
from moe_ep_bench.models import ModelSpec

MOST_EXPERTS, MOST_BATCHES = 2**16, 2**20


def _refuse(is_wrong: object, key: str, expected: str, got: object) -> None:
    if is_wrong:
        raise UserError(f"{key}: expected {expected}, got {got}")


def check_size(experiment: Experiment, world_size: int) -> None:
    """Refuse sizes that no machine holds before anything of them is made; memory for the rest is found later."""
    workload, num_experts = experiment.workload, experiment.model.spec().num_experts
    key = "num_tokens" if workload.num_tokens is not None else "tokens_per_rank"
    _refuse(num_experts > MOST_EXPERTS, "model", f"at most {MOST_EXPERTS:,} experts", f"{num_experts:,}")
    _refuse(
        workload.num_batches > MOST_BATCHES, "workload.num_batches", f"at most {MOST_BATCHES:,}", workload.num_batches
    )
    most = free_memory_bytes() // (4 * num_experts)  # float32 scores of one batch
    tokens = workload.total_tokens(experiment.layer.ep_size or world_size)
    _refuse(
        tokens > most, f"workload.{key}", f"a batch of at most {most:,} tokens, whose scores fit free memory", tokens
    )


def check_ranks(experiment: Experiment, world_size: int, ep_size: int) -> None:
    """Refuse experts or tokens that cannot be divided among the ranks."""
    model = experiment.model.spec()
    hint = "--nproc starts more; the command emulate lays out any number on one device"
    _refuse(world_size % ep_size, "layer.ep_size", f"a divisor of the {world_size} ranks", f"{ep_size}; {hint}")
    got = f"{ep_size}{'' if experiment.layer.ep_size else ' (all ranks)'}"
    divisor = f"a divisor of the {model.num_experts} experts of {model.name}"
    _refuse(model.num_experts % ep_size, "layer.ep_size", divisor, got)
    shares = list(experiment.workload.rank_shares or (1.0,))
    empty = not any(shares[rank % len(shares)] for rank in range(world_size))
    _refuse(empty, "workload.rank_shares", f"one above 0 among the {world_size} ranks", shares)


def check_context(experiment: Experiment) -> None:
    """Refuse a context where one layer is measured or routed, which has no cache."""
    context = 0 if experiment.scope == "model" else experiment.whole.context_length
    _refuse(context, "whole.context_length", "0 with scope layer, but for emulate", context)


def check_baseline(experiment: Experiment, ep_size: int) -> None:
    """Refuse models that Megatron-Core's router, the baseline, would route in another way, and flex on one rank."""
    model = experiment.model.spec()
    is_softmax, name = model.score_function == "softmax", f"model: {model.name}"
    alone = experiment.layer.dispatcher == "flex" and ep_size == 1
    _refuse(alone, "layer.dispatcher", "alltoall on one rank in layer.ep_size", "flex")
    biased = model.selection_bias and is_softmax
    _refuse(biased, name, "sigmoid scores with a selection bias, as Megatron-Core has it", "softmax")
    unnormalised = not is_softmax and not model.normalize and model.top_k > 1
    _refuse(unnormalised, name, "sigmoid weights to be normalised, as Megatron-Core always does", "normalize false")
    grouped = model.num_groups is not None and is_softmax and model.normalize
    expected = "normalize false or no groups, for Megatron-Core compares groups by logits where weights are normalised"
    _refuse(grouped, name, expected, f"{model.num_groups} groups")


def check_dtype(experiment: Experiment) -> None:
    """Refuse values of fewer bits where a layer is run: only tables have their times."""
    dtype = experiment.layer.dtype
    allowed = f"{' or '.join(RUN_DTYPES)} where nothing stands for the device; others with emulate.device: table:..."
    _refuse(dtype not in RUN_DTYPES, "layer.dtype", allowed, dtype)


def check_padding(padding: int, tokens_BR: NDArray[np.int64]) -> None:
    """Refuse padding that leaves a rank with tokens no valid one, in any batch."""
    for batch, rank in np.argwhere((tokens_BR > 0) & (tokens_BR <= padding)):
        expected = f"less than the {tokens_BR[batch, rank]} tokens that rank {rank} has in batch {batch}"
        _refuse(True, "workload.padding_per_rank", expected, padding)


def check_gathering(tokens_BR: NDArray[np.int64]) -> None:
    """Refuse unequal numbers of tokens on ranks, which the allgather dispatcher cannot have."""
    for number, tokens_R in enumerate(tokens_BR):
        least, most = min(tokens_R), max(tokens_R)
        got = f"allgather, where batch {number} deals {least} to {most} tokens to a rank"
        _refuse(least < most, "layer.dispatcher", "alltoall, or other workload.num_tokens", got)


def check_emulated(experiment: Experiment) -> None:
    """Refuse what only real ranks do, and a config without links."""
    launches, dispatcher = experiment.measure.launches, experiment.layer.dispatcher
    known = f"one of {', '.join(Links.names())}, or a path to such a file"
    _refuse(experiment.emulate.links is None, "emulate.links", known, "none")
    _refuse(launches != 1, "measure.launches", "1, for emulate makes one launch", launches)
    _refuse(experiment.layer.cuda_graph, "layer.cuda_graph", "false, for emulate runs eagerly", "true")
    stands_in = "alltoall, for emulate stands in for the all-to-all"
    _refuse(dispatcher != "alltoall", "layer.dispatcher", stands_in, dispatcher)


def check_placed(experiment: Experiment, slots: ExpertPlacement) -> None:
    """Refuse more spare experts than the model has others; of a whole model replicas."""
    asked, num_experts = experiment.emulate, experiment.model.spec().num_experts
    if experiment.scope == "model":
        _refuse(asked.replication, "emulate.replication", "none with scope model", "some")
    most = num_experts - num_experts // slots.num_ranks
    expected = f"at most {most}, with which every rank holds all {num_experts} experts"
    for spare in (wanted.spare_per_rank for wanted in asked.replication):
        _refuse(spare > most, "emulate.replication: spare_per_rank", expected, spare)


def check_layers(experiment: Experiment, num_layers: int | None) -> None:
    """Refuse policies by layer where the layer's place is unknown, or of another number of layers."""
    for policy in experiment.make_policies():
        for field, values in policy.by_layer.items():
            key, got = f"policies: {policy.name}.{field}", f"values for {len(values)}"
            _refuse(
                num_layers is None, key, "one value, for synthetic scores are of no layer (scope: model has all)", got
            )
            _refuse(len(values) != num_layers, key, f"values for the {num_layers} MoE layers", got)


# ---- whole models ----------------------------------------------------------------------------------------------------


def check_model(model: ModelSpec, experiment: Experiment) -> None:
    """Refuse a model that is not stated as a whole, or cannot be built so."""
    dense = model.dense_ffn_hidden_size or model.first_dense_layers == 0
    stated = {"attention": model.attention, "vocab_size": model.vocab_size, "dense_ffn_hidden_size": dense}
    for what, value in stated.items():
        _refuse(not value, f"model: {model.name}", f"its {what} with scope model", "none")
    _refuse(model.tensor_parallel > 1, "model.tensor_parallel", "1 with scope model", model.tensor_parallel)
    graph = experiment.layer.cuda_graph and not experiment.whole.context_length
    _refuse(graph, "layer.cuda_graph", "whole.context_length of at least 1: decode steps are replayed, no prompts", 0)
    fewest, built = model.first_dense_layers + 1, experiment.whole.num_layers
    wrong = built is not None and not fewest <= built <= model.num_layers
    expected = f"{fewest} to {model.num_layers} layers of {model.name}, so that one is an MoE layer"
    _refuse(wrong, "whole.num_layers", expected, built)


def check_batches(experiment: Experiment) -> None:
    """Refuse batches of a whole model that are neither prompts nor one token of each request."""
    config, context = experiment.workload, experiment.whole.context_length
    padding = config.padding_per_rank
    _refuse(padding, "workload.padding_per_rank", "0 with scope model", padding)
    if isinstance(config, SyntheticConfig):
        key, per_request, one = "workload.sequence_length", config.sequence_length, "1"
        steps = per_request == 1
    else:
        key, per_request = "workload.tokens_per_request", config.tokens_per_request
        one, steps = "1 and workload.arrangement: decode", config.arrangement == "decode"
        _refuse(steps and per_request > 1, key, "1 with scope model", per_request)
    expected = f"{one}, for whole.context_length={context} makes a batch one decode step"
    _refuse(context and not steps, key, expected, per_request)
    _refuse(steps and not context, "whole.context_length", "at least 1, where a batch is one token per request", 0)


def check_dealing(tokens_BR: NDArray[np.int64]) -> None:
    """Refuse batches that leave a rank without tokens: its attention has nothing to do."""
    for batch, rank in np.argwhere(tokens_BR == 0):
        expected = "tokens for every rank: more tokens, or rank_shares above 0"
        _refuse(True, "workload", expected, f"none for rank {rank} in batch {batch}")


def check_whole_recording(model: ModelSpec, num_moe: int, num_recorded: int) -> None:
    """Refuse a recording with fewer layers than MoE layers are built."""
    expected = f"the {num_moe} MoE layers that are built of {model.name}; whole.num_layers builds fewer"
    _refuse(num_recorded < num_moe, "workload.trace", expected, num_recorded)
