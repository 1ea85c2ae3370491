"""Devices and links whose times others measured (``tables.py``), in place of formulas.

*Experts.* A rank's time follows from the rows of its shape, dtype and EP size that were measured under balanced scores.
Let u(T) be their time with T tokens of all ranks, and b T what a kernel does for tokens of all ranks, whoever's experts
they choose: routing, sorting and summing. Experts are the rest, f = u - b T. A rank with m_l rows on its experts takes

    t = b T + f(T) S(m) / S(balanced loads of T tokens),   S(m) = f[A] + sum over m_l > 0 of (f[L m_l] - f[L]) / L

f[P] is f by the rank's pairs P, A its activated experts, L its experts: an expert with m rows costs what one of L
equally loaded experts does, and with a row each A experts cost what was measured with A pairs. So t is what was
measured wherever the loads are the row's, and f is interpolated over the logarithms of tokens (or pairs) and time
between rows. Beyond the last row time grows as between the last two. b comes from the growth of u at many tokens over
EP sizes, which has a part in proportion to a rank's pairs and one that stays.

A shape or an EP size that was not measured is refused, with a list of those that were.

*Links.* Collectives are interpolated over bytes. An uneven all-to-all takes as long as the rank's own larger direction.

Shapes: N = measured points, L = experts (or slots) of a rank, R = ranks, E = experts, k = experts per token.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache, cached_property
from typing import TYPE_CHECKING, ClassVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from moe_ep_bench.cost_model.devices import PRECISIONS, Device
from moe_ep_bench.cost_model.links import Curve, Link, Links
from moe_ep_bench.cost_model.tables import (
    MEASURED_ELSEWHERE,
    NCCL,
    PREFIX,
    SHAPE,
    Tables,
    balanced_loads,
    choose,
    dtypes_of,
    of_shape,
    read_moe,
    read_nccl,
    systems,
)
from moe_ep_bench.errors import UserError, naming
from moe_ep_bench.models import ModelSpec
from moe_ep_bench.presets import Strict

if TYPE_CHECKING:  # It imports slowly.
    import pandas as pd

# Growth with all ranks' tokens is looked for above so many, over at least so many EP sizes; experts keep some of a row.
_MANY_TOKENS, _FEWEST_SIZES, _LEAST_REST = 4096, 3, 0.05
# The file of data/devices/ that says the rest of a system, where it is called otherwise.
_DEVICES = {"a100_sxm": "a100-sxm-80gb"}


class ExpertTable(Strict):
    """Measured times of one shape, dtype and EP size under balanced scores (see the module)."""

    hidden_size: int
    ffn_hidden_size: int
    num_experts: int
    top_k: int
    ep_size: int
    curve: Curve
    """Over tokens of all ranks."""
    token_us: float = 0.0
    """b: microseconds for each token of all ranks."""
    expert_us: float = 0.0
    """To read the weights of an expert beyond those measured, as replicas are."""

    @property
    def num_local(self) -> int:
        return self.num_experts // self.ep_size

    @property
    def words(self) -> str:
        """The shape and EP size."""
        shape = self.hidden_size, self.ffn_hidden_size, self.num_experts, self.top_k
        return f"{_shape_words(shape)}, EP {self.ep_size}"

    def loads(self, num_tokens: int) -> NDArray[np.int64]:
        """Of the rank's experts in the row of so many tokens, int64 [L]."""
        return balanced_loads(num_tokens, self.num_experts, self.top_k, self.num_local)

    def time_us(self, rows_L: ArrayLike, num_tokens: int | None = None) -> float:
        """Microseconds of one pass through a rank's experts; no rows take no time.

        Args:
            rows_L: of each expert or slot of the rank.
            num_tokens: of all ranks; None = as many as give the rank its rows where loads are balanced.
        """
        rows_L = np.asarray(rows_L, dtype=np.float64)
        rows_L = rows_L[rows_L > 0]
        if not len(rows_L):
            return 0.0
        if num_tokens is None:
            num_tokens = max(1, round(rows_L.sum() * self.ep_size / self.top_k))
        measured_us = float(self.curve.at(num_tokens))
        rest_us = max(measured_us - self.token_us * num_tokens, _LEAST_REST * measured_us)
        return measured_us - rest_us + rest_us * self._work_us(rows_L) / self._balanced_us(num_tokens)

    @cached_property
    def _by_pairs(self) -> Curve:
        """f by the rank's pairs; rows with as many pairs are averaged."""
        tokens_N, times_us_N = np.asarray(self.curve.root).T
        rest_us_N = np.maximum(times_us_N - self.token_us * tokens_N, _LEAST_REST * times_us_N)
        pairs, of_N = np.unique([self.loads(int(number)).sum() for number in tokens_N], return_inverse=True)
        means = np.bincount(of_N, rest_us_N) / np.bincount(of_N)
        return Curve.of(pairs[pairs > 0], means[pairs > 0])

    def _work_us(self, rows_L: NDArray[np.float64]) -> float:
        """S: rows of activated experts."""
        curve, local, active = self._by_pairs, self.num_local, len(rows_L)
        one_each_us = float(curve.at(min(active, local))) + max(active - local, 0) * self.expert_us
        grown_us = (curve.at(local * rows_L) - curve.at(local)) / local
        return max(one_each_us + float(grown_us.sum()), _LEAST_REST * one_each_us)

    @cached_property
    def _balanced_us(self) -> Callable[[int], float]:
        """S of balanced loads, kept by tokens."""

        def balanced_us(num_tokens: int) -> float:
            rows_L = self.loads(num_tokens).astype(np.float64)
            return self._work_us(rows_L[rows_L > 0] if rows_L.any() else np.ones(1))

        return cache(balanced_us)


