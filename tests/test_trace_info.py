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


def test_decoding_sequences_replace_one_another_where_they_end():
    start_S = np.array([0, 3, 4, 6, 9])  # of 3, 1, 2 and 3 tokens
    assert batches(start_S, "decode", 2).tolist() == [[0, 3], [1, 4], [2, 5]]
    assert batches(start_S, "decode", 5).shape == (0, 5)
    assert batches(start_S, "prefill", 4).tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert batches(start_S, "prefill", 16).shape == (0, 16)


def test_loads_at_the_ends_of_their_scales():
    collapsed, balanced = LayerStatistics("0", np.array([0, 0, 12, 0])), LayerStatistics("0", np.array([3, 3, 3, 3]))
    assert (collapsed.peak_load, collapsed.load_entropy, collapsed.rank_load(2)) == (4.0, 0.0, 2.0)
    assert collapsed.load_cv == pytest.approx(math.sqrt(3))
    assert (balanced.peak_load, balanced.load_cv, balanced.load_entropy, balanced.rank_load(2)) == (1.0, 0.0, 1.0, 1.0)
    with pytest.raises(ValueError, match="ep_size: expected a divisor of 4 experts, got 3"):
        rank_load(balanced.load_E, 3)


def test_uniform_choices_meet_their_expectations(tmp_path):
    """The closed forms, against tokens that do choose uniformly."""
    random = np.random.default_rng(3)
    num_tokens, num_experts, top_k = 1 << 16, 16, 4
    ids_TK = random.permuted(np.tile(np.arange(num_experts), (num_tokens, 1)), axis=1)[:, :top_k]
    path = write_trace(tmp_path / "t.safetensors", length_S=[num_tokens], num_layers=1, num_experts=16, top_k=4)
    with safe_open(path, "np") as file:
        content = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        metadata = file.metadata()
    save_file({**content, "expert_ids": np.ascontiguousarray(ids_TK[None].astype(np.uint8))}, path, metadata)
    recording = trace_statistics(open_trace(path))
    (layer,) = recording.layers
    assert layer.neighbour_overlap == pytest.approx(recording.uniform_overlap, rel=0.02)
    assert recording.uniform_overlap == 1.0
    for size in (1, 2, 4, 8, 16, 64):
        assert layer.activated[size] == pytest.approx(recording.uniform_activated(size), rel=0.02)
    assert recording.uniform_activated(1) == top_k


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
    "half a pair": ([loads_entry(load_E_by_layer={"0": [0.5, 1]})], "0.load_E_by_layer.0.0: expected a whole number"),
    "no layers": ([loads_entry(load_E_by_layer={})], "0.load_E_by_layer: expected at least 1 of them"),
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
    uniform = [1.0] * 4 + [0.0, 1.0, math.nan, math.nan, 1.0, *map(recording.uniform_activated, (4, 16, 64))]
    assert rows.loc["uniform"].tolist() == pytest.approx(uniform, nan_ok=True)


def test_the_heading_says_what_was_recorded(tmp_path):
    path = write_trace(tmp_path / "tiny.safetensors", phase="decode", normalised=True)
    text = trace_info(path)
    assert trace_tables(statistics(path))[0].frame["share"].isna().all()
    for part in (
        "tiny: 2 layers x 8 experts, top-3, 13 tokens in 3 sequences",
        "domain: words; phase: decode; scores: softmax over the top-k (normalised over the top-k)",
        "source: a test; licence: MIT",
        f"file: tiny.safetensors; sha256: {open_trace(path).sha256()[:12]}",
        "a batch of B: one step of B sequences that decode side by side",
    ):
        assert part in text
    assert str(tmp_path) not in text
    raw = trace_info(write_trace(tmp_path / "raw.safetensors"))
    assert "scores: softmax, not renormalised (raw: shares of all experts' mass)" in raw
    assert "a batch of B: B consecutive tokens" in raw


