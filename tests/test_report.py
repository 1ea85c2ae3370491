"""The report: rows whose every number is known, and what the page says of them."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import yaml
from results_builder import FAST_RANK, QUIET_MACHINE, FakeCase, FakeComparison, standard_cases, write_run

from moe_ep_bench.analysis.load import load_run
from moe_ep_bench.analysis.report.answer import answer_of, answer_of_all, short_words
from moe_ep_bench.analysis.report.page import page_of, write_report
from moe_ep_bench.analysis.report.parts import Report, Table
from moe_ep_bench.analysis.report.provenance import config_files, join_sweep, read_provenance, reproduction
from moe_ep_bench.analysis.report.said import report_of
from moe_ep_bench.analysis.report.tables import cases_table
from moe_ep_bench.analysis.speedups import analyse
from moe_ep_bench.bench.route import route
from moe_ep_bench.cli import main
from moe_ep_bench.config import load_experiments

ROOT = Path(__file__).resolve().parents[1]
# What a label or a host name may try.
HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)>{{ 7 * 7 }}"
FAILED = "rank 3: tried to allocate 12.3 GiB"


def cases() -> list[FakeCase]:
    """One policy faster within the bounds, one faster beyond them, one slower, one lost."""
    return [
        *standard_cases(),
        FakeCase("token_drop", params={"capacity_factor": 2.0}, speedup=1.2, dropped=0.05, mass=0.97),
        FakeCase("oea", params={"k0": 2}, label=f"oea {HOSTILE}", speedup=0.8),
        FakeCase("laser", status="oom", reason=FAILED),
    ]


def small(**changes: Any) -> FakeComparison:
    return FakeComparison(**{"cases": cases(), "num_iterations": 2, **changes})


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    throttled = {**QUIET_MACHINE, "throttle_shares": {"hw_thermal": 0.2}, "sm_clock_begin_mhz": 1980.0}
    rank = {"hostname": HOSTILE, "machine": {**throttled, "sm_clock_end_mhz": 1530.0}}
    return write_run(tmp_path_factory.mktemp("one"), [small(conditions={"rank": rank})])


@pytest.fixture(scope="module")
def report(directory: Path) -> Report:
    return report_of(directory, [])


@pytest.fixture(scope="module")
def page(report: Report) -> str:
    return page_of(report)


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


def row_of(table: Table, name: str) -> dict[str, str]:
    row = next(row for row in table.rows if row[0].text == name)
    return {column.label: cell.text for column, cell in zip(table.columns, row, strict=True)}


# ---- the answer ----------------------------------------------------------------------------------------------------


def test_the_answer_names_policy_gain_interval_cost_and_what_it_was_measured_on(report: Report) -> None:
    answer = report.answer
    assert answer.lead == "Use token_drop gamma 2"
    assert re.match(r"token_drop gamma 2 runs 1\.\d{3} \[1\.\d{3}, 1\.\d{3}\] times as fast as native, ", answer.why)
    speedup = float(answer.why.split()[4])
    assert speedup == pytest.approx(1.2, abs=0.02)
    assert "drops 5.0 % of top-k pairs and keeps 97.0 % of their score mass, beyond the noise" in answer.why
    for said in ("Measured: one MoE layer", "Tiny-MoE, EP 2", "bfloat16", "NVIDIA Fake 80GB x 2 ranks", "synthetic"):
        assert said in answer.basis


def of_policies(root: Path, *policies: FakeCase, **changes: Any) -> tuple[str, str, str]:
    native = [FakeCase("native", role="baseline"), FakeCase("native", role="noise", label="native again")]
    answer = report_of(
        write_run(root, [FakeComparison(cases=[*native, *policies], **{"num_iterations": 2, **changes})]), []
    ).answer
    return answer.lead, answer.why, answer.basis


def test_a_policy_that_drops_too_much_is_named_and_native_is_kept(tmp_path: Path) -> None:
    lead, why, _ = of_policies(tmp_path, FakeCase("lynx", speedup=1.5, dropped=0.4, mass=0.7))
    assert lead == "Keep native"
    assert "no policy is faster for sure; beyond that lynx runs 1." in why
    assert "drops 40.0 % of top-k pairs and keeps 70.0 %" in why


def test_what_does_not_rise_above_the_noise_is_called_so(tmp_path: Path) -> None:
    lead, why, _ = of_policies(tmp_path, FakeCase("lynx", speedup=1.001), noise=0.05)
    assert lead == "Keep native"
    assert why.startswith("no policy is faster than the noise (0.")
    assert "; the fastest, lynx runs " in why


def test_too_few_batches_and_shared_cores_give_no_answer(tmp_path: Path) -> None:
    lead, why, _ = of_policies(tmp_path / "few", FakeCase("lynx", speedup=1.5), num_batches=3)
    assert (lead, why.split(";")[0]) == ("Cannot say", "fewer than 10 batches give no interval")
    lead, why, _ = of_policies(tmp_path / "shared", FakeCase("lynx", speedup=1.5), facts={"oversubscribed": True})
    assert lead == "Cannot say"
    assert "more ranks than cores" in why


def test_emulated_and_modelled_numbers_are_called_so_in_the_answer(tmp_path: Path) -> None:
    facts = {"links": "modelled by links/x: 3 us", "device": "modelled by devices/y: a roofline of 1 TFLOP/s"}
    native = [FakeCase("native", role="baseline"), FakeCase("native", role="noise", label="native again")]
    comparison = FakeComparison(cases=[*native, FakeCase("lynx", speedup=1.5)], num_iterations=2, facts=facts)
    said = report_of(write_run(tmp_path, [comparison], mode="emulated"), [])
    assert said.answer.lead == "Use lynx (modelled)"
    assert "noise" not in said.answer.why
    assert said.answer.basis.startswith("Modelled (nothing was run): one MoE layer")
    assert "on 2 ranks modelled by devices/y, links modelled by links/x" in said.answer.basis
    assert any("a roofline of 1 TFLOP/s" in warned.text for warned in said.warnings)


# ---- tables, figures, warnings -------------------------------------------------------------------------------------


def test_the_cases_stand_with_speed_cost_and_what_became_of_them(report: Report) -> None:
    cases_table = next(table for table in report.sections[0].tables if table.title == "Cases")
    dropping = row_of(cases_table, "token_drop gamma 1")
    assert float(dropping["speedup"]) == pytest.approx(1.5, abs=0.02)
    assert (dropping["dropped %"], dropping["mass kept %"], dropping["verdict"]) == ("25.0", "80.0", "faster")
    assert row_of(cases_table, "native")["speedup"] == "1"
    lost = row_of(cases_table, "laser")
    assert (lost["verdict"], lost["speedup"], lost["p50 ms"]) == (f"oom: {FAILED}", "-", "-")


def test_the_rank_that_others_wait_for_shows(report: Report) -> None:
    ranks = next(table for table in report.sections[0].tables if table.title == "Ranks")
    slowest, other = (row_of(ranks, name) for name in ("0", "1"))
    assert float(slowest["native: p50 ms"]) == pytest.approx(2, abs=0.02)
    assert float(other["native: p50 ms"]) == pytest.approx(2 * FAST_RANK, abs=0.02)
    numbers = [[cell.value for cell in row] for row in ranks.rows]
    labels = [column.label for column in ranks.columns]
    assert [row[labels.index("slowest in %")] for row in numbers] == [100.0, 0.0]
    waiting = [row[labels.index("waiting ms")] for row in numbers]
    assert waiting[0] == 0 < waiting[1]


def test_every_figure_of_the_run_is_there_with_a_caption_made_of_its_numbers(report: Report) -> None:
    pictures = {picture.name: picture for picture in report.pictures}
    assert {"speedup", "phases", "load", "dropped"} <= set(pictures)
    assert not {"map", "sweep"} & set(pictures)  # a single comparison has no sweep
    assert pictures["speedup"].caption.startswith("Fastest is token_drop gamma 1, 1.")
    assert re.search(r"perfect balance would give 1\.(59|60)\d\.", pictures["speedup"].caption)
    # The builder's shares: experts 44 %, of which the faster rank saves a fifth and waits instead.
    assert pictures["phases"].caption == "Of native's 2.00 ms most goes to experts, 39.6 %; 4.4 % is waiting."
    assert "Most is dropped by token_drop gamma 1: 25.0 % of pairs, with 80.0 %" in pictures["dropped"].caption
    assert all(picture.title and picture.caption for picture in pictures.values())


def test_what_weakens_the_numbers_is_warned_of(report: Report) -> None:
    said = "\n".join(warned.text for warned in report.warnings)
    assert f"Not measured: laser, oom: {FAILED}." in said
    assert "was slowed down by heat in 20 % of the samples" in said
    assert "Weights are random" in said
    assert "1 not (1 oom)" in said


def test_an_effect_inside_the_noise_and_an_unfused_permutation_are_warned_of(tmp_path: Path) -> None:
    native = [FakeCase("native", role="baseline"), FakeCase("native", role="noise", label="native again")]
    facts = {"permute": {"requested": "auto", "ran": "indexed"}}
    comparison = FakeComparison(
        cases=[*native, FakeCase("lynx"), FakeCase("topk")], facts=facts, noise=0.05, num_iterations=2
    )
    said = [warned.text for warned in report_of(write_run(tmp_path, [comparison]), []).warnings]
    assert any(re.match(r"Noise floor 0\.9\d+ to 1\.\d+: the effect of lynx is not above it", text) for text in said)
    assert any(text.startswith("Permutation is not fused") for text in said)


def test_clocks_before_and_after_stand_in_the_environment(report: Report) -> None:
    machine = next(table for table in report.environment if table.title == "The machine while it was timed")
    row = row_of(machine, "1")
    assert (row["SM MHz"], row["throttled"]) == ("1,980 / 1,530", "hw_thermal 20.0 %")


def test_several_comparisons_have_an_overview_that_leads_to_each(tmp_path: Path) -> None:
    gain = FakeCase("token_drop", params={"capacity_factor": 1.0}, speedup=1.4, dropped=0.05, mass=0.97)
    loss = FakeCase("token_drop", params={"capacity_factor": 1.0}, speedup=0.7)
    two = {"params": {"capacity_factor": 2.0}, "speedup": 0.6}
    native = [FakeCase("native", role="baseline"), FakeCase("native", role="noise", label="native again")]
    comparisons = [
        FakeComparison(
            f"c{peak}", {"point": {"workload.peak_load": peak}, "title": f"peak {peak}"}, each, num_iterations=2
        )
        for peak, each in (
            (2.0, [*native, gain, FakeCase("token_drop", **two)]),
            (1.0, [*native, loss, FakeCase("token_drop", **two)]),
        )
    ]
    said = report_of(write_run(tmp_path, comparisons), [])
    assert said.overview is not None
    assert [row[0].text for row in said.overview.rows] == ["peak 1.0", "peak 2.0"]
    assert [row[0].target for row in said.overview.rows] == [section.anchor for section in said.sections]
    assert [row[1].text for row in said.overview.rows] == ["keep native", "use"]
    assert said.answer.lead == "A policy pays in 1 of 2 comparisons"
    assert said.answer.why.startswith("most in peak 2.0, where token_drop gamma 1 runs 1.")
    assert "peak load of the busiest expert 1 to 2" in said.answer.basis
    captions = {picture.name: picture.caption for picture in said.pictures}
    words = r"Along peak load of the busiest expert the fastest policy goes from token_drop gamma 1, 0\.(69|70)\d"
    assert re.match(words, captions["sweep"])


# ---- the page ------------------------------------------------------------------------------------------------------


def test_labels_and_host_names_are_text_and_nothing_else(page: str) -> None:
    parsed = Parsed(page)
    scripts = [attributes for tag, attributes in parsed.tags if tag == "script"]
    assert scripts == [{}]  # ours
    assert all("onerror" not in attributes for _, attributes in parsed.tags)
    assert HOSTILE in parsed.text  # written out, its braces included


def test_the_page_names_no_address_but_its_own_data(page: str) -> None:
    for tag, attributes in Parsed(page).tags:
        for name in ("src", "href", "srcset", "action", "data", "poster"):
            assert (attributes.get(name) or "#").startswith(("#", "data:")), (tag, attributes)
    assert "@import" not in page
    assert "default-src 'none'" in page


def test_heads_of_columns_are_buttons_and_numbers_sort_as_numbers(page: str) -> None:
    tags = Parsed(page).tags
    heads = [attributes for tag, attributes in tags if tag == "th" and attributes.get("scope") == "col"]
    assert heads
    assert all(head["aria-sort"] == "none" for head in heads)
    assert len([tag for tag, _ in tags if tag == "button"]) == len(heads)
    values = [attributes["data-value"] for tag, attributes in tags if "data-value" in attributes]
    assert all(value is not None and float(value) == float(value) for value in values)


def test_the_installed_command_writes_the_same_bytes(directory: Path, page: str, tmp_path: Path) -> None:
    """Template, style and script are in the package; and equal input gives equal bytes, in another process too."""
    source, built, out = tmp_path / "source", tmp_path / "built", tmp_path / "out.html"
    source.mkdir()
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, source / name)
    shutil.copytree(ROOT / "moe_ep_bench", source / "moe_ep_bench", ignore=shutil.ignore_patterns("__pycache__"))
    setup = [sys.executable, "-c", "from setuptools import setup; setup()", "-q", "build_py", "--build-lib", str(built)]
    subprocess.run(setup, cwd=source, check=True, capture_output=True)
    environment = {**os.environ, "PYTHONPATH": str(built)}
    command = [sys.executable, "-m", "moe_ep_bench", "show", str(directory), "--format", "html", "--out", str(out)]
    result = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert (result.returncode, result.stdout) == (0, "out.html\n"), result.stderr
    assert out.read_text() == page


def test_a_link_named_by_out_stays_and_leads_to_the_page(directory: Path, page: str, tmp_path: Path) -> None:
    (tmp_path / "link.html").symlink_to("page.html")
    assert main(["show", str(directory), "--format", "html", "--out", str(tmp_path / "link.html")]) == 0
    assert (tmp_path / "link.html").is_symlink()
    assert (tmp_path / "page.html").read_text() == page


def test_mistakes_are_one_line_and_nothing_is_written(
    directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    (tmp_path / "both").mkdir()
    shutil.copytree(ROOT / "results/reference/validate-2cpu", tmp_path / "both", dirs_exist_ok=True)
    before = sorted(tmp_path.rglob("*"))
    for arguments, expected in (
        ([tmp_path / "none"], "no such directory"),
        ([tmp_path / "both"], "holds two runs side by side"),
        ([directory, "--out", tmp_path], "expected a file to write, got a directory"),
    ):
        assert main(["show", "--format", "html", *map(str, arguments)]) == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1
        assert expected in error
    assert sorted(tmp_path.rglob("*")) == before


def test_a_damaged_part_is_left_out_and_named_among_the_warnings(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    comparison = FakeComparison(cases=standard_cases(), num_iterations=2)
    directory = write_run(tmp_path / "run", [comparison])
    lost = next(case for case in load_run(directory).cases if case.role == "policy")
    (directory / "cases" / f"{lost.case_id}.parquet").write_bytes(b"PAR1")
    assert main(["show", str(directory), "--format", "html"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert f"{lost.case_id}.parquet: damaged" in line
    text = Parsed((directory / "report.html").read_text()).text
    assert f"Left out: {line.removeprefix('moe-ep-bench: ')}" in text


# ---- routing -------------------------------------------------------------------------------------------------------


def test_a_route_directory_is_reported_without_a_word_of_speed(tmp_path: Path) -> None:
    config = {
        "name": "loads",
        "model": {"preset": "olmoe-1b-7b"},
        "workload": {"kind": "synthetic", "tokens_per_rank": 64, "num_batches": 2, "peak_load": 2.0, "seed": 1},
        "layer": {"ep_size": 4},
        "policies": [{"name": "token_drop", "capacity_factor": 1.0}],
    }
    (tmp_path / "loads.yaml").write_text(yaml.safe_dump(config))
    route(tmp_path / "loads.yaml", tmp_path / "out", [])
    page = write_report(tmp_path / "out")[0].read_text()
    text = Parsed(page).text
    assert (
        "Nothing was timed, so no speed is claimed: token_drop capacity_factor=1.0 evens the ranks most, from " in text
    )
    assert "faster" not in re.sub(r"<style>.*?</style>|<script>.*?</script>", "", page, flags=re.DOTALL)
    assert "moe-ep-bench route loads.yaml --out results/loads" in text
    assert page.count("<figure") >= 2


# ---- how to get it again -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["quickstart-2cpu", "decode-2cpu", "whatif-skew"])
def test_the_embedded_config_is_read_back_as_what_was_measured(name: str, tmp_path: Path) -> None:
    directory = ROOT / "results/reference" / name
    recorded = json.loads((directory / "run.json").read_text())["config"]
    (file,) = config_files(read_provenance(directory, 2))
    (tmp_path / file.file).write_text(file.code)
    found = [
        json.loads(experiment.model_dump_json()) for experiment in load_experiments(tmp_path / file.file, on_cpu=True)
    ]
    assert len(found) == len(recorded)
    for one in recorded:
        # Keys that a newer version knows have defaults.
        assert any(_holds(experiment, one) for experiment in found), one


def _holds(found: Any, recorded: Any) -> bool:
    if isinstance(recorded, dict):
        return isinstance(found, dict) and all(_holds(found.get(key), value) for key, value in recorded.items())
    return found == recorded


def test_points_that_are_no_grid_stay_files_of_their_own() -> None:
    points = [{"a": {"x": 1, "y": 1}}, {"a": {"x": 2, "y": 2}}]
    assert join_sweep(points) is None
    grid = [{"a": {"x": x, "y": y}, "n": 1} for x in (1, 2) for y in (3, 4)]
    assert join_sweep(grid) == {"a": {}, "n": 1, "sweep": {"a.x": [1, 2], "a.y": [3, 4]}}
    assert join_sweep(grid[:3]) is None
    assert join_sweep([{"a": {"x": 1}}, {"a": {}}]) is None  # no sweep can leave a key out


def test_the_commands_name_commit_config_ranks_and_directory() -> None:
    steps = reproduction(read_provenance(ROOT / "results/reference/quickstart-2cpu", 2))
    code = [step.code for step in steps if step.code]
    assert code[0] == "git checkout 63274bd053968f201af5e9288b329dc2ba039e38"
    assert code[1] == "NPROC=2 launch/torchrun.sh quickstart.yaml --out results/quickstart"
    emulated = reproduction(read_provenance(ROOT / "results/reference/whatif-skew", 8))
    assert "moe-ep-bench emulate whatif-skew.yaml --out results/whatif-skew" in [step.code for step in emulated]


def test_comparisons_of_few_batches_say_that_nothing_can_be_said(tmp_path: Path) -> None:
    few = [
        FakeComparison(f"c{n}", {"point": {"workload.seed": n}, "title": f"seed {n}"}, standard_cases(), num_batches=3)
        for n in (1, 2)
    ]
    run = load_run(write_run(tmp_path, few))
    comparisons = analyse(run)
    said = answer_of_all(run, comparisons)
    assert said.lead.startswith("Cannot say in any of 2 comparisons")
    assert "fewer than 10 batches give no interval" in said.why
    for one in comparisons:
        assert answer_of(run, one).lead.startswith("Cannot say")
        assert short_words(one)[0] == "cannot say"


def test_recordings_are_asked_for_only_where_the_config_names_them() -> None:
    for name, names_any in (("quickstart-2cpu", False), ("deepseek-v2-lite-recorded-2cpu", True)):
        steps = reproduction(read_provenance(ROOT / "results/reference" / name, 2))
        (save,) = [step.words for step in steps if step.words.startswith("Save the config above as")]
        assert ("recordings" in save) == names_any


@pytest.mark.parametrize(("mass", "is_said"), [(1.1, True), (1.0, False)])
def test_mass_above_the_whole_is_explained(tmp_path: Path, mass: float, is_said: bool) -> None:
    cases = [*standard_cases(), FakeCase("expanded_drop", mass=mass)]
    run = load_run(write_run(tmp_path, [FakeComparison(cases=cases, num_iterations=1)]))
    assert ("beyond their top-k" in cases_table(analyse(run)[0]).note) == is_said
