"""Model one rank's run of the layer on a device that is not here, cut into legs as a measured run is.

Each phase has a formula over the figures of a device file (``devices``), in microseconds:

gate      roofline of T x D times D x E: 2 T D E operations; b (T D + D E) + 4 T E bytes; or the device's own figure of
          a gate in float32
policy    a least time + T E scores x picoseconds per score: of the model's own top-k by one kernel (Megatron-Core's
          several in ``h200-sxm-measured``), or of Token Drop by its kernels, which stands for all but
          ``devices.SLOW_POLICIES``
permute   bytes / (memory bandwidth x share that permutation reaches), of four steps:
          rows gathered for sending, 2 N W b bytes; sorted by local expert as they arrive, 2 M W b; put back after
          the experts, 2 M W b; summed per token at the end, (N + T) W b. The middle two only where L > 1 and there
          are other ranks
metadata  nothing: host syncs and counting are left out
experts   overhead of a pass + the sum over local experts of the roofline of a gated FFN on its rows m:
          6 m W F operations; b (3 W F + m (2 W + 6 F)) bytes: the weights of an expert that has rows, and rows in
          and out of two GEMMs with an activation between them. Measured times (``expert_table``) give
          all of it, the middle two steps of the permutation included
shared    roofline of a gated FFN on T rows, with D and S in place of W and F; at the end its output is added to
          the routed experts', 3 T D b bytes through memory

The layer has grouped experts, permutation by index (``layer.dispatchers``) and a gate that multiplies values as they
are, as with Transformer Engine; ``*-measured`` have Megatron-Core's own, in float32. The time per score does not
depend on the number of experts. Launches take no time apart from the experts' overhead, so batches of few tokens come
out too fast. All-to-alls and other collectives are the link model's (``links``).

A batch-wide policy meets the other ranks in the middle of its routing: the model's own top-k comes before, the rest
after.

Shapes: T = tokens of the rank, E = experts of the model (all are scored, however many slots there are), N = pairs that
it sends, L = its local experts or slots, M = rows that arrive, D = hidden size, W = width of the rows that routed
experts take, which is D unless the model has a latent size, F = expert FFN size, S = FFN size of the shared experts,
b = bytes per value.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moe_ep_bench.cost_model.devices import PRECISIONS, Device, ffn_work
from moe_ep_bench.cost_model.timeline import PHASE_OF_MEETING
from moe_ep_bench.models import ModelSpec
from moe_ep_bench.schema import UNACCOUNTED


@dataclass(frozen=True, eq=False)
class RankWork:
    """What one rank does in one run of the layer.

    Attributes:
        num_tokens: T, its own tokens.
        num_sent: N, pairs that it sends to anyone, itself included.
        received_L: int64 [L], rows that arrive at each of its local experts or slots.
        batch_tokens: of all ranks; None = not said, and taken from the rows.
        num_shared: tokens whose shared experts it computes beside the routed ones; None = its own, ahead of the gate.
    """

    num_tokens: int
    num_sent: int
    received_L: NDArray[np.int64]
    batch_tokens: int | None = None
    num_shared: int | None = None

    @property
    def num_received(self) -> int:
        """M, rows that arrive."""
        return int(np.sum(self.received_L))


def layer_segments(
    device: Device,
    model: ModelSpec,
    work: RankWork,
    *,
    by_policy: bool,
    batch_wide: bool,
    alone: bool = False,
    dtype: str = "bfloat16",
    solving_us: float = 0.0,
) -> list[tuple[str, float]]:
    """Phases and microseconds of one run in the order in which a measured one has them, for ``timeline.legs_of``.

    A stage without work takes no time; a rank without tokens still runs the experts on the rows that it is sent.

    Args:
        by_policy: a policy routes; otherwise the model's own top-k.
        batch_wide: the policy sums statistics over ranks.
        alone: there is no other rank: nobody is met, and rows lie as the experts want them.
        dtype: of ``PRECISIONS``; what b is, and whether experts are smaller; float32 has bfloat16's arithmetic.
        solving_us: a balancer's, once all counts are known.
    """
    precision = PRECISIONS[dtype]
    T, N, M, b = work.num_tokens, work.num_sent, work.num_received, precision.hidden_bytes
    E, D, F, S = model.num_experts, model.hidden_size, model.ffn_hidden_size, model.shared_ffn_hidden_size
    W = model.expert_hidden_size
    gate_us = device.gate_us(T, D, E, b)
    routing_us = device.routing_us(T * E, by_policy=by_policy)
    top_k_us = min(device.routing_us(T * E, by_policy=False), routing_us) if batch_wide else routing_us
    sorted_already = alone or len(work.received_L) == 1 or device.experts is not None
    sort_us = 0.0 if sorted_already else device.permute_us(2 * M * W * b)
    experts_us = device.experts_us(
        W, F, work.received_L, precision, num_matrices=model.expert_matrices, num_tokens=work.batch_tokens
    )
    num_shared, is_own = (T, True) if work.num_shared is None else (work.num_shared, False)
    shared_us = device.work_us(*ffn_work(D, S, num_shared, b, model.expert_matrices))
    add_us = device.work_us(0, 3 * T * D * b, T)
    segments = [  # Stages that take no time stand where a measured run has them.
        (UNACCOUNTED, 0.0),
        *([("shared", shared_us)] if S and is_own else []),
        ("gate", gate_us),
        ("policy", top_k_us),
        *([("wait_policy", 0.0), ("policy", routing_us - top_k_us)] if batch_wide else []),
        (UNACCOUNTED, 0.0),
        ("permute", 0.0),
        ("wait_metadata", 0.0),
        *([("policy", solving_us)] if solving_us else []),
        ("permute", device.permute_us(2 * N * W * b)),
        ("metadata", 0.0),
        (UNACCOUNTED, 0.0),
        ("wait_dispatch", 0.0),
        (UNACCOUNTED, 0.0),
        ("metadata", 0.0),
        ("permute", sort_us),
        *([("shared", shared_us)] if S and not is_own else []),
        ("experts", experts_us),
        ("permute", sort_us),
        ("wait_combine", 0.0),
        (UNACCOUNTED, 0.0),
        *([("shared", add_us)] if S else []),
        ("permute", device.permute_us((N + T) * W * b)),
    ]
    return [(phase, time_us) for phase, time_us in segments if not (alone and phase in PHASE_OF_MEETING)]
