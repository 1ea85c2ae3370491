"""Which ranks hold which experts.

A layer is as late as its fullest *rank*, and which experts share a rank decides how full that gets. A
placement is a matrix [R, E] of shares: what part of an expert's load each rank serves. Every column sums
to 1. Where experts have one home each it is a matrix of zeros and ones; an expert that is *replicated* has
several shares, which divide its load.

- ``contiguous``: expert e lives on rank e // (E / R), as Megatron-Core and the policies have it.
- ``strided``: expert e lives on rank e % R, as if experts had been dealt like cards.
- a matrix of one's own: non-negative numbers whose columns are scaled to 1, so that ones in two rows mean half each.

A placement says what ranks would have to bear. Policies that look at ranks (expanded_drop with scope local,
device granularity, xshare with scope rank, oea with rank_fill) route as if experts lay contiguously.

Shapes: R = ranks, E = experts; loads may have any leading dimensions.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike, NDArray

PLACEMENTS = ("contiguous", "strided")


@dataclass(frozen=True, eq=False)
class Placement:
    """Shares of every expert's load by rank.

    Attributes:
        name: ``contiguous``, ``strided`` or ``matrix``.
        share_RE: float64 [R, E], non-negative; columns sum to 1.
    """

    name: str
    share_RE: NDArray[np.float64]

    @property
    def num_replicas(self) -> int:
        """Copies of experts beyond one of each."""
        return int((self.share_RE > 0).sum()) - self.share_RE.shape[1]

    def rank_load(self, load_E: ArrayLike) -> NDArray[np.float64]:
        """Pairs of every rank: [..., E] -> float64 [..., R]. Replicas divide an expert's pairs by their shares."""
        return np.asarray(load_E, dtype=np.float64) @ self.share_RE.T

    def activated_experts(self, load_E: ArrayLike) -> NDArray[np.int64]:
        """Experts with at least one pair on every rank: [..., E] -> int64 [..., R].

        Every rank with a share in an activated expert is taken to read its weights.
        """
        return (np.asarray(load_E) > 0).astype(np.int64) @ (self.share_RE > 0).astype(np.int64).T


def make_placement(spec: str | Path | Sequence[Sequence[float]], num_experts: int, num_ranks: int) -> Placement:
    """Place ``num_experts`` experts on ``num_ranks`` ranks.

    Args:
        spec: ``contiguous``, ``strided``, a matrix [R][E], or the path of a JSON file that holds one.

    Raises:
        ValueError: the experts do not divide among the ranks, or a matrix that is none of this shape; the message
            says what was expected.
    """
    if isinstance(spec, str) and spec in PLACEMENTS:
        if num_ranks < 1 or num_experts % num_ranks:
            raise ValueError(f"{spec}: expected ranks that divide the {num_experts} experts, got {num_ranks}")
        expert_E = np.arange(num_experts)
        rank_E = expert_E // (num_experts // num_ranks) if spec == "contiguous" else expert_E % num_ranks
        return Placement(spec, (rank_E == np.arange(num_ranks)[:, None]).astype(np.float64))
    if isinstance(spec, str | Path):
        return _from_matrix(_read(Path(spec)), num_experts, num_ranks, f"{spec}: ")
    return _from_matrix(spec, num_experts, num_ranks, "")


def _read(path: Path) -> object:
    try:
        return json.loads(path.read_text())
    except OSError as error:
        raise ValueError(
            f"expected {', '.join(PLACEMENTS)} or a JSON file with a matrix; {path}: {error.strerror}"
        ) from None
    except ValueError as error:
        raise ValueError(f"{path}: not valid JSON: {error}") from None


def _from_matrix(matrix: object, num_experts: int, num_ranks: int, where: str) -> Placement:
    expected = f"{where}expected a matrix of {num_ranks} rows (ranks) and {num_experts} columns (experts)"
    try:
        share_RE = np.array(matrix, dtype=np.float64)
    except (TypeError, ValueError):
        raise ValueError(f"{expected} of numbers, got rows of different lengths or other things") from None
    if share_RE.shape != (num_ranks, num_experts):
        raise ValueError(f"{expected}, got shape {list(share_RE.shape)}")
    if not (np.isfinite(share_RE) & (share_RE >= 0)).all():
        raise ValueError(f"{expected} of finite, non-negative numbers, got some that are not")
    homeless_E = np.flatnonzero(share_RE.sum(axis=0) == 0)
    if homeless_E.size:
        raise ValueError(f"{expected} in which every expert has a rank, got none for expert {homeless_E[0]}")
    return Placement("matrix", share_RE / share_RE.sum(axis=0))
