"""What the facts of a machine mean for a run; a check answers with findings and asks no driver and no torch.

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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from moe_ep_bench.files import atomic_path
from moe_ep_bench.machine.gpus import THROTTLE_REASONS
from moe_ep_bench.results import RUN_JSON
from moe_ep_bench.runtime import locks

OK, NOTE, PROBLEM = "ok", "note", "problem"
Facts = Mapping[str, Any]


@dataclass(frozen=True)
class Finding:
    """One line of the report."""

    check: str
    status: Literal["ok", "note", "problem"]
    """``problem``: a run would fail, or not be what it seems to be. ``note``: it goes, with less."""
    what: str
    means: str = ""
    """For a run; empty where that is plain."""
    remedy: str = ""


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


def package_findings(machine: Facts, broken: Mapping[str, str]) -> list[Finding]:
    """Versions, and imports that fail (``broken``: why, by package, of ``facts.imports``)."""
    versions, on_gpus = machine["packages"], bool(machine["gpus"])
    there = [f"{name} {versions[key]}" for key, name in _NAMES.items() if versions[key] and key not in broken]
    findings = [Finding("packages", OK, ", ".join(there))]

    def found(status: Any, what: str, means: str, remedy: str = "") -> None:
        findings.append(Finding("packages", status, what, means, remedy))

    for key, (least, below) in _SUPPORTED.items():
        version = versions[key]
        numbers = tuple(int(part) for part in re.findall(r"\d+", version or "")[:3])
        if version is None:
            found(PROBLEM, f"{_NAMES[key]} is not installed", "no layer can be built", _SET_UP)
        elif numbers < least or (below and numbers >= below):
            allowed = f"{_dotted(least)} or newer" + (f", below {_dotted(below)}" if below else "")
            what = f"{_NAMES[key]} {version}, expected {allowed}"
            found(PROBLEM, what, "this program was never tried with it", _SET_UP)
    for key, without in _WITHOUT.items():
        if versions[key] is None and (on_gpus or key not in _ON_GPUS_ONLY):
            found(NOTE, f"{_NAMES[key]} is not installed", *without)
    idle = [_NAMES[key] for key in _ON_GPUS_ONLY if versions[key] is None and not on_gpus]
    if idle:
        found(OK, f"not installed, and of use on GPUs only: {', '.join(idle)}", "")
    if machine["foreign_apex"]:
        what = "apex here is another project's of that name"
        found(NOTE, what, "nothing uses it; it is not NVIDIA Apex", "pip uninstall apex")
    for key, why in broken.items():
        if versions[key] is None and key in _WITHOUT:
            continue  # some other project's module
        # On a CPU run nothing asks for these.
        status = PROBLEM if on_gpus or key == "megatron_core" else NOTE
        what = f"{_NAMES[key]} {versions[key]} is installed and cannot be imported ({why})"
        found(status, what, "what is chosen because it is there will fail", "install it anew, for this torch and CUDA")
    return findings


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


def cpu_findings(machine: Facts) -> list[Finding]:
    """The host, and whether it is quiet."""
    cores, load = machine["num_cores"], machine["load_average"]
    free = machine["host_free_bytes"] / 2**30
    findings = [Finding("CPU", OK, f"{machine['cpu']}, {cores} cores for us, {free:.1f} GiB of memory free")]
    if load > _MAX_LOAD * cores:
        what = f"{load:.1f} processes were running on average over the last minute"
        means = "others' work beside a run disturbs its times"
        findings.append(Finding("load", NOTE, what, means, "wait, or stop them"))
    return findings


def gpu_findings(machine: Facts, gpus: Sequence[Facts] | str) -> list[Finding]:
    """What the driver has (of ``gpus.query_gpus``) beside what torch can use."""
    usable, hidden = machine["gpus"], machine["variables"].get("CUDA_VISIBLE_DEVICES")
    if not usable:
        # No NVML is a machine without GPUs; one that fails is a machine with a broken driver.
        if not gpus or (isinstance(gpus, str) and "Shared Library Not Found" in gpus):
            means = "ranks run on the CPU with gloo, which shows the machinery and no GPU's times"
            return [Finding("GPUs", NOTE, "none", f"{means}; `emulate` models a GPU's")]
        if isinstance(gpus, str):
            fix = "look at nvidia-smi and dmesg; the node may have to be restarted"
            means = "the driver does not work: no GPU can be used"
            return [Finding("GPUs", PROBLEM, f"NVML: {gpus}", means, fix)]
        what = f"{len(gpus)} here, none that torch can use"
        if hidden is not None and hidden.strip() in ("", "-1"):
            return [Finding("GPUs", NOTE, f"{what} (CUDA_VISIBLE_DEVICES={hidden!r})", "runs take the CPU")]
        fix = "install a torch with CUDA that this driver supports (nvidia-smi names its CUDA)"
        return [Finding("GPUs", PROBLEM, f"{what}: {machine['no_gpus_why']}", "runs would take the CPU", fix)]
    names = Counter(gpu["name"] for gpu in usable)
    listed = ", ".join(f"{count} x {name}" for name, count in names.items())
    free = f"{min(gpu['free_bytes'] for gpu in usable) / 2**30:.1f} GiB free on the fullest"
    if isinstance(gpus, str):
        means = "clocks, power caps and NVLinks cannot be looked at"
        return [Finding("GPUs", OK, f"{listed}, {free}"), Finding("driver", NOTE, f"NVML: {gpus}", means)]
    findings = [Finding("GPUs", OK, f"{listed}, driver {gpus[0]['driver']}, {free}")]
    if len(names) > 1:
        findings.append(Finding("GPUs", NOTE, "of several kinds", "the slowest one sets every layer's time"))
    mine = {gpu["uuid"] for gpu in usable}
    # What is so of several is said once.
    alike: dict[Finding, list[int]] = {}
    for gpu in gpus:
        for finding in _gpu_findings(gpu) if gpu["uuid"] in mine else ():
            alike.setdefault(finding, []).append(gpu["index"])
    for finding, indices in alike.items():
        several = f"{', '.join(map(str, indices))}: " if len(indices) > 1 else ""
        check = "GPUs" if several else f"GPU {indices[0]}"
        findings.append(replace(finding, check=check, what=several + finding.what))
    return findings


def _gpu_findings(gpu: Facts) -> list[Finding]:
    """What makes one GPU slower than its like, or unusable."""
    known = {name: value or 0.0 for name, value in gpu.items()}
    limit, default, errors = known["power_limit_w"], known["power_default_w"], known["ecc_errors"]
    reasons = [words for reason, words in _SLOWED.items() if int(known["throttle_reasons"]) & THROTTLE_REASONS[reason]]
    clocks = f"{known['sm_clock_mhz']:.0f} of {known['sm_clock_limit_mhz']:.0f} MHz, {known['temperature_c']:.0f} C"
    free, total = gpu["memory_free_mib"], gpu["memory_mib"]
    used = 100 * (1 - free / total) if total and free is not None else 0.0
    busy = known["utilization_percent"]
    table: list[tuple[bool, Any, str, str, str]] = [
        (
            gpu["compute_mode"] == "Prohibited", PROBLEM, "compute mode Prohibited",
            "no process may use it", "nvidia-smi -c DEFAULT, as root",
        ),
        (
            gpu["mig"] == "Enabled", NOTE, "MIG is enabled",
            "a rank gets a slice of a GPU, and NCCL joins no slices of one GPU", "",
        ),
        (
            errors > 0, NOTE, f"{errors:.0f} uncorrected memory errors since the driver was loaded",
            "results may be wrong and kernels may die", "have it reset or replaced",
        ),
        (
            0 < limit < default, NOTE, f"capped at {limit:.0f} W of {default:.0f} W",
            "matmuls run slower than on others of its kind; times hold for this cap", "nvidia-smi -pl",
        ),
        (
            bool(reasons), NOTE, f"throttled now: {reasons[0] if reasons else ''} ({clocks})",
            "its rank will be the straggler", "mend its cooling or supply",
        ),
        (
            max(used, busy) > _MAX_USED, NOTE, f"{used:.0f} % of its memory is taken, {busy:.0f} % of its time",
            "another process uses it and disturbs the times", "nvidia-smi lists it",
        ),
    ]  # fmt: skip
    return [Finding("GPU", status, what, means, remedy) for is_so, status, what, means, remedy in table if is_so]


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


def topology_findings(topology: Facts | str, gpus: Sequence[Facts]) -> list[Finding]:
    """Paths between GPUs, and from GPUs to NICs (of ``gpus.query_topology``); NVLinks that are down."""
    if isinstance(topology, str):
        return [Finding("topology", NOTE, f"unknown ({topology})", "what connects the GPUs cannot be said")]
    findings, paths = [], topology["paths"]
    names = [name for name in paths if name.startswith("GPU")]
    between = [paths[a][b] for i, a in enumerate(names) for b in names[i + 1 :]]
    if between:
        listed = ", ".join(f"{count} x {path}" for path, count in Counter(between).most_common())
        over_pcie = sum(not path.startswith("NV") for path in between)
        if over_pcie:
            what = f"{over_pcie} of {len(between)} pairs of GPUs have no NVLink ({listed})"
            means = "their all-to-all goes over PCIe, an order of magnitude slower"
            findings.append(Finding("topology", NOTE, what, means, "take GPUs that are connected"))
        else:
            findings.append(Finding("topology", OK, f"NVLink between all GPUs ({listed} pairs)"))
    dead = {gpu["index"]: (gpu["nvlinks"].count(False), len(gpu["nvlinks"])) for gpu in gpus if gpu["nvlinks"]}
    listed = ", ".join(f"GPU {gpu}: {down} of {count}" for gpu, (down, count) in dead.items() if down)
    if listed and between:
        means = "the all-to-all is slower than this machine could; some boards leave links unconnected"
        findings.append(Finding("NVLink", NOTE, f"inactive links ({listed})", means, "nvidia-smi nvlink --status"))
    # The nearest NIC of each GPU, by ever longer ways; only the last two are far.
    ways = ("PIX", "PXB", "PHB", "NODE", "SYS")
    near = {
        gpu: [ways.index(path) for to, path in paths[gpu].items() if to not in names and path in ways] for gpu in names
    }
    far = {gpu: min(found) for gpu, found in near.items() if found and min(found) >= ways.index("NODE")}
    if far:
        what = f"{', '.join(far)} reach their nearest NIC across the host ({ways[next(iter(far.values()))]})"
        findings.append(Finding("NICs", NOTE, what, "between nodes these ranks are slower than with a NIC beside them"))
    return findings


def nic_findings(ports: Sequence[Facts]) -> list[Finding]:
    """RDMA between nodes."""
    active = [port for port in ports if port["is_active"]]
    if not active:
        what = "no RDMA NIC" if not ports else f"none of {len(ports)} RDMA ports is active"
        return [Finding("NICs", NOTE, what, "one node is fine; between nodes collectives go over TCP, far slower")]
    kinds = Counter(f"{port['rate']} {port['link_layer']}" for port in active)
    findings = [Finding("NICs", OK, "RDMA: " + ", ".join(f"{count} x {kind}" for kind, count in kinds.items()))]
    if len(active) < len(ports):
        idle = ", ".join(f"{port['nic']}:{port['number']}" for port in ports if not port["is_active"])
        findings.append(Finding("NICs", NOTE, f"ports that are down: {idle}", "less bandwidth between nodes"))
    if resource.getrlimit(resource.RLIMIT_MEMLOCK)[0] != resource.RLIM_INFINITY:
        means = "RDMA pins memory, and may fail for large buffers"
        findings.append(Finding("NICs", NOTE, "locked memory is limited", means, "ulimit -l unlimited, in the job too"))
    return findings


def shared_memory_findings(num_gpus: int, folder: Path = Path("/dev/shm")) -> list[Finding]:
    """What NCCL needs where several GPUs of a node work at once."""
    needed = num_gpus * _SHM_BYTES_PER_GPU
    try:
        space = os.statvfs(folder)
    except OSError:
        return []
    free = space.f_bavail * space.f_frsize
    if num_gpus < 2 or free >= needed:
        return []
    what = f"{free / 2**20:.0f} MiB free in {folder}"
    means = f"NCCL may fail there with {num_gpus} GPUs (about {needed / 2**20:.0f} MiB, an estimate)"
    return [Finding("NCCL", NOTE, what, means, "give the container more: docker run --shm-size=8g")]


def nccl_findings(machine: Facts) -> list[Finding]:
    """NCCL's version, and all settings that change what is measured."""
    version, variables = machine["packages"]["nccl"], machine["variables"]
    findings = []
    if machine["gpus"]:
        settings = ", ".join(f"{name}={value}" for name, value in variables.items() if "NCCL" in name)
        findings.append(Finding("NCCL", OK, f"{version}, {settings or 'no variable of its own is set'}"))
    for (name, value), means in _COSTLY.items():
        found = variables.get(name, "")
        if (found.upper() == value) if value else found not in ("", "0"):
            findings.append(Finding("settings", NOTE, f"{name}={found}", means, f"unset {name}"))
    return findings


