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
from results_builder import FakeCase, FakeComparison, standard_cases, write_run

from moe_ep_bench.analysis.cases import cases, load
from moe_ep_bench.analysis.reading import ResultsError, check_routing
from moe_ep_bench.results import RunDirectory

FEW = {"noise": 0.0, "num_batches": 2, "num_iterations": 1}  # where no interval is looked at


def edit_json(directory: Path, change: Callable[[dict], object]) -> None:
    path = directory / "run.json"
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def edit_part(path: Path, **columns: list) -> None:
    """Overwrite columns of a part, first row by first row."""
    table = pq.read_table(path)
    rows = table.to_pylist()
    for name, values in columns.items():
        for row, value in zip(rows, values, strict=False):
            row[name] = value
    pq.write_table(pa.Table.from_pylist(rows, schema=table.schema), path)


def part(directory: Path, folder: str = "cases") -> Path:
    return sorted((directory / folder).glob("*.parquet"))[0]


def say(directory: Path, conditions: bytes | None) -> None:
    """Have the part of samples say other conditions."""
    table = pq.read_table(part(directory))
    metadata = {key: value for key, value in table.schema.metadata.items() if key != b"conditions"}
    given = {} if conditions is None else {b"conditions": conditions}
    pq.write_table(table.replace_schema_metadata({**metadata, **given}), part(directory))


def without(directory: Path, case_id: str, folder: str = "cases") -> None:
    path = part(directory, folder)
    pq.write_table(pq.read_table(path).filter(pc.field("case_id") != case_id), path)


# What is done to a directory, and what the line says.
BREAKAGES = {
    "no run.json": (lambda d: (d / "run.json").unlink(), "run.json: missing"),
    "no JSON": (lambda d: (d / "run.json").write_text('{"schema_version": 1,'), "run.json: damaged, not JSON"),
    "a list": (lambda d: (d / "run.json").write_text("[]"), "schema_version: expected a whole number, got None"),
    "newer": (lambda d: edit_json(d, lambda c: c.update(schema_version=5)), "expected 4, got 5; it is newer"),
    "no cases": (lambda d: edit_json(d, lambda c: c.pop("cases")), "run.json: cases: missing"),
    "key gone": (
        lambda d: edit_json(d, lambda c: c["comparisons"]["c0"].pop("dtype")),
        "comparisons.c0.dtype: missing",
    ),
    "odd role": (lambda d: edit_json(d, lambda c: c["cases"]["c0-0"].update(role="king")), "cases.c0-0.role"),
    "odd factor": (
        lambda d: edit_json(d, lambda c: c["cases"]["c0-0"]["policy_params"].update(capacity_factor=[1])),
        "capacity_factor: expected a number or null, got [1]",
    ),
    "two baselines": (
        lambda d: edit_json(d, lambda c: c["cases"]["c0-0"].update(role="baseline")),
        "comparisons.c0: expected one baseline case, got 2",
    ),
    "no such comparison": (
        lambda d: edit_json(d, lambda c: c["cases"]["c0-0"].update(comparison_id="c9")),
        "cases.c0-0.comparison_id: no comparison 'c9'",
    ),
    "missing part": (lambda d: part(d).unlink(), "c0-0.parquet: no rows of token_drop gamma 1 and 2 more; the run"),
    "damaged part": (lambda d: part(d).write_bytes(b"PAR1 and nothing"), "c0-0.parquet: damaged, not Parquet"),
    "older": (lambda d: edit_json(d, lambda c: c.update(schema_version=3)), "got 3; an earlier version wrote it"),
    "missing case": (lambda d: without(d, "c0-0"), "no rows of token_drop gamma 1; the run did not finish"),
    "missing routing": (lambda d: without(d, "c0-0", "routing"), "expected rows of the table routing too, got none"),
    "other schema": (lambda d: part(d).write_bytes(part(d, "routing").read_bytes()), "expected a column launch"),
    "another comparison's part": (
        lambda d: edit_part(part(d), comparison_id=["c1"]),
        "c0-0.parquet: foreign, comparison_id: expected 'c0', got 'c1'",
    ),
    "unlisted part": (
        lambda d: (d / "cases" / "x-0.parquet").write_bytes(part(d).read_bytes()),
        "x-0.parquet: foreign, run.json lists no comparison 'x'",
    ),
    "a row of no case": (lambda d: edit_part(part(d), case_id=[None]), "a row lacks its case_id"),
    "another mode": (
        lambda d: edit_json(d, lambda c: c.update(mode="emulated")),
        "mode: expected 'emulated', got 'run'",
    ),
    "no conditions": (lambda d: say(d, None), "c0-0.parquet: conditions: missing in its metadata"),
    "no JSON of conditions": (lambda d: say(d, b"{"), "c0-0.parquet: conditions: expected JSON"),
    "damaged conditions": (lambda d: say(d, b"{}"), "c0-0.parquet: conditions.run_id: missing"),
    "unknown phase": (lambda d: edit_part(part(d), phase=["nap"]), "phase: expected one of shared, gate"),
    "unknown status": (lambda d: edit_part(part(d), status=["meh"]), "status: expected one of ok, failed"),
    "no time": (lambda d: edit_part(part(d), time_us=[None]), "lacks its rank, batch, iteration or time_us"),
    "time stands still": (lambda d: edit_part(part(d), time_us=[0.0]), "a total is not above 0"),
    "endless host time": (lambda d: edit_part(part(d), host_us=[float("inf")]), "a time is not below 1e+15 us"),
    "no launch": (lambda d: edit_part(part(d), launch=[None]), "foreign, launch: expected 0, got None"),
    "a rank twice": (lambda d: edit_part(part(d), rank=[1]), "stands there twice"),
    "a rank gone": (lambda d: edit_part(part(d), iteration=[77]), "expected totals of 2 ranks, got 1"),
    "short load": (lambda d: edit_part(part(d, "routing"), load_E=[[1, 2]]), "load_E: expected 8 entries, got 2"),
    "no pairs counted": (lambda d: edit_part(part(d, "routing"), num_topk_pairs=[None]), "lacks its num_topk_pairs"),
    "a rank's routing gone": (lambda d: edit_part(part(d, "routing"), batch=[77]), "one row for each of 2 ranks"),
}
# Without run.json, or the only comparison, there is no rest.
NOTHING_LEFT = (
    *("no run.json", "no JSON", "a list", "newer", "older", "no cases", "key gone", "two baselines", "another mode"),
    *("missing part", "damaged part", "other schema", "another comparison's part", "a row of no case", "no launch"),
)


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    first, _, _, *native = standard_cases()
    directory = tmp_path_factory.mktemp("sound") / "run"
    write_run(directory, [FakeComparison(cases=[first, *native], **FEW)])
    assert len(cases(load(directory))) == 3
    return directory


