"""Two runs side by side: what was planted is found and named, what is noise or the machine is not."""

from __future__ import annotations

import dataclasses
import functools
import json
import re
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import test_statistics as statistics
import yaml
from results_builder import QUIET_MACHINE, FakeComparison, standard_cases, write_run
from whole_builder import ELSEWHERE_TOTAL_US, write_whole

from moe_ep_bench.analysis.compare import compare_directories, compare_text, exit_status, outcomes
from moe_ep_bench.analysis.reading import ResultsError
from moe_ep_bench.cli import main
from moe_ep_bench.timing.statistics import NoiseFloor, estimate_change, joint_floor

BOTH = ("plain", "breakdown")
DROP = "token_drop gamma 1"


def four_cases(drop=None):
    """Token Drop, topk, native again and native; ``drop`` replaces fields of the first."""
    first, _, *others = standard_cases()
    return [dataclasses.replace(first, **(drop or {})), *others]


def run_of(root, *, seed=0, mode="run", environment=None, drop=None, cases=None, **changes):
    cases = cases or four_cases(drop)
    comparison = FakeComparison(**{"cases": cases, "noise": 0.003, "num_iterations": 3, "kinds": ("plain",), **changes})
    return write_run(root, [comparison], mode, seed, environment)


def model_of(root, *, seed=0, drop=None, **changes):
    """The same of whole models."""
    return write_whole(root, four_cases(drop), num_iterations=3, seed=seed, **changes)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return run_of(tmp_path_factory.mktemp("base") / "run")


@pytest.fixture(scope="module")
def with_phases(tmp_path_factory):
    return run_of(tmp_path_factory.mktemp("phases") / "run", kinds=BOTH)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return model_of(tmp_path_factory.mktemp("model") / "run")


def compared(base, new, **options):
    """The change and its cases' rows by label."""
    change = compare_directories(base, new, **options)
    return change, {row["label"]: row for row in change.cases.to_dict("records")}


def gate_of(change) -> str:
    """The gate's answer on Token Drop."""
    return outcomes(change, 0.03)[change.cases["label"] == DROP].item()


def verdicts(cases) -> dict[str, str]:
    return {label: row["time_verdict"] for label, row in cases.items()}


# ---- the statistic --------------------------------------------------------------------------------------------------


# Of one case in one job; some iterations are disturbed.
times = functools.partial(statistics.times, sigma=0.05, disturbed=0.02)


def test_of_equal_jobs_about_one_in_forty_is_called_longer_and_one_in_forty_shorter():
    generator, design = np.random.default_rng(41), {"launches": 3, "launch_effect": 0.03}
    estimates = [estimate_change(times(generator, **design), times(generator, **design)) for _ in range(100)]
    longer, shorter = (np.mean([estimate.low > 1 for estimate in estimates]), np.mean([e.high < 1 for e in estimates]))
    # 2.5 % expected; binomial scatter of 100 is 1.6 %.
    assert max(longer, shorter) <= 0.07
    assert np.median([estimate.median for estimate in estimates]) == pytest.approx(1, abs=0.01)


def test_change_is_the_median_over_batches_of_ratios_of_medians_spelled_out():
    generator = np.random.default_rng(3)
    old, new = times(generator), times(generator) * 1.1
    ratios = []
    for batch in range(10):
        of_batch = [[value for (_, b, _), value in series.items() if b == batch] for series in (old, new)]
        ratios.append(np.median(of_batch[1]) / np.median(of_batch[0]))
    assert estimate_change(old, new).median == pytest.approx(np.median(ratios))
    assert estimate_change(new, old).median == pytest.approx(1 / np.median(ratios), rel=0.01)
    shuffled = new.groupby(level="batch").transform(lambda cell: cell.to_numpy()[::-1])
    assert estimate_change(old, shuffled) == estimate_change(old, new), "iterations of two jobs are no pairs"
    assert estimate_change(old, old.rename({batch: batch + 10 for batch in range(10)}, level="batch")) is None
    assert estimate_change(old * 0, old) is None
    assert estimate_change(old, old * 0) is None


