"""Set servers against each other: without the plugin, without it once more, and under each policy.

All are asked the same. A *round* is a number of requests that one server gets at the load of the config; then the next
server gets the same round, in an order that is drawn anew each time. So the two answers of a pair stand moments apart,
rounds repeat, and the second server without the plugin says what differs by itself: the noise floor. ``together`` keeps
all servers alive and interleaves rounds. ``in_turn``, for what fits the memory only once, gives each server all rounds
before the next one starts: pairs then stand minutes apart, and several ``starts`` show what that changes.

After the rounds, each server gets a few prompts one at a time. Answers that were computed alone can be equal to the
bit; those of a busy server are rounded by what shared their steps. Then the lm-evaluation-harness asks its tasks, where
the config has some, in the first start alone.

A server that does not start, dies or fails a request has a row with its reason in place of its answers.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from tqdm import tqdm

from moe_ep_bench.bench.commands import fill
from moe_ep_bench.bench.description import run_json
from moe_ep_bench.bench.point import BASELINE, NOISE, POLICY, CaseSpec
from moe_ep_bench.bench.result import Row, as_columns, identity
from moe_ep_bench.config.files import load_points
from moe_ep_bench.errors import CASES_FAILED, OK, UserError, brief, naming, printable, progress_bar
from moe_ep_bench.facts import CaseFacts, ServedFacts
from moe_ep_bench.facts.words import title_words
from moe_ep_bench.files import stable_hash
from moe_ep_bench.machine import provenance
from moe_ep_bench.policies import Policy, make_policy
from moe_ep_bench.quality.tasks import check_task, run_task, served_lm, task_manager
from moe_ep_bench.results import RunDirectory
from moe_ep_bench.schema import ALONE, LOAD
from moe_ep_bench.serving import LIMIT, RECORD
from moe_ep_bench.serving import POLICY as POLICY_VARIABLE
from moe_ep_bench.serving.client import Answer, Client
from moe_ep_bench.serving.config import ServeExperiment
from moe_ep_bench.serving.prompts import Prompt, random_prompts, read_prompts
from moe_ep_bench.serving.server import Running, Server, ServerError, ended_by_signals

# What the plugin needs is so in every server: none is faster for that.
_VARIABLES = {"VLLM_USE_V2_MODEL_RUNNER": "0"}


class _Named(NamedTuple):
    name: str


@dataclass(frozen=True, eq=False)
class ServedComparison:
    """Servers that are asked the same, at one point of a sweep.

    Attributes:
        prompts: those of all rounds, then those that are sent alone.
    """

    experiment: ServeExperiment
    prompts: Sequence[Prompt]

    mode: ClassVar = "serve"
    scope: ClassVar = "model"
    backend: ClassVar = None
    ep_size: ClassVar = 1

    @property
    def model(self) -> _Named:
        return _Named(Path(self.experiment.serve.model).name)

    @cached_property
    def definition(self) -> dict[str, Any]:
        """All that decides what is asked, and nothing of who answers."""
        serve, prompts = self.experiment.serve, self.experiment.prompts
        of_load = serve.model_dump(include={"rounds", "requests", "alone", "concurrency", "rate", "servers"})
        text = json.dumps(list(self.prompts))
        return {
            "mode": self.mode,
            "model": serve.model,
            "prompts": hashlib.sha256(text.encode()).hexdigest()[:16],
            "seed": prompts.seed,
            **prompts.model_dump(include={"max_tokens", "ignore_eos", "logprobs", "cache_salt"}),
            **of_load,
            "acts_in": serve.acts_in,
            **self.of_tasks,
        }

    @property
    def of_tasks(self) -> dict[str, Any]:
        """What the harness asks; empty where there are no tasks."""
        experiment = self.experiment
        if not experiment.tasks:
            return {}
        own = experiment.include and experiment.include.name
        return {"tasks": [one.model_dump() for one in experiment.tasks], "limit": experiment.limit, "own": own}

    @cached_property
    def comparison_id(self) -> str:
        return stable_hash(self.definition)

    @cached_property
    def entries(self) -> dict[Policy, dict[str, Any]]:
        """Each policy as the plugin is told it."""
        acts_in = {} if self.experiment.serve.acts_in is None else {"acts_in": list(self.experiment.serve.acts_in)}
        return {make_policy(entry): {**entry, **acts_in} for entry in self.experiment.entries()}

    @cached_property
    def cases(self) -> list[CaseSpec]:
        """The server as it is, the same again, and each policy."""
        own = [CaseSpec(self.comparison_id, role, "native") for role in (BASELINE, NOISE)]
        return [*own, *(CaseSpec(self.comparison_id, POLICY, policy.name, policy) for policy in self.entries)]

    @property
    def title(self) -> str:
        return title_words(self.facts())

    def facts(self) -> ServedFacts:
        """The comparison's entry in ``run.json``."""
        serve, prompts = self.experiment.serve, self.experiment.prompts
        of_file = None if prompts.file is None else prompts.file.name
        return ServedFacts(
            model=self.model.name,
            served=serve.model,
            num_batches=serve.rounds,
            num_starts=serve.starts,
            prompts=of_file,
            task=", ".join(task.name for task in self.experiment.tasks) or None,
            limit=self.experiment.limit,
            **serve.model_dump(include={"servers", "requests", "alone", "concurrency", "rate", "url"}),
            **prompts.model_dump(include={"max_tokens", "num_words", "ignore_eos", "cache_salt"}),
        )

    def case_facts(self, case: CaseSpec) -> CaseFacts:
        """A case's entry in ``run.json``."""
        return case.facts()


