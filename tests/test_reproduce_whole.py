"""Claims of whole models: what they may say, what stands beside them, and how models are told from layers."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from results_builder import FakeComparison, assert_nothing_is_clipped, standard_cases, write_run
from whole_builder import write_whole

from moe_ep_bench.analysis.claims import Claims, load_claims, needed_moe_speedup
from moe_ep_bench.analysis.claims_report import claims_figure, claims_text
from moe_ep_bench.analysis.load import load_run
from moe_ep_bench.analysis.speedups import analyse
from moe_ep_bench.analysis.style import house_style
from moe_ep_bench.analysis.whole import WholeComparison, analyse_whole
from moe_ep_bench.bench.subjects import layer_workloads
from moe_ep_bench.cli import main
from moe_ep_bench.config import ConfigError, load_experiments
from moe_ep_bench.files import write_json
from moe_ep_bench.papers.claims import Claim, claims_path
from moe_ep_bench.papers.run import run_claims
from moe_ep_bench.runtime.exit_codes import OK

TOKEN_DROP = {"name": "token_drop", "capacity_factor": 1.0}
CLAIM = {"source": "Table 1", "policy": TOKEN_DROP, "paper": 1.2, "of": "end_to_end", "note": "nothing is inferred"}
CONFIG: dict[str, Any] = {
    "name": "claims",
    "scope": "model",
    "model": {"preset": "olmoe-1b-7b", "scale": 1 / 64},
    "whole": {"num_layers": 2, "context_length": 16},
    "workload": {"kind": "synthetic", "num_tokens": 8, "num_batches": 2, "sequence_length": 1},
    "layer": {"dtype": "float32"},
    "policies": [TOKEN_DROP],
    "measure": {"iterations": 1, "breakdown_iterations": 1, "warmup": 0, "max_warmup": 1, "timeout_s": 60},
    "emulate": {"links": "h20-nvlink4"},
}
# In ``write_whole`` MoE layers take two thirds of native's pass.
SHARE, LAYERS = 2 / 3, 1.5
END_TO_END = 1 / (1 - SHARE + SHARE / LAYERS)


def write(folder: Path, claims: object, **changes: Any) -> Path:
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump({**CONFIG, "claims": claims, **changes}))
    return path


# ---- what may be claimed -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "config", "message"),
    [
        ({"metric": "layer_time"}, {}, "metric: expected one of .*moe_speedup.* with scope: model, got layer_time"),
        ({"metric": "native_layer_us", "policy": None}, {}, "metric: expected one of .* got native_layer_us"),
        ({"of": "layer"}, {}, r"of: expected end_to_end or not_stated with speedup, .*got layer"),
        ({"metric": "moe_speedup"}, {}, "of: expected layer or not_stated with moe_speedup, got end_to_end"),
        (
            {"metric": "step_time"},
            {"whole": {"num_layers": 2}, "workload": {**CONFIG["workload"], "sequence_length": 4}},
            "metric: expected whole.context_length above 0 with step_time",
        ),
        (
            {"metric": "step_time"},
            {"scope": "layer", "whole": {}},
            "metric: expected a layer's without scope: model, got step_time, a whole model's",
        ),
    ],
)
def test_a_number_that_is_not_timed_here_is_one_line(changes: dict, config: dict, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=rf"^[^\n]*claims\.0\.{message}[^\n]*$"):
        load_experiments(write(tmp_path, [{**CLAIM, **changes}], **config), on_cpu=False)


def test_the_needed_speedup_of_layers_gives_the_papers_number_by_amdahl() -> None:
    for paper in (1.05, 1.5, 2.9):
        needed = needed_moe_speedup(Claim.model_validate({**CLAIM, "paper": paper}), SHARE)
        assert 1 / (1 - SHARE + SHARE / needed) == pytest.approx(paper)
        step = Claim.model_validate({**CLAIM, "paper": 1 / paper, "metric": "step_time"})
        assert needed_moe_speedup(step, SHARE) == pytest.approx(needed)
    assert needed_moe_speedup(Claim.model_validate({**CLAIM, "paper": 3.0}), SHARE) == math.inf
    for changes in ({"paper": None}, {"metric": "moe_speedup", "of": "layer"}, {"versus": {"name": "topk"}}):
        assert needed_moe_speedup(Claim.model_validate({**CLAIM, **changes}), SHARE) is None


# ---- what stands beside it -----------------------------------------------------------------------------------------

ROWS = [
    {"paper": 1.2},
    {"metric": "moe_speedup", "of": "layer", "paper": 1.4},
    {"metric": "step_time", "paper": 0.9},
    {"metric": "tokens_per_s", "of": "not_stated", "paper": [1.1, None]},
    {"metric": "dropped_fraction", "paper": 0.12},
    {"paper": 9.9, "source": "Table 2"},
    {"paper": None, "source": "Table 3"},
    {"paper": 1.2, "versus": {"name": "topk"}},
    {"metric": "moe_speedup", "of": "not_stated"},
]


def claimed(root: Path, comparison: Any, rows: Sequence[dict[str, Any]] = ROWS) -> None:
    """Write claims of the directory's token_drop, against native or topk."""
    cases = {result.case.policy: result.case.case_id for result in comparison.results if result.case.role == "policy"}
    written = [
        {
            "claim": Claim.model_validate({**CLAIM, **changes}).model_dump(mode="json"),
            "policy": "token_drop",
            "policy_params": {"capacity_factor": 1.0},
            "label": "token_drop capacity_factor=1.0",
            "versus": "topk" if "versus" in changes else None,
            "others": {},
            "entries": [
                {
                    "comparison_id": comparison.results[0].case.comparison_id,
                    "case_id": cases["token_drop"],
                    "versus_id": cases["topk"] if "versus" in changes else None,
                    "traffic": "mixed",
                }
            ],
            "needed_key": None,
            "needed": [],
            "needed_tokens_per_rank": None,
        }
        for changes in rows
    ]
    write_json(claims_path(root), {"code": "x", "solved_on": None, "claims": written})


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> Claims:
    root = write_whole(tmp_path_factory.mktemp("whole"), standard_cases())
    claimed(root, whole(root).comparison)
    return load_claims(root)


