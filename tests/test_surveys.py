"""Ranks that go through workloads together know what each would have found alone."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import pytest
import torch

from moe_ep_bench.bench.description import survey_together
from moe_ep_bench.workload import SyntheticWorkload, Workload

SIZES = {"num_experts": 16, "top_k": 2, "num_tokens": 400, "num_batches": 2, "sequence_length": 20, "peak_load": 3.0}
TARGETS = {
    "peak load": {},
    "rank load": {"num_experts": 64, "rank_load": (4, 1.5)},
    "overlap": {"neighbour_overlap": 0.8},
    "groups": {"num_groups": 4, "top_groups": 2, "topk_share": 0.6},
    "no skew": {"peak_load": None},
}


def make(name: str, seed: int) -> SyntheticWorkload:
    return SyntheticWorkload(**{**SIZES, **TARGETS[name], "seed": seed})


class Together:
    """As much of ``Ranks`` as tells values, for ranks that are threads."""

    def __init__(self, rank: int, told: list[str], barrier: threading.Barrier) -> None:
        self.rank, self.world_size = rank, len(told)
        self._told, self._barrier = told, barrier

    def told(self, value: object) -> list:
        self._told[self.rank] = value
        self._barrier.wait(60)
        told = list(self._told)
        self._barrier.wait(60)
        return told


def surveyed(num_ranks: int, of_rank: list[list[SyntheticWorkload]]) -> list[int]:
    """Survey these, each rank its own copies; how often each rank's watchdog was fed."""
    told, barrier, counts = [""] * num_ranks, threading.Barrier(num_ranks), [0] * num_ranks

    def run(rank: int) -> None:
        def count() -> None:
            counts[rank] += 1

        survey_together(of_rank[rank], Together(rank, told, barrier), count)

    with ThreadPoolExecutor(num_ranks) as pool:
        problems = [one.exception(60) for one in [pool.submit(run, rank) for rank in range(num_ranks)]]
    assert len({repr(problem) for problem in problems}) == 1, problems
    if problems[0] is not None:
        raise problems[0]
    return counts


@pytest.mark.parametrize("name", TARGETS)
def test_what_others_found_and_solved_for_is_what_a_rank_would_have_found(name: str) -> None:
    of_rank = [[make(name, seed) for seed in range(2)] for _ in range(2)]
    surveyed(2, of_rank)
    refused = mock.Mock(side_effect=AssertionError("gone through or solved for once more"))
    for seed in range(2):
        alone = make(name, seed)
        for own in of_rank:
            with (
                mock.patch.object(Workload, "blocks", refused),
                mock.patch.object(SyntheticWorkload, "_solve", refused),
                mock.patch("moe_ep_bench.workload.synthetic.solve_copying", refused),
                mock.patch("moe_ep_bench.workload.synthetic.place_for_rank_load", refused),
            ):
                fingerprint, achieved = own[seed].fingerprint(), own[seed].achieved()
                batches = [list(own[seed].rank_batches(index, 2)) for index in range(2)]
            assert fingerprint == alone.fingerprint()
            assert achieved == alone.achieved()
            for index, of_batch in enumerate(batches):
                for mine, theirs in zip(of_batch, alone.rank_batches(index, 2), strict=True):
                    assert torch.equal(mine.scores_TE, theirs.scores_TE)
                    assert torch.equal(mine.sequence_id_T, theirs.sequence_id_T)


def test_ranks_share_the_batches_of_one_workload_and_all_are_fed() -> None:
    of_rank = [[SyntheticWorkload(**{**SIZES, "num_batches": 5, "seed": 0})] for _ in range(3)]
    gone_through = mock.Mock(side_effect=Workload.blocks, autospec=True)
    with mock.patch.object(Workload, "blocks", lambda *arguments: gone_through(*arguments)):
        counts = surveyed(3, of_rank)
    assert min(counts) >= 2, "the one with the fewest batches too"
    passes = [
        [index for one, index in (call.args for call in gone_through.call_args_list) if one is own] for [own] in of_rank
    ]
    assert passes == [[0, 3], [1, 4], [2]]


def test_a_target_that_cannot_be_met_is_told_by_every_rank() -> None:
    impossible = SyntheticWorkload(**{**SIZES, "num_tokens": 5, "peak_load": 1.0, "seed": 0})
    with pytest.raises(ValueError, match="peak_load: expected"):
        surveyed(2, [[make("peak load", 0), impossible] for _ in range(2)])
