"""run.json holds facts; the sentences of results are composed from them when they are printed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from results_builder import FakeComparison, modelled_facts, standard_cases, write_run

from moe_ep_bench.analysis.cases import comparisons
from moe_ep_bench.analysis.store import load
from moe_ep_bench.cli import main
from moe_ep_bench.facts import Assumption

# Words that a config or somebody else wrote, reasons, and labels of cases.
IN_WORDS = {"source", "departures", "why", "label"}


def texts(value: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """Every text of a JSON value, with the key that holds it."""
    if isinstance(value, str):
        yield key, value
    elif isinstance(value, dict):
        for name, one in value.items():
            yield from texts(one, name)
    elif isinstance(value, list):
        for one in value:
            yield from texts(one, key)


def test_run_json_says_what_ran_in_facts_of_which_none_is_a_sentence(tmp_path: Path) -> None:
    shape = {"name": "Tiny", "num_experts": 8, "top_k": 2, "hidden_size": 64, "ffn_hidden_size": 32}
    config = {
        "name": "modelled",
        "model": shape,
        "workload": {"kind": "synthetic", "num_tokens": 64, "num_batches": 2, "peak_load": 2.0},
        "layer": {"ep_size": 4},
        "policies": [{"name": "token_drop", "capacity_factor": 1.0}],
        "emulate": {"device": "h20", "links": "h20-nvlink4", "bandwidth_scale": 2.0},
    }
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    assert main(["emulate", str(path), "--out", str(tmp_path / "out")]) == 0
    described = json.loads((tmp_path / "out" / "run.json").read_text())
    found = list(texts([described["comparisons"], described["cases"]]))
    assert [text for key, text in found if key not in IN_WORDS and text.count(" ") > 1] == []
    (facts,) = described["comparisons"].values()
    assert (facts["device"]["name"], facts["links"]["bandwidth_scale"]) == ("h20", 2.0)
    (about,) = comparisons(load(tmp_path / "out")).to_dict("records")
    assert (about["device"], about["links"]) == ("h20", "h20-nvlink4, bandwidth x 2")
    assert about["links_words"].startswith("modelled by links/h20-nvlink4, bandwidth x 2: inside a node of 8 ")


def test_a_device_that_is_a_sentence_is_one_line_that_names_the_key(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    facts = {**modelled_facts(), "device": "modelled by devices/h100-sxm: a roofline"}
    write_run(tmp_path, [FakeComparison(cases=standard_cases(), facts=facts, num_batches=1)], "emulated")
    assert main(["show", str(tmp_path)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "run.json: comparisons.c0.device: expected " in line


def test_an_assumption_of_an_unknown_kind_is_refused() -> None:
    with pytest.raises(ValueError, match="kind"):
        Assumption(kind="guessed")
