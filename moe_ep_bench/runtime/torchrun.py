"""Start ranks with torchrun, on GPUs or the CPU, and end with the status on which they agreed.

torchrun (torch.distributed.run) starts the ranks of this node, joins them with other nodes' and starts all again when
one is lost; what is left to measure is found on disk. Every option of its own can be set by a variable of its own,
``PET_NNODES`` and ``PET_RDZV_ENDPOINT`` for instance (launch/torchrun.sh). Ranks that have done their part end well,
whatever became of the cases, so that nothing is restarted; the first of a node leaves their status in a file.

What is measured takes the CPU only where that is asked for, or where there is nothing else: a torch that cannot use a
machine's GPUs (built for another CUDA, an older driver) would otherwise time toy sizes there, in a job that ends well.
torch is imported where it is asked: what it sees is settled then.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import pynvml

from moe_ep_bench.errors import CASES_FAILED, LOST, OK, UserError, brief
from moe_ep_bench.machine.provenance import query_gpus
from moe_ep_bench.runtime.sharing import MOST_PER_GPU, Sharing, check_sharing

# Of ranks: the folder in which they leave their status, and find a request to close.
_FOLDER = "MOE_EP_BENCH_LAUNCH"
# Of ranks: the arguments of the command that started them, as JSON.
_ARGUMENTS = "MOE_EP_BENCH_ARGUMENTS"
# torchrun would keep one store for all starts, in which gloo finds the addresses of ranks that have ended.
_DEFAULTS = {"OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_DEVICES = Path("/dev")
# So many CPU ranks per core at most, and this many wherever: they share time slices, and rows say so.
_RANKS_PER_CORE, _LEAST_RANKS = 2, 4

STOPPED_WORDS = "stopped: what is finished is kept, the same command does what is left"


# ---- how many ranks, and on what -------------------------------------------------------------------------------------


def take_cpu() -> None:
    """Measure on the CPU, whatever is here; before torch is imported, and for all processes that this one starts."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""


def _seen_gpus() -> str:
    """GPUs of this node: as the driver lists them, else their files; empty where there are none."""
    with contextlib.suppress(pynvml.NVMLError):  # No driver, or no GPU.
        if gpus := query_gpus():
            return f"the driver lists {gpus[-1]['name']}, driver {gpus[-1]['driver']}"
    return ", ".join(sorted(map(str, _DEVICES.glob("nvidia[0-9]"))))


def num_gpus() -> int:
    """GPUs that torch can use; it is not imported where there are none."""
    if "torch" not in sys.modules and not _seen_gpus():
        return 0
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def device_type() -> str:
    """``cuda`` where torch can use a GPU, else ``cpu``; an empty CUDA_VISIBLE_DEVICES (--cpu) asks for the CPU.

    Raises:
        UserError: there are GPUs that torch cannot use, or that are hidden from it, and the CPU is not asked for.
    """
    if num_gpus():
        return "cuda"
    seen = _seen_gpus()
    if not seen or os.environ.get("CUDA_VISIBLE_DEVICES") == "":
        return "cpu"
    import torch

    why = f"it is built for CUDA {torch.version.cuda} and finds no device"
    try:
        torch.cuda.init()
    except Exception as error:  # of whatever kind: it is the answer
        why = brief(error, 200, quoted=False)
    raise UserError(
        f"GPUs: {seen}, and torch can use none ({why}); expected a torch for this driver (launch/setup.sh --cuda12 for "
        "CUDA 12), in Slurm a job with --gpus-per-node, or --cpu"
    )


def local_ranks(wanted: int | None) -> int:
    """Ranks on this node: as many as are wanted, else one per GPU; without any, one CPU rank per core, 2 to 4.

    Raises:
        UserError: none are wanted.
    """
    if wanted is not None and wanted < 1:
        raise UserError(f"--nproc: expected at least 1, got {wanted}")
    return wanted or num_gpus() or min(max(len(os.sched_getaffinity(0)), 2), 4)


def check_num_ranks(nproc: int, sharing: Sharing | None = None) -> None:
    """Refuse more ranks on this node than it can carry: one per GPU, or two per core (4 on fewer cores).

    Args:
        sharing: by what ranks share a GPU, which then carries several, as a core does.

    Raises:
        UserError: there are more; or as ``device_type`` and ``check_sharing``.
    """
    device = device_type()
    if sharing is not None:
        check_sharing(sharing, device)
    if device == "cuda":
        most, of = num_gpus(), "the GPUs here"
        if sharing is not None:
            most, of = most * MOST_PER_GPU, f"{MOST_PER_GPU} on each GPU here"
    else:
        cores = len(os.sched_getaffinity(0))
        most, of = max(_RANKS_PER_CORE * cores, _LEAST_RANKS), f"for {cores} cores"
        if sharing is not None:
            most = MOST_PER_GPU * cores
    if nproc > most:
        raise UserError(f"--nproc: expected at most {most} ({of}), got {nproc}")


