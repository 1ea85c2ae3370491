"""Which method of a Megatron-Core MoE layer is which phase, and where ranks meet.

One table, so that a stage is named and timed once whoever runs it. Stages nest
(``dispatch_preprocess`` calls ``preprocess``): what is nested inside another is taken out of it.

Phases: ``gate`` is the router's GEMM, ``policy`` the score function and the selection (for
``native`` Megatron-Core's own), ``metadata`` the exchange of counts and the host sync,
``permute`` both permutations and their inverses, ``dispatch`` and ``combine`` the all-to-alls,
``experts`` and ``shared`` the FFNs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from moe_ep_bench.layer.megatron import MoELayer


@dataclass(frozen=True)
class Stage:
    """A method ``owner.method`` of the layer ('' = the layer itself) that belongs to ``phase``.

    ``waits`` names the phase of the waiting before it, where ranks meet in it.
    """

    owner: str
    method: str
    phase: str
    waits: str | None = None


STAGES = (
    Stage("router", "gating", "gate"),
    Stage("router", "routing", "policy"),
    Stage("router", "sum_over_ranks", "policy", waits="wait_policy"),
    Stage("token_dispatcher", "dispatch_preprocess", "permute"),
    Stage("token_dispatcher", "preprocess", "metadata", waits="wait_metadata"),
    Stage("token_dispatcher", "_maybe_dtoh_and_synchronize", "metadata"),
    Stage("token_dispatcher", "token_dispatch", "dispatch", waits="wait_dispatch"),
    Stage("token_dispatcher", "dispatch_postprocess", "permute"),
    Stage("experts", "forward", "experts"),
    Stage("token_dispatcher", "combine_preprocess", "permute"),
    Stage("token_dispatcher", "token_combine", "combine", waits="wait_combine"),
    Stage("token_dispatcher", "combine_postprocess", "permute"),
)

SHARED_STAGES = (
    Stage("", "shared_experts_compute", "shared"),
    # Adds the shared experts' output to what combine_postprocess, nested inside, returns.
    Stage("", "postprocess", "shared"),
)


def stages_of(layer: MoELayer) -> list[tuple[Any, Stage]]:
    """The stages that this layer has, each with the object whose method it is."""
    table = STAGES + (SHARED_STAGES if layer.use_shared_expert else ())
    owners = [(getattr(layer, stage.owner) if stage.owner else layer, stage) for stage in table]
    return [(owner, stage) for owner, stage in owners if hasattr(owner, stage.method)]
