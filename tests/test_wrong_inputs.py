"""Mistakes of a user's: each is one line on standard error that names the key or option and the value, and exit 2."""

from __future__ import annotations

import json
import math
import re
import shlex
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from refusals import refusal
from test_config import HF
from torch import Tensor

from moe_ep_bench import cli
from moe_ep_bench.config import label_of
from moe_ep_bench.config.files import load_experiments, override
from moe_ep_bench.cost_model.devices import Device
from moe_ep_bench.cost_model.links import Links
from moe_ep_bench.errors import USER_ERROR, UserError, did_you_mean, naming
from moe_ep_bench.files import dump_yaml, parse_yaml
from moe_ep_bench.models import ModelSpec
from moe_ep_bench.policies import RoutingContext, make_policy

CONFIGS = Path(__file__).parents[1] / "configs"
RUN = CONFIGS.parent / "results" / "reference" / "quickstart-2cpu"
CONFIG = {
    "model": {"preset": "olmoe-1b-7b", "scale": 0.03125},
    "workload": {"kind": "synthetic", "num_tokens": 64, "num_batches": 1},
    "policies": [{"name": "topk"}, {"name": "oea", "k0": 3}],
    "emulate": {"links": "h100-nvlink4"},
}
QUALITY = {
    "model": {"checkpoint": "tiny-olmoe"},
    "text": {"file": "words.txt", "num_sequences": 12, "sequence_length": 16, "batch_size": 4},
    "layer": {"ep_size": 2},
    "policies": [{"name": "topk"}],
}

SHAPE = "num_experts: 64, top_k: 4, hidden_size: 64, ffn_hidden_size: 64"
# Routed experts of a width of their own, which no layer runs.
LATENT = {
    **HF, "model_type": "kimi_linear", "num_experts": 16, "num_experts_per_token": 4, "moe_intermediate_size": 64,
    "first_k_dense_replace": 0, "routed_scaling_factor": 1.0, "routed_expert_hidden_size": 32,
}  # fmt: skip

