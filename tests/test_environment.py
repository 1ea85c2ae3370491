"""Claims about provenance: what is written down, what never is, and what the driver says of GPUs (made up)."""

from __future__ import annotations

import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pynvml
import pytest
import torch

from moe_ep_bench.machine import provenance
from moe_ep_bench.machine.gpus import query_gpus

CPU = torch.device("cpu")
# One GPU as ``query_gpus`` gives it.
H100 = {
    "index": 0, "driver": "570.86.15", "name": "NVIDIA H100 80GB HBM3", "uuid": "GPU-0", "memory_mib": 81559.0,
    "memory_free_mib": 81077.0, "utilization_percent": 0, "temperature_c": 31, "sm_clock_mhz": 345,
    "sm_clock_limit_mhz": 1980, "power_w": 71.52, "power_limit_w": 700.0,
    "power_default_w": 700.0, "mig": "Disabled", "ecc_errors": 0, "throttle_reasons": 1,
}  # fmt: skip


ANSWERS: dict[str, Callable[..., Any]] = {
    "nvmlInit": lambda: None,
    "nvmlSystemGetDriverVersion": lambda: "570.86.15",
    "nvmlDeviceGetCount": lambda: 1,
    "nvmlDeviceGetHandleByIndex": lambda index: "handle",
    "nvmlDeviceGetName": lambda gpu: "NVIDIA H100 80GB HBM3",
    "nvmlDeviceGetUUID": lambda gpu: "GPU-0",
    "nvmlDeviceGetMemoryInfo": lambda gpu: SimpleNamespace(total=81559 * 2**20, free=81077 * 2**20),
    "nvmlDeviceGetUtilizationRates": lambda gpu: SimpleNamespace(gpu=0),
    "nvmlDeviceGetTemperature": lambda gpu, sensor: 31,
    "nvmlDeviceGetClockInfo": lambda gpu, clock: {pynvml.NVML_CLOCK_SM: 345}[clock],
    "nvmlDeviceGetMaxClockInfo": lambda gpu, clock: 1980,
    "nvmlDeviceGetPowerUsage": lambda gpu: 71_520,
    "nvmlDeviceGetEnforcedPowerLimit": lambda gpu: 700_000,
    "nvmlDeviceGetPowerManagementDefaultLimit": lambda gpu: 700_000,
    "nvmlDeviceGetMigMode": lambda gpu: [0, 0],
    "nvmlDeviceGetTotalEccErrors": lambda gpu, kind, counter: 0,
    "nvmlDeviceGetCurrentClocksEventReasons": lambda gpu: 1,
}


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A driver with one GPU."""
    for name, answer in ANSWERS.items():
        monkeypatch.setattr(pynvml, name, answer)
    return monkeypatch


def failing(error: int) -> Callable[..., Any]:
    def fail(*_: object) -> None:
        raise pynvml.NVMLError(error)

    return fail


NOT_SAID = failing(pynvml.NVML_ERROR_NOT_SUPPORTED)
DRIVERS = {
    "all is said, in the units of the names": ({}, {}),
    "what is not said is unknown and not zero": (
        dict.fromkeys(
            ("nvmlDeviceGetEnforcedPowerLimit", "nvmlDeviceGetMigMode", "nvmlDeviceGetTotalEccErrors"), NOT_SAID
        ),
        dict.fromkeys(("power_limit_w", "mig", "ecc_errors")),
    ),
    "an older driver has reasons by the older name": (
        {
            "nvmlDeviceGetCurrentClocksEventReasons": failing(pynvml.NVML_ERROR_FUNCTION_NOT_FOUND),
            "nvmlDeviceGetCurrentClocksThrottleReasons": lambda gpu: 64,
        },
        {"throttle_reasons": 64},
    ),
}


@pytest.mark.parametrize("name", DRIVERS)
def test_a_gpu_is_read_field_by_field(name: str, nvml: pytest.MonkeyPatch) -> None:
    answers, expected = DRIVERS[name]
    for function, answer in answers.items():
        nvml.setattr(pynvml, function, answer)
    assert query_gpus() == [{**H100, **expected}]


# As directories were compared before there was more provenance; these still have to be resumed.
COMPARED_ON_CPUS = {"device_name", "python", "torch", "megatron_core", "transformer_engine", "apex", "cuda"}


def test_the_description_is_plain_and_says_what_and_where() -> None:
    described = json.loads(json.dumps(provenance.describe(CPU), allow_nan=False))
    for key in ("torch", "triton", "deep_ep", "nccl", "megatron_core", "hostname", "kernel", "variables", "slurm"):
        assert key in described
    assert described["device_type"] == "cpu"
    assert described["torch"] == torch.__version__
    assert "gpus" not in described  # Nobody asks a driver on a CPU run.


def test_cpu_results_compare_as_they_did_and_gpu_results_by_their_transport_too() -> None:
    described = provenance.describe(CPU)
    assert set(provenance.comparable(described)) == COMPARED_ON_CPUS
    assert provenance.conditions(CPU) == provenance.comparable(described)
    on_gpus = provenance.comparable({**described, "device_type": "cuda"})
    assert set(on_gpus) == COMPARED_ON_CPUS | {"nccl", "triton", "deep_ep"}


def test_variables_come_from_a_fixed_list_and_secrets_never() -> None:
    variables = {
        "NCCL_P2P_DISABLE": "1",
        "NCCL_IB_PKEY": "0",
        "TORCH_NCCL_BLOCKING_WAIT": "1",
        "CUDA_VISIBLE_DEVICES": "0,1",
        "OMP_NUM_THREADS": "1",
        "HF_TOKEN": "secret",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "MY_NCCL_PASSWORD": "secret",
        "HOME": "/home/somebody",
        "CUDA_TOKEN": "secret",
        "SLURM_JWT": "secret",
    }
    kept = provenance.relevant_variables(variables)
    assert set(kept) == set(list(variables)[:5])
    assert "secret" not in json.dumps([kept, provenance.slurm_job({**variables, "SLURM_JOB_ID": "1"})])


def test_a_slurm_job_is_named_with_its_array_and_nodes_and_none_outside_of_one() -> None:
    named = {"SLURM_JOB_ID": "17", "SLURM_ARRAY_JOB_ID": "15", "SLURM_ARRAY_TASK_ID": "2"}
    named["SLURM_JOB_NODELIST"] = "n[1-2]"
    assert provenance.slurm_job({**named, "SLURM_CONF": "/etc/slurm.conf"}) == named
    assert provenance.slurm_job({"SLURM_CLUSTER_NAME": "c", "PATH": "/bin"}) is None


def test_gpus_driver_and_topology_are_described_or_the_reason_why_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(provenance, "query_gpus", lambda: [H100])
    monkeypatch.setattr(provenance, "_output", lambda *command: "GPU0 GPU1\n X NV18\n")
    described = json.loads(json.dumps(provenance.describe_gpus()))
    assert (described["driver"], described["gpus"], described["gpus_why"]) == ("570.86.15", [H100], None)
    assert described["topology"] == ["GPU0 GPU1", " X NV18"]
    monkeypatch.setattr(provenance, "query_gpus", Mock(side_effect=pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST)))
    described = provenance.describe_gpus()
    assert described == {"gpus": None, "driver": None, "topology": None, "gpus_why": "GPU is lost"}


@pytest.mark.parametrize(("several_nodes", "local_rank"), [(True, "0"), (True, "1"), (False, "0")])
def test_the_first_rank_of_each_of_several_nodes_tells_of_its_gpus(
    several_nodes: bool, local_rank: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "H100")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="1"))
    monkeypatch.setattr(provenance, "describe_gpus", lambda: {"topology": "of this node"})
    monkeypatch.setenv("LOCAL_RANK", local_rank)
    rank = provenance.describe_rank(torch.device("cuda", 0), several_nodes=several_nodes)
    assert (rank["gpu_name"], rank["gpu_uuid"]) == ("H100", "GPU-1")
    expected = {"topology": "of this node"} if several_nodes and local_rank == "0" else None
    assert rank.get("node") == expected
