"""From recordings as others publish and write them to ``moe-trace-v1``.

========  ==========================================================================  ==================
kind      source                                                                      scores
========  ==========================================================================  ==================
esft      a checkout of deepseek-ai/ESFT (``results/expert_scores``)                  full softmax
gpt-oss   a checkout of AmanPriyanshu/GPT-OSS-MoE-ExpertFingerprinting (``data``)     softmax over top-k
megatron  ``router_trace_rank*.jsonl`` of Megatron-Core 0.19's router tracer          with a logits sidecar
sglang    a per_token dump of SGLang's expert distribution recorder, as npz           none
vllm      vLLM's returned routed experts, as npz or JSON lines                        none
========  ==========================================================================  ==================

Every reader streams: what it holds at a time is a line, a document or a block of tokens, never the
recording. Nothing is unpickled. What comes out is checked as a router's work before it is written,
counted again after, and appears under its name only when it is whole; its metadata has the hash of
what it was made from.

Without scores a recording says which experts worked, and how much, but not how willingly. Such
sources are imported only where the user accepts it (``assume_equal_scores``); the trace then says
``assumed`` where others name their score function, and every result that is made from it repeats it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from types import MappingProxyType

from moe_ep_bench.files import atomic_path
from moe_ep_bench.models import load_model
from moe_ep_bench.workload.importers import esft, gpt_oss, megatron, sglang, vllm
from moe_ep_bench.workload.importers.options import ImportOptions
from moe_ep_bench.workload.importers.sources import sha256_of
from moe_ep_bench.workload.importers.writer import ImportSummary, TraceWriter, spooled

READERS: Mapping[str, Callable[[Path, ImportOptions, TraceWriter], None]] = MappingProxyType(
    {
        "esft": esft.read,
        "gpt-oss": gpt_oss.read,
        "megatron": megatron.read,
        "sglang": sglang.read,
        "vllm": vllm.read,
    }
)
_MODEL = ("preset", "model", "num_experts")
_OWN = (*_MODEL, "domain", "licence", "assume_equal_scores")
TAKES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "esft": ("domain",),
        "gpt-oss": ("domain",),
        "megatron": (*_OWN, "phase", "score_function", "micro_batch_size"),
        "sglang": _OWN,
        "vllm": (*_OWN, "phase"),
    }
)

__all__ = ["READERS", "TAKES", "ImportOptions", "ImportSummary", "import_trace"]


def import_trace(kind: str, source: Path, out: Path, options: ImportOptions | None = None) -> ImportSummary:
    """Write the recording at ``source`` as the ``moe-trace-v1`` file ``out``.

    Args:
        kind: which of ``READERS``.
        source: file or directory, see the reader's module.
        out: must not exist yet; parent directories are made.
        options: facts that the source does not hold; ``TAKES`` says which suit which kind.

    Raises:
        ValueError: an unknown kind, an option that does not suit it, a source that is missing, damaged or not
            what a router makes; one line that names the file, the place in it, the value and what is allowed.
    """
    options = options or ImportOptions()
    if kind not in READERS:
        raise ValueError(f"kind: expected one of {', '.join(READERS)}; got {kind!r}")
    for field in fields(options):
        if getattr(options, field.name) != field.default and field.name not in TAKES[kind]:
            raise ValueError(
                f"{field.name}: not for {kind} recordings, which take {', '.join(TAKES[kind])}; "
                f"got {getattr(options, field.name)!r}"
            )
    options = _with_preset(options)
    source, out = Path(source), Path(out)
    if not source.exists():
        raise ValueError(f"{source}: no such file or directory")
    if out.exists():
        raise ValueError(f"{out}: expected a name that is free, but there is such a file already")
    try:
        with atomic_path(out) as temporary, spooled(out.parent) as directory:
            writer = TraceWriter(directory, source)
            READERS[kind](source, options, writer)
            digest = sha256_of(writer.sources, source)
            return writer.write(temporary, out, kind, digest)
    except OSError as error:
        raise ValueError(f"{error.filename or source}: {error.strerror or error}") from None


def _with_preset(options: ImportOptions) -> ImportOptions:
    if options.preset is None:
        return options
    for name in ("model", "num_experts", "score_function"):
        if getattr(options, name) is not None:
            raise ValueError(f"{name}: expected none beside preset, which says it; got {getattr(options, name)!r}")
    try:
        spec = load_model(options.preset)
    except ValueError as error:
        raise ValueError(f"preset: {error}") from None
    return options.with_model(spec)
