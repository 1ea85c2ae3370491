"""Emulated ranks held against real ones: the rule, the tables on built results, and both runs at a small size."""

from __future__ import annotations

import dataclasses
import math
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from results_builder import FakeCase, FakeComparison, modelled_facts, standard_cases, write_run, write_whole
from test_run import environment, routing_of, write_config

from moe_ep_bench.analysis.compare import Change, change_text, compare_ranks, write_validation
from moe_ep_bench.analysis.store import ResultsError
from moe_ep_bench.bench import paired_run as validate_module
from moe_ep_bench.cli import main
from moe_ep_bench.config import EmulateConfig
from moe_ep_bench.config.files import load_experiments
from moe_ep_bench.errors import CASES_FAILED, LOST, OK
from moe_ep_bench.results import ValidationDirectory
from moe_ep_bench.runtime.torchrun import Ended
from moe_ep_bench.timing.statistics import Estimate, equivalence

DROP = "token_drop capacity_factor=1.0"


# The rule.


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0.975, 1.025, "equivalent"),
        (1 / 1.03, 1.03, "equivalent"),
        (0.96, 1.02, "inconclusive"),  # perhaps 4 % too slow
        (1.01, 1.06, "inconclusive"),
        (0.8, 1.2, "inconclusive"),  # a wide interval holds no difference and much else: it confirms nothing
        (1.031, 1.1, "different"),
        (0.9, 0.97, "different"),
    ],
)
def test_speedups_are_equivalent_where_the_whole_interval_of_their_ratio_lies_within_the_margin(
    low: float, high: float, expected: str
) -> None:
    ratio = Estimate(math.sqrt(low * high), low, high, True, 10, 1)
    assert equivalence(ratio, 0.03) == expected
    assert equivalence(Estimate(1 / ratio.median, 1 / high, 1 / low, True, 10, 1), 0.03) == expected
    assert equivalence(dataclasses.replace(ratio, is_interval=False), 0.03) == "inconclusive"
    assert equivalence(None, 0.03) == "inconclusive"


# Built results.


def cases(drop: float = 1.5, balance: float = 1.6, **of_drop: object) -> list[FakeCase]:
    params = {"capacity_factor": 1.0}
    return [
        FakeCase("native", role="baseline"),
        FakeCase("native", role="noise"),
        FakeCase("token_drop", params=params, **{"speedup": drop, "dropped": 0.25, "mass": 0.8, **of_drop}),
        FakeCase("native_balanced", role="balanced", speedup=balance),
    ]


def built(
    root: Path, real: dict | None = None, emulated: dict | None = None, threads: tuple[int, int] = (1, 1)
) -> Path:
    """A directory of ``validate``; keyword arguments of ``FakeComparison`` for its two runs."""
    runs = ("real", real, "run"), ("emulated", emulated, "emulated")
    for (what, changes, mode), count in zip(runs, threads, strict=True):
        fields = {"cases": cases(), "noise": 0.001, "num_iterations": 2, "comparison_id": what[0], **(changes or {})}
        environment = {"threads_per_rank": count}
        write_run(root / what, [FakeComparison(**fields)], mode, seed=len(what), environment=environment)
    ValidationDirectory(root).write_pairs([("r", "e")], {"links": modelled_facts()["links"]})
    return root


def built_models(root: Path, **of_drop: Any) -> Path:
    """The same of whole models; fields of the emulated run's token_drop."""
    for seed, (what, mode) in enumerate((("real", "run"), ("emulated", "emulated"))):
        first, *others = standard_cases()
        own = [dataclasses.replace(first, **(of_drop if what == "emulated" else {})), *others]
        write_whole(root / what, own, mode=mode, seed=seed, comparison_id=what[0], num_iterations=3)
    ValidationDirectory(root).write_pairs([("r", "e")], {"links": modelled_facts()["links"]})
    return root


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """A directory of ``validate`` whose runs are alike."""
    return built(tmp_path / "own", {"num_iterations": 6}, {"num_iterations": 6})


