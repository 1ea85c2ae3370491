"""A run whose layers, or decode passes, are replayed from graphs, from the config to the rows.

Tapes stand in for CUDA graphs (``run_taped.py``). A layer runs on one rank, a model on two, whose graphs hold their
collectives too.
"""

from __future__ import annotations

import json
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pandas as pd
import pytest
from results_builder import label_in
from test_run import TESTS, cases_of, environment, write_config

from moe_ep_bench.bench.plan import plan
from moe_ep_bench.bench.point import RANKS
from moe_ep_bench.errors import CASES_FAILED
from moe_ep_bench.facts import TimedFacts
from moe_ep_bench.facts.words import title_words
from moe_ep_bench.schema import PHASES, TOTAL, UNACCOUNTED

LAYER = {
    "name": "taped",
    "model": {"preset": "olmoe-1b-7b", "scale": 0.03125},
    "workload": {"kind": "synthetic", "num_tokens": 12, "num_batches": 2, "sequence_length": 1},
    "layer": {"dtype": "float32", "experts": "decode"},
    "policies": [
        {"name": "topk"},
        {"name": "xshare", "k0": 1, "scope": "request", "request_budget": 1},  # counts requests on the host
        {"name": "pruned", "k0": [3, 2, 1]},
    ],
    "measure": {"warmup": 1, "iterations": 1, "breakdown_iterations": 1, "timeout_s": 60},
    "sweep": {"layer.cuda_graph": [False, True]},
}
MODEL = {
    **LAYER,
    "scope": "model",
    "whole": {"num_layers": 2, "context_length": 16},
    "workload": {**LAYER["workload"], "num_tokens": 8, "num_batches": 1},
}
CAPTURE, REPLAY = "cannot be captured as a CUDA graph: ", "replayed from a CUDA graph, on batch 0 it"
FAILING = {
    "xshare": f"rank 0: {CAPTURE}",
    "pruned k0=3": f"rank 0: {REPLAY} routes otherwise",
    "pruned k0=1": f"rank 0: {REPLAY}s output is off by ",
    "pruned k0=2": f"rank {{last}}: {CAPTURE}this rank alone waits",  # The others do not wait for it.
}


class Taped(NamedTuple):
    """What a run has left; by whether it was replayed: case ids, and rows of cases."""

    out: Path
    num_ranks: int
    comparisons: list[dict]
    cases: dict[bool, dict[str, dict]]
    rows: dict[bool, pd.DataFrame]


@pytest.fixture(scope="module")
def taped(tmp_path_factory: pytest.TempPathFactory):
    """A run of a scope, by the first test that asks for it."""

    @cache
    def run(scope: str) -> Taped:
        folder, num_ranks = tmp_path_factory.mktemp(scope), 1 if scope == "layer" else 2
        config, out = write_config(folder, LAYER if scope == "layer" else MODEL), folder / "out"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}"]
        command += [str(TESTS / "run_taped.py"), str(config), "--out", str(out)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=250, env=environment())
        assert (out / "run.json").exists(), done.stderr[-3000:]
        assert f"exitcode  : {CASES_FAILED} " in done.stderr, done.stderr[-3000:]
        described, rows = json.loads((out / "run.json").read_text()), cases_of(out)
        cases: dict[bool, dict[str, dict]] = {False: {}, True: {}}
        for case_id, case in described["cases"].items():
            cases[described["comparisons"][case["comparison_id"]]["cuda_graph"] is not None][case_id] = case
        comparisons = sorted(described["comparisons"].values(), key=lambda one: one["cuda_graph"] is not None)
        return Taped(out, num_ranks, comparisons, cases, {side: rows[rows.case_id.isin(cases[side])] for side in cases})

    return run


@pytest.mark.slow
@pytest.mark.parametrize("scope", ["layer", "model"])
def test_replayed_cases_have_the_rows_of_eager_ones_or_the_reason_why_they_cannot_be(scope: str, taped) -> None:
    run, found = taped(scope), {}
    assert [one["cuda_graph"] for one in run.comparisons] == [None, scope]
    titles = [title_words(TimedFacts(**one)) for one in run.comparisons]
    assert [title.endswith(", CUDA graph") for title in titles] == [False, True]
    assert all((" a rank)" in title) == (run.num_ranks > 1) for title in titles)
    assert {one["permute"]["ran"] for one in run.comparisons} == {"none"}

    def ids(label: str) -> list[str]:
        return [
            next(key for key, one in cases.items() if label in (label_in(one), one["policy"]))
            for cases in run.cases.values()
        ]

    for label, reason in FAILING.items():
        eager, replayed = (
            rows[rows.case_id == case_id] for rows, case_id in zip(run.rows.values(), ids(label), strict=True)
        )
        assert (eager.status == "ok").all()
        assert list(replayed.status) == ["failed"]
        assert reason.format(last=run.num_ranks - 1) in replayed.reason.iloc[0]
    for label in ("native", "topk"):
        routed = pd.concat(map(pd.read_parquet, (run.out / "routing").iterdir()))
        eager, replayed = (routed[routed.case_id == case_id].reset_index() for case_id in ids(label))
        assert eager.load_E.map(list).equals(replayed.load_E.map(list))
        assert routed.groupby(["case_id", "batch", "layer"], dropna=False).num_tokens.sum().nunique() == 1
        assert max(rows.reference_error.max() for rows in (eager, replayed)) < 1e-4
    for side, rows in run.rows.items():
        ok = rows[(rows.status == "ok") & ~rows.policy.isin(["xshare", "pruned"])]
        assert ok.case_id.nunique() == 4  # native, native again, topk, balanced
        assert len(ok[(ok.kind == "plain") & (ok.phase == TOTAL)]) == 4 * run.num_ranks * (2 if scope == "layer" else 1)
        assert (ok.time_us >= 0).all()
        breakdown = ok[ok.kind == "breakdown"]
        found[side] = set(zip(breakdown.layer.fillna(-1), breakdown.phase, strict=True))
    assert found[True] == found[False]
    if scope == "layer":
        phases = {"gate", "policy", "permute", "dispatch", "experts", "combine", UNACCOUNTED, TOTAL}
        assert {phase for _, phase in found[True]} == phases
    else:
        expected = {(-1, "embedding"), (-1, "output"), (0, "attention"), (1, "experts"), (1, "policy")}
        assert expected | {(1, "wait_combine")} <= found[True]
        assert {phase for layer, phase in found[True] if layer >= 0} <= set(PHASES)


def test_prompts_are_in_no_graph(tmp_path: Path) -> None:
    config = write_config(tmp_path, MODEL, whole={"num_layers": 2}, workload__sequence_length=4)
    with pytest.raises(ValueError, match=r"layer.cuda_graph: expected whole.context_length of at least 1.*got 0"):
        plan(config, [], RANKS, 1, on_cpu=False)
