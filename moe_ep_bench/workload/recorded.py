"""Batches that replay what a real model's router chose.

Batches are *whole* recorded sequences (prefill), or requests that decode sequences side by side, so that the skew of a
text, and the likeness of neighbouring tokens, reach the ranks as they do in service (``draws``). Recorded choices are
kept to the letter, and their scores but for what ``tail.fit_top_k`` had to mend and a unit in the last place of float32
where they tie. Scores below the top-k come from a tail model (``tail``), or from the recording where it has them. The
popularity of an expert is that in the mixture, each recording counted by its share.

Shapes: T = tokens, E = experts, K = top_k, B = requests of a decoding step, N = batches, S = sequences.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from moe_ep_bench.errors import UserError
from moe_ep_bench.workload.draws import Pool, apportion, draw_sequences, draw_steps
from moe_ep_bench.workload.randomness import (
    Run,
    Stream,
    generator,
    in_chunks,
    row_numbers,
    rows_at_once,
    uniform_rows,
)
from moe_ep_bench.workload.tail import RECORDED, TAILS, FittedTopK, FullRows, fill_tail, fit_top_k, keep_top_k_ahead
from moe_ep_bench.workload.trace import Trace, open_trace
from moe_ep_bench.workload.workload import Workload


class Source(NamedTuple):
    """A recording and how much of the tokens come from it, in relation to the shares of the others."""

    path: str | Path
    share: float = 1.0


@dataclass(frozen=True, eq=False)
class RecordedWorkload(Workload):
    """Batches of one layer of one or several ``moe-trace-v1`` recordings.

    A recording that is shorter than a batch is gone through again, in a fresh order, as often as it takes.

    Attributes: those of ``config.RecordedConfig``, and
        path: the recording, or several with their shares. These must be of one model, with the same layers and kind
            of scores.
        num_experts, top_k: of the model that is measured; the recordings must agree.
        num_tokens: tokens in a batch, all ranks together.
        topk_share: needed where the recorded scores are normalised over the top-k (GPT-OSS), and only there. Every row
            gets exactly this share unless no tail would fit under its K-th score: such rows get more, and are counted.
        arrangement: with ``decode`` ``sequence_id_T`` is a request's slot, so a slot stays on its rank.
        tokens_per_request: a sequence that has fewer left is over. So it is at a gap, where tokens were left out.

    Raises:
        ValueError: a file that cannot be used or a field that does not suit it; the message names which.
    """

    path: str | Path | Sequence[Source | tuple[str | Path, float]]
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

    def __post_init__(self) -> None:
        if self.arrangement == "sequences" and self.tokens_per_request != 1:
            raise UserError(
                f"tokens_per_request: expected 1 where arrangement is sequences, got {self.tokens_per_request}"
            )
        if self.num_tokens % self.tokens_per_request:
            raise UserError(
                f"num_tokens: expected a multiple of tokens_per_request ({self.tokens_per_request}), "
                f"got {self.num_tokens}"
            )
        self._check_recordings()
        # Too few requests, too short sequences or a damaged layer are found now, not in the middle of a run.
        _ = self._num_requests, self._pools, self._full if self.tail == RECORDED else self._routing

    def _check_recordings(self) -> None:
        first = self.traces[0]
        for trace in self.traces:
            for name in ("num_experts", "top_k"):
                recorded, expected = getattr(trace, name), getattr(self, name)
                if recorded != expected:
                    raise UserError(f"{trace.path}: {name}: the model has {expected}, the recording {recorded}")
            for name in ("model", "score"):
                if trace.metadata[name] != first.metadata[name]:
                    raise UserError(
                        f"{trace.path}: {name}: expected {first.metadata[name]!r} as in {first.path.name}, "
                        f"got {trace.metadata[name]!r}"
                    )
            if trace.num_layers != first.num_layers:
                raise UserError(
                    f"{trace.path}: layers: expected {first.num_layers} as in {first.path.name}, got {trace.num_layers}"
                )
            if self.tail == RECORDED and not trace.has_full_scores:
                raise UserError(
                    f"{trace.path}: tail: expected {' or '.join(TAILS)}, because the recording holds the scores of the "
                    f"top-k only; got {RECORDED!r}"
                )
        if first.scores_are_normalised:
            least = self.top_k / self.num_experts
            if self.topk_share is None:
                raise UserError(
                    f"{first.path}: topk_share: needed, because the recorded scores are normalised over the top-k; "
                    f"expected a number between {least:g} and 1"
                )
            self._check_topk_share()
        elif self.topk_share is not None:
            raise UserError(
                f"{first.path}: topk_share: expected none, because the recorded scores are not normalised over the "
                f"top-k; got {self.topk_share:g}"
            )

    @cached_property
    def sources(self) -> tuple[Source, ...]:
        """The recordings, with shares that sum to 1."""
        if isinstance(self.path, str | Path):
            return (Source(self.path),)
        sources = [Source(*source) for source in self.path]
        files = set()
        for path, _ in sources:
            if Path(path).resolve() in files:
                raise UserError(f"{path}: expected every recording once, got it twice")
            files.add(Path(path).resolve())
        total = math.fsum(share for _, share in sources)
        return tuple(Source(path, share / total) for path, share in sources)

    @cached_property
    def traces(self) -> tuple[Trace, ...]:
        """The opened recordings, in the order of ``sources``."""
        return tuple(open_trace(source.path) for source in self.sources)

    def sequence_lengths(self, index: int) -> NDArray[np.int64]:
        return self._spans(index)[1]

    def make_scores(self, index: int, runs: Sequence[Run]) -> Iterator[NDArray[np.float32]]:
        first_S, length_S = self._spans(index)
        end_S = length_S.cumsum()
        offset_S = first_S + length_S - end_S

        def tokens(chunk: list[Run]) -> NDArray[np.int64]:
            row_T = row_numbers(chunk)
            return row_T + offset_S[np.searchsorted(end_S, row_T, side="right")]

        if self.tail == RECORDED:
            for chunk in in_chunks(runs, rows_at_once(self.num_experts)):
                yield self._full.scores_TE[tokens(chunk)]
            return
        ids_TK, fitted, weights_E = self._routing
        for chunk in in_chunks(runs, rows_at_once(self.num_experts)):
            jitter = [uniform_rows(self.seed, Stream.TAIL, index, *run, self.num_experts) for run in chunk]
            token_T, jitter_TE = tokens(chunk), np.concatenate(jitter)
            yield fill_tail(ids_TK[token_T].astype(np.int64), fitted.scores_TK[token_T], weights_E, jitter_TE)

    def _spans(self, index: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The first recorded token of each sequence (or slot) of a batch, and how many there are: both int64 [S]."""
        if self.arrangement == "decode":
            first_B = self._steps[index]
            return first_B, np.full_like(first_B, self.tokens_per_request)
        return self._pieces[index]

    def describe(self) -> dict[str, object]:
        scaled, raised, changed = self._changed_rows()
        sources = self._describe_sources()
        metadata = self.traces[0].metadata
        num_recorded = int(self._offsets[-1])
        requests = sum(source["requests_per_batch"] for source in sources)
        if self.arrangement == "decode":
            each = "1 token" if self.tokens_per_request == 1 else f"{self.tokens_per_request} tokens"
            of = sum(source["num_sequences"] for source in sources)
            size = f"{self.num_batches} decoding steps of {requests:g} requests x {each} from {of} sequences"
        else:
            passes = " + ".join(f"{source['passes_per_batch']:.2f}" for source in sources)
            size = (
                f"{self.num_batches} x {self.num_tokens} tokens in whole sequences, "
                f"a batch uses the recording{'s' * (len(sources) > 1)} {passes} times"
            )
        assumed = "scores assumed, " if self.traces[0].scores_are_assumed else ""
        return {
            "kind": "recorded",
            "description": (
                f"{metadata['model']}, layer {self.layer}, {assumed}{_mixture_words(sources)}, {size}, "
                f"{changed}, seed {self.seed}"
            ),
            "tail_model": None if self.tail == RECORDED else self.tail,
            "targets": {} if self.topk_share is None else {"topk_share": self.topk_share},
            "achieved": self.achieved(),
            "recording": {
                "model": metadata["model"],
                "score": metadata["score"],
                "layer": self.layer,
                "num_tokens": num_recorded,
                "rows_scaled": scaled,
                "rows_raised": raised,
                "arrangement": self.arrangement,
                "requests_per_batch": requests,
                "tokens_per_request": self.tokens_per_request,
                "sources": sources,
            },
        }

    def _changed_rows(self) -> tuple[int, int, str]:
        """Recorded rows that were scaled and raised, and what was done to scores, in words."""
        of = f"of {int(self._offsets[-1])}"
        if self.tail == RECORDED:
            capped = self._full.rows_capped
            return 0, 0, f"all scores recorded, {capped} rows {of} capped to keep the recorded top-k ahead"
        _, fitted, _ = self._routing
        scaled, raised = fitted.rows_scaled, fitted.rows_raised
        return scaled, raised, f"{self.tail} tail, {scaled} rows scaled and {raised} raised {of} to make room for it"

    def _describe_sources(self) -> list[dict[str, Any]]:
        """Provenance of each recording, and what of it the batches hold."""
        tokens_NM = np.empty((self.num_batches, len(self.traces)), dtype=np.int64)
        requests_NM = np.empty_like(tokens_NM)
        for index in range(self.num_batches):
            first_S, length_S = self._spans(index)
            source_S = np.searchsorted(self._offsets, first_S, side="right") - 1
            tokens_NM[index] = np.bincount(source_S, length_S, minlength=len(self.traces))
            requests_NM[index] = np.bincount(source_S, minlength=len(self.traces))
        return [
            {
                "file": trace.path.name,
                "sha256": trace.sha256(),
                **{name: trace.metadata[name] for name in ("domain", "phase", "source", "licence")},
                "num_tokens": trace.num_tokens,
                "num_sequences": pool.start_S.size,
                "share": pool.share,
                "share_achieved": float(tokens_N.mean() / self.num_tokens),
                "share_achieved_range": [
                    float(tokens_N.min() / self.num_tokens),
                    float(tokens_N.max() / self.num_tokens),
                ],
                "requests_per_batch": float(requests_N.mean()),
                "passes_per_batch": float(tokens_N.mean() / trace.num_tokens),
            }
            for trace, pool, tokens_N, requests_N in zip(
                self.traces, self._pools, tokens_NM.T, requests_NM.T, strict=True
            )
        ]

    @cached_property
    def _offsets(self) -> NDArray[np.int64]:
        """Where each recording's tokens begin among those of all, and where all end."""
        return np.cumsum([0, *(trace.num_tokens for trace in self.traces)])

    @cached_property
    def _routing(self) -> tuple[NDArray[np.unsignedinteger], FittedTopK, NDArray[np.float64]]:
        """The layer as it will be used, of all recordings: recorded ids, fitted scores, tail weights."""
        layers = [trace.read_layer(self.layer) for trace in self.traces]
        ids_TK, recorded_TK = (np.concatenate(parts) for parts in zip(*layers, strict=True))
        scores_TK = recorded_TK.astype(np.float64)
        if self.topk_share is not None:
            # The sums are 1 but for rounding; dividing by them gives the share asked for exactly.
            scores_TK *= self.topk_share / scores_TK.sum(axis=1, keepdims=True)
        # As if there were as many tokens as recorded, but in the shares of the mixture.
        load_E = np.zeros(self.num_experts)
        for source, (ids_of_one_TK, _) in zip(self.sources, layers, strict=True):
            one_E = np.bincount(ids_of_one_TK.ravel(), minlength=self.num_experts)
            load_E += one_E * (source.share * (len(ids_TK) / len(ids_of_one_TK)))
        weights_E = np.ones(self.num_experts) if self.tail == "uniform" else load_E + 1
        return ids_TK, fit_top_k(scores_TK, self.num_experts), weights_E

    @cached_property
    def _full(self) -> FullRows:
        """The layer's scores of all experts as they will be used, of all recordings."""
        layers = [trace.read_layer(self.layer)[0] for trace in self.traces]
        full = [trace.read_full_scores(self.layer) for trace in self.traces]
        return keep_top_k_ahead(np.concatenate(layers).astype(np.int64), np.concatenate(full))

    @cached_property
    def _pools(self) -> list[Pool]:
        """What is drawn from: sequences, but for those that are too short for a request's step."""
        pools = []
        for source, trace, offset in zip(self.sources, self.traces, self._offsets.tolist(), strict=False):
            bound_S = trace.start_S if self.tokens_per_request == 1 else trace.consecutive_starts()
            start_S, end_S = bound_S[:-1], bound_S[1:]
            length_S = end_S - start_S
            enough_S = length_S >= self.tokens_per_request
            if not enough_S.any():
                raise UserError(
                    f"{trace.path}: tokens_per_request: expected at most {length_S.max()}, the longest sequence, "
                    f"got {self.tokens_per_request}"
                )
            pools.append(Pool(start_S[enough_S] + offset, end_S[enough_S] + offset, source.share))
        return pools

    @cached_property
    def _num_requests(self) -> list[int]:
        """Slots of each recording in a decoding step."""
        if self.arrangement != "decode":
            return []
        total = self.num_tokens // self.tokens_per_request
        num_requests = apportion([source.share for source in self.sources], total)
        for source, requests in zip(self.sources, num_requests, strict=True):
            if not requests:
                raise UserError(
                    f"{source.path}: share: expected a share that gives a request in every step, got "
                    f"{source.share:.3g} of {total} requests (num_tokens / tokens_per_request)"
                )
        return num_requests

    @cached_property
    def _pieces(self) -> list[tuple[NDArray[np.int64], NDArray[np.int64]]]:
        """The sequences of every batch: the first token of each, and how many there are."""
        randoms = (generator(self.seed, Stream.SEQUENCES, index) for index in range(self.num_batches))
        spans = (np.array(pieces, np.int64).T for pieces in draw_sequences(self._pools, self.num_tokens, randoms))
        return [(first_S, end_S - first_S) for first_S, end_S in spans]

    @cached_property
    def _steps(self) -> NDArray[np.int64]:
        """The first token of every request in every decoding step."""
        random = generator(self.seed, Stream.SEQUENCES)
        return draw_steps(self._pools, self._num_requests, self.tokens_per_request, self.num_batches, random)


def _mixture_words(sources: Sequence[dict[str, Any]]) -> str:
    """Domains with their shares, and who recorded them how."""
    domains = [str(source["domain"]) for source in sources]
    if len(sources) > 1:
        domains = [
            f"{domain} {source['share_achieved']:.1%} (asked for {source['share']:.1%})"
            for domain, source in zip(domains, sources, strict=True)
        ]
    origins = dict.fromkeys(f"{source['phase']} by {source['source']} ({source['licence']})" for source in sources)
    return f"{' + '.join(domains)}, recorded in {' and '.join(origins)}"
