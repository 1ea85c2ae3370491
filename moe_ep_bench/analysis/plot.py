"""The command that draws: figures of one or several results directories, chosen by what their rows hold.

Results that cannot be trusted are named, a line each, and passed over; the rest is drawn. The exit status:
0 all was well, 1 something was passed over, 2 nothing could be drawn.
"""

from __future__ import annotations

import argparse
import contextlib
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import RootModel

from moe_ep_bench.analysis.cases import load
from moe_ep_bench.analysis.drawing import Drawing, Figure, draw
from moe_ep_bench.analysis.figures import FIGURES
from moe_ep_bench.analysis.lines import lines
from moe_ep_bench.analysis.store import Store, jobs
from moe_ep_bench.analysis.style import DEFAULT_FORMATS, FORMATS, house_style, save
from moe_ep_bench.config.conditions import parsed
from moe_ep_bench.errors import CASES_FAILED, OK, USER_ERROR, UserError, check_known, naming
from moe_ep_bench.files import check_folder, write_text
from moe_ep_bench.results import ResultsError, typed

_LINES = ("x", "y", "by", "facet", "where")


def plot(options: argparse.Namespace, say: Callable[[str], None]) -> int:
    """Draw; print the files written, and ``say`` what was passed over or lacks its rows.

    Args:
        options: directories; format and figures (None = all), comma-separated; out (None = beside the one directory);
            x, y, by and facet, of a figure of any columns; where, which rows are drawn; all, without a limit; bare,
            with the words round the picture in a file of their own.
    """
    formats = _names("--format", options.format, FORMATS)
    columns = _columns_asked_for(options)
    if options.where is not None:
        with naming("--where"):
            parsed(options.where)
    out = options.out or (options.directories[0] / "figures" if len(options.directories) == 1 else Path("figures"))
    if options.out is not None:
        check_folder(options.out, "--out")
    passed_over: list[str] = []
    try:
        store = load([path.resolve() for path in options.directories], passed_over)
    except ResultsError as error:
        say(str(error))
        return USER_ERROR
    table = columns or figures_of(store, passed_over)
    asked = None if options.figures is None else _names("--figures", options.figures, {**FIGURES, **table})
    chosen = {name: table[name] for name in asked or table if name in table}
    how = {"where": None if columns else options.where, "limited": not options.all, "bare": options.bare}
    drawn = _drawn(store, chosen, None if asked else passed_over, **how)
    for line in passed_over:
        say(line)
    written = write(drawn, out, formats, with_words=options.bare)
    # Figures that nobody named are missed only where there is no other.
    for name in asked or (drawn if columns or not written else ()):
        if drawn.get(name) is None:
            say(f"{name}: not drawn, the run has no rows for it")
    for path in written:
        print(os.path.relpath(path))
    return USER_ERROR if not written else CASES_FAILED if passed_over else OK


def figures_of(store: Store, passed_over: list[str] | None = None) -> dict[str, Figure]:
    """All figures that a store may have, its configs' ``figures:`` too, by name.

    Args:
        passed_over: gets a line for a config's figures that cannot be read; None = it is raised.
    """
    table = dict(FIGURES)
    for job in jobs(store).to_dict("records"):
        experiments = job["config"] if isinstance(job["config"], list) else [job["config"] or {}]
        for asked in (experiment["figures"] for experiment in experiments if experiment.get("figures")):
            from moe_ep_bench.config import FigureConfig

            where = f"run.json of {job['directory']}: figures."
            with _passing_over(passed_over):
                for number, figure in enumerate(typed(RootModel[list[FigureConfig]], where, asked).root):
                    table |= lines(**figure.model_dump(), of=f"{where}{number}.")
    return table


@contextlib.contextmanager
def _passing_over(lines: list[str] | None, kind: type[UserError] = UserError) -> Iterator[None]:
    """Add an error of a kind to the lines; None = raise it."""
    try:
        yield
    except kind as error:
        if lines is None:
            raise
        lines.append(str(error))


def _drawn(
    store: Store, table: Mapping[str, Figure], passed_over: list[str] | None, **how: Any
) -> dict[str, Drawing | None]:
    """The figures of a table; those of a config or of damaged claims are named in ``passed_over``.

    Args:
        how: parameters of ``draw``.
    """
    drawn = {}
    with house_style():
        for name, figure in table.items():
            with _passing_over(passed_over, ResultsError if name in FIGURES else UserError):
                drawn[name] = draw(figure, store, **how)
    return drawn


def drawings(store: Store, passed_over: list[str] | None = None) -> dict[str, Drawing]:
    """All figures for which a store has rows; ``passed_over`` as in ``figures_of``."""
    drawn = _drawn(store, figures_of(store, passed_over), passed_over)
    return {name: drawing for name, drawing in drawn.items() if drawing is not None}


def write(
    drawn: Mapping[str, Drawing | None],
    folder: Path,
    formats: Sequence[str] = DEFAULT_FORMATS,
    *,
    with_words: bool = False,
) -> list[Path]:
    """Write what was drawn, a file per format and the numbers in ``<name>.csv``; the files.

    Numbers have nine digits: more than any of them has, fewer than those in which two machines' sums differ.

    Args:
        with_words: all words round a picture are written to ``<name>.txt``, for a caption.
    """
    written = []
    with house_style():
        for name, drawing in drawn.items():
            if drawing is not None:
                paths = [folder / f"{name}.{file_format}" for file_format in formats]
                for path, file_format in zip(paths, formats, strict=True):
                    save(drawing.figure, path, file_format)
                rows = drawing.rows.infer_objects()
                texts = {"csv": rows.to_csv(index=False, float_format="%.9g", lineterminator="\n")}
                if with_words:
                    texts["txt"] = "".join(f"{line}\n" for line in drawing.words)
                written += [*paths, *(folder / f"{name}.{kind}" for kind in texts)]
                for kind, content in texts.items():
                    write_text(folder / f"{name}.{kind}", content)
    return written


def draw_all(directory: Path) -> str:
    """Draw all figures of a directory beside it, after its command; say in words which."""
    drawn = drawings(load(directory, []))
    write(drawn, directory / "figures")
    where = os.path.relpath(directory / "figures")
    return f"\nfigures in {where}: {', '.join(drawn)}" if drawn else "\nno figure was drawn"


def draw_claims(store: Store) -> list[Path]:
    """Draw ``figures/claims`` of a directory that ``papers`` left; the files, none where nothing was measured."""
    return write(_drawn(store, {"claims": FIGURES["claims"]}, None), store.directories[0].folder / "figures")


def _columns_asked_for(options: argparse.Namespace) -> dict[str, Figure]:
    """The figure of ``--x`` over ``--y``; none where these were not given."""
    given = {name: getattr(options, name) for name in _LINES}
    if not any(value for name, value in given.items() if name != "where"):
        return {}
    for name in ("x", "y"):
        if given[name] is None:
            raise UserError(f"--{name}: expected a column with --{'y' if name == 'x' else 'x'}; got none")
    if options.figures is not None:
        raise UserError("--figures: expected none with --x and --y, which ask for a figure of their own")
    return lines(**given)


def _names(option: str, text: str, known: Collection[str]) -> list[str]:
    names = [name.strip() for name in text.split(",")]
    check_known(option, names, known)
    return list(dict.fromkeys(names))
