"""Ask a server by OpenAI's protocol, and clock what it streams.

A request is sent to ``/v1/completions`` with temperature 0. Its clock starts when it is sent: the first token is there
when the first piece with a token has arrived, and the answer when the stream has ended. Nothing but the protocol is
needed of the server; ``ignore_eos`` is vLLM's and SGLang's, and left out where the config says so. What a server says
is its own: each field is checked, and the answer that has a wrong one is none.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx2
import numpy as np

from moe_ep_bench.errors import UserError, brief
from moe_ep_bench.files import is_whole_number

KEY = "OPENAI_API_KEY"  # of the environment, as the harness has it
_SAME_MOMENT_US = 200.0  # between pieces that were read at once
_MOST_LINE = 2**24  # bytes of a piece
_MOST_TOKENS = 2**31
# What an answer of another shape raises where it is read; deep JSON and huge numbers, too.
_WRONG = (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError)


@dataclass
class Answer:
    """What came back of one request; times in microseconds.

    Attributes:
        sent_us: since the round began.
        first_us, time_us: from sending to the first token and to the end.
        num_prompt_tokens, num_tokens: as the server counts; None = it does not say.
        num_arrivals: moments at which pieces with tokens came; pieces of one moment were held back on their way.
        tokens, logprobs: of the answer, empty where the server gives none.
        failure: why there is no answer; None = there is one.
    """

    sent_us: float
    first_us: float | None = None
    time_us: float | None = None
    num_prompt_tokens: int | None = None
    num_tokens: int | None = None
    num_arrivals: int = 0
    text: str = ""
    tokens: list[str] = field(default_factory=list)
    logprobs: list[float | None] = field(default_factory=list)
    failure: str | None = None


class Client:
    """Requests to one server, whose connections stay open from round to round.

    Args:
        url: without ``/v1``.
        model: as the server names it.
        limit_s: for an answer.
    """

    def __init__(self, url: str, model: str, limit_s: float, **asked: Any) -> None:
        self.url, self.limit_s, self.asked = url, limit_s, {"model": model, **asked}
        self._runner = asyncio.Runner()
        self._http = _http()

    def close(self) -> None:
        """Give up what is under way, and close all connections."""
        self._runner.run(self._end())
        self._runner.close()

    async def _end(self) -> None:
        under_way = asyncio.all_tasks() - {asyncio.current_task()}
        for task in under_way:
            task.cancel()
        await asyncio.gather(*under_way, return_exceptions=True)
        await self._http.aclose()

    def send(
        self, prompts: Sequence[Any], *, concurrency: int | None = None, rate: float | None = None, seed: int = 0
    ) -> list[Answer]:
        """Send prompts and wait for all answers, which stand in the order of the prompts.

        Args:
            concurrency: requests in flight.
            rate: requests per second in its place, at Poisson arrivals of this seed.
        """
        return self._runner.run(self._send(prompts, concurrency, rate, seed))

    async def _send(
        self, prompts: Sequence[Any], concurrency: int | None, rate: float | None, seed: int
    ) -> list[Answer]:
        gaps_s = np.zeros(len(prompts))
        if rate is not None:
            gaps_s[1:] = np.random.default_rng(seed).exponential(1 / rate, len(prompts) - 1)
        free, began = asyncio.Semaphore(concurrency or len(prompts)), time.perf_counter()

        async def one(prompt: Any, at_s: float) -> Answer:
            await asyncio.sleep(max(0.0, at_s - (time.perf_counter() - began)))
            async with free:
                return await self._ask(prompt, began)

        return list(await asyncio.gather(*map(one, prompts, gaps_s.cumsum().tolist())))

    async def _ask(self, prompt: Any, began: float) -> Answer:
        body, path = {**self.asked, "temperature": 0, "stream": True}, "completions"
        if isinstance(prompt, list) and isinstance(prompt[0], dict):
            body["messages"], path = prompt, "chat/completions"
            body |= {"logprobs": True} if "logprobs" in body else {}
        else:
            body["prompt"] = prompt
        body["stream_options"] = {"include_usage": True}
        sent = time.perf_counter()
        answer = Answer(sent_us=1e6 * (sent - began))
        try:
            async with (
                asyncio.timeout(self.limit_s),
                self._http.stream("POST", f"{self.url}/v1/{path}", json=body) as response,
            ):
                if response.status_code != 200:
                    words = (await response.aread()).decode(errors="replace")
                    raise ValueError(f"HTTP {response.status_code}: {words}")
                await _read(response, answer, sent)
        except TimeoutError:
            answer.failure = f"no answer within {self.limit_s:g} s (serve.request_s)"
        except (httpx2.HTTPError, httpx2.StreamError, *_WRONG) as problem:
            words = str(problem) if type(problem) is ValueError else f"{type(problem).__name__}: {problem}"
            answer.failure = brief(words.replace(_key() or "\n", " "), 220, quoted=False)
        return answer


async def _read(response: Any, answer: Answer, sent: float) -> None:
    """Read server-sent events to the end."""
    num_pieces, ended = 0, False
    async for line in _lines(response):
        if not line.startswith(b"data:"):
            continue
        data, now_us = line[5:].strip(), 1e6 * (time.perf_counter() - sent)
        if data == b"[DONE]":
            ended = True
            break
        piece = json.loads(data.decode(errors="replace"))
        if error := piece.get("error"):
            raise ValueError(brief(error, 200, quoted=False))
        if usage := piece.get("usage"):
            counts = _count(usage, "prompt_tokens"), _count(usage, "completion_tokens")
            answer.num_prompt_tokens, answer.num_tokens = counts
        for choice in piece.get("choices") or ():
            text, said = choice.get("text") or "", choice.get("logprobs") or {}
            tokens, logprobs = said.get("tokens") or [], said.get("token_logprobs") or []
            if "delta" in choice:  # of a chat
                text, of_chat = choice["delta"].get("content") or "", said.get("content") or []
                tokens, logprobs = ([one[key] for one in of_chat] for key in ("token", "logprob"))
            if text or tokens:
                num_pieces += 1
                answer.first_us = answer.first_us or now_us
                answer.num_arrivals += answer.time_us is None or now_us - answer.time_us > _SAME_MOMENT_US
                answer.time_us = now_us
            answer.text += text
            answer.tokens += map(_text, tokens)
            answer.logprobs += map(_logprob, logprobs)
    if not ended or answer.first_us is None:
        raise ValueError("the stream ended without a token" if answer.first_us is None else "the stream broke off")
    _text(answer.text)
    least = max(len(answer.tokens), num_pieces)
    answer.num_tokens = least if answer.num_tokens is None else answer.num_tokens
    if answer.num_tokens < least:
        raise ValueError(f"usage: completion_tokens: expected {least} at least, as many came, got {answer.num_tokens}")


async def _lines(response: Any) -> AsyncIterator[bytes]:
    """Lines between LF, as events have them; texts may hold U+2028 and others at which ``splitlines`` would split."""
    rest = b""
    async for part in response.aiter_bytes():
        *whole, rest = (rest + part).split(b"\n")
        for line in whole:
            yield line
        if len(rest) > _MOST_LINE:
            raise ValueError(f"a line of more than {_MOST_LINE:,} bytes")
    yield rest


def _count(usage: Any, key: str) -> int | None:
    count = usage.get(key)
    if count is not None and not (is_whole_number(count) and count < _MOST_TOKENS):
        raise ValueError(f"usage: {key}: expected a count of tokens, got {brief(count)}")
    return count


def _text(text: Any) -> str:
    """A text that UTF-8 can hold, which half a pair of surrogates is not."""
    if not isinstance(text, str):
        raise ValueError(f"expected tokens as texts, got {brief(text)}")
    text.encode()
    return text


def _logprob(value: Any) -> float | None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
        raise ValueError(f"expected log-probabilities as numbers, got {brief(value)}")
    return float(value) if value is not None and math.isfinite(value) else None


# ---- a server's name and a user's key --------------------------------------------------------------------------------


def _key() -> str:
    """A user's key, which is sent, and neither stored nor printed."""
    key = os.environ.get(KEY, "").strip()
    if not (key.isascii() and key.isprintable()):
        raise UserError(f"{KEY}: expected printable ASCII")
    return key


