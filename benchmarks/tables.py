"""Hold the built-in rooflines and links, and the straggler's law, against tables of real GPUs.

    python benchmarks/tables.py --out results/reference    # writes tables-*.csv, which tables.md reads; some minutes
    python benchmarks/tables.py --fit                      # prints the figures of data/devices/ and data/links/

Needs the extra ``tables``. Every fifth shape is held out of all fits, and errors on these stand apart. Errors are
|predicted / measured - 1|.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike, NDArray
from scipy.optimize import least_squares

from moe_ep_bench.cost_model.curve import Curve
from moe_ep_bench.cost_model.devices import Device
from moe_ep_bench.cost_model.expert_rows import (
    BALANCED,
    BLOCKS,
    UNIFORM,
    WIDE,
    drawn_loads,
    find_table,
    fullest_rank,
    of_shape,
    read_moe,
    rounded_loads,
)
from moe_ep_bench.cost_model.expert_table import SHAPE, ExpertTable, balanced_loads, tables_of_shape
from moe_ep_bench.cost_model.links import Links
from moe_ep_bench.cost_model.tables import Tables, load_links, package_version, read_nccl, root
from moe_ep_bench.models import ModelSpec
from moe_ep_bench.workload.synthetic import quotas

# Device, system, and the frameworks that its roofline is fitted to, each weighing the same.
DEVICES = {
    "h100-sxm": ("h100_sxm", ("trtllm/1.3.0rc20", "vllm/0.24.0")),
    "h200-sxm": ("h200_sxm", ("trtllm/1.3.0rc20", "vllm/0.24.0")),
    "a100-sxm-80gb": ("a100_sxm", ("sglang/0.5.10",)),  # The others have no balanced rows.
    "b200-sxm": ("b200_sxm", ("trtllm/1.3.0rc20", "vllm/0.24.0")),
    "gb200": ("gb200", ("trtllm/1.3.0rc20", "vllm/0.24.0")),
}
# Experts of Nemotron 3, which are no gated FFNs: hidden size, FFN size, experts.
UNGATED = {(2688, 1856, 128), (1024, 2688, 512), (4096, 2688, 512), (2048, 5120, 512), (8192, 5120, 512)}
# Links of one node, and the table of NCCL they are fitted to.
LINKS = {
    "h100-nvlink4": "table:h100_sxm/nccl/2.29.2",
    "a100-nvlink3": "table:a100_sxm/nccl/2.27.3",
    "b200-nvlink5": "table:b200_sxm/nccl/2.29.2",
    "gb200-nvl72": "table:gb200/nccl/2.29.2",
}
# GEMMs whose gain over bfloat16 is taken: by systems that have fp8, frameworks, dtypes, rows, and the least side.
WITH_FP8, GEMMS = ("h100_sxm", "h200_sxm", "b200_sxm", "gb200"), ("trtllm/1.3.0rc20", "vllm/0.24.0", "sglang/0.5.14")
GEMM_DTYPES, GEMM_ROWS, LEAST_SIDE = {"fp8", "fp8_block", "nvfp4"}, (4096, 16_384), 2048
LAWS = ("table:h100_sxm/trtllm/1.3.0rc20", "table:h100_sxm/vllm/0.24.0", "table:h100_sxm/sglang/0.5.14")
# Kernels of servers that dispatch, and tokens at which those are held whose loads have to be planned.
KERNELS = (
    *(
        f"table:{system}/sglang/0.5.6.post2/deepep_{kind}"
        for system in ("h100_sxm", "h200_sxm")
        for kind in ("normal", "ll")
    ),
    *(f"table:{system}/sglang/0.5.10/deepep_{kind}" for system in ("b200_sxm", "gb200") for kind in ("normal", "ll")),
    *(f"table:{system}/trtllm/1.3.0rc10/wideep" for system in ("h100_sxm", "h200_sxm", "b200_sxm")),
)
WIDE_TOKENS = (4, 32, 128, 512, 2048, 4096, 8192, 16384)
MOST_EP, HELD = 8, 5
# Tokens at which the law is held against power laws, draws of a row's loads, and the fewest rows of a table.
LAW_TOKENS, DRAWS, FEWEST = (16, 128, 1024, 4096, 16384), 10, 5
# Rows of an expert at which the share of the arithmetic is fitted.
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
        read_moe(Tables.named(f"table:{system}/{framework}", "moe"), dtype="bfloat16").assign(framework=framework)
        for framework in frameworks
    ]
    rows = pd.concat(parts, ignore_index=True)
    is_gated = ~rows[SHAPE[:3]].apply(tuple, axis=1).isin(UNGATED)
    rows = rows[is_gated & (rows["ep_size"] <= MOST_EP)].reset_index(drop=True)
    loads = [
        balanced_loads(row.num_tokens, row.num_experts, row.top_k, row.num_experts // row.ep_size)
        for row in rows.itertuples()
    ]
    rows = rows.assign(active=[int((load_L > 0).sum()) for load_L in loads], pairs=[int(one.sum()) for one in loads])
    return rows.assign(rows=rows["pairs"] / rows["active"], held=held_out(rows))


def predicted_us(device: Device, rows: pd.DataFrame) -> np.ndarray:
    """The experts by the roofline, equally loaded, and the two sorts of rows that a table's row has in it."""
    hidden, ffn = rows["hidden_size"].to_numpy(float), rows["ffn_hidden_size"].to_numpy(float)
    pairs, active = rows["pairs"].to_numpy(float), rows["active"].to_numpy(float)
    arithmetic_us = device.arithmetic_us(6 * pairs * hidden * ffn, rows["rows"])
    num_bytes = 2 * (3 * hidden * ffn * active + pairs * (2 * hidden + 6 * ffn))
    sorts_us = 2 * 2 * 2 * pairs * hidden / (device.memory_tbps * device.permute_efficiency * 1e6)
    return device.overhead_us + np.maximum(arithmetic_us, num_bytes / (device.reached_tbps * 1e6)) + sorts_us


