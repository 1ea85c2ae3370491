"""Mistakes of a user's: each is one line on standard error that names the key or option and the value, and exit 2."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from moe_ep_bench import cli
from moe_ep_bench.config import load_experiments
from moe_ep_bench.presets import ConfigError
from moe_ep_bench.runtime.exit_codes import USER_ERROR

CONFIGS = Path(__file__).parents[1] / "configs"
CONFIG = {
    "model": {"preset": "olmoe-1b-7b", "scale": 0.03125},
    "workload": {"kind": "synthetic", "num_tokens": 64, "num_batches": 1},
    "policies": [{"name": "topk"}, {"name": "oea", "k0": 3}],
}

CHANGES = {
    "workload.peak_load=true": "workload.peak_load: expected a number, got true",
    "workload.num_tokens=true": "workload.num_tokens: expected a whole number, got true",
    "workload.num_tokens=1.5": "workload.num_tokens: expected a whole number, got 1.5",
    "workload.num_tokens=0": "workload.num_tokens: expected at least 1, got 0",
    "workload.peak_load=.inf": "workload.peak_load: expected a finite number, got inf",
    "workload.topk_share=1": "workload.topk_share: expected a number below 1, got 1",
    "workload.rank_load={ep_size: 8}": "workload.rank_load.load: missing",
    "workload.rank_load={ep_size: 8, load: 1.5, ranks: 8}": "workload.rank_load.ranks: no such key; ",
    "workload.padding_per_rank=-1": "workload.padding_per_rank: expected at least 0, got -1",
    "model.hf_config=x": "model: give either preset or hf_config",
    "model={hf_config: nowhere/config.json}": "nowhere/config.json",
    "model.tensor_parallel=5": "model: tensor_parallel: ",
    "workload.rank_shares=[]": "workload.rank_shares: expected at least 1 of them, got []",
    "workload.rank_shares=[true]": "workload.rank_shares.0: expected a number, got true",
    "workload.family=zipf": "workload.family: is gone; use workload.peak_load",
    "workload.kind=random": "workload: expected kind as one of synthetic, recorded, got 'random'",
    "workload=3": "workload: expected keys with values, got 3",
    "workload.mask_padding=7": "workload.mask_padding: expected true or false, got 7",
    "workload.peek_load=3": "workload.peek_load: no such key; ",
    "workload.skew=true": "workload.skew: expected mixed, single_domain, worst_layer, megatron_w0",
    "model.preset=olmoe": "got 'olmoe' (did you mean olmoe-1b-7b?)",
    "model.scale=2": "model.scale: expected at most 1, got 2",
    "name=a/b": "name: expected text of the pattern ^[A-Za-z0-9][A-Za-z0-9._-]*$, got 'a/b'",
    "measure.timeout_s=0": "measure.timeout_s: expected a number above 0, got 0",
    "policies=[]": "policies: expected at least 1 of them, got []",
    "policies.0.name=tokn": "did you mean topk?",
    "policies=topk": "policies: expected a list, got 'topk'",
    "policies.0.x=1": "policies.0: x: topk has no such field; expected no fields",
    "policies.1.k0=99": "policies.1.k0: expected at most the model's 64 experts, got 99",
    "policies.2.k0=1": "--set policies.2.k0=1: policies.2.k0: expected 0 to 1 for an entry of the list, got 2",
    "policies.0.name=oa": "policies.0: name: expected one of ",
    "policies.0.name.x=1": "--set policies.0.name.x=1: policies.0.name.x: name has no keys of its own",
    "no-equals-sign": "--set no-equals-sign: expected key=value",
    "sweep=3": "sweep=3: expected sweep.KEY=[values]",
}


def write(folder: Path, **changes: object) -> Path:
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump({**CONFIG, **changes}, sort_keys=False))
    return path


ONE_NODE = "advise --model qwen3-30b-a3b --ep 16 --tokens 4096 --links h100-nvlink4"
COMMANDS = {
    "advise --model qwen3-30b-a3b --ep 8 --tokens 32k": "--tokens: expected a whole number such as 32768, got '32k'",
    "advise --model qwen3-30b-a3b --ep 8 --tokens 64 --peak-load 2x": "--peak-load: expected a number, got '2x'",
    "advise --model qwen3-30b-a3b --ep 8 --tokens 64 --transport nccl": "--transport: expected one of pairs, copies;",
    "advise --model Qwen/Qwen3-30B-A3B --ep 8 --tokens 64": "nothing is fetched from a hub: hf download Qwen/Qwen3-30B",
    "advise --model nonsense --ep 8 --tokens 64": "--model: expected a path of a config.json or one of deepseek",
    "advise olmoe-1b-7b": "olmoe-1b-7b: is a model's name; expected a config's path (advise takes --model olmoe-1b-7b)",
    ONE_NODE: "--links, --ep: links/h100-nvlink4: expected at most 8 ranks (inter is null: one node), got 16; "
    "h100-nvlink4-ndr crosses nodes",
    "emulat": "COMMAND: expected one of run, emulate",
    "run": "the following arguments are required: CONFIG",
    "show": "the following arguments are required: DIR",
    "emulate CONFIG policies.0.k0=2": "expected no such arguments: policies.0.k0=2; --set KEY=VALUE replaces a value",
    "emulate CONFIG --set policies.0.k0=2": "policies.0 is topk, which has no k0; have it: policies.1 (oea)",
    "emulate CONFIG --set model.preset=Qwen/Qwen3-30B-A3B": "nothing is fetched from a hub: hf download Qwen/Qwen3",
    "run CONFIG --nproc 2 --dry-run --set layer.ep_size=16": "layer.ep_size: expected a divisor of the 2 ranks, got 16"
    "; --nproc starts more; the command emulate lays out any number on one device",
    f"emulate {CONFIGS / 'quality-oea.yaml'}": "model.checkpoint: is for moe-ep-bench quality alone",
    "quality CONFIG": "workload: is for run, emulate, route and advise; quality needs model.checkpoint",
}


@pytest.mark.parametrize("command", COMMANDS)
def test_a_wrong_command_is_one_line_and_says_what_is_allowed(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [str(write(tmp_path)) if word == "CONFIG" else word for word in command.split()]
    try:
        status = cli.main([*arguments, *(["--dry-run"] if command == ONE_NODE else [])])
    except SystemExit as ended:
        status = ended.code
    said = capsys.readouterr().err
    assert COMMANDS[command] in said
    assert (status, said.count("\n"), said.startswith("moe-ep-bench: ")) == (USER_ERROR, 1, True)


@pytest.mark.parametrize("change", CHANGES)
def test_a_wrong_value_is_one_line(change: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["emulate", str(write(tmp_path)), "--set", change]) == USER_ERROR
    said = capsys.readouterr().err
    assert CHANGES[change] in said
    assert said.count("\n") == 1
    for word in ("Traceback", "pydantic", "http", "nput should", "should have"):
        assert word not in said


CONTENTS = {
    "not UTF-8": (b"name: caf\xe9\n", "expected text in UTF-8, got byte 0xe9 at position 9"),
    "UTF-16": ("name: x\n".encode("utf-16"), "expected text in UTF-8, got byte 0xff at position 0"),
    "not YAML": (b"a: [", "not valid YAML"),
    "empty": (b"", "expected keys with values, got NoneType"),
    "a list": (b"- a\n", "expected keys with values, got list"),
    "a misspelt section": (
        yaml.safe_dump({("workloads" if key == "workload" else key): value for key, value in CONFIG.items()}).encode(),
        "did you mean workload?",
    ),
    "a section twice": (b"model: 1\nmodel: 2\n", "model stands here twice"),
}


@pytest.mark.parametrize("name", CONTENTS)
def test_a_file_that_is_no_config_is_one_line(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    content, message = CONTENTS[name]
    path = tmp_path / "config.yaml"
    path.write_bytes(content)
    assert cli.main(["route", str(path)]) == USER_ERROR
    said = capsys.readouterr().err
    assert said.startswith(f"moe-ep-bench: {path}: ")
    assert message in said
    assert said.count("\n") == 1


OPTIONS = {
    "--nproc 0": "--nproc: expected at least 1, got 0",
    "--launch 1": "--launch: only for ranks that torchrun started",
}


@pytest.mark.parametrize("options", OPTIONS)
def test_a_wrong_option_is_one_line(options: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["run", str(write(tmp_path)), "--dry-run", *options.split()]) == USER_ERROR
    said = capsys.readouterr().err
    assert OPTIONS[options] in said
    assert said.count("\n") == 1


@pytest.mark.parametrize(
    ("file", "name"), [("my run (2).yaml", "my-run-2"), ("decode.yaml", "decode"), ("_.yaml", "config")]
)
def test_a_config_without_a_name_has_its_files(file: str, name: str, tmp_path: Path) -> None:
    path = write(tmp_path).rename(tmp_path / file)
    assert load_experiments(path, on_cpu=False)[0].name == name
    assert load_experiments(path, ["name=other"], on_cpu=False)[0].name == "other"


def test_a_policys_field_is_set_by_its_place(tmp_path: Path) -> None:
    (found,) = load_experiments(write(tmp_path), ["policies.1.k0=5", "policies.0.name=load_only"], on_cpu=False)
    assert [policy.label for policy in found.make_policies()] == ["load_only", "oea k0=5"]


def test_no_config_of_ours_asks_for_more_experts_than_its_model_has() -> None:
    counts = re.compile(r"^ +-? *(k0|c|count|num_dropped|num_candidates|\w*budget): ", re.MULTILINE)
    paths = [path for path in sorted(CONFIGS.glob("*.yaml")) if not path.stem.startswith("quality")]
    found = [path for path in paths if counts.search(path.read_text()) and "trace:" not in path.read_text()]
    assert len(found) > 5
    for path in found:
        assert load_experiments(path, ["sweep.workload.seed=[0]"], on_cpu=False)


SHAPE = {"num_experts": 1024, "top_k": 2, "hidden_size": 32, "ffn_hidden_size": 16}


def test_a_model_may_be_given_by_its_shape(tmp_path: Path) -> None:
    (found,) = load_experiments(write(tmp_path, model=SHAPE), on_cpu=False)
    spec = found.model.spec()
    assert (spec.num_experts, spec.top_k, spec.num_moe_layers, spec.normalize) == (1024, 2, 1, True)
    for model, message in (
        ({**SHAPE, "preset": "olmoe-1b-7b"}, "model: give either preset or hf_config, or the shape"),
        ({"top_k": 2, "hidden_size": 32}, "model: num_experts: missing beside top_k, hidden_size"),
        ({**SHAPE, "top_k": 1025}, "top_k: expected at most num_experts=1024, got 1025"),
        ({**SHAPE, "normalize": True}, "model.normalize: is gone; use model.hf_config"),
    ):
        with pytest.raises(ConfigError, match=re.escape(message)):
            load_experiments(write(tmp_path, model=model), on_cpu=False)
