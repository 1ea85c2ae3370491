"""The experts of a layer, ours or Megatron-Core's with the same weights, and the dispatchers that bring them tokens.

Our dispatchers are Megatron-Core's own, each with one part replaced:

``BoundedDispatcher``         all-to-all for a policy's pairs, whose number the host learns as late as native's splits
``IndexedAlltoAllDispatcher`` the same with permutations by index, where Transformer Engine's fused ones are missing
``MapDispatcher``             all-gather without permutations, for experts that take a map (``DecodeExperts``)

Shapes: T = local tokens (of all ranks after a gather), E = experts, N = pairs (that this rank's experts compute, sorted
by expert), R = EP ranks, L = local experts, D = hidden size, F = expert FFN size.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from moe_ep_bench.kernels.experts import decode_experts, first_rows, row_sums, weighted_swiglu
from moe_ep_bench.layer.backend import LayerBackend
from moe_ep_bench.layer.experts import ExpertWeights, fill_mlp_
from moe_ep_bench.layer.megatron import TransformerConfig, expert_submodule, token_dispatcher
from moe_ep_bench.layer.router import PolicyRouter


class GroupedExperts(torch.nn.Module):
    """All local experts in two grouped GEMMs with the gated activation between them.

    Megatron-Core builds it in the place of its own experts. The routing weight scales the
    activation, as ``SequentialMLP`` has it, so that combining is a plain sum.
    """

    def __init__(self, num_local_experts: int, config: TransformerConfig, submodules: Any = None, **_: Any) -> None:
        super().__init__()
        ffn_size, hidden_size = config.moe_ffn_hidden_size, config.hidden_size
        assert ffn_size is not None
        self.num_local_experts = num_local_experts
        # Rows are output features, as in a linear layer: the layout in which the GEMM reads along D.
        self.gate_up_L2FD = _weight(config, num_local_experts, 2 * ffn_size, hidden_size)
        self.down_LDF = _weight(config, num_local_experts, hidden_size, ffn_size)

    def forward(self, hidden_ND: Tensor, counts_L: Tensor, weights_N: Tensor) -> tuple[Tensor, None]:
        """Return the experts' outputs [N, D], each row scaled by its routing weight, and no bias.

        Args:
            hidden_ND: inputs, sorted by local expert.
            counts_L: rows of each local expert, on any device.
            weights_N: float32 routing weight of each row.
        """
        if hidden_ND.shape[0] == 0:
            return hidden_ND, None
        ends_L = counts_L.cumsum(0).to(device=hidden_ND.device, dtype=torch.int32, non_blocking=True)
        gate_up_N2F = torch.nn.functional.grouped_mm(hidden_ND, self.gate_up_L2FD.transpose(1, 2), offs=ends_L)
        activated_NF = weighted_swiglu(gate_up_N2F, weights_N)
        return torch.nn.functional.grouped_mm(activated_NF, self.down_LDF.transpose(1, 2), offs=ends_L), None


class DecodeExperts(GroupedExperts):
    """The same experts, of all tokens by a map: the weights of activated ones are read once.

    Nothing is permuted, and no shape follows from the routing.
    """

    def forward(self, hidden_TD: Tensor, map_TL: Tensor, weights_TL: Tensor) -> tuple[Tensor, None]:
        """Return the weighted sum of each token's local experts, [T, D], and no bias.

        Args:
            hidden_TD: all tokens.
            map_TL: bool, which local experts each takes.
            weights_TL: float32 routing weights.
        """
        return decode_experts(hidden_TD, map_TL, weights_TL, self.gate_up_L2FD, self.down_LDF), None


def _weight(config: TransformerConfig, *shape: int) -> torch.nn.Parameter:
    # On CUDA Megatron-Core's own modules are born on the device too.
    device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
    return torch.nn.Parameter(torch.empty(shape, dtype=config.params_dtype, device=device), requires_grad=False)


def experts_submodule(layer_backend: LayerBackend, num_experts: int) -> Any:
    """The submodule that Megatron-Core builds as the experts of an MoE layer."""
    if layer_backend.experts == "grouped":
        return GroupedExperts
    if layer_backend.experts == "decode":
        return DecodeExperts
    return expert_submodule(num_experts, use_te=layer_backend.experts == "te")


def fill_experts_(experts: Any, weights: Iterable[ExpertWeights]) -> None:
    """Copy the local experts' weights, in order, into whichever backend this is."""
    for index, expert in enumerate(weights):
        if isinstance(experts, GroupedExperts):
            experts.gate_up_L2FD[index].copy_(expert.gate_up_2FD)
            experts.down_LDF[index].copy_(expert.down_DF)
        elif hasattr(experts, "local_experts"):
            fill_mlp_(experts.local_experts[index], expert)
        else:  # TEGroupedMLP: grouped linear layers hold one parameter per expert
            getattr(experts.linear_fc1, f"weight{index}").data.copy_(expert.gate_up_2FD)
            getattr(experts.linear_fc2, f"weight{index}").data.copy_(expert.down_DF)


