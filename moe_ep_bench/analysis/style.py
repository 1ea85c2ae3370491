"""One look for all figures: colours, text sizes, and a sheet with title, legend and footer.

Colours are those of Okabe and Ito, which most colour-blind readers tell apart; markers, line styles and hatches differ
too, so that a grey print reads as well. What was taken from the world is *filled* (measured times, recorded scores),
what stands in for it is *hollow* (emulated, synthetic), what was computed is *dashed* (modelled), what others measured
is *dotted* (measured elsewhere): in the tags beside a title, in the frames of panels, and in marks where one panel
holds several origins.

A size (``SIZES``) sets matplotlib's parameters: width, fonts, dots per inch. Matplotlib's layout does the rest.
Equal input gives equal bytes: no dates, fixed salts, and no settings of the user.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import matplotlib.style
import numpy as np
import pandas as pd
from matplotlib import rcParams
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties, findfont
from matplotlib.ft2font import FT2Font, LoadFlags
from matplotlib.layout_engine import ConstrainedLayoutEngine

from moe_ep_bench.analysis.words import HOW, PARTLY_ELSEWHERE, Origin, tags_of
from moe_ep_bench.cost_model.tables import MEASURED_ELSEWHERE
from moe_ep_bench.errors import UserError
from moe_ep_bench.files import atomic_path
from moe_ep_bench.schema import PHASES, UNACCOUNTED

# What a file of each format would otherwise say of its making; the date changes, the rest is noise.
FORMATS = {
    "png": {"Software": None},
    "svg": {"Date": None, "Creator": None},
    "pdf": {"CreationDate": None, "Creator": None, "Producer": None},
}
DEFAULT_FORMATS = ("png", "svg")

INK, MUTED, RULE, GREY = "#222222", "#5A5A5A", "#DDDDDD", "#C9C9C9"
NATIVE_FILL, NOISE_FILL = GREY, "#E4E4E4"
CEILING_LINE = {"color": MUTED, "linestyle": (0, (5, 2)), "linewidth": 1.4}
NATIVE_LINE = {"color": INK, "linewidth": 1.2, "zorder": 1}
GAMMA = "\N{GREEK SMALL LETTER GAMMA}"
_DASHES, _DOTS = (0, (3, 2)), (0, (1, 1))
# Lines, frames and tags of what was not run here.
_LINE_OF = {"modelled": _DASHES, PARTLY_ELSEWHERE: _DOTS}

FONT = "DejaVu Sans"  # comes with matplotlib: the same on every machine
FONT_SIZES = {
    "font.size": 10,  # "small" is 0.833 of it
    "figure.titlesize": 13,
    "figure.labelsize": 9,
    "axes.titlesize": 10,
    "axes.labelsize": 9.5,
    "xtick.labelsize": 9,
    "ytick.labelsize": 9,
    "legend.fontsize": 9,
}
STYLE = {
    "axes.titlepad": 8.0,
    **FONT_SIZES,
    "savefig.dpi": "figure",
    "font.family": FONT,
    "text.color": INK,
    "text.parse_math": False,  # labels are the user's: a dollar sign is a dollar sign
    "axes.titlelocation": "left",
    "axes.titleweight": "bold",
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
    "legend.frameon": False,
    "lines.linewidth": 1.6,
    "lines.markersize": 6,
    "hatch.linewidth": 0.7,
    "svg.hashsalt": "moe-ep-bench",
    "pdf.fonttype": 42,  # TrueType, which publishers ask for
}
# The greatest width in inches; the height, 0 = what a figure needs; text over the page's; dots per inch.
SIZES = {"page": (13.0, 0.0, 1.0, 160), "column": (3.3, 0.0, 0.73, 300), "slide": (13.33, 7.5, 1.25, 144)}
MIN_POINTS = 6.0  # of any text at any size
_MARGIN, _HANDLE, _LEADING = 0.15, 0.56, 1.4 / 72  # inches; inches per point
_LETTER, _BOLD_LETTER = 0.535 / 72, 0.65 / 72  # a mean letter's width, inches per point

# Time that a rank works has a plain or lightly hatched colour; waiting must not be taken for work. Of a whole model
# what is no MoE layer is grey. What is modelled is hollow and dashed, and waiting then keeps a tint.
_PHASE_HATCHES = {"shared": "xx", "permute": "\\\\\\", "comm": "...", "waiting": "////"}
_MODELLED_HATCHES = {"gate": "|||", "experts": "--", "attention": "oo"}
_EDGES = {"waiting": INK, UNACCOUNTED: MUTED}


def _look(group: str, colour: str) -> dict[str, Any]:
    hatch = {"hatch": _PHASE_HATCHES[group]} if group in _PHASE_HATCHES else {}
    return {"facecolor": colour, "edgecolor": _EDGES.get(group, "white"), **hatch}


# By group. Where the whole model is shown, choosing experts stands apart from the gate.
PHASE_LOOKS = {phase.group: _look(phase.group, phase.colour) for phase in reversed(PHASES.values())}
PHASE_LOOKS["policy"] = _look("policy", PHASES["policy"].colour)
# What was not timed but follows from what was: a hatch on white, which no phase has.
EXTRAPOLATED_LOOK = {"facecolor": "white", "edgecolor": MUTED, "hatch": "++"}


def phase_look(group: str, how: str) -> dict[str, Any]:
    """How a group of phases is drawn that was measured, measured elsewhere or modelled."""
    look = PHASE_LOOKS[group]
    if how == "measured":
        return look
    if how == MEASURED_ELSEWHERE:  # Full, as what was measured, with dots on it and round it.
        return {**look, "edgecolor": INK, "hatch": "..", "linestyle": _DOTS}
    if group == "waiting":
        return {**look, "facecolor": "#FBF7C4", "linestyle": (0, (2, 1))}
    hatch = {"hatch": _MODELLED_HATCHES[group]} if group in _MODELLED_HATCHES else {}
    edge = look["edgecolor"] if group == UNACCOUNTED else look["facecolor"]
    return {**look, **hatch, "facecolor": "white", "edgecolor": edge, "linestyle": (0, (2, 1))}


def mark_look(how: str, colour: str) -> dict[str, Any]:
    """How marks and the line through them are drawn where a panel holds several origins."""
    if how == "measured":
        return {"markerfacecolor": colour, "markeredgecolor": "white", "markeredgewidth": 0.6, "linestyle": "-"}
    line = _LINE_OF.get(how, "-")
    return {"markerfacecolor": "white", "markeredgecolor": colour, "markeredgewidth": 1.3, "linestyle": line}


def frame(axes: Axes, how: str | None) -> None:
    """Frame a panel as its origin asks for: open if measured, closed if emulated, dashed or dotted if not run here."""
    if how in ("emulated", *_LINE_OF):
        for spine in axes.spines.values():
            spine.set(visible=True, linestyle=_LINE_OF.get(how, "-"), edgecolor=MUTED)


def _tag_look(word: str) -> dict[str, Any]:
    """Text and box of a tag; round boxes say how times came about, square ones on which scores."""
    is_how = word in HOW
    face, ink = {"measured": (INK, "white"), "recorded": (GREY, INK)}.get(word, ("white", INK if is_how else MUTED))
    box = {
        "boxstyle": f"{'round' if is_how else 'square'},pad=0.28",
        "facecolor": face,
        "edgecolor": INK if is_how else MUTED,
        "linestyle": {**_LINE_OF, "routed": (0, (1, 1.5))}.get(word, "-"),
    }
    return {"color": ink, "bbox": box}


# A label, and an artist or several on top of each other.
Legend = Sequence[tuple[str, Artist | tuple[Artist, ...]]]


@dataclass(frozen=True, eq=False)
class Drawing:
    """A figure, and the numbers that it shows: tidy rows, one per mark, units in the columns' names."""

    figure: Figure
    rows: pd.DataFrame

    def write_rows(self, path: Path) -> None:
        """Write the numbers as CSV; the file appears whole or not at all. Equal numbers give equal bytes.

        Nine digits: more than any of them has, fewer than those in which two machines' sums differ.
        """
        with atomic_path(path) as temporary:
            self.rows.infer_objects().to_csv(temporary, index=False, float_format="%.9g", lineterminator="\n")


