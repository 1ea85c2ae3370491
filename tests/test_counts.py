"""Counts of experts as targets of a workload: every form, and what is none."""

from __future__ import annotations

import json
import re
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from refusals import refusal
from test_workload import top_k_load

from moe_ep_bench.analysis.cases import cases, load
from moe_ep_bench.analysis.columns import milliseconds
from moe_ep_bench.bench.plan import make_point
from moe_ep_bench.bench.point import ROUTING
from moe_ep_bench.cli import main
from moe_ep_bench.config.files import load_experiments
from moe_ep_bench.errors import UserError
from moe_ep_bench.facts.words import describe_workload
from moe_ep_bench.workload import targets
from moe_ep_bench.workload.targets import LayerCounts, read_counts

COUNTS = [[0, 0, 0, 0], [9, 1, 3, 3], [1, 9, 4, 2]]  # a dense layer and two others
PARTS = np.minimum(COUNTS, 2), np.array(COUNTS) - np.minimum(COUNTS, 2)  # of two passes
SHAPE = {"num_experts": 4, "top_k": 1, "hidden_size": 32, "ffn_hidden_size": 16}


FORMS = {
    "a matrix": COUNTS,
    "logical_count": {"logical_count": COUNTS},
    "passes": {"logical_count": [part.tolist() for part in PARTS]},
}


def as_rows(counts: LayerCounts) -> dict[int, list[float]]:
    return {layer: count_E.tolist() for layer, count_E in counts.loads.items()}


def written(folder: Path, content: Any = COUNTS) -> Path:
    path = folder / "counts.json"
    path.write_text(json.dumps(content))
    return path


def as_npz(folder: Path, **arrays: Any) -> Path:
    np.savez(folder / "counts.npz", **arrays)
    return folder / "counts.npz"


def as_csv(folder: Path, text: str) -> Path:
    (folder / "counts.csv").write_text(text)
    return folder / "counts.csv"


LONG = "layer,expert,count\n" + "".join(
    f"{layer}, {expert}, {count}\n" for layer, row in enumerate(COUNTS) for expert, count in enumerate(row) if count
)
WIDE = "layer,e0,e1,e2,e3\n" + "".join(f"{layer},{','.join(map(str, row))}\n" for layer, row in enumerate(COUNTS))
FILES = {
    "npz": lambda folder: as_npz(folder, logical_count=COUNTS, beside=[1]),
    "npz of one array": lambda folder: as_npz(folder, anything=COUNTS),
    "csv of counts": lambda folder: as_csv(folder, LONG),
    "csv of rows": lambda folder: as_csv(folder, WIDE),
    "csv without layers": lambda folder: as_csv(folder, WIDE.replace("layer,", "", 1).replace("\n0,", "\n")
        .replace("\n1,", "\n").replace("\n2,", "\n")),
}  # fmt: skip


@pytest.mark.parametrize("form", FILES)
def test_files_of_other_programs_give_the_same(form: str, tmp_path: Path) -> None:
    assert as_rows(read_counts(FILES[form](tmp_path))) == {1: COUNTS[1], 2: COUNTS[2]}


def claims_too_much(folder: Path) -> Path:
    """An array whose header says 2^50 numbers."""
    npy = folder / "counts.npy"
    np.save(npy, np.zeros((2, 2)))
    content = npy.read_bytes().replace(b"(2, 2)", b"(%d, 4)" % 2**48)
    with zipfile.ZipFile(folder / "counts.npz", "w") as archive:
        archive.writestr("counts.npy", content)
    return folder / "counts.npz"


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda folder: as_npz(folder, a=[1], b=[2]), "expected an array logical_count, or one alone; got a, b"),
        (lambda folder: as_npz(folder, a=np.array([{}], dtype=object)), "no npz of numbers"),
        (claims_too_much, "no npz of numbers"),
        (lambda folder: as_npz(folder, a=np.zeros((0, 4))), "lists of equal length; got array([]"),
        (lambda folder: as_npz(folder, a=np.zeros((3, 2, 0))), "lists of equal length; got array([]"),
        (lambda folder: as_npz(folder, a=np.full((1, 2), 1 + 2j)), "lists of equal length; got array([[1.+2.j"),
        (
            lambda folder: as_npz(folder, a=np.full((1, 2), 5, "datetime64[s]")),
            "lists of equal length; got array([['1970",
        ),
        (lambda folder: as_npz(folder, a=np.full((1, 2), 5, "timedelta64[s]")), "lists of equal length; got array([[5"),
        (
            lambda folder: as_npz(folder, a=np.full((2, 1, 2), 1e308)),
            "a number from 0 to 2^64 by layer and expert in lists of equal length; got 1e+308 at pass 0, row 0",
        ),
    ],
)
def test_a_file_that_holds_no_counts_is_one_line_and_nothing_in_it_is_run(make: Any, expected: str, tmp_path) -> None:
    with pytest.raises(UserError, match=re.escape(expected)):
        read_counts(make(tmp_path))


