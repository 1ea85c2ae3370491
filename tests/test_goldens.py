"""The numbers of this program do not move: routing, modelled times, answers, claims and figures beside frozen ones.

``tests/goldens/`` holds what the program gave when its numbers were frozen: a zip of CSV tables per run. Whole numbers
and words must be equal, floats to ``RTOL``. Frozen tables hold neither case ids nor file names: a row is found by its
policy, rank, batch and the like. Only the section "Reading results" knows how they lie on disk.

``python tests/goldens/make.py`` freezes what the present code gives. Do so only where a number should change.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import yaml
from matplotlib.figure import Figure

from moe_ep_bench.analysis import style
from moe_ep_bench.analysis.papers import load_claims, write_claims
from moe_ep_bench.analysis.validate import write_validation
from moe_ep_bench.bench.route import route
from moe_ep_bench.cli import main
from moe_ep_bench.results import ValidationDirectory

TESTS = Path(__file__).parent
GOLDENS = TESTS / "goldens"
CONFIGS = TESTS.parent / "configs"
REFERENCE = TESTS.parent / "results" / "reference"
TRACES = TESTS.parents[1] / "shared" / "traces"

# Sums in float64 and nine written digits differ by far less between machines.
RTOL = 1e-6
# What is left where equal numbers are subtracted.
ATOL = 1e-9
# A model's answers come from float32 matrix products, whose order of summation a BLAS library chooses. A sequence's KL
# is a difference of logarithms of about 5, so that 1e-7 of it is rounding whatever the KL is.
ANSWERS_RTOL, ANSWERS_ATOL = 1e-5, 2e-6

Spec = dict[str, Any]


# ---- What is frozen -------------------------------------------------------------------------------------------------

# All policies, with several settings each; a list as a value means one policy for each.
CAPACITIES: list[Spec] = [
    {
        "name": "token_drop",
        "capacity_factor": [0.7, 1.25],
        "metric": ["score", "order", "reverse_order", "random"],
        "granularity": ["expert", "device"],
    },
    {"name": "token_drop", "capacity_factor": [0, 2.0]},
    {"name": "token_drop", "capacity_factor": 0.3, "min_capacity": 2},
    {
        "name": "expanded_drop",
        "capacity_factor": [0.7, 1.25],
        "metric": ["score", "order", "random"],
        "granularity": ["expert", "device"],
    },
    {"name": "expanded_drop", "capacity_factor": 1.0, "num_candidates": [0, 2, 8], "scope": ["local", "global"]},
    {"name": "expanded_drop", "capacity_factor": 1.0, "max_experts_per_token": [2, 12]},
    {
        "name": "megatron_drop",
        "capacity_factor": [0.7, 1.3],
        "drop_policy": ["probs", "position"],
        "pad_to_capacity": [False, True],
    },
]
MODALITIES: list[Spec] = [
    {
        "name": ["token_drop", "expanded_drop"],
        "capacity_factor": 0.8,
        "modality": ["image_first", "text_first"],
        "granularity": ["expert", "device"],
    },
]
FEWER_EXPERTS: list[Spec] = [
    {"name": "expert_drop", "fraction": [0.1, 0.5]},
    {"name": "expert_drop", "count": 5},
    {"name": "dynamic_skip", "beta": [0.3, 0.6]},
    {"name": "pruned", "k0": [1, 3]},
    {"name": "pruned", "k0": 4, "p": 0.5},
    {"name": "oea", "k0": [1, 2, 3]},
    {"name": "oea", "k0": 3, "p": [0.3, 0.6]},
    {"name": "oea", "k0": 2, "k_max": [3, 8]},
    {"name": "oea", "k0": 2, "max_rank": [4, 12]},
    {"name": "oea", "k0": 1, "rank_fill": True},
    {"name": "lynx", "num_dropped": [2, 8]},
    {"name": "xshare", "k0": [0, 1, 2], "budget": [4, 16]},
    {"name": "xshare", "k0": 1, "mass_threshold": [0.5, 0.9]},
    {"name": "xshare", "scope": "request", "k0": [0, 1], "request_budget": [2, 6]},
    {"name": "xshare", "scope": "request", "k0": 1, "request_budget": 2, "budget": 4},
    {"name": "xshare", "scope": "rank", "k0": [0, 1], "rank_budget": [2, 6]},
]
BALANCE: list[Spec] = [
    {"name": "laser", "eps_high": [0.4, 0.9], "t_fix": 0.2, "c": [8, 16]},
    {"name": "laser", "eps_high": 0.9, "t_fix": 0.05, "c": 12, "trim": "random"},
    {"name": "laser", "eps_high": 1, "t_fix": 0, "c": 12, "chunk_size": 5},
    {"name": "load_only"},
    {"name": "load_only", "chunk_size": 4},
]
BANDS: list[Spec] = [
    {
        "name": "laser",
        "eps_high": {"0-8": 0.3, "9-25": 0.436},
        "t_fix": {"0-8": 0.313, "9-17": 0.1, "18-25": 0.313},
        "c": {"0-17": 10, "18-25": 20},
    },
]
ALL: list[Spec] = [{"name": "topk"}, *CAPACITIES, *FEWER_EXPERTS, *BALANCE]
FEW: list[Spec] = [
    {"name": "topk"},
    {"name": "token_drop", "capacity_factor": [1.0, 1.5]},
    {"name": "token_drop", "capacity_factor": 1.0, "granularity": "device"},
    {"name": "expanded_drop", "capacity_factor": 1.0},
    {"name": "expert_drop", "fraction": 0.1},
    {"name": "pruned", "k0": 3},
    {"name": "oea", "k0": 2},
    {"name": "xshare", "k0": 1, "budget": 8},
    {"name": "laser", "eps_high": 0.9, "t_fix": 0.1, "c": 8},
]
# Few, on a short text: each decision of a model's router that rounding may turn is one too many.
OF_ANSWERS: list[Spec] = [
    {"name": "token_drop", "capacity_factor": 1.0, "metric": ["score", "order", "random"]},
    {"name": "token_drop", "capacity_factor": 1.0, "granularity": "device"},
    {"name": "expanded_drop", "capacity_factor": [0.5, 1.0]},
    {"name": "megatron_drop", "capacity_factor": 1.0},
    {"name": "expert_drop", "fraction": 0.5},
    {"name": "dynamic_skip", "beta": 0.3},
    {"name": "pruned", "k0": 1},
    {"name": "oea", "k0": 1},
    {"name": "lynx", "num_dropped": 8},
    {"name": "xshare", "k0": 0, "budget": 8},
    {"name": "xshare", "scope": "request", "k0": 0, "request_budget": 2},
    {"name": "xshare", "scope": "rank", "k0": 1, "rank_budget": 2},
    {"name": "laser", "eps_high": 0.9, "t_fix": 0.3, "c": 8},
    {"name": "load_only"},
]
FEWEST: list[Spec] = [{"name": "token_drop", "capacity_factor": 1.0}, {"name": "oea", "k0": 2}]


def trace(name: str) -> str:
    return str(TRACES / f"{name}.safetensors")


INTENT, SUMMARY, TRANSLATION = (trace(f"deepseek-v2-lite-{name}") for name in ("intent", "summary", "translation"))
GPT_OSS = trace("gpt-oss-20b-mixed")


@dataclass(frozen=True)
class Golden:
    """A command on a config, and which of its tables are frozen.

    Attributes:
        config: what the config says, or a file whose values are changed.
        points: runs of their own by name, each with the dotted keys that it changes.
        tables: keys of ``TABLES``.
        traces: recordings without which this cannot be run.
    """

    command: str
    config: Spec | Path
    tables: tuple[str, ...]
    points: dict[str, Spec] = field(default_factory=lambda: {"": {}})
    traces: tuple[str, ...] = ()
    rtol: float = RTOL
    atol: float = ATOL


def synthetic(**values: Any) -> Spec:
    return {"kind": "synthetic", "num_batches": 2, "seed": 1, **values}


def recorded(**values: Any) -> Spec:
    return {"kind": "recorded", "num_batches": 1, "seed": 1, "tail": "popularity", **values}


ROUTED = {
    # Experts in groups, sigmoid scores, a selection bias, weights normalised and scaled.
    "route-grouped": Golden(
        "route",
        {
            "model": {"preset": "deepseek-v3"},
            "workload": synthetic(num_tokens=96, num_batches=1, peak_load=5.0, sequence_length=8),
            "layer": {"ep_size": 8, "seed": 1},
            "policies": [*FEW, *FEWER_EXPERTS, *BALANCE],
        },
        ("routing",),
    ),
    # Weights normalised, images before text.
    "route-normalised": Golden(
        "route",
        {
            "model": {"preset": "qwen3-30b-a3b"},
            "workload": synthetic(
                num_tokens=160,
                num_batches=1,
                peak_load=3.0,
                topk_share=0.6,
                neighbour_overlap=2.5,
                sequence_length=16,
                image_share=0.5,
            ),
            "layer": {"ep_size": 4},
            "policies": [*ALL, *MODALITIES],
        },
        ("routing",),
    ),
    # Steps of a few tokens, of requests with drafts, with padding, on ranks of different sizes.
    "route-decode": Golden(
        "route",
        {
            "model": {"preset": "olmoe-1b-7b"},
            "workload": synthetic(tokens_per_rank=12, sequence_length=2),
            "layer": {"ep_size": 2},
            "policies": FEW,
        },
        ("routing",),
        {
            "padding": {"workload.padding_per_rank": 3},
            "one rank": {"layer.ep_size": 1, "workload.sequence_length": 1},
        },
    ),
    # How synthetic scores are made.
    "route-synthetic": Golden(
        "route",
        {
            "model": {"preset": "olmoe-1b-7b"},
            "workload": synthetic(num_tokens=256),
            "layer": {"ep_size": 8},
            "policies": FEWEST,
        },
        ("routing",),
        {
            "unskewed": {},
            "rank load": {"workload.peak_load": 4.0, "workload.rank_load": 1.6},
            "sharp, alike": {"workload.peak_load": 2.0, "workload.topk_share": 0.7, "workload.neighbour_overlap": 2.5},
            **{
                f"{model} {skew}": {"model.preset": model, "workload.skew": skew, "layer.ep_size": 4}
                for model, skew in (
                    ("olmoe-1b-7b", "mixed"),
                    ("mixtral-8x7b", "single_domain"),
                    ("deepseek-v2-lite", "worst_layer"),
                    ("gpt-oss-120b", "single_domain"),
                    ("qwen1.5-moe-a2.7b", "mixed"),
                )
            },
        },
    ),
    # A recording of prefill: only the top-6 of 64 experts are known, the rest is assumed.
    "route-recorded": Golden(
        "route",
        {
            "model": {"preset": "deepseek-v2-lite"},
            "workload": recorded(trace=INTENT, num_tokens=160),
            "layer": {"ep_size": 4},
            "policies": [*ALL, *BANDS],
        },
        ("routing",),
        {
            "layer 2": {"workload.layer": 2},
            "layer 14, uniform tail": {"workload.layer": 14, "workload.tail": "uniform", "policies": FEW},
        },
        traces=(INTENT,),
    ),
    # A recording of decoding, whose scores are normalised over the top-4; requests with drafts; several recordings.
    "route-steps": Golden(
        "route",
        {
            "model": {"preset": "gpt-oss-20b"},
            "workload": recorded(arrangement="decode", layer=12, num_batches=2, num_tokens=32),
            "layer": {"ep_size": 4},
            "policies": [*FEW, *FEWER_EXPERTS],
        },
        ("routing",),
        {
            "drafts": {"workload.trace": GPT_OSS, "workload.topk_share": 0.7, "workload.tokens_per_request": 4},
            "three domains": {
                "model.preset": "deepseek-v2-lite",
                "workload.trace": [
                    {"trace": INTENT},
                    {"trace": SUMMARY, "share": 2.0},
                    {"trace": TRANSLATION, "share": 0.5},
                ],
            },
        },
        traces=(INTENT, SUMMARY, TRANSLATION, GPT_OSS),
    ),
    # What grows with a step's tokens.
    "route-sizes": Golden(
        "route",
        {
            "model": {"preset": "olmoe-1b-7b"},
            "workload": synthetic(sequence_length=1),
            "layer": {"ep_size": 4},
            "policies": FEWEST,
            "sweep": {"workload.num_tokens": [4, 16, 64]},
        },
        ("figures",),
    ),
}

EMULATED = {
    # A layer on one node; expert replication beside the policies.
    "emulate-layer": Golden(
        "emulate",
        {
            "model": {"preset": "olmoe-1b-7b"},
            "workload": synthetic(tokens_per_rank=64, peak_load=3.0),
            "layer": {"ep_size": 8},
            "policies": FEW,
            "emulate": {"replication": [{"spare_per_rank": 1}, {"spare_per_rank": 2}]},
        },
        ("routing", "times"),
        {
            "h100": {"emulate.device": "h100-sxm", "emulate.links": "h100-nvlink4"},
            "h20": {"emulate.device": "h20", "emulate.links": "h20-nvlink4", "policies": FEWEST},
        },
    ),
    # Over two nodes, with shared experts; slower links.
    "emulate-nodes": Golden(
        "emulate",
        {
            "model": {"preset": "deepseek-v3"},
            "workload": synthetic(tokens_per_rank=16, num_batches=1, peak_load=5.0, sequence_length=8),
            "layer": {"ep_size": 16},
            "policies": FEWEST,
            "emulate": {"replication": [{"spare_per_rank": 2}]},
        },
        ("times",),
        {
            "h100": {"emulate.device": "h100-sxm", "emulate.links": "h100-nvlink4-ndr"},
            "h200, narrow links": {
                "emulate.device": "h200-sxm",
                "emulate.links": "pcie5-ndr",
                "emulate.bandwidth_scale": 0.25,
            },
            "a100": {"emulate.device": "a100-sxm-80gb", "emulate.links": "a100-nvlink3-hdr"},
        },
    ),
    # Steps that take as long as the weights that they read.
    "emulate-decode": Golden(
        "emulate",
        {
            "model": {"preset": "qwen3-30b-a3b"},
            "workload": synthetic(num_tokens=16, sequence_length=1, num_batches=1),
            "layer": {"ep_size": 1},
            "policies": FEW,
            "measure": {"flush_l2": True},
            "emulate": {"device": "h100-sxm", "links": "h100-nvlink4"},
        },
        ("routing", "times"),
        {
            "one rank": {},
            "decode experts": {"layer.experts": "decode", "policies": FEWEST},
            "eight ranks, padding": {"layer.ep_size": 8, "workload.num_tokens": 64, "workload.padding_per_rank": 2},
        },
    ),
    # Experts that stand elsewhere, a shard of each.
    "emulate-placed": Golden(
        "emulate",
        {
            "model": {"preset": "deepseek-v2-lite"},
            "workload": synthetic(num_tokens=128, num_batches=1, skew="single_domain", sequence_length=16),
            "layer": {"ep_size": 4},
            "policies": FEW,
            "emulate": {"device": "h100-sxm", "links": "h100-nvlink4"},
        },
        ("routing", "times"),
        {
            "tensor parallel": {"model.tensor_parallel": 2, "policies": FEWEST},
        },
    ),
    # Recorded traffic. Emulated layers make scores from logits. Tokens with equal recorded scores no longer tie exactly
    # then, and machines may differ in which comes first: no policy here compares the scores of two tokens.
    "emulate-recorded": Golden(
        "emulate",
        {
            "model": {"preset": "deepseek-v2-lite"},
            "workload": recorded(trace=INTENT, layer=14, num_tokens=256),
            "layer": {"ep_size": 4},
            "policies": [
                {"name": ["token_drop", "expanded_drop"], "capacity_factor": 1.0, "metric": "order"},
                {"name": "pruned", "k0": 3},
                {"name": "oea", "k0": 2},
            ],
            "emulate": {"device": "h100-sxm", "links": "h100-nvlink4"},
        },
        ("routing", "times"),
        traces=(INTENT,),
    ),
    # Whole models: prompts, and steps with a KV cache.
    "emulate-prefill": Golden(
        "emulate",
        {
            "scope": "model",
            "model": {"preset": "deepseek-v2-lite"},
            "whole": {"num_layers": 3},
            "workload": synthetic(tokens_per_rank=64, num_batches=1, peak_load=3.0, sequence_length=32),
            "layer": {"ep_size": 4},
            "policies": FEW,
            "emulate": {"device": "h100-sxm", "links": "h100-nvlink4"},
        },
        ("routing", "times"),
    ),
    "emulate-steps": Golden(
        "emulate",
        {
            "scope": "model",
            "model": {"preset": "olmoe-1b-7b"},
            "whole": {"num_layers": 2, "context_length": 512},
            "workload": synthetic(tokens_per_rank=8, sequence_length=1, num_batches=1),
            "layer": {"ep_size": 16},
            "policies": FEWEST,
            "emulate": {"device": "h20", "links": "h20-nvlink4-ndr"},
        },
        ("times",),
    ),
}

CLAIMED = {
    "claims-layer": Golden(
        "papers",
        GOLDENS / "claims-layer.yaml",
        ("claims",),
        {"": {"workload.tokens_per_rank": 256, "workload.num_batches": 1}},
    ),
    "claims-decode": Golden(
        "papers",
        GOLDENS / "claims-decode.yaml",
        ("claims",),
        {
            "": {
                "workload.num_batches": 2,
                "sweep": {"workload.num_tokens": [8, 16], "workload.peak_load": [None, 10.6]},
            }
        },
    ),
    "claims-whole": Golden(
        "papers",
        CONFIGS / "papers" / "whole" / "whole-capacity-mixtral.yaml",
        ("claims",),
        {
            "": {
                "workload.tokens_per_rank": 128,
                "workload.sequence_length": 64,
                "workload.num_batches": 1,
                "whole.num_layers": 2,
                "measure": {"iterations": 1, "breakdown_iterations": 1},
                "sweep": {"layer.ep_size": [8, 4], "workload.skew": ["single_domain", "worst_layer"]},
            }
        },
    ),
}

JUDGED = {
    # text.txt is the head of what moe_ep_bench/metrics.py was.
    "quality": Golden(
        "quality",
        {
            "model": {"checkpoint": str(TESTS / "data" / "small-moe"), "dtype": "float32"},
            "text": {
                "file": str(GOLDENS / "text.txt"),
                "num_sequences": 4,
                "sequence_length": 16,
                "batch_size": 4,
            },
            "layer": {"ep_size": 4},
            "policies": OF_ANSWERS,
        },
        ("answers", "answers-routing"),
        rtol=ANSWERS_RTOL,
        atol=ANSWERS_ATOL,
    ),
}

RUNS = {**ROUTED, **EMULATED, **CLAIMED, **JUDGED}

# Results whose figures, and whose tables of claims and of validation, are made anew; tests/test_golden_figures.py.
REFERENCES = {
    f"reference-{name.replace('/', '-')}": REFERENCE / name
    for name in (
        "decode-2cpu",
        "deepseek-v2-lite-recorded-2cpu",
        "quality-small-2cpu",
        "quickstart-2cpu",
        "validate-2cpu",
        "validate-2cpu/emulated",
        "validate-2cpu/real",
        "validate-model-2cpu",
        "validate-model-2cpu/emulated",
        "validate-model-2cpu/real",
        "whatif-skew",
        "whole-capacity-modelled",
    )
}


# ---- Reading results: all that knows how commands are called and how results lie on disk ----------------------------

# What the program calls a command of the goldens.
COMMANDS: dict[str, str] = {}
# What the goldens call a column, or a word in any table (an expression), that the program has another name for.
COLUMN_NAMES: dict[str, str] = {}
WORDS: dict[str, str] = {"^inconclusive$": "cannot say", ", no skew$": ", unskewed"}

IDENTITY = ["run_id", "case_id", "comparison_id", "mode", "subject", "backend", "model", "reason", "num_ranks"]
CASE = ["label", "params"]


def run_command(command: str, config: Path, out: Path) -> None:
    assert main([COMMANDS.get(command, command), str(config), "--out", str(out)]) == 0


def _parts(directory: Path, folder: str) -> pd.DataFrame:
    """The rows of all cases in one folder, with what names a case in place of its id."""
    cases = json.loads((directory / "run.json").read_text())["cases"]
    found = pd.concat(map(pd.read_parquet, sorted((directory / folder).glob("*.parquet"))))
    parts = []
    for case_id, case in cases.items():
        rows = found[found["case_id"] == case_id]
        rows.insert(0, "label", case["label"])
        rows.insert(1, "params", json.dumps(case["policy_params"], sort_keys=True))
        parts.append(rows.drop(columns=[*IDENTITY, "policy", "policy_params"], errors="ignore"))
    return pd.concat(parts, ignore_index=True)


def read_routing(directory: Path) -> pd.DataFrame:
    """A row per case, layer, rank and batch: every metric; loads of experts as digests, loads of ranks as they are."""
    rows = _parts(directory, "routing")
    for name in rows.columns.intersection(["load_E", "image_load_E"]):
        rows[name] = [None if load is None else digest(load) for load in rows[name]]
    if "load_R" in rows:
        rows["load_R"] = [" ".join(map(str, load)) for load in rows["load_R"]]
    return rows.drop(columns="slot_load_P", errors="ignore")  # in whose stead load_R and times are frozen


def read_times(directory: Path) -> pd.DataFrame:
    """A row per case, rank, batch, iteration, kind, layer and phase that takes time.

    ``layer`` is of whole models, and there only where a layer is what takes the time; their phases are of single
    layers, without sums over them.
    """
    rows = _parts(directory, "cases")
    rows = rows[rows["time_us"].abs() > ATOL]
    return rows.drop(columns=["launch", "host_us", "thread_cpu_us"])


def read_answers(directory: Path) -> pd.DataFrame:
    """A row per case and sequence: what a model's answers lost."""
    named = ["label", "params", "status", "batch", "phase", "item", "num_tokens"]
    rows = _parts(directory, "quality").pivot(index=named, columns="metric", values="value").reset_index()
    return rows.rename(columns={"item": "sequence"})


