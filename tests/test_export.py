"""What other programs read of a run: a trace for Perfetto, tables for a paper, CSV."""

from __future__ import annotations

import functools
import io
import json
import re
import subprocess
import sys

import pandas as pd
import pytest
from results_builder import FAST_RANK, FakeCase, FakeComparison, standard_cases, write_run

from moe_ep_bench.analysis import show
from moe_ep_bench.analysis.load import load_run
from moe_ep_bench.analysis.render import JSON_VERSION, escape_latex, escape_markdown
from moe_ep_bench.analysis.speedups import analyse
from moe_ep_bench.cli import main
from moe_ep_bench.schema import LAYER_PHASES, UNACCOUNTED

DROP = "token_drop gamma 1"
# What LaTeX, Markdown and CSV each take for their own.
NASTY = r'50% of_a|b & "c", $x^2 {~} #1 <i>\\'


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    cases = [*standard_cases(), FakeCase("oea", label=NASTY, speedup=1.1, mass=0.9)]
    cases.append(FakeCase("lynx", status="oom", reason="too large"))
    comparison = FakeComparison(cases=cases, num_batches=5, num_iterations=3)
    return write_run(tmp_path_factory.mktemp("export") / "run", [comparison])


@pytest.fixture
def exported(directory, capsys, monkeypatch):
    """What ``show`` prints of the directory, which is read once."""
    monkeypatch.setattr(show, "load_times", read)

    def run(*arguments: str) -> str:
        assert main(["show", str(directory), *arguments]) == 0
        return capsys.readouterr().out

    return run


read = functools.cache(load_run)


def case_of(directory, label=DROP):
    return next(case for case in read(directory).cases if case.label == label)


def bars_of(trace, category=None):
    bars = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    return [bar for bar in bars if category in (None, bar["cat"])]


# ---- what a modelled row is of --------------------------------------------------------------------------------------


@pytest.mark.parametrize("to", ["csv", "json"])
def test_a_modelled_row_names_its_device_links_and_traffic(tmp_path, capsys, to):
    workload = {"kind": "synthetic", "description": "", "tail_model": None, "targets": {"peak_load": 4.0}, "seed": 7}
    facts = {
        "device": "modelled by devices/h100-sxm: roofline of 989.4 bf16 TFLOP/s",
        "links": "modelled by links/h100-nvlink4-ndr, bandwidth x 2: inside a node of 8 10.6 us",
        "transport": "copies",
        "workload": workload,
    }
    comparison = FakeComparison(cases=standard_cases(), num_batches=2, num_iterations=1, facts=facts, num_ranks=4)
    directory = write_run(tmp_path, [comparison], "emulated", environment={"device_name": "AMD EPYC"})
    assert main(["show", str(directory), "--format", to]) == 0
    text = capsys.readouterr().out
    rows = pd.DataFrame(json.loads(text)["rows"]) if to == "json" else pd.read_csv(io.StringIO(text))
    expected = {"mode": "modelled", "device": "h100-sxm", "links": "h100-nvlink4-ndr, bandwidth x 2"}
    expected |= {"transport": "copies", "ep_size": 4, "num_tokens": 4096, "peak_load": 4.0, "seed": 7}
    for column, value in expected.items():
        assert set(rows[column]) == {value}
    assert set(rows["role"]) == {"policy", "ceiling", "noise", "baseline"}
    assert "EPYC" not in text


# ---- Perfetto -------------------------------------------------------------------------------------------------------


