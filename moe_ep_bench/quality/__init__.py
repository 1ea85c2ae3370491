"""Judge policies inside Hugging Face language models: what they cost the answers, on a text and on tasks.

``config``, ``session``      the config file, and the command that goes through its cases
``text``, ``tasks``          what is asked: a text's next tokens, or tasks of the lm-evaluation-harness (``harness``)
``checkpoint``, ``families`` a model on disk, and how each known class of routers chooses
``passes``, ``routed``       what a forward pass is to a policy, and a policy patched into the routers by hooks
``loads``                    metrics of what a router chose
``recording``                what the routers chose, as a moe-trace-v1 file

Nothing outside this folder imports transformers, and nothing in it is needed to time a layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path


def run_quality(
    config: Path, out: Path, overrides: Sequence[str] = (), *, force: bool = False, dry_run: bool = False
) -> None:
    """See ``session.run_quality``; torch is imported when this is called."""
    from moe_ep_bench.quality.session import run_quality as run

    run(config, out, overrides, force=force, dry_run=dry_run)
