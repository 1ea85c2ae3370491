"""Devices and links that others measured on real GPUs: the Parquet tables of the package ``aiconfigurator-core``.

The extra ``moe-ep-bench[tables]`` installs the package (NVIDIA, Apache-2.0). Only its data files are read. Below
``systems/data`` they are

``SYSTEM/moe/FRAMEWORK/VERSION/moe_perf.parquet``       MoE layers on one GPU that holds its share of the experts
``SYSTEM/moe/FRAMEWORK/VERSION/wideep_...``             the same in kernels of a server that dispatches (``KERNELS``)
``SYSTEM/comm/nccl/VERSION/nccl_perf.parquet``          collectives by nccl-tests
``SYSTEM/comm/FRAMEWORK/VERSION/...``                   dispatch and combine by DeepEP (``BACKENDS``)

A device is named ``table:SYSTEM/FRAMEWORK/VERSION``, or with such kernels ``.../VERSION/KERNELS``: a file of
data/devices/ with the times of experts of one shape, dtype and EP size in it (``expert_rows``). One that was not
measured is refused, with a list of those that were. Links are named ``table:SYSTEM/nccl/VERSION``, an exchange
``table:SYSTEM/FRAMEWORK/VERSION/BACKEND`` (``exchanges``).

Nothing is kept beyond the process. No row of theirs is part of this repository but where a file says so.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Iterator, Sequence
from functools import cache, lru_cache
from importlib import metadata, resources
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from moe_ep_bench.cost_model.curve import Curve
from moe_ep_bench.cost_model.devices import SENT_BYTES, Dtype, SentDtype
from moe_ep_bench.cost_model.exchanges import Copies, Exchange
from moe_ep_bench.cost_model.links import Link, Links
from moe_ep_bench.errors import UserError, brief
from moe_ep_bench.facts import MEASURED_ELSEWHERE, MissingRows, Rows
from moe_ep_bench.facts.words import missing_words
from moe_ep_bench.models import ModelSpec

if TYPE_CHECKING:  # It imports slowly, and names of tables are checked ahead of all that does.
    import pandas as pd

PACKAGE, EXTRA, PREFIX = "aiconfigurator-core", "moe-ep-bench[tables]", "table:"
MOE, NCCL = "moe_perf.parquet", "nccl_perf.parquet"
A2A, NORMAL, LOW_LATENCY = "moe_a2a_perf.parquet", "wideep_deepep_normal_perf.parquet", "wideep_deepep_ll_perf.parquet"
# Exchanges by framework and name: the file, and what a token has a copy for inside a node. Of DeepEP's second version
# (v2) it is assumed that copies are of ranks.
BACKENDS: dict[str, dict[str, tuple[str, Copies]]] = {
    "sglang": {"deepep_normal": (NORMAL, "rank"), "deepep_ll": (LOW_LATENCY, "pair")},
    "trtllm": {"trtllm_deepep_ht": (A2A, "rank"), "trtllm_deepep_ll": (A2A, "pair")},
    "vllm": {
        "deepep_ht": (A2A, "rank"),
        "deepep_ll": (A2A, "pair"),
        "deepep_v2_context": (A2A, "rank"),
        "deepep_v2_generation": (A2A, "rank"),
    },
}
# Experts by framework and name, as ``BACKENDS`` name the exchanges that they stand behind.
KERNELS: dict[str, dict[str, str]] = {
    "sglang": {
        "deepep_normal": "wideep_context_moe_perf.parquet",
        "deepep_ll": "wideep_generation_moe_perf.parquet",
    },
    "trtllm": {"wideep": "wideep_moe_perf.parquet", "wideep_288": "wideep_moe_perf.parquet"},
}
# What a token is sent as, by ``layer.dtype``; a key of ``SENT_BYTES``. All else comes and goes in bfloat16.
_SENT: dict[str, SentDtype] = {"fp8": "fp8", "fp8_block": "fp8", "w4a8_mxfp4_mxfp8": "fp8", "nvfp4": "nvfp4"}
# Rows of SGLang do not name it: they dispatch FP8 (its collector).
_SENT_BY = {"sglang": "fp8"}
# A hidden size that was not measured takes the nearest one's rows, by bytes, up to so many times.
_NEAR = 2.0
# GPUs of a node, and the links of data/links/ that carry all but the exchange, inside a node and beyond it.
_GPUS = {"gb200": 4, "gb300": 4}
_OTHER_LINKS = {
    "b200_sxm": ("b200-nvlink5",),
    "b300_sxm": ("b200-nvlink5",),
    "gb200": ("gb200-nvl72",),
    "gb300": ("gb200-nvl72",),
}
_HOPPER_LINKS = ("h100-nvlink4", "h100-nvlink4-ndr")


# ---- what there is ---------------------------------------------------------------------------------------------------


class NoRowsError(UserError):
    """Tables have no rows of what was asked; ``missing`` has the facts that its line is composed of."""

    def __init__(self, missing: MissingRows) -> None:
        super().__init__(missing_words(missing))
        self.missing = missing


def root() -> Path:
    """The folder ``systems`` of the installed package.

    Raises:
        UserError: it is not installed; the line names the extra.
    """
    try:
        package = resources.files(PACKAGE.replace("-", "_"))
    except ModuleNotFoundError:
        raise NoRowsError(MissingRows(kind="package", name=PACKAGE, known=(EXTRA,))) from None
    return Path(str(package)) / "systems"


@cache
def package_version() -> tuple[str, str]:
    """The distribution that holds the tables, and its version: the package, or whichever has its module."""
    try:
        return PACKAGE, metadata.version(PACKAGE)
    except metadata.PackageNotFoundError:
        name = metadata.packages_distributions()[PACKAGE.replace("-", "_")][0]
        return name, metadata.version(name)


def folders(folder: Path) -> list[str]:
    """Names of the folders in one; none where it is not there."""
    return sorted(path.name for path in folder.iterdir() if path.is_dir()) if folder.is_dir() else []


def choose(what: str, name: str, names: Sequence[str]) -> None:
    """Refuse a name that is none of ``names``, in a line that lists them."""
    if name not in names:
        raise NoRowsError(MissingRows(kind="part", name=name, part=what, known=tuple(names)))


def _parts(folder: Path, kind: str) -> dict[str, list[str]]:
    """Versions of a framework that have rows of a kind, each with what may follow it in a name; "" = nothing."""
    found = {}
    for version in folders(folder):
        at = folder / version
        if kind == "comm" and folder.name == "nccl":
            found[version] = [""]
        elif kind == "comm":
            known = BACKENDS.get(folder.name, {})
            found[version] = [name for name, (file, _) in known.items() if name in _names(at / file, name)]
        else:
            known = {"": MOE, **KERNELS.get(folder.name, {})}
            found[version] = [name for name, file in known.items() if (at / file).is_file()]
    return {version: names for version, names in found.items() if names}


@cache
def _names(file: Path, backend: str) -> set[str]:
    """Exchanges that a file has rows of; one whose rows name none is of ``backend``."""
    import pyarrow.parquet as pq

    if not file.is_file():
        return set()
    if file.name != A2A:
        return {backend}
    with pq.ParquetFile(file) as table:
        return set(table.read(columns=["comm_backend"])[0].to_pylist())


def is_open(name: str) -> bool:
    """Whether a name leaves the version open: ``table:SYSTEM`` or ``table:SYSTEM/FRAMEWORK``, the newest that fits."""
    parts = name.removeprefix(PREFIX).split("/")
    return name.startswith(PREFIX) and len(parts) < 3 and all(parts)


class Tables(NamedTuple):
    """The file of one framework's version on one system.

    Attributes:
        kind: ``moe`` or ``comm``.
        backend: of ``BACKENDS`` or ``KERNELS``; "" = NCCL's, or ``moe_perf``.
    """

    system: str
    framework: str
    version: str
    kind: str
    backend: str = ""

    @classmethod
    def named(cls, name: str, kind: str) -> Tables:
        """Find ``table:SYSTEM/FRAMEWORK/VERSION``, with ``/BACKEND`` where there is one, among the files of a kind.

        Raises:
            UserError: one line that lists what there is at the first part that is not known.
        """
        system, framework, version, backend = [*name.removeprefix(PREFIX).split("/", 3), "", "", ""][:4]
        data = root() / "data"
        choose("system", system, [known for known in folders(data) if folders(data / known / kind)])
        frameworks = folders(data / system / kind)
        if kind == "comm":
            frameworks = [known for known in frameworks if _parts(data / system / kind / known, kind)]
        choose("framework", framework, frameworks)
        parts = _parts(data / system / kind / framework, kind)
        choose(f"version of {framework}", version, list(parts))
        if backend not in parts[version]:
            if parts[version] == [""]:
                raise UserError(f"expected {PREFIX}{system}/{framework}/{version}; got {brief(name)}")
            what = "exchange" if kind == "comm" else "experts"
            choose(f"kind of {what} of {framework} {version}", backend, [*filter(None, parts[version])])
        return cls(system, framework, version, kind, backend)

    @classmethod
    def newest(cls, name: str, kind: str, wanted: Iterable[tuple[str, str]]) -> Iterator[Tables]:
        """Files that an open name may mean (``is_open``), in the order of ``wanted``, newest versions first.

        Args:
            wanted: frameworks and what follows a version.

        Raises:
            UserError: an unknown part; one line that lists what there is.
        """
        system, _, framework = name.removeprefix(PREFIX).partition("/")
        data = root() / "data"
        choose("system", system, [known for known in folders(data) if folders(data / known / kind)])
        if framework:
            choose("framework", framework, folders(data / system / kind))
        for of_framework, backend in dict.fromkeys(wanted):
            parts = _parts(data / system / kind / of_framework, kind)
            for version in sorted(parts, key=lambda one: [*map(int, re.findall(r"\d+", one))], reverse=True):
                if framework in ("", of_framework) and backend in parts[version]:
                    yield cls(system, of_framework, version, kind, backend)

    @property
    def name(self) -> str:
        return PREFIX + "/".join(filter(None, (self.system, self.framework, self.version, self.backend)))

    @property
    def file(self) -> str:
        """Below ``systems/data``."""
        file = MOE if self.kind == "moe" else NCCL
        if self.backend:
            file = (
                KERNELS[self.framework][self.backend]
                if self.kind == "moe"
                else BACKENDS[self.framework][self.backend][0]
            )
        return "/".join([self.system, self.kind, self.framework, self.version, file])

    @property
    def facts(self) -> Rows:
        """The package, the framework, the system and the file, which say who measured."""
        package, package_version_ = package_version()
        return Rows(
            package=package,
            package_version=package_version_,
            system=self.system,
            framework=self.framework,
            version=self.version,
            file=self.file,
        )

    def read(self, columns: Sequence[str], **equal: object) -> pd.DataFrame:
        """Some columns of the file, and of its rows those that have these values of columns.

        Raises:
            UserError: the file is missing or damaged; the line names it.
        """
        import pyarrow as pa
        import pyarrow.compute as pc
        import pyarrow.parquet as pq

        path = root() / "data" / self.file
        if not path.is_file():
            raise UserError(f"{' '.join(package_version())}, {self.file}: there is no such file")
        try:
            # ``pq.read_table`` imports pyarrow.dataset, which takes a quarter of a second.
            with pq.ParquetFile(path) as file:
                rows = file.read(columns=list({*columns, *equal}))
            for column, value in equal.items():  # Strings become pandas' slowly: those of few rows.
                rows = rows.filter(pc.call_function("equal", [rows[column], pa.scalar(value)]))
            return rows.select(list(columns)).to_pandas()
        except (pa.ArrowException, OSError, KeyError) as problem:
            raise UserError(f"{path}: damaged: {brief(str(problem), quoted=False)}") from None


# ---- links -----------------------------------------------------------------------------------------------------------


def load_links_of_layer(
    name: str,
    model: ModelSpec,
    num_ranks: int,
    dtype: Dtype,
    sms: int | None = None,
    dispatch_dtype: SentDtype | None = None,
    *,
    decodes: bool = False,
) -> Links:
    """``load_links`` for one layer: those of an exchange with the rows of its shape.

    An open name means an exchange: low-latency kernels where a batch is a step of decode, others at prefill; of SGLang,
    vLLM or TensorRT-LLM, the newest rows first.

    Args:
        num_ranks: of the EP group.
        dtype: ``layer.dtype``, which says what tokens are sent as where ``dispatch_dtype`` does not.
        sms: streaming multiprocessors that the exchange holds; None = the fastest row of each size.
        dispatch_dtype: ``layer.dispatch_dtype``, of ``SENT_BYTES``.

    Raises:
        UserError: also what was not measured, with a list of what was.
    """
    if not name.startswith(PREFIX):
        return _other_links(name, num_ranks, sms)
    return _links_of_tables(root(), name, model, num_ranks, dtype, sms, dispatch_dtype, decodes=decodes)


def _other_links(name: str, num_ranks: int, sms: int | None) -> Links:
    """``load_links`` where nothing says how many multiprocessors an exchange holds."""
    if sms is not None:
        raise UserError(f"expected none but with an exchange of tables, got {sms} with {name}", "exchange_sms")
    return load_links(name, num_ranks)


@lru_cache(maxsize=32)
def _links_of_tables(
    folder: Path,
    name: str,
    model: ModelSpec,
    num_ranks: int,
    dtype: Dtype,
    sms: int | None,
    dispatch_dtype: SentDtype | None,
    *,
    decodes: bool = False,
) -> Links:
    """``load_links_of_layer`` of a table's name; points of a sweep share it, for the files of ``folder`` stay."""
    if is_open(name):
        wanted = [
            (framework, backend)
            for framework in ("sglang", "vllm", "trtllm")
            for backend, (_, copies) in BACKENDS[framework].items()
            if (copies == "pair") == decodes
        ]
        for tables in Tables.newest(name, "comm", wanted):
            with contextlib.suppress(UserError):  # of another shape
                return _links_of_tables(folder, tables.name, model, num_ranks, dtype, sms, dispatch_dtype)
        stage = "decode" if decodes else "prefill"
        raise NoRowsError(
            MissingRows(kind="exchange", name=name, shape=model.expert_shape, ep_size=num_ranks, stage=stage)
        )
    tables = Tables.named(name, "comm")
    if not tables.backend:
        return _other_links(name, num_ranks, sms)
    per_node = _GPUS.get(tables.system, 8)
    others = _OTHER_LINKS.get(tables.system, _HOPPER_LINKS)
    links = Links.named(others[-1] if num_ranks > per_node else others[0])
    sent = dispatch_dtype or _SENT.get(dtype, "bfloat16")
    exchange = read_exchange(tables, model, num_ranks, sent, sms)
    return links.model_copy(update={"exchange": exchange, "ranks_per_node": min(per_node, links.ranks_per_node)})


