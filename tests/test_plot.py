"""``moe-ep-bench plot``: several directories side by side, damaged ones, and the numbers beside the pictures."""

from __future__ import annotations

import dataclasses
import itertools
import json
import random
import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from results_builder import FakeCase, FakeComparison, standard_cases, write_run

from moe_ep_bench.analysis.fidelity import pairs_by_rank, source_loads
from moe_ep_bench.analysis.figures import FIGURES, draw_figures
from moe_ep_bench.analysis.gather import gather
from moe_ep_bench.analysis.load import Run, load_run
from moe_ep_bench.analysis.speedups import analyse
from moe_ep_bench.analysis.style import house_style
from moe_ep_bench.analysis.timing import _fullest_buffer_pairs, layer_time_us
from moe_ep_bench.cli import main
from moe_ep_bench.files import atomic_path
from moe_ep_bench.results import ValidationDirectory

FACTORS = (1.0, 1.5)


def cases_of(speedup: float = 1.5) -> list[FakeCase]:
    drops = [
        FakeCase("token_drop", params={"capacity_factor": g}, speedup=speedup / g**0.5, dropped=0.2 / g, mass=0.9)
        for g in FACTORS
    ]
    return [*standard_cases()[1:], *drops]


FULL = {"cases": cases_of(), "kinds": ("plain", "breakdown")}


def few_cases() -> list[FakeCase]:
    """Two policies, and what they are held against."""
    *references, drop, _ = cases_of()
    return [*references[1:], drop]


def directory_of(root: Path, comparison_id: str = "c0", job: str = "", device: str = "", **changes) -> Path:
    """A run of its own job, on a device of its own where one is named."""
    usual = {"cases": few_cases(), "num_batches": 3, "num_iterations": 2, "kinds": ("plain",)}
    comparison = FakeComparison(comparison_id, **{**usual, **changes})
    write_run(root, [comparison], seed=len(str(root)))
    for path in root.glob("cases/*.parquet") if job else ():
        table = pq.read_table(path)
        ids = pa.array([f"{job}-{launch}" for launch in table["launch"].to_pylist()])
        table = table.set_column(table.schema.get_field_index("run_id"), "run_id", ids)
        with atomic_path(path) as temporary:
            pq.write_table(table, temporary)
    for path in root.glob("conditions/*.json") if job else ():
        content = json.loads(path.read_text())
        path.write_text(json.dumps({**content, "run_id": f"{job}-{content['run_id'].removeprefix('r')}"}))
    if device:
        edit_json(root, lambda content: content["environment"].update(device_name=device))
    return root


def edit_json(root: Path, change) -> None:
    content = json.loads((root / "run.json").read_text())
    change(content)
    (root / "run.json").write_text(json.dumps(content))


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sound run of few cases, which nobody writes to."""
    return directory_of(tmp_path_factory.mktemp("plot") / "good")


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Likewise of all, with breakdown iterations."""
    return directory_of(tmp_path_factory.mktemp("plot") / "full", **FULL)


def copy_of(directory: Path, to: Path) -> Path:
    return Path(shutil.copytree(directory, to))


def drawn(root: Path, *arguments: str | Path) -> tuple[int, Path]:
    out = root / "drawn"
    return main(["plot", *map(str, arguments), "--out", str(out), "--format", "svg"]), out


# ---- several directories -----------------------------------------------------------------------------------------


def test_jobs_of_different_sizes_stand_in_one_figure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    roots = [directory_of(tmp_path / f"ep{n}", f"c{n}", f"job{n}", num_ranks=n) for n in (2, 4)]
    status, out = drawn(tmp_path, *roots, "--figures", "dropped,speedup")
    assert status == 0
    assert sorted(path.name for path in out.iterdir()) == ["dropped.csv", "dropped.svg", "speedup.csv", "speedup.svg"]
    rows = pd.read_csv(out / "speedup.csv")
    assert sorted(set(rows["num_ranks"])) == [2, 4]
    assert capsys.readouterr().err == "moe-ep-bench: read as one: ep2, ep4\n"