# ---- policies ------------------------------------------------------------------------------------------------------

_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")  # black is native's alone
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">")
_LINES = ("-", "--", "-.", (0, (1, 1.2)))
_HATCHES = ("", "////", "....", "xxxx", "----")
_LIGHTER = (0.0, 0.3, 0.5)  # of a policy's variants, in turn


@dataclass(frozen=True)
class Look:
    """How one policy family is named and drawn in every figure of a run."""

    label: str
    colour: str
    marker: str
    line: str | tuple
    hatch: str

    @property
    def marks(self) -> dict[str, Any]:
        """Of its line and the marks on it."""
        edge = {"markeredgecolor": "white", "markeredgewidth": 0.6}
        return {"color": self.colour, "linestyle": self.line, "marker": self.marker, **edge}


Looks = dict[str, Look]


def looks_of(labels: Mapping[str, str]) -> Looks:
    """Give each family (key -> label) a look.

    A key that begins with a policy's name has that policy's colour and marker (``Policy.look``), in every figure of
    every run. Variants of one policy share its colour, each lighter than the one before, and have other markers and
    lines. What is no policy takes colours in turn.
    """
    from moe_ep_bench.policies import POLICIES  # what only reads results need not wait for them

    looks, variants, others = {}, Counter(), 0
    for number, (family, label) in enumerate(labels.items()):
        policy = POLICIES.get(family.split()[0].rstrip(",:")) if family.split() else None
        if policy is not None and policy.look is not None:
            colour, marker = policy.look
            variant = variants[policy.name]
            variants[policy.name] += 1
            white = _LIGHTER[variant % len(_LIGHTER)]
            colour = to_hex([part + white * (1 - part) for part in to_rgb(colour)]).upper()
            markers = MARKERS if marker in MARKERS else (marker, *MARKERS)
            marker = markers[(markers.index(marker) + variant) % len(markers)]
        else:
            colour, marker = _COLOURS[others % len(_COLOURS)], MARKERS[others % len(MARKERS)]
            others += 1
        looks[family] = Look(label, colour, marker, _LINES[number % len(_LINES)], _HATCHES[number % len(_HATCHES)])
    return looks