def plan_serve(config: Path, overrides: Iterable[str]) -> list[ServedComparison]:
    """All comparisons of a config file; nothing is started.

    Raises:
        ValueError: one line naming the file, the key and what is allowed.
    """
    planned: dict[str, ServedComparison] = {}
    for experiment in load_points(config, ServeExperiment, overrides):
        serve = experiment.serve
        with naming(f"{config}: prompts.file" if experiment.prompts.file else str(config)):
            prompts = read_prompts(experiment.prompts, serve.rounds * serve.requests + serve.alone)
        comparison = ServedComparison(experiment, prompts)
        if (same := planned.setdefault(comparison.comparison_id, comparison)) is not comparison:
            points = " and ".join(str(dict(one.point)) for one in (same.experiment, experiment))
            raise UserError(
                f"{config}: sweep: expected points that ask servers something else each, got {points}; "
                "policies make one list, and a list in a policy's field a policy each"
            )
    commands = {(one.experiment.serve.command, one.experiment.serve.url) for one in planned.values()}
    if len(commands) > 1:
        raise UserError(f"{config}: sweep: expected one serve.command and serve.url, got {len(commands)}")
    return list(planned.values())


def run_serve(
    config: Path, out: Path, overrides: Sequence[str] = (), *, force: bool = False, dry_run: bool = False
) -> int:
    """Ask all servers of every comparison, start by start, and write what they answered; the exit status.

    Args:
        out: results directory; a start that has all cases is not repeated unless ``force``.
        dry_run: print the cases instead; nothing is started.

    Raises:
        ValueError: one line naming the file, the key and what is allowed; or why ``out`` cannot be used.
    """
    comparisons = plan_serve(config, overrides)
    if dry_run:
        for comparison in comparisons:
            print(f"{comparison.title}; servers {comparison.experiment.serve.servers}")
            for case in comparison.cases:
                print(f"  {case.case_id}  {case.role:8}  {case.label}")
        return OK
    with naming(str(config)):
        for experiment in (comparison.experiment for comparison in comparisons):
            for task in experiment.tasks:
                check_task(task.name, experiment.include)
    directory, serve = RunDirectory(out), comparisons[0].experiment.serve
    if not force:
        _check_kept(directory, comparisons)
    environment = provenance.describe(torch.device("cpu")) | {
        **provenance.describe_gpus(),
        "command": serve.command if serve.url is None else None,
        "url": serve.url,
        **({"lm_eval": provenance.version_of("lm_eval")} if any(one.experiment.tasks for one in comparisons) else {}),
    }
    if gpus := environment.get("gpus"):
        environment["device_name"] = gpus[0]["name"]

    def described(run_id: str) -> dict[str, Any]:
        return run_json(run_id, comparisons, environment, ServedComparison.facts)

    def ask(run_id: str, comparison: ServedComparison, cases: Sequence[CaseSpec], start: int) -> None:
        found = _asked(comparison, cases, start, out / "servers", run_id)
        rows = [identity(run_id, comparison, one.case) | one.columns for one in found]
        for one in found:  # before its requests, which make a case done
            if one.scores and one.lost is None:
                scores = identity(run_id, comparison, one.case) | as_columns(one.scores)
                directory.write("quality", comparison.comparison_id, [scores], replaces=[one.case.case_id])
        directory.write("requests", comparison.comparison_id, rows, start)

    conditions = {key: environment[key] for key in ("device_name", "command", "url")}
    with ended_by_signals():
        launches = range(max(one.experiment.serve.starts for one in comparisons))
        fill(directory, comparisons, "requests", conditions, described, ask, force=force, launches=launches)
    statuses = [
        directory.statuses(one.comparison_id, start, "requests").get(case.case_id)
        for one in comparisons
        for start in range(one.experiment.serve.starts)
        for case in one.cases
    ]
    return OK if set(statuses) == {"ok"} else CASES_FAILED


