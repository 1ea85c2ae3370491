"""Where experts lie, and what that makes of their loads."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_ep_bench.placement import make_placement

few_examples = settings(max_examples=15)


@few_examples
@given(data=st.data())
def test_ranks_bear_what_their_experts_bear(data: st.DataObject) -> None:
    """Against a loop over experts, for batches of loads at once; no pair is lost or counted twice."""
    num_ranks, per_rank = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 4))
    experts, ranks = range(num_ranks * per_rank), range(num_ranks)

    def rows(of: st.SearchStrategy[int], fewest: int, most: int) -> list[list[int]]:
        return data.draw(
            st.lists(st.lists(of, min_size=len(experts), max_size=len(experts)), min_size=fewest, max_size=most)
        )

    load_BE, matrix = np.array(rows(st.integers(0, 9), 1, 3)), rows(st.integers(0, 3), num_ranks, num_ranks)
    for expert in experts:
        matrix[expert % num_ranks][expert] += 1  # Everyone has a home.
    shares_RE = {
        "contiguous": [[float(rank == expert // per_rank) for expert in experts] for rank in ranks],
        "strided": [[float(rank == expert % num_ranks) for expert in experts] for rank in ranks],
        "matrix": matrix,
    }
    for kind, share_RE in shares_RE.items():
        placement = make_placement(matrix if kind == "matrix" else kind, len(experts), num_ranks)
        load_BR, read_BR = placement.rank_load(load_BE), placement.activated_experts(load_BE)
        assert load_BR.sum(axis=1) == pytest.approx(load_BE.sum(axis=1))
        for batch, rank in itertools.product(range(len(load_BE)), ranks):
            held = [(load_BE[batch, e] * share_RE[rank][e] / sum(row[e] for row in share_RE)) for e in experts]
            assert load_BR[batch, rank] == pytest.approx(sum(held))
            assert read_BR[batch, rank] == sum(load > 0 for load in held)


@pytest.mark.parametrize(
    ("spec", "num_experts", "num_ranks", "expected"),
    [
        ("contiguous", 6, 4, "divide the 6 experts, got 4"),
        ("strided", 6, 0, "got 0"),
        ("random", 6, 2, "expected contiguous, strided or a JSON file"),
        ([[1, 0]], 2, 2, "2 rows (ranks) and 2 columns (experts), got shape [1, 2]"),
        ([[1, 0], [0]], 2, 2, "rows of different lengths"),
        ([[1, -1], [0, 2]], 2, 2, "non-negative"),
        ([[1, 0], [1, 0]], 2, 2, "none for expert 1"),
        ([[1, float("inf")], [1, 0]], 2, 2, "finite"),
    ],
)
def test_what_is_no_placement_is_refused(spec, num_experts: int, num_ranks: int, expected: str) -> None:
    with pytest.raises(ValueError, match="expected") as error:
        make_placement(spec, num_experts, num_ranks)
    assert expected in str(error.value)


def test_one_replica_takes_the_single_homes_away() -> None:
    assert make_placement([[1, 0, 1], [0, 1, 0]], 3, 2).rank_E.tolist() == [0, 1, 0]
    assert make_placement([[1, 0, 0.5], [0, 1, 0.5]], 3, 2).rank_E is None


def test_a_matrix_is_read_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "experts.json"
    path.write_text(json.dumps([[1, 0], [1, 1]]))
    placement = make_placement(path, 2, 2)
    assert placement.rank_load([4, 1]).tolist() == [2, 3]
    assert placement.activated_experts([4, 0]).tolist() == [1, 1]
    path.write_text("[[1,")
    with pytest.raises(ValueError, match=r"experts\.json: expected JSON, got"):
        make_placement(path, 2, 2)
