"""From directories to a store: of each the comparisons with their typed facts, and a long frame for each table.

Parts are written whole, by this program alone, so their content is trusted where Parquet's checksums hold. Every case
of run.json must have a status and, where it was measured, its routing. What is not so is one line that names the file:
raised, or given to who would rather see the rest of a directory; the comparison is then left out. Directories stand
beside each other and are never pooled: two jobs share no moment.

Comparisons that differ in the seed of their traffic, or in the layer that it is of, become one. A synthetic workload's
seed decides which experts are busy, and so which of them share a rank. Batches of one seed are alike, seeds are not: an
interval over one seed's batches says nothing of another. So each seed becomes a further launch, with batches of its
own, and the interval of a median covers seeds as it covers launches (``timing.statistics.estimate_median``). Seeds of
several launches stay apart: these are not independent of each other. Layers of a recording, or of counted experts, are
joined likewise. Layers that were routed without times keep their batches, and are told apart by the column ``layer``.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import BaseModel, ValidationError

from moe_ep_bench.errors import UserError, brief, problem_words
from moe_ep_bench.facts import CaseFacts, Conditions, JudgedFacts, RoutedFacts, RunFacts, TimedFacts
from moe_ep_bench.files import read_json
from moe_ep_bench.policies import POLICIES, RoutingContext, make_policy
from moe_ep_bench.policies.contract import SteppedPolicy
from moe_ep_bench.results import RunDirectory, ValidationDirectory
from moe_ep_bench.schema import (
    FRONTIER_SCHEMA,
    HOST,
    HOST_BUSY,
    PHASES,
    READABLE_VERSIONS,
    ROUTING_SCHEMA,
    SM_CLOCK,
    TOTAL,
    UNACCOUNTED,
)

ITERATION = ["launch", "batch", "iteration"]
# Top-k pairs that a token does not compute, dropped or rerouted: a column of frames, not of files.
MISSING = "num_missing_pairs"
_WORDS = {
    "kind": pd.CategoricalDtype(["plain", "breakdown"]),
    "phase": pd.CategoricalDtype([*PHASES, UNACCOUNTED, TOTAL]),
}
# Columns of the store's frames; a case has its words already.
_COLUMNS = {
    "samples": [*ITERATION, "kind", "rank", "layer", "phase", "time_us", HOST, HOST_BUSY, SM_CLOCK],
    "routing": [*(field.name for field in ROUTING_SCHEMA if field.type != pa.string()), MISSING],
    "frontier": [field.name for field in FRONTIER_SCHEMA if field.type != pa.string()],
}
SEED = "workload.seed"
LAYER = "workload.layer"
_JOINED = (SEED, LAYER)
_Type = TypeVar("_Type", bound=BaseModel)


class ResultsError(UserError):
    """A results directory, or a file of one, that cannot be read."""


@dataclass(frozen=True, eq=False)
class Comparison:
    """What cases on the same batches share, and under which conditions each launch was timed."""

    directory: str
    comparison_id: str
    facts: TimedFacts | RoutedFacts
    run: RunFacts
    conditions: Mapping[int, Conditions]


@dataclass(frozen=True, eq=False)
class Directory:
    """Comparisons of one directory in the order of its sweep, and what was recorded of their cases.

    Attributes:
        cases: a row per case in run.json's order: ``comparison``, its place among ``comparisons``; ``case_id``;
            ``facts`` (``CaseFacts``); ``status``, of the schema; ``reason``, why it is not ok. A case that failed
            in one launch failed. Its number, the index, is the column ``case`` of the other frames, which hold
            ``_COLUMNS`` of the cases that are ok.
        samples: a row per launch, rank, batch, iteration, kind, layer and phase, at the pace of the slower of device
            and host (``paced``).
        routing: a row per rank, batch and layer.
        frontier: a row per batch and layer, where it was computed.
    """

    comparisons: tuple[Comparison, ...]
    cases: pd.DataFrame
    samples: pd.DataFrame
    routing: pd.DataFrame
    frontier: pd.DataFrame


@dataclass(frozen=True, eq=False)
class Store:
    """Directories beside each other, in the order in which they were named."""

    directories: tuple[Directory, ...]

    @cached_property
    def comparisons(self) -> tuple[Comparison, ...]:
        return tuple(one for directory in self.directories for one in directory.comparisons)

    @cached_property
    def by_id(self) -> dict[tuple[str, str], Comparison]:
        return {(comparison.directory, comparison.comparison_id): comparison for comparison in self.comparisons}


class Read(NamedTuple):
    """A comparison, its cases, and by table their rows, whose column ``case`` is a row of its cases."""

    comparison: Comparison
    cases: pd.DataFrame
    frames: dict[str, pd.DataFrame]


# ---- files -----------------------------------------------------------------------------------------------------------


def typed(model: type[_Type], where: str, content: Any) -> _Type:
    """Content as its type; ResultsError names the first key that is otherwise, behind ``where``."""
    try:
        return model.model_validate(content)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        key = ".".join(map(str, first["loc"])) or "damaged"
        raise ResultsError(f"{where}{brief(key, 200, quoted=False)}: {problem_words(first)}") from None


def read_document(path: Path, model: type[_Type]) -> _Type:
    """A JSON document of a results directory; ResultsError where it is missing, damaged or of another type."""
    try:
        content = read_json(path)
    except (FileNotFoundError, NotADirectoryError):
        raise ResultsError(f"{path}: missing; a results directory is one that `moe-ep-bench` has written") from None
    except OSError as error:
        raise ResultsError(f"{path}: {error.strerror}") from None
    except ValueError as error:
        raise ResultsError(str(error)) from None
    version = content.get("schema_version") if isinstance(content, dict) else None
    if model is RunFacts and version not in READABLE_VERSIONS:
        hint = "another version of this program wrote it: use that one, or measure again elsewhere"
        expected = " or ".join(map(str, READABLE_VERSIONS))
        raise ResultsError(f"{path}: schema_version: expected {expected}, got {brief(version)}; {hint}")
    return typed(model, f"{path}: ", content)


def facts_of(path: Path, run: RunFacts) -> tuple[dict[str, Any], dict[str, CaseFacts]]:
    """The comparisons of run.json, and its cases in the config's order, by id."""
    model = {"route": RoutedFacts, "quality": JudgedFacts}.get(run.mode, TimedFacts)
    comparisons = {key: typed(model, f"{path}: comparisons.{key}.", told) for key, told in run.comparisons.items()}
    cases = {key: typed(CaseFacts, f"{path}: cases.{key}.", told) for key, told in run.cases.items()}
    return comparisons, dict(sorted(cases.items(), key=lambda item: item[1].order))


