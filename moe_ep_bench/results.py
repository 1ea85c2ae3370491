"""Write a results directory, atomically and part by part.

``<out>/run.json``                   resolved config, environment, hashes, what each case is
``<out>/<folder>/<id>.parquet``      the tables (``schema.TABLES``), a part per case or comparison
``<out>/conditions/<comparison_id>-<launch>.json``  the machine while a comparison was timed
``<out>/attempts/``                  what was running when a job was lost (``crash_journal``)
``<out>/.locks/``                    what jobs are writing at the moment (``locks``)

Several jobs may fill one directory, each with comparisons of its own (the points of a sweep). Parts are theirs alone;
``run.json`` is merged under a lock, and what was running is kept apart per job.

A *case* is one policy on one workload; its id is a hash of everything that defines it. Cases
with one ``comparison_id`` ran interleaved on the same batches and may be paired within a *launch*,
one repetition of the whole process. A launch whose rows are in the part is finished and is not
run again. Samples are never thinned or averaged here.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from moe_ep_bench.files import atomic_path, write_json
from moe_ep_bench.runtime import locks
from moe_ep_bench.schema import TABLES

RUN_JSON = "run.json"


class RunDirectory:
    """The files of one run. Every write is atomic; reading back tells what is already done."""

    def __init__(self, root: Path) -> None:
        self.root = root

    @property
    def run_json(self) -> Path:
        return self.root / RUN_JSON

    def path(self, table: str, part_id: str) -> Path:
        """The part of a case or comparison in one of ``TABLES``."""
        return self.root / TABLES[table].folder / f"{part_id}.parquet"

    @property
    def folders(self) -> list[Path]:
        """The folders of all that is written here."""
        names = dict.fromkeys([*(table.folder for table in TABLES.values()), "conditions", "attempts"])
        return [self.root / name for name in names]

    @property
    def attempts(self) -> Path:
        return self.root / "attempts"

    @property
    def profiles(self) -> Path:
        return self.root / "profiles"

    def conditions_path(self, comparison_id: str, launch: int) -> Path:
        return self.root / "conditions" / f"{comparison_id}-{launch}.json"

    def statuses(self, case_id: str) -> dict[int, str]:
        """The status of every launch that a case's part holds; empty where there is no part that can be read."""
        try:
            rows = pq.read_table(self.path("samples", case_id), columns=["launch", "status"])
        except (OSError, pa.ArrowException):
            return {}
        return dict(zip(rows["launch"].to_pylist(), rows["status"].to_pylist(), strict=True))

    def is_finished(self, case_id: str, launch: int) -> bool:
        """Whether a launch of the case has a result that stands. One that was skipped may fit another time."""
        return self.statuses(case_id).get(launch, "skipped") != "skipped"

    def is_done(self, table: str, part_id: str) -> bool:
        """Whether there is a part with rows."""
        try:
            return pq.read_metadata(self.path(table, part_id)).num_rows > 0
        except (OSError, pa.ArrowException):
            return False

    def remove_unfinished(self, ids: Iterable[str]) -> None:
        """Remove what a killed job had begun to write of these cases and comparisons."""
        beginnings = tuple(f".{one}" for one in ids)
        for path in (*self.root.glob(".*"), *self.root.glob("*/.*")):
            if path.name.startswith(beginnings):
                path.unlink(missing_ok=True)

    def remove_case(self, case_id: str) -> None:
        for table in TABLES:
            self.path(table, case_id).unlink(missing_ok=True)

    def remove_conditions(self, comparison_id: str) -> None:
        for path in self.conditions_path(comparison_id, 0).parent.glob(f"{comparison_id}-*.json"):
            path.unlink()

    def write(self, table: str, part_id: str, rows: Mapping[str, Any], launch: int | None = None) -> None:
        """Write a part of one of ``TABLES``; columns that ``rows`` lack are null.

        Args:
            rows: a list for each column, or one value that holds for all rows.
            launch: whose rows these are; those of other launches stay. None = the part is written anew.
        """
        path, schema = self.path(table, part_id), TABLES[table].schema
        num_rows = next((len(column) for column in rows.values() if isinstance(column, list)), 1)
        unknown = set(rows) - set(schema.names)
        assert not unknown, f"columns that the table {table} does not have: {sorted(unknown)}"
        columns = (rows.get(field.name) for field in schema)
        columns = [column if isinstance(column, list) else [column] * num_rows for column in columns]
        part = pa.table([pa.array(*pair) for pair in zip(columns, schema.types, strict=True)], schema=schema)
        if launch is not None:
            place = schema.get_field_index("launch")
            part = part.set_column(place, schema.field(place), pa.array([launch] * num_rows, pa.int32()))
            part = pa.concat_tables([*_other_launches(path, launch), part])
        with atomic_path(path) as temporary:
            pq.write_table(part, temporary, compression="zstd")

    def write_run(
        self,
        description: Mapping[str, Any],
        is_done: Callable[[str], bool] | None = None,
        check: Callable[[], None] = lambda: None,
        *,
        keep_others: bool = False,
    ) -> None:
        """Write ``run.json``, and keep in it what an earlier one knew of finished comparisons.

        ``runs`` holds the provenance of every run whose rows are here, by run_id. A comparison that
        was begun under another config and never finished is dropped with its parts, unless another job is at it.

        Args:
            is_done: whether a case has what makes it finished; the default is a part of samples.
            check: raises where what is there by now does not allow it; called under the lock.
            keep_others: keep comparisons that were never finished too: other jobs have them to do.

        Raises:
            ValueError: another job has been writing ``run.json`` for a minute.
        """
        with locks.hold(self.root, {RUN_JSON: RUN_JSON}, patience_s=60.0):
            check()
            self.remove_unfinished([RUN_JSON])
            self._merge_run(description, is_done, keep_others)

    def _merge_run(
        self, description: Mapping[str, Any], is_done: Callable[[str], bool] | None, keep_others: bool
    ) -> None:
        is_done = is_done or (lambda case_id: bool(self.statuses(case_id)))
        provenance = {key: description.get(key) for key in ("created", "config", "environment", "hashes")}
        merged = {**description, "runs": {description["run_id"]: provenance}}
        earlier = json.loads(self.run_json.read_text()) if self.run_json.exists() else {}
        merged["runs"] = {**earlier.get("runs", {}), **merged["runs"]}
        for comparison_id, comparison in earlier.get("comparisons", {}).items():
            if comparison_id in description["comparisons"]:
                continue
            cases = {k: case for k, case in earlier["cases"].items() if case["comparison_id"] == comparison_id}
            kept = keep_others or locks.is_held(self.root, comparison_id)
            if kept or all(is_done(case_id) for case_id in cases):
                merged["comparisons"] = {comparison_id: comparison, **merged["comparisons"]}
                merged["cases"] = {**cases, **merged["cases"]}
            else:
                for case_id in cases:
                    self.remove_case(case_id)
        write_json(self.run_json, merged)


def _other_launches(path: Path, launch: int) -> list[pa.Table]:
    """What a part holds beside a launch; nothing where it cannot be read."""
    try:
        return [pq.read_table(path, partitioning=None).filter(pc.field("launch") != launch)]
    except (OSError, pa.ArrowException):
        return []
