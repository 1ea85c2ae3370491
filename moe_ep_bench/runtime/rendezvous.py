"""All nodes start, lose and end every attempt together, and none waits for ever for one that is gone.

A launcher sees the ranks of its own node only; deciding alone it would begin again beside what is left of the attempt
before. So node 0's launcher keeps a store (torch's TCPStore, at ``--master``) for as long as it lives, and every
*attempt*, one job of ranks, goes through these keys. torch's agent starts and ends the ranks.

    /job       node 0's job: a node of another one is sent away, and leaves /stranger
    here/N     node N has come, and how it was started
    port       when all have: node 0's store for the ranks of this attempt alone; or why they are refused
    lost       a node's ranks ended otherwise than with status 0. The others look every second, leave their ranks a
               moment to notice it themselves, which makes the better record, and then end them
    status/N   how node N's ranks ended, however long that took
    verdict    node 0 knows all of it and decides once; it keeps its store until the others have counted up ``read``
    /gone/N    node N was stopped or has failed, also between two attempts (/gone: some node)

A node may come ``_MEET_S`` after another and end ``_END_S`` after another; then it is taken for gone, and so is the
job. On one node there is nothing to agree on, and only the store of the ranks is opened.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import datetime
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from torch.distributed import DistError, PrefixStore, TCPStore
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo

from moe_ep_bench.errors import UserError
from moe_ep_bench.runtime.errors import in_short
from moe_ep_bench.runtime.exit_codes import LOST, OK

# Nodes of one job come up apart: modules, containers, packages from a cold file system.
_MEET_S = 600.0
# Ranks that were told to end have 30 s until SIGKILL; then a GPU's memory is freed, and the launcher has its say.
_END_S = 180.0
# Ranks that wait for others say so at once, or 3 s after the one that kept them waiting (the watchdog).
_GRACE_S = 6.0
# How long those who are asked to end wait for each other, twice: clusters kill 30 s after SIGTERM.
_STOP_S = 10.0
_LOOK_S, _POLL_S = 1.0, 0.1
# For node 0 to find itself under the name it was given, and for any answer later.
_OWN_TIMEOUT, _STORE_TIMEOUT = datetime.timedelta(seconds=20), datetime.timedelta(seconds=60)

AGAIN = -1
"""A verdict: all nodes start another attempt. All others are exit statuses."""

_T = TypeVar("_T")


class ApartError(Exception):
    """The launchers of the nodes are not together, or not any more; one line."""


class OthersLostError(Exception):
    """Another node has lost its ranks, and this node's are still there."""


@dataclass(frozen=True)
class Nodes:
    """Where ranks are started: ``nproc`` on each of ``count`` nodes, of which this is number ``rank``."""

    nproc: int
    count: int = 1
    rank: int = 0
    master: str = "127.0.0.1:0"
    job: str = ""
    """What is measured, as a hash: launchers of another job are refused."""

    def __post_init__(self) -> None:
        if self.nproc < 1 or self.count < 1 or not 0 <= self.rank < self.count:
            raise UserError(
                f"--nproc, --nnodes, --node-rank: expected at least 1, at least 1 and below --nnodes; "
                f"got {self.nproc}, {self.count}, {self.rank}"
            )
        host, _, port = self.master.rpartition(":")
        least = 1 if self.count > 1 else 0
        if not host or not port.isdecimal() or not least <= int(port) < 1 << 16:
            raise UserError(
                f"--master: expected host:port of node 0, with a port of {least} to 65535; got {self.master!r}"
            )

    @property
    def host(self) -> str:
        """Where node 0 can be reached."""
        return self.master.rpartition(":")[0].strip("[]") if self.count > 1 else "127.0.0.1"


class _AgentsHandler(RendezvousHandler):
    """What torch's interface asks beyond an attempt: nodes neither join late nor shut others out."""

    use_agent_store = True  # type: ignore[assignment]

    def get_backend(self) -> str:
        return "moe-ep-bench"

    get_run_id = get_backend

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        pass

    def shutdown(self) -> bool:
        return True