# ---- ranks and memory


def ranks_findings(machine: Facts, nproc: int) -> list[Finding]:
    """So many ranks on this node."""
    num_gpus, cores = len(machine["gpus"]), machine["num_cores"]
    if num_gpus and nproc > num_gpus:
        what = f"{nproc} on this node, which has {num_gpus} GPUs that torch can use"
        return [Finding("ranks", PROBLEM, what, "each needs one of its own", f"--nproc {num_gpus}")]
    if not num_gpus and nproc > cores:
        what = f"{nproc} on {cores} cores"
        return [Finding("ranks", NOTE, what, "they share time slices; no straggler speedup is claimed")]
    return []


def available_bytes(machine: Facts, nproc: int) -> int:
    """What each of a node's ranks may still take: the fullest GPU's rest, or a share of the host's."""
    gpus = machine["gpus"][:nproc]
    return min(gpu["free_bytes"] for gpu in gpus) if gpus else machine["host_free_bytes"] // nproc


def memory_findings(comparisons: Sequence[Facts], available: int) -> list[Finding]:
    """What every comparison needs per rank (an estimate) beside the bytes that each may take."""
    most = max(comparisons, key=lambda one: one["memory_bytes"])
    needs = f"about {most['memory_bytes'] / 2**30:.1f} GiB of {available / 2**30:.1f} GiB that are free per rank"
    too_large = sum(one["memory_bytes"] > available for one in comparisons)
    if too_large:
        what = f"{too_large} of {len(comparisons)} comparisons need more than there is; {most['title']} needs {needs}"
        remedy = "more ranks, fewer workload.num_tokens or num_batches, or a smaller model.scale"
        return [Finding("memory", PROBLEM, what, "they would be skipped, the rest would run", remedy)]
    cases, plural = sum(len(one["cases"]) for one in comparisons), "s" * (len(comparisons) > 1)
    return [Finding("memory", OK, f"{cases} cases in {len(comparisons)} comparison{plural}, the largest takes {needs}")]


