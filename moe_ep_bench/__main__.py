"""``python -m moe_ep_bench``, which is also what torchrun starts."""

import contextlib
import os
import sys

from moe_ep_bench.cli import main

if __name__ == "__main__":
    status = main()
    if "RANK" in os.environ:
        # A rank has said and written everything. Destructors of devices and groups may wait for peers that have ended,
        # and no guard is left to end that.
        for stream in sys.stdout, sys.stderr:
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os._exit(status)
    sys.exit(status)
