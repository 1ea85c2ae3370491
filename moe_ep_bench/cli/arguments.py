"""The commands' names, arguments and help."""

from __future__ import annotations

import argparse
import functools
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from moe_ep_bench.errors import brief, did_you_mean, printable
from moe_ep_bench.runtime.exit_codes import USER_ERROR

# ``papers`` takes a config; with this action in its place it is a command of its own.
PAPERS_LIST = "papers list"

_FORMATS = "text, md, latex, csv, json or html"


def with_list_joined(arguments: Sequence[str]) -> list[str]:
    """``papers list`` as the one command that the parser knows."""
    is_list = list(arguments[:2]) == PAPERS_LIST.split()
    return [PAPERS_LIST, *arguments[2:]] if is_list else list(arguments)


def whole_number(text: str) -> int:
    """Read an option; ArgumentTypeError where it is none."""
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected a whole number such as 32768, got {brief(text)}") from None


def real_number(text: str) -> float:
    """Likewise."""
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected a number, got {brief(text)}") from None


class _Parser(argparse.ArgumentParser):
    """Says a mistake in one line, without the usage of all options."""

    def __init__(self, **how: Any) -> None:
        super().__init__(**how)
        self.register("type", int, whole_number)
        self.register("type", float, real_number)

    def error(self, message: str) -> NoReturn:
        said = message.removeprefix("argument ").replace("unrecognized arguments", "expected no such arguments")
        if choice := re.fullmatch(r"(.*): invalid choice: '?(.*?)'? \(choose from (.*)\)", said):
            what, got, names = choice[1], choice[2], choice[3].replace("'", "").split(", ")
            said = f"{what}: expected one of {', '.join(names)}; got {brief(got)}{did_you_mean(got, names)}"
        if "=" in said.rpartition(" ")[2] and said.startswith("expected no such"):
            said += "; --set KEY=VALUE replaces a value of the config"
        self.exit(USER_ERROR, f"{printable(f'moe-ep-bench: {said}')} ({self.prog} --help)\n")


