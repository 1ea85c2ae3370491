"""Judge policies by tasks of EleutherAI's lm-evaluation-harness.

The harness makes a task's prompts and judges the answers. It takes the model as a subclass of its own class for
transformers' models. That class pads scored sequences without a mask, so that padding would take experts' capacity and
count as tokens; ours passes one. As there, a prompt is read once for all its continuations of one token: equal prompts
would otherwise compete for the same experts.

What is routed together is what the harness hands over together: ``batch_size`` requests, longest first, so that the
options of a question mostly stand side by side. Where answers are scored, a pass is prefill, or each of its positions a
step of decoding; where they are generated, prefill and steps are told apart as they run (``routed``).

Shapes: B = sequences of a batch, S = tokens of the longest, D = hidden size, N = scored tokens, V = vocabulary.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from moe_ep_bench.bench.point import CaseSpec
from moe_ep_bench.errors import UserError, brief
from moe_ep_bench.policies import Policy
from moe_ep_bench.quality.config import QualityExperiment, TaskConfig
from moe_ep_bench.quality.routed import Arrangement, RouterCall, Row, Tables, judged_stage, pass_metrics, routed

# ---- the package and its tasks ---------------------------------------------------------------------------------------


def import_harness() -> ModuleType:
    """The package, told to speak of errors only; ValueError where it, or what it needs of others, is not installed."""
    try:
        harness = importlib.import_module("lm_eval")
        importlib.import_module("lm_eval.tasks")
        importlib.import_module("lm_eval.models.huggingface")
    except ImportError as error:
        raise UserError(
            f"expected the package lm_eval, which tasks need: pip install 'moe-ep-bench[harness]' ({error})"
        ) from None
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    return harness


@functools.cache
def task_manager(include: Path | None) -> Any:
    """The harness' ``TaskManager``, which knows its own tasks and those of the folder ``include``.

    Raises:
        ValueError: a file of ``include`` names a function, whose module the harness would import.
    """
    import_harness()
    for path in sorted(include.rglob("*.yaml")) if include else ():
        if b"!function" in path.read_bytes():
            raise UserError(f"{path}: expected a task without code of its own, got !function", "include")
    return importlib.import_module("lm_eval.tasks").TaskManager(include_path=include and str(include))


def check_task(name: str, include: Path | None) -> None:
    """Raise ValueError where there is no such task, or the harness is not installed."""
    if name not in task_manager(include).all_tasks:
        there = "a task of lm_eval (`lm_eval ls tasks`) or of include"
        raise UserError(f"expected {there}, got {brief(name)}", "tasks")


@dataclass(frozen=True, eq=False)
class Task:
    """A task at one number of shots; see ``session.QualityComparison.evaluated``."""

    experiment: QualityExperiment
    num_ranks: int
    config: TaskConfig
    tokenizer: Any

    @property
    def definition(self) -> dict[str, Any]:
        asked = {**self.config.model_dump(), "own": self.experiment.include and self.experiment.include.name}
        return {"task": asked, "limit": self.experiment.limit, "batch_size": self.experiment.batch_size}

    def describe(self) -> dict[str, Any]:
        asked = {"task": self.config.name, "num_fewshot": self.config.num_fewshot}
        return {**asked, **self.experiment.model_dump(include={"batch_size", "limit"})}

    def judge(self, model: Any) -> Callable[[CaseSpec], Tables]:
        """A function that runs the task under a case; ``model`` has its weights and is unpatched."""
        experiment, name, shots = self.experiment, self.config.name, self.config.num_fewshot

        def judged(case: CaseSpec) -> Tables:
            routing = TaskRouting(case.policy, self.num_ranks, experiment.arrangement, experiment.layer.seed)
            lm = routed_lm(model, self.tokenizer, routing, experiment.batch_size)
            rows = run_task(lm, name, task_manager(experiment.include), num_fewshot=shots, limit=experiment.limit)
            rows += [{"task": name, "metric": metric, "value": value} for metric, value in routing.summary().items()]
            return {"quality": rows}

        return judged


# ---- the model under a policy ---------------------------------------------------------------------------------------

_RATIOS = {
    "dropped_share": ("num_dropped_pairs", "num_topk_pairs"),
    "rerouted_share": ("num_rerouted_pairs", "num_topk_pairs"),
    "retained_mass_topk": ("mass", "topk_mass"),
    "experts_per_token": ("num_pairs", "num_tokens"),
}


@dataclass
class TaskRouting:
    """How a model is routed while a task runs, and what came of it.

    Attributes:
        arrangement: of sequences that are scored; see ``routed.judged_stage``.
        sums: of ``pass_metrics`` and of score mass, over passes and layers.
    """

    policy: Policy | None
    num_ranks: int = 1
    arrangement: Literal["auto", "prefill", "decode"] = "auto"
    seed: int = 0
    sums: Counter[str] = field(default_factory=Counter)

    def routed(self, model: torch.nn.Module, *, generating: bool = False) -> contextlib.AbstractContextManager[None]:
        """While whole sequences are scored, or answers are generated: there the policy acts in its own stages."""
        how: Arrangement = "as_run" if generating else judged_stage(self.policy, self.arrangement)
        return routed(model, self.policy, num_ranks=self.num_ranks, arrangement=how, seed=self.seed, observe=self._add)

    def _add(self, call: RouterCall) -> None:
        metrics, valid_T = pass_metrics(call), call.forward_pass.valid_T
        metrics["topk_mass"] = float((call.scores_TE * call.own_TE)[valid_T].sum(dtype=torch.float64))
        metrics["mass"] = metrics["retained_mass_topk"] * metrics["topk_mass"]
        self.sums.update({name: metrics[name] for ratio in _RATIOS.values() for name in ratio})

    def summary(self) -> dict[str, float | None]:
        """Ratios of sums over passes and layers; None where nothing ran."""
        return {
            name: self.sums[part] / self.sums[whole] if self.sums[whole] else None
            for name, (part, whole) in _RATIOS.items()
        }


def routed_lm(model: Any, tokenizer: Any, routing: TaskRouting, batch_size: int) -> Any:
    """The model as the harness takes it, under a policy."""
    base = importlib.import_module("lm_eval.models.huggingface").HFLM

    class RoutedLM(base):  # type: ignore[misc, valid-type]
        """The harness' own class, but for what this module's text says."""

        def _loglikelihood_tokens(
            self, requests: Sequence[Any], disable_tqdm: bool = False, override_bs: int | None = None
        ) -> list[tuple[float, bool]]:
            pairs = [(list(context), list(continuation)) for _, context, continuation in requests]
            with routing.routed(self.model), torch.inference_mode():
                return score_continuations(self.model, pairs, self.max_length, override_bs or batch_size)

        def generate_until(self, requests: Any, disable_tqdm: bool = False) -> list[str]:
            with routing.routed(self.model, generating=True):
                return super().generate_until(requests, disable_tqdm=disable_tqdm)

    return RoutedLM(pretrained=model, tokenizer=tokenizer, batch_size=batch_size)


def served_lm(url: str, name: str, tokenizer: str, in_flight: int) -> Any:
    """A server's model as the harness takes it, by OpenAI's completions.

    Args:
        url: without ``/v1``.
        name: under which the server has it; ``tokenizer``, folder or name on the hub.

    Raises:
        ValueError: the harness, what it needs of others, or the tokenizer is not there.
    """
    import_harness()
    try:
        module = importlib.import_module("lm_eval.models.openai_completions")
        return module.LocalCompletionsAPI(
            model=name,
            base_url=f"{url}/v1/completions",
            tokenizer=tokenizer,
            tokenized_requests=False,
            num_concurrent=in_flight,
            max_retries=1,
        )
    except (ImportError, OSError, ValueError) as error:
        raise UserError(f"serve.model: the harness cannot ask {brief(tokenizer)}: {brief(error)}", "tasks") from None


def score_continuations(
    model: Any, pairs: Sequence[tuple[list[int], list[int]]], max_length: int, batch_size: int
) -> list[tuple[float, bool]]:
    """Log-probability of continuations of contexts, in nats, and whether greedy decoding would give them.

    Args:
        pairs: token ids of each context and its continuation, none empty; what is too long loses its beginning.
        max_length: the most tokens that the model reads.
        batch_size: B, different sequences that go through the model together, longest first.

    Raises:
        ValueError: a continuation that the model cannot read whole.
    """
    alike: dict[tuple[int, ...], list[int]] = {}
    for number, (context, continuation) in enumerate(pairs):
        if len(continuation) > max_length:
            raise UserError(f"a continuation has {len(continuation)} tokens; the model reads {max_length}")
        tokens = (context + continuation)[-(max_length + 1) :][:-1]
        alike.setdefault(tuple(tokens), []).append(number)
    answers: list[tuple[float, bool]] = [(0.0, False)] * len(pairs)
    sequences = sorted(alike, key=lambda tokens: (-len(tokens), tokens))
    for first in range(0, len(sequences), batch_size):
        batch = sequences[first : first + batch_size]
        for tokens, hidden_SD in zip(batch, _hidden_states(model, batch), strict=True):
            for number in alike[tokens]:
                answers[number] = _score(model, hidden_SD[: len(tokens)], pairs[number][1])
    return answers


def _hidden_states(model: Any, batch: Sequence[tuple[int, ...]]) -> Tensor:
    """Inputs of the output layer, [B, S, D]; padding is on the right, and masked."""
    device = next(model.parameters()).device
    tokens_BS = pad_sequence([torch.tensor(tokens, device=device) for tokens in batch], batch_first=True)
    length_B1 = torch.tensor([[len(tokens)] for tokens in batch], device=device)
    mask_BS = (torch.arange(tokens_BS.shape[1], device=device) < length_B1).long()
    return model.base_model(tokens_BS, attention_mask=mask_BS, use_cache=False).last_hidden_state


def _score(model: Any, hidden_SD: Tensor, continuation: Sequence[int]) -> tuple[float, bool]:
    logits_NV = model.get_output_embeddings()(hidden_SD[-len(continuation) :]).float()
    next_N = torch.tensor(continuation, device=logits_NV.device)
    chosen_N = logits_NV.log_softmax(dim=-1).gather(1, next_N.unsqueeze(1))[:, 0]
    return float(chosen_N.double().sum()), bool((logits_NV.argmax(dim=-1) == next_N).all())


# ---- what the harness returns ---------------------------------------------------------------------------------------


def run_task(
    lm: Any, task: str, manager: Any, *, num_fewshot: int | None = None, limit: int | None = None
) -> list[Row]:
    """Let the harness run a task, group or tag on a model.

    Returns:
        Rows of ``schema.QUALITY_SCHEMA``: one per metric of the task and, of a group, of its parts; then one per metric
        of every question. Values are the harness' own: accuracies are shares.

    Raises:
        ValueError: one line that says why the task cannot be run (its data cannot be had, say), or gives no numbers.
    """
    harness = import_harness()
    try:
        found = harness.simple_evaluate(
            model=lm, tasks=[task], num_fewshot=num_fewshot, limit=limit, task_manager=manager, log_samples=True
        )
    # Tasks fail in as many ways as their data are read; what a policy or the device has to say passes.
    except (OSError, LookupError, AttributeError, TypeError, ImportError, ValueError) as error:
        words = " ".join(str(error).split()) or type(error).__name__
        raise UserError(f"{task}: cannot be run: {type(error).__name__}: {words}", "tasks") from error
    scores = list(_scores(found))
    if not scores:
        raise UserError(f"{task}: expected numbers from the harness, got none", "tasks")
    # A name that stands for several tasks and is no group has no results of its own.
    has_own = any(score["task"] == task for score in scores)
    scores = [{**score, "is_asked": score["task"] == task or not has_own} for score in scores]
    questions = [
        {
            "task": part,
            "item": int(sample["doc_id"]),
            "filter": sample["filter"],
            "metric": metric,
            "value": float(sample[metric]),
        }
        for part, samples in (found.get("samples") or {}).items()
        for sample in samples
        for metric in sample["metrics"]
        if _is_number(sample[metric])
    ]
    return scores + questions


def _scores(found: Any) -> Iterator[Row]:
    # Those of groups too; the harness counts questions of tasks alone.
    for task, values in found["results"].items():
        version = found.get("versions", {}).get(task)
        row = {
            "task": task,
            "version": None if version in (None, "N/A") else str(version),
            "num_fewshot": found.get("n-shot", {}).get(task),
            "num_samples": found.get("n-samples", {}).get(task, {}).get("effective"),
        }
        for key, value in values.items():
            metric, comma, answers_filter = key.partition(",")
            if comma and not metric.endswith("_stderr") and _is_number(value):
                stderr = values.get(f"{metric}_stderr,{answers_filter}")
                number = {"value": float(value), "stderr": float(stderr) if _is_number(stderr) else None}
                better = found.get("higher_is_better", {}).get(task, {}).get(metric)
                yield {**row, "metric": metric, "filter": answers_filter, **number, "higher_is_better": better}


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) or type(value).__module__ == "numpy"
