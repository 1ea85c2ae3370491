"""The seam to Megatron-Core: laws of a real expert-parallel layer on two gloo ranks, some on one and four too."""

from __future__ import annotations

import laws
import pytest

pytestmark = pytest.mark.seam


@pytest.mark.parametrize(("num_ranks", "name"), laws.cases("layer"))
def test_law(num_ranks: int, name: str) -> None:
    laws.check("layer", num_ranks, name)
