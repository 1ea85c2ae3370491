"""What a run leaves on disk: Parquet parts that appear whole or not at all, and ``run.json``.

``<out>/run.json``                   resolved config, environment, hashes, what each case is
``<out>/cases/<case_id>.parquet``    one row per launch x rank x iteration x phase (``CASE_SCHEMA``)
``<out>/routing/<case_id>.parquet``  one row per rank x batch (``ROUTING_SCHEMA``)
``<out>/conditions/<comparison_id>-<launch>.json``  the machine while a comparison was timed
``<out>/attempts/``                  what was running when a job was lost (``attempts``)
``<out>/.locks/``                    what jobs are writing at the moment (``locks``)

Several jobs may fill one directory, each with comparisons of its own (the points of a sweep). Parts are theirs alone;
``run.json`` is merged under a lock, and what was running is kept apart per job.

``route`` times nothing. It leaves ``run.json``, ``routing/`` with a few columns more (``ROUTE_SCHEMA``), and of each
comparison ``scores/<comparison_id>.parquet`` and ``overlap/<comparison_id>.parquet``.

``run`` with ``scope: model`` leaves the same as for layers, ``routing/`` with a row per layer
(``MODEL_ROUTING_SCHEMA``), and ``layers/<case_id>.parquet``: the phases of every layer (``LAYER_SCHEMA``).

``quality`` leaves ``run.json``, ``quality/<case_id>.parquet`` (``QUALITY_SCHEMA``) and ``routing/<case_id>.parquet``
(``QUALITY_ROUTING_SCHEMA``).

``accuracy`` leaves ``run.json``, ``accuracy/<case_id>.parquet`` (``ACCURACY_SCHEMA``) and ``answers/<case_id>.parquet``
(``ACCURACY_ANSWERS_SCHEMA``); a comparison there is one task.

A *case* is one policy on one workload; its id is a hash of everything that defines it. Cases
with one ``comparison_id`` ran interleaved on the same batches and may be paired within a *launch*,
one repetition of the whole process. A launch whose rows are in the part is finished and is not
run again. Samples are never thinned or averaged here:
analysis is a separate program that reads these files.

A launch in which a case could not be measured has a single row there: ``status`` other than ``ok``,
``reason``, and nulls where measurements would stand.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from moe_ep_bench import locks

SCHEMA_VERSION = 2
# Under this key of their metadata parts say which schema they are of.
VERSION_KEY = b"schema_version"

RUN_JSON = "run.json"

MODES = ("run", "emulated", "route", "quality", "accuracy")
# What was timed. ``run.json`` names it; without a word it is a layer.
SCOPES = ("layer", "model")
STATUSES = ("ok", "failed", "oom", "timeout", "skipped")

# The phases of a layer in the order in which it passes them (DESIGN: timing protocol). The wait_*
# phases are time spent at a meeting point before the slowest rank reaches it.
PHASES = (
    "shared",
    "gate",
    "wait_policy",
    "policy",
    "permute",
    "wait_metadata",
    "metadata",
    "wait_dispatch",
    "dispatch",
    "experts",
    "wait_combine",
    "combine",
)
# Of a whole model (``scope: model``), beside those of its MoE layers: what of an MoE layer none of them covers, and
# what is no MoE layer. ``rest`` is norms and residual additions.
MOE_REST = "moe_rest"
MODEL_PHASES = ("embedding", "attention", "dense", "rest", MOE_REST, "output")
# Beside the phases: the whole layer or model, and what of a breakdown iteration no phase covers.
TOTAL, UNACCOUNTED = "total", "unaccounted"

_IDENTITY = [
    ("run_id", pa.string()),
    ("case_id", pa.string()),
    ("comparison_id", pa.string()),
    ("mode", pa.string()),
    ("model", pa.string()),
    ("policy", pa.string()),
    ("policy_params", pa.string()),  # JSON
    ("num_ranks", pa.int32()),  # expert-parallel size
    ("status", pa.string()),
    ("reason", pa.string()),  # null when ok
    ("rank", pa.int32()),  # global rank
    ("batch", pa.int32()),
]

CASE_SCHEMA = pa.schema(
    [
        *_IDENTITY,
        ("launch", pa.int32()),
        ("iteration", pa.int32()),
        ("kind", pa.string()),  # plain (two clock readings) or breakdown (every phase)
        ("phase", pa.string()),  # PHASES, total, unaccounted
        ("time_us", pa.float64()),
        ("host_us", pa.float64()),  # total rows: host time to issue the iteration
        ("thread_cpu_us", pa.float64()),  # total rows: CPU time of the issuing thread
    ]
)

# Loads and traffic are of all that is computed, padding included; drops, masses and shares are of valid tokens.
ROUTING_SCHEMA = pa.schema(
    [
        *_IDENTITY,
        ("num_tokens", pa.int64()),  # valid tokens of this rank
        ("load_E", pa.list_(pa.int64())),  # pairs per expert, from this source rank
        ("load_R", pa.list_(pa.int64())),  # pairs per expert rank, from this source rank
        ("num_pairs", pa.int64()),
        ("padding_pairs", pa.int64()),  # of num_pairs, those of padding tokens
        ("num_topk_pairs", pa.int64()),
        ("num_dropped_pairs", pa.int64()),  # top-k pairs that are not computed
        ("dropped_fraction", pa.float64()),  # of top-k pairs
        ("retained_mass_topk", pa.float64()),  # selected score mass over the model's top-k mass
        ("retained_mass_all", pa.float64()),  # selected score mass over all score mass
        ("peak_load", pa.float64()),  # fullest expert over mean, this source rank
        ("max_violation", pa.float64()),  # peak_load - 1
        ("load_cv", pa.float64()),  # coefficient of variation over experts
        ("excess_load", pa.float64()),  # arXiv 2503.05066, Eq. 11
        ("tokens_without_expert", pa.int64()),
        ("experts_per_token", pa.float64()),
        ("activated_experts", pa.int64()),
        ("activated_experts_fullest_rank", pa.int64()),
        ("crossing_pairs", pa.int64()),  # pairs whose expert lives on another rank
        ("crossing_copies", pa.int64()),  # token copies to other ranks, one per (token, rank)
        ("topk_share", pa.float64()),
        ("entropy", pa.float64()),  # of scores, normalised to 0..1
        ("regime_single_head", pa.float64()),  # shares of tokens
        ("regime_smooth", pa.float64()),
        ("regime_plateau", pa.float64()),
        ("reference_error", pa.float64()),  # worst token: |layer - dense reference| / |reference|
        ("output_error", pa.float64()),  # |layer - native layer| / |native layer|, all valid tokens
    ]
)

# Columns that parts of older versions lack, with what they would hold there: no token was padding.
_ABSENT = {"padding_pairs": 0}

# What a run of whole models adds to ``cases``: the phases of every layer, of breakdown iterations. Those of ``cases``
# are their sums.
LAYER_SCHEMA = pa.schema(
    [
        *_IDENTITY,
        ("launch", pa.int32()),
        ("iteration", pa.int32()),
        ("layer", pa.int32()),  # from 0, dense ones included; null outside of all
        ("phase", pa.string()),  # PHASES and MODEL_PHASES
        ("time_us", pa.float64()),
    ]
)
# And its routing: one row per rank x batch x MoE layer. ``output_error`` is of the logits, in the last layer's row.
MODEL_ROUTING_SCHEMA = pa.schema([*ROUTING_SCHEMA, ("layer", pa.int32())])

# What ``route`` adds: which layer, and whose tokens. Virtual ranks are rows like any others.
ROUTE_SCHEMA = pa.schema(
    [
        *ROUTING_SCHEMA,
        ("layer", pa.int32()),  # of the recording; null for synthetic scores
        ("num_image_tokens", pa.int64()),  # valid ones; null where tokens have no modality
        ("image_load_E", pa.list_(pa.int64())),  # of load_E, the pairs of image tokens; null likewise
    ]
)

# What ``route`` leaves of the scores, which no policy changes: one row per batch and rank in the token's own order.
SCORES_SCHEMA = pa.schema(
    [
        ("comparison_id", pa.string()),
        ("batch", pa.int32()),
        ("position", pa.int32()),  # 1 = the best expert of a token, up to E
        ("mean_score", pa.float64()),  # over tokens, of the score at this position
        ("min_score", pa.float64()),
        ("max_score", pa.float64()),
    ]
)

# How alike tokens are: mean number of top-k experts that two tokens share (``metrics.token_overlap``).
OVERLAP_SCHEMA = pa.schema(
    [
        ("comparison_id", pa.string()),
        ("batch", pa.int32()),
        ("kind", pa.string()),  # neighbours, same_sequence, same_domain, cross_domain
        ("num_pairs", pa.int64()),  # unordered pairs of tokens that the mean is over
        ("shared_experts", pa.float64()),
    ]
)

# What ``quality`` leaves of a model's answers: one row per sequence; ``rank`` is null, the model ran as a whole.
QUALITY_SCHEMA = pa.schema(
    [
        *_IDENTITY,
        ("phase", pa.string()),  # in which the policy acted: prefill or decode
        ("sequence", pa.int32()),
        ("num_tokens", pa.int64()),  # that were predicted: all of the sequence but its first
        ("cross_entropy", pa.float64()),  # nats per token
        ("kl", pa.float64()),  # of the answer from the unpatched model's, nats per token
        ("agreement", pa.float64()),  # share of tokens whose most likely successor is the unpatched model's
    ]
)

# And of its routing: one row per batch and layer, all virtual ranks together. Where the tokens of each position were
# a batch of their own (``decode``), what is called a mean is over these steps.
QUALITY_ROUTING_SCHEMA = pa.schema(
    [
        *_IDENTITY,
        ("phase", pa.string()),
        ("layer", pa.int32()),  # of the decoder
        ("num_steps", pa.int64()),
        ("num_tokens", pa.int64()),
        ("load_E", pa.list_(pa.int64())),
        ("num_pairs", pa.int64()),
        ("num_topk_pairs", pa.int64()),
        ("num_dropped_pairs", pa.int64()),
        ("dropped_fraction", pa.float64()),
        ("retained_mass_topk", pa.float64()),
        ("retained_mass_all", pa.float64()),
        ("tokens_without_expert", pa.int64()),
        ("experts_per_token", pa.float64()),
        ("peak_load", pa.float64()),  # fullest expert over mean, mean
        ("rank_peak_load", pa.float64()),  # fullest rank over mean, mean
        ("activated_experts", pa.float64()),  # mean
        ("activated_experts_fullest_rank", pa.float64()),  # mean
        ("num_image_tokens", pa.int64()),  # null where tokens have no modality
        ("num_dropped_image_pairs", pa.int64()),  # of num_dropped_pairs; null likewise
    ]
)

# What ``accuracy`` leaves of a task of the lm-evaluation-harness: one row per metric; of a group, of its parts too.
ACCURACY_SCHEMA = pa.schema(
    [
        *_IDENTITY,
        ("task", pa.string()),
        ("is_asked", pa.bool_()),  # the config names it; False = a part of a group
        ("version", pa.string()),  # of the task; null where it has none
        ("num_fewshot", pa.int32()),
        ("num_samples", pa.int64()),
        ("metric", pa.string()),
        ("filter", pa.string()),  # of answers; none, mostly
        ("value", pa.float64()),
        ("stderr", pa.float64()),  # the harness' own; null where it gives none
        ("higher_is_better", pa.bool_()),
        # Of all passes of the task and all layers; null where nothing ran.
        ("dropped_fraction", pa.float64()),
        ("retained_mass_topk", pa.float64()),
        ("experts_per_token", pa.float64()),
    ]
)

# And of its questions: one row per question and metric, so that policies can be compared question by question.
ACCURACY_ANSWERS_SCHEMA = pa.schema(
    [
        ("case_id", pa.string()),
        ("task", pa.string()),
        ("document", pa.int64()),
        ("metric", pa.string()),
        ("filter", pa.string()),
        ("value", pa.float64()),
    ]
)


def at(layer: int | None, phase: str) -> str:
    """The name under which a layer's phase is recorded; None = of no layer."""
    return phase if layer is None else f"{layer}:{phase}"


