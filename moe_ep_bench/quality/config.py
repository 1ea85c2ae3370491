"""Read the YAML config of ``quality``: a checkpoint, a text or tasks (or both), virtual ranks and policies.

Policies are written as in every other config, so that ``run`` can time the list that is judged here. Relative paths
start at the config's own folder.

Shapes: B = sequences that are routed together.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import DirectoryPath, Field, model_validator

from moe_ep_bench.config import NAME, SweepPoint
from moe_ep_bench.errors import UserError
from moe_ep_bench.policies import Policy
from moe_ep_bench.presets import MOST, MOST_SEED, PolicyEntry, Strict, expand_policies


class CheckpointConfig(Strict):
    checkpoint: Annotated[Path, NAME]
    """Folder written by save_pretrained."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Type of the weights; auto = the checkpoint's own."""


class TextConfig(Strict):
    file: Annotated[Path, NAME]
    """Text in UTF-8."""
    num_sequences: int = Field(default=64, ge=1, le=MOST)
    """Sequences, from the beginning of the text."""
    sequence_length: int = Field(default=512, ge=2, le=MOST)
    """Tokens of a sequence."""
    batch_size: int = Field(default=8, ge=1, le=MOST)
    """Sequences that are routed together."""

    @model_validator(mode="after")
    def _check(self) -> TextConfig:
        if self.num_sequences % self.batch_size:
            raise UserError(
                f"expected a multiple of batch_size={self.batch_size}, got {self.num_sequences}", "num_sequences"
            )
        return self


class TaskConfig(Strict):
    name: str = Field(min_length=1)
    """Task, group or tag, or one of ``include``."""
    num_fewshot: int | None = Field(default=None, ge=0, le=MOST)
    """Examples in the prompt; null = the task's own."""


class RanksConfig(Strict):
    ep_size: int | None = Field(default=None, ge=1, le=MOST)
    """Virtual ranks; null = up to 8 that divide the experts."""
    seed: int = Field(default=0, ge=0, le=MOST_SEED)
    """Seed of random policies."""


class QualityExperiment(SweepPoint):
    """A config file of ``quality`` at one point of its ``sweep``."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    """Name of the results; without it, the file's."""
    model: CheckpointConfig
    text: TextConfig | None = None
    """Text whose next tokens are scored; this, tasks or both."""
    tasks: tuple[TaskConfig, ...] | None = Field(default=None, min_length=1)
    """Tasks of the lm-evaluation-harness."""
    include: Annotated[DirectoryPath | None, NAME] = None
    """Folder of your own tasks."""
    limit: int | None = Field(default=None, ge=1, le=MOST)
    """Questions of each task; null = all."""
    batch_size: int = Field(default=8, ge=1, le=MOST)
    """Requests that are routed together."""
    layer: RanksConfig = RanksConfig()
    arrangement: Literal["auto", "prefill", "decode"] = "auto"
    """Tokens that are routed together: all of a batch, or those of each position; auto = by each policy's stage."""
    policies: tuple[PolicyEntry, ...] = Field(min_length=1)
    """Names and fields; a list as value makes a policy each, ``{"0-5": 1.0, "6-25": 1.5}`` differs by MoE layer."""

    @model_validator(mode="after")
    def _check(self) -> QualityExperiment:
        if self.tasks is None:
            if self.text is None:
                raise UserError("expected at least one of them, got neither", "text", "tasks")
            for key in ("include", "limit", "batch_size"):
                if key in self.model_fields_set:
                    hint = " (of a text: text.batch_size)" if key == "batch_size" else ""
                    raise UserError(f"expected tasks beside it, got none{hint}", key)
        asked = [(task.name, task.num_fewshot) for task in self.tasks or ()]
        if len(set(asked)) < len(asked):
            twice = max(asked, key=asked.count)[0]
            raise UserError(f"expected each task once at each number of shots, got {twice} twice", "tasks")
        return self

    def make_policies(self) -> list[Policy]:
        return expand_policies(self.policies)