def test_scores_that_nobody_recorded_are_not_shown(tmp_path):
    path = write_trace(tmp_path / "ids.safetensors", score="assumed equal", equal=True)
    text = trace_info(path)
    assert "scores: not recorded (assumed equal)" in text
    assert "not recorded (no scores): top-k share, decay by rank" in text
    assert trace_tables(statistics(path))[0].frame[["share", "last/1st"]].isna().all(axis=None)
    assert names_drawn(path, tmp_path) == [f"ids-{name}.svg" for name in ("load", "experts", "batches")]


def names_drawn(recording: Path, out: Path) -> list[str]:
    return [path.name for path in trace_figures.draw_trace_figures(statistics(recording), out, ["svg"])]


def assert_tables_fit(recordings: list[RecordingStatistics]) -> None:
    """In a terminal all tables but overviews, which hold domains as long as these are; titles and notes may wrap."""
    for table in trace_tables(recordings):
        if not table.title.startswith("Overview"):
            lines = render([replace(table, title="", notes=())], "text", width=WIDTH).splitlines()
            assert max(map(len, lines)) <= WIDTH


ODD = {
    "many experts": {"num_experts": 256, "top_k": 20, "length_S": [700, 600]},
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
    assert_nothing_is_clipped_and_no_text_hides_another(statistics(path))


# ---- figures -----------------------------------------------------------------------------------------------------


def assert_nothing_is_clipped_and_no_text_hides_another(recordings: list[RecordingStatistics]) -> None:
    with house_style():
        for name, figure in trace_figures._figures(recordings):
            figure.draw_without_rendering()
            boxes = [artist.get_window_extent() for artist in (*figure.texts, *figure.legends)]
            boxes += [axes.get_tightbbox() for axes in figure.axes]
            for box in boxes:
                assert min(box.x0, box.y0) >= 0, name
                assert box.x1 <= figure.bbox.x1, name
                assert box.y1 <= figure.bbox.y1, name
            assert not any(one.overlaps(other) for one, other in itertools.combinations(boxes, 2)), name
            for axes in figure.axes:
                assert axes.get_ylabel(), name
                for ticks in (axes.get_xticklabels(), axes.get_yticklabels()):
                    labels = [label.get_window_extent() for label in ticks if label.get_text()]
                    assert not any(one.overlaps(other) for one, other in itertools.combinations(labels, 2)), name


def test_figures_are_written_and_equal_to_the_byte_on_a_second_run(tmp_path):
    path = write_trace(tmp_path / "tiny.safetensors")
    names = ["load", "experts", "scores", "batches"]
    files = [f"tiny-{name}.{suffix}" for name in names for suffix in ("png", "svg")]
    assert trace_info(path, tmp_path / "one").splitlines()[-8:] == [str(tmp_path / "one" / of) for of in files]
    assert sorted(of.name for of in (tmp_path / "one").iterdir()) == sorted(files)
    (tmp_path / "two").mkdir()
    again = names_drawn(path, tmp_path / "two")
    assert again == files[1::2]
    for of in files:
        content = (tmp_path / "one" / of).read_bytes()
        assert len(content) > 10_000
        assert of not in again or content == (tmp_path / "two" / of).read_bytes()
        assert str(tmp_path).encode() not in content


def test_figures_of_counts(tmp_path):
    one = write_loads(tmp_path / "one.json", loads_entry())
    assert names_drawn(one, tmp_path) == ["one-load.svg", "one-experts.svg"]
    several = write_loads(tmp_path / "several.json", loads_entry(), loads_entry(domain="law"), loads_entry(model="m"))
    assert_nothing_is_clipped_and_no_text_hides_another(statistics(several))
    assert names_drawn(several, tmp_path) == ["several-load.svg"]


def test_a_directory_that_cannot_be_written_is_named(tmp_path):
    path = write_trace(tmp_path / "tiny.safetensors")
    with pytest.raises(ValueError, match=r"tiny.safetensors: figures cannot be written there \(File exists\)"):
        trace_info(path, path)


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


def test_recorded_peak_loads():
    means, worst = {}, {}
    for name in DEEPSEEK:
        _, means[name], worst[name] = over_layers(recorded(name)[0], lambda layer: layer.peak_load)
    assert [round(mean, 1) for mean in means.values()] == [3.8, 4.3, 5.6]
    assert round(max(worst.values()), 1) == 7.7
    _, mean, most = over_layers(recorded(GPT_OSS)[0], lambda layer: layer.peak_load)
    assert (round(mean, 1), round(most, 1)) == (2.6, 3.5)


def test_mixed_domains_are_less_skewed_than_any_of_them():
    single = [recorded(name)[0] for name in DEEPSEEK]
    mixed = [
        LayerStatistics(layers[0].name, sum(layer.load_E for layer in layers))
        for layers in zip(*(recording.layers for recording in single), strict=True)
    ]
    mean = sum(layer.peak_load for layer in mixed) / len(mixed)
    assert round(mean, 1) == 3.3  # of three domains
    assert mean < min(over_layers(recording, lambda layer: layer.peak_load)[1] for recording in single)


def test_recorded_peak_loads_of_counts():
    peaks: dict[str, list[float]] = {}
    for recording in recorded(LOADS_FILE):
        model = recording.model.split(" ")[0]
        peaks.setdefault(model, []).extend(layer.peak_load for layer in recording.layers)
    ends = {model: (round(min(values), 1), round(max(values), 1)) for model, values in peaks.items()}
    assert ends == {"olmoe-1b-7b": (2.5, 7.8), "mixtral-8x7b": (1.1, 2.0)}
    assert {len(recording.layers) for recording in recorded(LOADS_FILE)} == {3, 32}


def test_recorded_rank_loads_at_ep_8():
    means, worst = [], []
    for name in DEEPSEEK:
        _, mean, most = over_layers(recorded(name)[0], lambda layer: layer.rank_load(8))
        means.append(round(mean, 1))
        worst.append(most)
    assert (min(means), max(means), round(max(worst), 1)) == (1.4, 1.7, 2.3)
    _, mean, most = over_layers(recorded(GPT_OSS)[0], lambda layer: layer.rank_load(8))
    assert (round(mean, 2), round(most, 2)) == (1.47, 1.99)  # of all its domains together


def test_recorded_overlap_and_share():
    overlaps = [over_layers(recorded(name)[0], lambda layer: layer.neighbour_overlap)[1] for name in DEEPSEEK]
    assert [round(overlap, 2) for overlap in overlaps] == [1.58, 1.75, 1.62]
    assert recorded(DEEPSEEK[0])[0].uniform_overlap == 0.5625
    shares = [over_layers(recorded(name)[0], recorded(name)[0].topk_share)[1] for name in DEEPSEEK]
    assert all(0.33 <= share <= 0.40 for share in shares)
    assert recorded(GPT_OSS)[0].topk_share(recorded(GPT_OSS)[0].layers[0]) is None


def test_recorded_batches_activate_fewer_experts_than_uniform_choices():
    for name in (*DEEPSEEK, GPT_OSS):
        (recording,) = recorded(name)
        for size in recording.batch_sizes[1:7]:
            assert over_layers(recording, lambda layer, size=size: layer.activated[size])[1] < (
                recording.uniform_activated(size)
            )
    assert recorded(GPT_OSS)[0].batch_sizes[-1] == 64  # of 120 sequences
    assert recorded(DEEPSEEK[0])[0].batch_sizes[-1] == 1024


@pytest.mark.parametrize("name", [DEEPSEEK[0], GPT_OSS, LOADS_FILE])
def test_every_recording_fits_the_table_and_the_figures(name):
    recordings = list(recorded(name))
    assert_tables_fit(recordings)
    assert str(TRACES) not in render(trace_tables(recordings), "text")
    assert_nothing_is_clipped_and_no_text_hides_another(recordings)
