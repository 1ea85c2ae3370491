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
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from moe_ep_bench.kernels import compiled
from moe_ep_bench.layer.experts import DRAWS, seeded_generator
from moe_ep_bench.policies import Policy, Routing, RoutingContext
from moe_ep_bench.policies.contract import check_inputs
from moe_ep_bench.policies.selection import top_k_map
from moe_ep_bench.quality.families import Seat, find_seats
from moe_ep_bench.quality.passes import Arrangement, Pass, Phase


@dataclass(frozen=True, eq=False)
class Seen:
    """What one router did in one pass.

    Attributes:
        scores_TE: float32, of all tokens of the pass, padding included.
        own_TE: bool, what the model chose.
        routing: what was computed; padding rows are empty. None where no policy acted.
        context: what is so of all tokens.
    """

    seat: Seat
    what: Pass
    scores_TE: Tensor
    own_TE: Tensor
    routing: Routing | None
    context: RoutingContext


@contextlib.contextmanager
def routed(
    model: torch.nn.Module,
    policy: Policy | None,
    *,
    num_ranks: int = 1,
    arrangement: Arrangement = "as_run",
    acts_in: tuple[Phase, ...] | None = None,
    seed: int = 0,
    modality_BS: Tensor | None = None,
    look: Callable[[Seen], None] | None = None,
) -> Iterator[None]:
    """Let ``policy`` route in all MoE layers of ``model`` while the block lasts.

    Args:
        model: one of transformers' language models, in evaluation mode.
        policy: None only looks.
        num_ranks: virtual expert-parallel ranks; sequences are dealt to them.
        arrangement: see ``passes``.
        acts_in: the phases in which the policy acts, in others the model's own choice stands; None = its own phases
            (``Policy.acts_in``), or whatever the arrangement says.
        seed: of what random policies draw.
        modality_BS: int64, 1 = image, 0 = text, of the sequences that begin here; steps that go on with them are text.
            None = no token has a modality.
        look: is shown what every router did, pass by pass and layer by layer.

    Raises:
        ValueError: no known routers, or experts that cannot be shared among the ranks; from within the model's
            forward: scores that are no numbers, a mask that does not say what is padding, or a modality of other
            tokens than these.
    """
    seats = find_seats(model)
    for seat in seats:
        if seat.num_experts % num_ranks:
            raise ValueError(f"num_ranks: expected a divisor of the {seat.num_experts} experts, got {num_ranks}")
    if acts_in is None:
        told = policy is None or arrangement != "as_run"
        acts_in = ("prefill", "decode") if told else policy.acts_in
    patch = _Patch(seats, policy, num_ranks, arrangement, acts_in, seed, modality_BS, look)
    body: Any = model.base_model
    with contextlib.ExitStack() as stack:
        for hook in (
            body.register_forward_pre_hook(patch.begin, with_kwargs=True),
            body.register_forward_hook(patch.end),
            *(seat.router.register_forward_hook(patch.chooser(seat)) for seat in seats),
        ):
            stack.callback(hook.remove)
        for seat in seats:
            stack.enter_context(mock.patch.object(seat.experts, "forward", patch.computer(seat)))
        yield


def try_policies(seat: Seat, policies: Iterable[Policy], num_ranks: int, *, has_images: bool = False) -> None:
    """Route two tokens by every policy in the shape of a layer, which may have no weights yet.

    Args:
        has_images: whether tokens will have a modality.

    Raises:
        ValueError: naming the policy, and what it does not fit.
    """
    context = replace(
        seat.context(num_ranks),
        bias_E=None,  # a layer without weights has no values
        request_id_T=torch.zeros(2, dtype=torch.int64),
        modality_T=torch.zeros(2, dtype=torch.int64) if has_images else None,
        generator=torch.Generator(),
    )
    scores_TE = torch.rand(2, seat.num_experts, generator=torch.Generator().manual_seed(0))
    for policy in policies:
        try:
            policy.route(scores_TE, context)
        except ValueError as problem:
            raise ValueError(f"policies: {policy.name}: {problem}") from None


