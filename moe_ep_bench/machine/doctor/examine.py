"""Examine a machine before the night that a run may take: what is so, what that means for a run, and what to do.

Nothing here may hang or take the rest down with it, not even a driver that never answers or a torch that cannot be
imported. So this process imports neither torch nor Megatron-Core and asks no driver: what does runs in subprocesses
with a timeout (``facts``, ``exchange``, ``gpus``). ``checks`` judges what they say.

Started by torchrun or srun, every process takes part in one all-to-all between all of them, and the first one of each
node examines that node.
"""

from __future__ import annotations

import json
import platform
import sys
import textwrap
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

from moe_ep_bench.errors import UserError
from moe_ep_bench.machine.doctor import checks
from moe_ep_bench.machine.doctor.checks import NOTE, OK, PROBLEM, Finding
from moe_ep_bench.machine.doctor.exchange import Place, exchange_findings, place_of
from moe_ep_bench.machine.gpus import query_gpus, query_topology, rdma_ports
from moe_ep_bench.machine.subprocesses import CommandError, Question, ask
from moe_ep_bench.runtime import exit_codes

_FACTS = "moe_ep_bench.machine.doctor.facts"
# The first look at a GPU may wait for its driver to wake up; importing Transformer Engine takes half a minute at worst.
_MACHINE_S, _IMPORTS_S, _PLAN_S, _AGREEMENT_S = 120.0, 180.0, 300.0, 60.0

_WIDTH, _INDENT = 120, " " * 20
_T = TypeVar("_T")


def findings(
    facts: dict[str, Any],
    out: Path,
    config: Path | None,
    overrides: Sequence[str],
    nproc: int | None,
    nnodes: int,
    place: Place | None,
) -> Iterator[Finding]:
    """All findings, as they come; ``facts`` receives what ``--json`` prints of the machine.

    Args:
        out: results directory.
        nproc: ranks on this node; None = as ``run`` would start.

    Raises:
        UserError: one line on what is wrong with the config; before any finding.
    """
    with Question(f"{_FACTS}:imports", timeout_s=_IMPORTS_S) as imports:
        try:
            machine = facts["machine"] = ask(f"{_FACTS}:machine", timeout_s=_MACHINE_S)
        except CommandError as error:
            remedy = "if it hangs: nvidia-smi and dmesg; if an import fails: launch/setup.sh"
            yield Finding("torch", PROBLEM, f"cannot be asked ({error})", "nothing else could be looked at", remedy)
            yield from checks.directory_findings(out, [], 1)
            return
        num_gpus = len(machine["gpus"])
        if place is not None and place.local_rank > 0:  # The node's first process looks at the rest.
            yield from exchange_findings(num_gpus, place)
            return
        nproc = facts["nproc"] = nproc or machine["default_nproc"]
        comparisons, not_planned = _plan(config, overrides, nproc * nnodes)
        if comparisons:
            facts["comparisons"] = comparisons
        yield from checks.cpu_findings(machine)
        gpus, ports = _or_why(query_gpus), rdma_ports()
        facts |= {"gpus": gpus if isinstance(gpus, list) else [], "rdma_ports": ports}
        yield from checks.gpu_findings(machine, gpus)
        if num_gpus:
            topology = facts["topology"] = _or_why(query_topology)
            yield from checks.topology_findings(topology, facts["gpus"])
            yield from checks.shared_memory_findings(num_gpus)
            yield from checks.nic_findings(ports)
        broken = _or_why(imports.answer)
        if isinstance(broken, str):
            yield Finding("packages", PROBLEM, f"importing them failed ({broken})", "a run imports them too")
            broken = {}
        yield from checks.package_findings(machine, broken)
    yield from checks.nccl_findings(machine)
    yield from exchange_findings(num_gpus, place)
    yield from checks.ranks_findings(machine, nproc)
    yield from not_planned
    if comparisons:
        yield from checks.memory_findings(comparisons, checks.available_bytes(machine, nproc))
    yield from checks.directory_findings(out, comparisons, nproc * nnodes)
    if (out / "run.json").exists():
        try:
            refusal = ask(f"{_FACTS}:agreement", str(out), machine["conditions"], timeout_s=_AGREEMENT_S)
        except CommandError as error:
            refusal = f"run.json cannot be read ({error})"
        yield from checks.earlier_findings(out, refusal, comparisons)


def _plan(config: Path | None, overrides: Sequence[str], num_ranks: int) -> tuple[list[dict[str, Any]], list[Finding]]:
    """The comparisons of a config, and why there are none."""
    if config is None:
        return [], []
    try:
        plan = ask(f"{_FACTS}:plan", str(config), list(overrides), num_ranks, timeout_s=_PLAN_S)
    except CommandError as error:
        return [], [Finding("config", PROBLEM, f"{config}: cannot be planned ({error})")]
    if "mistake" in plan:
        raise UserError(plan["mistake"])
    return plan["comparisons"], []


def _or_why(query: Callable[[], _T]) -> _T | str:
    try:
        return query()
    except CommandError as error:
        return str(error)


def text(finding: Finding) -> str:
    """Status and check, then what is so, what it means and what to do."""
    words = finding.what + (f": {finding.means}" if finding.means else "")
    words += f" -> {finding.remedy}" if finding.remedy else ""
    lines = textwrap.wrap(words, _WIDTH - len(_INDENT), break_long_words=False, break_on_hyphens=False)
    return f"{finding.status:8}{finding.check:12}" + f"\n{_INDENT}".join(lines)


def verdict(found: Sequence[Finding]) -> str:
    """All findings in a line."""
    counts = Counter(finding.status for finding in found)
    problems, notes = counts[PROBLEM], counts[NOTE]
    said = f"{problems or 'no'} problem{'' if problems == 1 else 's'}, {notes or 'no'} note{'' if notes == 1 else 's'}"
    return said + ("; a run would fail, or not be what it seems" if problems else "; runs can start")


def doctor(
    out: Path, config: Path | None, overrides: Sequence[str], nproc: int | None, nnodes: int, *, as_json: bool = False
) -> int:
    """Examine and print; 0 = runs can start, 1 = there is a problem.

    Of several processes the first prints all findings, the others only their notes and problems, each with its host.

    Raises:
        UserError: one line on what is wrong with the command or the config.
    """
    for option, value in (("--nproc", nproc), ("--nnodes", nnodes)):
        if value is not None and value < 1:
            raise UserError(f"{option}: expected at least 1, got {value}")
    if overrides and config is None:
        raise UserError(f"--set {overrides[0]}: expected a CONFIG whose value it replaces, got none")
    try:
        place = place_of()
    except CommandError as error:
        raise UserError(f"SLURM_STEP_NODELIST: expected hosts that scontrol knows ({error})") from None
    facts: dict[str, Any] = {}
    found: list[Finding] = []
    is_first = place is None or place.rank == 0
    host = f"{platform.node()}: " if place is not None else ""
    for finding in findings(facts, out, config, overrides, nproc, nnodes, place):
        found.append(finding)
        if not as_json and (is_first or finding.status != OK):
            print("\n".join(host + line for line in text(finding).splitlines()), flush=True)
    problems = any(finding.status == PROBLEM for finding in found)
    status = exit_codes.CASES_FAILED if problems else exit_codes.OK
    if as_json:
        listed = [asdict(finding) for finding in found]
        print(json.dumps({"findings": listed, "status": status, "nproc": nproc, **facts}, indent=2))
    elif is_first:
        print(f"\n{verdict(found)}")
    sys.stdout.flush()
    return status
