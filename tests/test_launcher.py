"""Launchers of several nodes agree: on every start, every loss, and the end.

Both nodes are this host. Their launchers are real, with torchrun's agent; what they start is no rank of a benchmark but
a few lines that live, die and end as each test says, and note it in a file.
"""

from __future__ import annotations

import contextlib
import datetime
import multiprocessing
import os
import signal
import subprocess
import sys
import textwrap
import time
import types
from collections.abc import Callable, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path

import numpy as np
import pytest
from test_run import environment, free_port
from torch.distributed.elastic.multiprocessing.api import SignalException

from moe_ep_bench.runtime import launcher, rendezvous
from moe_ep_bench.runtime.exit_codes import CASES_FAILED, CLOSED, LOST, OK, USER_ERROR
from moe_ep_bench.runtime.rendezvous import AGAIN, Nodes
from moe_ep_bench.runtime.signals import LAUNCHER, signals_wait

LIMIT_S = 400  # For a test: nothing here takes long, on a machine that is not busy.
STOPPED = 128 + signal.SIGTERM

# What every stand-in for a rank has. `note` writes one line for the test to read, with the moment.
COMMON = """\
import ctypes, os, signal, sys, time
ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: nothing outlives its launcher.
rank, attempt = int(os.environ["RANK"]), 1
def note(what):
    with open(f"{folder}/notes", "a") as file:
        file.write(f"{rank} {what} {time.monotonic()}\\n")
while True:
    try:
        os.close(os.open(f"{folder}/{rank}-{attempt}", os.O_CREAT | os.O_EXCL))
        break
    except FileExistsError:
        attempt += 1
note("starts")
"""


class Left:
    """What jobs leave in a results directory: every attempt something, or none anything."""

    def __init__(self, *, moves: bool) -> None:
        self._moves, self._looks = moves, 0

    def progress(self) -> int:
        self._looks += self._moves
        return self._looks

    def stopped_by(self) -> None:
        return None

    def clear(self) -> None:
        pass


def be_a_launcher(nodes: Nodes, rank_program: str, moves: bool, limit_s: float) -> None:
    """The process of one node: launch the stand-ins until the nodes agree on a status, and end with it."""
    sys.executable = rank_program
    rendezvous._END_S, rendezvous._LOOK_S, rendezvous._GRACE_S, launcher._AGENTS_END_S = limit_s, 0.2, 0.5, 0.5
    rendezvous._STORE_TIMEOUT, rendezvous._STOP_S = datetime.timedelta(seconds=limit_s), 5.0
    left = Left(moves=moves)

    def work(met: rendezvous.Rendezvous) -> int:
        return launcher._one_launch([], left, nodes, met, force=False)

    try:
        status = launcher._together(nodes, work)
    except ValueError as error:
        Path(rank_program).with_name(f"refused-{nodes.rank}").write_text(str(error))
        status = USER_ERROR
    os._exit(status)


class Job:
    """Two launchers whose ranks run ``code``."""

    def __init__(
        self, folder: Path, code: str, *, moves: bool = True, limit_s: float = 60, nproc: Sequence[int] = (1, 1)
    ):
        self.folder = folder
        program = folder / "rank"
        python = sys.executable
        program.write_text(f"#!{python} -S\nfolder = {str(folder)!r}\n{COMMON}{textwrap.dedent(code)}")
        program.chmod(0o755)
        self.master = master = f"127.0.0.1:{free_port()}"
        self.nodes: list[BaseProcess] = []
        self.program, self.options = str(program), (moves, limit_s)
        for node in range(2):
            self.nodes.append(self.start(Nodes(nproc[node], 2, node, master)))

    def start(self, nodes: Nodes) -> BaseProcess:
        """Another launcher; whoever calls this sees to its end."""
        launcher = START.Process(target=be_a_launcher, args=(nodes, self.program, *self.options))
        launcher.start()
        return launcher

    def notes(self, what: str) -> list[tuple[int, float]]:
        """Who noted it, and when, in order."""
        path = self.folder / "notes"
        lines = [line.split() for line in path.read_text().splitlines()] if path.exists() else []
        return [(int(rank), float(at_s)) for rank, noted, at_s in lines if noted == what]

    def wait_for(self, true: Callable[[], bool]) -> None:
        deadline = time.monotonic() + LIMIT_S
        while not true():
            assert time.monotonic() < deadline, f"not within {LIMIT_S} s"
            time.sleep(0.05)

    def statuses(self) -> list[int | None]:
        for node in self.nodes:
            node.join(LIMIT_S)
        return [node.exitcode for node in self.nodes]

    def end(self) -> None:
        for node in self.nodes:
            if node.is_alive():
                node.kill()
            node.join()


