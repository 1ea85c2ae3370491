#!/usr/bin/env python
"""Do cases that take turns run as fast as each would alone, on a GPU that is warm with it?

    python benchmarks/back_to_back.py [CONFIG] [--set KEY=VALUE] [--point N] [--seconds S] [--out DIR] [--rehearse]

Between cases of the interleaved protocol a GPU idles for a moment, holds of 2 ms draw little power, and a case's heat
is shared by all. A server runs one policy for hours. So every case of one comparison, on one rank, first takes its
turns (``timing.protocol``), then runs back to back for S seconds, batch after batch; of these the second half counts.
Prints both times, the SM clocks beside them, and what both say of the speedup over native; with --out writes
back_to_back.csv, a row per case, and the environment beside it.

--rehearse runs toy sizes on the CPU: it tries this script, and measures nothing.
"""

from __future__ import annotations

import contextlib
import sys
import tempfile
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from interleaved import device_of, keep, parser_of
from tqdm import tqdm

from moe_ep_bench.bench.job import Job
from moe_ep_bench.bench.measure import measure_point
from moe_ep_bench.bench.plan import plan
from moe_ep_bench.bench.point import RANKS
from moe_ep_bench.bench.real_ranks import RealRanks
from moe_ep_bench.layer.host import device_scope
from moe_ep_bench.layer.megatron import expert_parallel_groups
from moe_ep_bench.results import RunDirectory
from moe_ep_bench.runtime.ranks import Ranks, join
from moe_ep_bench.schema import HOST_BUSY, SM_CLOCK, TOTAL
from moe_ep_bench.timing.protocol import Runnable
from moe_ep_bench.timing.timer import HOLD_US, Clock

ROOT = Path(__file__).parents[1]


def measured_alone(case: Runnable, num_batches: int, clock: Clock, seconds: float) -> tuple[float, float | None]:
    """Median microseconds from run to run in the second half of so many seconds, and the clock (MHz) at their end."""
    clock.wait()
    begin, stamps, came_s = time.perf_counter(), [clock.stamp()], [0.0]
    while came_s[-1] < seconds or len(stamps) <= 2 * num_batches:
        with case.ready((len(stamps) - 1) % num_batches) as run:
            run()
        stamps.append(clock.stamp())
        came_s.append(time.perf_counter() - begin)
    clock.hold(HOLD_US)
    clock.wait()
    times_us = [clock.between_us(*pair) for pair in pairwise(stamps)]
    first = min(int(np.searchsorted(came_s, came_s[-1] / 2)), len(times_us) - num_batches)
    return float(np.median(times_us[first:])), clock.held_mhz()


def table_of(session: RealRanks, seconds: float) -> pd.DataFrame:
    """A row per case: what it takes in turns and back to back, and at which clocks."""
    result, clock = session.result, session.watch.recorder.clock
    rows: list[dict[str, Any]] = []
    for case in session.cases:
        (times_SC,) = result.times[case.case_id]
        turns = (TOTAL, HOST_BUSY, SM_CLOCK)
        in_turns = {name: pd.Series(times_SC[:, result.columns[name]]).median() for name in turns}
        session.job.begin(case.case_id)
        alone_us, alone_mhz = measured_alone(case, session.num_batches, clock, seconds)
        in_turns_us = np.fmax(in_turns[TOTAL], in_turns[HOST_BUSY])
        clocks = {"in_turns_mhz": in_turns[SM_CLOCK], "alone_mhz": alone_mhz}
        rows.append({"case": case.spec.label, "in_turns_us": in_turns_us, "alone_us": alone_us, **clocks})
    table = pd.DataFrame(rows)
    native = table.iloc[0]  # the baseline comes first
    for how in ("in_turns", "alone"):
        table[f"{how}_speedup"] = native[f"{how}_us"] / table[f"{how}_us"]
    table["time_difference"] = table["alone_us"] / table["in_turns_us"] - 1
    table["speedup_difference"] = table["alone_speedup"] / table["in_turns_speedup"] - 1
    return table


def measure(ranks: Ranks, config: Path, overrides: Sequence[str], point: int, seconds: float) -> pd.DataFrame:
    """Both times of a comparison's cases; those that fail are left out."""
    (comparison,) = plan(config, overrides, RANKS, 1, point=point)
    with tempfile.TemporaryDirectory() as folder, device_scope(), torch.inference_mode():
        job = Job(ranks, RunDirectory(Path(folder)))
        job.progress = tqdm(disable=True)
        with job.trying([comparison]):
            groups = expert_parallel_groups(1, 120)
            with contextlib.closing(RealRanks(job, comparison, comparison.cases, groups)) as session:
                measure_point(session, job.begin)
                return table_of(session, seconds)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = parser_of(__doc__)
    parser.add_argument("config", nargs="?", type=Path, default=ROOT / "configs" / "gpu-check.yaml")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--point", type=int, default=0, help="of the config's sweep, from 0")
    parser.add_argument("--seconds", type=float, default=2.0, help="of each case back to back")
    options = parser.parse_args(arguments)
    device = device_of(parser, options.rehearse)
    seconds = 0.05 if options.rehearse else options.seconds
    with contextlib.closing(join(120)) as ranks:
        overrides = ["measure.breakdown_iterations=0", *options.set]
        table = measure(ranks, options.config, overrides, options.point, seconds)
    keep(options.out, "back_to_back", table, device, config=options.config.name, overrides=overrides)
    print(table.to_string(index=False, float_format="{:.4g}".format, na_rep=""))
    print(
        f"back to back speedups are {100 * table['speedup_difference'].abs().max():.2g} % off those in turns, at most"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
