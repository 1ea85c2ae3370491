"""Times of a rank's experts from rows that were measured under equal loads (``tables``), in place of a roofline.

Let u(T) be the measured time with T tokens of all ranks, and b T what a kernel does for tokens of all ranks, whoever's
experts they choose: routing, sorting and summing. Experts are the rest, f = u - b T. A rank with m_l rows on its
experts takes

    t = b T + f(T) S(m) / S(balanced loads of T tokens),   S(m) = f[A] + sum over m_l > 0 of (f[L m_l] - f[L]) / L

f[P] is f by the rank's pairs P, A its activated experts, L its experts: an expert with m rows costs what one of L
equally loaded experts does, and with a row each A experts cost what was measured with A pairs. So t is what was
measured wherever the loads are the row's, and f is interpolated over the logarithms of tokens (or pairs) and time
between rows. Beyond the last row time grows as between the last two. b comes from the growth of u at many tokens over
EP sizes, which has a part in proportion to a rank's pairs and one that stays.

Shapes: N = measured points, L = experts (or slots) of a rank, R = ranks, E = experts, k = experts per token.
"""

from __future__ import annotations

from functools import cache, cached_property
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from moe_ep_bench.cost_model.curve import Curve
from moe_ep_bench.facts import ExpertFacts, MeasuredBy
from moe_ep_bench.presets import Strict

if TYPE_CHECKING:  # It imports slowly.
    import pandas as pd

SHAPE = ["hidden_size", "ffn_hidden_size", "num_experts", "top_k"]
# Growth with all ranks' tokens is looked for above so many, over at least so many EP sizes; experts keep some of a row.
_MANY_TOKENS, _FEWEST_SIZES, _LEAST_REST = 4096, 3, 0.05


class ExpertTable(Strict):
    """Measured times of one shape, dtype and EP size under equal loads (see the module)."""

    hidden_size: int
    ffn_hidden_size: int
    num_experts: int
    top_k: int
    ep_size: int
    curve: Curve
    """Over tokens of all ranks."""
    token_us: float = 0.0
    """b: microseconds for each token of all ranks."""
    expert_us: float = 0.0
    """To read the weights of an expert beyond those measured, as replicas are."""
    num_slots: int | None = None
    """Of all ranks; None = one an expert."""
    row_loads: tuple[tuple[int, ...], ...] = ()
    """Pairs of each of the rank's slots in each of the curve's rows, where these are not balanced."""
    name: str = ""
    """As users name it (``tables``)."""
    measured_by: MeasuredBy = ""
    """What was measured and by whom."""
    dtype: str = ""
    """Of weights and activations, as the rows have it."""

    @property
    def num_local(self) -> int:
        return (self.num_slots or self.num_experts) // self.ep_size

    @property
    def facts(self) -> ExpertFacts:
        """What ``run.json`` says of the rows, without their times."""
        own = self.model_dump(include={"name", "measured_by", "dtype", "ep_size", *SHAPE})
        (first, _), (last, _) = self.curve.root[0], self.curve.root[-1]
        return ExpertFacts(**own, num_rows=len(self.curve.root), fewest_tokens=first, most_tokens=last)

    def loads(self, num_tokens: int) -> NDArray[np.int64]:
        """Of the rank's experts in the row of so many tokens, or the nearest one's in proportion, int64 [L]."""
        if self.row_loads:
            tokens_N = np.array([size for size, _ in self.curve.root])
            nearest = np.abs(np.log(tokens_N / num_tokens)).argmin()
            return np.rint(np.array(self.row_loads[nearest]) * num_tokens / tokens_N[nearest]).astype(np.int64)
        return balanced_loads(num_tokens, self.num_experts, self.top_k, self.num_local)

    def time_us(self, rows_L: ArrayLike, num_tokens: int | None = None) -> NDArray[np.float64]:
        """Microseconds of one pass through a rank's experts; no rows take no time.

        Args:
            rows_L: of each expert or slot of the rank: [..., L], of several ranks at once.
            num_tokens: of all ranks; None = as many as give the rank its rows where loads are balanced.
        """
        rows_L = np.asarray(rows_L, dtype=np.float64)
        tokens = self._tokens(rows_L) if num_tokens is None else np.asarray(num_tokens)
        measured_us = self.curve.at(tokens)
        rest_us = self._rest_us(tokens, measured_us)
        balanced_us = np.reshape([self._balanced_us(int(number)) for number in tokens.flat], tokens.shape)
        time_us = measured_us - rest_us + rest_us * self._work_us(rows_L) / balanced_us
        return np.where((rows_L > 0).any(axis=-1), time_us, 0.0)[()]

    def _tokens(self, rows_L: NDArray[np.float64]) -> NDArray[np.float64]:
        """Tokens of all ranks that give a rank as many rows where loads are balanced: [..., L] -> [...]."""
        return np.maximum(1, np.rint(rows_L.sum(axis=-1) * self.ep_size / self.top_k))

    def _balanced_us(self, num_tokens: int) -> float:
        """S of balanced loads."""
        balanced_L = self.loads(num_tokens).astype(np.float64)
        return float(self._work_us(balanced_L if balanced_L.any() else np.ones(1)))

    def _rest_us(self, num_tokens: ArrayLike, time_us: NDArray[np.float64]) -> NDArray[np.float64]:
        """f of measured times."""
        return np.maximum(time_us - self.token_us * np.asarray(num_tokens), _LEAST_REST * time_us)

    @cached_property
    def _by_pairs(self) -> Curve:
        """f by the rank's pairs; rows with as many pairs are averaged."""
        tokens_N, times_us_N = np.asarray(self.curve.root).T
        pairs, of_N = np.unique([self.loads(int(number)).sum() for number in tokens_N], return_inverse=True)
        means = np.bincount(of_N, self._rest_us(tokens_N, times_us_N)) / np.bincount(of_N)
        return Curve.of(pairs[pairs > 0], means[pairs > 0])

    def _work_us(self, rows_L: NDArray[np.float64]) -> NDArray[np.float64]:
        """S, [..., L] -> [...]."""
        curve, local, active = self._by_pairs, self.num_local, (rows_L > 0).sum(axis=-1)
        one_each_us = curve.at(np.minimum(active, local)) + np.maximum(active - local, 0) * self.expert_us
        grown_us = np.where(rows_L > 0, curve.at(local * rows_L) - curve.at(local), 0.0) / local
        return np.maximum(one_each_us + grown_us.sum(axis=-1), _LEAST_REST * one_each_us)


