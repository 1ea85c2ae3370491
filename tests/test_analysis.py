"""From files to speedups, table and figures: a run is written whose every number is known."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from results_builder import (
    CEILINGS,
    FAST_RANK,
    FFN_SIZE,
    HIDDEN_SIZE,
    QUIET_MACHINE,
    FakeCase,
    FakeComparison,
    native_load,
    standard_cases,
    write_run,
)

import plot_results
from moe_ep_bench.analysis.fidelity import fidelity
from moe_ep_bench.analysis.load import ResultsError, load_run
from moe_ep_bench.analysis.speedups import analyse, family_labels
from moe_ep_bench.analysis.tables import run_text
from moe_ep_bench.schema import SAMPLES_SCHEMA

ROOT = Path(plot_results.__file__).parent


def run_of(root: Path, mode: str = "run", **changes) -> Path:
    return write_run(root, [FakeComparison(**{"cases": standard_cases(), "num_iterations": 3, **changes})], mode)


# Where no interval is looked at.
FEW = {"noise": 0.0, "num_batches": 2, "num_iterations": 1}


def results_of(directory: Path) -> dict[str, object]:
    (comparison,) = analyse(load_run(directory))
    return {result.case.label: result for result in comparison.results}


def edit_json(directory: Path, change) -> None:
    path = directory / "run.json"
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def edit_part(path: Path, **columns) -> None:
    """Overwrite columns of a part, first row by first row."""
    table = pq.read_table(path)
    rows = table.to_pylist()
    for name, values in columns.items():
        for row, value in zip(rows, values, strict=False):
            row[name] = value
    pq.write_table(type(table).from_pylist(rows, schema=table.schema), path)


# ---- numbers -----------------------------------------------------------------------------------------------------


def test_verdicts_hold_speedups_against_the_noise_floor_and_tails_are_over_iterations(tmp_path):
    cases = [*standard_cases(), FakeCase("oea", speedup=0.7)]
    results = results_of(run_of(tmp_path, noise=0.01, cases=cases))
    native = results["native"]
    rows = native.case.timings.query("kind == 'plain' and phase == 'total' and rank == 0")["time_us"] / 1e3
    layer = native.layer
    assert (layer.median_ms, layer.p90_ms, layer.p99_ms) == pytest.approx(tuple(np.percentile(rows, [50, 90, 99])))
    verdicts = {label: result.verdict for label, result in results.items()}
    assert verdicts["token_drop gamma 1"] == "faster"
    assert verdicts["native, balanced"] == "faster"
    assert verdicts["topk"] == "no difference"
    assert verdicts["oea"] == "slower"


def test_fewer_than_ten_batches_give_a_range_and_no_verdict(tmp_path):
    result = results_of(run_of(tmp_path, num_batches=9, noise=0.02))["token_drop gamma 1"]
    assert not result.speedup.is_interval
    assert result.speedup.low < 1.5 < result.speedup.high
    assert result.verdict == "inconclusive"


def test_phases_show_waiting_and_the_slowest_rank_names_the_phase(sound):
    breakdown = results_of(sound)["native"].breakdown
    layer_ms = 2.0 * 1.005
    assert breakdown.slowest_phase == "experts"
    assert breakdown.layer_ms == pytest.approx(layer_ms)
    # Half the ranks save a fifth of 0.44 of the layer and wait for all of it but a hundredth.
    assert breakdown.group_ms["experts"] == pytest.approx(layer_ms * 0.44 * (1 + FAST_RANK) / 2)
    assert breakdown.group_ms["waiting"] == pytest.approx(layer_ms * 0.44 * (1 - FAST_RANK) * 0.99 / 2)
    assert breakdown.group_ms["gate"] == pytest.approx(layer_ms * 0.10)
    assert breakdown.group_ms["permute"] == pytest.approx(layer_ms * 0.20)
    assert breakdown.group_ms["comm"] == pytest.approx(layer_ms * 0.25)
    assert breakdown.group_ms["shared"] == 0
    assert breakdown.unaccounted_share == pytest.approx(0.01)
    assert breakdown.policy_share == pytest.approx(0.06)


def test_a_wait_is_named_as_waiting(tmp_path):
    directory = run_of(tmp_path, **FEW)
    for path in (directory / "cases").glob("*.parquet"):
        phases = pq.read_table(path).column("phase").to_pylist()
        swapped = {"experts": "wait_dispatch", "wait_dispatch": "experts"}
        edit_part(path, phase=[swapped.get(phase, phase) for phase in phases])
    assert results_of(directory)["native"].breakdown.slowest_phase == "waiting (dispatch)"


def test_fidelity_weighs_ranks_by_their_tokens(sound):
    """Ranks hold 3/4 and 1/4 of the tokens and differ: their plain mean would be 0.02 off."""
    result = results_of(sound)["token_drop gamma 1"]
    assert result.fidelity.dropped_share == pytest.approx(0.25, abs=1e-3)
    assert result.fidelity.retained_mass == pytest.approx(0.80, abs=1e-3)
    assert result.fidelity.output_error == pytest.approx(0.2)


def test_load_is_summed_over_ranks_and_relative_to_the_models_own_mean(tmp_path):
    load = np.full(8, 0.5)
    load[3] = 1.5
    cases = [*standard_cases(), FakeCase("token_drop", params={"capacity_factor": 1.5}, expert_load=load)]
    results = results_of(run_of(tmp_path, cases=cases, **FEW))
    assert results["native"].fidelity.expert_load == pytest.approx(native_load(8), rel=0.01)
    after = results["token_drop gamma 1.5"].fidelity
    assert after.expert_load == pytest.approx(load)
    assert after.fullest_expert == pytest.approx(1.5)
    assert after.rank_load == pytest.approx([0.75, 0.5])
    assert after.fullest_rank == pytest.approx(0.75)


def test_fullest_expert_is_taken_per_batch(tmp_path):
    """Two experts that are hot in turn are hot in every batch, though not on average."""
    directory = run_of(tmp_path, cases=[FakeCase("native", role="baseline")], **FEW)
    path = next((directory / "routing").glob("*.parquet"))
    rows = pq.read_table(path).to_pylist()
    loads = []
    for row in rows:
        load = np.zeros(8, int)
        load[row["batch"] % 2] = row["num_topk_pairs"]
        loads.append(load.tolist())
    edit_part(path, load_E=loads)
    fidelity = results_of(directory)["native"].fidelity
    assert fidelity.fullest_expert == pytest.approx(8)
    assert fidelity.expert_load[:2] == pytest.approx([4, 4])


def test_cases_are_read_in_order_whatever_the_order_of_the_files(tmp_path):
    cases = [*standard_cases(), FakeCase("expanded_drop", params={"capacity_factor": 2.0})]
    cases += [FakeCase("token_drop", params={"capacity_factor": gamma}) for gamma in (10.0, 2.0)]
    cases += [FakeCase("lynx", params={"num_dropped": 1})]
    assert list(results_of(run_of(tmp_path, cases=cases, **FEW))) == [
        "native",
        "native again",
        "topk",
        "token_drop gamma 1",
        "token_drop gamma 2",
        "token_drop gamma 10",
        "expanded_drop gamma 2",
        "lynx",
        "native, balanced",
    ]


def test_variants_of_one_policy_are_told_apart_by_what_differs(tmp_path):
    shared = {"modality": "uniform", "min_capacity": 0}
    cases = [
        *standard_cases()[1:],
        FakeCase("token_drop", params={"capacity_factor": 1.0, "metric": "score", **shared}),
        FakeCase("token_drop", params={"capacity_factor": 2.0, "metric": "score", **shared}),
        FakeCase("token_drop", params={"capacity_factor": 1.0, "metric": "order", **shared}),
        FakeCase("oea", params={"k0": 3, "p": None}),
    ]
    labels = list(family_labels(analyse(load_run(run_of(tmp_path, cases=cases, **FEW)))).values())
    assert labels == ["topk", "token_drop metric=order", "token_drop metric=score", "oea"]


# ---- table -------------------------------------------------------------------------------------------------------


def table_of(directory: Path) -> tuple[str, dict[str, str]]:
    """The table's text, and its rows by label."""
    text = run_text(load_run(directory))
    rows = [line for line in text.splitlines() if line and not line.startswith(" ")]
    found: dict[str, str] = {}
    for line in rows:  # The first table is that of speedups.
        found.setdefault(line.split("  ")[0], line)
    return text, found


