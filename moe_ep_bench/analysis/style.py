"""One look for all figures: colours, text sizes, and a sheet with title, tags, legend and footer.

Colours are those of Okabe and Ito, which most colour-blind readers tell apart; markers, line styles and hatches differ
too, so that a grey print reads as well. What was taken from the world is *filled* (measured times, recorded scores),
what stands in for it is *hollow* (emulated, synthetic), what was computed is *dashed* (modelled), what others measured
is *dotted* (measured elsewhere): in the tags beside a title, in the frames of panels, in phases.

A size (``SIZES``) sets matplotlib's parameters: width, fonts, dots per inch. Matplotlib measures and wraps all text.
Equal input gives equal bytes: no dates, fixed salts, and no settings of the user.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib.style
import numpy as np
from matplotlib import rcParams
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import LineCollection
from matplotlib.colors import LinearSegmentedColormap, to_hex, to_rgb
from matplotlib.container import BarContainer
from matplotlib.figure import Figure

from moe_ep_bench.errors import UserError
from moe_ep_bench.files import atomic_path

# What a file of each format would otherwise say of its making; the date changes, the rest is noise.
FORMATS = {
    "png": {"Software": None},
    "svg": {"Date": None, "Creator": None},
    "pdf": {"CreationDate": None, "Creator": None, "Producer": None},
}
DEFAULT_FORMATS = ("png", "svg")

INK, MUTED, RULE, GREY = "#222222", "#5A5A5A", "#DDDDDD", "#C9C9C9"
NOISE_FILL = "#E4E4E4"
CEILING_LINE = {"color": MUTED, "linestyle": (0, (5, 2)), "linewidth": 1.4}
NATIVE_LINE = {"color": INK, "linewidth": 1.2}
GAMMA = "\N{GREEK SMALL LETTER GAMMA}"

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
    "font.family": "DejaVu Sans",  # comes with matplotlib: the same on every machine
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
_MARGIN = 0.15  # inches
_DOLLAR = "\N{CURRENCY SIGN}"
_LONG = 20  # letters of a word that may be wider than its line


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


# ---- origins -------------------------------------------------------------------------------------------------------

# How times came about, and where router scores were taken from: the tags of a sheet.
HOW = ("measured", "emulated", "partly measured elsewhere", "modelled", "routed")
_DASHES, _DOTS = (0, (3, 2)), (0, (1, 1))
_LINE_OF = {"modelled": _DASHES, "partly measured elsewhere": _DOTS}


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


# ---- phases --------------------------------------------------------------------------------------------------------

# Of what a pass consists, by group. Time that a rank works has a plain or lightly hatched colour; waiting must not be
# taken for work. Of a whole model what is no MoE layer is grey, and choosing experts stands apart from the gate.
_PHASES = {
    "attention": ("#7F7F7F", None),
    "rest": ("#C9C9C9", None),
    "policy": ("#E69F00", None),
    "gate": ("#56B4E9", None),
    "shared": ("#CC79A7", "xx"),
    "permute": ("#009E73", "\\\\\\"),
    "comm": ("#D55E00", "..."),
    "experts": ("#0072B2", None),
    "waiting": ("#F0E442", "////"),
    "unaccounted": ("white", None),
}
_EDGES = {"waiting": INK, "unaccounted": MUTED}
_MODELLED_HATCHES = {"gate": "|||", "experts": "--", "attention": "oo"}
# What was not timed but follows from what was: a hatch on white, which no phase has.
EXTRAPOLATED_LOOK = {"facecolor": "white", "edgecolor": MUTED, "hatch": "++"}


def phase_look(group: str, how: str = "measured") -> dict[str, Any]:
    """How a group of phases is drawn that was measured, measured elsewhere or modelled (hollow and dashed)."""
    colour, hatch = _PHASES.get(group, ("#999933", None))
    look = {"facecolor": colour, "edgecolor": _EDGES.get(group, "white"), **({"hatch": hatch} if hatch else {})}
    if how == "measured":
        return look
    if how == "measured elsewhere":  # Full, as what was measured, with dots on it and round it.
        return {**look, "edgecolor": INK, "hatch": "..", "linestyle": _DOTS}
    if group == "waiting":  # It keeps a tint.
        return {**look, "facecolor": "#FBF7C4", "linestyle": (0, (2, 1))}
    hatch = {"hatch": _MODELLED_HATCHES[group]} if group in _MODELLED_HATCHES else {}
    edge = MUTED if group == "unaccounted" else colour
    return {**look, **hatch, "facecolor": "white", "edgecolor": edge, "linestyle": (0, (2, 1))}


# ---- policies ------------------------------------------------------------------------------------------------------

# Colour and marker of every policy, the same in every figure. Policies that rarely stand in
# one figure share a colour.
POLICY_LOOKS = {
    "native": (INK, "*"),
    "topk": ("#0072B2", "o"),
    "token_drop": ("#D55E00", "s"),
    "expanded_drop": ("#009E73", "^"),
    "expert_drop": ("#CC79A7", "D"),
    "megatron_drop": ("#E69F00", "v"),
    "budget_drop": ("#E69F00", "s"),
    "pruned": ("#56B4E9", "P"),
    "oea": ("#CC79A7", "X"),
    "laser": ("#0072B2", "<"),
    "load_only": ("#E69F00", ">"),
    "xshare": ("#009E73", "D"),
    "lynx": ("#56B4E9", "v"),
    "dynamic_skip": ("#D55E00", "P"),
    "EPLB": ("#AA4499", "h"),
}
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">")
_LINES = ("-", "--", "-.", (0, (1, 1.2)))
_ORDERED = LinearSegmentedColormap.from_list("ordered", ["#D55E00", "#E69F00", "#009E73", "#0072B2"])
_LIGHTER = (0.0, 0.3, 0.5)  # of a policy's variants, in turn

Look = dict[str, Any]


def looks_of(names: Sequence[str]) -> dict[str, Look]:
    """How the line of each name is drawn, as parameters of ``Axes.plot``.

    A name that begins with a policy's has that policy's colour and marker, in every figure of every run. Variants of
    one policy are each lighter than the one before, and have other markers and lines. Others take colours in turn.
    """
    looks: dict[str, Look] = {}
    variants: dict[str, int] = {}
    others = 0
    for number, name in enumerate(dict.fromkeys(names)):
        policy = name.split()[0].rstrip(",:") if name.split() else ""
        if policy in POLICY_LOOKS:
            colour, marker = POLICY_LOOKS[policy]
            variant = variants[policy] = variants.get(policy, -1) + 1
            white = _LIGHTER[variant % len(_LIGHTER)]
            colour = to_hex([part + white * (1 - part) for part in to_rgb(colour)]).upper()
            markers = MARKERS if marker in MARKERS else (marker, *MARKERS)
            marker = markers[(markers.index(marker) + variant) % len(markers)]
        else:
            colour, marker = COLOURS[others % len(COLOURS)], MARKERS[others % len(MARKERS)]
            others += 1
        edge = {"markeredgecolor": "white", "markeredgewidth": 0.6}
        if name == "native":
            edge = {"markersize": 9, "markeredgewidth": 0, "linewidth": 1.2}
        looks[name] = {"color": colour, "marker": marker, "linestyle": _LINES[number % len(_LINES)], **edge}
    return looks


def ordered_looks(names: Sequence[str]) -> dict[str, Look]:
    """How lines of ordered things are drawn: colours run from the first to the last; replication is dotted."""
    ordered = [name for name in dict.fromkeys(names) if not name.startswith("EPLB") and name != "perfect balance"]
    dotted = [name for name in dict.fromkeys(names) if name.startswith("EPLB")]
    edge = {"markeredgecolor": "white", "markeredgewidth": 0.6}
    colours = _ORDERED(np.linspace(0, 1, len(ordered)))
    looks: dict[str, Look] = {
        name: {"color": to_hex(colours[at]), "marker": MARKERS[at % len(MARKERS)], **edge}
        for at, name in enumerate(ordered)
    }
    for at, name in enumerate(dotted):
        looks[name] = {"color": POLICY_LOOKS["EPLB"][0], "linestyle": (0, (1 + 2 * (at % 3), 1.2)), "linewidth": 2}
    return looks


# ---- sheets --------------------------------------------------------------------------------------------------------

Legend = Sequence[tuple[str, Artist | tuple[Artist, ...]]]


class Sheet(Figure):
    """A figure that is built from its panels outwards: panels first, then ``dress``, then ``settle``.

    Attributes:
        titles: panels with the one at the right end of what their title spans.
        words: annotations beside marks, most important first; ``settle`` hides those for which there is no room.
    """

    def __init__(self, width: float) -> None:
        """Make an empty sheet, at most ``width`` inches wide; of a slide the size is given."""
        most, height = rcParams["figure.figsize"]
        super().__init__(figsize=(most if height else min(width, most), height or 5.0), layout="constrained")
        FigureCanvasAgg(self)
        self.titles: list[tuple[Axes, Axes]] = []
        self.words: list[Any] = []


def wrapped(figure: Figure, words: str, inches: float, points: float, weight: str = "normal", most: int = 0) -> str:
    """Break a text into lines that are no wider than ``inches``; of more than ``most`` lines the first ones."""
    text = figure.text(0, 0, "", fontsize=points, weight=weight)
    for word in (word for word in words.split() if len(word) > _LONG):  # matplotlib breaks lines at spaces alone
        text.set_text(word)
        size = int(0.9 * len(word) * inches * figure.dpi / text.get_window_extent().width)
        words = words.replace(word, " ".join(word[at : at + size] for at in range(0, len(word), max(1, size))))
    text.set(text=words.replace("$", _DOLLAR), wrap=True)  # whose width matplotlib would measure as a formula's
    text._get_wrap_line_width = lambda: inches * figure.dpi  # matplotlib's own wraps at the figure's edge
    text.get_window_extent()
    lines = text._get_wrapped_text().replace(_DOLLAR, "$").split("\n")
    text.remove()
    if most and len(lines) > most:
        lines[most - 1 :] = [f"{lines[most - 1][:-4]} ..."]
    return "\n".join(lines)


def dress(figure: Sheet, title: str, how: str, footer: Sequence[str], tags: Sequence[str], *, body: float) -> None:
    """Put title, tags, subtitle, legend and footer round the panels, and give the sheet its height.

    Args:
        how: the subtitle: how to read the figure.
        footer: paragraphs, each cut after two lines: the CSV and run.json hold all.
        tags: words of ``HOW``, and ``recorded`` or ``synthetic``.
        body: inches of the panels on the page.
    """
    width, dpi = figure.get_figwidth(), figure.dpi
    scale, small = rcParams["font.size"] / FONT_SIZES["font.size"], max(MIN_POINTS, 0.8 * rcParams["font.size"])
    fixed = rcParams["figure.figsize"][1]
    room, gap = width - 2 * _MARGIN, 0.08 * scale
    texts = [
        (title, "figure.titlesize", {"weight": "bold"}),
        (how, "figure.labelsize", {"color": MUTED, "linespacing": 1.3}),
    ]
    head = [figure.text(0, 0, "", fontsize=rcParams[size], va="top", **look) for _, size, look in texts]
    boxes = [figure.text(0, 0, word.upper(), fontsize=small, va="center", **_tag_look(word)) for word in tags]
    widths = [box.get_window_extent().width / dpi + 0.3 * scale for box in boxes]
    below, placed = _MARGIN, []
    for text, (words, size, look), inches in zip(head, texts, (room - sum(widths), room), strict=True):
        text.set_text(wrapped(figure, words, inches, rcParams[size], look.get("weight", "normal")))
        placed.append((text, _MARGIN, below))
        below += text.get_window_extent().height / dpi + gap
    placed += [(box, width - sum(widths[n:]), _MARGIN + 0.1 * scale) for n, box in enumerate(boxes)]
    below += 0.04 * scale
    legend = _legend(figure, room)
    header = below + (legend.get_window_extent().height / dpi + gap if legend else 0.0)
    lines = [wrapped(figure, words, room, small, most=4 if is_narrow() else 2) for words in footer]
    foot = figure.text(0, 0, "\n".join(lines), fontsize=small, color=MUTED, linespacing=1.3, va="bottom")
    bottom = _MARGIN + (foot.get_window_extent().height / dpi + gap if footer else 0.0)
    height = fixed or header + min(1.0, scale) * body + bottom
    figure.set_size_inches(width, height)
    placed.append((foot, _MARGIN, height - _MARGIN))
    for text, left, top in placed:
        text.set(x=left / width, y=1 - top / height, in_layout=False)
    if legend:
        legend.set_loc("upper left")
        legend.set_bbox_to_anchor((_MARGIN / width, 1 - below / height))
        legend.set_in_layout(False)
    rect = (_MARGIN / width, bottom / height, room / width, (height - header - bottom) / height)
    figure.get_layout_engine().set(rect=rect, w_pad=0.06 * scale, h_pad=0.06 * scale)


def _legend(figure: Sheet, room: float) -> Any:
    """The labelled artists of all panels, each label once, in as many columns as ``room`` inches hold; or None."""
    found: dict[str, Artist] = {}
    for axes in figure.axes:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            found.setdefault(label, handle)
    found = dict(sorted(found.items(), key=lambda item: not isinstance(item[1], BarContainer)))
    points = rcParams["legend.fontsize"]
    labels = [wrapped(figure, label, room - 4 * points / 72, points) for label in found]
    look = {"loc": "upper left", "borderaxespad": 0, "borderpad": 0, "columnspacing": 1.6}
    for columns in range(len(found), 0, -1):
        legend = figure.legend(list(found.values()), labels, ncols=columns, **look)
        if columns == 1 or legend.get_window_extent().width <= room * figure.dpi:
            return legend
        legend.remove()
    return None


def settle(figure: Figure) -> None:
    """Fix the panels where matplotlib's layout puts them, and what depends on it: titles, words beside marks."""
    engine = figure.get_layout_engine()
    if engine is None:
        return
    if isinstance(figure, Sheet):
        titles = [axes.get_title(loc="left") for axes, _ in figure.titles]
        for axes, _ in figure.titles:
            axes.set_title("")
        engine.execute(figure)
        _wrap_words(figure, titles)
    engine.execute(figure)
    figure.set_layout_engine("none")
    for axes in figure.axes:  # the solver's last bits differ from run to run
        axes.set_position(np.round(axes.get_position(original=True).bounds, 6).tolist())
    if isinstance(figure, Sheet):
        _place(figure.words)


