"""A JSON schema of configs, from the models that read them: editors complete and check YAML by it."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import itertools
import json
import textwrap
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import GenerateJsonSchema

from moe_ep_bench import __version__
from moe_ep_bench.config import Experiment, SweepPoint
from moe_ep_bench.errors import UserError
from moe_ep_bench.policies import POLICIES

_LAYERS = {"anyOf": [{"type": "array", "items": {"type": "integer"}}, {"const": "all"}]}
# What a file may hold in place of what one experiment holds: it is read into one experiment each.
_LISTED: dict[str, dict[str, dict[str, Any]]] = {
    "SyntheticConfig": {"layer": _LAYERS},
    "RecordedConfig": {"layer": _LAYERS, "trace": {"type": "string"}},
    "Claim": {"paper": {"type": "number"}},
}


class _Schema(GenerateJsonSchema):
    """pydantic's, with the descriptions of fields, and what files may hold besides."""

    def model_schema(self, schema: Any) -> dict[str, Any]:
        model, result = schema["cls"], super().model_schema(schema)
        fields = result["properties"]
        for key, other in _LISTED.get(model.__name__, {}).items():
            fields[key] = {"anyOf": [fields[key], other]}
        for key, text in described(model).items():
            fields[key]["description"] = text
        if not issubclass(model, SweepPoint):
            result.pop("required", None)  # A sweep may give the value.
        return result


def schema_text(which: str) -> str:
    """The schema of a config of ``quality``, or of all other commands (``run``), as JSON.

    Raises:
        ValueError: it is neither.
    """
    kind: type[SweepPoint] = Experiment
    if which == "quality":
        from moe_ep_bench.quality.config import QualityExperiment

        kind = QualityExperiment
    elif which != "run":
        raise UserError(f"CONFIGS: expected run (for all commands but quality) or quality, got {which!r}")
    schema = kind.model_json_schema(schema_generator=_Schema)
    schema["properties"]["policies"]["items"] = _policy_schema()
    schema["properties"] |= {beside: {"type": "object"} for beside in kind.BESIDE}
    schema["properties"]["sweep"]["additionalProperties"] = {"type": "array"}
    schema["required"].remove("name")  # Without it a config has its file's.
    about = {"$id": f"moe-ep-bench-{which}-{__version__}", "title": f"moe-ep-bench {__version__}: a config of {which}"}
    return json.dumps({"$schema": "https://json-schema.org/draft/2020-12/schema", **schema, **about}, indent=2)


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
