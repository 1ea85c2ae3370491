"""Read a forward pass of a language model as a policy sees it, and say what a router's choice in it came to.

A policy is asked about tokens that an engine would route together, and is told on which rank each of them lives. A
model on one device knows neither: it sees [B, S] token ids. So every pass is read as one of two things.

- *prefill*: whole sequences at once. All valid tokens of the pass are one batch.
- *decode*: one step of B sequences that go on side by side. All valid tokens of the pass are one batch.

``as_run`` tells them apart by the cache: a pass that finds earlier tokens there is a step of decoding. To judge a
policy on text that is known in advance no step has to be run alone: attention looks back only, so that one pass over
whole sequences computes at each position what a step would, if the tokens at each *position*, of all sequences, are
routed as one batch (arXiv 2511.02237 evaluates so). That is the arrangement ``decode``; ``prefill`` takes every pass
as such.

Sequences are dealt to virtual ranks as workloads deal theirs: whole, as evenly in tokens as that allows. Padding is
left out before any policy looks, so that it selects nothing and counts in nothing.

Loads, drops and score mass are those of all virtual ranks together. Where the tokens of each position are a batch of
their own, they are means over these steps: a step waits for its own fullest expert, and reads the weights that it
activates itself.

Shapes: B = sequences, S = tokens of each in this pass, T = B * S, E = experts, R = ranks, P = steps.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from moe_ep_bench.errors import UserError
from moe_ep_bench.metrics import imbalance, routing_metrics
from moe_ep_bench.policies.contract import Phase, Policy, Routing, RoutingContext
from moe_ep_bench.quality.families import MoELayer
from moe_ep_bench.schema import QUALITY_ROUTING_SCHEMA
from moe_ep_bench.workload.batch import deal_sequences

Arrangement = Literal["as_run", "prefill", "decode"]
PHASES: tuple[Phase, ...] = get_args(Phase)
Row = dict[str, Any]
"""Values by column; columns that are absent are null."""
Tables = dict[str, list[Row]]
"""Rows by the name of their table in ``schema.TABLES``."""


def judged_phase(policy: Policy | None, arrangement: Literal["auto", "prefill", "decode"]) -> Phase:
    """The phase in which known text is judged; auto = the first that the policy is for, prefill without a policy."""
    if arrangement != "auto":
        return arrangement
    return "prefill" if policy is None else policy.acts_in[0]


class ForwardPass:
    """One forward pass.

    Attributes:
        phase: what it is.
        continues: it goes on with sequences that an earlier pass began.
        num_steps: batches into which its tokens fall: its positions where each of them is a batch, else 1.
        valid_BS, valid_T: bool, False = padding.
        sequence_T: int64, the row of the pass that a token is from.
        step_T: int64, the batch that a token is routed in.
    """

    def __init__(self, phase: Phase, valid_BS: Tensor, by_position: bool, *, continues: bool = False) -> None:
        self.phase: Phase = phase
        self.continues = continues
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
            ValueError: an attention mask that does not say which tokens are padding.
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
            raise UserError("attention_mask: expected two dimensions [sequences, tokens], which say what is padding")
        cache = arguments.get("past_key_values")
        continues = cache is not None and int(cache.get_seq_length()) > 0
        if arrangement != "as_run":
            return cls(arrangement, valid_BS, arrangement == "decode", continues=continues)
        return cls("decode" if continues else "prefill", valid_BS, False, continues=continues)

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
    """What one router did in one pass.

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
    """The metrics from ``num_steps`` on of ``schema.QUALITY_ROUTING_SCHEMA``."""
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
