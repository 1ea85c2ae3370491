"""What goes wrong overnight, injected: nothing hangs, finished cases stay readable, the lost one says why.

Of cases, and of everything around them: disks, signals, ranks that do not fit together, other jobs.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pandas as pd
import psutil
import pytest
import torch
from policy_cases import similarity_file
from test_run import cases_of, environment, free_port, launch, statuses, write_config

from moe_ep_bench import results
from moe_ep_bench.analysis.cases import cases, load
from moe_ep_bench.bench.inspection import LayerLook, Look
from moe_ep_bench.errors import CASES_FAILED, OK, USER_ERROR
from moe_ep_bench.policies import Routing
from moe_ep_bench.results import RunDirectory
from moe_ep_bench.runtime.attempts import collect_lost, lost_attempts

SOUND = torch.ones(2, 2)
UNSOUND = torch.tensor([[1.0, 1.0], [1.0, float("inf")]])


@pytest.mark.parametrize(
    ("layer", "where", "problem"),
    [
        (None, None, ""),
        (3, None, ""),
        (None, "gated_TE", "the gate's logits"),
        (3, "gated_TE", "the gate's logits, layer 3"),
        (3, "weights_TE", "routing weights, layer 3"),
        (3, "output_ND", "output, layer 3"),
        (None, "output", "output"),
        (3, "output", "the logits"),
    ],
)
def test_what_is_not_finite_is_named(layer: int | None, where: str | None, problem: str) -> None:
    at = {name: UNSOUND if name == where else SOUND for name in ("gated_TE", "weights_TE", "output_ND", "output")}
    routing = Routing(map_TE=SOUND.bool(), weights_TE=at["weights_TE"])
    seen = LayerLook(routing, gated_TE=at["gated_TE"], input_ND=SOUND, output_ND=at["output_ND"])
    assert Look(at["output"], {layer: seen}).problem == (problem and f"NaN or Inf in {problem}")


SMALL = {"workload__num_batches": 1, "measure__iterations": 2}
ENDLESS = {
    "workload__num_batches": 1, "measure__iterations": 65_536, "measure__timeout_s": 600,
    "policies": [{"name": "topk"}],
}  # fmt: skip


def run_alone(config: Path, out: Path, *of_python: str) -> subprocess.CompletedProcess:
    """``run`` on one rank, without torchrun."""
    command = [sys.executable, *of_python, "-m", "moe_ep_bench", "run", str(config), "--out", str(out)]
    env = {**environment(), **rank_environment(0, free_port(), world_size=1)}
    return subprocess.run(command, capture_output=True, text=True, timeout=500, env=env, check=False)


def rank_environment(rank: int, port: int, world_size: int) -> dict[str, str]:
    """What torchrun tells a rank."""
    torchrun = {
        "RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size,
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port,
    }  # fmt: skip
    return {key: str(value) for key, value in torchrun.items()}


def start_rank(config: Path, out: Path, rank: int, port: int, faults: str, *arguments: str) -> subprocess.Popen:
    """One of two ranks, as somebody's own torchrun would start it."""
    env = {**environment(faults), **rank_environment(rank, port, world_size=2)}
    command = [sys.executable, "-m", "moe_ep_bench", "run", str(config), "--out", str(out), *arguments]
    return subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True)


@contextlib.contextmanager
def started(config: Path, out: Path, *arguments: str, faults: str = "") -> Iterator[subprocess.Popen]:
    """A launched job on two ranks, in a session of its own, which is in the middle of timing."""
    command = [sys.executable, "-m", "moe_ep_bench", "run", "--nproc", "2", str(config), "--out", str(out), *arguments]
    job = subprocess.Popen(command, env=environment(faults), stderr=subprocess.PIPE, text=True, start_new_session=True)
    try:
        wait_until(lambda: [bool(tried(path)) for path in (out / "attempts").glob("now-*-*")] == [True, True], 300, job)
        time.sleep(0.3)
        yield job
    finally:
        for process in [*ranks_of(job), job]:  # Ranks hold the pipe open, also where a test stopped them and failed.
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        job.communicate()


