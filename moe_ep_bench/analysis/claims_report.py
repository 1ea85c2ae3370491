"""Papers' claims beside ours as files: the text, the table as CSV, and the figure."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from moe_ep_bench.analysis.claims import ClaimResult, Claims
from moe_ep_bench.analysis.claims_text import (
    METRIC_WORDS,
    basis_words,
    claim_words,
    claims_text,
    cut_words,
    how_words,
    policy_words,
)
from moe_ep_bench.analysis.origins import Footer
from moe_ep_bench.analysis.style import (
    DEFAULT_FORMATS,
    INK,
    MUTED,
    NOISE_FILL,
    house_style,
    panel_title,
    save,
    settle_layout,
    sheet,
    wrap,
)
from moe_ep_bench.analysis.words import mode_words, origins_of, scale_words
from moe_ep_bench.files import atomic_path
from moe_ep_bench.papers.claims import (
    NATIVE_METRICS,
    OWN_METRICS,
    PASS_METRICS,
    PLACEMENTS,
    Claim,
)

_LOOKS = (
    {"color": "#009E73", "marker": "o"},
    {"color": "#0072B2", "marker": "s"},
    {"color": "#D55E00", "marker": "^"},
    {"color": "#CC79A7", "marker": "D"},
    {"color": "#E69F00", "marker": "v"},
)
_PAPER_LOOK = {"color": INK, "marker": "|", "markersize": 15, "markeredgewidth": 2.4, "linestyle": "none"}


def write_claims(claims: Claims) -> list[Path]:
    """Write ``claims.txt``, ``claims.csv`` and the figure; return their paths."""
    text, table = claims.directory / "claims.txt", claims.directory / "claims.csv"
    with atomic_path(text) as temporary:
        temporary.write_text(claims_text(claims) + "\n")
    rows = [row for result in claims.results for row in _csv_rows(claims, result)]
    if rows:
        with atomic_path(table) as temporary, open(temporary, "w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    drawn = []
    with house_style():
        figure = claims_figure(claims)
        if figure is not None:
            settle_layout(figure)
        for file_format in DEFAULT_FORMATS if figure is not None else ():
            assert figure is not None
            path = claims.directory / "figures" / f"claims.{file_format}"
            save(figure, path, file_format)
            drawn.append(path)
    return [text, *([table] if rows else []), *drawn]


def _csv_rows(claims: Claims, result: ClaimResult) -> Iterable[dict[str, Any]]:
    needed = {one.placement: one for one in result.needed}
    low, high = result.claim.paper or (None, None)
    for ours in result.ours:
        facts, native = ours.comparison.comparison, ours.comparison.of_role("baseline")
        yield {
            "source": result.claim.source,
            "of": result.claim.of,
            "ours_of": _ours_of(claims, result.claim),
            "metric": result.claim.metric,
            "policy": result.label,
            "versus": result.versus,
            "comparison": facts.title,
            "traffic": ours.traffic,
            "paper_low": low,
            "paper_high": high,
            "ours": ours.value,
            "ours_low": ours.low,
            "ours_high": ours.high,
            "difference": ours.difference,
            "ours_extrapolated_to_all_layers": ours.all_layers,
            "dropped_share": ours.dropped,
            "fullest_expert": native and native.fidelity and native.fidelity.fullest_expert,
            "fullest_rank": native and native.fidelity and native.fidelity.fullest_rank,
            **{
                f"needed_{placement}_{name}": needed.get(placement) and getattr(needed[placement], name)
                for placement in PLACEMENTS
                for name in ("found", "value", "fullest_expert", "fullest_rank")
            },
            "mode": mode_words(claims.run, facts),
            "device": facts.device or claims.run.device_name,
            "links": facts.links,
            "needed_device": claims.solved_on if result.needed else None,
            "note": result.claim.note.strip(),
        }


def _ours_of(claims: Claims, claim: Claim) -> str:
    if not claims.is_whole:
        return "layer"
    return "end_to_end" if claim.metric in PASS_METRICS else "layers"


def claims_figure(claims: Claims) -> Figure | None:
    """The paper's number as a mark and ours by traffic, a panel for each metric; None where nothing was measured."""
    panels: dict[str, list[ClaimResult]] = {}
    for result in claims.results:
        if result.ours:
            panels.setdefault(METRIC_WORDS[result.claim.metric], []).append(result)
    if not panels:
        return None
    looks = dict(zip(claims.traffics, _cycle(_LOOKS, len(claims.traffics)), strict=True))
    results = [result for panel in panels.values() for result in panel]
    legend = [
        *([("paper", Line2D([], [], **_PAPER_LOOK))] if any(r.claim.number is not None for r in results) else []),
        *([("paper: a range", Patch(facecolor=NOISE_FILL))] if any(_is_range(r.claim) for r in results) else []),
        *((f"ours, {name.replace('_', ' ')}", _mark(look)) for name, look in looks.items()),
    ]
    heights = [_row_height(panel, claims.is_whole) * len(panel) for panel in panels.values()]
    figure = sheet(
        "Papers' numbers beside ours",
        f"Ours: {'whole models, a pass from end to end' if claims.is_whole else 'one layer'}; whiskers are 95 % "
        "intervals, or smallest and largest pair below ten batches. Rows without a mark: the paper's number is not at "
        "hand.",
        Footer(
            [how_words(claims), _what(claims)], origins_of(claims.run, [one.comparison for one in claims.comparisons])
        ),
        legend,
        width=11,
        body=sum(heights) + 0.75 * len(heights),  # titles and axes
    )
    grid = figure.add_gridspec(len(panels), 1, height_ratios=heights)
    for row, (title, panel) in enumerate(panels.items()):
        axes = figure.add_subplot(grid[row, 0])
        panel_title(axes, title, 7.0)
        _draw(axes, panel, looks, claims.is_whole)
    return figure


