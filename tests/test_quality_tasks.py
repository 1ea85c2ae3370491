"""``quality`` with ``tasks``: the lm-evaluation-harness under policies; by the package where it is installed, and by a
stand-in everywhere."""

from __future__ import annotations

import importlib
import json
import math
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pandas as pd
import pytest
import torch
import yaml
from test_quality import parts
from test_serve import CONFIG as SERVE
from test_serve import FAKE

from moe_ep_bench.analysis.answer_costs import tasks
from moe_ep_bench.analysis.store import load
from moe_ep_bench.cli import main
from moe_ep_bench.config import label_of
from moe_ep_bench.errors import CASES_FAILED, OK, USER_ERROR
from moe_ep_bench.policies import make_policy
from moe_ep_bench.quality import tasks as tasks_module
from moe_ep_bench.quality.checkpoint import Checkpoint
from moe_ep_bench.quality.tasks import TaskRouting, score_continuations, task_manager
from moe_ep_bench.results import RunDirectory
from moe_ep_bench.schema import QUALITY_SCHEMA

DROP = {"name": "token_drop", "capacity_factor": 0.5}
CONFIG: dict[str, Any] = {
    "name": "tiny",
    "model": {"checkpoint": "tiny-olmoe"},
    "tasks": [{"name": "sums", "num_fewshot": 2}],
    "include": "tasks",
    "batch_size": 4,
    "layer": {"ep_size": 2},
    "policies": [DROP],
}
QUESTIONS = [
    {"q": f"{n} and {n + 1} are", "options": [str(2 * n + 1), str(2 * n), "none"], "gold": n % 3} for n in range(12)
]
SUMS = """task: sums
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
fewshot_split: test
output_type: multiple_choice
doc_to_text: "{{{{q}}}}"
doc_to_choice: options
doc_to_target: gold
metric_list:
  - {{metric: acc, aggregation: mean, higher_is_better: true}}
  - {{metric: acc_norm, aggregation: mean, higher_is_better: true}}
metadata: {{version: 1.0}}
"""
GENERATED = """task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{q}}}}"
doc_to_target: "{target}"
generation_kwargs: {{until: ["\\n"], max_gen_toks: 3, do_sample: false}}
{more}metric_list:
  - {{metric: exact_match, aggregation: mean, higher_is_better: true}}
"""


