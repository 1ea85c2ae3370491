"""Devices whose experts others measured: rows of MoE layers in ``tables``, bound to the shape of one layer.

*How a row of moe_perf was taken* (ai-dynamo/aiconfigurator, collector/). One GPU stands for rank 0 of ``moe_ep_size``.
It is given all ``num_tokens`` tokens of the group, and computes the pairs of its own experts. ``balanced`` scores give
token t the experts (t + j x ceil(E / k)) mod E, j < k. ``power_law_A`` draws a weight for each expert from a power law
of exponent A, rounds the loads to pairs, and puts the fullest rank first; five draws are averaged, without a seed.
A row holds the framework's top-k, its permutation around the experts and the sum over a token's local experts. Gate,
dispatch and combine are not in it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from moe_ep_bench.cost_model.devices import PRECISIONS, Device
from moe_ep_bench.cost_model.expert_table import SHAPE, ExpertTable, shape_words, tables_of_shape
from moe_ep_bench.cost_model.tables import PREFIX, Tables, choose, folders, root
from moe_ep_bench.errors import UserError, naming
from moe_ep_bench.models import ModelSpec

if TYPE_CHECKING:  # It imports slowly.
    import pandas as pd

BALANCED = "balanced"
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
    system = Tables.named(name, "moe").system
    known = {system: _DEVICES.get(system, system.replace("_", "-")) for system in folders(root() / "data")}
    stated = [system for system, device in known.items() if device in Device.names()]
    choose("system with a file of data/devices/", system, stated)
    return Device.named(known[system])


def load_device_of_layer(name: str, model: ModelSpec, ep_size: int, dtype: str) -> Device:
    """The same for one layer, with what a table measured of its experts.

    Raises:
        UserError: also a dtype that the device has no figures of, a shape or an EP size that was not measured.
    """
    device = load_device(name)
    if not name.startswith(PREFIX):
        if dtype not in device.dtypes:
            raise UserError(f"expected a device of tables (table:...) with layer.dtype {dtype}, got {device.name}")
        return device
    tables = Tables.named(name, "moe")
    measured = tables.read(["moe_dtype"], [("moe_tp_size", "=", 1)])["moe_dtype"]
    dtypes = sorted(set(measured) & PRECISIONS.keys())
    if dtype not in dtypes:
        raise UserError(f"{tables.name}: expected layer.dtype one of {', '.join(dtypes)}; got {dtype}")
    rows = read_moe(tables, dtype=dtype, tp_size=model.tensor_parallel)
    with naming(f"{tables.name}, {dtype}"):
        table = find_table(rows, model, ep_size)
    sizes = model.expert_matrices, model.expert_hidden_size, model.ffn_hidden_size
    expert_us = math.prod(sizes) * PRECISIONS[dtype].weight_bytes / (device.reached_tbps * 1e6)
    named = {"name": tables.name, "measured_by": f"{tables.words}, {dtype}", "expert_us": expert_us}
    return device.model_copy(update={"experts": table.model_copy(update=named)})


def read_moe(
    tables: Tables, *, dtype: str | None = None, distribution: str | None = BALANCED, tp_size: int = 1
) -> pd.DataFrame:
    """Rows of MoE layers: ``SHAPE``, dtype, num_tokens, ep_size, distribution, us.

    Experts are whole, or cut among ``tp_size`` ranks; then the FFN size is a slice's, and no all-reduce is in it.
    Where several kernels were timed on the same point, the fastest stands for it.
    """
    filters = [("moe_tp_size", "=", tp_size)]
    filters += [("moe_dtype", "=", dtype)] if dtype else []
    filters += [("distribution", "=", distribution)] if distribution else []
    rows = tables.read(_MOE_COLUMNS, filters)
    rows = rows.rename(columns=_NAMES).assign(us=rows["latency"] * 1e3)
    rows["ffn_hidden_size"] //= tp_size
    keys = [*SHAPE, "dtype", "ep_size", "distribution", "num_tokens"]
    return rows.drop(columns="latency").groupby(keys, as_index=False)["us"].min()


def of_shape(rows: pd.DataFrame, shape: Sequence[int]) -> pd.DataFrame:
    """Rows whose ``SHAPE`` is this."""
    return rows[(rows[SHAPE] == np.asarray(shape)).all(axis=1)]


def find_table(rows: pd.DataFrame, model: ModelSpec, ep_size: int) -> ExpertTable:
    """The table of a model's layer on so many ranks, from the balanced rows of one dtype.

    Raises:
        UserError: that was not measured; the line lists the EP sizes of the shape, or all shapes.
    """
    wanted = model.expert_hidden_size, model.ffn_hidden_size, model.num_experts, model.top_k
    measured = of_shape(rows, wanted)
    if ep_size in measured["ep_size"].to_numpy():
        return tables_of_shape(measured)[ep_size]
    points = (rows if measured.empty else measured)[[*SHAPE, "ep_size"]].drop_duplicates()
    known = [
        f"{shape_words(shape)} (EP {', '.join(map(str, sorted(sizes)))})"
        for shape, sizes in points.groupby(SHAPE)["ep_size"]
    ]
    raise UserError(
        f"expected experts of a shape and an EP size that were measured, {'; '.join(known) or 'none'};"
        f" got {shape_words(wanted)}, EP {ep_size}"
    )
