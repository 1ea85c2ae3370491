"""How long each virtual rank's pass of a whole model takes: measured on this device, or modelled for another.

Shapes: T = tokens of a rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from moe_ep_bench.devices import Device
from moe_ep_bench.layer.build import DTYPES
from moe_ep_bench.layer.depth import instrumented_model
from moe_ep_bench.layer.experts import TOKENS, seeded_generator
from moe_ep_bench.layer.passes import Decode, Pass, Prefill
from moe_ep_bench.layer.virtual_transformer import Announced, VirtualTransformer
from moe_ep_bench.measure.cache import CacheFlush
from moe_ep_bench.measure.modelled_pass import PassWork, modelled_pass
from moe_ep_bench.scopes.emulated_model import EmulatedModel
from moe_ep_bench.scopes.model_traffic import ModelRouter, ModelShare, ModelTraffic
from moe_ep_bench.scopes.virtual_timing import RankTime, rank_work, run_timed
from moe_ep_bench.timer import PhaseRecorder, clock_for


@dataclass(frozen=True)
class ModelledModels:
    """Ranks on a device that is not here: nothing runs."""

    comparison: EmulatedModel
    device: Device
    needs_tokens: ClassVar[bool] = False

    def time(
        self,
        router: ModelRouter,
        traffic: ModelTraffic,
        rank: int,
        share: ModelShare | None,
        index: int,
        *,
        first: bool = False,
    ) -> RankTime:
        """See ``measure.modelled_pass``; the same whenever it is asked."""
        comparison, lengths = self.comparison, traffic.lengths_R[rank]
        decodes = comparison.context_length > 0
        legs, meetings = modelled_pass(
            self.device,
            comparison.model,
            comparison.num_layers,
            PassWork(
                prompt_lengths=() if decodes else lengths,
                num_requests=len(lengths) if decodes else 0,
                context_length=comparison.context_length,
                layers={layer: rank_work(one, rank) for layer, one in traffic.layers.items()},
            ),
            by_policy=router.case.policy is not None,
            batch_wide=traffic.is_batch_wide,
            alone=comparison.ep_size == 1,
            bytes_per_value=DTYPES[comparison.experiment.layer.dtype].itemsize,
            experts=comparison.parts.experts,
        )
        return RankTime(legs, meetings, 0.0, 0.0)


class MeasuredModels:
    """Ranks that this device stands in for, one after another: every one runs the whole model on its own tokens."""

    needs_tokens = True

    def __init__(self, comparison: EmulatedModel, device: torch.device) -> None:
        self._comparison, self._device = comparison, device
        self._seed = comparison.experiment.layer.seed
        self._recorder = PhaseRecorder(clock_for(device))
        self._flush = CacheFlush(device) if comparison.experiment.measure.flush_l2 else None
        self._virtual = VirtualTransformer(
            comparison.model,
            comparison.num_layers,
            DTYPES[comparison.experiment.layer.dtype],
            device,
            comparison.ep_size,
            self._seed,
            comparison.context_length + comparison.most_tokens,
            comparison.parts,
        )
        self._cache = None
        if comparison.context_length:
            self._cache = self._virtual.new_cache(comparison.most_tokens, comparison.context_length)

    def time(
        self,
        router: ModelRouter,
        traffic: ModelTraffic,
        rank: int,
        share: ModelShare | None,
        index: int,
        *,
        first: bool = False,
    ) -> RankTime:
        """Run the model as the rank whose share it is.

        Args:
            first: look whether every layer's router sends what ``traffic`` says; waits for the device.
        """
        assert share is not None
        assert share.rank == rank
        virtual, run = self._virtual, self._pass(traffic.lengths_R[rank], rank, index)
        self._become(router, traffic, share, index)
        virtual.exchange.checks_counts = first
        with virtual.connected(), instrumented_model(virtual.transformer, self._recorder, lambda: None):
            return run_timed(self._recorder, self._flush, lambda: run(virtual.transformer.gpt))

    def _become(self, router: ModelRouter, traffic: ModelTraffic, share: ModelShare, index: int) -> None:
        """See the model of a case from the share's rank, with its routing in all MoE layers."""
        virtual, policy = self._virtual, router.case.policy
        virtual.become(share.rank)
        virtual.transformer.take(() if policy is None else virtual.transformer.pairs.keys())
        for layer, moe in virtual.transformer.moe_layers.items():
            moe.router.replay_TE = share.layers[layer].logits_TE
            if policy is not None:
                moe.router.policy = policy
                moe.router.context = router.layers[layer].context(share.layers[layer], index)
        # Onto the device, where a gather would leave it, before the clock runs.
        virtual.announced = {
            layer: Announced(one.counts_CRP[0].to(self._device), one.stats_SE) for layer, one in traffic.layers.items()
        }

    def _pass(self, lengths: tuple[int, ...], rank: int, index: int) -> Pass:
        generator = seeded_generator(self._device, self._seed, TOKENS, index, rank)
        vocabulary = self._comparison.model.vocab_size
        ids_T = torch.randint(vocabulary, (sum(lengths),), generator=generator, device=self._device)
        return Prefill(ids_T, lengths) if self._cache is None else Decode(ids_T, self._cache)
