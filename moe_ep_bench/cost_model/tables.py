"""Devices and links that others measured on real GPUs: the Parquet tables of the package ``aiconfigurator-core``.

The extra ``moe-ep-bench[tables]`` installs the package (NVIDIA, Apache-2.0). Only its data files are read. Below
``systems/data`` they are

``SYSTEM/moe/FRAMEWORK/VERSION/moe_perf.parquet``       MoE layers on one GPU that holds its share of the experts
``SYSTEM/comm/nccl/VERSION/nccl_perf.parquet``          collectives by nccl-tests

A device is named ``table:SYSTEM/FRAMEWORK/VERSION``: a file of data/devices/ with the times of experts of one shape,
dtype and EP size in it (``expert_table``). One that was not measured is refused, with a list of those that were. Links
are named ``table:SYSTEM/nccl/VERSION``.

*How a row of moe_perf was taken* (ai-dynamo/aiconfigurator, collector/). One GPU stands for rank 0 of ``moe_ep_size``.
It is given all ``num_tokens`` tokens of the group, and computes the pairs of its own experts. ``balanced`` scores give
token t the experts (t + j x ceil(E / k)) mod E, j < k. ``power_law_A`` draws a weight for each expert from a power law
of exponent A, rounds the loads to pairs, and puts the fullest rank first; five draws are averaged, without a seed.
A row holds the framework's top-k, its permutation around the experts and the sum over a token's local experts. Gate,
dispatch and combine are not in it.

Nothing is kept beyond the process. No row of theirs is part of this repository but where a file says so.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from importlib import metadata, resources
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from moe_ep_bench.cost_model.devices import PRECISIONS, RUN_DTYPES, Device
from moe_ep_bench.cost_model.expert_table import SHAPE, ExpertTable, shape_words, tables_of_shape
from moe_ep_bench.cost_model.links import MEASURED_ELSEWHERE, Link, Links
from moe_ep_bench.errors import UserError, brief, did_you_mean, naming
from moe_ep_bench.models import ModelSpec

if TYPE_CHECKING:  # It imports slowly, and names of tables are checked ahead of all that does.
    import pandas as pd

PACKAGE, EXTRA, PREFIX = "aiconfigurator-core", "moe-ep-bench[tables]", "table:"
MOE, NCCL = "moe_perf.parquet", "nccl_perf.parquet"
BALANCED = "balanced"
_FRAMEWORKS = {"vllm": "vLLM", "trtllm": "TensorRT-LLM", "sglang": "SGLang", "nccl": "NCCL"}


# ---- what there is ---------------------------------------------------------------------------------------------------


def root() -> Path:
    """The folder ``systems`` of the installed package.

    Raises:
        UserError: it is not installed; the line names the extra.
    """
    try:
        package = resources.files(PACKAGE.replace("-", "_"))
    except ModuleNotFoundError:
        raise UserError(f"{PACKAGE} is not installed; expected: pip install '{EXTRA}'") from None
    return Path(str(package)) / "systems"


@cache
def package_words() -> str:
    """The package and its version."""
    return f"{PACKAGE} {metadata.version(PACKAGE)}"


def _folders(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.is_dir()) if folder.is_dir() else []


def _choose(what: str, name: str, names: Sequence[str]) -> None:
    if name not in names:
        listed = ", ".join(names) or "none"
        raise UserError(f"expected a {what} of {listed}; got {brief(name)}{did_you_mean(name, names)}")


class Tables(NamedTuple):
    """The file of one framework's version on one system; ``kind`` is ``moe`` or ``comm``."""

    system: str
    framework: str
    version: str
    kind: str

    @classmethod
    def named(cls, name: str, kind: str) -> Tables:
        """Find ``table:SYSTEM/FRAMEWORK/VERSION`` among the files of a kind.

        Raises:
            UserError: one line that lists what there is at the first part that is not known.
        """
        system, framework, version = [*name.removeprefix(PREFIX).split("/", 2), "", ""][:3]
        data = root() / "data"
        _choose("system", system, [known for known in _folders(data) if _folders(data / known / kind)])
        frameworks = _folders(data / system / kind)
        _choose("framework", framework, frameworks if kind == "moe" else ["nccl"])
        _choose(f"version of {framework}", version, _folders(data / system / kind / framework))
        return cls(system, framework, version, kind)

    @property
    def name(self) -> str:
        return f"{PREFIX}{self.system}/{self.framework}/{self.version}"

    @property
    def file(self) -> str:
        """Below ``systems/data``."""
        return "/".join([self.system, self.kind, self.framework, self.version, MOE if self.kind == "moe" else NCCL])

    @property
    def words(self) -> str:
        """What was measured and by whom: the package, the framework and the system (``h100_sxm`` as H100 SXM)."""
        framework, system = _FRAMEWORKS.get(self.framework, self.framework), self.system.upper().replace("_", " ")
        return f"{package_words()}, {framework} {self.version} on {system}"

    def read(self, columns: Sequence[str], filters: Any = None) -> pd.DataFrame:
        """Some columns and rows of the file; ``filters`` as pyarrow takes them.

        Raises:
            UserError: the file is missing or damaged; the line names it.
        """
        import pyarrow as pa
        import pyarrow.parquet as pq

        path = root() / "data" / self.file
        if not path.is_file():
            raise UserError(f"{package_words()}, {self.file}: there is no such file")
        try:
            return pq.read_table(path, columns=list(columns), filters=filters).to_pandas()
        except (pa.ArrowException, OSError, KeyError) as problem:
            raise UserError(f"{path}: damaged: {brief(str(problem), quoted=False)}") from None