# ---- from rows to tables ---------------------------------------------------------------------------------------------


def tables_of_shape(rows: pd.DataFrame) -> dict[int, ExpertTable]:
    """One shape's balanced rows of one dtype as a table for each EP size."""
    rows = rows.sort_values("num_tokens")
    shared = {**rows[SHAPE].iloc[0].to_dict(), "token_us": _token_us(rows)}
    return {
        int(ep_size): ExpertTable(**shared, ep_size=ep_size, curve=Curve.of(points["num_tokens"], points["us"]))
        for ep_size, points in rows.groupby("ep_size")
    }


def _token_us(rows: pd.DataFrame) -> float:
    """b: growth of time at many tokens, as a part in proportion to a rank's pairs and a constant one.

    Least squares in relative error over EP sizes; 0 where there are few of them. Some of every row is left to experts.
    """
    many = rows[rows["num_tokens"] >= _MANY_TOKENS].groupby("ep_size")[["num_tokens", "us"]]
    grown = (many.last() - many.first()).query("num_tokens > 0 and us > 0")
    if len(grown) < _FEWEST_SIZES:
        return 0.0
    growth_R = (grown["us"] / grown["num_tokens"]).to_numpy()
    pairs_R = rows["top_k"].iloc[0] / grown.index.to_numpy()
    columns = np.stack([pairs_R / growth_R, 1 / growth_R], axis=1)  # Residuals are relative.
    _, token_us = np.linalg.lstsq(columns, np.ones(len(grown)))[0]
    return float(min(max(token_us, 0.0), (1 - 2 * _LEAST_REST) * growth_R.min()))


def shape_of(model: ModelSpec) -> tuple[int, int, int, int]:
    """What tables know a layer by (``SHAPE``)."""
    return model.expert_hidden_size, model.ffn_hidden_size, model.num_experts, model.top_k


def find_table(rows: pd.DataFrame, model: ModelSpec, ep_size: int) -> ExpertTable:
    """The table of a model's layer on so many ranks, from the balanced rows of one dtype.

    Raises:
        UserError: that was not measured; the line lists the EP sizes of the shape, or all shapes.
    """
    wanted = shape_of(model)
    measured = of_shape(rows, wanted)
    if ep_size in measured["ep_size"].to_numpy():
        return tables_of_shape(measured)[ep_size]
    points = (rows if measured.empty else measured)[[*SHAPE, "ep_size"]].drop_duplicates()
    known = [
        f"{_shape_words(shape)} (EP {', '.join(map(str, sorted(sizes)))})"
        for shape, sizes in points.groupby(SHAPE)["ep_size"]
    ]
    raise UserError(
        f"expected experts of a shape and an EP size that were measured, {'; '.join(known) or 'none'};"
        f" got {_shape_words(wanted)}, EP {ep_size}"
    )


def _shape_words(shape: Sequence[int]) -> str:
    return "{} x {}, {} experts, top-{}".format(*shape)


# ---- devices ---------------------------------------------------------------------------------------------------------


class TableDevice(Device):
    """A device whose experts' times were measured elsewhere; the rest is a roofline's.

    Unbound it names tables; ``for_layer`` takes the rows of one model and EP size.
    """

    HOLDS_PERMUTATION: ClassVar[bool] = True

    tables: Tables
    dtype: str | None = None
    table: ExpertTable | None = None

    def for_layer(self, model: ModelSpec, ep_size: int, dtype: str) -> TableDevice:
        dtypes = [known for known in dtypes_of(self.tables) if known in PRECISIONS]
        if dtype not in dtypes:
            raise UserError(f"{self.tables.name}: expected layer.dtype one of {', '.join(dtypes)}; got {dtype}")
        rows = read_moe(self.tables, dtype=dtype, tp_size=model.tensor_parallel)
        with naming(f"{self.tables.name}, {dtype}"):
            table = find_table(rows, model, ep_size)
        sizes = model.expert_matrices, model.expert_hidden_size, model.ffn_hidden_size
        expert_us = math.prod(sizes) * PRECISIONS[dtype].weight_bytes / (self.reached_tbps * 1e6)
        return self.model_copy(update={"dtype": dtype, "table": table.model_copy(update={"expert_us": expert_us})})

    def experts_us(
        self, hidden_size: int, ffn_hidden_size: int, rows_L: ArrayLike, *_: object, num_tokens: int | None = None, **__
    ) -> float:
        assert self.table is not None, "no layer's rows were taken"
        return self.table.time_us(rows_L, num_tokens)

    @property
    def experts_ran(self) -> tuple[str, str]:
        return self.tables.name, "the table's"

    def describe(self, *, whole: bool = False, num_tokens: int | None = None) -> str:
        rows = ""
        if (table := self.table) is not None:
            (first, _), (last, _) = table.curve.root[0], table.curve.root[-1]
            rows = f" {table.words}: {len(table.curve.root)} rows of {first:,.0f} to {last:,.0f} tokens"
            rows += f", extrapolated to {num_tokens:,};" if num_tokens and num_tokens > last else ";"
        dtype = f", {self.dtype}" if self.dtype else ""
        rest = super().describe(whole=whole).removeprefix("modelled by ")
        return f"experts {MEASURED_ELSEWHERE} ({self.tables.words}{dtype}):{rows} the rest modelled by {rest}"


