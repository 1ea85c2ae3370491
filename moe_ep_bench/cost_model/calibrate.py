"""``calibrate``: measure the all-to-all of this machine's ranks and write it as a links file.

Under torchrun the ranks exchange messages of 1 KB and up, evenly and with one hot rank that receives four times as
much as the others. A message's size is the most that any rank sends to, or receives from, other ranks. Of each size
the median over repetitions of the slowest rank's time counts. Latency and bandwidth are fitted to both splits
together, for full and for half duplex, and the better fit is kept: only skewed splits tell the two apart. The curve is
that of even splits, so its error on skewed ones tests the model.

Ranks of one node measure the link inside it; one rank on each of several nodes, that between them.

Shapes: R = ranks, N = exchanges.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd
import torch
import torch.distributed as dist
import yaml
from numpy.typing import ArrayLike

from moe_ep_bench.cost_model.links import Curve, Duplex, Link, Links, busy_bytes
from moe_ep_bench.errors import UserError
from moe_ep_bench.files import atomic_path, make_folder, writing_to
from moe_ep_bench.machine import provenance
from moe_ep_bench.runtime.device import check_num_ranks
from moe_ep_bench.runtime.exit_codes import OK
from moe_ep_bench.runtime.guard import Guard
from moe_ep_bench.runtime.ranks import Ranks, as_rank, join
from moe_ep_bench.runtime.torchrun import torchrun
from moe_ep_bench.timing.timer import clock_for, time_us

MIN_BYTES = 2**10
DEFAULT_MAX_BYTES = {"cuda": 2**30, "cpu": 2**26}

# Splits: all messages alike, or one rank that receives this many times what others do.
EVEN, HOT = "even", "hot"
_HOT_SHARE = 4
DUPLEXES: tuple[Duplex, ...] = ("full", "half")

_JOIN_TIMEOUT_S, _TIMEOUT_S = 120.0, 300.0  # of meeting, and of a message
_WARM_UP = 3
# Repetitions are spread over this many passes through all messages, so that no message has a disturbance to itself.
_PASSES = 4


@dataclass(frozen=True)
class Exchange:
    """One all-to-all that is measured."""

    split: str
    num_bytes: int

    def matrix(self, num_ranks: int) -> np.ndarray:
        """Bytes from each rank (row) to each (column), int64 [R, R]: the fullest has ``num_bytes`` to or from others.

        Every rank also keeps its own share, as in a dispatch; it does not count. Shares are rounded up to whole bytes.
        """
        share_RR = np.ones((num_ranks, num_ranks))
        if self.split == HOT:
            share_RR[:, 0] = _HOT_SHARE
        return np.ceil(share_RR * self.num_bytes / fullest_bytes(share_RR)).astype(np.int64)


def fullest_bytes(bytes_RR: np.ndarray, duplex: Duplex = "full") -> float:
    """Bytes of the fullest rank's link: what it sends to or receives from others, or with half duplex both."""
    crossing_RR = bytes_RR * ~np.eye(len(bytes_RR), dtype=bool)
    return float(busy_bytes(crossing_RR.sum(axis=1), crossing_RR.sum(axis=0), duplex).max())


def launch_calibrate(out: Path, nproc: int, *, max_bytes: int | None = None, repetitions: int = 20) -> int:
    """Have torchrun calibrate on so many ranks of this node; return the exit status.

    Raises:
        UserError: this node cannot carry these ranks.
    """
    check_num_ranks(nproc)
    arguments = ["calibrate", "--out", str(out.absolute()), "--repetitions", str(repetitions)]
    return torchrun([*arguments, *([f"--max-bytes={max_bytes}"] if max_bytes is not None else [])], nproc).status


