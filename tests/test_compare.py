"""Two runs side by side: what was planted is found and named, what is noise or the machine is not."""

from __future__ import annotations

import dataclasses
import json
import re

import numpy as np
import pandas as pd
import pytest
from results_builder import QUIET_MACHINE, FakeComparison, standard_cases, write_run

from moe_ep_bench.analysis.compare import compare_directories
from moe_ep_bench.analysis.compare_report import compare_text, exit_status, outcome, parse_limit
from moe_ep_bench.analysis.load import ResultsError
from moe_ep_bench.cli import main
from moe_ep_bench.timing.changes import estimate_change, joint_floor
from moe_ep_bench.timing.statistics import NoiseFloor, judge

BOTH = ("plain", "breakdown")
DROP = "token_drop gamma 1"


def run_of(root, *, seed=0, mode="run", environment=None, drop=None, cases=None, **changes):
    """A run of the standard cases; ``drop`` replaces fields of token_drop."""
    cases = cases or standard_cases()
    cases[0] = dataclasses.replace(cases[0], **(drop or {}))
    comparison = FakeComparison(**{"cases": cases, "noise": 0.003, "num_iterations": 3, "kinds": ("plain",), **changes})
    return write_run(root, [comparison], mode, seed, environment)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return run_of(tmp_path_factory.mktemp("base") / "run")


@pytest.fixture(scope="module")
def with_phases(tmp_path_factory):
    return run_of(tmp_path_factory.mktemp("phases") / "run", kinds=BOTH)


def compared(base, new, **options):
    """The change and its cases' rows by label."""
    change = compare_directories(base, new, **options)
    return change, {row["label"]: row for row in change.cases.to_dict("records")}


def verdicts(cases) -> dict[str, str]:
    return {label: row["time_verdict"] for label, row in cases.items()}


# ---- the statistic --------------------------------------------------------------------------------------------------


def times(generator, *, launches=1, batches=10, iterations=3, sigma=0.05, launch_effect=0.0, disturbed=0.02):
    """Times of one case in one job, on batches of very unequal length; some iterations are disturbed."""
    length_B1 = np.geomspace(1, 3, batches)[:, None]
    job_L11 = generator.normal(0, launch_effect, (launches, 1, 1))
    noise_LBI = generator.normal(0, sigma, (launches, batches, iterations))
    longer_LBI = np.where(generator.random(noise_LBI.shape) < disturbed, generator.uniform(1.5, 4, noise_LBI.shape), 1)
    values_LBI = length_B1 * np.exp(job_L11 + noise_LBI) * longer_LBI
    index = pd.MultiIndex.from_product(map(range, values_LBI.shape), names=["launch", "batch", "iteration"])
    return pd.Series(values_LBI.ravel(), index)


@pytest.mark.parametrize(
    "design",
    [
        pytest.param({}, id="quickstart"),
        pytest.param({"iterations": 1}, id="one breakdown iteration"),
        pytest.param({"batches": 30, "iterations": 5, "sigma": 0.02}, id="30 batches"),
        pytest.param({"launches": 3, "launch_effect": 0.03}, id="3 launches that differ"),
    ],
)
def test_of_equal_jobs_about_one_in_forty_is_called_longer_and_one_in_forty_shorter(design):
    generator = np.random.default_rng(41)
    estimates = [estimate_change(times(generator, **design), times(generator, **design)) for _ in range(100)]
    longer, shorter = (np.mean([estimate.low > 1 for estimate in estimates]), np.mean([e.high < 1 for e in estimates]))
    # 2.5 % expected; binomial scatter of 100 is 1.6 %.
    assert longer <= 0.07
    assert shorter <= 0.07
    assert np.median([estimate.median for estimate in estimates]) == pytest.approx(1, abs=0.01)


def test_launches_of_one_job_alone_miss_what_differs_between_jobs():
    """Why several launches are worth their time: the same scatter between jobs, seen and unseen."""
    generator = np.random.default_rng(43)
    wrong = {1: 0, 3: 0}
    for launches in wrong:
        for _ in range(40):
            old, new = (times(generator, launches=launches, sigma=0.01, launch_effect=0.03) for _ in range(2))
            estimate = estimate_change(old, new)
            wrong[launches] += not estimate.low <= 1 <= estimate.high
    assert wrong[3] <= 0.15 * 40
    assert wrong[1] >= 0.5 * 40


