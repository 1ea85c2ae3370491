"""What a recording says of a model's routing: how skewed its loads are, and how alike its tokens.

What a policy can win under expert parallelism is decided by few properties of the traffic. *Loads*
say how much later the fullest expert or rank ends than the mean one. *Scores* say how much mass
the chosen experts hold and how fast it falls from the best to the last, so how little a dropped
pair may cost. *Likeness* of tokens says how many experts' weights a decode step has to read.
``trace_statistics`` takes them off a ``moe-trace-v1`` recording, one layer in memory at a time;
``loads_statistics`` takes what counts allow off a file of expert loads.

Load of one layer over the whole recording (a *pair* is a token and one of its top-k experts)

- *expert load*: pairs of an expert. *Peak load*: the fullest expert's over the mean T * K / E; 1 is balance,
  E / K is collapse (every token chooses the same K experts).
- *rank load* at EP size R: the same for ranks that host E / R experts each, contiguously (expert e lives on
  rank e // (E / R)): pairs of the fullest rank over the mean rank's T * K / R. At R = E it is the peak load.
- *coefficient of variation*: population standard deviation of the expert load over its mean.
- *entropy*: of the expert load as a distribution, over log E: 1 is balance, 0 one expert for all.

Scores, means over tokens

- *mean score by rank*: of the best, the second best, ... the K-th best expert of a token. *Decay by rank*: the
  same over the mean best score. *Top-k share*: the share of a token's score mass, over all experts, that its
  top-k hold; unknown where the recorded scores were normalised over the top-k.

Likeness of tokens

- *neighbour overlap*: mean number of experts that two adjacent tokens of a sequence (positions that differ by
  one) have in common. Independent, uniform choices share K * K / E.
- *activated experts*: mean number of distinct experts that a batch of B tokens chooses. Independent, uniform
  choices reach E * (1 - (1 - K / E) ** B). *Batch peak load*: mean over the same batches of each one's own peak
  load. Which tokens make a batch is said by ``batches``.

Shapes: T = recorded tokens, S = sequences, E = experts, K = top_k, N = batches, B = tokens of a batch, R = EP ranks.
"""

from __future__ import annotations

import hashlib
import heapq
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Annotated

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from moe_ep_bench.errors import UserError
from moe_ep_bench.files import read_bytes, read_json
from moe_ep_bench.presets import problem_words
from moe_ep_bench.workload.formatting import tokens_words
from moe_ep_bench.workload.trace import Trace, open_trace

BATCH_SIZES = tuple(2**power for power in range(11))  # 1 to 1024
# Tokens counted at once; bounds what is held beside the layer itself, and changes no result.
_CHUNK = 1 << 14


@dataclass(frozen=True, eq=False)
class LayerStatistics:
    """One layer's numbers, as the module defines them.

    Attributes:
        name: the layer as the file counts it.
        load_E: int64 [E], pairs of each expert; some are above 0.
        mean_score_K: float64 [K], by rank, best first; None where no scores are recorded.
        neighbour_overlap: in experts; None where only counts are recorded or no two tokens are adjacent.
        activated, batch_peak: by batch size; sizes for which the recording has no batch are left out.
    """

    name: str
    load_E: NDArray[np.int64]
    mean_score_K: NDArray[np.float64] | None = None
    neighbour_overlap: float | None = None
    activated: Mapping[int, float] = field(default_factory=dict)
    batch_peak: Mapping[int, float] = field(default_factory=dict)

    @cached_property
    def peak_load(self) -> float:
        return rank_load(self.load_E, self.load_E.size)

    @cached_property
    def load_cv(self) -> float:
        return float(self.load_E.std() / self.load_E.mean())

    @cached_property
    def load_entropy(self) -> float:
        share_E = self.load_E[self.load_E > 0] / self.load_E.sum()
        # Rounding may carry a balanced load past 1, and one expert's below 0.
        return min(max(float(-(share_E * np.log(share_E)).sum()) / math.log(self.load_E.size), 0.0), 1.0)

    def rank_load(self, ep_size: int) -> float:
        return rank_load(self.load_E, ep_size)

    @property
    def decay(self) -> NDArray[np.float64] | None:
        """Float64 [K]: mean score by rank over the mean best score."""
        if self.mean_score_K is None or self.mean_score_K[0] == 0:
            return None
        return self.mean_score_K / self.mean_score_K[0]


