"""slurm/'s scripts without a Slurm, by stand-ins for srun and torchrun."""

from __future__ import annotations

import os
import shlex
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
NUM_POINTS = 5
SRUN = """#!/bin/bash
printf '%s\\n' "$@" >"$ROOT/srun"
while [ "$1" != bash ]; do shift; done
SLURM_PROCID=0 exec "$@"
"""
# Ends once all points of its task have begun, with the status that a file gives its point.
LAUNCHER = f"""#!/bin/bash
case "$*" in *--list-points) for i in {{0..{NUM_POINTS - 1}}}; do echo "$i workload.seed=$i"; done; exit ;; esac
cores=$(sed -n 's/^Cpus_allowed_list:\\t//p' /proc/self/status)
echo "${{@: -1}} GPUs=${{CUDA_VISIBLE_DEVICES-}} cores=$cores NPROC=$NPROC $*" >>"$ROOT/started"
until [ "$(wc -l <"$ROOT/started")" -ge "$AT_ONCE" ]; do sleep 0.01; done
exit "$(cat "$ROOT/status-${{@: -1}}" 2>/dev/null || echo 0)"
"""


class Task:
    """A task of slurm/sweep.sbatch in a folder of its own."""

    def __init__(self, root: Path) -> None:
        self.root = root
        (root / "slurm").symlink_to(ROOT / "slurm")
        programs = {"bin/srun": SRUN, "bin/scontrol": "#!/bin/sh\necho node1\n", "launch/torchrun.sh": LAUNCHER}
        for name, text in programs.items():
            (root / name).parent.mkdir(exist_ok=True)
            (root / name).write_text(text)
            (root / name).chmod(0o755)

    def run(
        self, number: int, *, at_once: int = 1, options: str = "", **variables: object
    ) -> tuple[int, str, list[str]]:
        """Exit status, what it said, and a line for each run that it started, by its point."""
        (self.root / "started").write_text("")
        of_slurm = {"ARRAY_TASK_ID": number, "JOB_ID": 1, "JOB_NUM_NODES": 1, "JOB_NODELIST": "node1"}
        told = {f"SLURM_{name}": value for name, value in of_slurm.items()} | variables
        told |= {"ROOT": self.root, "PATH": f"{self.root / 'bin'}:{os.environ['PATH']}", "AT_ONCE": at_once}
        done = subprocess.run(
            ["bash", str(ROOT / "slurm" / "sweep.sbatch"), "my.yaml", *options.split()],
            env={**os.environ, **{name: str(value) for name, value in told.items()}},
            capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
        return done.returncode, done.stderr, sorted((self.root / "started").read_text().splitlines())


@pytest.fixture
def task(tmp_path: Path) -> Task:
    return Task(tmp_path)


def test_a_task_takes_one_point_unless_it_is_told_of_more(task: Task) -> None:
    status, _, started = task.run(3, CUDA_VISIBLE_DEVICES="0,1", options="--cpu")
    assert status == 0
    (line,) = started
    assert line.startswith("3 GPUs=0,1 ")
    assert line.endswith("my.yaml --cpu --point 3")


def test_points_of_one_rank_share_a_nodes_gpus_and_none_is_started_beyond_the_last(task: Task) -> None:
    gpus = {"POINTS_PER_TASK": 3, "CUDA_VISIBLE_DEVICES": "4,5,6,7"}
    status, said, started = task.run(0, at_once=3, **gpus)
    assert (status, said) == (0, "")
    assert [line.split()[:2] for line in started] == [["0", "GPUs=4"], ["1", "GPUs=5"], ["2", "GPUs=6"]]
    assert all("NPROC=1" in line for line in started)
    status, _, started = task.run(1, at_once=2, **gpus)
    assert status == 0
    assert [line.split()[:2] for line in started] == [["3", "GPUs=4"], ["4", "GPUs=5"]]
    status, said, started = task.run(2, **gpus)
    assert (status, started) == (2, [])
    assert "--point: expected 0 to 4, got 6" in said


@pytest.mark.parametrize("options", ["", "--cpu"])
def test_without_gpus_each_point_has_a_core(task: Task, options: str) -> None:
    cores = sorted(os.sched_getaffinity(0))[:NUM_POINTS]
    number = {"POINTS_PER_TASK": len(cores), "CUDA_VISIBLE_DEVICES": "0" if options else ""}
    status, _, started = task.run(0, at_once=len(cores), options=options, **number)
    assert status == 0
    assert [line.split()[2] for line in started] == [f"cores={core}" for core in cores]


@pytest.mark.parametrize(
    ("statuses", "expected"),
    [([0, 1, 0], 1), ([138, 1, 0], 138), ([1, 2, 138], 2), ([138, 2, 1], 2), ([138, 143, 1], 143)],
)
def test_a_task_ends_with_the_worst_status_of_its_points(task: Task, statuses: list[int], expected: int) -> None:
    for point, status in enumerate(statuses):
        (task.root / f"status-{point}").write_text(str(status))
    status, said, started = task.run(0, at_once=3, POINTS_PER_TASK=3, CUDA_VISIBLE_DEVICES="0,1,2")
    assert status == expected
    assert len(started) == 3, "the others go on"
    for point, status in enumerate(statuses):
        assert (f"point {point} ended with status {status}" in said) == (status != 0)


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"POINTS_PER_TASK": 3}, "expected at most 2 (GPUs here, or cores), got 3"),
        ({"POINTS_PER_TASK": "all"}, "POINTS_PER_TASK: expected a whole number from 1, got all"),
        ({"POINTS_PER_TASK": 2, "NPROC": 2}, "expected one node and NPROC=1"),
        ({"POINTS_PER_TASK": 2, "SLURM_JOB_NUM_NODES": 2}, "expected one node and NPROC=1"),
    ],
)
def test_more_points_than_a_task_can_carry_are_refused(task: Task, variables: dict, expected: str) -> None:
    status, said, started = task.run(0, CUDA_VISIBLE_DEVICES="0,1", **variables)
    assert (status, started) == (2, [])
    assert expected in said


def test_the_container_of_the_docs_has_what_job_sh_needs_in_it(task: Task) -> None:
    """The checkout under its own path, which holds node.sh and the statuses, and the image's environment."""
    (line,) = [line for line in (ROOT / "docs" / "running.md").read_text().splitlines() if "--container-image" in line]
    line = line.replace("$PWD", str(task.root))
    given = dict(word.split("=", 1) for word in shlex.split(line) if word.startswith(("VENV=", "SRUN_OPTIONS=")))
    image = (ROOT / "docker" / "Dockerfile").read_text()
    assert f"WORKDIR {given['VENV'].removesuffix('/.venv')}\n" in image, "where setup.sh makes it"
    assert "RUN launch/setup.sh --system-torch\n" in image
    status, _, started = task.run(0, **given)
    assert (status, len(started)) == (0, 1)
    srun = (task.root / "srun").read_text().splitlines()
    options = dict(word.split("=", 1) for word in srun if word.startswith("--container-"))
    assert options["--container-image"].startswith("/"), "pyxis takes other names for an image of a registry"
    assert f"{task.root}:{task.root}" in options["--container-mounts"].split(",")
    assert options["--container-workdir"] == str(task.root)
    assert f"{task.root}/slurm/node.sh" in srun
