"""What ``moe-ep-bench trace info`` says of a recording: a table with one row per layer, and figures.

The numbers are those of ``workload/trace_statistics.py``, which defines every term. Three rows close a
table of layers: the mean over layers; of each column the worst layer, the one that is hardest on
expert parallelism (the most load or activated experts, the least entropy or overlap; of scores none
is worse); and what tokens would give, in the long run, that choose independently and uniformly.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import numpy as np

from moe_ep_bench.analysis.trace_figures import draw_trace_figures, representative_ep_size
from moe_ep_bench.analysis.words import NONE
from moe_ep_bench.workload.trace_statistics import LayerStatistics, RecordingStatistics, statistics

WIDTH = 120  # characters in a line
_GAP = "  "
_LABEL_WIDTH = 22
# Batch sizes that get a column as far as there is room, the most telling first.
_BATCH_COLUMNS = (64, 16, 256, 4, 1024)
_MAX_RANKS = 11
_COUNTS_ONLY = "not recorded (counts only): top-k share, decay by rank, neighbour overlap, activated experts"
_NO_SCORES = "not recorded (no scores): top-k share, decay by rank"


def trace_info(path: Path, out: Path | None = None) -> str:
    """Describe a recording; draw its figures where a directory is given.

    Args:
        path: a ``moe-trace-v1`` file, or a ``.json`` of expert loads.
        out: gets ``<name of the recording>-<figure>`` as PNG and SVG; made where it is missing.

    Returns:
        The tables, then the figures' paths.

    Raises:
        ValueError: a file that cannot be used, or a directory that cannot be written; the message says which and why.
    """
    recordings = statistics(path)
    text = trace_table(recordings)
    if out is None:
        return text
    try:
        out.mkdir(parents=True, exist_ok=True)
        written = draw_trace_figures(recordings, out)
    except OSError as error:
        raise ValueError(f"{out}: figures cannot be written there ({error.strerror or error})") from None
    return "\n".join([text, "", *map(str, written)])


def trace_table(recordings: Sequence[RecordingStatistics]) -> str:
    """Render recordings as text of at most ``WIDTH`` columns: a block each, and an overview of several."""
    blocks = [_block(recording) for recording in recordings]
    return "\n\n\n".join([*blocks, *([_overview(recordings)] if len(recordings) > 1 else [])])


@dataclass(frozen=True)
class _Column:
    """A column of the table of layers.

    Attributes:
        group: heading that neighbouring columns share.
        value: its cell in a layer's row; None where that is not recorded.
        worst: ``max`` or ``min`` over layers; None where neither end is worse.
        uniform: what uniform choices would give.
    """

    group: str
    name: str
    value: Callable[[LayerStatistics], float | None]
    decimals: int
    worst: Callable[[Iterable[float]], float] | None = None
    uniform: float | None = None


def _block(recording: RecordingStatistics) -> str:
    parts = [_heading(recording), _layer_table(recording, _columns(recording))]
    if recording.counts_only:
        parts.append([_COUNTS_ONLY])
    else:
        parts += [_rank_table(recording) if recording.has_scores else [_NO_SCORES], _batch_table(recording)]
    return "\n\n".join("\n".join(lines) for lines in parts)


def _heading(recording: RecordingStatistics) -> list[str]:
    facts = (
        f"{recording.shape_words}, {recording.token_words}",
        f"domain: {recording.domain}; phase: {recording.phase or 'not recorded'}; scores: {_score_words(recording)}",
        f"source: {recording.source}; licence: {recording.licence}",
        f"file: {recording.file}; sha256: {recording.sha256[:12]}",
    )
    return [line for fact in facts for line in textwrap.wrap(fact, WIDTH, subsequent_indent="  ")]


def _score_words(recording: RecordingStatistics) -> str:
    if recording.score is None:
        return "not recorded"
    if not recording.has_scores:
        return f"not recorded ({recording.score})"
    known = "raw: shares of all experts' mass" if recording.score_share_is_known else "normalised over the top-k"
    return f"{recording.score} ({known})"


def _columns(recording: RecordingStatistics) -> list[_Column]:
    load, score = "load, fullest / mean", "score, top-k"
    columns = [_Column(load, "peak", lambda layer: layer.peak_load, 2, max, 1.0)]
    columns += [
        _Column(load, f"EP {size}", lambda layer, size=size: layer.rank_load(size), 2, max, 1.0)
        for size in recording.ep_sizes
    ]
    columns += [
        _Column("expert load", "CV", lambda layer: layer.load_cv, 2, max, 0.0),
        _Column("expert load", "entropy", lambda layer: layer.load_entropy, 3, min, 1.0),
    ]
    if recording.counts_only:
        return columns
    columns += [
        _Column(score, "share", recording.topk_share, 3),
        _Column(score, "last/1st", lambda layer: None if layer.decay is None else layer.decay[-1], 3),
        _Column("overlap", "experts", lambda layer: layer.neighbour_overlap, 2, min, recording.uniform_overlap),
    ]
    fitting: list[int] = []
    for size in _BATCH_COLUMNS:
        tried = sorted([*fitting, size])
        wider = [*columns, *(_activated_column(recording, each) for each in tried)]
        if size in recording.batch_sizes and max(map(len, _layer_table(recording, wider))) <= WIDTH:
            fitting = tried
    return [*columns, *(_activated_column(recording, size) for size in fitting)]


def _activated_column(recording: RecordingStatistics, size: int) -> _Column:
    return _Column(
        "activated, batch of",
        str(size),
        lambda layer: layer.activated.get(size),
        1,
        max,
        recording.uniform_activated(size),
    )


def _layer_table(recording: RecordingStatistics, columns: Sequence[_Column]) -> list[str]:
    """One row per layer; then mean, worst and uniform."""
    header = ["layer", *(column.name for column in columns)]
    cells = [[layer.name for layer in recording.layers]]
    closing = [["mean", "worst", "uniform"]]
    for column in columns:
        values = [column.value(layer) for layer in recording.layers]
        known = [value for value in values if value is not None]
        cells.append([_number(value, column.decimals) for value in values])
        ends = (fmean(known) if known else None, column.worst(known) if known and column.worst else None)
        closing.append([_number(value, column.decimals) for value in (*ends, column.uniform)])
    widths = [max(map(len, (name, *of, *end))) for name, of, end in zip(header, cells, closing, strict=True)]

    # Headings over groups of columns; one that is wider than its columns widens the first of them.
    headings, spans = [""], [widths[0]]
    for group in dict.fromkeys(column.group for column in columns):
        members = [index for index, column in enumerate(columns, 1) if column.group == group]
        span = sum(widths[index] for index in members) + len(_GAP) * (len(members) - 1)
        widths[members[0]] += max(0, len(group) - span)
        headings.append(group)
        spans.append(max(span, len(group)))
    above = _GAP.join(name.center(span) for name, span in zip(headings, spans, strict=True)).rstrip()
    rule = _GAP.join("-" * span for span in spans)
    rows = [_line(row, widths) for row in zip(*cells, strict=True)]
    return [
        above,
        _line(header, widths),
        rule,
        *rows,
        rule,
        *(_line(row, widths) for row in zip(*closing, strict=True)),
    ]


def _rank_table(recording: RecordingStatistics) -> list[str]:
    """By rank in a token's top-k, over all layers; of a long top-k the first ranks and the last."""
    ranks = [rank for rank in range(recording.top_k) if rank < _MAX_RANKS or rank == recording.top_k - 1]
    scores = np.stack([layer.mean_score_K for layer in recording.layers if layer.mean_score_K is not None])
    decays = [layer.decay for layer in recording.layers if layer.decay is not None]
    rows = {"rank in top-k": [str(rank + 1) for rank in ranks], "mean score": _numbers(scores.mean(axis=0)[ranks], 4)}
    if decays:
        rows["decay, best = 1"] = _numbers(np.mean(decays, axis=0)[ranks], 3)
        rows["  least of a layer"] = _numbers(np.min(decays, axis=0)[ranks], 3)
        rows["  most of a layer"] = _numbers(np.max(decays, axis=0)[ranks], 3)
    return ["Scores by rank, mean over layers", *_labelled(rows)]


