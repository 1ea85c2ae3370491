"""Numbers that the papers print, as data: a YAML file for each paper in ``published/``.

A file holds items: a table, a figure or a section, with what it measured. An item is written like the table it is:
``rows`` names what its first cells say, ``columns`` what its other cells are. All stays as printed: ``1.30`` has two
decimals, ``>5`` is above 5, ``~1.4`` about 1.4, ``80.0±0.59`` has a standard error, ``-`` is a cell without a number.

Some say more: ``orderings``, what a paper says of two policies' answers.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import Field, field_validator, model_validator

from moe_ep_bench.errors import UserError
from moe_ep_bench.presets import Strict, validated

FOLDER = Path(__file__).with_name("published")
NONE = "-"

# not_stated: a layer's or a whole model's, which the paper does not say; setting: what was chosen, not measured.
Kind = Literal["layer", "end_to_end", "not_stated", "accuracy", "count", "load", "setting"]
BOUNDS = {"<": "below", ">": "above", "~": "about"}
_CELL = re.compile(r"(?P<bound>[<>~]?)(?P<value>[+-]?\d+(\.\d+)?(e-?\d+)?)(±(?P<stderr>\d+(\.\d+)?))?")
_NUMBER = re.compile(r"-?\d+(\.\d+)?")


@dataclasses.dataclass(frozen=True)
class Number:
    """One printed number.

    Attributes:
        paper: arXiv id.
        printed: the number as it stands in the paper; its digits say how it was rounded.
        stderr: standard error, in the same unit.
        bound: ``below``, ``above`` or ``about``, where the paper prints no more than that.
        where: setting, by name.
        read_off: whether it was read off a bar without a label.
    """

    paper: str
    item: str
    kind: Kind
    metric: str
    value: float
    unit: str
    model: str | None
    where: dict[str, str | float | None]
    printed: str
    stderr: float | None = None
    bound: str | None = None
    hardware: str | None = None
    read_off: bool = False
    note: str | None = None


class Item(Strict):
    """A table, a figure or what a section says, of one metric.

    Attributes:
        item: as the paper calls it.
        where: the setting of all its numbers.
        rows, columns: what tells its numbers apart; of ``columns``, each name has a value for each column. The name
            ``model`` says which model it is.
        cells: by line, the values of ``rows`` and then the numbers of the columns, or one number.
        note: what the numbers contradict, and what the paper leaves open.
    """

    item: str = Field(min_length=1)
    what: str = Field(min_length=1)
    kind: Kind
    metric: str = Field(min_length=1)
    unit: str
    model: str | None = None
    hardware: str | None = None
    where: dict[str, str] = Field(default={})
    rows: tuple[str, ...] = ()
    columns: dict[str, tuple[str, ...]] = Field(default={})
    cells: tuple[tuple[str, ...], ...] = Field(min_length=1)
    read_off: bool = False
    note: str | None = None

    @model_validator(mode="after")
    def _check(self) -> Item:
        lengths = {len(values) for values in self.columns.values()} or {1}
        if len(lengths) > 1:
            raise UserError(f"{self.item}: columns: expected one length, got {sorted(lengths)}")
        expected = len(self.rows) + lengths.pop()
        for line in self.cells:
            if len(line) != expected:
                raise UserError(f"{self.item}: cells: expected {expected} in each line, got {len(line)}: {line}")
            for cell in line[len(self.rows) :]:
                if cell != NONE and not _CELL.fullmatch(cell):
                    raise UserError(f"{self.item}: cells: expected a number as printed, got {cell!r}")
        return self

    def numbers(self, paper: Paper) -> Iterator[Number]:
        """Every number, in the order of the file."""
        own = {name: getattr(self, name) for name in ("item", "kind", "metric", "unit", "read_off", "note")}
        for where, cell in self._settings():
            found = _CELL.fullmatch(cell)
            assert found is not None
            yield Number(
                **own,
                paper=paper.paper,
                value=float(found["value"]),
                model=where.pop("model", self.model),
                where={name: typed(value) for name, value in where.items()},
                printed=found["value"],
                stderr=None if found["stderr"] is None else float(found["stderr"]),
                bound=BOUNDS.get(found["bound"]),
                hardware=self.hardware or paper.hardware,
            )

    def _settings(self) -> Iterator[tuple[dict[str, str], str]]:
        """The setting and the cell of every number."""
        columns = [dict(zip(self.columns, values, strict=True)) for values in zip(*self.columns.values(), strict=True)]
        for line in self.cells:
            row = dict(zip(self.rows, line, strict=False))
            for column, cell in zip(columns or [{}], line[len(self.rows) :], strict=True):
                where = {name: value for name, value in (self.where | row | column).items() if value != NONE}
                if cell != NONE:
                    yield where, cell


class Primary(Strict):
    """The traffic that ours is compared under first, chosen before it was known what comes of it.

    Attributes:
        items: of the paper; none = all.
        model: None = any.
        at: values by dotted key of a config.
    """

    items: tuple[str, ...] = ()
    model: str | None = None
    at: dict[str, str] = Field(min_length=1)
    why: str = Field(min_length=1)


class Uncompared(Strict):
    """Items that no claim of configs/papers/ is about.

    Attributes:
        kinds: of those items; none = all.
        by: a config that speaks of the same thing without a claim.
        why: why no layer or pass here can be set beside the numbers.
    """

    items: tuple[str, ...] = Field(min_length=1)
    kinds: tuple[Kind, ...] = ()
    by: str | None = None
    why: str = Field(min_length=1)


class Ordering(Strict):
    """Who comes before whom: policies of one kind keep at least as much of the answers as those of another.

    That may carry over to another model where numbers do not: ``quality`` holds it against every pair of its cases.

    Attributes:
        where: in the paper, or what is ours of it.
        better, worse: policy and fields of either kind; ``set``: whatever it is but null. Fields that both policies
            have and that neither names must be equal, and so must the stage.
    """

    says: str
    where: str = ""
    better: dict[str, Any]
    worse: dict[str, Any]

    @field_validator("better", "worse")
    @classmethod
    def _typed(cls, fields: dict[str, str]) -> dict[str, Any]:
        return {key: typed(value) for key, value in fields.items()}


class Paper(Strict):
    """A paper's numbers.

    Attributes:
        version: which text they were read in.
        hardware: of items that name none.
        note: what the items do not hold, and why.
        primary: the first that fits an item and a model, and that the config has, counts.
        uncompared: all that was measured, and that no claim is about.
    """

    paper: str = Field(pattern=r"^\d{4}\.\d{5}$")
    title: str = Field(min_length=1)
    version: str = Field(min_length=1)
    hardware: str | None = None
    note: str | None = None
    primary: tuple[Primary, ...] = ()
    uncompared: tuple[Uncompared, ...] = ()
    orderings: tuple[Ordering, ...] = ()
    items: tuple[Item, ...] = Field(min_length=1)

    def why_uncompared(self, item: str, kind: str) -> Uncompared | None:
        """What says why an item's numbers of a kind are not compared; None where nothing does."""
        fitting = (one for one in self.uncompared if item in one.items and kind in (one.kinds or (kind,)))
        return next(fitting, None)


