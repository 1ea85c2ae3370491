"""Emulated ranks held against real ones: the rule, the tables on built results, and both runs at a small size."""

from __future__ import annotations

import dataclasses
import json
import math
import multiprocessing
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import test_model_run
from results_builder import FakeCase, FakeComparison, standard_cases, write_run
from test_run import environment, routing_of, write_config
from whole_builder import ELSEWHERE_TOTAL_US, ELSEWHERE_US, MOE_LAYERS, write_whole

from moe_ep_bench.analysis.load import Case, ResultsError, load_run
from moe_ep_bench.analysis.validation import (
    PASS_TIMES,
    TIMES,
    Validation,
    law_rows,
    load_validation,
    phase_errors,
)
from moe_ep_bench.analysis.validation_report import validation_text, verdict_line, write_report
from moe_ep_bench.bench import validate as validate_module
from moe_ep_bench.bench.plan import RANKS, plan
from moe_ep_bench.bench.validate import ALONE_SCHEMA, REPETITIONS, chosen_cases, counts_of
from moe_ep_bench.cli import main
from moe_ep_bench.results import RunDirectory, ValidationDirectory
from moe_ep_bench.runtime.device import local_ranks
from moe_ep_bench.runtime.exit_codes import LOST, OK, USER_ERROR
from moe_ep_bench.schema import LAYER_PHASES, MODEL_PHASES, ROUTING_SCHEMA, TOTAL, UNACCOUNTED
from moe_ep_bench.timing.statistics import Estimate, equivalence, estimate_change

DROP = "token_drop gamma 1"


# The rule.


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0.975, 1.025, "equivalent"),
        (1 / 1.03, 1.03, "equivalent"),
        (0.96, 1.02, "inconclusive"),  # perhaps 4 % too slow
        (1.01, 1.06, "inconclusive"),
        (0.8, 1.2, "inconclusive"),  # a wide interval holds no difference and much else: it confirms nothing
        (1.031, 1.1, "different"),
        (0.9, 0.97, "different"),
    ],
)
def test_speedups_are_equivalent_where_the_whole_interval_of_their_ratio_lies_within_the_margin(
    low: float, high: float, expected: str
) -> None:
    ratio = Estimate(math.sqrt(low * high), low, high, True, 10, 1)
    assert equivalence(ratio, 0.03) == expected
    assert equivalence(Estimate(1 / ratio.median, 1 / high, 1 / low, True, 10, 1), 0.03) == expected
    assert equivalence(dataclasses.replace(ratio, is_interval=False), 0.03) == "inconclusive"
    assert equivalence(None, 0.03) == "inconclusive"


def test_what_is_called_equivalent_is_so_in_all_but_2_5_percent() -> None:
    """At the margin itself, where the truth is no longer equivalent, either test errs as often as it says."""
    random, found = np.random.default_rng(7), 0
    for _ in range(400):
        batches = 1.03 * np.exp(0.01 * random.normal(size=12))
        index = pd.MultiIndex.from_product([[0], range(12), [0]], names=["launch", "batch", "iteration"])
        found += equivalence(estimate_change(pd.Series(1.0, index), pd.Series(batches, index)), 0.03) == "equivalent"
    assert found / 400 <= 0.05


# Built results.


def cases(drop: float = 1.5, balance: float = 1.6, **of_drop: object) -> list[FakeCase]:
    params = {"capacity_factor": 1.0}
    return [
        FakeCase("native", role="baseline"),
        FakeCase("native", role="noise", label="native again"),
        FakeCase("token_drop", params=params, **{"speedup": drop, "dropped": 0.25, "mass": 0.8, **of_drop}),
        FakeCase("native_balanced", role="ceiling", label="native, balanced", speedup=balance),
    ]


