"""Directories beside each other: every pair of those in results/reference, and all, in every format.

Each is cut to a few cases of its first comparison and read once: what differs between directories are their columns
and nulls.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
from pathlib import Path

import pandas as pd
import pytest

from moe_ep_bench.analysis import plot as plot_module
from moe_ep_bench.analysis import show as show_module
from moe_ep_bench.analysis import store as store_module
from moe_ep_bench.analysis.cases import cases, comparisons, load, routing, timings
from moe_ep_bench.analysis.drawing import _with_legend
from moe_ep_bench.analysis.page import page_of
from moe_ep_bench.analysis.show import FORMATS, show
from moe_ep_bench.analysis.store import KINDS, Directory, is_validation, read_directory
from moe_ep_bench.analysis.style import house_style
from moe_ep_bench.analysis.tables import MAIN, tables
from moe_ep_bench.errors import UserError

REFERENCE = Path(__file__).parents[1] / "results" / "reference"
ALL = sorted({path.parent for name in ("run.json", "validation.json") for path in REFERENCE.glob(f"**/{name}")})
READ = [path for path in ALL if not is_validation(path)]
OTHERS = [path for path in ALL if path not in READ]
# Their columns and nulls are another's, for which it stands in pairs.
ALIKE = {"quickstart-2cpu": "deepseek-v2-lite-recorded-2cpu"}
PAIRED = [path for path in READ if str(path.relative_to(REFERENCE)) not in ALIKE]
TABLES = {table for kind in KINDS.values() for table in kind.tables}


def first_of(one: Directory) -> Directory:
    """A directory's first comparison, with a case of each role and status, routed in two batches and layers."""
    cases = one.cases[one.cases["comparison"] == 0]
    cases = cases[~(cases["facts"].map(lambda facts: facts.role) + cases["status"]).duplicated()]
    number = pd.Series(range(len(cases)), cases.index)
    frames = {name: getattr(one, name) for name in TABLES}
    frames = {name: rows[rows["case"].isin(cases.index)] for name, rows in frames.items()}
    frames = {name: rows.assign(case=rows["case"].map(number)) for name, rows in frames.items()}
    for name in ("routing", "frontier"):
        rows = frames[name]
        frames[name] = rows[
            (rows["batch"] < 2) & (rows["layer"].isna() | rows["layer"].isin(rows["layer"].unique()[:2]))
        ]
    cases = cases.reset_index(drop=True)
    return dataclasses.replace(one, comparisons=one.comparisons[:1], cases=cases, **frames)


@functools.cache
def read_once(name: str, folder: Path, *, join_draws: bool) -> tuple[Directory | None, list[str]]:
    one, lines = read_directory(name, folder, join_draws=join_draws)
    return one and first_of(one), lines


@pytest.fixture(autouse=True)
def _fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "read_directory", read_once)
    # Claims are of cases that were cut.
    monkeypatch.setattr("moe_ep_bench.analysis.paper_claims.claims_path", lambda folder: folder / "none")
    stores = functools.lru_cache(maxsize=1)(lambda paths, _: load(paths, []))
    for module in (show_module, plot_module):
        monkeypatch.setattr(module, "load", lambda directories, passed_over: stores(tuple(directories), None))
    made = functools.lru_cache(maxsize=32)(tables)
    monkeypatch.setattr(
        show_module, "tables", lambda store, views=MAIN, asked=(): made(store, tuple(views), tuple(asked))
    )


def check(directories: list[Path], folder: Path) -> None:
    """Show in every format, and make the rows of every figure that ``plot`` and the page draw."""
    for to in FORMATS[:-1]:
        assert show(directories, to, folder / to) == 0
    rows = pd.read_csv(folder / "csv", low_memory=False)
    assert set(rows["directory"]) == {one.directory for one in load(directories).comparisons}
    assert len(json.loads((folder / "json").read_text())["rows"]) == len(rows)
    assert "nan" not in (folder / "md").read_text().lower()
    store = plot_module.load([path.resolve() for path in directories], [])
    for figure in plot_module.figures_of(store).values():
        frame = figure.frame(store)
        made = figure.rows(store, frame) if len(frame) else frame
        assert made.empty or len(_with_legend(made)) == len(made)


def check_order(directories: list[Path]) -> None:
    """Rows of a directory are the same, and of the same types, whether it comes first or last: so is what they show."""
    one, other = show_module.load(directories, []), load(directories[::-1])
    for frame_of in (cases, comparisons, routing, timings):
        found, turned = frame_of(one), frame_of(other)
        assert set(found) == set(turned)
        for name in {path.resolve().name for path in directories} if len(found) else ():
            rows, again = (frame[frame["directory"] == name].reset_index(drop=True) for frame in (found, turned))
            pd.testing.assert_frame_equal(rows, again[list(rows)])


def kind_of(folder: Path) -> tuple[object, ...]:
    """Which columns of which frames, and which facts, a directory has, and what became of its cases."""
    one, _ = read_once(folder.name, folder, join_draws=True)
    frames = [[name, *getattr(one, name).dropna(axis="columns", how="all")] for name in sorted(TABLES)]
    return frames, one.comparisons[0].facts.model_dump(exclude_none=True).keys(), set(one.cases["status"])


def test_directories_that_are_left_out_of_pairs_are_like_one_that_is_not() -> None:
    for name, other in ALIKE.items():
        assert kind_of(REFERENCE / name) == kind_of(REFERENCE / other), name


@pytest.mark.slow
@pytest.mark.parametrize("first", PAIRED, ids=lambda path: str(path.relative_to(REFERENCE)))
def test_every_two_directories_stand_beside_each_other_in_every_format(first: Path, tmp_path: Path) -> None:
    place = PAIRED.index(first)
    for second in PAIRED[place:]:
        pair = [first, second] if (place + PAIRED.index(second)) % 2 else [second, first]
        check(pair, tmp_path)
        check_order(pair)


@pytest.mark.slow
def test_all_directories_stand_beside_each_other_in_every_format_on_a_page_and_in_figures(tmp_path: Path) -> None:
    check(READ, tmp_path)
    check_order(READ)
    assert show(READ[::-1], "text", tmp_path / "text") == 0
    lines: list[str] = []
    with house_style():
        page = page_of(ALL, lines)
    assert all(path.resolve().name in page for path in READ)
    assert len(lines) == len(OTHERS)


def test_nulls_are_alike_in_every_frame() -> None:
    """NaN among numbers and None among all else, of each column of each frame."""
    store = load(READ)
    for frame in (cases(store), comparisons(store), routing(store), timings(store)):
        for name, column in frame.items():
            nulls = [value for value in column[column.isna()] if value is not pd.NA]
            is_number = pd.api.types.is_numeric_dtype(column)
            assert all(isinstance(value, float) if is_number else value is None for value in nulls), name


@pytest.mark.parametrize(("first", "second"), list(itertools.permutations([READ[0], *OTHERS], 2)))
def test_a_directory_that_stands_alone_is_named(first: Path, second: Path) -> None:
    alone = next(path for path in (first, second) if path in OTHERS)
    with pytest.raises(UserError, match=f"^{alone}: holds validation; expected such a directory by itself$"):
        show([first, second], "text")
