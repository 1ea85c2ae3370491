"""A case: one policy, or one of the references beside it, on the workload of a comparison."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from moe_ep_bench.config import Experiment, Lossless, Rule
from moe_ep_bench.facts import CaseFacts, Role
from moe_ep_bench.files import stable_hash
from moe_ep_bench.policies import Policy, RoutingContext, make_policy, source_hash

BASELINE, NOISE, CEILING, POLICY = "baseline", "noise", "ceiling", "policy"
# Native routing on replicated experts: what spare memory, or weights that move, buy in place of a policy.
REPLICATION = "replication"

_LABELS = {NOISE: "native again", CEILING: "native, balanced scores"}

# What the baseline computes.
NATIVE = make_policy({"name": "topk"})


@dataclass(frozen=True)
class CaseSpec:
    """What a case is; ``rule`` None: a reference, which is routed by Megatron-Core as it stands."""

    comparison_id: str
    role: Role
    name: str
    rule: Rule | None = None

    @property
    def policy(self) -> Policy | None:
        """None for references and replication, which take Megatron-Core's own router."""
        return self.rule if isinstance(self.rule, Policy) else None

    @property
    def replication(self) -> Lossless | None:
        return self.rule if isinstance(self.rule, Lossless) else None

    @cached_property
    def case_id(self) -> str:
        """A hash of the comparison and of all that makes a case: an edited rule never meets old results."""
        return stable_hash([self.comparison_id, self.role, self.name, self.params, *self._code])

    @property
    def params(self) -> dict[str, Any]:
        """Fields; of files their names alone, for ``_code`` says what they hold."""
        files = self.policy.file_fields if self.policy else ()
        params = self.rule.params() if self.rule else {}
        return {key: Path(str(value)).name if key in files else value for key, value in params.items()}

    @property
    def _code(self) -> list[str]:
        """Hashes of a user's policy file and of the data that a policy reads."""
        if self.policy is None:
            return []
        data = self.policy.data
        return [code for code in (source_hash(type(self.policy)), data and data.sha256) if code]

    @property
    def label(self) -> str:
        return self.rule.label if self.rule else _LABELS.get(self.role, self.name)

    def told(self, context: RoutingContext) -> RoutingContext:
        """Fields of the context that the router may see: policies know the padding, Megatron-Core's own does not."""
        return replace(context, token_mask_T=None) if self.policy is None else context

    def facts(self, **more: Any) -> CaseFacts:
        """What run.json says of the case."""
        data = self.policy and self.policy.data
        return CaseFacts(
            comparison_id=self.comparison_id,
            policy=self.name,
            policy_params=self.params,
            label=self.label,
            role=self.role,
            looks_past_top_k=self.policy is not None and self.policy.looks_past_top_k,
            policy_code=next(iter(self._code), None),
            data_model=(data and data.model) or None,
            **more,
        )


def cases_of(experiment: Experiment, comparison_id: str, *, timed: bool, replicates: bool) -> list[CaseSpec]:
    """The baseline, its repetition for the noise floor, all policies, replications, and the ceiling.

    Args:
        timed: routing needs neither noise nor ceiling, and ``topk`` only where it is told of padding: else it is the
            baseline.
        replicates: experts may be replicated.
    """
    keeps_topk = timed or experiment.workload.padding_per_rank
    policies = [policy for policy in experiment.make_policies() if keeps_topk or policy != NATIVE]
    lossless = (*experiment.emulate.replication, *experiment.emulate.rebalance) if replicates else ()
    return [
        CaseSpec(comparison_id, *case)
        for case in (
            (BASELINE, "native"),
            *[(NOISE, "native")] * timed,
            *((POLICY, policy.name, policy) for policy in policies),
            *((REPLICATION, wanted.name, wanted) for wanted in lossless),
            *[(CEILING, "native_balanced")] * timed,
        )
    ]