def test_launch_part_is_students_interval_of_two_samples():
    """Without other noise nothing is left but the launches: 0 and 2 % against 0, 0 and 3 %, by hand."""

    def of_launches(*logs, batches=10):
        names = ["launch", "batch", "iteration"]
        index = pd.MultiIndex.from_product([range(len(logs)), range(batches), range(3)], names=names)
        launch, batch, iteration = (index.get_level_values(name) for name in names)
        disturbed = np.where((launch == 0) & (iteration == 2), 5.0, 1.0)
        return pd.Series(np.exp(np.take(logs, launch)) * (1 + batch) * disturbed, index)

    new = of_launches(0.0, 0.0, 0.03)
    estimate = estimate_change(of_launches(0.0, 0.02), new)
    pooled = np.sqrt((2 * 0.01**2 + 2 * 0.01**2 + 0.02**2) / 3)
    half = 3.1824 * pooled * np.sqrt(1 / 2 + 1 / 3)  # t of 3 degrees of freedom, from a table
    assert np.log(estimate.high / estimate.median) == pytest.approx(half, rel=0.01)
    assert estimate.num_launches == 2
    # A launch that lacks the long batches is no faster for that.
    short = new[(new.index.get_level_values("launch") < 2) | (new.index.get_level_values("batch") < 5)]
    again = estimate_change(of_launches(0.0, 0.02), short)
    assert np.log(again.high / again.median) == pytest.approx(half, rel=0.01)
    few = estimate_change(of_launches(0.0, 0.02, batches=9), of_launches(0.0, 0.0, 0.03, batches=9))
    assert (few.is_interval, few.num_launches) == (False, 2)


def test_joint_floor_is_wider_than_either_and_symmetric():
    floor = joint_floor(NoiseFloor(1 / 1.03, 1.03), NoiseFloor(1 / 1.04, 1.04))
    assert floor.high == pytest.approx(1.0505, abs=2e-3)  # 3 and 4 make 5
    assert floor.low * floor.high == pytest.approx(1)


# ---- verdicts -------------------------------------------------------------------------------------------------------


def test_a_run_against_itself_shows_no_difference_anywhere(with_phases):
    change, cases = compared(with_phases, with_phases)
    assert set(verdicts(cases).values()) == {"no difference"}
    assert set(change.changes["verdict"]) == {"no difference"}
    assert (change.changes["case_id"] == cases[DROP]["case_id"]).sum() == 2 * (1 + 8)  # time, speedup; phases
    assert exit_status(change, 0.01, strict=True) == 0


@pytest.mark.parametrize("factor", [1.05, 1 / 1.05])
def test_a_planted_change_of_one_phase_is_found_there_and_in_the_layer_and_nowhere_else(with_phases, tmp_path, factor):
    new = run_of(tmp_path / "new", seed=1, kinds=BOTH, drop={"phase_factors": {"experts": factor}})
    change, cases = compared(with_phases, new)
    word = "slower" if factor > 1 else "faster"
    assert {label for label, verdict in verdicts(cases).items() if verdict == word} == {DROP}
    drop = cases[DROP]
    phases = change.changes[(change.changes["quantity"] != "all") & (change.changes["of"] == "time")]
    (found,) = phases[phases["verdict"].isin(["slower", "faster"])].to_dict("records")
    assert (found["case_id"], found["quantity"], found["verdict"]) == (drop["case_id"], "experts", word)
    assert found["ratio"] == pytest.approx(factor, abs=0.005)
    assert drop["time_ratio"] == pytest.approx(1 + 0.44 * (factor - 1), abs=0.004)
    assert drop["speedup_verdict"] == ("lower" if factor > 1 else "higher")
    assert exit_status(change, 0.01) == (1 if factor > 1 else 0)
    assert exit_status(change, 0.03) == 0  # 2.2 % of the layer


