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
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from moe_ep_bench.cost_model.devices import PRECISIONS, Device, ffn_work
from moe_ep_bench.cost_model.layer import RankWork, layer_segments
from moe_ep_bench.models import ModelSpec
from moe_ep_bench.schema import MOE_REST, UNACCOUNTED, PhaseKey


@dataclass(frozen=True, eq=False)
class PassWork:
    """What one rank does in one pass: the prefill of its prompts, or one decode step of its requests.

    Attributes:
        lengths: tokens of each prompt; at decode each token is a request's.
        context_length: C, tokens of each request in the cache; 0 at prefill.
        layers: by MoE layer that is built, what the rank does there.
    """

    lengths: tuple[int, ...]
    context_length: int = 0
    layers: Mapping[int, RankWork] = field(default_factory=dict)


def pass_segments(
    device: Device, model: ModelSpec, num_layers: int, work: PassWork, *, dtype: str = "bfloat16", **of_layers: Any
) -> list[tuple[PhaseKey, float]]:
    """Phases and microseconds of one pass in the order in which a measured one has them, for ``timeline.legs_of``.

    Those of a layer are (layer, name), as (3, "experts"). Stages without work take no time.

    Args:
        num_layers: that are built, the first ones of the model.
        dtype, of_layers: see ``layer_segments``; of every MoE layer.

    Raises:
        ValueError: the device's share for attention is not stated.
    """
    us = _outside_us(device, model, work, dtype)
    segments: list[tuple[PhaseKey, float]] = [(UNACCOUNTED, 0.0), ("embedding", us.embedding)]
    for layer in range(num_layers):
        segments += [
            ("rest", 0.0),
            ((layer, "rest"), us.layer_rest / 2),
            ((layer, "attention"), us.attention),
            ((layer, "rest"), us.norm),
        ]
        if layer in work.layers:
            inner = layer_segments(device, model, work.layers[layer], dtype=dtype, **of_layers)
            segments += [((layer, MOE_REST if phase == UNACCOUNTED else phase), time_us) for phase, time_us in inner]
        else:
            segments.append(((layer, "dense"), us.dense))
        segments.append(((layer, "rest"), us.layer_rest / 2 - us.norm))
    return [*segments, ("rest", us.norm), ("output", us.output), (UNACCOUNTED, 0.0)]


def outside_moe_us(device: Device, model: ModelSpec, work: PassWork, *, dtype: str = "bfloat16") -> float:
    """Microseconds of a pass through all of a model's layers that no MoE layer takes.

    Raises:
        ValueError: the device's share for attention is not stated.
    """
    us = _outside_us(device, model, work, dtype)
    layers_us = model.num_layers * (us.attention + us.layer_rest)
    return us.embedding + layers_us + (model.num_layers - model.num_moe_layers) * us.dense + us.norm + us.output


class _Outside(NamedTuple):
    """The module's table, in microseconds; ``layer_rest``: two norms and two residual additions."""

    embedding: float
    norm: float
    layer_rest: float
    attention: float
    dense: float
    output: float


def _outside_us(device: Device, model: ModelSpec, work: PassWork, dtype: str) -> _Outside:
    T, D, b = sum(work.lengths), model.hidden_size, PRECISIONS[dtype].hidden_bytes
    assert model.attention is not None
    assert model.vocab_size is not None

    def gemm_us(rows: int, takes: int, gives: int, heads: int = 1) -> float:
        """Of ``heads`` GEMMs at once."""
        num_bytes = heads * b * (takes * gives + rows * (takes + gives))
        return device.work_us(2.0 * heads * rows * takes * gives, num_bytes, rows) if rows else 0.0

    def moved_us(num_bytes: float) -> float:
        return device.work_us(0, num_bytes, 1)

    decodes = work.context_length > 0
    form = model.attention.form(D, decodes=decodes)
    # Tokens whose keys and values are read, the new ones included, and pairs of tokens that attend.
    cached = T * (work.context_length + 1)
    pairs = cached if decodes else sum(length**2 / 2 for length in work.lengths)
    core_bytes = b * (T * (form.queries + form.output) + cached * (form.keys + form.values))
    attention_us = (
        sum(gemm_us(T, *sizes) for sizes in form.projections)
        + moved_us(2 * b * T * (form.normed + form.rotated))
        + device.attention_us(2 * (form.queries + form.output) * pairs, core_bytes)
    )
    norm_us = moved_us(2 * T * D * b)
    return _Outside(
        embedding=device.permute_us(2 * T * D * b),
        norm=norm_us,
        layer_rest=2 * norm_us + 2 * moved_us(3 * T * D * b),
        attention=attention_us,
        dense=device.work_us(*ffn_work(D, model.dense_ffn_hidden_size or model.ffn_hidden_size, T, b)),
        output=gemm_us(T if decodes else len(work.lengths), D, model.vocab_size),
    )
