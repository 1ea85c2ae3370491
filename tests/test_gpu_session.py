"""launch/gpu_session.sh turns wrong commands away, resumes, and keeps its summary; CI rehearses what its steps do."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import time
from pathlib import Path

import pytest

from moe_ep_bench.bench.description import served
from moe_ep_bench.cli import make_parser
from moe_ep_bench.config.files import load_experiments

SCRIPT = Path(__file__).parents[1] / "launch" / "gpu_session.sh"

# Stands for Python: notes what it is asked for, and fails or hangs in a script where a file says so.
PYTHON = """#!/bin/bash
printf '%q ' "$@" >>{folder}/calls; echo >>{folder}/calls
echo "output of $*, 1 not (1 failed)"
for does in fails hangs; do
  [ -e {folder}/$does ] && [[ "$*" == *$(cat {folder}/$does)* ]] || continue
  [ $does = fails ] && exit 3
  exec sleep 1000
done
[ -z "${{MOE_EP_BENCH_FAULTS:-}}" ]  # Where a rank is killed, the run ends with 1.
"""


@pytest.mark.parametrize(
    "arguments", [[], ["--rehearse"], ["{used}"], ["{out}", "--only"], ["{out}", "--fast"]], ids=str
)
def test_a_wrong_command_is_one_line_and_leaves_nothing(arguments: list[str], tmp_path: Path) -> None:
    used, out = tmp_path / "used", tmp_path / "out"
    used.mkdir()
    (used / "file").touch()
    command = ["bash", SCRIPT, *(argument.format(used=used, out=out) for argument in arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert done.stderr.startswith(("gpu_session.sh: ", "setup.sh: "))  # which says itself what it turns away
    assert not out.exists()


class Session:
    """Rehearsals in one folder, with a stand-in for Python."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.out, self.script = folder, folder / "out", SCRIPT
        python = folder / "venv" / "bin" / "python"
        python.parent.mkdir(parents=True)
        python.write_text(PYTHON.format(folder=folder))
        python.chmod(0o755)

    def has_gpu_of(self, memory_mib: int) -> None:
        stand_in = self.folder / "bin" / "nvidia-smi"
        stand_in.parent.mkdir()
        stand_in.write_text(f"#!/bin/bash\necho {memory_mib}\n")
        stand_in.chmod(0o755)

    def start(self, *options: str, rehearse: bool = True) -> subprocess.Popen:
        command = ["bash", self.script, self.out, *options, *["--rehearse"] * rehearse]
        path = f"{self.folder / 'bin'}:{os.environ['PATH']}"
        environment = {**os.environ, "VENV": str(self.folder / "venv"), "PATH": path}
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)

    def run(self, *options: str, rehearse: bool = True) -> tuple[int, str, int]:
        """Exit status, what was printed, and how many steps were begun."""
        (self.folder / "calls").write_text("")
        started = self.start(*options, rehearse=rehearse)
        printed, errors = started.communicate(timeout=300)
        return started.returncode, printed + errors, len(self.calls())

    def calls(self) -> list[list[str]]:
        """The arguments of each."""
        return [shlex.split(line) for line in (self.folder / "calls").read_text().splitlines()]

    def summary(self) -> str:
        return (self.out / "summary.txt").read_text()


@pytest.fixture
def session(tmp_path: Path) -> Session:
    return Session(tmp_path)


@pytest.mark.slow
def test_the_same_command_repeats_what_failed_and_nothing_else(session: Session) -> None:
    (session.folder / "fails").write_text("benchmarks/device.py")
    status, printed, steps = session.run()
    assert status == 1
    assert steps > 18
    assert "device: FAILED with status 3 (device.txt, device.err)" in printed
    assert "run: done in" in printed
    (session.folder / "fails").unlink()
    status, printed, steps = session.run()
    assert (status, steps) == (0, 1)
    assert "FAILED" not in printed
    assert "output of benchmarks/device.py" in session.summary()
    assert "commit " in session.summary()
    assert session.run()[::2] == (0, 0)


@pytest.mark.slow
def test_on_a_gpu_every_step_is_a_command_with_a_config_that_holds_there(session: Session) -> None:
    """None may fail by its options in the minutes that a GPU is there; what is printed ends with how steps went."""
    status, printed, _ = session.run(rehearse=False)
    assert status == 0, printed
    asked = [call[2:] for call in session.calls() if call[:2] == ["-m", "moe_ep_bench"]]
    assert {arguments[0] for arguments in asked} == {"run", "emulate", "papers", "show", "compare"}
    for arguments in (one for one in asked if one[1].startswith("configs/")):
        options = make_parser().parse_args(arguments)
        assert load_experiments(SCRIPT.parents[1] / options.config, options.overrides, on_cpu=False)
    assert session.summary() in printed
    assert re.fullmatch(r"[\w-]+: done in \d+ s", session.summary().splitlines()[-1])


