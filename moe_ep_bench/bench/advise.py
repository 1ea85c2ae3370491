"""Model what ``advise`` is asked: plan the question's config, write it beside the results, emulate it."""

from __future__ import annotations

import tempfile
from pathlib import Path

from moe_ep_bench.bench.emulate import emulate_plan, plan_virtual
from moe_ep_bench.bench.question import Question
from moe_ep_bench.errors import UserError
from moe_ep_bench.files import atomic_path


def model_question(question: Question, *, force: bool = False) -> int:
    """Write the config and model its comparisons; return the exit status as ``emulate`` does.

    Raises:
        ValueError: the question cannot be modelled; one line, and nothing is written.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, question.config.name)
        path.write_text(question.text)
        try:
            comparisons = plan_virtual(path, ())
        except ValueError as problem:
            raise UserError(str(problem).replace(f"{folder}/", "")) from None
    with atomic_path(question.config) as temporary:
        temporary.write_text(question.text)
    return emulate_plan(comparisons, question.out, force=force, survey=False)
