"""The plugin in vLLM itself, on tiny models and the CPU: ``-m vllm``; ``.ci/run`` makes an environment for it."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import psutil
import pytest
import torch

from moe_ep_bench.cli import main
from moe_ep_bench.serving import POLICY, RECORD, REFUSAL, backends
from moe_ep_bench.serving import vllm as plugin
from moe_ep_bench.serving.step import COUNTS
from moe_ep_bench.workload.trace import open_trace

pytestmark = pytest.mark.vllm
FAMILIES = ("qwen3_moe", "deepseek_v3", "gpt_oss")
COMPILED, PIECES, GRAPHS = "qwen3_moe-compiled", "deepseek_v3-pieces", "deepseek_v3-graphs"
TESTS = Path(__file__).parent
ENVIRONMENT = {
    **os.environ,
    "PYTHONPATH": os.pathsep.join([str(TESTS.parent), str(TESTS), os.environ.get("PYTHONPATH", "")]),
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
}


class Run(NamedTuple):
    family: str
    folder: Path
    answers: dict[str, Any]
    counts: dict[str, list[list[float]]]
    keys: list[str]

    def seen(self, name: str) -> dict[str, np.ndarray]:
        """By layer: the router's logits and what the experts were given, tokens in the order of their steps."""
        with np.load(self.folder / f"{name}.npz") as arrays:
            return dict(arrays)


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, tuple[Path, subprocess.Popen[bytes]]]]:
    """A process for every run, all at once: most of their time is imports."""
    children = {}
    for run in (*FAMILIES, COMPILED, PIECES, *([GRAPHS] if torch.cuda.is_available() else [])):
        folder = tmp_path_factory.mktemp(run)
        with (folder / "log").open("wb") as log:
            command = [sys.executable, TESTS / "run_vllm.py", run, folder]
            children[run] = folder, subprocess.Popen(command, env=ENVIRONMENT, stdout=log, stderr=log)
    yield children
    for _, child in children.values():
        child.kill()
        child.wait()


@pytest.fixture(scope="module", params=FAMILIES)
def run(request: pytest.FixtureRequest, engines: dict[str, tuple[Path, subprocess.Popen[bytes]]]) -> Run:
    return finished(request.param, *engines[request.param])


def finished(name: str, folder: Path, child: subprocess.Popen[bytes]) -> Run:
    assert child.wait(timeout=600) == 0, (folder / "log").read_text()[-5000:]
    return Run(name.partition("-")[0], folder, **json.loads((folder / "answers.json").read_text()))


def layers_of(seen: dict[str, np.ndarray]) -> list[str]:
    return sorted({name.partition("|")[0] for name in seen})


def test_topk_gives_vllms_own_answers(run: Run) -> None:
    assert run.answers["topk"] == run.answers["own"]
    assert run.answers["token_drop"] != run.answers["own"]


NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU and vLLM's build for it")


@pytest.mark.parametrize("how", [COMPILED, PIECES, pytest.param(GRAPHS, marks=[pytest.mark.gpu, NEEDS_GPU])])
def test_compiled_code_calls_the_plugin(how: str, engines: dict[str, tuple[Path, subprocess.Popen[bytes]]]) -> None:
    """Whole; with each layer an operation at which graphs are split; and with graphs between these."""
    run = finished(how, *engines[how])
    assert run.answers["topk"] == run.answers["own"]
    assert run.answers["token_drop"] != run.answers["own"]
    assert run.keys[0] != run.keys[1], "what was compiled without the plugin is not found again"
    for name in ("topk", "token_drop"):
        generated = sum(len(tokens) - 1 for tokens, _ in run.answers[name])  # the last is never computed
        assert open_trace(run.folder / name / "prefill.safetensors").num_tokens == 211
        assert open_trace(run.folder / name / "decode.safetensors").num_tokens == generated
    counts = {name: pd.DataFrame(rows, columns=COUNTS) for name, rows in run.counts.items()}
    assert counts["topk"]["dropped"].sum() == 0
    assert counts["token_drop"]["dropped"].min() > 0


