"""Convert other programs' recordings to ``moe-trace-v1``.

=========  ==========================================================================  ==================
kind       source                                                                      scores
=========  ==========================================================================  ==================
esft       a checkout of deepseek-ai/ESFT (``results/expert_scores``)                  full softmax
flame-moe  captured routing of cmu-flame/FLAME-MoE, as npz                             full softmax
megatron   ``router_trace_rank*.jsonl`` of Megatron-Core 0.19's router tracer          with a logits sidecar
sglang     a per_token dump of SGLang's recorder as npz, or responses as JSON lines    none
vllm       vLLM's returned routed experts, as npz or JSON lines                        none
=========  ==========================================================================  ==================

An importer is a row of ``IMPORTERS`` and a function ``read(source, options, writer)`` that hands the writer
blocks of (layer, experts, scores) and the tokens that they belong to. All else is shared. Importers stream: they
hold a line, a document or an array at a time. Nothing is unpickled. The writer checks every block, counts the
experts again after writing, and the file appears under its name only when it is whole; its metadata has the hash
of the source.

Without scores a recording says which experts worked but not how willingly. Such sources are imported only with
``assume_equal_scores``; the trace's score is then ``assumed``, and every result that is made from it says so.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from types import MappingProxyType

from moe_ep_bench.errors import UserError
from moe_ep_bench.files import atomic_path
from moe_ep_bench.workload.importers import megatron, published, sglang, vllm
from moe_ep_bench.workload.importers.sources import MAX_ARRAY_BYTES, ImportOptions, most_bytes
from moe_ep_bench.workload.importers.writer import ImportSummary, TraceWriter

__all__ = ["IMPORTERS", "ImportOptions", "ImportSummary", "import_trace"]


@dataclass(frozen=True)
class Importer:
    """How one kind of source is imported.

    Attributes:
        read: hands the writer what the source holds; its module describes the format.
        recorder: who made the source: the trace's ``source``.
        expects: what the source is, for the error where it is a file and should be a folder, or the reverse.
        is_folder: whether the source is a folder; None = either.
        takes: the options that suit it.
        needs: those that must be given, or follow from ``preset``.
        has_scores: whether scores are recorded; None = the reader finds out.
    """

    read: Callable[[Path, ImportOptions, TraceWriter], None]
    recorder: str
    expects: str
    is_folder: bool | None = False
    takes: tuple[str, ...] = ("domain",)
    needs: tuple[str, ...] = ()
    has_scores: bool | None = True


_OWN = ("preset", "model", "num_experts", "domain", "licence", "assume_equal_scores")
IMPORTERS: Mapping[str, Importer] = MappingProxyType(
    {
        "esft": Importer(
            published.read_esft,
            "deepseek-ai/ESFT results/expert_scores",
            "a checkout of deepseek-ai/ESFT",
            is_folder=True,
        ),
        "flame-moe": Importer(
            published.read_flame_moe,
            "cmu-flame/FLAME-MoE captured routing",
            "an npz file",
            takes=("model", "num_experts", "domain", "licence", "phase"),
            needs=("model", "num_experts", "phase"),
        ),
        "megatron": Importer(
            megatron.read,
            "Megatron-Core router trace",
            "router_trace_rank<rank>.jsonl",
            is_folder=None,
            takes=(*_OWN, "phase", "score_function", "micro_batch_size"),
            needs=("model", "phase"),
            has_scores=None,
        ),
        "sglang": Importer(
            sglang.read,
            "SGLang expert distribution recorder",
            "one dump's npz file, or responses as JSON lines",
            takes=_OWN,
            needs=("model",),
            has_scores=False,
        ),
        "vllm": Importer(
            vllm.read,
            "vLLM routed experts",
            "an npz or JSONL file",
            takes=(*_OWN, "phase"),
            needs=("model", "num_experts"),
            has_scores=False,
        ),
    }
)


def import_trace(
    kind: str, source: Path, out: Path, options: ImportOptions | None = None, *, max_bytes: int | None = None
) -> ImportSummary:
    """Write the recording at ``source`` as the ``moe-trace-v1`` file ``out``.

    Args:
        kind: one of ``IMPORTERS``, whose module describes the source.
        out: must not exist yet; parent directories are made.
        max_bytes: of the source's largest array; None = ``sources.MAX_ARRAY_BYTES``.

    Raises:
        ValueError: an unknown kind, an option that does not suit it, a source that is missing, damaged or not
            what a router makes; one line that names the file, the place in it, the value and what is allowed.
    """
    if kind not in IMPORTERS:
        raise UserError(f"kind: expected one of {', '.join(IMPORTERS)}; got {kind!r}")
    importer, options = IMPORTERS[kind], options or ImportOptions()
    for field in fields(options):
        value = getattr(options, field.name)
        if value != field.default and field.name not in importer.takes:
            raise UserError(
                f"{field.name}: not for {kind} recordings, which take {', '.join(importer.takes)}; got {value!r}"
            )
    options = options.with_preset()
    source, out = Path(source), Path(out)
    if not source.exists():
        raise UserError(f"{source}: no such file or directory")
    if out.exists():
        raise UserError(f"{out}: expected a name that is free, but there is such a file already")
    missing = [name for name in importer.needs if getattr(options, name) is None]
    if importer.has_scores is False and not options.assume_equal_scores and missing:
        missing.append("assume_equal_scores")  # Asked for at once, and not after the rest was given.
    if len(missing) > 1:
        hint = "; preset says what belongs to a model" if {"model", "num_experts"} & set(missing) else ""
        scores = ", and they have no scores, only expert ids" if "assume_equal_scores" in missing else ""
        raise UserError(f"{', '.join(missing)}: needed, because {kind} recordings do not say it{scores}{hint}")
    for name in missing:
        options.need(name, f"{kind} recordings do not say it")
    if importer.is_folder not in (None, source.is_dir()):
        raise UserError(f"{source}: expected {importer.expects}, got a {'file' if importer.is_folder else 'directory'}")
    if max_bytes is not None and max_bytes < 1:
        raise UserError(f"--max-bytes: expected at least 1, got {max_bytes}")
    metadata = options.metadata() | {"source": importer.recorder}
    if importer.has_scores is False:
        metadata["score"] = options.accept_no_scores(str(source))
    try:
        with (
            most_bytes(max_bytes or MAX_ARRAY_BYTES),
            atomic_path(out) as temporary,
            tempfile.TemporaryDirectory(dir=out.parent, prefix=".importing.") as directory,
        ):
            writer = TraceWriter(Path(directory), source, metadata)
            importer.read(source, options, writer)
            return writer.write(temporary, out)
    except OSError as error:
        raise UserError(f"{error.filename or source}: {error.strerror or error}") from None
