"""Claims about exchanges that others measured: rows are met, copies counted, and what was not measured is refused."""

from __future__ import annotations

import re
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from moe_ep_bench.analysis.cases import cases, load
from moe_ep_bench.bench.checks import VIRTUAL
from moe_ep_bench.bench.meetings import sent_copies
from moe_ep_bench.bench.plan import plan
from moe_ep_bench.cli import main
from moe_ep_bench.cost_model.curve import Curve
from moe_ep_bench.cost_model.exchanges import Exchange, reached
from moe_ep_bench.cost_model.links import Links
from moe_ep_bench.cost_model.tables import (
    BACKENDS,
    Tables,
    exchange_rows,
    load_links,
    load_links_of_layer,
    package_version,
    root,
)
from moe_ep_bench.errors import OK, USER_ERROR, UserError
from moe_ep_bench.facts.words import describe_links, exchange_words, modelled_line
from moe_ep_bench.metrics import routing_metrics
from moe_ep_bench.models import load_model
from moe_ep_bench.policies import RoutingContext, make_policy

pytest.importorskip("aiconfigurator_core")
DEEPSEEK = load_model("deepseek-v3")
NORMAL = "table:h100_sxm/sglang/0.5.6.post2/deepep_normal"


def exchange(copies: str = "rank", **changes: Any) -> Exchange:
    fields = {"num_ranks": 4, "num_nodes": 2, "num_experts": 16, "top_k": 3, "hidden_size": 8, "name": "x"}
    curve = Curve.of([1, 100, 10_000], [10, 100, 10_000])
    return Exchange(**{**fields, "measured_by": "y", "copies": copies, "dispatch": curve, "combine": curve, **changes})


# Copies


@pytest.mark.parametrize(("num_experts", "top_k", "num_parts"), [(16, 3, 4), (8, 2, 8), (6, 4, 2), (64, 6, 8)])
def test_uniform_routing_reaches_a_part_as_often_as_drawn(num_experts: int, top_k: int, num_parts: int) -> None:
    random, size = np.random.default_rng(0), num_experts // num_parts
    drawn = [random.permutation(num_experts)[:top_k] for _ in range(20_000)]
    assert reached(num_experts, top_k, num_parts) == pytest.approx(
        np.mean([(one < size).any() for one in drawn]), rel=0.02
    )


def copies_by_hand(map_TE: torch.Tensor, num_parts: int) -> list[int]:
    """Tokens with an expert in each part, one by one."""
    size = map_TE.shape[1] // num_parts
    return [sum(bool(row[part * size : (part + 1) * size].any()) for row in map_TE) for part in range(num_parts)]


@pytest.mark.parametrize("policy", [{"name": "topk"}, {"name": "token_drop", "capacity_factor": 1.0}])
def test_copies_to_ranks_and_nodes_are_counted_once_a_token(policy: dict[str, Any]) -> None:
    scores_TE = torch.rand(200, 32, generator=torch.Generator().manual_seed(1))
    context = RoutingContext(top_k=5, num_ranks=8, rank=3)
    routing = make_policy(policy).route(scores_TE, context)
    found = routing_metrics(routing, scores_TE, context, ranks_per_node=4)
    ranks, nodes = copies_by_hand(routing.map_TE, 8), copies_by_hand(routing.map_TE, 2)
    assert found["copies_R"].tolist() == ranks
    assert found["copies_N"].tolist() == nodes
    assert found["crossing_copies"] == sum(ranks) - ranks[3]
    assert found["crossing_node_copies"] == nodes[1]


def test_dropping_pairs_hardly_drops_copies_between_nodes() -> None:
    """Where a token keeps 5 of 8 experts, pairs fall by 38 % and copies to 8 nodes of 8 by less."""
    assert pytest.approx(0.375) == 1 - 5 / 8
    assert 1 - reached(256, 5, 2) / reached(256, 8, 2) == pytest.approx(0.03, abs=0.005)


@pytest.mark.parametrize("copies", ["rank", "node", "pair"])
def test_uniform_copies_are_as_many_tokens_as_there_are(copies: str) -> None:
    known, tokens = exchange(copies), 1_000
    each = {"pair": 3 / 4, "rank": reached(16, 3, 4), "node": reached(16, 3, 2)}[copies]
    copies_RX = np.full((4, 2 if copies == "node" else 4), tokens * each)
    assert known.tokens(copies_RX) == pytest.approx(tokens)
    # The fullest rank counts: twice the copies into one part are twice the tokens.
    skewed_RX = copies_RX.copy()
    skewed_RX[:, 0] *= 2
    assert known.tokens(skewed_RX) == pytest.approx(2 * tokens)
    dispatch_us, combine_us = known.times_us(copies_RX)
    assert dispatch_us == pytest.approx(np.full(4, 1000.0))
    assert combine_us.tolist() == dispatch_us.tolist()
    assert known.times_us(np.zeros((4, 4)))[0].tolist() == [0.0] * 4


