"""Routing policies: pure functions of router scores. ``POLICIES`` is the table of all that come with the package."""

from __future__ import annotations

import functools
import hashlib
import importlib
import inspect
import json
import re
from collections.abc import Mapping
from dataclasses import MISSING, fields
from pathlib import Path

from pydantic import PydanticUserError, TypeAdapter, ValidationError

from moe_ep_bench.errors import UserError, brief, did_you_mean, problem_error
from moe_ep_bench.policies.capacity import BudgetDrop, ExpandedDrop, TokenDrop
from moe_ep_bench.policies.contract import Policy, Routing, RoutingContext
from moe_ep_bench.policies.laser import Laser, LoadOnly
from moe_ep_bench.policies.oea import OEA, Pruned
from moe_ep_bench.policies.selection import TopK
from moe_ep_bench.policies.sere import SERE
from moe_ep_bench.policies.skipping import DynamicSkip, ExpertDrop, Lynx
from moe_ep_bench.policies.xshare import XShare

_ALL: tuple[type[Policy], ...] = (
    TopK,
    TokenDrop,
    ExpandedDrop,
    ExpertDrop,
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
# Names of cases that are no policies.
_RESERVED = ("native", "native_balanced", "eplb")

__all__ = [
    "FIELDS",
    "POLICIES",
    "Policy",
    "Routing",
    "RoutingContext",
    "make_policy",
    "policy_class",
    "source_hash",
]


def make_policy(spec: Mapping[str, object]) -> Policy:
    """Build a policy from ``{"name": ..., field: value, ...}``.

    Raises:
        ValueError: unknown name or field, a missing field, or a value that is not allowed; the
            message names the field and what is allowed.
    """
    values = dict(spec)
    kind = policy_class(values.pop("name", None))
    known = {field.name: field for field in fields(kind)}
    for key in values:
        if key not in known:
            allowed = ", ".join(known) or "no fields"
            raise UserError(f"{kind.name} has no such field; expected {allowed}{did_you_mean(key, known)}", key)
    for key, field in known.items():
        if field.default is MISSING and key not in values:
            raise UserError(f"{kind.name} needs it", key)
    try:
        # A user's plain dataclass checks nothing by itself. Values are JSON's: a list is a tuple, a word no number.
        is_ours = kind is POLICIES.get(kind.name)
        made = kind(**values) if is_ours else TypeAdapter(kind).validate_json(json.dumps(values), strict=True)
        hash(made)
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        raise problem_error(problem, ".".join(map(str, problem["loc"][:1]))) from None
    except (TypeError, ValueError, PydanticUserError) as error:
        given = ", ".join(f"{key}={brief(value)}" for key, value in values.items())
        raise UserError(" ".join(f"{kind.name} ({given}): {error}".split())) from None
    lengths = {key: len(column) for key, column in made.by_layer.items()}
    if len(set(lengths.values())) > 1:
        raise UserError(f"expected as many layers in each, got {list(lengths.values())}", *lengths)
    return made


def policy_class(name: object) -> type[Policy]:
    """The class of a policy, by its name in ``POLICIES`` or as ``package.module:Class``.

    The module of a user's class is one that Python finds (PYTHONPATH). The class is a frozen dataclass that extends
    ``Policy``, and implements ``route``.

    Raises:
        ValueError: there is none of that name, it cannot be imported, or it breaks the contract.
    """
    if isinstance(name, str) and name in POLICIES:
        return POLICIES[name]
    module, colon, class_name = str(name).rpartition(":")
    if not colon:
        known = f"one of {', '.join(POLICIES)} or package.module:Class"
        raise UserError(f"expected {known}; got {brief(name)}{did_you_mean(name, POLICIES)}", "name")
    try:
        kind = getattr(importlib.import_module(module), class_name)
    except (Exception, SystemExit) as error:
        words = f"{type(error).__name__}: {' '.join(str(error).split())}"[:200]
        hint = "; PYTHONPATH names the folder of a module" if isinstance(error, ModuleNotFoundError) else ""
        raise UserError(f"cannot load {name!r}: {words}{hint}", "name") from None
    is_policy = isinstance(kind, type) and issubclass(kind, Policy) and kind.route is not Policy.route
    if not is_policy or "__dataclass_params__" not in vars(kind):
        expected = "@dataclass(frozen=True, kw_only=True) on a class that extends moe_ep_bench.policies.Policy"
        raise UserError(f"{name}: expected {expected} and has a method route(scores_TE, context, stats=None)", "name")
    own = getattr(kind, "name", None)
    if not re.fullmatch(r"[a-z][a-z0-9_]*", str(own)) or own in (*POLICIES, *_RESERVED):
        expected = "its name in lower case, digits and _, and none of moe-ep-bench's"
        raise UserError(f"{name}: expected {expected}; got {brief(own)}", "name")
    return kind


@functools.cache
def source_hash(kind: type[Policy]) -> str | None:
    """SHA-256 of the files that define a policy; None for one of this package, whose code results name as a whole.

    Read once, when the class was just imported: a later edit is not what runs.
    """
    package = __name__.partition(".")[0]
    kinds = [base for base in kind.__mro__ if base.__module__.partition(".")[0] not in (package, "builtins")]
    files = dict.fromkeys(inspect.getfile(base) for base in kinds)
    return hashlib.sha256(b"".join(Path(file).read_bytes() for file in files)).hexdigest() if files else None
