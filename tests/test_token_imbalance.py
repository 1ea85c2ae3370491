"""Megatron-LM's workloads W0 to W7: what its pull request 7488 prints of them, and that ranks change nothing."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from test_run import CONFIG, cases_of, launch, routing_of, write_config

from moe_ep_bench.analysis.cases import cases, load
from moe_ep_bench.bench.description import _drawn
from moe_ep_bench.cli import main
from moe_ep_bench.errors import OK, UserError
from moe_ep_bench.files import stable_hash
from moe_ep_bench.workload.synthetic import SyntheticWorkload
from moe_ep_bench.workload.token_imbalance import TOKEN_IMBALANCE

# Fullest expert over the mean, and the coefficient of variation, of 8 experts in step 0 under seed 1234: the tables of
# its README at 128 tokens, top-2, and at 512, top-4; W3's, printed of an earlier definition, are by its code.
PUBLISHED = {
    "W0_balanced": [(1.000, 0.000), (1.000, 0.000)],
    "W1_hot_expert_set": [(3.312, 1.309), (1.781, 0.744)],
    "W2_hot_rank": [(3.219, 1.272), (1.770, 0.747)],
    "W3_spread_hot_experts": [(1.906, 0.732), (1.781, 0.745)],
    "W4_source_ragged": [(1.281, 0.141), (1.086, 0.046)],
    "W5_zero_expert_rank": [(2.156, 1.007), (2.000, 1.000)],
    "W6_rotating_hotspot": [(3.312, 1.319), (1.770, 0.742)],
    "W7_burst": [(1.219, 0.126), (1.066, 0.040)],
}
# Its ``workload_fingerprint``: 8 experts, top-2, 128 tokens, 4 steps, seed 1234 at EP 1, 2 and 4; 64 experts, top-6,
# 96 tokens, 5 steps, seed 7 at EP 8.
CHECKSUMS = {
    "W0_balanced": "0ccfd5244133da28 ec19d435b5af99e3 de729d3373593f8b 3ac6557de123c364",
    "W1_hot_expert_set": "edd174b3fa822b03 103965e28b276558 a45073361dd6bc62 992f242b1cd30981",
    "W2_hot_rank": "bf736c43f24a2b89 5a6fc3bfb964ad45 aae02de588345f38 ab5cae011c5241f0",
    "W3_spread_hot_experts": "76f6f70c8f759038 34af6f46bc404ada 8acc782cf82a6f02 947f70be5690382a",
    "W4_source_ragged": "d22b2560d57b46b8 f46ec773f0f3104d c6cfaa371564a7c8 41f45f73687e6746",
    "W5_zero_expert_rank": "16dd115d87ad4268 b0a7357ede5a32dd 86747b987a42e89e e1fff1ae94f93adf",
    "W6_rotating_hotspot": "edb30f43e84d804f c32510a634f80571 5eabf2cd8c0e31cb c4702b0b45231e93",
    "W7_burst": "bd13876686f9eaef fe038740f3d9eb01 f0c12e720fcfb339 0613cfa22210fd3e",
}


def workload(
    name: str, num_experts: int = 8, top_k: int = 2, num_tokens: int = 128, num_batches: int = 4, seed: int = 1234
) -> SyntheticWorkload:
    return SyntheticWorkload(num_experts, top_k, num_tokens, num_batches, 16, seed, pattern=name)


def loads(found: SyntheticWorkload, index: int) -> np.ndarray:
    ids_TK = found.batch(index).scores_TE.topk(found.top_k, dim=1).indices
    return torch.bincount(ids_TK.flatten(), minlength=found.num_experts).numpy()


@pytest.mark.parametrize("name", TOKEN_IMBALANCE)
def test_loads_and_checksums_are_the_pull_requests(name: str) -> None:
    for (peak, variation), sizes in zip(PUBLISHED[name], ((8, 2, 128), (8, 4, 512)), strict=True):
        load_E = loads(workload(name, *sizes), 0)
        assert load_E.max() / load_E.mean() == pytest.approx(peak, abs=6e-4)
        assert load_E.std() / load_E.mean() == pytest.approx(variation, abs=6e-4)
    *of_ep, other = CHECKSUMS[name].split()
    assert [workload(name).routing_checksum(ep_size) for ep_size in (1, 2, 4)] == of_ep
    assert workload(name, 64, 6, 96, 5, 7).routing_checksum(8) == other


@pytest.mark.parametrize("name", TOKEN_IMBALANCE)
def test_ranks_hold_the_same_routing_at_any_number_of_them_and_weights_are_the_sources(name: str) -> None:
    found = workload(name, 16, 3)
    whole_TE = found.batch(3).scores_TE
    for num_ranks in (2, 4):
        parts = [found.rank_batch(3, rank, num_ranks).scores_TE for rank in range(num_ranks)]
        assert sorted(torch.cat(parts).tolist()) == sorted(whole_TE.tolist())
    best_TK = whole_TE.topk(3, dim=1).values
    assert best_TK.sum(dim=1).min() > 1 - 1e-6
    assert (whole_TE > 0).all()
    assert best_TK.min() >= 0.5 / (0.5 + 2) - 1e-6, "of numbers from 0.5 to 1"


def test_hot_experts_move_and_burst_with_the_batches() -> None:
    rotating, burst = workload("W6_rotating_hotspot", 16, num_batches=13), workload("W7_burst", 16, num_batches=8)
    hottest = [sorted(np.argsort(-loads(rotating, index))[:4].tolist()) for index in range(13)]
    assert hottest[0:3] == [[0, 1, 2, 3]] * 3
    assert hottest[3:6] == [[4, 5, 6, 7]] * 3
    assert hottest[12] == [0, 1, 2, 3]
    is_burst = [int(loads(burst, index)[:4].sum() > 128) for index in range(8)]
    assert is_burst == [0, 0, 0, 1, 0, 0, 0, 1]


def test_what_a_model_cannot_take_is_one_line() -> None:
    with pytest.raises(UserError, match="skew: W5_zero_expert_rank has tokens take 4 of the 8 experts; the model tak"):
        workload("W5_zero_expert_rank", top_k=5)
    with pytest.raises(UserError, match="skew: W1_hot_expert_set knows no groups of experts"):
        SyntheticWorkload(8, 2, 128, 1, 16, 0, pattern="W1_hot_expert_set", num_groups=2)


def test_a_rank_to_which_no_token_goes_computes_on_and_the_checksum_is_a_fact(tmp_path: Path) -> None:
    """Megatron-LM 1877: with alltoall, an output of size 0 had no shape. Rank 0 holds the experts that nobody takes."""
    skew = {"kind": "synthetic", "skew": "W5_zero_expert_rank", "num_tokens": 128, "num_batches": 2, "seed": 7}
    policies = [{"name": "token_drop", "capacity_factor": 1.0}]
    config = write_config(tmp_path, {**CONFIG, "workload": skew}, policies=policies, layer__ep_size=2)
    assert launch(config, "--out", tmp_path / "run").returncode == OK
    rows = routing_of(tmp_path / "run")
    native = rows[rows.label == "native"]
    assert [sum(load_E[:32]) for load_E in native.load_E] == [0] * 4
    assert sum(sum(load_E) for load_E in native.load_E) == 2 * 128 * 6
    assert set(cases_of(tmp_path / "run").status) == {"ok"}
    (facts,) = json.loads((tmp_path / "run" / "run.json").read_text())["comparisons"].values()
    expected = SyntheticWorkload(64, 6, 128, 2, 128, 7, pattern="W5_zero_expert_rank").routing_checksum(2)
    assert facts["routing_checksum"] == expected
    assert f"routing checksum {expected}" in cases(load(tmp_path / "run"))["workload_words"].iloc[0]
    assert main(["route", str(config), "--out", str(tmp_path / "route")]) == OK
    (routed,) = json.loads((tmp_path / "route" / "run.json").read_text())["comparisons"].values()
    assert routed["routing_checksum"] == expected


def test_layers_have_one_checksum_of_all_and_none_where_one_has_none() -> None:
    patterns = [workload("W2_hot_rank"), workload("W5_zero_expert_rank")]
    drawn = SyntheticWorkload(8, 2, 128, 4, 16, 1234)
    own = [one.routing_checksum(2) for one in patterns]
    for workloads, expected in ((patterns[:1], own[0]), (patterns, stable_hash(own)), ([drawn, drawn], None)):
        model: Any = SimpleNamespace(ep_size=2, workloads=dict(enumerate(workloads)))
        assert _drawn(model)["routing_checksum"] == expected
