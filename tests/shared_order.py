"""On two ranks of one GPU: who comes first to a meeting waits on the device for who is held longer.

Started by torchrun with ``staged`` or ``nccl``; rank 0 prints for how many milliseconds it waited in each order.
"""

from __future__ import annotations

import sys

import torch

from moe_ep_bench.layer.phases import Rendezvous
from moe_ep_bench.runtime.ranks import join
from moe_ep_bench.timing.timer import CudaClock

HELD_US = 50_000.0

ranks = join(60, sharing=sys.argv[1])
torch.set_default_device(ranks.device)
clock, meet = CudaClock(), Rendezvous(torch.distributed.group.WORLD, ranks.device)
for _ in range(3):
    meet()
waited_ms = []
for held_rank in (1, 0):
    clock.wait()
    torch.distributed.barrier(group=ranks.side_group)
    clock.hold(HELD_US if ranks.rank == held_rank else 0.0)
    began = clock.stamp()
    meet()
    met = clock.stamp()
    clock.wait()
    waited_ms.append(clock.between_us(began, met) / 1e3)
print(f"rank {ranks.rank} waited {waited_ms[0]:.1f} {waited_ms[1]:.1f}\n", end="", flush=True)
ranks.close()
