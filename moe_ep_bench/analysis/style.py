"""One look for all figures: colours, text sizes, and a sheet with title, legend and footer.

Colours are those of Okabe and Ito, which most colour-blind readers tell apart; markers, line
styles and hatches differ too, so that a grey print reads as well. Legends stand above the panels,
never on data. A sheet is drawn for a page, a column or a slide (``sizes``) and tagged with where its
numbers come from (``origins``). Equal input gives equal bytes: no dates, fixed salts, and no settings of the user.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import matplotlib.style
import numpy as np
import pandas as pd
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure
from matplotlib.legend import Legend as MatplotlibLegend

from moe_ep_bench.analysis.origins import Footer, Origin, frame, tag_look, tags_of
from moe_ep_bench.analysis.refit import mend_labels, refit
from moe_ep_bench.analysis.sizes import FONT, current_size, sized, text_width, wrap
from moe_ep_bench.analysis.speedups import CaseResult
from moe_ep_bench.files import atomic_path
from moe_ep_bench.schema import PHASES, UNACCOUNTED

# What a file of each format would otherwise say of its making; the date changes, the rest is noise.
FORMATS = {
    "png": {"Software": None},
    "svg": {"Date": None, "Creator": None},
    "pdf": {"CreationDate": None, "Creator": None, "Producer": None},
}
DEFAULT_FORMATS = ("png", "svg")

INK, MUTED, RULE = "#222222", "#5A5A5A", "#DDDDDD"
NATIVE_FILL, NOISE_FILL = "#C9C9C9", "#E4E4E4"
CEILING_LINE = {"color": MUTED, "linestyle": (0, (5, 2)), "linewidth": 1.4}
GAMMA = "\N{GREEK SMALL LETTER GAMMA}"

STYLE = {
    "figure.dpi": 160,
    "savefig.dpi": "figure",
    "font.family": FONT,
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
    "pdf.fonttype": 42,  # TrueType, which publishers ask for
}
_TEXTS = (
    "font.size",
    "axes.titlesize",
    "axes.labelsize",
    "xtick.labelsize",
    "ytick.labelsize",
    "legend.fontsize",
)
# Lengths in points that are matplotlib's own on the page.
_STROKES = (
    "axes.linewidth",
    "axes.titlepad",
    "axes.labelpad",
    "grid.linewidth",
    "hatch.linewidth",
    *(f"{axis}tick.major.{what}" for axis in "xy" for what in ("size", "width", "pad")),
)

# Inches; points.
_MARGIN, _HANDLE = 0.15, 0.56
_TITLE_SIZE, _SUBTITLE_SIZE, _FOOTER_SIZE, _TAG_SIZE = 13, 9, 8, 7.5
# A slide is made larger until it holds this much of the page's width and height.
_SLIDE_WIDTH, _SLIDE_BODY = 0.75, 0.7
_STACKED_TITLE = 0.8  # of a column's width

# Time that a rank works has a plain or lightly hatched colour; waiting must not be taken for work. Of a whole model
# what is no MoE layer is grey.
_HATCHES = {"shared": "xx", "permute": "\\\\\\", "comm": "...", "waiting": "////"}
_EDGES = {"waiting": INK, UNACCOUNTED: MUTED}


def _look(group: str, colour: str) -> dict:
    hatch = {"hatch": _HATCHES[group]} if group in _HATCHES else {}
    return {"facecolor": colour, "edgecolor": _EDGES.get(group, "white"), **hatch}


# By group. Where the whole model is shown, choosing experts stands apart from the gate.
PHASE_LOOKS = {phase.group: _look(phase.group, phase.colour) for phase in reversed(PHASES.values())}
PHASE_LOOKS["policy"] = _look("policy", PHASES["policy"].colour)
# What was not timed but follows from what was: a hatch on white, which no phase has.
EXTRAPOLATED_LOOK = {"facecolor": "white", "edgecolor": MUTED, "hatch": "++"}

# Hollow and dashed, as everything that comes from a model (``origins``). Waiting keeps a tint: it is no work.
_MODELLED_HATCHES = {"gate": "|||", "experts": "--", "attention": "oo"}


def phase_look(group: str, *, modelled: bool) -> dict:
    """How a group of phases is drawn."""
    look: dict = PHASE_LOOKS[group]
    if not modelled:
        return look
    hatch = {"hatch": _MODELLED_HATCHES[group]} if group in _MODELLED_HATCHES else {}
    if group == "waiting":
        return {**look, "facecolor": "#FBF7C4", "linestyle": (0, (2, 1))}
    edge = look["edgecolor"] if group == "unaccounted" else look["facecolor"]
    return {**look, **hatch, "facecolor": "white", "edgecolor": edge, "linestyle": (0, (2, 1))}


# A label, and an artist or several on top of each other.
Legend = Sequence[tuple[str, Artist | tuple[Artist, ...]]]

_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")  # black is native's alone
_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">")
_LINES = ("-", "--", "-.", (0, (1, 1.2)))
_HATCHES = ("", "////", "....", "xxxx", "----")


_LIGHTER = (0.0, 0.3, 0.5)  # of a policy's variants, in turn


@dataclass(frozen=True, eq=False)
class Drawing:
    """A figure, and the numbers that it shows: tidy rows, one per mark, units in the columns' names."""

    figure: Figure
    rows: pd.DataFrame