def finish(root: Path, threads: tuple[int, int] = (1, 1)) -> Path:
    """Write beside two runs what ``validate`` writes."""
    for what, count in zip(("real", "emulated"), threads, strict=True):
        path = root / what / "run.json"
        described = json.loads(path.read_text())
        described["environment"]["threads_per_rank"] = count
        path.write_text(json.dumps(described))
    ValidationDirectory(root).write_pairs([("r", "e")], "calibrated on these ranks")
    return root


def built(
    root: Path, real: dict | None = None, emulated: dict | None = None, threads: tuple[int, int] = (1, 1)
) -> Path:
    """A directory of ``validate``; keyword arguments of ``FakeComparison`` for its two runs."""
    for what, changes, mode in (("real", real, "run"), ("emulated", emulated, "emulated")):
        fields = {"cases": cases(), "noise": 0.001, "num_iterations": 2, "comparison_id": what[0], **(changes or {})}
        write_run(root / what, [FakeComparison(**fields)], mode, seed=len(what))
    return finish(root, threads)


def built_models(root: Path, **of_drop: Any) -> Path:
    """The same of whole models; fields of the emulated run's token_drop."""
    for seed, (what, mode) in enumerate((("real", "run"), ("emulated", "emulated"))):
        first, *others = standard_cases()
        own = [dataclasses.replace(first, **(of_drop if what == "emulated" else {})), *others]
        write_whole(root / what, own, mode=mode, seed=seed, comparison_id=what[0], num_iterations=3)
    return finish(root)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory of ``validate`` whose runs are alike; not to be written to."""
    return built(tmp_path_factory.mktemp("built"), {"num_iterations": 6}, {"num_iterations": 6})


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built_models(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def alike(models: Path) -> Validation:
    return load_validation(models)


@pytest.fixture
def own(plain: Path, tmp_path: Path) -> Path:
    """A copy of ``plain``, to be written to."""
    return shutil.copytree(plain, tmp_path / "own")


@pytest.fixture
def own_models(models: Path, tmp_path: Path) -> Path:
    """A copy of ``models``, to be written to."""
    return shutil.copytree(models, tmp_path / "models")


def verdicts(validation: Validation) -> list[str | None]:
    return [None if pd.isna(verdict) else verdict for verdict in validation.cases["verdict"]]


def test_an_error_that_all_cases_share_shows_in_times_but_not_in_speedups(tmp_path: Path) -> None:
    validation = load_validation(built(tmp_path, emulated={"native_us": 1600.0}))
    experts = validation.phases[validation.phases["time"] == "experts"]
    for rows, name in ((validation.cases, "median_ms"), (experts, "ms")):
        assert (rows[f"emulated_{name}"] / rows[f"real_{name}"]).tolist() == pytest.approx([0.8] * 4, rel=0.01)
    assert verdicts(validation) == [None, None, "equivalent", "equivalent"]


def test_the_margin_that_was_asked_for_decides(tmp_path: Path) -> None:
    root = built(tmp_path, emulated={"cases": cases(drop=1.5 * 0.96, balance=1.6)})
    assert verdicts(load_validation(root)) == [None, None, "different", "equivalent"]
    ValidationDirectory(root).write_pairs([("r", "e")], "calibrated on these ranks", 0.1)
    assert verdicts(load_validation(root)) == [None, None, "equivalent", "equivalent"]
    assert verdict_line(load_validation(root)).startswith("2 of 2 speedups are equivalent within 10 %")


def test_the_last_line_counts_and_tells_the_largest_difference(tmp_path: Path) -> None:
    validation = load_validation(built(tmp_path, emulated={"cases": cases(drop=1.5 * 0.9, balance=1.6)}))
    assert verdicts(validation) == [None, None, "different", "equivalent"]
    text = validation_text(validation)
    last = r"1 of 2 speedups are equivalent within 3 % \(1 different\); largest difference "
    assert re.fullmatch(last + r"(9\.9|10\.\d) %", text.splitlines()[-1])
    row = next(line for line in text.splitlines() if line.startswith(DROP))
    assert re.search(r"0\.(89|90)\d \[0\.\d+, 0\.9\d+\]  different", row)
    assert row.rstrip().endswith("25.0         80.0"), "no speed without its fidelity"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"real": {"facts": {"oversubscribed": True}}}, "more ranks than cores"),
        ({"threads": (1, 2)}, "each real rank computed with 1 thread(s), the emulated one with 2"),
        ({"emulated": {"cases": cases(expert_load=np.ones(8))}}, f"routing is not the same in both runs: {DROP}"),
        ({"real": {"num_batches": 9}, "emulated": {"num_batches": 9}}, ""),
    ],
)
def test_runs_that_are_not_comparable_or_too_short_are_not_judged(changes: dict, reason: str, tmp_path: Path) -> None:
    validation = load_validation(built(tmp_path, **changes))
    assert verdicts(validation) == [None, None, "inconclusive", "inconclusive"]
    assert verdict_line(validation).startswith("0 of 2 speedups are equivalent within 3 % (2 inconclusive)")
    assert (f"warning: not comparable: {reason}" in validation_text(validation)) == bool(reason)


def test_a_case_that_failed_is_named_and_not_judged(tmp_path: Path) -> None:
    failed = cases(status="oom", reason="too large")
    validation = load_validation(built(tmp_path, real={"cases": failed}))
    lines = validation_text(validation).splitlines()
    assert any(line.startswith(DROP) and "real: oom: too large" in line for line in lines)
    assert lines[-1].startswith("1 of 2 speedups are equivalent within 3 % (1 inconclusive)")


def test_phase_times_are_means_over_ranks_and_medians_over_iterations(tmp_path: Path) -> None:
    """A slow reading of the rows, phase by phase."""
    case = load_run(built(tmp_path, real={"noise": 0.1}) / "real").cases[2]
    rows = case.timings[case.timings["kind"] == "breakdown"]

    def slow_ms(*phases: str) -> float:
        sums = []
        for batch in rows["batch"].unique():
            for iteration in rows["iteration"].unique():
                here = rows[(rows["batch"] == batch) & (rows["iteration"] == iteration)]
                sums.append(here[here["phase"].isin(phases)]["time_us"].sum() / 2)
        return float(np.median(sums)) / 1e3

    times_ms = case.breakdown.mean_ms(TIMES)
    for phase in (*LAYER_PHASES, UNACCOUNTED):
        assert times_ms[phase] == pytest.approx(slow_ms(phase))
    assert times_ms["waiting and comm"] == pytest.approx(slow_ms("wait_combine", "dispatch", "combine"))
    assert times_ms["waiting"] == times_ms["wait_combine"] > 0
    assert TOTAL not in times_ms


def test_quiet_iterations_tell_a_disturbance_from_an_error(plain: Path) -> None:
    real, emulated = (load_run(plain / name).cases[2] for name in ("real", "emulated"))
    disturbed = real.timings.copy()
    disturbed.loc[disturbed["iteration"] >= 2, "time_us"] *= 3  # four of six
    slow = emulated.timings.assign(time_us=1.2 * emulated.timings["time_us"])
    pairs = [(dataclasses.replace(real, timings=disturbed), dataclasses.replace(emulated, timings=slow))]
    errors = phase_errors(pairs)
    assert set(errors["phase"]) == {"gate", "policy", "metadata", "permute", "dispatch", "experts", "combine"}
    assert errors["quiet"].tolist() == pytest.approx([0.2] * 7, abs=0.01)
    assert errors["typical"].tolist() == pytest.approx([1.2 / 3 - 1] * 7, abs=0.01)


def test_what_is_written_is_what_show_prints(own: Path, capsys: pytest.CaptureFixture[str]) -> None:
    validation = load_validation(own)
    written = write_report(validation)
    assert main(["show", str(own)]) == OK
    assert capsys.readouterr().out == validation.files.text.read_text()
    assert {path.name for path in written} == {
        "validation.txt",
        "validation.csv",
        "validation-phases.csv",
        "validation.png",
        "validation.svg",
    }
    assert all(path.stat().st_size for path in written)
    drop = pd.read_csv(validation.files.cases_table).set_index("policy").loc["token_drop gamma 1"]
    assert drop["emulated_speedup"] == pytest.approx(1.5, rel=0.01)
    assert 0.97 < drop["speedup_ratio_low"] < drop["speedup_ratio_median"] < drop["speedup_ratio_high"] < 1.03
    assert drop["dropped_share"] == pytest.approx(0.25, abs=1e-3)
    phases = pd.read_csv(validation.files.phases_table).query("role == 'baseline'")
    assert phases["time"].tolist()[: len(LAYER_PHASES)] == list(LAYER_PHASES)


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (lambda root: (root / "validation.json").unlink(), "missing; `moe-ep-bench validate` writes it"),
        (lambda root: (root / "validation.json").write_text("[]"), "damaged, or not written by this program"),
        (
            lambda root: ValidationDirectory(root).write_pairs([("r", "other")], "links"),
            "emulated: holds no comparison other, which",
        ),
    ],
)
def test_a_directory_that_lacks_something_is_one_line(harm, message: str, own: Path) -> None:
    harm(own)
    with pytest.raises(ResultsError, match=message) as caught:
        load_validation(own)
    assert "\n" not in str(caught.value)


def test_a_case_that_only_the_real_run_has_is_refused(tmp_path: Path) -> None:
    built(tmp_path, emulated={"cases": cases()[:3]})
    with pytest.raises(ResultsError, match="the emulated run has no case native, balanced"):
        load_validation(tmp_path)


# Loads and times.


def rows_of(case: Case, batch: int) -> np.ndarray:
    """A slow reading: rows that each rank's experts get in each layer, [layer, rank]."""
    own = case.routing[case.routing["batch"] == batch]
    layers = own["layer"].unique() if "layer" in own else [None]
    found = np.zeros((len(layers), 2))
    for row in own.to_dict("records"):
        for rank in range(2):
            found[list(layers).index(row.get("layer")), rank] += sum(list(row["load_E"])[rank * 4 : (rank + 1) * 4])
    return found


