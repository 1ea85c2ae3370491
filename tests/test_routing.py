"""Claims about ranks' tokens and traffic: what is kept, made anew or routed side by side changes nothing."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from test_run import write_config

from moe_ep_bench.bench.comparison import RANKS, ROUTING, VIRTUAL, Comparison
from moe_ep_bench.bench.plan import plan
from moe_ep_bench.bench.routing import Batches, CaseRouter
from moe_ep_bench.bench.traffic import traffic_of

CPU = torch.device("cpu")
POLICIES = [{"name": "token_drop", "capacity_factor": 1.0}, {"name": "lynx", "num_dropped": 8}]


def planned(folder: Path, backend: str) -> Comparison:
    config = write_config(folder, layer__ep_size=4, policies=POLICIES, emulate={"links": "h100-nvlink4"})
    return plan(config, [], backend, on_cpu=True)[0]


def seen_of(comparison: Comparison, few: int | None = None) -> list[tuple]:
    """Of every case in both batches its traffic and metrics, as plain values; and the ranks' tokens."""
    batches, rows = Batches(comparison, CPU, few), []
    with torch.inference_mode():
        for index in range(2):
            routers = [CaseRouter(case, batches) for case in comparison.cases]
            for traffic in traffic_of(batches, None, index, routers):
                rows.append((traffic.counts_RP.tolist(), traffic.num_tokens_R, traffic.frontier, repr(traffic.rows_R)))
            rows += [tuple(batches.share(None, index, rank).context.request_id_T.tolist()) for rank in range(4)]
    return rows


@pytest.mark.parametrize("backend", [VIRTUAL, ROUTING])
def test_ranks_in_threads_give_the_same_traffic(backend: str, tmp_path: Path) -> None:
    comparison, seen = planned(tmp_path, backend), []
    for num_threads in (1, 3, torch.get_num_threads()):
        torch.set_num_threads(num_threads)
        seen.append(seen_of(comparison))
        assert torch.get_num_threads() == num_threads
    assert seen[0] == seen[1] == seen[2]
    assert len({repr(row) for row in seen[0]}) > 8, "batches, ranks and policies differ"


def test_a_few_tokens_are_of_every_rank_from_its_first_to_its_last(tmp_path: Path) -> None:
    comparison = planned(tmp_path, VIRTUAL)
    for rank in range(4):
        few, whole = (Batches(comparison, CPU, few=few).share(None, 0, rank) for few in (3, None))
        rows = torch.linspace(0, whole.num_tokens - 1, 3).long()
        assert torch.equal(few.drawn_TE, whole.drawn_TE[rows])
        assert rows[-1] == whole.num_tokens - 1


def test_ranks_of_several_groups_are_those_of_their_own(tmp_path: Path) -> None:
    config = write_config(tmp_path, layer__ep_size=2, policies=POLICIES)
    batches = Batches(plan(config, [], RANKS, 4, on_cpu=True)[0], CPU)
    shares = [batches.share(None, 0, rank) for rank in range(4)]
    assert [(share.rank, share.context.rank) for share in shares] == [(0, 0), (1, 1), (2, 0), (3, 1)]


def test_routing_sees_scores_as_they_are_and_layers_what_their_logits_say(tmp_path: Path) -> None:
    for backend in (ROUTING, VIRTUAL):
        comparison = planned(tmp_path, backend)
        first = Batches(comparison, CPU).share(None, 0, 0)
        share = first.of(comparison.cases[0])
        assert (share.score_function is None) == (backend == ROUTING)
        torch.testing.assert_close(share.scores_TE, first.drawn_TE, rtol=1e-5, atol=1e-7)


def test_random_policies_draw_anew_for_every_batch_rank_and_layer(tmp_path: Path) -> None:
    comparison = planned(tmp_path, ROUTING)
    batches = Batches(comparison, CPU)
    router = CaseRouter(comparison.cases[0], batches)
    shares = [batches.share(None, index, rank) for index in range(2) for rank in range(4)]
    shares += [replace(shares[0], layer=layer) for layer in (0, 1)]
    drawn = [float(torch.rand(1, generator=router.context(share).generator)) for share in shares]
    assert len(set(drawn)) == len(drawn) == 2 * 4 + 2
    assert float(torch.rand(1, generator=router.context(shares[0]).generator)) == drawn[0], "and alike once more"
