"""What a modelled layer comes to in a pass of its whole model: attention, dense layers, norms and the output layer.

They are modelled as in whole models (``cost_model.whole_model``), of the slowest rank, in batch 0: its prompts, or one
step of its requests with ``whole.context_length`` tokens each in the cache.
"""

from __future__ import annotations

from typing import Any

from moe_ep_bench.bench.checks import check_model
from moe_ep_bench.bench.plan import Comparison
from moe_ep_bench.bench.words import modelled_attention
from moe_ep_bench.cost_model.devices import VALUE_BYTES
from moe_ep_bench.cost_model.whole_model import PassWork, outside_moe_us


def rest_of(comparison: Comparison) -> dict[str, Any]:
    """Microseconds of a pass that no MoE layer takes, over the number of MoE layers; as ``run.json`` has it.

    Raises:
        ValueError: the model or the device does not state what a whole model needs; one line.
    """
    experiment, model, device = comparison.experiment, comparison.model, comparison.device
    assert device is not None
    check_model(model, experiment)
    found, context_length = [], experiment.whole.context_length
    for lengths in comparison.subject.lengths_of_ranks(0):
        work = PassWork((), sum(lengths), context_length, {}) if context_length else PassWork(lengths, 0, 0, {})
        found.append(outside_moe_us(device, model, work, bytes_per_value=VALUE_BYTES[experiment.layer.dtype]))
    return {
        "us_per_moe_layer": max(found) / model.num_moe_layers,
        "num_moe_layers": model.num_moe_layers,
        "context_length": context_length,
        "attention": modelled_attention(model, context_length),
    }
