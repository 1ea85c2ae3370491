"""Run vLLM's engine in this process on a tiny model, without the plugin and with it: run_vllm.py RUN FOLDER.

RUN is a family of ``MODELS``, with ``-compiled`` behind it for torch.compile without graphs, ``-pieces`` for the
operation at which graphs are split, on a CPU without graphs, or ``-graphs`` for them (a GPU). Leaves ``answers.json``
(tokens and log-probabilities of prompts, and the keys of torch.compile's cache), ``<run>.npz`` (what the experts of
each layer were given, and the router's logits) and the recordings of the runs.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any
from unittest import mock

os.environ.update(
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_CPU_KVCACHE_SPACE="1",
    VLLM_CPU_OMP_THREADS_BIND="nobind",
    VLLM_NO_USAGE_STATS="1",
)

import numpy as np
import torch
from hf_models import checkpoint
from vllm import LLM, SamplingParams
from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner
from vllm.platforms import current_platform

from moe_ep_bench.serving import POLICY, RECORD
from moe_ep_bench.serving import vllm as plugin

# Experts in sizes that vLLM's CPU kernels take; enough of them that routers in bfloat16 tie.
_SIZES = {"hidden_size": 64, "intermediate_size": 64, "dtype": torch.bfloat16}
MODELS: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"moe_intermediate_size": 32, "num_experts": 64, "num_experts_per_tok": 4, "head_dim": 32},
    "deepseek_v3": {
        "moe_intermediate_size": 32,
        "n_routed_experts": 32,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 32,
        "v_head_dim": 32,
    },
    "gpt_oss": {"num_local_experts": 32, "num_experts_per_tok": 4, "head_dim": 32},
}
PROMPTS = (40, 7, 100, 64)
TOKEN_DROP = {"name": "token_drop", "capacity_factor": 1.0}


def tiny(folder: Path, family: str) -> Path:
    """A checkpoint as the family's own ones are: DeepSeek-V3's name how they choose."""
    path = checkpoint(folder, family, **_SIZES, **MODELS[family])
    if family == "deepseek_v3":
        config = json.loads((path / "config.json").read_text())
        (path / "config.json").write_text(json.dumps(config | {"topk_method": "noaux_tc", "scoring_func": "sigmoid"}))
    return path


def engine(model: Path, how: str, **more: Any) -> LLM:
    options: dict[str, Any] = {"enforce_eager": True}
    if how:
        options = {"compilation_config": {"cudagraph_mode": "PIECEWISE" if how == "graphs" else "NONE"}}
    if how == "pieces":
        options["compilation_config"]["splitting_ops"] = [plugin.OPERATION]
    return LLM(
        **options,
        model=str(model),
        skip_tokenizer_init=True,
        max_model_len=256,
        gpu_memory_utilization=0.1,
        enable_prefix_caching=False,
        **{"distributed_executor_backend": "uni"} | more,
    )


def answers(llm: LLM) -> list[tuple[list[int], list[float]]]:
    random = torch.Generator().manual_seed(0)
    prompts = [{"prompt_token_ids": torch.randint(3, 259, (size,), generator=random).tolist()} for size in PROMPTS]
    asked = SamplingParams(temperature=0, max_tokens=8, detokenize=False, prompt_logprobs=0)
    return [
        (
            list(output.outputs[0].token_ids),
            [
                row[token].logprob
                for row, token in zip(output.prompt_logprobs[1:], output.prompt_token_ids[1:], strict=True)
            ],
        )
        for output in llm.generate(prompts, asked, use_tqdm=False)
    ]


def ask(llm: LLM | None, policy: dict[str, Any] | None, record: Path | None) -> Any:
    """Set the plugin's variables anew; an engine that is there is bound to them."""
    for name, value in ((POLICY, policy and json.dumps(policy)), (RECORD, record and str(record))):
        os.environ.pop(name, None)
        if value:
            os.environ[name] = value
    before = plugin._session
    plugin.register()
    if llm is None:
        return None
    plugin._session.routers, plugin._session.runners = before.routers, before.runners
    worker = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker
    plugin._bind(worker)
    return worker


class Seen:
    """What reaches the experts, and the logits that the router had, by layer."""

    def __init__(self) -> None:
        self.arrays: dict[str, list[np.ndarray]] = {}
        inner = MoERunner._apply_quant_method

        def apply(runner: Any, hidden_states: Any, router_logits: Any, *args: Any, **kwargs: Any) -> Any:
            experts = runner.routed_experts
            modular = experts.forward_modular

            def forward(x: Any, topk_weights: Any, topk_ids: Any, **rest: Any) -> Any:
                for name, value in (("logits", router_logits), ("weights", topk_weights), ("ids", topk_ids)):
                    self.arrays.setdefault(f"{runner.layer_name}/{name}", []).append(value.float().numpy().copy())
                return modular(x=x, topk_weights=topk_weights, topk_ids=topk_ids, **rest)

            experts.forward_modular = forward
            try:
                return inner(runner, hidden_states, router_logits, *args, **kwargs)
            finally:
                del experts.forward_modular

        self.hook = mock.patch.object(MoERunner, "_apply_quant_method", apply)

    def save(self, path: Path) -> None:
        np.savez(path, **{name.replace("/", "|"): np.concatenate(rows) for name, rows in self.arrays.items()})
        self.arrays.clear()


def main(run: str, folder: Path) -> None:
    family, _, how = run.partition("-")
    model = tiny(folder / family, family)
    llm = engine(model, "compiled" if how == "pieces" else how)
    told, keys = {"own": answers(llm)}, [llm.llm_engine.vllm_config.compute_hash()]
    del llm  # its end takes the process groups along
    # A second engine in one process finds these in place; the scan for them stumbles over llvmlite (numba).
    type(current_platform).register_triton_kernel_overrides = classmethod(lambda cls: None)
    seen = Seen()
    if not how:  # which torch.compile would look into
        seen.hook.start()
    ask(None, {"name": "topk"}, folder / "topk")
    llm = engine(model, how)
    assert bool(plugin._session.runners) == (how in ("pieces", "graphs"))
    keys.append(llm.llm_engine.vllm_config.compute_hash())
    seen.arrays.clear()  # warm-up
    counts = {}
    for name, policy in (("topk", {"name": "topk"}), ("token_drop", TOKEN_DROP)):
        worker = ask(llm, policy, folder / name)
        told[name] = answers(llm)
        seen.save(folder / f"{name}.npz")
        counts[name] = plugin._session.step_router.counts_LC.tolist()
        plugin._shutdown(lambda worker: None, worker)
    (folder / "answers.json").write_text(json.dumps({"answers": told, "counts": counts, "keys": keys}))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
