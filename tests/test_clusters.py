"""Published numbers of real clusters beside ours: benchmarks/clusters.py, and results/reference/clusters.csv by it."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
import yaml

from moe_ep_bench.cost_model.devices import Device
from moe_ep_bench.facts.words import describe_device
from moe_ep_bench.files import parse_yaml

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT / "benchmarks"))

import clusters  # noqa: E402

STATED = parse_yaml(clusters.FILE.read_text())
ROWS = STATED["rows"]
TABLE = pd.read_csv(ROOT / "results" / "reference" / "clusters.csv")
# Of these the batch is small.
QUICK = [
    place for place, row in enumerate(ROWS)
    if row["source"] == "megatron" or row["config"] in ("qwen3", "replicated")
    or (row["config"] in ("deepep-ll", "one-sided") and row.get("set", {}).keys() <= {"layer.ep_size"}
        and row.get("set", {}).get("layer.ep_size", 8) <= 32)
]  # fmt: skip
BEYOND = 0.25


def named(place: int) -> str:
    return f"{ROWS[place]['source']}-{place}"


@pytest.mark.parametrize("place", range(len(ROWS)), ids=named)
def test_ours_are_within_the_tolerance_of_a_published_number_or_say_what_lacks(place: int) -> None:
    row, found = ROWS[place], TABLE.iloc[place]
    assert (found["source"], found["what"], found["published"]) == (row["source"], row["what"], row["published"])
    assert found["error"] == pytest.approx(found["ours"] / row["published"] - 1, abs=2e-3)
    if row.get("fitted"):
        assert abs(found["error"]) < 1e-3
    elif "lacks" not in row:
        assert abs(found["error"]) <= row["tolerance"]
    else:
        assert found["lacks"] == row["lacks"]


@pytest.mark.slow
@pytest.mark.parametrize("place", QUICK, ids=named)
def test_the_table_is_what_the_program_models(place: int) -> None:
    assert clusters.ours_of(ROWS[place]) == pytest.approx(TABLE["ours"][place], rel=2e-3)


def test_what_is_beyond_a_quarter_says_what_the_model_lacks() -> None:
    beyond = TABLE[(TABLE["error"].abs() > BEYOND) & ~TABLE["fitted"]]
    assert len(beyond)
    assert beyond["lacks"].notna().all()


def test_rows_name_a_source_with_a_link_and_a_config() -> None:
    for row in ROWS:
        assert STATED["sources"][row["source"]]["link"].startswith("https://")
        assert row["config"] in STATED["configs"]
        assert ("tolerance" in row) != row.get("fitted", False), row["what"]
        assert row["kind"] in ("exchange", "experts", "layer", "model")


def test_rows_that_a_fit_has_seen_and_those_of_another_model_count_in_no_error() -> None:
    rows = pd.DataFrame({"source": ["a", "a", "a", clusters.PEER], "kind": ["layer"] * 4,
                         "error": [0.0, -0.2, 0.1, 9.0], "fitted": [True, False, False, False]})  # fmt: skip
    found = clusters.errors(rows).loc["layer"]
    assert (found["size"], found["median"], found["max"]) == (2, pytest.approx(0.15), 0.2)


def test_bandwidth_counts_a_ranks_own_copies() -> None:
    """A token of Mixtral's shape has a copy for each of its two experts, which are on ranks of their own."""
    run = clusters.ran("megatron-mixtral", "{}")
    copies = run.copies()
    assert copies == pytest.approx(4096 * 2)
    assert run.gbps("dispatch") == pytest.approx(copies * 4096 * (1 + 4 / 128) / run.us["dispatch"] / 1e3)
    assert run.gbps("combine") == pytest.approx(copies * 4096 * 2 / run.us["combine"] / 1e3)


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
        return clusters.OF_RUN[row["ours"]](clusters.Run(replace(comparison, device=device))) / row["published"] - 1

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
    assert (comparison.layer_backend.experts, comparison.layer_backend.permute) == (experts, permute)
    words = describe_device(comparison.device.facts)
    assert ("Transformer Engine's passes" in words) == (experts == "te")
    assert f"{comparison.device.permute} permutation at" in words
