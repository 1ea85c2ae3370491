"""One look for all figures: colours, text sizes, and a sheet with title, legend and footer.

Colours are those of Okabe and Ito, which most colour-blind readers tell apart; markers, line
styles and hatches differ too, so that a grey print reads as well. Legends stand above the panels,
never on data. Equal input gives equal bytes: no dates, fixed salts, and no settings of the user.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import matplotlib.style
from matplotlib.artist import Artist
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from moe_ep_bench.records import atomic_path

# What a file of each format would otherwise say of its making; the date changes, the rest is noise.
FORMATS = {"png": {"Software": None}, "svg": {"Date": None, "Creator": None}}

INK, MUTED, RULE = "#222222", "#5A5A5A", "#DDDDDD"
NATIVE_FILL, NOISE_FILL = "#C9C9C9", "#E4E4E4"
CEILING_LINE = {"color": MUTED, "linestyle": (0, (5, 2)), "linewidth": 1.4}
GAMMA = r"$\gamma$"

STYLE = {
    "figure.dpi": 160,
    "savefig.dpi": 160,
    "font.family": "DejaVu Sans",  # comes with matplotlib: the same on every machine
    "font.size": 10,
    "text.color": INK,
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
    cycles = (_COLOURS, _MARKERS, _LINES, _HATCHES)
    return {
        family: Look(label, *(cycle[index % len(cycle)] for cycle in cycles))
        for index, (family, label) in enumerate(labels.items())
    }


@contextmanager
def house_style() -> Iterator[None]:
    """Apply ``STYLE`` to matplotlib's defaults, whatever the user's own are, and restore these afterwards."""
    with matplotlib.style.context(STYLE, after_reset=True):
        yield


def sheet(
    title: str, subtitle: str, footer: Sequence[str], legend: Sequence[Artist], *, width: float, body: float
) -> Figure:
    """Make a figure with a header and a footer, and a free body for the panels.

    Args:
        subtitle, footer: wrapped to the width; the footer's entries are paragraphs.
        legend: labelled artists, laid out in rows under the subtitle.
        width, body: inches; the height is what the body, the header and the footer need.
    """
    margin, line = 0.15, 0.175
    subtitle_lines = _wrapped(subtitle, width, 0.073)
    footer_lines = [text for paragraph in footer for text in _wrapped(paragraph, width, 0.066)]
    longest = max((len(str(artist.get_label())) for artist in legend), default=0)
    columns = max(1, min(len(legend), int((width - 2 * margin) / (0.075 * longest + 0.62))))
    legend_rows = -(-len(legend) // columns)
    subtitle_top = margin + 0.3
    legend_top = subtitle_top + line * len(subtitle_lines) + 0.08
    header = legend_top + 0.215 * legend_rows + 0.1
    foot = margin + 0.155 * len(footer_lines) + 0.1
    height = header + body + foot

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    figure.get_layout_engine().set(
        rect=(margin / width, foot / height, 1 - 2 * margin / width, body / height), w_pad=0.06, h_pad=0.06
    )
    left = margin / width
    figure.text(left, 1 - margin / height, title, fontsize=13, weight="bold", va="top")
    figure.text(
        left, 1 - subtitle_top / height, "\n".join(subtitle_lines), fontsize=9, color=MUTED, va="top", linespacing=1.3
    )
    figure.text(left, margin / height, "\n".join(footer_lines), fontsize=8, color=MUTED, va="bottom", linespacing=1.3)
    if legend:
        figure.legend(
            handles=legend,
            ncols=columns,
            loc="upper left",
            bbox_to_anchor=(left, 1 - legend_top / height),
            borderaxespad=0,
            borderpad=0,
            columnspacing=1.6,
        ).set_in_layout(False)
    return figure


def wrap_label(text: str, width: int) -> str:
    """Break a long label into lines of at most ``width`` characters, inside a word if it must."""
    return "\n".join(textwrap.wrap(text, width)) or text


def save(figure: Figure, path: Path, file_format: str) -> None:
    """Write a figure; the file appears whole or not at all."""
    with atomic_path(path) as temporary:
        figure.savefig(temporary, format=file_format, metadata=FORMATS[file_format])


def _wrapped(text: str, width: float, inches_per_character: float) -> list[str]:
    return textwrap.wrap(text, int((width - 0.3) / inches_per_character))
