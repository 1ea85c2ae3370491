"""Model what one rank's run of a layer, or pass of a whole model, takes on a device that is not here.

It is cut into legs as a measured one is. Each phase has a formula over the figures of a device file (``devices``), in
microseconds. *Phases of an MoE layer:*

gate      roofline of T x D times D x E: 2 T D E operations; b (T D + D E) + 4 T E bytes; or the device's own figure of
          a gate in float32
policy    a least time + T E scores x picoseconds per score: of the model's own top-k by one kernel (Megatron-Core's
          several in ``h200-sxm-measured``), or of Token Drop by its kernels, which stands for all but
          ``devices.SLOW_POLICIES``
permute   bytes / (memory bandwidth x share that permutation reaches), of four steps (below). The middle two only where
          L > 1 and there are other ranks, or Megatron-Core's fused kernels sort on one rank too
metadata  nothing: host syncs and counting are left out
experts   overhead of a pass + the sum over local experts of the roofline of a gated FFN on its rows m:
          6 m W F operations; b (3 W F + m (2 W + 6 F)) bytes: the weights of an expert that has rows, and rows in
          and out of two GEMMs with an activation between them; Transformer Engine's passes besides
          (``devices.te_bytes``). Measured times (``expert_table``) give
          all of it, the middle two steps of the permutation included
shared    roofline of a gated FFN on T rows, with D and S in place of W and F; at the end its output is added to
          the routed experts', 3 T D b bytes through memory

*The four steps of permutation* go by who dispatches, and by the device's ``permute``:

dispatch            gathered for sending  sorted as rows arrive  put back  summed per token at the end
all-to-all          2 N W b               2 M W b                2 M W b   (N + T) W b
the same, fused     (T + N) W b           2 M W b                2 M W b   (N + T) W b
a copy per rank     none                  2 M W s                (M + A) W b  none
the same, fused     none                  (A + M) W s            (M + A) W b  none
a copy per pair     none                  none                   none      none

N are the rows chosen, not those that a policy may choose. Fused kernels read a token's row once and write it for each
of its experts. DeepEP's normal kernels read tokens as they lie; a rank gets A of them, once each, and gives its experts
a row for each pair: that is sorting, and their sums go back. Its low-latency kernels write rows where experts read
them. The first line is this package's permutation by index (``layer.components``); fused steps are Megatron-Core's with
``moe_permute_fusion`` (Transformer Engine's moe_permute, moe_sort_chunks_by_index and moe_unpermute).

The layer has grouped experts, or Transformer Engine's (``devices``), and a gate that multiplies values as they
are, as with Transformer Engine; ``*-measured`` have Megatron-Core's own, in float32. The time per score does not
depend on the number of experts. Launches take no time apart from the experts' overhead, so batches of few tokens come
out too fast. All-to-alls and other collectives are the link model's (``links``).

A batch-wide policy meets the other ranks in the middle of its routing: the model's own top-k comes before, the rest
after.

*What stands between MoE layers* (phases are those of ``layer.phases``: (layer, phase) within a layer):

embedding  T rows gathered: 2 T D b bytes at the share of the bandwidth that permutation reaches
attention  projections, one GEMM after another: rooflines of 2 T I O operations and b (I O + T (I + O)) bytes;
           norms of queries and keys, or of latents, and rotary positions: what they read and write;
           core attention: the larger of its operations, at the device's ``attention_efficiency``, and of its bytes
dense      roofline of a gated FFN on T rows
rest       norms, 2 T D b bytes each, and residual additions, 3 T D b each: two of both in a layer, and the last norm
output     roofline of the output layer on P rows, a prompt's or request's last token each: its weights are read once

*In fp8.* Where the checkpoint quantises all linear layers (``ModelSpec.quantized``), projections, dense and shared FFNs
read weights of the dtype's bytes and multiply at its speed; b stays of rows, which are cast as they are read. Output,
gate, norms and core attention stay in bfloat16.

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
on a device of little arithmetic a decode step's projections come out slow. Biases and sampling are not in it either.

Shapes: T = tokens of the rank, E = experts of the model (all are scored, however many slots there are), N = pairs that
it sends, L = its local experts or slots, M = pairs that arrive, A = copies of tokens that arrive, D = hidden size,
W = width of the rows that routed experts take, which is D unless the model has a latent size, F = expert FFN size,
S = FFN size of the shared experts or (attention) a prompt's length, P = prompts or requests, C = tokens in the cache,
I, O = what a projection takes and gives, H = heads, G = key-value heads, Q, V = size of a head's keys and values,
L, P (latent attention) = latent and rotary widths, b = bytes per value, s = bytes per value that is sent
(``devices.Precision``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from moe_ep_bench.cost_model.devices import Device, Dtype, Precision, SentDtype
from moe_ep_bench.cost_model.exchanges import Copies
from moe_ep_bench.cost_model.timeline import PHASE_OF_MEETING
from moe_ep_bench.models import ModelSpec
from moe_ep_bench.schema import MOE_REST, UNACCOUNTED, PhaseKey

Number = int | NDArray[np.int64]
Time = float | NDArray[np.number]


@dataclass(frozen=True, eq=False)
class RankWork:
    """What one rank does in one run of the layer, or what each of several does.

    Numbers are of one rank, or int64 [R] of all; ``received_L`` is [L], or [R, L].

    Attributes:
        num_tokens: T, its own tokens.
        num_sent: N, pairs that it sends to anyone, itself included.
        received_L: int64 [L], rows that arrive at each of its local experts or slots.
        batch_tokens: of all ranks; None = not said, and taken from the rows.
        num_shared: tokens whose shared experts it computes beside the routed ones; None = its own, ahead of the gate.
        num_copies: A, copies of tokens that arrive, where an exchange sends a token once to a rank; None = a row for
            each pair arrives.
    """

    num_tokens: Number
    num_sent: Number
    received_L: NDArray[np.int64]
    batch_tokens: int | None = None
    num_shared: Number | None = None
    num_copies: Number | None = None

    @property
    def num_received(self) -> Number:
        """M, rows that arrive."""
        return np.sum(self.received_L, axis=-1)

    def of_rank(self, rank: int) -> RankWork:
        """One rank's of all."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return RankWork(**{name: value[rank] if np.ndim(value) else value for name, value in values.items()})


