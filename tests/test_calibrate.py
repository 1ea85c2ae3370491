"""Calibration: what is sent and what counts, and one on two real gloo ranks."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_run import free_port

from moe_ep_bench.cost_model import calibrate
from moe_ep_bench.cost_model.calibrate import check, link_of, share_bytes
from moe_ep_bench.cost_model.links import Links
from moe_ep_bench.errors import OK
from moe_ep_bench.runtime.ranks import Ranks

REPOSITORY = Path(__file__).resolve().parents[1]


@given(num_ranks=st.integers(2, 12), most_bytes=st.integers(2**11, 2**30))
def test_sizes_double_from_1_kb_to_the_most(num_ranks: int, most_bytes: int) -> None:
    sizes = np.array(share_bytes(num_ranks, most_bytes)) * (num_ranks - 1)
    assert (np.arange(len(sizes)) == np.log2(sizes / 2**10).round(2).astype(int)).all()
    assert sizes[-1] - num_ranks < most_bytes < 2 * sizes[-1]


def test_of_every_message_the_median_of_the_slowest_ranks_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Six repetitions in four passes, of which the first two have two each."""
    mine, theirs, sent = itertools.count(1), [[0, 9, 0, 9, 0, 9], [50] * 6], []
    monkeypatch.setattr(calibrate, "clock_for", lambda _: None)
    monkeypatch.setattr(calibrate, "_exchange", lambda _, share: partial(sent.append, share))
    monkeypatch.setattr(calibrate, "time_us", lambda *_: next(mine))
    ranks = SimpleNamespace(device=torch.device("cpu"), all_gather=lambda times: [times, np.array(theirs)])
    found = calibrate.measure(ranks, [7, 8], 6)
    # This rank's: 1, 2, 5, 6, 9, 11 and 3, 4, 7, 8, 10, 12.
    assert found.tolist() == [np.median([1, 9, 5, 9, 9, 11]), 50]
    assert sent == [7] * 3 + [8] * 3 + [7] * 3 + [8] * 3 + [7] * 3 + [8] * 3 + [7] * 3 + [8] * 3


@pytest.mark.parametrize("disturbed", [-1, -2, -5, 0])
@pytest.mark.parametrize("factor", [0.5, 3.0])
def test_a_link_has_the_measured_curve_and_a_bandwidth_that_no_one_message_sets(disturbed: int, factor: float) -> None:
    """12 us and 300 GB/s."""
    share_N = share_bytes(4, 2**26)
    sizes = np.array(share_N) * 3
    times_us = 12 + sizes / 3e5
    assert link_of(4, share_N, times_us).latency_us == pytest.approx(12, rel=1e-3)
    np.testing.assert_allclose(link_of(4, share_N, times_us).time_us(sizes), times_us, atol=1e-3)
    times_us[disturbed] *= factor
    assert link_of(4, share_N, times_us).bandwidth_gbps == pytest.approx(300, rel=1e-3)
    times_us[: len(sizes) // 2] = 12 + sizes[: len(sizes) // 2] / 1e3  # Small ones by another protocol.
    assert link_of(4, share_N, times_us).bandwidth_gbps == pytest.approx(300, rel=1e-3)
    with pytest.raises(ValueError, match="expected times that grow with the bytes"):
        link_of(4, share_N, 12 - sizes / 1e9)


def test_two_messages_are_enough_for_a_link() -> None:
    assert link_of(2, [1024, 2048], np.array([10.0, 12.048])).bandwidth_gbps == pytest.approx(0.5)


def start(out: Path, per_node: int) -> list[subprocess.CompletedProcess]:
    """``calibrate`` on two gloo ranks, ``per_node`` of them said to share a node."""
    jobs, port = [], free_port()
    program = (
        "import sys; from pathlib import Path; from moe_ep_bench.cost_model.calibrate import calibrate;"
        f"sys.exit(calibrate(Path({str(out)!r}), max_bytes=2**21, repetitions=15))"
    )
    for rank in range(2):
        torchrun = {
            "RANK": rank, "LOCAL_RANK": rank % per_node, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": per_node,
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": 1, "PYTHONPATH": REPOSITORY,
        }  # fmt: skip
        env = {**os.environ, **{key: str(value) for key, value in torchrun.items()}}
        command = [sys.executable, "-c", program]
        jobs.append(subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
    try:
        ended = [(job, *job.communicate(timeout=600)) for job in jobs]
    finally:
        for job in jobs:
            job.kill()  # nothing where it has ended
    return [subprocess.CompletedProcess(job.args, job.returncode, *texts) for job, *texts in ended]


@pytest.mark.parametrize("per_node", [2, 1], ids=["one node", "two nodes"])
def test_two_ranks_measure_their_links(per_node: int, tmp_path: Path) -> None:
    out = tmp_path / "new" / "mine.yaml"
    first, second = start(out, per_node)
    assert (first.returncode, second.returncode) == (OK, OK), first.stderr + second.stderr
    links = Links.load(str(out))
    link, other = (links.intra, links.inter) if per_node == 2 else (links.inter, links.intra)
    assert other is None
    assert links.ranks_per_node == per_node
    assert links.source.startswith("measured on 20")
    assert "2 ranks" in links.source
    assert "gloo" in links.source
    assert link.latency_basis == link.efficiency_basis == "measured"
    assert link.duplex == ("half" if per_node == 2 else "full"), "ranks of a host copy"
    assert f"modelled by links/mine: {'inside' if per_node == 2 else 'between'}" in first.stdout
    assert second.stdout == ""

    assert [size for size, _ in link.curve.root] == [2.0**power for power in range(10, 22)]
    assert [path.name for path in out.parent.iterdir()] == ["mine.yaml"]


def test_wrong_options_are_told_in_one_line(tmp_path: Path) -> None:
    out = tmp_path / "mine.yaml"
    (tmp_path / "file").touch()

    def checked(
        place: Path = out, most: int = 2**20, repetitions: int = 5, *, rank: int = 0, size: int = 2, local: int = 1
    ) -> None:
        check(Ranks(rank, size, local, torch.device("cpu"), None), place, most, repetitions)

    checked()
    checked(most=2048, repetitions=1, local=2)
    checked(tmp_path / "file" / "mine.yaml", rank=1)  # The first rank looks into the folder for all.
    for words, call in {
        "--max-bytes: expected at least 2048, got 2047": partial(checked, most=2047),
        "--repetitions: expected at least 1, got 0": partial(checked, repetitions=0),
        "expected at least 2 ranks, got 1": partial(checked, size=1),
        "expected ranks of one node, or one on each": partial(checked, size=4, local=2),
        "--out: expected a path that ends in .yaml": partial(checked, out.with_suffix(".yml")),
        "--out: folder .*file: is a file; expected a dir": partial(checked, tmp_path / "file" / "mine.yaml"),
    }.items():
        with pytest.raises(ValueError, match=words) as error:
            call()
        assert "\n" not in str(error.value)