def test_layers_of_a_whole_model_have_busy_experts_of_their_own():
    """Summed over two layers these loads would be even."""
    columns = {
        "num_topk_pairs": 8,
        "num_dropped_pairs": 0,
        "num_tokens": 4,
        "retained_mass_topk": 1.0,
        "topk_share": 0.5,
    }
    loads = [[8, 0], [0, 8]]
    rows = pd.DataFrame({"batch": 0, "rank": 0, "layer": [1, 2], "output_error": [np.nan, 0.1], **columns})
    found = fidelity(SimpleNamespace(routing=rows.assign(load_E=loads, load_R=loads), frontier=None))
    assert (found.fullest_expert, found.fullest_rank) == (2, 2)
    assert found.output_error == 0.1
    assert found.retained_mass == 1


def test_each_layer_is_held_against_its_own_frontier():
    columns = {"num_tokens": [4, 2], "num_topk_pairs": 8, "num_dropped_pairs": 0}
    shares = {"retained_mass_topk": [0.75, 0.5], "topk_share": [0.8, 0.4], "output_error": np.nan}
    rows = pd.DataFrame({"batch": 0, "rank": 0, "layer": [1, 2], **columns, **shares})
    rows = rows.assign(load_E=[[4, 4]] * 2, load_R=[[4, 4]] * 2)
    # The rows of the frontier need not be in order. Kept are 3/4 and 1/2 of the layers' mass.
    frontier = pd.DataFrame({"batch": 0, "layer": [2, 1], "kept_by_load": [0.6, 0.95], "kept_by_experts": [0.5, 0.75]})
    found = fidelity(SimpleNamespace(routing=rows, frontier=frontier))
    assert found.below_frontier == pytest.approx((0.2 + 0.1) / 2)
    assert found.below_frontier_experts == pytest.approx(0)


