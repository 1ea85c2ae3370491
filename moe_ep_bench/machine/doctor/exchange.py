"""Two processes exchange all-to-alls, over NCCL where there are two GPUs, else over gloo, and check every value.

Every value says which rank sent it, to whom, and where in the message it stood: a swapped, stale or truncated one is
found. Splits are uneven, as in a dispatch.
"""

from __future__ import annotations

import contextlib
import datetime
import tempfile
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moe_ep_bench.machine.doctor.checks import OK, PROBLEM, Finding
from moe_ep_bench.machine.subprocesses import CommandError, Question

if TYPE_CHECKING:
    import torch

TIMEOUT_S = 90.0
_RANKS = 2
# From one to a million values of 8 bytes: what travels inside of a packet, and what does not.
_COUNTS = (0, 1, 1000, 2**20)
_LOOK_AT = {
    "nccl": "NCCL_DEBUG=INFO says where it stands; then GPU peer access, /dev/shm and NCCL_SOCKET_IFNAME",
    "gloo": "does this host's name resolve to an address of its own? else set GLOO_SOCKET_IFNAME, e.g. to lo",
}
_RANK = "moe_ep_bench.machine.doctor.exchange:exchange"


def exchange(rank: int, backend: str, store: str, timeout_s: float) -> dict[str, Any]:
    """One of the two ranks: what it received, in short, and what of it was wrong."""
    import torch
    import torch.distributed as dist

    device = torch.device("cuda", rank) if backend == "nccl" else torch.device("cpu")
    if backend == "nccl":
        torch.cuda.set_device(device)
    limit = datetime.timedelta(seconds=timeout_s)
    dist.init_process_group(backend, store=dist.FileStore(store, _RANKS), rank=rank, world_size=_RANKS, timeout=limit)
    received_bytes, wrong = 0, ""
    for count in _COUNTS:
        to_R = [_length(count, rank, target) for target in range(_RANKS)]
        from_R = [_length(count, source, rank) for source in range(_RANKS)]
        sent = torch.cat([message(rank, target, length) for target, length in enumerate(to_R)]).to(device)
        received = torch.full((sum(from_R),), -1, dtype=torch.int64, device=device)
        dist.all_to_all_single(received, sent, from_R, to_R)
        for source, part in enumerate(received.cpu().split(from_R)):
            differing = int((part != message(source, rank, len(part))).sum())
            if differing and not wrong:
                wrong = f"rank {rank} got {differing:,} of {len(part):,} values from rank {source} wrong"
        received_bytes += received.nbytes
    return {"received_bytes": received_bytes, "wrong": wrong}


def message(source: int, target: int, length: int) -> torch.Tensor:
    """What one rank sends to another, int64 [length]."""
    import torch

    return torch.arange(length) + ((source * _RANKS + target + 1) << 32)


def _length(count: int, source: int, target: int) -> int:
    return count * (1 + source + 2 * target)


def exchange_findings(num_gpus: int, *, rank: str = _RANK, timeout_s: float = TIMEOUT_S) -> list[Finding]:
    """Let two ranks exchange.

    Args:
        num_gpus: that torch can use.
        rank: the function that is one rank.
    """
    backend = "nccl" if num_gpus >= _RANKS else "gloo"
    name = "NCCL on GPUs 0 and 1" if backend == "nccl" else "gloo on the CPU"
    if num_gpus == 1:
        name += " (NCCL needs two GPUs)"
    answers, errors = [], []
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        store = str(Path(folder) / "store")
        asked = [partial(Question, rank, number, backend, store, timeout_s) for number in range(_RANKS)]
        try:
            ranks = [stack.enter_context(start(timeout_s=timeout_s)) for start in asked]
        except CommandError as error:
            ranks, errors = [], [str(error)]
        for number, one in enumerate(ranks):
            try:
                answers.append(one.answer())
            except CommandError as error:
                errors.append(f"rank {number}: {error}")
    wrong = [answer["wrong"] for answer in answers if answer["wrong"]]
    what = f"two ranks over {name}"
    if not errors and not wrong:
        mebibytes = sum(answer["received_bytes"] for answer in answers) / 2**20
        return [Finding("all-to-all", OK, f"{what} exchanged {mebibytes:.0f} MiB, and every value was right")]
    what += f" did not get through ({'; '.join(errors)})" if errors else f" received wrong data ({wrong[0]})"
    return [Finding("all-to-all", PROBLEM, what, "no expert-parallel run can be trusted here", _LOOK_AT[backend])]
