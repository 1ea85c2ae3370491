"""Read a forward pass of a language model as a policy sees it.

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

Shapes: B = sequences, S = tokens of each in this pass, T = B * S, R = ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from moe_ep_bench.errors import UserError
from moe_ep_bench.policies.contract import Phase, Policy
from moe_ep_bench.workload.batch import deal_sequences

Arrangement = Literal["as_run", "prefill", "decode"]
PHASES: tuple[Phase, ...] = get_args(Phase)


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
