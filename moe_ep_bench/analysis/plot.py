"""The command that draws: figures of one or several results directories, chosen by what their rows hold.

What cannot be trusted is named, a line each, and passed over; the rest is drawn. The exit status tells scripts which:
0 all was well, 1 something was passed over, 2 nothing could be drawn.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from moe_ep_bench.analysis.answer_figures import CLAIMS_FIGURE, QUALITY_FIGURES
from moe_ep_bench.analysis.cases import load
from moe_ep_bench.analysis.drawing import Drawing, Figure, draw
from moe_ep_bench.analysis.figures import FIGURES
from moe_ep_bench.analysis.lines import Lines
from moe_ep_bench.analysis.papers import Claims
from moe_ep_bench.analysis.reading import Errors, ResultsError
from moe_ep_bench.analysis.store import Store, kind_of
from moe_ep_bench.analysis.style import DEFAULT_FORMATS, FORMATS, SIZES, house_style, save
from moe_ep_bench.errors import UserError, brief
from moe_ep_bench.files import check_folder, read_json, refuse_links_out
from moe_ep_bench.runtime.exit_codes import CASES_FAILED, OK, USER_ERROR

_LINES = ("x", "y", "by", "facet", "where")


def plot(options: argparse.Namespace, say: Callable[[str], None]) -> int:
    """Draw; print the files written, and ``say`` what was passed over or lacks its rows.

    Args:
        options: directories; format and figures (None = all), comma-separated; out (None = beside the one directory);
            x, y, by, facet and where, of a figure of any columns; case, of ``timeline``.
    """
    formats = _names("--format", options.format, FORMATS)
    size = _names("--size", options.size, SIZES)[0]
    lines = _asked_lines(options)
    known = {**FIGURES, **QUALITY_FIGURES, **{line.name: line for line in lines_of(options.directories)}}
    asked = None if options.figures is None else _names("--figures", options.figures, known)
    out = options.out or (options.directories[0] / "figures" if len(options.directories) == 1 else Path("figures"))
    if options.out is not None:
        check_folder(out, "--out")
    elif len(options.directories) == 1:
        refuse_links_out(out.parent, out)
    passed_over: list[str] = []
    drawn = {}
    for store in stores(options.directories, passed_over):
        with house_style(size):
            table = {lines.name: lines.figure()} if lines else figures_of(store, lines_of(options.directories))
            names = [name for name in (asked or table) if name in table]
            drawn |= drawings(store, {name: table[name] for name in names}, options.case)
    for line in passed_over:
        say(line)
    written = write(drawn, out, formats, size)
    # Figures that nobody named are missed only where there is no other.
    for name in (name for name, drawing in drawn.items() if drawing is None and (asked or lines or not written)):
        say(f"{name}: not drawn, the run has no rows for it")
    for path in written:
        print(os.path.relpath(path))
    return USER_ERROR if not written else CASES_FAILED if passed_over else OK


def stores(directories: Sequence[Path], passed_over: list[str]) -> Iterator[Any]:
    """What the directories hold: times and routing as one ``Store``, and each of ``quality`` by itself.

    A directory that cannot be read is named in ``passed_over``.
    """
    timed = []
    for directory in dict.fromkeys(path.resolve() for path in directories):
        if kind_of(directory) != "quality":
            timed.append(directory)
            continue
        if (quality := Errors(passed_over).read(_quality, directory)) is not None:
            yield quality
    if timed:
        lines: list[str] = []
        store = Errors(passed_over).read(load, timed, lines)
        if store is not None or len(timed) > 1:  # of one directory alone the error's line says why
            passed_over += lines
        if store is not None:
            yield store


def _quality(directory: Path) -> Any:
    from moe_ep_bench.analysis.quality import read_quality  # it imports torch

    quality = read_quality(directory)
    if quality.comparisons["text"].isna().all():
        raise ResultsError(f"{directory}: holds scores of tasks, of which there are no figures; `show` prints them")
    return quality


def figures_of(store: Any, lines: Sequence[Lines] = ()) -> dict[str, Figure]:
    """All figures that a store may have, those of its configs too, by name."""
    if not isinstance(store, Store):
        return QUALITY_FIGURES
    return {**FIGURES, **{line.name: line.figure() for line in lines}}


def drawings(store: Any, figures: Mapping[str, Figure], case: str | None = None) -> dict[str, Drawing | None]:
    """Draw figures of a store, the timeline of a ``case``; None where it has no rows for one. In ``house_style``."""
    options = {"timeline": {"case": case}}
    return {name: draw(figure, store, **options.get(name, {})) for name, figure in figures.items()}


def write(
    drawn: Mapping[str, Drawing | None], folder: Path, formats: Sequence[str] = DEFAULT_FORMATS, size: str = "page"
) -> list[Path]:
    """Write what was drawn, a file per format and the numbers in ``<name>.csv``; the files."""
    written = []
    with house_style(size):
        for name, drawing in drawn.items():
            if drawing is not None:
                for file_format in formats:
                    written.append(folder / f"{name}.{file_format}")
                    save(drawing.figure, written[-1], file_format)
                written.append(folder / f"{name}.csv")
                drawing.write_rows(written[-1])
    return written


def draw_all(directory: Path) -> str:
    """Draw all figures of a directory beside it, after its command; say in words which."""
    passed_over: list[str] = []
    drawn: dict[str, Drawing | None] = {}
    with house_style():
        for store in stores([directory], passed_over):
            drawn |= drawings(store, figures_of(store, lines_of([directory])))
    written = write(drawn, directory / "figures")
    names = ", ".join(dict.fromkeys(path.stem for path in written))
    return f"\nfigures in {os.path.relpath(directory / 'figures')}: {names}" if names else "\nno figure was drawn"


def draw_claims(claims: Claims) -> list[Path]:
    """Draw ``figures/claims`` of what ``papers`` left; the files, none where nothing was measured."""
    folder = claims.directory / "figures"
    refuse_links_out(claims.directory, folder)
    with house_style():
        drawn = drawings(claims, {"claims": CLAIMS_FIGURE})
    return write(drawn, folder)


def lines_of(directories: Sequence[Path]) -> list[Lines]:
    """The ``figures:`` of the directories' configs, each once."""
    found = []
    for directory in directories:
        try:
            config = read_json(directory / "run.json").get("config") or []
        except (OSError, ValueError, AttributeError):
            continue  # named where the directory is read
        for experiment in config if isinstance(config, list) else [config]:
            listed = experiment.get("figures") if isinstance(experiment, dict) else None
            found += [_line_of(line, directory) for line in (listed if isinstance(listed, list) else [])]
    return list(dict.fromkeys(found))


def _line_of(values: object, directory: Path) -> Lines:
    given = {key: values.get(key) for key in _LINES} if isinstance(values, dict) else {}
    is_word = {key: isinstance(value, str) or (value is None and key not in "xy") for key, value in given.items()}
    if not given or not all(is_word.values()):
        expected = f"words for {', '.join(_LINES)}"
        raise UserError(f"{directory / 'run.json'}: config: figures: expected {expected}; got {brief(values)}")
    return Lines(**given)


def _asked_lines(options: argparse.Namespace) -> Lines | None:
    given = {name: getattr(options, name) for name in _LINES}
    if not any(given.values()):
        return None
    for name in ("x", "y"):
        if given[name] is None:
            raise UserError(f"--{name}: expected a column beside --{'y' if name == 'x' else 'x'}; got none")
    if options.figures is not None:
        raise UserError("--figures: expected none beside --x and --y, which ask for a figure of their own")
    return Lines(**given)


def _names(option: str, text: str, known: Collection[str]) -> list[str]:
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in known:
            raise UserError(f"{option}: expected some of {', '.join(known)}; got {name!r}")
    return list(dict.fromkeys(names))
