"""Model how long a layer's steps take on a device that is not here, by a roofline.

A file of data/devices/ states the roofline (Williams, Waterman, Patterson, Commun. ACM 52(4), 2009): the data
sheet's arithmetic and memory bandwidth, and the share of each that expert GEMMs reach. The share of the arithmetic
rises with the rows of a GEMM (an expert's tokens), so it is a table. Routing takes a time per score, because no
roofline describes a top-k or a sort. Permutation reaches its own share of the bandwidth. Each figure beyond the data
sheet says whether it was measured, published or assumed. Measured times of one layer's experts (``expert_table``) stand
in place of their roofline where there are some.

*Whose kernels.* ``experts_as: grouped`` are servers' grouped GEMMs, or this package's; ``te`` Megatron-Core's with
Transformer Engine, whose kernels between GEMMs are passes through memory of their own (``te_bytes``). Permutation is
``unfused``, an index for each row, or ``fused``, by Transformer Engine's kernels, which read a token once (``phases``).

Shapes: L = experts of a rank, D = hidden size, F = expert FFN size.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray
from pydantic import Field, NonNegativeFloat, PositiveFloat, model_validator

from moe_ep_bench.cost_model.curve import Curve
from moe_ep_bench.cost_model.expert_table import ExpertTable
from moe_ep_bench.errors import UserError
from moe_ep_bench.facts import Basis, DeviceFacts
from moe_ep_bench.presets import Preset


@dataclass(frozen=True)
class Precision:
    """What values of a dtype take, bytes, and how much faster than in bfloat16 they are multiplied.

    Attributes:
        weight_bytes: of an expert's weights, scales included.
        sent_bytes: of hidden states on their way to experts, scales included; they come back in ``hidden_bytes``.
        hidden_bytes: of hidden states everywhere else, and of all other weights.
    """

    weight_bytes: float
    sent_bytes: float
    hidden_bytes: int = 2
    speed: float = 1.0

    def sent(self, dispatch_dtype: SentDtype | None) -> Precision:
        """The same with hidden states sent as ``layer.dispatch_dtype``; None = as they are."""
        return self if dispatch_dtype is None else replace(self, sent_bytes=SENT_BYTES[dispatch_dtype])

    @property
    def cast_late(self) -> Precision:
        """The same with hidden states sent before they are cast, as layers that run do."""
        return replace(self, sent_bytes=self.hidden_bytes)


# Of ``layer.dtype``. Blocks of 128 values (fp8_block) or 128 x 128 weights share a float32 scale, of 32 (mxfp4, mxfp8)
# or 16 (nvfp4) a byte, of 128 (int4) two bytes. Kernels with 16-bit activations (w4a16, int4) send those.
Dtype = Literal[
    "float32", "bfloat16", "fp8", "fp8_block", "int4_wo", "w4a16_mxfp4", "w4a8_mxfp4_mxfp8", "nvfp4"
]  # fmt: skip
PRECISIONS: dict[Dtype, Precision] = {
    "float32": Precision(4, 4, 4),
    "bfloat16": Precision(2, 2),
    "fp8": Precision(1, 1, speed=2),
    "fp8_block": Precision(1 + 4 / 128**2, 1 + 4 / 128, speed=2),
    "int4_wo": Precision(0.5 + 2 / 128, 2),
    "w4a16_mxfp4": Precision(0.5 + 1 / 32, 2),
    "w4a8_mxfp4_mxfp8": Precision(0.5 + 1 / 32, 1 + 1 / 32, speed=2),
    "nvfp4": Precision(0.5 + 1 / 16, 0.5 + 1 / 16, speed=4),
}
# ``layer.dispatch_dtype``: bytes of a value of hidden states on their way to experts, scales included.
SentDtype = Literal["bfloat16", "fp8", "nvfp4"]
SENT_BYTES: dict[SentDtype, float] = {"bfloat16": 2.0, "fp8": 1 + 4 / 128, "nvfp4": 0.5 + 1 / 16}
# Of these the linear layers beside routed experts may be too (``ModelSpec.quantized``).
FP8 = ("fp8", "fp8_block")
# Values of a row, and rows of weights, that share a scale in fp8_block.
FP8_BLOCK = 128
# What every roofline has, and what layers that run here have; others are of tables alone.
ROOFLINE_DTYPES = ("float32", "bfloat16")
RUN_DTYPES = (*ROOFLINE_DTYPES, "fp8_block")

# Policies whose kernels take longer than Token Drop's: least microseconds, picoseconds a score and picoseconds a token,
# measured on an H200 (results/reference/h200.md). LASER's rule goes token by token.
SLOW_POLICIES = {"budget_drop": (200.0, 30.0, 0.0), "laser": (12.0, 0.0, 275e3), "load_only": (9.0, 0.0, 275e3)}

_Share = Annotated[float, Field(gt=0, le=1)]
_Text = Annotated[str, Field(min_length=1)]


class Device(Preset):
    """A roofline, and the share of it that is reached."""

    FOLDER = "devices"

    name: _Text
    source: _Text
    bf16_tflops: PositiveFloat
    """Dense tensor-core arithmetic of the data sheet, 1e12 operations per second."""
    memory_tbps: PositiveFloat
    """Memory bandwidth of the data sheet, 1e12 bytes per second."""
    memory_gb: PositiveFloat
    """Size of the memory, 1e9 bytes."""
    num_sms: int | None = Field(default=None, ge=1)
    """Streaming multiprocessors, of which an exchange may hold some; None = not stated."""
    arithmetic_efficiency: Curve
    """(rows, share of the arithmetic) with rising rows; its ends hold beyond it."""
    arithmetic_basis: Basis
    memory_efficiency: _Share
    """Share of the memory bandwidth."""
    memory_basis: Basis
    overhead_us: NonNegativeFloat
    """Of one pass through the experts: launches, and what does not overlap."""
    overhead_basis: Basis
    gate_tflops: PositiveFloat | None = None
    """Arithmetic of a gate that multiplies in float32, casts included, 1e12 operations per second; None = as any other
    product."""
    gate_basis: Basis | None = None
    """What it rests on; stated where it is."""
    routing_native_ps: PositiveFloat
    """Picoseconds per score (token and expert) of the model's own top-k routing."""
    routing_native_us: NonNegativeFloat = 0.0
    """Microseconds of it however few the scores: kernels take their least."""
    routing_native_basis: Basis
    routing_policy_ps: PositiveFloat
    """Picoseconds per score of Token Drop by its kernels, which stands for all policies."""
    routing_policy_us: NonNegativeFloat = 0.0
    """Microseconds of it however few the scores."""
    routing_policy_basis: Basis
    experts_as: Literal["grouped", "te"] = "grouped"
    """Whose kernels compute experts (see the module)."""
    dtypes: tuple[Dtype, ...] = ROOFLINE_DTYPES
    """``layer.dtype`` that the roofline's figures are of; tables have their own."""
    speeds: dict[Dtype, PositiveFloat] = Field(default={})
    """How much faster than in bfloat16 GEMMs of a dtype are; of others as the data sheet has it (``PRECISIONS``)."""
    speeds_basis: Basis | None = None
    """What they rest on; stated where they are."""
    permute: Literal["unfused", "fused"] = "unfused"
    """How rows are permuted (see the module)."""
    permute_efficiency: _Share
    """Share of the data sheet's memory bandwidth that permuting rows reaches."""
    permute_basis: Basis
    attention_efficiency: _Share
    """Share of the arithmetic that core attention of prompts reaches, counting the causal half of all pairs of
    tokens."""
    attention_basis: Basis
    links: tuple[_Text, _Text] = ("h100-nvlink4", "h100-nvlink4-ndr")
    """Files of data/links/ that ``advise`` takes by default: within a node, and beyond it."""
    experts: ExpertTable | None = None
    """Measured times of one layer's experts, in place of the roofline."""

    @model_validator(mode="after")
    def _check(self) -> Device:
        if self.most_efficiency > 1:
            raise UserError(f"expected shares of at most 1, got {self.most_efficiency:g}", "arithmetic_efficiency")
        if (self.gate_tflops is None) != (self.gate_basis is None):
            raise UserError("expected both or neither", "gate_tflops", "gate_basis")
        if bool(self.speeds) != (self.speeds_basis is not None):
            raise UserError("expected both or neither", "speeds", "speeds_basis")
        return self

    def for_policy(self, name: str, num_experts: int) -> Device:
        """The device under a policy: what routing takes is Token Drop's, or that of one in ``SLOW_POLICIES``."""
        if name not in SLOW_POLICIES:
            return self
        least_us, score_ps, token_ps = SLOW_POLICIES[name]
        each_ps = score_ps + token_ps / num_experts
        return self.model_copy(update={"routing_policy_us": least_us, "routing_policy_ps": each_ps})

    @property
    def experts_ran(self) -> tuple[str, str]:
        """What a layer's experts are modelled as (``layer.backend``), and why."""
        if self.experts is not None:
            return self.experts.name, "the table's"
        return self.experts_as, "a roofline knows no others" if self.experts_as == "grouped" else "the device's"

    @property
    def casts_late(self) -> bool:
        """Rows are cast to ``layer.dtype`` behind the dispatch, as Transformer Engine does, not ahead of it."""
        return self.experts_as == "te"

    def precision(self, dtype: Dtype, dispatch_dtype: SentDtype | None = None) -> Precision:
        """What values of ``layer.dtype`` take here, and of ``layer.dispatch_dtype`` on their way."""
        found = replace(PRECISIONS[dtype], speed=self.speeds.get(dtype, PRECISIONS[dtype].speed))
        return (found.cast_late if self.casts_late else found).sent(dispatch_dtype)

    @property
    def reached_tbps(self) -> float:
        """Memory bandwidth of all but permutation and routing, 1e12 bytes per second."""
        return self.memory_tbps * self.memory_efficiency

    @property
    def most_efficiency(self) -> float:
        """The largest share of the arithmetic."""
        return max(share for _, share in self.arithmetic_efficiency.root)

    def arithmetic_us(self, flops: ArrayLike, rows: ArrayLike) -> NDArray[np.float64]:
        """flops / (arithmetic x share at these rows), elementwise."""
        share = self.arithmetic_efficiency.at(rows, growth=0.0)
        return np.asarray(flops, dtype=np.float64) / (self.bf16_tflops * share * 1e6)

    def work_us(self, flops: ArrayLike, num_bytes: ArrayLike, rows: ArrayLike) -> NDArray[np.float64]:
        """Microseconds of work without launches, elementwise.

        max(flops / (arithmetic x share at its rows), bytes / (bandwidth x efficiency)).

        Args:
            flops: operations: 6 x rows x hidden x FFN size for a gated FFN.
            num_bytes: what moves through memory: weights, rows in and out.
            rows: of the GEMMs.
        """
        memory_us = np.asarray(num_bytes, dtype=np.float64) / (self.reached_tbps * 1e6)
        return np.maximum(self.arithmetic_us(flops, rows), memory_us)

    def beside_experts(self, dtype: Dtype, quantized: str) -> Precision:
        """What attention's projections, dense and shared FFNs take in a layer of this dtype (``ModelSpec.quantized``).

        Their rows come and go in ``hidden_bytes``: casting them is in reading them.
        """
        if quantized == "all_linear" and dtype in FP8:
            return self.precision(dtype)
        return Precision(PRECISIONS[dtype].hidden_bytes, PRECISIONS[dtype].hidden_bytes, PRECISIONS[dtype].hidden_bytes)

    def experts_us(
        self,
        hidden_size: int,
        ffn_hidden_size: int,
        rows_L: ArrayLike,
        precision: Precision = PRECISIONS["bfloat16"],
        *,
        num_matrices: int = 3,
        num_tokens: int | None = None,
    ) -> NDArray[np.float64]:
        """Microseconds of one pass through a rank's experts: overhead + ``ffn_us``. No rows take no time.

        Transformer Engine's own passes come on top (``te_bytes``). Measured times hold sorting rows by expert and
        putting them back too.

        Args:
            rows_L: tokens of each expert: [..., L], of several ranks at once.
            precision: whose weights may be smaller, and whose arithmetic faster.
            num_matrices: of an expert.
            num_tokens: of all ranks; tables alone ask for them.
        """
        if self.experts is not None:
            return self.experts.time_us(rows_L, num_tokens)
        rows_L = np.asarray(rows_L, dtype=np.float64)
        experts_us = self.overhead_us + self.ffn_us(hidden_size, ffn_hidden_size, rows_L, precision, num_matrices)
        if self.experts_as == "te":
            num_bytes = te_bytes(hidden_size, ffn_hidden_size, rows_L, precision, num_matrices)
            experts_us = experts_us + self.work_us(0, num_bytes, 1)
        return np.where((rows_L > 0).any(axis=-1), experts_us, 0.0)[()]

    def ffn_us(
        self, hidden_size: int, ffn_hidden_size: int, rows_L: ArrayLike, precision: Precision, num_matrices: int = 3
    ) -> NDArray[np.float64]:
        """Microseconds of FFNs one after another, [..., L] -> [...], by ``work_us``.

        Their weights may be smaller and their arithmetic may be faster.
        """
        hidden_bytes, weights = precision.hidden_bytes, num_matrices * hidden_size * ffn_hidden_size
        flops, num_bytes, rows_L = ffn_work(hidden_size, ffn_hidden_size, rows_L, hidden_bytes, num_matrices)
        num_bytes = num_bytes - (hidden_bytes - precision.weight_bytes) * weights * (rows_L > 0)
        return self.work_us(flops / precision.speed, num_bytes, rows_L).sum(axis=-1)

    def gate_us(
        self, num_tokens: ArrayLike, hidden_size: int, num_experts: int, value_bytes: int
    ) -> NDArray[np.float64]:
        """Microseconds of tokens [T, D] times weights [D, E], elementwise over numbers of tokens.

        The larger of the roofline and ``gate_tflops``.
        """
        num_tokens = np.asarray(num_tokens, dtype=np.float64)
        flops = 2 * num_tokens * hidden_size * num_experts
        # Logits are float32 whatever the layer's values are.
        num_bytes = value_bytes * hidden_size * (num_tokens + num_experts) + 4 * num_tokens * num_experts
        as_they_are_us = self.work_us(flops, num_bytes, num_tokens)
        wide_us = flops / (self.gate_tflops * 1e6) if self.gate_tflops else 0.0
        return np.where(num_tokens > 0, np.maximum(as_they_are_us, wide_us), 0.0)[()]

    def routing_us(self, num_scores: ArrayLike, *, by_policy: bool) -> NDArray[np.float64]:
        """Microseconds of routing ``num_scores`` = tokens x experts scores, by the model's own top-k or by a policy."""
        num_scores = np.asarray(num_scores)
        least_us, score_ps = self.routing_native_us, self.routing_native_ps
        if by_policy:
            least_us, score_ps = self.routing_policy_us, self.routing_policy_ps
        return np.where(num_scores > 0, least_us + num_scores * score_ps / 1e6, 0.0)[()]

    def permute_us(self, num_bytes: Any) -> Any:
        """Microseconds of permuting rows that are ``num_bytes`` read and written: bytes / (bandwidth x share)."""
        return num_bytes / (self.memory_tbps * self.permute_efficiency * 1e6)

    def attention_us(self, flops: float, num_bytes: float) -> float:
        """Microseconds of core attention: max(flops / (arithmetic x share), bytes / (bandwidth x efficiency))."""
        return max(flops / (self.bf16_tflops * self.attention_efficiency * 1e6), num_bytes / (self.reached_tbps * 1e6))

    @property
    def facts(self) -> DeviceFacts:
        """What ``run.json`` says of the device: its figures with their evidence, without curves."""
        own = self.model_dump(include=set(DeviceFacts.model_fields))
        return DeviceFacts(**own, most_efficiency=self.most_efficiency, slow_policies=list(SLOW_POLICIES))


