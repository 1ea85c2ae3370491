"""The contract that every routing policy keeps.

A policy is a frozen value whose fields are the keys a user writes in a config. It turns router
scores into a routing: which (token, expert) pairs are computed and with what weight. It is pure
and deterministic, knows nothing of processes or of Megatron-Core, and therefore serves real
ranks, virtual ranks and tests alike.

*Fields.* What a value may be is stated once, by types that pydantic checks. A field is as strict as YAML is: true is no
number, and a number with a point no count. Numbers become floats, so that 1 and 1.0 are the same policy and hash to the
same case. Any number may differ by layer, as a mapping from bands of layers: ``{"0-5": 1.0, "6-25": 1.5}`` has the
values of MoE layers 0 to 5 and 6 to 25, counted from the first one; ``{"0": 1.0, "1": 1.1, ...}`` has one for each.

Shapes: T = local tokens, E = experts, K = top_k, R = EP ranks, L = E / R experts per rank,
S = rows of batch statistics.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from fractions import Fraction
from functools import cache, cached_property
from itertools import groupby
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    ClassVar,
    Literal,
    NoReturn,
    Self,
    TypeVar,
    dataclass_transform,
    get_args,
)

from pydantic import AfterValidator, Field, ValidatorFunctionWrapHandler, WrapValidator
from pydantic.dataclasses import dataclass as pydantic_dataclass

from moe_ep_bench.errors import UserError
from moe_ep_bench.policies.lazy import Tensor, torch
from moe_ep_bench.policies.steps import TORCH, Steps

if TYPE_CHECKING:
    from moe_ep_bench.policies.similarity import Similarity

Stage = Literal["prefill", "decode"]
STAGES: tuple[Stage, ...] = get_args(Stage)
_Kind = TypeVar("_Kind", bound=type)


class ByLayer(tuple[Any, ...]):
    """One number for each MoE layer, from the first."""

    @classmethod
    def of(cls, bands: Mapping[Any, Any]) -> ByLayer:
        """Read a mapping from bands; ValueError: they are no ranges, overlap or leave layers out."""
        matches = {band: re.fullmatch(r"(\d{1,6})(?:-(\d{1,6}))?", str(band)) for band in bands}
        values: list[Any] = []
        for band, match in sorted(matches.items(), key=lambda item: int(item[1][1]) if item[1] else -1):
            first, last = (int(match[1]), int(match[2] or match[1])) if match else (-1, -1)
            if first != len(values) or last < first:
                expected = f"{len(values)} or {len(values)}-LAST for the next band of layers"
                raise UserError(f"expected {expected}, got {band!r}")
            values += [bands[band]] * (last - first + 1)
        if not values:
            raise UserError("expected a number for each band of layers, got {}")
        return cls(values)

    def bands(self) -> dict[str, Any]:
        """The shortest mapping of bands."""
        bands, first = {}, 0
        for value, equal in groupby(self):
            last = first + len(list(equal)) - 1
            bands[f"{first}-{last}" if last > first else str(first)] = value
            first = last + 1
        return bands


@dataclass(frozen=True)
class Setting:
    """A key of a case with its value, JSON-ready: what a config sets, and what makes a case of it.

    Attributes:
        is_default: the value is what the key has where a config is silent.
        is_by_layer: the value is a mapping from bands of layers (``ByLayer.bands``).
        is_file: the value names a file.
    """

    key: str
    value: Any
    is_default: bool = False
    is_by_layer: bool = False
    is_file: bool = False


def params_of(settings: Iterable[Setting]) -> dict[str, Any]:
    """Settings as one JSON-ready dict; what differs by layer is None in its place, and stands under ``by_layer``."""
    params = {one.key: None if one.is_by_layer else one.value for one in settings}
    layered = {one.key: one.value for one in settings if one.is_by_layer}
    return {**params, **({"by_layer": layered} if layered else {})}


def _each(value: Any, check: ValidatorFunctionWrapHandler) -> Any:
    """Check one number, or that of each layer."""
    if isinstance(value, Mapping):
        value = ByLayer.of(value)
    return ByLayer(map(check, value)) if isinstance(value, ByLayer) else check(value)


_UNSIGNED, _EACH = AfterValidator(lambda value: value + 0.0), WrapValidator(_each)  # -0.0 is 0.0

Count = Annotated[int, Field(strict=True, ge=0), _EACH]
Positive = Annotated[int, Field(strict=True, ge=1), _EACH]
Flag = Annotated[bool, Field(strict=True)]
Factor = Annotated[float, Field(strict=True, ge=0, allow_inf_nan=False), _UNSIGNED, _EACH]
Share = Annotated[float, Field(strict=True, ge=0, le=1), _UNSIGNED, _EACH]
ShareAboveZero = Annotated[float, Field(strict=True, gt=0, le=1), _EACH]


@dataclass_transform(kw_only_default=True, frozen_default=True)
def policy(kind: _Kind) -> _Kind:
    """Make a frozen dataclass of keywords, whose values are checked against the types of their fields."""
    # pydantic's hint is of its protocol, not of the class that it is given.
    return pydantic_dataclass(frozen=True, kw_only=True)(kind)  # pyright: ignore[reportReturnType]


@cache
def decimal(value: float) -> Fraction:
    """The decimal that the user wrote, exactly: 0.7 is 7/10, where the double is a little less."""
    return Fraction(repr(value))


@dataclass(frozen=True, eq=False)
class RoutingContext:
    """Facts of the batch and the model that a policy may see besides the scores.

    Attributes:
        top_k: experts per token of the model's own routing (K).
        num_ranks: expert-parallel ranks (R); expert e lives on rank ``e // (E // R)``.
        rank: the source rank, on which these tokens live.
        normalize: the model divides a token's weights by their sum (``norm_topk_prob``).
        bias_E: float32 selection bias (DeepSeek-V3, section 2.1.2): added for selecting and
            ordering, never to weights.
        num_groups, top_groups: the model's top-k looks only into the ``top_groups`` best of
            ``num_groups`` equal groups of experts; a group's value is the sum of its best
            ``K // top_groups`` experts, as in Megatron-Core.
        scale: factor on the final weights (``routed_scaling_factor``).
        token_mask_T: bool, False = padding, which selects nothing and counts in nothing; None = no token is known
            to be padding.
        request_id_T: int64, the request a token belongs to.
        modality_T: 0 = text, 1 = image.
        layer_fraction: where in the depth of the model the layer stands, 0 to 1.
        load_E: expert load carried over from earlier batches, for policies with ``carry_loads``.
        generator: the only source of randomness.
        random_TE: what ``Policy.random_keys`` returned before, in place of new draws: a captured graph can make none.
        top_k_TE: the model's own choice of K experts, padding's too, where several policies share it; bool [T, E].
    """

    top_k: int
    num_ranks: int = 1
    rank: int = 0
    normalize: bool = False
    bias_E: Tensor | None = None
    num_groups: int | None = None
    top_groups: int | None = None
    scale: float = 1.0
    token_mask_T: Tensor | None = None
    request_id_T: Tensor | None = None
    modality_T: Tensor | None = None
    layer_fraction: float = 0.0
    load_E: Tensor | None = None
    generator: torch.Generator | None = None
    random_TE: Tensor | None = None
    top_k_TE: Tensor | None = None

    def num_valid(self, num_tokens: int) -> int:
        """Number of tokens that are not padding. A mask is counted once, for which the host waits."""
        return num_tokens if self.token_mask_T is None else self._num_marked

    @cached_property
    def _num_marked(self) -> int:
        assert self.token_mask_T is not None
        return int(self.token_mask_T.sum())

    def random_keys(self, like_TE: Tensor) -> Tensor:
        """Uniform numbers below 1: float32 in the shape and on the device of ``like_TE``."""
        if self.random_TE is not None:
            return self.random_TE
        return torch.rand(like_TE.shape, generator=self.generator, device=like_TE.device)


@dataclass(frozen=True, eq=False)
class Routing:
    """Which pairs are computed (``map_TE``, bool) and their combine weights (``weights_TE``, float32, 0 elsewhere)."""

    map_TE: Tensor
    weights_TE: Tensor


@dataclass(frozen=True, kw_only=True)
class Policy:
    """The interface of a policy: its rule, and facts that it states about itself.

    A policy of your own implements ``route`` and, where it decides for the whole batch, ``batch_stats``.

    Attributes:
        name: what users write.
        acts_in: the stages (prefill, decode) in which it acts by default. Capacities bound the straggler of prefill,
            batch-wide sets the weights that a decode step reads.
        looks_past_top_k: scores beyond the model's top-k decide, so that a recording which holds only the top-k needs
            a model of the others, which results then name; ``check-policy`` finds who does not say so.
        torch_only: values by field that only the form in torch, or numba's steps of it, can run.
        experts_in: fields that count experts; a config may ask for as many as the model has.
        file_fields: fields that name files, whose paths configs give relative to themselves.
    """

    name: ClassVar[str]
    acts_in: ClassVar[tuple[Stage, ...]] = STAGES
    looks_past_top_k: ClassVar[bool] = False
    torch_only: ClassVar[Mapping[str, object]] = {}
    experts_in: ClassVar[tuple[str, ...]] = ()
    file_fields: ClassVar[tuple[str, ...]] = ()

    @property
    def data(self) -> Similarity | None:
        """Data besides scores by which it decides; None = nothing."""
        return None

    @property
    def stats_key(self) -> tuple[Any, ...] | None:
        """All fields on which its statistics depend; policies of its very class that agree in them share statistics."""
        return None

    @property
    def knows_rank(self) -> bool:
        """Whether the same tokens may be routed otherwise on another rank."""
        return True

    @property
    def fills_experts_apart(self) -> bool:
        """Whether on another rank only pairs with its own experts differ, each as where all experts are its own."""
        return False

    def route(self, scores_TE: Tensor, context: RoutingContext, stats_SE: Tensor | None = None) -> Routing:
        """Route one batch of tokens.

        Args:
            scores_TE: float32 [T, E], finite and non-negative: the router's scores after the
                model's score function (softmax over E, or sigmoid).
            context: see RoutingContext.
            stats_SE: ``batch_stats`` summed over all ranks; without it this rank's own are used.

        Raises:
            ValueError: for scores or a context that break the contract, before any work.
        """
        raise NotImplementedError

    def batch_stats(self, scores_TE: Tensor, context: RoutingContext) -> Tensor | None:
        """Return what ``route`` must know of all ranks' tokens: float64 [S, E], summed over ranks; None = nothing."""
        return None

    def random_keys(self, like_TE: Tensor, context: RoutingContext) -> Tensor | None:
        """The random numbers by which ``route`` decides for scores of this shape: float32 [T, E]; None = by none."""
        return None

    def check(self, scores_TE: Tensor, context: RoutingContext) -> None:
        """Raise ValueError when this policy cannot route these scores in this context."""
        check_inputs(scores_TE, context)

    def check_model(self, num_experts: int, top_k: int) -> None:
        """Raise ValueError where a field counts more experts than a config's model has.

        ``route`` itself takes more as all: one policy may serve layers of several sizes.
        """
        for field in self.experts_in:
            counts = getattr(self, field)
            most = max(counts) if isinstance(counts, ByLayer) else counts or 0
            if most > num_experts:
                raise UserError(f"expected at most the model's {num_experts} experts, got {most}", field)

    def most_experts(self, num_experts: int, context: RoutingContext) -> int:
        """The most experts that a token may be given: all, unless a policy promises less.

        A dispatcher that sets aside places for a token's experts asks for it (DeepEP's).
        """
        return num_experts

    def most_pairs(self, num_tokens: int, num_experts: int, context: RoutingContext) -> int | None:
        """The most pairs that may be chosen for ``num_tokens`` tokens; None = unknown, so that they are counted.

        A dispatcher sets aside as many rows (``layer.components``) until the host knows how many were chosen.
        """
        of_token = self.most_experts(num_experts, context)
        return context.num_valid(num_tokens) * of_token if of_token < num_experts else None

    @cached_property
    def by_layer(self) -> dict[str, ByLayer]:
        """The fields that differ by layer."""
        values_of = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in values_of.items() if isinstance(value, ByLayer)}

    @property
    def layered(self) -> dict[str, int]:
        """The fields that differ by layer, and of how many MoE layers they speak."""
        return {name: len(values) for name, values in self.by_layer.items()}

    @cached_property
    def _of_layers(self) -> list[Self]:
        """The policy of each MoE layer."""
        rows = zip(*self.by_layer.values(), strict=True)
        return [replace(self, **dict(zip(self.by_layer, row, strict=True))) for row in rows]

    def in_layer(self, layer_fraction: float) -> Self:
        """The policy with the values of one layer (``RoutingContext.layer_fraction``), which routes there.

        Raises:
            ValueError: there are values for another number of layers.
        """
        if not self.by_layer:
            return self
        return self._of_layers[layer_at(layer_fraction, len(self._of_layers), ", ".join(self.by_layer))]

    def settings(self) -> list[Setting]:
        """The fields in their order; the name is none."""
        values = {**asdict(self), **{name: values.bands() for name, values in self.by_layer.items()}}
        return [
            Setting(
                field.name,
                values[field.name],
                is_default=getattr(self, field.name) == field.default,
                is_by_layer=field.name in self.by_layer,
                is_file=field.name in self.file_fields,
            )
            for field in fields(self)
        ]

    def params(self) -> dict[str, object]:
        """The fields as a JSON-ready dict, without the name. Ids of cases follow from it."""
        return params_of(self.settings())