def test_trace_follows_the_trace_event_format(exported):
    """As Perfetto imports it (Trace Event Format; perfetto.dev, "Importing JSON traces")."""
    chosen = ("--case", "native", "--case", DROP, "--iteration", "slowest", "--iteration", "median")
    trace = json.loads(exported("--format", "perfetto", *chosen), parse_constant=pytest.fail)
    events = trace["traceEvents"]
    assert trace["displayTimeUnit"] in ("ms", "ns")
    assert "reconstructed" in trace["otherData"]["how"]
    assert trace["otherData"]["mode"] == "run"
    whole = [bar["name"].partition(",")[0] for bar in bars_of(trace, "iteration") if bar["pid"] == 0]
    assert whole == ["native"] * 2 + ["native again"] * 2 + [DROP] * 2
    tracks: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for event in events:
        # Complete events and metadata: no begins without an end, and no flows, whose ids would have to match.
        assert event["ph"] in ("X", "M")
        assert isinstance(event["name"], str)
        assert isinstance(event.get("cat", ""), str)
        assert isinstance(event.get("args", {}), dict)
        assert not {"id", "id2", "bind_id", "flow_in", "flow_out"} & event.keys()
        assert all(type(event[name]) is int for name in ("pid", "tid"))
        assert type(event["ts"]) in (int, float)
        assert event["ts"] >= 0
        if event["ph"] == "X":
            assert event["dur"] >= 0
            # Microseconds with three decimals are whole nanoseconds, which is what Perfetto keeps.
            start, length = (round(1000 * event[name]) for name in ("ts", "dur"))
            assert (start, length) == pytest.approx((1000 * event["ts"], 1000 * event["dur"]), abs=1e-3)
            tracks.setdefault((event["pid"], event["tid"]), []).append((start, start + length))
    for bars in tracks.values():
        open_until: list[int] = []
        assert bars == sorted(bars, key=lambda bar: (bar[0], -bar[1]))  # whole before part, as importers sort them
        for start, end in bars:
            while open_until and open_until[-1] <= start:
                open_until.pop()
            assert not open_until or end <= open_until[-1], "bars overlap in part"
            open_until.append(end)
            assert len(open_until) <= 2
    allowed = {"process_name": "name", "process_sort_index": "sort_index", "thread_name": "name"}
    metadata = [event for event in events if event["ph"] == "M"]
    assert {(event["pid"], event["name"]) for event in metadata} == {
        (pid, name) for pid, _ in tracks for name in allowed
    }
    assert all(list(event["args"]) == [allowed[event["name"]]] for event in metadata)
    assert all((event["pid"], event["tid"]) in tracks for event in metadata)


def test_phases_stand_in_the_layers_order_and_are_as_long_as_measured(directory, exported):
    trace = json.loads(exported("--format", "perfetto", "--case", DROP, "--iteration", "4/2"))
    case = case_of(directory)
    rows = case.timings[(case.timings["kind"] == "breakdown")]
    rows = rows[(rows["batch"] == 4) & (rows["iteration"] == 2)]
    for rank in (0, 1):
        bars = [bar for bar in bars_of(trace) if bar["pid"] == rank and bar["cat"] != "iteration"]
        measured = rows[rows["rank"] == rank].set_index("phase")["time_us"]
        order = [phase for phase in (*LAYER_PHASES, UNACCOUNTED) if measured.get(phase, 0) > 0]
        assert [bar["name"] for bar in bars] == order
        for bar in bars:
            assert bar["dur"] == pytest.approx(measured[bar["name"]], abs=0.002)
        ends = [bar["ts"] + bar["dur"] for bar in bars]
        assert [bar["ts"] for bar in bars[1:]] == pytest.approx(ends[:-1], abs=0.002)
        (whole,) = [bar for bar in bars_of(trace, "iteration") if bar["pid"] == rank]
        assert whole["dur"] == pytest.approx(measured["total"], abs=0.002)
        assert whole["ts"] == bars[0]["ts"]
        assert ends[-1] == pytest.approx(whole["ts"] + whole["dur"], abs=0.02)


def test_waiting_has_a_category_and_a_colour_of_its_own(exported):
    trace = json.loads(exported("--format", "perfetto", "--case", DROP))
    # Rank 1 saves a fifth of the experts' time and waits for 99 % of that.
    for about in (bar["args"] for bar in bars_of(trace, "iteration")):
        assert about["slowest_rank"] == 0
        assert about["meeting_spread_us"] == pytest.approx(0.01 * (1 - FAST_RANK) * 0.44 * about["layer_us"], abs=0.01)
    waiting = bars_of(trace, "waiting")
    assert {bar["name"] for bar in waiting} == {"wait_combine"}
    assert {bar["pid"] for bar in waiting} == {1}  # rank 0 is the slowest: it waits for nobody
    assert {bar["cname"] for bar in waiting} == {"grey"}
    assert all("cname" not in bar for bar in bars_of(trace, "phase"))


