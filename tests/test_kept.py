"""A modelled point that is stopped half-way goes on there, with the answer that it would have had."""

from __future__ import annotations

import errno
import signal
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from test_emulate import H100
from test_emulate_model import PREFILL, SMALLER
from test_run import write_config

from moe_ep_bench.bench import kept, traffic
from moe_ep_bench.bench.kept import Kept
from moe_ep_bench.cli import main
from moe_ep_bench.errors import OK

POLICIES = [
    {"name": "token_drop", "capacity_factor": 1.0},
    # One that looks at all ranks' tokens first, and one that begins with what earlier batches left.
    {"name": "lynx", "num_dropped": 2},
    {"name": "laser", "eps_high": 0.9, "t_fix": 0.5, "c": 8, "carry_loads": True},
]
# One whose plan takes no time, which would be measured, and one that is split by all ranks' counts.
REPLICATION = [{"spare_per_rank": 1}, {"spare_per_rank": 1, "balancer": "lp", "solve_us": 7}]
LAYER = {"layer__ep_size": 4, "workload__num_batches": 3, "policies": POLICIES}
EMULATED = {**H100, "replication": REPLICATION}


def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Values are written at once."""
    monkeypatch.setattr(kept, "_FIRST_S", 0)
    monkeypatch.setattr(kept, "_EVERY_S", 0)


class Stop:
    """Counts what is routed, and interrupts once that is more than allowed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count, self.most, self.command, route = 0, float("inf"), "emulate", traffic._route_case

        def counted(*asked: Any) -> Any:
            if self.count >= self.most:
                raise KeyboardInterrupt
            self.count += 1
            return route(*asked)

        monkeypatch.setattr(traffic, "_route_case", counted)
        soon(monkeypatch)

    def run(self, arguments: list[str], out: Path, most: float = float("inf")) -> tuple[int, int]:
        """The exit status, and how often a case was routed on a rank."""
        self.count, self.most = 0, most
        return main([self.command, *arguments, "--out", str(out)]), self.count


@pytest.fixture
def stop(monkeypatch: pytest.MonkeyPatch) -> Stop:
    return Stop(monkeypatch)


def tables(out: Path) -> dict[str, Any]:
    """All parts, row by row, but for the job that wrote them."""
    paths = [path for folder in ("cases", "routing", "frontier") for path in (out / folder).glob("*.parquet")]
    found = {f"{path.parent.name}/{path.name}": pq.read_table(path) for path in paths}
    return {name: [{**row, "run_id": None} for row in table.to_pylist()] for name, table in found.items()}


def layer(folder: Path, **emulated: Any) -> list[str]:
    return [str(write_config(folder, **LAYER, emulate={**EMULATED, **emulated}))]


def model(folder: Path) -> list[str]:
    changes = [*SMALLER, "emulate={links: h100-nvlink4, device: h100-sxm}"]
    return [str(PREFILL), *(argument for change in changes for argument in ("--set", change))]


@pytest.mark.parametrize("part", [0.3, 0.9])
@pytest.mark.parametrize(
    ("command", "question"),
    [
        ("emulate", layer),
        ("emulate", lambda folder: layer(folder, overlap="two_batch")),
        ("emulate", model),
        ("route", layer),
    ],
)
def test_what_a_stopped_point_had_finished_is_not_routed_again(
    command: str, question: Callable[[Path], list[str]], part: float, stop: Stop, tmp_path: Path
) -> None:
    arguments, whole, out, stop.command = question(tmp_path), tmp_path / "whole", tmp_path / "out", command
    status, all_calls = stop.run(arguments, whole)
    assert status == OK
    status, before = stop.run(arguments, out, int(part * all_calls))
    assert status == 128 + signal.SIGINT
    assert before == int(part * all_calls)
    assert not list((out / "cases").glob("*")), "a point that is not finished has no part"
    status, after = stop.run(arguments, out)
    assert status == OK
    num_cases = len({row["case_id"] for rows in tables(whole).values() for row in rows})
    in_flight = num_cases * torch.get_num_threads()  # Ranks side by side, each by all cases.
    assert all_calls <= before + after < all_calls + in_flight
    assert tables(out) == tables(whole)
    assert tables(out)
    assert not list((out / "begun").iterdir())


