"""Megatron-Core's router tracer: ``router_trace_rank<rank>.jsonl`` and its logits sidecar.

Megatron-Core 0.19 writes it with ``--moe-routing-trace-path`` (``moe/router_trace.py`` there; 0.16.1
has no tracer). One JSON object per forward pass and MoE layer of one rank:

    {"step": 0, "stage": "pre_dispatch", "block": "decoder", "layer": 3, "rank": 0,
     "num_tokens": 128, "topk": 8, "top_indices": [[ids], ...]}

Ids come in ascending order of experts, not of scores. Scores are there only with
``--moe-routing-trace-capture-logits``: the record then has ``logit_offset``, ``logit_bytes`` and
``logit_shape`` [tokens, experts] into ``logits_rank<rank>.bin`` beside it, bfloat16, before any
score function. From these each token's shares of the whole score mass are made; a bias or groups in the
selection may have chosen others than the largest, which the trace's note counts.

What the tracer does not say, and what follows:

* Texts. A forward pass is taken as one sequence; as ``micro_batch_size`` of them where these are
  interleaved ([sequence place, batch] flattened); in ``phase`` decode every token stands alone.
* Which tokens and layers a rank has. Ranks of one tensor-parallel group see the same tokens, and pipeline stages
  number their own layers, so one import takes one rank's file.
* Activation recomputation calls routers twice; such passes are in the file twice and cannot be told apart.

Multi-token-prediction heads (``block`` mtp) are passed over.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.special import expit, softmax

from moe_ep_bench.errors import UserError, brief
from moe_ep_bench.files import parse_json
from moe_ep_bench.workload.importers.sources import ImportOptions, integers, lines, whole
from moe_ep_bench.workload.importers.writer import TraceWriter

FILE = re.compile(r"router_trace_rank(\d+)\.jsonl")
ROWS_AT_ONCE = 4096


class Record(NamedTuple):
    """One line: what a router did in one forward pass."""

    where: str
    step: int
    layer: int
    ids_TK: NDArray[np.int64]
    logits: tuple[int, int] | None
    """Offset into the sidecar, and number of experts."""


def read(source: Path, options: ImportOptions, writer: TraceWriter) -> None:
    """Import one rank.

    Args:
        source: the JSONL file, or a directory with one.
    """
    path = _file(source)
    sidecar = path.with_name(path.name.replace("router_trace", "logits").replace(".jsonl", ".bin"))
    writer.sources = [path]

    layers: set[int] = set()
    step, passes = None, {}  # tokens of each pass of the step, by layer
    num_mtp = num_other = sequence = 0
    first: Record | None = None
    for record in _records(path):
        if record is None:
            num_mtp += 1
            continue
        num_tokens, top_k = record.ids_TK.shape
        if first is None:
            first = record
            writer.sources += [sidecar] if record.logits else []
            _describe(record, options, writer)
        elif top_k != writer.top_k or (record.logits is None) != (first.logits is None):
            expected = f"topk {writer.top_k} {'with' if first.logits else 'without'} logits"
            raise UserError(f"{record.where}: expected {expected}, as in the first record")
        if record.step != step:
            layers = _check_step(path, step, passes, layers)
            step, passes = record.step, {}
        passes.setdefault(record.layer, []).append(num_tokens)
        if num_tokens % options.micro_batch_size:
            raise UserError(
                f"{record.where}: num_tokens: expected a multiple of micro_batch_size ({options.micro_batch_size}), "
                f"got {num_tokens}"
            )
        # Interleaved sequences come one after the other.
        order_T = np.arange(num_tokens).reshape(-1, options.micro_batch_size).T.ravel()
        if record.layer == first.layer:
            place_T, sequence_T = np.divmod(order_T, options.micro_batch_size)
            if options.phase == "decode":
                place_T, sequence_T = np.zeros_like(order_T), np.arange(num_tokens)
            writer.add_tokens(sequence + sequence_T, place_T, record.where)
            sequence += num_tokens if options.phase == "decode" else options.micro_batch_size
        num_other += _add(record, order_T, sidecar, options.score_function, writer)
    if first is None:
        raise UserError(f"{path}: expected records of block decoder, got none")
    _check_step(path, step, passes, layers)

    is_decode = options.phase == "decode"
    writer.notes.append("a token is a sequence" if is_decode else "a sequence is a forward pass or part of one")
    if num_other:
        writer.notes.append(f"in {num_other} rows of all layers others than the largest logits were chosen")
    if num_mtp:
        writer.notes.append(f"{num_mtp} records of multi-token prediction left out")


def _file(source: Path) -> Path:
    if source.is_file():
        if not FILE.fullmatch(source.name):
            raise UserError(f"{source}: expected router_trace_rank<rank>.jsonl, got another name")
        return source
    found = sorted(path for path in source.iterdir() if FILE.fullmatch(path.name))
    if len(found) != 1:
        names = ", ".join(path.name for path in found) or "none"
        raise UserError(
            f"{source}: expected one router_trace_rank<rank>.jsonl, got {names}: name one file, as ranks may hold the "
            "same tokens or other layers"
        )
    return found[0]


def _records(path: Path) -> Iterator[Record | None]:
    """The file's records; None for one of multi-token prediction."""
    for where, line in lines(path):
        record = parse_json(line, where)
        if not isinstance(record, dict):
            raise UserError(f"{where}: expected an object, got {brief(record)}")
        block, stage = record.get("block"), record.get("stage")
        if block not in ("decoder", "mtp") or stage != "pre_dispatch":
            raise UserError(
                f"{where}: expected block decoder or mtp and stage pre_dispatch, got {brief(block)} and {brief(stage)}"
            )
        if block == "mtp":
            yield None
            continue
        num_tokens, top_k = whole(record, "num_tokens", where, 0), whole(record, "topk", where, 1)
        rows = record.get("top_indices")
        # Without tokens there is no list that would say how long it is.
        ids_TK = integers(rows, f"{where}: top_indices", (num_tokens, top_k) if num_tokens else (0,))
        ids_TK = ids_TK.reshape(num_tokens, top_k)
        logits = _logits(record, num_tokens, where) if "logit_offset" in record else None
        yield Record(where, whole(record, "step", where, 0), whole(record, "layer", where, 0), ids_TK, logits)


