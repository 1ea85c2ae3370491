"""``route``: what policies do to loads, work and score mass, on any number of virtual ranks; nothing is timed.

A routing decision needs scores and nothing else, so that a laptop can answer how many experts a batch activates
or how full the fullest of 256 ranks would be. Batches are made and dealt to virtual ranks exactly as ``run`` deals
them to real ones, and a policy sees what it would see there: one rank's tokens, and statistics summed over all
ranks where it decides for the whole batch. One config serves both commands; ``on_cpu`` is not applied, for a
size that is too much work for a CPU's experts is none for routing.

Without ``layer.ep_size`` there are 8 ranks, one node's worth, or as many as divide the model's experts.

Shapes: T = tokens of a rank, E = experts, K = top_k, R = EP ranks.
"""

from __future__ import annotations

import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from moe_ep_bench import environment
from moe_ep_bench.config import Experiment, RecordedConfig, load_experiments
from moe_ep_bench.exit_codes import OK
from moe_ep_bench.layer.experts import DRAWS, seeded_generator
from moe_ep_bench.metrics import ScoreMetrics, routing_metrics, score_metrics, score_order, token_overlap
from moe_ep_bench.placement import Placement
from moe_ep_bench.plurals import tokens_words
from moe_ep_bench.policies import Policy, RoutingContext, make_policy
from moe_ep_bench.policies.capacity import IMAGE
from moe_ep_bench.policies.selection import top_k_map
from moe_ep_bench.policies.together import route_together
from moe_ep_bench.progress import progress_bar
from moe_ep_bench.records import SCHEMA_VERSION, RunDirectory, stable_hash
from moe_ep_bench.scopes.comparison import (
    BASELINE,
    POLICY,
    CaseSpec,
    Planned,
    check_rank_shares,
    check_scope,
    default_ep_size,
    make_workload,
)
from moe_ep_bench.scopes.directory import check_agreement, hold_comparisons, keep_other_policies
from moe_ep_bench.scopes.job import identity
from moe_ep_bench.scopes.padding import padding_in_title
from moe_ep_bench.scopes.planning import check_distinct
from moe_ep_bench.scopes.run import describe_experiment
from moe_ep_bench.scopes.slices import check_whole_experts
from moe_ep_bench.scopes.traffic import one_thread
from moe_ep_bench.workload import RecordedWorkload, TokenBatch, deal

_CPU = torch.device("cpu")
# The baseline's rule: the model's own top-k.
_NATIVE = make_policy({"name": "topk"})


