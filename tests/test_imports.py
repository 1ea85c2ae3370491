"""Imports run one way: no circle among modules, those inside functions and those for types included."""

from __future__ import annotations

import ast
import graphlib
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "moe_ep_bench"
MOST_LOOSE_MODULES = 11


def modules() -> dict[str, Path]:
    """Every module of the package by its dotted name."""
    found = {}
    for path in PACKAGE.rglob("*.py"):
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports_of(source: str, known: set[str]) -> set[str]:
    """The package's own modules that a source imports anywhere."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            submodules = {f"{node.module}.{alias.name}" for alias in node.names}
            # A name that is no module of its own comes from the package's __init__.
            found |= (submodules & known) | ({node.module} if submodules - known else set())
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return found & known


def circle_in(graph: dict[str, set[str]]) -> list[str]:
    """One circle of imports, its first module once more at its end; empty where there is none."""
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return error.args[1]
    return []


def test_imports_have_no_circle() -> None:
    paths = modules()
    graph = {name: imports_of(path.read_text(), set(paths)) - {name} for name, path in paths.items()}
    assert len(graph) > 50
    assert circle_in(graph) == []


def test_a_circle_would_be_found() -> None:
    inside = "def later():\n    from package.b import thing\n"
    graph = {
        "package.a": imports_of(inside, {"package.a", "package.b"}),
        "package.b": imports_of("import package.a\n", {"package.a", "package.b"}),
    }
    assert set(circle_in(graph)) == {"package.a", "package.b"}


def test_at_most_eleven_modules_lie_loose() -> None:
    loose = sorted(path.name for path in PACKAGE.glob("*.py"))
    assert len(loose) <= MOST_LOOSE_MODULES, loose
