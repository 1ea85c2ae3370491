"""Experts that are cut into slices: Megatron-Core's expert tensor parallelism behind the all-to-all.

The ranks of a *tensor group* hold the same experts, each a slice of every expert's FFN, and tokens of their own, for
attention is data-parallel. A rank's all-to-all therefore brings it the rows that its own column of ranks sent; an
all-gather in the tensor group gives every slice the rows of all columns, and a reduce-scatter sums the slices' outputs
and hands each column its own back. Megatron-Core does both inside of the permutations. Here they are methods of their
own, so that their time is a transfer's and the waiting before them can be probed; what they do is Megatron-Core's.

Shapes: N = pairs, D = hidden size.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch.distributed as dist
from torch import Tensor

from moe_ep_bench.layer.megatron import (
    MoEAlltoAllTokenDispatcher,
    gather_from_sequence_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)


class TensorGroupDispatcher(MoEAlltoAllTokenDispatcher):
    """Megatron-Core's all-to-all dispatcher, with what moves inside a tensor group in methods of its own."""

    @property
    def meeting_groups(self) -> dict[str, dist.ProcessGroup]:
        """By method, the ranks that meet in it, where these are not all ranks of the layer."""
        if self.tp_size == 1:
            return {}
        across = dict.fromkeys(("token_dispatch", "token_combine"), self.ep_group)
        return across | dict.fromkeys(("gather_rows", "sum_slices"), self.tp_group)

    def gather_rows(self, hidden_ND: Tensor, probs_N: Tensor) -> tuple[Tensor, Tensor]:
        """The rows and weights that all ranks of the tensor group received, one rank after the other."""
        hidden_ND, probs_N = (
            gather_from_sequence_parallel_region(rows, group=self.tp_group, output_split_sizes=self._rows_of_ranks())
            for rows in (hidden_ND, probs_N)
        )
        return hidden_ND, probs_N

    def sum_slices(self, hidden_ND: Tensor) -> Tensor:
        """The sum over slices of the rows that this rank received; in the weights' float32, as Megatron-Core has it."""
        summed_ND = reduce_scatter_to_sequence_parallel_region(
            hidden_ND.to(self.probs.dtype), group=self.tp_group, input_split_sizes=self._rows_of_ranks()
        )
        return summed_ND.to(hidden_ND.dtype)

    def _rows_of_ranks(self) -> list[int]:
        assert self.output_splits_tp is not None
        return self.output_splits_tp.tolist()

    def dispatch_postprocess(self, hidden_ND: Tensor, probs_N: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        hidden_ND, probs_N = self.gather_rows(hidden_ND, probs_N)
        with self._only_permuting():
            return super().dispatch_postprocess(hidden_ND, probs_N)

    def combine_preprocess(self, hidden_ND: Tensor) -> Tensor:
        with self._only_permuting():
            hidden_ND = super().combine_preprocess(hidden_ND)
        return self.sum_slices(hidden_ND)

    @contextlib.contextmanager
    def _only_permuting(self) -> Iterator[None]:
        """Megatron-Core's method without its transfer: only the size of the tensor group asks for one there."""
        size, self.tp_size = self.tp_size, 1
        try:
            yield
        finally:
            self.tp_size = size
