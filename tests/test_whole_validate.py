"""``validate`` of whole models: what differs is found in its part of the pass, layer by layer where routing does."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from results_builder import FakeCase, standard_cases
from test_model_run import write_config
from test_run import environment
from whole_builder import ELSEWHERE_TOTAL_US, ELSEWHERE_US, MOE_LAYERS, write_whole

from moe_ep_bench.analysis.load import Case, ResultsError, load_run
from moe_ep_bench.analysis.validation import Validation, load_validation
from moe_ep_bench.analysis.validation_report import validation_text, verdict_line
from moe_ep_bench.analysis.validation_times import PASS_TIMES, load_laws, phase_times_ms, received_rows
from moe_ep_bench.bench.validation_directory import ValidationDirectory
from moe_ep_bench.cli import main
from moe_ep_bench.results import RunDirectory
from moe_ep_bench.runtime.exit_codes import OK, USER_ERROR
from moe_ep_bench.schema import LAYER_PHASES, MODEL_PHASES, ROUTING_SCHEMA, TOTAL, UNACCOUNTED

IDS = {"real": "r", "emulated": "e"}
DROP = "token_drop gamma 1"


def cases(**of_drop: Any) -> list[FakeCase]:
    first, *others = standard_cases()
    return [dataclasses.replace(first, **of_drop), *others]


def built(root: Path, **of_emulated: Any) -> Path:
    """A directory of ``validate``; keyword arguments of ``write_whole`` for its emulated run."""
    files = ValidationDirectory(root)
    for seed, (what, comparison_id) in enumerate(IDS.items()):
        changes = {"cases": cases(), **(of_emulated if what == "emulated" else {})}
        mode = "run" if what == "real" else "emulated"
        write_whole(root / what, mode=mode, seed=seed, comparison_id=comparison_id, num_iterations=3, **changes)
        path = root / what / "run.json"
        described = json.loads(path.read_text())
        described["environment"]["threads_per_rank"] = 1
        path.write_text(json.dumps(described))
    files.write_pairs([tuple(IDS.values())], "calibrated on these ranks")
    return root


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory whose runs are alike; not to be written to."""
    return built(tmp_path_factory.mktemp("built"))


def verdicts(validation: Validation) -> dict[str, str]:
    """Of the claims, by label."""
    return validation.claims.set_index("label")["verdict"].to_dict()


def test_end_to_end_speedups_of_alike_runs_agree(plain: Path, capsys: pytest.CaptureFixture[str]) -> None:
    validation = load_validation(plain)
    assert set(verdicts(validation).values()) == {"agrees"}
    assert verdict_line(validation).startswith("3 of 3 speedups agree")
    assert "; of MoE layers alone 3 of 3, largest" in verdict_line(validation)
    silent = dataclasses.replace(validation, cases=validation.cases.assign(moe_verdict="inconclusive"))
    assert "; of MoE layers alone 0 of 3 (3 cannot be judged), largest" in verdict_line(silent)
    text, first = validation_text(validation), validation.cases.iloc[0]
    words = f"{first['moe_floor_low']:.3f} to {first['moe_floor_high']:.3f}"
    assert f"of MoE layers alone the measured noise floor is {words}" in text
    assert main(["show", str(plain)]) == OK
    assert capsys.readouterr().out == text + "\n"


def test_an_error_in_the_moe_layers_is_diluted_in_the_pass_and_found_in_its_phase(tmp_path: Path) -> None:
    longer = 1.5
    validation = load_validation(built(tmp_path, cases=cases(phase_factors={"experts": longer})))
    claims = validation.claims.set_index("label")
    drop = claims.loc[DROP]
    assert drop["verdict"] == "differs"
    times = validation.phases[validation.phases["label"] == DROP].set_index("time")
    errors = times["emulated_ms"] / times["real_ms"] - 1
    assert errors["experts"] == pytest.approx(longer - 1, rel=0.05)
    assert errors["attention"] == pytest.approx(0, abs=0.01)
    assert 0 < -drop["difference"] < errors["MoE layers"] < errors["experts"]
    # Planted is a ratio of times of the same rank: 1 / (1 + error) of the MoE layers is what their speedup loses.
    assert 1 / (1 + drop["moe_difference"]) - 1 == pytest.approx(errors["MoE layers"], rel=0.15)
    assert claims["moe_verdict"].notna().all()
    assert (drop["moe_verdict"], claims.loc["topk", "moe_verdict"]) == ("differs", "agrees")


def test_the_moe_layers_speedup_is_native_over_case_on_the_slowest_rank(plain: Path) -> None:
    """A slow reading of the rows."""
    run = load_run(plain / "real", whole=True)
    moe = load_validation(plain).claims.set_index("label").loc[DROP].filter(like="real_moe_speedup_")

    def times_us(label: str) -> dict[tuple[int, int], float]:
        case = next(case for case in run.cases if case.label == label)
        rows = case.timings[case.timings["kind"] == "breakdown"]
        found = {}
        for key, one in rows.groupby(["batch", "iteration"]):
            totals = one[one["phase"] == TOTAL].set_index("rank")["time_us"]
            slowest = one[one["rank"] == totals.idxmax()]
            found[key] = slowest[slowest["phase"].isin([*LAYER_PHASES, "moe_rest"])]["time_us"].sum()
        return found

    native, drop = times_us("native"), times_us(DROP)
    ratios = sorted(native[key] / drop[key] for key in native)
    median, low, high = (moe[f"real_moe_speedup_{name}"] for name in ("median", "low", "high"))
    assert ratios[0] <= low <= median <= high <= ratios[-1]
    assert median == pytest.approx(np.median(ratios), rel=1e-3)


