"""Claims about the tests' fast part: it is in every file but a few that are named, and CI runs everything."""

from __future__ import annotations

import ast
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
# Marks of tests that launch/test.sh leaves out, each run otherwise: slow by CI, the rest where there is what they need.
LEFT_OUT = {"slow", "gpu", "slurm", "browser", "vllm", "scale"}
# Files all of whose tests are left out.
WHOLE = {"golden_figures", "gpu", "page_browser", "scale", "slurm", "vllm", "vllm_serve"}


def marks(expression: ast.AST) -> set[str]:
    """The marks that a decorator or ``pytestmark`` names."""
    return {
        node.attr
        for node in ast.walk(expression)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Attribute) and node.value.attr == "mark"
    }


def fast_tests(source: str) -> list[str]:
    """Names of the tests of a file that launch/test.sh runs."""
    tree = ast.parse(source)
    of_all = [
        marks(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and "pytestmark" in ast.unparse(node.targets[0])
    ]
    if any(found & LEFT_OUT for found in of_all):
        return []
    tests = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")]
    # A parameter's mark leaves out that parameter alone.
    return [
        test.name
        for test in tests
        if not any(marks(one.func if isinstance(one, ast.Call) else one) & LEFT_OUT for one in test.decorator_list)
    ]


def test_every_file_has_a_fast_test_or_is_named() -> None:
    files = {path.stem.removeprefix("test_"): path for path in (ROOT / "tests").glob("test_*.py")}
    assert {name for name, path in files.items() if not fast_tests(path.read_text())} == WHOLE


def test_marks_are_seen_on_files_on_tests_and_not_on_parameters() -> None:
    source = """import pytest
@pytest.mark.slow
@pytest.mark.parametrize("a", [1])
def test_slow(a): ...
@pytest.mark.parametrize("a", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_partly_slow(a): ...
def helper(): ...
"""
    assert fast_tests(source) == ["test_partly_slow"]
    assert fast_tests(source + "pytestmark = [pytest.mark.gpu]\n") == []


@pytest.mark.parametrize(
    ("arguments", "chosen"),
    [
        ([], ["-m", "not slow"]),
        (["--all"], []),
        (["--all", "-x"], ["-x"]),
        (["tests/test_joins.py", "-k", "a b"], ["tests/test_joins.py", "-k", "a b"]),
    ],
)
def test_script_runs_the_fast_part_everything_or_what_is_asked(
    arguments: list[str], chosen: list[str], tmp_path: Path
) -> None:
    (tmp_path / "launch").mkdir()
    shutil.copy(ROOT / "launch" / "test.sh", tmp_path / "launch")
    for path, text in {"launch/setup.sh": 'echo "setup.sh $*"', ".venv/bin/python": 'printf "%s\\n" "$@"'}.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / path).chmod(0o755)
    done = subprocess.run(["bash", tmp_path / "launch/test.sh", *arguments], capture_output=True, text=True, check=True)
    first, *lines = done.stdout.splitlines()
    assert first == "setup.sh --with test"
    assert lines[:2] == ["-m", "pytest"]
    assert lines[lines.index("--durations=25") + 1 :] == chosen


def test_ci_runs_everything() -> None:
    assert "\nbash launch/test.sh --all\n" in (ROOT / ".ci" / "run").read_text()
