"""The report: rows whose every number is known, and the page that is made of them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import yaml
from results_builder import FAST_RANK, QUIET_MACHINE, FakeCase, FakeComparison, standard_cases, write_run

from moe_ep_bench.analysis import plot
from moe_ep_bench.analysis.figures import FIGURES
from moe_ep_bench.analysis.load import load_run
from moe_ep_bench.analysis.render import Table
from moe_ep_bench.analysis.report.page import Content, content_of, page_of, write_report
from moe_ep_bench.analysis.report.provenance import (
    commands,
    config_files,
    join_sweep,
    provenance_tables,
    read_provenance,
)
from moe_ep_bench.analysis.style import house_style
from moe_ep_bench.bench.route import route
from moe_ep_bench.cli import main
from moe_ep_bench.config import load_experiments

ROOT = Path(__file__).resolve().parents[1]
REFERENCE = ROOT / "results/reference"
# What a label or a host name may try.
HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)>{{ 7 * 7 }}"
FAILED = "rank 3: tried to allocate 12.3 GiB"


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One policy faster and one slower than native, one lost; a host that throttles and has a hostile name."""
    cases = [
        *standard_cases(),
        FakeCase("oea", params={"k0": 2}, label=f"oea {HOSTILE}", speedup=0.8),
        FakeCase("laser", status="oom", reason=FAILED),
    ]
    throttled = {**QUIET_MACHINE, "throttle_shares": {"hw_thermal": 0.2}}
    rank = {"hostname": HOSTILE, "machine": throttled}
    comparison = FakeComparison(cases=cases, num_batches=10, num_iterations=1, conditions={"rank": rank})
    return write_run(tmp_path_factory.mktemp("one"), [comparison])


@pytest.fixture(scope="module")
def content(directory: Path) -> Content:
    """With two of its figures: tests/test_analysis.py draws them all."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plot, "FIGURES", {name: FIGURES[name] for name in ("speedup", "load", "map")})
        return content_of(directory, [])


@house_style()
def written(content: Content) -> str:
    """The page, without drawing all of it anew."""
    return page_of(content)


@pytest.fixture(scope="module")
def page(content: Content) -> str:
    return written(content)


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """No figures, where they are not looked at."""
    monkeypatch.setattr(plot, "FIGURES", {})


class Parsed(HTMLParser):
    """Every tag with its attributes, and all text between tags."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data


def table_of(content: Content, title: str) -> Table:
    return next(table for table in content.tables if table.title.endswith(title))


# ---- what a page holds -----------------------------------------------------------------------------------------------


def test_the_page_says_what_was_measured_and_what_was_not(content: Content, page: str) -> None:
    assert content.title.startswith("Tiny-MoE, EP 2")
    assert content.line.startswith("Measured: NVIDIA Fake 80GB x 2 ranks")
    assert "1 not (1 oom); weights are random." in content.line
    text = Parsed(page).text
    assert f"not measured: laser, oom: {FAILED}" in text
    assert "was slowed down by heat in 20 % of the samples" in text
    (watched,) = (
        table for table in provenance_tables(content.source, content.run) if table.title == "Machines while timed"
    )
    cells = {column.header: column.cell(watched.rows[0]) for column in watched.columns}
    assert cells["power median w"] == "500"
    assert cells["throttle shares.hw thermal"] == "0.2"
    assert cells["host"] == HOSTILE


def test_the_rank_that_others_wait_for_shows_and_where_time_goes(content: Content) -> None:
    ranks = table_of(content, ": ranks").frame
    slowest, other = (ranks[(ranks["label"] == "native") & (ranks["rank"] == rank)].iloc[0] for rank in (0, 1))
    assert slowest["median_ms"] == pytest.approx(2, abs=0.02)
    assert other["median_ms"] == pytest.approx(2 * FAST_RANK, abs=0.02)
    assert [slowest["slowest_share"], other["slowest_share"]] == [1, 0]
    assert slowest["waiting_ms"] == 0 < other["waiting_ms"]
    assert set(ranks["label"]) == {"native", "token_drop gamma 1"}
    phases = table_of(content, "loads and phases")
    native = phases.frame[phases.frame["role"] == "baseline"].iloc[0]
    # The builder's shares: experts 44 % of 2 ms, of which the faster rank saves a fifth and waits instead.
    assert native["experts_ms"] == pytest.approx(2 * 0.396, abs=0.02)
    assert native["waiting_ms"] == pytest.approx(2 * 0.044, abs=0.01)
    headers = [column.header for column in phases.columns]
    assert {"fullest expert", "experts ms", "waiting ms", "unaccounted %", "choosing %"} <= set(headers)