def test_table_shows_speedups_on_the_slowest_rank_beside_their_fidelity(tmp_path):
    """Without noise every ratio is exact, so a mean over ranks or an inverted ratio would show."""
    text, rows = table_of(run_of(tmp_path, noise=0.0))
    title = text.splitlines()[0]
    for part in ("measured", "NVIDIA Fake 80GB x 2 ranks", "nccl", "EP 2", "bfloat16", "true sizes"):
        assert part in title
    row = rows["token_drop gamma 1"].split()
    assert row[3:6] == ["1.333", "1.333", "1.333"]
    assert " ".join(row[6:]) == "1.500 [1.500, 1.500] 1.500 [1.500, 1.500] faster 25.0 80.0 0.2 experts"
    native = [*["2.000"] * 3, "1", "1.000", "[1.000,", "1.000]", "baseline", "0.0", "100.0", "0", "experts"]
    assert rows["native"].split()[1:] == native
    assert "noise floor" in rows["native again"]
    assert rows["native, balanced"].split()[-4:] == ["-", "-", "-", "experts"]
    assert list(rows)[3:8] == ["native", "native again", "topk", "token_drop gamma 1", "native, balanced"]
    assert text.splitlines()[-1] == "5 cases: 5 measured, 0 not"
    assert "warning" not in text


