"""Read how often each expert was chosen, where nobody recorded which token chose it; plan replicas for such loads.

Counts are no routing: they give a synthetic workload its target (``workload.skew_from``) and EPLB its loads
(``trace eplb``). Whatever the file, a reader makes one list of (layer, expert, count) of it, which are summed
(``_summed``). A file may be

* a recording (``moe-trace-v1``);
* .json or .npz with ``logical_count`` [layers, experts], or [passes, layers, experts]: what SGLang takes for its own
  plan, and what its recorder dumps in mode ``stat``, converted;
* .json with the counts alone, [layers][experts], as EPLB's weights, or ``{layer: {expert: count}}``, as MindSpeed-RL
  collects tokens;
* .csv with columns ``layer_id``, ``expert_id``, ``count``, as SGLang dumps one for each rank, or a folder of these;
* a folder of ``meta_info.json`` and ``rank*.safetensors``, as TensorRT-LLM leaves in ``EXPERT_STATISTIC_PATH``:
  counts of all experts by ``<iteration>_<layer>``.

An expert map (SGLang's, vLLM-Ascend's) says where experts stand and not how often they are chosen: it is refused.

A plan is written as servers read it: JSON with one key, ``physical_to_logical_map``, a row per layer of the model, an
expert's index per slot, the slots of rank 0 first. SGLang reads it (``--init-expert-location FILE.json``). vLLM names
its map alike, but plans it itself from loads that it counts: it reads no file.

Shapes: L = layers, E = experts, N = counts in a file.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from moe_ep_bench.errors import UserError, brief
from moe_ep_bench.files import atomic_path, check_folder, parse_json, read_bytes
from moe_ep_bench.metrics import imbalance, rank_imbalance
from moe_ep_bench.models import load_model
from moe_ep_bench.placement import replicate, stacking_words
from moe_ep_bench.workload.arrays import MAX_PIECE_BYTES, REAL, check_size, checked, opened_npz
from moe_ep_bench.workload.trace import held, open_trace

COUNT, MAP = "logical_count", "physical_to_logical_map"
_MOST = 2**12  # layers and experts that a file may name
CONVERT = (
    "python -c \"import sys, numpy, torch; d = torch.load(sys.argv[1], map_location='cpu', weights_only=True); "
    "numpy.savez(sys.argv[2], logical_count=d['logical_count'])\" dump.pt dump.npz"
)

Listed = tuple[NDArray[Any], NDArray[Any], NDArray[Any]]
"""Layers and experts, int64 [N], and their counts, [N]; what stands there several times is summed."""


class Counts(NamedTuple):
    """Counts of layers, float64 [L, E], some above 0 in each; and the layers' numbers, ascending."""

    load_LE: NDArray[np.float64]
    layers: list[int]


def read_counts(path: Path) -> NDArray[np.float64]:
    """Counts of every layer that has some: float64 [L, E].

    Raises:
        ValueError: no such file, or it holds no counts; one line that names the file.
    """
    return counted(path).load_LE


def counted(path: Path) -> Counts:
    """``read_counts``, with the numbers of the layers; dense layers, which count nothing, have none."""
    if not path.exists():
        raise UserError(f"{path}: no such file")
    return _read(path, path.stat().st_mtime_ns)


@functools.lru_cache(maxsize=16)
def _read(path: Path, _: int) -> Counts:
    if (path / "meta_info.json").is_file():
        read: Callable[[Path], Listed] = _of_tensorrt_llm
    elif path.is_dir():
        read = _of_csv
    else:
        by_ending = {".npz": _of_npz, ".pt": _of_npz, ".csv": _of_csv, ".json": _of_json}
        read = by_ending.get(path.suffix, _of_recording)
    return _summed(*read(path), path)


