"""``schema``: every config of ours is valid by it, and misspelt keys are not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from moe_ep_bench import __version__, cli
from moe_ep_bench.cli.json_schema import schema_text

CONFIGS = Path(__file__).parents[1] / "configs"
TYPES = {
    "object": dict, "array": list, "string": str, "integer": int, "number": (int, float), "boolean": bool,
    "null": type(None),
}  # fmt: skip
SCHEMAS = {which: json.loads(schema_text(which)) for which in ("run", "quality")}


def is_valid(value: Any, part: dict[str, Any], root: dict[str, Any]) -> bool:
    """A validator of the words that our schemas use; a word that it does not know is an error."""
    told = {"title", "description", "default", "$schema", "$id", "$defs", "format", "discriminator"}
    for word, rule in sorted(part.items(), key=lambda pair: pair[0] != "type"):
        match word:
            case "$ref":
                kept = is_valid(value, root["$defs"][rule.rpartition("/")[2]], root)
            case "type":
                kept = isinstance(value, TYPES[rule]) and (rule == "boolean" or not isinstance(value, bool))
            case "anyOf" | "oneOf":
                kept = any(is_valid(value, one, root) for one in rule)
            case "not":
                kept = not is_valid(value, rule, root)
            case "enum":
                kept = value in rule
            case "const":
                kept = value == rule
            case "properties":
                kept = all(is_valid(one, rule[key], root) for key, one in value.items() if key in rule)
            case "additionalProperties":
                others = [one for key, one in value.items() if key not in part.get("properties", {})]
                kept = not others if rule is False else rule is True or all(is_valid(o, rule, root) for o in others)
            case "required":
                kept = set(rule) <= set(value)
            case "items":
                kept = all(is_valid(one, rule, root) for one in value)
            case "prefixItems":
                kept = all(is_valid(one, rule_one, root) for one, rule_one in zip(value, rule, strict=False))
            case "minItems" | "minLength" | "minProperties":
                kept = len(value) >= rule
            case "maxItems":
                kept = len(value) <= rule
            case "minimum":
                kept = value >= rule
            case "maximum":
                kept = value <= rule
            case "exclusiveMinimum":
                kept = value > rule
            case "exclusiveMaximum":
                kept = value < rule
            case "pattern":
                kept = True
            case _:
                assert word in told, word
                kept = True
        if not kept:
            return False
    return True


@pytest.mark.parametrize(
    "path", [*sorted(CONFIGS.glob("*.yaml")), *sorted(CONFIGS.glob("papers/*.yaml"))], ids=lambda path: path.stem
)
def test_every_config_of_ours_is_valid(path: Path) -> None:
    schema = SCHEMAS["quality" if path.stem.startswith("quality") else "run"]
    assert is_valid(yaml.safe_load(path.read_text()), schema, schema)


@pytest.mark.parametrize(
    "change",
    [
        {"workloads": {}},
        {"workload": {"kind": "synthetic", "num_tokens": "many"}},
        {"policies": [{"name": "oea"}]},
        {"policies": [{"name": "oea", "k0": 1, "k1": 2}]},
        {"policies": []},
        {"layer": {"dtype": "float8"}},
        {"sweep": {"workload.num_tokens": 3}},
    ],
)
def test_what_a_config_cannot_hold_is_invalid(change: dict[str, Any]) -> None:
    schema, config = SCHEMAS["run"], yaml.safe_load((CONFIGS / "quickstart.yaml").read_text())
    assert is_valid({**config, "policies": [{"name": "./own.py:Own", "field": 1}]}, schema, schema)
    assert not is_valid({**config, **change}, schema, schema)


def test_the_command_prints_a_versioned_schema_with_descriptions(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["schema"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed == SCHEMAS["run"]
    assert __version__ in printed["$id"]
    assert printed["$defs"]["SyntheticConfig"]["properties"]["peak_load"]["description"].startswith("Load of the full")
    assert "name" not in printed["required"]
    assert cli.main(["schema", "route"]) == 2
    assert "expected run (for all commands but quality) or quality, got 'route'" in capsys.readouterr().err
