"""Programs of benchmarks/ that no other test calls run at small sizes: none is found broken when it is needed."""

from __future__ import annotations

import contextlib
import copy
import importlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from test_synthetic import cut_by_hand
from virtual_time import HandClock

from moe_ep_bench.config import label_of
from moe_ep_bench.config.files import experiments_of
from moe_ep_bench.models import load_model
from moe_ep_bench.timing.device import Ceilings
from moe_ep_bench.workload.targets import Skews

ROOT = Path(__file__).parents[1]


def program(monkeypatch: pytest.MonkeyPatch, name: str) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    monkeypatch.delitem(sys.modules, name, raising=False)
    return importlib.import_module(name)


def test_every_policy_is_timed_beside_top_k(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Any) -> None:
    assert program(monkeypatch, "policies").main(["--quick", "--rounds", "1", "--out", str(tmp_path)]) == 0
    assert "over published" in capsys.readouterr().out
    assert any(tmp_path.iterdir())


def test_torchs_form_is_replayed_from_a_graph_where_it_can_be_captured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of expert_drop the capture fails: a line says why, and nothing is set beside it."""
    policies = program(monkeypatch, "policies")
    asked: list[tuple[Any, int]] = []

    def captured(run: Any, times: int, pool: str | None = None) -> Callable[[], None]:
        asked.append((pool, times))
        if getattr(run, "name", None) == "expert_drop":
            try:
                raise RuntimeError("operation not permitted when stream is capturing\nSearch for ...")
            finally:
                raise RuntimeError("the capture is invalid")
        return lambda: None

    monkeypatch.setattr(policies, "replayed", captured)
    monkeypatch.setattr(policies, "clock_for", lambda _: None)
    monkeypatch.setattr(policies, "time_us", lambda *_, **__: 100.0)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: "one")
    monkeypatch.setattr(policies.Bench, "_plain", lambda _, policy: policy)
    bench = policies.Bench(torch.device("cpu"), 4, 16, False)
    bench.device, bench.by_triton = torch.device("cuda"), True
    bench.compiled = {label_of(policy): lambda: None for policy in bench.policies}
    table = bench.table(1, None).set_index("what")
    assert set(asked) == {("one", policies.REPEATED), (None, policies.REPEATED)}
    each_us = 100 / policies.REPEATED
    found = ["torch us", "torch graph us", "graph us", "over torch", "over torch graph"]
    assert table.loc["topk", found].tolist() == [100, each_us, each_us, each_us / 100, 1]
    assert table.loc["expert_drop", found].fillna(-1).tolist() == [100, -1, each_us, each_us / 100, -1]
    said = "expert_drop: torch's form is not captured: operation not permitted when stream is capturing\n"
    assert capsys.readouterr().err == said


@pytest.mark.slow
def test_a_papers_rows_have_the_roofline_beside_a_measured_table(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    papers = program(monkeypatch, "papers")
    monkeypatch.setitem(papers.OVERRIDES, "xshare-table3", ["sweep.workload.seed=[1]", "workload.num_batches=2"])
    rows: pd.DataFrame = papers.rows_of(ROOT / "configs" / "papers" / "xshare-table3.yaml", tmp_path)
    assert rows["device"].str.startswith("table:").all()
    assert rows["ours"].notna().any()
    assert (rows["ours"] != rows["ours_by_roofline"]).any()


def test_the_atlas_asks_once_and_maps_what_wins(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    atlas = program(monkeypatch, "atlas")
    asked = atlas.questions()
    assert len(asked) * len(atlas.TRAFFICS) == 360
    assert {load_model(one.model).name for one in asked} >= {"DeepSeek-V3", "OLMoE-1B-7B"}
    calls: list[list[str]] = []

    def call(arguments: list[str]) -> tuple[int, str]:
        """A table without rows, a size that is too small, one too small for a traffic, and one that is answered."""
        calls.append(arguments)
        if "table:h100_sxm" in arguments:
            return 2, "moe-ep-bench: --device: table:h100_sxm: has no rows"
        if (size := arguments[arguments.index("--ep") + 1]) == "8":
            return 2, "moe-ep-bench: --ep: layer.ep_size: does not fit: 103 GB"
        folder = Path(arguments[-1])
        folder.mkdir(parents=True)
        times = {"median_ms": 2.0, "fullest_rank": 1.5, "whole": {"ms": 30.0}}
        drops = {"case_id": "a", "label": "token_drop", "speedup": 1.25, "low": 1.2, "high": 1.3, "whole": {"ms": 25.0}}
        drops |= {"dropped_share": 0.05, "missing_share": 0.05, "retained_mass": 0.98, "extra_gib_per_rank": None}
        replicates = {**drops, "case_id": "b", "whole": None, "missing_share": 0.0, "retained_mass": 1.0}
        answers = [
            {"point": {"workload.peak_load": peak}, "comparison_id": "c", "native": times, "pick": pick}
            | {"beside": beside, "fastest": fastest, "reason": "does_not_fit" if size == "16" and peak == 6 else None}
            for peak, pick, beside, fastest in (
                (6.0, drops, replicates, None),
                (None, None, None, replicates),
                (2.5, replicates, drops, None),
            )
        ]
        (folder / "advice.json").write_text(json.dumps({"answers": answers}))
        cases = {"a": {"policy": "token_drop"}, "b": {"policy": "eplb"}}
        facts = {"c": {"expert_rows": None, "exchange": {"copies": "rank"}}}
        (folder / "run.json").write_text(
            json.dumps({"comparisons": facts, "cases": cases, "environment": {"git_commit": "a" * 40}})
        )
        return 0, ""

    question = atlas.Question("deepseek-v3", "H100", "decode")
    answer = atlas.ask(question, tmp_path, call)
    assert (answer.ep_size, len(calls)) == (32, 6)
    assert atlas.ask(question, tmp_path, call) == answer
    assert len(calls) == 6, "an answer that is there is not asked for again"
    rows = pd.DataFrame(atlas.rows_of(question, answer, tmp_path))
    assert rows["traffic"].tolist() == ["balanced", "typical", "hard"]
    assert rows["kind"].tolist() == ["nothing", "replicate", "drop"]
    assert rows["whole_speedup"].tolist()[2] == 1.2
    assert rows["lossy_dropped_share"].fillna(-1).tolist() == [-1, 0.05, -1], "beside a pick that loses none, alone"
    assert rows["commit"].eq("aaaaaaaa").all()
    assert rows["exchange"].eq("measured elsewhere").all()
    refused = atlas.ask(atlas.Question("kimi-k2", "B200", "prefill"), tmp_path, lambda _: (2, "x: no such links"))
    (row,) = atlas.rows_of(atlas.Question("kimi-k2", "B200", "prefill"), refused, tmp_path)
    assert (row["kind"], row["why"]) == ("not asked", "x: no such links")
    texts = {text.get_text() for axes in atlas.draw(rows).axes for text in axes.texts}
    assert texts == {"-\nEP 32", "1.25x\nEP 32"}
    path = tmp_path / "atlas.csv"
    atlas.with_other_answers(pd.DataFrame([row]), path)
    table = atlas.with_other_answers(rows, path)
    assert table["model"].tolist() == ["deepseek-v3"] * 3 + ["kimi-k2"], "in order of the questions"
    before = path.read_text()
    atlas.with_other_answers(rows.assign(native_ms=3.0), path)
    changed = [
        (old, new) for old, new in zip(before.splitlines(), path.read_text().splitlines(), strict=True) if old != new
    ]
    assert len(changed) == 3, "answers of other questions stay, letter by letter"
    with pytest.raises(RuntimeError, match="traceback"):
        atlas.ask(atlas.Question("glm-5", "H20", "decode"), tmp_path, lambda _: (1, "a traceback"))


def test_the_traffics_of_what_loses_nothing_are_configs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found = program(monkeypatch, "lossless").configs(tmp_path)
    for name, values in found.items():
        values = copy.deepcopy(values)
        sweep = values.pop("sweep")
        num_layers = len(sweep.get("workload.layer", [0]))
        assert len(experiments_of(Path(name), values, sweep)) == num_layers, name


def test_back_to_back_a_case_takes_what_it_takes_once_it_is_warm(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, ran = HandClock(), []

    class Heating:
        case_id = "case"

        @contextlib.contextmanager
        def ready(self, batch: int) -> Iterator[Callable[[], None]]:
            def run() -> None:
                ran.append(batch)
                clock.now += 100 if clock.now < 1e6 else 150 if batch else 170

            yield run

    back_to_back = program(monkeypatch, "back_to_back")
    monkeypatch.setattr(back_to_back.time, "perf_counter", lambda: clock.now / 1e6)
    monkeypatch.setattr(clock, "held_mhz", lambda: 1234.0)
    assert back_to_back.measured_alone(Heating(), 3, clock, 2.0) == (150, 1234.0)
    assert ran[:6] == [0, 1, 2, 0, 1, 2]
    count = len(ran)
    assert back_to_back.measured_alone(Heating(), 3, clock, 0.0)[0] == 150
    assert len(ran) - count == 6, "each batch twice at least, of which one counts"


@pytest.mark.seam
def test_cases_are_timed_back_to_back_beside_their_turns(tmp_path: Path) -> None:
    tiny = ["model.scale=0.0078125", "workload.num_tokens=32", "measure.iterations=1", "policies=[{name: topk}]"]
    command = [sys.executable, ROOT / "benchmarks" / "back_to_back.py", "--rehearse", "--out", tmp_path]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [*command, *(f"--set={change}" for change in tiny)],
        capture_output=True,
        text=True,
        timeout=500,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    table = pd.read_csv(tmp_path / "back_to_back.csv").set_index("case")
    assert list(table.index) == ["native", "native again", "topk", "balanced"]
    assert (table[["in_turns_us", "alone_us"]] > 0).all(axis=None)
    assert table.loc["native", ["in_turns_speedup", "alone_speedup"]].eq(1).all()
    difference = table["alone_us"] / table["in_turns_us"] - 1
    assert table["time_difference"].to_numpy() == pytest.approx(difference.to_numpy(), rel=1e-9, abs=1e-9)
    assert "back to back speedups are" in done.stdout


def test_cuts_are_counted_as_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    load_E, skews = np.random.default_rng(0).integers(1, 100, 24), program(monkeypatch, "skews")
    for factor, num_ranks in ((0.5, 1), (1.0, 8), (1.5, 4), (9.0, 2)):
        found = skews.loads_after_cut(load_E, factor, num_ranks)
        assert found == pytest.approx(cut_by_hand(load_E.tolist(), factor, num_ranks))


def test_skews_are_those_of_the_recordings(monkeypatch: pytest.MonkeyPatch, traces: Path) -> None:
    """Each shipped skew that was fitted has the recording's numbers, to the digits that its file gives."""
    skews = program(monkeypatch, "skews")
    by_model: dict[str, list[Any]] = {}
    for preset, domain in skews.domains(traces):
        by_model.setdefault(preset, []).append(domain)
    assert by_model.keys() == {"deepseek-v2-lite", "gpt-oss-20b", "mixtral-8x7b", "olmoe-1b-7b"}
    for preset, found in by_model.items():
        fitted = skews.rounded(skews.skews_of(preset, found))
        named = {**{name: one for name, one in fitted.items() if name != "domains"}, **fitted.get("domains", {})}
        shipped = Skews.named(preset).by_name()
        for name, numbers in named.items():
            numbers.pop("where")
            ours = shipped[name].model_dump(mode="json", exclude_none=True, include=set(numbers))
            assert ours == numbers, (preset, name)
        assert shipped.keys() - named.keys() <= {"single_domain", "worst_layer"}