def read_claims(directory: Path) -> pd.DataFrame:
    """A row per claim, policy and traffic: the paper's number and ours."""
    rows = pd.read_csv(directory / "claims.csv")
    return rows.drop(columns=["comparison", "ours_of", "mode", "device", "links", "note"])


def read_figures(directory: Path) -> dict[str, pd.DataFrame]:
    """The numbers of every figure in a directory, by the figure's name."""
    return {path.stem: pd.read_csv(path) for path in sorted(directory.glob("*.csv"))}


def tables_of_reference(directory: Path, folder: Path) -> dict[str, pd.DataFrame]:
    """Draw the figures of a results directory, or write its tables of validation, and read their numbers.

    Args:
        folder: an empty one.
    """
    copy = shutil.copytree(directory, folder / "copy", ignore=shutil.ignore_patterns("figures", "*.csv", "*.txt"))
    if (files := ValidationDirectory(copy)).pairs.is_file():
        write_validation(copy)
        return {"validation": pd.read_csv(files.table)}
    assert main(["plot", str(copy), "--out", str(folder / "figures"), "--format", "png"]) == 0
    tables = {f"figure-{name}": rows for name, rows in read_figures(folder / "figures").items()}
    if (copy / "claims.json").is_file():
        write_claims(load_claims(copy))
        tables["claims"] = read_claims(copy)
    return tables