def test_a_machine_that_became_slower_makes_no_case_slower_unless_it_is_known_to_be_the_same(base, tmp_path):
    new = run_of(tmp_path / "new", seed=1, native_us=2000 * 1.1)
    change, cases = compared(base, new)
    assert verdicts(cases)["native"] == "slower"
    assert verdicts(cases)[DROP] == verdicts(cases)["topk"] == "inconclusive"
    assert re.match(r"native changed by \+(9|10)\.\d %: perhaps the machine", cases[DROP]["time_why"])
    assert cases[DROP]["speedup_verdict"] not in ("lower", "higher")
    assert (exit_status(change, 0.03), exit_status(change, 0.03, strict=True)) == (0, 3)
    assert "warning: native itself became slower (+" in compare_text(change, 0.03)
    change, cases = compared(base, new, same_machine=True)
    assert set(verdicts(cases).values()) == {"slower"}
    assert (exit_status(change, 0.03), exit_status(change, 0.2)) == (1, 0)


@pytest.mark.parametrize(
    ("native_us", "same_machine", "verdict", "status"),
    [
        (2000 * 1.1, False, "slower", 1),  # It lost more than the machine.
        (2000 / 1.1, False, "inconclusive", 1),  # It did not follow a faster native.
        (2000 / 1.2, True, "faster", 0),  # All became faster, native most: that is no regression.
    ],
)
def test_a_case_whose_speedup_fell_fails_unless_it_became_faster(
    base, tmp_path, native_us, same_machine, verdict, status
):
    new = run_of(tmp_path / "new", seed=1, native_us=native_us, drop={"speedup": 1.5 / 1.1})
    change, cases = compared(base, new, same_machine=same_machine)
    assert (cases[DROP]["time_verdict"], cases[DROP]["speedup_verdict"]) == (verdict, "lower")
    assert (verdict == "inconclusive") == ("native became faster" in str(cases[DROP]["time_why"]))
    assert verdicts(cases)["topk"] == ("faster" if same_machine else "inconclusive")
    assert exit_status(change, 0.03) == status


def test_without_ten_batches_or_a_noise_floor_the_gate_is_open(tmp_path):
    no_floor = [case for case in four_cases() if case.role != "noise"]
    for name, changes, why in (
        ("few", {"num_batches": 9}, "9 batches: fewer than 10 give no interval"),
        ("floor", {"cases": no_floor}, "a run lacks its noise floor"),
    ):
        directory = run_of(tmp_path / name, **changes)
        change, cases = compared(directory, directory)
        assert set(verdicts(cases).values()) == {"inconclusive"}
        assert cases[DROP]["time_why"] == why
        assert (exit_status(change, 0.03), exit_status(change, 0.03, strict=True)) == (0, 3 if name == "few" else 0)


@pytest.mark.parametrize(("factor", "verdict", "gate"), [(1.05, "no difference", "open"), (1.07, "slower", "slower")])
def test_a_change_counts_beyond_both_floors_together(tmp_path, factor, verdict, gate):
    """Native differs from itself by 4 % in both runs, which together make 5.7 %; nothing else is noise."""
    runs = []
    for name, speedup in (("base", 1.5), ("new", 1.5 / factor)):
        drop, topk, again, native = four_cases({"speedup": speedup})
        cases = [drop, topk, dataclasses.replace(again, speedup=1 / 1.04), native]
        runs.append(run_of(tmp_path / name, cases=cases, noise=0.0, num_iterations=1))
    change, cases = compared(*runs)
    assert cases[DROP]["time_floor_high"] == pytest.approx(1.0570, abs=1e-3)
    assert (cases[DROP]["time_verdict"], gate_of(change)) == (verdict, gate)


# ---- whole models ---------------------------------------------------------------------------------------------------