def test_failed_cases_are_rows_with_their_reason_and_without_numbers(tmp_path):
    cases = [
        *standard_cases(),
        FakeCase("expanded_drop", status="oom", reason="CUDA out of memory\n" + 60 * "tried "),
        FakeCase("lynx", status="failed", reason="differs from the reference"),
    ]
    text, rows = table_of(run_of(tmp_path, cases=cases, **FEW))
    assert rows["lynx"].split(maxsplit=1)[1] == "failed: differs from the reference"
    assert rows["expanded_drop"].split(maxsplit=1)[1].startswith("oom: CUDA out of memory tried")
    assert len(rows["expanded_drop"]) < 130
    assert text.splitlines()[-1] == "7 cases: 5 measured, 2 not (1 failed, 1 oom)"


def test_without_baseline_or_noise_case_there_are_times_but_no_speedups_or_no_verdict(tmp_path):
    cases = standard_cases()
    cases[-1] = FakeCase("native", role="baseline", status="timeout", reason="no answer for 60 s")
    text, rows = table_of(run_of(tmp_path / "no native", cases=cases, num_iterations=1))
    assert "timeout: no answer for 60 s" in rows["native"]
    assert "the baseline was not measured, so there are no speedups" in text
    assert rows["token_drop gamma 1"].split()[6] == "-"
    assert "inconclusive" in rows["token_drop gamma 1"]
    cases = [case for case in standard_cases() if case.role != "noise"]
    text, rows = table_of(run_of(tmp_path / "no noise", cases=cases, num_iterations=1))
    assert "inconclusive" in rows["token_drop gamma 1"]
    assert "no noise floor" in text


def test_on_gpus_waits_are_less_what_a_probe_costs_when_nobody_waits(tmp_path):
    def waiting_ms(name, backend, floor_us):
        rank = {"probe_floor_us": floor_us} if floor_us else {}
        out = run_of(
            tmp_path / name, cases=standard_cases()[2:], **FEW, facts={"backend": backend}, conditions={"rank": rank}
        )
        said = f"probe floor: {floor_us:.1f} us" in run_text(load_run(out)) if floor_us else None
        return results_of(out)["native"].breakdown.group_ms["waiting"], said

    whole, _ = waiting_ms("without", "nccl", None)
    less, said = waiting_ms("with", "nccl", 4.0)
    assert 0 < whole - less <= 4 * 4e-3 + 1e-9, "four waits in a layer"
    assert said
    assert waiting_ms("gloo", "gloo", 4.0) == (whole, False)
    assert waiting_ms("all", "nccl", 1e9)[0] == 0


def test_pieces_are_named_and_the_host_is_no_limit_on_the_cpu_where_it_is_the_device(tmp_path):
    facts = {"num_pieces": 4, "backend": "gloo"}
    text = run_text(load_run(run_of(tmp_path, **FEW, host_share=1.0, facts=facts)))
    assert "through the rest of the layer in 4 pieces" in text
    assert "launch-bound" not in text


@pytest.mark.parametrize(
    ("waits", "said"),
    [({}, None), ({"c0-1": {"own.py:9": 2, "steps.py:4": 1}, "gone": {"own.py:1": 1}}, "3 (own.py:9 x 2, steps.py:4)")],
)
def test_where_a_case_waits_for_the_device_is_said(tmp_path, waits, said):
    run = load_run(run_of(tmp_path, cases=standard_cases()[2:], **FEW, conditions={"waits": waits}))
    label = next(case.label for case in run.cases if case.case_id == "c0-1")
    lines = [line for line in run_text(run).splitlines() if "the host waits for the device" in line]
    assert [line.endswith(f"beyond native: {label}: {said}") for line in lines] == [True] * (said is not None)


