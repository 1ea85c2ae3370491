"""Record what the routers of a running server choose: ``moe-trace-v1`` files with the scores of all experts.

Tokens wait in memory until the server stops or the limit is reached. Then prompts and generated tokens are sorted by
request and position and written each to a file of their own, ``prefill.safetensors`` and ``decode.safetensors``. A
server that is killed loses them.

Shapes: T = tokens of a step, E = experts, K = top_k.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from moe_ep_bench.workload.trace import written_trace


@dataclass(eq=False)
class Recorder:
    """Collects steps, and writes them.

    Attributes:
        directory: of the files.
        layers: the model's numbers of its MoE layers.
        metadata: of both files but for their phase: model, score, domain, source, licence and note.
        most_bytes: held in memory; then recording ends.
        say: is told of files, and of the end.
    """

    directory: Path
    layers: Sequence[int]
    num_experts: int
    top_k: int
    metadata: dict[str, str]
    most_bytes: int
    say: Callable[[str], None]

    def __post_init__(self) -> None:
        self.is_open = True
        self._num_bytes = self._num_requests = 0
        self._requests: dict[str, int] = {}
        self._step: dict[int, tuple[NDArray[np.float32], NDArray[np.integer], NDArray[np.bool_]]] = {}
        self._blocks: list[list[tuple[NDArray[np.float32], NDArray[np.integer]]]] = [[] for _ in self.layers]
        self._tokens: list[tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.bool_], NDArray[np.bool_]]] = []

    def add(
        self, place: int, full_TE: NDArray[np.float32], ids_TK: NDArray[np.integer], broken_T: NDArray[np.bool_]
    ) -> None:
        """Add a layer of the step, the layers' ``place``: shares of all experts' scores, and the experts chosen."""
        self._step[place] = full_TE, ids_TK, broken_T

    def forget(self, names: Iterable[str]) -> None:
        """Requests that ended: who has such a name from now on is another."""
        for name in names:
            self._requests.pop(name, None)

    def end_step(self, request_T: Sequence[str], position_T: NDArray[np.int64], is_prompt_T: NDArray[np.bool_]) -> None:
        """Complete a step; ``request_T`` has the server's names of the requests."""
        step, self._step = self._step, {}
        if not self.is_open:
            return
        for name in request_T:
            if name not in self._requests:
                self._requests[name], self._num_requests = self._num_requests, self._num_requests + 1
        sequence_T = np.array([self._requests[name] for name in request_T], np.int64)
        broken_T = np.any([broken_T for *_, broken_T in step.values()], axis=0)
        self._tokens.append((sequence_T, position_T, is_prompt_T, broken_T))
        for place, (full_TE, ids_TK, _) in step.items():
            self._blocks[place].append((full_TE, ids_TK))
            self._num_bytes += full_TE.nbytes + ids_TK.nbytes
        if self._num_bytes >= self.most_bytes:
            self.close()
            self.say(f"recording ended at its limit of {self.most_bytes / 2**30:.3g} GiB; serving goes on")

    def close(self) -> None:
        """Write what was recorded, once; what cannot be written is lost, not the server."""
        if self.is_open and self._tokens:
            try:
                self._write()
            except (OSError, ValueError) as problem:
                self.say(f"recording lost: {problem}")
        self.is_open = False
        self._tokens, self._blocks = [], []

    def _write(self) -> None:
        arrays = (np.concatenate(steps) for steps in zip(*self._tokens, strict=True))
        sequence_T, position_T, is_prompt_T, broken_T = arrays
        order_T = np.lexsort((position_T, sequence_T))
        order_T = order_T[~broken_T[order_T]]
        # A request that was set back computes its tokens again: the first time counts.
        is_next_T = (np.diff(sequence_T[order_T], prepend=-1) != 0) | (np.diff(position_T[order_T], prepend=-1) != 0)
        left_out = {
            "computed again after a request was set back": int((~is_next_T).sum()),
            "whose scores were no numbers": int(broken_T.sum()),
        }
        order_T = order_T[is_next_T]
        facts = {key: value for key, value in self.metadata.items() if key != "note"}
        for phase, rows_T in (
            ("prefill", order_T[is_prompt_T[order_T]]),
            ("decode", order_T[~is_prompt_T[order_T]]),
        ):
            if not len(rows_T):
                continue
            path = self.directory / f"{phase}.safetensors"
            with written_trace(path, self.directory) as writer:
                writer.describe(num_experts=self.num_experts, top_k=self.top_k, where=phase, phase=phase, **facts)
                writer.notes += [self.metadata["note"]] if self.metadata.get("note") else []
                writer.left_out.update(left_out)
                for layer, blocks in zip(self.layers, self._blocks, strict=True):
                    full_TE, ids_TK = (np.concatenate(steps)[rows_T] for steps in zip(*blocks, strict=True))
                    writer.add(layer, ids_TK, None, phase, full_TE=full_TE)
                writer.add_tokens(sequence_T[rows_T], position_T[rows_T], phase)
            self.say(f"wrote {path}: {len(rows_T):,} tokens")
