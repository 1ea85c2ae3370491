"""Traffic in time: requests as they came, windows that plans know, and what it costs to keep a plan."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from safetensors.numpy import load_file

from moe_ep_bench.analysis.advice import Upkeep, advice_lines, note_lines, read_advice
from moe_ep_bench.analysis.cases import load_timed, timings
from moe_ep_bench.analysis.picks import candidates
from moe_ep_bench.balancers import Balanced, with_free_slots
from moe_ep_bench.bench.advise_config import Bounds
from moe_ep_bench.bench.checks import VIRTUAL
from moe_ep_bench.bench.emulated_ranks import ModelledRanks
from moe_ep_bench.bench.measure import measure_point
from moe_ep_bench.bench.plan import plan
from moe_ep_bench.bench.point import Point
from moe_ep_bench.bench.routing import Router
from moe_ep_bench.cli import main
from moe_ep_bench.errors import OK, UserError
from moe_ep_bench.placement import Rearrangement, moved_experts, replicate
from moe_ep_bench.schema import TOTAL
from moe_ep_bench.workload.replay import RecordedWorkload
from moe_ep_bench.workload.trace import open_trace
from tests.trace_files import tokens_of, write_parts, write_trace

CPU = torch.device("cpu")
NUM_RANKS, NUM_EXPERTS, TOP_K = 4, 8, 3
LENGTHS = {"one": (7, 12, 5, 30, 9, 14, 40, 3), "two": (20, 3, 11, 25, 6, 18)}


@pytest.fixture
def traces(tmp_path: Path) -> list[Path]:
    shape = {"popularity": 1.2, "sharpness": 0.7}
    return [
        write_trace(tmp_path / f"{name}.safetensors", length_S=lengths, domain=name, seed=len(lengths), **shape)
        for name, lengths in LENGTHS.items()
    ]


def recorded(traces: list[Path], **changes: Any) -> RecordedWorkload:
    fields = {"layer": 1, "num_experts": NUM_EXPERTS, "top_k": TOP_K, "num_tokens": 20, "num_batches": 4, "seed": 0}
    return RecordedWorkload([*map(open_trace, traces)], **{**fields, "tail": "popularity", **changes})


def all_tokens(workload: RecordedWorkload) -> list[list[int]]:
    """Recorded tokens of each batch, those ahead of the first included."""
    return [tokens_of(workload, index).tolist() for index in range(-workload.num_history, workload.num_batches)]


# ---- the order of requests -------------------------------------------------------------------------------------------


def test_by_arrival_batches_follow_each_other_through_the_recording(traces: list[Path]) -> None:
    workload = recorded(traces[:1], num_history=1, num_batches=5)
    assert [token for batch in all_tokens(workload) for token in batch] == list(range(120))
    starts = workload.traces[0].start_S
    for index in range(-1, 5):  # a request that a batch cuts goes on in the next one
        ends = np.cumsum([0, *workload.sequence_lengths(index)]) + 20 * (index + 1)
        inside = [start for start in starts if 20 * (index + 1) < start < 20 * (index + 2)]
        assert ends.tolist() == [20 * (index + 1), *inside, 20 * (index + 2)]


@pytest.mark.parametrize("arrangement", ["sequences", "decode"])
@pytest.mark.parametrize("mix", ["even", "sequence"])
def test_by_arrival_no_token_comes_twice_and_requests_keep_their_order(
    traces: list[Path], mix: str, arrangement: str
) -> None:
    sizes = {"num_tokens": 4, "num_batches": 14} if arrangement == "decode" else {"num_tokens": 28, "num_batches": 5}
    workload = recorded(traces, mix=mix, arrangement=arrangement, num_history=1, **sizes)
    batches = all_tokens(workload)
    tokens = [token for batch in batches for token in batch]
    assert len(set(tokens)) == len(tokens)
    first_request = np.concatenate([[0], np.cumsum(LENGTHS["one"]), 120 + np.cumsum(LENGTHS["two"])])
    begun: dict[int, int] = {}  # the first batch that has a request's tokens
    for number, batch in enumerate(batches):
        for token in batch:
            begun.setdefault(int(np.searchsorted(first_request, token, side="right")) - 1, number)
    for of_recording in ([0, 1, 2, 3, 4, 5, 6, 7], [8, 9, 10, 11, 12, 13]):
        known = [begun[request] for request in of_recording if request in begun]
        assert known == sorted(known)
        assert set(begun) & set(of_recording) == set(of_recording[: len(known)])
    of_first = np.array([np.mean(np.array(batch) < 120) for batch in batches])
    if mix == "sequence":
        assert of_first[0] == 1, "one recording, then the other"
        assert (np.diff(of_first) <= 0).all()
    elif arrangement == "decode":
        assert (of_first == 0.5).all()
    else:  # each has the tokens of the other but for a request
        assert abs(of_first.mean() - 0.5) * len(tokens) <= 40


@pytest.mark.parametrize("sizes", [{"num_tokens": 20}, {"num_tokens": 4, "arrangement": "decode"}])
def test_a_recording_that_is_too_short_says_how_many_batches_it_has(traces: list[Path], sizes: dict[str, Any]) -> None:
    asked = {**sizes, "num_history": 2}
    with pytest.raises(
        UserError, match=r"^num_batches: expected at most \d+ batches of (20|4) tokens and the 2 ahead"
    ) as found:
        recorded(traces[:1], num_batches=500, **asked)
    possible = int(re.findall(r"at most (\d+)", str(found.value))[0])
    assert "order: shuffled" in str(found.value)
    assert recorded(traces[:1], num_batches=possible, **asked).num_by_arrival(500) == possible + 2
    with pytest.raises(UserError, match="num_batches"):
        recorded(traces[:1], num_batches=possible + 1, **asked)


def test_by_arrival_times_must_be_in_order(tmp_path: Path, traces: list[Path]) -> None:
    for name, seconds in (("sorted", [0, 1, 1, 2, 3, 5, 8, 9]), ("late", [0, 1, 7, 2, 3, 5, 8, 9])):
        tensors = load_file(traces[0]) | {"arrival_s": np.array(seconds, dtype=np.float64)}
        write_parts(tmp_path / f"{name}.safetensors", tensors, dict(open_trace(traces[0]).metadata))
    late, plain = tmp_path / "late.safetensors", recorded(traces[:1])
    assert all_tokens(recorded([tmp_path / "sorted.safetensors"])) == all_tokens(plain)
    with pytest.raises(UserError, match=r"arrival_s: .* request 3 came at 2 s, the one before it at 7 s"):
        recorded([late])
    assert all_tokens(recorded([late], order="shuffled")) == all_tokens(recorded(traces[:1], order="shuffled"))


# ---- what plans know -------------------------------------------------------------------------------------------------


def planned(folder: Path, traces: list[Path], replication: dict[str, Any], **workload: Any) -> Point:
    asked = {"kind": "recorded", "trace": [str(trace) for trace in traces], "layer": 1, "tail": "popularity"}
    asked |= {"num_tokens": 12, "num_batches": 4, **workload}
    if workload.get("kind") == "synthetic":
        asked = {"kind": "synthetic", "num_tokens": 12, "num_batches": 4, "peak_load": 2, **workload}
    shape = {"num_experts": NUM_EXPERTS, "top_k": TOP_K, "hidden_size": 64, "ffn_hidden_size": 32}
    emulate = {"links": "h100-nvlink4", "device": "h100-sxm", "replication": [{"spare_per_rank": 1, **replication}]}
    config = {"model": shape, "workload": asked, "layer": {"ep_size": NUM_RANKS}, "policies": [{"name": "topk"}]}
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump({**config, "emulate": emulate}))
    return plan(path, [], VIRTUAL, on_cpu=True)[0]


@pytest.mark.parametrize("how", [{}, {"window": 2}, {"window": 2, "every": 2}, {"window": 3, "lag": 2, "every": 1}])
def test_no_plan_has_seen_a_token_that_it_serves(tmp_path: Path, traces: list[Path], how: dict[str, int]) -> None:
    """A plan is that of the loads of its window, counted in the recording; and no token of it is served."""
    point = planned(tmp_path, traces, how)
    workload, (case,) = point.workload, [case for case in point.cases if case.replication is not None]
    router = Router(point, CPU)
    windows = point.windows(case.replication)
    assert workload.num_history == windows.num_history > 0
    ids_TK = np.concatenate([trace.read_layer(1)[0] for trace in workload.traces])
    for batch in range(4):
        known, lag, every = windows.known(batch), how.get("lag", 1), how.get("every", 4)
        begun = batch // every * every
        assert known == tuple(range(begun - lag + 1 - how.get("window", 4), begun - lag + 1))
        seen = np.concatenate([tokens_of(workload, other) for other in known])
        assert not set(seen) & set(tokens_of(workload, batch))
        load_E = np.bincount(ids_TK[seen].ravel(), minlength=NUM_EXPERTS)
        expected_P = replicate(load_E, num_slots=NUM_EXPERTS + NUM_RANKS, num_ranks=NUM_RANKS)
        assert router.slots(case, batch).expert_P.tolist() == expected_P.tolist()


def test_batches_ahead_leave_those_that_are_served_as_they_are(tmp_path: Path) -> None:
    alone, after = (
        planned(tmp_path, [], {"window": window}, kind="synthetic").workload if window else
        planned(tmp_path, [], {}, kind="synthetic").workload
        for window in (None, 3)
    )  # fmt: skip
    assert (alone.num_history, after.num_history) == (0, 3)
    assert all(torch.equal(alone.batch(index).scores_TE, after.batch(index).scores_TE) for index in range(4))
    ahead = [after.batch(index).scores_TE for index in (-3, -2, -1, 0, 1, 2, 3)]
    assert all(not torch.equal(one, other) for number, one in enumerate(ahead) for other in ahead[:number])
    with pytest.raises(IndexError, match="expected -3 to 3, got -4"):
        after.batch(-4)


@pytest.mark.parametrize(
    ("replication", "workload", "expected"),
    [
        ({"window": 2}, {"order": "shuffled"}, "emulate.replication.0.window: expected none with workload.order"),
        ({"every": 2}, {"order": "shuffled"}, "emulate.replication.0.every: expected none with workload.order"),
        ({}, {"order": "shuffled", "history": 1}, "workload.history: expected none with order: shuffled, got 1"),
        ({"window": 3}, {"history": 2}, "workload.history: expected at least 3, which emulate.replication.0 knows"),
        ({}, {"mix": "sequence", "order": "shuffled"}, "mix: sequence keeps the order of recordings"),
        ({"window": 0}, {}, "window: expected"),
        ({"plan_ms": 1}, {"order": "shuffled"}, "emulate.replication.0.plan_ms: expected none with workload.order"),
        ({"lag": 2}, {"kind": "synthetic"}, "emulate.replication.0.lag: expected window or every to be set too"),
    ],
)
def test_windows_that_cannot_be_are_refused(
    tmp_path: Path, traces: list[Path], replication: dict[str, Any], workload: dict[str, Any], expected: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(expected)):
        planned(tmp_path, traces, replication, **workload)


# ---- what a new plan costs -------------------------------------------------------------------------------------------


def times_us(point: Point) -> np.ndarray:
    """Of the replicated case every rank's and batch's time, [R, B]."""
    ranks = ModelledRanks(point, point.cases, CPU, lambda _: None)
    measure_point(ranks, ranks.begin)
    (case,) = [case for case in point.cases if case.replication is not None]
    return ranks.result.times[case.case_id][:, : ranks.num_batches, ranks.result.columns[TOTAL]]


@pytest.mark.parametrize("rearrange", ["stall", "beside"])
def test_each_batch_bears_its_share_of_a_new_plan(tmp_path: Path, traces: list[Path], rearrange: str) -> None:
    """Beside a plan that costs nothing: later by planning and weights, shared among the batches that it serves."""
    how = {"window": 2, "every": 2, "rearrange": rearrange, "plan_ms": 3}
    point = planned(tmp_path, traces, how)
    (case,) = [case for case in point.cases if case.replication is not None]
    router, links = Router(point, CPU), point.links
    before_P = with_free_slots(NUM_EXPERTS, NUM_RANKS, 1)
    shares = []
    for batch in (0, 2):
        slots = router.slots(case, batch)
        moved_RR = moved_experts(before_P, slots.expert_P, NUM_RANKS) * point.expert_bytes
        assert (slots.rearranged.moved_bytes_RR == moved_RR).all()
        assert moved_RR.any()
        busy_us_R = links.all_to_all_us(moved_RR)
        once_R = 3000 + np.full(4, busy_us_R.max()) if rearrange == "stall" else busy_us_R
        np.testing.assert_allclose(slots.rearranged.once_us(links), once_R)
        shares += [once_R / 2, once_R / 2]
        before_P = slots.expert_P
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Rearrangement, "share", 0)
        costs_nothing = times_us(point)
    later = times_us(point) - costs_nothing
    if rearrange == "stall":
        np.testing.assert_allclose(later, np.array(shares).T, rtol=1e-9)
    else:  # ranks whose links are busy for longer keep others waiting
        assert (later > 0).all()
        assert (later <= np.max(shares, axis=1) + 1e-9).all()


def test_rows_hold_what_a_new_plan_moves(tmp_path: Path, traces: list[Path]) -> None:
    point = planned(tmp_path, traces, {"window": 2, "every": 4, "plan_ms": 1})
    (case,) = [case for case in point.cases if case.replication is not None]
    ranks = ModelledRanks(point, [case], CPU, lambda _: None)
    measure_point(ranks, ranks.begin)
    slots = Router(point, CPU).slots(case, 0)
    for row in ranks.result.rows[case.case_id]:
        moved = slots.rearranged.moved_bytes_RR[:, row["rank"]].sum()
        assert (row["rearranged_bytes"], row["moved_weight_bytes"]) == (int(moved), int(moved / 4))
        assert row["rearrange_us"] == slots.rearranged.once_us(point.links)[row["rank"]]


def test_a_plan_that_stands_for_good_says_what_it_took_and_charges_nothing(tmp_path: Path, traces: list[Path]) -> None:
    point = planned(tmp_path, traces, {"window": 2, "plan_ms": 1})
    (case,) = [case for case in point.cases if case.replication is not None]
    ranks = ModelledRanks(point, [case], CPU, lambda _: None)
    measure_point(ranks, ranks.begin)
    for row in ranks.result.rows[case.case_id]:
        assert row["rearrange_us"] > 1000
        assert row["moved_weight_bytes"] == 0


def test_planning_is_timed_here_where_no_time_is_given(tmp_path: Path, traces: list[Path]) -> None:
    point = planned(tmp_path, traces, {"window": 2, "every": 4})
    (case,) = [case for case in point.cases if case.replication is not None]
    assert Router(point, CPU).slots(case, 0).rearranged.plan_us > 0


# ---- whether a plan pays ---------------------------------------------------------------------------------------------

RANGE = {"label": "EPLB", "num_batches": 20, "rearranged_gib": 1.0}


@pytest.mark.parametrize(
    ("median_ms", "verdict", "rearrange_ms", "every", "decision", "pays_after"),
    [
        (8.0, "faster", 30.0, None, "enable", 15),
        (9.0, "faster", 30.0, 10, "enable", 8),  # without its share it would take 6 ms, 4 less than native
        (9.5, "inconclusive", 30.0, None, "insufficient", 60),
        (11.0, "slower", 30.0, 10, "not_now", 15),  # it would pay if it stood for longer
        (14.0, "slower", 30.0, 10, "not_now", None),
        (10.0, "inconclusive", 0.0, None, "not_now", None),
    ],
)
def test_a_plan_is_judged_by_its_gain_and_what_it_takes(
    median_ms: float, verdict: str, rearrange_ms: float, every: int | None, decision: str, pays_after: int | None
) -> None:
    ends = {"speedup": 10 / median_ms, "low": 10 / median_ms - 0.01, "high": 10 / median_ms + 0.01}
    plan = Upkeep.judged(
        native_ms=10.0, median_ms=median_ms, verdict=verdict, every=every, rearrange_ms=rearrange_ms, **ends, **RANGE
    )
    assert (plan.decision, plan.pays_after) == (decision, pays_after)


def test_a_server_whose_new_plans_take_three_times_the_run_is_told_not_to() -> None:
    """vLLM pull request 50647: Kimi K3 on 16 ranks, 463.11 s without and 1,466.50 s with 24 synchronous new plans.

    The fullest rank falls from 1.069 to 1.008 of the mean, so that all that time could be shorter by 5.7 % at most.
    """
    native_s, plans = 463.11, 24
    shorter_s = native_s * 1.008 / 1.069
    stall_s = (1466.50 - shorter_s) / plans
    speedup = native_s / 1466.50
    plan = Upkeep.judged(
        native_ms=1e3 * native_s / plans, median_ms=1e3 * 1466.50 / plans, verdict="slower", every=1,
        rearrange_ms=1e3 * stall_s, speedup=speedup, low=speedup, high=speedup, **RANGE,
    )  # fmt: skip
    assert plan.decision == "not_now"
    assert plan.pays_after == 39, "one new plan in place of 39 would pay"


def test_advise_judges_plans_on_batches_that_did_not_make_them(tmp_path: Path) -> None:
    shape = {"length_S": (16,) * 24, "num_layers": 2, "num_experts": 64, "top_k": 8, "popularity": 1.0, "full": True}
    trace, out = write_trace(tmp_path / "mine.safetensors", **shape), tmp_path / "out"
    question = ["--model", "olmoe-1b-7b", "--ep", "8", "--tokens", "16", "--trace", str(trace), "--out", str(out)]
    assert main(["advise", *question, "--set", "emulate.overlap=none"]) == OK
    advice = read_advice(out)
    (answer,) = advice.answers
    assert {plan.label.split(",")[0].split(" (")[0] for plan in answer.plans} == {"EPLB", "EPLB + LP", "variance plan"}
    assert all(one.num_batches == 10 and one.rearrange_ms > 0 for one in answer.plans)
    assert {one.layers[1] for one in answer.plans} == {2}
    lines = "\n".join(advice_lines(advice))
    for one in answer.plans:
        decision = {"enable": "enable", "not_now": "not now", "insufficient": "insufficient evidence"}[one.decision]
        assert f"{one.label}: {decision}. It is {one.speedup:.3f} times as fast as native [" in lines
        assert f"on 10 later batches, and gains in {one.layers[0]} of 2 layers; a new plan takes" in lines
    assert "time to plan was measured on this CPU (emulate.replication: plan_ms)" in [
        line.text for line in note_lines(advice)
    ]
    run = json.loads((out / "run.json").read_text())
    workloads = [one["workload"] for one in run["comparisons"].values()]
    assert [(one["order"], one["num_history"]) for one in workloads] == [("arrival", 5)] * 2
    store = load_timed(out)
    rows, times = candidates(store, Bounds.of(None, None)), timings(store).query("quantity == 'all'")
    for case_id, row in rows.iterrows():  # five batches in each layer
        of_layers = [
            own.sort_values("batch")["speedup"] for _, own in times[times["case_id"] == case_id].groupby("launch")
        ]
        assert row["earlier"] == pytest.approx(np.median(np.concatenate([own[:3] for own in of_layers])))
        assert row["later"] == pytest.approx(np.median(np.concatenate([own[3:] for own in of_layers])))
    may = rows[(rows["standing"] != "out of bounds") & (rows["earlier"] > 1)].sort_values("earlier")
    assert (answer.held_out is None) == may.empty
    if not may.empty:
        best = may.iloc[-1]
        assert (answer.held_out.label, answer.held_out.later) == (best["label"], best["later"])
        assert f"The first half of the batches would choose {best['label']}, " in lines


# ---- exchanges that stay ---------------------------------------------------------------------------------------------


def exchanging(folder: Path, traces: list[Path], **more: Any) -> Point:
    point = planned(folder, traces, {}, history=0, order="shuffled", num_tokens=2000, num_batches=4)
    emulate = {"replication": [], "rebalance": [{"name": "epic", "spare_per_rank": 1, "solve_us": 0, **more}]}
    overrides = [f"emulate.{key}={json.dumps(value)}" for key, value in emulate.items()]
    assert point.num_tokens == 2000
    return plan(folder / "config.yaml", overrides, VIRTUAL, on_cpu=True)[0]


def test_epic_pays_once_for_an_exchange_that_serves_later_batches(tmp_path: Path, traces: list[Path]) -> None:
    point = exchanging(tmp_path, traces, least_pairs=1)
    (case,) = [case for case in point.cases if case.replication is not None]
    router, begins_P = Router(point, CPU), with_free_slots(NUM_EXPERTS, NUM_RANKS, 1)
    moved = []
    for batch in range(4):
        balanced = case.replication.balance(begins_P, router.native_counts(batch), point.ranks_per_node)
        slots = router.slots(case, batch)
        found_RR = 0 if slots.moved_bytes_RR is None else slots.moved_bytes_RR / point.expert_bytes
        assert (balanced.moved_RR(NUM_RANKS) == found_RR).all()
        moved.append(len(balanced.moves))
        begins_P = balanced.left_P(NUM_RANKS)
    assert moved[0] > 0
    assert Router(point, CPU).slots(case, 3).expert_P.tolist() == slots.expert_P.tolist(), "whichever batch comes first"


def test_what_a_batch_leaves_is_worked_out_once(
    tmp_path: Path, traces: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    point = exchanging(tmp_path, traces, least_pairs=1)
    (case,) = [case for case in point.cases if case.replication is not None]
    router, asked, left_P = Router(point, CPU), [], Balanced.left_P
    monkeypatch.setattr(Balanced, "left_P", lambda balanced, ranks: asked.append(ranks) or left_P(balanced, ranks))
    for batch in range(4):
        router.slots(case, batch)
    assert len(asked) == 3  # by all batches but the last


def test_epic_exchanges_where_that_saves_more_time_than_it_takes(tmp_path: Path, traces: list[Path]) -> None:
    """By the links and the device of the case: over slow links nothing moves that moves over fast ones."""
    point = exchanging(tmp_path, traces)
    (case,) = [case for case in point.cases if case.replication is not None]
    load_E = Router(point, CPU).native_counts(0).sum(axis=0)
    busy = replace(point, experiment=point.experiment)
    assert point.exchange_pairs(load_E) > 0
    scaled = [replace(busy, links=point.links.scaled(factor)) for factor in (1e-3, 1.0, 1e3)]
    pairs = [one.exchange_pairs(load_E) for one in scaled]
    assert pairs[0] >= pairs[1] >= pairs[2]
    many_E = load_E * 10**5  # arithmetic bounds them, not weights
    slow, fast = scaled[0].exchange_pairs(many_E), scaled[2].exchange_pairs(many_E)
    exchange_us = float(point.links.scaled(1e-3).intra.time_us(point.expert_bytes))
    size = point.model.expert_hidden_size, point.model.ffn_hidden_size
    mean = many_E.mean()
    few_us, more_us = (point.device.experts_us(*size, np.full(2, factor * mean)) for factor in (1, 1.5))
    assert slow == int(exchange_us / ((more_us - few_us) / mean)) + 1 > fast
    given = exchanging(tmp_path, traces, least_pairs=7)
    (asked,) = [case.replication for case in given.cases if case.replication is not None]
    balanced = asked.balance(with_free_slots(8, 4, 1), load_E[None].repeat(4, axis=0), 8, exchange_pairs=10**9)
    assert balanced.moves, "what is given counts"
    none = case.replication.balance(with_free_slots(8, 4, 1), load_E[None].repeat(4, axis=0), 8, exchange_pairs=10**9)
    assert not none.moves