def calibrate(out: Path, *, max_bytes: int | None = None, repetitions: int = 20) -> int:
    """Measure the all-to-all of the ranks that torchrun started; return the exit status.

    Args:
        out: the links file to write, which ends in .yaml; all samples land beside it as ``<name>.samples.parquet``.
        max_bytes: the largest message (default: 1 GB on GPUs, 64 MB on the CPU).
        repetitions: timed runs of every message.
    """

    def work() -> int:
        ranks = join(_JOIN_TIMEOUT_S)
        try:
            most_bytes = DEFAULT_MAX_BYTES[ranks.device.type] if max_bytes is None else max_bytes
            ranks.agree(lambda: check(ranks, out, most_bytes, repetitions))
            with Guard(_TIMEOUT_S) as guard:
                samples = measure(ranks, exchanges(most_bytes), repetitions, guard.feed)
            ranks.agree(lambda: _write(ranks, out, samples), on_first=True)
            return OK
        finally:
            ranks.close()

    return as_rank(work)


def check(ranks: Ranks, out: Path, most_bytes: int, repetitions: int) -> None:
    """Refuse what cannot be measured or written; the first rank looks into the folder for all.

    Raises:
        UserError: one line.
    """
    refused = {
        f"calibrate: expected at least 2 ranks, got {ranks.world_size}": ranks.world_size < 2,
        "calibrate: expected ranks of one node, or one on each of several": (
            1 < ranks.local_world_size < ranks.world_size
        ),
        f"--max-bytes: expected at least {2 * MIN_BYTES}, got {most_bytes}": most_bytes < 2 * MIN_BYTES,
        f"--repetitions: expected at least 1, got {repetitions}": repetitions < 1,
        f"--out: expected a path that ends in .yaml, got {out}": out.suffix != ".yaml",
    }
    for message, holds in refused.items():
        if holds:
            raise UserError(message)
    if ranks.is_first:
        make_folder(out.parent, "--out: folder")


