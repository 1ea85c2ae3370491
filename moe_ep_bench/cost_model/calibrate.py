"""``calibrate``: measure the all-to-all of this machine's ranks and write it as a links file.

Under torchrun the ranks exchange even messages of 1 KB and up, whose sizes double. A message's size is what each rank
sends to others. Of each size the median over repetitions of the slowest rank's time counts, which makes the link's
curve (``Link.measured``).

Ranks of one node measure the link inside it; one rank on each of several nodes, that between them.
"""

from __future__ import annotations

import faulthandler
import itertools
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch.cuda import nccl

from moe_ep_bench.cost_model.links import Link, Links
from moe_ep_bench.errors import OK, UserError
from moe_ep_bench.facts.words import describe_links
from moe_ep_bench.files import atomic_path, dump_yaml, make_folder, writing_to
from moe_ep_bench.machine import provenance
from moe_ep_bench.runtime.ranks import Ranks, as_rank, join
from moe_ep_bench.runtime.sharing import SHARE_FLAG, Sharing, shared_gpus
from moe_ep_bench.runtime.torchrun import check_num_ranks, num_gpus, torchrun
from moe_ep_bench.timing.timer import clock_for, time_us

MIN_BYTES = 2**10
DEFAULT_MAX_BYTES = {"cuda": 2**30, "cpu": 2**26}

_JOIN_TIMEOUT_S, _TIMEOUT_S = 120.0, 300.0  # of meeting, and of a message
_WARM_UP = 3
# Repetitions are spread over this many passes through all messages, so that no message has a disturbance to itself.
_PASSES = 4