def layer_segments(
    device: Device,
    model: ModelSpec,
    work: RankWork,
    *,
    by_policy: bool,
    batch_wide: bool,
    alone: bool = False,
    dtype: Dtype = "bfloat16",
    dispatch_dtype: SentDtype | None = None,
    exchange: Copies | None = None,
    solving_us: float = 0.0,
) -> list[tuple[str, Time]]:
    """Phases and microseconds of one run in the order in which a measured one has them, for ``timeline.legs_of``.

    Of all ranks' work a time is float64 [R], or one number that all have. A phase without work takes no time; a rank
    without tokens still runs the experts on the rows that it is sent.

    Args:
        by_policy: a policy routes; otherwise the model's own top-k.
        batch_wide: the policy sums statistics over ranks.
        alone: there is no other rank: nobody is met, and rows lie as the experts want them.
        dtype: of ``PRECISIONS``; what b is, and whether experts are smaller; float32 has bfloat16's arithmetic.
        dispatch_dtype: what s is; None = as ``dtype`` has it.
        exchange: what a token has a copy for in the exchange that dispatches; None = an all-to-all.
        solving_us: a balancer's, once all counts are known.
    """
    precision = device.precision(dtype, dispatch_dtype)
    T, b = work.num_tokens, precision.hidden_bytes
    E, D, F, S = model.num_experts, model.hidden_size, model.ffn_hidden_size, model.shared_ffn_hidden_size
    W = model.expert_hidden_size
    gate_us = device.gate_us(T, D, E, b)
    routing_us = device.routing_us(T * E, by_policy=by_policy)
    top_k_us = np.minimum(device.routing_us(T * E, by_policy=False), routing_us) if batch_wide else routing_us
    permute_us = [device.permute_us(W * num_bytes) for num_bytes in _permuted(device, work, precision, exchange)]
    lies_sorted = alone and (exchange is not None or device.permute != "fused")
    if lies_sorted or work.received_L.shape[-1] == 1 or device.experts is not None:
        permute_us[1:3] = 0.0, 0.0
    gather_us, sort_us, unsort_us, sum_us = permute_us
    experts_us = device.experts_us(
        W, F, work.received_L, precision, num_matrices=model.expert_matrices, num_tokens=work.batch_tokens
    )
    num_shared, is_own = (T, True) if work.num_shared is None else (work.num_shared, False)
    beside = device.beside_experts(dtype, model.quantized)
    shared_us = device.ffn_us(D, S, np.asarray(num_shared)[..., None], beside, model.expert_matrices)
    add_us = device.work_us(0, 3 * T * D * b, T)
    segments = [  # Phases that take no time stand where a measured run has them.
        (UNACCOUNTED, 0.0),
        *([("shared", shared_us)] if S and is_own else []),
        ("gate", gate_us),
        ("policy", top_k_us),
        *([("wait_policy", 0.0), ("policy", routing_us - top_k_us)] if batch_wide else []),
        (UNACCOUNTED, 0.0),
        ("permute", 0.0),
        ("wait_metadata", 0.0),
        *([("policy", solving_us)] if solving_us else []),
        ("permute", gather_us),
        ("metadata", 0.0),
        (UNACCOUNTED, 0.0),
        ("wait_dispatch", 0.0),
        (UNACCOUNTED, 0.0),
        ("metadata", 0.0),
        ("permute", sort_us),
        *([("shared", shared_us)] if S and not is_own else []),
        ("experts", experts_us),
        ("permute", unsort_us),
        ("wait_combine", 0.0),
        (UNACCOUNTED, 0.0),
        *([("shared", add_us)] if S else []),
        ("permute", sum_us),
    ]
    return [(phase, time_us) for phase, time_us in segments if not (alone and phase in PHASE_OF_MEETING)]