def exchanges(most_bytes: int) -> list[Exchange]:
    """What is measured, small messages first; sizes double."""
    sizes = [MIN_BYTES << step for step in range((most_bytes // MIN_BYTES).bit_length())]
    return [Exchange(split, size) for size in sizes for split in (EVEN, HOT)]


@torch.inference_mode()
def measure(ranks: Ranks, messages: Sequence[Exchange], repetitions: int, before: Callable[[], None]) -> pd.DataFrame:
    """Time every exchange; the same rows on all ranks: split, num_bytes, repetition, rank, time_us."""
    clock = clock_for(ranks.device)
    meet = partial(dist.all_reduce, torch.zeros(1, device=ranks.device))
    parts = []
    for number in range(min(_PASSES, repetitions)):
        count = len(range(number, repetitions, _PASSES))
        for exchange in messages:
            before()
            run = _runnable(ranks, exchange)
            for _ in range(_WARM_UP):
                run()
            times_us = np.array([time_us(run, clock, meet) for _ in range(count)])
            repetition = number + _PASSES * np.arange(count)
            parts += [
                pd.DataFrame({**asdict(exchange), "repetition": repetition, "rank": rank, "time_us": of_rank_us})
                for rank, of_rank_us in enumerate(ranks.told(times_us))
            ]
            del run  # and with it its buffers, before others are made
    return pd.concat(parts, ignore_index=True)


def _runnable(ranks: Ranks, exchange: Exchange) -> Callable[[], object]:
    """The collective with buffers of its own."""
    bytes_RR = exchange.matrix(ranks.world_size)
    to_R, from_R = bytes_RR[ranks.rank].tolist(), bytes_RR[:, ranks.rank].tolist()
    sent, received = (torch.zeros(sum(size_R), dtype=torch.uint8, device=ranks.device) for size_R in (to_R, from_R))
    return lambda: dist.all_to_all_single(received, sent, from_R, to_R)


def medians(samples: pd.DataFrame) -> pd.DataFrame:
    """Of every exchange the median over repetitions of the slowest rank's microseconds: split, num_bytes, us."""
    keys = ["split", "num_bytes"]
    slowest = samples.groupby([*keys, "repetition"], sort=False)["time_us"].max()
    return slowest.groupby(keys, sort=False).median().rename("us").reset_index()


class Fit(NamedTuple):
    """A latency and a bandwidth fitted to measured times."""

    latency_us: float
    bandwidth_gbps: float
    error: float
    """Root mean square of predicted / measured - 1."""


def fit_link(bytes_N: ArrayLike, times_us_N: ArrayLike) -> Fit:
    """Fit latency + bytes / bandwidth to measured times: least squares in relative error, neither below zero.

    Raises:
        UserError: times that do not grow with the bytes.
    """
    from scipy.optimize import nnls  # Imports slowly.

    sizes_N, times_N = np.asarray(bytes_N, dtype=np.float64), np.asarray(times_us_N, dtype=np.float64)
    # Each residual is predicted / measured - 1. Scaled bytes give both columns one magnitude.
    scale = sizes_N.max()
    columns = np.stack([1 / times_N, sizes_N / scale / times_N], axis=1)
    (latency_us, largest_us), residual = nnls(columns, np.ones(len(times_N)))
    if largest_us <= 1e-9 * latency_us:
        raise UserError(
            f"fit: expected times that grow with the bytes, got none up to {scale:,.0f} bytes; measure larger ones"
        )
    return Fit(float(latency_us), float(scale / largest_us / 1e3), float(residual / len(times_N) ** 0.5))


def link_from(num_ranks: int, times: pd.DataFrame) -> tuple[Link, Fit]:
    """Fit a link to ``medians``.

    Raises:
        UserError: times that do not grow with the bytes.
    """
    from scipy.optimize import isotonic_regression  # Imports slowly.

    is_even, times_us = (times["split"] == EVEN).to_numpy(), times["us"].to_numpy()
    matrices = [Exchange(*row).matrix(num_ranks) for row in zip(times["split"], times["num_bytes"], strict=True)]
    sizes = {duplex: np.array([fullest_bytes(bytes_RR, duplex) for bytes_RR in matrices]) for duplex in DUPLEXES}
    fits = {duplex: fit_link(sizes[duplex], times_us) for duplex in DUPLEXES}
    duplex = min(DUPLEXES, key=lambda duplex: fits[duplex].error)
    # More bytes cannot take less time: where a larger message was faster, that is noise.
    curve_us = np.exp(isotonic_regression(np.log(times_us[is_even])).x)
    link = Link(
        latency_us=round(fits[duplex].latency_us, 3),
        latency_basis="measured",
        bandwidth_gbps=float(f"{fits[duplex].bandwidth_gbps:.5g}"),
        efficiency=1.0,
        efficiency_basis="measured",
        duplex=duplex,
        curve=Curve.of(sizes[duplex][is_even], curve_us.round(3)),
    )
    return link, fits[duplex]


def _write(ranks: Ranks, out: Path, samples: pd.DataFrame) -> None:
    """Write samples and a links file, and print what was measured; UserError where there is no place."""
    link, fit = link_from(ranks.world_size, medians(samples))
    side = {"intra": link, "inter": None} if ranks.local_world_size > 1 else {"intra": None, "inter": link}
    links = Links(name=out.stem, source=_source(ranks), ranks_per_node=ranks.local_world_size, **side)
    text = yaml.safe_dump(links.model_dump(mode="json"), sort_keys=False, default_flow_style=None, width=100)
    how = f"latency and bandwidth fit the times with an error of {fit.error:.1%}"
    with writing_to(out, "--out"):
        with atomic_path(out.with_suffix(".samples.parquet")) as temporary:
            samples.to_parquet(temporary)
        with atomic_path(out) as temporary:
            temporary.write_text(f"# Written by moe-ep-bench calibrate; {how}.\n{text}")
    print(f"{links.describe()}\n{how}\nwritten to {out}", flush=True)


def _source(ranks: Ranks) -> str:
    device, versions = provenance.hardware(ranks.device), provenance.package_versions()
    backend = f"NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}" if ranks.backend == "nccl" else ranks.backend
    shared = ", which share cores" if ranks.oversubscribed else ""
    return (
        f"measured on {time.strftime('%Y-%m-%d', time.gmtime())}: {device['device_name']}, {ranks.world_size} ranks,"
        f" {ranks.local_world_size} on a node{shared}; {backend}, torch {versions['torch']}"
        f"{', CUDA ' + versions['cuda'] if versions['cuda'] else ''}"
    )
