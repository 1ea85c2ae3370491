"""Write a results directory as one HTML page: its tables, its figures, what weakens them, and where they come from.

The tables are those that ``show`` prints, with a few that only a page has room for. Figures are images with their bytes
in the page, not SVG among the HTML: matplotlib gives the parts of every figure the same ids, and an image runs no
script, whatever a label holds. They are SVG unless that takes more than ``MAX_SVG_BYTES``, as with many thousand marks:
then PNG. A policy in the page forbids it to load anything. Equal input gives equal bytes.
"""

from __future__ import annotations

import base64
import hashlib
import io
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import pandas as pd
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from matplotlib.figure import Figure

from moe_ep_bench.analysis.advise import advice_lines
from moe_ep_bench.analysis.draws import over_draws
from moe_ep_bench.analysis.load import Case, ResultsError, Run, is_quality, is_route, is_whole, load_run
from moe_ep_bench.analysis.plot import drawings, figures_of, lines_of, stores
from moe_ep_bench.analysis.render import Table, interval, milliseconds, number, percentage, render, text
from moe_ep_bench.analysis.report.provenance import (
    Provenance,
    commands,
    config_files,
    provenance_tables,
    read_provenance,
)
from moe_ep_bench.analysis.route.load import RouteRun, load_route
from moe_ep_bench.analysis.route.tables import route_tables
from moe_ep_bench.analysis.speedups import ComparisonResult, analyse
from moe_ep_bench.analysis.style import FORMATS, house_style, settle
from moe_ep_bench.analysis.tables import more_tables, run_tables
from moe_ep_bench.analysis.timing import GROUPS
from moe_ep_bench.analysis.validate import Validation, load_validation, validation_tables, verdict_line
from moe_ep_bench.analysis.whole import PASS_PARTS, analyse_whole
from moe_ep_bench.analysis.words import MODE_WORDS, count_words, device_words, hardware_words, mode_words
from moe_ep_bench.files import atomic_path, check_folder, refuse_links_out
from moe_ep_bench.results import ValidationDirectory
from moe_ep_bench.schema import TOTAL

MAX_SVG_BYTES = 400_000
# Of more ranks those that are slowest under native are shown.
MAX_RANKS = 64
# Of more tables the others are closed at first.
MAX_OPEN = 6
# CSS pixels per inch: the size at which a sheet's text has the size that it says.
_PIXELS = 96
# Below this share of that size labels are too small to read: the sheet's box scrolls then.
_LEAST_SCALE = 0.72
_WARNING = "warning: "
_ITERATION = ["launch", "batch", "iteration"]

_OVERVIEW = (
    text("title", "comparison"),
    number("native_ms", "native ms", milliseconds),
    text("label", "fastest policy"),
    interval("speedup", "speedup"),
    text("verdict"),
    percentage("dropped_share", "dropped %"),
    percentage("retained_mass", "mass kept %"),
    number("balanced", "native, if balanced"),
    number("most_by_amdahl", "at most, by Amdahl"),
    number("unmeasured", "not measured", "{:.0f}"),
)
_OVERVIEW_TITLE = "All comparisons; the fastest of many policies is in part the luckiest"
_PHASES = (
    text("label", "policy"),
    number("fullest_expert", "fullest expert", "{:.2f}"),
    number("fullest_rank", "fullest rank", "{:.2f}"),
    number("breakdown_layer_ms", "layer ms", milliseconds),
    *(number(f"{group}_ms", f"{group} ms", milliseconds) for group in GROUPS),
    *(number(f"mean_rank_{part}_ms", f"{part} ms", milliseconds) for part in PASS_PARTS),
    percentage("breakdown_unaccounted_share", "unaccounted %"),
    percentage("breakdown_policy_share", "choosing %"),
    percentage("probe_overhead", "probes %"),
)
_PHASE_NOTES = (
    "fullest expert, fullest rank: pairs over native's mean",
    "times: mean over ranks, so that waiting shows; median over iterations with probes; phases exclude each other",
    "unaccounted, choosing: shares of the slowest rank's time; probes: what they add to the median",
)
_RANKS = (
    text("label", "policy"),
    number("rank", form="{:.0f}"),
    text("host"),
    number("median_ms", "p50 ms", milliseconds),
    number("slowest_share", "slowest in %", lambda share: f"{100 * share:.0f}"),
    number("waiting_ms", "waiting ms", "{:.3g}"),
    number("load", form="{:.2f}"),
    number("memory_gib", "memory GiB", "{:.2f}"),
    number("matmul_tflops", "matmul TFLOP/s", "{:.3g}"),
)
_RANK_NOTES = (
    "p50, slowest in: a rank's own time, and how often it is the slowest, in iterations without probes",
    "waiting: for slower ranks, in iterations with probes; load: pairs over the mean rank's by the model's own routing",
)


