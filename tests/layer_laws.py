"""What must hold of a real expert-parallel layer, as functions that every rank runs together.

Run under torchrun by ``run_laws.py`` once for each number of ranks, because importing
Megatron-Core takes seconds. A law takes a ``Lab`` and raises AssertionError; laws that need a
number of ranks say so.
"""

from __future__ import annotations

import contextlib
import json
import traceback
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from virtual_time import all_in, passing_where_late

from moe_ep_bench.layer import dispatchers, megatron
from moe_ep_bench.layer.build import LayerPair, SingleLayer
from moe_ep_bench.layer.configs import megatron_config
from moe_ep_bench.layer.experts import ROUTED, ExpertWeights, apply_expert, expert_weights, seeded_generator
from moe_ep_bench.layer.host import device_scope
from moe_ep_bench.layer.parts import Parts
from moe_ep_bench.layer.phases import Rendezvous, instrumented
from moe_ep_bench.layer.reference import TOLERANCE, DenseReference
from moe_ep_bench.layer.scores import logits_from_scores, scores_from_logits
from moe_ep_bench.layer.stages import STAGES
from moe_ep_bench.metrics import routing_metrics
from moe_ep_bench.models import ModelSpec, load_model
from moe_ep_bench.policies import Policy, Routing, RoutingContext, make_policy
from moe_ep_bench.policies.selection import top_k_map, weighted
from moe_ep_bench.runtime.ranks import Ranks, join
from moe_ep_bench.schema import LAYER_PHASES, TOTAL, UNACCOUNTED
from moe_ep_bench.timing.timer import Clock, PhaseRecorder, clock_for

LAWS: dict[str, Callable[[Lab], None]] = {}
NEEDS_RANKS: dict[str, tuple[int, ...]] = {}

SEED = 3
POLICIES = [
    {"name": "topk"},
    {"name": "token_drop", "capacity_factor": 0.5},
    {"name": "token_drop", "capacity_factor": 1.0, "metric": "order"},
    {"name": "token_drop", "capacity_factor": 1.0, "metric": "random", "granularity": "device"},
    {"name": "token_drop", "capacity_factor": 0},
    {"name": "expanded_drop", "capacity_factor": 1.5},
    {"name": "expanded_drop", "capacity_factor": 8, "scope": "global", "num_candidates": 64},
    {"name": "expanded_drop", "capacity_factor": 1.0, "granularity": "device", "max_experts_per_token": 3},
    {"name": "megatron_drop", "capacity_factor": 1.0},
    {"name": "pruned", "k0": 2, "p": 0.7},
    {"name": "laser", "eps_high": 0.9, "t_fix": 0.2, "c": 8},
    {"name": "load_only"},
    {"name": "dynamic_skip", "beta": 0.5},
]
# They decide by statistics that are summed over all ranks.
BATCH_WIDE = [
    {"name": "expert_drop", "fraction": 0.6},
    {"name": "lynx", "num_dropped": 3},
    {"name": "oea", "k0": 1},
    {"name": "oea", "k0": 1, "rank_fill": True},
    {"name": "xshare", "k0": 1, "budget": 2},
    {"name": "xshare", "k0": 0, "mass_threshold": 0.6},
    {"name": "xshare", "k0": 1, "scope": "request", "request_budget": 1, "budget": 1},
    {"name": "xshare", "k0": 0, "scope": "rank", "rank_budget": 2},
    {"name": "budget_drop", "max_lost_mass": 0.2},
]
# Where a law is about parts of the layer: one that drops, one that adds, one that selects nothing.
SOME = [POLICIES[i] for i in (1, 4, 5)]
# DeepSeek-V3's way of weighting at a size that CPU ranks can run.
SIGMOID_MODEL = ModelSpec(
    name="sigmoid", source="test", num_layers=1, hidden_size=64, num_experts=16, top_k=4, ffn_hidden_size=48,
    score_function="sigmoid", normalize=True, routed_scale=2.5, selection_bias=True, num_groups=4, top_groups=2,
    group_score_experts=2,
)  # fmt: skip
# One expert a rank where there are four.
FOUR_EXPERTS = ModelSpec(
    name="four-experts", source="test", num_layers=1, hidden_size=64, num_experts=4, top_k=2, ffn_hidden_size=48,
    normalize=True,
)  # fmt: skip
PARTS = Parts()
ALL_PARTS = [
    Parts(experts, permute) for experts in ("sequential", "grouped", "decode") for permute in ("megatron", "indexed")
]


def law(function: Callable[[Lab], None]) -> Callable[[Lab], None]:
    LAWS[function.__name__] = function
    return function


def needs_ranks(*counts: int) -> Callable[[Callable[[Lab], None]], Callable[[Lab], None]]:
    def remember(function: Callable[[Lab], None]) -> Callable[[Lab], None]:
        NEEDS_RANKS[function.__name__] = counts
        return function

    return remember


