"""What do recording and `topk` cost a step of a server? vLLM's engine on a small model, with the plugin and without.

    python benchmarks/recording.py [--experts 128] [--hidden 512] [--layers 4] [--rounds 30]

Runs where vLLM does (tests/test_vllm.py). One engine serves the same prompts again and again, in turn without the
plugin, recording, and under `topk`, so that all three meet the same noise. Timed is the worker's step; steps that
differ in size are compared with those of their own size. The ratio is the median over rounds of a round's own ratio, by
the clock and by the CPU seconds of the whole process, which on a shared machine with ``OMP_NUM_THREADS=1`` say more.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.update(
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_CPU_KVCACHE_SPACE="1",
    VLLM_NO_USAGE_STATS="1",
    VLLM_LOGGING_LEVEL="ERROR",
)

import numpy as np
import torch
from vllm import LLM, SamplingParams

from moe_ep_bench.serving import POLICY, RECORD
from moe_ep_bench.serving import vllm as plugin

CASES = ("bare", "recording", "topk")
CLOCKS = {"wall": time.perf_counter, "CPU": time.process_time}


def checkpoint(folder: Path, options: argparse.Namespace) -> Path:
    """A Qwen3-MoE with random weights."""
    from transformers import AutoModelForCausalLM, Qwen3MoeConfig

    config = Qwen3MoeConfig(
        vocab_size=512,
        hidden_size=options.hidden,
        intermediate_size=options.hidden,
        moe_intermediate_size=options.hidden // 2,
        num_hidden_layers=options.layers,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=64,
        num_experts=options.experts,
        num_experts_per_tok=8,
        norm_topk_prob=True,
        initializer_range=0.1,
    )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    return folder


class Timed:
    """An engine whose steps are clocked, with the plugin taken out and put back between calls."""

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        self.folder, self.options = folder, options
        os.environ[POLICY] = json.dumps({"name": "topk"})
        plugin.register()
        self.llm = LLM(
            model=str(checkpoint(folder / "model", options)),
            skip_tokenizer_init=True,
            enforce_eager=True,
            max_model_len=2048,
            max_num_batched_tokens=options.tokens,
            gpu_memory_utilization=0.1,
            distributed_executor_backend="uni",
            enable_prefix_caching=False,
        )
        self.worker = self.llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker
        context = self.worker.vllm_config.compilation_config.static_forward_context
        names = self.worker.vllm_config.compilation_config.static_all_moe_layers
        self.routers = [context[name].router for name in names]
        self.hooked = [type(router) for router in self.routers]
        self.random = torch.Generator().manual_seed(0)

    def bind(self, case: str, number: int) -> None:
        is_bare = case == "bare"
        for router, hooked in zip(self.routers, self.hooked, strict=True):
            router.__class__ = hooked.__bases__[0] if is_bare else hooked
        for name in (POLICY, RECORD):
            os.environ.pop(name, None)
        if case == "topk":
            os.environ[POLICY] = json.dumps({"name": "topk"})
        if case == "recording":
            os.environ[RECORD] = str(self.folder / f"recorded{number}")
        routers = plugin._session.routers
        plugin.register()
        plugin._session.routers = routers
        if not is_bare:
            plugin._bind(self.worker)

    def seconds(self) -> dict[int, dict[str, float]]:
        """Serve the prompts once: median seconds of steps by their number of tokens and by clock."""
        prompts = [
            {"prompt_token_ids": torch.randint(3, 500, (self.options.tokens // 8,), generator=self.random).tolist()}
            for _ in range(8)
        ]
        inner = type(self.worker).execute_model
        found: dict[int, list[list[float]]] = {}

        def execute(worker: Any, scheduled: Any, *args: Any, **kwargs: Any) -> Any:
            began = [clock() for clock in CLOCKS.values()]
            result = inner(worker, scheduled, *args, **kwargs)
            took = [clock() - start for clock, start in zip(CLOCKS.values(), began, strict=True)]
            found.setdefault(scheduled.total_num_scheduled_tokens, []).append(took)
            return result

        type(self.worker).execute_model = execute
        try:
            self.llm.generate(prompts, SamplingParams(temperature=0, max_tokens=9, ignore_eos=True), use_tqdm=False)
        finally:
            type(self.worker).execute_model = inner
        return {
            size: dict(zip(CLOCKS, np.median(values, axis=0).tolist(), strict=True))
            for size, values in found.items()
            if size
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, value in (("experts", 128), ("hidden", 512), ("layers", 4), ("tokens", 2048), ("rounds", 30)):
        parser.add_argument(f"--{name}", type=int, default=value, metavar="N", help="(%(default)s)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        timed, rounds = Timed(options, Path(folder)), []
        for number in range(options.rounds + 2):
            order = [CASES[(place + number) % len(CASES)] for place in range(len(CASES))]
            found = {}
            for case in order:
                timed.bind(case, number)
                found[case] = timed.seconds()
                if case != "bare":
                    plugin._shutdown(lambda worker: None, timed.worker)
            rounds.append(found)
    for size in sorted(rounds[-1]["bare"], reverse=True):
        kept = [found for found in rounds[2:] if all(size in found[case] for case in CASES)]
        for clock in CLOCKS:
            bare = np.array([found["bare"][size][clock] for found in kept])
            words = [f"step of {size:,} tokens, {clock}: {np.median(bare) * 1e3:.2f} ms bare"]
            for case in CASES[1:]:
                ratios = np.array([found[case][size][clock] for found in kept]) / bare
                low, middle, high = np.percentile(ratios, [25, 50, 75])
                words.append(f"{case} {middle:.3f} of it ({low:.3f} to {high:.3f})")
            print("; ".join(words))


if __name__ == "__main__":
    main()
