"""Claims about the doctor: it tells what is so, what that costs and what to do; it ends, and its exit status tells."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from test_gpus import H100, OLD_DRIVER, TWO_H100
from test_run import free_port, write_config

from moe_ep_bench.cli import main
from moe_ep_bench.files import write_json
from moe_ep_bench.kernels import toolchain
from moe_ep_bench.machine import provenance
from moe_ep_bench.machine.doctor import checks, examine, exchange, facts
from moe_ep_bench.machine.doctor.checks import (
    NOTE,
    OK,
    PROBLEM,
    Finding,
    available_bytes,
    cpu_findings,
    directory_findings,
    earlier_findings,
    gpu_findings,
    memory_findings,
    nccl_findings,
    nic_findings,
    package_findings,
    ranks_findings,
    shared_memory_findings,
    topology_findings,
)
from moe_ep_bench.machine.doctor.examine import text
from moe_ep_bench.machine.doctor.exchange import Place, exchange_findings, place_of
from moe_ep_bench.machine.gpus import THROTTLE_REASONS, parse_topology
from moe_ep_bench.machine.subprocesses import Command, CommandError, ask, output_of
from moe_ep_bench.runtime import locks
from moe_ep_bench.runtime.crash_journal import Mark
from moe_ep_bench.runtime.exit_codes import CASES_FAILED, USER_ERROR

GIB = 2**30
VERSIONS = {
    "python": "3.12.3",
    "torch": "2.11.0+cu128",
    "megatron_core": "0.19.2",
    "transformer_engine": "2.9.0",
    "apex": "0.1",
    "deep_ep": "1.2.1",
    "triton": "3.6.0",
    "nccl": "2.28.9",
    "cuda": "12.8",
}
COMPARISONS = [
    {"title": "small", "comparison_id": "1", "memory_bytes": 2 * GIB, "iterations": 100, "cases": ["a", "b"]},
    {"title": "large", "comparison_id": "2", "memory_bytes": 9 * GIB, "iterations": 100, "cases": ["c"]},
]


def machine(num_gpus: int = 2, **fields: Any) -> dict[str, Any]:
    """A healthy node."""
    gpu = {"name": "NVIDIA H100 80GB HBM3", "free_bytes": 79 * GIB, "memory_bytes": 80 * GIB}
    return {
        "cpu": "a processor",
        "num_cores": 16,
        "load_average": 0.1,
        "host_free_bytes": 100 * GIB,
        "gpus": [{**gpu, "uuid": f"GPU-{index}"} for index in range(num_gpus)],
        "no_gpus_why": "",
        "packages": VERSIONS,
        "foreign_apex": False,
        "compiler": "",
        "variables": {},
        **fields,
    }


def gpus(count: int = 2, **fields: Any) -> list[dict[str, Any]]:
    return [
        {**H100, "index": index, "uuid": f"GPU-{index}", **(fields if index == 0 else {})} for index in range(count)
    ]


def worst(findings: Iterable[Finding]) -> str:
    statuses = {finding.status for finding in findings}
    return next(status for status in (PROBLEM, NOTE, OK) if status in statuses)


def worded(findings: Iterable[Finding]) -> str:
    findings = list(findings)
    assert all(len(finding.check) < 12 for finding in findings), "the name runs into the words"
    return " ".join(" ".join(text(finding).split()) for finding in findings)


# ---- commands and processes: nothing hangs


def test_a_command_that_hangs_is_ended_in_time_with_all_that_it_started() -> None:
    begin = time.monotonic()
    with Command(["bash", "-c", "trap '' TERM; sleep 3600 & echo $!; wait"]) as command:
        with pytest.raises(CommandError, match="no answer within 1 s"):
            command.wait(1.0)
        grandchild = int(command.output)
        assert Path(f"/proc/{grandchild}").exists()
    assert time.monotonic() - begin < 100
    state = Path(f"/proc/{grandchild}/stat")
    deadline = time.monotonic() + 100
    while state.exists() and ") Z " not in state.read_text() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not state.exists() or ") Z " in state.read_text()


def test_a_command_answers_or_says_in_a_line_why_not() -> None:
    with pytest.raises(CommandError, match="no-such-program: No such file or directory"):
        output_of(["no-such-program"], 5)
    with pytest.raises(CommandError, match=r"^ended with status 3: out err$"):
        output_of(["bash", "-c", "echo out; echo err >&2; exit 3"], 20)
    assert output_of(["echo", "well"], 20) == "well\n"


def test_a_child_answers_whatever_it_prints() -> None:
    assert ask("doctor_children:echoes", 1, ["a"], None, timeout_s=200) == [1, ["a"], None]
    assert ask("doctor_children:fills_its_output", timeout_s=200) == "done"


@pytest.mark.parametrize(
    ("function", "limit_s", "why"),
    [
        ("hangs", 2.0, "no answer within 2 s"),
        ("dies", 200.0, "died of signal 9"),
        ("raises", 200.0, "ImportError: libtorch_cuda.so: cannot open shared object file"),
    ],
)
def test_a_child_that_fails_is_an_error_and_no_hang(function: str, limit_s: float, why: str) -> None:
    begin = time.monotonic()
    with pytest.raises(CommandError) as caught:
        ask(f"doctor_children:{function}", timeout_s=limit_s)
    assert str(caught.value) == why
    assert time.monotonic() - begin < limit_s + 100


def test_a_child_that_nobody_waits_for_ends_itself() -> None:
    program = [sys.executable, "-m", "moe_ep_bench.machine.subprocesses", "doctor_children:hangs", "[]", "1"]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    done = subprocess.run(program, capture_output=True, timeout=600, env=env, check=False)
    assert done.returncode == 1


def test_the_doctor_itself_loads_neither_torch_nor_megatron() -> None:
    program = (
        "import sys; from moe_ep_bench import cli; from moe_ep_bench.machine.doctor import examine;"
        " print({'torch', 'megatron'} & set(sys.modules))"
    )
    cold = [sys.executable, "-W", "default", "-c", program]  # With an option it is no fork of a process that has torch.
    assert output_of(cold, 60).strip() == "set()"


# ---- the all-to-all


def test_ranks_that_torchrun_or_srun_started_exchange_with_each_other() -> None:
    places = [Place(rank, 2, 0, f"127.0.0.1:{free_port()}") for rank in range(2)]
    places[1] = replace(places[0], rank=1)
    with ThreadPoolExecutor() as pool:
        found = list(pool.map(lambda place: exchange_findings(0, place), places))
    for rank, (finding,) in enumerate(found):
        assert finding.status == OK, finding
        assert finding.what.startswith(f"rank {rank} of 2 over gloo on the CPU, rank 0 at 127.0.0.1:")


def test_a_process_finds_its_place_under_torchrun_and_srun_and_none_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    torchrun = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "node-0", "MASTER_PORT": "29400"}
    assert place_of(torchrun) == Place(3, 4, 1, "node-0:29400")
    assert place_of({**torchrun, "WORLD_SIZE": "1"}) is None
    step = {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2", "SLURM_LOCALID": "0", "SLURM_JOB_ID": "123456"}
    monkeypatch.setattr(exchange, "output_of", lambda command, timeout_s: "node-7\nnode-8\n")
    assert place_of({**step, "SLURM_STEP_NODELIST": "node-[7-8]"}) == Place(1, 2, 0, "node-7:23456")
    assert place_of({**step, "SLURM_STEP_NUM_TASKS": "1"}) is None
    assert place_of({}) is None


def test_of_several_processes_the_first_prints_all_and_others_their_problems(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(examine, "_FACTS", "doctor_children")
    monkeypatch.setattr(examine, "place_of", lambda: Place(1, 2, 0, "node-0:29400"))
    assert main(["doctor", "--out", str(tmp_path / "new")]) == CASES_FAILED
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"{platform.node()}: problem torch")
    assert not any(" ok " in line or "no notes" in line for line in lines)


def test_one_wrong_value_in_a_message_is_a_problem() -> None:
    (finding,) = exchange_findings(0, rank="doctor_children:exchanges_wrongly")
    assert finding.status == PROBLEM
    assert "wrong data (rank 1 got 1 of 3,000 values from rank 0 wrong)" in finding.what


@pytest.mark.parametrize(("rank", "limit_s"), [("hangs", 2.0), ("is_lost_in_the_exchange", 200.0)])
def test_ranks_that_hang_or_die_are_a_problem_in_time(rank: str, limit_s: float) -> None:
    begin = time.monotonic()
    (finding,) = exchange_findings(0, rank=f"doctor_children:{rank}", timeout_s=limit_s)
    assert finding.status == PROBLEM
    assert "did not get through (rank 0: " in finding.what
    assert "rank 1: " in finding.what
    assert time.monotonic() - begin < limit_s + 100


def test_nccl_is_tried_where_there_are_two_gpus_and_its_failure_told() -> None:
    (finding,) = exchange_findings(2, rank="doctor_children:raises")
    assert finding.status == PROBLEM
    assert "NCCL on GPUs 0 and 1" in finding.what
    assert "NCCL_DEBUG=INFO" in finding.remedy


# ---- what is found of packages, GPUs, links, settings, ranks and memory


def packages(**versions: str | None) -> dict[str, Any]:
    return {"packages": {**VERSIONS, **versions}}


BARE = [{key: gpu[key] if key in ("index", "name", "uuid", "driver") else None for key in gpu} for gpu in gpus()]
NO_DRIVER = "pynvml.NVMLError_DriverNotLoaded: Driver Not Loaded"
NO_NVML = "pynvml.NVMLError_LibraryNotFound: NVML Shared Library Not Found"
SERVING_GPUS = dict.fromkeys(("transformer_engine", "apex", "deep_ep"))
# What is examined, the status of each finding, and words that are in them.
FOUND: dict[str, tuple[Callable[[], Iterable[Finding]], list[str], list[str]]] = {
    "all packages": (
        lambda: package_findings(machine(), {}), [OK],
        ["Transformer Engine 2.9.0", "DeepEP 1.2.1", "NVIDIA Apex 0.1", "megatron-core 0.19.2"],
    ),
    "packages for GPUs alone, without GPUs": (
        lambda: package_findings(machine(0, **packages(**SERVING_GPUS)), {}), [OK, OK],
        ["of use on GPUs only: Transformer Engine, NVIDIA Apex, DeepEP"],
    ),
    **{
        f"no {package}": (
            lambda package=package: package_findings(machine(**packages(**{package: None})), {}), [OK, NOTE],
            ["note packages ", cost],
        )
        for package, cost in (
            ("transformer_engine", "grouped GEMMs"), ("apex", "torch's own kernels"),
            ("deep_ep", "flex dispatcher cannot run"), ("triton", "routed by torch"),
        )
    },
    "the index's apex": (
        lambda: package_findings(machine(**packages(apex=None), foreign_apex=True), {"apex": "x"}), [OK, NOTE, NOTE],
        ["is not NVIDIA Apex"],
    ),
    "a broken package": (
        lambda: package_findings(machine(), {"transformer_engine": "ImportError: undefined symbol"}), [OK, PROBLEM],
        ["undefined symbol"],
    ),
    "healthy GPUs": (
        lambda: gpu_findings(machine(), gpus()), [OK],
        ["2 x NVIDIA H100 80GB HBM3, driver 570.86.15, 79.0 GiB free on the fullest"],
    ),
    "GPUs at their cap": (
        lambda: gpu_findings(machine(), gpus(throttle_reasons=THROTTLE_REASONS["power_cap"])), [OK], [],
    ),
    "several capped GPUs": (
        lambda: gpu_findings(machine(8), [{**gpu, "power_limit_w": 500.0} for gpu in gpus(8)]), [OK, NOTE],
        ["note GPUs 0, 1, 2, 3, 4, 5, 6, 7: capped at 500 W of 700 W"],
    ),
    "unknown states": (lambda: gpu_findings(machine(), BARE), [OK], []),
    "another's busy GPU": (
        lambda: gpu_findings(machine(), [*gpus(), {**gpus()[0], "uuid": "GPU-9", "utilization_percent": 100.0}]),
        [OK], [],
    ),
    "no NVML": (lambda: gpu_findings(machine(0), NO_NVML), [NOTE], []),
    "no GPUs": (lambda: gpu_findings(machine(0), []), [NOTE], []),
    "no driver": (lambda: gpu_findings(machine(0), NO_DRIVER), [PROBLEM], [NO_DRIVER]),
    "a driver that hangs": (
        lambda: gpu_findings(machine(0), "no answer within 20 s"), [PROBLEM], ["no answer within 20 s"],
    ),
    "GPUs that torch cannot use": (
        lambda: gpu_findings(machine(0, no_gpus_why="this torch is built without CUDA"), gpus()), [PROBLEM],
        ["2 here, none that torch can use: this torch is built without CUDA"],
    ),
    "hidden GPUs": (lambda: gpu_findings(machine(0, variables={"CUDA_VISIBLE_DEVICES": ""}), gpus()), [NOTE], []),
    "GPUs without NVML": (lambda: gpu_findings(machine(), "no answer within 20 s"), [OK, NOTE], []),
    "a free host": (lambda: cpu_findings(machine()), [OK], []),
    "a busy host": (lambda: cpu_findings(machine(load_average=12.0)), [OK, NOTE], []),
    **{
        f"a path over {path}": (
            lambda path=path: topology_findings(parse_topology(OLD_DRIVER.replace("PHB", path)), []), statuses,
            [f"1 of 1 pairs of GPUs have no NVLink (1 x {path})"],
        )
        for path, statuses in (("NODE", [NOTE, NOTE]), ("PIX", [NOTE]))
    },
    "NVLink": (
        lambda: topology_findings(parse_topology(TWO_H100.replace("NODE", "PXB")), gpus()), [OK],
        ["NVLink between all GPUs (1 x NV18 pairs)"],
    ),
    "a far NIC, and links that are down": (
        lambda: topology_findings(parse_topology(TWO_H100), gpus(nvlinks=[True, False])), [OK, NOTE, NOTE],
        ["GPU1 reach their nearest NIC across the host (NODE)", "inactive links (GPU 0: 1 of 2)"],
    ),
    "an unknown topology": (lambda: topology_findings("no answer within 20 s", []), [NOTE], []),
    **{
        f"{name}={value}": (
            lambda name=name, value=value: nccl_findings(machine(variables={name: value})), statuses,
            ["2.28.9, ", f"{name}={value}"],
        )
        for name, value, statuses in (
            ("NCCL_P2P_DISABLE", "1", [OK, NOTE]), ("NCCL_P2P_DISABLE", "0", [OK]),
            ("NCCL_DEBUG", "info", [OK, NOTE]), ("NCCL_DEBUG", "WARN", [OK]),
        )
    },
    "too little memory": (
        lambda: memory_findings(COMPARISONS, 8 * GIB), [PROBLEM],
        ["1 of 2 comparisons need more", "large needs about 9.0 GiB of 8.0 GiB"],
    ),
    "just enough memory": (lambda: memory_findings(COMPARISONS, 9 * GIB), [OK], ["3 cases in 2 comparisons"]),
    "a rank a GPU": (lambda: ranks_findings(machine(2), 2), [], []),
    "more ranks than GPUs": (lambda: ranks_findings(machine(2), 3), [PROBLEM], []),
    "a rank a core": (lambda: ranks_findings(machine(0), 16), [], []),
    "more ranks than cores": (lambda: ranks_findings(machine(0), 17), [NOTE], []),
    "more ranks than time slices": (lambda: ranks_findings(machine(0), 33), [PROBLEM], []),
}  # fmt: skip


@pytest.mark.parametrize("name", FOUND)
def test_what_is_so_is_found_with_its_numbers(name: str) -> None:
    examine_it, statuses, words = FOUND[name]
    findings = list(examine_it())
    assert [finding.status for finding in findings] == statuses
    assert [text for text in words if text not in worded(findings)] == []


@pytest.mark.parametrize(
    ("package", "version", "status"),
    [
        ("megatron_core", None, PROBLEM), ("megatron_core", "0.20.0", PROBLEM), ("torch", "2.9.1", PROBLEM),
        ("megatron_core", "0.16.1", OK), ("megatron_core", "0.19.2", OK), ("megatron_core", "0.17.0rc1", OK),
    ],
)  # fmt: skip
def test_versions_that_no_run_can_do_with_are_a_problem(package: str, version: str | None, status: str) -> None:
    assert worst(package_findings(machine(0, **packages(**{package: version})), {})) == status


def test_the_fullest_of_the_gpus_that_are_used_counts_and_on_the_cpu_a_share() -> None:
    full = machine(3)
    full["gpus"][1]["free_bytes"] = 10 * GIB
    full["gpus"][2]["free_bytes"] = 1 * GIB
    assert available_bytes(full, 2) == 10 * GIB
    assert available_bytes(machine(0), 4) == 25 * GIB


def test_triton_without_a_c_compiler_is_a_problem_on_gpus(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    lacking = toolchain.lacking()
    assert lacking == "no C compiler (gcc or clang)"
    findings = list(package_findings(machine(compiler=lacking), {}))
    assert worst(findings) == PROBLEM
    assert "which Triton needs" in worded(findings)
    assert worst(package_findings(machine(0, compiler=lacking), {})) == OK
    compiler = tmp_path / "cc"
    compiler.touch(0o755)
    monkeypatch.setenv("CC", str(compiler))
    monkeypatch.setattr(toolchain.sysconfig, "get_paths", lambda: {"include": str(tmp_path)})
    assert toolchain.lacking() == f"no {tmp_path / 'Python.h'}"
    (tmp_path / "Python.h").touch()
    assert toolchain.lacking() == ""


@pytest.mark.parametrize(
    ("state", "status", "words"),
    [
        ({"power_limit_w": 500.0}, NOTE, "capped at 500 W of 700 W"),
        ({"throttle_reasons": THROTTLE_REASONS["hw_thermal"], "temperature_c": 92.0}, NOTE, "it is too hot"),
        ({"throttle_reasons": THROTTLE_REASONS["hw_power_brake"]}, NOTE, "its power supply brakes it"),
        ({"memory_free_mib": 40000.0}, NOTE, "51 % of its memory is taken"),
        ({"utilization_percent": 97.0}, NOTE, "97 % of its time"),
        ({"ecc_errors": 3.0}, NOTE, "3 uncorrected memory errors"),
        ({"mig": "Enabled"}, NOTE, "MIG is enabled"),
        ({"compute_mode": "Prohibited"}, PROBLEM, "no process may use it"),
    ],
)
def test_what_makes_one_gpu_slow_or_useless_is_named_with_its_number(state: Any, status: str, words: str) -> None:
    findings = list(gpu_findings(machine(), gpus(**state)))
    (found,) = [finding for finding in findings if finding.status != OK]
    assert (found.check, found.status) == ("GPU 0", status)
    assert words in worded([found])


def test_rdma_ports_are_counted_and_those_that_are_down_named(monkeypatch: pytest.MonkeyPatch) -> None:
    unlimited = (checks.resource.RLIM_INFINITY,) * 2
    monkeypatch.setattr(checks.resource, "getrlimit", lambda limit: unlimited)
    up = {"nic": "mlx5_0", "number": 1, "is_active": True, "rate": "400 Gb/sec (4X NDR)", "link_layer": "InfiniBand"}
    down = {**up, "nic": "mlx5_1", "is_active": False}
    assert [finding.status for finding in nic_findings([up, up])] == [OK]
    assert "2 x 400 Gb/sec" in worded(nic_findings([up, up]))
    assert "mlx5_1:1" in worded(nic_findings([up, down]))
    assert worst(nic_findings([down])) == worst(nic_findings([])) == NOTE
    monkeypatch.setattr(checks.resource, "getrlimit", lambda limit: (65536, 65536))
    assert "ulimit -l unlimited" in worded(nic_findings([up]))


def test_little_shared_memory_is_noted_for_several_gpus_only(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    small = type("Space", (), {"f_bavail": 2**14, "f_frsize": 2**12})
    monkeypatch.setattr(checks.os, "statvfs", lambda folder: small)
    assert worst(shared_memory_findings(8)) == NOTE
    assert list(shared_memory_findings(1)) == []
    monkeypatch.undo()
    assert list(shared_memory_findings(8, tmp_path / "none")) == []


# ---- the results directory


def test_a_directory_is_tried_and_left_as_it_was(tmp_path: Path) -> None:
    for out in (tmp_path, tmp_path / "a" / "b"):
        (finding,) = directory_findings(out, COMPARISONS, 2)
        assert finding.status == OK
        assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("inside", [".", "below"])
def test_a_file_in_the_way_is_a_problem(inside: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (finding,) = directory_findings(tmp_path / "file" / inside, [], 1)
    assert finding.status == PROBLEM
    assert "cannot be written" in finding.what
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_disk_that_is_full_or_cannot_rename_is_a_problem(
    call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(*((checks.os, call, fails) if call == "fsync" else (Path, call, fails)))
    (finding,) = directory_findings(tmp_path / "new", [], 1)
    assert finding.status == PROBLEM
    assert "No space left on device" in finding.what
    assert list(tmp_path.iterdir()) == []


def test_too_little_room_for_the_config_is_a_problem_and_little_room_a_note(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    space = type("Space", (), {"f_bavail": 2**14, "f_frsize": 2**12})  # 64 MiB
    monkeypatch.setattr(checks.os, "statvfs", lambda folder: space)
    assert worst(directory_findings(tmp_path, COMPARISONS, 2)) == NOTE
    long = [{**COMPARISONS[0], "iterations": 1_000_000}]
    assert worst(directory_findings(tmp_path, long, 2)) == PROBLEM


def test_a_job_that_writes_what_the_config_measures_is_a_problem_and_another_a_note(tmp_path: Path) -> None:
    with locks.hold(tmp_path, {"2": "large"}):
        _, finding = directory_findings(tmp_path, COMPARISONS, 2)
        assert finding.status == PROBLEM
        assert finding.what.startswith(f"large: another job is writing this, process {os.getpid()} on ")
        _, finding = directory_findings(tmp_path, COMPARISONS[:1], 2)
        assert finding.status == NOTE
        assert f"another job is writing 1 other comparison(s) there, process {os.getpid()} on " in finding.what
    with locks.hold(tmp_path, {"run.json": "run.json"}):  # Held for moments, by jobs that hold what they write.
        assert worst(directory_findings(tmp_path, COMPARISONS, 2)) == OK
    (tmp_path / locks.FOLDER).mkdir()
    (tmp_path / locks.FOLDER / "2").write_text("{}")  # Of a job that was killed: nobody holds it.
    assert worst(directory_findings(tmp_path, COMPARISONS, 2)) == OK


def test_a_job_that_was_lost_there_is_noted(tmp_path: Path) -> None:
    Mark(tmp_path / "attempts", "1", 0)
    _, finding = directory_findings(tmp_path, [], 1)
    assert finding.status == NOTE
    assert finding.what == "a job was lost there without a word, and none holds a lock now"


def test_another_runs_directory_is_a_problem_and_ones_own_says_what_is_done(tmp_path: Path) -> None:
    conditions = {"torch": "2.0"}
    hashes = {"code": provenance.code_hash()}
    write_json(tmp_path / "run.json", {"mode": "emulated", "environment": conditions, "hashes": hashes})
    refusal = facts.agreement(str(tmp_path), conditions)
    (finding,) = earlier_findings(tmp_path, refusal, COMPARISONS)
    assert finding.status == PROBLEM
    assert "holds results with mode emulated, here it is run; choose another directory" in finding.what
    write_json(tmp_path / "run.json", {"mode": "run", "environment": conditions, "hashes": hashes})
    assert facts.agreement(str(tmp_path), conditions) == ""
    assert list(earlier_findings(tmp_path, "", COMPARISONS)) == []
    (tmp_path / "cases").mkdir()
    (tmp_path / "cases" / "b.parquet").touch()
    (finding,) = earlier_findings(tmp_path, "", COMPARISONS)
    assert (finding.status, finding.what[:25]) == (OK, "1 of 3 cases of this conf")


# ---- the whole


def test_a_finding_is_said_within_120_columns() -> None:
    lines = text(Finding("NVLink", NOTE, "what " * 20, "means " * 20, "remedy")).splitlines()
    assert lines[0].startswith("note    NVLink      what what")
    assert len(lines) > 1
    assert all(len(line) <= 120 and line.startswith(" " * 20) for line in lines[1:])
    assert text(Finding("CPU", OK, "it is here")) == "ok      CPU         it is here"


def test_this_machine_and_a_small_config_are_examined_as_json(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    config, out = write_config(tmp_path), tmp_path / "out"
    status = main(["doctor", str(config), "--out", str(out), "--nproc", "2", "--json"])
    report = json.loads(capfd.readouterr().out)
    found = {finding["check"]: finding for finding in report["findings"]}
    assert status == report["status"] == int(any(f["status"] == PROBLEM for f in report["findings"]))
    assert found["all-to-all"]["status"] == OK, "two ranks of its own"
    assert "gloo" in found["all-to-all"]["what"]
    assert found["memory"]["status"] == OK
    assert found["results"]["status"] == OK
    assert (report["nproc"], len(report["comparisons"])) == (2, 1)
    assert report["machine"]["packages"]["torch"] == provenance.package_versions()["torch"]
    assert not out.exists()


def test_a_torch_that_is_broken_is_a_problem_and_the_rest_is_still_examined(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(examine, "_FACTS", "doctor_children")
    assert main(["doctor", "--out", str(tmp_path / "new")]) == CASES_FAILED
    shown = " ".join(capsys.readouterr().out.split())
    assert "problem torch cannot be asked (ImportError: libtorch_cuda.so" in shown
    assert "ok results" in shown
    assert "1 problem, no notes" in shown


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--nproc", "0"], "--nproc: expected at least 1, got 0"),
        (["--set", "workload.seed=1"], "--set workload.seed=1: expected a CONFIG whose value it replaces, got none"),
    ],
)
def test_a_wrong_command_is_one_line_and_status_2(
    arguments: list[str], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", *arguments]) == USER_ERROR
    assert capsys.readouterr() == ("", f"moe-ep-bench: {line}\n")


def test_a_wrong_config_is_one_line_and_status_2_before_any_finding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = write_config(tmp_path)
    mistake = facts.plan(str(config), ["layer.ep_size=3"], 2)["mistake"]
    assert (
        "layer.ep_size: expected a divisor of the 2 ranks, got 3; --nproc starts more; the command emulate" in mistake
    )

    def ask(function: str, *arguments: object, timeout_s: float) -> dict[str, Any]:
        return {"mistake": mistake} if function.endswith(":plan") else machine(0)

    monkeypatch.setattr(examine, "_FACTS", "doctor_children")
    monkeypatch.setattr(examine, "ask", ask)
    assert main(["doctor", str(config), "--nproc", "2", "--set", "layer.ep_size=3"]) == USER_ERROR
    assert capsys.readouterr() == ("", f"moe-ep-bench: {mistake}\n")