# Values of a config's keys, set for ``emulate``.
CHANGES = {
    "workload.peak_load=true": "workload.peak_load: expected a valid number, got true",
    "workload.num_tokens=0": "workload.num_tokens: expected greater than or equal to 1, got 0",
    **{
        f"{key}={10**21}": f"{key.replace('l.n', 'l: n')}: expected less than or equal to {most}, got {10**21}"
        for key, most in {
            "workload.num_batches": 65536,
            "workload.seed": 2**63 - 1,
            "workload.sequence_length": 2**31,
            "whole.context_length": 2**31,
            "measure.iterations": 65536,
        }.items()
    },
    f"model={{num_experts: {10**21}, top_k: 2, hidden_size: 8, ffn_hidden_size: 8}}": "num_experts: expected less",
    "measure.flush_l2=on": "measure.flush_l2: expected a valid boolean, got 'on'",
    "workload.num_batches=12:30": "workload.num_batches: expected a valid integer, got '12:30'",
    "model.tensor_parallel=5": "model.tensor_parallel: ",
    "workload.kind=random": "workload: expected 'kind' to be one of 'synthetic', 'recorded', got ",
    "workload.peek_load=3": "workload.peek_load: no such key; ",
    "model.preset=olmoe": "got 'olmoe' (did you mean olmoe-1b-7b?)",
    "name=a/b": "name: expected a text of the pattern ^[A-Za-z0-9][A-Za-z0-9._-]*$, got 'a/b'",
    "policies=[]": "policies: give at least one value, got []",
    "policies.0.name=tokn": "did you mean topk?",
    "policies.0.x=1": "policies.0.x: topk has no such field; expected no fields",
    "policies.1.k0=9": "policies.1.k0: expected at most 8, the model's top-k, where p is 1; got 9",
    "policies.1.k0=99": "policies.1.k0: expected at most the model's 64 experts, got 99",
    "policies.2.k0=1": "--set policies.2.k0=1: policies.2.k0: the config has no such place",
    "no-equals-sign": "--set no-equals-sign: expected key=value",
    "on_cpu=3": "--set on_cpu=3: on_cpu stands in the file alone; set its keys one by one, as KEY=value",
    "measure.timeout_s=1.0e+11": "measure.timeout_s: expected less than or equal to 1000000000",
    "measure.iterations=1": "measure.breakdown_iterations: expected at most iterations=1, got 2",
    "emulate.links=null": "emulate.links: expected one of a100-nvlink3",
    "measure.launches=3": "measure.launches: expected 1, for emulate makes one launch, got 3",
    "layer.ep_size=7": "layer.ep_size: expected a divisor of the 64 experts",
    "layer.ep_size=16": "emulate.links, layer.ep_size: links/h100-nvlink4: expected at most 8 ranks",
    "layer.experts=decode": "layer.experts: expected any but decode, because emulate models an all-to-all",
    "emulate.replication=[{spare_per_rank: 57}]": "at most 56, with which every rank holds all 64 experts, got 57",
    "emulate.rebalance=[{name: moonep, least_pairs: 1}]": "least_pairs: expected none with moonep",
    "emulate.replication=[{spare_per_rank: 1, balancer: best}]": "balancer: expected 'static', 'lp' or 'activated'",
    "emulate.rebalance=[{name: waterfill}]": "expected no waterfill, for OLMoE-1B-7B has no shared",
    "emulate.replication=[{spare_per_rank: 4}]": "emulate.device: expected a modelled one beside emulate.replication",
    "emulate.overlap=two_batch": "emulate.overlap: expected none or shared where layers are measured",
    "model={hf_config: latent.json}": "model: expected routed experts as wide as the layer, if layers run",
    "model={preset: nemotron-3-super}": "model: expected gated experts where layers run; plain ones are",
    f"model={{{SHAPE}, score_function: sigmoid, normalize: false}}": "expected sigmoid weights to be normalised, ",
    **{
        f"workload={{kind: synthetic, num_tokens: 64, balanced: true, {key}: {value}}}": (
            f"balanced: prescribes all loads; expected no {key}"
        )
        for key, value in {"skew": "mixed", "peak_load": 1.0, "rank_load": 1.0, "neighbour_overlap": 2.0}.items()
    },
    "sweep={}": "expected sweep.KEY=[values]",
    **dict.fromkeys(
        (f"sweep.recorded={entry}" for entry in ("[a]", "a", "{workload.seed: 1}")),
        "config.yaml: sweep.recorded: expected a list of",
    ),
    # An unknown name lists those that there are.
    **{
        f"{key}={unknown}": f"{', '.join(kind.names())}; got '{unknown}' (did you mean {close}"
        for key, kind, unknown, close in (
            ("model.preset", ModelSpec, "deepseek-v4", "deepseek-v4-flash"),
            ("emulate.device", Device, "h100", "h100-"),
            ("emulate.links", Links, "h100-nvlink", "h100-nvlink4"),
        )
    },
    **{
        f"{key}=table:h{part}": f"{words}; got"
        for key, parts in {
            "emulate.links": {
                "100_sxm/sglang/": "expected a version of sglang of 0.5.12, 0.5.6.post2",
                "100_sxm/sglang/0.5.12": "expected a kind of exchange of sglang 0.5.12 of deepep_normal, deepep_ll",
                "100_sxm/sglang/0.5.12/deep": "of exchange of sglang 0.5.12 of deepep_normal, deepep_ll",
                "100_sxm/tensor/1": "expected a framework of nccl, sglang, trtllm, vllm",
                "100_sxm/nccl/2.29.2/ll": "expected table:h100_sxm/nccl/2.29.2",
            },
            "emulate.device": {
                "200_sxm/tensor": "expected a framework of sglang, trtllm, vllm",
                "200_sxm/sglang/0.5.6.post2": "of experts of sglang 0.5.6.post2 of deepep_normal, deepep_ll",
                "200_sxm/sglang/0.5.10/deep": "expected a kind of experts of sglang 0.5.10 of deepep_normal, deepep_ll",
                "200_sxm/trtllm/1.3.0rc20/wideep": "expected table:h200_sxm/trtllm/1.3.0rc20",
                "200_sxm/trtllm/1.3.0rc10/wide": "of experts of trtllm 1.3.0rc10 of wideep, wideep_288",
            },
        }.items()
        for part, words in parts.items()
    },
}


def write(folder: Path, **changes: object) -> Path:
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump({**CONFIG, **changes}, sort_keys=False))
    return path


