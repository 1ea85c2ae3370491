"""The tables of ``moe-ep-bench trace info``: a recording by layer, by rank in the top-k and by batch size; its figures.

The numbers are those of ``workload/trace_statistics.py``, which defines every term. Three rows close a
table of layers: the mean over layers; of each column the worst layer, the one that is hardest on
expert parallelism (the most load or activated experts, the least entropy or overlap; of scores none
is worse); and what tokens would give, in the long run, that choose independently and uniformly.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import pandas as pd

from moe_ep_bench.analysis.render import Table, number, render, text
from moe_ep_bench.analysis.trace_figures import by_model, draw_trace_figures, representative_ep_size
from moe_ep_bench.workload.trace_statistics import LayerStatistics, RecordingStatistics, statistics

WIDTH = 120  # characters in a line of a table
_BATCH_COLUMNS = (4, 16, 64, 256, 1024)
_COUNTS_ONLY = "not recorded (counts only): top-k share, decay by rank, neighbour overlap, activated experts"
_NO_SCORES = "not recorded (no scores): top-k share, decay by rank"
_LAYERS = (
    "peak, EP: (token, expert) pairs of the fullest expert or rank over the mean; CV, entropy: of the experts' loads",
    "share, last/1st: of the top-k's scores; overlap: experts that adjacent tokens have in common",
)


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
    shown = render(trace_tables(recordings), "text", width=WIDTH)
    if out is None:
        return shown
    try:
        out.mkdir(parents=True, exist_ok=True)
        written = draw_trace_figures(recordings, out)
    except OSError as error:
        raise ValueError(f"{out}: figures cannot be written there ({error.strerror or error})") from None
    return "\n".join([shown, "", *map(str, written)])


def trace_tables(recordings: Sequence[RecordingStatistics]) -> list[Table]:
    """The tables of every recording, and of several an overview."""
    tables = []
    for recording in recordings:
        tables.append(_layer_table(recording))
        if recording.has_scores:
            tables.append(_rank_table(recording))
        if not recording.counts_only:
            tables.append(_batch_table(recording))
    return [*tables, *(_overviews(recordings) if len(recordings) > 1 else [])]


class _Statistic(NamedTuple):
    """A number of a layer.

    Attributes:
        value: None where it is not recorded.
        worst: the worse end over layers; None where neither is.
        uniform: what uniform choices would give.
    """

    header: str
    value: Callable[[LayerStatistics], float | None]
    form: str = "{:.2f}"
    worst: Literal["max", "min"] | None = "max"
    uniform: float | None = None


def _of_loads(recording: RecordingStatistics, ep_sizes: Sequence[int]) -> list[_Statistic]:
    return [
        _Statistic("peak", lambda layer: layer.peak_load, uniform=1),
        *(_Statistic(f"EP {size}", lambda layer, size=size: layer.rank_load(size), uniform=1) for size in ep_sizes),
        _Statistic("CV", lambda layer: layer.load_cv, uniform=0),
        _Statistic("entropy", lambda layer: layer.load_entropy, "{:.3f}", "min", 1),
    ]


def _of_choices(recording: RecordingStatistics) -> list[_Statistic]:
    sizes = [size for size in _BATCH_COLUMNS if size in recording.batch_sizes]
    return [
        _Statistic("share", recording.topk_share, "{:.3f}", None),
        _Statistic("last/1st", lambda layer: None if layer.decay is None else layer.decay[-1], "{:.3f}", None),
        _Statistic("overlap", lambda layer: layer.neighbour_overlap, "{:.2f}", "min", recording.uniform_overlap),
        *(
            _Statistic(
                f"B {size}",
                lambda layer, size=size: layer.activated.get(size),
                "{:.1f}",
                uniform=recording.uniform_activated(size),
            )
            for size in sizes
        ),
    ]


def _by_layer(recording: RecordingStatistics, wanted: Sequence[_Statistic]) -> pd.DataFrame:
    """A row per layer; then mean, worst and uniform."""
    values = {of.header: [of.value(layer) for layer in recording.layers] for of in wanted}
    layers = pd.DataFrame(values, index=[layer.name for layer in recording.layers], dtype=float)
    closing = {
        "mean": layers.mean(),
        "worst": pd.Series({of.header: layers[of.header].agg(of.worst) if of.worst else np.nan for of in wanted}),
        "uniform": pd.Series({of.header: of.uniform for of in wanted}, dtype=float),
    }
    return pd.concat([layers, pd.DataFrame(closing).T])


def _layer_table(recording: RecordingStatistics) -> Table:
    wanted = _of_loads(recording, recording.ep_sizes)
    notes = [
        f"domain: {recording.domain}; phase: {recording.phase or 'not recorded'}; scores: {_score_words(recording)}",
        f"source: {recording.source}; licence: {recording.licence}",
        f"file: {recording.file}; sha256: {recording.sha256[:12]}",
        _LAYERS[0],
    ]
    if recording.counts_only:
        notes.append(_COUNTS_ONLY)
    else:
        wanted += _of_choices(recording)
        notes += [_LAYERS[1], f"B: experts with a token; {recording.batch_words}"]
        notes += [] if recording.has_scores else [_NO_SCORES]
    frame = _by_layer(recording, wanted).rename_axis("layer").reset_index()
    columns = [text("layer"), *(number(of.header, form=of.form) for of in wanted)]
    return Table(frame, columns, f"{recording.shape_words}, {recording.token_words}", notes)


def _score_words(recording: RecordingStatistics) -> str:
    if recording.score is None:
        return "not recorded"
    if not recording.has_scores:
        return f"not recorded ({recording.score})"
    known = "raw: shares of all experts' mass" if recording.score_share_is_known else "normalised over the top-k"
    return f"{recording.score} ({known})"


def _rank_table(recording: RecordingStatistics) -> Table:
    """By rank in a token's top-k, over all layers."""
    scores_LK = np.stack([layer.mean_score_K for layer in recording.layers if layer.mean_score_K is not None])
    frame = pd.DataFrame({"rank": range(1, recording.top_k + 1), "mean score": scores_LK.mean(axis=0)})
    decays_LK = [layer.decay for layer in recording.layers if layer.decay is not None]
    if decays_LK:
        frame["decay"] = np.mean(decays_LK, axis=0)
        frame["least of a layer"], frame["most of a layer"] = np.min(decays_LK, axis=0), np.max(decays_LK, axis=0)
    columns = [text("rank"), number("mean score", form="{:.4f}"), *(number(name) for name in frame.columns[2:])]
    return Table(frame, columns, "Scores by rank in the top-k, mean over layers; decay: the best is 1")


