"""Run a config on real ranks and emulate as many on this machine, for ``analysis.validate`` to compare.

Three steps into one directory, each skipped where it was finished before: calibrate the collectives of these ranks,
unless the config names its links; run on real ranks; emulate as many ranks. The emulation has a process of its own,
with as many compute threads as one real rank has.
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

import torch

from moe_ep_bench.bench.plan import RANKS, VIRTUAL, Comparison, Plan, plan
from moe_ep_bench.bench.run import emulate, launch
from moe_ep_bench.config import EmulateConfig
from moe_ep_bench.cost_model.calibrate import DEFAULT_MAX_BYTES, ENOUGH_BYTES, launch_calibrate
from moe_ep_bench.cost_model.links import Links
from moe_ep_bench.errors import UserError, naming
from moe_ep_bench.files import refuse_links_out
from moe_ep_bench.layer.experts import DTYPES
from moe_ep_bench.results import EQUIVALENCE_MARGIN, RunDirectory, ValidationDirectory
from moe_ep_bench.runtime.device import device_type
from moe_ep_bench.runtime.errors import complain
from moe_ep_bench.runtime.exit_codes import CASES_FAILED, OK

# Keys of ``emulate`` that do not make it another layer than the real ranks'.
_FREE = {"links"}


class _FailedStepError(Exception):
    """A step ended with a status, and without what the next ones need."""


def validate(
    config: Path,
    out: Path,
    overrides: Sequence[str],
    num_ranks: int,
    *,
    force: bool = False,
    margin: float = EQUIVALENCE_MARGIN,
) -> int:
    """Measure on ``num_ranks`` real ranks and emulate as many; return the exit status.

    ``margin`` is by how much speedups may differ and be equivalent; ``analysis.validate`` reads it.

    That is ``OK`` where both runs measured all cases, whatever the verdict; ``CASES_FAILED`` where some could not be;
    else the status of the step that failed.

    Raises:
        ValueError: the config or the directory cannot be used; one line, before anything is run.
    """
    real = _plan(config, overrides, num_ranks)
    files = ValidationDirectory(out)
    refuse_links_out(out)
    _check_directory(files, num_ranks, _given_links(real), force=force)
    try:
        return _validate(real, files, num_ranks, force=force, margin=margin)
    except _FailedStepError as failure:
        step, status = failure.args
        print(f"moe-ep-bench: validate: {step} failed with exit status {status}; nothing was compared", file=sys.stderr)
        return status


def _validate(real: Plan, files: ValidationDirectory, num_ranks: int, *, force: bool, margin: float) -> int:
    for report in (files.pairs, files.text, files.table):
        report.unlink(missing_ok=True)  # of runs that may be about to change
    given = _given_links(real)
    links = given or str(files.links.absolute())
    if given is None and (force or not files.links.exists()):
        what, most = f"calibrating the collectives of {num_ranks} ranks", _largest_bytes(real)
        _step(what, launch_calibrate, Path(links), num_ranks, max_bytes=most)
    what = f"the real run on {num_ranks} ranks ({files.real})"
    worst = _step(what, _launch, real, files.real, num_ranks, force=force)
    emulated = _emulated(real, num_ranks, links)
    what, arguments = f"the emulated run ({files.emulated})", (real.config, files.emulated, emulated.overrides)
    worst = max(worst, _step(what, _in_place_of_a_rank, num_ranks, emulate, *arguments, force=force))
    pairs = [(one.comparison_id, other.comparison_id) for one, other in zip(real, emulated, strict=True)]
    source = "calibrated on these ranks" if given is None else f"given as emulate.links {Path(given).name}"
    files.write_pairs(pairs, f"{source}, {Links.load(links).describe()}", margin)
    return worst


def _launch(real: Plan, out: Path, num_ranks: int, *, force: bool) -> int:
    return launch(real.config, out, real.overrides, num_ranks, force=force).status


def _step(what: str, function: Callable[..., int], *arguments: Any, **options: Any) -> int:
    """Announce a step and take it; return the status of one whose cases have rows, though not all be measured."""
    print(f"moe-ep-bench: validate: {what}", file=sys.stderr, flush=True)
    status = function(*arguments, **options)
    if status not in (OK, CASES_FAILED):
        raise _FailedStepError(what, status)
    return status


# ---- what is compared ------------------------------------------------------------------------------------------------


def _plan(config: Path, overrides: Sequence[str], num_ranks: int) -> Plan:
    """Plan the real run; refuse what real ranks would not do as the emulated ones, planned too, are asked to."""
    if num_ranks < 2:
        raise UserError(f"--nproc: expected at least 2 ranks to hold emulated ones against, got {num_ranks}")
    real = plan(config, overrides, RANKS, num_ranks, on_cpu=device_type() == "cpu")
    for comparison in real:
        with naming(str(config)):
            _check_comparable(comparison, num_ranks)
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
    Small layers are calibrated up to ENOUGH_BYTES: below, the bandwidth is lost in the latency's noise.
    """
    most = max(
        one.subject.num_tokens * one.model.top_k * one.model.hidden_size * DTYPES[one.experiment.layer.dtype].itemsize
        for one in real
    )
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return min(max(1 << (most - 1).bit_length(), ENOUGH_BYTES), DEFAULT_MAX_BYTES[device])


def _check_comparable(comparison: Comparison, num_ranks: int) -> None:
    experiment = comparison.experiment
    if comparison.ep_size != num_ranks:
        raise UserError(f"layer.ep_size: expected {num_ranks}, which are all ranks, or null; got {comparison.ep_size}")
    ours, plain = experiment.emulate.model_dump(exclude=_FREE), EmulateConfig().model_dump(exclude=_FREE)
    settings = {f"emulate.{key}": (value, plain[key]) for key, value in ours.items()}
    for key, (value, expected) in settings.items():
        if value != expected:
            raise UserError(f"{key}: expected {expected!r}, which is what real ranks do; got {value!r}")


def _check_directory(files: ValidationDirectory, num_ranks: int, given_links: str | None, *, force: bool) -> None:
    """Make the directory; raise where it is something else's or of another number of ranks."""
    out = files.root
    if RunDirectory(out).run_json.exists():
        raise UserError(f"--out {out}: holds the results of another command; choose another directory")
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--out {out}: cannot write there: {error.strerror}") from None
    if not os.access(out, os.W_OK):
        raise UserError(f"--out {out}: cannot write there")
    if given_links is None and files.links.exists() and not force:
        measured_on = Links.load(str(files.links)).ranks_per_node
        if measured_on != num_ranks:
            raise UserError(
                f"--out {out}: holds links measured on {measured_on} ranks, here are {num_ranks}; "
                "choose another directory or --force"
            )


# ---- in place of a rank ----------------------------------------------------------------------------------------------


def _in_place_of_a_rank(num_ranks: int, command: Callable[..., int], *arguments: Any, **options: Any) -> int:
    """Run a command in a process of its own that takes the share of this machine that one of so many ranks has."""
    process = multiprocessing.get_context("spawn").Process(target=_as_command, args=(command, arguments, options))
    # What torchrun tells a rank; the process itself is no rank.
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
