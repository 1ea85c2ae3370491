"""What the expert kernels of vLLM do with a dropped pair: *skip* its row, *compute* it, or *unknown*.

A kernel has K slots a token, and a dropped pair leaves one empty. Under expert parallelism without data-parallel
ranks each rank routes all tokens and computes the pairs of its own experts: `TritonExperts` leaves slots of other ranks
out when it lays out its rows, and out of the sum. An empty slot that names an expert of another rank is therefore no
row anywhere, which is how vLLM's receiver of DeepEP marks a slot of its own that holds nothing
(`prepare_finalize/deepep_ht.py`). Read in vLLM 0.32.0, `experts/triton_moe.py`; what was not read is unknown, and
there, as where kernels compute every slot, an empty slot repeats an expert of the token at weight 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

_TRITON = "vllm.model_executor.layers.fused_moe.experts.triton_moe.TritonExperts"
_NO_EXCHANGE = "vllm.model_executor.layers.fused_moe.prepare_finalize.no_dp_ep.MoEPrepareAndFinalizeNoDPEPModular"


@dataclass(frozen=True)
class Backend:
    """The kernels of a layer on this rank.

    Attributes:
        name: their class.
        why: what decides; empty where nothing needs saying.
        elsewhere: the expert of another rank that an empty slot names; None = kernels do not skip it.
    """

    name: str
    does: Literal["skips", "computes", "unknown"]
    why: str = ""
    elsewhere: int | None = None

    def __str__(self) -> str:
        """A line for a log."""
        why = self.why and f" ({self.why})"
        if self.does == "skips":
            return f"{self.name} skips the rows of dropped pairs{why}"
        if self.does == "computes":
            return (
                f"{self.name} computes every slot{why}: dropping saves no time here, only fewer activated experts can"
            )
        return f"{self.name}: unknown whether dropped pairs are computed{why}; their slots repeat an expert at weight 0"


def backend_of(runner: Any, config: Any) -> Backend:
    """The kernels of vLLM's ``MoERunner`` once its weights are loaded, under a ``VllmConfig``."""
    kernel, expert_map_E = runner.routed_experts.quant_method.moe_kernel, runner.routed_experts.expert_map
    if kernel is None:
        return Backend(type(runner.routed_experts.quant_method).__name__, "unknown", "no modular kernel")
    experts = kernel.fused_experts
    name = type(experts).__name__
    if config.device_config.device_type == "cpu":
        return Backend(name, "computes")
    if _path(experts) != _TRITON or _path(kernel.prepare_finalize) != _NO_EXCHANGE:
        return Backend(name, "unknown", "not read; --moe-backend triton is")
    for is_so, why in (
        (expert_map_E is None, "one rank holds all experts"),
        (config.lora_config is not None, "LoRA"),
        (_has_scale_of_all_rows(experts), "a dynamic scale per tensor"),
    ):
        if is_so:
            return Backend(name, "computes", why)
    return Backend(name, "skips", elsewhere=int((expert_map_E < 0).nonzero()[0]))


def _path(thing: Any) -> str:
    return f"{type(thing).__module__}.{type(thing).__qualname__}"


def _has_scale_of_all_rows(experts: Any) -> bool:
    """Whether the second GEMM scales its input by the largest value of all rows, skipped ones too: vLLM's own rule."""
    per_row = experts.per_act_token_quant and not experts.quantization_emulation
    is_dynamic = experts.quant_dtype is not None and experts.a2_scale is None
    return is_dynamic and experts.block_shape is None and not per_row
