"""A Slurm of two nodes on this machine, for tests: a controller and two node daemons, without munge, cgroups, systemd.

Each node is a network namespace with its own hostname and address, so that a job that takes the wrong host for its
meeting point fails here as it would on a cluster. Where namespaces cannot be made, both nodes are this host with
different ports. Needs root; writes the nodes' names into /etc/hosts and takes them out again.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
HOSTS = Path("/etc/hosts")
# By this process's number: several may have a Slurm on one machine, and what a dead one left can be told apart.
HOSTS_MARK = "# a test's Slurm, of process"
LINK = "mebs"
NAMES = (f"n1p{os.getpid()}", f"n2p{os.getpid()}")
# Nothing stays where the tests themselves are killed.
DIES_WITH_US = ("setpriv", "--pdeathsig", "TERM")

CONF = """\
ClusterName=test
SlurmctldHost={host}({address})
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/none
AuthInfo=cred_expire=5
CredType=cred/none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MailProg=/bin/true
SelectType=select/linear
GresTypes=gpu
ReturnToService=2
StateSaveLocation={root}/state
SlurmdSpoolDir={root}/%n
SlurmctldPidFile={root}/slurmctld.pid
SlurmdPidFile={root}/%n.pid
SlurmctldLogFile={root}/slurmctld.log
SlurmdLogFile={root}/%n.log
SlurmdTimeout=10
KillWait=20
SchedulerParameters=batch_sched_delay=0,sched_interval=1,sched_min_interval=0
"""
MEMORY_MIB = 2000


def why_not() -> str | None:
    """Why no cluster can be started here; None if one can."""
    missing = [name for name in ("slurmctld", "slurmd", "sbatch", "scontrol") if shutil.which(name) is None]
    if missing:
        return f"Slurm is not installed (no {', '.join(missing)}; Debian: slurm-wlm)"
    return "needs root, to start Slurm's daemons" if os.geteuid() != 0 else None


def wait_for(
    what: str, found: Callable[[], bool], timeout_s: float, *, because: Callable[[], str] = lambda: ""
) -> None:
    """Poll; ``because`` says more where it does not come."""
    deadline = time.monotonic() + timeout_s
    while not found():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what}: not within {timeout_s:g} s\n{because()}")
        time.sleep(0.2)


def _run(*command: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, timeout=600, check=check)


@dataclass
class Node:
    name: str
    address: str
    port: int
    enter: tuple[str, ...] = ()
    """In front of a command: runs it on this node."""
    holder: int = 0
    """The process that keeps the node's namespaces."""
    daemon: subprocess.Popen[bytes] | None = None


