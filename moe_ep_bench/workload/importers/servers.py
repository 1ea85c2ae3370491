"""Recordings of servers, which hold expert ids alone: SGLang's and vLLM's responses, one a line.

Ids without scores are taken as equal scores: the trace's score is ``ASSUMED``, and every result made from it says so.

Shapes: T = tokens of a request, L = layers of the model, K = top_k.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moe_ep_bench.errors import UserError, brief
from moe_ep_bench.models import ModelSpec
from moe_ep_bench.workload.importers.reading import ImportOptions, checked, json_objects, whole_number
from moe_ep_bench.workload.writer import TraceWriter

ASSUMED = "assumed equal over the top-k: the source holds expert ids only"
ROUTED = "routed_experts"


def read_sglang(source: Path, options: ImportOptions, writer: TraceWriter) -> None:
    """Import SGLang's responses with routed experts.

    ``/generate`` (``--enable-return-routed-experts``, and ``return_routed_experts`` in a request) returns
    ``routed_experts`` in ``meta_info``: base64 of int32 [tokens, layers, K], of the prompt and of what was generated
    but its last token. ``prompt_tokens`` beside it tells the phases.
    """
    model = options.describe(writer, ASSUMED)
    for sequence, (where, response) in enumerate(_responses(source, writer)):
        facts = response.get("meta_info")
        num_prompt = whole_number(facts, "prompt_tokens", f"{where}: meta_info")
        content = _decoded(facts.get(ROUTED), f"{where}: {ROUTED}")
        row_bytes = 4 * model.num_layers * model.top_k
        if not content or len(content) % row_bytes:
            expected = f"rows of {model.num_layers} layers x top-{model.top_k} as int32 ({row_bytes} bytes)"
            raise UserError(f"{where}: {ROUTED}: expected {expected}, got {len(content)} bytes")
        ids_TLK = np.frombuffer(content, dtype="<i4").reshape(-1, model.num_layers, model.top_k)
        _add(sequence, ids_TLK, num_prompt, f"{where}: {ROUTED}", options.phase, model, writer)


def read_vllm(source: Path, options: ImportOptions, writer: TraceWriter) -> None:
    """Import vLLM's responses with routed experts.

    vLLM (``enable_return_routed_experts``) returns ``routed_experts`` [tokens, layers, K] with every completion: of its
    prompt and of what was generated but its last token, as the base64 text of an array in npy form. Lists serve too, as
    Python has them:

        {"choices": [{"routed_experts": output.outputs[0].routed_experts.tolist()}],
         "usage": {"prompt_tokens": len(output.prompt_token_ids)}}

    Ids are uint8 for up to 256 experts. Tokens whose routing was not recorded are -1 (255).
    """
    model = options.describe(writer, ASSUMED)
    for sequence, (where, response) in enumerate(_responses(source, writer)):
        choices = response.get("choices")
        if not isinstance(choices, list) or len(choices) != 1 or not isinstance(choices[0], dict):
            raise UserError(f"{where}: choices: expected one completion a response (n = 1), got {brief(choices)}")
        num_prompt = whole_number(response.get("usage"), "prompt_tokens", f"{where}: usage")
        place, ids = f"{where}: {ROUTED}", choices[0].get(ROUTED)
        if isinstance(ids, str):
            try:
                ids = np.lib.format.read_array(io.BytesIO(_decoded(ids, place)), allow_pickle=False)
            except (ValueError, EOFError) as error:
                raise UserError(f"{place}: expected an array in npy form ({brief(str(error), quoted=False)})") from None
        _add(sequence, checked(ids, place, (None, None, None)), num_prompt, place, options.phase, model, writer)


def _responses(path: Path, writer: TraceWriter) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield a server's responses with their places; the writer's notes count those that say of an error."""
    num_errors = 0
    for where, response in json_objects(path):
        if response.get("error"):
            num_errors += 1
        else:
            yield where, response
    if num_errors:
        writer.notes.append(f"{num_errors:,} responses with an error left out")


def _decoded(text: Any, where: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (ValueError, TypeError):
        raise UserError(f"{where}: expected base64 text, got {brief(text)}") from None


def _add(
    sequence: int,
    ids_TLK: NDArray[np.integer],
    num_prompt: int,
    where: str,
    phase: str,
    model: ModelSpec,
    writer: TraceWriter,
) -> None:
    """Add a request's tokens, or those of one phase.

    Ids below 0 say that nothing was recorded of a token; so does one number in all places (zeros, or -1 as uint8), as
    no router gives a token one expert twice. With K = 1 that cannot be told.

    Args:
        num_prompt: tokens of the prompt.

    Raises:
        ValueError: the model has other layers, or tokens of the prompt are missing.
    """
    num_tokens = len(ids_TLK)
    if ids_TLK.shape[1:] != (model.num_layers, model.top_k):
        expected = f"{model.num_layers} layers and top-{model.top_k} as {model.name} has"
        raise UserError(f"{where}: expected {expected}, got shape {ids_TLK.shape}")
    if num_tokens < num_prompt:
        raise UserError(f"{where}: expected all {num_prompt} tokens of the prompt, got {num_tokens} recorded")
    position_T, ids_TM = np.arange(num_tokens), ids_TLK[:, model.moe_layers].reshape(num_tokens, -1)
    is_prompt_T = position_T < num_prompt
    is_asked_T = {"prefill": is_prompt_T, "decode": ~is_prompt_T}.get(phase, np.ones_like(is_prompt_T))
    is_empty_T = (ids_TM < 0).all(axis=1)
    if model.top_k > 1:
        is_empty_T |= (ids_TM == ids_TM[:, :1]).all(axis=1)
    writer.left_out["of another phase"] += int((~is_asked_T).sum())
    writer.left_out["that were not recorded"] += int((is_asked_T & is_empty_T).sum())
    kept_T = is_asked_T & ~is_empty_T
    for layer in model.moe_layers:
        writer.add(layer, ids_TLK[kept_T, layer], None, f"{where}: layer {layer}", position_T[kept_T])
    writer.add_tokens(sequence, position_T[kept_T], where)
