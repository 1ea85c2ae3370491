"""What the facts of a machine mean for a run; a check asks no driver and no torch.

``machine`` is of ``facts.machine``, ``comparisons`` of ``facts.plan``; what ``gpus`` could not read is a string that
says why.
"""

from __future__ import annotations

import contextlib
import os
import re
import resource
import uuid
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from moe_ep_bench.files import atomic_path
from moe_ep_bench.machine.gpus import THROTTLE_REASONS
from moe_ep_bench.results import RUN_JSON
from moe_ep_bench.runtime import locks
from moe_ep_bench.runtime.device import most_cpu_ranks

OK, NOTE, PROBLEM = "ok", "note", "problem"
Facts = Mapping[str, Any]


@dataclass(frozen=True)
class Finding:
    """One line of the report.

    Attributes:
        status: ``problem``: a run would fail, or not be what it seems to be. ``note``: it goes, with less.
        means: for a run; empty where that is plain.
    """

    check: str
    status: Literal["ok", "note", "problem"]
    what: str
    means: str = ""
    remedy: str = ""


Findings = Iterator[Finding]

# ---- packages

# As in pyproject.toml: at least, and below.
_SUPPORTED = {"python": ((3, 11), (3, 13)), "torch": ((2, 11), None), "megatron_core": ((0, 16, 1), (0, 20))}
_NAMES = {
    "python": "Python",
    "torch": "torch",
    "megatron_core": "megatron-core",
    "transformer_engine": "Transformer Engine",
    "apex": "NVIDIA Apex",
    "deep_ep": "DeepEP",
    "triton": "Triton",
}
_SET_UP = "launch/setup.sh installs it"

# What a GPU run does without, and what to do.
_WITHOUT = {
    "transformer_engine": (
        "our grouped GEMMs compute the experts and our indexed permutation moves rows, neither of them fused as in a"
        " paper's system: phase shares are not to be set beside theirs",
        "NVIDIA's PyTorch containers bring it: launch/setup.sh --system-torch",
    ),
    "apex": ("Megatron-Core falls back on torch's own kernels; none of Apex's lie in the layer that is timed", ""),
    "deep_ep": ("Megatron-Core's flex dispatcher cannot run; alltoall and allgather can", ""),
    "triton": ("policies are routed by torch, several times slower, and decode experts cannot run", _SET_UP),
}
_ON_GPUS_ONLY = ("transformer_engine", "apex", "deep_ep")


def package_findings(machine: Facts, broken: Mapping[str, str]) -> Findings:
    """Versions, and imports that fail (``broken``: why, by package, of ``facts.imports``)."""
    versions, on_gpus = machine["packages"], bool(machine["gpus"])
    there = [f"{name} {versions[key]}" for key, name in _NAMES.items() if versions[key] and key not in broken]
    yield Finding("packages", OK, ", ".join(there))
    for key, (least, below) in _SUPPORTED.items():
        version = versions[key]
        numbers = tuple(int(part) for part in re.findall(r"\d+", version or "")[:3])
        if version is None:
            yield Finding("packages", PROBLEM, f"{_NAMES[key]} is not installed", "no layer can be built", _SET_UP)
        elif numbers < least or (below and numbers >= below):
            allowed = f"{_dotted(least)} or newer" + (f", below {_dotted(below)}" if below else "")
            what = f"{_NAMES[key]} {version}, expected {allowed}"
            yield Finding("packages", PROBLEM, what, "this program was never tried with it", _SET_UP)
    for key, without in _WITHOUT.items():
        if versions[key] is None and (on_gpus or key not in _ON_GPUS_ONLY):
            yield Finding("packages", NOTE, f"{_NAMES[key]} is not installed", *without)
    idle = [_NAMES[key] for key in _ON_GPUS_ONLY if versions[key] is None and not on_gpus]
    if idle:
        yield Finding("packages", OK, f"not installed, and of use on GPUs only: {', '.join(idle)}")
    if machine["foreign_apex"]:
        what = "apex here is another project's of that name"
        yield Finding("packages", NOTE, what, "nothing uses it; it is not NVIDIA Apex", "pip uninstall apex")
    if on_gpus and versions["triton"] and machine["compiler"]:
        means = "Triton compiles nothing: policies and activations run as torch operations, decode experts not at all"
        fix = "install gcc and Python's headers (Debian, Ubuntu: python3-dev), or set CC"
        yield Finding("packages", PROBLEM, f"{machine['compiler']}, which Triton needs", means, fix)
    for key, why in broken.items():
        if versions[key] is None and key in _WITHOUT:
            continue  # some other project's module
        # On a CPU run nothing asks for these.
        status = PROBLEM if on_gpus or key == "megatron_core" else NOTE
        what = f"{_NAMES[key]} {versions[key]} is installed and cannot be imported ({why})"
        fix = "install it anew, for this torch and CUDA"
        yield Finding("packages", status, what, "what is chosen because it is there will fail", fix)


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


