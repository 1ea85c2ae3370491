"""Which case and which iteration are shown where there is room for one, in figures and in traces.

By default the case is the policy with the greatest speedup among those that are faster than native beyond the noise
floor; where none is, the first in reading order. The iteration is the one whose layer time is closest to the median.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pandas as pd

from moe_ep_bench.analysis.load import Case
from moe_ep_bench.analysis.speedups import CaseResult, ComparisonResult
from moe_ep_bench.errors import UserError

ITERATION = ["launch", "batch", "iteration"]
_WORDS = ("median", "slowest", "fastest")


@dataclass(frozen=True)
class IterationChoice:
    """``--iteration``, as the user wrote it; ``key`` is launch, batch and iteration, None where a word chooses."""

    text: str = "median"
    key: tuple[int, int, int] | None = None

    @staticmethod
    def parse(text: str, *, several: bool = False) -> IterationChoice:
        """Read a word or ``[LAUNCH/]BATCH/ITERATION``; the launch is 0 where it is not named.

        Args:
            several: ``all`` is a word too.

        Raises:
            ValueError: it is neither.
        """
        words = (*_WORDS, "all") if several else _WORDS
        if text in words:
            return IterationChoice(text)
        parts = text.split("/")
        if len(parts) not in (2, 3) or not all(part.isascii() and part.isdigit() for part in parts):
            raise UserError(f"--iteration: expected {', '.join(words)} or [LAUNCH/]BATCH/ITERATION; got {text!r}")
        launch, batch, iteration = map(int, ["0", *parts][-3:])
        return IterationChoice(text, (launch, batch, iteration))

    def of(self, layer_us: pd.Series, label: str) -> list[tuple[int, int, int]]:
        """The iterations that are meant, of equals the first.

        Args:
            layer_us: of the breakdown iterations of a case, indexed by (launch, batch, iteration), in order.

        Raises:
            ValueError: there is no such iteration; ``label`` names the case.
        """
        if self.text == "all":
            return list(layer_us.index)
        if self.key is None:
            distance = {"median": (layer_us - layer_us.median()).abs(), "slowest": -layer_us, "fastest": layer_us}
            return [distance[self.text].idxmin()]
        if self.key not in layer_us.index:
            numbers = layer_us.index.to_frame()[ITERATION]
            ranges = ", ".join(f"{name} {values.min()}..{values.max()}" for name, values in numbers.items())
            raise UserError(f"--iteration: expected a breakdown iteration of {label} ({ranges}); got {self.text}")
        return [self.key]


TYPICAL = IterationChoice()


@dataclass(frozen=True)
class Choice:
    """What the user names: a case's label or id (None = the default), and an iteration."""

    case: str | None = None
    iteration: IterationChoice = TYPICAL


@dataclass(frozen=True, eq=False)
class Chosen:
    """A case and its baseline, and in words why it is this one."""

    comparison: ComparisonResult
    native: CaseResult
    policy: CaseResult
    why: str


def choose(comparisons: list[ComparisonResult], choice: Choice, has_rows: Callable[[Case], bool]) -> Chosen | None:
    """Find the case to show.

    Args:
        has_rows: whether a case has what the figure needs; of a chosen pair both must.

    Returns:
        None where no policy and its baseline have the rows.

    Raises:
        ValueError: no such case has been measured; the message lists what there is.
    """
    pairs = [
        (comparison, native, other)
        for comparison in comparisons
        if (native := comparison.of_role("baseline")) is not None and has_rows(native.case)
        for other in comparison.results
        if other is not native and other.case.is_ok and has_rows(other.case)
    ]
    if choice.case is not None:
        named = [pair for pair in pairs if choice.case in (pair[2].case.label, pair[2].case.case_id)]
        if not named:
            labels = ", ".join(dict.fromkeys(pair[2].case.label for pair in pairs)) or "none"
            raise UserError(f"--case: expected a measured case's label or id, one of {labels}; got {choice.case!r}")
        return Chosen(*named[0], "as chosen")
    policies = [pair for pair in pairs if pair[2].case.role == "policy"]
    faster = [pair for pair in policies if pair[2].speedup is not None and pair[2].verdict == "faster"]
    if faster:
        best = max(faster, key=lambda pair: pair[2].speedup.median if pair[2].speedup else 0.0)
        return Chosen(*best, "the policy with the greatest speedup")
    return Chosen(*policies[0], "the first policy: none is faster beyond the noise") if policies else None
