"""The hot routing steps by numba's loops: compiled forms of ``policies.steps.Steps``, which return the same bits.

``HostSteps`` are for scores on the host, ``DeviceSteps`` for those on a GPU, where torch's operations are parallel but
the sequential load-aware rule is not.

Shapes: T = tokens, E = experts, K = top_k; a "row" is whatever competes, N its length.
"""

from __future__ import annotations

import functools
import itertools
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from moe_ep_bench.kernels import row_selection
from moe_ep_bench.policies.steps import LeastLoaded, Steps, lowest

Result = TypeVar("Result")

# Winners are found by comparing candidates with each other, which is for few of them.
_MOST_WINNERS = 64
# A thread costs some tens of microseconds; a row, a fraction of one.
_ROWS_PER_THREAD = 2048
# Sums of all ranks of which is known what follows from them: of a few policies and micro-batches.
_MOST_KNOWN = 16


class DeviceSteps(Steps):
    """torch on the device; the sequential rule on the host, with a copy there and back."""

    def least_loaded(
        self, scores_TE: Tensor, keys_TE: Tensor, load_E: Tensor, rule: LeastLoaded, **rows: Tensor | None
    ) -> Tensor:
        return HostSteps().least_loaded(scores_TE, keys_TE, load_E, rule, **rows).to(scores_TE.device)


