"""The page: rows whose every number is known, and the HTML that is made of them."""

from __future__ import annotations

import dataclasses
import json
from html.parser import HTMLParser
from pathlib import Path

import pandas as pd
import pytest
from matplotlib.figure import Figure
from results_builder import (
    FAST_RANK,
    QUIET_MACHINE,
    FakeCase,
    FakeComparison,
    modelled_facts,
    standard_cases,
    write_run,
)

from moe_ep_bench.analysis import page as page_module
from moe_ep_bench.analysis.advice import Advice, advice_lines
from moe_ep_bench.analysis.cases import cases, load
from moe_ep_bench.analysis.columns import COLUMNS
from moe_ep_bench.analysis.drawing import Drawing
from moe_ep_bench.analysis.page import write_report
from moe_ep_bench.analysis.tables import VIEWS, fastest, table_of
from moe_ep_bench.cli import main
from moe_ep_bench.files import write_json
from moe_ep_bench.machine.provenance import asked

NATIVE = {"case_id": "n", "label": "native", "origin": "measured", "median_ms": 2.0}
ANSWER = {"comparison_id": "c0", "point": {}, "scope": "layer", "native": NATIVE, "pick": None}
ANSWER |= {"facts": FakeComparison(facts={"title": "Tiny"}).described(), "environment": {"device_name": "here"}}
ADVICE = {"max_dropped": 0.1, "min_retained": 0.95, "assumptions": [], "notes": []}

# What a label or a host name may try.
HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)>{{ 7 * 7 }}"
FAILED = "rank 3: tried to allocate 12.3 GiB"