def test_change_is_the_median_over_batches_of_ratios_of_medians_spelled_out():
    generator = np.random.default_rng(3)
    old, new = times(generator), times(generator) * 1.1
    ratios = []
    for batch in range(10):
        of_batch = [[value for (_, b, _), value in series.items() if b == batch] for series in (old, new)]
        ratios.append(np.median(of_batch[1]) / np.median(of_batch[0]))
    assert estimate_change(old, new).median == pytest.approx(np.median(ratios))


def test_iterations_of_two_jobs_are_no_pairs_and_batches_are():
    generator = np.random.default_rng(5)
    old, new = times(generator), times(generator)
    shuffled = new.groupby(level="batch").transform(lambda cell: cell.to_numpy()[::-1])
    assert estimate_change(old, shuffled) == estimate_change(old, new)
    rotated = new.rename({batch: (batch + 3) % 10 for batch in range(10)}, level="batch")
    assert estimate_change(old, rotated).high > 2 * estimate_change(old, new).high


def test_the_two_directions_of_a_comparison_say_the_same():
    generator = np.random.default_rng(7)
    old, new = times(generator, launches=2), times(generator, launches=3)
    forth, back = estimate_change(old, new), estimate_change(new, old)
    assert forth.median == pytest.approx(1 / back.median, rel=0.01)
    assert forth.low == pytest.approx(1 / back.high, rel=0.02)


def test_launch_part_is_students_interval_of_two_samples():
    """Without other noise nothing is left but the launches: 0 and 2 % against 0, 1 and 2 %, by hand."""

    def of_launches(*logs):
        index = pd.MultiIndex.from_product([range(len(logs)), range(10), [0]], names=["launch", "batch", "iteration"])
        return pd.Series(np.repeat(np.exp(logs), 10), index)

    estimate = estimate_change(of_launches(0.0, 0.02), of_launches(0.0, 0.01, 0.02))
    pooled = np.sqrt((2 * 0.01**2 + 2 * 0.01**2) / 3)
    half = 3.1824 * pooled * np.sqrt(1 / 2 + 1 / 3)  # t of 3 degrees of freedom, from a table
    assert np.log(estimate.high / estimate.median) == pytest.approx(half, rel=0.01)
    assert estimate.num_launches == 2


def test_without_a_common_batch_or_with_times_of_zero_there_is_no_change():
    generator = np.random.default_rng(9)
    old = times(generator)
    assert estimate_change(old, old.rename({batch: batch + 10 for batch in range(10)}, level="batch")) is None
    assert estimate_change(old * 0, old) is None
    assert estimate_change(old, old * 0) is None


def test_joint_floor_is_wider_than_either_and_symmetric():
    floor = joint_floor(NoiseFloor(1 / 1.03, 1.03), NoiseFloor(1 / 1.04, 1.04))
    assert floor.high == pytest.approx(1.0505, abs=2e-3)  # 3 and 4 make 5
    assert floor.low * floor.high == pytest.approx(1)


def test_pure_noise_is_hardly_ever_slower_once_held_against_the_floor():
    generator = np.random.default_rng(11)
    slower = 0
    for _ in range(50):
        old, new, native, again = (times(generator) for _ in range(4))
        half = estimate_change(native, again)
        floor = NoiseFloor(min(half.low, 1 / half.high), max(half.high, 1 / half.low))
        slower += judge(estimate_change(old, new), floor) == "faster"  # judge speaks of a speedup
    assert slower <= 2


# ---- verdicts -------------------------------------------------------------------------------------------------------


def test_a_run_against_itself_shows_no_difference_anywhere(with_phases):
    change, cases = compared(with_phases, with_phases)
    assert set(verdicts(cases).values()) == {"no difference"}
    assert set(change.changes["verdict"]) == {"no difference"}
    assert (change.changes["case_id"] == cases[DROP]["case_id"]).sum() == 1 + 1 + 8  # time, speedup, phases
    assert exit_status(change, 0.01, strict=True) == 0


def test_another_run_of_the_same_shows_no_difference(base, tmp_path):
    change, cases = compared(base, run_of(tmp_path / "new", seed=1))
    assert not set(verdicts(cases).values()) & {"slower", "faster"}
    assert exit_status(change, 0.03, strict=True) == 0