# Of a GPU's memory that a step's layers may take by the estimate, which leaves out what libraries and inputs take.
MOST_OF_MEMORY = 0.8


@pytest.mark.slow
@pytest.mark.parametrize(("memory_mib", "paper_size"), [(81_559, 131_072), (143_771, 262_144), (196_608, 524_288)])
def test_every_step_fits_the_memory_of_the_gpu_that_is_there(
    memory_mib: int, paper_size: int, session: Session
) -> None:
    """Mixtral at the paper's size takes 164 GB of an H100's 80; then it is halved, and the summary says so."""
    session.has_gpu_of(memory_mib)
    status, printed, _ = session.run(rehearse=False)
    assert status == 0, printed
    taken_gb: dict[str, float] = {}
    for call in session.calls():
        if call[:2] == ["-m", "moe_ep_bench"] and call[3].startswith("configs/"):
            options = make_parser().parse_args(call[2:])
            is_virtual = call[2] == "emulate" or "emulate.device=measured" in options.overrides
            for one in load_experiments(SCRIPT.parents[1] / options.config, options.overrides, on_cpu=False):
                num_ranks = one.layer.ep_size if is_virtual else 1
                built = 0 if one.scope == "layer" else one.whole.num_layers
                footprint = served(one).footprint(num_ranks, num_ranks, built)
                taken_gb[options.out.name] = max(taken_gb.get(options.out.name, 0), sum(footprint.values()) / 1e9)
                if options.out.name == "mixtral-paper-size":
                    assert one.workload.tokens_per_rank == paper_size
    assert len(taken_gb) > 12
    allowed_gb = MOST_OF_MEMORY * memory_mib * 2**20 / 1e9
    assert {name: size for name, size in taken_gb.items() if size > allowed_gb} == {}
    assert taken_gb["mixtral-paper-size"] > allowed_gb / 2 or paper_size == 524_288, "as large as it can be"
    assert (f"{paper_size} tokens a rank, as the paper's 524288 do not fit" in printed) == (paper_size < 524_288)


def test_only_some_steps_can_be_asked_for(session: Session) -> None:
    status, _, steps = session.run("--only", "run,device", "--minutes", "0")
    assert (status, steps) == (0, 2)
    assert "olmoe" not in session.summary()
    assert session.run("--only", "rnu")[0] == 2


def test_what_time_is_up_for_is_not_begun_and_named(session: Session) -> None:
    status, _, steps = session.run("--minutes", "0")
    assert (status, steps) == (1, 0)
    assert "olmoe: not begun, time was up" in session.summary()


def test_a_session_that_is_ended_keeps_what_it_has(session: Session) -> None:
    (session.folder / "hangs").write_text("benchmarks/device.py")
    started = session.start()
    steps = session.out / "steps"
    deadline = time.monotonic() + 100
    while not (session.folder / "calls").exists() or "device.py" not in (session.folder / "calls").read_text():
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert "run: done in" in session.summary(), "kept up to date, should it be killed"
    started.send_signal(signal.SIGTERM)
    started.communicate(timeout=60)
    assert started.returncode == 1
    assert "FAILED" in (steps / "device").read_text()
    assert "oea-table3: not begun" in session.summary()


def test_a_first_node_gets_no_go_with_what_to_send_until_every_step_is_done(session: Session) -> None:
    session.script = SCRIPT.with_name("first_node.sh")
    (session.folder / "fails").write_text("calibrate")
    status, printed, _ = session.run()
    assert status == 1
    assert printed.splitlines()[-1] == f"NO GO: calibrate; send {session.out}/summary.txt and the .err of these steps"
    assert "calibrate: FAILED with status 3 (calibrate.txt, calibrate.err)" in session.summary()
    (session.folder / "fails").unlink()
    status, printed, steps = session.run()
    assert (status, steps) == (0, 2), "GPUs are counted, and it calibrates"
    assert printed.splitlines()[-1] == "GO: every step ran on 2 ranks"


def test_a_first_node_whose_killed_rank_changes_no_status_gets_no_go(session: Session) -> None:
    session.script = SCRIPT.with_name("first_node.sh")
    stand_in = session.folder / "venv" / "bin" / "python"
    stand_in.write_text(stand_in.read_text().replace("MOE_EP_BENCH_FAULTS", "NOTHING"))
    status, printed, _ = session.run()
    assert status == 1
    assert printed.splitlines()[-1].startswith("NO GO: killed; send ")
