"""benchmarks/experts.py at toy sizes: its permutations give tokens back, and its flushes differ in the sweep alone."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))
import experts

from moe_ep_bench.models import load_model

pytestmark = pytest.mark.seam
CPU = torch.device("cpu")


def test_every_permutation_gives_each_token_back_as_often_as_it_has_experts() -> None:
    model = load_model("olmoe-1b-7b").scaled(1 / 32)
    copy, *ways = experts.permutations(model, 24, torch.float32, CPU)
    hidden_TD = torch.randn(24, model.hidden_size, generator=torch.Generator().manual_seed(1))
    assert [one.name for one in ways] == ["permute and unpermute, indexed", "permute and unpermute, megatron"]
    for one in ways:
        torch.testing.assert_close(one.run(), hidden_TD * model.top_k)
        assert one.bytes == copy.bytes == 2 * (1 + model.top_k) * hidden_TD.nbytes
    assert experts.no_transformer_engine(CPU).startswith("layer.experts: te needs a GPU")


def test_flushes_differ_in_the_sweep_and_stay_outside_of_what_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []

    class Flush:
        def __init__(self, device: torch.device, *, sweeps: bool = True) -> None:
            self.sweeps = sweeps

        def __call__(self) -> None:
            made.append(self.sweeps)

    monkeypatch.setattr(experts, "CacheFlush", Flush)
    monkeypatch.setattr(experts, "SMALL_BYTES", 64)
    with_sweep, without = experts.flushes(CPU)
    assert (with_sweep.bytes, without.bytes) == (128, 128)
    times = experts.timed([with_sweep, without], CPU, rounds=2)
    assert made == [True, False] * 5
    assert {name: len(values) for name, values in times.items()} == {with_sweep.name: 2, without.name: 2}
