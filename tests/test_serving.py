"""The plugin for vLLM as far as it needs no vLLM: what a step becomes, what is recorded, what is refused."""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from refusals import refusal

from moe_ep_bench.metrics import routing_metrics
from moe_ep_bench.policies import Routing, make_policy
from moe_ep_bench.serving import LIMIT, POLICY, RECORD, Settings, backends, check_config, settings
from moe_ep_bench.serving import recorder as recording
from moe_ep_bench.serving import vllm as plugin
from moe_ep_bench.serving.recorder import Recorder
from moe_ep_bench.serving.step import COUNTS, Step, StepRouter, into_slots, moe_layer
from moe_ep_bench.workload.trace import UNFINISHED, open_trace, trace_info

EXPERTS, TOP_K = 16, 4
FACTS: dict[str, dict[str, Any]] = {
    "qwen": {"renormalize": True},
    "mixtral": {"renormalize": False},
    "deepseek": {
        "scoring_func": "sigmoid",
        "use_grouped_topk": True,
        "num_expert_group": 4,
        "topk_group": 2,
        "routed_scaling_factor": 2.5,
        "e_score_correction_bias": torch.linspace(-0.2, 0.2, EXPERTS),
    },
}


def layer_of(family: str, index: int = 0, layers: int = 1) -> Any:
    return moe_layer(family, index, index / layers, num_experts=EXPERTS, top_k=TOP_K, **FACTS[family])


