"""Tables of results as people and programs read them: views of the frame, what has to be known, formats, mistakes."""

from __future__ import annotations

import io
import json
import math
import re
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from results_builder import (
    QUIET_MACHINE,
    FakeCase,
    FakeComparison,
    modelled_facts,
    shown_text,
    standard_cases,
    write_run,
    write_whole,
)

from moe_ep_bench.analysis.cases import cases, load
from moe_ep_bench.analysis.columns import COLUMNS, JSON_VERSION, escape_latex, escape_markdown, render, short_labels
from moe_ep_bench.analysis.drawing import draw
from moe_ep_bench.analysis.figures import FIGURES
from moe_ep_bench.analysis.notes import _beyond, native_differs, notes, warnings
from moe_ep_bench.analysis.page import page_of
from moe_ep_bench.analysis.show import end_of_run
from moe_ep_bench.analysis.style import house_style
from moe_ep_bench.analysis.tables import VIEWS, table_of, tables
from moe_ep_bench.cli import main
from moe_ep_bench.files import read_json

REFERENCE = Path(__file__).parents[1] / "results" / "reference"

FEW = {"noise": 0.0, "num_batches": 2, "num_iterations": 1}  # where no interval is looked at
DROP = "token_drop capacity_factor=1.0"
# What LaTeX, Markdown and CSV each take for their own.
NASTY = r'50% of_a|b & "c", $x^2 {~} #1 <i>\\'


def run_of(root: Path, **changes) -> Path:
    return write_run(root, [FakeComparison(**{"cases": standard_cases(), **FEW, **changes})])


def lines_of(root: Path, **changes) -> list[str]:
    """The notes of a directory's one comparison."""
    store = load(run_of(root, **changes))
    return list(map(str, notes(store, store.comparisons[0].directory, store.comparisons[0].comparison_id)))


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    more = [
        FakeCase("oea", params={"k0": NASTY}, speedup=1.1, mass=0.9),
        FakeCase("lynx", status="oom", reason="too large"),
    ]
    return run_of(tmp_path_factory.mktemp("show") / "run", cases=[*standard_cases(), *more], num_batches=5)


