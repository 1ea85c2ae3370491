"""On two ranks of one GPU: does NCCL EP send the pairs that a policy drops? Each rank prints the rows that it receives.

Started by torchrun, with Transformer Engine's NCCL EP and an NCCL that lets ranks share a GPU. A dropped pair is given
as Megatron-Core's ``flex`` dispatcher gives it, an expert at weight 0; then, which may end the ranks, as the id -1.

T = tokens of a rank, D = hidden size, E = experts, K = of a token.
"""

from __future__ import annotations

import torch
from transformer_engine.pytorch import ep  # pyright: ignore[reportMissingImports]

from moe_ep_bench.runtime.ranks import join
from moe_ep_bench.runtime.sharing import NCCL

T, D, E, K = 256, 1024, 8, 2

ranks = join(60, sharing=NCCL)
torch.set_default_device(ranks.device)
torch.inference_mode().__enter__()  # Beside autograd torch 2.11 loses defaults of Transformer Engine's operators.
torch.manual_seed(ranks.rank)
capacity = ranks.world_size * T * K
ep.ep_bootstrap(torch.distributed.group.WORLD, E, T, D, K, recv_capacity_per_rank=capacity)
hidden = torch.randn(T, D, dtype=torch.bfloat16)
weights, ids = torch.rand(T, E).topk(K)
lighter = weights.clone()
lighter[:, 1:] = 0  # one pair is left of each token
without = ids.masked_fill(lighter == 0, -1)
for how, sent_ids, sent_weights in (
    ("all pairs", ids, weights),
    ("half at weight 0", ids, lighter),
    ("half as id -1", without, lighter),
):
    buffer = ep.EpBuffer(K, T, D, E // ranks.world_size, recv_capacity_per_rank=capacity)
    received, _, rows_of_experts = ep.ep_dispatch(buffer, hidden, sent_ids, sent_weights)
    ep.ep_combine(buffer, received)
    print(f"rank {ranks.rank}, {how}: {int(rows_of_experts.sum())} rows\n", end="", flush=True)
ep.ep_finalize()
ranks.close()
