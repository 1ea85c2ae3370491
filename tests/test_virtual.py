"""Virtual ranks on one process give what real ranks give, for a layer and for a whole model."""

from __future__ import annotations

import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

pytestmark = pytest.mark.seam

LAWS = {
    "virtual_laws.py": (
        "every_policy_equals_the_dense_reference",
        "every_part_equals_the_dense_reference",
        "experts_in_slots_equal_the_dense_reference",
        "chunks_and_slots_compute_what_was_worked_out",
        "a_rank_without_tokens_takes_part",
        "timed_runs_see_the_rows_that_real_ranks_would",
        "counts_other_than_announced_are_noticed",
    ),
    "virtual_transformer_laws.py": (
        "ranks_that_exchange_rows_give_the_logits_of_one_rank",
        "a_pass_is_cut_at_the_meetings_of_all_layers_in_order",
        "topk_sends_what_native_sends_and_a_layers_policy_changes_that_layer_alone",
        "counts_of_another_layer_are_noticed",
    ),
}


@cache
def output(script: str) -> str:
    command = [sys.executable, Path(__file__).with_name(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    return done.stdout + done.stderr[-4000:]


@pytest.mark.parametrize(("script", "law"), [(script, law) for script, laws in LAWS.items() for law in laws])
def test_law(script: str, law: str) -> None:
    assert f"{law}: ok" in output(script), output(script)
