"""Inside vLLM: what the plugin is asked for, and the servers in which it cannot be honoured.

==============================  =======================================================================================
``MOE_EP_BENCH_RECORD``         a folder for ``moe-trace-v1`` parts (``recorder``)
``MOE_EP_BENCH_RECORD_GIB``     how much may wait in memory to be written, 4 unless said otherwise
``MOE_EP_BENCH_POLICY``         ``{"name": ..., field: value}`` as JSON; with ``acts_in``, a list of ``prefill`` and
                                ``decode``, in place of the policy's own
``MOE_EP_BENCH_REFUSAL``        a file that gets why the plugin refuses to serve (``server``)
==============================  =======================================================================================
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moe_ep_bench.errors import UserError, naming
from moe_ep_bench.files import make_folder, parse_json
from moe_ep_bench.policies import Policy, make_policy
from moe_ep_bench.policies.contract import STAGES

if TYPE_CHECKING:  # It brings torch, for which a server that asks for nothing need not wait.
    from moe_ep_bench.quality.checkpoint import MoELayer

RECORD, LIMIT, POLICY = "MOE_EP_BENCH_RECORD", "MOE_EP_BENCH_RECORD_GIB", "MOE_EP_BENCH_POLICY"
REFUSAL = "MOE_EP_BENCH_REFUSAL"


@dataclass(frozen=True, kw_only=True)
class Settings:
    """One of ``policy`` and ``directory`` at least."""

    policy: Policy | None = None
    acts_in: tuple[str, ...] = ()
    directory: Path | None = None
    most_bytes: float = 0


def settings(environment: Mapping[str, str]) -> Settings | None:
    """Settings from the environment variables; None = not set.

    Raises:
        ValueError: one line that names the variable or file, the key and the value.
    """
    spec, directory = environment.get(POLICY, "").strip(), environment.get(RECORD, "").strip()
    if not (spec or directory):
        return None
    with naming(LIMIT):
        limit = environment.get(LIMIT, "").strip() or "4"
        if not (most_bytes := float(limit) * 2**30) > 0:
            raise UserError(f"expected more than 0, got {limit}")
    policy, acts_in = _policy(spec) if spec else (None, ())
    path = Path(directory).absolute() if directory else None
    return Settings(policy=policy, acts_in=acts_in, directory=path, most_bytes=most_bytes)


def _policy(spec: str) -> tuple[Policy, tuple[str, ...]]:
    """A policy and the stages in which it acts."""
    values = parse_json(spec, POLICY, unique=True)
    with naming(POLICY):
        if not isinstance(values, dict):
            raise UserError(f"expected a policy's name and fields, got {spec}")
        acts_in = values.pop("acts_in", None)
        policy = make_policy(values)
        if acts_in is None:
            return policy, policy.acts_in
        is_list = isinstance(acts_in, list) and acts_in
        if not is_list or sorted(map(str, acts_in)) != [stage for stage in sorted(STAGES) if stage in acts_in]:
            raise UserError(f"expected a list of {' and '.join(STAGES)}, each once, got {acts_in!r}", "acts_in")
        return policy, tuple(acts_in)


def check_config(config: Any, asked: Settings) -> None:
    """Refuse a server in which the plugin cannot do what it says; make the folder of recordings.

    Raises:
        ValueError: one line that says what to change.
    """
    parallel, num_experts = config.parallel_config, config.model_config.get_num_experts()
    if not num_experts:
        raise UserError(f"{config.model_config.model}: expected a mixture of experts")
    graphs = graphs_of(config)
    for is_so, words in (
        (config.use_v2_model_runner, "Model Runner V2 is not known; set VLLM_USE_V2_MODEL_RUNNER=0"),
        (
            graphs not in ("NONE", "PIECEWISE"),
            "graphs are replayed without their routers; start with -cc.cudagraph_mode=PIECEWISE (or NONE)",
        ),
        (
            graphs == "PIECEWISE" and not _splits_graphs(config.compilation_config),
            "graphs are not split at operations; start without use_inductor_graph_partition and splitting_ops",
        ),
        (config.speculative_config is not None, "speculative decoding computes tokens of no request"),
        (parallel.pipeline_parallel_size > 1, "a pipeline stage holds some of the layers; use --tensor-parallel-size"),
        (parallel.use_ubatching, "micro-batches split a step; start without --enable-dbo"),
        (parallel.use_sequence_parallel_moe, "ranks see a part of a step's tokens each; change the all2all backend"),
        (parallel.prefill_context_parallel_size > 1, "ranks see a part of a prompt each"),
        (parallel.enable_eplb, "replicas have no place in a policy's ranks; start without --enable-eplb"),
        (parallel.data_parallel_size > 1, "ranks see their own tokens alone; use --tensor-parallel-size"),
        (
            asked.directory is not None and asked.directory.is_dir() and any(asked.directory.glob("*.safetensors")),
            f"{RECORD}: {asked.directory}: expected a folder without recordings",
        ),
    ):
        if is_so:
            raise UserError(words)
    text = config.model_config.hf_text_config
    top_k = getattr(text, "num_experts_per_tok", None) or getattr(text, "num_experts_per_token", None)
    if asked.policy is not None and top_k:
        from moe_ep_bench.serving.step import moe_layer

        layer = moe_layer("router", 0, 0, num_experts=num_experts, top_k=top_k)
        with naming(POLICY):
            check_policy(asked.policy, [layer], num_ranks(config))
    if asked.directory is not None:
        from moe_ep_bench.serving.recorder import check_room

        make_folder(asked.directory, RECORD)
        with naming(RECORD):
            check_room(asked.directory)


def graphs_of(config: Any) -> str:
    """The mode of CUDA graphs, by vLLM's name."""
    mode = config.compilation_config.cudagraph_mode
    return "NONE" if mode is None or config.device_config.device_type == "cpu" else mode.name


def _splits_graphs(compilation: Any) -> bool:
    """Whether pieces are those between ``splitting_ops``, which the plugin adds to."""
    return bool(compilation.splitting_ops) and not compilation.use_inductor_graph_partition


def check_policy(policy: Policy, layers: Sequence[MoELayer], num_ranks: int) -> None:
    """Try a policy on layers of a model's shape.

    Raises:
        ValueError: it does not fit, or promises a token more experts than there are slots.
    """
    from moe_ep_bench.quality.routed import try_policies

    for layer in layers:
        policy.check_model(layer.num_experts, layer.top_k)
        most = policy.most_experts(layer.num_experts, layer.context(num_ranks))
        # A policy of a user's own that promises nothing is held to the slots step by step.
        if most > layer.top_k and type(policy).most_experts is not Policy.most_experts:
            raise UserError(
                f"{policy.name}: may give a token {most} experts, and vLLM's kernels have {layer.top_k} slots for one"
            )
        try_policies(layer, [policy], num_ranks)


def num_ranks(config: Any) -> int:
    parallel = config.parallel_config
    return parallel.tensor_parallel_size if parallel.enable_expert_parallel else 1
