"""Times of a rank's experts in kernels of servers that dispatch, from uniform rows of all EP sizes (``expert_rows``).

A rank with m_l rows on its experts, behind a batch of T tokens of all ranks, takes

    t = x(T) g(m, T'),   g(m, T) = max(least, c + b T + sum over m_l > 0 of h(m_l))

h is what an expert with so many rows takes: its weights are read however few these are. Kernels that pad an expert's
rows to whole blocks take h of the padded rows. c is of a pass, b of each token that the kernels are handed, and
``least`` of launches where no CUDA graph replays them. c, b and h are fitted to the rows of all EP sizes (``fit``:
least squares in relative error, h never falls), since a row of few experts says what one expert with many rows takes,
and a row of many what their weights take. x is measured over g at the EP size's own rows, between which it is
interpolated over the logarithm of tokens, or of activated experts where these are fewer than L: at a row's loads t is
what was measured.

T' are the tokens that reach the rank. A row's kernels were handed those of all ranks; a server's dispatch brings those
with an expert here, as many as uniform routing gives a rank of as many pairs: pairs x R p(R) / K (``exchanges``).

Shapes: N = rows, L = experts of a rank, R = ranks, E = experts, K = experts per token.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike, NDArray

from moe_ep_bench.cost_model.curve import Curve
from moe_ep_bench.cost_model.exchanges import reached
from moe_ep_bench.cost_model.expert_table import ExpertTable, by_ep_size
from moe_ep_bench.presets import Strict

if TYPE_CHECKING:  # It imports slowly.
    import pandas as pd

# Rows that take up to so many times the least time are of launches, which say nothing of the work.
_LAUNCHES = 1.1
_LEAST_US = 1e-3


class Kernels(Strict):
    """g of the module, of one framework's kernels and one shape."""

    block: int
    """Rows that an expert's are padded to a multiple of; 1 = none."""
    fixed_us: float
    token_us: float
    expert: Curve
    """h, over (padded) rows of an expert."""
    least_us: float

    def time_us(self, rows_L: ArrayLike, num_tokens: ArrayLike) -> NDArray[np.float64]:
        """g; no rows take no time.

        Args:
            rows_L: of each expert or slot of the rank: [..., L], of several ranks at once.
            num_tokens: that the kernels are handed: [...].
        """
        rows_L = np.asarray(rows_L, dtype=np.float64)
        is_active_L = rows_L > 0
        experts_us = np.where(is_active_L, self.expert.at(np.ceil(rows_L / self.block) * self.block), 0.0)
        time_us = self.fixed_us + self.token_us * np.asarray(num_tokens) + experts_us.sum(axis=-1)
        return np.where(is_active_L.any(axis=-1), np.maximum(self.least_us, time_us), 0.0)[()]


class KernelTable(ExpertTable):
    """Measured times of one shape, dtype and EP size under uniform loads, and the kernels of all EP sizes."""

    kernels: Kernels

    def loads(self, num_tokens: int) -> NDArray[np.int64]:
        return uniform_loads(num_tokens, self.num_experts, self.top_k, self.ep_size)

    def time_us(
        self, rows_L: ArrayLike, num_tokens: int | None = None, handed_tokens: float | None = None
    ) -> NDArray[np.float64]:
        """Microseconds of one pass through a rank's experts; no rows take no time.

        Args:
            rows_L: of each expert or slot of the rank: [..., L], of several ranks at once.
            num_tokens: of all ranks; None = as many as give the rank its rows where loads are uniform.
            handed_tokens: to the kernels; None = those that reach the rank. Rows had ``num_tokens``.
        """
        rows_L = np.asarray(rows_L, dtype=np.float64)
        tokens = num_tokens or self._tokens(rows_L)
        handed = handed_tokens
        if handed is None:
            each = self.ep_size * reached(self.num_experts, self.top_k, self.ep_size) / self.top_k
            handed = np.minimum(rows_L.sum(axis=-1) * each, tokens)
        by_tokens, by_active = self._over_law
        over_law = by_tokens.at(tokens, growth=0.0)
        if by_active is not None:
            active = (rows_L > 0).sum(axis=-1)
            over_law = np.where(active < self.num_local, by_active.at(active, growth=0.0), over_law)
        return (over_law * self.kernels.time_us(rows_L, handed))[()]

    @cached_property
    def _over_law(self) -> tuple[Curve, Curve | None]:
        """x over tokens of all ranks, where all experts are activated, and over activated ones where fewer are."""
        tokens_N, times_us_N = np.asarray(self.curve.root).T
        loads = [self.loads(int(tokens)) for tokens in tokens_N]
        x_N = times_us_N / [self.kernels.time_us(*one) for one in zip(loads, tokens_N, strict=True)]
        active_N = np.array([(load_L > 0).sum() for load_L in loads])
        full_N = active_N == self.num_local
        upto = active_N.argmax() + 1  # The first row that activates all, or most.
        by_active = Curve.of(active_N[:upto], x_N[:upto]) if upto > 1 else None
        return Curve.of(tokens_N[full_N], x_N[full_N]), by_active


def uniform_loads(num_tokens: int, num_experts: int, top_k: int, ep_size: int) -> NDArray[np.int64]:
    """Rows of each of a rank's experts under uniform routing, int64 [L]: T K // E, or one each for T K / R experts."""
    each, num_local = num_tokens * top_k // num_experts, num_experts // ep_size
    if each:
        return np.full(num_local, each)
    return (np.arange(num_local) < num_tokens // ep_size * top_k).astype(np.int64)


def kernel_tables(rows: pd.DataFrame, block: int) -> dict[int, KernelTable]:
    """One shape's uniform rows of one dtype as a table for each EP size."""
    return by_ep_size(KernelTable, rows, kernels=fit(rows.sort_values("num_tokens"), block))


def fit(rows: pd.DataFrame, block: int) -> Kernels:
    """g of one shape's uniform rows; ``rows`` as of ``expert_rows.read_moe``."""
    from scipy.optimize import nnls  # It imports slowly.

    padded = block > 1  # Their rows replay no graph, and their kernels go through all tokens that they are handed.
    least_us = float(rows["us"].min()) if padded else 0.0
    seen = rows[rows["us"] > _LAUNCHES * least_us]
    sizes = seen[["num_tokens", "num_experts", "top_k", "ep_size"]].to_numpy()
    loads = [uniform_loads(*of_row) for of_row in sizes.tolist()]
    most_N = np.array([-(-load_L.max() // block) * block for load_L in loads])
    active_N = np.array([(load_L > 0).sum() for load_L in loads])
    knots = np.unique(most_N)
    tokens_N = seen["num_tokens"].to_numpy(float) if padded else np.zeros(len(seen))
    # What each knot adds to the one below it, for every activated expert.
    columns = np.column_stack([np.ones(len(seen)), tokens_N, active_N[:, None] * (most_N[:, None] >= knots)])
    found = nnls(columns / seen["us"].to_numpy()[:, None], np.ones(len(seen)))[0]
    expert = Curve.of(knots, np.maximum(found[2:].cumsum(), _LEAST_US))
    return Kernels(block=block, fixed_us=found[0], token_us=found[1], expert=expert, least_us=least_us)