LASER, RECORDED = "{name: laser, eps_high: 0.9, t_fix: 0.1, c: 4}", "kind: recorded, tail: uniform, num_tokens: 8"
IMAGES = "{name: token_drop, capacity_factor: 1, modality: image_first}"
QWEN = "advise --model qwen3-30b-a3b --ep 8 --tokens 16384"
OF_MODEL = "--set scope=model --set whole.num_layers=2"
MODEL = f"run CONFIG --nproc 2 {OF_MODEL}"
RECORD = "trace record tiny-olmoe --text words.txt --out x.safetensors"
ONE_NODE = "advise --model qwen3-30b-a3b --ep 16 --tokens 4096 --peak-load 4 --set emulate.links=h100-nvlink4"
COMMANDS = {
    "advise --model qwen3-30b-a3b --ep 8 --tokens 32k": "--tokens: invalid int value: '32k'",
    "advise --model qwen3-30b-a3b --ep 8 --tokens 0 --peak-load 4": "bench: --tokens: workload.num_tokens: expected gr",
    "advise --model qwen3-30b-a3b --ep 0 --tokens 64 --peak-load 4": "bench: --ep: layer.ep_size: expected greater tha",
    "emulate CONFIG --set workload.num_batches=65536 --set measure.iterations=300": (
        "expected at most 16777216 iterations in all, got 65536 batches of 302 iterations"
    ),
    "advise --model qwen3-30b-a3b --ep 16 --decode-tokens 8 --batch-peak-load 4 --dry-run": (
        "bench: --batch-peak-load: workload.batch_peak_load: expected 8 to 16 (what noise alone gives with 8"
    ),
    "emulate CONFIG --set workload.num_tokens=8 --set workload.batch_peak_load=1.01 --dry-run": (
        "config.yaml: workload.batch_peak_load: expected 3 to 8 (what noise alone gives with 8 tokens"
    ),
    "advise --model nonsense --ep 8 --tokens 64": "--model: expected a path of a config.json or one of deepseek",
    "advise olmoe-1b-7b": "olmoe-1b-7b: is a model's name; expected a config's path (advise takes --model olmoe-1b-7b)",
    ONE_NODE: "bench: --ep: emulate.links, layer.ep_size: links/h100-nvlink4: expected at most 8 ranks (inter is "
    "null: one node), got 16; h100-nvlink4-ndr crosses nodes",
    "trace info .": ".: expected a file, got a directory",
    f"{QWEN} --decode-tokens 8": "--tokens, --decode-tokens: expected one of them, for the first counts",
    "emulate CONFIG --set workload.peak_load=3 --set workload.batch_peak_load=3": (
        "config.yaml: workload.peak_load, workload.batch_peak_load: expected one of the two, got both"
    ),
    f"emulate CONFIG --set 'model={{{SHAPE}}}' --set workload.skew=mixed": "workload.skew: expected none for a model",
    **{
        "emulate CONFIG --set layer.ep_size=4 --set workload.sequence_length=1 "
        f"--set workload.num_tokens={tokens} --set workload.padding_per_rank={padding}": (
            f"than the {padding} tokens that rank {rank} has in batch 0, got {padding}"
        )
        for tokens, padding, rank in ((64, 16, 0), (62, 15, 2))
    },
    f"route CONFIG {OF_MODEL}": "config.yaml: scope: expected layer for this command, got model",
    f"emulate CONFIG {OF_MODEL} --set 'emulate.replication=[{{spare_per_rank: 4}}]'": (
        "emulate.replication: expected none with scope model"
    ),
    "run CONFIG --nproc 2 --set 'sweep.workload.seed=[0, 1]' --point 2": "--point: expected 0 to 1 (the points of ",
    "emulat": "COMMAND: invalid choice: 'emulat' (choose from ",
    "run CONFIG --budget 1%": "unrecognized arguments: --budget 1%",
    "advise CONFIG --max-dropped 5": "--max-dropped: expected a share such as 5% or 0.05, 0 to 1; got 5",
    "validate CONFIG --nproc 2 --set emulate.links=pcie5 --out /proc/foo": "--out /proc/foo: cannot write /proc/foo: ",
    "trace record x": "the following arguments are required: --text",
    "run CONFIG --nproc 2 --dry-run --set layer.ep_size=16": "layer.ep_size: expected a divisor of the 2 ranks, got 16"
    "; --nproc starts more; the command emulate lays out any number on one device",
    f"emulate {CONFIGS / 'quality-oea.yaml'}": "text: no such key; expected one of name, scope, model",
    "run CONFIG --nproc 3": "64 experts of OLMoE-1B-7B, got 3",
    "run CONFIG --nproc 2 --set layer.experts=te": "layer.experts: te needs",
    "run CONFIG --nproc 2 --set layer.experts=decode --set workload.num_tokens=72 --set workload.sequence_length=24": (
        "workload.num_tokens: expected as many for every rank, got 24 to 48 tokens of batch 0 on a rank"
    ),
    f"run CONFIG --nproc 2 --set 'policies=[{LASER}]'": "c: expected 8 (top_k) to 64",
    **{
        f"run CONFIG --set 'workload={{{RECORDED}, trace: {trace}}}'": f"config.yaml: workload.trace: {words}"
        for trace, words in {
            "no.safetensors, layer: 0": "{HERE}/no.safetensors: no such file",
            "no.safetensors, layer: all": "{HERE}/no.safetensors: no such file",
            "[], layer: 0": "give at least one value, got []",
        }.items()
    },
    "route CONFIG --set workload.num_tokens=10000000000000": "workload.num_tokens: expected less than or equal to 2",
    "run CONFIG --nproc 0 --dry-run": "--nproc: expected at least 1, got 0",
    "run CONFIG --launch 1 --dry-run": "--launch: only for ranks that torchrun started",
    f"route CONFIG --set 'policies=[{IMAGES}]'": "workload.image_share assumes images",
    f"route CONFIG --set 'workload={{{RECORDED}, layer: all}}'": "workload.layer: all needs a recording",
    "advise": "expected a config, a results directory or --model; got none",
    "advise --model olmoe-1b-7b --tokens 64": "--ep: expected a number beside --model, got none",
    f"{QWEN} --ep 7 --peak-load 4": "layer.ep_size: expected a divisor of the 128 experts of Qwen3-30B-A3B, got 7",
    f"{QWEN} --peak-load 4 --set emulate.device=h1000": "emulate.device: expected a path of a .yaml or one of a100",
    f"{QWEN} --peak-load 2 --trace no": "--trace, --peak-load: expected one of them",
    f"{QWEN} --peak-load 2 --batch-peak-load 2": "--peak-load, --batch-peak-load: expected one of them",
    "advise CONFIG --ep 4": "--ep: expected none with a config",
    "advise CONFIG --device h20": "--device: expected none with a config",
    f"{QWEN} --peak-load 4 --device h1000": "--device: emulate.device: expected a path of a .yaml or one of a100",
    f"{QWEN} --peak-load 4 --links none": "--links: emulate.links: expected a path of a .yaml or one of",
    f"{QWEN} --peak-load 4 --dtype int3": "--dtype: layer.dtype: expected",
    f"{QWEN} --counts none.json": "--counts: workload.skew_from: {HERE}/none.json: no such file",
    f"{QWEN} --counts a --trace b": "--trace, --counts: expected one of them",
    "advise --model Qwen/Qwen3-8B --ep 8 --tokens 64": "--model: expected a path of a config.json or one of",
    f"{RECORD} --text none.txt": "none.txt: cannot read the text: [Errno 2] No such file",
    f"{RECORD} --sequence-length 100000": "sequence-length: expected at most 4096, the positions that tiny-olmoe knows",
    f"{RECORD} --sequence-length 0": "--sequence-length: expected at least 1, got 0",
    f"{RECORD} --num-sequences 0": "--num-sequences: expected at least 1, got 0",
    **{
        f"quality quality.yaml --set '{change}'": words
        for change, words in {
            "model.checkpoint=none": "none: expected a checkpoint's folder, got none",
            "text.file=none.txt": "none.txt: cannot read the text: [Errno 2] No such file or directory",
            "text.num_sequences=4000": "text.file: words.txt: expected a text of at least 4000 sequences of 16 tokens",
            "layer.ep_size=3": "layer.ep_size: expected a divisor of the 8 experts of tiny-olmoe, got 3",
            f"policies=[{IMAGES}]": "policies: token_drop: modality_T",
        }.items()
    },
    "show RUN --format xml": "--format: expected some of text, md, latex, csv, json, html; got 'xml'",
    "show RUN --view king": "--view: expected some of layer, model, route",
    "show RUN RUN --format html": "--out: expected a file for the page of several directories",
    "plot RUN --format gif": "--format",
    "plot RUN --x capacity_factor --y dropped_shares": "--y: expected a column, one of",
    "plot RUN --x capacity_factor --y label": "--y: expected a column of numbers",
    "plot RUN --x capacity_factor --y dropped_share --where 'policy =='": "--where",
    "plot RUN --figures quality": "quality: not drawn",
    "compare RUN RUN --fail-over -3%": "--fail-over: expected one argument",
    "compare RUN RUN --fail-over=-3%": "--fail-over: expected a share such as 5% or 0.05, 0 to 1; got -3%",
    "compare RUN RUN --strict": "--strict: expected --fail-over",
    "validate CONFIG --nproc 2 --set emulate.links=pcie5 --margin 0": "--margin: expected more than 0, got 0.0",
    "papers --paper oea --set a=b": "--set: goes with a config of configs/papers/, got none",
    "papers --nproc 1": "--nproc: goes with a config of configs/papers/, got none",
    "validate CONFIG --nproc 1": "--nproc: expected at least 2 ranks to hold emulated ones against, got 1",
    "validate CONFIG --nproc 2 --set layer.ep_size=1": "layer.ep_size: expected 2, which are all ranks, or null, got 1",
    "validate CONFIG --nproc 2 --set 'sweep.emulate.links=[pcie4, pcie5]'": "measures differently",
    "run CONFIG --nproc 2 --set whole.num_layers=2": "whole.num_layers: expected with scope: model alone; one layer is",
    **{
        f"{MODEL} --set '{change}'": words
        for change, words in {
            "whole.num_layers=17": "whole.num_layers: expected 1 to 16 layers of OLMoE-1B-7B",
            "whole.context_length=8": "workload.sequence_length: expected 1, for whole.context_length=8 makes a batch",
            "model.tensor_parallel=2": "model.tensor_parallel: expected 1 with scope model, got 2",
            "sweep.scope=[layer, model]": "sweep.scope: expected scope outside of sweep",
            f"workload={{{RECORDED}, trace: no.safetensors, layer: 3}}": "layer: expected all with scope model",
        }.items()
    },
    "quality CONFIG": "model.preset: no such key; expected one of checkpoint, dtype",
}


