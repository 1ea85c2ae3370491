"""Whole models on virtual ranks give what real ranks give, and are cut where these would meet."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.seam

SCRIPT = Path(__file__).with_name("virtual_transformer_laws.py")


@pytest.fixture(scope="module")
def output() -> str:
    done = subprocess.run([sys.executable, SCRIPT], capture_output=True, text=True, timeout=600, check=False)
    return done.stdout + done.stderr[-4000:]


@pytest.mark.parametrize(
    "law",
    [
        "ranks_that_exchange_rows_give_the_logits_of_one_rank",
        "a_pass_is_cut_at_the_meetings_of_all_layers_in_order",
        "topk_sends_what_native_sends_and_a_layers_policy_changes_that_layer_alone",
        "counts_of_another_layer_are_noticed",
    ],
)
def test_law(law: str, output: str) -> None:
    assert f"{law}: ok" in output, output