def test_a_longer_part_is_found_there_in_the_pass_and_in_both_speedups(model, tmp_path):
    longer = model_of(tmp_path / "longer", seed=1, drop={"phase_factors": {"experts": 1.5}})
    change, cases = compared(model, longer)
    own = change.changes[change.changes["case_id"] == cases[DROP]["case_id"]].set_index(["of", "quantity"])
    parts = [("time", "MoE layers"), ("speedup", "MoE layers"), ("time", "attention"), ("time", "the rest")]
    assert own.loc[parts, "verdict"].tolist() == ["slower", "lower", "no difference", "no difference"]
    assert (cases[DROP]["time_verdict"], cases[DROP]["speedup_verdict"]) == ("slower", "lower")
    # What the layers lose is diluted by what is no MoE layer.
    in_layers, in_pass = own.at[("time", "MoE layers"), "ratio"], cases[DROP]["time_ratio"]
    moe_us = 2 * ELSEWHERE_TOTAL_US / 1.5
    assert in_pass == pytest.approx((ELSEWHERE_TOTAL_US + moe_us * in_layers) / (ELSEWHERE_TOTAL_US + moe_us), rel=0.01)
    native = change.changes[change.changes["case_id"] == cases["native"]["case_id"]].set_index("quantity")["base"]
    assert native[["MoE layers", "attention", "the rest"]].sum() == pytest.approx(3 * ELSEWHERE_TOTAL_US, rel=0.02)
    assert exit_status(change, 0.5 * (in_pass - 1)) == 1
    assert exit_status(change, 2 * (in_pass - 1)) == 0
    printed = compare_text(change, 0.5 * (in_pass - 1))
    for words in (f"beyond noise: {DROP}", "MoE layers, speedup", "of all MoE layers together"):
        assert words in printed


# ---- conditions -----------------------------------------------------------------------------------------------------


def test_another_driver_takes_all_verdicts_away_unless_it_was_changed_on_purpose(base, tmp_path):
    slower = {"drop": {"speedup": 1.5 / 1.2}, "seed": 1}
    old = run_of(tmp_path / "old", environment={"driver": "570.1"})
    new = run_of(tmp_path / "new", environment={"driver": "580.2", "hostname": "other"}, **slower)
    change, cases = compared(old, new)
    assert set(verdicts(cases).values()) == {"inconclusive"}
    assert cases[DROP]["speedup_why"] == "conditions differ: driver"
    assert (exit_status(change, 0.03), exit_status(change, 0.03, strict=True)) == (0, 3)
    text = compare_text(change)
    assert re.search(r"driver +570\.1  580\.2  none without --changed driver", text)
    assert re.search(r"hostname +node +other  stay", text)
    change, cases = compared(old, new, intended=["driver"])
    assert verdicts(cases)[DROP] == "slower"
    assert exit_status(change, 0.03) == 1
    # What one run did not write down differs from nothing.
    assert verdicts(compared(base, new)[1])[DROP] == "slower"


def test_another_clock_takes_away_verdicts_on_times_and_leaves_those_on_speedups(base, tmp_path):
    machine = {**QUIET_MACHINE, "sm_clock_mhz": [1700.0, 1755.0, 1755.0], "stolen_s": 20.0}
    new = run_of(tmp_path / "new", seed=1, drop={"speedup": 1.5 / 1.2}, conditions={"rank": {"machine": machine}})
    change, cases = compared(base, new)
    assert cases[DROP]["time_why"] == "conditions differ: clocks"
    assert cases[DROP]["speedup_verdict"] == "lower"
    text = compare_text(change)
    assert "clocks     SM clock 1,980 MHz (median)  SM clock 1,755 MHz (median)" in text
    assert "warning: NEW: disturbed machine: the hypervisor took" in text


# ---- which cases ----------------------------------------------------------------------------------------------------


def test_cases_of_one_run_only_are_rows_and_never_compared(base, tmp_path):
    settings = {"noise": 0.003, "num_iterations": 3, "kinds": ("plain",)}
    comparisons = [FakeComparison(name, cases=four_cases(), **settings) for name in ("c0", "c1")]
    both = write_run(tmp_path / "both", comparisons, seed=1)
    for pair, said, status in (((base, both), "only in NEW", 0), ((both, base), "only in BASE", 3)):
        change, _ = compared(*pair)
        alone = change.cases[change.cases["not_compared"] == said]
        assert sorted(alone["case_id"]) == [f"c1-{number}" for number in range(4)]
        assert len(change.cases) == 8  # new cases are no gap
        assert f"not compared: {said}" in compare_text(change)
        assert (exit_status(change, 0.03), exit_status(change, 0.03, strict=True)) == (
            0,
            status,
        )  # new cases are no gap


