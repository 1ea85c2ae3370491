"""Layers and passes of whole models on a device that is not here: by hand and by laws.

``virtual_laws`` and ``virtual_transformer_laws`` hold that they are cut as real runs are.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_ep_bench.cost_model.devices import Device
from moe_ep_bench.cost_model.expert_rows import load_device_of_layer
from moe_ep_bench.cost_model.phases import PassWork, RankWork, layer_segments, outside_moe_us, pass_segments
from moe_ep_bench.cost_model.timeline import PHASE_OF_MEETING, Leg, legs_of
from moe_ep_bench.models import Attention, LatentAttention, ModelSpec
from moe_ep_bench.schema import MOE_REST, UNACCOUNTED, layer_and_phase, phases_in_depth

# Arithmetic 5e7 operations per us, of attention 2e7; memory 1e6 bytes per us, permutation 5e5 bytes per us.
DEVICE = Device(
    name="test", source="test", bf16_tflops=100, memory_tbps=2, memory_gb=80,
    arithmetic_efficiency=((1, 0.5),), arithmetic_basis="assumed", memory_efficiency=0.5, memory_basis="assumed",
    overhead_us=3, overhead_basis="assumed", routing_native_ps=100, routing_native_basis="assumed",
    routing_policy_ps=300, routing_policy_basis="assumed", permute_efficiency=0.25, permute_basis="assumed",
    attention_efficiency=0.2, attention_basis="assumed",
)  # fmt: skip
MODEL = ModelSpec(
    name="test", source="test", num_layers=1, hidden_size=1000, num_experts=8, top_k=2, ffn_hidden_size=500,
    normalize=True,
)  # fmt: skip
WITH_SHARED = MODEL.model_copy(update={"shared_ffn_hidden_size": 200})
DEVICES = {name: Device.load(name) for name in Device.names()}
PRESETS = {name: ModelSpec.named(name) for name in ("olmoe-1b-7b", "mixtral-8x7b", "deepseek-v2-lite", "qwen3-30b-a3b")}
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


def test_a_balancer_solves_once_all_counts_are_known() -> None:
    plain, solved = (legs_of_work(solving_us=solving_us) for solving_us in (0.0, 100.0))
    assert plain[1] == solved[1]
    behind = solved[1].index("wait_metadata") + 1
    assert [
        leg.get("policy", 0.0) - before.get("policy", 0.0) for leg, before in zip(solved[0], plain[0], strict=True)
    ] == [100.0 * (place == behind) for place in range(len(plain[0]))]


def test_the_four_permutations_by_hand() -> None:
    # Rows of 2000 bytes. Gathered: 2 x 2000 rows. Sorted and put back: 2 x 4000 rows each. Summed: 2000 + 1000 rows.
    legs, _ = legs_of_work()
    assert [leg["permute"] for leg in legs] == pytest.approx([0, 16, 64, 12])
    # One local expert needs no sorting.
    legs, _ = legs_of_work(RankWork(1000, 2000, np.array([4000])))
    assert [leg["permute"] for leg in legs] == pytest.approx([0, 16, 0, 12])


@pytest.mark.parametrize(
    ("permute", "exchange", "expected"),
    [
        # Of rows of 2000 bytes, at 5e5 bytes a microsecond; 1000 tokens, 2000 pairs, 4000 arrive as 2500 copies.
        ("fused", None, [(1000 + 2000), 8000, 8000, 3000]),
        ("unfused", "rank", [0, 8000, 4000 + 2500, 0]),
        ("fused", "rank", [0, 2500 + 4000, 4000 + 2500, 0]),
        ("fused", "node", [0, 2500 + 4000, 4000 + 2500, 0]),
        ("fused", "pair", [0, 0, 0, 0]),
    ],
)
def test_permutation_goes_by_the_exchange_and_the_kernels(
    permute: str, exchange: str | None, expected: list[int]
) -> None:
    device = DEVICE.model_copy(update={"permute": permute})
    work = replace(WORK, num_copies=2500 if exchange in ("rank", "node") else None)
    segments = layer_segments(device, MODEL, work, by_policy=False, batch_wide=False, exchange=exchange)
    took = [time_us for phase, time_us in segments if phase == "permute"][1:]  # the first is before the counts
    assert took == pytest.approx([rows * 2000 / 5e5 for rows in expected])


@pytest.mark.parametrize(("permute", "sorted_rows"), [("unfused", 0), ("fused", 8000)])
def test_one_rank_sorts_its_rows_by_fused_kernels_alone(permute: str, sorted_rows: int) -> None:
    """Megatron-Core sorts whatever the number of ranks, as an H200 showed; this package's permutation does not."""
    device, how = DEVICE.model_copy(update={"permute": permute}), {"by_policy": False, "batch_wide": False}
    segments = layer_segments(device, MODEL, WORK, alone=True, **how)
    took = [time_us for phase, time_us in segments if phase == "permute"][-3:-1]
    assert took == pytest.approx([sorted_rows * 2000 / 5e5] * 2)


