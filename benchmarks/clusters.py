"""Numbers that others published of real clusters, and ours beside them: docs/clusters.md.

    python benchmarks/clusters.py --out results/reference    # prints the table, writes clusters.csv
    python benchmarks/clusters.py --fit                      # prints the fitted figures of h100-sxm-te

``clusters.yaml`` has each number with its source, the config that gives ours and a tolerance. Ours are modelled on one
batch. Nothing is fitted to these numbers but two figures of ``h100-sxm-te``, and the two rows they are fitted to count
in no error.
"""

from __future__ import annotations

import argparse
import copy
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch

from moe_ep_bench.bench.checks import VIRTUAL
from moe_ep_bench.bench.emulated_ranks import ModelledRanks
from moe_ep_bench.bench.measure import measure_point
from moe_ep_bench.bench.plan import plan_experiments
from moe_ep_bench.bench.point import Point
from moe_ep_bench.bench.traffic import LayerTraffic, route_batch
from moe_ep_bench.config.files import experiments_of, override
from moe_ep_bench.cost_model.curve import Curve
from moe_ep_bench.cost_model.devices import SENT_BYTES, Device
from moe_ep_bench.cost_model.phases import RankWork, layer_segments
from moe_ep_bench.files import parse_yaml
from moe_ep_bench.models import load_model
from moe_ep_bench.schema import TOTAL
from moe_ep_bench.timing.protocol import BREAKDOWN, Step

FILE = Path(__file__).with_suffix(".yaml")
FITTED, LIKE = "h100-sxm-te", "h100-sxm"
# A model too: a second opinion, no truth.
PEER = "aiconfigurator"

Row = dict[str, Any]


# ---- ours ------------------------------------------------------------------------------------------------------------


def compared(config: Row, settings: Row) -> Point:
    """A config of ``clusters.yaml`` with some settings, planned."""
    raw = {"name": "clusters", "policies": [{"name": "topk"}], **copy.deepcopy(config)}
    raw["workload"] = {"kind": "synthetic", "num_batches": 1, **raw["workload"]}
    override(raw, {}, [f"{key}={json.dumps(value)}" for key, value in settings.items()])
    (comparison,) = plan_experiments(FILE, experiments_of(FILE, raw, {}), VIRTUAL, on_cpu=True, try_out=False)
    return comparison


class Run:
    """Native's first batch, or that of what loses nothing where the config has some."""

    def __init__(self, comparison: Point) -> None:
        self.comparison = comparison
        case = next((one for one in comparison.cases if one.replication is not None), comparison.cases[0])
        ranks = ModelledRanks(comparison, [case], torch.device("cpu"), lambda _: None)
        measure_point(ranks, ranks.begin)
        self.layers = route_batch(ranks.router, [case], 0)[0].layers
        result = ranks.result
        times_RC = result.times[case.case_id][:, result.steps[Step(0, 0, BREAKDOWN)]]
        last = times_RC[times_RC[:, result.columns[TOTAL]].argmax()]
        self.us = {name: float(us) for name, us in zip(result.columns, last, strict=True)}
        """Microseconds by phase, and in all, of the rank that ends last."""

    @property
    def traffic(self) -> LayerTraffic:
        """Of a layer that stands alone."""
        (traffic,) = self.layers.values()
        return traffic

    def copies(self) -> float:
        """Mean copies of tokens that a rank gets, its own too: for ranks in a node, else for nodes (DeepEP's tests)."""
        one_node = self.comparison.ep_size <= self.comparison.ranks_per_node
        return float(self.traffic.copies("rank" if one_node else "node").sum() / self.comparison.ep_size)

    def gbps(self, phase: str) -> float:
        """Algorithm bandwidth: bytes of copies over time; fp8 with its scales is dispatched, bfloat16 comes back."""
        each = self.comparison.model.hidden_size * (SENT_BYTES["fp8"] if phase == "dispatch" else 2)
        return self.copies() * each / self.us[phase] / 1e3

    def permute_us(self, step: int) -> float:
        """The second or third step of a rank's permutation: the rows that its experts take, and their sums."""
        comparison, traffic = self.comparison, self.traffic
        work = RankWork(traffic.num_tokens_R[0], int(traffic.counts_RP[0].sum()), traffic.received(0),
                        num_copies=int(traffic.copies("rank")[:, 0].sum()))  # fmt: skip
        how: Row = {"by_policy": False, "batch_wide": False, "dtype": comparison.experiment.layer.dtype}
        sent_as = comparison.experiment.layer.dispatch_dtype
        segments = layer_segments(
            comparison.device, comparison.model, work, exchange="rank", dispatch_dtype=sent_as, **how
        )
        return [us for phase, us in segments if phase == "permute"][1 + step]


@cache
def ran(config: str, settings: str) -> Run:
    """A config by its name, with settings as JSON; rows may share it."""
    stated = parse_yaml(FILE.read_text())
    return Run(compared(stated["configs"][config], json.loads(settings)))


def pass_ms(config: str, settings: Row) -> float:
    """A pass of the whole model: of as many layers as have one with experts, and the rest by what one more takes."""
    first = ran(config, json.dumps({**settings, "whole.num_layers": 1 + _first_moe(config)}))
    more = ran(config, json.dumps({**settings, "whole.num_layers": 2 + _first_moe(config)}))
    model = first.comparison.model
    rest = model.num_layers - first.comparison.num_layers
    return (first.us[TOTAL] + rest * (more.us[TOTAL] - first.us[TOTAL])) / 1e3


