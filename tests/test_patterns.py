"""Other benchmarks' imbalances: each has the loads that its source states, on any ranks, row by row."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from numpy.typing import NDArray

from moe_ep_bench import cli
from moe_ep_bench.config.files import load_experiments
from moe_ep_bench.errors import UserError
from moe_ep_bench.workload import synthetic
from moe_ep_bench.workload.synthetic import SyntheticWorkload

E, K, T = 32, 4, 4096


def workload(pattern: str, **fields: Any) -> SyntheticWorkload:
    known = {"num_experts": E, "top_k": K, "num_tokens": T, "num_batches": 8, "sequence_length": 64, "seed": 3}
    return SyntheticWorkload(pattern=pattern, **{**known, **fields})


def quotas(found: SyntheticWorkload, index: int) -> NDArray[np.int64]:
    sizes = found.num_experts, found.top_k, found.num_tokens, found.seed
    return synthetic.quotas(found.pattern, index, *sizes)


def load(found: SyntheticWorkload, index: int = 0) -> NDArray[np.float64]:
    """Pairs of each expert over the mean."""
    ids_TK = found.batch(index).scores_TE.topk(K, dim=1).indices
    load_E = torch.bincount(ids_TK.flatten(), minlength=E).numpy()
    assert load_E.sum() == T * K
    return load_E * E / (T * K)


# Mean load of each quarter of the experts, over the mean of all, from the definitions.
HOT = 0.75 * 4 + 0.25
QUARTERS = {
    ("megatron_w0", 0): [1, 1, 1, 1],
    ("megatron_w1", 5): [HOT, 0.25, 0.25, 0.25],
    ("megatron_w2", 0): [HOT, 0.25, 0.25, 0.25],
    ("megatron_w3", 0): [1, 1, 1, 1],
    ("megatron_w5", 0): [0, 0, 2, 2],
    ("megatron_w6", 2): [HOT, 0.25, 0.25, 0.25],
    ("megatron_w6", 3): [0.25, HOT, 0.25, 0.25],
    ("megatron_w7", 2): [1, 1, 1, 1],
    ("megatron_w7", 3): [2.5, 0.5, 0.5, 0.5],
}


@pytest.mark.parametrize(("pattern", "index"), QUARTERS)
def test_loads_are_those_of_the_definition(pattern: str, index: int) -> None:
    load_E = load(workload(pattern), index)
    assert load_E.reshape(4, -1).mean(axis=1) == pytest.approx(QUARTERS[pattern, index], abs=0.03)
    # Inside a quarter all are alike, but for chance and what is spread over every other expert.
    if pattern == "megatron_w3":
        assert load_E[::2] == pytest.approx(0.75 * 2 + 0.25, abs=0.2)
        assert load_E[1::2] == pytest.approx(0.25, abs=0.1)
    elif pattern == "megatron_w0":
        assert (load_E == 1).all()
    else:
        assert np.ptp(load_E.reshape(4, -1), axis=1).max() < 0.4
    if pattern == "megatron_w5":
        assert (load_E[: E // 2] == 0).all()


@pytest.mark.parametrize("exponent", [1.01, 1.2])
@pytest.mark.parametrize("num_tokens", [4, T])
def test_power_law_loads_are_its_quotas(exponent: float, num_tokens: int) -> None:
    found = workload(f"power_law_{exponent}", num_tokens=num_tokens)
    quota_E = quotas(found, 0)
    assert quota_E.sum() == num_tokens * K
    assert (quota_E >= 0).all()
    assert (quota_E <= num_tokens).all()
    ids_TK = found.batch(0).scores_TE.topk(K, dim=1).indices
    assert torch.bincount(ids_TK.flatten(), minlength=E).tolist() == quota_E.tolist()
    assert not np.array_equal(quota_E, quotas(found, 1))


def test_power_laws_are_as_skewed_as_the_distribution_says() -> None:
    """Sorted weights lie at the inverse distribution function of evenly spread shares, computed number by number."""
    size, total = 256, T * K
    for exponent in (1.01, 1.2):
        many = [quotas(workload(f"power_law_{exponent}", num_experts=size, seed=seed), 0) for seed in range(40)]
        low, high = 1.0 ** (1 - exponent), (0.8 * T) ** (1 - exponent)
        exact = [(low + (high - low) * (place + 0.5) / size) ** (1 / (1 - exponent)) for place in range(size)]
        median = float(np.median(exact)) / sum(exact) * total
        assert np.median(many) == pytest.approx(median, rel=0.25)


CONFIG = {
    "model": {"preset": "olmoe-1b-7b", "scale": 0.03125},
    "workload": {"kind": "synthetic", "num_tokens": 256, "num_batches": 1, "skew": "megatron_w1"},
    "layer": {"ep_size": 4},
    "policies": [{"name": "token_drop", "capacity_factor": 1.0}],
}


def test_a_pattern_is_a_skew_of_a_config(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(CONFIG))
    assert cli.main(["route", str(path), "--dry-run"]) == 0
    assert "megatron w1" in capsys.readouterr().out
    for change, message in (
        (["workload.peak_load=3"], "skew: megatron_w1 prescribes all loads; expected no peak_load"),
        (["workload.skew=megatron_w4"], "workload.skew: expected mixed, single_domain, worst_layer, megatron_w0"),
    ):
        with pytest.raises(UserError, match=message):
            load_experiments(path, change, on_cpu=True)
    assert cli.main(["route", str(path), "--dry-run", "--set", "model.preset=deepseek-v3"]) == 2
    assert "skew: megatron_w1 knows no groups of experts; the model has 8" in capsys.readouterr().err
