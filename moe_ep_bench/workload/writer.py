"""Collect a recording in memory and write it as a ``moe-trace-v1`` file.

Shapes: T = tokens of a block, K = top_k, E = experts.
"""

from __future__ import annotations

import contextlib
import json
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from moe_ep_bench.errors import UserError
from moe_ep_bench.files import atomic_path
from moe_ep_bench.workload.trace import FORMAT, FULL_SCORES, MAX_EXPERTS, find_problem, scores_are_normalised, sha256_of

# As numpy and safetensors name them; ids of more than 256 experts are uint16. Wide ones first, so that each is aligned.
TYPES = {
    "position": ("<i4", "I32"),
    "sequence_id": ("<i4", "I32"),
    FULL_SCORES: ("<f4", "F32"),
    "scores": ("<f2", "F16"),
    "expert_ids": ("<u1", "U8"),
}
WIDE_IDS = ("<u2", "U16")


@contextlib.contextmanager
def written_trace(out: Path, source: Path) -> Iterator[TraceWriter]:
    """Yield a writer; what it collected appears as the file ``out`` when the block ends well."""
    with atomic_path(out) as temporary:
        writer = TraceWriter(source)
        yield writer
        writer.write(temporary)


class TraceWriter:
    """Collects a recording and writes it.

    Whoever records calls ``describe`` once. Then, pass by pass, ``add`` takes every layer's block of the pass and
    ``add_tokens`` the tokens themselves, which completes it. ``sources`` lists the files that were read, ``left_out``
    counts tokens that were passed over by what they are (``of padding``), and ``notes`` says what a user should know.

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
        self._blocks: dict[tuple[str, int | None], list[NDArray[np.generic]]] = defaultdict(list)
        self._num_rows: Counter[int] = Counter()  # by layer

    def describe(self, *, num_experts: int, top_k: int, where: str, **metadata: str) -> None:
        """Say what is recorded; ``metadata`` completes what is known.

        Raises:
            ValueError: more experts than the format names, or none to choose from.
        """
        if not top_k < num_experts <= MAX_EXPERTS:
            expected = f"{top_k + 1} (more than top_k) to {MAX_EXPERTS}"
            raise UserError(f"{where}: num_experts: expected {expected}, got {num_experts}")
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

    def write(self, path: Path) -> None:
        """Write the file ``path``. Equal recordings give equal bytes, which safetensors' own writer does not promise.

        Raises:
            ValueError: there are no tokens.
        """
        layers = sorted(self._num_rows)
        if not (self.num_tokens and layers):
            raise UserError(f"{self.source}: expected at least one token, got none ({self.left_out.total()} left out)")
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
        header, end, content = {"__metadata__": metadata}, 0, []
        for name in TYPES:
            blocks = [block for layer in (None, *layers) for block in self._blocks[name, layer]]
            if blocks:
                start, end = end, end + sum(block.nbytes for block in blocks)
                is_of_layers = blocks[0].ndim > 1
                shape = [len(layers), self.num_tokens, blocks[0].shape[1]] if is_of_layers else [self.num_tokens]
                header[name] = {"dtype": self._type_of(name)[1], "shape": shape, "data_offsets": [start, end]}
                content += blocks
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        with path.open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            file.writelines(content)

    def _keep(self, name: str, values: NDArray[np.generic], layer: int | None = None) -> None:
        self._blocks[name, layer].append(np.ascontiguousarray(values, self._type_of(name)[0]))

    def _type_of(self, name: str) -> tuple[str, str]:
        return WIDE_IDS if name == "expert_ids" and self.num_experts > 256 else TYPES[name]
