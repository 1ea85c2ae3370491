"""What a check found, and how it is shown."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Literal

OK, NOTE, PROBLEM = "ok", "note", "problem"

_WIDTH = 120
_INDENT = " " * 20


@dataclass(frozen=True)
class Finding:
    """One line of the report."""

    check: str
    status: Literal["ok", "note", "problem"]
    """``problem``: a run would fail, or not be what it seems to be. ``note``: it goes, with less."""
    what: str
    means: str = ""
    """For a run; empty where that is plain."""
    remedy: str = ""


def text(finding: Finding) -> str:
    """Status and check, then in words what is so, what it means and what to do."""
    words = finding.what + (f": {finding.means}" if finding.means else "")
    words += f" -> {finding.remedy}" if finding.remedy else ""
    lines = textwrap.wrap(words, _WIDTH - len(_INDENT), break_long_words=False, break_on_hyphens=False)
    return f"{finding.status:8}{finding.check:12}" + f"\n{_INDENT}".join(lines)


def verdict(findings: Iterable[Finding]) -> str:
    """All findings in a line."""
    counts = dict.fromkeys((PROBLEM, NOTE, OK), 0)
    for finding in findings:
        counts[finding.status] += 1
    problems, notes = counts[PROBLEM], counts[NOTE]
    said = f"{problems or 'no'} problem{'' if problems == 1 else 's'}, {notes or 'no'} note{'' if notes == 1 else 's'}"
    return said + ("; a run would fail, or not be what it seems" if problems else "; runs can start")


def as_json(findings: Iterable[Finding], facts: dict[str, object]) -> str:
    """The same for scripts, with the facts that the findings rest on."""
    listed = [asdict(finding) for finding in findings]
    return json.dumps({"findings": listed, **facts}, indent=2)
