"""Who computes the experts, who permutes and who routes: what a config may ask for, and what runs on this machine.

Experts (``backends``)

``sequential``  Megatron-Core's ``SequentialMLP``: one expert after the other
``grouped``     ours: all experts in two calls of ``torch.nn.functional.grouped_mm``
``decode``      ours, for few tokens: a Triton kernel that reads each activated expert's weights once; needs a GPU
``te``          Megatron-Core's ``TEGroupedMLP``; needs Transformer Engine and a GPU

Permutation

``megatron``    Megatron-Core's own, without Transformer Engine
``indexed``     ours, by index (``permutation``)
``fused``       Transformer Engine's kernels through Megatron-Core; needs Transformer Engine and a GPU

Routing by a policy: see ``kernels.twins``, for what can run depends on the policy.

``auto`` takes Transformer Engine where it is, else ours; ``decode`` where the device's file states below how many rows
an expert it was measured faster, and there are fewer (``devices.takes_decode``). What was asked for, what ran and why
are recorded.
"""

from __future__ import annotations

from dataclasses import dataclass

from moe_ep_bench.environment import package_versions

EXPERTS = ("auto", "sequential", "grouped", "decode", "te")
PERMUTE = ("auto", "megatron", "indexed", "fused")

# Megatron-Core takes Transformer Engine's permutation kernels from this version on.
_FUSED_PERMUTE_SINCE = (2, 1)


@dataclass(frozen=True)
class Parts:
    """What runs, after ``auto`` was decided."""

    experts: str = "grouped"
    permute: str = "indexed"
    kernel: str = "auto"
    """Of routing, as it was asked for."""
    experts_why: str = ""
    """Why these experts; empty where nothing was left open."""

    @staticmethod
    def choose(
        experts: str, permute: str, kernel: str = "auto", *, on_cpu: bool, decode: tuple[bool, str] = (False, "")
    ) -> Parts:
        """Decide what was left to this machine.

        Args:
            decode: whether ``auto`` takes the decode experts where there is a GPU, and why (``devices.takes_decode``).

        Raises:
            ValueError: something was asked for by name that cannot run here.
        """
        version = package_versions()["transformer_engine"]
        lacking = "a GPU" if on_cpu else "" if version else "Transformer Engine, which is not installed"
        if experts == "decode" and on_cpu:
            raise ValueError("layer.experts: decode needs a GPU; expected auto, grouped or sequential")
        if experts == "te" and lacking:
            raise ValueError(f"layer.experts: te needs {lacking}; expected auto, grouped or sequential")
        if permute == "fused" and not lacking and not _fuses(version):
            raise ValueError(
                f"layer.permute: fused needs Transformer Engine >= 2.1, found {version}; "
                "expected auto, indexed or megatron"
            )
        if permute == "fused" and lacking:
            raise ValueError(f"layer.permute: fused needs {lacking}; expected auto, indexed or megatron")
        takes_decode, why = (False, "") if on_cpu or experts != "auto" else decode
        return Parts(
            experts=("decode" if takes_decode else "grouped" if lacking else "te") if experts == "auto" else experts,
            permute=("indexed" if lacking or not _fuses(version) else "fused") if permute == "auto" else permute,
            kernel=kernel,
            experts_why=why,
        )


def _fuses(version: str | None) -> bool:
    return version is not None and tuple(int(part) for part in version.split(".")[:2]) >= _FUSED_PERMUTE_SINCE
