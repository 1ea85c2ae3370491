"""One config planned on every backend and for both subjects: the same cases on the same batches."""

from __future__ import annotations

import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import yaml
from trace_files import write_trace

from moe_ep_bench.analysis.store import load
from moe_ep_bench.bench import commands
from moe_ep_bench.bench.description import describe_timed_run
from moe_ep_bench.bench.plan import plan, plan_hash, plan_text, read_plan
from moe_ep_bench.bench.point import MODELLED, RANKS, REPLICATION, ROUTING, VIRTUAL, Point
from moe_ep_bench.bench.routing import Router
from moe_ep_bench.cli import main
from moe_ep_bench.errors import OK, UserError
from moe_ep_bench.facts.words import describe_workload, traffic_words

CONFIG = {
    "name": "tiny",
    "model": {"preset": "deepseek-v2-lite", "scale": 0.03125},
    "workload": {"kind": "synthetic", "num_tokens": 96, "num_batches": 2, "peak_load": 4.0, "sequence_length": 8},
    "layer": {"dtype": "float32", "ep_size": 4},
    "policies": [{"name": "topk"}, {"name": "token_drop", "capacity_factor": [1.0, 1.5]}],
    "emulate": {"links": "h100-nvlink4"},
    "sweep": {"workload.seed": [0, 1]},
}
SUBJECTS = {"layer": {}, "model": {"scope": "model", "whole": {"num_layers": 3}}}
DEVICE = "emulate.device=h100-sxm"
NUM_RANKS = 4


@pytest.fixture(params=SUBJECTS)
def config(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump({**CONFIG, **SUBJECTS[request.param]}))
    return path


def on(backend: str, config: Path, *overrides: str) -> list[Point]:
    device = [DEVICE] if backend == MODELLED else []
    return list(plan(config, [*overrides, *device], backend, NUM_RANKS, on_cpu=True))


def cases(comparison: Point) -> list[tuple[str, str, dict]]:
    return [(case.role, case.label, case.params) for case in comparison.cases]


def test_a_plan_has_the_same_cases_and_workloads_on_ranks_and_on_virtual_ones(config: Path) -> None:
    planned = {backend: on(backend, config) for backend in (RANKS, VIRTUAL, MODELLED)}
    for backend, comparisons in planned.items():
        assert [one.backend for one in comparisons] == [backend] * 2
        for one, real in zip(comparisons, planned[RANKS], strict=True):
            assert cases(one) == cases(real)
            assert one.ep_size == one.world_size == real.world_size == NUM_RANKS
            assert one.workloads.keys() == real.workloads.keys()
            for mine, theirs in zip(one.workloads.values(), real.workloads.values(), strict=True):
                assert torch.equal(mine.batch(1).scores_TE, theirs.batch(1).scores_TE)
            assert one.subject.workload == real.subject.workload


def test_ids_tell_points_backends_and_cases_apart(config: Path) -> None:
    comparisons = [one for backend in (RANKS, VIRTUAL, MODELLED) for one in on(backend, config)]
    ids = [*(one.comparison_id for one in comparisons), *(case.case_id for one in comparisons for case in one.cases)]
    assert len(set(ids)) == len(ids)
    again = [one for backend in (RANKS, VIRTUAL, MODELLED) for one in on(backend, config)]
    assert [one.comparison_id for one in again] == [one.comparison_id for one in comparisons]


def test_a_model_is_planned_layer_by_layer(config: Path) -> None:
    (one, _) = on(VIRTUAL, config)
    assert list(one.workloads) == ([None] if one.scope == "layer" else [1, 2])
    assert {workload.or_chance for workload in one.workloads.values()} == {one.scope == "model"}
    for layer in one.workloads:
        fraction = 0 if layer is None else (layer - 1) / one.model.num_moe_layers
        context = one.context(layer, 1, torch.zeros(2, dtype=torch.int64), None)
        assert (context.rank, context.num_ranks, context.layer_fraction) == (1, NUM_RANKS, fraction)
    for mine, theirs in itertools.pairwise(one.workloads.values()):
        assert not torch.equal(mine.batch(0).scores_TE, theirs.batch(0).scores_TE)


def test_ranks_beyond_a_group_of_experts_have_their_place_in_the_next_one(config: Path) -> None:
    one = on(RANKS, config, "layer.ep_size=2")[0]
    router, layer = Router(one, torch.device("cpu")), next(iter(one.workloads))
    shares = [router.tokens(layer, 0, rank) for rank in range(NUM_RANKS)]
    assert [(share.rank, share.context.rank) for share in shares] == [(0, 0), (1, 1), (2, 0), (3, 1)]


def test_routing_has_a_baseline_and_policies_that_differ_from_it(config: Path) -> None:
    if "scope" in yaml.safe_load(config.read_text()):  # which this command refuses
        return
    routed, real = on(ROUTING, config)[0], on(RANKS, config)[0]
    assert [case.label for case in routed.cases] == ["native", *(case.label for case in real.cases[3:5])]
    padded = on(ROUTING, config, "workload.padding_per_rank=1")[0]
    assert [case.label for case in padded.cases][:2] == ["native", "topk"], "which knows of padding, unlike native"
    assert torch.equal(routed.workload.batch(0).scores_TE, real.workload.batch(0).scores_TE)


