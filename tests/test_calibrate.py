"""Calibration: what is sent, what the fit makes of it, and one on two real gloo ranks."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_run import free_port

from moe_ep_bench.cost_model.calibrate import (
    Exchange,
    check,
    exchanges,
    fit_link,
    fullest_bytes,
    link_from,
    medians,
)
from moe_ep_bench.cost_model.links import Link, Links
from moe_ep_bench.runtime.exit_codes import OK
from moe_ep_bench.runtime.ranks import Ranks

REPOSITORY = Path(__file__).resolve().parents[1]


@given(num_ranks=st.integers(2, 12), num_bytes=st.integers(2**10, 2**30), split=st.sampled_from(["even", "hot"]))
def test_the_fullest_rank_has_the_bytes_that_were_asked_for(num_ranks: int, num_bytes: int, split: str) -> None:
    bytes_RR = Exchange(split, num_bytes).matrix(num_ranks)
    assert num_bytes <= fullest_bytes(bytes_RR) < num_bytes + num_ranks
    assert bytes_RR.all()


def test_a_hot_rank_receives_four_times_what_others_do_and_the_slowest_rank_counts() -> None:
    bytes_RR = Exchange("hot", 12_000).matrix(4)
    assert bytes_RR.tolist() == [[4000, 1000, 1000, 1000]] * 4
    assert (fullest_bytes(bytes_RR), fullest_bytes(bytes_RR, "half")) == (12_000, 15_000)
    assert Exchange("even", 12_000).matrix(4).tolist() == [[4000] * 4] * 4
    assert exchanges(5000) == [Exchange(split, size) for size in (1024, 2048, 4096) for split in ("even", "hot")]
    rows = [("even", 8, *row) for row in ((0, 0, 1), (0, 1, 9), (1, 0, 8), (1, 1, 2), (2, 0, 1), (2, 1, 99))]
    samples = pd.DataFrame(rows, columns=["split", "num_bytes", "repetition", "rank", "time_us"])
    assert medians(samples)["us"].tolist() == [9], "the median of repetitions"


SIZES = [2**power for power in range(10, 27)]


def made_up(num_ranks: int, noise: float = 0.0, duplex: str = "full") -> pd.DataFrame:
    """Median times of a link of 12 us and 300 GB/s, in microseconds."""
    random = np.random.default_rng(0)
    rows = []
    for size, split in itertools.product(SIZES, ("even", "hot")):
        fullest = fullest_bytes(Exchange(split, size).matrix(num_ranks), duplex)
        rows.append((split, size, (12.0 + fullest / 3e5) * random.lognormal(0, noise)))
    return pd.DataFrame(rows, columns=["split", "num_bytes", "us"])


def told(link: Link, times: pd.DataFrame, num_ranks: int) -> np.ndarray:
    """What a link says of every exchange."""
    links = Links(name="mine", source="a test", ranks_per_node=num_ranks, intra=link, inter=None)
    exchanged = (Exchange(*row) for row in zip(times["split"], times["num_bytes"], strict=True))
    return np.array([links.all_to_all_us(exchange.matrix(num_ranks)).max() for exchange in exchanged])


def test_a_link_that_was_measured_without_noise_is_found_again() -> None:
    times = made_up(4)
    link, _ = link_from(4, times)
    plain = Link.model_validate(link.model_dump(exclude={"curve"}))
    assert (plain.latency_us, plain.bandwidth_gbps) == pytest.approx((12, 300), rel=1e-3)
    for found in (plain, link):
        np.testing.assert_allclose(told(found, times, 4), times["us"], rtol=1e-3)


@pytest.mark.parametrize("duplex", ["full", "half"])
@pytest.mark.parametrize("num_ranks", [2, 8])
def test_skewed_splits_tell_full_from_half_duplex(duplex: str, num_ranks: int) -> None:
    times = made_up(num_ranks, noise=0.05, duplex=duplex)
    link, _ = link_from(num_ranks, times)
    assert link.duplex == duplex
    assert link.bandwidth_gbps == pytest.approx(300, rel=0.06)
    np.testing.assert_allclose(told(link, times, num_ranks), times["us"], rtol=0.25)


def test_a_fit_minds_relative_errors_and_refuses_times_that_do_not_grow() -> None:
    """Least squares of the times themselves would let two per cent at 1 GB outweigh the whole latency."""
    sizes = 2.0 ** np.arange(10, 31)
    exact_us = 10.6 + sizes / 370e3
    fit = fit_link(sizes, exact_us)
    assert fit == pytest.approx((10.6, 370, 0), rel=1e-9, abs=1e-9)
    times_us = exact_us.copy()
    times_us[-1] *= 1.02
    fit = fit_link(sizes, times_us)
    assert fit.latency_us == pytest.approx(10.6, rel=0.02)
    predicted_us = fit.latency_us + sizes / fit.bandwidth_gbps / 1e3
    assert fit.error == pytest.approx(np.sqrt(np.mean((predicted_us / times_us - 1) ** 2)))
    with pytest.raises(ValueError, match="times that grow with the bytes"):
        fit_link([1024, 2048, 4096], [30.0, 20.0, 10.0])


def test_noise_never_makes_larger_messages_faster() -> None:
    times = made_up(2, noise=0.3)
    link, _ = link_from(2, times)
    assert (np.diff(times.loc[times["split"] == "even", "us"]) < 0).any()  # or there was nothing to mend
    assert (np.diff([us for _, us in link.curve.root]) >= 0).all()


def start(out: Path, per_node: int) -> list[subprocess.CompletedProcess]:
    """``calibrate`` on two gloo ranks, ``per_node`` of them said to share a node."""
    jobs, port = [], free_port()
    program = (
        "import sys; from pathlib import Path; from moe_ep_bench.cost_model.calibrate import calibrate;"
        f"sys.exit(calibrate(Path({str(out)!r}), max_bytes=2**21, repetitions=5))"
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
    assert len(link.curve.root) == 12  # 1 KB to 2 MB
    assert link.latency_basis == link.efficiency_basis == "measured"
    assert f"modelled by links/mine: {'inside' if per_node == 2 else 'between'}" in first.stdout
    assert second.stdout == ""

    table = pd.read_parquet(out.with_name("mine.samples.parquet"))
    assert len(table) == 12 * 2 * 5 * 2  # sizes x splits x repetitions x ranks
    assert (table["time_us"] > 0).all()
    assert (table["num_bytes"].diff() < 0).sum() == 3, "four passes through all sizes"
    assert set(table["rank"]) == {0, 1}
    assert set(table["split"]) == {"even", "hot"}
    largest = table[(table["num_bytes"] == 2**21) & (table["split"] == "even")]
    slowest = largest.groupby("repetition")["time_us"].max().median()
    assert link.curve.root[-1][1] >= slowest * 0.999  # the last of rising times is never below what was measured
    assert sorted(path.name for path in out.parent.iterdir()) == ["mine.samples.parquet", "mine.yaml"]


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
