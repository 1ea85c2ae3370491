"""A JSON schema of configs, from the models that read them: editors complete and check YAML by it."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import itertools
import textwrap
from typing import Any

from pydantic import BaseModel

from moe_ep_bench import __version__
from moe_ep_bench.config import Experiment, SweepPoint
from moe_ep_bench.errors import UserError
from moe_ep_bench.policies import POLICIES

_LAYERS = {"anyOf": [{"type": "array", "items": {"type": "integer"}}, {"const": "all"}]}
# What a file may hold in place of what one experiment holds: it is read into one experiment each.
_LAYERS = {
    "anyOf": [{"type": "integer", "minimum": 0}, {"type": "array", "items": {"type": "integer"}}, {"const": "all"}]
}
_LISTED: dict[str, dict[str, Any]] = {
    "RecordedConfig.layer": _LAYERS,
    "SyntheticConfig.layer": _LAYERS,
    "RecordedConfig.trace": {"anyOf": [{"type": "string"}, {"$ref": "#/$defs/RecordingConfig"}]},
    "Claim.paper": {"type": "number"},
}


def config_schema(which: str) -> dict[str, Any]:
    """The schema of a config of ``quality``, or of all other commands (``run``).

    Raises:
        ValueError: it is neither.
    """
    kinds: dict[str, type[SweepPoint]] = {"run": Experiment}
    if which == "quality":
        from moe_ep_bench.quality.config import QualityExperiment

        kinds["quality"] = QualityExperiment
    if which not in kinds:
        raise UserError(f"CONFIGS: expected run (for all commands but quality) or quality, got {which!r}")
    kind = kinds[which]
    schema = kind.model_json_schema(by_alias=True)
    models = {model.__name__: model for model in _models(kind)}
    for name, part in {kind.__name__: schema, **schema.get("$defs", {})}.items():
        for key, text in described(models[name]).items():
            part["properties"][key]["description"] = text
    for part in schema.get("$defs", {}).values():
        part.pop("required", None)  # A sweep may give the value.
    for place, other in _LISTED.items():
        name, _, key = place.partition(".")
        if name in schema.get("$defs", {}):
            fields = schema["$defs"][name]["properties"]
            fields[key] = {"description": fields[key].get("description", ""), "anyOf": [fields[key], other]}
    schema["properties"]["policies"]["items"] = _policy_schema()
    for beside in kind.BESIDE:
        schema["properties"][beside] = {"type": "object"}
    schema["properties"]["sweep"]["additionalProperties"] = {"type": "array"}
    schema["required"] = [key for key in schema["required"] if key != "name"]  # Without it a config has its file's.
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": f"moe-ep-bench-{which}-{__version__}",
        **schema,
        "title": f"moe-ep-bench {__version__}: a config of {which}",
    }


def described(model: type[BaseModel]) -> dict[str, str]:
    """The string below each field of a model's source, inherited fields included."""
    texts: dict[str, str] = {}
    for kind in reversed(model.__mro__):
        if not (issubclass(kind, BaseModel) and kind.__module__.startswith("moe_ep_bench")):
            continue
        body = ast.parse(textwrap.dedent(inspect.getsource(kind))).body[0].body
        for field, text in itertools.pairwise(body):
            if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
                texts[field.target.id] = " ".join(inspect.cleandoc(text.value.value).split())
    return {key: text for key, text in texts.items() if key in model.model_fields}


def _models(kind: type[BaseModel]) -> list[type[BaseModel]]:
    from moe_ep_bench.presets import models_in

    below = [model for field in kind.model_fields.values() for model in models_in(field.annotation)]
    return [kind, *(inner for model in below for inner in _models(model))]


def _policy_schema() -> dict[str, Any]:
    """A policy of ours has its fields and no others; one of a user's own, any."""
    ours = [
        {
            "properties": {"name": {"const": name}, **{field.name: {} for field in dataclasses.fields(policy)}},
            "required": ["name", *(f.name for f in dataclasses.fields(policy) if f.default is dataclasses.MISSING)],
            "additionalProperties": False,
        }
        for name, policy in POLICIES.items()
    ]
    own = {"properties": {"name": {"not": {"enum": list(POLICIES)}}}, "required": ["name"]}
    return {"type": "object", "anyOf": [*ours, own]}
