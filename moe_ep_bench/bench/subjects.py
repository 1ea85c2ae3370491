"""What is measured: one MoE layer, or a whole model, on a number of expert-parallel ranks.

A batch of the workload is a batch of the model. Its sequences are the prompts of a prefill; with
``whole.context_length`` it is the next token of each request. Every MoE layer of a model has scores of its own: of a
recording that layer's, of a synthetic workload the same targets solved for with another seed. So each layer has its
own skew, and its own busiest rank.

Shapes: B = batches, R = ranks, T = tokens of a rank, S = sequences.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from moe_ep_bench.bench import checks, words
from moe_ep_bench.config import Experiment, RecordedConfig, SyntheticConfig
from moe_ep_bench.errors import naming
from moe_ep_bench.models import LatentAttention, ModelSpec
from moe_ep_bench.policies import RoutingContext
from moe_ep_bench.policies.lazy import Tensor
from moe_ep_bench.workload import RecordedWorkload, SyntheticWorkload, Workload
from moe_ep_bench.workload.batch import deal_pieces, image_tokens
from moe_ep_bench.workload.formatting import tokens_words
from moe_ep_bench.workload.patterns import PatternWorkload
from moe_ep_bench.workload.skews import PATTERNS


@dataclass(frozen=True, eq=False)
class LayerSubject:
    """One MoE layer on ``world_size`` ranks.

    Attributes:
        workloads: by MoE layer, in order; the key is None where a layer stands alone.
    """

    experiment: Experiment
    world_size: int
    workloads: Mapping[int | None, Workload]

    name: ClassVar[str] = "layer"
    """One of ``schema.SCOPES``."""
    num_layers: ClassVar[int] = 1
    """Layers that are built, dense ones too."""
    context_length: ClassVar[int] = 0
    """Tokens in the cache of each request that decodes; 0 where a batch is no decode step of a model."""
    extent: ClassVar[str] = ""
    """What of the model is measured, in a title; ends in a comma."""

    @classmethod
    def of(cls, experiment: Experiment, world_size: int) -> LayerSubject:
        """Open the workload; ValueError where it cannot be had."""
        return cls(experiment, world_size, {None: make_workload(experiment, world_size)})

    @cached_property
    def model(self) -> ModelSpec:
        return self.experiment.model.spec()

    @property
    def workload(self) -> Workload:
        """The first layer's."""
        return next(iter(self.workloads.values()))

    @property
    def moe_layers(self) -> tuple[int | None, ...]:
        return tuple(self.workloads)

    @property
    def ep_size(self) -> int:
        return ep_size_on(self.experiment, self.world_size)

    @property
    def num_tokens(self) -> int:
        return self.experiment.workload.total_tokens(self.world_size)

    @cached_property
    def rank_tokens(self) -> NDArray[np.int64]:
        """Tokens of every rank in every batch: int64 [B, R]."""
        workload, shares = self.workload, self.experiment.workload.rank_shares
        return np.stack([workload.tokens_of_ranks(i, self.world_size, shares) for i in range(workload.num_batches)])

    def lengths_of_ranks(self, index: int) -> list[tuple[int, ...]]:
        """Tokens of each sequence, or of its part, that each rank has of batch ``index``, in order."""
        length_S = self.workload.sequence_lengths(index)
        start_P, rank_P = deal_pieces(length_S, self.world_size, self.experiment.workload.rank_shares)
        length_P = np.diff(start_P)
        return [tuple(length_P[rank_P == rank].tolist()) for rank in range(self.world_size)]

    @property
    def cuts_sequences(self) -> bool:
        """Whether in some batch a sequence is cut, so that no rank is without tokens."""
        counts = (len(self.workload.sequence_lengths(index)) for index in range(self.workload.num_batches))
        active = int((self.rank_tokens > 0).any(axis=0).sum())
        return any(count < active for count in counts)

    @property
    def fullest_share(self) -> float:
        """Tokens of the rank that holds most, over the mean."""
        shares = np.resize(self.experiment.workload.rank_shares or (1.0,), self.world_size)
        return float(shares.max() * self.world_size / shares.sum())

    @property
    def fullest_tokens(self) -> int:
        """Tokens of the rank that holds most, by its share."""
        return -(-int(self.num_tokens * self.fullest_share) // self.world_size)

    @property
    def most_tokens(self) -> int:
        """Tokens of the rank that has most of them in any batch."""
        return int(self.rank_tokens.max())

    @property
    def layer_fraction(self) -> float:
        """Place of the first layer in the depth of the model's MoE layers: 0 to below 1; 0 where that is unknown."""
        layer, workload = self.moe_layers[0], self.workload
        if layer is not None:
            return (layer - self.model.first_dense_layers) / self.model.num_moe_layers
        return workload.layer / workload.traces[0].num_layers if isinstance(workload, RecordedWorkload) else 0.0

    @property
    def num_places(self) -> int | None:
        """MoE layers that ``layer_fraction`` is a place among; None where that is unknown."""
        if self.moe_layers[0] is not None:
            return self.model.num_moe_layers
        return self.workload.traces[0].num_layers if isinstance(self.workload, RecordedWorkload) else None

    def layers(self) -> dict[int | None, LayerSubject]:
        """Each MoE layer as a subject of its own, with its scores and its place in the depth."""
        return {key: LayerSubject(self.experiment, self.world_size, {key: one}) for key, one in self.workloads.items()}

    def context(self, rank: int, request_id_T: Tensor, valid_T: Tensor | None) -> RoutingContext:
        """What is so of a rank's tokens, but for randomness; ``CaseSpec.told`` is what is known of it."""
        share = self.experiment.workload.image_share
        return RoutingContext(
            top_k=self.model.top_k,
            num_ranks=self.ep_size,
            rank=rank,
            normalize=self.model.normalize,
            scale=self.model.routed_scale,
            num_groups=self.model.num_groups,
            top_groups=self.model.top_groups,
            token_mask_T=valid_T,
            request_id_T=request_id_T,
            modality_T=None if share is None else image_tokens(request_id_T, share),
            layer_fraction=self.layer_fraction,
        )

    @property
    def definition(self) -> dict[str, Any]:
        """What of the definition this subject adds."""
        return {}

    @property
    def workload_in_short(self) -> str:
        return words.workload_in_short(self.experiment)

    def describe(self, *, modelled: bool) -> dict[str, Any]:
        """What ``run.json`` says of this subject: where what is run is simpler than the model."""
        return {"departures": list(self.model.departures)}

    def flops_per_rank(self) -> float:
        """Floating-point operations of one iteration on the average rank."""
        model = self.model
        ffn = 3 * (model.ffn_hidden_size * model.top_k + model.shared_ffn_hidden_size)
        return 2 * self.num_tokens / self.world_size * model.hidden_size * (ffn + model.num_experts)


@dataclass(frozen=True, eq=False)
class ModelSubject(LayerSubject):
    """A whole model, or its first layers."""

    name: ClassVar[str] = "model"

    @classmethod
    def of(cls, experiment: Experiment, world_size: int) -> ModelSubject:
        """Check the model, and open every MoE layer's workload.

        Raises:
            ValueError: naming the key whose value does not fit.
        """
        checks.check_model(experiment.model.spec(), experiment)
        checks.check_batches(experiment)
        subject = cls(experiment, world_size, layer_workloads(experiment, world_size))
        checks.check_dealing(subject.rank_tokens)
        return subject

    @property
    def num_layers(self) -> int:
        """Layers that are built: the first ones of the model."""
        return self.experiment.whole.num_layers or self.model.num_layers

    @property
    def context_length(self) -> int:
        return self.experiment.whole.context_length

    @property
    def definition(self) -> dict[str, Any]:
        return {"whole": {**self.experiment.whole.model_dump(mode="json"), "num_layers": self.num_layers}}

    @property
    def extent(self) -> str:
        of_layers = self.model.num_layers
        cut = f"first {self.num_layers} of {of_layers}" if self.num_layers < of_layers else f"all {of_layers}"
        step = f"decode after {tokens_words(self.context_length)}" if self.context_length else "prefill"
        return f"{cut} layers, {step}, "

    @property
    def workload_in_short(self) -> str:
        if isinstance(self.experiment.workload, RecordedConfig):
            return f"recorded layer by layer, {self.experiment.workload.tail_words}"
        return f"{super().workload_in_short} in each layer"

    def describe(self, *, modelled: bool) -> dict[str, Any]:
        achieved = {layer: workload.achieved() for layer, workload in self.workloads.items()}
        # What adjacent tokens share in layers where that is more than was asked for.
        by_chance = [
            achieved[layer]["neighbour_overlap"]
            for layer, workload in self.workloads.items()
            if isinstance(workload, SyntheticWorkload) and workload.shares_by_chance
        ]
        whole = {
            "num_layers": self.num_layers,
            "of_layers": self.model.num_layers,
            "moe_layers": list(self.moe_layers),
            "of_moe_layers": self.model.num_moe_layers,
            "context_length": self.context_length,
            "attention": words.modelled_attention(self.model, self.context_length)
            if modelled
            else "torch scaled_dot_product_attention",
            "peak_loads": [one["peak_load"] for one in achieved.values()],
            "shared_by_chance": [float(overlap) for overlap in by_chance if overlap is not None],
        }
        departures = _departures(self.model, self.context_length, modelled=modelled)
        return {"departures": [*self.model.departures, *departures], "whole": whole}

    def flops_per_rank(self) -> float:
        model = self.model
        assert model.attention is not None
        dense = 6 * model.first_dense_layers * model.hidden_size * model.dense_ffn_hidden_size
        attention = 2 * self.num_layers * model.attention.num_parameters(model.hidden_size)
        per_token = self.num_tokens / self.world_size * (dense + attention)
        return len(self.moe_layers) * super().flops_per_rank() + per_token


SUBJECTS: dict[str, type[LayerSubject]] = {one.name: one for one in (LayerSubject, ModelSubject)}


def ep_size_on(experiment: Experiment, world_size: int) -> int:
    """Expert-parallel ranks of a group: ``layer.ep_size``, or all ranks."""
    return experiment.layer.ep_size or world_size


def make_workload(experiment: Experiment, world_size: int, *, or_chance: bool = False) -> Workload:
    """Open the workload that an experiment names; ValueError where it cannot be had.

    Args:
        or_chance: see ``SyntheticWorkload``.
    """
    config, model = experiment.workload, experiment.model.spec()
    shape: dict[str, Any] = {"num_experts": model.num_experts, "top_k": model.top_k}
    shape |= {"num_tokens": config.total_tokens(world_size), "num_batches": config.num_batches, "seed": config.seed}
    with naming("workload"):
        if isinstance(config, SyntheticConfig):
            if config.skew in PATTERNS:
                groups = {"num_groups": model.num_groups, "top_groups": model.top_groups}
                return PatternWorkload(pattern=config.skew, sequence_length=config.sequence_length, **shape, **groups)
            targets = config.targets(experiment.model.preset, ep_size_on(experiment, world_size))
            rank_load = targets.pop("rank_load")
            return SyntheticWorkload(
                **shape,
                **targets,
                sequence_length=config.sequence_length,
                or_chance=or_chance,
                rank_load=(rank_load["ep_size"], rank_load["load"]) if rank_load else None,
                num_groups=model.num_groups,
                top_groups=model.top_groups,
            )
        keys = ("layer", "tail", "topk_share", "arrangement", "tokens_per_request")
        recordings = [(recording.trace, recording.share) for recording in config.trace]
        return RecordedWorkload(recordings, **shape, **{key: getattr(config, key) for key in keys})


def layer_workloads(experiment: Experiment, world_size: int) -> dict[int | None, Workload]:
    """A workload for every MoE layer that is built.

    Layers differ in seed, and under some seeds of a skew independent tokens share more experts than its target: of many
    layers one would often be such, and stand in the way of the model.
    """
    model, config = experiment.model.spec(), experiment.workload
    num_moe = (experiment.whole.num_layers or model.num_layers) - model.first_dense_layers
    made: dict[int | None, Workload] = {}
    for number in range(num_moe):
        own: dict[str, Any] = {"layer": number}
        if isinstance(config, SyntheticConfig):
            own = {"seed": int(np.random.SeedSequence((config.seed, number)).generate_state(1)[0])}
        of_layer = experiment.model_copy(update={"workload": config.model_copy(update=own)})
        workload = make_workload(of_layer, world_size, or_chance=True)
        if isinstance(workload, RecordedWorkload):
            checks.check_whole_recording(model, num_moe, workload.traces[0].num_layers)
        made[model.first_dense_layers + number] = workload
    return made


def _departures(model: ModelSpec, context_length: int, *, modelled: bool) -> list[str]:
    """Where attention as it is built is simpler than the model's, or than an engine's."""
    attention, is_latent = model.attention, isinstance(model.attention, LatentAttention)
    cached = (
        "it holds whole keys and values, not their latent."
        if is_latent
        else "it holds keys without positions, which every step gives to all of them anew."
    )
    sentences = {
        "Rotary positions have the base 10,000 and are not scaled; every layer attends to all earlier tokens.": True,
        "Attention's sinks are left out.": getattr(attention, "sinks", False),
        "The bias of attention's output is left out.": getattr(attention, "bias", "none") == "all",
        "Queries and keys are normalised head by head, the model's over all heads together.": (
            getattr(attention, "qk_norm", "none") == "all_heads"
        ),
        f"The cache is Megatron-Core's static one: {cached}": context_length > 0 and not (modelled and is_latent),
    }
    return [sentence for sentence, holds in sentences.items() if holds]
