"""Whether a config's model, served on its EP ranks, fits the memory of its device (``models.memory``)."""

from __future__ import annotations

from typing import Any

from moe_ep_bench.config import Experiment, SyntheticConfig
from moe_ep_bench.cost_model.devices import PRECISIONS
from moe_ep_bench.models.memory import Fit, footprint


def fit_on(experiment: Experiment, ep_size: int, device: str, device_bytes: float) -> Fit:
    """What each rank holds, and the fewest ranks that hold it: the same batch on more of them.

    A batch's tokens are in the cache; at decode so are ``whole.context_length`` tokens of each request before them.
    """
    model, workload = experiment.model.spec(), experiment.workload
    precision = PRECISIONS[experiment.layer.dtype]
    value_bytes = {"expert_value_bytes": precision.weight_bytes, "value_bytes": precision.hidden_bytes}
    is_step = isinstance(workload, SyntheticConfig) or workload.arrangement == "decode"
    of_request = workload.sequence_length if isinstance(workload, SyntheticConfig) else workload.tokens_per_request

    def on(size: int) -> Fit:
        tokens = -(-workload.total_tokens(size) // size)
        context = -(-tokens // of_request) * experiment.whole.context_length if is_step else 0
        peak_load = getattr(workload, "peak_load", None)
        how: dict[str, Any] = {"num_tokens": tokens, "cached_tokens": tokens + context, "peak_load": peak_load}
        parts = footprint(model, size, **value_bytes, **how)
        facts = {"device": device, "device_bytes": device_bytes, "dtype": experiment.layer.dtype, "ep_size": size}
        return Fit(**facts, **parts, is_whole=model.other_parameters() is not None)

    larger = (size for size in range(ep_size, model.num_experts + 1) if model.num_experts % size == 0)
    fitting = next((size for size in larger if on(size).holds()), None)
    return on(ep_size).model_copy(update={"fitting_ep_size": fitting})