def _logits(record: dict[str, Any], num_tokens: int, where: str) -> tuple[int, int]:
    offset, size = whole(record, "logit_offset", where, 0), whole(record, "logit_bytes", where, 0)
    shape = integers(record.get("logit_shape"), f"{where}: logit_shape", (2,)).tolist()
    if shape[0] != num_tokens or shape[0] * shape[1] * 2 != size:
        raise UserError(f"{where}: logit_shape: expected {num_tokens} tokens in {size} bytes of bfloat16, got {shape}")
    return offset, shape[1]


def _describe(record: Record, options: ImportOptions, writer: TraceWriter) -> None:
    """Describe the trace by its first record."""
    top_k = record.ids_TK.shape[1]
    options.check_top_k(top_k, record.where)
    if record.logits is None:
        score = options.accept_no_scores(record.where, "record with --moe-routing-trace-capture-logits, or ")
        num_experts = int(options.need("num_experts", "the trace has no logits to tell it by"))
    else:
        function = options.need("score_function", "the trace has logits before the score function")
        num_experts = record.logits[1]
        if options.num_experts not in (None, num_experts):
            raise UserError(f"{record.where}: num_experts: expected {options.num_experts}, got {num_experts} logits")
        score = "softmax" if function == "softmax" else "sigmoid, divided by the sum over all experts"
        score += ", not renormalised, from bfloat16 logits"
    writer.describe(num_experts=num_experts, top_k=top_k, where=record.where, score=score)


def _check_step(path: Path, step: int | None, passes: dict[int, list[int]], layers: set[int]) -> set[int]:
    """Every layer must have seen the same passes in a step, and every step the same layers; return these."""
    if step is None:
        return layers
    layers = layers or set(passes)
    if set(passes) != layers:
        odd = min(set(passes) ^ layers)
        raise UserError(
            f"{path}: step {step}: layer {odd}: expected the layers of the first step, "
            f"got {'one more' if odd in passes else 'one less'} (cut the file after its last whole step)"
        )
    least = min(passes)
    for layer, num_tokens in passes.items():
        if num_tokens != passes[least]:
            raise UserError(
                f"{path}: step {step}: layer {layer}: expected passes of {brief(passes[least])} tokens like layer "
                f"{least}, got {brief(num_tokens)}"
            )
    return layers


def _add(record: Record, order_T: NDArray[np.int64], sidecar: Path, function: str | None, writer: TraceWriter) -> int:
    """Add a layer's pass; return in how many rows an expert was chosen before one with a larger logit."""
    num_other = 0
    for first in range(0, len(order_T), ROWS_AT_ONCE):
        rows = order_T[first : first + ROWS_AT_ONCE]
        ids_TK, scores_TK = record.ids_TK[rows], None
        where = f"{record.where}: layer {record.layer}"
        if record.logits is not None:
            outside_TK = (ids_TK < 0) | (ids_TK >= writer.num_experts)
            if outside_TK.any():
                raise UserError(
                    f"{where}: expert_ids: expected 0 to {writer.num_experts - 1}, got {ids_TK[outside_TK][0]}"
                )
            logits_TE = _read_logits(record, rows, sidecar, writer.num_experts)
            scores_TE = _scores(logits_TE, function)
            scores_TK = np.take_along_axis(scores_TE, ids_TK, axis=1)
            others_TE = logits_TE.copy()
            np.put_along_axis(others_TE, ids_TK, -np.inf, axis=1)
            chosen_TK = np.take_along_axis(logits_TE, ids_TK, axis=1)
            num_other += int((others_TE.max(axis=1) > chosen_TK.min(axis=1)).sum())
        writer.add(record.layer, ids_TK, scores_TK, where, rows)
    return num_other


def _read_logits(record: Record, rows: NDArray[np.int64], sidecar: Path, num_experts: int) -> NDArray[np.float64]:
    """Logits of some tokens of a record: [T, E]."""
    assert record.logits is not None
    offset, recorded_experts = record.logits
    if recorded_experts != num_experts:
        raise UserError(f"{record.where}: logit_shape: expected {num_experts} experts, got {recorded_experts}")
    end = offset + len(record.ids_TK) * num_experts * 2
    if not sidecar.is_file() or sidecar.stat().st_size < end:
        size = sidecar.stat().st_size if sidecar.is_file() else "no such file"
        raise UserError(f"{record.where}: {sidecar.name}: expected at least {end} bytes, got {size}")
    stored = np.memmap(sidecar, np.dtype("<u2"), "r", offset, (len(record.ids_TK), num_experts))
    logits_TE = (stored[rows].astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    if not np.isfinite(logits_TE).all():
        token = int((~np.isfinite(logits_TE)).any(axis=1).argmax())
        raise UserError(f"{record.where}: {sidecar.name}: token {rows[token]}: expected finite logits, got others")
    return logits_TE


def _scores(logits_TE: NDArray[np.float64], function: str | None) -> NDArray[np.float64]:
    """Shares of a token's whole score mass."""
    if function == "softmax":
        return softmax(logits_TE, axis=1)
    scores_TE = expit(logits_TE)
    return scores_TE / scores_TE.sum(axis=1, keepdims=True)