def test_what_other_cases_began_is_routed_anew(stop: Stop, tmp_path: Path) -> None:
    arguments, out = layer(tmp_path), tmp_path / "out"
    _, all_calls = stop.run(arguments, tmp_path / "whole")
    stop.run(arguments, out, all_calls // 2)
    fewer = [*arguments, "--set", f"policies={POLICIES[:1]}"]
    _, asked = stop.run(fewer, tmp_path / "fewer")
    assert stop.run(fewer, out) == (OK, asked)
    assert tables(out) == tables(tmp_path / "fewer")


@pytest.mark.parametrize("command", ["emulate", "route"])
def test_force_forgets_what_was_begun(command: str, stop: Stop, tmp_path: Path) -> None:
    arguments, out, stop.command = layer(tmp_path), tmp_path / "out", command
    _, all_calls = stop.run(arguments, tmp_path / "whole")
    stop.run(arguments, out, all_calls // 2)
    assert stop.run([*arguments, "--force"], out) == (OK, all_calls)


VALUES = {
    ("routed", None, 0, 1): [3, [{"load_E": np.arange(3), "of_none": np.zeros((0, 2)), "share": 0.1, "no": None}, []]],
    ("summed", 2, 0, 1): [torch.tensor([[0.1, float("inf")]], dtype=torch.float64)],
    ("wide", None, 0): ["a"],
}


def written(path: Path, monkeypatch: pytest.MonkeyPatch) -> bytes:
    soon(monkeypatch)
    values = Kept(path, ["a", "b"])
    for key, value in VALUES.items():
        assert values.once(key, lambda value=value: value) is value
    return path.read_bytes()


def test_values_are_read_as_they_were_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written(path := tmp_path / "begun" / "id", monkeypatch)
    values = Kept(path, ["a", "b"])
    assert values.number("routed") == 1
    (count, (row, parts)), (stats,), wide = (values.once(key, lambda: pytest.fail("made again")) for key in VALUES)
    assert (count, row["share"], row["no"], parts, wide) == (3, 0.1, None, [], ["a"])
    assert row["load_E"].tolist() == [0, 1, 2]
    assert row["load_E"].dtype == np.int64
    assert row["of_none"].shape == (0, 2)
    assert torch.equal(stats, VALUES["summed", 2, 0, 1][0])
    assert not Kept(path, ["a"]).known
    assert not path.read_bytes(), "what other cases left is gone"


def test_a_damaged_end_is_cut_off_and_the_rest_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = written(path := tmp_path / "begun" / "id", monkeypatch)
    ends = [kept._read(content[:size])[1] for size in range(len(content) + 1)]
    assert sorted(set(ends)) == ends[:1] + sorted({*ends[1:]} - {0})
    assert len({*ends}) == len(VALUES) + 2, "nothing, the cases, and each value"
    path.write_bytes(content[:-1])
    known = Kept(path, ["a", "b"])
    assert [*known.known] == [*VALUES][:-1]
    assert known.once(("wide", None, 0), lambda: ["new"]) == ["new"]
    assert [*Kept(path, ["a", "b"]).known] == [*VALUES]
    path.write_bytes(content[:-9] + b"\0" + content[-8:])
    assert [*Kept(path, ["a", "b"]).known] == [*VALUES][:-1]


def test_a_disk_that_takes_no_more_ends_the_keeping_alone(
    stop: Stop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = []

    def full(value: object) -> bytes:
        tried.append(value)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(kept, "_record", full)
    assert stop.run(layer(tmp_path), tmp_path / "out")[0] == OK
    assert len(tried) == 1


def test_what_is_finished_soon_leaves_no_file(tmp_path: Path) -> None:
    values = Kept(tmp_path / "begun" / "id", ["a"])
    assert values.once(("wide", None, 0), lambda: 1) == 1
    assert not (tmp_path / "begun").exists()


@pytest.mark.parametrize(
    "text",
    [
        b"1",
        b"[[], 1, 2]",
        b"[1, 2]",
        b"[[{}], 1]",
        b'[["routed"], {"tensor": 1}]',
        b'[["routed"], {"array": "O", "shape": [1]}]',
        b'[["routed"], {"array": "no type", "shape": [1]}]',
        b'[["routed"], {"array": "<i8"}]',
        b'[["routed"], {"array": "<i8", "shape": [9]}]',
        b"[" * 100_000,
        b'[["routed"], "' + b" " * 2000 + b'"]',
    ],
)
def test_what_is_no_record_is_cut_off(text: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = written(path := tmp_path / "begun" / "id", monkeypatch)
    monkeypatch.setattr(kept, "_MOST_BYTES", 1500)
    record = zlib.compress(kept._length(text) + text + bytes(8))
    path.write_bytes(content + kept._length(record) + record)
    values = Kept(path, ["a", "b"])
    assert [*values.known] == [*VALUES]
    assert values.number("routed") == 1
    assert path.read_bytes() == content
