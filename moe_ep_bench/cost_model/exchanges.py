"""Dispatch and combine of a layer as others measured them: DeepEP's and other exchanges' rows, scaled by copies.

A row is of uniform routing: each of a rank's T tokens takes K of E experts at random. It says how long all ranks took.
What an exchange carries are *copies* of tokens, and exchanges differ in what a token has a copy for:

``rank``  each rank with one of its experts: DeepEP's normal (high throughput) kernels inside a node
``node``  each *other* node with one of its experts: the same between nodes, where the network binds
``pair``  each of its experts: DeepEP's low-latency kernels

A case's time is the row at as many tokens T' as give uniform routing the copies of the case's fullest rank, sent or
received, whichever are more:

    T' = max over ranks of max(sent, received) / c

Tokens of other sizes than the row's count by their bytes: dispatch at T' x b / b of the row, combine likewise.

c is what uniform routing has for each token of a rank. A token reaches a given one of R ranks with the probability
p(R) = 1 - C(E - E / R, K) / C(E, K): c = R p(R) by ranks, (N - 1) p(N) by nodes and K by pairs. A node's ranks share
the copies that it receives. Between rows time is interpolated over logarithms of tokens and time; beyond the last it
grows as between the last two. So a row is measured elsewhere, and what becomes of it under a skew is modelled.

Shapes: R = ranks, N = nodes, K = top_k, E = experts.
"""

from __future__ import annotations

from math import comb
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray
from pydantic import Field, NonNegativeInt, PositiveFloat, model_validator

from moe_ep_bench.cost_model.curve import Curve
from moe_ep_bench.errors import UserError
from moe_ep_bench.facts import ExchangeFacts, MeasuredBy
from moe_ep_bench.presets import MOST, Strict

Copies = Literal["rank", "node", "pair"]
# Binomial coefficients of more experts would take minutes.
_MOST_EXPERTS = 2**16


class Exchange(Strict):
    """Measured times of dispatch and combine over tokens of each rank under uniform routing (see the module)."""

    name: str
    """As users name it (``tables``)."""
    measured_by: MeasuredBy
    """What was measured and by whom."""
    copies: Copies
    """What a token has a copy for."""
    num_ranks: int = Field(ge=1, le=MOST)
    num_nodes: int = Field(ge=1, le=MOST)
    num_experts: int = Field(ge=1, le=_MOST_EXPERTS)
    top_k: int = Field(ge=1, le=_MOST_EXPERTS)
    """Those of the rows, from which the copies of uniform routing follow."""
    hidden_size: int = Field(ge=1, le=MOST)
    sent_as: str | None = None
    """What a token of the rows is dispatched as; None = as the framework has it."""
    dispatch: Curve
    combine: Curve
    dispatch_sms: tuple[NonNegativeInt, ...] = ()
    """Streaming multiprocessors of each point's row, ascending in tokens; () = not stated."""
    combine_sms: tuple[NonNegativeInt, ...] = ()
    dispatch_scale: PositiveFloat = 1.0
    """Bytes of a token that is sent over those of the row's."""
    combine_scale: PositiveFloat = 1.0
    """Likewise of what comes back."""

    @model_validator(mode="after")
    def _check(self) -> Exchange:
        if self.num_ranks % self.num_nodes:
            raise UserError(f"expected a multiple of the {self.num_nodes} nodes, got {self.num_ranks}", "num_ranks")
        if self.copies == "node" and self.num_nodes == 1:
            raise UserError("expected rank or pair on one node, got node", "copies")
        if self.num_experts < self.num_ranks:
            raise UserError(f"expected at least the {self.num_ranks} ranks, got {self.num_experts}", "num_experts")
        if self.top_k > self.num_experts:
            raise UserError(f"expected at most the {self.num_experts} experts, got {self.top_k}", "top_k")
        for phase in ("dispatch", "combine"):
            sms, points = getattr(self, f"{phase}_sms"), getattr(self, phase).root
            if len(sms) not in (0, len(points)):
                raise UserError(f"expected one for each of {len(points)} points, got {len(sms)}", f"{phase}_sms")
        return self

    @property
    def facts(self) -> ExchangeFacts:
        """What ``run.json`` says of the rows, without their times."""
        sms = sorted({*self.dispatch_sms, *self.combine_sms})
        own = self.model_dump(include=set(ExchangeFacts.model_fields) - {"sms"})
        return ExchangeFacts(**own, sms=sms[:1] + sms[-1:] if len(sms) > 1 else sms)

    @property
    def copies_per_token(self) -> float:
        """c: copies that a rank sends, and that it receives, for each token of a rank under uniform routing."""
        if self.copies == "pair":
            return float(self.top_k)
        if self.copies == "node":
            return (self.num_nodes - 1) * reached(self.num_experts, self.top_k, self.num_nodes)
        return self.num_ranks * reached(self.num_experts, self.top_k, self.num_ranks)

    def tokens(self, copies_RX: ArrayLike) -> float:
        """T': tokens of each rank that give uniform routing the copies of the fullest rank.

        Args:
            copies_RX: from each rank to each rank [R, R], or to each node [R, N]; pairs as copies by ranks.
        """
        copies_RX = np.array(copies_RX, dtype=np.float64)
        of_node = 1
        if self.copies == "node":
            of_node = self.num_ranks // self.num_nodes
            copies_RX[np.arange(len(copies_RX)), np.arange(len(copies_RX)) // of_node] = (
                0  # They do not leave the node.
            )
        return max(copies_RX.sum(axis=1).max(), copies_RX.sum(axis=0).max() / of_node) / self.copies_per_token

    def times_us(self, copies_RX: ArrayLike) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Microseconds of dispatch and combine, of each rank: float64 [R] each. All wait for the fullest."""
        num_tokens, num_ranks = self.tokens(copies_RX), len(np.asarray(copies_RX))
        if not num_tokens:
            return np.zeros(num_ranks), np.zeros(num_ranks)
        curves = (self.dispatch, num_tokens * self.dispatch_scale), (self.combine, num_tokens * self.combine_scale)
        dispatch_us, combine_us = (np.full(num_ranks, float(curve.at(size))) for curve, size in curves)
        return dispatch_us, combine_us

    def held_sms(self, copies_RX: ArrayLike) -> tuple[int | None, int | None]:
        """Streaming multiprocessors that dispatch and combine hold: the nearest row's; None = the rows do not say."""
        size = max(self.tokens(copies_RX), 1.0)
        rows = (
            (self.dispatch, self.dispatch_sms, self.dispatch_scale),
            (self.combine, self.combine_sms, self.combine_scale),
        )
        dispatch, combine = (
            sms[int(np.abs(np.log(np.array(curve.root)[:, 0] / (size * scale))).argmin())] if sms else None
            for curve, sms, scale in rows
        )
        return dispatch, combine


def reached(num_experts: int, top_k: int, num_parts: int) -> float:
    """The probability that some of K experts drawn of E are in a given one of so many equal parts."""
    return 1 - comb(num_experts - num_experts // num_parts, top_k) / comb(num_experts, top_k)
