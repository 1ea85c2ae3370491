"""Read the files of a results directory: JSON against typed facts, Parquet parts against ``RULES``, one table of them.

A part is trusted only after it has been held against the schema, its rules, and what run.json says of its comparison.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import ArrayLike
from pydantic import BaseModel, ValidationError

from moe_ep_bench.errors import UserError, brief, printable, problem_words
from moe_ep_bench.files import inside, read_json
from moe_ep_bench.results import RunDirectory, check_size, conditions_of
from moe_ep_bench.schema import METRICS, SCHEMA_VERSION, TABLES, TOTAL

ITERATION = ["launch", "batch", "iteration"]

LEAST_US, MOST_US = 1e-6, 1e15  # no clock tells less, no run lasts so long
MOST_COUNT = 2**53  # beyond which a double does not count

_Type = TypeVar("_Type", bound=BaseModel)
_Value = TypeVar("_Value")


class ResultsError(UserError):
    """A results directory, or a file of one, that cannot be read; one printable line, whatever the file holds."""

    def __init__(self, text: str) -> None:
        super().__init__(printable(text))


class Errors:
    """Errors of what is read part by part: raised at once, or collected as lines where the rest is wanted."""

    def __init__(self, lines: list[str] | None) -> None:
        self.lines = lines

    def add(self, error: UserError) -> None:
        if self.lines is None:
            raise error
        self.lines.append(str(error))

    def read(self, reader: Callable[..., _Value], *arguments: Any) -> _Value | None:
        """What the reader returns; None where it raised, and the error was collected."""
        try:
            return reader(*arguments)
        except UserError as error:
            self.add(error)
            return None


# ---- JSON ------------------------------------------------------------------------------------------------------------


def typed(model: type[_Type], path: Path, key: str, content: Any) -> _Type:
    """What ``path`` says under ``key``; ResultsError names the first key that says it otherwise."""
    try:
        return model.model_validate(content)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join([*([key] if key else []), *map(str, first["loc"])]) or "damaged"
        raise ResultsError(f"{path}: {brief(where, 200, quoted=False)}: {problem_words(first)}") from None


def read_document(path: Path) -> Any:
    """A JSON document of a results directory; ResultsError where it is missing or damaged."""
    try:
        return read_json(path)
    except FileNotFoundError:
        raise ResultsError(f"{path}: missing") from None
    except (OSError, ValueError) as error:
        problem = str(error).removeprefix(f"{path}: ")
        raise ResultsError(f"{path}: damaged, not JSON: {printable(problem)}") from None


def read_run_json(path: Path) -> dict[str, Any]:
    """Read run.json; ResultsError where it is missing, damaged or of another version."""
    if not path.parent.is_dir():
        what = "is a file; expected a directory that `moe-ep-bench` has written"
        raise ResultsError(f"{path.parent}: {what if path.parent.exists() else 'no such directory'}")
    if not path.is_file():
        raise ResultsError(f"{path}: missing; a results directory is one that `moe-ep-bench` has written")
    content = read_document(path)
    version = content.get("schema_version") if isinstance(content, dict) else None
    if not isinstance(version, int):
        raise ResultsError(f"{path}: schema_version: expected a whole number, got {version!r}")
    if version != SCHEMA_VERSION:
        hint = "; it is newer than this program, which needs updating"
        hint = hint if version > SCHEMA_VERSION else "; an earlier version wrote it: measure again, elsewhere"
        raise ResultsError(f"{path}: schema_version: expected {SCHEMA_VERSION}, got {version}{hint}")
    return content


# ---- Parquet ---------------------------------------------------------------------------------------------------------


class Part(NamedTuple):
    """Rows of a comparison's part; of samples also under which conditions they were timed, as JSON."""

    path: Path
    rows: pd.DataFrame
    conditions: bytes | None


