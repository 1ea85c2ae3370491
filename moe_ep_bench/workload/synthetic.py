"""Router scores solved to the targets that users think in.

A token's logits are the experts' popularity (``popularity``) plus noise (``noise``). Each target
has one number of the recipe to itself, so they are met one after the other:

* *peak load*, the busiest expert's load over the mean: how strongly popularity weighs; every batch
* *expert loads*, as they were counted: each expert's popularity, in place of the two beside it; every batch
* *rank load*, the fullest rank's load over the mean: which experts share that rank; on batch 0
* *neighbour overlap*, how many experts adjacent tokens of a sequence share: the correlation of their
  noise; once per workload, on simulated pairs
* *top-k share* or *entropy*, how sharp the scores are: a factor on all logits, which leaves every
  choice as it is; every batch

What is solved for every batch is solved on the rows at its beginning that hold ``SOLVED_SCORES`` scores: on all of
it up to 262,144 tokens of 256 experts. A larger batch meets its targets on that part, and on the rest within sampling
error (a peak load of 5 among 1,024 experts, top-8: a standard deviation of 2 %, more where neighbours are alike);
``achieved`` says what all rows together came to.

Skew can move: with ``drift`` popularity changes from batch to batch, with ``burst_every`` every so
many batches have another peak load.

Shapes: T = tokens of all ranks, E = experts, K = top_k.
"""

from __future__ import annotations

import math
import os
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import chain, islice
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from moe_ep_bench.errors import UserError
from moe_ep_bench.workload.noise import CorrelatedNoise, HeldNoise, Noise, solve_correlation
from moe_ep_bench.workload.popularity import drawn_popularity, log_odds, placed, placed_for_rank_load
from moe_ep_bench.workload.randomness import Run, Stream, generator, rows_at_once, separate_ties
from moe_ep_bench.workload.skew import TopK
from moe_ep_bench.workload.workload import Workload

# A batch's peak load is met to within this share of the target, or to one token.
TOLERANCE = 0.01
# Targets are solved for on so many scores of a batch at most: half a GiB of noise.
SOLVED_SCORES = 2**26
# A row of logits that spans more is squeezed to this, which keeps its order: exp(-80) / E is a
# normal float32, where exp(-100) would be one of many zeros.
MAX_LOGIT_SPAN = 80.0
# Sharpness is solved on at most so many rows of a batch, to within this.
_SHARPNESS_ROWS, _SHARPNESS_TOLERANCE = 4096, 1e-4
_ROUNDS_WITH_GROUPS = 3
# Of so many batches it is kept what was solved for, and where their sequences lie in the stream.
_RECIPES_KEPT, _NOISES_KEPT = 64, 4
# Between flat and one-hot beyond float32, in any case.
_LEAST_FACTOR, _GREATEST_FACTOR = 1e-4, 1e4
_GREATEST_STRENGTH = 1e6
# Of loads that are solved for expert by expert; and log odds that no noise outweighs.
_MOST_ROUNDS, _NEVER = 50, 60.0

# Noise of rows in order, float64 [some rows, E] each.
Chunks = list[NDArray[np.float64]]


class Recipe(NamedTuple):
    """What makes a batch's scores from its noise.

    Attributes:
        bias_E: float64, the experts' log odds.
        factor: on all logits.
    """

    bias_E: NDArray[np.float64]
    factor: float

    def scores(self, noise_TE: NDArray[np.float64]) -> NDArray[np.float32]:
        """Router scores, float32 [T, E]."""
        logits_TE = noise_TE + self.bias_E
        return softmax(logits_TE if self.factor == 1 else self.factor * logits_TE)