def _summed(layer_N: NDArray[Any], expert_N: NDArray[Any], count_N: NDArray[Any], path: Path) -> Counts:
    count_N = count_N.astype(np.float64)
    for name, number_N in (("layers", layer_N), ("experts", expert_N)):
        least, most = number_N.min(initial=0), number_N.max(initial=0)
        if least < 0 or most >= _MOST:
            raise UserError(f"{path}: expected {name} 0 to {_MOST - 1}, got {least} to {most}")
    if not (np.isfinite(count_N) & (count_N >= 0)).all():
        raise UserError(f"{path}: expected counts from 0, got some below it or not finite")
    count_LE = np.zeros((1 + layer_N.max(initial=0), 1 + expert_N.max(initial=0)))
    np.add.at(count_LE, (layer_N, expert_N), count_N)
    known_L = count_LE.any(axis=1)
    if not known_L.any():
        raise UserError(f"{path}: expected some count above 0, got none")
    return Counts(count_LE[known_L], np.flatnonzero(known_L).tolist())


# ---- what programs write ---------------------------------------------------------------------------------------------


def _matrix(value: Any, where: str) -> Listed:
    """Counts [layers, experts] or [passes, layers, experts]."""
    counts = checked(value, where, None, REAL)
    if counts.ndim not in (2, 3) or 0 in counts.shape:
        raise UserError(f"{where}: expected counts by layer and expert, got shape {counts.shape}")
    *_, layer_N, expert_N = np.indices(counts.shape).reshape(counts.ndim, -1)
    return layer_N, expert_N, counts.ravel()


def _of_npz(path: Path) -> Listed:
    with opened_npz(path, CONVERT) as npz:
        return _matrix(npz.array(COUNT, kinds=REAL), npz.where(COUNT))


def _of_json(path: Path) -> Listed:
    content = parse_json(read_bytes(path, MAX_PIECE_BYTES), path)
    if not isinstance(content, dict):
        return _matrix(content, str(path))
    if is_map := next((key for key in (MAP, "moe_layer_count") if key in content), None):
        why = "an expert map, which says where experts stand, not how often they are chosen"
        raise UserError(f"{path}: {is_map}: {why}; expected {COUNT}, counts by layer and expert")
    if not content or not all(isinstance(of_layer, dict) for of_layer in content.values()):
        if not isinstance(content.get(COUNT), list):
            raise UserError(f"{path}: expected {COUNT}, counts by layer and expert, or a list of them")
        return _matrix(content[COUNT], str(path))
    named = [(layer, expert, count) for layer, of_layer in content.items() for expert, count in of_layer.items()]
    numbers = [name for layer, expert, _ in named for name in (layer, expert)]
    if wrong := next((name for name in numbers if not (name.isdecimal() and int(name) < _MOST)), None):
        raise UserError(f"{path}: expected numbers of layers and experts up to {_MOST - 1}, got {brief(wrong)}")
    layer_N, expert_N = np.array(numbers, dtype=np.int64).reshape(-1, 2).T
    return layer_N, expert_N, checked([count for *_, count in named], str(path), (None,), REAL)


def _of_recording(path: Path) -> Listed:
    trace = open_trace(path)
    numbers = trace.metadata.get("source_layers", "").split(",")
    is_numbered = len(numbers) == trace.num_layers and all(name.isdecimal() and len(name) < 10 for name in numbers)
    counts = np.zeros((trace.num_layers, trace.num_experts))
    for layer in range(trace.num_layers):
        ids_TK, scores_TK = trace.read_layer(layer)
        counts[layer] = np.bincount(ids_TK[held(ids_TK, scores_TK)], minlength=trace.num_experts)
    layer_N, expert_N, count_N = _matrix(counts, str(path))
    return np.array(numbers, dtype=np.int64)[layer_N] if is_numbered else layer_N, expert_N, count_N


def _of_csv(path: Path) -> Listed:
    import pandas as pd

    columns, parts = ["layer_id", "expert_id", "count"], []
    for file in sorted(path.glob("*.csv")) if path.is_dir() else [path]:
        try:
            parts.append(pd.read_csv(file, usecols=columns))
        except (ValueError, OSError) as error:
            expected = f"columns {', '.join(columns)}"
            raise UserError(f"{file}: expected {expected} ({brief(str(error), quoted=False)})") from None
        if not all(dtype.kind in "iu" for dtype in parts[-1].dtypes):
            raise UserError(f"{file}: expected whole numbers in {', '.join(columns)}")
    if not parts:
        raise UserError(f"{path}: expected .csv files, found none")
    rows = pd.concat(parts)
    layer_N, expert_N, count_N = (rows[column].to_numpy() for column in columns)
    return layer_N, expert_N, count_N