def _wrap_words(figure: Sheet, titles: Sequence[str]) -> None:
    """Break titles and labels of axes into lines that are no longer than their panels."""
    width, height = figure.get_size_inches()
    points, small = rcParams["axes.titlesize"], rcParams["axes.labelsize"]
    for (first, last), title in zip(figure.titles, titles, strict=True):
        inches = (last.get_position().x1 - first.get_position().x0) * width
        first.set_title(wrapped(figure, title, inches, points, "bold"))
    for axes in figure.axes:
        place = axes.get_position()
        axes.set_xlabel(wrapped(figure, axes.get_xlabel(), place.width * width, small))
        label = wrapped(figure, axes.get_ylabel(), max(1.0, place.height * height), small)
        axes.yaxis.label.set_text(label)


def _place(words: Sequence[Any]) -> None:
    """Move each annotation to where it covers no mark of its panel and no other annotation; hide it where none is."""
    taken: dict[Axes, list[Any]] = {}
    for word in words:
        axes = word.axes
        if axes not in taken:
            marked = [
                line
                for line in axes.lines
                if line.get_marker() not in ("None", None, "") and len(line.get_xdata()) == 1
            ]
            spreads = [one for one in axes.collections if isinstance(one, LineCollection)]
            taken[axes] = [artist.get_window_extent() for artist in (*marked, *spreads)]
        panel = axes.get_window_extent()
        x, y = word.get_position()
        for offset, side, height in (
            ((x, y), "left", "bottom"),
            ((x, -y), "left", "top"),
            ((-x, y), "right", "bottom"),
            ((-x, -y), "right", "top"),
        ):
            word.set(position=offset, ha=side, va=height)
            box = word.get_window_extent()
            inside = panel.x0 <= box.x0 and box.x1 <= panel.x1 and panel.y0 <= box.y0 and box.y1 <= panel.y1
            if inside and not any(box.overlaps(other) for other in taken[axes]):
                taken[axes].append(box)
                break
        else:
            word.set_visible(False)


def save(figure: Figure, path: Path, file_format: str) -> None:
    """Write a figure; the file appears whole or not at all."""
    settle(figure)
    with atomic_path(path) as temporary:
        figure.savefig(temporary, format=file_format, metadata=FORMATS[file_format])


def labels_of(figure: Figure, labels: Mapping[Any, str] | Sequence[str], inches: float) -> list[str]:
    """Break the labels of ticks into lines of at most ``inches`` on the page."""
    inches = min(inches, 0.36 * figure.get_figwidth())
    return [wrapped(figure, label, inches, rcParams["ytick.labelsize"]) for label in labels]