@dataclass(frozen=True, eq=False)
class Content:
    """What a directory holds, as far as a page shows it.

    Attributes:
        line: how, on what the numbers came about.
        lost: what was not measured, a line each.
        run: whose ranks' machines are known; None without times.
    """

    title: str
    line: str
    tables: Sequence[Table]
    drawings: dict[str, Figure]
    source: Provenance
    lost: Sequence[str] = ()
    run: Run | None = None


def write_report(directory: Path, out: Path | None = None) -> tuple[Path, list[str]]:
    """Write the page of what ``run``, ``emulate``, ``route`` or ``validate`` left; it appears whole or not at all.

    Args:
        out: the file; None = ``report.html`` in the directory.

    Returns:
        The file, and a line for each thing that could not be trusted and was left out.
    """
    if out is not None:
        check_folder(out.parent, "--out: folder")
    if out is None:
        refuse_links_out(directory)
        out = directory / "report.html"
    if out.is_dir():
        raise ResultsError(f"--out {out}: expected a file to write, got a directory")
    if is_quality(directory):
        raise ResultsError(
            f"{directory}: holds what policies do to a model's answers, of which there is no page; "
            "`moe-ep-bench show` and `plot` show it"
        )
    passed_over: list[str] = []
    with house_style():
        page = page_of(content_of(directory, passed_over), passed_over)
    with atomic_path(out) as temporary:
        temporary.write_text(page, encoding="utf-8")
    return out, passed_over


def page_of(content: Content, passed_over: Sequence[str] = ()) -> str:
    """The whole page as text."""
    # Every value is escaped, those of tables by ``render``; the script holds none.
    loader = PackageLoader("moe_ep_bench", "analysis/report")
    blocks = {"trim_blocks": True, "lstrip_blocks": True, "keep_trailing_newline": True}
    environment = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, **blocks)
    script = files("moe_ep_bench.analysis.report").joinpath("report.js").read_text(encoding="utf-8")
    warnings = [f"left out: {line}" for line in passed_over] + [f"not measured: {line}" for line in content.lost]
    return environment.get_template("report.html").render(
        content=content,
        warnings=warnings + _warnings(content.tables),
        images=[_image(name, figure) for name, figure in content.drawings.items()],
        tables=_html(content.tables),
        max_open=MAX_OPEN,
        facts=_html(provenance_tables(content.source, content.run)),
        configs=config_files(content.source),
        commands="\n".join(commands(content.source)),
        script=Markup(script),
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
    )


def _html(tables: Iterable[Table]) -> list[tuple[str, Markup]]:
    """Titles and tables without them; without warnings too, which are listed once for all tables."""
    found = []
    for table in tables:
        notes = [note for note in table.notes if not note.startswith(_WARNING)]
        found.append((table.title, Markup(render([replace(table, title="", notes=notes)], "html"))))
    return found


def _warnings(tables: Sequence[Table]) -> list[str]:
    """Each warning once, with the comparisons that it is of where it is not of all."""
    names = {table.title.partition(": ")[0] for table in tables if table.notes}
    found: dict[str, dict[str, None]] = {}
    for table in tables:
        for note in table.notes:
            if note.startswith(_WARNING):
                found.setdefault(note.removeprefix(_WARNING), {})[table.title.partition(": ")[0]] = None
    return [line if len(of) == len(names) else f"{line} ({'; '.join(of)})" for line, of in found.items()]


def _image(name: str, figure: Figure) -> dict[str, Any]:
    """A figure as the template wants it: its title, its own line on how to read it, and its bytes."""
    settle(figure)  # the layout's last bits differ from run to run until it is fixed
    kind, content = "svg+xml", _encoded(figure, "svg")
    if len(content) > MAX_SVG_BYTES:
        kind, content = "png", _encoded(figure, "png")
    title, caption = (" ".join(part.get_text().split()) for part in figure.texts[:2])
    width, height = (round(inches * _PIXELS) for inches in figure.get_size_inches())
    uri = f"data:image/{kind};base64,{base64.b64encode(content).decode()}"
    size = {"width": width, "height": height, "least_width": round(_LEAST_SCALE * width)}
    return {"name": name, "title": title, "caption": caption, "uri": uri, **size}


