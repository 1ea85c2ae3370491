"""The tables of ``moe-ep-bench route``: one per group of layers; and which figures were drawn.

Every number is of one batch of one layer first, all ranks together; then the mean over batches, then over layers.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

import pandas as pd

from moe_ep_bench.analysis.columns import COLUMNS, Column, number, percentage
from moe_ep_bench.analysis.render import Table
from moe_ep_bench.analysis.route.load import FRONTIER as BELOW
from moe_ep_bench.analysis.route.load import ROUTED, RouteRun, short
from moe_ep_bench.analysis.words import FRONTIER, MODE_WORDS, READING, stacked_note
from moe_ep_bench.metrics import uniform_activated_experts

_WIDTH = 120
BELOW_FRONTIER = COLUMNS["below_frontier"], COLUMNS["below_frontier_experts"]
_COLUMNS = (
    Column("label", "policy", cell=lambda row: short(row["label"])),
    number("fullest_expert", "fullest expert", "{:.2f}"),
    number("fullest_rank", "fullest rank", "{:.2f}"),
    number("expert_imbalance", "expert imbalance", "{:.2f}"),
    number("rank_imbalance", "rank imbalance", "{:.2f}"),
    percentage("dropped_share", "dropped"),
    percentage("retained_mass", "mass kept"),
    *BELOW_FRONTIER,
    number("experts_per_token", "experts/token", "{:.2f}"),
    number("activated", "activated", "{:.1f}"),
    number("fullest_activated", "on one rank", "{:.1f}"),
)
_ABOUT = ["label", "mode", "title", "model", "num_ranks", "num_tokens", "num_batches", "layers"]
_ABOUT += ["workload", "policy", "policy_params"]


def route_tables(run: RouteRun) -> list[Table]:
    """One table per group of layers; a row of the frame is a case, named as in ``frames.speedups``."""
    layers = run.layers.groupby("group")["layer"].agg(lambda layers: ", ".join(layers.unique()))
    cases = run.cases.assign(
        mode="route",
        title=run.cases["comparison"],
        layers=run.cases["group"].map(layers),
        policy_params=run.cases["params"].map(lambda params: json.dumps(params, sort_keys=True)),
    )
    tables = []
    for _, rows in cases.groupby("group", sort=False):
        facts = rows.iloc[0]
        layered = (
            ""
            if facts["layers"] == "-"
            else f"; layer{'s' if facts['num_layers'] > 1 else ''} {_listed(facts['layers'])}"
        )
        batches = f"{facts['num_batches']} batch{'es' if facts['num_batches'] > 1 else ''}"
        how = f"{MODE_WORDS['route']}, {batches}"
        title = f"{facts['comparison']}{layered}: {how}"
        left_out = {column.header for column in BELOW_FRONTIER if rows[column.name].isna().all()}
        if facts["phase"] != "decode":  # Of many tokens all experts are activated.
            left_out.add(BELOW_FRONTIER[1].header)
        columns = [column for column in _COLUMNS if column.header not in left_out]
        notes = [*_notes(rows), *_stacked_notes(run, rows)]
        tables.append(Table(rows[[*_ABOUT, *ROUTED, *BELOW]].reset_index(drop=True), columns, title, notes))
    return tables


def _notes(rows: pd.DataFrame) -> list[str]:
    facts, looks_past = rows.iloc[0], rows["looks_past_top_k"].any()
    uniform = uniform_activated_experts(facts["num_experts"], facts["top_k"], facts["num_tokens"])
    found = {
        "fullest: pairs over native's mean expert's or rank's; imbalance: over the mean of the pairs that are "
        "computed; of each batch, then means over batches and layers": True,
        f"activated: experts with a token, of {facts['num_experts']} ({uniform:.1f} if tokens chose independently and "
        "uniformly), and on the rank with most of them": True,
        FRONTIER: rows["below_frontier"].notna().any(),
        "dropped: of the model's own pairs, also where a policy computes others in their place": looks_past,
        READING: facts["is_padded"],
        f"scores below the recorded top-k are those of the {facts['tail_model']} tail model": (
            looks_past and pd.notna(facts["tail_model"])
        ),
        "scores were not recorded and are assumed equal over the top-k: loads are the recording's, but mass, and what "
        "policies choose by scores (oea, xshare, drops by score), say nothing of the model": (
            "scores assumed" in facts["description"]
        ),
        "EPLB: planned for the mean load of the other batches; what solving a linear program takes is not shown here, "
        "emulate counts it": rows["policy"].eq("eplb").any(),
    }
    if pd.notna(facts["image_share"]):
        found[f"assumed: the first {facts['image_share']:.0%} of every sequence's tokens are an image's"] = True
    return [note for note, is_so in found.items() if is_so]


def _stacked_notes(run: RouteRun, rows: pd.DataFrame) -> Iterator[str]:
    """Of every plan of replicas that puts two of one expert on one rank."""
    for _, case in rows[rows["policy"].eq("eplb")].iterrows():
        load_LBE = run.loads(case["group"], "native", "load_E")
        if note := stacked_note(load_LBE, case["params"], case):
            yield f"{case['label']}: {note}"


def _listed(layers: str) -> str:
    """``0 to 26`` of layers that follow one another."""
    numbers = [int(layer) for layer in layers.split(", ")]
    is_range = len(numbers) > 2 and numbers == list(range(numbers[0], numbers[-1] + 1))
    return f"{numbers[0]} to {numbers[-1]}" if is_range else layers
