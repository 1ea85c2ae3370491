"""Synthetic router scores, solved to the targets that users think in.

A token's logits are ``sharpness * (strength * popularity + noise)``. Popularity is one standard normal number for each
expert, noise a Gumbel number for each token and expert. A neighbour copies each expert's noise from the token before it
with one probability, so that texts share experts as real ones do, and each token alone is distributed as before. Each
target has a number of the recipe to itself (``targets``), so they are met one after the other:

* *peak load*, the busiest expert's load over the mean: the strength of popularity; every batch
* *expert loads*, as they were counted: each expert's log odds, in place of popularity; every batch
* *rank load*, the fullest rank's load over the mean: which experts share that rank; on batch 0
* *neighbour overlap*, how many experts adjacent tokens of a sequence share: the copying; on batch 0
* *top-k share* of the score mass: the sharpness, which leaves every choice as it is; every batch

Solving for a batch takes the rows at its beginning that hold ``SOLVED_SCORES`` scores: all of it up to 262,144 tokens
of 256 experts. A larger batch meets its targets on that part, and on the rest within sampling error (a peak load of 5
among 1,024 experts, top-8: a standard deviation of 2 %, more where neighbours are alike); native's
routing says what all rows together came to.

Shapes: T = tokens of all ranks, E = experts, K = top_k.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import chain, islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moe_ep_bench.errors import UserError
from moe_ep_bench.metrics import shared_by_neighbours
from moe_ep_bench.policies.lazy import torch
from moe_ep_bench.workload.randomness import (
    Run,
    Stream,
    generator,
    in_chunks,
    rows_at_once,
    separate_ties,
    uniform_rows,
)
from moe_ep_bench.workload.targets import (
    Chunks,
    chosen_experts,
    copied,
    expert_loads,
    gumbel,
    place_for_rank_load,
    solve_copying,
    solve_loads,
    solve_sharpness,
    solve_strength,
)
from moe_ep_bench.workload.workload import Workload

# Targets are solved for on so many scores of a batch at most: half a GiB of noise.
SOLVED_SCORES = 2**26
# A row of logits that spans more is squeezed to this, which keeps its order: exp(-80) / E is a normal float32, where
# exp(-100) would be one of many zeros.
MAX_LOGIT_SPAN = 80.0
# Sharpness is solved on at most so many rows; where groups are compared by score, in so many rounds with the strength.
_SHARPNESS_ROWS, _ROUNDS_WITH_GROUPS = 4096, 3
# The copying is solved on so many rows, twice, under a popularity that is solved on so many at least.
_COPYING_ROWS, _LEAST_TOKENS = (2048, 8192), 1024
# Recipes are kept of so many batches.
_RECIPES_KEPT = 64


class GeneratedWorkload(Workload):
    """Batches of sequences that are all as long, but for the last of a batch, and follow no recording."""

    sequence_length: int

    @abstractmethod
    def targets(self) -> dict[str, object]:
        """What was asked for, by field; what was left to chance is None or absent."""

    @abstractmethod
    def _in_words(self) -> str:
        """The targets."""

    def sequence_lengths(self, index: int) -> NDArray[np.int64]:
        return np.diff([*range(0, self.num_tokens, self.sequence_length), self.num_tokens])

    def describe(self) -> dict[str, object]:
        return {
            "kind": "synthetic",
            "description": (
                f"{self._in_words()}, {self.num_experts} experts, top-{self.top_k}, {self.num_batches} x "
                f"{self.num_tokens} tokens in sequences of {self.sequence_length}, seed {self.seed}"
            ),
            "tail_model": None,
            "targets": self.targets(),
            "recording": None,
        }


@dataclass(frozen=True, eq=False)
class SyntheticWorkload(GeneratedWorkload):
    """Batches solved to targets; a target that is None is left to chance.

    Attributes: those of ``config.SyntheticConfig``, and
        num_experts, top_k, num_groups, top_groups: of the model.
        num_tokens: tokens in a batch, all ranks together.
        expert_loads: of each expert in its place, in relation to each other; in place of any other skew.
        rank_load: (number of contiguous ranks, load of the fullest over the mean).
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
    rank_load: tuple[int, float] | None = None
    expert_loads: tuple[float, ...] | None = None
    topk_share: float | None = None
    neighbour_overlap: float | None = None
    or_chance: bool = False
    num_groups: int | None = None
    top_groups: int | None = None

    def __post_init__(self) -> None:
        most = self.num_experts / self.top_k
        if self.peak_load is not None and not 1 <= self.peak_load <= most:
            raise UserError(f"peak_load: expected 1 to {most:g} (experts / top_k), got {self.peak_load:g}")
        if self.expert_loads is not None:
            if self.peak_load is not None or self.rank_load is not None:
                raise UserError("skew_from: says every expert's load; expected no peak_load and no rank_load")
            share = max(self.expert_loads) / sum(self.expert_loads)
            if share * self.top_k > 1:
                raise UserError(
                    f"skew_from: expected at most 1 / {self.top_k} of the pairs on an expert (top_k), got {share:.3g}"
                )
        if self.rank_load is not None:
            self._check_rank_load(*self.rank_load)
        self._check_topk_share()
        if self.neighbour_overlap is not None and self.sequence_length == 1:
            raise UserError(
                "neighbour_overlap: expected a sequence_length of at least 2, got 1: no token has neighbours"
            )

    def _check_rank_load(self, num_ranks: int, load: float) -> None:
        if self.num_experts % num_ranks:
            raise UserError(
                f"rank_load: expected a number of ranks from 2 on that divides the {self.num_experts} experts, "
                f"got {num_ranks}"
            )
        if load > num_ranks:
            raise UserError(f"rank_load: expected a load of 1 to {num_ranks} (the ranks), got {load:g}")
        if self.num_groups is not None:
            raise UserError(
                f"rank_load: expected none for a model with {self.num_groups} groups of experts, because placing "
                "experts moves them between groups"
            )

    def make_scores(self, index: int, runs: Sequence[Run]) -> Iterator[NDArray[np.float32]]:
        chunks = self._noise(index, runs)
        part = self._solved_part(self.num_tokens)
        if index not in self._recipes and runs and runs[0].first == 0 and runs[0].end >= part.end:
            # The part that is solved on comes first here: it need not be made twice.
            solved = list(islice(chunks, -(-part.end // rows_at_once(self.num_experts))))
            self._solve(index, solved)
            chunks = chain((solved.pop(0) for _ in range(len(solved))), chunks)
        bias_E, sharpness = self._recipe(index)
        for noise_TE in chunks:
            logits_TE = noise_TE + bias_E
            yield softmax(logits_TE if sharpness == 1 else sharpness * logits_TE)

    # ---- noise -------------------------------------------------------------------------------------------------------

    def _noise(self, index: int, runs: Sequence[Run]) -> Iterator[NDArray[np.float64]]:
        """Make noise of the expert at each index, in chunks; an expert takes its noise along to its place."""
        for noise_TE in gumbel_noise(
            self.seed, index, runs, self.num_experts, sequence_length=self.sequence_length, copying=self._copying
        ):
            yield noise_TE if self.rank_load is None else np.take(noise_TE, self._placement, axis=1)

    @cached_property
    def _copying(self) -> float:
        """The probability with which neighbours copy noise, solved under the popularity of batch 0.

        Peak loads of tokens that are alike vary more, so that popularity weighs a little less: hence a second round.
        """
        copying = 0.0
        for num_rows in _COPYING_ROWS if self.neighbour_overlap is not None else ():
            noise = self._first_noise(self._solved_part(max(self.num_tokens, _LEAST_TOKENS)), copying)
            bias_E = self._bias(list(noise), self._drawn_popularity)
            shared = partial(self._shared, bias_E, num_rows)
            copying = solve_copying(shared, self.neighbour_overlap, self.top_k, or_chance=self.or_chance)
        return copying

    def _shared(self, bias_E: NDArray[np.float64], num_rows: int, copying: float) -> float:
        """Experts that neighbours share, mean over the first rows of batch 0, or of one that would have so many."""
        noise = self._first_noise(Run(0, num_rows), copying)
        map_TE = np.concatenate([chosen_experts(noise_TE + bias_E, self.selection) for noise_TE in noise])
        sequence_id_T = torch.arange(num_rows) // self.sequence_length
        pairs, num_shared = shared_by_neighbours(torch.from_numpy(map_TE), sequence_id_T)
        return num_shared / pairs

    @property
    def shares_by_chance(self) -> bool:
        """Whether adjacent tokens share more experts than was asked for, as independent tokens do under this skew."""
        return self.neighbour_overlap is not None and self._copying == 0.0

    @cached_property
    def _placement(self) -> NDArray[np.int64]:
        """Which drawn expert stands at each index, for good: int64 [E]."""
        if self.rank_load is None:
            return np.arange(self.num_experts)
        noise = list(self._first_noise(self._solved_part(self.num_tokens), self._copying))
        load_E = expert_loads(noise, self._bias(noise, self._drawn_popularity), self.selection)
        num_ranks, load = self.rank_load
        hot_rank = int(generator(self.seed, Stream.HOT_RANK).integers(num_ranks))
        return place_for_rank_load(load_E, num_ranks, load, hot_rank)

    @cached_property
    def _drawn_popularity(self) -> NDArray[np.float64]:
        """Standard normal numbers, float64 [E], which say how much each expert is wanted, before it has its place."""
        return generator(self.seed, Stream.POPULARITY).normal(size=self.num_experts)

    def _first_noise(self, run: Run, copying: float) -> Iterator[NDArray[np.float64]]:
        """Make noise of batch 0, of the experts as drawn, on which what holds for all batches is solved."""
        rule = {"sequence_length": self.sequence_length, "copying": copying}
        return gumbel_noise(self.seed, 0, [run], self.num_experts, **rule)

    def _solved_part(self, num_tokens: int) -> Run:
        """The rows that targets are solved on, of so many: all, or as many whole chunks as may be."""
        at_once = rows_at_once(self.num_experts)
        return Run(0, min(num_tokens, max(1, SOLVED_SCORES // (at_once * self.num_experts)) * at_once))

    # ---- recipes -----------------------------------------------------------------------------------------------------

    @cached_property
    def _recipes(self) -> dict[int, tuple[NDArray[np.float64], float]]:
        """By batch the experts' log odds, float64 [E], and the sharpness."""
        return {}

    def _recipe(self, index: int) -> tuple[NDArray[np.float64], float]:
        if index not in self._recipes:
            self._solve(index, list(self._noise(index, [self._solved_part(self.num_tokens)])))
        return self._recipes[index]

    def _solve(self, index: int, noise: Chunks) -> None:
        """Find a batch's recipe and keep it; the oldest kept one makes room."""
        popularity_E, sharpness = self._drawn_popularity[self._placement], 1.0
        # How sharp scores are has no part in choosing experts, except where groups of them are compared by score.
        for _ in range(1 if self.num_groups is None or self.topk_share is None else _ROUNDS_WITH_GROUPS):
            bias_E = self._bias(noise, popularity_E, sharpness)
            if self.topk_share is not None:
                step = -(-sum(map(len, noise)) // _SHARPNESS_ROWS)
                logits_TE = np.concatenate(noise)[::step] + bias_E
                sharpness = solve_sharpness(logits_TE, self.selection, self.topk_share)
        if len(self._recipes) >= _RECIPES_KEPT:
            del self._recipes[next(iter(self._recipes))]
        self._recipes[index] = bias_E, sharpness

    def _bias(self, noise: Chunks, popularity_E: NDArray[np.float64], sharpness: float = 1.0) -> NDArray[np.float64]:
        """Solve for the experts' log odds."""

        def loads(bias_E: NDArray[np.float64]) -> NDArray[np.int64]:
            return expert_loads(noise, bias_E, self.selection, sharpness)

        num_tokens = sum(map(len, noise))
        if self.expert_loads is not None:
            total = num_tokens * self.top_k / sum(self.expert_loads)
            return solve_loads(loads, np.array(self.expert_loads) * total)
        if self.peak_load is None:
            return np.zeros(self.num_experts)
        most = self.num_experts / self.top_k
        strength = solve_strength(lambda strength: loads(strength * popularity_E), self.peak_load, num_tokens, most)
        return strength * popularity_E

    def solve(self, index: int) -> None:
        self._recipe(index)

    def solved(self) -> dict[str, Any]:
        recipes = {index: [bias_E.tolist(), sharpness] for index, (bias_E, sharpness) in self._recipes.items()}
        return {"placement": self._placement.tolist(), "copying": self._copying, "recipes": recipes}

    def take_solved(self, solved: Mapping[str, Any]) -> None:
        self.__dict__["_placement"] = np.array(solved["placement"], dtype=np.int64)
        self.__dict__["_copying"] = solved["copying"]
        for index, (bias_E, sharpness) in solved["recipes"].items():
            self._recipes[int(index)] = np.array(bias_E), sharpness

    # ---- words -------------------------------------------------------------------------------------------------------

    def targets(self) -> dict[str, object]:
        asked = {name: getattr(self, name) for name in ("topk_share", "neighbour_overlap")}
        asked["rank_load"] = None if self.rank_load is None else {str(self.rank_load[0]): self.rank_load[1]}
        asked["expert_loads"] = None if self.expert_loads is None else list(self.expert_loads)
        return {"peak_load": self.peak_load, **{name: value for name, value in asked.items() if value is not None}}

    def _in_words(self) -> str:
        if self.expert_loads is not None:
            asked = max(self.expert_loads) * self.num_experts / sum(self.expert_loads)
            words = [f"synthetic softmax scores, experts' loads as counted, peak load {asked:.3g}"]
        elif self.peak_load is None:
            words = ["synthetic softmax scores, no skew asked for"]
        else:
            words = [f"synthetic softmax scores, peak load {self.peak_load:g}"]
        if self.rank_load is not None:
            words.append(f"fullest of {self.rank_load[0]} ranks {self.rank_load[1]:g}")
        for name in ("topk_share", "neighbour_overlap"):
            if (target := getattr(self, name)) is not None:
                words.append(f"{name.replace('_', ' ')} {target:g}")
        return ", ".join(words)


def gumbel_noise(
    seed: int, batch: int, runs: Sequence[Run], num_experts: int, *, sequence_length: int = 1, copying: float = 0.0
) -> Iterator[NDArray[np.float64]]:
    """Make Gumbel noise of some rows, in chunks: float64 [up to ``rows_at_once``, E].

    Args:
        runs: ascending.
        copying: the probability with which a row copies a number of the row before it in its sequence.
    """
    before_row, before_E = -1, np.empty(num_experts)
    at_once = rows_at_once(num_experts)
    for chunk in in_chunks(runs, at_once):
        parts = []
        for run in chunk:
            ahead = run.first % sequence_length if copying and run.first - 1 != before_row else 0
            for (missing,) in in_chunks([Run(run.first - ahead, run.first)], at_once):  # of a sequence that is cut
                before_E = _noise_rows(seed, batch, missing, before_E, sequence_length, copying)[-1]
            parts.append(_noise_rows(seed, batch, run, before_E, sequence_length, copying))
            before_row, before_E = run.end - 1, parts[-1][-1]
        yield parts[0] if len(parts) == 1 else np.concatenate(parts)


def _noise_rows(
    seed: int, batch: int, run: Run, before_E: NDArray[np.float64], sequence_length: int, copying: float
) -> NDArray[np.float64]:
    """Make noise of which each row copies some from the row before it, and the first of a sequence nothing."""
    uniform_TE = uniform_rows(seed, Stream.NOISE, batch, run.first, run.end, len(before_E))
    if not copying:
        return gumbel(uniform_TE)
    starts = range(-run.first % sequence_length, run.num_rows, sequence_length)
    start_SE = gumbel(uniform_TE[starts])
    is_copied_TE, noise_TE = copied(uniform_TE, copying)
    is_copied_TE[starts], noise_TE[starts] = False, start_SE
    from moe_ep_bench.kernels.counting import copy_down  # Planning does without numba.

    copy_down(noise_TE, is_copied_TE, before_E)
    return noise_TE


def softmax(logits_TE: NDArray[np.float64]) -> NDArray[np.float32]:
    """Softmax over experts in float32, without ties or zeros: a row's scores sort exactly as its logits."""
    top_T1 = logits_TE.max(axis=1, keepdims=True)
    span_T1 = top_T1 - logits_TE.min(axis=1, keepdims=True)
    odds_TE = np.exp((logits_TE - top_T1) * np.minimum(1.0, MAX_LOGIT_SPAN / np.maximum(span_T1, MAX_LOGIT_SPAN)))
    scores_TE = (odds_TE / odds_TE.sum(axis=1, keepdims=True)).astype(np.float32)
    separate_ties(scores_TE, logits_TE)
    return scores_TE
