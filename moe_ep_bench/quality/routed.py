"""Patch a policy into the routers of a Hugging Face model, and say what its routing came to.

A policy is asked about tokens that an engine would route together, and is told on which rank each of them lives. A
model on one device knows neither: it sees [B, S] token ids. So every pass is read as one of two things.

- *prefill*: whole sequences at once. All valid tokens of the pass are one batch.
- *decode*: one step of B sequences that go on side by side. All valid tokens of the pass are one batch.

``as_run`` tells them apart by the cache: a pass that finds earlier tokens there is a step of decoding. To judge a
policy on text that is known in advance no step has to be run alone: attention looks back only, so that one pass over
whole sequences computes at each position what a step would, if the tokens at each *position*, of all sequences, are
routed as one batch (arXiv 2511.02237 evaluates so). That is the arrangement ``decode``; ``prefill`` takes every pass
as such. Sequences are dealt to virtual ranks as workloads deal theirs: whole, as evenly in tokens as that allows.
Padding is left out before any policy looks, so that it selects nothing and counts in nothing.

There are three hooks, and no modelling code of ours. Before the model's body runs, its arguments say what the pass is.
After each router has run, its logits become scores, and the policy routes them as the ranks of an expert-parallel
engine would. Where the experts are called, they get one row for each (token, expert) pair that was selected, with that
one expert's id: so any number of experts per token works with every implementation of the experts, and a pair that was
dropped is in no table, is not computed and costs nothing. (A published patch of this kind keeps the shape [T, K] by
putting back the indices that it dropped: what its experts compute does not change.)

Where the policy leaves every token its own top-k, the experts are called as the model calls them: the answer is then
the unpatched one, bit for bit. What is added up from pairs is added in float32, expert by expert.

Shapes: B = sequences, S = tokens of each in this pass, T = B * S, E = experts, K = top_k, R = ranks, P = steps, D =
hidden size, N = selected pairs.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal
from unittest import mock

import torch
from torch import Tensor

from moe_ep_bench.errors import UserError, naming
from moe_ep_bench.kernels import form_of
from moe_ep_bench.layer.experts import DRAWS, seeded_generator
from moe_ep_bench.metrics import imbalance, routing_metrics
from moe_ep_bench.policies.contract import STAGES, Policy, Routing, RoutingContext, Stage
from moe_ep_bench.policies.selection import TopK
from moe_ep_bench.quality.checkpoint import MoELayer, find_moe_layers
from moe_ep_bench.schema import QUALITY_ROUTING_SCHEMA
from moe_ep_bench.workload.batch import deal_sequences

Arrangement = Literal["as_run", "prefill", "decode"]
Row = dict[str, Any]
"""Values by column; columns that are absent are null."""
Tables = dict[str, list[Row]]
"""Rows by the name of their table in ``schema.TABLES``."""


def judged_stage(policy: Policy | None, arrangement: Literal["auto", "prefill", "decode"]) -> Stage:
    """The stage in which known text is judged; auto = the first that the policy is for, prefill without a policy."""
    if arrangement != "auto":
        return arrangement
    return "prefill" if policy is None else policy.acts_in[0]


# Where a model's body takes the keys and values of earlier tokens: in transformers from 5.24 on, and before.
_CACHES = ("cache", "past_key_values")


def _num_cached(arguments: Mapping[str, Any]) -> int:
    """Earlier tokens that a pass finds in its cache; ``arguments`` has all that its body could be called with.

    Raises:
        ValueError: nothing says so: a prompt cannot be told from a step of decoding.
    """
    there = [name for name in _CACHES if name in arguments]
    given = [arguments[name] for name in there if arguments[name] is not None]
    if not there or not all(hasattr(cache, "get_seq_length") for cache in given):
        got = ", ".join(type(cache).__name__ for cache in given) or "neither"
        raise UserError(
            f"{' or '.join(_CACHES)}: expected a cache of transformers' that knows its length, which tells prompts "
            f"from steps of decoding; got {got}"
        )
    return max((int(cache.get_seq_length()) for cache in given), default=0)


class ForwardPass:
    """One forward pass.

    Attributes:
        stage: what it is.
        num_steps: batches into which its tokens fall: its positions where each of them is a batch, else 1.
        valid_BS, valid_T: bool, False = padding.
        sequence_T: int64, the row of the pass that a token is from.
        step_T: int64, the batch that a token is routed in.
    """

    def __init__(self, stage: Stage, valid_BS: Tensor, by_position: bool) -> None:
        self.stage: Stage = stage
        self.valid_BS, self.valid_T = valid_BS, valid_BS.flatten()
        num_sequences, length = valid_BS.shape
        token_T = torch.arange(num_sequences * length, device=valid_BS.device)
        self.num_steps = length if by_position else 1
        self.sequence_T = token_T // max(1, length)
        self.step_T = token_T % self.num_steps if by_position else torch.zeros_like(token_T)
        self._batches: dict[int, list[list[tuple[int, Tensor]]]] = {}

    @classmethod
    def of(cls, arguments: Mapping[str, Any], arrangement: Arrangement) -> ForwardPass:
        """Read a pass off the arguments that the model's body was called with.

        Raises:
            ValueError: an attention mask that does not say which tokens are padding; ``as_run``, arguments that do not
                say whether there are earlier tokens.
        """
        tokens = arguments.get("input_ids")
        tokens = arguments.get("inputs_embeds") if tokens is None else tokens
        assert tokens is not None, "a model is called with input_ids or inputs_embeds"
        mask = arguments.get("attention_mask")
        if mask is None:
            valid_BS = torch.ones(tokens.shape[:2], dtype=torch.bool, device=tokens.device)
        elif isinstance(mask, Tensor) and mask.dim() == 2:
            valid_BS = mask[:, -tokens.shape[1] :].bool()  # the mask covers the cache too
        else:
            raise UserError("expected two dimensions [sequences, tokens], which say what is padding", "attention_mask")
        if arrangement != "as_run":
            return cls(arrangement, valid_BS, arrangement == "decode")
        return cls("decode" if _num_cached(arguments) > 0 else "prefill", valid_BS, False)

    def batches(self, num_ranks: int) -> list[list[tuple[int, Tensor]]]:
        """Which tokens are routed together: a batch lists each rank that has tokens with their int64 indices in T."""
        if num_ranks in self._batches:  # by an earlier layer
            return self._batches[num_ranks]
        rank_B = torch.from_numpy(deal_sequences(self.valid_BS.sum(dim=1).cpu().numpy(), num_ranks))
        rank_T = rank_B.to(self.valid_BS.device)[self.sequence_T]
        token_V = self.valid_T.nonzero()[:, 0]
        place_V = (self.step_T * num_ranks + rank_T)[token_V]
        counts = torch.bincount(place_V, minlength=self.num_steps * num_ranks).tolist()
        batches: list[list[tuple[int, Tensor]]] = [[] for _ in range(self.num_steps)]
        for place, token_N in enumerate(token_V[place_V.argsort(stable=True)].split(counts)):
            if len(token_N):
                batches[place // num_ranks].append((place % num_ranks, token_N))
        self._batches[num_ranks] = [batch for batch in batches if batch]
        return self._batches[num_ranks]


@dataclass(frozen=True, eq=False)
class RouterCall:
    """The routing of one router in one pass.

    Attributes:
        scores_TE: float32, of all tokens of the pass, padding included; their top-k is what the model chose.
        own_TE: bool, what the model chose.
        routing: what was computed; padding rows are empty. None where no policy acted.
        context: what is so of all tokens.
    """

    layer: MoELayer
    forward_pass: ForwardPass
    scores_TE: Tensor
    own_TE: Tensor
    routing: Routing | None
    context: RoutingContext


def pass_metrics(call: RouterCall) -> dict[str, Any]:
    """The metrics from ``num_steps`` on of ``schema.QUALITY_ROUTING_SCHEMA``.

    Loads, drops and score mass are those of all virtual ranks together, means over steps: a step waits for its own
    fullest expert, and reads the weights that it activates itself.
    """
    forward_pass, num_ranks = call.forward_pass, call.context.num_ranks
    valid_T = forward_pass.valid_T
    own_TE = call.own_TE[valid_T]
    map_TE = own_TE if call.routing is None else call.routing.map_TE[valid_T]
    found = routing_metrics(Routing(map_TE, map_TE), call.scores_TE[valid_T], call.context)
    load_PE = torch.zeros(forward_pass.num_steps, map_TE.shape[1], dtype=torch.float64, device=map_TE.device)
    load_PE = load_PE.index_add_(0, forward_pass.step_T[valid_T], map_TE.double()).cpu().numpy()
    load_PE = load_PE[load_PE.sum(axis=1) > 0]  # padding may leave steps empty, and a policy may drop all
    load_PRL = load_PE.reshape(-1, num_ranks, load_PE.shape[1] // num_ranks)
    activated_PR = (load_PRL > 0).sum(axis=2)
    by_step = {
        "peak_load": imbalance(load_PE),
        "rank_peak_load": imbalance(load_PRL.sum(axis=2)),
        "activated_experts": activated_PR.sum(axis=1),
        "activated_experts_fullest_rank": activated_PR.max(axis=1, initial=0),
    }
    values = found | {name: float(step_P.mean()) if len(step_P) else 0.0 for name, step_P in by_step.items()}
    values["num_steps"] = forward_pass.num_steps
    names = QUALITY_ROUTING_SCHEMA.names
    return {name: values[name] for name in names[names.index("num_steps") :]}


# ---- the patch -----------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def routed(
    model: torch.nn.Module,
    policy: Policy | None,
    *,
    num_ranks: int = 1,
    arrangement: Arrangement = "as_run",
    acts_in: tuple[Stage, ...] | None = None,
    seed: int = 0,
    observe: Callable[[RouterCall], None] | None = None,
) -> Iterator[None]:
    """Let ``policy`` route in all MoE layers of ``model`` while the block lasts.

    Args:
        model: one of transformers' language models, in evaluation mode.
        policy: None only observes.
        num_ranks: virtual expert-parallel ranks, a divisor of the experts; sequences are dealt to them.
        arrangement: see the module.
        acts_in: the stages in which the policy acts, in others the model's own choice stands; None = its own stages
            (``Policy.acts_in``), or whatever the arrangement says.
        seed: of what random policies draw.
        observe: gets every call of a router, pass by pass and layer by layer.

    Raises:
        ValueError: no known routers; from within the model's forward: scores that are no numbers, or a mask that does
            not say what is padding.
    """
    layers = find_moe_layers(model)
    if acts_in is None:
        acts_in = policy.acts_in if policy and arrangement == "as_run" else STAGES
    router = None if policy is None else PolicyRouter(policy)
    patch = _Patch(layers, router, num_ranks, arrangement, acts_in, seed, observe)
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
    context = replace(
        layer.context(num_ranks),
        bias_E=None,  # a layer without weights has no values
        request_id_T=torch.zeros(2, dtype=torch.int64),
        generator=torch.Generator(),
    )
    scores_TE = torch.rand(2, layer.num_experts, generator=torch.Generator().manual_seed(0))
    for policy in policies:
        with naming(f"policies: {policy.name}"):
            policy.route(scores_TE, context)


# Of a sum of scores, whose terms are float32.
MASS_ROUNDING = 1e-5


def impossible(policy: Policy, layer: MoELayer, scores_TE: Tensor, own_TE: Tensor, map_TE: Tensor) -> str | None:
    """Why a policy cannot have chosen ``map_TE`` where the model chose ``own_TE``, or None.

    ``topk`` changes nothing. Without a bias or groups the top-k are the best scores, so that as many experts or fewer
    hold no more mass.
    """
    if isinstance(policy, TopK):
        changed = int((map_TE != own_TE).any(dim=1).sum())
        return f"topk changed the choice of {changed:,} tokens, expected none" if changed else None
    if layer.spec.selection_bias or layer.groups is not None:
        return None
    if policy.in_layer(layer.fraction).most_experts(layer.num_experts, layer.context(1)) > layer.top_k:
        return None
    own, kept = (float(scores_TE.masked_fill(~chosen_TE, 0).sum(dtype=torch.float64)) for chosen_TE in (own_TE, map_TE))
    return (
        f"{kept / own:.4f} of the top-k's mass kept, expected at most 1" if kept > own * (1 + MASS_ROUNDING) else None
    )


class PolicyRouter:
    """A policy in the place of a model's routers, with what it carries from batch to batch."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.loads: dict[str, Tensor] = {}
        """Carried loads by layer name: pairs so far of each rank and expert, float64 [R, E]."""

    def route(self, layer: MoELayer, scores: list[Tensor], contexts: list[RoutingContext]) -> list[Routing]:
        """Route a batch: of every rank that has tokens its scores, float32 [T, E], and its context."""
        form, load_RE = form_of(self.policy, scores[0].device), None
        if getattr(self.policy, "carry_loads", False):
            zeros_RE = scores[0].new_zeros(contexts[0].num_ranks, layer.num_experts, dtype=torch.float64)
            load_RE = self.loads.setdefault(layer.name, zeros_RE)
            contexts = [replace(context, load_E=load_RE[context.rank].clone()) for context in contexts]
        self.policy.in_layer(layer.fraction).check(scores[0], contexts[0])
        # Statistics draw nothing, so that a rank's generator serves both steps.
        of_ranks = (form.stats(*rank) for rank in zip(scores, contexts, strict=True))
        stats = [stats_SE for stats_SE in of_ranks if stats_SE is not None]
        stats_SE = torch.stack(stats).sum(dim=0) if stats else None
        routings = [form.select(*rank, stats_SE) for rank in zip(scores, contexts, strict=True)]
        if load_RE is not None:
            for context, routing in zip(contexts, routings, strict=True):
                load_RE[context.rank] += routing.map_TE.sum(dim=0).to(load_RE)
        return routings


