"""Going through all batches of all workloads once before anything is timed: by all ranks together.

A whole model has a workload for every MoE layer, and what its batches are (their fingerprint, the targets that they
meet) is asked of all ranks' tokens. Ranks take turns: each goes through every so-manieth workload, and tells the others
what it found and solved for. So no rank solves for a batch that another has solved for.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

from moe_ep_bench.ranks import Ranks
from moe_ep_bench.workload import Workload

# What batches may take of a rank's memory until they are used.
_MOST_KEPT_BYTES = 4 * 2**30


def survey_together(
    workloads: Sequence[Workload], ranks: Ranks, before: Callable[[], object], *, keep: bool = False
) -> None:
    """Have every workload know its ``findings``, on every rank; all ranks call this alike.

    Args:
        before: called ahead of each workload that is gone through here.
        keep: where there is one rank, and memory for it, keep the batches for it.

    Raises:
        ValueError: a batch cannot meet its targets; on every rank, whichever found it.
    """
    size = sum(one.num_batches * one.num_tokens * one.num_experts * 4 for one in workloads)
    if keep and ranks.world_size == 1 and size <= _MOST_KEPT_BYTES:
        for workload in workloads:
            workload.keep_batches()
    mine, problem = {}, ""
    try:
        for number in range(ranks.rank, len(workloads), ranks.world_size):
            before()
            mine[number] = workloads[number].findings()
    except ValueError as error:
        problem = str(error)
    told = [json.loads(text) for text in ranks.texts(json.dumps([problem, mine]))]
    for found, _ in told:
        if found:
            raise ValueError(found)
    for rank, (_, others) in enumerate(told):
        for number, findings in others.items():
            if rank != ranks.rank:
                workloads[int(number)].take_findings(findings)
