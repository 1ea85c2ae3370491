"""Where the pick turns: the peak load, EP size or tokens of a batch from which on another candidate would be picked.

Few further points are modelled: of the pick, its closest rivals and native alone, in one draw or layer, that in which
the pick's speedup is its median. Values of a key stand on a grid on both sides of the question's own. First every
fourth is asked, and the ends, of all keys together; where another is picked, then the values between that one and the
last that has the pick. The pick at a point is that of medians, without intervals (``picks.choice``), and stays while no
other is clearly better. Two turns that lie close to each other may be missed. Of a batch a part of the tokens stands
for all where it may; of one that has many scores all the same nothing is asked, so that work is bounded, and an answer
is the same on any machine.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd

from moe_ep_bench.analysis.advice import Advice, Answer, Side, Turn, Unsolved
from moe_ep_bench.analysis.cases import timings
from moe_ep_bench.analysis.picks import BARRED, OUT_OF_BOUNDS, candidates, choice, judged
from moe_ep_bench.analysis.store import Store
from moe_ep_bench.bench.advise_config import CONFIG_NAME, OVERLAP, REACHED, Bounds, Question
from moe_ep_bench.bench.description import fit_of
from moe_ep_bench.bench.point import BASELINE, NATIVE, POLICY, REPLICATION, Point
from moe_ep_bench.bench.sampling import MOST_RANKS, routed_tokens
from moe_ep_bench.errors import UserError
from moe_ep_bench.metrics import mass_kept
from moe_ep_bench.schema import ALL, TOTAL

PEAK_LOADS, EP_SIZE, TOKENS = ("workload.peak_load", "workload.batch_peak_load"), "layer.ep_size", "workload.num_tokens"
# Scores (tokens times experts) of a batch that are routed where tokens stand for others, and at most; ranks at most.
_SCORES, _MOST_SCORES, _MOST_RANKS = 2**20, 2**22, 256
# Parts of the way from balanced loads to the question's peak load, and as many beyond it.
_PARTS = 8
# Multiples of the question's EP size and tokens.
_EP_SIZES, _TOKENS = (1 / 4, 1 / 2, 1, 2, 4), (1 / 16, 1 / 8, 1 / 4, 1 / 2, 1)
# Candidates within the bounds that are asked about, and the fastest beyond them.
_NUM_RIVALS = 3
_SPEEDUPS = ("speedup_median", "speedup_low", "speedup_high")
_COSTS = ("dropped_share", "missing_share", "retained_mass")
_PAIRS = ("num_topk_pairs", "num_dropped_pairs", "num_rerouted_pairs")
# Every so many values, from the question's own on, are asked first.
_STRIDE = 4


def with_turns(
    advice: Advice, question: Question, bounds: Bounds, store: Store, before: Advice | None = None
) -> Advice:
    """The answer of a question with where it turns, the first one where overlaps have answers of their own.

    Answers of several points say that themselves.

    Args:
        before: the answer that was given to the same question, whose turns hold where all else is equal.
    """
    points = [{key: value for key, value in one.point.items() if key != OVERLAP} for one in advice.answers]
    if not points or any(point != points[0] for point in points):
        return advice
    answer, *others = advice.answers
    said = next(iter(before.answers), None) if before is not None else None
    if said is not None and said.model_copy(update={"turns": ()}) == answer:
        turns = said.turns
    else:
        turns = solve(question, bounds, store, answer)
    return advice.model_copy(update={"answers": [answer.model_copy(update={"turns": turns}), *others]})


def solve(question: Question, bounds: Bounds, store: Store, answer: Answer) -> tuple[Turn, ...]:
    """Where the pick of a question's answer turns, by key; what cannot be solved says why.

    Args:
        store: what was modelled of the question.
    """
    pick = answer.pick and answer.pick.label
    near = _contenders(answer)
    rows = candidates(store, bounds)
    rows = rows[(rows["comparison_id"] == answer.comparison_id) & rows["label"].isin(near)]
    if rows.empty or not near:
        return ()
    rows, launch = _in_typical_draw(store, rows, near[0])
    point = _points_of(question, store, answer)[launch]
    found = {key: values for key, values in _grids(point) if len(values) > 1}
    why = _too_much(point) if choice(rows, pick) == pick else Unsolved(kind="too_close")
    if why is not None:
        return tuple(Turn(key=key, unsolved=why) for key in found)
    return tuple(_Solver(question, bounds, rows, pick, point).turns(found))


def _too_much(point: Point) -> Unsolved | None:
    """Why a question takes too long to be asked again at other values; None = it does not."""
    if point.world_size > _MOST_RANKS:
        return Unsolved(kind="ranks", number=point.world_size)
    num_scores = routed_tokens(point.experiment, _num_scores(point.world_size)) * point.model.num_experts
    return Unsolved(kind="scores", number=num_scores) if num_scores > _MOST_SCORES else None


def _num_scores(num_ranks: int) -> int:
    """Scores that stand for a batch's; of many ranks more, for chance in the few tokens of one would be a turn."""
    return _SCORES * max(1, num_ranks // MOST_RANKS)


def _contenders(answer: Answer) -> list[str]:
    """Labels of those that may be picked elsewhere: the pick, the next, and the fastest beyond the bounds."""
    within = [one.label for one in answer.candidates if one.standing not in BARRED]
    beyond = [one.label for one in answer.candidates if one.standing == OUT_OF_BOUNDS]
    beside = [answer.beside.label] if answer.beside else []
    return list(dict.fromkeys([*within[:_NUM_RIVALS], *beside, *beyond[:1]]))


def _in_typical_draw(store: Store, rows: pd.DataFrame, label: str) -> tuple[pd.DataFrame, int]:
    """Candidates with their speedups in the draw or layer in which one's is its median, and the number of that."""
    times = timings(store)
    ratios = times[(times["quantity"] == ALL) & times["case_id"].isin(rows.index)]
    speedup_CD = ratios.groupby(["case_id", "launch"])["speedup"].median().unstack()
    own_D = speedup_CD.loc[rows.index[rows["label"] == label][0]]
    launch = (own_D - own_D.median()).abs().idxmin()
    return rows.assign(speedup_median=speedup_CD[launch].reindex(rows.index)), int(launch)


def _points_of(question: Question, store: Store, answer: Answer) -> list[Point]:
    """The draws or layers that an answer is of, in order."""
    facts = next(one.facts for one in store.comparisons if one.comparison_id == answer.comparison_id)
    alike = [one for one in question.comparisons if one.overlap == facts.overlap]
    return [one for one in alike if answer.point.items() <= dict(one.experiment.point).items()]


def _grids(point: Point) -> Iterator[tuple[str, list[float]]]:
    """Values of each key that the question has a value of, its own among them, in order."""
    spec = point.model
    for key in PEAK_LOADS:
        if (peak := _value(point, key)) is not None:
            most = max(peak, REACHED * spec.num_experts / spec.top_k)
            shares = [part / _PARTS for part in range(_PARTS)]
            below = [1 + share * (peak - 1) for share in shares] if peak > 1 else []
            above = [min(most, peak * (1 + share)) for share in [*shares, 1.0]]
            yield key, sorted({round(value, 2) for value in below + above[1:]} | {peak})
    if (ep_size := _value(point, EP_SIZE)) is not None:
        sizes = [ep_size * share for share in _EP_SIZES]
        yield EP_SIZE, [int(size) for size in sizes if size == int(size) > 1 and spec.num_experts % size == 0]
    if (tokens := _value(point, TOKENS)) is not None:
        yield TOKENS, sorted({int(tokens * share) for share in _TOKENS} - {0})


@dataclass(frozen=True, eq=False)
class _Solver:
    """What is asked of further points.

    Attributes:
        rows: candidates that are asked about, of which ``pick`` is one; None = native.
        point: the question in one draw or layer.
        points: by key and value; None = it cannot be asked there, for what stands in ``problems``.
        picks: what was found, by key and value.
    """

    question: Question
    bounds: Bounds
    rows: pd.DataFrame
    pick: str | None
    point: Point
    points: dict[tuple[str, float], Point | None] = field(default_factory=dict)
    problems: dict[str, str] = field(default_factory=dict)
    picks: dict[tuple[str, float], str | None] = field(default_factory=dict)

    def turns(self, grids: Mapping[str, Sequence[float]]) -> list[Turn]:
        """Where the pick turns along each key, whose values stand in order."""
        ways = [(key, *way) for key, values in grids.items() for way in self._ways(key, values)]
        self._ask((key, [*values[_STRIDE - 1 : -1 : _STRIDE], *values[-1:]]) for key, _, values in ways)
        self._ask((key, self._open(key, values)) for key, _, values in ways)
        return [self._turn(key, [(name, values) for of_key, name, values in ways if of_key == key]) for key in grids]

    def _ways(self, key: str, values: Sequence[float]) -> Iterator[tuple[str, list[float]]]:
        """The values below and above the question's own, from it on, up to the last that can be asked about."""
        own = values.index(_value(self.point, key))
        for name, way in (("below", list(values[:own][::-1])), ("above", list(values[own + 1 :]))):
            while way and self._at(key, way[-1]) is None:
                way.pop()
            yield name, way

    def _open(self, key: str, values: Sequence[float]) -> Sequence[float]:
        """Those between the last with the pick and the first without it."""
        near, far = self._bracket(key, values)
        return values[near + 1 : far] if far is not None else []

    def _bracket(self, key: str, values: Sequence[float]) -> tuple[int, int | None]:
        """Places of the last value with the pick, -1 for the question's own, and of the first without it, if any."""
        near = -1
        for place, value in enumerate(values):
            if self.picks.get((key, value), self.pick) != self.pick:
                return near, place
            near = place if (key, value) in self.picks else near
        return near, None

    def _turn(self, key: str, ways: Sequence[tuple[str, list[float]]]) -> Turn:
        """What was found along a key."""
        if not any(values for _, values in ways):
            return Turn(key=key, unsolved=Unsolved(kind="refused", text=self.problems[key]))
        own, sides = _value(self.point, key), {}
        assert own is not None  # else it had no ways
        for name, values in ways:
            near, far = self._bracket(key, values)
            if far is not None:
                pick = self.picks[key, values[far]]
                sides[name] = Side(near=own if near < 0 else values[near], far=values[far], pick=pick)
        least, most = ([own, *values][-1] for _, values in ways)
        return Turn(key=key, least=least, most=most, **sides)

    def _at(self, key: str, value: float) -> Point | None:
        """The question in its one draw or layer, of its candidates alone, with another value; None = it cannot be."""
        if (key, value) not in self.points:
            of_point = dict(self.point.experiment.point)
            values = {**of_point, OVERLAP: self.point.overlap, "workload.num_batches": 1, key: value}
            rules = self.rows[["policy", "policy_params"]].itertuples(index=False)
            try:
                num_ranks = int(value) if key == EP_SIZE else self.point.world_size
                self.points[key, value] = self.question.at(values, rules, _num_scores(num_ranks))
            except UserError as problem:
                self.points[key, value], self.problems[key] = None, str(problem.without(CONFIG_NAME))
        return self.points[key, value]

    def _ask(self, asked: Iterable[tuple[str, Sequence[float]]]) -> None:
        """Find what is picked at values; one whose traffic cannot be had has no pick of its own."""
        for place in [(key, value) for key, values in asked for value in values]:
            if (point := self._at(*place)) is not None:
                with contextlib.suppress(UserError):
                    self.picks[place] = choice(probed(point, self.bounds), self.pick)


def probed(point: Point, bounds: Bounds) -> pd.DataFrame:
    """Candidates of a modelled point, each a row with what ``picks.choice`` looks at; nothing is written.

    Columns as of ``picks.candidates``, whose way over files takes a tenth of a second for each point.

    Raises:
        UserError: the point's traffic cannot be had.
    """
    import torch  # which reading an answer does without

    from moe_ep_bench.bench.emulated_ranks import ModelledRanks
    from moe_ep_bench.bench.measure import measure_point
    from moe_ep_bench.timing.protocol import PLAIN

    cases = [case for case in point.cases if case.role in (BASELINE, POLICY, REPLICATION)]
    ranks = ModelledRanks(point, cases, torch.device("cpu"), lambda _: None)
    with torch.inference_mode(), contextlib.closing(ranks):
        result = measure_point(ranks, ranks.begin)
    total, plain = result.columns[TOTAL], [place for step, place in result.steps.items() if step.kind == PLAIN]
    time_us = {case_id: times_RSC[:, plain, total].max(axis=0) for case_id, times_RSC in result.times.items()}
    native, fit, rows = next(case for case in cases if case.role == BASELINE), fit_of(point), []
    costs = _costs(result.rows)
    for case in cases:
        if case is native or case.policy == NATIVE:
            continue
        speedup_S = time_us[native.case_id] / time_us[case.case_id]
        rows.append(
            {
                "label": case.label,
                "verdict": None,
                "fits": fit is None or fit.holds(point.extra_bytes_per_rank(case) or 0),
                "speedup_median": float(np.median(speedup_S)),
                "speedup_low": speedup_S.min(),
                "speedup_high": speedup_S.max(),
                **costs.loc[case.case_id],
            }
        )
    frame = pd.DataFrame(rows, columns=["label", "verdict", "fits", *_SPEEDUPS, *_COSTS])
    return judged(frame.astype(dict.fromkeys(_COSTS, float)), bounds)


def _costs(rows: Mapping[str, Sequence[Mapping[str, Any]]]) -> pd.DataFrame:
    """What ranks' rows of each case come to, mean over batches, then layers (``reduce.routing_means``); by case."""
    names = ["layer", "batch", "num_tokens", "topk_share", "retained_mass_topk", *_PAIRS]
    of_cases = [[case_id, *(row[name] for name in names)] for case_id, of_case in rows.items() for row in of_case]
    routing = pd.DataFrame(of_cases, columns=["case_id", *names])
    units = routing.groupby(["case_id", "layer", "batch"], dropna=False)
    pairs, unit_N = units[list(_PAIRS)].sum(), units.ngroup()
    missing = pairs["num_dropped_pairs"] + pairs["num_rerouted_pairs"]
    shares = pairs["num_dropped_pairs"] / pairs["num_topk_pairs"], missing / pairs["num_topk_pairs"]
    costs = pairs.assign(**dict(zip(_COSTS, (*shares, mass_kept(routing, unit_N)), strict=True)))[list(_COSTS)]
    return costs.groupby(["case_id", "layer"], dropna=False).mean().groupby("case_id").mean()


def _value(point: Point, key: str) -> float | None:
    """The question's value of a key; None where its workload has no such key."""
    section, _, name = key.partition(".")
    return getattr(getattr(point.experiment, section), name, None)