def fit_roofline(
    device: Device,
    predict: Callable[[Device], NDArray[np.float64]],
    measured: ArrayLike,
    weights: ArrayLike = 1.0,
    smoothness: float = 0.0,
    *,
    may_fall: bool = True,
) -> Device:
    """Overhead, share of the memory bandwidth and shares of the arithmetic: least squares of log ratios, robust.

    Args:
        predict: times of the measured points by a device.
        weights: of each point's error.
        may_fall: shares may fall as rows grow, as those of one device's kernels may under its power cap. Between
            frameworks whose kernels differ they would fall where none of theirs does.
        smoothness: weight of the log ratio of neighbouring shares, beside the points' errors: settles those shares that
            no point shows, because memory binds there.
    """

    def made(figures: np.ndarray) -> Device:
        shares = Curve.of(KNOTS, np.exp(figures[2:] if may_fall else np.maximum.accumulate(figures[2:])))
        update = {"overhead_us": float(np.exp(figures[0])), "memory_efficiency": float(np.exp(figures[1]))}
        return device.model_copy(update={**update, "arithmetic_efficiency": shares})

    def errors(figures: np.ndarray) -> np.ndarray:
        of_points = np.asarray(weights) * np.log(predict(made(figures)) / np.asarray(measured))
        return np.append(of_points, smoothness * np.diff(figures[2:]))

    # At one row memory alone binds: a share of the arithmetic well above stands there.
    start = np.log([30, 0.8, 0.02, 0.04, 0.12, 0.4, 0.55, 0.6, 0.6])
    low, high = np.log([1, 0.3, 0.01, *[0.001] * 6]), np.log([500, 0.95, 0.03, *[0.95] * 6])
    return made(least_squares(errors, start, bounds=(low, high), loss="soft_l1", f_scale=0.1).x)


def as_yaml(device: Device) -> Iterator[str]:
    yield f"overhead_us: {device.overhead_us:.3g}\nmemory_efficiency: {device.memory_efficiency:.3g}"
    yield "arithmetic_efficiency:"
    yield from (f"  - [{knot:g}, {share:.3g}]" for knot, share in device.arithmetic_efficiency.root)