def layer_at(layer_fraction: float, num_layers: int, fields: str) -> int:
    """The MoE layer that stands there in the depth of a model of so many; ValueError: none does."""
    layer = round(layer_fraction * num_layers)
    if layer >= num_layers or abs(layer_fraction * num_layers - layer) > 1e-6:
        expected = f"values for all MoE layers of the model, one of which stands at {layer_fraction:.4g} of its depth"
        raise UserError(f"expected {expected}; got {num_layers}", fields)
    return layer


class SteppedPolicy(Policy):
    """A policy that works by the hot steps of ``policies.steps``, so that exact, faster ones can take their place.

    A subclass implements ``select`` and, where it decides for the whole batch, ``stats``: ``route`` and
    ``batch_stats`` for inputs that were checked before, which is what a timed layer calls.
    """

    steps: ClassVar[Steps] = TORCH

    @property
    def draws(self) -> bool:
        """It decides by random numbers."""
        return False

    @property
    def knows_rank(self) -> bool:
        return self.draws  # numbers of its own for each rank

    def random_keys(self, like_TE: Tensor, context: RoutingContext) -> Tensor | None:
        return context.random_keys(like_TE) if self.draws else None

    def check(self, scores_TE: Tensor, context: RoutingContext) -> None:
        super().check(scores_TE, context)
        if self.draws and context.generator is None and context.random_TE is None:
            raise UserError(f"{self.name} needs a torch.Generator in the context, got None", "generator")

    def most_experts(self, num_experts: int, context: RoutingContext) -> int:
        """As many as the model's own routing, unless a policy says otherwise."""
        return context.top_k

    def most_pairs(self, num_tokens: int, num_experts: int, context: RoutingContext) -> int:
        return context.num_valid(num_tokens) * self.most_experts(num_experts, context)

    def select(self, scores_TE: Tensor, context: RoutingContext, stats_SE: Tensor | None = None) -> Routing:
        raise NotImplementedError

    def stats(self, scores_TE: Tensor, context: RoutingContext) -> Tensor | None:
        return None

    def route(self, scores_TE: Tensor, context: RoutingContext, stats_SE: Tensor | None = None) -> Routing:
        here = self.in_layer(context.layer_fraction)
        here.check(scores_TE, context)
        return here.select(scores_TE, context, stats_SE)

    def batch_stats(self, scores_TE: Tensor, context: RoutingContext) -> Tensor | None:
        here = self.in_layer(context.layer_fraction)
        here.check(scores_TE, context)
        return here.stats(scores_TE, context)

    def in_layer(self, layer_fraction: float) -> Self:
        here = super().in_layer(layer_fraction)
        return here if here is self else here.by(self.steps)

    def by(self, steps: Steps) -> Self:
        """The same policy by other steps, which return the same bits."""
        other = copy.copy(self)
        object.__setattr__(other, "steps", steps)  # no field: it is no part of the value
        return other