@dataclass
class Cluster:
    """A running Slurm. All files lie below ``root``."""

    root: Path
    nodes: dict[str, Node]
    apart: bool
    """Whether each node is a network namespace; otherwise both are this host."""
    controller: subprocess.Popen[bytes] | None = None
    environment: dict[str, str] = field(default_factory=dict)

    def command(self, *words: object, **variables: object) -> str:
        environment = {**self.environment, **{name: str(value) for name, value in variables.items()}}
        done = subprocess.run(
            list(map(str, words)), capture_output=True, text=True, timeout=600, env=environment, cwd=self.root
        )
        assert done.returncode == 0, f"{words}: {done.stderr}"
        return done.stdout

    def submit(self, script: str, *arguments: object, options: tuple[str, ...] = (), **variables: object) -> str:
        """Submit one of slurm/'s scripts from the repository's root; return the job's id."""
        ready = {"ROOT": ROOT, "VENV": sys.prefix, "PYTHONPATH": ROOT, "NPROC": 1, **variables}
        # Through the environment: --export takes no values with commas.
        # This machine has no GPUs to give.
        options = ("--gpus-per-node=0", *options)
        return self.command(
            "sbatch", "--parsable", f"--chdir={ROOT}", "--export=ALL", f"--output={self.root}/job-%A_%a.out", *options,
            ROOT / "slurm" / script, *arguments, "--cpu", **ready,
        ).strip()  # fmt: skip

    def job(self, job_id: str) -> dict[str, str]:
        return dict(re.findall(r"(\S+?)=(\S*)", self.command("scontrol", "--oneliner", "show", "job", job_id)))

    def state(self, job_id: str) -> str:
        return self.job(job_id)["JobState"]

    def finish(self, job_id: str, timeout_s: float = 150) -> tuple[str, str]:
        """Wait for a job's end: its state, and its exit code as Slurm writes it, status:signal."""
        over = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED")
        try:
            wait_for(f"end of job {job_id}", lambda: self.state(job_id) in over, timeout_s)
        except TimeoutError as problem:
            raise AssertionError(f"{problem}; {self.job(job_id)}\n{self.printed(job_id)}") from None
        # Its processes may outlive the decision by a moment.
        job = self.job(job_id)
        return job["JobState"], job["ExitCode"]

    def printed(self, job_id: str) -> str:
        return "\n".join(path.read_text() for path in sorted(self.root.glob(f"job-{job_id}_*.out")))

    def start_node(self, name: str) -> None:
        node = self.nodes[name]
        with open(self.root / f"{name}.printed", "ab") as printed:
            node.daemon = subprocess.Popen(
                [*DIES_WITH_US, *node.enter, "slurmd", "-D", "-N", name],
                stdout=printed,
                stderr=printed,
                env=self.environment,
            )
        wait_for(f"node {name}", lambda: self.node_state(name) in ("idle", "mixed", "allocated"), 40)

    def node_state(self, name: str) -> str:
        return self.command("sinfo", "--noheader", f"--nodes={name}", "--format=%T").strip()

    def crash_node(self, name: str) -> None:
        """All that runs on the node is gone at once, as when its power fails."""
        daemon = self.nodes[name].daemon
        assert daemon is not None
        doomed = [pid for pid in self._processes() if self._node_of(pid) == name]
        # Those first that could still tell of it.
        for pid in sorted(doomed, key=lambda pid: not _words(pid)[0:1] or "slurm" not in _words(pid)[0]):
            _kill(pid)
        daemon.kill()
        daemon.wait()

    def processes_of(self, job_id: str) -> list[int]:
        return [pid for pid in self._processes() if _environment(pid).get("SLURM_JOB_ID") == job_id]

    def _processes(self) -> list[int]:
        """What the cluster's daemons have started: it has this cluster's configuration in its environment."""
        pids = [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]
        conf = self.environment["SLURM_CONF"]
        return [pid for pid in pids if pid != os.getpid() and _environment(pid).get("SLURM_CONF") == conf]

    def _node_of(self, pid: int) -> str | None:
        if self.apart:
            spaces = {_network(node.holder): name for name, node in self.nodes.items()}
            return spaces.get(_network(pid))
        words = _words(pid)
        if words and "slurmd" in Path(words[0]).name and "-N" in words:
            return words[words.index("-N") + 1]
        return _environment(pid).get("SLURMD_NODENAME")

    def stop(self) -> None:
        for daemon in (*(node.daemon for node in self.nodes.values()), self.controller):
            if daemon is not None:
                daemon.terminate()
        for daemon in (*(node.daemon for node in self.nodes.values()), self.controller):
            if daemon is not None:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    daemon.wait(10)
                daemon.kill()
                daemon.wait()
        for pid in self._processes():
            _kill(pid)


def _environment(pid: int) -> dict[str, str]:
    try:
        text = Path(f"/proc/{pid}/environ").read_text(errors="replace")
    except OSError:
        return {}
    return dict(entry.partition("=")[::2] for entry in text.split("\0"))


def _network(pid: int) -> str:
    """Which network namespace a process is in; none where it has ended."""
    try:
        return os.readlink(f"/proc/{pid}/ns/net")
    except OSError:
        return ""


