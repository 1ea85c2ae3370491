"""Judge policies on a text: how far the answers are from the unpatched model's, and what the routing came to.

The text's sequences go through the unpatched model first, then through the same model under each policy, in the same
batches. Three costs are computed token by token:

- *cross-entropy*: of the text's next token under the model, in nats; its exponential is perplexity. The text's own
  noise is in it, so that small costs need long texts or paired differences.
- *KL*: of the model's distribution of the next token from the unpatched model's, sum p (log p - log q), in nats. It is
  0 only where nothing changed, and needs no text that is worth predicting.
- *agreement*: whether both find the same next token most likely, which greedy decoding would then take.

A whole text's last hidden states are small, its logits are not (a vocabulary of 150,000 takes 0.6 MB per token). So
the unpatched model's hidden states are kept, and logits are computed for a few tokens at a time.

Shapes: B = sequences of a batch, S = tokens of each, D = hidden size, V = vocabulary, N = tokens at a time.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moe_ep_bench.bench.plan import CaseSpec
from moe_ep_bench.errors import UserError
from moe_ep_bench.files import stable_hash
from moe_ep_bench.policies.capacity import IMAGE
from moe_ep_bench.quality.checkpoint import Checkpoint, text_sequences
from moe_ep_bench.quality.config import QualityExperiment, TextConfig
from moe_ep_bench.quality.passes import PHASES, ForwardPass, Row, Tables, judged_phase, pass_metrics
from moe_ep_bench.quality.routed import RouterCall, routed

_LOGITS_AT_ONCE = 2**24


class Costs(NamedTuple):
    """Of every token but a sequence's first, float32 [B, S - 1]."""

    cross_entropy: Tensor
    kl: Tensor
    agreement: Tensor


