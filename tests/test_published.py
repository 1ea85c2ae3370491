"""The papers' numbers as data: that nothing was lost in copying, and what the papers themselves got wrong."""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess
import sys
from pathlib import Path
from statistics import mean
from typing import Any

import pytest

from moe_ep_bench.bench.plan import make_point
from moe_ep_bench.bench.point import VIRTUAL
from moe_ep_bench.cli import main
from moe_ep_bench.config.files import load_experiments
from moe_ep_bench.cost_model.links import Links
from moe_ep_bench.errors import OK, USER_ERROR
from moe_ep_bench.files import parse_yaml
from moe_ep_bench.papers import FOLDER, Item, Number, load, names, numbers, orderings
from moe_ep_bench.papers.claims import Claim
from moe_ep_bench.papers.run import _has, _is_at
from moe_ep_bench.policies import POLICIES, make_policy

ROOT = Path(__file__).parents[1]
CONFIGS = ROOT / "configs" / "papers"
IDS = {
    "capacity": "2503.05066",
    "laser": "2510.03293",
    "llep": "2601.17111",
    "metro": "2512.09277",
    "oea": "2511.02237",
    "sere": "2602.07616",
    "ultraep": "2606.04101",
    "xshare": "2602.07265",
}


def values(paper: str, item: str, **wanted: Any) -> list[float]:
    return [number.value for number in numbers(paper, item=item, **wanted)]


def by(found: list[Number], *keys: str) -> dict[tuple[Any, ...], Number]:
    """Numbers by settings, each once."""
    told = {tuple(number.where.get(key, getattr(number, key, None)) for key in keys): number for number in found}
    assert len(told) == len(found)
    return told


def rounding(number: Number) -> float:
    """Half of the last printed digit: what rounding may have hidden."""
    return 0.5 * 10 ** -len(number.printed.partition(".")[2])


# --- The data ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", names())
def test_every_number_is_told_apart_from_all_others(name: str) -> None:
    parse_yaml((FOLDER / f"{name}.yaml").read_text())  # No key stands twice.
    told = [
        (n.item, n.kind, n.metric, n.unit, n.model, *sorted(n.where.items(), key=lambda pair: pair[0]))
        for n in numbers(name)
    ]
    assert len(set(told)) == len(told)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"cells": [["1.2", "1.3"]]}, "expected 1 in each line, got 2"),
        ({"columns": {"a": ["1", "2"], "b": ["1"]}, "cells": [["1", "2"]]}, "expected one length"),
        ({"cells": [["fast"]]}, "expected a number as printed, got 'fast'"),
        ({"kind": "speed"}, "not_stated"),
    ],
)
def test_a_wrong_item_says_what_is_wrong(change: dict[str, Any], expected: str) -> None:
    item = {"item": "Table 1", "what": "-", "kind": "layer", "metric": "speedup", "unit": "x", "cells": [["1.2"]]}
    with pytest.raises(ValueError, match=expected):
        Item.model_validate(item | change)


def test_cells_are_read_as_they_are_printed() -> None:
    bar, error = numbers("capacity", item="Figure 4", metric="speedup", gamma=1.5)[0], numbers("oea", item="Table 6")[0]
    assert bar.printed == "1.30"
    assert (error.value, error.stderr) == (80.0, 0.59)
    assert [(n.value, n.bound) for n in numbers("laser", item="Figure 6")] == [(1.4, "about")] * 2


# Of what no sum or average below is made: item, number of numbers, and some of them.
HELD = [
    ("capacity", "Figure 4", {"metric": "speedup"}, 24, [1.21, 1.30, 2.51]),
    ("capacity", "Figure 5", {}, 12, [1.14, 1.12, 1.24, 1.18, 1.11, 1.08, 1.10, 1.07, 1.54, 1.51, 1.87, 1.85]),
    ("capacity", "Figure 10", {}, 20, [6.1, 5.3]),
    ("capacity", "Table 4", {}, 14, [1358.1, 297.1]),
    ("capacity", "Table 7", {}, 27, [0.311, 0.831]),
    ("capacity", "Table 9", {}, 70, [64.9, 68.7]),
    ("oea", "Table 1", {}, 44, [51.2, 92.8]),
    ("laser", "Figure 5", {"task": "GSM8K"}, 1, [1.63]),
    ("laser", "Table 1", {}, 8, [0.6285]),
    ("llep", "Figure 4", {}, 45, [2.09, 5.22, 6.11, 1.80]),
    ("metro", "Abstract", {}, 5, [-11, -22, 4.11]),
    ("sere", "Main results", {"kind": "end_to_end"}, 6, [17.29, 13.93, 13.53]),
    ("ultraep", "Abstract", {"kind": "load"}, 4, [1.01, 1.04, 1.30, 4.01]),
    ("xshare", "Table 2", {}, 12, [160.4, 43.4, 8.64, 50.7, 11.3, 5.94]),
    ("xshare", "vLLM pull request 35551", {"m": 24}, 8, [-26.9, 36.8]),
]