# ---- the processor and the GPUs

# Reasons for a low clock that a healthy GPU in a healthy rack does not show; of the others a power cap only under load.
_SLOWED = {
    "hw_thermal": "it is too hot",
    "sw_thermal": "it is too hot",
    "hw_power_brake": "its power supply brakes it",
    "hw_slowdown": "its hardware slows it down (heat or power)",
    "sync_boost": "it keeps to the clock of its group",
    "display_clocks": "a display sets its clock",
}
# Of memory or time that others take, in per cent; a driver alone takes less.
_MAX_USED = 5.0
# Load per core over the last minute that says that others work here.
_MAX_LOAD = 0.5


def cpu_findings(machine: Facts) -> Findings:
    """The host, and whether it is quiet."""
    cores, load, free = machine["num_cores"], machine["load_average"], machine["host_free_bytes"] / 2**30
    yield Finding("CPU", OK, f"{machine['cpu']}, {cores} cores for us, {free:.1f} GiB of memory free")
    if load > _MAX_LOAD * cores:
        what = f"{load:.1f} processes were running on average over the last minute"
        yield Finding("load", NOTE, what, "others' work beside a run disturbs its times", "wait, or stop them")


def gpu_findings(machine: Facts, gpus: Sequence[Facts] | str) -> Findings:
    """What the driver has (of ``gpus.query_gpus``) beside what torch can use."""
    usable, hidden = machine["gpus"], machine["variables"].get("CUDA_VISIBLE_DEVICES")
    if not usable:
        yield _no_gpu(gpus, hidden, machine["no_gpus_why"])
        return
    names = Counter(gpu["name"] for gpu in usable)
    listed = ", ".join(f"{count} x {name}" for name, count in names.items())
    driver = f", driver {gpus[0]['driver']}" if gpus and not isinstance(gpus, str) else ""
    free = f"{min(gpu['free_bytes'] for gpu in usable) / 2**30:.1f} GiB free on the fullest"
    yield Finding("GPUs", OK, f"{listed}{driver}, {free}")
    if isinstance(gpus, str):
        yield Finding("driver", NOTE, f"NVML: {gpus}", "clocks, power caps and NVLinks cannot be looked at")
        return
    if len(names) > 1:
        yield Finding("GPUs", NOTE, "of several kinds", "the slowest one sets every layer's time")
    mine = {gpu["uuid"] for gpu in usable}
    # What is so of several is said once.
    alike: dict[Finding, list[int]] = {}
    for gpu in gpus:
        for finding in _gpu_findings(gpu) if gpu["uuid"] in mine else ():
            alike.setdefault(finding, []).append(gpu["index"])
    for finding, indices in alike.items():
        several = f"{', '.join(map(str, indices))}: " if len(indices) > 1 else ""
        check = "GPUs" if several else f"GPU {indices[0]}"
        yield replace(finding, check=check, what=several + finding.what)


def _no_gpu(gpus: Sequence[Facts] | str, hidden: str | None, why: str) -> Finding:
    """Why torch can use no GPU. No NVML is a machine without GPUs; one that fails is one with a broken driver."""
    if not gpus or (isinstance(gpus, str) and "Shared Library Not Found" in gpus):
        means = "ranks run on the CPU with gloo, which shows the machinery and no GPU's times; `emulate` models a GPU's"
        return Finding("GPUs", NOTE, "none", means)
    if isinstance(gpus, str):
        fix = "look at nvidia-smi and dmesg; the node may have to be restarted"
        return Finding("GPUs", PROBLEM, f"NVML: {gpus}", "the driver does not work: no GPU can be used", fix)
    what = f"{len(gpus)} here, none that torch can use"
    if hidden is not None and hidden.strip() in ("", "-1"):
        return Finding("GPUs", NOTE, f"{what} (CUDA_VISIBLE_DEVICES={hidden!r})", "runs take the CPU")
    fix = "install a torch with CUDA that this driver supports (nvidia-smi names its CUDA)"
    return Finding("GPUs", PROBLEM, f"{what}: {why}", "runs would take the CPU", fix)