def _first_moe(config: str) -> int:
    stated = parse_yaml(FILE.read_text())["configs"][config]
    return load_model(stated["model"]["preset"]).moe_layers[0]


def tokens_per_s(config: str, settings: Row) -> float:
    """Of a node of eight GPUs, each with ``tokens_per_rank``."""
    tokens = parse_yaml(FILE.read_text())["configs"][config]["workload"]["tokens_per_rank"]
    return 8 * tokens / pass_ms(config, settings) * 1e3


OF_RUN: dict[str, Callable[[Run], float]] = {
    "layer_ms": lambda run: run.us[TOTAL] / 1e3,
    "dispatch_us": lambda run: run.us["dispatch"],
    "combine_us": lambda run: run.us["combine"],
    "dispatch_GB/s": lambda run: run.gbps("dispatch"),
    "combine_GB/s": lambda run: run.gbps("combine"),
    "experts_us": lambda run: run.us["experts"],
    "expand_us": lambda run: run.permute_us(1),
    "reduce_us": lambda run: run.permute_us(2),
    "fullest_of mean": lambda run: float(
        run.traffic.counts_RP.sum(axis=0).reshape(run.comparison.ep_size, -1).sum(axis=1).max()
        / (run.traffic.counts_RP.sum() / run.comparison.ep_size)
    ),
}
OF_PASS: dict[str, Callable[[str, Row], float]] = {"pass_ms": pass_ms, "rate_tokens/s a node": tokens_per_s}


def ours_of(row: Row) -> float:
    """Our value of a row of ``clusters.yaml``, in its unit."""
    settings, how = row.get("set", {}), row["ours"]
    if how in OF_PASS:
        ours = OF_PASS[how](row["config"], settings)
        return ours / OF_PASS[how](row["config"], row["over"]) if "over" in row else ours
    ours = OF_RUN[how](ran(row["config"], json.dumps(settings)))
    # A link that is so much slower than the one that was measured.
    slower = row.get("slower", 1.0)
    return ours / slower if how.endswith("GB/s") else ours * slower


def table() -> pd.DataFrame:
    """A row for each published number, with ours and its error."""
    rows = []
    for row in parse_yaml(FILE.read_text())["rows"]:
        ours = ours_of(row)
        keys = ("source", "kind", "what", "published", "tolerance", "lacks")
        unit = "ratio" if "over" in row else row["ours"].partition("_")[2]
        made = {"unit": unit, "ours": ours, "error": ours / row["published"] - 1, "fitted": row.get("fitted", False)}
        rows.append({key: row.get(key) for key in keys} | made)
        print(f"{row['source']}, {row['what']}: {row['published']:g} {unit}, ours {ours:.4g}", flush=True)
    return pd.DataFrame(rows)


def errors(rows: pd.DataFrame) -> pd.DataFrame:
    """Median and worst error by kind, of rows that no fit has seen and that somebody measured."""
    held = rows[~rows["fitted"] & (rows["source"] != PEER)]
    return held.assign(error=held["error"].abs()).groupby("kind", sort=False)["error"].agg(["size", "median", "max"])


# ---- the fit ---------------------------------------------------------------------------------------------------------


def fitted() -> Iterator[str]:
    """Two figures of ``h100-sxm-te`` by two rows, which they meet: a factor on shares of arithmetic, and permutation's.

    A layer's time is linear in the inverse of both, so that three points settle them.
    """
    stated = parse_yaml(FILE.read_text())
    rows = [row for row in stated["rows"] if row.get("fitted")]
    comparisons = [compared(stated["configs"][row["config"]], row.get("set", {})) for row in rows]
    known, like = Device.named(FITTED), Device.named(LIKE)

    def made(by_factor: float, by_permutation: float) -> Device:
        shares = Curve(tuple((knot, share / by_factor) for knot, share in like.arithmetic_efficiency.root))
        return known.model_copy(update={"arithmetic_efficiency": shares, "permute_efficiency": 1 / by_permutation})

    def layers_ms(*inverses: float) -> np.ndarray:
        return np.array([Run(replace(one, device=made(*inverses))).us[TOTAL] / 1e3 for one in comparisons])

    base = layers_ms(1.0, 1.0)
    slopes = np.stack([layers_ms(2.0, 1.0) - base, layers_ms(1.0, 2.0) - base], axis=1)
    device = made(*1 + np.linalg.solve(slopes, [row["published"] for row in rows] - base))
    yield f"permute_efficiency: {device.permute_efficiency:.3g}\narithmetic_efficiency:"
    yield from (f"  - [{knot:g}, {share:.3g}]" for knot, share in device.arithmetic_efficiency.root)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("results/reference"), help="folder (default: %(default)s)")
    parser.add_argument("--fit", action="store_true", help="print fitted figures; write nothing")
    options = parser.parse_args()
    if options.fit:
        print("\n".join(fitted()))
        return
    rows = table()
    rows.to_csv(options.out / "clusters.csv", index=False, float_format="%.6g")
    print(errors(rows).to_string(float_format="{:.3f}".format))


if __name__ == "__main__":
    main()
