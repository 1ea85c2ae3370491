"""docker/Dockerfile, as far as one without a GPU image can try it: its instructions, and what it asks of setup.sh."""

from __future__ import annotations

import json
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]


def instructions() -> list[tuple[str, str]]:
    text = re.sub(r"^#.*\n", "", (ROOT / "docker" / "Dockerfile").read_text(), flags=re.MULTILINE)
    return [tuple(line.split(maxsplit=1)) for line in text.replace("\\\n", " ").splitlines() if line.strip()]


def test_setup_makes_the_environment_that_the_image_starts() -> None:
    found = instructions()
    assert {name for name, _ in found} == {"ARG", "FROM", "WORKDIR", "COPY", "RUN", "ENV", "ENTRYPOINT", "CMD"}
    (run,) = [rest.split() for name, rest in found if name == "RUN"]
    told = (ROOT / "launch" / "setup.sh").read_text()
    assert run[0] == "launch/setup.sh"
    assert all(f"# {flag}" in told for flag in run[1:])
    known = dict(found)
    assert known["ENV"] == f"PATH={known['WORKDIR']}/.venv/bin:${{PATH}}"  # where setup.sh puts it
    assert json.loads(known["ENTRYPOINT"]) == ["moe-ep-bench"]
    assert json.loads(known["CMD"]) == ["doctor"]


def test_no_environment_of_the_host_goes_into_the_image() -> None:
    left_out = (ROOT / ".dockerignore").read_text().split()
    assert {".venv", ".git", "recordings", "checkpoints"} <= set(left_out)
