"""The plugin for vLLM: record the routing of real requests with all scores, and serve under a policy.

vLLM loads what stands under the entry point ``vllm.general_plugins`` in each of its processes. Without the variables
of ``moe_ep_bench.serving`` nothing is touched.

The router that vLLM makes for a layer gets a subclass of its own class, which calls it and then the operation
``moe_ep_bench::route`` with its logits and choice; an operation, so that torch.compile keeps it whole. Its routing
method says ``Custom``, or a fused kernel would choose experts by itself. A step in which a layer's router was passed by
ends the server with a line: no answer comes from a policy that did not decide. Steps of warm-up pass through, for their
scores may be anything.

Under piecewise CUDA graphs a layer's experts are ``moe_ep_bench::moe``, at which vLLM splits the graph as at attention:
it runs between two graphs and writes into a tensor of the one before, for a replayed graph reads where it read when it
was captured.

The hooks are private to vLLM. ``HOOKS`` names them; a release that lacks one is refused, and one in which the plugin
was not run is warned of: 0.32.0 is run (tests/test_vllm.py), 0.33.0 was only read.

Shapes: T = tokens of a step, E = experts, K = top_k.
"""

# vLLM is in an environment of its own, where its tests run.
# pyright: reportMissingImports=false

from __future__ import annotations

import atexit
import contextlib
import functools
import importlib
import inspect
import logging
import operator
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from moe_ep_bench import __version__
from moe_ep_bench.config import label_of
from moe_ep_bench.errors import UserError, naming
from moe_ep_bench.serving import POLICY, REFUSAL, Settings, check_config, check_policy, graphs_of, num_ranks, settings

RUN = "0.32"
# What the plugin wraps or reads, as module and name.
HOOKS = (
    ("vllm.engine.arg_utils", "EngineArgs.create_engine_config"),
    ("vllm.model_executor.layers.fused_moe.layer", "create_fused_moe_router"),
    ("vllm.model_executor.layers.fused_moe.router.base_router", "BaseRouter._compute_routing"),
    ("vllm.model_executor.layers.fused_moe.router.fused_moe_router", "FusedMoERouter.routing_method_type"),
    ("vllm.model_executor.layers.fused_moe.config", "RoutingMethodType.Custom"),
    ("vllm.model_executor.layers.fused_moe.modular_kernel", "FusedMoEKernel.fused_experts"),
    ("vllm.model_executor.layers.fused_moe.modular_kernel", "FusedMoEKernel.prepare_finalize"),
    ("vllm.model_executor.layers.fused_moe.routed_experts", "RoutedExperts.expert_map"),
    ("vllm.model_executor.layers.fused_moe.runner.moe_runner", "MoERunner._forward_impl"),
    ("vllm.model_executor.layers.fused_moe.runner.moe_runner", "MoERunner._select_forward"),
    ("vllm.model_executor.models.utils", "extract_layer_index"),
    ("vllm.v1.core.sched.output", "NewRequestData.from_request"),
    ("vllm.v1.worker.gpu_worker", "Worker.load_model"),
    ("vllm.v1.worker.gpu_worker", "Worker.execute_model"),
    ("vllm.v1.worker.gpu_worker", "Worker.shutdown"),
    ("vllm.config", "CompilationConfig.static_all_moe_layers"),
    ("vllm.config", "CompilationConfig.static_forward_context"),
    ("vllm.config", "CompilationConfig.cudagraph_mode"),
    ("vllm.config", "CompilationConfig.splitting_ops"),
    ("vllm.config", "VllmConfig.shutdown_timeout"),
    ("vllm.config", "VllmConfig.additional_config"),
    ("vllm.config", "VllmConfig.use_v2_model_runner"),
    ("vllm.config", "ParallelConfig.use_sequence_parallel_moe"),
    ("vllm.config", "ParallelConfig.use_ubatching"),
    ("vllm.config", "ParallelConfig.prefill_context_parallel_size"),
    ("vllm.config", "ParallelConfig.enable_eplb"),
)
_SHUTDOWN_S = 120
OPERATION = "moe_ep_bench::moe"
# What a request that is scheduled first gets from its scheduler: when it came, seconds since the epoch.
_ARRIVAL = "moe_ep_bench_arrival_s"
logger = logging.getLogger("vllm.moe_ep_bench")