def test_an_exchange_in_fp8_brings_its_rows_in_fp8() -> None:
    """What arrives is read and written in the bytes that were sent; what goes back is bfloat16's."""
    work, how = replace(WORK, num_copies=2500), {"by_policy": False, "batch_wide": False, "exchange": "rank"}
    device = DEVICE.model_copy(update={"permute": "fused"})
    wide, narrow = (layer_segments(device, MODEL, work, dtype=dtype, **how) for dtype in ("bfloat16", "fp8_block"))
    (sort_us, back_us), (narrow_us, narrow_back_us) = (
        [time_us for phase, time_us in one if phase == "permute" and time_us] for one in (wide, narrow)
    )
    assert narrow_us == pytest.approx(sort_us * (1 + 4 / 128) / 2)
    assert narrow_back_us == back_us
    sent = layer_segments(device, MODEL, work, dispatch_dtype="nvfp4", **how)
    assert [time_us for phase, time_us in sent if phase == "permute" and time_us] == pytest.approx(
        [sort_us * (0.5 + 1 / 16) / 2, back_us]
    )


@pytest.mark.parametrize("name", ["h100-sxm", "table:h100_sxm", "table:h200_sxm/vllm"])
@pytest.mark.parametrize("exchange", [None, "rank"])
def test_all_ranks_at_once_take_what_each_takes_by_itself(name: str, exchange: str | None) -> None:
    """Some experts, and some ranks, without rows or tokens."""
    random, model = np.random.default_rng(1), ModelSpec.named("deepseek-v3")
    device = load_device_of_layer(name, model, 32, "fp8_block", "rank")
    received_RL = random.integers(-40, 200, (6, 8)).clip(min=0)
    received_RL[2] = 0
    tokens_R = np.array([64, 0, 1, 300, 64, 64])
    for batch_tokens in (None, 4096):
        work = RankWork(tokens_R, 8 * tokens_R, received_RL, batch_tokens, num_copies=received_RL.sum(axis=1) // 2)
        how = {"by_policy": True, "batch_wide": True, "dtype": "fp8_block", "exchange": exchange, "solving_us": 5.0}
        together = layer_segments(device, model, work, **how)
        for rank in range(6):
            alone = layer_segments(device, model, work.of_rank(rank), **how)
            assert [phase for phase, _ in alone] == [phase for phase, _ in together]
            times_us = [np.broadcast_to(time_us, 6)[rank] for _, time_us in together]
            assert times_us == pytest.approx([time_us for _, time_us in alone])


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


# ---- Passes of whole models ------------------------------------------------------------------------------------------

WHOLE = ModelSpec(
    name="test", source="test", num_layers=4, first_dense_layers=1, dense_ffn_hidden_size=800, hidden_size=1000,
    vocab_size=5000, attention=Attention(num_heads=8, num_kv_heads=2, head_dim=100), num_experts=8, top_k=2,
    ffn_hidden_size=500, normalize=True,
)  # fmt: skip
LATENT = WHOLE.model_copy(
    update={
        "attention": LatentAttention(
            num_heads=8, kv_lora_rank=50, qk_nope_head_dim=100, qk_rope_head_dim=20, v_head_dim=100
        )
    }
)


def moe_work(tokens: int, model: ModelSpec, ranks: int = 2) -> RankWork:
    received = tokens * model.top_k
    local = model.num_experts // ranks
    rows_L = np.full(local, received // local)
    rows_L[0] += received - rows_L.sum()
    return RankWork(tokens, received, rows_L)


def prefill(*lengths: int, model: ModelSpec = WHOLE, num_layers: int = 3) -> PassWork:
    moe = moe_work(sum(lengths), model)
    return PassWork(lengths, 0, dict.fromkeys(range(model.first_dense_layers, num_layers), moe))


def decode(requests: int, context: int, model: ModelSpec = WHOLE, num_layers: int = 3) -> PassWork:
    moe = moe_work(requests, model)
    return PassWork((1,) * requests, context, dict.fromkeys(range(model.first_dense_layers, num_layers), moe))


def pass_phases(work: PassWork, model: ModelSpec = WHOLE, device: Device = DEVICE, **options: Any) -> dict[str, float]:
    """Microseconds by phase of the whole pass."""
    times: dict[str, float] = defaultdict(float)
    how = {"by_policy": False, "batch_wide": False, **options}
    for phase, time_us in pass_segments(device, model, max(work.layers) + 1, work, **how):
        if layer_and_phase(phase)[1] not in PHASE_OF_MEETING:
            times[phase] += time_us
    return dict(times)


def total_us(*arguments: Any, **options: Any) -> float:
    return sum(pass_phases(*arguments, **options).values())


def test_embedding_and_output_by_hand() -> None:
    # 300 rows of 2000 bytes, read and written at 5e5 bytes per us.
    times = pass_phases(prefill(100, 200))
    assert times["embedding"] == pytest.approx(2 * 300 * 2000 / 5e5)
    # Two last tokens: 2 (5e6 + 2 x 6000) bytes, more than 2e7 operations take.
    assert times["output"] == pytest.approx(10.024)
    # 200 prompts of one token: 2e9 operations are 40 us, more than their bytes.
    assert pass_phases(prefill(*[1] * 200))["output"] == pytest.approx(40)


def test_norms_and_residual_additions_by_hand() -> None:
    # 2000 tokens: a norm moves 8e6 bytes, an addition 12e6. Two of each in a layer, and the last norm.
    times = pass_phases(prefill(2000))
    assert [times[layer, "rest"] for layer in range(3)] == pytest.approx([40] * 3)
    assert times["rest"] == pytest.approx(8)


def test_dense_layers_by_hand() -> None:
    # 6 x 2000 x 1000 x 800 operations at 5e7.
    times = pass_phases(prefill(2000))
    assert times[0, "dense"] == pytest.approx(192)
    assert (1, "dense") not in times
    assert (0, "experts") not in times


def test_grouped_attention_of_prompts_by_hand() -> None:
    # 2000 tokens in two prompts. Projections: 1000 x 1200 and 800 x 1000, 4.8e9 and 3.2e9 operations.
    projections = 96 + 64
    # Rotary: 800 + 200 numbers a token, read and written: 8e6 bytes.
    rotary = 8
    # Core: 8 x 1000^2 x 200 operations each prompt at 2e7: 80 us each; its 8e6 bytes take less.
    assert pass_phases(prefill(1000, 1000))[1, "attention"] == pytest.approx(projections + rotary + 160)
    # As one prompt: twice the pairs.
    assert pass_phases(prefill(2000))[1, "attention"] == pytest.approx(projections + rotary + 320)


def test_norms_of_queries_and_keys_by_hand() -> None:
    normed = WHOLE.model_copy(update={"attention": WHOLE.attention.model_copy(update={"qk_norm": "head"})})
    gap = pass_phases(prefill(2000, model=normed), normed)[0, "attention"] - pass_phases(prefill(2000))[0, "attention"]
    assert gap == pytest.approx(8)


def test_grouped_attention_of_a_decode_step_by_hand() -> None:
    # One request after 9,999 tokens. Weights: 2.4e6 and 1.6e6 bytes, rows 4.4e3 and 3.6e3.
    projections = 2.4044 + 1.6036
    # Rotary: the new key's 200 numbers and the query's 800, read and written; cached keys have their positions.
    rotary = 2 * 2 * (200 + 800) / 1e6
    # Core: keys and values of 10,000 tokens, and a query's row in and out. Its 3.2e7 operations take 1.6 us.
    core = 2 * (2 * 2_000_000 + 1600) / 1e6
    assert pass_phases(decode(1, 9999))[2, "attention"] == pytest.approx(projections + rotary + core)
    # A device of 1e4 operations per us: 800 queries with 10,000 keys, and as much with values.
    slow = DEVICE.model_copy(update={"attention_efficiency": 1e-4})
    core = 2 * (800 + 800) * 10_000 / 1e4
    assert pass_phases(decode(1, 9999), device=slow)[2, "attention"] == pytest.approx(projections + rotary + core)


def test_latent_attention_by_hand() -> None:
    # 2000 tokens in one prompt: 960 queries, 70 latent and rotary, 50 x 1600 from the latent, 800 x 1000 out.
    gemms = [(1000, 960), (1000, 70), (50, 1600), (800, 1000)]
    operations = [2 * 2000 * takes * gives / 5e7 for takes, gives in gemms]
    num_bytes = [2 * (takes * gives + 2000 * (takes + gives)) / 1e6 for takes, gives in gemms]
    projections = sum(map(max, operations, num_bytes))
    rotary = 2 * 2 * 2000 * (960 + 960) / 1e6
    normed = 2 * 2 * 2000 * 50 / 1e6  # the latent of keys and values, read and written
    core = 8 * 2000**2 * (120 + 100) / 2e7
    expected = projections + rotary + normed + core
    assert pass_phases(prefill(2000, model=LATENT), LATENT)[1, "attention"] == pytest.approx(expected)


def test_a_step_of_latent_attention_is_absorbed_by_hand() -> None:
    # The cache holds 50 + 20 numbers a token for all 8 heads; of each head 100 x 50 in, 50 x 100 out.
    gemms = [(1000, 960, 1), (1000, 70, 1), (100, 50, 8), (50, 100, 8), (800, 1000, 1)]
    projections = sum(heads * 2 * (takes * gives + takes + gives) / 1e6 for takes, gives, heads in gemms)
    elementwise = 2 * 2 * (50 + 8 * 20 + 20) / 1e6
    core = 2 * (10_000 * 70 + 8 * (70 + 50)) / 1e6
    found = pass_phases(decode(1, 9_999, LATENT), LATENT)[1, "attention"]
    assert found == pytest.approx(projections + elementwise + core)
    # Its weights are those of the expanded form, multiplied in another order.
    latent = LATENT.attention
    weights = sum(takes * gives * heads for takes, gives, heads in latent.form(1000, decodes=True).projections)
    assert weights + latent.form(1000).normed == latent.num_parameters(1000)
    # A device of 1e4 operations per us: 8 heads of 70 numbers with each cached token, and of 50 with its latent.
    slow = DEVICE.model_copy(update={"attention_efficiency": 1e-4})
    core = 2 * 8 * (70 + 50) * 10_000 / 1e4
    found = pass_phases(decode(1, 9_999, LATENT), LATENT, slow)[1, "attention"]
    assert found == pytest.approx(projections + elementwise + core)


def test_fp8_linear_layers_read_a_byte_a_weight_and_multiply_faster_where_the_checkpoint_has_them_so() -> None:
    """Projections, dense and shared FFNs by hand; output, gate, norms and core attention stay in bfloat16."""
    quantized = WHOLE.model_copy(update={"quantized": "all_linear", "shared_ffn_hidden_size": 200})
    plain = quantized.model_copy(update={"quantized": "experts"})
    times, before = (pass_phases(prefill(2000, model=model), model, dtype="fp8") for model in (quantized, plain))
    bfloat16 = pass_phases(prefill(2000, model=plain), plain)
    # Twice the speed: projections of 160 us, a dense FFN of 192, shared experts of 48 (their sum's bytes stay).
    assert bfloat16[1, "attention"] - times[1, "attention"] == pytest.approx(80)
    assert times[0, "dense"] == pytest.approx(96)
    assert bfloat16[1, "shared"] - times[1, "shared"] == pytest.approx(24)
    differ = {key for key in times if times[key] != before[key]}
    assert {phase for _, phase in differ} == {"attention", "dense", "shared"}
    # A step of one request: weights of one byte, rows of two.
    step, slow = (pass_phases(decode(1, 9999, model), model, dtype="fp8") for model in (quantized, plain))
    assert slow[2, "attention"] - step[2, "attention"] == pytest.approx((1000 * 1200 + 800 * 1000) / 1e6)
    assert slow["output"] == step["output"]
    # Four bits are the experts' alone.
    assert pass_phases(prefill(2000, model=quantized), quantized, dtype="nvfp4")[0, "dense"] == pytest.approx(192)


def test_moe_layers_are_those_of_a_layer_alone() -> None:
    work = prefill(1000)
    times = pass_phases(work, by_policy=True, batch_wide=True)
    assert set(times) <= {*phases_in_depth(3, [1, 2]), UNACCOUNTED}, "a phase without a timer"
    legs, _ = legs_of(layer_segments(DEVICE, WHOLE, work.layers[1], by_policy=True, batch_wide=True))
    alone = {phase: sum(leg.get(phase, 0.0) for leg in legs) for phase in set().union(*legs)}
    alone[MOE_REST] = alone.pop(UNACCOUNTED)
    for layer in (1, 2):
        own = ("rest", "attention")
        found = {layer_and_phase(name)[1]: us for name, us in times.items() if layer_and_phase(name)[0] == layer}
        assert {phase: us for phase, us in found.items() if phase not in own} == pytest.approx(alone)


def test_a_pass_on_a_lone_rank_meets_nobody_and_nothing_to_do_takes_no_time() -> None:
    local = RankWork(100, 200, np.full(8, 25))
    work = PassWork((100,), 0, {1: local, 2: local})
    legs, meetings = legs_of(pass_segments(DEVICE, WHOLE, 3, work, by_policy=False, batch_wide=False, alone=True))
    assert (len(legs), meetings) == (1, [])
    nothing = RankWork(0, 0, np.zeros(4, dtype=np.int64))
    assert total_us(PassWork((), 0, {1: nothing, 2: nothing})) == 0


@pytest.mark.parametrize("model", [WHOLE, LATENT])
@pytest.mark.parametrize("is_decode", [False, True])
def test_what_no_moe_layer_takes_is_the_pass_without_them(model: ModelSpec, is_decode: bool) -> None:
    layers = model.num_layers
    work = decode(6, 50, model, layers) if is_decode else prefill(30, 20, model=model, num_layers=layers)
    elsewhere = ("embedding", "attention", "dense", "rest", "output")
    expected = sum(us for key, us in pass_phases(work, model).items() if layer_and_phase(key)[1] in elsewhere)
    assert outside_moe_us(DEVICE, model, work) == pytest.approx(expected)
