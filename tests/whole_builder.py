"""Write a directory of whole models in which policies change the MoE layers' time alone: Amdahl's law holds.

The MoE layers are those of ``results_builder``: ``MOE_LAYERS``, each with the same share. What is added to every
case alike, ``ELSEWHERE_US``, is what no policy changes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow.compute as pc
import pyarrow.parquet as pq
from results_builder import FakeCase, FakeComparison, standard_cases, write_run

from moe_ep_bench.results import RunDirectory
from moe_ep_bench.schema import TOTAL, UNACCOUNTED

ELSEWHERE_US = {"embedding": 50.0, "attention": 600.0, "dense": 150.0, "rest": 100.0, "output": 100.0}
ELSEWHERE_TOTAL_US = sum(ELSEWHERE_US.values())
MOE_LAYERS = (1, 2)
# Native's MoE layers are two thirds of a pass; the policy runs them one and a half times as fast.
WHOLE_CASES = [
    FakeCase("token_drop", params={"capacity_factor": 2.0}, speedup=1.5, dropped=0.05, mass=0.97),
    *(case for case in standard_cases() if case.policy != "token_drop"),
]
_OF_LAYER_0 = ("dense",)
_OF_NONE = ("embedding", "output")


def whole_facts(of_layers: int = 3, moe_layers: Sequence[int] = MOE_LAYERS, **facts: Any) -> dict[str, Any]:
    whole = {
        "num_layers": 1 + len(moe_layers),
        "of_layers": of_layers,
        "moe_layers": list(moe_layers),
        "of_moe_layers": of_layers - 1,
        "context_length": 0,
    }
    return {"whole": whole, **facts}


def write_whole(
    root: Path,
    cases: Sequence[FakeCase],
    *,
    of_layers: int = 3,
    seed: int = 0,
    elsewhere_noise: float = 0.0,
    moe_layers: Sequence[int] = MOE_LAYERS,
    mode: str = "run",
    **changes: Any,
) -> Path:
    """A directory of one comparison; native's MoE layers take ``native_us``, twice as long as the rest of the pass.

    Args:
        elsewhere_noise: standard deviation of the log of ``ELSEWHERE_TOTAL_US`` in plain iterations.
    """
    facts: Mapping[str, Any] = whole_facts(of_layers, moe_layers, **changes.pop("facts", {}))
    settings = {"native_us": 2 * ELSEWHERE_TOTAL_US, "num_iterations": 2, "noise": 0.002, **changes}
    comparison = FakeComparison(facts=facts, cases=cases, **settings)
    write_run(root, [comparison], mode, scope="model", seed=seed)
    files, generator = RunDirectory(root), np.random.default_rng(seed)
    key, ok = comparison.comparison_id, [comparison.case_id(case) for case in cases if case.status == "ok"]
    launches = [pq.read_table(path).to_pandas() for path in files.parts("samples")[key]]
    for case_id in ok:
        samples = pd.concat(rows[rows.case_id == case_id] for rows in launches)
        of_pass = _with_elsewhere(samples, elsewhere_noise, generator)
        rows = pd.concat([of_pass[of_pass.phase.isin([TOTAL, UNACCOUNTED])], _layers(samples, moe_layers)])
        for launch, own in rows.astype({"layer": "Int64"}).groupby("launch"):
            files.write("samples", key, [_columns(own.drop(columns="launch"))], launch, replaces=[case_id])
        routing = pq.read_table(files.path("routing", key)).filter(pc.field("case_id") == case_id).to_pandas()
        of_all = pd.concat([routing.assign(layer=layer) for layer in moe_layers])
        files.write("routing", key, [_columns(of_all)], replaces=[case_id])
    return root


def _columns(rows: pd.DataFrame) -> dict[str, list[Any]]:
    """Columns as lists, with None for what is missing."""
    return {
        name: [None if value is pd.NA or value != value else value for value in column]
        if name not in ("load_E", "load_R")
        else list(column)
        for name, column in rows.to_dict("list").items()
    }


def _with_elsewhere(samples: pd.DataFrame, noise: float, generator: np.random.Generator) -> pd.DataFrame:
    """The layers' samples with what is no MoE layer beside them."""
    factors = np.where(samples.kind == "plain", np.exp(noise * generator.standard_normal(len(samples))), 1.0)
    longer = samples.assign(time_us=samples.time_us + ELSEWHERE_TOTAL_US * factors * (samples.phase == TOTAL))
    return pd.concat([longer, *_added(samples).values()], ignore_index=True)


def _added(samples: pd.DataFrame) -> dict[str, pd.DataFrame]:
    totals = samples[(samples.kind == "breakdown") & (samples.phase == TOTAL)]
    return {phase: totals.assign(phase=phase, time_us=time_us) for phase, time_us in ELSEWHERE_US.items()}


def _layers(samples: pd.DataFrame, moe_layers: Sequence[int]) -> pd.DataFrame:
    """Each MoE layer has its share of the layers' phases; of attention and the rest every layer its own."""
    phases = samples[(samples.kind == "breakdown") & ~samples.phase.isin([TOTAL, UNACCOUNTED])]
    share = phases.time_us / len(moe_layers)
    found = [phases.assign(layer=layer, time_us=share) for layer in moe_layers]
    for phase, rows in _added(samples).items():
        its = (None,) if phase in _OF_NONE else (0,) if phase in _OF_LAYER_0 else (0, *moe_layers)
        found += [rows.assign(layer=layer, time_us=rows.time_us / len(its)) for layer in its]
    rows = pd.concat(found, ignore_index=True)
    return rows.assign(layer=rows.layer.astype("Int64"))