def _permuted(
    device: Device, work: RankWork, precision: Precision, exchange: Copies | None
) -> tuple[Time, Time, Time, Time]:
    """Bytes of the four steps of permutation for each value of a row: the module's table."""
    T, N, M, b, s = work.num_tokens, work.num_sent, work.num_received, precision.hidden_bytes, precision.sent_bytes
    if exchange == "pair":
        return 0, 0, 0, 0
    is_fused = device.permute == "fused"
    if exchange is None:
        return (T + N if is_fused else 2 * N) * b, 2 * M * b, 2 * M * b, (N + T) * b
    A = M if work.num_copies is None else work.num_copies
    return 0, (A + M if is_fused else 2 * M) * s, (M + A) * b, 0


# ---- a whole model ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class PassWork:
    """What one rank does in one pass: the prefill of its prompts, or one decode step of its requests.

    Attributes:
        lengths: tokens of each prompt; at decode each token is a request's.
        context_length: C, tokens of each request in the cache; 0 at prefill.
        layers: by MoE layer that is built, what the rank does there.
        num_parts: micro-batches that the tokens are cut into, of which this is one; they attend alike.
    """

    lengths: tuple[int, ...]
    context_length: int = 0
    layers: Mapping[int, RankWork] = field(default_factory=dict)
    num_parts: int = 1


def pass_segments(
    device: Device, model: ModelSpec, num_layers: int, work: PassWork, *, dtype: Dtype = "bfloat16", **of_layers: Any
) -> list[tuple[PhaseKey, Time]]:
    """Phases and microseconds of one pass in the order in which a measured one has them, for ``timeline.legs_of``.

    Those of a layer are (layer, name), as (3, "experts"). Phases without work take no time.

    Args:
        num_layers: that are built, the first ones of the model.
        dtype, of_layers: see ``layer_segments``; of every MoE layer.

    Raises:
        ValueError: the device's share for attention is not stated.
    """
    us = _outside_us(device, model, work, dtype)
    segments: list[tuple[PhaseKey, Time]] = [(UNACCOUNTED, 0.0), ("embedding", us.embedding)]
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


def outside_moe_us(device: Device, model: ModelSpec, work: PassWork, *, dtype: Dtype = "bfloat16") -> float:
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


def _outside_us(device: Device, model: ModelSpec, work: PassWork, dtype: Dtype) -> _Outside:
    linear = device.beside_experts(dtype, model.quantized)
    whole = device.beside_experts(dtype, "experts")
    T, D, b = sum(work.lengths) / work.num_parts, model.hidden_size, linear.hidden_bytes
    assert model.attention is not None
    assert model.vocab_size is not None

    def gemm_us(rows: float, takes: int, gives: int, heads: int = 1, precision: Precision = linear) -> float:
        """Of ``heads`` GEMMs at once."""
        num_bytes = heads * (precision.weight_bytes * takes * gives + b * rows * (takes + gives))
        flops = 2.0 * heads * rows * takes * gives
        return float(device.work_us(flops / precision.speed, num_bytes, rows)) if rows else 0.0

    def moved_us(num_bytes: float) -> float:
        return float(device.work_us(0, num_bytes, 1))

    decodes = work.context_length > 0
    form = model.attention.form(D, decodes=decodes)
    # Tokens whose keys and values are read, the new ones included, and pairs of tokens that attend.
    cached = T * (work.context_length + 1)
    pairs = cached if decodes else sum(length**2 / 2 for length in work.lengths) / work.num_parts
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
        dense=float(device.ffn_us(D, model.dense_ffn_hidden_size or model.ffn_hidden_size, [T], linear)),
        output=gemm_us(T if decodes else len(work.lengths) / work.num_parts, D, model.vocab_size, precision=whole),
    )