@dataclass(eq=False)
class _Patch:
    """State that the hooks share: the running pass, and what was chosen for experts that are not called yet."""

    layers: list[MoELayer]
    router: PolicyRouter | None
    num_ranks: int
    arrangement: Arrangement
    acts_in: tuple[Stage, ...]
    seed: int
    observe: Callable[[RouterCall], None] | None
    number: int = -1
    forward_pass: ForwardPass = field(init=False)
    chosen: dict[str, Routing | None] = field(default_factory=dict)
    computed: set[str] = field(default_factory=set)

    def begin(self, body: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        self.number += 1
        bound = inspect.signature(body.forward).bind_partial(*args, **kwargs)
        bound.apply_defaults()
        arguments = {**bound.arguments, **kwargs}  # what a body takes by ``**kwargs`` too
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
        (scores_TE, own_TE), context = layer.choice(logits_TE, ids_TK), layer.context(self.num_ranks)
        routing = None
        if self.router is not None and self.forward_pass.stage in self.acts_in:
            routing = self._route(layer, scores_TE, context)
            own_valid_TE = own_TE & self.forward_pass.valid_T.unsqueeze(1)
            if problem := impossible(self.router.policy, layer, scores_TE, own_valid_TE, routing.map_TE):
                raise RuntimeError(f"{layer.name}: {problem}")
        if self.observe is not None:
            self.observe(RouterCall(layer, self.forward_pass, scores_TE, own_TE, routing, context))
        # Padding selects nothing under a policy; that alone is no change of what anybody reads.
        is_own = routing is None or torch.equal(routing.map_TE, own_TE & self.forward_pass.valid_T.unsqueeze(1))
        self.chosen[layer.name] = None if is_own else routing

    def _route(self, layer: MoELayer, scores_TE: Tensor, context: RoutingContext) -> Routing:
        """Route every batch of the pass as its ranks would together."""
        assert self.router is not None
        # A rank's draws of a layer go on from batch to batch of the pass.
        key = self.seed, DRAWS, self.number, self.layers.index(layer)
        generators = [seeded_generator(scores_TE.device, *key, rank) for rank in range(self.num_ranks)]
        routing = Routing(torch.zeros_like(scores_TE, dtype=torch.bool), torch.zeros_like(scores_TE))
        for batch in self.forward_pass.batches(self.num_ranks):
            scores = [scores_TE[token_N] for _, token_N in batch]
            requests = [self.forward_pass.sequence_T[token_N] for _, token_N in batch]
            contexts = [
                replace(context, rank=rank, request_id_T=request_id_N, generator=generators[rank])
                for (rank, _), request_id_N in zip(batch, requests, strict=True)
            ]
            for (_, token_N), of_rank in zip(batch, self.router.route(layer, scores, contexts), strict=True):
                routing.map_TE[token_N] = of_rank.map_TE
                routing.weights_TE[token_N] = of_rank.weights_TE
        return routing

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
