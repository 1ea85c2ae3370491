"""A policy inside language models of transformers: what is said of their routers, and what their experts compute."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable
from typing import Any
from unittest import mock

import hf_models
import pytest
import test_families
import torch
from hf_models import FAMILIES, IMPLEMENTATIONS, tiny, tokens
from torch import Tensor

from moe_ep_bench.errors import UserError
from moe_ep_bench.policies import make_policy
from moe_ep_bench.quality.checkpoint import find_moe_layers
from moe_ep_bench.quality.routed import _CACHES, ForwardPass, RouterCall, impossible, routed

# Every family, and every implementation of the experts: GPT-OSS's experts are code of their own.
OTHERS = [*(("gpt_oss", kind) for kind in IMPLEMENTATIONS[::2]), ("mixtral", "eager")]
MODELS = [*((family, "grouped_mm") for family in FAMILIES), *OTHERS]
TOPK = make_policy({"name": "topk"})
DROP = make_policy({"name": "token_drop", "capacity_factor": 0.5})


def logits(model: Any, ids_BS: Tensor, policy: Any = None, **arguments: Any) -> Tensor:
    """A model's answer; ``arguments`` that the model knows go to it, others to ``routed``."""
    mask = arguments.pop("attention_mask", None)
    with torch.inference_mode(), routed(model, policy, **arguments):
        return model(ids_BS, attention_mask=mask, use_cache=False).logits


def unpatched(model: Any, ids_BS: Tensor, **arguments: Any) -> Tensor:
    with torch.inference_mode():
        return model(ids_BS, use_cache=False, **arguments).logits


def looked_at(model: Any, ids_BS: Tensor, policy: Any = None, **arguments: Any) -> list[RouterCall]:
    seen: list[RouterCall] = []
    logits(model, ids_BS, policy, observe=seen.append, **arguments)
    return seen


# --- What is said of the routers -----------------------------------------------------------------


@pytest.mark.parametrize(("family", "experts"), OTHERS)
def test_topk_is_the_unpatched_model_bit_for_bit(family: str, experts: str) -> None:
    model, ids_BS = tiny(family, experts), tokens(3, 16)
    expected = unpatched(model, ids_BS)
    assert torch.equal(logits(model, ids_BS, TOPK, num_ranks=2), expected)
    assert torch.equal(unpatched(model, ids_BS), expected), "the patch stays behind"


def assert_says_what_routers_choose(model: Any, ids_BS: Tensor) -> None:
    """Ids and weights of every router follow from what is said of it: scores, groups, bias, scale, normalisation."""
    own: dict[str, tuple[Tensor, Tensor]] = {}
    hooks = [
        layer.router.register_forward_hook(lambda _, __, output, name=layer.name: own.update({name: output[1:]}))
        for layer in find_moe_layers(model)
    ]
    seen = looked_at(model, ids_BS, TOPK)
    for hook in hooks:
        hook.remove()
    assert {one.layer.name for one in seen} == set(own)
    for one in seen:
        weights_TK, ids_TK = own[one.layer.name]
        assert one.routing is not None
        assert torch.equal(one.routing.map_TE, one.own_TE)
        torch.testing.assert_close(one.routing.weights_TE.gather(1, ids_TK), weights_TK.float(), rtol=1e-5, atol=1e-7)


@functools.cache
def of_family(family: str) -> Any:
    """A model of one of the families that configs are read of."""
    config = test_families.config_of(family)
    config.pad_token_id = 0
    if getattr(config, "kv_lora_rank", None):
        config.num_key_value_heads = config.num_attention_heads
    return hf_models.build(config)


# Language models inside of others, which transformers builds with these alone.
INSIDE = {
    "deepseek_ocr2_text",
    "glm4v_moe_text",
    "glm5_next_text",
    "qwen3_omni_moe_text",
    "qwen3_vl_moe_text",
    "step3p5",
}
SCALED = {"gemma4_text"}  # by expert, as no policy is