def read_exchange(
    tables: Tables, model: ModelSpec, num_ranks: int, sent: SentDtype, sms: int | None = None
) -> Exchange:
    """The rows of an exchange for a model's layer: its ranks, and the nearest hidden size, dtype, top-k and experts.

    Which top-k and how many experts the rows had enters by the copies that uniform routing gives them; another hidden
    size or dtype by the bytes of a token.

    Args:
        sent: what tokens are dispatched as, of ``SENT_BYTES``.

    Raises:
        UserError: no rows of this number of ranks or SMs, or of a hidden size near this one; the line lists what there
            is.
    """
    rows, source, hidden = exchange_rows(tables), tables.name, model.expert_hidden_size

    def keep(what: str, column: str, value: Any) -> pd.DataFrame:
        there = sorted(rows[column].unique().tolist())
        if value not in there:
            raise UserError(f"{source}: expected {what} of {', '.join(map(str, there))}; got {value}")
        return rows[rows[column] == value]

    def nearest(column: str, value: int) -> int:
        there = rows[column].unique()
        return int(there[np.abs(np.log(there / value)).argmin()])

    rows = keep("layer.ep_size", "num_ranks", num_ranks)
    if max(hidden / (near := nearest("hidden_size", hidden)), near / hidden) > _NEAR:
        keep("a hidden size, or one near it,", "hidden_size", hidden)
    rows = rows[rows["hidden_size"] == near]
    known: list[SentDtype] = [dtype for dtype in SENT_BYTES if rows["dtype"].eq(dtype).any()]
    nearest_sent = sorted(known, key=lambda dtype: (dtype != sent, abs(SENT_BYTES[dtype] - SENT_BYTES[sent])))
    row_sent = nearest_sent[0] if known else None
    rows = rows[rows["dtype"] == (row_sent or "")]
    if sms is not None:
        rows = keep("exchange_sms", "sms", sms)
    for column, value in (("top_k", model.top_k), ("num_experts", model.num_experts)):
        rows = rows[rows[column] == nearest(column, value)]
    best = rows.loc[rows.groupby(["phase", "num_tokens"])["us"].idxmin()].sort_values("num_tokens")
    dispatch, combine = (best[best["phase"] == phase] for phase in ("dispatch", "combine"))
    copies = BACKENDS[tables.framework][tables.backend][1]
    num_nodes = int(best["num_nodes"].iloc[0])
    return Exchange(
        name=source,
        measured_by=tables.facts,
        copies="node" if copies == "rank" and num_nodes > 1 else copies,
        num_ranks=num_ranks,
        num_nodes=num_nodes,
        num_experts=int(best["num_experts"].iloc[0]),
        top_k=int(best["top_k"].iloc[0]),
        hidden_size=near,
        sent_as=row_sent,
        dispatch_scale=hidden / near * (SENT_BYTES[sent] / SENT_BYTES[row_sent] if row_sent else 1.0),
        combine_scale=hidden / near,
        dispatch=Curve.of(dispatch["num_tokens"], dispatch["us"]),
        combine=Curve.of(combine["num_tokens"], combine["us"]),
        dispatch_sms=tuple(dispatch["sms"].astype(int)) if (dispatch["sms"] > 0).all() else (),
        combine_sms=tuple(combine["sms"].astype(int)) if (combine["sms"] > 0).all() else (),
    )


