"""slurm/'s scripts under a real Slurm of two nodes (``slurm_cluster``): ``pytest -m slurm``, as root.

Starting ranks is what takes the time here, so that tests share jobs: an array of one-node jobs, and a directory that
was filled by jobs which were interrupted in every way. Routing is a pure function of config and workload, so rows of
routing are compared exactly; times are not.
"""

from __future__ import annotations

import contextlib
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import pandas as pd
import pyarrow.parquet as pq
import pytest
from slurm_cluster import MEMORY_MIB, NAMES, NUM_GPUS, Cluster, cluster, wait_for, why_not
from test_own_policies import EXAMPLE, NAME
from test_run import TESTS, write_config

from moe_ep_bench.analysis.cases import cases, comparisons, load
from moe_ep_bench.errors import CASES_FAILED, CLOSED, USER_ERROR
from moe_ep_bench.runtime.attempts import collect_lost

pytestmark = pytest.mark.slurm

# Generous: they end what hangs, on a machine that may be busy.
STEP_S, TEST_S = 400, 1500
ALL_DONE = ("COMPLETED", "0:0")
SMALL = {
    "policies": [{"name": "token_drop", "capacity_factor": 1.0}],
    "measure": {"iterations": 1, "breakdown_iterations": 1, "warmup": 1, "timeout_s": 300},
    "workload__num_batches": 1,
}
NUM_CASES = 4  # native, native again, the policy, balanced
SEEDS = [1, 2, 3]


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)
    with cluster(tmp_path_factory.mktemp("slurm")) as running:
        yield running


@contextlib.contextmanager
def in_time(slurm: Cluster) -> Iterator[None]:
    """Nothing hangs, and no job outlives its test."""

    def end(number: int, frame: FrameType | None) -> None:
        raise TimeoutError(f"not done within {TEST_S} s")

    earlier = signal.signal(signal.SIGALRM, end)
    signal.alarm(TEST_S)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, earlier)
        slurm.command("scancel", "--user=root")
        wait_for("empty queue", lambda: slurm.command("squeue", "--noheader") == "", 300)


@pytest.fixture(autouse=True)
def every_test_in_time(slurm: Cluster) -> Iterator[None]:
    with in_time(slurm):
        yield


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A clone without an environment: the scripts of slurm/ and launch/, and what set-up reads."""
    for name in ("slurm", "launch", "pyproject.toml"):
        copy = shutil.copytree if (TESTS.parent / name).is_dir() else shutil.copy
        copy(TESTS.parent / name, tmp_path / name)
    return tmp_path


@pytest.fixture(scope="module")
def array(slurm: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of an array: each of its jobs one point, on the two ranks of one node."""
    folder = tmp_path_factory.mktemp("array")
    config = write_config(folder, **SMALL, sweep={"workload.seed": SEEDS})
    job = slurm.submit("sweep.sbatch", config, "--out", folder / "out", options=("--array=0-2",), NPROC=2)
    with in_time(slurm):
        for task in range(3):
            assert slurm.finish(f"{job}_{task}", STEP_S) == ALL_DONE, slurm.printed(job)
    return folder / "out"


def routing_of(out: Path) -> pd.DataFrame:
    rows = pd.concat(pd.read_parquet(path) for path in sorted((out / "routing").glob("*.parquet")))
    rows = rows.drop(columns=["run_id", "reference_error", "output_error"])
    return rows.sort_values(["case_id", "rank", "batch"]).reset_index(drop=True)


def parts(out: Path) -> dict[str, int]:
    """The part of every finished comparison, all its cases good, with when it was written."""
    found = {}
    for path in (out / "cases").glob("*.parquet"):
        assert set(pq.read_table(path)["status"].to_pylist()) == {"ok"}
        found[path.name] = path.stat().st_mtime_ns
    return found


