"""A figure of any column against any other, as a config's ``figures:`` or ``plot --x --y`` asks for it."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from moe_ep_bench.analysis.cases import CASE, routing
from moe_ep_bench.analysis.drawing import Figure, case_rows, layer_rows
from moe_ep_bench.analysis.marks import SPEEDUP, axis_of, series
from moe_ep_bench.analysis.store import Store
from moe_ep_bench.analysis.style import looks_of, ordered_looks
from moe_ep_bench.analysis.sweeps import value_words
from moe_ep_bench.errors import UserError, did_you_mean
from moe_ep_bench.policies import fields_by_policy

_PERCENTILE = re.compile(r"(?P<column>\w+)_p(?P<percent>\d\d?)$")
# Columns that are of the figures alone, or too long for an axis.
_HIDDEN = {
    *("facts", "policy_params", "point", "reason", "step", "at", "facet", "how"),
    *("ran_on", "links_words", "workload_words", "curve_load", "curve_kept"),
}


@dataclass(frozen=True)
class Lines:
    """What is drawn against what.

    Attributes:
        x, y: columns of cases, or of batches and layers, of which means are drawn; parameters of policies are columns.
        by: the column whose values are lines; None = the policy but for ``x``.
        facet: the column whose values are panels; None = comparisons, or models where ``x`` tells comparisons apart.
        where: a pandas query.
    """

    x: str
    y: str
    by: str | None = None
    facet: str | None = None
    where: str | None = None

    @property
    def name(self) -> str:
        """Of its files."""
        parts = [f"{self.y}-over-{self.x}", self.by and f"by-{self.by}", self.facet]
        return "-".join(part for part in parts if part)

    def figure(self) -> Figure:
        """A row as those of ``FIGURES``."""
        title = f"{axis_of(self.y).header} over {axis_of(self.x).header}"
        return Figure(
            title[:1].upper() + title[1:],
            [series(self.x, self.y, whiskers=SPEEDUP if self.y == "speedup_median" else None)],
            f"A line for each {(self.by or 'policy').replace('_', ' ')}, means where several rows stand at one place.",
            self.rows,
            columns=[name for name in (self.x, self.y, self.by, self.facet) if name],
            limit=6,
            looks=looks_of if self.by in (None, "policy", "label", "family") else ordered_looks,
        )

    def rows(self, store: Store) -> pd.DataFrame:
        """A row per panel, line and place; none where no policy that ran has a field asked for.

        Raises:
            UserError: a column is unknown, or the query cannot be read.
        """
        asked = {name: getattr(self, name) for name in ("x", "y", "by", "facet") if getattr(self, name)}
        rows, known = wide_rows(store, list(asked.values()))
        absent = [column for column in asked.values() if column not in known and column not in rows]
        if absent and all(any(column in names for names in fields_by_policy().values()) for column in absent):
            return rows.iloc[:0]  # no policy that has such a field ran
        for name, column in asked.items():
            if column in absent:
                raise UserError(
                    f"--{name}: expected a column, one of {', '.join(known)}; got {column!r}"
                    f"{did_you_mean(column, known)}"
                )
        if not pd.api.types.is_numeric_dtype(rows[self.y]):
            raise UserError(f"--y: expected a column of numbers; {self.y} has words")
        try:
            rows = rows.query(self.where, engine="python") if self.where else rows
        except Exception as error:
            reason = f"cannot be read as a condition on columns ({error})"
            raise UserError(f"--where: {reason}; got {self.where!r}") from None
        rows = rows[rows["role"].isin(["baseline", "policy", "replication"]) & rows[self.y].notna()]
        if rows[self.x].isna().all():
            return rows.iloc[:0]
        if self.facet is not None:
            words = rows[self.facet].map(value_words)
            rows = rows.assign(facet=words, heading=f"{self.facet.replace('_', ' ')} " + words)
        elif rows.groupby("facet")[self.x].nunique().max() == 1:
            rows = rows.assign(facet=rows["model"], heading=rows["model"])
        label = rows["label"].str.replace(rf" {re.escape(self.x)}=\S+", "", regex=True)
        line = label.where(rows["role"] != "baseline", "native")
        if self.by is not None:  # What has no value goes by its own name.
            line = rows[self.by].map(value_words).where(rows[self.by].notna(), line)
        rows = rows.assign(line=line, legend=line)
        place = ["facet", "line", self.x]
        means = rows.groupby(place, sort=False, dropna=False)[self.y].transform("mean")
        return rows.assign(**{self.y: means}).drop_duplicates(place)


def wide_rows(store: Store, columns: Sequence[str]) -> tuple[pd.DataFrame, list[str]]:
    """The frame that has some columns: cases, or where a column is of batches and layers alone, of these.

    Parameters of policies (``c``, ``k0``, ``budget``, ...) and swept keys by their last words are columns too. So is
    ``COLUMN_p95`` of a column of batches: a percentile over batches, of means over layers.

    Returns:
        The rows, and the names of all columns that can be asked for.
    """
    rows = layer_rows(store) if (case_rows(store)["scope"] == "layer").any() else case_rows(store)
    for column in ("policy_params", "point"):
        fields = pd.DataFrame(rows[column].map(lambda text: json.loads(text or "{}")).to_list(), rows.index)
        fields = fields.rename(columns=lambda name: name.rpartition(".")[2])
        more = [name for name in fields if name not in rows or rows[name].isna().all()]
        rows = rows.drop(columns=more, errors="ignore").join(fields[more])
    batches = routing(store)
    of_batches = [name for name in batches if name not in CASE and batches[name].map(np.isscalar).all()]
    for name in columns:
        found = _PERCENTILE.match(name)
        if name not in rows and found and found["column"] in of_batches:
            by_batch = batches.groupby([*CASE, "batch"])[found["column"]].mean()
            quantile = by_batch.groupby(CASE).quantile(int(found["percent"]) / 100).rename(name)
            rows = rows.merge(quantile, left_on=CASE, right_index=True, how="left")
    known = [name for name in rows if rows[name].notna().any()]
    if any(name in of_batches and name not in known for name in columns):
        rows = rows.drop(columns=[name for name in of_batches if name in rows])
        rows = rows.merge(batches[[*CASE, *of_batches]], on=CASE)
    return rows, sorted({*known, *of_batches} - _HIDDEN)
