"""Estimate what one rank of a served model holds in memory, and whether that fits a device.

Attention is data-parallel and experts are expert-parallel: attention, dense layers, shared experts, routers, norms and
embeddings lie whole on every rank; routed experts, and spare slots for replicas, are dealt out. A rank holds the cache
of its own tokens as engines do: keys and values, or the latent that they are made from. Beside these lie the rows of
one MoE layer on the fullest rank. What libraries and allocators take is not counted: a GPU sold with 80 GB has 85.5e9
bytes, of which the 80e9 that are counted leave some for them.

The same formula says what a layer or a model takes that is built here: no more than an estimate, which refuses nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from pydantic import BaseModel, ConfigDict, NonNegativeInt, PositiveFloat, PositiveInt

from moe_ep_bench.models.spec import ModelSpec

# Load of the fullest rank over the mean, where no workload states it.
USUAL_LOAD = 2.0


class Fit(BaseModel):
    """Bytes on each rank of a deployment beside those of its device; as ``run.json`` has it.

    Attributes:
        is_whole: all is counted; False where a model states neither attention nor vocabulary: experts alone are.
        fitting_ep_size: the fewest ranks, dividing the experts, on which it fits; None = on none.
    """

    model_config = ConfigDict(frozen=True, extra="ignore")

    device: str
    device_bytes: PositiveFloat
    dtype: str
    ep_size: PositiveInt
    expert_bytes: NonNegativeInt
    other_weight_bytes: NonNegativeInt
    cache_bytes: NonNegativeInt
    row_bytes: NonNegativeInt
    is_whole: bool
    fitting_ep_size: PositiveInt | None = None

    @property
    def num_bytes(self) -> int:
        return self.expert_bytes + self.other_weight_bytes + self.cache_bytes + self.row_bytes

    def holds(self, extra_bytes: float = 0.0) -> bool:
        """Whether a rank's device holds it all, and ``extra_bytes`` beside it."""
        return self.num_bytes + extra_bytes <= self.device_bytes


class Served(NamedTuple):
    """A model as it is served, on any number of ranks.

    Attributes:
        dtype: of weights and activations.
        value_bytes: of a weight, and of a cached value; ``expert_value_bytes`` of an expert's weight, scales included;
            ``linear_value_bytes`` of other linear layers' (``ModelSpec.quantized``).
        rounded_value_bytes: of a value of rows that experts pad and round themselves; None = they do neither.
        total_tokens: tokens of a batch, by the number of ranks.
        request_tokens: of a batch; None = whole prompts.
        context_length: tokens of each request that came before the batch.
        rank_load: of the fullest rank over the mean, by the number of ranks; None = ``USUAL_LOAD``.
    """

    model: ModelSpec
    dtype: str
    value_bytes: int
    expert_value_bytes: float
    total_tokens: Callable[[int], int]
    request_tokens: int | None
    context_length: int
    rank_load: Callable[[int], float | None]
    linear_value_bytes: float | None = None
    rounded_value_bytes: float | None = None

    def footprint(self, num_ranks: int, ep_size: int, num_layers: int | None = None) -> dict[str, int]:
        """Bytes on each of ``num_ranks`` ranks, by the names of ``Fit``.

        Args:
            num_layers: from the model's first on; 0 = one MoE layer alone, None = all.
        """
        model = self.model
        linear_bytes = self.value_bytes if self.linear_value_bytes is None else self.linear_value_bytes
        tokens = -(-self.total_tokens(num_ranks) // num_ranks)
        # Pairs of the fullest rank: permuted twice, and inside the FFN.
        pairs = int(tokens * model.top_k * min(self.rank_load(ep_size) or USUAL_LOAD, ep_size))
        width, ffn_size = model.expert_hidden_size, model.ffn_hidden_size
        row_bytes = pairs * (4 * width + model.expert_matrices * ffn_size) * self.value_bytes
        if self.rounded_value_bytes is not None:  # Rows of either GEMM; inputs and outputs once more with padding.
            row_bytes += round(pairs * ((width + ffn_size) * self.rounded_value_bytes + 2 * width * self.value_bytes))
        if num_layers == 0:
            num_moe, cached = 1, 0
            linear = model.expert_matrices * model.hidden_size * model.shared_ffn_hidden_size
            others = model.hidden_size * model.num_experts + linear + model.latent_parameters
        else:
            num_layers = num_layers or model.num_layers
            num_moe = sum(layer < num_layers for layer in model.moe_layers)
            others = model.other_parameters(num_layers) or 0
            linear = min(model.linear_parameters(num_layers), others)
            requests = -(-tokens // self.request_tokens) if self.request_tokens else 0
            cached_tokens = tokens + requests * self.context_length
            cached = 0 if model.attention is None else model.attention.cached_values * num_layers * cached_tokens
        return {
            "expert_bytes": round(
                model.num_experts // ep_size * model.expert_parameters * num_moe * self.expert_value_bytes
            ),
            "other_weight_bytes": (others - linear) * self.value_bytes + round(linear * linear_bytes),
            "cache_bytes": cached * self.value_bytes,
            "row_bytes": row_bytes,
        }

    def fit(self, ep_size: int, device: str, device_bytes: float) -> Fit:
        """Bytes of the whole model on each rank, and the fewest ranks that hold it with the same batch."""
        is_whole = self.model.other_parameters() is not None

        def on(size: int) -> Fit:
            return Fit(
                device=device, device_bytes=device_bytes, dtype=self.dtype, ep_size=size, is_whole=is_whole,
                **self.footprint(size, size),
            )  # fmt: skip

        larger = (size for size in range(ep_size, self.model.num_experts + 1) if self.model.num_experts % size == 0)
        fitting = next((size for size in larger if on(size).holds()), None)
        return on(ep_size).model_copy(update={"fitting_ep_size": fitting})
