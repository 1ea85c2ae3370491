"""Build a comparison's layer or model, and the passes of random tokens that a model runs on.

Shapes: T = tokens of a rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch

from moe_ep_bench.bench.comparison import Comparison
from moe_ep_bench.layer.experts import DTYPES, TOKENS, seeded_generator
from moe_ep_bench.layer.passes import Decode, KeyValueCache, Pass, Prefill
from moe_ep_bench.layer.stack import Stack


def builder(comparison: Comparison, device: torch.device) -> Callable[..., Stack]:
    """What builds the layer or model, once it is given its process groups."""
    model, settings = comparison.model, comparison.experiment.layer
    build = partial(Stack, model, DTYPES[settings.dtype], device, seed=settings.seed, parts=comparison.parts)
    if comparison.scope == "layer":
        return build
    longest = comparison.context_length + comparison.most_tokens
    return partial(build, num_layers=comparison.num_layers, max_length=longest)


def random_pass(
    comparison: Comparison,
    device: torch.device,
    index: int,
    rank: int,
    lengths: Sequence[int],
    cache: KeyValueCache | None,
) -> Pass:
    """A rank's pass of a model over batch ``index``: a decode step where there is a cache, else a prefill.

    Args:
        lengths: tokens of each of the rank's sequences.
    """
    generator = seeded_generator(device, comparison.experiment.layer.seed, TOKENS, index, rank)
    ids_T = torch.randint(comparison.model.vocab_size, (sum(lengths),), generator=generator, device=device)
    return Prefill(ids_T, lengths) if cache is None else Decode(ids_T, cache)
