"""Recordings that hold expert ids alone: SGLang's and vLLM's.

Shapes: T = tokens of a pass or piece, L = layers of the model, K = top_k.
"""

from __future__ import annotations

import io
import itertools
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from moe_ep_bench.errors import UserError, brief
from moe_ep_bench.workload.importers.arrays import (
    Npz,
    checked,
    from_base64,
    opened_npz,
    responses,
    routed_part,
)
from moe_ep_bench.workload.importers.options import ImportOptions
from moe_ep_bench.workload.importers.writer import TraceWriter

BOTH_PHASES = "prefill and decode"
ROUTED = "routed_experts"
# How a file tells the tokens of a prompt from those that were generated.
HOW_TO_TELL = (
    "prompt_token_ids in responses (requests with return_token_ids), one completion a response, or prompt_length in npz"
)
# With more padding than this share of all tokens something else went wrong.
_MOST_PADDING = 0.1


class Completion(NamedTuple):
    """What a server returned of one request's tokens.

    Attributes:
        where: file and place.
        sequence: prompt and completion are one.
        ids_TLK: experts, -1 where nothing was recorded.
        first: position of the first token.
        num_prompt: tokens of the prompt, from position 0; None = nothing says.
        num_cached: those of them that the prefix cache held.
        repeats_prompt: another completion's array has the same prompt's tokens.
    """

    where: str
    sequence: int
    ids_TLK: NDArray[np.integer]
    first: int
    num_prompt: int | None
    num_cached: int = 0
    repeats_prompt: bool = False


def _add_completions(completions: Iterable[Completion], options: ImportOptions, writer: TraceWriter) -> None:
    """Add completions' tokens: of one phase or both, each prompt once, with or without what a cache held."""
    left_out, num_cached = Counter[str](), 0
    for completion in completions:
        position_T = completion.first + np.arange(len(completion.ids_TLK))
        if completion.num_prompt is not None and position_T.size and position_T[-1] + 1 < completion.num_prompt:
            got = f"{completion.num_prompt} of a prompt, {position_T[-1] + 1} recorded"
            raise UserError(
                f"{completion.where}: expected all tokens of the prompt (--prompt-start, if not all), got {got}"
            )
        if completion.num_prompt is None and options.phase in ("prefill", "decode"):
            raise UserError(
                f"phase: {completion.where}: nothing says which tokens are the prompt's; expected none, or "
                f"{HOW_TO_TELL}"
            )
        is_prompt_T = position_T < (completion.num_prompt or 0)
        is_cached_T = position_T < completion.num_cached
        is_other_T = {"prefill": ~is_prompt_T, "decode": is_prompt_T}.get(
            options.phase or "", np.zeros_like(is_prompt_T)
        )
        reasons = {
            f"of another phase than {options.phase}": is_other_T,
            "of prompts that several completions share": is_prompt_T & completion.repeats_prompt,
            "that the prefix cache held": is_cached_T & options.leave_out_cached,
        }
        kept_T = np.ones_like(is_prompt_T)
        for why, is_out_T in reasons.items():
            left_out[why] += int((kept_T & is_out_T).sum())
            kept_T &= ~is_out_T
        num_cached += int((kept_T & is_cached_T).sum())
        sequence_T = np.full(int(kept_T.sum()), completion.sequence)
        _add(completion.ids_TLK[kept_T], sequence_T, position_T[kept_T], completion.where, writer, options)
    writer.left_out += left_out.total()
    writer.notes += [f"{number:,} tokens {why} left out" for why, number in left_out.items() if number]
    if num_cached:
        writer.notes.append(
            f"{num_cached:,} tokens were in the prefix cache: they count as load, but cost no work then "
            "(--leave-out-cached)"
        )


