"""Model what ``advise`` is asked: plan the question's config, write it beside the results, emulate it."""

from __future__ import annotations

from pathlib import Path

import torch

from moe_ep_bench.bench.comparison import VIRTUAL, Comparison
from moe_ep_bench.bench.description import rest_of
from moe_ep_bench.bench.plan import plan_experiments
from moe_ep_bench.bench.question import Question
from moe_ep_bench.bench.run import emulate_plan
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


def check_rest(question: Question) -> None:
    """Find out whether what a layer comes to in a whole model can be modelled.

    Raises:
        ValueError: the model or the device does not state what a whole model needs; one line.
    """
    for comparison in _planned(question, try_out=False):
        rest_of(comparison)


def _planned(question: Question, *, try_out: bool = True) -> list[Comparison]:
    config, on_cpu = Path(question.config.name), not torch.cuda.is_available()
    return plan_experiments(config, question.experiments, VIRTUAL, on_cpu=on_cpu, try_out=try_out)
