"""Advice on whole models: by the pass, with what the rest of the model leaves of a layer's gain."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from results_builder import FakeCase, FakeComparison, write_run
from whole_builder import ELSEWHERE_TOTAL_US, write_whole

from moe_ep_bench.analysis.advice import Bounds
from moe_ep_bench.analysis.whole_advice import advice_of
from moe_ep_bench.cli import main

BOUNDS = Bounds(max_dropped=0.10, min_retained=0.95)
# Of a pass: the builder's own two thirds, and 9 %.
LARGE, SMALL = 2 * ELSEWHERE_TOTAL_US, 0.1 * ELSEWHERE_TOTAL_US


def drop(gamma: float, speedup: float, dropped: float, mass: float) -> FakeCase:
    return FakeCase("token_drop", params={"capacity_factor": gamma}, speedup=speedup, dropped=dropped, mass=mass)


POLICIES = (drop(1.0, 2.0, 0.25, 0.80), drop(1.5, 1.6, 0.08, 0.96), drop(2.0, 1.3, 0.04, 0.98))


def told(root: Path, *policies: FakeCase, **changes: Any) -> str:
    """The advice with wrapped lines joined."""
    references = [
        FakeCase("native", role="baseline"),
        FakeCase("native", role="noise", label="native again"),
        FakeCase("topk"),
        FakeCase("native_balanced", role="ceiling", label="native, balanced", speedup=1.7),
    ]
    directory = write_whole(root, [*references, *(policies or POLICIES)], **changes)
    return advice_of(directory, BOUNDS).replace("\n    ", " ").replace("\n  ", "\n")


def line_of(text: str, begin: str) -> str:
    (line,) = [line for line in text.splitlines() if line.startswith(begin)]
    return line


def numbers_of(line: str) -> list[float]:
    return [float(number) for number in re.findall(r"\d+\.\d+", line)]


def test_the_pass_ranks_and_its_layers_and_amdahl_stand_beside(tmp_path: Path) -> None:
    text = told(tmp_path / "run")
    end_to_end = 1 / (1 / 3 + 2 / 3 / 1.6)
    assert numbers_of(line_of(text, "Use token_drop gamma 1.5: "))[1] == pytest.approx(end_to_end, rel=0.02)
    assert "from end to end, faster for sure" in line_of(text, "Use ")
    layers = numbers_of(line_of(text, "Its MoE layers alone: "))
    assert (layers[0], layers[-2], layers[-1]) == pytest.approx((1.6, end_to_end, 3.0), rel=0.03)
    ranked = line_of(text, "Within the bounds, by the pass (MoE layers alone): ")
    assert re.search(
        r"token_drop gamma 1\.5 1\.3\d\d \(1\.\d+\); token_drop gamma 2 1\.1\d\d \(1\.[23]\d\d\)\.", ranked
    )
    assert "gamma 1 " not in ranked, "beyond the bounds"
    assert "looser bounds: token_drop gamma 1 gives 1.5" in text
    assert "gain" not in text.partition("Its MoE layers")[2], "the pass keeps more than half"
    assert text.count("Speedups are of a whole model's pass") == 1


def test_where_the_rest_of_the_model_leaves_little_it_says_so(tmp_path: Path) -> None:
    text = told(tmp_path / "run", native_us=SMALL)
    assert line_of(text, "The rest of the model leaves little of the layers' gain: ").endswith(
        "1.60x of the MoE layers are 1.04x end to end: MoE layers are 9.0 % of a pass."
    )
    assert line_of(text, "Use token_drop gamma 1.5: ")


def test_a_gain_that_dies_in_the_rest_of_the_model_keeps_native(tmp_path: Path) -> None:
    text = told(tmp_path / "run", native_us=SMALL, elsewhere_noise=0.2)
    assert line_of(text, "Keep native: ")
    line = line_of(text, "The layers' gain dies in the rest of the model: ")
    assert re.search(
        r"under token_drop gamma 1\.5 1\.60x of the MoE layers are \d\.\d\dx end to end \((no d|cannot)", line
    )
    assert line.endswith("MoE layers are 9.0 % of a pass, and no policy exceeds 1.099.")


def test_a_layer_that_gains_nothing_loses_nothing(tmp_path: Path) -> None:
    text = told(tmp_path / "run", drop(2.0, 1.0, 0.04, 0.98))
    assert line_of(text, "Keep native: ")
    assert "dies" not in text


def test_layers_that_were_not_built_are_said(tmp_path: Path) -> None:
    text = told(tmp_path / "run", of_layers=9)
    line = line_of(text, "Only 3 of 9 layers were built; extrapolated, no measurement: all 9 would gain 1.")
    assert numbers_of(line)[0] > numbers_of(line_of(text, "Use "))[1]


def test_without_breakdown_iterations_the_layers_are_not_guessed(tmp_path: Path) -> None:
    text = told(tmp_path / "run", kinds=("plain",))
    assert line_of(text, "Its MoE layers alone: not measured")


def test_a_layers_advice_says_once_what_it_is_of(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cases = [FakeCase("native", role="baseline"), FakeCase("native", role="noise", label="again"), *POLICIES]
    directory = write_run(tmp_path / "run", [FakeComparison(cases=cases, num_iterations=1)])
    assert main(["advise", str(directory)]) == 0
    text = capsys.readouterr().out
    assert text.count("of one MoE layer") == 1
    assert "end to end" not in text
