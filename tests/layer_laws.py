"""What must hold of a real expert-parallel layer, and the ``Lab`` that laws of layers share."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from fp8_blocks import BlockExperts, stand_ins
from laws import law
from torch import Tensor
from virtual_time import all_in, passing_where_late
from waits import watched_waits

from moe_ep_bench.layer import components, megatron
from moe_ep_bench.layer.backend import DEFAULT_BACKEND, LayerBackend, fp8_lacks
from moe_ep_bench.layer.experts import TOLERANCE, DenseReference, seeded_generator
from moe_ep_bench.layer.megatron import MoELayer
from moe_ep_bench.layer.phases import Rendezvous, instrumented
from moe_ep_bench.layer.stack import Forms, Stack
from moe_ep_bench.models import ModelSpec, load_model, logits_from_scores, scores_from_logits
from moe_ep_bench.policies import Policy, Routing, RoutingContext, make_policy
from moe_ep_bench.policies.selection import TopK, top_k_map, weighted
from moe_ep_bench.runtime.ranks import Ranks
from moe_ep_bench.schema import LAYER_PHASES, TOTAL, UNACCOUNTED
from moe_ep_bench.timing.syncs import watched_syncs
from moe_ep_bench.timing.timer import Clock, PhaseRecorder, clock_for

SEED = 3
TOPK = {"name": "topk"}
POLICIES = [
    TOPK,
    {"name": "token_drop", "capacity_factor": 0.5},
    {"name": "token_drop", "capacity_factor": 1.0, "metric": "order"},
    {"name": "token_drop", "capacity_factor": 1.0, "metric": "random", "granularity": "device"},
    {"name": "token_drop", "capacity_factor": 0},
    {"name": "expanded_drop", "capacity_factor": 1.5},
    {"name": "expanded_drop", "capacity_factor": 8, "scope": "global", "num_candidates": 64},
    {"name": "expanded_drop", "capacity_factor": 1.0, "granularity": "device", "max_experts_per_token": 3},
    {"name": "pruned", "k0": 2, "p": 0.7},
    {"name": "laser", "eps_high": 0.9, "t_fix": 0.2, "c": 8},
    {"name": "load_only"},
    {"name": "dynamic_skip", "beta": 0.5},
    {"name": "token_drop", "capacity_factor": 1.0, "rounding": "ceil"},
]
# They decide by statistics that are summed over all ranks.
BATCH_WIDE = [
    {"name": "expert_drop", "fraction": 0.6},
    {"name": "lynx", "num_dropped": 3},
    {"name": "oea", "k0": 1},
    {"name": "xshare", "k0": 1, "budget": 2},
    {"name": "xshare", "k0": 0, "mass_threshold": 0.6},
    {"name": "xshare", "k0": 1, "scope": "request", "request_budget": 1, "budget": 1},
    {"name": "xshare", "k0": 0, "scope": "rank", "rank_budget": 2},
    {"name": "budget_drop", "max_lost_mass": 0.2},
]
# Where a law is about parts of the layer: native, and policies that drop, add, select nothing, and sum statistics.
SOME = [None, *(POLICIES[i] for i in (1, 4, 5)), BATCH_WIDE[2]]
LITE = "deepseek-v2-lite"  # It has shared experts.
# DeepSeek-V3's way of weighting at a size that CPU ranks can run.
SIGMOID_MODEL = ModelSpec(
    name="sigmoid", source="test", num_layers=1, hidden_size=64, num_experts=16, top_k=4, ffn_hidden_size=48,
    score_function="sigmoid", normalize=True, routed_scale=2.5, selection_bias=True, num_groups=4, top_groups=2,
    group_score_experts=2,
)  # fmt: skip
# DeepSeek-V4's, which Megatron-Core knows since 0.18.
ROOT_MODEL = ModelSpec(
    name="root of softplus", source="test", num_layers=1, hidden_size=64, num_experts=16, top_k=4, ffn_hidden_size=48,
    score_function="sqrtsoftplus", normalize=True, routed_scale=1.5, selection_bias=True,
)  # fmt: skip
# As wide as blocks of FP8; a few tokens leave some experts without rows.
BLOCKS = ModelSpec(
    name="blocks", source="test", num_layers=1, hidden_size=256, num_experts=16, top_k=4, ffn_hidden_size=128,
    shared_ffn_hidden_size=128, normalize=True,
)  # fmt: skip
# One expert a rank where there are four.
FOUR_EXPERTS = ModelSpec(
    name="four-experts", source="test", num_layers=1, hidden_size=64, num_experts=4, top_k=2, ffn_hidden_size=48,
    normalize=True,
)  # fmt: skip
MADE_UP = {model.name: model for model in (SIGMOID_MODEL, ROOT_MODEL, BLOCKS, FOUR_EXPERTS)}
PERMUTED = [LayerBackend("sequential"), LayerBackend("grouped")]
CLOSE = {"rtol": 1e-4, "atol": 1e-5}


Spec = dict[str, Any] | None  # None: the native layer.


def policy_of(spec: dict | Policy | None) -> Policy | None:
    return make_policy(spec) if isinstance(spec, dict) else spec


def skewed_scores(model: ModelSpec, num_tokens: int, seed: int = 7) -> Tensor:
    """Tie-free scores of skewed experts, as they arrive at a policy: they have been logits in between."""
    generator = torch.Generator().manual_seed(seed)
    logits_TE = torch.randn(num_tokens, model.num_experts, generator=generator)
    logits_TE += 1.5 * torch.randn(model.num_experts, generator=generator)
    scores_TE = scores_from_logits(logits_TE, model.score_function)
    return scores_from_logits(logits_from_scores(scores_TE, model.score_function), model.score_function)


def uneven(num_tokens: int, num_ranks: int) -> list[slice]:
    """Each rank's share of tokens, uneven on purpose."""
    bounds = [num_tokens * r * (r + 1) // (num_ranks * (num_ranks + 1)) for r in range(num_ranks + 1)]
    return [slice(*pair) for pair in itertools.pairwise(bounds)]


def model_of(name: str) -> ModelSpec:
    """A made-up model, or a preset with narrow layers, so that CPU ranks can run it."""
    return MADE_UP[name] if name in MADE_UP else load_model(name).scaled(1 / 32)


class Lab:
    """Layers by model, and tokens whose hidden states and scores do not depend on the number of ranks."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self.groups = megatron.expert_parallel_groups(ranks.world_size, 60)
        self._stacks: dict[tuple[str, torch.dtype, LayerBackend], Stack] = {}

    def model(self, name: str = LITE) -> ModelSpec:
        return model_of(name)

    @property
    def ep_group(self) -> dist.ProcessGroup:
        return self.groups.ep

    def new_stack(self, name: str, dtype: torch.dtype, layer_backend: LayerBackend) -> Stack:
        return Stack(self.model(name), dtype, self.ranks.device, self.groups, SEED, layer_backend)

    def stack(
        self, name: str = LITE, dtype: torch.dtype = torch.float32, layer_backend: LayerBackend = DEFAULT_BACKEND
    ) -> Stack:
        key = (name, dtype, layer_backend)
        if key not in self._stacks:
            self._stacks[key] = self.new_stack(*key)
        return self._stacks[key]

    def layers(
        self, name: str = LITE, dtype: torch.dtype = torch.float32, layer_backend: LayerBackend = DEFAULT_BACKEND
    ) -> Forms:
        return self.stack(name, dtype, layer_backend).forms[None]

    def forget(self) -> None:
        """Layers of groups that are not used any more."""
        self.groups = megatron.expert_parallel_groups(self.ranks.world_size, 60)
        self._stacks.clear()

    def all_scores(self, model: ModelSpec, num_tokens: int) -> Tensor:
        return skewed_scores(model, num_tokens).to(self.ranks.device)

    def all_hidden(self, model: ModelSpec, num_tokens: int) -> Tensor:
        hidden_TD = torch.randn(num_tokens, model.hidden_size, generator=torch.Generator().manual_seed(8))
        return hidden_TD.to(self.ranks.device)

    def mine(self, num_tokens: int, *, even: bool = False) -> slice:
        """This rank's share of tokens."""
        share = num_tokens // self.ranks.world_size
        if even:
            return slice(self.ranks.rank * share, (self.ranks.rank + 1) * share)
        return uneven(num_tokens, self.ranks.world_size)[self.ranks.rank]

    def tokens(self, name: str = LITE, num_tokens: int = 61, *, even: bool = False) -> tuple[Tensor, Tensor]:
        """Hidden states and scores of this rank's tokens."""
        model, mine = self.model(name), self.mine(num_tokens, even=even)
        return self.all_hidden(model, num_tokens)[mine], self.all_scores(model, num_tokens)[mine]

    def reference(self, name: str, hidden_TD: Tensor) -> DenseReference:
        return DenseReference(self.model(name), hidden_TD, SEED)

    def route(
        self,
        layers: Forms,
        spec: dict | Policy | None,
        hidden_TD: Tensor,
        scores_TE: Tensor | None = None,
        valid_T: Tensor | None = None,
    ) -> tuple[Tensor, Routing]:
        """One run of the native layer (None) or of the other with a policy; output [T, D] and routing."""
        policy = policy_of(spec)
        layer = layers.native if policy is None else layers.policy
        if policy is not None:
            layer.router.policy = policy
            requests_T = self.requests(len(hidden_TD))
            layer.router.context = replace(self.context(layers), request_id_T=requests_T, token_mask_T=valid_T)
        return run_layer(layer, hidden_TD, scores_TE)

    def check(
        self,
        name: str,
        specs: Sequence[Spec],
        num_tokens: int = 61,
        layer_backend: LayerBackend = DEFAULT_BACKEND,
        *,
        on_last: bool = False,
    ) -> None:
        """Hold the output of a model's layer, routed by each of these, against the dense reference.

        Args:
            on_last: all tokens are the last rank's; else ranks have uneven shares of them.
        """
        model, mine = self.model(name), self.mine(num_tokens)
        if on_last:
            mine = slice(0, num_tokens if self.ranks.rank == self.ranks.world_size - 1 else 0)
        hidden_TD, scores_TE = self.all_hidden(model, num_tokens)[mine], self.all_scores(model, num_tokens)[mine]
        reference, layers = self.reference(name, hidden_TD), self.layers(name, layer_backend=layer_backend)
        for spec in specs:
            output_TD, routing = self.route(layers, spec, hidden_TD, scores_TE)
            assert output_TD.shape == hidden_TD.shape
            assert_right(reference, output_TD, routing, f"{name} {layer_backend} {num_tokens} tokens, {spec}")

    def context(self, layers: Forms) -> RoutingContext:
        draws = seeded_generator(self.ranks.device, 5, self.ranks.rank)
        return replace(layers.policy.router.context, generator=draws)

    def requests(self, num_tokens: int) -> Tensor:
        """Requests of five tokens, none on two ranks: int64 [T]."""
        return (torch.arange(num_tokens) // 5 + 1000 * self.ranks.rank).to(self.ranks.device)

    def summed(self, tensor: Tensor) -> Tensor:
        total = tensor.cpu().clone()
        dist.all_reduce(total, group=self.ranks.side_group)
        return total


def run_layer(layer: MoELayer, hidden_TD: Tensor, scores_TE: Tensor | None = None) -> tuple[Tensor, Routing]:
    """Output [T, D] and routing of one run; without scores the gate decides."""
    score_function = layer.router.score_function
    layer.router.replay_TE = None if scores_TE is None else logits_from_scores(scores_TE, score_function)
    seen: list[tuple[Tensor, Tensor]] = []
    hook = layer.router.register_forward_hook(lambda module, inputs, output: seen.append(output))
    output_T1D, _ = layer(hidden_TD.unsqueeze(1))
    hook.remove()
    ((weights_TE, map_TE),) = seen
    return output_T1D[:, 0], Routing(map_TE=map_TE, weights_TE=weights_TE)


def assert_right(
    reference: DenseReference, output_TD: Tensor, routing: Routing, what: object, dtype: str | None = None
) -> None:
    """An output is the weighted sum of what all experts make of each token."""
    error = reference.worst_error(output_TD, routing.weights_TE)
    allowed = TOLERANCE[dtype or str(output_TD.dtype).removeprefix("torch.")]
    assert error <= allowed, f"{what}: {error:.3g} exceeds {allowed:.3g}"


# ---- What a layer computes -------------------------------------------------------------------------------------------


@law(1, 2)
def results_reach_the_first_rank_in_order_and_its_value_all_others(lab: Lab) -> None:
    ranks = lab.ranks
    value_R = [(f"rank {rank}", rank**2) for rank in range(ranks.world_size)]
    mine = value_R[ranks.rank]
    assert ranks.all_gather(mine) == value_R
    assert ranks.gather(mine) == (value_R if ranks.is_first else [])
    assert ranks.broadcast(mine) == value_R[0]
    last = ranks.world_size - 1
    assert ranks.first_error("lost" if ranks.rank == last else "") == (last, "lost")
    assert ranks.first_error("") is None


@law()
def topk_equals_the_native_layer(lab: Lab) -> None:
    """Bit for bit, but where the same weights come by another formula.

    Mixtral's native weights are a softmax of the selected logits, and 0.19 sums sigmoid scores in no stated order.
    """
    rounded = ["mixtral-8x7b", *([] if megatron.MEGATRON_VERSION.startswith("0.16") else ["sigmoid", ROOT_MODEL.name])]
    for name in dict.fromkeys(["olmoe-1b-7b", LITE, "sigmoid", *rounded]):
        exact = None if name in rounded else {"rtol": 0, "atol": 0}
        hidden_TD, scores_TE = lab.tokens(name)
        for given_TE in (None, scores_TE):
            native_TD, native = lab.route(lab.layers(name), None, hidden_TD, given_TE)
            ours_TD, ours = lab.route(lab.layers(name), TOPK, hidden_TD, given_TE)
            assert torch.equal(native.map_TE, ours.map_TE), name
            torch.testing.assert_close(ours.weights_TE, native.weights_TE, **exact or {"rtol": 2e-6, "atol": 0})
            torch.testing.assert_close(ours_TD, native_TD, **exact or CLOSE)


@dataclass(frozen=True, kw_only=True)
class PromisesOnePair(TopK):
    def most_pairs(self, num_tokens: int, num_experts: int, context: RoutingContext) -> int:
        return 1


@law(1, 2)
def a_policy_that_chooses_more_pairs_than_it_states_is_refused(lab: Lab) -> None:
    """And loses none silently: the rows that are set aside are as many on every device."""
    hidden_TD, scores_TE = lab.tokens("sigmoid")
    told = ""
    try:
        lab.route(lab.layers("sigmoid"), PromisesOnePair(), hidden_TD, scores_TE)
    except RuntimeError as error:
        told = str(error)
    assert told == f"the policy chose {4 * len(hidden_TD)} pairs, more than its bound of 1", told


@law()
def the_reference_notices_experts_on_the_wrong_rank(lab: Lab) -> None:
    hidden_TD, _ = lab.tokens("olmoe-1b-7b", 33)
    output_TD, routing = lab.route(lab.layers("olmoe-1b-7b"), TOPK, hidden_TD)
    for seed, weights_TE in ((SEED + 1, routing.weights_TE), (SEED, routing.weights_TE.roll(1, dims=1))):
        assert DenseReference(lab.model("olmoe-1b-7b"), hidden_TD, seed).worst_error(output_TD, weights_TE) > 0.1


@law()
def permutations_sum_bfloat16_within_its_tolerance_with_weights_that_stay_float32(lab: Lab) -> None:
    hidden_TD = lab.tokens("olmoe-1b-7b")[0].bfloat16()
    reference = lab.reference("olmoe-1b-7b", hidden_TD)
    for spec, layer_backend in itertools.product(SOME[:4], PERMUTED):
        layers = lab.layers("olmoe-1b-7b", torch.bfloat16, layer_backend)
        output_TD, routing = lab.route(layers, spec, hidden_TD)
        assert routing.weights_TE.dtype == torch.float32
        assert_right(reference, output_TD, routing, f"{layer_backend} {spec}")


def permuted(tokens_TD: Tensor, probs_TE: Tensor, map_TE: Tensor, num_out_tokens: int) -> tuple[Tensor, ...]:
    """As Transformer Engine's kernel: as many rows as are asked for; those beyond the pairs are not written."""
    expert_N, token_N = map_TE.T.nonzero(as_tuple=True)
    rows_ND = tokens_TD.new_full((num_out_tokens, tokens_TD.shape[1]), torch.nan)
    probs_N = probs_TE.new_full((num_out_tokens,), torch.nan)
    rows_ND[: len(token_N)], probs_N[: len(token_N)] = tokens_TD[token_N], probs_TE[token_N, expert_N]
    row_TE = torch.full(map_TE.shape, -1).index_put((token_N, expert_N), torch.arange(len(token_N)))
    return rows_ND, probs_N, row_TE


def unpermuted(rows_ND: Tensor, row_TE: Tensor, restore_shape: torch.Size, **_: Any) -> Tensor:
    token_N, expert_N = (row_TE >= 0).nonzero(as_tuple=True)
    return rows_ND.new_zeros(restore_shape).index_add(0, token_N, rows_ND[row_TE[token_N, expert_N]])


def sorted_chunks(rows_ND: Tensor, sizes: Tensor, order: Tensor) -> Tensor:
    chunks = rows_ND.split(sizes.tolist())  # which refuses spare rows
    return torch.cat([chunks[place] for place in order.tolist()])


FUSED = {
    "HAVE_TE": True,
    "fused_permute": permuted,
    "fused_permute_with_probs": permuted,
    "fused_unpermute": unpermuted,
    "fused_sort_chunks_by_index": sorted_chunks,
    "fused_sort_chunks_by_index_with_probs": lambda rows_ND, probs_N, *how: (
        sorted_chunks(rows_ND, *how), sorted_chunks(probs_N, *how)
    ),
}  # fmt: skip


@law(1, 2)
def policies_wait_for_the_host_where_native_does(lab: Lab) -> None:
    """Rows are bounded until then: there are spare ones, which are never sent."""
    hidden_TD, scores_TE = lab.tokens()
    reference, alone = lab.reference(LITE, hidden_TD), lab.ranks.world_size == 1
    for permute in ("indexed", "megatron", "fused")[: 3 if lab.ranks.device.type == "cpu" else 2]:
        with mock.patch.multiple(megatron.moe_utils, create=True, **FUSED):
            # Built unfused: Megatron-Core would put the fused kernels' tensors onto a GPU.
            layer_backend = LayerBackend("grouped" if permute == "indexed" else "sequential")
            layers, spare = lab.new_stack(LITE, torch.float32, layer_backend).forms[None], []
            for form in layers:
                form.token_dispatcher.config.moe_permute_fusion = permute == "fused"
            dispatcher, gathered = layers.policy.token_dispatcher, []
            chosen, rows = dispatcher._only_chosen, components.first_rows

            def noted(num_pairs: int, hidden_ND: Tensor, *others: Any, chosen: Any = chosen, spare: Any = spare) -> Any:
                spare.append(len(hidden_ND) - num_pairs)
                gathered.append(num_pairs)  # noqa: B023
                return chosen(num_pairs, hidden_ND, *others)

            def by_count(rows_TD: Tensor, row_N: Tensor, count: Tensor, rows: Any = rows) -> Tensor:
                gathered.append(int(count))  # noqa: B023
                return rows(rows_TD, row_N, count)

            with (
                mock.patch.object(dispatcher, "_only_chosen", noted),
                mock.patch.object(components, "first_rows", by_count),
            ):
                for spec in (None, *POLICIES, *BATCH_WIDE):
                    gathered.clear()
                    assert_right(reference, *lab.route(layers, spec, hidden_TD, scores_TE), f"{permute} {spec}")
                    if permute == "indexed" and spec is not None:
                        assert len(gathered) == 2, f"{spec}: rows of chosen pairs alone are gathered"
                        assert gathered[0] == gathered[1], spec
        assert min(spare) == 0
        assert max(spare) > 0 or (permute == "megatron" and megatron.MEGATRON_VERSION.startswith("0.16"))
        policy, native = (one.token_dispatcher.cuda_sync_point for one in (layers.policy, layers.native))
        # On one rank rows are cut before they are sorted, where fused sorting lets native wait until behind it.
        assert policy == ("before_permutation_2" if alone else native) != "before_permutation_1"
        assert native == ({"fused": "before_finish"}.get(permute, policy) if alone else "before_ep_alltoall")


@law(1, 2)
def all_that_the_host_waits_for_its_device_is_clocked(lab: Lab) -> None:
    """Native and policies; on the CPU, whose values stand for a GPU's."""
    hidden_TD, scores_TE = lab.tokens()
    layers, clock, on_cpu = lab.layers(), clock_for(lab.ranks.device), lab.ranks.device.type == "cpu"
    for spec in (None, *POLICIES, *BATCH_WIDE):
        lab.route(layers, spec, hidden_TD, scores_TE)  # compiles
        before_us = clock.blocked_us
        with (
            watched_syncs(clock.blocking, "cpu") if on_cpu else clock.watched(),
            watched_waits(lambda: clock.is_blocked) if on_cpu else clock.unseen() as unseen,
        ):
            lab.route(layers, spec, hidden_TD, scores_TE)
        assert not unseen, f"{spec}: {unseen}"
        assert clock.blocked_us > before_us, f"{spec}: no layer of the all-to-all is without"


@law(1, 2)
def experts_alone_run_in_fp8_whatever_a_policy_chooses(lab: Lab) -> None:
    """With Megatron-Core's own dispatcher, ragged counts and experts without rows, on experts that stand in."""
    hidden_TD, scores_TE = lab.tokens("blocks", 40)
    hidden_TD = hidden_TD.bfloat16()
    reference, counts = lab.reference("blocks", hidden_TD), []
    with stand_ins():
        layers = lab.new_stack("blocks", torch.bfloat16, LayerBackend("sequential", fp8=True)).forms[None]
        for spec in (None, *(POLICIES[i] for i in (0, 1, 4, 5))):
            output_TD, routing = lab.route(layers, spec, hidden_TD, scores_TE)
            assert_right(reference, output_TD, routing, spec, "fp8_block")
            if spec is None:
                error = reference.worst_error(output_TD, routing.weights_TE)
                assert len(hidden_TD) == 0 or error > TOLERANCE["bfloat16"], error
            counts.extend(routing.map_TE.sum(dim=0).tolist())
    assert BlockExperts.ran_in_fp8 == [True] * 5
    assert not BlockExperts.is_in_fp8
    assert 0 in counts


def te_backends() -> list[LayerBackend]:
    """Transformer Engine's experts in bfloat16, and in FP8 where this GPU has it."""
    return [LayerBackend("te"), *([] if fp8_lacks() else [LayerBackend("te", fp8=True)])]


@law(with_te=True)
def experts_of_transformer_engine_compute_what_all_experts_would(lab: Lab) -> None:
    """Of ragged counts, with experts and whole batches without rows."""
    for layer_backend, num_tokens in itertools.product(te_backends(), (0, 7, 150)):
        hidden_TD, scores_TE = (whole[:num_tokens] for whole in lab.tokens("blocks", 150))
        hidden_TD = hidden_TD.bfloat16()
        layers, reference = lab.layers("blocks", torch.bfloat16, layer_backend), lab.reference("blocks", hidden_TD)
        dtype, counts = "fp8_block" if layer_backend.fp8 else "bfloat16", []
        for spec in (None, *(POLICIES[i] for i in (0, 1, 4, 5))):
            output_TD, routing = lab.route(layers, spec, hidden_TD, scores_TE)
            assert_right(reference, output_TD, routing, f"{layer_backend} {num_tokens} tokens, {spec}", dtype)
            counts.extend(routing.map_TE.sum(dim=0).tolist())
        assert 0 in counts
        assert not num_tokens or any(count % 16 for count in counts)


@law(with_te=True)
def native_in_fp8_is_megatrons_own_layer_under_its_own_context(lab: Lab) -> None:
    """Router, dispatcher and experts; ours are wrapped and filled in another way."""
    for layer_backend in te_backends():
        native = lab.layers("blocks", torch.bfloat16, layer_backend).native
        config = native.config
        own = MoELayer(config, megatron._submodules(16, use_te=True), layer_number=1, pg_collection=lab.groups)
        own.set_layer_number(1)
        own = own.to(lab.ranks.device).eval()
        own.shared_experts = native.shared_experts
        own.router.weight.copy_(native.router.weight)
        for ours, theirs in zip(native.experts.parameters(), own.experts.parameters(), strict=True):
            theirs.copy_(ours)
        hidden_TD = lab.tokens("blocks", 150)[0].bfloat16()
        ours_TD = run_layer(native, hidden_TD)[0]
        with megatron.get_fp8_context(config):
            theirs_TD = own(hidden_TD.unsqueeze(1))[0][:, 0]
        assert torch.equal(ours_TD, theirs_TD), layer_backend


class Choice(Policy):
    """A policy for tests that routes token t to t modulo (E + 1) experts: 0 to E of them."""

    name = "choice"

    def route(self, scores_TE: Tensor, context: RoutingContext, stats_SE: Tensor | None = None) -> Routing:
        num_tokens, num_experts = scores_TE.shape
        count_T1 = (torch.arange(num_tokens, device=scores_TE.device) % (num_experts + 1)).unsqueeze(1)
        map_TE = torch.arange(num_experts, device=scores_TE.device) < count_T1
        return weighted(scores_TE, map_TE, top_k_map(scores_TE, context), context)


@law()
def any_number_of_experts_per_token_from_none_to_all_works(lab: Lab) -> None:
    model = lab.model("sigmoid")
    for num_tokens in (9, 70):  # With 9 tokens the last experts get none.
        hidden_TD, scores_TE = lab.all_hidden(model, num_tokens), lab.all_scores(model, num_tokens)
        routed = lab.route(lab.layers("sigmoid"), Choice(), hidden_TD, scores_TE)
        assert_right(lab.reference("sigmoid", hidden_TD), *routed, f"T={num_tokens}")


# ---- What is routed --------------------------------------------------------------------------------------------------


@law()
def masked_padding_selects_nothing_and_changes_no_valid_token(lab: Lab) -> None:
    hidden_TD, scores_TE = lab.tokens("sigmoid")
    layers, reference = lab.layers("sigmoid"), lab.reference("sigmoid", hidden_TD)
    kept = len(hidden_TD) - 3  # The rank with the fewest tokens has six.
    valid_T = torch.arange(len(hidden_TD), device=hidden_TD.device) < kept
    for spec in POLICIES + BATCH_WIDE:
        output_TD, masked = lab.route(layers, spec, hidden_TD, scores_TE, valid_T)
        _, alone = lab.route(layers, spec, hidden_TD[:kept], scores_TE[:kept])
        assert not masked.map_TE[kept:].any(), str(spec)
        assert not masked.weights_TE[kept:].any(), str(spec)
        if spec.get("metric") != "random":  # Its keys are drawn for all rows.
            assert torch.equal(masked.map_TE[:kept], alone.map_TE), str(spec)
            assert torch.equal(masked.weights_TE[:kept], alone.weights_TE), str(spec)
        assert_right(reference, output_TD, masked, spec)


@law(2, 4)
def batch_wide_policies_decide_as_if_all_tokens_were_on_one_rank(lab: Lab) -> None:
    for name in (LITE, "sigmoid"):
        layers, model = lab.layers(name), lab.model(name)
        hidden_TD, scores_TE = lab.all_hidden(model, 31), lab.all_scores(model, 31)
        mine = lab.mine(31)
        requests = [torch.zeros(0, dtype=torch.int64)] * lab.ranks.world_size
        dist.all_gather_object(requests, lab.requests(mine.stop - mine.start).cpu(), group=lab.ranks.side_group)
        context = replace(lab.context(layers), request_id_T=torch.cat(requests).to(lab.ranks.device))
        for spec in (TOPK, *BATCH_WIDE):
            policy = make_policy(spec)
            whole = policy.route(scores_TE, context)
            _, routing = lab.route(layers, policy, hidden_TD[mine], scores_TE[mine])
            assert torch.equal(routing.map_TE, whole.map_TE[mine]), f"{name} {spec}"
            if name == LITE and spec != TOPK:  # Of 16 experts in groups 31 tokens may want them all.
                assert not torch.equal(whole.map_TE, top_k_map(scores_TE, context)), f"{spec} changes nothing"
                own = replace(context, request_id_T=lab.requests(mine.stop - mine.start))
                alone = policy.route(scores_TE[mine], own)
                differing = lab.summed((alone.map_TE != routing.map_TE).any().long())
                assert lab.ranks.world_size == 1 or int(differing), f"{spec}: the sum over ranks makes no difference"


@law()
def replayed_scores_take_the_place_of_the_gates_output(lab: Lab) -> None:
    layers, (hidden_TD, scores_TE) = lab.layers(), lab.tokens()
    original = megatron.TopKRouter.gating
    with mock.patch.object(megatron.TopKRouter, "gating", autospec=True, side_effect=original) as gate:
        _, routing = lab.route(layers, TOPK, hidden_TD, scores_TE)
    assert gate.call_count == 1, "the gate GEMM was not executed"
    assert torch.equal(routing.map_TE, make_policy(TOPK).route(scores_TE, lab.context(layers)).map_TE)


# ---- What is timed ---------------------------------------------------------------------------------------------------


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


def breakdown(lab: Lab, layers: Forms, policy: Policy | None = None, clock: Clock | None = None) -> dict[str, float]:
    """Microseconds per phase of one instrumented iteration of 16 tokens a rank, routed by the gate.

    Clock None = the device's own.
    """
    hidden_TD, _ = lab.tokens(num_tokens=16 * lab.ranks.world_size, even=True)
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


@law(1, 2)
def phases_are_exclusive_and_close_against_the_total(lab: Lab) -> None:
    times = breakdown(lab, lab.layers())
    expected = {"shared", "gate", "policy", "permute", "metadata", "dispatch", "experts", "combine"}
    waits = {"wait_metadata", "wait_dispatch", "wait_combine"} if lab.ranks.world_size > 1 else set()
    assert set(times) == {*expected, *waits, UNACCOUNTED, TOTAL}
    assert set(times) <= {*LAYER_PHASES, UNACCOUNTED, TOTAL}
    assert all(value >= 0 for value in times.values()), times
    covered = sum(value for phase, value in times.items() if phase != TOTAL)
    resolution_us = 1.0 if lab.ranks.device.type == "cpu" else 15.0  # an event's is half a microsecond
    assert abs(covered - times[TOTAL]) < resolution_us, f"phases {covered} us, total {times[TOTAL]} us"


# A method that is late, whose time that is, where the others then wait, and under which policy.
LATE = [
    ("router", "gating", "gate", "wait_metadata", None),
    ("router", "gating", "gate", "wait_policy", CountedSum()),
    ("token_dispatcher", "dispatch_preprocess", "permute", "wait_dispatch", None),
    ("token_dispatcher", "dispatch_postprocess", "permute", "wait_combine", None),
    ("experts", "forward", "experts", "wait_combine", None),
]


@law(2, 4, on_one=False)
def a_slow_rank_shows_as_waiting_on_the_others_in_the_right_place(lab: Lab) -> None:
    layers, slow, found = lab.layers(), lab.ranks.world_size - 1, []
    is_slow = lab.ranks.rank == slow
    for owner, method, phase, wait, policy in LATE:
        layer = layers.native if policy is None else layers.policy
        run = partial(breakdown, lab, layers, policy)
        passed = passing_where_late(lab.ranks.device, getattr(layer, owner), method, run, is_slow=is_slow)
        if passed != all_in(phase if is_slow else wait):  # Raised at the end, or the others would wait for it.
            found.append(f"rank {slow} late in {method}: {passed}")
    assert not found, found


@law(4, on_one=False)
def expert_parallel_groups_are_data_parallel_replicas(lab: Lab) -> None:
    hidden_TD, scores_TE = lab.tokens()
    whole, lab.groups = lab.groups, megatron.expert_parallel_groups(2, 60)
    try:
        assert lab.ep_group.size() == 2
        assert megatron.expert_parallel_groups(4, 60) is whole, "groups of a size are formed once"
        assert lab.ep_group.rank() == lab.ranks.rank % 2
        layers, reference = (
            lab.new_stack(LITE, torch.float32, LayerBackend()).forms[None],
            lab.reference(LITE, hidden_TD),
        )
        for spec in (None, {"name": "expanded_drop", "capacity_factor": 1.0}):
            assert_right(reference, *lab.route(layers, spec, hidden_TD, scores_TE), spec)
    finally:
        lab.forget()