@pytest.mark.parametrize("name", ["topk", "token_drop"])
def test_a_recording_holds_what_the_routers_chose(run: Run, name: str) -> None:
    """In the first step all prompts, one after the other; so the rows of the recording are those of the kernel."""
    seen, trace = run.seen(name), open_trace(run.folder / name / "prefill.safetensors")
    assert (np.diff(trace.arrival_S) > 0).all(), "each has its time at the engine; one step served all of them first"
    assert trace.num_tokens == 211
    for layer, layer_name in enumerate(layers_of(seen)):
        logits_TE = torch.from_numpy(seen[f"{layer_name}|logits"][:211])
        sigmoid = run.family == "deepseek_v3"
        scores_TE = logits_TE.sigmoid() if sigmoid else logits_TE.softmax(dim=1)
        expected = (scores_TE / scores_TE.sum(dim=1, keepdim=True)).numpy()
        np.testing.assert_allclose(trace.read_full_scores(layer), expected, rtol=2e-6)
        if name == "topk":
            kernel_TK = seen[f"{layer_name}|ids"][:211]
            np.testing.assert_array_equal(np.sort(trace.read_layer(layer)[0], axis=1), np.sort(kernel_TK, axis=1))
    assert trace.metadata["phase"] == "prefill"


def test_generated_tokens_are_recorded_by_request_and_position(run: Run) -> None:
    seen, trace = run.seen("topk"), open_trace(run.folder / "topk" / "decode.safetensors")
    assert np.diff(trace.start_S).tolist() == [7] * 4  # the last of eight is never computed
    # Each step computes a token of every request, in their order.
    for layer, layer_name in enumerate(layers_of(seen)):
        kernel_TK = seen[f"{layer_name}|ids"][211:].reshape(7, 4, -1).swapaxes(0, 1).reshape(28, -1)
        np.testing.assert_array_equal(np.sort(trace.read_layer(layer)[0], axis=1), np.sort(kernel_TK, axis=1))


def test_token_drop_drops_what_route_drops_on_the_recording(run: Run, tmp_path: Path) -> None:
    config = tmp_path / "route.yaml"
    config.write_text(f"""
model: {{hf_config: {run.folder / run.family / "config.json"}}}
workload: {{kind: recorded, trace: {run.folder / "token_drop" / "prefill.safetensors"}, layer: all, tail: recorded,
  num_tokens: 211, num_batches: 1}}
layer: {{ep_size: 1}}
policies: [{{name: token_drop, capacity_factor: 1.0}}]
""")
    assert main(["route", str(config), "--out", str(tmp_path / "out")]) == 0
    parts = [pd.read_parquet(path) for path in (tmp_path / "out" / "routing").glob("*.parquet")]
    rows = pd.concat(parts).query("policy == 'token_drop'").sort_values("layer").reset_index()
    counts = pd.DataFrame(run.counts["token_drop"], columns=COUNTS)
    assert rows["num_tokens"].tolist() == counts["tokens"].tolist() == [211] * len(rows)
    assert rows["num_topk_pairs"].tolist() == counts["pairs"].tolist()
    assert rows["num_dropped_pairs"].tolist() == counts["dropped"].tolist()
    assert min(counts["dropped"]) > 0
    if run.family != "deepseek_v3":  # whose recording holds shares of sigmoid scores
        np.testing.assert_allclose(rows["retained_mass_topk"], counts["mass"] / counts["own_mass"], rtol=1e-4)
    seen = run.seen("token_drop")
    for layer_name, load_E in zip(layers_of(seen), rows["load_E"], strict=True):
        ids_TK, is_held_TK = seen[f"{layer_name}|ids"][:211], seen[f"{layer_name}|weights"][:211] > 0
        assert np.bincount(ids_TK[is_held_TK].astype(int), minlength=len(load_E)).tolist() == load_E.tolist()
        assert len(np.unique(ids_TK)) == (np.asarray(load_E) > 0).sum(), "no expert is read that no token holds"