def whole(root: Path) -> WholeComparison:
    (found,) = analyse_whole(load_run(root, whole=True))
    return found


def test_ours_is_the_pass_and_its_moe_layers(compared: Claims) -> None:
    values = compared.frame["ours"].tolist()
    expected = [END_TO_END, LAYERS, 1 / END_TO_END, END_TO_END]
    assert values[:4] == pytest.approx(expected, rel=0.01)
    found = {one.result.case.policy: one for one in whole(compared.directory).results}["token_drop"]
    assert found.result.speedup is not None
    assert values[0] == found.result.speedup.median
    assert found.result.fidelity is not None
    assert values[4] == found.result.fidelity.dropped_share
    passes, layers = "end_to_end", "layers"
    assert compared.frame["ours_of"].tolist() == [passes, layers, passes, passes, layers, *[passes] * 3, layers]
    assert set(compared.frame["mode"]) == {"whole models, measured"}


def test_the_text_says_that_ours_are_whole_models(compared: Claims) -> None:
    text = claims_text(compared)
    words = " ".join(text.split())
    assert "beside whole models here, from end to end: whole models, measured" in words
    assert "one layer" not in words
    assert "ours: a layer" not in words
    assert "model and traffic" in text
    assert "Table 1, layers: speedup of all MoE layers in a pass" in words
    assert "Table 1, layer or end to end not stated (ours: end to end): relative tokens per second" in words
    share = 1 - 1 / (whole(compared.directory).most or 1)
    assert share == pytest.approx(SHARE, rel=0.02)
    table = {line.split()[0]: line for line in text.splitlines() if line[:1].isdigit() or line[:2].strip().isdigit()}
    needed = needed_moe_speedup(Claim.model_validate({**CLAIM, **ROWS[0]}), share)
    assert table["1"].endswith(f"{needed:.2f}")
    assert table["6"].endswith("not reachable")
    assert table["2"].endswith("-")
    assert table["8"].endswith(" -"), "native is not the other side"
    assert "layer or end to end not stated (ours: all MoE layers)" in words


def test_passes_of_the_first_layers_say_so_and_what_all_would_give(tmp_path: Path) -> None:
    root = write_whole(tmp_path, standard_cases(), of_layers=12)
    claimed(root, whole(root).comparison)
    found = load_claims(root)
    text = claims_text(found)
    assert "the first 3 of 12 layers" in " ".join(text.split())
    assert "[all: ...] extrapolated: 3 of 12 layers were built and timed" in " ".join(text.split())
    ours = {one.result.case.policy: one for one in whole(root).results}["token_drop"]
    speedup = ours.all_layers_speedup
    expected = [speedup, math.nan, 1 / speedup, speedup, math.nan, speedup, speedup]
    assert found.frame["ours_extrapolated_to_all_layers"][:7].tolist() == pytest.approx(expected, nan_ok=True)
    assert f"[all: {speedup:.2f}]" in text


def test_layers_say_where_a_paper_measured_a_whole_model(tmp_path: Path) -> None:
    root = write_run(tmp_path, [FakeComparison(cases=standard_cases(), num_batches=2, num_iterations=1)])
    claimed(root, analyse(load_run(root))[0], ROWS[:1])
    found = load_claims(root)
    text = claims_text(found)
    assert "Papers' numbers beside one layer here" in text
    assert "Table 1, end to end (ours: a layer)" in text
    assert not found.is_whole