@dataclass(frozen=True)
class Look:
    """How one policy family is named and drawn in every figure of a run."""

    label: str
    colour: str
    marker: str
    line: str | tuple
    hatch: str


def looks_of(labels: Mapping[str, str]) -> dict[str, Look]:
    """Give each family (key -> label) a look.

    A key that begins with a policy's name has that policy's colour and marker (``Policy.look``), in every figure of
    every run. Variants of one policy share its colour, each lighter than the one before, and have other markers and
    lines. What is no policy takes colours in turn.
    """
    from moe_ep_bench.policies import POLICIES  # imports torch, which what only reads results need not wait for

    looks, variants, others = {}, Counter(), 0
    for number, (family, label) in enumerate(labels.items()):
        policy = POLICIES.get(family.split()[0].rstrip(",:")) if family.split() else None
        if policy is not None and policy.look is not None:
            colour, marker = policy.look
            variant = variants[policy.name]
            variants[policy.name] += 1
            colour = _lighter(colour, _LIGHTER[variant % len(_LIGHTER)])
            markers = _MARKERS if marker in _MARKERS else (marker, *_MARKERS)
            marker = markers[(markers.index(marker) + variant) % len(markers)]
        else:
            colour, marker = _COLOURS[others % len(_COLOURS)], _MARKERS[others % len(_MARKERS)]
            others += 1
        looks[family] = Look(label, colour, marker, _LINES[number % len(_LINES)], _HATCHES[number % len(_HATCHES)])
    return looks


def case_name(result: CaseResult, looks: Mapping[str, Look]) -> str:
    """What figures call a case: its family's name and its capacity factor; of what is no policy the label."""
    look = looks.get(result.family)
    if result.case.role != "policy" or look is None:
        return result.case.label
    factor = result.capacity_factor
    return look.label if factor is None else f"{look.label}, {GAMMA} {factor:g}"


def _lighter(colour: str, share: float) -> str:
    """The colour mixed with so much white."""
    return to_hex([part + share * (1 - part) for part in to_rgb(colour)]).upper()


@contextmanager
def house_style(size: str = "page") -> Iterator[None]:
    """Apply ``STYLE`` to matplotlib's defaults, whatever the user's own are, and restore these afterwards.

    Args:
        size: one of ``sizes.SIZES``.
    """
    with sized(size) as chosen, matplotlib.style.context(STYLE, after_reset=True):
        settings = {name: chosen.points(float(STYLE[name])) for name in _TEXTS}
        settings |= {name: matplotlib.rcParams[name] * chosen.scale for name in _STROKES}
        with matplotlib.rc_context({**settings, "figure.dpi": chosen.dots}):
            yield


class Sheet(Figure):
    """A figure with a header and a footer of fixed heights, and a body for the panels.

    Attributes:
        page_width, page_body: inches that the panels were designed for.
        origins: of the numbers that it shows.
        after_layout: called once panels stand where they will be drawn; what needs their places is drawn then.
    """

    page_width: float
    page_body: float
    origins: tuple[Origin, ...]
    after_layout: list[Callable[[], None]]
    _header: float
    _foot: float
    _hung: list[tuple[Artist, float, float | None]]  # inches from the left and from the top; None: at the bottom
    _is_refitted: bool

    def lay_out(self, body: float) -> None:
        """Give the panels ``body`` inches of height between header and footer."""
        width, height = self.get_size_inches()[0], self._header + body + self._foot
        self.set_size_inches(width, height)
        for artist, left, below_top in self._hung:
            place = (left / width, (_MARGIN / height) if below_top is None else 1 - below_top / height)
            if isinstance(artist, MatplotlibLegend):
                artist.set_bbox_to_anchor(place, transform=self.transFigure)
            else:
                artist.set(x=place[0], y=place[1])
        scale = current_size().scale
        engine = self.get_layout_engine()
        assert engine is not None
        room = width - 2 * _MARGIN
        rect = (_MARGIN / width, self._foot / height, room / width, body / height)
        engine.set(rect=rect, w_pad=0.06 * scale, h_pad=0.06 * scale)


