"""Sums of each token's rows, the kernel in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from moe_ep_bench.kernels.experts import row_sums_by_bags


def test_the_triton_sums_of_rows_equal_bags() -> None:
    pytest.importorskip("triton", reason="Triton is made for Linux")
    from moe_ep_bench.kernels.row_sums_triton import row_sums

    generator = torch.Generator().manual_seed(1)
    for counts, num_columns in (([], 16), ([0], 16), ([1], 1), ([0, 3, 0, 9, 1, 0], 48), ([2, 5], 1408)):
        for dtype in (torch.float32, torch.bfloat16):
            ends_T = torch.tensor(counts, dtype=torch.int64).cumsum(0)
            rows_ND = torch.randn(sum(counts) + 2, num_columns, generator=generator).to(dtype)  # two of no token
            places_N = torch.randperm(len(rows_ND), generator=generator)
            expected_TD = row_sums_by_bags(rows_ND.float(), places_N, ends_T).to(dtype)
            torch.testing.assert_close(row_sums(rows_ND, places_N, ends_T), expected_TD)


def test_bags_hold_each_tokens_rows_and_no_others() -> None:
    rows_ND = torch.tensor([[1.0], [10.0], [100.0], [1000.0]])
    places_N, ends_T = torch.tensor([2, 0, 1, 3]), torch.tensor([2, 2, 3])  # the last row is of no token
    assert row_sums_by_bags(rows_ND, places_N, ends_T).tolist() == [[101.0], [0.0], [10.0]]
