"""Which form of a policy runs: its own torch operations, or a compiled form that routes alike.

==========  ==================  =====================================================================================
kernel      scores lie on       policies
==========  ==================  =====================================================================================
``torch``   any device          all: the definition of what is right
``numba``   the host            all of this package, step by step (``policy_steps``)
``numba``   a GPU               ``laser`` and ``load_only``: the sequential rule on the host, with copies there and back
``triton``  a CUDA GPU          all but ``sere``, in a launch or a few (``triton_forms`` below),
                                and but for values of ``Policy.torch_only``
==========  ==================  =====================================================================================

The first of triton, numba and torch that is installed runs. Compiled forms equal the one in torch: the same pairs to
the bit, weights within rounding (numba's to the bit too). If Triton cannot be imported, or finds no C compiler, a
warning says so once, and the next form runs. Nothing here imports numba or Triton before it is chosen.

Shapes: T = tokens, E = experts, S = rows of batch statistics.
"""

from __future__ import annotations

import functools
import importlib
import os
import shutil
import sysconfig
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from moe_ep_bench.policies import Policy, Routing, RoutingContext
from moe_ep_bench.policies.capacity import BudgetDrop, CapacityPolicy, ExpandedDrop, TokenDrop
from moe_ep_bench.policies.contract import SteppedPolicy
from moe_ep_bench.policies.laser import Laser, LoadAwarePolicy, LoadOnly
from moe_ep_bench.policies.lazy import Tensor, torch
from moe_ep_bench.policies.oea import OEA, Pruned
from moe_ep_bench.policies.selection import TopK
from moe_ep_bench.policies.skipping import DynamicSkip, ExpertDrop, Lynx
from moe_ep_bench.policies.steps import Steps
from moe_ep_bench.policies.xshare import XShare

KERNELS = ("triton", "numba", "torch")
"""The fastest first."""

Calls = tuple[Callable[..., Routing], Callable[..., Tensor | None]]
"""The functions that ``PolicyForm.select`` and ``PolicyForm.stats`` call."""


@dataclass(frozen=True)
class PolicyForm:
    """A policy in its fastest exact form: ``route`` and ``batch_stats``, and both for inputs that were checked before.

    Attributes:
        device_type: "cpu" or "cuda", where the scores lie.
        is_shared: it routes many virtual ranks for their pairs alone; on the host weights may be 0 (``SharedSteps``).
    """

    policy: Policy
    device_type: str
    is_shared: bool = False

    def route(self, scores_TE: Tensor, context: RoutingContext, stats_SE: Tensor | None = None) -> Routing:
        """``Policy.route``."""
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
        here = self.policy.in_layer(context.layer_fraction)
        return _calls(form_of(here, self.device_type, is_shared=self.is_shared), *scores_TE.shape)

    def runs(self, num_tokens: int, num_experts: int) -> str:
        """Which of ``KERNELS`` routes so many tokens."""
        if self.device_type == "cuda" and _fits_triton(self.policy, num_tokens, num_experts):
            return "triton"
        by_numba = self.device_type == "cpu" or isinstance(self.policy, LoadAwarePolicy)
        # A class of a user's own may have a ``route`` of its own beside the ``select`` that it inherits.
        is_stepped = type(self.policy).route is SteppedPolicy.route
        return "numba" if by_numba and is_stepped else "torch"


_TRITON: Mapping[type[Policy], str] = {
    **dict.fromkeys([TopK, Pruned, DynamicSkip], "rows_triton"),
    **dict.fromkeys([TokenDrop, ExpandedDrop], "capacity_triton"),
    BudgetDrop: "budget_triton",
    **dict.fromkeys([ExpertDrop, Lynx, OEA, XShare], "sets_triton"),
    **dict.fromkeys([Laser, LoadOnly], "laser_triton"),
}


# A timed layer asks anew in every iteration.
@functools.lru_cache(maxsize=1024)
def form_of(policy: Policy, device: torch.device | str, *, is_shared: bool = False) -> PolicyForm:
    """The fastest exact form of a policy for scores on a device."""
    return PolicyForm(policy, str(device).partition(":")[0], is_shared)  # a plan asks, which does not import torch


