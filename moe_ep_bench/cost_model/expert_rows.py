"""Devices whose experts others measured: rows of MoE layers in ``tables``, bound to the shape of one layer.

*How a row of moe_perf was taken* (ai-dynamo/aiconfigurator, collector/). One GPU stands for rank 0 of ``moe_ep_size``.
It is given all ``num_tokens`` tokens of the group, and computes the pairs of its own experts. ``balanced`` scores give
token t the experts (t + j x ceil(E / k)) mod E, j < k. ``power_law_A`` draws a weight for each expert from a power law
of exponent A, rounds the loads to pairs, and puts the fullest rank first; five draws are averaged, without a seed.
A row holds the framework's top-k, its permutation around the experts and the sum over a token's local experts. Gate,
dispatch and combine are not in it.

*Kernels of servers that dispatch* (collector/wideep/; rows are older than the newest collector, whose draws of few
tokens differ). num_tokens are of all ranks everywhere, and experts alone are timed.

``deepep_normal``  SGLang's DeepGEMM over contiguous rows, at prefill: ``uniform`` loads of T K // E rows an expert.
                   Experts' rows have to be padded to 128, as dispatch does it; the collector pads drawn loads alone.
                   With other numbers a block of 128 rows reads one expert's weights for several: such rows are up to
                   5 times too fast, and are left out. Kernels go through the tokens of all ranks; no CUDA graph.
``deepep_ll``      SGLang's DeepGEMM over masked rows, at decode: the same loads, and below a row an expert as many
                   experts as a rank has tokens times K, with a row each. CUDA graphs.
``wideep``         TensorRT-LLM's CUTLASS kernels, handed the tokens with an expert here; a rank's own T / R tokens pass
                   the router. All loads are of one draw. Those of ``power_law_1.01_eplb`` are the most even: planned
                   onto as many slots as experts (``wideep_288``: 288), and stand for what was measured: under the loads
                   of the draw, of five seeded ones, whose fullest rank is the median (``planned_loads``).
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from functools import cache, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from moe_ep_bench.cost_model.devices import PRECISIONS, Device, Dtype
from moe_ep_bench.cost_model.exchanges import Copies
from moe_ep_bench.cost_model.expert_kernels import kernel_tables
from moe_ep_bench.cost_model.expert_table import SHAPE, ExpertTable, by_ep_size, tables_of_shape
from moe_ep_bench.cost_model.tables import PREFIX, NoRowsError, Tables, choose, folders, is_open, root
from moe_ep_bench.errors import UserError, naming
from moe_ep_bench.facts import MissingRows
from moe_ep_bench.facts.words import shape_words
from moe_ep_bench.models import ModelSpec
from moe_ep_bench.placement import replicate

if TYPE_CHECKING:  # It imports slowly.
    import pandas as pd

BALANCED, UNIFORM, PLANNED, WIDE = "balanced", "uniform", "power_law_1.01_eplb", "wideep"
# Rows that kernels pad an expert's to a multiple of, which uniform rows have to be.
BLOCKS = {"deepep_normal": 128, "deepep_ll": 1}
# Draws of planned loads.
_DRAWS = 5
# The file of data/devices/ that says the rest of a system, where it is called otherwise.
_DEVICES = {"a100_sxm": "a100-sxm-80gb"}
_NAMES = {"inter_size": "ffn_hidden_size", "topk": "top_k", "moe_dtype": "dtype", "moe_ep_size": "ep_size"}
_MOE_COLUMNS = ["hidden_size", "num_experts", *_NAMES, "num_tokens", "distribution", "latency"]


def load_device(name: str) -> Device:
    """A device by its name or by the path of a file; of a table the device whose experts it has.

    Raises:
        UserError: see ``Device.load`` and ``Tables.named``.
    """
    if not name.startswith(PREFIX):
        return Device.load(name)
    system = name.removeprefix(PREFIX).partition("/")[0]
    next(Tables.newest(name, "moe", ()), None) if is_open(name) else Tables.named(name, "moe")
    known = {system: _DEVICES.get(system, system.replace("_", "-")) for system in folders(root() / "data")}
    stated = [system for system, device in known.items() if device in Device.names()]
    choose("system with a file of data/devices/", system, stated)
    return Device.named(known[system])


def load_device_of_layer(
    name: str, model: ModelSpec, ep_size: int, dtype: Dtype, exchange: Copies | None = None
) -> Device:
    """The same for one layer, with what a table measured of its experts.

    An open name means kernels that stand behind the exchange (``deepep_normal``, ``deepep_ll``); else TensorRT-LLM's,
    which do not touch tokens of other ranks; on one rank and of a named framework others too: the newest rows first.

    Args:
        exchange: what tokens have a copy for; None = an all-to-all.

    Raises:
        UserError: also a dtype that the device has no figures of, a shape or an EP size that was not measured.
    """
    if name.startswith(PREFIX):
        return _device_of_tables(root(), name, model, ep_size, dtype, exchange)
    device = load_device(name)
    if dtype not in device.dtypes:
        raise UserError(f"expected a device of tables (table:...) with layer.dtype {dtype}, got {device.name}")
    return device


@lru_cache(maxsize=32)
def _device_of_tables(
    folder: Path, name: str, model: ModelSpec, ep_size: int, dtype: Dtype, exchange: Copies | None
) -> Device:
    """``load_device_of_layer`` of a table's name; points of a sweep share it, for the files of ``folder`` stay."""
    device = load_device(name)
    if is_open(name):
        for tables in Tables.newest(name, "moe", _wanted(name, ep_size, exchange)):
            with contextlib.suppress(UserError):  # of another shape or dtype
                return _device_of_tables(folder, tables.name, model, ep_size, dtype, None)
        raise NoRowsError(
            MissingRows(kind="experts", name=name, shape=model.expert_shape, ep_size=ep_size, dtype=dtype)
        )
    tables = Tables.named(name, "moe")
    measured = tables.read(["moe_dtype"], moe_tp_size=1)["moe_dtype"]
    dtypes = sorted(set(measured) & PRECISIONS.keys())
    if dtype not in dtypes:
        raise UserError(f"{tables.name}: expected layer.dtype one of {', '.join(dtypes)}; got {dtype}")
    with naming(f"{tables.name}, {dtype}"):
        table = find_table(read_moe(tables, dtype=dtype, tp_size=model.tensor_parallel), model, ep_size, tables.backend)
    sizes = model.expert_matrices, model.expert_hidden_size, model.ffn_hidden_size
    expert_us = math.prod(sizes) * PRECISIONS[dtype].weight_bytes / (device.reached_tbps * 1e6)
    named = {"name": tables.name, "measured_by": tables.facts, "dtype": dtype, "expert_us": expert_us}
    return device.model_copy(update={"experts": table.model_copy(update=named)})


