"""Find policies that stand outside of this package.

A config's ``name:`` may be a name of ``POLICIES``, ``package.module:Class``, or ``my_policy.py:Class`` (a path, in a
config relative to its folder). What is found is a frozen dataclass that extends ``Policy`` and implements ``route``.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import importlib
import re
import sys
from collections.abc import Collection
from pathlib import Path
from types import ModuleType

from moe_ep_bench.errors import UserError, brief, did_you_mean
from moe_ep_bench.policies.contract import Policy

_PACKAGE = __name__.partition(".")[0]
# Names of cases that are no policies.
_RESERVED = ("native", "native_balanced", "eplb")


def is_file(reference: str) -> bool:
    """Whether a policy's name is ``some/file.py:Class``."""
    return reference.rpartition(":")[0].endswith(".py")


def without_folder(reference: str) -> str:
    """``some/file.py:Class`` as ``file.py:Class``, any other name as it is: what results say."""
    return Path(reference).name if is_file(reference) else reference


def find_policy(reference: object, taken: Collection[str]) -> type[Policy]:
    """The class that a name stands for.

    Args:
        taken: names that the package's own policies have.

    Raises:
        ValueError: there is none of that name, it cannot be imported, or it breaks the contract.
    """
    if not isinstance(reference, str) or not reference:
        raise UserError(f"name: expected one of {', '.join(taken)}; got {brief(reference)}")
    place, colon, name = reference.rpartition(":")
    if not colon:
        raise UserError(
            f"name: expected one of {', '.join(taken)}, package.module:Class or my_policy.py:Class; got"
            f" {brief(reference)}{did_you_mean(reference, taken)}"
        )
    try:
        module = _load_file(Path(place)) if place.endswith(".py") else importlib.import_module(place)
    except Exception as error:
        words = f"{type(error).__name__}: {' '.join(str(error).split())}"[:200]
        raise UserError(f"name: cannot load {reference!r}: {words}") from None
    return _checked(getattr(module, name, None), reference, taken)


def source_hash(policy: type[Policy]) -> str | None:
    """SHA-256 of the files that define a policy; None for one of this package, whose code results name as a whole."""
    modules = dict.fromkeys(kind.__module__ for kind in policy.__mro__ if kind is not object)
    names = [name for name in modules if name.partition(".")[0] != _PACKAGE and name in sys.modules]
    return hashlib.sha256("".join(map(_module_hash, names)).encode()).hexdigest() if names else None


@functools.cache
def _module_hash(name: str) -> str:
    """Of a module that is imported once: read once, or a later edit would be taken for what runs."""
    module = sys.modules[name]
    if (known := getattr(module, "_source_sha256", None)) is not None:
        return known
    file = getattr(module, "__file__", None)
    return hashlib.sha256(Path(file).read_bytes()).hexdigest() if file else name


def _load_file(path: Path) -> ModuleType:
    """A file as a module: the same one for the same content, another one once it was edited."""
    path, content = path.resolve(), path.read_bytes()
    digest = hashlib.sha256(content).hexdigest()
    name = f"{re.sub(r'[^A-Za-z0-9_]', '_', path.stem)}_{digest[:12]}"
    if name not in sys.modules:
        module = sys.modules[name] = ModuleType(name)  # Dataclasses look for it there.
        module.__dict__.update(__file__=str(path), _source_sha256=digest)
        try:
            exec(compile(content, str(path), "exec"), module.__dict__)
        except BaseException:
            del sys.modules[name]
            raise
    return sys.modules[name]


def _checked(kind: object, reference: str, taken: Collection[str]) -> type[Policy]:
    if not isinstance(kind, type):
        raise UserError(f"name: {reference}: there is no such class in it")
    if not issubclass(kind, Policy):
        raise UserError(f"name: {reference}: expected a class that extends moe_ep_bench.policies.Policy")
    options = kind.__dict__.get("__dataclass_params__")
    if not dataclasses.is_dataclass(kind) or options is None or not options.frozen:
        raise UserError(f"name: {reference}: expected @dataclass(frozen=True, kw_only=True) above the class")
    name = getattr(kind, "name", None)
    if not isinstance(name, str) or not re.fullmatch(r"[a-z][a-z0-9_]*", name):
        raise UserError(f"name: {reference}: expected its name in lower case, digits and _, got {brief(name)}")
    if name in (*taken, *_RESERVED):
        raise UserError(f"name: {reference}: its name {name} is that of a policy of moe-ep-bench; give it another")
    if kind.route is Policy.route:
        raise UserError(f"name: {reference}: expected a method route(scores_TE, context, stats=None)")
    return kind
