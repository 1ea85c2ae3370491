"""Batches that replay what a real model's router chose.

Batches are *whole* recorded sequences (prefill), or requests that decode sequences side by side, so that the skew of a
text, and the likeness of neighbouring tokens, reach the ranks as they do in service. Recorded choices are kept to the
letter, and their scores but for what ``tail.fit_top_k`` had to mend and a unit in the last place of float32 where they
tie. Scores below the top-k come from a tail model (``tail``), or from the recording where it has them.

* *Sequences*: recorded sequences, one after the other, until the batch has its tokens; the last one is cut to fit.
* *Decode*: a batch is one step of B requests that are served side by side, and the next batch is the next step. A slot
  replays a recorded sequence, s tokens a step (s = 1, or more with speculative decoding); when fewer than s are left it
  goes on with another. Which experts a token chooses depends only on the tokens before it, so a text recorded in
  prefill may be replayed as decoding.

**Order.** By ``arrival`` requests come as they were recorded (in the order of their times, where these are), and none
comes twice: a request that a batch cuts goes on in the next one, as chunked prefill has it. So batches are windows in
time, and those with negative numbers came ahead of batch 0: plans may know them (``placement``). ``shuffled`` draws
sequences without putting back, every one of a recording once before any comes again, and batches share tokens where the
recording is short.

Where several recordings are mixed, all have the same share of the tokens, and the popularity of an expert is that in
the mixture; or they follow each other (``mix: sequence``), so that traffic shifts. Mixed evenly,

* sequences: the next one is taken from the recording with the fewest tokens so far, counting this batch and those
  before it (the first named on ties); a count for each batch by itself would favour long sequences, since the last is
  cut. The order in a batch is drawn, or sequences of equal length would take turns in step with the ranks that they
  are dealt to;
* decode: recordings have equally many of the B slots, the first named one more where B does not divide, and a slot
  stays with its recording.

Shapes: T = tokens, E = experts, K = top_k, B = requests of a decoding step, N = batches, S = sequences,
L = recorded layers.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, islice

import numpy as np
from numpy.typing import NDArray

from moe_ep_bench.errors import UserError
from moe_ep_bench.workload.batch import Workload
from moe_ep_bench.workload.scores import Run, Stream, generator, in_chunks, row_numbers, rows_at_once, uniform_rows
from moe_ep_bench.workload.tail import RECORDED, TAILS, fill_tail, fit_top_k, keep_top_k_ahead
from moe_ep_bench.workload.trace import Trace

Spans = tuple[NDArray[np.int64], NDArray[np.int64]]
"""First token, counted through all recordings, and length of a batch's sequences or slots; int64 [S] each."""


