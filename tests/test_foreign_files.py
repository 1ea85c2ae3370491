"""Files of other people are data: pickles, YAML's tags and a checkpoint's code end in one line, and none runs."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest
import yaml

from moe_ep_bench import cli
from moe_ep_bench.runtime.exit_codes import USER_ERROR


class Touch:
    """Unpickled, it makes the file ``canary``."""

    def __reduce__(self) -> tuple:
        return Path.touch, (Path("canary"),)


PICKLE = pickle.dumps(Touch())


@pytest.fixture
def box(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def refused(box: Path, capsys: pytest.CaptureFixture[str]):
    """The one line with which a command refuses what it is given; nothing ran, and nothing was written."""

    def line(command: str) -> str:
        before = set(box.rglob("*"))
        assert cli.main(command.split()) == USER_ERROR
        *_, said = capsys.readouterr().err.splitlines()
        assert said.startswith("moe-ep-bench: ")
        assert set(box.rglob("*")) <= before | {box / "out"}
        return said

    return line


def test_a_tag_that_calls_is_refused(box: Path, refused) -> None:
    (box / "config.yaml").write_text("name: !!python/object/apply:pathlib.Path.touch [canary]")
    assert "not valid YAML: could not determine a constructor" in refused("emulate config.yaml --dry-run")


INTO = "out/made.safetensors --preset olmoe-1b-7b --phase prefill --domain text --licence mine"


@pytest.mark.parametrize("name", ["x.npz", "x.safetensors", "x.pt", "x.json"])
def test_pickles_are_never_read(name: str, box: Path, refused) -> None:
    (box / name).write_bytes(PICKLE)
    for command in (f"trace info {name}", *(f"trace import {kind} {name} {INTO}" for kind in ("vllm", "flame-moe"))):
        refused(command)


@pytest.mark.parametrize(("model_type", "is_pickled"), [("mine", False), ("olmoe", False), ("olmoe", True)])
def test_a_checkpoint_that_brings_code_or_pickles_is_one_line(
    model_type: str, is_pickled: bool, box: Path, refused
) -> None:
    folder = box / "theirs"
    folder.mkdir()
    autos = {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model", "AutoTokenizer": ["code.Tokens", None]}
    (folder / "config.json").write_text(json.dumps({"model_type": model_type, "auto_map": autos}))
    (folder / "tokenizer_config.json").write_text(json.dumps({"auto_map": autos, "tokenizer_class": "Tokens"}))
    (folder / "code.py").write_text("import pathlib\npathlib.Path('canary').touch()\nclass Config: pass\n")
    (folder / ("pytorch_model.bin" if is_pickled else "model.safetensors")).write_bytes(PICKLE if is_pickled else b"")
    (box / "text.txt").write_text("words " * 1000)
    said = refused("trace record theirs --text text.txt --out out/x.safetensors")
    assert ("needs its own code, which is not run" in said) == (model_type == "mine")
    config = {"model": {"checkpoint": "theirs"}, "text": {"file": "text.txt"}, "policies": [{"name": "topk"}]}
    (box / "config.yaml").write_text(yaml.safe_dump({"name": "theirs", **config}))
    refused("quality config.yaml --dry-run")
