"""Read how often each expert was chosen, where nobody recorded which token chose it; plan replicas for such loads.

Counts are no routing: they give a synthetic workload its target (``workload.skew_from``) and EPLB its loads
(``trace eplb``). A file may be

* a recording (``moe-trace-v1``), or a .json list of one object whose ``load_E_by_layer`` holds a layer's loads by name;
* .json with ``logical_count`` [layers, experts], or [passes, layers, experts], which SGLang takes for its own plan;
* .npz with ``logical_count`` of the same shapes: what SGLang's recorder dumps in mode ``stat``, converted; or with
  ``global_physical_count`` [passes, layers, slots], of mode ``per_pass``, and the map of slots to experts;
* .json with the counts alone, [layers][experts], as EPLB's weights, or ``{layer: {expert: count}}``, as MindSpeed-RL
  collects tokens;
* .csv with columns ``layer_id``, ``expert_id``, ``count``, as SGLang dumps one for each rank, or a folder of these,
  which are summed;
* a folder of ``meta_info.json`` and ``rank*.safetensors``, as TensorRT-LLM leaves in ``EXPERT_STATISTIC_PATH``:
  counts of all experts by ``<iteration>_<layer>``, which are summed over iterations and ranks.

An expert map (SGLang's, vLLM-Ascend's) says where experts stand and not how often they are chosen: it is refused.

A plan is written as servers read it: JSON with one key, ``physical_to_logical_map``, a row per layer of the model, an
expert's index per slot, the slots of rank 0 first. SGLang reads it (``--init-expert-location FILE.json``). vLLM names
its map alike, but plans it itself from loads that it counts: it reads no file.

Shapes: L = layers, E = experts.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from moe_ep_bench.errors import UserError, brief
from moe_ep_bench.files import atomic_path, check_folder
from moe_ep_bench.metrics import imbalance, rank_imbalance
from moe_ep_bench.models import load_model
from moe_ep_bench.placement import replicate, stacking_words

COUNT, SLOT_COUNT, SLOTS = "logical_count", "global_physical_count", "last_physical_to_logical_map"
LOADS = "load_E_by_layer"
MAP = "physical_to_logical_map"
_MOST = 2**16  # layers and experts that a file may name
CONVERT = (
    "python -c \"import sys, numpy, torch; d = torch.load(sys.argv[1], map_location='cpu', weights_only=True); "
    "numpy.savez(sys.argv[2], **({'logical_count': d['logical_count']} if 'logical_count' in d else "
    "{'global_physical_count': numpy.stack([r['global_physical_count'] for r in d['records']]), "
    "'last_physical_to_logical_map': d['last_physical_to_logical_map']}))\" dump.pt dump.npz"
)


def read_counts(path: Path) -> NDArray[np.float64]:
    """Counts of every layer: float64 [L, E], some above 0 in each.

    Raises:
        ValueError: no such file, or it holds no counts; one line that names the file.
    """
    return counted(path).load_LE


class Counts(NamedTuple):
    """Counts of layers, float64 [L, E], some above 0 in each; and the layers' numbers, ascending."""

    load_LE: NDArray[np.float64]
    layers: list[int]


def counted(path: Path) -> Counts:
    """``read_counts``, with the numbers of the layers; dense layers, which count nothing, have none."""
    if not (path.is_file() or path.is_dir()):
        raise UserError(f"{path}: no such file")
    return _read(path, path.stat().st_mtime_ns)


def one_rank_words(load_LE: NDArray[np.float64]) -> str | None:
    """Say that counts look like those of one rank's experts alone: a few neighbours, on which no other layer differs.

    Args:
        load_LE: [L, E].
    """
    counted_E = load_LE.any(axis=0)
    first, number = int(counted_E.argmax()), int(counted_E.sum())
    is_block = counted_E[first : first + number].all() and first % number == 0 and len(counted_E) % number == 0
    if number > len(counted_E) // 2 or not is_block:
        return None
    last = first + number - 1
    return f"only experts {first} to {last} of {len(counted_E)} are counted: one rank's alone? Sum all ranks' files"


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
def _read(path: Path, _: int) -> Counts:
    from moe_ep_bench.workload.importers.arrays import REAL, checked, json_document, opened_npz

    if path.suffix in (".npz", ".pt"):
        with opened_npz(path, CONVERT) as npz:
            if COUNT not in npz.names and SLOT_COUNT in npz.names:
                count_PLS = npz.array(SLOT_COUNT, (None, None, None), REAL)
                expert_LS = npz.array(SLOTS, count_PLS.shape[1:])
                return _layers(_of_slots(count_PLS.sum(axis=0), expert_LS, npz.where(SLOTS)), npz.where(SLOT_COUNT))
            return _layers(npz.array(COUNT, kinds=REAL), npz.where(COUNT))
    if (path / "meta_info.json").is_file():
        return _of_tensorrt_llm(path)
    if path.is_dir() or path.suffix == ".csv":
        return _of_csv(path)
    if path.suffix != ".json":
        return _of_recording(path)
    content: Any = json_document(path)
    if isinstance(content, dict):
        if is_map := next((key for key in (MAP, "moe_layer_count") if key in content), None):
            why = "an expert map, which says where experts stand, not how often they are chosen"
            raise UserError(f"{path}: {is_map}: {why}; expected {COUNT}, counts by layer and expert")
        if content and all(isinstance(of_layer, dict) for of_layer in content.values()):
            return _of_nested(content, path)
        content = content.get(COUNT)
        if not isinstance(content, list):
            raise UserError(f"{path}: expected {COUNT}, counts by layer and expert, or a list of them")
    elif isinstance(content, list) and content and isinstance(content[0], dict):
        if len(content) != 1 or not isinstance(layers := content[0].get(LOADS), dict):
            raise UserError(f"{path}: expected one recording with {LOADS}, got {len(content)} entries")
        numbers = [int(name) for name in layers] if all(name.isdecimal() for name in layers) else None
        return _layers(checked(list(layers.values()), str(path), (None, None), REAL), str(path), numbers)
    return _layers(checked(content, str(path), None, REAL), str(path))


