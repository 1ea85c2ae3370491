"""What a policy's field may hold: each check raises ValueError that names field, value and what is allowed."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import get_args

from moe_ep_bench.errors import UserError, brief


def require_choice(name: str, value: object, choices: object) -> None:
    """``value`` is one of a Literal's values."""
    allowed = get_args(choices)
    if value not in allowed:
        raise UserError(f"{name}: expected one of {', '.join(allowed)}; got {brief(value)}")


def require_flag(name: str, value: object) -> None:
    """``value`` is True or False."""
    if not isinstance(value, bool):
        raise UserError(f"{name}: expected true or false, got {brief(value)}")


def require_count(name: str, value: object, minimum: int) -> None:
    """``value`` is a whole number of at least ``minimum``."""
    if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
        raise UserError(f"{name}: expected a whole number >= {minimum}, got {brief(value)}")


def real(name: str, value: object, *, maximum: float = math.inf, zero: bool = True) -> float:
    """Return ``value`` as a float, from 0 (``zero``) or from above 0 to ``maximum``.

    One spelling per value: 1 and 1.0 are the same policy and must hash to the same case.
    """
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not (is_number and math.isfinite(value) and (value > 0 or (zero and value == 0)) and value <= maximum):
        least = ">= 0" if zero else "> 0"
        allowed = f"a finite number {least}" if maximum == math.inf else f"a number {least} and <= {maximum:g}"
        raise UserError(f"{name}: expected {allowed}, got {brief(value)}")
    return float(value) + 0.0  # -0.0 is 0.0


def decimal(value: float) -> Fraction:
    """The decimal that the user wrote, exactly: 0.7 is 7/10, where the double is a little less."""
    return Fraction(repr(value))