def verdicts(validation: Change) -> list[str | None]:
    return [None if pd.isna(verdict) else verdict for verdict in validation.cases["verdict"]]


OTHERWISE, UNTOLD = "warning: not comparable: ", ("inconclusive", "inconclusive")
# What differs between the runs, the verdicts on token_drop and the balanced case, and what the text says.
DIFFERENCES: dict[str, tuple[dict[str, Any], tuple[str, str], str]] = {
    "an error that all cases share": ({"emulated": {"native_us": 1600.0}}, ("equivalent", "equivalent"), "1.600"),
    "another speedup": (
        {"emulated": {"cases": cases(drop=1.5 * 0.9)}},
        ("different", "equivalent"),
        "1 of 2 speedups are equivalent within 3 % (1 different), largest difference ",
    ),
    "shared cores": ({"real": {"facts": {"oversubscribed": True}}}, UNTOLD, f"{OTHERWISE}more ranks"),
    "threads": ({"threads": (1, 2)}, UNTOLD, f"{OTHERWISE}each real rank computed with 1 thread(s), the emulated one"),
    "routing": (
        {"emulated": {"cases": cases(expert_load=np.ones(8))}},
        UNTOLD,
        f"{OTHERWISE}routing is not the same in both runs: {DROP}",
    ),
    "a case that failed": (
        {"real": {"cases": cases(status="oom", reason="too large")}},
        ("inconclusive", "equivalent"),
        f"{DROP}: oom in the real run: too large",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", DIFFERENCES)
def test_speedups_are_judged_where_the_runs_are_comparable(name: str, tmp_path: Path) -> None:
    changes, expected, words = DIFFERENCES[name]
    validation = compare_ranks(built(tmp_path, **changes))
    assert verdicts(validation) == [None, None, *expected]
    text = change_text(validation)
    assert words in text
    assert (OTHERWISE in text) == OTHERWISE.startswith(words[:10])


@pytest.mark.slow
def test_the_margin_decides_and_the_table_has_both_runs(tmp_path: Path) -> None:
    root = built(tmp_path, emulated={"cases": cases(drop=1.5 * 0.9)})
    text = change_text(compare_ranks(root))
    assert re.search(r"largest difference (9\.9|10\.\d) %$", text)
    row = next(line for line in text.splitlines() if line.startswith(DROP))
    assert re.search(r"1\.50\d +1\.3[45]\d +0\.(89|90)\d \[0\.\d+, 0\.9\d+\]  different", row)
    assert row.rstrip().endswith("25.0         80.0"), "no speed without its fidelity"
    assert "comparison" not in text.splitlines()[2], "there is one"
    ValidationDirectory(root).write_pairs([("r", "e")], {"links": modelled_facts()["links"]}, 0.15)
    assert verdicts(compare_ranks(root)) == [None, None, "equivalent", "equivalent"]
    assert compare_ranks(root).answer[0].text.startswith("2 of 2 speedups are equivalent within 15 %")


@pytest.mark.slow
def test_what_is_written_is_what_show_prints(own: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files, shown = ValidationDirectory(own), write_validation(own)
    assert main(["show", str(own)]) == OK
    assert capsys.readouterr().out == files.text.read_text() == f"{shown}\n"
    drop = pd.read_csv(files.table).set_index("label").loc[DROP]
    assert 0.97 < drop["ratio_low"] < drop["ratio_median"] < drop["ratio_high"] < 1.03


def test_a_directory_that_lacks_something_is_one_line(own: Path) -> None:
    ValidationDirectory(own).pairs.write_text("[]")
    with pytest.raises(ResultsError, match=r"\A[^\n]*validation.json: damaged: [^\n]*\Z"):
        compare_ranks(own)


@pytest.mark.slow
def test_passes_are_judged_and_their_moe_layers_by_themselves_whose_error_a_pass_dilutes(tmp_path: Path) -> None:
    line = compare_ranks(built_models(tmp_path / "alike")).answer[0].text
    assert line.startswith("3 of 3 speedups are equivalent within 3 %")
    assert "; 3 of 3 speedups of MoE layers alone are equivalent within 3 %" in line
    cases = compare_ranks(built_models(tmp_path / "slow", phase_factors={"experts": 1.5})).cases
    cases = cases.set_index(["label", "quantity"])
    whole, layers = (cases.loc[(DROP, of)] for of in ("all", "MoE layers"))
    assert 0 < 1 - whole["ratio_median"] < 1 - layers["ratio_median"] < 0.5
    assert (layers["verdict"], cases.loc[("topk", "MoE layers"), "verdict"]) == ("different", "equivalent")


# The command.

LINKS = {"emulate": {"links": "h100-nvlink4"}}


def test_a_step_that_fails_is_named_and_nothing_is_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(validate_module, "launch", lambda *_, **__: Ended(LOST))
    monkeypatch.setattr(validate_module, "_emulate", lambda *_, **__: pytest.fail("went on"))
    config, out = write_config(tmp_path, **LINKS), tmp_path / "out"
    assert main(["validate", str(config), "--nproc", "2", "--out", str(out)]) == LOST
    said = capsys.readouterr().err
    assert re.search(f"the real run on 2 ranks.* failed with exit status {LOST}; nothing was compared", said, re.DOTALL)
    assert list(out.iterdir()) == []


def test_a_case_that_fails_in_either_run_is_in_the_status(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = write_config(tmp_path, **LINKS)
    for statuses in ((CASES_FAILED, OK), (OK, CASES_FAILED)):
        for name, status in zip(("_run", "_emulate"), statuses, strict=True):
            monkeypatch.setattr(validate_module, name, lambda *_, status=status, **__: status)
        assert validate_module.validate(config, tmp_path / "out", [], 2, margin=0.03) == CASES_FAILED


def test_ranks_are_emulated_as_real_ones_run_whatever_the_config_says(tmp_path: Path, monkeypatch) -> None:
    wanted = {"bandwidth_scale": 2.0, "device": "h100-sxm", "replication": [{"spare_per_rank": 1}]}
    config, given = write_config(tmp_path, emulate={**LINKS["emulate"], **wanted}), list[list[str]]()
    monkeypatch.setattr(validate_module, "_run", lambda *_, **__: OK)
    monkeypatch.setattr(validate_module, "_emulate", lambda config, out, overrides, *_: given.append(overrides) or OK)
    assert validate_module.validate(config, tmp_path / "out", [], 2, margin=0.03) == OK
    (experiment, *_) = load_experiments(config, given[0], on_cpu=True)
    assert experiment.emulate == EmulateConfig(links="h100-nvlink4")


def command(*arguments: object) -> subprocess.CompletedProcess:
    line = [sys.executable, "-m", "moe_ep_bench", "validate", *map(str, arguments)]
    return subprocess.run(line, capture_output=True, text=True, timeout=500, env=environment(), check=False)


@pytest.mark.slow
def test_real_and_emulated_ranks_route_alike_and_are_measured_and_compared(tmp_path: Path) -> None:
    few = {"workload__num_tokens": 96, "workload__num_batches": 2, "measure__iterations": 1, "measure__warmup": 1}
    policies = [{"name": "topk"}, {"name": "expanded_drop", "capacity_factor": 1.0, "metric": "random"}]
    config, out = write_config(tmp_path, policies=policies, **few, **LINKS), tmp_path / "out"
    done = command(config, "--nproc", 2, "--out", out)
    assert done.returncode == OK, done.stderr
    files = ValidationDirectory(out)
    # Two batches make no interval, whatever they were.
    last = done.stdout.splitlines()[-1]
    assert last.startswith("0 of 3 speedups are equivalent within 3 % (3 inconclusive), largest difference")
    assert done.stdout.endswith(files.text.read_text())
    assert "not comparable" not in done.stdout, "the same routing and as many threads, whatever the machine"
    assert "links: modelled by links/h100-nvlink4" in done.stdout
    pd.testing.assert_frame_equal(routing_of(files.emulated), routing_of(files.real))
