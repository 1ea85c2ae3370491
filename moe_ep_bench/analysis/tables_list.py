"""Print which measured tables there are (``tables``): systems, frameworks, versions, dtypes, shapes and links."""

from __future__ import annotations

import pandas as pd

from moe_ep_bench.analysis.columns import text
from moe_ep_bench.analysis.render import Table, render, terminal_width
from moe_ep_bench.cost_model.table_devices import backends_of
from moe_ep_bench.cost_model.tables import (
    MOE,
    NCCL,
    PREFIX,
    SHAPE,
    Tables,
    all_tables,
    choose,
    package_words,
    read_moe,
    systems,
)
from moe_ep_bench.models import ModelSpec

# Of a presets' layer and of a shape that was measured.
_OF_PRESET = ("hidden_size", "ffn_hidden_size", "num_experts", "top_k")


def list_tables(system: str | None) -> str:
    """Systems with their frameworks and versions, or of one the shapes of experts and the links.

    Raises:
        UserError: the package is not installed, or the system is unknown; the line lists them.
    """
    if system is None:
        return _overview()
    system = choose("system", system.removeprefix(PREFIX), systems())
    parts = [render([_experts(system)], "text", width=terminal_width())]
    parts.append(render([_links(system)], "text", width=terminal_width()))
    return "\n\n".join(parts)


def presets_of(hidden_size: int, ffn_hidden_size: int, num_experts: int, top_k: int) -> list[str]:
    """Models of data/models/ whose layer has this shape exactly."""
    wanted = (hidden_size, ffn_hidden_size, num_experts, top_k)
    models = {name: ModelSpec.named(name) for name in ModelSpec.names()}
    return [name for name, model in models.items() if tuple(getattr(model, key) for key in _OF_PRESET) == wanted]


def _overview() -> str:
    rows = []
    for one in systems():
        tables = [*all_tables("moe", one), *all_tables("comm", one)]
        devices = [tables for tables in tables if tables.path("moe", MOE).is_file()]
        links = [tables for tables in tables if _names_of_links(tables)]
        rows.append(
            {
                "system": one,
                "devices": ", ".join(sorted({f"{tables.framework}/{tables.version}" for tables in devices})),
                "links": ", ".join(sorted({f"{tables.framework}/{tables.version}" for tables in links})),
            }
        )
    title = (
        f"{package_words()}: measured tables. A device is {PREFIX}SYSTEM/FRAMEWORK/VERSION; tables SYSTEM tells more"
    )
    columns = [text("system"), text("devices"), text("links")]
    return render([Table(pd.DataFrame(rows), columns, title)], "text", width=terminal_width())


def _experts(system: str) -> Table:
    """A row for each device, dtype and shape."""
    parts = []
    for tables in all_tables("moe", system):
        if tables.path("moe", MOE).is_file():
            rows = read_moe(tables)
            shapes = rows.groupby(["dtype", *SHAPE])["ep_size"].agg(lambda sizes: _ranges(sorted(set(sizes))))
            parts.append(shapes.reset_index().assign(device=tables.name))
    frame = pd.concat(parts, ignore_index=True)
    frame["shape"] = [f"{one.hidden_size} x {one.inter_size}" for one in frame.itertuples()]
    frame["models"] = [", ".join(presets_of(*shape)) for shape in frame[SHAPE].itertuples(index=False, name=None)]
    columns = [
        text("device"),
        text("dtype"),
        text("shape", "hidden x FFN"),
        text("num_experts", "experts"),
        text("topk", "top-k"),
        text("ep_size", "EP sizes"),
        text("models", "models held exactly"),
    ]
    return Table(frame, columns, f"Experts on {system}, measured by others ({package_words()}); balanced loads")


def _links(system: str) -> Table:
    rows = [
        {"links": name, "holds": "all-to-all, all-gather, all-reduce" if tables.framework == "nccl" else "DeepEP"}
        for tables in all_tables("comm", system)
        for name in _names_of_links(tables)
    ]
    return Table(
        pd.DataFrame(rows, columns=["links", "holds"]), [text("links"), text("holds")], f"Links of {system}, likewise"
    )


def _names_of_links(tables: Tables) -> list[str]:
    if tables.framework == "nccl":
        return [tables.name] if tables.path("comm", NCCL).is_file() else []
    return [f"{tables.name}/{backend}" for backend in backends_of(tables)]


def _ranges(sizes: list[int]) -> str:
    return ", ".join(map(str, sizes))
