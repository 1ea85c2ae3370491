"""Read how often each expert was chosen, where nobody recorded which token chose it.

Counts are no routing: they give a synthetic workload its target (``workload.skew_from``). A file may be

* JSON with ``logical_count`` [layers][experts], or [passes][layers][experts]: what SGLang takes for its own plan
  (``--init-expert-location``), and what its recorder dumps in mode ``stat``, converted;
* JSON with such a list alone.

Shapes: L = layers, E = experts.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moe_ep_bench.errors import UserError, brief
from moe_ep_bench.files import read_json

COUNT = "logical_count"
CONVERT = (
    "python -c \"import sys, json, torch; d = torch.load(sys.argv[1], map_location='cpu', weights_only=True); "
    "json.dump({'logical_count': d['logical_count'].tolist()}, open(sys.argv[2], 'w'))\" dump.pt counts.json"
)


def read_counts(path: Path) -> NDArray[np.float64]:
    """Read the counts of every layer that has some: float64 [L, E]. Dense layers, which count nothing, have none.

    Raises:
        ValueError: no such file, or it holds no counts; one line that names the file.
    """
    if not path.is_file():
        raise UserError(f"{path}: no such file")
    if path.suffix == ".pt":
        raise UserError(f"{path}: a pickle, which is not read; convert it where it was made: {CONVERT}")
    content = read_json(path)
    return _counts(content.get(COUNT) if isinstance(content, dict) else content, path)


def _counts(value: Any, path: Path) -> NDArray[np.float64]:
    """Check counts [layers, experts] or [passes, layers, experts]."""
    expected = f"{path}: expected {COUNT}, a number from 0 by layer and expert in lists of equal length"
    try:
        count = np.array(value, dtype=np.float64)
    except (ValueError, TypeError, OverflowError):
        raise UserError(f"{expected}; got {brief(value)}") from None
    if count.ndim not in (2, 3) or not (np.isfinite(count) & (count >= 0)).all():
        raise UserError(f"{expected}; got {brief(value)}")
    count_LE = count.reshape(-1, *count.shape[-2:]).sum(axis=0)
    if not count_LE.any():
        raise UserError(f"{path}: expected some count above 0, got none")
    return count_LE[count_LE.any(axis=1)]


def layer_loads(path: Path, layer: int) -> list[float]:
    """Counts of one layer's experts. Raises ValueError: as ``read_counts``; or no such layer."""
    load_LE = read_counts(path)
    if layer >= len(load_LE):
        raise UserError(f"layer: expected 0 to {len(load_LE) - 1} (the counted layers of {path}), got {layer}")
    return load_LE[layer].tolist()
