"""Model what ``advise`` is asked: plan the question's config, write it beside the results, emulate it.

For what a faster layer comes to in a whole model, the rest of a pass is modelled too: attention, dense layers, norms
and the output layer of the slowest rank (``cost_model.whole_model``), in batch 0.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from moe_ep_bench.bench.checks import check_model
from moe_ep_bench.bench.plan import Comparison, Plan
from moe_ep_bench.bench.question import Question
from moe_ep_bench.bench.run import emulate_plan, plan_virtual
from moe_ep_bench.cost_model.devices import VALUE_BYTES
from moe_ep_bench.cost_model.whole_model import PassWork, outside_moe_us
from moe_ep_bench.errors import UserError
from moe_ep_bench.files import atomic_path


def model_question(question: Question, *, force: bool = False) -> int:
    """Write the config and model its comparisons; return the exit status as ``emulate`` does.

    Raises:
        ValueError: the question cannot be modelled; one line, and nothing is written.
    """
    comparisons = _planned(question)
    with atomic_path(question.config) as temporary:
        temporary.write_text(question.text)
    return emulate_plan(comparisons, question.out, force=force, survey=False)


def outside_of(question: Question) -> dict[str, float]:
    """Of each comparison, microseconds of a pass that no MoE layer takes, over the number of MoE layers.

    Raises:
        ValueError: the model or the device does not state what a whole model needs; one line.
    """
    comparisons = _planned(question, try_out=False)
    return {one.comparison_id: _outside_us(one, question.context_length) for one in comparisons}


def _outside_us(comparison: Comparison, context_length: int) -> float:
    """Of the slowest rank: its prompts, or one step of its requests with ``context_length`` tokens each."""
    experiment, model, device = comparison.experiment, comparison.model, comparison.device
    assert device is not None
    check_model(model, experiment)
    found = []
    for lengths in comparison.subject.lengths_of_ranks(0):
        work = PassWork((), sum(lengths), context_length, {}) if context_length else PassWork(lengths, 0, 0, {})
        values = VALUE_BYTES[experiment.layer.dtype]
        found.append(outside_moe_us(device, model, work, bytes_per_value=values))
    return max(found) / model.num_moe_layers


def _planned(question: Question, *, try_out: bool = True) -> Plan:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, question.config.name)
        path.write_text(question.text)
        try:
            return plan_virtual(path, (), try_out=try_out)
        except ValueError as problem:
            raise UserError(str(problem).replace(f"{folder}/", "")) from None
