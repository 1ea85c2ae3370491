"""The papers' numbers as people and programs read them: ``moe-ep-bench papers list``."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from moe_ep_bench.papers.published import BOUNDS, load, names, numbers

_SIGNS = {bound: sign for sign, bound in BOUNDS.items()}


def list_json(name: str | None) -> str:
    """The numbers of a paper, or of all, as a list of objects with the fields of ``Number``, one on each line."""
    lines = (json.dumps(dataclasses.asdict(number), ensure_ascii=False) for number in numbers(name))
    return "[\n" + ",\n".join(lines) + "\n]"


def list_text(name: str | None) -> str:
    """A table for each item of a paper, or of all."""
    import pandas as pd

    from moe_ep_bench.analysis.columns import Column, text
    from moe_ep_bench.analysis.render import Table, render

    columns = (text("model"), text("where"), Column("printed", "number", cell=_shown), text("unit"))
    tables = []
    for paper in map(load, [name] if name else names()):
        notes = [paper.version, *([paper.note] if paper.note else [])]
        tables.append(Table(pd.DataFrame(), (), f"arXiv {paper.paper}: {paper.title}", notes))
        for item in paper.items:
            rows = pd.DataFrame(map(dataclasses.asdict, item.numbers(paper)))
            rows["where"] = list(map(_setting, rows["where"]))
            title = f"{item.item}: {item.what} ({item.kind}, {item.metric})"
            left_out = paper.why_uncompared(item.item, item.kind)
            notes = [item.note] if item.note else []
            if left_out is not None:
                notes.append(f"not compared: {left_out.why}{f' ({left_out.by})' if left_out.by else ''}")
            tables.append(Table(rows, columns, title, notes))
    return render(tables, "text")


def _setting(where: dict[str, str | float]) -> str:
    return ", ".join(f"{value}" if key == "what" else f"{key} {value}" for key, value in where.items())


def _shown(row: dict[str, Any]) -> str:
    """A number as printed, with the sign of its bound and its standard error."""
    stderr = f" ± {row['stderr']:.2f}" if row["stderr"] is not None and row["stderr"] == row["stderr"] else ""
    return f"{_SIGNS.get(row['bound'], '')}{row['printed']}{stderr}{' (read off)' if row['read_off'] else ''}"
