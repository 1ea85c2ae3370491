"""``python -m moe_ep_bench``, which is also what torchrun starts."""

import sys

from moe_ep_bench.cli import main

if __name__ == "__main__":
    sys.exit(main())