def test_two_ranks_route_a_steps_tokens_once_and_a_drop_elsewhere_is_no_row(tmp_path: Path) -> None:
    """Expert parallelism in vLLM's own workers, with a slow form of the kernels that skip other ranks' experts."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        variables = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
        variables["MASTER_PORT"] = str(free.getsockname()[1])
    command, children = [sys.executable, TESTS / "run_vllm_ranks.py", tmp_path], []
    try:
        for rank in "01":
            environment = {**ENVIRONMENT, **variables, "RANK": rank, "LOCAL_RANK": rank}
            with (tmp_path / f"log{rank}").open("wb") as log:
                children.append(subprocess.Popen(command, env=environment, stdout=log, stderr=log))
        for child in children:
            assert child.wait(timeout=400) == 0, (tmp_path / "log0").read_text()[-5000:]
    finally:
        for child in children:
            child.kill()
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in "01")
    assert first["topk"]["answers"] == first["own"]["answers"]
    for case in ("topk", "repeated", "elsewhere"):
        assert first[case]["num_ranks"] == 2
        assert {name: first[case][name] for name in ("answers", "counts")} == {
            name: second[case][name] for name in ("answers", "counts")
        }
    assert open_trace(tmp_path / "elsewhere" / "prefill.safetensors").num_tokens == 211, "of rank 0 alone"
    counts = pd.DataFrame(first["repeated"]["counts"], columns=COUNTS)
    assert counts["tokens"].tolist() == [211, 211]
    assert counts["dropped"].min() > 0
    rows = {case: first[case]["rows"] + second[case]["rows"] for case in first}
    assert rows["topk"] == rows["own"] == rows["repeated"] == 2 * 4 * (211 + 28)
    assert rows["elsewhere"] == rows["repeated"] - counts["dropped"].sum()
    assert first["elsewhere"]["answers"] == first["repeated"]["answers"]
    assert "computes every slot" in first["repeated"]["backend"]
    assert "skips the rows of dropped pairs" in first["elsewhere"]["backend"]


# ---- vLLM's own rules, without an engine -----------------------------------------------------------------------------


class Replayed(torch.nn.Module):
    """A piece between two operations as a CUDA graph is: it reads and writes where it did when it was captured."""

    def __init__(self, piece: torch.nn.Module) -> None:
        super().__init__()
        self.piece = piece
        self.read: list[int] = []
        self.wrote: Any = None

    def forward(self, *args: Any) -> Any:
        read = [one.data_ptr() for one in args if isinstance(one, torch.Tensor)]
        results = self.piece(*args)
        if self.wrote is None:
            self.read, self.wrote = read, results
        assert read == self.read, "vLLM's own check of what is replayed"
        for place, result in zip(self.wrote, results, strict=True):
            place.copy_(result)
        return self.wrote


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("has_shared", [False, True], ids=["routed", "with a shared expert"])
@pytest.mark.parametrize("operation", ["ours", "vLLM's"])
def test_graphs_are_split_at_a_layer_and_replayed_with_the_same_addresses(
    operation: str, has_shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.compilation.backends import split_graph
    from vllm.config import VllmConfig, set_current_vllm_config

    plugin.define_operations()
    monkeypatch.setattr(plugin, "_session", plugin.Session())
    vllm_config = VllmConfig()
    vllm_config.compilation_config.splitting_ops = [plugin.OPERATION] if operation == "ours" else []
    kept: list[Any] = []  # so that no address comes twice

    def computed(hidden: torch.Tensor, *_: Any) -> Any:
        kept.append((2 * hidden, 3 * hidden))
        return kept[-1] if has_shared else kept[-1][1]

    def like(hidden: torch.Tensor, *_: Any) -> Any:
        return (torch.empty_like(hidden), torch.empty_like(hidden)) if has_shared else torch.empty_like(hidden)

    # vLLM's operation allocates what it returns.
    returns, name = "(Tensor, Tensor)" if has_shared else "Tensor", f"moe_ep_bench_test::fresh{has_shared}"
    fresh = torch.library.custom_op(name, computed, mutates_args=(), schema=f"(Tensor hidden) -> {returns}")
    fresh.register_fake(like)

    def entry(hidden: torch.Tensor, *_: Any) -> Any:
        return fresh(hidden)

    runner = SimpleNamespace(shared_experts=1 if has_shared else None, _forward_impl=computed)
    with set_current_vllm_config(vllm_config):
        forward = plugin._select_forward(lambda _: entry, runner)
    weight = torch.rand(6, 6)

    def model(hidden: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            found = forward(hidden @ weight, hidden, None, None, None, 0)
            hidden = torch.tanh(sum(found) if has_shared else found)
        return hidden

    graphs: list[Any] = []

    def backend(graph: Any, examples: Any) -> Any:
        split, items = split_graph(graph, [plugin.OPERATION, name])
        graphs.append([item.is_splitting_graph for item in items])
        for item in items:
            if not item.is_splitting_graph:
                setattr(split, item.submod_name, Replayed(getattr(split, item.submod_name)))
        return split

    compiled, buffer = torch.compile(model, backend=backend, fullgraph=True), torch.empty(4, 6)
    with contextlib.nullcontext() if operation == "ours" else pytest.raises(AssertionError, match="own check"):
        for seed in range(3):
            buffer.copy_(torch.rand(4, 6, generator=torch.Generator().manual_seed(seed)))
            torch.testing.assert_close(compiled(buffer), model(buffer))
    assert graphs == [[False, True, False, True, False]]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("placement", ["linear", "round_robin"])
@pytest.mark.parametrize(
    ("scales", "skips"),
    [
        ({}, True),
        ({"quant_dtype": torch.int8}, False),
        ({"quant_dtype": torch.int8, "per_act_token_quant": True}, True),
        ({"quant_dtype": torch.float8_e4m3fn, "a2_scale": torch.ones(1)}, True),
        ({"quant_dtype": torch.float8_e4m3fn, "block_shape": [2, 2]}, True),
    ],
    ids=["unquantized", "dynamic per tensor", "dynamic per token", "static", "by blocks"],
)
def test_vllm_skips_exactly_where_we_say_so(
    scales: dict[str, Any], skips: bool, placement: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM's own function, up to where it has decided which rows there are."""
    from vllm.model_executor.layers.fused_moe.config import FusedMoEQuantConfig
    from vllm.model_executor.layers.fused_moe.expert_map_manager import determine_expert_map
    from vllm.model_executor.layers.fused_moe.experts import triton_moe
    from vllm.model_executor.layers.fused_moe.prepare_finalize.no_dp_ep import MoEPrepareAndFinalizeNoDPEPModular

    class DecidedError(Exception):
        pass

    def decided(topk_ids: torch.Tensor, *args: Any, ignore_invalid_experts: bool, **_: Any) -> None:
        raise DecidedError(ignore_invalid_experts)

    monkeypatch.setattr(triton_moe, "_prepare_expert_assignment", decided)
    monkeypatch.setattr(triton_moe, "tl", SimpleNamespace(float32="float32"))  # Triton itself is not there
    monkeypatch.setattr(triton_moe, "try_get_optimal_moe_config", lambda *args, **_: {})
    experts = object.__new__(triton_moe.TritonExperts)
    experts.quant_config, experts._lora_context = FusedMoEQuantConfig.make(**scales), None
    experts.quantization_emulation = False
    kernel = SimpleNamespace(fused_experts=experts, prepare_finalize=MoEPrepareAndFinalizeNoDPEPModular())
    config = SimpleNamespace(device_config=SimpleNamespace(device_type="cuda"), lora_config=None)
    for rank in range(2):
        num_local, map_E, _ = determine_expert_map(2, rank, 8, placement)
        told = SimpleNamespace(quant_method=SimpleNamespace(moe_kernel=kernel), expert_map=map_E)
        backend = backends.backend_of(SimpleNamespace(routed_experts=told), config)
        assert (backend.does == "skips") == skips
        assert backend.elsewhere is None or map_E[backend.elsewhere] == -1
        hidden, first, second = torch.zeros(3, 4), torch.zeros(num_local, 8, 4), torch.zeros(num_local, 4, 4)
        ids_TK = torch.zeros(3, 2, dtype=torch.int32)
        with pytest.raises(DecidedError) as found:
            experts.apply(
                output=hidden,
                hidden_states=hidden,
                w1=first,
                w2=second,
                topk_weights=torch.ones(3, 2),
                topk_ids=ids_TK,
                activation=triton_moe.MoEActivation.SILU,
                global_num_experts=8,
                expert_map=map_E,
                a1q_scale=None,
                a2_scale=experts.a2_scale,
                workspace13=torch.zeros(1000),
                workspace2=torch.zeros(1000),
                expert_tokens_meta=None,
                apply_router_weight_on_input=False,
            )
        assert found.value.args[0] == skips