def _gpu_findings(gpu: Facts) -> Findings:
    """What makes one GPU slower than its like, or unusable."""
    known = {name: value or 0.0 for name, value in gpu.items()}
    limit, default, busy = known["power_limit_w"], known["power_default_w"], known["utilization_percent"]
    if gpu["compute_mode"] == "Prohibited":
        fix = "nvidia-smi -c DEFAULT, as root"
        yield Finding("GPU", PROBLEM, "compute mode Prohibited", "no process may use it", fix)
    if gpu["mig"] == "Enabled":
        means = "a rank gets a slice of a GPU, and NCCL joins no slices of one GPU"
        yield Finding("GPU", NOTE, "MIG is enabled", means)
    if known["ecc_errors"] > 0:
        what = f"{known['ecc_errors']:.0f} uncorrected memory errors since the driver was loaded"
        yield Finding("GPU", NOTE, what, "results may be wrong and kernels may die", "have it reset or replaced")
    if 0 < limit < default:
        means = "matmuls run slower than on others of its kind; times hold for this cap"
        yield Finding("GPU", NOTE, f"capped at {limit:.0f} W of {default:.0f} W", means, "nvidia-smi -pl")
    reasons = [words for reason, words in _SLOWED.items() if int(known["throttle_reasons"]) & THROTTLE_REASONS[reason]]
    if reasons:
        clocks = f"{known['sm_clock_mhz']:.0f} of {known['sm_clock_limit_mhz']:.0f} MHz, {known['temperature_c']:.0f} C"
        what = f"throttled now: {reasons[0]} ({clocks})"
        yield Finding("GPU", NOTE, what, "its rank will be the straggler", "mend its cooling or supply")
    free, total = gpu["memory_free_mib"], gpu["memory_mib"]
    used = 100 * (1 - free / total) if total and free is not None else 0.0
    if max(used, busy) > _MAX_USED:
        what = f"{used:.0f} % of its memory is taken, {busy:.0f} % of its time"
        yield Finding("GPU", NOTE, what, "another process uses it and disturbs the times", "nvidia-smi lists it")


# ---- topology, NICs, NCCL

# NCCL takes some tens of MB for each GPU of the node from there.
_SHM_BYTES_PER_GPU = 2**26

# Settings that somebody may have left, and what they cost. None = any value but "0" or nothing.
_COSTLY = {
    ("NCCL_P2P_DISABLE", None): "GPUs do not reach each other's memory: all-to-alls go through the host",
    ("NCCL_SHM_DISABLE", None): "GPUs without a direct path talk over the network inside of one node",
    ("NCCL_IB_DISABLE", None): "nodes talk over TCP instead of RDMA",
    ("NCCL_NET_GDR_LEVEL", "LOC"): "what travels between nodes is copied through host memory",
    ("NCCL_DEBUG", "INFO"): "NCCL writes a log while a run is timed",
    ("NCCL_DEBUG", "TRACE"): "NCCL writes a log while a run is timed",
    ("CUDA_LAUNCH_BLOCKING", None): "every kernel waits for the one before it: no time means anything",
    ("TORCH_DISTRIBUTED_DEBUG", "DETAIL"): "every collective is checked by another one, in timed runs too",
    ("TORCH_NCCL_BLOCKING_WAIT", None): "the host waits for every collective, in timed runs too",
    ("TRITON_INTERPRET", None): "Triton's kernels run in its interpreter, thousands of times slower",
}
# From a GPU to a NIC, ever further; the last two are far.
_WAYS = ("PIX", "PXB", "PHB", "NODE", "SYS")


def topology_findings(topology: Facts | str, gpus: Sequence[Facts]) -> Findings:
    """Paths between GPUs, and from GPUs to NICs (of ``gpus.query_topology``); NVLinks that are down."""
    if isinstance(topology, str):
        yield Finding("topology", NOTE, f"unknown ({topology})", "what connects the GPUs cannot be said")
        return
    paths = topology["paths"]
    names = [name for name in paths if name.startswith("GPU")]
    between = [paths[a][b] for i, a in enumerate(names) for b in names[i + 1 :]]
    listed = ", ".join(f"{count} x {path}" for path, count in Counter(between).most_common())
    over_pcie = sum(not path.startswith("NV") for path in between)
    if over_pcie:
        what = f"{over_pcie} of {len(between)} pairs of GPUs have no NVLink ({listed})"
        means = "their all-to-all goes over PCIe, an order of magnitude slower"
        yield Finding("topology", NOTE, what, means, "take GPUs that are connected")
    elif between:
        yield Finding("topology", OK, f"NVLink between all GPUs ({listed} pairs)")
    links = {gpu["index"]: gpu["nvlinks"] for gpu in gpus if gpu["nvlinks"] and not all(gpu["nvlinks"])}
    if links and between:
        down = ", ".join(f"GPU {gpu}: {active.count(False)} of {len(active)}" for gpu, active in links.items())
        means = "the all-to-all is slower than this machine could; some boards leave links unconnected"
        yield Finding("NVLink", NOTE, f"inactive links ({down})", means, "nvidia-smi nvlink --status")
    far = {}
    for gpu in names:
        to_nics = [path for to, path in paths[gpu].items() if to not in names and path in _WAYS]
        nearest = min(to_nics, key=_WAYS.index, default="")
        if nearest in _WAYS[-2:]:
            far[gpu] = nearest
    if far:
        what = f"{', '.join(far)} reach their nearest NIC across the host ({next(iter(far.values()))})"
        yield Finding("NICs", NOTE, what, "between nodes these ranks are slower than with a NIC beside them")


