"""A run from the command line to the files it leaves: real ranks, real torchrun, injected faults."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pandas as pd
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
import torch
import yaml
from results_builder import label_in

from moe_ep_bench.analysis.cases import cases, load
from moe_ep_bench.bench.plan import plan
from moe_ep_bench.cli import main
from moe_ep_bench.errors import OK, USER_ERROR, UserError
from moe_ep_bench.layer import backend
from moe_ep_bench.schema import LAYER_PHASES, ROUTING_SCHEMA, SAMPLES_SCHEMA, TOTAL, UNACCOUNTED

TESTS = Path(__file__).parent

CONFIG = {
    "name": "tiny",
    "model": {"preset": "deepseek-v2-lite", "scale": 0.03125},
    "workload": {"kind": "synthetic", "num_tokens": 200, "num_batches": 3, "peak_load": 4.0, "sequence_length": 24},
    "layer": {"dtype": "float32"},
    "policies": [
        {"name": "topk"},
        {"name": "token_drop", "capacity_factor": [1.0, 2.0]},
        {"name": "expanded_drop", "capacity_factor": 1.0, "metric": "random"},
    ],
    "measure": {"iterations": 2, "breakdown_iterations": 1, "warmup": 1, "timeout_s": 60},
}
NUM_CASES = 7  # native, native again, four policies, balanced


def write_config(folder: Path, base: dict = CONFIG, **changes: object) -> Path:
    """A config with dotted keys (``__``) replaced (None = removed)."""
    config = json.loads(json.dumps(base))
    for dotted, value in changes.items():
        *parents, last = dotted.split("__")
        section = config
        for parent in parents:
            section = section.setdefault(parent, {})
        if value is None:
            del section[last]
        else:
            section[last] = value
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


def routing_of(out: Path, point: int | None = None) -> pd.DataFrame:
    """Routing rows by label, rank and batch, without what names the run: all, or one point of the sweep's."""
    rows = pd.concat(pd.read_parquet(path) for path in (out / "routing").glob("*.parquet"))
    run = json.loads((out / "run.json").read_text())
    if point is not None:
        rows = rows[rows.comparison_id.map(lambda one: run["comparisons"][one]["order"]) == point]
    labels = {case_id: label_in(case) for case_id, case in run["cases"].items()}
    own = ["run_id", "case_id", "comparison_id", "mode", "backend", "reference_error", "output_error"]
    rows = rows.assign(label=rows.case_id.map(labels)).drop(columns=own)
    return rows.sort_values(["label", "rank", "batch"]).reset_index(drop=True)


def launch(*arguments: object, nproc: int = 2, faults: str = "", timeout: float = 500) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "moe_ep_bench", "run", "--nproc", str(nproc), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, env=environment(faults))


def environment(faults: str = "") -> dict[str, str]:
    """Variables of a process that finds this package, and whatever else is on this one's own PYTHONPATH."""
    paths = [str(TESTS.parent), *([str(TESTS / "faults")] if faults else []), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "MOE_EP_BENCH_FAULTS": faults, "PYTHONPATH": os.pathsep.join(filter(None, paths))}


def cases_of(out: Path) -> pd.DataFrame:
    return pd.concat(pd.read_parquet(path) for path in sorted((out / "cases").glob("*.parquet")))


