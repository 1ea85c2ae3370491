"""run.json holds facts; the sentences of results are composed from them when they are printed."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from results_builder import FakeCase, FakeComparison, modelled_facts, prose_in, standard_cases, write_run

from moe_ep_bench.analysis.cases import cases, comparisons
from moe_ep_bench.analysis.drawing import case_rows
from moe_ep_bench.analysis.store import load
from moe_ep_bench.cli import main
from moe_ep_bench.facts import Assumption, Environment, MissingRows, TimedFacts, words


@pytest.mark.parametrize("command", ["emulate", "route"])
def test_run_json_says_what_ran_in_facts_of_which_none_is_a_sentence(command: str, tmp_path: Path) -> None:
    shape = {"name": "Tiny", "num_experts": 8, "top_k": 2, "hidden_size": 64, "ffn_hidden_size": 32}
    config = {
        "name": "modelled",
        "model": shape,
        "workload": {"kind": "synthetic", "num_tokens": 64, "num_batches": 2, "peak_load": 2.0},
        "layer": {"ep_size": 4},
        "policies": [{"name": "token_drop", "capacity_factor": 1.0}],
        "emulate": {"device": "h20", "links": "h20-nvlink4", "bandwidth_scale": 2.0},
    }
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    assert main([command, str(path), "--out", str(tmp_path / "out")]) == 0
    assert prose_in(tmp_path / "out") == []
    if command == "route":
        return
    (facts,) = json.loads((tmp_path / "out" / "run.json").read_text())["comparisons"].values()
    assert (facts["device"]["name"], facts["links"]["bandwidth_scale"]) == ("h20", 2.0)
    (about,) = comparisons(load(tmp_path / "out")).to_dict("records")
    assert (about["device"], about["links"]) == ("h20", "h20-nvlink4, bandwidth x 2")
    assert about["links_words"].startswith("modelled by links/h20-nvlink4, bandwidth x 2: inside a node of 8 ")


def test_a_device_that_is_a_sentence_is_one_line_that_names_the_key(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    facts = {**modelled_facts(), "device": "modelled by devices/h100-sxm: a roofline"}
    write_run(tmp_path, [FakeComparison(cases=standard_cases(), facts=facts, num_batches=1)], "emulated")
    assert main(["show", str(tmp_path)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "run.json: comparisons.c0.device: expected " in line


def test_an_assumption_of_an_unknown_kind_is_refused() -> None:
    with pytest.raises(ValueError, match="kind"):
        Assumption(kind="guessed")


# ---- labels of cases -------------------------------------------------------------------------------------------------

ANALYSIS = Path(words.__file__).parents[1] / "analysis"
# What takes a text apart.
READERS = {"split", "rsplit", "partition", "rpartition", "removeprefix", "removesuffix", "startswith", "endswith"}
READERS |= {"extract", "match", "fullmatch", "search", "findall", "sub", "replace", "contains"}
LABELS = {"label", "family_label", "line", "legend", "variant"}


def readers_of_labels(source: str) -> list[str]:
    """Expressions that take a label, or a column of labels, apart."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in READERS:
            of = ast.walk(node.func.value)
            named = {one.value if isinstance(one, ast.Constant) else getattr(one, "attr", None) for one in of}
            found += [ast.unparse(node)] if named & LABELS else []
    return found


def test_nothing_takes_a_label_apart() -> None:
    assert readers_of_labels('rows["label"].str.replace("x", "")') != []
    assert {path.name: readers_of_labels(path.read_text()) for path in ANALYSIS.glob("*.py")} == {
        path.name: [] for path in ANALYSIS.glob("*.py")
    }


