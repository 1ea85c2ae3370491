"""Write a ``moe-trace-v1`` file without holding it.

Blocks of tokens come layer by layer; each layer's go to a file of its own (a spool) in a folder beside the output. At
the end the spools are strung together behind a header, and the result is read back: every layer must name each expert
exactly as often as the source did.

Shapes: T = tokens of a block, K = top_k, E = experts.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from moe_ep_bench.errors import UserError
from moe_ep_bench.files import atomic_path
from moe_ep_bench.workload.trace import (
    FORMAT,
    FULL_SCORES,
    MAX_EXPERTS,
    find_problem,
    held,
    id_type,
    open_trace,
    scores_are_normalised,
)

# Tokens for which one fill stands in all places; with more than this share of them something else went wrong.
PADDING, _MOST_PADDING = "of padding (one fill, 0 or a type's largest, in all their places)", 0.1


@contextlib.contextmanager
def written_trace(out: Path, source: Path, metadata: Mapping[str, str] | None = None) -> Iterator[TraceWriter]:
    """Yield a writer; what it collected appears as the file ``out`` when the block ends well."""
    with (
        atomic_path(out) as temporary,
        tempfile.TemporaryDirectory(prefix=".recording-", dir=out.parent) as spools,
    ):
        writer = TraceWriter(Path(spools), source, metadata or {})
        yield writer
        writer.write(temporary)


class TraceWriter:
    """Collects a recording and writes it.

    Whoever records calls ``describe`` once. Then, pass by pass, ``add`` takes every layer's block of the pass and
    ``add_tokens`` the tokens themselves, which completes it. ``sources`` lists the files that were read, ``left_out``
    counts tokens that were passed over by what they are (``of padding``), and ``notes`` says what a user should know.

    Args:
        directory: for spools.
        source: file or directory.
        metadata: of the trace, as far as it is known; ``describe`` gives the rest.
    """

    def __init__(self, directory: Path, source: Path, metadata: Mapping[str, str]) -> None:
        self.source = source
        self.sources = [source] if source.is_file() else []
        self.metadata = dict(metadata)
        self.left_out: Counter[str] = Counter()
        self.notes: list[str] = []
        self.num_tokens = self.num_experts = self.top_k = 0
        self._num_empty = 0  # places in which a token holds no expert
        self._directory = directory
        self._loads: dict[int, NDArray[np.int64]] = {}  # places by layer, [E]
        self._where: dict[int, str] = {}  # by layer: where the last block stood

    def describe(self, *, num_experts: int, top_k: int, where: str, **metadata: str) -> None:
        """Say what is recorded; ``metadata`` completes, or replaces, what was known before.

        Raises:
            ValueError: more experts than the format names, or none to choose from.
        """
        if not top_k < num_experts <= MAX_EXPERTS:
            raise UserError(
                f"{where}: num_experts: expected {top_k + 1} (more than top_k) to {MAX_EXPERTS}, got {num_experts}"
            )
        self.num_experts, self.top_k = num_experts, top_k
        self.metadata |= metadata
        self._normalised = scores_are_normalised(self.metadata["score"])

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
            scores_TK: None = those of ``full_TE``, or where the source has none, the same for all experts of a row.
                Then an expert that stands in a row before leaves its place empty: a server that drops pairs fills
                up so.
            where: file and place, for errors.
            name_T: what the source calls these tokens, for errors; None = their places in the block.
            full_TE: scores of all experts, in rows that sum to 1; for all blocks or for none.

        Raises:
            ValueError: routing that no router makes.
        """
        if ids_TK.shape[1] != self.top_k:
            raise UserError(f"{where}: expected top-{self.top_k} as before, got {ids_TK.shape[1]}")
        ids_TK = ids_TK.astype(np.int64, copy=False)
        if full_TE is not None:
            scores_TK = np.take_along_axis(full_TE, ids_TK, axis=1)
        elif scores_TK is None:
            ids_TK, scores_TK = _assumed(ids_TK)
        order_TK = np.argsort(-scores_TK, axis=1, kind="stable")
        best_TK, scores_TK = np.take_along_axis(ids_TK, order_TK, 1), np.take_along_axis(scores_TK, order_TK, 1)
        if problem := find_problem(best_TK, scores_TK, self.num_experts, self._normalised):
            token, words = problem
            raise UserError(f"{where}: token {token if name_T is None else name_T[token]}: {words}")
        self._num_empty += int((~held(best_TK, scores_TK)).sum())
        self._loads[layer] = self._loads.get(layer, 0) + np.bincount(ids_TK.ravel(), minlength=self.num_experts)
        self._where[layer] = where
        self._spool("expert_ids", best_TK, layer)
        self._spool("scores", scores_TK, layer)
        if full_TE is not None:
            self._spool(FULL_SCORES, full_TE, layer)

    def add_tokens(self, sequence_id: NDArray[np.integer] | int, position_T: NDArray[np.integer], where: str) -> None:
        """Complete a pass: the sequence that each (or all) of its tokens are from, and their places in it.

        Raises:
            ValueError: a layer has other tokens, or none.
        """
        expected = self.num_tokens + position_T.size
        for layer, load_E in sorted(self._loads.items()):
            if (got := load_E.sum() // self.top_k) != expected:
                raise UserError(
                    f"{self._where.get(layer, where)}: layer {layer}: expected {expected} tokens, as the other layers "
                    f"have up to here, got {got}"
                )
        self._where = {}
        self._spool("position", position_T)
        self._spool("sequence_id", np.broadcast_to(sequence_id, position_T.shape))
        self.num_tokens = expected

    def write(self, path: Path) -> None:
        """String the spools together in the file ``path``, and read it back.

        Raises:
            ValueError: no tokens, or more padding than a recording has.
        """
        layers = sorted(self._loads)
        if self.left_out[PADDING] > _MOST_PADDING * (self.num_tokens + self.left_out[PADDING]):
            raise UserError(
                f"{self.source}: {self.left_out[PADDING]:,} tokens {PADDING}, {self.num_tokens:,} others; expected "
                f"{_MOST_PADDING:.0%} at most: was all routing recorded?"
            )
        if not (self.num_tokens and layers):
            raise UserError(f"{self.source}: expected at least one token, got none ({self.left_out.total()} left out)")
        notes = [f"{number:,} tokens {what} left out" for what, number in self.left_out.items() if number]
        if self._num_empty:
            places = self.num_tokens * self.top_k * len(layers)
            fewer = f"tokens with fewer than {self.top_k} experts"
            notes.append(f"{self._num_empty:,} of {places:,} places are empty: {fewer}")
        metadata = {
            "format": FORMAT,
            "num_experts": str(self.num_experts),
            "top_k": str(self.top_k),
            **{name: self.metadata[name] for name in ("model", "score", "phase", "domain", "source", "licence")},
            "note": "; ".join([*self.notes, *notes]) or "nothing",
            "source_layers": ",".join(map(str, layers)),
            "source_files": str(len(self.sources)),
            "source_sha256": sha256_of(self.sources, self.source),
        }
        self._string_together(path, layers, metadata)
        trace = open_trace(path)
        for index, layer in enumerate(layers):
            written_E = np.bincount(trace.read_layer(index)[0].ravel(), minlength=self.num_experts)
            if not np.array_equal(written_E, self._loads[layer]):
                raise RuntimeError(f"layer {layer} was written with other experts than it was read with")

    @property
    def _columns(self) -> dict[str, tuple[np.dtype, int]]:
        """By tensor the type and the number of a row's values; those of four bytes first, so that each is aligned."""
        return {
            "position": (np.dtype("<i4"), 1),
            "sequence_id": (np.dtype("<i4"), 1),
            FULL_SCORES: (np.dtype("<f4"), self.num_experts),
            "scores": (np.dtype("<f2"), self.top_k),
            "expert_ids": (np.dtype(id_type(self.num_experts)), self.top_k),
        }

    def _spool(self, name: str, values: NDArray[np.generic], layer: int | None = None) -> None:
        # Opened anew for every block: there are more layers than files that a process may hold open.
        with (self._directory / (name if layer is None else f"{name}-{layer}")).open("ab") as file:
            file.write(values.astype(self._columns[name][0]).tobytes())

    def _string_together(self, path: Path, layers: list[int], metadata: dict[str, str]) -> None:
        header, end, spools = {"__metadata__": metadata}, 0, []
        for name, (dtype, width) in self._columns.items():
            is_of_tokens = (self._directory / name).exists()
            files = [self._directory / (name if is_of_tokens else f"{name}-{layer}") for layer in layers]
            files = files[:1] if is_of_tokens else files
            if not files[0].exists():  # no scores of all experts
                continue
            shape = [self.num_tokens] if is_of_tokens else [len(layers), self.num_tokens, width]
            start, end = end, end + dtype.itemsize * int(np.prod(shape))
            kind = {"i": "I", "f": "F", "u": "U"}[dtype.kind] + str(8 * dtype.itemsize)
            header[name] = {"dtype": kind, "shape": shape, "data_offsets": [start, end]}
            spools += files
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        with path.open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            for spool in spools:
                with spool.open("rb") as written:
                    shutil.copyfileobj(written, file, 2**20)
                spool.unlink()


def _assumed(ids_TK: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Equal scores for the experts of a row, 0 in places that repeat one of them."""
    again_TK = np.zeros(ids_TK.shape, dtype=bool)
    for place in range(1, ids_TK.shape[1]):
        again_TK[:, place] = (ids_TK[:, :place] == ids_TK[:, place, None]).any(axis=1)
    scores_TK = ~again_TK / (~again_TK).sum(axis=1, keepdims=True)
    return np.where(again_TK, ids_TK[:, :1], ids_TK), scores_TK


def sha256_of(paths: Sequence[Path], root: Path) -> str:
    """Hash a file; of several files, the lines ``<sha256>  <path below root>`` in order."""
    digests = []
    for path in paths:
        with path.open("rb") as file:
            digests.append(hashlib.file_digest(file, "sha256").hexdigest())
    if len(paths) == 1:
        return digests[0]
    root = root if root.is_dir() else root.parent
    named = zip(digests, (path.relative_to(root).as_posix() for path in paths), strict=True)
    return hashlib.sha256("".join(f"{digest}  {name}\n" for digest, name in named).encode()).hexdigest()
