"""``serve`` beside vLLM itself, on a tiny model and the CPU: ``-m vllm``; ``.ci/run`` makes an environment for it."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path

import pytest
import yaml

from moe_ep_bench.analysis.cases import cases
from moe_ep_bench.analysis.compare import compare_directories
from moe_ep_bench.analysis.store import load
from moe_ep_bench.cli import main
from moe_ep_bench.errors import OK
from moe_ep_bench.serving.server import Server
from moe_ep_bench.timing.statistics import Estimate, NoiseFloor, judge

pytestmark = pytest.mark.vllm
COMMAND = (
    "-m vllm.entrypoints.openai.api_server --model {model} --port {port} --enforce-eager --max-model-len 256 "
    "--gpu-memory-utilization 0.1"
)
ENVIRONMENT = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_NO_USAGE_STATS": "1"}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two comparisons: of servers that were started, and of one that was running, with itself."""
    from run_vllm import tiny

    folder = tmp_path_factory.mktemp("served")
    serve = {
        "model": str(tiny(folder / "qwen", "qwen3_moe")),
        "command": f"{shlex.quote(sys.executable)} {COMMAND}",
        "servers": "together",
        "rounds": 10,
        "requests": 3,
        "alone": 3,
        "concurrency": 2,
    }
    content = {"serve": serve, "prompts": {"num_words": 6, "max_tokens": 8}, "policies": [{"name": "topk"}]}
    (folder / "tiny.yaml").write_text(yaml.safe_dump(content))
    with pytest.MonkeyPatch.context() as patch:
        for name, value in ENVIRONMENT.items():
            patch.setenv(name, value)
        assert main(["serve", str(folder / "tiny.yaml"), "--out", str(folder / "first")]) == OK
        running = Server(serve["command"], serve["model"], os.environ, folder / "log", 600)
        try:
            running.start()
            asked = ["--out", str(folder / "second"), "--url", running.url]
            assert main(["serve", str(folder / "tiny.yaml"), *asked]) == OK
        finally:
            running.stop()
    return folder / "first", folder / "second"


def test_the_floor_of_two_comparisons_holds(served: tuple[Path, Path]) -> None:
    """The server without the plugin is as fast as itself, in another process or in the same."""
    for out in served:
        frame = cases(load(out)).set_index("label")
        again = frame.loc["native again"]
        assert again["speedup_is_interval"]
        assert again["speedup_low"] <= 1.05, "but for what a busy machine does"
        assert again["speedup_high"] >= 1 / 1.05
        floor = NoiseFloor(again["floor_low"], again["floor_high"])
        ends = {name: again[f"speedup_{name}"] for name in ("median", "low", "high", "is_interval")}
        assert judge(Estimate(**ends, num_batches=10, num_launches=1), floor) == "no difference"
    rows = compare_directories(*served).cases.set_index("label")
    assert rows.at["native again", "verdict"] not in ("slower", "faster")


def test_topk_gives_natives_answers_to_requests_sent_alone(served: tuple[Path, Path]) -> None:
    frame = cases(load(served[0])).set_index("label")
    assert frame.loc[["native again", "topk"], "alone_equal_share"].tolist() == [1, 1]
    assert frame.loc[["native again", "topk"], "alone_logprob_difference"].tolist() == [0, 0]
