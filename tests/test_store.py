"""What is missing, damaged or of another run is one line that names it, or is left out and named."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from results_builder import FakeComparison, shown_text, standard_cases, write_run

from moe_ep_bench.analysis.cases import cases, load
from moe_ep_bench.analysis.store import TIMES, ResultsError, pivoted
from moe_ep_bench.results import RunDirectory

OF_CASE = pc.field("case_id") == "c0-0"
DROP = "token_drop capacity_factor=1.0"
FEW = {"noise": 0.0, "num_batches": 2, "num_iterations": 1}  # where no interval is looked at
SAMPLES, ROUTING = "cases/c0-0.parquet", "routing/c0.parquet"


def in_json(change: Callable[[dict], object]) -> Callable[[Path], None]:
    """Change run.json."""

    def damage(directory: Path) -> None:
        content = json.loads((directory / "run.json").read_text())
        change(content)
        (directory / "run.json").write_text(json.dumps(content))

    return damage


def without(name: str, rows: pc.Expression = OF_CASE) -> Callable[[Path], None]:
    """Leave rows out of a part."""

    def damage(directory: Path) -> None:
        pq.write_table(pq.read_table(directory / name).filter(~rows), directory / name)

    return damage


def flip_a_bit(path: Path) -> None:
    """In the first page of times: values that read as well as others, but for the page's checksum."""
    sound = path.read_bytes()
    group = pq.read_metadata(path).row_group(0)
    columns = [group.column(place) for place in range(group.num_columns)]
    column = next(column for column in columns if column.path_in_schema == "time_us")
    for place in range(column.data_page_offset + 100, column.data_page_offset + column.total_compressed_size):
        content = bytearray(sound)
        content[place] ^= 1
        path.write_bytes(content)
        with contextlib.suppress(OSError):
            pq.read_table(path, columns=["time_us"])
            return
    raise AssertionError("every bit that was flipped broke the page's compression")


# What is done to a directory of the comparisons c0 and c1, what the line says, and which cases are left: none, those of
# c1 ("c1"), or all but c0-0 ("others").
BREAKAGES = {
    "no run.json": (lambda d: (d / "run.json").unlink(), "run.json: missing", "none"),
    "no JSON": (lambda d: (d / "run.json").write_text('{"schema'), "run.json: expected JSON", "none"),
    "a list": (lambda d: (d / "run.json").write_text("[]"), "schema_version: expected 6, got None", "none"),
    "newer": (in_json(lambda c: c.update(schema_version=7)), "expected 6, got 7; another version", "none"),
    "no cases": (in_json(lambda c: c.pop("cases")), "run.json: cases: Field required", "none"),
    "no such mode": (in_json(lambda c: c.update(mode="guess")), "run.json: mode: expected 'run', 'emulated'", "none"),
    "key gone": (in_json(lambda c: c["comparisons"]["c0"].pop("dtype")), "c0.dtype: Field required", "none"),
    "odd role": (in_json(lambda c: c["cases"]["c0-0"].update(role="king")), "cases.c0-0.role: expected", "none"),
    "odd target": (
        in_json(lambda c: c["comparisons"]["c0"]["workload"].update(targets={"rank_load": [8]})),
        "c0.workload.targets",
        "none",
    ),
    "odd peak": (
        in_json(lambda c: c["comparisons"]["c0"]["workload"].update(targets={"peak_load": "high"})),
        "c0.workload.targets",
        "none",
    ),
    "missing part": (
        lambda d: (d / SAMPLES).unlink(),
        f"c0-0.parquet: no rows of {DROP} and 2 more",
        "c1",
    ),
    "missing case": (without(SAMPLES), f"no rows of {DROP}; the run did not finish", "others"),
    "missing routing": (
        without(ROUTING),
        f"c0.parquet: no rows of {DROP}, which was measured",
        "c1",
    ),
    "damaged part": (lambda d: (d / SAMPLES).write_bytes(b"PAR1 and"), "c0-0.parquet: damaged, not Parquet", "c1"),
    "half a part": (lambda d: os.truncate(d / ROUTING, 2000), "c0.parquet: damaged, not Parquet", "c1"),
    "a flipped bit": (lambda d: flip_a_bit(d / SAMPLES), "CRC checksum verification failed", "c1"),
}
LEFT = {
    "none": (),
    "c1": ("c1-0", "c1-1", "c1-2"),
    "others": ("c0-1", "c0-2", "c1-0", "c1-1", "c1-2"),
}


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    first, _, _, *native = standard_cases()
    directory = tmp_path_factory.mktemp("sound") / "run"
    listed = [FakeComparison(key, cases=[first, *native], **FEW) for key in ("c0", "c1")]
    write_run(directory, listed)
    return directory