# What is wrong: the text of counts.csv, and what the line says behind the file's name.
NO_HEADER = "no CSV with a header: expected layer, expert, count, or a name for each expert"
TABLES = {
    "nothing": ("", NO_HEADER),
    "no header": (
        "5,6,7,8\n1,2,3,4\n",
        f"{NO_HEADER} (if numbers, all from 0 up), with layer or without; got '5,6,7,8'",
    ),
    "no header of decimals": ("0.0e+00,1.0e+00\n1.0e+00,2.0e+00\n", NO_HEADER),
    "no header behind a layer": ("layer,3,1\n0,1,2\n", NO_HEADER),
    "a column without a name": (",0,1\n0,5,6\n", NO_HEADER),
    "a name twice": ("layer,expert,count,count\n0,0,5,6\n", NO_HEADER),
    "no rows": ("layer,expert,count\n", "expected rows below the header, got none"),
    "a long row": ("layer,expert,count\n0,0,5\n0,1,5,9\n", "line 3: expected 3 values as in the header, got 4"),
    "long rows": ("a,b\n0,5,6\n1,7,8\n", "line 2: expected 2 values as in the header, got 3"),
    "a short row": ("a,b\n\n5\n", "line 3: expected 2 values as in the header, got 1"),
    "a great layer": ("layer,expert,count\n99999999999,0,1\n", "line 2: layer: expected a whole number from 0 to 8192"),
    "a negative layer": (
        "layer,expert,count\n-1,0,1\n",
        "line 2: layer: expected a whole number from 0 to 8192, got '-1'",
    ),
    "a layer between": ("layer,a,b\n0.5,5,6\n", "line 2: layer: expected a whole number from 0 to 8192, got '0.5'"),
    "no expert": ("layer,expert,count\n0,x,1\n", "line 2: expert: expected a whole number from 0 to 8192, got 'x'"),
    "a word": ("layer,expert,count\n0,0,many\n", "line 2: count: expected a number from 0 to 2^64, got 'many'"),
    "an empty count": ("layer,expert,count\n0,0,\n0,1,3\n", "line 2: count: expected a number from 0 to 2^64, got ''"),
    "negative in a sum": (
        "layer,expert,count\n0,0,8\n0,0,-5\n",
        "line 3: count: expected a number from 0 to 2^64, got '-5'",
    ),
    "endless": ("layer,expert,count\n0,0,inf\n", "line 2: count: expected a number from 0 to 2^64, got 'inf'"),
    "a word in a row": ("a,b\n1,x\n", "line 2: b: expected a number from 0 to 2^64, got 'x'"),
    "an empty one in a row": ("layer,a,b\n4,1,\n", "line 2: b: expected a number from 0 to 2^64, got ''"),
    "a field without an end": ('a,"' + "b" * 200_000, "line 1: no CSV: field larger than field limit"),
}


@pytest.mark.parametrize("name", TABLES)
def test_a_table_that_is_misread_with_ease_is_refused_with_its_line(name: str, tmp_path: Path) -> None:
    text, words = TABLES[name]
    path = as_csv(tmp_path, text)
    assert refusal(read_counts, path).startswith(f"{path}: {words}")


@pytest.mark.parametrize(
    "text",
    [
        "layer,e0,e1\n10,1,2\n3,3,4\n0,5,6\n",
        "e1,Layer ,e0\n1,10,2\n3,3,4\n5,0,6\n",
        "\ufefflayer,0,1\n\n10,1,2\n3,1,4\n3,2,0\n0,5,6\n",
        "pass,Layer,Expert,Count\na,10,0,1\na,10,1,2\na,3,0,1\nb,3,0,2\na,3,1,4\na,0,0,5\na,0,1,6\n",
    ],
)
def test_layers_of_a_table_keep_their_numbers(text: str, tmp_path: Path) -> None:
    counts = read_counts(as_csv(tmp_path, text))
    assert as_rows(counts) == {0: [5, 6], 3: [3, 4], 10: [1, 2]}
    assert counts.missing == [1, 2, *range(4, 10)]


