"""Policies outside of the package: the page's example under every command, and broken ones."""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import hf_models
import pandas as pd
import pytest
import torch
import yaml
from results_builder import label_in

from moe_ep_bench import cli
from moe_ep_bench.errors import CASES_FAILED, OK, USER_ERROR
from moe_ep_bench.facts import CaseFacts
from moe_ep_bench.policies import make_policy, policy_class, source_hash
from moe_ep_bench.policies.laws import LAWS, check_text

PAGE = Path(__file__).parents[1] / "docs" / "policies.md"
EXAMPLE = re.search(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)[1]
WEIGHTED = "weighted(scores_TE, map_TE, top_k_TE, context)"
NAME = "my_policy:LeaveBusiest"
CONFIG = {
    "model": {"preset": "olmoe-1b-7b", "scale": 0.03125},
    "workload": {"kind": "synthetic", "num_tokens": 32, "num_batches": 1, "peak_load": 3.0},
    "layer": {"ep_size": 2, "dtype": "float32"},
    "policies": [{"name": NAME, "num_left": 2}],
    "measure": {"iterations": 1, "breakdown_iterations": 0, "warmup": 1},
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The example beside a config."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    write_policy(tmp_path, EXAMPLE)
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(CONFIG))
    return tmp_path


def write_policy(folder: Path, text: str) -> None:
    """The next command imports this text, as one of its own process does."""
    (folder / "my_policy.py").write_text(text)
    sys.modules.pop("my_policy", None)
    importlib.invalidate_caches()


def cases_of(out: Path) -> dict[str, dict]:
    """What run.json says of the policy's cases, by id."""
    described = json.loads((out / "run.json").read_text())
    assert str(out.parent) not in json.dumps(described["config"])
    assert described["config"][0]["policies"][0]["name"] == NAME
    return {key: case for key, case in described["cases"].items() if case["policy"] == "leave_busiest"}


@pytest.mark.slow
def test_route_and_modelled_emulation_take_it_and_an_edit_makes_another_case(folder: Path) -> None:
    assert cli.main(["route", str(folder / "tiny.yaml"), "--out", str(folder / "routed")]) == OK
    modelled = ["--set", "emulate.device=h100-sxm", "--set", "emulate.links=h100-nvlink4"]
    assert cli.main(["emulate", str(folder / "tiny.yaml"), "--out", str(folder / "emulated"), *modelled]) == OK
    (case,) = cases_of(folder / "emulated").values()
    assert label_in(case) == "leave_busiest num_left=2"
    assert CaseFacts(**case).policy_params == {"num_left": 2}
    assert case["by_torch"]
    before = cases_of(folder / "routed")
    write_policy(folder, EXAMPLE + "# another rule\n")
    assert cli.main(["route", str(folder / "tiny.yaml"), "--out", str(folder / "routed")]) == OK
    now = cases_of(folder / "routed")
    assert not set(before) & set(now)
    assert [case["policy_code"] for case in before.values()] != [case["policy_code"] for case in now.values()]
    assert source_hash(policy_class("topk")) is None


@pytest.mark.slow
def test_every_rank_and_quality_take_it(folder: Path) -> None:
    paths = f"{folder}/tiny.yaml", "--out", f"{folder}/ran"
    command = [sys.executable, "-m", "moe_ep_bench", "run", *paths, "--nproc", "2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500)
    assert done.returncode == OK, done.stderr
    (case_id,) = cases_of(folder / "ran")
    (part,) = (folder / "ran" / "cases").iterdir()
    assert case_id in pd.read_parquet(part)["case_id"].tolist()
    hf_models.checkpoint(folder / "checkpoint", "olmoe")
    (folder / "words.txt").write_text("".join(f"{n}: the mean of {n * 7 % 13} and a word\n" for n in range(20)))
    config = {
        "model": {"checkpoint": "checkpoint"},
        "text": {"file": "words.txt", "num_sequences": 2, "sequence_length": 16, "batch_size": 2},
        "layer": {"ep_size": 2},
        "policies": [{"name": NAME}],
    }
    (folder / "judged.yaml").write_text(yaml.safe_dump(config))
    assert cli.main(["quality", str(folder / "judged.yaml"), "--out", str(folder / "judged")]) == OK
    assert len(cases_of(folder / "judged")) == 1


@pytest.mark.usefixtures("folder")
def test_the_laws_can_be_run_on_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["check-policy", NAME, "--set", "num_left=2"]) == OK
    assert capsys.readouterr().out.count("  kept: ") == len(LAWS) == 8


