"""Which form of a policy runs: its own torch operations, or a compiled twin that routes alike.

==========  ==================  =====================================================================================
kernel      scores lie on       policies
==========  ==================  =====================================================================================
``torch``   any device          all: the definition of what is right
``numba``   the host            all of this package, step by step (``policy_steps``)
``numba``   a GPU               ``laser`` and ``load_only``: the sequential rule on the host, with copies there and back
``triton``  a CUDA GPU          all but ``megatron_drop`` and ``sere``, in a launch or a few (``triton_twins`` below),
                                and but for values of ``Policy.torch_only``
==========  ==================  =====================================================================================

``auto`` is the first of triton, numba and torch that there is. A twin equals the policy in torch: the same pairs to
the bit, weights within rounding (numba's to the bit too). Where numba or Triton cannot be imported, or Triton finds no
C compiler, that is said once, and the next one runs. Nothing here imports either before it is chosen.

Shapes: T = tokens, E = experts, S = rows of batch statistics.
"""

from __future__ import annotations

import functools
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from types import ModuleType
from typing import TypeGuard

from moe_ep_bench.errors import UserError
from moe_ep_bench.kernels.toolchain import triton_lacks
from moe_ep_bench.policies import Policy, Routing, RoutingContext
from moe_ep_bench.policies.budget_drop import BudgetDrop
from moe_ep_bench.policies.capacity import CapacityPolicy, ExpandedDrop, TokenDrop
from moe_ep_bench.policies.contract import SteppedPolicy
from moe_ep_bench.policies.laser import Laser, LoadAwarePolicy, LoadOnly
from moe_ep_bench.policies.lazy import Tensor, torch
from moe_ep_bench.policies.oea import OEA, Pruned
from moe_ep_bench.policies.skipping import DynamicSkip, ExpertDrop, Lynx
from moe_ep_bench.policies.steps import TORCH, Steps
from moe_ep_bench.policies.topk import TopK
from moe_ep_bench.policies.xshare import XShare

AUTO = "auto"
KERNELS = ("triton", "numba", "torch")
"""The fastest first."""

Calls = tuple[Callable[..., Routing], Callable[..., Tensor | None]]
"""What ``PolicyForm.select`` and ``PolicyForm.stats`` call."""


@dataclass(frozen=True)
class PolicyForm:
    """A policy in its fastest exact form: ``route`` and ``batch_stats``, and both for inputs that were checked before.

    Attributes:
        device_type: "cpu" or "cuda", where the scores lie.
        kernel: one of ``KERNELS``, or ``auto``.
    """

    policy: Policy
    device_type: str
    kernel: str

    def route(self, scores_TE: Tensor, context: RoutingContext, stats_SE: Tensor | None = None) -> Routing:
        """``Policy.route``; also a ValueError for a kernel that cannot run this policy here."""
        self.policy.in_layer(context.layer_fraction).check(scores_TE, context)
        return self.select(scores_TE, context, stats_SE)

    def batch_stats(self, scores_TE: Tensor, context: RoutingContext) -> Tensor | None:
        """``Policy.batch_stats``."""
        self.policy.in_layer(context.layer_fraction).check(scores_TE, context)
        return self.stats(scores_TE, context)

    def select(self, scores_TE: Tensor, context: RoutingContext, stats_SE: Tensor | None = None) -> Routing:
        """``route`` unchecked: what a timed layer calls."""
        return self._calls(scores_TE, context)[0](scores_TE, context, stats_SE)

    def stats(self, scores_TE: Tensor, context: RoutingContext) -> Tensor | None:
        """``batch_stats`` unchecked."""
        return self._calls(scores_TE, context)[1](scores_TE, context)

    def _calls(self, scores_TE: Tensor, context: RoutingContext) -> Calls:
        num_tokens, num_experts = scores_TE.shape
        here = self.policy.in_layer(context.layer_fraction)
        form = self if here is self.policy else form_of(here, self.device_type, self.kernel)
        return _calls(form, num_tokens, num_experts)

    def select_all(self, scores: Sequence[Tensor], contexts: Sequence[RoutingContext]) -> list[Routing]:
        """``select`` for all ranks at once, where one process holds every rank's scores.

        Args:
            scores: every rank's float32 [T, E]; T differs from rank to rank and may be 0.
            contexts: every rank's, in the same order. Statistics draw nothing, so that one generator serves both steps.
        """
        pairs = list(zip(scores, contexts, strict=True))
        known = [stats_SE for pair in pairs if (stats_SE := self.stats(*pair)) is not None]
        summed_SE = torch.stack(known).sum(dim=0) if known else None
        return [self.select(*pair, summed_SE) for pair in pairs]

    def runs(self, num_tokens: int, num_experts: int) -> str:
        """What runs: the kernel that was asked for, and for ``auto`` the fastest that there is.

        Raises:
            ValueError: there is no such kernel, or asked for by name it cannot run; the message says why.
        """
        if self.kernel not in (AUTO, *KERNELS):
            raise UserError(f"kernel: expected one of {AUTO}, {', '.join(KERNELS)}; got {self.kernel!r}")

        shape = self.device_type, num_tokens, num_experts
        able = (kernel for kernel in KERNELS if not _objection(self.policy, kernel, *shape))
        if self.kernel == AUTO:
            return next(able)
        if reason := _objection(self.policy, self.kernel, *shape):
            possible = ", ".join([AUTO, *able])
            raise UserError(f"{self.kernel} cannot run {self.policy.name}: {reason}; expected {possible}")
        return self.kernel


