"""A run whose decode passes are replayed from graphs, from the config to the rows: tapes stand in for CUDA graphs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
import yaml
from test_run import TESTS, environment

from moe_ep_bench.analysis.graphs import graph_pairs
from moe_ep_bench.analysis.load import load_run
from moe_ep_bench.analysis.whole import analyse_whole
from moe_ep_bench.bench.plan import RANKS, plan
from moe_ep_bench.cli import main
from moe_ep_bench.runtime.exit_codes import CASES_FAILED, OK
from moe_ep_bench.schema import PHASES, TOTAL

CONFIG = {
    "name": "taped-model",
    "scope": "model",
    "model": {"preset": "olmoe-1b-7b", "scale": 0.03125},
    "whole": {"num_layers": 2, "context_length": 16},
    "workload": {"kind": "synthetic", "num_tokens": 8, "num_batches": 2, "sequence_length": 1},
    "layer": {"dtype": "float32", "kernel": "torch", "dispatcher": "allgather", "experts": "decode"},
    "policies": [{"name": "topk"}, {"name": "token_drop", "capacity_factor": 1.0}, {"name": "pruned", "k0": 3}],
    "measure": {"warmup": 1, "max_warmup": 1, "iterations": 2, "breakdown_iterations": 1, "timeout_s": 60},
    "sweep": {"layer.cuda_graph": [False, True]},
}


def write(folder: Path, **changes: object) -> Path:
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump({**CONFIG, **changes}))
    return path


@pytest.fixture(scope="module", params=[2])
def taped(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int]:
    """The results of one run, and its number of ranks."""
    folder = tmp_path_factory.mktemp("taped")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={request.param}"]
    command += [str(TESTS / "run_taped.py"), str(write(folder)), "--out", str(folder / "out")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250, env=environment())
    assert (folder / "out" / "run.json").exists(), done.stderr[-3000:]
    assert f"exitcode  : {CASES_FAILED} " in done.stderr, done.stderr[-3000:]
    return folder / "out", request.param


def parts(out: Path, folder: str) -> pd.DataFrame:
    return pd.concat(pd.read_parquet(path) for path in sorted((out / folder).glob("*.parquet")))


def side_of_case(out: Path) -> dict[str, bool]:
    """{case id: its passes were replayed}"""
    described = json.loads((out / "run.json").read_text())
    comparisons = described["comparisons"]
    return {
        case_id: comparisons[case["comparison_id"]]["cuda_graph"] is not None
        for case_id, case in described["cases"].items()
    }


def phases_of(out: Path) -> pd.DataFrame:
    """Rows of phases, of every layer; totals and what no phase covers left out."""
    rows = parts(out, "cases")
    return rows[rows.phase.isin(PHASES)]


def test_what_the_graphs_hold_of_a_pass_is_recorded(taped: tuple[Path, int]) -> None:
    out, num_ranks = taped
    facts = json.loads((out / "run.json").read_text())["comparisons"].values()
    facts = sorted(facts, key=lambda one: one["title"])
    held = "the whole model" if num_ranks == 1 else "all between the collectives"
    assert [one["cuda_graph"] for one in facts] == [None, held]
    assert [one["title"].endswith(", CUDA graph") for one in facts] == [False, True]


def test_replayed_passes_have_the_rows_of_eager_ones(taped: tuple[Path, int]) -> None:
    out, num_ranks = taped
    rows, layers, replayed = parts(out, "cases"), phases_of(out), side_of_case(out)
    found = {}
    for side in (False, True):
        ok = rows[(rows.case_id.map(replayed) == side) & (rows.status == "ok") & rows.policy.isin(["native", "topk"])]
        assert len(ok[(ok.kind == "plain") & (ok.phase == TOTAL)]) == 3 * num_ranks * 2 * 2
        own = layers[layers.case_id.isin(ok.case_id)]
        assert (own.time_us >= 0).all()
        found[side] = set(zip(own.layer.fillna(-1), own.phase, strict=True))
    assert found[True] == found[False]
    assert {(-1, "embedding"), (-1, "output"), (0, "attention"), (1, "experts"), (1, "policy")} <= found[True]
    assert ((1, "wait_combine") in found[True]) == (num_ranks > 1)


@pytest.mark.parametrize(
    ("policy", "reason"),
    [
        ("token_drop", "cannot be captured as a CUDA graph: "),
        ("pruned", "replayed from a CUDA graph, it routes batch 0 otherwise"),
    ],
)
def test_a_pass_that_cannot_be_replayed_fails_with_the_reason(
    taped: tuple[Path, int], policy: str, reason: str
) -> None:
    out, _ = taped
    rows, replayed = parts(out, "cases"), side_of_case(out)
    rows = rows[rows.policy == policy].drop_duplicates("case_id")
    status = {replayed[row.case_id]: (row.status, row.reason) for row in rows.itertuples()}
    assert status[False][0] == "ok"
    assert status[True][0] == "failed"
    assert f"rank 0: {reason}" in status[True][1]


def test_prompts_are_in_no_graph(tmp_path: Path) -> None:
    config = write(tmp_path, whole={"num_layers": 2}, workload={**CONFIG["workload"], "sequence_length": 4})
    message = r"layer.cuda_graph: expected whole.context_length of at least 1.*got 0"
    with pytest.raises(ValueError, match=message):
        plan(config, [], RANKS, 1, on_cpu=False)


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        ({"dispatcher": "alltoall", "experts": "auto"}, "layer.cuda_graph: true needs layer.dispatcher allgather"),
        ({"experts": "grouped"}, "layer.cuda_graph: true needs layer.experts decode"),
    ],
)
def test_a_pass_needs_what_a_layer_needs(layer: dict, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        plan(write(tmp_path, layer={**CONFIG["layer"], **layer}), [], RANKS, 1, on_cpu=False)


def test_eager_and_replayed_passes_stand_side_by_side(
    taped: tuple[Path, int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, _ = taped
    assert main(["show", str(out)]) == OK
    printed = capsys.readouterr().out
    assert "run eagerly, and replayed from CUDA graphs" in printed
    assert "the graphs hold all between the collectives; comparisons" in printed
    assert "replayed from CUDA graphs, which hold all between the collectives" in printed
    lines = printed[printed.index("run eagerly, and") :].splitlines()
    header, native = (next(line for line in lines if line.startswith(name)) for name in ("policy", "native "))
    assert "eager / replayed" in header
    (pair,) = graph_pairs([one.comparison for one in analyse_whole(load_run(out, whole=True))])
    (case,) = (case for case in pair.cases if case.label == "native")
    assert case.eager.layer is not None
    assert f"{case.eager.layer.median_ms * 1e3:.1f}" in native
    assert "pruned k0=3 (eager: ok, replayed: failed)" in printed
    assert main(["plot", str(out), "--out", str(tmp_path), "--format", "svg"]) == OK
    assert sorted(path.name for path in tmp_path.iterdir()) == ["graphs.csv", "graphs.svg", "whole.csv", "whole.svg"]
    marks = pd.read_csv(tmp_path / "graphs.csv")
    drawn = marks[(marks.role == "baseline") & (marks.way == "run eagerly")].model_time_us
    assert drawn.tolist() == pytest.approx([case.eager.layer.median_ms * 1e3])
    assert "one MoE layer" not in (tmp_path / "graphs.svg").read_text()
