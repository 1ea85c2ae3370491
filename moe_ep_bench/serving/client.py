"""Ask a server by OpenAI's protocol, and clock what it streams.

A request is sent to ``/v1/completions`` with temperature 0. Its clock starts when it is sent: the first token is there
when the first piece with a token has arrived, and the answer when the stream has ended. Nothing but the protocol is
needed of the server; ``ignore_eos`` is vLLM's and SGLang's, and left out where the config says so.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx2
import numpy as np

from moe_ep_bench.errors import UserError, brief

_SAME_MOMENT_US = 200.0  # between pieces that were read at once


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
        self._http = httpx2.AsyncClient(timeout=None, limits=httpx2.Limits(max_connections=None), trust_env=False)

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
                    answer.failure = f"HTTP {response.status_code}: {brief(words, 200, quoted=False)}"
                    return answer
                await _read(response, answer, sent)
        except TimeoutError:
            answer.failure = f"no answer within {self.limit_s:g} s (serve.request_s)"
        except (httpx2.HTTPError, httpx2.StreamError, ValueError, LookupError, TypeError, AttributeError) as problem:
            answer.failure = f"{type(problem).__name__}: {brief(problem, 200, quoted=False)}"
        return answer


async def _read(response: Any, answer: Answer, sent: float) -> None:
    """Read server-sent events to the end."""
    num_pieces, ended = 0, False
    async for line in response.aiter_lines():
        if not line.startswith("data:"):
            continue
        data, now_us = line[5:].strip(), 1e6 * (time.perf_counter() - sent)
        if data == "[DONE]":
            ended = True
            break
        piece = json.loads(data)
        if error := piece.get("error"):
            raise ValueError(brief(error, 200, quoted=False))
        if usage := piece.get("usage"):
            answer.num_prompt_tokens, answer.num_tokens = usage.get("prompt_tokens"), usage.get("completion_tokens")
        for choice in piece.get("choices", ()):
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
            answer.tokens += tokens
            answer.logprobs += logprobs
    if not ended or answer.first_us is None:
        raise ValueError("the stream ended without a token" if answer.first_us is None else "the stream broke off")
    answer.num_tokens = answer.num_tokens or len(answer.tokens) or num_pieces


def model_at(url: str, asked: str, limit_s: float) -> str:
    """The name under which a server has a model: as asked, or the only one that it has.

    Raises:
        ValueError: it has others; one line that lists them.
        httpx2.HTTPError: it does not answer.
    """
    response = httpx2.get(f"{url}/v1/models", timeout=limit_s, trust_env=False)
    response.raise_for_status()
    names = [one["id"] for one in response.json()["data"]]
    if asked in names or not names:
        return asked
    if len(names) > 1:
        raise UserError(f"serve.model: expected one of {', '.join(names)} at {url}, got {asked}")
    return names[0]