def underway(out: Path) -> list[str]:
    """What ranks are at, as their marks say."""
    marks = [path.read_bytes().split(b"\n")[1].decode() for path in out.glob("attempts/now-*")]
    return [mark for mark in marks if mark]


def faulty(fault: str) -> dict[str, str]:
    """Variables of a job in which a fault strikes (tests/faults)."""
    return {"MOE_EP_BENCH_FAULTS": fault, "PYTHONPATH": f"{TESTS.parent}:{TESTS / 'faults'}"}


def wait_until_underway(slurm: Cluster, job: str, out: Path, restarts: int) -> None:
    def both() -> bool:
        return int(slurm.job(job)["Restarts"]) == restarts and len(underway(out)) == 2

    wait_for(f"both ranks after {restarts} restarts", both, STEP_S, because=lambda: slurm.printed(job))


def hang(slurm: Cluster, job: str, out: Path, restarts: int = 0) -> dict[str, int]:
    """Wait until one rank sleeps and the other waits for it in a collective; what was finished before."""
    wait_until_underway(slurm, job, out, restarts)
    time.sleep(3)
    return parts(out)


@pytest.fixture(scope="module")
def interrupted(slurm: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory that two nodes filled, interrupted in every way; after each what was finished is still there."""
    folder = tmp_path_factory.mktemp("interrupted")
    config, out = write_config(folder, **SMALL, sweep={"workload.seed": SEEDS}), folder / "out"
    with in_time(slurm):
        interrupt_in_every_way(slurm, config, out)
    return out


def interrupt_in_every_way(slurm: Cluster, config: Path, out: Path) -> None:
    def submit(**variables: object) -> str:
        return slurm.submit("bench.sbatch", config, "--out", out, options=("--nodes=2",), **variables)

    # What --signal=USR1@300 sends; Slurm looks at times only twice a minute.
    job = submit(REQUEUES=1)
    wait_until_underway(slurm, job, out, 0)
    slurm.command("scancel", "--signal=USR1", job)
    wait_for("the job's own requeue", lambda: int(slurm.job(job)["Restarts"]) == 1, STEP_S)
    kept = parts(out)
    assert len(kept) == 1, "it finished one comparison and began no other"
    wait_until_underway(slurm, job, out, 1)
    slurm.command("scancel", "--signal=USR1", job)
    assert slurm.finish(job, STEP_S) == ("FAILED", f"{CLOSED}:0"), slurm.printed(job)
    assert len(parts(out)) == 2
    assert kept.items() <= parts(out).items()

    job = submit(**faulty("token_drop=hang_later"))
    kept = hang(slurm, job, out)
    slurm.command("scancel", job)
    assert slurm.finish(job, STEP_S)[0] == "CANCELLED", slurm.printed(job)
    check_stopped(slurm, job, out, kept)

    job = submit(**faulty("token_drop=hang_later"))
    hang(slurm, job, out)
    soon = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(time.time() + 1))
    slurm.command("scontrol", "update", f"JobId={job}", f"EndTime={soon}")
    assert slurm.finish(job, STEP_S)[0] == "TIMEOUT", slurm.printed(job)
    check_stopped(slurm, job, out, kept)

    # After the crash either Slurm requeues it or, where a task's death comes first, the job itself.
    job = submit(REQUEUES=2, **faulty("token_drop=hang_later,until=2"))
    hang(slurm, job, out)
    slurm.command("scontrol", "requeue", job)
    wait_for("the requeue", lambda: int(slurm.job(job)["Restarts"]) == 1, STEP_S)
    check_stopped(slurm, job, out, kept)
    hang(slurm, job, out, 1)
    slurm.crash_node(NAMES[1])
    wait_for("Slurm's notice", lambda: slurm.node_state(NAMES[1]).startswith("down"), STEP_S)
    slurm.start_node(NAMES[1])
    ended = slurm.finish(job, STEP_S)
    if ended == ("FAILED", "143:0"):
        # A node that is back at once may get the SIGTERM of its crashed start late, in the next one: the user goes on.
        job = submit()
        ended = slurm.finish(job, STEP_S)
    assert ended == ALL_DONE, slurm.printed(job)
    done = parts(out)
    assert len(done) == len(SEEDS)
    assert kept.items() <= done.items(), "finished comparisons were measured again"


def check_stopped(slurm: Cluster, job: str, out: Path, kept: dict[str, int]) -> None:
    """What was asked to end has ended, lost nothing, and takes the blame for nothing."""
    wait_for("end of all processes", lambda: not slurm.processes_of(job), STEP_S)
    assert parts(out) == kept
    # What ranks were at is collected by the next start; here too it comes to no lost attempt.
    collect_lost(out / "attempts", {path.name.split("-")[1] for path in out.glob("attempts/now-*")})
    assert [path.read_text() for path in out.glob("attempts/*")] == [], slurm.printed(job)


def test_a_job_that_is_interrupted_in_every_way_keeps_what_is_finished_and_then_does_only_the_rest(
    interrupted: Path,
) -> None:
    store = load(interrupted, join_draws=False)
    assert comparisons(store).seed.tolist() == SEEDS
    assert cases(store).status.eq("ok").all()
    assert not list(TESTS.parent.glob(".slurm-job-*"))


def test_an_array_fills_one_directory_without_collisions(array: Path) -> None:
    assert len(parts(array)) == len(SEEDS)
    assert comparisons(load(array, join_draws=False)).seed.tolist() == SEEDS


def test_two_nodes_give_the_routing_rows_of_one(interrupted: Path, array: Path) -> None:
    pd.testing.assert_frame_equal(routing_of(interrupted), routing_of(array))


def test_a_rank_that_dies_on_one_node_costs_its_case_and_not_the_job(slurm: Cluster, tmp_path: Path) -> None:
    config = write_config(tmp_path, **SMALL)
    job = slurm.submit(
        "bench.sbatch", config, "--out", tmp_path / "out", options=("--nodes=2",), **faulty("token_drop=kill")
    )
    assert slurm.finish(job, 2 * STEP_S) == ("FAILED", f"{CASES_FAILED}:0"), slurm.printed(job)
    (part,) = (tmp_path / "out" / "cases").iterdir()
    found = pd.read_parquet(part).groupby("case_id")["status"].first()
    assert sorted(found) == ["failed", *["ok"] * (NUM_CASES - 1)]


@pytest.mark.parametrize("asks", [("--gpus-per-node=2",), ("--gpus-per-node=0", "--gres=gpu:2")], ids=" ".join)
def test_each_node_of_a_job_has_its_memory_and_gpus_and_the_variables_of_whoever_submitted(
    slurm: Cluster, clone: Path, asks: tuple[str, ...]
) -> None:
    (clone / "launch" / "torchrun.sh").write_text('env >"$ROOT/env-$SLURM_PROCID"\n')
    network = {"NCCL_IB_HCA": "mlx5_0,mlx5_1", "GLOO_SOCKET_IFNAME": "ib0"}
    job = slurm.submit("bench.sbatch", "my.yaml", options=("--nodes=2", *asks), ROOT=clone, **network)
    assert slurm.finish(job, STEP_S) == ALL_DONE, slurm.printed(job)
    assert f"mem={2 * MEMORY_MIB}M" in slurm.job(job)["TRES"]
    for node in range(2):
        told = (clone / f"env-{node}").read_text().splitlines()
        assert {f"{name}={value}" for name, value in network.items()} < set(told)
        assert f"SLURM_GPUS_ON_NODE={NUM_GPUS}" in told


def test_a_job_that_slurm_may_not_requeue_ends_with_its_status_and_says_what_to_do(slurm: Cluster, clone: Path) -> None:
    (clone / "launch" / "torchrun.sh").write_text(f"exit {CLOSED}\n")
    job = slurm.submit("bench.sbatch", "my.yaml", options=("--no-requeue",), ROOT=clone, REQUEUES=1)
    assert slurm.finish(job, STEP_S) == ("FAILED", f"{CLOSED}:0"), slurm.printed(job)
    assert slurm.printed(job).endswith("(--requeue lets it); submit it again for what is left\n")


def test_a_job_sets_up_no_environment(slurm: Cluster, clone: Path) -> None:
    job = slurm.submit("bench.sbatch", "my.yaml", options=("--nodes=2",), ROOT=clone, VENV="")
    assert slurm.finish(job, STEP_S) == ("FAILED", f"{USER_ERROR}:0"), slurm.printed(job)
    assert f"setup.sh: {clone}/.venv is not set up: run launch/setup.sh" in slurm.printed(job)
    assert not list(clone.glob(".venv*"))


# Of a folder that the host has, only what is mounted: CONTAINER FOLDER NAME... -- COMMAND
CONTAINER = """
host=$1
mount -t tmpfs tmpfs /mnt && mkdir /mnt/host && mount --bind "$host" /mnt/host && mount -t tmpfs tmpfs "$host"
while [ "$2" != -- ]; do
  mkdir "$host/$2" && mount --bind "/mnt/host/$2" "$host/$2"
  shift
done
exec "${@:3}"
"""


def test_an_own_policy_in_a_container_is_found_where_its_folder_is_mounted(slurm: Cluster, tmp_path: Path) -> None:
    (tmp_path / "container.sh").write_text(CONTAINER)
    (tmp_path / "policies").mkdir()
    (tmp_path / "policies" / "my_policy.py").write_text(EXAMPLE)
    (tmp_path / "work").mkdir()
    config = write_config(tmp_path / "work", **SMALL | {"policies": [{"name": NAME, "num_left": 2}]})
    out = tmp_path / "work" / "out"

    def submit(*mounted: str) -> str:
        inside = f"unshare --mount bash {tmp_path}/container.sh {tmp_path} {' '.join(mounted)} --"
        paths = f"{TESTS.parent}:{tmp_path / 'policies'}"
        return slurm.submit("bench.sbatch", config, "--out", out, NPROC=2, SRUN_OPTIONS=inside, PYTHONPATH=paths)

    job = submit("work")
    assert slurm.finish(job, STEP_S) == ("FAILED", f"{USER_ERROR}:0"), slurm.printed(job)
    assert "PYTHONPATH names the folder of a module" in slurm.printed(job)
    job = submit("work", "policies")
    assert slurm.finish(job, STEP_S) == ALL_DONE, slurm.printed(job)
    assert "leave_busiest" in set(cases(load(out)).policy)


def test_a_mistake_of_the_users_is_the_jobs_status_2(slurm: Cluster, tmp_path: Path) -> None:
    config = write_config(tmp_path, **SMALL, sweep={"workload.seed": SEEDS})
    mistake = slurm.submit("bench.sbatch", config, "--set", "layer.seed=-1", options=("--nodes=2",))
    assert slurm.finish(mistake, STEP_S) == ("FAILED", f"{USER_ERROR}:0"), slurm.printed(mistake)
    assert "layer.seed" in slurm.printed(mistake)
    beyond = slurm.submit("sweep.sbatch", config, "--out", tmp_path / "out", options=("--array=3",))
    assert slurm.finish(f"{beyond}_3", STEP_S) == ("FAILED", f"{USER_ERROR}:0")
    assert "--point: expected 0 to 2" in slurm.printed(beyond)
    alone = slurm.submit("sweep.sbatch", config, "--out", tmp_path / "out")
    assert slurm.finish(alone, STEP_S) == ("FAILED", f"{USER_ERROR}:0")
    assert "expected sbatch --array" in slurm.printed(alone)
    assert not (tmp_path / "out").exists()
