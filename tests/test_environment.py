"""Claims about provenance: what is written down, what never is, and what older results still compare as."""

from __future__ import annotations

import json
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from test_gpus import H100

from moe_ep_bench.machine import provenance
from moe_ep_bench.machine.subprocesses import CommandError

CPU = torch.device("cpu")
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
    monkeypatch.setattr(provenance, "output_of", lambda command, timeout_s: "GPU0 GPU1\n X NV18\n")
    described = json.loads(json.dumps(provenance.describe_gpus()))
    assert (described["driver"], described["gpus"], described["gpus_why"]) == ("570.86.15", [H100], None)
    assert described["topology"] == ["GPU0 GPU1", " X NV18"]
    monkeypatch.setattr(provenance, "query_gpus", Mock(side_effect=CommandError("no answer within 20 s")))
    described = provenance.describe_gpus()
    assert described == {"gpus": None, "driver": None, "topology": None, "gpus_why": "no answer within 20 s"}


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
