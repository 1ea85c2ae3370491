"""Examine a machine before the night that a run may take: what is so, what that means for a run, and what to do.

Nothing here may hang or take the rest down with it, not even a driver that never answers or a torch that cannot be
imported. So this process imports neither torch nor Megatron-Core and asks no driver: what does runs in subprocesses
with a timeout (``facts``, ``exchange``, nvidia-smi). ``checks`` judges what they say.
"""

from __future__ import annotations

import json
import sys
import textwrap
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from moe_ep_bench.errors import UserError
from moe_ep_bench.machine.doctor import checks
from moe_ep_bench.machine.doctor.checks import NOTE, PROBLEM, Finding
from moe_ep_bench.machine.doctor.directory import directory_findings, earlier_findings
from moe_ep_bench.machine.doctor.exchange import exchange_findings
from moe_ep_bench.machine.nvidia_smi import query_gpus, query_nvlinks, query_topology, rdma_ports
from moe_ep_bench.machine.subprocesses import CommandError, Question, ask
from moe_ep_bench.runtime import exit_codes

_FACTS = "moe_ep_bench.machine.doctor.facts"
# The first look at a GPU may wait for its driver to wake up; importing Transformer Engine takes half a minute at worst.
_MACHINE_S, _IMPORTS_S, _PLAN_S, _AGREEMENT_S = 120.0, 180.0, 300.0, 60.0

_WIDTH, _INDENT = 120, " " * 20
_T = TypeVar("_T")


@dataclass(frozen=True)
class Request:
    """What is to be examined."""

    out: Path
    """Results directory."""
    config: Path | None = None
    overrides: Sequence[str] = ()
    nproc: int | None = None
    """Ranks on this node; None = as ``run`` would start."""
    nnodes: int = 1


@dataclass
class Examination:
    """The checks, and the facts that they left for ``--json``."""

    request: Request
    facts: dict[str, Any] = field(default_factory=dict)
    comparisons: list[dict[str, Any]] = field(default_factory=list)
    nproc: int = 1

    def findings(self) -> Iterator[Finding]:
        """All findings, as they come.

        Raises:
            ValueError: one line on what is wrong with the config; before any finding.
        """
        with Question(f"{_FACTS}:imports", timeout_s=_IMPORTS_S) as imports:
            try:
                machine = self.facts["machine"] = ask(f"{_FACTS}:machine", timeout_s=_MACHINE_S)
            except CommandError as error:
                remedy = "if it hangs: nvidia-smi and dmesg; if an import fails: launch/setup.sh"
                yield Finding("torch", PROBLEM, f"cannot be asked ({error})", "nothing else could be looked at", remedy)
                yield from directory_findings(self.request.out, [], 1)
                return
            self.nproc = self.request.nproc or machine["default_nproc"]
            planned = list(self._plan())
            yield from checks.cpu_findings(machine)
            yield from self._gpus(machine)
            try:
                broken = imports.answer()
            except CommandError as error:
                yield Finding("packages", PROBLEM, f"importing them failed ({error})", "a run imports them too")
                broken = {}
            yield from checks.package_findings(machine, broken)
        yield from checks.nccl_findings(machine)
        yield from exchange_findings(len(machine["gpus"]))
        yield from checks.ranks_findings(machine, self.nproc)
        yield from planned
        if self.comparisons:
            yield from checks.memory_findings(self.comparisons, checks.available_bytes(machine, self.nproc))
        yield from self._directory(machine)

    def _plan(self) -> Iterator[Finding]:
        request = self.request
        if request.config is None:
            return
        ranks = self.nproc * request.nnodes
        try:
            plan = ask(f"{_FACTS}:plan", str(request.config), list(request.overrides), ranks, timeout_s=_PLAN_S)
        except CommandError as error:
            yield Finding("config", PROBLEM, f"{request.config}: cannot be planned ({error})")
            return
        if "mistake" in plan:
            raise UserError(plan["mistake"])
        self.comparisons = self.facts["comparisons"] = plan["comparisons"]

    def _gpus(self, machine: dict[str, Any]) -> Iterator[Finding]:
        gpus, ports = _or_why(query_gpus), rdma_ports()
        self.facts["gpus"] = [asdict(gpu) for gpu in gpus] if isinstance(gpus, list) else []
        self.facts["rdma_ports"] = [asdict(port) for port in ports]
        yield from checks.gpu_findings(machine, gpus)
        if machine["gpus"]:
            topology = _or_why(query_topology)
            self.facts["topology"] = topology if isinstance(topology, str) else asdict(topology)
            yield from checks.topology_findings(topology, _or_why(query_nvlinks))
            yield from checks.shared_memory_findings(len(machine["gpus"]))
            yield from checks.nic_findings(ports)

    def _directory(self, machine: dict[str, Any]) -> Iterator[Finding]:
        out = self.request.out
        yield from directory_findings(out, self.comparisons, self.nproc * self.request.nnodes)
        if (out / "run.json").exists():
            try:
                refusal = ask(f"{_FACTS}:agreement", str(out), machine["conditions"], timeout_s=_AGREEMENT_S)
            except CommandError as error:
                refusal = f"run.json cannot be read ({error})"
            yield from earlier_findings(out, refusal, self.comparisons)


def _or_why(query: Callable[[], _T]) -> _T | str:
    try:
        return query()
    except CommandError as error:
        return str(error)


def text(finding: Finding) -> str:
    """Status and check, then in words what is so, what it means and what to do."""
    words = finding.what + (f": {finding.means}" if finding.means else "")
    words += f" -> {finding.remedy}" if finding.remedy else ""
    lines = textwrap.wrap(words, _WIDTH - len(_INDENT), break_long_words=False, break_on_hyphens=False)
    return f"{finding.status:8}{finding.check:12}" + f"\n{_INDENT}".join(lines)


def verdict(findings: Iterable[Finding]) -> str:
    """All findings in a line."""
    counts = Counter(finding.status for finding in findings)
    problems, notes = counts[PROBLEM], counts[NOTE]
    said = f"{problems or 'no'} problem{'' if problems == 1 else 's'}, {notes or 'no'} note{'' if notes == 1 else 's'}"
    return said + ("; a run would fail, or not be what it seems" if problems else "; runs can start")


def doctor(request: Request, *, as_json_text: bool = False) -> int:
    """Examine and print; 0 = runs can start, 1 = there is a problem.

    Raises:
        ValueError: one line on what is wrong with the command or the config.
    """
    for option, value in (("--nproc", request.nproc), ("--nnodes", request.nnodes)):
        if value is not None and value < 1:
            raise UserError(f"{option}: expected at least 1, got {value}")
    if request.overrides and request.config is None:
        raise UserError(f"--set {request.overrides[0]}: expected a CONFIG whose value it replaces, got none")
    examination, found = Examination(request), []
    for finding in examination.findings():
        found.append(finding)
        if not as_json_text:
            print(text(finding), flush=True)
    problems = any(finding.status == PROBLEM for finding in found)
    status = exit_codes.CASES_FAILED if problems else exit_codes.OK
    if as_json_text:
        listed = [asdict(finding) for finding in found]
        report = {"findings": listed, "status": status, "nproc": examination.nproc, **examination.facts}
        print(json.dumps(report, indent=2))
    else:
        print(f"\n{verdict(found)}")
    sys.stdout.flush()
    return status
