"""Batches that replay what a real model's router chose.

Each batch is a random selection of *whole* recorded sequences, so that the skew of a text, and
the likeness of neighbouring tokens, reach the ranks as they do in service. The recorded choices
are kept to the letter: the top-k of every row of a batch are the recorded experts, in their
recorded order. Their scores are kept too, but for what ``tail.fit_top_k`` had to mend and a unit
in the last place of float32 where recorded scores tie. The scores below the top-k, which no recording holds,
come from a tail model; ``describe`` names it.

Some recordings (GPT-OSS) hold scores that were normalised over the top-k. What share of the score
mass the top-k had is then not known and the user has to say: ``topk_share``.

Shapes: T = tokens, E = experts, K = top_k.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from moe_ep_bench.workload.batch import TokenBatch, Workload
from moe_ep_bench.workload.randomness import Stream, generator
from moe_ep_bench.workload.tail import TAILS, FittedTopK, fill_tail, fit_top_k, tail_weights
from moe_ep_bench.workload.trace import Trace, open_trace


@dataclass(frozen=True, eq=False)
class RecordedWorkload(Workload):
    """Batches of whole sequences of one layer of a ``moe-trace-v1`` recording.

    A batch takes sequences in a random order until it has its tokens; the last is cut to fit. A
    recording that is shorter than a batch is gone through again, in a fresh order, as often as it takes.

    Attributes:
        path: the recording.
        layer: which recorded layer, from 0.
        num_experts, top_k: of the model that is measured; the recording must agree.
        num_tokens: tokens in a batch, all ranks together.
        num_batches: how many batches there are.
        tail: ``popularity`` or ``uniform``, see ``tail.py``.
        seed: at least 0.
        topk_share: share of a token's score mass that its top-k hold, above K / E and below 1. Needed where
            the recorded scores are normalised over the top-k, and only there. Every row gets exactly this
            share unless no tail would fit under its K-th score: such rows get more, and are counted.

    Raises:
        ValueError: a file that cannot be used or a field that does not suit it; the message names which.
    """

    path: str | Path
    layer: int
    num_experts: int
    top_k: int
    num_tokens: int
    num_batches: int
    tail: str
    seed: int
    topk_share: float | None = None

    def __post_init__(self) -> None:
        for name in ("num_tokens", "num_batches"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: expected at least 1, got {getattr(self, name)}")
        if self.seed < 0:
            raise ValueError(f"seed: expected at least 0, got {self.seed}")
        if self.tail not in TAILS:
            raise ValueError(f"tail: expected {' or '.join(TAILS)}, got {self.tail!r}")
        for name in ("num_experts", "top_k"):
            recorded, expected = getattr(self.trace, name), getattr(self, name)
            if recorded != expected:
                raise ValueError(f"{self.path}: {name}: the model has {expected}, the recording {recorded}")
        if self.trace.scores_are_normalised:
            least = self.top_k / self.num_experts
            if self.topk_share is None:
                raise ValueError(
                    f"{self.path}: topk_share: needed, because the recorded scores are normalised over the top-k; "
                    f"expected a number between {least:g} and 1"
                )
            if not least < self.topk_share < 1:
                raise ValueError(
                    f"topk_share: expected a number between {least:g} (top_k / experts) and 1, got {self.topk_share:g}"
                )
        elif self.topk_share is not None:
            raise ValueError(
                f"{self.path}: topk_share: expected none, because the recorded scores are not normalised over the "
                f"top-k; got {self.topk_share:g}"
            )
        _ = self._routing  # a damaged layer is found now, not in the middle of a run

    @cached_property
    def trace(self) -> Trace:
        return open_trace(self.path)

    def make_batch(self, index: int) -> TokenBatch:
        ids_TK, fitted, weights_E = self._routing
        token_T, sequence_id_T = self.draw(index)
        scores_TE = fill_tail(
            ids_TK[token_T].astype(np.int64),
            fitted.scores_TK[token_T],
            weights_E,
            generator(self.seed, Stream.TAIL, index),
        )
        return TokenBatch(torch.from_numpy(scores_TE), torch.from_numpy(sequence_id_T))

    def describe(self) -> dict[str, object]:
        _, fitted, _ = self._routing
        facts = {name: self.trace.metadata[name] for name in ("model", "domain", "phase", "score", "source", "licence")}
        passes = self.num_tokens / self.trace.num_tokens
        return {
            "kind": "recorded",
            "description": (
                f"{facts['model']}, {facts['domain']}, {facts['phase']}, layer {self.layer}, recorded by "
                f"{facts['source']} ({facts['licence']}), {self.num_batches} x {self.num_tokens} tokens in whole "
                f"sequences, a batch uses the recording {passes:.2f} times, {self.tail} tail, "
                f"{fitted.rows_scaled} rows scaled and {fitted.rows_raised} raised of {self.trace.num_tokens} "
                f"to make room for it, seed {self.seed}"
            ),
            "tail_model": self.tail,
            "targets": {} if self.topk_share is None else {"topk_share": self.topk_share},
            "achieved": self.achieved(),
            "recording": {
                "file": Path(self.path).name,
                "sha256": self.trace.sha256(),
                **facts,
                "layer": self.layer,
                "num_tokens": self.trace.num_tokens,
                "passes_per_batch": passes,
                "rows_scaled": fitted.rows_scaled,
                "rows_raised": fitted.rows_raised,
            },
        }

    @cached_property
    def _routing(self) -> tuple[NDArray[np.uint8], FittedTopK, NDArray[np.float64]]:
        """The layer as it will be used: recorded ids, fitted scores, tail weights."""
        ids_TK, recorded_TK = self.trace.read_layer(self.layer)
        scores_TK = recorded_TK.astype(np.float64)
        if self.topk_share is not None:
            # The sums are 1 but for rounding; dividing by them gives the share asked for exactly.
            scores_TK *= self.topk_share / scores_TK.sum(axis=1, keepdims=True)
        return ids_TK, fit_top_k(scores_TK, self.num_experts), tail_weights(self.tail, ids_TK, self.num_experts)

    def draw(self, index: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Which recorded tokens make up a batch, and which of its sequences each belongs to."""
        random = generator(self.seed, Stream.SEQUENCES, index)
        start_S = self.trace.start_S.tolist()
        pieces: list[NDArray[np.int64]] = []
        missing = self.num_tokens
        while missing:
            for sequence in random.permutation(len(start_S) - 1).tolist():
                first = start_S[sequence]
                pieces.append(np.arange(first, min(start_S[sequence + 1], first + missing)))
                missing -= pieces[-1].size
                if not missing:
                    break
        return np.concatenate(pieces), np.repeat(np.arange(len(pieces)), [piece.size for piece in pieces])