@dataclass(frozen=True)
class RouteComparison(Planned):
    """One experiment at one point of its sweep, on virtual ranks."""

    @staticmethod
    def of(experiment: Experiment) -> RouteComparison:
        """Check that the experiment fits its ranks and every policy the model, and open its workload.

        Raises:
            ValueError: naming the key whose value does not fit.
        """
        check_scope(experiment)
        check_whole_experts(experiment, "route lays out")
        model = experiment.model.spec()
        ep_size = experiment.layer.ep_size or default_ep_size(model.num_experts)
        if model.num_experts % ep_size:
            raise ValueError(
                f"layer.ep_size: expected a divisor of the {model.num_experts} experts of {model.name}, got {ep_size}"
            )
        check_rank_shares(experiment, ep_size)
        planned = RouteComparison(experiment, ep_size, make_workload(experiment, model, ep_size))
        assert planned.placement
        planned.describe_kernels(planned.cases, "cpu")  # Finds those that cannot run.
        modality_T = None if experiment.route.image_share is None else torch.zeros(2, dtype=torch.int64)
        try:
            planned.try_policies(modality_T)
        except ValueError as error:
            hint = "; route.image_share assumes images" if "modality_T" in str(error) else ""
            raise ValueError(f"{error}{hint}") from None
        planned.check_padding()
        planned.workload.batch(0)  # Finds skews that cannot be had.
        return planned

    @cached_property
    def placement(self) -> Placement:
        return self.experiment.route.make_placement(self.model.num_experts, self.ep_size)

    @cached_property
    def definition(self) -> dict[str, Any]:
        """All that decides how tokens are routed. A placement does not: it is applied to what was counted."""
        return {
            "mode": "route",
            "model": self.model.model_dump(mode="json"),
            "workload": self.define_workload(),
            "layer": {"ep_size": self.ep_size, "seed": self.experiment.layer.seed},
            "image_share": self.experiment.route.image_share,
        }

    @cached_property
    def cases(self) -> list[CaseSpec]:
        """The model's own top-k, and all policies; ``topk`` where it differs, for it is told of padding."""
        policies = self.experiment.make_policies()
        return [
            self.case(BASELINE, "native"),
            *(self.case(POLICY, one.name, one) for one in policies if one != _NATIVE or self._masks_padding),
        ]

    @property
    def _masks_padding(self) -> bool:
        config = self.experiment.workload
        return config.mask_padding and config.padding_per_rank > 0

    @property
    def layer(self) -> int | None:
        return self.workload.layer if isinstance(self.workload, RecordedWorkload) else None

    @property
    def traffic(self) -> str:
        """Where tokens come from, in a few words, without layer and size."""
        return self._source + padding_in_title(self.experiment.workload)

    @property
    def _source(self) -> str:
        config = self.experiment.workload
        if isinstance(self.workload, RecordedWorkload):
            assert isinstance(config, RecordedConfig)
            domains = " + ".join(trace.metadata["domain"] for trace in self.workload.traces)
            return f"{domains}, {self.phase}, {config.tail_words}"
        assert not isinstance(config, RecordedConfig)
        if config.skew is not None:
            return f"synthetic, {config.skew.replace('_', ' ')}"
        if config.peak_load is not None:
            return f"synthetic, peak load {config.peak_load:g}"
        return "synthetic, uniform" if config.family == "uniform" else "synthetic, unskewed"

    @property
    def phase(self) -> str:
        """``decode`` where a batch is one step of many requests or was recorded in decoding, else ``prefill``."""
        config = self.experiment.workload
        if isinstance(self.workload, RecordedWorkload):
            assert isinstance(config, RecordedConfig)
            recorded = {trace.metadata["phase"] for trace in self.workload.traces}
            return "decode" if config.arrangement == "decode" or recorded == {"decode"} else "prefill"
        assert not isinstance(config, RecordedConfig)
        return "decode" if config.sequence_length == 1 else "prefill"

    @property
    def title(self) -> str:
        layer = "" if self.layer is None else f", layer {self.layer}"
        return f"{self.model.name}, EP {self.ep_size}, {tokens_words(self.num_tokens)}, {self.traffic}{layer}"

    @property
    def group(self) -> str:
        """Equal for layers that are routed alike."""
        return self._alike_but_for("layer")

    def _alike_but_for(self, *keys: str) -> str:
        """Equal for comparisons that differ in these keys of their workload only."""
        workload = {key: value for key, value in self.definition["workload"].items() if key not in keys}
        return stable_hash({**self.definition, "workload": workload})

    def describe(self) -> dict[str, Any]:
        """What analysis needs to know of the comparison: JSON-ready."""
        return {
            "title": self.title,
            "model": self.model.name,
            "num_experts": self.model.num_experts,
            "top_k": self.model.top_k,
            "num_ranks": self.ep_size,
            "num_tokens": self.num_tokens,
            "num_batches": self.workload.num_batches,
            "layer": self.layer,
            "traffic": self.traffic,
            "phase": self.phase,
            "group": self.group,
            "family": self._alike_but_for("layer", "num_tokens", "num_batches"),
            "placement": {
                "name": self.placement.name,
                "shares": self.placement.share_RE.tolist() if self.placement.name == "matrix" else None,
            },
            "layer_weights": self.experiment.route.layer_weights,
            "image_share": self.experiment.route.image_share,
            "workload": self.describe_workload(),
        }


def rule(case: CaseSpec) -> Policy:
    """What routes a case."""
    return case.policy or _NATIVE


@dataclass(frozen=True, eq=False)
class RankShare:
    """A virtual rank's tokens of a batch, and what is so of them."""

    scores_TE: Tensor
    context: RoutingContext

    @cached_property
    def of_scores(self) -> ScoreMetrics:
        return score_metrics(self.scores_TE, self.context)

    @staticmethod
    def of(planned: Planned, batch: TokenBatch, index: int, rank: int, tokens_T: Tensor) -> RankShare:
        experiment = planned.experiment
        tokens = batch.rows(tokens_T).with_padding(experiment.workload.padding_per_rank)
        image_share = experiment.route.image_share
        context = replace(
            planned.context(rank, tokens.sequence_id_T, tokens.valid_T),
            modality_T=None if image_share is None else assumed_modality(tokens.sequence_id_T, image_share),
            generator=seeded_generator(_CPU, experiment.layer.seed, DRAWS, index, rank),
        )
        return RankShare(tokens.scores_TE, context)

    def fresh(self, case: CaseSpec, seed: int, batch: int) -> RoutingContext:
        """What the case's rule knows, with randomness started anew, so that no case depends on those before it."""
        generator = self.context.generator
        assert generator is not None
        generator.set_state(seeded_generator(_CPU, seed, DRAWS, batch, self.context.rank).get_state())
        return case.told(self.context)