def shown(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    assert main(["show", *map(str, arguments)]) == 0
    return capsys.readouterr().out


# ---- what tables say -------------------------------------------------------------------------------------------------


def test_a_table_shows_speedups_beside_their_cost(tmp_path):
    """Without noise every ratio is exact, so a mean over ranks or an inverted ratio would show."""
    text = shown_text(run_of(tmp_path, num_batches=10))
    title = text.splitlines()[0]
    for words in ("measured", "NVIDIA Fake 80GB x 2 ranks", "nccl", "EP 2", "bfloat16", "true sizes"):
        assert words in title
    rows = {line.split("  ")[0]: line.split() for line in text.splitlines()}
    speedup = ["1.500", "[1.500,", "1.500]"]  # over native, and over topk
    assert rows[DROP][2:12] == ["1.333", *speedup, *speedup, "faster", "25.0", "80.0"]
    assert rows["native"][1:3] == ["2.000", "1"]
    assert "5 cases: 5 ok, 0 not" in text
    assert "warning" not in text
    assert "\nmore: --view phases" in text


def test_cases_that_were_not_measured_are_lines_with_their_reason(tmp_path):
    lost = [
        FakeCase("expanded_drop", status="oom", reason="CUDA out of memory\n" + 60 * "tried "),
        FakeCase("lynx", status="failed", reason="differs from the reference"),
    ]
    text = shown_text(run_of(tmp_path, cases=[*standard_cases(), *lost]))
    assert "\n  lynx: failed: differs from the reference\n" in text
    assert not any(line.startswith("lynx") for line in text.splitlines())  # it is no row
    (line,) = (line for line in text.splitlines() if line.startswith("  expanded_drop: oom: CUDA out of memory tried"))
    assert len(line) < 130
    assert "7 cases: 5 ok, 2 not (1 failed, 1 oom)" in text


def test_whole_models_have_their_own_view(tmp_path):
    text = shown_text(write_whole(tmp_path, standard_cases(), of_layers=9))
    header = next(line for line in text.splitlines() if line.startswith("policy"))
    assert re.search(r"pass ms +end to end +over topk +verdict", header)


def test_a_view_that_answers_lack_is_named(capsys):
    directory = Path(__file__).resolve().parents[1] / "results" / "reference" / "quality-small-seed0"
    assert main(["show", str(directory), "--view=phases,claims"]) == 0
    shown = capsys.readouterr()
    assert shown.err == "moe-ep-bench: --view phases: the run has no such numbers\n"
    assert shown.out.startswith("Papers' claims on small-moe")


def test_columns_for_which_a_terminal_has_no_room_are_named(directory):
    store = load(directory)
    table = table_of(store, VIEWS["layer"], cases(store))
    lines = render([table], "text", width=140).splitlines()
    body = [line for line in lines if line.startswith(("policy", "native", "topk"))]
    assert max(map(len, body)) <= 140
    assert "mass kept %" in body[0]
    assert "no room for:" in " ".join(lines)
    assert "slowest phase" in " ".join(lines).partition("no room for:")[2]
    assert max(map(len, lines)) <= 142, "notes are wrapped"


def test_labels_that_are_cut_keep_what_tells_them_apart():
    lasers = [FakeCase("laser", params=laser(high, c)) for high, c in ((0.4, 8), (0.9, 16))]
    budget = FakeCase("xshare", params={"k0": 1, "rank_budget": 16, "scope": "rank"})
    shorter = [
        "native again",
        "xshare k0=1 budget=16 ...",
        "laser eps_high=0.4 ... c=8 ...",
        "laser eps_high=0.9 ... c=16 ...",
    ]
    assert short(FakeCase("native", role="noise"), budget, *lasers, width=28) == shorter
    swapped = [FakeCase("oea", params=dict.fromkeys(keys, 1)) for keys in (("a", "b"), ("b", "a"))]
    assert short(*swapped, width=8) == ["oea a=1 b=1", "oea b=1 a=1"], "the same words in another order"


def laser(eps_high: float, c: int) -> dict[str, object]:
    return {"eps_high": eps_high, "t_fix": 0.2, "c": c, "trim": "random"}


def short(*cases: FakeCase, width: float = math.inf) -> list[str]:
    rows = [{"policy": case.policy, "settings": case.settings, "role": case.role} for case in cases]
    return short_labels(pd.DataFrame(rows), width).tolist()


def test_labels_in_short_name_no_keys_but_where_two_would_be_one():
    device = {"capacity_factor": 1.0, "granularity": "device", "metric": "order"}
    assert short(FakeCase("token_drop", params=device)) == ["token_drop 1.0 per device order"]
    both = [FakeCase("token_drop", params={key: "x"}) for key in ("metric", "modality")]
    assert short(*both) == ["token_drop metric=x", "token_drop modality=x"]
    way = {"spare_per_rank": 1, "balancer": "lp"}
    ways = [FakeCase("eplb", "replication", {**way, "solve_us": us}) for us in (0.0, 100.0)]
    assert short(*ways) == ["EPLB + LP (0 us), 1 spare", "EPLB + LP (100 us), 1 spare"]
    assert short(ways[0]) == ["EPLB + LP, 1 spare"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("targets", "words"),
    [
        ({"peak_load": None}, "no skew was asked for"),
        ({"peak_load": 1.5}, "peak load 1.5 holds in the long run; native's batches average"),
        (
            {"peak_load": None, "expert_loads": [1.2, 1.0, 1.0, 1.0]},
            "peak load 1.143 holds in the long run",
        ),
        ({"peak_load": 6.4}, None),
        ({"batch_peak_load": 1.5}, None),
    ],
)
def test_what_few_tokens_have_by_chance_is_told_from_a_skew(tmp_path, targets, words):
    workload = {"kind": "synthetic", "description": "", "tail_model": None, "targets": targets}
    lines = lines_of(tmp_path, tokens=16, facts={"workload": workload})
    said = [line for line in lines if "chance" in line and "verdicts" not in line]
    assert [line.startswith(words or "") for line in said] == [True] * (words is not None)
    assert any("at random once; other seeds" in line for line in lines) == any(
        targets.get(name) for name in ("peak_load", "batch_peak_load")
    )


def test_a_policy_that_drops_nearly_all_is_said_to_compute_nothing(tmp_path):
    few, all_of_it = (FakeCase("token_drop", params={"part": part}, speedup=2.9, dropped=part) for part in (0.25, 1.0))
    lines = lines_of(tmp_path, cases=[*standard_cases(), few, all_of_it])
    assert [line for line in lines if "next to nothing" in line] == [
        "warning: more than 95 % of the pairs are dropped, so that next to nothing is computed: token_drop part=1.0"
    ]


@pytest.mark.slow
@pytest.mark.parametrize("modelled", [False, True])
@pytest.mark.parametrize("lost", [["dropped %"], ["drop %", "reroute %"]], ids=len)
def test_the_end_of_a_run_is_columns_that_fit_100_characters(tmp_path, modelled, lost):
    facts = modelled_facts() if modelled else {}
    # Below what the model can tell has the longest verdict.
    long = [FakeCase("oea", params={"x": "x" * 40, "end": k}, speedup=1.01) for k in range(2)]
    long[0].rerouted = 0.25 * (len(lost) - 1)
    text = end_of_run(run_of(tmp_path, cases=[*standard_cases(), *long], num_batches=10, facts=facts))
    assert "end=0 " in text  # names that are cut are told apart
    assert "end=1 " in text
    layer = "one copy per (token, expert) pair, Transformer Engine's experts, fused permutation, no overlap."
    assert (layer in " ".join(text.split())) == modelled, "which layer is modelled"
    assert max(len(line) for line in text.splitlines() if str(tmp_path) not in line) <= 100
    header = next(line for line in text.splitlines() if line.startswith("policy"))
    assert re.split(r"\s{2,}", header) == ["policy", "layer ms", "speedup", "verdict", *lost, "kept %"]
    assert f"moe-ep-bench plot {tmp_path}" in text
    assert "warning: " not in text


@pytest.mark.slow
def test_speedups_over_topk_stand_beside_those_over_native_where_they_differ(tmp_path):
    """At the end of a run, in tables and on the page: 1.2 over native is 1.5 over what runs the same kernels."""
    listed = [*standard_cases()[3:], FakeCase("topk", speedup=0.8), FakeCase("oea", speedup=1.2)]
    root = run_of(tmp_path, cases=listed, num_batches=10)
    for text in (end_of_run(root), shown_text(root)):
        header, row = (next(line for line in text.splitlines() if line.startswith(of)) for of in ("policy", "oea"))
        assert re.split(r"\s{2,}", header)[2:4] == ["speedup", "over topk"]
        assert [cell.split()[0] for cell in re.split(r"\s{2,}", row)[2:4]] == ["1.200", "1.500"]
    assert max(len(line) for line in end_of_run(root).splitlines() if str(tmp_path) not in line) <= 100
    with house_style():
        page = " ".join(page_of([root], []).split())
    assert "1.200 [1.200, 1.200] x native (1.500 [1.500, 1.500] x topk, which runs the same kernels) for" in page


def test_the_end_of_a_run_shows_the_three_warnings_that_weigh_most_whichever_comparison_they_are_of(tmp_path):
    facts = {"permute": {"requested": "auto", "ran": "indexed"}, "departures": ["The biases are left out."]}
    weak = {"probe_overhead": 0.05, "host_share": 1.01, "facts": facts}
    stolen = {"machine": {**QUIET_MACHINE, "stolen_s": 9.0}}
    disturbed = {"conditions": {"warm_up": {"settled": False, "change": -0.08}, "rank": stolen}}
    write_run(
        tmp_path,
        [
            FakeComparison(f"c{n}", cases=standard_cases()[2:], **FEW, **more)
            for n, more in enumerate((weak, disturbed))
        ],
    )
    begins = ("disturbed machine", "warm-up did not settle", "launch-bound", "the layer is simpler than Tiny-MoE's")
    found = [line.text for line in warnings(load(tmp_path))]
    assert len(found) == 6
    assert all(line.startswith(f"{begin}: ") for begin, line in zip(begins, found, strict=False))
    told = [line.strip() for line in end_of_run(tmp_path).splitlines() if "warning: " in line]
    assert all(line.startswith(f"warning: {begin}: ") for begin, line in zip(begins[:3], told, strict=True))


def test_a_case_takes_what_its_host_takes_without_waiting_where_that_is_longer(tmp_path):
    def told(host_share: float) -> tuple[list[str], float, float, float]:
        folder = write_run(
            tmp_path / str(host_share), [FakeComparison(cases=standard_cases()[2:], host_share=host_share)]
        )
        store = load(folder)
        (native,) = cases(store).query("role == 'baseline'").to_dict("records")
        return (
            [line.text for line in warnings(store)],
            native["median_ms"],
            native["host_bound_share"],
            native["host_busy_ms"],
        )

    nothing, device_ms, _, busy_ms = told(0.97)
    assert busy_ms == pytest.approx(0.97 * device_ms, rel=0.01)
    (line,), host_ms, share, _ = told(1.25)
    assert nothing == []
    assert line.startswith("launch-bound: in up to 100.0 %")
    assert host_ms == pytest.approx(1.25 * device_ms)
    assert share == 1


@pytest.mark.parametrize(("slower", "told"), [(1900.0, ["token_drop capacity_factor=1.0"]), (1985.0, [])])
def test_clocks_of_cases_stand_side_by_side_and_another_than_natives_is_warned_of(tmp_path, slower, told):
    """Of the slowest rank's GPU, whose clock is the higher one in native."""
    listed = [replace(case, sm_clock_mhz={0: 1990.0, 1: 1980.0}) for case in standard_cases()]
    listed[0] = replace(listed[0], sm_clock_mhz={0: slower, 1: 1985.0})
    lines = lines_of(tmp_path, cases=listed)
    (clocks,) = [line for line in lines if "median SM clock before" in line]
    assert f"token_drop capacity_factor=1.0 {min(slower, 1985):,.0f}" in clocks
    assert "native 1,980" in clocks
    warned = [line for line in lines if "native's SM clock" in line]
    assert [line.split(" ran at ")[0].rpartition("warning: ")[2].strip() for line in warned] == told
    assert not told or "-4.0 %" in warned[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "capped"),
    [
        ("gpu-check-h100", 2),
        ("gpu-check-h200", 2),
        ("olmoe-h200-emulated", 1),
        ("deepseek-v2-lite-h100-emulated", 1),
        ("quickstart-2cpu", 0),
    ],
)
def test_results_of_power_capped_gpus_say_so_with_their_clocks(name: str, capped: int) -> None:
    store = load(REFERENCE / name)
    lines = [line.text for one in store.comparisons for line in notes(store, one.directory, one.comparison_id)]
    found = [line for line in lines if re.fullmatch(
        r"rank 0's GPU was power-capped in [\d.]+ % of the samples: SM clock [\d,]+ to [\d,]+ MHz, median [\d,]+", line
    )]  # fmt: skip
    assert len(found) == capped