@dataclass(eq=False)
class _Patch:
    """State that the hooks share: the running pass, and what was chosen for experts that are not called yet."""

    seats: list[Seat]
    policy: Policy | None
    num_ranks: int
    arrangement: Arrangement
    acts_in: tuple[Phase, ...]
    seed: int
    modality_BS: Tensor | None
    look: Callable[[Seen], None] | None
    number: int = -1
    what: Pass | None = None
    chosen: dict[str, Routing | None] = field(default_factory=dict)
    computed: set[str] = field(default_factory=set)

    def begin(self, body: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        self.number += 1
        self.what = Pass.of(inspect.signature(body.forward).bind_partial(*args, **kwargs).arguments, self.arrangement)
        self.chosen.clear()
        self.computed.clear()

    def end(self, *_: Any) -> None:
        """Refuse a model that compiled or fused layers led around the patched modules."""
        missing = [seat.name for seat in self.seats if seat.name not in self.computed]
        if missing:
            raise RuntimeError(f"the model ran without its modules {', '.join(missing)}: expected unfused MoE layers")

    def chooser(self, seat: Seat) -> Callable[..., None]:
        def choose(router: torch.nn.Module, args: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
            assert self.what is not None
            logits_TE, _, ids_TK = output
            own_TE = torch.zeros_like(logits_TE, dtype=torch.bool).scatter(1, ids_TK, True)
            context = replace(seat.context(self.num_ranks), modality_T=self._modality(self.what))
            scores_TE = _settled(seat.scores(logits_TE), own_TE, context)
            routing = None
            if self.policy is not None and self.what.phase in self.acts_in:
                routing = self._route(self.policy, seat, scores_TE, context)
            if self.look is not None:
                self.look(Seen(seat, self.what, scores_TE, own_TE, routing, context))
            # Padding selects nothing under a policy; that alone is no change of what anybody reads.
            is_own = routing is None or torch.equal(routing.map_TE, own_TE & self.what.valid_T.unsqueeze(1))
            self.chosen[seat.name] = None if is_own else routing

        return choose

    def _modality(self, what: Pass) -> Tensor | None:
        """Of the tokens of a pass: int64 [T]."""
        if self.modality_BS is None:
            return None
        if what.valid_BS.shape == self.modality_BS.shape:
            return self.modality_BS.to(what.valid_T.device).flatten()
        if what.goes_on:
            return torch.zeros_like(what.step_T)
        raise ValueError(
            f"modality_BS: expected {list(what.valid_BS.shape)}, sequences and tokens of this pass, "
            f"got {list(self.modality_BS.shape)}"
        )

    def _route(self, policy: Policy, seat: Seat, scores_TE: Tensor, context: RoutingContext) -> Routing:
        """Every batch of the pass, as its ranks would route it together."""
        assert self.what is not None
        number = self.seats.index(seat)
        generators: dict[int, torch.Generator] = {}
        check_inputs(scores_TE, context)
        routing = Routing(torch.zeros_like(scores_TE, dtype=torch.bool), torch.zeros_like(scores_TE))
        for batch in self.what.batches(self.num_ranks):
            scores, contexts = [], []
            for rank, token_N in batch:
                if rank not in generators:
                    key = self.seed, DRAWS, self.number, number, rank
                    generators[rank] = seeded_generator(scores_TE.device, *key)
                scores.append(scores_TE[token_N])
                contexts.append(
                    replace(
                        context,
                        rank=rank,
                        request_id_T=self.what.sequence_T[token_N],
                        modality_T=None if context.modality_T is None else context.modality_T[token_N],
                        generator=generators[rank],
                    )
                )
            policy.check(scores[0], contexts[0])
            routings = compiled(policy, scores_TE.device).select_all(scores, contexts)
            for (_, token_N), of_rank in zip(batch, routings, strict=True):
                routing.map_TE[token_N] = of_rank.map_TE
                routing.weights_TE[token_N] = of_rank.weights_TE
        return routing

    def computer(self, seat: Seat) -> Callable[..., Tensor]:
        forward = seat.experts.forward

        def compute(hidden_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
            self.computed.add(seat.name)
            routing = self.chosen.pop(seat.name)
            if routing is None:
                return forward(hidden_TD, ids_TK, weights_TK)
            return _by_pairs(forward, hidden_TD, routing, weights_TK.dtype)

        return compute


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


def _settled(scores_TE: Tensor, own_TE: Tensor, context: RoutingContext) -> Tensor:
    """Scores whose top-k is the model's own choice also where scores tie."""
    tied_T = (top_k_map(scores_TE, context) != own_TE).any(dim=1)
    if not bool(tied_T.any()):
        return scores_TE
    ahead_TE = torch.nextafter(scores_TE, torch.full_like(scores_TE, torch.inf))
    return torch.where(tied_T.unsqueeze(1) & own_TE, ahead_TE, scores_TE)
