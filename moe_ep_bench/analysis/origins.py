"""Former place of names of ``words``."""

from moe_ep_bench.analysis.words import HOW as HOW
from moe_ep_bench.analysis.words import WORKLOADS as WORKLOADS
from moe_ep_bench.analysis.words import Footer as Footer
from moe_ep_bench.analysis.words import Origin as Origin
from moe_ep_bench.analysis.words import tags_of as tags_of