def test_nothing_in_common_two_modes_and_two_scopes_are_refused(base, model, tmp_path):
    alone = run_of(tmp_path / "alone", comparison_id="c9", num_batches=1)
    with pytest.raises(ResultsError, match="no case is in"):
        compare_directories(base, alone)
    emulated = run_of(tmp_path / "emulated", mode="emulated", num_batches=1)
    with pytest.raises(ResultsError, match=r"emulated .* not compared"):
        compare_directories(base, emulated)
    with pytest.raises(ResultsError, match="expected one scope"):
        compare_directories(model, base)


def test_a_case_that_was_lost_or_routes_differently_is_said(base, tmp_path):
    cases = four_cases({"status": "oom", "reason": "CUDA out\nof memory"})
    cases[1] = dataclasses.replace(cases[1], dropped=0.3)
    new = run_of(tmp_path / "new", seed=1, cases=cases)
    change, rows = compared(base, new)
    assert rows[DROP]["not_compared"] == "oom in NEW: CUDA out of memory"
    assert gate_of(change) == "open"
    assert (exit_status(change, 0.03), exit_status(change, 0.03, strict=True)) == (0, 3)
    text = compare_text(change, 0.03)
    assert re.search(f"{DROP} +not compared: oom in NEW", text)
    assert "warning: topk routes differently: dropped 0.0 % in BASE, 30.0 % in NEW" in text


# ---- the command ----------------------------------------------------------------------------------------------------


def test_json_and_text_say_what_the_exit_status_says(with_phases, tmp_path, capsys):
    new = run_of(tmp_path / "new", seed=1, kinds=BOTH, drop={"phase_factors": {"experts": 1.2}})
    assert main(["compare", str(with_phases), str(new), "--fail-over", "3%", "--json"]) == 1
    content = json.loads(capsys.readouterr().out)
    assert content["exit_status"] == 1
    by_label = {case["label"]: case for case in content["cases"]}
    assert [by_label[label]["outcome"] for label in (DROP, "topk", "native")] == ["slower", "passed", None]
    (experts,) = (
        row
        for row in content["changes"]
        if (row["case_id"], row["quantity"], row["of"]) == (by_label[DROP]["case_id"], "experts", "time")
    )
    assert experts["ratio"] == pytest.approx(1.2, abs=0.01)
    assert main(["compare", str(with_phases), str(new)]) == 0
    text = capsys.readouterr().out
    assert "1 slower" in text
    assert re.search(r"\+(19|20)\.\d slower", text)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--fail-over", "3"], "--fail-over: expected a share such as 5%"),
        (["--strict"], "--strict: expected --fail-over"),
        (["--changed", "weather"], "--changed: expected some of device_name"),
    ],
)
def test_mistakes_are_one_line_and_status_2(base, capsys, arguments, words):
    assert main(["compare", str(base), str(base), *arguments]) == 2
    error = capsys.readouterr().err
    assert words in error
    assert error.count("\n") == 1


def test_the_workflow_of_the_docs_is_a_gate_on_a_command_that_there_is(base, capsys):
    workflow = yaml.safe_load((Path(__file__).parents[1] / "docs" / "compare-in-ci.yml").read_text())
    steps = [step.get("run", "") for step in workflow["jobs"]["compare"]["steps"]]
    (gate,) = (line.split() for step in steps for line in step.splitlines() if "moe-ep-bench compare" in line)
    options = gate[gate.index("compare") + 3 :]
    assert main(["compare", str(base), str(base.parent / "." / base.name), *options]) == 0
    assert capsys.readouterr().err == "moe-ep-bench: BASE and NEW are one directory, so that nothing can differ\n"
