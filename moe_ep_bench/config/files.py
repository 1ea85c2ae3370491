"""Read a YAML config into experiments: overrides, paths and points of its sweep; every error is one line.

A line names the file, the key, what was found and what is allowed. The schema is ``config``'s, or another of points.
"""

from __future__ import annotations

import copy
import itertools
import os
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from moe_ep_bench.config import Experiment, ModelConfig, RecordedConfig, SweepPoint
from moe_ep_bench.errors import UserError, brief, naming
from moe_ep_bench.files import parse_yaml
from moe_ep_bench.models import ModelSpec
from moe_ep_bench.presets import NAMES_FILE, read_yaml, validated
from moe_ep_bench.workload.targets import read_counts
from moe_ep_bench.workload.trace import open_trace

_Schema = TypeVar("_Schema", bound=SweepPoint)

# Keys whose values are paths, whatever they end in.
_PATHS = (
    "model.hf_config",
    "model.checkpoint",
    "workload.skew_from",
    "workload.trace",
    "text.file",
    "prompts.file",
    "include",
)
# Keys whose values are names, or paths where they end as files do; so are values of a policy's fields.
_NAMES_OR_PATHS = re.compile(
    r"emulate\.(links|device)|(policies|claims(\.\d+)?\.(policy|versus))(\.\d+)?\.(?!name$)\w+"
)


def load_experiments(path: Path, overrides: Iterable[str] = (), *, on_cpu: bool) -> list[Experiment]:
    """Read a config file and return one experiment per point of its ``sweep``.

    Args:
        overrides: ``key=value`` with a dotted key and a YAML value; they win over the file. An override of a swept
            key ends its sweep; ``sweep.key=[values]`` sweeps it. Relative paths are read from the working directory.
        on_cpu: apply the file's ``on_cpu`` section, whose dotted keys and values work as overrides.

    Raises:
        UserError: one line naming file, key, value and what is allowed.
    """
    return experiments_of(path, *read_config(path, overrides, on_cpu=on_cpu))


def load_points(path: Path, schema: type[_Schema], overrides: Iterable[str]) -> list[_Schema]:
    """Read a config file of another schema, as ``load_experiments``."""
    return _points(path, schema, *read_config(path, overrides, schema))


def experiments_of(path: Path, raw: dict[str, Any], sweep: dict[str, Any]) -> list[Experiment]:
    """One experiment per point of a config's sweep; ``path`` is named in errors."""
    recorded = sweep.pop(RECORDED, None) or []
    if not isinstance(recorded, list) or not all(isinstance(one, dict) for one in recorded):
        words = f"expected a list of dotted keys with values, got {brief(recorded)}"
        raise UserError(words, f"sweep.{RECORDED}", where=str(path))
    experiments = []
    for values, own in ((raw, sweep), *(_of_recordings(path, raw, one) for one in recorded)):
        if own.get(_TRACE) == []:
            continue  # None of them is there.
        if isinstance(values.get("workload"), dict):
            _sweep_layers(path, values, own)
        experiments += _points(path, Experiment, values, own)
    return experiments


# ---- the file and its overrides --------------------------------------------------------------------------------------