def test_time_that_no_phase_accounts_for_is_warned_of(tmp_path, monkeypatch):
    assert not any("unaccounted for" in line for line in lines_of(tmp_path / "aim", cases=standard_cases()[2:]))
    monkeypatch.setattr("moe_ep_bench.analysis.notes.MAX_UNACCOUNTED", 0.005)  # Runs that are made up leave 1 %.
    assert any("unaccounted for" in line for line in lines_of(tmp_path / "less", cases=standard_cases()[2:]))


def test_a_limit_is_exceeded_by_more_than_rounding():
    assert not _beyond(0.01 * (1 + 1e-12), 0.01)
    assert _beyond(0.01 * (1 + 1e-6), 0.01)
    assert not _beyond(float("nan"), 0.01)


@pytest.mark.parametrize(
    ("low", "high", "is_interval", "differs"),
    [(1.01, 1.1, True, True), (0.9, 0.99, True, True), (0.9, 1.1, True, False), (1.01, 1.1, False, False)],
)
def test_native_that_differs_from_itself_is_warned_of(low: float, high: float, is_interval: bool, differs: bool):
    noise = pd.DataFrame({"speedup_low": [low], "speedup_high": [high], "speedup_is_interval": [is_interval]})
    assert native_differs(noise) == differs


# ---- what has to be known --------------------------------------------------------------------------------------------


