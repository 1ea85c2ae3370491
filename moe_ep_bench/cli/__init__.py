"""The commands. Each parses its arguments and calls the module that does the work.

torch, Megatron-Core, pandas and matplotlib are imported inside commands: help and a mistake in a config wait for none.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from moe_ep_bench.cli.arguments import PAPERS_LIST, make_parser, with_list_joined
from moe_ep_bench.errors import UserError
from moe_ep_bench.runtime.device import take_cpu
from moe_ep_bench.runtime.errors import complain, tolerant_stderr
from moe_ep_bench.runtime.exit_codes import CASES_FAILED, OK, USER_ERROR
from moe_ep_bench.runtime.progress import announce, settle
from moe_ep_bench.runtime.torchrun import end_with_parent

# Above 0 where a job begins again: Slurm's count of requeues, torchrun's of its own restarts.
_RESTARTS = ("SLURM_RESTART_COUNT", "TORCHELASTIC_RESTART_COUNT")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; return its exit status. User mistakes are one line on stderr and status 2 (``complain``)."""
    arguments = sys.argv[1:] if arguments is None else arguments
    with tolerant_stderr(), _no_prompt():
        parser = make_parser()
        options = parser.parse_args(with_list_joined(arguments))
        if options.command is None:
            parser.print_help(sys.stderr)
            return USER_ERROR
        try:
            _drop_force_after_restart(options)
            if getattr(options, "cpu", False):
                take_cpu()
            return COMMANDS[options.command](options)
        except KeyboardInterrupt:
            settle()
            kept = "what is finished is kept, the same command does what is left"
            print(f"moe-ep-bench: stopped: {kept}", file=sys.stderr)
            return 128 + signal.SIGINT
        except Exception as error:
            if isinstance(error, BrokenPipeError) and _only_prints(options):
                _end_output()
                return OK
            settle()
            return complain(error)
        finally:
            settle()


@contextlib.contextmanager
def _no_prompt() -> Iterator[None]:
    """No command asks anything, and no library for it: standard input is empty in the block."""
    stream = sys.stdin
    with open(os.devnull) as sys.stdin:
        try:
            yield
        finally:
            sys.stdin = stream


def _drop_force_after_restart(options: argparse.Namespace) -> None:
    """Drop --force where a cluster or torchrun has restarted the job: its command line is as it was the first time."""
    restarts = [f"{name}={os.environ[name]}" for name in _RESTARTS if os.environ.get(name, "0") not in ("", "0")]
    if restarts and getattr(options, "force", False):
        options.force = False
        if os.environ.get("RANK", "0") == "0":
            why = f"{restarts[0]}: the job was restarted and goes on with what is left"
            print(f"moe-ep-bench: --force is passed over, {why}", file=sys.stderr)


def _only_prints(options: argparse.Namespace) -> bool:
    """Whether the command's result is what it prints, and not what it measures."""
    measures = options.command in ("run", "emulate", "validate", "papers", "calibrate")
    return not measures or any(getattr(options, name, None) for name in ("dry_run", "list_points"))