@pytest.mark.parametrize("breakage", BREAKAGES)
def test_results_that_cannot_be_trusted_are_one_clear_line(sound: Path, tmp_path: Path, breakage: str) -> None:
    damage, message, left = BREAKAGES[breakage]
    directory = shutil.copytree(sound, tmp_path / "run")
    damage(directory)
    with pytest.raises(ResultsError) as error:
        load(directory)
    line = str(error.value)
    assert (message in line, str(directory) in line, "\n" in line) == (True, True, False)
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


def test_a_job_that_goes_on_takes_a_part_with_a_flipped_bit_for_none(sound: Path, tmp_path: Path) -> None:
    files = RunDirectory(shutil.copytree(sound, tmp_path / "run"))
    assert set(files.statuses("c0", 0)) == {"c0-0", "c0-1", "c0-2"}
    flip_a_bit(files.path("samples", "c0", 0))
    assert files.statuses("c0", 0) == {}


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


def test_points_of_a_sweep_are_in_the_order_of_their_values_numbers_first(tmp_path: Path) -> None:
    values = [10.6, None, 6.4, "all"]
    listed = [
        FakeComparison(f"c{n}", {"point": {"x": value}}, standard_cases()[3:], **FEW) for n, value in enumerate(values)
    ]
    write_run(tmp_path, listed)
    assert list(cases(load(tmp_path))["comparison_id"].unique()) == ["c2", "c0", "c3", "c1"]


@pytest.mark.parametrize("value", ["(a+)+$", [1], {"a": 1}, None, 1.5, True])
def test_a_seed_of_a_sweep_that_is_no_number_joins_nothing(value: object, tmp_path: Path) -> None:
    """It would stand in a pattern for titles, and in a set."""
    points = [{"workload.seed": value}, {"workload.seed": 2}, {"workload.seed": 3}]
    listed = [FakeComparison(f"c{n}", {"point": point}, standard_cases()[3:], **FEW) for n, point in enumerate(points)]
    found = cases(load(write_run(tmp_path, listed)))
    assert found["num_draws"].max() == (3 if value is True else 2)


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
    assert set(load(tmp_path).comparisons[0].conditions) == {0, 1}, "others were measured in both"


def test_what_was_dropped_is_unknown_where_it_is_unknown_of_a_batch(tmp_path: Path) -> None:
    write_run(tmp_path, [FakeComparison(cases=standard_cases(), **FEW)])
    path = RunDirectory(tmp_path).path("routing", "c0")
    table = pq.read_table(path)
    rows = table.to_pylist()
    rows[0] |= {"num_dropped_pairs": None, "num_rerouted_pairs": None}
    pq.write_table(pa.Table.from_pylist(rows, table.schema), path)
    found = cases(load(tmp_path)).set_index("case_id")["dropped_share"]
    assert np.isnan(found.pop(rows[0]["case_id"])), "a mean over the others would be none"
    assert found.notna().any()


def test_a_run_in_which_nothing_was_measured_says_why(tmp_path: Path) -> None:
    lost = [dataclasses.replace(case, status="oom", reason="too big") for case in standard_cases()]
    write_run(tmp_path, [FakeComparison(cases=lost, **FEW)])
    with pytest.raises(ResultsError, match=f"no case was measured; {DROP}: oom: too big"):
        load(tmp_path)


def test_where_dropped_and_rerouted_pairs_are_not_told_apart_the_missing_ones_are_known(tmp_path: Path) -> None:
    write_run(tmp_path, [FakeComparison(cases=standard_cases(), **FEW)])
    path = RunDirectory(tmp_path).path("routing", "c0")
    rows = pq.read_table(path).to_pandas()
    now = cases(load(tmp_path)).set_index("label")
    missing = rows["num_dropped_pairs"] + rows["num_rerouted_pairs"]
    untold = ["num_dropped_pairs", "num_rerouted_pairs", "dropped_share", "rerouted_share"]
    is_drop = rows["case_id"] == "c0-0"
    rows = rows.assign(num_missing_pairs=missing.where(is_drop), **rows[untold].mask(is_drop))
    pq.write_table(pa.Table.from_pandas(rows, preserve_index=False), path)
    then = cases(load(tmp_path)).set_index("label")
    assert then["missing_share"].to_numpy() == pytest.approx(now["missing_share"].to_numpy(), nan_ok=True)
    assert then.index[then["dropped_share"].isna() & then["missing_share"].notna()].tolist() == [DROP]
    assert "missing %" in shown_text(tmp_path)


@pytest.mark.parametrize("order", [1, -1])
def test_a_phase_lands_in_its_column_whatever_the_order_in_which_phases_occur(order: int) -> None:
    """Categories of the same words in another order are one dtype to pandas."""
    phases = TIMES[::order]
    step = {"case": 0, "launch": 0, "batch": 0, "iteration": 0, "kind": "breakdown", "rank": 0, "layer": np.nan}
    rows = pd.DataFrame([{**step, "phase": phase, "time_us": float(TIMES.index(phase))} for phase in phases])
    (found,) = pivoted(rows.astype({"phase": pd.CategoricalDtype(phases)}))[TIMES].to_numpy().tolist()
    assert found == list(range(len(TIMES)))
