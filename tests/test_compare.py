"""Two runs side by side: what was planted is found and named, what is noise or the machine is not."""

from __future__ import annotations

import dataclasses
import functools
import json
import re

import numpy as np
import pandas as pd
import pytest
import test_statistics as statistics
from results_builder import FakeComparison, standard_cases, write_run

from moe_ep_bench.analysis.compare import change_text, compare_directories, exit_status
from moe_ep_bench.analysis.store import ResultsError
from moe_ep_bench.cli import main
from moe_ep_bench.timing.statistics import estimate_change

DROP = "token_drop capacity_factor=1.0"


def four_cases(drop=None):
    """Token Drop, topk, native again and native; ``drop`` replaces fields of the first."""
    first, _, *others = standard_cases()
    return [dataclasses.replace(first, **(drop or {})), *others]


def run_of(root, *, seed=0, mode="run", environment=None, drop=None, cases=None, **changes):
    cases = cases or four_cases(drop)
    comparison = FakeComparison(**{"cases": cases, "noise": 0.003, "num_iterations": 3, "kinds": ("plain",), **changes})
    return write_run(root, [comparison], mode, seed, environment)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return run_of(tmp_path_factory.mktemp("base") / "run")


def compared(base, new, limit=0.03):
    """The change and its cases' rows by label."""
    change = compare_directories(base, new, limit=limit)
    rows = change.cases.astype(object).where(change.cases.notna(), None)
    return change, {row["label"]: row for row in rows.to_dict("records")}


def statuses(change) -> tuple[int, int]:
    return exit_status(change), exit_status(change, strict=True)


def verdicts(cases) -> dict[str, str]:
    return {label: row["verdict"] for label, row in cases.items()}


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


# ---- verdicts -------------------------------------------------------------------------------------------------------


def test_a_run_against_itself_shows_no_difference_anywhere(base):
    change, cases = compared(base, base, 0.01)
    assert set(verdicts(cases).values()) == {"no difference"}
    assert cases[DROP]["floor"] == pytest.approx(1, abs=0.01)
    assert [cases[label]["outcome"] for label in (DROP, "topk", "native")] == ["passed", "passed", None]
    assert statuses(change) == (0, 0)


@pytest.mark.slow
@pytest.mark.parametrize("factor", [1.05, 1 / 1.05])
def test_a_planted_change_is_found_in_that_case_and_nowhere_else(base, tmp_path, factor):
    new = run_of(tmp_path / "new", seed=1, drop={"speedup": 1.5 / factor})
    change, cases = compared(base, new)
    word = "slower" if factor > 1 else "faster"
    assert {label for label, verdict in verdicts(cases).items() if verdict == word} == {DROP}
    drop = cases[DROP]
    assert drop["change_low"] < drop["change_ratio"] < drop["change_high"]
    assert drop["change_ratio"] == pytest.approx(factor, abs=0.005)
    assert drop["median_ms_new"] / drop["median_ms_base"] == pytest.approx(factor, abs=0.005)
    assert statuses(change) == ((1, 1) if factor > 1 else (0, 0))
    assert statuses(compared(base, new, 0.06)[0]) == (0, 0), "beyond noise, and within the limit"
    assert statuses(compared(base, new, None)[0]) == (0, 0)


def test_a_machine_that_became_slower_makes_no_case_slower(base, tmp_path):
    new = run_of(tmp_path / "new", seed=1, native_us=2000 * 1.1)
    change, cases = compared(base, new)
    assert verdicts(cases) == {"native": "slower", **dict.fromkeys([DROP, "topk", "native again"], "no difference")}
    assert cases["native"]["change_ratio"] == pytest.approx(1.1, abs=0.01)
    assert statuses(change) == (0, 3)
    assert "warning: native itself became slower (+" in change_text(change)


def test_a_case_that_did_not_follow_a_faster_native_fails_though_it_takes_as_long(base, tmp_path):
    new = run_of(tmp_path / "new", seed=1, native_us=2000 / 1.1, drop={"speedup": 1.5 / 1.1})
    change, cases = compared(base, new)
    assert cases[DROP]["median_ms_new"] == pytest.approx(cases[DROP]["median_ms_base"], rel=0.01)
    assert cases[DROP]["verdict"] == "slower"
    assert exit_status(change) == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "why", "strict"),
    [
        ({"num_batches": 9}, "fewer than 10 batches give no interval", 3),
        ({"cases": [case for case in four_cases() if case.role != "noise"]}, "a run lacks its noise floor", 0),
        ({"facts": {"oversubscribed": True}}, "more ranks than cores", 0),
    ],
)
def test_what_cannot_be_told_is_inconclusive_and_open_unless_a_loss_is_excluded(tmp_path, changes, why, strict):
    directory = run_of(tmp_path / "run", **changes)
    change, cases = compared(directory, directory)
    assert set(verdicts(cases).values()) == {"inconclusive"}
    assert all(row["why"].startswith(why) for row in cases.values())
    assert statuses(change) == (0, strict)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("factor", "verdict", "outcome"), [(1.05, "no difference", "open"), (1.07, "slower", "slower")]
)
def test_a_change_counts_beyond_both_floors_together(tmp_path, factor, verdict, outcome):
    """Native differs from itself by 4 % in both runs, which together make 5.7 %; nothing else is noise."""
    runs = []
    for name, speedup in (("base", 1.5), ("new", 1.5 / factor)):
        drop, topk, again, native = four_cases({"speedup": speedup})
        cases = [drop, topk, dataclasses.replace(again, speedup=1 / 1.04), native]
        runs.append(run_of(tmp_path / name, cases=cases, noise=0.0, num_iterations=1))
    change, cases = compared(*runs)
    assert cases[DROP]["floor"] == pytest.approx(1.0570, abs=1e-3)
    assert (cases[DROP]["verdict"], cases[DROP]["outcome"]) == (verdict, outcome)
    (row,) = (line for line in change_text(change).splitlines() if line.startswith(DROP))
    assert "  5.7  " in row