@dataclass(eq=False)
class Session:
    """The settings, and, in the process that computes, the model in which the policy acts."""

    asked: Settings | None = None
    routers: list[Mapping[str, Any]] = field(default_factory=list)  # by place: what vLLM's factory was told
    runners: list[Any] = field(default_factory=list)  # by place: vLLM's, of layers between graphs
    indices: dict[int, int] = field(default_factory=dict)  # by place: which of the model's MoE layers
    layers: list[Any] = field(default_factory=list)
    step_router: Any = None
    recorder: Any = None
    backend: Any = None
    step: Any = None  # of real requests, while they are computed
    num_routed: int = 0


_session = Session()


def register() -> None:
    """Hook into vLLM where a variable asks for it: the entry point."""
    global _session
    try:
        asked = settings(os.environ)
        if asked is None and not _hooks.cache_info().currsize:
            return
        check_hooks()
    except UserError as problem:
        _end(problem)
    _session = Session(asked)
    _hooks()


def _end(problem: object) -> None:
    print(f"moe-ep-bench: {problem}", file=sys.stderr, flush=True)
    with contextlib.suppress(OSError):
        if path := os.environ.get(REFUSAL):
            Path(path).write_text(str(problem), encoding="utf-8")
    raise SystemExit(2)


def check_hooks() -> None:
    """Refuse a release of vLLM without what the plugin needs; warn of one in which it was not run.

    Raises:
        ValueError: one line that names what is missing.
    """
    import vllm

    for module, name in HOOKS:
        if not _is_there(module, name):
            raise UserError(
                f"vllm {vllm.__version__}: expected {module}.{name}, which the plugin needs; it was run with {RUN}"
            )
    if not vllm.__version__.startswith(f"{RUN}."):
        logger.warning("moe-ep-bench: vllm %s has the plugin's hooks; it was run with %s only", vllm.__version__, RUN)


def _is_there(module: str, name: str) -> bool:
    """Whether a module has a function, or a class an attribute or a field without a default."""
    owner, _, last = name.rpartition(".")
    try:
        found = importlib.import_module(module)
        found = operator.attrgetter(owner)(found) if owner else found
    except (ImportError, AttributeError):
        return False
    return hasattr(found, last) or last in getattr(found, "__dataclass_fields__", {})


# ---- hooks -----------------------------------------------------------------------------------------------------------


@functools.cache
def _hooks() -> None:
    """Wrap what vLLM calls, once a process; each wrapper asks the session whether there is anything to do."""
    from vllm.engine import arg_utils
    from vllm.model_executor.layers.fused_moe import layer as moe
    from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner
    from vllm.v1.core.sched.output import NewRequestData
    from vllm.v1.worker.gpu_worker import Worker

    define_operations()
    _wrap(NewRequestData, "from_request", _from_request)
    _wrap(arg_utils.EngineArgs, "create_engine_config", _create_engine_config)
    _wrap(moe, "create_fused_moe_router", _create_router)
    _wrap(MoERunner, "_select_forward", _select_forward)
    _wrap(Worker, "load_model", _load_model)
    _wrap(Worker, "execute_model", _execute_model)
    _wrap(Worker, "shutdown", _shutdown)


@functools.cache
def define_operations() -> None:
    """``route`` and ``moe`` of ``torch.ops.moe_ep_bench``, which compiled code calls and does not look into."""
    import torch

    operation = torch.library.custom_op(
        "moe_ep_bench::route",
        _route,
        mutates_args=(),
        schema="(Tensor logits, Tensor weights, Tensor ids, int place) -> (Tensor, Tensor)",
    )
    operation.register_fake(lambda logits, weights, ids, place: (torch.empty_like(weights), torch.empty_like(ids)))
    layer = torch.library.custom_op(
        OPERATION,
        _moe,
        mutates_args=("hidden", "output", "shared_output"),
        schema="(Tensor(a!) hidden, Tensor logits, Tensor? shared, Tensor? input_ids, Tensor(b!) output, "
        "Tensor(c!)? shared_output, int place) -> ()",
    )
    layer.register_fake(lambda *_: None)


