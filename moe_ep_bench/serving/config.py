"""Read the YAML config of ``serve``: how servers are started, what they are asked, and under which policies they serve.

Policies are written as in every other config. Relative paths start at the config's own folder.
"""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import DirectoryPath, Field, field_validator, model_validator

from moe_ep_bench.config import NAME, SweepPoint
from moe_ep_bench.errors import UserError, brief
from moe_ep_bench.presets import MOST, MOST_RUNS, MOST_SEED, PolicyEntry, Strict, spelled_out
from moe_ep_bench.quality.config import TaskConfig


class PromptsConfig(Strict):
    file: Annotated[Path | None, NAME] = None
    """JSONL, a ``prompt`` or ``messages`` in each line; null = random words."""
    num_words: int = Field(default=64, ge=1, le=MOST_RUNS)
    """Words of a random prompt."""
    seed: int = Field(default=0, ge=0, le=MOST_SEED)
    """Seed of random prompts and of arrivals."""
    max_tokens: int = Field(default=64, ge=1, le=MOST)
    """Tokens of an answer."""
    ignore_eos: bool = True
    """Answer to ``max_tokens`` (vLLM, SGLang)."""
    logprobs: bool = True
    """Ask for log-probabilities."""
    cache_salt: bool = True
    """Keep prefix caches out at ``serve.url`` (vLLM)."""


class ServersConfig(Strict):
    model: str = Field(min_length=1)
    """What ``{model}`` stands for."""
    command: str = "vllm serve {model} --port {port} -cc.cudagraph_mode=NONE"
    """Start of a server."""
    url: str | None = None
    """A running server; its policy is its own."""
    servers: Literal["together", "in_turn"] = "in_turn"
    """All servers alive, rounds interleaved; or one at a time, as memory asks."""
    starts: int = Field(default=1, ge=1, le=MOST_RUNS)
    """Starts of every server."""
    start_s: float = Field(default=600, gt=0)
    """Limit of a start."""
    rounds: int = Field(default=10, ge=1, le=MOST_RUNS)
    """Rounds of requests; intervals need ten."""
    requests: int = Field(default=16, ge=1, le=MOST_RUNS)
    """Requests of a round."""
    alone: int = Field(default=8, ge=0, le=MOST_RUNS)
    """Requests sent one at a time, untimed, to compare answers."""
    concurrency: int | None = Field(default=None, ge=1, le=MOST_RUNS)
    """Requests in flight; this or rate."""
    rate: float | None = Field(default=None, gt=0)
    """Requests per second, Poisson arrivals."""
    request_s: float = Field(default=600, gt=0)
    """Limit of an answer."""
    acts_in: tuple[Literal["prefill", "decode"], ...] | None = Field(default=None, min_length=1)
    """Stages in which policies act; null = each policy's own."""

    @field_validator("command")
    @classmethod
    def _check_command(cls, command: str) -> str:
        if "{port}" not in command:
            raise UserError(f"expected {{port}} in it, got {command}")
        try:
            shlex.split(command)
        except ValueError as problem:
            raise UserError(f"expected a shell's words, got {command} ({problem})") from None
        return command

    @field_validator("url")
    @classmethod
    def _check_url(cls, url: str | None) -> str | None:
        if url is None:
            return None
        if "@" in url:  # What may be a password is not said again.
            raise UserError("expected no user or password in it; a key is read from the variable OPENAI_API_KEY")
        try:
            parts = urlsplit(url)
            is_known = parts.scheme in ("http", "https") and parts.hostname and (parts.port or 1)
        except ValueError:  # a port that is no number, half a bracket
            is_known = False
        if not is_known or parts.query or parts.fragment or not (url.isascii() and url.isprintable()) or " " in url:
            raise UserError(f"expected http://HOST:PORT or https://HOST, got {brief(url, quoted=not url)}")
        return url.rstrip("/").removesuffix("/v1")

    @model_validator(mode="after")
    def _check_load(self) -> ServersConfig:
        if (self.concurrency is None) == (self.rate is None):
            got = "neither" if self.rate is None else "both"
            raise UserError(f"expected one of the two, got {got}", "concurrency", "rate")
        return self


class ServeExperiment(SweepPoint):
    """A config file of ``serve`` at one point of its ``sweep``."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    """Name of the results; without it, the file's."""
    serve: ServersConfig
    prompts: PromptsConfig = PromptsConfig()
    tasks: tuple[TaskConfig, ...] = ()
    """Tasks of the lm-evaluation-harness, asked in the first start after all rounds."""
    include: Annotated[DirectoryPath | None, NAME] = None
    """Folder of your own tasks."""
    limit: int | None = Field(default=None, ge=1, le=MOST)
    """Questions of each task; null = all."""
    policies: tuple[PolicyEntry, ...] = ()
    """Names and fields; a list as value makes a policy each, ``{"0-5": 1.0, "6-25": 1.5}`` differs by MoE layer."""

    def entries(self) -> list[dict[str, Any]]:
        """A policy in each, as the plugin reads it; none where the server is somebody else's."""
        return [] if self.serve.url is not None else list(spelled_out(self.policies))
