"""Run an MoE layer on a few tokens at a time: what is permuted for all of a long prefill at once may not fit.

The router sees all tokens first, so that a policy decides as it would without. The rest of the layer then runs piece by
piece; as many pieces on every rank, which meet in each.

Shapes: T = tokens of this rank, E = experts, D = hidden size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moe_ep_bench.layer.megatron import MoELayer
from moe_ep_bench.layer.phases import replaced
from moe_ep_bench.layer.router import PolicyRouter


def run_in_pieces(layer: MoELayer, num_pieces: int) -> None:
    """Let the layer route all of its input [T, 1, D] and then run on so many pieces of it, from now on.

    Pieces differ by one token at most; some are empty where there are few tokens.
    """
    forward, router = layer.forward, layer.router

    def in_pieces(hidden_T1D: Tensor, *arguments: Any, **options: Any) -> tuple[Tensor, None]:
        probs_TE, map_TE = layer.route(hidden_T1D)
        most_pairs = router.most_pairs if isinstance(router, PolicyRouter) else None
        outputs = []
        parts = (whole.tensor_split(num_pieces) for whole in (hidden_T1D, probs_TE, map_TE))
        for piece_T1D, *routed in zip(*parts, strict=True):
            if most_pairs is not None:
                num_tokens, num_experts = routed[1].shape
                of_token = router.policy.most_experts(num_experts, router.context)
                router.most_pairs = min(most_pairs, num_tokens * of_token)
            with replaced(layer, "route", lambda *_, routed=routed, **__: tuple(routed)):
                outputs.append(forward(piece_T1D, *arguments, **options)[0])
        return torch.cat(outputs), None

    layer.forward = in_pieces
