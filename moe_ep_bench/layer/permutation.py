"""Permutation by index, in place of what Megatron-Core does where Transformer Engine is missing.

Tokens are permuted twice: on their own rank into one run of rows per expert (*expert-major* order,
what the all-to-all sends), and on the experts' rank from one run per (source rank, local expert)
into one per local expert. Without Transformer Engine's fused kernels Megatron-Core 0.19 sorts all
T x E entries of the map for the first, cuts the rows into R x L pieces and joins them for the
second, and adds them up with atomics at the end. Here each step is one gather by an index, and the
end one sum per token, so that users without Transformer Engine do not measure an artefact.

Shapes: T = local tokens, E = experts, N = pairs, R = EP ranks (times those that an expert is cut among), L = local
experts, D = hidden size.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe_ep_bench.layer.tensor_group import TensorGroupDispatcher


class IndexedAlltoAllDispatcher(TensorGroupDispatcher):
    """Megatron-Core's all-to-all dispatcher with permutations by index; its counts, splits and syncs are kept."""

    def dispatch_preprocess(self, hidden_states: Tensor, routing_map: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        self.hidden_shape, self.routing_map, self.probs = hidden_states.shape, routing_map, probs
        counts_L = self.preprocess(routing_map)
        # Before the copy to the host, which Megatron-Core wants for its splitting and we do not.
        self._counts_RL = self.num_global_tokens_per_local_expert if self.num_local_experts > 1 else None
        self.tokens_per_expert = self._maybe_dtoh_and_synchronize("before_permutation_1", counts_L)
        expert_N, token_N = expert_major_pairs(routing_map, int(self.num_out_tokens))
        self._flat_N = token_N * self.num_experts + expert_N
        hidden_TD = hidden_states.view(-1, hidden_states.shape[-1])
        return hidden_TD.index_select(0, token_N), probs.flatten().index_select(0, self._flat_N)

    def dispatch_postprocess(self, hidden_ND: Tensor, probs_N: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        if self.tp_size > 1:
            hidden_ND, probs_N = self.gather_rows(hidden_ND, probs_N)
        self.tokens_per_expert = self._maybe_dtoh_and_synchronize("before_permutation_2", self.tokens_per_expert)
        # With one source rank, or one local expert, the rows are in their order already.
        in_order = self._counts_RL is None or len(self._counts_RL) == 1
        self._from_rank_major_N = None if in_order else rank_major_index(self._counts_RL, len(probs_N))
        if self._from_rank_major_N is not None:
            hidden_ND = hidden_ND.index_select(0, self._from_rank_major_N)
            probs_N = probs_N.index_select(0, self._from_rank_major_N)
        counts_L = self._maybe_dtoh_and_synchronize("before_finish", self.tokens_per_expert)
        self.tokens_per_expert = None
        return hidden_ND, counts_L, probs_N

    def combine_preprocess(self, hidden_ND: Tensor) -> Tensor:
        if self._from_rank_major_N is not None:
            hidden_ND = torch.empty_like(hidden_ND).index_copy_(0, self._from_rank_major_N, hidden_ND)
        return self.sum_slices(hidden_ND) if self.tp_size > 1 else hidden_ND

    def combine_postprocess(self, hidden_ND: Tensor) -> Tensor:
        return sum_per_token(hidden_ND, self.routing_map, self._flat_N).view(self.hidden_shape)


def expert_major_pairs(map_TE: Tensor, num_pairs: int) -> tuple[Tensor, Tensor]:
    """Expert and token of every pair, int64 [N] each, sorted by expert and then by token."""
    expert_N, token_N = _marked(map_TE.T.contiguous(), num_pairs).unbind(1)
    return expert_N, token_N


def rank_major_index(counts_RL: Tensor, num_rows: int) -> Tensor:
    """Where each row, sorted by (local expert, source rank), stands among rows sorted by (source rank, local expert).

    Args:
        counts_RL: rows of each source rank and local expert, on the device of the rows.
        num_rows: their sum, known to the host.
    """
    counts_LR = counts_RL.T.reshape(-1)
    ends_RL = counts_RL.reshape(-1).cumsum(0).view_as(counts_RL)
    begins_LR = (ends_RL - counts_RL).T.reshape(-1)
    shift_LR = begins_LR - (counts_LR.cumsum(0) - counts_LR)
    rows_N = torch.arange(num_rows, device=counts_RL.device)
    return rows_N + shift_LR.repeat_interleave(counts_LR, output_size=num_rows)


def sum_per_token(hidden_ND: Tensor, map_TE: Tensor, flat_N: Tensor) -> Tensor:
    """Sum the rows of each token: [T, D]; a token without pairs gets zeros.

    Args:
        hidden_ND: rows of pairs in expert-major order.
        flat_N: token * E + expert of each.
    """
    num_pairs = len(hidden_ND)
    if num_pairs == 0:
        return hidden_ND.new_zeros(len(map_TE), hidden_ND.shape[1])
    row_of_pair = torch.empty(map_TE.numel(), dtype=torch.int64, device=map_TE.device)
    row_of_pair[flat_N] = torch.arange(num_pairs, device=map_TE.device)
    token_major_N = row_of_pair[_marked(map_TE.reshape(-1), num_pairs).squeeze(1)]
    counts_T = map_TE.sum(dim=1)
    # A sum over a bag of rows is what embedding_bag computes: one kernel, in a fixed order.
    return torch.nn.functional.embedding_bag(token_major_N, hidden_ND, counts_T.cumsum(0) - counts_T, mode="sum")


def _marked(mask: Tensor, num_marked: int) -> Tensor:
    """Indices of the true entries, [num_marked, dimensions], in order; on CUDA without waiting for the device."""
    return torch.nonzero_static(mask, size=num_marked) if mask.is_cuda else mask.nonzero()