def tables_of(golden: Golden, directory: Path) -> dict[str, pd.DataFrame]:
    """What one run left, by the table's name."""
    if golden.tables == ("figures",):
        return {f"figure-{name}": rows for name, rows in read_figures(directory / "figures").items()}
    return {name: READERS[name](directory) for name in golden.tables}


READERS = {
    "routing": read_routing,
    "times": read_times,
    "answers": read_answers,
    "answers-routing": read_routing,
    "claims": read_claims,
}
# What finds a row of a table. Of others all their words do, and where those are equal the order of their numbers.
KEYS = {
    "routing": ["point", *CASE, "layer", "rank", "batch"],
    "times": ["point", *CASE, "rank", "batch", "iteration", "kind", "layer", "phase"],
    "answers": ["point", *CASE, "phase", "sequence"],
    "answers-routing": ["point", *CASE, "phase", "layer", "batch"],
}


# ---- Running and comparing ------------------------------------------------------------------------------------------


def digest(load_E: Sequence[int]) -> str:
    """Short and equal for equal whole numbers; never mistaken for a number itself."""
    return "x" + hashlib.sha256(np.asarray(load_E, dtype="<i8").tobytes()).hexdigest()[:12]


def missing_traces(golden: Golden) -> list[str]:
    return [path for path in golden.traces if not Path(path).is_file()]