# ---- dispatchers -----------------------------------------------------------------------------------------------------


def own_dispatcher(layer_backend: LayerBackend, *, any_pairs: bool = False) -> Any:
    """Return the class that replaces Megatron-Core's dispatcher; None = Megatron-Core's stays.

    Args:
        any_pairs: for a policy, which gives a token any number of experts.
    """
    if layer_backend.experts == "decode":
        return MapDispatcher
    if layer_backend.permute == "indexed":
        return IndexedAlltoAllDispatcher
    return BoundedDispatcher if any_pairs else None


class BoundedDispatcher(token_dispatcher.MoEAlltoAllTokenDispatcher):
    """All-to-all for any number of pairs, with Megatron-Core's permutations, fused ones included.

    Given a capacity factor, Megatron-Core waits for the number of pairs before it permutes; its dropless path does not.
    Here the host learns it with the splits, as on the dropless path. Until then there are as many rows as a policy may
    choose at most; what is over is not written, and goes before anything is sent.

    Attributes:
        router: whose policy bounds the pairs; None = Megatron-Core's own, K pairs of each token.
    """

    router: PolicyRouter | None = None

    def preprocess(self, routing_map: Tensor) -> Tensor:
        counts_L = super().preprocess(routing_map)
        if self.router is not None:
            self.num_out_tokens = self._most_pairs(routing_map)
            if self.input_splits is None:  # One rank: rows are left out before they are sorted, without splits.
                self._maybe_update_cuda_sync_point("before_permutation_2")
        return counts_L

    def _most_pairs(self, map_TE: Tensor) -> int:
        if self.router is None:
            return int(self.num_out_tokens)
        most, self.router.most_pairs = self.router.most_pairs, None
        return int(map_TE.sum()) if most is None else most  # Without a bound the host waits for the count.

    def token_dispatch(self, hidden_ND: Tensor, probs_N: Tensor) -> tuple[Tensor, Tensor]:
        if self.input_splits is not None:
            self.tokens_per_expert = self._maybe_dtoh_and_synchronize("before_ep_alltoall", self.tokens_per_expert)
            hidden_ND, probs_N = self._only_chosen(int(self.input_splits.sum()), hidden_ND, probs_N)
        return super().token_dispatch(hidden_ND, probs_N)

    def dispatch_postprocess(self, hidden_ND: Tensor, probs_N: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        if self.input_splits is None:
            self.tokens_per_expert = self._maybe_dtoh_and_synchronize("before_permutation_2", self.tokens_per_expert)
            hidden_ND, probs_N = self._only_chosen(int(self.tokens_per_expert.sum()), hidden_ND, probs_N)
        return super().dispatch_postprocess(hidden_ND, probs_N)

    def _only_chosen(self, num_pairs: int, hidden_ND: Tensor, probs_N: Tensor) -> tuple[Tensor, Tensor]:
        """Leave out the rows beyond the pairs that there are.

        Raises:
            RuntimeError: there are more pairs than rows.
        """
        if num_pairs > len(hidden_ND):
            raise RuntimeError(f"the policy chose {num_pairs} pairs, more than its bound of {len(hidden_ND)}")
        self._forget_rows(num_pairs)
        return hidden_ND[:num_pairs], probs_N[:num_pairs]

    def _forget_rows(self, num_pairs: int) -> None:
        """Keep of what leads rows back to tokens as many; Transformer Engine's map is of tokens, and stays."""
        if self.reversed_local_input_permutation_mapping.dim() == 1:
            self.reversed_local_input_permutation_mapping = self.reversed_local_input_permutation_mapping[:num_pairs]


class IndexedAlltoAllDispatcher(BoundedDispatcher):
    """All-to-all with permutations by index; counts, splits and syncs are Megatron-Core's.

    Tokens are permuted twice: on their own rank into one run of rows per expert (*expert-major* order, which the
    all-to-all sends), and on the experts' rank from one run per (source rank, local expert) into one per local expert.
    Without Transformer Engine, Megatron-Core 0.19 sorts all T x E entries of the map for the first, cuts the rows into
    R x L pieces for the second, and adds them up with atomics: an artefact. Here each step is one gather by an index.
    """

    def dispatch_preprocess(self, hidden_states: Tensor, routing_map: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        self.hidden_shape, self.routing_map, self.probs = hidden_states.shape, routing_map, probs
        counts_L = self.preprocess(routing_map)
        # The pairs that there are, on the device.
        num_chosen = (counts_L if self.input_splits is None else self.input_splits).sum()
        # Taken before the copy to the host, which Megatron-Core's splitting needs and ours does not.
        self._counts_RL = self.num_global_tokens_per_local_expert if self.num_local_experts > 1 else None
        self.tokens_per_expert = self._maybe_dtoh_and_synchronize("before_permutation_1", counts_L)
        expert_N, token_N = expert_major_pairs(routing_map, int(self.num_out_tokens))
        self._flat_N = token_N * self.num_experts + expert_N
        hidden_TD = hidden_states.view(-1, hidden_states.shape[-1])
        return first_rows(hidden_TD, token_N, num_chosen), probs.flatten().index_select(0, self._flat_N)

    def _forget_rows(self, num_pairs: int) -> None:
        self._flat_N = self._flat_N[:num_pairs]

    def dispatch_postprocess(self, hidden_ND: Tensor, probs_N: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        self.tokens_per_expert = self._maybe_dtoh_and_synchronize("before_permutation_2", self.tokens_per_expert)
        if self.input_splits is None:  # One rank, which sends nothing.
            hidden_ND, probs_N = self._only_chosen(int(self.tokens_per_expert.sum()), hidden_ND, probs_N)
        # With one source rank, or one local expert, the rows are in order already.
        self._from_rank_major_N = None
        if self._counts_RL is not None and len(self._counts_RL) > 1:
            self._from_rank_major_N = rank_major_index(self._counts_RL, len(probs_N))
            hidden_ND = hidden_ND.index_select(0, self._from_rank_major_N)
            probs_N = probs_N.index_select(0, self._from_rank_major_N)
        counts_L = self._maybe_dtoh_and_synchronize("before_finish", self.tokens_per_expert)
        self.tokens_per_expert = None
        return hidden_ND, counts_L, probs_N

    def combine_preprocess(self, hidden_ND: Tensor) -> Tensor:
        if self._from_rank_major_N is not None:
            hidden_ND = torch.empty_like(hidden_ND).index_copy_(0, self._from_rank_major_N, hidden_ND)
        return hidden_ND

    def combine_postprocess(self, hidden_ND: Tensor) -> Tensor:
        return sum_per_token(hidden_ND, self.routing_map, self._flat_N).view(self.hidden_shape)


def expert_major_pairs(map_TE: Tensor, num_pairs: int) -> tuple[Tensor, Tensor]:
    """Expert and token of every pair, int64 [N] each, sorted by expert and then by token; see ``_marked``."""
    expert_N, token_N = _marked(map_TE.T.contiguous(), num_pairs).unbind(1)
    return expert_N, token_N


def rank_major_index(counts_RL: Tensor, num_rows: int) -> Tensor:
    """Index that sorts rows by (local expert, source rank), from rows sorted by (source rank, local expert).

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
    return row_sums(hidden_ND, token_major_N, map_TE.sum(dim=1).cumsum(0))


def _marked(mask: Tensor, num_marked: int) -> Tensor:
    """Indices of the true entries in order, [num_marked, dimensions]; zeros where fewer are true.

    The number is the host's, which need not wait for the device.
    """
    return torch.nonzero_static(mask, size=num_marked, fill_value=0)


class MapDispatcher(token_dispatcher.MoEAllGatherTokenDispatcher):
    """All-gather and reduce-scatter with nothing sorted between them.

    Megatron-Core sorts the gathered tokens by expert and waits for the host to learn how many rows there are. Experts
    that take a map need neither: no shape follows from the routing, and a CUDA graph can hold it. Every token travels
    to every rank, which suits the few tokens of a decode step.
    """

    def dispatch_postprocess(self, hidden_states: Tensor, probs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return all tokens [T, D], the local experts of each (bool [T, L]) and their weights (float32 [T, L])."""
        local = slice(self.local_expert_indices[0], self.local_expert_indices[-1] + 1)
        # The reduce-scatter sums in the dtype of these.
        self.local_probs = probs[:, local]
        assert self.routing_map is not None
        map_TL, self.routing_map = self.routing_map[:, local], None
        return hidden_states, map_TL, self.local_probs

    def combine_preprocess(self, hidden_states: Tensor) -> Tensor:
        return hidden_states