def statuses(out: Path) -> dict[str, tuple[str, str | None]]:
    """{policy label: (status, reason)}"""
    cases = json.loads((out / "run.json").read_text())["cases"]
    rows = cases_of(out).drop_duplicates("case_id")
    return {label_in(cases[row.case_id]): (row.status, row.reason) for row in rows.itertuples()}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The results directory of one run on two ranks."""
    folder = tmp_path_factory.mktemp("run")
    done = launch(write_config(folder), "--out", folder / "out")
    assert done.returncode == OK, done.stderr
    return folder / "out"


@pytest.mark.slow
def test_every_case_has_rows_for_every_rank_batch_iteration_and_phase(finished: Path) -> None:
    rows = cases_of(finished)
    assert list(rows.columns) == SAMPLES_SCHEMA.names
    assert rows.case_id.nunique() == NUM_CASES
    plain, breakdown = rows[rows.kind == "plain"], rows[rows.kind == "breakdown"]
    assert set(plain.phase) == {TOTAL}
    assert len(plain) == NUM_CASES * 2 * 3 * 2  # ranks, batches, iterations
    assert len(breakdown[breakdown.phase == TOTAL]) == NUM_CASES * 2 * 3 * 1
    assert set(breakdown.phase) == {*LAYER_PHASES, TOTAL, UNACCOUNTED} - {"wait_policy"}
    assert (rows.time_us >= 0).all()
    assert (rows[rows.phase == TOTAL].thread_cpu_us > 0).all()
    assert rows[rows.phase != TOTAL].thread_cpu_us.isna().all()


def test_routing_rows_count_every_pair_of_the_workload(finished: Path) -> None:
    rows = pd.concat(pd.read_parquet(path) for path in (finished / "routing").glob("*.parquet"))
    assert list(rows.columns) == ROUTING_SCHEMA.names
    assert (rows.groupby(["case_id", "batch"]).num_tokens.sum() == 200).all()
    native = rows[rows.policy == "native"]
    assert (native.num_pairs == native.num_tokens * 6).all()
    assert (native.num_dropped_pairs == 0).all()
    assert native.load_E.map(sum).equals(native.num_pairs)
    dropped = rows[rows.policy_params.str.contains('"capacity_factor": 1.0')]
    assert (dropped.groupby("case_id").num_dropped_pairs.sum() > 0).all()
    assert rows[rows.batch == 0].reference_error.max() < 1e-4
    assert rows[(rows.policy == "topk")].output_error.max() == 0
    assert rows[rows.policy == "native_balanced"].peak_load.max() < 1.2


def test_run_json_says_what_was_run_and_on_what(finished: Path) -> None:
    run = json.loads((finished / "run.json").read_text())
    assert run["mode"] == "run"
    assert {"device_name", "torch", "megatron_core", "git_commit", "hostname"} <= set(run["environment"])
    assert [rank["hostname"] for rank in run["environment"]["ranks"]] == [run["environment"]["hostname"]] * 2
    assert set(run["hashes"]) == {"code", "config"}
    (comparison,) = run["comparisons"].values()
    assert comparison["scale"] == 0.03125
    assert comparison["backend"] == "gloo"
    assert comparison["kernel"]["ran"] == "numba"
    assert sorted(case["role"] for case in run["cases"].values()) == [
        "balanced", "baseline", "noise", "policy", "policy", "policy", "policy",
    ]  # fmt: skip
    config = finished.parent / "config.yaml"
    assert run["config_text"] == config.read_text()
    assert run["command"].startswith(f"moe-ep-bench run --nproc 2 {config} "), "as the user gave it"
    beside = (finished / "run.json").read_text().replace(run["command"], "")
    assert str(finished.parent) not in beside, "a path of this machine that no command named"
    assert len(cases(load(finished))) == NUM_CASES
    (path,) = (finished / "conditions").iterdir()
    conditions = json.loads(path.read_text())
    assert 1 <= conditions["warm_up"]["rounds"] <= 5
    assert len(conditions["ranks"]) == 2
    for rank in conditions["ranks"]:
        rates = rank["ceilings"]["matmul_tflops"], rank["ceilings"]["copy_gbps"], rank["machine"]["wall_s"]
        assert min(rates) > 0
        assert rank["peak_memory_bytes"] > 2**20


@pytest.mark.slow
def test_launches_repeat_the_process_and_one_that_lost_a_part_is_measured_again(tmp_path: Path) -> None:
    small = {"workload__num_batches": 1, "workload__num_tokens": 192, "measure__iterations": 1}
    policies = [{"name": "token_drop", "capacity_factor": 1.0}]
    config = write_config(tmp_path, policies=policies, measure__launches=2, measure__flush_l2=True, **small)
    out = tmp_path / "out"
    done = launch(config, "--out", out)
    assert done.returncode == OK, done.stderr
    routed = pd.concat(pd.read_parquet(path) for path in (out / "routing").glob("*.parquet"))
    assert not routed.duplicated(["case_id", "rank", "batch"]).any()
    assert [max(loads) for loads in routed[routed.policy == "token_drop"].load_E] == [96 * 6 // 64] * 2
    rows = cases_of(out)
    assert rows.groupby(["case_id", "launch"]).size().unstack().nunique(axis=1).eq(1).all()
    assert rows.groupby("launch").run_id.nunique().to_dict() == {0: 1, 1: 1}
    assert rows.run_id.nunique() == 2
    times = rows[rows.phase == TOTAL].groupby("launch").time_us.apply(list)
    assert times[0] != times[1]
    assert set(cases(load(out)).num_launches) == {2}
    # It is measured whole, and the other stays.
    first = rows[rows.launch == 0].set_index(["case_id", "rank", "batch", "iteration", "kind", "phase"]).time_us
    (_, part) = sorted((out / "cases").iterdir())
    gone = rows.case_id.iloc[0]
    pq.write_table(pq.read_table(part).filter(pc.field("case_id") != gone), part)
    done = launch(config, "--out", out)
    assert done.returncode == OK, done.stderr
    assert "finished before; --force runs them again" in done.stderr
    again = cases_of(out)
    assert set(again.launch) == {0, 1}
    kept = again[again.launch == 0].set_index(first.index.names).time_us
    pd.testing.assert_series_equal(kept.sort_index(), first.sort_index())
    assert set(again[again.launch == 1].run_id).isdisjoint(rows.run_id)
    assert not [path for path in out.rglob("*") if path.name.startswith((".", "now-"))]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.mark.slow
def test_two_nodes_give_the_routing_of_one(finished: Path, tmp_path: Path) -> None:
    config, port = write_config(tmp_path), free_port()
    jobs = []
    for _ in range(2):
        command = [sys.executable, "-m", "moe_ep_bench", "run", str(config), "--out", str(tmp_path / "out")]
        meet = {"PET_NNODES": "2", "PET_RDZV_BACKEND": "c10d", "PET_RDZV_ENDPOINT": f"127.0.0.1:{port}"}
        env = {**environment(), **meet, "PET_RDZV_ID": "test"}
        jobs.append(subprocess.Popen([*command, "--nproc", "1"], env=env, stderr=subprocess.PIPE, text=True))
    errors = [job.communicate(timeout=600)[1] for job in jobs]
    assert [job.returncode for job in jobs] == [OK, OK], errors
    for path in (finished / "routing").iterdir():
        one, two = (pd.read_parquet(folder / "routing" / path.name) for folder in (finished, tmp_path / "out"))
        pd.testing.assert_frame_equal(one.drop(columns="run_id"), two.drop(columns="run_id"))


def test_a_dry_run_tells_cases_and_memory_of_a_sweeps_points_and_runs_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = write_config(tmp_path, sweep={"workload.peak_load": [3.0, 5.0], "workload.seed": [1, 2]})
    assert main(["run", str(config), "--list-points"]) == OK
    lines = capsys.readouterr().out.splitlines()
    assert (len(lines), lines[1]) == (4, "1 workload.peak_load=3.0 workload.seed=2")
    asked = ["run", str(config), "--nproc", "2", "--dry-run", "--out", str(tmp_path / "out")]
    assert main([*asked, "--point", "2"]) == OK
    printed = capsys.readouterr().out
    assert printed.count("GiB of activations a rank") == 1
    assert printed.endswith("; 105 iterations\n"), "7 cases, 3 batches: a check, a warm-up, 2 plain, 1 broken down"
    assert "peak load 5" in printed
    assert "token_drop capacity_factor=2.0, routed by numba" in printed
    for wrong in ("4", "-1"):
        assert main([*asked, f"--point={wrong}"]) == USER_ERROR
        assert f"--point: expected 0 to 3 (the points of {config}'s sweep), got {wrong}" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("command", ["run", "emulate"])
def test_a_dry_run_makes_no_cuda_context_and_runs_no_kernel(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = write_config(tmp_path, layer__dtype="bfloat16", layer__ep_size=2, emulate={"links": "h100-nvlink4"})
    refused = Mock(side_effect=AssertionError("touches the device"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H100 80GB HBM3")
    monkeypatch.setattr(backend, "version_of", lambda distribution: "2.7")
    for name in ("_lazy_init", "mem_get_info", "synchronize"):
        monkeypatch.setattr(torch.cuda, name, refused)
    monkeypatch.setattr(torch, "mm", refused)
    assert main([command, str(config), *(["--nproc", "2"] if command == "run" else []), "--dry-run"]) == OK
    assert "GiB of activations a rank" in capsys.readouterr().out


@pytest.mark.slow
def test_ranks_get_the_tokens_that_they_were_given_on_every_backend(tmp_path: Path) -> None:
    """Ragged ranks, one of them without tokens: the same routing where ranks are real, emulated and only routed."""
    given = {"workload__num_tokens": None, "workload__tokens_of_ranks": [70, 0], "workload__num_batches": 1}
    ragged = {**given, "workload__sequence_length": 32, "policies": [{"name": "token_drop", "capacity_factor": 1.0}]}
    config = write_config(tmp_path, **ragged, emulate={"links": "h100-nvlink4"}, layer__ep_size=2)
    assert launch(config, "--out", tmp_path / "run").returncode == OK
    found = {}
    for command in ("run", "emulate", "route"):
        out = tmp_path / command
        if command != "run":  # Of its own process, as every measurement is: what fails ends it.
            words = [sys.executable, "-m", "moe_ep_bench", command, str(config), "--out", str(out)]
            assert (
                subprocess.run(words, capture_output=True, env=environment(), timeout=500, check=False).returncode == OK
            )
        rows = routing_of(out)
        rows = rows[rows.label.isin(["native", "token_drop capacity_factor=1.0"])]
        found[command] = [[row.label, row["rank"], row.num_tokens, row.load_E.tolist()] for _, row in rows.iterrows()]
        assert {(rank, tokens) for _, rank, tokens, _ in found[command]} == {(0, 70), (1, 0)}
    assert found["run"] == found["emulate"] == found["route"]
    wrong = write_config(tmp_path, **{**ragged, "workload__tokens_of_ranks": [70, 2, 3]}, layer__ep_size=2)
    with pytest.raises(UserError, match=r"workload\.tokens_of_ranks: expected a number for each of the 2 ranks, got 3"):
        plan(wrong, [], "ranks", 2, on_cpu=True)
    with pytest.raises(UserError, match="expected some tokens, got none on any rank"):
        plan(wrong, ["workload.tokens_of_ranks=[0, 0]"], "ranks", 2, on_cpu=True)
