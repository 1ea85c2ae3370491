"""Where numbers come from: how their times came about, and where the router's scores were taken from."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

# As long as a tag is read; ``schema.MODES`` and modelled devices, in the words of ``marks.origin``.
HOW = ("measured", "emulated", "modelled", "routed")
WORKLOADS = ("recorded", "synthetic")


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
    hows, workloads = {origin.how for origin in origins}, {origin.workload for origin in origins}
    return [*(word for word in HOW if word in hows), *(word for word in WORKLOADS if word in workloads)]
