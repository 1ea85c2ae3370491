"""Parts appear whole or not at all, what was lost is remembered, and a comparison has one writer."""

from __future__ import annotations

import contextlib
import errno
import json
import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from test_run import environment
from torch.distributed import DistBackendError

from moe_ep_bench import files
from moe_ep_bench.bench.commands import pending_cases
from moe_ep_bench.errors import UserError
from moe_ep_bench.files import atomic_path, write_json
from moe_ep_bench.results import RunDirectory, _as_array, hold, is_held, lock_file
from moe_ep_bench.runtime.attempts import Guard, Loss, collect_lost, lost_attempts
from moe_ep_bench.schema import SAMPLES_SCHEMA, SCHEMA_VERSION

A_JOB = {"schema_version": SCHEMA_VERSION, "mode": "run", "environment": {}, "hashes": {}}
NCCL = "NCCL error in: ProcessGroupNCCL.cpp:77, {}, NCCL version 2.28.3\n{}"


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried 20 GiB"), "oom: "),
        (RuntimeError("CUDA error: out of memory\nCompile with ..."), "oom: "),
        (DistBackendError(NCCL.format("unhandled cuda error", "Cuda failure 2 'out of memory'")), "oom: "),
        (DistBackendError(NCCL.format("unhandled system error", "NET/IB: Got completion with status=12")), "failed: "),
        (RuntimeError("CUDA error: uncorrectable NVLink error detected"), "failed: "),
        (DistBackendError(NCCL.format("remote process exited", "ncclRemoteError: A call failed")), "peer lost: "),
        (
            DistBackendError(NCCL.format("system error", "socketProgress: Connection closed by remote peer")),
            "peer lost: ",
        ),
        (RuntimeError("[gloo] Connection closed by peer [127.0.0.1]:4321"), "peer lost: "),
        (MemoryError("out of memory"), "failed: "),
    ],
)
def test_a_ranks_own_error_is_not_its_peers(error: Exception, reason: str) -> None:
    assert str(Loss.of(error)).startswith(reason)


def test_a_write_that_fails_leaves_what_was_there_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "part.json"
    write_json(path, {"z": 1, "first": 2})
    assert path.read_text() == '{\n  "first": 2,\n  "z": 1\n}\n', "equal content has equal bytes"
    write_json(path, {"first": 1})
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_json(path, {"second": float("nan")})
    with pytest.raises(RuntimeError, match="midway"):
        fail_after_half(path)
    with pytest.raises(RuntimeError, match="midway"):
        fail_after_half(tmp_path / "new.json")
    assert json.loads(path.read_text()) == {"first": 1}
    assert list(tmp_path.iterdir()) == [path]


def write_text(path: Path, text: str) -> None:
    with atomic_path(path) as temporary:
        temporary.write_text(text)


def fail_after_half(path: Path) -> None:
    with atomic_path(path) as temporary:
        temporary.write_text("half")
        raise RuntimeError("midway")


def test_a_file_that_cannot_be_made_is_named_not_its_temporary_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused = OSError(errno.EROFS, "Read-only file system", str(tmp_path / ".table.csv.x1"))
    monkeypatch.setattr(files.tempfile, "mkstemp", mock.Mock(side_effect=refused))
    with pytest.raises(OSError, match="Read-only") as raised:
        write_text(tmp_path / "table.csv", "")
    assert raised.value.filename == str(tmp_path / "table.csv")