def test_by_position_a_layer_and_route_keep_different_tokens_and_a_note_says_so(tmp_path):
    for order, told in (("probs", 0), ("position", 1)):
        params = {"capacity_factor": 1.0, "drop_policy": order}
        cases = [*standard_cases()[2:], FakeCase("megatron_drop", params=params)]
        text = run_text(load_run(run_of(tmp_path / order, cases=cases, **FEW)))
        assert text.count("megatron_drop by position: a layer keeps any tokens") == told


SAME = {"model": "a/Model", "arrangement": "sequences", "sources": []}
TAIL = {"kind": "recorded", "description": "ShareGPT", "tail_model": "geometric"}


@pytest.mark.parametrize(
    ("changes", "warning"),
    [
        ({"probe_overhead": 0.05}, "probes cost more than 1.0 %"),
        ({"probe_overhead": 0.05, "facts": {"backend": "gloo"}}, "probes are not free on CPU ranks (gloo)"),
        ({"facts": {"oversubscribed": True}}, "no straggler speedup is claimed"),
        ({"facts": {"permute": {"requested": "auto", "ran": "indexed"}}}, "not to be set beside a paper's"),
        ({"facts": {"departures": ["The biases are left out."]}}, "simpler than Tiny-MoE's: The biases are left out."),
        ({"host_share": 0.97}, "launch-bound: in 100.0 %"),
        (
            {"conditions": {"rank": {"allocating_iterations": {"c0-0": 7, "of another comparison": 9}}}},
            "memory was asked of the driver in 7 timed iterations of one rank (",
        ),
        (
            {"conditions": {"warm_up": {"settled": False, "change": -0.08}}},
            "warm-up did not settle: its last round took -8.0",
        ),
        (
            {"conditions": {"rank": {"machine": {**QUIET_MACHINE, "machine_cpu_s": 80.0}}}},
            "other processes used 6.00 cores",
        ),
        ({"conditions": {"rank": {"machine": {**QUIET_MACHINE, "stolen_s": 9.0}}}}, "the hypervisor took 0.90 cores"),
    ],
)
def test_what_weakens_a_result_is_said(tmp_path, changes, warning):
    text = run_text(load_run(run_of(tmp_path, cases=standard_cases()[2:], **FEW, **changes)))
    warnings = [line for line in text.splitlines() if "warning:" in line]
    assert len(warnings) == 1
    assert warning in warnings[0]


def test_what_looks_past_a_recorded_top_k_is_said_to_rest_on_the_tail_model(tmp_path):
    def warnings(root, *tails, looks=True, recordings=("a", "a")):
        cases = [FakeCase("laser", looks_past_top_k=looks), FakeCase("native", role="baseline")]
        comparisons = [
            FakeComparison(
                comparison_id=f"c{number}",
                cases=cases,
                **FEW,
                facts={"workload": {**TAIL, "tail_model": tail, "recording": {**SAME, "sha256": recording}}},
            )
            for number, (tail, recording) in enumerate(zip(tails, recordings, strict=False))
        ]
        text = run_text(load_run(write_run(root, comparisons)))
        return [line.partition("warning: ")[2] for line in text.splitlines() if "are modelled" in line]

    begin = "scores past the recorded top-k are modelled (popularity tail), and what laser did rests on them: "
    assert warnings(tmp_path / "one", "popularity") == [f"{begin}measured under this one only (workload.tail: both)"]
    assert warnings(tmp_path / "two", "popularity", "uniform")[0] == f"{begin}set it beside the same under uniform"
    alone = warnings(tmp_path / "other", "popularity", "uniform", recordings=("a", "b"))
    assert ["this one only" in line for line in alone] == [True, True]
    assert warnings(tmp_path / "none", "popularity", looks=False) == []


def test_native_that_differs_from_itself_is_warned_of(tmp_path):
    cases = [*standard_cases()[:-2], FakeCase("native", role="noise", speedup=1.1), standard_cases()[-1]]
    cases[3].label = "native again"
    text, rows = table_of(run_of(tmp_path, noise=0.0, cases=cases))
    assert "noise floor: 0.909 to 1.100" in text
    assert "native differs from itself" in text
    assert "no difference" in rows["topk"]


