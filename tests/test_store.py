"""What is missing, damaged or of another run is one line that names it, or is left out and named."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from results_builder import FakeComparison, standard_cases, write_run

from moe_ep_bench.analysis.cases import cases, load
from moe_ep_bench.analysis.reading import ResultsError
from moe_ep_bench.results import RunDirectory

OF_CASE = pc.field("case_id") == "c0-0"
FEW = {"noise": 0.0, "num_batches": 2, "num_iterations": 1}  # where no interval is looked at
SAMPLES, ROUTING, FRONTIER = "cases/c0-0.parquet", "routing/c0.parquet", "frontier/c0.parquet"


def in_json(change: Callable[[dict], object]) -> Callable[[Path], None]:
    """Change run.json."""

    def damage(directory: Path) -> None:
        content = json.loads((directory / "run.json").read_text())
        change(content)
        (directory / "run.json").write_text(json.dumps(content))

    return damage


def in_part(name: str, **columns: list) -> Callable[[Path], None]:
    """Overwrite columns of a part, first row by first row."""

    def damage(directory: Path) -> None:
        table = pq.read_table(directory / name)
        rows = table.to_pylist()
        for column, values in columns.items():
            for row, value in zip(rows, values, strict=False):
                row[column] = value
        pq.write_table(pa.Table.from_pylist(rows, schema=table.schema), directory / name)

    return damage


def without(name: str, rows: pc.Expression = OF_CASE) -> Callable[[Path], None]:
    """Leave rows out of a part."""

    def damage(directory: Path) -> None:
        pq.write_table(pq.read_table(directory / name).filter(~rows), directory / name)

    return damage


def with_conditions(conditions: bytes | None) -> Callable[[Path], None]:
    def damage(directory: Path) -> None:
        table = pq.read_table(directory / SAMPLES)
        metadata = {key: value for key, value in table.schema.metadata.items() if key != b"conditions"}
        metadata |= {} if conditions is None else {b"conditions": conditions}
        pq.write_table(table.replace_schema_metadata(metadata), directory / SAMPLES)

    return damage


# What is done to a directory of the comparisons c0 and c1, what the line says, and which cases are left: none, those of
# c1 ("c1"), or all but c0-0 ("others").
BREAKAGES = {
    "no run.json": (lambda d: (d / "run.json").unlink(), "run.json: missing", "none"),
    "no JSON": (lambda d: (d / "run.json").write_text('{"schema'), "run.json: damaged, not JSON", "none"),
    "a list": (lambda d: (d / "run.json").write_text("[]"), "schema_version: expected a whole number", "none"),
    "newer": (in_json(lambda c: c.update(schema_version=5)), "expected 4, got 5; it is newer", "none"),
    "older": (in_json(lambda c: c.update(schema_version=3)), "got 3; an earlier version wrote it", "none"),
    "no cases": (in_json(lambda c: c.pop("cases")), "run.json: cases: missing", "none"),
    "another mode": (in_json(lambda c: c.update(mode="emulated")), "mode: expected 'emulated', got 'run'", "none"),
    "key gone": (in_json(lambda c: c["comparisons"]["c0"].pop("dtype")), "comparisons.c0.dtype: missing", "c1"),
    "odd role": (in_json(lambda c: c["cases"]["c0-0"].update(role="king")), "cases.c0-0.role", "others"),
    "odd factor": (
        in_json(lambda c: c["cases"]["c0-0"]["policy_params"].update(capacity_factor=[1])),
        "capacity_factor: expected a number or null, got [1]",
        "others",
    ),
    "two baselines": (
        in_json(lambda c: c["cases"]["c0-0"].update(role="baseline")),
        "comparisons.c0: expected one baseline case, got 2",
        "c1",
    ),
    "no such comparison": (
        in_json(lambda c: c["cases"]["c0-0"].update(comparison_id="c9")),
        "cases.c0-0.comparison_id: no comparison 'c9'",
        "others",
    ),
    "missing part": (lambda d: (d / SAMPLES).unlink(), "c0-0.parquet: no rows of token_drop gamma 1 and 2 more", "c1"),
    "missing case": (without(SAMPLES), "no rows of token_drop gamma 1; the run did not finish", "others"),
    "missing routing": (without(ROUTING), "expected rows of the table routing too, got none", "c1"),
    "routing lacks a timed batch": (
        without(ROUTING, pc.field("batch") == 1),
        "routing/c0.parquet (token_drop gamma 1): batch: expected rows of every timed batch, got none of batch 1",
        "c1",
    ),
    "frontier lacks a batch": (
        without(FRONTIER, pc.field("batch") == 1),
        "(native): batch: expected rows of each batch and layer of the routing once, got others of batch 1",
        "c1",
    ),
    "damaged part": (lambda d: (d / SAMPLES).write_bytes(b"PAR1 and"), "c0-0.parquet: damaged, not Parquet", "c1"),
    "empty part": (
        lambda d: pq.write_table(pq.read_table(d / SAMPLES).slice(0, 0), d / SAMPLES),
        "c0-0.parquet: damaged, it has no rows",
        "c1",
    ),
    "other schema": (lambda d: shutil.copy(d / ROUTING, d / SAMPLES), "expected a column launch", "c1"),
    "another comparison's part": (
        in_part(SAMPLES, comparison_id=["c1"]),
        "c0-0.parquet: foreign, comparison_id: expected 'c0', got 'c1'",
        "c1",
    ),
    "endless words": (
        in_part(SAMPLES, comparison_id=["x" * 5000]),
        f"foreign, comparison_id: expected 'c0', got '{'x' * 76}...",
        "c1",
    ),
    "an endless status": (in_part(SAMPLES, status=["x" * 5000]), f"in all rows of a case, got '{'x' * 76}...", "c1"),
    "unlisted part": (
        lambda d: shutil.copy(d / SAMPLES, d / "cases" / "x-0.parquet"),
        "x-0.parquet: foreign, run.json lists no comparison 'x'",
        "all",
    ),
    "no conditions": (with_conditions(None), "c0-0.parquet: conditions: missing in its metadata", "c1"),
    "no JSON of conditions": (with_conditions(b"{"), "c0-0.parquet: conditions: expected JSON", "c1"),
    "damaged conditions": (with_conditions(b"{}"), "c0-0.parquet: conditions.run_id: missing", "c1"),
    **{
        f"{table.partition('/')[0]} {column}={value}": (in_part(table, **{column: [value]}), words, "c1")
        for table, column, value, words in (
            (SAMPLES, "case_id", None, "a row lacks its case_id"),
            (SAMPLES, "launch", None, "foreign, launch: expected 0, got None"),
            (SAMPLES, "status", "meh", "status: expected one of ok, failed"),
            (SAMPLES, "kind", "nap", "kind: expected plain or breakdown; got 'nap'"),
            (SAMPLES, "phase", "nap", "phase: expected one of shared, gate"),
            (SAMPLES, "phase", "attention", "phase: expected one of shared, gate"),  # it is no whole model
            (SAMPLES, "batch", None, "batch: expected a value in every row"),
            (SAMPLES, "time_us", None, "time_us: expected a value in every row"),
            (SAMPLES, "time_us", 0.0, "time_us: expected totals above 0"),
            (SAMPLES, "time_us", 1e15, "time_us: expected below 1e+15 us"),
            (SAMPLES, "host_us", float("inf"), "host_us: expected below 1e+15 us"),
            (SAMPLES, "rank", 1, "expected each phase once"),
            (SAMPLES, "iteration", 77, "expected totals of 2 ranks in every iteration"),
            (ROUTING, "num_topk_pairs", None, "num_topk_pairs: expected a value in every row"),
            (ROUTING, "num_tokens", -1, "num_tokens: expected finite numbers from 0"),
            (ROUTING, "retained_mass_topk", float("inf"), "retained_mass_topk: expected finite numbers"),
            (ROUTING, "load_E", None, "load_E: expected a value in every row"),
            (ROUTING, "load_E", [1, 2], "load_E: expected 8 entries in every row"),
            (ROUTING, "load_R", [1, -2], "load_R: expected counts"),
            (ROUTING, "rank", 1, "expected one row for each rank, batch and layer"),
            (ROUTING, "rank", 5, "expected all of 2 ranks in every batch and layer"),
            (ROUTING, "batch", 77, "expected all of 2 ranks in every batch and layer"),
            (ROUTING, "layer", 2, "expected all of 2 ranks in every batch and layer"),
            (FRONTIER, "kept_by_load", 1.1, "kept_by_load: expected shares"),
            (FRONTIER, "kept_by_experts", None, "kept_by_experts: expected shares"),
            (FRONTIER, "batch", None, "batch: expected a value in every row"),
            (FRONTIER, "batch", 1, "batch: expected one row for each batch and layer; got 1"),
            (FRONTIER, "batch", 77, "batch and layer of the routing once, got others of batch 0"),
            (FRONTIER, "layer", 2, "batch and layer of the routing once, got others of batch 0"),
            (FRONTIER, "curve_kept", [0.5], "expected curves of as many finite loads as shares"),
            (FRONTIER, "curve_load", [1.0, float("nan")], "expected curves of as many finite loads as shares"),
        )
    },
}
LEFT = {
    "none": (),
    "c1": ("c1-0", "c1-1", "c1-2"),
    "others": ("c0-1", "c0-2", "c1-0", "c1-1", "c1-2"),
    "all": ("c0-0", "c0-1", "c0-2", "c1-0", "c1-1", "c1-2"),
}


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    first, _, _, *native = standard_cases()
    directory = tmp_path_factory.mktemp("sound") / "run"
    listed = [FakeComparison(key, cases=[first, *native], **FEW) for key in ("c0", "c1")]
    write_run(directory, listed)
    curve = {"curve_load": [1.0, 2.0], "curve_kept": [0.5, 1.0]}
    rows = [
        {"case_id": "c0-2", "batch": batch, "kept_by_load": 1.0, "kept_by_experts": 1.0, **curve} for batch in (0, 1)
    ]
    rows = [{key: [value] for key, value in row.items()} for row in rows]
    RunDirectory(directory).write("frontier", "c0", [{**row, "comparison_id": "c0"} for row in rows])
    assert set(cases(load(directory))["case_id"]) == set(LEFT["all"])
    return directory


@pytest.mark.parametrize("breakage", BREAKAGES)
def test_results_that_cannot_be_trusted_are_one_clear_line(sound: Path, tmp_path: Path, breakage: str) -> None:
    damage, message, left = BREAKAGES[breakage]
    directory = shutil.copytree(sound, tmp_path / "run")
    damage(directory)
    with pytest.raises(ResultsError) as error:
        load(directory)
    line = str(error.value)
    assert message in line
    assert str(directory) in line
    assert "\n" not in line
    assert len(line) < 1000
    # Whoever wants the rest has it, and the same line.
    lines: list[str] = []
    if left == "none":
        with pytest.raises(ResultsError):
            load(directory, lines)
    else:
        rest = cases(load(directory, lines))
        assert set(rest["case_id"]) == set(LEFT[left])
        assert (rest["status"] == "ok").all()
        assert line in lines
    assert not any("\n" in one for one in lines)


def test_rows_of_a_case_that_no_config_names_any_more_are_read_by_nobody(sound: Path, tmp_path: Path) -> None:
    directory = shutil.copytree(sound, tmp_path / "run")
    in_json(lambda content: content["cases"].pop("c0-0"))(directory)
    assert set(cases(load(directory))["case_id"]) == set(LEFT["others"])


def test_of_several_directories_the_damaged_one_is_named_and_the_others_are_read(sound: Path, tmp_path: Path) -> None:
    directory = shutil.copytree(sound, tmp_path / "damaged")
    (directory / "run.json").unlink()
    lines: list[str] = []
    assert set(cases(load([sound, directory, sound], lines))["directory"]) == {"run"}
    assert len(lines) == 1
    assert str(directory) in lines[0]


def test_directories_of_one_name_are_told_apart_by_their_paths(sound: Path, tmp_path: Path) -> None:
    directories = [shutil.copytree(sound, tmp_path / folder / "run") for folder in ("a-b", "a/b")]
    expected = [str(directory.resolve()).removeprefix("/") for directory in directories]
    assert list(cases(load(directories))["directory"].unique()) == expected


@pytest.mark.parametrize("launch", [0, 1])
def test_a_case_that_failed_in_one_launch_failed(tmp_path: Path, launch: int) -> None:
    write_run(tmp_path, [FakeComparison(cases=standard_cases(), num_launches=2, **FEW)])
    files = RunDirectory(tmp_path)
    failed = {**pq.read_table(files.path("samples", "c0", launch)).to_pylist()[0], "time_us": None}
    failed |= {"status": "oom", "reason": "too big"}
    files.write("samples", "c0", [failed], launch, replaces=[failed["case_id"]])
    row = cases(load(tmp_path)).set_index("case_id").loc[failed["case_id"]]
    assert (row["status"], row["reason"]) == ("oom", f"launch {launch + 1}: too big")
    assert row[["median_ms", "speedup_median", "dropped_share"]].isna().all()


def test_a_run_in_which_nothing_was_measured_says_why(tmp_path: Path) -> None:
    lost = [dataclasses.replace(case, status="oom", reason="too\nbig") for case in standard_cases()]
    write_run(tmp_path, [FakeComparison(cases=lost, **FEW)])
    with pytest.raises(ResultsError, match=r"no case was measured \(5 oom\); token_drop gamma 1: too big"):
        load(tmp_path)
