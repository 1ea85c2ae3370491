"""The figures of a recording: ``load``, ``experts``, ``scores`` and ``batches``; of several of counts only, ``load``.

The numbers are those of ``workload/trace_statistics.py``, which defines every term.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from moe_ep_bench.analysis.route.parts import (
    BALANCE,
    HEAT,
    MEAN,
    UNIFORM,
    layer_legend,
    layer_ticks,
    line_legend,
    thin_line,
    ticks,
)
from moe_ep_bench.analysis.style import (
    DEFAULT_FORMATS,
    INK,
    NOISE_FILL,
    house_style,
    looks_of,
    panel_title,
    save,
    sheet,
)
from moe_ep_bench.workload.trace_statistics import RecordingStatistics

_BALANCE = {**BALANCE, "color": INK}
_EDGE = {"color": "#D55E00", "linewidth": 1.2}
_FULLEST = (
    "(Token, expert) pairs of a whole recording, fullest over mean; experts are placed contiguously, and with as "
    "many ranks as experts the rank load is the peak load."
)


def draw_trace_figures(
    recordings: Sequence[RecordingStatistics], directory: Path, formats: Sequence[str] = DEFAULT_FORMATS
) -> list[Path]:
    """Draw what recordings of one file hold; return the files written, ``<file's stem>-<figure>.<format>``."""
    stem = Path(recordings[0].file).stem
    written = []
    with house_style():
        for name, figure in _figures(recordings):
            for file_format in formats:
                path = directory / f"{stem}-{name}.{file_format}"
                save(figure, path, file_format)
                written.append(path)
    return written


def _figures(recordings: Sequence[RecordingStatistics]) -> list[tuple[str, Figure]]:
    if len(recordings) > 1:
        return [("load", _loads_figure(recordings))]
    recording = recordings[0]
    figures = [("load", _load_figure(recording)), ("experts", _experts_figure(recording))]
    if recording.has_scores:
        figures.append(("scores", _scores_figure(recording)))
    if recording.batch_sizes:
        figures.append(("batches", _batches_figure(recording)))
    return figures


def representative_ep_size(recording: RecordingStatistics) -> int | None:
    """The largest EP size up to 8, one node's ranks, that the experts allow; None where they allow none."""
    return max((size for size in recording.ep_sizes if size <= 8), default=None)


def by_model(recordings: Sequence[RecordingStatistics]) -> dict[tuple[str, str], list[RecordingStatistics]]:
    """Recordings by the model's shape and their source."""
    models: dict[tuple[str, str], list[RecordingStatistics]] = {}
    for recording in recordings:
        models.setdefault((recording.shape_words, recording.source), []).append(recording)
    return models


def _page(
    recording: RecordingStatistics, title: str, how: str, legend: Mapping[str, Artist | Mapping[str, Any]], body: float
) -> Figure:
    """A sheet that says which recording it is of."""
    phase = [] if recording.phase is None else [recording.phase]
    source = f"source: {recording.source} ({recording.licence})"
    footer = " | ".join([recording.token_words, *phase, source, f"{recording.file}, sha256 {recording.sha256[:12]}"])
    how = f"{recording.shape_words}; {recording.domain}. {how}"
    return sheet(title, how, [footer], line_legend(legend), width=10.5, body=body)


def _load_figure(recording: RecordingStatistics) -> Figure:
    """Fullest expert and rank over the mean: by layer, and by EP size."""
    names = {str(size): f"fullest rank of EP {size}" for size in recording.ep_sizes} | {"peak": "fullest expert"}
    looks = looks_of(names).values()
    load_RL = _rank_loads(recording)
    figure = _page(
        recording,
        "Load of the fullest expert and rank",
        _FULLEST,
        {
            **{look.label: look.marks for look in looks},
            "mean over layers": MEAN,
            "least to most of a layer": Patch(facecolor=NOISE_FILL),
            "balance": _BALANCE,
        },
        3.7,
    )
    by_layer, by_size = figure.subplots(1, 2, width_ratios=[1.7, 1], sharey=True)
    panel_title(by_layer, "by layer", 5)
    for load_L, look in zip(load_RL, looks, strict=True):
        by_layer.plot(load_L, **look.marks)
    by_layer.set_ylabel("load of the fullest (1 = mean)")
    panel_title(by_size, "by EP size", 3)
    places = range(len(load_RL))
    by_size.fill_between(places, load_RL.min(axis=1), load_RL.max(axis=1), color=NOISE_FILL, linewidth=0)
    by_size.plot(places, load_RL.mean(axis=1), **MEAN)
    by_size.set_ylabel("rank load (1 = mean)")
    _finish_loads(by_layer, by_size, recording, "\n(peak)")
    by_layer.set_ylim(bottom=min(0.9, by_layer.get_ylim()[0]))
    return figure