def test_without_baseline_or_noise_case_there_are_no_speedups_or_no_verdict(tmp_path):
    lost = [*standard_cases()[:-1], FakeCase("native", role="baseline", status="timeout", reason="no answer for 60 s")]
    assert "warning: the baseline was not measured, so there are no speedups" in lines_of(tmp_path / "a", cases=lost)
    without = [case for case in standard_cases() if case.role != "noise"]
    assert any("no noise floor" in line for line in lines_of(tmp_path / "b", cases=without))


# Of two recordings a batch of 4,096 tokens takes 2,048 each.
REPEATED = {"kind": "recorded", "description": "", "tail_model": None}
REPEATED |= {"recording": {"model": "Tiny-MoE", "sources": [{"num_tokens": 600}, {"num_tokens": 2048}]}}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "warning"),
    [
        ({"probe_overhead": 0.05}, "probes cost up to 5.0 %"),
        ({"facts": {"oversubscribed": True}}, "no straggler speedup is claimed"),
        ({"facts": {"permute": {"requested": "auto", "ran": "indexed"}}}, "do not compare phase shares with a paper's"),
        (
            {"facts": {"departures": ["The biases are left out."]}},
            "the layer is simpler than Tiny-MoE's: The biases are left out.",
        ),
        ({"facts": {"workload": REPEATED}}, "takes 2,048 of it: it repeats them 3.41 times, so batches are alike"),
        ({"host_share": 1.1}, "launch-bound: in up to 100.0 %"),
        ({"unclocked": ["topk"]}, "waits for the GPU in operations that are not timed (topk: mine.py:7): "),
        (
            {"conditions": {"warm_up": {"settled": False, "change": -0.08}}},
            "did not settle: its last round differs by -8.0",
        ),
        (
            {"conditions": {"rank": {"machine": {**QUIET_MACHINE, "machine_cpu_s": 80.0}}}},
            "other processes used 6.00 cores",
        ),
        ({"conditions": {"rank": {"machine": {**QUIET_MACHINE, "stolen_s": 9.0}}}}, "the hypervisor took 0.90 cores"),
    ],
)
def test_what_weakens_a_result_is_said(tmp_path, changes, warning):
    warnings = [line for line in lines_of(tmp_path, cases=standard_cases()[2:], **changes) if "warning:" in line]
    assert len(warnings) == 1
    assert warning in warnings[0]