def assumed_modality(sequence_id_T: Tensor, image_share: float) -> Tensor:
    """Call the first tokens of every sequence images, rounded to whole tokens: int64 [T], 0 = text.

    Vision-language models put an image's tokens before the question about it. The recordings at hand are of
    text, so the scores of these tokens are those of text.
    """
    _, sequence_T, length_S = torch.unique_consecutive(sequence_id_T, return_inverse=True, return_counts=True)
    first_S = length_S.cumsum(0) - length_S
    place_T = torch.arange(len(sequence_id_T)) - first_S[sequence_T]
    return torch.where(place_T < (image_share * length_S).round()[sequence_T], IMAGE, 0)


def route(config: Path, out: Path, overrides: Sequence[str], *, force: bool = False) -> RunDirectory:
    """Route every batch of every comparison of ``config`` by every policy and write the rows.

    Args:
        out: results directory; cases whose rows are in it are not routed again unless ``force``.

    Raises:
        ValueError: one line naming the file, the key and what is allowed; or why ``out`` cannot be used.
    """
    comparisons = plan_routes(config, overrides)
    directory = RunDirectory(out)
    check_agreement(directory, "route", {"torch": torch.__version__}, force=force)
    with hold_comparisons(directory, comparisons):
        _route_all(directory, comparisons, force)
    return directory


def _route_all(directory: RunDirectory, comparisons: Sequence[RouteComparison], force: bool) -> None:
    """Route what is not there yet, or all of it where ``force``."""
    todo = [
        [case for case in comparison.cases if force or not directory.is_routed(case.case_id)]
        for comparison in comparisons
    ]
    # What a comparison leaves beside its cases stands under the same rule.
    statistics = [
        force or bool(cases) or not directory.scores_path(comparison.comparison_id).exists()
        for comparison, cases in zip(comparisons, todo, strict=True)
    ]
    run_id = stable_hash([time.time_ns()])
    description = _run_description(run_id, comparisons)
    keep_other_policies(directory, description, directory.is_routed)
    directory.write_run(description, directory.is_routed)
    if not any(statistics):
        print("moe-ep-bench: all cases were routed before; --force routes them again", file=sys.stderr)
    wanted_batches = zip(comparisons, statistics, strict=True)
    total = sum(comparison.workload.num_batches for comparison, wanted in wanted_batches if wanted)
    progress = progress_bar(total, "batch")
    with progress, one_thread(), torch.inference_mode():
        for comparison, cases, wanted in zip(comparisons, todo, statistics, strict=True):
            if wanted:
                progress.set_description(comparison.title)
                _route_comparison(directory, run_id, comparison, cases, progress)


def plan_routes(config: Path, overrides: Iterable[str]) -> list[RouteComparison]:
    """All comparisons of a config file, each found to fit and its workload found to be there.

    Raises:
        ValueError: one line naming the file, the key and what is allowed.
    """
    experiments = load_experiments(config, overrides, on_cpu=False)
    try:
        planned = [RouteComparison.of(experiment) for experiment in experiments]
        num_layers = Counter(comparison.group for comparison in planned)
        for comparison in planned:
            weights = comparison.experiment.route.layer_weights
            expected = num_layers[comparison.group]
            if weights is not None and (len(weights) != expected or not any(weights)):
                raise ValueError(
                    f"route.layer_weights: expected {expected} numbers (layers), some above 0, got {list(weights)}"
                )
    except ValueError as problem:
        raise ValueError(f"{config}: {problem}") from None
    check_distinct(config, planned)
    return planned


def dry_run(config: Path, overrides: Sequence[str]) -> int:
    """Print the cases; route nothing."""
    for comparison in plan_routes(config, overrides):
        print(f"{comparison.title}: {comparison.workload.num_batches} batches, {comparison.placement.name} placement")
        for case in comparison.cases:
            print(f"  {case.case_id}  {case.role:8}  {case.label}")
    return OK