def with_times(case: Case, per_row_us: float, fixed_us: float) -> Case:
    """The case with experts as long as the rows of a rank say, and the layer or pass as those of each fullest one."""
    timings = case.timings.copy()
    for batch in timings["batch"].unique():
        rows, here = rows_of(case, batch), timings["batch"] == batch
        for rank in range(2):
            experts = here & (timings["rank"] == rank) & (timings["phase"] == "experts")
            timings.loc[experts, "time_us"] = per_row_us * rows[:, rank].sum()
        timings.loc[here & (timings["phase"] == TOTAL), "time_us"] = fixed_us + per_row_us * rows.max(axis=1).sum()
    return dataclasses.replace(case, timings=timings)


def test_the_load_laws_find_a_line_where_there_is_one(tmp_path: Path) -> None:
    loads = [np.ones(8), np.r_[np.full(4, 1.5), np.zeros(4)], np.r_[np.full(4, 0.5), np.full(4, 0.75)]]
    found = [dataclasses.replace(case, expert_load=load) for case, load in zip(cases(), loads, strict=False)]
    run = load_run(built(tmp_path, real={"cases": found}, emulated={"cases": found}) / "real")
    facts = run.comparisons["r"]
    experts, layer, throughput = law_rows([with_times(case, 0.25, 100.0) for case in run.cases], facts)
    assert (experts["slope_us"], layer["slope_us"]) == (pytest.approx(0.25), pytest.approx(0.25))
    assert experts["intercept_us"] == pytest.approx(0.0, abs=1e-6)
    assert (layer["intercept_us"], layer["r2"]) == (pytest.approx(100.0), pytest.approx(1.0))
    assert throughput["r2"] < 1, "a fixed time is no law of 1 / load"
    assert list(law_rows([with_times(case, 0.25, 0.0) for case in run.cases], facts))[2]["r2"] == pytest.approx(1.0)
    assert not list(law_rows(run.cases[:1], facts)), "equal loads give no line"


