"""Faults for tests: with this folder on PYTHONPATH, ranks fail where MOE_EP_BENCH_FAULTS says.

``policy=fault`` pairs, comma-separated; the fault strikes on the last rank (``wrong``: on all ranks)
whenever that policy routes inside a layer, with ``@timed`` behind it only while the layer is timed; in a Slurm job only
until it is requeued, or with ``until=2`` until it is requeued the second time.
Some keys are no policies: ``torch=1.0`` gives the last rank another version of torch. ``build=oom`` lets the last rank
run out of memory when it builds its first layer, ``check=oom`` when it holds outputs against the reference for the
fourth time.
``unheard`` leaves the last rank's statistics out of what the ranks of a batch-wide policy sum.
``exchange=wrong`` and ``exchange=kill`` strike in the all-to-all of ``doctor``. Python imports this module at start-up.
"""

import itertools
import os
import signal
import sys
import time
from collections import Counter
from pathlib import Path

FAULTS = dict(pair.split("=") for pair in os.environ.get("MOE_EP_BENCH_FAULTS", "").split(",") if pair)


def _is_last_rank() -> bool:
    return os.environ.get("RANK") == str(int(os.environ.get("WORLD_SIZE", "1")) - 1)


def _strike(fault: str) -> None:
    if fault == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif HANGS.get(fault, bool)():
        if fault.startswith("stuck"):  # The device is busy for an hour; the host goes on until it waits for it.
            import torch

            torch.cuda._sleep(10**13)
        else:
            time.sleep(3600)
    elif fault == "stray":  # Waits in a collective to which nobody comes, while the others wait for it in theirs.
        import torch

        torch.distributed.barrier()
    elif fault == "oom":
        import torch

        raise torch.OutOfMemoryError("out of memory: tried to allocate 20.00 GiB (a fault for tests)")
    elif fault == "raise":
        raise ValueError("no kernel compiles here\n(a fault for tests)")
    elif fault == "hoard":
        import torch

        torch.empty(2**46, dtype=torch.uint8, device="cuda")


def _left(folder: str) -> bool:
    """Whether something was finished (``cases``)."""
    return any(Path(sys.argv[sys.argv.index("--out") + 1], folder).glob("*.*"))


def _is_first() -> bool:
    """Whether nobody has asked before, in any start."""
    try:
        Path(sys.argv[sys.argv.index("--out") + 1]).with_name("hung").touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


HANGS = {
    "hang": lambda: True,
    "hang_later": lambda: _left("cases"),
    "hang_once": _is_first,
    "stuck": lambda: True,
    "stuck_later": lambda: _left("cases"),
}


def _is_timed() -> bool:
    frame = sys._getframe()
    while frame is not None:
        if frame.f_code.co_name == "timed" and frame.f_code.co_filename.endswith("timer.py"):
            return True
        frame = frame.f_back
    return False


def _inject() -> None:
    from moe_ep_bench.layer.megatron import TopKRouter
    from moe_ep_bench.layer.router import PolicyRouter

    routing, gating, sum_over_ranks = PolicyRouter.routing, TopKRouter.gating, PolicyRouter.sum_over_ranks
    calls = Counter()

    def faulty(self, logits, padding_mask=None):
        fault, _, when = FAULTS.get(self.policy.name, "").partition("@")
        calls[self.policy.name] += 1
        # "late": right in the trial, the check, the warm-up and while timed, wrong in the check that follows.
        if fault == "wrong" or (fault == "late" and calls[self.policy.name] > 7):
            weights_TE, map_TE = routing(self, logits, padding_mask)
            return weights_TE.roll(1, dims=1), map_TE.roll(1, dims=1)
        if fault and _is_last_rank() and (not when or _is_timed()):
            if fault == "nan-scores":
                logits = logits.clone()
                logits.view(-1)[-1] = float("nan")
            _strike(fault)
        return routing(self, logits, padding_mask)

    def faulty_gate(self, input):
        logits = gating(self, input)
        name = self.policy.name if isinstance(self, PolicyRouter) else "native"
        if FAULTS.get(name) == "nan-gate" and _is_last_rank():
            logits.view(-1)[-1] = float("nan")
        if FAULTS.get("native") == "oom" and name == "native" and _is_last_rank():
            _strike("oom")
        return logits

    def faulty_sum(self, stats_SE):
        is_unheard = FAULTS.get(self.policy.name) == "unheard" and _is_last_rank()
        return sum_over_ranks(self, stats_SE * (not is_unheard))

    PolicyRouter.routing = faulty
    PolicyRouter.sum_over_ranks = faulty_sum
    TopKRouter.gating = faulty_gate


def _strike_at_call(owner, method, number, fault):
    """Let a method fail on the last rank when it is called for the ``number``-th time."""
    calls, inner = itertools.count(1), getattr(owner, method)

    def faulty(*args, **kwargs):
        if next(calls) == number and _is_last_rank():
            _strike(fault)
        return inner(*args, **kwargs)

    setattr(owner, method, faulty)


def _inject_beside_policies() -> None:
    if "build" in FAULTS:
        from moe_ep_bench.layer.stack import Stack

        _strike_at_call(Stack, "_add", 1, FAULTS["build"])
    if "check" in FAULTS:
        from moe_ep_bench.layer.experts import DenseReference

        _strike_at_call(DenseReference, "worst_error", 4, FAULTS["check"])


def _change_versions() -> None:
    from moe_ep_bench.machine import provenance

    package_versions = provenance.package_versions
    provenance.package_versions = lambda: {**package_versions(), "torch": FAULTS["torch"]}


def _exchange_wrongly() -> None:
    import torch.distributed as dist

    right = dist.all_to_all_single

    def wrong(received, *sent):
        _strike(FAULTS["exchange"])
        right(received, *sent)
        received[1] += 1

    dist.all_to_all_single = wrong


if "doctor" in sys.orig_argv and "exchange" in FAULTS and _is_last_rank() and "RANK" in os.environ:
    _exchange_wrongly()
if int(os.environ.get("SLURM_RESTART_COUNT", "0")) < int(FAULTS.pop("until", "1")):
    if "run" in sys.orig_argv and "torch" in FAULTS and _is_last_rank():
        _change_versions()
    if "run" in sys.orig_argv and "RANK" in os.environ and set(FAULTS) - {"torch"}:
        _inject()
        _inject_beside_policies()
