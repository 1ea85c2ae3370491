"""What torch and the packages say of this machine; called in subprocesses (``subprocesses.ask``)."""

from __future__ import annotations

import importlib
import importlib.util
import os
import platform
from pathlib import Path
from typing import Any

# Of ``provenance.package_versions``, what to import to know that it works.
MODULES = {
    "megatron_core": "megatron.core",
    "transformer_engine": "transformer_engine.pytorch",
    "apex": "apex",
    "deep_ep": "deep_ep",
    "triton": "triton",
}


def machine() -> dict[str, Any]:
    """This machine as a run will see it."""
    import torch

    from moe_ep_bench.kernels import toolchain
    from moe_ep_bench.machine import provenance
    from moe_ep_bench.runtime import launcher
    from moe_ep_bench.runtime.device import why_torch_has_none
    from moe_ep_bench.runtime.errors import in_short

    gpus, why = [], ""
    try:
        for index in range(torch.cuda.device_count()):
            properties = torch.cuda.get_device_properties(index)
            free, total = torch.cuda.mem_get_info(index)
            uuid = f"GPU-{properties.uuid}"
            gpus.append({"name": properties.name, "uuid": uuid, "free_bytes": free, "memory_bytes": total})
    except Exception as error:  # of whatever kind: it is the answer
        gpus, why = [], in_short(error)
    return {
        "hostname": platform.node(),
        "cpu": provenance.cpu_name(),
        "num_cores": len(os.sched_getaffinity(0)),
        "load_average": os.getloadavg()[0],
        "host_free_bytes": provenance.available_memory_bytes(torch.device("cpu"), 1),
        "gpus": gpus,
        "no_gpus_why": why or ("" if gpus else why_torch_has_none()),
        "compiler": toolchain.lacking(),
        "default_nproc": launcher.default_nproc(),
        "packages": provenance.package_versions(),
        "foreign_apex": importlib.util.find_spec("apex") is not None and provenance.nvidia_apex_version() is None,
        "variables": provenance.relevant_variables(),
        "conditions": provenance.conditions(torch.device("cuda" if gpus else "cpu")),
    }


def imports() -> dict[str, str]:
    """Of the packages that are there, why they cannot be imported; those that can be have no entry."""
    broken = {}
    for package, module in MODULES.items():
        try:
            if importlib.util.find_spec(module.partition(".")[0]) is not None:
                importlib.import_module(module)
        except Exception as error:
            broken[package] = " ".join(f"{type(error).__name__}: {error}".split())[:200]
    return broken


def plan(config: str, overrides: list[str], world_size: int) -> dict[str, Any]:
    """What a config would run on so many ranks; or the user's mistake in it."""
    import torch

    from moe_ep_bench.bench import plan as bench

    try:
        planned = bench.plan(Path(config), overrides, bench.RANKS, world_size, on_cpu=not torch.cuda.is_available())
    except ValueError as mistake:
        return {"mistake": str(mistake)}
    comparisons = [
        {
            "title": one.title,
            "comparison_id": one.comparison_id,
            "memory_bytes": one.memory_bytes_per_rank(),
            "iterations": one.num_iterations() * one.experiment.measure.launches,
            "cases": [case.case_id for case in one.cases],
        }
        for one in planned
    ]
    return {"comparisons": comparisons}


def agreement(out: str, conditions: dict[str, Any]) -> str:
    """Why ``run`` would not add to the results of a directory; empty if it would."""
    from moe_ep_bench.bench.directory import check_agreement
    from moe_ep_bench.results import RunDirectory

    try:
        check_agreement(RunDirectory(Path(out)), "run", conditions, force=False)
    except ValueError as refusal:
        return str(refusal)
    return ""