@pytest.mark.slow
@pytest.mark.parametrize("family", sorted({*test_families.FAMILIES, *FAMILIES} - INSIDE - SCALED))
def test_every_family_whose_config_is_read_is_routed_as_its_own_router_routes(family: str) -> None:
    model, ids_BS = tiny(family) if family in FAMILIES else of_family(family), tokens(3, 16)
    assert_says_what_routers_choose(model, ids_BS)
    assert torch.equal(logits(model, ids_BS, TOPK, num_ranks=2), unpatched(model, ids_BS))
    assert not torch.equal(logits(model, ids_BS, DROP, num_ranks=2), unpatched(model, ids_BS))


def test_layers_know_their_place_and_a_policy_that_does_not_fit_them_is_refused() -> None:
    assert [layer.fraction for layer in find_moe_layers(tiny("mixtral"))] == [0, 0.5]
    with pytest.raises(ValueError, match="num_ranks: expected a divisor of the 8 experts"):
        logits(tiny("mixtral"), tokens(2, 4), DROP, num_ranks=3)


def test_groups_that_no_policy_can_follow_are_refused() -> None:
    model = tiny("deepseek_v3", num_experts_per_tok=2, topk_group=2)
    with pytest.raises(ValueError, match=r"top_k \(2\) over topk_group \(2\) to be 2, by which deepseek_v3"):
        find_moe_layers(model)


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])
def test_scores_that_tie_in_bfloat16_keep_the_models_choice(family: str) -> None:
    model, ids_BS = tiny(family, dtype=torch.bfloat16), tokens(8, 64)
    for layer in find_moe_layers(model):
        layer.router.weight.copy_((layer.router.weight * 8).round() / 8 * 0.25)  # coarse, so that many scores tie
    seen = looked_at(model, ids_BS, TOPK)
    kth_T = [one.scores_TE.sort(dim=1, descending=True).values for one in seen]
    assert any((s[:, k - 1] - s[:, k] < 1e-6).any() for s, k in zip(kth_T, [o.layer.top_k for o in seen], strict=True))
    assert all(one.routing is not None and torch.equal(one.routing.map_TE, one.own_TE) for one in seen)
    assert torch.equal(logits(model, ids_BS, TOPK), unpatched(model, ids_BS))


def test_a_choice_that_no_policy_makes_is_an_error() -> None:
    layer = find_moe_layers(tiny("mixtral"))[0]
    scores_TE = torch.rand(5, layer.num_experts, generator=torch.Generator().manual_seed(0))
    best_TE, worst_TE = (
        torch.zeros_like(scores_TE, dtype=torch.bool).scatter(1, (sign * scores_TE).topk(layer.top_k).indices, True)
        for sign in (1, -1)
    )
    fewer = make_policy({"name": "pruned", "k0": 1})
    more = make_policy({"name": "expanded_drop", "capacity_factor": 2, "num_candidates": 2})
    assert impossible(TOPK, layer, scores_TE, best_TE, best_TE) is None
    assert "topk changed the choice of 5 tokens" in impossible(TOPK, layer, scores_TE, best_TE, worst_TE)
    assert impossible(fewer, layer, scores_TE, best_TE, worst_TE) is None
    assert "of the top-k's mass kept, expected at most 1" in impossible(fewer, layer, scores_TE, worst_TE, best_TE)
    assert impossible(more, layer, scores_TE, worst_TE, best_TE) is None, "it may give a token more experts"


def test_a_model_without_routers_or_of_no_known_family_is_refused_in_a_line() -> None:
    with pytest.raises(ValueError, match=r"LlamaForCausalLM: expected routers .* got none"):
        find_moe_layers(hf_models.dense())
    mixtral = tiny("mixtral")
    unknown = pytest.raises(ValueError, match="MixtralForCausalLM: model_type 'mixtral': no family that is known")
    with mock.patch("moe_ep_bench.models.hf_config.families", return_value={}), unknown:
        find_moe_layers(mixtral)


# --- What the experts compute --------------------------------------------------------------------


def _count(whole: Callable[[Tensor], Tensor], rows: list[int], x_ND: Tensor) -> Tensor:
    rows.append(len(x_ND))
    return whole(x_ND)


