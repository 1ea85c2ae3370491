"""Read how alike a model's experts are: a safetensors file that ``trace record --similarity`` writes of a checkpoint.

It holds ``similarity``, float32 [L, E, E] from 0 to 1, a matrix for each MoE layer from the first (or one for all),
and string metadata: ``format`` (moe-similarity-v1), ``model``, ``measure``, ``tokens``, ``text`` and its hash.

Shapes: L = MoE layers, E = experts.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

from moe_ep_bench.errors import UserError, brief
from moe_ep_bench.policies.lazy import Tensor, torch

FORMAT, TENSOR = "moe-similarity-v1", "similarity"
HOW = "moe-ep-bench trace record CHECKPOINT --text FILE --similarity FILE writes one"


@dataclass(frozen=True, eq=False)
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
    _matrices: dict[str, Tensor] = field(default_factory=dict)

    def matrix(self, layer: int, device: torch.device) -> Tensor:
        """One layer's matrix: float32 [E, E] on a device, where it stays.

        Raises:
            ValueError: values that are no similarities.
        """
        key = str(device)
        if key not in self._matrices:
            self._matrices[key] = self._read().to(device)
        return self._matrices[key][layer]

    def _read(self) -> Tensor:
        from safetensors import safe_open

        with safe_open(self.path, framework="np") as file:
            similarity_LEE = file.get_tensor(TENSOR)
        least, largest = similarity_LEE.min(), similarity_LEE.max()
        if not (least >= 0 and largest <= 1):  # NaN fails both.
            raise UserError(f"similarity: {self.path}: expected values from 0 to 1, got {least:.4g} to {largest:.4g}")
        return torch.from_numpy(similarity_LEE)


def open_similarity(path: Path) -> Similarity:
    """Look at a file, without its values.

    Raises:
        ValueError: no such file, or another one; one line that says how to make one.
    """
    if not path.is_file():
        raise UserError(f"similarity: {path}: no such file; {HOW}")
    return _open(path, path.stat().st_mtime_ns)


@lru_cache(maxsize=16)
def _open(path: Path, _: int) -> Similarity:
    from safetensors import SafetensorError, safe_open

    where = f"similarity: {path}"
    try:
        with safe_open(path, framework="np") as file:
            facts, names = file.metadata() or {}, list(file.keys())
            tensor = file.get_slice(TENSOR) if TENSOR in names else None
            shape, dtype = ([], "") if tensor is None else (list(tensor.get_shape()), tensor.get_dtype())
    except (SafetensorError, OSError) as error:
        raise UserError(f"{where}: not readable ({brief(str(error), quoted=False)}); {HOW}") from None
    if (form := facts.get("format")) != FORMAT:
        raise UserError(f"{where}: expected format {FORMAT}, got {brief(form)}; {HOW}")
    if len(shape) != 3 or shape[1] != shape[2] or 0 in shape or dtype != "F32":
        raise UserError(f"{where}: expected {TENSOR}, F32 [layers, experts, experts], got {dtype or 'none'} {shape}")
    with path.open("rb") as content:
        digest = hashlib.file_digest(content, "sha256").hexdigest()
    return Similarity(path, digest, *shape[:2], facts.get("model"))
