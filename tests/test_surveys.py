"""Ranks that solve for workloads together know what each would have solved alone."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import pytest
import torch

from moe_ep_bench.bench.description import solve_together
from moe_ep_bench.workload.synthetic import SyntheticWorkload

SIZES = {"num_experts": 16, "top_k": 2, "num_tokens": 400, "num_batches": 2, "sequence_length": 20, "peak_load": 3.0}
TARGETS = {
    "rank load": {"num_experts": 64, "rank_load": (4, 1.5)},
    "overlap": {"neighbour_overlap": 0.8},
    "groups": {"num_groups": 4, "top_groups": 2, "topk_share": 0.6},
    "no skew": {"peak_load": None},
}


def make(name: str, seed: int) -> SyntheticWorkload:
    return SyntheticWorkload(**{**SIZES, **TARGETS[name], "seed": seed})


class Together:
    """As much of ``Ranks`` as tells values, for ranks that are threads."""

    def __init__(self, rank: int, told: list[object], barrier: threading.Barrier) -> None:
        self.rank, self.world_size = rank, len(told)
        self._told, self._barrier = told, barrier

    def told(self, value: object) -> list[object]:
        self._told[self.rank] = value
        self._barrier.wait(60)
        told = list(self._told)
        self._barrier.wait(60)
        return told


def solve(of_rank: list[list[SyntheticWorkload]]) -> list[int]:
    """Solve for these, each rank its own copies; returns how often each rank's watchdog was fed."""
    num_ranks = len(of_rank)
    told, barrier, counts = [None] * num_ranks, threading.Barrier(num_ranks), [0] * num_ranks

    def run(rank: int) -> None:
        def count() -> None:
            counts[rank] += 1

        solve_together(of_rank[rank], Together(rank, told, barrier), count)

    with ThreadPoolExecutor(num_ranks) as pool:
        problems = [ended.exception(60) for ended in [pool.submit(run, rank) for rank in range(num_ranks)]]
    assert len({repr(problem) for problem in problems}) == 1, problems
    if problems[0] is not None:
        raise problems[0]
    return counts


@pytest.mark.parametrize("name", TARGETS)
def test_what_others_solved_for_is_what_a_rank_would_have_solved(name: str) -> None:
    of_rank = [[make(name, seed) for seed in range(2)] for _ in range(3)]
    assert solve(of_rank) == [2, 1, 1]
    refused = mock.Mock(side_effect=AssertionError("solved for once more"))
    for seed in range(2):
        alone = make(name, seed)
        for workloads in of_rank:
            with (
                mock.patch.object(SyntheticWorkload, "_bias", refused),
                mock.patch("moe_ep_bench.workload.solving.solve_copying", refused),
                mock.patch("moe_ep_bench.workload.solving.place_for_rank_load", refused),
            ):
                batches = [workloads[seed].batch(index) for index in range(2)]
            for index, batch in enumerate(batches):
                assert torch.equal(batch.scores_TE, alone.batch(index).scores_TE)


def test_a_target_that_cannot_be_met_is_told_by_every_rank() -> None:
    impossible = SyntheticWorkload(**{**SIZES, "num_tokens": 5, "peak_load": 1.0, "seed": 0})
    with pytest.raises(ValueError, match="peak_load: expected"):
        solve([[make("overlap", 0), impossible] for _ in range(2)])