def test_families_sweeps_and_order_are_of_settings_whatever_labels_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drops = [
        FakeCase("token_drop", params={"capacity_factor": factor, "metric": metric}, defaults=["metric"] * (not by))
        for factor in (10.0, 2.0)
        for by, metric in enumerate(("score", "order"))
    ]
    ways = [FakeCase("eplb", "replication", {"spare_per_rank": spare}) for spare in (4, 1)]
    few = {"noise": 0.0, "num_batches": 2, "num_iterations": 1}
    write_run(tmp_path, [FakeComparison(cases=[*standard_cases()[1:], *drops, *ways], **few)])

    def look() -> tuple[list[str], list[str], list[int]]:
        store = load(tmp_path)
        rows = case_rows(store)
        return list(cases(store)["case_id"]), list(rows["step"].astype(str)), rows["line"].factorize()[0].tolist()

    expected = look()
    compose = words.label_parts
    numbered: dict[str, str] = {}

    def other(policy: str, settings: object, role: str, **how: object) -> list[str]:
        composed = " ".join(compose(policy, settings, role, **how))
        return [numbered.setdefault(composed, f"{len(numbered)} = {99 - len(numbered)}, 7 spare per rank")]

    monkeypatch.setattr(words, "label_parts", other)
    assert look() == expected
    assert (expected[1].count("1 spare"), expected[1].count("2.0")) == (1, 2)


LAYER = {"name": "table:a", "shape": (2048, 768, 128, 8), "ep_size": 16}


@pytest.mark.parametrize(
    ("missing", "expected"),
    [
        (
            {"kind": "package", "name": "p", "known": ("q[r]",)},
            "p is not installed; expected: launch/setup.sh --with tables, or pip install 'q[r]'",
        ),
        (
            {"kind": "part", "name": "h10", "part": "system", "known": ("a", "h100")},
            "expected a system of a, h100; got 'h10' (did you mean h100?)",
        ),
        ({"kind": "part", "name": "a", "part": "framework"}, "expected a framework of none; got 'a'"),
        (
            {"kind": "experts", "dtype": "fp8", **LAYER},
            "table:a has no measured experts of 2048 x 768, 128 experts, top-8, EP 16, fp8",
        ),
        (
            {"kind": "exchange", "stage": "decode", **LAYER},
            "table:a has no exchange measured at decode of hidden size 2048, EP 16",
        ),
    ],
)
def test_rows_that_are_missing_are_facts_of_which_a_line_is_composed(missing: dict[str, Any], expected: str) -> None:
    found = MissingRows.model_validate(missing)
    assert words.missing_words(found) == expected
    both = Assumption(kind="modelled", names=["experts", "exchange"], missing=found)
    assert words.assumption_words(both) == f"experts and exchange modelled: {expected}"
    stored = both.model_dump_json()
    assert "expected" not in stored
    assert Assumption.model_validate_json(stored) == both


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ([], ""),
        ([()], ""),
        ([("A", "EP 8"), (), ("A", "EP 8")], "A, EP 8"),
        (
            [("A", "EP 8", "peak load 1"), ("A", "EP 8", "peak load 2"), ("A", "EP 8", "peak load 4")],
            "A, EP 8, peak load 1 / peak load 2 / peak load 4",
        ),
        ([("A", number, "z") for number in "1234"], "A, 1 / 2 more / 4, z"),
        ([("A", "z"), ("A", "2", "z")], "A, z / A, 2, z"),
        ([("A", "z"), ("A",)], "A, z / A"),
        ([("a",), ("b",)], "a / b"),
        ([("a, of x",), ("a, of y",)], "a, of x / a, of y"),
    ],
)
def test_what_lines_share_is_said_once_by_parts(lines: list[words.Parts], expected: str) -> None:
    assert words.said_once(lines) == expected


def test_what_a_comparison_is_named_by_is_composed_of_its_facts() -> None:
    rows = {"package": "p", "package_version": "1", "system": "h200_sxm", "framework": "vllm", "version": "0.9"}
    shape = {"hidden_size": 64, "ffn_hidden_size": 32, "num_experts": 8, "top_k": 2, "ep_size": 2, "num_rows": 2}
    experts = {"name": "t", "measured_by": {**rows, "file": "f"}, "dtype": "fp8", "fewest_tokens": 1, "most_tokens": 9}
    workload = {"kind": "synthetic", "tail_model": None}
    more = {"title": None, "cuda_graph": "layer", "workload": workload, "expert_rows": {**experts, **shape}}
    facts = TimedFacts.model_validate(FakeComparison(facts={**modelled_facts(), **more}).described())
    assert words.title_words(facts) == "Tiny-MoE, EP 2, 4,096 tokens, no skew, CUDA graph"
    ran_on = words.ran_on_parts(Environment(), facts, in_short=True)
    by = "experts measured elsewhere (p 1, vLLM 0.9 on H200 SXM, fp8)"
    assert ran_on == ("2 ranks", by, "the rest modelled")
