"""``doctor``: look at this machine before a long run: what is there, what a missing part costs, what to do.

Every line is *ok*, a *note* (a run goes, with less) or a *problem* (it would fail, or not be what it seems). Ranks
exchange a checked all-to-all: as many as ``run`` would start here, or all of somebody's own torchrun.
"""

from __future__ import annotations

import faulthandler
import itertools
import os
import shutil
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

from moe_ep_bench import errors, kernels
from moe_ep_bench.errors import UserError, brief
from moe_ep_bench.machine import provenance
from moe_ep_bench.runtime.ranks import join
from moe_ep_bench.runtime.torchrun import check_num_ranks, leave_status, local_ranks, torchrun

OK, NOTE, PROBLEM = "ok", "note", "problem"

_LIMIT_S, _EXCHANGE_S = 900.0, 180.0  # of all, and of meeting
_VALUES = 1 << 18  # int64 that a rank sends to another at least; some get up to four times as many
_MIN_FREE_GIB = 1.0

# What a run on GPUs does without.
_WITHOUT = {
    "transformer_engine": "our grouped GEMMs compute experts, unfused: hold no phase shares against a paper's",
    "apex": "Megatron-Core takes torch's own kernels; none of Apex's lie in the timed layer",
    "triton": "policies are routed by torch, several times slower; decode experts cannot run",
}


class Finding(NamedTuple):
    """One line of the report: ``status`` is ``ok``, ``note`` or ``problem``."""

    status: str
    check: str
    words: str


def doctor(out: Path, nproc: int | None) -> int:
    """Print what this machine has for runs of ``nproc`` ranks into ``out``; 0 = they can start, 1 = a problem.

    Ranks do it, which torchrun starts: of each node the first prints all, others their notes and problems.
    """
    if "RANK" not in os.environ:
        num_ranks = local_ranks(nproc)
        check_num_ranks(num_ranks)
        return torchrun([["doctor", "--out", str(out)]], num_ranks).status
    faulthandler.dump_traceback_later(_LIMIT_S, exit=True, file=sys.__stderr__ or sys.stderr)
    problems = 0
    of_node = itertools.chain(gpus(), packages(), disk(out)) if os.environ["LOCAL_RANK"] == "0" else ()
    for status, check, words in itertools.chain(of_node, exchange()):
        problems += status == PROBLEM
        if status != OK or os.environ["LOCAL_RANK"] == "0":
            print(f"{status:8}{check:12}{words}", flush=True)
    if os.environ["RANK"] == "0":
        print(f"\n{problems or 'no'} problem{'s' * (problems != 1)}: runs {'would fail' if problems else 'can start'}")
    return leave_status(errors.CASES_FAILED if problems else errors.OK)


def gpus() -> Iterator[Finding]:
    """GPUs that torch can use."""
    names = Counter(torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count()))
    if not names:
        yield Finding(NOTE, "GPUs", "none: ranks run on the CPU over gloo; that shows the machinery, no GPU's times")
    else:
        yield Finding(OK, "GPUs", ", ".join(f"{count} x {name}" for name, count in names.items()))


def packages() -> Iterator[Finding]:
    """What is installed, and what a run on a GPU does without."""
    versions = provenance.package_versions()
    yield Finding(OK, "packages", ", ".join(f"{name} {version}" for name, version in versions.items() if version))
    if not torch.cuda.is_available():
        return
    for name in [name for name in _WITHOUT if not versions[name]]:
        yield Finding(NOTE, "packages", f"no {name}: {_WITHOUT[name]}")
    if versions["triton"] and (lacking := kernels.lacking()):
        yield Finding(PROBLEM, "packages", f"Triton compiles nothing here: {lacking}")


def disk(out: Path) -> Iterator[Finding]:
    """Whether results can be written, and how much room there is."""
    folder = next(parent for parent in (out.absolute(), *out.absolute().parents) if parent.exists())
    try:
        with tempfile.TemporaryFile(dir=folder):
            free = shutil.disk_usage(folder).free / 2**30
        yield Finding(OK if free >= _MIN_FREE_GIB else PROBLEM, "disk", f"--out {out}: {free:,.1f} GiB free")
    except OSError as error:
        yield Finding(PROBLEM, "disk", f"--out {out}: cannot be written ({error.strerror})")


def exchange() -> Iterator[Finding]:
    """Whether ranks meet, and get what they should by an all-to-all of uneven parts.

    The launcher ends all ranks as soon as one is lost. Meanwhile the others have their say, which has a limit of time.
    """
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        yield from _met()
    finally:
        signal.signal(signal.SIGTERM, before)


def _met() -> Iterator[Finding]:
    here, hint = f"rank {os.environ['RANK']} of {os.environ['WORLD_SIZE']}", "NCCL_DEBUG=INFO says more"
    try:
        ranks = join(_EXCHANGE_S)
        here += f" over {ranks.backend}"
        hint = hint if ranks.backend == "nccl" else "GLOO_SOCKET_IFNAME names the network"
        wrong = _exchanged(ranks.rank, ranks.world_size, ranks.device)
        if first := ranks.first_error(wrong):  # so that the first rank, which sums up, knows
            yield Finding(PROBLEM, "all-to-all", "{}: rank {}: {}; {}".format(here, *first, hint))
        else:
            yield Finding(OK, "all-to-all", f"{here}: every value was right")
        ranks.close()
    except (UserError, dist.DistError, RuntimeError) as error:
        why = brief(str(error).strip().splitlines()[-1], 200, quoted=False)
        yield Finding(PROBLEM, "all-to-all", f"{here}: {why}; {hint}")


def _exchanged(rank: int, num_ranks: int, device: torch.device) -> str:
    """What came wrong to this rank; empty where all is right. Lengths differ by pair of ranks, and so do values."""
    lengths = [[_VALUES // num_ranks * (1 + (a + 2 * b) % 4) for b in range(num_ranks)] for a in range(num_ranks)]
    sent = [torch.arange(length) + ((rank * num_ranks + to + 1) << 32) for to, length in enumerate(lengths[rank])]
    expected = [torch.arange(of[rank]) + ((a * num_ranks + rank + 1) << 32) for a, of in enumerate(lengths)]
    received = torch.empty(sum(map(len, expected)), dtype=torch.int64, device=device)
    splits = [len(part) for part in expected]
    dist.all_to_all_single(received, torch.cat(sent).to(device), splits, lengths[rank])
    for source, (part, right) in enumerate(zip(received.cpu().split(splits), expected, strict=True)):
        if num_wrong := int((part != right).sum()):
            return f"{num_wrong:,} of {len(right):,} values from rank {source} came wrong"
    return ""
