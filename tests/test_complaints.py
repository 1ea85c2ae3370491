"""The commands' outer shell: what cannot be said ends nothing, what nobody foresaw is no result, a restart goes on."""

from __future__ import annotations

import errno
import signal
import sys
from typing import Any

import numpy as np
import pytest

from moe_ep_bench import cli
from moe_ep_bench.analysis.store import ResultsError
from moe_ep_bench.cli import shown
from moe_ep_bench.errors import CASES_FAILED, LOST, OK, USER_ERROR, UserError, progress_bar

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


@pytest.mark.parametrize(("is_shown", "is_terminal"), [(True, True), (False, True), (True, False)])
def test_progress_is_of_whoever_shows_it_and_a_pipe_gets_none_of_what_ends_soon(
    is_shown: bool, is_terminal: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: is_terminal)
    with progress_bar(10, "iteration", "a title", shown=is_shown) as bar:
        for _ in range(5):
            bar.update()
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
