"""Experts as servers compute them: the law of their kernels on a made-up GPU, and the package's own rows."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))
from tables import collected_loads

pytest.importorskip("aiconfigurator_core", reason="aiconfigurator-core is not installed: the extra `tables`")

from moe_ep_bench.cost_model.exchanges import reached
from moe_ep_bench.cost_model.expert_kernels import KernelTable, fit, kernel_tables, uniform_loads
from moe_ep_bench.cost_model.expert_rows import (
    BLOCKS,
    drawn_loads,
    find_table,
    fullest_rank,
    load_device_of_layer,
    planned_loads,
    read_moe,
)
from moe_ep_bench.cost_model.expert_table import SHAPE
from moe_ep_bench.cost_model.tables import KERNELS, Tables, root
from moe_ep_bench.errors import UserError
from moe_ep_bench.models import ModelSpec, load_model

DEEPSEEK = load_model("deepseek-v3")
SHAPE_OF = {"hidden_size": 1024, "ffn_hidden_size": 512, "num_experts": 64, "top_k": 4}
NORMAL = "table:h200_sxm/sglang/0.5.6.post2/deepep_normal"


# ---- a made-up GPU ---------------------------------------------------------------------------------------------------


def law_us(loads_L: np.ndarray, num_tokens: float, block: int) -> float:
    """What the made-up GPU takes, expert by expert: 30 us, 0.01 us a token that it is handed where rows are padded, and
    of an activated expert the longer of 3 us and 0.02 us a padded row; launches never take less than 40 us."""
    total = 30.0 + (0.01 * num_tokens if block > 1 else 0.0)
    for rows in loads_L:
        if rows > 0:
            total += max(3.0, 0.02 * block * -(-rows // block))
    return max(total, 40.0) if block > 1 else total


def made_up(block: int) -> dict[int, KernelTable]:
    tokens = [2**power for power in range(1, 15)]
    rows = [
        {**SHAPE_OF, "ep_size": ep_size, "num_tokens": number, "us": law_us(loads_L, number, block)}
        for ep_size in (2, 4, 8, 16, 32, 64)
        for number in tokens
        if (loads_L := uniform_loads(number, 64, 4, ep_size)).any() and loads_L.max() % block == 0
    ]
    return kernel_tables(pd.DataFrame(rows), block)


@pytest.mark.parametrize("block", [1, 128])
def test_uneven_loads_follow_padded_rows_and_activated_experts(block: int) -> None:
    """Seen are uniform loads alone; the law has to find what uneven ones take."""
    tables, generator = made_up(block), np.random.default_rng(0)
    for ep_size, num_tokens in ((2, 2048), (8, 2048), (8, 16_384), (32, 16_384)):
        for share in (1.0, 0.5):
            loads_L = generator.lognormal(np.log(num_tokens * 4 / 64), 1, 64 // ep_size).astype(int)
            loads_L *= generator.random(len(loads_L)) < share
            loads_L[0] += 1
            found = tables[ep_size].time_us(loads_L, num_tokens, num_tokens)
            assert found == pytest.approx(law_us(loads_L, num_tokens, block), rel=0.05)
    assert tables[8].time_us(np.zeros(8), 128) == 0


def test_fewer_activated_experts_take_less_time_at_decode() -> None:
    table = made_up(1)[8]
    times = [table.time_us(np.arange(8) < active, 64) for active in range(1, 9)]
    assert np.diff(times) == pytest.approx([3.0] * 7, rel=0.1)


def test_a_batch_beyond_the_rows_goes_by_the_law() -> None:
    table = made_up(128)[8]
    loads_L = np.full(8, 8192)
    assert table.time_us(loads_L, 131_072, 131_072) == pytest.approx(law_us(loads_L, 131_072, 128), rel=0.02)


def test_kernels_of_a_rank_are_handed_the_tokens_that_reach_it() -> None:
    """A row's went through those of all ranks: 0.01 us each."""
    table, num_tokens = made_up(128)[8], 16_384
    loads_L = table.loads(num_tokens)
    spared = num_tokens * (1 - reached(64, 4, 8))
    as_collected, as_served = table.time_us(loads_L, num_tokens, num_tokens), table.time_us(loads_L, num_tokens)
    assert as_collected - as_served == pytest.approx(0.01 * spared, rel=0.02)
    # A tenth of the pairs come with a tenth of the tokens.
    few_L = np.full(8, loads_L[0] // 8)
    assert table.time_us(few_L, num_tokens) == table.time_us(
        few_L, num_tokens, spared and num_tokens * reached(64, 4, 8) / 8
    )


def test_a_fit_takes_no_row_of_launches_for_one_of_work() -> None:
    """Half of the rows of few tokens take 40 us, whatever is in them; weights of an expert still take 3 us."""
    rows = [
        {
            **SHAPE_OF,
            "ep_size": ep_size,
            "num_tokens": number,
            "us": law_us(uniform_loads(number, 64, 4, ep_size), number, 128),
        }
        for ep_size in (2, 8, 64)
        for number in (2048, 4096, 8192, 16_384)
    ]
    kernels = fit(pd.DataFrame(rows), 128)
    assert kernels.least_us >= 40
    assert kernels.token_us == pytest.approx(0.01, rel=0.05)
    assert float(kernels.expert.at(128)) == pytest.approx(3.0, rel=0.1)


# ---- loads of rows ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_tokens", [1, 16, 1024])
def test_drawn_loads_hold_every_pair_and_no_token_twice(num_tokens: int) -> None:
    for seed in range(5):
        load_E = drawn_loads(1.2, num_tokens, 256, 8, seed)
        assert load_E.sum() == 8 * num_tokens
        assert 0 <= load_E.min() <= load_E.max() <= num_tokens
        assert (load_E == drawn_loads(1.2, num_tokens, 256, 8, seed)).all()


def test_planned_loads_are_more_even_than_unplanned_and_spread_over_slots() -> None:
    planned, spread = (planned_loads(4096, 256, 8, 16, num_slots) for num_slots in (256, 288))
    unplanned = np.median([fullest_rank(drawn_loads(1.01, 4096, 256, 8, seed), 16).sum() for seed in range(5)])
    assert len(planned) == 16
    assert len(spread) == 18
    assert 0.99 * 2048 <= min(spread.sum(), planned.sum()) <= max(spread.sum(), planned.sum()) < 0.9 * unplanned


# ---- the real package ------------------------------------------------------------------------------------------------


def every_device() -> list[str]:
    """All names with kernels in them."""
    found = []
    for file in sorted((root() / "data").glob("*/moe/*/*/wideep*_perf.parquet")):
        system, _, framework, version, name = file.parts[-5:]
        found += [f"table:{system}/{framework}/{version}/{key}" for key, of in KERNELS[framework].items() if of == name]
    return found


def test_all_kernels_of_the_package_are_known() -> None:
    names = every_device()
    assert len(names) == 2 * 8 + 2 * 7
    assert {name for name in names if "h200" in name and "0.5.6" in name} == {
        f"table:h200_sxm/sglang/0.5.6.post2/deepep_{kind}" for kind in ("normal", "ll")
    }


@pytest.mark.slow
@pytest.mark.parametrize("name", every_device())
def test_every_row_by_which_a_table_stands_is_met(name: str) -> None:
    """To 1 %, at the row's loads and as many tokens as it handed the kernels."""
    tables = Tables.named(name, "moe")
    rows = read_moe(tables)
    assert len(rows) or "rtx" in name  # whose rows are of unplanned loads
    for (*shape, dtype), of_shape in rows.groupby([*SHAPE, "dtype"]):
        model = DEEPSEEK.model_copy(update=dict(zip(SHAPE, shape, strict=True)))
        sizes = sorted(set(of_shape["ep_size"]))
        for ep_size in sizes if tables.backend in BLOCKS else (sizes[0], sizes[-1]):
            table = find_table(of_shape, model, ep_size, tables.backend)
            for row in of_shape[of_shape["ep_size"] == ep_size].itertuples():
                handed = {"handed_tokens": row.num_tokens} if tables.backend in BLOCKS else {}
                found = table.time_us(table.loads(row.num_tokens), row.num_tokens, **handed)
                assert found == pytest.approx(row.us, rel=0.01), (dtype, row)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "median", "most"),
    [
        (NORMAL, 0.05, 0.35),
        ("table:h200_sxm/sglang/0.5.6.post2/deepep_ll", 0.07, 0.35),
        ("table:h100_sxm/sglang/0.5.6.post2/deepep_ll", 0.07, 0.35),
        ("table:b200_sxm/sglang/0.5.10/deepep_normal", 0.06, 0.40),
    ],
)
def test_the_law_tells_power_law_rows_that_no_fit_has_seen(name: str, median: float, most: float) -> None:
    tables = Tables.named(name, "moe")
    rows = read_moe(tables, distribution=None)
    rows = rows[rows["distribution"].isin(["power_law_0.6", "power_law_1.2"]) & rows["ep_size"].isin([4, 32, 64])]
    stands, errors = read_moe(tables), []
    for row in rows.itertuples():
        table = find_table(stands, DEEPSEEK, row.ep_size, tables.backend)
        drawn = [fullest_rank(load_E, row.ep_size) for load_E in collected_loads(row, tables.version, 5)]
        found = np.mean([table.time_us(load_L, row.num_tokens, row.num_tokens) for load_L in drawn])
        errors.append(abs(found / row.us - 1))
    assert np.median(errors) < median
    assert max(errors) < most


def test_decode_behind_low_latency_dispatch_is_not_priced_by_rows_of_other_kernels() -> None:
    """SGLang's other kernels of 0.5.10 go through the tokens of all ranks: EP 32 takes far longer."""
    both = [
        load_device_of_layer(f"table:h200_sxm/sglang/0.5.10{part}", DEEPSEEK, 32, "fp8_block").experts
        for part in ("/deepep_ll", "")
    ]
    masked_us, other_us = (table.time_us(np.full(8, 128), 4096) for table in both)
    assert masked_us == pytest.approx(124.2, rel=0.01)
    assert other_us > 2 * masked_us


def test_an_ep_size_without_rows_is_refused() -> None:
    with pytest.raises(UserError, match=r"EP 2, 4, 8, 16, 32, 64, 128, 256\); got .*, EP 1$"):
        load_device_of_layer(NORMAL, DEEPSEEK, 1, "fp8_block")
    with pytest.raises(UserError, match="7168 x 2048, 256 experts"):
        load_device_of_layer(NORMAL, ModelSpec.named("mixtral-8x7b"), 8, "fp8_block")
