"""One look for all figures: colours, text sizes, and a sheet with title, legend and footer.

Colours are those of Okabe and Ito, which most colour-blind readers tell apart; markers, line
styles and hatches differ too, so that a grey print reads as well. Legends stand above the panels,
never on data. Equal input gives equal bytes: no dates, fixed salts, and no settings of the user.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path

import matplotlib.style
import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.textpath import text_to_path

from moe_ep_bench.records import atomic_path

# What a file of each format would otherwise say of its making; the date changes, the rest is noise.
FORMATS = {"png": {"Software": None}, "svg": {"Date": None, "Creator": None}}

INK, MUTED, RULE = "#222222", "#5A5A5A", "#DDDDDD"
NATIVE_FILL, NOISE_FILL = "#C9C9C9", "#E4E4E4"
CEILING_LINE = {"color": MUTED, "linestyle": (0, (5, 2)), "linewidth": 1.4}
GAMMA = "\N{GREEK SMALL LETTER GAMMA}"

STYLE = {
    "figure.dpi": 160,
    "savefig.dpi": 160,
    "font.family": "DejaVu Sans",  # comes with matplotlib: the same on every machine
    "font.size": 10,
    "text.color": INK,
    "text.parse_math": False,  # labels are the user's: a dollar sign is a dollar sign
    "axes.titlesize": 10,
    "axes.titlelocation": "left",
    "axes.titleweight": "bold",
    "axes.labelsize": 9.5,
    "axes.labelcolor": INK,
    "axes.edgecolor": MUTED,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": RULE,
    "grid.linewidth": 0.7,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "xtick.labelsize": 9,
    "ytick.labelsize": 9,
    "legend.fontsize": 9,
    "legend.frameon": False,
    "lines.linewidth": 1.6,
    "lines.markersize": 6,
    "hatch.linewidth": 0.7,
    "svg.hashsalt": "moe-ep-bench",
}

# Inches; points.
_MARGIN, _HANDLE = 0.15, 0.56
_SUBTITLE_SIZE, _FOOTER_SIZE = 9, 8

# Time that a rank works has a plain or lightly hatched colour; waiting must not be taken for work.
PHASE_LOOKS = {
    "shared": {"facecolor": "#CC79A7", "edgecolor": "white", "hatch": "xx"},
    "gate": {"facecolor": "#56B4E9", "edgecolor": "white"},
    "permute": {"facecolor": "#009E73", "edgecolor": "white", "hatch": "\\\\\\"},
    "comm": {"facecolor": "#D55E00", "edgecolor": "white", "hatch": "..."},
    "experts": {"facecolor": "#0072B2", "edgecolor": "white"},
    "waiting": {"facecolor": "#F0E442", "edgecolor": INK, "hatch": "////"},
    "unaccounted": {"facecolor": "white", "edgecolor": MUTED},
}

# A label, and an artist or several on top of each other.
Legend = Sequence[tuple[str, Artist | tuple[Artist, ...]]]

_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">")
_LINES = ("-", "--", "-.", (0, (1, 1.2)))
_HATCHES = ("", "////", "....", "xxxx", "----")


@dataclass(frozen=True)
class Look:
    """How one policy family is named and drawn in every figure of a run."""

    label: str
    colour: str
    marker: str
    line: str | tuple
    hatch: str


def looks_of(labels: Mapping[str, str]) -> dict[str, Look]:
    """Give each family (key -> label) a look; colours repeat after seven, with other markers and lines."""
    return {
        family: Look(label, *looks)
        for (family, label), *looks in zip(
            labels.items(), cycle(_COLOURS), cycle(_MARKERS), cycle(_LINES), cycle(_HATCHES), strict=False
        )
    }


@contextmanager
def house_style() -> Iterator[None]:
    """Apply ``STYLE`` to matplotlib's defaults, whatever the user's own are, and restore these afterwards."""
    with matplotlib.style.context(STYLE, after_reset=True):
        yield


def sheet(title: str, subtitle: str, footer: Sequence[str], legend: Legend, *, width: float, body: float) -> Figure:
    """Make a figure with a header and a footer, and a free body for the panels.

    Args:
        subtitle, footer: wrapped to the width; the footer's entries are paragraphs.
        legend: labels and what is drawn beside them, laid out in rows under the subtitle.
        width, body: inches; the height is what the body, the header and the footer need.
    """
    room = width - 2 * _MARGIN
    subtitle = wrap(subtitle, room, _SUBTITLE_SIZE)
    footer_text = "\n".join(wrap(paragraph, room, _FOOTER_SIZE) for paragraph in footer)
    # Columns of a legend are as wide as its longest label, its handle and a gap.
    labels = [wrap(label, room - _HANDLE, STYLE["legend.fontsize"]) for label, _ in legend]
    longest = max((_text_width(label, STYLE["legend.fontsize"]) for label in labels), default=0.0)
    num_rows = -(-len(labels) // max(1, int(room / (longest + _HANDLE))))
    num_columns = -(-len(labels) // max(1, num_rows))
    num_legend_lines = num_rows * max((label.count("\n") + 1 for label in labels), default=0)

    subtitle_top = _MARGIN + 0.3
    legend_top = subtitle_top + 0.17 * (subtitle.count("\n") + 1) + 0.1
    header = legend_top + 0.19 * num_legend_lines + 0.04
    foot = _MARGIN + 0.155 * (footer_text.count("\n") + 1) + 0.08
    height = header + body + foot

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    left = _MARGIN / width
    engine = figure.get_layout_engine()
    assert engine is not None
    engine.set(rect=(left, foot / height, room / width, body / height), w_pad=0.06, h_pad=0.06)
    small = {"color": MUTED, "linespacing": 1.3}
    figure.text(left, 1 - _MARGIN / height, title, fontsize=13, weight="bold", va="top")
    figure.text(left, 1 - subtitle_top / height, subtitle, fontsize=_SUBTITLE_SIZE, va="top", **small)
    figure.text(left, _MARGIN / height, footer_text, fontsize=_FOOTER_SIZE, va="bottom", **small)
    if legend:
        drawn = figure.legend(
            [handle for _, handle in legend],
            labels,
            ncols=num_columns,
            loc="upper left",
            bbox_to_anchor=(left, 1 - legend_top / height),
            borderaxespad=0,
            borderpad=0,
            columnspacing=1.6,
        )
        drawn.set_in_layout(False)
    return figure


def panel_title(axes: Axes, text: str, inches: float) -> None:
    """Title a panel that is ``inches`` wide."""
    axes.set_title(wrap(text, inches, STYLE["axes.titlesize"], STYLE["axes.titleweight"]))


def wrap(text: str, inches: float, size: float, weight: str = "normal") -> str:
    """Break a text into lines that are no wider than ``inches``, inside a word if it must be."""
    lines, line = [], ""
    for word in text.split():
        if _text_width(f"{line} {word}", size, weight) <= inches:
            line = f"{line} {word}".strip()
            continue
        lines += [line] if line else []
        line = word
        while _text_width(line, size, weight) > inches:
            cut = next(
                n for n in range(len(line) - 1, 0, -1) if n == 1 or _text_width(line[:n], size, weight) <= inches
            )
            lines.append(line[:cut])
            line = line[cut:]
    return "\n".join([*lines, line])


def _text_width(text: str, size: float, weight: str = "normal") -> float:
    """Width in inches of the widest line."""
    font = FontProperties(family=STYLE["font.family"], size=size, weight=weight)
    return max(text_to_path.get_text_width_height_descent(line, font, False)[0] for line in text.split("\n")) / 72


def settle_layout(figure: Figure) -> None:
    """Fix the panels where the layout puts them, rounded: its solver's last bits differ from run to run."""
    figure.draw_without_rendering()
    figure.set_layout_engine("none")
    for axes in figure.axes:
        axes.set_position(np.round(axes.get_position(original=True).bounds, 6).tolist())


def save(figure: Figure, path: Path, file_format: str) -> None:
    """Write a figure; the file appears whole or not at all."""
    with atomic_path(path) as temporary:
        figure.savefig(temporary, format=file_format, metadata=FORMATS[file_format])
