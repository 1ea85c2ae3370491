"""Every command line of README.md and docs/ runs as it is printed, at small sizes.

Commands run in a folder that holds what pages name: configs, results, recordings and a checkpoint, all small.
A new command of a page runs too, unless it is listed below with the reason why it cannot.
"""

from __future__ import annotations

import argparse
import inspect
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from test_docs import PAGES, ROOT, THIRTEEN, code, commands
from test_importers import esft, sglang_response, vllm_response, written
from trace_files import write_trace

from moe_ep_bench import __version__
from moe_ep_bench.cli import COMMANDS

TWO_POLICIES = "policies=[{name: topk}, {name: token_drop, capacity_factor: 1.0}]"
BRIEF = "workload.num_batches=2 measure.iterations=1 measure.breakdown_iterations=1 measure.warmup=1"
NARROW = f"model.scale=0.03125 {BRIEF}"
ON_TWO = "layer.ep_size=2 workload.tokens_per_rank=64 workload.sequence_length=32"
# What --set makes of a config, in words and further values: fewer tokens, narrower layers, fewer cases.
SMALL = {
    "mine": ("workload.num_tokens=256 workload.num_batches=2 emulate.replication=[]", TWO_POLICIES),
    "quickstart": (f"layer.ep_size=2 workload.tokens_per_rank=64 {NARROW}", TWO_POLICIES),
    "whatif-skew": (
        "workload.tokens_per_rank=64 sweep.workload.peak_load=[2,4] workload.num_batches=2",
        "policies=[{name: token_drop, capacity_factor: [1.0, 2.0]}]",
    ),
    "decode": (f"sweep.workload.num_tokens=[4] {NARROW}", TWO_POLICIES),
    "model-prefill": (f"emulate.device=h100-sxm whole.num_layers=2 {ON_TWO} {BRIEF}", TWO_POLICIES),
    "route-laser": ("workload.layer=2 workload.num_tokens=64 workload.num_batches=2", "policies=[{name: load_only}]"),
    "validate-cpu": (f"workload.num_tokens=64 {NARROW}", TWO_POLICIES),
    "capacity-figure4": (
        f"{ON_TWO} {NARROW} sweep.model.preset=[olmoe-1b-7b] sweep.workload.skew=[mixed] sweep.workload.seed=[1]",
    ),
    "xshare-table3": ("sweep.workload.seed=[1] workload.num_batches=2",),
    "whole-capacity": (
        f"{ON_TWO} workload.num_batches=2 whole.num_layers=2 sweep.model.preset=[olmoe-1b-7b] "
        "sweep.workload.skew=[mixed]",
    ),
    "quality-capacity": (
        "layer.ep_size=2 text.num_sequences=2 text.sequence_length=8 text.batch_size=2",
        TWO_POLICIES,
    ),
    "quality-small": ("text.num_sequences=8 text.sequence_length=16", TWO_POLICIES),
}
# What stands for the words that a page leaves to the reader.
STAND_INS = {
    "CONFIG": "configs/quickstart.yaml",
    "FILE": "recordings/olmoe.safetensors",
    "DIR": "somewhere",
    "MODEL": "models/OLMoE-1B-7B",
    **dict.fromkeys(("4096", "16384"), "256"),  # tokens of advise --model
}
OWN_STAND_INS = {
    "trace record MODEL --text FILE": {"FILE": "text.txt"},
    "trace record MODEL --text FILE --similarity recordings/alike.safetensors "
    "--sequence-length 128 --num-sequences 400": {
        "FILE": "text.txt",
        "128": "16",
        "400": "4",
    },
    "advise --model config.json --ep 8 --tokens 16384 --trace FILE": {"8": "2"},
}
# Not run as printed: the option that stands for it, and why.
LISTED = {
    "quality configs/quality-tasks-capacity.yaml --set model.checkpoint=/models/OLMoE-1B-7B-0924-Instruct "
    "--set limit=50": ("--dry-run", "needs the lm-evaluation-harness, and data that it fetches"),
    "serve configs/serve-small.yaml --set serve.model=MODEL": ("--dry-run", "needs vLLM; test_serve has a server"),
    "papers configs/papers/capacity-figure4.yaml --set emulate.device=measured": ("--help", "needs a GPU: its times"),
    "papers configs/papers/oea-table3.yaml --nproc 1 --set layer.cuda_graph=true": (
        "--help",
        "needs a GPU: CUDA graphs",
    ),
    "emulate configs/balance-recorded.yaml --set workload.trace=FILE": ("--help", "needs the recording itself"),
    "emulate configs/traffic-shift.yaml": ("--help", "needs the recordings themselves"),
    "papers configs/papers/llep-figure4.yaml": ("--help", "takes minutes; test_published reads it"),
    "advise --model MODEL/config.json --ep 8 --tokens 16384 --trace recordings/mine/prefill.safetensors": (
        "--help",
        "a server records the trace; other recordings are asked about here",
    ),
    "validate configs/validate-model-cpu.yaml --nproc 2 --set emulate.links=results/calibration/links.yaml": (
        "--help",
        "takes minutes; whole models are run and emulated in files of their own",
    ),
}
# Each start and each answer takes seconds, and CUDA graphs need a GPU: these are run, others tried by --dry-run.
STARTED = ("run configs/decode.yaml", "run configs/whatif-skew.yaml")
ANSWERED = ("advise --model config.json", "advise --model mixtral", "advise results/")
ONE_DRAW = "sweep.workload.seed=[1] emulate.overlap=none workload.num_batches=2"
# They write what others read.
FIRST = (
    "emulate configs/quickstart.yaml --set layer.ep_size=8 --set emulate.links=h100-nvlink4",
    "trace record /models/OLMoE-1B-7B --text text.txt --out recordings/olmoe.safetensors",
    "trace import esft ESFT recordings/deepseek-v2-lite-intent.safetensors --domain intent",
    "trace import vllm routes.jsonl recordings/prompts.safetensors --preset olmoe-1b-7b --stage prefill",
    "emulate configs/model-prefill.yaml",
    "emulate configs/whatif-skew.yaml --out results/skew",
)
COPIES = ("mine", "base", "new")  # of results/quickstart


