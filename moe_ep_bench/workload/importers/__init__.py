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

An importer is a row of ``IMPORTERS`` and a function ``read(source, options, writer)`` that hands the writer each pass's
blocks of (layer, experts, scores) and then its tokens. Importers stream: they hold a line, a pass or an array at a
time. The writer checks every block, counts the experts again after writing, and the file appears under its name only
when it is whole; its metadata has the hash of the source.

Without scores a recording says which experts worked but not how willingly. Such sources are imported only with
``assume_equal_scores``; the trace's score is then ``assumed``, and every result that is made from it says so.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from moe_ep_bench.errors import UserError
from moe_ep_bench.files import atomic_path
from moe_ep_bench.workload.importers import ids_only, with_scores
from moe_ep_bench.workload.importers.options import ASSUMED, ImportOptions
from moe_ep_bench.workload.importers.writer import ImportSummary, TraceWriter

__all__ = ["IMPORTERS", "ImportOptions", "ImportSummary", "import_trace"]


class Importer(NamedTuple):
    """How one kind of source is imported.

    Attributes:
        read: hands the writer what the source holds; its docstring describes the format.
        recorder: who made the source: the trace's ``source``.
        takes: the options that suit it.
        needs: those that must be given, or follow from ``preset``.
    """

    read: Callable[[Path, ImportOptions, TraceWriter], None]
    recorder: str
    takes: tuple[str, ...]
    needs: tuple[str, ...] = ()


_ASSUMED = "assume_equal_scores"
_COMMON = ("preset", "model", "num_experts", "domain", "licence", "max_bytes", _ASSUMED)
_OF_SERVERS = ("phase", "prompt_start", "leave_out_cached")
IMPORTERS: Mapping[str, Importer] = MappingProxyType(
    {
        "esft": Importer(with_scores.read_esft, "deepseek-ai/ESFT results/expert_scores", ("domain",)),
        "flame-moe": Importer(
            with_scores.read_flame_moe,
            "cmu-flame/FLAME-MoE captured routing",
            ("model", "num_experts", "domain", "licence", "max_bytes", "phase"),
            ("model", "num_experts", "phase"),
        ),
        "megatron": Importer(
            with_scores.read_megatron,
            "Megatron-Core router trace",
            (*_COMMON, "phase", "score_function", "micro_batch_size"),
            ("model", "phase"),
        ),
        "sglang": Importer(
            ids_only.read_sglang,
            "SGLang expert distribution recorder",
            (*_COMMON, *_OF_SERVERS),
            ("model", _ASSUMED),
        ),
        "vllm": Importer(
            ids_only.read_vllm,
            "vLLM routed experts",
            (*_COMMON, *_OF_SERVERS),
            ("model", "num_experts", _ASSUMED),
        ),
    }
)


def import_trace(kind: str, source: Path, out: Path, options: ImportOptions | None = None) -> ImportSummary:
    """Write the recording at ``source`` as the ``moe-trace-v1`` file ``out``.

    Args:
        kind: one of ``IMPORTERS``.
        out: must not exist yet; parent directories are made.

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
    if missing := [name for name in importer.needs if not getattr(options, name)]:
        hint = "; preset says what belongs to a model" if "preset" in importer.takes else ""
        scores = ", and they have no scores, only expert ids (loads stay true)" if _ASSUMED in missing else ""
        raise UserError(f"{', '.join(missing)}: needed, because {kind} recordings do not say it{scores}{hint}")
    metadata = options.metadata() | {"source": importer.recorder}
    if _ASSUMED in importer.needs:
        metadata["score"] = ASSUMED
    try:
        with (
            atomic_path(out) as temporary,
            tempfile.TemporaryDirectory(dir=out.parent, prefix=".importing.") as directory,
        ):
            writer = TraceWriter(Path(directory), source, metadata, options.top_k)
            importer.read(source, options, writer)
            return writer.write(temporary, out)
    except OSError as error:
        raise UserError(f"{error.filename or source}: {error.strerror or error}") from None