def _what(claims: Claims) -> str:
    """Which layers, and what traffic."""
    facts = [one.comparison for one in claims.comparisons]
    models = dict.fromkeys(f"{one.model}, {scale_words(one.scale)}, {one.dtype}" for one in facts)
    traffic = dict.fromkeys(basis_words(one) for one in claims.comparisons)
    return f"{' / '.join(models)}{cut_words(claims)} | {facts[0].workload.kind} traffic, {'; '.join(traffic)}"


def _draw(axes: Axes, panel: Sequence[ClaimResult], looks: dict[str, dict[str, Any]], is_whole: bool) -> None:
    factor = 100 if panel[0].claim.metric in OWN_METRICS else 1
    if panel[0].claim.metric not in (*OWN_METRICS, *NATIVE_METRICS):
        axes.axvline(1, color=MUTED, linewidth=1, zorder=1)
    for place, result in enumerate(panel):
        claim = result.claim
        if claim.number is not None:
            axes.plot([factor * claim.number], [place], zorder=2, **_PAPER_LOOK)
        step = min(0.2, 0.6 / max(1, len(result.ours)))
        for at, ours in enumerate(result.ours):
            y = place + (at - (len(result.ours) - 1) / 2) * step
            axes.hlines(
                y, factor * ours.low, factor * ours.high, color=looks[ours.traffic]["color"], linewidth=1.4, zorder=3
            )
            axes.plot([factor * ours.value], [y], zorder=4, **_style(looks[ours.traffic]))
    low, high = axes.get_xlim()
    for place, result in enumerate(panel):
        if _is_range(result.claim) and result.claim.paper is not None:
            begin, end = result.claim.paper
            begin = low if begin is None else factor * begin
            axes.barh(place, (high if end is None else factor * end) - begin, 0.7, begin, color=NOISE_FILL, zorder=0.5)
    axes.set_xlim(low, high)
    axes.set_yticks(range(len(panel)), [_name(result, is_whole) for result in panel])
    axes.tick_params(axis="y", labelsize=8)
    axes.set_ylim(len(panel) - 0.5, -0.5)
    axes.grid(False, axis="y")
    axes.set_xlabel(f"{METRIC_WORDS[panel[0].claim.metric]}{' (%)' if factor == 100 else ''}")


def _name(result: ClaimResult, is_whole: bool) -> str:
    return f"{wrap(claim_words(result, is_whole), 4.0, 8)}\n{wrap(policy_words(result), 4.0, 8)}"


def _row_height(panel: Sequence[ClaimResult], is_whole: bool) -> float:
    """Inches, enough for the longest name."""
    most_lines = max(_name(result, is_whole).count("\n") + 1 for result in panel)
    return max(0.52, 0.15 * most_lines + 0.12)


def _is_range(claim: Claim) -> bool:
    return claim.paper is not None and claim.number is None


def _style(look: dict[str, Any]) -> dict[str, Any]:
    return {**look, "linestyle": "none", "markersize": 5.5, "markeredgecolor": "white", "markeredgewidth": 0.5}


def _mark(look: dict[str, Any]) -> Line2D:
    return Line2D([], [], **_style(look))


def _cycle(looks: Sequence[dict[str, Any]], number: int) -> list[dict[str, Any]]:
    return [looks[at % len(looks)] for at in range(number)]
