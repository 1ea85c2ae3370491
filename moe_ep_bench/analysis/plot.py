"""The command that draws: figures of one or several results directories, chosen by what their rows hold.

What cannot be trusted is named, a line each, and passed over; the rest is drawn. The exit status tells scripts which:
0 all was well, 1 something was passed over, 2 nothing could be drawn.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

from moe_ep_bench.analysis.choice import Choice, IterationChoice
from moe_ep_bench.analysis.figures import FIGURES, WHOLE_FIGURES, draw_figures, draw_named
from moe_ep_bench.analysis.gather import gather, kind_of
from moe_ep_bench.analysis.style import FORMATS, SIZES, Drawing
from moe_ep_bench.errors import UserError
from moe_ep_bench.files import check_folder, refuse_links_out
from moe_ep_bench.results import ValidationDirectory
from moe_ep_bench.runtime.exit_codes import CASES_FAILED, OK, USER_ERROR


def figures_of(kind: str) -> Mapping[str, Callable[..., Drawing | None]]:
    """The figures of a kind of directory: ``layers``, ``models``, ``routing`` or ``quality``."""
    if kind == "routing":
        from moe_ep_bench.analysis.route.figures import ROUTE_FIGURES  # it imports torch

        return ROUTE_FIGURES
    if kind == "quality":
        from moe_ep_bench.analysis.quality_figures import QUALITY_FIGURES  # likewise

        return QUALITY_FIGURES
    return {"layers": FIGURES, "models": WHOLE_FIGURES}[kind]


def plot(options: argparse.Namespace, say: Callable[[str], None]) -> int:
    """Draw; print the files written, and ``say`` what was passed over, merged or lacks its rows.

    Args:
        options: directories; format and figures (None = all), comma-separated; out (None = beside the one directory).
    """
    formats = _names("--format", options.format, FORMATS)
    known = dict.fromkeys(name for kind in {*map(kind_of, options.directories)} for name in figures_of(kind))
    asked = None if options.figures is None else _names("--figures", options.figures, known)
    size = _names("--size", options.size, SIZES)[0]
    single = options.directories[0] / "figures" if len(options.directories) == 1 else Path("figures")
    out = options.out or single
    if options.out is not None:
        check_folder(out, "--out")
    elif len(options.directories) == 1:
        refuse_links_out(out.parent, out)
    choice = Choice(options.case, IterationChoice.parse(options.iteration))
    for directory in options.directories:
        if ValidationDirectory(directory).pairs.is_file():
            raise UserError(
                f"{directory}: holds two runs side by side: name {directory / 'real'} or {directory / 'emulated'}"
            )
    gathered = gather(options.directories)
    for line in (*gathered.passed_over, *gathered.notes):
        say(line)
    files: list[Path] = []
    for kind, folders in gathered.found.items():
        table = figures_of(kind) if folders else {}
        names = [name for name in (asked or table) if name in table]
        for folder, rows in folders.items():
            if kind in ("layers", "models"):
                written, lacking = draw_figures(rows, out / folder, formats, names, size=size, choice=choice)
            else:
                written, lacking = draw_named(table, rows, out / folder, formats, names, size)
            files += written
            # Figures of times that nobody named are missed only where there is no other.
            is_missed = asked is not None or not written or kind in ("routing", "quality")
            for name in lacking if is_missed else ():
                say(f"{name}: not drawn, the run has no rows for it{f' ({folder})' if folder else ''}")
    for path in files:
        print(os.path.relpath(path))
    if not files:
        return USER_ERROR
    return CASES_FAILED if gathered.passed_over else OK


def _names(option: str, text: str, known: Collection[str]) -> list[str]:
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in known:
            raise UserError(f"{option}: expected some of {', '.join(known)}; got {name!r}")
    return list(dict.fromkeys(names))
