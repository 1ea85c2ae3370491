"""The commands. Thin: each parses its arguments and calls the module that does the work."""

from __future__ import annotations

import argparse
import dataclasses
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from moe_ep_bench.complaints import complain, tolerant_stderr
from moe_ep_bench.exit_codes import CASES_FAILED, OK, USER_ERROR
from moe_ep_bench.parent import end_with_parent

if TYPE_CHECKING:
    from moe_ep_bench.meeting import Nodes

# Above 0 where a job begins again: Slurm's count of requeues, torchrun's of its own restarts.
_RESTARTS = ("SLURM_RESTART_COUNT", "TORCHELASTIC_RESTART_COUNT")

_ITERATION_WORDS = "median (default), slowest, fastest or [LAUNCH/]BATCH/ITERATION"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; return its exit status. User mistakes are one line on stderr and status 2 (``complain``)."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.command is None:
        parser.print_help(sys.stderr)
        return USER_ERROR
    with tolerant_stderr():
        try:
            _go_on_after_restart(options)
            return options.command(options)
        except KeyboardInterrupt:
            return 128 + signal.SIGINT
        except Exception as error:
            if isinstance(error, BrokenPipeError) and _only_prints(options):
                _end_output()
                return OK
            return complain(error)


def _go_on_after_restart(options: argparse.Namespace) -> None:
    """Drop --force where a cluster or torchrun has restarted the job: its command line is as it was the first time."""
    restarts = [f"{name}={os.environ[name]}" for name in _RESTARTS if os.environ.get(name, "0") not in ("", "0")]
    if restarts and getattr(options, "force", False):
        options.force = False
        if os.environ.get("RANK", "0") == "0" and getattr(options, "node_rank", 0) == 0:
            why = f"{restarts[0]}: the job was restarted and goes on with what is left"
            print(f"moe-ep-bench: --force is passed over, {why}", file=sys.stderr)


def _only_prints(options: argparse.Namespace) -> bool:
    """Whether the command's result is what it prints, and not what it measures."""
    measures = options.command in (_run, _launch, _calibrate, _emulate, _reproduce, _validate)
    return not measures or getattr(options, "dry_run", False)


