"""The frame: a row per case whatever wrote it, and frames of samples and batches that join on it."""

from __future__ import annotations

import pandas as pd
import pytest
from results_builder import FakeCase, FakeComparison, standard_cases, write_run

from moe_ep_bench.analysis.cases import CASE, cases, comparisons, iterations, load, routing, samples


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    """Two directories that hold one comparison each, of the same ids."""
    root = tmp_path_factory.mktemp("runs")
    dropping = FakeCase("oea", params={"k0": 3}, speedup=1.2, dropped=0.1, mass=0.9)
    for number, name in enumerate(("a", "b")):
        comparison = FakeComparison(
            facts={"point": {"workload.peak_load": number + 1.5}}, cases=[*standard_cases(), dropping], num_iterations=2
        )
        write_run(root / name, [comparison])
    return load([root / "a", root / "b"])


def test_directories_are_told_apart_by_a_column_and_never_pooled(store):
    rows = cases(store)
    assert len(rows) == 12
    assert not rows.duplicated(CASE).any()
    assert list(rows["directory"].unique()) == ["a", "b"]
    assert rows["comparison_id"].nunique() == 1
    assert len(comparisons(store)) == 2
    assert set(rows["swept"]) == {"workload.peak_load"}
    assert list(comparisons(store)["swept_value"]) == [1.5, 2.5]


def test_every_frame_joins_on_the_case(store):
    rows = cases(store)
    for frame in (samples(store), iterations(store), routing(store)):
        joined = frame.merge(rows[CASE], on=CASE, how="left", indicator=True)
        assert len(joined) == len(frame)
        assert (joined["_merge"] == "both").all()
    oea = rows[rows["policy"] == "oea"]
    assert set(map(tuple, samples(store, oea)[CASE].drop_duplicates().to_numpy())) == set(
        map(tuple, oea[CASE].to_numpy())
    )


def test_means_of_batches_are_the_cases_own(store):
    means = routing(store).groupby(CASE)[["dropped_share", "retained_mass", "fullest_expert", "fullest_rank"]].mean()
    rows = cases(store).set_index(CASE)
    pd.testing.assert_frame_equal(rows[means.columns].astype(float).sort_index(), means.sort_index(), check_exact=False)


def test_a_case_is_as_slow_as_its_slowest_rank(store):
    """The frame of iterations agrees with a plain maximum over the samples of all ranks."""
    rows, plain = samples(store), iterations(store).query("kind == 'plain'")
    totals = rows[(rows["kind"] == "plain") & (rows["phase"] == "total")]
    keys = [*CASE, "launch", "batch", "iteration"]
    slowest = totals.groupby(keys)["time_us"].max()
    assert plain.set_index(keys)["time_us"].sort_index().to_numpy() == pytest.approx(slowest.sort_index().to_numpy())
    medians = plain.groupby(CASE)["time_us"].median() / 1e3
    assert cases(store).set_index(CASE)["median_ms"].sort_index().to_numpy() == pytest.approx(medians.to_numpy())
