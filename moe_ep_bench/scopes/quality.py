"""``quality``: what policies do to the answers of a language model, on a text and on virtual ranks; nothing is timed.

The text's sequences go through the unpatched model first, then through the same model under each policy, in the same
batches. Beside every answer's cost (cross-entropy, KL, agreement) stand what the policy dropped, what score mass it
kept, how full the fullest rank was and how many experts a step activated, so that costs can be set against what they
buy. Routing is that of N ranks: sequences are dealt to them as ``run`` and ``route`` deal them, capacities and locality
are a rank's own, batch-wide policies see all. ``hf.passes`` says what is routed together.

Every case is written when it is done; the same command goes on with those that are not. The unpatched model's hidden
states are kept meanwhile (tokens x hidden size, in the weights' dtype).

Shapes: B = sequences of a batch, S = tokens of each, D = hidden size.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moe_ep_bench.exit_codes import OK
from moe_ep_bench.hf.answers import Answers, hidden_states, judge
from moe_ep_bench.hf.checkpoint import Checkpoint, redundant_prefixes, text_hash, text_sequences
from moe_ep_bench.hf.loads import pass_metrics
from moe_ep_bench.hf.passes import PHASES, Pass, Phase, phases_of
from moe_ep_bench.hf.routed import Seen, routed, try_policies
from moe_ep_bench.policies.capacity import IMAGE
from moe_ep_bench.progress import progress_bar
from moe_ep_bench.quality_config import QualityExperiment, load_quality
from moe_ep_bench.records import RunDirectory, stable_hash
from moe_ep_bench.scopes.answering import AnsweringComparison, LoadedModel, answering, check_ranks, open_checkpoints
from moe_ep_bench.scopes.comparison import CaseSpec
from moe_ep_bench.scopes.job import identity


@dataclass(frozen=True, eq=False)
class QualityComparison(AnsweringComparison[QualityExperiment]):
    """One experiment at one point of its sweep: cases that read the same text in the same batches."""

    mode = "quality"

    tokens_BS: Tensor
    """All of the text that is read, int64 on the CPU."""

    @staticmethod
    def of(experiment: QualityExperiment, checkpoint: Checkpoint) -> QualityComparison:
        """Check that the experiment fits the model and the text, and that the model can be routed by every policy.

        Raises:
            ValueError: naming the key whose value does not fit.
        """
        text, ep_size = experiment.text, experiment.layer.ep_size
        check_ranks(checkpoint, ep_size)
        if text.image_prefix is None:
            checkpoint.check_length(text.sequence_length, "text.sequence_length")
        else:
            whole = text.image_prefix.tokens + text.sequence_length
            checkpoint.check_length(whole, "text.image_prefix.tokens + text.sequence_length")
        try:
            tokens_BS = text_sequences(text.file, checkpoint.tokenizer, text.num_sequences, text.sequence_length)
        except ValueError as problem:
            raise ValueError(f"text.file: {problem}") from None
        comparison = QualityComparison(experiment, checkpoint, tokens_BS)
        comparison.try_policies()
        return comparison

    def try_policies(self) -> None:
        """Route two tokens by every policy.

        Raises:
            ValueError: naming the policy, and what it does not fit.
        """
        has_images = self.experiment.text.image_prefix is not None
        try:
            try_policies(
                self.checkpoint.skeleton[0], self.experiment.make_policies(), self.ep_size, has_images=has_images
            )
        except ValueError as problem:
            hint = "; text.image_prefix puts image tokens before the text" if "modality_T" in str(problem) else ""
            raise ValueError(f"{problem}{hint}") from None

    @cached_property
    def sequences(self) -> Tensor:
        """What the model reads, int64 [sequences, tokens]: the text, or synthetic image tokens and the text."""
        prefix = self.experiment.text.image_prefix
        if prefix is None:
            return self.tokens_BS
        image_BP = redundant_prefixes(
            self.tokens_BS, prefix.tokens, prefix.num_patterns, prefix.pattern_length, prefix.seed
        )
        return torch.cat([image_BP, self.tokens_BS], dim=1)

    @property
    def num_image_tokens(self) -> int:
        """Of each sequence; they come first."""
        prefix = self.experiment.text.image_prefix
        return 0 if prefix is None else prefix.tokens

    def modality(self, tokens_BS: Tensor) -> Tensor | None:
        """Of the tokens of a batch; None where none has any."""
        if self.experiment.text.image_prefix is None:
            return None
        modality_BS = torch.zeros_like(tokens_BS)
        modality_BS[:, : self.num_image_tokens] = IMAGE
        return modality_BS

    def asked(self) -> dict[str, Any]:
        images = {"image_tokens": self.num_image_tokens} if self.num_image_tokens else {}
        return {
            "text": {"tokens": self.workload_hash, "batch_size": self.experiment.text.batch_size, **images},
        }

    @cached_property
    def workload_hash(self) -> str:
        return text_hash(self.sequences)

    def phase(self, case: CaseSpec) -> Phase:
        """In which phase a case is judged; the unpatched model's answers are the same in both."""
        if self.experiment.arrangement != "auto":
            return self.experiment.arrangement
        return "prefill" if case.policy is None else phases_of(case.policy)[0]

    @property
    def title(self) -> str:
        text = self.experiment.text
        size = f"{text.num_sequences} sequences of {text.sequence_length} tokens, {text.batch_size} at a time"
        images = f", each after {self.num_image_tokens} synthetic image tokens" if self.num_image_tokens else ""
        return f"{self.model.name}, EP {self.ep_size}, {text.file.name}, {size}{images}"

    def batches(self, device: torch.device) -> Iterator[Tensor]:
        """What the model reads, int64 [B, S] a batch."""
        return (batch_BS.to(device) for batch_BS in self.sequences.split(self.experiment.text.batch_size))

    def describe(self) -> dict[str, Any]:
        text = self.experiment.text
        return {**super().describe(), "text": text.file.name, **text.model_dump(exclude={"file"})}

    def describe_case(self, case: CaseSpec) -> dict[str, Any]:
        return {**super().describe_case(case), "phase": self.phase(case)}

    def described_experiment(self) -> dict[str, Any]:
        described = super().described_experiment()
        described["text"]["file"] = self.experiment.text.file.name
        return described