def _end_output() -> None:
    """Drop what is still buffered: the reader of standard output has closed it."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _out(options: argparse.Namespace, suffix: str = "") -> Path:
    return options.out or Path("results", f"{options.config.stem}{suffix}")


def _check_config(options: argparse.Namespace, *also: str) -> None:
    """Find mistakes in a config before torch is imported, which takes seconds; announce the command.

    What is wrong on GPUs alone, or on the CPU alone, is found later: only torch knows which of them is here.

    Args:
        also: overrides that the command adds.
    """
    from moe_ep_bench.config.files import load_experiments
    from moe_ep_bench.presets import ConfigError

    overrides = [*also, *options.overrides]
    try:
        experiments = load_experiments(options.config, overrides, on_cpu=False)
    except ConfigError:
        experiments = load_experiments(options.config, overrides, on_cpu=True)
    points = "1 point" if len(experiments) == 1 else f"{len(experiments)} points"
    announce(f"{options.command} {options.config}: planning {points}")


def _nproc(options: argparse.Namespace) -> int:
    """Ranks on this node."""
    from moe_ep_bench.runtime.device import local_ranks

    return local_ranks(options.nproc)


def _run(options: argparse.Namespace) -> int:
    if options.list_points:
        return _list_points(options)
    is_rank = "RANK" in os.environ  # torchrun's
    if is_rank:
        end_with_parent()
    elif options.launch is not None:
        raise UserError("--launch: only for ranks that torchrun started; without it, run does all of measure.launches")
    else:
        _check_config(options)
    from moe_ep_bench.runtime.torchrun import is_launched, num_nodes

    if options.dry_run:
        from moe_ep_bench.bench.dry_run import dry_run

        num_ranks = int(os.environ["WORLD_SIZE"]) if is_rank else _nproc(options) * num_nodes()
        return dry_run(options.config, options.overrides, "ranks", num_ranks, options.point)
    from moe_ep_bench.bench import run

    what = (options.config, _out(options), options.overrides)
    how = {"force": options.force, "profile": options.profile, "point": options.point}
    if is_rank:
        status = run.run(*what, launch=options.launch or 0, **how)
        reports = os.environ["RANK"] == "0" and not is_launched()
    else:
        status, reports, _ = run.launch(*what, _nproc(options), **how)
    if not reports or options.profile is not None:
        return status
    return _shown_of_directory(status, _out(options))


def _shown_of_directory(status: int, out: Path) -> int:
    """Print the table of a results directory; where other jobs still write into it, where it is. The job's status."""
    from moe_ep_bench.analysis.reading import ResultsError

    def report() -> str:
        try:
            return _results_text(out)
        except ResultsError as error:
            return f"in {out}; no table yet: {error}"

    return _shown(status, report)


def _results_text(out: Path) -> str:
    """The table of a results directory, where it is, and what to do with it next."""
    from moe_ep_bench.analysis.show import end_of_run

    return end_of_run(out)


def _list_points(options: argparse.Namespace) -> int:
    import json

    from moe_ep_bench.config.files import load_experiments

    for number, experiment in enumerate(load_experiments(options.config, options.overrides, on_cpu=options.cpu)):
        print(number, *(f"{key}={json.dumps(value, default=str)}" for key, value in experiment.point))
    return OK


def _emulate(options: argparse.Namespace) -> int:
    _check_config(options)
    if options.dry_run:
        from moe_ep_bench.bench.dry_run import dry_run

        return dry_run(options.config, options.overrides, "virtual")
    from moe_ep_bench.bench.run import emulate

    out = _out(options)
    return _shown_of_directory(emulate(options.config, out, options.overrides, force=options.force), out)


def _shown(status: int, report: Callable[[], str]) -> int:
    """Print what a command that ended with ``status`` found, where there is anything; the status to end with."""
    from moe_ep_bench.analysis.reading import ResultsError

    if status not in (OK, CASES_FAILED):
        return status
    try:
        print(report(), flush=True)
    except BrokenPipeError:  # All was measured all the same.
        _end_output()
    except ResultsError as error:  # All was run: that cases lack is not the user's mistake.
        print(f"moe-ep-bench: nothing to show: {error}", file=sys.stderr)
        return CASES_FAILED
    return status


def _route(options: argparse.Namespace) -> int:
    _check_config(options)
    if options.dry_run:
        from moe_ep_bench.bench.dry_run import dry_run

        return dry_run(options.config, options.overrides, "routing")
    from moe_ep_bench.analysis.plot import draw_all
    from moe_ep_bench.bench import route

    directory = route.route(options.config, _out(options), options.overrides, force=options.force)
    print(_results_text(directory.root))
    print(draw_all(directory.root))
    return OK


