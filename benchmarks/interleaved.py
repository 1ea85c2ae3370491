"""Time contenders in turn, so that a disturbance strikes all alike; keep the table with the machine that made it."""

from __future__ import annotations

import argparse
import statistics
from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import pandas as pd
import torch

from moe_ep_bench.files import atomic_path, write_json
from moe_ep_bench.machine import provenance

Name = TypeVar("Name", bound=Hashable)


def interleaved(
    runs: Mapping[Name, Callable[[], Any]],
    rounds: int,
    measure: Callable[[Name, Callable[[], Any]], float],
    *,
    uncounted: int = 1,
) -> dict[Name, list[float]]:
    """What every call took; each round measures all once, after ``uncounted`` ones."""
    times: dict[Name, list[float]] = defaultdict(list)
    for number in range(rounds + uncounted):
        for name, run in runs.items():
            taken = measure(name, run)
            if number >= uncounted:
                times[name].append(taken)
    return times


def parser_of(text: str | None) -> argparse.ArgumentParser:
    """A program whose docstring this is, with the options that all have."""
    parser = argparse.ArgumentParser(description=str(text).partition("\n")[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rehearse", action="store_true", help="toy sizes on the CPU: tries this script")
    return parser


def device_of(parser: argparse.ArgumentParser, rehearses: bool) -> torch.device:
    """The GPU that is here, or the CPU for a rehearsal."""
    if not rehearses and not torch.cuda.is_available():
        parser.error("torch sees no GPU here; --rehearse tries this script without one")
    return torch.device("cpu" if rehearses else "cuda")


def median_ratio(times: Sequence[float], yardstick: Sequence[float]) -> float:
    """Of one over the other in the same rounds."""
    return statistics.median(a / b for a, b in zip(times, yardstick, strict=True))


def replayed(run: Callable[[], Any], times: int = 1, pool: Any = None) -> Callable[[], Any]:
    """A CUDA graph of what ``run`` launches, so many times in a row; it keeps what ``run`` holds.

    Graphs of one ``pool`` share their memory: nobody may read what they compute.

    Raises:
        RuntimeError: ``run`` does what cannot be captured, such as waiting for the device.
    """
    outside = torch.cuda.current_stream()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()  # compiles
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph, pool=pool):
            for _ in range(times):
                run()
    finally:
        torch.cuda.set_stream(outside)  # An invalid capture leaves its own current.

    def again(_kept: Callable[[], Any] = run) -> None:
        graph.replay()

    return again


def keep(out: Path | None, name: str, table: pd.DataFrame, device: torch.device, **about: Any) -> None:
    """Write ``NAME.csv`` and ``NAME.json``, where a folder was named."""
    if out is not None:
        with atomic_path(out / f"{name}.csv") as path:
            table.to_csv(path, index=False)
        write_json(out / f"{name}.json", {**about, "environment": provenance.describe(device)})
