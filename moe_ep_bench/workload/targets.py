"""Targets of synthetic traffic: skews of real models by name, and counts of how often each expert was chosen.

A file of data/skews/ belongs to the preset of the same name and holds skews, each with what it was calibrated to:

``mixed``          traffic of several domains together, its median layer
``single_domain``  one domain, the median layer of all domains
``worst_layer``    one domain, the layer with the greatest peak load
``domains``        by name, each domain's median layer, where several were recorded

*Median* is by relief: the fullest rank's load over what a cut at capacity factor 1 leaves of it, which bounds the gain
of Token Drop. A skew has the numbers of that one layer, not means over layers; ``layers`` says how far layers differ.

A synthetic workload calibrated to a recording is not a recording: it has the targets' numbers, and the
rest of its shape is the generator's.

Counts (``workload.skew_from``) are no routing either. A file may be

* JSON with ``logical_count`` [layers][experts], or [passes][layers][experts]: what SGLang takes for its own plan
  (``--init-expert-location``), and what its recorder dumps in mode ``stat``, converted;
* JSON with such a list alone;
* an npz of such an array;
* a CSV of rows ``layer, expert, count``, or of a row per layer.

Shapes: L = layers, E = experts.
"""

from __future__ import annotations

import csv
import io
import math
import tempfile
import zipfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from moe_ep_bench.errors import UserError, brief, did_you_mean, in_ranges
from moe_ep_bench.files import read_json, read_text
from moe_ep_bench.presets import Preset, Strict
from moe_ep_bench.workload.token_imbalance import TOKEN_IMBALANCE

# ---- skews -----------------------------------------------------------------------------------------------------------


class RankLoad(Strict):
    """A load of the fullest of ``ep_size`` contiguous ranks, over the mean."""

    ep_size: int = Field(ge=2)
    """Number of ranks."""
    load: float = Field(ge=1)
    """Load of the fullest of them, over the mean."""


class Cut(Strict):
    """A layer's loads after Token Drop, all ranks' tokens together."""

    capacity_factor: float = Field(gt=0)
    """Capacity over the mean load."""
    dropped_share: float = Field(ge=0, lt=1)
    """Share of the pairs above it."""
    rank_load: float | None = Field(default=None, gt=0)
    """Load of the fullest of ``Skew.rank_load.ep_size`` ranks after the cut, over the mean before it."""


class Layers(Strict):
    """How far the layers differ that a skew stands for."""

    num_layers: int = Field(ge=1)
    """Layers, of each domain."""
    relief: tuple[float, float, float]
    """Least, median and greatest load of the fullest rank over what a cut at factor 1 leaves of it."""


class Skew(Strict):
    """Targets for ``SyntheticWorkload``; None = not known, left to the generator."""

    basis: Literal["recorded", "published", "assumed"]
    """Source of the numbers: a recording of this model, a publication on it, or another model's."""
    source: str
    num_tokens: int | None = Field(ge=1)
    """Over how many tokens the loads were measured; None = unknown."""
    of: str | None = None
    """The model of which these numbers are, where it is another one."""
    peak_load: float = Field(ge=1)
    rank_load: RankLoad | None = None
    topk_share: float | None = Field(default=None, gt=0, lt=1)
    neighbour_overlap: float | None = Field(default=None, gt=0)
    cuts: tuple[Cut, ...] = ()
    layers: Layers | None = None

    def targets(self) -> dict[str, Any]:
        """The targets that are known, by key of a synthetic workload."""
        found = self.model_dump(include={*TARGETS, "cuts"}, exclude_none=True)
        return {name: value for name, value in found.items() if value != ()}

    def taken_for(self, of: str, omit: Iterable[str]) -> Skew:
        """The same as another model's: assumed, without what does not carry over."""
        changed: dict[str, Any] = {"basis": "assumed", "of": of, **dict.fromkeys(omit)}
        if "rank_load" in omit:
            changed["cuts"] = tuple(cut.model_copy(update={"rank_load": None}) for cut in self.cuts)
        return self.model_copy(update=changed)


