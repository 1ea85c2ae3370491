"""slurm/'s scripts without a Slurm, by stand-ins for srun and torchrun."""

from __future__ import annotations

import os
import shlex
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SRUN = """#!/bin/bash
printf '%s\\n' "$@" >"$ROOT/srun"
while [ "$1" != bash ]; do shift; done
SLURM_PROCID=0 exec "$@"
"""
# Ends with the status that a file gives.
LAUNCHER = """#!/bin/bash
echo "$*" >>"$ROOT/started"
exit "$(cat "$ROOT/status" 2>/dev/null || echo 0)"
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

    def run(self, number: int, **variables: object) -> tuple[int, list[str]]:
        """Exit status, and the command line of each run that it started."""
        (self.root / "started").write_text("")
        of_slurm = {"ARRAY_TASK_ID": number, "JOB_ID": 1, "JOB_NUM_NODES": 1, "JOB_NODELIST": "node1"}
        told = {f"SLURM_{name}": value for name, value in of_slurm.items()} | variables
        told |= {"ROOT": self.root, "PATH": f"{self.root / 'bin'}:{os.environ['PATH']}"}
        done = subprocess.run(
            ["bash", str(ROOT / "slurm" / "sweep.sbatch"), "my.yaml", "--cpu"],
            env={**os.environ, **{name: str(value) for name, value in told.items()}},
            capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
        return done.returncode, (self.root / "started").read_text().splitlines()


@pytest.fixture
def task(tmp_path: Path) -> Task:
    return Task(tmp_path)


@pytest.mark.parametrize("status", [0, 1, 2, 75, 138])
def test_a_task_takes_its_point_and_ends_with_its_status(status: int, task: Task) -> None:
    (task.root / "status").write_text(str(status))
    assert task.run(3) == (status, ["my.yaml --cpu --point 3"])


def test_the_container_of_the_docs_has_what_job_sh_needs_in_it(task: Task) -> None:
    """The checkout under its own path, which holds node.sh and the statuses, and the image's environment."""
    (line,) = [line for line in (ROOT / "docs" / "running.md").read_text().splitlines() if "--container-image" in line]
    line = line.replace("$PWD", str(task.root))
    given = dict(word.split("=", 1) for word in shlex.split(line) if word.startswith(("VENV=", "SRUN_OPTIONS=")))
    image = (ROOT / "docker" / "Dockerfile").read_text()
    assert f"WORKDIR {given['VENV'].removesuffix('/.venv')}\n" in image, "where setup.sh makes it"
    assert "RUN launch/setup.sh --system-torch\n" in image
    status, started = task.run(0, **given)
    assert (status, len(started)) == (0, 1)
    srun = (task.root / "srun").read_text().splitlines()
    options = dict(word.split("=", 1) for word in srun if word.startswith("--container-"))
    assert options["--container-image"].startswith("/"), "pyxis takes other names for an image of a registry"
    assert f"{task.root}:{task.root}" in options["--container-mounts"].split(",")
    assert options["--container-workdir"] == str(task.root)
    assert f"{task.root}/slurm/node.sh" in srun
