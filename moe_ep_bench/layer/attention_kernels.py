"""Which of torch's kernels ``scaled_dot_product_attention`` takes.

torch chooses among several by device, dtype, shape and version, and says nothing. What was chosen shows as the operator
that it hands the work to, which is looked for in a run of one's own: no rule of torch's is guessed at here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_PREFIX = "aten::_scaled_dot_product_"
_NAMES = {
    "flash_attention": "flash",
    "flash_attention_for_cpu": "flash on the CPU",
    "efficient_attention": "memory-efficient",
    "cudnn_attention": "cuDNN",
    "attention_math": "math",
}


def kernels_of_attention(run: Callable[[], object]) -> list[str]:
    """The kernels that attention takes in ``run``, in words: sorted, and empty where there is no attention.

    An operator that has no word here goes by torch's own name.
    """
    # Elsewhere torch takes attention apart before any mode sees it, its plain form down to the last operator.
    with torch.inference_mode(), _Seen() as seen:
        run()
    found = {name.removeprefix(_PREFIX) for name in seen.names if name.startswith(_PREFIX)}
    return sorted(_NAMES.get(name, name) for name in found)


class _Seen(TorchDispatchMode):
    """Notes the names of all operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(func._schema.name)
        if func is torch.ops.aten.scaled_dot_product_attention.default:
            with self:
                return func.decompose(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))