# ---- the server ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from run_vllm import tiny

    return tiny(tmp_path_factory.mktemp("model") / "qwen", "qwen3_moe")


def server(model: Path, port: int, *options: str, **variables: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
    options = ("--port", str(port), "--gpu-memory-utilization", "0.1", *options)
    return subprocess.Popen(
        [*command, *options],
        env={**ENVIRONMENT, **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


EAGER = ("--enforce-eager", "--max-model-len", "128")


@contextlib.contextmanager
def served(model: Path, *options: str, **variables: str) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A server that answers, and its port; none is left running."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    child = server(model, port, *options, **variables)
    try:
        deadline = time.monotonic() + 400
        while time.monotonic() < deadline and child.poll() is None:
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5).close()
                break
            except OSError:
                time.sleep(0.5)
        yield child, port
    finally:
        if child.poll() is None:
            child.kill()
            print(child.communicate()[0][-5000:])


def wait_until(holds: Callable[[], object]) -> None:
    deadline = time.monotonic() + 120
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.5)


def is_gone(process: psutil.Process) -> bool:
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def completion(model: Path, max_tokens: int, **asked: Any) -> tuple[bytes, dict[str, str]]:
    """Body and headers of a request whose prompt has nine words."""
    asked = {"model": str(model), "prompt": "the quick brown fox jumps over the lazy dog", "temperature": 0} | asked
    body = json.dumps(asked | {"max_tokens": max_tokens, "ignore_eos": True}).encode()
    return body, {"Content-Type": "application/json"}


def complete(model: Path, port: int, max_tokens: int, **asked: Any) -> dict[str, Any]:
    """The answer to such a request."""
    request = urllib.request.Request(f"http://127.0.0.1:{port}/v1/completions", *completion(model, max_tokens, **asked))
    with urllib.request.urlopen(request, timeout=300) as response:
        return json.load(response)


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        ("broken.py:Mine", "name: cannot load "),
        (
            '{"name": "expanded_drop", "capacity_factor": 1, "num_candidates": 2}',
            "expanded_drop: may give a token 6 experts, and vLLM's kernels have 4 slots",
        ),
    ],
    ids=["a broken file", "more experts than slots"],
)
def test_a_policy_that_cannot_serve_ends_the_start_with_one_line(
    model: Path, tmp_path: Path, policy: str, expected: str
) -> None:
    if policy.startswith("broken"):
        (tmp_path / "broken.py").write_text("class Mine(:\n")
        policy = json.dumps({"name": f"{tmp_path / policy}"})
    refusal = tmp_path / "refusal"
    line = refused(model, **{POLICY: policy, REFUSAL: str(refusal)})
    assert expected in line
    assert line == f"moe-ep-bench: {refusal.read_text()}"


