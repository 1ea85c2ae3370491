"""The seam to Megatron-Core: laws of real layers and whole models on gloo ranks, and of virtual ones in one process."""

from __future__ import annotations

import laws
import pytest

pytestmark = pytest.mark.seam


@pytest.mark.parametrize(
    ("suite", "num_ranks", "name"), [(suite, *case) for suite in laws.SUITES for case in laws.cases(suite)]
)
def test_law(suite: str, num_ranks: int, name: str) -> None:
    laws.check(suite, num_ranks, name)
