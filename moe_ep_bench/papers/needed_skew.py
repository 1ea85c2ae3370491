"""Find the skew under which a modelled layer gives the number of a claim.

The workload has the same tokens, experts and sharpness of scores as the claim's comparison, but a busiest expert of any
load. Its neighbours on its rank are any others or nearly as busy (``placement``: scattered, adjacent). One batch is
modelled for each skew that is tried, with at most ``SOLVED_TOKENS`` per rank.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch

from moe_ep_bench.bench.plan import BASELINE, VIRTUAL, Comparison
from moe_ep_bench.bench.virtual import Emulation
from moe_ep_bench.config import MEASURED, SyntheticConfig
from moe_ep_bench.errors import UserError
from moe_ep_bench.files import stable_hash
from moe_ep_bench.papers.claims import PLACEMENTS
from moe_ep_bench.policies import Policy

SOLVED_TOKENS = 2048
# A skew is found when it gives the claimed number to within this.
TOLERANCE = 0.01
# The calibrated skew whose other targets a solved one takes over.
_LIKE = "single_domain"
# Peak loads on the grid, and the width at which bisection ends.
_GRID, _NARROWEST = 7, 0.004


@dataclass(frozen=True)
class Reached:
    """What one skew gives.

    Attributes:
        peak_load: of the busiest expert, as the workload was asked for it; None = no skew.
        fullest_expert, fullest_rank: loads over the mean under native.
        values: every solvable metric by policy (label).
    """

    peak_load: float | None
    fullest_expert: float
    fullest_rank: float
    values: dict[str, dict[str, float]]


def solved_tokens(comparison: Comparison) -> int:
    """Tokens of each rank in the batches that are modelled for a comparison."""
    return min(SOLVED_TOKENS, max(1, comparison.subject.num_tokens // comparison.subject.world_size))


class SkewSolver:
    """All skews of one layer on a modelled device; each is tried once, for all policies."""

    def __init__(self, like: Comparison, device: str, policies: Collection[Policy]) -> None:
        self._like, self._device, self._policies = like, device, policies
        self._try = functools.cache(self._reached)
        definition = self._at(PLACEMENTS[0], None).definition
        self.key = stable_hash({key: value for key, value in definition.items() if key != "measure"})

    def needed(self, policy: Policy, metric: str, target: float) -> list[dict[str, Any]]:
        """The mildest skew for each placement that can differ, or the nearest that any skew comes; JSON-ready.

        ``found`` says whether the skew gives the claimed number, ``value`` what it gives.
        """

        def value(reached: Reached) -> float:
            return reached.values[policy.label][metric]

        model, needed = self._like.model, []
        for placement in PLACEMENTS[:1]:
            best = solve(functools.partial(self._try, placement), value, target, most=model.num_experts / model.top_k)
            found = abs(value(best) - target) <= TOLERANCE
            loads = {"fullest_expert": best.fullest_expert, "fullest_rank": best.fullest_rank}
            needed.append({"placement": placement, "found": found, "value": value(best), **loads})
        return needed

    def _at(self, placement: str, peak_load: float | None) -> Comparison:
        like, experiment = self._like, self._like.experiment
        config, tokens = cast(SyntheticConfig, experiment.workload), solved_tokens(like)
        if config.skew is not None:
            config = config.model_copy(update={"skew": _LIKE})
        targets = config.targets(experiment.model.preset)
        targets |= {"peak_load": peak_load, "rank_load": None}
        workload = SyntheticConfig(
            tokens_per_rank=tokens,
            # The same share.
            padding_per_rank=config.padding_per_rank * tokens * like.subject.world_size // like.subject.num_tokens,
            mask_padding=config.mask_padding,
            num_batches=1,
            seed=config.seed,
            sequence_length=config.sequence_length,
            **targets,
        )
        modelled = experiment.emulate.model_copy(update={"device": self._device})
        experiment = experiment.model_copy(update={"workload": workload, "emulate": modelled})
        return Comparison.of(experiment, VIRTUAL, on_cpu=not torch.cuda.is_available())

    def _reached(self, placement: str, peak_load: float | None) -> Reached | None:
        """None where there is no such skew."""
        try:
            comparison = self._at(placement, peak_load)
            comparison.workload.batch(0)
        except ValueError:
            return None
        return modelled_once(comparison, peak_load, self._policies)


def solve(
    reach: Callable[[float | None], Reached | None], value: Callable[[Reached], float], target: float, *, most: float
) -> Reached:
    """The mildest skew at which ``value`` is ``target`` to within ``TOLERANCE``; the nearest one where none is.

    Peak loads from no skew to ``most`` are tried on a grid; between the first two that have the target between them
    it is closed in on.

    Args:
        reach: what a peak load gives (None = no skew); None where it cannot be had.
        most: the highest peak load.
    """
    tried: list[Reached] = []
    unskewed = reach(None)
    grid = np.geomspace(unskewed.fullest_expert if unskewed else 1.0, most, _GRID + 1)[1:]
    for peak_load in (None, *(round(float(peak), 4) for peak in grid)):
        here = reach(peak_load)
        if here is None:
            continue
        tried.append(here)
        if len(tried) > 1 and (value(tried[-2]) - target) * (value(here) - target) <= 0:
            tried += _between(reach, value, target, *tried[-2:])
            break
    if not tried:
        raise UserError("claims: no skew of this workload can be had")
    return min(tried, key=lambda one: (round(abs(value(one) - target), 6), one.fullest_expert))


def _between(
    reach: Callable[[float | None], Reached | None],
    value: Callable[[Reached], float],
    target: float,
    low: Reached,
    high: Reached,
) -> Iterator[Reached]:
    """Skews ever nearer to the target, which lies between what ``low`` and ``high`` give."""
    low_peak, high_peak = low.peak_load or low.fullest_expert, cast(float, high.peak_load)
    low_gap, high_gap = value(low) - target, value(high) - target
    while high_peak - low_peak > _NARROWEST:
        # Linear interpolation, kept off the ends so that a bend cannot stall it.
        share = low_gap / (low_gap - high_gap) if low_gap != high_gap else 0.5
        middle = round(low_peak + min(max(share, 0.15), 0.85) * (high_peak - low_peak), 4)
        here = reach(middle)
        if here is None:  # Less than noise alone gives.
            low_peak = middle
            continue
        yield here
        gap = value(here) - target
        if abs(gap) <= TOLERANCE / 2:
            return
        if (gap < 0) == (low_gap < 0):
            low_peak, low_gap = middle, gap
        else:
            high_peak, high_gap = middle, gap


def modelled_once(comparison: Comparison, peak_load: float | None, policies: Collection[Policy]) -> Reached:
    """What native and policies take and drop on the first batch; nothing is written.

    Raises:
        ValueError: the comparison has no modelled device.
    """
    if comparison.device is None:
        raise UserError(f"emulate.device: expected a modelled one, got {MEASURED}")
    cases = [case for case in comparison.cases if case.role == BASELINE or case.policy in policies]
    emulation = Emulation(comparison, cases, torch.device("cpu"), lambda case_id: None)
    with torch.inference_mode():
        emulation.measure()
    values = {}
    for number, case in enumerate(cases):
        metrics = emulation.metrics[number]
        dropped, of = (metrics[key][:, 0].sum() for key in ("num_dropped_pairs", "num_topk_pairs"))
        speedup = emulation.layer_us[0, 0] / emulation.layer_us[number, 0]
        if case.policy is not None:
            values[case.label] = {"speedup": float(speedup), "dropped_fraction": float(dropped / of)}
    load_E, load_R = (emulation.metrics[0][key][:, 0].sum(axis=0) for key in ("load_E", "load_R"))
    return Reached(peak_load, float(load_E.max() / load_E.mean()), float(load_R.max() / load_R.mean()), values)
