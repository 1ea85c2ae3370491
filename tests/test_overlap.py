"""Claims about micro-batches that overlap: how a batch is cut, what each routes and sends, what a layer then takes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from moe_ep_bench.bench import tokens as tokens_module
from moe_ep_bench.bench.checks import MODELLED, VIRTUAL
from moe_ep_bench.bench.emulated_ranks import ModelledRanks, modelled_time
from moe_ep_bench.bench.measure import measure_point
from moe_ep_bench.bench.meetings import HELD_SMS, exchange_us, held_share
from moe_ep_bench.bench.plan import plan
from moe_ep_bench.bench.point import Point
from moe_ep_bench.bench.routing import Router
from moe_ep_bench.bench.traffic import route_batch
from moe_ep_bench.cost_model.devices import SENT_BYTES
from moe_ep_bench.errors import UserError
from moe_ep_bench.kernels import PolicyForm
from moe_ep_bench.policies import make_policy
from moe_ep_bench.schema import TOTAL

CPU = torch.device("cpu")
CONFIG: dict[str, Any] = {
    "name": "overlap",
    "model": {"preset": "deepseek-v2-lite", "scale": 0.25},
    "workload": {
        "kind": "synthetic",
        "tokens_per_rank": 101,
        "sequence_length": 101,
        "num_batches": 2,
        "seed": 1,
        "peak_load": 3.0,
    },
    "layer": {"ep_size": 4},
    "policies": [
        {"name": "token_drop", "capacity_factor": 1.0},
        {"name": "token_drop", "capacity_factor": 1.0, "metric": "random"},
        {"name": "xshare", "k0": 1, "budget": 16},
    ],
    "emulate": {"links": "h100-nvlink4", "device": "h100-sxm", "overlap": "two_batch"},
}
REPLICAS = {"replication": [{"spare_per_rank": 2}], "rebalance": [{"name": "llep", "least_pairs": 1}]}


def planned(folder: Path, *overrides: str, **emulate: Any) -> Point:
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump({**CONFIG, "emulate": {**CONFIG["emulate"], **emulate}}))
    return plan(path, overrides, VIRTUAL, on_cpu=True)[0]


def totals(comparison: Point) -> dict[str, float]:
    """Of each case the slowest rank's time in batch 0, in microseconds."""
    ranks = ModelledRanks(comparison, comparison.cases, CPU, lambda _: None)
    measure_point(ranks, ranks.begin)
    at, times = ranks.result.columns[TOTAL], ranks.result.times
    return {case.label + case.role: times[case.case_id][:, 0, at].max() for case in comparison.cases}


def test_micro_batches_are_a_batch_cut_in_two(tmp_path: Path) -> None:
    comparison = planned(tmp_path, **REPLICAS)
    assert comparison.backend == MODELLED
    with torch.inference_mode():
        batch = route_batch(Router(comparison, CPU), comparison.cases, 0)
        for case, traffic in zip(comparison.cases, batch, strict=True):
            whole, first, second = traffic.layers[None], *[part.layers[None] for part in traffic.parts(2)]
            assert [part.number for part in traffic.parts(2)] == [0, 1]
            assert [first.num_tokens_R, second.num_tokens_R] == [[51] * 4, [50] * 4]
            assert (first.counts_RP + second.counts_RP == whole.counts_RP).all(), case.label
            for of in ("rank", "node"):
                assert (first.copies(of) + second.copies(of) == whole.copies(of)).all(), case.label
            assert first.slots.moved_bytes_RR is whole.slots.moved_bytes_RR
            assert second.slots.moved_bytes_RR is None, "weights move once for both"


def test_each_micro_batch_is_routed_by_itself(tmp_path: Path) -> None:
    """As a batch of half the tokens would be: capacities, statistics of all ranks, and draws are its own."""
    comparison, whole = planned(tmp_path), planned(tmp_path, overlap="none")
    router, alone = Router(comparison, CPU), Router(whole, CPU)
    with torch.inference_mode():
        for case in comparison.cases:
            tokens_R = [router.tokens(None, 0, rank).seen_by(case) for rank in range(4)]
            parts_R = [tokens.parts(2) for tokens in tokens_R]
            stats = [router.stats_of(case, tokens) for tokens in tokens_R]
            stats_MSE = None if stats[0] is None else sum(stats)
            found = [router.route(case, tokens, stats_MSE) for tokens in tokens_R]
            for number in range(2):
                ours = [parts[number] for parts in parts_R]
                of_part = [alone.stats_of(case, part) for part in ours]
                summed = None if of_part[0] is None else sum(of_part)
                for rank, part in enumerate(ours):
                    expected = alone.route(case, part, summed)
                    at = slice(0, 51) if number == 0 else slice(51, 101)
                    assert torch.equal(found[rank].map_TE[at], expected.map_TE), case.label
                    assert torch.equal(found[rank].weights_TE[at], expected.weights_TE), case.label
        drawing = make_policy({"name": "token_drop", "capacity_factor": 1.0, "metric": "random"})
        case = replace(comparison.cases[0], rule=drawing)
        drawn = [router.context(case, part).generator.initial_seed() for part in parts_R[0]]
        assert drawn[0] != drawn[1]