@dataclass(frozen=True, eq=False)
class RecordingStatistics:
    """The statistics of one recording, and what has to be known to read them.

    Attributes:
        file: its name, without folders. sha256: of the whole file, hex.
        num_sequences, phase, score: None where only counts are recorded.
        score_share_is_known: whether the scores are shares of all experts' mass, so that there is a top-k share.
    """

    file: str
    sha256: str
    model: str
    domain: str
    source: str
    licence: str
    num_experts: int
    top_k: int
    num_tokens: int
    layers: tuple[LayerStatistics, ...]
    num_sequences: int | None = None
    phase: str | None = None
    score: str | None = None
    score_share_is_known: bool = False

    @property
    def counts_only(self) -> bool:
        return self.phase is None

    @property
    def has_scores(self) -> bool:
        return self.layers[0].mean_score_K is not None

    @property
    def ep_sizes(self) -> tuple[int, ...]:
        """2, 4, 8, ... below E, as far as they divide E."""
        powers = (2**power for power in range(1, self.num_experts.bit_length()))
        return tuple(size for size in powers if size < self.num_experts and self.num_experts % size == 0)

    @property
    def batch_sizes(self) -> tuple[int, ...]:
        """Those of ``BATCH_SIZES`` for which the recording has at least one batch."""
        return tuple(self.layers[0].activated)

    @property
    def uniform_overlap(self) -> float:
        """Experts that two tokens share when both choose independently and uniformly."""
        return self.top_k**2 / self.num_experts

    def uniform_activated(self, batch_size: float) -> float:
        """Distinct experts that ``batch_size`` tokens choose when all choose independently and uniformly."""
        return self.num_experts * (1 - (1 - self.top_k / self.num_experts) ** batch_size)

    @property
    def shape_words(self) -> str:
        """The model and its routed part."""
        layers = f"{len(self.layers)} layer{'s' if len(self.layers) > 1 else ''}"
        return f"{self.model}: {layers} x {self.num_experts} experts, top-{self.top_k}"

    @property
    def token_words(self) -> str:
        """How much was recorded."""
        tokens = tokens_words(self.num_tokens)
        return tokens if self.num_sequences is None else f"{tokens} in {self.num_sequences:,} sequences"

    @property
    def batch_words(self) -> str:
        """Which tokens make a batch."""
        if self.phase == "decode":
            return "a batch of B: one step of B sequences that decode side by side"
        return "a batch of B: B consecutive tokens"

    def topk_share(self, layer: LayerStatistics) -> float | None:
        """Mean share of the score mass that a token's top-k hold; None where it is not recorded."""
        if not self.score_share_is_known or layer.mean_score_K is None:
            return None
        return float(layer.mean_score_K.sum())


def statistics(path: str | Path) -> list[RecordingStatistics]:
    """Statistics of every recording in a file: one of a ``moe-trace-v1`` file, several of a ``.json`` of expert loads.

    Raises:
        ValueError: a file that cannot be used; the message names it and says what is wrong.
    """
    if Path(path).suffix == ".json":
        return loads_statistics(path)
    return [trace_statistics(open_trace(path))]


