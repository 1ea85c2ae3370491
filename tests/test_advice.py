"""Advice in words: what to use, how sure, at what price, and when to keep native."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from results_builder import FakeCase, FakeComparison, write_run

from moe_ep_bench.analysis.advice import Bounds, advice, answer
from moe_ep_bench.analysis.load import load_run
from moe_ep_bench.analysis.speedups import analyse
from moe_ep_bench.cli import main
from moe_ep_bench.runtime.exit_codes import OK, USER_ERROR

BOUNDS = Bounds(max_dropped=0.10, min_retained=0.95)
PEAK = "workload.peak_load"
LINKS_WORDS, DEVICE_WORDS = "modelled by links/h100-nvlink4: 10.6 us", "modelled by devices/h100-sxm: a roofline"


def drop(gamma: float, speedup: float, dropped: float, mass: float, **changes) -> FakeCase:
    params = {"capacity_factor": gamma}
    return FakeCase("token_drop", params=params, speedup=speedup, dropped=dropped, mass=mass, **changes)


def eplb(speedup: float) -> FakeCase:
    return FakeCase("eplb", role="replication", label="EPLB, 1 spare per rank", speedup=speedup)


def references() -> list[FakeCase]:
    return [
        FakeCase("native", role="baseline"),
        FakeCase("native", role="noise", label="native again"),
        FakeCase("topk", speedup=1.3),
        FakeCase("native_balanced", role="ceiling", label="native, balanced scores", speedup=1.6),
    ]


USUAL = (drop(1.0, 1.5, 0.25, 0.80), drop(1.5, 1.3, 0.08, 0.96), drop(2.0, 1.2, 0.04, 0.98))


def comparison_of(*cases: FakeCase, **changes) -> FakeComparison:
    return FakeComparison(**{"cases": [*references(), *cases], "num_iterations": 1, "noise": 0.0, **changes})


def advice_of(root: Path, *cases: FakeCase, mode: str = "run", bounds: Bounds = BOUNDS, **changes) -> str:
    """The advice on one comparison, each of its lines as one."""
    return flat(advice(load_run(write_run(root, [comparison_of(*cases, **changes)], mode)), bounds))


def flat(text: str) -> str:
    """The text with wrapped lines joined."""
    return text.replace("\n    ", " ").replace("\n  ", "\n")


def lines_of(text: str, begin: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith(begin)]


# ---- one comparison ------------------------------------------------------------------------------------------------


def test_the_fastest_within_the_bounds_is_advised_with_its_price_and_what_else_there_is(tmp_path: Path) -> None:
    text = advice_of(tmp_path, *USUAL)
    assert text.startswith("Asked: the most speed with at most 10 % of top-k pairs dropped and at least 95 %")
    assert "Score mass is no accuracy" in text
    assert "How: measured, NVIDIA Fake 80GB x 2 ranks, nccl, true sizes, bfloat16." in text.replace("\n", " ")
    assert text.splitlines()[-6:] == [
        "Tiny-MoE, EP 2, 4,096 tokens",
        "Use token_drop gamma 1.5: speedup 1.300 [1.300, 1.300], faster for sure.",
        "Costs: drops 8.0 % of top-k pairs, keeps 96.0 % of the top-k's score mass; output error 0.04 (random "
        "weights).",
        "Perfect balance, the ceiling of balancing (dropping also saves work): 1.600 [1.600, 1.600].",
        "Runner-up: token_drop gamma 2, speedup 1.200 [1.200, 1.200], faster for sure; drops 4.0 % of top-k pairs, "
        "keeps 98.0 % of the top-k's score mass; output error 0.02 (random weights).",
        "What would change this: looser bounds: token_drop gamma 1 gives 1.500 [1.500, 1.500], drops 25.0 % and keeps "
        "80.0 %.",
    ]


def best_of(root: Path, bounds: Bounds, *cases: FakeCase) -> str:
    (comparison,) = analyse(load_run(write_run(root, [comparison_of(*cases)])))
    return answer(comparison, bounds).words


def test_each_bound_decides_alone(tmp_path: Path) -> None:
    cases = drop(1.0, 1.5, 0.05, 0.90), drop(1.5, 1.4, 0.20, 0.99), drop(2.0, 1.2, 0.04, 0.98)
    assert best_of(tmp_path / "a", BOUNDS, *cases) == "token_drop gamma 2"
    assert best_of(tmp_path / "b", Bounds(0.10, 0.85), *cases) == "token_drop gamma 1"
    assert best_of(tmp_path / "c", Bounds(0.25, 0.95), *cases) == "token_drop gamma 1.5"
    assert best_of(tmp_path / "d", Bounds(0.0, 0.95), *cases) == "keep native"


def test_a_case_at_the_bound_is_within_it(tmp_path: Path) -> None:
    # 409.6 of 4096 tokens x 2: shares are of whole pairs.
    case = drop(1.0, 1.5, 0.125, 0.75)
    assert best_of(tmp_path / "at", Bounds(0.125, 0.75), case) == "token_drop gamma 1"
    assert best_of(tmp_path / "below", Bounds(0.1249, 0.75), case) == "keep native"


def test_topk_is_the_models_own_routing_and_never_advised(tmp_path: Path) -> None:
    text = advice_of(tmp_path)
    assert lines_of(text, "Keep native") == ["Keep native: no policy was measured."]
    assert "topk" not in text


def test_native_is_kept_where_nothing_is_within_the_bounds(tmp_path: Path) -> None:
    text = advice_of(tmp_path, drop(1.0, 1.5, 0.25, 0.80), drop(1.5, 1.3, 0.12, 0.94))
    (line,) = lines_of(text, "Keep native")
    assert line.startswith(
        "Keep native: nothing stays within the bounds; the nearest is token_drop gamma 1.5, speedup "
    )
    assert "drops 12.0 % of top-k pairs, keeps 94.0 %" in line
    assert "looser bounds: token_drop gamma 1 gives 1.500" in text
    assert not lines_of(text, "Use")


@pytest.mark.parametrize(
    ("speedup", "noise", "batches", "words"),
    [
        (0.8, 0.0, 10, "slower for sure"),
        (1.0, 0.0, 10, "inside the noise floor (1.000 to 1.000)"),
        (1.5, 0.0, 9, "cannot say: fewer than 10 batches give no interval"),
        (1.06, 0.1, 10, "cannot say: its interval reaches into the noise floor ("),
    ],
)
def test_native_is_kept_where_nothing_is_faster_for_sure(
    tmp_path: Path, speedup: float, noise: float, batches: int, words: str
) -> None:
    text = advice_of(tmp_path, drop(1.5, speedup, 0.05, 0.97), noise=noise, num_batches=batches, num_iterations=2)
    (line,) = lines_of(text, "Keep native")
    assert "nothing within the bounds is faster for sure; the fastest is token_drop gamma 1.5, speedup" in line
    assert words in line
    assert not lines_of(text, "Use")
    assert not lines_of(text, "Runner-up")


def test_without_a_noise_floor_nothing_is_sure(tmp_path: Path) -> None:
    cases = [case for case in references() if case.role != "noise"]
    directory = write_run(tmp_path, [FakeComparison(cases=[*cases, *USUAL], num_iterations=1, noise=0.0)])
    text = flat(advice(load_run(directory), BOUNDS))
    assert "Keep native: nothing within the bounds is faster for sure" in text
    assert "cannot say: native was not run twice, so there is no noise floor" in text


def test_a_surer_case_is_preferred_to_a_faster_one(tmp_path: Path) -> None:
    """Of two policies the one whose interval reaches into the floor is not advised, though its median is higher."""
    cases = [*references(), drop(1.5, 1.2, 0.05, 0.97), drop(2.0, 1.1, 0.05, 0.97)]
    directory = write_run(tmp_path, [FakeComparison(cases=cases, num_iterations=2, noise=0.0)])
    (comparison,) = analyse(load_run(directory))
    first = next(r for r in comparison.results if r.case.label == "token_drop gamma 1.5")
    object.__setattr__(first, "verdict", "cannot say")
    found = answer(comparison, BOUNDS)
    assert found.words == "token_drop gamma 2"
    assert [result.case.label for result in found.others] == ["token_drop gamma 1.5"]


def test_without_a_baseline_or_with_shared_cores_nothing_can_be_said(tmp_path: Path) -> None:
    cases = references()
    cases[0].status, cases[0].reason = "oom", "too big"
    directory = write_run(tmp_path / "none", [FakeComparison(cases=[*cases, *USUAL], num_iterations=1)])
    text = advice(load_run(directory), BOUNDS)
    assert "Cannot say: the baseline was not measured, so there are no speedups." in text
    assert text.splitlines()[-1] == "7 cases: 6 measured, 1 not (1 oom)"
    text = advice_of(tmp_path / "shared", *USUAL, facts={"oversubscribed": True})
    assert "Cannot say: more ranks than cores" in text
    assert not lines_of(text, "Use")


# ---- replication ---------------------------------------------------------------------------------------------------


def with_memory(directory: Path, extra: float) -> Path:
    content = json.loads((directory / "run.json").read_text())
    for case in content["cases"].values():
        case["extra_bytes_per_rank"] = extra if case["role"] == "replication" else None
    (directory / "run.json").write_text(json.dumps(content))
    return directory


def test_replication_competes_and_costs_memory(tmp_path: Path) -> None:
    directory = with_memory(write_run(tmp_path, [comparison_of(*USUAL, eplb(1.4))]), 1.5 * 2**30)
    text = flat(advice(load_run(directory), BOUNDS))
    assert lines_of(text, "Use") == ["Use EPLB, 1 spare per rank: speedup 1.400 [1.400, 1.400], faster for sure."]
    assert lines_of(text, "Costs") == ["Costs: 1.5 GiB more memory per rank, in all layers together; drops nothing."]
    assert lines_of(text, "Runner-up")[0].startswith("Runner-up: token_drop gamma 1.5")
    assert not lines_of(text, "Without dropping")


def test_replication_is_named_even_where_it_comes_last(tmp_path: Path) -> None:
    text = advice_of(tmp_path, *USUAL, eplb(1.1))
    assert lines_of(text, "Use")[0].startswith("Use token_drop gamma 1.5")
    (line,) = lines_of(text, "Without dropping")
    assert line.startswith("Without dropping: EPLB, 1 spare per rank, speedup 1.100 [1.100, 1.100], faster for sure; ")


# ---- what is modelled ----------------------------------------------------------------------------------------------


def test_nothing_emulated_or_modelled_is_advised_without_saying_so(tmp_path: Path) -> None:
    emulated = advice_of(tmp_path / "emulated", *USUAL, mode="emulated", facts={"links": LINKS_WORDS})
    assert lines_of(emulated, "Use token_drop gamma 1.5 (emulated): speedup")
    assert "NVIDIA Fake 80GB in place of 2 ranks, modelled by links/h100-nvlink4" in emulated.replace("\n", " ")
    facts = {"links": LINKS_WORDS, "device": DEVICE_WORDS}
    modelled = advice_of(tmp_path / "modelled", *USUAL, mode="emulated", facts=facts)
    (line,) = lines_of(modelled, "Use token_drop gamma 1.5 (modelled): speedup")
    assert line.endswith("faster for sure, as far as the model goes.")
    words = modelled.replace("\n", " ")
    assert "How: modelled (nothing was run), 2 ranks modelled by devices/h100-sxm: a roofline" in words
    assert "Intervals are over batches only" in words
    assert "NVIDIA Fake" not in words
    slow = advice_of(tmp_path / "slow", drop(1.5, 0.9, 0.05, 0.97), mode="emulated", facts=facts)
    assert lines_of(slow, "Keep native (modelled): ")


def test_small_sizes_and_modelled_tails_are_said(tmp_path: Path) -> None:
    tail = {"kind": "recorded", "description": "ShareGPT", "tail_model": "popularity"}
    case = drop(1.5, 1.3, 0.08, 0.96, looks_past_top_k=True)
    text = advice_of(tmp_path, case, facts={"workload": tail, "scale": 0.125})
    assert "sizes x 0.125 of the true ones" in text
    assert "token_drop gamma 1.5 looks at scores past the recorded top-k, which are modelled (popularity tail)." in text


# ---- sweeps --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def peaks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Gamma 1.5 pays from a peak load of 2 on; gamma 1 always, and drops too much."""
    comparisons = [
        comparison_of(
            drop(1.0, 1.2, 0.3, 0.7),
            drop(1.5, speedup, 0.05, 0.97),
            comparison_id=f"c{number}",
            facts={"point": {PEAK: peak}, "title": f"Tiny, peak load {peak}"},
        )
        for number, (peak, speedup) in enumerate(((4.0, 1.5), (1.0, 0.8), (3.0, 1.25)))
    ]
    return write_run(tmp_path_factory.mktemp("peaks"), comparisons)


