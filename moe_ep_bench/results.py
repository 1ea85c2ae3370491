"""Write a results directory, atomically and part by part.

``<out>/run.json``              resolved config, environment, hashes, what each case is
``<out>/<folder>/<id>.parquet`` the tables (``schema.TABLES``), a part per comparison; of samples one per launch
``<out>/conditions/<id>.json``  under which conditions a launch's samples were timed (``facts.Conditions``)
``<out>/begun/<id>``            what was worked out of a modelled comparison that is not finished (``bench.kept``)
``<out>/attempts/``             what was tried when a job was lost (``runtime.attempts``)
``<out>/.lock-<name>``          what jobs are writing at the moment

Several jobs may fill one directory, each with comparisons of its own (the points of a sweep). Parts are theirs alone:
a job locks each comparison that it may write. ``run.json`` is merged under a lock, and what was running is kept apart
per job. A lock is the kernel's (``filelock``, by flock) and ends with its holder; the file says who that is.

A *case* is one policy on one workload; its id is a hash of everything that defines it. Cases with one
``comparison_id`` ran interleaved on the same batches and may be paired within a *launch*, one repetition of the whole
process. A launch is written as a whole, once, its conditions ahead of its samples; one whose part has all cases is not
run again. Samples are never thinned or averaged here.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from filelock import FileLock, Timeout
from pydantic import BaseModel, ValidationError

from moe_ep_bench.errors import UserError, brief, problem_error
from moe_ep_bench.facts import Job, Pairs, RunFacts
from moe_ep_bench.files import atomic_path, make_folder, read_json, write_json
from moe_ep_bench.schema import COUNTS, SCHEMA_VERSION, TABLES

RUN_JSON = "run.json"
# From so many rows on they are written; small groups of rows would take more room than what is in them.
_GROUP_ROWS = 2**20
# A job that was just stopped may take so long to end; its successor waits for it.
PATIENCE_S = 5.0


_Type = TypeVar("_Type", bound=BaseModel)


class ResultsError(UserError):
    """A results directory, or a file of one, that cannot be read."""


def typed(model: type[_Type], where: str, content: Any) -> _Type:
    """Content as its type; ResultsError names the first key that is otherwise, behind ``where``."""
    try:
        return model.model_validate(content)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        key = ".".join(map(str, first["loc"])) or "damaged"
        raise ResultsError(f"{where}{problem_error(first, brief(key, 200, quoted=False))}") from None


def read_document(path: Path, model: type[_Type]) -> _Type:
    """A JSON document of a results directory; ResultsError where it is missing, damaged or of another version."""
    return typed(model, f"{path}: ", _content_of(path, model))


def _content_of(path: Path, model: type[BaseModel]) -> Any:
    try:
        content = read_json(path)
    except (FileNotFoundError, NotADirectoryError):
        raise ResultsError(f"{path}: missing; expected a results directory that `moe-ep-bench` wrote") from None
    except OSError as error:
        raise ResultsError(f"{path}: {error.strerror}") from None
    except ValueError as error:
        raise ResultsError(str(error)) from None
    version = content.get("schema_version") if isinstance(content, dict) else None
    if model is RunFacts and version != SCHEMA_VERSION:
        hint = "another version of this program wrote it: use that one, or measure again in another directory"
        raise ResultsError(f"{path}: schema_version: expected {SCHEMA_VERSION}, got {brief(version)}; {hint}")
    return content


class RunDirectory:
    """The files of one run. Every write is atomic; reading back tells what is already done."""

    def __init__(self, root: Path) -> None:
        self.root = root

    @property
    def run_json(self) -> Path:
        return self.root / RUN_JSON

    def path(self, table: str, comparison_id: str, launch: int | None = None) -> Path:
        """The part of a comparison in one of ``TABLES``, and of a launch where it is by launch."""
        name = comparison_id if launch is None else f"{comparison_id}-{launch}"
        return self.root / TABLES[table].folder / f"{name}.parquet"

    def conditions(self, comparison_id: str, launch: int) -> Path:
        """What a launch's samples were timed under; none where nothing was measured."""
        return self.root / "conditions" / f"{comparison_id}-{launch}.json"

    def begun(self, comparison_id: str) -> Path:
        """What is kept of a modelled comparison until its parts are written."""
        return self.root / "begun" / comparison_id

    def parts(self, table: str) -> dict[str, list[Path]]:
        """All parts of a table, by comparison."""
        found: dict[str, list[Path]] = {}
        for path in sorted(self.path(table, "").parent.glob("*.parquet")):
            key = path.stem.rpartition("-")[0] if TABLES[table].is_by_launch else path.stem
            found.setdefault(key, []).append(path)
        return found

    def earlier(self) -> dict[str, Any] | None:
        """What ``run.json`` says, where there is one already.

        Raises:
            ResultsError: it is damaged, or of another version; one line that names it.
        """
        if not self.run_json.exists():
            return None
        content = _content_of(self.run_json, RunFacts)
        typed(RunFacts, f"{self.run_json}: ", content)
        return content

    def check_agreement(self, now: Mapping[str, Any]) -> None:
        """Raise unless results can be written here, and earlier ones were obtained under the same conditions.

        Figures and tables read a directory as a whole. So it holds one mode and scope, obtained under one set of
        conditions: no timed rows beside emulated ones, nor two versions of torch.

        Args:
            now: mode, scope and code of the rows to come, and keys of the environment that must be as they were.

        Raises:
            ValueError: one line naming the directory, what differs and what helps.
        """
        make_folder(self.root, "--out")
        earlier = self.earlier()
        if earlier is None:
            return
        then = {**earlier, **earlier["environment"], "code": earlier.get("hashes", {}).get("code")}
        for key, value in now.items():
            if then.get(key) != value:
                held = brief(then.get(key), quoted=False)
                raise UserError(
                    f"--out {self.root}: holds results with {key} {held}, here it is {value}; "
                    "choose another directory" + (" or --force" if key == "code" else "")
                )

    @property
    def attempts(self) -> Path:
        return self.root / "attempts"

    def statuses(self, comparison_id: str, launch: int | None = None, table: str = "samples") -> dict[str, str]:
        """The status of every case that a part has rows of, by id; empty where there is no part that can be read."""
        rows = _read(self.path(table, comparison_id, launch))
        if rows is None:
            return {}
        pairs = rows.group_by(["case_id", "status"], use_threads=False).aggregate([])
        return dict(zip(pairs["case_id"].to_pylist(), pairs["status"].to_pylist(), strict=True))

    def remove_unfinished(self, ids: Iterable[str]) -> None:
        """Remove what a killed job had begun to write of these files, by how their names begin."""
        beginnings = tuple(f".{part_id}" for part_id in ids)
        for path in (*self.root.glob(".*"), *self.root.glob("*/.*")):
            if path.name.startswith(beginnings):
                path.unlink(missing_ok=True)

    def remove(self, comparison_id: str) -> None:
        """Remove all parts of a comparison, their conditions, and what it was begun with."""
        self.begun(comparison_id).unlink(missing_ok=True)
        for path in self.conditions("", 0).parent.glob(f"{comparison_id}-*.json"):
            path.unlink()
        for table in TABLES:
            for path in self.parts(table).get(comparison_id, ()):
                path.unlink()

    def write(
        self,
        table: str,
        comparison_id: str,
        cases: Iterable[Mapping[str, Any]],
        launch: int | None = None,
        *,
        replaces: Collection[str] | None = None,
        conditions: Mapping[str, Any] | None = None,
    ) -> None:
        """Write a part; columns that rows lack are null.

        Args:
            cases: rows of each case, asked for one after another: a sequence for each column, or one value for all.
            replaces: cases whose rows these take the place of, while others' stay; None = the part is written anew.
            conditions: under which a launch was timed; None = as they are, of a part written anew none.
        """
        path, schema = self.path(table, comparison_id, launch), TABLES[table].schema
        kept = schema.empty_table()
        # Rows of other columns cannot stay.
        if replaces is not None and (before := _read(path)) is not None and before.schema.equals(schema):
            kept = before.filter(~pc.field("case_id").isin(list(replaces)))
        if launch is not None and conditions is not None:
            write_json(self.conditions(comparison_id, launch), conditions)
        elif launch is not None and not len(kept):
            self.conditions(comparison_id, launch).unlink(missing_ok=True)
        counts = [name for name, dtype in zip(schema.names, schema.types, strict=True) if dtype == COUNTS]
        how = {
            # A part is read whole: nobody asks which values are in it.
            **{"compression": "zstd", "write_page_checksum": True, "write_statistics": False},
            # Most numbers are in lists of counts: a dictionary of theirs takes twice as long as their differences.
            "use_dictionary": [name for name in schema.names if name not in counts],
            "column_encoding": {f"{name}.list.element": "DELTA_BINARY_PACKED" for name in counts},
        }
        with atomic_path(path) as temporary, pq.ParquetWriter(temporary, schema, **how) as file:
            tables = [kept]
            for rows in cases:
                tables.append(_as_table(schema, rows if launch is None else {**rows, "launch": launch}))
                if sum(map(len, tables)) >= _GROUP_ROWS:
                    file.write_table(pa.concat_tables(tables))
                    tables.clear()
            if tables:
                file.write_table(pa.concat_tables(tables))

    def write_run(self, description: Mapping[str, Any], table: str = "samples") -> None:
        """Write ``run.json``, and keep in it what an earlier one knew of finished comparisons.

        ``runs`` holds the provenance of every run whose rows are here, by run_id. A comparison that another job or
        config began and did not finish is dropped with its parts, unless that job is at it.

        Args:
            table: whose rows make a case finished.

        Raises:
            ValueError: another job has been writing ``run.json`` for a minute.
        """
        with hold(self.root, {RUN_JSON: RUN_JSON}, patience_s=60.0):
            self.remove_unfinished([RUN_JSON])
            provenance = {key: description.get(key) for key in Job.model_fields}
            earlier = self.earlier() or {}
            merged = {**description, "runs": {**earlier.get("runs", {}), description["run_id"]: provenance}}
            launch = 0 if TABLES[table].is_by_launch else None
            for comparison_id, comparison in earlier.get("comparisons", {}).items():
                if comparison_id in description["comparisons"]:
                    continue
                cases = {k: case for k, case in earlier["cases"].items() if case["comparison_id"] == comparison_id}
                done = self.statuses(comparison_id, launch, table).keys()
                if cases.keys() <= done or is_held(self.root, comparison_id):
                    merged["comparisons"] = {comparison_id: comparison, **merged["comparisons"]}
                    merged["cases"] = {**cases, **merged["cases"]}
                else:
                    self.remove(comparison_id)
            write_json(self.run_json, merged)