def _add(
    ids_TLN: NDArray[np.integer],
    sequence_T: NDArray[np.int64],
    position_T: NDArray[np.integer],
    where: str,
    writer: TraceWriter,
    options: ImportOptions,
    logical_LP: NDArray[np.integer] | None = None,
) -> NDArray[np.bool_]:
    """Add what was recorded of a pass, and return which tokens that is.

    Args:
        logical_LP: the expert behind each physical one; None = ids are experts.
    """
    # vLLM about 0.21 returns MoE layers alone, others all layers of the model.
    moe_layers, num_layers = options.moe_layers, ids_TLN.shape[1]
    is_whole = num_layers == options.num_layers
    numbers = moe_layers if num_layers == len(moe_layers) and not is_whole else tuple(range(num_layers))
    dense = [layer for layer in range(num_layers) if layer not in moe_layers] if is_whole else ()
    known_T, layers, num_padding = routed_part(ids_TLN, where, dense)
    writer.num_padding += num_padding
    writer.left_out += int((~known_T).sum())
    if known_T.any() and not writer.num_experts:
        top_k = next(iter(layers.values())).shape[1]
        if top_k == 1 and options.preset is None:
            raise UserError(
                f"preset: needed, because {where} has one expert a token: a dense layer's zeros look like expert 0"
            )
        num_experts = options.num_experts or 1 + int(logical_LP.max() if logical_LP is not None else ids_TLN.max())
        writer.describe(num_experts=num_experts, top_k=top_k, where=where)
    for place_in_array, ids_TK in layers.items():
        layer = numbers[place_in_array]
        place = f"{where}: layer {layer}"
        if logical_LP is not None:
            if ids_TK.max() >= logical_LP.shape[1]:
                expected = f"physical experts 0 to {logical_LP.shape[1] - 1}"
                raise UserError(f"{place}: expected {expected}, got {ids_TK.max()}")
            ids_TK = logical_LP[layer][ids_TK]
        writer.add(layer, ids_TK, None, place, np.flatnonzero(known_T))
    writer.add_tokens(sequence_T[known_T], position_T[known_T], where)
    return known_T


def _check_padding(source: Path, writer: TraceWriter) -> None:
    """Say how much of a source was padding; refuse one that is full of it."""
    padding, all_tokens = writer.num_padding, writer.num_tokens + writer.num_padding
    if not padding:
        return
    words = f"{padding:,} of {all_tokens:,} tokens are padding (one fill, 0 or a type's largest, in all their places)"
    if padding > _MOST_PADDING * all_tokens:
        raise UserError(f"{source}: {words}; expected {100 * _MOST_PADDING:.0f} % at most: was all routing recorded?")
    writer.notes.append(f"{words}, left out")


def _numbered(names: list[str], kinds: tuple[str, ...], path: Path, hint: str = "") -> list[int]:
    """The numbers of arrays that are named ``<number>.<kind>``, ascending.

    Raises:
        ValueError: there are other names, or none.
    """
    forms = {name: re.fullmatch(rf"(\d{{1,9}})\.({'|'.join(kinds)})", name) for name in names}
    others = [name for name, form in forms.items() if form is None]
    if others or not forms:
        got = brief(others[0]) if others else "none"
        raise UserError(f"{path}: expected arrays named 0.{' and 0.'.join(kinds)}, got {got}{hint}")
    return sorted({int(form[1]) for form in forms.values() if form})


# ---- SGLang ----------------------------------------------------------------------------------------------------------

CONVERT = (
    "python -c \"import sys, numpy, torch; d = torch.load(sys.argv[1], map_location='cpu', weights_only=True); "
    "numpy.savez(sys.argv[2], last_physical_to_logical_map=d['last_physical_to_logical_map'], "
    "**{f'{i}.{k}': r[k] for i, r in enumerate(d['records']) "
    "for k in ('topk_ids_of_layer', 'positions', 'extend_seq_lens') if r.get(k) is not None})\" dump.pt dump.npz"
)

MAP = "last_physical_to_logical_map"
IDS, POSITIONS, LENGTHS = "topk_ids_of_layer", "positions", "extend_seq_lens"


