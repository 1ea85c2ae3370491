"""Read how often each expert was chosen, where nobody recorded which token chose it; plan replicas for such loads.

Counts are no routing: they give a synthetic workload its target (``workload.skew_from``) and EPLB its loads
(``trace eplb``). A file may be

* a recording (``moe-trace-v1``);
* .json or .npz with ``logical_count`` [layers, experts], or [passes, layers, experts]: what SGLang takes for its own
  plan, and what its recorder dumps in mode ``stat``, converted;
* .json with the counts alone, [layers][experts], as EPLB's weights.

A plan is written as servers read it: JSON with one key, ``physical_to_logical_map``, a row per layer of the model, an
expert's index per slot, the slots of rank 0 first. SGLang reads it (``--init-expert-location FILE.json``). vLLM names
its map alike, but plans it itself from loads that it counts: it reads no file.

Shapes: L = layers, E = experts.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from moe_ep_bench.errors import UserError, brief
from moe_ep_bench.files import atomic_path, check_folder, read_json
from moe_ep_bench.metrics import imbalance, rank_imbalance
from moe_ep_bench.models import load_model
from moe_ep_bench.placement import replicate
from moe_ep_bench.workload.arrays import REAL, checked, npz_array, opened_npz
from moe_ep_bench.workload.trace import held, open_trace

COUNT = "logical_count"
CONVERT = (
    "python -c \"import sys, numpy, torch; d = torch.load(sys.argv[1], map_location='cpu', weights_only=True); "
    "numpy.savez(sys.argv[2], logical_count=d['logical_count'])\" dump.pt dump.npz"
)


class Counts(NamedTuple):
    """Counts of layers, float64 [L, E], some above 0 in each; and the layers' numbers, ascending."""

    load_LE: NDArray[np.float64]
    layers: list[int]


def read_counts(path: Path) -> Counts:
    """Read the counts of every layer that has some; dense layers, which count nothing, have none.

    Raises:
        ValueError: no such file, or it holds no counts; one line that names the file.
    """
    if not path.exists():
        raise UserError(f"{path}: no such file")
    return _read(path, path.stat().st_mtime_ns)


@functools.lru_cache(maxsize=16)
def _read(path: Path, _: int) -> Counts:
    match path.suffix:
        case ".npz" | ".pt":
            with opened_npz(path, CONVERT) as npz:
                return _counts(npz_array(npz, path, COUNT, kinds=REAL), f"{path}: {COUNT}")
        case ".json":
            content = read_json(path)
            content = content.get(COUNT) if isinstance(content, dict) else content
            if not isinstance(content, list):
                raise UserError(f"{path}: expected {COUNT}, counts by layer and expert, or a list of them")
            return _counts(content, str(path))
    trace = open_trace(path)
    count_LE = np.zeros((trace.num_layers, trace.num_experts))
    for layer in range(trace.num_layers):
        ids_TK, scores_TK = trace.read_layer(layer)
        count_LE[layer] = np.bincount(ids_TK[held(ids_TK, scores_TK)], minlength=trace.num_experts)
    numbers = trace.metadata.get("source_layers", "").split(",")
    is_numbered = len(numbers) == trace.num_layers and all(name.isdecimal() and len(name) < 5 for name in numbers)
    return _counts(count_LE, str(path), [int(name) for name in numbers] if is_numbered else None)


def _counts(value: Any, where: str, numbers: list[int] | None = None) -> Counts:
    """Check counts [layers, experts] or [passes, layers, experts]; ``numbers``: of the layers, None = their places."""
    count = checked(value, where, None, REAL).astype(np.float64)
    if count.ndim not in (2, 3) or 0 in count.shape:
        raise UserError(f"{where}: expected counts by layer and expert, got shape {count.shape}")
    if not (np.isfinite(count) & (count >= 0)).all():
        raise UserError(f"{where}: expected counts from 0, got some below it or not finite")
    count_LE = count.reshape(-1, *count.shape[-2:]).sum(axis=0)
    counted = np.flatnonzero(count_LE.any(axis=1))
    if not len(counted):
        raise UserError(f"{where}: expected some count above 0, got none")
    return Counts(count_LE[counted], [numbers[place] if numbers else int(place) for place in counted])