def test_a_link_stays_and_the_file_that_it_leads_to_is_written(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("data/below/new")
    for text in ("one", "two"):
        write_text(tmp_path / "link", text)
        assert (tmp_path / "data" / "below" / "new").read_text() == text
    assert (tmp_path / "link").is_symlink()
    assert sorted(tmp_path.rglob(".*")) == []


def test_what_is_no_file_is_refused_and_stays() -> None:
    with pytest.raises(UserError, match=r"\A/dev/null: expected a regular file\Z"):
        write_text(Path("/dev/null"), "text")
    assert not Path("/dev/null").is_file()


def test_a_second_run_keeps_what_run_json_knew_of_other_cases(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    for run_id, case, comparison in (("1", "a", "x"), ("2", "b", "y"), ("3", "c", "z")):
        description = {**A_JOB, "run_id": run_id, "hashes": {"code": run_id}, "comparisons": {comparison: {}}}
        directory.write_run({**description, "cases": {case: {"comparison_id": comparison}}})
        # b never finished: there is no launch 0 of it.
        directory.write("samples", comparison, [{"case_id": case, "status": "ok"}], launch=int(case == "b"))
    run = json.loads(directory.run_json.read_text())
    assert run["run_id"] == "3"
    assert list(run["cases"]) == ["a", "c"]
    assert list(run["comparisons"]) == ["x", "z"]
    assert list(directory.parts("samples")) == ["x", "z"], "its parts go with it"
    assert {run_id: provenance["hashes"] for run_id, provenance in run["runs"].items()} == {
        number: {"code": number} for number in "123"
    }
    directory.write_run({**A_JOB, "run_id": "4", "comparisons": {"x": {}}, "cases": {"a": {"comparison_id": "x"}}})
    assert set(json.loads(directory.run_json.read_text())["comparisons"]) == {"x", "z"}, "z follows x and is kept"


def test_rows_of_some_cases_take_the_place_of_the_same_and_others_stay(tmp_path: Path) -> None:
    directory, conditions = RunDirectory(tmp_path), {"warm_up": 3}
    assert directory.statuses("x", 0) == {}
    rows = [{"case_id": case, "run_id": "1", "status": "ok", "time_us": [1.0, 2.0]} for case in "abc"]
    directory.write("samples", "x", rows, 0, conditions=conditions)
    directory.write("samples", "x", [{"case_id": "d", "status": "ok"}], 1)
    directory.write("samples", "x", [{"case_id": "b", "run_id": "2", "status": "oom"}], 0, replaces=["b"])
    found = pq.read_table(directory.path("samples", "x", 0))
    assert json.loads(directory.conditions("x", 0).read_text()) == conditions
    assert set(found["launch"].to_pylist()) == {0}
    assert found["host_us"].null_count == len(found), "a column that rows lack"
    assert found.schema.equals(SAMPLES_SCHEMA)
    assert list(zip(found["case_id"].to_pylist(), found["run_id"].to_pylist(), strict=True)) == [
        ("a", "1"), ("a", "1"), ("c", "1"), ("c", "1"), ("b", "2"),
    ]  # fmt: skip
    assert directory.statuses("x", 0) == {"a": "ok", "b": "oom", "c": "ok"}
    assert directory.statuses("x", 1) == {"d": "ok"}
    assert directory.parts("samples") == {"x": [directory.path("samples", "x", launch) for launch in (0, 1)]}
    directory.write("samples", "x", rows[:1], 0)
    assert directory.statuses("x", 0) == {"a": "ok"}, "written anew"
    assert not directory.conditions("x", 0).exists()
    directory.path("samples", "x", 0).write_bytes(b"PAR1")
    assert directory.statuses("x", 0) == {}
    directory.write("samples", "x", rows[1:2], 0, replaces=["b"])
    assert directory.statuses("x", 0) == {"b": "ok"}, "what cannot be read goes"
    directory.remove("x")
    assert directory.parts("samples") == {}


@pytest.mark.parametrize(
    "rows",
    [
        [np.array([1, 2]), np.array([], np.int64), np.array([3])],
        [np.array([1, 2], np.int32)],
        [np.array([1]), None],
        [[1, 2], [3]],
        [],
    ],
)
def test_numbers_of_rows_are_put_together_as_arrow_would(rows: list[Any]) -> None:
    dtype = pa.list_(pa.int64())
    assert _as_array(rows, dtype).equals(pa.array(rows, dtype))


def test_rows_of_other_columns_make_room_for_those_of_today(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    path = directory.path("samples", "x", 0)
    path.parent.mkdir()
    pq.write_table(pa.table({"case_id": ["a"], "status": ["ok"]}), path)
    directory.write("samples", "x", [{"case_id": "b", "status": "ok"}], 0, replaces=["b"])
    assert directory.statuses("x", 0) == {"b": "ok"}


PEER, DIED = "peer lost: closed", "failed: ended without a word (killed, or out of memory)"
HUNG = "timeout: no progress for 0:00:06 in"
# What ``faulthandler`` writes where nothing moved, and at SIGTERM.
FRAMES = '(most recent call first):\n  File "b.py", line 3 in {}\n  File "c.py", line 1 in main\n'
THREADS = f"Thread 0x00007f64 {FRAMES.format('beside')}\n{{}} 0x00007f65 {FRAMES}"
OVERDUE, ASKED = f"Timeout (0:00:06)!\n{THREADS.format('Thread', '{}')}", THREADS.format("Current thread", "{}")
# What ranks left (how many cases they had begun, the last one, a reason or stacks), and the attempt that is recorded.
LOST_JOBS = {
    "who failed on its own is the cause": ([(1, "case", PEER), (1, "case", "oom: 20 GiB")], "oom: 20 GiB (rank 1)"),
    "else who died": ([(2, "later", PEER), (1, "case", "")], f"{DIED} (rank 1)"),
    "one failed, and another died": ([(1, "case", "failed: x"), (1, "case", "")], "failed: x (rank 0)"),
    "all died": ([(1, "case", "")] * 2, f"{DIED} (rank 0, 1)"),
    "of those where one was overdue, who is behind": (
        [(2, "later", OVERDUE.format("wait")), (1, "case", ASKED.format("sleep"))], f"{HUNG} sleep (rank 1)",
    ),
    "all hang": (
        [(1, "case", ASKED.format("wait")), (1, "case", OVERDUE.format("sleep")), (1, "case", ASKED.format("wait"))],
        f"{HUNG} wait (rank 0, 2); {HUNG} sleep (rank 1)",
    ),
    "who was overdue, and who lost it": ([(1, "case", PEER), (1, "case", OVERDUE.format("x"))], f"{HUNG} x (rank 1)"),
    "all lost their peers": ([(1, "case", PEER), (2, "later", PEER)], f"{PEER} (rank 0)"),
    "stopped, and one died": ([(1, "case", ASKED), (1, "case", "")], f"{DIED} (rank 1)"),
    "stopped": ([(1, "case", ASKED), (1, "case", PEER)], None),
    "ran nothing": ([(0, "", "")], None),
}  # fmt: skip


def loss(text: str) -> Loss:
    kind, _, words = text.partition(": ")
    return Loss(kind, words)


def said_of(folder: Path, case_id: str) -> list[str]:
    return list(map(str, lost_attempts(folder, case_id)))


@pytest.mark.parametrize("name", LOST_JOBS)
def test_the_reason_is_the_one_who_failed_not_those_who_noticed(name: str, tmp_path: Path) -> None:
    left, expected = LOST_JOBS[name]
    for rank, (count, case_id, why) in enumerate(left):
        attempt = Guard(tmp_path, "job", rank, 60.0)
        for name in ["earlier"] * (count - 1) + [case_id] * (count > 0):
            attempt.at(name)
        if "Thread" in why:
            os.write(attempt._file, why.encode())
        elif why:
            attempt.explain(loss(why))
    collect_lost(tmp_path, ["another"])
    assert len(list(tmp_path.iterdir())) == len(left), "they are another job's"
    collect_lost(tmp_path, ["job"])
    assert said_of(tmp_path, "case") == [expected] * (expected is not None)
    assert [path.name for path in tmp_path.iterdir()] == ["case.json"] * (expected is not None)


def test_attempts_add_up_the_first_explanation_stays_and_one_taken_back_blames_nobody(tmp_path: Path) -> None:
    for reason in ("timeout: one", "timeout: two"):
        attempt = Guard(tmp_path, "job", 0, 60.0)
        attempt.at("a longer name")
        attempt.at("case")
        attempt.explain(loss(reason))
        attempt.explain(loss("peer lost: later"))
        collect_lost(tmp_path, ["job"])
    assert said_of(tmp_path, "case") == ["timeout: one (rank 0)", "timeout: two (rank 0)"]
    attempt = Guard(tmp_path, "job", 0, 60.0)
    attempt.at("case")
    attempt.explain(loss("failed: it cannot be captured"))
    attempt.at("second")  # Ranks have agreed on that, and gone on.
    collect_lost(tmp_path, ["job"])
    assert len(lost_attempts(tmp_path, "case")) == 2
    assert said_of(tmp_path, "second") == [f"{DIED} (rank 0)"]
    with Guard(tmp_path, "job", 0, 60.0) as ended:
        ended.at("third")
    (tmp_path / "now-job-0").touch()  # As a disk leaves it that is full.
    collect_lost(tmp_path, ["job"])
    assert lost_attempts(tmp_path, "third") == []
    for damaged in ('[["failed", "o', '["failed: of an earlier version"]', "[1]"):
        (tmp_path / "case.json").write_text(damaged)
        assert lost_attempts(tmp_path, "case") == [], "a damaged list is none"


def test_force_begins_anew_with_the_first_launch_and_what_was_lost_twice_is_not_tried_again(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    comparison = SimpleNamespace(
        comparison_id="x", table="samples", cases=[SimpleNamespace(case_id=case) for case in "ab"]
    )

    def left(launch: int, *, force: bool = False) -> tuple[list[str], list[str]]:
        (found,) = pending_cases(directory, [comparison], launch, force=force)
        return found.case_ids, [f"{status}: {words}" for status, words in found.lost.values()]

    for launch in (0, 1):
        assert left(launch) == (["a", "b"], [])
        directory.write("samples", "x", [{"case_id": case, "status": "ok"} for case in "ab"], launch)
        assert left(launch) == ([], [])
    assert left(1, force=True) == ([], []), "the first launch of this very job would go"
    assert left(0, force=True) == (["a", "b"], [])
    assert directory.parts("samples") == {}
    write_json(directory.attempts / "b.json", [Loss("failed", "x"), Loss("oom", "20 GiB (rank 1)")])
    assert left(0) == (["a"], ["oom: 20 GiB (rank 1) (2 attempts)"])
    write_json(directory.attempts / "x.json", [Loss("failed", "y")] * 3)
    assert left(0) == ([], ["failed: y (3 attempts)"] * 2), "the whole comparison was"
    assert left(0, force=True) == (["a", "b"], [])


def test_a_comparison_that_is_done_has_its_place_among_those_that_are_not(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    cases = {name: [SimpleNamespace(case_id=f"{name}{number}") for number in "01"] for name in "xyz"}
    points: Any = [SimpleNamespace(comparison_id=name, table="samples", cases=of) for name, of in cases.items()]
    directory.write("samples", "y", [{"case_id": f"y{n}", "status": "ok"} for n in "01"], 0)
    found = [one.case_ids for one in pending_cases(directory, points, 0, force=False)]
    assert found == [["x0", "x1"], [], ["z0", "z1"]]


def test_a_comparison_that_another_job_is_at_is_not_dropped_from_the_description(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)

    def description(name: str) -> dict[str, object]:
        cases = {name: {"comparison_id": name}}
        return {**A_JOB, "run_id": name, "comparisons": {name: {}}, "cases": cases}

    directory.write_run(description("mine"))
    with hold(tmp_path, {"mine": "mine"}):
        directory.write_run(description("yours"))
    assert set(json.loads(directory.run_json.read_text())["comparisons"]) == {"mine", "yours"}
    directory.write_run(description("yours"))
    assert set(json.loads(directory.run_json.read_text())["comparisons"]) == {"yours"}
    assert [path.name for path in tmp_path.iterdir()] == ["run.json"]


def test_what_a_killed_job_had_begun_to_write_goes_and_nothing_else(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    begun = [tmp_path / name for name in ("cases/.mine-0.parquet.x1", "routing/.mine.parquet.x2", ".run.json.x3")]
    others = [tmp_path / name for name in ("cases/.yours-0.parquet.x4", "cases/mine-0.parquet")]
    for path in (*begun, *others):
        path.parent.mkdir(exist_ok=True)
        path.touch()
    directory.remove_unfinished(["mine", "run.json"])
    assert not any(path.exists() for path in begun)
    assert all(path.exists() for path in others)


def write_points(root: Path, points: Sequence[int]) -> None:
    for point in points:
        comparison, case = f"comparison-{point}", f"case-{point}"
        description = {**A_JOB, "run_id": str(point), "comparisons": {comparison: {}}}
        RunDirectory(root).write("samples", comparison, [{"case_id": case, "status": "ok"}], launch=0)
        RunDirectory(root).write_run({**description, "cases": {case: {"comparison_id": comparison}}})


def test_jobs_that_fill_one_directory_at_once_are_all_in_its_run_json(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")  # or each would import torch
    writers = [context.Process(target=write_points, args=(tmp_path, range(k, 24, 3))) for k in range(3)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(60)
    assert [writer.exitcode for writer in writers] == [0, 0, 0]
    run = json.loads(RunDirectory(tmp_path).run_json.read_text())
    assert set(run["comparisons"]) == {f"comparison-{point}" for point in range(24)}
    assert set(run["cases"]) == {f"case-{point}" for point in range(24)}
    assert len(run["runs"]) == 24


# ---- what may lie in one directory -----------------------------------------------------------------------------------

CONDITIONS = {"torch": "2.0", "device_name": "a processor"}
NOW = {"mode": "run", "scope": "layer", **CONDITIONS, "code": "today's"}


def leave_results(root: Path, mode: str = "run", scope: str = "layer", code: str = "", **more: str) -> RunDirectory:
    """A directory as an earlier command left it, of this code where nothing else is said."""
    about = {"schema_version": SCHEMA_VERSION, "mode": mode, "scope": scope, "hashes": {"code": code or NOW["code"]}}
    rows = {"run_id": "r", "comparisons": {}, "cases": {}}
    write_json(root / "run.json", {**about, "environment": {**CONDITIONS, **more}, **rows})
    return RunDirectory(root)


def files_in(root: Path) -> set[str]:
    return {path.name for path in root.iterdir()}


# What an earlier command left that was otherwise, how a line says so, and whether --force takes its place.
OTHERWISE = {
    "mode": ({"mode": "route"}, "mode route, here it is run; choose another directory$", False),
    "scope": ({"scope": "model"}, "scope model, here it is layer; choose another directory$", False),
    "package": ({"torch": "1.0"}, "torch 1.0, here it is 2.0; choose another directory$", False),
    "code": ({"code": "older"}, "code older, here it is .*; choose another directory or --force$", True),
    "nothing": ({"hostname": "elsewhere"}, "", True),
}


@pytest.mark.parametrize("what", OTHERWISE)
@pytest.mark.parametrize("force", [False, True])
def test_a_directory_holds_one_mode_scope_code_and_set_of_conditions(what: str, force: bool, tmp_path: Path) -> None:
    left, message, forced = OTHERWISE[what]
    directory, before = leave_results(tmp_path, **left), files_in(tmp_path)
    fits = not message or (force and forced)
    with contextlib.nullcontext() if fits else pytest.raises(ValueError, match=f"holds results with {message}"):
        directory.check_agreement(NOW if not force else {key: value for key, value in NOW.items() if key != "code"})
    assert files_in(tmp_path) == before


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("{", "expected JSON, got .{. "),
        (f'{{"schema_version": {SCHEMA_VERSION}, "mode": "run"}}', "run_id: Field required"),
        ("[]", f"schema_version: expected {SCHEMA_VERSION}, got None; another version of this program wrote it"),
        ('{"schema_version": 5, "mode": "run"}', f"schema_version: expected {SCHEMA_VERSION}, got 5; another version"),
    ],
)
def test_a_description_that_is_none_is_named(content: str, problem: str, tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text(content)
    with pytest.raises(ValueError, match=f"run.json: {problem}"):
        RunDirectory(tmp_path).check_agreement(NOW)


def test_a_new_directory_is_made_and_a_file_in_its_place_is_refused(tmp_path: Path) -> None:
    RunDirectory(tmp_path / "a" / "b").check_agreement(NOW)
    assert files_in(tmp_path / "a" / "b") == set()
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=f"--out {tmp_path}/file: is a file; expected a directory"):
        RunDirectory(tmp_path / "file").check_agreement(NOW)


def test_a_file_is_on_the_disk_before_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a machine that loses power leaves an empty file under a finished file's name."""
    done, fsync, replace = [], os.fsync, Path.replace

    def synced(descriptor: int) -> None:
        done.append(("synced", os.fstat(descriptor).st_size))
        fsync(descriptor)

    def renamed(path: Path, target: Path) -> Path:
        done.append(("renamed", path.stat().st_size))
        return replace(path, target)

    monkeypatch.setattr(files.os, "fsync", synced)
    monkeypatch.setattr(Path, "replace", renamed)
    write_json(tmp_path / "a.json", {"whole": True})
    size = (tmp_path / "a.json").stat().st_size
    assert done == [("synced", size), ("renamed", size)]


# ---- locks -----------------------------------------------------------------------------------------------------------

HOLDER = """
import sys, time
from pathlib import Path
from types import SimpleNamespace
from moe_ep_bench.results import hold
with hold(Path(sys.argv[1]), {"one": "one"}):
    print("held", flush=True)
    time.sleep(float(sys.argv[2]))
"""


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[subprocess.Popen]:
    """Another process that holds the lock ``one``."""
    command = [sys.executable, "-c", HOLDER, str(tmp_path), "60"]
    other = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment())
    assert other.stdout is not None
    assert other.stdout.readline() == "held\n"
    yield other
    other.kill()
    other.communicate()


def test_what_another_job_holds_is_refused_by_its_name(holder: subprocess.Popen, tmp_path: Path) -> None:
    assert is_held(tmp_path, "one")
    expected = rf"--out {tmp_path}: a title: another job is writing this, process {holder.pid} on .*, begun 20.* UTC;"
    with pytest.raises(ValueError, match=expected), hold(tmp_path, {"one": "a title"}, patience_s=0.2):
        pass
    with hold(tmp_path, {"two": "another"}, patience_s=0.0):
        assert not is_held(tmp_path, "three")
    with pytest.raises(ValueError, match="another job"), hold(tmp_path, {"two": "", "one": ""}, patience_s=0.0):
        pass
    assert not is_held(tmp_path, "two"), "nothing stays held where one of several is refused"
    assert not lock_file(tmp_path, "two").exists()


def test_the_lock_of_a_job_that_was_killed_is_taken_over(holder: subprocess.Popen, tmp_path: Path) -> None:
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    assert lock_file(tmp_path, "one").exists()
    assert not is_held(tmp_path, "one")
    with hold(tmp_path, {"one": "one"}, patience_s=0.0):
        assert is_held(tmp_path, "one")
    assert not is_held(tmp_path, "one")


def test_a_successor_waits_for_a_job_that_is_just_ending(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HOLDER, str(tmp_path), "0.5"]
    other = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment())
    assert other.stdout is not None
    other.stdout.readline()
    with hold(tmp_path, {"one": "one"}, patience_s=30.0):
        pass
    other.communicate()
    assert other.returncode == 0
    assert not is_held(tmp_path, "one")
