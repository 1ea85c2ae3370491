"""Eight layers of a recording, or of counts, stand for all of them, and the answer says how far all differ."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import yaml
from refusals import refusal
from trace_files import trace_parts, write_parts

from moe_ep_bench.analysis.advice import Advice, advice_lines, read_advice
from moe_ep_bench.analysis.cases import cases, load_timed
from moe_ep_bench.analysis.store import load
from moe_ep_bench.bench.advise_config import Bounds, Question, ask
from moe_ep_bench.bench.layers import LAYERS, stand_ins
from moe_ep_bench.cli import main, make_parser
from moe_ep_bench.errors import OK
from moe_ep_bench.facts import AskedLayers

OLMOE = ("--model", "olmoe-1b-7b", "--ep", 8, "--tokens", 64)


def question(*arguments: object) -> Question:
    options = make_parser().parse_args(["advise", *map(str, arguments)])
    return ask(options, Bounds.of(options.max_dropped, options.max_lost_mass))


def layers_of(asked: Question) -> list[int]:
    """Layers that are asked, each once."""
    return list(dict.fromkeys(one.experiment.workload.layer for one in asked.comparisons))


def said_of(asked: Question | Advice) -> AskedLayers | None:
    """What is said of layers that stand for all; None = all that there are, or that were named, are asked."""
    return next((one.layers for one in asked.assumptions if one.kind == "asked_layers"), None)


def recording(path: Path, kinds: Sequence[int], length_S: Sequence[int] = (16,) * 24) -> Path:
    """A recording whose layers are of few kinds: equal numbers are equal layers, and a greater one has more skew."""
    shape = {"length_S": length_S, "num_experts": 64, "top_k": 8, "num_layers": 1, "model": "allenai/OLMoE"}
    made = {kind: trace_parts(**shape, popularity=float(kind), seed=kind) for kind in {*kinds}}
    tensors, metadata = made[kinds[0]]
    layers = {name: np.concatenate([made[kind][0][name] for kind in kinds]) for name in ("expert_ids", "scores")}
    return write_parts(path, {**tensors, **layers}, metadata)


@pytest.fixture(scope="module")
def of_kinds(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sixteen layers of three kinds, whose shares eight layers can have: six, six and four."""
    return recording(tmp_path_factory.mktemp("kinds") / "kinds.safetensors", [0, 1, 2, 1, 0, 1, 2, 0] * 2)