def test_the_figure_says_that_ours_are_whole_models_and_hides_nothing(compared: Claims) -> None:
    with house_style():
        figure = claims_figure(compared)
        assert_nothing_is_clipped(figure)
        unstated = compared.frame.assign(paper_low=math.nan, paper_high=math.nan, difference=math.nan)
        assert claims_figure(dataclasses.replace(compared, frame=unstated)) is not None
    texts = [text.get_text() for text in figure.texts]
    assert "whole models, a pass from end to end" in " ".join(" ".join(texts).split())
    assert {"MEASURED", "SYNTHETIC"} <= set(texts)
    titles = [axes.get_title(loc="left") for axes in figure.axes]
    assert titles[:2] == ["speedup", "speedup of all MoE layers in a pass"]


WHOLE = Path(__file__).parents[1] / "configs" / "papers" / "whole"


@pytest.mark.parametrize("name", ["whole-capacity", "whole-capacity-qwen3"])
def test_every_layers_targets_can_be_had_or_are_said_to_be_chances(name: str) -> None:
    """Of whole models, each layer of which draws its experts' popularity from another seed."""
    seen = set()
    by_chance = 0
    for experiment in load_experiments(WHOLE / f"{name}.yaml", ["workload.tokens_per_rank=1024"], on_cpu=False):
        what = experiment.model.preset, experiment.workload.skew, experiment.layer.ep_size
        if what in seen:
            continue
        seen.add(what)
        workloads = list(layer_workloads(experiment, experiment.layer.ep_size).values())
        assert len(workloads) == experiment.model.spec().num_moe_layers
        for workload in workloads[::12]:
            assert len(workload.solved()["placement"]) == experiment.model.spec().num_experts
            by_chance += workload.shares_by_chance
    # One of these three layers of DeepSeek-V2-Lite, with its worst layer's traffic.
    assert by_chance == (name == "whole-capacity")


# ---- the command ---------------------------------------------------------------------------------------------------


def test_whole_models_on_real_ranks_stand_beside_claims(tmp_path: Path) -> None:
    policy = {"name": "token_drop", "capacity_factor": 4.0}
    claims = [
        {**CLAIM, "policy": policy, **changes}
        for changes in (
            {},
            {"metric": "step_time", "paper": 0.9},
            {"metric": "moe_speedup", "of": "layer", "paper": None},
            {"metric": "activated_experts", "of": "layer", "paper": 1.0},
        )
    ]
    one_batch = {"kind": "synthetic", "num_tokens": 8, "num_batches": 1, "sequence_length": 1}
    config, out = write(tmp_path, claims, policies=[policy], workload=one_batch), tmp_path / "out"
    assert main(["papers", str(config), "--out", str(out), "--nproc", "1"]) == OK
    found = load_claims(out)
    assert found.is_whole
    assert found.solved_on is None
    speedup, step, moe, activated = found.frame["ours"]
    assert step == pytest.approx(1 / speedup)  # of one pair
    assert moe > 0
    # A policy that drops activates no more than native.
    assert 0 < activated <= 1
    assert (out / "claims.txt").read_text() == claims_text(found) + "\n"


def test_whole_models_on_a_modelled_device_stand_beside_claims_and_no_skew_is_looked_for(tmp_path: Path) -> None:
    workload = {"kind": "synthetic", "tokens_per_rank": 64, "num_batches": 2, "sequence_length": 32, "peak_load": 2.0}
    config = write(
        tmp_path,
        [CLAIM, {**CLAIM, "metric": "moe_speedup", "of": "layer"}],
        model={"preset": "olmoe-1b-7b"},
        whole={"num_layers": 2},
        workload=workload,
        layer={"ep_size": 4},
        emulate={"links": "h20-nvlink4", "device": "h20"},
        sweep={"workload.peak_load": [2.0, 4.0]},
    )
    assert run_claims(config, tmp_path / "out", []) == OK
    found = load_claims(tmp_path / "out")
    text = " ".join(claims_text(found).split())
    assert "whole models, modelled (nothing was run)" in text
    assert "core attention at 50% of the arithmetic (assumed); launches not counted" in text
    assert "needed, scattered" not in text
    assert found.solved_on is None
    passes, layers = (rows for _, rows in found.frame.groupby("number"))
    for name, ours, moe in zip(passes["comparison_id"], passes["ours"], layers["ours"], strict=True):
        # What no policy touches dilutes the layers' gain, as Amdahl's law has it.
        assert 1 < ours < moe
        share = 1 - 1 / found.wholes[name].most
        assert ours == pytest.approx(1 / (1 - share + share / moe), rel=0.02)
    assert layers["ours"].is_monotonic_increasing
