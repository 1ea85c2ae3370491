"""Write results directories, of layers or of whole models, whose speedups, waits and drops are known in advance.

In a whole model policies change the time of its MoE layers alone, which share one layer's time; ``ELSEWHERE_US``, what
no policy changes, is added to every case. So Amdahl's law holds.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from moe_ep_bench.analysis.cases import CASE, cases
from moe_ep_bench.analysis.show import show
from moe_ep_bench.analysis.store import STEP, TIMES, Store
from moe_ep_bench.cost_model.devices import Device
from moe_ep_bench.cost_model.links import Links
from moe_ep_bench.facts import CaseFacts
from moe_ep_bench.facts.words import case_label, label_words
from moe_ep_bench.policies.contract import Setting
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
FAST_RANK = 0.8  # of the slowest rank's work
ELSEWHERE_US = {"embedding": 50.0, "attention": 600.0, "dense": 150.0, "rest": 100.0, "output": 100.0}
ELSEWHERE_TOTAL_US = sum(ELSEWHERE_US.values())
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


@dataclass
class FakeCase:
    """A case whose layer time is ``native_us / speedup``.

    ``dropped``, ``rerouted`` and ``mass`` are the shares that the routing rows must come to; ``expert_load`` the pairs
    per expert of the whole batch over the mean (the default is native's skew).
    """

    policy: str
    role: str = "policy"
    params: Mapping[str, Any] = field(default_factory=dict)
    defaults: Sequence[str] = ()  # of params, those at their defaults
    speedup: float = 1.0
    dropped: float = 0.0
    rerouted: float = 0.0
    mass: float = 1.0
    expert_load: np.ndarray | None = None
    looks_past_top_k: bool = False
    by_torch: bool = False
    status: str = "ok"
    reason: str = "lost"  # where it is not ok
    phase_factors: Mapping[str, float] = field(default_factory=dict)  # so many times as long, on every rank
    sm_clock_mhz: Mapping[int, float] = field(default_factory=dict)  # by rank

    @property
    def settings(self) -> list[Setting]:
        return [Setting(key, value, is_default=key in self.defaults) for key, value in self.params.items()]

    @property
    def label(self) -> str:
        return label_words(self.policy, self.settings, self.role)


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
    moe_layers: Sequence[int] = ()  # of a whole model
    host_share: float = 0.3  # what the host is busy in a plain iteration over its time
    kinds: Sequence[str] = ("plain", "breakdown")
    conditions: Mapping[str, Any] = field(default_factory=dict)
    unclocked: Sequence[str] = ()  # policies whose host waits where no clock sees it

    def case_id(self, case: FakeCase) -> str:
        return f"{self.comparison_id}-{list(map(id, self.cases)).index(id(case))}"

    def described(self) -> dict[str, Any]:
        return {
            "title": f"Tiny-MoE, EP {self.num_ranks}, {self.tokens:,} tokens",
            "model": "Tiny-MoE",
            "scale": 1.0,
            "num_experts": self.num_experts,
            "top_k": 2,
            "num_ranks": self.num_ranks,
            "num_replicas": 1,
            "world_size": self.num_ranks,
            "num_tokens": self.tokens,
            "num_batches": self.num_batches,
            "dtype": "bfloat16",
            "backend": "nccl",
            "experts": {"requested": "auto", "ran": "te"},
            "permute": {"requested": "auto", "ran": "fused"},
            "oversubscribed": False,
            "random_weights": True,
            "departures": [],
            "workload": {"kind": "synthetic", "description": "Zipf 0.8", "tail_model": None},
            **self.facts,
        }

    def conditions_of(self, launch: int) -> dict[str, Any]:
        rank = {
            "hostname": "node",
            "machine": QUIET_MACHINE,
            "ceilings": {"matmul_tflops": 0.5},
            "peak_memory_bytes": 3 * 2**30,
            **self.conditions.get("rank", {}),
        }
        return {
            "run_id": f"r{launch}",
            "warm_up": {"change": 0.01, "settled": True, **self.conditions.get("warm_up", {})},
            "ranks": [rank] * self.num_ranks,
            "unclocked": {self.case_id(case): ["mine.py:7"] for case in self.cases if case.policy in self.unclocked},
        }


def standard_cases() -> list[FakeCase]:
    return [
        FakeCase("token_drop", params={"capacity_factor": 1.0}, speedup=1.5, dropped=0.25, mass=0.8),
        FakeCase("native_balanced", role="balanced", speedup=1.6),
        FakeCase("topk", speedup=1.0),
        FakeCase("native", role="noise"),
        FakeCase("native", role="baseline"),
    ]


# Native's MoE layers are two thirds of a pass; the policy runs them one and a half times as fast.
WHOLE_CASES = [
    FakeCase("token_drop", params={"capacity_factor": 2.0}, speedup=1.5, dropped=0.05, mass=0.97),
    *(case for case in standard_cases() if case.policy != "token_drop"),
]


def label_in(case: Mapping[str, Any]) -> str:
    """The label of a case of run.json."""
    return case_label(CaseFacts.model_validate(case))


# ---- directories -----------------------------------------------------------------------------------------------------


def write_run(
    root: Path,
    comparisons: Sequence[FakeComparison],
    mode: str = "run",
    seed: int = 0,
    environment: Mapping[str, Any] | None = None,
    scope: str = "layer",
) -> Path:
    files, generator, cases = RunDirectory(root), np.random.default_rng(seed), {}
    for one in comparisons:
        samples: list[list[dict[str, Any]]] = [[] for _ in range(one.num_launches)]
        routing = []
        for case in one.cases:
            case_id, about = one.case_id(case), {"run_id": "r0", "comparison_id": one.comparison_id, "mode": mode}
            cases[case_id] = {
                "comparison_id": one.comparison_id,
                "policy": case.policy,
                "settings": list(map(asdict, case.settings)),
                "role": case.role,
                "looks_past_top_k": case.looks_past_top_k,
                "by_torch": case.by_torch,
            }
            reason = None if case.status == "ok" else case.reason
            about |= {"case_id": case_id, "status": case.status, "reason": reason}
            if case.status != "ok":
                samples[0].append(about)
                continue
            for launch, of_launch in enumerate(samples):
                of_launch.append({**_samples(one, case, generator), **about, "run_id": f"r{launch}"})
            routing.append({**_routing(one, case), **about})
        for launch, rows in enumerate(samples):
            files.write("samples", one.comparison_id, rows, launch, conditions=one.conditions_of(launch))
        if routing:
            files.write("routing", one.comparison_id, routing)
    where = {"device_name": "NVIDIA Fake 80GB", "num_devices": 2, "hostname": "node", "torch": "2.13"}
    described = {"comparisons": {one.comparison_id: one.described() for one in comparisons}, "cases": cases}
    job = {"run_id": "r0", "created": "2026-01-01T00:00:00", "config": {}, "hashes": {}, "mode": mode, "scope": scope}
    described |= {**job, "schema_version": SCHEMA_VERSION, "environment": {**where, **(environment or {})}}
    files.write_run(described)
    return root


def modelled_facts(
    device: str | None = "h100-sxm", links: str = "h100-nvlink4", bandwidth_scale: float = 1.0
) -> dict[str, Any]:
    """Facts of a modelled device, or of this one (None), behind modelled links."""
    found = Links.named(links).scaled(bandwidth_scale).facts(bandwidth_scale).model_dump(mode="json")
    return {"links": found, "device": device and Device.named(device).facts.model_dump(mode="json")}


def whole_facts(of_layers: int = 3, moe_layers: Sequence[int] = (1, 2), **facts: Any) -> dict[str, Any]:
    whole = {"num_layers": 1 + len(moe_layers), "of_layers": of_layers, "context_length": 0}
    return {"whole": {**whole, "moe_layers": list(moe_layers), "of_moe_layers": of_layers - 1}, **facts}


def write_whole(
    root: Path,
    cases: Sequence[FakeCase],
    *,
    of_layers: int = 3,
    seed: int = 0,
    moe_layers: Sequence[int] = (1, 2),
    mode: str = "run",
    **changes: Any,
) -> Path:
    """A directory of one comparison; native's MoE layers take ``native_us``, twice as long as the rest of the pass."""
    facts = whole_facts(of_layers, moe_layers, **changes.pop("facts", {}))
    settings = {"native_us": 2 * ELSEWHERE_TOTAL_US, "num_iterations": 2, "noise": 0.002, **changes}
    comparison = FakeComparison(facts=facts, cases=cases, moe_layers=moe_layers, **settings)
    return write_run(root, [comparison], mode, seed, scope="model")


# ---- rows ------------------------------------------------------------------------------------------------------------


def _samples(one: FakeComparison, case: FakeCase, generator: np.random.Generator) -> dict[str, pd.Series]:
    """Columns of one case in one launch."""
    of_launch = np.exp(one.launch_noise * generator.standard_normal())
    axes = {"batch": range(one.num_batches), "iteration": range(one.num_iterations), "kind": one.kinds}
    steps = pd.MultiIndex.from_product(axes.values(), names=axes).to_frame(index=False)
    noise = of_launch * np.exp(one.noise * generator.standard_normal(len(steps)))
    probed = np.where(steps["kind"] == "plain", 1.0, 1 + one.probe_overhead)
    steps["layer_us"] = one.native_us / case.speedup * probed * noise
    parts = pd.DataFrame(_parts(one, case), columns=["kind", "rank", "layer", "phase", "share", "us"])
    rows = steps.merge(parts, on="kind")
    time_us = rows["share"] * rows["layer_us"] + rows["us"]
    host_us = (one.host_share * time_us).where(rows["kind"] == "plain")
    rows = rows.assign(time_us=time_us, host_us=2 * host_us, host_busy_us=host_us)  # half of it waits for the GPU
    rows["sm_clock_mhz"] = rows["rank"].map(case.sm_clock_mhz.get).where(rows["phase"] == TOTAL)
    rows["layer"] = rows["layer"].astype("Int64")
    return dict(rows.drop(columns=["layer_us", "share", "us"]).items())


def _parts(one: FakeComparison, case: FakeCase) -> Iterator[tuple]:
    """Kind, rank, layer, phase, its share of a layer's time, and what it takes beside that."""
    longer = sum(_WORK.get(phase, 0) * (times - 1) for phase, times in case.phase_factors.items())
    elsewhere_us = ELSEWHERE_TOTAL_US if one.moe_layers else 0.0
    layers = one.moe_layers or (None,)
    for rank in range(one.num_ranks):
        # Plain: the fast rank ends early, so that only a maximum over ranks gives the layer's time.
        yield "plain", rank, None, TOTAL, (1 + longer) * (FAST_RANK if rank else 1.0), elsewhere_us
        phases = _phases(rank, case.phase_factors)
        yield "breakdown", rank, None, TOTAL, phases.pop(TOTAL), elsewhere_us
        yield "breakdown", rank, None, UNACCOUNTED, phases.pop(UNACCOUNTED), 0.0
        for phase, layer in itertools.product(phases, layers):
            yield "breakdown", rank, layer, phase, phases[phase] / len(layers), 0.0
        for phase, time_us in ELSEWHERE_US.items() if one.moe_layers else ():
            of = {"embedding": (None,), "output": (None,), "dense": (0,)}.get(phase, (0, *layers))
            yield from (("breakdown", rank, layer, phase, 0.0, time_us / len(of)) for layer in of)


def _phases(rank: int, factors: Mapping[str, float]) -> dict[str, float]:
    """Rank 0 is the slowest by a hair; the others do less expert work and wait for it before combine."""
    phases = {**_WORK, "wait_combine": 0.0, UNACCOUNTED: 1 - sum(_WORK.values()), TOTAL: 1.0}
    if rank:
        saved = (1 - FAST_RANK) * phases["experts"]
        phases["experts"] -= saved
        phases["wait_combine"] = 0.99 * saved
        phases[TOTAL] -= 0.01 * saved
    for phase, times in factors.items():
        phases[TOTAL] += phases[phase] * (times - 1)
        phases[phase] *= times
    return phases


def _routing(one: FakeComparison, case: FakeCase) -> dict[str, pd.Series]:
    """Split a batch 3 to 1 between rank 0 and the rest: plain means over ranks give the wrong answer."""
    num_ranks, top_k = one.num_ranks, one.described()["top_k"]
    load_E, rows = native_load(one.num_experts) if case.expert_load is None else case.expert_load, []
    axes = one.moe_layers or (None,), range(one.num_batches), range(num_ranks)
    for layer, batch, rank in itertools.product(*axes):
        share = 1.0 if num_ranks == 1 else 0.75 if rank == 0 else 0.25 / (num_ranks - 1)
        pairs = round(one.tokens * share) * top_k
        # Shares that differ between ranks and come to the case's own only when sums are divided: of pairs, where
        # rank 0 has three quarters, and of mass, where its top-k holds twice the others' of every token.
        side = 0 if num_ranks == 1 or case.mass == 1 else 1 if rank == 0 else -3
        load_of_rank_E = np.round(load_E * pairs / one.num_experts).astype(int)
        rows.append(
            {
                "rank": rank,
                "batch": batch,
                "layer": layer,
                "num_tokens": pairs // top_k,
                "load_E": load_of_rank_E.tolist(),
                "load_R": load_of_rank_E.reshape(num_ranks, -1).sum(axis=1).tolist(),
                "num_pairs": load_of_rank_E.sum(),
                "padding_pairs": 0,
                "num_topk_pairs": pairs,
                "num_dropped_pairs": round((case.dropped + side * min(0.02, case.dropped / 4)) * pairs),
                "num_rerouted_pairs": round(case.rerouted * pairs),
                "retained_mass_topk": case.mass + side * min(0.02, case.mass / 8) * (1 if rank == 0 else 2),
                "topk_share": 0.8 if rank == 0 else 0.4,
                "output_error": 1 - case.mass,
                "crossing_pairs": load_of_rank_E.sum() // 2,
                "crossing_copies": load_of_rank_E.sum() // 4,
            }
        )
    return dict(pd.DataFrame(rows).astype({"layer": "Int64"}).items())


def native_load(num_experts: int) -> np.ndarray:
    """Zipf-like load over the mean, shuffled so that a figure has something to sort."""
    load_E = 1 / np.arange(1, num_experts + 1) ** 0.6
    return np.random.default_rng(1).permutation(load_E / load_E.mean())


# ---- what is shown and drawn -----------------------------------------------------------------------------------------


def samples(store: Store) -> pd.DataFrame:
    """A row per case, launch, batch, iteration, kind, rank, layer and phase that occurred: ``time_us``.

    Phases of a whole model are each layer's own; ``layer`` is null where a phase belongs to none.
    """
    parts = []
    for one in store.directories:
        rows = one.samples.astype({"kind": object}).melt(STEP, TIMES, "phase", "time_us").dropna(subset="time_us")
        about = one.cases.assign(directory=one.comparisons[0].directory)[["directory", "case_id"]]
        parts.append(rows.join(about, on="case").drop(columns="case"))
    about = cases(store)[[*CASE, "role", "policy", "label"]]
    return pd.concat(parts).merge(about, on=["directory", "case_id"], how="left", validate="m:1")


def shown_text(directory: Path) -> str:
    """What ``show`` prints of a directory."""
    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        assert show([directory], "text") == 0
    return text.getvalue()


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


# Keys of run.json with words that a config or somebody else wrote, and reasons.
IN_WORDS = {"source", "departures", "why"}


def prose_in(directory: Path) -> list[str]:
    """Sentences in what run.json says of comparisons and cases."""

    def texts(value: Any, key: str = "") -> Iterator[tuple[str, str]]:
        if isinstance(value, str):
            yield key, value
        elif isinstance(value, dict | list):
            of_keys = value.items() if isinstance(value, dict) else ((key, one) for one in value)
            for name, one in of_keys:
                yield from texts(one, name)

    described = json.loads((directory / "run.json").read_text())
    found = texts([described["comparisons"], described["cases"]])
    return [text for key, text in found if key not in IN_WORDS and text.count(" ") > 1]
