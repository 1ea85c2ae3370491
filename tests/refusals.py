"""How a call refuses wrong input."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest


def refusal(call: Callable[..., object], *args: Any, **kwargs: Any) -> str:
    """The one line with which a call refuses its arguments."""
    with pytest.raises(ValueError, match=r"\A[^\n]+\Z") as error:
        call(*args, **kwargs)
    return str(error.value)