def exchange_rows(tables: Tables) -> pd.DataFrame:
    """Rows of an exchange in one form.

    Columns: hidden_size, num_experts, top_k, num_ranks, num_nodes, num_tokens of each rank, phase (dispatch, combine),
    dtype that is dispatched (empty = not known), sms (0 = not stated); us, with what telling ranks their counts takes
    (``notify``).
    """
    return _exchange_rows(root(), tables)


@lru_cache(maxsize=32)
def _exchange_rows(folder: Path, tables: Tables) -> pd.DataFrame:
    """``exchange_rows``; sizes of a question share them, for the files of ``folder`` stay."""
    import pandas as pd

    names = {
        "node_num": "num_nodes",
        "num_token": "num_tokens",
        "num_topk": "top_k",
        "topk": "top_k",
        "ep_size": "num_ranks",
    }
    shape = ["hidden_size", "num_experts"]
    if tables.file.endswith(A2A):
        columns = [*shape, "node_num", "num_tokens", "topk", "ep_size", "phase", "comm_dtype", "sms", "latency"]
        rows = tables.read(columns, comm_backend=tables.backend).rename(columns=names)
        dtype = rows["comm_dtype"].replace("default", "")
        return rows.assign(us=rows["latency"], dtype=dtype).drop(columns=["latency", "comm_dtype"])
    of_phase = {"transmit_us": "{}_transmit_us", "notify_us": "{}_notify_us", "sms": "{}_sms"}
    if tables.file.endswith(LOW_LATENCY):
        of_phase = {"transmit_us": "{}_avg_t_us"}
    phases = ("dispatch", "combine")
    columns = [column.format(phase) for phase in phases for column in of_phase.values()]
    rows = tables.read([*shape, "node_num", "num_token", "num_topk", *columns]).rename(columns=names)
    parts = [
        rows.rename(columns={column.format(phase): name for name, column in of_phase.items()}).assign(phase=phase)
        for phase in phases
    ]
    found = pd.concat(parts, ignore_index=True).drop(columns=columns, errors="ignore")
    us = found["transmit_us"] + found.get("notify_us", 0.0)
    num_ranks = found["num_nodes"] * _GPUS.get(tables.system, 8)
    sms = found.get("sms", pd.Series(0, found.index))
    found = found.assign(us=us, num_ranks=num_ranks, dtype=_SENT_BY.get(tables.framework, ""), sms=sms)
    return found.drop(columns=["transmit_us", "notify_us"], errors="ignore")