def test_median_slowest_and_fastest_are_what_they_say(directory, exported):
    case = case_of(directory)
    rows = case.timings[(case.timings["kind"] == "breakdown") & (case.timings["phase"] == "total")]
    layer_us = rows.groupby(["launch", "batch", "iteration"])["time_us"].max().sort_values()
    for word, expected in (("fastest", layer_us.iloc[0]), ("slowest", layer_us.iloc[-1])):
        (bar, _) = bars_of(
            json.loads(exported("--format", "perfetto", "--case", DROP, "--iteration", word)), "iteration"
        )
        assert bar["args"]["layer_us"] == pytest.approx(expected, abs=0.001)
    (bar, _) = bars_of(json.loads(exported("--format", "perfetto", "--case", DROP)), "iteration")
    assert abs(layer_us - layer_us.median()).min() == pytest.approx(
        abs(bar["args"]["layer_us"] - layer_us.median()), abs=0.001
    )
    everything = json.loads(exported("--format", "perfetto", "--case", DROP, "--iteration", "all"))
    assert len(bars_of(everything, "iteration")) == 2 * 15


def test_an_emulated_trace_says_so(tmp_path, capsys):
    emulated = write_run(tmp_path / "run", [FakeComparison(cases=standard_cases(), num_iterations=1)], "emulated")
    assert main(["show", str(emulated), "--format", "perfetto", "--case", "topk"]) == 0
    trace = json.loads(capsys.readouterr().out)
    assert trace["otherData"]["how"].startswith("Emulated:")
    assert bars_of(trace, "iteration")[0]["args"]["how"].startswith("emulated")


# ---- tables ---------------------------------------------------------------------------------------------------------


def test_latex_and_markdown_keep_their_columns_whatever_a_label_holds(exported):
    text = exported("--format", "latex")
    assert escape_latex(NASTY) in text
    assert "oom" in text
    body = text[text.index(r"\midrule") : text.index(r"\bottomrule")]
    rows = [line for line in body.splitlines() if line.endswith(r"\\")]
    assert len(rows) == 7
    # Unescaped ampersands are columns, and nothing else stands unescaped.
    assert {len(re.findall(r"(?<!\\)&", row)) for row in rows} == {10}
    for row in rows:
        assert not re.search(r"(?<!\\)[%$#_]", row)
    assert text.startswith("% \\usepackage{booktabs}")
    assert "noise floor" in text[: text.index(r"\toprule")]
    lines = [line for line in exported("--format", "md").splitlines() if line.startswith("|")]
    assert len(lines) == 9
    assert {len(re.findall(r"(?<!\\)\|", line)) for line in lines} == {12}
    assert any(escape_markdown(NASTY) in line for line in lines)


def test_tables_say_what_the_summary_says(directory, exported):
    drop = next(r for one in analyse(read(directory)) for r in one.results if r.case.label == DROP)
    # Five batches are too few for an interval and a verdict: their range.
    speedup = f"{drop.speedup.median:.3f} ({drop.speedup.low:.3f}..{drop.speedup.high:.3f})"
    for to in ("latex", "md"):
        (row,) = [
            line
            for line in exported("--format", to).splitlines()
            if "drop gamma 1" in line and line.count("&" if to == "latex" else "|") > 5
        ]
        assert speedup in row.replace("\\", "")
        assert {"25.0", "80.0", "inconclusive"} <= set(re.findall(r"[\w.]+", row))


# ---- CSV ------------------------------------------------------------------------------------------------------------


def test_csv_has_a_row_per_case_with_unrounded_numbers(directory, exported):
    frame = pd.read_csv(io.StringIO(exported("--format", "csv")))
    assert len(frame) == 7
    assert frame["case_id"].is_unique
    assert NASTY in set(frame["label"])
    drop = frame.set_index("label").loc[DROP]
    result = next(r for one in analyse(read(directory)) for r in one.results if r.case.label == DROP)
    assert drop["speedup_median"] == result.speedup.median
    assert drop["speedup_low"] == result.speedup.low
    assert drop["dropped_share"] == pytest.approx(0.25)
    assert json.loads(drop["policy_params"]) == {"capacity_factor": 1.0}
    lost = frame.set_index("status").loc["oom"]
    assert pd.isna(lost["median_ms"])
    assert lost["reason"] == "too large"