def test_names_of_experts_may_be_their_numbers(tmp_path: Path) -> None:
    assert as_rows(read_counts(as_csv(tmp_path, "0,1,2\n5,6,7\n"))) == {0: [5, 6, 7]}


@pytest.mark.parametrize(
    ("layers", "expected"),
    [
        ([1, 2], [1, 2]),  # of layers 0 to 3, the last without a row
        ([0, 1, 2], [1, 2, 3]),  # of the three MoE layers alone
        ([1, 2, 3], [1, 2, 3]),
    ],
)
def test_a_tables_own_numbers_are_the_models_wherever_they_can_be(
    layers: list[int], expected: list[int], tmp_path: Path
) -> None:
    """Of four layers the first is dense."""
    path = as_csv(tmp_path, "layer,a,b\n" + "".join(f"{layer},1,2\n" for layer in layers))
    assert list(read_counts(path, [1, 2, 3]).loads) == expected


@pytest.mark.parametrize(
    ("num_rows", "moe_layers", "words"),
    [
        (40, range(16), "(0 to 15), or a row of each of these 16 alone; got 40 rows, with counts of layer 16 to 39"),
        (3, range(1, 17), "(1 to 16), or a row of each of these 16 alone; got 3 rows, with counts of layer 0"),
        (6, range(1, 6, 2), "(1, 3, 5), or a row of each of these 3 alone; got 6 rows, with counts of layer 0, 2, 4"),
    ],
)
def test_counts_of_layers_that_the_model_does_not_route_are_refused(
    num_rows: int, moe_layers: range, words: str, tmp_path: Path
) -> None:
    path = written(tmp_path, [[1, 2]] * num_rows)
    assert refusal(read_counts, path, moe_layers) == f"{path}: expected counts of layers that the model routes {words}"
    assert len(read_counts(path).loads) == num_rows, "where the model's layers are not known, rows are layers"


def test_counts_of_another_model_are_refused_as_a_config_is_read(tmp_path: Path) -> None:
    """A shape by hand whose number of layers is not given takes any."""
    written(tmp_path)
    path = config(tmp_path, layer="all")
    assert len(load_experiments(path, on_cpu=True)) == 2
    path.write_text(path.read_text().replace("num_experts: 4", "num_experts: 4\n  num_layers: 2"))
    assert "got 3 rows, with counts of layer 2" in refusal(load_experiments, path, on_cpu=True)


def test_an_array_of_many_bytes_is_refused_before_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(targets, "_MOST_BYTES", 1000)
    assert len(read_counts(as_npz(tmp_path, a=COUNTS)).loads) == 2
    with pytest.raises(UserError, match="a: expected at most 0 MiB of counts"):
        read_counts(as_npz(tmp_path, a=np.ones((100, 100))))


@pytest.mark.parametrize("form", FORMS)
def test_every_form_gives_the_same_loads(form: str, tmp_path: Path) -> None:
    path = written(tmp_path, FORMS[form])
    assert as_rows(read_counts(path)) == {1: COUNTS[1], 2: COUNTS[2]}


def config(folder: Path, **workload: Any) -> Path:
    path = folder / "config.yaml"
    asked = {
        "kind": "synthetic",
        "num_tokens": 512,
        "num_batches": 1,
        "skew_from": "counts.json",
        "layer": 1,
        **workload,
    }
    path.write_text(yaml.safe_dump({"model": SHAPE, "workload": asked, "policies": [{"name": "topk"}]}))
    return path


