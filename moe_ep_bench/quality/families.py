"""Describe how each known class of routers chooses its experts.

In transformers 5 every family of MoE models has its router in a module of its own, which returns logits, weights and
expert ids; the experts, a sibling module, take the latter two. So a router is found by its class, and what a policy
must know of it (score function, normalisation, groups, selection bias, scale) is read off the module, not guessed
from a config file. No modelling code is copied: logits come from the module itself, and what is said here of
its choice is held against the ids that it returns (tests/test_hf_routed.py).

Shapes: T = tokens, E = experts, K = top_k, G = groups.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moe_ep_bench.policies.contract import RoutingContext
from moe_ep_bench.policies.steps import TORCH


@dataclass(frozen=True)
class Family:
    """How the routers of one class choose.

    Attributes:
        name: what people call the models.
        score_function: ``softmax`` over the experts, or ``sigmoid``.
        normalizes: whether a router divides a token's weights by their sum.
        scales: it multiplies the weights by ``routed_scaling_factor``.
        biased: it adds ``e_score_correction_bias`` to the scores for choosing.
        group_scored_by: how many of a group's best experts make up the group's value; None = no groups.
    """

    name: str
    normalizes: Callable[[Any], bool]
    score_function: str = "softmax"
    scales: bool = False
    biased: bool = False
    group_scored_by: int | None = None


def _as_stated(router: Any) -> bool:
    return bool(router.norm_topk_prob)


def _always(router: Any) -> bool:
    return True  # Mixtral divides; GPT-OSS takes a softmax over the chosen logits, which is the same


def _never(router: Any) -> bool:
    return False  # transformers' DeepSeek-V2 does not read norm_topk_prob


# By the name of the router's class.
FAMILIES: dict[str, Family] = {
    "MixtralTopKRouter": Family("Mixtral", _always),
    "OlmoeTopKRouter": Family("OLMoE", _as_stated),
    "Qwen2MoeTopKRouter": Family("Qwen2-MoE", _as_stated),
    "Qwen3MoeTopKRouter": Family("Qwen3-MoE", _as_stated),
    "DeepseekV2TopkRouter": Family("DeepSeek-V2", _never, scales=True, group_scored_by=1),
    "DeepseekV3TopkRouter": Family(
        "DeepSeek-V3", _as_stated, score_function="sigmoid", scales=True, biased=True, group_scored_by=2
    ),
    "GptOssTopKRouter": Family("GPT-OSS", _always),
}


@dataclass(frozen=True, eq=False)
class Seat:
    """One MoE layer of a model: its router, and the experts that take what it chooses.

    Attributes:
        name: of the router among the model's modules.
        layer: of the decoder, dense layers counted.
        fraction: where among the model's MoE layers this one stands, 0 to below 1.
    """

    name: str
    layer: int
    fraction: float
    router: torch.nn.Module
    experts: torch.nn.Module
    family: Family

    @property
    def num_experts(self) -> int:
        return int(getattr(self.router, "num_experts"))  # noqa: B009 (torch types attributes as tensors)

    @property
    def top_k(self) -> int:
        return int(getattr(self.router, "top_k"))  # noqa: B009

    def context(self, num_ranks: int) -> RoutingContext:
        """What is so of all tokens of this layer."""
        router: Any = self.router
        groups = self._groups if self._groups_as_policies_do else None
        return RoutingContext(
            top_k=self.top_k,
            num_ranks=num_ranks,
            normalize=self.family.normalizes(router),
            bias_E=router.e_score_correction_bias.float() if self.family.biased else None,
            num_groups=groups[0] if groups else None,
            top_groups=groups[1] if groups else None,
            scale=float(router.routed_scaling_factor) if self.family.scales else 1.0,
            layer_fraction=self.fraction,
        )

    def scores(self, logits_TE: Tensor) -> Tensor:
        """The router's scores from its logits: float32 [T, E].

        Where groups are compared otherwise than policies compare them (DeepSeek-V2, which takes a group's best expert
        and six experts from three groups), scores outside a token's best groups are 0, as the model has it.
        """
        if self.family.score_function == "sigmoid":
            return logits_TE.float().sigmoid()
        scores_TE = torch.softmax(logits_TE, dim=-1, dtype=torch.float32)
        groups = self._groups
        if groups is None or self._groups_as_policies_do:
            return scores_TE
        scores_TGe = scores_TE.unflatten(1, (groups[0], -1))
        inside_TG = TORCH.best_per_row(scores_TGe.amax(dim=-1), groups[1])
        return scores_TGe.masked_fill(~inside_TG.unsqueeze(-1), 0.0).flatten(1)

    def check(self) -> None:
        """Raise ValueError where the router chooses in a way that policies cannot follow."""
        if self._groups is None or self._groups_as_policies_do or self.family.score_function == "softmax":
            return
        groups, top = self._groups
        raise ValueError(
            f"{self.name}: expected top_k ({self.top_k}) over topk_group ({top}) to be {self.family.group_scored_by},"
            f" by which {self.family.name} compares its {groups} groups"
        )

    @property
    def _groups(self) -> tuple[int, int] | None:
        """Groups, and how many of them a token may choose from; None where there is nothing to restrict."""
        router: Any = self.router
        if self.family.group_scored_by is None or getattr(router, "topk_method", "") == "greedy":
            return None
        if router.num_group is None or router.num_group == 1 or router.topk_group == router.num_group:
            return None
        return int(router.num_group), int(router.topk_group)

    @property
    def _groups_as_policies_do(self) -> bool:
        """Policies value a group by its best K // top_groups experts, as Megatron-Core does."""
        return self._groups is not None and self.top_k // self._groups[1] == self.family.group_scored_by


def find_seats(model: torch.nn.Module) -> list[Seat]:
    """All MoE layers of a model, in its order.

    Raises:
        ValueError: no router of a known class, or one that chooses in a way that policies cannot follow.
    """
    found = [(name, module) for name, module in model.named_modules() if type(module).__name__ in FAMILIES]
    if not found:
        known = ", ".join(f"{family.name} ({name})" for name, family in FAMILIES.items())
        others = sorted({type(module).__name__ for module in model.modules() if _looks_like_a_router(module)})
        got = f"the routers {', '.join(others)}" if others else "none: no mixture of experts"
        raise ValueError(f"{type(model).__name__}: expected routers of {known}; got {got}")
    seats = []
    for place, (name, router) in enumerate(found):
        experts = model.get_submodule(name.rpartition(".")[0]).experts
        layer = re.search(r"\.layers\.(\d+)\.", f".{name}")
        assert isinstance(experts, torch.nn.Module)
        assert layer is not None, name
        seat = Seat(name, int(layer[1]), place / len(found), router, experts, FAMILIES[type(router).__name__])
        seat.check()
        seats.append(seat)
    return seats


def _looks_like_a_router(module: torch.nn.Module) -> bool:
    return bool(re.search("router|gating|moegate", type(module).__name__, re.IGNORECASE))