def _advise(options: argparse.Namespace) -> int:
    from moe_ep_bench.bench.question import Bounds, ask, check_reading

    bounds = Bounds.of(options.max_dropped, options.max_lost_mass)
    if options.config is not None and options.config.is_dir():
        check_reading(options)
        from moe_ep_bench.analysis.advise import advice_text, load_timed

        print(advice_text(load_timed(options.config), bounds, show_all=options.all))
        return OK
    if options.config is not None:
        _check_config(options, "policies=[{name: topk}]")  # Its own are no candidates, so that it needs none.
    question = ask(options, bounds)
    settle()
    if options.dry_run:
        print(question.plan)
        return OK
    question.check()
    for line in (question.summary, *question.cautions):
        print(f"moe-ep-bench: {line}", file=sys.stderr, flush=True)
    status = question.model(force=options.force)

    def report() -> str:
        from moe_ep_bench.analysis.advise import write_answer

        return write_answer(question, bounds, show_all=options.all)

    return _shown(status, report)


def _validate(options: argparse.Namespace) -> int:
    _check_config(options)
    from moe_ep_bench.analysis.validate import write_validation
    from moe_ep_bench.bench.question import parse_share
    from moe_ep_bench.bench.validate import validate

    out = _out(options, "-validated")
    margin = parse_share("--margin", options.margin)
    status = validate(options.config, out, options.overrides, _nproc(options), force=options.force, margin=margin)
    return _shown(status, lambda: write_validation(out))


def _papers(options: argparse.Namespace) -> int:
    _check_config(options)
    from moe_ep_bench.papers.run import run_claims

    out, nproc = _out(options), None if options.nproc is None else _nproc(options)
    status = run_claims(options.config, out, options.overrides, force=options.force, nproc=nproc)

    def report() -> str:
        from moe_ep_bench.analysis.papers import load_claims, write_claims
        from moe_ep_bench.analysis.plot import draw_claims

        claims = load_claims(out)
        draw_claims(claims)
        return write_claims(claims)

    return _shown(status, report)


def _papers_list(options: argparse.Namespace) -> int:
    if options.json:
        from moe_ep_bench.papers.published import list_json

        print(list_json(options.paper))
    else:
        from moe_ep_bench.analysis.show import list_papers

        print(list_papers(options.paper))
    return OK


def _quality(options: argparse.Namespace) -> int:
    from moe_ep_bench.analysis.plot import draw_all
    from moe_ep_bench.analysis.quality import read_quality
    from moe_ep_bench.analysis.show import quality_text
    from moe_ep_bench.quality.session import run_quality

    out = _out(options)
    run_quality(options.config, out, options.overrides, force=options.force, dry_run=options.dry_run)
    if not options.dry_run:
        print(quality_text(out))
        if read_quality(out).comparisons["text"].notna().any():
            print(draw_all(out))
    return OK


def _calibrate(options: argparse.Namespace) -> int:
    end_with_parent()
    out = options.out or Path("results", "calibration", "links.yaml")
    from moe_ep_bench.cost_model.calibrate import calibrate, launch_calibrate
    from moe_ep_bench.runtime.torchrun import leave_status

    how = {"max_bytes": options.max_bytes, "repetitions": options.repetitions}
    if "RANK" in os.environ:  # torchrun's
        return leave_status(calibrate(out, **how))
    return launch_calibrate(out, _nproc(options), **how)


def _trace_info(options: argparse.Namespace) -> int:
    from moe_ep_bench.workload.facts import trace_info

    print(trace_info(options.file))
    return OK


def _trace_thresholds(options: argparse.Namespace) -> int:
    import yaml

    from moe_ep_bench.workload.facts import laser_thresholds

    if options.budget is not None:
        raise UserError(
            "--budget: is gone; the policy budget_drop (max_lost_mass) finds each batch's factor as it runs"
        )
    derived = laser_thresholds(options.file, options.keep)
    print(yaml.safe_dump([{"name": "laser", **derived}], sort_keys=False, default_flow_style=None), end="")
    return OK


def _trace_eplb(options: argparse.Namespace) -> int:
    from moe_ep_bench.workload.counts import write_expert_map

    how = {"num_ranks": options.ep, "spare_per_rank": options.spare_per_rank, "num_nodes": options.nodes}
    print(write_expert_map(options.file, options.out, **how, preset=options.preset))
    return OK


