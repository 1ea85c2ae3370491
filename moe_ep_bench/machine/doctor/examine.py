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
from dataclasses import asdict, dataclass, field
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


@dataclass
class Examination:
    """What is examined, and the facts that it leaves for ``--json``.

    Attributes:
        out: results directory.
        nproc: ranks on this node; None = as ``run`` would start.
    """

    out: Path
    config: Path | None = None
    overrides: Sequence[str] = ()
    nproc: int | None = None
    nnodes: int = 1
    place: Place | None = None
    facts: dict[str, Any] = field(default_factory=dict)

    def findings(self) -> Iterator[Finding]:
        """All findings, as they come.

        Raises:
            UserError: one line on what is wrong with the config; before any finding.
        """
        with Question(f"{_FACTS}:imports", timeout_s=_IMPORTS_S) as imports:
            try:
                machine = self.facts["machine"] = ask(f"{_FACTS}:machine", timeout_s=_MACHINE_S)
            except CommandError as error:
                remedy = "if it hangs: nvidia-smi and dmesg; if an import fails: launch/setup.sh"
                yield Finding("torch", PROBLEM, f"cannot be asked ({error})", "nothing else could be looked at", remedy)
                yield from checks.directory_findings(self.out, [], 1)
                return
            if self.place is not None and self.place.local_rank > 0:  # The node's first process looks at the rest.
                yield from exchange_findings(len(machine["gpus"]), self.place)
                return
            nproc = self.nproc = self.nproc or machine["default_nproc"]
            planned = list(self._plan(nproc * self.nnodes))
            comparisons = self.facts.get("comparisons", [])
            yield from checks.cpu_findings(machine)
            yield from self._gpus(machine)
            broken = _or_why(imports.answer)
            if isinstance(broken, str):
                yield Finding("packages", PROBLEM, f"importing them failed ({broken})", "a run imports them too")
                broken = {}
            yield from checks.package_findings(machine, broken)
        yield from checks.nccl_findings(machine)
        yield from exchange_findings(len(machine["gpus"]), self.place)
        yield from checks.ranks_findings(machine, nproc)
        yield from planned
        if comparisons:
            yield from checks.memory_findings(comparisons, checks.available_bytes(machine, nproc))
        yield from checks.directory_findings(self.out, comparisons, nproc * self.nnodes)
        if (self.out / "run.json").exists():
            try:
                refusal = ask(f"{_FACTS}:agreement", str(self.out), machine["conditions"], timeout_s=_AGREEMENT_S)
            except CommandError as error:
                refusal = f"run.json cannot be read ({error})"
            yield from checks.earlier_findings(self.out, refusal, comparisons)

    def _plan(self, num_ranks: int) -> Iterator[Finding]:
        if self.config is None:
            return
        try:
            plan = ask(f"{_FACTS}:plan", str(self.config), list(self.overrides), num_ranks, timeout_s=_PLAN_S)
        except CommandError as error:
            yield Finding("config", PROBLEM, f"{self.config}: cannot be planned ({error})")
            return
        if "mistake" in plan:
            raise UserError(plan["mistake"])
        self.facts["comparisons"] = plan["comparisons"]

    def _gpus(self, machine: dict[str, Any]) -> Iterator[Finding]:
        gpus, ports = _or_why(query_gpus), rdma_ports()
        self.facts |= {"gpus": gpus if isinstance(gpus, list) else [], "rdma_ports": ports}
        yield from checks.gpu_findings(machine, gpus)
        if machine["gpus"]:
            topology = self.facts["topology"] = _or_why(query_topology)
            yield from checks.topology_findings(topology, self.facts["gpus"])
            yield from checks.shared_memory_findings(len(machine["gpus"]))
            yield from checks.nic_findings(ports)


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


def verdict(findings: Sequence[Finding]) -> str:
    """All findings in a line."""
    counts = Counter(finding.status for finding in findings)
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
    examination, found = Examination(out, config, overrides, nproc, nnodes, place), []
    is_first = place is None or place.rank == 0
    host = f"{platform.node()}: " if place is not None else ""
    for finding in examination.findings():
        found.append(finding)
        if not as_json and (is_first or finding.status != OK):
            print("\n".join(host + line for line in text(finding).splitlines()), flush=True)
    problems = any(finding.status == PROBLEM for finding in found)
    status = exit_codes.CASES_FAILED if problems else exit_codes.OK
    if as_json:
        listed = [asdict(finding) for finding in found]
        print(
            json.dumps(
                {"findings": listed, "status": status, "nproc": examination.nproc, **examination.facts}, indent=2
            )
        )
    elif is_first:
        print(f"\n{verdict(found)}")
    sys.stdout.flush()
    return status