def tried(path: Path) -> bytes:
    """The case that a rank's file names; empty where it names none yet."""
    lines, _, _ = path.read_bytes().partition(b"\0")
    return lines.partition(b"\n")[2].partition(b"\n")[0]


def wait_until(true: Callable[[], bool], seconds: float, job: subprocess.Popen | None = None) -> None:
    """Wait for what happens while the job runs, where one is named."""
    deadline = time.monotonic() + seconds
    while not true():
        assert job is None or job.poll() is None, f"the job ended before, with status {job.poll()}"
        assert time.monotonic() < deadline, f"nothing happened for {seconds} s"
        time.sleep(0.1)


def ranks_of(job: subprocess.Popen) -> list[psutil.Process]:
    """The ranks that torchrun has started, by rank: in the order of their start."""
    with contextlib.suppress(psutil.NoSuchProcess):
        ranks = [child for child in psutil.Process(job.pid).children() if child.status() != psutil.STATUS_ZOMBIE]
        return sorted(ranks, key=lambda child: (child.create_time(), child.pid))
    return []


def is_running(process: psutil.Process) -> bool:
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE


def hidden_files(root: Path) -> list[Path]:
    return [path for path in root.rglob("*") if path.name.startswith(".")]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 120 KB, which holds one comparison of three."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=120k", "tmpfs", str(disk)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("only root may mount a disk that is small, or one that cannot be written")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


KILLED = "ended without a word (killed, or out of memory) (rank 1) (2 attempts)"
OUT_OF_MEMORY = "out of memory: tried to allocate 20.00 GiB (a fault for tests)"
# Of each case: its fault, status and reason; a rank is lost twice before its case has one.
LOST_CASES = {
    "topk": ("hang_once@timed", "ok", None),  # The next job measured it.
    "token_drop capacity_factor=1.0": ("kill", "failed", KILLED),
    "expanded_drop capacity_factor=1.0": ("nan-scores", "failed", "before timing: "),  # By its map, or its output.
    "pruned k0=4": ("nan-gate", "failed", "before timing: rank 1: NaN or Inf in the gate's logits, batch 0"),
    "dynamic_skip beta=0.5": ("kill@timed", "failed", KILLED),
    "oea k0=4": ("oom@timed", "oom", f"{OUT_OF_MEMORY} (rank 1) (2 attempts)"),
    "lynx num_dropped=1": ("stray@timed", "timeout", "no progress for 0:00:08 in "),
    "load_only": ("late", "failed", "after timing: output differs from the dense reference"),
    "xshare k0=3 budget=5": ("hang", "timeout", "no progress for 0:00:08 in "),
}


@pytest.mark.slow
def test_lost_cases_and_numbers_that_are_none_become_rows_with_reasons_and_others_are_measured(tmp_path: Path) -> None:
    """In the check before timing, while timed, or after it: killed, out of memory, hanging for an hour, or wrong."""
    policies = [
        {"name": "topk"},
        *({"name": name, "capacity_factor": 1.0} for name in ("token_drop", "expanded_drop")),
        {"name": "pruned", "k0": 4},
        {"name": "dynamic_skip", "beta": 0.5},
        {"name": "oea", "k0": 4},
        {"name": "lynx", "num_dropped": 1},
        {"name": "load_only"},
        {"name": "xshare", "k0": 3, "budget": 5},
    ]
    config, out = write_config(tmp_path, **SMALL, measure__timeout_s=8, policies=policies), tmp_path / "out"
    faults = {label.split()[0]: fault for label, (fault, _, _) in LOST_CASES.items()}
    done = launch(config, "--out", out, faults=",".join("=".join(pair) for pair in faults.items()), timeout=580)
    assert done.returncode == CASES_FAILED, done.stderr
    assert "Traceback" not in done.stderr
    found = statuses(out)
    natives = dict.fromkeys(("native", "native again", "balanced"), ("", "ok", None))
    assert found.keys() == LOST_CASES.keys() | natives.keys()
    for label, (_, status, reason) in (LOST_CASES | natives).items():
        assert found[label][0] == status, found
        assert reason is None or found[label][1].startswith(reason), found
    rows = cases(load(out))
    (hung,) = rows[rows.label == "topk"].case_id
    (loss,) = lost_attempts(out / "attempts", hung)
    assert "timeout: no progress for 0:00:08 in _strike (rank 1)" in str(loss).split("; ")
    # The log shows where every thread of that rank stood.
    assert re.search(r'rank 1 stood here:\n[^#]* File ".*sitecustomize.py", line \d+ in _strike\n', done.stderr)
    assert hidden_files(out) == []


