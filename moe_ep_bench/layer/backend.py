"""The implementations of a layer: its experts, which determine dispatcher and permutation.

``grouped``     ours: all experts in two calls of ``torch.nn.functional.grouped_mm``; permutations by index
``decode``      ours, for few tokens: each activated expert's weights are read once (Triton on a GPU). Every rank gets
                all tokens, and sums are scattered back: nothing is permuted or waits for the host, as CUDA graphs need
``sequential``  Megatron-Core's own: one expert after the other (``SequentialMLP``), and its permutations
``te``          Megatron-Core's with Transformer Engine: ``TEGroupedMLP``, fused permutations, native's top-k fused

With ``layer.dtype: fp8_block`` the GEMMs of ``te`` experts are in blocks of FP8: E4M3, with a scale for 1 x 128 values
and one for 128 x 128 weights. Megatron-Core's own context asks for it, and its experts pad each expert's rows to a
multiple of 16. All else is as in bfloat16: rows are sent before they are rounded.

All but ``decode`` send each pair to its expert's rank, and wait for the host to learn how many there are. ``auto`` is
``decode`` in a CUDA graph, else ``te`` on a GPU with Transformer Engine, else ``grouped``. Permutations follow experts,
unless ``fused`` or ``unfused`` ones are asked for by name.
"""

from __future__ import annotations

from dataclasses import dataclass

from moe_ep_bench.errors import UserError
from moe_ep_bench.kernels import triton_lacks
from moe_ep_bench.machine.provenance import compute_capabilities, version_of
from moe_ep_bench.models import ModelSpec
from moe_ep_bench.policies.lazy import torch

# From this version on Megatron-Core takes Transformer Engine's fused top-k (its permutations from 2.1 on).
LEAST_TE = (2, 7)
# Below it Transformer Engine has no GEMMs in blocks of FP8.
_LEAST_FP8_CUDA = (12, 9)
_PERMUTATIONS = {"decode": "none", "sequential": "megatron", "te": "fused"}


@dataclass(frozen=True)
class LayerBackend:
    """The implementations that run, with ``auto`` decided."""

    experts: str = "grouped"
    cuda_graph: bool = False
    """Replay timed runs from CUDA graphs (``graphs``)."""
    experts_why: str = ""
    """Why these experts; empty where they were asked for by name."""
    permutation: str = ""
    """In place of the one that goes with these experts; empty = that one."""
    fp8: bool = False
    """Experts multiply in blocks of FP8."""

    @property
    def permute(self) -> str:
        """How rows are sorted by expert, and put back: ``indexed``, ``megatron``, ``fused`` or ``none``."""
        return self.permutation or _PERMUTATIONS.get(self.experts, "indexed")

    @property
    def dispatcher(self) -> str:
        """Megatron-Core's type."""
        return "allgather" if self.experts == "decode" else "alltoall"

    def arithmetic(self, dtype: str) -> str:
        """The dtype in which experts of this dtype multiply: a key of ``experts.TOLERANCE``.

        Transformer Engine rounds operands of float32 to TF32, whatever torch is told.
        """
        return "tf32" if self.experts == "te" and dtype == "float32" else dtype

    def fuses_router(self, model: ModelSpec) -> bool:
        """Whether native's top-k is fused; the root of a softplus only later versions of Transformer Engine know."""
        return self.experts == "te" and model.score_function != "sqrtsoftplus"

    @staticmethod
    def choose(
        experts: str, permute: str = "auto", *, cuda_graph: bool = False, fp8: bool = False, on_cpu: bool
    ) -> LayerBackend:
        """Decide ``auto`` for this machine.

        Args:
            permute: ``fused`` by Transformer Engine, ``unfused``, or ``auto``.
            fp8: ``layer.dtype`` is ``fp8_block``.

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
        got = "" if on_cpu else f", got {version or 'none'}"
        if fp8:
            _check_fp8(experts, f"{lacking}{got}" if lacking else fp8_lacks(), cuda_graph=cuda_graph)
        if experts == "te" and lacking:
            raise UserError(f"layer.experts: te needs {lacking}{got}; expected auto, grouped or sequential")
        if permute != "auto" and (experts == "decode" or cuda_graph):
            raise UserError(f"layer.permute: expected auto with decode experts, which permute nothing; got {permute}")
        if permute == "fused" and lacking:
            raise UserError(f"layer.permute: fused needs {lacking}{got}; expected auto or unfused")
        if (experts == "decode" or cuda_graph) and not on_cpu and (without := triton_lacks()):
            key = "layer.cuda_graph: true" if cuda_graph else "layer.experts: decode"
            raise UserError(f"{key} needs Triton's kernels on a GPU: {without}; see moe-ep-bench doctor")
        if cuda_graph:
            why = "" if experts == "decode" else "a CUDA graph holds no others"
            return LayerBackend("decode", cuda_graph=True, experts_why=why)
        ran = experts if experts != "auto" else "grouped" if lacking else "te"
        own = "indexed" if permute == "unfused" and ran == "te" else ""
        return LayerBackend(ran, permutation="fused" if permute == "fused" else own, fp8=fp8)


def fp8_lacks() -> str:
    """What this machine's GPUs or torch lack for GEMMs in blocks of FP8; empty where they have all.

    On a later GPU than Hopper's Transformer Engine computes these as MXFP8, another dtype. One of a node's GPUs
    must be Hopper's, as another may be there for a screen; Transformer Engine itself refuses an older one.
    """
    found = compute_capabilities()
    if found and all(major != 9 for major, _ in found):
        got = ", ".join(f"{major}.{minor}" for major, minor in found)
        return f"a GPU of compute capability 9.0 (H100, H200, H20), got {got}"
    cuda = torch.version.cuda
    if cuda is None or tuple(map(int, cuda.split("."))) < _LEAST_FP8_CUDA:
        return f"a torch for CUDA {'.'.join(map(str, _LEAST_FP8_CUDA))} or later, got {cuda or 'none'}"
    return ""


def _check_fp8(experts: str, lacking: str, *, cuda_graph: bool) -> None:
    """Refuse ``layer.dtype: fp8_block`` where no experts compute in it; ``lacking`` says what is missing here."""
    key, others = "layer.dtype: fp8_block", "expected bfloat16 or float32, or a modelled device (emulate.device)"
    if lacking:
        raise UserError(f"{key} needs {lacking}; {others}")
    if cuda_graph:
        raise UserError(f"{key} needs layer.cuda_graph false, for experts in FP8 wait for the host; got true")
    if experts not in ("auto", "te"):
        raise UserError(f"{key} needs layer.experts auto or te, for no others compute in FP8; got {experts}")


DEFAULT_BACKEND = LayerBackend()