def _wanted(name: str, ep_size: int, exchange: Copies | None) -> Iterator[tuple[str, str]]:
    """Frameworks and kernels by which a rank's experts are priced best, the best first."""
    if exchange is not None:
        yield "sglang", "deepep_ll" if exchange == "pair" else "deepep_normal"
    yield "trtllm", ""
    yield "trtllm", WIDE
    if ep_size == 1 or "/" in name:
        yield from (("vllm", ""), ("sglang", ""))


def read_moe(
    tables: Tables, *, dtype: str | None = None, distribution: str | None = "", tp_size: int = 1
) -> pd.DataFrame:
    """Rows of MoE layers: ``SHAPE``, dtype, num_tokens, ep_size, distribution, num_slots, us.

    Experts are whole, or cut among ``tp_size`` ranks; then the FFN size is a slice's, and no all-reduce is in it.
    Where several kernels were timed on the same point, the fastest stands for it.

    Args:
        distribution: None = all; "" = that by which a table stands, without rows that do not say what they should.
    """
    is_planned, stands = tables.backend.startswith(WIDE), distribution == ""
    if stands:
        distribution = PLANNED if is_planned else UNIFORM if tables.backend else BALANCED
    equal = {"moe_dtype": dtype, "distribution": distribution, "moe_tp_size": tp_size}
    given = {column: value for column, value in equal.items() if value}
    rows = tables.read([*_MOE_COLUMNS, *["num_slots"] * is_planned], **given)
    rows = rows.rename(columns=_NAMES).assign(us=rows["latency"] * 1e3)
    rows["ffn_hidden_size"] //= tp_size
    if not is_planned:
        rows["num_slots"] = rows["num_experts"]
    keys = [*SHAPE, "dtype", "ep_size", "distribution", "num_slots", "num_tokens"]
    rows = rows.drop(columns="latency").groupby(keys)["us"].min().reset_index()
    if not stands:
        return rows
    if tables.backend == "deepep_normal":
        each = rows["num_tokens"] * rows["top_k"] // rows["num_experts"]
        return rows[(each > 0) & (each % BLOCKS[tables.backend] == 0)]
    num_slots = tables.backend.removeprefix(f"{WIDE}_")
    return rows[rows["num_slots"] == (int(num_slots) if num_slots.isdecimal() else rows["num_experts"])]


def of_shape(rows: pd.DataFrame, shape: Sequence[int]) -> pd.DataFrame:
    """Rows whose ``SHAPE`` is this."""
    return rows[(rows[SHAPE] == np.asarray(shape)).all(axis=1)]