@dataclass(frozen=True)
class _Plan:
    """Texts of a sheet, broken into lines, and where they stand: inches from its top, or from its bottom."""

    title: str
    subtitle: str
    footer: str
    labels: list[str]
    num_columns: int
    tags_left: float
    tags_top: float
    subtitle_top: float
    legend_top: float
    header: float
    foot: float


def sheet(title: str, subtitle: str, footer: Sequence[str], legend: Legend, *, width: float, body: float) -> Sheet:
    """Make a figure with a header and a footer, and a free body for the panels.

    Args:
        subtitle, footer: wrapped to the width; the footer's entries are paragraphs. A ``Footer`` also says where the
            numbers come from, which the sheet is tagged with.
        legend: labels and what is drawn beside them, laid out in rows under the subtitle.
        width, body: inches on the page; the height is what the body, the header and the footer need.
    """
    size = current_size()
    origins = footer.origins if isinstance(footer, Footer) else ()
    tags = tags_of(origins)
    own_width = width if size.width is None else size.width
    plan = _plan(title, subtitle, footer, legend, tags, own_width)
    own_body = body
    if size.height is not None:
        factor = 1.0
        while True:
            own_width = factor * size.width
            plan = _plan(title, subtitle, footer, legend, tags, own_width)
            own_body = factor * size.height - plan.header - plan.foot
            if own_body >= _SLIDE_BODY * body and own_width >= _SLIDE_WIDTH * width:
                break
            factor *= 1.1

    figure = Sheet(figsize=(own_width, 1), layout="constrained")
    FigureCanvasAgg(figure)
    if size.width is not None:
        figure.set_dpi(size.dots * size.width / own_width)
    figure.page_width, figure.page_body, figure.origins = width, body, origins
    figure.after_layout = []
    figure._header, figure._foot, figure._is_refitted = plan.header, plan.foot, False
    small = {"color": MUTED, "linespacing": 1.3}
    at_title = figure.text(0, 0, plan.title, fontsize=size.points(_TITLE_SIZE), weight="bold", va="top")
    at_subtitle = figure.text(0, 0, plan.subtitle, fontsize=size.points(_SUBTITLE_SIZE), va="top", **small)
    figure._hung = [(at_title, _MARGIN, _MARGIN), (at_subtitle, _MARGIN, plan.subtitle_top)]
    at_footer = figure.text(0, 0, plan.footer, fontsize=_footer_points(), va="bottom", **small)
    left = plan.tags_left
    for tag in tags:
        points = size.points(_TAG_SIZE)
        text = figure.text(0, 0, tag.upper(), fontsize=points, va="center", **tag_look(tag))
        text.set_in_layout(False)
        figure._hung.append((text, left + 0.28 * points / 72, plan.tags_top))
        left += _tag_width(tag)
    if legend:
        drawn = figure.legend(
            [handle for _, handle in legend],
            plan.labels,
            ncols=plan.num_columns,
            loc="upper left",
            borderaxespad=0,
            borderpad=0,
            columnspacing=1.6,
        )
        drawn.set_in_layout(False)
        figure._hung.append((drawn, _MARGIN, plan.legend_top))
    figure._hung.append((at_footer, _MARGIN, None))
    figure.lay_out(own_body)
    return figure


