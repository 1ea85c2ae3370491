"""Where experts stand: replicas planned ahead of the tokens, and the slots to which a batch's pairs go.

A layer is as late as its fullest *rank*, and which experts share a rank decides how full that gets. Expert e lives on
rank e // (E / R), as Megatron-Core and the policies have it; replicas of busy experts live in spare slots beside.

**Replication** buys balance with memory. Routing stays as it is, and spare *slots* on every rank hold further copies of
busy experts, which share their load. No quality is lost; the price is memory, and a forecast of the load, because
weights are put in place before the tokens come. Plan for one load, and see how the plan bears another with
``rank_load``; ``Windows`` say which batches a plan knows, and ``Rearrangement`` what the next plan costs.

A plan is the expert in each slot, int64 [P]: slots r * S to r * S + S - 1 are rank r's, and every expert has one at
least. ``balancers`` splits each batch over them, and ``Slots`` say to which slot each pair then goes.

``replicate`` plans for the mean load by the global policy of DeepSeek's Expert Parallelism Load Balancer
(github.com/deepseek-ai/EPLB; DeepSeek-V3, arXiv 2412.19437, section 3.4). Two greedy rules do it. *Replicate*: every
spare slot goes to the expert whose replicas bear most, each its even share; no other choice of counts makes the
greatest share smaller. *Pack*: the heaviest first, into the lightest pack that has room, all packs holding the same
number. Ties go to the lower index (the published code leaves ties between equal loads to torch's sort, which promises
no order), and sums are float64, not float32.

Packing is a heuristic, so a plan may be worse than contiguous placement. Neither rule keeps two replicas of an expert
apart, and on one rank the second relieves nobody (deepseek-ai/EPLB, issue 22).

``replicate_by_risk`` plans for the spread of loads from batch to batch too, as FlashLB does
(github.com/vllm-project/vllm-ascend, policy_flashlb.py). A load's *risk* is its mean and Z standard deviations; a
rank's variance counts how its experts' loads rise and fall together. Replicas go where risk is greatest, the heaviest
first onto the rank that then has the least risk, replicas of one expert onto distinct ranks. How many spare slots the
busiest quarter of experts gets, then the next, is tried around what the greedy rule says: the number whose plan has the
emptiest fullest rank, mean over the batches that are known. Ours: replicas are at most R, and where slots run out
an expert changes places so that its replicas stand apart (the published code then keeps the plan before).

``spread_over_layers`` divides spare slots among layers, which need not have as many each: memory goes where the planned
fullest rank falls most, as CRAFT has it (arXiv 2603.28768, of which the abstract was read; the rule is ours, and
exact).

Shapes: R = ranks, T = tokens of one rank, E = experts, B = batches, P = slots of all ranks (physical experts), S =
P / R slots of a rank, N = entries of all experts' turns, L = layers, F = numbers of spare slots, 0 and on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from moe_ep_bench.balancers import FREE, Balanced, with_free_slots
from moe_ep_bench.errors import UserError
from moe_ep_bench.metrics import RANKS_PER_NODE, crossing_metrics
from moe_ep_bench.policies.lazy import Tensor

if TYPE_CHECKING:
    from moe_ep_bench.cost_model.links import Links

# FlashLB's: the upper quartile of a normal distribution; parts of the experts; slots tried to each side.
_Z, _QUARTERS, _WIDTH = 0.6744897501960817, 4, 8


def default_ep_size(num_experts: int) -> int:
    """Virtual ranks where a config leaves them open: the largest number up to 8, a node's, that divides the experts."""
    return max(size for size in range(1, 9) if num_experts % size == 0)


def rank_load(load_BE: ArrayLike, slot_expert_P: NDArray[np.int64], num_ranks: int) -> NDArray[np.float64]:
    """Load of every rank under a plan, replicas sharing evenly: [..., E] -> float64 [..., R]."""
    load_BE = np.asarray(load_BE, dtype=np.float64)
    slot_load_BP = (load_BE / np.bincount(slot_expert_P, minlength=load_BE.shape[-1]))[..., slot_expert_P]
    return slot_load_BP.reshape(*load_BE.shape[:-1], num_ranks, -1).sum(axis=-1)


