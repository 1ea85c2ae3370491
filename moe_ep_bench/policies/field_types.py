"""Types of policies' fields: what a value may be is stated here once, and checked by pydantic.

A field is as strict as YAML is: true is no number, and a number with a point no count. Numbers become floats, so that
1 and 1.0 are the same policy and hash to the same case.

Any number may differ by layer, as a mapping from bands of layers: ``{"0-5": 1.0, "6-25": 1.5}`` has the values of
MoE layers 0 to 5 and 6 to 25, counted from the first one; ``{"0": 1.0, "1": 1.1, ...}`` has one for each.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping
from fractions import Fraction
from itertools import groupby
from typing import Annotated, Any, TypeVar, dataclass_transform

from pydantic import AfterValidator, Field, ValidatorFunctionWrapHandler, WrapValidator
from pydantic.dataclasses import dataclass as pydantic_dataclass

from moe_ep_bench.errors import UserError

_Kind = TypeVar("_Kind", bound=type)
_MOST_BANDS = 4  # that a label spells out


class ByLayer(tuple[Any, ...]):
    """One number for each MoE layer, from the first."""

    @classmethod
    def of(cls, bands: Mapping[Any, Any]) -> ByLayer:
        """Read a mapping from bands; ValueError: they are no ranges, overlap or leave layers out."""
        matches = {band: re.fullmatch(r"(\d{1,6})(?:-(\d{1,6}))?", str(band)) for band in bands}
        values: list[Any] = []
        for band, match in sorted(matches.items(), key=lambda item: int(item[1][1]) if item[1] else -1):
            first, last = (int(match[1]), int(match[2] or match[1])) if match else (-1, -1)
            if first != len(values) or last < first:
                expected = f"{len(values)} or {len(values)}-LAST for the next band of layers"
                raise UserError(f"expected {expected}, got {band!r}")
            values += [bands[band]] * (last - first + 1)
        if not values:
            raise UserError("expected a number for each band of layers, got {}")
        return cls(values)

    def bands(self) -> dict[str, Any]:
        """The shortest mapping of bands."""
        bands, first = {}, 0
        for value, equal in groupby(self):
            last = first + len(list(equal)) - 1
            bands[f"{first}-{last}" if last > first else str(first)] = value
            first = last + 1
        return bands

    def __str__(self) -> str:
        bands = self.bands()
        if len(bands) <= _MOST_BANDS:
            return "/".join(f"{band}:{value:g}" for band, value in bands.items())
        return f"{min(self):g}..{max(self):g}#{zlib.crc32(repr(tuple(self)).encode()) % 65536:04x}"


def _each(value: Any, check: ValidatorFunctionWrapHandler) -> Any:
    """Check one number, or that of each layer."""
    if isinstance(value, Mapping):
        value = ByLayer.of(value)
    return ByLayer(map(check, value)) if isinstance(value, ByLayer) else check(value)


_UNSIGNED, _EACH = AfterValidator(lambda value: value + 0.0), WrapValidator(_each)  # -0.0 is 0.0

Count = Annotated[int, Field(strict=True, ge=0), _EACH]
Positive = Annotated[int, Field(strict=True, ge=1), _EACH]
Flag = Annotated[bool, Field(strict=True)]
Factor = Annotated[float, Field(strict=True, ge=0, allow_inf_nan=False), _UNSIGNED, _EACH]
Share = Annotated[float, Field(strict=True, ge=0, le=1), _UNSIGNED, _EACH]
ShareAboveZero = Annotated[float, Field(strict=True, gt=0, le=1), _EACH]


@dataclass_transform(kw_only_default=True, frozen_default=True)
def policy(kind: _Kind) -> _Kind:
    """Make a frozen dataclass of keywords, whose values are checked against the types of their fields."""
    return pydantic_dataclass(frozen=True, kw_only=True)(kind)


def decimal(value: float) -> Fraction:
    """The decimal that the user wrote, exactly: 0.7 is 7/10, where the double is a little less."""
    return Fraction(repr(value))