def _plan(title: str, subtitle: str, footer: Sequence[str], legend: Legend, tags: Sequence[str], width: float) -> _Plan:
    size = current_size()
    room = width - 2 * _MARGIN
    scale = size.points(_SUBTITLE_SIZE) / _SUBTITLE_SIZE
    title_points, legend_points = size.points(_TITLE_SIZE), size.points(STYLE["legend.fontsize"])
    title = wrap(title, room, title_points, "bold")
    subtitle = wrap(subtitle, room, size.points(_SUBTITLE_SIZE))
    footer_text = "\n".join(wrap(paragraph, room, _footer_points()) for paragraph in footer)
    # Columns of a legend are as wide as its longest label, its handle and a gap.
    handle = _HANDLE * scale
    labels = [wrap(label, room - handle, legend_points) for label, _ in legend]
    longest = max((text_width(label, legend_points) for label in labels), default=0.0)
    num_rows = -(-len(labels) // max(1, int(room / (longest + handle))))
    num_columns = -(-len(labels) // max(1, num_rows))
    lines = [label.count("\n") + 1 for label in labels]
    num_legend_lines = max(
        (sum(lines[first : first + num_rows]) for first in range(0, len(lines), max(1, num_rows))), default=0
    )

    title_height = 0.3 * scale + title_points * 1.2 / 72 * title.count("\n")
    tags_width = sum(map(_tag_width, tags))
    subtitle_top = _MARGIN + title_height
    if "\n" not in title and text_width(title, title_points, "bold") + tags_width + 0.1 <= room:
        tags_left, tags_top = _MARGIN + room - tags_width + _tag_gap(), _MARGIN + 0.1 * scale
    else:
        tags_left, tags_top = _MARGIN + 0.02, subtitle_top + 0.08 * scale
        subtitle_top += 0.26 * scale if tags else 0.0
    legend_top = subtitle_top + 0.17 * scale * (subtitle.count("\n") + 1) + 0.1 * scale
    header = legend_top + 0.19 * scale * num_legend_lines + 0.04
    foot = _MARGIN + 0.155 * _footer_points() / _FOOTER_SIZE * (footer_text.count("\n") + 1) + 0.08
    return _Plan(
        title, subtitle, footer_text, labels, num_columns, tags_left, tags_top, subtitle_top, legend_top, header, foot
    )


def _footer_points() -> float:
    """A footer is looked up, not read from the back row."""
    return min(_FOOTER_SIZE, current_size().points(_FOOTER_SIZE))


def _tag_gap() -> float:
    return 0.08 * current_size().scale


def _tag_width(tag: str) -> float:
    points = current_size().points(_TAG_SIZE)
    return text_width(tag.upper(), points) + 0.56 * points / 72 + _tag_gap()


def panel_title(axes: Axes, text: str, inches: float) -> None:
    """Title a panel that is ``inches`` wide on the page."""
    size, figure = current_size(), axes.figure
    if size.is_stacked:
        assert size.width is not None
        inches = _STACKED_TITLE * size.width
    elif isinstance(figure, Sheet):
        inches *= figure.get_size_inches()[0] / figure.page_width
    axes.set_title(wrap(text, inches, size.points(STYLE["axes.titlesize"]), STYLE["axes.titleweight"]))


def row_title(axes: Axes, others: Sequence[Axes], text: str, inches: float) -> None:
    """Title a row of panels at its first one: ``inches`` wide on the page, the whole row."""
    panel_title(axes, text, inches)
    if current_size().is_stacked:
        return
    title = axes.get_title("left")
    axes.set_title(title).set_in_layout(False)  # else the layout would make its own panel as wide
    for other in others:
        other.set_title("\n".join(" " for _ in title.split("\n")))


def settle_layout(figure: Figure) -> None:
    """Fit the panels to the size drawn for, and fix them where the layout puts them.

    Their places are rounded: the solver's last bits differ from run to run.
    """
    size = current_size()
    if isinstance(figure, Sheet) and not figure._is_refitted:
        figure._is_refitted = True
        hows = {origin.how for origin in figure.origins}
        for axes in figure.axes if len(hows) == 1 else ():
            if axes.get_subplotspec() is not None:
                frame(axes, *hows)
        if size.name != "page":
            body = refit(figure, size, figure.page_body)
            if body is not None:
                figure.lay_out(body)
            figure.draw_without_rendering()
            growth = mend_labels(figure, size)
            if body is not None and growth > 1:
                figure.lay_out(growth * body)
    figure.draw_without_rendering()
    figure.set_layout_engine("none")
    for axes in figure.axes:
        axes.set_position(np.round(axes.get_position(original=True).bounds, 6).tolist())
    while isinstance(figure, Sheet) and figure.after_layout:
        figure.after_layout.pop(0)()


def save(figure: Figure, path: Path, file_format: str) -> None:
    """Write a figure; the file appears whole or not at all."""
    if isinstance(figure, Sheet) and not figure._is_refitted:
        settle_layout(figure)
    with atomic_path(path) as temporary:
        figure.savefig(temporary, format=file_format, metadata=FORMATS[file_format])
