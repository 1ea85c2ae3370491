"""What dispatch and combine put on the links, and how long they take.

``pairs``   a row for each (token, expert), as Megatron-Core's all-to-all over NCCL sends them; the weights follow in an
            all-to-all of their own
``copies``  a row for each (token, rank), as DeepEP's kernels for prefill send them. Between nodes it is one for each
            (token, node): it goes to the rank that has the sender's place on that node, which forwards it to those that
            have experts of the token. Combine goes the same ways back, summed on the node first. Both links work at
            once. Beside its values a dispatched row has DeepEP's header: 8 bytes, and 8 for each expert of a token

Dispatched rows may be in fp8, with a float32 scale for each 128 values; combined ones are in the layer's own type.
Permutation is modelled with a row for each pair whatever is sent. Kernels are not: latencies, bandwidths and the shares
of them that are reached are those of the links' file. DeepEP's kernels for few tokens send pairs.

Shapes: R = ranks, N = nodes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from moe_ep_bench.cost_model.devices import Precision
from moe_ep_bench.cost_model.links import Links

Transport = Literal["pairs", "copies"]
DispatchType = Literal["bf16", "fp8"]

# Of a pair's routing weight that travels by itself.
_WEIGHT_BYTES = 4
# deepseek-ai/DeepEP, csrc/kernels/internode.cu: the source's place, and of each of a token's experts index and weight.
_HEADER_BYTES, _HEADER_BYTES_PER_EXPERT = 8, 8
_VALUES_PER_SCALE, _SCALE_BYTES = 128, 4
_SHORT = {"bfloat16": "bf16", "float32": "fp32"}


@dataclass(frozen=True, eq=False)
class Rows:
    """Rows between ranks: float64 [R, R], from each (row) to each (column).

    Attributes:
        pairs_RR: one for each (token, expert).
        copies_RR: one for each (token, rank); None where they were not counted.
        node_copies_RN: one for each (token, node), from each rank; likewise.
    """

    pairs_RR: NDArray[np.float64]
    copies_RR: NDArray[np.float64] | None = None
    node_copies_RN: NDArray[np.float64] | None = None

    def beside(self, more_RR: NDArray[np.int64], ranks_per_node: int) -> Rows:
        """With further rows, each a copy of its own, although its token may go to that rank or node anyhow."""
        if self.copies_RR is None or self.node_copies_RN is None:
            return Rows(self.pairs_RR + more_RR)
        firsts = np.arange(0, len(more_RR), ranks_per_node)
        nodes_RN = np.add.reduceat(more_RR, firsts, axis=1)
        return Rows(self.pairs_RR + more_RR, self.copies_RR + more_RR, self.node_copies_RN + nodes_RN)


@dataclass(frozen=True)
class Exchange:
    """How one MoE layer's rows travel.

    Attributes:
        precision: of the layer.
        dispatch: type of dispatched rows; None = as the layer's precision sends them.
    """

    hidden_size: int
    top_k: int
    precision: Precision
    transport: Transport = "pairs"
    dispatch: DispatchType | None = None

    @property
    def dispatch_bytes(self) -> float:
        """Of a dispatched row's values, scales included."""
        if self.dispatch == "fp8":
            return self.hidden_size + -(-self.hidden_size // _VALUES_PER_SCALE) * _SCALE_BYTES
        return self.hidden_size * (2 if self.dispatch == "bf16" else self.precision.sent_bytes)

    def times_us(self, links: Links, rows: Rows) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Microseconds that dispatch and combine keep each rank's links busy, float64 [R] each."""
        combine_bytes = self.hidden_size * self.precision.hidden_bytes
        if self.transport == "pairs":
            rows_us, weights_us = (
                links.all_to_all_us(rows.pairs_RR * num_bytes) for num_bytes in (self.dispatch_bytes, _WEIGHT_BYTES)
            )
            return rows_us + weights_us, links.all_to_all_us(rows.pairs_RR.T * combine_bytes)
        assert rows.copies_RR is not None
        assert rows.node_copies_RN is not None
        intra_RR, inter_RR = forwarded(rows.copies_RR, rows.node_copies_RN, links.ranks_per_node)
        sent_bytes = self.dispatch_bytes + _HEADER_BYTES + self.top_k * _HEADER_BYTES_PER_EXPERT
        return (
            links.busy_us(intra_RR * sent_bytes, inter_RR * sent_bytes),
            links.busy_us(intra_RR.T * combine_bytes, inter_RR.T * combine_bytes),
        )


def forwarded(
    copies_RR: NDArray[np.float64], node_copies_RN: NDArray[np.float64], ranks_per_node: int
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Rows inside nodes, forwarded ones included, and between nodes: float64 [R, R] each; nothing to oneself.

    Where the last node is not full, ranks whose place it lacks share those that it has.
    """
    num_ranks = len(copies_RR)
    intra_RR, inter_RR = np.zeros((num_ranks, num_ranks)), np.zeros((num_ranks, num_ranks))
    for node, first in enumerate(range(0, num_ranks, ranks_per_node)):
        here = slice(first, min(first + ranks_per_node, num_ranks))
        for rank in range(num_ranks):
            is_own = here.start <= rank < here.stop
            relay = rank if is_own else first + rank % ranks_per_node % (here.stop - first)
            intra_RR[relay, here] += copies_RR[rank, here]
            inter_RR[rank, relay] += 0 if is_own else node_copies_RN[rank, node]
    np.fill_diagonal(intra_RR, 0)
    return intra_RR, inter_RR


def exchange_words(dtype: str, transport: Transport, dispatch: DispatchType | None) -> str:
    """What is sent and how: type, transport, overlap; in a few words."""
    how = {
        "pairs": "NCCL all-to-all, one copy per (token, expert) pair",
        "copies": "sent as DeepEP does, one copy per (token, rank) and between nodes per (token, node)",
    }
    own = _SHORT.get(dtype, dtype)
    types = own if dispatch in (None, own) else f"{own}, dispatched in {dispatch}"
    return f"{types}, {how[transport]}, no overlap"
