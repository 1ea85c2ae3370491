"""``moe-ep-bench run`` on CPU ranks with tapes for CUDA graphs (``tape_graphs``); started by ``test_graph_run.py``."""

from __future__ import annotations

import sys
from unittest import mock

import numpy as np
import torch
from graph_laws import TopKOnDevice
from tape_graphs import TapeClock, TapeGraph, dense_decode_experts
from torch import Tensor

from moe_ep_bench.cli import main
from moe_ep_bench.layer import backends, parts
from moe_ep_bench.policies import Routing, RoutingContext
from moe_ep_bench.policies.oea import Pruned
from moe_ep_bench.policies.steps import Steps
from moe_ep_bench.policies.topk import TopK
from moe_ep_bench.scopes import timed


def _choose(*asked: str, cuda_graph: bool, **rest: object) -> parts.Parts:
    found = _CHOOSE(*asked, **rest)
    return parts.replace(found, cuda_graph=cuda_graph)


def _unseen(self: Pruned, steps: Steps, scores_TE: Tensor, context: RoutingContext, stats_SE: Tensor | None) -> Routing:
    """A routing that is another one while it is captured."""
    best = scores_TE.numpy() if TapeClock.tape is None else -scores_TE.numpy()
    map_TE = torch.from_numpy(best >= np.sort(best, axis=1)[:, -self.k0][:, None])
    return Routing(map_TE=map_TE, weights_TE=scores_TE * map_TE)


_CHOOSE = parts.Parts.choose

if __name__ == "__main__":
    with (
        mock.patch.object(parts.Parts, "choose", staticmethod(_choose)),
        mock.patch.object(timed, "make_graphs", return_value=TapeGraph),
        mock.patch.object(timed, "clock_for", return_value=TapeClock()),
        mock.patch.object(backends, "decode_experts", dense_decode_experts),
        mock.patch.object(Pruned, "select_by", _unseen),
        mock.patch.object(TopK, "select_by", TopKOnDevice.select_by),
    ):
        sys.exit(main(["run", *sys.argv[1:]]))
