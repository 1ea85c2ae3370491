"""``calibrate``: measure the all-to-all of this machine's ranks and write it as a links file.

Under torchrun the ranks exchange messages of 1 KB and up, evenly and with one hot rank that receives four times as
much as the others. A message's size is the most that any rank sends to, or receives from, other ranks. Of each size
the median over repetitions of the slowest rank's time counts. Latency and bandwidth are fitted to both splits
together, for full and for half duplex, and the better fit is kept: only skewed splits tell the two apart. The curve is
that of even splits, so its error on skewed ones tests the model.

With several ranks on each of several nodes, messages inside nodes and between them are measured apart.

Shapes: R = ranks.
"""

from __future__ import annotations

import os
import sys
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import torch
import torch.distributed as dist
import yaml

from moe_ep_bench.cost_model.links import Duplex, Fit, Link, Links, busy_bytes, fit_link
from moe_ep_bench.files import atomic_path
from moe_ep_bench.machine import provenance
from moe_ep_bench.runtime.device import check_num_ranks
from moe_ep_bench.runtime.exit_codes import LOST, OK, USER_ERROR
from moe_ep_bench.runtime.guard import Guard
from moe_ep_bench.runtime.ranks import NotMetError, Ranks, join
from moe_ep_bench.runtime.torchrun import torchrun
from moe_ep_bench.timing.timer import clock_for, time_us

MIN_BYTES = 2**10
ENOUGH_BYTES = 2**20  # to tell a bandwidth beside the latency
DEFAULT_MAX_BYTES = {"cuda": 2**30, "cpu": 2**26}

# Splits: all messages alike, or one rank of each node that receives this many times what others do.
EVEN, HOT = "even", "hot"
_HOT_SHARE = 4
DUPLEXES: tuple[Duplex, ...] = ("full", "half")
# Which messages: those inside nodes, or those between nodes.
INSIDE, BETWEEN = "inside", "between"

_JOIN_TIMEOUT_S = 120.0
_WARM_UP = 3
# Repetitions are spread over this many passes through all messages, so that no message has a disturbance to itself.
_PASSES = 4
# Below this R2 two numbers do not describe what was measured.
_POOR_R2 = 0.9

SAMPLES_SCHEMA = pa.schema(
    [
        ("scope", pa.string()),  # inside, between
        ("split", pa.string()),  # even, hot
        ("num_bytes", pa.int64()),  # of the fullest rank, to or from others
        ("repetition", pa.int32()),
        ("rank", pa.int32()),
        ("time_us", pa.float64()),
    ]
)


@dataclass(frozen=True)
class Exchange:
    """One all-to-all that is measured."""

    scope: str
    split: str
    num_bytes: int

    def matrix(self, num_ranks: int, ranks_per_node: int) -> np.ndarray:
        """Bytes from each rank (row) to each (column), int64 [R, R]: the fullest has ``num_bytes`` to or from others.

        Every rank also keeps its own share, as in a dispatch; it does not count. Shares are rounded up to whole bytes.
        """
        node_R = np.arange(num_ranks) // ranks_per_node
        same_RR = node_R[:, None] == node_R
        share_RR = np.ones((num_ranks, num_ranks))
        if self.split == HOT:
            share_RR[:, ::ranks_per_node] = _HOT_SHARE
        share_RR[same_RR if self.scope == BETWEEN else ~same_RR] = 0
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


def calibrate(out: Path, *, max_bytes: int | None = None, repetitions: int = 20, timeout_s: float = 300.0) -> int:
    """Measure the all-to-all of the ranks that torchrun started; return the exit status.

    Args:
        out: the links file to write, which ends in .yaml; all samples land beside it as ``<name>.samples.parquet``.
        max_bytes: the largest message (default: 1 GB on GPUs, 64 MB on the CPU).
        repetitions: timed runs of every message.
        timeout_s: no message may take longer.
    """
    try:
        ranks = join(_JOIN_TIMEOUT_S)
    except (ValueError, NotMetError) as error:
        print(f"moe-ep-bench: {error}", file=sys.stderr)
        return LOST if isinstance(error, NotMetError) else USER_ERROR
    try:
        most_bytes = DEFAULT_MAX_BYTES[ranks.device.type] if max_bytes is None else max_bytes
        alike = len(set(ranks.told((str(out), most_bytes, repetitions, ranks.local_world_size)))) == 1
        if ranks.complain(what_to_change(ranks, out, most_bytes, repetitions, alike=alike)):
            return USER_ERROR
        with Guard(timeout_s) as guard:
            guard.device = ranks.device
            samples = _measure(ranks, _exchanges(ranks, most_bytes), repetitions, guard.feed)
        error = ""
        if ranks.is_first:
            try:
                _write(ranks, out, samples)
            except (OSError, ValueError) as problem:
                error = str(problem)
        return USER_ERROR if ranks.complain(error) else OK
    except Exception:
        traceback.print_exc()
        return LOST
    finally:
        ranks.close()