@pytest.mark.parametrize("breakage", BREAKAGES)
def test_results_that_cannot_be_trusted_are_one_clear_line(sound: Path, tmp_path: Path, breakage: str) -> None:
    damage, message = BREAKAGES[breakage]
    directory = shutil.copytree(sound, tmp_path / "run")
    damage(directory)
    with pytest.raises(ResultsError) as error:
        load(directory)
    line = str(error.value)
    assert message in line
    assert str(directory) in line
    assert "\n" not in line
    # Whoever wants the rest has it, and the same line.
    lines: list[str] = []
    if breakage in NOTHING_LEFT:
        with pytest.raises(ResultsError) as fatal:
            load(directory, lines)
        lines.append(str(fatal.value))
    else:
        rest = cases(load(directory, lines))
        assert len(rest) >= 2
        assert (rest["status"] == "ok").all()
    assert line in lines
    assert not any("\n" in one for one in lines)


def test_rows_of_a_case_that_no_config_names_any_more_are_read_by_nobody(sound: Path, tmp_path: Path) -> None:
    directory = shutil.copytree(sound, tmp_path / "run")
    edit_json(directory, lambda content: content["cases"].pop("c0-0"))
    assert set(cases(load(directory))["case_id"]) == {"c0-1", "c0-2"}


def test_of_several_directories_the_damaged_one_is_named_and_the_others_are_read(sound: Path, tmp_path: Path) -> None:
    directory = shutil.copytree(sound, tmp_path / "damaged")
    (directory / "run.json").unlink()
    lines: list[str] = []
    assert set(cases(load([sound, directory], lines))["directory"]) == {"run"}
    assert len(lines) == 1
    assert str(directory) in lines[0]


def test_a_case_that_failed_in_one_launch_failed(tmp_path: Path) -> None:
    write_run(tmp_path, [FakeComparison(cases=standard_cases(), num_launches=2, **FEW)])
    files = RunDirectory(tmp_path)
    failed = {**pq.read_table(files.path("samples", "c0", 1)).to_pylist()[0], "time_us": None}
    failed |= {"status": "oom", "reason": "too big"}
    files.write("samples", "c0", [failed], 1, replaces=[failed["case_id"]])
    row = cases(load(tmp_path)).set_index("case_id").loc[failed["case_id"]]
    assert (row["status"], row["reason"]) == ("oom", "launch 2: too big")
    assert row[["median_ms", "speedup_median", "dropped_share"]].isna().all()


def test_a_run_in_which_nothing_was_measured_says_why(tmp_path: Path) -> None:
    lost = [dataclasses.replace(case, status="oom", reason="too\nbig") for case in standard_cases()]
    write_run(tmp_path, [FakeComparison(cases=lost, **FEW)])
    with pytest.raises(ResultsError, match=r"no case was measured \(5 oom\); token_drop gamma 1: too big"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda rows: rows[(rows["layer"] != 2) | (rows["batch"] != 1)], "layer: expected rows of every batch in each"),
        (lambda rows: rows.iloc[1:], "expected one row for each of 2 ranks in every batch"),
    ],
)
def test_every_rank_batch_and_layer_must_be_routed_once(tmp_path: Path, change: Callable, words: str) -> None:
    write_run(tmp_path, [FakeComparison(cases=[FakeCase("native", role="baseline")], **FEW)])
    rows = load(tmp_path).comparisons[0].cases[0].routing
    whole = rows.loc[rows.index.repeat(2)].reset_index(drop=True)
    whole["layer"] = [1, 2] * len(rows)
    sizes = {"num_experts": 8, "num_ranks": 2, "world_size": 2}
    check_routing(Path("x"), whole, **sizes)
    with pytest.raises(ResultsError, match=words):
        check_routing(Path("x"), change(whole), **sizes)
