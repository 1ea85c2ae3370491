"""Advice: options become a config, bounds hold, the pick is the fastest within them that is significantly faster."""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import yaml
from results_builder import FakeCase, FakeComparison, write_run
from safetensors.numpy import save_file
from whole_builder import ELSEWHERE_TOTAL_US, write_whole

from moe_ep_bench.analysis.advice import advice_of, candidates, picks
from moe_ep_bench.analysis.compare import compare_directories
from moe_ep_bench.analysis.draws import over_draws
from moe_ep_bench.analysis.figures.panels import case_rows
from moe_ep_bench.analysis.gather import gather
from moe_ep_bench.analysis.load import load_run, load_times
from moe_ep_bench.analysis.report.page import content_of
from moe_ep_bench.analysis.speedups import analyse
from moe_ep_bench.analysis.tables import run_text
from moe_ep_bench.analysis.timing import layer_time_us
from moe_ep_bench.bench.question import Bounds, Question, ask, ask_both
from moe_ep_bench.cli import main, make_parser
from moe_ep_bench.runtime.exit_codes import OK, USER_ERROR
from moe_ep_bench.timing.statistics import BELOW_MODEL, estimate_median

ROOT = Path(__file__).parents[1]
BOUNDS = Bounds(max_dropped=0.10, min_retained=0.95)
NO_BOUNDS = Bounds(max_dropped=1.0, min_retained=0.0)
REST = {"us_per_moe_layer": 6000.0, "num_moe_layers": 3, "context_length": 128, "attention": "modelled as absorbed MLA"}
QWEN = ["--model", "qwen3-30b-a3b", "--ep", "8", "--tokens", "16384"]


def drop(gamma: float, speedup: float, dropped: float, mass: float, **changes) -> FakeCase:
    params = {"capacity_factor": gamma}
    return FakeCase("token_drop", params=params, speedup=speedup, dropped=dropped, mass=mass, **changes)


def eplb(speedup: float) -> FakeCase:
    return FakeCase("eplb", role="replication", label="EPLB, 1 spare per rank", speedup=speedup)


def references() -> list[FakeCase]:
    return [
        FakeCase("native", role="baseline"),
        FakeCase("native", role="noise", label="native again"),
        FakeCase("topk", speedup=1.9),
        FakeCase("native_balanced", role="ceiling", label="native, balanced scores", speedup=2.0),
    ]


USUAL = (drop(1.0, 1.5, 0.25, 0.80), drop(1.5, 1.3, 0.08, 0.96), drop(2.0, 1.2, 0.04, 0.98))


def comparison_of(*cases: FakeCase, **changes) -> FakeComparison:
    return FakeComparison(**{"cases": [*references(), *cases], "num_iterations": 1, "noise": 0.0, **changes})


def table_of(root: Path, bounds: Bounds, *cases: FakeCase, seed: int = 0, **changes) -> pd.DataFrame:
    return candidates(load_run(write_run(root, [comparison_of(*cases, **changes)], seed=seed)), bounds)


def advised(root: Path, *cases: FakeCase, mode: str = "run", **changes) -> str:
    return advice_of(load_times(write_run(root, [comparison_of(*cases, **changes)], mode)), BOUNDS)


def rows_of(text: str) -> list[str]:
    """The labels of the table's rows, in order."""
    lines = text.splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith("----")) + 1
    return [re.split(r"  +", line)[0] for line in itertools.takewhile(str.strip, lines[start:])]


# ---- the pick ------------------------------------------------------------------------------------------------------


def test_the_pick_is_the_fastest_within_the_bounds_that_is_faster(tmp_path: Path) -> None:
    """The law, for costs and speeds drawn at random, with noise that leaves some verdicts open."""
    random = np.random.default_rng(3)
    costs = zip(random.uniform(0.9, 1.3, 12), random.uniform(0, 0.2, 12), random.uniform(0.9, 1, 12), strict=True)
    cases = [drop(number + 1, *cost) for number, cost in enumerate(costs)]
    run = load_run(write_run(tmp_path, [comparison_of(*cases, eplb(1.05), num_iterations=4, noise=0.05)], seed=3))
    (comparison,) = analyse(run)
    for bounds in (BOUNDS, NO_BOUNDS, Bounds(0.05, 0.0), Bounds(1.0, 0.98), Bounds(0.0, 1.1)):
        allowed = [
            result
            for result in (*comparison.policies, *comparison.replications)
            if result.case.policy != "topk"
            and result.verdict == "faster"
            and result.fidelity.dropped_share <= bounds.max_dropped
            and result.fidelity.retained_mass >= bounds.min_retained
        ]
        fastest = max((result.speedup.median for result in allowed), default=None)
        as_fast = [result for result in allowed if result.speedup.median >= fastest / 1.02]
        order = [
            (min(round(one.fidelity.retained_mass, 6), 1), one.speedup.median, one.case.case_id) for one in as_fast
        ]
        rows = candidates(run, bounds)
        assert rows.loc[rows["is_pick"], "case_id"].tolist() == [case_id for *_, case_id in sorted(order)[-1:]]


@pytest.mark.parametrize(("lossless", "picked"), [(1.28, "EPLB, 1 spare per rank"), (1.27, "token_drop gamma 2")])
def test_of_those_as_fast_as_the_fastest_the_pick_loses_least(tmp_path: Path, lossless: float, picked: str) -> None:
    cases = drop(1.0, 1.4, 0.2, 0.9), drop(1.5, 1.3, 0.05, 0.97), drop(2.0, 1.29, 0.04, 0.98), eplb(lossless)
    assert f"use {picked}: " in advised(tmp_path, *cases).splitlines()[-1]