def _encoded(figure: Figure, file_format: str) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format=file_format, metadata=FORMATS[file_format])
    return buffer.getvalue()


# ---- what a directory holds ----------------------------------------------------------------------------------------


@house_style()
def content_of(directory: Path, passed_over: list[str]) -> Content:
    """Read a directory, whatever it holds; ``passed_over`` gets a line for each thing that is left out."""
    if ValidationDirectory(directory).pairs.is_file():
        return _of_validation(load_validation(directory), directory)
    if is_route(directory):
        return _of_route(load_route(directory, passed_over))
    return _of_run(over_draws(load_run(directory, passed_over, whole=is_whole(directory)))[0])


def _of_run(run: Run) -> Content:
    is_model = run.scope == "model"
    comparisons = [one.comparison for one in analyse_whole(run)] if is_model else analyse(run)
    facts = [one.comparison for one in comparisons]
    # What a model of a device or of links is made of stands behind a colon, and in the tables' titles.
    links = ["" if one.links is None else f", links {one.links.partition(': ')[0]}" for one in facts]
    what = [
        f"{mode_words(run, one)}: {device_words(run, one).partition(': ')[0]}{by}"
        for one, by in zip(facts, links, strict=True)
    ]
    weights = "; weights are random" if any(one.random_weights for one in facts) else ""
    return Content(
        title=_title(pd.Series([one.title for one in facts]), [one.model for one in facts]),
        line=" ".join([*advice_lines(run.directory), f"{_listed(what)}; {count_words(run)}{weights}."]),
        tables=_run_tables(run, comparisons),
        drawings=_drawn(run.directory),
        source=read_provenance(run.directory, max(one.world_size for one in facts)),
        lost=[
            f"{case.label}, {case.status}: {case.reason or 'no reason was recorded'} "
            f"({run.comparisons[case.comparison_id].title})"
            for case in run.cases
            if not case.is_ok
        ],
        run=run,
    )


def _of_route(run: RouteRun) -> Content:
    return Content(
        title=f"Routing: {_title(run.cases['comparison'], run.cases['model'])}",
        line=f"{MODE_WORDS['route'].capitalize()}: loads are no times, and no speed is claimed.",
        tables=route_tables(run),
        drawings=_drawn(run.directory),
        source=read_provenance(run.directory, 1),
    )


def _of_validation(validation: Validation, directory: Path) -> Content:
    root = ValidationDirectory(directory).real
    real = load_run(root, whole=is_whole(root))
    facts = list(real.comparisons.values())
    source = read_provenance(real.directory, max(one.world_size for one in facts))
    return Content(
        title=f"Emulated against measured: {_title([one.title for one in facts], [one.model for one in facts])}",
        line=f"Emulated on one device, and measured: {_listed([hardware_words(real, one) for one in facts])}. "
        f"{verdict_line(validation)}.",
        tables=validation_tables(validation),
        drawings={},
        source=replace(source, name=directory.resolve().name, mode="validate"),
        run=real,
    )


def _title(titles: Iterable[str], models: Iterable[str]) -> str:
    """The one comparison; of several how many there are."""
    different = list(dict.fromkeys(titles))
    return (
        different[0] if len(different) == 1 else f"{len(different)} comparisons of {', '.join(dict.fromkeys(models))}"
    )


def _listed(lines: Sequence[str]) -> str:
    """What differs, the first in full."""
    different = list(dict.fromkeys(lines))
    words = f"{different[0][:1].upper()}{different[0][1:]}"
    return words if len(different) == 1 else f"{words}, and {len(different) - 1} more"


def _drawn(directory: Path) -> dict[str, Figure]:
    (store,) = stores([directory], [])
    drawn = drawings(store, figures_of(store, lines_of([directory])))
    return {name: drawing.figure for name, drawing in drawn.items() if drawing is not None}


# ---- tables that only a page has -------------------------------------------------------------------------------------


def _run_tables(run: Run, comparisons: Sequence[ComparisonResult]) -> list[Table]:
    """An overview where there are several comparisons, the tables of ``show``, then phases and ranks."""
    main = run_tables(run)
    found = [_overview(pd.concat([table.frame for table in main]))] if len(main) > 1 else []
    found += [*main, *more_tables(run)]
    for table, one in zip(main, comparisons, strict=True):
        found += [extra for extra in (_phases(table.frame), _ranks(one, table.frame)) if len(extra.columns) > 1]
    return found


