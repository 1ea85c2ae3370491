"""``quality``: costs of answers and what routing came to, beside slow oracles; resumed, swept, and refused."""

from __future__ import annotations

import functools
import importlib
import json
import math
import os
import re
from pathlib import Path
from typing import Any

import hf_models
import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest
import torch
import yaml
from results_builder import label_in, prose_in
from torch import Tensor
from torch.nn import functional

from moe_ep_bench.analysis.answer_costs import Answers, answers_of, claims, half_over_batches, text_costs
from moe_ep_bench.analysis.cases import cases
from moe_ep_bench.analysis.store import ResultsError, load
from moe_ep_bench.cli import main
from moe_ep_bench.config import label_of
from moe_ep_bench.config.files import load_points
from moe_ep_bench.errors import OK, USER_ERROR
from moe_ep_bench.policies import make_policy
from moe_ep_bench.quality import checkpoint as checkpoint_module
from moe_ep_bench.quality import text as text_module
from moe_ep_bench.quality.checkpoint import Checkpoint
from moe_ep_bench.quality.config import QualityExperiment
from moe_ep_bench.quality.routed import RouterCall, pass_metrics, routed
from moe_ep_bench.quality.session import plan_quality, run_quality
from moe_ep_bench.quality.text import Text, hidden_states, token_costs
from moe_ep_bench.schema import QUALITY_SCHEMA

ROOT = Path(__file__).parents[1]
DROP = {"name": "token_drop", "capacity_factor": 0.5}
RANDOM = {**DROP, "metric": "random"}
OEA = {"name": "oea", "k0": 1}
CONFIG: dict[str, Any] = {
    "name": "tiny",
    "model": {"checkpoint": "tiny-olmoe"},
    "text": {"file": "words.txt", "num_sequences": 12, "sequence_length": 16, "batch_size": 4},
    "layer": {"ep_size": 2},
    "policies": [{"name": "topk"}, DROP, RANDOM, OEA, {"name": "expanded_drop", "capacity_factor": 0}],
}


def answers_in(directory: Path) -> Answers:
    return answers_of(load(directory).directories[0])


@pytest.fixture(scope="module")
def folder(tiny_olmoe: Path) -> Path:
    """A checkpoint, a text and a config side by side."""
    write(tiny_olmoe / "config.yaml", CONFIG)
    return tiny_olmoe


@pytest.fixture(scope="module")
def done(folder: Path) -> Path:
    run_quality(folder / "config.yaml", folder / "done", [])
    return folder / "done"


def write(file: Path, content: dict[str, Any]) -> Path:
    file.write_text(yaml.safe_dump(content))
    return file


def parts(directory: Path, folder: str = "quality") -> dict[str, pd.DataFrame]:
    """Every case's rows by its label."""
    described = json.loads((directory / "run.json").read_text())
    rows = pd.concat(pq.read_table(part).to_pandas() for part in (directory / folder).iterdir())
    return {
        label_in(case): rows[rows["case_id"] == case_id].reset_index(drop=True)
        for case_id, case in described["cases"].items()
    }


def costs(directory: Path) -> dict[str, pd.DataFrame]:
    """Every case's costs by its label: a row per sequence, a column per metric."""
    return {
        label: rows.pivot(index="item", columns="metric", values="value") for label, rows in parts(directory).items()
    }


@pytest.fixture(scope="module")
def model(folder: Path) -> Any:
    return Checkpoint.open(folder / "tiny-olmoe").load("auto", torch.device("cpu"))


@pytest.fixture(scope="module")
def words(folder: Path) -> Tensor:
    return Checkpoint.open(folder / "tiny-olmoe").sequences(folder / "words.txt", 16, 12)


# --- Numbers beside oracles ----------------------------------------------------------------------


@pytest.mark.slow
def test_costs_of_answers_are_torchs_own(model: Any, words: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_module, "_LOGITS_AT_ONCE", 3000)  # a few tokens at a time
    with torch.inference_mode():
        native_BSD = hidden_states(model, words)
        native_BSV = model(words, use_cache=False).logits
        with routed(model, make_policy(DROP)):
            other_BSD = hidden_states(model, words)
            other_BSV = model(words, use_cache=False).logits
        judged = token_costs(model, other_BSD, native_BSD, words)
    log_p, log_q = native_BSV[:, :-1].log_softmax(-1), other_BSV[:, :-1].log_softmax(-1)
    expected = functional.cross_entropy(other_BSV[:, :-1].flatten(0, 1), words[:, 1:].flatten(), reduction="none")
    torch.testing.assert_close(judged.cross_entropy.flatten(), expected)
    kl_BS = functional.kl_div(log_q, log_p, log_target=True, reduction="none").sum(-1)
    torch.testing.assert_close(judged.kl, kl_BS, rtol=1e-4, atol=1e-6)
    assert torch.equal(judged.agreement.bool(), log_p.argmax(-1) == log_q.argmax(-1))
    assert 0 < float(judged.agreement.mean()) < 1


