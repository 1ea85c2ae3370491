"""SGLang's expert distribution recorder, mode ``per_token``, converted to npz; or its returned routed experts.

The second (``--enable-return-routed-experts``, and ``return_routed_experts`` in a request) are responses, one a
line of a .jsonl file, each with ``routed_experts`` in its ``meta_info`` (or ``sglext``): base64 of int32 [tokens,
layers, K], all layers of the model, of the prompt and of what was generated but its last token. Only a preset says
how many layers.

SGLang dumps with ``torch.save``, which is a pickle, and nothing is unpickled here. Where SGLang
runs, and trusts its own file, ``CONVERT`` below, typed there, converts it.

A dump has, for every forward pass of one rank, ``topk_ids_of_layer`` [layers, tokens, 8] (-1: no
such token, no such layer, or a model with fewer than 8), ``positions`` and, of prefill passes,
``extend_seq_lens``; and once ``last_physical_to_logical_map`` [layers, physical experts]. Ids are
physical: replicas of an expert have ids of their own, which the map undoes (if experts were
rebalanced while SGLang recorded, the last map is wrong for the passes before). Scores are not in it.

A prefill pass holds as many sequences as ``extend_seq_lens`` says. Requests are not named, so the pieces of a
prompt that was prefilled in chunks, and the tokens of a decode pass, each stand alone. Modes
``stat``, ``stat_approx`` and ``per_pass`` count tokens per expert; counts are not routing.
"""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from moe_ep_bench.errors import UserError, brief
from moe_ep_bench.files import parse_json
from moe_ep_bench.workload.importers.sources import ImportOptions, Npz, from_base64, lines, opened_npz, routing_layers
from moe_ep_bench.workload.importers.writer import TraceWriter

CONVERT = (
    "python -c \"import sys, numpy, torch; d = torch.load(sys.argv[1], map_location='cpu', weights_only=True); "
    "numpy.savez(sys.argv[2], last_physical_to_logical_map=d['last_physical_to_logical_map'], "
    "**{f'{i}.{k}': r[k] for i, r in enumerate(d['records']) "
    "for k in ('topk_ids_of_layer', 'positions', 'extend_seq_lens') if r.get(k) is not None})\" dump.pt dump.npz"
)

MAP = "last_physical_to_logical_map"
IDS, POSITIONS, LENGTHS = "topk_ids_of_layer", "positions", "extend_seq_lens"
ROUTED = "routed_experts"
COUNTS = re.compile(r"(\d+\.)?(logical_count|global_physical_count)")


def read(source: Path, options: ImportOptions, writer: TraceWriter) -> None:
    """Import one rank's dump.

    Args:
        source: the npz file.
    """
    if source.suffix == ".pt":
        raise UserError(f"{source}: a pickle, which is not read; convert it where SGLang runs: {CONVERT}")
    if source.suffix in (".jsonl", ".json"):
        return _read_responses(source, options, writer)
    with opened_npz(source) as npz:
        passes = _passes(npz)
        logical = _map(npz)
        num_experts = options.num_experts or int(logical.max()) + 1
        if logical.max() >= num_experts:
            raise UserError(f"{npz.where(MAP)}: expected experts 0 to {num_experts - 1}, got {logical.max()}")
        phases = {"prefill" if f"{index}.{LENGTHS}" in npz.names else "decode" for index in passes}
        top_k = sequence = 0
        for index in passes:
            name = f"{index}.{IDS}"
            sequence_T, position_T, num_sequences = _tokens(npz, index)
            ids_LTK = npz.array(name, 3)
            if ids_LTK.shape[:2] != (len(logical), len(position_T)) or not ids_LTK.shape[2]:
                raise UserError(
                    f"{npz.where(name)}: expected {len(logical)} layers of {len(position_T)} tokens, "
                    f"got shape {ids_LTK.shape}"
                )
            chosen_LTK = ids_LTK >= 0
            layers = np.flatnonzero(chosen_LTK.any(axis=(1, 2))).tolist()
            if not layers:
                writer.left_out += len(position_T)
                sequence += num_sequences
                continue
            where = f"{npz.where(name)}: layer {layers[0]}"
            if not top_k:
                top_k = int(chosen_LTK[layers[0]].sum(axis=1).max())
                options.check_top_k(top_k, where)
                phase = " and ".join(sorted(phases, reverse=True))
                writer.describe(num_experts=num_experts, top_k=top_k, where=where, phase=phase)
            valid_T = chosen_LTK[layers[0]].any(axis=1)
            stray_T = valid_T & (sequence_T == num_sequences)
            if stray_T.any():
                token = int(stray_T.argmax())
                raise UserError(f"{where}: token {token}: expected -1 beyond {LENGTHS}, got experts")
            writer.add_tokens(sequence + sequence_T[valid_T], position_T[valid_T], where)
            writer.left_out += int((~valid_T).sum())
            expected_TK = valid_T[:, None] & (np.arange(ids_LTK.shape[2]) < top_k)
            for layer in layers:
                where = f"{npz.where(name)}: layer {layer}"
                wrong_T = (chosen_LTK[layer] != expected_TK).any(axis=1)
                if wrong_T.any():
                    token = int(wrong_T.argmax())
                    expected = f"{top_k} experts and then -1" if valid_T[token] else "-1 as in the first layer"
                    got = ids_LTK[layer, token].tolist()
                    raise UserError(f"{where}: token {token}: expected {expected}, got {got}")
                physical_TK = ids_LTK[layer, valid_T, :top_k]
                if physical_TK.max() >= logical.shape[1]:
                    raise UserError(
                        f"{where}: expected physical experts 0 to {logical.shape[1] - 1}, got {physical_TK.max()}"
                    )
                writer.add(layer, logical[layer][physical_TK], None, where, np.flatnonzero(valid_T))
            sequence += num_sequences
    writer.notes.append("a sequence is a prompt or a chunk of one" if "prefill" in phases else "a token is a sequence")
    if writer.left_out:
        writer.notes.append("tokens that only fill up a batch left out")


