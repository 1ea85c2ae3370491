"""What all ranks' routing of a whole model amounts to: that of each of its MoE layers (``traffic``).

Every MoE layer routes the same tokens by scores of its own. What is held of a batch while it is timed are counts and
metrics of all layers, and the scores of one rank, whose turn it is; those of all ranks where they are few.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from moe_ep_bench.scopes.comparison import CEILING, CaseSpec
from moe_ep_bench.scopes.emulated_model import LayerPlan
from moe_ep_bench.scopes.traffic import CaseRouter, RankBatches, Share, Traffic
from moe_ep_bench.workload import TokenBatch

# Scores of all layers of a batch that are kept rather than made again.
_HELD_BYTES = 2**32


@dataclass(frozen=True, eq=False)
class ModelRouter:
    """How a case routes in every MoE layer."""

    case: CaseSpec
    layers: Mapping[int, CaseRouter]


@dataclass(frozen=True, eq=False)
class ModelTraffic:
    """All ranks' routing of one case on one batch, in every MoE layer.

    Attributes:
        lengths_R: of each rank, the tokens of each of its sequences.
    """

    lengths_R: list[tuple[int, ...]]
    layers: Mapping[int, Traffic]

    @property
    def is_batch_wide(self) -> bool:
        """Whether the case's policy sums statistics over ranks."""
        return any(traffic.stats_SE is not None for traffic in self.layers.values())

    def work(self, rank: int) -> tuple[Any, ...]:
        """Equal for ranks that have the same to do: their sequences, and what ``Traffic.work`` says of each layer."""
        return self.lengths_R[rank], *(traffic.work(rank) for traffic in self.layers.values())


@dataclass(frozen=True, eq=False)
class ModelShare:
    """One rank's tokens of a batch as a case sees them in every MoE layer."""

    rank: int
    layers: Mapping[int, Share]


class ModelShares:
    """One rank's tokens as the cases of a comparison see them: made once, for all cases."""

    def __init__(
        self, plans: Mapping[int, LayerPlan], tokens: Mapping[int, TokenBatch], rank: int, device: torch.device
    ) -> None:
        def share(balanced: bool) -> ModelShare:
            shares = {
                layer: Share.of(plan, tokens[layer], rank, device, balanced=balanced) for layer, plan in plans.items()
            }
            return ModelShare(rank, shares)

        self._of_case = functools.lru_cache(2)(share)

    def of(self, case: CaseSpec) -> ModelShare:
        return self._of_case(case.role == CEILING)


class ModelBatches:
    """The ranks' tokens of one batch, rank by rank, each with the scores of every MoE layer.

    Attributes:
        layers: of each MoE layer, all ranks' tokens.
    """

    def __init__(self, layers: Mapping[int, RankBatches]) -> None:
        self.layers = layers

    def __iter__(self) -> Iterator[dict[int, TokenBatch]]:
        for tokens in zip(*self.layers.values(), strict=True):
            yield dict(zip(self.layers, tokens, strict=True))


def layer_batches(plan: LayerPlan, index: int, num_layers: int) -> RankBatches:
    """The ranks' tokens of batch ``index`` in one of ``num_layers`` MoE layers; see ``RankBatches``."""
    return RankBatches(plan, index, _HELD_BYTES // num_layers)
