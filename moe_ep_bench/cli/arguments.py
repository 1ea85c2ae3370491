"""The commands' names, arguments and help, as one text, and the parser that follows it.

A line that begins at the margin is a command, and what it does. Each line below is an argument: its name (an option's,
or where a word without one is kept), what help calls its value, and, after two spaces, what it means. A value's name
says its type (``TYPES``). It may be followed by ``?`` (may be left out), ``+`` (one or more), ``*`` (an option that may
be repeated), ``!`` (an option that is required) and ``= default``. ``@`` stands for the lines of that name in
``_SHARED``, brackets for a group of options.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import moe_ep_bench
from moe_ep_bench.errors import USER_ERROR
from moe_ep_bench.machine.commit import commit_of

_SHARED = {
    "config": """\
  config CONFIG  a YAML file (configs/)
  @results
""",
    "results": """\
  --out DIR  results directory (default: results/NAME of the config; validate: results/NAME-validated)
  @set
  --force  repeat finished cases
""",
    "set": "  --set KEY=VALUE*  replace a value of the config, e.g. workload.peak_load=4; may be repeated\n",
    "nproc": "  --nproc N  ranks on this node (default: all GPUs, else one per core, 2 to 4)\n",
    "sharing": """\
  --share-gpu  rehearse: start --nproc ranks on fewer GPUs; nothing is timed
  --staged  with --share-gpu: pass collectives through the host, where NCCL is older than 2.30 or ranks are on the CPU
""",
    "cpu": "  --cpu  measure on the CPU, even if there are GPUs\n",
}

_COMMANDS = """
run  start real ranks and time an expert-parallel layer or model on them
  @config
  --dry-run  print cases, memory and iterations to expect; run nothing
  --list-points  print the points of the sweep, one per line, and end (with --cpu: of the CPU)
  --point I  run one point of --list-points, from 0; other jobs may run the others
  --launch I  under torchrun: which of measure.launches, from 0
  @nproc
  @sharing
  @cpu
emulate  time one rank after the other on this device; model the links, or everything
  @config
  --dry-run  print cases and the number of layer runs; run nothing
  @cpu
route  route without timing: loads, drops, activated experts
  @config
  --dry-run  print cases; route nothing