def test_a_sweep_is_answered_point_by_point_and_as_a_whole(peaks: Path) -> None:
    text = flat(advice(load_run(peaks), BOUNDS))
    titles = lines_of(text, "Tiny, peak load")
    assert titles == ["Tiny, peak load 1.0", "Tiny, peak load 3.0", "Tiny, peak load 4.0"]
    assert text.splitlines()[-3:] == [
        "Along peak load of the busiest expert:",
        "1       keep native",
        "3 to 4  token_drop gamma 1.5 (1.25 to 1.50)",
    ]


def test_the_break_even_of_the_swept_key_is_said(peaks: Path) -> None:
    text = flat(advice(load_run(peaks), BOUNDS))
    changes = lines_of(text, "What would change this")
    assert len(changes) == 3
    # ln 0.8 = -ln 1.25: half-way between 1 and 3.
    words = "peak load of the busiest expert: token_drop gamma 1.5 breaks even at about 2 (between 1 and 3)"
    assert all(words in line for line in changes)
    loose = flat(advice(load_run(peaks), Bounds(0.5, 0.5)))
    stays = "no peak load of the busiest expert from 1 to 4: token_drop gamma 1 stays faster than native"
    assert stays in lines_of(loose, "What would change this")[0]


def test_equal_results_give_equal_words(peaks: Path, tmp_path: Path) -> None:
    cases = [*USUAL, eplb(1.1)]
    texts = {advice_of(tmp_path / name, *cases, noise=0.02) for name in ("one", "two")}
    assert len(texts) == 1
    assert advice(load_run(peaks), BOUNDS) == advice(load_run(peaks), BOUNDS)
    assert all(len(line) <= 110 for line in advice(load_run(peaks), BOUNDS).splitlines())