def launch_calibrate(
    out: Path, nproc: int, *, max_bytes: int | None = None, repetitions: int = 20, sharing: Sharing | None = None
) -> int:
    """Have torchrun calibrate on so many ranks of this node; return the exit status.

    Raises:
        UserError: this node cannot carry these ranks.
    """
    check_num_ranks(nproc, sharing)
    arguments = ["calibrate", "--out", str(out.absolute()), "--repetitions", str(repetitions)]
    arguments += [f"--max-bytes={max_bytes}"] if max_bytes is not None else []
    arguments += SHARE_FLAG[sharing] if sharing else []
    with shared_gpus(sharing, -(-nproc // (num_gpus() or nproc))):
        return torchrun([arguments], nproc).status


def calibrate(out: Path, *, max_bytes: int | None = None, repetitions: int = 20, sharing: Sharing | None = None) -> int:
    """Measure the all-to-all of the ranks that torchrun started; return the exit status.

    Args:
        out: the links file to write, which ends in .yaml.
        max_bytes: the largest message (default: 1 GB on GPUs, 64 MB on the CPU).
        repetitions: timed runs of every message.
        sharing: by what ranks share GPUs: all is done and nothing is written.
    """

    def work() -> int:
        ranks = join(_JOIN_TIMEOUT_S, sharing=sharing)
        try:
            most_bytes = DEFAULT_MAX_BYTES[ranks.device.type] if max_bytes is None else max_bytes
            ranks.agree(lambda: check(ranks, out, most_bytes, repetitions))
            share_N = share_bytes(ranks.world_size, most_bytes)
            times_us_N = measure(ranks, share_N, repetitions)
            if sharing is None:
                ranks.agree(lambda: _write(ranks, out, link_of(ranks.world_size, share_N, times_us_N)), on_first=True)
            elif ranks.is_first:
                sizes = f"{len(share_N)} sizes of messages, up to {most_bytes / 2**20:g} MiB"
                print(f"moe-ep-bench: rehearsal: {sizes}, went through; ranks shared a device, so no file is written")
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


def share_bytes(num_ranks: int, most_bytes: int) -> list[int]:
    """Bytes from each rank to each in every message; small messages first, whole bytes, rounded up."""
    sizes = (MIN_BYTES << step for step in range((most_bytes // MIN_BYTES).bit_length()))
    return [-(-size // (num_ranks - 1)) for size in sizes]


@torch.inference_mode()
def measure(ranks: Ranks, share_N: Sequence[int], repetitions: int) -> NDArray[np.float64]:
    """Median microseconds of the slowest rank for every message, float64 [N], the same on all ranks.

    Args:
        share_N: bytes from each rank to each.
    """
    clock = clock_for(ranks.device)
    meet = partial(dist.all_reduce, torch.zeros(1, device=ranks.device))
    times_us: dict[int, list[float]] = {share: [] for share in share_N}
    for number in range(min(_PASSES, repetitions)):
        for share, taken_us in times_us.items():
            faulthandler.dump_traceback_later(_TIMEOUT_S, exit=True, file=sys.__stderr__ or sys.stderr)
            run = _exchange(ranks, share)
            for _ in range(_WARM_UP):
                run()
            taken_us += [time_us(run, clock, meet) for _ in range(number, repetitions, _PASSES)]
            del run  # and with it its buffers, before others are made
    faulthandler.cancel_dump_traceback_later()
    slowest_us = np.max(ranks.all_gather(np.array(list(times_us.values()))), axis=0)
    return np.median(slowest_us, axis=1)


def link_of(num_ranks: int, share_N: Sequence[int], times_us_N: NDArray[np.float64]) -> Link:
    """A link by ``measure``, whose bandwidth is the median slope over all pairs of the larger half of sizes.

    Any one message may be disturbed, the largest too (Theil and Sen: up to 29 % of the points change nothing). Smaller
    messages have no part in it: their time is mostly latency.

    Raises:
        UserError: times that do not grow with the bytes.
    """
    sizes_N, times_us_N = np.array(share_N) * (num_ranks - 1), times_us_N.round(3)
    larger = slice(min(len(sizes_N) // 2, len(sizes_N) - 2), None)
    pairs = itertools.combinations(zip(sizes_N[larger], times_us_N[larger], strict=True), 2)
    byte_us = np.median([(longer_us - time_us) / (more - size) for (size, time_us), (more, longer_us) in pairs])
    return Link.measured(sizes_N, times_us_N, "measured", float(byte_us))


def _exchange(ranks: Ranks, share: int) -> Callable[[], object]:
    """The collective with buffers of its own. Every rank also keeps a share, as in a dispatch; it does not count."""
    sent, received = torch.zeros(2, share * ranks.world_size, dtype=torch.uint8, device=ranks.device)
    return lambda: dist.all_to_all_single(received, sent)


def _write(ranks: Ranks, out: Path, link: Link) -> None:
    """Write a links file, and print what was measured; UserError where there is no place."""
    is_inside = ranks.local_world_size > 1
    if is_inside and ranks.backend == "gloo":  # 8 MB one way take two ranks as long as 4 MB both ways.
        link = link.model_copy(update={"duplex": "half"})
    side = {"intra": link, "inter": None} if is_inside else {"intra": None, "inter": link}
    links = Links(name=out.stem, source=_source(ranks), ranks_per_node=ranks.local_world_size, **side)
    fields = links.model_dump(mode="json", exclude_defaults=True)
    text = dump_yaml(fields, default_flow_style=None, width=100)
    with writing_to(out, "--out"), atomic_path(out) as temporary:
        temporary.write_text(f"# Written by moe-ep-bench calibrate.\n{text}")
    print(f"{describe_links(links.facts())}\nwritten to {out}", flush=True)


def _source(ranks: Ranks) -> str:
    device, versions = provenance.hardware(ranks.device), provenance.package_versions()
    backend = f"NCCL {'.'.join(map(str, nccl.version()))}" if ranks.backend == "nccl" else ranks.backend
    shared = ", which share cores" if ranks.oversubscribed else ""
    return (
        f"measured on {time.strftime('%Y-%m-%d', time.gmtime())}: {device['device_name']}, {ranks.world_size} ranks,"
        f" {ranks.local_world_size} on a node{shared}; {backend}, torch {versions['torch']}"
        f"{', CUDA ' + versions['cuda'] if versions['cuda'] else ''}"
    )