def read_part(
    files: RunDirectory, table: str, path: Path, identity: Mapping[str, object], columns: Sequence[str] | None = None
) -> Part:
    """Read columns of a part beside those of its identity (None = all); words of samples are categories.

    Args:
        identity: columns and the value that all their rows must have; of samples also the launch of their file's name.

    Raises:
        ResultsError: it is damaged, foreign or empty.
    """
    schema = TABLES[table].schema
    if table == "samples":
        launch = path.stem.rpartition("-")[2]
        identity = {**identity, "launch": int(launch) if launch.isdecimal() else None}
    wanted = schema.names if columns is None else [*dict.fromkeys(["case_id", *identity, *columns])]
    try:
        # Quicker than pq.read_table by half: a part is one small file.
        with pq.ParquetFile(inside(files.root, path)) as part:
            check_size(path, part.metadata)
            fields = part.schema_arrow
            for field in schema:
                if fields.names.count(field.name) != 1 or fields.field(field.name).type != field.type:
                    raise ResultsError(f"{path}: foreign, expected a column {field.name} of type {field.type}")
            found = part.read(wanted, use_threads=False)
    except (OSError, pa.ArrowException) as error:
        raise ResultsError(f"{path}: damaged, not Parquet: {printable(str(error))}") from error
    if found.num_rows == 0:
        raise ResultsError(f"{path}: damaged, it has no rows")
    if found["case_id"].null_count:
        raise ResultsError(f"{path}: damaged, a row lacks its case_id")
    for column, expected in identity.items():
        others = [value for value in found[column].unique().to_pylist() if value != expected]
        if others:
            raise ResultsError(f"{path}: foreign, {column}: expected {expected!r}, got {others[0]!r}")
    # Of millions of samples each word is one object.
    return Part(path, found.to_pandas(strings_to_categorical=table == "samples"), conditions_of(found))


class Sizes(NamedTuple):
    """What a comparison's rows are held against."""

    num_experts: int
    num_ranks: int = 0
    world_size: int = 0
    num_batches: int | None = None  # that a routed layer has; of what is timed it is open
    phases: Sequence[str] = ()


class Rule(NamedTuple):
    """What rows of some tables must be.

    Attributes:
        column: that the line of an error names; a rule holds where a table has it.
        broken: of each row whether it breaks the rule.
        words: what was expected, fields of ``Sizes`` in braces.
    """

    tables: str
    column: str
    broken: Callable[[pd.DataFrame, Sizes], ArrayLike]
    words: str


def _lacks(tables: str, *columns: str) -> list[Rule]:
    return [
        Rule(tables, name, lambda rows, _, name=name: rows[name].isna(), "expected a value in every row")
        for name in columns
    ]


def _is_strange(column: str, least: float) -> Callable[[pd.DataFrame, Sizes], ArrayLike]:
    """Whether numbers are not finite ones from ``least``; null is fine, a rank without tokens has no share of them."""
    return lambda rows, _: ~(rows[column].between(least, MOST_COUNT, inclusive="left") | rows[column].isna())


def _loads(column: str, size: str) -> list[Rule]:
    """Lists of so many counts."""

    def is_no_count(rows: pd.DataFrame, _: Sizes) -> ArrayLike:
        counts_NE = np.stack(rows[column].to_list())
        return ~((counts_NE >= 0) & (counts_NE < MOST_COUNT)).all(axis=1)

    def has_others(rows: pd.DataFrame, sizes: Sizes) -> ArrayLike:
        return rows[column].map(len) != getattr(sizes, size)

    tables = "routing quality_routing"
    return [
        *_lacks(tables, column),
        Rule(tables, column, has_others, f"expected {{{size}}} entries in every row"),
        Rule(tables, column, is_no_count, "expected counts"),
    ]


def _repeats(*columns: str) -> Callable[[pd.DataFrame, Sizes], ArrayLike]:
    return lambda rows, _: rows.duplicated([name for name in ("case_id", *columns) if name in rows])


def _lacks_ranks(rows: pd.DataFrame, sizes: Sizes) -> ArrayLike:
    """Whether an iteration lacks the total of a rank: the slowest one can be named only when all are there."""
    is_total = rows["phase"].eq(TOTAL)
    iterations = [rows[name] for name in ("case_id", "batch", "iteration", "kind")]
    return is_total.groupby(iterations, observed=True).transform("sum") != sizes.world_size


