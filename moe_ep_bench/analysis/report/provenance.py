"""Where the numbers come from and how to get them again, out of ``run.json`` and the conditions beside it.

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

from moe_ep_bench.analysis.load import Conditions, Run
from moe_ep_bench.analysis.report.parts import Cell, Column, Step, Table, number_cell, text_cell
from moe_ep_bench.analysis.words import NONE
from moe_ep_bench.results import RunDirectory

# Of more ranks and launches the first are shown.
MAX_ROWS = 256

_SOFTWARE = (
    "python", "torch", "megatron_core", "transformer_engine", "apex", "cuda", "nccl", "triton", "deep_ep", "driver",
)  # fmt: skip
_HARDWARE = (
    "device_name", "device_type", "num_devices", "gpus", "gpus_why", "topology", "rdma_ports", "cpu_name", "num_cores",
    "threads_per_rank", "memory_bytes", "kernel",
)  # fmt: skip
_CODE = ("git_commit", "git_dirty")
# Shown in tables of their own.
_APART = ("ranks", "hostname")
_WORDS = {
    "device_name": "device",
    "device_type": "kind of device",
    "num_devices": "devices",
    "gpus": "GPUs",
    "gpus_why": "GPUs not described",
    "rdma_ports": "RDMA ports",
    "cpu_name": "CPU",
    "num_cores": "cores",
    "memory_bytes": "memory",
    "megatron_core": "megatron-core",
    "transformer_engine": "Transformer Engine",
    "apex": "NVIDIA Apex",
    "cuda": "CUDA",
    "nccl": "NCCL",
    "deep_ep": "DeepEP",
    "git_commit": "commit",
    "git_dirty": "uncommitted changes",
    "load_average": "load average at the start",
    "slurm": "Slurm job",
    "variables": "environment variables",
    "threads_per_rank": "threads per rank",
}


@dataclass(frozen=True)
class Provenance:
    """``run.json`` as far as the report shows it; every run (job) whose rows are here, in order of time."""

    name: str
    mode: str
    environment: Mapping[str, Any]
    runs: Mapping[str, Mapping[str, Any]]
    world_size: int

    @property
    def created(self) -> list[str]:
        return sorted({str(run.get("created")) for run in self.runs.values()})

    @property
    def configs(self) -> list[Mapping[str, Any]]:
        """The resolved experiments of all runs, each once."""
        found: dict[str, Mapping[str, Any]] = {}
        for run in self.runs.values():
            config = run.get("config") or []
            for one in config if isinstance(config, list) else [config]:
                found.setdefault(json.dumps(one, sort_keys=True), one)
        return list(found.values())

    @property
    def hostnames(self) -> list[str]:
        """Of every rank where they are recorded, else of the first one."""
        ranks = self.environment.get("ranks") or []
        return [str(rank.get("hostname")) for rank in ranks] or [str(self.environment.get("hostname", "unknown"))]


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


# ---- environment -------------------------------------------------------------------------------------------------


def fact_tables(facts: Provenance) -> list[Table]:
    """Names and values: hardware, software, settings."""
    known = {*_HARDWARE, *_SOFTWARE, *_CODE, *_APART}
    environment = facts.environment
    settings = [key for key in environment if key not in known]
    tables = [
        _pairs("Hardware, of the first rank's node", {key: environment.get(key) for key in _HARDWARE}),
        _pairs("Software", {key: environment.get(key) for key in _SOFTWARE}),
        _pairs("Settings and job", {key: environment[key] for key in sorted(settings)}),
    ]
    return [table for table in tables if table.rows]


def environment_tables(facts: Provenance, run: Run | None) -> list[Table]:
    """The jobs; who their ranks were; the machine while each launch was timed."""
    environment, tables = facts.environment, [_runs_table(facts)]
    if environment.get("ranks"):
        columns = (Column("rank"), Column("host"), Column("cores", True), Column("GPU"), Column("GPU id"))
        rows = [
            (
                Cell(f"{rank}", float(rank)),
                text_cell(one.get("hostname")),
                number_cell(one.get("num_cores"), "{:.0f}"),
                text_cell(one.get("gpu_name")),
                text_cell(one.get("gpu_uuid")),
            )
            for rank, one in enumerate(environment["ranks"])
        ]
        tables.append(_cut(Table("Hosts of the ranks", columns, rows)))
    if run is not None:
        tables += _machine_tables(run)
    return [table for table in tables if table.rows]


def _pairs(title: str, values: Mapping[str, Any]) -> Table:
    rows = [
        (Cell(_WORDS.get(key, key.replace("_", " "))), Cell(_value_words(key, value)))
        for key, value in values.items()
        if value not in (None, {}, [])
    ]
    return Table(title, (Column("what"), Column("value")), rows)


def _value_words(key: str, value: Any) -> str:
    if key == "memory_bytes":
        return f"{value / 2**30:.1f} GiB"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, dict):
        return "\n".join(f"{name}: {_flat_words(item)}" for name, item in value.items())
    if isinstance(value, list) and any(isinstance(item, dict) for item in value):
        return "\n".join(_flat_words(item) for item in value)
    return _flat_words(value)


def _flat_words(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {_flat_words(item)}" for name, item in value.items() if item is not None)
    if isinstance(value, list):
        return ", ".join(map(_flat_words, value))
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _runs_table(facts: Provenance) -> Table:
    columns = (Column("run"), Column("begun"), Column("commit"), Column("code"), Column("config"), Column("workload"))
    rows = []
    for run_id, run in facts.runs.items():
        hashes, environment = run.get("hashes") or {}, run.get("environment") or {}
        commit = environment.get("git_commit")
        changed = " with uncommitted changes" if commit and environment.get("git_dirty") else ""
        workload = hashes.get("workload") or {}
        rows.append(
            (
                Cell(run_id),
                text_cell(run.get("created")),
                text_cell(commit and f"{commit[:12]}{changed}"),
                text_cell(hashes.get("code")),
                text_cell(hashes.get("config")),
                text_cell("\n".join(sorted(set(workload.values())))),
            )
        )
    return Table("Jobs, with hashes of code, config and workload", columns, rows)


def _machine_tables(run: Run) -> list[Table]:
    """Clocks, power and load while each launch was timed, from its begin to its end."""
    columns = (
        Column("comparison"),
        Column("launch", True),
        Column("rank", True),
        Column("host"),
        Column("load average", about="begin, end"),
        Column("SM MHz", about="begin, end"),
        Column("5 / 50 / 95 %", about="SM clock over samples in which the GPU was busy"),
        Column("limit MHz", True),
        Column("memory MHz", True),
        Column("power W", about="median, most, limit"),
        Column("most C", True, "temperature"),
        Column("throttled", about="share of samples, by reason"),
        Column("stolen s", True, "by the hypervisor, of all cores"),
    )
    rows = [
        row
        for comparison_id, launches in run.conditions.items()
        for launch, conditions in sorted(launches.items())
        for row in _machine_rows(run.comparisons[comparison_id].title, launch, conditions)
    ]
    # Columns that no rank filled say nothing: of CPU ranks all those of GPUs. Nor does the only comparison's title.
    first = 0 if len(run.conditions) > 1 else 1
    filled = [column for column in range(first, len(columns)) if any(row[column].text != NONE for row in rows)]
    kept = [[row[column] for column in filled] for row in rows]
    return [_cut(Table("The machine while it was timed", [columns[column] for column in filled], kept))]


def _machine_rows(title: str, launch: int, conditions: Conditions) -> Iterator[tuple[Cell, ...]]:
    for rank, (host, state) in enumerate(conditions.machines):
        shares = {name: share for name, share in (state.throttle_shares or {}).items() if share > 0}
        throttled = ", ".join(f"{name} {100 * share:.1f} %" for name, share in sorted(shares.items()))
        yield (
            Cell(title),
            Cell(f"{launch + 1}", float(launch)),
            Cell(f"{rank}", float(rank)),
            Cell(host),
            text_cell(_joined((state.load_average_begin, state.load_average_end), "{:.1f}")),
            text_cell(_joined((state.sm_clock_begin_mhz, state.sm_clock_end_mhz), "{:,.0f}")),
            text_cell(_joined(state.sm_clock_mhz or (None,), "{:,.0f}")),
            number_cell(state.sm_clock_limit_mhz, "{:,.0f}"),
            number_cell(state.memory_clock_median_mhz, "{:,.0f}"),
            text_cell(_joined((state.power_median_w, state.power_max_w, state.power_limit_w), "{:.0f}")),
            number_cell(state.temperature_max_c, "{:.0f}"),
            text_cell(throttled or ("none" if state.throttle_shares else None)),
            number_cell(state.stolen_s, "{:.2f}"),
        )


def _joined(values: Sequence[float | None], form: str) -> str:
    if all(value is None for value in values):
        return ""
    return " / ".join("?" if value is None else form.format(value) for value in values)


def _cut(table: Table) -> Table:
    hidden = len(table.rows) - MAX_ROWS
    if hidden <= 0:
        return table
    return Table(table.title, table.columns, table.rows[:MAX_ROWS], f"The first {MAX_ROWS} of {len(table.rows)} rows.")


# ---- how to get them again ---------------------------------------------------------------------------------------


def config_files(facts: Provenance) -> list[Step]:
    """The config as files of YAML; one where its experiments are the points of one sweep."""
    if not facts.configs:
        return []
    name = _config_name(facts)
    joined = join_sweep(facts.configs)
    texts = [joined] if joined is not None else facts.configs
    files = [f"{name}.yaml"] if len(texts) == 1 else [f"{name}-{number}.yaml" for number in range(len(texts))]
    return [
        Step("", yaml.safe_dump(dict(text), sort_keys=False, allow_unicode=True, width=100), file)
        for text, file in zip(texts, files, strict=True)
    ]


def join_sweep(configs: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """One config whose ``sweep`` has exactly these points; None where no grid has them."""
    flat = [dict(_leaves(config)) for config in configs]
    keys = list(dict.fromkeys(key for one in flat for key in one))
    missing = object()
    values = {key: _distinct([one.get(key, missing) for one in flat]) for key in keys}
    swept = {key: found for key, found in values.items() if len(found) > 1}
    # Sweeps are of keys with a section, and give each point a value.
    if any(missing in found or "." not in key for key, found in swept.items()):
        return None
    grid = {_as_text(point) for point in itertools.product(*swept.values())}
    points = [_as_text(tuple(one[key] for key in swept)) for one in flat]
    if len(points) != len(grid) or set(points) != grid:
        return None
    joined = json.loads(json.dumps(configs[0]))
    for key in swept:
        section = joined
        *parents, last = key.split(".")
        for parent in parents:
            section = section[parent]
        del section[last]
    return joined | ({"sweep": swept} if swept else {})


def reproduction(facts: Provenance) -> list[Step]:
    """The commands that measure this again."""
    last = list(facts.runs.values())[-1]
    environment, hashes = last.get("environment") or {}, last.get("hashes") or {}
    commit, code = environment.get("git_commit"), hashes.get("code")
    dirty = f"; it had uncommitted changes then (code hash {code})" if environment.get("git_dirty") else ""
    steps = []
    if commit:
        steps.append(Step(f"Check out the code{dirty}:", f"git checkout {shlex.quote(str(commit))}"))
    else:
        steps.append(Step(f"Take the code whose hash is {code or 'not recorded'}; no commit was recorded."))
    files = config_files(facts)
    if not files:
        return [*steps, Step("The config was not recorded: no command can be given.")]
    names = [step.file for step in files]
    recorded = any((config.get("workload") or {}).get("kind") == "recorded" for config in facts.configs)
    several = "each of them" if len(names) > 1 else "it"
    beside = f", and the recordings that {several} names beside it" if recorded else ""
    steps.append(Step(f"Save the config above as {', '.join(names)}{beside}."))
    out = shlex.quote(f"results/{_config_name(facts)}")
    steps.append(Step(_where_words(facts), "\n".join(_command(facts, shlex.quote(name), out) for name in names)))
    steps.append(Step("Set this page again:", f"moe-ep-bench show {out} --format html"))
    return steps


def _command(facts: Provenance, config: str, out: str) -> str:
    if facts.mode != "run":
        return f"moe-ep-bench {'emulate' if facts.mode == 'emulated' else 'route'} {config} --out {out}"
    hosts = len(set(facts.hostnames))
    nodes = f"NNODES={hosts} NODE_RANK=<0..{hosts - 1}> MASTER_ADDR=<host of node 0> " if hosts > 1 else ""
    return f"{nodes}NPROC={facts.world_size // hosts} launch/torchrun.sh {config} --out {out}"


def _where_words(facts: Provenance) -> str:
    device = facts.environment.get("device_name", "an unnamed device")
    if facts.mode == "run":
        ranks = "1 rank" if facts.world_size == 1 else f"{facts.world_size} ranks"
        return f"Measure on {ranks} of {device}, from the repository's root:"
    return "Emulate, from the repository's root:" if facts.mode == "emulated" else "Route, on any CPU:"


def _config_name(facts: Provenance) -> str:
    names = {str(config.get("name") or "config") for config in facts.configs}
    name = names.pop() if len(names) == 1 else facts.name
    return "".join(letter if letter.isalnum() or letter in "-_." else "-" for letter in name)


def _leaves(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted keys with their values; lists are values."""
    for key, value in config.items():
        if isinstance(value, dict) and value:
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _distinct(values: Sequence[Any]) -> list[Any]:
    return list({id(value) if type(value) is object else _as_text(value): value for value in values}.values())


def _as_text(value: Any) -> str:
    return json.dumps(value, sort_keys=True)
