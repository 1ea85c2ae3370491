"""A Slurm of two nodes on this machine, for tests: a controller and two node daemons, without munge, cgroups, systemd.

Both nodes are this host, under addresses and ports of their own. Their names are these addresses, so that nothing has
to resolve them. A job that does not ask gets a tenth of a node's memory and none of its GPUs, and is not requeued.
Needs root.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
NAMES = ("127.0.0.11", "127.0.0.12")
# Nothing stays where the tests themselves are killed.
DIES_WITH_US = ("setpriv", "--pdeathsig", "TERM")
MEMORY_MIB, NUM_GPUS = 2000, 2  # of a node; the GPUs are empty files
OVER = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED")
CONF = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
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
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU_Memory
DefMemPerCPU=100
GresTypes=gpu
JobRequeue=0
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
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE
"""
NODE = "NodeName={name} NodeHostname={host} NodeAddr={name} Port={port} CPUs=2 RealMemory={memory} Gres=gpu:{gpus}\n"


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


class Cluster:
    """A running Slurm. All files lie below ``root``."""

    def __init__(self, root: Path) -> None:
        self.root = root
        kept = {key: value for key, value in os.environ.items() if not key.startswith(("SLURM_", "SBATCH_"))}
        self.environment = {**kept, "SLURM_CONF": str(root / "slurm.conf")}
        self.daemons: dict[str, subprocess.Popen[bytes]] = {}

    def start(self) -> None:
        host = socket.gethostname()
        lines = [CONF.format(host=host, port=_free_port(), root=self.root)]
        size = {"memory": MEMORY_MIB, "gpus": NUM_GPUS}
        lines += [NODE.format(name=name, host=host, port=_free_port(), **size) for name in NAMES]
        (self.root / "slurm.conf").write_text("".join(lines))
        (self.root / "gres.conf").write_text(f"Name=gpu File={self.root}/gpu[0-{NUM_GPUS - 1}]\n")
        for gpu in range(NUM_GPUS):
            (self.root / f"gpu{gpu}").touch()
        for folder in ("state", *NAMES):
            (self.root / folder).mkdir()
        self._start("slurmctld", "slurmctld", "-D")
        wait_for("slurmctld", lambda: "UP" in self.command("scontrol", "ping", check=False), 200)
        for name in NAMES:
            self.start_node(name)

    def _start(self, name: str, *command: str) -> None:
        with open(self.root / f"{name}.printed", "ab") as printed:
            self.daemons[name] = subprocess.Popen(
                [*DIES_WITH_US, *command], stdout=printed, stderr=printed, env=self.environment
            )

    def start_node(self, name: str) -> None:
        self._start(name, "slurmd", "-D", "-N", name)
        wait_for(f"node {name}", lambda: self.node_state(name) in ("idle", "mixed", "allocated"), 40)

    def stop(self) -> None:
        for daemon in self.daemons.values():
            daemon.terminate()
        for daemon in self.daemons.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                daemon.wait(10)
            daemon.kill()
            daemon.wait()
        for pid in self._processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def command(self, *words: object, check: bool = True, **variables: object) -> str:
        environment = {**self.environment, **{name: str(value) for name, value in variables.items()}}
        done = subprocess.run(
            list(map(str, words)), capture_output=True, text=True, timeout=600, env=environment, cwd=self.root
        )
        assert done.returncode == 0 or not check, f"{words}: {done.stderr}"
        return done.stdout

    def submit(self, script: str, *arguments: object, options: tuple[str, ...] = (), **variables: object) -> str:
        """Submit one of slurm/'s scripts from the repository's root; return the job's id."""
        # Variables go through the environment: --export takes no values with commas.
        ready = {"ROOT": ROOT, "VENV": sys.prefix, "PYTHONPATH": ROOT, "NPROC": 1, **variables}
        return self.command(
            "sbatch", "--parsable", f"--chdir={ROOT}", "--export=ALL", f"--output={self.root}/job-%A_%a.out",
            "--gpus-per-node=0",  # This machine has none to give.
            *options, ROOT / "slurm" / script, *arguments, "--cpu", **ready,
        ).strip()  # fmt: skip

    def job(self, job_id: str) -> dict[str, str]:
        return dict(re.findall(r"(\S+?)=(\S*)", self.command("scontrol", "--oneliner", "show", "job", job_id)))

    def finish(self, job_id: str, timeout_s: float = 150) -> tuple[str, str]:
        """Wait for a job's end: its state, and its exit code as Slurm writes it, status:signal."""
        over = lambda: self.job(job_id)["JobState"] in OVER  # noqa: E731
        wait_for(f"end of job {job_id}", over, timeout_s, because=lambda: f"{self.job(job_id)}\n{self.printed(job_id)}")
        job = self.job(job_id)
        return job["JobState"], job["ExitCode"]

    def printed(self, job_id: str) -> str:
        return "\n".join(path.read_text() for path in sorted(self.root.glob(f"job-{job_id}_*.out")))

    def node_state(self, name: str) -> str:
        return self.command("sinfo", "--noheader", f"--nodes={name}", "--format=%T").strip()

    def crash_node(self, name: str) -> None:
        """All that runs on the node is gone at once, as when its power fails."""
        tasks = [pid for pid in self._processes() if _environment(pid).get("SLURMD_NODENAME") == name]
        stepds = {pid for pid in map(_parent, tasks) if _words(pid)[0].startswith("slurmstepd")}
        # Those first that could still tell of it.
        for pid in [*stepds, *tasks]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.daemons[name].kill()
        self.daemons[name].wait()

    def processes_of(self, job_id: str) -> list[int]:
        return [pid for pid in self._processes() if _environment(pid).get("SLURM_JOB_ID") == job_id]

    def _processes(self) -> list[int]:
        """What the cluster's daemons have started: it has this cluster's configuration in its environment."""
        pids = [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]
        conf = self.environment["SLURM_CONF"]
        return [pid for pid in pids if pid != os.getpid() and _environment(pid).get("SLURM_CONF") == conf]


def _read(pid: int, name: str) -> str:
    """A file of a process; nothing where it has ended."""
    try:
        return Path(f"/proc/{pid}/{name}").read_text(errors="replace")
    except OSError:
        return ""


def _environment(pid: int) -> dict[str, str]:
    return dict(entry.partition("=")[::2] for entry in _read(pid, "environ").split("\0"))


def _words(pid: int) -> list[str]:
    return _read(pid, "cmdline").split("\0")


def _parent(pid: int) -> int:
    return int((re.findall(r"^PPid:\t(\d+)", _read(pid, "status"), re.MULTILINE) or ["0"])[0])


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]


@contextlib.contextmanager
def cluster(root: Path) -> Iterator[Cluster]:
    """A Slurm of two nodes; everything it started is gone afterwards."""
    running = Cluster(root)
    try:
        running.start()
        yield running
    finally:
        running.stop()
