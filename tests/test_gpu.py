"""What only a CUDA device can show. ``launch/gpu_session.sh`` runs these; elsewhere they are skipped."""

from __future__ import annotations

import importlib.util
import json
import time
from pathlib import Path

import laws
import pandas as pd
import pytest
import torch
from test_run import cases_of, launch, statuses, write_config

from moe_ep_bench.errors import CASES_FAILED, OK
from moe_ep_bench.layer.backend import fp8_lacks
from moe_ep_bench.layer.components import expert_major_pairs, rank_major_index, sum_per_token
from moe_ep_bench.layer.experts import TOLERANCE
from moe_ep_bench.schema import HOST, HOST_BUSY, LAYER_PHASES, SM_CLOCK, TOTAL, UNACCOUNTED
from moe_ep_bench.timing.device import measure_ceilings
from moe_ep_bench.timing.timer import CudaClock, PhaseRecorder, timed

pytestmark = pytest.mark.gpu
WITH_TE = pytest.mark.skipif(not laws.HAS_TE, reason="needs Transformer Engine")
TWO_GPUS = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs: NCCL between them")


@pytest.fixture
def device() -> torch.device:
    assert torch.cuda.is_available(), "-m gpu needs a CUDA device"
    return torch.device("cuda", 0)


@pytest.mark.xdist_group("laws")  # One job runs them all, and each worker would start its own.
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[WITH_TE] if one.with_te else [])
        for name, one in laws.laws_of("layer").items()
        if one.on_one
    ],
)
def test_law_on_one_nccl_rank(name: str) -> None:
    laws.check("layer", 1, name)


def test_permutation_by_index_is_the_same_on_both_devices(device: torch.device) -> None:
    generator = torch.Generator().manual_seed(2)
    map_TE = torch.rand(777, 64, generator=generator) < 0.1
    num_pairs = int(map_TE.sum())
    hidden_ND = torch.randint(-8, 8, (num_pairs, 33), generator=generator).float()
    counts_RL = torch.randint(0, 9, (8, 8), generator=generator)
    results = []
    for where in (torch.device("cpu"), device):
        expert_N, token_N = expert_major_pairs(map_TE.to(where), num_pairs)
        summed_TD = sum_per_token(hidden_ND.to(where), map_TE.to(where), token_N * 64 + expert_N)
        results.append([expert_N, token_N, summed_TD, rank_major_index(counts_RL.to(where), int(counts_RL.sum()))])
    for on_host, on_device in zip(*results, strict=True):
        assert torch.equal(on_host, on_device.cpu())


def test_events_measure_what_the_device_does(device: torch.device) -> None:
    recorder = PhaseRecorder(CudaClock())
    recorder.begin()
    left = torch.randn(4096, 4096, device=device, dtype=torch.bfloat16)
    heavy = recorder.wrap("experts", lambda: [left @ left for _ in range(20)])
    light = recorder.wrap("gate", lambda: left[:1].add(1))
    heavy(), light()  # Kernels are loaded.
    torch.cuda.synchronize()
    started = time.perf_counter()
    recorder.begin()
    light()
    heavy()
    recorder.end()
    times = recorder.times_us()
    elapsed_us = (time.perf_counter() - started) * 1e6
    assert times["experts"] > 10 * times["gate"] > 0
    assert times[TOTAL] == pytest.approx(times["experts"] + times["gate"] + times[UNACCOUNTED], abs=2)
    assert times[TOTAL] < elapsed_us


def test_what_the_host_waits_for_the_gpu_is_clocked_and_the_hold_tells_the_gpus_clock(device: torch.device) -> None:
    clock, values = CudaClock(), torch.zeros(8, device=device)
    mask = torch.arange(8, device=device) > 3

    def run() -> None:
        torch.cuda._sleep(40_000_000)  # 20 ms at 2 GHz
        values.sum().item()

    with clock.watched():
        run()
        times = timed(run, PhaseRecorder(clock))
        with clock.unseen() as seen:
            run()
        with clock.unseen() as unseen:
            values[mask] = torch.ones(8, device=device)[:4]
    assert times[TOTAL] > 15_000
    assert times[HOST] > 15_000
    assert times[HOST_BUSY] < 3_000
    assert 300 < times[SM_CLOCK] < 4_000
    assert seen == []
    assert {place.partition(":")[0] for place in unseen} == {"test_gpu.py"}


def test_ceilings_are_those_of_a_gpu(device: torch.device) -> None:
    ceilings = measure_ceilings(device, torch.bfloat16)
    assert ceilings.matmul_tflops > 10
    assert ceilings.copy_gbps > 100


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    config = write_config(folder, layer__dtype="bfloat16", measure__flush_l2=True)
    done = launch(config, "--out", folder / "out", nproc=1)
    assert done.returncode == OK, done.stderr
    return folder / "out"


@pytest.mark.xdist_group("run")  # One run is looked at by all.
def test_a_run_on_one_gpu_measures_every_case_and_phase(finished: Path) -> None:
    assert {status for status, _ in statuses(finished).values()} == {"ok"}
    rows = cases_of(finished)
    alone = {phase for phase in LAYER_PHASES if phase.startswith("wait_")}
    assert set(rows.phase) == {*LAYER_PHASES, TOTAL, UNACCOUNTED} - alone
    assert (rows.time_us >= 0).all()
    assert json.loads((finished / "run.json").read_text())["comparisons"].popitem()[1]["backend"] == "nccl"
    routing = pd.concat(pd.read_parquet(path) for path in (finished / "routing").glob("*.parquet"))
    assert routing[routing.batch == 0].reference_error.max() < 0.02


