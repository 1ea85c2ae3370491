"""One look for all figures: colours, text sizes, and a sheet with title, tags, legend and footer.

Colours of the policies that meet most are those of Okabe and Ito, which most colour-blind readers tell apart; markers,
line styles and hatches differ too, so that a grey print reads as well. What was taken from the world is *filled*
(measured times, recorded scores), what stands in for it is *hollow* (emulated, synthetic), what was computed is
*dashed* (modelled), what others measured is *dotted* (measured elsewhere): in the tags beside a title, in the frames of
panels, in phases.

Matplotlib's constrained layout places the panels. Texts are broken where a line of letters of mean width ends;
matplotlib measures what they take. Equal input gives equal bytes: no dates, fixed salts, no settings of the user.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import matplotlib.style
import numpy as np
from matplotlib import rcParams
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap, to_hex, to_rgb
from matplotlib.container import BarContainer
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.legend import Legend
from matplotlib.lines import Line2D
from matplotlib.transforms import ScaledTranslation

from moe_ep_bench.facts import ORIGINS
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
BALANCED_LINE = {"color": MUTED, "linestyle": (0, (5, 2)), "linewidth": 1.4}
NATIVE_LINE = {"color": INK, "linewidth": 1.2}
GAMMA = "\N{GREEK SMALL LETTER GAMMA}"

STYLE = {
    "figure.dpi": 160,
    "font.size": 10,  # "small" is 0.833 of it
    "figure.titlesize": 13,
    "figure.labelsize": 9,
    "axes.titlesize": 10,
    "axes.labelsize": 9.5,
    "xtick.labelsize": 9,
    "ytick.labelsize": 9,
    "legend.fontsize": 9,
    "axes.titlepad": 8.0,
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


def house_style() -> AbstractContextManager[None]:
    """Set matplotlib's parameters, whatever the user's own are, and restore these afterwards."""
    return matplotlib.style.context(STYLE, after_reset=True)


# ---- origins -------------------------------------------------------------------------------------------------------

_DASHES, _DOTS = (0, (3, 2)), (0, (1, 1))
_LINE_OF = {"modelled": _DASHES, "partly measured elsewhere": _DOTS}


def frame(axes: Axes, how: str | None) -> None:
    """Frame a panel as its origin asks for: open if measured, closed if emulated, dashed or dotted if not run here."""
    if how in ("emulated", *_LINE_OF):
        for spine in axes.spines.values():
            spine.set(visible=True, linestyle=_LINE_OF.get(how, "-"), edgecolor=MUTED)


def _tag_look(word: str) -> dict[str, Any]:
    """Text and box of a tag; round boxes say how times came about, square ones on which scores."""
    is_how = word in ORIGINS
    face, ink = {"measured": (INK, "white"), "recorded": (GREY, INK)}.get(word, ("white", INK if is_how else MUTED))
    box = {
        "boxstyle": f"{'round' if is_how else 'square'},pad=0.28",
        "facecolor": face,
        "edgecolor": INK if is_how else MUTED,
        "linestyle": {**_LINE_OF, **dict.fromkeys(("rehearsed", "routed"), (0, (1, 1.5)))}.get(word, "-"),
    }
    return {"color": ink, "bbox": box}


# ---- phases --------------------------------------------------------------------------------------------------------

# Of what a pass consists, by group. Time that a rank works has a plain or lightly hatched colour; waiting must not be
# taken for work. Of a whole model what is no MoE layer is grey, and choosing experts stands apart from the gate. What
# was not timed but follows from what was is a hatch on white, which no phase has.
_PHASES = {
    "attention": ("#7F7F7F", None),
    "rest": ("#C9C9C9", None),
    "policy": ("#E69F00", None),
    "gate": ("#56B4E9", None),
    "shared experts by water-filling": ("#CC79A7", "xx"),
    "permute": ("#009E73", "\\\\\\"),
    "comm": ("#D55E00", "..."),
    "experts": ("#0072B2", None),
    "waiting": ("#F0E442", "////"),
    "unaccounted": ("white", None),
}
_EDGES = {"waiting": INK, "unaccounted": MUTED}
_MODELLED_HATCHES = {"gate": "|||", "experts": "--", "attention": "oo"}


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

# Colour and marker of every policy and of what balances without loss, by their labels without settings, the same in
# every figure.
POLICY_LOOKS = {
    "native": (INK, "*"),
    "topk": ("#0072B2", "o"),
    "token_drop": ("#D55E00", "s"),
    "expanded_drop": ("#009E73", "^"),
    "expert_drop": ("#CC79A7", "D"),
    "budget_drop": ("#9A6324", "s"),
    "pruned": ("#56B4E9", "P"),
    "oea": ("#911EB4", "X"),
    "laser": ("#5E4FA2", "<"),
    "load_only": ("#A6BD00", ">"),
    "xshare": ("#3CB44B", "D"),
    "lynx": ("#808000", "v"),
    "dynamic_skip": ("#B2182B", "P"),
    "sere": ("#469990", "v"),
    "EPLB": ("#AA4499", "h"),
    "variance plan": ("#882255", "D"),
    "LLEP": ("#F032E6", "<"),
    "UltraEP": ("#FB8072", ">"),
    "shared experts by water-filling": ("#8DA0CB", "v"),
}
# Of policies of a user's own and of what is no policy, in turn: none is one of the above.
COLOURS = ("#E69F00", "#5B5BF0", "#E41A1C", "#17BECF", "#FF69B4", "#7A5C3E")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">")
OWN_MARKERS = ("p", "d", (4, 1, 0), (6, 1, 0), "8")  # of policies of a user's own: no other has one
_LINES = ("-", "--", "-.", (0, (1, 1.2)))
_ORDERED = LinearSegmentedColormap.from_list("ordered", ["#D55E00", "#E69F00", "#009E73", "#0072B2"])
_LIGHTER = (0.0, 0.3, 0.5)  # of a policy's variants, in turn
_EDGE = {"markeredgecolor": "white", "markeredgewidth": 0.6}

Look = dict[str, Any]


def looks_of(lines: Mapping[str, str], more: Mapping[str, str] | None = None) -> dict[str, Look]:
    """How each line is drawn, as parameters of ``Axes.plot``.

    A policy's name alone has that policy's colour and marker, in every figure of every run; so has its first variant
    where ``lines`` do not hold the name alone. Other variants are each lighter than the one before, and have other
    markers and lines. A policy of a user's own, and what is no policy, takes the next colour that no policy has.

    Args:
        lines: of a run, which number the variants, with the policies whose variants they are.
        more: lines that a figure has; where a policy has none of a run's among them, its variants are numbered anew.
    """
    looks: dict[str, Look] = {}
    known: dict[str, tuple[str, Any]] = {**POLICY_LOOKS}
    own, more = {*lines.values()} - {*POLICY_LOOKS}, more or {}
    variants = dict.fromkeys(lines, 1)
    kept = {policy for name, policy in more.items() if name in lines}
    for number, (name, policy) in enumerate({**lines, **more}.items()):
        if number == len(lines):
            variants = dict.fromkeys(more, 1) | {policy: variants[policy] for policy in kept}
        markers = OWN_MARKERS if policy in own else MARKERS
        if policy not in known:
            turn, others = divmod(len(known) - len(POLICY_LOOKS), len(COLOURS))
            known[policy] = COLOURS[others], markers[(others + turn) % len(markers)]
        colour, marker = known[policy]
        variant = 0 if name == policy else variants.get(policy, 0)
        variants[policy] = max(variant + 1, variants.get(policy, 0))
        white = _LIGHTER[variant % len(_LIGHTER)]
        red, green, blue = (part + white * (1 - part) for part in to_rgb(colour))
        colour = to_hex((red, green, blue)).upper()
        markers = markers if marker in markers else (marker, *markers)
        marker = markers[(markers.index(marker) + variant) % len(markers)]
        looks[name] = {"color": colour, "marker": marker, "linestyle": _LINES[number % len(_LINES)], **_EDGE}
        looks[name] |= {"linestyle": "-", "linewidth": 1.2, "markersize": 9} if name == "native" else {}
    return looks


def ordered_looks(names: Sequence[str]) -> dict[str, Look]:
    """How lines of ordered things are drawn: colours run from the first to the last."""
    names = list(dict.fromkeys(names))
    colours = map(to_hex, _ORDERED(np.linspace(0, 1, len(names))))
    return {
        name: {"color": colour, "marker": MARKERS[at % len(MARKERS)], **_EDGE}
        for at, (name, colour) in enumerate(zip(names, colours, strict=True))
    }


# ---- sheets --------------------------------------------------------------------------------------------------------

_MARGIN = 0.15  # inches round a sheet
_LETTER = 0.55  # a letter's width over its size, as a mean over the letters of a line


def sheet(width: float) -> Figure:
    """An empty sheet, ``width`` inches wide; ``dress`` gives it its height."""
    return Figure(figsize=(width, 5.0), layout="constrained")


_NO_BREAK = "\N{NO-BREAK SPACE}"
# Blanks at which no line ends: of "\N{GREEK SMALL LETTER GAMMA} 1.5", "3.1 %" and before "|".
_INSIDE = re.compile(rf"(?<={GAMMA}) (?=\d)|(?<=\d) (?=%)| (?=\|)")


def folded(words: str, inches: float, points: float) -> str:
    """Break a text into lines of about so many inches: between words, and a longer word behind a sign of it.

    So a name is cut between its parts (``my_long_/policy``, ``My/Policy``); within a part only where that alone has no
    room.
    """
    letters = max(8, int(72 * inches / (_LETTER * points)))
    lines = []
    for line in _INSIDE.sub(_NO_BREAK, words).split("\n"):
        pieces = (piece for word in line.split(" ") for piece in _pieces(word, letters))
        lines.append(textwrap.fill(" ".join(pieces), letters, break_on_hyphens=False))
    return "\n".join(lines).replace(_NO_BREAK, " ")


def _pieces(word: str, letters: int) -> list[str]:
    """A word, or where it is longer than so many letters pieces of it, each of whole parts."""
    pieces = [""]
    for part in re.findall(r"[A-Z]*[^A-Z_=/,.-]*[_=/,.-]*", word) if len(word) > letters else [word]:
        if pieces[-1] and len(pieces[-1] + part) > letters:
            pieces.append("")
        pieces[-1] += part
    return pieces


def dress(figure: Figure, title: str, how: str, footer: Sequence[str], tags: Sequence[str], *, body: float) -> None:
    """Put title, tags, subtitle, legend and footer round the panels, and give the sheet its height.

    What is empty takes no room.

    Args:
        how: the subtitle: how to read the figure.
        footer: paragraphs.
        tags: words of ``ORIGINS``, and ``recorded`` or ``synthetic``.
        body: inches of the panels on the page.
    """
    width = figure.get_figwidth()
    room, gap = width - 2 * _MARGIN, 0.09
    large, points, small = rcParams["figure.titlesize"], rcParams["figure.labelsize"], 0.8 * rcParams["font.size"]
    top = ScaledTranslation(0, 1, figure.transFigure)  # pyright: ignore[reportArgumentType]  any transform will do
    from_top = figure.dpi_scale_trans + top  # inches
    muted = {"color": MUTED, "linespacing": 1.3, "va": "top", "in_layout": False}
    right, above = width - _MARGIN - 0.05, _MARGIN
    for word in reversed(tags):
        place = {"ha": "right", "va": "center", "transform": from_top, "in_layout": False, "fontsize": small}
        tag = figure.text(right, -above - 0.1, word.upper(), **place, **_tag_look(word))
        right = tag.get_window_extent().x0 / figure.dpi - 0.25
    texts = (
        (folded(title, (right - _MARGIN) / 1.15, large), {"fontsize": large, "weight": "bold", "color": INK}),
        (folded(how, room, points), {"fontsize": points}),
    )
    for text, look in ((text, look) for text, look in texts if text):
        artist = figure.text(_MARGIN, -above, text, transform=from_top, **{**muted, **look})
        above += artist.get_window_extent().height / figure.dpi + gap
    if (legend := _legend(figure, room)) is not None:
        legend.set_bbox_to_anchor((_MARGIN, -above), from_top)
        above += legend.get_window_extent().height / figure.dpi + gap
    words = "\n".join(folded(paragraph, room, small) for paragraph in footer)
    look = {**muted, "va": "bottom", "fontsize": small, "transform": figure.dpi_scale_trans}
    below = _MARGIN
    if words:
        below += figure.text(_MARGIN, _MARGIN, words, **look).get_window_extent().height / figure.dpi + gap
    height = above + body + below
    figure.set_size_inches(width, height)
    rect = (_MARGIN / width, below / height, room / width, 1 - (above + below) / height)
    engine = figure.get_layout_engine()
    assert isinstance(engine, ConstrainedLayoutEngine)
    engine.set(rect=rect, w_pad=0.06, h_pad=0.06)


def _legend(figure: Figure, room: float) -> Legend | None:
    """The labelled artists of all panels, each label once, bars first, in as many columns as ``room`` inches hold.

    What is points in one panel and a line in another is shown as a line.
    """
    points, labels = rcParams["legend.fontsize"], {}
    for axes in figure.axes:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            name = folded(label, 0.8 * room, points)
            if name not in labels or (_is_points(labels[name]) and not _is_points(handle)):
                labels[name] = handle
    labels = dict(sorted(labels.items(), key=lambda item: not isinstance(item[1], BarContainer)))
    look = {"loc": "upper left", "borderaxespad": 0, "borderpad": 0, "columnspacing": 1.6, "handlelength": 2.6}
    for columns in range(len(labels), 0, -1):
        legend = figure.legend(labels.values(), labels, ncols=columns, **look)
        legend.set_in_layout(False)
        if columns == 1 or legend.get_window_extent().width <= room * figure.dpi:
            return legend
        legend.remove()
    return None


def _is_points(artist: Artist | BarContainer) -> bool:
    return isinstance(artist, Line2D) and artist.get_linestyle() == "None"


def settle(figure: Figure) -> None:
    """Fix the panels where matplotlib's layout puts them: the last bits of its solver differ from run to run."""
    if (engine := figure.get_layout_engine()) is not None:
        engine.execute(figure)
        figure.set_layout_engine("none")
        for axes in figure.axes:
            axes.set_position(np.round(axes.get_position(original=True).bounds, 6).tolist())


def save(figure: Figure, path: Path, file_format: str) -> None:
    """Write a figure; the file appears whole or not at all."""
    settle(figure)
    with atomic_path(path) as temporary:
        figure.savefig(temporary, format=file_format, metadata=FORMATS[file_format])