def test_a_case_at_the_bound_is_within_it_and_each_bound_decides_alone(tmp_path: Path) -> None:
    # 409.6 of 4096 tokens x 2: shares are of whole pairs.
    for name, bounds, is_within in (
        ("at", Bounds(0.125, 0.75), True),
        ("dropped", Bounds(0.1249, 0.75), False),
        ("mass", Bounds(0.125, 0.751), False),
    ):
        (row,) = table_of(tmp_path / name, bounds, drop(1.0, 1.5, 0.125, 0.75)).to_dict("records")
        assert row["within"] == row["is_pick"] == is_within


@pytest.mark.parametrize(
    ("speedup", "noise", "batches"), [(0.8, 0.0, 10), (1.0, 0.0, 10), (1.5, 0.0, 9), (1.06, 0.1, 10)]
)
def test_native_is_kept_where_nothing_is_significantly_faster(
    tmp_path: Path, speedup: float, noise: float, batches: int
) -> None:
    case = drop(1.5, speedup, 0.05, 0.97)
    text = advised(tmp_path, case, noise=noise, num_batches=batches, num_iterations=2)
    assert text.splitlines()[-1].endswith("keep native: no policy within the bounds is significantly faster.")


def test_without_a_baseline_or_with_shared_cores_nothing_is_said(tmp_path: Path) -> None:
    native, *others = references()
    lost = dataclasses.replace(native, status="oom", reason="too big")
    directory = write_run(tmp_path / "none", [FakeComparison(cases=[lost, *others, USUAL[0]], num_iterations=1)])
    assert "inconclusive: the baseline was not measured" in advice_of(load_times(directory), BOUNDS)
    shared = advised(tmp_path / "shared", USUAL[1], facts={"oversubscribed": True})
    assert "inconclusive: more ranks than cores" in shared


# ---- the table -----------------------------------------------------------------------------------------------------


def test_the_table_is_best_first_and_one_sentence_follows(tmp_path: Path) -> None:
    text = advised(tmp_path, *USUAL, eplb(1.1))
    assert rows_of(text) == [
        "token_drop gamma 1.5",
        "token_drop gamma 2",
        "EPLB, 1 spare per rank",
        "token_drop gamma 1",
    ]
    assert re.search(r"token_drop gamma 1 +1\.500 \[1\.\d+, 1\.\d+\] +1\.333  out of bounds +25\.0 +80\.0", text)
    assert text.startswith("Measured, Tiny-MoE, NVIDIA Fake 80GB x 2 ranks, nccl; Zipf 0.8")
    assert "perfect balance: 2.000 at Tiny-MoE" in text
    assert text.splitlines()[-1] == (
        "Pick: at Tiny-MoE, EP 2, 4,096 tokens use token_drop gamma 1.5: 1.300 x native, at most 8.0 % dropped, at "
        "least 96.0 % of the score mass kept; 1.538 in place of 2.000 ms a layer."
    )


def test_replicas_are_counted_in_gib_of_a_rank(tmp_path: Path) -> None:
    run = load_run(write_run(tmp_path, [comparison_of(eplb(1.1))]))
    run = dataclasses.replace(run, cases=[dataclasses.replace(case, extra_bytes_per_rank=3e9) for case in run.cases])
    assert candidates(run, BOUNDS)["more_gib"].tolist() == [pytest.approx(3e9 / 1024**3)]
    assert "nothing dropped, 2.79 GiB more on each rank; 1.8" in advice_of(run, BOUNDS).splitlines()[-1]


@pytest.mark.parametrize(
    ("mode", "speedup", "words"),
    [("emulated", 1.015, "keep native: "), ("emulated", 1.03, "use EPLB, "), ("run", 1.015, "use EPLB, ")],
)
def test_a_modelled_pick_gains_2_percent_and_one_that_drops_nothing_says_so(
    tmp_path: Path, mode: str, speedup: float, words: str
) -> None:
    facts = {"links": "modelled by links/a", "device": "modelled by devices/b"} if mode == "emulated" else {}
    pick = advised(tmp_path, eplb(speedup), mode=mode, facts=facts).splitlines()[-1]
    assert words in pick
    assert ("x native, nothing dropped" in pick) == words.startswith("use")


def test_where_traffic_decides_the_table_shows_it_and_the_pick_names_each(tmp_path: Path) -> None:
    comparisons = [
        comparison_of(
            drop(1.5, speedup, 0.05, 0.97),
            drop(2.0, 0.7, 0.01, 0.99),
            comparison_id=f"c{number}",
            facts={"point": {"workload.peak_load": peak}, "title": f"Tiny, peak load {peak}"},
        )
        for number, (peak, speedup) in enumerate(((4.0, 1.5), (1.0, 0.8), (2.0, 0.9), (5.0, 1.6)))
    ]
    text = advice_of(load_times(write_run(tmp_path, comparisons)), BOUNDS)
    assert rows_of(text) == ["token_drop gamma 1.5"] * 4 + ["token_drop gamma 2"] * 4
    assert re.findall("gamma 1.5 +peak load (.)  (.....)", text) == [
        *(("1", "0.800"), ("2", "0.900")),
        *(("4", "1.500"), ("5", "1.600")),
    ], "between 2 and 4 it begins to pay"
    assert max(map(len, text.partition("\n\n")[2].partition("\n\n")[0].splitlines())) <= 120
    pick = next(line for line in text.splitlines() if line.startswith("Pick"))
    assert pick.startswith("Pick: at peak load 1 and peak load 2 keep native: ")
    assert "; at peak load 4 and peak load 5 use token_drop gamma 1.5: 1.500 to 1.600 x native" in pick