def load_links(name: str, num_ranks: int | None = None) -> Links:
    """Links by their name, by the path of a file, or of a table of NCCL, which are of one node.

    Args:
        num_ranks: a table's are of the fewest GPUs that are no fewer; None = of the most.

    Raises:
        UserError: see ``Links.load`` and ``Tables.named``.
    """
    if not name.startswith(PREFIX):
        return Links.load(name)
    tables = Tables.named(name, "comm")
    if tables.backend:
        raise UserError(f"{tables.name}: expected links of NCCL, whose times go by bytes; got an exchange")
    rows, source = read_nccl(tables), f"{' '.join(package_version())}, {tables.file}"
    most = int(rows["num_gpus"].max())
    gpus = rows.loc[rows["num_gpus"] >= min(num_ranks or most, most), "num_gpus"].min()
    measured = {
        operation: Link.measured(points["bytes"], points["us"], MEASURED_ELSEWHERE)
        for operation, points in rows[rows["num_gpus"] == gpus].groupby("op_name")
    }
    if missing := {"alltoall", "all_gather", "all_reduce"} - set(measured):
        raise UserError(f"{source}: no rows of {min(missing)}; take another version of nccl")
    return Links(
        name=tables.name,
        source=source,
        measured_by=tables.facts,
        ranks_per_node=most,
        intra=measured["alltoall"],
        inter=None,
        gather=measured["all_gather"],
        reduce=measured["all_reduce"],
    )


def read_nccl(tables: Tables) -> pd.DataFrame:
    """Rows of nccl-tests: op_name, num_gpus, bytes that pass a rank's link, us; the fastest where sizes repeat.

    nccl-tests names all bytes of a rank's buffer; of an all-to-all or all-gather one of num_gpus parts stays. Elements
    are of 2 or 1 bytes, so that most sizes were timed twice. Sizes rise within an operation.
    """
    rows = tables.read(["op_name", "nccl_dtype", "num_gpus", "message_size", "latency"])
    size = rows["message_size"] * rows["nccl_dtype"].map({"half": 2, "int8": 1})
    crossing = np.where(rows["op_name"] == "all_reduce", 1.0, 1 - 1 / rows["num_gpus"])
    rows = rows.assign(bytes=size * crossing, us=rows["latency"] * 1e3)
    return rows.groupby(["op_name", "num_gpus", "bytes"])["us"].min().reset_index()
