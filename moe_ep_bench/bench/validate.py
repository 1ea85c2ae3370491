"""``validate``: the same config on real ranks and emulated on this machine, and whether the two agree.

Four steps into one directory, each skipped where it was finished before: calibrate the collectives of these ranks,
unless the config names its links; run on real ranks; emulate as many ranks; time the experts alone, of layers and not
of whole models. Each of the last two has a process of its own, with as many compute threads as one real rank has. What
comes of it is ``analysis.validation``'s to say.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pyarrow as pa
import pyarrow.parquet as pq
import torch

from moe_ep_bench.bench.checks import check_whole_experts
from moe_ep_bench.bench.emulate import emulate
from moe_ep_bench.bench.experts_alone import time_experts_alone
from moe_ep_bench.bench.plan import RANKS, VIRTUAL, Comparison, Plan, plan
from moe_ep_bench.bench.validation_directory import ValidationDirectory
from moe_ep_bench.config import EmulateConfig, RouteConfig
from moe_ep_bench.cost_model.calibrate import DEFAULT_MAX_BYTES, MIN_BYTES
from moe_ep_bench.cost_model.links import Links
from moe_ep_bench.layer.experts import DTYPES
from moe_ep_bench.results import RunDirectory
from moe_ep_bench.runtime import launcher
from moe_ep_bench.runtime.errors import complain
from moe_ep_bench.runtime.exit_codes import CASES_FAILED, OK

# What ``emulate`` may do otherwise without being another layer than the real ranks'.
_FREE = {"links", "chunk_tokens"}


class _FailedStepError(Exception):
    """A step ended without what the next ones need."""

    def __init__(self, step: str, status: int) -> None:
        super().__init__(f"{step} failed with exit status {status}; nothing was compared")
        self.status = status


def validate(config: Path, out: Path, overrides: Sequence[str], num_ranks: int, *, force: bool = False) -> int:
    """Measure and emulate; return the exit status.

    Args:
        out: see ``ValidationDirectory``.
        num_ranks: real ranks on this machine, and virtual ones.

    Returns:
        ``OK`` where both runs measured all cases, whatever the verdict; ``CASES_FAILED`` where some could not be;
        else the status of the step that failed.

    Raises:
        ValueError: the config or the directory cannot be used; one line, before anything is run.
    """
    real = _plan(config, overrides, num_ranks)
    files = ValidationDirectory(out)
    _check_directory(files, num_ranks, _given_links(real), force=force)
    try:
        return _validate(real, files, num_ranks, force=force)
    except _FailedStepError as failure:
        print(f"moe-ep-bench: validate: {failure}", file=sys.stderr)
        return failure.status


def _validate(real: Plan, files: ValidationDirectory, num_ranks: int, *, force: bool) -> int:
    for report in (files.pairs, files.text, files.cases_table, files.phases_table):
        report.unlink(missing_ok=True)  # of runs that may be about to change
    nodes, given_links = launcher.Nodes(num_ranks), _given_links(real)
    links = given_links or str(_calibrated(files.links, nodes, _largest_bytes(real), force=force))

    _announce(f"the real run on {num_ranks} ranks")
    status = launcher.launch(real.config, files.real, real.overrides, nodes, force=force)
    worst = _accept(f"the real run on {num_ranks} ranks ({files.real})", status)

    _announce(f"{num_ranks} ranks emulated on one")
    emulated = _emulated(real, num_ranks, links)
    overrides = emulated.overrides
    status = _in_place_of_a_rank(num_ranks, emulate, real.config, files.emulated, overrides, force=force)
    worst = max(worst, _accept(f"the emulated run ({files.emulated})", status))

    # Not of whole models, whose experts stand in many layers.
    if real[0].scope == "layer" and (force or not _timed_alone(files.experts_alone, emulated)):
        _announce("the experts alone")
        arguments = real.config, files.emulated, files.experts_alone, overrides
        status = _in_place_of_a_rank(num_ranks, time_experts_alone, *arguments)
        _accept(f"timing the experts alone ({files.experts_alone})", status)

    pairs = [(one.comparison_id, other.comparison_id) for one, other in zip(real, emulated, strict=True)]
    files.write_pairs(pairs, _links_words(given_links, links))
    return worst


def _plan(config: Path, overrides: Sequence[str], num_ranks: int) -> Plan:
    """Plan the real run; refuse what real ranks would not do as the emulated ones, planned too, are asked to."""
    if num_ranks < 2:
        raise ValueError(f"--nproc: expected at least 2 ranks to hold emulated ones against, got {num_ranks}")
    real = plan(config, overrides, RANKS, num_ranks, on_cpu=not torch.cuda.is_available())
    for comparison in real:
        try:
            _check_comparable(comparison)
        except ValueError as problem:
            raise ValueError(f"{config}: {problem}") from None
    # Links that are still to be measured cannot be wrong: any will do to find what else is.
    _emulated(real, num_ranks, _given_links(real) or Links.names()[0])
    return real


def _given_links(real: Plan) -> str | None:
    """The config's own; None = calibrate."""
    return real[0].experiment.emulate.links