def test_several_comparisons_have_an_overview_of_their_fastest_policies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plot, "FIGURES", {"map": FIGURES["map"]})
    native = [FakeCase("native", role="baseline"), FakeCase("native", role="noise", label="native again")]
    comparisons = [
        FakeComparison(
            f"c{peak}",
            {"point": {"workload.peak_load": peak}, "title": f"peak {peak}"},
            [
                *native,
                *(FakeCase("token_drop", params={"capacity_factor": f}, speedup=s) for f, s in ((1, gain), (2, 0.6))),
            ],
            num_iterations=2,
        )
        for peak, gain in ((2.0, 1.4), (1.0, 0.7))
    ]
    comparisons[0].facts["permute"] = {"requested": "auto", "ran": "indexed"}
    content = content_of(write_run(tmp_path, comparisons), [])
    assert " paper's (peak 2.0)" in Parsed(written(content)).text
    overview = content.tables[0]
    assert list(overview.frame["title"]) == ["peak 1.0", "peak 2.0"]
    assert list(overview.frame["label"]) == ["token_drop gamma 1"] * 2
    assert list(overview.frame["speedup_median"]) == pytest.approx([0.7, 1.4], abs=0.02)
    assert list(overview.frame["verdict"]) == ["slower", "faster"]
    assert content.drawings.keys() == {"map"}


def test_a_route_directory_is_reported_without_a_word_of_speed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plot, "FIGURES", {"load": FIGURES["load"]})
    config = {
        "name": "loads",
        "model": {"preset": "olmoe-1b-7b"},
        "workload": {"kind": "synthetic", "tokens_per_rank": 16, "num_batches": 1, "peak_load": 2.0, "seed": 1},
        "layer": {"ep_size": 4},
        "policies": [{"name": "token_drop", "capacity_factor": 1.0}],
    }
    (tmp_path / "loads.yaml").write_text(yaml.safe_dump(config))
    route(tmp_path / "loads.yaml", tmp_path / "out", [])
    page = write_report(tmp_path / "out")[0].read_text()
    text = Parsed(page).text
    assert "no speed is claimed" in text
    assert "token_drop capacity_factor=1.0" in text
    assert "faster" not in text
    assert "moe-ep-bench route loads.yaml --out results/loads" in text
    assert page.count("<figure") == 1


def test_a_validation_is_a_page_too(tmp_path: Path) -> None:
    path, passed_over = write_report(REFERENCE / "validate-2cpu", tmp_path / "page.html")
    text = Parsed(path.read_text()).text
    assert "Emulated against measured" in text
    assert "moe-ep-bench validate validate-cpu.yaml --nproc 2 --out" in text
    assert (REFERENCE / "validate-2cpu/validation.txt").read_text().splitlines()[-1] in text
    assert passed_over == []


# ---- the page as HTML ------------------------------------------------------------------------------------------------


def test_labels_and_host_names_are_text_and_nothing_is_fetched(page: str, content: Content) -> None:
    parsed = Parsed(page)
    assert content.drawings.keys() == {"speedup", "load"}  # a single comparison has no sweep
    assert [tag["id"] for name, tag in parsed.tags if name == "figure"] == [f"figure-{one}" for one in content.drawings]
    assert page.count('src="data:image/') == len(content.drawings)
    assert "default-src 'none'" in page
    for tag, attributes in parsed.tags:
        named = (attributes.get(name) or "#" for name in ("src", "href", "srcset", "action", "data", "poster"))
        assert all(address.startswith(("#", "data:")) for address in named), (tag, attributes)
    values = {float(tag["data-value"] or "nan") for _, tag in parsed.tags if "data-value" in tag}  # by which it sorts
    assert all(value == value for value in values)
    assert set(content.tables[0].frame["speedup_median"].dropna().astype(float)) <= values
    assert [attributes for tag, attributes in parsed.tags if tag == "script"] == [{}]  # ours
    assert all("onerror" not in attributes for _, attributes in parsed.tags)
    assert HOSTILE in parsed.text  # written out, its braces included


