"""Popularity that moves over batches: which experts are busy changes, how busy they are does not (``workload.motion``).

Experts change places with their noise, so that every batch has the traffic's loads, on other experts. In batch 0 they
stand as without motion, and a rank load holds there; later it is by chance which experts share a rank. N is
``motion_batches``:

``hotspot``  every N batches all experts change places
``burst``    one batch in N, the last, has other places, the same in each burst: as from one other domain
``drift``    a little in every batch: popularity has the order of autoregressive normal numbers, one an expert, whose
             correlation with those of N batches ago is one half

How much of it there is, is measured by the share of the loads that stays on its expert from one batch to the next.

Shapes: B = batches, E = experts, G = groups of experts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from moe_ep_bench.errors import UserError
from moe_ep_bench.workload.scores import Stream, generator


@dataclass(frozen=True)
class Motion:
    """How popularity moves.

    Attributes:
        batches: of a turn (``hotspot``), from burst to burst, or until the correlation is one half (``drift``).

    Raises:
        ValueError: turns and bursts that are no whole number of batches, or a burst in every batch.
    """

    kind: Literal["hotspot", "burst", "drift"]
    batches: float

    def __post_init__(self) -> None:
        least = {"hotspot": 1, "burst": 2, "drift": 0}[self.kind]
        if self.batches < least or (least and self.batches != int(self.batches)):
            expected = f"a whole number from {least} on" if least else "a number above 0"
            raise UserError(f"expected {expected} for {self.kind}, got {self.batches:g}", "motion_batches")

    def places(
        self, index: int, popularity_E: NDArray[np.float64], seed: int, num_groups: int | None
    ) -> NDArray[np.int64]:
        """Which expert of batch 0 stands at each index in batch ``index``: int64 [E].

        Args:
            popularity_E: of the experts in batch 0; its order counts.
            num_groups: groups stay together, and change places too: they drift by their mean popularity.
        """
        if self.kind == "drift":
            if num_groups is None:
                return self._drifted(index, popularity_E, seed)
            popularity_GE = popularity_E.reshape(num_groups, -1)
            inside = (self._drifted(index, own_E, seed, 1 + group) for group, own_E in enumerate(popularity_GE))
            first_G1 = np.arange(0, popularity_E.size, popularity_GE.shape[1])[:, None]
            return (first_G1 + np.array([*inside]))[self._drifted(index, popularity_GE.mean(axis=1), seed)].ravel()
        turn = index // int(self.batches) if self.kind == "hotspot" else int((index + 1) % int(self.batches) == 0)
        if not turn:
            return np.arange(len(popularity_E))
        random, place_GE = generator(seed, Stream.MOTION, turn), np.arange(len(popularity_E))[None]
        if num_groups is not None:
            place_GE = random.permutation(place_GE.reshape(num_groups, -1))
        return random.permuted(place_GE, axis=1).ravel()

    def _drifted(self, index: int, popularity_E: NDArray[np.float64], seed: int, part: int = 0) -> NDArray[np.int64]:
        """The places at which popularity has the order of the autoregressive numbers; before batch 0 they run back.

        Args:
            part: draws other numbers.
        """
        by_popularity, kept, apart = np.argsort(popularity_E, kind="stable"), 0.5 ** (1 / self.batches), abs(index)
        drawn_BE = generator(seed, Stream.MOTION, part).normal(size=(apart + 1, len(popularity_E)))
        if index < 0:  # with numbers of their own
            drawn_BE[1:] = generator(seed, Stream.MOTION, -1 - part).normal(size=(apart, len(popularity_E)))
        drawn_BE[0, by_popularity] = np.sort(drawn_BE[0])
        weight_B = kept ** np.arange(apart, -1, -1.0)
        weight_B[1:] *= (1 - kept**2) ** 0.5
        place_E = np.empty(len(popularity_E), dtype=np.int64)
        place_E[np.argsort(weight_B @ drawn_BE, kind="stable")] = by_popularity
        return place_E


def overlap(load_BE: NDArray[np.float64]) -> float:
    """The share of a batch's load that the next has on the same experts, mean over neighbouring batches."""
    shared_B = np.minimum(load_BE[:-1], load_BE[1:]).sum(axis=1)
    return float((shared_B / load_BE[0].sum()).mean())
