"""What a run leaves on disk: Parquet parts that appear whole or not at all, and ``run.json``.

``<out>/run.json``                   resolved config, environment, hashes, what each case is
``<out>/cases/<case_id>.parquet``    one row per rank x iteration x phase (``CASE_SCHEMA``)
``<out>/routing/<case_id>.parquet``  one row per rank x batch (``ROUTING_SCHEMA``)
``<out>/attempts/``                  what was running when a job was lost (``attempts``)

A *case* is one policy on one workload; its id is a hash of everything that defines it. Cases
with one ``comparison_id`` ran interleaved on the same batches and may be paired. A case whose
part is there is finished and is not run again. Samples are never thinned or averaged here:
analysis is a separate program that reads these files.

A case that could not be measured has a part with a single row: ``status`` other than ``ok``,
``reason``, and nulls where measurements would stand.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

SCHEMA_VERSION = 1

MODES = ("run", "emulated", "route")
STATUSES = ("ok", "failed", "oom", "timeout", "skipped")

# The phases of a layer in the order in which it passes them (DESIGN: timing protocol). The wait_*
# phases are time spent at a meeting point before the slowest rank reaches it.
PHASES = (
    "shared",
    "gate",
    "wait_policy",
    "policy",
    "permute",
    "wait_metadata",
    "metadata",
    "wait_dispatch",
    "dispatch",
    "experts",
    "wait_combine",
    "combine",
)
# Beside the phases: the whole layer, and what of a breakdown iteration no phase covers.
TOTAL, UNACCOUNTED = "total", "unaccounted"

_IDENTITY = [
    ("run_id", pa.string()),
    ("case_id", pa.string()),
    ("comparison_id", pa.string()),
    ("mode", pa.string()),
    ("model", pa.string()),
    ("policy", pa.string()),
    ("policy_params", pa.string()),  # JSON
    ("num_ranks", pa.int32()),  # expert-parallel size
    ("status", pa.string()),
    ("reason", pa.string()),  # null when ok
    ("rank", pa.int32()),  # global rank
    ("batch", pa.int32()),
]

CASE_SCHEMA = pa.schema(
    [
        *_IDENTITY,
        ("iteration", pa.int32()),
        ("kind", pa.string()),  # plain (two clock readings) or breakdown (every phase)
        ("phase", pa.string()),  # PHASES, total, unaccounted
        ("time_us", pa.float64()),
        ("host_us", pa.float64()),  # total rows: host time to issue the iteration
        ("thread_cpu_us", pa.float64()),  # total rows: CPU time of the issuing thread
    ]
)

ROUTING_SCHEMA = pa.schema(
    [
        *_IDENTITY,
        ("num_tokens", pa.int64()),  # valid tokens of this rank
        ("load_E", pa.list_(pa.int64())),  # pairs per expert, from this source rank
        ("load_R", pa.list_(pa.int64())),  # pairs per expert rank, from this source rank
        ("num_pairs", pa.int64()),
        ("num_topk_pairs", pa.int64()),
        ("num_dropped_pairs", pa.int64()),  # top-k pairs that are not computed
        ("dropped_fraction", pa.float64()),  # of top-k pairs
        ("retained_mass_topk", pa.float64()),  # selected score mass over the model's top-k mass
        ("retained_mass_all", pa.float64()),  # selected score mass over all score mass
        ("peak_load", pa.float64()),  # fullest expert over mean, this source rank
        ("max_violation", pa.float64()),  # peak_load - 1
        ("load_cv", pa.float64()),  # coefficient of variation over experts
        ("excess_load", pa.float64()),  # arXiv 2503.05066, Eq. 11
        ("tokens_without_expert", pa.int64()),
        ("experts_per_token", pa.float64()),
        ("activated_experts", pa.int64()),
        ("activated_experts_fullest_rank", pa.int64()),
        ("crossing_pairs", pa.int64()),  # pairs whose expert lives on another rank
        ("crossing_copies", pa.int64()),  # token copies to other ranks, one per (token, rank)
        ("topk_share", pa.float64()),
        ("entropy", pa.float64()),  # of scores, normalised to 0..1
        ("regime_single_head", pa.float64()),  # shares of tokens
        ("regime_smooth", pa.float64()),
        ("regime_plateau", pa.float64()),
        ("reference_error", pa.float64()),  # worst token: |layer - dense reference| / |reference|
        ("output_error", pa.float64()),  # |layer - native layer| / |native layer|, whole batch
    ]
)


def stable_hash(value: Any) -> str:
    """Hash a JSON-ready value: 16 hex digits, equal for equal content on any machine."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@contextlib.contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """Yield a temporary path that becomes ``path`` when the block ends well, and vanishes otherwise."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        with open(temporary, "rb") as written:
            os.fsync(written.fileno())
        temporary.chmod(0o644)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def write_json(path: Path, value: Any) -> None:
    with atomic_path(path) as temporary:
        temporary.write_text(json.dumps(value, indent=2, sort_keys=True, allow_nan=False) + "\n")


