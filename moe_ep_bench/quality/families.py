"""Find the routers of a Hugging Face model, and what a policy must know of how they choose.

In transformers 5 every family of MoE models has its router in a module of its own, which returns logits, weights and
expert ids; the experts, a sibling module, take the latter two. So a router is found by the name of its class. How it
chooses (score function, normalisation, groups, selection bias, scale) follows from the model's config by the rules that
all shapes here are read by (``models.hf_config``). No modelling code is copied: logits come from the module itself, and
what is said of its choice is held against the ids that it returns (tests/test_hf_routed.py).

Shapes: T = tokens, E = experts, K = top_k, G = groups.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moe_ep_bench.errors import UserError
from moe_ep_bench.models import ModelSpec, spec_of
from moe_ep_bench.models.scores import scores_from_logits
from moe_ep_bench.policies.contract import Policy, RoutingContext
from moe_ep_bench.policies.selection import top_k_map

_ROUTER = re.compile(r"top_?k_?router$|^HunYuanMoEV1Gate$", re.IGNORECASE)
_BIAS = "e_score_correction_bias"


@dataclass(frozen=True, eq=False)
class Choice:
    """What a layer's own router did with tokens.

    Attributes:
        scores_TE: float32, as a policy sees them: their top-k is the choice, also where they tie. 0 where ``broken_T``.
        own_TE: bool, the experts that it chose.
        broken_T: bool, tokens whose scores are no finite numbers.
    """

    scores_TE: Tensor
    own_TE: Tensor
    broken_T: Tensor


@dataclass(frozen=True, eq=False)
class MoELayer:
    """One MoE layer of a model: its router, and the experts that take what it chooses.

    Attributes:
        name: of the router among the model's modules.
        number: of the decoder layer, dense layers counted.
        fraction: where among the model's MoE layers this one stands, 0 to below 1.
        spec: how the model's routers choose.
    """

    name: str
    number: int
    fraction: float
    router: Any
    experts: Any
    spec: ModelSpec

    @property
    def num_experts(self) -> int:
        return self.spec.num_experts

    @property
    def top_k(self) -> int:
        return self.spec.top_k

    def __post_init__(self) -> None:
        """Refuse groups that no policy can follow: a policy sums a group's best K // top_groups, as Megatron-Core."""
        spec = self.spec
        if self.groups is not None and spec.top_k // self.groups[1] != spec.group_score_experts:
            raise UserError(
                f"{self.name}: expected top_k ({spec.top_k}) over topk_group ({self.groups[1]}) to be "
                f"{spec.group_score_experts}, by which {spec.name} compares its {self.groups[0]} groups"
            )

    @property
    def groups(self) -> tuple[int, int] | None:
        """Number of groups, and how many of them a token may choose from; None = no restriction."""
        groups, top = self.spec.num_groups, self.spec.top_groups
        return None if groups is None or top is None or groups == top else (groups, top)

    def context(self, num_ranks: int) -> RoutingContext:
        """What is so of all tokens of this layer."""
        num_groups, top_groups = self.groups or (None, None)
        return RoutingContext(
            top_k=self.top_k,
            num_ranks=num_ranks,
            normalize=self.spec.normalize,
            bias_E=getattr(self.router, _BIAS).float() if self.spec.selection_bias else None,
            num_groups=num_groups,
            top_groups=top_groups,
            # Where the router has none, the layer multiplies the experts' sum.
            scale=self.spec.routed_scale if hasattr(self.router, "routed_scaling_factor") else 1.0,
            layer_fraction=self.fraction,
        )

    def choice(self, logits_TE: Tensor, ids_TK: Tensor) -> Choice:
        """What the router chose, from its logits and expert ids.

        A router in bfloat16 gives many experts equal scores, and ``torch.topk`` breaks ties as it likes. The experts
        that it took among equals are shown ahead by one unit in the last place.
        """
        scores_TE = scores_from_logits(logits_TE, self.spec.score_function)
        broken_T = ~scores_TE.isfinite().all(dim=1)
        scores_TE = scores_TE.masked_fill(broken_T.unsqueeze(1), 0.0)
        own_TE = torch.zeros_like(scores_TE, dtype=torch.bool).scatter(1, ids_TK.long(), True)
        tied_T = (top_k_map(scores_TE, self.context(1)) != own_TE).any(dim=1)
        if bool(tied_T.any()):
            ahead_TE = torch.nextafter(scores_TE, torch.full_like(scores_TE, torch.inf))
            scores_TE = torch.where(tied_T.unsqueeze(1) & own_TE, ahead_TE, scores_TE)
        return Choice(scores_TE, own_TE, broken_T)


def find_moe_layers(model: torch.nn.Module) -> list[MoELayer]:
    """All MoE layers of a model, in its order.

    Raises:
        ValueError: no routers, or a family that is not known.
    """
    where = type(model).__name__
    found = [(name, module) for name, module in model.named_modules() if _ROUTER.search(type(module).__name__)]
    if not found:
        raise UserError(f"{where}: expected routers of classes ...TopKRouter, as transformers 5 has them; got none")
    config: Any = model.config
    values = config.to_dict()
    spec, layers = spec_of(values, where), []
    for place, (name, router) in enumerate(found):
        experts = model.get_submodule(name.rpartition(".")[0]).experts
        number = re.search(r"\.layers\.(\d+)\.", f".{name}")
        assert number is not None, name
        layer = MoELayer(name, int(number[1]), place / len(found), router, experts, spec)
        if spec.selection_bias != hasattr(router, _BIAS):
            raise UserError(f"{name}: expected {_BIAS}, by which {values['model_type']} selects experts")
        layers.append(layer)
    return layers


def carried_loads(policy: Policy | None, loads: dict[Any, Tensor], layer: Any, zeros: Tensor) -> Tensor | None:
    """What earlier batches left on a layer's experts, kept in ``loads``; None where the policy asks for none."""
    return loads.setdefault(layer, zeros) if getattr(policy, "carry_loads", False) else None


def shares(scores_TE: Tensor) -> NDArray[np.float32]:
    """Every expert's share of a token's score mass: [T, E]."""
    full_TE = scores_TE.cpu().numpy()
    sum_T1 = full_TE.sum(axis=1, keepdims=True, dtype=np.float64)
    if np.abs(sum_T1 - 1).max(initial=0) < 1e-4:  # A softmax: as the router has it, to the bit.
        return full_TE
    return (full_TE / sum_T1).astype(np.float32)
