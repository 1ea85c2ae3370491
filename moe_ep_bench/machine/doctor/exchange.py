"""Ranks exchange all-to-alls and check every value: all that torchrun or srun started, else two of this node's own.

Every value says which rank sent it, to whom, and where in the message it stood: a swapped, stale or truncated one is
found. Splits are uneven, as in a dispatch. NCCL carries them where each rank has a GPU, else gloo.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moe_ep_bench.machine.doctor.checks import OK, PROBLEM, Finding
from moe_ep_bench.machine.subprocesses import CommandError, Question, output_of

if TYPE_CHECKING:
    import torch

TIMEOUT_S = 90.0
# Of a message's smallest part: what travels inside of a packet, and what does not. The last one is shared by all.
_COUNTS, _MOST_VALUES = (0, 1, 1000), 2**21
_LOOK_AT = {
    "nccl": "NCCL_DEBUG=INFO says where it stands; then GPU peer access, /dev/shm and NCCL_SOCKET_IFNAME",
    "gloo": "does this host's name resolve to an address of its own? else set GLOO_SOCKET_IFNAME, e.g. to lo",
}
_RANK = "moe_ep_bench.machine.doctor.exchange:exchange"


@dataclass(frozen=True)
class Place:
    """This process among those that torchrun or srun started."""

    rank: int
    world_size: int
    local_rank: int
    address: str  # host:port of rank 0


def place_of(variables: Mapping[str, str] = os.environ) -> Place | None:
    """Where torchrun or srun has put this process; None where it is alone.

    Raises:
        CommandError: Slurm does not name its first host.
    """
    if int(variables.get("WORLD_SIZE", "1")) > 1:
        numbers = (int(variables[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
        return Place(*numbers, f"{variables['MASTER_ADDR']}:{variables['MASTER_PORT']}")
    if int(variables.get("SLURM_STEP_NUM_TASKS", "1")) > 1:
        numbers = (int(variables[name]) for name in ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID"))
        nodes = variables.get("SLURM_STEP_NODELIST", "")
        host = variables.get("MASTER_ADDR") or output_of(["scontrol", "show", "hostnames", nodes], 20).split()[0]
        # As launch/torchrun.sh chooses it.
        port = variables.get("MASTER_PORT") or 20000 + int(variables.get("SLURM_JOB_ID", "0")) % 10000
        return Place(*numbers, f"{host}:{port}")
    return None


def exchange(rank: int, world_size: int, local_rank: int, backend: str, store: str, timeout_s: float) -> dict[str, Any]:
    """One of the ranks: what it received, in short, and what of it was wrong.

    Args:
        store: a file, or host:port of rank 0.
    """
    import torch
    import torch.distributed as dist

    device = torch.device("cuda", local_rank) if backend == "nccl" else torch.device("cpu")
    if backend == "nccl":
        torch.cuda.set_device(device)
    limit = datetime.timedelta(seconds=timeout_s)
    if store.startswith("/"):
        met = dist.FileStore(store, world_size)
    else:
        host, _, port = store.rpartition(":")
        # torchrun's agent serves one there already.
        serves = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        served = dist.TCPStore(host.strip("[]"), int(port), world_size, serves, limit, wait_for_workers=False)
        met = dist.PrefixStore("doctor", served)
    dist.init_process_group(backend, store=met, rank=rank, world_size=world_size, timeout=limit)
    received_bytes, wrong = 0, ""
    for count in (*_COUNTS, _MOST_VALUES // world_size):
        to_R = [_length(count, rank, target) for target in range(world_size)]
        from_R = [_length(count, source, rank) for source in range(world_size)]
        parts = [message(world_size, rank, target, length) for target, length in enumerate(to_R)]
        sent = torch.cat(parts).to(device)
        received = torch.full((sum(from_R),), -1, dtype=torch.int64, device=device)
        dist.all_to_all_single(received, sent, from_R, to_R)
        for source, part in enumerate(received.cpu().split(from_R)):
            differing = int((part != message(world_size, source, rank, len(part))).sum())
            if differing and not wrong:
                wrong = f"rank {rank} got {differing:,} of {len(part):,} values from rank {source} wrong"
        received_bytes += received.nbytes
    dist.barrier()  # Rank 0 serves the store until all are done.
    return {"received_bytes": received_bytes, "wrong": wrong}


def message(world_size: int, source: int, target: int, length: int) -> torch.Tensor:
    """What one rank sends to another, int64 [length]."""
    import torch

    return torch.arange(length) + ((source * world_size + target + 1) << 32)


def _length(count: int, source: int, target: int) -> int:
    return count * (1 + (source + 2 * target) % 4)


def exchange_findings(
    num_gpus: int, place: Place | None = None, *, rank: str = _RANK, timeout_s: float = TIMEOUT_S
) -> list[Finding]:
    """Let ranks exchange: this process's among those of ``place``, else two of this node's.

    Args:
        num_gpus: that torch can use.
        rank: the function that is one rank.
    """
    if place is not None:
        backend = "nccl" if num_gpus > place.local_rank else "gloo"
        over = "NCCL" if backend == "nccl" else "gloo on the CPU"
        what = f"rank {place.rank} of {place.world_size} over {over}, rank 0 at {place.address},"
        to_start = [(place.rank, place.world_size, place.local_rank, backend, place.address)]
    else:
        backend = "nccl" if num_gpus > 1 else "gloo"
        over = "NCCL on GPUs 0 and 1" if backend == "nccl" else "gloo on the CPU"
        what = f"two ranks over {over}" + (" (NCCL needs two GPUs)" if num_gpus == 1 else "")
        to_start = [(number, 2, number, backend, "") for number in range(2)]
    answers, errors = [], []
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        asked = [
            partial(Question, rank, *first, store or str(Path(folder) / "store"), timeout_s)
            for *first, store in to_start
        ]
        try:
            ranks = [stack.enter_context(start(timeout_s=timeout_s)) for start in asked]
        except CommandError as error:
            ranks, errors = [], [str(error)]
        for (number, *_), one in zip(to_start, ranks, strict=False):
            try:
                answers.append(one.answer())
            except CommandError as error:
                errors.append(f"rank {number}: {error}")
    wrong = [answer["wrong"] for answer in answers if answer["wrong"]]
    if not errors and not wrong:
        mebibytes = sum(answer["received_bytes"] for answer in answers) / 2**20
        return [Finding("all-to-all", OK, f"{what} exchanged {mebibytes:.0f} MiB, and every value was right")]
    what += f" did not get through ({'; '.join(errors)})" if errors else f" received wrong data ({wrong[0]})"
    return [Finding("all-to-all", PROBLEM, what, "no expert-parallel run can be trusted here", _LOOK_AT[backend])]
