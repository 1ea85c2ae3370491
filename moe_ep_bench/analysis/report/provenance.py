"""Say where the numbers come from and how to get them again, out of ``run.json`` and the conditions beside it.

All that ``run.json`` records of the environment is shown, also under keys that this version does not know. The config
is embedded as resolved values: the points of a sweep are joined into one file with a ``sweep`` again where that gives
exactly these points, and stand as several files otherwise.
"""

from __future__ import annotations

import itertools
import json
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
import yaml

from moe_ep_bench.analysis.columns import NONE, Column, missing
from moe_ep_bench.analysis.load import Run
from moe_ep_bench.analysis.parts import read_jobs
from moe_ep_bench.analysis.render import Table

_COMMANDS = {"emulated": "emulate", "route": "route", "validate": "validate"}


@dataclass(frozen=True)
class Provenance:
    """``run.json`` as far as the page shows it.

    Attributes:
        runs: every job whose rows are here, by its id, in order of time.
        configs: the resolved experiments of all jobs, each once.
    """

    name: str
    mode: str
    environment: Mapping[str, Any]
    runs: Mapping[str, Mapping[str, Any]]
    configs: list[Mapping[str, Any]]
    world_size: int

    @property
    def created(self) -> str:
        """When the first job began, and the last."""
        times = [str(run.get("created")) for run in self.runs.values()]
        return " to ".join(_distinct([times[0], times[-1]]))

    @property
    def config_name(self) -> str:
        names = {str(config.get("name") or "config") for config in self.configs}
        name = names.pop() if len(names) == 1 else self.name
        return "".join(letter if letter.isalnum() or letter in "-_." else "-" for letter in name)


def read_provenance(directory: Path, world_size: int) -> Provenance:
    """Read what ``run.json`` says of the jobs, of whatever mode."""
    facts = read_jobs(directory)
    runs = facts.runs or {facts.run_id: facts}
    runs = dict(sorted(runs.items(), key=lambda item: (str(item[1].created), item[0])))
    configs = [run.config or [] for run in runs.values()]
    each = itertools.chain.from_iterable(one if isinstance(one, list) else [one] for one in configs)
    plain = {run_id: run.model_dump() for run_id, run in runs.items()}
    return Provenance(directory.resolve().name, facts.mode, facts.environment, plain, _distinct(each), world_size)


def provenance_tables(source: Provenance, run: Run | None) -> list[Table]:
    """The environment; the jobs with hashes of code, config and workload; the ranks; their machines while timed."""
    environment = {key: value for key, value in source.environment.items() if key != "ranks"}
    jobs = [
        {"job": run_id, "begun": job.get("created"), **(job.get("hashes") or {})}
        | {key: (job.get("environment") or {}).get(key) for key in ("git_commit", "git_dirty")}
        for run_id, job in source.runs.items()
    ]
    ranks = [{"rank": rank, **facts} for rank, facts in enumerate(source.environment.get("ranks") or [])]
    watched = [
        {"comparison": run.comparisons[name].title, "launch": launch + 1, "rank": rank, "host": host, **state.as_dict()}
        for name, launches in (run.conditions.items() if run is not None else ())
        for launch, conditions in sorted(launches.items())
        for rank, (host, state) in enumerate(conditions.machines)
    ]
    found = {
        "Environment": [{"key": key, "value": value} for key, value in sorted(_leaves(environment))],
        "Jobs": jobs,
        "Ranks": ranks,
        "Machines while timed": watched,
    }
    return [_plain_table(title, records) for title, records in found.items() if records]


def _plain_table(title: str, records: Sequence[Mapping[str, Any]]) -> Table:
    """Every key of some records as a column, those of mappings inside them too."""
    frame = pd.DataFrame([dict(_leaves(record)) for record in records]).dropna(axis=1, how="all")
    return Table(frame, [Column(name.replace("_", " "), partial(_cell, name), True, name) for name in frame], title)


def _cell(name: str, row: Mapping[str, Any]) -> str:
    value = row[name]
    if missing(value):
        return NONE
    return f"{value:.6g}" if isinstance(value, float) else str(value)


# ---- how to get them again -------------------------------------------------------------------------------------------


def config_files(source: Provenance) -> dict[str, str]:
    """The config as YAML by file name; one file where its experiments are the points of one sweep."""
    if not source.configs:
        return {}
    joined = join_sweep(source.configs)
    contents = source.configs if joined is None else [joined]
    numbers = [""] if len(contents) == 1 else [f"-{number}" for number in range(len(contents))]
    dump = partial(yaml.safe_dump, sort_keys=False, allow_unicode=True, width=100)
    return {f"{source.config_name}{n}.yaml": dump(dict(one)) for n, one in zip(numbers, contents, strict=True)}


def join_sweep(configs: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """One config whose ``sweep`` has exactly these points; None where no grid has them."""
    flat = [dict(_leaves(config)) for config in configs]
    if any(one.keys() != flat[0].keys() for one in flat):
        return None  # a sweep gives each point a value
    swept = {key: found for key in flat[0] if len(found := _distinct(one[key] for one in flat)) > 1}
    grid = {_as_text(point) for point in itertools.product(*swept.values())}
    points = {_as_text(tuple(one[key] for key in swept)) for one in flat}
    if any("." not in key for key in swept) or len(flat) != len(grid) or points != grid:
        return None
    joined = json.loads(json.dumps(configs[0]))
    for key in swept:
        section = joined
        *parents, last = key.split(".")
        for parent in parents:
            section = section[parent]
        del section[last]
    return joined | ({"sweep": swept} if swept else {})


def commands(source: Provenance) -> list[str]:
    """Lines of a shell that measure this again; what is no command is a comment."""
    last = list(source.runs.values())[-1]
    environment, code = last.get("environment") or {}, (last.get("hashes") or {}).get("code")
    lines = [f"# the code whose hash is {code or 'not recorded'}; no commit was recorded"]
    if commit := environment.get("git_commit"):
        dirty = f"  # with uncommitted changes (code hash {code})" if environment.get("git_dirty") else ""
        lines = [f"git checkout {shlex.quote(str(commit))}{dirty}"]
    names = list(config_files(source))
    if not names:
        return [*lines, "# the config was not recorded: no command can be given"]
    recorded = any((config.get("workload") or {}).get("kind") == "recorded" for config in source.configs)
    beside = ", and the recordings that it names beside it" if recorded else ""
    out, ranks = shlex.quote(f"results/{source.config_name}"), ""
    if source.mode == "validate":
        ranks = f" --nproc {source.world_size}"
    return [
        *lines,
        f"# save the config above as {', '.join(names)}{beside}",
        *(f"{_command(source)} {shlex.quote(name)}{ranks} --out {out}" for name in names),
        f"moe-ep-bench show {out} --format html",
    ]


def _command(source: Provenance) -> str:
    if source.mode != "run":
        return f"moe-ep-bench {_COMMANDS[source.mode]}"
    hosts = len({rank.get("hostname") for rank in source.environment.get("ranks") or [{}]})
    nodes = f"NNODES={hosts} NODE_RANK=<0..{hosts - 1}> MASTER_ADDR=<host of node 0> " if hosts > 1 else ""
    return f"{nodes}NPROC={source.world_size // hosts} launch/torchrun.sh"


def _leaves(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted keys with their values; lists are values."""
    for key, value in config.items():
        if isinstance(value, dict) and value:
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _distinct(values: Iterable[Any]) -> list[Any]:
    return list({_as_text(value): value for value in values}.values())


def _as_text(value: Any) -> str:
    return json.dumps(value, sort_keys=True)