@pytest.mark.slow
@pytest.mark.seam
def test_a_device_is_measured_part_by_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """Megatron-Core's permutation and its inverse give each token back as often as it has experts."""
    device = program(monkeypatch, "device")
    bench, olmoe = device.Bench(torch.device("cpu"), rehearse=True), load_model("olmoe-1b-7b").scaled(1 / 32)
    decoded = load_model("qwen3-235b-a22b").sharded(8).scaled(1 / 32)
    parts = bench.routing(), bench.attention(), bench.permutation(olmoe), bench.experts(olmoe), bench.decode(decoded)
    table = pd.DataFrame(row for part in parts for row in part)
    assert (table["least"] <= table["us"]).all()
    assert {"torch top-k", "own keys", "megatron, there and back", "grouped", "decode"} <= set(table["form"])
    best = device.summary(table, Ceilings(matmul_tflops=2.0, matmul_size=1, copy_gbps=4.0, read_gbps=1.0))
    best = best.set_index(["what", "form"])
    assert best["of matmul"].mul(2).equals(best["tflops"])
    assert best["of copy"].mul(4).equals(best["gbps"])
    assert best.loc["decode", "gbps"].gt(0).all()
    assert best.loc["experts", "tflops"].gt(0).all()
    lines = list(device.slopes(table))
    assert [line.partition(": ")[0].split(", ")[-1] for line in lines] == ["decode", "grouped"]
    hidden_TD, map_TE = bench.normal(24, 16), bench.uniform(24, 8) < 0.5
    back_TD = device.there_and_back(hidden_TD, map_TE, int(map_TE.sum()), fused=False)
    torch.testing.assert_close(back_TD, hidden_TD * map_TE.sum(1, keepdim=True))
