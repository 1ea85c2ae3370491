"""The command line: one command a process, whose mistakes are one line on standard error and exit status 2.

Each command calls the module that does the work. torch, Megatron-Core, pandas and matplotlib are imported inside
commands: help waits for none.
"""

from __future__ import annotations

import atexit
import errno
import gc
import json
import os
import signal
import sys
import traceback
from argparse import Namespace
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from moe_ep_bench.cli.arguments import make_parser
from moe_ep_bench.errors import CASES_FAILED, LOST, OK, USER_ERROR, UserError, cannot_write, printable
from moe_ep_bench.runtime.sharing import NCCL, STAGED, Sharing
from moe_ep_bench.runtime.torchrun import become_rank, is_launched, local_ranks, num_nodes, take_cpu

# Objects by which a collection is put off: imports and frames make millions, of which hardly any are garbage.
_COLLECT_AFTER = 100_000
# Above 0 where a job begins again: Slurm's count of requeues, torchrun's of its own restarts.
_RESTARTS = ("SLURM_RESTART_COUNT", "TORCHELASTIC_RESTART_COUNT")
_MOST_CHARACTERS = 4000  # of an error's line, which may list all columns; values in it are cut much earlier
# The last two: what libraries raise of a file that is not what it should be; the file is the user's.
_MISTAKES = (UserError, UnicodeError, json.JSONDecodeError)
_UNWRITABLE = (
    *(errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.EFBIG, errno.ENAMETOOLONG),
    *(errno.ENOTDIR, errno.EISDIR, errno.EEXIST),  # a file where a directory is to be, or the reverse
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; return its exit status."""
    gc.set_threshold(_COLLECT_AFTER)
    atexit.register(gc.freeze)  # else Python looks for garbage among all that was imported as it ends: half a second
    options = make_parser().parse_args(sys.argv[1:] if arguments is None else arguments)
    if options.command is None:
        make_parser().print_help(sys.stderr)
        return USER_ERROR
    try:
        if _is_rank():
            become_rank()
        _drop_force_after_restart(options)
        if getattr(options, "cpu", False):
            take_cpu()
        return COMMANDS[options.command](options)
    except KeyboardInterrupt:
        kept = "what is finished is kept, the same command does what is left"
        print(f"moe-ep-bench: stopped: {kept}", file=sys.stderr)
        return 128 + signal.SIGINT
    except BrokenPipeError:
        _end_output()
        return 128 + signal.SIGPIPE
    except Exception as error:
        return _report_error(error)


def _report_error(error: Exception) -> int:
    """Print what ended a command, in one line where the user can correct it; return the exit status.

    That is ``LOST`` for what the user cannot correct: 1 would say that a job went through.
    """
    if not _is_users(error):
        traceback.print_exception(error)
        return LOST
    line = printable(f"moe-ep-bench: {cannot_write(error) if isinstance(error, OSError) else error}")
    print(line if len(line) <= _MOST_CHARACTERS else f"{line[: _MOST_CHARACTERS - 3]}...", file=sys.stderr)
    return USER_ERROR


def _is_users(error: Exception) -> bool:
    """Whether the user can correct it."""
    return isinstance(error, _MISTAKES) or (isinstance(error, OSError) and error.errno in _UNWRITABLE)


def _drop_force_after_restart(options: Namespace) -> None:
    """Drop --force where a cluster or torchrun has restarted the job: its command line is as it was the first time."""
    restarts = [f"{name}={os.environ[name]}" for name in _RESTARTS if os.environ.get(name, "0") not in ("", "0")]
    if restarts and getattr(options, "force", False):
        options.force = False
        if os.environ.get("RANK", "0") == "0":
            why = f"{restarts[0]}: the job was restarted and goes on with what is left"
            print(f"moe-ep-bench: --force is passed over, {why}", file=sys.stderr)


def _end_output() -> None:
    """Drop what is still buffered: the reader of standard output has closed it."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


# ---- what commands share ---------------------------------------------------------------------------------------------


def _out(options: Namespace, suffix: str = "") -> Path:
    return options.out or Path("results", f"{options.config.stem}{suffix}")


def _is_rank() -> bool:
    """Whether torchrun has started this process."""
    return "RANK" in os.environ


def _dry_run(options: Namespace, backend: str, num_ranks: int | None = None) -> int:
    from moe_ep_bench.bench.plan import dry_run

    return dry_run(options.config, options.overrides, backend, num_ranks, getattr(options, "point", None))


def shown(status: int, report: Callable[[], str]) -> int:
    """Print what a command that ended with ``status`` found, where there is anything; the status to end with."""
    from moe_ep_bench.results import ResultsError

    if status in (OK, CASES_FAILED):
        try:
            print(report(), flush=True)
        except BrokenPipeError:  # All was measured all the same.
            _end_output()
        except ResultsError as error:  # Cases lack, or other jobs have still to write theirs.
            print(f"moe-ep-bench: nothing to show yet: {error}", file=sys.stderr)
        except Exception as error:  # A fault of ours in a table: ``LOST`` would have a cluster start the job again.
            if _is_users(error):
                raise
            traceback.print_exception(error)
            print("moe-ep-bench: what was measured is kept, its table failed as above", file=sys.stderr)
            return CASES_FAILED
    return status


def _shown_of_directory(status: int, out: Path) -> int:
    """Print the table of a results directory."""
    from moe_ep_bench.analysis.show import end_of_run

    return shown(status, lambda: end_of_run(out))


# ---- commands of a config --------------------------------------------------------------------------------------------


def _run(options: Namespace) -> int:
    if options.list_points:
        return _list_points(options)
    if options.launch is not None and not _is_rank():
        raise UserError("--launch: only for ranks that torchrun started; without it, run does all of measure.launches")
    sharing = _sharing(options)
    if options.dry_run:
        num_ranks = int(os.environ["WORLD_SIZE"]) if _is_rank() else local_ranks(options.nproc) * num_nodes()
        return _dry_run(options, "ranks", num_ranks)
    from moe_ep_bench.bench import commands

    what = (options.config, _out(options), options.overrides)
    how = {"force": options.force, "point": options.point, "sharing": sharing}
    if _is_rank():
        status = commands.run(*what, launch=options.launch or 0, **how)
        reports = os.environ["RANK"] == "0" and not is_launched()
    else:
        status, reports = commands.launch(*what, local_ranks(options.nproc), **how)
    return _shown_of_directory(status, _out(options)) if reports else status


def _sharing(options: Namespace) -> Sharing | None:
    """By what ranks are to share GPUs; None = each has its own."""
    if options.staged and not options.share_gpu:
        raise UserError("--staged: goes with --share-gpu, got none")
    return (STAGED if options.staged else NCCL) if options.share_gpu else None


def _list_points(options: Namespace) -> int:
    from moe_ep_bench.config.files import load_experiments

    for number, experiment in enumerate(load_experiments(options.config, options.overrides, on_cpu=options.cpu)):
        print(number, *(f"{key}={json.dumps(value, default=str)}" for key, value in experiment.point))
    return OK


def _emulate(options: Namespace) -> int:
    if options.dry_run:
        return _dry_run(options, "virtual")
    from moe_ep_bench.bench.commands import emulate
    from moe_ep_bench.bench.plan import plan

    comparisons = plan(options.config, options.overrides, "virtual")
    return _shown_of_directory(emulate(comparisons, _out(options), force=options.force), _out(options))


def _route(options: Namespace) -> int:
    if options.dry_run:
        return _dry_run(options, "routing")
    from moe_ep_bench.analysis.plot import draw_all
    from moe_ep_bench.analysis.show import end_of_run
    from moe_ep_bench.bench.commands import route

    root = route(options.config, _out(options), options.overrides, force=options.force).root
    print(end_of_run(root))
    print(draw_all(root))
    return OK


def _validate(options: Namespace) -> int:
    from moe_ep_bench.analysis.compare import write_validation
    from moe_ep_bench.bench.paired_run import validate

    out = _out(options, "-validated")
    how = {"force": options.force, "margin": options.margin, "sharing": (sharing := _sharing(options))}
    status = validate(options.config, out, options.overrides, local_ranks(options.nproc), **how)
    return status if sharing else shown(status, lambda: write_validation(out))


def _papers(options: Namespace) -> int:
    if options.config is None:
        for flag, given in (("out", options.out), ("set", options.overrides), ("nproc", options.nproc)):
            if given:
                raise UserError(f"--{flag}: goes with a config of configs/papers/, got none")
        if options.json:
            from moe_ep_bench.papers import list_json as listed
        else:
            from moe_ep_bench.analysis.show import list_papers as listed
        print(listed(options.paper))
        return OK
    if options.paper is not None or options.json:
        raise UserError(f"--paper, --json: expected none with a config, {options.config}")
    from moe_ep_bench.papers.run import run_claims

    out, nproc = _out(options), None if options.nproc is None else local_ranks(options.nproc)
    status = run_claims(options.config, out, options.overrides, force=options.force, nproc=nproc)

    def report() -> str:
        from moe_ep_bench.analysis.paper_claims import load_claims, write_claims
        from moe_ep_bench.analysis.plot import draw_claims

        claims = load_claims(out)
        draw_claims(claims)
        return write_claims(claims)

    return shown(status, report)


def _quality(options: Namespace) -> int:
    from moe_ep_bench.analysis.cases import load
    from moe_ep_bench.analysis.plot import draw_all
    from moe_ep_bench.analysis.show import shown_text
    from moe_ep_bench.quality.session import run_quality

    out = _out(options)
    run_quality(options.config, out, options.overrides, force=options.force, dry_run=options.dry_run)
    if not options.dry_run:
        print(shown_text(load(out)), end="")
        print(draw_all(out))
    return OK


def _serve(options: Namespace) -> int:
    from moe_ep_bench.analysis.plot import draw_all
    from moe_ep_bench.serving.ab import run_serve

    out, url = _out(options), [] if options.url is None else [f"serve.url={json.dumps(options.url)}"]
    how = {"force": options.force, "dry_run": options.dry_run}
    status = run_serve(options.config, out, [*options.overrides, *url], **how)
    if options.dry_run:
        return status
    status = _shown_of_directory(status, out)
    return shown(status, lambda: draw_all(out))


def _advise(options: Namespace) -> int:
    from moe_ep_bench.bench.advise_config import Bounds, ask, check_reading

    bounds = Bounds.of(options.max_dropped, options.max_lost_mass)
    if options.config is not None and options.config.is_dir():
        check_reading(options)
        from moe_ep_bench.analysis.advise import advice_text
        from moe_ep_bench.analysis.cases import load_timed

        how = {"versus": options.versus, "as_json": options.json}
        print(advice_text(load_timed(options.config), bounds, **how))
        return OK
    question = ask(options, bounds)
    if options.dry_run:
        print(question.plan)
        return OK
    from moe_ep_bench.analysis.advise import write_answer

    status, how = question.model(force=options.force), {"versus": options.versus, "as_json": options.json}
    return shown(status, lambda: write_answer(question, bounds, **how))


# ---- other commands --------------------------------------------------------------------------------------------------


def _calibrate(options: Namespace) -> int:
    out = options.out or Path("results", "calibration", "links.yaml")
    how = {"max_bytes": options.max_bytes, "repetitions": options.repetitions, "sharing": _sharing(options)}
    from moe_ep_bench.cost_model.calibrate import calibrate, launch_calibrate

    return calibrate(out, **how) if _is_rank() else launch_calibrate(out, local_ranks(options.nproc), **how)


def _trace_info(options: Namespace) -> int:
    from moe_ep_bench.workload.trace import trace_info

    print(trace_info(options.file))
    return OK


def _trace_record(options: Namespace) -> int:
    from moe_ep_bench.quality.recording import record

    out = options.out
    if options.similarity is None and out is None:
        out = Path("recordings", f"{options.model.resolve().name}-{options.text.stem}.safetensors")
    how = {"sequence_length": options.sequence_length, "num_sequences": options.num_sequences}
    print(record(options.model, options.text, out=out, similarity=options.similarity, **how))
    return OK


def _trace_import(options: Namespace) -> int:
    from moe_ep_bench.workload.importers import ImportOptions, import_trace
    from moe_ep_bench.workload.trace import trace_info

    given = {name: getattr(options, name) for name in ImportOptions.__dataclass_fields__}
    chosen = {name: value for name, value in given.items() if value is not None}
    import_trace(options.kind, options.source, options.out, **chosen)
    print(trace_info(options.out))
    return OK


def _check_policy(options: Namespace) -> int:
    from moe_ep_bench.config import label_of
    from moe_ep_bench.config.files import override
    from moe_ep_bench.policies import make_policy
    from moe_ep_bench.policies.laws import check_text

    entry: dict[str, Any] = {"name": options.policy}
    override(entry, {}, options.overrides)
    policy = make_policy(entry)
    text, kept = check_text(policy, label_of(policy))
    print(text)
    return OK if kept else CASES_FAILED


def _doctor(options: Namespace) -> int:
    from moe_ep_bench.machine.doctor import doctor

    return doctor(options.out, options.nproc)


def _show(options: Namespace) -> int:
    from moe_ep_bench.analysis.show import show

    return show(options.directories, options.format, options.out, views=options.view, columns=options.columns)


def _plot(options: Namespace) -> int:
    from moe_ep_bench.analysis.plot import plot

    return plot(options, lambda line: print(f"moe-ep-bench: {line}", file=sys.stderr))


def _compare(options: Namespace) -> int:
    from moe_ep_bench.analysis.columns import Table, render
    from moe_ep_bench.analysis.compare import change_text, compare_directories, exit_status

    if options.strict and options.fail_over is None:
        raise UserError("--strict: expected --fail-over beside it")
    change = compare_directories(options.base, options.new, limit=options.fail_over)
    if options.base.resolve() == options.new.resolve():
        print("moe-ep-bench: BASE and NEW are one directory, so that nothing can differ", file=sys.stderr)
    print(render([Table(change.cases, ())], "json") if options.json else change_text(change))
    return exit_status(change, strict=options.strict)


COMMANDS: dict[str, Callable[[Namespace], int]] = {
    "run": _run,
    "emulate": _emulate,
    "route": _route,
    "advise": _advise,
    "validate": _validate,
    "papers": _papers,
    "quality": _quality,
    "serve": _serve,
    "calibrate": _calibrate,
    "trace info": _trace_info,
    "trace record": _trace_record,
    "trace import": _trace_import,
    "check-policy": _check_policy,
    "doctor": _doctor,
    "show": _show,
    "plot": _plot,
    "compare": _compare,
}
