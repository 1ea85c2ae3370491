"""What a config's layer or model takes on its ranks, and whether it fits the memory of a device (``models.memory``)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moe_ep_bench.config import Experiment, SyntheticConfig
from moe_ep_bench.cost_model.devices import PRECISIONS
from moe_ep_bench.models.memory import Fit, Need, footprint
from moe_ep_bench.policies.lazy import torch

if TYPE_CHECKING:
    from moe_ep_bench.bench.plan import Comparison


def fit_of(comparison: Comparison) -> Fit | None:
    """Whether the model, served on as many ranks, fits what stands for each; None on real ranks and CPUs."""
    experiment, ep_size, device = comparison.experiment, comparison.ep_size, comparison.device
    if device is not None:
        return fit_on(experiment, ep_size, device.name, device.memory_gb * 1e9)
    if comparison.backend != "virtual" or not comparison.on_gpu:
        return None
    gpu = torch.cuda.get_device_properties(torch.cuda.current_device())
    return fit_on(experiment, ep_size, gpu.name, gpu.total_memory)


def fit_on(experiment: Experiment, ep_size: int, device: str, device_bytes: float) -> Fit:
    """What each rank of the whole model, served, holds, and the fewest ranks that hold it: the same batch on more."""
    model = experiment.model.spec()

    def on(size: int) -> Fit:
        facts = {"device": device, "device_bytes": device_bytes, "dtype": experiment.layer.dtype, "ep_size": size}
        return Fit(**facts, **_footprint(experiment, size, size), is_whole=model.other_parameters() is not None)

    larger = (size for size in range(ep_size, model.num_experts + 1) if model.num_experts % size == 0)
    fitting = next((size for size in larger if on(size).holds()), None)
    return on(ep_size).model_copy(update={"fitting_ep_size": fitting})


def need_of(comparison: Comparison) -> Need:
    """What a rank holds, roughly, of the layer or the layers that are built here."""
    experiment = comparison.experiment
    built = 0 if experiment.scope == "layer" else experiment.whole.num_layers
    sizes = _footprint(experiment, comparison.world_size, comparison.ep_size, built)
    return Need(sizes["expert_bytes"] + sizes["other_weight_bytes"], sizes["cache_bytes"] + sizes["row_bytes"])


def _footprint(experiment: Experiment, world_size: int, ep_size: int, num_layers: int | None = None) -> dict[str, int]:
    """``footprint`` of a config on so many ranks.

    A batch's tokens are in the cache; at decode so are ``whole.context_length`` tokens of each request before them.
    """
    workload, precision = experiment.workload, PRECISIONS[experiment.layer.dtype]
    is_step = isinstance(workload, SyntheticConfig) or workload.arrangement == "decode"
    of_request = workload.sequence_length if isinstance(workload, SyntheticConfig) else workload.tokens_per_request
    tokens = -(-workload.total_tokens(world_size) // world_size)
    context = -(-tokens // of_request) * experiment.whole.context_length if is_step else 0
    return footprint(
        experiment.model.spec(),
        ep_size,
        num_tokens=tokens,
        cached_tokens=tokens + context,
        value_bytes=precision.hidden_bytes,
        expert_value_bytes=precision.weight_bytes,
        peak_load=getattr(workload, "peak_load", None),
        num_layers=num_layers,
    )
