"""From a config file to what is to be measured: a comparison of its scope for each point of its sweep, found to fit."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from moe_ep_bench.config import MEASURED, ConfigError, Experiment, load_experiments
from moe_ep_bench.scopes.comparison import Comparison, Planned
from moe_ep_bench.scopes.emulated import Emulated
from moe_ep_bench.scopes.emulated_model import EmulatedModel
from moe_ep_bench.scopes.model_comparison import ModelComparison


def plan_comparisons(
    config: Path,
    overrides: Iterable[str],
    world_size: int,
    *,
    on_cpu: bool,
    point: int | None = None,
    before: Callable[[Experiment], object] = lambda experiment: None,
) -> list[Comparison]:
    """All comparisons of a config file on this many ranks, each found to fit and its workload found to be there.

    Args:
        point: only this point of the config's sweep, from 0 in the order of ``load_experiments``.
        before: called ahead of each comparison, which may take long to make: batches are solved for, recordings read.

    Raises:
        ValueError: one line naming the file, the key and what is allowed.
    """
    comparisons = []
    experiments = load_experiments(config, overrides, on_cpu=on_cpu)
    if point is not None:
        if not 0 <= point < len(experiments):
            raise ValueError(
                f"--point: expected 0 to {len(experiments) - 1} (the points of {config}'s sweep), got {point}"
            )
        experiments = [experiments[point]]
    for experiment in experiments:
        before(experiment)
        kind = ModelComparison if experiment.scope == "model" else Comparison
        try:
            comparison = kind.of(experiment, world_size, on_cpu=on_cpu)
            comparison.check_padding()
            comparison.workload.batch(0)  # Finds skews that cannot be had.
            comparison.check_gathering()
            comparison.try_policies()
        except ValueError as problem:
            raise ValueError(f"{config}: {problem}") from None
        comparisons.append(comparison)
    check_distinct(config, comparisons)
    return comparisons


def plan_emulation(config: Path, overrides: Iterable[str], *, on_cpu: bool) -> list[Emulated]:
    """All comparisons of a config file on virtual ranks, each found to fit and its workload found to be there.

    Raises:
        ValueError: one line naming the file, the key and what is allowed.
    """
    comparisons = emulated_comparisons(config, overrides, on_cpu=on_cpu)
    for comparison in comparisons:
        try:
            comparison.check_padding()
            next(comparison.workload.rank_batches(0, comparison.ep_size))  # Finds skews that cannot be had.
            comparison.try_policies()
        except ValueError as problem:
            raise ValueError(f"{config}: {problem}") from None
    return comparisons


def emulated_comparisons(config: Path, overrides: Iterable[str], *, on_cpu: bool) -> list[Emulated]:
    """All comparisons of a config file on virtual ranks; no batch is made.

    The config's ``on_cpu`` section makes layers small enough for a CPU; where all run on a modelled device, it is not
    applied.

    Raises:
        ValueError: see ``plan_emulation``.
    """
    overrides = list(overrides)
    experiments = load_experiments(config, overrides, on_cpu=False)
    if on_cpu and any(experiment.emulate.device == MEASURED for experiment in experiments):
        experiments = load_experiments(config, overrides, on_cpu=True)
    try:
        comparisons = [emulated_on(experiment, on_cpu=on_cpu) for experiment in experiments]
    except ValueError as problem:
        raise ValueError(f"{config}: {problem}") from None
    check_distinct(config, comparisons)
    return comparisons


def emulated_on(experiment: Experiment, *, on_cpu: bool) -> Emulated:
    """One experiment on virtual ranks; no batch is made.

    Raises:
        ValueError: naming the key whose value does not fit.
    """
    kind = EmulatedModel if experiment.scope == "model" else Emulated
    return kind.on(experiment, on_cpu=on_cpu)


def check_distinct(config: Path, comparisons: Sequence[Planned]) -> None:
    """Refuse a sweep whose points are one and the same comparison here: they would overwrite each other.

    Such is a repeated value, and a key that this scope does not read.

    Raises:
        ConfigError: one line naming the file, the swept key and its values.
    """
    first: dict[str, Planned] = {}
    for comparison in comparisons:
        other = first.setdefault(comparison.comparison_id, comparison)
        if other is comparison:
            continue
        points = zip(other.experiment.point, comparison.experiment.point, strict=True)
        differing = [(key, one, two) for (key, one), (_, two) in points if one != two]
        if not differing:
            point = ", ".join(f"{key}={value}" for key, value in comparison.experiment.point)
            raise ConfigError(f"{config}: sweep: expected every value once, got {point} twice")
        keys, ones, twos = ([str(part) for part in parts] for parts in zip(*differing, strict=True))
        raise ConfigError(
            f"{config}: sweep.{', sweep.'.join(keys)}: {', '.join(ones)} and {', '.join(twos)} are one and the same "
            f"comparison for this command; expected values that it measures differently, or one (--set {keys[0]}=VALUE)"
        )