def test_a_counted_layer_gives_every_expert_its_load_in_its_place(tmp_path: Path) -> None:
    written(tmp_path)
    found = load_experiments(config(tmp_path, layer="all", num_tokens=4096), on_cpu=True)
    assert [one.workload.layer for one in found] == [1, 2]
    for one, count_E in zip(found, COUNTS[1:], strict=True):
        comparison = make_point(one, ROUTING, on_cpu=True)
        load_E = top_k_load(comparison.workload.batch(0).scores_TE, 1).numpy()
        np.testing.assert_allclose(load_E / 4096, np.array(count_E) / 16, atol=0.01)
        described = describe_workload(comparison.subject)
        assert f"loads of layer {one.workload.layer} counted in counts.json (2 of 3 layers used: " in described
        assert str(tmp_path) not in json.dumps(comparison.definition)
    (one,) = load_experiments(config(tmp_path, layer="all"), ["sweep.workload.layer=[1]"], on_cpu=True)
    assert one.workload.layer == 1, "layers that are swept are those of the sweep, not all"


@pytest.mark.parametrize("of_moe_layers", [False, True])
def test_a_layer_is_the_models_whether_or_not_a_file_has_rows_of_dense_ones(of_moe_layers: bool, tmp_path: Path):
    """Of four layers the first is dense; layer 2 was not counted."""
    rows = [[0, 0, 0, 0], [9, 1, 3, 3], [0, 0, 0, 0], [1, 9, 4, 2]]
    written(tmp_path, rows[1:] if of_moe_layers else rows)
    shape = {**SHAPE, "num_layers": 4, "first_dense_layers": 1, "dense_ffn_hidden_size": 16}
    path = config(tmp_path, layer="all")
    path.write_text(yaml.safe_dump({**yaml.safe_load(path.read_text()), "model": shape}))
    found = load_experiments(path, on_cpu=True)
    assert [one.workload.layer for one in found] == [1, 3]
    points = [make_point(one, ROUTING, on_cpu=True) for one in found]
    for point, layer in zip(points, (1, 3), strict=True):
        expected_E = np.array(rows[layer]) / sum(rows[layer])
        load_E = top_k_load(point.workload.batch(0).scores_TE, 1).numpy()
        np.testing.assert_allclose(load_E / 512, expected_E, atol=0.06)
    reason = "layer 2 has no counts" if of_moe_layers else "layer 0 is dense in this model, layer 2 has no counts"
    assert f"{'2 of 3' if of_moe_layers else '2 of 4'} layers used: {reason}" in describe_workload(points[0].subject)
    (dense,) = load_experiments(path, ["workload.layer=0"], on_cpu=True)
    with pytest.raises(UserError, match=r"expected one with counts \(1, 3\), got 0, which is dense in this model"):
        make_point(dense, ROUTING, on_cpu=True)


def test_a_wrong_model_beside_counts_is_named_as_the_models_and_models_can_be_swept(tmp_path: Path) -> None:
    written(tmp_path)
    path = config(tmp_path, layer="all")
    asked = yaml.safe_load(path.read_text())
    path.write_text(yaml.safe_dump({**asked, "model": {"preset": "olmo"}}))
    assert "config.yaml: model.preset: expected one of" in refusal(load_experiments, path, on_cpu=True)
    swept = {**asked, "sweep": {"model.hidden_size": [32, 64]}}
    path.write_text(yaml.safe_dump(swept))
    assert [one.workload.layer for one in load_experiments(path, on_cpu=True)] == [1, 2, 1, 2]


