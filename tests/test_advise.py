"""``advise``: the pick is the fastest within the bounds that is significantly faster; options become a config."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import yaml
from markupsafe import escape
from results_builder import (
    ELSEWHERE_TOTAL_US,
    FakeCase,
    FakeComparison,
    modelled_facts,
    shown_text,
    write_run,
    write_whole,
)
from trace_files import write_trace

from moe_ep_bench.analysis import page, turns
from moe_ep_bench.analysis.advice import Growth, Note, advice_lines, growth_words, note_lines, read_advice
from moe_ep_bench.analysis.advise import advice_text, advise, write_answer
from moe_ep_bench.analysis.cases import cases, comparisons, load, load_timed, timings
from moe_ep_bench.analysis.page import page_of
from moe_ep_bench.analysis.picks import BARRED, OUT_OF_BOUNDS, UNFIT, against, candidates, choice, judged
from moe_ep_bench.analysis.turns import probed
from moe_ep_bench.bench.advise_config import CONFIG_NAME, Bounds, Question, ask
from moe_ep_bench.bench.commands import emulate
from moe_ep_bench.bench.description import rest_of
from moe_ep_bench.bench.plan import VIRTUAL, plan
from moe_ep_bench.cli import main, make_parser
from moe_ep_bench.config import Experiment, label_of
from moe_ep_bench.cost_model.expert_rows import load_device
from moe_ep_bench.cost_model.phases import PassWork, outside_moe_us
from moe_ep_bench.cost_model.tables import load_links
from moe_ep_bench.errors import OK, USER_ERROR, UserError
from moe_ep_bench.facts import Assumption, MissingRows
from moe_ep_bench.facts.words import assumption_words, rest_words
from moe_ep_bench.models import load_model

ROOT = Path(__file__).parents[1]
BOUNDS = Bounds(max_dropped=0.10, min_retained=0.95)
NO_BOUNDS = Bounds(max_dropped=1.0, min_retained=0.0)
REST = {"us_per_moe_layer": 6000.0, "num_moe_layers": 3, "prompt_lengths": [128, 128]}
QWEN = ["--model", "qwen3-30b-a3b", "--ep", "8", "--tokens", "16384", "--peak-load", "4"]
OLMOE = ["--model", "olmoe-1b-7b", "--ep", 8, "--tokens"]
# Where the package of tables is installed.
HAS_TABLES = find_spec("aiconfigurator_core") is not None
DEFAULTS = ("table:h100_sxm",) * 2 if HAS_TABLES else ("h100-sxm", "h100-nvlink4")
MODELLED = modelled_facts()


def drop(gamma: float, speedup: float, dropped: float, mass: float, **changes) -> FakeCase:
    params = {"capacity_factor": gamma}
    return FakeCase("token_drop", params=params, speedup=speedup, dropped=dropped, mass=mass, **changes)


def eplb(speedup: float) -> FakeCase:
    return FakeCase("eplb", role="replication", params={"spare_per_rank": 1}, speedup=speedup)


def references() -> list[FakeCase]:
    return [
        FakeCase("native", role="baseline"),
        FakeCase("native", role="noise"),
        FakeCase("topk", speedup=1.0),
        FakeCase("native_balanced", role="balanced", speedup=2.0),
    ]


USUAL = (drop(1.0, 1.5, 0.25, 0.80), drop(1.5, 1.3, 0.08, 0.96), drop(2.0, 1.2, 0.04, 0.98))


def comparison_of(*cases: FakeCase, **changes) -> FakeComparison:
    return FakeComparison(**{"cases": [*references(), *cases], "num_iterations": 1, "noise": 0.0, **changes})


def advised(root: Path, *cases: FakeCase, mode: str = "run", memory: float | None = None, **changes) -> str:
    """The answer to one comparison; replicas take so much memory on each rank."""
    directory = write_run(root, [comparison_of(*cases, **changes)], mode)
    if memory is not None:
        replicas_take(directory, memory)
    return advice_text(load_timed(directory), BOUNDS)


def replicas_take(directory: Path, memory: float) -> None:
    document = json.loads((directory / "run.json").read_text())
    for case in document["cases"].values():
        case["extra_bytes_per_rank"] = memory if case["role"] == "replication" else None
    (directory / "run.json").write_text(json.dumps(document))


def rows_of(text: str) -> list[list[str]]:
    """The cells of the first table's rows."""
    lines = text.splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith("----")) + 1
    return [re.split(r"  +", line) for line in lines[start : lines.index("", start)]]


# ---- the pick ------------------------------------------------------------------------------------------------------


def chosen_of(rows: pd.DataFrame) -> list[str]:
    """The pick by the rule, of candidates that may be picked; none of none."""

    def best(rows: pd.DataFrame) -> Any:
        tied = rows[rows["speedup_median"] >= rows["speedup_median"].max() / 1.02]
        return max(tied.itertuples(), key=lambda one: (min(round(one.retained_mass, 6), 1), one.speedup_median))

    if rows.empty:
        return []
    lossless, pick = rows[(rows["missing_share"] == 0) & (rows["retained_mass"] > 1 - 1e-6)], best(rows)
    if len(lossless):
        kept = best(lossless)
        is_clear = pick.speedup_median > 1.05 * kept.speedup_median and pick.speedup_low > kept.speedup_high
        pick = pick if is_clear else kept
    return [pick.case_id]


@pytest.mark.slow
@pytest.mark.parametrize("balanced", [1.05, 1.1, 1.2])
def test_the_pick_follows_the_rule(balanced: float, tmp_path: Path) -> None:
    """The law, for costs and speeds drawn at random, with noise that leaves some verdicts open."""
    random = np.random.default_rng(3)
    costs = zip(random.uniform(0.9, 1.3, 12), random.uniform(0, 0.2, 12), random.uniform(0.9, 1.05, 12), strict=True)
    made = [drop(number + 1, *cost) for number, cost in enumerate(costs)]
    store = load(write_run(tmp_path, [comparison_of(*made, eplb(balanced), num_iterations=4, noise=0.05)], seed=3))
    rows = cases(store).query("role in ('policy', 'replication') and policy != 'topk' and verdict == 'faster'")
    for bounds in (BOUNDS, NO_BOUNDS, Bounds(0.05, 0.0), Bounds(1.0, 0.98), Bounds(0.0, 1.1)):
        allowed = rows[(rows["dropped_share"] <= bounds.max_dropped) & (rows["retained_mass"] >= bounds.min_retained)]
        chosen = candidates(store, bounds)
        assert chosen.loc[chosen["is_pick"], "case_id"].tolist() == chosen_of(allowed)


@pytest.mark.parametrize(
    ("lossy", "first", "beside"),
    [
        (1.3, "Use token_drop", "Without loss the best is EPLB, 1 spare per rank, 1.100 times native: nothing"),
        (
            1.15,
            "Use EPLB",
            "With loss within the bounds the best is token_drop capacity_factor=1.5, 1.150 times native:",
        ),
        (None, "Use EPLB", "In a server: vLLM --enable-expert-parallel"),
    ],
)
def test_a_lossless_candidate_wins_unless_another_is_clearly_faster(
    lossy: float | None, first: str, beside: str, tmp_path: Path
) -> None:
    """The answer names the best of the other kind."""
    made = [] if lossy is None else [drop(1.5, lossy, 0.08, 0.96)]
    lines = advised(tmp_path, *made, eplb(1.1)).splitlines()
    assert lines[0].startswith(first), lines[:4]
    assert lines[2].startswith(beside), lines[:4]


def test_a_pick_that_loses_says_where_nothing_without_loss_is_faster(tmp_path: Path) -> None:
    assert advised(tmp_path, *USUAL).splitlines()[2] == "Without loss none is significantly faster than native."


def test_what_drops_nearly_all_is_no_candidate(tmp_path: Path) -> None:
    made = [drop(1.0, 4.0, 0.953125, 0.05), drop(1.5, 1.4, 0.9453125, 0.06)]
    store = load(write_run(tmp_path, [comparison_of(*made)]))
    assert candidates(store, NO_BOUNDS)["label"].tolist() == ["token_drop capacity_factor=1.5"]


def test_a_case_at_the_bound_is_within_it_and_each_bound_decides_alone(tmp_path: Path) -> None:
    # 409.6 of 4096 tokens x 2: shares are of whole pairs.
    store = load(write_run(tmp_path, [comparison_of(drop(1.0, 1.5, 0.125, 0.75))]))
    for bounds, is_within in (
        (Bounds(0.125, 0.75), True),
        (Bounds(0.1249, 0.75), False),
        (Bounds(0.125, 0.751), False),
    ):
        (row,) = candidates(store, bounds).to_dict("records")
        assert row["is_pick"] == is_within == (row["standing"] != OUT_OF_BOUNDS)


