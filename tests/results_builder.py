"""Write a run directory whose speedups, waits and drops are known in advance."""

from __future__ import annotations

import contextlib
import io
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from moe_ep_bench.analysis.show import show
from moe_ep_bench.results import RunDirectory
from moe_ep_bench.schema import SCHEMA_VERSION, TOTAL, UNACCOUNTED

# Shares of a layer's work; the rank that is not the slowest waits at combine for the rest.
_WORK = {
    "gate": 0.04,
    "policy": 0.06,
    "metadata": 0.05,
    "permute": 0.15,
    "dispatch": 0.15,
    "experts": 0.44,
    "combine": 0.1,
}
_UNACCOUNTED = 1 - sum(_WORK.values())
FAST_RANK = 0.8  # of the slowest rank's work
HIDDEN_SIZE, FFN_SIZE = 256, 128
QUIET_MACHINE = {
    "wall_s": 10.0,
    "num_cores": 8,
    "own_cpu_s": 10.0,
    "machine_cpu_s": 10.0,
    "stolen_s": 0.0,
    "sm_clock_mhz": [1900.0, 1980.0, 1980.0],
    "throttle_shares": {},
    "notes": [],
}
CEILINGS = {"matmul_size": 8192, "matmul_tflops": 0.5, "copy_gbps": 20.0}


@dataclass
class FakeCase:
    """A case whose layer time is ``native_us / speedup``.

    ``dropped`` and ``mass`` are the shares that the routing rows must come to; ``expert_load`` the pairs per expert of
    the whole batch over the mean (the default is native's skew), or a row of these for each source rank.
    """

    policy: str
    role: str = "policy"
    params: Mapping[str, Any] = field(default_factory=dict)
    label: str = ""
    speedup: float = 1.0
    dropped: float = 0.0
    mass: float = 1.0
    expert_load: np.ndarray | None = None
    padding_pairs: int = 0  # of every rank and batch
    looks_past_top_k: bool = False
    status: str = "ok"
    reason: str | None = None
    phase_factors: Mapping[str, float] = field(default_factory=dict)  # so many times as long, on every rank

    def __post_init__(self) -> None:
        gamma = self.params.get("capacity_factor")
        self.label = self.label or (self.policy if gamma is None else f"{self.policy} gamma {gamma:g}")


@dataclass
class FakeComparison:
    comparison_id: str = "c0"
    facts: Mapping[str, Any] = field(default_factory=dict)
    cases: Sequence[FakeCase] = ()
    num_batches: int = 10
    num_iterations: int = 6
    noise: float = 0.01  # standard deviation of the log of a layer time, independent between cases
    probe_overhead: float = 0.005
    native_us: float = 2000.0
    num_ranks: int = 2
    num_experts: int = 8
    tokens: int = 4096
    num_launches: int = 1
    launch_noise: float = 0.0  # standard deviation of the log of a case's layer time between launches
    host_share: float = 0.3  # host time of an iteration over its time
    kinds: Sequence[str] = ("plain", "breakdown")
    conditions: Mapping[str, Any] = field(default_factory=dict)

    def case_id(self, case: FakeCase) -> str:
        return f"{self.comparison_id}-{list(map(id, self.cases)).index(id(case))}"

    def described(self) -> dict[str, Any]:
        return {
            "title": f"Tiny-MoE, EP {self.num_ranks}, {self.tokens:,} tokens",
            "model": "Tiny-MoE",
            "scale": 1.0,
            "num_experts": self.num_experts,
            "top_k": 2,
            "hidden_size": HIDDEN_SIZE,
            "ffn_hidden_size": FFN_SIZE,
            "num_ranks": self.num_ranks,
            "num_replicas": 1,
            "world_size": self.num_ranks,
            "num_tokens": self.tokens,
            "num_batches": self.num_batches,
            "dtype": "bfloat16",
            "backend": "nccl",
            "experts": {"requested": "auto", "ran": "te"},
            "permute": {"requested": "auto", "ran": "fused"},
            "flush_l2": False,
            "oversubscribed": False,
            "random_weights": True,
            "departures": [],
            "workload": {"kind": "synthetic", "description": "Zipf 0.8", "tail_model": None},
            **self.facts,
        }


def shown_text(directory: Path) -> str:
    """What ``show`` prints of a directory."""
    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        assert show([directory], "text") == 0
    return text.getvalue()