@functools.lru_cache(maxsize=4096)
def _calls(form: PolicyForm, num_tokens: int, num_experts: int) -> Calls:
    """The functions that run for scores of this shape."""
    kernel, policy = form.runs(num_tokens, num_experts), form.policy
    if kernel == "triton":
        module = triton_forms()[type(policy)]
        stats = getattr(module, "stats", lambda policy, scores_TE, context: None)
        return functools.partial(module.select, policy), functools.partial(stats, policy)
    if type(policy).route is not SteppedPolicy.route:
        return policy.route, policy.batch_stats
    assert isinstance(policy, SteppedPolicy)
    is_shared = form.is_shared and type(policy) in _TRITON  # whose choice needs no weights
    stepped = policy.by(numba_steps(form.device_type, is_shared)) if kernel == "numba" else policy
    return stepped.select, stepped.stats


def oracle_for(policy: Policy, device: torch.device | str) -> Policy:
    """The policy to hold others against: itself, but where torch would go token by token, by numba's loop."""
    if not isinstance(policy, LoadAwarePolicy):
        return policy
    return policy.by(numba_steps(str(device).partition(":")[0]))


def has_triton(policy: Policy) -> bool:
    """Whether there is a Triton form of the policy at all, whatever is installed here; else torch routes on a GPU."""
    is_torch_only = any(getattr(policy, field) == value for field, value in policy.torch_only.items())
    return type(policy) in _TRITON and not is_torch_only


def _fits_triton(policy: Policy, num_tokens: int, num_experts: int) -> bool:
    """Whether Triton can run here, and has a form of this policy for scores of this shape."""
    if triton_lacks() or not has_triton(policy):
        return False
    from moe_ep_bench.kernels import laser_triton, priority_triton, sets_triton, tiles_triton

    if isinstance(policy, XShare) and policy.scope == "request" and num_tokens > sets_triton.MOST_REQUEST_TOKENS:
        return False
    if isinstance(policy, CapacityPolicy):
        most = priority_triton.MOST_PAIRS
    else:
        most = laser_triton.MOST_SCORES if isinstance(policy, LoadAwarePolicy) else num_tokens * num_experts
    return num_experts <= tiles_triton.MOST_EXPERTS and num_tokens * num_experts <= most


@functools.cache
def numba_steps(device_type: str, is_shared: bool = False) -> Steps:
    """The steps by numba's loops."""
    from moe_ep_bench.kernels.policy_steps import DeviceSteps, HostSteps, SharedSteps

    kind = DeviceSteps if device_type != "cpu" else SharedSteps if is_shared else HostSteps
    return kind()


@functools.cache
def triton_forms() -> Mapping[type[Policy], ModuleType]:
    """The module with the ``select`` and, if any, the ``stats`` of each policy that has a Triton form.

    Triton must be installed.
    """
    return {kind: importlib.import_module(f"{__name__}.{module}") for kind, module in _TRITON.items()}


# ---- Triton also needs a C compiler and Python.h, to build a launcher for every kernel -------------------------------


def lacking() -> str:
    """Requirements that Triton lacks to build its launchers, in words; empty where it has all."""
    compilers = [os.environ["CC"]] if os.environ.get("CC") else ["gcc", "clang"]
    if not any(map(shutil.which, compilers)):
        return f"no C compiler ({' or '.join(compilers)})"
    headers = Path(sysconfig.get_paths()["include"], "Python.h")
    return "" if headers.exists() else f"no {headers}"


@functools.cache
def triton_lacks() -> str:
    """Why Triton can run nothing on a GPU here, said once as a warning too; empty where it can."""
    try:
        import triton  # noqa: F401 - is it there?
    except ImportError as error:
        why, what = "Triton is not installed", f"Triton cannot be imported ({error})"
    else:
        if not lacking():
            return ""
        why = what = f"{lacking()}, which Triton needs"
    warnings.warn(
        f"{what}: on the GPU policies and activations run as torch operations, which is exact but several times slower",
        RuntimeWarning,
        stacklevel=2,
    )
    return why