def test_launches_are_all_used_and_their_scatter_widens_the_interval(tmp_path):
    cases = [case for case in standard_cases() if case.policy in ("native", "topk")]
    one = results_of(run_of(tmp_path / "one", noise=0.01, cases=cases))["topk"]
    # Each case of each launch is off by its own factor: what Student's t over launches is for.
    three = results_of(run_of(tmp_path / "three", noise=0.01, cases=cases, num_launches=3, launch_noise=0.05))["topk"]
    assert (one.speedup.num_launches, three.speedup.num_launches) == (1, 3)
    assert len(three.case.timings) == 3 * len(one.case.timings)
    assert three.speedup.high - three.speedup.low > 3 * (one.speedup.high - one.speedup.low)
    assert three.detectable > one.detectable > 1
    text = run_text(load_run(tmp_path / "three"))
    assert "and Student's t over 3 launches" in text
    assert "of this launch only" in run_text(load_run(tmp_path / "one"))


def test_a_case_that_failed_in_one_launch_failed(tmp_path):
    directory = run_of(tmp_path, num_launches=2, **FEW)
    path = first_part(directory)
    rows = [row for row in pq.read_table(path).to_pylist() if row["launch"] == 0]
    failed = {**rows[0], "launch": 1, "status": "oom", "reason": "too big", "time_us": None}
    pq.write_table(pa.Table.from_pylist([*rows, failed], schema=SAMPLES_SCHEMA), path)
    (case,) = (case for case in load_run(directory).cases if case.case_id == path.stem)
    assert (case.status, case.reason) == ("oom", "launch 2: too big")
    assert case.timings.empty


def test_rates_are_bytes_and_operations_over_time(tmp_path):
    load_E = native_load(8)[::-1].copy()
    load_E[4] = 0  # an expert that nobody selects is not read
    cases = [dataclasses.replace(case, expert_load=load_E) for case in standard_cases()]
    directory = run_of(tmp_path, noise=0.0, probe_overhead=0.0, cases=cases)
    case = results_of(directory)["native"]
    routing = pq.read_table(directory / "routing" / f"{case.case.case_id}.parquet").to_pandas()
    batch = routing[routing.batch == 0].sort_values("rank")
    matrix_RR = np.stack(batch.load_R.to_list())  # source rank, expert rank
    fullest = max(matrix_RR.sum(axis=0).max(), matrix_RR.sum(axis=1).max())
    dispatch_us, combine_us, experts_us = 0.15 * 2000, 0.1 * 2000, 0.44 * 2000  # of rank 0, the slowest
    rates = case.rates
    assert rates.crossing_pair_bytes == batch.crossing_pairs.sum() * HIDDEN_SIZE * 2
    assert rates.crossing_copy_bytes == batch.crossing_copies.sum() * HIDDEN_SIZE * 2
    assert rates.dispatch_gbps == pytest.approx(fullest * (HIDDEN_SIZE * 2 + 4) / dispatch_us / 1e3)
    assert rates.dispatch_bus_gbps == pytest.approx(rates.dispatch_gbps / 2)
    assert rates.combine_gbps == pytest.approx(fullest * HIDDEN_SIZE * 2 / combine_us / 1e3)
    load_E = np.sum(batch.load_E.to_list(), axis=0)
    pairs_R = load_E.reshape(2, -1).sum(axis=1)
    rank = pairs_R.argmax()
    assert rank == 1, "the rank with the most pairs is not the first, so that a mixed-up rank would show"
    experts_us -= (1 - FAST_RANK) * experts_us
    tflops = 6 * HIDDEN_SIZE * FFN_SIZE * pairs_R[rank] / experts_us / 1e6
    moved = 2 * (3 * HIDDEN_SIZE * FFN_SIZE * 3 + pairs_R[rank] * (2 * HIDDEN_SIZE + 6 * FFN_SIZE))
    assert rates.experts_tflops == pytest.approx(tflops)
    assert rates.experts_of_matmul == pytest.approx(tflops / CEILINGS["matmul_tflops"])
    assert rates.experts_of_copy == pytest.approx(moved / experts_us / 1e3 / CEILINGS["copy_gbps"])
    late = directory / "cases" / f"{case.case.case_id}.parquet"
    table = pq.read_table(late)
    is_late = pc.and_(pc.equal(table["phase"], "dispatch"), pc.equal(table["rank"], 1))
    later = pc.if_else(is_late, pc.multiply(table["time_us"], 2.0), table["time_us"])
    pq.write_table(table.set_column(table.column_names.index("time_us"), "time_us", later), late)
    assert results_of(directory)["native"].rates.dispatch_gbps == pytest.approx(rates.dispatch_gbps / 2)


