"""Record what a server's routers choose: parts of ``moe-trace-v1`` with the scores of all experts.

``prefill.safetensors`` and ``decode.safetensors``, prompts and generated tokens, are folders of parts
(``workload.trace``). A part is written every minute or 64 MiB by a thread, whole or not at all, so that a server that
is killed loses the last one alone; ``unfinished`` beside them says that it did, or that the recorder goes on. A step
keeps logits and experts of its layers on the device, and brings them over together when it ends.

Shapes: B = requests of a step, T = its tokens, E = experts, K = top_k, L = MoE layers.
"""

from __future__ import annotations

import itertools
import logging
import shutil
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moe_ep_bench.errors import UserError
from moe_ep_bench.models import shares
from moe_ep_bench.policies.contract import STAGES
from moe_ep_bench.quality.checkpoint import MoELayer
from moe_ep_bench.workload.trace import PART, UNFINISHED, written_trace

_GIB = 2**30
# What the folder's disk keeps free.
LEAST_FREE_BYTES = _GIB


def check_room(directory: Path) -> None:
    """Raise ValueError where the disk of a folder is nearly full."""
    if (free := shutil.disk_usage(directory).free) < LEAST_FREE_BYTES:
        raise UserError(f"{directory}: expected a disk with 1 GiB free, got {free / _GIB:.2f} GiB")


@dataclass(eq=False)
class _Part:
    """Steps that are written together."""

    began_s: float
    steps: list[tuple[NDArray[Any], ...]] = field(default_factory=list)
    """Of each step sequence_T, position_T, is_prompt_T, full_LTE and ids_LTK."""
    arrivals: dict[int, float] = field(default_factory=dict)
    num_bytes: int = 0