# ---- the results directory

# What a full disk shows and an empty file does not.
_PROBE_BYTES = 2**20
# Of a row in a part: 20 to 60 bytes were seen. A breakdown iteration has a row for each of 12 phases and three more.
_BYTES_PER_ITERATION = 60 * 15
_LEAST_FREE_BYTES = 2**28
_CHOOSE = "choose another with --out"


def directory_findings(out: Path, comparisons: Sequence[Facts], world_size: int) -> list[Finding]:
    """Try all that a run will do to its results directory; nothing is left behind.

    Args:
        out: may not be there yet.
        comparisons: of ``facts.plan``; empty without a config.
        world_size: ranks in all.
    """
    missing: list[Path] = []
    probe = out / f".doctor.{uuid.uuid4()}"
    try:
        missing = [folder for folder in (out, *out.parents) if not folder.exists()]
        with atomic_path(probe) as temporary:
            temporary.write_bytes(bytes(_PROBE_BYTES))
        probe.unlink()
        space = os.statvfs(out)
    except OSError as error:
        what = f"{out}: cannot be written ({error.strerror})"
        return [Finding("results", PROBLEM, what, "a run would measure and could not keep it", _CHOOSE)]
    finally:
        for folder in missing:
            with contextlib.suppress(OSError):  # it was not made, or somebody else has begun to use it
                folder.rmdir()
    free = space.f_bavail * space.f_frsize
    iterations = sum(one["iterations"] for one in comparisons)
    needed = iterations * world_size * _BYTES_PER_ITERATION
    room = f"{free / 2**30:.1f} GiB free"
    if free < max(needed, _LEAST_FREE_BYTES):
        what = f"{out}: {room}, a run may write {needed / 2**30:.2f} GiB"
        status = PROBLEM if free < needed else NOTE
        return [Finding("results", status, what, "a full disk ends it between cases", _CHOOSE)]
    new = ", not there yet" if missing else ""
    findings = [Finding("results", OK, f"{out}{new}: can be written, files appear whole or not at all, {room}")]
    return [*findings, *_busy(out, comparisons)]