def _end_output() -> None:
    """Whoever read the output has seen enough; nor can what is still buffered be written at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="moe-ep-bench", description=__import__("moe_ep_bench").__doc__)
    version = __import__("moe_ep_bench").__version__
    parser.add_argument("--version", action="version", version=f"%(prog)s {version}")
    parser.set_defaults(command=None)
    commands = parser.add_subparsers(metavar="COMMAND")

    run = commands.add_parser("run", help="time a real expert-parallel layer; start it with torchrun")
    _add_config(run)
    run.add_argument("--dry-run", action="store_true", help="print cases, memory and time to expect; run nothing")
    _add_point(run)
    run.add_argument("--launch", type=int, default=0, help="which of measure.launches repetitions, from 0")
    run.set_defaults(command=_run)

    launch = commands.add_parser("launch", help="start `run` under torchrun and restart it after a lost process group")
    _add_config(launch)
    launch.add_argument("--dry-run", action="store_true", help="print cases, memory and time to expect; run nothing")
    _add_point(launch)
    _add_nodes(launch)
    launch.set_defaults(command=_launch)

    points = commands.add_parser("points", help="list the points of a config's sweep, a line each, for --point")
    points.add_argument("config", type=Path, metavar="CONFIG", help="a YAML file (configs/)")
    _add_overrides(points)
    points.add_argument("--on-cpu", action="store_true", help="as ranks on the CPU read the config (its key on_cpu)")
    points.set_defaults(command=_points)

    route = commands.add_parser("route", help="route on virtual ranks, without timing: loads, drops, activated experts")
    _add_config(route, profile=False)
    route.add_argument("--dry-run", action="store_true", help="print cases; route nothing")
    route.set_defaults(command=_route)

    quality = commands.add_parser("quality", help="judge what policies do to a language model's answers (transformers)")
    _add_config(quality, profile=False)
    quality.add_argument("--dry-run", action="store_true", help="print cases; load no weights")
    quality.set_defaults(command=_quality)

    accuracy = commands.add_parser("accuracy", help="run tasks of the lm-evaluation-harness under policies (lm_eval)")
    _add_config(accuracy, profile=False)
    accuracy.add_argument("--dry-run", action="store_true", help="print cases; load no weights and no data")
    accuracy.set_defaults(command=_accuracy)

    emulate = commands.add_parser("emulate", help="let this one device stand in for all expert-parallel ranks")
    _add_config(emulate, profile=False)
    emulate.add_argument("--dry-run", action="store_true", help="print cases and runs of a layer; run nothing")
    emulate.set_defaults(command=_emulate)

    reproduce = commands.add_parser("reproduce", help="emulate or run a config and set its papers' numbers beside ours")
    _add_config(reproduce, profile=False)
    reproduce.add_argument(
        "--nproc", type=int, metavar="N", help="time it on so many real ranks, as launch does, instead of emulating it"
    )
    reproduce.set_defaults(command=_reproduce)

    validate = commands.add_parser("validate", help="hold emulated ranks against real ones of this machine")
    _add_config(validate, profile=False, suffix="-validated")
    _add_nproc(validate)
    validate.set_defaults(command=_validate)

    advise = commands.add_parser("advise", help="say in words which policy pays, within bounds on what it drops")
    _add_config(advise, profile=False, config="a YAML file, emulated where its cases are not there yet; or a directory")
    advise.add_argument(
        "--max-dropped", type=float, default=0.10, metavar="SHARE", help="of top-k pairs, 0 to 1 (%(default)s)"
    )
    advise.add_argument(
        "--min-retained", type=float, default=0.95, metavar="SHARE", help="of the top-k's score mass (%(default)s)"
    )
    advise.set_defaults(command=_advise)

    calibrate = commands.add_parser("calibrate", help="measure this machine's all-to-all and write it as links")
    calibrate.add_argument(
        "--out", type=Path, metavar="FILE", help="the .yaml to write (default: results/calibration/links.yaml)"
    )
    calibrate.add_argument(
        "--max-bytes", type=int, metavar="N", help="largest message (default: 2^30 on GPUs, 2^26 on the CPU)"
    )
    calibrate.add_argument("--repetitions", type=int, default=20, metavar="N", help="of every message (%(default)s)")
    _add_nodes(calibrate)
    calibrate.set_defaults(command=_calibrate)

    doctor = commands.add_parser("doctor", help="say what this machine can do, and what each missing part costs")
    doctor.add_argument("config", type=Path, nargs="?", metavar="CONFIG", help="a YAML file that is to run here")
    doctor.add_argument("--out", type=Path, metavar="DIR", help="results directory (default: results/<config's name>)")
    doctor.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", dest="overrides", help="as for run")
    doctor.add_argument("--nproc", type=int, help="ranks on this node (default: as launch would start)")
    doctor.add_argument("--nnodes", type=int, default=1, help="nodes in all, each like this one")
    doctor.add_argument("--json", action="store_true", help="for scripts: the findings and the facts behind them")
    doctor.set_defaults(command=_doctor)

    summary = commands.add_parser("summary", help="print the table of a results directory")
    summary.add_argument("directory", type=Path, metavar="DIR")
    summary.set_defaults(command=_summary)

    compare = commands.add_parser("compare", help="set two results directories of the same cases side by side")
    compare.add_argument("base", type=Path, metavar="BASE")
    compare.add_argument("new", type=Path, metavar="NEW")
    compare.add_argument(
        "--fail-over", metavar="PERCENT", help="exit status 1 where a policy is slower by more than this, e.g. 3%%"
    )
    compare.add_argument("--strict", action="store_true", help="status 3 where that can neither be shown nor excluded")
    compare.add_argument(
        "--changed", metavar="KEYS", default="", help="conditions that differ on purpose, e.g. torch,driver"
    )
    compare.add_argument("--same-machine", action="store_true", help="native is no control: what slows it counts too")
    compare.add_argument("--json", action="store_true", help="for scripts")
    compare.set_defaults(command=_compare)

    export = commands.add_parser("export", help="write results as a Perfetto trace, LaTeX, Markdown or CSV")
    export.add_argument("directory", type=Path, metavar="DIR")
    export.add_argument("--to", required=True, metavar="FORMAT", help="perfetto, latex, markdown or csv")
    export.add_argument("--out", type=Path, metavar="FILE", help="the file to write (default: standard output)")
    export.add_argument(
        "--case", action="append", default=[], dest="cases", help="only this id, label or policy; may be repeated"
    )
    export.add_argument(
        "--iteration",
        action="append",
        default=[],
        dest="iterations",
        metavar="WHICH",
        help=f"of a trace: {_ITERATION_WORDS}, or all; may be repeated",
    )
    export.add_argument("--samples", action="store_true", help="CSV of every sample in place of the results")
    export.set_defaults(command=_export)

    plot = commands.add_parser("plot", help="draw the figures of one or several results directories")
    _add_plot(plot)
    plot.set_defaults(command=_plot)

    fit = commands.add_parser("fit", help="print a measured decode run's cost model as figures for configs/devices/")
    fit.add_argument("directory", type=Path, metavar="DIR")
    fit.add_argument(
        "--preset", metavar="NAME", help="only of this model of configs/models/, where the run has several"
    )
    fit.set_defaults(command=_fit)

    report = commands.add_parser(
        "report", help="write a results directory as one HTML file, to send and to open anywhere"
    )
    report.add_argument("directory", type=Path, metavar="DIR")
    report.add_argument("--out", type=Path, metavar="FILE", help="the file to write (default: DIR/report.html)")
    report.set_defaults(command=_report)

    trace = commands.add_parser("trace", help="look at recorded routing")
    actions = trace.add_subparsers(required=True, metavar="ACTION")
    info = actions.add_parser("info", help="print what a recording says of loads, scores and neighbours")
    info.add_argument("file", type=Path, metavar="FILE", help="a moe-trace-v1 file, or a .json of expert loads")
    info.add_argument("--out", type=Path, metavar="DIR", help="draw figures into this directory")
    info.set_defaults(command=_trace_info)
    thresholds = actions.add_parser("thresholds", help="derive the fields of the policy laser from a recording")
    thresholds.add_argument("file", type=Path, metavar="FILE", help="a moe-trace-v1 file")
    thresholds.add_argument(
        "--keep", type=float, default=0.25, help="share of tokens that keep their top-k (%(default)s)"
    )
    thresholds.set_defaults(command=_trace_thresholds)
    _add_record(actions.add_parser("record", help="record what a model's routers do with a text"))
    _add_import(actions.add_parser("import", help="make a moe-trace-v1 file of a recording that others wrote"))
    return parser


def _add_plot(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("directories", metavar="DIR", type=Path, nargs="+", help="what run, emulate or route wrote")
    parser.add_argument("--format", default="png,svg", help="comma-separated (%(default)s); numbers are CSV beside")
    parser.add_argument("--figures", help="comma-separated (default: all for which there are rows)")
    parser.add_argument("--out", type=Path, metavar="DIR", help="default: DIR/figures of one directory, else figures")
    parser.add_argument("--size", default="page", help="page, column (3.3 inches) or slide (16:9) (%(default)s)")
    parser.add_argument("--case", metavar="LABEL|ID", help="of timeline and latency (default: the fastest real effect)")
    parser.add_argument("--iteration", default="median", metavar="WHICH", help=f"of timeline: {_ITERATION_WORDS}")


def _add_record(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", type=Path, metavar="MODEL", help="a checkpoint's folder (transformers)")
    parser.add_argument("--text", type=Path, required=True, metavar="FILE", help="UTF-8 text")
    parser.add_argument("--out", type=Path, metavar="FILE", help="(default: recordings/MODEL-TEXT.safetensors)")
    parser.add_argument("--sequence-length", type=int, default=512, metavar="N", help="in tokens (%(default)s)")
    parser.add_argument("--num-sequences", type=int, metavar="N", help="(default: as many as the text has)")
    parser.add_argument("--batch", type=int, default=8, metavar="N", help="sequences at a time (%(default)s)")
    parser.add_argument("--dtype", choices=("auto", "float32", "bfloat16"), default="auto", help="(%(default)s)")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="(%(default)s)")
    parser.add_argument("--domain", help="what the text is about (default: its file's name)")
    parser.add_argument("--licence", default="unstated", help="of the text (%(default)s)")
    parser.set_defaults(command=_trace_record)


def _add_import(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("kind", metavar="KIND", help="esft, gpt-oss, megatron, sglang or vllm")
    parser.add_argument("source", type=Path, metavar="SOURCE", help="a checkout, directory or file")
    parser.add_argument("out", type=Path, metavar="OUT", help="the file to write; must not exist")
    for name, words in (
        ("preset", "a model of configs/models/"),
        ("model", "name of the model, without a preset"),
        ("domain", "part of a published recording; of others, what the texts are about"),
        ("phase", "prefill, decode, 'prefill and decode' or training"),
        ("licence", "of a recording of your own"),
        ("score-function", "softmax or sigmoid, for recorded logits"),
    ):
        parser.add_argument(f"--{name}", help=words)
    parser.add_argument("--num-experts", type=int, help="without a preset")
    parser.add_argument("--micro-batch-size", type=int, default=1, help="sequences interleaved in a forward pass")
    parser.add_argument("--assume-equal-scores", action="store_true", help="accept a recording of expert ids only")
    parser.set_defaults(command=_trace_import)


def _add_point(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--point",
        type=int,
        metavar="I",
        help="measure only this point of the config's sweep, from 0 (see `points`); other jobs may fill the same "
        "results directory with others meanwhile",
    )


def _add_nodes(parser: argparse.ArgumentParser) -> None:
    _add_nproc(parser)
    parser.add_argument("--nnodes", type=int, default=1, help="nodes in all")
    parser.add_argument("--node-rank", type=int, default=0, help="this node, from 0")
    parser.add_argument("--master", default="127.0.0.1:0", help="host:port of node 0 (one node: any free port)")


def _add_nproc(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--nproc", type=int, help="ranks on this node (default: all GPUs, else one per core, 2 to 4)")


def _add_config(
    parser: argparse.ArgumentParser, *, profile: bool = True, config: str = "a YAML file (configs/)", suffix: str = ""
) -> None:
    parser.add_argument("config", type=Path, metavar="CONFIG", help=config)
    folder = f"results directory (default: results/<config's name>{suffix})"
    parser.add_argument("--out", type=Path, metavar="DIR", help=folder)
    _add_overrides(parser)
    parser.add_argument("--force", action="store_true", help="do finished cases again")
    if profile:
        parser.add_argument(
            "--profile",
            metavar="CASE",
            help="instead of timing, write one iteration of a case (its id, label or policy) per rank as a trace",
        )


def _add_overrides(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        dest="overrides",
        help="replace a value of the config, e.g. workload.peak_load=4; may be repeated",
    )


def default_out(config: Path) -> Path:
    """``results/<config's name>`` of this repository, wherever the command was started."""
    return Path(__file__).resolve().parents[1] / "results" / config.stem