# ---- what counts say -------------------------------------------------------------------------------------------------


def layer_loads(path: Path, layer: int) -> list[float]:
    """Counts of one layer's experts. Raises ValueError: as ``read_counts``; or no such layer."""
    load_LE = read_counts(path).load_LE
    if layer >= len(load_LE):
        raise UserError(f"layer: expected 0 to {len(load_LE) - 1} (the counted layers of {path}), got {layer}")
    return load_LE[layer].tolist()


def mean_peak_load(path: Path) -> float:
    """Load of the fullest expert over the mean, mean over layers."""
    return float(imbalance(read_counts(path).load_LE).mean())


def write_expert_map(source: Path, out: Path, num_ranks: int, spare_per_rank: int, preset: str | None = None) -> str:
    """Plan by EPLB for counted loads, layer by layer.

    Args:
        num_ranks: ranks that share all experts.
        spare_per_rank: slots of each rank beyond its share.
        preset: the model, or its config.json: its layers and groups of experts. None = layers up to the last one
            counted, one group.

    SGLang asks for a row per layer of the model. Layers that count nothing, such as dense ones, have their experts in
    order.

    Returns:
        What was planned, and what it does to the fullest rank's load.

    Raises:
        ValueError: the counts, the numbers or the model do not fit each other.
    """
    load_LE, layers = read_counts(source)
    num_experts, num_layers, num_groups = load_LE.shape[1], layers[-1] + 1, 1
    for option, value, least in (("ep", num_ranks, 1), ("spare-per-rank", spare_per_rank, 0)):
        if value < least:
            raise UserError(f"--{option}: expected at least {least}, got {value}")
    if num_experts % num_ranks:
        raise UserError(f"--ep: expected a divisor of the {num_experts} experts of {source.name}, got {num_ranks}")
    if preset is not None:
        model = load_model(preset)
        if layers == list(range(model.num_moe_layers)):  # numbered among themselves
            layers = list(model.moe_layers)
        if model.num_experts != num_experts or layers != list(model.moe_layers):
            raise UserError(
                f"--preset: {preset} has {model.num_experts} experts in layers {brief(list(model.moe_layers))}, "
                f"{source.name} counts {num_experts} in {brief(layers)}"
            )
        num_layers, num_groups = model.num_layers, model.num_groups or 1
    num_slots = num_experts + spare_per_rank * num_ranks
    plan = replicate(load_LE, num_slots=num_slots, num_ranks=num_ranks, num_groups=num_groups)
    in_order = (np.arange(num_slots) % num_experts).tolist()
    planned = dict(zip(layers, plan.slot_expert_LP.tolist(), strict=True))
    rows = [planned.get(layer, in_order) for layer in range(num_layers)]
    check_folder(out.parent, "OUT: folder")
    with atomic_path(out) as temporary:
        temporary.write_text(json.dumps({"physical_to_logical_map": rows}) + "\n")
    before, after = rank_imbalance(load_LE, num_ranks).mean(), imbalance(plan.rank_load(load_LE)).mean()
    return (
        f"{out}: {num_layers} layers ({num_layers - len(layers)} of them without counts), {num_slots} slots on "
        f"{num_ranks} ranks; the server needs --ep-num-redundant-experts {num_slots - num_experts}\n"
        f"fullest rank over the mean, mean over recorded layers: {before:.2f} in order, {after:.2f} as planned for the "
        "same loads\n"
        "two replicas of one expert stand together, where the second relieves nobody, on "
        f"{plan.stacked.sum()} of {plan.stacked.size} ranks of layers"
    )
