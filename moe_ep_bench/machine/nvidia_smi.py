"""What the driver says of a node's GPUs and their topology, by ``nvidia-smi``, and the kernel's list of NICs.

``nvidia-smi`` is a process of its own: a driver that does not answer holds up nobody. It sees all GPUs of the node,
whatever CUDA_VISIBLE_DEVICES hides. Clocks beside a run are ``monitor``'s.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from moe_ep_bench.machine.subprocesses import CommandError, output_of

TIMEOUT_S = 20.0

Run = Callable[[list[str], float], str]  # as ``subprocesses.output_of``


def _asked(query: str) -> Any:
    """A field of ``Gpu`` that nvidia-smi calls ``query``."""
    return field(default=None, metadata={"query": query})


@dataclass(frozen=True)
class Gpu:
    """One GPU of this node at a moment. None: the driver does not say."""

    index: int = field(metadata={"query": "index"})
    name: str | None = field(metadata={"query": "name"})
    uuid: str | None = field(metadata={"query": "uuid"})
    driver: str | None = field(metadata={"query": "driver_version"})
    memory_mib: float | None = _asked("memory.total")
    memory_free_mib: float | None = _asked("memory.free")
    utilization_percent: float | None = _asked("utilization.gpu")
    temperature_c: float | None = _asked("temperature.gpu")
    sm_clock_mhz: float | None = _asked("clocks.sm")
    sm_clock_limit_mhz: float | None = _asked("clocks.max.sm")
    power_w: float | None = _asked("power.draw")
    power_limit_w: float | None = _asked("power.limit")
    power_default_w: float | None = _asked("power.default_limit")
    compute_mode: str | None = _asked("compute_mode")
    mig: str | None = _asked("mig.mode.current")
    ecc_errors: float | None = _asked("ecc.errors.uncorrected.volatile.total")  # since the driver was loaded
    throttle_reasons: int | None = _asked("clocks_throttle_reasons.active")  # bits of monitor.THROTTLE_REASONS


# The last one is what newer drivers call throttle_reasons.
_FIELDS = {f.name: f.metadata["query"] for f in fields(Gpu)} | {"event_reasons": "clocks_event_reasons.active"}
_TEXTS = ("name", "uuid", "driver", "compute_mode", "mig")


def query_gpus(run: Run = output_of) -> list[Gpu]:
    """All GPUs of this node, by their index.

    Raises:
        CommandError: there is no nvidia-smi, or it fails or hangs: no driver, no GPU, or one that is lost.
    """
    asked = dict(_FIELDS)
    while True:
        try:
            query = f"--query-gpu={','.join(asked.values())}"
            text = run(["nvidia-smi", query, "--format=csv,noheader,nounits"], TIMEOUT_S)
        except CommandError as error:
            # Drivers differ in what they can be asked.
            unknown = re.search(r'Field "([^"]+)" is not a valid field', str(error))
            if unknown is None or unknown[1] not in asked.values():
                raise
            asked = {key: query for key, query in asked.items() if query != unknown[1]}
            continue
        lines = [[cell.strip() for cell in line.split(",")] for line in text.splitlines() if line.strip()]
        return [_gpu(dict(zip(asked, cells, strict=False))) for cells in lines]


def _gpu(cells: Mapping[str, str]) -> Gpu:
    known = {key: None if re.match(r"\[|N/A", cell) else cell for key, cell in cells.items()}
    values: dict[str, Any] = {
        key: cell if cell is None or key in _TEXTS else _number(cell) for key, cell in known.items()
    }
    older, newer = values.pop("throttle_reasons", None), values.pop("event_reasons", None)
    reasons = older if newer is None else newer
    try:
        values["index"] = int(values["index"])
        return Gpu(**values, throttle_reasons=None if reasons is None else int(reasons))
    except (KeyError, TypeError):
        raise CommandError(f"nvidia-smi: expected a line per GPU, got {', '.join(cells.values())[:100]!r}") from None


def _number(cell: str) -> float | None:
    try:
        return float(int(cell, 16)) if cell.startswith("0x") else float(cell)
    except ValueError:
        return None


@dataclass(frozen=True)
class Topology:
    """How GPUs and NICs of a node reach each other, as ``nvidia-smi topo -m`` has it.

    Attributes:
        paths: {device: {device: path}}; NV<n> = n NVLinks, then PIX, PXB, PHB, NODE, SYS: ever further over PCIe.
        nics: {NIC<n>: its name}, where the matrix numbers them.
    """

    paths: dict[str, dict[str, str]]
    nics: dict[str, str]

    @property
    def gpus(self) -> list[str]:
        return [name for name in self.paths if name.startswith("GPU")]

    def between_gpus(self) -> dict[tuple[str, str], str]:
        """Of every pair of GPUs its path."""
        gpus = self.gpus
        return {(a, b): self.paths[a][b] for i, a in enumerate(gpus) for b in gpus[i + 1 :]}

    def nearest_nic(self, gpu: str) -> tuple[str, str] | None:
        """The NIC that a GPU reaches on the shortest way, and the path to it; None without NICs."""
        near = ("PIX", "PXB", "PHB", "NODE", "SYS")
        found = {name: path for name, path in self.paths[gpu].items() if not name.startswith("GPU") and path in near}
        nic = min(found, key=lambda name: near.index(found[name]), default=None)
        return None if nic is None else (self.nics.get(nic, nic), found[nic])

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def query_topology(run: Run = output_of) -> Topology:
    """The node's topology.

    Raises:
        CommandError: as ``query_gpus``.
    """
    return parse_topology(run(["nvidia-smi", "topo", "-m"], TIMEOUT_S))


def parse_topology(text: str) -> Topology:
    """A matrix as ``nvidia-smi topo -m`` prints it; underlined also where nobody looks.

    Raises:
        CommandError: it has none.
    """
    lines = [line.split() for line in re.sub(r"\x1b\[[0-9;]*m", "", text).splitlines()]
    start = next((number for number, words in enumerate(lines) if words[:1] == ["GPU0"]), None)
    if start is None:
        raise CommandError("nvidia-smi topo -m: expected a matrix")
    header = lines[start]
    names = header[: header.index("CPU")] if "CPU" in header else header
    paths, nics = {}, {}
    for words in lines[start + 1 :]:
        if len(words) > len(names) and words[0] in names:
            cells = dict(zip(names, words[1:], strict=False))
            paths[words[0]] = {name: path for name, path in cells.items() if name != words[0]}
        elif len(words) == 2 and re.fullmatch(r"NIC\d+:", words[0]):
            nics[words[0].rstrip(":")] = words[1]
    return Topology(paths, nics)


def query_nvlinks(run: Run = output_of) -> dict[int, list[float | None]]:
    """GB/s of every NVLink of every GPU, one direction; None = inactive. GPUs without NVLink are left out.

    Raises:
        CommandError: as ``query_gpus``.
    """
    return parse_nvlinks(run(["nvidia-smi", "nvlink", "--status"], TIMEOUT_S))


def parse_nvlinks(text: str) -> dict[int, list[float | None]]:
    """What ``nvidia-smi nvlink --status`` prints; see ``query_nvlinks``."""
    found: dict[int, list[float | None]] = {}
    gpu = 0
    for line in text.splitlines():
        if match := re.match(r"GPU (\d+):", line):
            gpu = int(match[1])
        elif match := re.match(r"\s+Link \d+: (?:([0-9.]+) GB/s|<inactive>)", line):
            found.setdefault(gpu, []).append(float(match[1]) if match[1] else None)
    return found


@dataclass(frozen=True)
class Port:
    """A port of an RDMA NIC, as the kernel lists it."""

    nic: str
    number: int
    is_active: bool
    rate: str  # 400 Gb/sec (4X NDR)
    link_layer: str  # InfiniBand or Ethernet


def rdma_ports(root: Path = Path("/sys/class/infiniband")) -> list[Port]:
    """Ports of all RDMA NICs of this node; empty where the kernel knows none."""
    found = []
    for folder in sorted(root.glob("*/ports/*")):
        state, rate, layer = (_read(folder / name) for name in ("state", "rate", "link_layer"))
        found.append(Port(folder.parents[1].name, int(folder.name), "ACTIVE" in state, rate, layer or "InfiniBand"))
    return found


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
