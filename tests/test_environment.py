"""Claims about provenance: what is written down, what never is, and what the driver says of GPUs (made up)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest
import torch

from moe_ep_bench.machine import provenance
from moe_ep_bench.machine.provenance import query_gpus

CPU = torch.device("cpu")
# One GPU as ``query_gpus`` gives it.
H100 = {
    "index": 0, "driver": "570.86.15", "name": "NVIDIA H100 80GB HBM3", "uuid": "GPU-0", "memory_mib": 81559.0,
    "memory_free_mib": 81077.0, "sm_clock_mhz": 345, "sm_clock_limit_mhz": 1980,
    "power_limit_w": 700.0, "power_default_w": 700.0, "mig": "Disabled",
}  # fmt: skip
ANSWERS: dict[str, Callable[..., Any]] = {
    "nvmlInit": lambda: None,
    "nvmlSystemGetDriverVersion": lambda: "570.86.15",
    "nvmlDeviceGetCount": lambda: 1,
    "nvmlDeviceGetHandleByIndex": lambda index: "handle",
    "nvmlDeviceGetName": lambda gpu: "NVIDIA H100 80GB HBM3",
    "nvmlDeviceGetUUID": lambda gpu: "GPU-0",
    "nvmlDeviceGetMemoryInfo": lambda gpu: SimpleNamespace(total=81559 * 2**20, free=81077 * 2**20),
    "nvmlDeviceGetClockInfo": lambda gpu, clock: {pynvml.NVML_CLOCK_SM: 345}[clock],
    "nvmlDeviceGetMaxClockInfo": lambda gpu, clock: 1980,
    "nvmlDeviceGetEnforcedPowerLimit": lambda gpu: 700_000,
    "nvmlDeviceGetPowerManagementDefaultLimit": lambda gpu: 700_000,
    "nvmlDeviceGetMigMode": lambda gpu: [0, 0],
}


def failing(error: int) -> Callable[..., Any]:
    def fail(*_: object) -> None:
        raise pynvml.NVMLError(error)

    return fail


NOT_SAID = failing(pynvml.NVML_ERROR_NOT_SUPPORTED)
# What a driver answers otherwise, and what is read then.
DRIVERS = {
    "all is said, in the units of the names": ({}, {}),
    "what is not said is unknown and not zero": (
        {"nvmlDeviceGetEnforcedPowerLimit": NOT_SAID, "nvmlDeviceGetMigMode": NOT_SAID},
        {"power_limit_w": None, "mig": None},
    ),
}


@pytest.mark.parametrize("name", DRIVERS)
def test_a_gpu_is_read_field_by_field(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    answers, expected = DRIVERS[name]
    for function, answer in {**ANSWERS, **answers}.items():
        monkeypatch.setattr(pynvml, function, answer)
    assert query_gpus() == [{**H100, **expected}]


def test_code_is_known_by_every_file_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(provenance, "_PACKAGE", tmp_path)
    hashes = set()
    for name, text in (("a.py", "x = 1"), ("a.py", "x = 2"), ("b.py", "")):
        (tmp_path / name).write_text(text)
        hashes.add(provenance.code_hash())
    assert len(hashes) == 3


def test_cpu_results_compare_as_they_did_and_gpu_results_by_their_transport_too() -> None:
    """As directories were compared before there was more provenance; these still have to be resumed."""
    on_cpu = {"device_name", "python", "torch", "megatron_core", "transformer_engine", "apex", "cuda"}
    described = provenance.describe(CPU)
    assert set(provenance.conditions(described)) == on_cpu
    on_gpus = provenance.conditions({**described, "device_type": "cuda"})
    assert set(on_gpus) == on_cpu | {"nccl", "triton", "deep_ep"}
    assert on_gpus["torch"] == torch.__version__


def test_variables_come_from_a_fixed_list_and_secrets_never() -> None:
    kept = ("NCCL_P2P_DISABLE", "TORCH_NCCL_BLOCKING_WAIT", "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "SLURM_JOB_ID")
    secret = ("HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "MY_NCCL_PASSWORD", "HOME", "CUDA_TOKEN", "SLURM_JWT")
    variables = {**dict.fromkeys(kept, "1"), **dict.fromkeys(secret, "secret")}
    assert provenance.relevant_variables(variables) == dict.fromkeys(kept, "1")