def find_table(rows: pd.DataFrame, model: ModelSpec, ep_size: int, backend: str = "") -> ExpertTable:
    """The table of a model's layer on so many ranks, from the rows by which it stands, of one dtype.

    Raises:
        UserError: that was not measured; the line lists the EP sizes of the shape, or all shapes.
    """
    wanted = model.expert_shape
    measured = of_shape(rows, wanted)
    if ep_size in measured["ep_size"].to_numpy():
        if backend in BLOCKS:
            return kernel_tables(measured, BLOCKS[backend])[ep_size]
        return planned_table(measured, ep_size) if backend else tables_of_shape(measured)[ep_size]
    points = (rows if measured.empty else measured)[[*SHAPE, "ep_size"]].drop_duplicates()
    known = [
        f"{shape_words(shape)} (EP {', '.join(map(str, sorted(sizes)))})"
        for shape, sizes in points.groupby(SHAPE)["ep_size"]
    ]
    raise UserError(
        f"expected experts of a shape and an EP size that were measured, {'; '.join(known) or 'none'};"
        f" got {shape_words(wanted)}, EP {ep_size}"
    )


# ---- planned loads ---------------------------------------------------------------------------------------------------


def planned_table(rows: pd.DataFrame, ep_size: int) -> ExpertTable:
    """One shape's planned rows of one dtype and EP size."""
    points = rows[rows["ep_size"] == ep_size].sort_values("num_tokens")
    num_experts, top_k, num_slots = map(int, points[["num_experts", "top_k", "num_slots"]].iloc[0])
    loads = [planned_loads(number, num_experts, top_k, ep_size, num_slots) for number in points["num_tokens"]]
    row_loads = tuple(tuple(load_L.tolist()) for load_L in loads)
    return by_ep_size(ExpertTable, points, num_slots=num_slots, row_loads=row_loads)[ep_size]


@cache
def planned_loads(num_tokens: int, num_experts: int, top_k: int, ep_size: int, num_slots: int) -> NDArray[np.int64]:
    """Pairs in each slot of the fullest rank, int64 [num_slots / R], of the draw that is the median of five."""
    drawn = [
        fullest_rank(drawn_loads(1.01, num_tokens, num_experts, top_k, seed), ep_size, num_slots)
        for seed in range(_DRAWS)
    ]
    return sorted(drawn, key=lambda load_L: int(load_L.sum()))[_DRAWS // 2]


def drawn_loads(exponent: float, num_tokens: int, num_experts: int, top_k: int, seed: int) -> NDArray[np.int64]:
    """Pairs of each expert under a power law, int64 [E], T K in all and at most T each.

    What rounding leaves goes to the fullest experts in turn, or comes from the emptiest.
    """
    load_E = rounded_loads(exponent, num_tokens, num_experts, top_k, seed)
    fullest_E = np.argsort(-load_E, kind="stable")
    while missing := num_tokens * top_k - int(load_E.sum()):
        order_E = fullest_E if missing > 0 else fullest_E[::-1]
        fits_E = load_E[order_E] < num_tokens if missing > 0 else load_E[order_E] > 0
        load_E[order_E[fits_E][: abs(missing)]] += np.sign(missing)
    return load_E


def rounded_loads(exponent: float, num_tokens: int, num_experts: int, top_k: int, seed: int) -> NDArray[np.int64]:
    """The same as rounding has them, whose sum may be another.

    Weights are drawn by the inverse of their distribution function, between 1 and 0.8 T, or of few tokens between 0.01
    and 2.
    """
    total = num_tokens * top_k
    ends = (1.0, 0.8 * num_tokens) if total > num_experts else (0.01, 2.0)
    low, high = np.array(ends) ** (1 - exponent)
    uniform_E = np.random.default_rng([seed, num_tokens, num_experts]).random(num_experts)
    weight_E = (low + (high - low) * uniform_E) ** (1 / (1 - exponent))
    return np.minimum(np.rint(weight_E / weight_E.sum() * total), num_tokens).astype(np.int64)


def fullest_rank(load_E: NDArray[np.int64], ep_size: int, num_slots: int | None = None) -> NDArray[np.int64]:
    """Pairs of each expert of the fullest rank, int64 [L]; with slots planned for the load, of each of its slots.

    Replicas share evenly, and whole pairs go to those with the largest rests.
    """
    load_P = load_E
    if num_slots is not None:
        expert_P = replicate(load_E, num_slots=num_slots, num_ranks=ep_size)
        share_P = (load_E / np.bincount(expert_P))[expert_P]
        load_P = np.floor(share_P).astype(np.int64)
        load_P[np.argsort(load_P - share_P, kind="stable")[: load_E.sum() - load_P.sum()]] += 1
    load_RL = load_P.reshape(ep_size, -1)
    return load_RL[load_RL.sum(axis=1).argmax()]
