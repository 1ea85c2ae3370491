"""Recordings that others published: ESFT's and FLAME-MoE's.

**deepseek-ai/ESFT**, ``results/expert_scores/<domain>/expert_weights_<layer>.txt`` (MIT). What the vanilla
DeepSeek-V2-Lite router chose for samples of four training sets (intent, law, summary, translation). One file per MoE
layer, one line per text:

    id TAB id ... TAB TAB weight TAB weight ...

with 6 ids and 6 weights per token, tokens in the order of the text, the six in no order. Weights are the softmax over
all 64 experts, rounded to four decimals, not renormalised. A text's first token begins every text alike and is left
out, as it would be counted once per text: it is routed the same each time, unlike all others.

**cmu-flame/FLAME-MoE** (scripts/empirical_analysis), converted to npz. A capture has a file per forward pass and layer,
``actives/<checkpoint step>/<layer>/<pass>.pt``: of newer ones the pair (probabilities, expert ids), both [tokens, K];
of older ones the router's probabilities [tokens, E], 0 outside of the top-k. They are pickles, and nothing is unpickled
here: ``FLAME_CONVERT``, typed where they are trusted, makes arrays ``<pass>.<layer>.ids`` and ``.probs`` of one
checkpoint step, passes numbered in the order of their names. The models route by a softmax over all experts that is not
renormalised (``--moe-router-pre-softmax``), so that probabilities are shares of a token's whole mass. What tokens are
of one text is not captured: a pass is a sequence.
"""

from __future__ import annotations

import re
from itertools import zip_longest
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from moe_ep_bench.errors import UserError, brief
from moe_ep_bench.workload.importers.sources import ImportOptions, lines, opened_npz
from moe_ep_bench.workload.importers.writer import TraceWriter

# ---- ESFT ------------------------------------------------------------------------------------------------------------

# scripts/get_expert_scores.py of the repository names the first two; the model's first of 27 layers is dense.
ESFT_EXPERTS, ESFT_TOP_K = 64, 6
ESFT_LAYERS = range(1, 27)


