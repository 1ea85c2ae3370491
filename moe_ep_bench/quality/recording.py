"""Record what a model's routers choose on a text: a ``moe-trace-v1`` file with the scores of all experts.

Sequences go through the unpatched model a few at a time, and what every router chose goes to disk at once: memory is
that of one batch however long the text is. A batch that is on disk is noted; a recording that was killed goes on
behind the last one that was noted, and the file appears under its name when it is whole.

What is recorded are scores as a policy sees them (``routed``): the top-k of a row are the experts that the model chose,
also where scores tied. Sigmoid scores, and those of which some are masked, are divided by their sum, for a recording
holds shares of a token's score mass.

Shapes: T = tokens of a batch, E = experts, K = top_k.
"""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from moe_ep_bench.errors import UserError
from moe_ep_bench.files import atomic_path, read_json, stable_hash, write_json
from moe_ep_bench.quality.checkpoint import (
    Checkpoint,
    Dtype,
    check_enough,
    import_transformers,
    pick_device,
    token_sequences,
)
from moe_ep_bench.quality.passes import RouterCall
from moe_ep_bench.quality.routed import routed
from moe_ep_bench.runtime import locks
from moe_ep_bench.runtime.progress import progress_bar
from moe_ep_bench.workload.writer import ImportSummary, TraceWriter, sha256_of

_PROGRESS = "progress.json"


@dataclass(frozen=True, kw_only=True)
class RecordOptions:
    """What to record.

    Attributes:
        num_sequences: from the beginning of the text; None = all that it has.
        batch: sequences that go through the model together.
        domain: what the text is about; None = its file's name.
    """

    sequence_length: int = 512
    num_sequences: int | None = None
    batch: int = 8
    dtype: Dtype = "auto"
    device: str = "auto"
    domain: str | None = None
    licence: str = "unstated"

    def __post_init__(self) -> None:
        for name in ("sequence_length", "num_sequences", "batch"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UserError(f"{name.replace('_', '-')}: expected at least 1, got {value}")


def record_trace(model: Path, text: Path, out: Path, options: RecordOptions) -> ImportSummary:
    """Write what the model in the folder ``model`` routes when it reads ``text``, as the file ``out``.

    Args:
        out: must not exist yet. A folder beside it holds what is recorded until all is, so that the same command goes
            on after it was stopped.

    Raises:
        ValueError: one line that names the file and what is wrong; a recording of something else was begun there.
    """
    if out.exists():
        raise UserError(f"{out}: expected a name that is free, but there is such a file already")
    if not text.is_file():
        raise UserError(f"{text}: cannot read the text: {'not a file' if text.exists() else 'no such file'}")
    device = pick_device(options.device)
    checkpoint = Checkpoint.open(model)
    checkpoint.check_length(options.sequence_length, "sequence-length")

    def sequences() -> Iterator[list[int]]:
        every = token_sequences(text, checkpoint.tokenizer, options.sequence_length)
        return itertools.islice(every, options.num_sequences)

    total = sum(1 for _ in sequences())
    check_enough(text, total, options.num_sequences or 1, options.sequence_length)
    folder = out.parent / f".{out.name}.recording"
    digest = sha256_of([text], text)
    asked = stable_hash(
        [checkpoint.fingerprint, digest, options.sequence_length, options.num_sequences, options.batch, options.dtype]
    )
    folder.mkdir(parents=True, exist_ok=True)
    with locks.hold(folder, {"recording": str(out)}):
        writer = _writer(folder, checkpoint, text, options)
        num_done = _resume(writer, folder, asked)
        loaded: Any = None
        rest = itertools.islice(sequences(), num_done, None)
        with progress_bar(total, "sequence") as progress:
            progress.update(num_done)
            while batch := list(itertools.islice(rest, options.batch)):
                if loaded is None:  # Not before there is something to do: a recording may lack its last step only.
                    loaded = checkpoint.load(options.dtype, device)
                _record(writer, loaded, batch, num_done)
                num_done += len(batch)
                write_json(folder / _PROGRESS, {"asked": asked, "sequences": num_done, "writer": writer.progress()})
                progress.update(len(batch))
        with atomic_path(out) as temporary:
            summary = writer.write(temporary, out)
    shutil.rmtree(folder)
    return summary


def _writer(folder: Path, checkpoint: Checkpoint, text: Path, options: RecordOptions) -> TraceWriter:
    writer, layer = TraceWriter(folder, text), checkpoint.moe_layers[0]
    writer.sources = [text]
    function = layer.spec.score_function
    writer.describe(
        num_experts=layer.num_experts,
        top_k=layer.top_k,
        where=str(checkpoint.path),
        model=checkpoint.name,
        score="softmax, not renormalised" if function == "softmax" else f"{function} over its sum over all experts",
        phase="prefill",
        domain=options.domain or text.stem,
        source=f"trace record, transformers {import_transformers().__version__}",
        licence=options.licence,
    )
    writer.notes.append(f"sequences of {options.sequence_length} tokens, {options.dtype} weights")
    return writer


def _resume(writer: TraceWriter, folder: Path, asked: str) -> int:
    """Take up what an earlier process left; how many sequences that is."""
    file = folder / _PROGRESS
    try:
        noted = read_json(file)
    except FileNotFoundError:
        noted = {"asked": asked, "sequences": 0, "writer": writer.progress()}
    except ValueError:
        raise UserError(f"{file}: damaged, or not written by this program; remove its folder to begin anew") from None
    if noted["asked"] != asked:
        raise UserError(
            f"{folder}: holds the beginning of another recording (model, text, lengths or dtype differ); "
            "remove it, or name another file"
        )
    writer.resume(noted["writer"])
    return noted["sequences"]


def _record(writer: TraceWriter, model: Any, batch: list[list[int]], first: int) -> None:
    """Send sequences through the model, the number ``first`` and those after it, and spool what its routers do."""

    def add(call: RouterCall) -> None:
        full_TE = shares(call.scores_TE)
        ids_TK = call.own_TE.nonzero()[:, 1].view(len(full_TE), -1).cpu().numpy()
        best_TK = np.take_along_axis(full_TE, ids_TK, axis=1)
        where = f"{call.layer.name}, from sequence {first}"
        writer.add(call.layer.number, ids_TK, best_TK, where, np.arange(len(full_TE)), full_TE)

    with torch.inference_mode(), routed(model, None, observe=add):
        model.base_model(torch.tensor(batch, device=model.device), use_cache=False)
    number, length = len(batch), len(batch[0])
    sequence_T = first + np.arange(number).repeat(length)
    writer.add_tokens(sequence_T, np.tile(np.arange(length), number), f"from sequence {first}")


def shares(scores_TE: torch.Tensor) -> NDArray[np.float32]:
    """Every expert's share of a token's score mass: [T, E]."""
    full_TE = scores_TE.cpu().numpy()
    sum_T1 = full_TE.sum(axis=1, keepdims=True, dtype=np.float64)
    if np.abs(sum_T1 - 1).max(initial=0) < 1e-4:  # A softmax: as the router has it, to the bit.
        return full_TE
    return (full_TE / sum_T1).astype(np.float32)
