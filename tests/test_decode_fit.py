"""From a measured decode run to a device's file: what `calibrate --from` prints, marks as no figure, and refuses."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import yaml
from results_builder import FFN_SIZE, HIDDEN_SIZE, FakeCase, FakeComparison, standard_cases, write_run
from test_activated import EXPERT_US, FIXED_US, NATIVE_US, decode
from test_devices import FIGURES, NO_MEMORY

from moe_ep_bench.analysis.activated import fit_text
from moe_ep_bench.analysis.load import load_run
from moe_ep_bench.cli import main
from moe_ep_bench.cost_model.devices import Device
from moe_ep_bench.runtime.exit_codes import OK, USER_ERROR

REFERENCE = Path(__file__).parents[1] / "results" / "reference"
PAIR_US = 2.0


def text_of(root: Path, *comparisons: FakeComparison, preset: str | None = None) -> str:
    return fit_text(load_run(write_run(root, comparisons)), preset)


def steps(tokens: int, time_us: Callable[[int], float], identity: str = "c0", **changes: object) -> FakeComparison:
    """Steps that activate 4, 1 and 2 of the 4 experts of either of two ranks, which always have ``tokens`` pairs."""
    cases = []
    for activated in (4, 1, 2):
        load_L = [4 / activated] * activated + [0] * (4 - activated)
        cases.append(
            FakeCase(
                "native" if activated == 4 else "lynx",
                role="baseline" if activated == 4 else "policy",
                label=str(activated),
                speedup=0.44 * NATIVE_US / time_us(activated),
                expert_load=np.array(2 * load_L),
            )
        )
    return decode(identity, cases=cases, tokens=tokens, **{"num_batches": 4, **changes})


def straight(activated: int) -> float:
    return FIXED_US + EXPERT_US * activated


def test_what_is_printed_goes_into_a_devices_file_as_it_stands(tmp_path: Path) -> None:
    text = text_of(tmp_path, steps(64, straight))
    path = tmp_path / "device.yaml"
    figures = {**FIGURES, **NO_MEMORY, "memory_tbps": 2.0}
    path.write_text(f"{yaml.safe_dump(figures)}{text}\n")
    (fit,) = Device.load(str(path)).decode
    assert (fit.base_us, fit.per_expert_us, fit.per_pair_us, fit.r2) == (FIXED_US, EXPERT_US, None, 1.0)
    assert (fit.experts, fit.model, fit.dtype, fit.tokens) == ("te", "Tiny-MoE", "bfloat16", (64,))
    assert (fit.hidden_size, fit.ffn_hidden_size, fit.basis) == (HIDDEN_SIZE, FFN_SIZE, "measured")
    assert fit.source == "NVIDIA Fake 80GB, torch 2.13, run r0"
    assert text.startswith("# NVIDIA Fake 80GB, by `moe-ep-bench calibrate --from`\ndecode:\n")
    assert "12 points; [95 % intervals] over batches" in text
    assert "per_expert_us: 200  # [200, 200]" in text
    assert "per_pair_us: null  # not fitted: pairs do not vary on their own" in text


def test_pairs_get_a_term_where_it_is_told_from_none(tmp_path: Path) -> None:
    runs = [steps(n, lambda activated, n=n: straight(activated) + PAIR_US * n, str(n)) for n in (64, 256)]
    (fit,) = yaml.safe_load(text_of(tmp_path, *runs))["decode"]
    assert (fit["base_us"], fit["per_expert_us"], fit["per_pair_us"]) == pytest.approx((FIXED_US, EXPERT_US, PAIR_US))
    assert fit["tokens"] == [64, 256]


def test_a_term_for_pairs_that_may_be_none_is_none(tmp_path: Path) -> None:
    noisy = [steps(tokens, straight, str(tokens), noise=0.05, num_batches=10) for tokens in (64, 256)]
    text = text_of(tmp_path, *noisy)
    (fit,) = yaml.safe_load(text)["decode"]
    assert fit["per_pair_us"] is None
    assert fit["per_expert_us"] == pytest.approx(EXPERT_US, rel=0.1)
    assert "us: not above 0" in text


def test_what_was_not_measured_or_is_no_decode_run_is_refused_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    modelled = write_run(tmp_path / "modelled", [decode(facts={"device": "H100 (modelled)"})])
    prefill = write_run(tmp_path / "prefill", [FakeComparison(cases=standard_cases(), num_batches=1)])
    for directory, words in ((modelled, "its times are modelled"), (prefill, "expected a decode run")):
        assert main(["calibrate", "--from", str(directory)]) == USER_ERROR
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith(f"moe-ep-bench: {directory}: ")
        assert words in line
    assert main(["calibrate", "--from", str(tmp_path / "nothing")]) == USER_ERROR


def test_times_of_more_ranks_than_cores_are_no_devices_figure(tmp_path: Path) -> None:
    text = text_of(tmp_path, decode(facts={"oversubscribed": True}))
    assert "not a device's figure: more ranks than cores" in text
    assert yaml.safe_load(text) is None


def test_the_reference_run_on_two_cores_is_fitted_and_is_no_devices_figure(capsys: pytest.CaptureFixture) -> None:
    assert main(["calibrate", "--from", str(REFERENCE / "decode-2cpu"), "--preset", "qwen3-30b-a3b"]) == OK
    text = capsys.readouterr().out
    assert "not a device's figure: sizes x 0.25 of the true ones, which no model has" in text
    assert yaml.safe_load(text) is None
    values = yaml.safe_load("\n".join(line.removeprefix("  # ") for line in text.splitlines()[4:]))[0]
    assert values["r2"] > 0.99
    assert values["per_expert_us"] > 0
    assert Device.model_validate({**FIGURES, **NO_MEMORY, "memory_tbps": 1, "decode": [values]}).decode[0].tokens
