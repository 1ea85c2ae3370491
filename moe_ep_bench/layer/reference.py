"""The slow, obvious layer: every expert applied to every token, summed with the routing weights.

It shares nothing with the dispatcher. Each rank makes all experts again from their seeds, one at
a time, and applies them to a few of its tokens; a case's output on these tokens must be the
weighted sum, whatever the routing was.

Shapes: N = tokens checked, E = experts, D = hidden size.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe_ep_bench.layer.experts import ROUTED, SHARED, apply_expert, expert_weights
from moe_ep_bench.models import ModelSpec

# Worst relative error of a token that is still rounding: sums of some thousand products.
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2}


class DenseReference:
    """What every expert makes of some of a rank's tokens.

    Args:
        hidden_ND: the tokens' inputs, in the layer's dtype.
        seed: the seed from which the layer's weights were made.
    """

    def __init__(self, model: ModelSpec, hidden_ND: Tensor, seed: int) -> None:
        device, dtype = hidden_ND.device, hidden_ND.dtype

        def output(stream: int, expert: int, ffn_size: int) -> Tensor:
            weights = expert_weights(seed, stream, expert, model.hidden_size, ffn_size, device, dtype)
            return apply_expert(hidden_ND, weights)

        routed = [output(ROUTED, expert, model.ffn_hidden_size) for expert in range(model.num_experts)]
        self._routed_END = torch.stack(routed)
        self._shared_ND = (
            output(SHARED, 0, model.shared_ffn_hidden_size)
            if model.shared_ffn_hidden_size
            else torch.zeros_like(self._routed_END[0])
        )

    def output(self, weights_NE: Tensor) -> Tensor:
        """The layer's output for these combine weights: float32 [N, D]."""
        return torch.einsum("ne,end->nd", weights_NE.float(), self._routed_END) + self._shared_ND

    def worst_error(self, output_ND: Tensor, weights_NE: Tensor) -> float:
        """The largest |output - reference| / |reference| of a token (0 where both vanish, inf where one does)."""
        if output_ND.shape[0] == 0:
            return 0.0
        expected_ND = self.output(weights_NE)
        off_N = (output_ND.float() - expected_ND).norm(dim=1)
        size_N = expected_ND.norm(dim=1)
        relative_N = torch.where(off_N == 0, 0.0, off_N / size_N)
        return float(relative_N.max())