def _of_slots(count_LS: NDArray[Any], expert_LS: NDArray[Any], where: str) -> NDArray[Any]:
    """Counts of slots as counts of the experts that they hold."""
    if not expert_LS.size or expert_LS.min() < 0 or expert_LS.max() >= _MOST:
        raise UserError(f"{where}: expected experts 0 to {_MOST - 1}, got {brief(expert_LS)}")
    count_LE = np.zeros((len(count_LS), int(expert_LS.max()) + 1))
    np.add.at(count_LE, (np.arange(len(count_LS))[:, None], expert_LS), count_LS)
    return count_LE


def _of_recording(path: Path) -> Counts:
    from moe_ep_bench.workload.trace import held, open_trace

    trace = open_trace(path)
    layers = (trace.read_layer(layer) for layer in range(trace.num_layers))
    load_LE = np.stack(
        [np.bincount(ids_TK[held(ids_TK, scores_TK)], minlength=trace.num_experts) for ids_TK, scores_TK in layers]
    )
    numbers = trace.metadata.get("source_layers", "").split(",")
    known = [int(name) for name in numbers] if all(name.isdecimal() for name in numbers) else []
    return _layers(load_LE, str(path), known if len(known) == trace.num_layers else None)


def _of_tensorrt_llm(path: Path) -> Counts:
    """Sum TensorRT-LLM's counts of every iteration and rank."""
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    from moe_ep_bench.workload.importers.arrays import MAX_ARRAY_BYTES, check_size, checked

    # Some versions leave rank0_raw.safetensors and cooccurrence_rank0.safetensors beside them.
    files = sorted(file for file in path.glob("rank*.safetensors") if re.fullmatch(r"rank\d+", file.stem))
    if not files:
        raise UserError(f"{path}: expected rank0.safetensors and those of other ranks beside meta_info.json, got none")
    load_of: dict[int, NDArray[Any]] = {}
    for file in files:
        check_size(str(file), file.stat().st_size, MAX_ARRAY_BYTES)
        try:
            arrays = load_file(file)
        except (SafetensorError, OSError, KeyError) as error:  # KeyError: a type that numpy lacks.
            raise UserError(f"{file}: not readable ({brief(str(error), quoted=False)})") from None
        for name, count_E in arrays.items():
            where, form = f"{file}: {brief(name, quoted=False)}", re.fullmatch(r"\d+_(\d{1,9})", name)
            if form is None:
                raise UserError(f"{where}: expected arrays named <iteration>_<layer>")
            layer = int(form[1])
            before = load_of.get(layer, next(iter(load_of.values()), None))
            checked(count_E, where, (None if before is None else len(before),))
            load_of[layer] = load_of.get(layer, 0) + count_E
    layers = sorted(load_of)
    return _layers(np.array([load_of[layer] for layer in layers]), str(path), layers)


def _of_nested(content: dict[str, dict[str, Any]], path: Path) -> Counts:
    """Counts by layer and expert, where names of both are numbers; an expert that has none was never chosen."""
    from moe_ep_bench.workload.importers.arrays import REAL, checked

    names = {*content, *(name for of_layer in content.values() for name in of_layer)}
    for name in names:
        if not name.isdecimal() or int(name) >= _MOST:
            raise UserError(f"{path}: expected numbers of layers and experts up to {_MOST - 1}, got {brief(name)}")
    layers = sorted(content, key=int)
    pairs = [(row, int(name), count) for row, layer in enumerate(layers) for name, count in content[layer].items()]
    row_N, expert_N = np.array([pair[:2] for pair in pairs], dtype=np.int64).reshape(-1, 2).T
    count_N = checked([count for *_, count in pairs], str(path), (None,), REAL)
    return _layers(_placed(row_N, expert_N, count_N), str(path), [int(layer) for layer in layers])