def _route_comparison(
    directory: RunDirectory, run_id: str, comparison: RouteComparison, cases: Sequence[CaseSpec], progress: tqdm
) -> None:
    """Route ``cases`` and write their parts; one batch is in memory at a time."""
    layer = comparison.experiment.layer
    rows_of: dict[str, dict[str, list[Any]]] = {case.case_id: defaultdict(list) for case in cases}
    scores: dict[str, list[Any]] = defaultdict(list)
    overlap: dict[str, list[Any]] = defaultdict(list)
    for index in range(comparison.workload.num_batches):
        batch = comparison.workload.batch(index)
        tokens_R = deal(batch, comparison.ep_size, comparison.experiment.workload.rank_shares)
        shares = [RankShare.of(comparison, batch, index, rank, tokens_T) for rank, tokens_T in enumerate(tokens_R)]
        for case in cases:
            for rank, row in enumerate(route_batch(case, shares, layer.seed, index, layer.kernel)):
                _append(rows_of[case.case_id], {**row, "rank": rank, "batch": index, "layer": comparison.layer})
        for row in _score_rows(batch):
            _append(scores, {**row, "batch": index, "comparison_id": comparison.comparison_id})
        for row in _overlap_rows(comparison, batch, index):
            _append(overlap, {**row, "batch": index, "comparison_id": comparison.comparison_id})
        progress.update()
    for case in cases:
        rows = rows_of[case.case_id]
        directory.write_route(case.case_id, {**identity("route", run_id, comparison, case, len(rows["rank"])), **rows})
    if overlap:
        directory.write_overlap(comparison.comparison_id, overlap)
    directory.write_scores(comparison.comparison_id, scores)


def route_batch(
    case: CaseSpec, shares: Sequence[RankShare], seed: int, batch: int, kernel: str = "auto"
) -> list[dict[str, Any]]:
    """Route one batch by one case as its ranks would together: the metrics of every source rank."""
    contexts = [share.fresh(case, seed, batch) for share in shares]
    routings = route_together(rule(case), [share.scores_TE for share in shares], contexts, kernel)
    gamma = case.params.get("capacity_factor")
    factor = {"capacity_factor": gamma} if isinstance(gamma, float) else {}
    rows = []
    for share, routing in zip(shares, routings, strict=True):
        row = routing_metrics(routing, share.scores_TE, share.context, of_scores=share.of_scores, **factor)
        if share.context.modality_T is not None:
            is_image_T = share.context.modality_T == IMAGE
            valid_T = share.context.token_mask_T
            row["num_image_tokens"] = int((is_image_T if valid_T is None else is_image_T & valid_T).sum())
            row["image_load_E"] = routing.map_TE[is_image_T].sum(dim=0).tolist()
        rows.append(row)
    return rows


def _score_rows(batch: TokenBatch) -> list[dict[str, Any]]:
    columns = score_order(batch.scores_TE)
    return [
        {"position": place + 1, **{name: float(values[place]) for name, values in columns.items()}}
        for place in range(batch.scores_TE.shape[1])
    ]


def _overlap_rows(comparison: RouteComparison, batch: TokenBatch, index: int) -> list[dict[str, Any]]:
    map_TE = top_k_map(batch.scores_TE, comparison.context(0, batch.sequence_id_T, None))
    domain_T = None
    if isinstance(comparison.workload, RecordedWorkload):
        token_T, _ = comparison.workload.draw(index)
        ends = np.cumsum([trace.num_tokens for trace in comparison.workload.traces])
        domain_T = torch.from_numpy(np.searchsorted(ends, token_T, side="right"))
    found = token_overlap(map_TE, batch.sequence_id_T, domain_T)
    return [{"kind": kind, "num_pairs": pairs, "shared_experts": shared} for kind, (pairs, shared) in found.items()]


def _append(rows: dict[str, list[Any]], row: Mapping[str, Any]) -> None:
    for name, value in row.items():
        rows[name].append(value)


def _run_description(run_id: str, comparisons: Sequence[RouteComparison]) -> dict[str, Any]:
    return {
        "schema_version": SCHEMA_VERSION,
        "run_id": run_id,
        "mode": "route",
        "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "config": [describe_route(comparison.experiment) for comparison in comparisons],
        "environment": environment.describe(_CPU),
        "hashes": {
            "code": environment.code_hash(),
            "config": stable_hash([comparison.definition for comparison in comparisons]),
            "workload": {comparison.comparison_id: comparison.workload.fingerprint() for comparison in comparisons},
        },
        # JSON's keys are sorted, and ids say nothing: "order" is the config's.
        "comparisons": {
            comparison.comparison_id: {
                **comparison.describe(),
                "kernel": comparison.describe_kernels(comparison.cases, "cpu"),
                "order": order,
            }
            for order, comparison in enumerate(comparisons)
        },
        "cases": {
            case.case_id: {**case.describe(comparison.comparison_id), "order": order}
            for comparison in comparisons
            for order, case in enumerate(comparison.cases)
        },
    }


def describe_route(experiment: Experiment) -> dict[str, Any]:
    """The resolved experiment for ``run.json``, without folders of this machine."""
    described = describe_experiment(experiment)
    if isinstance(experiment.route.placement, Path):
        described["route"]["placement"] = experiment.route.placement.name
    return described
