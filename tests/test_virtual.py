"""Virtual ranks on one process give what real ranks give, for a layer and for a whole model."""

from __future__ import annotations

import laws
import pytest

pytestmark = pytest.mark.seam


@pytest.mark.parametrize(("num_ranks", "name"), laws.cases("virtual"))
def test_law(num_ranks: int, name: str) -> None:
    laws.check("virtual", num_ranks, name)