@WITH_TE
@pytest.mark.skipif(bool(fp8_lacks()), reason="needs a GPU of Hopper's and CUDA 12.9")
def test_a_run_in_fp8_is_right_within_its_own_tolerance(tmp_path: Path) -> None:
    policies = [
        {"name": "topk"},
        {"name": "token_drop", "capacity_factor": 0.5},
        {"name": "expanded_drop", "capacity_factor": 1.5},
    ]
    layer = {"layer__dtype": "fp8_block", "model__preset": "olmoe-1b-7b", "model__scale": 0.25}
    done = launch(write_config(tmp_path, policies=policies, **layer), "--out", tmp_path / "out", nproc=1)
    assert done.returncode == OK, done.stderr
    assert {status for status, _ in statuses(tmp_path / "out").values()} == {"ok"}
    (facts,) = json.loads((tmp_path / "out" / "run.json").read_text())["comparisons"].values()
    assert (facts["dtype"], facts["experts"]["ran"]) == ("fp8_block", "te")
    routing = pd.concat(pd.read_parquet(path) for path in (tmp_path / "out" / "routing").glob("*.parquet"))
    errors = routing[routing.batch == 0].reference_error
    assert TOLERANCE["bfloat16"] < errors.max() <= TOLERANCE["fp8_block"], "more than bfloat16's: it ran in FP8"


@pytest.mark.xdist_group("run")  # One run is looked at by all.
def test_the_machine_is_sampled_beside_a_run(finished: Path) -> None:
    (path,) = (finished / "conditions").iterdir()
    (rank,) = json.loads(path.read_text())["ranks"]
    assert rank["peak_memory_bytes"] > 0
    if importlib.util.find_spec("pynvml") is None:
        pytest.skip("nvidia-ml-py is not installed")
    machine = rank["machine"]
    assert machine["throttle_shares"] or machine["notes"], machine


def test_a_case_that_runs_out_of_device_memory_is_recorded_and_the_others_are_measured(tmp_path: Path) -> None:
    policies = [{"name": "topk"}, {"name": "token_drop", "capacity_factor": 1.0}]
    config = write_config(tmp_path, policies=policies, workload__num_batches=1)
    done = launch(config, "--out", tmp_path / "out", nproc=1, faults="token_drop=hoard")
    assert done.returncode == CASES_FAILED, done.stderr
    found = statuses(tmp_path / "out")
    status, reason = found["token_drop capacity_factor=1.0"]
    assert status == "oom"
    assert "CUDA out of memory" in reason
    assert found["topk"][0] == found["native"][0] == "ok"


MODEL = {"scope": "model", "whole": {"num_layers": 3, "context_length": 64}}


@pytest.mark.parametrize(
    ("held", "changes", "also"),
    [
        ("layer", {}, set()),
        pytest.param("layer", {"layer__ep_size": 2}, {"wait_dispatch"}, marks=TWO_GPUS),
        *(
            ("model", {**MODEL, "model__preset": preset}, {"attention", "output"})
            for preset in ("olmoe-1b-7b", "deepseek-v2-lite")
        ),
    ],
)
def test_decode_steps_are_replayed_from_cuda_graphs_with_their_phases(
    held: str, changes: dict, also: set[str], tmp_path: Path
) -> None:
    policies = [
        {"name": "topk"}, {"name": "oea", "k0": 3}, {"name": "xshare", "k0": 1, "budget": 8},
        {"name": "xshare", "k0": 1, "scope": "request", "request_budget": 2}, {"name": "lynx", "num_dropped": 4},
        {"name": "laser", "eps_high": 0.5, "t_fix": 0.3, "c": 16}, {"name": "token_drop", "capacity_factor": 1.0},
        {"name": "token_drop", "capacity_factor": 1.0, "metric": "random"},
    ][: 3 if changes else None]  # fmt: skip
    config = write_config(
        tmp_path, **changes,
        workload__num_tokens=16, workload__sequence_length=1, workload__peak_load=None, workload__num_batches=2,
        layer__dtype="bfloat16", layer__experts="decode", policies=policies,
        sweep={"layer.cuda_graph": [False, True]},
    )  # fmt: skip
    done = launch(config, "--out", tmp_path / "out", nproc=changes.get("layer__ep_size", 1))
    assert done.returncode == OK, done.stderr
    described = json.loads((tmp_path / "out" / "run.json").read_text())
    rows = cases_of(tmp_path / "out")
    comparison = rows.case_id.map({case_id: case["comparison_id"] for case_id, case in described["cases"].items()})
    replayed = rows[comparison.map({key: one["cuda_graph"] for key, one in described["comparisons"].items()}) == held]
    assert replayed.case_id.nunique() == len(policies) + 3
    assert (replayed.status == "ok").all(), replayed.reason.unique()
    phases = replayed[replayed.kind == "breakdown"]
    assert {"gate", "policy", "experts", TOTAL, UNACCOUNTED} | also <= set(phases.phase)
    totals = phases[phases.phase == TOTAL].time_us
    assert (phases.time_us >= 0).all()
    # Events inside a graph are set by each replay: experts take a part of the total, in every one.
    assert (phases[phases.phase == "experts"].time_us.to_numpy() < totals.max()).all()


@TWO_GPUS
def test_a_killed_nccl_rank_is_recorded_and_the_others_are_measured(tmp_path: Path) -> None:
    policies = [{"name": "topk"}, {"name": "token_drop", "capacity_factor": 1.0}]
    config = write_config(tmp_path, policies=policies, workload__num_batches=1)
    done = launch(config, "--out", tmp_path / "out", nproc=2, faults="token_drop=kill")
    assert done.returncode == CASES_FAILED, done.stderr
    found = statuses(tmp_path / "out")
    assert found["token_drop capacity_factor=1.0"][0] == "failed"
    assert found["topk"][0] == "ok"
