"""Write a results directory, atomically and part by part.

``<out>/run.json``                   resolved config, environment, hashes, what each case is
``<out>/<folder>/<id>.parquet``      the tables (``schema.TABLES``), a part per case or comparison
``<out>/conditions/<comparison_id>-<launch>.json``  the machine while a comparison was timed
``<out>/attempts/``                  what was running when a job was lost (``crash_journal``)
``<out>/.locks/``                    what jobs are writing at the moment (``locks``)

Several jobs may fill one directory, each with comparisons of its own (the points of a sweep). Parts are theirs alone;
``run.json`` is merged under a lock, and what was running is kept apart per job.

A *case* is one policy on one workload; its id is a hash of everything that defines it. Cases with one
``comparison_id`` ran interleaved on the same batches and may be paired within a *launch*, one repetition of the whole
process; a launch whose rows are in the part is not run again. Samples are never thinned or averaged here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from moe_ep_bench.errors import UserError, brief
from moe_ep_bench.files import atomic_path, inside, read_json, write_json
from moe_ep_bench.runtime import locks
from moe_ep_bench.schema import TABLES

RUN_JSON = "run.json"
_UNREADABLE = (UserError, OSError, pa.ArrowException)
# Of one part. A few bytes of Parquet can stand for more than any memory holds.
_MOST_VALUES, _MOST_BYTES = 2**28, 2**32


def check_part(path: Path) -> pq.FileMetaData:
    """What a part says of itself, read before anything else of it.

    Raises:
        ValueError: it announces more than a part ever holds.
        OSError, pa.ArrowException: it cannot be read.
    """
    return check_size(path, pq.read_metadata(path))


def check_size(path: Path, found: pq.FileMetaData) -> pq.FileMetaData:
    """Raise a ValueError where a part announces more than one ever holds."""
    groups = [found.row_group(number) for number in range(found.num_row_groups)]
    values = sum(group.column(place).num_values for group in groups for place in range(group.num_columns))
    size = sum(group.total_byte_size for group in groups)
    if max(values, found.num_rows) > _MOST_VALUES or size > _MOST_BYTES:
        raise UserError(f"{path}: expected at most {_MOST_VALUES:,} values, got {max(values, found.num_rows):,}")
    return found


class _Case(BaseModel):
    model_config = ConfigDict(extra="allow")

    comparison_id: str
    order: int | None = None


class _Earlier(BaseModel):
    """What a job that goes on in a directory reads of its run.json."""

    model_config = ConfigDict(extra="allow")

    mode: str
    scope: str = "layer"
    environment: dict[str, Any]
    hashes: dict[str, Any]
    runs: dict[str, dict[str, Any]] = Field({})
    comparisons: dict[str, dict[str, Any]] = Field({})
    cases: dict[str, _Case] = Field({})


class RunDirectory:
    """The files of one run. Every write is atomic; reading back tells what is already done."""

    def __init__(self, root: Path) -> None:
        self.root = root

    @property
    def run_json(self) -> Path:
        return inside(self.root, self.root / RUN_JSON)

    def path(self, table: str, part_id: str) -> Path:
        """The part of a case or comparison in one of ``TABLES``."""
        return inside(self.root, self.root / TABLES[table].folder / f"{_a_name(part_id)}.parquet")

    def earlier(self) -> dict[str, Any] | None:
        """What ``run.json`` says, where there is one already.

        Raises:
            ValueError: it is damaged; one line that names it.
        """
        path = self.run_json
        if not path.exists():
            return None
        try:
            content = read_json(path)
            _Earlier.model_validate(content)
        except (OSError, ValueError):
            raise UserError(f"{path}: damaged, or not written by this program") from None
        for part_id in (*content.get("comparisons", {}), *content.get("cases", {})):
            _a_name(part_id)
        return content

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
        return inside(self.root, self.root / "conditions" / f"{_a_name(comparison_id)}-{launch}.json")

    def statuses(self, case_id: str) -> dict[int, str]:
        """The status of every launch that a case's part holds; empty where there is no part that can be read."""
        path = self.path("samples", case_id)
        try:
            check_part(path)
            rows = pq.read_table(path, columns=["launch", "status"], partitioning=None)
        except _UNREADABLE:
            return {}
        return dict(zip(rows["launch"].to_pylist(), rows["status"].to_pylist(), strict=True))

    def is_finished(self, case_id: str, launch: int) -> bool:
        """Whether a launch of the case has a result that stands. One that was skipped may fit another time."""
        return self.statuses(case_id).get(launch, "skipped") != "skipped"

    def is_done(self, table: str, part_id: str) -> bool:
        """Whether there is a part with rows."""
        try:
            return check_part(self.path(table, part_id)).num_rows > 0
        except _UNREADABLE:
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
        provenance = {
            key: description.get(key)
            for key in ("created", "config", "config_text", "command", "environment", "hashes")
        }
        merged = {**description, "runs": {description["run_id"]: provenance}}
        earlier = self.earlier() or {}
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
        check_part(path)
        return [pq.read_table(path, partitioning=None).filter(pc.field("launch") != launch)]
    except _UNREADABLE:
        return []


def _a_name(part_id: str) -> str:
    """An id as a file's name: other people's ids lead into no other folder.

    Raises:
        ValueError: it is none.
    """
    if part_id != Path(part_id).name and part_id:
        raise UserError(f"expected an id that is a file's name, got {brief(part_id)}")
    return part_id


# ---- two runs side by side -----------------------------------------------------------------------------------------

# By how much speedups may differ and be equivalent.
EQUIVALENCE_MARGIN = 0.03


class _Pairs(BaseModel):
    pairs: list[tuple[str, str]] = Field(min_length=1)
    links: str
    margin: float = Field(EQUIVALENCE_MARGIN, ge=0, le=1)


class ValidationDirectory:
    """The files of one ``validate``: two results directories, and which comparison of one is which of the other."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.links = root / "links.yaml"
        self.real, self.emulated = root / "real", root / "emulated"
        self.pairs, self.text, self.table = (root / f"validation.{end}" for end in ("json", "txt", "csv"))

    def write_pairs(self, pairs: Sequence[tuple[str, str]], links: str, margin: float = EQUIVALENCE_MARGIN) -> None:
        """Say which comparisons belong together, (real, emulated) ids, where the links are from, in words, and by how
        much speedups may differ and be equivalent.
        """
        write_json(self.pairs, {"pairs": list(map(list, pairs)), "links": links, "margin": margin})

    def read_pairs(self) -> tuple[list[tuple[str, str]], str, float]:
        """What ``write_pairs`` wrote.

        Raises:
            ValueError: one line that names the file: it is missing or damaged.
        """
        try:
            described = _Pairs.model_validate(read_json(inside(self.root, self.pairs)))
            return described.pairs, described.links, described.margin
        except OSError:
            raise UserError(f"{self.pairs}: missing; `moe-ep-bench validate` writes it after both runs") from None
        except (ValueError, ValidationError):
            raise UserError(f"{self.pairs}: damaged, or not written by this program") from None
