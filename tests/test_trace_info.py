"""Claims about recordings: every statistic beside a slow, obvious one; then the table and the figures."""

from __future__ import annotations

import functools
import itertools
import json
import math
import os
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from results_builder import assert_nothing_is_clipped
from safetensors import safe_open
from safetensors.numpy import save_file

from moe_ep_bench.analysis import trace_figures
from moe_ep_bench.analysis.render import render
from moe_ep_bench.analysis.style import house_style
from moe_ep_bench.analysis.trace_report import WIDTH, trace_info, trace_tables
from moe_ep_bench.workload import trace_statistics as module
from moe_ep_bench.workload.trace import open_trace
from moe_ep_bench.workload.trace_statistics import (
    LayerStatistics,
    RecordingStatistics,
    batches,
    rank_load,
    statistics,
    trace_statistics,
)

TRACES = Path(__file__).parents[2] / "shared" / "traces"


def write_trace(
    path: Path,
    *,
    length_S=(5, 1, 7),
    num_layers=2,
    num_experts=8,
    top_k=3,
    phase="prefill",
    normalised=False,
    gaps=False,
    equal=False,
    seed=0,
    **metadata,
) -> Path:
    """A recording of random choices, with repetition between neighbours, as routers have it."""
    random = np.random.default_rng(seed)
    num_tokens = sum(length_S)
    logits_LTE = random.normal(size=(num_layers, num_tokens, num_experts)) * 1.5
    logits_LTE[:, 1:] += logits_LTE[:, :-1]
    scores_LTE = np.exp(logits_LTE) / np.exp(logits_LTE).sum(axis=2, keepdims=True)
    ids_LTK = np.argsort(-scores_LTE, axis=2)[..., :top_k]
    scores_LTK = np.take_along_axis(scores_LTE, ids_LTK, axis=2)
    if normalised:
        scores_LTK /= scores_LTK.sum(axis=2, keepdims=True)
    if equal:
        scores_LTK[:] = 1 / top_k
    steps = [random.integers(1, 3, size=length) if gaps else np.ones(length) for length in length_S]
    position_T = np.concatenate([np.cumsum(np.concatenate(steps[at : at + 2])) for at in range(0, len(steps), 2)])
    tensors = {
        "expert_ids": ids_LTK.astype(np.uint8),
        "scores": scores_LTK.astype(np.float16),
        # The ids do not start at 0, and the positions of every other sequence go on where the one before it ends.
        "sequence_id": np.repeat(np.arange(len(length_S)) * 3 + 7, length_S).astype(np.int32),
        "position": position_T.astype(np.int32),
    }
    facts = {
        "format": "moe-trace-v1",
        "model": "tiny",
        "num_experts": str(num_experts),
        "top_k": str(top_k),
        "score": "softmax over the top-k" if normalised else "softmax, not renormalised",
        "phase": phase,
        "domain": "words",
        "source": "a test",
        "licence": "MIT",
    }
    save_file({name: np.ascontiguousarray(of) for name, of in tensors.items()}, path, {**facts, **metadata})
    return path


def loads_entry(**changes) -> dict:
    entry = {"model": "tiny", "top_k": 2, "domain": "words", "source": "a test", "licence": "MIT"}
    return {**entry, "load_E_by_layer": {"0": [6, 2, 0, 8], "7": [4, 4, 4, 4]}, **changes}


def write_loads(path: Path, *entries: dict) -> Path:
    path.write_text(json.dumps(entries))
    return path


# ---- oracles: plain loops over tokens ----------------------------------------------------------------------------


def count(ids: list[list[int]], num_experts: int) -> list[int]:
    load = [0] * num_experts
    for chosen in ids:
        for expert in chosen:
            load[expert] += 1
    return load


def fullest_over_mean(loads: list[int]) -> float:
    return max(loads) / (sum(loads) / len(loads))


