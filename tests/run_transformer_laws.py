"""All laws of whole models, run on every rank by torchrun; see ``test_transformer.py``."""

from __future__ import annotations

import sys
from pathlib import Path

import transformer_graph_laws  # noqa: F401, adds its laws to the others
from transformer_laws import main

if __name__ == "__main__":
    main(Path(sys.argv[1]))