def test_each_micro_batch_goes_its_way_with_its_own_times(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    comparison = planned(tmp_path)
    case = comparison.cases[0]
    ranks, ways = ModelledRanks(comparison, [case], CPU, lambda _: None), []
    chain = ranks._chain
    monkeypatch.setattr(ranks, "_chain", lambda *way: (ways.append(way), chain(*way))[1])
    measure_point(ranks, ranks.begin)
    assert [part.number for _, part in ways] == [0, 1] * 2
    for times, part in ways:
        for leg, expected in zip(times.legs, modelled_time(comparison, case, part).legs, strict=True):
            np.testing.assert_equal(leg, expected)
    first, second = (times.legs[-2]["experts"] for times, _ in ways[:2])
    assert (first != second).any(), "halves differ"


def test_halves_hide_what_they_send_and_pay_for_being_halves(tmp_path: Path) -> None:
    """Slow links are hidden up to all computation; behind links that take no time two halves are no faster."""
    (links,) = (tmp_path / "slow.yaml",)
    one_way = {"latency_us": 0, "latency_basis": "assumed", "efficiency": 1, "efficiency_basis": "assumed"}
    for gbps, faster in ((2, True), (1e9, False)):
        links.write_text(yaml.safe_dump({"name": "test", "source": "test", "ranks_per_node": 8, "inter": None,
                                         "intra": {**one_way, "bandwidth_gbps": gbps}}))  # fmt: skip
        alone, halves = (totals(planned(tmp_path, links=str(links), overlap=one)) for one in ("none", "two_batch"))
        for label, alone_us in alone.items():
            assert (halves[label] < alone_us) == faster, (gbps, label)
            assert halves[label] > alone_us / 2


def test_shared_experts_beside_dispatch_take_no_longer(tmp_path: Path) -> None:
    alone, beside = (totals(planned(tmp_path, overlap=one)) for one in ("none", "shared"))
    for label, alone_us in alone.items():
        if "xshare" not in label:  # Its sum over ranks comes between.
            assert beside[label] < alone_us, label


def test_what_an_exchange_holds_of_a_device(tmp_path: Path) -> None:
    comparison = planned(tmp_path)
    assert held_share(comparison, None) == HELD_SMS / 132
    assert held_share(comparison, 24) == 24 / 132
    assert held_share(planned(tmp_path, overlap="none"), 24) == 0
    none_stated = replace(comparison, device=comparison.device.model_copy(update={"num_sms": None}))
    with pytest.raises(UserError, match="devices/h100-sxm: num_sms: expected more than the 24 multiprocessors"):
        held_share(none_stated, 24)


@pytest.mark.parametrize("sent", SENT_BYTES)
def test_rows_go_to_experts_as_asked_and_come_back_as_they_are(sent: str, tmp_path: Path) -> None:
    rows_RR = np.full((4, 4), 10_000)
    as_asked, as_they_are = (
        exchange_us(planned(tmp_path, f"layer.dispatch_dtype={one}"), rows_RR) for one in (sent, "null")
    )
    ratio = SENT_BYTES[sent] / 2
    weights_us = exchange_us(planned(tmp_path, "layer.dispatch_dtype=null"), rows_RR * 0)[0]
    assert (as_asked[1] == as_they_are[1]).all()
    assert (as_asked[0] <= as_they_are[0] + weights_us).all()
    assert as_asked[0][0] == pytest.approx(as_they_are[0][0] * ratio, rel=0.5)
    assert (as_asked[0] < as_they_are[0]).all() == (ratio < 1)


def test_where_layers_are_measured_no_halves_are(tmp_path: Path) -> None:
    assert planned(tmp_path, device="measured", overlap="shared").num_parts == 1


def test_ranks_that_are_routed_tell_the_share_of_the_work_done_within_a_factor_of_two(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a question's progress is shown, of draws as wholes and as micro-batches; work is scores made and routed."""
    path, work, told = tmp_path / "config.yaml", [0], [(0, 0)]
    sweep = {"workload.seed": [1, 2, 3], "emulate.overlap": ["none", "two_batch"]}
    path.write_text(yaml.safe_dump({**CONFIG, "sweep": sweep}))
    points = plan(path, [], VIRTUAL, on_cpu=True)
    select, make = PolicyForm.select, tokens_module.tokens

    def counted(form: PolicyForm, scores_TE: torch.Tensor, *rest: Any) -> Any:
        work[0] += scores_TE.numel()
        return select(form, scores_TE, *rest)

    def made(*asked: Any) -> tokens_module.Tokens:
        found = make(*asked)
        work[0] += found.workload_scores_TE.numel()
        return found

    monkeypatch.setattr(PolicyForm, "select", counted)
    monkeypatch.setattr(tokens_module, "tokens", made)
    batches = None
    for point in points:
        batches = batches if batches and batches.serves(point) else tokens_module.Batches(point, CPU)
        routed = lambda units: told.append((told[-1][0] + units, work[0]))  # noqa: E731
        ranks = ModelledRanks(point, point.cases, CPU, lambda _: None, routed, batches)
        measure_point(ranks, ranks.begin)
    assert told[-1][0] == sum(point.routing_work for point in points)
    shares = [(units / told[-1][0], done / work[0]) for units, done in told]
    far = [(share, done) for share, done in shares if share >= 0.1 and not share / 2 <= done <= 2 * share]
    assert not far