def _read_responses(source: Path, options: ImportOptions, writer: TraceWriter) -> None:
    if options.num_layers is None or options.top_k is None or options.num_experts is None:
        raise UserError(f"preset: needed, because {source.name} holds flat arrays and no number of layers and top-k")
    shape = (options.num_layers, options.top_k)
    phase = "prefill and decode"
    writer.describe(num_experts=options.num_experts, top_k=shape[1], where=str(source), phase=phase)
    routed: list[int] | None = None
    sequence = 0
    for where, line in lines(source):
        response = parse_json(line, where)
        for number, one in enumerate(response if isinstance(response, list) else [response]):
            place = f"{where}: {number}" if isinstance(response, list) else where
            routed = _add_response(one, place, shape, sequence, routed, writer)
            sequence += 1
    if routed is not None and len(routed) < shape[0]:
        writer.notes.append(f"{shape[0] - len(routed)} layers that route nothing left out")


def _add_response(
    response: object, where: str, shape: tuple[int, int], sequence: int, routed: list[int] | None, writer: TraceWriter
) -> list[int]:
    """Add one response; return the layers that route, which the first response tells."""
    inner = response if isinstance(response, dict) else {}
    told = inner.get("meta_info") or inner.get("sglext")
    text = told.get(ROUTED) if isinstance(told, dict) else None
    if not isinstance(text, str):
        raise UserError(f"{where}: meta_info: {ROUTED}: expected base64 text, got {brief(text)}")
    content = from_base64(text, f"{where}: {ROUTED}")
    row_bytes = 4 * shape[0] * shape[1]
    if not content or len(content) % row_bytes:
        raise UserError(
            f"{where}: {ROUTED}: expected rows of {shape[0]} layers x top-{shape[1]} as int32 ({row_bytes} bytes), got "
            f"{len(content)} bytes"
        )
    ids_TLK = np.frombuffer(content, dtype="<i4").reshape(-1, *shape)
    if routed is None:
        routed = routing_layers(ids_TLK)
    position_T = np.arange(len(ids_TLK))
    writer.add_tokens(sequence, position_T, where)
    for layer in routed:
        writer.add(layer, ids_TLK[:, layer], None, f"{where}: layer {layer}", position_T)
    return routed


def _passes(npz: Npz) -> list[int]:
    form = re.compile(rf"(\d{{1,9}})\.({IDS}|{POSITIONS}|{LENGTHS})")
    indices = set()
    for name in npz.names:
        match = form.fullmatch(name)
        if match:
            indices.add(int(match[1]))
        elif COUNTS.fullmatch(name):
            raise UserError(
                f"{npz.where(name)}: counts of tokens per expert, not who chose whom; record anew with "
                "--expert-distribution-recorder-mode per_token"
            )
        elif name != MAP:
            raise UserError(f"{npz.path}: expected {MAP} and <pass>.{IDS}, {POSITIONS}, {LENGTHS}; got {brief(name)}")
    if not indices:
        raise UserError(f"{npz.path}: expected at least one pass (0.{IDS}), got none")
    return sorted(indices)


def _map(npz: Npz) -> NDArray[np.integer]:
    """Logical experts by layer and physical expert."""
    logical = npz.array(MAP, 2)
    if not 0 < logical.shape[1] <= 2**16 or not len(logical):
        raise UserError(f"{npz.where(MAP)}: expected layers of 1 to {2**16} experts, got shape {logical.shape}")
    if logical.min() < 0:
        raise UserError(f"{npz.where(MAP)}: expected experts from 0, got {logical.min()}")
    return logical


def _tokens(npz: Npz, index: int) -> tuple[NDArray[np.int64], NDArray[np.integer], int]:
    """Of one pass: the sequence and the position of each token, and how many sequences there are."""
    position_T = npz.array(f"{index}.{POSITIONS}", 1)
    name = f"{index}.{LENGTHS}"
    if name not in npz.names:
        return np.arange(len(position_T)), position_T, len(position_T)
    lengths = npz.array(name, 1)
    if (lengths < 0).any() or lengths.sum() > len(position_T):
        raise UserError(f"{npz.where(name)}: expected lengths of {len(position_T)} tokens in all, got {brief(lengths)}")
    # What is beyond the last sequence fills up the batch; it has no experts.
    padding = len(position_T) - int(lengths.sum())
    return np.repeat(np.arange(len(lengths) + 1), [*lengths, padding]), position_T, len(lengths)