@dataclass(frozen=True, eq=False)
class RecordedWorkload(Workload):
    """Batches of one layer of one or several ``moe-trace-v1`` recordings.

    Shuffled, a recording that is shorter than a batch is gone through again, in a fresh order, as often as it takes.

    Attributes: those of ``config.RecordedConfig``, and
        traces: the opened recordings: of one model, with the same layers and kind of scores.
        num_experts, top_k, num_groups, top_groups: of the model that is measured; the recordings must agree.
        num_tokens: tokens in a batch, all ranks together.
        topk_share: needed where the recorded scores are normalised over the top-k (GPT-OSS), and only there. Every row
            gets exactly this share unless no tail would fit under its K-th score: such rows get more.
        arrangement: with ``decode`` ``sequence_id_T`` is a request's slot, so a slot stays on its rank.
        tokens_per_request: a sequence that has fewer left is over.
        num_history: batches ahead of batch 0, with the numbers -1, -2 and so on; by arrival alone.

    Raises:
        ValueError: a file that cannot be used or a field that does not suit it; the message names which.
    """

    traces: Sequence[Trace]
    layer: int
    num_experts: int
    top_k: int
    num_tokens: int
    num_batches: int
    tail: str
    seed: int
    topk_share: float | None = None
    arrangement: str = "sequences"
    tokens_per_request: int = 1
    num_groups: int | None = None
    top_groups: int | None = None
    order: str = "arrival"
    mix: str = "even"
    num_history: int = 0

    def __post_init__(self) -> None:
        per_request = self.tokens_per_request
        if self.arrangement == "sequences" and per_request != 1:
            raise UserError(f"expected 1 where arrangement is sequences, got {per_request}", "tokens_per_request")
        if self.num_tokens % per_request:
            expected = f"a multiple of tokens_per_request ({per_request})"
            raise UserError(f"expected {expected}, got {self.num_tokens}", "num_tokens")
        for trace in self.traces:
            self._check(trace, self.traces[0])
            if self.order == "arrival" and trace.arrival_S is not None:
                self._check_order(trace, trace.arrival_S)
        self._check_topk_share()
        # Too few requests, too short sequences or a damaged layer are found now, not in the middle of a run.
        _ = self._spans, self._full if self.tail == RECORDED else self._fitted

    def _check(self, trace: Trace, first: Trace) -> None:
        for name, got, expected, whose in (
            ("num_experts", trace.num_experts, self.num_experts, "the model"),
            ("top_k", trace.top_k, self.top_k, "the model"),
            ("layers", trace.num_layers, first.num_layers, first.path.name),
            *((name, trace.metadata[name], first.metadata[name], first.path.name) for name in ("model", "score")),
        ):
            if got != expected:
                raise UserError(f"{trace.path}: {name}: expected {expected!r} as {whose} has, got {got!r}")
        if self.tail == RECORDED and not trace.has_full_scores:
            expected = f"{' or '.join(TAILS)}, because the recording holds the scores of the top-k only"
            raise UserError(f"{trace.path}: tail: expected {expected}; got {RECORDED!r}")
        if trace.scores_are_normalised != (self.topk_share is not None):
            expected = "a number, as" if trace.scores_are_normalised else "none, as no"
            why = f"scores are normalised over the top-k; got {self.topk_share}"
            raise UserError(f"{trace.path}: topk_share: expected {expected} {why}")

    def _check_order(self, trace: Trace, arrival_S: NDArray[np.float64]) -> None:
        early_S = np.diff(arrival_S) < 0
        if early_S.any():
            request = int(early_S.argmax()) + 1
            raise UserError(
                f"{trace.path}: arrival_s: expected requests as they came, with order: arrival; request {request} came "
                f"at {arrival_S[request]:g} s, the one before it at {arrival_S[request - 1]:g} s (order: shuffled)"
            )

    def sequence_lengths(self, index: int) -> NDArray[np.int64]:
        return self._spans[index + self.num_history][1]

    def make_scores(self, index: int, runs: Sequence[Run]) -> Iterator[NDArray[np.float32]]:
        first_S, length_S = self._spans[index + self.num_history]
        end_S = length_S.cumsum()
        offset_S = first_S + length_S - end_S
        for chunk in in_chunks(runs, rows_at_once(self.num_experts)):
            row_T = row_numbers(chunk)
            token_T = row_T + offset_S[np.searchsorted(end_S, row_T, side="right")]
            if self.tail == RECORDED:
                yield self._full[token_T]
                continue
            ids_TK, scores_TK, weights_E = self._fitted
            jitter = [uniform_rows(self.seed, Stream.TAIL, index, *run, self.num_experts) for run in chunk]
            recorded = ids_TK[token_T].astype(np.int64), scores_TK[token_T]
            yield fill_tail(*recorded, weights_E, np.concatenate(jitter), self.selection)

    def loads(self, layers: Iterable[int], batches: Iterable[int]) -> NDArray[np.int64]:
        """Pairs of every expert in some recorded layers of some batches, by the recorded choices: int64 [L, B, E]."""
        spans_B = [zip(*self._spans[index + self.num_history], strict=True) for index in batches]
        token_BT = [np.concatenate([np.arange(length) + first for first, length in spans]) for spans in spans_B]
        load_LBE = []
        for layer in layers:  # one at a time, for all may not fit into memory
            ids_TK = np.concatenate([trace.read_layer(layer)[0] for trace in self.traces])
            load_LBE.append([np.bincount(ids_TK[token_T].ravel(), minlength=self.num_experts) for token_T in token_BT])
        return np.array(load_LBE)

    def describe(self) -> dict[str, object]:
        first = self.traces[0]
        is_decode = all(trace.stage == "decode" for trace in self.traces)
        sources = [
            {
                "file": trace.path.name,
                "sha256": trace.sha256(),
                "num_tokens": trace.num_tokens,
                "stage": trace.stage,
                **{name: trace.metadata[name] for name in ("domain", "source", "licence")},
            }
            for trace in self.traces
        ]
        return {
            "kind": "recorded",
            "num_batches": self.num_batches,
            "num_tokens": self.num_tokens,
            "tokens_per_request": self.tokens_per_request if self.arrangement == "decode" else None,
            "stage": "decode" if is_decode or self.arrangement == "decode" else "prefill",
            "order": self.order,
            "num_history": self.num_history,
            "layer": self.layer,
            "tail_model": None if self.tail == RECORDED else self.tail,
            "scores_assumed": first.scores_are_assumed,
            "targets": {} if self.topk_share is None else {"topk_share": self.topk_share},
            "recording": {"model": first.metadata["model"], "score": first.metadata["score"], "sources": sources},
        }

    # ---- what is drawn from ------------------------------------------------------------------------------------------

    @cached_property
    def _offsets(self) -> NDArray[np.int64]:
        """First token of each recording in the numbering of all tokens, and their total."""
        return np.cumsum([0, *(trace.num_tokens for trace in self.traces)])

    def num_by_arrival(self, most: int) -> int:
        """Batches that the recordings have by arrival, those ahead of the first included; no more than ``most``."""
        return len(self._deal(range(most), in_order=True))

    @cached_property
    def _pools(self) -> list[Pool]:
        """Sequences of each recording that are long enough."""
        pools = []
        for trace, offset in zip(self.traces, self._offsets.tolist(), strict=False):
            bounds_S2 = np.stack([trace.start_S[:-1], trace.start_S[1:]], axis=1)
            length_S = np.diff(trace.start_S)
            if length_S.max() < self.tokens_per_request:
                expected = f"at most {length_S.max()}, the longest sequence"
                raise UserError(f"{trace.path}: tokens_per_request: expected {expected}, got {self.tokens_per_request}")
            pools.append(bounds_S2[length_S >= self.tokens_per_request] + offset)
        return pools

    @cached_property
    def _spans(self) -> list[Spans]:
        """First token and length of the sequences or slots of every batch."""
        numbers = range(-self.num_history, self.num_batches)
        spans = self._deal(numbers, in_order=self.order == "arrival")
        if len(spans) < len(numbers):
            raise self._too_short(len(spans))
        return spans

    def _deal(self, numbers: range, *, in_order: bool) -> list[Spans]:
        """Batches of these numbers; in order fewer where the recordings end."""
        pools = self._pools
        if in_order and self.mix == "sequence":
            pools = [np.concatenate(pools)]
        if self.arrangement == "decode":
            first_NB = self._draw_steps(pools, len(numbers), in_order=in_order)
            return [(first_B, np.full_like(first_B, self.tokens_per_request)) for first_B in first_NB]
        randoms = [generator(self.seed, Stream.SEQUENCES, index) for index in numbers]
        batches = deal(pools, self.num_tokens, randoms, in_order=in_order)
        bounds = (np.array(runs, np.int64).T for runs in batches)
        return [(first_S, end_S - first_S) for first_S, end_S in bounds]

    def _draw_steps(self, pools: Sequence[Pool], num_steps: int, *, in_order: bool) -> NDArray[np.int64]:
        """See ``draw_steps``: int64 [N, B]."""
        random, requests = generator(self.seed, Stream.SEQUENCES), self.num_tokens // self.tokens_per_request
        each, more = divmod(requests, len(pools))
        if not each:
            expected = f"a request of each of the {len(pools)} recordings in every step"
            raise UserError(f"expected {expected}, got {more} (num_tokens / tokens_per_request)", "trace")
        num_requests = [each + (place < more) for place in range(len(pools))]
        return draw_steps(pools, num_requests, self.tokens_per_request, num_steps, random, in_order=in_order)

    def _too_short(self, possible: int) -> UserError:
        """By arrival the recordings have fewer batches."""
        ahead = f" and the {self.num_history} ahead of them that plans know" if self.num_history else ""
        return UserError(
            f"expected at most {max(possible - self.num_history, 0)} batches of {self.num_tokens:,} tokens"
            f"{ahead}, as order: arrival takes none of the {self._offsets[-1]:,} recorded tokens twice; "
            f"got {self.num_batches} (order: shuffled draws requests again)",
            "num_batches",
        )

    @cached_property
    def _fitted(self) -> tuple[NDArray[np.unsignedinteger], NDArray[np.float32], NDArray[np.float64]]:
        """The layer as it will be used, of all recordings: recorded ids, fitted scores, tail weights."""
        layers = [trace.read_layer(self.layer) for trace in self.traces]
        ids_TK, recorded_TK = (np.concatenate(parts) for parts in zip(*layers, strict=True))
        scores_TK = recorded_TK.astype(np.float64)
        if self.topk_share is not None:
            # The sums are 1 but for rounding; dividing by them gives the share asked for exactly.
            scores_TK *= self.topk_share / scores_TK.sum(axis=1, keepdims=True)
        # As if there were as many tokens as recorded, but equally many of each recording.
        load_E, share = np.zeros(self.num_experts), 1 / len(layers)
        for part_TK, _ in layers:
            part_E = np.bincount(part_TK.ravel(), minlength=self.num_experts)
            load_E += part_E * (share * (len(ids_TK) / len(part_TK)))
        weights_E = np.ones(self.num_experts) if self.tail == "uniform" else load_E + 1
        return ids_TK, fit_top_k(scores_TK, self.num_experts), weights_E

    @cached_property
    def _full(self) -> NDArray[np.float32]:
        """The layer's scores of all experts as they will be used, of all recordings."""
        ids_TK = np.concatenate([trace.read_layer(self.layer)[0] for trace in self.traces]).astype(np.int64)
        full_TE = np.concatenate([trace.read_full_scores(self.layer) for trace in self.traces])
        return keep_top_k_ahead(ids_TK, full_TE, self.selection)


