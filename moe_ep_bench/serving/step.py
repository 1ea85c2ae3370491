"""Route the tokens of one step of a server by a policy, in the K slots a token that its kernels have.

The server's own router goes first. What it chose stays, to the bit, wherever the policy leaves a token its own top-k:
a router in bfloat16 ties (its ``torch.topk`` breaks ties as it likes) and rounds its weights, and neither is a policy's
doing. Elsewhere the policy's experts and weights take the slots. A token with fewer experts than slots repeats one that
it holds, at weight 0; one that lost all repeats the busiest expert of the step: no expert is read that was not read
anyway. The kernel still computes such a slot. Where it skips experts of other ranks (``backends``), an empty slot names
one of these.

Shapes: T = tokens of a step, E = experts, K = top_k, L = MoE layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from moe_ep_bench.errors import UserError
from moe_ep_bench.layer.experts import seeded_generator
from moe_ep_bench.models import ModelSpec
from moe_ep_bench.policies import Policy, Routing, TopK
from moe_ep_bench.quality.checkpoint import Choice, MoELayer
from moe_ep_bench.quality.routed import MASS_ROUNDING, PolicyRouter

# Arguments of vLLM's router factory that make scores unknown to policies, and their names in messages.
_UNKNOWN_ROUTERS = {
    "custom_routing_function": "a routing function of the model's own",
    "zero_expert_type": "experts that compute nothing",
    "hash_indices_table": "experts by token id",
    "bias_vl": "a selection bias for images",
    "num_fused_shared_experts": "shared experts fused into the routed ones",
}
COUNTS = ("steps", "tokens", "pairs", "dropped", "rerouted", "own_mass", "mass", "own_activated", "activated")


def moe_layer(name: str, number: int, fraction: float, num_experts: int, top_k: int, **told: Any) -> MoELayer:
    """A layer as policies know it, from the arguments of vLLM's router factory.

    Raises:
        ValueError: a router whose scores are none that a policy knows.
    """
    for key, words in _UNKNOWN_ROUTERS.items():
        if not (told.get(key) is None or (isinstance(told[key], int) and told[key] == 0)):
            raise UserError(f"{words} ({key}), which no policy knows", name)
    score_function = told.get("scoring_func", "softmax")
    if score_function not in ("softmax", "sigmoid"):
        raise UserError(f"scoring_func: expected softmax or sigmoid, got {score_function!r}", name)
    bias, scale = told.get("e_score_correction_bias"), told.get("routed_scaling_factor", 1.0)
    groups, top = told.get("num_expert_group"), told.get("topk_group")
    has_groups = bool(told.get("use_grouped_topk")) and groups is not None and groups > 1
    spec = ModelSpec(
        name=name,
        source="vLLM",
        num_layers=number + 1,
        hidden_size=1,
        ffn_hidden_size=1,
        num_experts=num_experts,
        top_k=top_k,
        score_function=score_function,
        normalize=bool(told.get("renormalize", True)),
        selection_bias=bias is not None,
        num_groups=groups if has_groups else None,
        top_groups=top if has_groups else None,
        group_score_experts=(2 if bias is not None else 1) if has_groups else None,
        routed_scale=scale,
    )
    # The parameter itself: weights are loaded into it later.
    router = SimpleNamespace(routed_scaling_factor=scale, e_score_correction_bias=bias)
    return MoELayer(name, number, fraction, router, None, spec)


@dataclass(frozen=True, eq=False)
class Step:
    """The tokens that a server computes together, request by request.

    Attributes:
        request_T: which of the step's requests each is of, int64 on the scores' device.
        is_prompt_T: whether it is a prompt's (prefill) or was generated (decode), bool.
    """

    request_T: Tensor
    is_prompt_T: Tensor
    _acting: dict[tuple[str, ...], tuple[Tensor, int]] = field(default_factory=dict)

    def acting(self, acts_in: tuple[str, ...]) -> tuple[Tensor, int]:
        """Which tokens a policy decides on that acts in these stages, bool [T], and how many."""
        if acts_in not in self._acting:
            acts_T = (self.is_prompt_T & ("prefill" in acts_in)) | (~self.is_prompt_T & ("decode" in acts_in))
            self._acting[acts_in] = acts_T, int(acts_T.sum())
        return self._acting[acts_in]


class StepRouter:
    """Routes the MoE layers of a model by one policy, and counts what it did.

    Args:
        num_ranks: expert-parallel ranks; a step is one batch of all of them.
        acts_in: stages whose tokens the policy decides on, prefill, decode or both; None = its own.
        elsewhere: by layer, the expert of another rank that an empty slot names, or None.
    """

    def __init__(
        self,
        policy: Policy,
        layers: Sequence[MoELayer],
        num_ranks: int,
        device: torch.device | str,
        acts_in: Sequence[str] | None = None,
        elsewhere: Sequence[int | None] | None = None,
    ) -> None:
        self.elsewhere = [None] * len(layers) if elsewhere is None else elsewhere
        self.layers, self.num_ranks = layers, num_ranks
        self.acts_in = tuple(policy.acts_in if acts_in is None else acts_in)
        self.router = PolicyRouter(policy)
        self.generator = seeded_generator(torch.device(device), 0)
        self.counts_LC = torch.zeros(len(layers), len(COUNTS), dtype=torch.float64, device=device)

    def route(
        self, place: int, choice: Choice, weights_TK: Tensor, ids_TK: Tensor, step: Step
    ) -> tuple[Tensor, Tensor]:
        """Weights and expert ids [T, K] of a layer, in the types of the router's own."""
        layer, (scores_TE, own_TE) = self.layers[place], choice
        acts_T, num_acting = step.acting(self.acts_in)
        if not num_acting:
            return weights_TK, ids_TK
        context = replace(
            layer.context(self.num_ranks),
            token_mask_T=None if num_acting == len(acts_T) else acts_T,
            request_id_T=step.request_T,
            generator=self.generator,
        )
        (routing,) = self.router.route(layer, [scores_TE], [context])
        # A token with its own top-k has the model's weights, by ``laws.law_weights``.
        differs_T = (routing.map_TE != own_TE).any(dim=1) & acts_T
        is_own = not bool(differs_T.any())
        map_TE = own_TE if is_own else torch.where(differs_T.unsqueeze(1), routing.map_TE, own_TE)
        self._count(place, scores_TE, own_TE, map_TE, acts_T, num_acting)
        if is_own:
            return weights_TK, ids_TK
        kept = Routing(map_TE, routing.weights_TE)
        return into_slots(kept, ~differs_T, weights_TK, ids_TK, self.elsewhere[place])

    def _count(
        self, place: int, scores_TE: Tensor, own_TE: Tensor, map_TE: Tensor, acts_T: Tensor, num_acting: int
    ) -> None:
        def of(chosen_TE: Tensor) -> list[Tensor]:
            """Mass of the acting tokens, and experts activated by all."""
            acting_TE = chosen_TE if num_acting == len(acts_T) else chosen_TE & acts_T.unsqueeze(1)
            return [scores_TE.masked_fill(~acting_TE, 0).sum(dtype=torch.float64), chosen_TE.any(dim=0).sum()]

        own = found = of(own_TE)
        dropped = rerouted = torch.zeros_like(own[1])
        if map_TE is not own_TE:
            missing_T, added_T = (own_TE & ~map_TE).sum(dim=1), (map_TE & ~own_TE).sum(dim=1)
            rerouted_T = torch.minimum(missing_T, added_T)
            dropped, rerouted, found = (missing_T - rerouted_T).sum(), rerouted_T.sum(), of(map_TE)
        top_k = self.layers[place].top_k
        known = self.counts_LC.new_tensor([1, num_acting, num_acting * top_k])
        self.counts_LC[place, :3] += known
        self.counts_LC[place, 3:] += torch.stack([dropped, rerouted, own[0], found[0], own[1], found[1]])

    def problem(self) -> str | None:
        """What no policy may come to, and this one did: its counts cannot be right."""
        total_C = self.counts_LC.sum(dim=0)
        count = dict(zip(COUNTS, total_C.tolist(), strict=True))
        if isinstance(self.router.policy, TopK) and (changed := count["dropped"] + count["rerouted"]):
            return f"topk changed {changed:,.0f} of {count['pairs']:,.0f} top-k pairs, expected none"
        # With a bias or groups the top-k are not the best scores.
        is_best = all(not layer.spec.selection_bias and layer.groups is None for layer in self.layers)
        if is_best and count["mass"] > count["own_mass"] * (1 + MASS_ROUNDING):
            return f"{count['mass'] / count['own_mass']:.4f} of the top-k's mass kept, expected at most 1"
        return None

    def report(self) -> str:
        """Counts of the policy so far, over all layers."""
        count = dict(zip(COUNTS, self.counts_LC.sum(dim=0).tolist(), strict=True))
        # Tokens and steps pass through every layer.
        tokens, steps = (count[name] / len(self.layers) for name in ("tokens", "steps"))
        pairs, steps_of_all = max(count["pairs"], 1), max(count["steps"], 1)
        return (
            f"all layers: {tokens:,.0f} tokens, {count['dropped']:,.0f} of {count['pairs']:,.0f} top-k pairs dropped "
            f"({count['dropped'] / pairs:.2%}), {count['rerouted']:,.0f} rerouted ({count['rerouted'] / pairs:.2%}), "
            f"{count['mass'] / (count['own_mass'] or 1):.4f} of the top-k's mass kept, "
            f"{count['activated'] / steps_of_all:.1f} experts activated a layer and step "
            f"({count['own_activated'] / steps_of_all:.1f} by top-k) in {steps:,.0f} steps"
        )