@contextmanager
def nothing_drawn() -> Iterator[None]:
    """Let figures be saved as empty files without a layout: only their numbers are looked at."""

    def save(figure: Figure, path: Any, **options: Any) -> None:
        Path(path).write_bytes(b"")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Figure, "savefig", save)
        patch.setattr(style, "settle", lambda figure: None)
        yield


def fresh_tables(golden: Golden, folder: Path) -> dict[str, pd.DataFrame]:
    """Run a golden's command on all its points; its tables as they would be frozen."""
    found: dict[str, list[pd.DataFrame]] = {}
    for number, (point, changes) in enumerate(golden.points.items()):
        config, out = folder / f"{number}.yaml", folder / str(number)
        config.write_text(yaml.safe_dump(config_of(golden, changes)))
        with nothing_drawn():
            if golden.command == "route" and "figures" not in golden.tables:
                route(config, out, ())  # without its table and figures
            else:
                run_command(golden.command, config, out)
        for name, rows in tables_of(golden, out).items():
            found.setdefault(name, []).append(rows.assign(point=point))
    return {name: as_frozen(pd.concat(rows, ignore_index=True)) for name, rows in found.items()}


def fresh_reference(name: str, folder: Path) -> dict[str, pd.DataFrame]:
    """A reference's tables as they would be frozen."""
    with nothing_drawn():
        tables = tables_of_reference(REFERENCES[name], folder)
    return {table: as_frozen(rows) for table, rows in tables.items()}