def refused(model: Path, **variables: str) -> str:
    """The line with which a server ends its start."""
    child = server(model, 0, *EAGER, **variables)
    try:
        text, _ = child.communicate(timeout=300)
    finally:
        child.kill()
    lines = [line for line in text.splitlines() if line.startswith("moe-ep-bench: ")]
    assert child.returncode == 2
    assert len(lines) == 1
    assert lines[0] == text.splitlines()[-1]
    assert "Traceback" not in text
    return lines[0]


def test_a_folder_that_cannot_be_written_ends_the_start_with_one_line(model: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    folder = tmp_path / "file" / "below"
    assert f"{RECORD} {folder}: cannot write" in refused(model, **{RECORD: str(folder)})


def test_a_server_records_and_drops_until_it_is_stopped(model: Path, tmp_path: Path) -> None:
    policy = json.dumps({"name": "token_drop", "capacity_factor": 1.0, "acts_in": ["prefill", "decode"]})
    with served(model, *EAGER, **{POLICY: policy, RECORD: str(tmp_path / "recorded")}) as (child, port):
        ready = time.time()
        for _ in range(2):
            usage = complete(model, port, 6)["usage"]
        ended = time.time()
        child.send_signal(signal.SIGTERM)
        text, _ = child.communicate(timeout=200)
    assert "serving under token_drop capacity_factor=1.0 in prefill and decode, 2 MoE layers, top-4 of 64" in text
    assert "dropping saves no time here" in text
    assert "all layers: " in text
    prefill = open_trace(tmp_path / "recorded" / "prefill.safetensors")
    decode = open_trace(tmp_path / "recorded" / "decode.safetensors")
    assert (prefill.num_tokens, decode.num_tokens) == (2 * usage["prompt_tokens"], 2 * 5)
    assert prefill.metadata["note"] == "served under token_drop capacity_factor=1.0"
    assert sorted(path.name for path in (tmp_path / "recorded").iterdir()) == [
        "decode.safetensors",
        "prefill.safetensors",
    ]
    first, second = prefill.arrival_S
    assert 0 < first < second
    assert second - first < ended - ready, "arrivals are those at the server"


def test_a_server_that_kills_its_worker_loses_the_last_part_alone(model: Path, tmp_path: Path) -> None:
    """One request that needs longer than the server waits, after a minute of answers.

    Its client leaves once the worker is gone: vLLM itself waits for it else, without the plugin too.
    """
    recorded = tmp_path / "recorded"
    options = ("--enforce-eager", "--max-model-len", "32768", "--shutdown-timeout", "1")
    with served(model, *options, **{RECORD: str(recorded)}) as (child, port):
        usage = complete(model, port, 6)["usage"]
        workers = [
            one for one in psutil.Process(child.pid).children(recursive=True) if "Worker" in " ".join(one.cmdline())
        ]
        assert workers
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port)) as client:
            client.request("POST", "/v1/completions", *completion(model, 32000))
            wait_until(lambda: list(recorded.glob("decode.safetensors/0*")))
            child.send_signal(signal.SIGTERM)
            wait_until(lambda: all(map(is_gone, workers)))
        text, _ = child.communicate(timeout=120)
    (error,) = [line for line in text.splitlines() if "moe-ep-bench: " in line and "ERROR" in line]
    assert f"the last part of {recorded} is lost, at most a minute" in error
    prefill, decode = (open_trace(recorded / f"{stage}.safetensors") for stage in ("prefill", "decode"))
    assert prefill.num_tokens == 2 * usage["prompt_tokens"]
    assert decode.num_tokens > 5 + 100
    assert (recorded / "unfinished").exists()