def test_the_bound_on_dropped_pairs_leaves_rerouted_ones_alone_and_the_answer_names_both(tmp_path: Path) -> None:
    laser = FakeCase("laser", speedup=1.5, dropped=0.05, rerouted=0.25, mass=0.97)
    answer = advised(tmp_path, *USUAL, laser)
    assert "Use laser: " in answer
    assert "It costs: 5.0 % of the pairs are dropped, 25.0 % rerouted, 97.0 % of the mass is kept." in answer
    assert "evaluate the model first" in answer
    (row,) = (row for row in rows_of(answer) if row[0] == "laser")
    assert row[3:6] == ["5.0", "25.0", "97.0"]


MIXED = {**modelled_facts(None, bandwidth_scale=2.0), "backend": "gloo", "scale": 0.125}


def fit(expert_gb: int) -> dict[str, Any]:
    none = dict.fromkeys(("other_weight_bytes", "cache_bytes", "row_bytes"), 0)
    device = {"device": "h100-sxm", "device_bytes": 80e9, "dtype": "bfloat16", "ep_size": 2, "is_whole": True}
    return {"fit": {**none, **device, "fitting_ep_size": 32, "expert_bytes": expert_gb * 10**9}}


NONE_GAINS = "Keep native: no candidate within the bounds is significantly faster.\nThe fastest within the bounds is "
LOST = [dataclasses.replace(references()[0], status="oom", reason="too big"), *references()[1:], USUAL[0]]
ON_MODEL = {"mode": "emulated", "facts": MODELLED}
LOSSES = drop(1.0, 1.4, 0.2, 0.9), drop(1.5, 1.3, 0.05, 0.97), drop(2.0, 1.29, 0.04, 0.98)
# Candidates, what is special of their comparison, how the answer begins, and what else it says.
ANSWERS: dict[str, tuple[tuple[FakeCase, ...], dict[str, Any], str, str]] = {
    "slower": (
        (drop(1.5, 0.8, 0.05, 0.97),), {}, NONE_GAINS + "token_drop capacity_factor=1.5: 0.800 times native (slower)",
        "\nNative takes 2.000 ms (measured).\n",
    ),
    "noise": ((drop(1.5, 1.06, 0.05, 0.97),), {"noise": 0.1, "num_iterations": 2}, NONE_GAINS, ""),
    "no baseline": ((), {"cases": LOST}, "Inconclusive: the baseline was not measured", ""),
    "shared cores": ((USUAL[1],), {"facts": {"oversubscribed": True}}, "Inconclusive: more ranks than cores", ""),
    "few batches": (USUAL, {"num_batches": 9}, "Inconclusive: fewer than 10 batches give no interval, and so no", ""),
    "below the model": ((eplb(1.015),), ON_MODEL, NONE_GAINS, "(below what the model can tell)"),
    "one draw": ((USUAL[1],), ON_MODEL, "Use token_drop capacity_factor=1.5: ", " ms, 23.1 % less (modelled).\n"),
    "as little, measured": ((eplb(1.015),), {}, "Use EPLB, 1 spare per rank: ", "It costs: nothing is dropped.\n"),
    "a plan that servers have": (
        (eplb(1.3),), {}, "Use EPLB, 1 spare per rank: ",
        "In a server: vLLM --enable-expert-parallel --enable-eplb --eplb-config '{\"num_redundant_experts\": 2}'; "
        "SGLang --enable-eplb --ep-num-redundant-experts 2.\n",
    ),
    "a plan that they do not": (
        (replace(eplb(1.3), policy="variance"),), {}, "Use variance plan, 1 spare per rank: ",
        "--ep-num-redundant-experts 2; both plan by EPLB.\n",
    ),
    "a tie": ((*LOSSES, eplb(1.28)), {}, "Use EPLB, 1 spare per rank: ", ""),
    "no tie": ((*LOSSES, eplb(1.22)), {}, "Use token_drop capacity_factor=2.0: ", ""),
    "too little for what it drops": (
        (drop(1.5, 1.045, 0.05, 0.97),), {}, "Keep native: within the bounds only what drops or reroutes is faster",
        "The fastest within the bounds is token_drop capacity_factor=1.5: 1.045 times native (faster).",
    ),
    "more mass than the model's own": (
        (drop(2.0, 1.29, 0.0, 1.03), eplb(1.30)), {}, "Use EPLB, 1 spare per rank: ", "",
    ),
    "memory": ((eplb(1.1),), {"memory": 3e9}, "Use EPLB, ", "nothing is dropped, 2.79 GiB more memory on each rank."),
    "does not fit": (USUAL, {"facts": fit(163)}, "None: the model does not fit: 163 GB on each of 2 ranks", ""),
    "replicas do not fit": (
        (*USUAL, eplb(1.6)),
        {"facts": fit(78), "memory": 3e9},
        "Use token_drop capacity_factor=1.5",
        "2.8  does not fit",
    ),
    "mixed machines": (
        (USUAL[0],), {"mode": "emulated", "facts": MIXED}, "",
        "MIXED MACHINES: experts of this CPU (sizes x 0.125 of the true ones)",
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", ANSWERS)
def test_the_answer_begins_with_what_to_do(tmp_path: Path, name: str) -> None:
    made, changes, begin, also = ANSWERS[name]
    text = advised(tmp_path, *made, **changes)
    assert text.startswith(begin)
    assert also in text


# ---- the answer ----------------------------------------------------------------------------------------------------


def test_a_balancer_that_no_server_has_comes_without_its_flags(tmp_path: Path) -> None:
    balanced = replace(eplb(1.3), params={"spare_per_rank": 1, "balancer": "lp", "solve_us": 100.0})
    text = advised(tmp_path, balanced)
    assert text.startswith("Use EPLB")
    assert "In a server" not in text


def test_the_answer_comes_first_with_its_costs_and_why(tmp_path: Path) -> None:
    text = advised(tmp_path, *USUAL, eplb(1.1))
    use, costs, beside, why, changes, next_best, what, *_ = text.splitlines()
    gain = "a layer is 1.300 times as fast as native, 1.538 in place of 2.000 ms, 23.1 % less"
    assert use == f"Use token_drop capacity_factor=1.5: {gain} (measured)."
    assert costs == "It costs: 8.0 % of the pairs are dropped, 96.0 % of the mass is kept."
    assert beside.startswith("Without loss the best is EPLB")
    assert why.startswith("Why: a rank's mean time with native is ")
    assert changes.startswith("token_drop capacity_factor=1.5 makes that ")
    assert (
        next_best == "Next best: token_drop capacity_factor=2.0, 1.200 times native: 4.0 % of the pairs are dropped, "
        "98.0 % of the mass is kept."
    )
    assert what.endswith("; at most 10 % of the pairs dropped and 5 % of the score mass lost.")
    rows = rows_of(text)
    assert [row[-1] for row in rows] == ["faster"] * 3 + ["out of bounds"]
    assert rows[0][1:5] == ["1.300 [1.300, 1.300]", "1.538", "8.0", "96.0"]
    assert "the pick was chosen and scored on the same traffic" in text


def test_the_answer_names_the_speedup_over_topk_where_native_differs_from_it(tmp_path: Path) -> None:
    """Native's own kernels may be slow; and ``topk``, the model's own routing, is no pick however fast."""
    listed = [*(case for case in references() if case.policy != "topk"), FakeCase("topk", speedup=1.9)]
    text = advised(tmp_path, cases=[*listed, *USUAL])
    gain = "a layer is 1.300 times as fast as native (0.684 times topk, which runs the same kernels)"
    assert f"Use token_drop capacity_factor=1.5: {gain}, 1.538 in place of 2.000 ms, 23.1 % less (measured)." in text
    assert rows_of(text)[0][1:3] == ["1.300 [1.300, 1.300]", "0.684 [0.684, 0.684]"]


def swept(*speedups: float, key: str = "workload.peak_load", **facts: Any) -> list[FakeComparison]:
    """A comparison for each value, from 1 on."""
    return [
        comparison_of(
            drop(1.5, speedup, 0.05 + 0.01 * place, 0.97 - 0.005 * place),
            comparison_id=f"c{place}",
            num_batches=5 if "layer" in key else 10,
            native_us=2000 + 400 * place * ("layer" in key),
            facts={"point": {key: 1 + place}, "title": f"Tiny {place}", **facts},
        )
        for place, speedup in enumerate(speedups)
    ]


def test_one_traffic_stands_after_another(tmp_path: Path) -> None:
    text = advice_text(load_timed(write_run(tmp_path / "swept", swept(0.8, 1.5))), BOUNDS)
    first, second = (line for line in text.splitlines() if line.startswith("At "))
    assert first.startswith("At peak load 1: Keep native: ")
    gain = "a layer is 1.500 times as fast as native, 1.333 in place of 2.000 ms, 33.3 % less"
    assert second == f"At peak load 2: Use token_drop capacity_factor=1.5: {gain} (measured)."
    assert rows_of(text) == [
        ["token_drop 1.5", "0.800 [0.800, 0.800]", "2.500", "5.0", "97.0", "slower", "experts +221 us"]
    ]
    assert rows_of(text.partition("\nat peak load 2\n")[2])[0][-1] == "faster"
    assert "It costs: 6.0 % of the pairs are dropped, 96.5 % of the mass is kept." in text


def test_layers_for_which_one_stands_are_noted_once_and_warnings_as_such(tmp_path: Path) -> None:
    layers = {"num_layers": 3, "relief": [1.1, 1.2, 1.4]}
    skew = {"name": "mine", "basis": "recorded", "source": "somebody", "layers": layers}
    workload = {"kind": "synthetic", "tail_model": None, "skew": skew}
    for name, facts in (("alike", {}), ("apart", {"workload": workload})):
        advice = advise(load_timed(write_run(tmp_path / name, swept(0.8, 1.5, **facts))), BOUNDS)
        lines = list(map(str, note_lines(advice)))
        assert sum(line.startswith("one layer stands for 3: ") for line in lines) == (name == "apart")
        assert [note.kind for note in advice.notes].count("layers_differ") == (name == "apart")
    warned = advice.model_copy(update={"notes": [Note(kind="warning", text="{of results}")]})
    assert list(map(str, note_lines(warned))) == ["warning: {of results}"]


def test_layers_are_joined_and_the_answer_gives_their_range(tmp_path: Path) -> None:
    recording = {"model": "tiny", "sources": [{"num_tokens": 100, "domain": "chat", "stage": "prefill"}]}
    workload = {"kind": "recorded", "tail_model": "popularity", "stage": "prefill", "layer": 1, "recording": recording}
    layers = swept(1.2, 1.3, 1.4, key="workload.layer", workload=workload, title=None, **MODELLED)
    directory = write_run(tmp_path, layers, "emulated")
    store = load_timed(directory)
    (about,) = comparisons(store).to_dict("records")
    assert about["title"] == "Tiny-MoE, EP 2, 4,096 tokens, chat, prefill, popularity tail, 3 layers from 1 to 3"
    assert "tiny, 3 layers from 1 to 3" in about["workload_words"]
    assert "Student's t over 3 layers]" in shown_text(directory)
    for place, one in enumerate(layers):
        one.facts["workload"] = {**workload, "model_layers": [place + 4]}
    (about,) = comparisons(load_timed(write_run(tmp_path / "rows", layers, "emulated"))).to_dict("records")
    assert about["title"].endswith(", popularity tail, 3 layers from 4 to 6 (recorded rows 1 to 3)")
    text = advice_text(store, BOUNDS)
    (row,) = rows_of(text)
    assert row[1].startswith("1.300 [")
    assert row[2] == "1.846", "the first line has the table's milliseconds"
    gain = "a layer is 1.300 times as fast as native, 1.846 in place of 2.400 ms, 23.1 % less"
    gain += " (modelled; 1.20 to 1.40 by layer)."
    assert gain in text.splitlines()[0]


def test_whole_models_are_ranked_by_the_pass(tmp_path: Path) -> None:
    directory = write_whole(tmp_path, [*references(), *USUAL], native_us=2 * ELSEWHERE_TOTAL_US)
    text = advice_text(load_timed(directory), NO_BOUNDS)
    gain = float(re.search(r"Use token_drop capacity_factor=1.0: a pass is (.*) times", text)[1])
    assert gain == pytest.approx(1 / (1 / 3 + 2 / 3 / 1.5), rel=0.02)
    assert "end to end" in text, "the speedup's header"


# ---- draws ---------------------------------------------------------------------------------------------------------


def of_draws(peak_load: float = 4.0, **draws: list[FakeCase]) -> list[FakeComparison]:
    """A comparison for each draw, by name."""
    workload = {"kind": "synthetic", "tail_model": None, "targets": {"peak_load": peak_load}}
    return [
        comparison_of(
            *made,
            comparison_id=name,
            noise=0.02,
            num_batches=4,
            num_iterations=6,
            facts={
                "point": {"workload.seed": number},
                "workload": {**workload, "seed": number},
                "rest": REST,
            },
        )
        for number, (name, made) in enumerate(draws.items())
    ]


def test_draws_of_one_traffic_are_launches_of_one_comparison(tmp_path: Path) -> None:
    """The interval covers draws, and a bound holds for their mean."""
    costs = zip((1.1, 1.5, 1.3), (0.05, 0.11, 0.08), strict=True)
    draws = {f"draw{number}": [drop(1.5, *cost, 0.97)] for number, cost in enumerate(costs)}
    store = load_timed(write_run(tmp_path / "draws", of_draws(**draws)))
    (about,) = comparisons(store).to_dict("records")
    assert (about["comparison_id"], about["num_draws"]) == ("draw0", 3)
    assert about["workload_words"].endswith(", 3 seeds from 0 to 2")
    (row,) = candidates(store, BOUNDS).to_dict("records")
    assert row["speedup_low"] < 1.1 < row["speedup_median"] < 1.5 < row["speedup_high"]
    assert row["dropped_share"] == pytest.approx(0.08, abs=1e-3)
    assert row["standing"] == row["verdict"] == "inconclusive", "one draw alone drops more than the bound"
    assert (row["least"], row["most"]) == pytest.approx((1.1, 1.5), abs=0.02)


def test_what_differs_in_more_than_the_draw_stays_apart(tmp_path: Path) -> None:
    seeds, others = of_draws(one=[USUAL[1]], two=[USUAL[1]]), of_draws(2.0, three=[USUAL[1]])
    unswept = dataclasses.replace(others[0], comparison_id="four", facts={**others[0].facts, "point": {}})
    store = load(write_run(tmp_path, [*seeds, *others, unswept]))
    assert sorted(comparisons(store)["comparison_id"]) == ["four", "one", "three"]
    twice = [dataclasses.replace(one, num_launches=2) for one in seeds]
    repeated = comparisons(load(write_run(tmp_path / "twice", twice)))
    assert repeated["num_draws"].tolist() == [1, 1], "launches of one draw are not independent of each other"


# ---- from options to a config --------------------------------------------------------------------------------------


def asked(*arguments: object) -> Question:
    options = make_parser().parse_args(["advise", *map(str, arguments)])
    return ask(options, Bounds.of(options.max_dropped, options.max_lost_mass))


def said_of(question: Question) -> tuple[str, ...]:
    """What is assumed, and what is left out."""
    return tuple(map(assumption_words, question.assumptions))


def notes_of(question: Question) -> tuple[str, ...]:
    """What is noted of candidates and traffic: not why something is modelled."""
    return tuple(note for note in said_of(question) if " modelled: " not in note)


def recording(path: Path, *, full: bool, **metadata: str) -> Path:
    shape = {"length_S": (16,) * 4, "num_layers": 3, "num_experts": 64, "top_k": 8}
    return write_trace(path, **shape, full=full, model="allenai/OLMoE", **metadata)


def experiments_of(question: Question) -> list[Experiment]:
    return [comparison.experiment for comparison in question.comparisons]


def candidates_of(question: Question) -> list[str]:
    return [label_of(policy) for policy in experiments_of(question)[0].make_policies()]


def test_options_become_a_config_of_modelled_emulation() -> None:
    question = asked(*QWEN)
    config = yaml.safe_load(question.text)
    assert config["model"] == {"preset": "qwen3-30b-a3b"}
    assert config["layer"] == {"ep_size": 8}
    assert config["workload"]["num_tokens"] == 16384
    assert config["sweep"] == {"workload.seed": [1, 2, 3, 4, 5], "emulate.overlap": ["none", "two_batch"]}
    assert (config["emulate"]["device"], config["emulate"]["links"]) == DEFAULTS
    others = [{"balancer": "lp"}, {"plan": "variance"}]
    assert config["emulate"]["replication"] == [{"spare_per_rank": 1, **other} for other in ({}, *others)]
    assert config["emulate"]["rebalance"] == [{"name": "llep"}, {"name": "ultra"}]
    labels = candidates_of(question)
    for name in ("token_drop", "expanded_drop"):
        assert all(f"{name} capacity_factor={factor}" in labels for factor in (1.0, 1.5, 2.0))
    assert {label.split()[0] for label in labels} == {"token_drop", "expanded_drop", "laser", "budget_drop"}
    assert notes_of(question) == (
        "left out: oea, xshare, activated: no gain at prefill, where a batch activates all experts",
    )
    assert {"budget_drop max_dropped=0.1", "budget_drop max_lost_mass=0.05"} <= set(labels)
    bounds = {("--max-dropped", "5%"): ["max_dropped=0.05"], ("--max-lost-mass", "0.01"): ["max_lost_mass=0.01"]}
    for words, own in bounds.items():  # a bound that is omitted does not apply
        labels = [label.split()[1] for label in candidates_of(asked(*QWEN, *words)) if label.startswith("budget_drop")]
        assert labels == own
    path = ROOT / "tests/data/small-moe/config.json"
    experts = json.loads(path.read_text())["num_experts"]
    config = yaml.safe_load(asked("--model", path, "--ep", experts, "--tokens", 64 * experts, "--peak-load", 2).text)
    assert config["model"] == {"hf_config": str(path)}
    beyond = yaml.safe_load(asked(*QWEN, "--ep", 16, "--set", "emulate.device=h20").text)
    assert beyond["emulate"]["links"] == "h20-nvlink4-ndr"


@pytest.mark.slow
def test_traffic_that_chance_decides_is_drawn_several_times(tmp_path: Path) -> None:
    def drawn(*arguments: object) -> tuple[list[int] | None, int]:
        config = yaml.safe_load(asked(*arguments).text)
        return config.get("sweep", {}).get("workload.seed"), config["workload"]["num_batches"]

    assert drawn(*QWEN) == ([1, 2, 3, 4, 5], 2)
    assert drawn(*OLMOE, 64, "--ep", 1, "--peak-load", 4) == (None, 10), "one rank holds all experts"
    full = recording(tmp_path / "full.safetensors", full=True)
    assert drawn(*OLMOE, 64, "--trace", full) == (None, 4), "of three layers"
    config = ROOT / "configs/quickstart.yaml"
    assert drawn(config) == (None, 10), "its skew says how full a rank is"
    assert drawn(config, "--set", "workload.seed=7", "--set", "workload.rank_load=null") == ([7, 8, 9, 10, 11], 10)
    assert drawn(config, "--set", "sweep.workload.seed=[3, 4]") == ([3, 4], 10)
    pattern = tmp_path / "pattern.yaml"
    pattern.write_text(
        "name: pattern\nmodel: {preset: olmoe-1b-7b}\nlayer: {ep_size: 8}\npolicies: [{name: topk}]\n"
        "workload: {kind: synthetic, num_tokens: 64, skew: power_law_1.2}\n"
    )
    assert drawn(pattern) == (None, 10), "it prescribes all loads"
    assert drawn(ROOT / "configs/model-prefill.yaml")[0] is None, "layers of a whole model are several draws"


def test_large_batches_are_asked_of_a_sample_and_plans_know_batches_that_nobody_is_served(tmp_path: Path) -> None:
    def drawn(*arguments: object) -> tuple[int | None, int | None]:
        config = yaml.safe_load(asked(*arguments).text)
        return config["emulate"].get("sample_tokens"), config["workload"].get("history")

    large = [*QWEN[:2], "--ep", 8, "--tokens", 2**20, "--peak-load", 3]
    assert drawn(*QWEN) == (None, 2)
    assert drawn(*large) == (2**15, 2), "4M scores of 128 experts"
    assert drawn(*large, "--ep", 128, "--links", "h100-nvlink4-ndr") == (2**15, 2), "256 tokens of each rank"
    assert drawn(*large, "--set", "emulate.sample_tokens=65536", "--set", "workload.history=1") == (65536, 1)
    assert drawn(*large, "--set", "workload.tokens_of_ranks=1.5") == (None, 2), "they are not alike"
    full = recording(tmp_path / "full.safetensors", full=True)
    assert drawn(*OLMOE, 64, "--trace", full)[0] is None


def test_a_dry_run_says_about_how_long_the_answer_takes() -> None:
    def seconds(*arguments: object) -> int:
        return int(re.search(r"about ([\d,]+) CPU seconds", asked(*arguments).plan)[1].replace(",", ""))

    few, many = (
        seconds(*QWEN[:2], "--ep", ep, "--tokens", 16384, "--peak-load", 3, "--links", "h100-nvlink4-ndr")
        for ep in (8, 64)
    )
    assert few < many < 300


def test_a_long_dry_run_of_emulate_names_the_sample_that_advise_takes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And no longer where it is taken."""
    config = tmp_path / "large.yaml"
    workload = {"kind": "synthetic", "num_tokens": 2**20, "num_batches": 10, "peak_load": 3}
    content = {
        **{"name": "large", "model": {"preset": "qwen3-30b-a3b"}, "workload": workload, "layer": {"ep_size": 128}},
        "policies": [{"name": "token_drop", "capacity_factor": [1.0, 1.5, 2.0]}],
        "emulate": {"device": "h100-sxm", "links": "h100-nvlink4-ndr", "rebalance": [{"name": "llep"}]},
    }
    config.write_text(yaml.safe_dump(content))
    command = ["emulate", str(config), "--dry-run"]
    assert main(command) == OK
    (line,) = [line.strip() for line in capsys.readouterr().out.splitlines() if "a sample of the tokens" in line]
    keys = line.partition(": ")[2].split()
    assert keys == ["--set", "emulate.sample_tokens=32768", "--set", "emulate.sample_ranks=16"]
    assert main([*command, *keys]) == OK
    assert "a sample of the tokens" not in capsys.readouterr().out


def test_counted_experts_are_asked_about_in_all_their_layers(tmp_path: Path) -> None:
    counts = tmp_path / "counts.json"
    counts.write_text(json.dumps(np.arange(3 * 64).reshape(3, 64).tolist()))
    with pytest.raises(ValueError, match=r"--trace: .*counts.json: .*counts of experts go as --counts"):
        asked(*OLMOE, 64, "--trace", counts)
    question = asked(*OLMOE, 64, "--set", f"workload.skew_from={counts}", "--set", "workload.layer=all")
    experiments = experiments_of(question)
    of_overlap = {
        overlap: [one.workload.layer for one in experiments if one.emulate.overlap == overlap]
        for overlap in ("none", "two_batch")
    }
    assert of_overlap == {"none": [0, 1, 2], "two_batch": [0, 1, 2]}
    assert "workload.seed" not in yaml.safe_load(question.text).get("sweep", {}), "chance decides no rank's load"
    assert {one.workload.num_batches for one in experiments} == {4}


def test_decode_is_asked_of_one_token_of_each_request() -> None:
    decode = ["--model", "qwen3-30b-a3b", "--ep", 8, "--decode-tokens", 256, "--peak-load", 4]
    question = asked(*decode)
    config = yaml.safe_load(question.text)
    assert (config["workload"]["num_tokens"], config["workload"]["sequence_length"]) == (256, 1)
    assert config["whole"] == {"context_length": 2048}
    names = {label.split()[0] for label in candidates_of(question)}
    assert {"oea", "xshare", "token_drop"} <= names
    assert said_of(question) == (
        "left out: xshare: needs several tokens of a request in a step",
        "left out: llep, ultra: a step of decode is too short to move weights",
    )
    balancers = [{}, {"balancer": "lp"}, {"balancer": "activated"}, {"plan": "variance"}]
    assert config["emulate"]["replication"] == [{"spare_per_rank": 1, **one} for one in balancers]
    assert config["emulate"]["rebalance"] == []


@pytest.mark.parametrize("name", ["decode-graph", "model-prefill", "papers/oea-table3", "own"])
def test_a_config_becomes_a_question(name: str, tmp_path: Path) -> None:
    """It needs no policies; claims of its own do not matter."""
    shape = {"num_experts": 16, "top_k": 2, "hidden_size": 64, "ffn_hidden_size": 32}
    values = {"name": "own", "model": shape, "workload": {"kind": "synthetic", "num_tokens": 256, "peak_load": 2.0}}
    own = tmp_path / "own.yaml"
    own.write_text(yaml.safe_dump({**values, "layer": {"ep_size": 4}}))
    question = asked(own if name == "own" else ROOT / f"configs/{name}.yaml")
    assert all(one.emulate.device != "measured" and one.emulate.links for one in experiments_of(question))
    assert sum(one.workload.num_batches for one in experiments_of(question)) >= 10, "over all draws"
    assert "measure" not in yaml.safe_load(question.text)
    assert "token_drop" in candidates_of(question)[0]


def test_a_model_that_does_not_fit_is_refused_before_anything_is_modelled() -> None:
    with pytest.raises(ValueError, match=r"^--ep: layer.ep_size: does not fit: .* EP size at which it fits is 16$"):
        asked("--model", "deepseek-v3", "--ep", 8, "--tokens", 65536, "--peak-load", 4)
    swept = ["--set", "sweep.layer.ep_size=[8, 32]"]  # the answer says where it does not
    asked("--model", "deepseek-v3", "--ep", 8, "--tokens", 65536, "--peak-load", 4, *swept)


def test_a_batch_that_no_rank_could_take_is_refused_before_anything_is_modelled() -> None:
    with pytest.raises(ValueError, match=r"^workload.padding_per_rank: expected less than the 512 tokens "):
        asked(*OLMOE, 4096, "--peak-load", 4, "--set", "workload.padding_per_rank=512")


def test_a_device_that_is_measured_gives_way_to_a_modelled_one_in_a_sweep_too() -> None:
    for swept, devices in (("[measured]", ["h100-sxm"]), ("[measured, h20]", ["h20"])):
        question = asked(*QWEN, "--set", f"sweep.emulate.device={swept}")
        assert yaml.safe_load(question.text)["sweep"]["emulate.device"] == devices


def test_set_changes_any_key_of_what_the_flags_make_and_ends_its_sweep() -> None:
    given = {
        "layer.dtype": "float32",
        "workload.peak_load": "3",
        "emulate.bandwidth_scale": "0.5",
        "emulate.device": "h20",
    }
    question = asked(*QWEN, *(word for key, value in given.items() for word in ("--set", f"{key}={value}")))
    first = experiments_of(question)[0]
    assert (first.layer.dtype, first.workload.peak_load, first.emulate.bandwidth_scale) == ("float32", 3, 0.5)
    assert (first.emulate.device, first.emulate.links) == ("h20", "h20-nvlink4")
    assert list(yaml.safe_load(question.text)["sweep"]) == ["workload.seed", "emulate.overlap"]
    for words in ("emulate.overlap=shared", "sweep.emulate.overlap=[shared, none]"):
        overlap = {one.emulate.overlap for one in experiments_of(asked(*QWEN, "--set", words))}
        assert "two_batch" not in overlap, "who says which is asked that alone"
    swept = asked(ROOT / "configs/quickstart.yaml", "--set", "sweep.emulate.device=[measured, h20, h100-sxm]")
    assert yaml.safe_load(swept.text)["sweep"]["emulate.device"] == ["h20", "h100-sxm"], "nothing is measured"
    few = asked(ROOT / "configs/quickstart.yaml", "--set", "workload.num_batches=4")
    assert experiments_of(few)[0].workload.num_batches == 10, "of fewer there would be no intervals"


@pytest.mark.slow
def test_what_the_workload_does_not_allow_is_left_out_with_the_reason(tmp_path: Path) -> None:
    olmoe = ["--model", "olmoe-1b-7b", "--ep", 1, "--tokens", 64]
    without = asked(*olmoe, "--trace", recording(tmp_path / "top.safetensors", full=False))
    assert {label.split()[0] for label in candidates_of(without)} == {"token_drop", "budget_drop"}
    again, past, prefill, no_replicas = notes_of(without)
    assert again == "assumed: requests repeat, as the recording has 1 of the 4 batches needed"
    assert past == "left out: expanded_drop, laser: looks past the top-k, of which the recording has no scores"
    assert no_replicas.startswith("left out: eplb, lp, activated, llep, ultra: replicas and moved weights")
    full_trace = recording(tmp_path / "full.safetensors", full=True)
    full = asked(*olmoe, "--trace", full_trace)
    assert notes_of(full) == (again, prefill, no_replicas)
    assert [one.workload.layer for one in experiments_of(full)] == [0, 1, 2], "all that were recorded"
    step = asked(*olmoe[:4], "--decode-tokens", 64, "--trace", full_trace)
    assert {one.workload.arrangement for one in experiments_of(step)} == {"decode"}
    assert "assumed: requests that decode route as their prompts did" in said_of(step)
    by_request = "left out: xshare: needs several tokens of a request in a step"
    assert by_request in said_of(step)
    several = ("--set", "workload.tokens_per_request=2")
    assert by_request not in said_of(asked(*olmoe[:4], "--decode-tokens", 64, "--trace", full_trace, *several))
    assert "replicas" in said_of(asked(ROOT / "configs/model-prefill.yaml"))[-1]


def test_a_recording_of_decode_is_asked_about_steps_with_a_cache(tmp_path: Path) -> None:
    steps = recording(tmp_path / "steps.safetensors", full=True, phase="decode")
    for flag in ("--tokens", "--decode-tokens"):
        question = asked("--model", "olmoe-1b-7b", "--ep", 8, flag, 64, "--trace", steps)
        assert {one.whole.context_length for one in experiments_of(question)} == {2048}
        assert {rest_words(rest_of(comparison)) for comparison in question.comparisons} == {"a step after 2,048 tokens"}
        noted = "assumed: tokens are requests of a step, as the recording is of decode" in said_of(question)
        assert noted == (flag == "--tokens")
    # A config that states no cache has no pass of a model.
    step = asked(ROOT / "configs/decode.yaml").comparisons[0]
    with pytest.raises(ValueError, match=r"^whole.context_length: expected the tokens in the cache"):
        rest_of(step)


# ---- command -------------------------------------------------------------------------------------------------------


def test_a_directory_is_only_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = write_run(tmp_path / "run", [comparison_of(*USUAL)])
    before = sorted(directory.rglob("*"))
    assert main(["advise", str(directory), "--max-dropped", "30%"]) == OK
    assert capsys.readouterr().out.startswith("Use token_drop capacity_factor=1.0: ")
    for option in (["--force"], ["--tokens", "64"]):
        assert main(["advise", str(directory), *option]) == USER_ERROR
        assert f"{option[0]}: expected none with {directory}" in capsys.readouterr().err
    assert main(["advise", *QWEN, "--out", str(directory)]) == USER_ERROR
    assert "holds results of another question" in capsys.readouterr().err
    assert sorted(directory.rglob("*")) == before


def test_the_rest_of_a_model_is_the_slowest_ranks_and_names_the_prompts_of_all() -> None:
    even, uneven = (asked(*OLMOE, tokens, "--peak-load", 4).comparisons[0] for tokens in (4096, 4000))
    assert rest_words(rest_of(even)) == "prompts of 128 tokens"
    rest, slow = rest_of(uneven), PassWork([128] * 4, 0)  # the one rank that has the prompt of 32 is faster
    assert rest_words(rest) == "prompts of 32 to 128 tokens"
    taken_us = rest.us_per_moe_layer * rest.num_moe_layers
    assert taken_us == pytest.approx(outside_moe_us(uneven.device, uneven.model, slow, dtype="bfloat16"))


@pytest.mark.slow
def test_a_question_is_modelled_once_and_answered(tmp_path: Path, capsys, monkeypatch) -> None:
    out = tmp_path / "out"
    command = ["advise", "--model", "olmoe-1b-7b", "--ep", "4", "--tokens", "64", "--peak-load", "4", "--out", str(out)]
    assert main([*command, "--dry-run"]) == OK
    plan = capsys.readouterr().out
    assert yaml.safe_load(plan.partition("\n\n")[2])["workload"]["peak_load"] == 4
    assert not out.exists()
    assert main(command) == OK
    first = capsys.readouterr()
    assert "the traffic's skew is assumed" in first.out
    assert {facts.rest.prompt_lengths for facts in comparisons(load(out))["facts"]} == {(16, 16)}
    assert f"moe-ep-bench show {out}); config: {out}/advise.yaml" in first.out
    lines = [line for block in advice_lines(read_advice(out)) for line in block.splitlines()]
    assert lines == list(filter(None, first.out.partition("\n\ncandidate")[0].splitlines()))
    answer = json.loads((out / "advice.json").read_text())
    assert (answer["max_dropped"], answer["answers"][0]["native"]["label"]) == (0.1, "native")
    monkeypatch.setattr(page, "drawings", lambda *_: {})  # figures have tests of their own
    shown = " ".join(page_of([out], []).split())
    assert all(str(escape(line)) in shown for line in lines)
    written = {part: part.stat().st_mtime_ns for part in (out / "cases").iterdir()}
    (out / "advice.json").write_text(json.dumps({**answer, "version": 1}))  # of an older package: made anew
    solve, solved = turns.solve, []
    monkeypatch.setattr(turns, "solve", lambda *asked: solved.append(asked) or solve(*asked))
    for _ in range(2):
        assert main(command) == OK
        assert capsys.readouterr().out == first.out
        assert len(solved) == 1, "turns of the same answer hold"
    assert {part: part.stat().st_mtime_ns for part in (out / "cases").iterdir()} == written


@pytest.mark.slow
@pytest.mark.parametrize("same", [True, False])
def test_an_answer_asks_both_overlaps_and_tells_them_apart_where_the_pick_differs(same: bool, tmp_path: Path) -> None:
    made = [
        comparison_of(
            drop(1.5, 1.3, 0.05, 0.97),
            drop(2.0, other, 0.02, 0.96),
            comparison_id=overlap,
            facts={"point": {"emulate.overlap": overlap}, "overlap": overlap, **MODELLED},
        )
        for overlap, other in (("none", 1.1), ("two_batch", 1.2 if same else 1.5))
    ]
    text = advice_text(load_timed(write_run(tmp_path / "both", made, "emulated")), BOUNDS)
    assert text.count("Use token_drop") == (1 if same else 2)
    assert ("With two micro-batches that overlap the pick is the same: 1.300 times as fast as native" in text) == same
    assert ("At overlap two_batch: Use token_drop capacity_factor=2.0: " in text) != same
    fastest = (
        "The fastest of these is token_drop capacity_factor=2.0 with two micro-batches that overlap: 1.333 in place"
    )
    assert (f"\n{fastest} of 1.538 ms" in text) != same
    assert text.count("\ncandidate") == (1 if same else 2)
    assert "no overlap / two micro-batches that overlap." in text


def test_a_pick_comes_to_what_amdahl_s_law_says(tmp_path: Path) -> None:
    """A pass of 3 MoE layers of 2 ms, each beside 6 ms; 4,096 tokens on 2 ranks."""
    text = advised(tmp_path, drop(1.5, 2.0, 0.05, 0.97), eplb(0.9), facts={"rest": REST})
    gain = "1.143 times as fast, 21.00 in place of 24.00 ms, 12.5 % less, 97,524 in place of 85,333 tokens/s a GPU"
    assert f"Whole model, with all such layers and the rest modelled (prompts of 128 tokens): {gain}." in text
    assert "of one MoE layer" not in text


@pytest.mark.slow
def test_the_readmes_example_is_answered_as_it_says(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    readme = (ROOT / "README.md").read_text()
    config = tmp_path / "mine.yaml"
    config.write_text(re.search(r"```yaml\n(.*?)```", readme, re.DOTALL)[1])
    alone = ["--set", "emulate.overlap=none"]  # Half of the command's work, and its first answer.
    assert main(["advise", str(config), "--out", str(tmp_path / "out"), *alone]) == OK
    use, _, costs = capsys.readouterr().out.splitlines()[:3]
    said = " ".join(readme.split())
    gain, least, most = re.search(
        r"Use (?:EPLB|variance plan), 1 spare.* is ([\d.]+) times .*; ([\d.]+) to ([\d.]+) by draw", use
    ).groups()
    gib = float(re.search(r"([\d.]+) GiB more memory", costs)[1])
    how = f"modelled; {least} to {most} across draws of the traffic"
    assert f"one layer {float(gain):.2f} times as fast ({how}), for {gib:.2f} GiB" in said


# ---- why, and what would change it -------------------------------------------------------------------------------


def test_a_candidate_that_loses_says_in_which_phase(tmp_path: Path) -> None:
    """The phase that grows most over native's, and none of one that is faster."""
    store = load(write_run(tmp_path, [comparison_of(drop(1.0, 0.8, 0.05, 0.97), drop(2.0, 1.3, 0.05, 0.97))]))
    slow, fast = candidates(store, BOUNDS).to_dict("records")
    phases_us = timings(store).groupby(["case_id", "quantity"])["time_us"].median().unstack()
    native = cases(store).query("role == 'baseline'")["case_id"].iloc[0]
    more_us = (phases_us.loc[slow["case_id"]] - phases_us.loc[native])[["gate", "policy", "permute", "experts"]]
    assert slow["growth_phase"] == more_us.idxmax() == "experts"
    assert slow["growth_us"] == pytest.approx(more_us.max())
    assert pd.isna(fast["growth_us"])
    assert growth_words(Growth(phase="policy", us=21, is_summed=True)) == "policy and its sum over ranks +21 us"


def test_the_pick_by_medians_stays_until_another_is_clearly_better() -> None:
    rows = pd.DataFrame({"label": ["mine", "other", "lossy"], "standing": None, "costs": [False, False, True]})
    rows = rows.assign(kept=[1.0, 1.0, 0.9], speedup_low=0.0, speedup_high=0.0)

    def chosen(*speedups: float, of: str | None = "mine", **changes: Any) -> str | None:
        low = {"speedup_low": speedups, "speedup_high": speedups}
        return choice(rows.assign(speedup_median=speedups, **low, **changes), of)

    assert chosen(1.10, 1.12, 1.14) == "mine", "a tie, and a lossy one that is not worth it"
    assert chosen(1.10, 1.13, 1.14) == "other"
    assert chosen(1.10, 1.10, 1.16) == "lossy"
    assert chosen(1.01, 1.00, 1.00) is None
    assert chosen(1.10, 1.00, 1.00, standing=[OUT_OF_BOUNDS, "", ""]) is None
    assert chosen(1.01, 1.00, 1.03, of=None) is None, "native loses nothing either"
    assert chosen(1.01, 1.00, 1.06, of=None) == "lossy"


@pytest.mark.slow
def test_where_the_pick_turns_is_bracketed(tmp_path: Path) -> None:
    """Of a traffic whose peak load is 3 it lies below, for nothing is to be gained of balanced loads."""
    out = tmp_path / "out"
    flags = ["advise", "--model", "olmoe-1b-7b", "--ep", "4", "--tokens", "4096", "--peak-load", "3", "--json"]
    fixed = ["--set", "emulate.overlap=none", "--device", "h100-sxm", "--links", "h100-nvlink4"]
    question = ask(make_parser().parse_args([*flags, *fixed, "--out", str(out)]), BOUNDS)
    assert question.model() == OK
    answer = json.loads(write_answer(question, BOUNDS, as_json=True))
    assert json.loads((out / "advice.json").read_text()) == answer
    turns = {turn["key"]: turn for turn in answer["answers"][0]["turns"]}
    assert set(turns) == {"workload.peak_load", "layer.ep_size", "workload.num_tokens"}
    peak, side = turns["workload.peak_load"], turns["workload.peak_load"]["below"]
    assert (peak["least"], peak["most"], peak["unsolved"]) == (1, 6, None)
    assert 1 <= side["far"] < side["near"] <= 3
    assert side["near"] - side["far"] <= 0.26, "an eighth of the way from balanced loads"
    line = next(
        line
        for line in answer["lines"]
        if line.startswith("Where it turns, by one draw or layer and its closest rivals: ")
    )
    assert f"peak load: between {side['far']:g} and {side['near']:g} (below: " in line


@pytest.mark.parametrize(
    ("points", "expected"),
    [
        ([{}], [True]),
        ([{"emulate.overlap": "none"}, {"emulate.overlap": "two_batch"}], [True, False]),
        ([{"workload.peak_load": 2}, {"workload.peak_load": 3}], [False, False]),
    ],
)
def test_turns_are_those_of_the_first_answer_unless_points_differ(
    points: list[dict[str, Any]], expected: list[bool], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = [
        comparison_of(drop(1.5, 1.3, 0.05, 0.97), drop(2.0, other, 0.02, 0.96), comparison_id=str(other), facts=facts)
        for point, other in zip(points, (1.1, 1.5), strict=False)
        for facts in [{"point": point, "overlap": point.get("emulate.overlap", "none"), **MODELLED}]
    ]
    store = load_timed(write_run(tmp_path, made, "emulated"))
    monkeypatch.setattr(turns, "solve", lambda *_: (turns.Turn(key="layer.ep_size", least=2, most=8),))
    question: Any = None
    advice = turns.with_turns(advise(store, BOUNDS), question, BOUNDS, store)
    assert [bool(answer.turns) for answer in advice.answers] == expected
    assert sum("Where it turns" in line for block in advice_lines(advice) for line in block.splitlines()) == any(
        expected
    )


@pytest.mark.parametrize(
    ("model", "ep_size", "tokens", "kind"),
    [
        ("deepseek-v3", 256, 64, None),
        ("deepseek-v3", 256, 8192, None),
        ("deepseek-v3", 64, 8192, None),
        ("deepseek-v3", 64, 8191, "scores"),  # the least part of them is too large
        ("kimi-k2", 384, 64, "ranks"),
    ],
)
def test_turns_are_solved_up_to_as_many_ranks_as_devices_have_links_for(
    model: str, ep_size: int, tokens: int, kind: str | None
) -> None:
    sizes = "--ep", str(ep_size), "--tokens", str(tokens * ep_size), "--peak-load", "3", "--device", "h100-sxm"
    point = asked_of("--model", model, *sizes).comparisons[0]
    why = turns._too_much(point)
    assert (why and why.kind) == kind


def test_turns_look_at_enough_pairs_of_each_rank_to_tell_a_turn_from_chance(tmp_path: Path) -> None:
    flags = "--model", "deepseek-v3", "--device", "h100-sxm", "--tokens", str(8192 * 64), "--peak-load", "3"
    question = asked_of(*flags, "--ep", "64", "--set", "emulate.overlap=none", "--out", str(tmp_path))
    question.config.write_text(question.text)
    rows = pd.DataFrame({"policy": [], "policy_params": []})
    solver = turns._Solver(question, BOUNDS, rows, None, question.comparisons[0])
    for ep_size in (16, 64, 256):
        point = solver._at(turns.EP_SIZE, ep_size)
        assert point is not None
        assert point.workload.num_tokens * point.model.top_k / ep_size >= 512


@pytest.mark.parametrize("stage", ["--tokens", "--decode-tokens"])
def test_every_candidate_can_be_asked_about_at_another_value(stage: str, tmp_path: Path) -> None:
    """By what an answer knows of it; of a model with shared experts, which some candidate moves."""
    more = 'policies=[{name: token_drop, capacity_factor: {"0-12": 1.0, "13-25": 1.5}}]'
    flags = "--model", "deepseek-v2-lite", "--device", "h100-sxm", "--ep", "8", "--peak-load", "3", stage, "2048"
    for changes in ((), ("--set", more)):
        asked = ["advise", *flags, *changes, "--set", "emulate.overlap=none", "--out", str(tmp_path)]
        question = ask(make_parser().parse_args(asked), BOUNDS)
        question.config.write_text(question.text)
        (point, *_) = question.comparisons
        cases = [case for case in point.cases if case.role in ("policy", "replication")]
        facts = [case.facts() for case in cases]
        assert {"waterfill"} <= {one.policy for one in facts}
        rules = [(one.policy, json.dumps(one.policy_params)) for one in facts]
        there = question.at({**dict(point.experiment.point), "workload.peak_load": 2.0}, rules, 2**20)
        assert {case.label for case in there.cases} >= {case.label for case in cases}


def test_a_probed_point_has_the_candidates_that_its_files_would_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two batches, and bounds that some candidates are beyond."""
    config = tmp_path / "probed.yaml"
    policies = [
        {"name": "token_drop", "capacity_factor": [0.05, 1.0, 1.5]},
        {"name": "laser", "eps_high": 0.6, "t_fix": 0.3, "c": 16},
        {"name": "topk"},
    ]
    content = {
        "name": "probed",
        "model": {"preset": "olmoe-1b-7b"},
        "workload": {"kind": "synthetic", "num_tokens": 512, "num_batches": 2, "seed": 1, "peak_load": 4},
        "layer": {"ep_size": 4},
        "policies": policies,
        "emulate": {"device": "h100-sxm", "links": "h100-nvlink4", "replication": [{"spare_per_rank": 1}]},
    }
    config.write_text(yaml.safe_dump(content))
    bounds = Bounds(0.2, 0.9)
    (point,) = plan(config, [], VIRTUAL, on_cpu=True)
    assert emulate([point], tmp_path / "out") == OK
    expected = candidates(load_timed(tmp_path / "out"), bounds).set_index("label")
    got = probed(point, bounds).set_index("label")
    assert set(got.index) == set(expected.index)
    assert len(got) == 4
    expected = expected.loc[got.index]
    assert got["standing"].isin(BARRED).tolist() == expected["standing"].isin(BARRED).tolist()
    assert set(got["standing"].dropna()) == {OUT_OF_BOUNDS}
    assert got["costs"].tolist() == expected["costs"].tolist()
    for name in ("speedup_median", "speedup_low", "speedup_high", "kept"):
        assert got[name].tolist() == pytest.approx(expected[name].tolist(), rel=1e-9), name
    monkeypatch.setattr(turns, "fit_of", lambda point: SimpleNamespace(holds=lambda extra_bytes: not extra_bytes))
    is_unfit = probed(point, bounds).set_index("label")["standing"] == UNFIT
    assert is_unfit.index[is_unfit].str.contains("spare").tolist() == [True]


@pytest.mark.parametrize(
    ("row", "standing", "kept", "costs"),
    [
        ({}, "faster", 1.0, False),
        ({"dropped_share": 0.1, "missing_share": 0.1, "retained_mass": 0.95}, "faster", 0.95, True),
        ({"dropped_share": 0.11}, OUT_OF_BOUNDS, 1.0, False),
        ({"dropped_share": math.nan, "missing_share": 0.11}, OUT_OF_BOUNDS, 1.0, True),
        ({"missing_share": 0.11}, "faster", 1.0, True),
        ({"retained_mass": 0.94}, OUT_OF_BOUNDS, 0.94, True),
        ({"retained_mass": 1 + 1e-6}, "faster", 1.0, False),
        ({"retained_mass": 0.99, "fits": False}, UNFIT, 0.99, True),
        ({"dropped_share": 0.11, "fits": False}, UNFIT, 1.0, False),
        ({"fits": None}, "faster", 1.0, False),
        ({"dropped_share": 0.96}, None, None, None),
    ],
)
def test_a_candidate_stands_within_the_bounds_and_the_memory(
    row: dict[str, Any], standing: str | None, kept: float | None, costs: bool | None
) -> None:
    """Dropped pairs count where they are told from rerouted ones, else both; what drops nearly all is none."""
    usual = {"verdict": "faster", "fits": True, "dropped_share": 0.0, "missing_share": 0.0, "retained_mass": 1.0}
    found = judged(pd.DataFrame([{**usual, **row}]), Bounds(0.1, 0.95))
    assert found[["standing", "kept", "costs"]].to_numpy().tolist() == (
        [] if kept is None else [[standing, kept, costs]]
    )


def test_any_two_candidates_have_a_verdict_paired_with_its_interval(tmp_path: Path) -> None:
    """Of pairs in one iteration, whose noise native's share does not enter."""
    directory = write_run(tmp_path, [comparison_of(drop(1.0, 1.2, 0.05, 0.97), drop(1.5, 1.5, 0.05, 0.97), eplb(1.5))])
    store = load_timed(directory)
    rows = candidates(store, BOUNDS)
    found = against(store, rows, "token_drop 1.0")
    assert found.equals(against(store, rows, "token_drop capacity_factor=1.0"))
    by_label = found.set_index(rows["label"])
    assert by_label.loc["token_drop capacity_factor=1.5", "versus_median"] == pytest.approx(1.25, rel=1e-3)
    assert by_label["versus_verdict"].dropna().tolist() == ["faster", "faster"]
    text = advice_text(store, BOUNDS, versus="token_drop capacity_factor=1.5")
    assert (
        "\nAgainst token_drop capacity_factor=1.5: EPLB, 1 spare per rank is 1.000 [1.000, 1.000] times as fast "
        in text
    )
    assert rows_of(text)[-1][-2:] == ["0.800 [0.800, 0.800]", "slower"]
    with pytest.raises(UserError, match=r"^--versus mine: expected one of token_drop capacity_factor=1.0, "):
        advise(store, BOUNDS, versus="mine")
    assert main(["advise", str(directory), "--versus", "mine"]) == USER_ERROR


@pytest.mark.slow
@pytest.mark.parametrize(
    ("facts", "is_one"),
    [
        ({"targets": {"peak_load": 4.0}}, True),
        ({"targets": {"peak_load": 4.0, "rank_load": {"2": 1.2}}}, True),
        ({"targets": {"peak_load": 4.0}, "is_balanced": True}, False),
        ({"targets": {"expert_loads": [1.0] * 8}}, False),
        ({"targets": {}}, False),
    ],
)
def test_an_interval_of_one_draw_says_so_in_its_row(facts: dict[str, Any], is_one: bool, tmp_path: Path) -> None:
    """Also where the skew's load of the fullest rank is kept, for that holds native's alone."""
    made = comparison_of(eplb(1.2), facts={"workload": {"kind": "synthetic", "tail_model": None, **facts}, **MODELLED})
    text = advice_text(load_timed(write_run(tmp_path, [made], "emulated")), BOUNDS)
    assert rows_of(text)[0][1] == "1.200 [1.200, 1.200]" + " one draw" * is_one


@pytest.mark.parametrize(("most", "is_said"), [(3800, True), (2100, False)])
def test_ranks_of_unequal_tokens_are_said_to_decide(most: int, is_said: bool, tmp_path: Path) -> None:
    """4,096 tokens on two ranks; native's fullest rank has 1.21 times the mean of the pairs."""
    recording = {"model": "tiny", "sources": [{"num_tokens": 100, "domain": "chat", "stage": "prefill"}]}
    workload = {"kind": "recorded", "tail_model": None, "stage": "prefill", "layer": 1, "recording": recording}
    facts = {"workload": workload, "rank_tokens": [4096 - most, most], **MODELLED}
    text = advice_text(load_timed(write_run(tmp_path, [comparison_of(eplb(1.2), facts=facts)], "emulated")), BOUNDS)
    said = f"\nRanks hold {4096 - most:,} to {most:,} tokens by whole sequences, up to {most / 2048:.2f} times the mean"
    assert (said in text) == is_said


# ---- what is assumed, and what is said -------------------------------------------------------------------------


@pytest.mark.parametrize("name", [path.stem for path in sorted((ROOT / "moe_ep_bench/data/devices").glob("*.yaml"))])
def test_every_device_has_links_up_to_256_ranks(name: str) -> None:
    question = asked("--model", "deepseek-v3", "--ep", 256, "--tokens", 65_536, "--peak-load", 4, "--device", name)
    (links,) = {one.links.name for one in question.comparisons}
    beside = asked(*QWEN, "--device", name).comparisons[0].links
    assert links == load_device(name).links[1]
    assert beside.name == load_device(name).links[0]


@pytest.mark.parametrize(("ranks_per_node", "is_said"), [(1, True), (8, False)])
def test_the_answer_says_which_links_are_assumed(ranks_per_node: int, is_said: bool, tmp_path: Path) -> None:
    """Of two ranks, on a node of their own each or on one: what lies between nodes was not measured."""
    links = load_links("b200-nvlink5-ndr").facts().model_dump(mode="json") | {"ranks_per_node": ranks_per_node}
    made = comparison_of(eplb(1.2), facts={**MODELLED, "links": links})
    text = advice_text(load_timed(write_run(tmp_path, [made], "emulated")), BOUNDS)
    said = "links/b200-nvlink5-ndr (assumed between nodes: latency, share of the bandwidth reached)"
    assert (said in text) == is_said
    assert is_said or "b200-nvlink5-ndr; " in text


@pytest.mark.slow
@pytest.mark.parametrize(
    ("skew", "said"),
    [
        ({"of": "OLMoE-1B-7B", "basis": "recorded"}, " (assumed, OLMoE-1B-7B's);"),
        ({"basis": "assumed"}, " (assumed);"),
        ({"basis": "recorded"}, ""),
    ],
)
def test_a_skew_that_is_another_models_is_called_assumed(skew: dict[str, str], said: str, tmp_path: Path) -> None:
    workload = {"kind": "synthetic", "tail_model": None, "skew": {"name": "mixed", "source": "somewhere", **skew}}
    made = comparison_of(eplb(1.2), facts={"workload": workload, "title": None, **MODELLED})
    text = advice_text(load_timed(write_run(tmp_path, [made], "emulated")), BOUNDS)
    line = next(line for line in text.splitlines() if line.startswith("For Tiny"))
    assert (" (assumed" in line) == bool(said)
    assert said in line


@pytest.mark.slow
def test_factors_that_come_to_the_same_rows_say_so(tmp_path: Path) -> None:
    same = [drop(factor, 1.2, 0.125, 0.875) for factor in (1.0, 1.5)]
    rows = candidates(load(write_run(tmp_path, [comparison_of(*same, drop(2.0, 1.2, 0.0625, 0.875))])), BOUNDS)
    assert rows["same_as"].fillna("").tolist() == ["", "token_drop capacity_factor=1.0", ""]
    table = rows_of(advice_text(load_timed(tmp_path), BOUNDS))
    assert [row[-1] for row in table if row[0] == "token_drop 1.5"] == ["capacity as of token_drop capacity_factor=1.0"]


def test_batches_that_are_replaced_are_named() -> None:
    said = "workload.num_batches: 2 of each draw or layer in place of 1, for fewer give no intervals"
    assert said in said_of(asked(*QWEN, "--set", "workload.num_batches=1"))
    for batches in ([], ["--set", "workload.num_batches=8"]):
        assert not any("num_batches" in line for line in said_of(asked(*QWEN, *batches)))


def test_a_policy_without_a_kernel_is_said_to_be_modelled_as_if_it_had_one(tmp_path: Path) -> None:
    own = dataclasses.replace(drop(1.5, 1.3, 0.05, 0.97), by_torch=True)
    for mode, facts, is_said in (("emulated", MODELLED, True), ("run", {}, False)):
        made = comparison_of(own, drop(2.0, 1.2, 0.02, 0.98), facts=facts)
        text = advice_text(load_timed(write_run(tmp_path / mode, [made], mode)), BOUNDS)
        said = "token_drop capacity_factor=1.5: torch operations, modelled as if compiled; on a GPU they take longer"
        assert (f"  {said}" in text.splitlines()) == is_said


@pytest.mark.slow
@pytest.mark.parametrize(("second", "is_said"), [(2.4, True), (1.21, False)])
def test_few_draws_with_wide_intervals_ask_for_more(second: float, is_said: bool, tmp_path: Path) -> None:
    made = [dataclasses.replace(one, num_batches=6) for one in of_draws(one=[eplb(1.2)], two=[eplb(second)])]
    text = advice_text(load_timed(write_run(tmp_path, made)), BOUNDS)
    assert ("2 draws of the traffic give wide intervals: more draws" in text) == is_said


# ---- no traffic is given -------------------------------------------------------------------------------------------


def asked_of(*flags: str) -> Any:
    return ask(make_parser().parse_args(["advise", "--ep", "4", "--tokens", "512", *flags]), BOUNDS)


@pytest.mark.parametrize(
    ("model", "whose", "peaks"),
    [
        ("deepseek-v2-lite", "DeepSeek-V2-Lite", None),
        ("qwen3-30b-a3b", "OLMoE-1B-7B", None),
        ("minimax-m2.5", "OLMoE-1B-7B", None),
        ("mixtral-8x7b", "Mixtral-8x7B", (1.0, 1.22, 1.9)),
    ],
)
def test_without_a_traffic_three_are_asked_of(model: str, whose: str, peaks: Any) -> None:
    """Balanced, typical and hard, as recorded of the model or of another, and never beyond what it can have."""
    question = asked_of("--model", model, "--set", "emulate.links=h100-nvlink4", "--set", "emulate.device=gb200")
    (assumed,) = [one for one in question.assumptions if one.kind == "traffics"]
    balanced, typical, hard = assumed.peak_loads
    spec = load_model(model)
    assert 1 == balanced < typical < hard <= 0.75 * spec.num_experts / spec.top_k
    assert assumed.names == [whose]
    assert peaks is None or assumed.peak_loads == peaks
    assert {one.experiment.workload.peak_load for one in question.comparisons} == set(assumed.peak_loads)
    draws = {one.experiment.workload.seed for one in question.comparisons}
    assert len(draws) == 5, "two draws give no verdict: their interval is three times as wide as their mean"
    assert "say which is yours (--counts" in assumption_words(assumed)


def test_three_traffics_of_many_ranks_share_the_scores_of_one() -> None:
    """Of few ranks each has as many as one alone."""
    flags = "--model", "deepseek-v3", "--set", "emulate.device=h100-sxm", "--set", "emulate.links=h100-nvlink4-ndr"
    for ep_size, share in ((128, 2), (64, 1)):
        large = *flags, "--ep", str(ep_size), "--tokens", str(8192 * ep_size)
        one, three = (asked_of(*large, *peak).comparisons for peak in (("--peak-load", "3"), ()))
        (alone,) = {of.experiment.emulate.sample_tokens for of in one}
        assert {share * of.experiment.emulate.sample_tokens for of in three} == {alone}


def test_an_answer_without_a_traffic_says_what_memory_its_picks_take_and_what_is_not_installed(tmp_path: Path) -> None:
    points = [{"point": {"workload.peak_load": load}} for load in (2, 3)]
    made = [comparison_of(eplb(1.2), comparison_id=str(number), facts=one) for number, one in enumerate(points)]
    missing = MissingRows(kind="package", name="p", known=("q[r]",))
    assumed = [
        Assumption(kind="traffics", names=["X"], peak_loads=(1.0, 2.0, 3.0)),
        Assumption(kind="modelled", names=["experts", "exchange"], missing=missing),
    ]
    question: Any = SimpleNamespace(assumptions=assumed)
    replicas_take(write_run(tmp_path, made), 2**30)
    text = advice_text(load(tmp_path), BOUNDS, question)
    lines = text.splitlines()
    assert lines.count("It costs: nothing is dropped, 1 GiB more memory on each rank.") == 2
    (said,) = (place for place, line in enumerate(lines) if "p is not installed" in line)
    assert lines[said].startswith("Experts and exchange modelled: p is not installed; expected: launch/setup.sh ")
    assert lines[said + 1].startswith("For ")


def test_an_answer_without_a_traffic_is_a_line_for_each(tmp_path: Path) -> None:
    store = load(write_run(tmp_path, swept(1.0, 1.2, 1.4)))
    question: Any = SimpleNamespace(assumptions=[Assumption(kind="traffics", names=["X"], peak_loads=(1.0, 2.0, 3.0))])
    text = advice_text(store, BOUNDS, question)
    assert text.count("candidate  ") == 0, "no table"
    answers = [line for line in text.splitlines() if line.startswith("At peak load")]
    assert [line.split(":")[1].split()[0] for line in answers] == ["Keep", "Use", "Use"]
    lost = [line for line in text.splitlines() if line.startswith(("It costs: ", "Without loss "))]
    assert len(lost) == 4, "of either pick, which drops"
    assert text.index("\nFor ") > text.index(answers[-1]), "for what all of them hold"
    assert "no traffic was given: assumed: balanced traffic, typical (peak load 2) and hard (peak load 3)" in text


def test_a_key_that_can_be_asked_nowhere_else_says_why_without_a_file_that_nobody_wrote() -> None:
    def refuse(values: dict[str, Any], rules: object, most_scores: int) -> Any:
        raise UserError(f"expected less, got {values['workload.peak_load']}", "workload.peak_load", where=CONFIG_NAME)

    experiment = SimpleNamespace(point=(), workload=SimpleNamespace(peak_load=2.0))
    point: Any = SimpleNamespace(experiment=experiment, overlap="none", world_size=4)
    question: Any = SimpleNamespace(at=refuse)
    rows = pd.DataFrame({"policy": [], "policy_params": []})
    (turn,) = turns._Solver(question, BOUNDS, rows, None, point).turns({"workload.peak_load": [1.5, 2.0, 3.0]})
    assert turn.unsolved is not None
    assert (turn.unsolved.kind, turn.unsolved.text) == ("refused", "workload.peak_load: expected less, got 3.0")
