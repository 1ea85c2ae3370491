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
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from moe_ep_bench.policies.contract import Phase, Policy
from moe_ep_bench.workload.batch import deal_sequences

Arrangement = Literal["as_run", "prefill", "decode"]
PHASES: tuple[Phase, ...] = get_args(Phase)


def judged_phase(policy: Policy | None, arrangement: Literal["auto", "prefill", "decode"]) -> Phase:
    """The phase in which known text is judged; auto = the first that the policy is for, prefill without a policy."""
    if arrangement != "auto":
        return arrangement
    return "prefill" if policy is None else policy.acts_in[0]


class RankTokens(NamedTuple):
    """Tokens that are routed together and live on one rank: int64 indices into the pass's T."""

    rank: int
    token_N: Tensor


class Pass:
    """One forward pass.

    Attributes:
        phase: what it is.
        goes_on: it goes on with sequences that an earlier pass began.
        num_steps: batches into which its tokens fall: its positions where each of them is a batch, else 1.
        valid_BS, valid_T: bool, False = padding.
        sequence_T: int64, the row of the pass that a token is from.
        step_T: int64, the batch that a token is routed in.
    """

    def __init__(self, phase: Phase, valid_BS: Tensor, by_position: bool, *, goes_on: bool = False) -> None:
        self.phase: Phase = phase
        self.goes_on = goes_on
        self.valid_BS, self.valid_T = valid_BS, valid_BS.flatten()
        num_sequences, length = valid_BS.shape
        token_T = torch.arange(num_sequences * length, device=valid_BS.device)
        self.num_steps = length if by_position else 1
        self.sequence_T = token_T // max(1, length)
        self.step_T = token_T % self.num_steps if by_position else torch.zeros_like(token_T)
        self._dealt: dict[int, list[list[RankTokens]]] = {}

    @staticmethod
    def of(arguments: Mapping[str, Any], arrangement: Arrangement) -> Pass:
        """Read a pass off the arguments that the model's body was called with.

        Raises:
            ValueError: an attention mask that does not say which tokens are padding.
        """
        tokens = arguments.get("input_ids")
        tokens = arguments.get("inputs_embeds") if tokens is None else tokens
        assert tokens is not None, "a model is called with input_ids or inputs_embeds"
        num_sequences, length = tokens.shape[:2]
        mask = arguments.get("attention_mask")
        if mask is None:
            valid_BS = torch.ones(num_sequences, length, dtype=torch.bool, device=tokens.device)
        elif isinstance(mask, Tensor) and mask.dim() == 2:
            valid_BS = mask[:, -length:].bool()  # the mask covers the cache too
        else:
            raise ValueError("attention_mask: expected two dimensions [sequences, tokens], which say what is padding")
        cache = arguments.get("past_key_values")
        goes_on = cache is not None and int(cache.get_seq_length()) > 0
        if arrangement != "as_run":
            return Pass(arrangement, valid_BS, arrangement == "decode", goes_on=goes_on)
        return Pass("decode" if goes_on else "prefill", valid_BS, False, goes_on=goes_on)

    def batches(self, num_ranks: int) -> list[list[RankTokens]]:
        """Which tokens are routed together, and of them which live on which rank; ranks without tokens are left out."""
        if num_ranks not in self._dealt:
            self._dealt[num_ranks] = self._deal(num_ranks)
        return self._dealt[num_ranks]

    def _deal(self, num_ranks: int) -> list[list[RankTokens]]:
        rank_B = torch.from_numpy(deal_sequences(self.valid_BS.sum(dim=1).cpu().numpy(), num_ranks))
        rank_T = rank_B.to(self.valid_BS.device)[self.sequence_T]
        place_T = self.step_T * num_ranks + rank_T
        token_V = self.valid_T.nonzero()[:, 0]
        place_V = place_T[token_V]
        order_V = place_V.argsort(stable=True)
        counts = torch.bincount(place_V, minlength=self.num_steps * num_ranks).tolist()
        batches: list[list[RankTokens]] = [[] for _ in range(self.num_steps)]
        for place, token_N in enumerate(token_V[order_V].split(counts)):
            if len(token_N):
                batches[place // num_ranks].append(RankTokens(place % num_ranks, token_N))
        return [batch for batch in batches if batch]