def _of_csv(path: Path) -> Counts:
    """Sum SGLang's counts of each rank."""
    import pandas as pd

    files = sorted(path.glob("*.csv")) if path.is_dir() else [path]
    columns = ["layer_id", "expert_id", "count"]
    parts = []
    for file in files:
        try:
            rows = pd.read_csv(file, usecols=columns)
        except (ValueError, OSError) as error:
            raise UserError(
                f"{file}: expected columns {', '.join(columns)} ({brief(str(error), quoted=False)})"
            ) from None
        if not all(dtype.kind in "iu" for dtype in rows.dtypes) or (rows < 0).any(axis=None) or rows.empty:
            raise UserError(f"{file}: expected rows of whole numbers from 0 in {', '.join(columns)}")
        if (most := int(rows[columns[:2]].max(axis=None))) >= _MOST:
            raise UserError(f"{file}: expected layers and experts up to {_MOST - 1}, got {most}")
        parts.append(rows)
    if not parts:
        raise UserError(f"{path}: expected .csv files, found none")
    rows = pd.concat(parts)
    return _layers(_placed(*(rows[column].to_numpy() for column in columns)), str(path))


def _placed(layer_N: NDArray[Any], expert_N: NDArray[Any], count_N: NDArray[Any]) -> NDArray[np.float64]:
    """Counts [L, E] of counts that name their layer and expert."""
    count_LE = np.zeros((1 + layer_N.max(initial=-1), 1 + expert_N.max(initial=-1)))
    np.add.at(count_LE, (layer_N, expert_N), count_N)
    return count_LE


def _layers(counts: NDArray[Any], where: str, numbers: Sequence[int] | None = None) -> Counts:
    """Sum passes, and leave out layers that count nothing.

    Args:
        numbers: of the layers; None = from 0.
    """
    if counts.ndim == 3:
        counts = counts.sum(axis=0)
    if counts.ndim != 2 or 0 in counts.shape:
        raise UserError(f"{where}: expected counts by layer and expert, got shape {counts.shape}")
    count_LE = counts.astype(np.float64)
    if not (np.isfinite(count_LE) & (count_LE >= 0)).all():
        raise UserError(f"{where}: expected counts from 0, got some below it or not finite")
    known_L = count_LE.any(axis=1)
    if not known_L.any():
        raise UserError(f"{where}: expected some count above 0, got none")
    places = np.arange(len(count_LE)) if numbers is None else np.asarray(numbers)
    return Counts(count_LE[known_L], places[known_L].tolist())


def write_expert_map(
    source: Path, out: Path, *, num_ranks: int, spare_per_rank: int, num_nodes: int = 1, preset: str | None = None
) -> str:
    """Plan by EPLB for the loads of a recording, layer by layer.

    Args:
        num_ranks: ranks that share all experts.
        spare_per_rank: slots of each rank beyond its share.
        num_nodes: nodes of neighbouring ranks, which the hierarchical policy reads.
        preset: the model, or its config.json: how many layers it has, and its groups of experts, which are packed onto
            nodes. None = layers up to the last one counted, and no groups.

    SGLang asks for a row per layer of the model. Layers that count nothing, such as dense ones, have their experts in
    order.

    Returns:
        What was planned, and what it does to the fullest rank's load.

    Raises:
        ValueError: the recording, the numbers or the model do not fit each other.
    """
    load_LE, layers = counted(source)
    num_experts = load_LE.shape[1]
    asked = (("--ep", num_ranks, 1), ("--spare-per-rank", spare_per_rank, 0), ("--nodes", num_nodes, 1))
    for option, value, least in asked:
        if value < least:
            raise UserError(f"{option}: expected at least {least}, got {value}")
    if num_experts % num_ranks:
        raise UserError(f"--ep: expected a divisor of the {num_experts} experts of {source.name}, got {num_ranks}")
    num_layers = layers[-1] + 1
    model = None if preset is None else load_model(preset)
    if model is not None:
        if layers == list(range(model.num_moe_layers)):  # numbered among themselves
            layers = list(model.moe_layers)
        if model.num_experts != num_experts or layers != list(model.moe_layers):
            raise UserError(
                f"--preset: {preset} has {model.num_experts} experts in layers {brief(list(model.moe_layers))}, "
                f"{source.name} counts {num_experts} in {brief(layers)}"
            )
        num_layers = model.num_layers
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
    of_layer = dict(zip(layers, plan.slot_expert_LP.tolist(), strict=True))
    in_order = (np.arange(num_slots) % num_experts).tolist()
    rows = [of_layer.get(layer, in_order) for layer in range(num_layers)]
    dense = num_layers - len(layers)
    check_folder(out.parent, "OUT: folder")
    with atomic_path(out) as temporary:
        temporary.write_text(json.dumps({MAP: rows}) + "\n")
    before, after = rank_imbalance(load_LE, num_ranks).mean(), imbalance(plan.rank_load(load_LE)).mean()
    one_rank = one_rank_words(load_LE)
    lines = [
        f"{out}: {len(rows)} layers ({dense} of them without counts), {num_slots} slots on {num_ranks} ranks, "
        f"{plan.policy} policy; the server needs --ep-num-redundant-experts {num_slots - num_experts}",
        f"fullest rank over the mean, mean over recorded layers: {before:.2f} in order, {after:.2f} as planned for the "
        "same loads",
        stacking_words(plan.stacked, "ranks of layers"),
        *([f"WARNING: {one_rank}"] if one_rank else []),
    ]
    return "\n".join(lines)
