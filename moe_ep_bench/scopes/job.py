"""What the parts of a job share: its ranks, where it writes, and the columns that name a case."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from tqdm import tqdm

from moe_ep_bench.attempts import Mark
from moe_ep_bench.ranks import Ranks
from moe_ep_bench.records import RunDirectory
from moe_ep_bench.scopes.comparison import CaseSpec, Comparison
from moe_ep_bench.watchdog import Watchdog


@dataclass(frozen=True)
class Job:
    """One job on this rank, which makes one launch."""

    ranks: Ranks
    directory: RunDirectory
    run_id: str
    launch: int
    mark: Mark
    watchdog: Watchdog
    progress: tqdm

    def enter(self, comparison: Comparison) -> None:
        """Note that work on a comparison as a whole begins: building its layers, writing its parts."""
        self.watchdog.feed()
        self.mark.set(comparison.comparison_id)

    def begin(self, case_id: str) -> None:
        """Note that an iteration of a case begins: for the watchdog, for a job after a crash, for the display."""
        self.watchdog.feed()
        self.mark.set(case_id)
        self.progress.update()

    def identity(self, comparison: Comparison, case: CaseSpec, num_rows: int) -> dict[str, list[Any]]:
        """The columns that say which case rows belong to, repeated for ``num_rows`` rows."""
        values = {
            "run_id": self.run_id,
            "case_id": case.case_id,
            "comparison_id": comparison.comparison_id,
            "mode": "run",
            "model": comparison.model.name,
            "policy": case.name,
            "policy_params": json.dumps(case.params, sort_keys=True),
            "num_ranks": comparison.ep_size,
            "status": "ok",
        }
        return {key: [value] * num_rows for key, value in values.items()}

    def write_unmeasured(self, comparison: Comparison, case: CaseSpec, status: str, reason: str) -> None:
        """Write the one row of a case that has no measurements; rank 0 calls this."""
        row = {**self.identity(comparison, case, 1), "status": [status], "reason": [reason]}
        self.directory.write_case(case.case_id, self.launch, row)
