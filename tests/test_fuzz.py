"""Files of other people's end in a result or in one line, whatever is in them; and none of them is run.

A short round of ``benchmarks/fuzz.py``, which has the long one, and fixed cases: each brings code that would touch a
file, its canary.
"""

from __future__ import annotations

import html.parser
import json
import pickle
import shutil
import sys
import time
import xml.etree.ElementTree as ElementTree
import zipfile
from pathlib import Path

import numpy as np
import pytest
import yaml
from results_builder import FakeCase, FakeComparison, standard_cases, write_run

from moe_ep_bench.analysis.figures import FIGURES
from moe_ep_bench.files import MOST_DEPTH, parse_yaml
from moe_ep_bench.results import RunDirectory

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))
import fuzz

SMALL = {"num_batches": 2, "num_iterations": 1, "tokens": 64}


@pytest.mark.parametrize(("kind", "inputs"), [("configs", 50), ("recordings", 50), ("results", 16), ("commands", 12)])
def test_mutated_inputs_end_in_a_result_or_one_line(kind: str, inputs: int) -> None:
    findings, statuses = fuzz.fuzz(kind, inputs, seed=1_000_000)
    assert not findings, "\n".join(findings)
    assert statuses.total() == inputs
    assert statuses["2"] > inputs / 4  # The mutations do harm.


