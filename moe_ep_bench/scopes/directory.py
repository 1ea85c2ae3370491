"""Whether a results directory may take more results: it holds one mode, obtained under one set of conditions.

Figures and tables read a directory as a whole, so that what does not belong together must not get into it: timed
beside emulated rows, or two versions of torch.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from typing import Any

from moe_ep_bench import environment
from moe_ep_bench.records import RunDirectory


def check_agreement(directory: RunDirectory, mode: str, conditions: Mapping[str, Any], *, force: bool) -> None:
    """Raise unless results can be written here and earlier ones are of the same mode, conditions and code.

    Args:
        mode: what the rows to come will have as theirs: ``run``, ``route`` or ``emulated``.
        conditions: the keys of the environment that must be as they were, and what they are now.
        force: all is done anew, so that the code may be another than it was.

    Raises:
        ValueError: one line naming the directory, what differs and what helps.
    """
    _check_writable(directory)
    if not directory.run_json.exists():
        return
    try:
        earlier = json.loads(directory.run_json.read_text())
        then = {"mode": earlier["mode"], **earlier["environment"], "code": earlier["hashes"]["code"]}
    except (ValueError, KeyError, TypeError):
        raise ValueError(f"{directory.run_json}: damaged, or not written by this program") from None
    now = {"mode": mode, **conditions} | ({} if force else {"code": environment.code_hash()})
    for key, value in now.items():
        if then.get(key) != value:
            raise ValueError(
                f"--out {directory.root}: holds results with {key} {then.get(key)}, here it is {value}; "
                "choose another directory" + (" or --force" if key == "code" else "")
            )


def _check_writable(directory: RunDirectory) -> None:
    if directory.root.exists() and not directory.root.is_dir():
        raise ValueError(f"--out {directory.root}: expected a directory, new or not; got a file")
    try:
        directory.root.mkdir(parents=True, exist_ok=True)
        # A name of its own: other jobs may be looking at the same moment.
        with tempfile.NamedTemporaryFile(dir=directory.root, prefix=".writable."):
            pass
    except OSError as error:
        raise ValueError(f"--out {directory.root}: cannot write there: {error.strerror}") from None
