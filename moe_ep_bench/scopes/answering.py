"""What ``quality`` and ``accuracy`` share: the cases of a checkpoint's answers, and the directory that takes them.

A comparison is what a model is asked, a case the model unpatched or under one policy. Every case is written when it is
done, and the same command goes on with those that are not.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

import torch

from moe_ep_bench import environment
from moe_ep_bench.accuracy_config import AccuracyExperiment
from moe_ep_bench.hf.checkpoint import Checkpoint, pick_device
from moe_ep_bench.policies import Policy
from moe_ep_bench.quality_config import CheckpointConfig, QualityExperiment
from moe_ep_bench.records import SCHEMA_VERSION, RunDirectory, stable_hash
from moe_ep_bench.scopes.comparison import BASELINE, POLICY, CaseSpec, default_ep_size
from moe_ep_bench.scopes.directory import check_agreement, hold_comparisons, keep_other_policies

Asked = TypeVar("Asked", QualityExperiment, AccuracyExperiment)
C = TypeVar("C", bound="AnsweringComparison")


class ModelFacts(NamedTuple):
    """What rows and tables say of a model."""

    name: str
    num_experts: int
    top_k: int
    num_layers: int  # with experts


@dataclass(frozen=True, eq=False)
class AnsweringComparison(Generic[Asked]):
    """One experiment at one point of its sweep: cases that are asked the same."""

    mode: ClassVar[str]
    experiment: Asked
    checkpoint: Checkpoint

    @cached_property
    def model(self) -> ModelFacts:
        layers = self.checkpoint.skeleton
        return ModelFacts(self.checkpoint.name, layers[0].num_experts, layers[0].top_k, len(layers))

    @property
    def ep_size(self) -> int:
        return self.experiment.layer.ep_size or default_ep_size(self.model.num_experts)

    @cached_property
    def definition(self) -> dict[str, Any]:
        """All that decides what the answers are, but for versions of packages."""
        return {
            "mode": self.mode,
            "model": {"fingerprint": self.checkpoint.fingerprint, "dtype": self.experiment.model.dtype},
            **self.asked(),
            "layer": {"ep_size": self.ep_size, "seed": self.experiment.layer.seed},
            "arrangement": self.experiment.arrangement,
        }

    def asked(self) -> dict[str, Any]:
        """What the model is asked, as a part of ``definition``."""
        raise NotImplementedError

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

    @property
    def title(self) -> str:
        raise NotImplementedError

    def describe(self) -> dict[str, Any]:
        """What analysis needs to know of the comparison: JSON-ready."""
        return {
            "title": self.title,
            **self.model._asdict(),
            "model": self.model.name,
            "num_ranks": self.ep_size,
            "arrangement": self.experiment.arrangement,
            "dtype": self.experiment.model.dtype,
            "seed": self.experiment.layer.seed,
        }

    def describe_case(self, case: CaseSpec) -> dict[str, Any]:
        """What analysis needs to know of a case: JSON-ready."""
        return case.describe(self.comparison_id)

    def described_experiment(self) -> dict[str, Any]:
        """The resolved experiment for ``run.json``, without folders of this machine."""
        described = self.experiment.model_dump(mode="json")
        described["model"]["checkpoint"] = self.experiment.model.checkpoint.resolve().name
        return described

    @property
    def workload_hash(self) -> str:
        """Of what is asked; ``run.json`` names it."""
        raise NotImplementedError


def check_ranks(checkpoint: Checkpoint, ep_size: int | None) -> None:
    """Raise ValueError where the ranks cannot share the experts of some layer."""
    for seat in checkpoint.skeleton:
        if ep_size is not None and seat.num_experts % ep_size:
            raise ValueError(
                f"layer.ep_size: expected a divisor of the {seat.num_experts} experts of {checkpoint.name}, "
                f"got {ep_size}"
            )


def open_checkpoints(models: Iterable[CheckpointConfig]) -> dict[Path, Checkpoint]:
    """Every checkpoint that experiments name, by its path; none is read twice.

    Raises:
        ValueError: naming the key whose value is wrong.
    """
    found: dict[Path, Checkpoint] = {}
    for model in models:
        pick_device(model.device)
        if model.checkpoint not in found:
            try:
                found[model.checkpoint] = Checkpoint.open(model.checkpoint)
            except ValueError as problem:
                raise ValueError(f"model.checkpoint: {problem}") from None
    return found


class LoadedModel:
    """The one model that is in memory: points of a sweep share it."""

    def __init__(self) -> None:
        self._key: Any = None
        self._model: Any = None

    def load(self, checkpoint: Checkpoint, config: CheckpointConfig) -> tuple[Any, torch.device]:
        device = pick_device(config.device)
        if self._key != config:
            self._model = None  # two models may be too many
            self._model, self._key = checkpoint.load(config.dtype, device), config
        return self._model, device


@dataclass(frozen=True)
class Answering(Generic[C]):
    """A results directory that is ready for answers.

    Attributes:
        todo: each comparison, with those of its cases that it has no answers of.
    """

    directory: RunDirectory
    run_id: str
    todo: list[tuple[C, list[CaseSpec]]]


@contextlib.contextmanager
def answering(
    config: Path, out: Path, comparisons: Sequence[C], *, force: bool, **versions: str | None
) -> Iterator[Answering[C]]:
    """Hold ``out`` for these comparisons, and describe them there.

    Args:
        force: all cases are to be asked again.
        versions: of packages that decide what the answers are beside torch and transformers; one directory holds
            answers of one version of each.

    Raises:
        ValueError: one line: several devices, or why ``out`` cannot be used.
    """
    device = only_device(config, [one.experiment.model for one in comparisons])
    directory, mode = RunDirectory(out), comparisons[0].mode
    is_done = directory.is_judged if mode == "quality" else directory.is_answered
    described = {**environment.describe(device), **versions}
    decisive = ("device_name", "torch", "transformers", *versions)
    check_agreement(directory, mode, {key: described[key] for key in decisive}, force=force)
    with hold_comparisons(directory, comparisons):
        todo = [(one, [case for case in one.cases if force or not is_done(case.case_id)]) for one in comparisons]
        run_id = stable_hash([time.time_ns()])
        description = _run_description(run_id, comparisons, described)
        keep_other_policies(directory, description, is_done)
        directory.write_run(description, is_done)
        if not any(cases for _, cases in todo):
            print("moe-ep-bench: all cases are there from before; --force begins anew", file=sys.stderr)
        yield Answering(directory, run_id, todo)


def only_device(config: Path, models: Iterable[CheckpointConfig]) -> torch.device:
    """Where all comparisons of a config are asked; answers of two devices are not set side by side.

    Raises:
        ValueError: they ask for several; one line naming the file and the key.
    """
    asked = sorted({model.device for model in models})
    devices = {pick_device(one).type for one in asked}
    if len(devices) > 1:
        raise ValueError(
            f"{config}: model.device: expected one device for all comparisons of a directory, got {', '.join(asked)}"
        )
    return torch.device(devices.pop())


def _run_description(
    run_id: str, comparisons: Sequence[AnsweringComparison], described: dict[str, Any]
) -> dict[str, Any]:
    return {
        "schema_version": SCHEMA_VERSION,
        "run_id": run_id,
        "mode": comparisons[0].mode,
        "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "config": [one.described_experiment() for one in comparisons],
        "environment": described,
        "hashes": {
            "code": environment.code_hash(),
            "config": stable_hash([one.definition for one in comparisons]),
            "workload": {one.comparison_id: one.workload_hash for one in comparisons},
        },
        "comparisons": {one.comparison_id: {**one.describe(), "order": order} for order, one in enumerate(comparisons)},
        "cases": {
            case.case_id: {**one.describe_case(case), "order": order}
            for one in comparisons
            for order, case in enumerate(one.cases)
        },
    }
