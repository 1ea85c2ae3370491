"""Read how often each expert was chosen, where nobody recorded which token chose it.

Counts are no routing: they give a synthetic workload its target (``workload.skew_from``) and EPLB its loads
(``trace eplb``). A file may be

* a recording (``moe-trace-v1``), or a .json list of expert loads (``trace_statistics.loads_statistics``);
* .json with ``logical_count`` [layers, experts], or [passes, layers, experts], which SGLang takes for its own plan;
* .npz with ``logical_count`` of the same shapes: what SGLang's recorder dumps in mode ``stat``, converted;
* .json with the counts alone, [layers][experts], as EPLB's weights.

Shapes: L = layers, E = experts.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moe_ep_bench.errors import UserError

COUNT = "logical_count"
CONVERT = (
    "python -c \"import sys, numpy, torch; d = torch.load(sys.argv[1], map_location='cpu', weights_only=True); "
    "numpy.savez(sys.argv[2], logical_count=d['logical_count'])\" dump.pt dump.npz"
)


def read_counts(path: Path) -> NDArray[np.float64]:
    """Counts of every layer: float64 [L, E], some above 0 in each.

    Raises:
        ValueError: no such file, or it holds no counts; one line that names the file.
    """
    if not path.is_file():
        raise UserError(f"{path}: no such file")
    return _read(path, path.stat().st_mtime_ns)


def mean_peak_load(path: Path) -> float:
    """Load of the fullest expert over the mean, mean over layers."""
    count_LE = read_counts(path)
    return float((count_LE.max(axis=1) / count_LE.mean(axis=1)).mean())


@functools.lru_cache(maxsize=16)
def _read(path: Path, _: int) -> NDArray[np.float64]:
    from moe_ep_bench.workload.importers.sources import opened_npz, read_json, reals

    if path.suffix == ".pt":
        raise UserError(f"{path}: a pickle, which is not read; convert it where SGLang runs: {CONVERT}")
    if path.suffix == ".npz":
        with opened_npz(path) as npz:
            counts = npz.reals(COUNT)
        return _checked(counts, f"{path}: {COUNT}")
    if path.suffix != ".json":
        return _of_recording(path)
    content: Any = read_json(path)
    if isinstance(content, dict):
        content = content.get(COUNT)
        if not isinstance(content, list):
            raise UserError(f"{path}: expected {COUNT}, counts by layer and expert, or a list of them")
    elif isinstance(content, list) and content and isinstance(content[0], dict):
        return _of_recording(path)
    nested = isinstance(content, list) and content and isinstance(content[0], list)
    deep = bool(nested and content[0] and isinstance(content[0][0], list))
    return _checked(reals(content, str(path), (None,) * (3 if deep else 2)), str(path))


def _of_recording(path: Path) -> NDArray[np.float64]:
    from moe_ep_bench.workload.trace_statistics import statistics

    recordings = statistics(path)
    if len(recordings) != 1:
        raise UserError(f"{path}: expected the loads of one recording, got {len(recordings)}")
    return np.stack([layer.load_E for layer in recordings[0].layers]).astype(np.float64)


def _checked(counts: NDArray[Any], where: str) -> NDArray[np.float64]:
    if counts.ndim == 3:
        counts = counts.sum(axis=0)
    if counts.ndim != 2 or 0 in counts.shape:
        raise UserError(f"{where}: expected counts by layer and expert, got shape {counts.shape}")
    count_LE = counts.astype(np.float64)
    if not (np.isfinite(count_LE) & (count_LE >= 0)).all():
        raise UserError(f"{where}: expected counts from 0, got some below it or not finite")
    count_LE = count_LE[count_LE.any(axis=1)]  # Dense layers count nothing.
    if not len(count_LE):
        raise UserError(f"{where}: expected some count above 0, got none")
    return count_LE