def test_the_expert_phase_stands_beside_the_experts_alone(own: Path) -> None:
    case = load_run(own / "emulated").cases[2]
    experts_us = case.timings[(case.timings.phase == "experts") & (case.timings.kind == "breakdown")]
    rows = [
        {"comparison_id": "e", "case_id": case.case_id, "rank": rank, "batch": batch, "repetition": 0, "num_rows": 64}
        | {"time_us": float(one["time_us"].median()) / (1.25 if rank else 0.5)}
        for (batch, rank), one in experts_us.groupby(["batch", "rank"])
    ]
    pq.write_table(pa.Table.from_pylist(rows, schema=ALONE_SCHEMA), ValidationDirectory(own).experts_alone)
    validation = load_validation(own)
    alone = validation.alone
    assert alone["label"].unique() == ["token_drop gamma 1"]
    assert alone["ratio"].tolist() == pytest.approx([0.5, 1.25])
    assert (alone["layer_ms"] / alone["alone_ms"]).tolist() == pytest.approx([0.5, 1.25])
    assert "the experts alone on the same rows" in validation_text(validation)


def test_what_is_timed_alone_is_the_baseline_and_a_policy_on_the_counts_of_the_run(plain: Path, tmp_path: Path) -> None:
    (comparison,) = plan(write_config(tmp_path), [], RANKS, 2, on_cpu=True)
    chosen = chosen_cases(comparison)
    assert [(case.role, case.name) for case in chosen] == [("baseline", "native"), ("policy", "token_drop")]
    case = load_run(plain / "emulated").cases[2]
    policy = dataclasses.replace(chosen[1], case_id=case.case_id)
    counts_BE = counts_of(RunDirectory(plain / "emulated"), policy)
    assert counts_BE.shape == (10, 8)
    for batch, counts_E in enumerate(counts_BE):
        np.testing.assert_array_equal(counts_E.reshape(2, 4).sum(1), rows_of(case, batch)[0])
    assert counts_of(RunDirectory(tmp_path / "nowhere"), chosen[0]) is None