@pytest.mark.parametrize(("last", "words"), [(0.6, "-4"), (1.6, "+6"), (0.95, "")])
def test_times_that_drift_either_way_are_warned_of(tmp_path: Path, last: float, words: str) -> None:
    """The case that drifts most counts; times of its last iteration are so many times as long."""
    run_of(tmp_path, cases=standard_cases()[2:], num_iterations=3)
    (topk,) = [key for key, case in read_json(tmp_path / "run.json")["cases"].items() if case["policy"] == "topk"]
    for part in (tmp_path / "cases").iterdir():
        rows = pq.read_table(part)
        is_late = pc.and_(pc.equal(rows["case_id"], topk), pc.equal(rows["iteration"], 2))
        time_us = pc.multiply(rows["time_us"], pc.if_else(is_late, last, 1.0))
        pq.write_table(rows.set_column(rows.schema.get_field_index("time_us"), "time_us", time_us), part)
    lines = [line.text for line in warnings(load(tmp_path)) if line.text.startswith("times drifted by ")]
    assert [text.partition("drifted by ")[2][:2] for text in lines] == [words] * bool(words)


@pytest.mark.parametrize("looks", [False, True])
def test_what_looks_past_a_recorded_top_k_is_said_to_rest_on_the_tail_model(tmp_path, looks):
    about = {"cases": [FakeCase("laser", looks_past_top_k=looks), FakeCase("native", role="baseline")]}
    recorded = {"kind": "recorded", "description": "ShareGPT", "tail_model": "popularity"}
    lines = lines_of(tmp_path, **about, facts={"workload": recorded})
    assert any("are modelled (popularity tail), and laser decided by them" in line for line in lines) == looks