def names() -> list[str]:
    """The papers there are, by the names of their files."""
    return sorted(file.stem for file in FOLDER.glob("*.yaml"))


@functools.cache
def load(name: str) -> Paper:
    """Read a paper's numbers.

    Args:
        name: of its file, or its arXiv id.

    Raises:
        ValueError: one line: there is no such paper, and which there are; or what is wrong with its file.
    """
    fields = {stem: _read(FOLDER / f"{stem}.yaml") for stem in ([name] if name in names() else names())}
    for stem, read in fields.items():
        if name in (stem, read["paper"]):
            return validated(Paper, read, FOLDER / f"{stem}.yaml", strict=False)
    there = ", ".join(f"{stem} ({read['paper']})" for stem, read in fields.items())
    raise UserError(f"--paper: expected one of {there}; got {name!r}")


def numbers(name: str | None = None, **wanted: Any) -> list[Number]:
    """Numbers of a paper, or of all.

    Args:
        wanted: only those with these values: attributes of ``Number``, or settings by name.
    """
    found = [
        number
        for paper in map(load, [name] if name else names())
        for item in paper.items
        for number in item.numbers(paper)
    ]
    return [number for number in found if all(_value(number, key) == value for key, value in wanted.items())]


def orderings() -> list[tuple[str, Ordering]]:
    """All papers' orderings, each behind its source."""
    return [
        (", ".join(filter(None, (f"arXiv {paper.paper}", ordering.where))), ordering)
        for paper in map(load, names())
        for ordering in paper.orderings
    ]


def _value(number: Number, key: str) -> Any:
    return getattr(number, key) if hasattr(number, key) else number.where.get(key)


def typed(value: str) -> str | float | None:
    """A value as text has it: a number, null, or words."""
    if not _NUMBER.fullmatch(value):
        return None if value == "null" else value
    return float(value) if "." in value else int(value)


def _read(file: Path) -> dict[str, Any]:
    """A file's keys and values, all text: YAML's own reading would take 1.30 for 1.3."""
    return yaml.load(file.read_text(), getattr(yaml, "CBaseLoader", yaml.BaseLoader))


def list_json(name: str | None) -> str:
    """The numbers of a paper, or of all, as a list of objects with the fields of ``Number``, one on each line."""
    lines = (json.dumps(dataclasses.asdict(number), ensure_ascii=False) for number in numbers(name))
    return "[\n" + ",\n".join(lines) + "\n]"