@pytest.fixture(scope="module")
def folder(tiny_olmoe: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint, a text, tasks and a config side by side."""
    folder = tmp_path_factory.mktemp("quality")
    for name in ("tiny-olmoe", "words.txt"):
        (folder / name).symlink_to(tiny_olmoe / name)
    tasks = folder / "tasks"
    tasks.mkdir()
    data = tasks / "questions.jsonl"
    data.write_text("".join(json.dumps(question) + "\n" for question in QUESTIONS))
    (tasks / "sums.yaml").write_text(SUMS.format(data=data))
    (tasks / "written.yaml").write_text(GENERATED.format(name="written", data=data, target="{{options[0]}}", more=""))
    (tasks / "group.yaml").write_text(
        "group: together\ntask: [sums]\naggregate_metric_list:\n  - {metric: acc, weight_by_size: true}\n"
    )
    (folder / "config.yaml").write_text(yaml.safe_dump(CONFIG))
    return folder


@pytest.fixture(scope="module")
def checkpoint(folder: Path) -> Checkpoint:
    return Checkpoint.open(folder / "tiny-olmoe")


@pytest.fixture(scope="module")
def model(checkpoint: Checkpoint) -> Any:
    return checkpoint.load("auto", torch.device("cpu"))


def encoded(text: str) -> list[int]:
    return [3 + byte for byte in text.encode()]


# --- Scores beside an oracle ---------------------------------------------------------------------

PAIRS = [
    (encoded(question["q"]), encoded(" " + option))
    for question in QUESTIONS[:3]
    for option in [*question["options"], "x", "y"]
]


def one_by_one(model: Any, pairs: Any, max_length: int = 4096) -> list[tuple[float, bool]]:
    """Every continuation in a pass of its own, without padding."""
    found = []
    for context, continuation in pairs:
        tokens = (context + continuation)[-(max_length + 1) :]
        logits_SV = model(torch.tensor([tokens[:-1]]), use_cache=False).logits[0].log_softmax(-1)
        rows = logits_SV[-len(continuation) :]
        value = sum(float(row[token]) for row, token in zip(rows, continuation, strict=True))
        found.append((value, rows.argmax(-1).tolist() == continuation))
    return found


@pytest.mark.parametrize(("batch_size", "max_length"), [(64, 4096), (4, 7)])
def test_scores_are_those_of_every_continuation_alone(batch_size: int, max_length: int, model: Any) -> None:
    with torch.inference_mode():
        found = score_continuations(model, PAIRS, max_length, batch_size)
        expected = one_by_one(model, PAIRS, max_length)
    assert [value for value, _ in found] == pytest.approx([value for value, _ in expected], rel=1e-4, abs=1e-4)
    assert [greedy for _, greedy in found] == [greedy for _, greedy in expected]


@pytest.mark.slow
def test_padding_takes_no_capacity_and_prompts_that_are_alike_are_read_once(model: Any) -> None:
    lengths: list[int] = []
    routing = TaskRouting(make_policy({"name": "topk"}), num_ranks=2)
    with torch.inference_mode(), routing.routed(model):
        handle = model.base_model.register_forward_pre_hook(
            lambda _, args, kwargs: lengths.extend(kwargs["attention_mask"].sum(dim=1).tolist()), with_kwargs=True
        )
        score_continuations(model, PAIRS, 4096, 4)
        handle.remove()
    different = {tuple((context + continuation)[:-1]) for context, continuation in PAIRS}
    assert sorted(lengths) == sorted(map(len, different)), "of x and y only what stands before them is read"
    assert len(different) < len(PAIRS)
    assert routing.sums["num_topk_pairs"] == 2 * 3 * sum(lengths), "two layers, three experts a token, no padding"
    summary = {"dropped_share": 0.0, "rerouted_share": 0.0, "retained_mass_topk": 1.0, "experts_per_token": 3.0}
    assert routing.summary() == summary


@pytest.mark.slow
def test_policies_act_where_answers_are_scored_in_the_stage_that_they_are_for(model: Any) -> None:
    def scored(spec: dict[str, Any] | None, stage: Any = "auto") -> tuple[list[tuple[float, bool]], TaskRouting]:
        routing = TaskRouting(None if spec is None else make_policy(spec), 2, stage)
        with torch.inference_mode(), routing.routed(model):
            return score_continuations(model, PAIRS, 4096, 8), routing

    native, nothing = scored(None)
    assert nothing.summary()["dropped_share"] == nothing.summary()["rerouted_share"] == 0
    assert scored({"name": "topk"})[0] == native
    for spec, lost in ((DROP, "dropped_share"), ({"name": "oea", "k0": 1}, "rerouted_share")):
        answers, routing = scored(spec)
        assert answers != native
        assert 0 < (routing.summary()[lost] or 0) < 1
    assert scored(DROP, "decode")[0] != scored(DROP)[0]
    assert scored(DROP, "prefill")[0] == scored(DROP)[0]


# --- The command, with a stand-in for the package ------------------------------------------------


class StandIn:
    """What our side takes for the harness: a task of scored options, judged by the highest score."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, int | None, int | None]] = []
        self.module: Any = None

    def simple_evaluate(
        self, model: Any, tasks: list[str], num_fewshot: int | None, limit: int | None, **_: Any
    ) -> dict[str, Any]:
        self.asked.append((tasks[0], num_fewshot, limit))
        if tasks[0] == "broken":
            raise ConnectionError("no\nroute")
        questions = QUESTIONS[:limit]
        requests = [
            (("", ""), encoded(question["q"]), encoded(" " + option))
            for question in questions
            for option in question["options"]
        ]
        scores = [value for value, _ in model._loglikelihood_tokens(requests)]
        hits = [
            float(max(range(3), key=lambda option: scores[3 * number + option]) == question["gold"])
            for number, question in enumerate(questions)
        ]
        mean = sum(hits) / len(hits)
        stderr = math.sqrt(mean * (1 - mean) / (len(hits) - 1))
        values = {"alias": "sums", "acc,none": mean, "acc_stderr,none": stderr, "f1,none": 0.5, "f1_stderr,none": "N/A"}
        samples = [
            {"doc_id": number, "filter": "none", "metrics": ["acc"], "acc": hit} for number, hit in enumerate(hits)
        ]
        return {
            "results": {tasks[0]: values},
            "n-shot": {tasks[0]: num_fewshot},
            "n-samples": {tasks[0]: {"original": 12, "effective": len(hits)}},
            "versions": {tasks[0]: 1.0},
            "higher_is_better": {tasks[0]: {"acc": True}},
            "samples": {tasks[0]: samples},
        }


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    stand_in = StandIn()

    class Model:
        def __init__(self, pretrained: Any, tokenizer: Any, batch_size: int) -> None:
            self.model, self.tokenizer, self.max_length = pretrained, tokenizer, 4096

    class Tasks:
        def __init__(self, include_path: str | None = None, include_defaults: bool = True) -> None:
            own = {file.stem for file in Path(include_path).glob("*.yaml")} if include_path else set()
            self.all_tasks = sorted(own | ({"piqa", "broken"} if include_defaults else set()))

    for name, members in {
        "lm_eval": {"simple_evaluate": stand_in.simple_evaluate},
        "lm_eval.tasks": {"TaskManager": Tasks},
        "lm_eval.models": {},
        "lm_eval.models.huggingface": {"HFLM": Model},
    }.items():
        module = ModuleType(name)
        module.__dict__.update(members)
        stand_in.module = stand_in.module or module
        monkeypatch.setitem(sys.modules, name, module)
    task_manager.cache_clear()
    yield stand_in
    task_manager.cache_clear()


def of_questions(rows: pd.DataFrame) -> pd.Series:
    return rows[rows["item"].notna()].set_index("item")["value"]


def test_rows_are_the_harnesss_numbers_and_a_second_time_nothing_is_run(
    folder: Path, stand_in: StandIn, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["quality", str(folder / "config.yaml"), "--out", str(tmp_path)]) == OK
    assert stand_in.asked == [("sums", 2, None)] * 2
    rows = parts(tmp_path)
    for label in ("native", label_of(make_policy(DROP))):
        assert list(rows[label]) == QUALITY_SCHEMA.names
        assert (rows[label]["task"] == "sums").all()
        whole = rows[label][rows[label]["item"].isna()].set_index("metric")
        ours = ["dropped_share", "rerouted_share", "retained_mass_topk", "experts_per_token"]
        assert whole.index.tolist() == ["acc", "f1", *ours]
        assert whole["filter"].isna().tolist() == [False, False, *[True] * 4]
        assert whole["stderr"].isna().tolist() == [False, *[True] * 5]
        assert (whole["num_samples"][:2] == 12).all()
        assert len(of_questions(rows[label])) == 12
        assert of_questions(rows[label]).mean() == whole["value"]["acc"]
    dropped = {label: table.set_index("metric")["value"]["dropped_share"] for label, table in rows.items()}
    assert dropped["native"] == 0
    assert dropped[label_of(make_policy(DROP))] > 0.3
    # Policies are set against the unpatched model question by question.
    paired = of_questions(rows[label_of(make_policy(DROP))]) - of_questions(rows["native"])
    native, drop = tasks(load(tmp_path)).query("metric == 'acc'").itertuples()
    assert math.isnan(native.added)
    assert math.isnan(native.added_stderr)
    assert drop.added == pytest.approx(paired.mean())
    assert drop.added_stderr == pytest.approx(paired.std() / math.sqrt(12))
    first = capsys.readouterr().out
    assert main(["quality", str(folder / "config.yaml"), "--out", str(tmp_path)]) == OK
    assert capsys.readouterr().out == first
    assert len(stand_in.asked) == 2
    assert main(["plot", str(tmp_path)]) == USER_ERROR
    assert "quality: not drawn, the run has no rows for it" in capsys.readouterr().err


def test_a_tag_stands_for_all_of_its_tasks_and_a_group_for_itself(stand_in: StandIn) -> None:
    values = {"acc,none": 0.5}
    for found, asked in ((("a", "b"), [True, True]), (("a", "both"), [False, True])):
        stand_in.module.simple_evaluate = lambda found=found, **_: {"results": dict.fromkeys(found, values)}
        rows = tasks_module.run_task(None, "both", None)
        assert [row["is_asked"] for row in rows] == asked


def test_a_task_that_fails_is_one_line_and_what_is_done_stays(
    folder: Path, stand_in: StandIn, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["quality", str(folder / "config.yaml"), "--out", str(tmp_path), "--set"]
    assert main([*arguments, "tasks=[{name: sums}, {name: broken}]"]) == USER_ERROR
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.endswith("moe-ep-bench: tasks: broken: cannot be run: ConnectionError: no route")
    (part,) = (tmp_path / "quality").iterdir()
    assert len(RunDirectory(tmp_path).statuses(part.stem, table="quality")) == 2


def refused(folder: Path, out: Path, overrides: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The one line, with the config's name, with which ``quality`` refuses to begin; it leaves nothing."""
    arguments = [part for one in overrides for part in ("--set", one)]
    assert main(["quality", str(folder / "config.yaml"), "--out", str(out), *arguments]) == USER_ERROR
    (said,) = capsys.readouterr().err.strip().splitlines()
    assert said.startswith(f"moe-ep-bench: {folder}/config.yaml: ")
    assert not out.exists()
    return said


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["tasks=[{name: piqua}]"], "tasks: expected a task of lm_eval (`lm_eval ls tasks`) or of include, got"),
        (["tasks=null"], "text, tasks: expected at least one of them, got neither"),
        (["tasks=null", "text={file: words.txt}"], "include: expected tasks beside it, got none"),
        (["tasks=[{name: sums}, {name: sums}]"], "expected each task once at each number of shots, got sums twice"),
        (["include=nowhere"], "include: Path does not point to a directory, got"),
    ],
)
def test_what_cannot_be_run_is_one_line_and_leaves_nothing(
    overrides: list[str],
    expected: str,
    folder: Path,
    stand_in: StandIn,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert expected in refused(folder, tmp_path / "out", overrides, capsys)


def test_a_task_that_names_a_function_is_refused(
    folder: Path, stand_in: StandIn, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The harness would import its module."""
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "sums.yaml").write_text("task: sums\nprocess_docs: !function evil.run\n")
    said = refused(folder, tmp_path / "out", [f"include={tmp_path / 'own'}"], capsys)
    assert f"include: {tmp_path / 'own' / 'sums.yaml'}: expected a task without code of its own" in said


def test_a_missing_package_is_one_line(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    said = refused(folder, tmp_path / "out", [], capsys)
    assert "expected the package lm_eval, which tasks need: pip install 'moe-ep-bench[harness]'" in said
    assert main(["quality", str(folder / "config.yaml"), "--dry-run"]) == OK
    assert label_of(make_policy(DROP)) in capsys.readouterr().out


# --- With the package itself ---------------------------------------------------------------------


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """The harness, with its data in a folder of this test's, and without its long look at the machine."""
    pytest.importorskip("lm_eval", reason="the extra `harness` is not installed")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "huggingface"))
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "datasets"))
    module = tasks_module.import_harness()
    monkeypatch.setattr(importlib.import_module("lm_eval.evaluator"), "add_env_info", lambda _: None)
    return module