def config_of(golden: Golden, changes: Spec) -> Spec:
    config = golden.config
    values = yaml.safe_load(config.read_text()) if isinstance(config, Path) else json.loads(json.dumps(config))
    values.setdefault("name", "golden")
    for dotted, value in changes.items():
        *parents, last = dotted.split(".")
        section = values
        for parent in parents:
            section = section.setdefault(parent, {})
        section[last] = value
    return values


def as_text(rows: pd.DataFrame) -> str:
    return rows.to_csv(index=False, float_format="%.9g", lineterminator="\n")


def as_frozen(rows: pd.DataFrame) -> pd.DataFrame:
    """A table as it is when it has been frozen and read again: in the goldens' words, without empty columns."""
    rows = rows.rename(columns=COLUMN_NAMES).replace(WORDS, regex=True).dropna(axis="columns", how="all")
    return pd.read_csv(io.StringIO(as_text(rows)))


def freeze(name: str, tables: dict[str, pd.DataFrame]) -> None:
    """Write tables as one zip; equal tables give equal bytes."""
    with zipfile.ZipFile(GOLDENS / f"{name}.zip", "w", zipfile.ZIP_DEFLATED, compresslevel=9) as file:
        for table, rows in sorted(tables.items()):
            file.writestr(zipfile.ZipInfo(f"{table}.csv"), as_text(rows), zipfile.ZIP_DEFLATED)


