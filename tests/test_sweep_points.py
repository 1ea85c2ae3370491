"""A sweep from the config to run.json: an experiment knows where it stands."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

import plot_results
from moe_ep_bench.bench.comparison import RANKS
from moe_ep_bench.bench.description import describe_experiment, describe_point
from moe_ep_bench.bench.plan import compare
from moe_ep_bench.config.files import load_experiments

PEAK, LINKS, EP_SIZE = "workload.peak_load", "emulate.links", "layer.ep_size"


def write_config(folder: Path, **sections: object) -> Path:
    config = {
        "name": "x",
        "model": {"preset": "olmoe-1b-7b", "scale": 0.03125},
        "workload": {"kind": "synthetic", "num_tokens": 256, "num_batches": 1, "peak_load": 2.0},
        "policies": [{"name": "topk"}],
        **sections,
    }
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(config, sort_keys=False))
    return path


def test_an_experiment_knows_where_in_the_sweep_it_stands(tmp_path: Path) -> None:
    path = write_config(tmp_path, sweep={PEAK: [2.0, 3.0], EP_SIZE: [1, 2]})
    points = [experiment.point for experiment in load_experiments(path, on_cpu=True)]
    assert points == [((PEAK, peak), (EP_SIZE, size)) for peak in (2.0, 3.0) for size in (1, 2)]
    alone = load_experiments(path, [f"{PEAK}=3", f"{EP_SIZE}=2"], on_cpu=True)
    assert [experiment.point for experiment in alone] == [()]


def test_the_point_is_described_without_folders_and_changes_no_id(tmp_path: Path) -> None:
    swept = load_experiments(write_config(tmp_path, sweep={PEAK: [2.0, 3.0]}), on_cpu=True)[0]
    (alone,) = load_experiments(write_config(tmp_path), on_cpu=True)
    one, other = (compare(experiment, RANKS, 1, on_cpu=True) for experiment in (swept, alone))
    assert [case.case_id for case in one.cases] == [case.case_id for case in other.cases]
    assert describe_experiment(swept) == describe_experiment(alone)
    (tmp_path / "mine.yaml").write_text("")
    path = write_config(tmp_path, sweep={LINKS: ["h100-nvlink4", "mine.yaml"], EP_SIZE: [None]})
    described = [describe_point(experiment) for experiment in load_experiments(path, on_cpu=True)]
    assert described == [{LINKS: "h100-nvlink4", EP_SIZE: None}, {LINKS: "mine.yaml", EP_SIZE: None}]


@pytest.mark.parametrize("name", ["skew", "experts-per-rank", "links"])
def test_shipped_sweeps_are_of_one_key_and_on_a_modelled_device(name: str) -> None:
    root = Path(plot_results.__file__).parent
    experiments = load_experiments(root / "configs" / f"whatif-{name}.yaml", on_cpu=False)
    assert len(experiments) >= 5
    for experiment in experiments:
        ((key, _),) = experiment.point
        assert experiment.emulate.device == "h100-sxm"
        assert experiment.workload.num_batches >= 10, "an interval needs as many"
        assert len(experiment.make_policies()) == 8
        assert f"[whatif-{name}](../configs/whatif-{name}.yaml) | `{key}`" in (root / "docs" / "whatif.md").read_text()
