"""Accuracies that papers print, as data: configs/papers/accuracy/, a file for each table.

A table holds numbers in percent as they are printed, with what the paper says of how they were obtained: the task's
name in the lm-evaluation-harness, its shots and its metric. A number is only set beside another of the same task, shots
and metric; what a paper does not state is null.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from pydantic import Field, model_validator

from moe_ep_bench.errors import UserError
from moe_ep_bench.policies import Policy, make_policy
from moe_ep_bench.presets import Strict, read_yaml, validated

_Percent = Annotated[float, Field(ge=0, le=100)]


class Column(Strict):
    """One task of a table."""

    name: str = Field(min_length=1)
    """As the paper calls it."""
    task: str | None = None
    """As the harness calls it; null = no task of the harness, or not stated which."""
    num_fewshot: int | None = Field(None, ge=0)
    metric: str | None = None


class Row(Strict):
    """One policy on one model, in percent."""

    policy: dict[str, Any] | None
    """As configs have it, with one value for each field; null = the unpatched model."""
    accuracy: tuple[_Percent | None, ...]
    """By column."""
    average: _Percent | None = None
    """As printed."""

    @model_validator(mode="after")
    def _check(self) -> Row:
        self.make_policy()
        return self

    def make_policy(self) -> Policy | None:
        return None if self.policy is None else make_policy(self.policy)


class Table(Strict):
    """A published table.

    Attributes:
        source: publication and table.
        note: what the paper does not say, and what was inferred.
        models: rows by model, as the paper calls it.
    """

    source: str = Field(min_length=1)
    note: str = Field(min_length=1)
    columns: tuple[Column, ...] = Field(min_length=1)
    models: dict[str, tuple[Row, ...]] = Field(min_length=1)

    @model_validator(mode="after")
    def _check(self) -> Table:
        for model, rows in self.models.items():
            for row in rows:
                if len(row.accuracy) != len(self.columns):
                    raise UserError(
                        f"models.{model}: expected {len(self.columns)} values, one for each column, "
                        f"got {len(row.accuracy)}"
                    )
        return self

    def cells(self, model: str) -> Iterator[Cell]:
        """Every number of a model."""
        for row in self.models[model]:
            for column, percent in zip(self.columns, row.accuracy, strict=True):
                if percent is not None:
                    yield Cell(row.make_policy(), column, percent)


class Cell(NamedTuple):
    """One printed number."""

    policy: Policy | None
    column: Column
    percent: float


def load_table(file: Path) -> Table:
    """Read a published table.

    Raises:
        ValueError: one line naming the file, the key and what is allowed.
    """
    return validated(Table, read_yaml(file, "cannot read the table"), file)
