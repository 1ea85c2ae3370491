"""Numbers of public threads and pages, replayed: each test says what was published and what ours comes to.

Others stand where their subject is tested: FlashLB's eight experts (test_replication), DeepEP's ragged ranks
(test_exchanges), vLLM's strided logits (test_serving), Megatron-LM's workloads (test_token_imbalance).
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from moe_ep_bench.metrics import routing_metrics
from moe_ep_bench.placement import rank_load, replicate
from moe_ep_bench.policies import Routing, RoutingContext, make_policy
from moe_ep_bench.workload.solving import root
from moe_ep_bench.workload.synthetic import SyntheticWorkload


def fullest(load_E: NDArray[np.float64], slot_expert_P: NDArray[np.int64], num_ranks: int) -> float:
    """The fullest rank over the mean."""
    load_R = rank_load(load_E, slot_expert_P, num_ranks)
    return float(load_R.max() / load_R.mean())


def test_a_few_percent_of_drift_explain_what_blog04_s_plan_leaves() -> None:
    """TensorRT-LLM, blog04: 256 experts, EP 32; fullest expert 11.95, rank 2.56, with a slot a rank about 1.11.

    Steps of 256 requests a rank (8,192 tokens) from one popularity leave 1.05 under a plan made on another such step.
    It is 1.11 once some 4 % of the pairs go to other experts than when the plan was made.
    """
    sizes = {"num_experts": 256, "top_k": 8, "num_tokens": 32 * 256, "num_batches": 2, "sequence_length": 1, "seed": 0}
    traffic = SyntheticWorkload(peak_load=11.95, rank_load=(32, 2.56), **sizes)
    known_E, served_E = (
        torch.bincount(traffic.batch(index).scores_TE.topk(8, dim=1).indices.flatten(), minlength=256).double().numpy()
        for index in range(2)
    )
    assert served_E.max() / served_E.mean() == pytest.approx(11.95, rel=0.01)
    assert fullest(served_E, np.arange(256), 32) == pytest.approx(2.56, rel=0.02)
    plan = replicate(known_E, num_slots=256 + 32, num_ranks=32)
    assert fullest(served_E, plan, 32) == pytest.approx(1.05, abs=0.005)

    random = np.random.default_rng(0)
    others = [random.permutation(served_E) for _ in range(50)]

    def drifted(share: float) -> list[NDArray[np.float64]]:
        """Loads where popularity moved to other experts by a share, several ways."""
        return [(1 - share) * served_E + share * other_E for other_E in others]

    share = root(lambda share: np.mean([fullest(load_E, plan, 32) for load_E in drifted(share)]), 1.11, 0, 0.2, 1e-4)
    moved = np.mean([np.abs(load_E - served_E).sum() / 2 / served_E.sum() for load_E in drifted(share)])
    assert moved == pytest.approx(0.04, abs=0.005)


def test_one_skew_drops_what_marin_reports_at_two_capacities() -> None:
    """marin 7279: 256 experts, top-8, EP 64, capacity by sender and expert: 9.68 % dropped at 1.0, 7.25 % at 1.0625.

    One sender, because all have the same popularity. A peak load chosen for the first gives the second, too; a power
    law drops far more.
    """
    sizes = {"num_experts": 256, "top_k": 8, "num_tokens": 8192, "num_batches": 1, "sequence_length": 128, "seed": 0}

    def dropped(capacity_factor: float, **skew: object) -> float:
        scores_TE = SyntheticWorkload(**sizes, **skew).batch(0).scores_TE
        context = RoutingContext(top_k=8, num_ranks=64)
        routing = make_policy({"name": "token_drop", "capacity_factor": capacity_factor}).route(scores_TE, context)
        return routing_metrics(routing, scores_TE, context)["dropped_share"]

    skew = {"peak_load": 1.7}
    assert dropped(1.0, **skew) == pytest.approx(0.0968, abs=0.002)
    assert dropped(1.0625, **skew) == pytest.approx(0.0725, abs=0.002)
    assert dropped(1.0, pattern="power_law_1.2") > 0.3


@pytest.mark.parametrize(("num_rows", "padding"), [(100, 10), (128, 38)])
def test_padding_to_an_alignment_is_counted_apart(num_rows: int, padding: int) -> None:
    """Megatron-LM 6086: of 100 rows, 90 are expert 0's, which rows alone cannot pad to 128, and its count says 100.

    Ours keeps the 90 pairs of tokens apart from rows that fill up, whether these reach the alignment or not.
    """
    map_TE = torch.zeros(num_rows, 2, dtype=torch.bool)
    map_TE[:, 0] = True
    scores_TE = torch.tensor([0.75, 0.25]).repeat(num_rows, 1)
    context = RoutingContext(top_k=1, num_ranks=2, token_mask_T=torch.arange(num_rows) < 90)
    found = routing_metrics(Routing(map_TE, scores_TE * map_TE), scores_TE, context)
    assert (found["num_pairs"], found["padding_pairs"], found["num_topk_pairs"]) == (num_rows, padding, 90)
    assert found["load_E"].tolist() == [num_rows, 0]
    assert found["num_dropped_pairs"] == 0
