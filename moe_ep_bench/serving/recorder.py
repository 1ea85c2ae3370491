"""Record what the routers of a running server choose: ``moe-trace-v1`` parts with the scores of all experts.

Tokens wait in memory until a part is full; then prompts and generated tokens are sorted by request and position and
written each to a file of their own, ``prefill-0001.safetensors`` and ``decode-0001.safetensors``, by a thread: serving
goes on, and waits only where the next part is full before. A server that is killed loses the part that waits. A request
that goes on in the next part has the same ``sequence_id`` there.

Shapes: T = tokens of a step, E = experts, K = top_k.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moe_ep_bench.workload.trace import TraceWriter, written_trace

PART_BYTES = 2**29


@dataclass(eq=False)
class Recorder:
    """Collects steps, and writes parts.

    Attributes:
        directory: of the parts.
        layers: the model's numbers of its MoE layers.
        metadata: of every part but for its phase: model, score, domain, source, licence and note.
        most_bytes: of all parts together, as rows; then recording ends.
        say: is told of parts, and of the end.
        prefix: of the parts' names.
    """

    directory: Path
    layers: Sequence[int]
    num_experts: int
    top_k: int
    metadata: dict[str, str]
    most_bytes: int
    say: Callable[[str], None]
    prefix: str = ""
    part_bytes: int = PART_BYTES

    def __post_init__(self) -> None:
        self.num_bytes = self.num_parts = self.num_tokens = 0
        self.is_open = True
        self._thread, self._part = ThreadPoolExecutor(1), Future[None]()
        self._part.set_result(None)
        self._row_bytes = len(self.layers) * (4 * self.num_experts + 8 * self.top_k)
        self._requests: dict[str, tuple[int, int]] = {}  # number, and the position that comes next
        self._num_requests = 0
        self._clear()

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
        sequence_T, kept_T = np.empty(len(position_T), np.int64), np.ones(len(position_T), bool)
        for token, (name, position) in enumerate(zip(request_T, position_T.tolist(), strict=True)):
            number, expected = self._requests.get(name, (-1, 0))
            if number < 0:
                number, self._num_requests = self._num_requests, self._num_requests + 1
            sequence_T[token], kept_T[token] = number, position >= expected
            self._requests[name] = number, max(position + 1, expected)
        broken_T = np.any([broken_T for *_, broken_T in step.values()], axis=0)
        for why, number in zip(self._left_out, ((~kept_T).sum(), (kept_T & broken_T).sum()), strict=True):
            self._left_out[why] += int(number)
        kept_T &= ~broken_T
        for place, (full_TE, ids_TK, _) in step.items():
            self._blocks[place].append((full_TE[kept_T], ids_TK[kept_T]))
        self._tokens.append((sequence_T[kept_T], position_T[kept_T], is_prompt_T[kept_T]))
        self._waiting += int(kept_T.sum())
        part_bytes = self._waiting * self._row_bytes
        is_last = self.num_bytes + part_bytes >= self.most_bytes
        if is_last or part_bytes >= self.part_bytes:
            self.flush()
        if is_last and self.is_open:
            self.close()
            self.say(f"recording ended at its limit of {self.most_bytes / 2**30:.3g} GiB; serving goes on")

    def flush(self) -> None:
        """Have what waits written; what could not be written before ends the recording, not the server."""
        try:
            self._part.result()
            if self._waiting:
                self.num_bytes += self._waiting * self._row_bytes
                self._part = self._thread.submit(self._write, self._tokens, self._blocks, self._left_out)
        except (OSError, ValueError) as problem:
            self.is_open = False
            self.say(f"recording ended: {problem}")
        self._clear()

    def close(self) -> None:
        """Write the last part, once."""
        if not self.is_open:
            return
        self.flush()
        self.flush()  # until the last part is written
        if self.is_open:
            self.say(f"recorded {self.num_tokens:,} tokens of {self._num_requests:,} requests in {self.directory}")
        self.is_open = False

    def _clear(self) -> None:
        self._step: dict[int, tuple[NDArray[np.float32], NDArray[np.integer], NDArray[np.bool_]]] = {}
        self._blocks: list[list[tuple[NDArray[np.float32], NDArray[np.integer]]]] = [[] for _ in self.layers]
        self._tokens: list[tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.bool_]]] = []
        self._waiting = 0
        self._left_out = {"computed again after a request was set back": 0, "whose scores were no numbers": 0}

    def _write(self, tokens: list[Any], layers: list[list[Any]], left_out: dict[str, int]) -> None:
        self.num_parts += 1
        sequence_T, position_T, is_prompt_T = (np.concatenate(arrays) for arrays in zip(*tokens, strict=True))
        order_T = np.lexsort((position_T, sequence_T))
        rows = {"prefill": order_T[is_prompt_T[order_T]], "decode": order_T[~is_prompt_T[order_T]]}
        names = {phase: f"{self.prefix}{phase}-{self.num_parts:04}.safetensors" for phase in rows if len(rows[phase])}
        part = f"part {self.num_parts}"
        with contextlib.ExitStack() as stack:
            writers = {phase: stack.enter_context(self._writer(phase, name, left_out)) for phase, name in names.items()}
            for layer, blocks in zip(self.layers, layers, strict=True):
                full_TE, ids_TK = (np.concatenate(arrays) for arrays in zip(*blocks, strict=True))
                for phase, writer in writers.items():
                    writer.add(layer, ids_TK[rows[phase]], None, part, full_TE=full_TE[rows[phase]])
            for phase, writer in writers.items():
                writer.add_tokens(sequence_T[rows[phase]], position_T[rows[phase]], part)
        for phase, name in names.items():
            self.num_tokens += len(rows[phase])
            self.say(f"wrote {self.directory / name}: {len(rows[phase]):,} tokens")

    @contextlib.contextmanager
    def _writer(self, phase: str, name: str, left_out: dict[str, int]) -> Iterator[TraceWriter]:
        facts = {key: value for key, value in self.metadata.items() if key != "note"}
        with written_trace(self.directory / name, self.directory) as writer:
            writer.describe(num_experts=self.num_experts, top_k=self.top_k, where=phase, phase=phase, **facts)
            writer.notes += [self.metadata["note"]] if self.metadata.get("note") else []
            writer.left_out.update(left_out)
            yield writer
