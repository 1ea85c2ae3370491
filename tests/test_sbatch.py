"""slurm/'s scripts without a Slurm, by stand-ins for srun and torchrun."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PROGRAMS = {
    "bin/scontrol": """#!/bin/bash
echo "$@" >>"$ROOT/scontrol"
echo node1
""",
    "bin/srun": """#!/bin/bash
while [ "$1" != bash ]; do shift; done
SLURM_PROCID=0 "$@"
status=$?
# It kills what runs beside a task that failed, and has a status of its own; nodes lose their ranks together.
case $status in 0 | 75) exit "$status" ;; *) exit 143 ;; esac
""",
    "launch/torchrun.sh": """#!/bin/bash
echo "$MASTER_ADDR $*" >"$ROOT/started"
exit "$STATUS"
""",
}


class Job:
    """Jobs of slurm/'s scripts in a folder of its own."""

    def __init__(self, root: Path) -> None:
        self.root = root
        (root / "slurm").symlink_to(ROOT / "slurm")
        for name, text in PROGRAMS.items():
            (root / name).parent.mkdir(exist_ok=True)
            (root / name).write_text(text)
            (root / name).chmod(0o755)

    def run(self, script: str, status: int = 0, **variables: object) -> int:
        """The exit status of a job on one node whose ranks end with ``status``."""
        of_slurm = {"SLURM_JOB_ID": 1, "SLURM_JOB_NUM_NODES": 1, "SLURM_JOB_NODELIST": "node1"} | variables
        path = f"{self.root / 'bin'}:{os.environ['PATH']}"
        told = {name: str(value) for name, value in {**of_slurm, "ROOT": self.root, "STATUS": status}.items()}
        command = ["bash", ROOT / "slurm" / script, "my.yaml", "--cpu"]
        done = subprocess.run(command, env={**os.environ, "PATH": path, **told}, capture_output=True, timeout=60)
        return done.returncode

    def told(self, name: str) -> list[str]:
        """Lines of what a stand-in was asked for."""
        return (self.root / name).read_text().splitlines()


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(tmp_path)


def test_a_task_of_an_array_takes_its_point(job: Job) -> None:
    assert job.run("sweep.sbatch", SLURM_ARRAY_TASK_ID=3) == 0
    assert job.told("started") == ["node1 my.yaml --cpu --point 3"]


@pytest.mark.parametrize("status", [1, 2, 75, 138])
@pytest.mark.parametrize("requeues", [0, 1])
def test_a_job_ends_with_its_ranks_status_or_requeues_itself_where_going_on_helps(
    job: Job, status: int, requeues: int
) -> None:
    is_requeued = requeues and status in (75, 138)
    assert job.run("bench.sbatch", status, REQUEUES=requeues) == (0 if is_requeued else status)
    assert ("requeue 1" in job.told("scontrol")) == bool(is_requeued)
    if requeues:
        (job.root / ".slurm-job-1.left").touch()  # by a node that was lost
    assert job.run("bench.sbatch", status, REQUEUES=requeues, SLURM_RESTART_COUNT=requeues) == status
    assert not list(job.root.glob(".slurm-job-*"))
