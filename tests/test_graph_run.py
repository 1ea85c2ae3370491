"""A run whose layers are replayed from graphs, from the config to the rows: tapes stand in for CUDA graphs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
import yaml
from test_run import TESTS, cases_of, environment

from moe_ep_bench.cli import main
from moe_ep_bench.layer.parts import Parts
from moe_ep_bench.runtime.exit_codes import CASES_FAILED, USER_ERROR
from moe_ep_bench.schema import TOTAL, UNACCOUNTED

CONFIG = {
    "name": "taped",
    "model": {"preset": "olmoe-1b-7b", "scale": 0.03125},
    "workload": {"kind": "synthetic", "num_tokens": 12, "num_batches": 2, "sequence_length": 1},
    "layer": {"dtype": "float32", "kernel": "torch", "dispatcher": "allgather", "experts": "decode"},
    "policies": [
        {"name": "topk"},
        {"name": "token_drop", "capacity_factor": 1.0},
        {"name": "pruned", "k0": 3},
        {"name": "xshare", "k0": 1, "scope": "request", "request_budget": 1},
    ],
    "measure": {"iterations": 2, "breakdown_iterations": 1, "timeout_s": 60},
    "sweep": {"layer.cuda_graph": [False, True]},
}


def write(folder: Path, config: dict = CONFIG) -> Path:
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


@pytest.fixture(scope="module", params=[1])
def taped(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int]:
    """The results of one run, and its number of ranks."""
    folder = tmp_path_factory.mktemp("taped")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={request.param}"]
    command += [str(TESTS / "run_taped.py"), str(write(folder)), "--out", str(folder / "out")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250, env=environment())
    assert (folder / "out" / "run.json").exists(), done.stderr[-3000:]
    assert f"exitcode  : {CASES_FAILED} " in done.stderr, done.stderr[-3000:]
    return folder / "out", request.param


def sides(out: Path) -> dict[bool, set[str]]:
    """{replayed: case ids}"""
    described = json.loads((out / "run.json").read_text())
    found: dict[bool, set[str]] = {False: set(), True: set()}
    for case_id, case in described["cases"].items():
        found[described["comparisons"][case["comparison_id"]]["cuda_graph"] is not None].add(case_id)
    return found


def test_what_the_graph_holds_is_recorded(taped: tuple[Path, int]) -> None:
    out, num_ranks = taped
    facts = json.loads((out / "run.json").read_text())["comparisons"].values()
    facts = sorted(facts, key=lambda one: one["title"])
    held = "the whole layer" if num_ranks == 1 else "all between the collectives"
    assert [one["cuda_graph"] for one in facts] == [None, held]
    assert [one["title"].endswith(", CUDA graph") for one in facts] == [False, True]
    assert {one["dispatcher"] for one in facts} == {"allgather"}
    assert {one["permute"]["ran"] for one in facts} == {"none"}


def test_replayed_cases_have_the_rows_of_eager_ones(taped: tuple[Path, int]) -> None:
    out, num_ranks = taped
    rows, by_side = cases_of(out), sides(out)
    for case_ids in by_side.values():
        ok = rows[
            rows.case_id.isin(case_ids) & (rows.status == "ok") & ~rows.policy.isin(["token_drop", "pruned", "xshare"])
        ]
        assert ok.case_id.nunique() == 4  # native, native again, topk, native with balanced scores
        assert len(ok[ok.kind == "plain"]) == 4 * num_ranks * 2 * 2
        waits = {"wait_dispatch", "wait_combine"} if num_ranks > 1 else set()
        assert set(ok[ok.kind == "breakdown"].phase) == {
            "gate", "policy", "permute", "dispatch", "experts", "combine", *waits, UNACCOUNTED, TOTAL,
        }  # fmt: skip
        assert (ok.time_us >= 0).all()


@pytest.mark.parametrize(
    ("policy", "reason"),
    [
        ("token_drop", "cannot be captured as a CUDA graph: "),
        ("xshare", "cannot be captured as a CUDA graph: "),
        ("pruned", "replayed from a CUDA graph, it routes batch 0 otherwise"),
    ],
)
def test_what_cannot_be_replayed_fails_with_the_reason(taped: tuple[Path, int], policy: str, reason: str) -> None:
    out, _ = taped
    rows, by_side = cases_of(out), sides(out)
    rows = rows[rows.policy == policy].drop_duplicates("case_id").set_index("case_id")
    eager, replayed = (rows[rows.index.isin(by_side[side])] for side in (False, True))
    assert list(eager.status) == ["ok"]
    assert list(replayed.status) == ["failed"]
    assert f"rank 0: {reason}" in replayed.reason.iloc[0]


def test_replays_route_alike_and_are_checked(taped: tuple[Path, int]) -> None:
    out, _ = taped
    described = json.loads((out / "run.json").read_text())["cases"]
    parts = {path.stem: path for path in (out / "routing").glob("*.parquet")}
    for label in ("native", "topk"):
        eager, replayed = (
            pd.read_parquet(parts[next(one for one in ids if described[one]["label"] == label)])
            for ids in sides(out).values()
        )
        assert eager.load_E.map(list).equals(replayed.load_E.map(list))
        assert replayed.reference_error.max() < 1e-4


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        ({"cuda_graph": True, "dispatcher": "allgather"}, "layer.cuda_graph: true needs a GPU"),
        ({"dispatcher": "allgather", "experts": "decode", "permute": "indexed"}, "layer.permute: expected auto"),
        ({"dispatcher": "allgather", "permute": "indexed"}, "indexed serves layer.dispatcher alltoall only"),
        ({"dispatcher": "ring"}, "layer.dispatcher: expected alltoall, allgather or flex, got 'ring'"),
    ],
)
def test_what_cannot_be_is_refused_in_a_line(layer: dict, message: str, tmp_path: Path, capsys) -> None:
    config = {key: value for key, value in CONFIG.items() if key != "sweep"} | {"layer": {"dtype": "float32", **layer}}
    assert main(["run", str(write(tmp_path, config)), "--nproc", "1", "--dry-run"]) == USER_ERROR
    assert message in capsys.readouterr().err


def test_graphs_need_what_does_not_wait_for_the_host() -> None:
    assert Parts.choose("auto", "auto", "auto", "allgather", cuda_graph=True, on_cpu=False) == Parts(
        "decode", "none", "auto", "allgather", cuda_graph=True, experts_why="a CUDA graph holds no others"
    )
    with pytest.raises(ValueError, match=r"layer.cuda_graph: true needs layer.dispatcher allgather.*got alltoall"):
        Parts.choose("auto", "auto", "auto", "alltoall", cuda_graph=True, on_cpu=False)
    with pytest.raises(ValueError, match=r"layer.cuda_graph: true needs layer.experts decode.*got grouped"):
        Parts.choose("grouped", "auto", "auto", "allgather", cuda_graph=True, on_cpu=False)


def test_ranks_with_unequal_tokens_cannot_gather(tmp_path: Path, capsys) -> None:
    config = CONFIG | {"workload": CONFIG["workload"] | {"num_tokens": 13}, "sweep": {}}
    assert main(["run", str(write(tmp_path, config)), "--dry-run", "--nproc", "2"]) == USER_ERROR
    assert "got allgather, where batch 0 deals 6 to 7 tokens" in (capsys.readouterr().err)


def test_emulation_refuses_what_only_run_does(tmp_path: Path, capsys) -> None:
    config = CONFIG | {"emulate": {"links": "h100-nvlink4"}, "sweep": {}}
    path = write(tmp_path, config)
    assert main(["emulate", str(path), "--out", str(tmp_path / "out")]) == USER_ERROR
    assert "layer.dispatcher: expected alltoall, for emulate stands in for the all-to-all, got allgather" in (
        capsys.readouterr().err
    )


@pytest.mark.parametrize(
    ("has_gpu", "message"),
    [(False, "flex needs a GPU"), (True, r"flex needs DeepEP \(the package deep_ep\), which is not installed")],
)
def test_flex_needs_deepep(has_gpu: bool, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Parts.choose("auto", "auto", "auto", "flex", on_cpu=not has_gpu)


def test_flex_needs_ranks_to_send_to(tmp_path: Path, capsys) -> None:
    config = {key: value for key, value in CONFIG.items() if key != "sweep"} | {"layer": {"dispatcher": "flex"}}
    assert main(["run", str(write(tmp_path, config)), "--nproc", "1", "--dry-run"]) == USER_ERROR
    assert "layer.dispatcher: expected alltoall on one rank in layer.ep_size, got flex" in capsys.readouterr().err