class GeneratedWorkload(Workload):
    """Batches of sequences that are all as long, but for the last of a batch, and follow no recording."""

    sequence_length: int

    @abstractmethod
    def targets(self) -> dict[str, object]:
        """What was asked for, by field; what was left to chance is None or absent."""

    @abstractmethod
    def _in_words(self, achieved: Mapping[str, Any]) -> str:
        """The targets, each with what was achieved where that is known."""

    def sequence_lengths(self, index: int) -> NDArray[np.int64]:
        return np.diff([*range(0, self.num_tokens, self.sequence_length), self.num_tokens])

    def describe(self) -> dict[str, object]:
        achieved = self.achieved()
        return {
            "kind": "synthetic",
            "description": (
                f"{self._in_words(achieved)}, {self.num_experts} experts, top-{self.top_k}, {self.num_batches} x "
                f"{self.num_tokens} tokens in sequences of {self.sequence_length}, seed {self.seed}"
            ),
            "tail_model": None,
            "targets": self.targets(),
            "achieved": achieved,
            "recording": None,
        }


@dataclass(frozen=True, eq=False)
class SyntheticWorkload(GeneratedWorkload):
    """Batches solved to targets; a target that is None is left to chance.

    Attributes: those of ``config.SyntheticConfig``, and
        num_experts, top_k, num_groups, top_groups: of the model.
        num_tokens: tokens in a batch, all ranks together.
        expert_loads: of each expert in its place, in relation to each other; in place of any other skew.
        rank_load: (number of contiguous ranks, load of the fullest over the mean), in place of a ``placement``.
        or_chance: where independent tokens already share more, take these; ``shares_by_chance`` says so.

    Raises:
        ValueError: fields that do not go together. What a batch's noise does not allow is found when a batch is made,
            and the message gives what can be met.
    """

    num_experts: int
    top_k: int
    num_tokens: int
    num_batches: int
    sequence_length: int
    peak_load: float | None
    seed: int
    family: str = "lognormal"
    placement: str = "scattered"
    rank_load: tuple[int, float] | None = None
    expert_loads: tuple[float, ...] | None = None
    topk_share: float | None = None
    entropy: float | None = None
    neighbour_overlap: float | None = None
    or_chance: bool = False
    drift: float = 0.0
    burst_every: int | None = None
    burst_peak_load: float | None = None
    num_groups: int | None = None
    top_groups: int | None = None

    def __post_init__(self) -> None:
        self._check_skew()
        self._check_sharpness()
        if self.neighbour_overlap is not None and self.sequence_length == 1:
            raise UserError(
                "neighbour_overlap: expected a sequence_length of at least 2, got 1: no token has neighbours"
            )

    def _check_skew(self) -> None:
        most = self.num_experts / self.top_k
        for name in ("peak_load", "burst_peak_load"):
            value = getattr(self, name)
            if value is not None and not 1 <= value <= most:
                raise UserError(f"{name}: expected 1 to {most:g} (experts / top_k), got {value:g}")
        if self.family == "uniform" and (self.peak_load is not None or self.burst_every is not None):
            raise UserError("family: uniform has no skew to solve for; expected no peak_load and no burst_every")
        if self.expert_loads is not None:
            moves = self.placement != "scattered" or self.drift or self.burst_every or self.family == "uniform"
            if self.peak_load is not None or self.rank_load is not None or moves:
                raise UserError("skew_layer: says every expert's load; expected no other key of skew or placement")
            share = max(self.expert_loads) / sum(self.expert_loads)
            if share * self.top_k > 1:
                raise UserError(
                    f"skew_layer: expected at most 1 / {self.top_k} of the pairs on an expert (top_k), got {share:.3g}"
                )
        if (self.burst_every is None) != (self.burst_peak_load is None):
            raise UserError("burst_every, burst_peak_load: expected both or none")
        if self.rank_load is None:
            return
        num_ranks, load = self.rank_load
        if self.num_experts % num_ranks:
            raise UserError(
                f"rank_load: expected a number of ranks from 2 on that divides the {self.num_experts} experts, "
                f"got {num_ranks}"
            )
        if load > num_ranks:
            raise UserError(f"rank_load: expected a load of 1 to {num_ranks} (the ranks), got {load:g}")
        if self.placement != "scattered" or self.drift or self.burst_every:
            raise UserError("rank_load: places the experts itself, once; expected no placement, drift or burst_every")
        if self.num_groups is not None:
            raise UserError(
                f"rank_load: expected none for a model with {self.num_groups} groups of experts, because placing "
                "experts moves them between groups; placement can be adjacent or spread"
            )

    def _check_sharpness(self) -> None:
        if self.topk_share is not None and self.entropy is not None:
            raise UserError("topk_share, entropy: expected one of the two at most; both say how sharp scores are")
        self._check_topk_share()

    def make_scores(self, index: int, runs: Sequence[Run]) -> Iterator[NDArray[np.float32]]:
        chunks = self._noise(index, runs)
        part = self._solved_part(self.num_tokens)
        if index not in self._recipes and runs and runs[0].first == 0 and runs[0].end >= part.end:
            # The part that is solved on comes first here: it need not be made twice.
            solved = list(islice(chunks, -(-part.end // rows_at_once(self.num_experts))))
            self._solve(index, solved)
            chunks = chain(_emptied(solved), chunks)
        recipe = self._recipe(index)
        for noise_TE in chunks:
            yield recipe.scores(noise_TE)

    def _in_words(self, achieved: Mapping[str, Any]) -> str:
        def reached(value: float | None, words: str = "") -> str:
            return "" if value is None else f" ({words}{value:.3g})"

        peak_load = achieved.get("peak_load")
        if self.expert_loads is not None:
            asked = max(self.expert_loads) * self.num_experts / sum(self.expert_loads)
            words = [f"synthetic softmax scores, experts' loads as counted, peak load {asked:.3g}{reached(peak_load)}"]
        elif self.peak_load is None:
            words = [f"synthetic softmax scores, no skew asked for{reached(peak_load, 'peak load achieved ')}"]
        else:
            words = [f"synthetic softmax scores, peak load {self.peak_load:g}{reached(peak_load, 'achieved ')}"]
        if self.rank_load is not None:
            num_ranks, load = self.rank_load
            of_ranks = achieved.get("rank_load", {}).get(str(num_ranks))
            words.append(f"fullest of {num_ranks} ranks {load:g}{reached(of_ranks)}")
        for name in ("topk_share", "entropy", "neighbour_overlap"):
            if (target := getattr(self, name)) is not None:
                words.append(f"{name.replace('_', ' ')} {target:g}{reached(achieved.get(name))}")
        if self.drift:
            words.append(f"drift {self.drift:g} a batch")
        if self.burst_every is not None:
            words.append(f"every {self.burst_every}. batch a burst of {self.burst_peak_load:g}")
        return ", ".join(words)

    def targets(self) -> dict[str, object]:
        asked = {
            name: value
            for name in ("topk_share", "entropy", "neighbour_overlap", "burst_every", "burst_peak_load")
            if (value := getattr(self, name)) is not None
        }
        if self.rank_load is not None:
            asked["rank_load"] = {str(self.rank_load[0]): self.rank_load[1]}
        if self.drift:
            asked["drift"] = self.drift
        if self.expert_loads is not None:
            asked["expert_loads"] = list(self.expert_loads)
        return {"peak_load": self.peak_load, "family": self.family, "placement": self.placement, **asked}

    def _peak_load(self, index: int) -> float | None:
        is_burst = self.burst_every is not None and index % self.burst_every == self.burst_every - 1
        return self.burst_peak_load if is_burst else self.peak_load

    def _popularity(self, index: int) -> NDArray[np.float64]:
        """Standard normal popularity of the expert at each index, [E]."""
        return drawn_popularity(self.seed, self.num_experts, index, self.drift)[self._placement]

    @cached_property
    def _placement(self) -> NDArray[np.int64]:
        """Which drawn expert stands at each index. Experts have their places for good; drift changes popularity."""
        drawn_E = drawn_popularity(self.seed, self.num_experts, 0, self.drift)
        if self.rank_load is None:
            return placed(self.placement, drawn_E)
        num_ranks, load = self.rank_load
        noise = self._solved_noise(self._noises(0))
        bias_E = log_odds(self.family, drawn_E, self._strength(noise, drawn_E, 0))
        hot_rank = int(generator(self.seed, Stream.HOT_RANK).integers(num_ranks))
        return placed_for_rank_load(_loads(noise, bias_E, self.selection), num_ranks, load, hot_rank)

    def _noise(self, index: int, runs: Sequence[Run]) -> Iterator[NDArray[np.float64]]:
        """Noise of the expert at each index, in chunks."""
        for noise_TE in self._noises(index).chunks(runs):
            # An expert takes its noise along.
            is_as_drawn = self.rank_load is None and self.placement == "scattered"
            yield noise_TE if is_as_drawn else np.take(noise_TE, self._placement, axis=1)

    @cached_property
    def _noises(self) -> Callable[[int], Noise]:
        """Noise of each batch, of the experts as drawn."""
        return lru_cache(_NOISES_KEPT)(self._make_noise)

    def _make_noise(self, index: int) -> Noise:
        fields = self.seed, index, self.num_tokens, self.num_experts
        if self.neighbour_overlap is not None:
            return CorrelatedNoise(*fields, self.sequence_length, self._correlation)
        return HeldNoise(*fields) if "_keeps_noise" in self.__dict__ else Noise(*fields)

    def keep_noise(self) -> None:
        self.__dict__["_keeps_noise"] = True

    @cached_property
    def _correlation(self) -> float:
        """Solved under the popularity of batch 0; a token's own distribution does not depend on it."""
        assert self.neighbour_overlap is not None
        drawn_E = drawn_popularity(self.seed, self.num_experts, 0, self.drift)
        noise = self._solved_noise(Noise(self.seed, 0, max(self.num_tokens, 1024), self.num_experts))
        bias_E = self._bias(noise, drawn_E, 0)
        return solve_correlation(self.seed, bias_E, self.selection, self.neighbour_overlap, or_chance=self.or_chance)

    @property
    def shares_by_chance(self) -> bool:
        """Whether adjacent tokens share more experts than was asked for, as independent tokens do under this skew."""
        return self.neighbour_overlap is not None and self._correlation == 0.0

    def _solved_part(self, num_tokens: int) -> Run:
        """The rows that targets are solved on, of so many: all, or as many whole chunks as may be."""
        at_once = rows_at_once(self.num_experts)
        return Run(0, min(num_tokens, max(1, SOLVED_SCORES // (at_once * self.num_experts)) * at_once))

    def _solved_noise(self, noise: Noise) -> Chunks:
        return list(noise.chunks([self._solved_part(noise.num_tokens)]))

    @cached_property
    def _recipes(self) -> dict[int, Recipe]:
        return {}

    def _recipe(self, index: int) -> Recipe:
        if index not in self._recipes:
            self._solve(index, list(self._noise(index, [self._solved_part(self.num_tokens)])))
        return self._recipes[index]

    def _solve(self, index: int, noise: Chunks) -> None:
        """Find a batch's recipe and keep it; the oldest kept one makes room."""
        normal_E, factor = self._popularity(index), 1.0
        # How sharp scores are has no part in choosing experts, except where groups of them are compared by score.
        for _ in range(1 if self.num_groups is None or not self._has_sharpness else _ROUNDS_WITH_GROUPS):
            bias_E = self._bias(noise, normal_E, index, factor)
            factor = self._sharpness(noise, bias_E)
        if len(self._recipes) >= _RECIPES_KEPT:
            del self._recipes[next(iter(self._recipes))]
        self._recipes[index] = Recipe(bias_E, factor)

    def solve(self) -> None:
        for index in range(self.num_batches):
            self._recipe(index)

    def solved(self) -> dict[str, Any]:
        return {
            "placement": self._placement.tolist(),
            "correlation": None if self.neighbour_overlap is None else self._correlation,
            "recipes": {index: [recipe.bias_E.tolist(), recipe.factor] for index, recipe in self._recipes.items()},
        }

    def take_solved(self, solved: Mapping[str, Any]) -> None:
        self.__dict__["_placement"] = np.array(solved["placement"], dtype=np.int64)
        if self.neighbour_overlap is not None:
            self.__dict__["_correlation"] = solved["correlation"]
        for index, (bias_E, factor) in solved["recipes"].items():
            self._recipes[int(index)] = Recipe(np.array(bias_E), factor)

    def _bias(
        self, noise: Chunks, normal_E: NDArray[np.float64], index: int, factor: float = 1.0
    ) -> NDArray[np.float64]:
        """The experts' log odds of a batch."""
        if self.expert_loads is not None:
            wanted_E = np.array(self.expert_loads) * (sum(map(len, noise)) * self.top_k / sum(self.expert_loads))
            return solve_loads(lambda bias_E: _loads(noise, bias_E, self.selection, factor), wanted_E)
        return log_odds(self.family, normal_E, self._strength(noise, normal_E, index, factor))

    def _strength(self, noise: Chunks, normal_E: NDArray[np.float64], index: int, factor: float = 1.0) -> float:
        peak_load = self._peak_load(index)
        if peak_load is None:
            return 0.0

        def loads(strength: float) -> NDArray[np.int64]:
            return _loads(noise, log_odds(self.family, normal_E, strength), self.selection, factor)

        return solve_strength(loads, peak_load, sum(map(len, noise)), self.num_experts / self.top_k)

    def _sharpness(self, noise: Chunks, bias_E: NDArray[np.float64]) -> float:
        """The factor on all logits of a batch."""
        if not self._has_sharpness:
            return 1.0
        logits_TE = _sampled(noise, _SHARPNESS_ROWS) + bias_E
        if self.topk_share is not None:

            def share(factor: float, scores_TE: NDArray[np.float64]) -> float:
                return float((scores_TE * self.selection.chosen(logits_TE, factor)).sum(axis=1).mean())

            return _solve_factor(logits_TE, share, self.topk_share)
        assert self.entropy is not None
        return _solve_factor(logits_TE, lambda factor, scores_TE: 1 - _mean_entropy(scores_TE), 1 - self.entropy)

    @property
    def _has_sharpness(self) -> bool:
        return self.topk_share is not None or self.entropy is not None


def solve_loads(
    loads: Callable[[NDArray[np.float64]], NDArray[np.int64]], wanted_E: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Find the log odds at which experts get the loads that are wanted, each to ``TOLERANCE`` or two tokens.

    An expert's odds are raised by as much as it lacks, over and over; what is left after ``_MOST_ROUNDS`` is reported
    as achieved.

    Args:
        loads: the experts' loads, [E], by log odds.
        wanted_E: in tokens; experts without any are never chosen.
    """
    bias_E = np.where(wanted_E > 0, np.log(np.maximum(wanted_E, 1e-9)), -_NEVER)
    for _ in range(_MOST_ROUNDS):
        load_E = loads(bias_E)
        if (np.abs(load_E - wanted_E) <= np.maximum(TOLERANCE * wanted_E, 2.0)).all():
            break
        bias_E += np.where(wanted_E > 0, np.log((wanted_E + 0.5) / (load_E + 0.5)), 0.0)
    return bias_E


def solve_strength(
    loads: Callable[[float], NDArray[np.int64]], peak_load: float, num_tokens: int, most: float
) -> float:
    """Find how strongly popularity must weigh for the busiest expert to get ``peak_load`` times the mean load.

    Turning the strength up swaps one token's choice at a time, so the busiest expert's load moves
    in steps of one token and bisection between a strength that gives too little and one that gives too much
    ends within a token of the target (it stops within ``TOLERANCE``).

    Args:
        loads: the experts' loads, [E], at a strength; 0 is noise alone.
        most: the greatest peak load there is, experts / top_k.

    Raises:
        ValueError: noise alone gives more than ``peak_load``, or no strength gives as much; the message gives
            the range.
    """
    at_zero_E = loads(0.0)
    mean_load = at_zero_E.sum() / len(at_zero_E)
    target = peak_load * mean_load
    tolerance = max(TOLERANCE * target, 1.0)

    def excess(strength: float) -> float:
        return int(loads(strength).max()) - target

    at_zero = int(at_zero_E.max()) - target
    if at_zero > tolerance:
        least = math.ceil((at_zero + target) / mean_load * 1000) / 1000
        raise UserError(
            f"peak_load: expected {least:g} to {most:g} (what noise alone gives with {num_tokens} "
            f"tokens, to experts / top_k), got {peak_load:g}"
        )
    if at_zero >= -tolerance:
        return 0.0
    low, high = 0.0, 0.5
    # Ends: with strength enough the most popular expert is every token's.
    while (surplus := excess(high)) < -tolerance:
        low, high = high, 2 * high
        if high > _GREATEST_STRENGTH:
            raise UserError(f"peak_load: expected at most {surplus / mean_load + peak_load:.3g}, got {peak_load:g}")
    strength = high
    while abs(surplus) > tolerance:
        low, high = (strength, high) if surplus < 0 else (low, strength)
        strength = (low + high) / 2
        if not low < strength < high:
            break  # The load jumps over the target; what is nearest is reported as achieved.
        surplus = excess(strength)
    return strength


def softmax(logits_TE: NDArray[np.float64]) -> NDArray[np.float32]:
    """Softmax over experts in float32, without ties or zeros: a row's scores sort exactly as its logits."""
    top_T1 = logits_TE.max(axis=1, keepdims=True)
    span_T1 = top_T1 - logits_TE.min(axis=1, keepdims=True)
    odds_TE = np.exp((logits_TE - top_T1) * np.minimum(1.0, MAX_LOGIT_SPAN / np.maximum(span_T1, MAX_LOGIT_SPAN)))
    scores_TE = (odds_TE / odds_TE.sum(axis=1, keepdims=True)).astype(np.float32)
    separate_ties(scores_TE, logits_TE)
    return scores_TE


def _loads(noise: Chunks, bias_E: NDArray[np.float64], selection: TopK, factor: float = 1.0) -> NDArray[np.int64]:
    """Experts' loads, int64 [E], under the model's top-k of noise + bias; counted on all cores."""
    num_threads = len(os.sched_getaffinity(0))
    with ThreadPoolExecutor(num_threads) as pool:
        of_chunks = pool.map(lambda noise_TE: selection.loads(noise_TE, bias_E, factor), noise)
        return np.sum(list(of_chunks), axis=0)


def _sampled(noise: Chunks, most: int) -> NDArray[np.float64]:
    """Every so-manieth row of all chunks together, so that there are ``most`` or fewer."""
    step = -(-sum(map(len, noise)) // most)
    rows, first = [], 0
    for noise_TE in noise:
        rows.append(noise_TE[-first % step :: step])
        first += len(noise_TE)
    return np.concatenate(rows)


def _emptied(chunks: Chunks) -> Iterator[NDArray[np.float64]]:
    """Each chunk in turn; it is not held any longer."""
    chunks.reverse()
    while chunks:
        yield chunks.pop()


def _solve_factor(
    logits_TE: NDArray[np.float64], sharpness: Callable[[float, NDArray[np.float64]], float], target: float
) -> float:
    """Find the factor on logits at which the ``sharpness`` of their softmax, which grows with it, is ``target``."""
    logits_TE = logits_TE - logits_TE.max(axis=1, keepdims=True)
    low, high = math.log(_LEAST_FACTOR), math.log(_GREATEST_FACTOR)
    while True:
        factor = math.exp((low + high) / 2)
        odds_TE = np.exp(factor * logits_TE)
        surplus = sharpness(factor, odds_TE / odds_TE.sum(axis=1, keepdims=True)) - target
        if abs(surplus) <= _SHARPNESS_TOLERANCE or high - low < 1e-9:
            return factor
        low, high = (low, math.log(factor)) if surplus > 0 else (math.log(factor), high)


def _mean_entropy(scores_TE: NDArray[np.float64]) -> float:
    from scipy.special import entr  # Planning does without.

    return float(entr(scores_TE).sum(axis=1).mean() / math.log(scores_TE.shape[1]))
