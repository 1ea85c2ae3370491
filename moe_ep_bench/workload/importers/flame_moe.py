"""FLAME-MoE's captured routing (cmu-flame/FLAME-MoE, scripts/empirical_analysis), converted to npz.

A capture has a file per forward pass and layer, ``actives/<checkpoint step>/<layer>/<pass>.pt``: of newer ones the pair
(probabilities, expert ids), both [tokens, K]; of older ones the router's probabilities [tokens, E], 0 outside of the
top-k. They are pickles, and nothing is unpickled here: ``CONVERT`` below, typed where they are trusted, makes arrays
``<pass>.<layer>.ids`` and ``.probs`` of one checkpoint step, passes numbered in the order of their names.

The models route by a softmax over all experts that is not renormalised (``--moe-router-pre-softmax``), so that
probabilities are shares of a token's whole mass. What tokens are of one text is not captured: a pass is a sequence.
"""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np

from moe_ep_bench.errors import UserError, brief
from moe_ep_bench.workload.importers.options import ImportOptions
from moe_ep_bench.workload.importers.sources import opened_npz
from moe_ep_bench.workload.importers.writer import TraceWriter

CONVERT = (
    'python -c "import sys, pathlib, numpy, torch; a = {}; '
    "[a.update({f'{i}.{d.name}.ids': x[1].numpy(), f'{i}.{d.name}.probs': x[0].float().numpy()}) "
    "for d in pathlib.Path(sys.argv[1]).iterdir() for i, f in enumerate(sorted(d.glob('*.pt'))) "
    "for x in [torch.load(f, map_location='cpu', weights_only=True)] "
    "for x in [x if isinstance(x, (tuple, list)) else x.topk(int((x[0] > 0).sum()))]]; "
    'numpy.savez(sys.argv[2], **a)" actives/STEP step.npz'
)
FORM = re.compile(r"(\d{1,9})\.(\d{1,9})\.(ids|probs)")


def read(source: Path, options: ImportOptions, writer: TraceWriter) -> None:
    """Import one checkpoint step.

    Args:
        source: the npz file.
    """
    if source.suffix == ".pt":
        raise UserError(f"{source}: a pickle, which is not read; convert its folder where you trust it: {CONVERT}")
    with opened_npz(source) as npz:
        found: dict[int, set[int]] = {}
        for name in npz.names:
            match = FORM.fullmatch(name)
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