class Lab:
    """Layers by model, and tokens with tie-free, skewed scores that do not depend on the number of ranks."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self.ep_group = megatron.initialize_expert_parallel(ranks.world_size, 60)
        self._subjects: dict[tuple[str, torch.dtype, Parts], SingleLayer] = {}

    def model(self, name: str) -> ModelSpec:
        made_up = {model.name: model for model in (SIGMOID_MODEL, FOUR_EXPERTS)}
        return made_up[name] if name in made_up else load_model(name).scaled(1 / 32)

    def subject(self, name: str, dtype: torch.dtype = torch.float32, parts: Parts = PARTS) -> SingleLayer:
        key = (name, dtype, parts)
        if key not in self._subjects:
            self._subjects[key] = SingleLayer(self.model(name), dtype, self.ranks.device, self.ep_group, SEED, parts)
        return self._subjects[key]

    def layers(self, name: str, dtype: torch.dtype = torch.float32, parts: Parts = PARTS) -> LayerPair:
        return self.subject(name, dtype, parts).pair

    def all_scores(self, model: ModelSpec, num_tokens: int) -> Tensor:
        generator = torch.Generator().manual_seed(7)
        logits_TE = torch.randn(num_tokens, model.num_experts, generator=generator)
        logits_TE += 1.5 * torch.randn(model.num_experts, generator=generator)
        return scores_from_logits(logits_TE, model.score_function).to(self.ranks.device)

    def all_hidden(self, model: ModelSpec, num_tokens: int) -> Tensor:
        hidden_TD = torch.randn(num_tokens, model.hidden_size, generator=torch.Generator().manual_seed(8))
        return hidden_TD.to(self.ranks.device)

    def mine(self, num_tokens: int) -> slice:
        """This rank's share of tokens, uneven on purpose."""
        bounds = [num_tokens * r * (r + 1) // (self.ranks.world_size * (self.ranks.world_size + 1))
                  for r in range(self.ranks.world_size + 1)]  # fmt: skip
        return slice(bounds[self.ranks.rank], bounds[self.ranks.rank + 1])

    def route(
        self,
        layers: LayerPair,
        policy: Policy | None,
        hidden_TD: Tensor,
        scores_TE: Tensor | None = None,
        valid_T: Tensor | None = None,
    ) -> tuple[Tensor, Routing]:
        """One run of the native layer (policy None) or of the other with a policy; output [T, D] and routing."""
        layer = layers.native if policy is None else layers.policy
        score_function = layer.router.score_function
        layer.router.replay_TE = None if scores_TE is None else logits_from_scores(scores_TE, score_function)
        if policy is not None:
            layer.router.policy = policy
            requests_T = self.requests(len(hidden_TD))
            layer.router.context = replace(self.context(layers), request_id_T=requests_T, token_mask_T=valid_T)
        seen: list[tuple[Tensor, Tensor]] = []
        hook = layer.router.register_forward_hook(lambda module, inputs, output: seen.append(output))
        output_T1D, _ = layer(hidden_TD.unsqueeze(1))
        hook.remove()
        weights_TE, map_TE = seen[0]
        return output_T1D[:, 0], Routing(map_TE=map_TE, weights_TE=weights_TE)

    def context(self, layers: LayerPair) -> RoutingContext:
        draws = seeded_generator(self.ranks.device, 5, self.ranks.rank)
        return replace(layers.policy_router.context, generator=draws)

    def requests(self, num_tokens: int) -> Tensor:
        """Requests of five tokens, none on two ranks: int64 [T]."""
        return (torch.arange(num_tokens) // 5 + 1000 * self.ranks.rank).to(self.ranks.device)

    def summed(self, tensor: Tensor) -> Tensor:
        total = tensor.cpu().clone()
        dist.all_reduce(total, group=self.ranks.side_group)
        return total


def assert_close(actual: float, allowed: float, what: str) -> None:
    assert actual <= allowed, f"{what}: {actual:.3g} exceeds {allowed:.3g}"


@law
def topk_equals_the_native_layer_bit_for_bit(lab: Lab) -> None:
    # 0.19 sums a token's sigmoid scores in no stated order at inference: see the next law.
    sorted_sums = megatron.MEGATRON_VERSION.startswith("0.16")
    for name in ("olmoe-1b-7b", "deepseek-v2-lite", *(["sigmoid"] if sorted_sums else [])):
        layers, model = lab.layers(name), lab.model(name)
        hidden_TD = lab.all_hidden(model, 97)[lab.mine(97)]
        for scores_TE in (None, lab.all_scores(model, 97)[lab.mine(97)]):
            native_TD, native = lab.route(layers, None, hidden_TD, scores_TE)
            ours_TD, ours = lab.route(layers, make_policy({"name": "topk"}), hidden_TD, scores_TE)
            assert torch.equal(native.map_TE, ours.map_TE), f"{name}: maps differ"
            assert torch.equal(native.weights_TE, ours.weights_TE), f"{name}: weights differ"
            assert torch.equal(native_TD, ours_TD), f"{name}: outputs differ"


@law
def topk_equals_the_native_layer_up_to_rounding_where_weights_are_normalised(lab: Lab) -> None:
    # Mixtral's native weights are a softmax of the selected logits: the same numbers by another formula.
    for name in ("mixtral-8x7b", "sigmoid"):
        layers, model = lab.layers(name), lab.model(name)
        hidden_TD, scores_TE = lab.all_hidden(model, 97)[lab.mine(97)], lab.all_scores(model, 97)[lab.mine(97)]
        native_TD, native = lab.route(layers, None, hidden_TD, scores_TE)
        ours_TD, ours = lab.route(layers, make_policy({"name": "topk"}), hidden_TD, scores_TE)
        assert torch.equal(native.map_TE, ours.map_TE), name
        torch.testing.assert_close(ours.weights_TE, native.weights_TE, rtol=2e-6, atol=0)
        torch.testing.assert_close(ours_TD, native_TD, rtol=1e-4, atol=1e-5)


@law
def every_policy_equals_the_dense_reference(lab: Lab) -> None:
    names = ("deepseek-v2-lite", "mixtral-8x7b", "sigmoid")
    for name in names if lab.ranks.world_size == 2 else names[2:]:
        layers, model = lab.layers(name), lab.model(name)
        hidden_TD, scores_TE = lab.all_hidden(model, 61)[lab.mine(61)], lab.all_scores(model, 61)[lab.mine(61)]
        reference = DenseReference(model, hidden_TD, SEED)
        for spec in POLICIES + BATCH_WIDE:
            output_TD, routing = lab.route(layers, make_policy(spec), hidden_TD, scores_TE)
            error = reference.worst_error(output_TD, routing.weights_TE)
            assert_close(error, TOLERANCE[torch.float32], f"{name} {spec}")


@law
def bfloat16_stays_within_its_tolerance_and_weights_stay_float32(lab: Lab) -> None:
    layers, model = lab.layers("olmoe-1b-7b", torch.bfloat16), lab.model("olmoe-1b-7b")
    hidden_TD = lab.all_hidden(model, 61)[lab.mine(61)].bfloat16()
    reference = DenseReference(model, hidden_TD, SEED)
    for policy in (None, make_policy({"name": "token_drop", "capacity_factor": 1.0})):
        output_TD, routing = lab.route(layers, policy, hidden_TD)
        assert routing.weights_TE.dtype == torch.float32
        assert_close(reference.worst_error(output_TD, routing.weights_TE), TOLERANCE[torch.bfloat16], str(policy))


@law
def the_reference_notices_experts_on_the_wrong_rank(lab: Lab) -> None:
    layers, model = lab.layers("olmoe-1b-7b"), lab.model("olmoe-1b-7b")
    hidden_TD = lab.all_hidden(model, 33)[lab.mine(33)]
    wrong = DenseReference(model, hidden_TD, SEED + 1)
    output_TD, routing = lab.route(layers, make_policy({"name": "topk"}), hidden_TD)
    if len(hidden_TD):
        assert wrong.worst_error(output_TD, routing.weights_TE) > 0.1


@law
def weights_follow_from_the_global_expert_id_in_every_backend(lab: Lab) -> None:
    model = lab.model("olmoe-1b-7b")
    x_TD = lab.all_hidden(model, 4)
    weights_T = torch.full((len(x_TD),), 0.5, device=x_TD.device)
    sizes = model.hidden_size, model.ffn_hidden_size

    def weights(expert: int) -> ExpertWeights:
        return expert_weights(SEED, ROUTED, expert, *sizes, lab.ranks.device, torch.float32)

    for backend in ("sequential", "grouped", "decode"):
        layer = lab.layers("olmoe-1b-7b", parts=Parts(backend, "indexed")).native
        for index, expert in enumerate(layer.local_expert_indices):
            counts_L = torch.zeros(layer.num_local_experts, dtype=torch.int64)
            counts_L[index] = len(x_TD)
            output_TD, _ = layer.experts(x_TD, counts_L, weights_T)
            torch.testing.assert_close(output_TD, 0.5 * apply_expert(x_TD, weights(expert)), rtol=1e-4, atol=1e-5)
    assert not torch.equal(weights(1).down_DF, weights(0).down_DF)


@law
def every_backend_and_permutation_gives_the_same_output(lab: Lab) -> None:
    for name, dtype in (
        ("olmoe-1b-7b", torch.float32),
        ("olmoe-1b-7b", torch.bfloat16),
        ("four-experts", torch.float32),
    ):
        model = lab.model(name)
        hidden_TD, scores_TE = (
            lab.all_hidden(model, 97)[lab.mine(97)].to(dtype),
            lab.all_scores(model, 97)[lab.mine(97)],
        )
        for spec in (None, *SOME):
            policy = None if spec is None else make_policy(spec)
            reference_TD, _ = lab.route(lab.layers(name, dtype, ALL_PARTS[0]), policy, hidden_TD, scores_TE)
            by_experts: dict[str, Tensor] = {}
            for parts in ALL_PARTS:
                output_TD, _ = lab.route(lab.layers(name, dtype, parts), policy, hidden_TD, scores_TE)
                rounding = {"rtol": 1e-4, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 2e-2}
                torch.testing.assert_close(output_TD, reference_TD, **rounding, msg=f"{name} {dtype} {parts} {spec}")
                same_experts_TD = by_experts.setdefault(parts.experts, output_TD)
                if dtype == torch.float32 and not output_TD.is_cuda:
                    # A permutation moves rows; on the host it even adds them up in the same order.
                    assert torch.equal(output_TD, same_experts_TD), f"{name} {parts} {spec}"


@law
def counts_and_splits_are_megatrons_whoever_permutes(lab: Lab) -> None:
    model = lab.model("deepseek-v2-lite")
    hidden_TD, scores_TE = lab.all_hidden(model, 61)[lab.mine(61)], lab.all_scores(model, 61)[lab.mine(61)]
    seen = {}
    for parts in (Parts("grouped", "megatron"), Parts("grouped", "indexed")):
        layers = lab.layers("deepseek-v2-lite", parts=parts)
        experts, inputs = layers.native.experts, []
        hook = experts.register_forward_pre_hook(lambda module, args, inputs=inputs: inputs.append(args))
        lab.route(layers, make_policy({"name": "expanded_drop", "capacity_factor": 1.0}), hidden_TD, scores_TE)
        hook.remove()
        seen[parts.permute] = inputs[0]
    for theirs, ours in zip(seen["megatron"], seen["indexed"], strict=True):
        assert torch.equal(theirs, ours)


@law
def policies_wait_for_the_host_where_native_does(lab: Lab) -> None:
    """Rows are bounded until then: on CUDA there are spare ones, which are never sent."""
    layers, model = lab.layers("deepseek-v2-lite", parts=Parts("grouped", "indexed")), lab.model("deepseek-v2-lite")
    hidden_TD, scores_TE = lab.all_hidden(model, 61)[lab.mine(61)], lab.all_scores(model, 61)[lab.mine(61)]
    lab.route(layers, None, hidden_TD, scores_TE)
    as_on_cuda, spare = partial(torch.nonzero_static, fill_value=0), []

    def marked(mask: Tensor, num_marked: int) -> Tensor:
        spare.append(num_marked - int(mask.sum()))
        return as_on_cuda(mask, size=num_marked)

    for spec in POLICIES + BATCH_WIDE:
        expected_TD, _ = lab.route(layers, make_policy(spec), hidden_TD, scores_TE)
        with mock.patch.object(dispatchers, "_marked", marked):
            output_TD, _ = lab.route(layers, make_policy(spec), hidden_TD, scores_TE)
        assert torch.equal(output_TD, expected_TD), str(spec)
    assert min(spare) == 0 < max(spare)
    policy, native = (one.token_dispatcher.cuda_sync_point for one in (layers.policy, layers.native))
    assert policy == native != "before_permutation_1"


@law
def a_layer_in_pieces_routes_and_computes_what_it_does_at_once(lab: Lab) -> None:
    """Also where a piece is empty on some rank, and with hooks that see the whole."""
    model = lab.model("deepseek-v2-lite")
    for permute, num_tokens in (("indexed", 61), ("megatron", 61), ("indexed", 4)):
        parts = Parts("grouped", permute)
        whole = lab.layers("deepseek-v2-lite", parts=parts)
        made = SingleLayer(model, torch.float32, lab.ranks.device, lab.ep_group, SEED, parts, num_pieces=3)
        mine = lab.mine(num_tokens)
        hidden_TD, scores_TE = lab.all_hidden(model, num_tokens)[mine], lab.all_scores(model, num_tokens)[mine]
        calls, dispatcher = [], made.pair.native.token_dispatcher
        dispatcher.token_combine = counted(dispatcher.token_combine, calls)
        for spec in (None, POLICIES[1], POLICIES[5], POLICIES[8], BATCH_WIDE[1]):
            policy = None if spec is None else make_policy(spec)
            expected_TD, expected = lab.route(whole, policy, hidden_TD, scores_TE)
            output_TD, routing = lab.route(made.pair, policy, hidden_TD, scores_TE)
            assert torch.equal(routing.map_TE, expected.map_TE), f"{parts} {spec}"
            torch.testing.assert_close(output_TD, expected_TD, rtol=1e-4, atol=1e-5)
        assert len(calls) == 3, "native ran in three pieces"


def counted(method: Callable[..., Any], calls: list[int]) -> Callable[..., Any]:
    """The same, with a note of every call."""

    def noted(*arguments: Any) -> Any:
        calls.append(1)
        return method(*arguments)

    return noted


@law
def token_drop_with_a_huge_capacity_factor_equals_topk(lab: Lab) -> None:
    layers, model = lab.layers("deepseek-v2-lite"), lab.model("deepseek-v2-lite")
    hidden_TD, scores_TE = lab.all_hidden(model, 61)[lab.mine(61)], lab.all_scores(model, 61)[lab.mine(61)]
    topk_TD, _ = lab.route(layers, make_policy({"name": "topk"}), hidden_TD, scores_TE)
    huge = make_policy({"name": "token_drop", "capacity_factor": 1e6})
    assert torch.equal(lab.route(layers, huge, hidden_TD, scores_TE)[0], topk_TD)


@law
def capacity_bounds_what_experts_receive_from_all_ranks(lab: Lab) -> None:
    # arXiv 2503.05066, Eq. 5 and 6: the fullest expert gets at most gamma times the mean load.
    layers, model = lab.layers("deepseek-v2-lite"), lab.model("deepseek-v2-lite")
    hidden_TD, scores_TE = lab.all_hidden(model, 509)[lab.mine(509)], lab.all_scores(model, 509)[lab.mine(509)]
    _, unbounded = lab.route(layers, make_policy({"name": "topk"}), hidden_TD, scores_TE)
    mean = 509 * model.top_k / model.num_experts
    assert lab.summed(unbounded.map_TE.sum(dim=0)).max() > 2 * mean, "the workload is not skewed"
    for gamma in (0.5, 1.0, 1.5, 2.0):
        for granularity, shared in (("expert", 1), ("device", model.num_experts // lab.ranks.world_size)):
            for name in ("token_drop", "expanded_drop"):
                policy = make_policy({"name": name, "capacity_factor": gamma, "granularity": granularity})
                _, routing = lab.route(layers, policy, hidden_TD, scores_TE)
                mine_G = routing.map_TE.sum(dim=0).view(-1, shared).sum(dim=1)
                mine_mean = len(hidden_TD) * model.top_k / model.num_experts
                assert mine_G.numel() == 0 or mine_G.max() <= gamma * shared * mine_mean
                assert lab.summed(mine_G).max() <= gamma * shared * mean


@law
def megatrons_own_token_dropping_is_out_of_play(lab: Lab) -> None:
    layers = lab.layers("deepseek-v2-lite", parts=Parts("grouped", "megatron"))
    model = lab.model("deepseek-v2-lite")
    assert layers.policy.config.moe_expert_capacity_factor == 1.0
    assert layers.native.config.moe_expert_capacity_factor is None
    hidden_TD, scores_TE = lab.all_hidden(model, 509)[lab.mine(509)], lab.all_scores(model, 509)[lab.mine(509)]
    _, routing = lab.route(layers, make_policy({"name": "topk"}), hidden_TD, scores_TE)
    assert int(routing.map_TE.sum()) == len(hidden_TD) * model.top_k


@law
def a_rank_without_tokens_and_a_batch_smaller_than_the_experts_work(lab: Lab) -> None:
    model = lab.model("deepseek-v2-lite")
    for num_tokens in (0, 3):
        mine = num_tokens if lab.ranks.rank == lab.ranks.world_size - 1 else 0
        hidden_TD, scores_TE = lab.all_hidden(model, 3)[:mine], lab.all_scores(model, 3)[:mine]
        reference = DenseReference(model, hidden_TD, SEED)
        for parts in ALL_PARTS:
            layers = lab.layers("deepseek-v2-lite", parts=parts)
            for policy in (None, *map(make_policy, SOME + BATCH_WIDE[2:4])):
                output_TD, routing = lab.route(layers, policy, hidden_TD, scores_TE)
                assert output_TD.shape == (mine, model.hidden_size)
                error = reference.worst_error(output_TD, routing.weights_TE)
                assert_close(error, TOLERANCE[torch.float32], f"{policy} {parts}")


@law
def masked_padding_selects_nothing_and_changes_no_valid_token(lab: Lab) -> None:
    for name in ("deepseek-v2-lite", "sigmoid"):
        layers, model = lab.layers(name), lab.model(name)
        hidden_TD, scores_TE = lab.all_hidden(model, 61)[lab.mine(61)], lab.all_scores(model, 61)[lab.mine(61)]
        reference = DenseReference(model, hidden_TD, SEED)
        kept = len(hidden_TD) - 3  # The rank with the fewest tokens has six.
        valid_T = torch.arange(len(hidden_TD), device=hidden_TD.device) < kept
        for spec in POLICIES + BATCH_WIDE:
            policy = make_policy(spec)
            output_TD, masked = lab.route(layers, policy, hidden_TD, scores_TE, valid_T)
            _, alone = lab.route(layers, policy, hidden_TD[:kept], scores_TE[:kept])
            assert not masked.map_TE[kept:].any(), f"{name} {spec}"
            assert not masked.weights_TE[kept:].any(), f"{name} {spec}"
            if spec.get("metric") != "random":  # Its keys are drawn for all rows.
                assert torch.equal(masked.map_TE[:kept], alone.map_TE), f"{name} {spec}"
                assert torch.equal(masked.weights_TE[:kept], alone.weights_TE), f"{name} {spec}"
            error = reference.worst_error(output_TD, masked.weights_TE)
            assert_close(error, TOLERANCE[torch.float32], f"{name} {spec}")


class Choice(Policy):
    """A policy for tests that routes token t to t modulo (E + 1) experts: 0 to E of them."""

    name = "choice"

    def route(self, scores_TE: Tensor, context: RoutingContext, stats_SE: Tensor | None = None) -> Routing:
        num_tokens, num_experts = scores_TE.shape
        count_T1 = (torch.arange(num_tokens, device=scores_TE.device) % (num_experts + 1)).unsqueeze(1)
        map_TE = torch.arange(num_experts, device=scores_TE.device) < count_T1
        return weighted(scores_TE, map_TE, top_k_map(scores_TE, context), context)


@law
def any_number_of_experts_per_token_from_none_to_all_works(lab: Lab) -> None:
    layers, model = lab.layers("sigmoid"), lab.model("sigmoid")
    for num_tokens in (9, 70):  # With 9 tokens the last experts get none.
        hidden_TD, scores_TE = lab.all_hidden(model, num_tokens), lab.all_scores(model, num_tokens)
        output_TD, routing = lab.route(layers, Choice(), hidden_TD, scores_TE)
        reference = DenseReference(model, hidden_TD, SEED)
        assert_close(reference.worst_error(output_TD, routing.weights_TE), TOLERANCE[torch.float32], f"T={num_tokens}")


@law
def n_ranks_give_what_one_rank_gives_with_all_tokens(lab: Lab) -> None:
    layers, model = lab.layers("deepseek-v2-lite"), lab.model("deepseek-v2-lite")
    hidden_TD, scores_TE = lab.all_hidden(model, 97), lab.all_scores(model, 97)
    context = RoutingContext(top_k=model.top_k, normalize=model.normalize)
    whole = make_policy({"name": "topk"}).route(scores_TE, context)
    reference = DenseReference(model, hidden_TD, SEED)
    mine = lab.mine(97)
    output_TD, routing = lab.route(layers, make_policy({"name": "topk"}), hidden_TD[mine], scores_TE[mine])
    assert torch.equal(routing.map_TE, whole.map_TE[mine])
    torch.testing.assert_close(output_TD, reference.output(whole.weights_TE)[mine], rtol=1e-4, atol=1e-5)
    loads = lab.summed(routing.map_TE.sum(dim=0))
    assert torch.equal(loads, whole.map_TE.sum(dim=0).cpu())


class CountedSum(Choice):
    """A batch-wide policy for tests: every token goes to the expert with the largest summed score."""

    name = "counted_sum"

    def batch_stats(self, scores_TE: Tensor, context: RoutingContext) -> Tensor:
        return scores_TE.double().sum(dim=0, keepdim=True)

    def route(self, scores_TE: Tensor, context: RoutingContext, stats_SE: Tensor | None = None) -> Routing:
        stats_SE = self.batch_stats(scores_TE, context) if stats_SE is None else stats_SE
        map_TE = torch.zeros_like(scores_TE, dtype=torch.bool)
        map_TE[:, stats_SE[0].argmax()] = True
        return weighted(scores_TE, map_TE, map_TE, context)


@law
def statistics_of_batch_wide_policies_are_summed_over_ranks(lab: Lab) -> None:
    layers, model = lab.layers("sigmoid"), lab.model("sigmoid")
    hidden_TD, scores_TE = lab.all_hidden(model, 97), lab.all_scores(model, 97)
    mine = lab.mine(97)
    _, routing = lab.route(layers, CountedSum(), hidden_TD[mine], scores_TE[mine])
    whole = CountedSum().route(scores_TE, RoutingContext(top_k=model.top_k))
    assert torch.equal(routing.map_TE, whole.map_TE[mine])


@law
def batch_wide_policies_decide_as_if_all_tokens_were_on_one_rank(lab: Lab) -> None:
    for name in ("deepseek-v2-lite", "sigmoid"):
        layers, model = lab.layers(name), lab.model(name)
        hidden_TD, scores_TE = lab.all_hidden(model, 31), lab.all_scores(model, 31)
        mine = lab.mine(31)
        requests = [torch.zeros(0, dtype=torch.int64)] * lab.ranks.world_size
        dist.all_gather_object(requests, lab.requests(mine.stop - mine.start).cpu(), group=lab.ranks.side_group)
        context = replace(lab.context(layers), request_id_T=torch.cat(requests).to(lab.ranks.device))
        for spec in BATCH_WIDE:
            policy = make_policy(spec)
            whole = policy.route(scores_TE, context)
            _, routing = lab.route(layers, policy, hidden_TD[mine], scores_TE[mine])
            assert torch.equal(routing.map_TE, whole.map_TE[mine]), f"{name} {spec}"
            if name == "deepseek-v2-lite":  # Of 16 experts in groups 31 tokens may want them all.
                assert not torch.equal(whole.map_TE, top_k_map(scores_TE, context)), f"{spec} changes nothing"
                own = replace(context, request_id_T=lab.requests(mine.stop - mine.start))
                alone = policy.route(scores_TE[mine], own)
                differing = lab.summed((alone.map_TE != routing.map_TE).any().long())
                assert lab.ranks.world_size == 1 or int(differing), f"{spec}: the sum over ranks makes no difference"


@law
def replayed_scores_take_the_place_of_the_gates_output(lab: Lab) -> None:
    layers, model = lab.layers("deepseek-v2-lite"), lab.model("deepseek-v2-lite")
    hidden_TD, scores_TE = lab.all_hidden(model, 97)[lab.mine(97)], lab.all_scores(model, 97)[lab.mine(97)]
    gated = []
    original = megatron.TopKRouter.gating
    megatron.TopKRouter.gating = lambda self, input: gated.append(len(input)) or original(self, input)
    try:
        _, routing = lab.route(layers, make_policy({"name": "topk"}), hidden_TD, scores_TE)
    finally:
        megatron.TopKRouter.gating = original
    expected = make_policy({"name": "topk"}).route(scores_TE, lab.context(layers))
    assert torch.equal(routing.map_TE, expected.map_TE)
    assert gated == ([len(hidden_TD)] if len(hidden_TD) else []), "the gate GEMM was not executed"


def breakdown(
    lab: Lab, layers: LayerPair, hidden_TD: Tensor, policy: Policy | None = None, clock: Clock | None = None
) -> dict[str, float]:
    """Microseconds per phase of one instrumented iteration; clock None = the device's own."""
    layer = layers.native if policy is None else layers.policy
    layer.router.replay_TE = None
    if policy is not None:
        layer.router.policy = policy
    recorder = PhaseRecorder(clock or clock_for(lab.ranks.device))
    meet = Rendezvous(lab.ep_group, lab.ranks.device)
    with instrumented(layer, recorder, meet):
        meet()
        recorder.begin()
        layer(hidden_TD.unsqueeze(1))
        recorder.end()
    return recorder.times_us()


@law
def phases_are_exclusive_and_close_against_the_total(lab: Lab) -> None:
    layers, model = lab.layers("deepseek-v2-lite"), lab.model("deepseek-v2-lite")
    times = breakdown(lab, layers, lab.all_hidden(model, 64))
    expected = {"shared", "gate", "policy", "permute", "metadata", "dispatch", "experts", "combine"}
    if lab.ranks.world_size > 1:
        expected |= {"wait_metadata", "wait_dispatch", "wait_combine"}
    assert set(times) == {*expected, UNACCOUNTED, TOTAL}
    assert set(times) <= {*LAYER_PHASES, UNACCOUNTED, TOTAL}
    covered = sum(value for phase, value in times.items() if phase != TOTAL)
    resolution_us = 1.0 if lab.ranks.device.type == "cpu" else 0.5 * len(STAGES) * 2  # an event's is half a microsecond
    assert abs(covered - times[TOTAL]) < resolution_us, f"phases {covered} us, total {times[TOTAL]} us"


@law
def instrumentation_leaves_nothing_behind(lab: Lab) -> None:
    layers = lab.layers("deepseek-v2-lite")
    owners = (layers.native, layers.native.router, layers.native.token_dispatcher, layers.native.experts)
    before = [set(vars(owner)) for owner in owners]
    with (
        contextlib.suppress(ZeroDivisionError),
        instrumented(
            layers.native, PhaseRecorder(clock_for(lab.ranks.device)), Rendezvous(lab.ep_group, lab.ranks.device)
        ),
    ):
        assert "forward" in vars(layers.native.experts)
        raise ZeroDivisionError
    # What a forward pass itself stores is there already.
    assert [set(vars(owner)) for owner in owners] == before


@law
@needs_ranks(2, 4)
def a_slow_rank_shows_as_waiting_on_the_others_in_the_right_place(lab: Lab) -> None:
    layers, model = lab.layers("deepseek-v2-lite"), lab.model("deepseek-v2-lite")
    hidden_TD = lab.all_hidden(model, 16)
    batch_wide = CountedSum()
    slow_rank = lab.ranks.world_size - 1
    violations = []  # Raised at the end: a rank that leaves early would hang the others.
    for owner, method, phase, wait, policy in (
        ("router", "gating", "gate", "wait_metadata", None),
        ("router", "gating", "gate", "wait_policy", batch_wide),
        ("token_dispatcher", "dispatch_preprocess", "permute", "wait_dispatch", None),
        ("token_dispatcher", "dispatch_postprocess", "permute", "wait_combine", None),
        ("experts", "forward", "experts", "wait_combine", None),
    ):
        layer = layers.native if policy is None else layers.policy
        is_slow = lab.ranks.rank == slow_rank
        run = partial(breakdown, lab, layers, hidden_TD, policy)
        passed = passing_where_late(lab.ranks.device, getattr(layer, owner), method, run, is_slow=is_slow)
        if passed != all_in(phase if is_slow else wait):
            violations.append(f"rank {slow_rank} late in {method}: {passed}")
    assert not violations, violations


@law
@needs_ranks(4)
def expert_parallel_groups_are_data_parallel_replicas(lab: Lab) -> None:
    model = lab.model("deepseek-v2-lite")
    pair_group = megatron.initialize_expert_parallel(2, 60)
    try:
        assert pair_group.size() == 2
        assert megatron.initialize_expert_parallel(4, 60) is lab.ep_group, "groups of a size are formed once"
        assert megatron.initialize_expert_parallel(2, 60) is pair_group
        assert pair_group.rank() == lab.ranks.rank % 2
        layers = SingleLayer(model, torch.float32, lab.ranks.device, pair_group, SEED).pair
        hidden_TD, scores_TE = lab.all_hidden(model, 61)[lab.mine(61)], lab.all_scores(model, 61)[lab.mine(61)]
        reference = DenseReference(model, hidden_TD, SEED)
        for policy in (None, make_policy({"name": "expanded_drop", "capacity_factor": 1.0})):
            output_TD, routing = lab.route(layers, policy, hidden_TD, scores_TE)
            assert_close(reference.worst_error(output_TD, routing.weights_TE), TOLERANCE[torch.float32], str(policy))
    finally:
        lab.ep_group = megatron.initialize_expert_parallel(lab.ranks.world_size, 60)
        lab._subjects.clear()


@law
def metrics_of_the_layers_routing_add_up_over_ranks(lab: Lab) -> None:
    layers, model = lab.layers("deepseek-v2-lite"), lab.model("deepseek-v2-lite")
    hidden_TD, scores_TE = lab.all_hidden(model, 97)[lab.mine(97)], lab.all_scores(model, 97)[lab.mine(97)]
    _, routing = lab.route(layers, make_policy({"name": "token_drop", "capacity_factor": 1.0}), hidden_TD, scores_TE)
    metrics = routing_metrics(routing, scores_TE, lab.context(layers))
    computed = torch.tensor(metrics["num_pairs"])
    dropped = torch.tensor(metrics["num_dropped_pairs"])
    assert int(lab.summed(computed + dropped)) == 97 * model.top_k


@law
def shared_experts_are_never_overlapped_and_routing_is_float32(lab: Lab) -> None:
    for capacity_factor in (None, 1.0):
        model = lab.model("deepseek-v2-lite")
        config = megatron_config(model, torch.bfloat16, 1, capacity_factor, on_cpu=True)
        assert config.moe_shared_expert_overlap is False
        assert config.moe_router_dtype == "fp32"
        assert config.moe_router_load_balancing_type == "none"


@law
def what_a_production_setting_fuses_is_fused_with_transformer_engine(lab: Lab) -> None:
    model = lab.model("deepseek-v2-lite")
    for parts, fused in ((Parts("te", "indexed", router_fusion=True), True), (Parts("grouped", "indexed"), False)):
        config = megatron_config(model, torch.bfloat16, 1, None, parts, on_cpu=True)
        assert (config.bias_activation_fusion, config.moe_router_fusion) == (fused, fused)
    kernels = ("fused_permute", "fused_unpermute", "fused_sort_chunks_by_index")
    kernels += ("fused_permute_with_probs", "fused_sort_chunks_by_index_with_probs")
    # Megatron-Core looks for them.
    with mock.patch.multiple(megatron.moe_utils, create=True, **dict.fromkeys(kernels, mock.Mock())):
        for permute in ("fused", "indexed", "megatron"):
            config = megatron_config(model, torch.bfloat16, 1, None, Parts("grouped", permute), on_cpu=True)
            assert config.moe_permute_fusion == (permute == "fused")


def run_laws(laws: Mapping[str, Callable[[Any], None]], lab: Any, report: Path) -> None:
    """Run laws on every rank of ``lab``; rank 0 writes {law: error or null}."""
    results: dict[str, str | None] = {}
    with device_scope(), torch.inference_mode():
        for name, function in laws.items():
            try:
                function(lab)
                error = ""
            except Exception:
                error = traceback.format_exc()[-1200:]
            errors = [f"rank {rank}: {text}" for rank, text in enumerate(lab.ranks.texts(error)) if text]
            results[name] = "\n".join(errors) or None
            if lab.ranks.is_first:
                report.write_text(json.dumps(results))


def main(report: Path, *names: str) -> None:
    """Run these laws, or all that fit this number of ranks."""
    ranks = join(60)
    # How a BLAS shares a product among threads may change from call to call, and with it the last bit.
    torch.set_num_threads(1)
    fitting = {name: one for name, one in LAWS.items() if ranks.world_size in NEEDS_RANKS.get(name, (1, 2, 4))}
    run_laws({name: fitting[name] for name in names or fitting}, Lab(ranks), report)
    ranks.close()
