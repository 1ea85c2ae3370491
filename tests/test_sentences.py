"""Sentences of results have one home: other modules give facts, and renderers say them."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import moe_ep_bench

PACKAGE = Path(moe_ep_bench.__file__).parent
ROOMS = ("analysis", "bench", "machine", "papers", "quality", "serving")
FEWEST_WORDS = 4
# A word between spaces, with the signs of a sentence around it.
WORD = re.compile(r"[(\"]?[A-Za-z][a-z]*(?:'s)?[.,:;)\"]*")
# Calls whose texts are errors or lines of a command.
SAYING = re.compile(r".*Error|print|check_known|error|warn|warning|info|say|naming")
# Where sentences are composed: whole modules, or names of theirs.
RENDERERS = {
    "analysis/advice.py": None,
    "analysis/figures.py": None,
    "analysis/notes.py": None,
    "analysis/columns.py": {"COLUMNS", "SAME_KERNELS", "_text"},
    "analysis/drawing.py": {"draw", "_left_out"},
    "analysis/lines.py": {"lines"},
    "analysis/paper_claims.py": {"_OF"},
    "analysis/tables.py": {"VIEWS"},
    "papers/claims.py": {"CLAIMED"},
}
# Errors, reasons of lost cases, logs and lines of commands that are put together before they are raised or printed.
SAID = {
    "analysis/advise.py": {"write_answer"},
    "analysis/cases.py": {"load_timed"},
    "analysis/lines.py": {"_are_there"},
    "analysis/plot.py": {"draw_all"},
    "analysis/show.py": {"end_of_run"},
    "analysis/store.py": {"_read_comparison"},
    "bench/advise_config.py": {"Question", "check_reading", "_of_config", "_of_flags"},
    "bench/checks.py": None,
    "bench/commands.py": {"_agreed_plan", "_measure"},
    "bench/inspection.py": {"_difference"},
    "bench/meetings.py": {"held_share"},
    "bench/paired_run.py": {"validate"},
    "bench/plan.py": {"plan_experiments", "make_point", "_sampled", "_stand_ins", "_lines", "open_workloads"},
    "bench/real_ranks.py": {"RealRanks"},
    "bench/virtual_ranks.py": {"VirtualRanks"},
    "machine/doctor.py": None,
    "papers/claims.py": {"_as_metric"},
    "quality/checkpoint.py": {"Checkpoint", "_one_line"},
    "quality/recording.py": {"MEASURE", "_write_similarity"},
    "quality/routed.py": {"impossible"},
    "quality/session.py": {"_comparisons"},
    "quality/tasks.py": {"check_task"},
    "serving/__init__.py": {"check_config"},
    "serving/backends.py": {"Backend", "backend_of"},
    "serving/client.py": {"Client"},
    "serving/prompts.py": {"_WORDS"},
    "serving/recorder.py": {"Recorder"},
    "serving/server.py": {"Server"},
    "serving/step.py": {"StepRouter", "_UNKNOWN_ROUTERS"},
    "serving/vllm.py": {"define_operations", "_execute_model"},
}


def sentences(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Texts of several plain words, but for docstrings, errors and what commands print, with the top-level name."""
    for top in tree.body:
        targets = [top.target] if isinstance(top, ast.AnnAssign) else getattr(top, "targets", [])
        name = getattr(top, "name", None) or next((of.id for of in targets if isinstance(of, ast.Name)), "")
        yield from ((name, text) for text in _texts(top) if sum(map(_is_word, text.split())) >= FEWEST_WORDS)


def _is_word(text: str) -> bool:
    return WORD.fullmatch(text) is not None


