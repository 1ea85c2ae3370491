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
from moe_ep_bench.files import read_json
from moe_ep_bench.results import conditions_of
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
    if not path.is_file():
        raise ResultsError(f"{path}: missing; a results directory is one that `moe-ep-bench` has written")
    content = read_document(path)
    version = content.get("schema_version") if isinstance(content, dict) else None
    if not isinstance(version, int):
        raise ResultsError(f"{path}: schema_version: expected a whole number, got {brief(version)}")
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


def read_part(table: str, path: Path, identity: Mapping[str, object], columns: Sequence[str] | None = None) -> Part:
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
        with pq.ParquetFile(path, page_checksum_verification=True) as part:
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
            raise ResultsError(f"{path}: foreign, {column}: expected {brief(expected)}, got {brief(others[0])}")
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
    """What rows of a table must be.

    Attributes:
        columns: that it is of, those that the table has; it is asked of each.
        broken: of each row whether it breaks the rule, given the rows, the column's values, and the sizes.
        words: what was expected, fields of ``Sizes`` in braces.
    """

    columns: str
    broken: Callable[[pd.DataFrame, pd.Series, Sizes], ArrayLike]
    words: str


def _length(size: str) -> Callable[[pd.DataFrame, pd.Series, Sizes], ArrayLike]:
    return lambda rows, lists, sizes: lists.map(len) != getattr(sizes, size)


def _repeats(*columns: str) -> Callable[[pd.DataFrame, pd.Series, Sizes], ArrayLike]:
    return lambda rows, values, sizes: rows.duplicated([name for name in ("case_id", *columns) if name in rows])


def _holds_no_counts(rows: pd.DataFrame, lists: pd.Series, sizes: Sizes) -> ArrayLike:
    counts_NE = np.stack(lists.to_list())
    return ~((counts_NE >= 0) & (counts_NE < MOST_COUNT)).all(axis=1)


def _lacks_ranks(rows: pd.DataFrame, ranks: pd.Series, sizes: Sizes) -> ArrayLike:
    """Whether an iteration lacks the total of a rank: the slowest one can be named only when all are there."""
    is_total = rows["phase"].eq(TOTAL)
    iterations = [rows[name] for name in ("case_id", "batch", "iteration", "kind")]
    return is_total.groupby(iterations, observed=True).transform("sum") != sizes.world_size


def _lacks_units(rows: pd.DataFrame, ranks: pd.Series, sizes: Sizes) -> ArrayLike:
    """Whether a case lacks a rank, batch or layer that others of its rows have."""
    units = rows[["rank", "batch", "layer"]].fillna(-1).groupby(rows["case_id"])
    num_ranks, batches, layers = (units[name].transform("nunique") for name in ("rank", "batch", "layer"))
    is_short = sizes.num_batches is not None and batches != sizes.num_batches
    return (
        is_short | (num_ranks != sizes.world_size) | (units["rank"].transform("size") != num_ranks * batches * layers)
    )


def _differ(rows: pd.DataFrame, loads: pd.Series, sizes: Sizes) -> ArrayLike:
    """Whether a curve has no finite share kept for each load; native's part alone has curves."""
    curves = zip(loads, rows["curve_kept"], strict=True)
    empty = np.empty(0)
    lists = [(empty if load is None else load, empty if kept is None else kept) for load, kept in curves]
    return [len(load) != len(kept) or not np.isfinite([*load, *kept]).all() for load, kept in lists]


_MEASURED = " ".join(name for name, metric in METRICS.items() if not pa.types.is_list(metric.dtype))
_NEEDED = Rule("", lambda rows, values, sizes: values.isna(), "expected a value in every row")
_ROUTED = (
    _NEEDED._replace(columns="num_tokens num_topk_pairs num_dropped_pairs load_E load_R"),
    Rule("load_E", _length("num_experts"), "expected {num_experts} entries in every row"),
    Rule("load_R", _length("num_ranks"), "expected {num_ranks} entries in every row"),
    Rule("load_E load_R", _holds_no_counts, "expected counts"),
    Rule(
        f"{_MEASURED} rank_peak_load",  # null is fine: a rank without tokens has no share of them
        lambda rows, values, sizes: ~(values.between(0, MOST_COUNT, inclusive="left") | values.isna()),
        "expected finite numbers from 0",
    ),
)
_ITEM = Rule("case_id", _repeats("phase", "task", "item", "metric", "filter", "batch", "layer"), "expected items once")
RULES = {
    "samples": (
        _NEEDED._replace(columns="rank batch iteration time_us"),
        Rule("kind", lambda rows, kinds, sizes: ~kinds.isin(["plain", "breakdown"]), "expected plain or breakdown"),
        Rule("phase", lambda rows, phases, sizes: ~phases.isin(sizes.phases), "expected one of {phases}"),
        Rule("time_us host_us", lambda rows, us, sizes: us.abs() >= MOST_US, f"expected below {MOST_US:g} us"),
        Rule("time_us", lambda rows, us, sizes: rows["phase"].eq(TOTAL) & (us < LEAST_US), "expected totals above 0"),
        Rule("phase", _repeats("rank", "batch", "iteration", "kind", "layer", "phase"), "expected each phase once"),
        Rule("rank", _lacks_ranks, "expected totals of {world_size} ranks in every iteration"),
    ),
    "routing": (
        _NEEDED._replace(columns="rank batch"),
        *_ROUTED,
        Rule("rank", _repeats("rank", "batch", "layer"), "expected one row for each rank, batch and layer"),
        Rule("rank", _lacks_units, "expected all of {world_size} ranks in every batch and layer"),
    ),
    "frontier": (
        Rule(
            "kept_by_load kept_by_experts",
            lambda rows, shares, sizes: ~shares.between(0, 1 + 1e-6),
            "expected shares",
        ),
        Rule("curve_load", _differ, "expected curves of as many finite loads as shares"),
        _NEEDED._replace(columns="batch"),
        Rule("batch", _repeats("batch", "layer"), "expected one row for each batch and layer"),
    ),
    "quality": (Rule("value stderr", lambda rows, values, sizes: np.isinf(values), "expected finite numbers"), _ITEM),
    "quality_routing": (_NEEDED._replace(columns="layer"), *_ROUTED, _ITEM),
}


def check(table: str, path: Path, rows: pd.DataFrame, sizes: Sizes) -> None:
    """Raise ResultsError at the first rule of a table that a row breaks: one line that names the file and the value."""
    for rule in RULES[table] if len(rows) else ():
        for column in (name for name in rule.columns.split() if name in rows):
            for place in np.flatnonzero(rule.broken(rows, rows[column], sizes))[:1]:
                words = rule.words.format(**sizes._asdict() | {"phases": ", ".join(sizes.phases)})
                got, case = brief(np.asarray(rows[column].iat[place]).tolist()), rows["case_id"].iat[place]
                raise ResultsError(f"{path}: {column}: {words}; got {got} in a row of {case}")
