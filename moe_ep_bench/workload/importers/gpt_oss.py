"""AmanPriyanshu/GPT-OSS-MoE-ExpertFingerprinting, ``data/<dataset>/<category>/*_examples.json`` (Apache-2.0).

What GPT-OSS-20B's router chose while it answered benchmark questions, greedily, one request at a
time. One JSON document per answer:

    {"router_data": [{"token_<place>": {"layer_<n>": {"selected_experts": [4 ids],
                                                      "selected_probs": [4 numbers]}, ...}}, ...], ...}

The places begin after the prompt: only generated tokens are there. The numbers are a softmax over
the four in bfloat16, so the share of all score mass that the four had is not known. Beside each
document stands an aggregate (without ``_examples``) that names no tokens and is not read.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moe_ep_bench.errors import UserError, brief
from moe_ep_bench.workload.importers.options import ImportOptions
from moe_ep_bench.workload.importers.sources import integers, read_json, reals
from moe_ep_bench.workload.importers.writer import TraceWriter

TOKEN = re.compile(r"token_(\d{1,9})", re.ASCII)
NUM_EXPERTS, TOP_K = 32, 4
LAYERS = tuple(f"layer_{number}" for number in range(24))


def read(source: Path, options: ImportOptions, writer: TraceWriter) -> None:
    """Import all answers or, with ``domain``, those of ``<dataset>`` or ``<dataset>/<category>``.

    Args:
        source: the checkout, or its ``data``.
    """
    root = source / "data" if (source / "data").is_dir() else source
    documents = sorted(root.rglob("*_examples.json"))
    if options.domain is not None:
        chosen = [path for path in documents if _is_in(path.relative_to(root).parent, options.domain)]
        if documents and not chosen:
            known = sorted({path.relative_to(root).parts[0] for path in documents})
            raise UserError(f"{source}: domain: expected one of {', '.join(known)}; got {options.domain!r}")
        documents = chosen
    if not documents:
        raise UserError(f"{source}: expected data/<dataset>/<category>/*_examples.json, got none")
    writer.describe(
        num_experts=NUM_EXPERTS,
        top_k=TOP_K,
        where=str(source),
        model="gpt-oss-20b",
        score="softmax over the top-k",
        phase="decode",
        domain=options.domain or "mixed",
        licence="Apache-2.0",
    )
    num_empty = 0
    for sequence, path in enumerate(documents):
        tokens = _tokens(read_json(path), path)
        writer.sources.append(path)
        num_empty += not tokens
        place_T = np.array([place for place, _ in tokens], dtype=np.int64)
        back_T = np.diff(place_T) <= 0
        if back_T.any():
            raise UserError(f"{path}: token_{place_T[1:][back_T][0]}: expected places in ascending order, got others")
        writer.add_tokens(sequence, place_T, str(path))
        for number, layer in enumerate(LAYERS if tokens else ()):
            ids_TK = _stack(tokens, layer, "selected_experts", path, integers)
            probs_TK = _stack(tokens, layer, "selected_probs", path, reals)
            writer.add(number, ids_TK, probs_TK, f"{path}: {layer}", place_T)
    if num_empty:
        writer.notes.append(f"{num_empty} answers without recorded tokens")


def _is_in(parent: Path, domain: str) -> bool:
    return parent.parts[: len(Path(domain).parts)] == Path(domain).parts


def _tokens(document: Any, path: Path) -> list[tuple[int, dict[str, Any]]]:
    """Places of an answer's tokens, and what was chosen for each: a dict with all layers."""
    entries = document.get("router_data") if isinstance(document, dict) else None
    if not isinstance(entries, list):
        raise UserError(f"{path}: router_data: expected a list of tokens, got {brief(entries)}")
    tokens = []
    for index, entry in enumerate(entries):
        name, chosen = next(iter(entry.items())) if isinstance(entry, dict) and len(entry) == 1 else ("", None)
        match = TOKEN.fullmatch(name)
        if not (match and isinstance(chosen, dict)):
            raise UserError(f"{path}: router_data: entry {index}: expected one token_<place>, got {brief(entry)}")
        if chosen.keys() != set(LAYERS):
            names = brief(sorted(chosen.keys() ^ set(LAYERS)))
            raise UserError(f"{path}: {name}: expected {LAYERS[0]} to {LAYERS[-1]}, got one too many or few: {names}")
        tokens.append((int(match[1]), chosen))
    return tokens


def _stack(
    tokens: list[tuple[int, dict[str, Any]]], layer: str, name: str, path: Path, parse: Callable[..., NDArray[Any]]
) -> NDArray[Any]:
    """One layer's choices of all tokens: [T, K]."""
    rows = [chosen[layer].get(name) if isinstance(chosen[layer], dict) else None for _, chosen in tokens]
    for (place, _), row in zip(tokens, rows, strict=True):
        if not isinstance(row, list) or len(row) != TOP_K:
            raise UserError(f"{path}: token_{place}: {layer}: {name}: expected {TOP_K} numbers, got {brief(row)}")
    return parse(rows, f"{path}: {layer}: {name}", (None, TOP_K))
