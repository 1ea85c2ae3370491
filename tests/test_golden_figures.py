"""The numbers behind the figures of results/reference do not move: each drawn anew, beside frozen ones.

Beside tests/test_goldens.py, whose comparison this is, so that both can run at the same time.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from test_goldens import REFERENCES, assert_unmoved, fresh_reference


@pytest.mark.slow
@pytest.mark.parametrize("name", REFERENCES)
def test_figures_show_what_was_frozen(name: str, tmp_path: Path) -> None:
    assert_unmoved(name, fresh_reference(name, tmp_path))
