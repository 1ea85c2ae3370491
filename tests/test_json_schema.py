"""``schema``: every config of ours is valid by it, and misspelt keys are not."""

from __future__ import annotations

import json
from collections.abc import Callable
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


def others_of(value: dict[str, Any], part: dict[str, Any]) -> list[Any]:
    return [entry for key, entry in value.items() if key not in part.get("properties", {})]


# What each word of our schemas asks of a value: of the word's rule, the part that it stands in, and a validator.
WORDS: dict[str, Callable[[Any, Any, dict[str, Any], Callable[[Any, Any], bool]], bool]] = {
    "type": lambda value, rule, *_: isinstance(value, TYPES[rule]) and (rule == "boolean") == isinstance(value, bool),
    "anyOf": lambda value, rule, _, is_valid: any(is_valid(value, part) for part in rule),
    "oneOf": lambda value, rule, _, is_valid: any(is_valid(value, part) for part in rule),
    "not": lambda value, rule, _, is_valid: not is_valid(value, rule),
    "enum": lambda value, rule, *_: value in rule,
    "const": lambda value, rule, *_: value == rule,
    "properties": lambda value, rule, _, is_valid: all(is_valid(value[key], rule[key]) for key in value.keys() & rule),
    "additionalProperties": lambda value, rule, part, is_valid: all(
        rule if isinstance(rule, bool) else is_valid(entry, rule) for entry in others_of(value, part)
    ),
    "required": lambda value, rule, *_: set(rule) <= set(value),
    "items": lambda value, rule, _, is_valid: all(is_valid(entry, rule) for entry in value),
    "prefixItems": lambda value, rule, _, is_valid: all(map(is_valid, value, rule)),
    **dict.fromkeys(("minItems", "minLength"), lambda value, rule, *_: len(value) >= rule),
    "maxItems": lambda value, rule, *_: len(value) <= rule,
    "minimum": lambda value, rule, *_: value >= rule,
    "maximum": lambda value, rule, *_: value <= rule,
    "exclusiveMinimum": lambda value, rule, *_: value > rule,
    "exclusiveMaximum": lambda value, rule, *_: value < rule,
    **dict.fromkeys(
        ("title", "description", "default", "$schema", "$id", "$defs", "format", "discriminator", "pattern"),
        lambda *_: True,
    ),
}


def is_valid(value: Any, part: dict[str, Any], root: dict[str, Any]) -> bool:
    """A validator of the words that our schemas use."""
    if "$ref" in part:
        return is_valid(value, root["$defs"][part["$ref"].rpartition("/")[2]], root)
    words = sorted(part, key=lambda word: word != "type")
    return all(WORDS[word](value, part[word], part, lambda *pair: is_valid(*pair, root)) for word in words)


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


def test_the_command_prints_a_versioned_schema(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["schema"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed == SCHEMAS["run"]
    assert __version__ in printed["$id"]
    assert "name" not in printed["required"]
    assert cli.main(["schema", "route"]) == 2
    assert "expected run (for all commands but quality) or quality, got 'route'" in capsys.readouterr().err