def _run(options: argparse.Namespace) -> int:
    end_with_parent()
    from moe_ep_bench.scopes import run

    if options.dry_run:
        return run.dry_run(options.config, options.overrides, int(os.environ.get("WORLD_SIZE", "1")), options.point)
    out = options.out or default_out(options.config)
    return run.run(
        options.config,
        out,
        options.overrides,
        launch=options.launch,
        force=options.force,
        profile=options.profile,
        point=options.point,
    )


def _launch(options: argparse.Namespace) -> int:
    from moe_ep_bench import launcher
    from moe_ep_bench.scopes import run

    nodes = _nodes(options)
    if options.dry_run:
        return run.dry_run(options.config, options.overrides, nodes.nproc * nodes.count, options.point)
    return launcher.launch(
        options.config,
        options.out or default_out(options.config),
        options.overrides,
        nodes,
        force=options.force,
        profile=options.profile,
        point=options.point,
    )


def _nodes(options: argparse.Namespace) -> Nodes:
    """Where ranks are to be started.

    Raises:
        ValueError: there would be none.
    """
    from moe_ep_bench.launcher import Nodes, default_nproc

    nproc = options.nproc if options.nproc is not None else default_nproc()
    return Nodes(nproc, options.nnodes, options.node_rank, options.master)


