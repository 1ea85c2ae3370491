"""Convert other programs' recordings to ``moe-trace-v1``.

=========  ==========================================================================  ==================
kind       source                                                                      scores
=========  ==========================================================================  ==================
esft       a checkout of deepseek-ai/ESFT (``results/expert_scores``)                  full softmax
flame-moe  captured routing of cmu-flame/FLAME-MoE, as npz                             full softmax
megatron   ``router_trace_rank*.jsonl`` of Megatron-Core 0.19's router tracer          logits beside it
sglang     SGLang's responses with routed experts, as JSON lines                       none
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

from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from moe_ep_bench.errors import UserError
from moe_ep_bench.workload.importers import servers, training
from moe_ep_bench.workload.importers.options import ImportOptions
from moe_ep_bench.workload.trace import Trace, open_trace
from moe_ep_bench.workload.writer import TraceWriter, written_trace


class Importer(NamedTuple):
    """How one kind of source is imported.

    Attributes:
        read: hands the writer what the source holds; its docstring describes the format.
        recorder: who made the source: the trace's ``source``.
        takes: the options that suit it.
        needs: those that must be given.
        phases: what ``phase`` may be.
    """

    read: Callable[[Path, ImportOptions, TraceWriter], None]
    recorder: str
    takes: tuple[str, ...]
    needs: tuple[str, ...] = ()
    phases: tuple[str, ...] = ("prefill", "decode", "training")


_EQUAL, _WORDS = "assume_equal_scores", ("phase", "domain", "licence")
_SERVER = ("preset", *_WORDS, _EQUAL), ("preset", _EQUAL), ("prefill", "decode")
IMPORTERS: Mapping[str, Importer] = MappingProxyType(
    {
        "esft": Importer(training.read_esft, "deepseek-ai/ESFT results/expert_scores", ("domain",)),
        "flame-moe": Importer(
            training.read_flame_moe,
            "cmu-flame/FLAME-MoE captured routing",
            ("model", "num_experts", *_WORDS),
            ("model", "num_experts", "phase"),
        ),
        "megatron": Importer(
            training.read_megatron,
            "Megatron-Core router trace",
            ("preset", "micro_batch_size", *_WORDS),
            ("preset", "phase"),
        ),
        "sglang": Importer(servers.read_sglang, "SGLang routed experts", *_SERVER),
        "vllm": Importer(servers.read_vllm, "vLLM routed experts", *_SERVER),
    }
)
ASSUMED = "assumed equal over the top-k: the source holds expert ids only"


def import_trace(kind: str, source: Path, out: Path, chosen: Mapping[str, Any]) -> Trace:
    """Write the recording at ``source`` as the ``moe-trace-v1`` file ``out``.

    Args:
        kind: one of ``IMPORTERS``.
        out: must not exist yet; parent directories are made.
        chosen: fields of ``ImportOptions``.

    Raises:
        ValueError: an unknown kind, an option that does not suit it, a source that is missing, damaged or not
            what a router makes; one line that names the file, the place in it, the value and what is allowed.
    """
    if kind not in IMPORTERS:
        raise UserError(f"kind: expected one of {', '.join(IMPORTERS)}; got {kind!r}")
    importer = IMPORTERS[kind]
    for name, value in chosen.items():
        if name not in importer.takes:
            raise UserError(f"{name}: not for {kind} recordings, which take {', '.join(importer.takes)}; got {value!r}")
    options = ImportOptions(**chosen)
    if options.phase not in (None, *importer.phases):
        raise UserError(f"phase: expected one of {', '.join(importer.phases)}; got {options.phase!r}")
    if not source.exists():
        raise UserError(f"{source}: no such file or directory")
    if out.exists():
        raise UserError(f"{out}: expected a name that is free, but there is such a file already")
    if missing := [name for name in importer.needs if not getattr(options, name)]:
        scores = ", and they have no scores, only expert ids (loads stay true)" if _EQUAL in missing else ""
        raise UserError(f"{', '.join(missing)}: needed, because {kind} recordings do not say it{scores}")
    metadata = {"source": importer.recorder, "domain": options.domain, "licence": options.licence}
    metadata |= {"model": options.spec.name if options.preset else options.model, "phase": options.phase or ""}
    if _EQUAL in importer.needs:
        metadata["score"] = ASSUMED
    try:
        with written_trace(out, source, metadata) as writer:
            importer.read(source, options, writer)
    except OSError as error:
        raise UserError(f"{error.filename or source}: {error.strerror or error}") from None
    return open_trace(out)
