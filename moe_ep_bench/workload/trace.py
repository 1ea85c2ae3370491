"""Reader and writer of ``moe-trace-v1``: choices of a real model's router, token by token and layer by layer.

A safetensors file (never unpickled) with

=============  ========================  =====================================================
expert_ids     uint8   [layers, T, K]    the top-k of each token, best first; uint16 above 256 experts
scores         float16 [layers, T, K]    their scores, in the same order
sequence_id    int32   [T]               which text a token is from, a name from 0; its tokens are adjacent
position       int32   [T]               place of the token in that text, from 0, ascending; gaps are tokens left out
full_scores    float32 [layers, T, E]    optional: the scores of all experts, by their index; a row sums to 1
arrival_s      float64 [S]               optional: when each text came, in seconds from any start, in the file's order
=============  ========================  =====================================================

Texts stand in the order in which they came: by ``arrival_s`` where times are known, else as their source has them.
Times are those at which a server received requests, or where it does not say, of the first step that served them.
``replay`` makes windows in time of the order.

A recording may also be a folder of *parts*, ``00000.safetensors`` and so on, as a server's recorder writes them. Each
is such a file, and a text may go on from part to part. ``open_trace`` joins them: texts and tokens stand as in one
file, and the last part's note is that of all. While ``../unfinished`` exists, later parts may come, or were lost.

String metadata is ``format``, ``model``, ``num_experts`` (at most 1,024), ``top_k``, ``score``, ``phase``, ``domain``,
``source`` and ``licence``. ``score`` says what the scores are:

* ``softmax, not renormalised``, or anything else: shares of a token's whole score mass, so at most 1 in sum;
* with ``softmax over the top-k`` in it: 1 in sum;
* beginning with ``assumed``: nobody recorded scores. Those of a row's experts are equal, and only the ids say anything.

Files come from elsewhere: safetensors holds the header against the file, header and sequences are checked when a trace
is opened, a layer when it is read. The file is mapped, not loaded: layers that nobody asks for are never read.

Shapes: T = recorded tokens (of a block, where they are written), S = sequences (texts), E = experts, K = top_k.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from moe_ep_bench.errors import UserError, brief
from moe_ep_bench.files import atomic_path

FORMAT = "moe-trace-v1"
METADATA = ("format", "model", "num_experts", "top_k", "score", "phase", "domain", "source", "licence")
FULL_SCORES, ARRIVAL = "full_scores", "arrival_s"
OPTIONAL = {FULL_SCORES, ARRIVAL}
# Names of a part, and of a file beside a folder of parts whose recorder has not ended, or was killed.
PART, UNFINISHED = "{:05d}.safetensors", "unfinished"
# Axes (L = layers), and types as safetensors and numpy name them; ids of more than 256 experts take the second. In a
# file wide ones come first, so that each is aligned.
TENSORS = {
    ARRIVAL: ("S", {"F64": "<f8"}),
    "position": ("T", {"I32": "<i4"}),
    "sequence_id": ("T", {"I32": "<i4"}),
    FULL_SCORES: ("LTE", {"F32": "<f4"}),
    "scores": ("LTK", {"F16": "<f2"}),
    "expert_ids": ("LTK", {"U8": "<u1", "U16": "<u2"}),
}
# How far a row may sum beyond what its score function allows: K roundings to float16 or bfloat16
# stay below half of this (the worst row of our recordings is off by 0.0034).
SUM_TOLERANCE = 0.02
MAX_EXPERTS = 1024


@dataclass(frozen=True, eq=False)
class Trace:
    """An opened recording: its header, and ``read_layer`` for the rest.

    Attributes:
        metadata: the file's own, all strings.
        start_S: int64 [S + 1]; sequence s holds the tokens ``start_S[s]`` to ``start_S[s + 1] - 1``.
    """

    path: Path
    metadata: Mapping[str, str]
    num_layers: int
    num_tokens: int
    num_experts: int
    top_k: int
    start_S: NDArray[np.int64]
    has_full_scores: bool
    """Whether the scores of all experts were recorded, not of the top-k alone."""
    arrival_S: NDArray[np.float64] | None = None
    """When each text came, seconds from any start; None = not recorded."""
    parts: tuple[Path, ...] = ()
    """The files; one alone is the recording itself."""
    order_T: NDArray[np.int64] | None = None
    """Where each token stands in the parts, one after the other; None = in this order."""

    @property
    def stage(self) -> str:
        """Prefill, decode, both or training: the key ``phase`` of the files."""
        return self.metadata["phase"]

    @property
    def scores_are_normalised(self) -> bool:
        """Whether every row sums to 1 over the top-k, so that their share of all score mass is unknown."""
        return scores_are_normalised(self.metadata["score"])

    @property
    def scores_are_assumed(self) -> bool:
        """Whether the source had expert ids only, so that nothing which follows from scores was recorded."""
        return self.metadata["score"].startswith("assumed")

    def layer_of(self, row: int, moe_layers: Sequence[int]) -> int | None:
        """The model's layer that a recorded one is, of the layers that the model routes; None where nothing tells.

        As many as the model routes are these, and else those that the source names, where the model routes them.
        """
        named = {str(number): number for number in moe_layers}
        stated = [named.get(word.strip()) for word in self.metadata.get("source_layers", "").split(",")]
        numbers = moe_layers if len(moe_layers) == self.num_layers else stated
        return numbers[row] if len(numbers) == self.num_layers and None not in numbers else None

    def read_layer(self, layer: int) -> tuple[NDArray[np.unsignedinteger], NDArray[np.float16]]:
        """Read and check one layer: expert ids and scores, both [T, K], best first.

        Raises:
            ValueError: no such layer, or routing that no router makes; the message names the file and what is wrong.
        """
        ids_TK, scores_TK = self._read(layer, "expert_ids"), self._read(layer, "scores")
        if problem := find_problem(ids_TK, scores_TK, self.num_experts, self.scores_are_normalised):
            raise UserError(f"{self.path}: layer {layer}: token {problem[0]}: {problem[1]}")
        return ids_TK, scores_TK

    def read_full_scores(self, layer: int) -> NDArray[np.float32]:
        """Read and check one layer's scores of all experts: [T, E]. The file must have them.

        Raises:
            ValueError: no such layer, or scores that no router gives.
        """
        full_TE = self._read(layer, FULL_SCORES)
        with np.errstate(invalid="ignore"):
            wrong_T = ~((full_TE >= 0).all(axis=1) & (np.abs(full_TE.sum(axis=1) - 1) <= SUM_TOLERANCE))
        if wrong_T.any():
            token = int(wrong_T.argmax())
            raise UserError(
                f"{self.path}: layer {layer}: token {token}: full_scores: expected non-negative values with sum 1, "
                f"got sum {full_TE[token].sum():.4g}, least {full_TE[token].min():.4g}"
            )
        return full_TE

    def _read(self, layer: int, name: str) -> NDArray[Any]:
        if not 0 <= layer < self.num_layers:
            raise UserError(
                f"{self.path}: layer: expected a row of the recording, 0 to {self.num_layers - 1}, got {layer}"
            )
        blocks = []
        for part in self.parts:
            with _opened(part) as file:
                blocks.append(np.asarray(file.get_slice(name)[layer]))
        return blocks[0] if self.order_T is None else np.concatenate(blocks)[self.order_T]

    def sha256(self) -> str:
        return sha256_of(self.parts)


def sha256_of(paths: Sequence[Path]) -> str:
    """Hash what files hold, one after the other."""
    digest = hashlib.sha256()
    for path in paths:
        with path.open("rb") as file:
            hashlib.file_digest(file, lambda: digest)
    return digest.hexdigest()


def scores_are_normalised(score: str) -> bool:
    """Whether scores that are described so sum to 1 over the top-k."""
    return "softmax over the top-k" in score or score.startswith("assumed")


def score_words(score_function: str) -> str:
    """How ``score`` names shares of a token's whole score mass that a router's scores are made to."""
    return "softmax, not renormalised" if score_function == "softmax" else f"{score_function} over its sum"


def find_problem(
    ids_TK: NDArray[np.integer], scores_TK: NDArray[np.floating], num_experts: int, normalised: bool
) -> tuple[int, str] | None:
    """The first row that no router makes: its index and what is wrong with it, or None.

    Args:
        ids_TK, scores_TK: best first.
        num_experts: E.
        normalised: whether rows sum to 1, else to at most 1.
    """
    sorted_TK = np.sort(ids_TK, axis=1)
    with np.errstate(invalid="ignore"):  # inf - inf; infinities have a check of their own
        sum_T = scores_TK.sum(axis=1, dtype=np.float32)
    least = 1 - SUM_TOLERANCE if normalised else 0.0
    kind = "a softmax over the top-k (1)" if normalised else "part of a softmax (at most 1)"
    checks = (  # which tokens are wrong, what was expected and what stands there, in the order in which they make sense
        (((ids_TK < 0) | (ids_TK >= num_experts)).any(axis=1), f"expert_ids: expected 0 to {num_experts - 1}", ids_TK),
        ((sorted_TK[:, 1:] == sorted_TK[:, :-1]).any(axis=1), "expert_ids: expected distinct experts", ids_TK),
        (
            ~(np.isfinite(scores_TK) & (scores_TK >= 0)).all(axis=1),
            "scores: expected finite, non-negative values",
            scores_TK,
        ),
        ((scores_TK[:, 1:] > scores_TK[:, :-1]).any(axis=1), "scores: expected descending values", scores_TK),
        ((sum_T < least) | (sum_T > 1 + SUM_TOLERANCE), f"scores: expected the sum of {kind}", sum_T),
    )
    for wrong_T, expected, got in checks:
        if wrong_T.any():
            token = int(wrong_T.argmax())
            return token, f"{expected}, got {brief(got[token].tolist())}"
    return None


def open_trace(path: str | Path) -> Trace:
    """Open a recording, a file or a folder of parts, and check its header.

    Raises:
        ValueError: no such file, not a whole safetensors file, or not ``moe-trace-v1``, or parts that are missing or
            of different recordings; the message names the file and what is wrong.
    """
    path = Path(path)
    parts = _parts(path) if path.is_dir() else (path,)
    contents = [_read_content(part) for part in parts]
    first, last = contents[0], contents[-1]
    for part, content in zip(parts, contents, strict=True):
        for name in (*METADATA, "source_layers"):
            expected, got = (of.metadata.get(name) for of in (first, content))
            if got != expected:
                raise UserError(f"{part}: {name}: expected {expected!r} as {parts[0].name} has, got {got!r}")
        of_parts = [(of.sizes["L"], of.has_full_scores, of.arrival_S is None) for of in (first, content)]
        if of_parts[0] != of_parts[1]:
            raise UserError(f"{part}: expected the tensors and layers that {parts[0].name} has")
    order_T, sequence_T, position_T, arrival_S = None, first.sequence_T, first.position_T, first.arrival_S
    if len(parts) > 1:
        sequence_T, position_T = (
            np.concatenate([getattr(content, name) for content in contents]) for name in ("sequence_T", "position_T")
        )
        arrivals: dict[int, float] = {}
        for part, content in zip(parts, contents, strict=True):
            start_S = _sequences(part, content.sequence_T, content.position_T)[:-1]
            if content.arrival_S is not None:
                arrivals |= zip(content.sequence_T[start_S].tolist(), content.arrival_S.tolist(), strict=True)
        order_T, arrival_S = order_of(sequence_T, position_T, arrivals)
        sequence_T, position_T = sequence_T[order_T], position_T[order_T]
    return Trace(
        path=path,
        metadata=last.metadata,
        num_layers=first.sizes["L"],
        num_tokens=len(sequence_T),
        num_experts=first.sizes["E"],
        top_k=first.sizes["K"],
        start_S=_sequences(path, sequence_T, position_T),
        has_full_scores=first.has_full_scores,
        arrival_S=arrival_S,
        parts=parts,
        order_T=order_T,
    )


def _parts(folder: Path) -> tuple[Path, ...]:
    """The files of a folder of parts; all that were written are there."""
    names = sorted(path.name for path in folder.glob("[0-9]*.safetensors"))
    if not names:
        inside = sorted(path.name for path in folder.iterdir() if (path / PART.format(0)).is_file())
        choice = f"; give one of its recordings {', '.join(inside)}" if inside else ""
        raise UserError(f"{folder}: expected a file, got a directory without parts {PART.format(0)}{choice}")
    for number, name in enumerate(names):
        if name != PART.format(number):
            raise UserError(f"{folder}: expected parts without a gap, {PART.format(number)} is missing")
    return tuple(folder / name for name in names)


@dataclass(frozen=True, eq=False)
class _Content:
    """The header of one file, and which tokens it holds."""

    metadata: Mapping[str, str]
    sizes: Mapping[str, int]
    has_full_scores: bool
    sequence_T: NDArray[np.int32]
    position_T: NDArray[np.int32]
    arrival_S: NDArray[np.float64] | None


def _read_content(path: Path) -> _Content:
    with _opened(path) as file:
        facts, names = file.metadata() or {}, set(file.keys())
        required = set(TENSORS) - OPTIONAL
        for kind, missing in (("metadata", set(METADATA) - set(facts)), ("tensors", required - names)):
            if missing:
                raise UserError(f"{path}: missing {kind}: {', '.join(sorted(missing))}")
        if facts["format"] != FORMAT:
            raise UserError(f"{path}: format: expected {FORMAT}, got {facts['format']}")
        try:
            num_experts, top_k = int(facts["num_experts"]), int(facts["top_k"])
        except ValueError as error:
            raise UserError(f"{path}: num_experts, top_k: expected numbers ({error})") from None
        _check_sizes(path, num_experts, top_k)
        shape = file.get_slice("expert_ids").get_shape()
        sizes = {**dict(zip("LT", shape, strict=False)), "K": top_k, "E": num_experts}
        if ARRIVAL in names:
            sizes["S"] = len(np.unique(file.get_tensor("sequence_id")))
        for name in filter(names.__contains__, reversed(TENSORS)):
            (axes, dtypes), stored = TENSORS[name], file.get_slice(name)
            expected, got = tuple(sizes.get(axis, 0) for axis in axes), tuple(stored.get_shape())
            if stored.get_dtype() not in dtypes or got != expected or 0 in got:
                words = f"{' or '.join(dtypes)} of shape {axes} = {expected}, none of them 0"
                raise UserError(f"{path}: {name}: expected {words}; got {stored.get_dtype()} of shape {got}")
        arrival_S = file.get_tensor(ARRIVAL) if ARRIVAL in names else None
        if arrival_S is not None and not np.isfinite(arrival_S).all():
            raise UserError(f"{path}: {ARRIVAL}: expected finite seconds, got {brief(arrival_S.tolist())}")
        tokens = file.get_tensor("sequence_id"), file.get_tensor("position")
    return _Content(facts, sizes, FULL_SCORES in names, *tokens, arrival_S)


def order_of(
    sequence_T: NDArray[np.integer], position_T: NDArray[np.integer], arrivals: Mapping[int, float]
) -> tuple[NDArray[np.int64], NDArray[np.float64] | None]:
    """The order of tokens in a recording, by their sequence's arrival and by position.

    Args:
        arrivals: seconds by sequence; where one lacks, sequences stand by their numbers.

    Returns:
        Indices int64 [T], and the sorted arrivals [S], None where they are not known of all.
    """
    came_S, came_T = np.unique(sequence_T, return_inverse=True)
    arrival_S = np.array([arrivals.get(sequence, np.nan) for sequence in came_S.tolist()])
    if np.isnan(arrival_S).any():
        return np.lexsort((position_T, came_T)), None
    sorted_S = np.argsort(arrival_S, kind="stable")
    return np.lexsort((position_T, np.argsort(sorted_S)[came_T])), arrival_S[sorted_S]


def trace_info(path: Path) -> str:
    """State what a recording holds, a line per fact; ``route`` of ``topk`` says the rest.

    Raises:
        ValueError: the file cannot be used; the message names it and says what is wrong.
    """
    trace = open_trace(path)
    facts, length_S = trace.metadata, np.diff(trace.start_S)
    rows = {
        "file": path.name,
        **({"parts": f"{len(trace.parts):,}"} if path.is_dir() else {}),
        "sha256": trace.sha256(),
        "routing": f"{trace.num_layers} MoE layers, {trace.num_experts} experts, top-{trace.top_k}",
        "tokens": f"{trace.num_tokens:,} in {len(length_S):,} sequences of {length_S.min():,} to "
        f"{length_S.max():,} (median {np.median(length_S):,.0f})",
        "scores": f"{facts['score']}{'; of all experts' * trace.has_full_scores}",
        **({} if trace.arrival_S is None else {"arrivals": f"over {np.ptp(trace.arrival_S):,.1f} s"}),
        "model": facts["model"],
        "stage": trace.stage,
        **{name: facts[name] for name in ("domain", "source", "licence", "note") if name in facts},
    }
    if path.is_dir() and (path.parent / UNFINISHED).exists():
        rows["end"] = "the recorder goes on, or was killed and lost up to a minute"
    return "\n".join(f"{name:<8} {value}" for name, value in rows.items())


def _check_sizes(where: object, num_experts: int, top_k: int) -> None:
    if not top_k < num_experts <= MAX_EXPERTS:
        expected = f"{top_k + 1} (more than top_k) to {MAX_EXPERTS}"
        raise UserError(f"{where}: num_experts: expected {expected}, got {num_experts}")


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    if not path.is_file():
        raise UserError(f"{path}: {'expected a file, got a directory' if path.is_dir() else 'no such file'}")
    try:
        with safe_open(path, "np") as file:
            yield file
    except (SafetensorError, OSError) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"{path}: not a whole, readable safetensors file ({reason})") from None


def _sequences(path: Path, sequence_id_T: NDArray[np.int32], position_T: NDArray[np.int32]) -> NDArray[np.int64]:
    """First token of each sequence and their end, as ``Trace.start_S``; checks ids and positions."""
    new_T = np.diff(sequence_id_T) != 0
    back_T = ~new_T & (np.diff(position_T) <= 0)
    if back_T.any():
        token = int(back_T.argmax())
        raise UserError(
            f"{path}: position: token {token + 1}: expected more than {position_T[token]}, "
            f"the one before it in its sequence, got {position_T[token + 1]}"
        )
    start_S = np.concatenate([[0], np.flatnonzero(new_T) + 1, [len(new_T) + 1]])
    if np.unique(sequence_id_T[start_S[:-1]]).size != start_S.size - 1:
        raise UserError(f"{path}: sequence_id: expected the tokens of a sequence side by side, got one in several runs")
    return start_S


# ---- writing ---------------------------------------------------------------------------------------------------------


@contextmanager
def written_trace(out: Path, source: Path) -> Iterator[TraceWriter]:
    """Yield a writer; what it collected appears as the file ``out`` when the block ends well."""
    with atomic_path(out) as temporary:
        writer = TraceWriter(source)
        yield writer
        writer.write(temporary)


class TraceWriter:
    """Collects a recording and writes it.

    Whoever records calls ``describe`` once. Then, pass by pass, ``add`` takes every layer's block of the pass and
    ``add_tokens`` the tokens themselves, which completes it. Passes may mix sequences; in the file a sequence's tokens
    stand together by position, and one that comes again counts once. ``sources`` lists the files that were read,
    ``left_out`` counts tokens that were passed over by what they are (``of padding``), and ``notes`` says what a user
    should know.

    Args:
        source: file or directory.
    """

    def __init__(self, source: Path) -> None:
        self.source = source
        self.sources = [source] if source.is_file() else []
        self.metadata: dict[str, str] = {}
        self.left_out: Counter[str] = Counter()
        self.notes: list[str] = []
        self.num_tokens = self.num_experts = self.top_k = 0
        # By tensor and layer; what is of no layer has None.
        self._blocks: dict[tuple[str, int | None], list[NDArray[Any]]] = defaultdict(list)
        self._num_rows: Counter[int] = Counter()  # by layer
        self._arrivals: dict[int, float] = {}  # by sequence, in seconds

    def describe(self, *, num_experts: int, top_k: int, where: str, **metadata: str) -> None:
        """Say what is recorded; ``metadata`` completes what is known.

        Raises:
            ValueError: more experts than the format names, or none to choose from.
        """
        _check_sizes(where, num_experts, top_k)
        self.num_experts, self.top_k = num_experts, top_k
        self.metadata |= metadata

    def add(
        self,
        layer: int,
        ids_TK: NDArray[np.integer],
        scores_TK: NDArray[np.floating] | None,
        where: str,
        name_T: Sequence[int] | NDArray[np.integer] | None = None,
        full_TE: NDArray[np.float32] | None = None,
    ) -> None:
        """Add a block of one layer, in any order within rows; equal scores keep the source's order.

        Args:
            layer: the source's number of it.
            scores_TK: None = those of ``full_TE``, or where the source has none, the same for all.
            where: file and place, for errors.
            name_T: what the source calls these tokens, for errors; None = their places in the block.
            full_TE: scores of all experts, in rows that sum to 1; for all blocks or for none.

        Raises:
            ValueError: routing that no router makes.
        """
        if ids_TK.shape[1] != self.top_k:
            raise UserError(f"{where}: expected top-{self.top_k}, got {ids_TK.shape[1]}")
        ids_TK = ids_TK.astype(np.int64, copy=False)
        if full_TE is not None:
            scores_TK = np.take_along_axis(full_TE, ids_TK, axis=1)
        elif scores_TK is None:
            scores_TK = np.full(ids_TK.shape, 1 / self.top_k)
        order_TK = np.argsort(-scores_TK, axis=1, kind="stable")
        ids_TK, scores_TK = np.take_along_axis(ids_TK, order_TK, 1), np.take_along_axis(scores_TK, order_TK, 1)
        if problem := find_problem(ids_TK, scores_TK, self.num_experts, scores_are_normalised(self.metadata["score"])):
            token, words = problem
            raise UserError(f"{where}: token {token if name_T is None else name_T[token]}: {words}")
        self._num_rows[layer] += len(ids_TK)
        self._keep("expert_ids", ids_TK, layer)
        self._keep("scores", scores_TK, layer)
        if full_TE is not None:
            self._keep(FULL_SCORES, full_TE, layer)

    def add_tokens(self, sequence_id: NDArray[np.integer] | int, position_T: NDArray[np.integer], where: str) -> None:
        """Complete a pass: the sequence that each (or all) of its tokens are from, and their places in it.

        Raises:
            ValueError: a layer has other tokens, or none.
        """
        self.num_tokens += position_T.size
        for layer, num_rows in sorted(self._num_rows.items()):
            if num_rows != self.num_tokens:
                expected = f"{self.num_tokens} tokens up to here, as other layers have"
                raise UserError(f"{where}: layer {layer}: expected {expected}, got {num_rows}")
        self._keep("position", position_T)
        self._keep("sequence_id", np.broadcast_to(sequence_id, position_T.shape))

    def add_arrival(self, sequence_id: int, seconds: float | None) -> None:
        """Say when a sequence came; where this is known of all of them, they stand in this order."""
        if seconds is not None:
            self._arrivals[sequence_id] = seconds

    def write(self, path: Path) -> None:
        """Write the file ``path``. Equal recordings give equal bytes, which safetensors' own writer does not promise.

        Raises:
            ValueError: there are no tokens.
        """
        layers = sorted(self._num_rows)
        if not (self.num_tokens and layers):
            raise UserError(f"{self.source}: expected at least one token, got none ({self.left_out.total()} left out)")
        sequence_T, position_T = (np.concatenate(self._blocks[name, None]) for name in ("sequence_id", "position"))
        order_T, arrival_S = order_of(sequence_T, position_T, self._arrivals)
        if arrival_S is not None:
            self._keep(ARRIVAL, arrival_S)
        place_T2 = np.stack([sequence_T, position_T], axis=1)[order_T]
        is_first_T = (np.diff(place_T2, axis=0, prepend=-1) != 0).any(axis=1)
        self.left_out["that came again"] += int((~is_first_T).sum())
        order_T = order_T[is_first_T]
        self.num_tokens = len(order_T)
        notes = [f"{number:,} tokens {what} left out" for what, number in self.left_out.items() if number]
        metadata = {
            "format": FORMAT,
            "num_experts": str(self.num_experts),
            "top_k": str(self.top_k),
            **{name: self.metadata[name] for name in ("model", "score", "phase", "domain", "source", "licence")},
            "note": "; ".join([*self.notes, *notes]) or "nothing",
            "source_layers": ",".join(map(str, layers)),
            "source_files": str(len(self.sources)),
            "source_sha256": sha256_of(self.sources),
        }
        header: dict[str, Any] = {"__metadata__": metadata}
        end, content = 0, []
        for name, (axes, _) in TENSORS.items():
            places = [(name, layer) for layer in (layers if "L" in axes else [None])]
            if places[0] in self._blocks:
                kept = slice(None) if axes == "S" else order_T
                values = [np.concatenate(self._blocks.pop(place))[kept] for place in places]
                shape = [*([len(layers)] if "L" in axes else []), *values[0].shape]
                start, end = end, end + sum(value.nbytes for value in values)
                header[name] = {"dtype": self._type_of(name)[0], "shape": shape, "data_offsets": [start, end]}
                content += values
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        with path.open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            file.writelines(content)

    def _keep(self, name: str, values: NDArray[np.generic], layer: int | None = None) -> None:
        self._blocks[name, layer].append(np.ascontiguousarray(values, self._type_of(name)[1]))

    def _type_of(self, name: str) -> tuple[str, str]:
        """As safetensors and numpy name it."""
        return list(TENSORS[name][1].items())[name == "expert_ids" and self.num_experts > 256]