def plan_quality(config: Path, overrides: Iterable[str]) -> list[QualityComparison]:
    """All comparisons of a config file, each found to fit its model and its text; no weights are read.

    Raises:
        ValueError: one line naming the file, the key and what is allowed.
    """
    experiments = load_quality(config, overrides)
    try:
        checkpoints = open_checkpoints(experiment.model for experiment in experiments)
        return [QualityComparison.of(one, checkpoints[one.model.checkpoint]) for one in experiments]
    except ValueError as problem:
        raise ValueError(f"{config}: {problem}") from None


def dry_run(config: Path, overrides: Sequence[str]) -> int:
    """Print the cases; load no weights."""
    for comparison in plan_quality(config, overrides):
        print(comparison.title)
        for case in comparison.cases:
            print(f"  {case.case_id}  {case.role:8}  {comparison.phase(case):7}  {case.label}")
    return OK


def quality(config: Path, out: Path, overrides: Sequence[str], *, force: bool = False) -> RunDirectory:
    """Judge every case of every comparison of ``config`` and write the rows.

    Args:
        out: results directory; cases whose rows are in it are not judged again unless ``force``.

    Raises:
        ValueError: one line naming the file, the key and what is allowed; or why ``out`` cannot be used.
    """
    comparisons = plan_quality(config, overrides)
    models = LoadedModel()
    with answering(config, out, comparisons, force=force) as job:
        todo = [(comparison, cases) for comparison, cases in job.todo if cases]
        total = sum((len(cases) + 1) * comparison.experiment.text.num_sequences for comparison, cases in todo)
        with progress_bar(total, "sequence") as progress, torch.inference_mode():
            for comparison, cases in todo:
                progress.set_description(comparison.title)
                model, device = models.load(comparison.checkpoint, comparison.experiment.model)
                native = []
                for tokens_BS in comparison.batches(device):
                    native.append(hidden_states(model, tokens_BS)[:, comparison.num_image_tokens :].cpu())
                    progress.update(len(tokens_BS))
                for case in cases:
                    rows = _Rows()
                    for number, tokens_BS in enumerate(comparison.batches(device)):
                        _judge_batch(rows, comparison, case, model, number, tokens_BS, native[number].to(device))
                        progress.update(len(tokens_BS))
                    rows.write(job.directory, job.run_id, comparison, case)
    return job.directory


class _Rows:
    """A case's rows so far."""

    def __init__(self) -> None:
        self.answers: dict[str, list[Any]] = defaultdict(list)
        self.routing: dict[str, list[Any]] = defaultdict(list)

    def add_answers(self, answers: Answers, batch: int, first_sequence: int, phase: Phase) -> None:
        for place in range(len(answers.kl_BS)):
            row = {
                "batch": batch,
                "phase": phase,
                "sequence": first_sequence + place,
                "num_tokens": answers.kl_BS.shape[1],
                "cross_entropy": float(answers.cross_entropy_BS[place].double().mean()),
                "kl": float(answers.kl_BS[place].double().mean()),
                "agreement": float(answers.agreement_BS[place].double().mean()),
            }
            for name, value in row.items():
                self.answers[name].append(value)

    def add_routing(self, seen: Seen, batch: int, *, both: bool) -> None:
        """Add one router's choice; in both phases where that is one choice, told in two ways."""
        phases = PHASES if both else (seen.what.phase,)
        for phase in phases:
            what = Pass(phase, seen.what.valid_BS, phase == "decode")
            metrics = pass_metrics(replace(seen, what=what))
            row = {"batch": batch, "phase": phase, "layer": seen.seat.layer, **metrics}
            for name, value in row.items():
                self.routing[name].append(value)

    def write(self, directory: RunDirectory, run_id: str, comparison: QualityComparison, case: CaseSpec) -> None:
        def named(rows: dict[str, list[Any]]) -> dict[str, list[Any]]:
            return {**identity("quality", run_id, comparison, case, len(rows["batch"])), **rows}

        directory.write_quality(case.case_id, named(self.answers), named(self.routing))


def _judge_batch(
    rows: _Rows,
    comparison: QualityComparison,
    case: CaseSpec,
    model: Any,
    number: int,
    tokens_BS: Tensor,
    native_BSD: Tensor,
) -> None:
    """One batch through the model as the case has it, beside what the unpatched model made of it."""
    phase = comparison.phase(case)
    with routed(
        model,
        case.policy,
        num_ranks=comparison.ep_size,
        arrangement=phase,
        # A random policy draws anew for every batch, whatever was done before.
        seed=int(stable_hash([comparison.experiment.layer.seed, number])[:8], 16),
        modality_BS=comparison.modality(tokens_BS),
        look=lambda seen: rows.add_routing(seen, number, both=case.policy is None),
    ):
        hidden_BSD = hidden_states(model, tokens_BS)
    of_text = slice(comparison.num_image_tokens, None)
    answers = judge(model, hidden_BSD[:, of_text], native_BSD, tokens_BS[:, of_text])
    rows.add_answers(answers, number, number * comparison.experiment.text.batch_size, phase)
