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

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moe_ep_bench.bench.plan import CaseSpec
from moe_ep_bench.files import stable_hash
from moe_ep_bench.policies.capacity import IMAGE
from moe_ep_bench.quality.checkpoint import Checkpoint, redundant_prefixes, text_hash, text_sequences
from moe_ep_bench.quality.comparison import Judged, QualityComparison, Row
from moe_ep_bench.quality.config import QualityExperiment, TextConfig
from moe_ep_bench.quality.loads import pass_metrics
from moe_ep_bench.quality.passes import PHASES, Pass
from moe_ep_bench.quality.routed import Seen, routed, try_policies

_LOGITS_AT_ONCE = 2**24


class Costs(NamedTuple):
    """Of every token but a sequence's first, float32 [B, S - 1]."""

    cross_entropy: Tensor
    kl: Tensor
    agreement: Tensor


@dataclass(frozen=True, eq=False)
class TextComparison(QualityComparison):
    """Cases that read the same text in the same batches."""

    text: TextConfig
    tokens_BS: Tensor
    """All of the text that is read, int64 on the CPU."""

    @staticmethod
    def of(experiment: QualityExperiment, checkpoint: Checkpoint, text: TextConfig) -> TextComparison:
        """Check that the text fits the model, and that every policy can route it.

        Raises:
            ValueError: naming the key whose value does not fit.
        """
        prefix = text.image_prefix
        if prefix is None:
            checkpoint.check_length(text.sequence_length, "text.sequence_length")
        else:
            key = "text.image_prefix.tokens + text.sequence_length"
            checkpoint.check_length(prefix.tokens + text.sequence_length, key)
        try:
            tokens_BS = text_sequences(text.file, checkpoint.tokenizer, text.num_sequences, text.sequence_length)
        except ValueError as problem:
            raise ValueError(f"text.file: {problem}") from None
        comparison = TextComparison(experiment, checkpoint, text, tokens_BS)
        policies = experiment.make_policies()
        try:
            try_policies(checkpoint.skeleton[0], policies, comparison.ep_size, has_images=prefix is not None)
        except ValueError as problem:
            hint = "; text.image_prefix puts image tokens before the text" if "modality_T" in str(problem) else ""
            raise ValueError(f"{problem}{hint}") from None
        return comparison

    @property
    def num_image_tokens(self) -> int:
        """Of each sequence; they come first."""
        return 0 if self.text.image_prefix is None else self.text.image_prefix.tokens

    @cached_property
    def sequences(self) -> Tensor:
        """What the model reads, int64 [sequences, tokens]: the text, after synthetic image tokens if any."""
        prefix = self.text.image_prefix
        if prefix is None:
            return self.tokens_BS
        image_BP = redundant_prefixes(
            self.tokens_BS, prefix.tokens, prefix.num_patterns, prefix.pattern_length, prefix.seed
        )
        return torch.cat([image_BP, self.tokens_BS], dim=1)

    @cached_property
    def workload_hash(self) -> str:
        return text_hash(self.sequences)

    def asked(self) -> dict[str, Any]:
        images = {"image_tokens": self.num_image_tokens} if self.num_image_tokens else {}
        return {"text": {"tokens": self.workload_hash, "batch_size": self.text.batch_size, **images}}

    def facts(self) -> dict[str, Any]:
        return {"text": self.text.file.name, **self.text.model_dump(exclude={"file"})}

    @property
    def title(self) -> str:
        text = self.text
        size = f"{text.num_sequences} sequences of {text.sequence_length} tokens, {text.batch_size} at a time"
        images = f", each after {self.num_image_tokens} synthetic image tokens" if self.num_image_tokens else ""
        return f"{self.model.name}, EP {self.ep_size}, {text.file.name}, {size}{images}"

    @torch.inference_mode()
    def judge(self, model: Any, cases: Sequence[CaseSpec], tasks: Any = None) -> Iterator[Judged]:
        batches = [batch_BS.to(model.device) for batch_BS in self.sequences.split(self.text.batch_size)]
        natives = [hidden_states(model, tokens_BS)[:, self.num_image_tokens :].cpu() for tokens_BS in batches]
        for case in cases:
            judged = Judged(case, [], [])
            for number, (tokens_BS, native_BSD) in enumerate(zip(batches, natives, strict=True)):
                self._judge_batch(judged, model, number, tokens_BS, native_BSD.to(model.device))
            yield judged

    def _judge_batch(self, judged: Judged, model: Any, number: int, tokens_BS: Tensor, native_BSD: Tensor) -> None:
        """Add the rows of one batch."""
        case, phase = judged.case, self.phase(judged.case)

        def add_routing(seen: Seen) -> None:
            # The unpatched model makes one choice; its loads depend on what is routed together.
            for told in PHASES if case.policy is None else (phase,):
                metrics = pass_metrics(replace(seen, what=Pass(told, seen.what.valid_BS, told == "decode")))
                judged.routing.append({"batch": number, "phase": told, "layer": seen.seat.layer, **metrics})

        with routed(
            model,
            case.policy,
            num_ranks=self.ep_size,
            arrangement=phase,
            # A random policy's draws for a batch must not depend on what was done before.
            seed=int(stable_hash([self.experiment.layer.seed, number])[:8], 16),
            modality_BS=self._modality(tokens_BS),
            look=add_routing,
        ):
            hidden_BSD = hidden_states(model, tokens_BS)
        of_text = slice(self.num_image_tokens, None)
        costs = token_costs(model, hidden_BSD[:, of_text], native_BSD, tokens_BS[:, of_text])
        for place in range(len(tokens_BS)):
            row: Row = {"batch": number, "phase": phase, "item": number * self.text.batch_size + place}
            row["num_tokens"] = costs.kl.shape[1]
            for metric, cost_BS in costs._asdict().items():
                judged.scores.append({**row, "metric": metric, "value": float(cost_BS[place].double().mean())})

    def _modality(self, tokens_BS: Tensor) -> Tensor | None:
        """Of a batch's tokens; None without image tokens."""
        if self.text.image_prefix is None:
            return None
        modality_BS = torch.zeros_like(tokens_BS)
        modality_BS[:, : self.num_image_tokens] = IMAGE
        return modality_BS


def hidden_states(model: Any, tokens_BS: Tensor) -> Tensor:
    """What the model's output layer makes logits of: [B, S, D]."""
    return model.base_model(tokens_BS, use_cache=False).last_hidden_state


def token_costs(model: Any, hidden_BSD: Tensor, native_BSD: Tensor, tokens_BS: Tensor) -> Costs:
    """Compare answers with the unpatched model's.

    Args:
        hidden_BSD: ``hidden_states`` under a policy.
        native_BSD: of the unpatched model.
        tokens_BS: int64, the text.
    """
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
