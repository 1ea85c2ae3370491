"""Where numbers come from, told apart by more than colour.

Two things weaken or strengthen a number: how its times came about, and where the router's scores were taken from. One
rule draws both, in every figure: what was taken from the world is *filled* (measured times, recorded scores), what
stands in for it is *hollow* (emulated times, synthetic scores), what was computed from a model is *dashed* (modelled
times). A sheet says it in tags beside its title, its panels in their frames (open: measured; closed: emulated; closed
and dashed: modelled), and where one panel holds several origins, its marks do.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from matplotlib.axes import Axes

# As long as a tag is read; ``schema.MODES`` and modelled devices, in the words of ``marks.origin``.
HOW = ("measured", "emulated", "modelled", "routed")
WORKLOADS = ("recorded", "synthetic")

_INK, _MUTED, _GREY = "#222222", "#5A5A5A", "#C9C9C9"
_DASHES = (0, (3, 2))


@dataclass(frozen=True)
class Origin:
    """One of ``HOW``, and one of ``WORKLOADS``; None where a figure has no times, or no scores."""

    how: str | None
    workload: str | None


class Footer(list[str]):
    """The paragraphs under a figure, and the origins that they put into words."""

    def __init__(self, lines: Iterable[str], origins: Iterable[Origin]) -> None:
        super().__init__(lines)
        self.origins = tuple(dict.fromkeys(origins))


def tags_of(origins: Iterable[Origin]) -> list[str]:
    """The words that a sheet is tagged with: how, then on which scores, each once."""
    origins = list(origins)
    found = [{origin.how for origin in origins}, {origin.workload for origin in origins}]
    return [word for words, known in zip(found, (HOW, WORKLOADS), strict=True) for word in known if word in words]


def tag_look(word: str) -> dict[str, Any]:
    """The text and the box of a tag; round boxes say how, square ones on which scores."""
    filled = {"measured": (_INK, "white"), "recorded": (_GREY, _INK)}
    face, ink = filled.get(word, ("white", _INK if word in HOW else _MUTED))
    box = {
        "boxstyle": f"{'round' if word in HOW else 'square'},pad=0.28",
        "facecolor": face,
        "edgecolor": _INK if word in HOW else _MUTED,
        "linewidth": 1.0,
        "linestyle": _DASHES if word == "modelled" else (0, (1, 1.5)) if word == "routed" else "-",
    }
    return {"color": ink, "bbox": box}


def frame(axes: Axes, how: str | None) -> None:
    """Frame a panel as its origin asks for; the open frame of measured times is the house's own."""
    if how not in ("emulated", "modelled"):
        return
    for spine in axes.spines.values():
        spine.set_visible(True)
        spine.set_linestyle(_DASHES if how == "modelled" else "-")
        spine.set_edgecolor(_MUTED)


def mark_look(how: str, colour: str) -> dict[str, Any]:
    """How marks and the line through them are drawn where a panel holds several origins."""
    if how == "measured":
        return {"markerfacecolor": colour, "markeredgecolor": "white", "markeredgewidth": 0.6, "linestyle": "-"}
    dashed = {"linestyle": _DASHES} if how == "modelled" else {"linestyle": "-"}
    return {"markerfacecolor": "white", "markeredgecolor": colour, "markeredgewidth": 1.3, **dashed}
