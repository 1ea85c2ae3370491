"""What is to be measured, before anything runs: comparisons, their cases, their sizes and ids."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from moe_ep_bench.config import Experiment, RecordedConfig, ReplicationConfig, SyntheticConfig
from moe_ep_bench.devices import Device, device_of_gpu, modelled_experts, takes_decode
from moe_ep_bench.kernels.twins import KERNELS, kernel_for
from moe_ep_bench.layer.parts import Parts
from moe_ep_bench.models import ModelSpec
from moe_ep_bench.plurals import tokens_words
from moe_ep_bench.policies import Policy, RoutingContext
from moe_ep_bench.records import stable_hash
from moe_ep_bench.scopes.padding import check_padding, describe_padding, padding_in_title, padding_words
from moe_ep_bench.scopes.slices import check_slices
from moe_ep_bench.skews import load_skew
from moe_ep_bench.workload import RecordedWorkload, SyntheticWorkload, Workload

BASELINE, NOISE, CEILING, POLICY = "baseline", "noise", "ceiling", "policy"
# Native routing on replicated experts: what spare memory buys in place of a policy.
REPLICATION = "replication"

_COPIES_BYTES = 2**27
VALUE_BYTES = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True)
class CaseSpec:
    """One policy, or one of the three references, on a comparison's workload."""

    case_id: str
    role: str
    name: str
    policy: Policy | None
    """None for the references and replication, which take Megatron-Core's own router."""
    replication: ReplicationConfig | None = None
    masks_padding: bool = False
    """What routes the case is told which tokens are padding; no router of Megatron-Core's own is."""

    def told(self, context: RoutingContext) -> RoutingContext:
        """What is so of some tokens, as far as what routes the case knows it."""
        return context if self.masks_padding else replace(context, token_mask_T=None)

    @property
    def params(self) -> dict[str, Any]:
        if self.replication is not None:
            return self.replication.model_dump(mode="json")
        return self.policy.params() if self.policy else {}

    @property
    def label(self) -> str:
        if self.replication is not None:
            return f"EPLB, {self.replication.spare_per_rank} spare per rank"
        return (
            self.policy.label
            if self.policy
            else {NOISE: "native again", CEILING: "native, balanced scores"}.get(self.role, self.name)
        )

    def describe(self, comparison_id: str) -> dict[str, Any]:
        return {
            "comparison_id": comparison_id,
            "policy": self.name,
            "policy_params": self.params,
            "label": self.label,
            "role": self.role,
            "looks_past_top_k": self.policy is not None and self.policy.looks_past_top_k,
        }