def computed(model: Any, run: Callable[[], object]) -> dict[str, list[int]]:
    """Rows of every call of the experts' activation, by layer: no routing table can hide there what is computed."""
    rows: dict[str, list[int]] = {}
    with contextlib.ExitStack() as stack:
        for layer in find_moe_layers(model):
            experts: Any = layer.experts
            owner, name = (
                (experts, "_apply_gate")
                if type(layer.router).__name__ == "GptOssTopKRouter"
                else (experts.act_fn, "forward")
            )
            rows[layer.name] = []

            counted = functools.partial(_count, getattr(owner, name), rows[layer.name])
            stack.enter_context(mock.patch.object(owner, name, counted))
        run()
    return rows


@pytest.mark.parametrize(("family", "experts"), MODELS)
def test_a_dropped_pair_is_not_computed(family: str, experts: str) -> None:
    model, ids_BS = tiny(family, experts), tokens(2, 16)
    seen = looked_at(model, ids_BS, DROP)
    rows = computed(model, lambda: logits(model, ids_BS, DROP))
    whole = computed(model, lambda: unpatched(model, ids_BS))
    for one in seen:
        assert one.routing is not None
        assert sum(rows[one.layer.name]) == int(one.routing.map_TE.sum()) < sum(whole[one.layer.name])
        if experts == "eager":  # one call for each expert that has tokens, in their order
            load_E = one.routing.map_TE.sum(0)
            assert rows[one.layer.name] == load_E[load_E > 0].tolist()


def reference(one: RouterCall, hidden_TD: Tensor) -> Tensor:
    """The weighted sum of the selected experts, each called alone for one token."""
    assert one.routing is not None
    sum_TD = torch.zeros_like(hidden_TD)
    for token, expert in one.routing.map_TE.nonzero().tolist():
        row = one.layer.experts(hidden_TD[token : token + 1], torch.tensor([[expert]]), torch.ones(1, 1))
        sum_TD[token] += one.routing.weights_TE[token, expert] * row[0]
    return sum_TD


@pytest.mark.parametrize(
    "spec",
    [
        {"name": "token_drop", "capacity_factor": 0.3},
        {"name": "token_drop", "capacity_factor": 0},
        {"name": "expanded_drop", "capacity_factor": 8, "num_candidates": 8, "scope": "global"},
        {"name": "oea", "k0": 1, "k_max": 8},
    ],
    ids=str,
)
@pytest.mark.parametrize(
    ("family", "experts"), [("deepseek_v3", "grouped_mm"), ("gpt_oss", "eager"), ("gpt_oss", "batched_mm")]
)
def test_any_number_of_experts_per_token_is_computed_like_one_at_a_time(
    family: str, spec: dict[str, Any], experts: str
) -> None:
    model, ids_BS = tiny(family, experts), tokens(2, 12)
    policy = make_policy(spec)
    inputs: dict[str, tuple[Tensor, Tensor]] = {}
    hooks = [
        layer.experts.register_forward_hook(lambda _, args, output, n=layer.name: inputs.update({n: (args[0], output)}))
        for layer in find_moe_layers(model)
    ]
    seen = looked_at(model, ids_BS, policy, num_ranks=2, acts_in=("prefill",))
    for hook in hooks:
        hook.remove()
    with torch.inference_mode():
        for one in seen:
            hidden_TD, output_TD = inputs[one.layer.name]
            torch.testing.assert_close(output_TD, reference(one, hidden_TD), rtol=1e-4, atol=1e-5)
    counts = torch.cat([one.routing.map_TE.sum(1) for one in seen if one.routing is not None])
    if spec.get("capacity_factor") == 0:
        assert int(counts.max()) == 0
    elif spec["name"] == "token_drop":
        assert int(counts.min()) < seen[0].layer.top_k
    else:
        assert int(counts.max()) > seen[0].layer.top_k


# --- Prefill, decode, padding, ranks -------------------------------------------------------------


def steps(model: Any, ids_BS: Tensor, prompt: int) -> Tensor:
    """Answers of a prompt at once and then token by token, through the cache."""
    name = next(name for name in _CACHES if name in inspect.signature(model.base_model.forward).parameters)
    out = model(ids_BS[:, :prompt], use_cache=True)
    parts, cache = [out.logits], out[name]
    for place in range(prompt, ids_BS.shape[1]):
        out = model(ids_BS[:, place : place + 1], **{name: cache}, use_cache=True)
        parts.append(out.logits)
        cache = out[name]
    return torch.cat(parts, dim=1)


