"""The commands. Thin: each parses its arguments and calls the module that does the work."""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from moe_ep_bench.exit_codes import OK, USER_ERROR


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; return its exit status. User mistakes are one line on stderr and status 2."""
    options = _parser().parse_args(arguments)
    try:
        return options.command(options)
    except ValueError as error:
        print(f"moe-ep-bench: {error}", file=sys.stderr)
        return USER_ERROR
    except BrokenPipeError:
        # Whoever read the output has seen enough; nor can what is still buffered be written at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return OK


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="moe-ep-bench", description=__import__("moe_ep_bench").__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    run = commands.add_parser("run", help="time a real expert-parallel layer; start it with torchrun")
    _add_config(run)
    run.add_argument("--dry-run", action="store_true", help="print cases, memory and time to expect; run nothing")
    run.add_argument("--launch", type=int, default=0, help="which of measure.launches repetitions, from 0")
    run.set_defaults(command=_run)

    launch = commands.add_parser("launch", help="start `run` under torchrun and restart it after a lost process group")
    _add_config(launch)
    launch.add_argument("--dry-run", action="store_true", help="print cases, memory and time to expect; run nothing")
    launch.add_argument("--nproc", type=int, help="ranks on this node (default: all GPUs, else one per core, 2 to 4)")
    launch.add_argument("--nnodes", type=int, default=1, help="nodes in all")
    launch.add_argument("--node-rank", type=int, default=0, help="this node, from 0")
    launch.add_argument("--master", default="127.0.0.1:0", help="host:port of node 0 (one node: any free port)")
    launch.set_defaults(command=_launch)

    summary = commands.add_parser("summary", help="print the table of a results directory")
    summary.add_argument("directory", type=Path, metavar="DIR")
    summary.set_defaults(command=_summary)

    trace = commands.add_parser("trace", help="look at recorded routing")
    actions = trace.add_subparsers(required=True, metavar="ACTION")
    info = actions.add_parser("info", help="print what a recording says of loads, scores and neighbours")
    info.add_argument("file", type=Path, metavar="FILE", help="a moe-trace-v1 file, or a .json of expert loads")
    info.add_argument("--out", type=Path, metavar="DIR", help="draw figures into this directory")
    info.set_defaults(command=_trace_info)
    _add_import(actions.add_parser("import", help="make a moe-trace-v1 file of a recording that others wrote"))
    return parser


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


def _add_config(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", type=Path, metavar="CONFIG", help="a YAML file (configs/)")
    parser.add_argument("--out", type=Path, metavar="DIR", help="results directory (default: results/<config's name>)")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        dest="overrides",
        help="replace a value of the config, e.g. workload.peak_load=4; may be repeated",
    )
    parser.add_argument("--force", action="store_true", help="measure finished cases again")
    parser.add_argument(
        "--profile",
        metavar="CASE",
        help="instead of timing, write one iteration of a case (its id, label or policy) per rank as a trace",
    )


def default_out(config: Path) -> Path:
    """``results/<config's name>`` of this repository, wherever the command was started."""
    return Path(__file__).resolve().parents[1] / "results" / config.stem


def _run(options: argparse.Namespace) -> int:
    from moe_ep_bench.scopes import run

    if options.dry_run:
        return run.dry_run(options.config, options.overrides, int(os.environ.get("WORLD_SIZE", "1")))
    out = options.out or default_out(options.config)
    return run.run(
        options.config,
        out,
        options.overrides,
        launch=options.launch,
        force=options.force,
        profile=options.profile,
    )


def _launch(options: argparse.Namespace) -> int:
    from moe_ep_bench import launcher
    from moe_ep_bench.scopes import run

    nproc = options.nproc or launcher.default_nproc()
    if options.dry_run:
        return run.dry_run(options.config, options.overrides, nproc * options.nnodes)
    nodes = launcher.Nodes(nproc, options.nnodes, options.node_rank, options.master)
    return launcher.launch(
        options.config,
        options.out or default_out(options.config),
        options.overrides,
        nodes,
        force=options.force,
        profile=options.profile,
    )


def _trace_info(options: argparse.Namespace) -> int:
    from moe_ep_bench.analysis.trace_report import trace_info

    print(trace_info(options.file, options.out))
    return OK


def _trace_import(options: argparse.Namespace) -> int:
    from moe_ep_bench.workload.importers import ImportOptions, import_trace

    chosen = {field.name: getattr(options, field.name) for field in dataclasses.fields(ImportOptions)}
    print(import_trace(options.kind, options.source, options.out, ImportOptions(**chosen)).text())
    return OK


def _summary(options: argparse.Namespace) -> int:
    from moe_ep_bench.analysis.load import load_run
    from moe_ep_bench.analysis.summary import summary_table

    print(summary_table(load_run(options.directory)))
    return OK