class Rendezvous(_AgentsHandler):
    """This node's launcher among those of all nodes; as torchrun's agent knows it, the rendezvous of its ranks.

    Args:
        store: node 0's, kept for the life of its launcher; None for one node.
    """

    def __init__(self, nodes: Nodes, store: TCPStore | None) -> None:
        self._nodes = nodes
        self._store = store
        self._ranks_store: TCPStore | None = None
        self._attempt = 0
        self._told_at: float | None = None
        self._looked_at = 0.0
        self._linger_s, self._answer_s = _END_S, _STORE_TIMEOUT.total_seconds()
        self._gone = ""
        self._warned = False

    # ---- how an attempt ended

    def agree(self, status: int, decide: Callable[[Sequence[int]], int]) -> int:
        """Say how this node's ranks ended, and learn the verdict, the same on all nodes.

        Args:
            status: an exit status, or minus the signal by which this node was asked to end: it then waits for nobody.
            decide: the verdict on the statuses of all nodes; called on node 0 only.

        Raises:
            ApartError: a node has not answered for ``_END_S``; the job is lost.
        """
        if self._store is None:
            return decide([status])
        if status < 0:
            self._answer_s = self._linger_s = _STOP_S
        try:
            if status != OK:
                self._set("lost", self._nodes.rank)
            if status < 0:
                self._go(status)
            self._set(f"status/{self._nodes.rank}", status)
            verdict = self._conclude(status, decide) if self._nodes.rank == 0 else self._learn(status)
            self._attempt += 1
            return verdict
        except ApartError:
            if status >= 0:
                raise
            return 128 - status  # Whoever is asked to end ends, with or without the others.

    def _learn(self, status: int) -> int:
        """Node 0's verdict; it first waits for the last of the others."""
        if status < 0:
            verdict = 128 - status
        elif not self._until(lambda: self._has("verdict") or self._has("/gone/0"), 2 * _END_S):
            raise ApartError(f"waited for node 0's verdict at {self._nodes.master} for {2 * _END_S:g} s in vain")
        elif self._has("verdict"):
            verdict = int(self._get("verdict"))
        else:
            its = int(self._get("/gone/0"))
            verdict = 128 - its if its < 0 else its
        self._add("read")
        return verdict

    def _conclude(self, status: int, decide: Callable[[Sequence[int]], int]) -> int:
        """On node 0: the verdict, for all to read."""
        nodes = range(self._nodes.count)
        statuses = [f"status/{node}" for node in nodes]
        if status < 0:
            self._set("verdict", 128 - status)
            self._until(lambda: self._has(*statuses), _STOP_S)
            return 128 - status

        def silent() -> list[int]:
            return [node for node in nodes if not self._has(f"status/{node}") and not self._has(f"/gone/{node}")]

        if not self._until(lambda: not silent(), _END_S):
            self._set("verdict", LOST)
            missing = ", ".join(map(str, silent()))
            raise ApartError(f"node {missing} did not say within {_END_S:g} s how its ranks ended")
        gone = [node for node in nodes if self._has(f"/gone/{node}")]
        # The last word of a node counts: it may have ended an attempt well and have been stopped after it.
        keys = [f"/gone/{node}" if node in gone else key for node, key in enumerate(statuses)]
        verdict = decide([int(self._get(key)) for key in keys])
        if gone:
            self._linger_s = _STOP_S  # Who is gone reads nothing.
        if gone and verdict in (AGAIN, LOST):
            self._set("verdict", LOST)
            self._attempt += 1
            raise ApartError(f"the launcher of node {', '.join(map(str, gone))} has ended; nothing can begin again")
        self._set("verdict", verdict)
        return verdict

    def give_up(self, status: int) -> None:
        """Tell the others that this node ends with ``status`` and takes part in nothing any more."""
        if self._store is not None:
            with contextlib.suppress(ApartError):
                self._set("lost", self._nodes.rank)
                self._go(status)

    def _go(self, status: int) -> None:
        # Of the whole job: a node may end between a verdict and the next attempt, which the others have begun.
        self._set(f"/gone/{self._nodes.rank}", status)
        self._set("/gone", self._nodes.rank)

    def leave(self) -> None:
        """Let the others read what was said last, and close."""
        if self._store is not None and self._nodes.rank == 0 and self._attempt > 0:
            self._attempt -= 1
            with contextlib.suppress(ApartError):
                self._until(lambda: self._add("read", 0) >= self._nodes.count - 1, self._linger_s)
        self._store = self._ranks_store = None

    # ---- how an attempt begins

    def admit(self) -> None:
        """Before anything else, be sure that this node belongs here: node 0 says whose the store is.

        Raises:
            UserError: it is another job's, which does not notice.
            ApartError: node 0 does not say it.
        """
        if self._store is None:
            return
        if self._nodes.rank == 0:
            self._set("/job", self._nodes.job)
            return
        if not self._until(lambda: self._has("/job"), self._answer_s):
            raise ApartError(f"the nodes did not meet at {self._nodes.master}: no launcher of node 0 answers there")
        if self._get("/job") != self._nodes.job:
            self._set("/stranger", self._nodes.rank)
            self._store = None
            raise UserError(
                f"--master {self._nodes.master}: another job's nodes meet there; expected the same config, --out, "
                "--set, --point and Slurm job on all nodes, and a --master of its own for every job"
            )

    def next_rendezvous(self) -> RendezvousInfo:
        """Begin an attempt when all nodes are here; the agent calls this.

        Raises:
            ApartError: not all came.
            UserError: they were not started alike.
            OthersLostError: another was asked to end meanwhile.
        """
        self._told_at = self._ranks_store = None
        started = f"--nnodes {self._nodes.count} --nproc {self._nodes.nproc}"
        if self._nodes.rank == 0:
            if self._store is not None:
                self._await_all(started)
            self._ranks_store = _open_store(self._nodes.host, 0, serves=True)
            port = self._ranks_store.port
            if self._store is not None:
                self._set("port", port)
        else:
            self._set(f"here/{self._nodes.rank}", started)
            limit_s = 2 * _END_S if self._attempt else _MEET_S
            if not self._until(lambda: self._has("port") or self._is_lost(), limit_s):
                raise ApartError(f"waited for the others at {self._nodes.master} for {limit_s:g} s in vain")
            if not self._has("port"):
                raise OthersLostError
            answer = self._get("port")
            if not answer.isdigit():
                self._add("read")
                raise UserError(answer)
            port = int(answer)
            self._ranks_store = _open_store(self._nodes.host, port, serves=False)
        return RendezvousInfo(
            PrefixStore("agent", self._ranks_store),
            self._nodes.rank,
            self._nodes.count,
            RendezvousStoreInfo(self._nodes.host, port),
        )

    def _await_all(self, started: str) -> None:
        others = {node: f"here/{node}" for node in range(1, self._nodes.count)}
        limit_s = _END_S if self._attempt else _MEET_S
        if not self._until(lambda: self._has(*others.values()) or self._is_lost() or self._warns(), limit_s):
            missing = ", ".join(str(node) for node, key in others.items() if not self._has(key))
            raise ApartError(f"the nodes did not meet at {self._nodes.master} within {limit_s:g} s: no node {missing}")
        if self._is_lost():
            raise OthersLostError
        for node, key in others.items():
            if (its := self._get(key)) != started:
                refusal = f"node {node} was started with {its}, node 0 with {started}; start all alike"
                self._set("port", refusal)
                self._attempt += 1
                raise UserError(refusal)

    def _warns(self) -> bool:
        """Say once that a stranger came: it may be this job's own node, with a mistake; never true."""
        if not self._warned and self._has("/stranger"):
            self._warned = True
            print(
                f"moe-ep-bench: a node {self._get('/stranger')} with another config, --out, --set, --point or Slurm "
                "job was sent away; waiting for one with the same",
                file=sys.stderr,
            )
        return False

    def _is_lost(self) -> bool:
        """Whether a node has lost its ranks in this attempt, or has ended since the job began."""
        return self._has("lost") or self._has("/gone")

    def num_nodes_waiting(self) -> int:
        """None ever. The agent asks all the time while its ranks run: the place to look what others say.

        Raises:
            OthersLostError: another node has lost its ranks some seconds ago; the agent then ends its own.
            ApartError: node 0's launcher is gone; likewise.
        """
        now = time.monotonic()
        if self._store is not None and now >= self._looked_at + _LOOK_S:
            self._looked_at = now
            if self._told_at is None and self._is_lost():
                self._told_at = now
            if self._told_at is not None and now > self._told_at + _GRACE_S:
                raise OthersLostError
        return 0

    # ---- the store, by attempt. Waiting is done here and not in the store, so that signals end it.

    def _set(self, key: str, value: object) -> None:
        self._ask(lambda store: store.set(self._named(key), str(value)))

    def _get(self, key: str) -> str:
        return self._ask(lambda store: store.get(self._named(key))).decode()

    def _has(self, *keys: str) -> bool:
        return self._ask(lambda store: store.check([self._named(key) for key in keys]))

    def _add(self, key: str, number: int = 1) -> int:
        return self._ask(lambda store: store.add(self._named(key), number))

    def _named(self, key: str) -> str:
        return key if key.startswith("/") else f"{self._attempt}/{key}"  # Of the whole job, or of this attempt.

    def _ask(self, question: Callable[[TCPStore], _T]) -> _T:
        store = self._store
        assert store is not None
        try:
            if self._gone:  # Another question would wait behind the one that was not answered.
                raise TimeoutError(self._gone)
            return _in_time(lambda: question(store), self._answer_s)
        except (DistError, RuntimeError, TimeoutError) as error:
            self._gone = in_short(error)
            raise ApartError(f"node 0's launcher at {self._nodes.master} is gone: {self._gone}") from None

    @staticmethod
    def _until(true: Callable[[], bool], limit_s: float) -> bool:
        deadline = time.monotonic() + limit_s
        while not true():
            if time.monotonic() > deadline:
                return False
            time.sleep(_POLL_S)
        return True