def check_inputs(scores_TE: Tensor, context: RoutingContext) -> None:
    """Raise ValueError unless scores and what a batch brings keep the contract. A model's groups are its spec's."""
    if scores_TE.dim() != 2:
        raise UserError(f"scores_TE: expected 2 dimensions [T, E], got {scores_TE.dim()}")
    if scores_TE.dtype != torch.float32:
        raise UserError(f"scores_TE: expected float32, got {scores_TE.dtype}")
    num_tokens, num_experts = scores_TE.shape
    num_ranks = context.num_ranks
    if not 1 <= context.top_k <= num_experts:
        _refuse("top_k", f"1 to {num_experts} (the experts)", context.top_k)
    if num_ranks < 1 or num_experts % num_ranks:
        _refuse("num_ranks", f"a divisor of the {num_experts} experts", num_ranks)
    if not 0 <= context.rank < num_ranks:
        _refuse("rank", f"0 to {num_ranks - 1}", context.rank)
    for name, length in (
        ("bias_E", num_experts),
        ("load_E", num_experts),
        ("token_mask_T", num_tokens),
        ("request_id_T", num_tokens),
        ("modality_T", num_tokens),
    ):
        value = getattr(context, name)
        if value is not None and value.shape != (length,):
            _refuse(name, f"shape ({length},)", tuple(value.shape))
    if context.token_mask_T is not None and context.token_mask_T.dtype != torch.bool:
        _refuse("token_mask_T", "bool", context.token_mask_T.dtype)
    if scores_TE.numel() == 0 or context.top_k_TE is not None:  # Who chose it has seen the scores.
        return
    # One pass over the scores: NaN is both least and largest where there is one, and fails both comparisons.
    least, largest = scores_TE.aminmax()
    if not (bool(least >= 0) and bool(largest < torch.inf)):
        raise UserError("scores_TE: expected finite, non-negative values; got NaN, Inf or a negative score")


def check_routing(routing: object, scores_TE: Tensor) -> None:
    """Raise ValueError unless a policy returned a routing of these scores' shape and of the contract's types."""
    if not isinstance(routing, Routing):
        raise UserError(f"expected a Routing, got {type(routing).__name__}", "route")
    shape = list(scores_TE.shape)
    for name, dtype in (("map_TE", torch.bool), ("weights_TE", torch.float32)):
        value = getattr(routing, name)
        got = f"{value.dtype} {list(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__
        if got != f"{dtype} {shape}":
            raise UserError(f"expected {dtype} {shape}, got {got}", name)


def _refuse(name: str, expected: str, got: object) -> NoReturn:
    raise UserError(f"expected {expected}, got {got}", name)