def test_the_parts_of_a_pass_close_against_it(plain: Path) -> None:
    case = load_run(plain / "real", whole=True).cases[0]
    rows = case.timings[case.timings["kind"] == "breakdown"]
    iterations = rows[rows["phase"] == TOTAL].groupby(["batch", "iteration"])["time_us"].mean()
    times_ms = phase_times_ms(case, PASS_TIMES)
    assert set(times_ms) > {*LAYER_PHASES, *MODEL_PHASES, UNACCOUNTED}
    parts = times_ms["MoE layers"] + times_ms["attention"] + times_ms["dense, norms and ends"]
    parts += times_ms[UNACCOUNTED] - times_ms["moe_rest"]  # what no phase of an MoE layer covers is in both
    assert parts == pytest.approx(iterations.median() / 1e3, rel=0.01)
    assert times_ms["dense, norms and ends"] == pytest.approx(
        (ELSEWHERE_TOTAL_US - ELSEWHERE_US["attention"]) / 1e3, rel=1e-6
    )


def turn_last_layer_round(root: Path, case_id: str) -> None:
    """Another rank is the fullest there than in the layers before."""
    path = RunDirectory(root).path("routing", case_id)
    rows = pq.read_table(path).to_pydict()
    for place, layer in enumerate(rows["layer"]):
        if layer == MOE_LAYERS[-1]:
            for column in ("load_E", "load_R"):
                rows[column][place] = rows[column][place][::-1]
    pq.write_table(pa.Table.from_pydict(rows, schema=ROUTING_SCHEMA), path)


def fullest_of_each_layer(case: Case, batch: int) -> float:
    """A slow reading: rows of each layer's fullest rank, summed over layers."""
    found = 0.0
    for layer in MOE_LAYERS:
        own = case.routing[(case.routing["batch"] == batch) & (case.routing["layer"] == layer)]
        found += sum(np.asarray(row) for row in own["load_R"]).max()
    return found


def test_the_pass_follows_every_layers_own_fullest_rank(tmp_path: Path) -> None:
    built(tmp_path)
    turn_last_layer_round(tmp_path / "real", "r-0")
    whole = load_run(tmp_path / "real", whole=True).cases[0]
    assert fullest_of_each_layer(whole, 0) > received_rows(whole)[0].max(), "no rank is the fullest in both layers"

    def with_loads_over(divisor: int) -> Case:
        """The case with fewer rows, and passes of 70 us and half a microsecond for each of the fullest ranks' rows."""
        loads = [np.asarray(row) // divisor for row in whole.routing["load_R"]]
        case = dataclasses.replace(whole, routing=whole.routing.assign(load_R=loads), timings=whole.timings.copy())
        for batch in range(10):
            here = (case.timings["batch"] == batch) & (case.timings["phase"] == TOTAL)
            case.timings.loc[here, "time_us"] = 70 + 0.5 * fullest_of_each_layer(case, batch)
        return case

    laws = load_laws([with_loads_over(divisor) for divisor in (1, 2, 4)], 4096)
    assert laws.layer is not None
    assert (laws.layer.slope_us, laws.layer.intercept_us) == (pytest.approx(0.5), pytest.approx(70.0))


def test_routing_that_differs_in_one_layer_is_not_judged(tmp_path: Path) -> None:
    built(tmp_path)
    turn_last_layer_round(tmp_path / "emulated", "e-0")
    validation = load_validation(tmp_path)
    assert set(verdicts(validation).values()) == {"inconclusive"}
    assert f"warning: not comparable: routing is not the same in both runs: {DROP}" in validation_text(validation)


def test_layers_are_not_held_against_models(tmp_path: Path) -> None:
    built(tmp_path)
    described = json.loads((tmp_path / "emulated" / "run.json").read_text())
    (tmp_path / "emulated" / "run.json").write_text(json.dumps({**described, "scope": "layer"}))
    with pytest.raises(ResultsError, match="holds no times of whole models"):
        load_validation(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"emulate": {"bandwidth_scale": 2.0}}, "emulate.bandwidth_scale: expected 1.0, which is what real ranks do"),
        ({"layer__expert_tensor_parallel": 2}, "layer.expert_tensor_parallel: expected 1, for emulate lays out whole"),
    ],
)
def test_bad_input_is_one_line_and_nothing_is_run(
    changes: dict, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = write_config(tmp_path, **changes)
    assert main(["validate", str(config), "--nproc", "2", "--out", str(tmp_path / "out")]) == USER_ERROR
    printed = capsys.readouterr().err
    assert printed.count("\n") == 1, printed
    assert message in printed
    assert not (tmp_path / "out").exists()


def test_real_and_emulated_passes_are_measured_and_compared(tmp_path: Path) -> None:
    config, out = write_config(tmp_path, measure__iterations=1), tmp_path / "out"
    line = [sys.executable, "-m", "moe_ep_bench", "validate", str(config), "--nproc", "2", "--out", str(out)]
    done = subprocess.run(line, capture_output=True, text=True, timeout=500, env=environment(), check=False)
    assert done.returncode == OK, done.stderr
    # Two batches make no interval, whatever they were.
    assert done.stdout.splitlines()[-1].startswith("0 of 3 speedups agree within the real run's noise (3 cannot be")
    assert "not comparable" not in done.stdout, "the same routing in every layer and as many threads"
    files = ValidationDirectory(out)
    assert not files.experts_alone.exists(), "those of layers only"
    times = load_validation(out).phases.pivot(index="label", columns="time", values=["real_ms", "emulated_ms"])
    for run in ("real_ms", "emulated_ms"):
        assert (times[run, "attention"] > 0).all()
        assert (times[run, "MoE layers"] > times[run, "experts"]).all()
        assert (times[run, "experts"] > 0).all()