# ---- which ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_layers", [8, 9, 16, 26, 58, 61, 92])
def test_each_that_is_asked_stands_for_as_many_layers(num_layers: int) -> None:
    """The oracle: eight of each layer in the order of loads, cut into eight parts, of which each has a middle."""
    load_L = np.random.default_rng(num_layers).permutation(num_layers) / 7
    parts = np.repeat(np.argsort(load_L), LAYERS).reshape(LAYERS, num_layers)
    assert stand_ins(load_L) == sorted(parts[:, num_layers // 2].tolist())
    assert len({*stand_ins(load_L)}) == LAYERS


def test_layers_without_a_difference_are_asked_throughout_the_depth() -> None:
    assert stand_ins([1.0] * 16) == [1, 3, 5, 7, 9, 11, 13, 15]


@pytest.mark.parametrize("num_layers", [1, 8])
def test_as_few_layers_are_all_asked(num_layers: int, tmp_path: Path) -> None:
    asked = question(*OLMOE, "--trace", recording(tmp_path / "few.safetensors", [*range(num_layers)]))
    assert layers_of(asked) == [*range(num_layers)]
    assert said_of(asked) is None
    config = yaml.safe_load(asked.text)
    assert config["workload"]["layer"] == "all"
    assert config["workload"]["num_batches"] == (10 if num_layers == 1 else 2)


def test_whoever_names_layers_gets_exactly_those(of_kinds: Path, tmp_path: Path) -> None:
    few = question(*OLMOE, "--trace", of_kinds)
    assert len(layers_of(few)) == LAYERS
    assert said_of(few).asked == layers_of(few)
    named = {
        "workload.layer=all": [*range(16)],
        "workload.layer=3": [3],
        "sweep.workload.layer=[2, 15, 4, 7, 8, 9, 10, 11, 12]": [2, 15, 4, 7, 8, 9, 10, 11, 12],
    }
    for words, layers in named.items():
        asked = question(*OLMOE, "--trace", of_kinds, "--set", words)
        assert layers_of(asked) == layers
        assert said_of(asked) is None
    config = tmp_path / "own.yaml"
    config.write_text(question(*OLMOE, "--trace", of_kinds, "--set", "workload.layer=all").text)
    assert len(layers_of(question(config))) == 16, "a config says which"


def test_layers_of_counts_are_chosen_by_their_counts(tmp_path: Path) -> None:
    """Layer l of twelve gives the first of eight ranks 12 - l pairs more than the others; the model has more layers."""
    count_LE = np.full((16, 64), 100)
    count_LE[12:] = 0
    count_LE[:12, 0] += np.arange(12, 0, -1)
    path = tmp_path / "counts.json"
    path.write_text(json.dumps(count_LE.tolist()))
    asked = question(*OLMOE, "--counts", path)
    assert layers_of(asked) == sorted(11 - place for place in (0, 2, 3, 5, 6, 8, 9, 11))
    fullest = [8 * (800 + more) / (6400 + more) for more in range(1, 13)]
    found = said_of(asked)
    assert found.num_layers == 12
    assert found.fullest_rank[8] == pytest.approx((fullest[0], np.median(fullest), fullest[-1]))


def test_equal_questions_have_equal_layers_and_each_ep_size_has_its_spread(of_kinds: Path) -> None:
    both = (*OLMOE, "--trace", of_kinds, "--set", "sweep.layer.ep_size=[4, 8]")
    first, second = question(*both), question(*both)
    assert first.text == second.text
    found = said_of(first)
    assert [*found.fullest_rank] == [4, 8]
    assert "at EP 4 (median " in first.plan
    assert "at EP 8 (median " in first.plan
    least, median, most = found.fullest_rank[8]
    assert least < median < most, "kinds differ"


# ---- the answer -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_eight_layers_answer_as_all_do_where_layers_are_alike(of_kinds: Path, tmp_path: Path, capsys) -> None:
    """All layers, asked one by one, are the oracle: shares of eight are those of sixteen, so that medians are equal."""
    command = ["advise", *map(str, OLMOE), "--trace", str(of_kinds), "--set", "emulate.overlap=none"]
    few, every = tmp_path / "few", tmp_path / "every"
    assert main([*command, "--out", str(every), "--set", "workload.layer=all"]) == OK
    assert "chosen by load" not in capsys.readouterr().out
    assert main([*command, "--out", str(few)]) == OK
    said = capsys.readouterr().out
    (answer,), (expected,) = (read_advice(one).answers for one in (few, every))
    assert (answer.pick and answer.pick.label) == (expected.pick and expected.pick.label)
    assert answer.native.median_ms == pytest.approx(expected.native.median_ms, rel=1e-9)
    assert answer.native.whole.ms == pytest.approx(expected.native.whole.ms, rel=1e-9), "each stands for two"
    speedups, spreads = ({one.label: getattr(one, name) for one in answer.candidates} for name in ("speedup", "spread"))
    assert {one.label: one.speedup for one in expected.candidates} == pytest.approx(speedups, rel=1e-9)
    assert {one.label: one.spread for one in expected.candidates} == spreads

    apart = cases(load(every, join_draws=False)).query("role == 'baseline'")["fullest_rank"]
    assert len(apart) == 16
    found = said_of(read_advice(few))
    spread = found.fullest_rank[8]
    assert spread == pytest.approx((apart.min(), apart.median(), apart.max())), "of all layers, without routing them"
    least, median, most = spread
    line = (
        f"8 of 16 layers, chosen by load (--set workload.layer=all: all); over all layers native's fullest rank has "
        f"{least:.2f} to {most:.2f} times the mean (median {median:.2f})."
    )
    assert said.count(line) == 1, "with the answer, and not among the notes again"
    lines = [one for block in advice_lines(read_advice(few)) for one in block.splitlines()]
    assert line in lines

    assert main(["advise", str(few), "--max-dropped", "1%"]) == OK
    assert line in capsys.readouterr().out, "results that are read again"
    written = {part: part.stat().st_mtime_ns for part in (few / "cases").iterdir()}
    assert main([*command, "--out", str(few)]) == OK
    assert capsys.readouterr().out == said
    assert {part: part.stat().st_mtime_ns for part in (few / "cases").iterdir()} == written, "nothing is done again"
    assert len(load_timed(few).comparisons) == 1


# ---- what is wrong with the rest -------------------------------------------------------------------------------------


def test_a_layer_that_nobody_asks_is_read_and_refused_all_the_same(tmp_path: Path) -> None:
    path = recording(tmp_path / "damaged.safetensors", [*range(12)])
    (asked := layers_of(question(*OLMOE, "--trace", path))).sort()
    layer = next(layer for layer in range(12) if layer not in asked)
    tensors, metadata = trace_parts(length_S=(16,) * 24, num_experts=64, top_k=8, num_layers=12, model="allenai/OLMoE")
    tensors["expert_ids"][layer, 5] = 77
    write_parts(path, tensors, metadata)
    assert f"damaged.safetensors: layer {layer}: token 5: " in refusal(question, *OLMOE, "--trace", path)


def test_what_fits_no_layer_is_refused_by_its_own_words(of_kinds: Path, tmp_path: Path) -> None:
    of_model = "--ep: layer.ep_size: expected a divisor of the 64 experts of OLMoE-1B-7B, got 7"
    assert refusal(question, *OLMOE, "--ep", 7, "--trace", of_kinds).startswith(of_model)
    short = recording(tmp_path / "short.safetensors", [*range(9)])
    both = f"sweep.workload.trace=[[{of_kinds}], [{short}]]"
    assert "short.safetensors: layer: expected a row of the recording, 0 to 8, got " in refusal(
        question, *OLMOE, "--trace", of_kinds, "--set", both
    )
    counts = tmp_path / "counts.json"
    counts.write_text(json.dumps([[1] * 48] * 12))
    assert "skew_from: expected counts of 64 experts, got 48" in refusal(question, *OLMOE, "--counts", counts)