@pytest.mark.parametrize(
    ("spec", "acting"),
    [({"name": "token_drop", "capacity_factor": 0.5}, "prefill"), ({"name": "oea", "k0": 1, "k_max": 2}, "decode")],
)
def test_capacities_act_on_prefill_and_batch_wide_policies_on_decode(spec: dict[str, Any], acting: str) -> None:
    model, ids_BS = tiny("mixtral"), tokens(4, 10)
    for acts_in, expected in ((None, (acting,)), (("prefill", "decode"), ("prefill", "decode"))):
        seen: list[RouterCall] = []
        with torch.inference_mode(), routed(model, make_policy(spec), observe=seen.append, acts_in=acts_in):
            steps(model, ids_BS, 6)
        assert [one.forward_pass.stage for one in seen] == ["prefill"] * 2 + ["decode"] * 2 * 4
        assert all((one.routing is not None) == (one.forward_pass.stage in expected) for one in seen)


def test_one_pass_by_position_answers_what_steps_of_decoding_would() -> None:
    model, ids_BS = tiny("qwen3_moe"), tokens(4, 10)
    policy = make_policy({"name": "xshare", "k0": 1, "budget": 1})
    with torch.inference_mode(), routed(model, policy, acts_in=("prefill", "decode"), num_ranks=2):
        expected = steps(model, ids_BS, 1)
    at_once = logits(model, ids_BS, policy, arrangement="decode", num_ranks=2)
    torch.testing.assert_close(at_once, expected, rtol=1e-3, atol=1e-4)
    assert not torch.allclose(at_once, unpatched(model, ids_BS), atol=1e-2)


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_selects_nothing_and_changes_no_other_tokens_routing(side: str) -> None:
    model, ids_BS = tiny("mixtral"), tokens(3, 8)
    mask_BS = torch.ones(3, 12, dtype=torch.int64)
    padded_BS = torch.zeros(3, 12, dtype=torch.int64)
    valid = slice(4, 12) if side == "left" else slice(0, 8)
    padded_BS[:, valid] = ids_BS
    mask_BS[:] = 0
    mask_BS[:, valid] = 1
    plain = looked_at(model, ids_BS, DROP, num_ranks=2)
    padded = looked_at(model, padded_BS, DROP, num_ranks=2, attention_mask=mask_BS)
    for one, other in zip(plain[:1], padded[:1], strict=True):  # deeper layers see positions, which left padding moves
        assert one.routing is not None
        assert other.routing is not None
        assert torch.equal(other.routing.map_TE[other.forward_pass.valid_T], one.routing.map_TE)
        assert not other.routing.map_TE[~other.forward_pass.valid_T].any()
    expected = unpatched(model, padded_BS, attention_mask=mask_BS)[:, valid]
    answer = logits(model, padded_BS, TOPK, attention_mask=mask_BS)[:, valid]
    torch.testing.assert_close(answer, expected, rtol=1e-4, atol=1e-5)


def test_capacity_is_each_ranks_own() -> None:
    """Two ranks route as two models would that see one rank's sequences each."""
    model, ids_BS = tiny("mixtral"), tokens(4, 16)
    (both, _), *_ = [looked_at(model, ids_BS, DROP, num_ranks=2)]
    assert both.routing is not None
    for rank in (0, 1):
        alone, _ = looked_at(model, ids_BS[rank::2], DROP)
        assert alone.routing is not None
        of_rank_T = both.forward_pass.sequence_T % 2 == rank
        assert torch.equal(both.routing.map_TE[of_rank_T], alone.routing.map_TE)
        capacity = 0.5 * 32 * 2 / 8
        assert int(both.routing.map_TE[of_rank_T].sum(0).max()) <= capacity


def test_batch_wide_statistics_are_of_all_ranks() -> None:
    model, ids_BS = tiny("mixtral"), tokens(8, 1)
    policy = make_policy({"name": "oea", "k0": 1})
    (one, _), (spread, _) = (
        looked_at(model, ids_BS, policy, arrangement="decode", num_ranks=ranks) for ranks in (1, 4)
    )
    assert one.routing is not None
    assert spread.routing is not None
    assert torch.equal(one.routing.map_TE, spread.routing.map_TE)


