"""Former place of names of ``load`` and ``parts``."""

from moe_ep_bench.analysis.load import Workload as Workload
from moe_ep_bench.analysis.parts import Tried as Tried
from moe_ep_bench.analysis.parts import read_run_json as read_run_json