def test_what_stays_in_a_node_does_not_cross() -> None:
    copies_RN = np.array([[9, 0], [9, 0], [0, 9], [0, 9]])
    assert exchange("node").tokens(copies_RN) == 0


def routed_by_hand(copies_RR: np.ndarray, copies_RN: np.ndarray, size: int) -> np.ndarray:
    """What each rank hands to each, copy by copy."""
    num_ranks, found = len(copies_RR), np.zeros_like(copies_RR)
    for source in range(num_ranks):
        for node in range(copies_RN.shape[1]):
            door = min(node * size + source % size, num_ranks - 1)
            if node != source // size:
                found[source, door] += copies_RN[source, node]
            for rank in range(node * size, min((node + 1) * size, num_ranks)):
                found[door if node != source // size else source, rank] += copies_RR[source, rank]
    return found


@pytest.mark.parametrize(("num_ranks", "size"), [(8, 8), (16, 8), (12, 4), (10, 4)])
def test_a_copy_crosses_to_a_node_once_and_is_handed_on_there(num_ranks: int, size: int) -> None:
    links = Links.named("h100-nvlink4-ndr").model_copy(update={"ranks_per_node": size})
    random = np.random.default_rng(0)
    copies_RR = random.integers(0, 9, (num_ranks, num_ranks))
    copies_RN = random.integers(0, 9, (num_ranks, -(-num_ranks // size)))
    routed_RR = links.routed(copies_RR, copies_RN)
    assert (routed_RR == routed_by_hand(copies_RR, copies_RN, size)).all()
    node_R = np.arange(num_ranks) // size
    crossing = routed_RR[node_R[:, None] != node_R].sum()
    assert crossing == sum(copies_RN[rank, node] for rank in range(num_ranks) for node in range(copies_RN.shape[1])
                           if node != node_R[rank])  # fmt: skip
    if num_ranks == size:
        assert (routed_RR == copies_RR).all(), "on one node nothing is handed on"


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [8, 16])
def test_modelled_copies_do_not_fall_with_pairs(ranks: int, tmp_path: Path) -> None:
    """Behind built-in links too a cut of three in eight pairs spares few copies, and the answer says what is sent."""
    path = tmp_path / "config.yaml"
    emulate = {"links": "h20-nvlink4-ndr", "device": "h20", "copies": "rank"}
    path.write_text(yaml.safe_dump({**CONFIG, "layer": {"ep_size": ranks}, "emulate": emulate}))
    shares = {}
    for copies in ("rank", "pair"):
        out = tmp_path / copies
        assert main(["emulate", str(path), "--set", f"emulate.copies={copies}", "--out", str(out)]) == OK
        rows = cases(load(out)).set_index("role")
        shares[copies] = rows.loc["policy", "comm_ms"] / rows.loc["baseline", "comm_ms"]
        (facts,) = [one.facts for one in load(out).comparisons]
        assert facts.copies == copies
    assert shares["pair"] < 0.8
    assert shares["rank"] > shares["pair"] + 0.1
    assert "one copy per (token, rank) and (token, other node), modelled over links" in modelled_line(
        [facts.model_copy(update={"copies": "rank"})]
    )
    with pytest.raises(UserError, match="copies: expected pair beside an exchange"):
        plan(path, ["emulate.links=" + NORMAL, "layer.ep_size=16"], VIRTUAL, on_cpu=True)


def test_ragged_ranks_wait_for_the_rank_that_sends_most(tmp_path: Path) -> None:
    """DeepEP, issue 250: 8 ranks with 384 tokens and 8 with 64 take 192 / 112 of as many tokens dealt evenly."""
    known = exchange("pair", num_ranks=16, num_nodes=1)
    ragged_RR = np.repeat(np.array([384] * 8 + [64] * 8)[:, None] * 3 / 16, 16, axis=1)
    even_RR = np.full((16, 16), 224 * 3 / 16)
    assert ragged_RR.sum() == even_RR.sum()
    assert known.tokens(ragged_RR) / known.tokens(even_RR) == pytest.approx(192 / 112)
    assert known.tokens(ragged_RR.T) == known.tokens(ragged_RR), "nor does it matter who receives them"


# Rows


def every_exchange() -> list[str]:
    """All names that ``load_links_of_layer`` takes, by what it lists."""
    names = []
    for system, framework in product(sorted(path.name for path in (root() / "data").iterdir()), BACKENDS):
        folder = root() / "data" / system / "comm" / framework
        for version in sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []:
            try:
                Tables.named(f"table:{system}/{framework}/{version}", "comm")
            except UserError as problem:
                listed = re.search(r"expected a kind of exchange of \S+ \S+ of (.*); got", str(problem))
                names += [f"{system}/{framework}/{version}/{one}" for one in listed[1].split(", ")] if listed else []
    return names


def test_all_exchanges_of_the_package_are_known() -> None:
    names = every_exchange()
    assert len(names) == 42
    of_sglang = {name for name in names if "/sglang/0.5.6.post2/" in name}
    assert of_sglang == {
        f"{gpu}_sxm/sglang/0.5.6.post2/deepep_{kind}" for gpu in ("h100", "h200") for kind in ("ll", "normal")
    }


@pytest.mark.slow
@pytest.mark.parametrize("named", every_exchange())
def test_every_row_is_met_under_uniform_routing(named: str) -> None:
    """To 1 %: the fastest row of each size, at the copies that uniform routing of the row's shape has."""
    rows = exchange_rows(Tables.named(f"table:{named}", "comm"))
    assert set(rows["phase"]) == {"dispatch", "combine"}
    assert (rows["us"] > 0).all()
    for (ranks, hidden), of_size in rows[rows["top_k"] == 8].groupby(["num_ranks", "hidden_size"]):
        model = DEEPSEEK.model_copy(update={"hidden_size": hidden, "num_experts": int(of_size["num_experts"].iloc[0])})
        dtype = {"": "fp8_block"}.get(of_size["dtype"].iloc[0], of_size["dtype"].iloc[0])
        links = load_links_of_layer(f"table:{named}", model, int(ranks), dtype)
        known = links.exchange
        assert known is not None
        own = of_size[(of_size["num_experts"] == known.num_experts) & of_size["dtype"].isin(["", known.sent_as])]
        for (phase, tokens), us in own.groupby(["phase", "num_tokens"])["us"].min().items():
            parts = known.num_nodes if known.copies == "node" else known.num_ranks
            each = known.top_k / parts if known.copies == "pair" else reached(known.num_experts, known.top_k, parts)
            at = ("dispatch", "combine").index(phase)
            found = known.times_us(np.full((known.num_ranks, parts), tokens * each))[at]
            assert found == pytest.approx([us] * known.num_ranks, rel=0.01), (phase, tokens)


@pytest.mark.parametrize(
    ("ranks", "dtype", "changes", "message"),
    [
        (24, "fp8_block", {}, "expected layer.ep_size of 8, 16, 32, 64; got 24"),
        (8, "fp8_block", {"sms": 13}, "expected exchange_sms of 20; got 13"),
        (8, "fp8_block", {"model": "olmoe-1b-7b"}, "expected a hidden size, or one near it, of 7168; got 2048"),
    ],
)
def test_what_was_not_measured_is_refused(ranks: int, dtype: str, changes: dict[str, Any], message: str) -> None:
    model = load_model(changes.pop("model", "deepseek-v3"))
    with pytest.raises(UserError, match=f"^{NORMAL}: {message}"):
        load_links_of_layer(NORMAL, model, ranks, dtype, **changes)
    with pytest.raises(UserError, match="exchange_sms: expected none but with an exchange"):
        load_links_of_layer("h100-nvlink4", model, 8, dtype, sms=20)
    with pytest.raises(UserError, match="expected links of NCCL"):
        load_links(NORMAL)


def test_sms_are_the_fastest_rows_or_those_asked_for() -> None:
    fastest = load_links_of_layer(NORMAL, DEEPSEEK, 16, "fp8_block").exchange
    few = load_links_of_layer(NORMAL, DEEPSEEK, 16, "fp8_block", sms=4).exchange
    assert fastest is not None
    assert few is not None
    assert set(few.dispatch_sms) == {4}
    assert (
        fastest.dispatch_sms[fastest.dispatch.root.index(next(p for p in fastest.dispatch.root if p[0] == 4096))] == 24
    )
    assert (np.diff([few.dispatch.at(4096), fastest.dispatch.at(4096)]) < 0).all()


def test_other_dtypes_and_hidden_sizes_take_the_nearest_rows_by_bytes() -> None:
    """By hand: SGLang's rows dispatch FP8 of 7,168 values; what is larger takes the row of as many bytes."""
    rows = {dtype: load_links_of_layer(NORMAL, DEEPSEEK, 8, "fp8_block", None, dtype).exchange
            for dtype in (None, "fp8", "bfloat16", "nvfp4")}  # fmt: skip
    copies_RR = np.full((8, 8), 4096 * reached(256, 8, 8))
    assert rows[None] == rows["fp8"]
    assert {dtype: row.dispatch_scale for dtype, row in rows.items()} == pytest.approx(
        {None: 1, "fp8": 1, "bfloat16": 2 / 1.03125, "nvfp4": 0.5625 / 1.03125}
    )
    for row in rows.values():
        dispatch_us, combine_us = row.times_us(copies_RR)
        assert dispatch_us[0] == pytest.approx(float(rows["fp8"].dispatch.at(4096 * row.dispatch_scale)))
        assert combine_us.tolist() == rows["fp8"].times_us(copies_RR)[1].tolist(), "it comes back in bfloat16"
    narrow = DEEPSEEK.model_copy(update={"hidden_size": 5120})
    near = load_links_of_layer(NORMAL, narrow, 8, "fp8_block").exchange
    assert (near.hidden_size, near.dispatch_scale, near.combine_scale) == pytest.approx((7168, 5 / 7, 5 / 7))
    assert "dispatch x 0.714 by bytes (modelled); combine x 0.714 by bytes (modelled)" in exchange_words(near.facts)
    # A table with rows of a dtype takes those; of any dtype 4,096 values are nearer to 4,096 than to 7,168.
    of_trtllm = "table:h100_sxm/trtllm/1.3.0rc11/trtllm_deepep_ht"
    for dtype, sent in (("nvfp4", "nvfp4"), ("bfloat16", "bfloat16")):
        found = load_links_of_layer(of_trtllm, narrow, 8, dtype).exchange
        assert (found.sent_as, found.dispatch_scale) == (sent, 5120 / found.hidden_size)


def test_sms_are_those_of_the_nearest_row() -> None:
    known = exchange("rank", dispatch_sms=(4, 8, 24), combine_sms=())
    each = reached(16, 3, 4)
    for tokens, sms in ((1, 4), (90, 8), (5_000, 24), (10**9, 24), (0, 4)):
        assert known.held_sms(np.full((4, 4), tokens * each)) == (sms, None), tokens


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_nodes": 1, "copies": "node"}, "copies: expected rank or pair on one node, got node"),
        ({"num_ranks": 3}, "num_ranks: expected a multiple of the 2 nodes, got 3"),
        ({"top_k": 17}, "top_k: expected at most the 16 experts, got 17"),
        ({"dispatch_sms": (1,)}, "dispatch_sms: expected one for each of 3 points, got 1"),
        ({"num_nodes": 0}, "num_nodes"),
        ({"num_experts": 2**31, "top_k": 2**30}, "num_experts"),
        ({"num_experts": 15}, "num_experts: expected at least the 16 ranks, got 15"),
        ({"dispatch_sms": (-4, 8, 8)}, "dispatch_sms"),
        ({"dispatch_scale": 0.0}, "dispatch_scale"),
    ],
)
def test_an_exchange_of_a_file_has_sizes_that_a_layer_can_have(
    changes: dict[str, Any], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line from the command, as of any file of links; so where its ranks are not those of the layer."""
    links = yaml.safe_load(
        (Path(root.__code__.co_filename).parents[1] / "data/links/h100-nvlink4-ndr.yaml").read_text()
    )
    values = {**exchange("rank", num_ranks=16, num_experts=256, top_k=8).model_dump(mode="json"), **changes}
    ours, config = tmp_path / "links.yaml", tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump({**CONFIG, "emulate": {**CONFIG["emulate"], "links": str(ours)}}))
    if changes == {"top_k": 17}:
        values["num_experts"] = 16
    ours.write_text(yaml.safe_dump({**links, "exchange": values}))
    assert main(["emulate", str(config), "--dry-run"]) == USER_ERROR
    said = capsys.readouterr().err.strip().splitlines()
    assert len(said) == 1
    assert message in said[0]
    ours.write_text(
        yaml.safe_dump({**links, "exchange": {**values, **exchange("rank", num_ranks=16).model_dump(mode="json")}})
    )
    assert main(["emulate", str(config), "--set", "layer.ep_size=32", "--dry-run"]) == USER_ERROR
    assert "exchange.num_ranks: expected 32, got 16" in capsys.readouterr().err


# In a layer


CONFIG: dict[str, Any] = {
    "name": "exchange",
    "model": {"preset": "deepseek-v3"},
    "workload": {"kind": "synthetic", "tokens_per_rank": 256, "num_batches": 1, "seed": 1},
    "layer": {"ep_size": 16, "dtype": "bfloat16"},
    "policies": [{"name": "token_drop", "capacity_factor": 0.625}],
    "emulate": {"links": NORMAL, "device": "h100-sxm"},
}


def test_an_exchange_is_what_a_layer_sends(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Dispatch and combine are the row's at the copies that were routed, and the answer says whose rows they are."""
    path = tmp_path / "config.yaml"
    values = {
        **CONFIG,
        "layer": {"ep_size": 16, "dtype": "bfloat16"},
        "emulate": {"links": NORMAL, "device": "h100-sxm"},
    }
    path.write_text(yaml.safe_dump(values))
    assert main(["emulate", str(path), "--out", str(tmp_path / "out")]) == OK
    said = " ".join(capsys.readouterr().out.split())
    assert (
        "Modelled, partly measured elsewhere: bf16, sglang/0.5.6.post2/deepep_normal, one copy per (token, other node),"
        " unfused permutation, no overlap." in said
    )
    store = load(tmp_path / "out")
    (facts,) = [one.facts for one in store.comparisons]
    assert facts.exchange.model_dump() == {
        "name": NORMAL,
        "measured_by": {
            **dict(zip(("package", "package_version"), package_version(), strict=True)),
            "system": "h100_sxm",
            "framework": "sglang",
            "version": "0.5.6.post2",
            "file": "h100_sxm/comm/sglang/0.5.6.post2/wideep_deepep_normal_perf.parquet",
        },
        "copies": "node",
        "num_nodes": 2,
        "num_experts": 256,
        "top_k": 8,
        "sms": [4, 24],
        "hidden_size": 7168,
        "sent_as": "fp8",
        "dispatch_scale": pytest.approx(2 / (1 + 4 / 128)),
        "combine_scale": 1.0,
    }
    assert "one for each other node (modelled)" in describe_links(facts.links, facts.exchange)
    rows = cases(store).set_index("role")
    known = load_links_of_layer(NORMAL, DEEPSEEK, 16, "bfloat16").exchange
    assert known is not None
    routed = pd_routing(tmp_path / "out")
    for role in ("baseline", "policy"):
        copies_RN = np.stack(routed[routed["case_id"] == rows.loc[role, "case_id"]].sort_values("rank")["copies_N"])
        dispatch_us, combine_us = known.times_us(copies_RN)
        assert rows.loc[role, "comm_ms"] == pytest.approx((dispatch_us[0] + combine_us[0]) / 1e3, rel=1e-6)
    # A third of the pairs are gone, and hardly a copy between nodes.
    assert rows.loc["policy", "dropped_share"] > 0.3
    assert rows.loc["policy", "comm_ms"] > 0.9 * rows.loc["baseline", "comm_ms"]


def pd_routing(directory: Path) -> Any:
    import pandas as pd

    return pd.concat(map(pd.read_parquet, (directory / "routing").glob("*.parquet")))


def test_a_bandwidth_is_no_factor_of_an_exchange(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"bandwidth_scale: expected 1 with an exchange that was measured, got 0\.5"):
        load_links_of_layer(NORMAL, DEEPSEEK, 8, "fp8_block").scaled(0.5)


def test_shared_experts_elsewhere_are_copies_of_their_own() -> None:
    class Traffic:
        rank_pairs = np.full((4, 4), 5)
        shared_RR = np.eye(4, dtype=int)

        def copies(self, of: str) -> np.ndarray:
            return np.full((4, {"rank": 4, "node": 2}[of]), 3)

    traffic: Any = Traffic()
    assert (sent_copies(traffic, "pair", 1) == 5 + np.eye(4)).all()
    assert (sent_copies(traffic, "rank", 1) == 3 + np.eye(4)).all()
    assert sent_copies(traffic, "node", 2).tolist() == [[4, 3], [4, 3], [3, 4], [3, 4]]
