"""Read what others measured on real GPUs: the Parquet tables of the package ``aiconfigurator-core``.

The extra ``moe-ep-bench[tables]`` installs the package (NVIDIA, Apache-2.0). Only its data files are read. Below
``systems/data`` they are

``SYSTEM/moe/FRAMEWORK/VERSION/moe_perf.parquet``       MoE layers on one GPU that holds its share of the experts
``SYSTEM/comm/nccl/VERSION/nccl_perf.parquet``          collectives by nccl-tests

A device is named ``table:SYSTEM/FRAMEWORK/VERSION``, links ``table:SYSTEM/nccl/VERSION``.

*How a row of moe_perf was taken* (ai-dynamo/aiconfigurator, collector/). One GPU stands for rank 0 of ``moe_ep_size``.
It is given all ``num_tokens`` tokens of the group, and computes the pairs of its own experts. ``balanced`` scores give
token t the experts (t + j x ceil(E / k)) mod E, j < k. ``power_law_A`` draws a weight for each expert from a power law
of exponent A, rounds the loads to pairs, and puts the fullest rank first; five draws are averaged, without a seed.
A row holds the framework's top-k, its permutation around the experts and the sum over a token's local experts. Gate,
dispatch and combine are not in it.

Nothing is kept beyond the process. No row of theirs is part of this repository but where a file says so.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from importlib import metadata, resources
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from moe_ep_bench.errors import UserError, brief, did_you_mean

if TYPE_CHECKING:  # It imports slowly, and names of tables are checked ahead of all that does.
    import pandas as pd

PACKAGE, EXTRA, PREFIX = "aiconfigurator-core", "moe-ep-bench[tables]", "table:"
MEASURED_ELSEWHERE = "measured elsewhere"

MOE, NCCL = "moe_perf.parquet", "nccl_perf.parquet"

_FRAMEWORKS = {"vllm": "vLLM", "trtllm": "TensorRT-LLM", "sglang": "SGLang", "nccl": "NCCL"}
BALANCED = "balanced"


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
    return sorted(one.name for one in folder.iterdir() if one.is_dir()) if folder.is_dir() else []


def systems(kind: str) -> list[str]:
    """Systems that have files of a kind, ``moe`` or ``comm``."""
    data = root() / "data"
    return [system for system in _folders(data) if _folders(data / system / kind)]


def choose(what: str, name: str, names: Sequence[str]) -> str:
    """``name``, where it is one of ``names``.

    Raises:
        UserError: one line that lists them.
    """
    if name not in names:
        listed = ", ".join(names) or "none"
        raise UserError(f"expected a {what} of {listed}; got {brief(name)}{did_you_mean(name, names)}")
    return name


class Tables(NamedTuple):
    """The files of one framework's version on one system."""

    system: str
    framework: str
    version: str

    @classmethod
    def named(cls, name: str, kind: str) -> Tables:
        """Find ``table:SYSTEM/FRAMEWORK/VERSION`` among the files of a kind, ``moe`` or ``comm``.

        Raises:
            UserError: one line that lists what there is at the first part that is not known.
        """
        system, framework, version = [*name.removeprefix(PREFIX).split("/", 2), "", ""][:3]
        choose("system", system, systems(kind))
        folder = root() / "data" / system / kind
        choose("framework", framework, _folders(folder))
        choose(f"version of {framework}", version, _folders(folder / framework))
        return cls(system, framework, version)

    @property
    def name(self) -> str:
        return f"{PREFIX}{'/'.join(self)}"

    def where(self, kind: str, file: str) -> str:
        """The file as a source names it."""
        return f"{package_words()}, {self.system}/{kind}/{self.framework}/{self.version}/{file}"

    @property
    def words(self) -> str:
        """What was measured and by whom: the package, the framework and the system (``h100_sxm`` as H100 SXM)."""
        framework, system = _FRAMEWORKS.get(self.framework, self.framework), self.system.upper().replace("_", " ")
        return f"{package_words()}, {framework} {self.version} on {system}"

    def read(self, kind: str, file: str, columns: Sequence[str], filters: Any = None) -> pd.DataFrame:
        """Some columns and rows of a file; ``filters`` as pyarrow takes them.

        Raises:
            UserError: the file is missing or damaged; the line names it.
        """
        import pyarrow as pa
        import pyarrow.parquet as pq

        path = root() / "data" / self.system / kind / self.framework / self.version / file
        if not path.is_file():
            raise UserError(f"{self.where(kind, file)}: there is no such file")
        try:
            return pq.read_table(path, columns=list(columns), filters=filters).to_pandas()
        except (pa.ArrowException, OSError, KeyError) as problem:
            raise UserError(f"{path}: damaged: {brief(str(problem), quoted=False)}") from None