def slow_rank_load(load: list[int], ep_size: int) -> float:
    per_rank = [0] * ep_size
    for expert, pairs in enumerate(load):
        per_rank[expert // (len(load) // ep_size)] += pairs
    return fullest_over_mean(per_rank)


def slow_cv(load: list[int]) -> float:
    mean = sum(load) / len(load)
    return math.sqrt(sum((pairs - mean) ** 2 for pairs in load) / len(load)) / mean


def slow_entropy(load: list[int]) -> float:
    shares = [pairs / sum(load) for pairs in load]
    return -sum(share * math.log(share) for share in shares if share > 0) / math.log(len(load))


def slow_overlap(ids: list[list[int]], sequence_id: list[int], position: list[int]) -> float | None:
    common = [
        len(set(ids[t]) & set(ids[t + 1]))
        for t in range(len(ids) - 1)
        if sequence_id[t] == sequence_id[t + 1] and position[t + 1] - position[t] == 1
    ]
    return sum(common) / len(common) if common else None


def slow_batches(sequences: list[list[int]], phase: str, batch_size: int) -> list[list[int]]:
    if phase == "prefill":
        tokens = list(itertools.chain(*sequences))
        return [tokens[at : at + batch_size] for at in range(0, len(tokens) - batch_size + 1, batch_size)]
    waiting, running, steps = [list(tokens) for tokens in sequences], [], []
    while True:
        while len(running) < batch_size and waiting:
            running.append(waiting.pop(0))
        if len(running) < batch_size:
            return steps
        steps.append([tokens.pop(0) for tokens in running])
        running = [tokens for tokens in running if tokens]


# ---- statistics --------------------------------------------------------------------------------------------------


traces = st.fixed_dictionaries(
    {
        "length_S": st.lists(st.integers(1, 12), min_size=1, max_size=9),
        "num_layers": st.integers(1, 2),
        "num_experts": st.sampled_from([4, 6, 7, 8, 16]),
        "top_k": st.integers(1, 3),
        "phase": st.sampled_from(["prefill", "decode"]),
        "normalised": st.booleans(),
        "gaps": st.booleans(),
        "seed": st.integers(0, 1000),
    }
)


@given(st.sampled_from([5, 1 << 14]), traces)
def test_every_statistic_equals_a_plain_loop(chunk, fields):
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_CHUNK", chunk)
        trace = open_trace(write_trace(Path(folder) / "tiny.safetensors", **fields))
        recording = trace_statistics(trace)
        layers = [tuple(of.tolist() for of in trace.read_layer(index)) for index in range(trace.num_layers)]
        with safe_open(trace.path, "np") as file:
            sequence_id, position = (file.get_tensor(name).tolist() for name in ("sequence_id", "position"))
    num_experts, top_k = fields["num_experts"], fields["top_k"]
    by_id: dict[int, list[int]] = {}
    for token, sequence in enumerate(sequence_id):
        by_id.setdefault(sequence, []).append(token)
    assert (recording.num_tokens, recording.num_sequences) == (len(sequence_id), len(by_id))
    assert recording.ep_sizes == tuple(size for size in (2, 4, 8) if num_experts % size == 0 and size < num_experts)
    for (ids, scores), layer in zip(layers, recording.layers, strict=True):
        load = count(ids, num_experts)
        assert layer.load_E.tolist() == load
        assert layer.peak_load == pytest.approx(fullest_over_mean(load))
        for size in recording.ep_sizes:
            assert layer.rank_load(size) == pytest.approx(slow_rank_load(load, size))
        assert layer.load_cv == pytest.approx(slow_cv(load))
        assert layer.load_entropy == pytest.approx(slow_entropy(load), abs=1e-12)
        means = [sum(row[rank] for row in scores) / len(scores) for rank in range(top_k)]
        assert layer.mean_score_K.tolist() == pytest.approx(means)
        assert layer.decay.tolist() == pytest.approx([mean / means[0] for mean in means])
        share = None if fields["normalised"] else pytest.approx(sum(map(sum, scores)) / len(scores))
        assert recording.topk_share(layer) == share
        assert layer.neighbour_overlap == pytest.approx(slow_overlap(ids, sequence_id, position))
        for size in module.BATCH_SIZES:
            chosen = [[ids[t] for t in batch] for batch in slow_batches(list(by_id.values()), fields["phase"], size)]
            if not chosen:
                assert size not in layer.activated
                assert size not in layer.batch_peak
                continue
            distinct = [len({expert for row in batch for expert in row}) for batch in chosen]
            peaks = [fullest_over_mean(count(batch, num_experts)) for batch in chosen]
            assert layer.activated[size] == pytest.approx(sum(distinct) / len(distinct))
            assert layer.batch_peak[size] == pytest.approx(sum(peaks) / len(peaks))


@given(st.lists(st.integers(1, 9), min_size=1, max_size=12), st.integers(1, 6), st.sampled_from(["prefill", "decode"]))
def test_batches_are_full_take_a_token_once_and_keep_the_order_of_a_sequence(length_S, batch_size, phase):
    start_S = np.concatenate([[0], np.cumsum(length_S)])
    token_NB = batches(start_S, phase, batch_size)
    sequences = [list(range(first, end)) for first, end in itertools.pairwise(start_S.tolist())]
    assert token_NB.shape[1] == batch_size
    assert len(np.unique(token_NB)) == token_NB.size
    assert sorted(map(sorted, token_NB.tolist())) == sorted(map(sorted, slow_batches(sequences, phase, batch_size)))
    for tokens in sequences:
        rows = [int(np.argwhere(token_NB == token)[0, 0]) for token in tokens if (token_NB == token).any()]
        assert rows == sorted(rows)
        if phase == "decode":
            assert len(set(rows)) == len(rows), "a step takes one token of a sequence"


def test_a_collapsed_load_and_ranks_that_do_not_divide_the_experts():
    collapsed = LayerStatistics("0", np.array([0, 0, 12, 0]))
    assert (collapsed.peak_load, collapsed.load_entropy, collapsed.rank_load(2)) == (4.0, 0.0, 2.0)
    with pytest.raises(ValueError, match="ep_size: expected a divisor of 4 experts, got 3"):
        rank_load(collapsed.load_E, 3)


# ---- counts only -------------------------------------------------------------------------------------------------


def test_counts_give_loads_and_nothing_else(tmp_path):
    path = write_loads(tmp_path / "loads.json", loads_entry(), loads_entry(variant="chat", domain="law"))
    first, second = statistics(path)
    assert (first.model, second.model, second.domain) == ("tiny", "tiny (chat)", "law")
    assert (first.num_experts, first.num_tokens, first.num_sequences, first.phase) == (4, 8, None, None)
    assert [layer.name for layer in first.layers] == ["0", "7"]
    assert first.layers[0].peak_load == 2.0
    assert first.layers[0].mean_score_K is first.layers[0].neighbour_overlap is None
    assert first.batch_sizes == ()
    text = render(trace_tables([first, second]), "text")
    assert text.count("not recorded (counts only): top-k share, decay by rank, neighbour overlap, activated") == 2
    assert "Overview" in text
    assert "Overview" not in render(trace_tables([first]), "text")


LOADS = {
    "not JSON": ("{", "loads.json: expected JSON, got"),
    "nothing": ([], "loads.json: expected at least 1 of them, got []"),
    "no model": ([{k: v for k, v in loads_entry().items() if k != "model"}], "loads.json: 0.model: missing"),
    "unknown key": ([loads_entry(tokens=3)], "loads.json: 0.tokens: no such key"),
    "negative": ([loads_entry(load_E_by_layer={"0": [4, -1]})], "0.load_E_by_layer.0.1: expected at least 0, got -1"),
    "uneven layers": (
        [loads_entry(load_E_by_layer={"0": [2, 2, 2], "1": [2, 2]})],
        "expected the same number of experts in every layer, got [2, 3]",
    ),
    "too few experts": ([loads_entry(load_E_by_layer={"0": [4, 4]})], "expected more experts than top_k (2), got 2"),
    "empty layer": ([loads_entry(load_E_by_layer={"0": [0, 0, 0]})], "expected top_k (2) pairs of each token"),
    "a lost token": (
        [loads_entry(load_E_by_layer={"0": [2, 2, 2], "1": [2, 2, 4]})],
        "expected top_k (2) pairs of each token in every layer, got [6, 8] pairs",
    ),
}


@pytest.mark.parametrize("name", LOADS)
def test_a_file_of_loads_that_cannot_be_used_is_one_clear_line(tmp_path, name):
    content, message = LOADS[name]
    path = tmp_path / "loads.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    with pytest.raises(ValueError, match=r"loads\.json") as error:
        trace_info(path)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["no.json", "no.safetensors"])