@contextlib.contextmanager
def meet(nodes: Nodes) -> Iterator[Rendezvous]:
    """A launcher's place among those of all nodes, until it ends.

    Raises:
        ApartError: node 0 cannot be reached.
        UserError: it is there for another job.
    """
    rendezvous = Rendezvous(nodes, _find_store(nodes) if nodes.count > 1 else None)
    rendezvous.admit()
    try:
        yield rendezvous
    finally:
        rendezvous.leave()


def _find_store(nodes: Nodes) -> TCPStore:
    """Node 0 opens the store of the launchers, the others wait until it has."""
    port = int(nodes.master.rpartition(":")[2])
    if nodes.rank == 0:
        return _open_store(nodes.host, port, serves=True)
    deadline = time.monotonic() + _MEET_S
    while True:
        try:
            # The store itself would write lines of errors while it waits, and be deaf to signals.
            socket.create_connection((nodes.host, port), timeout=5).close()
            return _open_store(nodes.host, port, serves=False)
        except (OSError, ApartError) as error:
            if time.monotonic() > deadline:
                raise ApartError(
                    f"the nodes did not meet at {nodes.master} within {_MEET_S:g} s: no node 0 there: {error}"
                ) from None
            time.sleep(0.5)


def _open_store(host: str, port: int, *, serves: bool) -> TCPStore:
    """Serve a store (at any free port for port 0), or connect to one."""
    timeout = _OWN_TIMEOUT if serves else _STORE_TIMEOUT

    def open_store() -> TCPStore:
        store = TCPStore(host, port, is_master=serves, timeout=timeout, wait_for_workers=False)
        store.set_timeout(_STORE_TIMEOUT)
        return store

    try:
        return _in_time(open_store, 2 * timeout.total_seconds())
    except (DistError, RuntimeError, TimeoutError) as error:
        whose = "node 0 did not meet itself" if serves else "the nodes did not meet"
        hint = "; expected --master to name node 0 and a port that is free there" if serves else ""
        raise ApartError(f"{whose} at {host}:{port}{hint}: {in_short(error)}") from None


def _in_time(ask: Callable[[], _T], limit_s: float) -> _T:
    """What ``ask`` returns or raises, in a thread of its own, which is left behind after ``limit_s`` (TimeoutError).

    A store whose server stands still never answers and heeds no timeout, and signals would have to wait for it.
    """
    answer: concurrent.futures.Future[_T] = concurrent.futures.Future()

    def thread() -> None:
        try:
            answer.set_result(ask())
        except BaseException as error:
            answer.set_exception(error)

    threading.Thread(target=thread, name="asking", daemon=True).start()
    try:
        return answer.result(limit_s)
    except TimeoutError:
        raise TimeoutError(f"no answer for {limit_s:g} s") from None
