"""Compiled twins of memory-bound steps, each equal to the torch code beside it; ``compiled`` finds a policy's."""

from moe_ep_bench.kernels.dispatch import compiled

__all__ = ["compiled"]
