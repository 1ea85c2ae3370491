"""Synthetic router scores, solved to the targets that users think in.

A token's logits are ``sharpness * (strength * popularity + noise)``. Popularity is one standard normal number for each
expert, noise a Gumbel number for each token and expert. A neighbour copies each expert's noise from the token before it
with one probability, so that texts share experts as real ones do, and each token alone is distributed as before. Each
target has a number of the recipe to itself (``solving``), so they are met one after the other:

* *peak load*, the busiest expert's load over the mean: the strength of popularity
* *expert loads*, as they were counted: each expert's log odds, in place of popularity
* *cuts*, what capacities drop and leave on the fullest rank: loads that have these numbers and the peak load
  (``solving.load_profile``, ``place_for_cuts``), met as expert loads are; which expert has which load is drawn
* *rank load*, the fullest rank's load over the mean: which experts share that rank
* *neighbour overlap*, how many experts adjacent tokens of a sequence share: the copying
* *top-k share* of the score mass: the sharpness, which leaves every choice as it is

Targets are the *traffic's*, in the long run: the recipe is solved once, and every batch's tokens are drawn from it. A
batch then has the traffic's loads within the chance of its tokens, and a peak of its own, the greater the fewer they
are; native's routing says what it came to. Loads of experts are expected values (``long_run``), exact to a thousandth.
What has no such form is solved on a reference draw, apart from the batches: the sharpness on ``_SHARPNESS_ROWS`` rows,
the copying on ``_COPYING_ROWS``, and loads of models that route by groups on ``_REFERENCE_ROWS``: with 256 experts,
top-8, chance moves their peak by a standard deviation of 1.6 % at most, for the draw's own unevenness is taken off.

*Batch peak load* is solved in each batch instead: its own busiest expert has that load, and the other targets are met
in batches too, rank load and neighbour overlap in batch 0. That takes the rows at its beginning that hold
``SOLVED_SCORES`` scores: all of it up to 262,144 tokens of 256 experts. Few tokens have more by chance alone, which is
refused.

*Balanced* traffic, a peak load of 1, is dealt: each expert gets exactly T K / E pairs, as under Megatron-Core's
``moe_router_force_load_balancing``, TensorRT-LLM's ``--perfect_router`` and in most tables of kernels.

A *pattern* is another benchmark's traffic. ``power_law_1.01`` and ``power_law_1.2`` are aiconfigurator's
(ai-dynamo/aiconfigurator, ``power_law_logits_v3``):
tokens of an expert are drawn from a power law with that exponent between 1 and 0.8 T (0.01 and 2 where T K <= E) and
scaled to T K in all. It also gives rank 0 the most, which depends on the number of ranks and is left out here.
``W0_balanced`` to ``W7_burst`` are Megatron-LM's (``token_imbalance``), which are to the token those of the source.

Which of a power law's experts a token takes is chance, from our own stream: loads are those of the source in
distribution, not to the token. Scores are a softmax of noise plus what keeps the choice where it belongs.

*Matched* batches are samples (``Matched``): few tokens would leave experts more unequal than those do that they stand
for, and what balances them would look worse than it is. So the log odds are solved for again in each half of every
rank's tokens, a micro-batch: loads are the traffic's within the chance of all tokens, each expert's to two tokens.

Shapes: T = tokens of all ranks, E = experts, K = top_k, H = halves.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache, partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from moe_ep_bench.errors import UserError
from moe_ep_bench.metrics import shared_by_neighbours
from moe_ep_bench.policies.lazy import torch
from moe_ep_bench.workload import solving, token_imbalance
from moe_ep_bench.workload.batch import Workload, balanced_scores
from moe_ep_bench.workload.long_run import long_run_loads
from moe_ep_bench.workload.motion import Motion, overlap
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

# A batch peak load is solved for on so many scores of a batch at most: half a GiB of noise.
SOLVED_SCORES = 2**26
# Rows of the reference draw on which loads are solved, where groups of experts are compared by score.
_REFERENCE_ROWS = 2**15
# Sharpness is solved on at most so many rows; where groups are compared by score, in so many rounds with the strength.
_SHARPNESS_ROWS, _ROUNDS_WITH_GROUPS = 4096, 3
# The copying is solved on so many rows. With a batch peak load that is done twice: tokens that are alike have more of a
# peak by chance, and so less of a popularity, which is solved on so many tokens at least.
_COPYING_ROWS, _LEAST_TOKENS = (2048, 8192), 1024
# Of matched halves: rounds of solving, scores of a thread at once, and the least load over the mean.
_MATCHING_ROUNDS, _SOLVED_AT_ONCE, _COLDEST = 6, 2**19, 1e-3


class Recipe(NamedTuple):
    """What makes scores of noise: log odds of the experts as drawn, float64 [E], and the sharpness."""

    bias_E: NDArray[np.float64]
    sharpness: float


class Matched(NamedTuple):
    """Of whose tokens a batch is a sample: how many there are, and the ranks that have these."""

    num_tokens: int
    num_sources: int


@dataclass(frozen=True, eq=False)
class SyntheticWorkload(Workload):
    """Batches solved to targets; a target that is None is left to chance. All sequences but the last are as long.

    Attributes: those of ``config.SyntheticConfig``, and
        num_experts, top_k, num_groups, top_groups: of the model.
        num_tokens: tokens in a batch, all ranks together.
        expert_loads: of each expert in its place, in relation to each other; in place of any other skew.
        rank_load: (number of contiguous ranks, load of the fullest over the mean); takes some skew, for without one all
            experts are as busy in the long run.
        cuts: what Token Drop leaves of the loads, all ranks' tokens together: (capacity factor, dropped share, load of
            the fullest rank over the mean before the cut); with a peak load, one of factor 1 and one above it.
        peak_load: load of the busiest expert over the mean, in the long run; 1 = every expert gets as many pairs.
        batch_peak_load: the same of each batch, in place of ``peak_load``.
        motion: of popularity over batches; takes some.
        pattern: one of ``targets.PATTERNS`` in place of targets.
        or_chance: where independent tokens already share more, take these.
        matched: see the module's docstring; None = no tokens stand for others, or their chance is theirs.

    Raises:
        ValueError: fields that do not go together. What cannot be met is found when a batch is made, and the message
            gives what can.
    """

    num_experts: int
    top_k: int
    num_tokens: int
    num_batches: int
    sequence_length: int
    seed: int
    peak_load: float | None = None
    batch_peak_load: float | None = None
    rank_load: tuple[int, float] | None = None
    expert_loads: tuple[float, ...] | None = None
    cuts: tuple[tuple[float, float, float | None], ...] = ()
    topk_share: float | None = None
    neighbour_overlap: float | None = None
    motion: Motion | None = None
    pattern: str | None = None
    or_chance: bool = False
    matched: Matched | None = None
    num_groups: int | None = None
    top_groups: int | None = None
    num_history: int = 0

    def __post_init__(self) -> None:
        if self.pattern is not None and self.num_groups is not None:
            raise UserError(f"{self.pattern} knows no groups of experts; the model has {self.num_groups}", "skew")
        if self.pattern in TOKEN_IMBALANCE:
            token_imbalance.check(self.pattern, self.num_experts, self.top_k)
        most = self.num_experts / self.top_k
        peaks = {name: getattr(self, name) for name in ("peak_load", "batch_peak_load")}
        for name, load in peaks.items():
            if load is not None and not 1 <= load <= most:
                raise UserError(f"expected 1 to {most:g} (experts / top_k), got {load:g}", name)
        if None not in peaks.values():
            raise UserError("expected one of the two, got both", "peak_load", "batch_peak_load")
        if self.expert_loads is not None:
            if self.rank_load is not None or any(peaks.values()):
                raise UserError("says every expert's load; expected no peak_load and no rank_load", "skew_from")
            if len(self.expert_loads) != self.num_experts:
                got = len(self.expert_loads)
                raise UserError(f"expected counts of {self.num_experts} experts, got {got}", "skew_from")
            if (peak := self.num_experts * max(self.expert_loads) / sum(self.expert_loads)) > most:
                raise UserError(f"expected a peak load up to {most:g} (experts / top_k), got {peak:.4g}", "skew_from")
        if self.rank_load is not None and not self.is_balanced:
            self._check_rank_load(*self.rank_load)
        self._check_motion()
        self._check_topk_share()
        if self.is_balanced and self.neighbour_overlap is not None:
            raise UserError("expected none under balanced loads, whose experts are dealt in turn", "neighbour_overlap")
        if self.neighbour_overlap is not None and self.sequence_length == 1:
            expected = "a sequence_length of at least 2"
            raise UserError(f"expected {expected}, got 1: no token has neighbours", "neighbour_overlap")

    def _check_motion(self) -> None:
        if self.motion is not None and (self._is_even or self.pattern is not None):
            raise UserError(
                "expected a skew beside it that can move: a peak_load, a calibrated skew or counts", "motion"
            )

    def _check_rank_load(self, num_ranks: int, load: float) -> None:
        if self.num_experts % num_ranks:
            expected = f"a number of ranks from 2 on that divides the {self.num_experts} experts"
            raise UserError(f"expected {expected}, got {num_ranks}", "rank_load")
        if load > 1 and self._is_even:
            why = "without one all experts are as busy in the long run"
            raise UserError(f"expected a peak_load beside it, for {why}; got {load:g} alone", "rank_load")
        if load > num_ranks:
            raise UserError(f"expected a load of 1 to {num_ranks} (the ranks), got {load:g}", "rank_load")
        if self.num_groups is not None and self.cuts:
            raise UserError(
                f"expected one of them for a model with {self.num_groups} groups of experts", "rank_load", "cuts"
            )

    @property
    def is_balanced(self) -> bool:
        """Every expert gets as many pairs."""
        return 1 in (self.peak_load, self.batch_peak_load)

    @property
    def _is_even(self) -> bool:
        """No expert is more popular than another."""
        skewed = self.peak_load, self.batch_peak_load, self.expert_loads
        return self.is_balanced or all(one is None for one in skewed)

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
        recipe, row_T, first = self._recipe(index), row_numbers(runs), 0
        place_E, sharpness = self._places(index), recipe.sharpness
        bias_HE, half_T = self._matched(index)
        bias_HE = bias_HE[:, place_E]
        rule = {"sequence_length": self.sequence_length, "copying": self._copying}
        for noise_TE in gumbel_noise(self.seed, index, runs, self.num_experts, **rule):
            logits_TE = noise_TE[:, place_E]  # An expert takes its noise along to its place.
            logits_TE = logits_TE + (bias_HE[half_T[row_T[first : first + len(noise_TE)]]] if half_T.any() else bias_HE)
            scores_TE = softmax(logits_TE if sharpness == 1 else sharpness * logits_TE)
            if self.is_balanced:
                rows = torch.from_numpy(row_T[first : first + len(scores_TE)])
                groups = self.num_groups, self.top_groups
                scores_TE = balanced_scores(torch.from_numpy(scores_TE), self.top_k, *groups, row_T=rows).numpy()
            yield scores_TE
            first += len(scores_TE)

    def loads_without_scores(self, index: int) -> NDArray[np.int64] | None:
        # Groups are compared by scores.
        if self.pattern is not None or self.is_balanced or self.num_groups is not None:
            return None
        bias_HE, half_T = self._matched(index)
        if half_T.any():
            return None
        rule = {"sequence_length": self.sequence_length, "copying": self._copying}
        noise = gumbel_noise(self.seed, index, [Run(0, self.num_tokens)], self.num_experts, **rule)
        # A chunk at a time, since a batch may be larger than memory.
        counts = [expert_loads([noise_TE], bias_HE[0], self.selection) for noise_TE in noise]
        return np.sum(counts, axis=0)[self._places(index)]

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

    # ---- what holds for all batches ----------------------------------------------------------------------------------

    @cached_property
    def _popularity(self) -> NDArray[np.float64]:
        """Standard normal numbers, float64 [E], which say how much each expert is wanted, before it has its place."""
        return generator(self.seed, Stream.POPULARITY).normal(size=self.num_experts)

    @cached_property
    def _wanted_loads(self) -> NDArray[np.float64] | None:
        """Loads over the mean of the experts in their places: float64 [E]; None = by popularity."""
        if self.expert_loads is not None:
            return np.array(self.expert_loads) / np.mean(self.expert_loads)
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
        """The probability with which neighbours copy noise."""
        copying, of_batches, overlap = 0.0, self.batch_peak_load is not None, self.neighbour_overlap
        if overlap is None:
            return copying
        for num_rows in _COPYING_ROWS[0 if of_batches else 1 :]:
            noise = self._solved_noise(0, copying, _LEAST_TOKENS)
            shared = partial(self._shared, self._bias(noise), num_rows)
            copying = solving.solve_copying(shared, overlap, self.top_k, or_chance=self.or_chance)
        return copying

    def _shared(self, bias_E: NDArray[np.float64], num_rows: int, copying: float) -> float:
        """Experts that neighbours share, mean over so many rows."""
        noise = self._drawn_noise(0, num_rows, copying)
        map_TE = np.concatenate([chosen_experts(noise_TE + bias_E, self.selection) for noise_TE in noise])
        sequence_id_T = torch.arange(num_rows) // self.sequence_length
        pairs, num_shared = shared_by_neighbours(torch.from_numpy(map_TE), sequence_id_T)
        return num_shared / pairs

    @cached_property
    def _placement(self) -> NDArray[np.int64] | slice:
        """Which drawn expert stands at each index, for good: int64 [E], or a slice of all as they were drawn."""
        if self.rank_load is None or self._is_even or self._wanted_loads is not None:
            return slice(None)
        num_ranks, load = self.rank_load
        # Whole numbers tie, and add up, alike on all machines.
        load_E = np.rint(1e6 * self._drawn_loads).astype(np.int64)
        hot_rank = int(generator(self.seed, Stream.HOT_RANK).integers(num_ranks))
        if self.num_groups is not None:
            return solving.place_in_groups(load_E, num_ranks, load, hot_rank, self.num_groups)
        return solving.place_for_rank_load(load_E, num_ranks, load, hot_rank)

    def _places(self, index: int) -> NDArray[np.int64] | slice:
        """Which drawn expert stands at each index in a batch, which moves where popularity does."""
        if self.motion is None:
            return self._placement
        place_E = np.arange(self.num_experts)[self._placement]
        return place_E[self.motion.places(index, self._recipe(0).bias_E[place_E], self.seed, self.num_groups)]

    @property
    def load_overlap(self) -> float | None:
        """What neighbouring batches share of their loads in the long run (``motion.overlap``); None = nothing moves."""
        if self.motion is None or self.num_batches == 1:
            return None
        return overlap(np.array([self._drawn_loads[self._places(index)] for index in range(self.num_batches)]))

    # ---- recipes -----------------------------------------------------------------------------------------------------

    @cached_property
    def _recipes(self) -> dict[int, Recipe]:
        """By batch, where these have a peak load of their own; else all batches' under 0."""
        return {}

    def _recipe(self, index: int) -> Recipe:
        index = 0 if self.batch_peak_load is None else index
        if index not in self._recipes:
            self._recipes[index] = self._solved(self._solved_noise(index, self._copying))
        return self._recipes[index]

    def _solved(self, noise: Chunks) -> Recipe:
        if self.topk_share is None:
            return Recipe(self._bias(noise), 1.0)
        sharpness, step = 1.0, -(-sum(map(len, noise)) // _SHARPNESS_ROWS)
        # How sharp scores are has no part in choosing experts, except where groups of them are compared by score.
        for _ in range(1 if self.num_groups is None else _ROUNDS_WITH_GROUPS):
            bias_E = self._bias(noise, sharpness)
            logits_TE = np.concatenate(noise)[::step] + bias_E
            sharpness = solving.solve_sharpness(logits_TE, self.selection, self.topk_share)
        return Recipe(bias_E, sharpness)

    def _bias(self, noise: Chunks, sharpness: float = 1.0) -> NDArray[np.float64]:
        """Solve for the log odds of the experts as drawn."""
        if self._is_even:
            return np.zeros(self.num_experts)
        loads = partial(self._loads, noise, sharpness=sharpness)
        most, of_batches = self.num_experts / self.top_k, self.batch_peak_load is not None
        num_tokens = sum(map(len, noise)) if of_batches or self.num_groups is not None else None
        if self._wanted_loads is not None:
            return solving.solve_loads(loads, self._wanted_loads, most, num_tokens)
        of_strength = cache(lambda strength: loads(strength * self._popularity))
        # In the long run, unskewed traffic has no peak: a reference draw that has one has it by chance.
        chance_E = 0.0 if of_batches else of_strength(0.0) - 1
        peak_load = self.batch_peak_load or self.peak_load
        assert peak_load is not None  # else the popularity is even, or loads are wanted
        strength = solving.solve_strength(
            lambda strength: of_strength(strength) - chance_E,
            peak_load,
            most,
            num_tokens if of_batches else None,
        )
        return strength * self._popularity

    def _loads(self, noise: Chunks | None, bias_E: NDArray[np.float64], sharpness: float) -> NDArray[np.float64]:
        """Loads over the mean, float64 [E]: counted under some noise, or expected where there is a closed form.

        Args:
            noise: None = that of the recipe of batch 0, which is not drawn again for what was counted before.
        """
        if self.batch_peak_load is not None:
            return self._counted(noise or self._solved_noise(0, self._copying), bias_E, sharpness)
        if self.num_groups is None:
            return long_run_loads(bias_E, self.top_k)
        key = (bias_E + 0.0).tobytes(), sharpness  # -0.0 is 0.0
        if key not in self._counted_loads:
            self._counted_loads[key] = self._counted(noise or self._solved_noise(0, 0.0), bias_E, sharpness)
        return self._counted_loads[key]

    @cached_property
    def _counted_loads(self) -> dict[tuple[bytes, float], NDArray[np.float64]]:
        """Of the reference draw."""
        return {}

    def _counted(self, noise: Chunks, bias_E: NDArray[np.float64], sharpness: float) -> NDArray[np.float64]:
        load_E = expert_loads(noise, bias_E, self.selection, sharpness)
        return load_E / load_E.mean()

    @cached_property
    def _drawn_loads(self) -> NDArray[np.float64]:
        """Loads over the mean that batch 0's recipe gives the experts as drawn: float64 [E]."""
        if self._is_even:
            return np.ones(self.num_experts)
        recipe = self._recipe(0)
        return self._loads(None, recipe.bias_E, recipe.sharpness)

    def _matched(self, index: int) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
        """Log odds of the experts as drawn, float64 [H, E], and the half of each token, int64 [T]: one where none is
        matched."""
        if self.matched is None or self.is_balanced or self.batch_peak_load is not None:
            return self._recipe(index).bias_E[None], np.zeros(0, dtype=np.int64)
        if index not in self._halves:
            self._halves[index] = self._solved_halves(index, self.matched)
        return self._halves[index], self._halves_of(index)

    def _solved_halves(self, index: int, of: Matched) -> NDArray[np.float64]:
        recipe, most = self._recipe(index), self.num_experts / self.top_k
        rule = {"sequence_length": self.sequence_length, "copying": self._copying}
        runs = [Run(0, self.num_tokens)]
        noise_TE = np.concatenate(list(gumbel_noise(self.seed, index, runs, self.num_experts, **rule)))
        bias_HE = []
        for half, wanted_E in enumerate(self._wanted_of_halves(index, of)):
            here_TE = noise_TE[self._halves_of(index) == half]
            noise = np.array_split(here_TE, -(-here_TE.size // _SOLVED_AT_ONCE))
            loads = partial(self._counted, noise, sharpness=recipe.sharpness)
            given = len(here_TE), recipe.bias_E, _MATCHING_ROUNDS
            bias_HE.append(solving.solve_loads(loads, wanted_E, most, *given))
        return np.array(bias_HE)

    def _wanted_of_halves(self, index: int, of: Matched) -> NDArray[np.float64]:
        """Loads over the mean that chance gives the experts as drawn in each half of all tokens: float64 [H, E]."""
        random, most = generator(self.seed, Stream.MATCHED, index), self.num_experts / self.top_k
        spread_E = np.sqrt(of.num_tokens / 2 / most * self._long_run_loads)
        wanted_HE = self._long_run_loads * np.maximum(1 + random.normal(size=(2, self.num_experts)) / spread_E, 0)
        return wanted_HE / wanted_HE.mean(axis=1, keepdims=True)

    def matched_loads(self, index: int) -> NDArray[np.float64] | None:
        if self.matched is None or self.is_balanced or self.batch_peak_load is not None:
            return None
        return self._wanted_of_halves(index, self.matched).mean(axis=0)[self._places(index)]

    @cached_property
    def _halves(self) -> dict[int, NDArray[np.float64]]:
        """Log odds by batch."""
        return {}

    @cached_property
    def _long_run_loads(self) -> NDArray[np.float64]:
        """Of the experts as drawn, over the mean and above 0: float64 [E]."""
        load_E = self._drawn_loads
        if self._wanted_loads is None and self.num_groups is not None and not self._is_even:
            # Those of a reference draw have its own unevenness.
            load_E = load_E - self._loads(None, np.zeros(self.num_experts), self._recipe(0).sharpness) + 1
        load_E = np.maximum(load_E, _COLDEST)
        return load_E / load_E.mean()

    def _halves_of(self, index: int) -> NDArray[np.int64]:
        """Which half of its rank's tokens each of a batch's is in: int64 [T]."""
        return self._once(("half", index), lambda: self._halves_dealt(index))

    def _halves_dealt(self, index: int) -> NDArray[np.int64]:
        assert self.matched is not None
        _, start_P, rank_P = self._dealt(index, self.matched.num_sources, None)
        rank_T = np.repeat(rank_P, np.diff(start_P))
        order_T = np.argsort(rank_T, kind="stable")
        tokens_R = np.bincount(rank_T, minlength=self.matched.num_sources)
        half_T = np.empty(len(rank_T), dtype=np.int64)
        half_T[order_T] = np.concatenate([2 * np.arange(number) >= number for number in tokens_R])
        return half_T

    def _solved_noise(self, index: int, copying: float, least: int = 0) -> list[NDArray[np.float64]]:
        """The noise that recipes are solved on: of the reference draw as many rows as it takes, or a batch's own.

        Args:
            index: of a batch with a peak load of its own: as many whole chunks as may be, or all.
            least: as many tokens as the batch has at least, or would have.
        """
        if self.batch_peak_load is not None:
            at_once = rows_at_once(self.num_experts)
            most = max(1, SOLVED_SCORES // (at_once * self.num_experts)) * at_once
            return list(self._drawn_noise(index, min(max(self.num_tokens, least), most), copying))
        if self.num_groups is not None and not self._is_even:
            return list(self._drawn_noise(0, _REFERENCE_ROWS, 0.0))
        return list(self._drawn_noise(0, 0 if self.topk_share is None else _SHARPNESS_ROWS, 0.0))

    def _drawn_noise(self, index: int, num_rows: int, copying: float) -> Iterator[NDArray[np.float64]]:
        """Make the first rows of a batch's noise, or of the reference draw's, of the experts as drawn."""
        stream = Stream.REFERENCE if self.batch_peak_load is None else Stream.NOISE
        rule = {"sequence_length": self.sequence_length, "copying": copying, "stream": stream}
        return gumbel_noise(self.seed, index, [Run(0, num_rows)], self.num_experts, **rule)

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
        asked["motion"] = None if self.motion is None else {self.motion.kind: self.motion.batches}
        peak = (
            {"peak_load": self.peak_load} if self.batch_peak_load is None else {"batch_peak_load": self.batch_peak_load}
        )
        return {**peak, **{name: value for name, value in asked.items() if value is not None}}


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
