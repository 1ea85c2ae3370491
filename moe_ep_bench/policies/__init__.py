"""Routing policies: pure functions of router scores. ``POLICIES`` is the table of all that come with the package."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import MISSING, fields
from typing import Any

from moe_ep_bench.errors import UserError, did_you_mean
from moe_ep_bench.policies.budget_drop import BudgetDrop
from moe_ep_bench.policies.by_layer import ByLayer
from moe_ep_bench.policies.capacity import ExpandedDrop, TokenDrop
from moe_ep_bench.policies.contract import Policy, Routing, RoutingContext
from moe_ep_bench.policies.laser import Laser, LoadOnly
from moe_ep_bench.policies.megatron_drop import MegatronDrop
from moe_ep_bench.policies.oea import OEA, Pruned
from moe_ep_bench.policies.own import find_policy
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
)
POLICIES: dict[str, type[Policy]] = {policy.name: policy for policy in _ALL}

__all__ = ["POLICIES", "Policy", "Routing", "RoutingContext", "make_policy", "policy_class"]


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
    layered = {key: value for key, value in values.items() if _is_by_layer(known[key].type, value)}
    if policy is POLICIES.get(name):
        return _made(policy, values, layered)
    try:
        made = _made(policy, values, layered)
        hash(made)
    except (TypeError, ValueError) as error:  # Of its own checks, or of a value that cannot be compared.
        raise UserError(" ".join(f"{name}: {error}".split())) from None
    return made


def _is_by_layer(annotation: object, value: object) -> bool:
    """Whether a value is a list or a mapping where the field holds a number."""
    kinds = set(str(getattr(annotation, "__name__", annotation)).replace(" ", "").split("|"))
    return isinstance(value, list | tuple | Mapping) and {"None"} < kinds | {"None"} <= {"int", "float", "None"}


def _made(policy: type[Policy], values: Mapping[str, Any], layered: Mapping[str, Any]) -> Policy:
    """A policy whose checks have seen every layer's values."""
    if not layered:
        return policy(**values)
    columns = {key: ByLayer.of(key, value) for key, value in layered.items()}
    lengths = {key: len(column) for key, column in columns.items()}
    if len(set(lengths.values())) > 1:
        raise UserError(f"{', '.join(lengths)}: expected as many layers in each, got {list(lengths.values())}")
    rows = zip(*columns.values(), strict=True)
    of_layers = [policy(**{**values, **dict(zip(columns, row, strict=True))}) for row in rows]
    made = copy.copy(of_layers[0])
    for key in columns:
        object.__setattr__(made, key, ByLayer(getattr(one, key) for one in of_layers))
    return made
