"""Which form of a policy runs: its formulation in torch, or a compiled twin that routes alike.

==========  ==================  =====================================================================================
kernel      scores lie on       policies
==========  ==================  =====================================================================================
``torch``   any device          all: the definition of what is right
``numba``   the host            all, step by step (``policy_steps``)
``numba``   a GPU               ``laser`` and ``load_only``: the sequential rule on the host, with copies there and back
``triton``  a CUDA GPU          all but ``megatron_drop``, in a launch or a few (``triton_twins`` below)
==========  ==================  =====================================================================================

``auto`` is the first of triton, numba and torch that there is. A twin equals the formulation in torch: the same
pairs to the bit, weights within rounding (numba's to the bit too). Where numba or Triton cannot be imported that is
said once, and the next one runs.

Shapes: T = tokens, E = experts, S = rows of batch statistics.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor

from moe_ep_bench.policies import Policy, Routing, RoutingContext
from moe_ep_bench.policies.capacity import CapacityPolicy, ExpandedDrop, TokenDrop
from moe_ep_bench.policies.laser import Laser, LoadAwarePolicy, LoadOnly
from moe_ep_bench.policies.oea import OEA, Pruned
from moe_ep_bench.policies.skipping import DynamicSkip, ExpertDrop, Lynx
from moe_ep_bench.policies.steps import TORCH, Steps
from moe_ep_bench.policies.topk import TopK
from moe_ep_bench.policies.xshare import XShare

AUTO = "auto"
KERNELS = ("triton", "numba", "torch")
"""The fastest first."""

Select = Callable[[Policy, Tensor, RoutingContext, Tensor | None], Routing]
Stats = Callable[[Policy, Tensor, RoutingContext], Tensor | None]


def _no_stats(policy: Policy, scores_TE: Tensor, context: RoutingContext) -> None:
    return None


@dataclass(frozen=True)
class Twin:
    """One form of one policy.

    Attributes:
        select: ``Policy.select``; without statistics it takes those of its own scores.
        stats: ``Policy.batch_stats``.
    """

    select: Select
    stats: Stats = _no_stats


def kernel_for(policy: Policy, kernel: str, device_type: str, num_tokens: int, num_experts: int) -> str:
    """What runs where ``kernel`` is asked for: itself, and for ``auto`` the fastest that there is.

    Args:
        device_type: "cpu" or "cuda", where the scores lie.

    Raises:
        ValueError: there is no such kernel, or asked for by name it cannot run; the message says why.
    """
    if kernel not in (AUTO, *KERNELS):
        raise ValueError(f"kernel: expected one of {AUTO}, {', '.join(KERNELS)}; got {kernel!r}")

    def objection(one: str) -> str:
        return _objection(policy, one, device_type, num_tokens, num_experts)

    if kernel == AUTO:
        return next(one for one in KERNELS if not objection(one))
    if reason := objection(kernel):
        possible = ", ".join([AUTO, *(one for one in KERNELS if not objection(one))])
        raise ValueError(f"{kernel} cannot run {policy.name}: {reason}; expected {possible}")
    return kernel


def twin_for(policy: Policy, kernel: str, scores_TE: Tensor) -> Twin:
    """The form of ``policy`` that ``kernel_for`` names for these scores."""
    device_type = scores_TE.device.type
    ran = kernel_for(policy, kernel, device_type, *scores_TE.shape)
    return triton_twins()[type(policy)] if ran == "triton" else _by_steps(ran, device_type)


def oracle_for(policy: Policy, device_type: str) -> str:
    """The kernel to hold others against: torch, but where torch would go token by token, numba's loop."""
    return "numba" if isinstance(policy, LoadAwarePolicy) and _steps("numba", device_type) else "torch"


def _objection(policy: Policy, kernel: str, device_type: str, num_tokens: int, num_experts: int) -> str:
    """Why a kernel cannot run a policy here; nothing where it can."""
    if kernel == "triton":
        if device_type != "cuda":
            return "Triton compiles for CUDA GPUs, and the scores lie on the host"
        if not triton_twins():
            return "Triton is not installed"
        if type(policy) not in triton_twins():
            return "there is no Triton form of it"
        from moe_ep_bench.kernels import standings_triton, tiles_triton

        if num_experts > tiles_triton.MOST_EXPERTS:
            return f"it takes {tiles_triton.MOST_EXPERTS:,} experts at most"
        if isinstance(policy, CapacityPolicy) and num_tokens * num_experts > standings_triton.MOST_PAIRS:
            return f"it takes {standings_triton.MOST_PAIRS:,} scores at most"
    elif kernel == "numba":
        if _steps(kernel, device_type) is None:
            return "numba is not installed"
        if device_type != "cpu" and not isinstance(policy, LoadAwarePolicy):
            return "numba runs on the host, and the scores lie on a GPU"
    return ""


@functools.cache
def _by_steps(kernel: str, device_type: str) -> Twin:
    """Any policy's own rule, by the steps of torch or numba."""
    steps = _steps(kernel, device_type)
    assert steps is not None

    def stats(policy: Policy, scores_TE: Tensor, context: RoutingContext) -> Tensor | None:
        return policy.stats_by(steps, scores_TE, context)

    def select(policy: Policy, scores_TE: Tensor, context: RoutingContext, stats_SE: Tensor | None) -> Routing:
        if stats_SE is None:
            stats_SE = policy.stats_by(steps, scores_TE, context)
        return policy.select_by(steps, scores_TE, context, stats_SE)

    return Twin(select, stats)


@functools.cache
def _steps(kernel: str, device_type: str) -> Steps | None:
    """The steps of torch or numba; None where numba is missing."""
    if kernel == "torch":
        return TORCH
    try:
        import numba  # noqa: F401 - is it there?
    except ImportError as error:
        warnings.warn(
            f"numba cannot be imported ({error}): policies run as torch operations, which is exact but slower, "
            "for laser and load_only by orders of magnitude",
            RuntimeWarning,
            stacklevel=2,
        )
        return None
    from moe_ep_bench.kernels.policy_steps import DeviceSteps, HostSteps

    return HostSteps() if device_type == "cpu" else DeviceSteps()


@functools.cache
def triton_twins() -> Mapping[type[Policy], Twin]:
    """The policies that have a Triton form; none where Triton is missing."""
    try:
        import triton  # noqa: F401 - is it there?
    except ImportError as error:
        warnings.warn(
            f"Triton cannot be imported ({error}): on the GPU policies run as torch operations, which is exact but "
            "several times slower",
            RuntimeWarning,
            stacklevel=2,
        )
        return {}
    from moe_ep_bench.kernels import capacity_triton, laser_triton, rows_triton, sets_triton

    return {
        TopK: Twin(rows_triton.topk),
        TokenDrop: Twin(capacity_triton.capacity),
        ExpandedDrop: Twin(capacity_triton.capacity),
        ExpertDrop: Twin(sets_triton.expert_drop, sets_triton.expert_drop_stats),
        Pruned: Twin(rows_triton.pruned),
        OEA: Twin(sets_triton.oea, sets_triton.oea_stats),
        Laser: Twin(laser_triton.laser),
        LoadOnly: Twin(laser_triton.load_only),
        XShare: Twin(sets_triton.xshare, sets_triton.xshare_stats),
        Lynx: Twin(sets_triton.lynx, sets_triton.lynx_stats),
        DynamicSkip: Twin(rows_triton.dynamic_skip),
    }
