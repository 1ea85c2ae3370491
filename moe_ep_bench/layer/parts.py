"""What a layer is made of: its experts, by which dispatcher and permutation follow.

``grouped``     ours: all experts in two calls of ``torch.nn.functional.grouped_mm``; permutations by index
``decode``      ours, for few tokens: each activated expert's weights are read once (Triton on a GPU). Every rank gets
                all tokens, and sums are scattered back: nothing is permuted or waits for the host, as CUDA graphs need
``sequential``  Megatron-Core's own: one expert after the other (``SequentialMLP``), and its permutations
``te``          Megatron-Core's with Transformer Engine: ``TEGroupedMLP``, fused permutations, native's top-k fused

All but ``decode`` send each pair to its expert's rank, and wait for the host to learn how many there are. ``auto`` is
``decode`` in a CUDA graph, else ``te`` on a GPU with Transformer Engine, else ``grouped``.
"""

from __future__ import annotations

from dataclasses import dataclass

from moe_ep_bench.errors import UserError
from moe_ep_bench.kernels import triton_lacks
from moe_ep_bench.machine.provenance import version_of
from moe_ep_bench.models import ModelSpec

# From this version on Transformer Engine selects experts and permutes rows in kernels that Megatron-Core takes.
LEAST_TE = (2, 6)
_PERMUTATIONS = {"decode": "none", "sequential": "megatron", "te": "fused"}


@dataclass(frozen=True)
class Parts:
    """What runs, with ``auto`` decided."""

    experts: str = "grouped"
    cuda_graph: bool = False
    """Replay timed runs from CUDA graphs (``graphs``)."""
    experts_why: str = ""
    """Why these experts; empty where they were asked for by name."""

    @property
    def permute(self) -> str:
        """How rows are sorted by expert, and put back: ``indexed``, ``megatron``, ``fused`` or ``none``."""
        return _PERMUTATIONS.get(self.experts, "indexed")

    @property
    def dispatcher(self) -> str:
        """Megatron-Core's type."""
        return "allgather" if self.experts == "decode" else "alltoall"

    def fuses_router(self, model: ModelSpec) -> bool:
        """Whether native's top-k is fused; the root of a softplus only later versions of Transformer Engine know."""
        return self.experts == "te" and model.score_function != "sqrtsoftplus"

    @staticmethod
    def choose(experts: str, *, cuda_graph: bool = False, on_cpu: bool) -> Parts:
        """Decide ``auto`` for this machine.

        Raises:
            ValueError: something was asked for by name that cannot run here.
        """
        version = version_of("transformer-engine")
        is_old = version is None or tuple(map(int, version.split(".")[:2])) < LEAST_TE
        lacking = "a GPU" if on_cpu else f"Transformer Engine {'.'.join(map(str, LEAST_TE))} or later" if is_old else ""
        if cuda_graph and on_cpu:
            raise UserError("layer.cuda_graph: true needs a GPU; expected false on CPU ranks")
        if cuda_graph and experts not in ("auto", "decode"):
            needed = "layer.experts decode, for others wait for the host"
            raise UserError(f"layer.cuda_graph: true needs {needed}; got {experts}")
        if experts == "te" and lacking:
            got = "" if on_cpu else f", got {version or 'none'}"
            raise UserError(f"layer.experts: te needs {lacking}{got}; expected auto, grouped or sequential")
        if (experts == "decode" or cuda_graph) and not on_cpu and (without := triton_lacks()):
            key = "layer.cuda_graph: true" if cuda_graph else "layer.experts: decode"
            raise UserError(f"{key} needs Triton's kernels on a GPU: {without}; see moe-ep-bench doctor")
        if experts != "auto":
            return Parts(experts, cuda_graph=cuda_graph)
        if cuda_graph:
            return Parts("decode", cuda_graph=True, experts_why="a CUDA graph holds no others")
        return Parts("grouped" if lacking else "te")


DEFAULT_PARTS = Parts()
