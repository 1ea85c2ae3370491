"""Synthetic router scores, solved to the targets that users think in.

A token's logits are ``sharpness * (strength * popularity + noise)``. Popularity is one standard normal number for each
expert, noise a Gumbel number for each token and expert. A neighbour copies each expert's noise from the token before it
with one probability, so that texts share experts as real ones do, and each token alone is distributed as before. Each
target has a number of the recipe to itself (``solving``), so they are met one after the other:

* *peak load*, the busiest expert's load over the mean: the strength of popularity; every batch
* *expert loads*, as they were counted: each expert's log odds, in place of popularity; every batch
* *cuts*, what capacities drop and leave on the fullest rank: loads that have these numbers and the peak load
  (``solving.load_profile``, ``place_for_cuts``), met as expert loads are; which expert has which load is drawn
* *rank load*, the fullest rank's load over the mean: which experts share that rank; on batch 0
* *neighbour overlap*, how many experts adjacent tokens of a sequence share: the copying; on batch 0
* *top-k share* of the score mass: the sharpness, which leaves every choice as it is; every batch

Solving for a batch takes the rows at its beginning that hold ``SOLVED_SCORES`` scores: all of it up to 262,144 tokens
of 256 experts. A larger batch meets its targets on that part, and on the rest within sampling error (a peak load of 5
among 1,024 experts, top-8: a standard deviation of 2 %, more where neighbours are alike); native's
routing says what all rows together came to.

*Balanced* traffic, a peak load of 1, is dealt: each expert gets exactly T K / E pairs, as under Megatron-Core's
``moe_router_force_load_balancing``, TensorRT-LLM's ``--perfect_router`` and in most tables of kernels.

A *pattern* is another benchmark's traffic. ``power_law_1.01`` and ``power_law_1.2`` are aiconfigurator's
(ai-dynamo/aiconfigurator, ``power_law_logits_v3``):
tokens of an expert are drawn from a power law with that exponent between 1 and 0.8 T (0.01 and 2 where T K <= E) and
scaled to T K in all. It also gives rank 0 the most, which depends on the number of ranks and is left out here.
``W0_balanced`` to ``W7_burst`` are Megatron-LM's (``token_imbalance``), which are to the token those of the source.

Which of a power law's experts a token takes is chance, from our own stream: loads are those of the source in
distribution, not to the token. Scores are a softmax of noise plus what keeps the choice where it belongs.

Shapes: T = tokens of all ranks, E = experts, K = top_k.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial

import numpy as np
from numpy.typing import NDArray

from moe_ep_bench.errors import UserError
from moe_ep_bench.metrics import shared_by_neighbours
from moe_ep_bench.policies.lazy import torch
from moe_ep_bench.workload import solving, token_imbalance
from moe_ep_bench.workload.batch import Workload, balanced_scores
from moe_ep_bench.workload.scores import (
    Chunks,
    Run,
    Stream,
    chosen_experts,
    expert_loads,
    generator,
    gumbel_noise,
    row_numbers,
    rows_at_once,
    softmax,
)
from moe_ep_bench.workload.token_imbalance import TOKEN_IMBALANCE

# Targets are solved for on so many scores of a batch at most: half a GiB of noise.
SOLVED_SCORES = 2**26
# Sharpness is solved on at most so many rows; where groups are compared by score, in so many rounds with the strength.
_SHARPNESS_ROWS, _ROUNDS_WITH_GROUPS = 4096, 3
# The copying is solved on so many rows, twice, under a popularity that is solved on so many at least.
_COPYING_ROWS, _LEAST_TOKENS = (2048, 8192), 1024


@dataclass(frozen=True, eq=False)
class SyntheticWorkload(Workload):
    """Batches solved to targets; a target that is None is left to chance. All sequences but the last are as long.

    Attributes: those of ``config.SyntheticConfig``, and
        num_experts, top_k, num_groups, top_groups: of the model.
        num_tokens: tokens in a batch, all ranks together.
        expert_loads: of each expert in its place, in relation to each other; in place of any other skew.
        rank_load: (number of contiguous ranks, load of the fullest over the mean).
        cuts: what Token Drop leaves of the loads, all ranks' tokens together: (capacity factor, dropped share, load of
            the fullest rank over the mean before the cut); with a peak load, one of factor 1 and one above it.
        peak_load: load of the busiest expert over the mean; 1 = every expert gets as many pairs.
        pattern: one of ``targets.PATTERNS`` in place of targets.
        or_chance: where independent tokens already share more, take these.

    Raises:
        ValueError: fields that do not go together. What a batch's noise does not allow is found when a batch is made,
            and the message gives what can be met.
    """

    num_experts: int
    top_k: int
    num_tokens: int
    num_batches: int
    sequence_length: int
    seed: int
    peak_load: float | None = None
    rank_load: tuple[int, float] | None = None
    expert_loads: tuple[float, ...] | None = None
    cuts: tuple[tuple[float, float, float | None], ...] = ()
    topk_share: float | None = None
    neighbour_overlap: float | None = None
    pattern: str | None = None
    or_chance: bool = False
    num_groups: int | None = None
    top_groups: int | None = None
    num_history: int = 0

    def __post_init__(self) -> None:
        if self.pattern is not None and self.num_groups is not None:
            raise UserError(f"skew: {self.pattern} knows no groups of experts; the model has {self.num_groups}")
        if self.pattern in TOKEN_IMBALANCE:
            token_imbalance.check(self.pattern, self.num_experts, self.top_k)
        most = self.num_experts / self.top_k
        if self.peak_load is not None and not 1 <= self.peak_load <= most:
            raise UserError(f"peak_load: expected 1 to {most:g} (experts / top_k), got {self.peak_load:g}")
        if self.expert_loads is not None:
            if self.peak_load is not None or self.rank_load is not None:
                raise UserError("skew_from: says every expert's load; expected no peak_load and no rank_load")
            if len(self.expert_loads) != self.num_experts:
                got = len(self.expert_loads)
                raise UserError(f"skew_from: expected counts of {self.num_experts} experts, got {got}")
            if (peak := self.num_experts * max(self.expert_loads) / sum(self.expert_loads)) > most:
                raise UserError(f"skew_from: expected a peak load up to {most:g} (experts / top_k), got {peak:.4g}")
        if self.rank_load is not None and not self.is_balanced:
            self._check_rank_load(*self.rank_load)
        self._check_topk_share()
        if self.is_balanced and self.neighbour_overlap is not None:
            raise UserError("neighbour_overlap: expected none under balanced loads, whose experts are dealt in turn")
        if self.neighbour_overlap is not None and self.sequence_length == 1:
            expected = "a sequence_length of at least 2"
            raise UserError(f"neighbour_overlap: expected {expected}, got 1: no token has neighbours")

    def _check_rank_load(self, num_ranks: int, load: float) -> None:
        if self.num_experts % num_ranks:
            expected = f"a number of ranks from 2 on that divides the {self.num_experts} experts"
            raise UserError(f"rank_load: expected {expected}, got {num_ranks}")
        if load > num_ranks:
            raise UserError(f"rank_load: expected a load of 1 to {num_ranks} (the ranks), got {load:g}")
        if self.num_groups is not None and self.cuts:
            raise UserError(
                f"rank_load, cuts: expected one of them for a model with {self.num_groups} groups of experts"
            )

    @property
    def is_balanced(self) -> bool:
        """Every expert gets as many pairs."""
        return self.peak_load == 1

    # ---- batches -----------------------------------------------------------------------------------------------------

    def sequence_lengths(self, index: int) -> NDArray[np.int64]:
        return np.diff([*range(0, self.num_tokens, self.sequence_length), self.num_tokens])

    def make_scores(self, index: int, runs: Sequence[Run]) -> Iterator[NDArray[np.float32]]:
        if self.pattern is not None:
            row_T, first = row_numbers(runs), 0
            for noise_TE in gumbel_noise(self.seed, index, runs, self.num_experts):
                yield softmax(self._patterned(noise_TE, index, row_T[first : first + len(noise_TE)]))
                first += len(noise_TE)
            return
        bias_E, sharpness = self._recipe(index)
        row_T, first = row_numbers(runs), 0
        for noise_TE in self._noise(index, runs):
            logits_TE = noise_TE + bias_E
            scores_TE = softmax(logits_TE if sharpness == 1 else sharpness * logits_TE)
            if self.is_balanced:
                rows = torch.from_numpy(row_T[first : first + len(scores_TE)])
                groups = self.num_groups, self.top_groups
                scores_TE = balanced_scores(torch.from_numpy(scores_TE), self.top_k, *groups, row_T=rows).numpy()
            yield scores_TE
            first += len(scores_TE)

    def _patterned(self, noise_TE: NDArray[np.float64], index: int, row_T: NDArray[np.int64]) -> NDArray[np.float64]:
        """Logits of some tokens of batch ``index`` under the pattern, from their noise."""
        assert self.pattern is not None
        if self.pattern not in TOKEN_IMBALANCE:
            inside_TE = inside_pattern(self.pattern, index, row_T, *self._sizes)
            return noise_TE + INSIDE * inside_TE
        ids_TK, gates_TK = token_imbalance.routed(self.pattern, index, *self._sizes)
        np.put_along_axis(noise_TE, ids_TK[row_T], INSIDE + np.log(gates_TK[row_T]), axis=1)
        return noise_TE

    @property
    def _sizes(self) -> tuple[int, int, int, int]:
        """What a pattern's batch depends on."""
        return self.num_experts, self.top_k, self.num_tokens, self.seed

    def routing_checksum(self, ep_size: int) -> str | None:
        """What Megatron-LM's benchmark prints of the same workload; None where this is none of its."""
        if self.pattern not in TOKEN_IMBALANCE:
            return None
        return token_imbalance.checksum(self.pattern, self.num_batches, *self._sizes, ep_size)

    def _noise(self, index: int, runs: Sequence[Run]) -> Iterator[NDArray[np.float64]]:
        """Make noise of the expert at each index, in chunks; an expert takes its noise along to its place."""
        rule = {"sequence_length": self.sequence_length, "copying": self._copying}
        for noise_TE in gumbel_noise(self.seed, index, runs, self.num_experts, **rule):
            yield noise_TE if self._wanted_loads is not None or self.rank_load is None else noise_TE[:, self._placement]

    # ---- what holds for all batches, solved on batch 0 ---------------------------------------------------------------

    @cached_property
    def _popularity(self) -> NDArray[np.float64]:
        """Standard normal numbers, float64 [E], which say how much each expert is wanted, before it has its place."""
        return generator(self.seed, Stream.POPULARITY).normal(size=self.num_experts)

    @cached_property
    def _wanted_loads(self) -> NDArray[np.float64] | None:
        """Loads of the experts in their places, in relation to each other: float64 [E]; None = by popularity."""
        if self.expert_loads is not None:
            return np.array(self.expert_loads)
        if not self.cuts or self.peak_load is None:
            return None
        load_E = solving.load_profile(
            self.num_experts, self.peak_load, {factor: share for factor, share, _ in self.cuts}
        )
        random = generator(self.seed, Stream.PLACES)
        if self.rank_load is None:
            return random.permutation(load_E)
        num_ranks, load = self.rank_load
        after = {factor: kept for factor, _, kept in self.cuts if kept is not None}
        return solving.place_for_cuts(load_E, num_ranks, {math.inf: load} | after, random)

    @cached_property
    def _copying(self) -> float:
        """The probability with which neighbours copy noise, solved under the popularity of batch 0.

        Peak loads of tokens that are alike vary more, so that popularity weighs a little less: hence a second round.
        """
        copying = 0.0
        for num_rows in _COPYING_ROWS if self.neighbour_overlap is not None else ():
            noise = self._first_noise(self._solved_part(max(self.num_tokens, _LEAST_TOKENS)), copying)
            shared = partial(self._shared, self._bias(list(noise), self._popularity), num_rows)
            copying = solving.solve_copying(shared, self.neighbour_overlap, self.top_k, or_chance=self.or_chance)
        return copying

    def _shared(self, bias_E: NDArray[np.float64], num_rows: int, copying: float) -> float:
        """Experts that neighbours share, mean over the first rows of batch 0, or of one that would have so many."""
        noise = self._first_noise(Run(0, num_rows), copying)
        map_TE = np.concatenate([chosen_experts(noise_TE + bias_E, self.selection) for noise_TE in noise])
        sequence_id_T = torch.arange(num_rows) // self.sequence_length
        pairs, num_shared = shared_by_neighbours(torch.from_numpy(map_TE), sequence_id_T)
        return num_shared / pairs

    @cached_property
    def _placement(self) -> NDArray[np.int64]:
        """Which drawn expert stands at each index, for good: int64 [E]."""
        if self.rank_load is None or self.is_balanced:
            return np.arange(self.num_experts)
        noise = list(self._first_noise(self._solved_part(self.num_tokens), self._copying))
        load_E = expert_loads(noise, self._bias(noise, self._popularity), self.selection)
        num_ranks, load = self.rank_load
        hot_rank = int(generator(self.seed, Stream.HOT_RANK).integers(num_ranks))
        if self.num_groups is not None:
            return solving.place_in_groups(load_E, num_ranks, load, hot_rank, self.num_groups)
        return solving.place_for_rank_load(load_E, num_ranks, load, hot_rank)

    def _first_noise(self, run: Run, copying: float) -> Iterator[NDArray[np.float64]]:
        """Make noise of batch 0, of the experts as drawn."""
        rule = {"sequence_length": self.sequence_length, "copying": copying}
        return gumbel_noise(self.seed, 0, [run], self.num_experts, **rule)

    def _solved_part(self, num_tokens: int) -> Run:
        """The rows that targets are solved on, of so many: all, or as many whole chunks as may be."""
        at_once = rows_at_once(self.num_experts)
        return Run(0, min(num_tokens, max(1, SOLVED_SCORES // (at_once * self.num_experts)) * at_once))

    # ---- recipes of batches ------------------------------------------------------------------------------------------

    @cached_property
    def _recipes(self) -> dict[int, tuple[NDArray[np.float64], float]]:
        """By batch the experts' log odds, float64 [E], and the sharpness."""
        return {}

    def _recipe(self, index: int) -> tuple[NDArray[np.float64], float]:
        if index in self._recipes:
            return self._recipes[index]
        noise = list(self._noise(index, [self._solved_part(self.num_tokens)]))
        popularity_E, sharpness = self._popularity, 1.0
        if self._wanted_loads is None:
            popularity_E = popularity_E[self._placement]
        # How sharp scores are has no part in choosing experts, except where groups of them are compared by score.
        for _ in range(1 if self.num_groups is None or self.topk_share is None else _ROUNDS_WITH_GROUPS):
            bias_E = self._bias(noise, popularity_E, sharpness)
            if self.topk_share is not None:
                step = -(-sum(map(len, noise)) // _SHARPNESS_ROWS)
                logits_TE = np.concatenate(noise)[::step] + bias_E
                sharpness = solving.solve_sharpness(logits_TE, self.selection, self.topk_share)
        self._recipes[index] = bias_E, sharpness
        return bias_E, sharpness

    def _bias(self, noise: Chunks, popularity_E: NDArray[np.float64], sharpness: float = 1.0) -> NDArray[np.float64]:
        """Solve for the experts' log odds."""

        def loads(bias_E: NDArray[np.float64]) -> NDArray[np.int64]:
            return expert_loads(noise, bias_E, self.selection, sharpness)

        num_tokens = sum(map(len, noise))
        if self._wanted_loads is not None:
            return solving.solve_loads(loads, self._wanted_loads * (num_tokens * self.top_k / self._wanted_loads.sum()))
        if self.peak_load is None or self.is_balanced:
            return np.zeros(self.num_experts)
        most = self.num_experts / self.top_k
        strength = solving.solve_strength(lambda by: loads(by * popularity_E), self.peak_load, num_tokens, most)
        return strength * popularity_E

    # ---- facts -------------------------------------------------------------------------------------------------------

    def describe(self) -> dict[str, object]:
        return {
            "kind": "synthetic",
            "num_batches": self.num_batches,
            "num_tokens": self.num_tokens,
            "sequence_length": self.sequence_length,
            "is_balanced": self.is_balanced,
            "tail_model": None,
            "targets": self.targets(),
        }

    def targets(self) -> dict[str, object]:
        """Targets by field; those left to chance are absent, except the peak load."""
        if self.pattern is not None:
            return {"pattern": self.pattern}
        asked = {name: getattr(self, name) for name in ("topk_share", "neighbour_overlap")}
        asked["rank_load"] = None if self.rank_load is None else {str(self.rank_load[0]): self.rank_load[1]}
        asked["cuts"] = {f"{factor:g}": [share, kept] for factor, share, kept in self.cuts} or None
        asked["expert_loads"] = None if self.expert_loads is None else list(self.expert_loads)
        return {"peak_load": self.peak_load, **{name: value for name, value in asked.items() if value is not None}}


# ---- patterns --------------------------------------------------------------------------------------------------------

INSIDE = 40.0
"""Added to logits of the experts that a token takes: above what noise differs by."""


def inside_pattern(
    pattern: str, index: int, row_T: NDArray[np.int64], num_experts: int, top_k: int, num_tokens: int, seed: int
) -> NDArray[np.bool_]:
    """Which experts some tokens of batch ``index`` take: bool [T, E], K in a row.

    Each expert's tokens stand side by side in one row of T K, cut into K rows of T: no token has one twice.

    Args:
        row_T: the tokens' numbers in the batch.
    """
    quota_E = quotas(pattern, index, num_experts, top_k, num_tokens, seed)
    place_TK = row_T[:, None] + num_tokens * np.arange(top_k)
    inside_TE = np.zeros((len(row_T), num_experts), dtype=bool)
    np.put_along_axis(inside_TE, np.searchsorted(quota_E.cumsum(), place_TK, side="right"), True, axis=1)
    return inside_TE


@lru_cache(maxsize=8)
def quotas(pattern: str, index: int, num_experts: int, top_k: int, num_tokens: int, seed: int) -> NDArray[np.int64]:
    """Tokens of every expert under a power law in batch ``index``: int64 [E], T K in all, at most T each."""
    exponent, total = float(pattern.rpartition("_")[2]), num_tokens * top_k
    least, most = (1.0, 0.8 * num_tokens) if total > num_experts else (0.01, 2.0)
    uniform_E = generator(seed, Stream.POPULARITY, index).random(num_experts)
    # The inverse of the distribution function of x ** -exponent between its ends.
    ends = np.array([least, most]) ** (1 - exponent)
    weight_E = (ends[0] + (ends[1] - ends[0]) * uniform_E) ** (1 / (1 - exponent))
    quota_E = np.minimum(np.rint(weight_E / weight_E.sum() * total), num_tokens).astype(np.int64)
    fullest_E = np.argsort(-weight_E, kind="stable")
    while missing := total - int(quota_E.sum()):  # Pairs that rounding and the limit of T left over or added.
        has_room_E = quota_E < num_tokens if missing > 0 else quota_E > 0
        quota_E[fullest_E[has_room_E[fullest_E]][: abs(missing)]] += np.sign(missing)
    quota_E.setflags(write=False)
    return quota_E
