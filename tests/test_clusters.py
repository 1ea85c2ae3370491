"""Published numbers of real clusters beside ours (benchmarks/clusters.py): each within the tolerance that it states."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
import yaml

from moe_ep_bench.cost_model.devices import Device
from moe_ep_bench.files import parse_yaml

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT / "benchmarks"))

import clusters  # noqa: E402

STATED = parse_yaml(clusters.FILE.read_text())
ROWS = STATED["rows"]


@pytest.mark.parametrize("place", range(len(ROWS)), ids=lambda place: f"{ROWS[place]['source']}-{place}")
def test_ours_are_within_the_tolerance_of_a_published_number(place: int) -> None:
    row = ROWS[place]
    ours = clusters.ours_of(row, STATED)
    allowed = 0.001 if row.get("fitted") else row["tolerance"]
    assert ours == pytest.approx(row["published"], rel=allowed)


def test_rows_name_a_source_with_a_link_and_a_config() -> None:
    for row in ROWS:
        assert STATED["sources"][row["source"]]["link"].startswith("https://")
        assert row["config"] in STATED["configs"]
        assert ("tolerance" in row) != row.get("fitted", False), row["what"]


def test_rows_that_a_fit_has_seen_count_in_no_error() -> None:
    rows = pd.DataFrame({"kind": ["layer"] * 3, "error": [0.0, -0.2, 0.1], "fitted": [True, False, False]})
    found = clusters.errors(rows).loc["layer"]
    assert (found["size"], found["median"], found["max"]) == (2, pytest.approx(0.15), 0.2)


def test_the_fitted_figures_of_transformer_engines_layer_are_those_of_its_file() -> None:
    """Two rows decide two figures: a factor on h100-sxm's shares, and permutation's share."""
    fit = yaml.safe_load("\n".join(clusters.fitted()))
    stated = yaml.safe_load((Device.folder() / f"{clusters.FITTED}.yaml").read_text())
    assert {key: stated[key] for key in fit} == fit
    shares, like = (Device.named(name).arithmetic_efficiency.root for name in (clusters.FITTED, clusters.LIKE))
    factors = [one / other for (_, one), (_, other) in zip(shares, like, strict=True)]
    assert factors == pytest.approx([0.919] * 7, abs=3e-3)


def test_without_its_passes_or_its_fused_kernels_the_layer_would_not_fit() -> None:
    """What the rows held out of the fit show: each part of Transformer Engine's layer is needed."""
    row = next(row for row in ROWS if row["what"] == "DeepSeek's shape, all-to-all, fp8")
    comparison = clusters.compared(STATED["configs"][row["config"]], row["set"])

    def error(**changes: object) -> float:
        device = comparison.device.model_copy(update=changes)
        return clusters.OURS[row["ours"]](replace(comparison, device=device)) / row["published"] - 1

    assert abs(error()) < 0.05
    assert error(experts_as="grouped") < -0.25
    assert error(permute="unfused") > error()


@pytest.mark.parametrize(
    ("settings", "experts", "permute"),
    [
        ({}, "te", "fused"),
        ({"layer.permute": "unfused"}, "te", "indexed"),
        ({"emulate.device": "h100-sxm"}, "grouped", "indexed"),
        ({"emulate.device": "h100-sxm", "layer.permute": "fused"}, "grouped", "fused"),
        ({"emulate.links": "table:h100_sxm/trtllm/1.3.0rc11/trtllm_deepep_ll"}, "te", "none"),
    ],
)
def test_a_comparison_says_which_layer_is_modelled(settings: dict[str, str], experts: str, permute: str) -> None:
    comparison = clusters.compared(STATED["configs"]["megatron-deepseek"], settings)
    assert (comparison.parts.experts, comparison.parts.permute) == (experts, permute)
    words = comparison.device.describe()
    assert ("Transformer Engine's passes" in words) == (experts == "te")
    assert f"{comparison.device.permute} permutation at" in words