# One process imports torch, and every launcher is a copy of it.
START = multiprocessing.get_context("forkserver")
START.set_forkserver_preload(["moe_ep_bench.runtime.launcher", "test_launcher"])


@pytest.fixture
def job(tmp_path: Path):
    jobs = []

    def start(code: str, **options) -> Job:
        jobs.append(Job(tmp_path, code, **options))
        return jobs[-1]

    yield start
    for each in jobs:
        each.end()


@pytest.mark.parametrize(("nodes", "in_slurm"), [(2, False), (1, True)])
def test_ranks_of_several_nodes_have_a_triton_cache_on_each_and_are_bound_to_their_gpus_cores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nodes: int, in_slurm: bool
) -> None:
    """A task of a job array knows of no other node, and shares a home with the others all the same."""
    for name in ("TRITON_CACHE_DIR", "SLURM_JOB_ID"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(launcher.tempfile, "gettempdir", lambda: str(tmp_path))
    launcher._set_environment(Nodes(1, 1, 0, "host:1"))
    assert "TRITON_CACHE_DIR" not in os.environ
    if in_slurm:
        monkeypatch.setenv("SLURM_JOB_ID", "17")
    launcher._set_environment(Nodes(1, nodes, 0, "host:1"))
    assert Path(os.environ["TRITON_CACHE_DIR"]).parent == tmp_path
    launcher._set_environment(Nodes(1, nodes, 0, "host:1"))
    assert launcher._near_their_gpus() is None, "no GPUs here"
    monkeypatch.setattr(launcher.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(launcher.shutil, "which", lambda name: "/usr/bin/numactl")
    assert launcher._near_their_gpus().affinity_mode == "node"


@pytest.mark.parametrize("dying", [0, 1])
def test_after_a_death_no_node_begins_again_before_the_last_has_ended(dying: int, job) -> None:
    # One rank dies; the other has noticed nothing and takes its time to end.
    started = job(f"""
        def slow(number, frame):
            time.sleep(1)
            note("ends")
            os._exit(75)
        signal.signal(signal.SIGTERM, slow)
        if attempt == 1 and rank == {dying}:
            time.sleep(0.2)
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(1000 if attempt == 1 else 0)
    """)
    assert started.statuses() == [OK, OK]
    starts = started.notes("starts")
    assert sorted(rank for rank, _ in starts) == [0, 0, 1, 1]
    ((_, ended_s),) = started.notes("ends")
    assert min(at_s for _, at_s in starts[2:]) > ended_s


# What ranks do, whether an attempt leaves something, how both launchers end, and how many ranks were started.
ENDS = {
    "lost after the other node's ranks ended well": (
        "time.sleep(rank / 2); sys.exit(75 if attempt == 1 and rank == 1 else 0)", True, OK, 4,
    ),
    "lost, and nothing left to go on from": ("sys.exit(75)", False, LOST, 2),
    "a status on which ranks agreed": ("sys.exit(1) if rank == 1 else time.sleep(1000)", True, CASES_FAILED, 2),
}  # fmt: skip


@pytest.mark.parametrize("name", ENDS)
def test_nodes_begin_again_or_end_together(name: str, job) -> None:
    code, moves, status, num_started = ENDS[name]
    started = job(code, moves=moves)
    assert started.statuses() == [status, status]
    assert len(started.notes("starts")) == num_started


@pytest.mark.parametrize("node", [0, 1])
def test_a_node_that_is_asked_to_end_ends_the_job_however_often_it_is_asked(node: int, job) -> None:
    # The second signal comes while the ranks are ending.
    started = job("""
        def slow(number, frame):
            note("asked")
            time.sleep(1)
            note("ends")
            os._exit(143)
        signal.signal(signal.SIGTERM, slow)
        note("ready")
        time.sleep(1000)
    """)
    started.wait_for(lambda: len(started.notes("ready")) == 2)
    started.nodes[node].terminate()
    started.wait_for(lambda: started.notes("asked") != [])
    started.nodes[node].terminate()
    assert started.statuses() == [STOPPED, STOPPED]
    assert len(started.notes("ends")) == 2
    assert len(started.notes("starts")) == 2


def test_a_signal_while_ranks_are_started_comes_after_and_once() -> None:
    started = []

    def start() -> None:
        with launcher._stoppable(), signals_wait(launcher._STOPPING):
            for _ in range(2):
                signal.raise_signal(signal.SIGTERM)
                started.append("a rank")

    with pytest.raises(SignalException, match="asked to end"):
        start()
    assert len(started) == 2
    with signals_wait(launcher._STOPPING):  # And leaves handlers as they were.
        pass
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_a_rank_whose_launcher_was_gone_before_it_began_ends_at_once() -> None:
    code = "from moe_ep_bench.runtime.signals import end_with_parent; end_with_parent(); print('goes on')"
    for launcher_id, status, said in (os.getpid(), 0, "goes on\n"), (1, STOPPED, ""):
        env = {**environment(), "TORCHELASTIC_RUN_ID": "x", LAUNCHER: str(launcher_id)}
        done = subprocess.run([sys.executable, "-c", code], env=env, stdout=subprocess.PIPE, text=True, check=False)
        assert (done.returncode, done.stdout) == (status, said)


@pytest.mark.parametrize("node", [0, 1])
def test_a_launcher_that_is_killed_loses_the_job_and_no_other_waits_for_ever(node: int, job) -> None:
    started = job(
        f"""
        note("ready")
        time.sleep(1.5 if rank == {1 - node} else 1000)
        sys.exit(75)
        """,
        limit_s=3,
    )
    started.wait_for(lambda: len(started.notes("ready")) == 2)
    started.nodes[node].kill()
    assert started.statuses()[1 - node] == LOST
    assert len(started.notes("starts")) == 2


@pytest.mark.parametrize("asked", [True, False])
def test_a_node_0_that_stands_still_holds_no_other_up(asked: bool, job) -> None:
    started = job("note('ready'); time.sleep(1000)", limit_s=40 if asked else 3)
    started.wait_for(lambda: len(started.notes("ready")) == 2)
    node_0, node_1 = started.nodes
    os.kill(node_0.pid, signal.SIGSTOP)
    time.sleep(1)  # The other has asked it something.
    if asked:
        node_1.terminate()
    node_1.join(LIMIT_S)
    assert node_1.exitcode == (STOPPED if asked else LOST)


def test_nodes_that_were_not_started_alike_refuse_together(job, tmp_path: Path) -> None:
    started = job("pass", nproc=(1, 2))
    assert started.statuses() == [USER_ERROR, USER_ERROR]
    refusals = {(tmp_path / f"refused-{node}").read_text() for node in range(2)}
    assert refusals == {
        "node 1 was started with --nnodes 2 --nproc 2, node 0 with --nnodes 2 --nproc 1; start all alike"
    }
    assert started.notes("starts") == []


def test_another_jobs_node_is_sent_away_and_disturbs_nobody(job, tmp_path: Path) -> None:
    started = job("note('ready'); time.sleep(1000 if not os.path.exists(f'{folder}/refused-1') else 0)")
    started.wait_for(lambda: len(started.notes("ready")) == 2)
    stranger = started.start(Nodes(1, 2, 1, started.master, job="another"))
    stranger.join(LIMIT_S)
    assert stranger.exitcode == USER_ERROR
    assert "another job's nodes meet there" in (tmp_path / "refused-1").read_text()
    time.sleep(1.5)  # Whoever had been told of a loss would have ended its rank.
    assert all(node.is_alive() for node in started.nodes)
    assert len(started.notes("starts")) == 2


@pytest.fixture
def met() -> tuple[rendezvous.Rendezvous, rendezvous.Rendezvous]:
    """Two nodes of which both are this process, after an attempt that both have lost; node 1 is still to read so."""
    master = f"127.0.0.1:{free_port()}"
    nodes = [Nodes(1, 2, node, master) for node in range(2)]
    node_0, node_1 = (rendezvous.Rendezvous(each, rendezvous._find_store(each)) for each in nodes)
    node_0.admit()
    node_1.admit()
    node_1._set("status/1", LOST)
    assert node_0.agree(LOST, lambda statuses: AGAIN) == AGAIN
    return node_0, node_1


def decide(statuses: Sequence[int]) -> int:
    left = Left(moves=True)
    return launcher._decide(left, left.progress(), statuses)


def test_a_node_that_is_stopped_between_two_attempts_stops_the_job(met: tuple[rendezvous.Rendezvous, ...]) -> None:
    node_0, node_1 = met
    assert node_1.agree(-signal.SIGTERM, decide) == STOPPED
    with pytest.raises(rendezvous.OthersLostError):
        node_0.next_rendezvous()
    assert node_0.agree(launcher._ENDED, decide) == STOPPED


def test_a_node_that_fails_between_two_attempts_is_named_and_waited_for_by_nobody(
    met: tuple[rendezvous.Rendezvous, ...],
) -> None:
    node_0, node_1 = met
    node_1.give_up(LOST)
    with pytest.raises(rendezvous.OthersLostError):
        node_0.next_rendezvous()
    with pytest.raises(rendezvous.ApartError, match="the launcher of node 1 has ended"):
        node_0.agree(launcher._ENDED, decide)


@pytest.mark.parametrize(
    ("raises", "words", "status"),
    [(lambda: np.zeros(2) + np.zeros(3), "broadcast", LOST), (lambda: Nodes(0), "--nproc", USER_ERROR)],
)
def test_other_nodes_are_told_whether_a_defect_or_a_mistake_ended_this_one(
    raises: Callable[[], object], words: str, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = []
    monkeypatch.setattr(
        launcher, "meet", lambda nodes: contextlib.nullcontext(types.SimpleNamespace(give_up=told.append))
    )
    with pytest.raises(ValueError, match=words):
        launcher._together(Nodes(1), lambda rendezvous: raises())
    assert told == [status]


@pytest.mark.parametrize(("status", "verdict"), [(-signal.SIGTERM, STOPPED), (USER_ERROR, USER_ERROR)])
def test_a_node_0_that_ends_between_two_attempts_leaves_a_verdict(
    status: int, verdict: int, met: tuple[rendezvous.Rendezvous, ...]
) -> None:
    node_0, node_1 = met
    node_1._attempt += 1  # It has read that there is another attempt.
    node_0._attempt += 1  # And node 0 is elsewhere already.
    node_0.give_up(status)
    with pytest.raises(rendezvous.OthersLostError):
        node_1.next_rendezvous()
    assert node_1.agree(launcher._ENDED, decide) == verdict


@pytest.mark.parametrize(("node", "missing"), [(0, "within 1 s: no node 1"), (1, "within 1 s: no node 0 there")])
def test_nodes_that_never_meet_end_with_a_status_of_their_own(
    node: int, missing: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(rendezvous, "_MEET_S", 1.0)
    nodes = Nodes(1, 2, node, f"127.0.0.1:{free_port()}")
    assert launcher._together(nodes, lambda met: met.next_rendezvous() and OK) == LOST
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"moe-ep-bench: the nodes did not meet at {nodes.master} ")
    assert missing in line


@pytest.mark.parametrize(("master", "host"), [("[::1]:29400", "::1"), ("node-0:29400", "node-0")])
def test_an_address_with_colons_stands_in_brackets(master: str, host: str) -> None:
    assert Nodes(1, 2, 0, master).host == host


@pytest.mark.parametrize(
    ("statuses", "marks_say", "moved", "verdict"),
    [
        ([OK, OK], None, True, OK),
        ([OK, CASES_FAILED], None, True, CASES_FAILED),
        ([LOST, CASES_FAILED], None, True, CASES_FAILED),
        ([CLOSED, LOST], None, True, CLOSED),
        ([LOST, USER_ERROR], None, False, USER_ERROR),
        ([OK, LOST], None, True, AGAIN),
        ([LOST, LOST], None, False, LOST),
        ([LOST, launcher._ENDED], None, True, AGAIN),
        # Whom a launcher ended says that it was asked to, and that stops no job; who was asked by others does.
        ([LOST, launcher._ENDED], 15, True, AGAIN),
        ([LOST, LOST], 15, True, STOPPED),
        ([LOST, -15], None, True, STOPPED),
    ],
)
def test_node_0_decides_by_how_all_nodes_ended(
    statuses: list[int], marks_say: int | None, moved: bool, verdict: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = Left(moves=moved)
    monkeypatch.setattr(left, "stopped_by", lambda: marks_say)
    assert launcher._decide(left, left.progress(), statuses) == verdict