def _trace_record(options: argparse.Namespace) -> int:
    from moe_ep_bench.quality.recording import RecordOptions, record_trace

    source = options.model, options.text
    chosen = RecordOptions(**{field.name: getattr(options, field.name) for field in dataclasses.fields(RecordOptions)})
    if options.similarity is not None:
        from moe_ep_bench.quality.similarity import record_similarity

        print(record_similarity(*source, options.similarity, chosen))
    if options.similarity is None or options.out is not None:
        out = options.out or Path("recordings", f"{options.model.resolve().name}-{options.text.stem}.safetensors")
        print(record_trace(*source, out, chosen).text())
    return OK


def _trace_import(options: argparse.Namespace) -> int:
    from moe_ep_bench.workload.importers import ImportOptions, import_trace

    chosen = {name: value for name in ImportOptions.model_fields if (value := getattr(options, name)) is not None}
    print(import_trace(options.kind, options.source, options.out, chosen).text())
    return OK


def _check_policy(options: argparse.Namespace) -> int:
    from moe_ep_bench.files import parse_yaml
    from moe_ep_bench.policies import make_policy
    from moe_ep_bench.policies.laws import check_text

    entry: dict[str, object] = {"name": options.policy}
    for field in options.fields:
        key, separator, value = field.partition("=")
        if not separator:
            raise UserError(f"--set {field}: expected field=value")
        entry[key] = parse_yaml(value)
    text, kept = check_text(make_policy(entry))
    print(text)
    return OK if kept else CASES_FAILED


def _schema(options: argparse.Namespace) -> int:
    import json

    from moe_ep_bench.cli.json_schema import config_schema

    print(json.dumps(config_schema(options.configs), indent=2))
    return OK


def _doctor(options: argparse.Namespace) -> int:
    from moe_ep_bench.machine.doctor import doctor

    return doctor(options.out, options.nproc)


def _show(options: argparse.Namespace) -> int:
    from moe_ep_bench.analysis.show import show

    return show(
        options.directories,
        options.format,
        options.out,
        names=options.case,
        views=[name for name in options.view.split(",") if name],
        columns=[name for name in options.columns.split(",") if name],
        all_samples=options.samples,
    )


def _plot(options: argparse.Namespace) -> int:
    from moe_ep_bench.analysis.plot import plot

    return plot(options, lambda line: print(f"moe-ep-bench: {line}", file=sys.stderr))


def _compare(options: argparse.Namespace) -> int:
    from moe_ep_bench.analysis.compare import compare_directories, compare_text, exit_status
    from moe_ep_bench.analysis.render import Table, render
    from moe_ep_bench.bench.question import parse_share

    limit = None if options.fail_over is None else parse_share("--fail-over", options.fail_over)
    if options.strict and limit is None:
        raise UserError("--strict: expected --fail-over beside it")
    how = {"intended": [key for key in options.changed.split(",") if key], "same_machine": options.same_machine}
    change = compare_directories(options.base, options.new, limit=limit, **how)
    if options.base.resolve() == options.new.resolve():
        print("moe-ep-bench: BASE and NEW are one directory, so that nothing can differ", file=sys.stderr)
    print(render([Table(change.cases, ())], "json") if options.json else compare_text(change))
    return exit_status(change, strict=options.strict)


COMMANDS: dict[str, Callable[[argparse.Namespace], int]] = {
    "run": _run,
    "emulate": _emulate,
    "route": _route,
    "advise": _advise,
    "validate": _validate,
    "papers": _papers,
    PAPERS_LIST: _papers_list,
    "quality": _quality,
    "calibrate": _calibrate,
    "trace info": _trace_info,
    "trace thresholds": _trace_thresholds,
    "trace eplb": _trace_eplb,
    "trace record": _trace_record,
    "trace import": _trace_import,
    "check-policy": _check_policy,
    "schema": _schema,
    "doctor": _doctor,
    "show": _show,
    "plot": _plot,
    "compare": _compare,
}