def _batch_table(recording: RecordingStatistics) -> Table:
    """By batch size, over all layers."""
    sizes = list(recording.batch_sizes)
    activated = pd.DataFrame([layer.activated for layer in recording.layers], columns=sizes)
    peaks = pd.DataFrame([layer.batch_peak for layer in recording.layers], columns=sizes)
    frame = pd.DataFrame(
        {
            "activated experts": activated.mean(),
            "least of a layer": activated.min(),
            "most of a layer": activated.max(),
            "uniform choices": [recording.uniform_activated(size) for size in sizes],
            "peak load of a batch": peaks.mean(),
        }
    )
    columns = [text("tokens"), *(number(name, form="{:.1f}") for name in frame.columns[:-1])]
    columns.append(number("peak load of a batch", form="{:.2f}"))
    title = f"Batches, mean over layers; {recording.batch_words}"
    return Table(frame.rename_axis("tokens").reset_index(), columns, title)


def _overviews(recordings: Sequence[RecordingStatistics]) -> list[Table]:
    """One row per recording, a table per model."""
    tables = []
    for (shape, source), members in by_model(recordings).items():
        size = representative_ep_size(members[0])
        wanted = _of_loads(members[0], [] if size is None else [size])
        rows = []
        for recording in members:
            by_layer = _by_layer(recording, wanted)
            ends = {f"{header}, {end}": by_layer.loc[end, header] for header in by_layer for end in ("mean", "worst")}
            rows.append({"domain": recording.domain, "tokens": recording.num_tokens, **ends})
        columns = [text("domain"), number("tokens", form="{:,}")]
        for of in wanted:
            columns += [
                number(f"{of.header}, mean", of.header, of.form),
                number(f"{of.header}, worst", "worst", of.form),
            ]
        title = f"Overview: mean over layers, and the worst layer; {shape}; {source}"
        tables.append(Table(pd.DataFrame(rows), columns, title))
    return tables