@pytest.mark.filterwarnings("ignore")
def test_without_a_policy_the_harness_gets_what_its_own_class_answers(
    package: Any, folder: Path, checkpoint: Checkpoint, model: Any
) -> None:
    manager = task_manager(folder / "tasks")
    its_own = importlib.import_module("lm_eval.models.huggingface").HFLM(
        pretrained=model, tokenizer=checkpoint.tokenizer, batch_size=4
    )
    ours = tasks_module.routed_lm(model, checkpoint.tokenizer, TaskRouting(None), 4)
    for task, shots in (("sums", 2), ("written", None)):
        expected = package.simple_evaluate(model=its_own, tasks=[task], num_fewshot=shots, task_manager=manager)
        found = tasks_module.run_task(ours, task, manager, num_fewshot=shots)
        whole, questions = ([row for row in found if ("item" in row) == is_one] for is_one in (False, True))
        for row in whole:
            assert row["value"] == expected["results"][task][f"{row['metric']},{row['filter']}"]
        assert {row["metric"] for row in whole} == ({"acc", "acc_norm"} if shots else {"exact_match"})
        assert {row["num_samples"] for row in whole} == {12}
        assert len(questions) == 12 * len(whole)
    group = tasks_module.run_task(ours, "together", manager, num_fewshot=2)
    asked = {(row["task"], row["is_asked"]) for row in group if "item" not in row}
    assert asked == {("together", True), ("sums", False)}