_Table = TypeVar("_Table", bound=ExpertTable)


@cache
def balanced_loads(num_tokens: int, num_experts: int, top_k: int, num_local: int) -> NDArray[np.int64]:
    """Pairs of each of rank 0's experts under ``balanced`` scores, int64 [num_local].

    With fewer tokens than ceil(E / k) they are spread over that range.
    """
    stride = -(-num_experts // top_k)
    tokens = np.arange(num_tokens)
    if num_tokens < stride:
        tokens = tokens * stride / num_tokens
    loads = np.zeros(num_experts, dtype=np.int64)
    for number in range(top_k):
        experts = ((tokens + number * stride) % num_experts).astype(np.int64)
        loads += np.bincount(experts, minlength=num_experts)
    return loads[:num_local]


def tables_of_shape(rows: pd.DataFrame) -> dict[int, ExpertTable]:
    """One shape's balanced rows of one dtype as a table for each EP size."""
    return by_ep_size(ExpertTable, rows, token_us=_token_us(rows.sort_values("num_tokens")))


def by_ep_size(kind: type[_Table], rows: pd.DataFrame, **own: Any) -> dict[int, _Table]:
    """One shape's rows of one dtype as a table of this kind for each EP size, ascending; ``own``: fields of all."""
    shape = {name: int(rows[name].iloc[0]) for name in SHAPE}
    parts = [points for _, points in rows.sort_values("num_tokens").groupby("ep_size")]
    curves = {int(points["ep_size"].iloc[0]): Curve.of(points["num_tokens"], points["us"]) for points in parts}
    return {ep_size: kind(**shape, ep_size=ep_size, curve=curve, **own) for ep_size, curve in curves.items()}


def _token_us(rows: pd.DataFrame) -> float:
    """b: growth of time at many tokens, as a part in proportion to a rank's pairs and a constant one.

    Least squares in relative error over EP sizes; 0 where there are few of them. Some of every row is left to experts.
    """
    many = rows[rows["num_tokens"] >= _MANY_TOKENS].groupby("ep_size")[["num_tokens", "us"]]
    grown = many.last() - many.first()
    grown = grown[(grown["num_tokens"] > 0) & (grown["us"] > 0)]
    if len(grown) < _FEWEST_SIZES:
        return 0.0
    growth_R = (grown["us"] / grown["num_tokens"]).to_numpy()
    pairs_R = rows["top_k"].iloc[0] / grown.index.to_numpy()
    columns = np.stack([pairs_R / growth_R, 1 / growth_R], axis=1)  # Residuals are relative.
    _, token_us = np.linalg.lstsq(columns, np.ones(len(grown)))[0]
    return float(min(max(token_us, 0.0), (1 - 2 * _LEAST_REST) * growth_R.min()))