def of_draws(peak_load: float = 4.0, **draws: FakeCase) -> list[FakeComparison]:
    """A comparison for each draw, by name."""
    workload = {"kind": "synthetic", "description": "", "tail_model": None, "targets": {"peak_load": peak_load}}
    return [
        comparison_of(
            *cases,
            comparison_id=name,
            noise=0.02,
            num_batches=4,
            num_iterations=6,
            facts={
                "point": {"workload.seed": number},
                "workload": {**workload, "description": f"seed {number}"},
                "rest": REST,
            },
        )
        for number, (name, cases) in enumerate(draws.items())
    ]


def test_draws_of_one_traffic_are_launches_of_one_comparison(tmp_path: Path) -> None:
    """The interval covers draws, and a bound holds for their mean."""
    speedups_D, drops_D = (1.1, 1.5, 1.3), (0.05, 0.11, 0.08)
    draws = {
        f"draw{number}": [drop(1.5, speedup, dropped, 0.97)]
        for number, (speedup, dropped) in enumerate(zip(speedups_D, drops_D, strict=True))
    }
    run = load_run(write_run(tmp_path / "draws", of_draws(**draws)))
    ratios = []
    for number, name in enumerate(draws):
        native, policy = (
            next(case for case in run.cases if (case.comparison_id, case.policy) == (name, policy))
            for policy in ("native", "token_drop")
        )
        ratio = layer_time_us(native) / layer_time_us(policy)
        index = ratio.index.to_frame()
        index["launch"] = number
        index["batch"] += 4 * number
        ratios.append(ratio.set_axis(pd.MultiIndex.from_frame(index)))
    expected = estimate_median(pd.concat(ratios))
    joined, part_of = over_draws(run)
    assert part_of == dict.fromkeys(draws, "draw0")
    assert joined.conditions["draw0"].keys() == set(range(3))
    (row,) = candidates(joined, BOUNDS).to_dict("records")
    assert row["speedup_median"] == pytest.approx(expected.median)
    assert (row["speedup_low"], row["speedup_high"]) == pytest.approx((expected.low, expected.high))
    assert row["speedup_low"] < 1.15 < 1.45 < row["speedup_high"]
    assert row["dropped_share"] == pytest.approx(0.08, abs=1e-3)
    assert row["within"], "one draw alone drops more than the bound"
    text = advice_of(run, BOUNDS)
    least, most = re.search(r"gamma 1.5 .*?\]  (1\.\d\d) to (1\.\d\d)", text).groups()
    assert (float(least), float(most)) == pytest.approx((1.1, 1.5), abs=0.02)
    assert "the traffic is drawn 3 times" in text
    assert "one draw:" not in text
    assert picks(run, BOUNDS)["layer_speedup"].tolist() == [1.0], "the low end is below native"


@pytest.mark.parametrize(
    ("low", "high", "answer"),
    [
        (1.5, 1.9, "use token_drop gamma 1.5: "),
        (1.1, 1.5, "keep native: none is significantly faster on draws that did not choose it"),
    ],
)
def test_a_pick_is_judged_on_draws_that_did_not_choose_it(tmp_path: Path, low: float, high: float, answer: str) -> None:
    """Two candidates are lucky on three draws of five each: either's median is lucky, and no other draw's choice is."""
    one, two = (high, high, high, low, low), (low, low, high, high, high)
    draws = {
        f"draw{number}": [drop(1.5, first, 0.05, 0.98), drop(2.0, second, 0.05, 0.97)]
        for number, (first, second) in enumerate(zip(one, two, strict=True))
    }
    run = load_run(write_run(tmp_path, of_draws(**draws)))
    rows = candidates(run, BOUNDS)
    assert rows["speedup_median"].tolist() == pytest.approx([high, high], rel=0.06)
    assert set(rows["verdict"]) == {"faster"}
    text = advice_of(run, BOUNDS)
    assert f" {answer}" in text.splitlines()[-1]
    assert "of 2 verdicts up to 0.1 would be called by chance alone" in text
    layer_speedup = picks(run, BOUNDS)["layer_speedup"].tolist()
    assert layer_speedup == pytest.approx([low if "use" in answer else 1.0], rel=0.06)


def test_a_pick_of_one_draw_says_that_its_batches_chose_it(tmp_path: Path) -> None:
    text = advised(tmp_path, *USUAL)
    assert "the pick is judged by the traffic that chose it, so that its speedup is a little too high" in text
    assert "did not choose it" not in text


