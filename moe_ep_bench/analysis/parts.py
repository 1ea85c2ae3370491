"""Read and check the Parquet parts of a run: samples of time, and what was routed.

A part is trusted only after it has been held against the schema and against what run.json says of its case. The checks
work on whole columns, of which only those are read that someone needs: a run of 128 ranks holds millions of rows.

Shapes: N = rows, B = batches, R = ranks, E = experts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from moe_ep_bench.schema import LAYER_PHASES, SCHEMA_VERSION, STATUSES, TOTAL, UNACCOUNTED

_KINDS = ("plain", "breakdown")
ITERATION = ["launch", "batch", "iteration", "kind"]
SAMPLE = ["rank", *ITERATION, "layer", "phase", "time_us", "host_us"]
# What a measured routing row must hold: the columns that fidelity is computed from. The two ratios of masses are
# exempt: a rank without valid tokens has none.
_ROUTING_NEEDS = ["rank", "batch", "num_tokens", "load_E", "load_R", "num_topk_pairs", "num_dropped_pairs"]


class ResultsError(ValueError):
    """A results directory, or a file of one, that cannot be read; the message is one line for the user."""


def check_version(path: Path, version: object) -> None:
    """Raise ResultsError unless a file says that it is of this program's schema."""
    if not isinstance(version, int):
        raise ResultsError(f"{path}: schema_version: expected a whole number, got {version!r}")
    if version != SCHEMA_VERSION:
        hint = "; it is newer than this program, which needs updating" if version > SCHEMA_VERSION else ""
        raise ResultsError(f"{path}: schema_version: expected {SCHEMA_VERSION}, got {version}{hint}")


def read_table(path: Path, schema: pa.Schema) -> pa.Table:
    """Read a whole part that must have exactly these columns.

    Raises:
        ResultsError: it is damaged or foreign.
    """
    try:
        table = pq.read_table(path, partitioning=None)
    except (OSError, pa.ArrowException) as error:
        raise ResultsError(f"{path}: damaged, not Parquet: {one_line(error)}") from None
    if not table.schema.equals(schema):
        raise ResultsError(f"{path}: foreign, expected the columns {', '.join(schema.names)}")
    return table


def read_part(
    path: Path, schema: pa.Schema, identity: Mapping[str, str], columns: Sequence[str] | None = None
) -> pa.Table:
    """Read a part, and check that it is whole and of the case that its name says.

    Args:
        identity: columns and the value that all their rows must have.
        columns: those to return; None = all.

    Raises:
        ResultsError: it is damaged or foreign.
    """
    try:
        with pq.ParquetFile(path) as file:
            found = file.schema_arrow
            wanted = None
            if columns is not None:
                needed = dict.fromkeys([*columns, *identity, "status", *(["launch"] * ("launch" in schema.names))])
                wanted = [name for name in needed if name in found.names]
            table = file.read(columns=wanted)
    except (OSError, pa.ArrowException) as error:
        raise ResultsError(f"{path}: damaged, not Parquet: {one_line(error)}") from error
    for field in schema:
        if field.name not in found.names or found.field(field.name).type != field.type:
            raise ResultsError(f"{path}: foreign, expected a column {field.name} of type {field.type}")
    if table.num_rows == 0:
        raise ResultsError(f"{path}: damaged, it has no rows")
    for column, expected in identity.items():
        others = [value for value in pc.unique(table[column]).to_pylist() if value != expected]
        if others:
            raise ResultsError(f"{path}: foreign, {column}: expected {expected!r}, got {others[0]!r}")
    _check_statuses(path, table)
    return table.select(list(columns or schema.names))


def _check_statuses(path: Path, table: pa.Table) -> None:
    """A launch went one way, in all its rows."""
    by = ["launch", "status"] if "launch" in table.schema.names else ["status"]
    pairs = table.select(by).group_by(by, use_threads=False).aggregate([]).to_pylist()
    statuses: dict[int | None, list[str]] = {}
    for pair in pairs:
        statuses.setdefault(pair.get("launch"), []).append(pair["status"])
    for found in statuses.values():
        if len(found) != 1 or found[0] not in STATUSES:
            raise ResultsError(f"{path}: status: expected one of {', '.join(STATUSES)} in all rows, got {found}")


def launches_of(table: pa.Table) -> pd.DataFrame:
    """The first row of each launch: run_id, status and reason, indexed by launch in their order."""
    rows = table.select(["launch", "run_id", "status", "reason"])
    first = np.unique(rows["launch"].to_numpy(), return_index=True)[1]
    return rows.take(pa.array(first)).to_pandas().set_index("launch")