def _lacks_units(rows: pd.DataFrame, sizes: Sizes) -> ArrayLike:
    """Whether a case lacks a rank, batch or layer that others of its rows have."""
    units = rows[["rank", "batch", "layer"]].fillna(-1).groupby(rows["case_id"])
    ranks, batches, layers = (units[name].transform("nunique") for name in ("rank", "batch", "layer"))
    is_short = sizes.num_batches is not None and batches != sizes.num_batches
    return is_short | (ranks != sizes.world_size) | (units["rank"].transform("size") != ranks * batches * layers)


def _curve_is_broken(rows: pd.DataFrame, _: Sizes) -> ArrayLike:
    """Whether a curve is not as many finite loads as shares; native's part alone has one."""

    def is_broken(load: Any, kept: Any) -> bool:
        if load is None or kept is None:
            return load is not kept
        return len(load) != len(kept) or not np.isfinite([load, kept]).all()

    return [is_broken(*curve) for curve in zip(rows["curve_load"], rows["curve_kept"], strict=True)]


_ROUTED, _UNIT = "routing quality_routing", ("rank", "batch", "layer")
_NUMBERS = [*(name for name, metric in METRICS.items() if not pa.types.is_list(metric.dtype)), "rank_peak_load"]
RULES = (
    Rule("samples", "kind", lambda rows, _: ~rows["kind"].isin(["plain", "breakdown"]), "expected plain or breakdown"),
    Rule("samples", "phase", lambda rows, sizes: ~rows["phase"].isin(sizes.phases), "expected one of {phases}"),
    *_lacks("samples", "rank", "batch", "iteration", "time_us"),
    *(
        Rule("samples", name, lambda rows, _, name=name: rows[name].abs() >= MOST_US, f"expected below {MOST_US:g} us")
        for name in ("time_us", "host_us")
    ),
    Rule(
        "samples",
        "time_us",
        lambda rows, _: rows["phase"].eq(TOTAL) & (rows["time_us"] < LEAST_US),
        "expected totals above 0",
    ),
    Rule(
        "samples",
        "phase",
        _repeats("rank", "batch", "iteration", "kind", "layer", "phase"),
        "expected each phase once in an iteration, got it twice",
    ),
    Rule("samples", "rank", _lacks_ranks, "expected totals of {world_size} ranks in every iteration"),
    *_lacks("routing", "rank", "batch"),
    *_lacks("quality_routing", "layer"),
    *_lacks(_ROUTED, "num_tokens", "num_topk_pairs", "num_dropped_pairs"),
    *_loads("load_E", "num_experts"),
    *_loads("load_R", "num_ranks"),
    *(Rule(_ROUTED, name, _is_strange(name, 0), "expected finite numbers from 0") for name in _NUMBERS),
    Rule("routing", "rank", _repeats(*_UNIT), "expected one row for each rank, batch and layer, got several"),
    Rule("routing", "rank", _lacks_units, "expected all of {world_size} ranks in every batch and layer"),
    *(
        Rule("frontier", name, lambda rows, _, name=name: ~rows[name].between(0, 1 + 1e-6), "expected shares")
        for name in ("kept_by_load", "kept_by_experts")
    ),
    Rule("frontier", "curve_load", _curve_is_broken, "expected curves of as many finite loads as shares"),
    *(
        Rule("quality", name, lambda rows, _, name=name: np.isinf(rows[name]), "expected finite numbers")
        for name in ("value", "stderr")
    ),
    Rule(
        "quality quality_routing",
        "case_id",
        _repeats("phase", "task", "item", "metric", "filter", "batch", "layer"),
        "expected one row for each item or layer, got several",
    ),
)


def check(table: str, path: Path, rows: pd.DataFrame, sizes: Sizes) -> None:
    """Raise ResultsError at the first rule of a table that a row breaks: one line that names the file and the value."""
    for rule in RULES if len(rows) else ():
        if table not in rule.tables.split() or rule.column not in rows:
            continue
        for place in np.flatnonzero(rule.broken(rows, sizes))[:1]:
            words = rule.words.format(**sizes._asdict() | {"phases": ", ".join(sizes.phases)})
            got = brief(np.asarray(rows[rule.column].iat[place]).tolist())
            raise ResultsError(f"{path}: {rule.column}: {words}; got {got} in a row of {rows['case_id'].iat[place]}")