def test_one_rank_has_no_link(tmp_path):
    rates = results_of(run_of(tmp_path, **FEW, num_ranks=1))["native"].rates
    assert rates.dispatch_gbps is rates.combine_bus_gbps is None
    assert rates.experts_tflops > 0


# ---- errors ------------------------------------------------------------------------------------------------------


def first_part(directory: Path, folder: str = "cases") -> Path:
    return sorted((directory / folder).glob("*.parquet"))[0]


def conditions_of(directory: Path) -> Path:
    return directory / "conditions" / "c0-0.json"


def foreign_run_id(directory: Path) -> None:
    path = first_part(directory)
    edit_part(path, run_id=["r1"] * pq.read_metadata(path).num_rows)


BREAKAGES = {
    "no run.json": (lambda d: (d / "run.json").unlink(), "run.json: missing"),
    "no JSON": (lambda d: (d / "run.json").write_text('{"schema_version": 1,'), "run.json: damaged, not JSON"),
    "a list": (lambda d: (d / "run.json").write_text("[]"), "schema_version: expected a whole number, got None"),
    "newer": (lambda d: edit_json(d, lambda c: c.update(schema_version=4)), "expected 3, got 4; it is newer"),
    "no cases": (lambda d: edit_json(d, lambda c: c.pop("cases")), "run.json: cases: missing"),
    "key gone": (
        lambda d: edit_json(d, lambda c: c["comparisons"]["c0"].pop("dtype")),
        "run.json: comparisons.c0.dtype: missing",
    ),
    "odd role": (lambda d: edit_json(d, lambda c: c["cases"]["c0-0"].update(role="king")), "cases.c0-0.role"),
    "two baselines": (
        lambda d: edit_json(d, lambda c: c["cases"]["c0-0"].update(role="baseline")),
        "comparisons.c0: expected one baseline case, got 2",
    ),
    "no such comparison": (
        lambda d: edit_json(d, lambda c: c["cases"]["c0-0"].update(comparison_id="c9")),
        "cases.c0-0.comparison_id: no comparison 'c9'",
    ),
    "missing part": (lambda d: first_part(d).unlink(), "c0-0.parquet: missing; the run did not finish"),
    "damaged part": (lambda d: first_part(d).write_bytes(b"PAR1 and nothing"), "c0-0.parquet: damaged, not Parquet"),
    "other schema": (
        lambda d: first_part(d).write_bytes(first_part(d, "routing").read_bytes()),
        "c0-0.parquet: foreign, expected a column launch",
    ),
    "another case's part": (
        lambda d: first_part(d).write_bytes((d / "cases" / "c0-1.parquet").read_bytes()),
        "c0-0.parquet: foreign, case_id: expected 'c0-0', got 'c0-1'",
    ),
    "unlisted part": (
        lambda d: (d / "cases" / "x.parquet").write_bytes(first_part(d).read_bytes()),
        "x.parquet: foreign, run.json lists no case 'x'",
    ),
    "another mode": (lambda d: edit_json(d, lambda c: c.update(mode="route")), "mode: expected 'route', got 'run'"),
    "another job": (foreign_run_id, "c0-0.parquet: of another job than c0-2.parquet"),
    "no conditions": (lambda d: conditions_of(d).unlink(), "c0-0.json: missing; it says under which conditions"),
    "damaged conditions": (lambda d: conditions_of(d).write_text("{}"), "c0-0.json: run_id: missing"),
    "another job's conditions": (
        lambda d: conditions_of(d).write_text(conditions_of(d).read_text().replace('"r0"', '"r7"')),
        "c0-0.json: of another job than the cases (r7, r0)",
    ),
    "unknown phase": (lambda d: edit_part(first_part(d), phase=["nap"]), "phase: expected one of shared, gate"),
    "unknown status": (lambda d: edit_part(first_part(d), status=["meh"]), "status: expected one of ok, failed"),
    "no time": (lambda d: edit_part(first_part(d), time_us=[None]), "lacks its rank, batch, iteration or time_us"),
    "time stands still": (lambda d: edit_part(first_part(d), time_us=[0.0]), "a total is not above 0"),
    "endless host time": (lambda d: edit_part(first_part(d), host_us=[float("inf")]), "a time is not below 1e+15 us"),
    "no launch": (lambda d: edit_part(first_part(d), launch=[None]), "damaged, a row lacks its launch"),
    "a rank twice": (lambda d: edit_part(first_part(d), rank=[1]), "stands there twice"),
    "a rank gone": (
        lambda d: edit_part(first_part(d), iteration=[77]),
        "expected totals of 2 ranks, got 1",
    ),
    "short load": (lambda d: edit_part(first_part(d, "routing"), load_E=[[1, 2]]), "load_E: expected 8 entries, got 2"),
    "no pairs counted": (
        lambda d: edit_part(first_part(d, "routing"), num_topk_pairs=[None]),
        "lacks its num_topk_pairs",
    ),
    "a rank's routing gone": (lambda d: edit_part(first_part(d, "routing"), batch=[77]), "one row for each of 2 ranks"),
}