@pytest.mark.slow
def test_the_whole_interval_excludes_a_loss(base, tmp_path):
    new = run_of(tmp_path / "new", noise=0.1, seed=3)
    _, cases = compared(base, new, None)
    between = (max(cases[DROP]["change_ratio"], 1) + cases[DROP]["change_high"]) / 2 - 1
    assert [compared(base, new, limit)[1][DROP]["outcome"] for limit in (between, 0.5)] == ["open", "passed"]


# ---- conditions -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_other_conditions_are_named_and_take_no_verdict_away(base, tmp_path):
    old = run_of(tmp_path / "old", environment={"driver": "570.1"})
    facts, changed = {"experts": {"requested": "auto", "ran": "grouped"}}, {"driver": "580.2", "hostname": "b"}
    new = run_of(tmp_path / "new", environment=changed, facts=facts, drop={"speedup": 1.5 / 1.2}, seed=1)
    change, cases = compared(old, new)
    assert verdicts(cases)[DROP] == "slower"
    assert statuses(change) == (1, 1)
    assert "conditions differ: driver 570.1 -> 580.2, experts te -> grouped\n" in change_text(change)
    run = json.loads((new / "run.json").read_text())
    run["runs"]["stale"] = {**run["runs"]["r0"], "environment": {**changed, "driver": "1"}}  # it measured nothing
    (new / "run.json").write_text(json.dumps(run | {"run_id": "stale"}))
    assert change_text(compared(old, new)[0]) == change_text(change)
    assert "driver" not in change_text(compared(base, new)[0]), "what one run did not write down differs from none"


# ---- which cases ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_cases_of_one_run_only_are_rows_and_never_compared(base, tmp_path):
    settings = {"noise": 0.003, "num_iterations": 3, "kinds": ("plain",)}
    one, more = (FakeComparison(name, cases=four_cases(), **settings) for name in ("c0", "c1"))
    both, alone = write_run(tmp_path / "both", [one, more], seed=1), write_run(tmp_path / "alone", [more])
    for pair, said, status in (((base, both), "only in NEW", 0), ((both, base), "only in BASE", 3)):
        change, _ = compared(*pair)
        found = change.cases[change.cases["not_compared"] == said]
        assert (sorted(found["case_id"]), len(change.cases)) == ([f"c1-{number}" for number in range(4)], 8)
        assert f"not compared: {said}" in change_text(change)
        assert statuses(change) == (0, status), "new cases are no gap"
    with pytest.raises(ResultsError, match=r"no case is in .* the same command and config"):
        compare_directories(base, alone)


def test_a_case_that_was_lost_or_routes_differently_is_said(base, tmp_path):
    cases = four_cases({"status": "oom", "reason": "CUDA out\nof memory"})
    cases[1] = dataclasses.replace(cases[1], dropped=0.3)
    new = run_of(tmp_path / "new", seed=1, cases=cases)
    change, rows = compared(base, new)
    assert rows[DROP]["not_compared"] == "oom in NEW: CUDA out of memory"
    assert rows[DROP]["outcome"] == "open"
    assert statuses(change) == (0, 3)
    text = change_text(change)
    assert f"{DROP}: not compared: oom in NEW" in text
    assert "warning: topk drops 0.0 % in BASE and 30.0 % in NEW" in text
    assert f"undecided whether slower by more than 3 %: {DROP}" in text


# ---- the command ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_json_and_text_say_what_the_exit_status_says(base, tmp_path, capsys):
    new = run_of(tmp_path / "new", seed=1, drop={"speedup": 1.5 / 1.2})
    assert main(["compare", str(base), str(new), "--fail-over", "3%", "--json"]) == 1
    rows = {row["label"]: row for row in json.loads(capsys.readouterr().out)["rows"]}
    assert [rows[label]["outcome"] for label in (DROP, "topk", "native")] == ["slower", "passed", None]
    assert rows[DROP]["change_ratio"] == pytest.approx(1.2, abs=0.01)
    assert main(["compare", str(base), str(new)]) == 0
    text = capsys.readouterr().out
    assert "2 policies: 1 slower, 0 faster, 1 no difference, 0 inconclusive" in text
    (row,) = (line for line in text.splitlines() if line.startswith(DROP))
    assert re.search(r"1\.[45]\d+ +1\.2\d+ +\+(19|20)\.\d \[\+\d.*slower +25\.0 +80\.0$", row)