def what_to_change(ranks: Ranks, out: Path, most_bytes: int, repetitions: int, *, alike: bool) -> str:
    """What a user has to change before anything can be measured, in one line; empty if nothing."""
    refused = {
        "calibrate: expected the same options and as many ranks on every node; start all ranks alike": not alike,
        f"calibrate: expected at least 2 ranks, got {ranks.world_size}": ranks.world_size < 2,
        f"--max-bytes: expected at least {2 * MIN_BYTES}, got {most_bytes}": most_bytes < 2 * MIN_BYTES,
        f"--repetitions: expected at least 1, got {repetitions}": repetitions < 1,
        f"--out: expected a path that ends in .yaml, got {out}": out.suffix != ".yaml",
    }
    for message, holds in refused.items():
        if holds:
            return message
    if ranks.is_first:
        try:
            out.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            return f"--out {out}: cannot be written: {error.strerror}"
        if out.is_dir() or not os.access(out.parent, os.W_OK):
            return f"--out {out}: cannot be written"
    return ""


def _exchanges(ranks: Ranks, most_bytes: int) -> list[Exchange]:
    """What is measured, small messages first; sizes double."""
    per_node, several = ranks.local_world_size, ranks.world_size > ranks.local_world_size
    scopes = [*([INSIDE] if per_node > 1 else []), *([BETWEEN] if several else [])]
    sizes = [MIN_BYTES << step for step in range((most_bytes // MIN_BYTES).bit_length())]
    return [Exchange(scope, split, size) for size in sizes for scope in scopes for split in (EVEN, HOT)]


@torch.inference_mode()
def _measure(
    ranks: Ranks, exchanges: Sequence[Exchange], repetitions: int, before: Callable[[], None]
) -> dict[Exchange, np.ndarray]:
    """Microseconds of every exchange, [repetitions, R]; the same on all ranks."""
    clock = clock_for(ranks.device)
    meet = partial(dist.all_reduce, torch.zeros(1, device=ranks.device))
    samples = defaultdict(list)
    for number in range(min(_PASSES, repetitions)):
        count = len(range(number, repetitions, _PASSES))
        for exchange in exchanges:
            before()
            run = _runnable(ranks, exchange)
            for _ in range(_WARM_UP):
                run()
            times_us = np.array([time_us(run, clock, meet) for _ in range(count)])
            samples[exchange].append(np.stack(ranks.told(times_us), axis=1))
            del run  # and with it its buffers, before others are made
    return {exchange: np.concatenate(passes) for exchange, passes in samples.items()}


def _runnable(ranks: Ranks, exchange: Exchange) -> Callable[[], object]:
    """The collective with buffers of its own."""
    bytes_RR = exchange.matrix(ranks.world_size, ranks.local_world_size)
    to_R, from_R = bytes_RR[ranks.rank].tolist(), bytes_RR[:, ranks.rank].tolist()
    sent, received = (torch.zeros(sum(size_R), dtype=torch.uint8, device=ranks.device) for size_R in (to_R, from_R))
    return lambda: dist.all_to_all_single(received, sent, from_R, to_R)


def slowest_us(samples_NR: np.ndarray) -> float:
    """Median over repetitions of the slowest rank's microseconds."""
    return float(np.median(samples_NR.max(axis=1)))


def links_from(
    name: str, source: str, ranks_per_node: int, num_ranks: int, medians_us: Mapping[Exchange, float]
) -> tuple[Links, dict[str, Fit]]:
    """Fit links to the median time of every all-to-all; also the fits, by scope.

    Raises:
        ValueError: times that do not grow with the bytes.
    """
    from scipy.optimize import isotonic_regression  # Imports slowly.

    fits: dict[str, Fit] = {}
    fitted: dict[str, Link] = {}
    for scope in (INSIDE, BETWEEN):
        exchanges = [one for one in medians_us if one.scope == scope]
        if not exchanges:
            continue
        times_us = np.array([medians_us[one] for one in exchanges])
        is_even = np.array([one.split == EVEN for one in exchanges])
        matrices = [one.matrix(num_ranks, ranks_per_node) for one in exchanges]
        sizes = {duplex: np.array([fullest_bytes(one, duplex) for one in matrices]) for duplex in DUPLEXES}
        choices = {duplex: fit_link(sizes[duplex], times_us) for duplex in DUPLEXES}
        duplex = min(DUPLEXES, key=lambda duplex: choices[duplex].rms_error)
        fit = fits[scope] = choices[duplex]
        # More bytes cannot take less time: where a larger message was faster, that is noise.
        curve_us = np.exp(isotonic_regression(np.log(times_us[is_even])).x)
        fitted[scope] = Link(
            latency_us=round(fit.latency_us, 3),
            latency_basis="measured",
            bandwidth_gbps=float(f"{fit.bandwidth_gbps:.5g}"),
            efficiency=1.0,
            efficiency_basis="measured",
            duplex=duplex,
            curve=tuple(zip(sizes[duplex][is_even], curve_us.round(3), strict=True)),
        )
    sides = {"intra": fitted.get(INSIDE), "inter": fitted.get(BETWEEN)}
    return Links(name=name, source=source, ranks_per_node=ranks_per_node, **sides), fits


def report(links: Links, fits: Mapping[str, Fit], medians_us: Mapping[Exchange, float]) -> str:
    """Tables of what was measured and of the fits."""
    table = pd.DataFrame(map(asdict, medians_us)).assign(us=list(medians_us.values()))
    table["GB/s"] = table["num_bytes"] / table["us"] / 1e3
    sides = {INSIDE: links.intra, BETWEEN: links.inter}
    found = pd.DataFrame(
        [{"scope": scope, "duplex": sides[scope].duplex, **asdict(fit)} for scope, fit in fits.items()]
    )
    texts = [one.to_string(index=False, float_format="{:,.4g}".format) for one in (table, found)]
    poor = [scope for scope, fit in fits.items() if fit.r2 < _POOR_R2]
    texts += [
        f"{scope}: a poor fit; measure again while the machine is idle, or with more --repetitions" for scope in poor
    ]
    return "\n\n".join(texts)


def _write(ranks: Ranks, out: Path, samples: Mapping[Exchange, np.ndarray]) -> None:
    rows = [
        {**asdict(exchange), "repetition": repetition, "rank": rank, "time_us": time_us}
        for exchange, times_NR in samples.items()
        for (repetition, rank), time_us in np.ndenumerate(times_NR)
    ]
    with atomic_path(out.with_suffix(".samples.parquet")) as temporary:
        pq.write_table(pa.Table.from_pylist(rows, schema=SAMPLES_SCHEMA), temporary, compression="zstd")
    medians_us = {exchange: slowest_us(times_NR) for exchange, times_NR in samples.items()}
    links, fits = links_from(out.stem, _source(ranks), ranks.local_world_size, ranks.world_size, medians_us)
    write_links(out, links, fits)
    print(f"{report(links, fits, medians_us)}\n{links.describe()}\nwritten to {out}", flush=True)


def _source(ranks: Ranks) -> str:
    device, versions = provenance.hardware(ranks.device), provenance.package_versions()
    backend = f"NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}" if ranks.backend == "nccl" else ranks.backend
    shared = ", which share cores" if ranks.oversubscribed else ""
    return (
        f"measured on {time.strftime('%Y-%m-%d', time.gmtime())}: {device['device_name']}, {ranks.world_size} ranks,"
        f" {ranks.local_world_size} on a node{shared}; {backend}, torch {versions['torch']}"
        f"{', CUDA ' + versions['cuda'] if versions['cuda'] else ''}"
    )


def write_links(out: Path, links: Links, fits: Mapping[str, Fit]) -> None:
    """Write a links file that ``Links.load`` reads."""
    comments = [
        f"# {scope}: latency and bandwidth fit with a median error of {fit.median_error:.1%},"
        f" {fit.worst_error:.1%} at worst, R2 {fit.r2:.5f}"
        for scope, fit in fits.items()
    ]
    text = yaml.safe_dump(links.model_dump(mode="json"), sort_keys=False, default_flow_style=None, width=100)
    with atomic_path(out) as temporary:
        temporary.write_text("\n".join(["# Written by moe-ep-bench calibrate.", *comments, text]))