@pytest.mark.parametrize("arrangement", ["prefill", "decode"])
@pytest.mark.parametrize("spec", [DROP, {"name": "expanded_drop", "capacity_factor": 0}], ids=str)
def test_routing_metrics_are_those_of_every_step_counted_one_by_one(
    spec: dict[str, Any], arrangement: Any, model: Any, words: Tensor
) -> None:
    seen: list[RouterCall] = []
    mask_BS = torch.ones_like(words)
    mask_BS[0, 10:] = 0
    with (
        torch.inference_mode(),
        routed(model, make_policy(spec), num_ranks=2, arrangement=arrangement, observe=seen.append),
    ):
        model(words, attention_mask=mask_BS, use_cache=False)
    for one in seen:
        assert one.routing is not None
        loads, rank_loads, activated, fullest, mass, own_mass = [], [], [], [], 0.0, 0.0
        dropped = rerouted = 0
        for step in range(16 if arrangement == "decode" else 1):
            load_E = [0] * 8
            for token in range(12 * 16):
                if mask_BS.flatten()[token] and (arrangement == "prefill" or token % 16 == step):
                    missing = added = 0
                    for expert in range(8):
                        selected = bool(one.routing.map_TE[token, expert])
                        load_E[expert] += selected
                        mass += float(one.scores_TE[token, expert]) * selected
                        own_mass += float(one.scores_TE[token, expert]) * bool(one.own_TE[token, expert])
                        missing += bool(one.own_TE[token, expert]) and not selected
                        added += selected and not bool(one.own_TE[token, expert])
                    rerouted += min(missing, added)
                    dropped += missing - min(missing, added)
            if sum(load_E):
                loads.append(max(load_E) / (sum(load_E) / 8))
                rank_loads.append(max(sum(load_E[:4]), sum(load_E[4:])) / (sum(load_E) / 2))
                activated.append(sum(load > 0 for load in load_E))
                fullest.append(max(sum(load > 0 for load in half) for half in (load_E[:4], load_E[4:])))
        row = pass_metrics(one)
        assert row["num_tokens"] == 12 * 16 - 6
        expected = {
            "peak_load": np.mean(loads or [0]),
            "rank_peak_load": np.mean(rank_loads or [0]),
            "activated_experts": np.mean(activated or [0]),
            "activated_experts_fullest_rank": np.mean(fullest or [0]),
            "retained_mass_topk": mass / own_mass,
            "dropped_share": dropped / (3 * (12 * 16 - 6)),
            "rerouted_share": rerouted / (3 * (12 * 16 - 6)),
        }
        for name, value in expected.items():
            assert row[name] == pytest.approx(value, rel=1e-5), name


def test_titles_are_composed_of_facts(done: Path) -> None:
    assert prose_in(done) == []
    assert set(load(done).comparisons[0].facts.model_dump(exclude_none=True)) >= {"num_sequences", "sequence_length"}
    assert set(cases(load(done))["title"]) == {"tiny-olmoe, EP 2, words.txt, 12 sequences of 16 tokens, 4 at a time"}


def test_rows_are_what_the_model_answers(done: Path, folder: Path, model: Any, words: Tensor) -> None:
    """Three batches of four sequences, each routed by itself on two ranks."""
    rows, drop = costs(done), label_of(make_policy(DROP))
    with torch.inference_mode():
        native = model(words, use_cache=False).logits
        with routed(model, make_policy(DROP), num_ranks=2):
            dropped = torch.cat([model(batch, use_cache=False).logits for batch in words.split(4)])
    for label, logits in (("native", native), ("topk", native), (drop, dropped)):
        expected_B = [
            float(functional.cross_entropy(logits[row, :-1], words[row, 1:])) for row in range(words.shape[0])
        ]
        np.testing.assert_allclose(rows[label]["cross_entropy"], expected_B, rtol=1e-5)
    for label in ("native", "topk"):
        assert (rows[label]["kl"] == 0).all()
        assert (rows[label]["agreement"] == 1).all()
    assert rows[drop]["kl"].min() > 0
    described = json.loads((done / "run.json").read_text())
    assert str(folder) not in json.dumps(described["config"]) + json.dumps(described["comparisons"])
    assert all(list(table) == QUALITY_SCHEMA.names for table in parts(done).values())
    for label, table in parts(done, "routing").items():
        stages = {"native": {"prefill", "decode"}, label_of(make_policy(OEA)): {"decode"}}
        assert set(table["stage"]) == stages.get(label, {"prefill"})
        assert len(table) == 3 * 2 * table["stage"].nunique(), "batches, layers"