NOTHING_LEFT = ("no run.json", "no JSON", "a list", "newer", "no cases", "key gone", "two baselines", "another mode")


@pytest.fixture(scope="module")
def sound(tmp_path_factory) -> Path:
    first, _, _, *native = standard_cases()
    directory = run_of(tmp_path_factory.mktemp("sound") / "run", cases=[first, *native], **FEW)
    assert len(load_run(directory).cases) == 3
    return directory


@pytest.mark.parametrize("breakage", BREAKAGES)
def test_results_that_cannot_be_trusted_are_one_clear_line(sound, tmp_path, breakage):
    damage, message = BREAKAGES[breakage]
    directory = shutil.copytree(sound, tmp_path / "run")
    damage(directory)
    with pytest.raises(ResultsError) as error:
        load_run(directory)
    assert message in str(error.value)
    assert str(directory) in str(error.value)
    assert "\n" not in str(error.value)
    # Whoever wants the rest has it, and the same line; without run.json, or the only comparison, there is no rest.
    lines: list[str] = []
    if breakage in NOTHING_LEFT:
        with pytest.raises(ResultsError) as fatal:
            load_run(directory, lines)
        lines.append(str(fatal.value))
    else:
        rest = load_run(directory, lines)
        assert len(rest.cases) >= 2
        assert all(case.is_ok for case in rest.cases)
    assert str(error.value) in lines
    assert not any("\n" in line for line in lines)


def test_a_run_in_which_nothing_was_measured_says_why(tmp_path):
    cases = [dataclasses.replace(case, status="oom", reason="too\nbig") for case in standard_cases()]
    with pytest.raises(ResultsError, match=r"no case was measured \(5 oom\); token_drop gamma 1: too big"):
        load_run(run_of(tmp_path, cases=cases))