@pytest.mark.parametrize("factor", [1.05, 1 / 1.05])
def test_a_planted_change_of_one_phase_is_found_there_and_in_the_layer_and_nowhere_else(with_phases, tmp_path, factor):
    new = run_of(tmp_path / "new", seed=1, kinds=BOTH, drop={"phase_factors": {"experts": factor}})
    change, cases = compared(with_phases, new)
    word = "slower" if factor > 1 else "faster"
    assert {label for label, verdict in verdicts(cases).items() if verdict == word} == {DROP}
    drop = cases[DROP]
    phases = change.changes[change.changes["quantity"] != "all"]
    (found,) = phases[phases["verdict"].isin(["slower", "faster"])].to_dict("records")
    assert (found["case_id"], found["quantity"], found["verdict"]) == (drop["case_id"], "experts", word)
    assert found["ratio"] == pytest.approx(factor, abs=0.005)
    assert drop["time_ratio"] == pytest.approx(1 + 0.44 * (factor - 1), abs=0.004)
    assert drop["speedup_verdict"] == ("lower" if factor > 1 else "higher")
    assert exit_status(change, 0.01) == (1 if factor > 1 else 0)
    assert exit_status(change, 0.03) == 0  # 2.2 % of the layer


def test_a_machine_that_became_slower_makes_no_case_slower(base, tmp_path):
    change, cases = compared(base, run_of(tmp_path / "new", seed=1, native_us=2000 * 1.1))
    assert verdicts(cases)["native"] == "slower"
    assert verdicts(cases)[DROP] == verdicts(cases)["topk"] == "inconclusive"
    assert re.match(r"native changed by \+(9|10)\.\d %: perhaps the machine", cases[DROP]["time_why"])
    assert cases[DROP]["speedup_verdict"] not in ("lower", "higher")
    assert exit_status(change, 0.03) == 0
    assert exit_status(change, 0.03, strict=True) == 3
    text = compare_text(change, 0.03)
    assert "warning: native itself became slower (+" in text
    assert "neither shown nor excluded" in text


def test_where_the_machine_is_known_to_be_the_same_native_is_a_case_like_others(base, tmp_path):
    change, cases = compared(base, run_of(tmp_path / "new", seed=1, native_us=2000 * 1.1), same_machine=True)
    assert set(verdicts(cases).values()) == {"slower"}
    assert exit_status(change, 0.03) == 1
    assert exit_status(change, 0.2) == 0


def test_a_case_that_lost_on_a_slower_machine_is_slower_still(base, tmp_path):
    new = run_of(tmp_path / "new", seed=1, native_us=2000 * 1.1, drop={"speedup": 1.5 / 1.1})
    change, cases = compared(base, new)
    assert verdicts(cases)[DROP] == "slower"
    assert verdicts(cases)["topk"] == "inconclusive"
    assert exit_status(change, 0.03) == 1


def test_a_case_that_did_not_follow_a_faster_native_has_a_lower_speedup_and_fails(base, tmp_path):
    new = run_of(tmp_path / "new", seed=1, native_us=2000 / 1.1, drop={"speedup": 1.5 / 1.1})
    change, cases = compared(base, new)
    assert verdicts(cases)[DROP] == "inconclusive"
    assert "native became faster" in cases[DROP]["time_why"]
    assert cases[DROP]["speedup_verdict"] == "lower"
    assert outcome(cases[DROP], 0.03) == "slower"
    assert exit_status(change, 0.03) == 1


def test_a_case_that_became_faster_is_never_failed_for_its_speedup(base, tmp_path):
    """All became faster, native most: that is no regression."""
    new = run_of(tmp_path / "new", seed=1, native_us=2000 / 1.2, drop={"speedup": 1.5 / 1.1})
    change, cases = compared(base, new, same_machine=True)
    assert verdicts(cases)[DROP] == "faster"
    assert cases[DROP]["speedup_verdict"] == "lower"
    assert exit_status(change, 0.03) == 0


def test_fewer_than_ten_batches_cannot_say(tmp_path):
    runs = [run_of(tmp_path / str(seed), seed=seed, num_batches=9) for seed in range(2)]
    change, cases = compared(*runs)
    assert set(verdicts(cases).values()) == {"inconclusive"}
    assert cases[DROP]["time_why"] == "9 batches: fewer than 10 give no interval"
    assert (exit_status(change, 0.03), exit_status(change, 0.03, strict=True)) == (0, 3)


def test_a_floor_wider_than_the_limit_leaves_the_gate_open_and_strict_says_so(tmp_path):
    runs = [run_of(tmp_path / str(seed), seed=seed, noise=0.06) for seed in range(2)]
    change, cases = compared(*runs)
    assert outcome(cases[DROP], 0.01) == "open"
    assert (exit_status(change, 0.01), exit_status(change, 0.01, strict=True)) == (0, 3)
    assert outcome(cases[DROP], 0.5) == "passed"


