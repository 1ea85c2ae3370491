"""The commands' names, and what they wait for: help needs neither torch nor pandas."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from moe_ep_bench import cli
from moe_ep_bench.errors import OK, USER_ERROR

COMMANDS = (
    "run", "emulate", "route", "advise", "validate", "papers", "quality", "calibrate", "trace", "doctor", "show",
    "plot", "compare", "check-policy",
)  # fmt: skip
ROOT = Path(__file__).parents[1]
HEAVY = {"torch", "megatron", "pandas", "matplotlib", "transformers"}


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main([command, "--help"])
    assert ended.value.code == 0
    assert f"usage: moe-ep-bench {command}" in capsys.readouterr().out


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
    monkeypatch.setitem(sys.modules, "moe_ep_bench.bench.run", fake)
    asked = ["emulate", str(ROOT / "configs/quickstart.yaml"), "--set", "emulate.links=pcie5"]
    assert cli.main(asked) == USER_ERROR
    assert seen == [Path("results/quickstart")]
