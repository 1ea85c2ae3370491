"""The commit of this package's code: of the clone that it lies in, or the one that a wheel was built from.

On its own, for the build runs it too (hatch_build.py) and ``--version`` waits for no package.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1]
STAMP = "commit.txt"  # in the package: what a build leaves, for there is no git beside it later
DIRTY = "-dirty"


def commit_of(package: Path = PACKAGE) -> str | None:
    """The commit's 40 digits, and ``-dirty`` where the package's files differ from it; None = unknown."""
    # Without the check git would answer for a repository whose environment holds an installed package.
    if (package.parent / ".git").exists():
        git = ("git", "-C", package)
        commit, changes = output_of(*git, "rev-parse", "HEAD"), output_of(*git, "status", "--porcelain", "--", ".")
        return commit and commit + DIRTY * bool(changes)
    stamp = package / STAMP
    return stamp.read_text().strip() or None if stamp.is_file() else None


def output_of(*command: str | Path) -> str | None:
    """What a program prints, within 20 s; None where there is no answer."""
    try:
        return subprocess.run(command, capture_output=True, check=True, text=True, timeout=20).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
