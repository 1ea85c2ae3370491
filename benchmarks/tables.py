"""Hold the built-in rooflines and links, and the straggler's law, against tables of real GPUs.

    python benchmarks/tables.py --out results/reference    # writes tables-*.csv, which tables.md reads; some minutes
    python benchmarks/tables.py --fit                      # prints the figures of data/devices/ and data/links/

Needs the extra ``tables``. Every fifth shape is held out of all fits, and errors on these stand apart. Errors are
|predicted / measured - 1|. ``BEFORE`` are the figures that data/devices/ had before they were fitted.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from moe_ep_bench.cost_model.devices import Device
from moe_ep_bench.cost_model.links import Links
from moe_ep_bench.cost_model.table_devices import ExpertTable, load_links, read_nccl, tables_of_shape
from moe_ep_bench.cost_model.tables import (
    BALANCED,
    SHAPE,
    UNGATED,
    Tables,
    balanced_loads,
    of_shape,
    package_words,
    read_moe,
)
from moe_ep_bench.placement import replicate

# Device, system, and the frameworks that its roofline is fitted to, each weighing the same.
DEVICES = {
    "h100-sxm": ("h100_sxm", ("trtllm/1.3.0rc20", "vllm/0.24.0")),
    "h200-sxm": ("h200_sxm", ("trtllm/1.3.0rc20", "vllm/0.24.0")),
    "a100-sxm-80gb": ("a100_sxm", ("sglang/0.5.10",)),  # The others have no balanced rows.
    "b200-sxm": ("b200_sxm", ("trtllm/1.3.0rc20", "vllm/0.24.0")),
    "gb200": ("gb200", ("trtllm/1.3.0rc20", "vllm/0.24.0")),
}
_ASSUMED = {"memory_efficiency": 0.81, "overhead_us": 37.0}
BEFORE = {
    "h100-sxm": {"arithmetic_efficiency": ((1, 0.003125), (128, 0.4), (1024, 0.5)), **_ASSUMED},
    "h200-sxm": {"arithmetic_efficiency": ((1, 0.003125), (128, 0.4), (1024, 0.5)), **_ASSUMED},
    "a100-sxm-80gb": {"arithmetic_efficiency": ((1, 0.00390625), (128, 0.5), (1024, 0.6)), **_ASSUMED},
}
# Links of one node, and the table of NCCL they are fitted to.
LINKS = {
    "h100-nvlink4": "table:h100_sxm/nccl/2.29.2",
    "a100-nvlink3": "table:a100_sxm/nccl/2.27.3",
    "b200-nvlink5": "table:b200_sxm/nccl/2.29.2",
    "gb200-nvl72": "table:gb200/nccl/2.29.2",
}
LINKS_BEFORE = {"h100-nvlink4": (10.6, 450 * 0.82), "a100-nvlink3": (10.6, 300 * 0.77)}
LAWS = ("table:h100_sxm/trtllm/1.3.0rc20", "table:h100_sxm/vllm/0.24.0", "table:h100_sxm/sglang/0.5.14")
# TensorRT-LLM's layers with and without EPLB.
WIDE, WIDE_EP = "table:h100_sxm/trtllm/1.3.0rc10", "wideep_moe_perf.parquet"
MOST_EP, HELD = 8, 5
# Tokens at which the law is held against power laws, draws of a row's loads, and the fewest rows of a table.
LAW_TOKENS, DRAWS, FEWEST = (16, 128, 1024, 4096, 16384), 10, 5
KNOTS = (1, 8, 32, 128, 512, 2048, 8192)
BANDS = ((0, 1, "<= 1"), (1, 8, "1 to 8"), (8, 64, "8 to 64"), (64, 512, "64 to 512"), (512, np.inf, "> 512"))


def held_out(rows: pd.DataFrame) -> pd.Series:
    """Rows of every fifth shape, in the order of hidden size, FFN size, experts and top-k."""
    shapes = sorted(set(rows[SHAPE].itertuples(index=False, name=None)))
    held = set(shapes[::HELD])
    return pd.Series([shape in held for shape in rows[SHAPE].itertuples(index=False, name=None)], index=rows.index)


def experts_rows(system: str, frameworks: tuple[str, ...]) -> pd.DataFrame:
    """Balanced rows in bfloat16 of gated experts up to EP 8, with a rank's activated experts and pairs."""
    parts = [
        read_moe(Tables.named(f"table:{system}/{one}", "moe"), dtype="bfloat16").assign(framework=one)
        for one in frameworks
    ]
    rows = pd.concat(parts, ignore_index=True)
    gated = [shape[:3] not in UNGATED for shape in rows[SHAPE].itertuples(index=False, name=None)]
    rows = rows[np.array(gated) & (rows["ep_size"] <= MOST_EP)].reset_index(drop=True)
    loads = [
        balanced_loads(one.num_tokens, one.num_experts, one.topk, one.num_experts // one.ep_size)
        for one in rows.itertuples()
    ]
    rows["active"] = [int((one > 0).sum()) for one in loads]
    rows["pairs"] = [int(one.sum()) for one in loads]
    rows["rows"] = rows["pairs"] / rows["active"]
    return rows.assign(held=held_out(rows))


def predicted_us(device: Device, rows: pd.DataFrame) -> np.ndarray:
    """The experts by the roofline, equally loaded, and the two sorts of rows that a table's row has in it."""
    hidden, ffn = rows["hidden_size"].to_numpy(float), rows["inter_size"].to_numpy(float)
    pairs, active = rows["pairs"].to_numpy(float), rows["active"].to_numpy(float)
    arithmetic_us = device.arithmetic_us(6 * pairs * hidden * ffn, rows["rows"])
    num_bytes = 2 * (3 * hidden * ffn * active + pairs * (2 * hidden + 6 * ffn))
    sorts_us = 2 * 2 * 2 * pairs * hidden / (device.memory_tbps * device.permute_efficiency * 1e6)
    return device.overhead_us + np.maximum(arithmetic_us, num_bytes / (device.reached_tbps * 1e6)) + sorts_us


def fit_device(device: Device, rows: pd.DataFrame) -> Device:
    """Overhead, share of the memory bandwidth and shares of the arithmetic, on the shapes that are not held out."""
    from scipy.optimize import least_squares

    # Elsewhere SGLang's rows on an A100 hold what its kernel does for the pairs of other ranks.
    seen = rows[~rows["held"] & ((rows["ep_size"] == 1) | ~rows["framework"].str.startswith("sglang"))]
    weights = 1 / np.sqrt(seen.groupby("framework")["us"].transform("size").to_numpy())
    weights *= np.sqrt(len(seen))

    def made(figures: np.ndarray) -> Device:
        shares = tuple((float(knot), float(np.exp(share))) for knot, share in zip(KNOTS, figures[2:], strict=True))
        update = {"overhead_us": float(np.exp(figures[0])), "memory_efficiency": float(np.exp(figures[1]))}
        return device.model_copy(update={**update, "arithmetic_efficiency": shares})

    def errors(figures: np.ndarray) -> np.ndarray:
        return weights * np.log(predicted_us(made(figures), seen) / seen["us"].to_numpy())

    # At one row memory alone binds: a share of the arithmetic well above stands there.
    start = np.log([30, 0.8, 0.02, 0.04, 0.12, 0.4, 0.55, 0.6, 0.6])
    low, high = np.log([1, 0.3, 0.01, *[0.001] * 6]), np.log([500, 0.95, 0.03, *[0.95] * 6])
    return made(least_squares(errors, start, bounds=(low, high), loss="soft_l1", f_scale=0.1).x)


def band(rows: pd.Series) -> pd.Series:
    return pd.cut(rows, [0, *(high for _, high, _ in BANDS)], labels=[name for *_, name in BANDS])


def errors_of(frame: pd.DataFrame, by: list[str]) -> pd.DataFrame:
    """Rows, median and mean absolute error, and median ratio, by columns."""
    frame = frame.assign(error=(frame["predicted"] / frame["measured"] - 1).abs())
    frame["ratio"] = frame["predicted"] / frame["measured"]
    found = frame.groupby(by, observed=True, sort=False).agg(
        rows=("error", "size"), median=("error", "median"), mean=("error", "mean"), ratio=("ratio", "median")
    )
    return found.reset_index()


# ---- (a) rooflines ---------------------------------------------------------------------------------------------------


def rooflines() -> pd.DataFrame:
    """A row for each measured row and stage, before and after the fit."""
    parts = []
    for name, (system, frameworks) in DEVICES.items():
        rows, now = experts_rows(system, frameworks), Device.named(name)
        stages = {"after": now}
        if name in BEFORE:
            stages["before"] = now.model_copy(update=BEFORE[name])
        for stage, device in sorted(stages.items(), reverse=True):
            parts.append(
                rows.assign(device=name, stage=stage, predicted=predicted_us(device, rows), measured=rows["us"])
            )
    found = pd.concat(parts, ignore_index=True)
    return found.assign(band=band(found["rows"]), shapes=np.where(found["held"], "held out", "fitted"))


# ---- (b) the straggler's law -----------------------------------------------------------------------------------------


def interpolation(name: str) -> pd.DataFrame:
    """Every inner row predicted from the others of its shape and EP size, and from all."""
    found = []
    for tables in _tables(Tables.named(name, "moe")):
        for position in range(1, len(tables.tokens) - 1):
            kept = [at for at in range(len(tables.tokens)) if at != position]
            number, measured = tables.tokens[position], tables.times_us[position]
            fewer = tables.model_copy(
                update={
                    "tokens": tuple(tables.tokens[at] for at in kept),
                    "times_us": tuple(tables.times_us[at] for at in kept),
                }
            )
            fewer = ExpertTable.model_validate(fewer.model_dump())
            loads = tables.loads(number)
            found.append(("at the row", tables.time_us(loads, number), measured))
            found.append(("without the row", fewer.time_us(loads, number), measured))
    return pd.DataFrame(found, columns=["how", "predicted", "measured"]).assign(table=name)


def _tables(tables: Tables, dtype: str = "bfloat16") -> Iterator[ExpertTable]:
    for _, rows in read_moe(tables, dtype=dtype).groupby(SHAPE):
        for table in tables_of_shape(rows).values():
            if len(table.tokens) >= FEWEST:
                yield table


def law(name: str) -> pd.DataFrame:
    """Ratio imbalanced over balanced of every power-law row: predicted from balanced rows and drawn loads, measured."""
    tables, generator = Tables.named(name, "moe"), np.random.default_rng(0)
    every = read_moe(tables, distribution=None)
    every = every[every["num_tokens"].isin(LAW_TOKENS)]
    drawn: dict[tuple, list[np.ndarray]] = {}
    found = []
    for dtype in sorted(every["dtype"].unique()):
        for table in _tables(tables, dtype):
            shape = (table.hidden_size, table.ffn_hidden_size, table.num_experts, table.top_k)
            own = every[(every["dtype"] == dtype) & (every["ep_size"] == table.ep_size)]
            own = of_shape(own, shape)
            balanced_us = own[own["distribution"] == BALANCED].set_index("num_tokens")["us"]
            for one in own[own["distribution"] != BALANCED].itertuples():
                if one.num_tokens not in balanced_us.index:
                    continue
                exponent = float(one.distribution.rpartition("_")[2])
                key = (one.num_tokens, *shape[2:], table.ep_size, exponent)
                if key not in drawn:
                    drawn[key] = [power_law_loads(*key, generator)[0] for _ in range(DRAWS)]
                times = np.array([table.time_us(loads, one.num_tokens) for loads in drawn[key]])
                load = np.mean([loads.sum() for loads in drawn[key]]) * table.ep_size / (one.num_tokens * table.top_k)
                base_us = float(balanced_us[one.num_tokens])
                found.append(
                    {
                        "dtype": dtype,
                        "ep_size": table.ep_size,
                        "num_tokens": one.num_tokens,
                        **dict(zip(SHAPE, shape, strict=True)),
                        "load": load,
                        "predicted": times.mean() / base_us,
                        "measured": one.us / base_us,
                        "of_all_tokens": table.token_us * one.num_tokens / base_us,
                        "chance": times.std() / times.mean() / np.sqrt(5),
                    }
                )
    frame = pd.DataFrame(found)
    return frame.assign(table=name, held=held_out(frame))


def power_law_loads(
    num_tokens: int, num_experts: int, top_k: int, ep_size: int, exponent: float, generator: np.random.Generator
) -> NDArray[np.int64]:
    """Pairs of each expert, by rank, for one draw of ``power_law_<exponent>`` scores: int64 [R, L], the fullest first.

    Weights are drawn between 1 and 0.8 of the tokens (0.01 and 2 where there are no more pairs than experts), loads are
    rounded shares of all pairs, no expert has more than all tokens, and what rounding leaves goes in turn to the least
    loaded (or is taken from the most loaded) expert of each rank. Theirs is drawn anew, with no seed, for each row.
    """
    pairs = num_tokens * top_k
    low, high = (1.0, 0.8 * num_tokens) if pairs > num_experts else (0.01, 2.0)
    power = 1.0 - exponent
    uniform = generator.random(num_experts)
    weights = ((high**power - low**power) * uniform + low**power) ** (1 / power)
    loads = np.minimum(np.rint(weights / weights.sum() * pairs).astype(np.int64), num_tokens)
    loads_RL = loads.reshape(ep_size, -1)
    missing = pairs - int(loads.sum())
    quota_R = np.full(ep_size, abs(missing) // ep_size) + (np.arange(ep_size) < abs(missing) % ep_size)
    for row, quota in zip(loads_RL, quota_R, strict=True):
        _level(row, int(quota), num_tokens, up=missing > 0)
    fullest = int(loads_RL.sum(axis=1).argmax())
    loads_RL[[0, fullest]] = loads_RL[[fullest, 0]]
    return loads_RL


def _level(loads_L: NDArray[np.int64], quota: int, most: int, *, up: bool) -> None:
    """Give ``quota`` pairs, one by one, to the least loaded expert, or take them from the most loaded; in place."""
    sign = 1 if up else -1
    heights = loads_L * sign  # Taking from the fullest is giving to the least of the negatives.
    limit = most if up else 0
    quota = min(quota, int((limit - heights).sum()))
    while quota > 0:
        least = heights.min()
        lowest = np.flatnonzero(heights == least)
        above = heights[heights > least]
        step = (min(int(above.min()), limit) if len(above) else limit) - int(least)
        if step * len(lowest) <= quota:
            heights[lowest] += step
            quota -= step * len(lowest)
        else:
            each, rest = divmod(quota, len(lowest))
            heights[lowest] += each
            heights[lowest[:rest]] += 1
            quota = 0
    loads_L[:] = heights * sign


# ---- (c) wide EP -----------------------------------------------------------------------------------------------------


def wide_ep() -> pd.DataFrame:
    """The gain of EPLB: time with a home for every expert over time with planned slots, predicted and measured."""
    tables, generator = Tables.named(WIDE, "moe"), np.random.default_rng(0)
    columns = [*SHAPE, "moe_dtype", "moe_ep_size", "num_slots", "num_tokens", "distribution", "latency"]
    rows = tables.read("moe", WIDE_EP, columns)
    rows["exponent"] = rows["distribution"].str.extract(r"([\d.]+)", expand=False).astype(float)
    rows = rows[rows["num_tokens"].isin(LAW_TOKENS)]
    found = []
    for (hidden, ffn, experts, top_k), own in rows.groupby(SHAPE):
        balanced = read_moe(tables, dtype="fp8_block")
        balanced = of_shape(balanced, (hidden, ffn, experts, top_k))
        by_size = tables_of_shape(balanced) if len(balanced) else {}
        for (ep_size, exponent, number), points in own.groupby(["moe_ep_size", "exponent", "num_tokens"]):
            plain = points[~points["distribution"].str.endswith("eplb")]["latency"]
            if ep_size not in by_size or len(plain) != 1:
                continue
            table = by_size[ep_size]
            table = table.model_copy(update={"expert_us": 3 * hidden * ffn / 2.7e6})
            draws = [power_law_loads(number, experts, top_k, ep_size, exponent, generator) for _ in range(DRAWS)]
            native_us = np.mean([table.time_us(loads_RL[0], number) for loads_RL in draws])
            for one in points[points["distribution"].str.endswith("eplb")].itertuples():
                times = []
                for loads_RL in draws:
                    load_E = loads_RL.ravel()
                    placed = replicate(load_E, num_slots=one.num_slots, num_ranks=ep_size, policy="global")
                    slots_P = placed.slot_expert_LP[0]
                    load_P = (load_E / placed.replicas[0])[slots_P].reshape(ep_size, -1)
                    times.append(table.time_us(load_P[load_P.sum(axis=1).argmax()], number))
                found.append(
                    {
                        **dict(zip(SHAPE, (hidden, ffn, experts, top_k), strict=True)),
                        "ep_size": ep_size,
                        "exponent": exponent,
                        "num_tokens": number,
                        "slots": f"{one.num_slots} of {experts} experts",
                        "predicted": native_us / np.mean(times),
                        "measured": float(plain.iloc[0]) / one.latency,
                    }
                )
    return pd.DataFrame(found)


# ---- (d) links -------------------------------------------------------------------------------------------------------


def links() -> pd.DataFrame:
    """Every size of an even all-to-all on all GPUs of a node: by the file, by the file before, by the table."""
    found = []
    for name, table in LINKS.items():
        rows = read_nccl(Tables.named(table, "comm"))
        rows = rows[(rows["op_name"] == "alltoall") & (rows["num_gpus"] == rows["num_gpus"].max())]
        sizes, measured = rows["bytes"].to_numpy(), rows["us"].to_numpy()
        now, elsewhere = Links.named(name).intra, load_links(table).intra
        predictions = {"after": now.time_us(sizes), "table": elsewhere.time_us(sizes)}
        if name in LINKS_BEFORE:
            latency_us, reached_gbps = LINKS_BEFORE[name]
            predictions["before"] = latency_us + sizes / (reached_gbps * 1e3)
        for stage, predicted in predictions.items():
            found.append(
                pd.DataFrame({"bytes": sizes, "predicted": predicted, "measured": measured}).assign(
                    links=name, stage=stage, gpus=int(rows["num_gpus"].max())
                )
            )
    return pd.concat(found, ignore_index=True)


# ---- what is written -------------------------------------------------------------------------------------------------


def errors() -> Iterator[tuple[str, pd.DataFrame]]:
    """All errors, by the name of their file."""
    fits = rooflines()
    yield "rooflines", errors_of(fits, ["device", "framework", "stage", "shapes"])
    by_rows = errors_of(fits[fits["stage"] == "after"], ["device", "framework", "shapes", "band"])
    yield "rooflines-by-rows", by_rows.rename(columns={"band": "rows an expert"})
    points = pd.concat([interpolation(name) for name in LAWS], ignore_index=True)
    yield "interpolation", errors_of(points, ["table", "how"])
    laws = pd.concat([law(name) for name in LAWS], ignore_index=True)
    yield "law", errors_of(laws, ["table"])
    key = ["table", "dtype", "ep_size"]
    medians = laws.groupby(key)[["measured", "load", "of_all_tokens", "chance"]].median().reset_index()
    yield "law-by-ep", errors_of(laws, key).merge(medians).rename(columns={"ratio": "predicted over measured"})
    yield "law-by-tokens", errors_of(laws, ["table", "num_tokens"])
    wide, key = wide_ep(), ["slots", "ep_size"]
    gains = wide.groupby(key)[["predicted", "measured"]].median().reset_index()
    yield "wide-ep", errors_of(wide, key).drop(columns="ratio").merge(gains)
    carried = links()
    carried["worst"] = (carried["predicted"] / carried["measured"] - 1).abs()
    worst = carried.groupby(["links", "stage"])["worst"].max().reset_index()
    yield "links", errors_of(carried, ["links", "stage", "gpus"]).merge(worst).drop(columns="ratio")


def fitted() -> Iterator[str]:
    """The figures for data/devices/ and data/links/, as YAML."""
    for name, (system, frameworks) in DEVICES.items():
        rows = experts_rows(system, frameworks)
        like = Device.named(name if name in Device.names() else "h200-sxm")
        device = fit_device(like, rows)
        yield f"# {name}"
        yield f"overhead_us: {device.overhead_us:.3g}\nmemory_efficiency: {device.memory_efficiency:.3g}"
        yield "arithmetic_efficiency:"
        yield from (f"  - [{knot:g}, {share:.3g}]" for knot, share in device.arithmetic_efficiency)
        errors = rows.assign(predicted=predicted_us(device, rows), measured=rows["us"])
        yield "\n".join(f"# {line}" for line in errors_of(errors, ["framework", "held"]).to_string().splitlines())
    for name, table in LINKS.items():
        link = load_links(table).intra
        yield f"# {name}\n  latency_us: {link.latency_us:.3g}\n  curve:"
        yield from (f"    - [{size:.6g}, {us:.4g}]" for size, us in link.curve)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("results/reference"), help="folder (default: %(default)s)")
    parser.add_argument("--fit", action="store_true", help="print fitted figures; write nothing")
    options = parser.parse_args()
    if options.fit:
        print("\n".join(fitted()))
        return
    options.out.mkdir(parents=True, exist_ok=True)
    print(f"from {package_words()}")
    for name, frame in errors():
        frame.to_csv(options.out / f"tables-{name}.csv", index=False, float_format="%.6g")
        print(f"\n{name}\n{frame.to_string(index=False, float_format='{:.3g}'.format)}", flush=True)


if __name__ == "__main__":
    main()
