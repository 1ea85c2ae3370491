"""Files of how alike a checkpoint's experts are, which ``trace record --similarity`` writes and ``sere`` reads.

A safetensors file holds ``similarity``, float32 [L, E, E] from 0 to 1, a matrix for each MoE layer from the first (or
one for all), and string metadata: ``format`` (moe-similarity-v1), ``model``, ``measure``, ``tokens``, ``text`` and its
hash.

Shapes: E = experts, L = MoE layers.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from moe_ep_bench.errors import UserError, brief
from moe_ep_bench.policies.lazy import Tensor, torch

FORMAT, TENSOR = "moe-similarity-v1", "similarity"
HOW = "moe-ep-bench trace record CHECKPOINT --text FILE --similarity FILE writes one"


@dataclass(frozen=True)
class Similarity:
    """A file of matrices, whose values are read when the first routing asks for them.

    Attributes:
        sha256: of the file.
        model: whose experts these are, where it says so.
    """

    path: Path
    sha256: str
    num_layers: int
    num_experts: int
    model: str | None

    def matrices(self, device: torch.device) -> Tensor:
        """All layers' matrices: float32 [L, E, E] on a device, where they stay."""
        return _matrices(self, str(device))


@lru_cache(maxsize=16)
def _matrices(of: Similarity, device: str) -> Tensor:
    from safetensors import safe_open

    with safe_open(of.path, framework="np") as file:
        return torch.from_numpy(file.get_tensor(TENSOR)).to(device)


def open_similarity(path: Path) -> Similarity:
    """Look at a file, without its values.

    Raises:
        ValueError: no such file, or another one; one line that says how to make one.
    """
    if not path.is_file():
        raise UserError(f"{path}: no such file; {HOW}", "similarity")
    return _open(path, path.stat().st_mtime_ns)


@lru_cache(maxsize=16)
def _open(path: Path, _: int) -> Similarity:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="np") as file:
            facts = file.metadata() or {}
            num_layers, num_experts = file.get_slice(TENSOR).get_shape()[:2]
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path}: not readable ({brief(str(error), quoted=False)}); {HOW}", "similarity") from None
    if (form := facts.get("format")) != FORMAT:
        raise UserError(f"{path}: expected format {FORMAT}, got {brief(form)}; {HOW}", "similarity")
    with path.open("rb") as content:
        digest = hashlib.file_digest(content, "sha256").hexdigest()
    return Similarity(path, digest, num_layers, num_experts, facts.get("model"))