def replicate(load_E: ArrayLike, *, num_slots: int, num_ranks: int, num_groups: int = 1) -> NDArray[np.int64]:
    """Plan which expert every slot holds from the load to expect (see the module's docstring): int64 [P].

    Args:
        load_E: pairs, or anything proportional to them: finite, non-negative.
        num_slots: P, of all ranks: a multiple of R, at least E. P - E of them are spare.
        num_groups: groups of experts, neighbours by index. As in the published code on one node, experts of busier
            groups come first where loads tie.

    Raises:
        ValueError: one line that names the field, its value and what is allowed.
    """
    load_E = np.asarray(load_E, dtype=np.float64)
    _check(len(load_E), num_slots, num_ranks)
    busiest_G = (-load_E.reshape(num_groups, -1).sum(axis=1)).argsort(kind="stable")
    expert_E = np.arange(len(load_E)).reshape(num_groups, -1)[busiest_G].ravel()
    replica_P, replicas_E = _spread(load_E[expert_E], num_slots)
    return expert_E[replica_P[pack((load_E[expert_E] / replicas_E)[replica_P], num_ranks)]]


def replicate_by_risk(load_BE: ArrayLike, *, num_slots: int, num_ranks: int) -> NDArray[np.int64]:
    """Plan the slots from the loads of several batches (see the module's docstring): int64 [P].

    Args:
        load_BE: pairs of each batch, or one [E], whose loads then do not vary.
        num_slots: P, of all ranks: a multiple of R, at least E and at most E x R.

    Raises:
        ValueError: as ``replicate``.
    """
    load_BE = np.atleast_2d(np.asarray(load_BE, dtype=np.float64))
    num_batches, num_experts = load_BE.shape
    _check(num_experts, num_slots, num_ranks)
    mean_E = load_BE.mean(axis=0)
    covariance_EE = (load_BE - mean_E).T @ (load_BE - mean_E) / max(num_batches - 1, 1)
    risk_E = mean_E + _Z * np.sqrt(covariance_EE.diagonal())
    order_E, size = np.argsort(-risk_E, kind="stable"), -(-num_experts // _QUARTERS)
    packed = partial(_pack_by_risk, mean_E, covariance_EE, num_ranks)

    def given(replicas_E: NDArray[np.int64], expert_I: NDArray[np.int64], spare: int) -> NDArray[np.int64]:
        """The same replicas, but of some experts those that they get with so many spare slots: int64 [E]."""
        replicas_E = replicas_E.copy()
        replicas_E[expert_I] = _spread(risk_E[expert_I], len(expert_I) + spare, num_ranks)[1]
        return replicas_E

    def fullest_rank(replicas_E: NDArray[np.int64]) -> float:
        return rank_load(load_BE, packed(replicas_E), num_ranks).max(axis=1).mean()

    replicas_E, spare = np.ones(num_experts, dtype=np.int64), num_slots - num_experts
    for first in range(0, num_experts, size):
        quarter, later = order_E[first : first + size], order_E[first + size :]
        greedy = int(given(replicas_E, order_E[first:], spare)[quarter].sum()) - len(quarter)
        # No expert has more replicas than there are ranks.
        fewest = max(0, greedy - _WIDTH, spare - len(later) * (num_ranks - 1))
        most = min(spare, greedy + _WIDTH, len(quarter) * (num_ranks - 1))
        tried = {n: given(given(replicas_E, quarter, n), later, spare - n) for n in range(fewest, most + 1)}
        chosen = min(tried, key=lambda number: (fullest_rank(tried[number]), abs(number - greedy), number))
        replicas_E, spare = given(replicas_E, quarter, chosen), spare - chosen
    return packed(replicas_E)


PLANS = ("eplb", "variance")
"""For mean loads (``replicate``), or also for their variance over batches (``replicate_by_risk``)."""


def plan_ahead(
    plan: str | None, load_BE: NDArray[np.float64], *, num_ranks: int, spare_per_rank: int, num_groups: int
) -> NDArray[np.int64]:
    """The expert in each slot before a batch comes, int64 [P].

    Args:
        plan: one of ``PLANS``; None = spare slots stay free.
        load_BE: pairs of the batches that are known ahead.
    """
    num_experts = load_BE.shape[1]
    if plan is None:
        return with_free_slots(num_experts, num_ranks, spare_per_rank)
    num_slots = num_experts + spare_per_rank * num_ranks
    if plan == "variance":
        return replicate_by_risk(load_BE, num_slots=num_slots, num_ranks=num_ranks)
    return replicate(load_BE.mean(axis=0), num_slots=num_slots, num_ranks=num_ranks, num_groups=num_groups)


def fullest_by_spare(
    plan: str, load_BE: NDArray[np.float64], *, most: int, num_ranks: int, num_groups: int
) -> NDArray[np.float64]:
    """Pairs of the fullest rank, mean over known batches, by the spare slots of a rank that are planned for them.

    Returns:
        float64 [F], of 0 to ``most`` spare slots.
    """
    sizes = {"num_ranks": num_ranks, "num_groups": num_groups}
    plans = (plan_ahead(plan, load_BE, spare_per_rank=spare, **sizes) for spare in range(most + 1))
    return np.array([rank_load(load_BE, slot_expert_P, num_ranks).max(axis=1).mean() for slot_expert_P in plans])


def spread_over_layers(fullest_LF: NDArray[np.float64], budget: int) -> tuple[int, ...]:
    """Spare slots of a rank in each layer, ``budget`` in all at most, with the least sum of fullest ranks.

    By dynamic programming over layers, so that no other division has a smaller sum. A slot that helps nowhere is not
    given.

    Args:
        fullest_LF: of each layer ``fullest_by_spare``.
    """
    least_N = np.zeros(budget + 1)  # of the layers so far, by the slots that they may have
    given_LN = []
    for fullest_F in fullest_LF:
        sum_FN = np.full((len(fullest_F), budget + 1), np.inf)
        for spare, fullest in enumerate(fullest_F[: budget + 1]):
            sum_FN[spare, spare:] = least_N[: budget + 1 - spare] + fullest
        given_LN.append(sum_FN.argmin(axis=0))
        least_N = sum_FN.min(axis=0)
    spare_L: list[int] = []
    for given_N in reversed(given_LN):
        spare_L.insert(0, int(given_N[budget - sum(spare_L)]))
    return tuple(spare_L)


@dataclass(frozen=True)
class Windows:
    """Which batches a plan knows, and which it serves.

    In time, a plan serves ``every`` batches, the first of them ``lag`` after the last of the ``window`` that it knows:
    it never knows a batch that it serves. Batches that do not follow each other in time may all be known but one.

    Attributes:
        num_batches: that are served, 0 and on; those before them have negative numbers.
        window: batches that a plan knows; None = all but one that it serves, and a plan for each batch.
        every: batches that a plan serves; None = all.
        history: batches ahead of the served ones that are known too where ``window`` is None.
    """

    num_batches: int
    window: int | None = None
    lag: int = 1
    every: int | None = None
    history: int = 0

    @property
    def num_history(self) -> int:
        """Batches ahead of the first that the first plan knows, or that pass while it is put in place."""
        return 0 if self.window is None else self.window + self.lag - 1

    def known(self, batch: int) -> tuple[int, ...]:
        """The batches that the plan of ``batch`` knows.

        A batch that stands alone, and no window is asked for, is planned for itself.
        """
        if self.window is None:
            return tuple(other for other in range(-self.history, self.num_batches) if other != batch) or (batch,)
        served_from = 0 if self.every is None else batch // self.every * self.every
        return tuple(range(served_from - self.num_history, served_from - self.lag + 1))

    def before(self, batch: int) -> int | None:
        """A batch of the plan before that of ``batch``; None = there was none."""
        return None if self.every is None or batch < self.every else batch - self.every


@dataclass(frozen=True, eq=False)
class Rearrangement:
    """What it takes to go from one plan to the next in one layer, and how many batches bear it.

    Attributes:
        moved_bytes_RR: of weights from each rank (row) to each (column), float64.
        num_batches: that the new plan serves, each of which bears its share; None = for good, and no batch bears any.
        plan_us: of planning, while ranks wait; None = nobody waits.
    """

    moved_bytes_RR: NDArray[np.float64]
    num_batches: int | None
    plan_us: float | None

    def once_us(self, links: Links) -> NDArray[np.float64]:
        """Microseconds [R] that it takes: all ranks wait for the last, or each has its own links busy."""
        busy_us_R = links.all_to_all_us(self.moved_bytes_RR)
        if self.plan_us is None:
            return busy_us_R
        return np.full_like(busy_us_R, self.plan_us + busy_us_R.max())

    @property
    def share(self) -> float:
        """Of it that each batch bears."""
        return 1 / self.num_batches if self.num_batches else 0.0


def moved_experts(
    before_P: NDArray[np.int64], after_P: NDArray[np.int64], num_ranks: int, ranks_per_node: int = RANKS_PER_NODE
) -> NDArray[np.int64]:
    """Experts whose weights go from each rank (row) to each (column) when slots change: int64 [R, R].

    A rank gets what it does not hold yet, once; slots of a rank change places for nothing. An expert comes from a rank
    of the same node that holds it where there is one, then from the one that sends least so far, then the lowest.

    Args:
        before_P, after_P: the expert in each slot, or ``balancers.FREE``; as many slots need not be.
    """
    held = [set(row) for row in before_P.reshape(num_ranks, -1).tolist()]
    moved_RR = np.zeros((num_ranks, num_ranks), dtype=np.int64)
    sent_R = [0] * num_ranks
    for rank, wanted in enumerate(after_P.reshape(num_ranks, -1).tolist()):
        for expert in sorted({*wanted} - held[rank] - {FREE}):
            sender = min(
                (other for other in range(num_ranks) if expert in held[other]),
                key=lambda other: (other // ranks_per_node != rank // ranks_per_node, sent_R[other], other),
            )
            moved_RR[sender, rank] += 1
            sent_R[sender] += 1
    return moved_RR


def _spread(
    load_E: NDArray[np.float64], num_slots: int, most: int | None = None
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Give every expert a replica, and every slot left to the expert whose replicas then bear most.

    Args:
        most: replicas of an expert; None = any number.

    Returns:
        The expert of each replica in the order in which they were given, int64 [num_slots], and each expert's
        replicas, int64 [E].
    """
    from moe_ep_bench.kernels.placing import spread  # numba takes its time

    return spread(np.ascontiguousarray(load_E, dtype=np.float64), num_slots, num_slots + 1 if most is None else most)


def pack(load_I: NDArray[np.float64], num_packs: int) -> NDArray[np.int64]:
    """Put items into packs of equal number, the heaviest first, each into the lightest pack that has room.

    Returns:
        int64 [I]: the items pack by pack, inside a pack in the order in which they came. Where a pack holds one
        item there is nothing to choose, and items stay in order, as in the published code.
    """
    room = len(load_I) // num_packs
    if room == 1:
        return np.arange(len(load_I))
    packs: list[list[int]] = [[] for _ in range(num_packs)]
    pack_load_N = np.zeros(num_packs)
    for heaviest in (-load_I).argsort(kind="stable").tolist():
        lightest = int(np.where([len(items) < room for items in packs], pack_load_N, np.inf).argmin())
        packs[lightest].append(heaviest)
        pack_load_N[lightest] += load_I[heaviest]
    return np.array(packs).ravel()


def _pack_by_risk(
    mean_E: NDArray[np.float64], covariance_EE: NDArray[np.float64], num_ranks: int, replicas_E: NDArray[np.int64]
) -> NDArray[np.int64]:
    """The expert of every slot, int64 [P]: the heaviest replica first, each onto the rank that then has least risk."""
    from moe_ep_bench.kernels.placing import ranks_by_risk  # numba takes its time

    share_E, room = mean_E / replicas_E, replicas_E.sum() // num_ranks
    shared_EE = covariance_EE / replicas_E / replicas_E[:, None]
    heaviest_E = np.argsort(-share_E, kind="stable")
    expert_P = heaviest_E.repeat(replicas_E[heaviest_E])
    rank_P = ranks_by_risk(expert_P, share_E, shared_EE, num_ranks, room, _Z)
    held = expert_P[np.argsort(rank_P, kind="stable")].reshape(num_ranks, room).tolist()
    return np.array(_unstacked(held)).ravel()


def _unstacked(held: list[list[int]]) -> list[list[int]]:
    """Exchange replicas that stand together for experts of other ranks.

    A rank without the expert always has one that this rank lacks: it holds as many distinct experts, or more.
    """
    for here in held:
        for expert in [expert for place, expert in enumerate(here) if expert in here[:place]]:
            there, other = next(
                (rank, other) for rank in held if expert not in rank for other in rank if other not in here
            )
            here[len(here) - 1 - here[::-1].index(expert)], there[there.index(other)] = other, expert
    return held


def _check(num_experts: int, num_slots: int, num_ranks: int) -> None:
    if num_slots < num_experts or num_slots % num_ranks:
        raise UserError(
            f"expected a multiple of num_ranks={num_ranks}, at least the {num_experts} experts, got {num_slots}",
            "num_slots",
        )


# ---- slots of one batch ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Slots:
    """Which expert every slot holds, and which slot each pair of one batch goes to.

    The batch's pairs of an expert are numbered over ranks, then tokens, and take the expert's *turns*: a slot for each
    pair, again from the first where there are more pairs.

    Attributes:
        expert_P: int64; every expert has at least one slot.
        turn_N: int64, the slots of all experts' turns, expert by expert; at least one entry for each.
        turns_E: how many entries each expert has.
        before_RE: pairs of the ranks ahead of each: the number of a rank's first pair. R divides P.
        moved_bytes_RR: of weights that go from each rank to each for this batch, float64; None = none go.
        rearranged: what it took to put this plan in place of the one before; None = plans are not in time.
    """

    expert_P: NDArray[np.int64]
    turn_N: NDArray[np.int64]
    turns_E: NDArray[np.int64]
    before_RE: NDArray[np.int64]
    moved_bytes_RR: NDArray[np.float64] | None = None
    rearranged: Rearrangement | None = None

    @staticmethod
    def contiguous(num_experts: int, num_ranks: int) -> Slots:
        """Expert e in slot e, Megatron-Core's own placement."""
        return Slots._in_turn(np.arange(num_experts), num_experts, num_ranks)

    @staticmethod
    def of_batch(
        balanced: Balanced, counts_RE: NDArray[np.int64], expert_bytes: float, num_sources: int | None = None
    ) -> Slots:
        """A batch as a balancer has it, where ranks have ``counts_RE`` pairs; nobody sends to a free slot.

        Args:
            num_sources: rank r sends what r modulo so many does, and so gives its pairs to slots as that one does.
        """
        num_ranks, num_experts = counts_RE.shape
        alike = num_ranks // (num_sources or num_ranks)
        expert_RS = balanced.slot_expert_P.reshape(num_ranks, -1)
        expert_P = np.where(expert_RS == FREE, expert_RS[:, :1], expert_RS).ravel()
        moved_RR = balanced.moved_RR(num_ranks) * np.float64(expert_bytes) if balanced.moves else None
        if balanced.pairs_P is None:
            return Slots._in_turn(expert_P, num_experts, num_ranks, moved_RR, num_sources)
        slots_E = [np.flatnonzero(expert_P == expert) for expert in range(num_experts)]
        turns_E = [_interleaved(slots, _shared(balanced.pairs_P[slots], alike)) for slots in slots_E]
        counts_SE = counts_RE[:num_sources]
        before_RE = np.tile(counts_SE.cumsum(axis=0) - counts_SE, (alike, 1))
        return Slots(expert_P, np.concatenate(turns_E), np.array(list(map(len, turns_E))), before_RE, moved_RR)

    @staticmethod
    def _in_turn(
        expert_P: NDArray[np.int64],
        num_experts: int,
        num_ranks: int,
        moved_RR: NDArray[np.float64] | None = None,
        num_sources: int | None = None,
    ) -> Slots:
        """Give an expert's slots its pairs in turn; rank r begins with the r-th, so that few pairs do not all meet."""
        before_RE = np.repeat(np.arange(num_ranks)[:, None] % (num_sources or num_ranks), num_experts, axis=1)
        turns_E = np.bincount(expert_P, minlength=num_experts)
        return Slots(expert_P, expert_P.argsort(kind="stable"), turns_E, before_RE, moved_RR)

    @property
    def num_ranks(self) -> int:
        return len(self.before_RE)

    @property
    def first_E(self) -> NDArray[np.int64]:  # noqa: N802
        """Where each expert's turns begin."""
        return self.turns_E.cumsum() - self.turns_E

    @cached_property
    def is_contiguous(self) -> bool:
        """Whether every expert has the slot of its own number alone."""
        return np.array_equal(self.expert_P, np.arange(len(self.turns_E)))

    def counts(
        self,
        map_TE: Tensor,
        rank: int,
        ranks_per_node: int = RANKS_PER_NODE,
        before_E: NDArray[np.int64] | None = None,
    ) -> tuple[NDArray[np.int64], ...]:
        """What a rank's tokens send: pairs to each slot [P], distinct tokens to each rank [R] and to each node [N].

        Args:
            before_E: pairs of each expert ahead of these; None = of the ranks before.
        """
        from moe_ep_bench.kernels.counting import slot_counts  # numba takes its time

        of_rank = self.turn_N, self.first_E, self.turns_E, self.before_RE[rank] if before_E is None else before_E
        sizes = len(self.expert_P), self.num_ranks, ranks_per_node
        return slot_counts(map_TE.cpu().contiguous().numpy().view(np.uint8), *of_rank, *sizes)

    def parts(self, map_TE: Tensor, rank: int, ranks_per_node: int, num_parts: int) -> list[dict[str, Any]]:
        """Of a rank's micro-batches, by ``metrics``' names, what each sends."""
        rows, before_E = [], self.before_RE[rank]
        for map_PE in map_TE.tensor_split(num_parts):
            counts = self.counts(map_PE, rank, ranks_per_node, before_E)
            rows.append(
                {"num_tokens": len(map_PE), **dict(zip(("slot_load_P", "copies_R", "copies_N"), counts, strict=True))}
            )
            before_E = before_E + np.bincount(self.expert_P, counts[0], len(before_E)).astype(np.int64)
        return rows

    def moved_bytes(self, rank: int) -> dict[str, int]:
        """Bytes of weights that a rank gets, for a batch and, where plans are in time, once for a plan."""
        moved_bytes, once = 0.0 if self.moved_bytes_RR is None else self.moved_bytes_RR[:, rank].sum(), {}
        if self.rearranged is not None:
            once["rearranged_bytes"] = int(self.rearranged.moved_bytes_RR[:, rank].sum())
            moved_bytes += once["rearranged_bytes"] * self.rearranged.share
        return {"moved_weight_bytes": int(moved_bytes), **once}

    def metrics(
        self,
        map_TE: Tensor,
        rank: int,
        ranks_per_node: int = RANKS_PER_NODE,
        parts: Sequence[Mapping[str, Any]] = (),
    ) -> dict[str, Any]:
        """Those metrics of a rank's tokens that depend on where experts stand (``metrics.routing_metrics``).

        ``slot_load_P`` are pairs by slot, int64 [P].

        Args:
            parts: ``parts`` of the same map, where these are known: no token is in two.
        """
        if parts:
            of_parts = ([part[name] for part in parts] for name in ("slot_load_P", "copies_R", "copies_N"))
            counts_P, copies_R, copies_N = (np.sum(counts, axis=0) for counts in of_parts)
        else:
            counts_P, copies_R, copies_N = self.counts(map_TE, rank, ranks_per_node)
        counts_RS = counts_P.reshape(self.num_ranks, -1)
        load_R = counts_RS.sum(axis=1)
        return {
            "slot_load_P": counts_P,
            **self.moved_bytes(rank),
            "load_R": load_R,
            "activated_experts_fullest_rank": int((counts_RS > 0).sum(axis=1).max()),
            **crossing_metrics(load_R, copies_R, copies_N, rank, ranks_per_node),
            "copies_R": copies_R,
            "copies_N": copies_N,
        }


def _shared(pairs_I: NDArray[np.int64], alike: int) -> NDArray[np.int64]:
    """A share of an expert's pairs of each slot, of so many shares alike: whole pairs, and of all slots exact."""
    return np.diff(pairs_I.cumsum() // alike, prepend=0)


def _interleaved(slot_I: NDArray[np.int64], pairs_I: NDArray[np.int64]) -> NDArray[np.int64]:
    """An expert's turns, each of its slots as often as it computes pairs: int64 [N], at least one.

    Slots are interleaved, so that every rank sends each of them about the same share.
    """
    if not pairs_I.any():
        return slot_I[:1]
    place_N = np.concatenate([(np.arange(pairs) + 0.5) / pairs for pairs in pairs_I if pairs])
    return np.repeat(slot_I, pairs_I)[place_N.argsort(kind="stable")]