# Whole models.


def test_alike_models_agree_from_end_to_end_and_in_their_moe_layers(alike: Validation, tmp_path: Path) -> None:
    line = verdict_line(alike)
    assert line.startswith("3 of 3 speedups are equivalent within 3 %")
    assert "; of MoE layers alone 3 of 3, largest" in line
    text = validation_text(alike)
    assert "dense, norms and ends" in text
    assert "layer time" not in text
    written = write_report(dataclasses.replace(alike, files=ValidationDirectory(tmp_path)))
    assert {"validation.png", "validation.csv", "validation-phases.csv"} < {path.name for path in written}
    columns = set(pd.read_csv(tmp_path / "validation.csv"))
    assert {"real_pass_ms", "emulated_pass_ms", "real_moe_low", "moe_verdict"} < columns
    assert set(pd.read_csv(tmp_path / "validation-phases.csv")["time"]) == set(PASS_TIMES)
    assert "time of one pass (ms)" in (tmp_path / "figures" / "validation.svg").read_text()


def test_an_error_in_the_moe_layers_is_diluted_in_the_pass_and_found_in_its_phase(tmp_path: Path) -> None:
    validation = load_validation(built_models(tmp_path, phase_factors={"experts": 1.5}))
    claims = validation.claims.set_index("label")
    drop = claims.loc[DROP]
    assert drop["verdict"] == "different"
    times = validation.phases[validation.phases["label"] == DROP].set_index("time")
    errors = times["emulated_ms"] / times["real_ms"] - 1
    assert errors["experts"] == pytest.approx(0.5, rel=0.05)
    assert errors["attention"] == pytest.approx(0, abs=0.01)
    assert 0 < 1 - drop["speedup_ratio_median"] < errors["MoE layers"] < errors["experts"]
    # Planted is a ratio of times of the same rank: 1 / (1 + error) of the MoE layers is what their speedup loses.
    assert 1 / drop["moe_speedup_ratio_median"] - 1 == pytest.approx(errors["MoE layers"], rel=0.15)
    assert (drop["moe_verdict"], claims.loc["topk", "moe_verdict"]) == ("different", "equivalent")


