"""slurm/'s scripts under a real Slurm of two nodes (``slurm_cluster``): ``pytest -m slurm``, as root.

Routing is a pure function of config and workload, so rows of routing are compared exactly; times are not.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pandas as pd
import pyarrow.parquet as pq
import pytest
from slurm_cluster import Cluster, cluster, wait_for, why_not
from test_run import TESTS, launch, write_config

from moe_ep_bench.analysis.load import load_run
from moe_ep_bench.exit_codes import CASES_FAILED, CLOSED, OK, USER_ERROR

pytestmark = pytest.mark.slurm

ALL_DONE = ("COMPLETED", "0:0")
SMALL = {
    "policies": [{"name": "topk"}, {"name": "token_drop", "capacity_factor": 1.0}],
    "measure": {"iterations": 1, "breakdown_iterations": 1, "max_warmup": 1, "timeout_s": 100},
    "workload__num_batches": 2,
}
NUM_CASES = 5  # native, native again, two policies, native with balanced scores
SEEDS = {"workload.seed": [1, 2]}


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)
    with cluster(tmp_path_factory.mktemp("slurm")) as running:
        yield running


@pytest.fixture(autouse=True)
def no_job_outlives_its_test(slurm: Cluster) -> Iterator[None]:
    yield
    slurm.command("scancel", "--user=root")
    wait_for("empty queue", lambda: slurm.command("squeue", "--noheader") == "", 60)


def routing_of(out: Path) -> pd.DataFrame:
    rows = pd.concat(pd.read_parquet(path) for path in sorted((out / "routing").glob("*.parquet")))
    rows = rows.drop(columns=["run_id", "reference_error", "output_error"])
    return rows.sort_values(["case_id", "rank", "batch"]).reset_index(drop=True)


def parts(out: Path) -> dict[str, int]:
    """Every part of samples, all of them good, with when it was written."""
    found = {}
    for path in (out / "cases").glob("*.parquet"):
        assert set(pq.read_table(path)["status"].to_pylist()) == {"ok"}
        found[path.name] = path.stat().st_mtime_ns
    return found


def underway(out: Path) -> list[str]:
    """What ranks are at, as their marks say."""
    marks = [path.read_bytes()[:64].rstrip(b"\0").decode() for path in out.glob("attempts/now-*")]
    return [mark for mark in marks if mark]


def faulty(fault: str) -> dict[str, str]:
    """Variables of a job in which a fault strikes (tests/faults)."""
    return {"MOE_EP_BENCH_FAULTS": fault, "PYTHONPATH": f"{TESTS.parent}:{TESTS / 'faults'}"}


def test_two_nodes_give_the_routing_rows_of_one(slurm: Cluster, tmp_path: Path) -> None:
    config = write_config(tmp_path, **SMALL)
    two = slurm.submit("bench.sbatch", config, "--out", tmp_path / "two", options=("--nodes=2",))
    one = slurm.submit("bench.sbatch", config, "--out", tmp_path / "one", NPROC=2)
    for job in (two, one):
        assert slurm.finish(job) == ALL_DONE, slurm.printed(job)
    pd.testing.assert_frame_equal(routing_of(tmp_path / "two"), routing_of(tmp_path / "one"))
    assert len(parts(tmp_path / "two")) == NUM_CASES


def test_the_status_that_all_ranks_agree_on_is_the_jobs(slurm: Cluster, tmp_path: Path) -> None:
    config = write_config(tmp_path, **SMALL)
    wrong = slurm.submit(
        "bench.sbatch", config, "--out", tmp_path / "out", options=("--nodes=2",), **faulty("token_drop=wrong")
    )
    assert slurm.finish(wrong) == ("FAILED", f"{CASES_FAILED}:0"), slurm.printed(wrong)
    mistake = slurm.submit("bench.sbatch", config, "--set", "layer.seed=-1", options=("--nodes=2",))
    assert slurm.finish(mistake) == ("FAILED", f"{USER_ERROR}:0"), slurm.printed(mistake)
    assert "layer.seed" in slurm.printed(mistake)


def test_a_rank_that_dies_on_one_node_costs_its_case_and_not_the_job(slurm: Cluster, tmp_path: Path) -> None:
    config = write_config(tmp_path, **SMALL)
    job = slurm.submit(
        "bench.sbatch", config, "--out", tmp_path / "out", options=("--nodes=2",), **faulty("token_drop=kill")
    )
    assert slurm.finish(job, 300) == ("FAILED", f"{CASES_FAILED}:0"), slurm.printed(job)
    found = [pq.read_table(path)["status"].to_pylist()[0] for path in (tmp_path / "out" / "cases").glob("*.parquet")]
    assert sorted(found) == ["failed", *["ok"] * (NUM_CASES - 1)]


def scancel(slurm: Cluster, job: str) -> None:
    slurm.command("scancel", job)
    assert slurm.finish(job)[0] == "CANCELLED"


def end_of_time(slurm: Cluster, job: str) -> None:
    soon = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(time.time() + 1))
    slurm.command("scontrol", "update", f"JobId={job}", f"EndTime={soon}")
    assert slurm.finish(job)[0] == "TIMEOUT"


def requeue(slurm: Cluster, job: str) -> None:
    slurm.command("scontrol", "requeue", job)


def crash(slurm: Cluster, job: str) -> None:
    slurm.crash_node("n2")
    wait_for("Slurm's notice", lambda: slurm.node_state("n2").startswith("down"), 60)
    slurm.start_node("n2")


@pytest.mark.parametrize(
    ("interrupt", "goes_on_alone"),
    [(scancel, False), (end_of_time, False), (requeue, True), (crash, True)],
    ids=["scancel", "time limit", "requeue", "node down"],
)
def test_an_interrupted_job_keeps_what_is_finished_and_then_does_only_the_rest(
    interrupt: Callable[[Cluster, str], None], goes_on_alone: bool, slurm: Cluster, tmp_path: Path
) -> None:
    # The second comparison hangs until it is interrupted: one rank asleep, the other in a collective.
    config, out = write_config(tmp_path, **SMALL, sweep=SEEDS), tmp_path / "out"
    job = slurm.submit(
        "bench.sbatch", config, "--out", out, options=("--nodes=2",), REQUEUES=1, **faulty("token_drop=hang_later")
    )
    wait_for("the second comparison", lambda: len(parts(out)) == NUM_CASES and len(underway(out)) == 2, 120)
    time.sleep(3)  # Until it hangs.
    kept = parts(out)
    interrupt(slurm, job)
    if not goes_on_alone:
        wait_for("end of all processes", lambda: not slurm.processes_of(job), 30)
        assert not list(out.glob("attempts/now-*")), "what was asked to end takes the blame for nothing"
        job = slurm.submit("bench.sbatch", config, "--out", out, options=("--nodes=2",))
    assert slurm.finish(job, 240) == ALL_DONE, slurm.printed(job)
    done = parts(out)
    assert len(done) == NUM_CASES * 2
    assert {name: done[name] for name in kept} == kept, "finished cases were measured again"
    if interrupt is not crash:
        assert not list(out.glob("attempts/*.json"))
    assert len(load_run(out).comparisons) == 2


def test_a_job_whose_time_is_nearly_up_finishes_what_it_measures_and_requeues_itself(
    slurm: Cluster, tmp_path: Path
) -> None:
    config, out = write_config(tmp_path, **SMALL, sweep=SEEDS), tmp_path / "out"
    job = slurm.submit("bench.sbatch", config, "--out", out, options=("--nodes=2",), REQUEUES=1)
    wait_for("the first comparison", lambda: len(underway(out)) == 2, 120)
    # What --signal=USR1@300 sends; Slurm looks at times only twice a minute.
    slurm.command("scancel", "--signal=USR1", job)
    wait_for("the job's own requeue", lambda: int(slurm.job(job)["Restarts"]) == 1, 90)
    kept = parts(out)
    assert len(kept) == NUM_CASES, "it finished one comparison and began no other"
    assert slurm.finish(job) == ALL_DONE, slurm.printed(job)
    done = parts(out)
    assert len(done) == NUM_CASES * 2
    assert {name: done[name] for name in kept} == kept
    assert not list(out.glob("attempts/*.json"))


def test_without_requeues_left_the_status_says_that_time_was_up(slurm: Cluster, tmp_path: Path) -> None:
    config, out = write_config(tmp_path, **SMALL, sweep=SEEDS), tmp_path / "out"
    job = slurm.submit("bench.sbatch", config, "--out", out)
    wait_for("the first comparison", lambda: len(underway(out)) == 1, 120)
    slurm.command("scancel", "--signal=USR1", job)
    assert slurm.finish(job) == ("FAILED", f"{CLOSED}:0"), slurm.printed(job)
    assert len(parts(out)) == NUM_CASES


def test_an_array_fills_one_directory_without_collisions(slurm: Cluster, tmp_path: Path) -> None:
    config, out = write_config(tmp_path, **SMALL, sweep={"workload.seed": [1, 2, 3, 4]}), tmp_path / "out"
    job = slurm.submit("sweep.sbatch", config, "--out", out, options=("--array=0-3",))
    for task in range(4):
        assert slurm.finish(f"{job}_{task}") == ALL_DONE, slurm.printed(job)
    assert len(parts(out)) == NUM_CASES * 4
    run = load_run(out)
    assert [comparison.point for comparison in run.comparisons.values()] == [
        {"workload.seed": seed} for seed in (1, 2, 3, 4)
    ]
    done = launch(config, "--out", out, nproc=1)
    assert (done.returncode, "were finished before" in done.stderr) == (OK, True), done.stderr


def test_a_task_beyond_the_sweep_and_a_sweep_without_an_array_say_so(slurm: Cluster, tmp_path: Path) -> None:
    config = write_config(tmp_path, **SMALL, sweep=SEEDS)
    beyond = slurm.submit("sweep.sbatch", config, "--out", tmp_path / "out", options=("--array=2",))
    assert slurm.finish(f"{beyond}_2") == ("FAILED", f"{USER_ERROR}:0")
    assert "--point: expected 0 to 1" in slurm.printed(beyond)
    alone = slurm.submit("sweep.sbatch", config, "--out", tmp_path / "out")
    assert slurm.finish(alone) == ("FAILED", f"{USER_ERROR}:0")
    assert "expected sbatch --array" in slurm.printed(alone)
    assert not (tmp_path / "out").exists()


def test_two_tasks_per_node_are_refused(slurm: Cluster, tmp_path: Path) -> None:
    command = [
        "srun",
        "--nodes=2",
        "--ntasks-per-node=2",
        "--overcommit",
        "bash",
        str(TESTS.parent / "launch/torchrun.sh"),
    ]
    done = subprocess.run(
        [*command, str(write_config(tmp_path))], capture_output=True, text=True, timeout=60,
        env={**slurm.environment, "VENV": os.environ.get("VIRTUAL_ENV", str(TESTS.parent / ".venv"))},
    )  # fmt: skip
    assert done.returncode == USER_ERROR, done.stderr
    assert "4 tasks on 2 nodes; expected one per node" in done.stderr