BREAKS = {
    "a token's experts in float": (
        WEIGHTED,
        "Routing(map_TE.float(), scores_TE * map_TE)",
        "map_TE: expected torch.bool",
    ),
    "negative weights": (WEIGHTED, "Routing(map_TE, -scores_TE * map_TE)", "negative weight"),
    "weights off the map": (WEIGHTED, "Routing(map_TE, scores_TE)", "where map_TE is False"),
    "weights are not normalised": (
        WEIGHTED,
        "Routing(map_TE, context.scale * scores_TE * map_TE)",
        "a pair of a token that keeps its top-k weighs",
    ),
    "weights are not scaled": (
        WEIGHTED,
        "weighted(scores_TE, map_TE, top_k_TE, dataclasses.replace(context, scale=1.0))",
        "weighs 0.75, the model's 1.875 (scale 2.5",
    ),
    "weights are biased": (
        WEIGHTED,
        "weighted((scores_TE + (0 if context.bias_E is None else context.bias_E)).relu(), map_TE, top_k_TE, context)",
        "bias_E for the selection alone",
    ),
    "a draw of its own": ("top_k_TE & (", "top_k_TE & (torch.rand(scores_TE.shape) < 0.5) & (", "generator moved"),
    "padding counts": ("top_k_map(scores_TE, context).double()", "scores_TE.double()", "the routing has another map"),
    "statistics are left out": ("if stats is None else stats", "", "of a part of the batch"),
    "statistics in float32": (".double()", ".float()", "batch_stats: expected torch.float64"),
    "statistics of some tokens": (
        ".double().sum(dim=0, keepdim=True)",
        ".double().sum(dim=0, keepdim=True) if len(scores_TE) else None",
        "batch_stats: expected a tensor of every part of the batch, got None of one",
    ),
    "it looks past the top-k": (
        "map_TE = top_k_TE & (",
        "map_TE = top_k_TE & (scores_TE > scores_TE.mean(dim=1, keepdim=True)) & (",
        "declare looks_past_top_k = True",
    ),
    "it fails": (
        "busiest_E[stats",
        "busiest_E[missing",
        "NameError: name 'missing' is not defined (my_pol",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", BREAKS)
def test_each_law_can_be_broken(name: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before, after, message = BREAKS[name]
    assert before in EXAMPLE
    write_policy(folder, EXAMPLE.replace(before, after))
    assert cli.main(["check-policy", NAME]) == CASES_FAILED
    said = capsys.readouterr().out
    assert "BROKEN: " in said
    assert message in said


def test_a_law_behind_one_that_is_always_broken_counts_as_not_tried(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    always = "return Routing(map_TE, scores_TE.double())\n        return weighted("
    write_policy(folder, EXAMPLE.replace("return weighted(", always))
    assert cli.main(["check-policy", NAME]) == CASES_FAILED
    said = capsys.readouterr().out
    assert (said.count("BROKEN: "), said.count("  kept: "), said.count("not tried: ")) == (1, 0, len(LAWS) - 1)


def test_trials_that_a_policy_refuses_are_counted_and_all_others_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = make_policy({"name": "topk"})

    def check(self: object, scores_TE: torch.Tensor, context: object) -> None:
        if len(scores_TE) % 2:
            raise ValueError("an odd number of tokens")

    monkeypatch.setattr(type(policy), "check", check)
    said, _ = check_text(policy, "topk")
    counts = re.match(r"topk: (\d+) trials, (\d+) refused \(.*: an odd number of tokens\)\n", said)
    assert counts is not None
    assert min(map(int, counts.groups())) > 1


CONTRACT = "expected @dataclass(frozen=True, kw_only=True) on a class that extends"
MISTAKES = {
    "no module": ({"name": "no.such.module:A"}, None, "cannot load 'no.such.module:A': ModuleNotFoundError"),
    "no class": ({"name": "my_policy:Other"}, None, "AttributeError: module 'my_policy' has no attribute 'Other'"),
    "no policy": ({"name": "my_policy:ClassVar"}, None, CONTRACT),
    "syntax": ({"name": NAME}, ("def route", "def"), "SyntaxError"),
    "not frozen": ({"name": NAME}, ("frozen=True, ", ""), "cannot inherit non-frozen dataclass"),
    "no dataclass": ({"name": NAME}, ("@dataclass(frozen=True, kw_only=True)", ""), CONTRACT),
    "no route": ({"name": NAME}, ("def route", "def routes"), CONTRACT),
    "a name of ours": ({"name": NAME}, ('"leave_busiest"', '"oea"'), "and none of moe-ep-bench's; got 'oea'"),
    "no name": ({"name": NAME}, ('"leave_busiest"', "None"), "expected its name in lower case"),
    "a field": ({"name": NAME, "num_loft": 2}, None, "leave_busiest has no such field; expected num_left"),
    "a value": ({"name": NAME, "num_left": -1}, None, "num_left: expected 0 or more, got -1"),
    "a type": ({"name": NAME, "num_left": "2"}, None, "num_left: expected a valid integer, got '2'"),
    "no type": ({"name": NAME}, ("num_left: int", "num_left: torch.Tensor"), "leave_busiest (): Unable to generate"),
    "no check": ({"name": NAME}, ("num_left < 0", "num_left < '0'"), "leave_busiest (): '<' not supported"),
    "a float map": (
        {"name": NAME}, ("return weighted(", "return Routing(map_TE.float(), scores_TE)\n        return weighted("),
        "map_TE: expected torch.bool [2, 64]",
    ),
    "a fault": (
        {"name": NAME}, ("return weighted(", "raise RuntimeError('no such\\nexpert')\n        return weighted("),
        "policies: leave_busiest: route raised RuntimeError: no such expert",
    ),
    "an exit": ({"name": NAME}, ("from dataclasses", "raise SystemExit(5)\nfrom dataclasses"), "SystemExit: 5"),
    "a misspelt name": ({"name": "token_dorp"}, None, "(did you mean token_drop?)"),
}  # fmt: skip


@pytest.mark.parametrize("name", MISTAKES)
def test_a_policy_that_cannot_be_used_is_one_line(name: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    entry, change, message = MISTAKES[name]
    if change:
        write_policy(folder, EXAMPLE.replace(*change))
    (folder / "tiny.yaml").write_text(yaml.safe_dump({**CONFIG, "policies": [entry]}, width=1000))
    assert cli.main(["route", str(folder / "tiny.yaml"), "--out", str(folder / "out")]) == USER_ERROR
    said = capsys.readouterr().err
    assert message in said
    assert said.count("\n") == 1