# ---- drawing ---------------------------------------------------------------------------------------------------------


Pool = NDArray[np.int64]
"""The sequences of one recording that are drawn from: int64 [S, 2], the first token of each and where it ends."""


def deal(
    pools: Sequence[Pool], num_tokens: int, randoms: Iterable[np.random.Generator], *, in_order: bool
) -> list[list[Run]]:
    """Take runs of recorded tokens, whole sequences, for one batch of ``num_tokens`` for each of ``randoms``.

    Of several recordings the one comes next of which the fewest tokens were taken. Batch n depends on the first n of
    ``randoms``.

    Args:
        randoms: draw sequences, and their order in a batch where there are several recordings.
        in_order: sequences come as recorded, and the rest of one that a batch cuts begins the next batch. There are
            fewer batches where a recording ends.
    """
    queues = [iter(pool.tolist()) for pool in pools] if in_order else []
    taken, behind, rest = [0] * len(pools), 0, None
    batches = []
    for random in randoms:
        if not in_order:
            queues, rest = [_whole(random, pool) for pool in pools], None
        pieces: list[Run] = []
        missing = num_tokens
        while missing:
            if rest is None:
                behind = taken.index(min(taken))
                if (rest := next(queues[behind], None)) is None:
                    return batches
            first, end = rest
            pieces.append(Run(first, min(end, first + missing)))
            taken[behind] += pieces[-1].num_rows
            missing -= pieces[-1].num_rows
            rest = (pieces[-1].end, end) if pieces[-1].end < end else None
        if len(pools) > 1:
            pieces = [pieces[place] for place in random.permutation(len(pieces))]
        batches.append(pieces)
    return batches