WRONG = {f"emulate CONFIG --set '{change}'": words for change, words in CHANGES.items()} | COMMANDS


@pytest.mark.parametrize("command", WRONG)
def test_a_mistake_is_one_line_that_says_what_is_allowed_and_leaves_nothing(
    command: str, tiny_olmoe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = str(write(tmp_path))
    (tmp_path / "quality.yaml").write_text(yaml.safe_dump(QUALITY))
    (tmp_path / "latent.json").write_text(json.dumps(LATENT))
    for name in ("tiny-olmoe", "words.txt"):
        (tmp_path / name).symlink_to(tiny_olmoe / name)
    before = set(tmp_path.iterdir())
    arguments = [{"CONFIG": config, "RUN": str(RUN)}.get(word, word) for word in shlex.split(command)]
    monkeypatch.chdir(tmp_path)
    try:
        status = cli.main([*arguments, *(["--dry-run"] if command == ONE_NODE else [])])
    except SystemExit as ended:
        status = ended.code
    *_, line = (lines := capsys.readouterr().err.splitlines())
    assert WRONG[command].replace("{HERE}", str(tmp_path)) in line
    assert (status, line.startswith("moe-ep-bench: ")) == (USER_ERROR, True)
    assert all(": planning " in earlier for earlier in lines[:-1])  # where that takes long
    assert not [word for word in ("Traceback", "pydantic", "http") if word in line]
    assert set(tmp_path.iterdir()) == before


# ---- Calls in Python -------------------------------------------------------------------------------------------------

DROP = {"name": "token_drop", "capacity_factor": 1.0}
EXPANDED = {"name": "expanded_drop", "capacity_factor": 1.0}
OF_LASER = {"name": "laser", "eps_high": 0.5, "t_fix": 0.5, "c": 4}
# Fields of a policy: the key that the line names first, and what it holds besides.
SPECS: list[tuple[dict[str, Any], str, str]] = [
    ({"name": "token_dorp"}, "name", "token_dorp"),
    ({"name": "topk", "k": 2}, "k", "no fields"),
    ({**DROP, "capacity_facto": 2}, "capacity_facto", "(did you mean capacity_factor?)"),
    ({"name": "token_drop"}, "capacity_factor", "token_drop needs it"),
    ({**DROP, "capacity_factor": float("nan")}, "capacity_factor", "nan"),
    ({**DROP, "capacity_factor": True}, "capacity_factor", "true"),
    ({**EXPANDED, "scope": "global"}, "num_candidates", "None"),
    ({**EXPANDED, "num_candidates": 2.0}, "num_candidates", "2.0"),
    ({**EXPANDED, "max_experts_per_token": 0}, "max_experts_per_token", "0"),
    ({"name": "expert_drop", "fraction": 1.1}, "fraction", "1.1"),
    ({"name": "budget_drop"}, "max_dropped and max_lost_mass", "neither"),
    ({"name": "pruned", "k0": 1, "p": 0}, "p", "0"),
    ({**OF_LASER, "bands": {"early": {"t_fix": 0}}}, "bands", "c, trim"),
    ({**OF_LASER, "eps_high": {"0": 0.5, "1": 1.5}}, "eps_high", "1.5"),
    ({"name": "xshare", "k0": 1}, "budget and mass_threshold", "neither"),
    ({"name": "xshare", "k0": 1, "budget": 1, "rank_budget": 2}, "rank_budget", "2"),
    ({"name": "xshare", "k0": 1, "scope": "request"}, "request_budget", "None"),
    (
        {"name": "xshare", "k0": 1, "scope": "rank", "rank_budget": 1, "mass_threshold": 0.5},
        "mass_threshold",
        "0.5",
    ),
    ({**OF_LASER, "t_fix": {"0": 1}, "c": {"0-1": 8}}, "t_fix, c", "expected as many layers in each, got [1, 2]"),
    *(
        ({**DROP, "capacity_factor": value}, "capacity_factor", f"expected {words}")
        for value, words in (
            ({"0-1": 1, "3-4": 1}, "2 or 2-LAST for the next band of layers, got '3-4'"),
            ({0: 1, "1-0": 1}, "1 or 1-LAST for the next band of layers, got '1-0'"),
            ({"early": 1}, "0 or 0-LAST for the next band of layers, got 'early'"),
            ({0: 1.0, 1: -1.0}, "greater than or equal to 0, got -1.0"),
            ({}, "a number for each band of layers, got {}"),
        )
    ),
]
# What a policy asks of a model of so many experts and top-k.
OF_MODELS: list[tuple[dict[str, Any], tuple[int, int], str]] = [
    ({"name": "oea", "k0": {"0": 1, "1": 8}}, (7, 7), "k0: expected at most the model's 7 experts, got 8"),
    *(
        ({"name": name, **fields}, (8, 4), "k0: expected at most 4, the model's top-k, where p is 1; got 5")
        for name in ("pruned", "oea")
        for fields in ({"k0": 5}, {"k0": {"0": 1, "1": 5}}, {"k0": 5, "p": {"0": 0.5, "1": 1}})
    ),
]
UNIFORM = torch.full([6, 8], 0.125)
NEGATIVE = UNIFORM.clone()
NEGATIVE[-1, -1] = -1e-30
HALF_MASK = torch.ones(5, dtype=torch.bool)
# The key that the error names first: the scores and the context's arguments.
WRONG_TENSORS: list[tuple[str, Tensor, dict[str, Any]]] = [
    ("scores_TE", NEGATIVE, {}),
    ("scores_TE", UNIFORM[0], {}),
    ("top_k", UNIFORM, {"top_k": 9}),
    ("num_ranks", UNIFORM, {"num_ranks": 3}),
    ("bias_E", UNIFORM, {"bias_E": torch.zeros(7)}),
    ("load_E", UNIFORM, {"load_E": torch.zeros(9)}),
    ("token_mask_T", UNIFORM, {"token_mask_T": HALF_MASK}),
    ("token_mask_T", UNIFORM, {"token_mask_T": torch.ones(6)}),
    ("modality_T", UNIFORM, {"modality_T": torch.zeros(5)}),
    ("request_id_T", UNIFORM, {"request_id_T": torch.zeros(7)}),
]
# What a policy needs is asked for, where there are no tokens too.
NEEDS: list[tuple[str, dict[str, Any]]] = [
    ("generator", {**DROP, "metric": "random"}),
    ("modality_T", {**EXPANDED, "modality": "image_first"}),
    ("generator", {**OF_LASER, "trim": "random"}),
    ("c", {**OF_LASER, "c": 1}),
    ("c", {**OF_LASER, "c": {"0": 9}}),
    ("request_id_T", {"name": "xshare", "k0": 1, "scope": "request", "request_budget": 1}),
]


def routed(spec: dict[str, Any], scores_TE: Tensor, **arguments: Any) -> Callable[[], object]:
    return lambda: make_policy(spec).route(scores_TE, RoutingContext(**{"top_k": 2, **arguments}))


CALLS: list[tuple[Callable[[], object], str]] = [
    *((partial(make_policy, spec), f"{key}: [^\n]*{re.escape(got)}[^\n]*") for spec, key, got in SPECS),
    *((partial(make_policy(spec).check_model, *sizes), re.escape(words)) for spec, sizes, words in OF_MODELS),
    *(
        (routed({"name": "topk"}, scores_TE, **arguments), f"{key}: [^\n]*")
        for key, scores_TE, arguments in WRONG_TENSORS
    ),
    *((routed(spec, UNIFORM[:num_tokens]), f"{key}: [^\n]*") for key, spec in NEEDS for num_tokens in (0, 6)),
]


@pytest.mark.parametrize(("call", "line"), CALLS, ids=lambda value: value if isinstance(value, str) else "")
def test_a_call_refuses_in_one_line_that_names_the_key_and_its_value(call: Callable[[], object], line: str) -> None:
    assert re.fullmatch(line, refusal(call))


def test_what_lies_at_a_bound_of_a_model_is_allowed() -> None:
    make_policy({"name": "oea", "k0": {"0": 1, "1": 8}}).check_model(8, 8)
    for name in ("pruned", "oea"):
        for fields in ({"k0": 4}, {"k0": 8, "p": 0.9}, {"k0": {"0": 1, "1": 4}}):
            make_policy({"name": name, **fields}).check_model(8, top_k=4)


CONTENTS = {
    "not UTF-8": (b"name: caf\xe9\n", "expected text in UTF-8, got byte 0xe9 at position 9"),
    "not YAML": (b"a: [", "not valid YAML"),
    "code": (b"name: !!python/object/apply:os.getcwd []", "not valid YAML: could not determine a constructor"),
    "empty": (b"", "expected keys with values, but the file is empty"),
    "a misspelt section": (
        yaml.safe_dump({("workloads" if key == "workload" else key): value for key, value in CONFIG.items()}).encode(),
        "did you mean workload?",
    ),
    "a misspelt sweep": (yaml.safe_dump({**CONFIG, "sweeps": {}}).encode(), "did you mean sweep?"),
    "a sweep of none on a CPU": (
        yaml.safe_dump({**CONFIG, "on_cpu": {"sweep": {}}}).encode(),
        "on_cpu.sweep: expected sweep.KEY=[values]",
    ),
    "a section twice": (b"model: 1\nmodel: 2\n", "model stands here twice"),
}


@pytest.mark.parametrize("name", CONTENTS)
def test_a_file_that_is_no_config_is_one_line(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    content, message = CONTENTS[name]
    path = tmp_path / "config.yaml"
    path.write_bytes(content)
    assert cli.main(["emulate", str(path), "--dry-run"]) == USER_ERROR
    said = capsys.readouterr().err
    assert said.startswith(f"moe-ep-bench: {path}: ")
    assert message in said
    assert said.count("\n") == 1


@pytest.mark.parametrize(
    ("file", "name"), [("my run (2).yaml", "my-run-2"), ("decode.yaml", "decode"), ("_.yaml", "config")]
)
def test_a_config_without_a_name_has_its_files(file: str, name: str, tmp_path: Path) -> None:
    path = write(tmp_path).rename(tmp_path / file)
    assert load_experiments(path, on_cpu=False)[0].name == name
    assert load_experiments(path, ["name=other"], on_cpu=False)[0].name == "other"


def test_a_date_is_text_and_a_power_of_ten_a_number(tmp_path: Path) -> None:
    (config,) = load_experiments(write(tmp_path), ["name=2026-01-31", "measure.timeout_s=1e3"], on_cpu=False)
    assert (config.name, config.measure.timeout_s) == ("2026-01-31", 1000.0)


# By YAML 1.2's core schema, and not by YAML 1.1, whose words for true, dates and numbers in base 60 are text.
TEXTS = ["on", "off", "yes", "no", "y", "2026-01-31", "12:30", "190:20:30", "1_000", "0b1", "=", "<<"]
SCALARS = {"true": True, "False": False, "~": None, "null": None, "010": 10, "0o10": 8, "0x1F": 31, "+3": 3, "1e9": 1e9}
SCALARS |= {"-1.5e-3": -0.0015, ".5": 0.5, "1.": 1.0, "-.inf": -math.inf, **{text: text for text in TEXTS}}


def test_scalars_are_those_of_yaml_1_2_and_what_is_written_is_read_as_it_was() -> None:
    assert parse_yaml("\n".join(f"{place}: {text}" for place, text in enumerate(SCALARS))) == dict(
        enumerate(SCALARS.values())
    )
    written = [*SCALARS.values(), *SCALARS, 1e21, 1e-7, 5.0, "", "a: b", "- x"]
    assert parse_yaml(dump_yaml(written)) == written


def test_a_value_that_ends_as_a_file_is_a_path_where_a_key_takes_paths_alone(tmp_path: Path) -> None:
    values = ["name=foo.yaml", "figures=[{x: k0, y: speedup_median, where: title == 'a.yaml'}]"]
    (config,) = load_experiments(write(tmp_path), values, on_cpu=False)
    assert (config.name, config.figures[0].where) == ("foo.yaml", "title == 'a.yaml'")
    raw: dict[str, Any] = {"policies": [{"name": "sere"}], "emulate": {}}
    override(raw, {}, ["emulate.links=my.yaml", "emulate.device=h20", "policies.0.similarity=alike.safetensors"])
    assert raw["emulate"] == {"links": str(Path.cwd() / "my.yaml"), "device": "h20"}
    assert raw["policies"] == [{"name": "sere", "similarity": str(Path.cwd() / "alike.safetensors")}]


def test_the_beginning_of_a_name_that_ends_in_a_colon_is_text() -> None:
    raw: dict[str, object] = {}
    override(raw, {}, ["emulate.device=table:", "emulate.links={kind: x}"])
    assert raw == {"emulate": {"device": "table:", "links": {"kind": "x"}}}


def test_a_policy_that_is_listed_twice_is_one_case(tmp_path: Path) -> None:
    twice = [{"name": "pruned", "k0": [1, 2]}, {"name": "pruned", "k0": 2}]
    (found,) = load_experiments(write(tmp_path, policies=twice), on_cpu=False)
    assert [label_of(policy) for policy in found.make_policies()] == ["pruned k0=1", "pruned k0=2"]


def test_a_policys_field_is_set_by_its_place(tmp_path: Path) -> None:
    (found,) = load_experiments(write(tmp_path), ["policies.1.k0=5", "policies.0.name=load_only"], on_cpu=False)
    assert [label_of(policy) for policy in found.make_policies()] == ["load_only", "oea k0=5"]


WIDE = {"num_experts": 1024, "top_k": 3, "hidden_size": 32, "ffn_hidden_size": 16}


def test_a_model_may_be_given_by_its_shape(tmp_path: Path) -> None:
    (found,) = load_experiments(write(tmp_path, model=WIDE), on_cpu=False)
    spec = found.model.spec()
    assert (spec.num_experts, spec.top_k, spec.num_moe_layers, spec.normalize) == (1024, 3, 1, True)
    for model, message in (
        ({**WIDE, "preset": "olmoe-1b-7b"}, "model: give either preset or hf_config, or the shape"),
        ({"top_k": 2, "hidden_size": 32}, "model.num_experts: Field required"),
        ({**WIDE, "top_k": 1025}, "top_k: expected at most num_experts=1024, got 1025"),
    ):
        with pytest.raises(UserError, match=re.escape(message)):
            load_experiments(write(tmp_path, model=model), on_cpu=False)


def test_a_name_that_holds_a_word_is_meant_before_one_that_is_spelt_like_it() -> None:
    assert did_you_mean("lite", ["lute", "deepseek-v2-lite"]) == " (did you mean deepseek-v2-lite?)"


def test_an_error_keeps_its_keys_apart_from_its_words_through_files_sections_and_validators(tmp_path: Path) -> None:
    """So that ``advise`` names the flag that sets a key, and nothing reads a message."""
    path = write(tmp_path, workload={"kind": "synthetic", "num_tokens": 64, "peak_load": 3, "batch_peak_load": 3})
    with pytest.raises(UserError) as raised:
        load_experiments(path, on_cpu=False)
    error = raised.value
    assert (error.where, error.keys) == (str(path), ("workload.peak_load", "workload.batch_peak_load"))
    assert error.words == "expected one of the two, got both"
    assert str(error) == f"{path}: workload.peak_load, workload.batch_peak_load: {error.words}"
    assert str(error.without(str(path))) == f"workload.peak_load, workload.batch_peak_load: {error.words}"
    assert str(error.without("other.yaml")) == str(error)
    for problem, how, expected in (
        (UserError("words", "key"), {"section": "a.b"}, (("a.b.key",), "words!", "")),
        (UserError("words", "key", where="file"), {"section": "a"}, (("a",), "file: key: words!", "")),
        (UserError("words"), {"section": "a", "where": "x"}, (("a",), "words!", "x")),
        (UserError("words", "key", where="file"), {"where": "x"}, (("key",), "words!", "x: file")),
        (UserError("words", "key"), {"keys": ["a", "b"]}, (("a", "b"), "key: words!", "")),
        (ValueError("words"), {"where": "x", "keys": ["a"]}, (("a",), "words!", "x")),
    ):
        with pytest.raises(UserError) as raised, naming(hint="!", **how):
            raise problem
        assert (raised.value.keys, raised.value.words, raised.value.where) == expected


def test_every_flag_is_named_that_sets_a_key_that_is_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    """Those that set no key of the error are not, nor is a file that nobody wrote."""
    both = ONE_NODE.replace("--set emulate.links=", "--links ").split()
    assert cli.main([*both, "--dry-run"]) == 2
    assert capsys.readouterr().err.startswith("moe-ep-bench: --ep: --links: emulate.links, layer.ep_size: links/h100")
    assert cli.main([*QWEN.split(), "--trace", "none.safetensors", "--dry-run"]) == 2
    assert capsys.readouterr().err.startswith("moe-ep-bench: --trace: none.safetensors: no such file")
    by_key = [*QWEN.split(), "--ep", "7", "--peak-load", "4", "--dry-run"]
    assert cli.main(by_key) == 2
    assert capsys.readouterr().err.startswith("moe-ep-bench: --ep: layer.ep_size: expected a divisor")