def trace_statistics(trace: Trace, batch_sizes: Sequence[int] = BATCH_SIZES) -> RecordingStatistics:
    """Statistics of a recording, layer by layer.

    Raises:
        ValueError: a damaged layer; the message names the file, the layer and what is wrong.
    """
    facts = trace.metadata
    # The first of each pair of adjacent tokens, one position apart in a sequence.
    first_N = np.setdiff1d(np.arange(trace.num_tokens), trace.consecutive_starts() - 1)
    token_NB_of = {size: batches(trace.start_S, facts["phase"], size) for size in batch_sizes}
    token_NB_of = {size: token_NB for size, token_NB in token_NB_of.items() if len(token_NB)}

    layers = []
    for index in range(trace.num_layers):
        ids_TK, scores_TK = trace.read_layer(index)
        ids_TK = ids_TK.astype(np.int64)
        of_batches = {size: _batch_means(ids_TK, token_NB, trace.num_experts) for size, token_NB in token_NB_of.items()}
        layers.append(
            LayerStatistics(
                name=str(index),
                load_E=np.bincount(ids_TK.ravel(), minlength=trace.num_experts),
                mean_score_K=None if trace.scores_are_assumed else scores_TK.mean(axis=0, dtype=np.float64),
                neighbour_overlap=_overlap(ids_TK, first_N),
                activated={size: activated for size, (activated, _) in of_batches.items()},
                batch_peak={size: peak for size, (_, peak) in of_batches.items()},
            )
        )
    return RecordingStatistics(
        file=trace.path.name,
        sha256=trace.sha256(),
        **{name: facts[name] for name in ("model", "domain", "source", "licence", "phase", "score")},
        num_experts=trace.num_experts,
        top_k=trace.top_k,
        num_tokens=trace.num_tokens,
        num_sequences=len(trace.start_S) - 1,
        score_share_is_known=not trace.scores_are_normalised,
        layers=tuple(layers),
    )


def loads_statistics(path: str | Path) -> list[RecordingStatistics]:
    """Statistics of recordings that are counts only.

    The file is a JSON list; each entry has ``model``, ``top_k``, ``domain``, ``source``, ``licence`` and
    ``load_E_by_layer`` (a layer's name -> the pairs of each of its experts), and may have a ``variant`` of the model.

    Raises:
        ValueError: no such file, or not as above; the message names the file, the entry and what is wrong.
    """
    path = Path(path)
    if not path.is_file():
        raise UserError(f"{path}: no such file")
    content = read_bytes(path)
    try:
        entries = TypeAdapter(Annotated[list[_Loads], Field(min_length=1)]).validate_python(read_json(path))
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise UserError(f"{path}: {place + ': ' if place else ''}{problem_words(first)}") from None
    recordings = []
    for index, entry in enumerate(entries):
        loads = {layer: np.array(load, dtype=np.int64) for layer, load in entry.load_E_by_layer.items()}
        shapes = {load_E.size for load_E in loads.values()}
        totals = {int(load_E.sum()) for load_E in loads.values()}
        problem = None
        if len(shapes) != 1:
            problem = f"expected the same number of experts in every layer, got {sorted(shapes)}"
        elif min(shapes) <= entry.top_k:
            problem = f"expected more experts than top_k ({entry.top_k}), got {min(shapes)}"
        elif len(totals) != 1 or min(totals) == 0 or min(totals) % entry.top_k:
            problem = f"expected top_k ({entry.top_k}) pairs of each token in every layer, got {sorted(totals)} pairs"
        if problem:
            raise UserError(f"{path}: {index}.load_E_by_layer: {problem}")
        recordings.append(
            RecordingStatistics(
                file=path.name,
                sha256=hashlib.sha256(content).hexdigest(),
                model=entry.model if entry.variant is None else f"{entry.model} ({entry.variant})",
                domain=entry.domain,
                source=entry.source,
                licence=entry.licence,
                num_experts=min(shapes),
                top_k=entry.top_k,
                num_tokens=min(totals) // entry.top_k,
                layers=tuple(LayerStatistics(layer, load_E) for layer, load_E in loads.items()),
            )
        )
    return recordings


