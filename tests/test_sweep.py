"""Every point of a sweep is a comparison of its own, or the sweep is refused: none overwrites another."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import BaseModel
from trace_files import write_trace

from moe_ep_bench.bench.description import point_of
from moe_ep_bench.bench.plan import make_point, plan
from moe_ep_bench.bench.point import RANKS, ROUTING, VIRTUAL
from moe_ep_bench.config import Experiment
from moe_ep_bench.config.files import load_experiments
from moe_ep_bench.errors import UserError

CONFIG = {
    "name": "x",
    "model": {"preset": "deepseek-v2-lite", "scale": 0.03125},
    "workload": {"kind": "synthetic", "num_tokens": 64, "num_batches": 1},
    "layer": {"dtype": "float32", "ep_size": 2},
    "policies": [{"name": "topk"}],
    "emulate": {"links": "h100-nvlink4", "device": "h100-sxm"},
}

# For every key of a config that is no workload's or model's, another value than CONFIG or the default gives it.
OTHER = {
    "name": "y",
    "policies": [{"name": "token_drop", "capacity_factor": 1.0}],
    "claims": [{"source": "s", "policy": {"name": "topk"}, "paper": 1.0, "note": "n"}],
    "layer.dtype": "bfloat16",
    "layer.ep_size": 4,
    "layer.seed": 1,
    "layer.experts": "grouped",
    "layer.permute": "unfused",
    "measure.iterations": 6,
    "measure.breakdown_iterations": 1,
    "measure.warmup": 2,
    "measure.launches": 2,
    "measure.flush_l2": True,
    "measure.hold_us": 1000,
    "measure.timeout_s": 301,
    "emulate.links": "pcie5",
    "emulate.copies": "rank",
    "emulate.bandwidth_scale": 0.5,
    "emulate.device": "h20",
}
# Sections that enter every id whole, what only a GPU has, what adds cases in place of changing them, and whole models,
# which are planned otherwise (test_model_run).
LEFT_OUT = {"model", "workload", "layer.cuda_graph", "emulate.replication", "emulate.rebalance", "figures"}
LEFT_OUT |= {"scope", "whole.num_layers", "whole.context_length"}
# Of links by a measured exchange, and of modelled devices (test_exchanges).
LEFT_OUT |= {
    "emulate.exchange_sms",
    "emulate.sample_tokens",
    "emulate.sample_ranks",
    "emulate.overlap",
    "layer.dispatch_dtype",
}


def write(folder: Path, sweep: Mapping[str, Any]) -> Path:
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump({**CONFIG, "sweep": dict(sweep)}, sort_keys=False))
    return path


def keys_of(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Dotted keys of a config, down to those that hold values."""
    for name, field in model.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            yield from keys_of(kind, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"


def test_the_table_of_other_values_names_every_key() -> None:
    keys = {key for key in keys_of(Experiment) if not key.startswith("model.")} | {"model"}
    assert keys == set(OTHER) | LEFT_OUT


def definitions(one: Experiment, key: str) -> list[dict[str, Any]]:
    """What decides the ids of an experiment's comparison on every backend that takes it."""
    planned = [make_point(one, RANKS, 4, on_cpu=True), make_point(one, ROUTING, on_cpu=True)]
    if key.startswith("emulate."):  # The others it shares with ``run``, or refuses.
        planned.append(make_point(one, VIRTUAL, on_cpu=True))
    return [one.definition for one in planned]


@pytest.mark.parametrize("key", OTHER)
def test_a_key_makes_another_comparison_for_some_command_or_its_points_are_refused(key: str, tmp_path: Path) -> None:
    (before,) = load_experiments(write(tmp_path, {}), on_cpu=True)
    (after,) = load_experiments(write(tmp_path, {key: [OTHER[key]]}), on_cpu=True)
    if definitions(before, key) == definitions(after, key):
        path = write(tmp_path, {key: [OTHER[key], OTHER[key]]})
        for backend, how in ((RANKS, {"world_size": 4}), (ROUTING, {}), (VIRTUAL, {})):
            with pytest.raises(UserError, match=f"config.yaml: .*{key}"):
                plan(path, [], backend, **how, on_cpu=True)


# What is swept, and which commands have it that its points are one comparison.
SAME = {
    "repeated values": ({"workload.seed": [1, 2, 1]}, "run route emulate", "for workload.seed=1 and workload.seed=1"),
    "two words for one": ({"layer.ep_size": [None, 2]}, "run", "for layer.ep_size=None and layer.ep_size=2"),
    "what routing is blind to": ({"layer.dtype": ["float32", "bfloat16"]}, "route", "for layer.dtype=float32 and"),
    "what only emulate reads": (
        {"workload.seed": [1, 2], "emulate.bandwidth_scale": [1.0, 0.5]}, "run route",
        r"config.yaml: sweep: .*, emulate.bandwidth_scale=1.0 and .*, emulate.bandwidth_scale=0.5$",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SAME)
def test_points_that_a_command_cannot_tell_apart_are_refused_by_it_alone(name: str, tmp_path: Path) -> None:
    sweep, refused_by, expected = SAME[name]
    path = write(tmp_path, sweep)
    plans = {
        "run": lambda: plan(path, [], RANKS, 2, on_cpu=True),
        "route": lambda: plan(path, [], ROUTING),
        "emulate": lambda: plan(path, [], VIRTUAL, on_cpu=True),
    }
    for command, planned in plans.items():
        if command in refused_by.split():
            with pytest.raises(UserError, match=expected):
                planned()
        else:
            assert len(planned()) >= 2


PEAK, LINKS, EP_SIZE = "workload.peak_load", "emulate.links", "layer.ep_size"


def test_an_experiment_knows_where_in_the_sweep_it_stands_and_its_ids_do_not(tmp_path: Path) -> None:
    path = write(tmp_path, {PEAK: [2.0, 3.0], EP_SIZE: [1, 2]})
    swept = load_experiments(path, on_cpu=True)
    assert [one.point for one in swept] == [((PEAK, peak), (EP_SIZE, size)) for peak in (2.0, 3.0) for size in (1, 2)]
    (alone,) = load_experiments(path, [f"{PEAK}=2.0", f"{EP_SIZE}=1"], on_cpu=True)
    assert alone.point == ()
    ids = [[case.case_id for case in make_point(one, RANKS, 1, on_cpu=True).cases] for one in (swept[0], alone)]
    assert ids[0] == ids[1]
    (tmp_path / "mine.yaml").write_text("")
    path = write(tmp_path, {LINKS: ["h100-nvlink4", "mine.yaml"], EP_SIZE: [None]})
    described = [point_of(experiment) for experiment in load_experiments(path, on_cpu=True)]
    assert described == [{LINKS: "h100-nvlink4", EP_SIZE: None}, {LINKS: "mine.yaml", EP_SIZE: None}]


# ---- recordings beside a sweep ---------------------------------------------------------------------------------------


RECORDED = {
    "model.preset": "deepseek-v2-lite",
    "workload.trace": ["here.safetensors", "gone.safetensors"],
    "workload.layer": "all",
    "workload.tail": "popularity",
}


def recorded(folder: Path, *overrides: str, **entry: Any) -> list[Experiment]:
    """Experiments of a config that sweeps synthetic seeds, and recordings of another number of layers beside them."""
    write_trace(folder / "here.safetensors", num_experts=64, top_k=6, num_layers=3)
    path = write(folder, {"workload.seed": [1, 2], "recorded": [{**RECORDED, **entry}]})
    return load_experiments(path, overrides, on_cpu=True)


def test_recordings_follow_a_sweep_layer_by_layer_and_a_missing_one_is_named(tmp_path: Path, capfd: Any) -> None:
    experiments = recorded(tmp_path)
    assert [one.workload.kind for one in experiments] == ["synthetic"] * 2 + ["recorded"] * 3
    assert [one.workload.layer for one in experiments[2:]] == [0, 1, 2]
    assert {one.workload.num_tokens for one in experiments} == {64}, "what both kinds have is shared"
    trace = str(tmp_path / "here.safetensors")
    assert experiments[3].point == (("workload.trace", trace), ("workload.layer", 1))
    gone = tmp_path / "gone.safetensors"
    said = f"moe-ep-bench: left out: {gone}: no such file (docs/workloads.md says how to fetch it)\n"
    assert capfd.readouterr().err == said
    assert recorded(tmp_path) == experiments
    assert capfd.readouterr().err == "", "said once"
    (tmp_path / "here.safetensors").unlink()
    path = write(tmp_path, {"workload.seed": [1], "recorded": [RECORDED]})
    assert [one.workload.kind for one in load_experiments(path, on_cpu=True)] == ["synthetic"]


def test_an_override_holds_for_recordings_too_or_for_them_alone(tmp_path: Path) -> None:
    def found(*overrides: str) -> list[Any]:
        return [(one.workload.seed, getattr(one.workload, "layer", None)) for one in recorded(tmp_path, *overrides)]

    assert found("sweep.workload.layer=[1]") == [(1, None), (2, None), (0, 1)]
    assert found("workload.layer=2", "workload.seed=5") == [(5, None), (5, 2)]
    assert found("sweep.recorded=[]") == [(1, None), (2, None)]
    # A recording is of one model: with another one there is none.
    assert found("model.preset=olmoe-1b-7b") == found("sweep.model.preset=[olmoe-1b-7b]") == [(1, None), (2, None)]
    assert len(found("sweep.model.preset=[olmoe-1b-7b, deepseek-v2-lite]")) == 4 + 3
    assert {one.workload.tail for one in recorded(tmp_path, "workload.tail=uniform")[2:]} == {"uniform"}