def _busy(out: Path, comparisons: Sequence[Facts]) -> list[Finding]:
    """Who else is at that directory, by the locks that they hold, and by the marks that a lost job left."""
    held = {name: whose for name, whose in locks.holders(out).items() if name != RUN_JSON}
    for one in comparisons:
        if one["comparison_id"] in held:
            what = f"{one['title']}: another job is writing this, {held[one['comparison_id']]}"
            fix = "wait for it, stop it, or another --out"
            return [Finding("results", PROBLEM, what, "a run would be refused", fix)]
    if held:
        jobs = "; ".join(sorted(set(held.values())))
        what = f"another job is writing {len(held)} other comparison(s) there, {jobs}"
        return [Finding("results", NOTE, what, "a run may fill the directory beside it, at the cost of both times")]
    if any((out / "attempts").glob("now-*")):
        what = "a job was lost there without a word, and none holds a lock now"
        means = "the next run counts it against what it was measuring; without locks it may still be at it"
        return [Finding("results", NOTE, what, means, "look whether it runs where the file system has no locks")]
    return []


def earlier_findings(out: Path, refusal: str, comparisons: Sequence[Facts]) -> list[Finding]:
    """What is there of earlier runs; ``refusal`` is of ``facts.agreement``."""
    if refusal:
        what = refusal.removeprefix(f"--out {out}: ")
        return [Finding("results", PROBLEM, f"{out}: {what}", "a run would refuse to mix results")]
    cases = [case for one in comparisons for case in one["cases"]]
    done = sum((out / "cases" / f"{case}.parquet").exists() for case in cases)
    if not done:
        return []
    return [Finding("results", OK, f"{done} of {len(cases)} cases of this config are there; a run does what lacks")]