def gemm_speeds(system: str) -> dict[str, float]:
    """Bfloat16's time over a dtype's, of GEMMs of ``GEMM_ROWS``: the middle framework's median over shapes."""
    gains: dict[str, list[float]] = {}
    for framework in GEMMS:
        rows = pd.read_parquet(root() / "data" / system / "gemm" / framework / "gemm_perf.parquet")
        rows = rows[rows["m"].between(*GEMM_ROWS) & (rows[["n", "k"]] >= LEAST_SIDE).all(axis=1)]
        times = rows.groupby(["m", "n", "k", "gemm_dtype"])["latency"].min().unstack()
        for dtype in GEMM_DTYPES & set(times):
            gains.setdefault(dtype, []).append(float((times["bfloat16"] / times[dtype]).median()))
    return {dtype: float(np.median(of_dtype)) for dtype, of_dtype in sorted(gains.items())}


def fit_device(device: Device, rows: pd.DataFrame) -> Device:
    """Overhead, share of the memory bandwidth and shares of the arithmetic, on the shapes that are not held out."""
    # Elsewhere SGLang's rows on an A100 hold what its kernel does for the pairs of other ranks.
    seen = rows[~rows["held"] & ((rows["ep_size"] == 1) | ~rows["framework"].str.startswith("sglang"))]
    weights = 1 / np.sqrt(seen.groupby("framework")["us"].transform("size").to_numpy())
    weights *= np.sqrt(len(seen))
    may_fall = seen["framework"].nunique() == 1
    return fit_roofline(device, lambda made: predicted_us(made, seen), seen["us"], weights, may_fall=may_fall)


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
    """A row for each measured row."""
    parts = []
    for name, (system, frameworks) in DEVICES.items():
        rows = experts_rows(system, frameworks)
        predicted = predicted_us(Device.named(name), rows)
        parts.append(rows.assign(device=name, stage="after", predicted=predicted, measured=rows["us"]))
    frame = pd.concat(parts, ignore_index=True)
    return frame.assign(band=band(frame["rows"]), shapes=np.where(frame["held"], "held out", "fitted"))


# ---- (b) the straggler's law -----------------------------------------------------------------------------------------


def interpolation(name: str) -> pd.DataFrame:
    """Every inner row predicted from the others of its shape and EP size, and from all."""
    rows = []
    for table in _tables(Tables.named(name, "moe")):
        points = table.curve.root
        for position in range(1, len(points) - 1):
            (tokens, measured), others = points[position], points[:position] + points[position + 1 :]
            fewer = ExpertTable.model_validate(table.model_dump() | {"curve": others})
            loads = table.loads(int(tokens))
            rows.append(("at the row", table.time_us(loads, int(tokens)), measured))
            rows.append(("without the row", fewer.time_us(loads, int(tokens)), measured))
    return pd.DataFrame(rows, columns=["how", "predicted", "measured"]).assign(table=name)


def _tables(tables: Tables, dtype: str = "bfloat16") -> Iterator[ExpertTable]:
    for _, rows in read_moe(tables, dtype=dtype).groupby(SHAPE):
        for table in tables_of_shape(rows).values():
            if len(table.curve.root) >= FEWEST:
                yield table


def law(name: str) -> pd.DataFrame:
    """Ratio imbalanced over balanced of every power-law row: predicted from balanced rows and drawn loads, measured."""
    tables, found = Tables.named(name, "moe"), []
    measured = read_moe(tables, distribution=None)
    measured = measured[measured["num_tokens"].isin(LAW_TOKENS)]
    for dtype, table in ((name, table) for name in sorted(set(measured["dtype"])) for table in _tables(tables, name)):
        shape = {key: getattr(table, key) for key in SHAPE}
        of_table = measured[(measured["dtype"] == dtype) & (measured["ep_size"] == table.ep_size)]
        rows = of_shape(of_table, list(shape.values()))
        base = rows[rows["distribution"] == BALANCED][["num_tokens", "us"]].rename(columns={"us": "base_us"})
        for row in rows[rows["distribution"] != BALANCED].merge(base).itertuples():
            drawn = fullest_ranks(row.distribution, row.num_tokens, row.num_experts, row.top_k, row.ep_size)
            times = np.array([table.time_us(load_L, row.num_tokens) for load_L in drawn])
            pairs = np.mean([load_L.sum() for load_L in drawn])
            ratios = {
                "load": pairs * table.ep_size / (row.num_tokens * table.top_k),
                "predicted": times.mean() / row.base_us,
                "measured": row.us / row.base_us,
                "of_all_tokens": table.token_us * row.num_tokens / row.base_us,
                "chance": times.std() / times.mean() / np.sqrt(5),
            }
            at = {"dtype": dtype, "ep_size": table.ep_size, "num_tokens": row.num_tokens}
            found.append({**at, **shape, **ratios})
    frame = pd.DataFrame(found)
    return frame.assign(table=name, held=held_out(frame))