@pytest.fixture
def box(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory; a file ``canary`` in it is touched by code that runs."""
    fuzz.warm()
    monkeypatch.chdir(tmp_path)
    return tmp_path


def refused(box: Path, *command: str) -> str:
    """The one line with which a command refuses what it is given; nothing ran, and nothing was asked or written."""
    before = {path for path in box.rglob("*") if "__pycache__" not in path.parts}
    begun = time.process_time()
    outcome = fuzz.call(command, box / "out", box / "scratch")
    assert time.process_time() - begun < 5
    assert not outcome.problems
    assert outcome.status == 2, outcome.out
    assert outcome.err.startswith("moe-ep-bench: ")
    assert {path for path in box.rglob("*") if "__pycache__" not in path.parts} <= before | {box / "out"}
    assert not (box / fuzz.CANARY).exists()
    return outcome.err.strip()


PICKLE = pickle.dumps(fuzz.Touch())
NESTED = "[" * (MOST_DEPTH + 1) + "]" * (MOST_DEPTH + 1)
ALIASES = "a0: &a0 [x, x]\n" + "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 12))
MERGES = "a0: &a0 {x: 1}\n" + "".join(f"a{n}: &a{n} {{<<: [{', '.join([f'*a{n - 1}'] * 9)}]}}\n" for n in range(1, 12))
CONFIGS = {
    "a tag that calls": (
        "name: !!python/object/apply:pathlib.Path.touch [canary]",
        "could not determine a construct",
    ),
    "a tag of other values": ("name: !!binary aGk=", "got bytes"),
    "an unhashable key": ("? [a]\n: b", "found unhashable key"),
    "half a character": ('name: "\\ud800"', "not valid YAML"),
    "a terminal's command": ('name: "\\e[31m"', "expected text, got the character U+001B"),
    "an alias bomb": (ALIASES, "aliases counted"),
    "a bomb of merged keys": (MERGES, "merge keys are not read"),
    "an alias of itself": ("a: &a [*a]", f"at most {MOST_DEPTH} deep"),
    "nesting": (f"a: {NESTED}", f"at most {MOST_DEPTH} deep"),
    "an integer of 4,000 digits": (f"a: {'9' * 4000}", "expected whole numbers of 1024 bits"),
    "2 MB": ("a: 1\n" * 2**19, "expected at most 1,048,576 bytes"),
    "an impossible date": ("a: 2001-99-99", "not valid YAML"),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_a_config_that_is_no_plain_text_is_refused(name: str, box: Path) -> None:
    content, message = CONFIGS[name]
    (box / "config.yaml").write_text(content)
    assert message in refused(box, "emulate", "config.yaml", "--dry-run")


def test_what_is_no_regular_file_is_refused_and_not_waited_for(box: Path) -> None:
    import os

    os.mkfifo(box / "pipe.yaml")
    assert "expected a regular file" in refused(box, "route", "pipe.yaml")
    assert "expected a regular file" in refused(box, "route", "/dev/zero")
    os.mkfifo(box / "pipe.safetensors")
    refused(box, "trace", "info", "pipe.safetensors")


IMPOSSIBLE = {
    "workload.num_tokens=1000000000000000000000000000000": "workload: num_tokens: expected a whole number of 64 bits",
    "workload.num_batches=1000000000000": "workload.num_batches: expected at most 1,048,576",
    "layer.ep_size=1000000000000000000000": "layer: ep_size",
    "layer.ep_size=128": "layer.ep_size",
    "workload.seed=100000000000000000000000000000000000000000000": "workload: seed: expected",
    "workload.num_tokens=1000000000000": "workload.num_tokens: expected a batch of at most",
    "model={num_experts: 1000000000000, top_k: 2, hidden_size: 8, ffn_hidden_size: 8}": "at most 65,536 experts",
}


@pytest.mark.parametrize(
    ("command", "change"),
    [*(("emulate", change) for change in IMPOSSIBLE), *((one, next(iter(IMPOSSIBLE))) for one in ("route", "run"))],
)
def test_sizes_that_cannot_be_are_refused_in_planning(command: str, change: str, box: Path) -> None:
    (box / "config.yaml").write_text(yaml.safe_dump(fuzz.SMALL))
    begun = time.process_time()
    said = refused(box, command, "config.yaml", "--dry-run", "--set", "sweep.workload.seed=[0]", "--set", change)
    assert IMPOSSIBLE[change] in said
    assert time.process_time() - begun < 2


def test_yaml_of_ours_reads_as_pyyaml_reads_it() -> None:
    for path in (Path(__file__).parents[1] / "configs").rglob("*.yaml"):
        assert parse_yaml(path.read_text()) == yaml.safe_load(path.read_text())


# ---- recordings ------------------------------------------------------------------------------------------------------

VLLM = ("--preset", "olmoe-1b-7b", "--assume-equal-scores")


def test_pickles_are_never_read(box: Path) -> None:
    for name in ("x.npz", "x.safetensors", "x.pt", "x.json"):
        (box / name).write_bytes(PICKLE)
        refused(box, "trace", "info", name)
        refused(box, "trace", "import", "vllm", name, "out/made.safetensors", *VLLM)
        refused(box, "trace", "eplb", name, "out/map.json", "--ep", "2", "--spare-per-rank", "1")


def test_arrays_of_objects_are_never_read(box: Path) -> None:
    np.savez(box / "x.npz", **{"0.routed_experts": np.array([fuzz.Touch()], dtype=object)})
    said = refused(box, "trace", "import", "vllm", "x.npz", "out/made.safetensors", *VLLM)
    assert "0.routed_experts: Object arrays are pickles, which are not read" in said
    with zipfile.ZipFile(box / "y.npz", "w") as archive:
        archive.writestr("0.routed_experts.npy", PICKLE)
    refused(box, "trace", "import", "vllm", "y.npz", "out/made.safetensors", *VLLM)


# ---- checkpoints -----------------------------------------------------------------------------------------------------

OWN_CODE = (
    "from pathlib import Path\nPath('canary').touch()\nclass Config: pass\nclass Model: pass\nclass Tokens: pass\n"
)


def own_checkpoint(folder: Path, model_type: str = "mine") -> Path:
    folder.mkdir()
    autos = {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model", "AutoTokenizer": ["code.Tokens", None]}
    (folder / "config.json").write_text(json.dumps({"model_type": model_type, "auto_map": autos}))
    (folder / "tokenizer_config.json").write_text(json.dumps({"auto_map": autos, "tokenizer_class": "Tokens"}))
    (folder / "code.py").write_text(OWN_CODE)
    (folder / "model.safetensors").write_bytes(b"")
    return folder


@pytest.mark.parametrize("model_type", ["mine", "olmoe"])
def test_a_checkpoint_that_brings_code_is_one_line(model_type: str, box: Path) -> None:
    own_checkpoint(box / "theirs", model_type)
    (box / "text.txt").write_text("words " * 1000)
    said = refused(box, "trace", "record", "theirs", "--text", "text.txt", "--out", "out/x.safetensors")
    assert "theirs: " in said
    if model_type == "mine":
        assert "needs its own code, which is not run" in said
    quality = {
        "name": "theirs",
        "model": {"checkpoint": "theirs"},
        "text": {"file": "text.txt"},
        "policies": [{"name": "topk"}],
    }
    (box / "config.yaml").write_text(yaml.safe_dump(quality))
    refused(box, "quality", "config.yaml", "--dry-run")


def test_pickled_weights_are_not_read(box: Path) -> None:
    folder = own_checkpoint(box / "theirs")
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(PICKLE)
    (box / "text.txt").write_text("words " * 1000)
    refused(box, "trace", "record", "theirs", "--text", "text.txt", "--out", "out/x.safetensors")


# ---- results directories ---------------------------------------------------------------------------------------------


def directory(root: Path, label: str = "") -> Path:
    named = [FakeCase("oea", label=label, speedup=1.2)] if label else []
    return write_run(root, [FakeComparison(cases=[*standard_cases(), *named], **SMALL)])


def edit(path: Path, *changes: tuple[str, str]) -> None:
    text = path.read_text()
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    path.write_text(text)


NUMBERS = {
    "NaN": ('"scale": 1.0', '"scale": NaN', "NaN is no JSON number"),
    "an infinity": ('"scale": 1.0', '"scale": 1e999', "expected numbers that a double holds"),
    "5,000 digits": ('"num_tokens": 64', f'"num_tokens": {"9" * 5000}', "run.json: damaged, not JSON"),
    "100 digits": ('"num_tokens": 64', f'"num_tokens": {"9" * 100}', "expected whole numbers of 64 bits"),
    "a text": ('"num_tokens": 64', '"num_tokens": "many"', "num_tokens: expected a whole number, got 'many'"),
    "no tokens": ('"num_tokens": 64', '"num_tokens": 0', "num_tokens: expected at least 1, got 0"),
    "half a character": ('"model": "Tiny-MoE"', '"model": "\\ud800"', "expected text, got the character U+D800"),
    "nesting": ('"config": {}', f'"config": {{"x": {NESTED}}}', f"at most {MOST_DEPTH} deep"),
}


@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_and_words_that_cannot_be_are_refused(name: str, box: Path) -> None:
    old, new, message = NUMBERS[name]
    edit(directory(box / "run") / "run.json", (old, new))
    assert message in refused(box, "show", "run")


@pytest.mark.parametrize("case_id", ["../../outside", "/etc/passwd", "a/b", "x" * 300])
def test_ids_lead_to_no_other_file(case_id: str, box: Path) -> None:
    root = directory(box / "run")
    shutil.copy(root / "cases" / "c0-0.parquet", box / "outside.parquet")
    (root / "cases" / "c0-0.parquet").unlink()
    (root / "routing" / "c0.parquet").unlink()
    edit(root / "run.json", ('"c0"', json.dumps(case_id)))
    assert "name" in refused(box, "show", "run")


@pytest.mark.parametrize("what", ["run.json", "cases", "cases/c0-0.parquet", "routing/c0.parquet"])
def test_links_lead_to_no_other_file(what: str, box: Path) -> None:
    root = directory(box / "run")
    (root / what).rename(box / "outside")
    (root / what).symlink_to(box / "outside")
    assert "leads out of run" in refused(box, "show", "run")
    if what == "cases":  # within the directory a link is followed
        (root / what).unlink()
        (box / "outside").rename(root / "moved")
        (root / what).symlink_to("moved")
        assert RunDirectory(root).statuses("c0", 0)


class Elements(html.parser.HTMLParser):
    """The attributes of a page's elements, and what its scripts begin with."""

    def __init__(self) -> None:
        super().__init__()
        self.attributes: list[tuple[str, str | None]] = []
        self.scripts: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += attrs

    def handle_data(self, data: str) -> None:
        if self.cdata_elem == "script":
            self.scripts.append(data[:20])


HOSTILE = "<script>alert(1)</script><img src=x onerror=alert(1)>-->]]>'\"&$x^$"


@pytest.mark.parametrize(
    ("link", "target"),
    [("figures", "own"), ("figures/speedup.csv", "own"), ("report.html", "own"), ("claims.json", "itself")],
)
def test_nothing_is_written_through_links_of_a_results_directory(link: str, target: str, box: Path) -> None:
    """Neither through one that leads out of it, nor through one that leads to itself."""
    root, outside = directory(box / "run", "native"), box / "own"
    outside.write_text("the user's")
    (root / link).parent.mkdir(exist_ok=True)
    (root / link).symlink_to(outside if target == "own" else (root / link).name)
    for command in (["plot", str(root), "--figures", "speedup"], ["show", str(root), "--format", "html"]):
        if command[0] == "show" and link.startswith("figures/"):
            continue  # It writes the page alone.
        done = fuzz.call(command, root, box / "scratch")
        assert (done.status, done.problems) == (2, []), done
        assert link in done.err
    assert outside.read_text() == "the user's"


def test_names_are_text_in_pages_and_pictures(box: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in set(FIGURES) - {"speedup", "phases"}:  # names enter all alike
        monkeypatch.delitem(FIGURES, name)
    root = directory(box / "run", HOSTILE)
    edit(
        root / "run.json",
        ('"Tiny-MoE', json.dumps(HOSTILE)[:-1]),
        ('"NVIDIA Fake 80GB"', json.dumps(HOSTILE)),
        ('"node"', json.dumps(HOSTILE)),
    )
    assert fuzz.call(["show", "run", "--format", "html", "--out", "out/page.html"], box / "out", box).status == 0
    page = Elements()
    page.feed((box / "out" / "page.html").read_text())
    assert page.scripts
    assert not [script for script in page.scripts if "alert" in script]
    assert not [name for name, value in page.attributes if name.startswith("on") or (name, value) == ("src", "x")]
    plot = ["plot", "run", "--format", "svg", "--figures", "speedup", "--out", "out"]
    assert fuzz.call(plot, box / "out", box).status == 0
    for picture in (box / "out").glob("*.svg"):
        tags = {element.tag.rpartition("}")[2] for element in ElementTree.parse(picture).iter()}
        assert not tags & {"script", "image", "img", "a"}
