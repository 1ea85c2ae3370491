"""What a text and a task have in common as comparisons: cases that are asked the same.

A comparison is a text, or a task at one number of shots; a case is the unpatched model or one policy.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

from moe_ep_bench.bench.plan import BASELINE, POLICY, CaseSpec, default_ep_size
from moe_ep_bench.files import stable_hash
from moe_ep_bench.policies import Policy
from moe_ep_bench.quality.checkpoint import Checkpoint
from moe_ep_bench.quality.config import QualityExperiment
from moe_ep_bench.quality.passes import Phase, judged_phase

MODE = "quality"
Row = dict[str, Any]
"""Values by column; columns that are absent are null."""


class Judged(NamedTuple):
    """The rows of a finished case: ``schema.QUALITY_SCHEMA`` and, of a text, ``schema.QUALITY_ROUTING_SCHEMA``."""

    case: CaseSpec
    scores: list[Row]
    routing: list[Row]


class ModelFacts(NamedTuple):
    name: str
    num_experts: int
    top_k: int
    num_layers: int  # with experts


@dataclass(frozen=True, eq=False)
class QualityComparison:
    """One text or task of an experiment at one point of its sweep."""

    experiment: QualityExperiment
    checkpoint: Checkpoint

    @property
    def title(self) -> str:
        raise NotImplementedError

    @property
    def workload_hash(self) -> str:
        """Of what the model is asked."""
        raise NotImplementedError

    def asked(self) -> dict[str, Any]:
        """What the model is asked, as a part of ``definition``."""
        raise NotImplementedError

    def facts(self) -> dict[str, Any]:
        """What analysis needs to know of the text or task, JSON-ready."""
        raise NotImplementedError

    def judge(self, model: Any, cases: Sequence[CaseSpec], tasks: Any) -> Iterator[Judged]:
        """Judge cases one after the other.

        Args:
            model: with its weights, unpatched.
            tasks: the harness' index of tasks; None where there are none.
        """
        raise NotImplementedError

    @cached_property
    def model(self) -> ModelFacts:
        layers = self.checkpoint.skeleton
        return ModelFacts(self.checkpoint.name, layers[0].num_experts, layers[0].top_k, len(layers))

    @property
    def ep_size(self) -> int:
        return self.experiment.layer.ep_size or default_ep_size(self.model.num_experts)

    @cached_property
    def definition(self) -> dict[str, Any]:
        """All that decides the answers, except versions of packages and data that the harness fetches."""
        return {
            "mode": MODE,
            "model": {"fingerprint": self.checkpoint.fingerprint, "dtype": self.experiment.model.dtype},
            **self.asked(),
            "layer": {"ep_size": self.ep_size, "seed": self.experiment.layer.seed},
            "arrangement": self.experiment.arrangement,
        }

    @cached_property
    def comparison_id(self) -> str:
        return stable_hash(self.definition)

    @cached_property
    def cases(self) -> list[CaseSpec]:
        """The unpatched model, and all policies."""
        return [
            self._case(BASELINE, "native"),
            *(self._case(POLICY, policy.name, policy) for policy in self.experiment.make_policies()),
        ]

    def _case(self, role: str, name: str, policy: Policy | None = None) -> CaseSpec:
        spec = CaseSpec("", role, name, policy)
        return replace(spec, case_id=stable_hash([self.comparison_id, role, name, spec.params]))

    def phase(self, case: CaseSpec) -> Phase:
        """The phase in which known text is judged under a case."""
        return judged_phase(case.policy, self.experiment.arrangement)

    def describe(self) -> dict[str, Any]:
        """What analysis needs to know of the comparison, JSON-ready."""
        return {
            "title": self.title,
            **self.model._asdict(),
            "model": self.model.name,
            "num_ranks": self.ep_size,
            "arrangement": self.experiment.arrangement,
            "dtype": self.experiment.model.dtype,
            "seed": self.experiment.layer.seed,
            **self.facts(),
        }

    def describe_case(self, case: CaseSpec) -> dict[str, Any]:
        """What analysis needs to know of a case, JSON-ready."""
        return {**case.describe(self.comparison_id), "phase": self.phase(case)}