@pytest.mark.parametrize(("factor", "verdict", "gate"), [(1.05, "no difference", "open"), (1.07, "slower", "slower")])
def test_a_change_counts_beyond_both_floors_together(tmp_path, factor, verdict, gate):
    """Native differs from itself by 4 % in both runs, which together make 5.7 %; nothing else is noise."""
    runs = []
    for name, speedup in (("base", 1.5), ("new", 1.5 / factor)):
        cases = standard_cases()
        cases[3] = dataclasses.replace(cases[3], speedup=1 / 1.04)
        runs.append(run_of(tmp_path / name, cases=cases, noise=0.0, drop={"speedup": speedup}))
    _, cases = compared(*runs)
    assert cases[DROP]["time_floor_high"] == pytest.approx(1.0570, abs=1e-3)
    assert cases[DROP]["time_verdict"] == verdict
    assert outcome(cases[DROP], 0.03) == gate


def test_without_noise_floor_there_is_no_verdict(tmp_path):
    runs = [
        run_of(tmp_path / str(seed), seed=seed, cases=[*standard_cases()[:3], standard_cases()[4]]) for seed in (0, 1)
    ]
    _, cases = compared(*runs)
    assert set(verdicts(cases).values()) == {"inconclusive"}
    assert cases[DROP]["time_why"] == "a run lacks its noise floor"


# ---- conditions -----------------------------------------------------------------------------------------------------


def test_another_driver_takes_all_verdicts_away_unless_it_was_changed_on_purpose(base, tmp_path):
    slower = {"drop": {"speedup": 1.5 / 1.2}, "seed": 1}
    old = run_of(tmp_path / "old", environment={"driver": "570.1"})
    new = run_of(tmp_path / "new", environment={"driver": "580.2"}, **slower)
    change, cases = compared(old, new)
    assert set(verdicts(cases).values()) == {"inconclusive"}
    assert cases[DROP]["speedup_why"] == "conditions differ: driver"
    assert (exit_status(change, 0.03), exit_status(change, 0.03, strict=True)) == (0, 3)
    assert re.search(r"driver +570\.1  580\.2  none without --changed driver", compare_text(change))
    change, cases = compared(old, new, intended=["driver"])
    assert verdicts(cases)[DROP] == "slower"
    assert exit_status(change, 0.03) == 1
    # What one run did not write down differs from nothing.
    assert verdicts(compared(base, new)[1])[DROP] == "slower"


def test_another_clock_takes_away_verdicts_on_times_and_leaves_those_on_speedups(base, tmp_path):
    machine = {**QUIET_MACHINE, "sm_clock_mhz": [1700.0, 1755.0, 1755.0]}
    new = run_of(tmp_path / "new", seed=1, drop={"speedup": 1.5 / 1.2}, conditions={"rank": {"machine": machine}})
    change, cases = compared(base, new)
    assert cases[DROP]["time_why"] == "conditions differ: clocks"
    assert cases[DROP]["speedup_verdict"] == "lower"
    assert "clocks     SM clock 1,980 MHz (median)  SM clock 1,755 MHz (median)" in compare_text(change)


def test_what_ran_for_an_open_choice_is_a_condition(base, tmp_path):
    new = run_of(tmp_path / "new", seed=1, facts={"experts": {"requested": "auto", "ran": "grouped"}})
    _, cases = compared(base, new)
    assert cases[DROP]["time_why"] == "conditions differ: experts"


def test_other_hosts_and_disturbed_machines_are_said_and_take_nothing_away(base, tmp_path):
    conditions = {"rank": {"machine": {**QUIET_MACHINE, "stolen_s": 20.0}}}
    change, cases = compared(
        base, run_of(tmp_path / "new", seed=1, environment={"hostname": "other"}, conditions=conditions)
    )
    assert verdicts(cases)[DROP] == "no difference"
    text = compare_text(change)
    assert re.search(r"hostname +node  other  stay", text)
    assert "warning: NEW: disturbed machine: the hypervisor took" in text


# ---- which cases ----------------------------------------------------------------------------------------------------