@pytest.fixture(autouse=True)
def drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """One small figure in place of all, which have tests of their own."""

    def figures(*_: object) -> dict[str, Drawing]:
        return {"speedup": Drawing(Figure(figsize=(2, 1)), pd.DataFrame(), "A title", f"how to read {HOSTILE}")}

    monkeypatch.setattr(page_module, "drawings", figures)
    monkeypatch.setattr(page_module, "settle", lambda _: None)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One policy faster and one slower than native, one lost; a host that throttles and has a hostile name."""
    more = [
        FakeCase("oea", params={"k0": HOSTILE}, speedup=0.8),
        FakeCase("laser", status="oom", reason=FAILED),
    ]
    throttled = {**QUIET_MACHINE, "throttle_shares": {"hw_thermal": 0.2}}
    rank = {"hostname": HOSTILE, "machine": throttled}
    comparison = FakeComparison(cases=[*standard_cases(), *more], num_iterations=1, conditions={"rank": rank})
    return write_run(tmp_path_factory.mktemp("one"), [comparison])


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


def page_of(directory: Path, out: Path) -> str:
    return write_report([directory], out)[0].read_text()


def test_the_page_begins_with_what_was_found_and_says_what_was_not(directory: Path, tmp_path: Path) -> None:
    text = " ".join(Parsed(page_of(directory, tmp_path / "page.html")).text.split())
    head = text[: text.index("Tables")]
    assert "token_drop capacity_factor=1.0 gains most, 1.5" in head
    assert "it drops 25.0 % and keeps 80.0 % of the score mass" in head
    assert "Measured: NVIDIA Fake 80GB x 2 ranks" in head
    assert "1 not (1 oom); weights are random." in head
    assert f"not measured: laser, oom: {FAILED}" in text
    assert "was slowed down by heat in 20 % of the samples" in text


def test_the_rank_that_others_wait_for_shows(directory: Path) -> None:
    store = load(directory)
    ranks = table_of(store, VIEWS["ranks"], cases(store)).frame.set_index(["label", "rank"])
    native = ranks.loc["native"]
    assert native["experts_ms"][1] == pytest.approx(FAST_RANK * native["experts_ms"][0])
    assert native["waiting_ms"][0] == 0 < native["waiting_ms"][1]
    assert native["hostname"].tolist() == [HOSTILE] * 2
    assert set(ranks.index.get_level_values("label")) == {"native", "token_drop capacity_factor=1.0"}


def test_of_several_comparisons_the_fastest_policies_are_found(tmp_path: Path) -> None:
    usual = standard_cases()
    comparisons = [
        FakeComparison(f"c{number}", {"title": f"peak {number}"}, listed, num_batches=2)
        for number, listed in enumerate((usual, usual[2:], usual[:3]))
    ]
    rows = fastest(cases(load(write_run(tmp_path, comparisons))))
    found = list(rows[["title", "label"]].itertuples(index=False, name=None))
    assert found == [("peak 0", "token_drop capacity_factor=1.0")], "topk is no policy; without native nothing is fast"


def test_labels_and_host_names_are_text_and_nothing_is_fetched(directory: Path, tmp_path: Path) -> None:
    page = page_of(directory, tmp_path / "page.html")
    parsed = Parsed(page)
    assert all(f">{COLUMNS[name].title}</th>" in page for name in ("median_ms", "dropped_share", "experts_ms"))
    assert [tag["id"] for name, tag in parsed.tags if name == "figure"] == ["figure-speedup"]
    assert page.count('src="data:image/') == 1
    assert '<td class=number data-value="2.0' in page
    assert "default-src 'none'" in page
    for tag, attributes in parsed.tags:
        named = (attributes.get(name) or "#" for name in ("src", "href", "srcset", "action", "data", "poster"))
        assert all(address.startswith(("#", "data:")) for address in named), (tag, attributes)
    assert [attributes for tag, attributes in parsed.tags if tag == "script"] == [{}]  # ours
    assert all("onerror" not in attributes for _, attributes in parsed.tags)
    assert HOSTILE in parsed.text  # written out, its braces included


def test_config_and_command_stand_word_for_word(tmp_path: Path) -> None:
    """And of jobs that recorded neither the resolved values."""
    write_run(tmp_path, [FakeComparison(cases=standard_cases(), num_batches=1, num_iterations=1)])
    path = tmp_path / "run.json"
    content = json.loads(path.read_text())
    job, command = content["runs"]["r0"], "moe-ep-bench run mine.yaml --set 'a=<b>'"
    content["runs"]["r0"] = {**job, "config_text": "name: mine  # <why>\n", "command": command}
    content["runs"]["r9"] = {**job, "config_text": None, "command": None, "config": [{"name": "older"}]}
    write_json(path, content)
    text = Parsed(page_of(tmp_path, tmp_path / "page.html")).text
    for words in ("name: mine  # <why>", command, "- name: older", "# the command was not recorded"):
        assert words in text


def test_a_job_records_its_config_and_command_word_for_word(tmp_path: Path) -> None:
    config = tmp_path / "mine.yaml"
    config.write_text("name: mine  # why\n")
    assert asked(["run", str(config), "--set", "a=b c"]) == {
        "command": f"moe-ep-bench run {config} --set 'a=b c'",
        "config_text": "name: mine  # why\n",
    }
    assert asked(["show", str(config)]) == asked([]) == asked(["run", str(tmp_path / "none.yaml")]) == {}


def test_a_damaged_part_is_left_out_and_named_among_the_warnings_of_a_modelled_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    facts = modelled_facts()
    comparison = FakeComparison(cases=standard_cases(), num_batches=1, num_iterations=1, facts=facts)
    write_run(tmp_path, [comparison, dataclasses.replace(comparison, comparison_id="c1")], mode="emulated")
    (tmp_path / "cases" / "c1-0.parquet").write_bytes(b"PAR1")
    assert main(["show", str(tmp_path), "--format", "html"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "c1-0.parquet: damaged" in line
    text = Parsed((tmp_path / "report.html").read_text()).text
    assert f"left out: {line.removeprefix('moe-ep-bench: ')}" in text
    assert "Modelled (nothing was run): 2 ranks, modelled by devices/h100-sxm, links h100-nvlink4;" in text


@pytest.mark.slow
@pytest.mark.parametrize(
    ("content", "key"),
    [
        ("{", "advice.json"),
        ("{}", "max_dropped"),
        (json.dumps({**ADVICE, "answers": [{**ANSWER, "pick": {**NATIVE, "speedup": None}}]}), "answers.0.pick."),
        (json.dumps({**ADVICE, "answers": [{**ANSWER, "reason": "does_not_fit"}]}), "facts.fit: expected the memory"),
    ],
)
def test_an_answer_that_somebody_changed_is_left_out_and_named(content: str, key: str, tmp_path: Path) -> None:
    write_run(tmp_path, [FakeComparison(cases=standard_cases(), num_batches=1, num_iterations=1)])
    (tmp_path / "advice.json").write_text(content)
    path, (line,) = write_report([tmp_path])
    page = Parsed(path.read_text()).text
    assert key in line
    assert "advice.json" in line
    assert line in page


def test_the_first_figure_of_an_answer_is_of_its_picks_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["speedup", "phases", "ranks", "load"]
    figures = {name: Drawing(Figure(figsize=(2, 1)), pd.DataFrame(), name, "") for name in names}
    monkeypatch.setattr(page_module, "drawings", lambda *_: figures)
    directory = write_run(tmp_path, [FakeComparison(cases=standard_cases(), num_batches=1, num_iterations=1)])
    for answers, first in (None, "speedup"), ([ANSWER], "ranks"):
        if answers:
            (directory / "advice.json").write_text(json.dumps({**ADVICE, "answers": answers}))
        page = Parsed(page_of(directory, tmp_path / "page.html"))
        drawn = [attributes["alt"] for tag, attributes in page.tags if tag == "img"]
        assert str(drawn[0]).startswith(first)
        assert len(drawn) == 4


def test_an_answer_beside_results_begins_the_page(tmp_path: Path) -> None:
    write_run(tmp_path, [FakeComparison(cases=standard_cases(), num_batches=1, num_iterations=1)])
    (tmp_path / "advice.json").write_text(json.dumps({**ADVICE, "answers": [ANSWER]}))
    path, passed_over = write_report([tmp_path])
    page = Parsed(path.read_text()).text
    assert passed_over == []
    assert "Native takes 2.000 ms (measured)." in page
    assert "For Tiny; here x 2 ranks, nccl; at most 10 % of the pairs dropped and 5 % of the score mass lost." in page


def test_answers_say_once_what_they_share_and_name_what_tells_them_apart() -> None:
    facts = FakeComparison(facts={**modelled_facts(), "title": "Tiny"}).described()
    variant = {"overlap": "two_batch", "native": NATIVE, "pick": None}
    points = ({"workload.seed": seed, "layer.ep_size": 2} for seed in (1, 2))
    answers = [{**ANSWER, "facts": facts, "point": point, "variants": [variant]} for point in points]
    *_, last = advice_lines(Advice.model_validate({**ADVICE, "answers": answers}))[-1].splitlines()
    ran_on = "2 ranks, modelled by devices/h100-sxm; modelled by links/h100-nvlink4"
    assert last.startswith(f"For Tiny, seed 1 / seed 2; {ran_on}; at most 10 % of the pairs dropped")
    assert last.endswith(", no overlap / two micro-batches that overlap.")