def ffn_work(
    hidden_size: int, ffn_hidden_size: int, rows: ArrayLike, value_bytes: float, num_matrices: int = 3
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
    """Operations, bytes and rows of FFNs, one for each number of rows m; gated ones have three matrices, plain two.

    2 x matrices x m D F operations; b (matrices x D F + m (2 D + 2 x matrices x F)) bytes, b = ``value_bytes``: weights
    where there are rows, rows in and out of two GEMMs with an activation between them.
    """
    rows = np.asarray(rows, dtype=np.float64)
    hidden, ffn, both = hidden_size, ffn_hidden_size, 2 * num_matrices
    num_bytes = value_bytes * (num_matrices * hidden * ffn * (rows > 0) + rows * (2 * hidden + both * ffn))
    return both * rows * hidden * ffn, num_bytes, rows


def te_bytes(
    hidden_size: int, ffn_hidden_size: int, rows_L: ArrayLike, precision: Precision, num_matrices: int = 3
) -> NDArray[np.float64]:
    """Bytes of the passes that Transformer Engine's experts make between GEMMs, [..., L] -> [...].

    For m rows, experts that have some.

    Activation: of gated experts one kernel reads 2 F and writes F, 3 F b bytes a row. Plain ones go through three, the
    activation, its product with the routing weight in float32 and a cast: F (4 b + 8).

    In fp8, as weights and rows come in b bytes: each is read, and written twice, along rows and along columns as
    training needs it: (b + 2) (matrices x D F) an expert and (b + 2) (D + F) a row. Rows are padded to a multiple
    ahead of the GEMMs, and the padding is taken out of the outputs: 2 x 2 D b a row.

    Source: Megatron-LM d98e8a6, megatron/core/transformer/moe/experts.py (TEGroupedMLP.forward).
    """
    rows_L = np.asarray(rows_L, dtype=np.float64)
    hidden, ffn, b = hidden_size, ffn_hidden_size, precision.hidden_bytes
    of_row = ffn * (3 * b if num_matrices == 3 else 4 * b + 8)
    if precision.weight_bytes >= b:
        return of_row * rows_L.sum(axis=-1)
    of_row += (b + 2) * (hidden + ffn) + 4 * hidden * b
    active = (rows_L > 0).sum(axis=-1)
    return of_row * rows_L.sum(axis=-1) + (b + 2) * num_matrices * hidden * ffn * active