def test_sequences_are_dealt_to_ranks_by_their_valid_tokens() -> None:
    valid_BS = torch.tensor([[1, 1, 1, 1], [1, 0, 0, 0], [1, 0, 0, 0], [1, 1, 0, 0]], dtype=torch.bool)
    ranks = {
        int(token) // 4: rank
        for rank, token_N in ForwardPass("prefill", valid_BS, False).batches(2)[0]
        for token in token_N
    }
    assert ranks == {0: 0, 1: 1, 2: 1, 3: 1}
    by_position = ForwardPass("decode", valid_BS, True).batches(2)
    assert [sum(len(token_N) for _, token_N in batch) for batch in by_position] == [4, 2, 1, 1]
    assert [int(token) % 4 for rank, token_N in by_position[1] for token in token_N] == [1, 1]


def test_loads_are_carried_from_pass_to_pass_where_a_policy_asks() -> None:
    model, policy, seen = tiny("mixtral"), make_policy({"name": "load_only", "carry_loads": True}), list[RouterCall]()
    with torch.inference_mode(), routed(model, policy, observe=seen.append):
        for seed in range(9):
            model(tokens(1, 3, seed), use_cache=False)
    load_E = torch.stack([one.routing.map_TE for one in seen[::2] if one.routing is not None]).sum(dim=(0, 1))
    assert int(load_E.max() - load_E.min()) <= 1


def test_a_pass_whose_cache_does_not_say_how_much_it_holds_is_refused() -> None:
    ids_BS = tokens(2, 3)

    class Full:
        def get_seq_length(self) -> int:
            return 5

    for name in ("cache", "past_key_values"):  # of transformers from 5.24 on, and before
        for cache, stage in ((None, "prefill"), (Full(), "decode")):
            assert ForwardPass.of({"input_ids": ids_BS, name: cache}, "as_run").stage == stage
    for arguments in ({}, {"cache": ((ids_BS, ids_BS),)}, {"past": Full()}):
        with pytest.raises(UserError, match=r"tells prompts from steps of decoding; got (neither|tuple)$"):
            ForwardPass.of({"input_ids": ids_BS, **arguments}, "as_run")
        assert ForwardPass.of({"input_ids": ids_BS, **arguments}, "decode").stage == "decode"


def test_a_model_that_goes_around_its_experts_is_an_error_and_no_answer() -> None:
    model, ids_BS = tiny("gpt_oss"), tokens(2, 4)
    mlp = model.model.layers[0].mlp

    def fused(hidden_BSD: Tensor) -> tuple[Tensor, None]:
        return hidden_BSD, None

    with (
        mock.patch.object(mlp, "forward", fused),
        pytest.raises(RuntimeError, match=r"without its modules model\.layers\.0\.mlp\.router"),
    ):
        logits(model, ids_BS, DROP)


def test_scores_that_are_no_numbers_are_an_error() -> None:
    model, ids_BS = hf_models.build(tiny("mixtral").config), tokens(2, 4)
    model.model.layers[1].mlp.gate.weight[0, 0] = torch.nan
    with pytest.raises(ValueError, match="scores_TE: expected finite"):
        logits(model, ids_BS, DROP)


def test_generate_goes_through_prefill_and_then_decode_with_padding_left_out() -> None:
    model, ids_BS = tiny("mixtral"), tokens(3, 6)
    mask_BS = torch.ones_like(ids_BS)
    mask_BS[0, :2] = 0
    seen: list[RouterCall] = []
    with routed(model, DROP, observe=seen.append):
        model.generate(ids_BS, attention_mask=mask_BS, max_new_tokens=3, min_new_tokens=3, do_sample=False)
    stages = [one.forward_pass.stage for one in seen[::2]]
    assert stages == ["prefill", "decode", "decode"]
    assert [int(one.forward_pass.valid_T.sum()) for one in seen[::2]] == [16, 3, 3]
    assert [one.routing is not None for one in seen[::2]] == [True, False, False]
