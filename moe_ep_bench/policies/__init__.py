"""Routing policies: pure functions of router scores. ``POLICIES`` is the table of all that come with the package."""

from __future__ import annotations

import copy
import functools
from collections.abc import Mapping
from dataclasses import MISSING, fields
from types import NoneType
from typing import Any, get_args, get_type_hints

from pydantic import ValidationError

from moe_ep_bench.errors import UserError, brief, did_you_mean, problem_words
from moe_ep_bench.policies.budget_drop import BudgetDrop
from moe_ep_bench.policies.capacity import ExpandedDrop, TokenDrop
from moe_ep_bench.policies.contract import Policy, Routing, RoutingContext
from moe_ep_bench.policies.field_types import ByLayer
from moe_ep_bench.policies.laser import Laser, LoadOnly
from moe_ep_bench.policies.megatron_drop import MegatronDrop
from moe_ep_bench.policies.oea import OEA, Pruned
from moe_ep_bench.policies.own import find_policy
from moe_ep_bench.policies.sere import SERE
from moe_ep_bench.policies.skipping import DynamicSkip, ExpertDrop, Lynx
from moe_ep_bench.policies.topk import TopK
from moe_ep_bench.policies.xshare import XShare

_ALL: tuple[type[Policy], ...] = (
    TopK,
    TokenDrop,
    ExpandedDrop,
    ExpertDrop,
    MegatronDrop,
    BudgetDrop,
    Pruned,
    OEA,
    Laser,
    LoadOnly,
    XShare,
    Lynx,
    DynamicSkip,
    SERE,
)
POLICIES: dict[str, type[Policy]] = {policy.name: policy for policy in _ALL}
FIELDS = frozenset(field.name for policy in _ALL for field in fields(policy))
FILE_FIELDS = frozenset(field for policy in _ALL for field in policy.file_fields)

__all__ = [
    "FIELDS",
    "FILE_FIELDS",
    "POLICIES",
    "Policy",
    "Routing",
    "RoutingContext",
    "make_policy",
    "policy_class",
]


def policy_class(name: object) -> type[Policy]:
    """The class of a policy, by its name in ``POLICIES`` or as ``own`` finds those of others.

    Raises:
        ValueError: see ``own.find_policy``.
    """
    return POLICIES[name] if isinstance(name, str) and name in POLICIES else find_policy(name, POLICIES)


def make_policy(spec: Mapping[str, object]) -> Policy:
    """Build a policy from ``{"name": ..., field: value, ...}``.

    Raises:
        ValueError: unknown name or field, a missing field, or a value that is not allowed; the
            message names the field and what is allowed.
    """
    values = dict(spec)
    policy = policy_class(values.pop("name", None))
    name = policy.name
    known = {field.name: field for field in fields(policy)}
    layered = values.pop("by_layer", None)  # of ``Policy.params``
    values |= layered if isinstance(layered, Mapping) and "by_layer" not in known else {}
    for key in values:
        if key not in known:
            allowed = ", ".join(known) or "no fields"
            raise UserError(f"{key}: {name} has no such field; expected {allowed}{did_you_mean(key, known)}")
    for key, field in known.items():
        if field.default is MISSING and key not in values:
            raise UserError(f"{key}: {name} needs it")
    layered = {
        key: value for key, value in values.items() if isinstance(value, Mapping) and key in _number_fields(policy)
    }
    if policy is POLICIES.get(name):
        return _made(policy, values, layered)
    try:
        made = _made(policy, values, layered)
        hash(made)
    except ValueError as error:  # Of its own checks, which name the field.
        raise UserError(" ".join(f"{name}: {error}".split())) from None
    except TypeError as error:  # Of a value that cannot be compared: Python names no field.
        given = ", ".join(f"{key}={brief(value)}" for key, value in values.items())
        raise UserError(" ".join(f"{name}: {given}: {error}".split())) from None
    return made


@functools.cache
def _number_fields(policy: type[Policy]) -> frozenset[str]:
    """The fields that hold numbers, which may differ by layer."""
    try:
        hints = get_type_hints(policy)
    except NameError:  # A policy of a user's own may name types that are there for type checkers alone.
        return frozenset()
    kinds = {name: set(get_args(kind) or (kind,)) for name, kind in hints.items()}
    return frozenset(name for name, kind in kinds.items() if {NoneType} < kind | {NoneType} <= {int, float, NoneType})


def _made(policy: type[Policy], values: Mapping[str, Any], layered: Mapping[str, Any]) -> Policy:
    """A policy whose checks have seen every layer's values."""
    if not layered:
        return _checked(policy, values)
    columns = {key: ByLayer.of(key, value) for key, value in layered.items()}
    lengths = {key: len(column) for key, column in columns.items()}
    if len(set(lengths.values())) > 1:
        raise UserError(f"{', '.join(lengths)}: expected as many layers in each, got {list(lengths.values())}")
    rows = zip(*columns.values(), strict=True)
    of_layers = [_checked(policy, {**values, **dict(zip(columns, row, strict=True))}) for row in rows]
    made = copy.copy(of_layers[0])
    for key in columns:
        object.__setattr__(made, key, ByLayer(getattr(of_layer, key) for of_layer in of_layers))
    return made


def _checked(policy: type[Policy], values: Mapping[str, Any]) -> Policy:
    """A policy whose values fit their fields; ValueError names the first field whose value does not."""
    try:
        return policy(**values)
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        raise UserError(": ".join([*map(str, problem["loc"][:1]), problem_words(problem)])) from None