def _fastest(frame: pd.DataFrame) -> pd.DataFrame:
    """Of each comparison the policy with the largest speedup; ``topk`` has native's routing."""
    policies = frame[(frame["role"] == "policy") & (frame["policy"] != "topk") & frame["speedup_median"].notna()]
    policies = policies.astype({"speedup_median": float})
    return policies.loc[policies.groupby("comparison_id")["speedup_median"].idxmax()]


def _overview(frame: pd.DataFrame) -> Table:
    """A row per comparison: its fastest policy, or native alone."""
    by_id = {role: frame[frame["role"] == role].set_index("comparison_id") for role in ("baseline", "ceiling")}
    unmeasured = (frame["status"] != "ok").groupby(frame["comparison_id"], sort=False).sum()
    rows = _fastest(frame.reset_index(drop=True)).set_index("comparison_id").reindex(unmeasured.index)
    rows = rows.assign(
        title=frame.groupby("comparison_id")["title"].first(),
        native_ms=by_id["baseline"]["median_ms"],
        balanced=by_id["ceiling"]["speedup_median"],
        unmeasured=unmeasured[unmeasured > 0],
    ).dropna(axis=1, how="all")
    return Table(rows, [column for column in _OVERVIEW if column.source in rows], _OVERVIEW_TITLE)


def _phases(frame: pd.DataFrame) -> Table:
    """Loads of a comparison's cases, and where their time goes; no columns where nothing was broken down."""
    rows = frame[frame["status"] == "ok"]
    says = rows.columns[(rows.notna() & (rows != 0)).any()]
    columns = [column for column in _PHASES if column.source in says]
    return Table(rows, columns, f"{frame['title'].iloc[0]}: loads and phases", _PHASE_NOTES)


def _ranks(one: ComparisonResult, frame: pd.DataFrame) -> Table:
    """What each rank had to do and how long it took, under native and the fastest policy; no columns without native."""
    labels = ["native", *_fastest(frame)["label"]]
    shown = [each for each in one.results if each.case.label in labels and each.case.is_ok]
    native = one.of_role("baseline")
    if native is None:
        return Table(pd.DataFrame(), ())
    facts = one.comparison
    # One device in place of all ranks has one set of conditions.
    known = pd.DataFrame([dict(rank) for rank in one.conditions[0].ranks] if one.conditions else [])
    parts = []
    for each in shown:
        times = _rank_times(each.case).assign(label=each.case.label)
        at = times["rank"] if len(known) == facts.world_size else 0 * times["rank"]
        if len(known):
            of = known.iloc[at].reset_index(drop=True)
            times = times.assign(
                host=of["hostname"],
                memory_gib=of["peak_memory_bytes"].astype(float) / 2**30,
                matmul_tflops=[ceilings.matmul_tflops for ceilings in of["ceilings"]],
            )
        if each.fidelity is not None:
            times["load"] = [float(each.fidelity.rank_load[facts.expert_rank(rank)]) for rank in times["rank"]]
        parts.append(times)
    rows = pd.concat(parts, ignore_index=True)
    slowest = rows[rows["label"] == native.case.label].nlargest(MAX_RANKS, "median_ms")["rank"]
    hidden = facts.world_size > len(slowest)
    notes = [*_RANK_NOTES, *([f"the {MAX_RANKS} slowest of {facts.world_size} ranks"] if hidden else [])]
    rows = rows[rows["rank"].isin(slowest)].sort_values("rank", kind="stable")
    columns = [column for column in _RANKS if column.source in rows and rows[column.source].notna().any()]
    return Table(rows, columns, f"{facts.title}: ranks", notes)


def _rank_times(case: Case) -> pd.DataFrame:
    """By rank: median time, the share of iterations in which it is the slowest, median waiting."""
    rows = case.timings
    totals = rows[(rows["kind"] == "plain") & (rows["phase"] == TOTAL)]
    times_us = totals.pivot(index=_ITERATION, columns="rank", values="time_us")
    broken = rows[rows["kind"] == "breakdown"]
    waits_us = broken["time_us"].where(broken["phase"].isin(GROUPS["waiting"]), 0.0)
    waiting_us = waits_us.groupby([broken[name] for name in ("rank", *_ITERATION)]).sum().groupby("rank").median()
    shares = times_us.idxmax(axis=1).value_counts(normalize=True)
    return pd.DataFrame(
        {
            "median_ms": times_us.median() / 1e3,
            "slowest_share": shares.reindex(times_us.columns, fill_value=0.0),
            "waiting_ms": waiting_us.reindex(times_us.columns) / 1e3,
        }
    ).reset_index(names="rank")
