"""The seam to Megatron-Core: laws of a real expert-parallel layer on two gloo ranks, some on one and four too."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import cache
from pathlib import Path

import flex_laws  # noqa: F401, adds its laws to the others
import graph_laws  # noqa: F401, adds its laws to the others
import padded_laws  # noqa: F401, adds its laws to the others
import pytest
import slice_laws  # noqa: F401, adds its laws to the others
from layer_laws import LAWS, NEEDS_RANKS

pytestmark = pytest.mark.seam

ON_ONE = (
    "every_policy_equals_the_dense_reference",
    "phases_are_exclusive_and_close_against_the_total",
    "policies_wait_for_the_host_where_native_does",
    "drop_and_pad_at_full_capacity_computes_what_native_does",
    "drop_and_pad_drops_by_megatrons_rule_and_exchanges_no_counts",
    "drop_and_pad_waits_before_the_transfers_alone",
    "megatron_drop_is_routed_by_megatrons_own_operations_which_wait_for_nothing",
    "shared_experts_beside_transfers_change_nothing_but_the_order",
    *(name for name, counts in NEEDS_RANKS.items() if counts == (1,)),
)
ON_FOUR = (
    "every_policy_equals_the_dense_reference",
    "batch_wide_policies_decide_as_if_all_tokens_were_on_one_rank",
    "experts_in_slices_equal_the_dense_reference",
    "a_slow_rank_shows_as_waiting_where_slices_meet",
    *(name for name, counts in NEEDS_RANKS.items() if counts == (4,)),
)
BY_RANKS = {1: ON_ONE, 2: tuple(name for name in LAWS if 2 in NEEDS_RANKS.get(name, (2,))), 4: ON_FOUR}


@cache
def results(folder: Path, num_ranks: int) -> dict[str, str | None]:
    """{law: error or null} of one job."""
    report = folder / f"{num_ranks}.json"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}"]
    command += [str(Path(__file__).with_name("run_laws.py")), str(report), *BY_RANKS[num_ranks]]
    job = subprocess.run(command, capture_output=True, text=True, timeout=1800)
    found = json.loads(report.read_text()) if report.exists() else {}
    return {**found, "output": job.stdout[-2000:] + job.stderr[-4000:]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("laws")


@pytest.mark.parametrize(("num_ranks", "law"), [(ranks, law) for ranks, laws in BY_RANKS.items() for law in laws])
def test_law(law: str, num_ranks: int, folder: Path) -> None:
    found = results(folder, num_ranks)
    assert law in found, f"the law did not finish:\n{found['output']}"
    assert found[law] is None, found[law]