class RunDirectory:
    """The files of one run. Every write is atomic; reading back tells what is already done."""

    def __init__(self, root: Path) -> None:
        self.root = root

    @property
    def run_json(self) -> Path:
        return self.root / "run.json"

    def case_path(self, case_id: str) -> Path:
        return self.root / "cases" / f"{case_id}.parquet"

    def routing_path(self, case_id: str) -> Path:
        return self.root / "routing" / f"{case_id}.parquet"

    @property
    def attempts(self) -> Path:
        return self.root / "attempts"

    def status(self, case_id: str) -> str | None:
        """The status of a case's part; None where there is no part that can be read."""
        try:
            return pq.read_table(self.case_path(case_id), columns=["status"]).column("status")[0].as_py()
        except (OSError, pa.ArrowException, IndexError):
            return None

    def is_finished(self, case_id: str) -> bool:
        """Whether the case has a result that stands. One that was skipped may fit another time."""
        return self.status(case_id) not in (None, "skipped")

    def remove_case(self, case_id: str) -> None:
        for path in (self.case_path(case_id), self.routing_path(case_id)):
            path.unlink(missing_ok=True)

    def write_case(self, case_id: str, rows: Mapping[str, Sequence[Any]]) -> None:
        _write_table(self.case_path(case_id), rows, CASE_SCHEMA)

    def write_routing(self, case_id: str, rows: Mapping[str, Sequence[Any]]) -> None:
        _write_table(self.routing_path(case_id), rows, ROUTING_SCHEMA)

    def write_run(self, description: Mapping[str, Any]) -> None:
        """Write ``run.json``, and keep in it what an earlier one knew of finished comparisons.

        ``runs`` holds the provenance of every run whose rows are here, by run_id. A comparison that
        was begun under another config and never finished is dropped with its parts.
        """
        provenance = {key: description.get(key) for key in ("created", "config", "environment", "hashes")}
        merged = {**description, "runs": {description["run_id"]: provenance}}
        earlier = json.loads(self.run_json.read_text()) if self.run_json.exists() else {}
        merged["runs"] = {**earlier.get("runs", {}), **merged["runs"]}
        for comparison_id, comparison in earlier.get("comparisons", {}).items():
            if comparison_id in description["comparisons"]:
                continue
            cases = {k: case for k, case in earlier["cases"].items() if case["comparison_id"] == comparison_id}
            if all(self.status(case_id) for case_id in cases):
                merged["comparisons"] = {comparison_id: comparison, **merged["comparisons"]}
                merged["cases"] = {**cases, **merged["cases"]}
            else:
                for case_id in cases:
                    self.remove_case(case_id)
        write_json(self.run_json, merged)


def _write_table(path: Path, rows: Mapping[str, Sequence[Any]], schema: pa.Schema) -> None:
    unknown = set(rows) - set(schema.names)
    assert not unknown, f"columns that the schema does not have: {sorted(unknown)}"
    num_rows = len(next(iter(rows.values())))
    columns = [
        pa.array(rows[name] if name in rows else [None] * num_rows, field.type)
        for name, field in zip(schema.names, schema, strict=True)
    ]
    with atomic_path(path) as temporary:
        pq.write_table(pa.table(columns, schema=schema), temporary, compression="zstd")