def test_a_missing_file_is_named(tmp_path, name):
    with pytest.raises(ValueError, match=f"{name}: no such file"):
        trace_info(tmp_path / name)


# ---- table -------------------------------------------------------------------------------------------------------


def test_the_table_has_a_row_per_layer_and_closes_with_mean_worst_and_uniform(tmp_path):
    path = write_trace(tmp_path / "tiny.safetensors", length_S=[40, 30], num_layers=3, num_experts=16, top_k=4)
    recording = trace_statistics(open_trace(path))
    rows = trace_tables([recording])[0].frame.set_index("layer")
    assert list(rows.index) == ["0", "1", "2", "mean", "worst", "uniform"]
    of_loads = ["peak", "EP 2", "EP 4", "EP 8", "CV", "entropy"]
    assert list(rows.columns) == [*of_loads, "share", "last/1st", "overlap", "B 4", "B 16", "B 64"]
    for layer in recording.layers:
        values = [layer.peak_load, *map(layer.rank_load, (2, 4, 8)), layer.load_cv, layer.load_entropy]
        values += [recording.topk_share(layer), layer.decay[-1], layer.neighbour_overlap]
        assert rows.loc[layer.name].tolist() == values + [layer.activated[size] for size in (4, 16, 64)]
    numbers = rows.loc[["0", "1", "2"]].to_numpy()
    assert rows.loc["mean"].tolist() == pytest.approx(numbers.mean(axis=0).tolist())
    least, most = numbers.min(axis=0), numbers.max(axis=0)
    worst = [*most[:5], least[5], math.nan, math.nan, least[8], *most[9:]]
    assert rows.loc["worst"].tolist() == pytest.approx(worst, nan_ok=True)
    assert [recording.uniform_activated(size) for size in (1, 2)] == [4, 7]  # 16 (1 - (12 / 16) ** 2)
    uniform = [1.0] * 4 + [0.0, 1.0, math.nan, math.nan, 1.0, *map(recording.uniform_activated, (4, 16, 64))]
    assert rows.loc["uniform"].tolist() == pytest.approx(uniform, nan_ok=True)