def _batch_table(recording: RecordingStatistics) -> list[str]:
    """By batch size, over all layers."""
    sizes = recording.batch_sizes
    activated = [[layer.activated[size] for layer in recording.layers] for size in sizes]
    peaks = [fmean(layer.batch_peak[size] for layer in recording.layers) for size in sizes]
    rows = {
        "batch, tokens": list(map(str, sizes)),
        "activated experts": _numbers(map(fmean, activated), 1),
        "  least of a layer": _numbers(map(min, activated), 1),
        "  most of a layer": _numbers(map(max, activated), 1),
        "  uniform choices": _numbers(map(recording.uniform_activated, sizes), 1),
        "peak load of a batch": _numbers(peaks, 2),
    }
    return [f"Batches, mean over layers; {recording.batch_words}", *_labelled(rows)]


def _overview(recordings: Sequence[RecordingStatistics]) -> str:
    """One row per recording, those of a model together."""
    models: dict[tuple[str, str], list[RecordingStatistics]] = {}
    for recording in recordings:
        models.setdefault((recording.shape_words, recording.source), []).append(recording)
    lines = ["Overview: mean over layers, and the worst layer"]
    for (shape, source), members in models.items():
        size = representative_ep_size(members[0])
        header = ["domain", "tokens", "peak", "worst"]
        header += [] if size is None else [f"EP {size}", "worst"]
        header += ["CV", "worst", "entropy", "worst"]
        rows = []
        for recording in members:
            row = [textwrap.shorten(recording.domain, 44, placeholder="..."), f"{recording.num_tokens:,}"]
            for column in _columns(recording):
                if column.name in header:
                    values = [value for layer in recording.layers if (value := column.value(layer)) is not None]
                    assert column.worst is not None, "columns of loads have a worse end"
                    row += _numbers([fmean(values), column.worst(values)], column.decimals)
            rows.append(row)
        widths = [max(map(len, cells)) for cells in zip(header, *rows, strict=True)]
        lines += ["", f"{shape}; {source}", *(_line(row, widths) for row in (header, *rows))]
    return "\n".join(lines)


def _labelled(rows: Mapping[str, Sequence[str]]) -> list[str]:
    """Rows of numbers behind labels."""
    widths = [_LABEL_WIDTH, *(max(5, *map(len, cells)) for cells in zip(*rows.values(), strict=True))]
    return [_line([label, *cells], widths) for label, cells in rows.items()]


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    """The first cell to the left, the others to the right."""
    first, *others = zip(cells, widths, strict=True)
    return _GAP.join([first[0].ljust(first[1]), *(cell.rjust(width) for cell, width in others)]).rstrip()


def _numbers(values: Iterable[float], decimals: int) -> list[str]:
    return [_number(value, decimals) for value in values]


def _number(value: float | None, decimals: int) -> str:
    return NONE if value is None else f"{value:.{decimals}f}"