def _emulated(real: Plan, num_ranks: int, links: str) -> Plan:
    """The same config on virtual ranks, under overrides by which they do what the real ones do."""
    # JSON is YAML whatever characters a path has.
    own = {"layer.ep_size": num_ranks, "measure.launches": 1, "emulate.links": links}
    overrides = [*real.overrides, *(f"{key}={json.dumps(value)}" for key, value in own.items())]
    return plan(real.config, overrides, VIRTUAL, on_cpu=not torch.cuda.is_available())


def _largest_bytes(real: Plan) -> int:
    """More than any all-to-all of the layers moves between two ranks, as a power of two: what is calibrated up to.

    That is all (token, expert) pairs of the model's own routing; half of them cross two ranks where loads are even.
    """
    bytes_ = [
        one.num_tokens * one.model.top_k * one.model.hidden_size * DTYPES[one.experiment.layer.dtype].itemsize
        for one in real
    ]
    wanted = 1 << (max(bytes_) - 1).bit_length()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return min(max(wanted, 2 * MIN_BYTES), DEFAULT_MAX_BYTES[device])


def _check_comparable(comparison: Comparison) -> None:
    experiment, num_ranks = comparison.experiment, comparison.world_size
    check_whole_experts(experiment, "emulate lays out")
    if comparison.ep_size != num_ranks:
        raise ValueError(f"layer.ep_size: expected {num_ranks}, which are all ranks, or null; got {comparison.ep_size}")
    ours, plain = experiment.emulate.model_dump(exclude=_FREE), EmulateConfig().model_dump(exclude=_FREE)
    settings = {f"emulate.{key}": (value, plain[key]) for key, value in ours.items()}
    settings["route.placement"] = (experiment.route.placement, RouteConfig().placement)
    for key, (value, expected) in settings.items():
        if value != expected:
            raise ValueError(f"{key}: expected {expected!r}, which is what real ranks do; got {value!r}")


def _check_directory(files: ValidationDirectory, num_ranks: int, given_links: str | None, *, force: bool) -> None:
    """Make the directory; raise where it is something else's or of another number of ranks."""
    out = files.root
    if RunDirectory(out).run_json.exists():
        raise ValueError(f"--out {out}: holds the results of another command; choose another directory")
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"--out {out}: cannot write there: {error.strerror}") from None
    if not os.access(out, os.W_OK):
        raise ValueError(f"--out {out}: cannot write there")
    if given_links is None and (files.links).exists() and not force:
        measured_on = Links.load(str(files.links)).ranks_per_node
        if measured_on != num_ranks:
            raise ValueError(
                f"--out {out}: holds links measured on {measured_on} ranks, here are {num_ranks}; "
                "choose another directory or --force"
            )


def _calibrated(path: Path, nodes: launcher.Nodes, most_bytes: int, *, force: bool) -> Path:
    """Links measured on these ranks, by an earlier call or now."""
    if path.exists() and not force:
        _announce(f"links of {path}, measured before")
        return path.absolute()
    _announce(f"calibrating the collectives of {nodes.nproc} ranks")
    arguments = ["--out", str(path.absolute()), "--max-bytes", str(most_bytes)]
    status = launcher.launch_calibrate(arguments, nodes)
    if status != OK:
        raise _FailedStepError("calibrating the collectives", status)
    return path.absolute()


def _links_words(given: str | None, links: str) -> str:
    described = Links.load(links).describe()
    return (
        f"{'calibrated on these ranks' if given is None else f'given as emulate.links {Path(given).name}'}, {described}"
    )


def _accept(step: str, status: int) -> int:
    """The status of a run whose cases have rows, though not all be measured."""
    if status not in (OK, CASES_FAILED):
        raise _FailedStepError(step, status)
    return status


def _timed_alone(path: Path, comparisons: Sequence[Comparison]) -> bool:
    try:
        held = pq.read_table(path, columns=["comparison_id"])["comparison_id"].to_pylist()
    except (OSError, pa.ArrowException):
        return False
    return {comparison.comparison_id for comparison in comparisons} <= set(held)


def _in_place_of_a_rank(num_ranks: int, command: Callable[..., int], *arguments: Any, **options: Any) -> int:
    """Run a command in a process of its own that takes the share of this machine that one of so many ranks has."""
    process = multiprocessing.get_context("spawn").Process(target=_as_command, args=(command, arguments, options))
    # What torchrun tells a rank, and what our launcher does; the process itself is no rank.
    share = {"LOCAL_WORLD_SIZE": str(num_ranks), "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    with mock.patch.dict(os.environ, share):
        process.start()
    try:
        process.join()
    finally:
        if process.is_alive():
            process.terminate()
            process.join()
    status = process.exitcode
    assert status is not None
    return 128 - status if status < 0 else status


def _as_command(command: Callable[..., int], arguments: Sequence[Any], options: dict[str, Any]) -> None:
    try:
        status = command(*arguments, **options)
    except Exception as error:
        status = complain(error)  # A traceback of Python's own ends with 1, as if the job had gone through.
    sys.exit(status)


def _announce(step: str) -> None:
    print(f"moe-ep-bench: validate: {step}", file=sys.stderr, flush=True)