def _check_kept(directory: RunDirectory, comparisons: Sequence[ServedComparison]) -> None:
    """Refuse to write starts anew without policies whose answers are in them, and which the config lacks."""
    named = (directory.earlier() or {}).get("cases", {})
    for one in comparisons:
        answered = {
            case_id
            for start, _ in enumerate(directory.parts("requests").get(one.comparison_id, ()))
            for case_id, status in directory.statuses(one.comparison_id, start, "requests").items()
            if status == "ok"
        }
        gone = answered & set(named) - {case.case_id for case in one.cases}
        if gone:
            policies = ", ".join(sorted(named[case_id]["policy"] for case_id in gone))
            raise UserError(
                f"--out {directory.root}: {one.title}: holds {policies}, which this config has not; "
                "keep those policies in it, choose another directory, or --force to begin anew without them"
            )


# ---- rounds ----------------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class _Contestant:
    """A case, its server, and what it has answered in one start."""

    comparison: ServedComparison
    case: CaseSpec
    server: Server | Running
    salt: str
    client: Client | None = None
    rows: list[Row] = field(default_factory=list)
    scores: list[Row] = field(default_factory=list)
    name: str = ""
    lost: tuple[str, str] | None = None

    @property
    def columns(self) -> dict[str, Any]:
        """Its answers by column, or why there are none."""
        if self.lost is not None:
            return {"status": self.lost[0], "reason": self.lost[1]}
        return as_columns(self.rows)

    def start(self) -> None:
        """Start the server, and warm it up by a round that nobody counts."""
        serve, prompts = self.comparison.experiment.serve, self.comparison.experiment.prompts
        try:
            self.name = self.server.start()
        except ServerError as lost:
            self._lose(lost.status, lost.reason)
            return
        more = {"ignore_eos": True} if prompts.ignore_eos else {}
        more |= {"logprobs": 1} if prompts.logprobs else {}
        # A server of our own has seen none of these prompts.
        more |= {"cache_salt": self.salt} if prompts.cache_salt and serve.url is not None else {}
        self.client = Client(self.server.url, self.name, serve.request_s, max_tokens=prompts.max_tokens, **more)
        self._send("the warm-up", random_prompts(prompts, serve.requests, warm_up=True), self._load(0))

    def _load(self, number: int) -> dict[str, Any]:
        serve = self.comparison.experiment.serve
        seed = int(stable_hash([self.comparison.experiment.prompts.seed, number])[:8], 16)
        return {"concurrency": serve.concurrency, "rate": serve.rate, "seed": seed}

    def ask_round(self, number: int) -> None:
        serve = self.comparison.experiment.serve
        first = number * serve.requests
        prompts = self.comparison.prompts[first : first + serve.requests]
        answers = self._send(f"round {number}", prompts, self._load(number))
        self._keep(answers, first, kind=LOAD, batch=number)

    def ask_alone(self) -> None:
        serve = self.comparison.experiment.serve
        first = serve.rounds * serve.requests
        for place, prompt in enumerate(self.comparison.prompts[first:]):
            self._keep(self._send("a request alone", [prompt], {"concurrency": 1}), first + place, kind=ALONE)

    def ask_tasks(self) -> None:
        experiment = self.comparison.experiment
        for task in experiment.tasks if self.lost is None else ():
            try:
                in_flight = experiment.serve.concurrency or experiment.serve.requests
                lm = served_lm(self.server.url, self.name, experiment.serve.model, in_flight)
                manager = task_manager(experiment.include)
                self.scores += run_task(lm, task.name, manager, num_fewshot=task.num_fewshot, limit=experiment.limit)
            except Exception as problem:  # the harness' client has its own, of several packages
                said = str(problem) if isinstance(problem, UserError) else f"{type(problem).__name__}: {problem}"
                self._lose("failed", self.server.died() or f"task {task.name}: {brief(said, 200, quoted=False)}")
                return

    def _keep(self, answers: Sequence[Answer], first: int, **about: Any) -> None:
        self.rows += [
            {**about, "iteration": place, "prompt": first + place, **_columns(answer)}
            for place, answer in enumerate(answers)
        ]

    def _send(self, what: str, prompts: Sequence[Prompt], load: dict[str, Any]) -> Sequence[Answer]:
        """Answers; none of a server that is lost, now or before."""
        if self.lost is not None or self.client is None:
            return ()
        answers = self.client.send(prompts, **load)
        failure = next((answer.failure for answer in answers if answer.failure), None)
        if failure is not None:
            self._lose("failed", f"{what}: {self.server.died() or failure}")
            return ()
        return answers

    def _lose(self, status: str, reason: str) -> None:
        """Keep the reason, in which a server may have put what a terminal obeys, and say it."""
        self.lost = status, printable(reason)
        tqdm.write(f"moe-ep-bench: {self.case.label}: {self.lost[0]}: {self.lost[1]}", file=sys.stderr)

    def stop(self) -> None:
        try:
            if self.client is not None:
                self.client.close()
        finally:
            self.server.stop()


