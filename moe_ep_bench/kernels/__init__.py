"""Compiled twins of memory-bound steps, each equal to the torch code beside it; ``form_of`` finds a policy's."""

from moe_ep_bench.kernels.dispatch import form_of

__all__ = ["form_of"]
