"""Former place of a name of ``notes``."""

from moe_ep_bench.analysis.notes import READING as READING