def test_the_same_comparison_of_another_job_is_a_further_launch(tmp_path: Path) -> None:
    one, two = (directory_of(tmp_path / name, job=name, launch_noise=0.05) for name in ("first", "second"))
    gathered = gather([one, two])
    assert gathered.notes == ["read as one: first, second, with further launches of: Tiny-MoE, EP 2, 4,096 tokens"]
    assert not gathered.passed_over
    (run,) = gathered.found["layers"].values()
    assert set(run.conditions["c0"]) == {0, 1}
    for case in run.cases:
        assert case.run_ids == {0: "first-0", 1: "second-0"}
    (together,) = analyse(run)
    # The oracle: ratios of each directory by itself, thrown together.
    alone = [{case.case_id: layer_time_us(case) for case in load_run(one).cases} for one in (one, two)]
    native = together.of_role("baseline").case.case_id
    for result in (*together.policies, together.of_role("noise")):
        ratios = np.concatenate([times[native] / times[result.case.case_id] for times in alone])
        assert result.speedup.median == pytest.approx(np.median(ratios))
        assert result.speedup.num_launches == 2


def test_a_copy_of_a_directory_adds_no_samples(tmp_path: Path) -> None:
    one = directory_of(tmp_path / "a", job="same", cases=cases_of())
    two = copy_of(one, tmp_path / "b")
    (one / "cases" / "c0-4.parquet").unlink()  # what one lacks comes from the other
    gathered = gather([one, two])
    (run,) = gathered.found["layers"].values()
    assert "the same job's, so read once: Tiny-MoE" in gathered.notes[0]
    assert {case.case_id: len(case.timings) for case in run.cases} == {
        case.case_id: len(case.timings) for case in load_run(two).cases
    }
    assert all(set(case.run_ids) == {0} for case in run.cases)
    (result,) = analyse(run)
    assert len([r for r in result.policies if r.speedup]) == len(result.policies) == 1 + len(FACTORS)


def test_comparisons_that_were_recorded_differently_are_not_merged(tmp_path: Path) -> None:
    one = directory_of(tmp_path / "one", job="one")
    two = directory_of(tmp_path / "two", job="two", facts={"permute": {"requested": "auto", "ran": "unfused"}})
    gathered = gather([one, two])
    (run,) = gathered.found["layers"].values()
    assert [facts.title for facts in run.comparisons.values()] == [
        "Tiny-MoE, EP 2, 4,096 tokens, from one",
        "Tiny-MoE, EP 2, 4,096 tokens, from two",
    ]
    assert "recorded differently, so kept apart: Tiny-MoE" in gathered.notes[0]
    for result in analyse(run):
        assert all(r.speedup.num_launches == 1 for r in result.policies)


