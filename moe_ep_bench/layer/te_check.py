"""Whether Transformer Engine works on this GPU: a batch through what a layer takes of it, beside torch.

Installed is not enough: builds for another torch or CUDA fail at import, end the process, or compute nonsense on a GPU
that they do not know. So a child process tries it (``transformer_engine``), once for a command and its ranks.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

# What a command has found, for its ranks.
_FOUND = "MOE_EP_BENCH_TRANSFORMER_ENGINE"
# Importing it takes half a minute at worst, and the first look at a GPU as long.
_TIMEOUT_S = 180.0
_ALLOWED_ERROR = 0.02  # of bfloat16 products


class TransformerEngine(NamedTuple):
    """What of an installed Transformer Engine can be used here."""

    problem: str = ""
    """Why its experts and permutation cannot; empty where they can."""
    routes: bool = False
    """Whether its fused top-k can."""


def transformer_engine() -> TransformerEngine:
    """Try it in a child process; ranks take what their command found."""
    if _FOUND not in os.environ:
        os.environ[_FOUND] = json.dumps(_of_a_child())
    return TransformerEngine(*json.loads(os.environ[_FOUND]))


def _of_a_child(device: str = "cuda") -> tuple[str, bool]:
    code = f"import json; from {__name__} import tried; print(json.dumps(tried({device!r})))"
    paths = {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    how: Any = {"capture_output": True, "text": True, "timeout": _TIMEOUT_S, "env": {**os.environ, **paths}}
    try:
        done = subprocess.run([sys.executable, "-c", code], **how)
    except subprocess.TimeoutExpired:
        return f"no answer within {_TIMEOUT_S:g} s", False
    if done.returncode < 0:
        return f"died of signal {-done.returncode}", False
    said = (done.stderr if done.returncode else done.stdout).strip().splitlines() or ["it ended without a word"]
    return (said[-1][:300], False) if done.returncode else tuple(json.loads(said[-1]))


@contextlib.contextmanager
def untried() -> Iterator[None]:
    """Take it to work while the block lasts, but for its fused top-k, where nothing may touch a GPU."""
    known = _FOUND in os.environ
    os.environ.setdefault(_FOUND, json.dumps(["", False]))
    try:
        yield
    finally:
        if not known:
            del os.environ[_FOUND]


def tried(device: str = "cuda") -> tuple[str, bool]:
    """``TransformerEngine`` on a device, tried in this process; what it raises is a problem too."""
    import torch
    import transformer_engine.pytorch as te

    with torch.inference_mode():
        generator = torch.Generator().manual_seed(1)
        randn = functools.partial(torch.randn, generator=generator)
        hidden_TD, logits_TE = randn(32, 64).to(device, torch.bfloat16), randn(32, 4).to(device)
        top_TK = logits_TE.topk(2, dim=1).indices
        map_TE = torch.zeros_like(logits_TE, dtype=torch.bool).scatter_(1, top_TK, True)
        token_N = map_TE.T.nonzero()[:, 1]
        # A layer asks for as many rows as a policy may choose, and cuts those that are over (``dispatchers``).
        rows_ND = te.moe_permute(hidden_TD, map_TE, num_out_tokens=len(token_N) + 3, map_type="mask")[0]
        rows_ND, num_spare = rows_ND[: len(token_N)], len(rows_ND) - len(token_N)
        if num_spare != 3 or not torch.equal(rows_ND, hidden_TD[token_N]):
            return "its permutation gives other rows than torch", False
        counts = map_TE.sum(0).tolist()
        experts = te.GroupedLinear(4, 64, 128, bias=False, params_dtype=torch.bfloat16, device=device)
        parts = zip(rows_ND.float().split(counts), range(4), strict=True)
        expected_NF = torch.cat([part @ getattr(experts, f"weight{number}").float().T for part, number in parts])
        error = float((experts(rows_ND, counts).float() - expected_NF).norm() / expected_NF.norm())
        if not error <= _ALLOWED_ERROR:
            return f"its grouped GEMM is off by {error:.2g} of its result", False
        return "", _routes(logits_TE, map_TE)


def _routes(logits_TE: Any, map_TE: Any) -> bool:
    """Whether there is a fused top-k that selects as torch does; not before Transformer Engine 2.6."""
    try:
        from transformer_engine.pytorch.router import fused_topk_with_score_function

        options = dict.fromkeys(("num_groups", "group_topk", "scaling_factor", "expert_bias"))
        chosen_TE = fused_topk_with_score_function(
            logits=logits_TE, topk=2, use_pre_softmax=False, score_function="softmax", **options
        )[1]
        return bool((chosen_TE.bool() == map_TE).all())
    except Exception:  # Of whatever kind: without it Megatron-Core's own selects.
        return False