@dataclass(frozen=True, eq=False)
class Text:
    """A text, in the batches in which every case reads it; see ``session.QualityComparison.evaluated``.

    Attributes:
        tokens_BS: all of the text that is read, int64 on the CPU.
    """

    experiment: QualityExperiment
    num_ranks: int
    config: TextConfig
    tokens_BS: Tensor

    @classmethod
    def of(cls, experiment: QualityExperiment, num_ranks: int, checkpoint: Checkpoint, config: TextConfig) -> Text:
        """Check that the text fits the model. Raises ValueError: naming the key whose value does not fit."""
        length, images = config.sequence_length, 0 if config.image_prefix is None else config.image_prefix.tokens
        prefix_key = "text.image_prefix.tokens + " if images else ""
        checkpoint.check_length(images + length, f"{prefix_key}text.sequence_length")
        try:
            tokens_BS = text_sequences(config.file, checkpoint.tokenizer, config.num_sequences, length)
        except ValueError as problem:
            raise UserError(f"text.file: {problem}") from None
        return cls(experiment, num_ranks, config, tokens_BS)

    @property
    def num_image_tokens(self) -> int:
        """Of each sequence; they come first."""
        return 0 if self.config.image_prefix is None else self.config.image_prefix.tokens

    @cached_property
    def sequences(self) -> Tensor:
        """What the model reads, int64 [sequences, tokens]: the text, after synthetic image tokens if any.

        These are a row of patterns, each drawn from a few; patterns are tokens of the text, drawn at random. So they
        are redundant as an image's patches are, without anything to see.
        """
        prefix = self.config.image_prefix
        if prefix is None:
            return self.tokens_BS
        random = torch.Generator().manual_seed(prefix.seed)
        known_N = self.tokens_BS.unique()
        of_patterns_PL = torch.randint(len(known_N), (prefix.num_patterns, prefix.pattern_length), generator=random)
        per_sequence = -(-prefix.tokens // prefix.pattern_length)
        drawn_BK = torch.randint(prefix.num_patterns, (len(self.tokens_BS), per_sequence), generator=random)
        image_BP = known_N[of_patterns_PL][drawn_BK].flatten(1)[:, : prefix.tokens]
        return torch.cat([image_BP, self.tokens_BS], dim=1)

    @cached_property
    def fingerprint(self) -> str:
        """Of all tokens that are read."""
        return hashlib.sha256(json.dumps(self.sequences.tolist()).encode()).hexdigest()[:16]

    @property
    def definition(self) -> dict[str, Any]:
        images = {"image_tokens": self.num_image_tokens} if self.num_image_tokens else {}
        return {"text": {"tokens": self.fingerprint, "batch_size": self.config.batch_size, **images}}

    def describe(self) -> dict[str, Any]:
        return {"text": self.config.file.name, **self.config.model_dump(exclude={"file"})}

    @property
    def title(self) -> str:
        text = self.config
        size = f"{text.num_sequences} sequences of {text.sequence_length} tokens, {text.batch_size} at a time"
        images = f", each after {self.num_image_tokens} synthetic image tokens" if self.num_image_tokens else ""
        return f"{text.file.name}, {size}{images}"

    @torch.inference_mode()
    def judge(self, model: Any, cases: Sequence[CaseSpec]) -> Iterator[tuple[CaseSpec, Tables]]:
        """Read the text under one case after the other; ``model`` has its weights and is unpatched."""
        batches = [batch_BS.to(model.device) for batch_BS in self.sequences.split(self.config.batch_size)]
        natives = [hidden_states(model, tokens_BS)[:, self.num_image_tokens :].cpu() for tokens_BS in batches]
        for case in cases:
            tables: Tables = {"quality_routing": [], "quality": []}
            for number, (tokens_BS, native_BSD) in enumerate(zip(batches, natives, strict=True)):
                routing, costs = self._judge_batch(model, case, number, tokens_BS, native_BSD.to(model.device))
                tables["quality_routing"] += routing
                tables["quality"] += costs
            yield case, tables

    def _judge_batch(
        self, model: Any, case: CaseSpec, number: int, tokens_BS: Tensor, native_BSD: Tensor
    ) -> tuple[list[Row], list[Row]]:
        """The rows of one batch: of its routing, and of its answers."""
        routing: list[Row] = []
        phase = judged_phase(case.policy, self.experiment.arrangement)

        def add_routing(call: RouterCall) -> None:
            # The unpatched model makes one choice; its loads depend on what is routed together.
            for one in PHASES if case.policy is None else (phase,):
                read_so = ForwardPass(one, call.forward_pass.valid_BS, one == "decode")
                metrics = pass_metrics(replace(call, forward_pass=read_so))
                routing.append({"batch": number, "phase": one, "layer": call.layer.number, **metrics})

        modality_BS = torch.zeros_like(tokens_BS)
        modality_BS[:, : self.num_image_tokens] = IMAGE
        with routed(
            model,
            case.policy,
            num_ranks=self.num_ranks,
            arrangement=phase,
            # A random policy's draws for a batch must not depend on what was done before.
            seed=int(stable_hash([self.experiment.layer.seed, number])[:8], 16),
            modality_BS=modality_BS if self.num_image_tokens else None,
            observe=add_routing,
        ):
            hidden_BSD = hidden_states(model, tokens_BS)
        of_text = slice(self.num_image_tokens, None)
        costs = token_costs(model, hidden_BSD[:, of_text], native_BSD, tokens_BS[:, of_text])
        item = number * self.config.batch_size
        row = {"batch": number, "phase": phase, "num_tokens": costs.kl.shape[1]}
        return routing, [
            {**row, "item": item + place, "metric": metric, "value": float(cost_S.double().mean())}
            for metric, cost_BS in costs._asdict().items()
            for place, cost_S in enumerate(cost_BS)
        ]


def hidden_states(model: Any, tokens_BS: Tensor) -> Tensor:
    """What the model's output layer makes logits of: [B, S, D]."""
    return model.base_model(tokens_BS, use_cache=False).last_hidden_state


def token_costs(model: Any, hidden_BSD: Tensor, native_BSD: Tensor, tokens_BS: Tensor) -> Costs:
    """Compare answers to a text: ``hidden_states`` under a policy with the unpatched model's."""
    head = model.get_output_embeddings()
    num_sequences, length = tokens_BS.shape
    next_T = tokens_BS[:, 1:].reshape(-1)
    hidden_TD = hidden_BSD[:, :-1].reshape(len(next_T), -1)
    native_TD = native_BSD[:, :-1].reshape(len(next_T), -1)
    at_once = max(1, _LOGITS_AT_ONCE // head.weight.shape[0])
    parts: list[Tensor] = []
    for first in range(0, len(next_T), at_once):
        some = slice(first, first + at_once)
        log_q_NV = head(hidden_TD[some]).float().log_softmax(dim=-1)
        log_p_NV = head(native_TD[some]).float().log_softmax(dim=-1)
        cross_entropy_N = -log_q_NV.gather(1, next_T[some].unsqueeze(1))[:, 0]
        kl_N = (log_p_NV.exp() * (log_p_NV - log_q_NV)).sum(dim=1)
        agreement_N = (log_p_NV.argmax(dim=1) == log_q_NV.argmax(dim=1)).float()
        parts.append(torch.stack([cross_entropy_N, kl_N, agreement_N]))
    return Costs(*torch.cat(parts, dim=1).view(3, num_sequences, length - 1).cpu())
