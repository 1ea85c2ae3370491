"""A case: one policy, or one of the references beside it, on the workload of a comparison."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from moe_ep_bench.config import Experiment, Lossless
from moe_ep_bench.files import stable_hash
from moe_ep_bench.policies import Policy, RoutingContext, make_policy
from moe_ep_bench.policies.own import source_hash

BASELINE, NOISE, CEILING, POLICY = "baseline", "noise", "ceiling", "policy"
# Native routing on replicated experts: what spare memory, or weights that move, buy in place of a policy.
REPLICATION = "replication"

_LABELS = {NOISE: "native again", CEILING: "native, balanced scores"}

# What the baseline computes.
NATIVE = make_policy({"name": "topk"})


@dataclass(frozen=True)
class CaseSpec:
    """What a case is.

    Attributes:
        policy: None for the references and replication, which take Megatron-Core's own router.
    """

    case_id: str
    role: str
    name: str
    policy: Policy | None
    replication: Lossless | None = None

    def told(self, context: RoutingContext) -> RoutingContext:
        """Fields of the context that the router may see: policies know the padding, Megatron-Core's own does not."""
        return replace(context, token_mask_T=None) if self.policy is None else context

    @property
    def params(self) -> dict[str, Any]:
        """Fields; of files their names alone, for ``policy_code`` says what they hold."""
        described = self.replication or self.policy
        files = self.policy.file_fields if self.policy else ()
        params = described.params() if described else {}
        return {key: Path(str(value)).name if key in files else value for key, value in params.items()}

    @property
    def policy_code(self) -> list[str]:
        """Hashes of a user's policy file and of what a policy reads: an edited rule never meets old results."""
        code = source_hash(type(self.policy)) if self.policy else None
        data = self.policy.data if self.policy else None
        return [*([code] if code else []), *([data.sha256] if data else [])]

    @property
    def label(self) -> str:
        rule = self.policy or self.replication
        return rule.label if rule else _LABELS.get(self.role, self.name)

    def describe(self, comparison_id: str) -> dict[str, Any]:
        """What run.json says of the case."""
        data = self.policy.data if self.policy else None
        return {
            "comparison_id": comparison_id,
            "policy": self.name,
            "policy_params": self.params,
            "label": self.label,
            "role": self.role,
            **({"policy_code": self.policy_code[0]} if self.policy_code else {}),
            **({"data_model": data.model} if data and data.model else {}),
            "looks_past_top_k": self.policy is not None and self.policy.looks_past_top_k,
        }


def with_ids(comparison_id: str, specs: Iterable[CaseSpec]) -> list[CaseSpec]:
    """The same cases with their ids: hashes of the comparison and of all that makes a case."""
    return [
        replace(case, case_id=stable_hash([comparison_id, case.role, case.name, case.params, *case.policy_code]))
        for case in specs
    ]


def cases_of(experiment: Experiment, comparison_id: str, *, timed: bool, replicates: bool) -> list[CaseSpec]:
    """The baseline, its repetition for the noise floor, all policies, replications, and the ceiling.

    Args:
        timed: routing needs neither noise nor ceiling, and ``topk`` only where it is told of padding: else it is the
            baseline.
        replicates: experts may be replicated.
    """
    baseline, noise = CaseSpec("", BASELINE, "native", None), CaseSpec("", NOISE, "native", None)
    policies = [
        CaseSpec("", POLICY, policy.name, policy)
        for policy in experiment.make_policies()
        if timed or experiment.workload.padding_per_rank or policy != NATIVE
    ]
    lossless = (*experiment.emulate.replication, *experiment.emulate.rebalance)
    replicated = [CaseSpec("", REPLICATION, wanted.name, None, wanted) for wanted in lossless]
    ceiling = CaseSpec("", CEILING, "native_balanced", None)
    specs = [baseline, *[noise] * timed, *policies, *replicated * replicates, *[ceiling] * timed]
    return with_ids(comparison_id, specs)
