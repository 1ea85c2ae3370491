"""Freeze what the present code gives: ``python tests/goldens/make.py [NAME ...]``, without names everything.

Only for numbers that should change. ``git diff --stat tests/goldens`` then names the runs that did.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

os.environ["CUDA_VISIBLE_DEVICES"] = ""
sys.path.insert(0, str(Path(__file__).parents[1]))

from test_goldens import REFERENCES, RUNS, freeze, fresh_reference, fresh_tables, missing_traces


def make(names: list[str]) -> None:
    for name in names or [*RUNS, *REFERENCES]:
        with tempfile.TemporaryDirectory() as folder:
            if name in REFERENCES:
                freeze(name, fresh_reference(name, Path(folder)))
                continue
            missing = missing_traces(RUNS[name])
            assert not missing, f"{name}: {missing[0]} is missing"
            freeze(name, fresh_tables(RUNS[name], Path(folder)))


if __name__ == "__main__":
    make(sys.argv[1:])
