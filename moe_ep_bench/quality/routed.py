"""Patch a policy into the routers of a Hugging Face model.

There are three hooks, and no modelling code of ours. Before the model's body runs, its arguments say what the pass is
(``passes``). After each router has run, its logits become scores, and the policy routes them as the ranks of an
expert-parallel engine would. Where the experts are called, they get one row for each (token, expert) pair that was
selected, with that one expert's id: so any number of experts per token works with every implementation of the experts,
and a pair that was dropped is in no table, is not computed and costs nothing. (A published patch of this kind
keeps the shape [T, K] by putting back the indices that it dropped: what its experts compute does not change.)

Where the policy leaves every token its own top-k, the experts are called as the model calls them: the answer is then
the unpatched one, bit for bit. What is added up from pairs is added in float32, expert by expert.

Ties: a router in bfloat16 gives many experts equal scores, and which of them ``torch.topk`` returns is its own affair.
The policy is shown scores in which the model's choice among equals is ahead by one unit in the last place, so that
top-k means what the model does.

Shapes: T = tokens of a pass, E = experts, K = top_k, D = hidden size, N = selected pairs.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from moe_ep_bench.errors import UserError
from moe_ep_bench.kernels import form_of
from moe_ep_bench.layer.experts import DRAWS, seeded_generator
from moe_ep_bench.policies import Policy, Routing, RoutingContext
from moe_ep_bench.policies.laser import LoadAwarePolicy
from moe_ep_bench.policies.selection import top_k_map
from moe_ep_bench.quality.families import MoELayer, find_moe_layers
from moe_ep_bench.quality.passes import PHASES, Arrangement, ForwardPass, Phase, RouterCall


@contextlib.contextmanager
def routed(
    model: torch.nn.Module,
    policy: Policy | None,
    *,
    num_ranks: int = 1,
    arrangement: Arrangement = "as_run",
    acts_in: tuple[Phase, ...] | None = None,
    seed: int = 0,
    observe: Callable[[RouterCall], None] | None = None,
) -> Iterator[None]:
    """Let ``policy`` route in all MoE layers of ``model`` while the block lasts.

    Args:
        model: one of transformers' language models, in evaluation mode.
        policy: None only observes.
        num_ranks: virtual expert-parallel ranks, a divisor of the experts; sequences are dealt to them.
        arrangement: see ``passes``.
        acts_in: the phases in which the policy acts, in others the model's own choice stands; None = its own phases
            (``Policy.acts_in``), or whatever the arrangement says.
        seed: of what random policies draw.
        observe: gets every call of a router, pass by pass and layer by layer.

    Raises:
        ValueError: no known routers, or groups that policies cannot follow; from within the model's forward: scores
            that are no numbers, or a mask that does not say what is padding.
    """
    layers = find_moe_layers(model)
    for layer in layers if policy else ():
        layer.check_policies()
    if acts_in is None:
        acts_in = policy.acts_in if policy and arrangement == "as_run" else PHASES
    patch = _Patch(layers, policy, num_ranks, arrangement, acts_in, seed, observe)
    body: Any = model.base_model
    with contextlib.ExitStack() as stack:
        for hook in (
            body.register_forward_pre_hook(patch.begin, with_kwargs=True),
            body.register_forward_hook(patch.end),
            *(layer.router.register_forward_hook(partial(patch.choose, layer)) for layer in layers),
        ):
            stack.callback(hook.remove)
        for layer in layers:
            compute = partial(patch.compute, layer, layer.experts.forward)
            stack.enter_context(mock.patch.object(layer.experts, "forward", compute))
        yield


def try_policies(layer: MoELayer, policies: Iterable[Policy], num_ranks: int) -> None:
    """Route two tokens by every policy in the shape of a layer, which may have no weights yet.

    Raises:
        ValueError: naming the policy, and what it does not fit.
    """
    layer.check_policies()
    context = replace(
        layer.context(num_ranks),
        bias_E=None,  # a layer without weights has no values
        request_id_T=torch.zeros(2, dtype=torch.int64),
        generator=torch.Generator(),
    )
    scores_TE = torch.rand(2, layer.num_experts, generator=torch.Generator().manual_seed(0))
    for policy in policies:
        try:
            policy.route(scores_TE, context)
        except ValueError as problem:
            raise UserError(f"policies: {policy.name}: {problem}") from None


@dataclass(eq=False)
class _Patch:
    """State that the hooks share: the running pass, and what was chosen for experts that are not called yet."""

    layers: list[MoELayer]
    policy: Policy | None
    num_ranks: int
    arrangement: Arrangement
    acts_in: tuple[Phase, ...]
    seed: int
    observe: Callable[[RouterCall], None] | None
    number: int = -1
    forward_pass: ForwardPass = field(init=False)
    chosen: dict[str, Routing | None] = field(default_factory=dict)
    computed: set[str] = field(default_factory=set)
    loads: dict[str, Tensor] = field(default_factory=dict)

    def begin(self, body: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        self.number += 1
        arguments = inspect.signature(body.forward).bind_partial(*args, **kwargs).arguments
        self.forward_pass = ForwardPass.of(arguments, self.arrangement)
        self.chosen.clear()
        self.computed.clear()

    def end(self, *_: Any) -> None:
        """Refuse a model that compiled or fused layers led around the patched modules."""
        missing = [layer.name for layer in self.layers if layer.name not in self.computed]
        if missing:
            raise RuntimeError(f"the model ran without its modules {', '.join(missing)}: expected unfused MoE layers")

    def choose(self, layer: MoELayer, router: Any, args: Any, output: tuple[Tensor, Tensor, Tensor]) -> None:
        """Route what the router has just scored."""
        logits_TE, _, ids_TK = output
        own_TE = torch.zeros_like(logits_TE, dtype=torch.bool).scatter(1, ids_TK, True)
        context = layer.context(self.num_ranks)
        scores_TE = settled(layer.scores(logits_TE), own_TE, context)
        routing = None
        if self.policy is not None and self.forward_pass.phase in self.acts_in:
            routing = self._route(self.policy, layer, scores_TE, context)
        if self.observe is not None:
            self.observe(RouterCall(layer, self.forward_pass, scores_TE, own_TE, routing, context))
        # Padding selects nothing under a policy; that alone is no change of what anybody reads.
        is_own = routing is None or torch.equal(routing.map_TE, own_TE & self.forward_pass.valid_T.unsqueeze(1))
        self.chosen[layer.name] = None if is_own else routing

    def _route(self, policy: Policy, layer: MoELayer, scores_TE: Tensor, context: RoutingContext) -> Routing:
        """Route every batch of the pass as its ranks would together."""
        # A rank's draws of a layer go on from batch to batch of the pass.
        key = self.seed, DRAWS, self.number, self.layers.index(layer)
        generators = [seeded_generator(scores_TE.device, *key, rank) for rank in range(self.num_ranks)]
        asked = replace(context, request_id_T=self.forward_pass.sequence_T, generator=generators[0])
        policy.in_layer(context.layer_fraction).check(scores_TE, asked)
        form = form_of(policy, scores_TE.device)
        routing = Routing(torch.zeros_like(scores_TE, dtype=torch.bool), torch.zeros_like(scores_TE))
        for batch in self.forward_pass.batches(self.num_ranks):
            scores = [scores_TE[token_N] for _, token_N in batch]
            contexts = [
                replace(
                    context,
                    rank=rank,
                    request_id_T=self.forward_pass.sequence_T[token_N],
                    generator=generators[rank],
                )
                for rank, token_N in batch
            ]
            load_RE = self._carried(policy, layer)
            if load_RE is not None:
                # What a rank, or all together, were given before this batch.
                told = [load_RE.sum(dim=0) if policy.load_scope == "all" else load_RE[one.rank] for one in contexts]
                contexts = [replace(one, load_E=load_E.clone()) for one, load_E in zip(contexts, told, strict=True)]
            routings = form.select_all(scores, contexts)
            for (_, token_N), of_rank in zip(batch, routings, strict=True):
                routing.map_TE[token_N] = of_rank.map_TE
                routing.weights_TE[token_N] = of_rank.weights_TE
            if load_RE is not None:
                for (rank, _), of_rank in zip(batch, routings, strict=True):
                    load_RE[rank] += of_rank.map_TE.sum(dim=0).to(load_RE)
        return routing

    def _carried(self, policy: Policy, layer: MoELayer) -> Tensor | None:
        """Pairs of each rank and expert since the block began, float64 [R, E]; None where the policy asks for none."""
        if not isinstance(policy, LoadAwarePolicy) or not policy.carry_loads:
            return None
        return self.loads.setdefault(layer.name, torch.zeros(self.num_ranks, layer.num_experts, dtype=torch.float64))

    def compute(
        self,
        layer: MoELayer,
        forward: Callable[..., Tensor],
        hidden_TD: Tensor,
        ids_TK: Tensor,
        weights_TK: Tensor,
    ) -> Tensor:
        """Call the experts with what was chosen, in place of their own ``forward``."""
        self.computed.add(layer.name)
        routing = self.chosen.pop(layer.name)
        if routing is None:
            return forward(hidden_TD, ids_TK, weights_TK)
        return _by_pairs(forward, hidden_TD, routing, weights_TK.dtype)


def _by_pairs(forward: Callable[..., Tensor], hidden_TD: Tensor, routing: Routing, dtype: torch.dtype) -> Tensor:
    """The weighted sum of the selected experts' outputs, [T, D]; each pair is a token of its own to the experts."""
    token_N, expert_N = routing.map_TE.nonzero(as_tuple=True)
    sum_TD = torch.zeros_like(hidden_TD, dtype=torch.float32)
    if not len(token_N):
        return sum_TD.to(hidden_TD.dtype)
    # The weight is applied here, in float32: in the experts it would be rounded once more before the sum.
    ones_N1 = torch.ones(len(token_N), 1, dtype=dtype, device=hidden_TD.device)
    output_ND = forward(hidden_TD[token_N], expert_N.unsqueeze(1), ones_N1).float()
    output_ND *= routing.weights_TE[token_N, expert_N].to(dtype).float().unsqueeze(1)
    # A token's first expert, then its second, and so on: no token twice in a sum, so that its order is no accident.
    place_N = routing.map_TE.cumsum(dim=1)[token_N, expert_N] - 1
    for place in range(int(place_N.max()) + 1):
        at_N = place_N == place
        sum_TD[token_N[at_N]] += output_ND[at_N]
    return sum_TD.to(hidden_TD.dtype)


def settled(scores_TE: Tensor, own_TE: Tensor, context: RoutingContext) -> Tensor:
    """Scores whose top-k is the model's own choice also where scores tie."""
    tied_T = (top_k_map(scores_TE, context) != own_TE).any(dim=1)
    if not bool(tied_T.any()):
        return scores_TE
    ahead_TE = torch.nextafter(scores_TE, torch.full_like(scores_TE, torch.inf))
    return torch.where(tied_T.unsqueeze(1) & own_TE, ahead_TE, scores_TE)