@pytest.mark.parametrize("modelled", [False, True])
def test_a_modelled_policy_without_a_kernel_is_said_to_be_charged_as_one(tmp_path, modelled):
    facts = modelled_facts() if modelled else {}
    lines = lines_of(tmp_path, cases=[FakeCase("own", by_torch=True), *standard_cases()], facts=facts)
    said = "own: torch operations, modelled as if compiled; on a GPU they take longer"
    assert [line for line in lines if "torch operations" in line] == [said] * modelled


# ---- formats ---------------------------------------------------------------------------------------------------------


def test_latex_and_markdown_keep_their_columns_whatever_a_label_holds(directory, capsys):
    latex, markdown = (shown(capsys, directory, "--format", to) for to in ("latex", "md"))
    (row,) = (line for line in latex.splitlines() if line.startswith(escape_latex(f"oea k0={NASTY}")))
    (alignment,) = re.findall(r"\\begin\{tabular\}\{([lr]+)\}", latex)
    assert len(re.findall(r"(?<!\\)&", row)) + 1 == len(alignment)
    (row,) = (line for line in markdown.splitlines() if line.startswith(f"| {escape_markdown(f'oea k0={NASTY}')}"))
    rule = next(line for line in markdown.splitlines() if line.startswith("| ---"))
    assert len(re.findall(r"(?<!\\)\|", row)) == rule.count("|")


def test_a_latex_table_has_a_caption_of_one_sentence_and_all_else_as_notes(directory, capsys):
    latex = shown(capsys, directory, "--format", "latex")
    assert re.findall(r"\\caption\{(.*)\}", latex) == ["Tiny-MoE, EP 2, 4,096 tokens."]
    for rule in ("toprule", "midrule", "bottomrule"):
        assert latex.count(f"\\{rule}") == 1
    below = latex.partition(r"\end{tabular}")[2].partition(r"\begin{minipage}{\linewidth}")[2]
    notes, _, end = below.partition(r"\end{minipage}")
    assert end.split() == [r"\end{table}"]
    first, *others = notes.strip().removeprefix(r"\footnotesize").strip().split("\n\n")
    assert first.startswith("Measured, ")
    assert "bfloat16, true sizes." in first
    assert "lynx: oom: too large." in others, "a policy keeps its name"
    assert any(line.startswith("Speedup: slowest rank's layer time") for line in others)
    assert not [line for line in latex.splitlines() if line.startswith("%")][1:], "no note is a comment"


@pytest.mark.slow
def test_columns_that_are_asked_for_stand_in_their_order_in_every_format(directory, capsys):
    asked = ["label", "speedup_low", "median_ms", "num_experts", "backend"]
    headers = ["policy", "speedup low", "layer ms", "num experts", "backend"]
    frame = cases(load(directory)).query("status == 'ok'")
    text, markdown, latex = (
        shown(capsys, directory, "--columns", ",".join(asked), "--format", to) for to in ("text", "md", "latex")
    )
    lines = text.splitlines()
    header = next(number for number, line in enumerate(lines) if line.startswith("policy "))
    assert re.split(r"\s{2,}", lines[header]) == headers
    drop = next(re.split(r"\s{2,}", line) for line in lines if line.startswith(DROP))
    (row,) = frame.query("label == @DROP").to_dict("records")
    assert drop == [DROP, f"{row['speedup_low']:.4g}", f"{row['median_ms']:.3f}", "8", "nccl"]
    assert f"| {' | '.join(headers)} |" in markdown.splitlines()
    assert f"{' & '.join(headers)} \\\\" in latex.splitlines()
    assert "lynx: oom: too large" in text, "what was not measured is said whatever the columns"
    rows = pd.read_csv(io.StringIO(shown(capsys, directory, "--columns", ",".join(asked), "--format", "csv")))
    assert list(rows) == asked
    content = json.loads(shown(capsys, directory, "--columns", "label,median_ms", "--format", "json"))
    assert {tuple(row) for row in content["rows"]} == {("label", "median_ms")}
    one = shown(capsys, directory, "--columns", "median_ms", "--format", "md")
    assert "| layer ms |" in one.splitlines(), "a single column is a table too"


