"""The prompts of ``serve``: lines of a JSONL, or random words, which any server's tokenizer takes.

No prompt comes twice to a server, whose prefix cache would answer it: rounds, and what is sent alone, have their own.
A server at ``serve.url`` gets them from every case and start, each under a ``cache_salt`` of its own (``ab``).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from moe_ep_bench.errors import UserError, brief
from moe_ep_bench.files import parse_json, read_text
from moe_ep_bench.serving.config import PromptsConfig

Prompt = str | list[int] | list[dict[str, Any]]  # text, token ids, or messages of a chat
# Common words, of about a token each.
_WORDS = (
    "the of and to in is that it was for on are as with his they at be this from have or by one had not but what all "
    "were when we there can an your which their said if do will each about how up out them then she many some so these "
    "would other into has more her two like him see time could no make than first been its who now people my made over "
    "did down only way find use may water long little very after words called just where most know"
)
_WARM_UP = 2**20  # seeds of warm-up lie beyond those of prompts


def read_prompts(config: PromptsConfig, number: int) -> list[Prompt]:
    """The first prompts of a file, or as many random ones.

    Raises:
        ValueError: one line that names the file, the line and what was expected.
    """
    return random_prompts(config, number) if config.file is None else _of_file(config.file, number)


def random_prompts(config: PromptsConfig, number: int, *, warm_up: bool = False) -> list[Prompt]:
    """Prompts of random words; those of ``warm_up`` are no others'."""
    generator = np.random.default_rng([config.seed, _WARM_UP * warm_up])
    return [" ".join(generator.choice(_WORDS.split(), config.num_words)) for _ in range(number)]


def _of_file(path: Path, number: int) -> list[Prompt]:
    try:
        text = read_text(path).removeprefix("\ufeff")
    except OSError as error:
        raise UserError(f"{path}: cannot read the prompts: {error.strerror}") from None
    lines = [(place, line) for place, line in enumerate(text.split("\n"), 1) if line.strip()]
    if len(lines) < number:
        raise UserError(
            f"{path}: expected {number} prompts (serve.rounds x serve.requests + serve.alone), each sent once; "
            f"got {len(lines)}"
        )
    prompts, seen = [], {}
    for place, line in lines[:number]:
        prompts.append(_prompt(line, f"{path}: line {place}"))
        if (first := seen.setdefault(json.dumps(prompts[-1]), place)) != place:
            raise UserError(f"{path}: lines {first} and {place}: expected each prompt once, got it twice")
    return prompts


def _prompt(line: str, where: str) -> Prompt:
    content = parse_json(line, where)
    try:
        json.dumps(content, ensure_ascii=False).encode()
    except UnicodeEncodeError:  # half a pair of surrogates
        raise UserError(f"{where}: expected a text that UTF-8 can hold, got {brief(json.dumps(content))}") from None
    content = content if isinstance(content, dict) else {"": content}
    messages, prompt = content.get("messages"), content.get("prompt")
    is_message = lambda one: isinstance(one, dict) and {"role", "content"} <= set(one)  # noqa: E731
    if prompt is None and isinstance(messages, list) and messages and all(map(is_message, messages)):
        return messages
    is_ids = isinstance(prompt, list) and all(type(token) is int for token in prompt)
    if prompt and (is_ids or isinstance(prompt, str)):
        return prompt
    raise UserError(
        f'{where}: expected {{"prompt": text or token ids}} or {{"messages": of a chat}}, '
        f"got {brief(json.dumps(content.get('', content)))}"
    )
