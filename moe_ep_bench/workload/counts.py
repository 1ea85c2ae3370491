"""Read how often each expert was chosen, where nobody recorded which token chose it; plan replicas for such loads.

Counts are no routing: they give a synthetic workload its target (``workload.skew_from``) and EPLB its loads
(``trace eplb``). A file may be

* a recording (``moe-trace-v1``), or a .json list of one object whose ``load_E_by_layer`` holds a layer's loads by name;
* .json with ``logical_count`` [layers, experts], or [passes, layers, experts], which SGLang takes for its own plan;
* .npz with ``logical_count`` of the same shapes: what SGLang's recorder dumps in mode ``stat``, converted;
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
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moe_ep_bench.errors import UserError
from moe_ep_bench.files import atomic_path, check_folder
from moe_ep_bench.metrics import imbalance, rank_imbalance
from moe_ep_bench.models import ModelSpec
from moe_ep_bench.placement import replicate, stacking_words

COUNT = "logical_count"
LOADS = "load_E_by_layer"
MAP = "physical_to_logical_map"
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


def layer_loads(path: Path, layer: int) -> list[float]:
    """Counts of one layer's experts.

    Raises:
        ValueError: as ``read_counts``; or no such layer.
    """
    count_LE = read_counts(path)
    if layer >= len(count_LE):
        raise UserError(f"layer: expected 0 to {len(count_LE) - 1} (the counted layers of {path}), got {layer}")
    return count_LE[layer].tolist()


def mean_peak_load(path: Path) -> float:
    """Load of the fullest expert over the mean, mean over layers."""
    return float(imbalance(read_counts(path)).mean())


@functools.lru_cache(maxsize=16)
def _read(path: Path, _: int) -> NDArray[np.float64]:
    from moe_ep_bench.workload.importers.arrays import REAL, checked, json_document, opened_npz

    if path.suffix in (".npz", ".pt"):
        with opened_npz(path, CONVERT) as npz:
            return _layers(npz.array(COUNT, kinds=REAL), npz.where(COUNT))
    if path.suffix != ".json":
        return _of_recording(path)
    content: Any = json_document(path)
    if isinstance(content, dict):
        content = content.get(COUNT)
        if not isinstance(content, list):
            raise UserError(f"{path}: expected {COUNT}, counts by layer and expert, or a list of them")
    elif isinstance(content, list) and content and isinstance(content[0], dict):
        if len(content) != 1 or not isinstance(layers := content[0].get(LOADS), dict):
            raise UserError(f"{path}: expected one recording with {LOADS}, got {len(content)} entries")
        content = list(layers.values())
    return _layers(checked(content, str(path), None, REAL), str(path))


def _of_recording(path: Path) -> NDArray[np.float64]:
    from moe_ep_bench.workload.trace import open_trace

    trace = open_trace(path)
    layers = (trace.read_layer(layer)[0] for layer in range(trace.num_layers))
    return np.stack([np.bincount(ids_TK.ravel(), minlength=trace.num_experts) for ids_TK in layers]).astype(np.float64)


def _layers(counts: NDArray[Any], where: str) -> NDArray[np.float64]:
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


def write_expert_map(
    source: Path, out: Path, *, num_ranks: int, spare_per_rank: int, num_nodes: int = 1, preset: str | None = None
) -> str:
    """Plan by EPLB for the loads of a recording, layer by layer.

    Args:
        num_ranks: ranks that share all experts.
        spare_per_rank: slots of each rank beyond its share.
        num_nodes: nodes of neighbouring ranks, which the hierarchical policy reads.
        preset: the model. Its dense layers get a row too, in order, as SGLang asks for one per layer; and its groups of
            experts are packed onto nodes. None = a row per recorded layer.

    Returns:
        What was planned, and what it does to the fullest rank's load.

    Raises:
        ValueError: the recording, the numbers or the model do not fit each other.
    """
    load_LE = read_counts(source)
    num_experts = load_LE.shape[1]
    asked = (("--ep", num_ranks, 1), ("--spare-per-rank", spare_per_rank, 0), ("--nodes", num_nodes, 1))
    for option, value, least in asked:
        if value < least:
            raise UserError(f"{option}: expected at least {least}, got {value}")
    if num_experts % num_ranks:
        raise UserError(f"--ep: expected a divisor of the {num_experts} experts of {source.name}, got {num_ranks}")
    model = None if preset is None else ModelSpec.named(preset)
    if model is not None and (model.num_experts, model.num_moe_layers) != (num_experts, len(load_LE)):
        raise UserError(
            f"--preset: {preset} has {model.num_moe_layers} layers of {model.num_experts} experts, {source.name} has "
            f"{len(load_LE)} of {num_experts}"
        )
    num_slots = num_experts + spare_per_rank * num_ranks
    try:
        plan = replicate(
            load_LE,
            num_slots=num_slots,
            num_ranks=num_ranks,
            num_nodes=num_nodes,
            num_groups=(model and model.num_groups) or 1,
        )
    except ValueError as error:
        raise UserError(f"--ep, --nodes: {error}") from None
    dense = 0 if model is None else model.first_dense_layers
    rows = [*([(np.arange(num_slots) % num_experts).tolist()] * dense), *plan.slot_expert_LP.tolist()]
    check_folder(out.parent, "OUT: folder")
    with atomic_path(out) as temporary:
        temporary.write_text(json.dumps({MAP: rows}) + "\n")
    before, after = rank_imbalance(load_LE, num_ranks).mean(), imbalance(plan.rank_load(load_LE)).mean()
    return (
        f"{out}: {len(rows)} layers ({dense} of them dense), {num_slots} slots on {num_ranks} ranks, "
        f"{plan.policy} policy\nfullest rank over the mean, mean over recorded layers: {before:.2f} in order, "
        f"{after:.2f} as planned for the same loads"
        f"\n{stacking_words(plan.stacked, 'ranks of layers')}"
    )