@pytest.mark.slow
def test_what_a_rank_raises_outside_of_collectives_costs_its_cases_alone_and_no_restart(tmp_path: Path) -> None:
    policies = [
        {"name": "topk"},
        {"name": "token_drop", "capacity_factor": 1.0},
        {"name": "oea", "k0": 4},
        {"name": "pruned", "k0": 4},
    ]
    faults = "build=oom,check=oom,token_drop=raise,oea=oom"
    settings = {"sweep": {"workload.seed": [1, 2]}, "measure__timeout_s": 30, "policies": policies}
    done = launch(write_config(tmp_path, **SMALL, **settings), "--out", tmp_path / "out", faults=faults)
    assert done.returncode == CASES_FAILED, done.stderr
    assert "Traceback" not in done.stderr
    assert "moe-ep-bench: rank 1: failed: ValueError: no kernel compiles here (a fault for tests)\n" in done.stderr
    assert list((tmp_path / "out" / "attempts").iterdir()) == []
    rows = cases_of(tmp_path / "out").drop_duplicates("case_id")
    assert rows.run_id.nunique() == 1, "one job measured it all"
    found = Counter(zip(rows.status, rows.reason.fillna(""), strict=True))
    assert found == {
        ("oom", f"while building: rank 1: {OUT_OF_MEMORY}"): 7,  # all cases of the first comparison
        ("failed", "before timing: rank 1: ValueError: no kernel compiles here (a fault for tests)"): 1,
        ("oom", f"before timing: rank 1: {OUT_OF_MEMORY}"): 2,  # by routing, and when it was checked
        ("ok", ""): 4,
    }


BATCH_WIDE = [
    {"name": "oea", "k0": 3},
    {"name": "xshare", "k0": 1, "budget": 8},
    {"name": "lynx", "num_dropped": 8},
    {"name": "budget_drop", "max_dropped": 0.3},
    {"name": "expert_drop", "fraction": 0.5},
    {"name": "sere", "k0": 1, "similarity": similarity_file(64)},
]


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["", "unheard"])
def test_a_batch_wide_policy_is_held_to_the_statistics_of_all_ranks(fault: str, tmp_path: Path) -> None:
    """Where one rank's are left out of the sum, all ranks route alike and compute rightly what they chose: wrong."""
    decode = {"workload__num_tokens": 16, "workload__sequence_length": 1, "workload__peak_load": None}
    config = write_config(tmp_path, **SMALL, **decode, policies=[{"name": "topk"}, *BATCH_WIDE])
    faults = ",".join(f"{spec['name']}={fault}" for spec in BATCH_WIDE if fault)
    done = launch(config, "--out", tmp_path / "out", faults=faults)
    assert done.returncode == (CASES_FAILED if fault else OK), done.stderr
    found = statuses(tmp_path / "out")
    lost = {label.split()[0]: reason for label, (status, reason) in found.items() if status != "ok"}
    wrong = "before timing: output differs from the dense reference by inf, allowed is 0.0001"
    assert lost == {spec["name"]: wrong for spec in BATCH_WIDE if fault}
    assert len(found) == 4 + len(BATCH_WIDE)