def read_config(
    path: Path, overrides: Iterable[str], schema: type[SweepPoint] = Experiment, *, on_cpu: bool = False
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Read a config file's values and its sweep, both with the overrides applied and relative paths resolved.

    Raises:
        UserError: see ``load_experiments``.
    """
    if not path.exists() and path.name in ModelSpec.names():
        raise UserError(f"{path}: is a model's name; expected a config's path (advise takes --model {path.name})")
    raw = read_yaml(path, "cannot read the config")
    raw.setdefault("name", re.sub(r"^[^A-Za-z0-9]+|[^A-Za-z0-9._-]+", "-", path.stem).strip("-") or "config")
    sections = {name: raw.pop(name, None) or {} for name in schema.BESIDE}
    for name, section in sections.items():
        if not isinstance(section, dict):
            raise UserError(f"expected dotted keys with values, got {brief(section)}", name, where=str(path))
    raw, sweep = (_resolved(values, "", path.parent) for values in (raw, sections["sweep"]))
    for key, value in (sections["on_cpu"] if on_cpu else {}).items():
        _change(raw, sweep, str(key), value, path.parent, f"{path}: on_cpu.{key}")
    override(raw, sweep, overrides)
    return raw, sweep


def override(raw: dict[str, Any], sweep: dict[str, Any], overrides: Iterable[str]) -> None:
    """Put overrides ``key=value`` into a config's values and its sweep.

    Raises:
        UserError: one line naming the override.
    """
    for words in overrides:
        key, separator, text = words.partition("=")
        where = f"--set {brief(words, quoted=False)}"
        if not separator:
            raise UserError(f"{where}: expected key=value")
        try:
            # YAML reads a name's beginning that ends so, as of a table, as a key without a value.
            value = text if text.endswith(":") else parse_yaml(text)
        except ValueError as problem:
            raise UserError(f"the value is {problem}", where=where) from None
        _change(raw, sweep, key, value, Path.cwd(), where)


def _change(raw: dict[str, Any], sweep: dict[str, Any], key: str, value: Any, folder: Path, where: str) -> None:
    """Set the value of a dotted key, which ends its sweep, or the values of ``sweep.KEY``."""
    swept = key.removeprefix("sweep.")
    recorded = sweep.get(RECORDED)
    further = [one for one in recorded if isinstance(one, dict) and swept in one] if isinstance(recorded, list) else []
    if swept == "on_cpu":
        raise UserError(f"{where}: on_cpu stands in the file alone; set its keys one by one, as KEY=value")
    if swept == "sweep":
        raise UserError(f"{where}: expected sweep.KEY=[values], or KEY=value for one value alone")
    value = _resolved(value, swept, folder)
    for one in further:
        if swept.startswith("workload."):
            one[swept] = value
        elif one[swept] not in (
            value if key != swept and isinstance(value, list) else [value]
        ):  # A recording is of one model.
            sweep[RECORDED] = [other for other in sweep[RECORDED] if other is not one]
    if further and swept not in sweep and not _is_set(raw, swept):
        return  # It is a key of recordings alone.
    if key != swept:
        sweep[swept] = value
    else:
        _put(raw, key, value, where)
        sweep.pop(key, None)


def _is_set(raw: dict[str, Any], dotted: str) -> bool:
    value: Any = raw
    for part in dotted.split("."):
        if not isinstance(value, dict) or part not in value:
            return False
        value = value[part]
    return True


def _resolved(value: Any, key: str, folder: Path) -> Any:
    """A copy of a key's value in which relative paths are read from ``folder``."""
    if isinstance(value, dict):
        return {name: _resolved(inner, f"{key}.{name}".lstrip("."), folder) for name, inner in value.items()}
    if isinstance(value, list):
        return [_resolved(entry, key, folder) for entry in value]
    key = key.removeprefix(f"{RECORDED}.")
    takes_path = key in _PATHS or (_NAMES_OR_PATHS.fullmatch(key) and NAMES_FILE.search(str(value)))
    is_path = isinstance(value, str) and takes_path
    return str(folder / value) if is_path else value


def _put(raw: dict[str, Any], dotted: str, value: Any, where: str) -> None:
    """Set the value of a dotted key, whose numbers are places in lists."""
    *parents, last = dotted.split(".")
    inner: Any = raw
    try:
        for parent in parents:
            inner = inner[int(parent)] if isinstance(inner, list) else inner.setdefault(parent, {})
        inner[int(last) if isinstance(inner, list) else last] = value
    except (AttributeError, IndexError, TypeError, ValueError):
        raise UserError(f"{where}: {dotted}: the config has no such place") from None


# ---- recordings beside a sweep ---------------------------------------------------------------------------------------

# Key of a sweep: a list of further sweeps over recordings, whose points follow. They are of files that a user fetches,
# so that those that are not there are left out, and named.
RECORDED = "recorded"
_TRACE = "workload.trace"


def _of_recordings(path: Path, raw: dict[str, Any], keys: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """A config's values and its sweep for one entry of ``sweep.recorded``; a sweep of no recording where none is there.

    What is synthetic alone goes; a list is swept, any other value is the same at all points.
    """
    values, sweep = copy.deepcopy(raw), {}
    shared = RecordedConfig.model_fields.keys()
    workload = values.get("workload") or {}
    values["workload"] = {key: value for key, value in workload.items() if key in shared} | {"kind": "recorded"}
    for key, value in keys.items():
        if isinstance(value, list):
            sweep[key] = value
        else:
            _put(values, str(key), value, f"{path}: sweep.{RECORDED}")
    traces = sweep.get(_TRACE) or [values["workload"].get("trace")]
    sweep[_TRACE] = [trace for trace in traces if not _missing(trace)]
    return values, sweep


def _missing(trace: Any) -> list[str]:
    """Recordings of one point that are not there, each named once."""
    names = [name for name in (trace if isinstance(trace, list) else [trace]) if isinstance(name, str)]
    missing = [name for name in names if not Path(name).is_file()]
    for name in missing:
        _say_left_out(name)
    return missing


@cache
def _say_left_out(name: str) -> None:
    if os.environ.get("RANK", "0") == "0":
        print(f"moe-ep-bench: left out: {name}: no such file (docs/workloads.md says how to fetch it)", file=sys.stderr)


# ---- points of the sweep ---------------------------------------------------------------------------------------------


def _points(path: Path, schema: type[_Schema], raw: dict[str, Any], sweep: Mapping[str, Any]) -> list[_Schema]:
    """One experiment for every combination of swept values."""
    for key, values in sweep.items():
        if not isinstance(values, list) or not values:
            raise UserError(f"expected a list of values, got {brief(values)}", f"sweep.{key}", where=str(path))
        if key == "scope":
            raise UserError("expected scope outside of sweep; it cannot be swept", "sweep.scope", where=str(path))
    experiments = []
    for chosen in itertools.product(*sweep.values()):
        point, values = tuple(zip(sweep, chosen, strict=True)), copy.deepcopy(raw)
        for key, value in point:
            _put(values, str(key), copy.deepcopy(value), f"{path}: sweep")
        workload = values.get("workload")
        if isinstance(workload, dict) and isinstance(workload.get("trace"), str):
            workload["trace"] = [workload["trace"]]
        experiment = validated(schema, values, path)
        experiment._point = point
        experiments.append(experiment)
    return experiments


def _sweep_layers(path: Path, raw: dict[str, Any], sweep: dict[str, Any]) -> None:
    """Sweep all layers of a recording, or of counts, where the workload asks for them and the sweep names none."""
    workload = raw["workload"]
    layer = workload.get("layer", "all")
    if raw.get("scope") == "model" and workload.get("kind") == "recorded":
        # A whole model takes all layers of a recording in one comparison.
        if layer != "all" or "workload.layer" in sweep:
            got = brief(sweep.get("workload.layer", layer))
            words = f"expected all with scope model, for every MoE layer; got {got}"
            raise UserError(words, "workload.layer", where=str(path))
        workload["layer"] = 0
    elif workload.get("layer") == "all" and "workload.layer" not in sweep:
        # The first recording stands for all: a workload refuses recordings whose layers differ.
        trace = sweep.get("workload.trace", [workload.get("trace")])
        while isinstance(trace, list) and trace:
            trace = trace[0]
        counted = workload.get("skew_from")
        if counted is not None:
            with naming(str(path), keys=["workload.skew_from"]):
                sweep["workload.layer"] = list(read_counts(Path(counted), _moe_layers(path, raw, sweep)).loads)
        elif isinstance(trace, str):
            with naming(str(path), keys=["workload.trace"]):
                sweep["workload.layer"] = list(range(open_trace(trace).num_layers))
        else:
            words = f"all needs a recording in workload.trace, got {brief(trace)}"
            raise UserError(words, "workload.layer", where=str(path))


def _moe_layers(path: Path, raw: dict[str, Any], sweep: dict[str, Any]) -> Sequence[int]:
    """Layers that route; () where models are swept, or there is no valid one, which a point's validation says."""
    if any(key.partition(".")[0] == "model" for key in sweep):
        return ()
    try:
        return validated(ModelConfig, raw.get("model"), path).moe_layers
    except UserError:
        return ()