def read_sglang(source: Path, options: ImportOptions, writer: TraceWriter) -> None:
    """Import one rank's dump of SGLang's expert distribution recorder, mode ``per_token``, as npz; or responses.

    SGLang dumps with ``torch.save``, which is a pickle. Where SGLang runs, and trusts its own file, ``CONVERT``, typed
    there, converts it. A dump has, for every forward pass of one rank, ``topk_ids_of_layer`` [layers, tokens, 8] (-1:
    no such token, no such layer, or a model with fewer than 8), ``positions`` and, of prefill passes,
    ``extend_seq_lens``; and once ``last_physical_to_logical_map`` [layers, physical experts]. Ids are physical:
    replicas of an expert have ids of their own, which the map undoes (if experts were rebalanced while SGLang recorded,
    the last map is wrong for the passes before). Modes ``stat``, ``stat_approx`` and ``per_pass`` count tokens per
    expert; counts are not routing.

    A prefill pass holds as many sequences as ``extend_seq_lens`` says. Requests are not named, so the pieces of a
    prompt that was prefilled in chunks, and the tokens of a decode pass, each stand alone.

    Responses (``--enable-return-routed-experts``, and ``return_routed_experts`` in a request) stand one a line of a
    .jsonl file, each with ``routed_experts`` in its ``meta_info`` (or ``sglext``): base64 of int32 [tokens, layers, K],
    all layers of the model, of the prompt and of what was generated but its last token. Only a preset says how many
    layers. ``prompt_tokens`` beside it tells the phases, ``cached_tokens`` what the prefix cache held.
    """
    if source.suffix in (".jsonl", ".json"):
        writer.metadata["phase"] = options.phase or BOTH_PHASES
        _add_completions(_sglang_completions(source, options, writer), options, writer)
        return _check_padding(source, writer)
    if options.phase is not None:
        raise UserError(f"phase: expected none, {source.name} says it; got {options.phase!r}")
    with opened_npz(source, CONVERT, options.max_bytes) as npz:
        hint = "; counts of tokens are not who chose whom: --expert-distribution-recorder-mode per_token records that"
        passes = _numbered([name for name in npz.names if name != MAP], (IDS, POSITIONS, LENGTHS), source, hint)
        logical_LP = npz.array(MAP, (None, None))
        if not logical_LP.size or logical_LP.min() < 0:
            raise UserError(f"{npz.where(MAP)}: expected layers of experts from 0, got {brief(logical_LP)}")
        phases = {"prefill" if f"{index}.{LENGTHS}" in npz.names else "decode" for index in passes}
        writer.metadata["phase"] = " and ".join(sorted(phases, reverse=True))
        num_sequences = 0
        for index in passes:
            sequence_T, position_T, lengths = _sglang_tokens(npz, index)
            ids_LTN = npz.array(f"{index}.{IDS}", (len(logical_LP), len(position_T), None))
            where = npz.where(f"{index}.{IDS}")
            tokens = num_sequences + sequence_T, position_T
            known_T = _add(ids_LTN.transpose(1, 0, 2), *tokens, where, writer, options, logical_LP)
            if (stray_T := known_T & (sequence_T == lengths)).any():
                raise UserError(f"{where}: token {stray_T.argmax()}: expected -1 beyond {LENGTHS}, got experts")
            num_sequences += lengths
    writer.notes.append("a sequence is a prompt or a chunk of one" if "prefill" in phases else "a token is a sequence")
    if writer.left_out:
        writer.notes.append("tokens that only fill up a batch left out")
    _check_padding(source, writer)


def _sglang_tokens(npz: Npz, index: int) -> tuple[NDArray[np.int64], NDArray[np.integer], int]:
    """Of one pass: the sequence and the position of each token, and how many sequences there are."""
    position_T = npz.array(f"{index}.{POSITIONS}", (None,))
    name = f"{index}.{LENGTHS}"
    if name not in npz.names:
        return np.arange(len(position_T)), position_T, len(position_T)
    lengths = npz.array(name, (None,))
    if (lengths < 0).any() or lengths.sum() > len(position_T):
        raise UserError(f"{npz.where(name)}: expected lengths of {len(position_T)} tokens in all, got {brief(lengths)}")
    # What is beyond the last sequence fills up the batch; it has no experts.
    padding = len(position_T) - int(lengths.sum())
    return np.repeat(np.arange(len(lengths) + 1), [*lengths, padding]), position_T, len(lengths)