def draw_steps(
    pools: Sequence[Pool],
    num_requests: Sequence[int],
    tokens_per_request: int,
    num_steps: int,
    random: np.random.Generator,
    *,
    in_order: bool = False,
) -> NDArray[np.int64]:
    """Let requests decode side by side: the first of the consecutive tokens of every slot in every step.

    The clock starts in the middle of things. A slot's first sequence is drawn with odds of its length, and a
    place in it uniformly, which is how a server in steady state is met; sequences that follow are drawn evenly and
    played from their beginning. A step does not depend on how many come after it.

    Args:
        pools: every sequence holds ``tokens_per_request`` tokens or more.
        num_requests: slots of each pool. Which slots these are is drawn.
        in_order: sequences come as they stand in the pool and none twice, the first ones from a place that is drawn.

    Returns:
        int64 [N, B]; in order, fewer steps where a slot's next request is missing.
    """
    first_NB = np.empty((num_steps, sum(num_requests)), dtype=np.int64)
    pool_B = random.permutation(np.repeat(np.arange(len(pools)), num_requests))
    # A stream for each recording: how often one is drawn from is no concern of the others.
    for index, (pool, stream) in enumerate(zip(pools, random.spawn(len(pools)), strict=True)):
        free = [(0, slot) for slot in np.flatnonzero(pool_B == index).tolist()]  # from which step; already a heap
        if in_order:
            pieces = _as_they_came(stream, pool, tokens_per_request, len(free))
        else:
            pieces = chain(islice(_openings(stream, pool, tokens_per_request), len(free)), _whole(stream, pool))
        while free and free[0][0] < num_steps:
            step, slot = free[0]
            if (piece := next(pieces, None)) is None:
                num_steps = step
                break
            first, end = piece
            taken_N = np.arange(first, end - tokens_per_request + 1, tokens_per_request)
            first_NB[step : step + taken_N.size, slot] = taken_N[: num_steps - step]
            heapq.heapreplace(free, (step + taken_N.size, slot))
    return first_NB[:num_steps]


def _whole(random: np.random.Generator, pool: Pool) -> Iterator[Run]:
    """All sequences in a random order, then all in a fresh one, and so on; nothing is drawn before it is asked for."""
    while True:
        for start, end in pool[random.permutation(len(pool))].tolist():
            yield Run(start, end)


def _as_they_came(random: np.random.Generator, pool: Pool, tokens_per_request: int, num_open: int) -> Iterator[Run]:
    """All sequences once, in order; the first ``num_open`` ones from a random place on."""
    for number, (start, end) in enumerate(pool.tolist()):
        begun = int(random.integers(end - start - tokens_per_request + 1)) if number < num_open else 0
        yield Run(start + begun, end)


def _openings(random: np.random.Generator, pool: Pool, tokens_per_request: int) -> Iterator[Run]:
    """Rests of sequences, from a random place on; long sequences tend to come early, each once before any again."""
    places_S = pool[:, 1] - pool[:, 0] - tokens_per_request + 1
    while True:
        # The first of exponentials with rates w is number s with odds w_s (Efraimidis and Spirakis 2006).
        for sequence in np.argsort(random.exponential(size=places_S.size) / places_S).tolist():
            start, end = pool[sequence].tolist()
            yield Run(start + int(random.integers(places_S[sequence])), end)