def test_what_was_printed_is_there() -> None:
    for paper, item, wanted, count, some in HELD:
        found = values(paper, item, **wanted)
        assert len(found) == count, (paper, item)
        assert set(some) <= set(found), (paper, item)


# --- Sums and averages that the papers print --------------------------------------------------------


@pytest.mark.parametrize(("item", "key"), [(f"Table {n}", "task") for n in (1, 2, 3, 11)] + [("Table 6", "context")])
def test_the_capacity_papers_averages_are_those_of_what_was_copied(item: str, key: str) -> None:
    """To within the rounding of both: the average's last digit, and half of one of each part's."""
    cells = numbers("capacity", item=item)
    averages = [number for number in cells if number.where[key] == "Avg."]
    for average in averages:
        parts = [n for n in cells if n.model == average.model and n.where | {key: "Avg."} == average.where]
        parts.remove(average)
        assert mean(n.value for n in parts) == pytest.approx(average.value, abs=2 * rounding(average) + 1e-9), average
    assert len(averages) == {"Table 1": 13, "Table 2": 16}.get(item, len(averages)) > 0


@pytest.mark.parametrize("item", ["Table 3", "Table 4", "Table 5", "Table 10"])
def test_oeas_averages_are_those_of_what_was_copied(item: str) -> None:
    cells = by(numbers("oea", item=item), "task", "routing", "k0")
    vanilla = cells["average", "vanilla", None]
    for (task, *routing), number in cells.items():
        tasks = [cells[one, *routing].value for one in ("aime24", "gpqa", "livecodebench", "math_500")]
        if task == "average":
            assert mean(tasks) == pytest.approx(number.value, abs=2 * rounding(number) + 1e-9)
        if task == "normalized average":
            assert number.value == pytest.approx(cells["average", *routing].value / vanilla.value, abs=0.0065)


@pytest.mark.parametrize("item", ["Table 1", "Table 3", "Table 4"])
def test_xshares_changes_are_those_of_what_was_copied(item: str) -> None:
    settings = ("task", "k0", "m", "m_r")
    for metric, change in (("OTPS", "OTPS change"), ("accuracy", "accuracy change")):
        cells = by(numbers("xshare", item=item, metric=metric), *settings)
        for (task, *setting), printed in by(numbers("xshare", item=item, metric=change), *settings).items():
            value, native = cells[task, *setting].value, cells[task, None, None, None].value
            ours = 100 * (value / native - 1) if metric == "OTPS" else value - native
            misprint = (item, change, task, setting) == ("Table 4", "OTPS change", "GPQA", [0, 0, 8])  # +9.3
            right = 9.4 if misprint else printed.value
            assert ours == pytest.approx(right, abs=0.062 if metric == "OTPS" else 0.011)


# --- What configs refer to ---------------------------------------------------------------------


CONFIGS_WITH_CLAIMS = sorted(CONFIGS.rglob("*.yaml"))


@pytest.mark.parametrize("file", CONFIGS_WITH_CLAIMS, ids=lambda file: file.stem)
def test_configs_of_papers_are_sound_and_refer_to_published_numbers_and_a_primary_traffic(file: Path) -> None:
    """Each number is found, none is typed again, and one point of the sweep has the traffic that was chosen.

    Points are made of one seed: what a seed draws is refused by no config.
    """
    experiments = load_experiments(file, (), on_cpu=False)
    assert experiments[0].name == file.stem
    assert experiments[0].claims
    devices = {"capacity": "h20", "llep": "h200-sxm", "metro": "a100-sxm-80gb"}
    device = next((device for paper, device in devices.items() if paper in file.stem), "h100-sxm")
    # The paper's GPU, whose measured table holds the shape; LASER's claims and Table 2's are counts.
    is_timed = "oea" in file.stem or ("xshare" in file.stem and file.stem != "xshare-table2")
    device = "table:h100_sxm/vllm/0.24.0" if is_timed else device
    for one in experiments:
        assert one.emulate.device == device
        Links.load(one.emulate.links)
        if one.scope == "layer" and one.workload.seed == experiments[0].workload.seed:
            make_point(one, VIRTUAL, on_cpu=True)
    for number, claim in enumerate(experiments[0].claims):
        assert any(_is_at(one, claim, number) for one in experiments), claim.source
        assert claim.paper in (None, (1.0, None))
        if claim.published is not None:
            for policy, _ in experiments[0].claimed_policies(number):
                assert claim.resolved(policy).paper is not None
            assert any(_has(one, chosen) for chosen in claim.primaries() for one in experiments), claim.source


