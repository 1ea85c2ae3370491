"""The atlas: what wins where. Twelve models on five devices, prefill and decode, under three traffics each.

    python benchmarks/atlas.py --out results/reference    # an hour or more on two cores; goes on where it stopped
    python benchmarks/atlas.py --list                     # the questions
    python benchmarks/atlas.py --draw --out results/reference

A question is a command, ``moe-ep-bench advise --model M --ep N --tokens T --device D`` without a traffic, whose answer
has a line for balanced, typical and hard traffic. Its directory under ``--work`` holds the answer; those that are there
are not asked again. ``atlas.csv`` has a row for each line, ``atlas.png`` the map.

The EP size is the smallest from 8 on at which the model fits the device in the checkpoint's dtype under all traffics.
Experts and exchange are measured elsewhere where tables have the layer, else modelled; each row says which.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from moe_ep_bench.analysis.advice import costs_answers
from moe_ep_bench.analysis.style import INK, MUTED
from moe_ep_bench.models import load_model

MODELS = (
    *("olmoe-1b-7b", "deepseek-v2-lite", "gpt-oss-20b", "qwen3-30b-a3b", "mixtral-8x7b", "gpt-oss-120b"),
    *("minimax-m2.5", "qwen3-235b-a22b", "qwen3.5-397b-a17b", "deepseek-v3", "glm-5", "kimi-k2"),
)
# A table of other people's measurements, which is tried first, and a roofline.
DEVICES = {
    "H100": ("table:h100_sxm", "h100-sxm"),
    "H200": ("table:h200_sxm", "h200-sxm"),
    "B200": ("table:b200_sxm", "b200-sxm"),
    "GB200": ("table:gb200", "gb200"),
    "H20": ("h20",),
}
EP_SIZES = (8, 16, 32, 64)
STAGES = {"prefill": ("--tokens", 2048), "decode": ("--decode-tokens", 64)}
"""The flag, and tokens (or requests) of a rank."""
LOADS = {"balanced": "equal loads", "typical": "as a median layer's", "hard": "as the worst layer's"}
TRAFFICS = tuple(LOADS)
"""By name, their loads of experts."""

KINDS = {
    "nothing": "#E4E4E4",
    "replicate": "#0072B2",
    "move": "#009E73",
    "reroute": "#CC79A7",
    "drop": "#E69F00",
    "not asked": "#FFFFFF",
}
"""What the pick does, and its colour in the map."""
WITHIN_ERROR = 1.07
"""A layer's modelled time is off by 7 % at worst, in docs/clusters.md: speedups below are pale in the map."""
_MOVES, _DROPS = ("llep", "ultra", "moonep", "epic", "waterfill"), ("token_drop", "expanded_drop", "budget_drop")


class Question(NamedTuple):
    model: str
    device: str
    stage: str

    @property
    def name(self) -> str:
        return "-".join(self)


class Answer(NamedTuple):
    """The EP size at which a question was asked, 0 = at none, and why it could not be."""

    ep_size: int
    problem: str


def questions(models: Sequence[str] = MODELS, devices: Sequence[str] = tuple(DEVICES)) -> list[Question]:
    """All of them, small models first."""
    return [Question(model, device, stage) for model in models for device in devices for stage in STAGES]


# ---- ask -------------------------------------------------------------------------------------------------------------


def ask(question: Question, work: Path, call: Callable[[list[str]], tuple[int, str]]) -> Answer:
    """Ask at the smallest EP size that holds the model; ``answer.json`` keeps that size, or why there is none.

    Args:
        call: a command's arguments -> its exit status and standard error.
    """
    folder = work / question.name
    known = folder / "asked.json"
    if known.exists():
        return Answer(**json.loads(known.read_text()))
    flag, tokens = STAGES[question.stage]
    problem = ""
    for ep_size in EP_SIZES:
        size = ["--model", question.model, "--ep", str(ep_size), flag, str(tokens * ep_size)]
        for device in DEVICES[question.device]:
            status, said = call(["advise", *size, "--device", device, "--out", str(folder / f"ep{ep_size}")])
            if status == 0 and _fits(folder / f"ep{ep_size}"):
                return _keep(known, Answer(ep_size, ""))
            if status == 0:
                problem = f"does not fit {ep_size} ranks under every traffic"
                break
            problem = said.strip().splitlines()[-1] if said.strip() else f"exit status {status}"
            if status != 2:
                raise RuntimeError(f"{question.name}: {problem}")
        if "does not fit" not in problem and "EP size" not in problem:
            break
    return _keep(known, Answer(0, problem))


def _fits(folder: Path) -> bool:
    """Whether the model fits under every traffic, each of which has a fullest rank of its own."""
    answers = json.loads((folder / "advice.json").read_text())["answers"]
    return all(one["reason"] != "does_not_fit" for one in answers)


