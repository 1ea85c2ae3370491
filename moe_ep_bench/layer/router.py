"""The seam: Megatron-Core's router, with replayed scores and with a policy in place of top-k.

Both routers run the real gate GEMM. Where a workload replays scores, these take the place of the
GEMM's output, so that the gate costs what it costs and the routing is the workload's.

Shapes: T = local tokens, E = experts, D = hidden size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moe_ep_bench.kernels import form_of
from moe_ep_bench.layer.megatron import TopKRouter
from moe_ep_bench.models import ScoreFunction, scores_from_logits
from moe_ep_bench.policies import Policy, Routing, RoutingContext


class ReplayRouter(TopKRouter):
    """Megatron-Core's own router; after the gate GEMM the workload's logits take over.

    Attributes:
        replay_TE: float32 [T, E] logits, or None to use the gate's own.
        look: shown the gate's own logits, which a replay hides; None while things are timed.
    """

    score_function: ScoreFunction

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.replay_TE: Tensor | None = None
        self.look: Callable[[Tensor], object] | None = None

    def gating(self, input: Tensor) -> Tensor:
        if input.shape[0] == 0:
            # TopKRouter cannot reshape an empty batch; a rank may well have no tokens.
            logits = input.new_zeros((*input.shape[:-1], len(self.weight)), dtype=torch.float32)
        else:
            logits = super().gating(input)
        if self.look is not None:
            self.look(logits)
        return logits if self.replay_TE is None else self.replay_TE.view_as(logits)

    def routing(self, logits: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        if logits.numel() == 0:
            # Nor does Transformer Engine's fused top-k take an empty batch.
            none_TE = logits.flatten(0, -2)
            return none_TE, none_TE.bool()
        return super().routing(logits, padding_mask)


class PolicyRouter(ReplayRouter):
    """A router whose choice is a policy's.

    Megatron-Core's own token dropping lives in ``routing`` too, and is out of play.

    Attributes:
        policy: what routes.
        context: what the policy may know of these tokens; set together with the batch.
        ep_group: the ranks over which a batch-wide policy's statistics are summed.
        most_pairs: that the policy may have chosen in the last routing, None = unknown; taken by the dispatcher.
    """

    def __init__(self, *, policy: Policy, context: RoutingContext, ep_group: dist.ProcessGroup, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.policy = policy
        self.context = context
        self.ep_group = ep_group
        self.most_pairs: int | None = None

    def routing(self, logits: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        here, logits_TE = self.policy.in_layer(self.context.layer_fraction), logits.flatten(0, -2)
        self.most_pairs = here.most_pairs(len(logits_TE), logits_TE.shape[1], self.context)
        scores_TE = scores_from_logits(logits_TE, self.score_function)
        policy = form_of(here, scores_TE.device)
        # Without other ranks the selection takes its statistics itself, in the same launch.
        alone = self.ep_group.size() == 1 and self.context.num_ranks == 1
        stats_SE = None if alone else policy.stats(scores_TE, self.context)
        if stats_SE is not None:
            stats_SE = self.sum_over_ranks(stats_SE)
        routing: Routing = policy.select(scores_TE, self.context, stats_SE)
        return routing.weights_TE, routing.map_TE

    def sum_over_ranks(self, stats_SE: Tensor) -> Tensor:
        if self.ep_group.size() > 1:
            dist.all_reduce(stats_SE, group=self.ep_group)
        return stats_SE
