"""Names of tables that leave the version open: the newest that fits, by dtype, shape, EP size, exchange and stage."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml

from moe_ep_bench.analysis.cases import load
from moe_ep_bench.bench.advise_config import Bounds, ask
from moe_ep_bench.bench.plan import VIRTUAL, make_point
from moe_ep_bench.cli import main, make_parser
from moe_ep_bench.config import Experiment
from moe_ep_bench.cost_model import tables as reading
from moe_ep_bench.cost_model.expert_rows import load_device, load_device_of_layer
from moe_ep_bench.cost_model.tables import is_open, load_links_of_layer
from moe_ep_bench.errors import OK, UserError
from moe_ep_bench.facts.words import assumption_words, measured_by_words
from moe_ep_bench.models import ModelSpec, load_model

DEEPSEEK = load_model("deepseek-v3")
needs_package = pytest.mark.skipif(find_spec("aiconfigurator_core") is None, reason="the extra `tables`")


def test_a_name_is_open_where_it_ends_before_the_version() -> None:
    assert [is_open(name) for name in ("table:h200_sxm", "table:h200_sxm/sglang")] == [True, True]
    closed = ("h200-sxm", "table:", "table:h200_sxm/", "table:h200_sxm/sglang/0.5.10")
    assert not any(map(is_open, closed))


@needs_package
@pytest.mark.parametrize(
    ("name", "model", "ep_size", "dtype", "exchange", "found"),
    [
        ("table:h200_sxm", "deepseek-v3", 32, "fp8_block", "node", "sglang/0.5.10/deepep_normal"),
        ("table:h200_sxm", "deepseek-v3", 32, "fp8_block", "pair", "sglang/0.5.10/deepep_ll"),
        # Rows of the newer version have no EP 2.
        ("table:h200_sxm/sglang", "deepseek-v3", 2, "fp8_block", "pair", "sglang/0.5.6.post2/deepep_ll"),
        ("table:h200_sxm", "deepseek-v3", 32, "fp8_block", None, "trtllm/1.3.0rc20"),
        # No kernels behind DeepEP of another dtype or shape.
        ("table:h200_sxm", "deepseek-v3", 32, "bfloat16", "node", "trtllm/1.3.0rc10"),
        ("table:h100_sxm", "qwen3-30b-a3b", 8, "bfloat16", "rank", "trtllm/1.3.0rc20"),
        ("table:b200_sxm", "deepseek-v3", 32, "nvfp4", None, "trtllm/1.3.0rc20"),
        ("table:h200_sxm/vllm", "qwen3-30b-a3b", 8, "bfloat16", "rank", "vllm/0.24.0"),
    ],
)
def test_the_newest_rows_that_fit_are_found(
    name: str, model: str, ep_size: int, dtype: str, exchange: Any, found: str
) -> None:
    experts = load_device_of_layer(name, load_model(model), ep_size, dtype, exchange).experts
    assert experts is not None
    assert experts.name == f"{name.partition('/')[0]}/{found}"
    assert load_device(name).name == name.partition("/")[0].removeprefix("table:").replace("_", "-")


@needs_package
@pytest.mark.parametrize(
    ("name", "model", "ranks", "decodes", "found"),
    [
        ("table:h200_sxm", "deepseek-v3", 32, False, "sglang/0.5.6.post2/deepep_normal"),
        ("table:h200_sxm", "deepseek-v3", 32, True, "sglang/0.5.6.post2/deepep_ll"),
        ("table:h200_sxm", "deepseek-v3", 8, False, "sglang/0.5.12/deepep_normal"),
        ("table:h100_sxm/vllm", "deepseek-v3", 8, True, "vllm/0.24.0/deepep_ll"),
    ],
)
def test_the_newest_exchange_of_the_stage_is_found(
    name: str, model: str, ranks: int, decodes: bool, found: str
) -> None:
    exchange = load_links_of_layer(name, load_model(model), ranks, "fp8_block", decodes=decodes).exchange
    assert exchange is not None
    assert exchange.name == f"{name.partition('/')[0]}/{found}"


@needs_package
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("table:h2000", "expected a system of .*; got 'h2000'"),
        ("table:h200_sxm/tensor", "expected a framework of sglang, trtllm, vllm; got 'tensor'"),
        ("table:h200_sxm", "table:h200_sxm has no measured experts of .*, EP 3, fp8_block"),
    ],
)
def test_what_no_table_has_is_said_in_one_line(name: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        load_device_of_layer(name, DEEPSEEK, 3, "fp8_block")


@needs_package
def test_an_exchange_that_nobody_measured_is_said_in_one_line() -> None:
    message = "table:h200_sxm has no exchange measured at decode of hidden size 7168, EP 128"
    with pytest.raises(UserError, match=message):
        load_links_of_layer("table:h200_sxm", DEEPSEEK, 128, "fp8_block", decodes=True)


# ---- the default dtype -----------------------------------------------------------------------------------------------


def config(**keys: Any) -> Experiment:
    raw = {
        "name": "dtype",
        "model": {"preset": "deepseek-v3"},
        "workload": {"kind": "synthetic", "num_tokens": 256, "sequence_length": 8},
        "layer": {"ep_size": 8},
        "policies": [{"name": "topk"}],
        "emulate": {"links": "h100-nvlink4", "device": "h200-sxm"},
        **keys,
    }
    return Experiment.model_validate(raw)


@pytest.mark.parametrize(
    ("preset", "device", "dtype"),
    [
        ("deepseek-v3", "h200-sxm", "fp8_block"),
        ("gpt-oss-20b", "h100-sxm", "w4a16_mxfp4"),
        ("olmoe-1b-7b", "h100-sxm", "bfloat16"),
        # They have no figures of it.
        ("deepseek-v3", "a100-sxm-80gb", "bfloat16"),
        ("deepseek-v3", "h200-sxm-measured", "bfloat16"),
    ],
)
def test_a_modelled_layer_has_the_checkpoints_dtype_where_none_is_given(preset: str, device: str, dtype: str) -> None:
    keys = {"model": {"preset": preset}, "emulate": {"links": "h100-nvlink4", "device": device}}
    comparison = make_point(config(**keys), VIRTUAL, on_cpu=True)
    assert comparison.experiment.layer.dtype == dtype
    asked = make_point(config(**keys, layer={"ep_size": 8, "dtype": "bfloat16"}), VIRTUAL, on_cpu=True)
    assert asked.experiment.layer.dtype == "bfloat16"
    # What a model says of its checkpoint decides nothing else.
    assert (asked.comparison_id == comparison.comparison_id) == (dtype == "bfloat16")


def test_what_runs_here_keeps_bfloat16() -> None:
    experiment = config(model={"preset": "gpt-oss-20b", "scale": 0.03125}, emulate={"links": "h100-nvlink4"})
    assert make_point(experiment, VIRTUAL, on_cpu=True).experiment.layer.dtype == "bfloat16"


def test_fp8_experts_take_less_than_bfloat16_on_a_roofline() -> None:
    loads = [512] * 32
    device = load_device_of_layer("h200-sxm", DEEPSEEK, 8, "fp8_block")
    times = [device.experts_us(7168, 2048, loads, device.precision(dtype)) for dtype in ("bfloat16", "fp8_block")]
    assert 1.2 < times[0] / times[1] <= 2
    with pytest.raises(UserError, match="nvfp4"):
        load_device_of_layer("h200-sxm", DEEPSEEK, 8, "nvfp4")


# ---- advise ----------------------------------------------------------------------------------------------------------


def question(*words: object) -> tuple[dict[str, Any], tuple[str, ...]]:
    options = make_parser().parse_args(["advise", *map(str, words)])
    made = ask(options, Bounds(0.1, 0.95))
    return yaml.safe_load(made.text)["emulate"], tuple(map(assumption_words, made.assumptions))


@needs_package
def test_advise_takes_experts_and_exchange_from_tables_and_says_why_where_it_does_not() -> None:
    taken, notes = question("--model", "mixtral-8x7b", "--ep", 8, "--tokens", 4096, "--peak-load", 2)
    assert (taken["device"], taken["links"]) == ("table:h100_sxm", "table:h100_sxm")
    assert not any("modelled" in note for note in notes)
    wide, notes = question("--model", "qwen3-30b-a3b", "--ep", 16, "--tokens", 4096, "--peak-load", 2)
    assert (wide["device"], wide["links"]) == ("table:h100_sxm", "h100-nvlink4-ndr")
    assert notes[0] == (
        "exchange modelled: table:h100_sxm has no exchange measured at prefill of hidden size 2048, EP 16"
    )
    named = ["--model", "mixtral-8x7b", "--ep", 8, "--tokens", 4096, "--peak-load", 2, "--set", "emulate.device=h20"]
    own, notes = question(*named)
    assert (own["device"], own["links"]) == ("h20", "h20-nvlink4")
    assert not any("modelled" in note for note in notes)


def test_advise_models_all_where_the_package_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "PACKAGE", "no-such-package")
    taken, notes = question("--model", "mixtral-8x7b", "--ep", 8, "--tokens", 4096, "--peak-load", 2)
    assert (taken["device"], taken["links"]) == ("h100-sxm", "h100-nvlink4")
    assert notes[0] == (
        "experts and exchange modelled: no-such-package is not installed; expected: launch/setup.sh --with tables, or "
        "pip install 'moe-ep-bench[tables]'"
    )


@pytest.mark.slow
@needs_package
def test_deepseek_v3_on_four_nodes_of_h200_is_answered_from_tables(tmp_path: Path, capsys: Any) -> None:
    """FP8, as its config.json says, behind DeepEP: the first lines, and the facts that they are made of."""
    out = tmp_path / "out"
    asked = ["--model", "deepseek-v3", "--ep", "32", "--tokens", "2048", "--peak-load", "4", "--out", str(out)]
    changes = ["emulate.overlap=none", "emulate.device=table:h200_sxm", "sweep.workload.seed=[1]"]
    changes.append("workload.num_batches=2")
    assert main(["advise", *asked, *(f"--set={change}" for change in changes)]) == OK
    said = capsys.readouterr().out.splitlines()
    line = next(line for line in said if line.startswith("For "))
    assert "Modelled, partly measured elsewhere: fp8_block, sglang/0.5.6.post2/deepep_normal, one copy per" in line
    assert "experts of sglang/0.5.10/deepep_normal, unfused permutation, no overlap." in line
    assert said.index(line) < 8, "behind the pick, why, what is next and where it turns"
    facts = load([out]).comparisons[0].facts
    assert (facts.dtype, facts.exchange.name, facts.exchange.num_nodes, facts.expert_rows.name) == (
        "fp8_block",
        "table:h200_sxm/sglang/0.5.6.post2/deepep_normal",
        4,
        "table:h200_sxm/sglang/0.5.10/deepep_normal",
    )
    assert measured_by_words(facts.expert_rows.measured_by) == "aiconfigurator-core 0.12.0, SGLang 0.5.10 on H200 SXM"
    assert facts.expert_rows.dtype == "fp8_block"
    (resolved,) = {one["layer"]["dtype"] for one in json.loads((out / "run.json").read_text())["config"]}
    assert resolved == "fp8_block"


@needs_package
def test_a_step_of_decode_takes_masked_rows_behind_low_latency_dispatch() -> None:
    experiment = config(
        workload={"kind": "synthetic", "num_tokens": 256, "sequence_length": 1},
        whole={"context_length": 2048},
        layer={"ep_size": 32},
        emulate={"links": "table:h200_sxm", "device": "table:h200_sxm"},
    )
    comparison = make_point(experiment, VIRTUAL, on_cpu=True)
    assert comparison.links is not None
    assert comparison.device is not None
    assert comparison.links.exchange.name.endswith("/deepep_ll")
    assert comparison.device.experts.name.endswith("/deepep_ll")
    assert ModelSpec.named("deepseek-v3").checkpoint_dtype == "fp8_block"