@dataclass(frozen=True)
class Planned:
    """One experiment at one point of its sweep, on a given number of ranks: what all scopes need of it."""

    experiment: Experiment
    world_size: int
    workload: Workload

    @cached_property
    def model(self) -> ModelSpec:
        return self.experiment.model.spec()

    @property
    def ep_size(self) -> int:
        return self.experiment.layer.ep_size or self.world_size // self.num_slices

    @property
    def num_slices(self) -> int:
        """Ranks among which every expert is cut."""
        return self.experiment.layer.expert_tensor_parallel

    @property
    def num_together(self) -> int:
        """Ranks whose tokens meet in the same experts."""
        return self.ep_size * self.num_slices

    @property
    def num_tokens(self) -> int:
        return self.experiment.workload.total_tokens(self.world_size)

    @property
    def layer_fraction(self) -> float:
        """Where in the depth of the recorded layers the layer stands: 0 to below 1; 0 where scores are synthetic."""
        if not isinstance(self.workload, RecordedWorkload):
            return 0.0
        return self.workload.layer / self.workload.traces[0].num_layers

    def context(self, rank: int, request_id_T: Tensor, valid_T: Tensor | None) -> RoutingContext:
        """What is so of a rank's tokens, but for modality and randomness; ``CaseSpec.told`` is what is known of it."""
        return RoutingContext(
            top_k=self.model.top_k,
            num_ranks=self.ep_size,
            rank=rank,
            normalize=self.model.normalize,
            scale=self.model.routed_scale,
            num_groups=self.model.num_groups,
            top_groups=self.model.top_groups,
            token_mask_T=valid_T,
            request_id_T=request_id_T,
            layer_fraction=self.layer_fraction,
        )

    def try_policies(self, modality_T: Tensor | None = None) -> None:
        """Route two tokens by every policy: finds fields that do not suit the model, and compiles what is compiled.

        Args:
            modality_T: of two tokens, where the batches' tokens have one.

        Raises:
            ValueError: naming the policy and its field.
        """
        scores_TE = torch.rand(2, self.model.num_experts, generator=torch.Generator().manual_seed(0))
        requests_T = torch.zeros(2, dtype=torch.int64)
        context = replace(self.context(0, requests_T, None), modality_T=modality_T, generator=torch.Generator())
        for policy in self.experiment.make_policies():
            try:
                policy.route(scores_TE, context)
            except ValueError as problem:
                raise ValueError(f"policies: {policy.name}: {problem}") from None

    def kernel_of(self, case: CaseSpec, device_type: str) -> str | None:
        """What routes by a case's policy for scores on a "cpu" or "cuda" device; None where Megatron-Core routes.

        Raises:
            ValueError: ``layer.kernel`` asks for what cannot run this policy here.
        """
        if case.policy is None:
            return None
        tokens = -(-int(self.num_tokens * self.fullest_share) // self.world_size)
        try:
            return kernel_for(case.policy, self.experiment.layer.kernel, device_type, tokens, self.model.num_experts)
        except ValueError as problem:
            raise ValueError(f"layer.kernel: {problem}") from None

    def describe_kernels(self, cases: Iterable[CaseSpec], device_type: str) -> dict[str, str]:
        """What was asked for, and all that ran."""
        ran = [self.kernel_of(case, device_type) for case in cases]
        return {"requested": self.experiment.layer.kernel, "ran": ", ".join(one for one in KERNELS if one in ran)}

    @property
    def fullest_share(self) -> float:
        """Tokens of the rank that holds most, over the mean."""
        shares = self.experiment.workload.rank_shares or (1.0,)
        of_ranks = [shares[rank % len(shares)] for rank in range(self.world_size)]
        return max(of_ranks) * self.world_size / sum(of_ranks)

    def describe_workload(self) -> dict[str, Any]:
        """The workload's own words and numbers, and what a named skew was calibrated to."""
        config = self.experiment.workload
        described = {**self.workload.describe(), "padding": self.padding}
        if self.padding is not None:
            described["description"] = f"{described['description']}; {padding_words(self.padding)}"
        if not isinstance(config, SyntheticConfig) or config.skew is None:
            return described
        assert self.experiment.model.preset is not None
        skew = load_skew(self.experiment.model.preset, config.skew)
        return {
            **described,
            "description": (
                f"synthetic, calibrated to {config.skew} ({skew.basis}: {skew.source}); {described['description']}"
            ),
            "skew": {"name": config.skew, **skew.model_dump(mode="json", exclude_none=True)},
        }

    def define_workload(self) -> dict[str, Any]:
        """All that decides what the batches are, and nothing of where: equal on any machine."""
        workload = self.experiment.workload.model_dump(mode="json")
        if isinstance(self.experiment.workload, SyntheticConfig):
            # What a skew's name stands for may change; what is measured then does too.
            workload |= self.experiment.workload.targets(self.experiment.model.preset)
        if isinstance(self.workload, RecordedWorkload):
            workload["trace"] = [
                {"trace": trace.sha256(), "share": source.share}
                for source, trace in zip(self.workload.sources, self.workload.traces, strict=True)
            ]
        # What was measured before there was padding keeps its id.
        unpadded = {"padding_per_rank": 0, "mask_padding": True}
        workload = {key: value for key, value in workload.items() if key not in unpadded or value != unpadded[key]}
        return {**workload, "num_tokens": self.num_tokens, "tokens_per_rank": None}

    @property
    def padding(self) -> dict[str, Any] | None:
        """See ``padding.describe_padding``."""
        return describe_padding(self.experiment.workload, self.workload, self.world_size)

    def check_padding(self) -> None:
        """Raise ValueError where padding leaves a rank no valid token."""
        check_padding(self.experiment.workload, self.workload, self.world_size)

    @property
    def definition(self) -> dict[str, Any]:
        """All that decides what is measured; JSON-ready."""
        raise NotImplementedError

    @cached_property
    def comparison_id(self) -> str:
        return stable_hash(self.definition)

    def case(
        self, role: str, name: str, policy: Policy | None = None, replication: ReplicationConfig | None = None
    ) -> CaseSpec:
        masks_padding = policy is not None and self.experiment.workload.mask_padding
        spec = CaseSpec("", role, name, policy, replication, masks_padding)
        return replace(spec, case_id=stable_hash([self.comparison_id, role, name, spec.params]))


@dataclass(frozen=True)
class Comparison(Planned):
    """What ``run`` times."""

    scope: ClassVar[str] = "layer"
    """What is timed: one of ``records.SCOPES``."""

    parts: Parts
    """What computes the experts and what permutes on this machine."""

    @classmethod
    def of(cls, experiment: Experiment, world_size: int, *, on_cpu: bool, device: Device | None = None) -> Self:
        """Check that the experiment fits the ranks, and open its workload.

        Args:
            device: what is modelled in place of this machine.

        Raises:
            ValueError: naming the key whose value does not fit.
        """
        check_scope(experiment, cls.scope)
        model = experiment.model.spec()
        check_slices(experiment, world_size)
        num_slices = experiment.layer.expert_tensor_parallel
        ep_size = experiment.layer.ep_size or world_size // num_slices
        if world_size % (ep_size * num_slices):
            groups = "" if num_slices == 1 else f" over layer.expert_tensor_parallel: {num_slices}"
            raise ValueError(f"layer.ep_size: expected a divisor of the {world_size} ranks{groups}, got {ep_size}")
        if model.num_experts % ep_size:
            raise ValueError(
                f"layer.ep_size: expected a divisor of the {model.num_experts} experts of {model.name}, got {ep_size}"
                + ("" if experiment.layer.ep_size else " (all ranks)")
            )
        if experiment.layer.dispatcher == "flex" and ep_size == 1:
            raise ValueError("layer.dispatcher: flex needs several ranks in layer.ep_size; expected alltoall on one")
        _check_routing(model)
        check_rank_shares(experiment, world_size)
        parts = _parts(experiment, world_size, on_cpu, device)
        comparison = cls._opened(experiment, world_size, parts)
        comparison.describe_kernels(comparison.cases, "cpu" if on_cpu else "cuda")  # Finds those that cannot run.
        return comparison

    @classmethod
    def _opened(cls, experiment: Experiment, world_size: int, parts: Parts) -> Self:
        return cls(experiment, world_size, make_workload(experiment, experiment.model.spec(), world_size), parts)

    @cached_property
    def definition(self) -> dict[str, Any]:
        """All that decides what is measured, and nothing of where: equal on any machine."""
        layer = {**self.experiment.layer.model_dump(mode="json"), "ep_size": self.ep_size}
        if self.num_slices == 1:  # What was measured before experts were cut keeps its id.
            del layer["expert_tensor_parallel"]
        return {
            "mode": "run",
            "model": self.model.model_dump(mode="json"),
            "workload": self.define_workload(),
            "layer": layer,
            "measure": self.experiment.measure.model_dump(mode="json", exclude={"timeout_s", "launches"}),
            "world_size": self.world_size,
        }

    @property
    def num_launches(self) -> int:
        return self.experiment.measure.launches

    @cached_property
    def cases(self) -> list[CaseSpec]:
        """The baseline, its repetition for the noise floor, all policies, and the ceiling."""
        return [
            self.case(BASELINE, "native"),
            self.case(NOISE, "native"),
            *(self.case(POLICY, policy.name, policy) for policy in self.experiment.make_policies()),
            *self.alternatives(),
            self.case(CEILING, "native_balanced"),
        ]

    def alternatives(self) -> Iterable[CaseSpec]:
        """What else is measured beside the policies."""
        return ()

    @property
    def title(self) -> str:
        scaled = f" x {self.model.scale:g}" if self.model.scale != 1 else ""
        sizes = f"{self.ranks_words}, {tokens_words(self.num_tokens)}"
        padding = padding_in_title(self.experiment.workload)
        graph = ", CUDA graph" if self.parts.cuda_graph else ""
        return f"{self.model.name}{scaled}, {sizes}, {self.workload_in_short}{padding}{graph}"

    @property
    def ranks_words(self) -> str:
        """How the experts are shared out, in a title."""
        return f"EP {self.ep_size}" + (f" x TP {self.num_slices}" if self.num_slices > 1 else "")

    @property
    def all_workloads(self) -> tuple[Workload, ...]:
        """Of every layer that is run."""
        return (self.workload,)

    @property
    def departures(self) -> tuple[str, ...]:
        """Where what is run is simpler than the model."""
        return self.model.departures

    def hint_for(self, available: int) -> str:
        """What fits into this much memory instead; empty where nothing is known to."""
        return ""

    def describe(self) -> dict[str, Any]:
        """What ``run.json`` says of this kind of comparison beside what all have."""
        return {}

    @property
    def workload_in_short(self) -> str:
        config = self.experiment.workload
        if isinstance(config, RecordedConfig):
            step = " decode," if config.arrangement == "decode" else ""
            return f"recorded, layer {config.layer},{step} {config.tail_words}"
        if config.skew is not None:
            return config.skew.replace("_", " ")
        return "unskewed" if config.peak_load is None else f"peak load {config.peak_load:g}"

    def check_gathering(self) -> None:
        """Raise ValueError where ranks hold unequal numbers of tokens and the dispatcher cannot have that."""
        if self.parts.dispatcher != "allgather" or self.num_together == 1:
            return
        for number in range(self.workload.num_batches):
            shares = self.experiment.workload.rank_shares
            tokens_R = self.workload.tokens_of_ranks(number, self.world_size, shares)
            if min(tokens_R) < max(tokens_R):
                raise ValueError(
                    f"layer.dispatcher: allgather needs as many tokens on every rank; batch {number} deals"
                    f" {min(tokens_R)} to {max(tokens_R)}: expected alltoall, or other workload.num_tokens"
                )

    def memory_bytes_per_rank(self) -> int:
        """What a rank needs at the fullest, roughly: weights, inputs of all batches, one layer's buffers.

        The load assumed is the workload's peak on one rank, as if its hot experts lay together.
        """
        model, size = self.model, VALUE_BYTES[self.experiment.layer.dtype]
        tokens = -(-int(self.num_tokens * self.fullest_share) // self.world_size)
        peak = min(getattr(self.experiment.workload, "peak_load", None) or 2.0, self.ep_size)
        pairs = int(tokens * model.top_k * peak) * self.num_slices
        slice_size = model.ffn_hidden_size // self.num_slices
        weights = (model.num_experts // self.ep_size) * 3 * model.hidden_size * slice_size
        weights += 3 * model.hidden_size * model.shared_ffn_hidden_size
        # Small inputs are held in copies, up to some caches' size (measure.cache).
        hidden = tokens * model.hidden_size * size
        hidden += min((len(self.cases) - 1) * hidden, _COPIES_BYTES)
        inputs = self.workload.num_batches * (hidden + 2 * tokens * model.num_experts * 4)
        buffers = pairs * (4 * model.hidden_size + 3 * slice_size) * size
        if self.num_slices > 1:
            buffers += pairs * 4 * model.hidden_size  # what is summed over slices, in float32
        routing = tokens * model.num_experts * 8 * 6  # scores, keys and indices while a policy routes
        return 2 * weights * size + inputs + buffers + routing

    def flops_per_rank(self) -> float:
        """Floating-point operations of one iteration on the average rank."""
        tokens = self.num_tokens / self.world_size
        expert = 6 * self.model.hidden_size * self.model.ffn_hidden_size * self.model.top_k
        shared = 6 * self.model.hidden_size * self.model.shared_ffn_hidden_size
        return tokens * (expert + shared + 2 * self.model.hidden_size * self.model.num_experts)

    def num_iterations(self) -> int:
        """Runs of one rank in one launch: looked at, least warm-up, plain and breakdown, over all cases and batches.

        Once more each case is checked after it was timed; where it is kept as CUDA graphs, and checked replayed, twice.
        """
        measure = self.experiment.measure
        rounds = 1 + measure.warmup + measure.iterations + measure.breakdown_iterations
        checks = 3 if self.parts.cuda_graph else 1
        return (rounds * self.workload.num_batches + checks) * len(self.cases)


def _parts(experiment: Experiment, world_size: int, on_cpu: bool, modelled: Device | None) -> Parts:
    """What computes and permutes here; on a modelled device what it is modelled with, whatever this machine has."""
    asked, model = experiment.layer, experiment.model.spec()
    together = (asked.ep_size or world_size // asked.expert_tensor_parallel) * asked.expert_tensor_parallel
    mean_rows = experiment.workload.total_tokens(world_size) / world_size * together
    mean_rows *= model.top_k / model.num_experts
    if modelled is not None:
        ran, why = modelled_experts(modelled, asked.experts, mean_rows)
        return Parts(experts=ran, permute="indexed", kernel=asked.kernel, experts_why=why)
    has_gpu = not on_cpu and torch.cuda.is_available()
    here = device_of_gpu(torch.cuda.get_device_name()) if has_gpu and asked.experts == "auto" else None
    return Parts.choose(
        asked.experts,
        asked.permute,
        asked.kernel,
        asked.dispatcher,
        cuda_graph=asked.cuda_graph,
        on_cpu=on_cpu,
        decode=takes_decode(here, mean_rows),
        expert_tensor_parallel=asked.expert_tensor_parallel,
    )


def default_ep_size(num_experts: int) -> int:
    """Virtual ranks where a config leaves them open: the largest number up to 8, a node's, that divides the experts."""
    return max(size for size in range(1, 9) if num_experts % size == 0)


def check_scope(experiment: Experiment, scope: str = "layer") -> None:
    """Raise ValueError where a config asks for times of another kind than a command gives."""
    if experiment.scope != scope:
        raise ValueError(f"scope: expected {scope} for this command, got {experiment.scope}")


def check_rank_shares(experiment: Experiment, world_size: int) -> None:
    """Raise ValueError where the workload leaves all ranks without tokens."""
    shares = experiment.workload.rank_shares
    if shares is not None and not any(shares[rank % len(shares)] for rank in range(world_size)):
        raise ValueError(f"workload.rank_shares: expected one above 0 among the {world_size} ranks, got {list(shares)}")


def _check_routing(model: ModelSpec) -> None:
    """Refuse what Megatron-Core's router, the baseline, would do in another way than the model."""
    if model.selection_bias and model.score_function != "sigmoid":
        raise ValueError(f"model: {model.name}: a selection bias needs sigmoid scores in Megatron-Core, got softmax")
    if model.score_function == "sigmoid" and not model.normalize and model.top_k > 1:
        raise ValueError(f"model: {model.name}: Megatron-Core always normalises sigmoid weights; got normalize false")
    if model.num_groups is not None and model.score_function == "softmax" and model.normalize:
        raise ValueError(
            f"model: {model.name}: Megatron-Core compares groups by logits where softmax weights are normalised; "
            "expected normalize false or no groups"
        )


def find_case(comparisons: Iterable[Comparison], wanted: str) -> tuple[Comparison, CaseSpec]:
    """The one case whose id, label or policy name is ``wanted``.

    Raises:
        ValueError: none or several are; the message lists them.
    """
    cases = [(comparison, case) for comparison in comparisons for case in comparison.cases]
    for key in ("case_id", "label", "name"):
        found = [(comparison, case) for comparison, case in cases if getattr(case, key) == wanted]
        if len(found) == 1:
            return found[0]
        if found:
            cases = found
            break
    titles = len({comparison.title for comparison, _ in cases}) > 1
    listed = "; ".join(
        f"{case.case_id} ({case.label}{f', {comparison.title}' if titles else ''})" for comparison, case in cases
    )
    raise ValueError(
        f"--profile {wanted}: expected {'one' if found else 'a case: its id, label or policy'} of {listed}"
    )


def make_workload(experiment: Experiment, model: ModelSpec, world_size: int, *, or_chance: bool = False) -> Workload:
    """Open the workload that an experiment names; ValueError where it cannot be had.

    Args:
        or_chance: see ``SyntheticWorkload``.
    """
    config = experiment.workload
    num_tokens = config.total_tokens(world_size)
    shape = {"num_experts": model.num_experts, "top_k": model.top_k, "num_tokens": num_tokens}
    try:
        if isinstance(config, SyntheticConfig):
            targets = config.targets(experiment.model.preset)
            rank_load = targets.pop("rank_load")
            return SyntheticWorkload(
                **shape,
                **targets,
                num_batches=config.num_batches,
                sequence_length=config.sequence_length,
                seed=config.seed,
                or_chance=or_chance,
                rank_load=(rank_load["ep_size"], rank_load["load"]) if rank_load else None,
                num_groups=model.num_groups,
                top_groups=model.top_groups,
            )
        assert isinstance(config, RecordedConfig)
        return RecordedWorkload(
            [(recording.trace, recording.share) for recording in config.trace],
            **shape,
            layer=config.layer,
            num_batches=config.num_batches,
            tail=config.tail,
            topk_share=config.topk_share,
            arrangement=config.arrangement,
            tokens_per_request=config.tokens_per_request,
            seed=config.seed,
        )
    except ValueError as error:
        raise ValueError(f"workload: {error}") from None