def standard_cases() -> list[FakeCase]:
    return [
        FakeCase("token_drop", params={"capacity_factor": 1.0}, speedup=1.5, dropped=0.25, mass=0.8),
        FakeCase("native_balanced", role="ceiling", label="native, balanced", speedup=1.6),
        FakeCase("topk", speedup=1.0),
        FakeCase("native", role="noise", label="native again"),
        FakeCase("native", role="baseline"),
    ]


def write_run(
    root: Path,
    comparisons: Sequence[FakeComparison],
    mode: str = "run",
    seed: int = 0,
    environment: Mapping[str, Any] | None = None,
    scope: str = "layer",
) -> Path:
    files = RunDirectory(root)
    generator = np.random.default_rng(seed)
    cases: dict[str, Any] = {}
    for comparison in comparisons:
        samples: list[list[dict[str, Any]]] = [[] for _ in range(comparison.num_launches)]
        routing = []
        for case in comparison.cases:
            case_id = comparison.case_id(case)
            cases[case_id] = {
                "comparison_id": comparison.comparison_id,
                "policy": case.policy,
                "policy_params": dict(case.params),
                "label": case.label,
                "role": case.role,
                "looks_past_top_k": case.looks_past_top_k,
            }
            identity = _identity(comparison, case, case_id, mode)
            if case.status == "ok":
                for launch in range(comparison.num_launches):
                    identity["run_id"] = f"r{launch}"
                    rows = _timing_rows(comparison, case, generator)
                    samples[launch].append(_columns(rows, identity))
                routing.append(_columns(_routing_rows(comparison, case), identity))
            else:
                samples[0].append(identity)
        for launch, rows in enumerate(samples):
            conditions = _conditions(comparison, launch)
            files.write("samples", comparison.comparison_id, rows, launch, conditions=conditions)
        if routing:
            files.write("routing", comparison.comparison_id, routing)
    files.write_run(
        {
            "schema_version": SCHEMA_VERSION,
            "run_id": "r0",
            "mode": mode,
            "scope": scope,
            "created": "2026-01-01T00:00:00",
            "config": {},
            "hashes": {},
            "environment": {
                "device_name": "NVIDIA Fake 80GB",
                "num_devices": 2,
                "hostname": "node",
                "torch": "2.13",
                **(environment or {}),
            },
            "comparisons": {c.comparison_id: c.described() for c in comparisons},
            "cases": cases,
        }
    )
    return root


def _conditions(comparison: FakeComparison, launch: int) -> dict[str, Any]:
    rank = {
        "hostname": "node",
        "machine": QUIET_MACHINE,
        "ceilings": CEILINGS,
        "peak_memory_bytes": 3 * 2**30,
        **comparison.conditions.get("rank", {}),
    }
    return {
        "run_id": f"r{launch}",
        "warm_up": {"rounds": 3, "change": 0.01, "settled": True, **comparison.conditions.get("warm_up", {})},
        "waiting": comparison.conditions.get("waiting"),
        "ranks": [rank] * comparison.num_ranks,
    }


def _identity(comparison: FakeComparison, case: FakeCase, case_id: str, mode: str) -> dict[str, Any]:
    about = {"run_id": "r0", "case_id": case_id, "comparison_id": comparison.comparison_id, "mode": mode}
    return {**about, "status": case.status, "reason": case.reason}


def _columns(rows: list[dict[str, Any]], identity: Mapping[str, Any]) -> dict[str, list[Any]]:
    columns = {name: [row[name] for row in rows] for name in rows[0]}
    return {**columns, **{name: [value] * len(rows) for name, value in identity.items()}}


def _timing_rows(comparison: FakeComparison, case: FakeCase, generator: np.random.Generator) -> list[dict[str, Any]]:
    rows = []
    longer = sum(_WORK.get(phase, 0) * (times - 1) for phase, times in case.phase_factors.items())
    of_launch = float(np.exp(comparison.launch_noise * generator.standard_normal()))
    for batch in range(comparison.num_batches):
        for iteration in range(comparison.num_iterations):
            for kind in comparison.kinds:
                factor = 1.0 if kind == "plain" else 1 + comparison.probe_overhead
                noise = float(np.exp(comparison.noise * generator.standard_normal()))
                layer_us = comparison.native_us / case.speedup * factor * noise * of_launch
                for rank in range(comparison.num_ranks):
                    where = {"rank": rank, "batch": batch, "iteration": iteration, "kind": kind}
                    # Plain: the fast rank ends early, so that only a maximum over ranks gives the layer's time.
                    if kind == "plain":
                        time_us = layer_us * (1 + longer) * (1.0 if rank == 0 else FAST_RANK)
                        host_us = comparison.host_share * time_us
                        rows.append({**where, "phase": TOTAL, "time_us": time_us, "host_us": host_us})
                    else:
                        phases = _phases(layer_us, rank, case.phase_factors).items()
                        rows += [{**where, "phase": p, "time_us": t, "host_us": None} for p, t in phases]
    return rows


