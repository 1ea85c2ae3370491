"""``moe-ep-bench run`` on CPU ranks with tapes for CUDA graphs (``tape_graphs``); started by ``test_graph_run.py``."""

from __future__ import annotations

import sys
from dataclasses import replace
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from graph_laws import TopKOnDevice
from tape_graphs import TapeClock, TapeGraph, dense_decode_experts
from torch import Tensor

from moe_ep_bench.bench import real_ranks
from moe_ep_bench.cli import main
from moe_ep_bench.kernels import PolicyForm
from moe_ep_bench.layer import backend, components
from moe_ep_bench.policies import Routing, RoutingContext
from moe_ep_bench.policies.oea import Pruned
from moe_ep_bench.policies.selection import TopK


def _choose(*asked: str, cuda_graph: bool, **rest: object) -> backend.LayerBackend:
    found = _CHOOSE(*asked, **rest)
    return replace(found, cuda_graph=cuda_graph)


def _unseen(self: Pruned, scores_TE: Tensor, context: RoutingContext, stats_SE: Tensor | None = None) -> Routing:
    """A routing that is another one while it is captured; on the last rank it cannot be, or it weighs otherwise."""
    captures = TapeClock.tape is not None
    if captures and self.k0 == 2 and dist.get_rank() == dist.get_world_size() - 1:
        raise RuntimeError("this rank alone waits")
    best = -scores_TE.numpy() if captures and self.k0 == 3 else scores_TE.numpy()
    map_TE = torch.from_numpy(best >= np.sort(best, axis=1)[:, -self.k0][:, None])
    return Routing(map_TE=map_TE, weights_TE=(1 + captures) * scores_TE * map_TE)


_CHOOSE = backend.LayerBackend.choose

if __name__ == "__main__":
    with (
        mock.patch.object(backend.LayerBackend, "choose", staticmethod(_choose)),
        mock.patch.object(PolicyForm, "runs", return_value="torch"),  # A tape holds torch's operations alone.
        mock.patch.object(real_ranks, "Graph", TapeGraph),
        mock.patch.object(torch.cuda, "graph_pool_handle"),
        mock.patch.object(real_ranks, "clock_for", return_value=TapeClock()),
        mock.patch.object(components, "decode_experts", dense_decode_experts),
        mock.patch.object(Pruned, "select", _unseen),
        mock.patch.object(TopK, "select", TopKOnDevice.route),
    ):
        sys.exit(main(["run", *sys.argv[1:]]))
