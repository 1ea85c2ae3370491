"""Choose layers that stand for all of a recording, or of a file of counts, by how full native's fullest rank is.

What a policy gains in a layer depends first on how uneven the layer's ranks are, and counts alone say that. Layers in
that order are cut into equal strata, and the middle one of each is asked. So each stands for equally many layers, and
medians over these need no weights.

Shapes: L = layers, B = batches, E = experts, R = ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from moe_ep_bench.bench.point import Point
from moe_ep_bench.config import SyntheticConfig
from moe_ep_bench.workload.replay import RecordedWorkload
from moe_ep_bench.workload.targets import layer_loads

# Asked in place of more.
LAYERS = 8


def stand_ins(load_L: Iterable[float]) -> list[int]:
    """Places of ``LAYERS`` layers that stand for all, ascending; of equal loads the first stands ahead."""
    order_L = np.argsort([*load_L], kind="stable")
    middle = (np.arange(LAYERS) + 0.5) * len(order_L) / LAYERS
    return sorted(order_L[middle.astype(int)].tolist())


def fullest_ranks(points: Iterable[Point], layers: Sequence[int]) -> dict[int, list[float]]:
    """Native's fullest rank in each layer over the mean of ranks, by EP size: [L], mean over batches and points.

    Args:
        points: the question in any of the layers, at each EP size and other place of its sweep.

    Raises:
        ValueError: a recording, or a file of counts, lacks a layer.
    """
    of_points: dict[int, list[NDArray[np.float64]]] = {}
    for point in points:
        load_LBE = _loads(point, layers)
        load_LBR = load_LBE.reshape(*load_LBE.shape[:2], point.ep_size, -1).sum(axis=-1)
        fullest_LB = load_LBR.max(axis=-1) / load_LBR.mean(axis=-1)
        of_points.setdefault(point.ep_size, []).append(fullest_LB.mean(axis=1))
    return {ep_size: np.mean(parts, axis=0).tolist() for ep_size, parts in of_points.items()}


def _loads(point: Point, layers: Sequence[int]) -> NDArray[np.float64]:
    """Loads of experts: of a recording in every batch that is served, of counts as they are: [L, B, E]."""
    workload, config = point.workload, point.experiment.workload
    if isinstance(workload, RecordedWorkload):
        return workload.loads(layers, range(workload.num_batches)).astype(np.float64)
    assert isinstance(config, SyntheticConfig)
    assert config.skew_from is not None
    moe_layers = point.experiment.model.moe_layers
    return np.array([[layer_loads(config.skew_from, layer, moe_layers)] for layer in layers])