def nic_findings(ports: Sequence[Facts]) -> Findings:
    """RDMA between nodes."""
    active = [port for port in ports if port["is_active"]]
    if not active:
        what = "no RDMA NIC" if not ports else f"none of {len(ports)} RDMA ports is active"
        yield Finding("NICs", NOTE, what, "one node is fine; between nodes collectives go over TCP, far slower")
        return
    kinds = Counter(f"{port['rate']} {port['link_layer']}" for port in active)
    yield Finding("NICs", OK, "RDMA: " + ", ".join(f"{count} x {kind}" for kind, count in kinds.items()))
    if len(active) < len(ports):
        idle = ", ".join(f"{port['nic']}:{port['number']}" for port in ports if not port["is_active"])
        yield Finding("NICs", NOTE, f"ports that are down: {idle}", "less bandwidth between nodes")
    if resource.getrlimit(resource.RLIMIT_MEMLOCK)[0] != resource.RLIM_INFINITY:
        means = "RDMA pins memory, and may fail for large buffers"
        yield Finding("NICs", NOTE, "locked memory is limited", means, "ulimit -l unlimited, in the job too")


def shared_memory_findings(num_gpus: int, folder: Path = Path("/dev/shm")) -> Findings:
    """What NCCL needs where several GPUs of a node work at once."""
    needed = num_gpus * _SHM_BYTES_PER_GPU
    with contextlib.suppress(OSError):
        space = os.statvfs(folder)
        free = space.f_bavail * space.f_frsize
        if num_gpus > 1 and free < needed:
            means = f"NCCL may fail there with {num_gpus} GPUs (about {needed / 2**20:.0f} MiB, an estimate)"
            fix = "give the container more: docker run --shm-size=8g"
            yield Finding("NCCL", NOTE, f"{free / 2**20:.0f} MiB free in {folder}", means, fix)


def nccl_findings(machine: Facts) -> Findings:
    """NCCL's version, and all settings that change what is measured."""
    version, variables = machine["packages"]["nccl"], machine["variables"]
    if machine["gpus"]:
        settings = ", ".join(f"{name}={value}" for name, value in variables.items() if "NCCL" in name)
        yield Finding("NCCL", OK, f"{version}, {settings or 'no variable of its own is set'}")
    for (name, value), means in _COSTLY.items():
        found = variables.get(name, "")
        if (found.upper() == value) if value else found not in ("", "0"):
            yield Finding("settings", NOTE, f"{name}={found}", means, f"unset {name}")


# ---- ranks and memory


def ranks_findings(machine: Facts, nproc: int) -> Findings:
    """So many ranks on this node."""
    num_gpus, cores = len(machine["gpus"]), machine["num_cores"]
    if num_gpus and nproc > num_gpus:
        what = f"{nproc} on this node, which has {num_gpus} GPUs that torch can use"
        yield Finding("ranks", PROBLEM, what, "each needs one of its own", f"--nproc {num_gpus}")
    elif not num_gpus and nproc > most_cpu_ranks(cores):
        what = f"{nproc} on {cores} cores"
        yield Finding("ranks", PROBLEM, what, "a run refuses so many", f"at most --nproc {most_cpu_ranks(cores)}")
    elif not num_gpus and nproc > cores:
        means = "they share time slices; no straggler speedup is claimed"
        yield Finding("ranks", NOTE, f"{nproc} on {cores} cores", means)


def available_bytes(machine: Facts, nproc: int) -> int:
    """What each of a node's ranks may still take: the fullest GPU's rest, or a share of the host's."""
    gpus = machine["gpus"][:nproc]
    return min(gpu["free_bytes"] for gpu in gpus) if gpus else machine["host_free_bytes"] // nproc


