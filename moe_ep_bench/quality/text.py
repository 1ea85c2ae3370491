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
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moe_ep_bench.bench.point import CaseSpec
from moe_ep_bench.errors import naming
from moe_ep_bench.files import stable_hash
from moe_ep_bench.policies.contract import STAGES
from moe_ep_bench.quality.checkpoint import Checkpoint
from moe_ep_bench.quality.config import QualityExperiment, TextConfig
from moe_ep_bench.quality.routed import ForwardPass, RouterCall, Tables, judged_stage, pass_metrics, routed

_LOGITS_AT_ONCE = 2**24


class Costs(NamedTuple):
    """Costs of every token but a sequence's first, float32 [B, S - 1]."""

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
        checkpoint.check_length(config.sequence_length, "text.sequence_length")
        with naming("text.file"):
            tokens_BS = checkpoint.sequences(config.file, config.sequence_length, config.num_sequences)
        return cls(experiment, num_ranks, config, tokens_BS)

    @property
    def definition(self) -> dict[str, Any]:
        read = hashlib.sha256(json.dumps(self.tokens_BS.tolist()).encode()).hexdigest()[:16]
        return {"text": {"tokens": read, "batch_size": self.config.batch_size}}

    def describe(self) -> dict[str, Any]:
        return {"text": self.config.file.name, **self.config.model_dump(exclude={"file"})}

    @torch.inference_mode()
    def judge(self, model: Any) -> Callable[[CaseSpec], Tables]:
        """A function that reads the text under a case; ``model`` has its weights and is unpatched."""
        batches = [batch_BS.to(model.device) for batch_BS in self.tokens_BS.split(self.config.batch_size)]
        natives = [hidden_states(model, tokens_BS).cpu() for tokens_BS in batches]

        def judged(case: CaseSpec) -> Tables:
            tables: Tables = {"quality_routing": [], "quality": []}
            for number, (tokens_BS, native_BSD) in enumerate(zip(batches, natives, strict=True)):
                self._judge_batch(tables, model, case, number, tokens_BS, native_BSD.to(model.device))
            return tables

        return judged

    @torch.inference_mode()
    def _judge_batch(
        self, tables: Tables, model: Any, case: CaseSpec, number: int, tokens_BS: Tensor, native_BSD: Tensor
    ) -> None:
        """Add the rows of one batch: of its routing, and of its answers."""
        stage = judged_stage(case.policy, self.experiment.arrangement)

        def add_routing(call: RouterCall) -> None:
            # The unpatched model makes one choice; its loads depend on what is routed together.
            for read_as in STAGES if case.policy is None else (stage,):
                forward_pass = ForwardPass(read_as, call.forward_pass.valid_BS, read_as == "decode")
                metrics = pass_metrics(replace(call, forward_pass=forward_pass))
                place = {"batch": number, "stage": read_as, "layer": call.layer.number}
                tables["quality_routing"].append({**place, **metrics})

        # A random policy's draws for a batch must not depend on what was done before.
        seed = int(stable_hash([self.experiment.layer.seed, number])[:8], 16)
        how: Any = {"num_ranks": self.num_ranks, "arrangement": stage, "seed": seed}
        with routed(model, case.policy, **how, observe=add_routing):
            hidden_BSD = hidden_states(model, tokens_BS)
        costs = token_costs(model, hidden_BSD, native_BSD, tokens_BS)
        item = number * self.config.batch_size
        row = {"batch": number, "stage": stage, "num_tokens": costs.kl.shape[1]}
        tables["quality"] += [
            {**row, "item": item + place, "metric": metric, "value": float(cost_S.double().mean())}
            for metric, cost_BS in costs._asdict().items()
            for place, cost_S in enumerate(cost_BS)
        ]


def hidden_states(model: Any, tokens_BS: Tensor) -> Tensor:
    """Inputs of the model's output layer: [B, S, D]."""
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