def _points(options: argparse.Namespace) -> int:
    import json

    from moe_ep_bench.config import load_experiments

    for number, experiment in enumerate(load_experiments(options.config, options.overrides, on_cpu=options.on_cpu)):
        print(number, *(f"{key}={json.dumps(value, default=str)}" for key, value in experiment.point))
    return OK


def _route(options: argparse.Namespace) -> int:
    from moe_ep_bench.analysis.route_figures import draw_route_figures
    from moe_ep_bench.analysis.route_load import load_route
    from moe_ep_bench.analysis.route_report import drawn_words, route_table
    from moe_ep_bench.scopes import route

    if options.dry_run:
        return route.dry_run(options.config, options.overrides)
    directory = route.route(
        options.config, options.out or default_out(options.config), options.overrides, force=options.force
    )
    loaded = load_route(directory.root)
    print(route_table(loaded))
    print(drawn_words(*draw_route_figures(loaded, directory.root / "figures")))
    return OK


def _quality(options: argparse.Namespace) -> int:
    from moe_ep_bench.analysis.quality_figures import draw_quality_figures
    from moe_ep_bench.analysis.quality_orderings import quality_text
    from moe_ep_bench.analysis.quality_report import load_quality_results
    from moe_ep_bench.analysis.route_report import drawn_words
    from moe_ep_bench.scopes import quality

    if options.dry_run:
        return quality.dry_run(options.config, options.overrides)
    out = options.out or default_out(options.config)
    directory = quality.quality(options.config, out, options.overrides, force=options.force)
    comparisons = load_quality_results(directory.root)
    print(quality_text(comparisons))
    print(drawn_words(*draw_quality_figures(comparisons, directory.root / "figures")))
    return OK