@pytest.mark.slow
def test_a_size_that_does_not_fit_is_a_row_of_every_case_after_two_starts(tmp_path: Path) -> None:
    """Native's first run is where memory runs out, between two collectives."""
    settings = {"measure__timeout_s": 30, "policies": [{"name": "topk"}, {"name": "pruned", "k0": 4}]}
    done = launch(write_config(tmp_path, **SMALL, **settings), "--out", tmp_path / "out", faults="native=oom")
    assert done.returncode == CASES_FAILED, done.stderr
    reason = f"{OUT_OF_MEMORY} (rank 1) (2 attempts)"
    assert set(statuses(tmp_path / "out").values()) == {("oom", reason)}
    assert len(statuses(tmp_path / "out")) == 5


@pytest.mark.slow
def test_a_full_disk_ends_the_run_in_one_line_and_leaves_what_was_written(small_disk: Path, tmp_path: Path) -> None:
    config, out = write_config(tmp_path, **SMALL, sweep={"workload.seed": [0, 1, 2]}), small_disk / "out"
    done = run_alone(config, out)
    assert done.returncode == USER_ERROR, done.stderr
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("moe-ep-bench: ")]
    assert line.startswith(f"moe-ep-bench: --out {out}: cannot write ")
    assert os.strerror(errno.ENOSPC) in line
    assert line.endswith("what is finished stays, the same command goes on from there")
    assert "Traceback" not in done.stderr
    kept = cases_of(out)
    assert set(kept.status) == {"ok"}
    assert kept.case_id.nunique() in (7, 14), "of whole comparisons"
    assert hidden_files(out) == []
    assert list((out / "attempts").iterdir()) == []  # No case is to blame.
    subprocess.run(["mount", "-o", "remount,size=16m", str(small_disk)], check=True)
    done = run_alone(config, out)
    assert done.returncode == OK, done.stderr
    assert cases(load(out, join_draws=False)).status.eq("ok").sum() == 21
    assert set(kept.run_id) < set(cases_of(out).run_id), "what was finished is not measured again"


def test_a_directory_that_cannot_be_written_is_refused_before_anything_runs(small_disk: Path) -> None:
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    with pytest.raises(ValueError, match=rf"--out {small_disk}/out: cannot write .*: {os.strerror(errno.EROFS)}$"):
        RunDirectory(small_disk / "out").check_agreement({})


@pytest.mark.slow
def test_half_written_parts_are_measured_again(tmp_path: Path) -> None:
    config, out = write_config(tmp_path, **SMALL), tmp_path / "out"
    done = run_alone(config, out, "-X", "utf8")  # The only process of this file that is not forked.
    assert done.returncode == OK, done.stderr
    assert "Warning" not in done.stderr, "importing Megatron-Core is silent"
    first = min(json.loads((out / "run.json").read_text())["cases"])
    (samples,), (routing,) = ((out / folder).iterdir() for folder in ("cases", "routing"))
    for part in (samples, routing):
        part.write_bytes(part.read_bytes()[:-100])
    begun = samples.with_name(f".{samples.name}.abc")  # As a job leaves it that is killed while it writes.
    begun.write_bytes(b"PAR1")
    (out / "attempts" / f".{first}.json.abc").touch()
    (out / "attempts" / f"{first}.json").write_text('["failed: a ra')
    done = run_alone(config, out)
    assert done.returncode == OK, done.stderr
    assert cases(load(out)).status.eq("ok").all()
    assert pd.read_parquet(routing).case_id.nunique() == 7
    assert hidden_files(out) == []


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["asked to end", "torchrun is killed", "one rank alone is asked to end"])
def test_ranks_end_with_torchrun_and_begin_again_without_one_of_them_and_no_case_is_blamed(
    fault: str, tmp_path: Path
) -> None:
    config, out = write_config(tmp_path, **ENDLESS), tmp_path / "out"
    with started(config, out) as job:
        ranks = ranks_of(job)
        assert len(ranks) == 2
        if fault == "one rank alone is asked to end":
            ranks[1].terminate()
            wait_until(lambda: len(ranks_of(job)) == 2 and not set(ranks) & set(ranks_of(job)), 300)
            ranks = ranks_of(job)
        os.kill(job.pid, signal.SIGKILL if fault == "torchrun is killed" else signal.SIGTERM)
        if fault != "torchrun is killed":
            check_stopped(job, signal.SIGTERM)
        wait_until(lambda: not any(map(is_running, ranks)), 200)
    check_nobody_is_blamed(out)