# ---- rows of MoE layers ----------------------------------------------------------------------------------------------

SHAPE = ["hidden_size", "ffn_hidden_size", "num_experts", "top_k"]
_NAMES = {"inter_size": "ffn_hidden_size", "topk": "top_k", "moe_dtype": "dtype", "moe_ep_size": "ep_size"}
_MOE_COLUMNS = ["hidden_size", "num_experts", *_NAMES, "num_tokens", "distribution", "latency"]


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
    rows = tables.read("moe", MOE, _MOE_COLUMNS, filters)
    rows = rows.rename(columns=_NAMES).assign(us=rows["latency"] * 1e3)
    rows["ffn_hidden_size"] //= tp_size
    keys = [*SHAPE, "dtype", "ep_size", "distribution", "num_tokens"]
    return rows.drop(columns="latency").groupby(keys, as_index=False)["us"].min()


def dtypes_of(tables: Tables) -> list[str]:
    """Dtypes of whole experts."""
    return sorted(tables.read("moe", MOE, ["moe_dtype"], [("moe_tp_size", "=", 1)])["moe_dtype"].unique())


def of_shape(rows: pd.DataFrame, shape: Sequence[int]) -> pd.DataFrame:
    """Rows whose ``SHAPE`` is this."""
    return rows[(rows[SHAPE] == np.asarray(shape)).all(axis=1)]


# ---- how their loads were made ---------------------------------------------------------------------------------------


@cache
def balanced_loads(num_tokens: int, num_experts: int, top_k: int, num_local: int) -> NDArray[np.int64]:
    """Pairs of each of rank 0's experts under ``balanced`` scores, int64 [num_local].

    With fewer tokens than ceil(E / k) they are spread over that range.
    """
    stride = -(-num_experts // top_k)
    tokens = np.arange(num_tokens)
    if num_tokens < stride:
        tokens = tokens * stride / num_tokens
    loads = np.zeros(num_experts, dtype=np.int64)
    for number in range(top_k):
        experts = ((tokens + number * stride) % num_experts).astype(np.int64)
        loads += np.bincount(experts, minlength=num_experts)
    return loads[:num_local]


# ---- rows of collectives ---------------------------------------------------------------------------------------------


def read_nccl(tables: Tables) -> pd.DataFrame:
    """Rows of nccl-tests: op_name, num_gpus, bytes that pass a rank's link, us; the fastest where sizes repeat.

    nccl-tests names all bytes of a rank's buffer; of an all-to-all or all-gather one of num_gpus parts stays. Elements
    are of 2 or 1 bytes, so that most sizes were timed twice.
    """
    rows = tables.read("comm", NCCL, ["op_name", "nccl_dtype", "num_gpus", "message_size", "latency"])
    size = rows["message_size"] * rows["nccl_dtype"].map({"half": 2, "int8": 1})
    crossing = np.where(rows["op_name"] == "all_reduce", 1.0, 1 - 1 / rows["num_gpus"])
    rows = rows.assign(bytes=size * crossing, us=rows["latency"] * 1e3)
    return rows.groupby(["op_name", "num_gpus", "bytes"], as_index=False)["us"].min()