# ---- devices ---------------------------------------------------------------------------------------------------------

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
    known = {system: _DEVICES.get(system, system.replace("_", "-")) for system in _folders(root() / "data")}
    stated = [system for system, device in known.items() if device in Device.names()]
    _choose("system with a file of data/devices/", system, stated)
    return Device.named(known[system])


def load_device_of_layer(name: str, model: ModelSpec, ep_size: int, dtype: str) -> Device:
    """The same for one layer, with what a table measured of its experts.

    Raises:
        UserError: also a dtype that the device has no figures of, a shape or an EP size that was not measured.
    """
    device = load_device(name)
    if not name.startswith(PREFIX):
        if dtype not in RUN_DTYPES:
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


# ---- links -----------------------------------------------------------------------------------------------------------


def load_links(name: str, num_ranks: int | None = None) -> Links:
    """Links by their name, by the path of a file, or of a table, which are of one node.

    Args:
        num_ranks: a table's are of the fewest GPUs that are no fewer; None = of the most.

    Raises:
        UserError: see ``Links.load`` and ``Tables.named``.
    """
    if not name.startswith(PREFIX):
        return Links.load(name)
    tables = Tables.named(name, "comm")
    rows, source = read_nccl(tables), f"{package_words()}, {tables.file}"
    most = int(rows["num_gpus"].max())
    gpus = rows.loc[rows["num_gpus"] >= min(num_ranks or most, most), "num_gpus"].min()
    measured = {
        operation: Link.measured(points["bytes"], points["us"], MEASURED_ELSEWHERE)
        for operation, points in rows[rows["num_gpus"] == gpus].groupby("op_name")
    }
    if missing := {"alltoall", "all_gather", "all_reduce"} - set(measured):
        raise UserError(f"{source}: no rows of {min(missing)}; take another version of nccl")
    links = {"intra": measured["alltoall"], "gather": measured["all_gather"], "reduce": measured["all_reduce"]}
    named = {"name": tables.name, "source": source, "measured_by": tables.words}
    return Links(**named, ranks_per_node=most, inter=None, **links)


def read_nccl(tables: Tables) -> pd.DataFrame:
    """Rows of nccl-tests: op_name, num_gpus, bytes that pass a rank's link, us; the fastest where sizes repeat.

    nccl-tests names all bytes of a rank's buffer; of an all-to-all or all-gather one of num_gpus parts stays. Elements
    are of 2 or 1 bytes, so that most sizes were timed twice. Sizes rise within an operation.
    """
    rows = tables.read(["op_name", "nccl_dtype", "num_gpus", "message_size", "latency"])
    size = rows["message_size"] * rows["nccl_dtype"].map({"half": 2, "int8": 1})
    crossing = np.where(rows["op_name"] == "all_reduce", 1.0, 1 - 1 / rows["num_gpus"])
    rows = rows.assign(bytes=size * crossing, us=rows["latency"] * 1e3)
    return rows.groupby(["op_name", "num_gpus", "bytes"], as_index=False)["us"].min()
