"""Print which measured tables there are (``tables``): systems, frameworks, versions, dtypes, shapes and links."""

from __future__ import annotations

import pandas as pd

from moe_ep_bench.analysis.columns import text
from moe_ep_bench.analysis.render import Table, render, terminal_width
from moe_ep_bench.cost_model.table_devices import DTYPE, backends_of, read_deepep, read_nccl, shape_of
from moe_ep_bench.cost_model.tables import (
    MOE,
    NCCL,
    PREFIX,
    SHAPE,
    Tables,
    all_tables,
    choose,
    of_shape,
    package_words,
    read_moe,
    systems,
)
from moe_ep_bench.errors import UserError
from moe_ep_bench.models import ModelSpec, load_model


def list_tables(system: str | None = None, model: str | None = None) -> str:
    """Systems with their frameworks and versions, or of one the shapes of experts and the links.

    Args:
        model: a preset, a hub's id or a config.json; only what was measured of its layer's shape is listed.

    Raises:
        UserError: the package is not installed, the system or model is unknown, or the system has no row of the
            model's shape.
    """
    if system is None:
        return _overview()
    system = choose("system", system.removeprefix(PREFIX), systems())
    spec = load_model(model) if model else None
    parts = [_experts(system, spec), _links(system, spec)]
    return "\n\n".join(render([table], "text", width=terminal_width()) for table in parts)


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


def _experts(system: str, model: ModelSpec | None) -> Table:
    """A row for each device, dtype and shape."""
    parts = []
    for tables in all_tables("moe", system):
        if tables.path("moe", MOE).is_file():
            rows = read_moe(tables)
            rows = rows if model is None else of_shape(rows, shape_of(model))
            shapes = rows.groupby(["dtype", *SHAPE])["ep_size"].agg(lambda sizes: _ranges(sorted(set(sizes))))
            parts.append(shapes.reset_index().assign(device=tables.name))
    frame = pd.concat(parts, ignore_index=True)
    frame["shape"] = [f"{one.hidden_size} x {one.inter_size}" for one in frame.itertuples()]
    if model and not len(frame):
        hidden, ffn, experts, top_k = shape_of(model)
        raise UserError(
            f"{model.name}: {system} has no rows of {experts} experts of {hidden} x {ffn}, top-{top_k};"
            f" rows near it are scaled where it is asked for (tables {system} lists all)"
        )
    presets = {name: shape_of(ModelSpec.named(name)) for name in ModelSpec.names()}
    held = {shape: ", ".join(name for name in presets if presets[name] == shape) for shape in presets.values()}
    frame["models"] = [held.get(shape, "") for shape in frame[SHAPE].itertuples(index=False, name=None)]
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


def _links(system: str, model: ModelSpec | None) -> Table:
    """A row for each name of links, with the numbers of ranks that were timed."""
    rows = []
    for tables in all_tables("comm", system):
        for name in _names_of_links(tables):
            if name == tables.name:
                rows.append((name, "all-to-all, all-gather, all-reduce; any shape", read_nccl(tables)["num_gpus"]))
                continue
            points = read_deepep(tables, name.rpartition("/")[2], DTYPE)
            if model is not None:
                hidden, _, experts, top_k = shape_of(model)
                wanted = [hidden, experts, top_k]
                points = points[(points[["hidden_size", "num_experts", "topk"]] == wanted).all(axis=1)]
            if len(points):
                rows.append((name, "dispatch and combine", points["ep_size"]))
    frame = pd.DataFrame(
        [(links, holds, _ranges(sorted(set(sizes)))) for links, holds, sizes in rows],
        columns=["links", "holds", "ep_size"],
    )
    title = f"Links of {system}, likewise" + (f", of {model.name}'s shape" if model else "")
    return Table(frame, [text("links"), text("holds"), text("ep_size", "EP sizes")], title)


def _names_of_links(tables: Tables) -> list[str]:
    if tables.framework == "nccl":
        return [tables.name] if tables.path("comm", NCCL).is_file() else []
    return [f"{tables.name}/{backend}" for backend in backends_of(tables)]


def _ranges(sizes: list[int]) -> str:
    return ", ".join(map(str, sizes))
