"""Started under torchrun by ``test_layer.py``: all laws of a layer, on as many ranks as there are."""

from __future__ import annotations

import sys
from pathlib import Path

import flex_laws  # noqa: F401, adds its laws to the others
import graph_laws  # noqa: F401, adds its laws to the others
import padded_laws  # noqa: F401, adds its laws to the others
import slice_laws  # noqa: F401, adds its laws to the others
from layer_laws import main

if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
