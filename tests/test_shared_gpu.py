"""Walk the distributed path with several ranks on one GPU: ``pytest -m gpu -k shared``.

By NCCL where it lets ranks share a device, else named as skipped; staged in any case. The same walks are made by ranks
of the CPU, so that none fails by its config in the minutes that a GPU is there.
"""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pandas as pd
import pytest
from policy_cases import ONE_OF_EACH, similarity_file
from test_faults import check_nobody_is_blamed, check_stopped, is_running, ranks_of, started, tried, wait_until
from test_run import cases_of, environment, launch, statuses, write_config

from moe_ep_bench.bench.plan import plan
from moe_ep_bench.bench.point import RANKS
from moe_ep_bench.errors import CASES_FAILED, OK, UserError
from moe_ep_bench.runtime.sharing import NCCL, SHARE_FLAG, STAGED, check_sharing

TESTS = Path(__file__).parent
ON_GPU = [pytest.param(how, marks=pytest.mark.gpu) for how in (NCCL, STAGED)]
ANYWHERE = ["cpu", *ON_GPU]

ALL_POLICIES = [
    {"name": "topk"},
    {"name": "token_drop", "capacity_factor": 1.0},
    {"name": "token_drop", "capacity_factor": 1.0, "metric": "random"},
    {"name": "token_drop", "capacity_factor": 1.0, "granularity": "device"},
    {"name": "expanded_drop", "capacity_factor": 1.0},
    {"name": "expert_drop"},
    {"name": "pruned", "k0": 3},
    {"name": "oea", "k0": 3},
    {"name": "laser", "eps_high": 0.5, "t_fix": 0.3, "c": 16},
    {"name": "load_only"},
    {"name": "xshare", "k0": 1, "budget": 8},
    {"name": "lynx", "num_dropped": 4},
    {"name": "budget_drop", "max_lost_mass": 0.01},
    {"name": "dynamic_skip", "beta": 0.5},
    {"name": "sere", "k0": 2, "similarity": similarity_file(64)},
]
SMALL = {"workload__num_batches": 1, "measure__iterations": 1, "measure__warmup": 1, "measure__timeout_s": 60}
FEW = {"policies": ALL_POLICIES[:2]}
PREFILL = {"workload__num_tokens": None, "workload__tokens_per_rank": 256}
DECODE = {"workload__num_tokens": 16, "workload__sequence_length": 1, "workload__peak_load": None}
MODEL = {"scope": "model", "whole": {"num_layers": 2, "context_length": 0}}


def flags(how: str) -> list[str]:
    """Options of ``run`` that have ranks share a device; skips where NCCL does not."""
    if how == "cpu":
        return ["--cpu", *SHARE_FLAG[STAGED]]
    try:
        check_sharing(how, "cuda")
    except UserError as older:
        pytest.skip(str(older))
    return SHARE_FLAG[how]


def small_config(folder: Path, how: str, **changes: object) -> Path:
    dtype = {} if how == "cpu" else {"layer__dtype": "bfloat16"}
    return write_config(folder, **{**SMALL, **dtype, **changes})


def walked(folder: Path, how: str, nproc: int, faults: str = "", status: int = OK, **changes: object) -> Path:
    """The directory of a rehearsal that ended with this status."""
    config = small_config(folder, how, **changes)
    done = launch(config, *flags(how), "--out", folder / "out", nproc=nproc, faults=faults)
    assert done.returncode == status, done.stderr
    assert "Traceback" not in done.stderr
    return folder / "out"


def all_are_right(out: Path, how: str, num_ranks: int) -> None:
    """Every case ran on every rank, and each layer's output was held against the reference."""
    assert {status for status, _ in statuses(out).values()} == {"ok"}, statuses(out)
    assert set(cases_of(out)["rank"]) == set(range(num_ranks))
    routing = pd.concat(pd.read_parquet(path) for path in (out / "routing").glob("*.parquet"))
    assert routing["reference_error"].max() < (1e-4 if how == "cpu" else 0.02)


@pytest.mark.slow
@pytest.mark.parametrize("how", ANYWHERE)
@pytest.mark.parametrize("stage", [PREFILL, DECODE], ids=["prefill", "decode"])
def test_every_policy_on_two_shared_ranks(stage: dict, how: str, tmp_path: Path) -> None:
    """Each routing is its oracle's on either rank: Triton's kernels, or torch's operations, say the same as one."""
    assert {spec["name"] for spec in ALL_POLICIES} == {spec["name"] for spec in ONE_OF_EACH}
    if how == "cpu":  # Others walk there.
        config = write_config(tmp_path, policies=ALL_POLICIES, **stage)
        assert len(plan(config, (), RANKS, 2, on_cpu=True, sharing=STAGED)[0].cases) == len(ALL_POLICIES) + 3
        return
    all_are_right(walked(tmp_path, how, 2, policies=ALL_POLICIES, **stage), how, 2)


@pytest.mark.parametrize("how", ANYWHERE)
def test_groups_of_two_of_four_shared_ranks_with_uneven_and_empty_ones(how: str, tmp_path: Path) -> None:
    uneven = {"workload__num_tokens": None, "workload__tokens_of_ranks": [96, 0, 24, 48], "layer__ep_size": 2}
    out = walked(tmp_path, how, 4, **FEW, **uneven)
    assert {status for status, _ in statuses(out).values()} == {"ok"}, statuses(out)
    assert set(cases_of(out)["rank"]) == {0, 1, 2, 3}