def _as_table(schema: pa.Schema, rows: Mapping[str, Any]) -> pa.Table:
    assert not (unknown := set(rows) - set(schema.names)), f"columns that the table does not have: {sorted(unknown)}"
    columns = {name: value for name, value in rows.items() if hasattr(value, "__len__") and not isinstance(value, str)}
    num_rows = max(map(len, columns.values()), default=1)
    arrays = [
        _as_array(columns[name], dtype) if name in columns else pa.repeat(pa.scalar(rows.get(name), dtype), num_rows)
        for name, dtype in zip(schema.names, schema.types, strict=True)
    ]
    return pa.table(arrays, schema=schema)


def _as_array(values: Sequence[Any], dtype: pa.DataType) -> pa.Array:
    """A column; of one whose rows are numpy's arrays the numbers are put together first, which takes a tenth."""
    are_lists = pa.types.is_list(dtype) and len(values) and all(isinstance(value, np.ndarray) for value in values)
    if not are_lists:
        return pa.array(values, dtype)
    ends = pa.array(np.cumsum([0, *map(len, values)]), pa.int32())
    return pa.ListArray.from_arrays(ends, pa.array(np.concatenate(values), dtype.value_type)).cast(dtype)


def _read(path: Path) -> pa.Table | None:
    """A part; None where there is none that can be read whole."""
    try:
        with pq.ParquetFile(path, page_checksum_verification=True) as part:
            return part.read()
    except (OSError, pa.ArrowException):
        return None