@dataclass(eq=False)
class Recorder:
    """Records steps until it is closed.

    A part that cannot be written ends the recording, not the server. Where parts come faster than they are written,
    the step waits when ``most_bytes`` are held.

    Attributes:
        directory: of the recordings.
        facts: metadata of all parts: model and source.
        notes: what a user of them should know.
        most_bytes: held in memory.
        say: receives a level of ``logging`` and a line.
        clock: seconds since the epoch, as requests' arrivals are given.
        part_s, part_bytes: when a part is full.
    """

    directory: Path
    layers: Sequence[MoELayer]
    facts: Mapping[str, str]
    notes: Sequence[str]
    most_bytes: float
    say: Callable[[int, str], None]
    clock: Callable[[], float] = time.time
    part_s: float = 60.0
    part_bytes: float = 2**26

    def __post_init__(self) -> None:
        self.is_open = True
        self._began_s = self.clock()
        self._requests: defaultdict[str, int] = defaultdict(itertools.count().__next__)
        self._next: dict[int, int] = {}  # by sequence: the first position that was not recorded
        self._arrivals: dict[str, float] = {}  # by request that no step has served
        self._came: dict[int, float] = {}  # by sequence of a request that is there
        self._step: dict[int, tuple[Tensor, Tensor]] = {}
        self._counts: Counter[str] = Counter()
        self._written: Counter[str] = Counter()  # tokens by stage
        self._num_parts: Counter[str] = Counter()
        self._part: _Part | None = None
        self._full: list[_Part] = []  # the first is being written
        self._has_waited = self._has_failed = False
        self._changed = threading.Condition()
        self.directory.mkdir(parents=True, exist_ok=True)
        (self.directory / UNFINISHED).touch()
        self._thread = threading.Thread(target=self._write_parts, name="moe-ep-bench recorder", daemon=True)
        self._thread.start()

    # ---- a step ------------------------------------------------------------------------------------------------------

    def arrive(self, arrivals: Mapping[str, float]) -> None:
        """When requests that the next steps serve first came to the server, seconds since the epoch."""
        self._arrivals |= arrivals

    def add(self, place: int, logits_TE: Tensor, ids_TK: Tensor) -> None:
        """Add what a layer, the layers' ``place``, chose in the step."""
        self._step[place] = logits_TE.clone(), ids_TK.clone()

    def forget(self, names: Iterable[str]) -> None:
        """Requests that ended: who has such a name from now on is another."""
        for name in names:
            self._arrivals.pop(name, None)
            if (sequence := self._requests.pop(name, None)) is not None:
                self._next.pop(sequence, None)
                self._came.pop(sequence, None)

    def end_step(
        self,
        names: Sequence[str],
        request_T: NDArray[np.int64],
        position_T: NDArray[np.int64],
        is_prompt_T: NDArray[np.bool_],
    ) -> None:
        """Complete a step.

        Args:
            names: the server's of its requests, [B].
            request_T: which of them each token is of; a request's tokens stand together, by position.

        Raises:
            ValueError: a layer's experts contradict its logits.
        """
        step, self._step = self._step, {}
        if not self.is_open or not step:
            return
        sequence_B = np.array([self._requests[name] for name in names], np.int64)
        self._note_new(names, sequence_B, request_T, position_T)
        next_B = np.array([self._next.get(sequence, 0) for sequence in sequence_B.tolist()], np.int64)
        is_new_T = position_T >= next_B[request_T]
        self._counts["that came again"] += int((~is_new_T).sum())
        last_B = next_B.copy()
        np.maximum.at(last_B, request_T, position_T + 1)
        self._next.update(zip(sequence_B.tolist(), last_B.tolist(), strict=True))
        full_LTE, ids_LTK = self._host(step)
        tokens = sequence_B[request_T], position_T, is_prompt_T
        if not is_new_T.all():
            tokens = tuple(of_token[is_new_T] for of_token in tokens)
            full_LTE, ids_LTK = full_LTE[:, is_new_T], ids_LTK[:, is_new_T]
        with self._changed:
            part = self._part = self._part or _Part(time.monotonic())
            part.steps.append((*tokens, full_LTE, ids_LTK))
            part.arrivals |= {sequence: self._came[sequence] for sequence in sequence_B.tolist()}
            part.num_bytes += full_LTE.nbytes + ids_LTK.nbytes
            if part.num_bytes >= self.part_bytes:
                self._fill()
            if self._full and self._num_held() >= self.most_bytes:
                if not self._has_waited:
                    limit = f"{self.most_bytes / _GIB:.3g} GiB"
                    self.say(logging.WARNING, f"{limit} wait to be written: steps wait for the disk from here on")
                self._has_waited = True
                self._changed.wait_for(lambda: not self._full or self._num_held() < self.most_bytes)

    def _note_new(
        self,
        names: Sequence[str],
        sequence_B: NDArray[np.int64],
        request_T: NDArray[np.int64],
        position_T: NDArray[np.int64],
    ) -> None:
        """Times of requests that no step has served before, and their prompts' beginnings that the cache answered."""
        now_s = self.clock()
        for place, (name, sequence) in enumerate(zip(names, sequence_B.tolist(), strict=True)):
            if sequence not in self._came:
                self._came[sequence] = self._arrivals.pop(name, now_s) - self._began_s
                first = int(position_T[request_T == place].min(initial=2**31))
                if 0 < first < 2**31:
                    self._counts["cached"] += first
                    self._counts["cached requests"] += 1

    def _host(self, step: Mapping[int, tuple[Tensor, Tensor]]) -> tuple[NDArray[np.float32], NDArray[np.integer]]:
        """Shares [L, T, E] and experts [L, T, K] of a step, held against each other, by layer."""
        places = sorted(step)
        logits_LTE, ids_LTK = (torch.stack([step[place][which] for place in places]) for which in (0, 1))
        layers = [self.layers[place] for place in places]
        if any(layer.spec.selection_bias for layer in layers):
            choices = [layer.choice(*step[place]) for place, layer in zip(places, layers, strict=True)]
            scores_NE = torch.cat([choice.scores_TE for choice in choices])
        else:
            try:
                scores_NE = layers[0].choice(logits_LTE.flatten(0, 1), ids_LTK.flatten(0, 1)).scores_TE
            except UserError:
                for place, layer in zip(places, layers, strict=True):  # names the layer and its row
                    layer.choice(*step[place])
                raise
        return shares(scores_NE).view(logits_LTE.shape).cpu().numpy(), ids_LTK.cpu().numpy()

    # ---- parts -------------------------------------------------------------------------------------------------------

    def _num_held(self) -> int:
        return sum(part.num_bytes for part in (*self._full, *([self._part] if self._part else [])))

    def _fill(self) -> None:
        """Hand the part over to the thread."""
        if self._part is not None:
            self._full.append(self._part)
        self._part = None
        self._changed.notify_all()

    def close(self) -> None:
        """Write what is held, once, and say what was written, unless a part could not be."""
        with self._changed:
            was_open, self.is_open = self.is_open, False
            self._fill()
        self._thread.join()
        if was_open and not self._has_failed:
            for stage, num_tokens in self._written.items():
                words = f"{num_tokens:,} tokens in {self._num_parts[stage]:,} parts"
                self.say(logging.INFO, f"wrote {self._folder(stage)}: {words}")

    def _folder(self, stage: str) -> Path:
        return self.directory / f"{stage}.safetensors"

    def _write_parts(self) -> None:
        """Write parts as they fill, in a thread of its own, until the recorder is closed or one cannot be written."""
        while True:
            with self._changed:
                while self.is_open and not self._full:
                    left_s = None if self._part is None else self._part.began_s + self.part_s - time.monotonic()
                    if left_s is not None and left_s <= 0:
                        self._fill()
                    else:
                        self._changed.wait(min(left_s, self.part_s) if left_s is not None else self.part_s)
                if not self._full:
                    break
                part = self._full[0]
            try:
                check_room(self.directory)
                for stage in STAGES:
                    self._write(part, stage)
            except Exception as problem:  # of whatever kind: a thread that died unheard would stop the server's steps
                self._end(problem)
                return
            with self._changed:
                self._full.pop(0)
                self._changed.notify_all()
        (self.directory / UNFINISHED).unlink(missing_ok=True)

    def _end(self, problem: Exception) -> None:
        """Record no more; what was not written is lost."""
        with self._changed:
            self.is_open, self._part, self._has_failed = False, None, True
            self._full.clear()
            self._changed.notify_all()
        self.say(logging.ERROR, f"recording ended, its last part is lost, serving goes on: {problem}")

    def _write(self, part: _Part, stage: str) -> None:
        sequence_T, position_T, is_prompt_T = (
            np.concatenate([step[which] for step in part.steps]) for which in range(3)
        )
        kept_T = is_prompt_T == (stage == "prefill")
        if not kept_T.any():
            return
        path = self._folder(stage) / PART.format(self._num_parts[stage])
        with written_trace(path, self.directory) as writer:
            self.layers[0].describe(writer, phase=stage, domain="requests of a server", **self.facts)
            writer.notes += self.notes
            if stage == "prefill" and self._counts["cached"]:
                tokens, requests = self._counts["cached"], self._counts["cached requests"]
                writer.notes.append(f"the prefix cache answered the first {tokens:,} tokens of {requests:,} prompts")
            writer.left_out["that came again"] += self._counts["that came again"]
            for sequence, seconds in part.arrivals.items():
                writer.add_arrival(sequence, seconds)
            for place, layer in enumerate(self.layers):
                full_TE, ids_TK = (np.concatenate([step[which][place] for step in part.steps]) for which in (3, 4))
                writer.add(layer.number, ids_TK[kept_T], None, stage, full_TE=full_TE[kept_T])
            writer.add_tokens(sequence_T[kept_T], position_T[kept_T], stage)
        self._num_parts[stage] += 1
        self._written[stage] += writer.num_tokens