def _http() -> httpx2.AsyncClient:
    headers = {"Authorization": f"Bearer {key}"} if (key := _key()) else {}
    limits = httpx2.Limits(max_connections=None)
    return httpx2.AsyncClient(timeout=None, limits=limits, trust_env=False, headers=headers)


def model_at(url: str, asked: str, limit_s: float) -> str:
    """The name under which a server has a model: as asked, or the only one that it has.

    Raises:
        UserError: it refuses a user, answers as no such server does, or has other models; one line.
        httpx2.HTTPError, TimeoutError: it does not answer, within the limit as a whole.
    """

    async def get() -> httpx2.Response:
        async with asyncio.timeout(limit_s), _http() as http:
            return await http.get(f"{url}/v1/models")

    response = asyncio.run(get())
    if response.status_code in (401, 403):
        raise UserError(f"{url}/v1/models: HTTP {response.status_code}: it wants another key (in {KEY})")
    response.raise_for_status()
    try:
        names = [_text(one["id"]) for one in response.json()["data"]]
    except _WRONG:
        raise UserError(f"{url}/v1/models: expected a list of models, got {brief(response.text)}") from None
    if asked in names or not names:
        return asked
    if len(names) > 1:
        raise UserError(
            f"expected one of {brief(', '.join(names), 200, quoted=False)} at {url}, got {asked}", "serve.model"
        )
    return names[0]
