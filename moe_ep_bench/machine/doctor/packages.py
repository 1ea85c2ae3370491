"""Which packages are there, whether they can be imported, and what a run does without those that are not."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from moe_ep_bench.machine.doctor.findings import NOTE, OK, PROBLEM, Finding

# As in pyproject.toml: at least, and below.
_SUPPORTED = {"python": ((3, 11), (3, 13)), "torch": ((2, 11), None), "megatron_core": ((0, 16, 1), (0, 20))}
_NAMES = {
    "python": "Python",
    "torch": "torch",
    "megatron_core": "megatron-core",
    "transformer_engine": "Transformer Engine",
    "apex": "NVIDIA Apex",
    "deep_ep": "DeepEP",
    "triton": "Triton",
}
_SET_UP = "launch/setup.sh installs it"
_CONTAINER = "NVIDIA's PyTorch containers bring it: launch/setup.sh --system-torch"

# What a GPU run does without, and what to do.
_WITHOUT = {
    "transformer_engine": (
        "our grouped GEMMs compute the experts and our indexed permutation moves rows, neither of them fused as in a"
        " paper's system: phase shares are not to be set beside theirs",
        _CONTAINER,
    ),
    "apex": ("Megatron-Core falls back on torch's own kernels; none of Apex's lie in the layer that is timed", ""),
    "deep_ep": ("Megatron-Core's flex dispatcher cannot run; alltoall and allgather can", ""),
    "triton": ("policies are routed by torch, several times slower, and decode experts cannot run", _SET_UP),
}
_ON_GPUS_ONLY = ("transformer_engine", "apex", "deep_ep")


def package_findings(machine: Mapping[str, Any], broken: Mapping[str, str]) -> list[Finding]:
    """Judge versions and imports.

    Args:
        machine: ``facts.machine``.
        broken: ``facts.imports``.
    """
    versions, on_gpus = machine["packages"], bool(machine["gpus"])
    there = [f"{name} {versions[key]}" for key, name in _NAMES.items() if versions[key] and key not in broken]
    findings = [Finding("packages", OK, ", ".join(there))]
    for key, (least, below) in _SUPPORTED.items():
        if versions[key] is None:
            findings.append(
                Finding("packages", PROBLEM, f"{_NAMES[key]} is not installed", "no layer can be built", _SET_UP)
            )
        elif not _within(versions[key], least, below):
            allowed = f"{_dotted(least)} or newer" + (f", below {_dotted(below)}" if below else "")
            what = f"{_NAMES[key]} {versions[key]}, expected {allowed}"
            findings.append(Finding("packages", PROBLEM, what, "this program was never tried with it", _SET_UP))
    missing = [key for key in _WITHOUT if versions[key] is None and (on_gpus or key not in _ON_GPUS_ONLY)]
    for key in missing:
        findings.append(Finding("packages", NOTE, f"{_NAMES[key]} is not installed", *_WITHOUT[key]))
    idle = [_NAMES[key] for key in _ON_GPUS_ONLY if versions[key] is None and not on_gpus]
    if idle:
        findings.append(Finding("packages", OK, f"not installed, and of use on GPUs only: {', '.join(idle)}"))
    if machine["foreign_apex"]:
        what = "apex here is another project's of that name"
        findings.append(Finding("packages", NOTE, what, "nothing uses it; it is not NVIDIA Apex", "pip uninstall apex"))
    for key, why in broken.items():
        if versions[key] is None and key in _WITHOUT:
            continue  # some other project's module
        # On a CPU run nothing asks for these.
        status = PROBLEM if on_gpus or key == "megatron_core" else NOTE
        what = f"{_NAMES[key]} {versions[key]} is installed and cannot be imported ({why})"
        fix = "install it anew, built for this torch and this CUDA"
        findings.append(Finding("packages", status, what, "what is chosen because it is there will fail", fix))
    return findings


def _within(version: str, least: tuple[int, ...], below: tuple[int, ...] | None) -> bool:
    found = tuple(int(part) for part in re.findall(r"\d+", version)[:3])
    return found >= least and (below is None or found < below)


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))