@functools.cache
def make_parser() -> argparse.ArgumentParser:
    """The parser of all commands; ``command`` of what it parses is the name of one, or None.

    An action of ``trace`` is part of its name.
    """
    package = __import__("moe_ep_bench")
    parser = _Parser(prog="moe-ep-bench", description=package.__doc__)
    parser.add_argument("--version", action="version", version=f"%(prog)s {package.__version__}")
    parser.set_defaults(command=None)
    commands = parser.add_subparsers(metavar="COMMAND")

    def add(name: str, text: str) -> argparse.ArgumentParser:
        added = commands.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.")
        added.set_defaults(command=name)
        return added

    run = add("run", "time an expert-parallel layer or model on real ranks, which it starts")
    _add_config(run, dry_run="print cases, memory and iterations to expect; run nothing")
    run.add_argument("--profile", metavar="CASE", help="trace one iteration of a case (id, label or policy) per rank")
    run.add_argument("--list-points", action="store_true", help="print the points of the sweep, one per line, and end")
    run.add_argument(
        "--point", type=int, metavar="I", help="run one point of --list-points, from 0; other jobs may run the others"
    )
    run.add_argument("--launch", type=int, metavar="I", help="under torchrun: which of measure.launches, from 0")
    _add_nproc(run)
    _add_cpu(run, ", or with --list-points list what it would run")

    emulate = add("emulate", "time one rank after the other on this device; model the links, or all")
    _add_config(emulate, dry_run="print cases and the number of layer runs; run nothing")
    _add_cpu(emulate)
    route = add("route", "route without timing: loads, drops, activated experts")
    _add_config(route, dry_run="print cases; route nothing")

    _add_advise(add("advise", "find the fastest policy within bounds on what it drops"))

    validate = add("validate", "compare emulated ranks with real ones on this machine")
    _add_config(validate, suffix="-validated")
    validate.add_argument(
        "--margin",
        metavar="SHARE",
        default="3%",
        help="difference of equivalent speedups at most (default: %(default)s)",
    )
    _add_nproc(validate)
    _add_cpu(validate)

    papers = add("papers", "emulate or run a config and print papers' numbers beside ours")
    _add_config(papers)
    papers.add_argument("--nproc", type=int, metavar="N", help="run it on N real ranks instead of emulating it")
    _add_cpu(papers)

    listed = add(PAPERS_LIST, "print the numbers that papers publish")
    listed.add_argument(
        "paper", metavar="PAPER", nargs="?", help="capacity, oea, laser, xshare or an arXiv id (default: all)"
    )
    listed.add_argument("--json", action="store_true", help="print a list of objects, one for each number")

    quality = add("quality", "measure what policies do to a language model's answers, or to its tasks")
    _add_config(quality, dry_run="print cases; load no weights and no data")
    _add_cpu(quality)

    calibrate = add("calibrate", "measure this machine's all-to-all")
    calibrate.add_argument("--out", type=Path, metavar="FILE", help="default: results/calibration/links.yaml")
    calibrate.add_argument("--max-bytes", type=int, metavar="N", help="largest message (default: 2^30; CPU: 2^26)")
    _add_value(calibrate, "--repetitions", 20, "N", "of each message")
    _add_nproc(calibrate)
    _add_cpu(calibrate)

    _add_trace(add("trace", "inspect, record or import routing recordings"))

    checked = add("check-policy", "hold a policy to the laws that every policy keeps")
    checked.add_argument("policy", metavar="NAME", help="a policy, package.module:Class or my_policy.py:Class")
    _add_repeated(checked, "--set", "FIELD=VALUE", "a field of it; repeatable", dest="fields")

    schema = add("schema", "print a JSON schema of configs, by which editors complete them")
    schema.add_argument("configs", metavar="CONFIGS", nargs="?", default="run", help="run (default) or quality")

    doctor = add("doctor", "check this machine: what works, and what each missing part costs")
    doctor.add_argument(
        "--out", type=Path, metavar="DIR", default=Path("results"), help="results directory (%(default)s)"
    )
    _add_nproc(doctor)

    show = add("show", "print the tables of results directories, or write them in another format")
    show.add_argument("directories", type=Path, metavar="DIR", nargs="+")
    _add_value(show, "--format", "text", "FORMAT", _FORMATS)
    show.add_argument(
        "--out", type=Path, metavar="FILE", help="file to write (default: standard output; html: DIR/report.html)"
    )
    _add_repeated(show, "--case", "CASE", "only this id, label or policy; may be repeated")
    _add_value(show, "--view", "", "VIEWS", "other tables, comma-separated: rates, phases, ranks, layers")
    _add_value(show, "--columns", "", "COLUMNS", "of the frame, comma-separated, in place of a table's own")
    show.add_argument("--samples", action="store_true", help="csv, json: every sample instead of the results")

    plot = add("plot", "draw the figures of one or several results directories")
    plot.add_argument("directories", metavar="DIR", type=Path, nargs="+", help="results directories")
    plot.add_argument("--format", default="png,svg", help="comma-separated (%(default)s); a CSV is written beside each")
    plot.add_argument("--figures", help="comma-separated (default: all for which there are rows)")
    plot.add_argument("--out", type=Path, metavar="DIR", help="default: DIR/figures of one directory, else figures")
    _add_value(plot, "--size", "page", "SIZE", "page, column (3.3 inches) or slide (16:9)")
    of_any = plot.add_argument_group("any column against any other, in place of the figures")
    for name, words in (
        ("x", "along the bottom"),
        ("y", "upright, means"),
        ("by", "a line for each value (default: policies)"),
    ):
        of_any.add_argument(f"--{name}", metavar="COLUMN", help=words)
    of_any.add_argument("--facet", metavar="COLUMN", help="a panel for each value (default: comparisons)")
    of_any.add_argument("--where", metavar="EXPR", help="rows, such as \"policy == 'oea' and num_ranks == 8\"")
    plot.add_argument("--case", metavar="CASE", help="of timeline (default: the fastest that costs little)")

    compare = add("compare", "compare two results directories of the same cases")
    compare.add_argument("base", type=Path, metavar="BASE")
    compare.add_argument("new", type=Path, metavar="NEW")
    compare.add_argument("--fail-over", metavar="PERCENT", help="exit 1 where a policy is slower by more, e.g. 3%%")
    compare.add_argument("--strict", action="store_true", help="exit 3 where that is inconclusive")
    compare.add_argument(
        "--changed", metavar="KEYS", default="", help="conditions that differ on purpose, e.g. torch,driver"
    )
    compare.add_argument("--same-machine", action="store_true", help="count changes of native too: it is no control")
    compare.add_argument("--json", action="store_true", help="print JSON")
    return parser