def test_the_parts_of_a_pass_close_against_it(models: Path) -> None:
    case = load_run(models / "real", whole=True).cases[0]
    rows = case.timings[case.timings["kind"] == "breakdown"]
    iterations = rows[rows["phase"] == TOTAL].groupby(["batch", "iteration"])["time_us"].mean()
    times_ms = case.breakdown.mean_ms(PASS_TIMES)
    assert set(times_ms) > {*LAYER_PHASES, *MODEL_PHASES, UNACCOUNTED}
    rest_ms = times_ms["dense, norms and ends"]
    parts = times_ms["MoE layers"] + times_ms["attention"] + rest_ms
    parts += times_ms[UNACCOUNTED] - times_ms["moe_rest"]  # what no phase of an MoE layer covers is in both
    assert parts == pytest.approx(iterations.median() / 1e3, rel=0.01)
    assert rest_ms == pytest.approx((ELSEWHERE_TOTAL_US - ELSEWHERE_US["attention"]) / 1e3, rel=1e-6)


def turn_last_layer_round(root: Path, case_id: str) -> None:
    """Another rank is the fullest there than in the layers before."""
    path = RunDirectory(root).path("routing", case_id)
    rows = pq.read_table(path).to_pydict()
    for place, layer in enumerate(rows["layer"]):
        if layer == MOE_LAYERS[-1]:
            for column in ("load_E", "load_R"):
                rows[column][place] = rows[column][place][::-1]
    pq.write_table(pa.Table.from_pydict(rows, schema=ROUTING_SCHEMA), path)


