"""What a case of a whole model leaves on disk, measured on real ranks or on virtual ones.

Shapes: R = ranks, S = steps, C = columns of a sample.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from moe_ep_bench.layer.depth import phases_in_depth
from moe_ep_bench.measure.protocol import HOST, THREAD_CPU, Step
from moe_ep_bench.records import TOTAL, UNACCOUNTED
from moe_ep_bench.scopes.comparison import CaseSpec
from moe_ep_bench.scopes.job import Job
from moe_ep_bench.scopes.model_comparison import ModelComparison
from moe_ep_bench.scopes.rows import layer_columns, summed_over_layers


def model_columns(comparison: ModelComparison) -> list[str]:
    """Columns of a sample: the phases of every layer, and what concerns the whole pass."""
    return [*phases_in_depth(comparison.num_layers, comparison.moe_layers), UNACCOUNTED, TOTAL, HOST, THREAD_CPU]


def write_model_case(
    job: Job,
    comparison: ModelComparison,
    case: CaseSpec,
    steps: Sequence[Step],
    times_RSC: Sequence[np.ndarray],
    columns: Sequence[str],
    routing: dict[str, list[Any]],
) -> None:
    """Write a case's routing, the phases of its layers, and its samples, which make it finished: last.

    Args:
        routing: rows of ``routing_columns``, in which a batch has a row for every MoE layer.
    """
    directory, identify, moe_layers = job.directory, partial(job.identity, comparison, case), comparison.moe_layers
    layer_of_row = [moe_layers[row % len(moe_layers)] for row in routing["batch"]]
    routing = {**routing, "layer": layer_of_row, "batch": [row // len(moe_layers) for row in routing["batch"]]}
    samples = summed_over_layers(steps, times_RSC, columns)
    layers = layer_columns(steps, times_RSC, columns)
    if not directory.is_routed(case.case_id):
        directory.write_model_routing(case.case_id, {**identify(len(routing["rank"])), **routing})
    if layers:
        directory.write_layers(case.case_id, job.launch, {**identify(len(layers["rank"])), **layers})
    directory.write_case(case.case_id, job.launch, {**identify(len(samples["rank"])), **samples})