def _phases(layer_us: float, rank: int, factors: Mapping[str, float]) -> dict[str, float]:
    """Rank 0 is the slowest by a hair; the others do less expert work and wait for it before combine."""
    phases = {phase: share * layer_us for phase, share in _WORK.items()}
    phases |= {"wait_combine": 0.0, UNACCOUNTED: _UNACCOUNTED * layer_us, TOTAL: layer_us}
    if rank:
        saved_us = (1 - FAST_RANK) * phases["experts"]
        phases["experts"] -= saved_us
        phases["wait_combine"] = 0.99 * saved_us
        phases[TOTAL] -= 0.01 * saved_us
    for phase, times in factors.items():
        phases[TOTAL] += phases[phase] * (times - 1)
        phases[phase] *= times
    return phases


def assert_nothing_is_clipped(figure: Figure) -> None:
    """Texts, legends and panels of a figure lie on its sheet, and none upon another."""
    figure.draw_without_rendering()
    boxes = [artist.get_window_extent() for artist in (*figure.texts, *figure.legends)]
    for axes in figure.axes:
        heading = axes._left_title  # it may span its row of panels: a box of its own
        boxes += [heading.get_window_extent()] if heading.get_text() else []
        heading.set_visible(False)
        boxes.append(axes.get_tightbbox())
        heading.set_visible(True)
    for box in boxes:
        assert min(box.x0, box.y0) >= 0
        assert box.x1 <= figure.bbox.x1
        assert box.y1 <= figure.bbox.y1
    assert not any(one.overlaps(other) for one, other in itertools.combinations(boxes, 2))


def native_load(num_experts: int) -> np.ndarray:
    """Zipf-like load over the mean, shuffled so that a figure has something to sort."""
    load_E = 1 / np.arange(1, num_experts + 1) ** 0.6
    return np.random.default_rng(1).permutation(load_E / load_E.mean())


def _routing_rows(comparison: FakeComparison, case: FakeCase) -> list[dict[str, Any]]:
    """Split a batch 3 to 1 between rank 0 and the rest: plain means over ranks give the wrong answer."""
    num_ranks, rows = comparison.num_ranks, []
    load_E = native_load(comparison.num_experts) if case.expert_load is None else case.expert_load
    top_k = comparison.described()["top_k"]
    for batch in range(comparison.num_batches):
        for rank in range(num_ranks):
            share = 1.0 if num_ranks == 1 else 0.75 if rank == 0 else 0.25 / (num_ranks - 1)
            tokens = round(comparison.tokens * share)
            pairs = tokens * top_k
            # Shares that differ between ranks and come to the case's own only when sums are divided: of pairs, where
            # rank 0 has three quarters, and of mass, where its top-k holds twice the others' of every token.
            side = 0 if num_ranks == 1 or case.mass == 1 else 1 if rank == 0 else -3
            own_load_E = load_E if load_E.ndim == 1 else load_E[rank]
            load_of_rank_E = np.round(own_load_E * pairs / comparison.num_experts).astype(int)
            rows.append(
                {
                    "rank": rank,
                    "batch": batch,
                    "num_tokens": tokens,
                    "load_E": load_of_rank_E.tolist(),
                    "load_R": load_of_rank_E.reshape(num_ranks, -1).sum(axis=1).tolist(),
                    "num_pairs": int(load_of_rank_E.sum()),
                    "padding_pairs": case.padding_pairs,
                    "num_topk_pairs": pairs,
                    "num_dropped_pairs": round((case.dropped + side * min(0.02, case.dropped / 4)) * pairs),
                    "retained_mass_topk": case.mass + side * min(0.02, case.mass / 8) * (1 if rank == 0 else 2),
                    "topk_share": 0.8 if rank == 0 else 0.4,
                    "output_error": 1 - case.mass,
                    "crossing_pairs": int(load_of_rank_E.sum()) // 2,
                    "crossing_copies": int(load_of_rank_E.sum()) // 4,
                }
            )
    return rows