class Like(Strict):
    """Another model whose skews stand in for one of which nothing is recorded."""

    preset: str
    name: str
    """Of that model."""
    because: str
    omit: tuple[Literal["rank_load", "topk_share", "neighbour_overlap"], ...] = ()
    """Targets that do not carry over."""


class Skews(Preset):
    """The file of one model: its skews, or whose stand in for them."""

    FOLDER = "skews"

    like: Like | None = None
    mixed: Skew | None = None
    single_domain: Skew | None = None
    worst_layer: Skew | None = None
    domains: dict[str, Skew] = Field(default={})

    @model_validator(mode="after")
    def _check(self) -> Skews:
        if (self.like is None) == (None in (self.mixed, self.single_domain, self.worst_layer)):
            raise UserError(f"expected like, or each of {', '.join(SKEWS)}")
        return self

    def by_name(self) -> dict[str, Skew]:
        """All skews by the name that a config gives."""
        if self.like is not None:
            others = Skews.named(self.like.preset).by_name()  # Their domains say nothing of this model.
            return {name: others[name].taken_for(self.like.name, self.like.omit) for name in SKEWS}
        return {name: getattr(self, name) for name in SKEWS} | self.domains


TARGETS = ("peak_load", "batch_peak_load", "rank_load", "topk_share", "neighbour_overlap")
SKEWS = ("mixed", "single_domain", "worst_layer")
# Other benchmarks' patterns, of any model (``workload.synthetic``).
PATTERNS = ("power_law_1.01", "power_law_1.2", *TOKEN_IMBALANCE)


def load_skew(preset: str, name: str) -> Skew:
    """Load a skew of a preset's file. Raises ValueError: the model has no file, or its file no such skew."""
    if preset not in Skews.names():
        raise UserError(f"there is no data/skews/{preset}.yaml to calibrate to; give peak_load and the like instead")
    known = Skews.named(preset).by_name()
    if name not in known:
        names = [*known, *PATTERNS]
        raise UserError(
            f"expected one of {', '.join(names)} for {preset}; got {brief(name)}{did_you_mean(name, names)}"
        )
    return known[name]


# ---- counts ----------------------------------------------------------------------------------------------------------

COUNT = "logical_count"
# Of a file of counts: its bytes, the number of a layer or an expert, and a count, so that no sum of them overflows.
_MOST_BYTES, _MOST_NUMBER, _MOST_COUNT = 2**28, 2**13, 2**64
_ALLOWED = "a number from 0 to 2^64"
CONVERT = (
    "python -c \"import sys, json, torch; d = torch.load(sys.argv[1], map_location='cpu', weights_only=True); "
    "json.dump({'logical_count': d['logical_count'].tolist()}, open(sys.argv[2], 'w'))\" dump.pt counts.json"
)


class LayerCounts(NamedTuple):
    """Counts of a file by the model's layers.

    Attributes:
        loads: float64 [E] of each layer that has counts, by its number.
        dense: layers without counts that the model does not route.
        missing: layers without counts that it does, as far as is known.
    """

    loads: dict[int, NDArray[np.float64]]
    dense: list[int]
    missing: list[int]

    def describe(self) -> dict[str, Any]:
        """Which layers are used and which are not (``facts.CountedLayers``)."""
        return {"used": len(self.loads), "dense": self.dense, "missing": self.missing}


