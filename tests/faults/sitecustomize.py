"""Faults for tests: with this folder on PYTHONPATH, ranks fail where MOE_EP_BENCH_FAULTS says.

``policy=fault`` pairs, comma-separated; the fault strikes on the last rank (``wrong``: on all ranks)
whenever that policy routes inside a layer, in a Slurm job only until it is requeued. Python imports this module at
start-up.
"""

import os
import signal
import sys
import time
from collections import Counter
from pathlib import Path

FAULTS = dict(pair.split("=") for pair in os.environ.get("MOE_EP_BENCH_FAULTS", "").split(",") if pair)


def _strike(fault: str) -> None:
    if fault == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif fault == "hang" or (fault == "hang_later" and _has_parts()):
        time.sleep(3600)
    elif fault == "oom":
        import torch

        raise torch.OutOfMemoryError("out of memory: tried to allocate 20.00 GiB (a fault for tests)")
    elif fault == "hoard":
        import torch

        torch.empty(2**46, dtype=torch.uint8, device="cuda")


def _has_parts() -> bool:
    """Whether a comparison has been finished."""
    return any(Path(sys.argv[sys.argv.index("--out") + 1]).glob("cases/*.parquet"))


def _inject() -> None:
    from moe_ep_bench.layer.router import PolicyRouter

    routing = PolicyRouter.routing
    calls = Counter()

    def faulty(self, logits, padding_mask=None):
        fault = FAULTS.get(self.policy.name)
        calls[self.policy.name] += 1
        # "late": right in the check, the warm-up and while timed, wrong in the check that follows.
        if fault == "wrong" or (fault == "late" and calls[self.policy.name] > 5):
            weights_TE, map_TE = routing(self, logits, padding_mask)
            return weights_TE.roll(1, dims=1), map_TE.roll(1, dims=1)
        if fault and os.environ.get("RANK") == str(int(os.environ["WORLD_SIZE"]) - 1):
            _strike(fault)
        return routing(self, logits, padding_mask)

    PolicyRouter.routing = faulty


if FAULTS and "run" in sys.orig_argv and "SLURM_RESTART_COUNT" not in os.environ:
    _inject()