def test_every_item_has_a_claim_or_a_reason_why_it_has_none() -> None:
    """Of all that was measured, by item and kind; and no reason is given where there is a claim."""
    claimed = set()
    for file in CONFIGS_WITH_CLAIMS:
        for one in parse_yaml(file.read_text())["claims"]:
            wanted = {key: value for key, value in one.get("published", {}).items() if not str(value).startswith("$")}
            claimed |= {(wanted["paper"], n.item, n.kind) for n in numbers(**_named(wanted))} if wanted else set()
    for name in names():
        paper = load(name)
        measured = {(item.item, item.kind) for item in paper.items if item.kind != "setting"}
        for item, kind in measured:
            reason = paper.why_uncompared(item, kind)
            assert ((name, item, kind) in claimed) != (reason is not None), (name, item, kind)
        for one in paper.uncompared:
            assert all(any(item == of for of, _ in measured) for item in one.items), one
            assert one.by is None or (CONFIGS.parents[1] / one.by).is_file()


def _named(wanted: dict[str, Any]) -> dict[str, Any]:
    return {"name" if key == "paper" else key: value for key, value in wanted.items()}


BAR = {"metric": "speedup", "model": "OLMoE-Instruct", "method": "Token Drop", "gamma": "$capacity_factor"}


@pytest.mark.parametrize(
    ("metric", "item", "wanted", "low", "high"),
    [
        ("speedup", "Figure 4", BAR, 1.3, 1.3),
        ("missing_share", "Section 5.1", {"metric": "dropped share"}, 0.12, 0.12),
        ("speedup", "Section 5.2", {"metric": "speedup, over native"}, None, 1.05),
        ("time", "Table 3", {"paper": "xshare", "metric": "OTPS change", "k0": 1, "m": 24}, 0.8873, 0.9337),
        ("moe_speedup", "Table 3", {"paper": "oea", "metric": "layer time over vanilla", "k0": 3}, 1.6393, 1.6393),
    ],
)  # fmt: skip
def test_numbers_are_taken_by_the_claims_metric(metric: Any, item: str, wanted: dict, low: Any, high: float) -> None:
    policy = {"name": "token_drop", "capacity_factor": 1.5}
    published = {"paper": "capacity", "item": item, **wanted}
    fields = {"source": "-", "note": "-", "policy": policy, "metric": metric, "published": published}
    assert Claim.model_validate(fields).resolved(make_policy(policy)).paper == (low, high)


@pytest.mark.parametrize(
    ("model", "chosen"),
    [
        ("OLMoE-Instruct", [{"workload.kind": "recorded"}, {"workload.skew": "single_domain"}]),
        (
            "Qwen1.5-MoE-Chat",
            [{"workload.skew": "mixed"}, {"workload.kind": "recorded"}, {"workload.skew": "single_domain"}],
        ),
    ],
)
def test_the_traffic_that_was_chosen_beforehand_is_the_models(model: str, chosen: list[dict[str, str]]) -> None:
    published = {"paper": "capacity", "item": "Figure 4", "model": model}
    claim = {"source": "-", "note": "-", "policy": {"name": "topk"}, "published": published}
    assert [one.at for one in Claim.model_validate(claim).primaries()] == chosen


def test_a_number_that_is_not_published_is_named() -> None:
    fields = {"source": "-", "note": "-", "policy": {"name": "topk"}, "published": {"paper": "oea", "item": "Table 99"}}
    with pytest.raises(ValueError, match="published: expected a number of oea; there is none with item Table 99"):
        Claim.model_validate(fields).resolved(make_policy({"name": "topk"}))
    with pytest.raises(ValueError, match="no number under paper beside it"):
        Claim.model_validate({**fields, "paper": 1.0})


def test_orderings_name_fields_that_policies_have() -> None:
    for _, ordering in orderings():
        for fields in (ordering.better, ordering.worse):
            known = {field.name for field in dataclasses.fields(POLICIES[fields["name"]])}
            assert fields.keys() - {"name"} <= known, ordering.says


# --- The command ------------------------------------------------------------------------------------


def test_the_command_prints_every_number_without_torch() -> None:
    program = (
        "import sys; from moe_ep_bench.cli import main; status = main(['papers', '--json'])\n"
        "assert not {'torch', 'pandas'} & set(sys.modules); sys.exit(status)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    listed = json.loads(done.stdout)
    assert {one["paper"] for one in listed} == set(IDS.values())
    assert len(listed) == len(numbers())
    assert {"paper", "item", "metric", "value", "unit", "where", "kind", "model"} <= listed[0].keys()
    bar = {"method": "Token Drop", "gamma": 1.5}
    assert any((one["item"], one["value"], one["where"]) == ("Figure 4", 1.30, bar) for one in listed)


def test_the_command_prints_one_papers_tables_and_names_all_papers(capsys: pytest.CaptureFixture[str]) -> None:
    assert load("2511.02237") == load("oea")
    assert main(["papers", "--paper", "oea"]) == OK
    said = capsys.readouterr().out
    assert re.search(r"task aime24, routing OEA, k0 3 +80\.0 ± 0\.59  %", said)
    assert "2503.05066" not in said
    assert main(["papers", "--paper", "lynx"]) == USER_ERROR
    there = ", ".join(f"{name} ({paper})" for name, paper in IDS.items())
    assert capsys.readouterr().err == f"moe-ep-bench: --paper: expected one of {there}; got 'lynx'\n"