def read_counts(path: Path, moe_layers: Sequence[int] = ()) -> LayerCounts:
    """Read counts by layer. A file with a row of each MoE layer alone has these layers' numbers, else rows are layers.

    Args:
        moe_layers: layers of the model that route, ascending; () = not known.

    Raises:
        ValueError: no such file, or it holds no counts, or counts of layers that the model does not route; one line
            that names the file.
    """
    count_LE, is_numbered = _all_counts(path)
    numbers: Sequence[int] = range(len(count_LE))
    counted = {number for number in numbers if count_LE[number].any()}
    # Numbers that a file gives itself are the model's wherever they can be.
    if len(moe_layers) == len(count_LE) and not (is_numbered and counted <= {*moe_layers}):
        numbers = moe_layers
    loads = {number: count_E for number, count_E in zip(numbers, count_LE, strict=True) if count_E.any()}
    if moe_layers and (others := loads.keys() - {*moe_layers}):
        raise UserError(
            f"{path}: expected counts of layers that the model routes ({in_ranges(moe_layers)}), or a row of each of "
            f"these {len(moe_layers)} alone; got {len(count_LE)} rows, with counts of layer {in_ranges(others)}"
        )
    without = [number for number in sorted({*numbers, *moe_layers}) if number not in loads]
    last = max(moe_layers, default=0)
    dense = [number for number in without if number < last and number not in moe_layers]
    return LayerCounts(loads, dense, [number for number in without if number not in dense])


def _all_counts(path: Path) -> tuple[NDArray[np.float64], bool]:
    """The counts of every row: float64 [L, E]; and whether the file itself numbers its rows.

    Raises:
        ValueError: no such file, or it holds no counts; one line that names the file.
    """
    if not path.is_file():
        raise UserError(f"{path}: no such file")
    if path.suffix == ".pt":
        raise UserError(f"{path}: a pickle, which is not read; convert it where it was made: {CONVERT}")
    if path.suffix == ".npz":
        return _counts(_array_of(path), path), False
    if path.suffix == ".csv":
        count_LE, is_numbered = _table_of(path)
        return _counts(count_LE, path), is_numbered
    content = read_json(path)
    return _counts(content.get(COUNT) if isinstance(content, dict) else content, path), False


def _array_of(path: Path) -> NDArray[Any]:
    """The array of an npz: ``COUNT``, or the only one. Nothing in it is run, whatever it claims to hold."""
    try:
        with zipfile.ZipFile(path) as archive:
            names = [name.removesuffix(".npy") for name in archive.namelist()]
            name = COUNT if COUNT in names else names[0] if len(names) == 1 else None
            if name is None:
                raise UserError(f"{path}: expected an array {COUNT}, or one alone; got {', '.join(names)}")
            with archive.open(f"{name}.npy") as member:
                content = member.read(_MOST_BYTES + 1)
        # numpy makes room for what the header says; of a memory map it asks the file.
        if len(content) > _MOST_BYTES:
            raise UserError(f"{path}: {name}: expected at most {_MOST_BYTES // 2**20} MiB of counts")
        with tempfile.NamedTemporaryFile(suffix=".npy") as file:
            file.write(content)
            file.flush()
            return np.array(np.load(file.name, mmap_mode="r", allow_pickle=False))
    except (OSError, ValueError, EOFError, KeyError, zipfile.BadZipFile, NotImplementedError) as problem:
        if isinstance(problem, UserError):
            raise
        raise UserError(f"{path}: no npz of numbers: {brief(problem, 100, quoted=False)}") from None