@pytest.mark.filterwarnings("ignore")
def test_the_command_runs_the_packages_tasks_under_policies(
    package: Any, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["quality", str(folder / "config.yaml"), "--out", str(tmp_path / "out"), "--set"]
    asked = "tasks=[{name: sums, num_fewshot: 2}, {name: written}]"
    assert main([*arguments, asked, "--set", "limit=4"]) == OK
    scores = tasks(load(tmp_path / "out"))
    assert list(dict.fromkeys(scores["task"])) == ["sums", "written"]
    assert (scores["num_samples"] == 4).all()
    assert (scores["dropped_share"][scores["policy"] == "native"] == 0).all()
    assert (scores["dropped_share"][scores["policy"] != "native"] > 0).all()
    assert "the first 4 questions of each task only" in capsys.readouterr().out


NUMBERS = r"""filter_list:
  - {name: numbers, filter: [{function: regex, regex_pattern: "(\\d+ \\d+ \\d+)"}, {function: take_first}]}
"""


@pytest.mark.filterwarnings("ignore")
def test_servers_are_asked_tasks_after_their_rounds(
    package: Any, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The fake server counts up from the length of a prompt; under ``token_drop`` its answers to even ones turn."""
    own = tmp_path / "own"
    own.mkdir()
    counted = {"name": "counted", "target": "{{q | length}} {{q | length + 1}} {{q | length + 2}}", "more": NUMBERS}
    (own / "counted.yaml").write_text(GENERATED.format(data=folder / "tasks" / "questions.jsonl", **counted))
    content = {**SERVE, "policies": [DROP], "tasks": [{"name": "counted"}], "include": "own", "limit": 10}
    content["serve"] = {**SERVE["serve"], "command": FAKE, "model": str(folder / "tiny-olmoe")}
    content["serve"] |= {"rounds": 2, "starts": 2, "alone": 0}
    (tmp_path / "serve.yaml").write_text(yaml.safe_dump(content))
    assert main(["serve", str(tmp_path / "serve.yaml"), "--out", str(tmp_path / "out")]) == OK
    scores = tasks(load(tmp_path / "out")).set_index("label")
    odd = sum(len(question["q"]) % 2 for question in QUESTIONS[:10]) / 10
    assert 0 < odd < 1
    assert scores["task"].unique().tolist() == ["counted"]
    assert scores["num_samples"].eq(10).all()
    assert scores["value"].to_dict() == pytest.approx(
        {"native": 1, "native again": 1, label_of(make_policy(DROP)): odd}
    )
    assert scores.at[label_of(make_policy(DROP)), "added"] == pytest.approx(odd - 1)
    assert scores.at["native again", "added"] == 0
    assert main(["show", str(tmp_path / "out")]) == OK
    shown = capsys.readouterr().out
    assert "counted" in shown
    assert "asked of live servers" in " ".join(shown.split())
    content["serve"] |= {"command": f"{FAKE} --no-whole-answers", "starts": 1}
    (tmp_path / "serve.yaml").write_text(yaml.safe_dump(content))
    assert main(["serve", str(tmp_path / "serve.yaml"), "--out", str(tmp_path / "failed")]) == CASES_FAILED
    assert "native: failed: task counted: " in capsys.readouterr().err