def test_the_heading_says_what_was_recorded(tmp_path):
    path = write_trace(tmp_path / "tiny.safetensors", phase="decode", normalised=True)
    text = trace_info(path)
    for part in (
        "tiny: 2 layers x 8 experts, top-3, 13 tokens in 3 sequences",
        "domain: words; phase: decode; scores: softmax over the top-k (normalised over the top-k)",
        f"file: tiny.safetensors; sha256: {open_trace(path).sha256()[:12]}",
        "a batch of B: one step of B sequences that decode side by side",
    ):
        assert part in text
    raw = trace_info(write_trace(tmp_path / "raw.safetensors"))
    assert "scores: softmax, not renormalised (raw: shares of all experts' mass)" in raw
    assert "a batch of B: B consecutive tokens" in raw


def test_scores_that_nobody_recorded_are_not_shown_and_no_directory_is_written_over(tmp_path):
    path = write_trace(tmp_path / "ids.safetensors", score="assumed equal", equal=True)
    text = trace_info(path)
    assert "scores: not recorded (assumed equal)" in text
    assert "not recorded (no scores): top-k share, decay by rank" in text
    assert trace_tables(statistics(path))[0].frame[["share", "last/1st"]].isna().all(axis=None)
    assert names_drawn(path, tmp_path) == [f"ids-{name}.svg" for name in ("load", "experts", "batches")]
    with pytest.raises(ValueError, match=r"ids.safetensors: figures cannot be written there \(File exists\)"):
        trace_info(path, path)


def names_drawn(recording: Path, out: Path) -> list[str]:
    return [path.name for path in trace_figures.draw_trace_figures(statistics(recording), out, ["svg"])]


def assert_tables_fit(recordings: list[RecordingStatistics]) -> None:
    """In a terminal all tables but overviews, which hold domains as long as these are; titles and notes may wrap."""
    for table in trace_tables(recordings):
        if not table.title.startswith("Overview"):
            lines = render([replace(table, title="", notes=())], "text", width=WIDTH).splitlines()
            assert max(map(len, lines)) <= WIDTH


ODD = {
    "many experts": {"num_experts": 256, "top_k": 20, "length_S": [700]},
    "a single token": {"length_S": [1], "num_layers": 1},
    "no neighbours, an odd number of experts": {"length_S": [1, 1, 1], "phase": "decode", "num_experts": 7, "top_k": 1},
    "many layers, long words": {
        "num_layers": 40,
        "num_experts": 12,
        "domain": "aVeryLongWord" * 8 + " and more" * 20,
        "model": "$\\frac$ " * 9,
        "source": "from " * 50,
    },
}


@pytest.mark.parametrize("name", ODD)
def test_odd_recordings_fit_the_table_and_the_figures(tmp_path, name):
    path = write_trace(tmp_path / "odd.safetensors", **ODD[name])
    assert_tables_fit(statistics(path))
    assert_figures_are_legible(statistics(path))


# ---- figures -----------------------------------------------------------------------------------------------------