def routed_by_vllm(family: str, logits_TE: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights and ids as vLLM's router for CPUs makes them, in the logits' type."""
    facts = FACTS[family]
    if family != "deepseek":
        chosen_TK, ids_TK = logits_TE.topk(TOP_K, dim=1, sorted=False)
        if facts["renormalize"]:
            return chosen_TK.softmax(dim=1).float(), ids_TK.int()
        return (chosen_TK - logits_TE.logsumexp(dim=1, keepdim=True)).exp().float(), ids_TK.int()
    scores_TE = logits_TE.float().sigmoid()
    biased_TGe = (scores_TE + facts["e_score_correction_bias"]).unflatten(1, (4, -1))
    best_TG = biased_TGe.topk(2, dim=2).values.sum(dim=2).topk(2, dim=1).indices
    inside_TG = torch.zeros(len(scores_TE), 4, dtype=torch.bool).scatter(1, best_TG, True)
    ids_TK = biased_TGe.masked_fill(~inside_TG.unsqueeze(2), -torch.inf).flatten(1).topk(TOP_K, dim=1).indices
    weights_TK = scores_TE.gather(1, ids_TK)
    return weights_TK / weights_TK.sum(dim=1, keepdim=True) * 2.5, ids_TK.int()


def logits(tokens: int = 64, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(tokens, EXPERTS, generator=torch.Generator().manual_seed(seed)).mul(2).to(dtype)


def step_of(tokens: int, prompts: int | None = None) -> Step:
    number_T = torch.arange(tokens)
    return Step(number_T // 8, number_T < (tokens if prompts is None else prompts))


def dense(weights_TK: torch.Tensor, ids_TK: torch.Tensor) -> torch.Tensor:
    return torch.zeros(len(ids_TK), EXPERTS).scatter_add(1, ids_TK.long(), weights_TK)


# ---- a step ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FACTS)
def test_topk_leaves_every_bit_of_a_router_in_bfloat16(family: str) -> None:
    """Many of its logits tie, and it rounds its weights: both are kept."""
    logits_TE = logits(512).round(decimals=1)
    layer, (weights_TK, ids_TK) = layer_of(family), routed_by_vllm(family, logits_TE)
    if family != "deepseek":
        least_T1 = logits_TE.gather(1, ids_TK.long()).amin(dim=1, keepdim=True)
        assert ((logits_TE == least_T1).sum(dim=1) > 1).sum() > 20
    router = StepRouter(make_policy({"name": "topk"}), [layer], 1, "cpu")
    choice = layer.choice(logits_TE, ids_TK)
    found_TK, expert_TK = router.route(0, choice, weights_TK, ids_TK, step_of(512))
    assert torch.equal(found_TK, weights_TK)
    assert torch.equal(expert_TK, ids_TK)
    count = dict(zip(COUNTS, router.counts_LC[0].tolist(), strict=True))
    assert (count["tokens"], count["dropped"], count["pairs"]) == (512, 0, 512 * TOP_K)


def test_counts_that_no_policy_comes_to_are_an_error() -> None:
    layer, logits_TE = layer_of("qwen"), logits(dtype=torch.float32)
    weights_TK, ids_TK = routed_by_vllm("qwen", logits_TE)
    for spec in ({"name": "topk"}, {"name": "pruned", "k0": 1}):
        router = StepRouter(make_policy(spec), [layer], 1, "cpu", ("prefill", "decode"))
        router.route(0, layer.choice(logits_TE, ids_TK), weights_TK, ids_TK, step_of(64))
        assert router.problem() is None
        router.counts_LC[0, COUNTS.index("mass")] *= 4.6
        assert "of the top-k's mass kept, expected at most 1" in router.problem()
        router.counts_LC[0, COUNTS.index("dropped")] += 3
        assert ("topk changed 3 of 256 top-k pairs" in router.problem()) == (spec["name"] == "topk")


@pytest.mark.slow
@pytest.mark.parametrize("family", FACTS)
@pytest.mark.parametrize(
    "spec",
    [
        {"name": "token_drop", "capacity_factor": 0.75},
        {"name": "oea", "k0": 1, "k_max": 3},
        {"name": "pruned", "k0": 1},
        {"name": "laser", "eps_high": 0.9, "t_fix": 0.3, "c": 8},
    ],
    ids=lambda spec: spec["name"],
)
def test_a_policy_decides_for_the_tokens_of_its_stages(family: str, spec: dict[str, Any]) -> None:
    policy, layer, step = make_policy(spec), layer_of(family), step_of(64, prompts=40)
    logits_TE = logits(dtype=torch.float32)
    weights_TK, ids_TK = routed_by_vllm(family, logits_TE)
    choice = layer.choice(logits_TE, ids_TK)
    router = StepRouter(policy, [layer], 1, "cpu")
    found_TE = dense(*router.route(0, choice, weights_TK, ids_TK, step))
    acts_T, _ = step.acting(policy.acts_in)
    assert acts_T.any()
    acting = choice.scores_TE[acts_T]
    context = layer.context(1)
    routing = policy.route(acting, context) if spec["name"] != "laser" else None
    if routing is not None:
        torch.testing.assert_close(found_TE[acts_T], routing.weights_TE, rtol=1e-5, atol=1e-6)
        metrics = routing_metrics(routing, acting, context)
        count = dict(zip(COUNTS, router.counts_LC[0].tolist(), strict=True))
        assert count["dropped"] == metrics["num_dropped_pairs"]
        assert count["rerouted"] == metrics["num_rerouted_pairs"]
        assert count["mass"] / count["own_mass"] == pytest.approx(metrics["retained_mass_topk"], rel=1e-5)
        assert 0 < count["dropped"] + count["rerouted"] < count["pairs"]
        assert (count["rerouted"] > 0) == (spec["name"] == "oea")
    assert torch.equal(found_TE[~acts_T], dense(weights_TK, ids_TK)[~acts_T])


def test_scores_that_are_no_numbers_are_one_line() -> None:
    logits_TE = logits()
    _, ids_TK = routed_by_vllm("qwen", logits_TE)
    logits_TE[17, 5] = torch.nan
    with pytest.raises(ValueError, match="qwen: scores_TE: expected finite numbers"):
        layer_of("qwen").choice(logits_TE, ids_TK)


def padded_rows(logits_TE: torch.Tensor) -> torch.Tensor:
    """The same logits as a view into wider rows, as compiled code may hand them over (vLLM, pull request 57823)."""
    wide_TW = torch.full((len(logits_TE), EXPERTS + 4), 100.0, dtype=logits_TE.dtype)
    wide_TW[:, :EXPERTS] = logits_TE
    return wide_TW[:, :EXPERTS]


@pytest.mark.parametrize("family", FACTS)
def test_a_choice_is_of_the_rows_that_a_strided_view_shows(family: str) -> None:
    """vLLM's kernel took row t at t x E numbers: what it then chose is refused, and the rows themselves are read."""
    logits_TE, layer = logits(), layer_of(family)
    view_TE = padded_rows(logits_TE)
    assert view_TE.stride() == (EXPERTS + 4, 1)
    _, ids_TK = routed_by_vllm(family, logits_TE)
    for of_view, of_rows in zip(layer.choice(view_TE, ids_TK), layer.choice(logits_TE, ids_TK), strict=True):
        assert torch.equal(of_view, of_rows)
    _, misread_TK = routed_by_vllm(family, view_TE.as_strided(logits_TE.shape, (EXPERTS, 1)))
    told = refusal(layer.choice, logits_TE, misread_TK)
    assert f"{family}: ids_TK: expected the {TOP_K} best experts by the logits, [" in told


@pytest.mark.parametrize("family", FACTS)
def test_experts_that_contradict_nearly_equal_scores_are_refused_by_row(family: str) -> None:
    """Of a router whose scores hardly differ a wrong choice costs no mass, and is wrong all the same."""
    logits_TE, layer = logits(8, dtype=torch.float32) * 1e-3, layer_of(family)
    _, ids_TK = routed_by_vllm(family, logits_TE)
    best = sorted(ids_TK[5].tolist())
    ids_TK[5] = torch.tensor([expert for expert in range(EXPERTS) if expert not in best][:TOP_K])
    told = refusal(layer.choice, logits_TE, ids_TK)
    assert f"best experts by the logits, {best}, got {ids_TK[5].tolist()} of token 5" in told
    ids_TK[5] = torch.tensor([best[0], *best[:3]])
    assert f"got {best[:3]} of token 5" in refusal(layer.choice, logits_TE, ids_TK)


def test_a_choice_among_keys_that_are_equal_but_for_rounding_is_the_routers() -> None:
    """A large bias swallows the last places of scores, by which kernels differ."""
    bias_E = torch.full((EXPERTS,), 5.0)
    layer = moe_layer("biased", 0, 0, EXPERTS, TOP_K, scoring_func="sigmoid", e_score_correction_bias=bias_E)
    logits_TE = torch.linspace(-1e-6, 1e-6, EXPERTS).repeat(2, 1)
    ids_TK = torch.arange(5, 5 + TOP_K).repeat(2, 1)
    choice = layer.choice(logits_TE, ids_TK)
    assert torch.equal((choice.scores_TE + bias_E).topk(TOP_K, dim=1).indices.sort().values, ids_TK)
    assert float((choice.scores_TE - 0.5).abs().max()) < 1e-5


@given(st.integers(0, 2**32 - 1), st.integers(0, 12))
def test_slots_hold_what_the_policy_chose_and_read_no_other_expert(seed: int, tokens: int) -> None:
    random = torch.Generator().manual_seed(seed)
    scores_TE = torch.rand(tokens, EXPERTS, generator=random) + 0.01
    own_TK = scores_TE.topk(TOP_K, dim=1).indices
    own_TE = torch.zeros_like(scores_TE, dtype=torch.bool).scatter(1, own_TK, True)
    keep_T1 = torch.randint(0, TOP_K + 1, (tokens, 1), generator=random)
    order_TE = torch.rand(tokens, EXPERTS, generator=random).argsort(dim=1).argsort(dim=1)
    map_TE, acts_T = order_TE < keep_T1, torch.rand(tokens, generator=random) < 0.8
    map_TE = torch.where(acts_T.unsqueeze(1), map_TE, own_TE)
    weights_TK = scores_TE.gather(1, own_TK)
    found_TK, ids_TK = into_slots(Routing(map_TE, scores_TE * map_TE), ~acts_T, weights_TK, own_TK.int())
    torch.testing.assert_close(dense(found_TK, ids_TK), scores_TE * map_TE)
    assert ids_TK.dtype == torch.int32
    if map_TE.any():
        read_E = torch.zeros(EXPERTS, dtype=torch.bool)
        read_E[ids_TK.long().flatten()] = True
        assert torch.equal(read_E, map_TE.any(dim=0))


@pytest.mark.parametrize("placed", ["linear", "round robin"])
@given(st.integers(0, 2**32 - 1), st.integers(0, 12))
def test_an_empty_slot_elsewhere_is_a_row_on_no_rank(placed: str, seed: int, tokens: int) -> None:
    """Each rank names an expert of another: it computes the pairs kept of its own experts, and nothing else."""
    random, ranks = torch.Generator().manual_seed(seed), 4
    scores_TE = torch.rand(tokens, EXPERTS, generator=random) + 0.01
    own_TK = scores_TE.topk(TOP_K, dim=1).indices
    map_TE = torch.zeros_like(scores_TE, dtype=torch.bool).scatter(1, own_TK, True)
    map_TE &= torch.rand(tokens, EXPERTS, generator=random) < 0.6
    keeps_T = torch.rand(tokens, generator=random) < 0.3
    kept_TE = torch.where(keeps_T.unsqueeze(1), torch.zeros_like(map_TE).scatter(1, own_TK, True), map_TE)
    weights_TK, expert_E = scores_TE.gather(1, own_TK), torch.arange(EXPERTS)
    rank_E = expert_E % ranks if placed == "round robin" else expert_E // (EXPERTS // ranks)
    computed_TE = torch.zeros_like(scores_TE)
    for rank in range(ranks):
        elsewhere = int((rank_E != rank).nonzero()[0])
        routing = Routing(map_TE, scores_TE * map_TE)
        found_TK, ids_TK = into_slots(routing, keeps_T, weights_TK, own_TK.int(), elsewhere)
        is_mine_TK = rank_E[ids_TK.long()] == rank
        assert is_mine_TK.sum() == kept_TE[:, rank_E == rank].sum(), "rows are the pairs that are kept"
        computed_TE += dense(found_TK * is_mine_TK, ids_TK)
    torch.testing.assert_close(computed_TE, scores_TE * kept_TE)


def test_loads_are_carried_from_step_to_step_where_a_policy_asks() -> None:
    layer, step = layer_of("qwen"), step_of(16)
    spec = {"name": "load_only", "carry_loads": True}
    router, loads = StepRouter(make_policy(spec), [layer], 1, "cpu"), []
    for seed in range(3):
        logits_TE = logits(16, seed)
        weights_TK, ids_TK = routed_by_vllm("qwen", logits_TE)
        router.route(0, layer.choice(logits_TE, ids_TK), weights_TK, ids_TK, step)
        loads.append(router.router.loads["qwen"].clone())
    assert [float(load_E.sum()) for load_E in loads] == [64, 128, 192]
    assert float(loads[-1].max() - loads[-1].min()) <= 1  # 192 pairs on 16 experts


# ---- the hooks -------------------------------------------------------------------------------------------------------


@pytest.fixture
def vllm_of(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """A stand-in for a release of vLLM with all hooks but some."""

    def make(version: str, *missing: str) -> None:
        modules: dict[str, Any] = {"vllm": ModuleType("vllm")}
        for module, name in plugin.HOOKS:
            owner = modules.setdefault(module, ModuleType(module))
            *path, last = name.split(".")
            for part in path:
                owner.__dict__.setdefault(part, type(part, (), {}))
                owner = owner.__dict__[part]
            if name not in missing:
                setattr(owner, last, len)
        modules["vllm"].__version__ = version
        for module, owner in modules.items():
            monkeypatch.setitem(sys.modules, module, owner)

    return make


def test_a_release_that_lacks_a_hook_is_refused_by_its_name(vllm_of: Callable[..., None]) -> None:
    vllm_of("0.34.0", "Worker.execute_model")
    told = refusal(plugin.check_hooks)
    assert told.startswith(
        "vllm 0.34.0: expected vllm.v1.worker.gpu_worker.Worker.execute_model, which the plugin needs"
    )


@pytest.mark.parametrize(("version", "num_warnings"), [("0.32.0", 0), ("0.33.0", 1)])
def test_a_release_in_which_the_plugin_was_not_run_is_warned_of(
    version: str, num_warnings: int, vllm_of: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    vllm_of(version)
    plugin.check_hooks()
    assert len(caplog.records) == num_warnings
    assert all(f"vllm {version} has the plugin's hooks" in record.message for record in caplog.records)


# ---- what kernels do with a dropped pair ----------------------------------------------------------------------------


def kernels(
    name: str = backends._TRITON, exchange: str = backends._NO_EXCHANGE, rank: int | None = 0, **facts: Any
) -> Any:
    """A stand-in for vLLM's runner of a layer with 8 experts on 2 ranks; ``rank`` None = all on one."""

    def thing(path: str, **values: Any) -> Any:
        module, _, kind = path.rpartition(".")
        return type(kind, (), {"__module__": module, **values})()

    facts = {
        "quant_dtype": None,
        "a2_scale": None,
        "block_shape": None,
        "per_act_token_quant": False,
        "quantization_emulation": False,
    } | facts
    map_E = None if rank is None else torch.where(torch.arange(8) // 4 == rank, torch.arange(8) % 4, -1)
    kernel = SimpleNamespace(fused_experts=thing(name, **facts), prepare_finalize=thing(exchange))
    method = SimpleNamespace(moe_kernel=kernel if name else None)
    return SimpleNamespace(routed_experts=SimpleNamespace(quant_method=method, expert_map=map_E))


@pytest.mark.parametrize(
    ("told", "device", "expected", "elsewhere"),
    [
        ({}, "cuda", "TritonExperts skips the rows of dropped pairs", 4),
        ({"rank": 1}, "cuda", "TritonExperts skips the rows of dropped pairs", 0),
        ({"rank": None}, "cuda", "TritonExperts computes every slot (one rank holds all experts)", None),
        ({"lora": True}, "cuda", "TritonExperts computes every slot (LoRA)", None),
        ({"quant_dtype": torch.int8}, "cuda", "computes every slot (a dynamic scale per tensor)", None),
        ({"quant_dtype": torch.int8, "per_act_token_quant": True}, "cuda", "skips", 4),
        ({"quant_dtype": torch.int8, "a2_scale": 1.0}, "cuda", "skips", 4),
        ({"quant_dtype": torch.int8, "block_shape": [128, 128]}, "cuda", "skips", 4),
        ({"name": "vllm.cutlass_moe.CutlassExperts"}, "cuda", "CutlassExperts: unknown whether dropped", None),
        ({"exchange": "vllm.deepep_ht.DeepEPHTPrepareAndFinalize"}, "cuda", "unknown whether dropped", None),
        ({"name": ""}, "cuda", "unknown whether dropped pairs are computed (no modular kernel)", None),
        ({"name": "vllm.cpu_moe.CPUExperts"}, "cpu", "CPUExperts computes every slot: dropping saves no time", None),
    ],
)
def test_a_drop_saves_its_row_only_where_the_kernel_is_known_to_skip_it(
    told: dict[str, Any], device: str, expected: str, elsewhere: int | None
) -> None:
    config = SimpleNamespace(device_config=SimpleNamespace(device_type=device), lora_config=told.pop("lora", None))
    backend = backends.backend_of(kernels(**told), config)
    assert expected in str(backend)
    assert backend.elsewhere == elsewhere
    assert (backend.does == "skips") == (elsewhere is not None)


# ---- the operations --------------------------------------------------------------------------------------------------


@pytest.fixture
def session(monkeypatch: pytest.MonkeyPatch) -> plugin.Session:
    layer = layer_of("qwen")
    session = plugin.Session(Settings(policy=make_policy({"name": "pruned", "k0": 1})))
    session.layers, session.indices = [layer], {5: 0}
    session.step_router = StepRouter(session.asked.policy, [layer], 1, "cpu", ("prefill",))
    monkeypatch.setattr(plugin, "_session", session)
    return session


def test_compiled_code_calls_the_policy_as_one_operation(session: plugin.Session) -> None:
    plugin.define_operations()
    logits_TE = logits()
    weights_TK, ids_TK = routed_by_vllm("qwen", logits_TE)
    compiled = torch.compile(
        lambda *tensors: torch.ops.moe_ep_bench.route(*tensors, 5), backend="aot_eager", fullgraph=True
    )
    warm_TK, _ = compiled(logits_TE * torch.nan, weights_TK, ids_TK)
    assert torch.equal(warm_TK, weights_TK)  # warm-up is no request's
    session.step = SimpleNamespace(scheduled=SimpleNamespace(total_num_scheduled_tokens=60), step=step_of(60))
    found_TK, found_ids_TK = compiled(logits_TE, weights_TK, ids_TK)
    of_view = torch.ops.moe_ep_bench.route(padded_rows(logits_TE), weights_TK, ids_TK, 5)
    assert torch.equal(of_view[0], found_TK)
    assert torch.equal(of_view[1], found_ids_TK)
    assert (found_TK[:60] > 0).sum(dim=1).unique().tolist() == [1]
    assert torch.equal(found_TK[60:], weights_TK[60:])  # what fills up a batch
    assert session.num_routed == 2


def test_a_layers_outputs_are_written_where_they_were_asked_for(session: plugin.Session) -> None:
    """With a shared expert and without; narrower than the layer's input where the kernel is."""
    plugin.define_operations()
    shared = lambda hidden, logits, shared, ids: (hidden * 3, hidden[:, :4] * 2)  # noqa: E731
    session.runners = [
        SimpleNamespace(_forward_impl=shared),
        SimpleNamespace(_forward_impl=lambda hidden, *_: hidden + 1),
    ]
    hidden, routed, other = torch.rand(5, 6), torch.full((5, 4), torch.nan), torch.full((5, 6), torch.nan)
    places = routed.data_ptr(), other.data_ptr()
    torch.ops.moe_ep_bench.moe(hidden, hidden, hidden, None, routed, other, 0)
    assert torch.equal(routed, hidden[:, :4] * 2)
    assert torch.equal(other, hidden * 3)
    torch.ops.moe_ep_bench.moe(hidden, hidden, None, None, other, None, 1)
    assert torch.equal(other, hidden + 1)
    assert (routed.data_ptr(), other.data_ptr()) == places


def test_a_step_in_which_a_layer_was_passed_by_ends_the_server(session: plugin.Session) -> None:
    scheduled = SimpleNamespace(total_num_scheduled_tokens=3, finished_req_ids=set())
    with pytest.raises(RuntimeError, match="0 of 1 MoE layers routed through the plugin"):
        plugin._execute_model(lambda worker, scheduled: "answer", None, scheduled)
    idle = SimpleNamespace(total_num_scheduled_tokens=0)
    assert plugin._execute_model(lambda worker, scheduled: "nothing", None, idle) == "nothing"
    assert session.step is None


def test_tokens_follow_the_runners_order_of_requests() -> None:
    batch = SimpleNamespace(
        req_ids=["b", "a"], num_computed_tokens_cpu=np.array([7, 0, 9]), num_prompt_tokens=np.array([8, 3, 9])
    )
    worker = SimpleNamespace(model_runner=SimpleNamespace(input_batch=batch), device="cpu")
    scheduled = SimpleNamespace(num_scheduled_tokens={"a": 3, "b": 2})
    names, request_T, position_T, is_prompt_T = plugin._Computed(worker, scheduled).tokens
    assert [names[request] for request in request_T] == ["b", "b", "a", "a", "a"]
    assert position_T.tolist() == [7, 8, 0, 1, 2]
    assert is_prompt_T.tolist() == [True, False, True, True, True]


# ---- recordings ------------------------------------------------------------------------------------------------------


class Played:
    """Steps of made-up requests, as a server computes them, and what was recorded of them."""

    def __init__(self, folder: Path, **options: Any) -> None:
        self.said: list[tuple[int, str]] = []
        self.random, self.tokens = torch.Generator().manual_seed(0), []
        self.layers = [moe_layer("toy", number, 0, EXPERTS, TOP_K) for number in (1, 3)]
        facts = {"model": "toy", "source": "test"}
        told = facts, ["toys"], options.pop("most_bytes", 2**30), lambda *line: self.said.append(line)
        self.recorder = Recorder(folder, self.layers, *told, **{"clock": iter(range(100, 10**6, 2)).__next__} | options)

    def step(self, *pieces: tuple[str, int, int, bool]) -> None:
        """Compute pieces (request, first position, tokens, whether they are a prompt's)."""
        names = [name for name, *_ in pieces]
        request_T = np.arange(len(pieces)).repeat([count for *_, count, _ in pieces])
        position_T = np.concatenate([np.arange(first, first + count) for _, first, count, _ in pieces])
        is_prompt_T = np.concatenate([np.full(count, is_prompt) for *_, count, is_prompt in pieces])
        layers = []
        for place in range(2):
            logits_TE = torch.randn(len(request_T), EXPERTS, generator=self.random)
            ids_TK = logits_TE.topk(TOP_K, dim=1).indices
            self.recorder.add(place, logits_TE, ids_TK.int())
            layers.append((logits_TE.softmax(dim=1).numpy(), ids_TK.numpy()))
        self.tokens += [
            (names[request], int(position), bool(is_prompt), [(full[token], ids[token]) for full, ids in layers])
            for token, (request, position, is_prompt) in enumerate(zip(request_T, position_T, is_prompt_T, strict=True))
        ]
        self.recorder.end_step(names, request_T, position_T, is_prompt_T)


COUNTED = (("prefill", 12), ("decode", 3))


@pytest.mark.parametrize("part_bytes", [2**26, 1], ids=["one part", "a part a step"])
def test_interleaved_requests_are_sorted_by_request_position_and_stage(tmp_path: Path, part_bytes: int) -> None:
    played = Played(tmp_path, part_bytes=part_bytes)
    played.step(("a", 0, 5, True), ("b", 0, 3, True))
    played.step(("b", 3, 1, False), ("a", 5, 4, True))  # a prompt in chunks
    played.step(("a", 9, 1, False), ("b", 4, 1, False))
    assert (tmp_path / UNFINISHED).exists()
    played.recorder.close()
    for stage, expected in (("prefill", [("a", 9), ("b", 3)]), ("decode", [("a", 1), ("b", 2)])):
        trace = open_trace(tmp_path / f"{stage}.safetensors")
        kept = sorted(
            (entry for entry in played.tokens if entry[2] == (stage == "prefill")), key=lambda entry: entry[:2]
        )
        assert len(trace.parts) == (1 if part_bytes > 1 else 2)
        assert np.diff(trace.start_S).tolist() == [count for _, count in expected]
        assert trace.metadata["phase"] == stage
        assert trace.metadata["source_layers"] == "1,3"
        for layer in range(2):
            np.testing.assert_allclose(trace.read_full_scores(layer), [entry[3][layer][0] for entry in kept], rtol=1e-6)
            np.testing.assert_array_equal(trace.read_layer(layer)[0], [entry[3][layer][1] for entry in kept])
    parts = 1 if part_bytes > 1 else 2
    written = [f"wrote {tmp_path}/{stage}.safetensors: {count} tokens in {parts} parts" for stage, count in COUNTED]
    assert [line for _, line in played.said] == written
    assert sorted(path.name for path in tmp_path.iterdir()) == ["decode.safetensors", "prefill.safetensors"]


def test_a_part_is_written_when_its_time_is_over_and_nobody_asks(tmp_path: Path) -> None:
    played = Played(tmp_path, part_s=0.05)
    played.step(("a", 0, 5, True))
    deadline = time.monotonic() + 20
    while not (path := tmp_path / "prefill.safetensors" / "00000.safetensors").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert open_trace(path).num_tokens == 5
    assert "the recorder goes on, or was killed" in trace_info(tmp_path / "prefill.safetensors")
    played.recorder.close()
    assert "the recorder goes on" not in trace_info(tmp_path / "prefill.safetensors")


def test_what_is_computed_again_counts_once(tmp_path: Path) -> None:
    for part_bytes in (2**26, 1):
        folder = tmp_path / str(part_bytes)
        folder.mkdir()
        played = Played(folder, part_bytes=part_bytes)
        played.step(("a", 0, 5, True))
        played.step(("a", 2, 4, True))  # set back to position 2
        played.recorder.close()
        trace = open_trace(folder / "prefill.safetensors")
        assert trace.num_tokens == 6
        assert trace.metadata["note"] == "toys; 3 tokens that came again left out"
        np.testing.assert_array_equal(
            trace.read_layer(0)[0], [entry[3][0][1] for entry in played.tokens[:5] + played.tokens[-1:]]
        )


def test_prefixes_that_the_cache_answered_are_named(tmp_path: Path) -> None:
    played = Played(tmp_path, part_bytes=1)
    played.step(("a", 0, 5, True), ("b", 16, 2, True))
    played.step(("c", 32, 1, True))
    played.recorder.close()
    note = open_trace(tmp_path / "prefill.safetensors").metadata["note"]
    assert note == "toys; the prefix cache answered the first 48 tokens of 2 prompts"


def test_a_name_that_comes_again_is_another_request(tmp_path: Path) -> None:
    played = Played(tmp_path)
    played.step(("a", 0, 5, True))
    played.recorder.forget(["a", "b"])
    played.step(("a", 0, 3, True))
    played.recorder.close()
    assert np.diff(open_trace(tmp_path / "prefill.safetensors").start_S).tolist() == [5, 3]


@pytest.mark.parametrize("part_bytes", [2**26, 1], ids=["one part", "a part a step"])
def test_a_request_has_the_time_of_the_first_step_that_served_it(tmp_path: Path, part_bytes: int) -> None:
    played = Played(tmp_path, part_bytes=part_bytes)
    played.step(("b", 0, 5, True))
    played.step(("a", 0, 3, True), ("b", 5, 1, False))
    played.recorder.forget(["b"])
    played.step(("b", 0, 2, True), ("a", 3, 1, False))
    played.recorder.close()
    arrivals = {stage: open_trace(tmp_path / f"{stage}.safetensors").arrival_S for stage in ("prefill", "decode")}
    assert arrivals["prefill"].tolist() == [2, 4, 6], "of b, a and the later b, from the recorder's beginning"
    assert arrivals["decode"].tolist() == [2, 4], "prompt and generated tokens of a request came with it"


def test_requests_stand_in_the_order_in_which_they_came_to_the_server(tmp_path: Path) -> None:
    played = Played(tmp_path, part_bytes=1)
    played.recorder.arrive({"late": 101.5, "early": 100.5})
    played.step(("late", 0, 2, True))
    played.step(("early", 0, 3, True), ("unknown", 0, 1, True))
    played.recorder.close()
    trace = open_trace(tmp_path / "prefill.safetensors")
    assert trace.arrival_S.tolist() == [0.5, 1.5, 4]
    assert np.diff(trace.start_S).tolist() == [3, 2, 1]


def test_steps_wait_for_the_disk_when_the_memory_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    most_held, write = [], Recorder._write

    def slow(recorder: Recorder, *args: Any) -> None:
        most_held.append(recorder._num_held())
        time.sleep(0.01)
        write(recorder, *args)

    monkeypatch.setattr(Recorder, "_write", slow)
    played = Played(tmp_path, most_bytes=4000, part_bytes=1000)
    for position in range(0, 160, 8):
        played.step(("a", position, 8, True))  # 1,280 bytes
    played.recorder.close()
    trace = open_trace(tmp_path / "prefill.safetensors")
    assert (trace.num_tokens, len(trace.parts)) == (160, 20)
    assert max(most_held) <= 4000 + 1280
    assert [level for level, _ in played.said] == [logging.WARNING, logging.INFO], "the waiting is said once"


@pytest.mark.parametrize("problem", [OSError(28, "No space left on device"), KeyError("a defect")])
def test_a_disk_that_is_full_ends_the_recording_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, problem: Exception
) -> None:
    played = Played(tmp_path, part_bytes=1)
    played.step(("a", 0, 8, True))
    while not played.recorder._num_parts["prefill"] or played.recorder._full:
        time.sleep(0.01)
    monkeypatch.setattr(Recorder, "_write", mock.Mock(side_effect=problem))
    for position in range(8, 80, 8):
        played.step(("a", position, 8, True))
    played.recorder.close()
    assert played.said == [(logging.ERROR, f"recording ended, its last part is lost, serving goes on: {problem}")]
    assert open_trace(tmp_path / "prefill.safetensors").num_tokens == 8
    assert (tmp_path / UNFINISHED).exists()


def test_a_disk_with_little_room_is_not_filled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    played = Played(tmp_path)
    monkeypatch.setattr(recording, "LEAST_FREE_BYTES", 2**80)
    played.step(("a", 0, 8, True))
    played.recorder.close()
    ((level, line),) = played.said
    assert level == logging.ERROR
    assert "expected a disk with 1 GiB free" in line


def test_a_contradiction_names_the_layer_and_its_row(tmp_path: Path) -> None:
    played = Played(tmp_path)
    logits_TE = torch.randn(3, EXPERTS, generator=torch.Generator().manual_seed(1))
    ids_TK = logits_TE.topk(TOP_K, dim=1).indices
    wrong_TK = torch.where(torch.tensor([[False], [True], [False]]), (-logits_TE).topk(TOP_K, dim=1).indices, ids_TK)
    played.layers[1] = moe_layer("second", 3, 0, EXPERTS, TOP_K)
    played.recorder.add(0, logits_TE, ids_TK)
    played.recorder.add(1, logits_TE, wrong_TK)
    told = refusal(played.recorder.end_step, ["a"], np.zeros(3, np.int64), np.arange(3), np.ones(3, bool))
    assert "second: ids_TK: expected the 4 best experts" in told
    assert "of token 1" in told


def test_requests_are_told_when_they_came(monkeypatch: pytest.MonkeyPatch) -> None:
    class NewRequestData:
        @classmethod
        def from_request(cls, request: Any, block_ids: int) -> Any:
            return SimpleNamespace(req_id=request.request_id, block_ids=block_ids)

    plugin._wrap(NewRequestData, "from_request", plugin._from_request)
    request = SimpleNamespace(request_id="a", arrival_time=12.5)
    monkeypatch.setattr(plugin, "_session", plugin.Session())
    assert not hasattr(NewRequestData.from_request(request, block_ids=3), plugin._ARRIVAL)
    monkeypatch.setattr(plugin, "_session", plugin.Session(Settings(directory=Path("x"))))
    new = NewRequestData.from_request(request, block_ids=3)
    assert (getattr(new, plugin._ARRIVAL), new.block_ids) == (12.5, 3)


def test_a_server_that_ended_ahead_of_its_recorder_says_what_is_lost(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    plugin._say_unfinished(tmp_path)
    assert not caplog.records
    (tmp_path / UNFINISHED).touch()
    plugin._say_unfinished(tmp_path)
    assert caplog.records[0].levelname == "ERROR"
    assert "the last part of" in caplog.text


# ---- what is refused -------------------------------------------------------------------------------------------------


def test_settings_come_from_the_variables(tmp_path: Path) -> None:
    assert settings({}) is None
    spec = json.dumps({"name": "oea", "k0": 3, "acts_in": ["prefill", "decode"]})
    session = settings({POLICY: spec, RECORD: str(tmp_path / "r"), LIMIT: "0.5"})
    assert session.policy == make_policy({"name": "oea", "k0": 3})
    assert session.acts_in == ("prefill", "decode")
    assert (session.directory, session.most_bytes) == (tmp_path / "r", 2**29)
    assert settings({POLICY: '{"name": "oea", "k0": 3}'}).acts_in == ("decode",)
    assert settings({RECORD: "r", LIMIT: ""}).most_bytes == 2**32, "an empty variable says nothing"


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({POLICY: "{"}, f"{POLICY}: expected JSON"),
        ({POLICY: '{"name": "topk", "acts_in": "decode"}'}, f"{POLICY}: acts_in: expected a list"),
        ({POLICY: "policy.yaml"}, f"{POLICY}: expected JSON"),
        ({POLICY: "3"}, f"{POLICY}: expected a policy's name and fields, got 3"),
        ({POLICY: '{"name": "topk", "name": "oea"}'}, f"{POLICY}: expected JSON"),
        ({POLICY: '{"name": "topk", "acts_in": ["decode", "decode"]}'}, f"{POLICY}: acts_in: expected a list"),
        ({POLICY: '{"name": "topk", "acts_in": ["decode", []]}'}, f"{POLICY}: acts_in: expected a list"),
        ({RECORD: "r", LIMIT: "nan"}, f"{LIMIT}: expected more than 0, got nan"),
        ({RECORD: "r", LIMIT: "much"}, f"{LIMIT}: could not convert string to float: 'much'"),
    ],
)
def test_settings_that_say_nothing_useful_are_one_line(variables: dict[str, str], expected: str) -> None:
    assert refusal(settings, variables).startswith(expected)


def config_of(**changes: Any) -> Any:
    """A server's configuration as vLLM has it, as far as the plugin asks."""
    parallel = {
        "pipeline_parallel_size": 1,
        "tensor_parallel_size": 4,
        "data_parallel_size": 1,
        "prefill_context_parallel_size": 1,
        "enable_expert_parallel": True,
        "enable_eplb": False,
        "use_ubatching": False,
        "use_sequence_parallel_moe": False,
    }
    top = {"use_v2_model_runner": False, "speculative_config": None}
    graphs, device, text = "NONE", "cuda", {"num_experts_per_tok": TOP_K}
    parallel |= {key: value for key, value in changes.items() if key in parallel}
    top |= {key: value for key, value in changes.items() if key in top}
    experts = changes.get("num_experts", EXPERTS)
    return SimpleNamespace(
        **top,
        parallel_config=SimpleNamespace(**parallel),
        model_config=SimpleNamespace(
            model="m", get_num_experts=lambda: experts, hf_text_config=SimpleNamespace(**text)
        ),
        compilation_config=SimpleNamespace(
            cudagraph_mode=SimpleNamespace(name=changes.get("graphs", graphs)),
            splitting_ops=changes.get("splitting_ops", ["vllm::unified_attention_with_output"]),
            use_inductor_graph_partition=changes.get("use_inductor_graph_partition", False),
        ),
        device_config=SimpleNamespace(device_type=device),
    )


@pytest.mark.parametrize(
    ("policy", "changes", "expected"),
    [
        ("topk", {"use_v2_model_runner": True}, "set VLLM_USE_V2_MODEL_RUNNER=0"),
        ("topk", {"graphs": "FULL_AND_PIECEWISE"}, "start with -cc.cudagraph_mode=PIECEWISE (or NONE)"),
        ("topk", {"graphs": "FULL"}, "start with -cc.cudagraph_mode=PIECEWISE (or NONE)"),
        ("topk", {"graphs": "PIECEWISE", "splitting_ops": []}, "graphs are not split at operations"),
        ("topk", {"graphs": "PIECEWISE", "use_inductor_graph_partition": True}, "graphs are not split at operations"),
        ("topk", {"graphs": "PIECEWISE"}, ""),
        ("topk", {"speculative_config": 1}, "speculative decoding"),
        ("topk", {"pipeline_parallel_size": 2}, "pipeline stage"),
        ("topk", {"use_ubatching": True}, "--enable-dbo"),
        ("topk", {"use_sequence_parallel_moe": True}, "a part of a step's tokens"),
        ("topk", {"prefill_context_parallel_size": 2}, "a part of a prompt"),
        ("topk", {"enable_eplb": True}, "--enable-eplb"),
        ("topk", {"num_experts": 0}, "expected a mixture of experts"),
        ("topk", {"tensor_parallel_size": 3}, "num_ranks: expected a divisor of the 16 experts"),
        ("topk", {"data_parallel_size": 2}, "ranks see their own tokens alone"),
        ('{"name": "expanded_drop", "capacity_factor": 1, "num_candidates": 2}', {}, "may give a token 6 experts"),
        ('{"name": "expanded_drop", "capacity_factor": 1, "max_experts_per_token": 4}', {}, ""),
        ('{"name": "token_drop", "capacity_factor": 1, "modality": "image_first"}', {}, "modality"),
        ('{"name": "lynx", "num_dropped": 40}', {}, "num_dropped"),
        ('{"name": "token_drop", "capacity_factor": {"0": 1.0, "1": 1.5}}', {}, ""),
        ("topk", {}, ""),
    ],
)
def test_what_cannot_be_honoured_is_refused_in_one_line(policy: str, changes: dict[str, Any], expected: str) -> None:
    session = settings({POLICY: policy if policy[0] == "{" else json.dumps({"name": policy})})
    if expected:
        assert expected in refusal(check_config, config_of(**changes), session)
    else:
        check_config(config_of(**changes), session)


def test_a_folder_with_recordings_is_refused(tmp_path: Path) -> None:
    (tmp_path / "prefill.safetensors").mkdir()
    assert "expected a folder without" in refusal(check_config, config_of(), settings({RECORD: str(tmp_path)}))


def test_a_folder_is_tried_before_the_engine_starts(tmp_path: Path) -> None:
    check_config(config_of(), settings({RECORD: str(tmp_path / "new" / "one")}))
    assert (tmp_path / "new" / "one").is_dir()
    (tmp_path / "file").touch()
    for folder in (tmp_path / "file", tmp_path / "file" / "below", Path("/proc/below")):
        told = refusal(check_config, config_of(), settings({RECORD: str(folder)}))
        assert told.startswith(f"{RECORD} {folder}: "), told


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        ({"custom_routing_function": len}, "a routing function of the model's own (custom_routing_function)"),
        ({"zero_expert_type": "identity"}, "experts that compute nothing"),
        ({"hash_indices_table": torch.zeros(1)}, "experts by token id"),
        ({"num_fused_shared_experts": 1}, "shared experts fused"),
        ({"scoring_func": "sqrtsoftplus"}, "scoring_func: expected softmax or sigmoid"),
    ],
)
def test_a_router_whose_scores_no_policy_knows_is_refused(facts: dict[str, Any], expected: str) -> None:
    build = lambda: moe_layer("layer", 0, 0, num_experts=EXPERTS, top_k=TOP_K, **facts)  # noqa: E731
    assert expected in refusal(build)
