"""Which implementations of experts, dispatcher and permutation a config may ask for, and which run here.

Experts (``backends``)

``sequential``  Megatron-Core's ``SequentialMLP``: one expert after the other
``grouped``     ours: all experts in two calls of ``torch.nn.functional.grouped_mm``
``decode``      ours, for few tokens: each activated expert's weights are read once (Triton on a GPU)
``te``          Megatron-Core's ``TEGroupedMLP``; needs Transformer Engine and a GPU

Dispatcher (``dispatchers``)

``alltoall``    each pair travels to its expert's rank; waits for the host
``allgather``   every rank gets all tokens, and the sums are scattered back. With ``decode`` experts no token is
                permuted and nothing waits for the host, which a CUDA graph needs
``flex``        DeepEP's kernels: a token travels to a rank once; needs DeepEP, a GPU and several ranks

Permutation, which follows from the others

``megatron``    Megatron-Core's own, without Transformer Engine
``indexed``     ours, by index, in the all-to-all dispatcher
``fused``       Transformer Engine's kernels through Megatron-Core; needs Transformer Engine and a GPU
``none``        nothing is permuted

``auto`` takes Transformer Engine where it is installed and passes a check on this GPU (``te_check``), else ours; with
it the activation and native's top-k are fused too, where the version can. It takes ``decode`` where a CUDA graph needs
it; elsewhere ``decode`` is asked for by name.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from importlib.util import find_spec

from moe_ep_bench.errors import UserError
from moe_ep_bench.kernels.toolchain import triton_lacks
from moe_ep_bench.layer.te_check import TransformerEngine, transformer_engine
from moe_ep_bench.machine.provenance import version_of
from moe_ep_bench.models import ModelSpec

# Megatron-Core takes Transformer Engine's permutation kernels from this version on.
_FUSED_PERMUTE_SINCE = (2, 1)


@dataclass(frozen=True)
class Parts:
    """What runs, with ``auto`` decided."""

    experts: str = "grouped"
    permute: str = "indexed"
    kernel: str = "auto"
    """Which form of a policy routes in a layer (``kernels.dispatch``)."""
    dispatcher: str = "alltoall"
    cuda_graph: bool = False
    """Replay timed runs from CUDA graphs (``graphs``)."""
    experts_why: str = ""
    """Why these experts; empty where they were asked for by name."""
    router_fusion: bool = False
    """Native selects its experts by Transformer Engine's fused kernel."""

    def fuses_router(self, model: ModelSpec) -> bool:
        """Whether native's top-k is fused; the root of a softplus only later versions of Transformer Engine know."""
        return self.router_fusion and model.score_function != "sqrtsoftplus"

    @property
    def by_map(self) -> bool:
        """Experts take all tokens and a map: nothing is permuted."""
        return self.dispatcher == "allgather" and self.experts == "decode"

    def held_by_graphs(self, ep_size: int, scope: str) -> str | None:
        """Describe what of a layer or model (``scope``) is replayed; None where it runs eagerly."""
        if not self.cuda_graph:
            return None
        return f"the whole {scope}{' with its collectives' * (ep_size > 1)}"

    @staticmethod
    def choose(experts: str, dispatcher: str = "alltoall", *, cuda_graph: bool = False, on_cpu: bool) -> Parts:
        """Decide every ``auto`` for this machine.

        Raises:
            ValueError: something was asked for by name that cannot run here.
        """
        for error in _errors(experts, dispatcher, cuda_graph=cuda_graph, on_cpu=on_cpu):
            raise UserError(error)
        version = version_of("transformer-engine")
        lacking = "a GPU" if on_cpu else "" if version else "Transformer Engine, which is not installed"
        there, refused = TransformerEngine(), ""
        if not lacking:
            there = transformer_engine()
        if there.problem:
            refused = f"Transformer Engine {version} does not work here ({there.problem})"
            lacking = f"a Transformer Engine that works; {version} does not ({there.problem})"
        if experts == "te" and lacking:
            raise UserError(f"layer.experts: te needs {lacking}; expected auto, grouped or sequential")
        if (experts == "decode" or cuda_graph) and not on_cpu and (without := triton_lacks()):
            key = "layer.cuda_graph: true" if cuda_graph else "layer.experts: decode"
            raise UserError(f"{key} needs Triton's kernels on a GPU: {without}; see moe-ep-bench doctor")
        why = ""
        if experts == "auto":
            why = "a CUDA graph holds no others" if cuda_graph else refused
            experts = "decode" if cuda_graph else "grouped" if lacking else "te"
        parts = Parts(
            experts=experts,
            dispatcher=dispatcher,
            cuda_graph=cuda_graph,
            experts_why=why,
            router_fusion=there.routes,
        )
        return replace(parts, permute=_permutation(parts, version, lacking))


DEFAULT_PARTS = Parts()


def _errors(experts: str, dispatcher: str, *, cuda_graph: bool, on_cpu: bool) -> Iterator[str]:
    """What of a request cannot run, whatever Transformer Engine there is."""
    if cuda_graph:
        if on_cpu:
            yield "layer.cuda_graph: true needs a GPU; expected false on CPU ranks"
        needs = "layer.cuda_graph: true needs layer."
        if dispatcher != "allgather":
            yield f"{needs}dispatcher allgather, for the others wait for the host; got {dispatcher}"
        if experts not in ("auto", "decode"):
            with_others = "for with others the dispatcher waits for the host"
            yield f"{needs}experts decode (or auto), {with_others}; got {experts}"
    if dispatcher == "flex" and (on_cpu or not find_spec("deep_ep")):
        lacking = "a GPU" if on_cpu else "DeepEP (the package deep_ep), which is not installed"
        yield f"layer.dispatcher: flex needs {lacking}; expected alltoall or allgather"


def _permutation(parts: Parts, version: str | None, lacking: str) -> str:
    """Transformer Engine's where that works, else ours where the dispatcher takes it."""
    if parts.by_map:
        return "none"
    if not lacking and version is not None and tuple(map(int, version.split(".")[:2])) >= _FUSED_PERMUTE_SINCE:
        return "fused"
    return "indexed" if parts.dispatcher == "alltoall" else "megatron"