advise  find the fastest policy within bounds on what it drops
  config CONFIG?  a YAML file, or a results directory; or give --model
  --model MODEL  a model of data/models/, also by its Hugging Face id, or a config.json
  --ep N  expert-parallel ranks
  --tokens N  tokens of a batch, all ranks together
  --decode-tokens N  for decode, instead of --tokens: requests of a step, all ranks together
  --out DIR  results directory (default: results/advise-...)
  @set
  --force  repeat finished cases
  --dry-run  print candidates, traffic and the config; run nothing
  --versus LABEL  set all candidates against this one too, paired
  --json  print the answer as advice.json has it
  [traffic (one of these, or --set; none: answers for balanced, typical and hard traffic)]
  --trace FILE  a moe-trace-v1 recording
  --counts FILE  counts of experts: JSON (SGLang's dump), CSV or npz
  --peak-load X  load of the busiest expert over the mean, in the long run
  --batch-peak-load X  the same of each batch, chance included
  [deployment (default: an H100's measured tables where they have the layer; the checkpoint's dtype)]
  --device DEVICE  a device of data/devices/, a file, or table:SYSTEM
  --links LINKS  links of data/links/, a file (calibrate), or table:SYSTEM
  --dtype DTYPE  of the layer, such as bfloat16 or fp8_block
  [bounds (default: 10% dropped and 5% lost mass; if you give one, the other does not apply)]
  --max-dropped SHARE  most top-k pairs dropped, e.g. 5%
  --max-lost-mass SHARE  most score mass of the top-k lost, e.g. 1%
validate  compare emulated ranks with real ones on this machine
  @config
  --margin SHARE = 3%  largest difference of equivalent speedups
  @nproc
  @sharing
  @cpu
papers  emulate or run a config and compare papers' numbers with ours; without a config, print them
  config CONFIG?  a YAML file (configs/papers/)
  @results
  --nproc N  run it on N real ranks instead of emulating it
  @cpu
  [without a config]
  --paper PAPER  capacity, laser, llep, metro, oea, sere, ultraep, xshare or an arXiv id (default: all)
  --json  print a list of objects, one for each number
quality  measure what policies do to a language model's answers, or to its tasks
  @config
  --dry-run  print cases; load no weights and no data
  @cpu
serve  compare live servers under policies with one without: time, throughput, answers
  @config
  --url URL  ask this running server instead, whose policy is its own
  --dry-run  print cases; start no server
calibrate  measure this machine's all-to-all
  --out FILE  default: results/calibration/links.yaml
  --max-bytes N  largest message (default: 2^30; CPU: 2^26)
  --repetitions N = 20  repetitions of each message
  @nproc
  @sharing
  @cpu
trace  inspect, record or import routing recordings
trace info  print what a recording holds
  file FILE  a moe-trace-v1 file
trace record  record a checkpoint's routing of a text
  model CHECKPOINT  a checkpoint's folder (transformers)
  --text FILE!  UTF-8 text
  --out FILE  default: recordings/MODEL-TEXT.safetensors
  --similarity FILE  measure the experts' similarity for the policy sere; without --out, record nothing
  --sequence-length N = 512  in tokens
  --num-sequences N  sequences to record (default: all of the text)
  @cpu
trace import  convert another program's recording to moe-trace-v1
  kind KIND  esft, flame-moe, megatron, sglang or vllm
  source SOURCE  a checkout, directory or file
  out OUT  the file to write; must not exist
  --preset MODEL  the model, its config.json or a file like a preset's; needed by all but esft
  --domain NAME  esft: the domain to import; others: the subject of the texts
  --stage STAGE  prefill, decode or training
  --licence LICENCE  licence of your own recording
check-policy  hold a policy to the laws that every policy keeps
  policy POLICY  a policy, or package.module:Class of one of your own
  --set FIELD=VALUE*  a field of the policy; may be repeated
doctor  check this machine: what works, and what each missing part costs
  --out DIR = results  results directory
  @nproc
show  print the tables of results directories, or write them in another format
  directories DIR+  results directories
  --format FORMAT = text  text, md, latex, csv, json or html
  --out FILE  file to write (default: standard output; html: DIR/report.html)
  --view NAMES  tables, comma-separated: layer, model, route (the default), sent, phases, ranks
  --columns NAMES  columns by their names in --format csv, comma-separated, instead of the tables' own
plot  draw the figures of one or several results directories
  directories DIR+  results directories
  --format FORMATS = png,svg  of png, svg and pdf, comma-separated; a CSV is written beside each
  --figures FIGURES  comma-separated (default: all for which there are rows)
  --bare  for a paper: no title, tags or footer, whose words are written to NAME.txt
  --all  draw every line and panel, however many
  --out DIR  default: DIR/figures of one directory, else figures
  [any column against any other, instead of the figures]
  --x COLUMN  column of the x axis
  --y COLUMN  column of the y axis, as means
  --by COLUMN  a line for each value (default: policies)
  --facet COLUMN  a panel for each value (default: comparisons)
  --where CONDITION  rows, of the figures too, such as "policy == 'oea' and num_ranks in (4, 8)"
compare  compare two results directories of the same cases
  base BASE  a results directory
  new NEW  a later one
  --fail-over SHARE  exit 1 if a policy is slower by more, e.g. 3%
  --strict  exit 3 if that is inconclusive
  --json  print JSON
"""


def _share(text: str) -> float:
    """Read ``5%`` or ``0.05``."""
    with contextlib.suppress(ValueError):
        share = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
        if 0 <= share <= 1:
            return share
    raise argparse.ArgumentTypeError(f"expected a share such as 5% or 0.05, 0 to 1; got {text}")


TYPES: dict[str, Callable[[str], Any]] = {
    "N": int,
    "I": int,
    "X": float,
    "SHARE": _share,
    "NAMES": lambda text: [name for name in text.split(",") if name],
    **dict.fromkeys(("FILE", "DIR", "CONFIG", "CHECKPOINT", "SOURCE", "OUT", "BASE", "NEW"), Path),
}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Say a mistake in one line, without the usage of all options."""
        self.exit(USER_ERROR, f"moe-ep-bench: {message} ({self.prog} --help)\n")


class _Version(argparse.Action):
    """Asks git when it is given, not for every command."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> NoReturn:
        print(f"{parser.prog} {moe_ep_bench.__version__} (commit {commit_of() or 'unknown'})")
        parser.exit()


@functools.cache
def make_parser() -> _Parser:
    """The parser of all commands; ``command`` of what it parses is the name of one, or None.

    An action of ``trace`` is part of its name.
    """
    parser = _Parser(prog="moe-ep-bench", description=moe_ep_bench.__doc__)
    parser.add_argument("--version", action=_Version, nargs=0, help="show version and commit")
    parser.set_defaults(command=None)
    commands = parser.add_subparsers(metavar="COMMAND")
    command = place = parser
    actions = commands
    for line in _lines(_COMMANDS):
        left, _, text = line.strip().partition("  ")
        if line.startswith("  ["):
            place = command.add_argument_group(left[1:-1])
        elif line.startswith("  "):
            name, how = _argument(left, text)
            place.add_argument(name, **how)
        else:
            is_action = left.startswith("trace ")
            among, name = (actions, left.removeprefix("trace ")) if is_action else (commands, left)
            command = place = among.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.")
            command.set_defaults(command=left)
            if left == "trace":
                actions = command.add_subparsers(required=True, metavar="ACTION")
    return parser


def _lines(text: str) -> list[str]:
    """The lines of a text, shared ones put in."""
    parts = (
        [line] if not line.startswith("  @") else _lines(_SHARED[line[3:]]) for line in text.strip("\n").splitlines()
    )
    return [line for part in parts for line in part]


def _argument(left: str, text: str) -> tuple[str, dict[str, Any]]:
    """An argument's name, and what ``add_argument`` takes with it."""
    parts = re.fullmatch(r"(\S+)(?: (\S+?)([?+*!]?))?(?: = (\S+))?", left)
    assert parts is not None, left
    name, value, mark, default = parts.groups()
    how: dict[str, Any] = {"help": text.replace("%", "%%")}
    if value is None:
        return name, {**how, "action": "store_true"}
    if default not in (None, "0"):
        how["help"] += " (%(default)s)"
    how |= {"metavar": value, "type": TYPES.get(value, str)}
    how |= {"?": {"nargs": "?"}, "+": {"nargs": "+"}, "*": {"action": "append"}, "!": {"required": True}}.get(mark, {})
    how["default"] = [] if mark == "*" else "" if value == "NAMES" else default
    return name, how | ({"dest": "overrides"} if name == "--set" else {})
