"""What must hold of a whole model."""

from __future__ import annotations

from unittest import mock

import torch
from laws import law
from layer_laws import LITE
from torch import Tensor
from virtual_time import VirtualTime, all_in, passing_where_late

from moe_ep_bench.layer import megatron
from moe_ep_bench.layer.backend import LayerBackend
from moe_ep_bench.layer.passes import Decode, KeyValueCache, Prefill
from moe_ep_bench.layer.phases import Rendezvous, instrumented_model
from moe_ep_bench.layer.stack import Stack
from moe_ep_bench.models import LatentAttention, ModelSpec, load_model
from moe_ep_bench.policies import make_policy
from moe_ep_bench.runtime.ranks import Ranks
from moe_ep_bench.schema import TOTAL, UNACCOUNTED, layer_and_phase, phases_in_depth
from moe_ep_bench.timing.timer import Clock, PhaseRecorder

SEED = 3
MEGATRON = LayerBackend("sequential")
LENGTHS = (7, 7, 12, 3)
# Latent attention, a dense layer and shared experts; norms of queries and keys; grouped queries; biases.
MODELS = ("deepseek-v2-lite", "olmoe-1b-7b", "mixtral-8x7b", "qwen1.5-moe-a2.7b")


class Lab:
    """Models by name, a few layers of each, and tokens that differ from rank to rank."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self.groups = megatron.expert_parallel_groups(ranks.world_size, 60)
        self._built: dict[tuple[str, LayerBackend], Stack] = {}

    def model(self, name: str) -> ModelSpec:
        """A preset with narrow layers and few words, so that CPU ranks can run it."""
        return load_model(name).scaled(1 / 32).model_copy(update={"vocab_size": 512})

    def build(self, name: str, layer_backend: LayerBackend = MEGATRON) -> Stack:
        if (name, layer_backend) not in self._built:
            model = self.model(name)
            sizes = {"num_layers": model.first_dense_layers + 2, "max_length": 64}
            self._built[name, layer_backend] = Stack(
                model, torch.float32, self.ranks.device, self.groups, SEED, layer_backend, **sizes
            )
        built = self._built[name, layer_backend]
        for forms in built.forms.values():
            forms.native.router.replay_TE = forms.policy.router.replay_TE = None
            forms.policy.router.policy = make_policy({"name": "topk"})
        built.select_forms(())
        return built

    def prompts(self, model: ModelSpec) -> Prefill:
        return Prefill(self.ids(model, sum(LENGTHS)), LENGTHS)

    def ids(self, model: ModelSpec, num_tokens: int, seed: int = 5) -> Tensor:
        generator = torch.Generator().manual_seed(seed + self.ranks.rank)
        return torch.randint(model.vocab_size, (num_tokens,), generator=generator).to(self.ranks.device)


def unmodified(lab: Lab, name: str, built: Stack) -> megatron.GPTModel:
    """Megatron-Core's model from its own spec, router and dropless path included, with the built one's weights.

    Its attention is its own too, but where that cannot compute latent attention.
    """
    model = lab.model(name)
    size, depth = lab.groups.ep.size(), len(built.gpt.decoder.layers)
    config = megatron.megatron_config(model, torch.float32, size, MEGATRON, on_cpu=True, num_layers=depth)
    latent = getattr(config, "multi_latent_attention", False)
    core = type(built.gpt.decoder.layers[0].self_attention.core_attention) if latent else None
    spec = megatron.decoder_spec(config, core)
    gpt = megatron.build_gpt(
        config, spec, model.vocab_size, max_length=64, tied=model.tied_embeddings, ep_group=lab.groups.ep
    )
    built.select_forms(())
    gpt.load_state_dict(built.gpt.state_dict(), strict=False)
    own = {key for key in gpt.state_dict() if "_extra_state" not in key}
    assert own <= set(built.gpt.state_dict()), "weights are missing"
    assert type(gpt.decoder.layers[-1].mlp.router) is megatron.TopKRouter
    return gpt.to(lab.ranks.device).eval()


def causal_mask(length: int) -> Tensor:
    return torch.ones(1, 1, length, length, dtype=torch.bool).triu(1)


def whole_sequence(gpt: megatron.GPTModel, ids_T: Tensor) -> Tensor:
    """Logits [T, V] of one sequence, all its positions."""
    positions_T = torch.arange(len(ids_T)).unsqueeze(0)
    return gpt(ids_T.unsqueeze(0), positions_T, causal_mask(len(ids_T)))[0]


@law()
def topk_gives_the_logits_of_an_unmodified_model_and_packed_prompts_those_of_each_alone(lab: Lab) -> None:
    """Bit for bit, but where prompts are packed or weights normalised."""
    for name in MODELS:
        model, built = lab.model(name), lab.build(name)
        theirs = unmodified(lab, name, built)
        packed_SV = lab.prompts(model)(lab.build(name, LayerBackend()).gpt)
        alone = [whole_sequence(theirs, ids_T)[-1] for ids_T in lab.ids(model, sum(LENGTHS)).split(LENGTHS)]
        torch.testing.assert_close(packed_SV, torch.stack(alone), rtol=1e-3, atol=1e-4, msg=f"{name}")
        if not isinstance(model.attention, LatentAttention):
            for layer, block in enumerate(built.gpt.decoder.layers):
                # Attention's kernel is ours; everything else is compared to the last bit.
                block.self_attention.core_attention = theirs.decoder.layers[layer].self_attention.core_attention
        ids_T = lab.ids(model, 23)
        expected_TV = whole_sequence(theirs, ids_T)
        assert expected_TV.std() > 0.1
        assert torch.equal(whole_sequence(built.gpt, ids_T), expected_TV), f"{name}: native differs"
        built.select_forms(built.forms)
        if model.normalize:  # Megatron-Core's weights are then the same numbers by another formula.
            torch.testing.assert_close(whole_sequence(built.gpt, ids_T), expected_TV, rtol=1e-4, atol=1e-5)
        else:
            assert torch.equal(whole_sequence(built.gpt, ids_T), expected_TV), f"{name}: topk differs"


@law()
def positions_of_many_prompts_are_set_at_once(lab: Lab) -> None:
    """Megatron-Core 0.19 launches a dozen kernels for each prompt: many would measure launches."""
    built, rotate = lab.build(LITE, LayerBackend()), megatron.rope_utils._apply_rotary_pos_emb_bshd
    with mock.patch.object(megatron.rope_utils, "_apply_rotary_pos_emb_bshd", side_effect=rotate) as calls:
        lab.prompts(lab.model(LITE))(built.gpt)
    assert calls.call_count == 2 * len(built.gpt.decoder.layers), "queries and keys of each layer"


@law()
def a_decode_step_gives_the_logits_of_the_whole_sequence(lab: Lab) -> None:
    for name in MODELS:
        model, built = lab.model(name), lab.build(name, LayerBackend())
        ids_BS = lab.ids(model, 3 * 9).view(3, 9)
        cache = KeyValueCache(max_requests=3, context_length=8)
        cache.fill_(built.gpt, lab.ranks.device, SEED)
        positions_BS = torch.arange(8).expand(3, 8)
        cache.context.reset()  # It takes in the earlier tokens themselves.
        built.gpt(ids_BS[:, :8], positions_BS, None, inference_context=cache.context, runtime_gather_output=True)
        step_BV = Decode(ids_BS[:, 8], cache)(built.gpt)
        expected_BV = Prefill(ids_BS.flatten(), (9, 9, 9))(built.gpt)
        torch.testing.assert_close(step_BV, expected_BV, rtol=1e-3, atol=1e-4, msg=f"{name}")
        again_BV = Decode(ids_BS[:, 8], cache)(built.gpt)
        assert torch.equal(again_BV, step_BV), "a step leaves the next one another cache"


@law()
def phases_of_all_layers_and_the_rest_close_against_the_total(lab: Lab) -> None:
    model, built = lab.model(LITE), lab.build(LITE, LayerBackend())
    prompts = lab.prompts(model)
    clock = VirtualTime(lab.ranks.device, op_us=1.0)
    recorder, meet = PhaseRecorder(clock), Rendezvous(lab.groups.ep, lab.ranks.device)
    prompts(built.gpt)
    before = [set(vars(module)) for module in built.gpt.modules()]
    with clock, instrumented_model(built.gpt, recorder, meet):
        recorder.begin()
        prompts(built.gpt)
        recorder.end()
    assert [set(vars(module)) for module in built.gpt.modules()] == before, "instrumentation leaves something behind"
    times = recorder.times_us()
    total, unaccounted = times.pop(TOTAL), times.pop(UNACCOUNTED)
    assert set(times) <= set(phases_in_depth(len(built.gpt.decoder.layers), built.forms))
    assert sum(times.values()) + unaccounted == total, times
    assert unaccounted < 0.02 * total  # Of all operations.
    moe = {phase for layer, phase in map(layer_and_phase, times) if layer in built.forms}
    assert {"attention", "rest", "gate", "policy", "experts", "shared", "combine", "moe_rest"} <= moe
    assert {phase for layer, phase in map(layer_and_phase, times) if layer == 0} == {"attention", "rest", "dense"}
    assert {phase for layer, phase in map(layer_and_phase, times) if layer is None} == {"embedding", "rest", "output"}
    assert ("wait_metadata" in moe) == (lab.ranks.world_size > 1)
    assert min(times[layer, "attention"] for layer in range(3)) > 0


@law()
def a_slow_attention_shows_as_waiting_on_the_others_in_that_layer(lab: Lab) -> None:
    model, built = lab.model(LITE), lab.build(LITE, LayerBackend())
    prompts = lab.prompts(model)
    meet, is_slow = Rendezvous(lab.groups.ep, lab.ranks.device), lab.ranks.rank == 1

    def run(clock: Clock) -> dict[str, float]:
        recorder = PhaseRecorder(clock)
        with instrumented_model(built.gpt, recorder, meet):
            meet()
            recorder.begin()
            prompts(built.gpt)
            recorder.end()
        return recorder.times_us()

    last = built.gpt.decoder.layers[2].self_attention
    passed = passing_where_late(lab.ranks.device, last, "forward", run, is_slow=is_slow)
    assert passed == all_in((2, "attention" if is_slow else "wait_metadata")), passed


@law()
def weights_do_not_depend_on_the_number_of_ranks_and_differ_between_layers(lab: Lab) -> None:
    built = lab.build("olmoe-1b-7b", LayerBackend())
    first, second = (built.forms[layer].native.router.weight for layer in sorted(built.forms))
    assert not torch.equal(first, second)
    # What one rank has; a change of the seeds shows here, and so does a rank that has other weights.
    found = torch.stack([first.sum(), second.sum(), built.gpt.embedding.word_embeddings.weight.sum()])
    for other in lab.ranks.all_gather(found):
        assert torch.equal(other, found)