def _keep(path: Path, answer: Answer) -> Answer:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(answer._asdict()))
    return answer


def command(arguments: list[str]) -> tuple[int, str]:
    """Run ``moe-ep-bench`` in a process of its own, on one core."""
    done = subprocess.run(
        [sys.executable, "-m", "moe_ep_bench", *arguments],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    return done.returncode, done.stderr


# ---- rows ------------------------------------------------------------------------------------------------------------


def rows_of(question: Question, answer: Answer, work: Path) -> Iterator[dict[str, Any]]:
    """A row for each traffic; one alone where the question could not be asked."""
    _, tokens = STAGES[question.stage]
    asked = {**question._asdict(), "ep_size": answer.ep_size or None, "tokens_per_rank": tokens}
    if answer.problem:
        yield {**asked, "kind": "not asked", "why": answer.problem}
        return
    folder = work / question.name / f"ep{answer.ep_size}"
    advice, run = (json.loads((folder / name).read_text()) for name in ("advice.json", "run.json"))
    answers = sorted(advice["answers"], key=lambda one: one["point"]["workload.peak_load"] or 1)
    for traffic, one in zip(TRAFFICS, answers, strict=True):
        facts = run["comparisons"][one["comparison_id"]]
        pick, native = one["pick"], one["native"]
        yield {
            **asked,
            "traffic": traffic,
            "peak_load": one["point"]["workload.peak_load"] or 1,
            "native_ms": round(native["median_ms"], 4),
            "fullest_rank": round(native["fullest_rank"], 3),
            "kind": kind_of(run["cases"][pick["case_id"]]["policy"]) if pick else "nothing",
            "pick": pick["label"] if pick else None,
            **{key: round(pick[key], 3) if pick else None for key in ("speedup", "low", "high")},
            "whole_speedup": _of_whole(pick, native),
            "dropped_share": pick["dropped_share"] if pick else 0.0,
            "extra_gib_per_rank": pick["extra_gib_per_rank"] if pick else None,
            **_lossy(one),
            "experts": "measured elsewhere" if facts["expert_rows"] else "modelled",
            "exchange": "measured elsewhere" if facts["exchange"] else "modelled",
            "why": None,
            "commit": run["environment"]["git_commit"][:8],
        }


def _lossy(answer: dict[str, Any]) -> dict[str, Any]:
    """The fastest candidate within the bounds that drops or reroutes, beside a pick that does neither."""
    lossy = answer["beside"] if answer["pick"] else answer["fastest"]
    if lossy is None or not costs_answers(lossy["missing_share"], lossy["retained_mass"]):
        return dict.fromkeys(("lossy", "lossy_speedup", "lossy_dropped_share"))
    share = round(lossy["dropped_share"], 3)
    return {"lossy": lossy["label"], "lossy_speedup": round(lossy["speedup"], 3), "lossy_dropped_share": share}


def kind_of(policy: str) -> str:
    """What a policy or balancer does, by its name."""
    if policy in _DROPS:
        return "drop"
    if policy in _MOVES:
        return "move"
    return "replicate" if policy in ("eplb", "variance") else "reroute"


def _of_whole(pick: dict[str, Any] | None, native: dict[str, Any]) -> float | None:
    """How much faster the whole model is under the pick; None where its rest is not stated."""
    if pick is None or pick["whole"] is None or native["whole"] is None:
        return None
    return round(native["whole"]["ms"] / pick["whole"]["ms"], 3)


# ---- map -------------------------------------------------------------------------------------------------------------


def draw(rows: pd.DataFrame) -> Figure:
    """The map: a panel for each stage and traffic, models over devices, what wins as colour and speedup as text."""
    models = [model for model in MODELS if model in set(rows["model"])]
    devices = [device for device in DEVICES if device in set(rows["device"])]
    figure = Figure(figsize=(13.5, 1.9 + 0.62 * len(models)), layout="constrained")
    panels = figure.subplots(len(STAGES), len(TRAFFICS), sharex=True, sharey=True, squeeze=False)
    for axes_of_stage, stage in zip(panels, STAGES, strict=True):
        for axes, traffic in zip(axes_of_stage, TRAFFICS, strict=True):
            here = rows[(rows["stage"] == stage) & ((rows["traffic"] == traffic) | (rows["kind"] == "not asked"))]
            cells = {(row.model, row.device): row for row in here.itertuples()}
            colours = np.ones((len(models), len(devices), 3))
            for (model, device), row in cells.items():
                at = models.index(model), devices.index(device)
                is_pale = row.kind not in ("nothing", "not asked") and round(row.speedup, 2) < WITHIN_ERROR
                colours[at] = np.add(to_rgb(KINDS[row.kind]), 1) / 2 if is_pale else to_rgb(KINDS[row.kind])
                is_dark = row.kind in ("replicate", "move") and not is_pale
                axes.text(
                    at[1], at[0], _cell(row), ha="center", va="center", fontsize=7.5, color="w" if is_dark else INK
                )
            axes.imshow(colours, aspect="auto")
            axes.set_title(f"{stage}, {traffic} traffic ({LOADS[traffic]})", fontsize=10, loc="left")
            axes.set_xticks(range(len(devices)), devices, fontsize=8)
            axes.set_yticks(range(len(models)), [load_model(model).name for model in models], fontsize=8)
            axes.tick_params(length=0, colors=MUTED)
            axes.set_xticks(np.arange(-0.5, len(devices)), minor=True)
            axes.set_yticks(np.arange(-0.5, len(models)), minor=True)
            axes.grid(which="minor", color="w", linewidth=1.5)
            axes.tick_params(which="minor", length=0)
            for side in axes.spines.values():
                side.set_visible(False)
    names = {
        "nothing": "keep native",
        "replicate": "replicate busy experts",
        "move": "move weights or shared tokens",
        "reroute": "reroute tokens",
        "drop": "drop pairs",
    }
    met = [kind for kind in KINDS if kind in set(rows["kind"])]
    handles = [Patch(facecolor=KINDS[kind], edgecolor=MUTED, label=names.get(kind, kind)) for kind in met]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False, fontsize=9)
    (prefill, decode) = (tokens for _, tokens in STAGES.values())
    figure.suptitle(
        "What to do about the busiest rank, and the speedup of one MoE layer (modelled)\n"
        f"{prefill:,} tokens a rank at prefill, {decode} requests a rank at decode; "
        "EP 8, or as stated where 8 ranks do not hold the model\n"
        "at most 10 % of the (token, expert) pairs dropped, 5 % of the score mass lost; "
        f"pale: below {WITHIN_ERROR}, within the model's error; -: native",
        fontsize=11,
    )
    return figure