def printed() -> list[str]:
    """Every command with arguments, once, in the pages' order; those that others need come first."""
    found = [" ".join(map(shlex.quote, one)) for page in PAGES for one in commands(page.read_text())]
    lines = [line for line in dict.fromkeys(found) if line not in {*COMMANDS, *THIRTEEN}]
    assert {*FIRST, *LISTED, *OWN_STAND_INS} <= set(lines), "a command that is listed here is on no page"
    calls = [re.match(r"\S*python (plot_results\.py .+)", line) for page in PAGES for line in code(page.read_text())]
    drawn = [call[1] for call in calls if call]
    assert len(drawn) >= 2
    return [*FIRST, *(line for line in lines if line not in FIRST), *dict.fromkeys(drawn)]


PRINTED = printed()
TRIED = [line for line in PRINTED if line.split()[0] in ("run", "advise") and not line.startswith(STARTED + ANSWERED)]
LISTED = {line: ("--dry-run", "") for line in TRIED} | LISTED


def arguments_of(line: str) -> list[str]:
    """The arguments with which a printed command is run."""
    if line.startswith("plot_results.py"):
        call = ["plot", *shlex.split(line, comments=True)[1:], "--format", "svg"]
        return call if "--figures" in call else [*call, "--figures", "phases"]
    if line in LISTED and LISTED[line][0] == "--help":
        return [line.split()[0], "--help"]
    words = {**STAND_INS, **OWN_STAND_INS.get(line, {})}
    arguments = [words.get(one, one.replace("=/models/", "=models/")) for one in shlex.split(line)]
    arguments = [one.removeprefix("/") if one.startswith("/models/") else one for one in arguments]
    if line in LISTED:
        return [*arguments, LISTED[line][0]]
    if line.startswith("advise --model"):
        return [*arguments, *(f"--set={override}" for override in ONE_DRAW.split())]
    if line.startswith("plot"):
        # The page draws all.
        return [*arguments, "--format", "svg", *(() if "--x" in arguments else ("--figures", "speedup"))]
    configs = [one for one in arguments if one.endswith(".yaml") and "=" not in one]
    configs = [] if "--list-points" in arguments else configs
    for config in configs:
        stem = Path(config).stem
        assert stem in SMALL, f"{line}: SMALL says no sizes for {config}, LISTED no reason why it cannot run"
        words, *values = SMALL[stem]
        arguments += [f"--set={override}" for override in (*words.split(), *values)]
    return arguments


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkout")
    (folder / "plot_results.py").symlink_to(ROOT / "plot_results.py")
    shutil.copytree(ROOT / "configs", folder / "configs")  # recordings/ lies beside it
    for name in ("results", "recordings", "models", "checkpoints"):
        (folder / name).mkdir()
    model = folder / "models" / "OLMoE-1B-7B"
    shutil.copytree(ROOT / "tests" / "data" / "small-moe", model)
    for link in ("models/OLMoE-1B-7B-0924-Instruct", "checkpoints/small-moe"):
        (folder / link).symlink_to(model)
    shutil.copy(model / "config.json", folder)
    text = inspect.getsource(argparse)[:8_000]
    (folder / "text.txt").write_text(text)
    (model / "heldout.txt").write_text(text)
    example = re.search(r"```yaml\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    (folder / "mine.yaml").write_text(example[1])
    routed = np.argsort(np.random.default_rng(1).random((40, 16, 64)), axis=2)[..., :8].astype(np.int32)
    written(folder / "routes.jsonl", *[vllm_response(routed, num_prompt=30)] * 2)
    written(folder / "sglang.jsonl", sglang_response(routed, num_prompt=30))
    written(folder / "counts.json", {"logical_count": np.arange(1, 16 * 64 + 1).reshape(16, 64).tolist()})
    esft(folder / "ESFT", lengths=(40, 30))
    sizes = {"length_S": (30, 20), "num_layers": 24, "num_experts": 32, "top_k": 4}
    write_trace(folder / "recordings" / "gpt-oss-20b-mixed.safetensors", **sizes, normalised=True)
    for name in COPIES:
        (folder / "results" / name).symlink_to("quickstart")
    return folder


# Figures have tests of their own, and take longer than most commands; what plots alone draws them, as SVG.
PROGRAM = """
import contextlib, sys
from moe_ep_bench import cli
from undrawn import nothing_drawn
with contextlib.nullcontext() if sys.argv[1] == "plot" else nothing_drawn():
    sys.exit(cli.main(sys.argv[1:]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("line", PRINTED, ids=str)
def test_a_printed_command_runs(line: str, folder: Path) -> None:
    command = [sys.executable, "-c", PROGRAM, *arguments_of(line)]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=600)
    # A doctor may find that the machine lacks something.
    assert done.returncode in ((0, 1) if line.startswith("doctor") else (0,)), (done.stdout + done.stderr)[-3000:]


def test_the_installed_program_is_this_one() -> None:
    program = Path(sys.executable).with_name("moe-ep-bench")
    done = subprocess.run([program, "--version"], capture_output=True, text=True, check=True)
    assert re.fullmatch(rf"moe-ep-bench {re.escape(__version__)} \(commit [\w-]+\)\n", done.stdout)
