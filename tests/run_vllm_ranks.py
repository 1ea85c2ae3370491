"""One of two expert-parallel ranks of vLLM, on a CPU: run_vllm_ranks.py FOLDER, under torchrun's variables.

vLLM's CPU kernels know no map of experts, and fall over the ids of other ranks. In their place stands the slow form of
what its GPU kernels do: pairs whose expert is on another rank are no rows. Leaves ``<rank>.json``: answers, rows that
were computed, and counts, by how dropped pairs were marked.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from run_vllm import TOKEN_DROP, answers, ask, engine, plugin, tiny
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts

from moe_ep_bench.serving import backends

num_rows = 0


def compute(
    self: Any,
    output: Any,
    hidden_states: Any,
    w1: Any,
    w2: Any,
    topk_weights: Any,
    topk_ids: Any,
    *args: Any,
    **more: Any,
) -> None:
    """Sum over a token's slots, of experts of this rank alone."""
    global num_rows
    expert_map_E, total_TD = more["expert_map"], torch.zeros(hidden_states.shape)
    place_TK = topk_ids.long() if expert_map_E is None else expert_map_E[topk_ids.long()]
    for expert in place_TK[place_TK >= 0].unique():
        token, slot = (place_TK == expert).nonzero(as_tuple=True)
        gate, up = (hidden_states[token].float() @ w1[expert].float().T).chunk(2, dim=1)
        rows = (torch.nn.functional.silu(gate) * up) @ w2[expert].float().T
        total_TD.index_add_(0, token, rows * topk_weights[token, slot].float().unsqueeze(1))
        num_rows += len(token)
    output.copy_(total_TD)


def skipping(runner: Any, config: Any) -> backends.Backend:
    """What ``backend_of`` says of TritonExperts."""
    return backends.Backend("Slow", "skips", elsewhere=int((runner.routed_experts.expert_map < 0).nonzero()[0]))


def main(folder: Path) -> None:
    global num_rows
    CPUUnquantizedExperts.process_weights_after_loading = lambda self, layer: None
    CPUUnquantizedExperts.apply = compute
    options = {"tensor_parallel_size": 2, "enable_expert_parallel": True}
    options |= {"distributed_executor_backend": "external_launcher"}
    ask(None, {"name": "topk"}, None)
    llm, read, found = engine(tiny(folder / os.environ["RANK"], "qwen3_moe"), "", **options), backends.backend_of, {}
    for case, policy, backend_of in (
        ("topk", {"name": "topk"}, read),
        ("repeated", TOKEN_DROP, read),
        ("elsewhere", TOKEN_DROP, skipping),
    ):
        backends.backend_of = backend_of
        ask(llm, policy, folder / case)
        num_rows = 0
        told = answers(llm)
        found[case] = {"answers": told, "rows": num_rows, "counts": plugin._session.step_router.counts_LC.tolist()}
        found[case] |= {"backend": plugin._session.backend, "num_ranks": plugin._session.step_router.num_ranks}
        plugin._shutdown(lambda worker: None, None)
    plugin._session.asked = None  # the routers stay, and pass on what vLLM chose
    num_rows = 0
    found["own"] = {"answers": answers(llm), "rows": num_rows}
    (folder / f"{os.environ['RANK']}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