def timings_of(path: Path, table: pa.Table, world_size: int, phases: Sequence[str] = LAYER_PHASES) -> pd.DataFrame:
    """The samples of a measured case: ``SAMPLE``; ``over_layers`` sums them.

    Args:
        phases: that may occur, beside the total and what is unaccounted for.

    Raises:
        ResultsError: a row lacks what it must have or stands there twice, or an iteration lacks a rank.
    """
    for column, allowed in (("kind", _KINDS), ("phase", (*phases, TOTAL, UNACCOUNTED))):
        for value in pc.unique(table[column]).to_pylist():
            if value not in allowed:
                raise ResultsError(f"{path}: {column}: expected one of {', '.join(allowed)}; got {value!r}")
    if any(table[name].null_count for name in ("rank", *ITERATION)) or _has_nan(table["time_us"]):
        raise ResultsError(f"{path}: damaged, a measured row lacks its rank, batch, iteration or time_us")
    iteration_N = _numbered([_codes(table[name]) for name in ITERATION])
    samples = [iteration_N, *(_codes(table[name]) for name in ("rank", "layer", "phase"))]
    if len(np.unique(_numbered(samples))) != table.num_rows:
        raise ResultsError(f"{path}: damaged, one rank, iteration, layer and phase stands there twice")
    is_total_N = pc.equal(table["phase"], TOTAL).to_numpy()
    if not (table["time_us"].to_numpy()[is_total_N] > 0).all():
        raise ResultsError(f"{path}: damaged, a total is not above 0")
    # The slowest rank can be named only when all ranks are there.
    num_totals = np.bincount(iteration_N[is_total_N], minlength=iteration_N.max() + 1)
    if (num_totals != world_size).any():
        number = int(np.flatnonzero(num_totals != world_size)[0])
        row = table.select(ITERATION).slice(int(np.flatnonzero(iteration_N == number)[0]), 1).to_pylist()[0]
        raise ResultsError(
            f"{path}: launch {row['launch']}, batch {row['batch']}, {row['kind']} iteration {row['iteration']}: "
            f"expected totals of {world_size} ranks, got {num_totals[number]}"
        )
    return table.select(SAMPLE).to_pandas()


def over_layers(samples: pd.DataFrame) -> pd.DataFrame:
    """Samples with each phase once, the sum of it over all layers that have it; ``layer`` goes."""
    if samples["layer"].isna().all():
        return samples.drop(columns="layer")
    by = ["rank", *ITERATION, "phase"]
    return samples.groupby(by, sort=False).agg({"time_us": "sum", "host_us": "first"}).reset_index()


def _has_nan(column: pa.ChunkedArray) -> bool:
    return column.null_count > 0 or bool(pc.any(pc.is_nan(column)).as_py())


def _codes(column: pa.ChunkedArray) -> np.ndarray:
    """Numbers from 0 for a column's values, in the order of the values where these are numbers: [N]."""
    column = pc.fill_null(column, -1) if column.null_count else column
    if pa.types.is_string(column.type):
        return column.combine_chunks().dictionary_encode().indices.to_numpy()
    return np.unique(column.to_numpy(), return_inverse=True)[1]


def _numbered(columns_N: Sequence[np.ndarray]) -> np.ndarray:
    """Numbers from 0 for the different combinations of several columns' codes: [N]."""
    combined_N = np.zeros(len(columns_N[0]), np.int64)
    for codes_N in columns_N:
        combined_N = combined_N * (int(codes_N.max()) + 1) + codes_N
    return np.unique(combined_N, return_inverse=True)[1]


def check_routing(path: Path, rows: pd.DataFrame, *, num_experts: int, num_ranks: int, world_size: int) -> None:
    """Raise ResultsError unless each rank has a row in every batch, with a load for each expert and expert rank."""
    for column in _ROUTING_NEEDS:
        if rows[column].isna().any():
            raise ResultsError(f"{path}: damaged, a measured row lacks its {column}")
    for column, expected in (("load_E", num_experts), ("load_R", num_ranks)):
        lengths = rows[column].map(len)
        if (lengths != expected).any():
            raise ResultsError(
                f"{path}: {column}: expected {expected} entries, got {lengths[lengths != expected].iloc[0]}"
            )
    counts = rows.groupby("batch")["rank"].nunique()
    if (counts != world_size).any() or rows.duplicated(["rank", "batch"]).any():
        raise ResultsError(f"{path}: expected one row for each of {world_size} ranks in every batch")


def source_loads(routing: pd.DataFrame, column: str) -> tuple[pd.Index, np.ndarray]:
    """Loads of all batches at once, source ranks in their order.

    Args:
        routing: of a measured case, a row per rank and batch.
        column: load_E or load_R.

    Returns:
        The batches, ascending, and the loads [B, source ranks, E or R].
    """
    ordered = routing.sort_values(["batch", "rank"])
    batches = pd.Index(np.unique(ordered["batch"]), name="batch")
    lists = ordered[column].to_list()
    return batches, np.concatenate(lists).reshape(len(batches), -1, len(lists[0]))


def one_line(text: object) -> str:
    return " ".join(str(text).split())