def check_stopped(job: subprocess.Popen, number: signal.Signals) -> None:
    _, errors = job.communicate(timeout=600)
    assert job.returncode == 128 + number, errors
    assert "Traceback" not in errors


def check_nobody_is_blamed(out: Path) -> None:
    """By the next start, which finds no lock."""
    for comparison_id in json.loads((out / "run.json").read_text())["comparisons"]:
        collect_lost(out / "attempts", [comparison_id])
        assert not results.is_held(out, comparison_id)
    assert [path.read_text() for path in (out / "attempts").iterdir()] == []


@pytest.mark.slow
def test_two_jobs_fill_one_directory_where_their_comparisons_differ_and_ctrl_c_ends_one(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with started(write_config(tmp_path, **ENDLESS), out) as job:
        ranks = ranks_of(job)
        for rank in ranks:  # They hold their lock, and leave the cores to the others.
            rank.suspend()
        same = launch(tmp_path / "config.yaml", "--out", out)
        assert same.returncode == USER_ERROR, same.stderr
        (line,) = [line for line in same.stderr.splitlines() if line.startswith("moe-ep-bench: --out ")]
        assert f"another job is writing this, process {ranks[0].pid} on " in line
        (tmp_path / "other").mkdir()
        other = run_alone(write_config(tmp_path / "other", **SMALL), out)
        assert other.returncode == OK, other.stderr
        for rank in ranks:
            rank.resume()
        assert job.poll() is None
        assert len(list((out / "attempts").glob("now-*"))) == 2  # The first job's.
        os.killpg(job.pid, signal.SIGINT)  # Ctrl-C
        check_stopped(job, signal.SIGINT)
        assert not any(map(is_running, ranks))
    check_nobody_is_blamed(out)
    run = json.loads((out / "run.json").read_text())
    assert len(run["comparisons"]) == 2
    assert len(cases_of(out).case_id.unique()) == 7


@pytest.mark.parametrize("unlike", ["torch", "the config"])
def test_ranks_that_are_unlike_refuse_together(unlike: str, tmp_path: Path) -> None:
    config, port, out, jobs = write_config(tmp_path), free_port(), tmp_path / "out", []
    for rank in range(2):
        how = ("torch=1.0",) if unlike == "torch" else ("", f"--set=workload.seed={rank}")
        jobs.append(start_rank(config, out, rank, port, *how))
    errors = [job.communicate(timeout=600)[1] for job in jobs]
    assert [job.returncode for job in jobs] == [USER_ERROR, USER_ERROR], errors
    first, second = errors
    assert first.startswith(f"moe-ep-bench: {unlike} is not the same on all ranks: rank 1 has ")
    assert unlike == "the config" or f" 1.0, rank 0 {torch.__version__}; start all ranks alike" in first
    assert (first.count("\n"), second) == (1, "")
    assert not out.exists()


@pytest.mark.slow
def test_a_short_soak_leaves_nothing_behind(tmp_path: Path) -> None:
    soak = Path(__file__).parents[1] / "benchmarks" / "soak.py"
    command = [sys.executable, str(soak), "--cases", "40", "--out", str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=environment(), check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "40 of 40 cases measured" in done.stdout
    assert done.stdout.count(" MiB over ") == 3  # Two ranks and torchrun.