def _cell(row: Any) -> str:
    """Text of a cell: the pick's speedup, and the EP size where it is not 8."""
    size = "" if row.kind == "not asked" or row.ep_size == 8 else f"\nEP {row.ep_size:.0f}"
    return ("-" if row.kind in ("nothing", "not asked") else f"{row.speedup:.2f}x") + size


# ---- command line ----------------------------------------------------------------------------------------------------


def with_other_answers(rows: pd.DataFrame, path: Path) -> pd.DataFrame:
    """Write rows into a file beside those of other questions that it has; return all, in order of the questions."""
    words: Any = {"dtype": str, "keep_default_na": False}  # which come back as they are written
    table = pd.read_csv(io.StringIO(rows.to_csv(index=False)), **words)
    if path.exists():
        of_question = list(Question._fields)
        known = pd.read_csv(path, **words)
        is_asked = pd.MultiIndex.from_frame(known[of_question]).isin(pd.MultiIndex.from_frame(table[of_question]))
        table = pd.concat([known[~is_asked], table])
    order = {question: place for place, question in enumerate(questions())}
    places = [
        order.get(Question(*names), len(order)) for names in table[list(Question._fields)].itertuples(index=False)
    ]
    table = table.iloc[np.argsort(places, kind="stable")]
    table.to_csv(path, index=False)
    return pd.read_csv(path)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("results/reference"), help="folder of atlas.csv and atlas.png")
    parser.add_argument("--work", type=Path, default=Path("results/atlas"), help="folder of the answers")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="questions at a time, a core each")
    parser.add_argument("--models", nargs="+", default=MODELS, metavar="MODEL", help="only these; other rows stay")
    parser.add_argument("--devices", nargs="+", default=tuple(DEVICES), choices=tuple(DEVICES), help="only these")
    parser.add_argument("--list", action="store_true", help="print the questions and ask none")
    parser.add_argument("--draw", action="store_true", help="ask none: rows and map of the answers that are there")
    options = parser.parse_args(arguments)
    asked = questions(options.models, options.devices)
    if options.list:
        print("\n".join(question.name for question in asked))
        return 0
    if options.draw:
        asked = [question for question in asked if (options.work / question.name / "asked.json").exists()]
    with ThreadPoolExecutor(options.jobs) as pool:
        answers = list(pool.map(partial(ask, work=options.work, call=command), asked))
    rows = [row for pair in zip(asked, answers, strict=True) for row in rows_of(*pair, options.work)]
    options.out.mkdir(parents=True, exist_ok=True)
    table = with_other_answers(pd.DataFrame(rows), options.out / "atlas.csv")
    draw(table).savefig(options.out / "atlas.png", dpi=160, metadata={"Software": None})
    print(f"{len(asked)} questions asked, {len(table)} rows: {options.out / 'atlas.csv'}, {options.out / 'atlas.png'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
