"""Whole models on Megatron-Core: laws on two gloo ranks."""

from __future__ import annotations

import laws
import pytest

pytestmark = pytest.mark.seam


@pytest.mark.parametrize(("num_ranks", "name"), laws.cases("model"))
def test_law(num_ranks: int, name: str) -> None:
    laws.check("model", num_ranks, name)
