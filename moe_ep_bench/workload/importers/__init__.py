"""Convert other programs' recordings to ``moe-trace-v1``.

An importer is a row of ``IMPORTERS`` and a function ``read(source, options, writer)`` that hands the writer blocks of
(layer, experts, scores), and then their tokens. The writer checks every block, and the file appears under its name only
when it is whole; its metadata has the hash of the source.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from moe_ep_bench.errors import UserError
from moe_ep_bench.workload.importers import servers, training
from moe_ep_bench.workload.importers.reading import ImportOptions
from moe_ep_bench.workload.writer import TraceWriter, written_trace


class Importer(NamedTuple):
    """How one kind of source is imported.

    Attributes:
        read: hands the writer what the source holds; its docstring describes the format.
        recorder: who made the source: the trace's ``source``.
        needs: options that must be given.
    """

    read: Callable[[Path, ImportOptions, TraceWriter], None]
    recorder: str
    needs: tuple[str, ...]


IMPORTERS = {
    "esft": Importer(training.read_esft, "deepseek-ai/ESFT results/expert_scores", ("domain",)),
    "flame-moe": Importer(training.read_flame_moe, "cmu-flame/FLAME-MoE captured routing", ("preset", "phase")),
    "megatron": Importer(training.read_megatron, "Megatron-Core router trace", ("preset", "phase")),
    "sglang": Importer(servers.read_sglang, "SGLang routed experts", ("preset",)),
    "vllm": Importer(servers.read_vllm, "vLLM routed experts", ("preset",)),
}
PHASES = ("prefill", "decode", "training")


def import_trace(kind: str, source: Path, out: Path, **options: str) -> None:
    """Write the recording at ``source`` as the ``moe-trace-v1`` file ``out``.

    Args:
        kind: one of ``IMPORTERS``.
        out: must not exist yet; parent directories are made.
        options: fields of ``ImportOptions``.

    Raises:
        ValueError: an unknown kind, an option that is missing, a source that is missing, damaged or not
            what a router makes; one line that names the file, the place in it, the value and what is allowed.
    """
    if kind not in IMPORTERS:
        raise UserError(f"kind: expected one of {', '.join(IMPORTERS)}; got {kind!r}")
    importer = IMPORTERS[kind]
    if missing := [name for name in importer.needs if not options.get(name)]:
        raise UserError(f"{', '.join(missing)}: needed, because {kind} recordings do not say it")
    about = ImportOptions(**options)
    if about.phase not in ("", *PHASES):
        raise UserError(f"phase: expected one of {', '.join(PHASES)}; got {about.phase!r}")
    if not source.exists():
        raise UserError(f"{source}: no such file or directory")
    if out.exists():
        raise UserError(f"{out}: expected a name that is free, but there is such a file already")
    try:
        with written_trace(out, source) as writer:
            writer.metadata |= {"source": importer.recorder, "phase": about.phase or "prefill and decode"}
            writer.metadata |= {"domain": about.domain, "licence": about.licence}
            importer.read(source, about, writer)
    except OSError as error:
        raise UserError(f"{error.filename or source}: {error.strerror or error}") from None