def _table_of(path: Path) -> tuple[NDArray[np.float64], bool]:
    """Counts of a CSV with a header: ``layer, expert, count``, or a row of each layer and a column of each expert.

    Rows of the same layer, and expert, are summed.

    Returns:
        float64 [L, E], and whether there is a column ``layer``.
    """
    reader = csv.reader(io.StringIO(read_text(path).removeprefix("\ufeff"), newline=""))
    try:
        rows = [(reader.line_num, [cell.strip() for cell in row]) for row in reader if row]
    except csv.Error as problem:
        raise UserError(f"{path}: line {reader.line_num}: no CSV: {problem}") from None
    header = [name.lower() for name in rows.pop(0)[1]] if rows else []
    is_long, is_numbered = {"layer", "expert", "count"} <= {*header}, "layer" in header
    experts = [name for name in header if name != "layer"]
    # Names that are all numbers may be the first layer's counts.
    are_counts = not np.isnan([_number(name) for name in experts]).any() and experts != [*map(str, range(len(experts)))]
    if are_counts or not experts or "" in header or len({*header}) < len(header):
        raise UserError(
            f"{path}: no CSV with a header: expected layer, expert, count, or a name for each expert (if numbers, all "
            f"from 0 up), with layer or without; got {brief(','.join(header))}"
        )
    if not rows:
        raise UserError(f"{path}: expected rows below the header, got none")
    indices, counts = ({"layer", "expert"}, {"count"}) if is_long else ({"layer"}, {*experts})
    for line, row in rows:
        if len(row) != len(header):
            raise UserError(f"{path}: line {line}: expected {len(header)} values as in the header, got {len(row)}")
        for name, cell in zip(header, row, strict=True):
            if name in indices and not (cell.isdecimal() and _number(cell) <= _MOST_NUMBER):
                allowed = f"a whole number from 0 to {_MOST_NUMBER}"
            elif name in counts and not 0 <= _number(cell) <= _MOST_COUNT:
                allowed = _ALLOWED
            else:
                continue
            raise UserError(f"{path}: line {line}: {name}: expected {allowed}, got {brief(cell)}")
    column_R = {name: np.array([_number(row[place]) for _, row in rows]) for place, name in enumerate(header)}
    layer_R = column_R["layer"].astype(int) if is_numbered else np.arange(len(rows))
    if is_long:
        expert_R, count_R = column_R["expert"].astype(int), column_R["count"]
        count_LE = np.zeros((layer_R.max() + 1, expert_R.max() + 1))
        np.add.at(count_LE, (layer_R, expert_R), count_R)
    else:
        count_LE = np.zeros((layer_R.max() + 1, len(experts)))
        np.add.at(count_LE, layer_R, np.stack([column_R[name] for name in experts], axis=1))
    return count_LE, is_numbered


def _number(text: str) -> float:
    """The number that a text is, or NaN."""
    try:
        return float(text)
    except ValueError:
        return math.nan


def _counts(value: Any, path: Path) -> NDArray[np.float64]:
    """Check counts [layers, experts] or [passes, layers, experts]."""
    expected = f"{path}: expected {COUNT}, {_ALLOWED} by layer and expert in lists of equal length"
    try:
        # numpy would take times for numbers, and complex ones without their imaginary parts.
        if isinstance(value, np.ndarray) and value.dtype.kind not in "biuf":
            raise TypeError
        with np.errstate(over="ignore"):
            count = np.array(value, dtype=np.float64)
    except (ValueError, TypeError, OverflowError):
        raise UserError(f"{expected}; got {brief(value)}") from None
    if count.ndim not in (2, 3) or not count.size:
        raise UserError(f"{expected}; got {brief(value)}")
    if len(wrong := np.argwhere(~((count >= 0) & (count <= _MOST_COUNT)))):
        place = dict(zip(("pass", "row", "expert")[-count.ndim :], wrong[0].tolist(), strict=True))
        where = ", ".join(f"{name} {number}" for name, number in place.items())
        raise UserError(f"{expected}; got {count[tuple(wrong[0])]:g} at {where} (from 0)")
    count_LE = count.reshape(-1, *count.shape[-2:]).sum(axis=0)
    if not count_LE.any():
        raise UserError(f"{path}: expected some count above 0, got none")
    return count_LE


def layer_loads(path: Path, layer: int, moe_layers: Sequence[int] = ()) -> list[float]:
    """Counts of one layer's experts. Raises ValueError: as ``read_counts``; or the layer has no counts."""
    counts = read_counts(path, moe_layers)
    if layer not in counts.loads:
        known = in_ranges(counts.loads)
        is_dense = layer < max(moe_layers, default=0) and layer not in moe_layers
        why = "is dense in this model" if is_dense else f"has no counts in {path}"
        raise UserError(f"expected one with counts ({known}), got {layer}, which {why}", "layer")
    return counts.loads[layer].tolist()
