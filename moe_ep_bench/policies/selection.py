"""The model's own selection, its order and its weights; ``topk`` routes so.

Shapes: T = tokens, E = experts, K = top_k.
"""

from __future__ import annotations

from moe_ep_bench.policies.contract import Routing, RoutingContext, SteppedPolicy, policy
from moe_ep_bench.policies.lazy import Tensor, torch
from moe_ep_bench.policies.steps import TORCH, Steps


def preference(scores_TE: Tensor, context: RoutingContext) -> Tensor:
    """Scores as the model orders them: with the selection bias, where it has one. Shape [T, E]."""
    return scores_TE if context.bias_E is None else scores_TE + context.bias_E


def top_k_map(scores_TE: Tensor, context: RoutingContext, steps: Steps = TORCH) -> Tensor:
    """The model's own choice of K experts per token: bool [T, E], padding rows empty."""
    return without_padding(_top_k(scores_TE, context, steps), context)


def list_keys(scores_TE: Tensor, context: RoutingContext, steps: Steps = TORCH) -> Tensor:
    """Keys that order every token's *preference list*, all E experts, the best first.

    The list is that of ``preference``. Where the model restricts its top-k to groups, the top-k
    still comes first; behind it stand the other experts of all groups, by preference.

    Returns:
        [T, E], float32, or int64 where there are groups; among equal keys the lower expert comes first.
    """
    if context.num_groups is None:
        return preference(scores_TE, context)
    return steps.marked_first(preference(scores_TE, context), _top_k(scores_TE, context, steps))


def _top_k(scores_TE: Tensor, context: RoutingContext, steps: Steps) -> Tensor:
    """The K best of every row, inside its best groups where the model has groups: bool [T, E]."""
    if context.top_k_TE is not None:
        return context.top_k_TE
    preference_TE, top_k = preference(scores_TE, context), context.top_k
    num_groups, top_groups = context.num_groups, context.top_groups
    if num_groups is not None and top_groups is not None:
        preference_TE = _inside_top_groups(preference_TE, top_k, num_groups, top_groups, steps)
    return steps.best_per_row(preference_TE, top_k)


def _inside_top_groups(preference_TE: Tensor, top_k: int, num_groups: int, top_groups: int, steps: Steps) -> Tensor:
    """Set experts outside a token's best groups to -inf (DeepSeek-V3, node-limited routing)."""
    value_TG = steps.group_values(preference_TE, num_groups, top_k // top_groups)
    inside_TG = steps.best_per_row(value_TG, top_groups)
    return preference_TE.unflatten(1, (num_groups, -1)).masked_fill(~inside_TG.unsqueeze(-1), -torch.inf).flatten(1)


def without_padding(map_TE: Tensor, context: RoutingContext) -> Tensor:
    """Empty the rows of padding tokens."""
    return map_TE if context.token_mask_T is None else map_TE & context.token_mask_T.unsqueeze(1)


def summed_scores(scores_TE: Tensor, context: RoutingContext) -> Tensor:
    """Every expert's score mass over the valid tokens: float64 [E]."""
    if context.token_mask_T is not None:
        scores_TE = scores_TE.masked_fill(~context.token_mask_T.unsqueeze(1), 0.0)
    return scores_TE.sum(dim=0, dtype=torch.float64)


def weighted(
    scores_TE: Tensor,
    map_TE: Tensor,
    norm_map_TE: Tensor,
    context: RoutingContext,
    steps: Steps = TORCH,
    *,
    width: int | None = None,
) -> Routing:
    """Give the selected pairs their combine weights.

    Args:
        scores_TE: float32 [T, E].
        map_TE: bool [T, E], the final selection.
        norm_map_TE: bool [T, E]: the pairs whose scores sum to 1 where the model normalises. That is
            the original top-k for policies that drop (what is dropped is lost, as in
            Megatron-Core), the final selection for policies that choose anew.
        context: ``normalize``, ``scale`` and ``top_k`` are read.
        width: most marks in a row of ``norm_map_TE``; None = K.
    """
    width = min(context.top_k if width is None else width, scores_TE.shape[1])
    norm_map = norm_map_TE if context.normalize else None
    return Routing(map_TE=map_TE, weights_TE=steps.weights(scores_TE, map_TE, norm_map, width, context.scale))


@policy
class TopK(SteppedPolicy):
    """Every token goes to its K best experts, whatever their load: the baseline, on the path that policies take."""

    name = "topk"

    def select(self, scores_TE: Tensor, context: RoutingContext, stats_SE: Tensor | None = None) -> Routing:
        map_TE = top_k_map(scores_TE, context, self.steps)
        return weighted(scores_TE, map_TE, map_TE, context, self.steps)
