"""deepseek-ai/ESFT, ``results/expert_scores/<domain>/expert_weights_<layer>.txt`` (MIT).

What the vanilla DeepSeek-V2-Lite router chose for samples of four training sets (intent, law,
summary, translation). One file per MoE layer, one line per text:

    id TAB id ... TAB TAB weight TAB weight ...

with 6 ids and 6 weights per token, tokens in the order of the text, the six in no order. Weights
are the softmax over all 64 experts, rounded to four decimals, not renormalised.

A text's first token begins every text alike and is left out, as it would be counted once per
text: it is routed the same each time, unlike all others.
"""

from __future__ import annotations

from itertools import zip_longest
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from moe_ep_bench.errors import UserError, brief
from moe_ep_bench.workload.importers.options import ImportOptions
from moe_ep_bench.workload.importers.sources import lines
from moe_ep_bench.workload.importers.writer import TraceWriter

# scripts/get_expert_scores.py of the repository names the first two; the model's first of 27 layers is dense.
NUM_EXPERTS, TOP_K = 64, 6
LAYERS = range(1, 27)


def read(source: Path, options: ImportOptions, writer: TraceWriter) -> None:
    """Import one domain or, without ``domain``, all one after the other.

    Args:
        source: the checkout, its ``results/expert_scores``, or the directory of one domain.
    """
    domains = _domains(source, options.domain)
    writer.describe(
        num_experts=NUM_EXPERTS,
        top_k=TOP_K,
        where=str(source),
        model="deepseek-v2-lite",
        score="softmax, not renormalised",
        phase="prefill",
        domain="+".join(domains),
        licence="MIT",
    )
    writer.notes.append("first token of each sequence left out")
    first_sequence = 0
    for directory in domains.values():
        lengths: list[int] = []
        for layer in LAYERS:
            path = directory / f"expert_weights_{layer}.txt"
            if not path.is_file():
                raise UserError(f"{path}: no such file, but expected layers {LAYERS[0]} to {LAYERS[-1]}")
            _read_layer(path, layer, lengths, writer)
            writer.sources.append(path)
        for sequence, length in enumerate(lengths, first_sequence):
            writer.add_tokens(sequence, np.arange(1, length), str(directory))
        writer.left_out += len(lengths)
        first_sequence += len(lengths)


def _read_layer(path: Path, layer: int, lengths: list[int], writer: TraceWriter) -> None:
    """Read one layer; the first one's lengths of texts are what all others must have."""
    is_first = layer == LAYERS[0]
    for sequence, (length, line) in enumerate(zip_longest([] if is_first else lengths, lines(path))):
        if line is None:
            raise UserError(f"{path}: expected {len(lengths)} texts, as many as the first layer has, got {sequence}")
        where, text = line
        ids_TK, weights_TK = _parse(text, where)
        if is_first:
            lengths.append(len(ids_TK))
        elif length != len(ids_TK):
            expected = "no such line" if length is None else f"{length} tokens"
            raise UserError(f"{where}: expected {expected}, as the first layer has, got {len(ids_TK)} tokens")
        if len(ids_TK) > 1:
            writer.add(layer, ids_TK[1:], weights_TK[1:], where, np.arange(1, len(ids_TK)))


def _parse(text: bytes, where: str) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    halves = text.split(b"\t\t")
    if len(halves) != 2:
        raise UserError(f"{where}: expected ids, two tabs, weights; got {len(halves)} part(s)")
    ids = _numbers(halves[0], np.int64, where, "expert ids")
    weights = _numbers(halves[1], np.float64, where, "weights")
    if ids.size != weights.size or ids.size % TOP_K:
        raise UserError(f"{where}: expected {TOP_K} ids and weights per token, got {ids.size} and {weights.size}")
    return ids.reshape(-1, TOP_K), weights.reshape(-1, TOP_K)


def _numbers(text: bytes, dtype: type[np.generic], where: str, what: str) -> NDArray[np.generic]:
    try:
        return np.array(text.split(b"\t")).astype(dtype)
    except (ValueError, OverflowError) as error:
        raise UserError(f"{where}: expected {what} between tabs ({brief(str(error))})") from None


def _domains(source: Path, domain: str | None) -> dict[str, Path]:
    """Directories by domain."""
    root = source / "results" / "expert_scores"
    root = root if root.is_dir() else source
    name = f"expert_weights_{LAYERS[0]}.txt"
    is_one = (root / name).is_file()
    found = [root] if is_one else sorted(path.parent for path in root.glob(f"*/{name}"))
    if not found:
        raise UserError(f"{source}: expected results/expert_scores/<domain>/{name}, got none")
    domains = {path.resolve().name: path for path in found}
    if domain not in (None, *domains):
        raise UserError(f"{source}: domain: expected one of {', '.join(domains)}; got {domain!r}")
    return domains if domain is None else {domain: domains[domain]}
