"""Where experts lie, and what that makes of their loads."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_ep_bench.placement import make_placement

few_examples = settings(max_examples=15)


def test_contiguous_experts_share_a_rank_with_their_neighbours() -> None:
    placement = make_placement("contiguous", 6, 2)
    assert placement.rank_load([5, 1, 0, 2, 2, 2]).tolist() == [6, 6]
    assert placement.activated_experts([5, 1, 0, 2, 2, 2]).tolist() == [2, 3]


def test_strided_experts_are_dealt_like_cards() -> None:
    placement = make_placement("strided", 6, 2)
    assert placement.rank_load([5, 1, 0, 2, 2, 2]).tolist() == [7, 5]
    assert placement.activated_experts([5, 1, 0, 2, 2, 2]).tolist() == [2, 3]


def test_a_replicated_expert_divides_its_load_and_is_read_by_every_rank_that_holds_it() -> None:
    # Expert 0 on both ranks, three parts to one; experts 1 and 2 have one home each.
    placement = make_placement([[3, 1, 0], [1, 0, 5]], 3, 2)
    assert placement.rank_load([8, 2, 1]).tolist() == [8, 3]
    assert placement.activated_experts([8, 0, 1]).tolist() == [1, 2]


def test_a_matrix_is_read_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "experts.json"
    path.write_text(json.dumps([[1, 0], [1, 1]]))
    assert make_placement(path, 2, 2).rank_load([4, 1]).tolist() == [2, 3]


@few_examples
@given(data=st.data())
def test_ranks_bear_what_their_experts_bear(data: st.DataObject) -> None:
    """Against a loop over experts, for batches of loads at once; no pair is lost or counted twice."""
    num_ranks, num_experts = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 4))
    num_experts *= num_ranks
    matrix = data.draw(
        st.lists(
            st.lists(st.integers(0, 3), min_size=num_experts, max_size=num_experts),
            min_size=num_ranks,
            max_size=num_ranks,
        )
    )
    for expert in range(num_experts):
        matrix[expert % num_ranks][expert] += 1  # Everyone has a home.
    load_BE = np.array(
        data.draw(
            st.lists(st.lists(st.integers(0, 9), min_size=num_experts, max_size=num_experts), min_size=1, max_size=3)
        )
    )
    kinds = {"contiguous": None, "strided": None, "matrix": matrix}
    for kind, given_matrix in kinds.items():
        placement = make_placement(given_matrix or kind, num_experts, num_ranks)
        load_BR, read_BR = placement.rank_load(load_BE), placement.activated_experts(load_BE)
        assert load_BR.sum(axis=1) == pytest.approx(load_BE.sum(axis=1))
        for batch, load_E in enumerate(load_BE):
            for rank in range(num_ranks):
                load, read = 0.0, 0
                for expert, pairs in enumerate(load_E):
                    homes = {
                        "contiguous": lambda e: [float(r == e * num_ranks // num_experts) for r in range(num_ranks)],
                        "strided": lambda e: [float(r == e % num_ranks) for r in range(num_ranks)],
                        "matrix": lambda e: [matrix[r][e] for r in range(num_ranks)],
                    }[kind](expert)
                    load += pairs * homes[rank] / sum(homes)
                    read += bool(homes[rank]) and bool(pairs)
                assert load_BR[batch, rank] == pytest.approx(load)
                assert read_BR[batch, rank] == read


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


def test_a_file_that_is_no_json_is_named(tmp_path: Path) -> None:
    (tmp_path / "experts.json").write_text("[[1,")
    with pytest.raises(ValueError, match=r"experts\.json: expected JSON, got"):
        make_placement(tmp_path / "experts.json", 2, 2)
