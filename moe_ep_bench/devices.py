"""Devices by name: how long a layer's steps take on a device that is not here, for what-if answers.

A file of configs/devices/ states a roofline (Williams, Waterman, Patterson, Commun. ACM 52(4), 2009): the arithmetic
and the memory bandwidth of the data sheet, each with the share of it that expert GEMMs reach. Arithmetic is reached
the better the more rows a GEMM has (tokens of an expert): a table by rows. Routing is stated as time per score, because
no roofline holds for a top-k or a sort; permutation as a share of the memory bandwidth. Every figure beyond the data
sheet says whether it was measured or is assumed. A device that is here is measured instead; nothing of this stands in
for that.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import numpy as np
from numpy.typing import ArrayLike
from pydantic import BaseModel, ConfigDict, Field, model_validator

from moe_ep_bench.links import Basis, load_described

DEVICES_DIR = Path(__file__).resolve().parents[1] / "configs" / "devices"

_Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
_Share = Annotated[float, Field(gt=0, le=1)]


class Device(BaseModel):
    """A roofline, and what of it is reached."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = Field(min_length=1)
    source: str = Field(min_length=1)
    bf16_tflops: _Positive
    """Dense tensor-core arithmetic of the data sheet, 1e12 operations per second."""
    memory_tbps: _Positive
    """Memory bandwidth of the data sheet, 1e12 bytes per second."""
    memory_gb: _Positive
    """Size of the memory, 1e9 bytes."""
    arithmetic_efficiency: tuple[tuple[_Positive, _Share], ...] = Field(min_length=1)
    """(rows, share of the arithmetic) with rising rows."""
    arithmetic_basis: Basis
    memory_efficiency: _Share
    """Share of the memory bandwidth."""
    memory_basis: Basis
    overhead_us: float = Field(ge=0, allow_inf_nan=False)
    """Of one pass through the experts, whatever its size: launches and what does not overlap."""
    overhead_basis: Basis
    routing_native_ps: _Positive
    """Picoseconds per score (token and expert) of the model's own top-k routing."""
    routing_native_basis: Basis
    routing_policy_ps: _Positive
    """Picoseconds per score of Token Drop in plain torch; Expanded Drop and all other policies are taken as it."""
    routing_policy_basis: Basis
    permute_efficiency: _Share
    """Share of the data sheet's memory bandwidth that permuting rows reaches."""
    permute_basis: Basis

    @model_validator(mode="after")
    def _check(self) -> Device:
        rows = [rows for rows, _ in self.arithmetic_efficiency]
        if rows != sorted(set(rows)):
            raise ValueError(f"arithmetic_efficiency: expected rising rows, got {rows}")
        return self

    def efficiency(self, rows: ArrayLike) -> np.ndarray:
        """Share of the arithmetic that GEMMs of ``rows`` rows reach.

        On straight lines between the table's points over logarithms of rows and share; the nearest point's beyond
        them.
        """
        table_rows, table_share = np.asarray(self.arithmetic_efficiency).T
        rows = np.maximum(np.asarray(rows, dtype=np.float64), np.finfo(np.float64).tiny)
        return np.exp(np.interp(np.log(rows), np.log(table_rows), np.log(table_share)))

    def time_us(self, flops: ArrayLike, num_bytes: ArrayLike, rows: ArrayLike) -> float:
        """Microseconds of one pass through experts that run one after another.

        overhead + ``work_us``. No work takes no time.

        Args:
            flops: operations of each expert (or of one): 6 x rows x hidden x FFN size for a gated FFN.
            num_bytes: what each must move through memory: its weights, its rows in and out.
            rows: tokens of each.

        Raises:
            ValueError: negative or infinite numbers, or shapes that do not fit each other.
        """
        work_us = self.work_us(flops, num_bytes, rows)
        return self.overhead_us + work_us if work_us > 0 else 0.0

    def work_us(self, flops: ArrayLike, num_bytes: ArrayLike, rows: ArrayLike) -> float:
        """Microseconds of pieces of work that run one after another, with nothing for launching them.

        Sum over pieces of max(flops / (arithmetic x efficiency(rows)), bytes / (bandwidth x efficiency)).

        Raises:
            ValueError: as ``time_us``.
        """
        parts = [np.asarray(part, dtype=np.float64) for part in (flops, num_bytes, rows)]
        if not all(np.all(np.isfinite(part) & (part >= 0)) for part in parts):
            raise ValueError("flops, bytes, rows: expected finite numbers of at least 0, got others")
        try:
            flops, num_bytes, rows = np.broadcast_arrays(*parts)
        except ValueError:
            shapes = ", ".join(str(part.shape) for part in parts)
            raise ValueError(f"flops, bytes, rows: expected one of each per expert, got shapes {shapes}") from None
        arithmetic_us = flops / (self.bf16_tflops * self.efficiency(rows) * 1e6)
        memory_us = num_bytes / (self.memory_tbps * self.memory_efficiency * 1e6)
        return float(np.maximum(arithmetic_us, memory_us).sum())

    def routing_us(self, num_scores: int, *, by_policy: bool) -> float:
        """Microseconds of routing ``num_scores`` = tokens x experts scores, by the model's own top-k or by a policy.

        Raises:
            ValueError: a negative number.
        """
        if num_scores < 0:
            raise ValueError(f"scores: expected at least 0, got {num_scores}")
        return num_scores * (self.routing_policy_ps if by_policy else self.routing_native_ps) / 1e6

    def permute_us(self, num_bytes: float) -> float:
        """Microseconds of permuting rows that are ``num_bytes`` read and written: bytes / (bandwidth x share).

        Raises:
            ValueError: a negative or infinite number.
        """
        if not (np.isfinite(num_bytes) and num_bytes >= 0):
            raise ValueError(f"bytes: expected a finite number of at least 0, got {num_bytes}")
        return num_bytes / (self.memory_tbps * self.permute_efficiency * 1e6)

    def describe(self) -> str:
        """Which model made a number: to stand beside it."""
        most = max(share for _, share in self.arithmetic_efficiency)
        return (
            f"modelled by devices/{self.name}: roofline of {self.bf16_tflops:g} bf16 TFLOP/s,"
            f" up to {most:.0%} reached ({self.arithmetic_basis}), and {self.memory_tbps:g} TB/s,"
            f" {self.memory_efficiency:.0%} reached ({self.memory_basis}); {self.overhead_us:g} us a pass"
            f" ({self.overhead_basis}); routing {self.routing_native_ps:g} ps a score ({self.routing_native_basis}),"
            f" by a policy {self.routing_policy_ps:g} ps ({self.routing_policy_basis}); permutation at"
            f" {self.permute_efficiency:.0%} of the memory's TB/s ({self.permute_basis}); {self.memory_gb:g} GB"
        )


def device_names() -> list[str]:
    return sorted(path.stem for path in DEVICES_DIR.glob("*.yaml"))


def load_device(name_or_path: str) -> Device:
    """Load a device of configs/devices/ by name, or a file of the same form by its path, which ends in .yaml.

    Raises:
        ValueError: one line: there is no such device (it lists those there are), or what is wrong with the file.
    """
    return load_described(Device, DEVICES_DIR, name_or_path)