def _sglang_completions(source: Path, options: ImportOptions, writer: TraceWriter) -> Iterator[Completion]:
    if options.num_layers is None or options.top_k is None or options.num_experts is None:
        raise UserError(f"preset: needed, because {source.name} holds flat arrays and no number of layers and top-k")
    shape = options.num_layers, options.top_k
    sequences = itertools.count()
    for line, response in _responses(source, writer):
        listed, before = response if isinstance(response, list) else [response], b""
        for told in itertools.chain.from_iterable(map(_told, listed)):
            where = f"{line}: {ROUTED}"
            content = from_base64(told.get(ROUTED), where, options.max_bytes)
            row_bytes = 4 * shape[0] * shape[1]
            if not content or len(content) % row_bytes:
                expected = f"rows of {shape[0]} layers x top-{shape[1]} as int32 ({row_bytes} bytes)"
                raise UserError(f"{where}: expected {expected}, got {len(content)} bytes")
            ids_TLK = np.frombuffer(content, dtype="<i4").reshape(-1, *shape)
            num_prompt, num_cached = (_count(told.get(name)) for name in ("prompt_tokens", "cached_tokens"))
            prompt = content[: row_bytes * max(0, (num_prompt or 0) - options.prompt_start)]
            is_again = bool(prompt) and prompt == before  # of n completions of a prompt
            start, before = options.prompt_start, prompt
            yield Completion(where, next(sequences), ids_TLK, start, num_prompt, num_cached or 0, is_again)


def _told(response: Any) -> Iterator[dict[str, Any]]:
    """What a response says of each of its completions, in SGLang's own form or OpenAI's."""
    fields = response if isinstance(response, dict) else {}
    for choice in fields.get("choices") or [fields]:
        said = choice if isinstance(choice, dict) else {}
        told = next((said[key] for key in ("meta_info", "sglext", "sgl_ext") if said.get(key)), {})
        yield told if isinstance(told, dict) else {}


def _count(value: Any) -> int | None:
    """A number of tokens; None where there is none."""
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


def _responses(path: Path, writer: TraceWriter) -> Iterator[tuple[str, Any]]:
    """Yield a file's responses, each with its place; the writer's notes name lines that hold none."""
    problems: list[str] = []
    yield from responses(path, problems)
    if problems:
        writer.notes.append(f"{len(problems):,} lines without a response left out, the first {problems[0]}")


# ---- vLLM ------------------------------------------------------------------------------------------------------------

PROMPT = f"prompt_{ROUTED}"


def read_vllm(source: Path, options: ImportOptions, writer: TraceWriter) -> None:
    """Import vLLM's returned routed experts; with ``phase`` prefill or decode, prompts or what was generated alone.

    vLLM (``enable_return_routed_experts``) returns ``routed_experts`` [tokens, layers, K] with every completion: of its
    prompt and of what was generated but its last token. Releases about 0.21 put the prompt's into
    ``prompt_routed_experts`` of the request. From the server, one response a line; there each is a list, or the base64
    text of an array in npy form, and ``prompt_token_ids`` (a request's ``return_token_ids``) or, of one prompt alone,
    ``usage.prompt_tokens`` says how long the prompt is. From Python they are arrays:

        numpy.savez("routing.npz", **{f"{i}.{name}": value for i, output in enumerate(outputs) for name, value in
            (("routed_experts", output.outputs[0].routed_experts), ("prompt_length", len(output.prompt_token_ids)),
             ("num_cached_tokens", output.num_cached_tokens)) if value is not None})

    Ids are uint8 for up to 256 experts. Tokens whose routing was not recorded are -1 (255) and are left out; layers
    that route nothing are all 0 in older releases, and are left out.
    """
    if options.phase == "training":
        raise UserError("phase: expected prefill, decode, or prefill and decode; got 'training'")
    writer.metadata["phase"] = options.phase or BOTH_PHASES
    read = _vllm_npz if source.suffix == ".npz" else _vllm_lines
    _add_completions(read(source, options, writer), options, writer)
    _check_padding(source, writer)


