"""Read a text with a checkpoint: record what its routers choose, and how alike its experts are.

A recording is a ``moe-trace-v1`` file with the scores of all experts as a policy sees them (``checkpoint.Choice``): the
top-k of a row are the experts that the model chose, also where scores tied. Sigmoid scores, and those of which some are
masked, are divided by their sum, for a recording holds shares of a token's score mass. What routers chose is held
in memory, and the file appears under its name when it is whole.

How alike experts are is what the policy ``sere`` reads (``policies.similarity``). Every expert of an MoE layer computes
every token of the text. The distance of two experts is the Frobenius norm of the difference of their outputs, over all
tokens; their similarity is 1 less its share of the layer's largest distance (arXiv 2602.07616, by its code
JL-Cheng/SERE; there of 400 sequences of 128 tokens). Outputs are not kept: inner products of all pairs add up from
tokens to tokens, in float64, and distances follow from them.

Shapes: T = tokens of a batch, E = experts, K = top_k, D = hidden size, L = MoE layers, N = an expert's output numbers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from moe_ep_bench.errors import UserError, progress_bar
from moe_ep_bench.files import atomic_path, check_folder
from moe_ep_bench.models import shares
from moe_ep_bench.policies.similarity import FORMAT, TENSOR
from moe_ep_bench.quality.checkpoint import Checkpoint, MoELayer, find_moe_layers, import_transformers
from moe_ep_bench.quality.routed import RouterCall, routed
from moe_ep_bench.runtime.torchrun import device_type
from moe_ep_bench.workload.trace import TraceWriter, sha256_of, trace_info, written_trace

MEASURE = "1 - Frobenius distance of outputs over the layer's largest"
_SEQUENCES_AT_ONCE = 8
# Numbers of all experts' outputs that are held at a time.
_MOST_NUMBERS = 2**26


def record(
    model: Path,
    text: Path,
    *,
    out: Path | None = None,
    similarity: Path | None = None,
    sequence_length: int = 512,
    num_sequences: int | None = None,
) -> str:
    """Read ``text`` with the model in the folder ``model``; return what was written, and what uses it.

    Args:
        out: the recording; must not exist yet. None = none is written.
        similarity: the file of the experts' similarity likewise.
        num_sequences: from the beginning of the text; None = all that it has.

    Raises:
        ValueError: one line that names the file and what is wrong.
    """
    for option, value in (("--sequence-length", sequence_length), ("--num-sequences", num_sequences)):
        if value is not None and value < 1:
            raise UserError(f"{option}: expected at least 1, got {value}")
    for path in (out, similarity):
        if path is not None:
            check_folder(path.parent, "the folder")
            if path.exists():
                raise UserError(f"{path}: expected a name that is free, but there is such a file already")
    checkpoint = Checkpoint.open(model)
    checkpoint.check_length(sequence_length, "--sequence-length")
    tokens_BS = checkpoint.sequences(text, sequence_length, num_sequences)
    loaded, said = checkpoint.load("auto", device_type()), []
    with contextlib.ExitStack() as stack:
        # The experts' own forward is what is measured: ahead of the patch.
        grams = None if similarity is None else stack.enter_context(inner_products(loaded))
        writer = None if out is None else stack.enter_context(written_trace(out, text))
        if writer is not None:
            source = f"trace record, transformers {import_transformers().__version__}"
            facts = {"model": checkpoint.name, "phase": "prefill", "domain": text.stem, "source": source}
            checkpoint.moe_layers[0].describe(writer, **facts)
            stack.enter_context(routed(loaded, None, observe=partial(_add_call, writer)))
        stack.enter_context(torch.inference_mode())
        progress = stack.enter_context(progress_bar(len(tokens_BS), "sequence"))
        for batch_BS in tokens_BS.split(_SEQUENCES_AT_ONCE):
            loaded.base_model(batch_BS.to(loaded.device), use_cache=False)
            if writer is not None:
                number, length = batch_BS.shape
                sequence_T = writer.num_tokens // length + np.arange(number).repeat(length)
                writer.add_tokens(sequence_T, np.tile(np.arange(length), number), str(text))
            progress.update(len(batch_BS))
        if similarity is not None and grams is not None:
            said.append(_write_similarity(similarity, grams, checkpoint, text, tokens_BS.numel()))
    if out is not None:
        said.append(trace_info(out))
    return "\n".join(said)


# ---- what routers choose ---------------------------------------------------------------------------------------------


def _add_call(writer: TraceWriter, call: RouterCall) -> None:
    """Keep what a router did in a pass."""
    full_TE = shares(call.scores_TE).cpu().numpy()
    ids_TK = call.own_TE.nonzero()[:, 1].view(len(full_TE), -1).cpu().numpy()
    writer.add(call.layer.number, ids_TK, None, call.layer.name, full_TE=full_TE)


# ---- how alike experts are -------------------------------------------------------------------------------------------


@contextlib.contextmanager
def inner_products(model: Any) -> Iterator[dict[MoELayer, Tensor]]:
    """Inner products of the experts' outputs by MoE layer, float64 [E, E], added up while the block lasts."""
    grams: dict[MoELayer, Tensor] = {}
    with contextlib.ExitStack() as stack:
        for layer in find_moe_layers(model):
            zeros_EE = torch.zeros(layer.num_experts, layer.num_experts, dtype=torch.float64)
            grams[layer] = zeros_EE.to(next(layer.experts.parameters()).device)
            watch = partial(_add_products, grams[layer], layer.experts.forward)
            stack.callback(layer.experts.register_forward_pre_hook(watch).remove)
        yield grams


def _add_products(gram_EE: Tensor, forward: Callable[..., Tensor], _: Any, args: tuple[Tensor, ...]) -> None:
    """Let every expert compute the tokens that the module is about to be called with."""
    hidden_TD, ids_TK, weights_TK = args
    num_experts = len(gram_EE)
    for part_TD in hidden_TD.split(max(1, _MOST_NUMBERS // (num_experts * hidden_TD.shape[1]))):
        ones_T1 = torch.ones(len(part_TD), 1, dtype=weights_TK.dtype, device=part_TD.device)
        outputs = [
            forward(part_TD, torch.full_like(ones_T1, expert, dtype=ids_TK.dtype), ones_T1)
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


def _write_similarity(
    path: Path, grams: dict[MoELayer, Tensor], checkpoint: Checkpoint, text: Path, num_tokens: int
) -> str:
    similarity_LEE = torch.stack([similarities(gram_EE) for gram_EE in grams.values()])
    facts = {
        "format": FORMAT,
        "model": checkpoint.name,
        "checkpoint": checkpoint.fingerprint,
        "layers": ",".join(str(layer.number) for layer in grams),
        "measure": MEASURE,
        "tokens": str(num_tokens),
        "text": text.name,
        "text_sha256": sha256_of([text]),
    }
    with atomic_path(path) as temporary:
        save_file({TENSOR: similarity_LEE}, temporary, metadata=facts)
    num_layers, num_experts = similarity_LEE.shape[:2]
    nearest_LE = (similarity_LEE - torch.eye(num_experts)).amax(dim=2)
    return (
        f"{path}: {num_layers} layers x {num_experts} experts of {checkpoint.name}, by {num_tokens:,} tokens of "
        f"{text.name}; of the expert most alike {nearest_LE.median():.3f} in the median\n"
        f"  a policy of it: {{name: sere, k0: 1, threshold: 0.3, similarity: {path}}}"
    )