def assert_figures_are_legible(recordings: list[RecordingStatistics]) -> None:
    with house_style():
        for name, figure in trace_figures._figures(recordings):
            assert_nothing_is_clipped(figure)
            for axes in figure.axes:
                assert axes.get_ylabel(), name
                for ticks in (axes.get_xticklabels(), axes.get_yticklabels()):
                    labels = [label.get_window_extent() for label in ticks if label.get_text()]
                    assert not any(one.overlaps(other) for one, other in itertools.combinations(labels, 2)), name


def test_figures_are_written_and_name_no_folder(tmp_path):
    path = write_trace(tmp_path / "tiny.safetensors")
    names = ["load", "experts", "scores", "batches"]
    files = [f"tiny-{name}.{suffix}" for name in names for suffix in ("png", "svg")]
    assert trace_info(path, tmp_path / "one").splitlines()[-8:] == [str(tmp_path / "one" / of) for of in files]
    assert sorted(of.name for of in (tmp_path / "one").iterdir()) == sorted(files)
    for of in files:
        content = (tmp_path / "one" / of).read_bytes()
        assert len(content) > 10_000
        assert str(tmp_path).encode() not in content


def test_figures_of_counts(tmp_path):
    one = write_loads(tmp_path / "one.json", loads_entry())
    assert names_drawn(one, tmp_path) == ["one-load.svg", "one-experts.svg"]
    several = write_loads(tmp_path / "several.json", loads_entry(), loads_entry(domain="law"), loads_entry(model="m"))
    assert names_drawn(several, tmp_path) == ["several-load.svg"]


# ---- real recordings ---------------------------------------------------------------------------------------------

DEEPSEEK = tuple(f"deepseek-v2-lite-{domain}.safetensors" for domain in ("intent", "summary", "translation"))
GPT_OSS, LOADS_FILE = "gpt-oss-20b-mixed.safetensors", "expert_loads.json"


@functools.cache
def recorded(name: str) -> tuple[RecordingStatistics, ...]:
    path = TRACES / name
    if not path.exists():
        assert "MOE_EP_BENCH_REQUIRE_TRACES" not in os.environ, f"{path} is missing"
        pytest.skip(f"no recordings at {TRACES}")
    return tuple(statistics(path))


def over_layers(recording: RecordingStatistics, value) -> tuple[float, float, float]:
    """Least, mean and most over layers."""
    values = [value(layer) for layer in recording.layers]
    return min(values), sum(values) / len(values), max(values)


# Means over layers of the peak load and of the neighbour overlap.
KNOWN = dict(zip((*DEEPSEEK, GPT_OSS), ((3.8, 1.58), (4.3, 1.75), (5.6, 1.62), (2.6, None)), strict=True))


@pytest.mark.parametrize("name", KNOWN)
def test_statistics_of_recordings_are_as_known(name):
    (recording,) = recorded(name)
    peak_load, overlap = KNOWN[name]
    assert round(over_layers(recording, lambda layer: layer.peak_load)[1], 1) == peak_load
    assert 1.4 <= round(over_layers(recording, lambda layer: layer.rank_load(8))[1], 1) <= 1.7
    for size in recording.batch_sizes[1:7]:  # fewer experts than uniform choices
        activated = over_layers(recording, lambda layer, size=size: layer.activated[size])[1]
        assert activated < recording.uniform_activated(size)
    if overlap is None:
        assert recording.topk_share(recording.layers[0]) is None
        assert recording.batch_sizes[-1] == 64  # of 120 sequences
    else:
        assert round(over_layers(recording, lambda layer: layer.neighbour_overlap)[1], 2) == overlap
        assert recording.uniform_overlap == 0.5625
        assert 0.33 <= over_layers(recording, recording.topk_share)[1] <= 0.40
        assert recording.batch_sizes[-1] == 1024


def test_recorded_peak_loads_of_counts():
    peaks: dict[str, list[float]] = {}
    for recording in recorded(LOADS_FILE):
        peaks.setdefault(recording.model.split(" ")[0], []).extend(layer.peak_load for layer in recording.layers)
    ends = {model: (round(min(values), 1), round(max(values), 1)) for model, values in peaks.items()}
    assert ends == {"olmoe-1b-7b": (2.5, 7.8), "mixtral-8x7b": (1.1, 2.0)}


@pytest.mark.parametrize("name", [GPT_OSS, LOADS_FILE])
def test_every_recording_fits_the_table_and_the_figures(name):
    recordings = list(recorded(name))
    assert_tables_fit(recordings)
    assert str(TRACES) not in render(trace_tables(recordings), "text")
    assert_figures_are_legible(recordings)