def rank_load(load_E: NDArray[np.int64], ep_size: int) -> float:
    """Pairs of the fullest of ``ep_size`` ranks over the mean rank's; experts are placed contiguously.

    Raises:
        ValueError: the ranks cannot host equally many experts.
    """
    if ep_size < 1 or load_E.size % ep_size:
        raise UserError(f"ep_size: expected a divisor of {load_E.size} experts, got {ep_size}")
    load_R = load_E.reshape(ep_size, -1).sum(axis=1)
    return float(load_R.max() * ep_size / load_R.sum())


def batches(start_S: NDArray[np.int64], phase: str, batch_size: int) -> NDArray[np.int64]:
    """The tokens of each batch that serving would make of a recording.

    ``decode``: every step takes one token of each of ``batch_size`` sequences. They start with the first ones of
    the recording, side by side; where one ends, the next recorded one takes its place in the following step.
    Steps in which fewer run, at the end, are left out. Any other phase (prefill): consecutive tokens, one
    sequence after the other; a rest that fills no batch is left out.

    Args:
        start_S: int64 [S + 1], as of ``Trace``.

    Returns:
        int64 [N, B], indices of tokens; no batches where the recording has too few sequences or tokens.
    """
    num_tokens = int(start_S[-1])
    if phase != "decode":
        num_batches = num_tokens // batch_size
        return np.arange(num_batches * batch_size).reshape(num_batches, batch_size)
    num_sequences = len(start_S) - 1
    if num_sequences < batch_size:
        return np.empty((0, batch_size), dtype=np.int64)
    token_of_slot: list[list[NDArray[np.int64]]] = [[] for _ in range(batch_size)]
    ends = [(0, slot) for slot in range(batch_size)]  # when each slot is free; already a heap
    for first, end in pairwise(start_S.tolist()):
        step, slot = ends[0]
        heapq.heapreplace(ends, (step + end - first, slot))
        token_of_slot[slot].append(np.arange(first, end))
    num_steps = ends[0][0]
    return np.stack([np.concatenate(tokens)[:num_steps] for tokens in token_of_slot], axis=1)


class _Loads(BaseModel):
    """One entry of a file of expert loads."""

    model_config = ConfigDict(extra="forbid", strict=True)
    model: str
    variant: str | None = None
    top_k: Annotated[int, Field(ge=1)]
    domain: str
    source: str
    licence: str
    load_E_by_layer: Annotated[dict[str, list[Annotated[int, Field(ge=0, le=1 << 48)]]], Field(min_length=1)]


def _overlap(ids_TK: NDArray[np.int64], first_N: NDArray[np.int64]) -> float | None:
    """Mean number of experts that tokens ``first_N`` have in common with the token after them."""
    if not len(first_N):
        return None
    common = 0
    for rows in _chunks(len(first_N), _CHUNK):
        here_N = first_N[rows]
        common += int((ids_TK[here_N, :, None] == ids_TK[here_N + 1, None, :]).sum())
    return common / len(first_N)


def _batch_means(ids_TK: NDArray[np.int64], token_NB: NDArray[np.int64], num_experts: int) -> tuple[float, float]:
    """Mean over batches of the activated experts and of the peak load."""
    num_batches, batch_size = token_NB.shape
    activated, fullest = 0, 0
    for rows in _chunks(num_batches, max(1, _CHUNK // batch_size)):
        ids_NP = ids_TK[token_NB[rows]].reshape(-1, batch_size * ids_TK.shape[1])
        cell_NP = ids_NP + num_experts * np.arange(len(ids_NP))[:, None]
        load_NE = np.bincount(cell_NP.ravel(), minlength=len(ids_NP) * num_experts).reshape(-1, num_experts)
        activated += int(np.count_nonzero(load_NE))
        fullest += int(load_NE.max(axis=1).sum())
    mean_load = batch_size * ids_TK.shape[1] / num_experts
    return activated / num_batches, fullest / num_batches / mean_load


def _chunks(length: int, size: int) -> Iterator[slice]:
    return (slice(start, start + size) for start in range(0, length, size))