def test_the_installed_package_writes_the_same_bytes(directory: Path, page: str, tmp_path: Path) -> None:
    """Template and script are in the package; and equal input gives equal bytes, in another process too."""
    source, built, out = tmp_path / "source", tmp_path / "built", tmp_path / "out.html"
    source.mkdir()
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, source / name)
    shutil.copytree(ROOT / "moe_ep_bench", source / "moe_ep_bench", ignore=shutil.ignore_patterns("__pycache__"))
    setup = [sys.executable, "-c", "from setuptools import setup; setup()", "-q", "build_py", "--build-lib", str(built)]
    subprocess.run(setup, cwd=source, check=True, capture_output=True)
    environment = {**os.environ, "PYTHONPATH": str(built)}
    code = (
        "import sys, pathlib\n"
        "from moe_ep_bench.analysis.report import page\n"
        "page.FIGURES = {name: page.FIGURES[name] for name in ('speedup', 'load')}\n"
        "page.write_report(*map(pathlib.Path, sys.argv[1:]))\n"
    )
    command = [sys.executable, "-c", code, str(directory), str(out)]
    subprocess.run(command, cwd=tmp_path, env=environment, check=True, capture_output=True)
    assert out.read_text() == page


def test_mistakes_are_one_line_and_nothing_is_written(
    directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    for arguments, expected in (
        ([tmp_path / "none"], "no such directory"),
        ([directory, "--out", tmp_path], "expected a file to write, got a directory"),
    ):
        assert main(["show", "--format", "html", *map(str, arguments)]) == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1
        assert expected in error
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("undrawn")
def test_a_damaged_part_is_left_out_and_named_among_the_warnings_of_a_modelled_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    facts = {"links": "modelled by links/x: 3 us", "device": "modelled by devices/y: a roofline of 1 TFLOP/s"}
    comparison = FakeComparison(cases=standard_cases(), num_batches=1, num_iterations=1, facts=facts)
    directory = write_run(tmp_path / "run", [comparison], mode="emulated")
    lost = next(case for case in load_run(directory).cases if case.role == "policy")
    (directory / "cases" / f"{lost.case_id}.parquet").write_bytes(b"PAR1")
    assert main(["show", str(directory), "--format", "html"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert f"{lost.case_id}.parquet: damaged" in line
    text = Parsed((directory / "report.html").read_text()).text
    assert f"left out: {line.removeprefix('moe-ep-bench: ')}" in text
    assert "Modelled (nothing was run): 2 ranks modelled by devices/y, links modelled by links/x;" in text


# ---- how to get it again ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["quickstart-2cpu", "decode-2cpu", "whatif-skew"])
def test_the_embedded_config_is_read_back_as_what_was_measured(name: str, tmp_path: Path) -> None:
    recorded = json.loads((REFERENCE / name / "run.json").read_text())["config"]
    ((file, text),) = config_files(read_provenance(REFERENCE / name, 2)).items()
    (tmp_path / file).write_text(text)
    found = [json.loads(experiment.model_dump_json()) for experiment in load_experiments(tmp_path / file, on_cpu=True)]
    assert len(found) == len(recorded)
    for one in recorded:
        # Keys that a newer version knows have defaults.
        assert any(_holds(experiment, one) for experiment in found), one


def _holds(found: Any, recorded: Any) -> bool:
    if isinstance(recorded, dict):
        return isinstance(found, dict) and all(_holds(found.get(key), value) for key, value in recorded.items())
    if isinstance(recorded, list):
        return isinstance(found, list) and len(found) == len(recorded) and all(map(_holds, found, recorded))
    return found == recorded


def test_points_that_are_no_grid_stay_files_of_their_own() -> None:
    points = [{"a": {"x": 1, "y": 1}}, {"a": {"x": 2, "y": 2}}]
    assert join_sweep(points) is None
    grid = [{"a": {"x": x, "y": y}, "n": 1} for x in (1, 2) for y in (3, 4)]
    assert join_sweep(grid) == {"a": {}, "n": 1, "sweep": {"a.x": [1, 2], "a.y": [3, 4]}}
    assert join_sweep(grid[:3]) is None
    assert join_sweep([{"a": {"x": 1}}, {"a": {}}]) is None  # no sweep can leave a key out


def test_the_commands_name_commit_config_ranks_and_directory() -> None:
    assert commands(read_provenance(REFERENCE / "quickstart-2cpu", 2)) == [
        "git checkout 63274bd053968f201af5e9288b329dc2ba039e38",
        "# save the config above as quickstart.yaml",
        "NPROC=2 launch/torchrun.sh quickstart.yaml --out results/quickstart",
        "moe-ep-bench show results/quickstart --format html",
    ]
    emulated = commands(read_provenance(REFERENCE / "whatif-skew", 8))
    assert "moe-ep-bench emulate whatif-skew.yaml --out results/whatif-skew" in emulated
    recorded = commands(read_provenance(REFERENCE / "deepseek-v2-lite-recorded-2cpu", 2))
    assert any("and the recordings that it names" in line for line in recorded)