# --- Resuming, adding, sweeping ------------------------------------------------------------------


def test_a_killed_command_goes_on_with_the_cases_that_are_not_done(
    folder: Path, done: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    judged: list[str] = []
    judge_batch = Text._judge_batch

    def dying(self: Any, tables: Any, model: Any, case: Any, *rest: Any) -> Any:
        judged.append(case.label)
        if len(judged) == 8:  # native and topk have their three batches
            raise KeyboardInterrupt
        return judge_batch(self, tables, model, case, *rest)

    monkeypatch.setattr(Text, "_judge_batch", dying)
    with pytest.raises(KeyboardInterrupt):
        run_quality(folder / "config.yaml", tmp_path, [])
    assert pd.concat(map(pd.read_parquet, (tmp_path / "quality").iterdir()))["case_id"].nunique() == 2
    judged[:] = ["-"] * 9
    run_quality(folder / "config.yaml", tmp_path, [])
    assert set(judged[9:]) == {label_of(make_policy(spec)) for spec in CONFIG["policies"][1:]}
    for label, table in parts(tmp_path).items():
        pd.testing.assert_frame_equal(table.drop(columns="run_id"), parts(done)[label].drop(columns="run_id"))


def test_the_last_config_says_which_policies_there_are_and_none_is_done_twice(
    folder: Path, done: Path, tmp_path: Path
) -> None:
    config, pruned = folder / "more.yaml", {"name": "pruned", "k0": 1}
    for policies in ([RANDOM], [pruned], [RANDOM, pruned]):
        write(config, {**CONFIG, "policies": policies})
        run_quality(config, tmp_path, [])
        assert answers_in(tmp_path).cases["policy"].tolist() == ["native", *(policy["name"] for policy in policies)]
    (part,) = (tmp_path / "quality").iterdir()
    assert pd.read_parquet(part).groupby("policy")["run_id"].unique().map(len).eq(1).all()
    assert pd.read_parquet(part)["run_id"].nunique() == 2
    # What a random policy draws does not depend on the cases beside it.
    label = label_of(make_policy(RANDOM))
    assert costs(tmp_path)[label]["kl"].tolist() == costs(done)[label]["kl"].tolist()


def test_a_random_policy_draws_anew_for_every_batch(folder: Path, tmp_path: Path) -> None:
    (folder / "same.txt").write_text("fifteen letters\n" * 8)
    config = write(folder / "same.yaml", {**CONFIG, "policies": [RANDOM]})
    text = f"text={{file: {folder}/same.txt, num_sequences: 8, sequence_length: 16, batch_size: 4}}"
    run_quality(config, tmp_path, [text])
    rows = costs(tmp_path)
    assert rows["native"]["cross_entropy"].round(5).nunique() == 1
    first, second = (
        list(part["kl"]) for _, part in rows[label_of(make_policy(RANDOM))].groupby(lambda item: item // 4)
    )
    assert first != pytest.approx(second)


def test_a_sweep_is_a_comparison_for_each_of_its_points_and_a_dry_run_reads_no_weights(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Checkpoint, "load", None)
    config = str(folder / "config.yaml")
    assert main(["quality", config, "--dry-run", "--set", "sweep.text.batch_size=[1, 2, 6]"]) == OK
    said = capsys.readouterr().out
    assert [f"{size} at a time" in said for size in (1, 2, 3, 6)] == [True, True, False, True]
    planned = plan_quality(folder / "config.yaml", ["sweep.text.batch_size=[1, 2, 6]"])
    assert len({case.case_id for one in planned for case in one.cases}) == 3 * 6
    for named in ("prefill", "decode"):  # it holds for all policies
        (one,) = plan_quality(folder / "config.yaml", [f"arrangement={named}"])
        assert {one.stage(case) for case in one.cases} == {named}


# --- What is shown -------------------------------------------------------------------------------


def test_costs_and_routing_are_means_beside_the_unpatched_model(done: Path) -> None:
    costs_of = text_costs(answers_in(done)).set_index(["label", "stage"])
    # Steps of decoding have loads of their own to be set against.
    assert costs_of.index.tolist()[:3] == [("native", "decode"), ("native", "prefill"), ("topk", "prefill")]
    assert costs_of.loc["native"]["cross_entropy_added"].isna().all()
    top, drop, oea, nothing = (
        costs_of.xs(label_of(make_policy(spec))).iloc[0]
        for spec in ({"name": "topk"}, DROP, OEA, {"name": "expanded_drop", "capacity_factor": 0})
    )
    assert top["cross_entropy_added"] == 0.0
    native, other = (costs(done)[label]["cross_entropy"] for label in ("native", label_of(make_policy(DROP))))
    paired = other - native
    assert drop["cross_entropy_added"] == pytest.approx(paired.mean())
    assert (drop["num_sequences"], drop["num_batches"]) == (12, 3)
    assert math.isnan(drop["cross_entropy_added_half"]), "three batches are too few"
    assert drop["perplexity"] == pytest.approx(math.exp(other.mean()))
    assert drop["dropped_share"] > 0.4
    assert 0.1 < oea["rerouted_share"] == pytest.approx(oea["missing_share"] - oea["dropped_share"])
    assert nothing["experts_per_token"] == 0
    assert oea["activated_experts"] < costs_of.loc["native", "decode"]["activated_experts"]
    rows = parts(done, "routing")
    of_drop = rows[label_of(make_policy(DROP))]
    assert drop["rank_imbalance"] == pytest.approx(of_drop["rank_peak_load"].mean())
    over_native = of_drop["rank_peak_load"] * of_drop["num_pairs"] / of_drop["num_topk_pairs"]
    assert drop["fullest_rank"] == pytest.approx(over_native.mean())
    assert drop["fullest_rank"] < 0.7 * drop["rank_imbalance"]


@pytest.mark.slow
def test_an_interval_is_over_batches_whose_sequences_share_their_routing() -> None:
    def costs_of(means_B: list[float], sizes_B: list[int]) -> pd.DataFrame:
        index = [(batch, (batch, item)) for batch, size in enumerate(sizes_B) for item in range(size)]
        values = [means_B[batch] for batch, _ in index]
        return pd.DataFrame({"case": values}, pd.MultiIndex.from_tuples(index, names=["batch", "item"]))

    means_B = np.random.default_rng(2).normal(size=12)
    student = 2.200985 * means_B.std(ddof=1) / math.sqrt(12)  # t of 11 degrees of freedom, from a table
    for size in (1, 8):  # eight sequences that say the same say it once
        assert half_over_batches(costs_of(means_B, [size] * 12)).item() == pytest.approx(student, rel=1e-5)
    assert math.isnan(half_over_batches(costs_of(means_B[:9], [8] * 9)).item())
    random, held, sizes_B = np.random.default_rng(3), 0, [8] * 11 + [2]
    for _ in range(400):
        costs = costs_of(random.normal(size=12), sizes_B)
        mean = (costs["case"] + 0.1 * random.normal(size=len(costs))).mean()
        held += abs(mean) <= half_over_batches(costs).item()
    assert 0.9 <= held / 400 <= 0.99


# --- Papers' claims, on five checkpoints of results/reference -------------------------------------


@pytest.fixture(scope="module")
def small() -> Answers:
    """Answers of five checkpoints under 43 policies."""
    return answers_in(ROOT / "results" / "reference" / "quality-small-2cpu")


def some(quality: Answers, checkpoints: slice, batches: int = 12) -> Answers:
    """Of some of the checkpoints, and of their first batches."""
    chosen = quality.cases["comparison_id"].unique()[checkpoints]
    cases = quality.cases[quality.cases["comparison_id"].isin(chosen)].assign(checkpoints=len(chosen))
    scores = quality.scores.query("batch < @batches and case_id in @cases.index")
    return quality._replace(cases=cases, scores=scores)


PAIR = ["claim", "better", "worse"]


def test_verdicts_over_checkpoints_are_students_t_over_their_means(small: Answers) -> None:
    found = claims(small).set_index(PAIR)
    alone = pd.concat([claims(some(small, slice(n, n + 1))) for n in range(5)]).groupby(PAIR, sort=False)
    assert alone.ngroups == len(found)
    for pair, row in found.iterrows():
        of_each = alone.get_group(pair)
        assert row["worse_costs_more"] == pytest.approx(of_each["worse_costs_more"].mean())
        student = 2.776445 * of_each["worse_costs_more"].std() / math.sqrt(5)  # t of 4 degrees of freedom, from a table
        assert row["half_width"] == pytest.approx(student, rel=1e-5)
        is_sure = abs(row["worse_costs_more"]) > row["half_width"]
        assert row["verdict"] == ("inconclusive" if not is_sure else "holds"), "none of these is the other way round"
        assert row["agree"] == (of_each["verdict"] == row["verdict"]).sum()


def test_one_checkpoints_verdict_is_by_paired_differences_of_its_batches(small: Answers) -> None:
    """Sequences differ by far more than cases do."""
    row = claims(some(small, slice(1))).set_index(["better", "worse"]).loc["oea k0=1", "pruned k0=1"]
    costs = small.scores.query("metric == 'cross_entropy'").join(small.cases["label"], on="case_id")
    ids = small.cases.index[small.cases["comparison_id"] == small.cases["comparison_id"].iloc[0]]
    first = costs[costs["case_id"].isin(ids)].pivot(index=["batch", "item"], columns="label", values="value")
    added_B = (first["pruned k0=1"] - first["oea k0=1"]).groupby("batch").mean()
    assert row["worse_costs_more"] == pytest.approx(added_B.mean())
    assert row["half_width"] == pytest.approx(2.200985 * added_B.std() / math.sqrt(12), rel=1e-5)


def test_a_claim_needs_ten_batches_all_checkpoints_and_equal_fields(small: Answers) -> None:
    assert claims(some(small, slice(1), batches=9)).empty
    lost = small.cases.index[small.cases["label"] == "load_only"][2]
    kept = claims(small._replace(cases=small.cases.drop(lost), scores=small.scores.query("case_id != @lost")))
    assert len(kept) == len(claims(small)) - 2
    assert not (kept["worse"] == "load_only").any()
    for row in claims(small).itertuples():
        k0s = {re.search(r"k0=\d", label)[0] for label in (row.better, row.worse) if "k0=" in label}
        assert len(k0s) < 2 or row.better.startswith("xshare"), "whose claim is about k0"
        assert " p=" not in row.better + row.worse, "pruned has no such cases here"


# --- What is shown of a run -----------------------------------------------------------------------


def test_swept_checkpoints_are_one_comparison_each_and_read_as_one(folder: Path, tmp_path: Path) -> None:
    for number in (1, 2):
        model = hf_models.tiny(
            "olmoe", vocab_size=259, attention_dropout=number / 100
        )  # another config, as seeds' weights
        hf_models.save(model, folder / f"seed-{number}")
    policies = f"policies=[{json.dumps({**DROP, 'metric': ['score', 'random']})}]"
    swept = f"sweep.model.checkpoint=[{folder}/seed-1, {folder}/seed-2]"
    run_quality(folder / "config.yaml", tmp_path, [swept, policies])
    quality = answers_in(tmp_path)
    assert quality.cases["model"].unique().tolist() == ["seed-1", "seed-2"]
    assert set(text_costs(quality)["checkpoints"]) == {2}


def test_what_is_damaged_not_begun_or_of_another_mode_is_one_line(
    folder: Path, done: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for listed, expected in (
        ({"a": {}}, r"a\.comparison_id: Field required"),
        ({}, "no case was measured; run.json lists none"),
    ):
        (tmp_path / "run.json").write_text(json.dumps({**json.loads((done / "run.json").read_text()), "cases": listed}))
        with pytest.raises(ResultsError, match=expected):
            answers_in(tmp_path)
    (tmp_path / "run.json").write_text(json.dumps(json.loads((done / "run.json").read_text()) | {"mode": "route"}))
    assert main(["quality", str(folder / "config.yaml"), "--out", str(tmp_path), "--force"]) == USER_ERROR
    assert f"{tmp_path}: holds results with mode route, here it is quality" in capsys.readouterr().err


def test_the_command_and_summary_print_the_table_and_figures_are_drawn(
    folder: Path, done: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["quality", str(folder / "config.yaml"), "--out", str(done)]) == OK
    first = capsys.readouterr()
    assert "all cases are there from before" in first.err
    assert main(["show", str(done)]) == OK
    table = capsys.readouterr().out.strip()
    assert first.out.startswith(table)
    assert "no interval, and no verdict on claims, below 10 batches; got 3" in table
    assert first.out.rstrip().endswith("figures: quality")
    assert main(["show", str(done), "--format", "json"]) == OK
    assert len(json.loads(capsys.readouterr().out)["rows"]) == 7


# --- Mistakes ------------------------------------------------------------------------------------


def test_configs_of_the_repository_are_valid() -> None:
    configs = sorted((ROOT / "configs").glob("quality-*.yaml"))
    assert configs
    for config in configs:
        assert load_points(config, QualityExperiment, []), os.fspath(config)


def test_paths_of_a_config_start_at_its_folder_and_those_of_overrides_at_the_current_one() -> None:
    config = ROOT / "configs/quality-small.yaml"
    (found,) = load_points(config, QualityExperiment, ["model.checkpoint=models/mine"])
    assert found.text is not None
    assert found.model.checkpoint == Path.cwd() / "models/mine"
    assert found.text.file == config.parent / "../checkpoints/small-moe/heldout.txt"


# --- The small model -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def script() -> Any:
    """The script, which reads its corpus once."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
        module = importlib.import_module("train_small_moe")
        monkeypatch.setattr(module, "corpus", functools.cache(module.corpus))
        yield module


def test_the_small_models_script_leaves_a_checkpoint_and_text_that_it_was_not_trained_on(
    script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    train, held_out = script.corpus()
    assert len(train) > 300
    assert not any(piece in text for piece in held_out[::10] for text in train)
    monkeypatch.setattr(script, "corpus", lambda: (train[:20], held_out[:2]))
    monkeypatch.setattr(script, "LENGTH", 16)
    folder = tmp_path / "small"
    assert script.main(["--out", str(folder), "--steps", "2", "--batch", "2", "--seed", "0"]) == OK
    (facts,) = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    assert json.loads((folder / "training.txt").read_text()) == facts
    assert (folder / "heldout.txt").read_text() == "".join(held_out[:2])
    checkpoint = Checkpoint.open(folder)
    assert [(layer.num_experts, layer.top_k) for layer in checkpoint.moe_layers] == [(32, 4)] * 4
    assert checkpoint.sequences(folder / "heldout.txt", 32, 4).shape == (4, 32)
    # As `quality` finds it: the weights of the folder, on its text.
    model = checkpoint.load("float32", torch.device("cpu"))
    again = script.held_out_facts(model, script.encode(checkpoint.tokenizer, ["".join(held_out[:2])]))
    assert again["held_out_nats"] == pytest.approx(facts["held_out_nats"], rel=1e-4)


@pytest.mark.slow
def test_the_papers_orderings_come_out_of_a_trained_model(script: Any, tmp_path: Path) -> None:
    (tmp_path / "heldout.txt").write_text("".join(script.corpus()[1]))
    dropping = {"name": "token_drop", "capacity_factor": 1.0}
    config = {
        "name": "trained",
        "model": {"checkpoint": str(Path(__file__).parent / "data" / "small-moe"), "dtype": "float32"},
        "text": {"file": "heldout.txt", "num_sequences": 40, "sequence_length": 32, "batch_size": 4},
        "layer": {"ep_size": 2},
        "policies": [
            {**dropping, "metric": ["score", "random"]},
            {"name": "laser", "eps_high": 0.9, "t_fix": 0.5, "c": 8},
            {"name": "load_only"},
            {"name": "pruned", "k0": 1},
            {"name": "oea", "k0": 1},
            {"name": "token_drop", "capacity_factor": 2.0},
            {"name": "expert_drop", "fraction": 0.1},
        ],
    }
    run_quality(write(tmp_path / "config.yaml", config), tmp_path / "done", [])
    quality = answers_in(tmp_path / "done")
    assert text_costs(quality)["cross_entropy"][0] < math.log(2048) - 3, "far better than a guess"
    found = {(row.better.split()[0], row.worse.split()[0]): row.verdict for row in claims(quality).itertuples()}
    assert found == {
        ("token_drop", "token_drop"): "holds",
        ("oea", "pruned"): "holds",
        ("laser", "load_only"): "holds",
        ("token_drop", "load_only"): "holds",
        # Of a tenth of the experts, which are idle here: against Table 2 of arXiv 2503.05066.
        ("token_drop", "expert_drop"): "does not hold",
    }


def test_a_checkpoint_is_told_from_others_by_the_ends_of_its_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint_module, "_HASHED_BYTES", 4)
    found = set()
    for number, weights in enumerate((b"0123456789", b"x123456789", b"012345678x", b"01234567890")):
        path = tmp_path / str(number)
        path.mkdir()
        (path / "model.safetensors").write_bytes(weights)
        found.add(Checkpoint(path).fingerprint)
    assert len(found) == 4