@cache
def fullest_ranks(
    distribution: str, num_tokens: int, num_experts: int, top_k: int, ep_size: int, draws: int = DRAWS
) -> list[NDArray[np.int64]]:
    """Pairs of each expert of the fullest rank, int64 [L], for draws of ``power_law_A`` scores.

    Theirs are drawn anew, with no seed, for each row.
    """
    sizes = num_experts, top_k, num_tokens
    drawn = (quotas(distribution, index, *sizes, seed=0).reshape(ep_size, -1) for index in range(draws))
    return [load_RL[load_RL.sum(axis=1).argmax()] for load_RL in drawn]


# ---- (c) kernels of servers that dispatch ----------------------------------------------------------------------------


def kernels(name: str) -> pd.DataFrame:
    """Every power-law row by which the table does not stand: predicted from those by which it does, and drawn loads."""
    tables, found = Tables.named(name, "moe"), []
    rows, stands = read_moe(tables, distribution=None), read_moe(tables)
    is_wide = tables.backend == WIDE
    if is_wide:
        rows = rows[rows["num_tokens"].isin(WIDE_TOKENS)]
    known = [*SHAPE, "dtype", "ep_size", "distribution", "num_slots", "num_tokens"]
    held = rows.merge(stands[known], how="left", indicator=True)
    held = held[(held["_merge"] == "left_only") & (held["distribution"] != UNIFORM)]
    held = held.merge(stands[[*SHAPE, "ep_size"]].drop_duplicates())
    for (*shape, ep_size), of_table in held.groupby([*SHAPE, "ep_size"]):
        model = ModelSpec.named("deepseek-v3").model_copy(update=dict(zip(SHAPE, shape, strict=True)))
        table = find_table(stands, model, ep_size, tables.backend)
        for row in of_table.itertuples():
            num_slots = row.num_slots if row.distribution.endswith("_eplb") else None
            drawn = [fullest_rank(load_E, ep_size, num_slots) for load_E in collected_loads(row, tables.version)]
            # Rows of TensorRT-LLM handed the kernels what a server's dispatch brings; SGLang's all tokens.
            handed = {"handed_tokens": row.num_tokens} if tables.backend in BLOCKS else {}
            times = np.array([table.time_us(load_L, row.num_tokens, **handed) for load_L in drawn])
            at = {
                "distribution": row.distribution,
                "slots": row.num_slots,
                "ep_size": ep_size,
                "num_tokens": row.num_tokens,
            }
            found.append({**at, "predicted": times.mean(), "measured": row.us, "chance": times.std() / times.mean()})
    return pd.DataFrame(found).assign(table=name)


def collected_loads(row: Any, version: str, draws: int = 5) -> Iterator[NDArray[np.int64]]:
    """Pairs of each expert, int64 [E], as a power-law row's collector drew them; theirs have no seed.

    Collectors of SGLang 0.5.10 give what rounding leaves to the emptiest expert of each rank in turn, or take it from
    the fullest; older ones as ``drawn_loads`` does. It decides which experts few tokens activate.
    """
    exponent = float(row.distribution.split("_")[2])
    for seed in range(draws):
        sizes = row.num_tokens, row.num_experts, row.top_k, seed
        if version != "0.5.10":
            yield drawn_loads(exponent, *sizes)
            continue
        load_RL = rounded_loads(exponent, *sizes).reshape(row.ep_size, -1)
        while missing := row.num_tokens * row.top_k - int(load_RL.sum()):
            at_R = load_RL.argmin(axis=1) if missing > 0 else load_RL.argmax(axis=1)
            found_R = load_RL[np.arange(row.ep_size), at_R]
            ranks = np.flatnonzero(found_R < row.num_tokens if missing > 0 else found_R > 0)[: abs(missing)]
            load_RL[ranks, at_R[ranks]] += np.sign(missing)
        yield load_RL.ravel()


# ---- (d) links -------------------------------------------------------------------------------------------------------