def test_every_command_gives_a_case_the_same_verdict(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Draws of four batches are too few each and enough together, and a model cannot tell 1.1 %."""
    cases = [drop(1.5, 1.3, 0.05, 0.97), drop(2.0, 1.011, 0.04, 0.98)]
    draws = of_draws(**{f"draw{number}": cases for number in range(3)})
    for one in draws:
        one.facts |= {"links": "modelled by links/a", "device": "modelled by devices/b"}
        one.noise = 0.001
    faster = [dataclasses.replace(one, native_us=1000.0) for one in draws]
    directories = [write_run(tmp_path / name, runs, "emulated") for name, runs in (("a", draws), ("b", faster))]
    expected = {"token_drop gamma 1.5": "faster", "token_drop gamma 2": BELOW_MODEL}
    assert main(["show", str(directories[0]), "--format", "json"]) == OK
    frames = {
        "advise": candidates(load_times(directories[0]), BOUNDS),
        "show": pd.DataFrame(json.loads(capsys.readouterr().out)["rows"]),
        "html": content_of(directories[0], []).tables[0].frame,
        "plot": case_rows(gather(directories[:1]).found["layers"][""]).rename(columns={"policy": "label"}),
    }
    for name, rows in frames.items():
        rows = rows[rows["label"].isin(list(expected))]
        assert dict(zip(rows["label"], rows["verdict"], strict=True)) == expected, name
    assert [line for line in advice_of(load_times(directories[0]), BOUNDS).splitlines() if BELOW_MODEL in line]
    compared = compare_directories(*directories, same_machine=True).cases
    assert set(compared["time_verdict"]) == {"faster"}
    assert set(compared.loc[compared["role"] != "baseline", "speedup_verdict"]) == {BELOW_MODEL}


def test_a_pick_over_draws_names_the_least_and_the_greatest(tmp_path: Path) -> None:
    comparisons = []
    for peak_load, least in ((4.0, 1.3), (5.0, 1.5)):
        draws = {f"{peak_load}, {more}": [drop(1.5, least + more, 0.05, 0.97)] for more in (0.0, 0.01, 0.02)}
        comparisons += of_draws(peak_load, **draws)
    pick = advice_of(load_run(write_run(tmp_path, comparisons)), BOUNDS).splitlines()[-1]
    least, most = re.search(
        r"x native on draws that did not choose it \((.*) to (.*) over 3 draws of the traffic\)", pick
    ).groups()
    assert (float(least), float(most)) == pytest.approx((1.3, 1.52), abs=0.015)


def test_what_differs_in_more_than_the_draw_stays_apart(tmp_path: Path) -> None:
    seeds = of_draws(one=[USUAL[1]], two=[dataclasses.replace(USUAL[1], status="oom", reason="too big")])
    others = of_draws(2.0, three=[USUAL[1]])
    unswept = dataclasses.replace(others[0], comparison_id="four", facts={**others[0].facts, "point": {}})
    run = load_run(write_run(tmp_path, [*seeds, *others, unswept]))
    joined, part_of = over_draws(run)
    assert part_of == {"one": "one", "two": "one", "three": "three", "four": "four"}
    states = {case.comparison_id: case.status for case in joined.cases if case.policy == "token_drop"}
    assert states == {"one": "oom", "three": "ok", "four": "ok"}, "what failed in a draw failed"
    assert over_draws(joined)[0] is joined
    twice = [dataclasses.replace(one, num_launches=2) for one in of_draws(one=[USUAL[1]], two=[USUAL[1]])]
    run = load_run(write_run(tmp_path / "twice", twice))
    assert over_draws(run)[0] is run, "launches of one draw are not independent of each other"


ASSUMED, DRAWN = ", assumed, not Tiny-MoE's own.", "one draw: native's fullest rank has"


def recorded(model: str, passes: float) -> dict:
    """A workload of a recording that a batch uses so often."""
    sources = [{"passes_per_batch": passes}]
    return {"kind": "recorded", "recording": {"model": model, "arrangement": "sequences", "sources": sources}}


@pytest.mark.parametrize(
    ("workload", "skew", "note"),
    [
        ({"targets": {"peak_load": 4.0}}, f"; peak load 4{ASSUMED}", DRAWN),
        ({"targets": {"peak_load": None}}, f"; unskewed traffic{ASSUMED}", DRAWN),
        ({"targets": {"peak_load": 4.0, "rank_load": {"ep_size": 2, "load": 1.2}}}, f"; peak load 4{ASSUMED}", None),
        (
            recorded("allenai/OLMoE", 8.19),
            "; skew of allenai/OLMoE's recording, not Tiny-MoE's.",
            "recording 8.19 times, so",
        ),
        (
            recorded("who/Tiny-MoE", 0.83),
            "; skew of who/Tiny-MoE's recording.",
            None,
        ),
        (
            {"skew": {"name": "mixed", "basis": "assumed", "source": "as X"}},
            "(assumed: as X), not Tiny-MoE's own.",
            DRAWN,
        ),
    ],
)
def test_whose_skew_it_is_what_of_it_is_chance_and_that_nothing_ran_are_said(
    tmp_path: Path, workload: dict, skew: str, note: str | None
) -> None:
    workload = {"kind": "synthetic", "description": "", "tail_model": None, **workload}
    modelled = {"links": "modelled by links/a: 10.6 us", "device": "modelled by devices/b: a roofline"}
    text = advised(tmp_path, USUAL[0], mode="emulated", num_batches=1, facts={**modelled, "workload": workload})
    _, first, *_ = text.splitlines()
    assert first.startswith(
        "Modelled (nothing was run), Tiny-MoE, 2 ranks modelled by devices/b, modelled by links/a; "
    )
    assert first.endswith(skew)
    assert "Pick (modelled): " in text
    assert (DRAWN in text, " times, so " in text) == (note == DRAWN, note not in (DRAWN, None))
    assert note is None or note in text


@pytest.mark.parametrize(
    ("links", "backend", "is_mixed"),
    [("h100-nvlink4, bandwidth x 2", "gloo", True), ("here", "gloo", False), ("h100-nvlink4", "nccl", False)],
)
def test_experts_of_a_cpu_behind_links_of_gpus_are_warned_of_below_the_first_line(
    tmp_path: Path, links: str, backend: str, is_mixed: bool
) -> None:
    facts = {"links": f"modelled by links/{links}: inside a node of 8 10.6 us", "backend": backend, "scale": 0.125}
    directory = write_run(tmp_path, [comparison_of(USUAL[0], facts=facts, num_batches=1)], "emulated")
    warning = "MIXED MACHINES: experts of this CPU (sizes x 0.125 of the true ones) behind links of GPUs"
    for text in (advice_of(load_times(directory), BOUNDS), run_text(load_run(directory))):
        assert (warning in text.splitlines()[1]) == is_mixed


def test_whole_models_are_ranked_by_the_pass_with_their_layers_beside(tmp_path: Path) -> None:
    directory = write_whole(tmp_path, [*references(), *USUAL], native_us=2 * ELSEWHERE_TOTAL_US)
    text = advice_of(load_times(directory), NO_BOUNDS)
    assert rows_of(text)[0] == "token_drop gamma 1"
    # At 1.5 times the speed experts take less than attention's 600 us.
    limits = candidates(load_run(directory, whole=True), NO_BOUNDS)["limit"]
    assert limits.tolist() == ["attention", "experts", "experts"]
    row = next(line for line in text.splitlines() if line.startswith("token_drop gamma 1 "))
    end_to_end, layers = (float(found) for found in re.findall(r"(\d\.\d+) \[", row))
    assert layers == pytest.approx(1.5, rel=0.02)
    assert end_to_end == pytest.approx(1 / (1 / 3 + 2 / 3 / 1.5), rel=0.02)
    assert float(re.findall("no policy exceeds (.*) end to end", text)[0]) == pytest.approx(3.0, rel=0.02)


# ---- from options to a config --------------------------------------------------------------------------------------


def asked(*arguments: object) -> Question:
    return ask(make_parser().parse_args(["advise", *map(str, arguments)]))


def candidates_of(question: Question) -> list[str]:
    return [policy.label for policy in question.experiments[0].make_policies()]


def test_options_become_a_config_of_modelled_emulation() -> None:
    question = asked(*QWEN)
    config = yaml.safe_load(question.text)
    assert config["model"] == {"preset": "qwen3-30b-a3b"}
    assert config["layer"] == {"dtype": "bfloat16", "ep_size": 8}
    assert config["workload"]["num_tokens"] == 16384
    assert config["sweep"] == {"workload.seed": [1, 2, 3, 4, 5], "workload.peak_load": [1.2, 2.0, 4.0]}
    assert (config["emulate"]["device"], config["emulate"]["links"]) == ("h100-sxm", "h100-nvlink4")
    lp = {"balancer": "lp", "solve_us": 100.0}
    assert config["emulate"]["replication"] == [{"spare_per_rank": 1}, {"spare_per_rank": 1, **lp}]
    labels = candidates_of(question)
    for name in ("token_drop", "expanded_drop"):
        assert all(f"{name} capacity_factor={factor}" in labels for factor in (1.0, 1.5, 2.0))
    assert {label.split()[0] for label in labels} == {"token_drop", "expanded_drop", "oea", "laser", "xshare"}
    assert question.left_out == ()
    path = ROOT / "tests/data/small-moe/config.json"
    experts = json.loads(path.read_text())["num_experts"]
    config = yaml.safe_load(asked("--model", path, "--ep", experts, "--tokens", 64 * experts).text)
    assert config["model"] == {"hf_config": str(path)}
    beyond = yaml.safe_load(asked("--model", "qwen3-30b-a3b", "--ep", 16, "--tokens", 64, "--device", "h20").text)
    assert beyond["emulate"]["links"] == "h20-nvlink4-ndr"


def test_traffic_that_chance_decides_is_drawn_several_times(tmp_path: Path) -> None:
    def drawn(*arguments: object) -> tuple[list[int] | None, int]:
        config = yaml.safe_load(asked(*arguments).text)
        return config.get("sweep", {}).get("workload.seed"), config["workload"]["num_batches"]

    one_load = [*QWEN, "--peak-load", "3"]
    assert drawn(*one_load) == ([1, 2, 3, 4, 5], 4)
    assert drawn(*one_load, "--draws", "2") == ([1, 2], 5), "ten batches in all, or there is no interval"
    assert drawn(*one_load, "--draws", "1") == (None, 10)
    assert drawn("--model", "olmoe-1b-7b", "--ep", 1, "--tokens", 64) == (None, 10), "one rank holds all experts"
    full = recording(tmp_path / "full.safetensors", full=True)
    assert drawn("--model", "olmoe-1b-7b", "--ep", 8, "--tokens", 64, "--trace", full) == (None, 4), "of three layers"
    config = ROOT / "configs/quickstart.yaml"
    assert drawn(config) == (None, 10), "its skew says how full a rank is"
    assert drawn(config, "--set", "workload.seed=7", "--set", "workload.rank_load=null") == ([7, 8, 9, 10, 11], 10)
    pattern = tmp_path / "pattern.yaml"
    pattern.write_text(
        "name: pattern\nmodel: {preset: olmoe-1b-7b}\nlayer: {ep_size: 8}\npolicies: [{name: topk}]\n"
        "workload: {kind: synthetic, num_tokens: 64, skew: power_law_1.2}\n"
    )
    assert drawn(pattern) == (None, 10), "it prescribes all loads"
    assert drawn(ROOT / "configs/model-prefill.yaml")[0] is None, "layers of a whole model are several draws"


def test_counts_are_told_from_a_recording_by_content_and_give_every_experts_load(tmp_path: Path) -> None:
    counts, olmoe = tmp_path / "counts.json", ["--model", "olmoe-1b-7b", "--ep", 8, "--tokens", 64]
    counts.write_text(json.dumps(np.arange(3 * 64).reshape(3, 64).tolist()))
    with pytest.raises(ValueError, match=r"--trace .*counts.json: expected a recording, got counts of 3 layers"):
        asked(*olmoe, "--trace", counts)
    question = asked(*olmoe, "--counts", counts)
    assert [one.workload.skew_layer for one in question.experiments] == [0, 1, 2]
    assert all(one.workload.skew_from == counts for one in question.experiments)
    assert "workload.seed" not in yaml.safe_load(question.text).get("sweep", {}), "chance decides no rank's load"
    with pytest.raises(ValueError, match=r"--counts .*expected counts of 128 experts, as .* has; got 64"):
        asked(*QWEN, "--counts", counts)
    with pytest.raises(ValueError, match="--peak-load: expected none beside --trace or --counts"):
        asked(*olmoe, "--counts", counts, "--peak-load", 2)


def test_layers_are_joined_and_the_answer_gives_their_range(tmp_path: Path) -> None:
    workload = {"kind": "recorded", "description": "", "tail_model": "popularity"}
    comparisons = [
        comparison_of(
            drop(1.5, speedup, 0.05, 0.97),
            comparison_id=f"layer{layer}",
            num_batches=5,
            facts={"point": {"workload.layer": layer}, "workload": workload, "title": f"Tiny-MoE, layer {layer}"},
        )
        for layer, speedup in enumerate((1.2, 1.3, 1.4))
    ]
    text = advice_of(load_times(write_run(tmp_path, comparisons)), BOUNDS)
    assert "by layer" in text
    assert "the traffic is that of 3 layers" in text
    assert re.search(r"1\.300 x native \(1\.20 to 1\.40 over 3 layers\)", text.splitlines()[-1])


def test_decode_is_asked_beside_prefill_with_one_token_of_each_request() -> None:
    options = make_parser().parse_args(["advise", *QWEN, "--decode-tokens", "256", "--out", "both"])
    both = {phase: yaml.safe_load(one.text)["workload"] for phase, one in ask_both(options).items()}
    sizes = {phase: (one["num_tokens"], one["sequence_length"]) for phase, one in both.items()}
    assert sizes == {"prefill": (16384, 128), "decode": (256, 1)}
    prefill, decode = ask_both(options).values()
    assert [one.experiments[0].whole.context_length for one in (prefill, decode)] == [0, 2048]
    assert [str(one.out) for one in (prefill, decode)] == ["both/prefill", "both/decode"]
    assert "2,048 tokens in each request's cache" in decode.assumed
    alone = ask_both(make_parser().parse_args(["advise", *QWEN]))
    assert list(alone) == [""]
    assert alone[""].text == prefill.text, "asked for decode too, prefill's question is the same"


@pytest.mark.parametrize("name", ["decode-graph", "model-prefill"])
def test_a_config_becomes_a_question(name: str) -> None:
    config = ROOT / f"configs/{name}.yaml"
    question = asked(config)
    assert all(one.emulate.device != "measured" and one.emulate.links for one in question.experiments)
    assert all(one.workload.num_batches >= 10 for one in question.experiments)
    assert "measure" not in yaml.safe_load(question.text)


def test_the_same_question_has_the_same_candidates_whatever_the_config_says() -> None:
    of_config = asked(ROOT / "configs/quickstart.yaml", "--set", "measure.launches=3", "--set", "layer.cuda_graph=true")
    of_options = asked("--model", "deepseek-v2-lite", "--ep", 8, "--tokens", 131072)
    assert candidates_of(of_config) == candidates_of(of_options)
    assert of_config.experiments[0].emulate == of_options.experiments[0].emulate


def recording(path: Path, *, full: bool) -> Path:
    scores = np.random.default_rng(1).random((3, 64, 64)) ** 3
    scores /= scores.sum(axis=2, keepdims=True)
    ids = np.argsort(-scores, axis=2)[..., :8]
    tensors = {
        "expert_ids": ids.astype(np.uint8),
        "scores": np.take_along_axis(scores, ids, axis=2).astype(np.float16),
        "sequence_id": np.repeat(np.arange(4), 16).astype(np.int32),
        "position": np.tile(np.arange(16), 4).astype(np.int32),
        **({"full_scores": scores.astype(np.float32)} if full else {}),
    }
    metadata = {"format": "moe-trace-v1", "model": "allenai/OLMoE", "num_experts": "64", "top_k": "8"}
    metadata |= {"score": "softmax, not renormalised", "phase": "prefill"}
    metadata |= {name: "test" for name in ("domain", "source", "licence")}
    save_file({name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}, path, metadata)
    return path


def test_what_the_workload_does_not_allow_is_left_out_with_the_reason(tmp_path: Path) -> None:
    olmoe = ["--model", "olmoe-1b-7b", "--ep", 1, "--tokens", 64]
    without = asked(*olmoe, "--trace", recording(tmp_path / "top.safetensors", full=False))
    assert {label.split()[0] for label in candidates_of(without)} == {"token_drop"}
    assert all("looks past the top-k" in line for line in without.left_out[:-1])
    assert without.left_out[-1] == "EPLB: one rank holds all experts"
    full = asked(*olmoe, "--trace", recording(tmp_path / "full.safetensors", full=True))
    assert full.left_out == without.left_out[-1:]
    assert [one.workload.layer for one in full.experiments] == [0, 1, 2], "all that were recorded"
    (reason,) = asked(ROOT / "configs/decode.yaml", "--set", "layer.ep_size=8").left_out
    assert reason == "xshare request: decides for a request's tokens, of which a step has one"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "expected a config, a results directory or --model; got none"),
        (["--model", "qwen"], "--model: expected a path of a config.json or one of deepseek-moe-16b"),
        (["--model", "olmoe-1b-7b", "--tokens", "64"], "--ep: expected a number beside --model; got none"),
        ([*QWEN, "--ep", "7"], "--ep: expected a divisor of the 128 experts of Qwen3-30B-A3B; got 7"),
        ([*QWEN, "--tokens", "4"], "--tokens: expected at least one for each of the 8 ranks; got 4"),
        ([*QWEN, "--device", "h1000"], "--device: expected a path of a .yaml or one of a100-sxm-80gb"),
        ([*QWEN, "--links", "none"], "--links: expected a path of a .yaml or one of"),
        ([*QWEN, "--peak-load", "17"], "--peak-load: expected 1 to 16 (experts / top-k); got 17"),
        ([*QWEN, "--draws", "0"], "--draws: expected 1 to 100; got 0"),
        (["--model", "qwen3-30b-a3b", "--ep", "1", "--tokens", "64", "--draws", "3"], "--draws: expected none where"),
        ([*QWEN, "--peak-load", "1.001"], "peak_load: expected 1."),
        ([*QWEN, "--decode-tokens", "4"], "--decode-tokens: expected at least one for each of the 8 ranks; got 4"),
        ([*QWEN, "--context", "64"], "--context: expected --decode-tokens beside it"),
        ([*QWEN, "--decode-tokens", "64", "--context", "0"], "--context: expected at least one token in each"),
        ([*QWEN, "--trace", "no.safetensors"], "--trace: no.safetensors"),
        ([*QWEN, "--max-dropped", "5"], "--max-dropped: expected a share such as 5% or 0.05, 0 to 1; got 5"),
        ([*QWEN, "--max-lost-mass", "nan"], "--max-lost-mass: expected a share"),
        ([*QWEN, "--set", "layer.ep_size=4"], "--set layer.ep_size=4: goes with a config"),
        ([str(ROOT / "configs/quickstart.yaml"), "--ep", "4"], "--ep: expected none with a config"),
    ],
)
def test_a_bad_option_is_one_line_and_nothing_is_written(
    tmp_path: Path, options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["advise", *options, "--out", str(tmp_path / "out")]) == USER_ERROR
    printed = capsys.readouterr()
    assert message in printed.err.splitlines()[-1]
    assert printed.out == ""
    assert not (tmp_path / "out").exists()


def test_shares_are_read_and_one_bound_alone_binds_alone() -> None:
    assert Bounds.of(None, None) == Bounds(0.10, 0.95)
    assert Bounds.of("5%", None) == Bounds(0.05, 0.0)
    assert Bounds.of(None, "0.01") == Bounds(1.0, 0.99)


# ---- what does not fit ---------------------------------------------------------------------------------------------

FIT = {"device": "h100-sxm", "device_bytes": 80e9, "dtype": "bfloat16", "ep_size": 2, "is_whole": True}


def fitting(expert_bytes: int, smallest: int | None) -> dict:
    others = dict.fromkeys(("other_weight_bytes", "cache_bytes", "row_bytes"), 0)
    return {"fit": {**FIT, **others, "expert_bytes": expert_bytes, "fitting_ep_size": smallest}}


def test_what_does_not_fit_is_no_pick(tmp_path: Path) -> None:
    text = advised(tmp_path / "none", *USUAL, facts=fitting(163_000_000_000, 32))
    words = "does not fit: 163 GB on each of 2 ranks in bfloat16 (experts 163), h100-sxm has 80 GB; the smallest EP"
    assert f"The model {words} size on which it does is 32." in text
    assert f"warning: {words}" in " ".join(run_text(load_times(tmp_path / "none")).split())
    assert "none: the model does not fit on EP 2" in text.splitlines()[-1]
    assert "use token_drop" not in text
    assert "use token_drop" in advised(tmp_path / "fits", *USUAL, facts=fitting(79_000_000_000, 2))


def test_replicas_that_do_not_fit_are_no_pick_and_are_named(tmp_path: Path) -> None:
    directory = write_run(tmp_path, [comparison_of(*USUAL, eplb(1.6), facts=fitting(78_000_000_000, 2))])
    document = json.loads((directory / "run.json").read_text())
    for case in document["cases"].values():
        case["extra_bytes_per_rank"] = 3e9 if case["role"] == "replication" else None
    (directory / "run.json").write_text(json.dumps(document))
    text = advice_of(load_times(directory), BOUNDS)
    assert "use token_drop gamma 1.5" in text.splitlines()[-1]
    left = "does not fit beside the model, which leaves 1.86 GiB of h100-sxm: EPLB, 1 spare per rank (2.79 GiB)"
    assert left in " ".join(text.split())


def test_that_it_does_not_fit_is_said_before_anything_is_modelled(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--ep", "16", "--tokens", "32768", "--decode-tokens", "256", "--context", "4096"]
    assert main(["advise", "--model", "deepseek-v3", *sizes, "--dry-run"]) == OK
    prefill, decode = (part for part in capsys.readouterr().out.split("\n\n") if "does not fit: " in part)
    assert "GB on each of 16 ranks in bfloat16 (experts 81.7, other weights 34" in prefill
    assert "the smallest EP size on which it does is 32" in prefill
    assert "cache 4.61" in decode


# ---- command -------------------------------------------------------------------------------------------------------


def test_a_directory_is_only_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = write_run(tmp_path / "run", [comparison_of(*USUAL)])
    before = sorted(directory.rglob("*"))
    assert main(["advise", str(directory), "--max-dropped", "30%"]) == OK
    assert "use token_drop gamma 1: " in capsys.readouterr().out
    for option in (
        ["--force"],
        ["--draws", "2"],
        ["--set", "layer.ep_size=2"],
        ["--out", "elsewhere"],
        ["--tokens", "64"],
    ):
        assert main(["advise", str(directory), *option]) == USER_ERROR
        assert f"{option[0]}: expected none with {directory}" in capsys.readouterr().err
    assert main(["advise", *QWEN, "--out", str(directory)]) == USER_ERROR
    assert "holds results of another question" in capsys.readouterr().err
    assert sorted(directory.rglob("*")) == before


def test_a_question_is_modelled_once_and_answered(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    command = ["advise", "--model", "olmoe-1b-7b", "--ep", "4", "--tokens", "64", "--out", str(out)]
    assert main([*command, "--dry-run"]) == OK
    plan = capsys.readouterr().out
    assert "by default: prompts of 16 tokens" in plan
    assert yaml.safe_load(plan.partition("\n\n")[2])["sweep"]["workload.peak_load"] == [None, 4.0]
    assert "about 1" in plan
    assert not out.exists()
    command += ["--peak-load", "4", "--draws", "2"]
    assert main(command) == OK
    first = capsys.readouterr()
    sent, assumed, *_ = first.out.splitlines()
    assert sent == "Modelled: bf16, NCCL all-to-all, one copy per (token, expert) pair, no overlap."
    assert assumed.startswith(
        "Modelled (nothing was run), OLMoE-1B-7B, EP 4, 64 tokens (16 a rank), 4 ranks modelled by "
    )
    assert "peak load 4, assumed, not OLMoE-1B-7B's own" in assumed
    assert first.out.splitlines()[-1] == f"config: {out}/advise.yaml"
    assert first.err.startswith("moe-ep-bench: OLMoE-1B-7B, 16 candidates x 5 batches x 2 points, modelled on h100-sxm")
    described = json.loads((out / "run.json").read_text())
    assert set(described["hashes"]["workload"].values()) == {None}, "nobody asked for a survey"
    written = {part: part.stat().st_mtime_ns for part in (out / "cases").iterdir()}
    assert main(command) == OK
    assert capsys.readouterr().out == first.out
    assert {part: part.stat().st_mtime_ns for part in (out / "cases").iterdir()} == written


def test_a_pick_comes_to_what_amdahl_s_law_says(tmp_path: Path) -> None:
    """A pass of which MoE layers take 2 ms of 8; where native stays there is nothing to gain."""
    comparisons = [
        comparison_of(
            drop(1.5, speedup, 0.05, 0.97), eplb(0.9), comparison_id=name, facts={"title": name, "rest": REST}
        )
        for name, speedup in (("faster", 2.0), ("slower", 0.8))
    ]
    rows = picks(load_times(write_run(tmp_path, comparisons)), BOUNDS)
    assert rows["label"].tolist() == ["token_drop gamma 1.5", "native"]
    assert rows["moe_share"].tolist() == pytest.approx([0.25] * 2, rel=1e-6)
    assert rows["layer_speedup"].tolist() == pytest.approx([2.0, 1.0], rel=1e-6)
    assert rows["end_to_end"].tolist() == pytest.approx([8 / 7, 1.0], rel=1e-6)
    # 3 MoE layers of 2 and 1 ms, each beside 6 ms; 4,096 tokens on 2 ranks.
    assert rows["native_ms"].tolist() == pytest.approx([24.0, 24.0], rel=1e-6)
    assert rows["pass_ms"].tolist() == pytest.approx([21.0, 24.0], rel=1e-6)
    assert rows["tokens_per_s"].tolist() == pytest.approx([2048 / 0.021, 2048 / 0.024], rel=1e-6)


def test_milliseconds_and_tokens_per_second_stand_beside_every_ratio(tmp_path: Path) -> None:
    directory = write_run(tmp_path, [comparison_of(*USUAL, facts={"rest": REST})])
    text = advice_of(load_times(directory), BOUNDS)
    header = next(line for line in text.splitlines() if line.startswith("policy"))
    row = next(line for line in text.splitlines() if line.startswith("token_drop gamma 1.5"))
    assert re.split(r"  +", header)[:5] == ["policy", "speedup", "layer ms", "step ms", "tokens/s/GPU"]
    # 2 ms / 1.3, three of them beside 6 ms each.
    assert re.split(r"  +", row)[2:5] == ["1.538", "22.62", "90,558"]
    said = " ".join(text.split())
    assert "native: 2.000 ms a layer, 85,333 tokens/s per GPU at " in said
    assert "beside 6,000 us for the rest of the model (modelled: attention after 128 tokens as absorbed MLA" in said
    assert "; 1.538 in place of 2.000 ms a layer, 90,558 of 85,333 tokens/s per GPU." in said
    assert "step ms  tokens/s/GPU" in run_text(load_run(directory))


def test_where_the_peak_load_decides_the_answer_ends_with_how_to_get_it(tmp_path: Path) -> None:
    def asked_at(*speedups: float, key: str = "workload.peak_load") -> str:
        comparisons = [
            comparison_of(drop(1.5, speed, 0.05, 0.97), comparison_id=f"c{place}", facts={"point": {key: 1.0 + place}})
            for place, speed in enumerate(speedups)
        ]
        return advice_of(load_times(write_run(tmp_path / f"{key}-{speedups}", comparisons, "emulated")), BOUNDS)

    told = asked_at(1.0, 1.3)
    assert "The peak load decides" in told
    assert told.endswith("--trace mine.safetensors.")
    commands = [line.strip().partition(":")[0] for line in told.splitlines() if "curl" in line]
    assert commands == ["vLLM", "SGLang"]
    assert "curl" not in asked_at(1.3, 1.3), "at any peak load the pick is the same"
    assert "curl" not in asked_at(1.0, 1.3, key="layer.ep_size")


def test_prefill_and_decode_are_answered_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    trace = recording(tmp_path / "top.safetensors", full=False)
    sizes = ["--ep", "4", "--tokens", "64", "--decode-tokens", "8", "--context", "128", "--trace", str(trace)]
    assert main(["advise", "--model", "olmoe-1b-7b", *sizes, "--out", str(out)]) == OK
    told = capsys.readouterr().out
    *_, last = told.split("Prefill and decode, from end to end")
    phases = [line.split()[0] for line in last.splitlines() if line.startswith(("prefill", "decode"))]
    assert phases == ["prefill", "decode"]
    assert told.count("Pick (modelled): ") == 2
    assert "the time to solve it, assumed" in told
    assert "requests that decode route as their prompts did" in told
    assert all((out / phase / "advise.yaml").is_file() for phase in phases)