def test_cases_of_one_run_only_are_listed_and_never_compared(base, tmp_path):
    other = [FakeComparison("c1", cases=standard_cases(), noise=0.003)]
    both = write_run(tmp_path / "both", [FakeComparison("c0", cases=standard_cases(), noise=0.003), *other], seed=1)
    change, cases = compared(base, both)
    assert [case.case_id for case in change.only_new] == [f"c1-{number}" for number in range(5)]
    assert len(change.cases) == len(cases) == 5
    assert "only in NEW, not compared\n\n  c1-0" in compare_text(change)
    assert exit_status(change, 0.03, strict=True) == 0  # new cases are no gap
    change, _ = compared(both, base)
    assert len(change.only_base) == 5
    assert (exit_status(change, 0.03), exit_status(change, 0.03, strict=True)) == (0, 3)


def test_nothing_in_common_and_two_modes_are_refused(base, tmp_path):
    alone = write_run(tmp_path / "alone", [FakeComparison("c9", cases=standard_cases())])
    with pytest.raises(ResultsError, match="no case is in"):
        compare_directories(base, alone)
    emulated = run_of(tmp_path / "emulated", mode="emulated")
    with pytest.raises(ResultsError, match=r"emulated .* not compared"):
        compare_directories(base, emulated)


def test_a_case_that_was_lost_in_new_is_open_with_its_reason(base, tmp_path):
    new = run_of(tmp_path / "new", seed=1, drop={"status": "oom", "reason": "CUDA out\nof memory"})
    change, cases = compared(base, new)
    assert pd.isna(cases[DROP]["time_verdict"])
    assert cases[DROP]["not_compared"] == "oom in NEW: CUDA out of memory"
    assert outcome(cases[DROP], 0.03) == "open"
    assert (exit_status(change, 0.03), exit_status(change, 0.03, strict=True)) == (0, 3)
    assert f"{DROP}" in compare_text(change, 0.03)


def test_equal_ids_that_route_differently_are_a_warning(base, tmp_path):
    change, _ = compared(base, run_of(tmp_path / "new", seed=1, drop={"dropped": 0.3}))
    assert f"warning: {DROP} routes differently: dropped 25.0 % in BASE, 30.0 % in NEW" in compare_text(change)


# ---- the command ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("text", "share"), [("3%", 0.03), ("0.03", 0.03), (" 2.5 % ", 0.025), ("0", 0.0), ("0%", 0)])
def test_a_limit_is_a_percentage_or_a_share(text, share):
    assert parse_limit(text) == pytest.approx(share)


@pytest.mark.parametrize("text", ["3", "100%", "-1%", "nan", "3%%", "three", "", "%"])
def test_what_is_no_limit_is_refused(text):
    with pytest.raises(ValueError, match="--fail-over: expected a percentage such as 3%"):
        parse_limit(text)


def test_json_says_what_the_exit_status_says_and_text_is_the_same_twice(with_phases, tmp_path, capsys):
    new = run_of(tmp_path / "new", seed=1, kinds=BOTH, drop={"phase_factors": {"experts": 1.2}})
    assert main(["compare", str(with_phases), str(new), "--fail-over", "3%", "--json"]) == 1
    content = json.loads(capsys.readouterr().out)
    assert content["exit_status"] == 1
    (comparison,) = content["comparisons"]
    by_label = {case["label"]: case for case in comparison["cases"]}
    assert by_label[DROP]["outcome"] == "slower"
    assert by_label[DROP]["phases_us"]["experts"]["ratio"] == pytest.approx(1.2, abs=0.01)
    assert by_label["topk"]["outcome"] == "passed"
    assert by_label["native"]["outcome"] is None
    texts = []
    for _ in range(2):
        assert main(["compare", str(with_phases), str(new)]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1]
    assert "1 slower" in texts[0]
    assert re.search(r"\+(19|20)\.\d slower", texts[0])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--fail-over", "3"], "--fail-over: expected a percentage"),
        (["--strict"], "--strict: expected --fail-over"),
        (["--changed", "weather"], "--changed: expected some of device_name"),
    ],
)
def test_mistakes_are_one_line_and_status_2(base, capsys, arguments, words):
    assert main(["compare", str(base), str(base), *arguments]) == 2
    error = capsys.readouterr().err
    assert words in error
    assert error.count("\n") == 1


def test_a_directory_that_is_none_is_one_line_and_status_2(base, tmp_path, capsys):
    assert main(["compare", str(base), str(tmp_path / "nowhere")]) == 2
    assert capsys.readouterr().err == f"moe-ep-bench: {tmp_path / 'nowhere'}: no such directory\n"