def test_samples_are_all_there(directory, exported):
    frame = pd.read_csv(io.StringIO(exported("--format", "csv", "--samples", "--case", DROP)))
    case = case_of(directory)
    assert len(frame) == len(case.timings)
    assert frame["time_us"].sum() == pytest.approx(case.timings["time_us"].sum())
    assert set(frame["mode"]) == {"run"}


# ---- the command ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("samples", [[], ["--samples", "--case", DROP]])
def test_json_is_the_csvs_rows(exported, samples):
    found = json.loads(exported("--format", "json", *samples), parse_constant=pytest.fail)
    assert found["version"] == JSON_VERSION
    expected = pd.read_csv(io.StringIO(exported("--format", "csv", *samples)))
    found = pd.DataFrame(found["rows"]).replace({None: float("nan")})
    pd.testing.assert_frame_equal(found, expected, check_dtype=False)


@pytest.mark.parametrize("to", ["text", "perfetto"])
def test_a_file_holds_the_same_bytes_as_standard_output_every_time(directory, exported, tmp_path, to):
    out = tmp_path / "below" / "file"
    assert exported("--format", to, "--out", str(out)) == ""
    assert out.read_text() == exported("--format", to)
    assert [path.name for path in out.parent.iterdir()] == ["file"]


def test_standard_output_that_out_leads_to_is_written_on_and_not_replaced(directory, exported, tmp_path):
    # Through a link, so that a write that replaces what it is given harms no device of this machine.
    (tmp_path / "link").symlink_to("/dev/stdout")
    command = [sys.executable, "-m", "moe_ep_bench", "show", str(directory), "--format", "csv"]
    command += ["--out", str(tmp_path / "link")]
    with (tmp_path / "log").open("w") as log:
        log.write("before\n")
        log.flush()
        done = subprocess.run(command, stdout=log, stderr=subprocess.PIPE, text=True, timeout=600, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / "log").read_text() == f"before\n{exported('--format', 'csv')}"
    assert (tmp_path / "link").is_symlink()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--format", "csv", "--case", "nobody"], "--case nobody: expected a case's id, label or policy of: native"),
        (["--format", "csv", "--case", "lynx"], "--case lynx: was not measured (oom)"),
        (
            ["--format", "perfetto", "--iteration", "first"],
            "--iteration: expected median, slowest, fastest, all or [LAUNCH/]BATCH/ITERATION; got 'first'",
        ),
        (
            ["--format", "perfetto", "--iteration", "0/99"],
            "--iteration: expected a breakdown iteration of native (launch 0..0, batch 0..4, iteration 0..2); got 0/99",
        ),
        (["--format", "csv", "--iteration", "median"], "--iteration: goes with --format perfetto"),
        (["--format", "latex", "--samples"], "--samples: goes with --format csv"),
        (["--format", "excel"], "--format: expected one of text, md, latex, csv, json, html, perfetto; got 'excel'"),
        (["--case", "native"], "--case: goes with --format md, latex, csv, json, perfetto; got --format text"),
    ],
)
def test_mistakes_are_one_line_and_status_2(directory, exported, capsys, arguments, words):
    assert main(["show", str(directory), *arguments]) == 2
    printed = capsys.readouterr()
    assert words in printed.err
    assert printed.err.count("\n") == 1
    assert printed.out == ""


def test_nothing_is_written_over_a_directory_and_a_run_without_breakdown_has_no_trace(tmp_path, capsys):
    assert main(["show", str(tmp_path / "nowhere"), "--format", "csv"]) == 2
    assert "no such directory" in capsys.readouterr().err
    plain = write_run(tmp_path / "run", [FakeComparison(cases=standard_cases(), kinds=("plain",), num_iterations=1)])
    assert main(["show", str(plain), "--format", "perfetto"]) == 2
    assert "no breakdown iterations" in capsys.readouterr().err
    assert main(["show", str(plain), "--format", "csv", "--out", str(tmp_path)]) == 2
    assert "is a directory" in capsys.readouterr().err
