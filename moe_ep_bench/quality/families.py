"""Find the routers of a Hugging Face model; ``FAMILIES`` says how each known class of them chooses its experts.

In transformers 5 every family of MoE models has its router in a module of its own, which returns logits, weights and
expert ids; the experts, a sibling module, take the latter two. So a router is found by its class, and what a policy
must know of it (score function, normalisation, groups, selection bias, scale) is read off the module, not guessed
from a config file. No modelling code is copied: logits come from the module itself, and what is said here of
its choice is held against the ids that it returns (tests/test_hf_routed.py).

Shapes: T = tokens, E = experts, K = top_k, G = groups.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from moe_ep_bench.errors import UserError
from moe_ep_bench.policies.contract import RoutingContext
from moe_ep_bench.policies.steps import TORCH


@dataclass(frozen=True)
class Family:
    """How the routers of one class choose.

    Attributes:
        name: what people call the models.
        normalizes: whether a router divides a token's weights by their sum; None = its ``norm_topk_prob`` says.
        score_function: ``softmax`` over the experts, or ``sigmoid``.
        scales: it multiplies the weights by ``routed_scaling_factor``; some layers multiply the experts' sum instead.
        biased: it adds ``e_score_correction_bias`` to the scores for choosing.
        group_scored_by: how many of a group's best experts make up the group's value; None = no groups.
    """

    name: str
    normalizes: bool | None = None
    score_function: str = "softmax"
    scales: bool = False
    biased: bool = False
    group_scored_by: int | None = None


_V3 = Family("DeepSeek-V3", score_function="sigmoid", scales=True, biased=True, group_scored_by=2)
# By the name of the router's class.
FAMILIES: dict[str, Family] = {
    "FlexOlmoTopKRouter": Family("FlexOlmo"),
    "HunYuanMoEV1Gate": Family("Hunyuan", normalizes=True),
    "MellumTopKRouter": Family("Mellum"),
    "MiniMaxTopKRouter": Family("MiniMax-01", normalizes=True),
    "MiniMaxM3VLTopKRouter": Family("MiniMax-M3", normalizes=True, score_function="sigmoid", biased=True),
    "MixtralTopKRouter": Family("Mixtral", normalizes=True),
    "OlmoeTopKRouter": Family("OLMoE"),
    "Qwen2MoeTopKRouter": Family("Qwen2-MoE"),
    "Qwen3MoeTopKRouter": Family("Qwen3-MoE"),
    "Qwen3NextTopKRouter": Family("Qwen3-Next"),
    "Qwen3OmniMoeThinkerTextTopKRouter": Family("Qwen3-Omni"),
    "Qwen3VLMoeTextTopKRouter": Family("Qwen3-VL", normalizes=True),
    "Qwen3_5MoeTopKRouter": Family("Qwen3.5", normalizes=True),
    "Qwen4ExpTextTopKRouter": Family("Qwen4"),
    "Step3p7TopKRouter": Family("Step-3.7", normalizes=True, score_function="sigmoid", biased=True),
    # transformers' DeepSeek-V2 does not read norm_topk_prob.
    "DeepseekV2TopkRouter": Family("DeepSeek-V2", normalizes=False, scales=True, group_scored_by=1),
    "DeepseekOcr2TextTopkRouter": Family("DeepSeek-OCR 2", normalizes=False, scales=True, group_scored_by=1),
    "DeepseekV3TopkRouter": _V3,
    "AXK1TopkRouter": replace(_V3, name="A.X"),
    "BailingHybridTopkRouter": replace(_V3, name="Bailing hybrid"),
    "DeepseekV32TopkRouter": replace(_V3, name="DeepSeek-V3.2"),
    "Dots1TopkRouter": replace(_V3, name="dots1"),
    "ExaoneMoeTopkRouter": replace(_V3, name="EXAONE-MoE"),
    "Glm4MoeLiteTopkRouter": replace(_V3, name="GLM-4 Lite"),
    "Glm4MoeTopkRouter": replace(_V3, name="GLM-4.5"),
    "Glm4vMoeTextTopkRouter": replace(_V3, name="GLM-4.5V"),
    "Glm5NextTextTopkRouter": replace(_V3, name="GLM-5 Next"),
    "GlmMoeDsaTopkRouter": replace(_V3, name="GLM-5"),
    "HYV4TopkRouter": replace(_V3, name="Hunyuan-V4"),
    "KimiLinearTopkRouter": replace(_V3, name="Kimi Linear"),
    "MiMoV2FlashTopkRouter": replace(_V3, name="MiMo-V2"),
    "NemotronHTopkRouter": replace(_V3, name="Nemotron-H"),
    "SolarOpenTopkRouter": replace(_V3, name="Solar Open"),
    # A softmax over the chosen logits: the same as normalised scores.
    "GptOssTopKRouter": Family("GPT-OSS", normalizes=True),
}


@dataclass(frozen=True, eq=False)
class MoELayer:
    """One MoE layer of a model: its router, and the experts that take what it chooses.

    Attributes:
        name: of the router among the model's modules.
        number: of the decoder layer, dense layers counted.
        fraction: where among the model's MoE layers this one stands, 0 to below 1.
    """

    name: str
    number: int
    fraction: float
    router: Any
    experts: Any
    family: Family

    @property
    def num_experts(self) -> int:
        return int(self.router.num_experts)

    @property
    def top_k(self) -> int:
        return int(self.router.top_k)

    @property
    def groups(self) -> tuple[int, int] | None:
        """Number of groups, and how many of them a token may choose from; None = no restriction."""
        router = self.router
        if self.family.group_scored_by is None or getattr(router, "topk_method", "") == "greedy":
            return None
        if router.num_group in (None, 1, router.topk_group):
            return None
        return int(router.num_group), int(router.topk_group)

    @property
    def policies_know_groups(self) -> bool:
        """Policies value a group by its best K // top_groups experts, as Megatron-Core does."""
        return self.groups is not None and self.top_k // self.groups[1] == self.family.group_scored_by

    def context(self, num_ranks: int) -> RoutingContext:
        """What is so of all tokens of this layer."""
        num_groups, top_groups = self.groups if self.groups and self.policies_know_groups else (None, None)
        normalize = self.family.normalizes
        return RoutingContext(
            top_k=self.top_k,
            num_ranks=num_ranks,
            normalize=bool(self.router.norm_topk_prob) if normalize is None else normalize,
            bias_E=self.router.e_score_correction_bias.float() if self.family.biased else None,
            num_groups=num_groups,
            top_groups=top_groups,
            scale=float(self.router.routed_scaling_factor) if self.family.scales else 1.0,
            layer_fraction=self.fraction,
        )

    def scores(self, logits_TE: Tensor) -> Tensor:
        """The router's scores from its logits: float32 [T, E].

        Where groups are compared otherwise than policies compare them (DeepSeek-V2, which takes a group's best expert
        and six experts from three groups), scores outside a token's best groups are 0, as the model has it.
        """
        if self.family.score_function == "sigmoid":
            scores_TE = logits_TE.float().sigmoid()
        else:
            scores_TE = torch.softmax(logits_TE, dim=-1, dtype=torch.float32)
        if self.groups is None or self.policies_know_groups:
            return scores_TE
        num_groups, top_groups = self.groups
        compared_TE = scores_TE + self.router.e_score_correction_bias if self.family.biased else scores_TE
        best_TGe = compared_TE.unflatten(1, (num_groups, -1)).topk(self.family.group_scored_by or 1, dim=-1).values
        inside_TG = TORCH.best_per_row(best_TGe.sum(dim=-1), top_groups)
        return scores_TE.masked_fill(~inside_TG.repeat_interleave(self.num_experts // num_groups, dim=1), 0.0)

    def check_policies(self) -> None:
        """Refuse groups that no policy can follow; a recording, in which the router chooses, needs none.

        Raises:
            ValueError: one line that names the router.
        """
        if self.groups and not self.policies_know_groups and self.family.biased:
            raise UserError(
                f"{self.name}: expected top_k ({self.top_k}) over topk_group ({self.groups[1]}) to be "
                f"{self.family.group_scored_by}, by which {self.family.name} compares its {self.groups[0]} groups"
            )


def find_moe_layers(model: torch.nn.Module) -> list[MoELayer]:
    """All MoE layers of a model, in its order.

    Raises:
        ValueError: no router of a known class.
    """
    found = [(name, module) for name, module in model.named_modules() if type(module).__name__ in FAMILIES]
    if not found:
        others = sorted({type(module).__name__ for module in model.modules() if _seems_to_route(module)})
        got = f"got the routers {', '.join(others)}" if others else "got no mixture of experts"
        known = ", ".join(sorted({family.name for family in FAMILIES.values()}))
        raise UserError(f"{type(model).__name__}: {got}; expected those of {known}")
    layers = []
    for place, (name, router) in enumerate(found):
        experts = model.get_submodule(name.rpartition(".")[0]).experts
        number = re.search(r"\.layers\.(\d+)\.", f".{name}")
        assert number is not None, name
        family = FAMILIES[type(router).__name__]
        layers.append(MoELayer(name, int(number[1]), place / len(found), router, experts, family))
    return layers


def _seems_to_route(module: torch.nn.Module) -> bool:
    """By the name of its class, or as a layer that chooses among experts within itself does."""
    named = re.search("router|gating|moegate", type(module).__name__, re.IGNORECASE) is not None
    return named or (hasattr(module, "num_experts") and hasattr(module, "top_k"))