def into_slots(
    routing: Routing, keeps_T: Tensor, weights_TK: Tensor, ids_TK: Tensor, elsewhere: int | None = None
) -> tuple[Tensor, Tensor]:
    """A policy's routing in the slots of a server: weights and ids [T, K].

    Args:
        routing: of all tokens; those that keep what they have need no weights.
        keeps_T: tokens whose slots stay as the server's router filled them.
        weights_TK, ids_TK: how it filled them.
        elsewhere: the expert that an empty slot names; None = one that the token holds.

    Raises:
        ValueError: the policy gave a token more experts than there are slots.
    """
    top_k, map_TE = ids_TK.shape[1], routing.map_TE
    if not len(ids_TK):
        return weights_TK.clone(), ids_TK.clone()
    held_T = map_TE.sum(dim=1)
    if (most := int(held_T.max())) > top_k:
        raise UserError(
            f"expected at most {top_k} experts a token, the slots of vLLM's kernels; the policy gave {most}"
        )
    found_TK, expert_TK = routing.weights_TE.masked_fill(~map_TE, -1.0).topk(top_k, dim=1)
    empty_TK = found_TK < 0
    if elsewhere is None:
        stand_in_T1 = torch.where(held_T.unsqueeze(1) > 0, expert_TK[:, :1], map_TE.sum(dim=0).argmax())
    else:
        stand_in_T1 = torch.full_like(expert_TK[:, :1], elsewhere)
    expert_TK, found_TK = torch.where(empty_TK, stand_in_T1, expert_TK), found_TK.clamp(min=0)
    keeps_T1 = keeps_T.unsqueeze(1)
    return (
        torch.where(keeps_T1, weights_TK, found_TK.to(weights_TK)),
        torch.where(keeps_T1, ids_TK, expert_TK.to(ids_TK)),
    )
