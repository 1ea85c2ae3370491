"""The tables of ``moe-ep-bench trace info``: a recording by layer, by rank in the top-k and by batch size; its figures.

The numbers are those of ``workload/trace_statistics.py``, which defines every term. Three rows close a table of layers:
the mean over layers; of each column the worst layer, the one that is hardest on expert parallelism (the most load or
activated experts, the least entropy or overlap; of scores none is worse); and what tokens would give, in the long run,
that choose independently and uniformly.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from moe_ep_bench.analysis.render import Column, Table, number, render, text
from moe_ep_bench.analysis.trace_figures import by_model, draw_trace_figures, representative_ep_size
from moe_ep_bench.errors import UserError
from moe_ep_bench.workload.trace_statistics import RecordingStatistics, statistics

WIDTH = 120  # characters in a line of a table
_BATCH_COLUMNS = (4, 16, 64, 256, 1024)
_COUNTS_ONLY = "not recorded (counts only): top-k share, decay by rank, neighbour overlap, activated experts"
_NO_SCORES = "not recorded (no scores): top-k share, decay by rank"
_LAYERS = (
    "peak, EP: (token, expert) pairs of the fullest expert or rank over the mean; CV, entropy: of the experts' loads",
    "share, last/1st: of the top-k's scores; overlap: experts that adjacent tokens have in common",
)
# Columns of which the least is worst, of which none is, and that do not have two decimals.
_LEAST_IS_WORST, _NEUTRAL = ("entropy", "overlap"), ("share", "last/1st")
_FORMS = {"entropy": "{:.3f}", "share": "{:.3f}", "last/1st": "{:.3f}"}


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
        raise UserError(f"{out}: figures cannot be written there ({error.strerror or error})") from None
    return "\n".join([shown, "", *map(str, written)])


def trace_tables(recordings: Sequence[RecordingStatistics]) -> list[Table]:
    """The tables of every recording, and of several an overview per model."""
    tables = []
    for recording in recordings:
        tables.append(_layer_table(recording))
        if recording.has_scores:
            tables.append(_rank_table(recording))
        if not recording.counts_only:
            tables.append(_batch_table(recording))
    models = by_model(recordings) if len(recordings) > 1 else {}
    return [*tables, *(_overview(f"{shape}; {source}", of) for (shape, source), of in models.items())]


def _by_layer(recording: RecordingStatistics, ep_sizes: Sequence[int]) -> pd.DataFrame:
    """A row per layer; then mean, worst and uniform. A column per statistic, empty where it is not recorded."""
    layers = recording.layers
    values = {"peak": [layer.peak_load for layer in layers]}
    values |= {f"EP {size}": [layer.rank_load(size) for layer in layers] for size in ep_sizes}
    uniform = dict.fromkeys(values, 1.0) | {"CV": 0.0, "entropy": 1.0}
    values |= {"CV": [layer.load_cv for layer in layers], "entropy": [layer.load_entropy for layer in layers]}
    if not recording.counts_only:
        values["share"] = [recording.topk_share(layer) for layer in layers]
        values["last/1st"] = [None if layer.decay is None else layer.decay[-1] for layer in layers]
        values["overlap"] = [layer.neighbour_overlap for layer in layers]
        uniform["overlap"] = recording.uniform_overlap
        for size in set(_BATCH_COLUMNS).intersection(recording.batch_sizes):
            values[f"B {size}"] = [layer.activated[size] for layer in layers]
            uniform[f"B {size}"] = recording.uniform_activated(size)
    batches = [f"B {size}" for size in _BATCH_COLUMNS if f"B {size}" in values]
    frame = pd.DataFrame(values, index=[layer.name for layer in layers], dtype=float)
    frame = frame[[*(name for name in values if name not in batches), *batches]]
    worst = frame.max().where(~frame.columns.isin(_LEAST_IS_WORST), frame.min()).drop([*_NEUTRAL], errors="ignore")
    closing = {"mean": frame.mean(), "worst": worst, "uniform": pd.Series(uniform)}
    return pd.concat([frame, pd.DataFrame(closing).T[list(frame)]])


def _form(name: str) -> str:
    return "{:.1f}" if name.startswith("B ") else _FORMS.get(name, "{:.2f}")


def _layer_table(recording: RecordingStatistics) -> Table:
    frame = _by_layer(recording, recording.ep_sizes).rename_axis("layer").reset_index()
    notes = [
        f"domain: {recording.domain}; phase: {recording.phase or 'not recorded'}; scores: {_score_words(recording)}",
        f"source: {recording.source}; licence: {recording.licence}",
        f"file: {recording.file}; sha256: {recording.sha256[:12]}",
        _LAYERS[0],
    ]
    if recording.counts_only:
        notes.append(_COUNTS_ONLY)
    else:
        notes += [_LAYERS[1], f"B: experts with a token; {recording.batch_words}"]
        notes += [] if recording.has_scores else [_NO_SCORES]
    columns = [text("layer"), *(number(name, form=_form(name)) for name in frame.columns[1:])]
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
    if decays_LK := [layer.decay for layer in recording.layers if layer.decay is not None]:
        frame["decay"] = np.mean(decays_LK, axis=0)
        frame["least of a layer"], frame["most of a layer"] = np.min(decays_LK, axis=0), np.max(decays_LK, axis=0)
    columns = [text("rank"), number("mean score", form="{:.4f}"), *(number(name) for name in frame.columns[2:])]
    return Table(frame, columns, "Scores by rank in the top-k, mean over layers; decay: the best is 1")


def _batch_table(recording: RecordingStatistics) -> Table:
    """By batch size, over all layers."""
    activated = pd.DataFrame([layer.activated for layer in recording.layers], columns=recording.batch_sizes)
    frame = pd.DataFrame(
        {
            "activated experts": activated.mean(),
            "least of a layer": activated.min(),
            "most of a layer": activated.max(),
            "uniform choices": [recording.uniform_activated(size) for size in recording.batch_sizes],
            "peak load of a batch": pd.DataFrame([layer.batch_peak for layer in recording.layers]).mean(),
        }
    )
    columns = [text("tokens"), *(number(name, form="{:.1f}") for name in frame.columns[:-1])]
    columns.append(number("peak load of a batch", form="{:.2f}"))
    title = f"Batches, mean over layers; {recording.batch_words}"
    return Table(frame.rename_axis("tokens").reset_index(), columns, title)


def _overview(title: str, recordings: Sequence[RecordingStatistics]) -> Table:
    """One row per recording of a model."""
    size = representative_ep_size(recordings[0])
    names = ["peak", *([] if size is None else [f"EP {size}"]), "CV", "entropy"]
    rows = []
    for recording in recordings:
        ends = _by_layer(recording, [] if size is None else [size]).loc[["mean", "worst"], names]
        values = {f"{name}, {end}": ends.loc[end, name] for name in names for end in ends.index}
        rows.append({"domain": recording.domain, "tokens": recording.num_tokens, **values})
    columns: list[Column] = [text("domain"), number("tokens", form="{:,}")]
    for name in names:
        columns += [number(f"{name}, mean", name, _form(name)), number(f"{name}, worst", "worst", _form(name))]
    return Table(pd.DataFrame(rows), columns, f"Overview: mean over layers, and the worst layer; {title}")