def read_part(table: str, path: Path, columns: Sequence[str] | None = None) -> pd.DataFrame:
    """Read columns of a part (None = all); words of samples are categories; routing has ``MISSING``.

    Raises:
        ResultsError: it is damaged.
    """
    if columns is not None and MISSING in columns:  # Their policies tell what parts of version 4 leave open.
        columns = [*columns, "policy", "policy_params"]
    try:
        # Quicker than pq.read_table by half: a part is one small file.
        with pq.ParquetFile(path, page_checksum_verification=True) as part:
            rows = part.read(columns, use_threads=False)
    except (OSError, pa.ArrowException) as error:
        raise ResultsError(f"{path}: damaged, not Parquet: {' '.join(str(error).split())}") from error
    # Of millions of samples each word is one object.
    frame = rows.to_pandas(strings_to_categorical=table == "samples")
    return _with_missing(frame) if "num_topk_pairs" in frame else frame


def _with_missing(routing: pd.DataFrame) -> pd.DataFrame:
    """Routing with ``MISSING``; of version 4, whose ``num_dropped_pairs`` are all missing ones, told apart.

    A row has sums over tokens, and rerouted is min(missing, added) of each token. The sums tell where nothing is
    missing, nothing is added, or no token may hold more experts than its top-k, so that none adds more than it lacks.
    Elsewhere dropped and rerouted pairs are unknown (null).
    """
    if "num_rerouted_pairs" in routing:
        return routing.assign(**{MISSING: routing["num_dropped_pairs"] + routing["num_rerouted_pairs"]})
    missing_N, topk_N = routing["num_dropped_pairs"], routing["num_topk_pairs"]
    added_N = routing["num_pairs"] - topk_N + missing_N
    if "padding_pairs" in routing:
        added_N = added_N - routing["padding_pairs"]
    about = [routing["policy"], routing["policy_params"], routing["load_E"].map(len), topk_N // routing["num_tokens"]]
    adds_most_N = np.array([_holds_more(*row) for row in zip(*about, strict=True)], bool)
    is_known = (missing_N == 0) | (added_N == 0) | ~adds_most_N
    rerouted_N = added_N.where(missing_N > 0, 0).where(is_known)
    dropped_N = missing_N - rerouted_N
    return routing.drop(columns="dropped_fraction", errors="ignore").assign(
        num_dropped_pairs=dropped_N,
        num_rerouted_pairs=rerouted_N,
        dropped_share=dropped_N / topk_N,
        rerouted_share=rerouted_N / topk_N,
        **{MISSING: missing_N},
    )


@cache
def _holds_more(name: str | None, params: str, num_experts: int, top_k: float) -> bool:
    """Whether a token may hold more than ``top_k`` experts, as far as this package knows the policy."""
    if not top_k > 0 or name not in POLICIES:
        return top_k > 0
    if POLICIES[name].most_experts is SteppedPolicy.most_experts:
        return False
    known = {field.name for field in fields(POLICIES[name])}
    given = {key: value for key, value in json.loads(params).items() if value is not None}
    if any(value for key, value in given.items() if key not in known):  # of fields that are gone
        return True
    try:
        policy = make_policy({"name": name, **{key: value for key, value in given.items() if key in known}})
    except UserError:
        return True
    return policy.most_experts(num_experts, RoutingContext(top_k=int(top_k))) > top_k


# ---- directories -----------------------------------------------------------------------------------------------------


def kind_of(directory: Path) -> str:
    """What a directory holds: validation, quality or times, routing included; what cannot be read is the last."""
    if ValidationDirectory(directory).pairs.is_file():
        return "validation"
    with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
        if read_json(RunDirectory(directory).run_json)["mode"] == "quality":
            return "quality"
    return "times"


def load(directories: Path | Iterable[Path], passed_over: list[str] | None = None, *, join_draws: bool = True) -> Store:
    """Read directories of times or of routing; one that is named twice is read once.

    Args:
        passed_over: gets a line for each thing that is left out; None = the first is raised.
        join_draws: comparisons that differ in the seed of their traffic, or in its layer, become one; ``samples`` are
            of one seed each, so read them apart.

    Raises:
        ResultsError: one line that names the file and what is wrong with it; with ``passed_over`` only where nothing
            is left.
    """
    read: list[Directory] = []
    lines: list[str] = []
    for name, folder in _named([directories] if isinstance(directories, Path) else directories).items():
        try:
            one, left_out = read_directory(name, folder, join_draws=join_draws)
        except ResultsError as error:
            one, left_out = None, [str(error)]
        read += [] if one is None else [one]
        lines += left_out
    if not read or (lines and passed_over is None):
        raise ResultsError(lines[0] if lines else "expected a directory, got none")
    if passed_over is not None:
        passed_over += lines
    return Store(tuple(read))


def _together(parts: Sequence[pd.DataFrame]) -> pd.DataFrame:
    """Rows of several frames; empty ones, whose columns have no types, are left out."""
    return pd.concat([rows for rows in parts if len(rows)] or parts[:1], ignore_index=True)


def _named(directories: Iterable[Path]) -> dict[str, Path]:
    """Directories by a short name of each: its own, or its whole path where several have that."""
    paths: dict[Path, Path] = {}
    for directory in directories:
        paths.setdefault(directory.resolve(), directory)
    count = Counter(path.name for path in paths)
    return {
        path.name if path.name and count[path.name] == 1 else "/".join(path.parts[1:]) or "/": directory
        for path, directory in paths.items()
    }


def read_directory(name: str, folder: Path, *, join_draws: bool) -> tuple[Directory | None, list[str]]:
    """All comparisons that can be read, None where there are none, and a line for each thing that is left out."""
    files, kind = RunDirectory(folder), kind_of(folder)
    if kind == "validation":
        raise ResultsError(f"{folder}: holds two runs side by side: name {folder}/real or {folder}/emulated")
    if kind == "quality":
        raise ResultsError(
            f"{folder}: holds what policies do to a model's answers, without times; expected times or routing"
        )
    run = read_document(files.run_json, RunFacts)
    facts, listed = facts_of(files.run_json, run)
    paths = {table: files.parts(table) for table in _COLUMNS}
    read: list[Read] = []
    lines: list[str] = []
    for key in sorted(facts, key=lambda key: _place_in_sweep(facts[key])):
        cases = {case_id: case for case_id, case in listed.items() if case.comparison_id == key}
        of_comparison = {table: of_table.get(key, []) for table, of_table in paths.items()}
        try:
            read.append(_read_comparison(files, of_comparison, (name, key), facts[key], run, cases, lines))
        except ResultsError as error:
            lines.append(str(error))
    tried = [case for one in read for case in one.cases.itertuples()]
    if not any(case.status == "ok" for case in tried):
        if lines:  # They say why.
            return None, lines
        first = f"{tried[0].facts.label}: {tried[0].status}: {tried[0].reason}" if tried else "run.json lists none"
        raise ResultsError(f"{folder}: no case was measured; {first}")
    read = _with_draws_joined(read) if join_draws else read
    cases = pd.concat([one.cases.assign(comparison=place) for place, one in enumerate(read)], ignore_index=True)
    if not (cases["status"] == "ok").any():
        raise ResultsError(f"{folder}: no case was measured under every seed of its traffic")
    begins = np.cumsum([0, *(len(one.cases) for one in read)])
    frames = {
        table: _together([rows.assign(case=rows["case"] + begin) for rows, begin in zip(parts, begins, strict=False)])
        for table, parts in ((table, [one.frames[table] for one in read]) for table in _COLUMNS)
    }
    return Directory(tuple(one.comparison for one in read), cases, **frames), lines


def _place_in_sweep(facts: TimedFacts | RoutedFacts) -> tuple[list[tuple[bool, Any]], int]:
    """Sorts comparisons by the values of their swept keys, numbers before words, then by the config's order."""
    point = facts.point if isinstance(facts, TimedFacts) else {}
    values = [point[key] for key in sorted(point)]
    places = [(False, value) if isinstance(value, int | float) else (True, json.dumps(value)) for value in values]
    return places, facts.order if isinstance(facts, RoutedFacts) else 0


def _read_comparison(
    files: RunDirectory,
    paths: Mapping[str, Sequence[Path]],
    key: tuple[str, str],
    facts: TimedFacts | RoutedFacts,
    run: RunFacts,
    listed: Mapping[str, CaseFacts],
    lines: list[str],
) -> Read:
    """Read all parts of a comparison; ``lines`` gets what the run has not come to.

    Raises:
        ResultsError: a part cannot be read, or a measured case lacks its routing.
    """
    parts: dict[str, list[pd.DataFrame]] = {}
    for table, columns in _COLUMNS.items():
        more = ["status", "reason"] if table == "samples" else []
        parts[table] = [read_part(table, path, ["case_id", *columns, *more]) for path in paths[table]]
    is_timed = isinstance(facts, TimedFacts)
    routed = {case_id for part in parts["routing"] for case_id in part["case_id"].unique()}
    routed_ok = pd.DataFrame({"case_id": list(routed), "status": "ok", "reason": None})
    told = (_statuses(parts["samples"]) if is_timed else routed_ok).set_index("case_id")
    cases = pd.DataFrame({"case_id": list(listed), "facts": list(listed.values())}).join(told, on="case_id")
    missing, cases = cases[cases["status"].isna()], cases[cases["status"].notna()].reset_index(drop=True)
    if len(missing):
        path = files.path("samples", key[1], 0) if is_timed else files.path("routing", key[1])
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        left = f"no rows of {missing['facts'].iloc[0].label}{more}; the run did not finish: start it again to go on"
        lines.append(f"{path}: {left}")
    ok = cases[cases["status"] == "ok"]
    for case in ok[~ok["case_id"].isin(routed)].itertuples():
        raise ResultsError(f"{files.path('routing', key[1])}: no rows of {case.facts.label}, which was measured")
    frames = {table: _rows_of(table, of_table, ok) for table, of_table in parts.items()}
    frames["samples"] = paced(frames["samples"])
    launches = {int(part["launch"].iloc[0]): part["case_id"].isin(ok["case_id"]).any() for part in parts["samples"]}
    conditions = {
        launch: read_document(path, Conditions)
        for launch, is_measured in launches.items()
        if is_measured and (path := files.conditions(key[1], launch)).is_file()
    }
    return Read(Comparison(*key, facts, run, conditions), cases, frames)


def _statuses(parts: Sequence[pd.DataFrame]) -> pd.DataFrame:
    """Status and reason of each case: those of the first launch in which it is not ok."""
    columns = ["case_id", "launch", "status", "reason"]
    told = [part[columns].drop_duplicates().astype(object) for part in parts]
    rows = pd.concat([pd.DataFrame(columns=columns), *told])
    if len(parts) > 1:
        where = "launch " + (rows["launch"] + 1).astype(str) + ": "
        rows["reason"] = (where + rows["reason"].astype(str)).where(rows["status"] != "ok", None)
    rows = rows.sort_values("status", key=lambda status: status == "ok", kind="stable").drop_duplicates("case_id")
    return rows[["case_id", "status", "reason"]]


def _rows_of(table: str, parts: Sequence[pd.DataFrame], ok: pd.DataFrame) -> pd.DataFrame:
    """The rows of cases that are ok, of all parts of a table."""
    frames = [pd.DataFrame(columns=["case", *_COLUMNS[table]])]
    for part in parts:
        place_N = pd.Index(ok["case_id"]).get_indexer(part["case_id"])
        rows = part[place_N >= 0].assign(case=ok.index[place_N[place_N >= 0]])
        rows = rows.reindex(columns=frames[0].columns)  # Parts of earlier versions lack some.
        if table == "samples":
            rows = rows.astype({"rank": int, "batch": int, "iteration": int, **_WORDS})
        frames.append(rows)
    return _together(frames)


def paced(samples: pd.DataFrame) -> pd.DataFrame:
    """Samples in which a case takes as long as the slower of its device and its host, in each batch of a rank.

    A server's layers follow each other no faster than either. Which of them is the slower is told by their medians over
    iterations: where they alternate, the larger of each iteration would be more than either takes. Of breakdown
    iterations, what the host takes beyond the device is unaccounted for.
    """
    totals = samples[samples["phase"].eq(TOTAL) & samples[HOST_BUSY].notna()]
    cell = ["case", "launch", "batch", "rank", "kind"]
    of_cell = totals.groupby(cell, observed=True)[["time_us", HOST_BUSY]].transform("median")
    totals = totals[of_cell[HOST_BUSY] > of_cell["time_us"]]
    if totals.empty:
        return samples
    beyond_us = (totals[HOST_BUSY] - totals["time_us"]).astype(float)
    time_us = samples["time_us"].astype(float)
    time_us[totals.index] += beyond_us
    step = [*cell, "iteration"]
    rest = samples.loc[samples["phase"].eq(UNACCOUNTED), step].reset_index(names="row")
    rest = rest.merge(totals[step].assign(beyond_us=beyond_us), on=step)
    time_us[rest["row"]] += rest["beyond_us"].to_numpy()
    return samples.assign(time_us=time_us)


def jobs(store: Store) -> pd.DataFrame:
    """A row per directory and job whose rows are there, in order of time.

    Columns: ``directory``, ``run_id``, ``created``, ``command`` and ``config_text`` (word for word; null where they
    were not recorded), ``config`` (resolved), ``environment`` and ``hashes`` (dicts).
    """
    runs = {one.directory: one.run for one in store.comparisons}
    rows = [
        {"directory": name, "run_id": run_id, **job.model_dump()}
        for name, run in runs.items()
        for run_id, job in sorted(run.runs.items(), key=lambda item: (str(item[1].created), item[0]))
    ]
    return pd.DataFrame(rows)


# ---- draws of the traffic --------------------------------------------------------------------------------------------


def _with_draws_joined(read: Iterable[Read]) -> list[Read]:
    """Comparisons joined, each under the id of its first, or of the group of routed layers."""
    groups: dict[str, list[Read]] = {}
    for one in read:
        groups.setdefault(_alike(one), []).append(one)
    return [_joined(members) for members in groups.values()]


def _alike(one: Read) -> str:
    """What comparisons that are joined have alike; what a seed achieved may differ, what was asked for may not."""
    facts = one.comparison.facts
    if isinstance(facts, RoutedFacts):
        return facts.group
    if not _drawn(one.comparison) or one.frames["samples"]["launch"].nunique() > 1:
        return one.comparison.comparison_id
    targets = {key: value for key, value in facts.workload.targets.items() if key != "expert_loads"}
    asked = [_point(one.comparison), [*_drawn(one.comparison)], facts.workload.kind, targets]
    asked.append(facts.workload.skew and facts.workload.skew.model_dump())
    apart = {"point": True, "workload": True, "title": True, "sizes": True, "order": True}
    apart |= {"whole": {"num_shared_by_chance", "shared_by_chance"}}  # of earlier versions
    return json.dumps([facts.model_dump(mode="json", exclude=apart), asked], sort_keys=True)


def _point(comparison: Comparison) -> dict[str, object]:
    """The point of the sweep without what is joined."""
    return {key: value for key, value in comparison.facts.point.items() if key not in _drawn(comparison)}


def _drawn(comparison: Comparison) -> dict[str, int]:
    """What is joined of the point of the sweep."""
    return {key: value for key in _JOINED if isinstance(value := comparison.facts.point.get(key), int)}


def _joined(members: Sequence[Read]) -> Read:
    """One of several: cases by what they are, launch after launch and batch after batch, or layer beside layer.

    A case that failed for one seed failed; one that a routed layer lacks is left out.
    """
    comparison = members[0].comparison
    is_routed = isinstance(comparison.facts, RoutedFacts)
    if len(members) == 1 and not is_routed:
        return members[0]
    listed, parts, begin = [], {table: [] for table in members[0].frames}, 0
    for launch, (of_member, cases, frames) in enumerate(members):
        about = [[facts.role, facts.policy, facts.policy_params, facts.label] for facts in cases["facts"]]
        keys = pd.Series([json.dumps(words, sort_keys=True) for words in about], cases.index)
        listed.append(cases.assign(key=keys))
        given = {"layer": of_member.facts.layer} if is_routed else {"launch": launch}
        for table, rows in frames.items():
            own = {name: value for name, value in given.items() if name in rows and value is not None}
            parts[table].append(rows.assign(case=rows["case"].map(keys), batch=rows["batch"] + begin, **own))
        begin += 0 if is_routed else of_member.facts.num_batches
    cases = pd.concat(listed)
    if is_routed:
        cases = cases[cases.groupby("key")["key"].transform("size") == len(members)]
    cases = cases.sort_values("status", key=lambda status: status == "ok", kind="stable")
    cases = cases.drop_duplicates("key", ignore_index=True)
    numbers = pd.Series(cases.index, cases["key"])[(cases["status"] == "ok").to_numpy()]
    joined_frames = {}
    for table, of_table in parts.items():
        rows = _together(of_table)
        rows = rows[rows["case"].isin(numbers.index)]
        joined_frames[table] = rows.assign(case=rows["case"].map(numbers).astype(int))
    return Read(_shared([one.comparison for one in members]), cases.drop(columns="key"), joined_frames)


def _shared(members: Sequence[Comparison]) -> Comparison:
    """What the cases of several comparisons share; conditions of each are those of a launch."""
    first, facts = members[0], members[0].facts
    if isinstance(facts, RoutedFacts):
        first = min(members, key=lambda comparison: comparison.facts.layer or 0)
        return replace(first, comparison_id=facts.group)
    num_batches = sum(comparison.facts.num_batches for comparison in members)
    swept = {key: {_drawn(one)[key] for one in members} for key in _drawn(first)}
    draws = len(members) if SEED in swept else 1

    def of_all(words: str) -> str:
        """Words of the first comparison, said of all."""
        words = words.replace(", one draw", f", {draws} draws")
        for key, values in swept.items():
            name = key.rpartition(".")[2]
            several = f"{len(values)} {name}s from {min(values)} to {max(values)}"
            words = re.sub(rf"\b{name} {facts.point[key]}\b", several, words, count=1)
        return words

    shared = {
        "title": of_all(facts.title),
        "workload": facts.workload.model_copy(update={"description": of_all(facts.workload.description)}),
        "point": _point(first),
        "num_batches": num_batches,
        "draws": draws,
        "layers": len(swept.get(LAYER, [0])),
    }
    conditions = {launch: told for launch, one in enumerate(members) for told in one.conditions.values()}
    return replace(first, facts=facts.model_copy(update=shared), conditions=conditions)
