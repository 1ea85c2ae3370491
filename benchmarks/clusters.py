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
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch

from moe_ep_bench.bench.checks import VIRTUAL
from moe_ep_bench.bench.comparison import Comparison
from moe_ep_bench.bench.plan import plan_experiments
from moe_ep_bench.bench.virtual import Emulation, modelled_times
from moe_ep_bench.config.files import experiments_of, override
from moe_ep_bench.cost_model.curve import Curve
from moe_ep_bench.cost_model.devices import Device
from moe_ep_bench.files import parse_yaml
from moe_ep_bench.schema import TOTAL

FILE = Path(__file__).with_suffix(".yaml")
FITTED, LIKE = "h100-sxm-te", "h100-sxm"

Row = dict[str, Any]


def compared(config: Row, settings: Row) -> Comparison:
    """A config of ``clusters.yaml`` with some settings, planned."""
    raw = copy.deepcopy(config)
    raw = {"name": "clusters", "policies": [{"name": "topk"}], **raw}
    raw["workload"] = {"kind": "synthetic", "num_batches": 1, **raw["workload"]}
    override(raw, {}, [f"{key}={value}" for key, value in settings.items()])
    (comparison,) = plan_experiments(FILE, experiments_of(FILE, raw, {}), VIRTUAL, on_cpu=True, try_out=False)
    return comparison


def phases_us(comparison: Comparison) -> dict[str, float]:
    """Microseconds of native by phase, and in all, of the rank that ends last."""
    emulation = Emulation(comparison, comparison.cases[:1], torch.device("cpu"), lambda _: None)
    emulation.time(partial(modelled_times, comparison))
    times_RC = emulation.samples[comparison.cases[0].case_id][:, 0]
    last = times_RC[:, emulation.columns.index(TOTAL)].argmax()
    return {name: float(us) for name, us in zip(emulation.columns, times_RC[last], strict=True)}


OURS: dict[str, Callable[[Comparison], float]] = {"layer_ms": lambda comparison: phases_us(comparison)[TOTAL] / 1e3}


def ours_of(row: Row, stated: Row) -> float:
    """Our value of a row of ``clusters.yaml``, in its unit."""
    return OURS[row["ours"]](compared(stated["configs"][row["config"]], row.get("set", {})))


def table() -> pd.DataFrame:
    """A row for each published number, with ours and its error."""
    stated = parse_yaml(FILE.read_text())
    rows = []
    for row in stated["rows"]:
        ours = ours_of(row, stated)
        about = {key: row.get(key) for key in ("source", "kind", "what", "published", "tolerance")}
        unit = row["ours"].partition("_")[2]
        rows.append({**about, "unit": unit, "ours": ours, "error": ours / row["published"] - 1,
                     "fitted": row.get("fitted", False)})  # fmt: skip
    return pd.DataFrame(rows)


def errors(rows: pd.DataFrame) -> pd.DataFrame:
    """Median and worst error by kind, of rows that no fit has seen."""
    held = rows[~rows["fitted"]]
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
        return np.array([OURS["layer_ms"](replace(one, device=made(*inverses))) for one in comparisons])

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
    rows.to_csv(options.out / "clusters.csv", index=False, float_format="%.4g")
    print(rows.to_string(index=False, float_format="{:.3g}".format))
    print(errors(rows).to_string(float_format="{:.3f}".format))


if __name__ == "__main__":
    main()