# ---- command -------------------------------------------------------------------------------------------------------


def test_a_directory_is_only_read(peaks: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = sorted(path.relative_to(peaks) for path in peaks.rglob("*"))
    assert main(["advise", str(peaks)]) == OK
    assert capsys.readouterr().out == advice(load_run(peaks), BOUNDS) + "\n"
    assert main(["advise", str(peaks), "--max-dropped", "0.5", "--min-retained", "0.5"]) == OK
    assert "at most 50 % of top-k pairs dropped and at least 50 % of" in capsys.readouterr().out
    assert sorted(path.relative_to(peaks) for path in peaks.rglob("*")) == before


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--max-dropped", "10"], "--max-dropped: expected a share from 0 to 1, got 10"),
        (["--max-dropped", "nan"], "--max-dropped: expected a share from 0 to 1, got nan"),
        (["--min-retained", "-0.1"], "--min-retained: expected a share from 0 to 1, got -0.1"),
        (["--force"], "a directory is only read; --out, --set and --force go with a config"),
        (["--set", "layer.ep_size=2"], "a directory is only read"),
        (["--out", "elsewhere"], "a directory is only read"),
    ],
)
def test_bad_options_are_one_line(
    peaks: Path, options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["advise", str(peaks), *options]) == USER_ERROR
    printed = capsys.readouterr()
    assert message in printed.err
    assert printed.err.count("\n") == 1
    assert printed.out == ""


