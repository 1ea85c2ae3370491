"""Scores of synthetic traffic from random numbers at their place, and the experts that they choose.

A token's logits are noise plus the experts' log odds. Taking the top-k of logits with Gumbel noise draws K experts
without replacement, with these odds (Gumbel-top-k: Kool et al. 2019, arXiv 1903.06059).

Shapes: T = tokens, E = experts, K = top_k.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from numpy.typing import NDArray

from moe_ep_bench import metrics
from moe_ep_bench.policies import RoutingContext
from moe_ep_bench.policies.lazy import torch
from moe_ep_bench.workload.randomness import Run, Stream, in_chunks, rows_at_once, separate_ties, uniform_rows

# A row of logits that spans more is squeezed to this, which keeps its order: exp(-80) / E is a normal float32, where
# exp(-100) would be one of many zeros.
MAX_LOGIT_SPAN = 80.0

Chunks = Sequence[NDArray[np.float64]]
"""Noise of rows in order, float64 [some rows, E] each."""


def gumbel_noise(
    seed: int, batch: int, runs: Sequence[Run], num_experts: int, *, sequence_length: int = 1, copying: float = 0.0
) -> Iterator[NDArray[np.float64]]:
    """Make Gumbel noise of some rows, in chunks: float64 [up to ``rows_at_once``, E].

    Args:
        runs: ascending.
        copying: the probability with which a row copies a number of the row before it in its sequence.
    """
    before_row, before_E = -1, np.empty(num_experts)
    at_once = rows_at_once(num_experts)
    for chunk in in_chunks(runs, at_once):
        parts = []
        for run in chunk:
            ahead = run.first % sequence_length if copying and run.first - 1 != before_row else 0
            for (missing,) in in_chunks([Run(run.first - ahead, run.first)], at_once):  # of a sequence that is cut
                before_E = _noise_rows(seed, batch, missing, before_E, sequence_length, copying)[-1]
            parts.append(_noise_rows(seed, batch, run, before_E, sequence_length, copying))
            before_row, before_E = run.end - 1, parts[-1][-1]
        yield parts[0] if len(parts) == 1 else np.concatenate(parts)


def _noise_rows(
    seed: int, batch: int, run: Run, before_E: NDArray[np.float64], sequence_length: int, copying: float
) -> NDArray[np.float64]:
    """Make noise of which each row copies some from the row before it, and the first of a sequence nothing."""
    uniform_TE = uniform_rows(seed, Stream.NOISE, batch, run.first, run.end, len(before_E))
    if not copying:
        return _gumbel(uniform_TE)
    starts = range(-run.first % sequence_length, run.num_rows, sequence_length)
    start_SE, is_copied_TE = _gumbel(uniform_TE[starts]), uniform_TE < copying
    # The rest of a uniform number above ``copying`` is uniform again.
    uniform_TE -= copying
    uniform_TE /= 1 - copying
    noise_TE = _gumbel(uniform_TE)
    is_copied_TE[starts], noise_TE[starts] = False, start_SE
    from moe_ep_bench.kernels.counting import copy_down  # Planning does without numba.

    copy_down(noise_TE, is_copied_TE, before_E)
    return noise_TE


def _gumbel(uniform: NDArray[np.float64]) -> NDArray[np.float64]:
    """Turn uniform numbers into Gumbel noise, in place; those up to 0 become the least noise there is."""
    np.maximum(uniform, 2.0**-60, out=uniform)
    for function in (np.log, np.negative, np.log, np.negative):
        function(uniform, out=uniform)
    return uniform


def softmax(logits_TE: NDArray[np.float64]) -> NDArray[np.float32]:
    """Softmax over experts in float32, without ties or zeros: a row's scores sort exactly as its logits."""
    top_T1 = logits_TE.max(axis=1, keepdims=True)
    span_T1 = top_T1 - logits_TE.min(axis=1, keepdims=True)
    odds_TE = np.exp((logits_TE - top_T1) * np.minimum(1.0, MAX_LOGIT_SPAN / np.maximum(span_T1, MAX_LOGIT_SPAN)))
    scores_TE = (odds_TE / odds_TE.sum(axis=1, keepdims=True)).astype(np.float32)
    separate_ties(scores_TE, logits_TE)
    return scores_TE


def chosen_experts(
    logits_TE: NDArray[np.float64], selection: RoutingContext, sharpness: float = 1.0
) -> NDArray[np.bool_]:
    """Mark the model's own top-k where scores are the softmax of ``sharpness * logits``: bool [T, E].

    Rows without ties are assumed. Sharpness matters only where groups of experts are compared by their scores.
    """
    if selection.num_groups is None:
        place = logits_TE.shape[1] - selection.top_k
        return logits_TE >= np.partition(logits_TE, place, axis=1)[:, place, None]
    odds_TE = (sharpness * (logits_TE - logits_TE.max(axis=1, keepdims=True))).astype(np.float32)
    return metrics.chosen_experts(torch.from_numpy(np.exp(odds_TE, out=odds_TE)), selection).numpy()


def expert_loads(
    noise: Chunks, bias_E: NDArray[np.float64], selection: RoutingContext, sharpness: float = 1.0
) -> NDArray[np.int64]:
    """Count the tokens of every expert under the model's own top-k of noise + bias, on all cores: int64 [E]."""
    groups = selection.num_groups or 1, selection.top_groups or 1

    def loads(noise_TE: NDArray[np.float64]) -> NDArray[np.int64]:
        from moe_ep_bench.kernels.counting import top_k_loads  # Planning does without numba.

        return top_k_loads(np.ascontiguousarray(noise_TE), bias_E, selection.top_k, *groups, float(sharpness))

    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        return np.sum(list(pool.map(loads, noise)), axis=0)
