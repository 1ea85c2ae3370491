"""Phases of a device that is not here: by hand and by properties; ``virtual_laws`` has them cut as real runs are."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_ep_bench.cost_model.devices import Device
from moe_ep_bench.cost_model.layer import RankWork, layer_segments
from moe_ep_bench.cost_model.timeline import Leg, legs_of
from moe_ep_bench.models import ModelSpec

# Arithmetic 5e7 operations per us, memory 1e6 bytes per us, permutation 5e5 bytes per us.
DEVICE = Device(
    name="test", source="test", bf16_tflops=100, memory_tbps=2, memory_gb=80,
    arithmetic_efficiency=((1, 0.5),), arithmetic_basis="assumed", memory_efficiency=0.5, memory_basis="assumed",
    overhead_us=3, overhead_basis="assumed", routing_native_ps=100, routing_native_basis="assumed",
    routing_policy_ps=300, routing_policy_basis="assumed", permute_efficiency=0.25, permute_basis="assumed",
)  # fmt: skip
MODEL = ModelSpec(
    name="test", source="test", num_layers=1, hidden_size=1000, num_experts=8, top_k=2, ffn_hidden_size=500,
    normalize=True,
)  # fmt: skip
WITH_SHARED = MODEL.model_copy(update={"shared_ffn_hidden_size": 200})
DEVICES = {name: Device.load(name) for name in Device.names()}
PRESETS = {name: ModelSpec.named(name) for name in ("olmoe-1b-7b", "mixtral-8x7b", "deepseek-v2-lite")}
WORK = RankWork(num_tokens=1000, num_sent=2000, received_L=np.array([1000, 3000]))


def legs_of_work(
    work: RankWork = WORK, model: ModelSpec = MODEL, device: Device = DEVICE, **options: Any
) -> tuple[list[Leg], list[str]]:
    return legs_of(layer_segments(device, model, work, **{"by_policy": False, "batch_wide": False, **options}))


def phases(work: RankWork = WORK, model: ModelSpec = MODEL, device: Device = DEVICE, **options: Any) -> Leg:
    """Microseconds by phase of the whole run."""
    legs, _ = legs_of_work(work, model, device, **options)
    return {phase: sum(leg.get(phase, 0.0) for leg in legs) for phase in sorted(set().union(*legs))}


def test_the_gate_and_routing_by_hand() -> None:
    assert (phases()["policy"], phases(by_policy=True)["policy"]) == pytest.approx((0.8, 2.4))
    # However many slots there are, the model's experts alone are scored.
    more_slots = phases(RankWork(1000, 2000, np.full(16, 250)))
    assert (more_slots["policy"], more_slots["gate"]) == (phases()["policy"], phases()["gate"])
    # 1.6e7 operations are 0.32 us; 2 (1e6 + 8e3) + 4 x 8e3 bytes are 2.048 us.
    assert phases()["gate"] == pytest.approx(2.048)
    # 512 experts: 1.024e9 operations, 5.072e6 bytes.
    assert phases(model=MODEL.model_copy(update={"num_experts": 512}))["gate"] == pytest.approx(20.48)


def test_a_batch_wide_policy_meets_after_the_models_own_top_k() -> None:
    legs, meetings = legs_of_work(by_policy=True, batch_wide=True)
    assert meetings[0] == "wait_policy"
    assert (legs[0]["policy"], legs[1]["policy"]) == pytest.approx((0.8, 1.6))
    # However fast it is: no time is below zero, and the sum stays.
    fast = DEVICE.model_copy(update={"routing_policy_ps": 50})
    legs, _ = legs_of_work(device=fast, by_policy=True, batch_wide=True)
    assert (legs[0]["policy"], legs[1]["policy"]) == pytest.approx((0.4, 0))


def test_the_four_permutations_by_hand() -> None:
    # Rows of 2000 bytes. Gathered: 2 x 2000 rows. Sorted and put back: 2 x 4000 rows each. Summed: 2000 + 1000 rows.
    legs, _ = legs_of_work()
    assert [leg["permute"] for leg in legs] == pytest.approx([0, 16, 64, 12])
    # One local expert needs no sorting.
    legs, _ = legs_of_work(RankWork(1000, 2000, np.array([4000])))
    assert [leg["permute"] for leg in legs] == pytest.approx([0, 16, 0, 12])


def test_the_experts_by_hand() -> None:
    # 3e9 and 9e9 operations: 60 and 180 us, more than their bytes take.
    assert phases()["experts"] == pytest.approx(3 + 60 + 180)
    # One row: 3e6 operations are 0.06 us; 2 (1.5e6 + 5e3) bytes are 3.01 us. An expert without rows moves nothing.
    assert phases(RankWork(1000, 2000, np.array([1, 0, 1])))["experts"] == pytest.approx(3 + 2 * 3.01)
    assert phases(RankWork(1000, 2000, np.array([1])), dtype="float32")["experts"] == pytest.approx(3 + 6.02)


def test_the_shared_experts_by_hand() -> None:
    # 1.2e9 operations are 24 us; at the end three rows of 2000 bytes for each token are 6 us.
    legs, _ = legs_of_work(model=WITH_SHARED)
    assert [leg.get("shared", 0.0) for leg in legs] == pytest.approx([24, 0, 0, 6])
    # One token: 2 (6e5 + 3.2e3) bytes.
    legs, _ = legs_of_work(RankWork(1, 2, np.array([2])), WITH_SHARED)
    assert legs[0]["shared"] == pytest.approx(1.2064)
    assert "shared" not in phases()


def test_a_lone_rank_meets_nobody_and_sorts_nothing() -> None:
    work = RankWork(1000, 2000, np.array([500, 1500]))
    (leg,), meetings = legs_of_work(work, WITH_SHARED, alone=True, by_policy=True, batch_wide=True)
    assert meetings == []
    assert leg["permute"] == pytest.approx(16 + 12)
    assert (leg["shared"], leg["policy"], leg["experts"]) == pytest.approx((30, 2.4, 3 + 30 + 90))


@pytest.mark.parametrize("batch_wide", [False, True])
def test_nothing_to_do_takes_no_time(batch_wide: bool) -> None:
    nothing = RankWork(0, 0, np.zeros(4, dtype=np.int64))
    assert set(phases(nothing, WITH_SHARED, by_policy=True, batch_wide=batch_wide).values()) == {0.0}


def test_a_rank_without_tokens_serves_the_others() -> None:
    times = phases(RankWork(0, 0, np.array([1000, 3000])), WITH_SHARED)
    busy = {phase: time_us for phase, time_us in times.items() if time_us > 0}
    assert busy == pytest.approx({"permute": 64, "experts": 243})


@given(
    tokens=st.integers(1, 10**5),
    rows=st.lists(st.integers(0, 10**5), min_size=1, max_size=6),
    more=st.integers(1, 1000),
    device=st.sampled_from(sorted(DEVICES)),
    preset=st.sampled_from(sorted(PRESETS)),
    batch_wide=st.booleans(),
)
def test_more_work_never_takes_less_time(
    tokens: int, rows: list[int], more: int, device: str, preset: str, batch_wide: bool
) -> None:
    model, known = PRESETS[preset], DEVICES[device]
    work = RankWork(tokens, tokens * (model.top_k - 1), np.array(rows))
    fuller_L = work.received_L.copy()
    fuller_L[-1] += more
    times = phases(work, model, known, by_policy=True, batch_wide=batch_wide)
    assert all(time_us >= 0 for time_us in times.values())
    changes = {
        "num_tokens": (tokens + more, {"policy", "permute"}),
        "num_sent": (work.num_sent + min(more, tokens), {"permute"}),
        "received_L": (fuller_L, {"permute"} if len(rows) > 1 else set()),
    }
    for field, (value, grows) in changes.items():
        longer = phases(replace(work, **{field: value}), model, known, by_policy=True, batch_wide=batch_wide)
        for phase, time_us in times.items():
            assert longer[phase] >= time_us * (1 - 1e-12), (field, phase)
        # GEMMs of few rows take as long as those of some more.
        assert all(longer[phase] > times[phase] for phase in grows), field


def test_many_rows_on_an_h100_run_as_fast_as_in_the_tables_and_faster_than_with_torch() -> None:
    """OLMoE, 65,536 tokens x top 8 on one H100: 725 TFLOP/s; torch's grouped_mm reached 502."""
    model, num_tokens = PRESETS["olmoe-1b-7b"], 65_536
    pairs = num_tokens * model.top_k
    work = RankWork(num_tokens, pairs, np.full(model.num_experts, pairs // model.num_experts))
    time_us = phases(work, model, DEVICES["h100-sxm"], alone=True)["experts"]
    assert 6 * pairs * model.hidden_size * model.ffn_hidden_size / time_us / 1e6 == pytest.approx(725, rel=0.01)