def load_device(name: str) -> Device:
    """A device by its name, by the path of a file, or of a table.

    Raises:
        UserError: see ``Device.load`` and ``tables``.
    """
    if not name.startswith(PREFIX):
        return Device.load(name)
    tables = Tables.named(name, "moe")
    # A file of data/devices/ states all but the experts.
    known = [system for system in systems("moe") if _device_of(system) in Device.names()]
    choose("system with a file of data/devices/", tables.system, known)
    return TableDevice(**Device.named(_device_of(tables.system)).model_dump(), tables=tables)


def _device_of(system: str) -> str:
    return _DEVICES.get(system, system.replace("_", "-"))


# ---- links -----------------------------------------------------------------------------------------------------------

_NOISE = 0.1


class NcclLinks(Links):
    """Links of one node by nccl-tests: ``intra`` is the all-to-all's, over bytes that a rank sends to others."""

    words: str
    gather: Link
    """Of an all-gather, over bytes that a rank gets from others."""
    reduce: Link
    """Of an all-reduce, over bytes that a rank has to sum."""

    def scaled(self, factor: float) -> Links:
        collectives = {"gather": self.gather.scaled(factor), "reduce": self.reduce.scaled(factor)}
        return self if factor == 1 else super().scaled(factor).model_copy(update=collectives)

    def describe(self) -> str:
        how = "all-to-all, all-gather and all-reduce of nccl-tests, over bytes; uneven splits by each rank's larger"
        return f"{MEASURED_ELSEWHERE} ({self.words}): {how} direction; {self.name}"

    def all_gather_us(self, num_bytes: float, num_ranks: int) -> float:
        self._check_ranks(num_ranks)
        return float(self.gather.time_us((num_ranks - 1) * num_bytes))

    def all_reduce_us(self, num_bytes: float, num_ranks: int) -> float:
        return float(self.reduce.time_us(num_bytes)) if num_ranks > 1 else 0.0


def load_links(name: str, num_ranks: int | None = None) -> Links:
    """Links by their name, by the path of a file, or of a table.

    Args:
        num_ranks: a table's are of the fewest GPUs that are no fewer; None = of the most.

    Raises:
        UserError: see ``Links.load`` and ``tables``.
    """
    if not name.startswith(PREFIX):
        return Links.load(name)
    tables = Tables.named(name, "comm")
    choose("framework", tables.framework, ["nccl"])
    rows, source = read_nccl(tables), tables.where("comm", NCCL)
    most = int(rows["num_gpus"].max())
    gpus = rows.loc[rows["num_gpus"] >= min(num_ranks or most, most), "num_gpus"].min()
    measured = {name: _measured_link(points) for name, points in rows[rows["num_gpus"] == gpus].groupby("op_name")}
    if missing := {"alltoall", "all_gather", "all_reduce"} - set(measured):
        raise UserError(f"{source}: no rows of {min(missing)}; take another version of nccl")
    sides = {"intra": measured["alltoall"], "inter": None, "ranks_per_node": most}
    collectives = {"gather": measured["all_gather"], "reduce": measured["all_reduce"]}
    return NcclLinks(name=tables.name, source=source, words=tables.words, **sides, **collectives)


def _measured_link(points: pd.DataFrame) -> Link:
    """A link by measured points.

    A message that took up to ``_NOISE`` longer than a larger one was disturbed: it takes what that did. One that took
    longer still went by another protocol of NCCL's, and keeps its time.
    """
    points = points.sort_values("bytes")
    sizes, times = points["bytes"].to_numpy(), points["us"].to_numpy()
    least = np.minimum.accumulate(times[::-1])[::-1]
    times = np.where(least < (1 - _NOISE) * times, times, least)
    reached_gbps = (sizes[-1] - sizes[-2]) / max(times[-1] - times[-2], 1e-9) / 1e3
    return Link(
        latency_us=float(times[0]),
        latency_basis=MEASURED_ELSEWHERE,
        bandwidth_gbps=float(reached_gbps),
        efficiency=1.0,
        efficiency_basis=MEASURED_ELSEWHERE,
        curve=Curve.of(sizes, times),
    )