def _add_config(
    parser: argparse.ArgumentParser, *, config: str = "a YAML file (configs/)", suffix: str = "", dry_run: str = ""
) -> None:
    parser.add_argument("config", type=Path, metavar="CONFIG", help=config)
    out = f"results directory (default: results/<config's name>{suffix})"
    parser.add_argument("--out", type=Path, metavar="DIR", help=out)
    _add_overrides(parser)
    parser.add_argument("--force", action="store_true", help="repeat finished cases")
    if dry_run:
        parser.add_argument("--dry-run", action="store_true", help=dry_run)


def _add_advise(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "config", type=Path, nargs="?", metavar="CONFIG", help="a YAML file, or a results directory; or give --model"
    )
    parser.add_argument("--model", metavar="MODEL", help="a model of data/models/, or a Hugging Face config.json")
    parser.add_argument("--ep", type=int, metavar="N", help="expert-parallel ranks")
    parser.add_argument("--tokens", type=int, metavar="N", help="tokens of a batch, all ranks together")
    parser.add_argument(
        "--decode-tokens",
        type=int,
        metavar="N",
        help="of decode, in place of --tokens: requests of a step, all ranks together",
    )
    parser.add_argument("--context", type=int, metavar="N", help="of decode: tokens in each request's cache (2048)")
    parser.add_argument("--prompt-length", type=int, metavar="N", help="tokens of a prompt (128)")
    parser.add_argument(
        "--dtype", metavar="NAME", help="of the experts: bfloat16, or one of a table, such as fp8_block"
    )
    parser.add_argument("--device", metavar="NAME", help="of data/devices/ (h100-sxm), or a table")
    parser.add_argument("--links", metavar="NAME", help="of data/links/, or a table (those of the device)")
    parser.add_argument(
        "--transport", choices=("pairs", "copies"), help="what is sent: NCCL's pairs or DeepEP's copies"
    )
    parser.add_argument("--dispatch-dtype", choices=("bf16", "fp8"), help="of dispatched rows (the layer's)")
    traffic = parser.add_argument_group("traffic (default: several peak loads)")
    traffic.add_argument("--trace", type=Path, metavar="FILE", help="a moe-trace-v1 recording")
    traffic.add_argument("--counts", type=Path, metavar="FILE", help="how often a server chose each expert (JSON, npz)")
    traffic.add_argument("--peak-load", type=float, metavar="X", help="load of the busiest expert over the mean")
    bounds = parser.add_argument_group("bounds (default: 10% dropped and 5% lost mass; one alone binds alone)")
    bounds.add_argument("--max-dropped", metavar="SHARE", help="most top-k pairs dropped, e.g. 5%%")
    bounds.add_argument("--max-lost-mass", metavar="SHARE", help="most score mass of the top-k lost, e.g. 1%%")
    parser.add_argument("--all", action="store_true", help="print every candidate")
    parser.add_argument("--out", type=Path, metavar="DIR", help="results directory (default: results/advise-...)")
    _add_overrides(parser)
    parser.add_argument("--force", action="store_true", help="repeat finished cases")
    parser.add_argument("--dry-run", action="store_true", help="print candidates, traffic and time; run nothing")


def _add_overrides(parser: argparse.ArgumentParser) -> None:
    text = "replace a value of the config, e.g. workload.peak_load=4; may be repeated"
    _add_repeated(parser, "--set", "KEY=VALUE", text, dest="overrides")