def _columns(answer: Answer) -> Row:
    """What the table has of an answer."""
    return {name: value for name, value in vars(answer).items() if name != "failure"}


def _asked(
    comparison: ServedComparison, cases: Sequence[CaseSpec], start: int, logs: Path, run_id: str
) -> list[_Contestant]:
    """All cases of one start, with their answers; no server is left."""
    serve = comparison.experiment.serve
    everyone = [
        _Contestant(comparison, case, _server(comparison, case, start, logs), f"{run_id}-{start}-{case.case_id}")
        for case in cases
    ]
    drawn = np.random.default_rng([comparison.experiment.prompts.seed, start])
    in_order = [everyone[place] for place in drawn.permutation(len(everyone))]
    groups = [in_order] if serve.servers == "together" else [[one] for one in in_order]
    title = f"{comparison.title}, start {start + 1} of {serve.starts}"
    with progress_bar(serve.rounds * len(everyone), "round", title) as progress:
        for group in groups:
            with _serving(group):
                for number in range(serve.rounds):
                    for place in drawn.permutation(len(group)):
                        group[place].ask_round(number)
                        progress.update()
                for one in group:
                    one.ask_alone()
                for one in group if start == 0 else ():
                    one.ask_tasks()
    return everyone


@contextlib.contextmanager
def _serving(group: Sequence[_Contestant]) -> Iterator[None]:
    """Servers that are up while the block lasts; then all are told to end before any is waited for."""
    with contextlib.ExitStack() as up:
        for one in group:
            up.callback(one.stop)
        for one in group:
            up.callback(one.server.terminate)
        for one in group:
            one.start()
        yield


def _server(comparison: ServedComparison, case: CaseSpec, start: int, logs: Path) -> Server | Running:
    serve = comparison.experiment.serve
    if serve.url is not None:
        return Running(serve.url, serve.model, serve.start_s)
    variables = {**_VARIABLES, **os.environ}
    for name in (POLICY_VARIABLE, RECORD, LIMIT):
        variables.pop(name, None)
    if case.policy is not None:
        variables[POLICY_VARIABLE] = json.dumps(comparison.entries[case.policy])
    log = logs / f"{comparison.comparison_id}-{case.case_id}-{start}.log"
    return Server(serve.command, serve.model, variables, log, serve.start_s)
