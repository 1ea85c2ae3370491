"""``scope: model``: what is to be measured of a whole model, before anything runs.

A batch of the workload is a batch of the model. Where it is to be prefilled, its sequences are the prompts; where
``whole.context_length`` says that requests have tokens in the cache, it is the next token of each. Every MoE layer has
scores of its own for these tokens: of a recording the layer's own, of a synthetic workload the same targets solved for
with another seed. So each layer has its own skew, and its own busy rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Self

import numpy as np

from moe_ep_bench.config import Experiment, RecordedConfig, SyntheticConfig
from moe_ep_bench.layer.parts import Parts
from moe_ep_bench.models import Attention, LatentAttention, ModelSpec
from moe_ep_bench.plurals import tokens_words
from moe_ep_bench.scopes.comparison import VALUE_BYTES, Comparison, make_workload
from moe_ep_bench.workload import RecordedWorkload, SyntheticWorkload, Workload
from moe_ep_bench.workload.batch import deal_sequences
from moe_ep_bench.workload.streamed import StreamedWorkload


@dataclass(frozen=True)
class ModelComparison(Comparison):
    """What ``run`` times of whole models.

    Attributes:
        workloads: of every MoE layer that is built, in order; ``workload`` is the first.
    """

    scope: ClassVar[str] = "model"

    workloads: tuple[Workload, ...]

    @classmethod
    def _opened(cls, experiment: Experiment, world_size: int, parts: Parts) -> Self:
        _check_model(experiment.model.spec(), experiment)
        _check_batches(experiment)
        workloads = tuple(layer_workloads(experiment, world_size))
        comparison = cls(experiment, world_size, workloads[0], parts, workloads)
        comparison._check_dealing()
        return comparison

    @property
    def num_layers(self) -> int:
        """Layers that are built: the first ones of the model."""
        return self.experiment.whole.num_layers or self.model.num_layers

    @property
    def moe_layers(self) -> range:
        """Which of them are MoE layers."""
        return range(self.model.first_dense_layers, self.num_layers)

    @property
    def context_length(self) -> int:
        return self.experiment.whole.context_length

    def fraction_of(self, layer: int) -> float:
        """Where among the model's MoE layers one of them stands: 0 to below 1."""
        return (layer - self.model.first_dense_layers) / self.model.num_moe_layers

    @cached_property
    def definition(self) -> dict[str, Any]:
        whole = {**self.experiment.whole.model_dump(mode="json"), "num_layers": self.num_layers}
        return {**super().definition, "scope": self.scope, "whole": whole}

    @property
    def title(self) -> str:
        scaled = f" x {self.model.scale:g}" if self.model.scale != 1 else ""
        cut = f"first {self.num_layers} of {self.model.num_layers}" if self.is_cut else f"all {self.num_layers}"
        step = f"decode after {tokens_words(self.context_length)}" if self.context_length else "prefill"
        sizes = f"{cut} layers, {step}, {self.ranks_words}, {tokens_words(self.num_tokens)}"
        graph = ", CUDA graph" if self.parts.cuda_graph else ""
        return f"{self.model.name}{scaled}, {sizes}, {self.workload_in_short}{graph}"

    @property
    def workload_in_short(self) -> str:
        if isinstance(self.experiment.workload, RecordedConfig):
            return f"recorded layer by layer, {self.experiment.workload.tail_words}"
        return f"{super().workload_in_short} in each layer"

    @property
    def is_cut(self) -> bool:
        return self.num_layers < self.model.num_layers

    @property
    def departures(self) -> tuple[str, ...]:
        return (*super().departures, *_departures(self.model, self.context_length))

    @property
    def all_workloads(self) -> tuple[Workload, ...]:
        return self.workloads

    def describe(self) -> dict[str, Any]:
        peaks = [workload.achieved()["peak_load"] for workload in self.workloads]
        return {
            "whole": {
                "num_layers": self.num_layers,
                "of_layers": self.model.num_layers,
                "moe_layers": list(self.moe_layers),
                "of_moe_layers": self.model.num_moe_layers,
                "context_length": self.context_length,
                "attention": "torch scaled_dot_product_attention",
                "peak_loads": peaks,
                "shared_by_chance": self._shared_by_chance(),
            }
        }

    def _shared_by_chance(self) -> list[float]:
        """What adjacent tokens share in layers where that is more than was asked for."""
        found = (one for one in self.workloads if isinstance(one, SyntheticWorkload) and one.shares_by_chance)
        overlaps = (one.achieved()["neighbour_overlap"] for one in found)
        return [float(overlap) for overlap in overlaps if overlap is not None]

    @property
    def num_held_batches(self) -> int:
        """Batches whose scores are on the device at once."""
        return self.workload.num_batches

    def memory_bytes_per_rank(self) -> int:
        return self._memory_bytes(self.num_layers)

    def hint_for(self, available: int) -> str:
        """How many layers fit into this much memory."""
        fewest = self.model.first_dense_layers + 1
        fitting = [count for count in range(fewest, self.num_layers) if self._memory_bytes(count) <= available]
        return f"; whole.num_layers={fitting[-1]} fits" if fitting else ""

    def _memory_bytes(self, num_layers: int) -> int:
        """Weights of so many layers, one layer's experts twice (while it is built), scores, cache, a pass's buffers.

        With CUDA graphs the buffers once more: all graphs share one pool, which is not the allocator's own.
        """
        model, size = self.model, VALUE_BYTES[self.experiment.layer.dtype]
        assert model.attention is not None
        assert model.vocab_size is not None
        tokens = -(-int(self.num_tokens * self.fullest_share) // self.world_size)
        num_moe = num_layers - model.first_dense_layers
        slice_size = model.ffn_hidden_size // self.num_slices
        experts = model.num_experts // self.ep_size * 3 * model.hidden_size * slice_size
        moe = experts + model.hidden_size * (3 * model.shared_ffn_hidden_size + model.num_experts)
        block = model.attention.num_parameters(model.hidden_size)
        dense = model.first_dense_layers * 3 * model.hidden_size * model.dense_ffn_hidden_size
        embeddings = (1 if model.tied_embeddings else 2) * model.vocab_size * model.hidden_size
        weights = num_layers * block + num_moe * moe + experts + dense + embeddings
        scores = num_moe * self.num_held_batches * 2 * tokens * model.num_experts * 4
        heads, cached = _widths(model.attention)
        cache = num_layers * tokens * (self.context_length + 1) * cached if self.context_length else 0
        peak = min(getattr(self.experiment.workload, "peak_load", None) or 2.0, self.ep_size)
        pairs = int(tokens * model.top_k * peak) * self.num_slices
        buffers = pairs * (4 * model.hidden_size + 3 * slice_size) + tokens * (6 * heads + 4 * model.hidden_size)
        summed = pairs * 4 * model.hidden_size if self.num_slices > 1 else 0  # over slices, in float32
        if self.context_length:
            buffers += 3 * tokens * self.context_length * cached  # the cache of one layer, rotated and for all heads
        last = self.most_prompts * model.vocab_size * 2
        routing = tokens * model.num_experts * 8 * 6
        graphs = (
            buffers + len(self.cases) * last + self._kept_by_graphs(num_moe, tokens) if self.parts.cuda_graph else 0
        )
        return (weights + cache + buffers + last + graphs) * size + summed + scores + routing

    def _kept_by_graphs(self, num_moe: int, tokens: int) -> int:
        """Values that graphs keep for the collectives between them, of all cases and batches, timed by phase or not."""
        if self.ep_size == 1:
            return 0
        runs = len(self.cases) * self.workload.num_batches * (1 + (self.experiment.measure.breakdown_iterations > 0))
        # A gather and a reduce-scatter, each of which takes in the ones and brings the others.
        return runs * num_moe * 2 * tokens * (1 + self.ep_size) * self.model.hidden_size

    @cached_property
    def most_prompts(self) -> int:
        """Prompts, or requests that decode, of the rank that has most of them in any batch."""
        assert isinstance(self.workload, StreamedWorkload)
        shares = self.experiment.workload.rank_shares
        lengths = (self.workload.sequence_lengths(number) for number in range(self.workload.num_batches))
        return max(int(np.bincount(deal_sequences(one_S, self.world_size, shares)).max()) for one_S in lengths)

    def flops_per_rank(self) -> float:
        model = self.model
        assert model.attention is not None
        tokens = self.num_tokens / self.world_size
        one_moe = super().flops_per_rank()
        dense = 6 * model.first_dense_layers * model.hidden_size * model.dense_ffn_hidden_size
        attention = 2 * self.num_layers * model.attention.num_parameters(model.hidden_size)
        return len(self.moe_layers) * one_moe + tokens * (dense + attention)

    def _check_dealing(self) -> None:
        """Every layer sees the same tokens, and every rank has some: attention has nothing to do without."""
        for number in range(self.workload.num_batches):
            shares = self.experiment.workload.rank_shares
            tokens_R = self.workload.tokens_of_ranks(number, self.world_size, shares)
            if min(tokens_R) == 0:
                raise ValueError(
                    f"workload: expected tokens for every rank, but batch {number} has none for rank "
                    f"{int(np.argmin(tokens_R))}: expected more sequences, or rank_shares above 0"
                )


def layer_workloads(experiment: Experiment, world_size: int) -> list[Workload]:
    """A workload for every MoE layer that is built.

    Layers differ in seed, and under some seeds of a skew independent tokens share more experts than its target: of many
    layers one would often be such, and stand in the way of the model.
    """
    model, config = experiment.model.spec(), experiment.workload
    num_moe = (experiment.whole.num_layers or model.num_layers) - model.first_dense_layers
    made = []
    for number in range(num_moe):
        if isinstance(config, SyntheticConfig):
            seed = int(np.random.SeedSequence((config.seed, number)).generate_state(1)[0])
            own = config.model_copy(update={"seed": seed})
        else:
            own = config.model_copy(update={"layer": number})
        if number and isinstance(made[0], RecordedWorkload) and number >= made[0].traces[0].num_layers:
            raise ValueError(
                f"workload.trace: expected the {num_moe} MoE layers that are built of {model.name}, got "
                f"{made[0].traces[0].num_layers}; whole.num_layers builds fewer"
            )
        of_layer = experiment.model_copy(update={"workload": own})
        made.append(make_workload(of_layer, model, world_size, or_chance=True))
    return made


def _check_model(model: ModelSpec, experiment: Experiment) -> None:
    """Raise ValueError where the model is not known as a whole, or is not to be built so."""
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


def _check_batches(experiment: Experiment) -> None:
    """Raise ValueError where a batch is neither prompts nor one token of each request."""
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


def _departures(model: ModelSpec, context_length: int) -> list[str]:
    """Where attention as it is built is simpler than the model's, or than an engine's."""
    found = ["Rotary positions have the base 10,000 and are not scaled; every layer attends to all earlier tokens."]
    attention = model.attention
    if isinstance(attention, Attention):
        if attention.sinks:
            found.append("Attention's sinks are left out.")
        if attention.bias == "all":
            found.append("The bias of attention's output is left out.")
        if attention.qk_norm == "all_heads":
            found.append("Queries and keys are normalised head by head, the model's over all heads together.")
    if context_length:
        found.append(
            "The cache is Megatron-Core's static one: "
            + (
                "it holds whole keys and values, not their latent."
                if isinstance(attention, LatentAttention)
                else "it holds keys without positions, which every step gives to all of them anew."
            )
        )
    return found


def _widths(attention: Attention | LatentAttention) -> tuple[int, int]:
    """Numbers of a token in attention: queries of all heads, and what is cached of it in one layer."""
    if isinstance(attention, LatentAttention):
        queries = attention.qk_nope_head_dim + attention.qk_rope_head_dim
        return attention.num_heads * queries, attention.num_heads * (queries + attention.v_head_dim)
    return attention.num_heads * attention.head_dim, 2 * attention.num_kv_heads * attention.head_dim
