"""A JSON schema of configs, from the models that read them: editors complete and check YAML by it."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

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
    schema = kind.model_json_schema()
    for name, part in schema["$defs"].items():
        part.pop("required", None)  # A sweep may give the value.
        for key, other in _LISTED.get(name, {}).items():
            part["properties"][key] = {"anyOf": [part["properties"][key], other]}
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