def _wrap(owner: Any, name: str, wrapper: Callable[..., Any]) -> None:
    inner = getattr(owner, name)

    @functools.wraps(inner)
    def outer(*args: Any, **kwargs: Any) -> Any:
        if _session.asked is None:
            return inner(*args, **kwargs)
        return wrapper(inner, *args, **kwargs)

    # What is bound to its class already, a class method, gets no class ahead of its arguments.
    setattr(owner, name, staticmethod(outer) if inspect.ismethod(inner) else outer)


def _create_engine_config(inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    config, asked = inner(*args, **kwargs), _session.asked
    assert asked is not None  # else the wrapper has not come here
    try:
        check_config(config, asked)
    except UserError as problem:
        _end(problem)
    if graphs_of(config) == "PIECEWISE":
        config.compilation_config.splitting_ops = [*config.compilation_config.splitting_ops, OPERATION]
    if isinstance(config.additional_config, dict):
        # A part of the key of torch.compile's cache: what was compiled without the operation must not come back.
        config.additional_config = config.additional_config | {"moe_ep_bench": _key(asked)}
    if not config.shutdown_timeout:
        # Else vLLM kills its workers with what waits to be written. Requests are then served to their end, too.
        config.shutdown_timeout = _SHUTDOWN_S
        logger.info("moe-ep-bench: --shutdown-timeout is %d, in which recordings are completed", _SHUTDOWN_S)
    os.environ.setdefault("VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS", str(_SHUTDOWN_S))
    if asked.directory is not None:
        atexit.register(_say_unfinished, asked.directory)
    return config


def _key(asked: Settings) -> dict[str, Any]:
    """What compiled code may depend on."""
    policy = None if asked.policy is None else [label_of(asked.policy), *asked.acts_in]
    return {"version": __version__, "policy": policy}


def _say_unfinished(directory: Path) -> None:
    """Say at a server's end that its worker was killed before the recorder was closed."""
    from moe_ep_bench.workload.trace import UNFINISHED

    if (directory / UNFINISHED).exists():
        logger.error(
            "moe-ep-bench: the server ended ahead of its recorder: the last part of %s is lost, at most a minute; "
            "give --shutdown-timeout more seconds",
            directory,
        )


def _from_request(inner: Callable[..., Any], request: Any, *args: Any, **kwargs: Any) -> Any:
    new = inner(request, *args, **kwargs)
    setattr(new, _ARRIVAL, request.arrival_time)
    return new


def _create_router(inner: Callable[..., Any], **told: Any) -> Any:
    from vllm.model_executor.layers.fused_moe.config import RoutingMethodType

    router, place = inner(**told), len(_session.routers)
    _session.routers.append(told)
    kind = type(router)

    def compute(self: Any, hidden_states: Any, router_logits: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        import torch

        chosen = kind._compute_routing(self, hidden_states, router_logits, *args, **kwargs)
        return torch.ops.moe_ep_bench.route(router_logits, *chosen, place)

    method = property(lambda self: RoutingMethodType.Custom)
    hooked = {"_compute_routing": compute, "routing_method_type": method, "moe_ep_bench_place": place}
    router.__class__ = type(f"Hooked{kind.__name__}", (kind,), hooked)
    return router


def _select_forward(inner: Callable[..., Any], runner: Any) -> Any:
    """How a layer is called: by ``moe``, where the model's graph is split there."""
    import torch
    from vllm.config import get_current_vllm_config

    entry = inner(runner)
    if OPERATION not in (get_current_vllm_config().compilation_config.splitting_ops or ()):
        return entry
    has_shared, place = runner.shared_experts is not None, len(_session.runners)
    _session.runners.append(runner)

    def forward(hidden: Any, logits: Any, shared: Any, input_ids: Any, name: Any, width: int) -> Any:
        # Allocated in the graph before, as vLLM's own operation would allocate what it returns.
        output = hidden.new_empty((*hidden.shape[:-1], width)) if width else torch.empty_like(hidden)
        shared_output = torch.empty_like(hidden if shared is None else shared) if has_shared else None
        torch.ops.moe_ep_bench.moe(hidden, logits, shared, input_ids, output, shared_output, place)
        return (shared_output, output) if has_shared else output

    return forward


def _moe(hidden: Any, logits: Any, shared: Any, input_ids: Any, output: Any, shared_output: Any, place: int) -> None:
    """The implementation of ``moe_ep_bench::moe``: vLLM's layer, its outputs where the graphs have them."""
    result = _session.runners[place]._forward_impl(hidden, logits, shared, input_ids)
    found = dict(zip(("shared", "routed"), result, strict=True)) if isinstance(result, tuple) else {"routed": result}
    output.copy_(found["routed"])
    if shared_output is not None:
        shared_output.copy_(found["shared"])


def _load_model(inner: Callable[..., Any], worker: Any, *args: Any, **kwargs: Any) -> Any:
    _session.routers.clear()
    _session.runners.clear()
    result = inner(worker, *args, **kwargs)
    try:
        _bind(worker)
    except UserError as problem:
        logger.error("moe-ep-bench: %s", problem)
        raise
    return result


def _bind(worker: Any) -> None:
    """Find the model's MoE layers, try the policy in each, and say what is going to happen."""
    import vllm
    from vllm.model_executor.models.utils import extract_layer_index

    from moe_ep_bench.serving import step
    from moe_ep_bench.serving.backends import backend_of

    session, asked, config = _session, _session.asked, worker.vllm_config
    assert asked is not None
    names = config.compilation_config.static_all_moe_layers
    runners = [config.compilation_config.static_forward_context[name] for name in names]
    places: list[Any] = [getattr(runner.router, "moe_ep_bench_place", None) for runner in runners]
    if not names or None in places:
        raise UserError(
            f"expected vLLM's own router in each of {len(names)} MoE layers, got {places.count(None)} others"
        )
    session.indices = {place: index for index, place in enumerate(places)}
    session.layers = []
    for index, (name, place) in enumerate(zip(names, places, strict=True)):
        told = {**session.routers[place]}
        sizes = {"num_experts": told.pop("global_num_experts"), "top_k": told.pop("top_k")}
        session.layers.append(step.moe_layer(name, extract_layer_index(name), index / len(names), **sizes, **told))
    say = logger.info if worker.rank == 0 else logger.debug
    layer, model = session.layers[0], config.model_config
    shape = f"{len(names)} MoE layers, top-{layer.top_k} of {layer.num_experts} experts"
    session.step_router = session.recorder = None
    if asked.policy is not None:
        with naming(POLICY):
            check_policy(asked.policy, session.layers, num_ranks(config))
        backends = [backend_of(runner, config) for runner in runners]
        elsewhere = [backend.elsewhere for backend in backends]
        session.step_router = step.StepRouter(
            asked.policy, session.layers, num_ranks(config), worker.device, asked.acts_in, elsewhere
        )
        session.backend = "; ".join(dict.fromkeys(map(str, backends)))
        say(
            "moe-ep-bench: serving under %s in %s, %s; a step's tokens are one batch. %s",
            label_of(asked.policy),
            " and ".join(asked.acts_in),
            shape,
            session.backend,
        )
    if asked.directory is not None and worker.rank == 0:
        from moe_ep_bench.serving.recorder import Recorder

        facts = {"model": Path(model.model).name, "source": f"vLLM {vllm.__version__}, plugin of moe-ep-bench"}
        session.recorder = Recorder(
            asked.directory,
            session.layers,
            facts,
            [] if asked.policy is None else [f"served under {label_of(asked.policy)}"],
            asked.most_bytes,
            lambda level, line: logger.log(level, "moe-ep-bench: %s", line),
        )
        atexit.register(session.recorder.close)  # an engine in a user's own process is not shut down
        say("moe-ep-bench: recording %s to %s", shape, asked.directory)


def _execute_model(inner: Callable[..., Any], worker: Any, scheduled: Any, *args: Any, **kwargs: Any) -> Any:
    session = _session
    if session.recorder is not None:
        session.recorder.forget(scheduled.finished_req_ids)
        came = {new.req_id: getattr(new, _ARRIVAL, None) for new in scheduled.scheduled_new_reqs}
        session.recorder.arrive({name: seconds for name, seconds in came.items() if seconds is not None})
    if not scheduled.total_num_scheduled_tokens or session.step is not None:
        return inner(worker, scheduled, *args, **kwargs)
    session.step, session.num_routed = _Computed(worker, scheduled), 0
    try:
        result = inner(worker, scheduled, *args, **kwargs)
        if session.num_routed != len(session.layers):
            problem = f"{session.num_routed} of {len(session.layers)} MoE layers routed through the plugin in a step"
            logger.error("moe-ep-bench: %s: a fused kernel or a graph chose the experts", problem)
            raise RuntimeError(problem)
        if session.recorder is not None:
            session.recorder.end_step(*session.step.tokens)
    finally:
        session.step = None
    return result


def _shutdown(inner: Callable[..., Any], worker: Any) -> Any:
    session = _session
    if session.recorder is not None:
        session.recorder.close()
    if session.step_router is not None:
        logger.info("moe-ep-bench: %s; %s", session.step_router.report(), session.backend)
        if problem := session.step_router.problem():
            logger.error("moe-ep-bench: these answers are not the policy's: %s", problem)
    session.step_router = session.recorder = None
    return inner(worker)


class _Computed:
    """The step that is being computed: which tokens of which requests."""

    def __init__(self, worker: Any, scheduled: Any) -> None:
        self.worker, self.scheduled = worker, scheduled

    @functools.cached_property
    def tokens(self) -> tuple[list[str], Any, Any, Any]:
        """Names of the step's requests, and of each token its request's place, position, and whether a prompt holds it.

        Known when the first router is called: the runner orders requests after the step has begun.
        """
        import numpy as np

        batch = self.worker.model_runner.input_batch
        names = list(batch.req_ids)
        count_B = np.array([self.scheduled.num_scheduled_tokens[name] for name in names])
        request_T = np.arange(len(names)).repeat(count_B)
        first_B = batch.num_computed_tokens_cpu[: len(names)].astype(np.int64)
        position_T = np.arange(count_B.sum()) - (count_B.cumsum() - count_B - first_B)[request_T]
        is_prompt_T = position_T < batch.num_prompt_tokens[: len(names)][request_T]
        return names, request_T, position_T, is_prompt_T

    @functools.cached_property
    def step(self) -> Any:
        import torch

        from moe_ep_bench.serving.step import Step

        _, request_T, _, is_prompt_T = self.tokens
        device = self.worker.device
        return Step(torch.from_numpy(request_T).to(device), torch.from_numpy(is_prompt_T).to(device))


def _route(logits: Any, weights: Any, ids: Any, place: int) -> tuple[Any, Any]:
    """The implementation of ``moe_ep_bench::route``: weights and expert ids [T, K] from vLLM's own."""
    session = _session
    computed = session.step
    if computed is None or not session.layers:  # warm-up
        return weights.clone(), ids.clone()
    index, num_tokens = session.indices[place], computed.scheduled.total_num_scheduled_tokens
    session.num_routed += 1
    if len(logits) < num_tokens:
        raise UserError(f"expected the {num_tokens} tokens of a step in each MoE layer, got {len(logits)}")
    out_weights, out_ids = weights.clone(), ids.clone()
    real = slice(num_tokens)  # what is beyond fills up the batch
    if session.recorder is not None and session.recorder.is_open:
        session.recorder.add(index, logits[real], ids[real])
    if session.step_router is not None:
        choice = session.layers[index].choice(logits[real], ids[real])
        routed = session.step_router.route(index, choice, weights[real], ids[real], computed.step)
        out_weights[real], out_ids[real] = routed
    return out_weights, out_ids