def _accuracy(options: argparse.Namespace) -> int:
    from moe_ep_bench.analysis.accuracy_report import accuracy_text, load_accuracy_results
    from moe_ep_bench.scopes import accuracy

    if options.dry_run:
        return accuracy.dry_run(options.config, options.overrides)
    out = options.out or default_out(options.config)
    directory = accuracy.accuracy(options.config, out, options.overrides, force=options.force)
    print(accuracy_text(load_accuracy_results(directory.root)))
    return OK


def _trace_info(options: argparse.Namespace) -> int:
    from moe_ep_bench.analysis.trace_report import trace_info

    print(trace_info(options.file, options.out))
    return OK


def _trace_thresholds(options: argparse.Namespace) -> int:
    import yaml

    from moe_ep_bench.thresholds import laser_thresholds

    derived = laser_thresholds(options.file, options.keep)
    print(yaml.safe_dump([{"name": "laser", **derived}], sort_keys=False, default_flow_style=None), end="")
    return OK


def _trace_record(options: argparse.Namespace) -> int:
    from moe_ep_bench.hf.recording import RecordOptions, record_trace

    name = f"{options.model.resolve().name}-{options.text.stem}.safetensors"
    out = options.out or default_out(Path("any")).parents[1] / "recordings" / name
    chosen = {field.name: getattr(options, field.name) for field in dataclasses.fields(RecordOptions)}
    print(record_trace(options.model, options.text, out, RecordOptions(**chosen)).text())
    return OK


def _trace_import(options: argparse.Namespace) -> int:
    from moe_ep_bench.workload.importers import ImportOptions, import_trace

    chosen = {field.name: getattr(options, field.name) for field in dataclasses.fields(ImportOptions)}
    print(import_trace(options.kind, options.source, options.out, ImportOptions(**chosen)).text())
    return OK


def _calibrate(options: argparse.Namespace) -> int:
    end_with_parent()
    out = options.out or default_out(Path("calibration")) / "links.yaml"
    if "RANK" in os.environ:  # torchrun's, or our own launcher's below
        from moe_ep_bench.scopes.calibrate import calibrate

        return calibrate(out, max_bytes=options.max_bytes, repetitions=options.repetitions)
    from moe_ep_bench import launcher

    arguments = ["--out", str(out.absolute()), "--repetitions", str(options.repetitions)]
    arguments += ["--max-bytes", str(options.max_bytes)] if options.max_bytes is not None else []
    return launcher.launch_calibrate(arguments, _nodes(options))


def _doctor(options: argparse.Namespace) -> int:
    from moe_ep_bench.doctor.examine import Request, doctor

    out = options.out or (default_out(options.config) if options.config else default_out(Path("any")).parent)
    request = Request(out, options.config, options.overrides, options.nproc, options.nnodes)
    return doctor(request, as_json_text=options.json)


def _emulate(options: argparse.Namespace) -> int:
    from moe_ep_bench.scopes.emulate import dry_run, emulate

    if options.dry_run:
        return dry_run(options.config, options.overrides)
    out = options.out or default_out(options.config)
    status = emulate(options.config, out, options.overrides, force=options.force)
    return _shown(status, lambda: f"{_table_of(out)}\n\nin {out}; python plot_results.py {out} draws it")


def _shown(status: int, report: Callable[[], str]) -> int:
    """Print what a command that ended with ``status`` found, where there is anything; the status to end with."""
    from moe_ep_bench.analysis.load import ResultsError

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


def _reproduce(options: argparse.Namespace) -> int:
    from moe_ep_bench.analysis.claims import load_claims
    from moe_ep_bench.analysis.claims_report import write_claims
    from moe_ep_bench.analysis.claims_text import claims_text
    from moe_ep_bench.scopes.reproduce import reproduce

    out = options.out or default_out(options.config)
    status = reproduce(options.config, out, options.overrides, force=options.force, nproc=options.nproc)

    def report() -> str:
        claims = load_claims(out)
        write_claims(claims)
        return claims_text(claims)

    return _shown(status, report)