def test_only_virtual_ranks_replicate_experts(config: Path) -> None:
    wanted = "emulate.replication=[{spare_per_rank: 4}]"
    assert REPLICATION not in {case.role for case in on(RANKS, config, wanted)[0].cases}
    if on(RANKS, config)[0].scope == "model":  # with which it is refused
        return
    (one, _) = on(MODELLED, config, wanted)
    (case,) = (case for case in one.cases if case.role == REPLICATION)
    assert one.extra_bytes_per_rank(case) > 0
    assert on(MODELLED, config, "emulate.replication=[{spare_per_rank: 48}]"), "every rank has all 64 experts"


def test_a_point_is_one_of_the_sweep(config: Path) -> None:
    (second,) = plan(config, [], RANKS, NUM_RANKS, on_cpu=True, point=1)
    assert second.experiment.point == (("workload.seed", 1),)


def test_a_sweep_that_measures_somewhere_takes_the_cpus_values_everywhere(tmp_path: Path) -> None:
    values = {
        "model": {"preset": "olmoe-1b-7b", "scale": 0.03125},
        "workload": {"kind": "synthetic", "num_tokens": 64, "num_batches": 1},
        "layer": {"ep_size": 2},
        "policies": [{"name": "topk"}],
        "emulate": {"links": "h100-nvlink4"},
        "sweep": {"emulate.device": ["h100-sxm", "measured"]},
        "on_cpu": {"layer.dtype": "float32"},
    }
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(values))
    for overrides, dtype in (((), "float32"), (("emulate.device=h100-sxm",), "bfloat16")):
        planned = plan(tmp_path / "config.yaml", overrides, VIRTUAL, on_cpu=True, try_out=False)
        assert {one.experiment.layer.dtype for one in planned} == {dtype}


def test_a_batch_that_cannot_meet_its_targets_is_found_before_any_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    workload = {"kind": "synthetic", "num_tokens": 5, "num_batches": 2, "batch_peak_load": 1.01}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump({**CONFIG, "workload": workload, "layer": {"ep_size": 1}}))
    with pytest.raises(UserError, match=r"config.yaml: workload.batch_peak_load: expected"):
        plan(tmp_path / "config.yaml", [], RANKS, 1, on_cpu=True, try_out=False)
    monkeypatch.setattr("moe_ep_bench.bench.plan._FEW_SCORES", 0)  # as of many tokens, which no plan solves for
    (first, _) = plan(tmp_path / "config.yaml", [], RANKS, 1, on_cpu=True, try_out=False)
    with pytest.raises(
        UserError, match=r"^DeepSeek-V2-Lite .* 5 tokens, peak load 1\.01 in each batch: batch_peak_load: expected"
    ):
        describe_timed_run(mock.Mock(), "run", [first])


@pytest.mark.parametrize(
    ("stages", "arrangement", "words"),
    [
        (("prefill", "prefill"), "sequences", "a + b, prefill, uniform tail, layer 1"),
        (("decode", "prefill"), "sequences", "a + b, prefill, uniform tail, layer 1"),
        (("decode", "decode"), "sequences", "a + b, decode, uniform tail, layer 1"),
        (("prefill", "prefill"), "decode", "a + b, decode, uniform tail, layer 1"),
    ],
)
def test_a_title_has_the_domains_of_recordings_and_their_stage(
    stages: tuple[str, str], arrangement: str, words: str, tmp_path: Path
) -> None:
    shape = {"length_S": (16, 16), "num_experts": 64, "top_k": 6}
    for name, stage in zip("ab", stages, strict=True):
        write_trace(tmp_path / f"{name}.safetensors", **shape, phase=stage, domain=name)
    workload = {"kind": "recorded", "trace": ["a.safetensors", "b.safetensors"], "layer": 1, "tail": "uniform"}
    workload |= {"num_tokens": 4, "num_batches": 1, "arrangement": arrangement}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump({**CONFIG, "workload": workload, "sweep": {}}))
    (one,) = plan(tmp_path / "config.yaml", [], ROUTING)
    assert one.title == f"DeepSeek-V2-Lite x 0.03125, EP 4, 4 tokens (1 a rank), {words}"


