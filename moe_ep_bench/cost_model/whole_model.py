"""What one rank's pass of a whole model takes on a device that is not here, cut into legs as a measured pass is.

MoE layers are ``modelled``'s. What stands between them has a formula each over the figures of a device file
(``devices``), in microseconds. Phases are those of ``layer.phases``: (layer, phase) within a layer.

embedding  T rows gathered: 2 T D b bytes at the share of the bandwidth that permutation reaches
attention  projections, one GEMM after another: rooflines of 2 T I O operations and b (I O + T (I + O)) bytes;
           norms of queries and keys, or of latents, and rotary positions: what they read and write;
           core attention: the larger of its operations, at the device's ``attention_efficiency``, and of its bytes
dense      roofline of a gated FFN on T rows
rest       norms, 2 T D b bytes each, and residual additions, 3 T D b each: two of both in a layer, and the last norm
output     roofline of the output layer on P rows, a prompt's or request's last token each: its weights are read once

*Core attention at prefill.* Two GEMMs over each prompt's causal half, S^2 / 2 pairs of tokens: H S^2 (Q + V)
operations; queries, keys, values and output pass memory once. *At decode.* Each request's C tokens and its new one,
from a cache as engines keep it. Grouped queries: keys, with their positions, and values of G heads are read once,
b (C + 1) G (Q + V) bytes a request, with H (C + 1) 2 (Q + V) operations. Latent attention is absorbed: the cache holds
a latent of L numbers and a rotary key of P, which are read once for all heads, b (C + 1) (L + P) bytes, with
H (C + 1) 2 (2 L + P) operations; two projections a head take queries into the latent and outputs out of it.
Megatron-Core's own step, which ``run`` times, does more: its static cache holds keys without positions, which each step
gives to all of them anew, and expands a latent to the keys and values of all heads.

Nothing is in it for launches: little of a prefill of many tokens, but much of a decode step that is not replayed from a
graph, which comes out too fast by whatever they take. A GEMM of few rows takes what a tile of them does, as experts do:
on a device of little arithmetic a decode step's projections come out slow. Biases, sampling and what ``modelled``
leaves out are not in it either.

Shapes: T = tokens of the rank, P = prompts or requests, S = a prompt's length, C = tokens in the cache, D = hidden
size, I, O = what a projection takes and gives, H = heads, G = key-value heads, Q, V = size of a head's keys and values,
L, P = latent and rotary widths of latent attention, b = bytes per value.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from moe_ep_bench.cost_model.devices import Device, ffn_work
from moe_ep_bench.cost_model.layer import RankWork, layer_segments
from moe_ep_bench.models import ModelSpec
from moe_ep_bench.schema import MOE_REST, UNACCOUNTED, PhaseKey


@dataclass(frozen=True, eq=False)
class PassWork:
    """What one rank does in one pass: the prefill of its prompts, or one decode step of its requests.

    Attributes:
        prompt_lengths: tokens of each prompt; () at decode.
        num_requests: that add a token; 0 at prefill.
        context_length: C, tokens of each request in the cache; 0 at prefill.
        layers: by MoE layer that is built, what the rank does there.
    """

    prompt_lengths: tuple[int, ...]
    num_requests: int
    context_length: int
    layers: Mapping[int, RankWork]

    @property
    def num_tokens(self) -> int:
        """T."""
        return sum(self.prompt_lengths) + self.num_requests

    @property
    def num_last_tokens(self) -> int:
        """P, of which the output layer makes logits."""
        return len(self.prompt_lengths) + self.num_requests


def pass_segments(
    device: Device, model: ModelSpec, num_layers: int, work: PassWork, *, bytes_per_value: int = 2, **of_layers: Any
) -> list[tuple[PhaseKey, float]]:
    """Phases and microseconds of one pass in the order in which a measured one has them, for ``timeline.legs_of``.

    Those of a layer are (layer, name), as (3, "experts"). Stages without work take no time.

    Args:
        num_layers: that are built, the first ones of the model.
        of_layers: see ``layer_segments``; of every MoE layer.

    Raises:
        ValueError: the device's share for attention is not stated.
    """
    timed = _Formulas(device, model, work, bytes_per_value)
    found: list[tuple[PhaseKey, float]] = [(UNACCOUNTED, 0.0), ("embedding", timed.embedding_us)]
    for layer in range(num_layers):
        found += [
            ("rest", 0.0),
            ((layer, "rest"), timed.layer_rest_us / 2),
            ((layer, "attention"), timed.attention_us),
            ((layer, "rest"), timed.norm_us),
        ]
        if layer in work.layers:
            inner = layer_segments(device, model, work.layers[layer], bytes_per_value=bytes_per_value, **of_layers)
            found += [((layer, MOE_REST if phase == UNACCOUNTED else phase), time_us) for phase, time_us in inner]
        else:
            found.append(((layer, "dense"), timed.dense_us))
        found.append(((layer, "rest"), timed.layer_rest_us / 2 - timed.norm_us))
    return [*found, ("rest", timed.norm_us), ("output", timed.output_us), (UNACCOUNTED, 0.0)]


def outside_moe_us(device: Device, model: ModelSpec, work: PassWork, *, bytes_per_value: int = 2) -> float:
    """Microseconds of a pass through all of a model's layers that no MoE layer takes.

    Raises:
        ValueError: the device's share for attention is not stated.
    """
    timed = _Formulas(device, model, work, bytes_per_value)
    layers_us = model.num_layers * (timed.attention_us + timed.layer_rest_us)
    dense_us = (model.num_layers - model.num_moe_layers) * timed.dense_us
    return timed.embedding_us + layers_us + dense_us + timed.norm_us + timed.output_us


@dataclass(frozen=True)
class _Formulas:
    """The module's table, in microseconds."""

    device: Device
    model: ModelSpec
    work: PassWork
    value_bytes: int

    @property
    def embedding_us(self) -> float:
        return self.device.permute_us(2 * self._hidden_bytes)

    @property
    def norm_us(self) -> float:
        return self._moved_us(2 * self._hidden_bytes)

    @property
    def layer_rest_us(self) -> float:
        """Two norms and two residual additions."""
        return 2 * self.norm_us + 2 * self._moved_us(3 * self._hidden_bytes)

    @property
    def dense_us(self) -> float:
        sizes = self.model.hidden_size, self.model.dense_ffn_hidden_size or self.model.ffn_hidden_size
        return self.device.work_us(*ffn_work(*sizes, self.work.num_tokens, self.value_bytes))

    @property
    def output_us(self) -> float:
        assert self.model.vocab_size is not None
        return self._gemm_us(self.work.num_last_tokens, self.model.hidden_size, self.model.vocab_size)

    @property
    def attention_us(self) -> float:
        attention, work, value_bytes = self.model.attention, self.work, self.value_bytes
        assert attention is not None
        tokens, hidden = work.num_tokens, self.model.hidden_size
        form = attention.form(hidden, decodes=work.num_requests > 0)
        # Tokens whose keys and values are read, the new ones included.
        cached = sum(work.prompt_lengths) + work.num_requests * (work.context_length + 1)
        projections_us = sum(self._gemm_us(tokens, *sizes) for sizes in form.projections)
        elementwise_us = self._moved_us(2 * value_bytes * tokens * (form.normed + form.rotated))
        pairs = sum(length**2 / 2 for length in work.prompt_lengths)
        pairs += work.num_requests * (work.context_length + 1)
        core_bytes = value_bytes * (tokens * (form.queries + form.output) + cached * (form.keys + form.values))
        core_us = self.device.attention_us(2 * (form.queries + form.output) * pairs, core_bytes)
        return projections_us + elementwise_us + core_us

    @property
    def _hidden_bytes(self) -> int:
        """Of all tokens' hidden states."""
        return self.value_bytes * self.work.num_tokens * self.model.hidden_size

    def _gemm_us(self, rows: int, takes: int, gives: int, heads: int = 1) -> float:
        """Of ``heads`` GEMMs at once."""
        if rows == 0:
            return 0.0
        num_bytes = heads * self.value_bytes * (takes * gives + rows * (takes + gives))
        return self.device.work_us(2.0 * heads * rows * takes * gives, num_bytes, rows)

    def _moved_us(self, num_bytes: float) -> float:
        return self.device.work_us(0, num_bytes, 1)
