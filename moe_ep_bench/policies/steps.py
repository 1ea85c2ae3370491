"""The hot steps of routing, in torch: a compiled form may replace them.

A policy is a short sequence of these steps and of cheap operations on [E] vectors. It works by
``self.steps``, which are these unless a caller swaps in faster ones (``SteppedPolicy.by``). A form
overrides a method and returns the same bits; the methods here are its definition.

Every choice is exact about ties: the lower index wins. ``torch.topk`` promises no order among
equals, so it serves only to find a threshold; who stands at the threshold is decided here.

Nothing here reads a result on the host, which would stop a GPU inside a timed layer: shapes follow from shapes.

Float64 sums that decide something (shares of a row) run from the first column to the last, one
after another (``cumsum``), because another order would round differently and could decide otherwise.

Shapes: T = tokens, E = experts, K = top_k; a "row" is whatever competes, N its length.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from moe_ep_bench.policies.lazy import Tensor, torch

# Of scores: eight equal parts of each octave from 2**-16 to 1; what lies outside is in the first or last.
NUM_BINS = 16 * 8
BIN_SHIFT = 23 - 3  # lower bits of a float32 that tell scores of one bin apart
# To whose multiples scores are rounded, so that sums are exact up to 2**21: two million tokens of softmax scores.
SCORE_UNIT = 2.0**-32

# Below this many winners torch.topk finds the threshold sooner than a selection by rank (kthvalue).
_TOPK_LIMIT = 64


@dataclass(frozen=True, kw_only=True)
class LeastLoaded:
    """The rule by which tokens, one after another, take the least loaded experts of a pool.

    Attributes:
        top_k: K, experts that each token takes.
        eps_high: a token whose top-k holds at least this share of its row sum takes its top-k.
        t_fix: an expert is in the pool if its score is at least this share of the token's best one.
        pool_size: c, to which the pool is trimmed, K to E.
    """

    top_k: int
    eps_high: float
    t_fix: float
    pool_size: int


class Steps:
    """The formulations in torch, on any device."""

    def best_per_row(self, keys_RN: Tensor, count: int, columns_N: Tensor | None = None) -> Tensor:
        """Mark each row's ``count`` largest keys; among equal keys the lower column wins.

        Args:
            keys_RN: [rows, N] of any ordered dtype, above the lowest value where ``columns_N`` is given.
            count: at least 0; more than N is N.
            columns_N: bool, which columns compete; all of them are marked where they are fewer than ``count``.

        Returns:
            bool [rows, N].
        """
        if columns_N is not None:
            return self.best_per_row(keys_RN.masked_fill(~columns_N, lowest(keys_RN)), count) & columns_N
        num_columns = keys_RN.shape[1]
        if count == 0 or keys_RN.numel() == 0:
            return torch.zeros_like(keys_RN, dtype=torch.bool)
        if count >= num_columns:
            return torch.ones_like(keys_RN, dtype=torch.bool)
        if count <= _TOPK_LIMIT:
            threshold_R1 = keys_RN.topk(count, dim=1).values[:, -1:]
        else:
            threshold_R1 = keys_RN.kthvalue(num_columns - count + 1, dim=1, keepdim=True).values
        above_RN, tied_RN = keys_RN > threshold_R1, keys_RN == threshold_R1
        room_R1 = count - above_RN.sum(dim=1, keepdim=True)
        return above_RN | (tied_RN & (tied_RN.cumsum(dim=1) <= room_R1))

    def marked_first(self, keys_TE: Tensor, mark_TE: Tensor) -> Tensor:
        """Keys that put marked places first, and order these and the others as ``keys_TE`` do: int64 [T, E].

        Args:
            keys_TE: float32, or int64 below 2**33 in magnitude.
            mark_TE: bool [T, E] or [T, 1].
        """
        if keys_TE.is_floating_point():
            # The bits of a positive float order like integers; a negative one's (a biased score) in reverse.
            bits_TE = keys_TE.contiguous().view(torch.int32).long()
            keys_TE = torch.where(bits_TE < 0, -(bits_TE & 0x7FFFFFFF), bits_TE)
        return keys_TE + (mark_TE.long() << 40)

    def group_values(self, keys_TE: Tensor, num_groups: int, count: int) -> Tensor:
        """Sums of the ``count`` largest keys of each group of neighbouring columns, added the largest first: [T, G]."""
        return keys_TE.unflatten(1, (num_groups, -1)).topk(count, dim=-1).values.sum(dim=-1)

    def fewest_reaching(self, scores_TE: Tensor, keys_TE: Tensor, count: int, share: float) -> Tensor:
        """Mark each row's best ``count`` by key, but no more than hold ``share`` of the row's score sum.

        A row without mass reaches no share: a share of nothing is 0.

        Args:
            share: above 0 and below 1.

        Returns:
            bool [T, E], at least one mark and at most ``count`` in each row.
        """
        order_TE = best_first(keys_TE)[:, :count]
        total_T1 = scores_TE.double().cumsum(dim=1)[:, -1:]
        reached_TC = share_of(scores_TE.double().gather(1, order_TE).cumsum(dim=1), total_T1) >= share
        # An expert is needed as long as those before it do not suffice.
        needed_TC = ~reached_TC.roll(1, dims=1)
        needed_TC[:, 0] = True
        return torch.zeros_like(scores_TE, dtype=torch.bool).scatter(1, order_TE, needed_TC)

    def load_of(self, map_TE: Tensor) -> Tensor:
        """Pairs per expert: float64 [E]."""
        return map_TE.sum(dim=0).double()

    def histogram(self, scores_TE: Tensor, map_TE: Tensor) -> Tensor:
        """Marked pairs by score bin (``score_bins``) and expert, and below these rows the sum of their scores.

        Returns:
            float64 [2 * NUM_BINS, E]; scores count as multiples of ``SCORE_UNIT``.
        """
        num_experts = scores_TE.shape[1]
        cell_TE = score_bins(scores_TE) * num_experts
        cell_TE += torch.arange(num_experts, device=scores_TE.device)
        # Unmarked pairs add nothing: to leave them out the host would have to know how many are marked.
        mass_TE = ((scores_TE * map_TE).double() / SCORE_UNIT).round() * SCORE_UNIT
        values_2TE = torch.stack([map_TE.double(), mass_TE])
        cells_2N = values_2TE.new_zeros(2, NUM_BINS * num_experts)
        return cells_2N.index_add(1, cell_TE.flatten(), values_2TE.flatten(1)).view(2 * NUM_BINS, num_experts)

    def of_all_ranks(self, function: Callable[[Tensor, int], Tensor], stats_SE: Tensor, num_ranks: int) -> Tensor:
        """What every rank works out alike from the sums of all ranks."""
        return function(stats_SE, num_ranks)

    def without_cells(self, scores_TE: Tensor, map_TE: Tensor, dropped_SE: Tensor) -> Tensor:
        """The marked pairs whose cell is not dropped: bool [T, E].

        Args:
            dropped_SE: bool [bins, E].
        """
        return map_TE & ~dropped_SE.gather(0, score_bins(scores_TE))

    def by_request(
        self, scores_TE: Tensor, wanted_TE: Tensor, request_T: Tensor, num_requests: int
    ) -> tuple[Tensor, Tensor]:
        """Experts that any token of a request wants, and the request's summed scores, added in the order of its tokens.

        Args:
            scores_TE: float32.
            wanted_TE: bool.
            request_T: int64, 0 to ``num_requests`` - 1 (Q).

        Returns:
            bool [Q, E] and float64 [Q, E].
        """
        zeros_QE = scores_TE.new_zeros([num_requests, scores_TE.shape[1]], dtype=torch.float64)
        wanted_QE = zeros_QE.index_add(0, request_T, wanted_TE.double()) > 0
        return wanted_QE, zeros_QE.index_add(0, request_T, scores_TE.double())

    def weights(
        self, scores_TE: Tensor, map_TE: Tensor, norm_map_TE: Tensor | None, width: int, scale: float
    ) -> Tensor:
        """``scores * map``, over the sum of the scores in ``norm_map`` where that is given, times ``scale``.

        Megatron-Core sums the K values in the order in which ``torch.topk`` returns them; adding in
        the same order gives the same bits. 0/0 is 0.

        Args:
            norm_map_TE: bool [T, E] with at most ``width`` marks per row; None = do not divide.

        Returns:
            float32 [T, E], 0 where ``map_TE`` is False.
        """
        weights_TE = scores_TE * map_TE
        if norm_map_TE is not None:
            total_T1 = (scores_TE * norm_map_TE).topk(width, dim=1).values.sum(dim=1, keepdim=True)
            weights_TE = torch.where(total_T1 > 0, weights_TE / total_T1, 0.0)
        return weights_TE if scale == 1.0 else weights_TE * scale

    def moved(self, map_TE: Tensor, weights_TE: Tensor, target_E: Tensor) -> tuple[Tensor, Tensor]:
        """Move each expert's pairs to the expert that ``target_E`` (int64) names; weights that meet add up.

        In float64, where a sum of a few float32 is exact whatever its order.

        Returns:
            The map and the weights, as given.
        """
        pairs_TE = torch.zeros_like(map_TE, dtype=torch.int32).index_add_(1, target_E, map_TE.int())
        sums_TE = torch.zeros_like(weights_TE, dtype=torch.float64).index_add_(1, target_E, weights_TE.double())
        return pairs_TE > 0, sums_TE.float()

    def within_capacity(self, candidates_TE: Tensor, keys_TE: Tensor, capacity: int, num_shared: int) -> Tensor:
        """Keep of every group's candidate pairs the ``capacity`` with the largest keys: bool [T, E].

        Args:
            candidates_TE: bool.
            keys_TE: float32 or int64; among equal keys the lower token wins, then the lower expert.
            capacity: pairs that a group has room for.
            num_shared: neighbouring experts that form a group.
        """
        num_tokens, num_experts = candidates_TE.shape
        # One row per group. Within a row pairs lie by token, then by expert: the tie order.
        candidates_GN, keys_GN = (by_group(values_TE, num_shared) for values_TE in (candidates_TE, keys_TE))
        kept_GN = self.best_per_row(keys_GN.masked_fill(~candidates_GN, lowest(keys_GN)), capacity) & candidates_GN
        return (
            kept_GN.view(num_experts // num_shared, num_tokens, num_shared)
            .transpose(0, 1)
            .reshape(num_tokens, num_experts)
        )

    def least_loaded(
        self,
        scores_TE: Tensor,
        keys_TE: Tensor,
        load_E: Tensor,
        rule: LeastLoaded,
        *,
        valid_T: Tensor | None = None,
        random_TE: Tensor | None = None,
    ) -> Tensor:
        """Route tokens in order, each by the loads that those before it left: bool [T, E].

        This form goes token by token in torch: for more than a few there is a compiled form.

        Args:
            scores_TE: float32, what shares are shares of.
            keys_TE: float32 or int64, what orders a token's experts; its K largest are the top-k.
            load_E: float64, the loads before the first token; left as it is.
            valid_T: bool, False = padding, which selects nothing.
            random_TE: float32; where given, a pool too large keeps its largest of these, else those of ``keys_TE``.
        """
        top_k_TE = self.best_per_row(keys_TE, rule.top_k)
        scores64_TE = scores_TE.double()
        top_k_sum_T1 = (scores64_TE * top_k_TE).cumsum(dim=1)[:, -1:]
        confident_T1 = share_of(top_k_sum_T1, scores64_TE.cumsum(dim=1)[:, -1:]) >= rule.eps_high
        pool_TE = (scores64_TE >= rule.t_fix * scores64_TE.amax(dim=1, keepdim=True)) | top_k_TE
        trim_by_TE = keys_TE if random_TE is None else random_TE
        pool_TE &= self.best_per_row(trim_by_TE.masked_fill(~pool_TE, lowest(trim_by_TE)), rule.pool_size)

        # A token's experts, the most preferred first: a stable sort by load then breaks ties by preference.
        order_TE = best_first(keys_TE)
        load_E = load_E.clone()
        map_TE = torch.zeros_like(top_k_TE)
        for token, order_E in enumerate(order_TE):
            ordered_E = load_E[order_E].masked_fill(~pool_TE[token, order_E], torch.inf)
            chosen_K = order_E[ordered_E.sort(stable=True).indices[: rule.top_k]]
            spread_E = torch.zeros_like(map_TE[token]).scatter(0, chosen_K, True)
            chosen_E = torch.where(confident_T1[token], top_k_TE[token], spread_E)
            map_TE[token] = chosen_E if valid_T is None else chosen_E & valid_T[token]
            load_E += map_TE[token]
        return map_TE


TORCH = Steps()


def lowest(keys: Tensor) -> Any:
    """The least value of the dtype, for what may not win."""
    return -torch.inf if keys.is_floating_point() else torch.iinfo(keys.dtype).min


def share_of(part: Tensor, whole: Tensor) -> Tensor:
    """part / whole, where a share of nothing is 0."""
    return torch.where(whole > 0, part / whole, 0.0)


def score_bins(scores_TE: Tensor) -> Tensor:
    """The bin of each score, the last one below 1: int64 [T, E], 0 to NUM_BINS - 1.

    The bits of a positive float32 are its exponent and mantissa: without the lower ones they count bins.
    """
    bits_TE = (scores_TE + 0).contiguous().view(torch.int32).long()  # -0.0 is 0.0
    bits_of_1 = 127 << 23  # the bits of 1.0
    return (((bits_TE - bits_of_1) >> BIN_SHIFT) + NUM_BINS).clamp(0, NUM_BINS - 1)


def best_first(keys_TE: Tensor) -> Tensor:
    """The columns of each row by descending key, the lower one first among equals: int64 [T, E]."""
    # Adding 0 turns -0.0 into 0.0, which a radix sort on CUDA would tell apart.
    return (keys_TE + 0).sort(dim=1, descending=True, stable=True).indices


def place_in_row(keys_RN: Tensor) -> Tensor:
    """Place of each column in its row's ``best_first`` order, 0 the best: int64 [rows, N]."""
    return best_first(keys_RN).argsort(dim=1)


def by_group(values_TE: Tensor, num_shared: int) -> Tensor:
    """[T, E] -> [E / num_shared, T * num_shared]: one row per group of neighbouring experts."""
    num_tokens, num_experts = values_TE.shape
    num_groups = num_experts // num_shared
    return values_TE.view(num_tokens, num_groups, num_shared).transpose(0, 1).reshape(num_groups, -1)
