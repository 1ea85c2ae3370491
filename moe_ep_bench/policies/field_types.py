"""Types of policies' fields: what a value may be is stated here once, and checked by pydantic.

A field is as strict as YAML is: true is no number, and a number with a point no count. Numbers become floats, so that
1 and 1.0 are the same policy and hash to the same case.
"""

from __future__ import annotations

from fractions import Fraction
from typing import Annotated, TypeVar, dataclass_transform

from pydantic import AfterValidator, Field
from pydantic.dataclasses import dataclass as pydantic_dataclass

_Kind = TypeVar("_Kind", bound=type)

# -0.0 is 0.0.
_UNSIGNED = AfterValidator(lambda value: value + 0.0)

Count = Annotated[int, Field(strict=True, ge=0)]
Positive = Annotated[int, Field(strict=True, ge=1)]
Flag = Annotated[bool, Field(strict=True)]
Factor = Annotated[float, Field(strict=True, ge=0, allow_inf_nan=False), _UNSIGNED]
Share = Annotated[float, Field(strict=True, ge=0, le=1), _UNSIGNED]
ShareAboveZero = Annotated[float, Field(strict=True, gt=0, le=1)]


@dataclass_transform(kw_only_default=True, frozen_default=True)
def policy(kind: _Kind) -> _Kind:
    """Make a frozen dataclass of keywords, whose values are checked against the types of their fields."""
    return pydantic_dataclass(frozen=True, kw_only=True)(kind)


def decimal(value: float) -> Fraction:
    """The decimal that the user wrote, exactly: 0.7 is 7/10, where the double is a little less."""
    return Fraction(repr(value))
