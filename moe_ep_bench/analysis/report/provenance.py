"""Say where the numbers come from and how to get them again, out of ``run.json`` and the conditions beside it.

All that ``run.json`` records of the environment is shown, also under keys that this version does not know. The config
is embedded as resolved values: the points of a sweep are joined into one file with a ``sweep`` again where that gives
exactly these points, and stand as several files otherwise.
"""

from __future__ import annotations

import itertools
import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from moe_ep_bench.analysis.load import Run
from moe_ep_bench.results import RunDirectory

# Of more rows (ranks, launches) the first are shown.
MAX_ROWS = 256
_COMMANDS = {"emulated": "emulate", "route": "route", "validate": "validate"}


@dataclass(frozen=True)
class Provenance:
    """``run.json`` as far as the page shows it; every run (job) whose rows are here, in order of time."""

    name: str
    mode: str
    environment: Mapping[str, Any]
    runs: Mapping[str, Mapping[str, Any]]
    world_size: int

    @property
    def created(self) -> str:
        """When the first job began, and the last."""
        times = sorted({str(run.get("created")) for run in self.runs.values()})
        return times[0] if len(times) == 1 else f"{times[0]} to {times[-1]}"

    @property
    def configs(self) -> list[Mapping[str, Any]]:
        """The resolved experiments of all runs, each once."""
        found = [run.get("config") or [] for run in self.runs.values()]
        return _distinct([one for config in found for one in (config if isinstance(config, list) else [config])])

    @property
    def config_name(self) -> str:
        names = {str(config.get("name") or "config") for config in self.configs}
        name = names.pop() if len(names) == 1 else self.name
        return "".join(letter if letter.isalnum() or letter in "-_." else "-" for letter in name)


def read_provenance(directory: Path, world_size: int) -> Provenance:
    """Read what ``load_run`` or ``load_route`` has found to be readable."""
    content = json.loads(RunDirectory(directory).run_json.read_text(encoding="utf-8"))
    own = {key: content.get(key) for key in ("created", "config", "environment", "hashes")}
    runs = content.get("runs") or {content["run_id"]: own}
    return Provenance(
        name=directory.resolve().name,
        mode=content["mode"],
        environment=content.get("environment") or {},
        runs=dict(sorted(runs.items(), key=lambda item: (str(item[1].get("created")), item[0]))),
        world_size=world_size,
    )


def provenance_rows(source: Provenance, run: Run | None) -> list[tuple[str, str]]:
    """Key and value: the environment; the jobs with hashes of code, config and workload; ranks; their machines.

    Args:
        run: whose ranks' machines were watched while each launch was timed.
    """
    environment = {key: value for key, value in source.environment.items() if key != "ranks"}
    rows = [(key.replace("_", " "), _words(value, key)) for key, value in sorted(environment.items())]
    for run_id, job in source.runs.items():
        of_job = job.get("environment") or {}
        facts = {"begun": job.get("created"), **{key: of_job.get(key) for key in ("git_commit", "git_dirty")}}
        rows.append((f"job {run_id}", _words({**facts, **(job.get("hashes") or {})})))
    rows += [(f"rank {rank}", _words(one)) for rank, one in enumerate(source.environment.get("ranks") or [])]
    for comparison_id, launches in run.conditions.items() if run is not None else ():
        title = f"{run.comparisons[comparison_id].title}, " if run is not None and len(run.conditions) > 1 else ""
        rows += [
            (f"{title}launch {launch + 1}, rank {rank} while timed", _words({"host": host, **state.as_dict()}))
            for launch, conditions in sorted(launches.items())
            for rank, (host, state) in enumerate(conditions.machines)
        ]
    rows = [(key, value) for key, value in rows if value]
    more = [("more", f"{len(rows) - MAX_ROWS} rows of further ranks and launches")] if len(rows) > MAX_ROWS else []
    return rows[:MAX_ROWS] + more


def _words(value: Any, key: str = "") -> str:
    """A recorded value in words; nothing for what is empty."""
    if isinstance(value, Mapping):
        parts = {name: _words(item, name) for name, item in value.items()}
        return "; ".join(f"{name.replace('_', ' ')}: {words}" for name, words in parts.items() if words)
    if isinstance(value, list | tuple):
        return ("\n" if any(isinstance(item, Mapping) for item in value) else ", ").join(map(_words, value))
    if key.endswith("_bytes") and value is not None:
        return f"{value / 2**30:.1f} GiB"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "" if value is None else f"{value:.4g}" if isinstance(value, float) and abs(value) < 1e4 else str(value)


# ---- how to get them again -------------------------------------------------------------------------------------------


def config_files(source: Provenance) -> dict[str, str]:
    """The config as YAML by file name; one file where its experiments are the points of one sweep."""
    if not source.configs:
        return {}
    joined = join_sweep(source.configs)
    contents = [joined] if joined is not None else source.configs
    numbers = [""] if len(contents) == 1 else [f"-{number}" for number in range(len(contents))]
    return {
        f"{source.config_name}{number}.yaml": yaml.safe_dump(
            dict(content), sort_keys=False, allow_unicode=True, width=100
        )
        for number, content in zip(numbers, contents, strict=True)
    }


def join_sweep(configs: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """One config whose ``sweep`` has exactly these points; None where no grid has them."""
    flat = [dict(_leaves(config)) for config in configs]
    keys = list(dict.fromkeys(key for one in flat for key in one))
    if any(key not in one for one in flat for key in keys):
        return None  # a sweep gives each point a value
    swept = {key: found for key in keys if len(found := _distinct([one[key] for one in flat])) > 1}
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
    if commit := environment.get("git_commit"):
        dirty = f"  # with uncommitted changes (code hash {code})" if environment.get("git_dirty") else ""
        lines = [f"git checkout {shlex.quote(str(commit))}{dirty}"]
    else:
        lines = [f"# the code whose hash is {code or 'not recorded'}; no commit was recorded"]
    names = list(config_files(source))
    if not names:
        return [*lines, "# the config was not recorded: no command can be given"]
    recorded = any((config.get("workload") or {}).get("kind") == "recorded" for config in source.configs)
    beside = ", and the recordings that it names beside it" if recorded else ""
    out = shlex.quote(f"results/{source.config_name}")
    return [
        *lines,
        f"# save the config above as {', '.join(names)}{beside}",
        *(f"{_command(source, shlex.quote(name))} --out {out}" for name in names),
        f"moe-ep-bench show {out} --format html",
    ]


def _command(source: Provenance, config: str) -> str:
    if source.mode != "run":
        ranks = f" --nproc {source.world_size}" if source.mode == "validate" else ""
        return f"moe-ep-bench {_COMMANDS[source.mode]} {config}{ranks}"
    hosts = len({rank.get("hostname") for rank in source.environment.get("ranks") or [{}]})
    nodes = f"NNODES={hosts} NODE_RANK=<0..{hosts - 1}> MASTER_ADDR=<host of node 0> " if hosts > 1 else ""
    return f"{nodes}NPROC={source.world_size // hosts} launch/torchrun.sh {config}"


def _leaves(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted keys with their values; lists are values."""
    for key, value in config.items():
        if isinstance(value, dict) and value:
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _distinct(values: Sequence[Any]) -> list[Any]:
    return list({_as_text(value): value for value in values}.values())


def _as_text(value: Any) -> str:
    return json.dumps(value, sort_keys=True)