@pytest.mark.slow
def test_an_answer_by_own_counts_calls_no_skew_assumed_and_says_which_layers_count(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And its first line has the times and the speedup of its table, whatever layers differ by."""
    counts = np.random.default_rng(0).lognormal(0, 0.6, (5, 64))
    counts[0] = 0
    (tmp_path / "counts.json").write_text(json.dumps(counts.tolist()))
    asked = ["--model", "olmoe-1b-7b", "--ep", "8", "--tokens", "4096", "--out", str(tmp_path / "out")]
    asked += ["--set", f"workload.skew_from={tmp_path / 'counts.json'}", "--set", "workload.layer=all"]
    asked += ["--set", "sweep.workload.seed=[1]", "--set", "emulate.overlap=none"]
    assert main(["advise", *asked]) == 0
    text = capsys.readouterr().out
    assert "counts.json: 4 of 16 layers used: layers 0, 5 to 15 have no counts" in text
    assert "skew is assumed" not in text
    pick = text.splitlines()[0]
    found = re.match(r"Use (.*): a layer is (\S+) times as fast as native, (\S+) in place of (\S+) ms", pick)
    assert found, pick
    first = next(line for line in text.splitlines() if line.startswith("---"))
    row = text.splitlines()[text.splitlines().index(first) + 1]
    assert (found[2] in row, found[3] in row.split()) == (True, True), row
    rows = cases(load(tmp_path / "out"))
    assert found[4] == milliseconds(rows.loc[rows["role"] == "baseline", "median_ms"].iloc[0])


# What is wrong: the content of counts.json, and what the line says behind the file's name.
MISTAKES = {
    "no counts": ({"x": 1}, "expected logical_count"),
    "a map": ({"physical_to_logical_map": [[0, 1, 2, 3]]}, "expected logical_count"),
    "negative": (
        [[1, -1, 0, 0]],
        "a number from 0 to 2^64 by layer and expert in lists of equal length; got -1 at row 0, expert 1",
    ),
    "negative in a sum": ([[[1, 1]], [[2, -1]]], "got -1 at pass 1, row 0, expert 1"),
    "empty": ([[1, None]], "got nan at row 0, expert 1"),
    "no experts": ([[], []], "lists of equal length; got [[], []]"),
    "a sum beyond all numbers": ([[[1e308, 1]], [[1e308, 1]]], "got 1e+308 at pass 0, row 0, expert 0"),
    "nothing": ([[0, 0, 0, 0]], "some count above 0"),
    "uneven": ([[1, 2], [1]], "lists of equal length"),
    "words": ([["a", "b", "c", "d"]], "got [['a',"),
    "a list": ([1, 2, 3, 4], "by layer and expert"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_what_is_no_count_is_one_line(name: str, tmp_path: Path) -> None:
    content, words = MISTAKES[name]
    path = written(tmp_path, content)
    text = refusal(read_counts, path)
    assert text.startswith(str(path))
    assert words in text


@pytest.mark.parametrize("depth", [100, 100_000])
def test_lists_of_great_depth_are_one_line(depth: int, tmp_path: Path) -> None:
    path = tmp_path / "counts.json"
    path.write_text("[" * depth + "]" * depth)
    text = refusal(read_counts, path)
    assert text.startswith(f"{path}: expected {'JSON' if depth > 1000 else 'logical_count'}")


def test_a_pickle_comes_with_the_line_that_converts_it(tmp_path: Path) -> None:
    (tmp_path / "counts.pt").touch()
    with pytest.raises(UserError, match=r"^[^\n]*counts.pt: a pickle, which is not read; convert .* counts.json$"):
        read_counts(tmp_path / "counts.pt")


@pytest.mark.parametrize(
    ("content", "workload", "words"),
    [
        ([[1, 2], [3, 4]], {}, "workload.skew_from: expected counts of 4 experts, got 2"),
        (
            [[0, 0, 0, 9]] * 2,
            {"top_k": 2},
            r"workload.skew_from: expected a peak load up to 2 \(experts / top_k\), got 4",
        ),
        ({"x": 1}, {}, r"workload: \S*counts.json: expected logical_[^\n]*"),
        (
            COUNTS,
            {"skew": "power_law_1.2"},
            r"[^\n]*workload.skew, workload.skew_from: expected one of the two, got both",
        ),
        (COUNTS, {"skew_from": "none.json"}, "workload: [^:]*: no such file"),
        (COUNTS, {"layer": 3}, r"[^\n]*expected one with counts \(1 to 2\), got 3, which has no counts in [^\n]*"),
        (COUNTS, {"layer": 0}, r"[^\n]*expected one with counts \(1 to 2\), got 0, which has no counts in [^\n]*"),
        (COUNTS, {"layer": None}, r"[^\n]*workload.skew_from, workload.layer: expected both or none[^\n]*"),
        (COUNTS, {"skew_from": None}, r"[^\n]*workload.skew_from, workload.layer: expected both or none[^\n]*"),
    ],
)
def test_counts_that_do_not_suit_a_config_are_one_line(
    content: Any, workload: dict[str, Any], words: str, tmp_path: Path
) -> None:
    """Such counts as no top-k gives are those of one rank alone."""
    written(tmp_path, content)
    asked = {**workload}
    top_k = asked.pop("top_k", 1)
    path = config(tmp_path, **asked)
    path.write_text(path.read_text().replace("top_k: 1", f"top_k: {top_k}"))
    with pytest.raises(UserError, match=f"^{words}$"):
        make_point(load_experiments(path, on_cpu=True)[0], ROUTING, on_cpu=True)