def _validate(options: argparse.Namespace) -> int:
    from moe_ep_bench import launcher
    from moe_ep_bench.analysis.validation import load_validation
    from moe_ep_bench.analysis.validation_report import validation_text, write_report
    from moe_ep_bench.scopes.validate import validate

    out = options.out or default_out(Path(f"{options.config.stem}-validated"))
    nproc = options.nproc if options.nproc is not None else launcher.default_nproc()
    status = validate(options.config, out, options.overrides, nproc, force=options.force)

    def report() -> str:
        validation = load_validation(out)
        write_report(validation)
        return validation_text(validation)

    return _shown(status, report)


def _advise(options: argparse.Namespace) -> int:
    from moe_ep_bench.analysis.advice import Bounds
    from moe_ep_bench.analysis.load import check_timed
    from moe_ep_bench.analysis.whole_advice import advice_of

    bounds = Bounds(options.max_dropped, options.min_retained)
    if not options.config.is_dir():
        from moe_ep_bench.scopes.emulate import emulate

        out = options.out or default_out(options.config)
        status = emulate(options.config, out, options.overrides, force=options.force)
        return _shown(status, lambda: advice_of(out, bounds))
    if options.out or options.overrides or options.force:
        raise ValueError(f"{options.config}: a directory is only read; --out, --set and --force go with a config")
    check_timed(options.config)
    print(advice_of(options.config, bounds))
    return OK


def _fit(options: argparse.Namespace) -> int:
    from moe_ep_bench.analysis.decode_fit import fit_text
    from moe_ep_bench.analysis.load import check_timed, load_run

    check_timed(options.directory)
    print(fit_text(load_run(options.directory), options.preset))
    return OK


def _compare(options: argparse.Namespace) -> int:
    from moe_ep_bench.analysis.compare import compare_directories
    from moe_ep_bench.analysis.compare_report import compare_json, compare_text, exit_status, parse_limit

    limit = None if options.fail_over is None else parse_limit(options.fail_over)
    if options.strict and limit is None:
        raise ValueError("--strict: expected --fail-over beside it")
    changed = [key for key in options.changed.split(",") if key]
    change = compare_directories(options.base, options.new, intended=changed, same_machine=options.same_machine)
    print(compare_json(change, limit, strict=options.strict) if options.json else compare_text(change, limit))
    return exit_status(change, limit, strict=options.strict)


def _export(options: argparse.Namespace) -> int:
    from moe_ep_bench.analysis.export import export

    export(
        options.directory,
        options.to,
        options.out,
        cases=options.cases,
        iterations=options.iterations,
        samples=options.samples,
    )
    return OK


def _plot(options: argparse.Namespace) -> int:
    from moe_ep_bench.analysis.plot import plot

    return plot(options, lambda line: print(f"moe-ep-bench: {line}", file=sys.stderr))


def _report(options: argparse.Namespace) -> int:
    from moe_ep_bench.analysis.report.page import write_report

    page, passed_over = write_report(options.directory, options.out)
    for line in passed_over:
        print(f"moe-ep-bench: {line}", file=sys.stderr)
    print(os.path.relpath(page))
    return CASES_FAILED if passed_over else OK


def _summary(options: argparse.Namespace) -> int:
    from moe_ep_bench.analysis.accuracy_report import accuracy_text, load_accuracy_results
    from moe_ep_bench.analysis.load import is_accuracy, is_quality
    from moe_ep_bench.analysis.quality_orderings import quality_text
    from moe_ep_bench.analysis.quality_report import load_quality_results
    from moe_ep_bench.analysis.route_load import is_route, load_route
    from moe_ep_bench.analysis.route_report import route_table
    from moe_ep_bench.analysis.validation import is_validation, load_validation
    from moe_ep_bench.analysis.validation_report import validation_text

    if is_validation(options.directory):
        print(validation_text(load_validation(options.directory)))
    elif is_route(options.directory):
        print(route_table(load_route(options.directory)))
    elif is_quality(options.directory):
        print(quality_text(load_quality_results(options.directory)))
    elif is_accuracy(options.directory):
        print(accuracy_text(load_accuracy_results(options.directory)))
    else:
        print(_table_of(options.directory))
    return OK


def _table_of(directory: Path) -> str:
    """The table of a directory of times, of layers or of whole models."""
    from moe_ep_bench.analysis.load import is_whole, load_run
    from moe_ep_bench.analysis.summary import summary_table
    from moe_ep_bench.analysis.whole import load_whole, whole_table

    return whole_table(load_whole(directory)) if is_whole(directory) else summary_table(load_run(directory))
