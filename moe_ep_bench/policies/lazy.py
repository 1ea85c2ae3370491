"""torch, imported when a policy first computes: checking a config's policies must not wait for it."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:
    Tensor = Any  # for annotations alone

    class _Torch:
        """Stands for torch in the modules that import it from here; its first use puts torch itself in its place."""

        def __getattr__(self, name: str) -> Any:
            import torch as real

            for module in list(sys.modules.values()):
                if getattr(module, "__dict__", {}).get("torch") is self:
                    module.torch = real
            return getattr(real, name)

    torch = _Torch()

__all__ = ["Tensor", "torch"]
