"""One job on this rank: it records what it tries, so that the next job knows what was lost."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import torch
from tqdm import tqdm

from moe_ep_bench.bench.point import Point
from moe_ep_bench.errors import LOST, brief, naming
from moe_ep_bench.files import writing_to
from moe_ep_bench.results import RunDirectory
from moe_ep_bench.runtime.attempts import Guard, Loss, is_of_peers
from moe_ep_bench.runtime.ranks import Ranks, ReportedError, T

if TYPE_CHECKING:
    from moe_ep_bench.bench.tokens import Batches

# Arithmetic does not hang: for so long a model of devices may compute without a word.
_MODELLED_S = 7 * 24 * 3600.0


@dataclass
class Job:
    """One job on this rank, which makes one launch of timed points.

    Attributes:
        launch: which of ``measure.launches``, from 0.
        guard: of the block of ``trying``; ``progress`` of the point that is measured.
        batches: of the last point that was modelled; the next may have the same.
    """

    ranks: Ranks
    directory: RunDirectory
    launch: int = 0
    guard: Guard = field(init=False)
    progress: tqdm = field(init=False)
    batches: Batches | None = field(default=None, init=False)

    @contextlib.contextmanager
    def trying(self, points: Sequence[Point]) -> Iterator[None]:
        """Record what is tried in the block, in a file that is named by the first point.

        If the block fails, the process group is lost: its reason stays there, and this process ends with ``LOST``.

        Raises:
            ReportedError: results cannot be written; on all ranks, after one line to the user.
        """
        first, are_modelled = points[0], all(point.device is not None for point in points)
        limit_s = _MODELLED_S if are_modelled else first.experiment.measure.timeout_s
        new_guard = writing_to(self.directory.root, "--out")(Guard)
        where = self.directory.attempts, first.comparison_id, self.ranks.rank, limit_s
        with self.ranks.agree(partial(new_guard, *where)) as self.guard:
            try:
                yield
            except ReportedError:
                raise
            except Exception as error:
                try:
                    self._explain(Loss.of(error))
                finally:  # Though nobody may hear it. Destructors would wait for peers that may never come.
                    os._exit(LOST)

    def _explain(self, loss: Loss) -> None:
        """Note why what is tried is being lost, and say so."""
        self.guard.explain(loss)
        words = brief(loss, 300, quoted=False)
        print(f"moe-ep-bench: rank {self.ranks.rank}: {words}", file=sys.stderr, flush=True)

    def begin(self, case_id: str) -> None:
        """Note that an iteration of a case begins: for the guard, for a job after a crash, for the display."""
        self.guard.at(case_id)
        self.progress.update(self.progress.n < (self.progress.total or 0))  # which is about so many

    def record_failure(self, error: Exception) -> Loss:
        """Record that an exception outside of collectives costs this rank a case; return why.

        All ranks then agree on it and go on, as none waits for this one. If others wait in a collective after all, the
        job is lost for this reason.

        Raises:
            Exception: the same, where this rank cannot go on: a collective did fail, or its device answers no more.
        """
        if isinstance(error, torch.distributed.DistError) or is_of_peers(error):
            raise error
        if self.ranks.device.type == "cuda":
            try:
                torch.cuda.synchronize(self.ranks.device)
            except RuntimeError:
                raise error from None
        loss = Loss.of(error)
        loss = loss._replace(words=brief(loss.words, 300, quoted=False))
        self._explain(loss)
        return loss

    def on_first(self, act: Callable[[], T], hint: str = "") -> T:
        """Call ``act`` on rank 0, in the results directory; return its result on every rank.

        Raises:
            ReportedError: ``act`` raised ValueError or OSError; on all ranks, after one line that ends with ``hint``.
        """

        def write() -> T:
            with naming("", hint), writing_to(self.directory.root, "--out"):
                return act()

        return self.ranks.agree(write, on_first=True)