def test_what_holds_no_times_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for folder, content, message in (
        ("route", {"mode": "route", "schema_version": 3}, "holds routing without times"),
        ("empty", None, "run.json: missing"),
    ):
        (tmp_path / folder).mkdir()
        if content is not None:
            (tmp_path / folder / "run.json").write_text(json.dumps(content))
        assert main(["advise", str(tmp_path / folder)]) == USER_ERROR
        assert message in capsys.readouterr().err
    assert main(["advise", str(tmp_path / "no.yaml"), "--out", str(tmp_path / "out")]) == USER_ERROR
    assert "no.yaml: cannot read the config" in capsys.readouterr().err


def test_a_config_is_emulated_once_and_answered(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = {
        "name": "tiny",
        "model": {"preset": "olmoe-1b-7b", "scale": 0.03125},
        "workload": {"kind": "synthetic", "num_tokens": 512, "num_batches": 10, "peak_load": 4.0},
        "layer": {"ep_size": 4},
        "policies": [{"name": "token_drop", "capacity_factor": [1.0, 4.0]}],
        "emulate": {"links": "h100-nvlink4", "device": "h100-sxm"},
    }
    path = tmp_path / "tiny.yaml"
    path.write_text(yaml.safe_dump(config))
    out = tmp_path / "out"
    assert main(["advise", str(path), "--out", str(out)]) == OK
    first = capsys.readouterr().out
    assert "modelled (nothing was run)" in first
    assert "(modelled): " in first
    written = {part: part.stat().st_mtime_ns for part in (out / "cases").iterdir()}
    assert len(written) == 5
    assert main(["advise", str(path), "--out", str(out)]) == OK
    assert capsys.readouterr().out == first
    assert {part: part.stat().st_mtime_ns for part in (out / "cases").iterdir()} == written