def links() -> pd.DataFrame:
    """Every size of an even all-to-all on all GPUs of a node: by the file and by the table."""
    parts = []
    for name, table in LINKS.items():
        rows = read_nccl(Tables.named(table, "comm"))
        rows = rows[(rows["op_name"] == "alltoall") & (rows["num_gpus"] == rows["num_gpus"].max())]
        for stage, link in (("after", Links.named(name).intra), ("table", load_links(table).intra)):
            predicted = link.time_us(rows["bytes"].to_numpy())
            parts.append(rows.assign(links=name, stage=stage, gpus=rows["num_gpus"], predicted=predicted))
    return pd.concat(parts, ignore_index=True).rename(columns={"us": "measured"})


# ---- what is written -------------------------------------------------------------------------------------------------


def errors() -> Iterator[tuple[str, pd.DataFrame]]:
    """All errors, by the name of their file."""
    fits = rooflines()
    yield "rooflines", errors_of(fits, ["device", "framework", "stage", "shapes"])
    by_rows = errors_of(fits, ["device", "framework", "shapes", "band"])
    yield "rooflines-by-rows", by_rows.rename(columns={"band": "rows an expert"})
    points = pd.concat([interpolation(name) for name in LAWS], ignore_index=True)
    yield "interpolation", errors_of(points, ["table", "how"])
    laws = pd.concat([law(name) for name in LAWS], ignore_index=True)
    yield "law", errors_of(laws, ["table"])
    key = ["table", "dtype", "ep_size"]
    medians = laws.groupby(key)[["measured", "load", "of_all_tokens", "chance"]].median().reset_index()
    yield "law-by-ep", errors_of(laws, key).merge(medians).rename(columns={"ratio": "predicted over measured"})
    yield "law-by-tokens", errors_of(laws, ["table", "num_tokens"])
    yield from kernel_errors()
    carried = links()
    carried["worst"] = (carried["predicted"] / carried["measured"] - 1).abs()
    worst = carried.groupby(["links", "stage"])["worst"].max().reset_index()
    yield "links", errors_of(carried, ["links", "stage", "gpus"]).merge(worst).drop(columns="ratio")


def kernel_errors() -> Iterator[tuple[str, pd.DataFrame]]:
    """Those of kernels of servers that dispatch."""
    dispatched = pd.concat([kernels(name) for name in KERNELS], ignore_index=True)
    dispatched["worst"] = (dispatched["predicted"] / dispatched["measured"] - 1).abs()
    for by, columns in (("", ["table", "distribution", "slots"]), ("-by-ep", ["table", "ep_size"])):
        most = dispatched.groupby(columns)["worst"].max().reset_index()
        yield f"kernels{by}", errors_of(dispatched, columns).merge(most)


def fitted() -> Iterator[str]:
    """The figures for data/devices/ and data/links/, as YAML."""
    for name, (system, frameworks) in DEVICES.items():
        rows = experts_rows(system, frameworks)
        like = Device.named(name if name in Device.names() else "h200-sxm")
        device = fit_device(like, rows)
        yield f"# {name}"
        yield from as_yaml(device)
        if system in WITH_FP8:
            yield f"speeds: {{{', '.join(f'{dtype}: {gain:.3g}' for dtype, gain in gemm_speeds(system).items())}}}"
        errors = rows.assign(predicted=predicted_us(device, rows), measured=rows["us"])
        yield "\n".join(f"# {line}" for line in errors_of(errors, ["framework", "held"]).to_string().splitlines())
    for name, table in LINKS.items():
        link = load_links(table).intra
        yield f"# {name}\n  latency_us: {link.latency_us:.3g}\n  curve:"
        yield from (f"    - [{size:.6g}, {us:.4g}]" for size, us in link.curve.root)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("results/reference"), help="folder (default: %(default)s)")
    parser.add_argument("--fit", action="store_true", help="print fitted figures; write nothing")
    parser.add_argument("--kernels", action="store_true", help="of kernels of servers that dispatch alone")
    options = parser.parse_args()
    if options.fit:
        print("\n".join(fitted()))
        return
    options.out.mkdir(parents=True, exist_ok=True)
    print(f"from {' '.join(package_version())}")
    for name, frame in kernel_errors() if options.kernels else errors():
        frame.to_csv(options.out / f"tables-{name}.csv", index=False, float_format="%.6g")
        print(f"\n{name}\n{frame.to_string(index=False, float_format='{:.3g}'.format)}", flush=True)


if __name__ == "__main__":
    main()