LENGTH, CACHED = "prompt_length", "num_cached_tokens"


def _vllm_npz(path: Path, options: ImportOptions, writer: TraceWriter) -> Iterator[Completion]:
    with opened_npz(path, "numpy.savez, as the importer's docstring has it", options.max_bytes) as npz:
        requests = _numbered(npz.names, (ROUTED, PROMPT, LENGTH, CACHED), path)
        is_apart = any(name.endswith(f".{PROMPT}") for name in npz.names)
        for sequence, request in enumerate(requests):
            arrays = {
                kind: npz.array(f"{request}.{kind}", (None, None, None))
                for kind in (PROMPT, ROUTED)
                if f"{request}.{kind}" in npz.names
            }
            length, cached = (
                int(npz.array(f"{request}.{kind}", ())) if f"{request}.{kind}" in npz.names else None
                for kind in (LENGTH, CACHED)
            )
            first = options.prompt_start
            if is_apart:
                length = len(arrays.get(PROMPT, ()))
                first = 0
            for kind, ids_TLK in arrays.items():
                yield Completion(npz.where(f"{request}.{kind}"), sequence, ids_TLK, first, length, cached or 0)
                first += len(ids_TLK)


def _vllm_lines(path: Path, options: ImportOptions, writer: TraceWriter) -> Iterator[Completion]:
    sequences = itertools.count()
    for where, response in _responses(path, writer):
        choices = response.get("choices") if isinstance(response, dict) else None
        if not isinstance(choices, list) or not choices or not all(isinstance(choice, dict) for choice in choices):
            raise UserError(f"{where}: choices: expected a list of completions, got {brief(choices)}")
        numbers = [next(sequences) for _ in choices]
        if PROMPT in response:  # of releases about 0.21: the prompt's apart, once
            length = 0
            if response[PROMPT] is not None:
                prompt_TLK = _vllm_ids(response[PROMPT], f"{where}: {PROMPT}", options.max_bytes)
                length = len(prompt_TLK)
                yield Completion(f"{where}: {PROMPT}", numbers[0], prompt_TLK, 0, length)
        else:
            length = None
        usage = response.get("usage") if len(choices) == 1 and isinstance(response.get("usage"), dict) else {}
        details = usage.get("prompt_tokens_details")
        cached = _count(details.get("cached_tokens")) if isinstance(details, dict) else None
        before: Any = None
        for index, (choice, number) in enumerate(zip(choices, numbers, strict=True)):
            place = f"{where}: choices: {index}: {ROUTED}"
            if choice.get(ROUTED) is None:
                raise UserError(f"{place}: expected lists of experts, got none")
            ids_TLK = _vllm_ids(choice[ROUTED], place, options.max_bytes)
            if length is not None:
                yield Completion(place, number, ids_TLK, length, length)
                continue
            prompt = choice.get("prompt_token_ids") or response.get("prompt_token_ids")
            of_prompt = len(prompt) if isinstance(prompt, list) else _count(usage.get("prompt_tokens"))
            repeats = isinstance(prompt, list) and prompt == before
            yield Completion(place, number, ids_TLK, options.prompt_start, of_prompt, cached or 0, repeats)
            before = prompt


def _vllm_ids(value: Any, where: str, max_bytes: int) -> NDArray[np.integer]:
    """Expert ids [T, L, K] of lists, or of base64 text of an npy file."""
    if isinstance(value, str):
        content = io.BytesIO(from_base64(value, where, max_bytes))
        try:
            value = np.load(content, allow_pickle=False)
        except Exception as error:  # numpy's parser of headers raises whatever it meets
            words = brief(str(error), 100, quoted=False)
            raise UserError(f"{where}: expected an npy array in base64 ({words})") from None
        if not isinstance(value, np.ndarray):
            raise UserError(f"{where}: expected an npy array in base64 (an archive)")
    return checked(value, where, (None, None, None))
