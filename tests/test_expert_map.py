"""``trace eplb``: the plan of ``placement.replicate``, as the one key that SGLang reads; mistakes in one line."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from test_trace_info import loads_entry, write_loads

from moe_ep_bench import cli
from moe_ep_bench.placement import replicate

LOADS = {"0": [9, 1, 3, 3], "1": [1, 9, 4, 2]}
PLAN = ["--ep", "2", "--spare-per-rank", "1"]


@pytest.fixture
def loads(tmp_path: Path) -> Path:
    return write_loads(tmp_path / "loads.json", loads_entry(load_E_by_layer=LOADS))


def test_a_file_says_of_every_slot_which_expert_it_holds(
    loads: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "map.json"
    assert cli.main(["trace", "eplb", str(loads), str(out), *PLAN]) == 0
    written = json.loads(out.read_text())
    assert list(written) == ["physical_to_logical_map"]  # SGLang passes all keys on by name.
    slots_LP = np.array(written["physical_to_logical_map"])
    assert slots_LP.shape == (2, 6)
    plan = replicate(list(LOADS.values()), num_slots=6, num_ranks=2)
    assert np.array_equal(slots_LP, plan.slot_expert_LP)
    for load_E, slot_P in zip(LOADS.values(), slots_LP, strict=True):
        replicas_E = np.bincount(slot_P, minlength=4)
        assert (replicas_E >= 1).all()
        assert replicas_E[np.argmax(load_E)] == 3  # both spare slots go to the busiest
        rank_load = [sum(load_E[expert] / replicas_E[expert] for expert in rank) for rank in slot_P.reshape(2, 3)]
        assert max(rank_load) < max(sum(load_E[:2]), sum(load_E[2:]))
    assert "fullest rank over the mean" in capsys.readouterr().out


def test_dense_layers_of_a_model_have_rows_too(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    load = {str(layer): (np.bincount(rng.integers(64, size=594), minlength=64)).tolist() for layer in range(26)}
    loads = write_loads(tmp_path / "loads.json", {**loads_entry(load_E_by_layer=load), "top_k": 6})
    out = tmp_path / "map.json"
    assert cli.main(["trace", "eplb", str(loads), str(out), "--ep", "8", "--spare-per-rank", "1", "--preset",
                     "deepseek-v2-lite"]) == 0  # fmt: skip
    rows = json.loads(out.read_text())["physical_to_logical_map"]
    assert len(rows) == 27
    assert rows[0] == [slot % 64 for slot in range(72)]


MISTAKES = {
    "ranks": (["--ep", "3", "--spare-per-rank", "1"], "--ep: expected a divisor of the 4 experts of loads.json, got 3"),
    "no ranks": (["--ep", "0", "--spare-per-rank", "1"], "--ep: expected at least 1, got 0"),
    "spares": (["--ep", "2", "--spare-per-rank", "-1"], "--spare-per-rank: expected at least 0, got -1"),
    "model": ([*PLAN, "--preset", "olmoe-1b-7b"], "--preset: olmoe-1b-7b has 16 layers of 64 experts, loads.json has"),
    "unknown": ([*PLAN, "--preset", "olmoe"], "(did you mean olmoe-1b-7b?)"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_what_does_not_fit_is_one_line(
    name: str, loads: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options, message = MISTAKES[name]
    assert cli.main(["trace", "eplb", str(loads), str(tmp_path / "map.json"), *options]) == 2
    said = capsys.readouterr().err
    assert message in said
    assert said.count("\n") == 1
    assert not (tmp_path / "map.json").exists()