def _rank_loads(recording: RecordingStatistics) -> np.ndarray:
    """Fullest rank over the mean for every EP size, the last with a rank for every expert: [sizes, L]."""
    sizes = (*recording.ep_sizes, recording.num_experts)
    return np.array([[layer.rank_load(size) for layer in recording.layers] for size in sizes])


def _finish_loads(by_layer: Axes, by_size: Axes, recording: RecordingStatistics, peak: str) -> None:
    layer_ticks(by_layer, _names(recording))
    labels = [*map(str, recording.ep_sizes), f"{recording.num_experts}{peak}"]
    by_size.set_xticks(range(len(labels)), labels)
    by_size.set_xlabel("EP size (ranks)")
    by_size.set_xlim(-0.3, len(labels) - 0.7)
    by_size.tick_params(labelleft=True)
    for axes in (by_layer, by_size):
        axes.axhline(1, zorder=1, **_BALANCE)


def _loads_figure(recordings: Sequence[RecordingStatistics]) -> Figure:
    """The same of several recordings, a row of panels per model and a line per domain."""
    models = by_model(recordings)
    looks = looks_of({recording.domain: recording.domain for recording in recordings})
    sources = dict.fromkeys(f"{recording.source} ({recording.licence})" for recording in recordings)
    figure = sheet(
        "Load of the fullest expert and rank, by domain",
        _FULLEST,
        [f"{recordings[0].file}, sha256 {recordings[0].sha256[:12]} | {' / '.join(sources)}"],
        line_legend({**{look.label: look.marks for look in looks.values()}, "balance": _BALANCE}),
        width=11,
        body=2.9 * len(models),
    )
    panels = figure.subplots(len(models), 2, width_ratios=[1.7, 1], sharey="row", squeeze=False)
    for ((shape, source), members), (by_layer, by_size) in zip(models.items(), panels, strict=True):
        panel_title(by_layer, f"{shape}; {source}", 5.6)
        for recording in members:
            load_RL = _rank_loads(recording)
            by_layer.plot(load_RL[-1], **looks[recording.domain].marks)
            by_size.plot(load_RL.mean(axis=1), **looks[recording.domain].marks)
        by_layer.set_ylabel("peak load (1 = mean)")
        by_size.set_ylabel("rank load, mean over layers")
        _finish_loads(by_layer, by_size, members[0], " (peak)")
    return figure


def _experts_figure(recording: RecordingStatistics) -> Figure:
    """Load of every expert in every layer, in the order in which they lie on ranks."""
    load_LE = np.stack([layer.load_E / layer.load_E.mean() for layer in recording.layers])
    ep_size = representative_ep_size(recording)
    figure = _page(
        recording,
        "Load of every expert",
        "(Token, expert) pairs of the whole recording over the layer's mean expert.",
        {} if ep_size is None else {f"edge between ranks of EP {ep_size}": _EDGE},
        max(2.3, min(1.5 + 0.15 * len(load_LE), 7.5)),
    )
    axes = figure.subplots()
    num_layers, num_experts = load_LE.shape
    image = axes.pcolormesh(
        np.arange(num_experts + 1) - 0.5,
        np.arange(num_layers + 1) - 0.5,
        load_LE,
        cmap=HEAT,
        norm=Normalize(0, load_LE.max()),
        rasterized=True,
    )
    figure.colorbar(image, ax=axes, pad=0.015, aspect=25).set_label("expert load (1 = mean)")
    for rank in range(1, ep_size or 1):
        axes.axvline(rank * num_experts / (ep_size or 1) - 0.5, **_EDGE)
    axes.set_xticks(ticks(num_experts, 17))
    axes.set_xlabel("expert")
    layer_ticks(axes, _names(recording), axis="y")
    axes.set_ylim(num_layers - 0.5, -0.5)
    axes.grid(False)
    return figure