def num_nodes() -> int:
    """Nodes of the job that torchrun's own variable names; a benchmark's ranks neither come late nor leave."""
    return int(os.environ.get("PET_NNODES", "1"))


# ---- starting them ---------------------------------------------------------------------------------------------------


class Ended(NamedTuple):
    """How a job ended.

    Attributes:
        status: what the ranks agreed on, ``LOST`` where they could not, 128 + signal where one ended this process.
        has_rank_0: whether rank 0 was on this node.
    """

    status: int
    has_rank_0: bool = False


def torchrun(commands: Sequence[Sequence[str]], nproc: int, *, max_restarts: int = 0, plan: str = "") -> Ended:
    """Run ``moe_ep_bench COMMAND`` on so many ranks of this node, one after another until one does not go through.

    Args:
        plan: what ``launched_plan`` returns in each rank.
    """
    worst = Ended(OK)
    with tempfile.TemporaryDirectory(prefix="moe-ep-bench-") as folder:
        Path(folder, "plan.json").write_text(plan)
        close = Path(folder, "close")  # a file, for ranks whom no signal reaches
        earlier = signal.signal(signal.SIGUSR1, lambda number, frame: close.touch())
        try:
            for command in commands:
                ended = _torchrun(folder, command, nproc, max_restarts)
                # Which node has rank 0 may change.
                worst = ended._replace(status=max(worst.status, ended.status))
                if ended.status not in (OK, CASES_FAILED):
                    return ended
        finally:
            signal.signal(signal.SIGUSR1, earlier)
    return worst


def _torchrun(folder: str, command: Sequence[str], nproc: int, max_restarts: int) -> Ended:
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main

    options = [f"--nproc-per-node={nproc}", f"--log-dir={folder}"]
    options += [] if "PET_MAX_RESTARTS" in os.environ else [f"--max-restarts={max_restarts}"]
    options += ["--standalone"] if num_nodes() == 1 else []
    agreed, before = Path(folder, "status"), dict(os.environ)
    agreed.unlink(missing_ok=True)
    os.environ |= {**_DEFAULTS, _FOLDER: folder, _ARGUMENTS: json.dumps(sys.argv[1:]), **before}  # A user's stay.
    try:
        main([*options, "-m", "moe_ep_bench", *command])
    except SignalException as stopped:
        print(f"moe-ep-bench: {STOPPED_WORDS}", file=sys.stderr)
        return Ended(128 + int(stopped.sigval))
    except ChildFailedError:  # torchrun has said which ranks failed, and they why.
        return Ended(LOST)
    except Exception as error:  # Nodes that do not meet, say; torch keeps what went wrong in the cause.
        where = f" at {endpoint}" if (endpoint := os.environ.get("PET_RDZV_ENDPOINT")) else ""
        words = brief(error.__cause__ or error, 200, quoted=False)
        print(f"moe-ep-bench: torchrun{where}: {type(error).__name__}: {words}", file=sys.stderr)
        return Ended(LOST)
    finally:
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
    status, node = map(int, agreed.read_text().split()) if agreed.exists() else (LOST, None)
    return Ended(status, node == 0)


# ---- in a rank -------------------------------------------------------------------------------------------------------


def is_launched() -> bool:
    """Whether ``torchrun`` above started this rank, and not somebody's own."""
    return _FOLDER in os.environ


def launched_plan() -> str | None:
    """What ``torchrun`` above was given as the plan of its ranks; None in a rank that somebody else started."""
    folder = os.environ.get(_FOLDER)
    return None if folder is None else Path(folder, "plan.json").read_text()


def become_rank() -> None:
    """End at signals wherever this process is stuck, and with torchrun's process. Before torch is imported."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # ``torchrun`` handles it.
    if "TORCHELASTIC_RUN_ID" in os.environ:
        end_with_parent()


def end_with_parent() -> None:
    """Have this process get a SIGTERM where the one that started it is killed."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def leave_status(status: int) -> int:
    """Leave the status on which all ranks agreed; return what this process is to end with."""
    folder = os.environ.get(_FOLDER)
    if folder is None:  # Somebody's own torchrun.
        return status
    if os.environ.get("LOCAL_RANK") == "0":
        Path(folder, "status").write_text(f"{status} {os.environ['GROUP_RANK']}")
    return 0


def asked_arguments() -> list[str]:
    """Arguments of the command that the user gave: in a rank those of the process that started it."""
    return json.loads(os.environ[_ARGUMENTS]) if _ARGUMENTS in os.environ else sys.argv[1:]


def asked_to_close() -> bool:
    """Whether this node was asked (SIGUSR1) to end after the comparison that is measured."""
    folder = os.environ.get(_FOLDER)
    return folder is not None and Path(folder, "close").exists()