@pytest.mark.parametrize("how", ON_GPU)
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_the_quickstart_on_shared_ranks(num_ranks: int, how: str, tmp_path: Path) -> None:
    small = ["workload.tokens_per_rank=2048", "workload.num_batches=2", "measure.iterations=2"]
    config = TESTS.parent / "configs" / "quickstart.yaml"
    done = launch(
        config, *flags(how), *(f"--set={value}" for value in small), "--out", tmp_path / "out", nproc=num_ranks
    )
    assert done.returncode == OK, done.stderr
    all_are_right(tmp_path / "out", how, num_ranks)
    assert "rehearsal" in json.loads((tmp_path / "out" / "run.json").read_text())["mode"]


@pytest.mark.parametrize("how", ANYWHERE)
def test_a_whole_model_of_two_layers_on_shared_ranks(how: str, tmp_path: Path) -> None:
    all_are_right(walked(tmp_path, how, 2, **FEW, **MODEL, model__preset="olmoe-1b-7b"), how, 2)


@pytest.mark.gpu
def test_collectives_inside_a_cuda_graph_of_shared_ranks(tmp_path: Path) -> None:
    graph = {"layer__cuda_graph": True, "layer__experts": "decode", **DECODE}
    all_are_right(walked(tmp_path, NCCL, 2, **FEW, **graph), NCCL, 2)


@pytest.mark.parametrize("how", ON_GPU)
@pytest.mark.parametrize(
    ("fault", "status", "words"),
    [
        ("kill", "failed", "killed, or out of memory"),
        ("hang", "timeout", "no progress for"),
        ("stuck", "timeout", "no progress for"),
        ("hoard", "oom", "CUDA out of memory"),
        ("raise", "failed", "no kernel compiles here"),
    ],
)
def test_a_fault_of_one_shared_rank_costs_its_case_alone(
    fault: str, status: str, words: str, how: str, tmp_path: Path
) -> None:
    out = walked(tmp_path, how, 2, f"token_drop={fault}", CASES_FAILED, **FEW, measure__timeout_s=15)
    found = statuses(out)
    lost = found.pop("token_drop capacity_factor=1.0")
    assert lost[0] == status
    assert words in lost[1]
    assert {status for status, _ in found.values()} == {"ok"}, "nobody else is blamed"


@pytest.mark.slow
@pytest.mark.parametrize("how", ANYWHERE)
def test_shared_ranks_that_are_asked_to_end_while_one_is_stuck_blame_no_case_and_go_on(
    how: str, tmp_path: Path
) -> None:
    """The first comparison is finished; in the second a rank sleeps, or a GPU's kernel does not end."""
    two = {"sweep": {"workload.seed": [0, 1]}, "measure__timeout_s": 500}
    config, out = small_config(tmp_path, how, **FEW, **two), tmp_path / "out"
    fault = "token_drop=hang_later" if how == "cpu" else "token_drop=stuck_later"
    with started(config, out, *flags(how), faults=fault) as job:
        wait_until(lambda: any((out / "cases").glob("*.parquet")), 300, job)
        finished = cases_of(out)
        stuck = set(json.loads((out / "run.json").read_text())["cases"]) - set(finished.case_id)
        (of_last,) = (out / "attempts").glob("now-*-1")
        wait_until(lambda: tried(of_last).decode() in stuck, 300, job)
        time.sleep(1)
        ranks = ranks_of(job)
        job.terminate()
        check_stopped(job, signal.SIGTERM)
        wait_until(lambda: not any(map(is_running, ranks)), 200)
    check_nobody_is_blamed(out)
    done = launch(config, *flags(how), "--out", out)
    assert done.returncode == OK, done.stderr
    rows = cases_of(out)
    assert set(rows.status) == {"ok"}
    assert rows.case_id.nunique() == 2 * finished.case_id.nunique()
    assert set(rows[rows.case_id.isin(finished.case_id)].run_id) == set(finished.run_id), "it is not run again"


@pytest.mark.parametrize("how", ON_GPU)
def test_shared_ranks_meet_behind_what_holds_them(how: str) -> None:
    flags(how)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    env = {**environment(), "NCCL_MULTI_RANK_GPU_ENABLE": "1"}
    done = subprocess.run(
        [*command, TESTS / "shared_order.py", how], capture_output=True, text=True, timeout=200, env=env
    )
    waited = re.findall(r"rank (\d) waited (\S+) (\S+)", done.stdout)
    assert len(waited) == 2, done.stderr
    for rank, *waited_ms in waited:
        longer, shorter = (float(waited_ms[int(rank)]), float(waited_ms[1 - int(rank)]))
        # Rank 0 waits for rank 1 in the first order, rank 1 for rank 0 in the second.
        assert longer > 20 > shorter, waited


@pytest.mark.parametrize("how", ANYWHERE)
def test_shared_ranks_calibrate_and_write_no_links(how: str, tmp_path: Path) -> None:
    few = ["--nproc", "2", "--max-bytes", "65536", "--repetitions", "2", "--out", tmp_path / "links.yaml"]
    command = [sys.executable, "-m", "moe_ep_bench", "calibrate", *few, *flags(how)]
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, timeout=300, env=environment())
    assert done.returncode == OK, done.stderr
    assert "ranks shared a device, so no file is written" in done.stdout
    assert not (tmp_path / "links.yaml").exists()


@pytest.mark.parametrize("how", ANYWHERE)
def test_shared_ranks_validate_and_compare_nothing(how: str, tmp_path: Path) -> None:
    config = small_config(tmp_path, how, **FEW, emulate__links="h100-nvlink4")
    command = [sys.executable, "-m", "moe_ep_bench", "validate", config, "--nproc", "2", "--out", tmp_path / "out"]
    done = subprocess.run(
        [*map(str, command), *flags(how)], capture_output=True, text=True, timeout=500, env=environment()
    )
    assert done.returncode == OK, done.stderr
    assert "real ranks shared a device, so nothing was compared" in done.stdout
    assert not list((tmp_path / "out").glob("validation*"))