def _scores_figure(recording: RecordingStatistics) -> Figure:
    """How score falls from the best expert to the last, and how much of it the top-k hold by layer."""
    score_LK = np.stack([layer.mean_score_K for layer in recording.layers if layer.mean_score_K is not None])
    decays = [layer.decay for layer in recording.layers if layer.decay is not None]
    is_known = recording.score_share_is_known
    figure = _page(
        recording,
        "Scores of a token's top-k experts",
        "Mean over tokens of the score at each rank. "
        + ("Scores are shares of the mass over all experts." if is_known else "Scores were normalised over the top-k."),
        {**layer_legend(_names(recording)), "mean over layers": MEAN},
        3.7,
    )
    decay, share = figure.subplots(1, 2, width_ratios=[1, 1.5])
    ranks = np.arange(1, recording.top_k + 1)
    panel_title(decay, "decay by rank", 3.5)
    for index, decay_K in enumerate(decays):
        decay.plot(ranks, decay_K, **thin_line(index, len(decays)))
    if decays:
        decay.plot(ranks, np.mean(decays, axis=0), zorder=3, **MEAN)
    decay.set_xticks(ticks(recording.top_k, 12) + 1)
    decay.set_xlabel("rank in a token's top-k")
    decay.set_ylabel("mean score (best = 1)")
    decay.set_ylim(0, 1.05)
    panel_title(share, "mean score by layer, stacked by rank (best at the bottom)", 5)
    places = np.arange(len(score_LK))
    shades = HEAT(np.linspace(1, 0.2, recording.top_k))
    for rank in range(recording.top_k):
        bottom_L = score_LK[:, :rank].sum(axis=1)
        share.bar(places, score_LK[:, rank], 0.8, bottom_L, color=shades[rank], edgecolor="white", linewidth=0.4)
    layer_ticks(share, _names(recording))
    share.grid(False, axis="x")
    share.set_ylabel("share of score mass" + ("" if is_known else " of the top-k"))
    return figure


def _batches_figure(recording: RecordingStatistics) -> Figure:
    """How many experts a batch activates, how full its fullest is, and how alike neighbouring tokens are."""
    sizes = recording.batch_sizes
    activated_LN = np.array([[layer.activated[size] for size in sizes] for layer in recording.layers])
    peak_LN = np.array([[layer.batch_peak[size] for size in sizes] for layer in recording.layers])
    overlaps = [np.nan if layer.neighbour_overlap is None else layer.neighbour_overlap for layer in recording.layers]
    figure = _page(
        recording,
        "Activated experts, peak load and likeness of neighbouring tokens",
        f"Mean over batches; {recording.batch_words}. Overlap: experts that adjacent tokens of a sequence have in "
        "common. Uniform: independent, uniform choices.",
        {**layer_legend(_names(recording)), "mean over layers": MEAN, "uniform": UNIFORM},
        3.7,
    )
    activated, peak, overlap = figure.subplots(1, 3, width_ratios=[1.25, 1, 1])
    for axes, title, values_LN in ((activated, "activated experts", activated_LN), (peak, "peak load", peak_LN)):
        panel_title(axes, f"{title} by batch size", 3)
        for index, values_N in enumerate(values_LN):
            axes.plot(sizes, values_N, **thin_line(index, len(values_LN)))
        axes.plot(sizes, values_LN.mean(axis=0), zorder=3, **MEAN)
        axes.set_xscale("log", base=2)
        axes.set_xticks(sizes[::2], [str(size) for size in sizes[::2]])
        axes.minorticks_off()
        axes.set_xlabel("batch (tokens)")
    curve = np.geomspace(1, sizes[-1], 100)
    activated.plot(curve, [recording.uniform_activated(size) for size in curve], zorder=2.5, **UNIFORM)
    activated.set_ylabel(f"distinct experts (of {recording.num_experts})")
    activated.set_ylim(0, 1.05 * recording.num_experts)
    peak.set_ylabel("load of the fullest expert (1 = mean)")
    peak.set_ylim(bottom=0)
    panel_title(overlap, "neighbour overlap by layer", 3)
    overlap.plot(overlaps, color="#0072B2", marker="o", markersize=4.5, markeredgecolor="white", markeredgewidth=0.6)
    overlap.axhline(recording.uniform_overlap, **UNIFORM)
    overlap.set_ylim(bottom=0)
    overlap.set_ylabel(f"experts in common (of {recording.top_k})")
    layer_ticks(overlap, _names(recording), 6)
    return figure


def _names(recording: RecordingStatistics) -> list[str]:
    return [layer.name for layer in recording.layers]