def where(name: str) -> tuple[int | None, str]:
    """The layer and the phase of a name that ``at`` made."""
    layer, colon, phase = name.partition(":")
    return (int(layer), phase) if colon else (None, name)


def stable_hash(value: Any) -> str:
    """Hash a JSON-ready value: 16 hex digits, equal for equal content on any machine."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@contextlib.contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """Yield a temporary path that becomes ``path`` when the block ends well, and vanishes otherwise."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        with open(temporary, "rb") as written:
            os.fsync(written.fileno())
        temporary.chmod(0o644)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def check_folder(folder: Path, option: str) -> None:
    """Refuse a folder to write into that is a file, or lies below one; said before anything is read or drawn.

    Raises:
        ValueError: one line that names the option, the folder and the file.
    """
    for place in (folder, *folder.parents):
        if place.is_dir():
            return
        if place.exists():
            words = "is a file" if place == folder else f"lies below {place}, which is a file"
            raise ValueError(f"{option} {folder}: {words}; expected a directory")


def write_json(path: Path, value: Any) -> None:
    with atomic_path(path) as temporary:
        temporary.write_text(json.dumps(value, indent=2, sort_keys=True, allow_nan=False) + "\n")


class RunDirectory:
    """The files of one run. Every write is atomic; reading back tells what is already done."""

    def __init__(self, root: Path) -> None:
        self.root = root

    @property
    def run_json(self) -> Path:
        return self.root / RUN_JSON

    def case_path(self, case_id: str) -> Path:
        return self.root / "cases" / f"{case_id}.parquet"

    def routing_path(self, case_id: str) -> Path:
        return self.root / "routing" / f"{case_id}.parquet"

    def layers_path(self, case_id: str) -> Path:
        return self.root / "layers" / f"{case_id}.parquet"

    def scores_path(self, comparison_id: str) -> Path:
        return self.root / "scores" / f"{comparison_id}.parquet"

    def overlap_path(self, comparison_id: str) -> Path:
        return self.root / "overlap" / f"{comparison_id}.parquet"

    def quality_path(self, case_id: str) -> Path:
        return self.root / "quality" / f"{case_id}.parquet"

    def accuracy_path(self, case_id: str) -> Path:
        return self.root / "accuracy" / f"{case_id}.parquet"

    def answers_path(self, case_id: str) -> Path:
        return self.root / "answers" / f"{case_id}.parquet"

    @property
    def folders(self) -> list[Path]:
        """The folders of all that is written here."""
        one_of_each = self.case_path(""), self.routing_path(""), self.scores_path(""), self.overlap_path("")
        one_of_each += self.quality_path(""), self.accuracy_path(""), self.answers_path(""), self.layers_path("")
        return [*(path.parent for path in one_of_each), self.conditions_path("", 0).parent, self.attempts]

    @property
    def attempts(self) -> Path:
        return self.root / "attempts"

    @property
    def profiles(self) -> Path:
        return self.root / "profiles"

    def conditions_path(self, comparison_id: str, launch: int) -> Path:
        return self.root / "conditions" / f"{comparison_id}-{launch}.json"

    def statuses(self, case_id: str) -> dict[int, str]:
        """The status of every launch that a case's part holds; empty where there is no part that can be read."""
        try:
            rows = pq.read_table(self.case_path(case_id), columns=["launch", "status"])
        except (OSError, pa.ArrowException):
            return {}
        return dict(zip(rows["launch"].to_pylist(), rows["status"].to_pylist(), strict=True))

    def is_finished(self, case_id: str, launch: int) -> bool:
        """Whether a launch of the case has a result that stands. One that was skipped may fit another time."""
        return self.statuses(case_id).get(launch, "skipped") != "skipped"

    def remove_unfinished(self, ids: Iterable[str]) -> None:
        """Remove what a killed job had begun to write of these cases and comparisons."""
        beginnings = tuple(f".{one}" for one in ids)
        for path in (*self.root.glob(".*"), *self.root.glob("*/.*")):
            if path.name.startswith(beginnings):
                path.unlink(missing_ok=True)

    def remove_case(self, case_id: str) -> None:
        timed = self.case_path(case_id), self.layers_path(case_id), self.routing_path(case_id)
        judged = self.quality_path(case_id), self.accuracy_path(case_id), self.answers_path(case_id)
        for path in (*timed, *judged):
            path.unlink(missing_ok=True)

    def remove_conditions(self, comparison_id: str) -> None:
        for path in self.conditions_path(comparison_id, 0).parent.glob(f"{comparison_id}-*.json"):
            path.unlink()

    def write_case(self, case_id: str, launch: int, rows: Mapping[str, Sequence[Any]]) -> None:
        """Write the rows of one launch into the case's part, beside those of the other launches."""
        _write_launch(self.case_path(case_id), launch, rows, CASE_SCHEMA)

    def write_layers(self, case_id: str, launch: int, rows: Mapping[str, Sequence[Any]]) -> None:
        """Likewise the phases of every layer of a whole model."""
        _write_launch(self.layers_path(case_id), launch, rows, LAYER_SCHEMA)

    def write_routing(self, case_id: str, rows: Mapping[str, Sequence[Any]]) -> None:
        _write_table(self.routing_path(case_id), _table(rows, ROUTING_SCHEMA))

    def write_model_routing(self, case_id: str, rows: Mapping[str, Sequence[Any]]) -> None:
        _write_table(self.routing_path(case_id), _table(rows, MODEL_ROUTING_SCHEMA))

    def write_route(self, case_id: str, rows: Mapping[str, Sequence[Any]]) -> None:
        _write_table(self.routing_path(case_id), _table(rows, ROUTE_SCHEMA))

    def write_scores(self, comparison_id: str, rows: Mapping[str, Sequence[Any]]) -> None:
        _write_table(self.scores_path(comparison_id), _table(rows, SCORES_SCHEMA))

    def write_overlap(self, comparison_id: str, rows: Mapping[str, Sequence[Any]]) -> None:
        _write_table(self.overlap_path(comparison_id), _table(rows, OVERLAP_SCHEMA))

    def write_quality(
        self, case_id: str, answers: Mapping[str, Sequence[Any]], routing: Mapping[str, Sequence[Any]]
    ) -> None:
        """Write both parts of a case of ``quality``; that of its answers last, for it says that the case is done."""
        _write_table(self.routing_path(case_id), _table(routing, QUALITY_ROUTING_SCHEMA))
        _write_table(self.quality_path(case_id), _table(answers, QUALITY_SCHEMA))

    def is_judged(self, case_id: str) -> bool:
        """Whether a case of ``quality`` has its parts."""
        try:
            return pq.read_metadata(self.quality_path(case_id)).num_rows > 0
        except (OSError, pa.ArrowException):
            return False

    def write_accuracy(
        self, case_id: str, scores: Mapping[str, Sequence[Any]], answers: Mapping[str, Sequence[Any]]
    ) -> None:
        """Write both parts of a case of ``accuracy``; that of its scores last, for it says that the case is done."""
        _write_table(self.answers_path(case_id), _table(answers, ACCURACY_ANSWERS_SCHEMA))
        _write_table(self.accuracy_path(case_id), _table(scores, ACCURACY_SCHEMA))

    def is_answered(self, case_id: str) -> bool:
        """Whether a case of ``accuracy`` has its parts."""
        try:
            return pq.read_metadata(self.accuracy_path(case_id)).num_rows > 0
        except (OSError, pa.ArrowException):
            return False

    def is_routed(self, case_id: str) -> bool:
        """Whether a case of ``route`` has its part."""
        try:
            return pq.read_metadata(self.routing_path(case_id)).num_rows > 0
        except (OSError, pa.ArrowException):
            return False

    def write_run(
        self,
        description: Mapping[str, Any],
        is_done: Callable[[str], bool] | None = None,
        check: Callable[[], None] = lambda: None,
        *,
        keep_others: bool = False,
    ) -> None:
        """Write ``run.json``, and keep in it what an earlier one knew of finished comparisons.

        ``runs`` holds the provenance of every run whose rows are here, by run_id. A comparison that
        was begun under another config and never finished is dropped with its parts, unless another job is at it.

        Args:
            is_done: whether a case has what makes it finished; the default is a part of samples.
            check: raises where what is there by now does not allow it; called under the lock.
            keep_others: keep comparisons that were never finished too: other jobs have them to do.

        Raises:
            ValueError: another job has been writing ``run.json`` for a minute.
        """
        with locks.hold(self.root, {RUN_JSON: RUN_JSON}, patience_s=60.0):
            check()
            self.remove_unfinished([RUN_JSON])
            self._merge_run(description, is_done, keep_others)

    def _merge_run(
        self, description: Mapping[str, Any], is_done: Callable[[str], bool] | None, keep_others: bool
    ) -> None:
        is_done = is_done or (lambda case_id: bool(self.statuses(case_id)))
        provenance = {key: description.get(key) for key in ("created", "config", "environment", "hashes")}
        merged = {**description, "runs": {description["run_id"]: provenance}}
        earlier = json.loads(self.run_json.read_text()) if self.run_json.exists() else {}
        merged["runs"] = {**earlier.get("runs", {}), **merged["runs"]}
        for comparison_id, comparison in earlier.get("comparisons", {}).items():
            if comparison_id in description["comparisons"]:
                continue
            cases = {k: case for k, case in earlier["cases"].items() if case["comparison_id"] == comparison_id}
            kept = keep_others or locks.is_held(self.root, comparison_id)
            if kept or all(is_done(case_id) for case_id in cases):
                merged["comparisons"] = {comparison_id: comparison, **merged["comparisons"]}
                merged["cases"] = {**cases, **merged["cases"]}
            else:
                for case_id in cases:
                    self.remove_case(case_id)
        write_json(self.run_json, merged)


