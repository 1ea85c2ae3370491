"""The command line: one command a process, whose mistakes are one line on standard error and exit status 2."""

from __future__ import annotations

import argparse
import errno
import json
import os
import signal
import sys
import traceback
from collections.abc import Sequence

from moe_ep_bench.cli.arguments import make_parser
from moe_ep_bench.cli.commands import COMMANDS, end_output
from moe_ep_bench.errors import UserError, cannot_write, printable
from moe_ep_bench.runtime.device import take_cpu
from moe_ep_bench.runtime.exit_codes import LOST, OK, USER_ERROR

# Above 0 where a job begins again: Slurm's count of requeues, torchrun's of its own restarts.
_RESTARTS = ("SLURM_RESTART_COUNT", "TORCHELASTIC_RESTART_COUNT")
_MEASURING = ("run", "emulate", "validate", "papers", "calibrate")
_MOST_CHARACTERS = 1500  # of an error's line; values in it are cut much earlier
# The last two: what libraries raise of a file that is not what it should be; the file is the user's.
_MISTAKES = (UserError, UnicodeError, json.JSONDecodeError)
_UNWRITABLE = (
    *(errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.EFBIG, errno.ENAMETOOLONG),
    *(errno.ENOTDIR, errno.EISDIR, errno.EEXIST),  # a file where a directory is to be, or the reverse
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; return its exit status."""
    options = make_parser().parse_args(sys.argv[1:] if arguments is None else arguments)
    if options.command is None:
        make_parser().print_help(sys.stderr)
        return USER_ERROR
    try:
        _drop_force_after_restart(options)
        if getattr(options, "cpu", False):
            take_cpu()
        return COMMANDS[options.command](options)
    except KeyboardInterrupt:
        kept = "what is finished is kept, the same command does what is left"
        print(f"moe-ep-bench: stopped: {kept}", file=sys.stderr)
        return 128 + signal.SIGINT
    except Exception as error:
        if isinstance(error, BrokenPipeError) and _only_prints(options):
            end_output()
            return OK
        return _complain(error)


def _only_prints(options: argparse.Namespace) -> bool:
    """Whether what the command prints is all that it does."""
    measures = options.command in _MEASURING and getattr(options, "config", "") is not None
    return not measures or any(getattr(options, name, False) for name in ("dry_run", "list_points"))


def _complain(error: Exception) -> int:
    """Print what ended a command, in one line where the user can correct it; return the exit status.

    That is ``LOST`` for what the user cannot correct: 1 would say that a job went through.
    """
    is_unwritable = isinstance(error, OSError) and error.errno in _UNWRITABLE
    if not is_unwritable and not isinstance(error, _MISTAKES):
        traceback.print_exception(error)
        return LOST
    line = printable(f"moe-ep-bench: {cannot_write(error) if isinstance(error, OSError) else error}")
    print(line if len(line) <= _MOST_CHARACTERS else f"{line[: _MOST_CHARACTERS - 3]}...", file=sys.stderr)
    return USER_ERROR


def _drop_force_after_restart(options: argparse.Namespace) -> None:
    """Drop --force where a cluster or torchrun has restarted the job: its command line is as it was the first time."""
    restarts = [f"{name}={os.environ[name]}" for name in _RESTARTS if os.environ.get(name, "0") not in ("", "0")]
    if restarts and getattr(options, "force", False):
        options.force = False
        if os.environ.get("RANK", "0") == "0":
            why = f"{restarts[0]}: the job was restarted and goes on with what is left"
            print(f"moe-ep-bench: --force is passed over, {why}", file=sys.stderr)
