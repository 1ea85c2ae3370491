"""The commands' names, what they wait for (help needs neither torch nor pandas), and their outer shell.

What cannot be said ends nothing, what nobody foresaw is no result, a restart goes on.
"""

from __future__ import annotations

import errno
import json
import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tqdm import tqdm

from moe_ep_bench import cli
from moe_ep_bench.analysis.store import ResultsError
from moe_ep_bench.cli import shown
from moe_ep_bench.errors import CASES_FAILED, LOST, OK, USER_ERROR, UserError, progress_bar

COMMANDS = (
    "run", "emulate", "route", "advise", "validate", "papers", "quality", "serve", "calibrate", "trace", "doctor",
    "show", "plot", "compare", "check-policy",
)  # fmt: skip
ROOT = Path(__file__).parents[1]
HEAVY = {"torch", "megatron", "pandas", "matplotlib", "transformers"}


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main([command, "--help"])
    assert ended.value.code == 0
    assert f"usage: moe-ep-bench {command}" in capsys.readouterr().out


def test_help_says_what_holds_without_an_argument(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["calibrate", "--help"])
    assert "--repetitions N repetitions of each message (20)" in " ".join(capsys.readouterr().out.split())


def test_there_are_no_other_commands() -> None:
    assert {name.split()[0] for name in cli.COMMANDS} == set(COMMANDS)


def loaded_by(*commands: list[object]) -> tuple[set[str], list[int], list[str]]:
    """The heavy packages that commands import, run one after the other, their statuses and what they said."""
    program = (
        "import json, sys; from moe_ep_bench.cli import main\n"
        "def status(command):\n"
        "    try: return main(command)\n"
        "    except SystemExit as end: return end.code\n"
        "statuses = [status(command) for command in json.loads(sys.argv[1])]\n"
        "print(); print(json.dumps([statuses, list(sys.modules)]))"
    )
    texts = json.dumps([list(map(str, command)) for command in commands])
    done = subprocess.run([sys.executable, "-c", program, texts], capture_output=True, text=True, check=True, cwd=ROOT)
    statuses, modules = json.loads(done.stdout.splitlines()[-1])
    return HEAVY.intersection(modules), statuses, done.stderr.splitlines()


def test_help_and_the_points_of_a_sweep_need_no_torch() -> None:
    points = ["run", "configs/whatif-skew.yaml", "--list-points"]
    assert loaded_by(["--help"], ["run", "--help"], points) == (set(), [OK] * 3, [])


def test_results_go_below_the_working_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    fake = SimpleNamespace(emulate=lambda comparisons, out, **__: seen.append(out) or USER_ERROR)
    monkeypatch.setitem(sys.modules, "moe_ep_bench.bench.commands", fake)
    asked = ["emulate", str(ROOT / "configs/quickstart.yaml"), "--set", "emulate.links=pcie5"]
    assert cli.main(asked) == USER_ERROR
    assert seen == [Path("results/quickstart")]


# ---- the shell -------------------------------------------------------------------------------------------------------

MEASURE = {"run": ["c.yaml"], "papers": ["c.yaml"], "emulate": ["c.yaml"], "calibrate": []}


def raising(error: BaseException):
    def command(options: object) -> int:
        raise error

    return command


ENDINGS = [
    *((name, raising(ImportError("x")), LOST, "Traceback") for name in MEASURE),
    # Value errors that we did not raise.
    ("show", lambda options: np.zeros(2) + np.zeros(3), LOST, "Traceback"),
    ("show", lambda options: int("x"), LOST, "Traceback"),
    ("show", raising(UserError("DIR: expected a directory")), USER_ERROR, "moe-ep-bench: DIR: expected a directory\n"),
    # A terminal obeys nothing of it.
    ("show", raising(ResultsError("\x1b[31m,\nr0)")), USER_ERROR, "moe-ep-bench: \\x1b[31m, r0)\n"),
]


@pytest.mark.parametrize(("name", "command", "status", "said"), ENDINGS)
def test_what_a_user_can_correct_is_a_line_and_what_nobody_foresaw_a_lost_job_shown_whole(
    name: str, command: Any, status: int, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(cli.COMMANDS, name, command)
    assert cli.main([name, *MEASURE.get(name, ["results"])]) == status
    errors = capsys.readouterr().err
    assert said in errors
    assert status == LOST or errors == said


def test_who_stops_reading_a_printed_result_has_seen_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "_end_output", lambda: None)
    report = raising(BrokenPipeError(errno.EPIPE, "x"))
    monkeypatch.setitem(cli.COMMANDS, "show", report)
    assert cli.main(["show", "results"]) == 128 + signal.SIGPIPE
    # Nor does it change how the measuring before went.
    monkeypatch.setitem(cli.COMMANDS, "emulate", lambda options: shown(CASES_FAILED, lambda: report(options)))
    assert cli.main(["emulate", "c.yaml"]) == CASES_FAILED


@pytest.mark.parametrize("status", [OK, CASES_FAILED])
def test_a_table_that_fails_after_measuring_starts_no_job_again(
    status: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As a release of pandas made it fail; what the user can correct stays a line and status 2."""
    for error, ended in ((TypeError("radd"), CASES_FAILED), (UserError("a line"), USER_ERROR)):
        report = raising(error)
        monkeypatch.setitem(cli.COMMANDS, "emulate", lambda options, of=report: shown(status, lambda: of(options)))
        assert cli.main(["emulate", "c.yaml"]) == ended
        said = capsys.readouterr().err
        assert ("Traceback" in said and "what was measured is kept" in said) == (ended == CASES_FAILED)


@pytest.mark.parametrize(("is_shown", "is_terminal"), [(True, True), (False, True), (True, False)])
def test_progress_is_of_whoever_shows_it_and_a_pipe_gets_none_of_what_ends_soon(
    is_shown: bool, is_terminal: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: is_terminal)
    monkeypatch.setattr(tqdm, "monitor_interval", 10)  # as it is where nothing of ours shows progress
    threads = threading.enumerate()
    with progress_bar(10, "iteration", "a title", shown=is_shown) as bar:
        for _ in range(5):
            bar.update()
        assert threading.enumerate() == threads, "one would wake up beside what is timed"
    said = capsys.readouterr().err
    assert ("a title" in said and "5/10" in said) == (is_shown and is_terminal), said
    assert is_terminal or said == ""


@pytest.mark.parametrize(
    ("command", "counts"), [("run", "SLURM_RESTART_COUNT"), ("emulate", "TORCHELASTIC_RESTART_COUNT")]
)
def test_force_is_for_the_first_start_of_a_job_alone(
    command: str, counts: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    forced = []
    monkeypatch.setitem(cli.COMMANDS, command, lambda options: forced.append(options.force) or OK)
    for restarts in "", "0", "1":
        monkeypatch.setenv(counts, restarts)
        assert cli.main([command, "c.yaml", "--force"]) == OK
        said = capsys.readouterr().err
    assert forced == [True, True, False]
    assert said == (
        f"moe-ep-bench: --force is passed over, {counts}=1: the job was restarted and goes on with what is left\n"
    )
    assert cli.main([command, "c.yaml"]) == OK
    assert capsys.readouterr().err == ""