def completed(table: pa.Table, schema: pa.Schema) -> pa.Table:
    """A part as this version writes it: with the columns of ``schema`` that an older version did not know."""
    for place, field in enumerate(schema):
        if field.name in _ABSENT and field.name not in table.schema.names:
            values = pa.array([_ABSENT[field.name]] * table.num_rows, field.type)
            table = table.add_column(min(place, table.num_columns), field, values)
    return table


def _table(rows: Mapping[str, Sequence[Any]], schema: pa.Schema) -> pa.Table:
    """A table of the whole schema; columns that ``rows`` lack are null."""
    unknown = set(rows) - set(schema.names)
    assert not unknown, f"columns that the schema does not have: {sorted(unknown)}"
    num_rows = len(next(iter(rows.values())))
    columns = [
        pa.array(rows[name] if name in rows else [None] * num_rows, field.type)
        for name, field in zip(schema.names, schema, strict=True)
    ]
    return pa.table(columns, schema=schema)


def _write_launch(path: Path, launch: int, rows: Mapping[str, Sequence[Any]], schema: pa.Schema) -> None:
    """Write one launch's rows into a part, beside those of the other launches that it holds."""
    table = _table({**rows, "launch": [launch] * len(rows["status"])}, schema)
    try:
        earlier = pq.read_table(path)
    except (OSError, pa.ArrowException):
        earlier = schema.empty_table()
    if earlier.num_rows:
        table = pa.concat_tables([earlier.filter(pc.field("launch") != launch), table])
    _write_table(path, table)


def _write_table(path: Path, table: pa.Table) -> None:
    table = table.replace_schema_metadata({VERSION_KEY: str(SCHEMA_VERSION)})
    with atomic_path(path) as temporary:
        pq.write_table(table, temporary, compression="zstd")
