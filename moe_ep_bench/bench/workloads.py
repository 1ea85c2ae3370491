"""Open the workloads of an experiment: one for a layer that stands alone, or one for every MoE layer of a model.

A batch of the workload is a batch of the model. Its sequences are the prompts of a prefill; with
``whole.context_length`` it is the next token of each request. Every MoE layer of a model has scores of its own: of a
recording that layer's, of a synthetic workload the same targets solved for with another seed. So each layer has its own
skew, and its own busiest rank.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from moe_ep_bench.bench import checks
from moe_ep_bench.config import Experiment, SyntheticConfig
from moe_ep_bench.errors import naming
from moe_ep_bench.workload import RecordedWorkload, SyntheticWorkload, Workload
from moe_ep_bench.workload.patterns import PatternWorkload
from moe_ep_bench.workload.skews import PATTERNS


def open_workloads(experiment: Experiment, world_size: int) -> dict[int | None, Workload]:
    """The workload of every MoE layer that is built, by layer; None is the key of a layer that stands alone.

    Layers differ in seed, and under some seeds of a skew independent tokens share more experts than its target: of many
    layers one would often be such, and stand in the way of the model.

    Raises:
        ValueError: one cannot be had; names the key.
    """
    if experiment.scope == "layer":
        return {None: _open(experiment, world_size)}
    model, config = experiment.model.spec(), experiment.workload
    num_moe = (experiment.whole.num_layers or model.num_layers) - model.first_dense_layers
    workloads: dict[int | None, Workload] = {}
    for number in range(num_moe):
        changed: dict[str, Any] = {"layer": number}
        if isinstance(config, SyntheticConfig):
            changed = {"seed": int(np.random.SeedSequence((config.seed, number)).generate_state(1)[0])}
        of_layer = experiment.model_copy(update={"workload": config.model_copy(update=changed)})
        workload = _open(of_layer, world_size, or_chance=True)
        if isinstance(workload, RecordedWorkload):
            checks.refuse(checks.whole_recording(model, num_moe, workload.traces[0].num_layers))
        workloads[model.first_dense_layers + number] = workload
    return workloads


def _open(experiment: Experiment, world_size: int, *, or_chance: bool = False) -> Workload:
    """``or_chance``: see ``SyntheticWorkload``."""
    config, model = experiment.workload, experiment.model.spec()
    sizes: dict[str, Any] = {"num_experts": model.num_experts, "top_k": model.top_k}
    sizes |= {"num_tokens": config.total_tokens(world_size), "num_batches": config.num_batches, "seed": config.seed}
    groups = {"num_groups": model.num_groups, "top_groups": model.top_groups}
    with naming("workload"):
        if not isinstance(config, SyntheticConfig):
            keys = ("layer", "tail", "topk_share", "arrangement", "tokens_per_request")
            recordings = [(recording.trace, recording.share) for recording in config.trace]
            return RecordedWorkload(recordings, **sizes, **{key: getattr(config, key) for key in keys})
        length = config.sequence_length
        if config.skew in PATTERNS:
            return PatternWorkload(pattern=config.skew, sequence_length=length, **sizes, **groups)
        targets = config.targets(experiment.model.preset, experiment.layer.ep_size or world_size)
        load = targets.pop("rank_load")
        rank_load = (load["ep_size"], load["load"]) if load else None
        how = {"sequence_length": length, "or_chance": or_chance, "rank_load": rank_load}
        return SyntheticWorkload(**sizes, **targets, **how, **groups)