def _of_tensorrt_llm(path: Path) -> Listed:
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    parts: list[Listed] = []
    # Some versions leave rank0_raw.safetensors and cooccurrence_rank0.safetensors beside them.
    for file in sorted(file for file in path.glob("rank*.safetensors") if re.fullmatch(r"rank\d+", file.stem)):
        check_size(str(file), file.stat().st_size)
        try:
            arrays = load_file(file)
        except (SafetensorError, OSError, KeyError) as error:  # KeyError: a type that numpy lacks.
            raise UserError(f"{file}: not readable ({brief(str(error), quoted=False)})") from None
        for name, count_E in arrays.items():
            where, form = f"{file}: {brief(name, quoted=False)}", re.fullmatch(r"\d+_(\d{1,9})", name)
            if form is None:
                raise UserError(f"{where}: expected arrays named <iteration>_<layer>")
            count_E = checked(count_E, where, (len(parts[0][2]) if parts else None,))
            parts.append((np.full(len(count_E), int(form[1])), np.arange(len(count_E)), count_E))
    if not parts:
        raise UserError(f"{path}: expected counts in rank0.safetensors beside meta_info.json, got none")
    layer_N, expert_N, count_N = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
    return layer_N, expert_N, count_N


# ---- what counts say -------------------------------------------------------------------------------------------------


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
    """Counts of one layer's experts. Raises ValueError: as ``read_counts``; or no such layer."""
    count_LE = read_counts(path)
    if layer >= len(count_LE):
        raise UserError(f"layer: expected 0 to {len(count_LE) - 1} (the counted layers of {path}), got {layer}")
    return count_LE[layer].tolist()


def mean_peak_load(path: Path) -> float:
    """Load of the fullest expert over the mean, mean over layers."""
    return float(imbalance(read_counts(path)).mean())


def write_expert_map(
    source: Path, out: Path, num_ranks: int, spare_per_rank: int, num_nodes: int = 1, preset: str | None = None
) -> str:
    """Plan by EPLB for counted loads, layer by layer.

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
        ValueError: the counts, the numbers or the model do not fit each other.
    """
    load_LE, layers = counted(source)
    num_experts, num_layers, num_groups = load_LE.shape[1], layers[-1] + 1, 1
    for option, value, least in (("ep", num_ranks, 1), ("spare-per-rank", spare_per_rank, 0), ("nodes", num_nodes, 1)):
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
    sizes = {"num_slots": num_slots, "num_ranks": num_ranks, "num_nodes": num_nodes, "num_groups": num_groups}
    try:
        plan = replicate(load_LE, **sizes)
    except ValueError as error:
        raise UserError(f"--ep, --nodes: {error}") from None
    in_order = (np.arange(num_slots) % num_experts).tolist()
    planned = dict(zip(layers, plan.slot_expert_LP.tolist(), strict=True))
    check_folder(out.parent, "OUT: folder")
    with atomic_path(out) as temporary:
        temporary.write_text(json.dumps({MAP: [planned.get(layer, in_order) for layer in range(num_layers)]}) + "\n")
    before, after = rank_imbalance(load_LE, num_ranks).mean(), imbalance(plan.rank_load(load_LE)).mean()
    lines = [
        f"{out}: {num_layers} layers ({num_layers - len(layers)} of them without counts), {num_slots} slots on "
        f"{num_ranks} ranks, {plan.policy} policy; the server needs --ep-num-redundant-experts "
        f"{num_slots - num_experts}",
        f"fullest rank over the mean, mean over recorded layers: {before:.2f} in order, {after:.2f} as planned for the "
        "same loads",
        stacking_words(plan.stacked, "ranks of layers"),
    ]
    if words := one_rank_words(load_LE):
        lines.append(f"WARNING: {words}")
    return "\n".join(lines)
