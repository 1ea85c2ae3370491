"""What the commands do: each calls the module that does the work.

torch, Megatron-Core, pandas and matplotlib are imported inside commands: help waits for none.
"""

from __future__ import annotations

import json
import os
import sys
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

from moe_ep_bench.errors import UserError
from moe_ep_bench.runtime.exit_codes import CASES_FAILED, OK
from moe_ep_bench.runtime.torchrun import become_rank

Work = Callable[[Namespace], int]


# ---- what commands share ---------------------------------------------------------------------------------------------


def _out(options: Namespace, suffix: str = "") -> Path:
    return options.out or Path("results", f"{options.config.stem}{suffix}")


def _nproc(options: Namespace) -> int:
    """Ranks on this node."""
    from moe_ep_bench.runtime.device import local_ranks

    return local_ranks(options.nproc)


def end_output() -> None:
    """Drop what is still buffered: the reader of standard output has closed it."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def shown(status: int, report: Callable[[], str]) -> int:
    """Print what a command that ended with ``status`` found, where there is anything; the status to end with."""
    from moe_ep_bench.analysis.store import ResultsError

    if status in (OK, CASES_FAILED):
        try:
            print(report(), flush=True)
        except BrokenPipeError:  # All was measured all the same.
            end_output()
        except ResultsError as error:  # Cases lack, or other jobs have still to write theirs.
            print(f"moe-ep-bench: nothing to show yet: {error}", file=sys.stderr)
    return status


def _shown_of_directory(status: int, out: Path) -> int:
    """Print the table of a results directory."""

    def report() -> str:
        from moe_ep_bench.analysis.show import end_of_run

        return end_of_run(out)

    return shown(status, report)


# ---- commands of a config --------------------------------------------------------------------------------------------


def _run(options: Namespace) -> int:
    if options.list_points:
        return _list_points(options)
    is_rank = "RANK" in os.environ  # torchrun's
    if is_rank:
        become_rank()
    elif options.launch is not None:
        raise UserError("--launch: only for ranks that torchrun started; without it, run does all of measure.launches")
    from moe_ep_bench.runtime.torchrun import is_launched, num_nodes

    if options.dry_run:
        from moe_ep_bench.bench.dry_run import dry_run

        num_ranks = int(os.environ["WORLD_SIZE"]) if is_rank else _nproc(options) * num_nodes()
        return dry_run(options.config, options.overrides, "ranks", num_ranks, options.point)
    from moe_ep_bench.bench import run

    what = (options.config, _out(options), options.overrides)
    how = {"force": options.force, "point": options.point}
    if is_rank:
        status = run.run(*what, launch=options.launch or 0, **how)
        reports = os.environ["RANK"] == "0" and not is_launched()
    else:
        status, reports = run.launch(*what, _nproc(options), **how)
    return _shown_of_directory(status, _out(options)) if reports else status


def _list_points(options: Namespace) -> int:
    from moe_ep_bench.config.files import load_experiments

    for number, experiment in enumerate(load_experiments(options.config, options.overrides, on_cpu=options.cpu)):
        print(number, *(f"{key}={json.dumps(value, default=str)}" for key, value in experiment.point))
    return OK


def _emulate(options: Namespace) -> int:
    if options.dry_run:
        from moe_ep_bench.bench.dry_run import dry_run

        return dry_run(options.config, options.overrides, "virtual")
    from moe_ep_bench.bench.run import emulate

    out = _out(options)
    return _shown_of_directory(emulate(options.config, out, options.overrides, force=options.force), out)


def _route(options: Namespace) -> int:
    if options.dry_run:
        from moe_ep_bench.bench.dry_run import dry_run

        return dry_run(options.config, options.overrides, "routing")
    from moe_ep_bench.analysis.plot import draw_all
    from moe_ep_bench.analysis.show import end_of_run
    from moe_ep_bench.bench.route import route

    root = route(options.config, _out(options), options.overrides, force=options.force).root
    print(end_of_run(root))
    print(draw_all(root))
    return OK


def _validate(options: Namespace) -> int:
    from moe_ep_bench.analysis.validate import write_validation
    from moe_ep_bench.bench.validate import validate

    out = _out(options, "-validated")
    how = {"force": options.force, "margin": options.margin}
    status = validate(options.config, out, options.overrides, _nproc(options), **how)
    return shown(status, lambda: write_validation(out))


def _papers(options: Namespace) -> int:
    if options.config is None:
        if options.json:
            from moe_ep_bench.papers import list_json as listed
        else:
            from moe_ep_bench.analysis.show import list_papers as listed
        print(listed(options.paper))
        return OK
    if options.paper is not None or options.json:
        raise UserError(f"--paper, --json: expected none with a config, {options.config}")
    from moe_ep_bench.papers.run import run_claims

    out, nproc = _out(options), None if options.nproc is None else _nproc(options)
    status = run_claims(options.config, out, options.overrides, force=options.force, nproc=nproc)

    def report() -> str:
        from moe_ep_bench.analysis.papers import load_claims, write_claims
        from moe_ep_bench.analysis.plot import draw_claims

        claims = load_claims(out)
        draw_claims(claims)
        return write_claims(claims)

    return shown(status, report)


def _quality(options: Namespace) -> int:
    from moe_ep_bench.analysis.plot import draw_all
    from moe_ep_bench.analysis.quality import read_quality
    from moe_ep_bench.analysis.show import quality_text
    from moe_ep_bench.quality.session import run_quality

    out = _out(options)
    run_quality(options.config, out, options.overrides, force=options.force, dry_run=options.dry_run)
    if not options.dry_run:
        print(quality_text(out))
        if read_quality(out).has_texts:
            print(draw_all(out))
    return OK


def _advise(options: Namespace) -> int:
    from moe_ep_bench.bench.question import Bounds, ask, check_reading

    bounds = Bounds.of(options.max_dropped, options.max_lost_mass)
    if options.config is not None and options.config.is_dir():
        check_reading(options)
        from moe_ep_bench.analysis.advise import advice_text
        from moe_ep_bench.analysis.cases import load_timed

        print(advice_text(load_timed(options.config), bounds))
        return OK
    question = ask(options, bounds)
    if options.dry_run:
        print(question.plan)
        return OK
    status = question.model(force=options.force)

    def report() -> str:
        from moe_ep_bench.analysis.advise import write_answer

        return write_answer(question, bounds)

    return shown(status, report)


# ---- other commands --------------------------------------------------------------------------------------------------


def _calibrate(options: Namespace) -> int:
    if "RANK" in os.environ:
        become_rank()
    out = options.out or Path("results", "calibration", "links.yaml")
    from moe_ep_bench.cost_model.calibrate import calibrate, launch_calibrate

    how = {"max_bytes": options.max_bytes, "repetitions": options.repetitions}
    if "RANK" in os.environ:  # torchrun's
        return calibrate(out, **how)
    return launch_calibrate(out, _nproc(options), **how)


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
    from moe_ep_bench.config.files import override
    from moe_ep_bench.policies import make_policy
    from moe_ep_bench.policies.laws import check_text

    entry: dict[str, Any] = {"name": options.policy}
    override(entry, {}, options.overrides)
    text, kept = check_text(make_policy(entry))
    print(text)
    return OK if kept else CASES_FAILED


def _doctor(options: Namespace) -> int:
    from moe_ep_bench.machine.doctor import doctor

    return doctor(options.out, options.nproc)


def _show(options: Namespace) -> int:
    from moe_ep_bench.analysis.show import show

    return show(options.directories, options.format, options.out, views=options.view)


def _plot(options: Namespace) -> int:
    from moe_ep_bench.analysis.plot import plot

    return plot(options, lambda line: print(f"moe-ep-bench: {line}", file=sys.stderr))


def _compare(options: Namespace) -> int:
    from moe_ep_bench.analysis.compare import compare_directories, compare_text, exit_status
    from moe_ep_bench.analysis.render import Table, render

    if options.strict and options.fail_over is None:
        raise UserError("--strict: expected --fail-over beside it")
    change = compare_directories(options.base, options.new, limit=options.fail_over)
    if options.base.resolve() == options.new.resolve():
        print("moe-ep-bench: BASE and NEW are one directory, so that nothing can differ", file=sys.stderr)
    print(render([Table(change.cases, ())], "json") if options.json else compare_text(change))
    return exit_status(change, strict=options.strict)


COMMANDS: dict[str, Work] = {
    "run": _run,
    "emulate": _emulate,
    "route": _route,
    "advise": _advise,
    "validate": _validate,
    "papers": _papers,
    "quality": _quality,
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
