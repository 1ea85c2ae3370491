"""Model how long a collective takes between ranks that are not there.

A file of data/links/ states two links of each rank: one inside its node, one between nodes. Each has a latency and a
bandwidth per rank and direction. A message of x bytes takes latency + x / bandwidth (Hockney, Parallel Computing 20(3),
1994), or what a curve of measured sizes says, since caches and protocol changes need more than two numbers. Links of
others' tables (``tables``) have curves of other collectives too, in place of algorithms.

The bandwidth is nominal; ``efficiency`` is the share that large messages reach. Left out: congestion between nodes,
latency that grows with the number of peers, and reductions inside the switch.

Shapes: R = ranks, N = measured points.
"""

from __future__ import annotations

import math
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray
from pydantic import Field, PositiveFloat, model_validator

from moe_ep_bench.cost_model.curve import Curve
from moe_ep_bench.cost_model.exchanges import Exchange
from moe_ep_bench.errors import UserError
from moe_ep_bench.facts import Basis, LinkFacts, LinksFacts, MeasuredBy
from moe_ep_bench.presets import Preset, Strict

# By how much more a message takes than a larger one where that is chance.
_NOISE = 0.1


class Link(Strict):
    """One rank's way to others."""

    latency_us: float = Field(ge=0)
    """Of a nearly empty collective, its launch included."""
    latency_basis: Basis
    bandwidth_gbps: PositiveFloat
    """Nominal, per rank and direction, in 1e9 bytes per second."""
    efficiency: float = Field(gt=0, le=1)
    """Share of the bandwidth that large messages reach."""
    efficiency_basis: Basis
    curve: Curve | None = None
    """Measured times over bytes. It replaces latency and bandwidth up to its last point."""
    duplex: Literal["full", "half"] = "full"
    """half: what a rank sends and what it receives share the link, as copies between ranks of a host do."""

    @classmethod
    def measured(cls, sizes_N: ArrayLike, times_us_N: ArrayLike, basis: Basis, byte_us: float | None = None) -> Link:
        """A link by measured points, with rising sizes in bytes.

        A message that took up to ``_NOISE`` longer than a larger one was disturbed: it takes what that did. One that
        took longer still went by another protocol of NCCL's, and keeps its time.

        Args:
            byte_us: what a byte takes beyond the last point; None = as between the last two.

        Raises:
            UserError: times that do not grow with the bytes.
        """
        sizes_N, times_N = np.asarray(sizes_N, dtype=np.float64), np.asarray(times_us_N, dtype=np.float64)
        least_N = np.minimum.accumulate(times_N[::-1])[::-1]
        curve = Curve.of(sizes_N, np.where(least_N < (1 - _NOISE) * times_N, times_N, least_N))
        byte_us = curve.growth if byte_us is None else byte_us
        if byte_us <= 0:
            raise UserError(
                f"expected times that grow with the bytes, got none up to {sizes_N[-1]:,.0f} bytes; measure larger ones"
            )
        return cls(
            latency_us=curve.root[0][1], latency_basis=basis, bandwidth_gbps=1e-3 / byte_us, efficiency=1.0,
            efficiency_basis=basis, curve=curve,
        )  # fmt: skip

    @property
    def reached_gbps(self) -> float:
        return self.bandwidth_gbps * self.efficiency

    def time_us(self, num_bytes: ArrayLike) -> np.ndarray:
        """Microseconds that the link carries ``num_bytes``, elementwise; nothing takes no time.

        latency + bytes / (bandwidth x efficiency). A curve is interpolated linearly over the logarithms of bytes and
        time. Below it the first point's time holds; beyond it bytes take the link's bandwidth.
        """
        sizes, byte_us = np.asarray(num_bytes, dtype=np.float64), 1 / (self.reached_gbps * 1e3)
        times = self.latency_us + sizes * byte_us if self.curve is None else self.curve.at(sizes, byte_us)
        return np.where(sizes > 0, times, 0.0)

    def scaled(self, factor: float) -> Link:
        """The same link with ``factor`` times the bandwidth, and the same latency."""
        curve = self.curve and Curve(tuple((num_bytes * factor, us) for num_bytes, us in self.curve.root))
        return self.model_copy(update={"bandwidth_gbps": self.bandwidth_gbps * factor, "curve": curve})

    @property
    def facts(self) -> LinkFacts:
        """What ``run.json`` says of the link: figures with their evidence, without a curve's points."""
        return LinkFacts(**self.model_dump(exclude={"curve"}), num_sizes=self.curve and len(self.curve.root))