class HostSteps(Steps):
    """numba's loops over torch's memory."""

    def best_per_row(self, keys_RN: Tensor, count: int, columns_N: Tensor | None = None) -> Tensor:
        num_rows, num_columns = keys_RN.shape
        if count >= num_columns and columns_N is None:
            return torch.ones(keys_RN.shape, dtype=torch.bool)
        if count > _MOST_WINNERS:
            return super().best_per_row(keys_RN, count, columns_N)
        columns = np.arange(num_columns) if columns_N is None else np.flatnonzero(_array(columns_N))
        map_RN = torch.zeros(keys_RN.shape, dtype=torch.bool)
        _in_slices(num_rows, row_selection.best_per_row, _array(keys_RN), columns, count, _array(map_RN))
        return map_RN

    def marked_first(self, keys_TE: Tensor, mark_TE: Tensor) -> Tensor:
        if keys_TE.dtype != torch.float32 or mark_TE.shape != keys_TE.shape:
            return super().marked_first(keys_TE, mark_TE)
        first_TE = torch.empty(keys_TE.shape, dtype=torch.int64)
        arrays = _array(keys_TE).view(np.int32), _array(mark_TE).view(np.uint8), _array(first_TE)
        _in_slices(len(keys_TE), row_selection.marked_first, *arrays)
        return first_TE

    def group_values(self, keys_TE: Tensor, num_groups: int, count: int) -> Tensor:
        if count > 2 or keys_TE.dtype != torch.float32:  # Of more, torch may add in another order.
            return super().group_values(keys_TE, num_groups, count)
        value_TG = torch.empty(len(keys_TE), num_groups)
        _in_slices(len(keys_TE), row_selection.group_values, _array(keys_TE), count, _array(value_TG))
        return value_TG

    def fewest_reaching(self, scores_TE: Tensor, keys_TE: Tensor, count: int, share: float) -> Tensor:
        map_TE = torch.zeros(scores_TE.shape, dtype=torch.bool)
        columns = np.arange(scores_TE.shape[1])
        arrays = _array(scores_TE), _array(keys_TE), columns, count, share, _array(map_TE)
        _in_slices(len(scores_TE), row_selection.fewest_reaching, *arrays)
        return map_TE

    def load_of(self, map_TE: Tensor) -> Tensor:
        return torch.from_numpy(_load_of(map_TE)).double()

    def histogram(self, scores_TE: Tensor, map_TE: Tensor) -> Tensor:
        scores = _array(scores_TE)
        arrays = scores.view(np.int32), scores, _array(map_TE)
        return torch.from_numpy(np.sum(_in_slices(len(scores), row_selection.histogram, *arrays), axis=0))

    def without_cells(self, scores_TE: Tensor, map_TE: Tensor, dropped_SE: Tensor) -> Tensor:
        kept_TE = torch.zeros(map_TE.shape, dtype=torch.bool)
        bits = _array(scores_TE).view(np.int32)
        arrays = bits, _array(map_TE), _array(dropped_SE), _array(kept_TE)
        _in_slices(len(bits), row_selection.without_cells, *arrays)
        return kept_TE

    def by_request(
        self, scores_TE: Tensor, wanted_TE: Tensor, request_T: Tensor, num_requests: int
    ) -> tuple[Tensor, Tensor]:
        wanted_QE = torch.zeros([num_requests, scores_TE.shape[1]], dtype=torch.bool)
        sums_QE = torch.zeros(wanted_QE.shape, dtype=torch.float64)
        arrays = map(_array, (scores_TE, wanted_TE, request_T, wanted_QE, sums_QE))
        # By requests and not by tokens: a sum in another order would have other bits.
        _in_threads(num_requests, scores_TE.shape[0] // _ROWS_PER_THREAD, row_selection.by_request, *arrays)
        return wanted_QE, sums_QE

    def weights(
        self, scores_TE: Tensor, map_TE: Tensor, norm_map_TE: Tensor | None, width: int, scale: float
    ) -> Tensor:
        num_tokens = scores_TE.shape[0]
        total_T = np.empty(0, np.float32)
        if norm_map_TE is not None:
            values_TW = torch.empty([num_tokens, width])
            arrays = _array(scores_TE), _array(norm_map_TE), _array(values_TW)
            _in_slices(num_tokens, row_selection.marked_descending, *arrays)
            # torch adds them, in whatever order it adds what its own top-k returned.
            total_T = _array(values_TW.sum(dim=1))
        weights_TE = torch.empty(scores_TE.shape)
        arrays = _array(scores_TE), _array(map_TE), total_T, np.float32(scale), _array(weights_TE)
        _in_slices(num_tokens, row_selection.weights, *arrays)
        return weights_TE

    def within_capacity(self, candidates_TE: Tensor, keys_TE: Tensor, capacity: int, num_shared: int) -> Tensor:
        load_G = _load_of(candidates_TE).reshape(-1, num_shared).sum(axis=1)
        if load_G.max(initial=0) <= capacity:
            return candidates_TE
        map_TE = torch.zeros(candidates_TE.shape, dtype=torch.bool)
        if capacity > 0:
            keys = _array(keys_TE)
            least = keys.dtype.type(lowest(keys_TE))
            candidates = _array(candidates_TE).view(np.uint8)
            row_selection.within_capacity(candidates, keys, load_G, capacity, num_shared, least, _array(map_TE))
        return map_TE

    def least_loaded(
        self,
        scores_TE: Tensor,
        keys_TE: Tensor,
        load_E: Tensor,
        rule: LeastLoaded,
        *,
        valid_T: Tensor | None = None,
        random_TE: Tensor | None = None,
    ) -> Tensor:
        map_TE = torch.zeros(scores_TE.shape, dtype=torch.bool)
        valid = np.empty(0, np.bool_) if valid_T is None else _array(valid_T)
        random = np.empty((0, 0), np.float32) if random_TE is None else _array(random_TE)
        arrays = _array(scores_TE), _array(keys_TE), valid, random, _array(load_E).copy(), _array(map_TE)
        row_selection.least_loaded(*arrays, rule.top_k, float(rule.eps_high), float(rule.t_fix), rule.pool_size)
        return map_TE


class SharedSteps(HostSteps):
    """Steps of many virtual ranks' routing, for the pairs alone: nobody reads weights, and nothing is timed.

    What ranks work out alike from the same sums is worked out once.
    """

    def __init__(self) -> None:
        self._lock, self._nothing = threading.Lock(), torch.zeros(())
        self._known: dict[tuple[object, int, int], tuple[Tensor, Tensor]] = {}

    def weights(
        self, scores_TE: Tensor, map_TE: Tensor, norm_map_TE: Tensor | None, width: int, scale: float
    ) -> Tensor:
        return self._nothing.expand(scores_TE.shape)

    def of_all_ranks(self, function: Callable[[Tensor, int], Tensor], stats_SE: Tensor, num_ranks: int) -> Tensor:
        key = function, num_ranks, id(stats_SE)  # the very tensor, which is kept as long
        with self._lock:
            if key not in self._known:
                if len(self._known) >= _MOST_KNOWN:
                    del self._known[next(iter(self._known))]
                self._known[key] = stats_SE, function(stats_SE, num_ranks)
            return self._known[key][1]


def _load_of(map_TE: Tensor) -> np.ndarray:
    """Marks of every column: int64 [E]."""
    return np.sum(_in_slices(map_TE.shape[0], row_selection.load_of, _array(map_TE)), axis=0)


def _in_slices(num_rows: int, kernel: Callable[..., Result], *arguments: object) -> list[Result]:
    """Run a kernel over all rows, on as many threads as torch would use and the rows are worth."""
    return _in_threads(num_rows, num_rows // _ROWS_PER_THREAD, kernel, *arguments)


def _in_threads(length: int, most: int, kernel: Callable[..., Result], *arguments: object) -> list[Result]:
    """Run a kernel from 0 to ``length`` in as many parts as torch would use threads, but at most ``most``."""
    num_slices = min(torch.get_num_threads(), most)
    if num_slices < 2:
        return [kernel(*arguments, 0, length)]
    bounds = [length * part // num_slices for part in range(num_slices + 1)]
    parts = [_threads().submit(kernel, *arguments, first, last) for first, last in itertools.pairwise(bounds)]
    return [part.result() for part in parts]


@functools.cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(os.cpu_count(), thread_name_prefix="routing")


def _array(tensor: Tensor) -> np.ndarray:
    """The tensor's memory where it is on the host and in order, else a copy that is."""
    if tensor.is_cpu and tensor.is_contiguous() and not tensor.requires_grad:
        return tensor.numpy()
    return tensor.detach().cpu().contiguous().numpy()