def type_of(device: torch.device | str) -> str:
    """``cpu`` or ``cuda``; a plan asks, which does not import torch."""
    return str(device).partition(":")[0]


# A timed layer asks anew in every iteration.
@functools.lru_cache(maxsize=1024)
def form_of(policy: Policy, device: torch.device | str, kernel: str = AUTO) -> PolicyForm:
    """The fastest exact form of a policy for scores on a device, or the one that is named."""
    return PolicyForm(policy, type_of(device), kernel)


@functools.lru_cache(maxsize=4096)
def _calls(form: PolicyForm, num_tokens: int, num_experts: int) -> Calls:
    """What runs for scores of this shape."""
    kernel, policy = form.runs(num_tokens, num_experts), form.policy
    if kernel == "triton":
        twin = triton_twins()[type(policy)]
        stats = getattr(twin, "stats", lambda policy, scores_TE, context: None)
        return functools.partial(twin.select, policy), functools.partial(stats, policy)
    if not _is_stepped(policy):
        return policy.route, policy.batch_stats
    steps = numba_steps(form.device_type) if kernel == "numba" else TORCH
    assert steps is not None
    stepped = policy.by(steps)
    return stepped.select, stepped.stats


def oracle_for(policy: Policy, device: torch.device | str) -> PolicyForm:
    """The form to hold others against: torch, but where torch would go token by token, numba's loop."""
    device_type = type_of(device)
    by_numba = isinstance(policy, LoadAwarePolicy) and numba_steps(device_type)
    return form_of(policy, device_type, "numba" if by_numba else "torch")


def _objection(policy: Policy, kernel: str, device_type: str, num_tokens: int, num_experts: int) -> str:
    """Why a kernel cannot run a policy here; nothing where it can."""
    if kernel == "triton":
        if device_type != "cuda":
            return "Triton compiles for CUDA GPUs, and the scores lie on the host"
        if why := triton_lacks():
            return why
        if type(policy) not in triton_twins():
            return "there is no Triton form of it"
        for field, value in policy.torch_only.items():
            if getattr(policy, field) == value:
                return f"there is no Triton form of {field}={value}"
        from moe_ep_bench.kernels import standings_triton, tiles_triton

        if num_experts > tiles_triton.MOST_EXPERTS:
            return f"it takes {tiles_triton.MOST_EXPERTS:,} experts at most"
        if isinstance(policy, CapacityPolicy) and num_tokens * num_experts > standings_triton.MOST_PAIRS:
            return f"it takes {standings_triton.MOST_PAIRS:,} scores at most"
    elif kernel == "numba":
        if not _is_stepped(policy):
            return "there is no numba form of it"
        if not has_numba():
            return "numba is not installed"
        if device_type != "cpu" and not isinstance(policy, LoadAwarePolicy):
            return "numba runs on the host, and the scores lie on a GPU"
    return ""


def _is_stepped(policy: Policy) -> TypeGuard[SteppedPolicy]:
    """Whether its rule is that of ``select`` and not a ``route`` of its own."""
    return type(policy).route is SteppedPolicy.route


def has_numba() -> bool:
    """Whether numba can be imported, as far as that is known: a plan asks, which does not wait for it."""
    return numba_steps("cpu") is not None if "numba" in sys.modules else find_spec("numba") is not None


@functools.cache
def numba_steps(device_type: str) -> Steps | None:
    """The steps by numba's loops; None where numba is missing."""
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
def triton_twins() -> Mapping[type[Policy], ModuleType]:
    """The policies that have a Triton form, and the module whose ``select`` and, where it has one, ``stats`` that is.

    Triton must be there.
    """
    from moe_ep_bench.kernels import budget_triton, capacity_triton, laser_triton, rows_triton, sets_triton

    return {
        **dict.fromkeys([TopK, Pruned, DynamicSkip], rows_triton),
        **dict.fromkeys([TokenDrop, ExpandedDrop], capacity_triton),
        BudgetDrop: budget_triton,
        **dict.fromkeys([ExpertDrop, Lynx, OEA, XShare], sets_triton),
        **dict.fromkeys([Laser, LoadOnly], laser_triton),
    }
