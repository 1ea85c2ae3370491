"""What the report of a ``route`` directory says: loads and costs, and of no policy that it is faster."""

from __future__ import annotations

from pathlib import Path

from moe_ep_bench.analysis import render
from moe_ep_bench.analysis.report.captions import subtitle_of, title_of
from moe_ep_bench.analysis.report.parts import Answer, Cell, Column, Picture, Report, Section, Table, Warned
from moe_ep_bench.analysis.report.provenance import (
    config_files,
    environment_tables,
    fact_tables,
    read_provenance,
    reproduction,
)
from moe_ep_bench.analysis.report.said import drawn, left_out, subtitle
from moe_ep_bench.analysis.route_figures import ROUTE_FIGURES
from moe_ep_bench.analysis.route_load import RouteRun, load_route
from moe_ep_bench.analysis.route_report import route_tables
from moe_ep_bench.analysis.style import house_style
from moe_ep_bench.analysis.words import MODE_WORDS, percent


def route_report_of(directory: Path, passed_over: list[str]) -> Report:
    """Everything that the report of a ``route`` directory says.

    Args:
        passed_over: gets a line for each thing that cannot be trusted and is left out.

    Raises:
        ResultsError: one line that names the file and what is wrong with it.
    """
    run = load_route(directory, passed_over)
    facts = read_provenance(run.directory, 1)
    anchors = [f"comparison-{number}" for number in range(1, len(run.groups) + 1)]
    tables = [_table(table) for table in route_tables(run)]
    several = len(run.groups) > 1
    models = ", ".join(dict.fromkeys(group.facts.model for group in run.groups))
    return Report(
        title=f"Routing of {len(run.groups)} workloads of {models}" if several else f"Routing of {run.groups[0].title}",
        subtitle=subtitle(facts),
        answer=_answer(run),
        overview=_overview(run, anchors) if several else None,
        pictures=_pictures(run),
        sections=[
            Section(anchor, group.title, None, [table], [group.facts.workload.description])
            for group, anchor, table in zip(run.groups, anchors, tables, strict=True)
        ],
        facts=fact_tables(facts),
        environment=environment_tables(facts, None),
        configs=config_files(facts),
        warnings=[*left_out(passed_over), *_warnings(run)],
        steps=reproduction(facts),
    )


def _answer(run: RouteRun) -> Answer:
    """Which policy evens the ranks' loads most, in the first group, and at what cost; no word of speed."""
    group = run.groups[0]
    where = f"; in {group.title}" if len(run.groups) > 1 else ""
    native = group.cases.loc["native"]
    basis = (
        f"{MODE_WORDS['route'][0].upper()}{MODE_WORDS['route'][1:]}: {group.title}, {len(group.layers)} layers, "
        f"{group.facts.num_batches} batches, {group.facts.placement.name} placement"
        + (f", and {len(run.groups) - 1} more" if len(run.groups) > 1 else "")
    )
    policies = group.cases.drop(index="native")
    if policies.empty:
        return Answer(
            "Nothing was timed, so no speed is claimed",
            f"native's fullest rank has {native['rank_imbalance']:.2f} x the mean load{where}.",
            f"{basis}.",
        )
    flattest = policies.loc[policies["rank_imbalance"].idxmin()]
    why = (
        f"{flattest.name} evens the ranks most, from {native['rank_imbalance']:.2f} to "
        f"{flattest['rank_imbalance']:.2f} x the mean load, drops {percent(flattest['dropped_share'])} % of top-k "
        f"pairs and keeps {percent(flattest['retained_mass'])} % of their score mass{where}"
    )
    return Answer("Nothing was timed, so no speed is claimed", f"{why}.", f"{basis}.")


def _overview(run: RouteRun, anchors: list[str]) -> Table:
    columns = (
        Column("workload"),
        Column("layers", True),
        Column("fullest expert", True, "under native, over the mean"),
        Column("fullest rank", True, "likewise"),
        Column("policies", True),
    )
    rows = [
        (
            Cell(group.title, target=anchor),
            Cell(f"{len(group.layers)}", float(len(group.layers))),
            *(
                Cell(f"{value:.2f}", value)
                for value in group.cases.loc["native", ["expert_imbalance", "rank_imbalance"]]
            ),
            Cell(f"{len(group.cases) - 1}", float(len(group.cases) - 1)),
        )
        for group, anchor in zip(run.groups, anchors, strict=True)
    ]
    return Table("All workloads", columns, rows)


def _table(table: render.Table) -> Table:
    columns = [Column(column.header, not column.is_words) for column in table.columns]
    rows = [
        [
            Cell(text := column.cell(row), None if column.is_words else float(text) if text != render.NONE else None)
            for column in table.columns
        ]
        for row in table.rows
    ]
    return Table("Cases", columns, rows, "; ".join(table.notes))


def _pictures(run: RouteRun) -> list[Picture]:
    pictures = []
    with house_style():
        for name, draw in ROUTE_FIGURES.items():
            drawing = draw(run)
            if drawing is not None:
                figure = drawn(drawing)
                pictures.append(Picture(name, title_of(figure), subtitle_of(figure), figure))
    return pictures


def _warnings(run: RouteRun) -> list[Warned]:
    found: dict[str, list[str]] = {"Nothing was timed: loads are no times.": [group.title for group in run.groups]}
    for group in run.groups:
        tail = group.facts.workload.tail_model
        looking = list(group.cases.index[group.cases["looks_past_top_k"]])
        if tail and looking:
            line = f"Scores past the recorded top-k are modelled ({tail} tail): {', '.join(looking)} rest on them."
            found.setdefault(line, []).append(group.title)
        if group.facts.image_share is not None:
            line = f"Assumed: the first {group.facts.image_share:.0%} of every sequence's tokens are an image's."
            found.setdefault(line, []).append(group.title)
    return [
        Warned(text, "" if len(where) == len(run.groups) else "; ".join(dict.fromkeys(where)))
        for text, where in found.items()
    ]