def test_what_was_measured_elsewhere_or_emulated_is_never_pooled(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory_of(tmp_path / "a" / "mine", job="a")
    directory_of(tmp_path / "b" / "mine", job="b", device="NVIDIA Other 40GB")
    comparison = FakeComparison("c0", {"links": "modelled links"}, few_cases(), num_batches=3, num_iterations=2)
    write_run(tmp_path / "emulated", [comparison], "emulated")
    directories = [tmp_path / "a" / "mine", tmp_path / "b" / "mine", tmp_path / "emulated"]
    status, out = drawn(tmp_path, *directories, "--figures", "dropped")
    assert status == 0
    folders = {"a-mine": "NVIDIA Fake 80GB", "b-mine": "NVIDIA Other 40GB", "emulated": "modelled links"}
    assert sorted(path.name for path in out.iterdir()) == sorted(folders)
    for folder in folders:
        assert sorted(path.name for path in (out / folder).iterdir()) == ["dropped.csv", "dropped.svg"]
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "kept apart, for mode, device or versions differ: a-mine (measured, NVIDIA Fake 80GB, torch 2.13); " in error
    for name, run in gather(directories).found["layers"].items():
        footer = " ".join(text.get_text() for text in _figure(run).texts).replace("\n", " ")
        assert f"from {name}" in footer
        assert folders[name] in footer


def _figure(run):
    with house_style():
        drawing = FIGURES["dropped"](run)
    return drawing.figure


def test_figures_of_several_directories_land_here_unless_told_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory_of(tmp_path / "one", "c1", "one")
    monkeypatch.chdir(tmp_path)
    for arguments, folder in ((["one"], "one/figures"), (["one", "one/"], "figures")):
        assert main(["plot", *arguments, "--figures", "dropped", "--format", "svg"]) == 0
        assert sorted(path.name for path in (tmp_path / folder).iterdir()) == ["dropped.csv", "dropped.svg"]


# ---- what cannot be trusted --------------------------------------------------------------------------------------


def test_a_damaged_part_is_named_and_the_rest_drawn(
    full: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = copy_of(full, tmp_path / "run")
    lost = next(case for case in load_run(directory).cases if case.label == "token_drop gamma 1")
    (directory / "cases" / f"{lost.case_id}.parquet").write_bytes(b"PAR1")
    (directory / "cases" / "stranger.parquet").write_bytes(b"")
    for label in ("native again", "topk"):  # as of a run that did not finish
        missing = next(case for case in load_run(full).cases if case.label == label)
        (directory / "cases" / f"{missing.case_id}.parquet").unlink()
    status, out = drawn(tmp_path, directory, "--figures", "dropped")
    assert status == 1
    assert set(pd.read_csv(out / "dropped.csv")["policy"]) == {"token_drop gamma 1.5"}
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 3
    assert any("missing; the run did not finish (topk and 1 more)" in line for line in lines)
    assert any(f"{lost.case_id}.parquet: damaged, not Parquet" in line for line in lines)
    assert any("stranger.parquet: foreign" in line for line in lines)


def test_one_directory_that_cannot_be_read_does_not_keep_the_others_from_being_drawn(
    good: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    newer = copy_of(good, tmp_path / "newer")
    edit_json(newer, lambda content: content.update(schema_version=99))
    (tmp_path / "empty").mkdir()
    status, out = drawn(tmp_path, good, newer, tmp_path / "empty", "--figures", "dropped")
    assert status == 1
    assert sorted(path.name for path in out.iterdir()) == ["dropped.csv", "dropped.svg"]
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2
    assert "newer/run.json: schema_version: expected 3, got 99; it is newer than this program" in lines[0]
    assert "empty/run.json: missing" in lines[1]
    status, out = drawn(tmp_path / "again", newer)
    assert (status, out.exists()) == (2, False)


def test_a_comparison_that_lost_its_baseline_has_no_speedups_and_says_so(full: Path, tmp_path: Path) -> None:
    directory = copy_of(full, tmp_path / "run")
    native = next(case for case in load_run(directory).cases if case.role == "baseline")
    (directory / "routing" / f"{native.case_id}.parquet").write_bytes(b"")
    lines: list[str] = []
    run = load_run(directory, lines)
    assert "native, its baseline, is not there as measured, so its 5 cases have no speedups" in lines[-1]
    assert draw_figures(run, tmp_path, [], ["speedup"]) == ([], ["speedup"])
    assert [path.name for path in draw_figures(run, tmp_path, [], ["dropped"])[0]] == ["dropped.csv"]


@pytest.mark.parametrize("command", [["plot"], ["show", "--format", "md"], ["show", "--format", "html"]])
def test_a_file_where_a_folder_is_to_be_is_one_line(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("mine")
    out = f"{tmp_path}/file" if command == ["plot"] else f"{tmp_path}/file/y/x.md"
    # Said before the results are looked at: there are none.
    assert main([*command, str(tmp_path / "nothing"), "--out", out]) == 2
    said = capsys.readouterr().err
    assert "expected a directory" in said
    assert said.count("\n") == 1
    assert (tmp_path / "file").read_text() == "mine"


_READERS = {
    "plot": lambda directory, good, out: ["plot", directory, "--figures", "dropped", "--out", out],
    "html": lambda directory, good, out: ["show", directory, "--format", "html", "--out", f"{out}.html"],
    "csv": lambda directory, good, out: ["show", directory, "--format", "csv", "--out", f"{out}.csv"],
    "compare": lambda directory, good, out: ["compare", good, directory],
}


def _read_by(command: str, directory: Path, good: Path, out: Path) -> int:
    return main(list(map(str, _READERS[command](directory, good, out))))


@pytest.mark.parametrize(
    ("command", "damage"), [("plot", "other"), ("html", "cut"), ("csv", "other"), ("compare", "cut")]
)
def test_a_part_with_other_columns_or_cut_off_is_named(
    command: str, damage: str, good: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = copy_of(good, tmp_path / "damaged")
    if damage == "other":
        path = sorted((directory / "cases").glob("*.parquet"))[-1]
        pq.write_table(pq.read_table(path).drop_columns(["layer"]), path)
        words = f"{path}: foreign, expected a column layer of type int32"
    else:
        path = sorted((directory / "routing").glob("*.parquet"))[-1]
        content = path.read_bytes()
        path.write_bytes(content[: random.Random(command).randrange(len(content))])
        words = f"{path}: damaged, not Parquet"
    # What is left is drawn, with status 1; where it would change what is said, nothing is.
    status = 1 if command in ("plot", "html") else 2
    assert _read_by(command, directory, good, tmp_path / "out") == status
    said = capsys.readouterr().err
    assert words in said
    assert said.count("\n") == 1
    assert bool(list(tmp_path.glob("out*"))) == (status == 1)


_HOLDS = {
    "file": "is a file; expected a directory",
    "empty": "run.json: missing",
    "quality": "holds what policies do to a model's answers",
    "route": "holds routing without times",
    "validation": "holds two runs side by side",
}


@pytest.mark.parametrize(
    ("command", "kind"),
    [
        *[("plot", "file"), ("plot", "validation"), ("html", "empty"), ("html", "quality")],
        *[("csv", "validation"), ("compare", "empty"), ("compare", "route"), ("compare", "quality")],
    ],
)
def test_what_holds_no_times_is_one_line_and_nothing_is_written(
    command: str, kind: str, good: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words, other = _HOLDS[kind], tmp_path / "other"
    if kind == "file":
        other.write_text("mine")
    else:
        other.mkdir()
    if kind == "validation":
        ValidationDirectory(other).write_pairs([], "measured here")
    elif kind in ("quality", "route"):
        (other / "run.json").write_text(json.dumps({"schema_version": 3, "mode": kind}))
    assert _read_by(command, other, good, tmp_path / "out") == 2
    said = capsys.readouterr().err
    assert words in said
    assert str(other) in said
    assert said.count("\n") == 1
    assert not list(tmp_path.glob("out*"))


@pytest.mark.parametrize(
    ("option", "value"),
    [
        *[("--format", "gif"), ("--figures", "speedup,nonsense"), ("--case", "nobody")],
        *[("--iteration", "99/0"), ("--iteration", "all")],
    ],
)
def test_what_there_is_not_is_said_before_anything_is_drawn(
    option: str, value: str, full: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plot", str(full), option, value]) == 2
    said = capsys.readouterr().err
    assert f"{option}: expected" in said
    assert value.rpartition(",")[2] in said
    assert said.count("\n") == 1
    assert not (full / "figures").exists()


# ---- fast paths beside slow ones ---------------------------------------------------------------------------------


def test_loads_of_all_batches_at_once_are_those_of_each(tmp_path: Path) -> None:
    run = load_run(directory_of(tmp_path / "run", num_ranks=4, facts={"world_size": 4}))
    (facts,) = run.comparisons.values()
    generator = np.random.default_rng(3)
    for replicas in (1, 2):
        facts = facts.model_copy(update={"num_ranks": 4 // replicas, "world_size": 4, "num_replicas": replicas})
        rows = [
            {
                "rank": rank,
                "batch": batch,
                "load_E": generator.integers(0, 9, 8),
                "load_R": generator.integers(0, 9, facts.num_ranks),
            }
            for batch in (1, 4, 9)
            for rank in range(4)
        ]
        routing = pd.DataFrame(rows).sample(frac=1, random_state=1)
        batches, load_BRE = source_loads(routing, "load_E")
        _, pairs_BRL = pairs_by_rank(routing, facts)
        fullest = _fullest_buffer_pairs(routing, facts.num_ranks)
        for place, batch in enumerate(batches):
            own = {row["rank"]: row for row in rows if row["batch"] == batch}
            sent, received = np.zeros(4), np.zeros(4)
            for rank in range(4):
                assert load_BRE[place, rank].tolist() == own[rank]["load_E"].tolist()
                replica, here = divmod(rank, facts.num_ranks)
                mates = range(replica * facts.num_ranks, (replica + 1) * facts.num_ranks)
                experts = slice(here * (8 // facts.num_ranks), (here + 1) * (8 // facts.num_ranks))
                assert pairs_BRL[place, rank].tolist() == sum(own[mate]["load_E"][experts] for mate in mates).tolist()
                sent[rank] = own[rank]["load_R"].sum()
                received[rank] = sum(own[mate]["load_R"][here] for mate in mates)
            assert fullest[batch] == max(sent.max(), received.max())


def test_a_case_that_failed_in_one_directory_failed(tmp_path: Path) -> None:
    good = directory_of(tmp_path / "good", job="good")
    cases = [dataclasses.replace(case) for case in few_cases()]
    cases[-1].status, cases[-1].reason = "oom", "too big"
    write_run(tmp_path / "bad", [FakeComparison("c0", cases=cases, num_batches=3, num_iterations=2)])
    (run,) = gather([good, tmp_path / "bad"]).found["layers"].values()
    assert [(case.status, case.reason) for case in run.cases][-1] == ("oom", "too big")
    assert run.cases[-1].timings.empty


# ---- every figure of two directories -----------------------------------------------------------------------------


def _everything(root: Path, permute: str) -> Path:
    """A directory that has rows for every figure of layers, whose ids say nothing of how it permuted."""
    idle = np.array([2.0, 2, 0, 0, 0, 2, 1, 1])
    cases = [
        *cases_of(),
        FakeCase("oea", params={"k0": 1}, speedup=1.2, mass=0.95, expert_load=idle),
        FakeCase("eplb", role="replication", params={"spare_per_rank": 1}, speedup=1.3),
    ]
    comparisons = []
    for peak_load, is_replayed in itertools.product((1.0, 2.0), (False, True)):
        point = {"workload.peak_load": peak_load, "layer.cuda_graph": is_replayed}
        facts = {"point": point, "title": f"Tiny, peak load {peak_load:g}, graphs {is_replayed}"}
        facts |= {"cuda_graph": "the whole layer"} if is_replayed else {}
        facts |= {"permute": {"requested": "auto", "ran": permute}}
        sizes = {"cases": cases, "num_batches": 2, "num_iterations": 1}
        comparisons.append(FakeComparison(f"c{len(comparisons)}", facts, **sizes))
    return write_run(root, comparisons, seed=len(permute))


@pytest.fixture(scope="module")
def drawings(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, pd.DataFrame | Exception]]:
    """Of directories that hold every case under two comparisons: all figures of both together, then of each."""
    root = tmp_path_factory.mktemp("two")
    roots = [_everything(root / permute, permute) for permute in ("fused", "unfused")]
    (together,) = gather(roots).found["layers"].values()
    assert len(together.cases) == 2 * len({case.case_id for case in together.cases})
    return [{name: _rows_of(name, run) for name in FIGURES} for run in (together, *map(load_run, roots))]


def _rows_of(name: str, run: Run) -> pd.DataFrame | Exception:
    """What a figure shows, without the titles that tell directories apart; or why it cannot be drawn."""
    try:
        with house_style("page"):
            rows = FIGURES[name](run).rows
    except Exception as error:
        return error
    rows = rows.drop(columns=["comparison", "other_keys"], errors="ignore")
    return rows[~rows["policy"].isin(["fitted line", "bound"])].sort_values(list(rows), ignore_index=True)


@pytest.mark.parametrize("name", FIGURES)
def test_two_directories_with_one_case_are_drawn_as_each_is_by_itself(name: str, drawings) -> None:
    together, *singles = (rows[name] for rows in drawings)
    assert isinstance(together, pd.DataFrame), together
    expected = pd.concat(singles)
    if name in ("timeline", "latency"):  # of one case
        expected = singles[len(together.merge(singles[0])) < len(singles[0])]
    expected = expected.sort_values(list(expected), ignore_index=True)
    pd.testing.assert_frame_equal(together, expected, check_dtype=False)