def test_columns_of_another_view_and_an_interval_are_shown_as_the_view_shows_them(directory, capsys):
    text = shown(capsys, directory, "--view", "ranks", "--columns", "rank,experts_ms")
    assert any(re.split(r"\s{2,}", line) == ["rank", "experts ms"] for line in text.splitlines())
    whole = shown(capsys, directory, "--format", "md")
    cell = next(line for line in whole.splitlines() if line.startswith("| token")).split("|")[3].strip()
    few = shown(capsys, directory, "--format", "md", "--columns", "label,speedup_median")
    assert next(line for line in few.splitlines() if line.startswith("| token")).split("|")[2].strip() == cell


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--columns", "label,median_m"], "--columns: got 'median_m' (did you mean median_ms?); expected some of "),
        (["--columns", "facts"], "--columns: got 'facts'"),
        (["--columns", "rank", "--format", "csv"], "--columns: got 'rank' (did you mean rank_imbalance?); expected "),
        (["--columns", "label", "--format", "html"], "--columns: goes with --format text, md, latex, csv, json; got "),
    ],
)
def test_columns_that_are_unknown_are_one_line_with_the_known_ones(directory, capsys, arguments, line):
    assert main(["show", str(directory), *arguments]) == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert said.startswith(f"moe-ep-bench: {line}")
    names = said.partition("expected some of ")[2].split(", ")
    assert (len(names) > 50) == ("html" not in arguments)
    assert names[-1] in {*cases(load(directory)), ""}, "all are listed"


@pytest.mark.parametrize("of_whole", [False, True], ids=["layer", "model"])
def test_the_table_of_phases_and_its_figure_give_one_total(tmp_path, of_whole):
    if of_whole:
        write_whole(tmp_path, standard_cases(), of_layers=9)
    else:
        run_of(tmp_path, num_ranks=4, noise=0.05)
    store = load(tmp_path)
    (table,) = tables(store, ["phases"])
    of_table = {row["label"]: COLUMNS["phases_ms"].shown(row) for row in table.rows}
    assert "all phases ms" in [column.title for column in table.columns]
    with house_style():
        drawing = draw(FIGURES["phases"], store)
    bars = [text.get_text().split("\n")[0] for text in drawing.figure.axes[0].get_yticklabels()]
    beside = sorted(drawing.figure.axes[0].texts, key=lambda text: text.xy[1])
    assert len(bars) == len(of_table)
    named = drawing.rows.drop_duplicates("label")["label"]
    assert [text.get_text() for text in beside] == [of_table[label] for label in named]


def test_programs_get_every_column_unrounded_and_json_is_the_csvs_rows(directory, capsys):
    frame = cases(load(directory)).drop(columns=["run", "facts", "settings"])
    rows = pd.read_csv(io.StringIO(shown(capsys, directory, "--format", "csv")))
    assert list(rows.columns) == list(frame.columns)
    numbers = rows.select_dtypes("number").columns
    pd.testing.assert_frame_equal(rows[numbers], frame[numbers].astype(rows[numbers].dtypes), rtol=1e-12)
    content = json.loads(shown(capsys, directory, "--format", "json"))
    assert content["version"] == JSON_VERSION
    assert [row["case_id"] for row in content["rows"]] == list(rows["case_id"])
    assert content["rows"][-1].keys() == frame.columns.to_frame().index.to_series().to_dict().keys()


def test_a_modelled_row_names_its_device_links_and_traffic(tmp_path, capsys):
    traffic = {"kind": "synthetic", "description": "", "tail_model": None, "targets": {"peak_load": 4.0}, "seed": 7}
    facts = {
        **modelled_facts(links="h100-nvlink4-ndr", bandwidth_scale=2.0),
        "workload": traffic,
    }
    write_run(tmp_path, [FakeComparison(cases=standard_cases(), **FEW, facts=facts, num_ranks=4)], "emulated")
    rows = pd.read_csv(io.StringIO(shown(capsys, tmp_path, "--format", "csv")))
    expected = {"mode": "emulated", "origin": "modelled", "device": "h100-sxm", "ep_size": 4}
    expected |= {"links": "h100-nvlink4-ndr, bandwidth x 2", "num_tokens": 4096, "peak_load": 4.0, "seed": 7}
    assert {column: set(rows[column]) for column in expected} == {column: {of} for column, of in expected.items()}
    assert "NVIDIA Fake" not in rows.to_csv()