def memory_findings(comparisons: Sequence[Facts], available: int) -> Findings:
    """What every comparison needs per rank (an estimate) beside the bytes that each may take."""
    most = max(comparisons, key=lambda one: one["memory_bytes"])
    needs = f"about {most['memory_bytes'] / 2**30:.1f} GiB of {available / 2**30:.1f} GiB that are free per rank"
    too_large = sum(one["memory_bytes"] > available for one in comparisons)
    if too_large:
        what = f"{too_large} of {len(comparisons)} comparisons need more than there is; {most['title']} needs {needs}"
        remedy = "more ranks, fewer workload.num_tokens or num_batches, or a smaller model.scale"
        yield Finding("memory", PROBLEM, what, "they would be skipped, the rest would run", remedy)
    else:
        cases, plural = sum(len(one["cases"]) for one in comparisons), "s" * (len(comparisons) > 1)
        what = f"{cases} cases in {len(comparisons)} comparison{plural}, the largest takes {needs}"
        yield Finding("memory", OK, what)


# ---- the results directory

# What a full disk shows and an empty file does not.
_PROBE_BYTES = 2**20
# Of a row in a part: 20 to 60 bytes were seen. A breakdown iteration has a row for each of 12 phases and three more.
_BYTES_PER_ITERATION = 60 * 15
_LEAST_FREE_BYTES = 2**28


def directory_findings(out: Path, comparisons: Sequence[Facts], world_size: int) -> Findings:
    """Try all that a run will do to its results directory, which may not be there yet; nothing is left behind."""
    fix = "choose another with --out"
    missing = [folder for folder in (out, *out.parents) if not os.path.exists(folder)]
    probe = out / f".doctor.{uuid.uuid4()}"
    try:
        with atomic_path(probe) as temporary:
            temporary.write_bytes(bytes(_PROBE_BYTES))
        probe.unlink()
        space = os.statvfs(out)
    except OSError as error:
        what = f"{out}: cannot be written ({error.strerror})"
        yield Finding("results", PROBLEM, what, "a run would measure and could not keep it", fix)
        return
    finally:
        for folder in missing:
            with contextlib.suppress(OSError):  # it was not made, or somebody else has begun to use it
                folder.rmdir()
    free = space.f_bavail * space.f_frsize
    needed = sum(one["iterations"] for one in comparisons) * world_size * _BYTES_PER_ITERATION
    room = f"{free / 2**30:.1f} GiB free"
    if free < max(needed, _LEAST_FREE_BYTES):
        what = f"{out}: {room}, a run may write {needed / 2**30:.2f} GiB"
        yield Finding("results", PROBLEM if free < needed else NOTE, what, "a full disk ends it between cases", fix)
        return
    new = ", not there yet" if missing else ""
    yield Finding("results", OK, f"{out}{new}: can be written, files appear whole or not at all, {room}")
    # Who else is there, by the locks that they hold, and by the marks that a lost job left.
    held = {name: whose for name, whose in locks.holders(out).items() if name != RUN_JSON}
    ours = next((one for one in comparisons if one["comparison_id"] in held), None)
    if ours is not None:
        what = f"{ours['title']}: another job is writing this, {held[ours['comparison_id']]}"
        yield Finding("results", PROBLEM, what, "a run would be refused", "wait for it, stop it, or another --out")
    elif held:
        jobs = "; ".join(sorted(set(held.values())))
        what = f"another job is writing {len(held)} other comparison(s) there, {jobs}"
        yield Finding("results", NOTE, what, "a run may fill the directory beside it, at the cost of both times")
    elif any((out / "attempts").glob("now-*")):
        what = "a job was lost there without a word, and none holds a lock now"
        means = "the next run counts it against what it was measuring; without locks it may still be at it"
        yield Finding("results", NOTE, what, means, "look whether it runs where the file system has no locks")


def earlier_findings(out: Path, refusal: str, comparisons: Sequence[Facts]) -> Findings:
    """What is there of earlier runs; ``refusal`` is of ``facts.agreement``."""
    cases = [case for one in comparisons for case in one["cases"]]
    done = sum((out / "cases" / f"{case}.parquet").exists() for case in cases)
    if refusal:
        what = refusal.removeprefix(f"--out {out}: ")
        yield Finding("results", PROBLEM, f"{out}: {what}", "a run would refuse to mix results")
    elif done:
        what = f"{done} of {len(cases)} cases of this config are there; a run does what lacks"
        yield Finding("results", OK, what)
