"""Write a ``moe-trace-v1`` file without holding it, for every importer.

Readers hand over blocks of tokens in whatever order their source has them, layer by layer or
token by token. Each layer's blocks go to files of their own (spools) beside the output; at the
end these are strung together behind a header, and the result is read back: every layer must
name each expert exactly as often as the source did.

Shapes: T = tokens of a block, K = top_k, E = experts.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moe_ep_bench.errors import UserError
from moe_ep_bench.workload.importers.sources import sha256_of
from moe_ep_bench.workload.trace import (
    FORMAT,
    FULL_SCORES,
    MAX_EXPERTS,
    Trace,
    find_problem,
    id_type,
    open_trace,
    scores_are_normalised,
)

# Four-byte tensors first, so that each begins where its type wants it.
_ORDER = (
    ("position", "I32"),
    ("sequence_id", "I32"),
    (FULL_SCORES, "F32"),
    ("scores", "F16"),
    ("expert_ids", ""),  # by the number of experts
)
_LAYERED = (FULL_SCORES, "scores", "expert_ids")


@dataclass(frozen=True)
class ImportSummary:
    """What was written.

    Attributes:
        trace: opened, under the name that it has in the end.
        left_out: tokens of the source that are not in the trace; its ``note`` says which.
    """

    trace: Trace
    left_out: int

    def text(self) -> str:
        """A few lines for the terminal."""
        trace, facts = self.trace, self.trace.metadata
        pairs = trace.num_tokens * trace.top_k
        return "\n".join(
            (
                f"{trace.path}: {facts['model']}, {facts['domain']}, {facts['phase']}",
                f"  {trace.num_layers} layers x {trace.num_experts} experts, top-{trace.top_k}; {trace.num_tokens} "
                f"tokens in {trace.num_sequences} sequences; {pairs} pairs in every layer, all kept",
                f"  scores: {facts['score']}",
                f"  left out: {self.left_out} tokens; {facts['note']}",
                f"  made from {facts['source_files']} file(s), sha256 {facts['source_sha256']}",
            )
        )


class TraceWriter:
    """Collects a recording and writes it.

    A reader calls ``describe`` once, then ``add_tokens`` for every token and ``add`` for every
    (token, layer), the tokens in one order throughout; it lists what it read in ``sources`` (but for ``source``
    itself), counts in ``left_out`` the tokens that it passed over, and says in ``notes`` what a user should know.

    Args:
        directory: for spools.
        source: file or directory.
        metadata: of the trace, as far as it is known; ``describe`` gives the rest.
    """

    def __init__(self, directory: Path, source: Path, metadata: Mapping[str, str] | None = None) -> None:
        self.source = source
        self.sources = [source] if source.is_file() else []
        self.metadata = dict(metadata or {})
        self.left_out = 0
        self.notes: list[str] = []
        self.num_tokens = 0
        self._directory = directory
        self._load_E: dict[int, NDArray[np.int64]] = {}
        self._tokens: dict[int, int] = {}

    def describe(self, *, num_experts: int, top_k: int, where: str, **metadata: str) -> None:
        """Say what is recorded; ``metadata`` completes, or replaces, what was known before.

        Raises:
            ValueError: more experts than the format can name, or none to choose from.
        """
        if not top_k < num_experts <= MAX_EXPERTS:
            raise UserError(
                f"{where}: num_experts: expected {top_k + 1} (more than top_k) to {MAX_EXPERTS}, got {num_experts}"
            )
        self.num_experts, self.top_k = num_experts, top_k
        self.metadata |= metadata
        self._normalised = scores_are_normalised(self.metadata["score"])

    def add_tokens(self, sequence_id: NDArray[np.integer] | int, position_T: NDArray[np.integer], where: str) -> None:
        """Add tokens: the sequence that each (or all) of them are from, and their places in it."""
        if position_T.size and not (position_T.min() >= 0 and position_T.max() < 2**31):
            raise UserError(
                f"{where}: position: expected 0 to {2**31 - 1}, got {position_T.min()} to {position_T.max()}"
            )
        self._spool("position", position_T.astype(np.int32))
        self._spool("sequence_id", np.broadcast_to(sequence_id, position_T.shape).astype(np.int32))
        self.num_tokens += position_T.size

    def add(
        self,
        layer: int,
        ids_TK: NDArray[np.integer],
        scores_TK: NDArray[np.floating] | None,
        where: str,
        name_T: NDArray[np.integer],
        full_TE: NDArray[np.float32] | None = None,
    ) -> None:
        """Add a block of one layer, in any order within rows; equal scores keep the source's order.

        Args:
            layer: the source's own number of it.
            scores_TK: None where the source has none: all of a row get the same.
            where: file and place, for errors.
            name_T: what the source calls these tokens, for errors.
            full_TE: scores of all experts, in rows that sum to 1; for all blocks or for none.

        Raises:
            ValueError: routing that no router makes.
        """
        ids_TK = ids_TK.astype(np.int64, copy=False)
        if scores_TK is None:
            scores_TK = np.full(ids_TK.shape, 1 / self.top_k)
        order_TK = np.argsort(-scores_TK, axis=1, kind="stable")
        best_TK, scores_TK = np.take_along_axis(ids_TK, order_TK, 1), np.take_along_axis(scores_TK, order_TK, 1)
        problem = find_problem(best_TK, scores_TK, self.num_experts, self._normalised)
        if problem:
            token, words = problem
            raise UserError(f"{where}: token {name_T[token]}: {words}")
        load_E = np.bincount(ids_TK.ravel(), minlength=self.num_experts)
        self._load_E[layer] = self._load_E.get(layer, 0) + load_E
        self._tokens[layer] = self._tokens.get(layer, 0) + len(ids_TK)
        self._spool(f"expert_ids-{layer}", best_TK.astype(id_type(self.num_experts)[0]))
        self._spool(f"scores-{layer}", scores_TK.astype(np.float16))
        if full_TE is not None:
            self._spool(f"{FULL_SCORES}-{layer}", full_TE.astype(np.float32))

    def progress(self) -> dict[str, Any]:
        """What was added so far, JSON-ready, for ``resume`` in another process on the same directory."""
        return {
            "num_tokens": self.num_tokens,
            "tokens": {str(layer): tokens for layer, tokens in self._tokens.items()},
            "loads": {str(layer): load_E.tolist() for layer, load_E in self._load_E.items()},
            "spools": {path.name: path.stat().st_size for path in self._spools()},
        }

    def resume(self, progress: Mapping[str, Any]) -> None:
        """Go on from where ``progress`` was asked for: what was added after that is cut off."""
        self.num_tokens = progress["num_tokens"]
        self._tokens = {int(layer): tokens for layer, tokens in progress["tokens"].items()}
        self._load_E = {int(layer): np.array(load_E) for layer, load_E in progress["loads"].items()}
        for path in self._spools():
            if path.name not in progress["spools"]:
                path.unlink()
        for name, size in progress["spools"].items():
            os.truncate(self._directory / name, size)

    def write(self, path: Path, out: Path) -> ImportSummary:
        """String the spools together in the file ``path``, later known as ``out``, and read it back.

        Raises:
            ValueError: no tokens, or layers with different tokens.
        """
        layers = sorted(self._tokens)
        if not (self.num_tokens and layers):
            raise UserError(f"{self.source}: expected at least one token, got none ({self.left_out} left out)")
        for layer in layers:
            if self._tokens[layer] != self.num_tokens:
                raise UserError(
                    f"{self.source}: layer {layer}: expected {self.num_tokens} tokens, as many as the sequences have, "
                    f"got {self._tokens[layer]}"
                )
        metadata = {
            "format": FORMAT,
            "num_experts": str(self.num_experts),
            "top_k": str(self.top_k),
            **{name: self.metadata[name] for name in ("model", "score", "phase", "domain", "source", "licence")},
            "note": "; ".join(self.notes) or "nothing",
            "source_layers": ",".join(map(str, layers)),
            "source_files": str(len(self.sources)),
            "source_sha256": sha256_of(self.sources, self.source),
        }
        self._string_together(path, layers, metadata)
        trace = open_trace(path)
        for index, layer in enumerate(layers):
            written_E = np.bincount(trace.read_layer(index)[0].ravel(), minlength=self.num_experts)
            if not np.array_equal(written_E, self._load_E[layer]):
                raise RuntimeError(f"layer {layer} was written with other experts than it was read with")
        return ImportSummary(replace(trace, path=out), self.left_out)

    def _string_together(self, path: Path, layers: list[int], metadata: dict[str, str]) -> None:
        header, end = {"__metadata__": metadata}, 0
        pieces: list[str] = []
        for name, dtype in _ORDER:
            is_layered = name in _LAYERED
            names = [f"{name}-{layer}" for layer in layers] if is_layered else [name]
            if name == FULL_SCORES and not (self._directory / names[0]).exists():
                continue
            width = self.num_experts if name == FULL_SCORES else self.top_k
            size = sum((self._directory / piece).stat().st_size for piece in names)
            header[name] = {
                "dtype": dtype or id_type(self.num_experts)[1],
                "shape": [len(layers), self.num_tokens, width] if is_layered else [self.num_tokens],
                "data_offsets": [end, end + size],
            }
            end += size
            pieces += names
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        with path.open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            for piece in pieces:
                with (self._directory / piece).open("rb") as spool:
                    shutil.copyfileobj(spool, file, 2**20)
                (self._directory / piece).unlink()

    def _spools(self) -> list[Path]:
        names = tuple(name for name, _ in _ORDER)
        return [path for path in self._directory.iterdir() if path.name.startswith(names)]

    def _spool(self, name: str, values: NDArray[np.generic]) -> None:
        # Opened anew for every block: there are more layers than files that a process may hold open.
        with (self._directory / name).open("ab") as file:
            file.write(values.tobytes())
