"""Presets of every kind: they load, their figures have sources, and what is not there is told in one line."""

from __future__ import annotations

import re

import pytest

from moe_ep_bench.config import ModelConfig
from moe_ep_bench.cost_model.devices import Device
from moe_ep_bench.cost_model.links import Links
from moe_ep_bench.facts.words import describe_device, describe_links
from moe_ep_bench.models import ModelSpec, load_model
from moe_ep_bench.presets import Preset

KINDS = (ModelSpec, Device, Links)
# One link alone is no figure.
FIGURE = r"(?!inter: null)\s*(- )?(\[|\w+: *)(\d|null|true|false)"


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind in KINDS for name in kind.names()])
def test_every_preset_loads_and_its_figures_have_sources(kind: type[Preset], name: str) -> None:
    found = kind.named(name)
    lines = (kind.folder() / f"{name}.yaml").read_text().splitlines()
    figures = [line for line in lines if re.match(FIGURE, line)]
    assert len(figures) >= (8 if kind is ModelSpec else 3)
    source = r"#\s+\S+" if kind is ModelSpec else r"#\s+\S+ \S+"  # of a model its key in config.json is enough
    assert [line for line in figures if not re.search(source, line)] == []
    if kind is ModelSpec:
        assert "config.json" in lines[0]
    else:
        assert found.name == name
        words = describe_links(found.facts()) if kind is Links else describe_device(found.facts)
        assert words.startswith(f"modelled by {kind.FOLDER}/{name}: ")


@pytest.mark.parametrize("name", ModelSpec.names())
def test_a_model_is_known_by_its_hugging_face_id(name: str) -> None:
    model_id = ModelSpec.named(name).source.split()[0]
    assert "/" in model_id
    for known_as in (name, model_id, model_id.lower()):
        assert ModelSpec.preset_of(known_as) == name
        assert load_model(known_as) == ModelSpec.named(name)
        assert ModelConfig(preset=known_as).preset == name


@pytest.mark.parametrize("name", ["Qwen/Qwen3-8B", "qwen", "", "/", "olmoe-1b-7b/"])
def test_other_names_are_no_models(name: str) -> None:
    assert ModelSpec.preset_of(name) is None
