"""W0 to W7, the workloads of Megatron-LM's benchmark of token imbalance, to the expert id (``workload.skew``).

They are those of NVIDIA/Megatron-LM, pull request 7488 (``benchmarks/moe/token_imbalance/benchmark.py`` at f5c50249; it
answers issue 6757). Each isolates one variable: which experts are hot, where they lie, and in which batches. A token's
experts are drawn from a hot set or from all; draws follow from the workload, the seed and the step, which is our batch,
and from no number of ranks. ``checksum`` is the pull request's own, so that both can be told to route alike.

Differences from the pull request, which is in review:

* A batch's rows are those of all ranks together, and are dealt; there every rank routes the same rows. So its
  ``--tokens`` is ``num_tokens`` here: loads of experts are in the same relation at any number of ranks.
* ``W4_source_ragged`` draws from all experts, as the code does; its text also speaks of ranks that hold unlike numbers
  of tokens, which are ``workload.tokens_of_ranks`` here.
* ``W1_hot_expert_set`` and ``W2_hot_rank`` differ in the draw alone: both have the first experts hot.
* Its text's loads of ``W3_spread_hot_experts`` are of an earlier definition (1.281 over the mean; its code has 1.906).
* Experts that a token does not take have scores too, of our own noise, for policies that look at them.

Shapes: T = tokens of all ranks, E = experts, K = top_k.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from moe_ep_bench.errors import UserError
from moe_ep_bench.policies.lazy import torch


def _quarter(turn: int, num_experts: int, top_k: int) -> list[int]:
    """A quarter of the experts, at least K, from expert 0 on; each turn the next ones."""
    size = max(top_k, num_experts // 4)
    return [(turn * size + place) % num_experts for place in range(size)]


def _every_other(num_experts: int, top_k: int) -> list[int]:
    found = sorted({2 * place % num_experts for place in range(max(top_k, num_experts // 2))})
    return found if len(found) >= top_k else list(range(num_experts))


class HotSet(NamedTuple):
    """Which experts are hot, and whose.

    Attributes:
        experts: of a step, given E and K, in the order from which is drawn.
        is_drawn_from: whether a token (second) draws from them in a step (first); else it draws from all.
    """

    experts: Callable[[int, int, int], list[int]]
    is_drawn_from: Callable[[int, int], bool] = lambda step, token: token % 4 != 0


# None = dealt in turn, so that loads are equal.
TOKEN_IMBALANCE: dict[str, HotSet | None] = {
    "W0_balanced": None,
    "W1_hot_expert_set": HotSet(lambda step, E, K: _quarter(0, E, K)),
    "W2_hot_rank": HotSet(lambda step, E, K: _quarter(0, E, K)),
    "W3_spread_hot_experts": HotSet(lambda step, E, K: _every_other(E, K)),
    "W4_source_ragged": HotSet(lambda step, E, K: list(range(E))),
    "W5_zero_expert_rank": HotSet(lambda step, E, K: list(range(E // 2, E)), lambda step, token: True),
    "W6_rotating_hotspot": HotSet(lambda step, E, K: _quarter(step // 3, E, K)),
    "W7_burst": HotSet(lambda step, E, K: _quarter(0, E, K), lambda step, token: step % 4 == 3 and token % 2 == 0),
}


def check(name: str, num_experts: int, top_k: int) -> None:
    """Raises ValueError: a token cannot take K distinct experts of the hot ones."""
    rule = TOKEN_IMBALANCE[name]
    if rule is not None and (most := len(rule.experts(0, num_experts, top_k))) < top_k:
        raise UserError(f"{name} has tokens take {most} of the {num_experts} experts; the model takes {top_k}", "skew")


@lru_cache(maxsize=8)
def routed(
    name: str, step: int, num_experts: int, top_k: int, num_tokens: int, seed: int
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Experts of every token, int64 [T, K], distinct in a row, and their weights, float32 [T, K], of sum 1."""
    key = hashlib.sha256(f"{name}|{seed}|{step}".encode()).hexdigest()[:8]
    random, rule = torch.Generator().manual_seed(int(key, 16)), TOKEN_IMBALANCE[name]
    if rule is None:
        ids_TK = torch.arange(num_tokens * top_k).view(num_tokens, top_k) % num_experts
    else:
        hot, every = torch.tensor(rule.experts(step, num_experts, top_k)), torch.arange(num_experts)
        pools = (hot if rule.is_drawn_from(step, token) else every for token in range(num_tokens))
        drawn = [pool[torch.randperm(len(pool), generator=random)[:top_k]] for pool in pools]
        ids_TK = torch.stack(drawn).sort(dim=1).values
    gates_TK = torch.rand((num_tokens, top_k), generator=random) * 0.5 + 0.5
    return ids_TK.numpy(), (gates_TK / gates_TK.sum(dim=1, keepdim=True)).numpy()


def checksum(name: str, num_steps: int, num_experts: int, top_k: int, num_tokens: int, seed: int, ep_size: int) -> str:
    """The pull request's ``workload_fingerprint``: of sizes, the EP size, and every step's experts and weights."""
    digest = hashlib.sha256(f"{name}|{num_experts}|{top_k}|{num_tokens}|{num_steps}|{seed}|{ep_size}".encode())
    for step in range(num_steps):
        for values in routed(name, step, num_experts, top_k, num_tokens, seed):
            digest.update(values.tobytes())
    return digest.hexdigest()[:16]
