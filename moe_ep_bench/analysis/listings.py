"""Print others' numbers that the package holds: measured tables (``tables``), published ones (``papers list``).

A listing is a frame under its own headers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

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
)  # fmt: skip
from moe_ep_bench.errors import UserError
from moe_ep_bench.models import ModelSpec, load_model
from moe_ep_bench.papers.published import BOUNDS, load, names


def _listed(title: str, rows: pd.DataFrame, notes: Iterable[str] = ()) -> Table:
    return Table(rows, [text(name) for name in rows], title, list(notes))


# ---- measured tables -------------------------------------------------------------------------------------------------


def list_tables(system: str | None = None, model: str | None = None) -> str:
    """Systems with their frameworks and versions, or of one the shapes of experts and the links.

    Args:
        model: a preset, a hub's id or a config.json; only what was measured of its layer's shape is listed.

    Raises:
        UserError: the package is not installed, the system or model is unknown, or the system has no row of the
            model's shape.
    """
    if system is None:
        rows = []
        for name in systems():
            devices = [tables for tables in all_tables("moe", name) if _has_experts(tables)]
            links = [tables for tables in all_tables("comm", name) if [*_names_of_links(tables)]]
            rows.append({"system": name, "devices": _versions(devices), "links": _versions(links)})
        how = f"A device is {PREFIX}SYSTEM/FRAMEWORK/VERSION; tables SYSTEM tells more"
        return _text([_listed(f"{package_words()}: measured tables. {how}", pd.DataFrame(rows))])
    system = choose("system", system.removeprefix(PREFIX), systems())
    spec = load_model(model) if model else None
    return _text([_experts(system, spec), _links(system, spec)])


def _text(tables: list[Table]) -> str:
    return render(tables, "text", width=terminal_width())


def _versions(tables: Iterable[Tables]) -> str:
    return ", ".join(sorted({f"{table.framework}/{table.version}" for table in tables}))


def _has_experts(tables: Tables) -> bool:
    return tables.path("moe", MOE).is_file()


def _experts(system: str, spec: ModelSpec | None) -> Table:
    """A row for each device, dtype and shape."""
    parts = []
    for tables in filter(_has_experts, all_tables("moe", system)):
        rows = read_moe(tables) if spec is None else of_shape(read_moe(tables), shape_of(spec))
        shapes = rows.groupby(["dtype", *SHAPE])["ep_size"].agg(_ranges)
        parts.append(shapes.reset_index().assign(device=tables.name))
    frame = pd.concat(parts, ignore_index=True)
    if spec is not None and frame.empty:
        hidden, ffn, experts, top_k = shape_of(spec)
        raise UserError(
            f"{spec.name}: {system} has no rows of {experts} experts of {hidden} x {ffn}, top-{top_k};"
            f" rows near it are scaled where it is asked for (tables {system} lists all)"
        )
    presets = {name: shape_of(ModelSpec.named(name)) for name in ModelSpec.names()}
    shapes = list(frame[SHAPE].itertuples(index=False, name=None))
    columns = {
        **{"device": frame["device"], "dtype": frame["dtype"]},
        "hidden x FFN": [f"{hidden} x {ffn}" for hidden, ffn, *_ in shapes],
        **{"experts": frame["num_experts"], "top-k": frame["topk"], "EP sizes": frame["ep_size"]},
        "models held exactly": [", ".join(name for name in presets if presets[name] == shape) for shape in shapes],
    }
    return _listed(
        f"Experts on {system}, measured by others ({package_words()}); balanced loads", pd.DataFrame(columns)
    )


def _links(system: str, spec: ModelSpec | None) -> Table:
    """A row for each name of links, with the numbers of ranks that were timed."""
    rows = []
    for tables in all_tables("comm", system):
        for name in _names_of_links(tables):
            if name == tables.name:
                holds, sizes = "all-to-all, all-gather, all-reduce; any shape", read_nccl(tables)["num_gpus"]
            else:
                points, holds = read_deepep(tables, name.rpartition("/")[2], DTYPE), "dispatch and combine"
                if spec is not None:
                    hidden, _, experts, top_k = shape_of(spec)
                    is_own = (points[["hidden_size", "num_experts", "topk"]] == [hidden, experts, top_k]).all(axis=1)
                    points = points[is_own]
                sizes = points["ep_size"]
            rows += [(name, holds, _ranges(sizes))] if len(sizes) else []
    title = f"Links of {system}, likewise" + (f", of {spec.name}'s shape" if spec else "")
    return _listed(title, pd.DataFrame(rows, columns=["links", "holds", "EP sizes"]))


def _names_of_links(tables: Tables) -> Iterator[str]:
    if tables.framework == "nccl":
        yield from [tables.name] if tables.path("comm", NCCL).is_file() else []
    else:
        yield from (f"{tables.name}/{backend}" for backend in backends_of(tables))


def _ranges(sizes: Iterable[int]) -> str:
    return ", ".join(map(str, sorted(set(sizes))))


# ---- papers' numbers -------------------------------------------------------------------------------------------------

_SIGNS = {bound: sign for sign, bound in BOUNDS.items()}


def list_papers(name: str | None) -> str:
    """A table for each item of a paper, or of all; numbers as printed, with the sign of a bound and standard errors."""
    tables = []
    for paper in map(load, [name] if name else names()):
        notes = [paper.version, *([paper.note] if paper.note else [])]
        tables.append(Table(pd.DataFrame(), (), f"arXiv {paper.paper}: {paper.title}", notes))
        for item in paper.items:
            rows = []
            for number in item.numbers(paper):
                where = [f"{value}" if key == "what" else f"{key} {value}" for key, value in number.where.items()]
                error = "" if number.stderr is None else f" ± {number.stderr:.2f}"
                shown = (
                    f"{_SIGNS.get(number.bound, '')}{number.printed}{error}{' (read off)' if number.read_off else ''}"
                )
                rows.append({"model": number.model, "where": ", ".join(where), "number": shown, "unit": number.unit})
            left_out = paper.why_uncompared(item.item, item.kind)
            notes = [item.note] if item.note else []
            if left_out is not None:
                notes.append(f"not compared: {left_out.why}{f' ({left_out.by})' if left_out.by else ''}")
            tables.append(_listed(f"{item.item}: {item.what} ({item.kind}, {item.metric})", pd.DataFrame(rows), notes))
    return render(tables, "text")
