"""Measure how alike a checkpoint's experts are: what the policy ``sere`` reads (``policies.similarity``).

Every expert of an MoE layer computes every token of a text. The distance of two experts is the Frobenius norm of the
difference of their outputs, over all tokens; their similarity is 1 less its share of the layer's largest distance
(arXiv 2602.07616, by its code JL-Cheng/SERE; there of 400 sequences of 128 tokens). Outputs are not kept: inner
products of all pairs add up from tokens to tokens, in float64, and distances follow from them.

Shapes: T = tokens of a batch, E = experts, D = hidden size, L = MoE layers, N = numbers of an expert's outputs.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from moe_ep_bench.errors import UserError
from moe_ep_bench.files import atomic_path, check_folder
from moe_ep_bench.policies.similarity import FORMAT, TENSOR, open_similarity
from moe_ep_bench.quality.checkpoint import Checkpoint, check_enough, pick_device, token_sequences
from moe_ep_bench.quality.families import MoELayer, find_moe_layers
from moe_ep_bench.quality.recording import RecordOptions
from moe_ep_bench.runtime.progress import progress_bar
from moe_ep_bench.workload.writer import sha256_of

MEASURE = "1 - Frobenius distance of outputs over the layer's largest"
# Numbers of all experts' outputs that are held at a time.
_MOST_NUMBERS = 2**26


def record_similarity(model: Path, text: Path, out: Path, options: RecordOptions) -> str:
    """Write the file ``out`` for the model in the folder ``model``, by its experts' outputs on ``text``.

    Returns:
        What was measured, and how a config uses it.

    Raises:
        ValueError: one line that names the file and what is wrong.
    """
    if out.suffix != ".safetensors":
        raise UserError(f"--similarity {out}: expected a name that ends in .safetensors")
    if out.exists():
        raise UserError(f"--similarity {out}: expected a name that is free, but there is such a file already")
    check_folder(out.parent, "--similarity: folder")
    device = pick_device(options.device)
    checkpoint = Checkpoint.open(model)
    checkpoint.check_length(options.sequence_length, "sequence-length")
    every = token_sequences(text, checkpoint.tokenizer, options.sequence_length)
    sequences = list(itertools.islice(every, options.num_sequences))
    check_enough(text, len(sequences), options.num_sequences or 1, options.sequence_length)
    loaded = checkpoint.load(options.dtype, device)
    with inner_products(loaded) as grams, torch.inference_mode(), progress_bar(len(sequences), "sequence") as progress:
        for first in range(0, len(sequences), options.batch):
            batch = sequences[first : first + options.batch]
            loaded.base_model(torch.tensor(batch, device=device), use_cache=False)
            progress.update(len(batch))
    similarity_LEE = torch.stack([similarities(gram_EE) for gram_EE in grams.values()])
    tokens = len(sequences) * options.sequence_length
    facts = {
        "format": FORMAT,
        "model": checkpoint.name,
        "checkpoint": checkpoint.fingerprint,
        "layers": ",".join(str(layer.number) for layer in grams),
        "measure": MEASURE,
        "tokens": str(tokens),
        "text": text.name,
        "text_sha256": sha256_of([text], text),
        "licence": options.licence,
    }
    with atomic_path(out) as temporary:
        save_file({TENSOR: similarity_LEE}, temporary, metadata=facts)
    found = open_similarity(out)
    others_LEE = similarity_LEE - torch.eye(found.num_experts)
    nearest_LE = others_LEE.amax(dim=2)
    return (
        f"{out}: {found.num_layers} layers x {found.num_experts} experts of {checkpoint.name}, by {tokens:,} tokens of "
        f"{text.name}\n  similarity ({MEASURE}): of the expert most alike {nearest_LE.median():.3f} in the median, "
        f"{nearest_LE.min():.3f} to {nearest_LE.max():.3f}\n"
        f"  a policy of it: {{name: sere, k0: 1, threshold: 0.3, similarity: {out}}}"
    )


@contextlib.contextmanager
def inner_products(model: Any) -> Iterator[dict[MoELayer, Tensor]]:
    """Inner products of the experts' outputs by MoE layer, float64 [E, E], added up while the block lasts."""
    grams: dict[MoELayer, Tensor] = {}
    with contextlib.ExitStack() as stack:
        for layer in find_moe_layers(model):
            zeros_EE = torch.zeros(layer.num_experts, layer.num_experts, dtype=torch.float64)
            grams[layer] = zeros_EE.to(next(layer.experts.parameters()).device)
            watch = partial(_add, grams[layer])
            stack.callback(layer.experts.register_forward_pre_hook(watch).remove)
        yield grams


def _add(gram_EE: Tensor, experts: Any, args: tuple[Tensor, ...]) -> None:
    """Let every expert compute the tokens that the module is about to be called with."""
    hidden_TD, ids_TK, weights_TK = args
    num_experts = len(gram_EE)
    for part_TD in hidden_TD.split(max(1, _MOST_NUMBERS // (num_experts * hidden_TD.shape[1]))):
        ones_T1 = torch.ones(len(part_TD), 1, dtype=weights_TK.dtype, device=part_TD.device)
        outputs = [
            experts.forward(part_TD, torch.full_like(ones_T1, expert, dtype=ids_TK.dtype), ones_T1)
            for expert in range(num_experts)
        ]
        values_EN = torch.stack(outputs).flatten(1).double()
        gram_EE += values_EN @ values_EN.T


def similarities(gram_EE: Tensor) -> Tensor:
    """Experts' similarity by the inner products of their outputs: float32 [E, E], 1 on the diagonal."""
    square_E = gram_EE.diagonal()
    distance_EE = (square_E[:, None] + square_E[None, :] - 2 * gram_EE).clamp_min(0).sqrt().fill_diagonal_(0)
    largest = distance_EE.max()
    alike_EE = torch.where(largest > 0, 1 - distance_EE / largest, torch.ones_like(distance_EE))
    return alike_EE.float().cpu().contiguous()