@pytest.mark.parametrize(
    ("num_layers", "source_layers", "words"),
    [
        (26, None, "layer 2 (recorded row 1)"),  # the first of 27 is dense
        (26, "0,1,2", "layer 2 (recorded row 1)"),
        (2, "3,7", "layer 7 (recorded row 1)"),
        (2, "1,2", "layer 2 (recorded row 1)"),
        (3, "2,1,3", "layer 1"),
        (2, "0,2", "layer 1"),  # numbers that the model does not route, so that they are not its own
        (2, "2", "layer 1"),
        (2, "first,second", "layer 1"),
        (2, f"1,{'9' * 5000}", "layer 1"),
        (2, None, "layer 1"),
    ],
)
def test_a_row_of_a_recording_is_called_what_the_model_calls_its_layer(
    num_layers: int, source_layers: str | None, words: str, tmp_path: Path
) -> None:
    named = {} if source_layers is None else {"source_layers": source_layers}
    sizes = {"length_S": (16, 16), "num_experts": 64, "top_k": 6, "num_layers": num_layers}
    write_trace(tmp_path / "a.safetensors", **sizes, **named)
    workload = {"kind": "recorded", "trace": "a.safetensors", "layer": 1, "tail": "uniform"}
    workload |= {"num_tokens": 4, "num_batches": 1}
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump({**CONFIG, "workload": workload, "sweep": {}}))
    (one,) = plan(path, [], ROUTING)
    assert one.title.endswith(f", uniform tail, {words}")
    assert f"tiny, {words}, words, recorded in" in describe_workload(one.subject)


def test_rows_that_are_joined_keep_what_the_model_calls_them(tmp_path: Path) -> None:
    sizes = {"length_S": (16, 16), "num_experts": 64, "top_k": 6, "num_layers": 3}
    write_trace(tmp_path / "a.safetensors", **sizes, source_layers="3,7,9")
    workload = {"kind": "recorded", "trace": "a.safetensors", "layer": "all", "tail": "uniform"}
    workload |= {"num_tokens": 8, "num_batches": 2}
    path, out = tmp_path / "config.yaml", tmp_path / "out"
    path.write_text(yaml.safe_dump({**CONFIG, "workload": workload, "sweep": {}}))
    assert main(["route", str(path), "--out", str(out)]) == OK
    (one,) = load(out).comparisons
    assert "tiny, 3 layers from 3 to 9 (recorded rows 0 to 2), words, " in describe_workload(one.facts)


@pytest.mark.parametrize(
    ("own", "words"),
    [
        ({"peak_load": None}, "single domain"),
        ({"peak_load": 4}, "single domain, peak load 4"),
        ({"batch_peak_load": 4}, "single domain, peak load 4 in each batch"),
    ],
)
def test_a_title_names_what_takes_the_place_of_a_skews_own_load(
    own: dict[str, float | None], words: str, tmp_path: Path
) -> None:
    workload = {
        "kind": "synthetic",
        "num_tokens": 64,
        "num_batches": 1,
        "skew": "single_domain",
        **own,
    }
    config = {**CONFIG, "workload": workload, "sweep": {}, "model": {"preset": "olmoe-1b-7b"}, "layer": {"ep_size": 1}}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    (one,) = plan(tmp_path / "config.yaml", [], ROUTING)
    assert traffic_words(one.subject.workload) == words


def test_ranks_carry_out_the_launchers_plan_without_the_config(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    planned = on(RANKS, config)
    text = plan_text(planned)
    config.unlink()
    monkeypatch.setattr(commands, "launched_plan", lambda: text)
    alone: Any = SimpleNamespace(
        world_size=NUM_RANKS, sharing=None, agree=lambda act: act(), all_gather=lambda facts: [facts]
    )
    alone.report_error = bool
    found = commands._agreed_plan(alone, config, [], 0, None)
    assert [one.definition for one in found] == [one.definition for one in planned]
    assert [cases(one) for one in found] == [cases(one) for one in planned]
    assert [one.experiment.point for one in found] == [one.experiment.point for one in planned]
    assert [one.experiment for one in found] == [one.experiment for one in planned]
    assert plan_hash(found) == plan_hash(planned) != plan_hash(planned[:1])
    assert {one.world_size for one in read_plan(text, 2 * NUM_RANKS)} == {2 * NUM_RANKS}, "a node has more of them"
    with pytest.raises(UserError, match="the plan: expected the cases of"):
        read_plan(text.replace(plan_hash(planned), plan_hash(planned[:1])), NUM_RANKS)
    with pytest.raises(UserError, match="the plan: expected the cases of"):
        read_plan(text.replace('"seed": 1', '"seed": 2'), NUM_RANKS)


def test_torchrun_starts_each_launch_of_the_point_that_was_asked_for(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[list[str]] = []
    monkeypatch.setattr(commands, "torchrun", lambda commands, *_, **__: started.extend(commands))
    commands.launch(config, tmp_path / "out", ["measure.launches=2"], NUM_RANKS, force=True, point=1)
    alike = ["run", str(config), "--out", str(tmp_path / "out"), "--set=measure.launches=2", "--point", "1", "--force"]
    assert started == [[*alike, "--launch", "0"], [*alike, "--launch", "1"]]
    started.clear()
    commands.launch(config, tmp_path / "out", [], NUM_RANKS)
    assert started == [["run", str(config), "--out", str(tmp_path / "out"), "--launch", "0"]]