def frozen_tables(name: str) -> dict[str, pd.DataFrame]:
    with zipfile.ZipFile(GOLDENS / f"{name}.zip") as file:
        return {table.removesuffix(".csv"): pd.read_csv(file.open(table)) for table in file.namelist()}


def words_of(column: pd.Series) -> pd.Series:
    """Whole numbers are alike whatever their type."""
    plain = column.astype(object).where(column.notna(), "")
    return plain.map(lambda value: f"{value:.15g}" if isinstance(value, int | float) else str(value))


def keyed(rows: pd.DataFrame, floats: Sequence[str], keys: Sequence[str] | None) -> pd.DataFrame:
    """Rows by what finds them, all words by default; where keys are equal, by their order when sorted by all else.

    All but ``floats`` become words, which have to be equal.
    """
    rows = rows.assign(**{name: words_of(rows[name]) for name in rows.columns.difference(floats)})
    keys = [name for name in keys or rows.columns.difference(floats) if name in rows]
    others = rows.columns.difference(keys)
    # Rounded, so that the last digits of equal numbers do not decide.
    order = rows[[*keys, *others]].map(lambda value: f"{value:.5e}" if isinstance(value, float) else value)
    return rows.loc[order.sort_values(list(order)).index].set_index(keys)


def assert_unmoved(name: str, fresh: dict[str, pd.DataFrame], rtol: float = RTOL, atol: float = ATOL) -> None:
    frozen = frozen_tables(name)
    missing = sorted(set(frozen) - set(fresh))
    assert not missing, f"{name}: tables {', '.join(missing)} are gone"
    for table, rows in frozen.items():
        gone = [column for column in rows if column not in fresh[table]]
        assert not gone, f"{name}, {table}: columns {', '.join(gone)} are gone"
        floats = rows.select_dtypes("float").columns
        pair = (keyed(one, floats, KEYS.get(table)) for one in (fresh[table][list(rows)], rows))
        words = f"{name}, {table}: fresh and frozen"
        pd.testing.assert_frame_equal(*pair, check_dtype=False, rtol=rtol, atol=atol, obj=words)


# ---- The tests ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", RUNS)
def test_numbers_are_as_frozen(name: str, tmp_path: Path) -> None:
    golden = RUNS[name]
    missing = missing_traces(golden)
    if missing:
        assert "MOE_EP_BENCH_REQUIRE_TRACES" not in os.environ, f"{missing[0]} is missing"
        pytest.skip("no recorded traces in ../shared/traces")
    assert_unmoved(name, fresh_tables(golden, tmp_path), golden.rtol, golden.atol)


@pytest.mark.parametrize(("column", "moved"), [("retained_mass_all", 1 + 5e-6), ("num_pairs", 2), ("load_E", 2)])
def test_what_moves_is_found_and_rounding_is_not(column: str, moved: float) -> None:
    rows = frozen_tables("route-decode")["routing"]
    fresh = rows.sample(frac=1, random_state=1).assign(new_column=1, entropy=rows["entropy"] * (1 + 1e-8))
    assert_unmoved("route-decode", {"routing": fresh})
    fresh.loc[5, column] *= moved
    for changed in (fresh, rows.drop(index=7), rows.drop(columns="entropy")):
        with pytest.raises(AssertionError, match="route-decode, routing"):
            assert_unmoved("route-decode", {"routing": changed})
