"""Files of other people's end in a result or in one line, whatever is in them; and none of them is run.

A short round of ``benchmarks/fuzz.py``, which has the long one, and fixed cases: each brings code that would touch a
file, its canary.
"""

from __future__ import annotations

import json
import os
import pickle
import shutil
import sys
import time
import zipfile
from pathlib import Path

import numpy as np
import pytest
import yaml
from results_builder import FakeComparison, standard_cases, write_run

from moe_ep_bench.files import MOST_DEPTH, parse_yaml
from moe_ep_bench.results import RunDirectory

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))
import fuzz


@pytest.mark.parametrize(("kind", "inputs"), [("configs", 40), ("recordings", 50), ("results", 20)])
def test_damaged_inputs_end_in_a_result_or_one_line(kind: str, inputs: int) -> None:
    findings, statuses = fuzz.fuzz(kind, inputs, seed=1_000_000)
    assert not findings, "\n".join(findings)
    assert statuses.total() == inputs
    assert statuses["2"] > inputs / 4, "the damage does harm"
    sound, statuses = fuzz.fuzz(kind, 6, harm=lambda path, rand: None)
    assert (sound, statuses) == ([], {"0": 6}), "and without it there is none"


@pytest.fixture
def box(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory; a file ``canary`` in it is touched by code that runs."""
    fuzz.warm()
    monkeypatch.chdir(tmp_path)
    return tmp_path


def refused(box: Path, command: str) -> str:
    """The one line with which a command refuses what it is given; nothing ran, and nothing was asked or written."""
    before = {path for path in box.rglob("*") if "__pycache__" not in path.parts}
    begun = time.process_time()
    # YAML has a space behind a colon.
    outcome = fuzz.call([word.replace(":", ": ") for word in command.split()], box / "out", box / "scratch")
    assert time.process_time() - begun < 5
    assert not outcome.problems
    assert outcome.status == 2, outcome.out
    assert outcome.err.startswith("moe-ep-bench: ")
    assert {path for path in box.rglob("*") if "__pycache__" not in path.parts} <= before | {box / "out"}
    assert not (box / fuzz.CANARY).exists()
    return outcome.err.strip()


# ---- configs ---------------------------------------------------------------------------------------------------------

PICKLE = pickle.dumps(fuzz.Touch())
NESTED = "[" * (MOST_DEPTH + 1) + "]" * (MOST_DEPTH + 1)
ALIASES = "a0: &a0 [x, x]\n" + "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 12))
MERGES = "a0: &a0 {x: 1}\n" + "".join(f"a{n}: &a{n} {{<<: [{', '.join([f'*a{n - 1}'] * 9)}]}}\n" for n in range(1, 12))
CONFIGS = {
    "a tag that calls": ("name: !!python/object/apply:pathlib.Path.touch [canary]", "not determine a construct"),
    "a tag of other values": ("name: !!binary aGk=", "got bytes"),
    "no text for a number": ("a: !!int ''", "expected !!int, got '' in line 1, column 4"),
    "a sign alone": ('a: !!float "+"', "expected !!float, got '+'"),
    "no time": ("a: !!timestamp x", "expected !!timestamp, got 'x'"),
    "more sixtieths than a double holds": (f"a: 1{':00' * 200}.0", "expected !!float, got '1:00"),
    "neither true nor false": ("a: !!bool maybe", "expected !!bool, got 'maybe'"),
    "a list as a set": ("a: !!set [x]", "expected a mapping node, but found sequence"),
    "text as a map": ("a: !!map x", "expected a mapping node, but found scalar"),
    "an unhashable key": ("? [a]\n: b", "found unhashable key"),
    "half a character": ('name: "\\ud800"', "not valid YAML"),
    "a terminal's command": ('name: "\\e[31m"', "expected text, got the character U+001B"),
    "an alias bomb": (ALIASES, "aliases counted"),
    "a bomb of merged keys": (MERGES, "merge keys are not read"),
    "an alias of itself": ("a: &a [*a]", f"at most {MOST_DEPTH} deep"),
    "nesting": (f"a: {NESTED}", f"at most {MOST_DEPTH} deep"),
    "nesting without end": (f"a: {'[' * 500_000}", f"at most {MOST_DEPTH} deep"),
    "an integer of 4,000 digits": (f"a: {'9' * 4000}", "expected whole numbers of 64 bits"),
    "2 MB": ("a: 1\n" * 2**19, "expected at most 1,048,576 bytes"),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_a_config_that_is_no_plain_text_is_refused(name: str, box: Path) -> None:
    content, message = CONFIGS[name]
    (box / "config.yaml").write_text(content)
    assert message in refused(box, "emulate config.yaml --dry-run")


def test_what_is_no_regular_file_is_refused_and_not_waited_for(box: Path) -> None:
    for name in ("pipe.yaml", "pipe.safetensors"):
        os.mkfifo(box / name)
    assert "expected a regular file" in refused(box, "route pipe.yaml")
    assert "expected a regular file" in refused(box, "route /dev/zero")
    refused(box, "trace info pipe.safetensors")


IMPOSSIBLE = {
    "workload.num_tokens=1000000000000000000000000000000": "expected whole numbers of 64 bits, got one of 100",
    "layer.ep_size=1000000000000000000000": "--set layer.ep_size=1",
    "workload.num_tokens=1000000000000": "workload.num_tokens: expected a batch of at most",
    "model={num_experts:1000000000000,top_k:2,hidden_size:8,ffn_hidden_size:8}": "at most 65,536 experts",
}


@pytest.mark.parametrize("change", IMPOSSIBLE)
def test_sizes_that_cannot_be_are_refused_in_planning(change: str, box: Path) -> None:
    (box / "config.yaml").write_text(yaml.safe_dump({**fuzz.SMALL, "sweep": {"workload.seed": [0]}}))
    assert IMPOSSIBLE[change] in refused(box, f"emulate config.yaml --dry-run --set {change}")


def test_yaml_of_ours_reads_as_pyyaml_reads_it() -> None:
    for path in (Path(__file__).parents[1] / "configs").rglob("*.yaml"):
        assert parse_yaml(path.read_text()) == yaml.safe_load(path.read_text())


# ---- recordings and checkpoints --------------------------------------------------------------------------------------

INTO = "out/made.safetensors --preset olmoe-1b-7b --assume-equal-scores"


@pytest.mark.parametrize("name", ["x.npz", "x.safetensors", "x.pt", "x.json"])
def test_pickles_are_never_read(name: str, box: Path) -> None:
    (box / name).write_bytes(PICKLE)
    refused(box, f"trace info {name}")
    refused(box, f"trace import vllm {name} {INTO}")
    refused(box, f"trace eplb {name} out/map.json --ep 2 --spare-per-rank 1")


def test_arrays_of_objects_are_never_read(box: Path) -> None:
    np.savez(box / "x.npz", **{"0.routed_experts": np.array([fuzz.Touch()], dtype=object)})
    said = refused(box, f"trace import vllm x.npz {INTO}")
    assert "0.routed_experts: Object arrays cannot be loaded" in said
    with zipfile.ZipFile(box / "y.npz", "w") as archive:
        archive.writestr("0.routed_experts.npy", PICKLE)
    refused(box, f"trace import vllm y.npz {INTO}")


@pytest.mark.parametrize(("model_type", "is_pickled"), [("mine", False), ("olmoe", False), ("olmoe", True)])
def test_a_checkpoint_that_brings_code_or_pickles_is_one_line(model_type: str, is_pickled: bool, box: Path) -> None:
    folder = box / "theirs"
    folder.mkdir()
    autos = {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model", "AutoTokenizer": ["code.Tokens", None]}
    (folder / "config.json").write_text(json.dumps({"model_type": model_type, "auto_map": autos}))
    (folder / "tokenizer_config.json").write_text(json.dumps({"auto_map": autos, "tokenizer_class": "Tokens"}))
    (folder / "code.py").write_text("import pathlib\npathlib.Path('canary').touch()\nclass Config: pass\n")
    (folder / ("pytorch_model.bin" if is_pickled else "model.safetensors")).write_bytes(PICKLE if is_pickled else b"")
    (box / "text.txt").write_text("words " * 1000)
    said = refused(box, "trace record theirs --text text.txt --out out/x.safetensors")
    assert ("needs its own code, which is not run" in said) == (model_type == "mine")
    config = {"model": {"checkpoint": "theirs"}, "text": {"file": "text.txt"}, "policies": [{"name": "topk"}]}
    (box / "config.yaml").write_text(yaml.safe_dump({"name": "theirs", **config}))
    refused(box, "quality config.yaml --dry-run")


# ---- results directories ---------------------------------------------------------------------------------------------


def directory(root: Path) -> Path:
    small = {"num_batches": 2, "num_iterations": 1, "tokens": 64}
    return write_run(root, [FakeComparison(cases=standard_cases(), **small)])


def edit(path: Path, *changes: tuple[str, str]) -> None:
    text = path.read_text()
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    path.write_text(text)


TOKENS = '"num_tokens": 64'
EDITS = {
    "NaN": ('"scale": 1.0', '"scale": NaN', "NaN is no JSON number"),
    "an infinity": ('"scale": 1.0', '"scale": 1e999', "expected numbers that a double holds"),
    "5,000 digits": (TOKENS, f'"num_tokens": {"9" * 5000}', "run.json: damaged, not JSON"),
    "a text": (TOKENS, '"num_tokens": "many"', "num_tokens: expected a whole number, got 'many'"),
    "no tokens": (TOKENS, '"num_tokens": 0', "num_tokens: expected at least 1, got 0"),
    "half a character": ('"model": "Tiny-MoE"', '"model": "\\ud800"', "expected text, got the character U+D800"),
    "nesting": ('"config": {}', f'"config": {{"x": {NESTED}}}', f"at most {MOST_DEPTH} deep"),
    **{case_id: ('"c0"', json.dumps(case_id), "name") for case_id in ("../../outside", "/etc/passwd", "x" * 300)},
}


@pytest.mark.parametrize("name", EDITS)
def test_numbers_words_and_ids_that_cannot_be_are_refused(name: str, box: Path) -> None:
    old, new, message = EDITS[name]
    root = directory(box / "run")
    if old == '"c0"':
        shutil.move(root / "cases" / "c0-0.parquet", box / "outside.parquet")
        (root / "routing" / "c0.parquet").unlink()
    edit(root / "run.json", (old, new))
    assert message in refused(box, "show run")


@pytest.mark.parametrize("what", ["run.json", "cases", "cases/c0-0.parquet", "routing/c0.parquet"])
def test_links_lead_to_no_other_file(what: str, box: Path) -> None:
    root = directory(box / "run")
    (root / what).rename(box / "outside")
    (root / what).symlink_to(box / "outside")
    assert "leads out of run" in refused(box, "show run")
    if what == "cases":  # within the directory a link is followed
        (root / what).unlink()
        (box / "outside").rename(root / "moved")
        (root / what).symlink_to("moved")
        assert RunDirectory(root).statuses("c0", 0)


@pytest.mark.parametrize(
    ("link", "target"),
    [("figures", "own"), ("figures/speedup.csv", "own"), ("report.html", "own"), ("claims.json", "itself")],
)
def test_nothing_is_written_through_links_of_a_results_directory(link: str, target: str, box: Path) -> None:
    """Neither through one that leads out of it, nor through one that leads to itself."""
    root, outside = directory(box / "run"), box / "own"
    outside.write_text("the user's")
    (root / link).parent.mkdir(exist_ok=True)
    (root / link).symlink_to(outside if target == "own" else (root / link).name)
    commands = [["plot", str(root), "--figures", "speedup"], ["show", str(root), "--format", "html"]]
    for command in commands[: 1 if link.startswith("figures/") else 2]:  # `show` writes the page alone.
        done = fuzz.call(command, root, box / "scratch")
        assert (done.status, done.problems) == (2, []), done
        assert link in done.err
    assert outside.read_text() == "the user's"
