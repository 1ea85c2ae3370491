"""``compare`` of whole models: what was planted is found in its part and in the pass, and nowhere else."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from results_builder import FakeComparison, standard_cases, write_run
from whole_builder import ELSEWHERE_TOTAL_US, write_whole

from moe_ep_bench.analysis.compare import compare_directories
from moe_ep_bench.cli import main

DROP = "token_drop gamma 1"
# Half as long again, of experts that are nearly half of the MoE layers' time.
LONGER = {"experts": 1.5}


def model(root: Path, *, seed: int = 0, drop: dict[str, Any] | None = None, **changes: Any) -> Path:
    """A directory of whole models with the standard cases; ``drop`` replaces fields of token_drop."""
    cases = standard_cases()
    cases[0] = dataclasses.replace(cases[0], **(drop or {}))
    return write_whole(root, cases, num_iterations=3, seed=seed, **changes)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model(tmp_path_factory.mktemp("base") / "run")


@pytest.fixture(scope="module")
def longer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Token Drop's experts take longer than in ``base``."""
    return model(tmp_path_factory.mktemp("longer") / "run", seed=1, drop={"phase_factors": LONGER})


def compared(base: Path, new: Path, **options: Any) -> dict[tuple[str, str, str], dict[str, Any]]:
    """Changes by (label, time or speedup, quantity)."""
    change = compare_directories(base, new, **options)
    rows = change.changes.merge(change.cases[["case_id", "label"]]).to_dict("records")
    return {(row["label"], row["of"], row["quantity"]): row for row in rows}


def test_a_longer_part_is_found_there_in_the_pass_and_in_both_speedups(base: Path, longer: Path) -> None:
    drop = {key[1:]: row for key, row in compared(base, longer).items() if key[0] == DROP}
    assert {key: drop[key]["verdict"] for key in drop if key[1] in ("all", "MoE layers", "attention", "the rest")} == {
        ("time", "all"): "slower",
        ("speedup", "all"): "lower",
        ("time", "MoE layers"): "slower",
        ("speedup", "MoE layers"): "lower",
        ("time", "attention"): "no difference",
        ("time", "the rest"): "no difference",
    }
    assert drop["time", "experts"]["ratio"] == pytest.approx(1.5, rel=0.02)
    # What the layers lose is diluted by what is no MoE layer.
    in_layers, in_pass = drop["time", "MoE layers"]["ratio"], drop["time", "all"]["ratio"]
    moe_us = 2 * ELSEWHERE_TOTAL_US / 1.5
    assert in_pass == pytest.approx((ELSEWHERE_TOTAL_US + moe_us * in_layers) / (ELSEWHERE_TOTAL_US + moe_us), rel=0.01)
    assert 1 < in_pass < in_layers


def test_the_parts_of_a_pass_come_to_the_slowest_ranks_pass(base: Path) -> None:
    changes = compared(base, base)
    parts_us = sum(changes["native", "time", part]["base"] for part in ("MoE layers", "attention", "the rest"))
    assert parts_us == pytest.approx(3 * ELSEWHERE_TOTAL_US, rel=0.02)
    assert ("native", "speedup", "MoE layers") not in changes


def test_the_gate_speaks_of_the_pass(base: Path, longer: Path, capsys: pytest.CaptureFixture[str]) -> None:
    in_pass = compared(base, longer)[DROP, "time", "all"]["ratio"] - 1
    command = ["compare", str(base), str(longer), "--fail-over"]
    assert main([*command, f"{50 * in_pass:.2f}%"]) == 1
    printed = capsys.readouterr().out
    assert f"beyond noise: {DROP}" in printed
    for words in ("MoE speedup base", "ms: a pass of the whole model", "phases of all MoE layers together"):
        assert words in printed
    assert main([*command, f"{200 * in_pass:.2f}%", "--json"]) == 0
    (comparison,) = json.loads(capsys.readouterr().out)["comparisons"]
    told = next(case for case in comparison["cases"] if case["label"] == DROP)
    assert told["parts_us"]["MoE layers"]["verdict"] == "slower"
    assert told["moe_speedup"]["verdict"] == "lower"


def test_models_and_layers_are_never_compared(base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    layers = write_run(tmp_path / "layers", [FakeComparison(cases=standard_cases(), num_iterations=2)])
    for pair in ((base, layers), (layers, base)):
        assert main(["compare", *map(str, pair)]) == 2
        told = capsys.readouterr().err
        assert told.count("\n") == 1
        assert "expected two directories of one scope" in told