class Links(Preset):
    """The links of a cluster whose ranks fill its nodes in order: rank r is on node r // ranks_per_node."""

    FOLDER = "links"

    name: str = Field(min_length=1)
    source: str = Field(min_length=1)
    ranks_per_node: int = Field(ge=1)
    intra: Link | None
    """Inside a node; null only with one rank per node."""
    inter: Link | None
    """Between nodes; null = there is one node."""
    gather: Link | None = None
    """Of an all-gather, over bytes that a rank gets from others; null = an algorithm over ``intra`` and ``inter``."""
    reduce: Link | None = None
    """Likewise of an all-reduce, over bytes that a rank has to sum."""
    exchange: Exchange | None = None
    """Dispatch and combine as others measured them, in place of all-to-alls over ``intra`` and ``inter``."""
    measured_by: MeasuredBy | None = None
    """What was measured elsewhere and by whom, all of it; null = ``source`` says where each number is from."""

    @model_validator(mode="after")
    def _check(self) -> Links:
        if self.intra is None and self.ranks_per_node > 1:
            raise UserError(f"expected a link with ranks_per_node={self.ranks_per_node}, got null", "intra")
        if self.intra is None and self.inter is None:
            raise UserError("expected a link where intra is null, got null", "inter")
        if (exchange := self.exchange) is not None and exchange.num_nodes > 1:
            of_node = exchange.num_ranks // exchange.num_nodes
            if of_node != self.ranks_per_node:
                raise UserError(f"expected {self.ranks_per_node} ranks on each node, got {of_node}", "exchange")
        return self

    def scaled(self, factor: float) -> Links:
        """The same links with ``factor`` times the bandwidth."""
        if factor == 1:
            return self
        if self.exchange is not None:
            raise UserError(f"expected 1 with an exchange that was measured, got {factor:g}", "bandwidth_scale")
        links = {key: getattr(self, key) for key in ("intra", "inter", "gather", "reduce")}
        faster = {key: link and link.scaled(factor) for key, link in links.items()}
        return self.model_copy(update=faster)

    def facts(self, bandwidth_scale: float = 1.0) -> LinksFacts:
        """What ``run.json`` says of links that were ``scaled``, without the curves that others measured."""
        own = self.model_dump(include={"name", "ranks_per_node", "measured_by"})
        sides = {side: link and link.facts for side, link in (("intra", self.intra), ("inter", self.inter))}
        scaled = {"bandwidth_scale": bandwidth_scale, "is_built_in": self.name in self.names()}
        return LinksFacts(**own, **sides, **scaled)

    def all_to_all_us(self, bytes_RR: ArrayLike) -> np.ndarray:
        """Microseconds that an all-to-all keeps each rank busy, float64 [R].

        Rank r sends s_r bytes to other ranks over a link and receives d_r. The link then takes latency +
        max(s_r, d_r) / bandwidth, with half duplex their mean / bandwidth, or nothing where both are 0. Both links work
        at once, so a rank takes the longer of the two. What a rank keeps does not cross.

        Args:
            bytes_RR: what each rank (row) has for each rank (column).

        Raises:
            ValueError: more ranks than there are links for.
        """
        bytes_RR = np.array(bytes_RR, dtype=np.float64)
        num_ranks = len(bytes_RR)
        self._check_ranks(num_ranks)
        np.fill_diagonal(bytes_RR, 0)
        node_R = np.arange(num_ranks) // self.ranks_per_node
        inside_RR = node_R[:, None] == node_R
        times_us_R = np.zeros(num_ranks)
        for link, crosses_RR in ((self.intra, inside_RR), (self.inter, ~inside_RR)):
            if link is not None:
                carried_RR = np.where(crosses_RR, bytes_RR, 0.0)
                ways_2R = carried_RR.sum(axis=1), carried_RR.sum(axis=0)
                busy_us_R = link.time_us((np.max if link.duplex == "full" else np.mean)(ways_2R, axis=0))
                times_us_R = np.maximum(times_us_R, busy_us_R)
        return times_us_R

    def routed(self, copies_RR: ArrayLike, copies_RN: ArrayLike) -> NDArray[np.int64]:
        """Which rank hands a token's copy to which, where it crosses to a node once: int64 [R, R].

        Ranks of one number in their nodes exchange what goes to a node; the rank that gets a copy hands one to every
        rank of its node that is to have it (DeepEP's normal kernels).

        Args:
            copies_RR, copies_RN: distinct tokens from each rank to each rank, and to each node.
        """
        copies_RR, copies_RN, size = np.asarray(copies_RR), np.asarray(copies_RN), self.ranks_per_node
        rank_R = np.arange(len(copies_RR))
        routed_RR = np.zeros_like(copies_RR)
        for node in range(copies_RN.shape[1]):
            door_R = np.minimum(node * size + rank_R % size, len(rank_R) - 1)
            np.add.at(routed_RR, (rank_R, door_R), np.where(rank_R // size == node, 0, copies_RN[:, node]))
            here_R = rank_R[rank_R // size == node]
            np.add.at(routed_RR, (door_R[:, None], here_R[None, :]), copies_RR[:, here_R])
        return routed_RR

    def all_gather_us(self, num_bytes: float, num_ranks: int) -> float:
        """Microseconds until every rank has the ``num_bytes`` of every other.

        Recursive doubling, or Bruck's algorithm where m is no power of two (Thakur, Rabenseifner, Gropp, Int. J. High
        Perform. Comput. Appl. 19(1), 2005), first between nodes, then inside. Among m partners with c bytes each,
        step k moves min(2^k, m - 2^k) c bytes: ceil(log2 m) steps and (m - 1) c bytes in all.
        """
        (intra, inside), (inter, nodes) = self._levels(num_ranks)
        if self.gather is not None:
            return float(self.gather.time_us((num_ranks - 1) * num_bytes))
        return _doubling_us(inter, nodes, num_bytes) + _doubling_us(intra, inside, nodes * num_bytes)

    def all_reduce_us(self, num_bytes: float, num_ranks: int) -> float:
        """Microseconds of a sum of ``num_bytes`` over all ranks, inside nodes and then between them.

        Each level of m partners takes the faster of two algorithms (Thakur et al., as above). Recursive doubling has
        ceil(log2 m) steps of all bytes. Rabenseifner's is a reduce-scatter by recursive halving and an all-gather by
        doubling, each of ceil(log2 m) steps and (m - 1) / m of the bytes. Adding is free.
        """
        if self.reduce is not None:
            return float(self.reduce.time_us(num_bytes)) if num_ranks > 1 else 0.0
        total = 0.0
        for link, partners in self._levels(num_ranks):
            if link is not None:
                short_us = math.ceil(math.log2(partners)) * float(link.time_us(num_bytes))
                total += min(short_us, 2 * _doubling_us(link, partners, num_bytes / partners))
        return total

    def _levels(self, num_ranks: int) -> tuple[tuple[Link | None, int], tuple[Link | None, int]]:
        """Each link, with the ranks of the fullest node and the nodes."""
        self._check_ranks(num_ranks)
        inside, nodes = min(num_ranks, self.ranks_per_node), math.ceil(num_ranks / self.ranks_per_node)
        return (self.intra, inside), (self.inter, nodes)

    def _check_ranks(self, num_ranks: int) -> None:
        if self.inter is None and num_ranks > self.ranks_per_node:
            wider = [name for name in self.names() if name.startswith(f"{self.name}-")]
            raise UserError(
                f"links/{self.name}: expected at most {self.ranks_per_node} ranks (inter is null: one node),"
                f" got {num_ranks}{(wider and f'; {wider[0]} crosses nodes') or ''}"
            )


def _doubling_us(link: Link | None, partners: int, num_bytes: float) -> float:
    """Recursive doubling among ``partners`` that have ``num_bytes`` each."""
    if link is None:
        return 0.0
    held = 2 ** np.arange(math.ceil(math.log2(partners)))
    passed_on = np.minimum(held, partners - held) * num_bytes
    return float(link.time_us(passed_on).sum())