# ---- sheets --------------------------------------------------------------------------------------------------------


@contextmanager
def house_style(size: str = "page") -> Iterator[None]:
    """Set matplotlib's parameters for one of ``SIZES``, whatever the user's own are, and restore these afterwards."""
    if size not in SIZES:
        raise UserError(f"size: expected one of {', '.join(SIZES)}; got {size!r}")
    width, height, scale, dots = SIZES[size]
    fonts = {name: max(MIN_POINTS, scale * points) for name, points in FONT_SIZES.items()}
    settings = {**STYLE, **fonts, "figure.figsize": (width, height), "figure.dpi": dots}
    with matplotlib.style.context(settings, after_reset=True):
        yield


def is_narrow() -> bool:
    """Whether panels must stand one under another."""
    return rcParams["figure.figsize"][0] < 5.0


class Sheet(Figure):
    """A figure with a header, a footer and panels between them, and the origins of what it shows."""

    origins: tuple[Origin, ...] = ()


def sheet(title: str, subtitle: str, footer: Sequence[str], legend: Legend, *, width: float, body: float) -> Sheet:
    """Make a figure with a header and a footer, and a free body for the panels.

    Args:
        footer: paragraphs, each cut after two lines: the CSV and run.json hold all. A ``Footer`` also says where the
            numbers come from, which the sheet is tagged with.
        legend: labels and what is drawn beside them, under the subtitle.
        width, body: inches on the page; the height is what the body, the header and the footer need. A slide has a
            size of its own.
    """
    scale = rcParams["font.size"] / FONT_SIZES["font.size"]
    most_width, height = rcParams["figure.figsize"]
    width = most_width if height else min(width, most_width)
    room, small = width - 2 * _MARGIN, max(MIN_POINTS, 0.8 * rcParams["font.size"])
    title_points, points, legend_points = (
        rcParams[name] for name in ("figure.titlesize", "figure.labelsize", "legend.fontsize")
    )
    origins = getattr(footer, "origins", ())
    tags = [(word.upper(), (len(word) + 3) * _BOLD_LETTER * small + 0.12 * scale) for word in tags_of(origins)]
    tags_width = sum(tag_width for _, tag_width in tags)
    title = wrap(title, room - tags_width, title_points, "bold")
    subtitle = wrap(subtitle, room, points)
    footer_text = "\n".join(wrap(paragraph, room, small, most=4 if is_narrow() else 2) for paragraph in footer)
    labels = [wrap(label, room - _HANDLE * scale, legend_points) for label, _ in legend]
    widths = [max(map(len, label.split("\n"))) * _LETTER * legend_points + _HANDLE * scale for label in labels]
    columns = len(labels) if sum(widths) <= room else max(1, int(room / max(widths)))
    lines = -(-len(labels) // max(1, columns)) * max((label.count("\n") + 1 for label in labels), default=0)

    below_title = _MARGIN + 0.06 * scale + _height(title, title_points)
    below_subtitle = below_title + 0.08 * scale + _height(subtitle, points)
    header = below_subtitle + 1.55 / 72 * legend_points * lines + 0.1
    foot = _MARGIN + _height(footer_text, small) + 0.08
    height = height or header + min(1.0, scale) * body + foot

    figure = Sheet(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    figure.origins = tuple(origins)
    texts = [
        figure.text(_MARGIN, _MARGIN, title, fontsize=title_points, weight="bold", va="top"),
        figure.text(_MARGIN, below_title, subtitle, fontsize=points, color=MUTED, va="top", linespacing=1.3),
        figure.text(_MARGIN, height - _MARGIN, footer_text, fontsize=small, color=MUTED, linespacing=1.3, va="bottom"),
    ]
    left = width - _MARGIN - tags_width + 0.1 * scale
    for word, tag_width in tags:
        texts.append(figure.text(left, _MARGIN + 0.1 * scale, word, fontsize=small, va="center"))
        texts[-1].set(**_tag_look(word.lower()))
        left += tag_width
    for text in texts:  # inches from the left and from the top
        text.set(x=text.get_position()[0] / width, y=1 - text.get_position()[1] / height, in_layout=False)
    if legend:
        place = {"loc": "upper left", "bbox_to_anchor": (_MARGIN / width, 1 - (below_subtitle + 0.06) / height)}
        spacing = {"borderaxespad": 0, "borderpad": 0, "columnspacing": 1.6}
        handles = [handle for _, handle in legend]
        figure.legend(handles, labels, ncols=columns, **place, **spacing).set_in_layout(False)
    rect = (_MARGIN / width, foot / height, room / width, (height - header - foot) / height)
    engine = figure.get_layout_engine()
    assert isinstance(engine, ConstrainedLayoutEngine)
    engine.set(rect=rect, w_pad=0.06 * scale, h_pad=0.06 * scale)
    return figure


def _height(text: str, points: float) -> float:
    return _LEADING * points * (text.count("\n") + 1) if text else 0.0


def panel_title(axes: Axes, text: str, inches: float) -> None:
    """Title a panel that is ``inches`` wide on the page."""
    # Labels of bars take up to two fifths of a narrow figure, and the title stands at the panel.
    if is_narrow():
        inches = 0.52 * rcParams["figure.figsize"][0]
    axes.set_title(wrap(text, inches, rcParams["axes.titlesize"], "bold"))


def settle_layout(figure: Figure) -> None:
    """Fix the panels where the layout puts them; rounded, for the solver's last bits differ from run to run."""
    engine = figure.get_layout_engine()
    if not isinstance(engine, ConstrainedLayoutEngine):
        return
    hows = {origin.how for origin in getattr(figure, "origins", ())}
    for axes in figure.axes if len(hows) == 1 else ():
        if axes.get_subplotspec() is not None:
            frame(axes, *hows)
    engine.execute(figure)
    figure.set_layout_engine("none")
    for axes in figure.axes:
        axes.set_position(np.round(axes.get_position(original=True).bounds, 6).tolist())


def save(figure: Figure, path: Path, file_format: str) -> None:
    """Write a figure; the file appears whole or not at all."""
    settle_layout(figure)
    with atomic_path(path) as temporary:
        figure.savefig(temporary, format=file_format, metadata=FORMATS[file_format])


def fit_label(text: str, inches: float) -> str:
    """Break a tick's label into lines of about ``inches`` on the page."""
    return wrap(text, min(inches, 0.36 * rcParams["figure.figsize"][0]), rcParams["ytick.labelsize"])


def wrap(text: str, inches: float, points: float, weight: str = "normal", most: int | None = None) -> str:
    """Break a text into lines that are no wider than ``inches``, inside a word if it must be; at most so many."""
    lines = [""]
    for word in text.split():
        line = f"{lines[-1]} {word}".strip()
        if text_width(line, points, weight) <= inches:
            lines[-1] = line
            continue
        lines += [word] if lines[-1] else []
        lines[-1] = word
        while len(word) > 1 and text_width(word, points, weight) > inches:
            fits = (n for n in range(len(word) - 1, 0, -1) if n == 1 or text_width(word[:n], points, weight) <= inches)
            cut = next(fits)
            lines[-1:] = [word[:cut], word[cut:]]
            word = word[cut:]
    if most is not None and len(lines) > most:
        last = lines[most - 1]
        while last and text_width(f"{last} ...", points, weight) > inches:
            last = last[:-1].rstrip()
        lines[most - 1 :] = [f"{last} ..."]
    return "\n".join(lines)


def text_width(text: str, points: float, weight: str = "normal") -> float:
    """Width of a line in inches, where it is drawn in pixels: whole ones for each letter, up to 3 % wider."""
    return sum(_advance(letter, points, weight) for letter in text) / 72 * 1.03


@lru_cache
def _font(points: float, weight: str) -> FT2Font:
    font = FT2Font(findfont(FontProperties(family=rcParams["font.family"], weight=weight)))
    font.set_size(points, 72)
    return font


@lru_cache(maxsize=2**12)
def _advance(letter: str, points: float, weight: str) -> float:
    return _font(points, weight).load_char(ord(letter), LoadFlags.NO_HINTING).linearHoriAdvance / 65536