def read_esft(source: Path, options: ImportOptions, writer: TraceWriter) -> None:
    """Import one domain or, without ``domain``, all one after the other.

    Args:
        source: the checkout, its ``results/expert_scores``, or the directory of one domain.
    """
    domains = _domains(source, options.domain)
    writer.describe(
        num_experts=ESFT_EXPERTS,
        top_k=ESFT_TOP_K,
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
        for layer in ESFT_LAYERS:
            path = directory / f"expert_weights_{layer}.txt"
            if not path.is_file():
                raise UserError(f"{path}: no such file, but expected layers {ESFT_LAYERS[0]} to {ESFT_LAYERS[-1]}")
            _read_esft_layer(path, layer, lengths, writer)
            writer.sources.append(path)
        for sequence, length in enumerate(lengths, first_sequence):
            writer.add_tokens(sequence, np.arange(1, length), str(directory))
        writer.left_out += len(lengths)
        first_sequence += len(lengths)


def _read_esft_layer(path: Path, layer: int, lengths: list[int], writer: TraceWriter) -> None:
    """Read one layer; the first one's lengths of texts are what all others must have."""
    is_first = layer == ESFT_LAYERS[0]
    for sequence, (length, line) in enumerate(zip_longest([] if is_first else lengths, lines(path))):
        if line is None:
            raise UserError(f"{path}: expected {len(lengths)} texts, as many as the first layer has, got {sequence}")
        where, text = line
        ids_TK, weights_TK = _parse_esft(text, where)
        if is_first:
            lengths.append(len(ids_TK))
        elif length != len(ids_TK):
            expected = "no such line" if length is None else f"{length} tokens"
            raise UserError(f"{where}: expected {expected}, as the first layer has, got {len(ids_TK)} tokens")
        if len(ids_TK) > 1:
            writer.add(layer, ids_TK[1:], weights_TK[1:], where, np.arange(1, len(ids_TK)))


def _parse_esft(text: bytes, where: str) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    halves = text.split(b"\t\t")
    if len(halves) != 2:
        raise UserError(f"{where}: expected ids, two tabs, weights; got {len(halves)} part(s)")
    ids = _numbers(halves[0], np.int64, where, "expert ids")
    weights = _numbers(halves[1], np.float64, where, "weights")
    if ids.size != weights.size or ids.size % ESFT_TOP_K:
        raise UserError(f"{where}: expected {ESFT_TOP_K} ids and weights per token, got {ids.size} and {weights.size}")
    return ids.reshape(-1, ESFT_TOP_K), weights.reshape(-1, ESFT_TOP_K)


def _numbers(text: bytes, dtype: type[np.generic], where: str, what: str) -> NDArray[np.generic]:
    try:
        return np.array(text.split(b"\t")).astype(dtype)
    except (ValueError, OverflowError) as error:
        raise UserError(f"{where}: expected {what} between tabs ({brief(str(error))})") from None


def _domains(source: Path, domain: str | None) -> dict[str, Path]:
    """Directories by domain."""
    root = source / "results" / "expert_scores"
    root = root if root.is_dir() else source
    name = f"expert_weights_{ESFT_LAYERS[0]}.txt"
    is_one = (root / name).is_file()
    found = [root] if is_one else sorted(path.parent for path in root.glob(f"*/{name}"))
    if not found:
        raise UserError(f"{source}: expected results/expert_scores/<domain>/{name}, got none")
    domains = {path.resolve().name: path for path in found}
    if domain not in (None, *domains):
        raise UserError(f"{source}: domain: expected one of {', '.join(domains)}; got {domain!r}")
    return domains if domain is None else {domain: domains[domain]}


# ---- FLAME-MoE -------------------------------------------------------------------------------------------------------

FLAME_CONVERT = (
    'python -c "import sys, pathlib, numpy, torch; a = {}; '
    "[a.update({f'{i}.{d.name}.ids': x[1].numpy(), f'{i}.{d.name}.probs': x[0].float().numpy()}) "
    "for d in pathlib.Path(sys.argv[1]).iterdir() for i, f in enumerate(sorted(d.glob('*.pt'))) "
    "for x in [torch.load(f, map_location='cpu', weights_only=True)] "
    "for x in [x if isinstance(x, (tuple, list)) else x.topk(int((x[0] > 0).sum()))]]; "
    'numpy.savez(sys.argv[2], **a)" actives/STEP step.npz'
)
FLAME_FORM = re.compile(r"(\d{1,9})\.(\d{1,9})\.(ids|probs)")


def read_flame_moe(source: Path, options: ImportOptions, writer: TraceWriter) -> None:
    """Import one checkpoint step.

    Args:
        source: the npz file.
    """
    if source.suffix == ".pt":
        raise UserError(
            f"{source}: a pickle, which is not read; convert its folder where you trust it: {FLAME_CONVERT}"
        )
    with opened_npz(source) as npz:
        found: dict[int, set[int]] = {}
        for name in npz.names:
            match = FLAME_FORM.fullmatch(name)
            if not match:
                raise UserError(f"{source}: expected <pass>.<layer>.ids and .probs, got {brief(name)}")
            found.setdefault(int(match[1]), set()).add(int(match[2]))
        top_k = 0
        for sequence, number in enumerate(sorted(found)):
            num_tokens = None
            for layer in sorted(found[number]):
                name = f"{number}.{layer}"
                ids_TK, probs_TK = npz.array(f"{name}.ids", 2), npz.reals(f"{name}.probs")
                where = npz.where(name)
                if probs_TK.shape != ids_TK.shape or num_tokens not in (None, len(ids_TK)) or not ids_TK.size:
                    raise UserError(
                        f"{where}: expected ids and probs of one shape, with tokens, as many in every layer of a pass; "
                        f"got {ids_TK.shape} and {probs_TK.shape}"
                    )
                if not top_k:
                    top_k = ids_TK.shape[1]
                    options.check_top_k(top_k, where)
                    told = {"num_experts": options.num_experts, "top_k": top_k, "where": where}
                    writer.describe(**told, score="softmax, not renormalised")
                if ids_TK.shape[1] != top_k:
                    raise UserError(f"{where}: expected top-{top_k} as before, got {ids_TK.shape[1]}")
                if num_tokens is None:
                    num_tokens = len(ids_TK)
                    writer.add_tokens(sequence, np.arange(num_tokens), where)
                writer.add(layer, ids_TK, probs_TK.astype(np.float64), where, np.arange(num_tokens))
    writer.notes.append("a pass is a sequence: texts were not captured")