def _words(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text(errors="replace").split("\0")
    except OSError:
        return []


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def _is_alive(pid: str) -> bool:
    return Path("/proc", pid).exists()


def _remove_links_of_the_dead() -> None:
    for path in Path("/sys/class/net").glob(f"{LINK}*"):
        if not _is_alive(path.name.removeprefix(LINK)[:-1]):
            _run("ip", "link", "delete", path.name, check=False)


@contextlib.contextmanager
def _namespaces() -> Iterator[tuple[str, dict[str, Node]] | None]:
    """A network namespace per node, bridged to this one: this host's address there, and the nodes.

    None where they cannot be made.
    """
    holders: list[subprocess.Popen[bytes]] = []
    network = f"10.231.{os.getpid() % 250}"
    bridge = f"{LINK}{os.getpid()}b"
    nodes = {}
    try:
        try:
            _remove_links_of_the_dead()
            _run("ip", "link", "add", bridge, "type", "bridge")
            _run("ip", "address", "add", f"{network}.1/24", "dev", bridge)
            _run("ip", "link", "set", bridge, "up")
            for number, name in enumerate(NAMES, 1):
                holder = subprocess.Popen([*DIES_WITH_US, "unshare", "--net", "--uts", "sleep", "infinity"])
                holders.append(holder)
                wait_for("namespace", lambda pid=holder.pid: _words(pid)[:1] == ["sleep"], 100)
                enter = ("nsenter", "--target", str(holder.pid), "--net", "--uts")
                link = f"{LINK}{os.getpid()}{number}"
                _run("ip", "link", "add", link, "type", "veth", "peer", "name", "eth0", "netns", str(holder.pid))
                _run("ip", "link", "set", link, "master", bridge, "up")
                _run(*enter, "hostname", name)
                _run(*enter, "ip", "address", "add", f"{network}.{number + 10}/24", "dev", "eth0")
                _run(*enter, "ip", "link", "set", "eth0", "up")
                _run(*enter, "ip", "link", "set", "lo", "up")
                nodes[name] = Node(name, f"{network}.{number + 10}", 17002, enter, holder.pid)
            found = f"{network}.1", nodes
        except (OSError, subprocess.SubprocessError, TimeoutError):
            found = None
        yield found
    finally:
        for holder in holders:
            holder.kill()
            holder.wait()
        with contextlib.suppress(OSError):  # Their ends of the links went with the namespaces.
            _run("ip", "link", "delete", bridge, check=False)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]


@contextlib.contextmanager
def _named(nodes: dict[str, Node]) -> Iterator[None]:
    """The nodes' names in /etc/hosts."""
    try:
        _write_hosts([f"{node.address} {node.name} {HOSTS_MARK} {os.getpid()}\n" for node in nodes.values()])
        yield
    finally:
        _write_hosts([])


def _write_hosts(own: list[str]) -> None:
    """Replace this process's lines by ``own``, and take out those of processes that are dead."""
    with open(HOSTS, "r+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        kept = []
        for line in file.read().splitlines(keepends=True):
            _, marked, pid = line.partition(HOSTS_MARK)
            if not marked or (pid.strip() != str(os.getpid()) and _is_alive(pid.strip())):
                kept.append(line)
        if kept and own and not kept[-1].endswith("\n"):
            kept.append("\n")
        # Written in place: in a container this file is a mount of its own.
        file.seek(0)
        file.truncate()
        file.write("".join([*kept, *own]))


@contextlib.contextmanager
def cluster(root: Path) -> Iterator[Cluster]:
    """A Slurm of two nodes; everything it started is gone afterwards."""
    with _namespaces() as apart:
        own = "127.0.0.1", {name: Node(name, "127.0.0.1", _free_port()) for name in NAMES}
        address, nodes = apart or own
        lines = [CONF.format(host=socket.gethostname(), address=address, port=_free_port(), root=root)]
        lines += [
            f"NodeName={node.name} NodeAddr={node.address} Port={node.port} CPUs=2 RealMemory={MEMORY_MIB}\n"
            for node in nodes.values()
        ]
        lines.append(f"PartitionName=all Nodes={','.join(nodes)} Default=YES MaxTime=INFINITE\n")
        (root / "state").mkdir(parents=True)
        for name in nodes:
            (root / name).mkdir()
        (root / "slurm.conf").write_text("".join(lines))
        kept = {key: value for key, value in os.environ.items() if not key.startswith(("SLURM_", "SBATCH_"))}
        running = Cluster(root, nodes, apart is not None, environment={**kept, "SLURM_CONF": str(root / "slurm.conf")})
        with _named(nodes):
            try:
                with open(root / "slurmctld.printed", "wb") as printed:
                    running.controller = subprocess.Popen(
                        [*DIES_WITH_US, "slurmctld", "-D"], stdout=printed, stderr=printed, env=running.environment
                    )
                wait_for("slurmctld", lambda: "UP" in _ping(running), 200)
                for name in nodes:
                    running.start_node(name)
                yield running
            finally:
                running.stop()


def _ping(running: Cluster) -> str:
    done = subprocess.run(
        ["scontrol", "ping"], capture_output=True, text=True, timeout=600, env=running.environment, check=False
    )
    return done.stdout