# ---- locks -----------------------------------------------------------------------------------------------------------


def lock_file(root: Path, name: str) -> Path:
    return root / f".lock-{name}"


@contextlib.contextmanager
def hold(root: Path, titles: Mapping[str, str], *, patience_s: float = PATIENCE_S) -> Iterator[None]:
    """Keep all other jobs from what is named, while the block lasts.

    Args:
        root: the results directory.
        titles: what to lock, and what it is called where another job has it.
        patience_s: how long to wait for another holder.

    Raises:
        UserError: one line that names who holds what; nothing is held then.
        OSError: nothing can be written there.
    """
    with contextlib.ExitStack() as held:
        for name, title in titles.items():
            file = lock_file(root, name)
            try:
                held.enter_context(FileLock(file, timeout=patience_s, poll_interval=0.1, fallback_to_soft=False))
            except Timeout:
                holder = "which is just ending"
                with contextlib.suppress(OSError):
                    holder = brief(file.read_text(errors="replace"), 200, quoted=False)
                raise UserError(
                    f"--out {root}: {title}: another job is writing this, {holder}; "
                    "wait for it, stop it, or choose another directory"
                ) from None
            # While it is held: who has opened it meanwhile finds it gone, and opens it anew.
            held.callback(file.unlink, missing_ok=True)
            begun = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
            file.write_text(f"process {os.getpid()} on {socket.gethostname()}, begun {begun}")
        yield


def is_held(root: Path, name: str) -> bool:
    """Whether another job has this at the moment."""
    file = lock_file(root, name)
    try:
        if file.exists():
            FileLock(file, fallback_to_soft=False).acquire(blocking=False).lock.release()
    except Timeout:
        return True
    return False


class ValidationDirectory:
    """The files of one ``validate``: two results directories, and which comparison is which (``facts.Pairs``)."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.real, self.emulated = root / "real", root / "emulated"
        self.pairs, self.text, self.table = (root / f"validation.{end}" for end in ("json", "txt", "csv"))

    def write_pairs(self, pairs: Sequence[tuple[str, str]], links: Mapping[str, Any], margin: float = 0.03) -> None:
        """Say which comparisons, (real, emulated), are a pair; ``links`` and the rest as in ``facts.Pairs``."""
        content = Pairs(pairs=list(pairs), **links, margin=margin)
        write_json(self.pairs, content.model_dump(mode="json"))