def _add_nproc(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--nproc", type=int, help="ranks on this node (default: all GPUs, else one per core, 2 to 4)")


def _add_cpu(parser: argparse.ArgumentParser, more: str = "") -> None:
    parser.add_argument("--cpu", action="store_true", help=f"measure on the CPU, also beside GPUs{more}")


def _add_repeated(parser: argparse.ArgumentParser, name: str, metavar: str, text: str, dest: str | None = None) -> None:
    parser.add_argument(name, action="append", default=[], metavar=metavar, dest=dest, help=text)


def _add_value(parser: argparse.ArgumentParser, name: str, default: object, metavar: str, text: str) -> None:
    """An option of its default's type; the help says the default."""
    parser.add_argument(name, type=type(default), default=default, metavar=metavar, help=f"{text} (%(default)s)")


def _add_trace(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(required=True, metavar="ACTION")
    info = actions.add_parser("info", help="print what a recording holds")
    info.add_argument("file", type=Path, metavar="FILE", help="a moe-trace-v1 file")
    info.set_defaults(command="trace info")

    thresholds = actions.add_parser("thresholds", help="derive fields of the policy laser")
    thresholds.add_argument("file", type=Path, metavar="FILE", help="a moe-trace-v1 file")
    _add_value(thresholds, "--keep", 0.25, "SHARE", "share of tokens that keep their top-k")
    thresholds.add_argument("--budget", help=argparse.SUPPRESS)
    thresholds.set_defaults(command="trace thresholds")

    eplb = actions.add_parser("eplb", help="plan replicas for its loads; write which expert each slot holds (SGLang)")
    eplb.add_argument("file", type=Path, metavar="FILE", help="a moe-trace-v1 file, or a .json of expert loads")
    eplb.add_argument("out", type=Path, metavar="OUT", help="the JSON file to write")
    eplb.add_argument("--ep", type=int, required=True, metavar="N", help="expert-parallel ranks")
    eplb.add_argument("--spare-per-rank", type=int, required=True, metavar="N", help="slots beyond a rank's share")
    _add_value(eplb, "--nodes", 1, "N", "nodes of neighbouring ranks")
    eplb.add_argument("--preset", metavar="MODEL", help="its model: rows for dense layers too, groups kept on nodes")
    eplb.set_defaults(command="trace eplb")

    record = actions.add_parser("record", help="record a checkpoint's routing of a text")
    record.add_argument("model", type=Path, metavar="MODEL", help="a checkpoint's folder (transformers)")
    record.add_argument("--text", type=Path, required=True, metavar="FILE", help="UTF-8 text")
    record.add_argument("--out", type=Path, metavar="FILE", help="default: recordings/MODEL-TEXT.safetensors")
    text = "measure how alike the experts are, for the policy sere; without --out, record nothing"
    record.add_argument("--similarity", type=Path, metavar="FILE", help=text)
    _add_value(record, "--sequence-length", 512, "N", "in tokens")
    record.add_argument("--num-sequences", type=int, metavar="N", help="default: as many as the text has")
    _add_value(record, "--batch", 8, "N", "sequences at a time")
    record.add_argument("--dtype", choices=("auto", "float32", "bfloat16"), default="auto", help="(%(default)s)")
    record.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="(%(default)s)")
    record.add_argument("--domain", help="subject of the text (default: its file's name)")
    _add_value(record, "--licence", "unstated", "LICENCE", "of the text")
    record.set_defaults(command="trace record")

    imported = actions.add_parser("import", help="convert another program's recording to moe-trace-v1")
    imported.add_argument("kind", metavar="KIND", help="esft, flame-moe, megatron, sglang or vllm")
    imported.add_argument("source", type=Path, metavar="SOURCE", help="a checkout, directory or file")
    imported.add_argument("out", type=Path, metavar="OUT", help="the file to write; must not exist")
    for name, text in (
        ("preset", "the model, or its config.json; needed by megatron, sglang and vllm"),
        ("model", "name of the model, of flame-moe"),
        ("domain", "part of a published recording; of others, the subject of the texts"),
        ("phase", "prefill, decode or training"),
        ("licence", "of a recording of your own"),
    ):
        imported.add_argument(f"--{name}", help=text)
    imported.add_argument("--num-experts", type=int, help="of flame-moe")
    imported.add_argument("--micro-batch-size", type=int, help="of megatron: sequences interleaved in a forward pass")
    text = "accept a recording of expert ids only"
    imported.add_argument("--assume-equal-scores", action="store_true", default=None, help=text)
    imported.set_defaults(command="trace import")