def _texts(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value
    elif isinstance(node, ast.JoinedStr):
        yield "".join(str(part.value) if isinstance(part, ast.Constant) else "0" for part in node.values)
        for part in node.values:
            if isinstance(part, ast.FormattedValue):
                yield from _texts(part.value)
    elif not _is_passed_over(node):
        for child in ast.iter_child_nodes(node):
            yield from _texts(child)


def _is_passed_over(node: ast.AST) -> bool:
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):  # a docstring
        return True
    called = node.func if isinstance(node, ast.Call) else None
    name = getattr(called, "attr", getattr(called, "id", ""))
    return isinstance(node, (ast.Raise, ast.Assert)) or bool(SAYING.fullmatch(name))


@pytest.mark.parametrize("room", ROOMS)
def test_sentences_of_results_have_one_home(room: str) -> None:
    for path in sorted((PACKAGE / room).rglob("*.py")):
        module = path.relative_to(PACKAGE).as_posix()
        found = dict(sentences(ast.parse(path.read_text())))
        for homes in (RENDERERS, SAID):
            if module in homes:
                names = homes[module]
                assert found if names is None else names <= found.keys(), f"{module}: a home that holds nothing"
                found = {} if names is None else {name: text for name, text in found.items() if name not in names}
        assert not found, f"{module}: a sentence outside of its home: {found}"


@pytest.mark.parametrize(
    ("line", "is_found"),
    [
        ("notes = ['native was not measured']", True),
        ("def f(n): return f'the fullest {n} of all ranks'", True),
        ("def f(n): return g(f'{n} is the {n:,.0f} most loaded')", True),
        ("class A:\n  x: int\n  'what an attribute of it is'", False),
        ("raise UserError('give at least one rank') from None", False),
        ("where = \"mode == 'run' and role == 'policy'\"", False),
    ],
)
def test_a_sentence_is_told_from_docstrings_errors_and_conditions(line: str, is_found: bool) -> None:
    assert bool([*sentences(ast.parse(line))]) == is_found


# Errors of other packages without a kind of their own: torch about a CUDA device, transformers about a model.
_OTHERS = {"runtime/attempts.py", "quality/checkpoint.py"}
_SEARCHES = {
    "startswith",
    "endswith",
    "removeprefix",
    "removesuffix",
    "partition",
    "rpartition",
    "find",
    "index",
    "count",
}


def searches(tree: ast.AST) -> list[int]:
    """Lines that look for something in the text of an error: ``in str(error)``, ``str(error).startswith``, ``re``."""

    def is_text(node: ast.AST) -> bool:
        return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "str"

    errors = {node.name for node in ast.walk(tree) if isinstance(node, ast.ExceptHandler) and node.name}
    errors |= {"error", "problem", "exc"}
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare):
            texts = node.comparators
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            of_re = isinstance(node.func.value, ast.Name) and node.func.value.id == "re"
            texts = node.args if of_re else [node.func.value] * (node.func.attr in _SEARCHES)
        else:
            continue
        named = [text.args[0] for text in texts if is_text(text) and text.args]
        if any(isinstance(one, ast.Name) and one.id in errors for one in named):
            found.append(node.lineno)
    return found


def test_nothing_looks_for_words_in_an_error_of_ours() -> None:
    """A flag, a hint or a reason is taken from an error's fields."""
    root = Path(moe_ep_bench.__file__).parent
    found = {
        str(path.relative_to(root))
        for path in root.rglob("*.py")
        if searches(ast.parse(path.read_text(encoding="utf-8")))
    }
    assert found == _OTHERS


@pytest.mark.parametrize(
    ("text", "is_search"),
    [
        ("'modality' in str(problem)", True),
        ("str(error).removeprefix('file: ')", True),
        ("re.sub('a', 'b', str(error))", True),
        ("try: pass\nexcept ValueError as wrong: found = str(wrong).partition(':')", True),
        ("' '.join(str(error).split())", False),
        ("str(path).startswith('a')", False),
        ("problem.keys == ('modality_T',)", False),
    ],
)
def test_a_search_in_an_error_is_found(text: str, is_search: bool) -> None:
    assert bool(searches(ast.parse(text))) == is_search