def test_the_pass_follows_every_layers_own_fullest_rank(own_models: Path) -> None:
    turn_last_layer_round(own_models / "real", "r-0")
    run = load_run(own_models / "real", whole=True)
    whole = run.cases[0]
    rows = rows_of(whole, 0)
    assert rows.max(axis=1).sum() > rows.sum(axis=0).max(), "no rank is the fullest in both layers"

    def with_loads_over(divisor: int) -> Case:
        loads = {name: [np.asarray(row) // divisor for row in whole.routing[name]] for name in ("load_R", "load_E")}
        # A rank's rows are those of its experts, whatever is rounded.
        loads["load_R"] = [np.asarray(row).reshape(2, 4).sum(axis=1) for row in loads["load_E"]]
        fewer = dataclasses.replace(whole, case_id=str(divisor), routing=whole.routing.assign(**loads))
        return with_times(fewer, 0.5, 70.0)

    _, law, _ = law_rows([with_loads_over(divisor) for divisor in (1, 2, 4)], run.comparisons["r"])
    assert (law["slope_us"], law["intercept_us"]) == (pytest.approx(0.5), pytest.approx(70.0))


def test_routing_that_differs_in_one_layer_is_not_judged(own_models: Path) -> None:
    turn_last_layer_round(own_models / "emulated", "e-0")
    validation = load_validation(own_models)
    assert set(validation.claims["verdict"]) == {"inconclusive"}
    assert f"warning: not comparable: routing is not the same in both runs: {DROP}" in validation_text(validation)


def test_layers_are_not_held_against_models(own_models: Path) -> None:
    path = own_models / "emulated" / "run.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "scope": "layer"}))
    with pytest.raises(ResultsError, match="holds no times of whole models"):
        load_validation(own_models)


# The command.

LINKS = {"emulate": {"links": "h100-nvlink4"}}


@pytest.mark.parametrize(
    ("changes", "nproc", "message"),
    [
        ({}, 1, "--nproc: expected at least 2 ranks to hold emulated ones against, got 1"),
        ({"layer__ep_size": 1}, 2, "layer.ep_size: expected 2, which are all ranks, or null; got 1"),
        ({"layer__ep_size": 4}, 2, "layer.ep_size: expected a divisor of the 2 ranks, got 4"),
        ({"emulate": {"links": "h100-nvlnk4"}}, 2, "h100-nvlnk4"),
        (
            {"emulate": {"bandwidth_scale": 2.0}},
            2,
            "emulate.bandwidth_scale: expected 1.0, which is",
        ),
        ({"emulate": {"replication": [{"spare_per_rank": 1}]}}, 2, "emulate.replication: expected ()"),
        ({"route": {"placement": "strided"}}, 2, "route.placement: expected 'contiguous', which is what real ranks do"),
        ({"sweep": {"emulate.links": ["pcie4", "pcie5"]}}, 2, "expected values that it measures differently"),
    ],
)
def test_bad_input_is_one_line_and_nothing_is_run(
    changes: dict, nproc: int, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = write_config(tmp_path, **changes)
    arguments = ["validate", str(config), "--nproc", str(nproc), "--out", str(tmp_path / "out")]
    assert main(arguments) == USER_ERROR
    printed = capsys.readouterr()
    assert printed.err.count("\n") == 1, printed.err
    assert message in printed.err
    assert not (tmp_path / "out").exists()


def test_a_directory_of_something_else_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config, out = write_config(tmp_path), tmp_path / "out"
    out.mkdir()
    (out / "run.json").write_text("{}")
    assert main(["validate", str(config), "--nproc", "2", "--out", str(out)]) == USER_ERROR
    assert "holds the results of another command" in capsys.readouterr().err
    (out / "run.json").unlink()
    links = Path(__file__).parents[1] / "moe_ep_bench" / "data" / "links" / "h100-nvlink4.yaml"
    ValidationDirectory(out).links.write_text(links.read_text())
    assert main(["validate", str(config), "--nproc", "2", "--out", str(out)]) == USER_ERROR
    assert "holds links measured on 8 ranks, here are 2" in capsys.readouterr().err


@pytest.mark.parametrize("failing", ["calibrating the collectives", "the real run on 2 ranks"])
def test_a_step_that_fails_is_named_and_nothing_is_compared(
    failing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(validate_module, "launch_calibrate", lambda *_, **__: LOST if failing.startswith("cal") else OK)
    monkeypatch.setattr(validate_module, "launch", lambda *_, **__: LOST)
    monkeypatch.setattr(validate_module, "_in_place_of_a_rank", lambda *_, **__: pytest.fail("went on"))
    out = tmp_path / "out"
    assert main(["validate", str(write_config(tmp_path)), "--nproc", "2", "--out", str(out)]) == LOST
    said = capsys.readouterr().err
    assert re.search(f"validate: {failing}.* failed with exit status {LOST}; nothing was compared", said, re.DOTALL)
    assert not list(out.iterdir())


@pytest.mark.parametrize(
    ("step", "status", "said"),
    [(lambda: {}["unforeseen"], LOST, "Traceback"), (lambda: local_ranks(0), USER_ERROR, "expected")],
)
def test_a_step_that_crashes_is_not_taken_for_one_that_went_through(
    step: Callable[[], object],
    status: int,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    forked = multiprocessing.get_context("fork")  # or the process would import torch
    monkeypatch.setattr(validate_module.multiprocessing, "get_context", lambda _: forked)
    assert validate_module._in_place_of_a_rank(2, step) == status
    assert said in capfd.readouterr().err


def command(*arguments: object) -> subprocess.CompletedProcess:
    line = [sys.executable, "-m", "moe_ep_bench", "validate", *map(str, arguments)]
    return subprocess.run(line, capture_output=True, text=True, timeout=500, env=environment(), check=False)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, subprocess.CompletedProcess]:
    folder = tmp_path_factory.mktemp("validate")
    few = {"workload__num_tokens": 96, "workload__num_batches": 2, "measure__iterations": 1, "measure__max_warmup": 1}
    policies = [{"name": "topk"}, {"name": "expanded_drop", "capacity_factor": 1.0, "metric": "random"}]
    config = write_config(folder, policies=policies, **few)
    done = command(config, "--nproc", 2, "--out", folder / "out")
    assert done.returncode == OK, done.stderr
    return folder, done


def test_real_and_emulated_ranks_route_alike_and_are_measured_and_compared(
    finished: tuple[Path, subprocess.CompletedProcess],
) -> None:
    folder, done = finished
    files = ValidationDirectory(folder / "out")
    last = done.stdout.splitlines()[-1]
    # Two batches make no interval, whatever they were.
    assert last.startswith("0 of 3 speedups are equivalent within 3 % (3 inconclusive); largest difference")
    assert files.text.read_text().splitlines()[-1] == last
    assert "not comparable" not in done.stdout, "the same routing and as many threads, whatever the machine"
    for name in ("real", "emulated"):
        described = json.loads((files.root / name / "run.json").read_text())
        assert described["environment"]["threads_per_rank"] >= 1
    assert "calibrated on these ranks" in files.text.read_text()
    assert files.links.is_file()
    assert (files.figures / "validation.png").is_file()
    alone = pd.read_parquet(files.experts_alone)
    assert len(alone) == 2 * 2 * 2 * REPETITIONS  # cases, ranks, batches
    validation = load_validation(files.root)
    assert len(validation.alone) == 4
    assert validation.laws["num_points"].iloc[0] == 5 * 2 * 2
    pd.testing.assert_frame_equal(routing_of(files.emulated), routing_of(files.real))


@pytest.mark.parametrize("force", [False, True])
def test_a_second_call_calibrates_and_times_the_experts_anew_only_if_forced(
    force: bool, finished: tuple[Path, subprocess.CompletedProcess], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not to run finished cases again is for ``launch`` and ``emulate`` to see to, which are told of ``force``."""
    folder, _ = finished
    called: list[tuple[str, bool]] = []

    def note(name: str, **options: bool) -> int:
        called.append((name, options.get("force", False)))
        return OK

    monkeypatch.setattr(validate_module, "launch_calibrate", lambda *_, **__: note("calibrate"))
    monkeypatch.setattr(validate_module, "launch", lambda *_, **options: note("launch", **options))
    monkeypatch.setattr(
        validate_module,
        "_in_place_of_a_rank",
        lambda _ranks, function, *_, **options: note(function.__name__, **options),
    )
    assert validate_module.validate(folder / "config.yaml", folder / "out", [], 2, force=force) == OK
    runs = [("launch", force), ("emulate", force)]
    assert called == ([("calibrate", False), *runs, ("time_experts_alone", False)] if force else runs)


def test_real_and_emulated_passes_are_measured_and_compared(tmp_path: Path) -> None:
    few = {"whole__num_layers": 2, "workload__num_tokens": 48, "measure__iterations": 1}
    policies = [{"name": "token_drop", "capacity_factor": 1.0}]
    # With links that are given, none are calibrated.
    config, out = test_model_run.write_config(tmp_path, policies=policies, **few, **LINKS), tmp_path / "out"
    done = command(config, "--nproc", 2, "--out", out, "--margin", "5%")
    assert done.returncode == OK, done.stderr
    # Two batches make no interval, whatever they were.
    assert done.stdout.splitlines()[-1].startswith("0 of 2 speedups are equivalent within 5 % (2 inconclusive)")
    assert "not comparable" not in done.stdout, "the same routing in every layer and as many threads"
    assert not ValidationDirectory(out).experts_alone.exists(), "those of layers only"
    times = load_validation(out).phases.pivot(index="label", columns="time", values=["real_ms", "emulated_ms"])
    for run in ("real_ms", "emulated_ms"):
        assert (times[run, "attention"] > 0).all()
        assert (times[run, "MoE layers"] > times[run, "experts"]).all()
