"""Whether experts can be cut into slices (``layer.expert_tensor_parallel``) as a config asks, and by which command."""

from __future__ import annotations

from moe_ep_bench.config import Experiment
from moe_ep_bench.devices import VALUE_BYTES

# Of a row, in bytes: what grouped_mm wants.
_GEMM_ALIGNMENT = 16


def check_whole_experts(experiment: Experiment, command: str) -> None:
    """Raise ValueError where a config cuts its experts for a command that knows whole ones alone."""
    num_slices = experiment.layer.expert_tensor_parallel
    if num_slices > 1:
        raise ValueError(f"layer.expert_tensor_parallel: expected 1, for {command} whole experts; got {num_slices}")


def check_slices(experiment: Experiment, world_size: int) -> None:
    """Raise ValueError where experts cannot be cut as the config has it, among this many ranks."""
    num_slices, model = experiment.layer.expert_tensor_parallel, experiment.model.spec()
    key = f"layer.expert_tensor_parallel: expected {{}}, got {num_slices}"
    if num_slices == 1:
        return
    if model.tensor_parallel > 1:
        raise ValueError(key.format(f"1 with model.tensor_parallel: {model.tensor_parallel}"))
    if world_size % num_slices:
        raise ValueError(key.format(f"a divisor of the {world_size} ranks"))
    if model.ffn_hidden_size % num_slices:
        raise ValueError(key.format(f"a divisor of the ffn_hidden_size {model.ffn_hidden_size} of {model.name}"))
    values = model.ffn_hidden_size // num_slices
    if experiment.layer.experts != "sequential" and values * VALUE_BYTES[experiment.layer.dtype] % _GEMM_ALIGNMENT:
        raise ValueError(
            key.format(f"slices of a multiple of {_GEMM_ALIGNMENT} bytes (or layer.experts: sequential)")
            + f", which are {values} values of {experiment.layer.dtype}"
        )
