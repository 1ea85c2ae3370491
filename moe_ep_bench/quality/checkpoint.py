"""Read a language model, its tokenizer and its text from disk; find its routers, and what they choose by.

A checkpoint is a folder as ``save_pretrained`` and the Hugging Face hub leave it; nothing is fetched, no code of its
own is run. What is wrong is found before the weights are read: the model is first built without any (on torch's meta
device), to see whether its routers are known. Weights that the folder lacks are an error, for transformers would
make up random ones and go on.

Text is cut into sequences of one length, one after the other, across its lines: the usual way to take a language
model's cross-entropy on a file. Tokenizers take it in pieces that end with a line.

In transformers 5 every family of MoE models has its router in a module of its own, which returns logits, weights and
expert ids; the experts, a sibling module, take the latter two. So a router is found by the name of its class. How it
chooses (score function, normalisation, groups, selection bias, scale) follows from the model's config by the rules that
all shapes here are read by (``models.hf_config``). No modelling code is copied: logits come from the module itself, and
what is said of its choice is held against the ids that it returns (tests/test_hf_routed.py).

Shapes: S = tokens of a sequence, T = tokens, E = experts, K = top_k, G = groups.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from moe_ep_bench.errors import UserError, brief
from moe_ep_bench.models import ModelSpec, scores_from_logits, spec_of
from moe_ep_bench.policies.contract import RoutingContext
from moe_ep_bench.policies.selection import preference, top_k_map
from moe_ep_bench.workload.trace import TraceWriter, score_words

Dtype = Literal["auto", "float32", "bfloat16"]
_CHARACTERS_AT_ONCE = _HASHED_BYTES = 2**20
# Nothing that a folder names is imported; without this word transformers would ask on the terminal.
_NO_CODE = {"local_files_only": True, "trust_remote_code": False}


@dataclass(frozen=True)
class Checkpoint:
    """A folder with a model whose routers are known; ``load`` reads its weights."""

    path: Path

    @staticmethod
    def open(path: Path) -> Checkpoint:
        """Look at a folder, without reading weights.

        Raises:
            ValueError: one line that says what is missing or wrong, and what is allowed; transformers is not installed.
        """
        if not (path / "config.json").is_file():
            got = "one without config.json" if path.is_dir() else "a file" if path.exists() else "none"
            raise UserError(f"{path}: expected a checkpoint's folder, got {got}")
        checkpoint = Checkpoint(path)
        _ = checkpoint.moe_layers, checkpoint.weight_files, checkpoint.tokenizer
        return checkpoint

    @property
    def name(self) -> str:
        return self.path.resolve().name

    @cached_property
    def config(self) -> Any:
        """The model's configuration, as transformers reads it."""
        transformers = import_transformers()
        with _one_line(f"{self.path}: cannot read config.json: "):
            return transformers.AutoConfig.from_pretrained(self.path, **_NO_CODE)

    @cached_property
    def moe_layers(self) -> list[MoELayer]:
        """The MoE layers of the model, without weights."""
        config, transformers = self.config, import_transformers()
        with _one_line(f"{self.path}: "), torch.device("meta"):
            return find_moe_layers(transformers.AutoModelForCausalLM.from_config(config, trust_remote_code=False))

    @cached_property
    def tokenizer(self) -> Any:
        transformers = import_transformers()
        with _one_line(f"{self.path}: expected a tokenizer beside the model; "):
            tokenizer = transformers.AutoTokenizer.from_pretrained(self.path, **_NO_CODE)
        if not tokenizer("words", add_special_tokens=False)["input_ids"]:  # made up, without a vocabulary
            raise UserError(f"{self.path}: expected a tokenizer beside the model, got no vocabulary")
        return tokenizer

    @cached_property
    def weight_files(self) -> list[Path]:
        files = sorted(file for file in self.path.glob("*.safetensors") if file.is_file())
        if not files:
            raise UserError(f"{self.path}: expected weights in *.safetensors, got none")
        return files

    def load(self, dtype: Dtype, device: str) -> Any:
        """The model with its weights, for inference. Raises ValueError: weights that cannot be read, or lack some."""
        transformers = import_transformers()
        with _one_line(f"{self.path}: cannot load the model: "):
            model, loading = transformers.AutoModelForCausalLM.from_pretrained(
                self.path, **_NO_CODE, use_safetensors=True, dtype=dtype, output_loading_info=True
            )
        for kind in ("missing_keys", "mismatched_keys"):
            if names := sorted(map(str, loading[kind])):
                raise UserError(
                    f"{self.path}: expected all weights of {type(model).__name__}; {kind.split('_')[0]}: {names[0]}"
                    + (f" and {len(names) - 1} more" if len(names) > 1 else "")
                )
        return model.to(device).eval().requires_grad_(False)

    def check_length(self, length: int, name: str) -> None:
        """Raise ValueError where the model does not know so many positions."""
        most = getattr(self.config, "max_position_embeddings", None)
        if most is not None and length > most:
            raise UserError(f"expected at most {most}, the positions that {self.name} knows, got {length}", name)

    def sequences(self, text: Path, length: int, number: int | None = None) -> torch.Tensor:
        """A text's first sequences, or all, without special tokens; what is left at the end is dropped: int64 [B, S].

        Raises:
            ValueError: the file cannot be read as UTF-8, or is too short.
        """
        tokens: list[int] = []
        try:
            with text.open(encoding="utf-8") as file:
                while number is None or len(tokens) < number * length:
                    if not (piece := file.read(_CHARACTERS_AT_ONCE)):
                        break
                    piece += file.readline(_CHARACTERS_AT_ONCE)
                    tokens += self.tokenizer(piece, add_special_tokens=False, verbose=False)["input_ids"]
        except (OSError, UnicodeError) as error:
            raise UserError(f"{text}: cannot read the text: {error}") from None
        found = len(tokens) // length
        if found < (needed := number or 1):
            raise UserError(f"{text}: expected a text of at least {needed} sequences of {length} tokens, got {found}")
        return torch.tensor(tokens[: (number or found) * length], dtype=torch.int64).view(-1, length)

    @cached_property
    def fingerprint(self) -> str:
        """16 hex digits of what the folder holds: its small files; of weights their sizes, first and last MiB."""
        digest = hashlib.sha256()
        for file in sorted(self.path.glob("*.json")):
            digest.update(file.name.encode() + file.read_bytes())
        for file in self.weight_files:
            size = file.stat().st_size
            digest.update(f"{file.name} {size}".encode())
            with file.open("rb") as weights:
                digest.update(weights.read(_HASHED_BYTES))
                weights.seek(max(0, size - _HASHED_BYTES))
                digest.update(weights.read())
        return digest.hexdigest()[:16]


def import_transformers() -> Any:
    """The package, told to speak of errors only. Raises ValueError: it is not installed."""
    try:
        import transformers
    except ImportError as error:
        raise UserError(
            f"expected the package transformers, which checkpoints need: pip install 'moe-ep-bench[models]' ({error})"
        ) from None
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    return transformers


@contextlib.contextmanager
def _one_line(what: str) -> Iterator[None]:
    """Raise a library's error, whatever it is, as ``what`` and its first line, without its advice to look online."""
    try:
        yield
    except Exception as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        said = "needs its own code, which is not run" if "trust_remote_code" in str(error) else lines[0].strip()
        raise UserError(f"{what}{brief(said, 300, quoted=False)}") from None


# ---- routers ---------------------------------------------------------------------------------------------------------

_ROUTER = re.compile(r"top_?k_?router$|^HunYuanMoEV1Gate$", re.IGNORECASE)
_BIAS = "e_score_correction_bias"
# Units in the last place of its best key by which kernels may round an expert's score or a group's sum differently.
_ROUNDING = 4 * 2**-23


class Choice(NamedTuple):
    """The choice of a layer's own router for tokens.

    Attributes:
        scores_TE: float32, as a policy sees them: their top-k is the choice, also where they tie.
        own_TE: bool, the experts that it chose.
    """

    scores_TE: Tensor
    own_TE: Tensor


@dataclass(frozen=True, eq=False)
class MoELayer:
    """One MoE layer of a model: its router, and the experts that take what it chooses.

    Attributes:
        name: of the router among the model's modules.
        number: of the decoder layer, dense layers counted.
        fraction: where among the model's MoE layers this one stands, 0 to below 1.
        spec: how the model's routers choose.
    """

    name: str
    number: int
    fraction: float
    router: Any
    experts: Any
    spec: ModelSpec

    @property
    def num_experts(self) -> int:
        return self.spec.num_experts

    @property
    def top_k(self) -> int:
        return self.spec.top_k

    def __post_init__(self) -> None:
        """Refuse groups that no policy can follow: a policy sums a group's best K // top_groups, as Megatron-Core."""
        spec = self.spec
        if self.groups is not None and spec.top_k // self.groups[1] != spec.group_score_experts:
            raise UserError(
                f"{self.name}: expected top_k ({spec.top_k}) over topk_group ({self.groups[1]}) to be "
                f"{spec.group_score_experts}, by which {spec.name} compares its {self.groups[0]} groups"
            )

    @property
    def groups(self) -> tuple[int, int] | None:
        """Number of groups, and how many of them a token may choose from; None = no restriction."""
        groups, top = self.spec.num_groups, self.spec.top_groups
        return None if groups is None or top is None or groups == top else (groups, top)

    def context(self, num_ranks: int) -> RoutingContext:
        """The fields of a context that all tokens of this layer share."""
        num_groups, top_groups = self.groups or (None, None)
        return RoutingContext(
            top_k=self.top_k,
            num_ranks=num_ranks,
            normalize=self.spec.normalize,
            bias_E=getattr(self.router, _BIAS).float() if self.spec.selection_bias else None,
            num_groups=num_groups,
            top_groups=top_groups,
            # Where the router has none, the layer multiplies the experts' sum.
            scale=self.spec.routed_scale if hasattr(self.router, "routed_scaling_factor") else 1.0,
            layer_fraction=self.fraction,
        )

    def describe(self, writer: TraceWriter, **facts: str) -> None:
        """Tell the writer of a recording how the model's routers choose."""
        score = score_words(self.spec.score_function)
        writer.describe(
            num_experts=self.num_experts, top_k=self.top_k, where=self.name, score=score, licence="unstated", **facts
        )

    def choice(self, logits_TE: Tensor, ids_TK: Tensor) -> Choice:
        """The router's choice, from its logits and expert ids.

        A router in bfloat16 gives many experts equal scores, and ``torch.topk`` breaks ties as it likes. The experts
        that it took among equals are shown ahead by one unit in the last place, or by a few where scores with a bias or
        sums of groups are equal but for rounding. Then their top-k is the router's choice.

        Raises:
            ValueError: scores that are no numbers, or expert ids that contradict them: a kernel that read other logits
                chose them.
        """
        scores_TE = scores_from_logits(logits_TE, self.spec.score_function)
        if not bool(scores_TE.isfinite().all()):
            raise UserError(f"{self.name}: scores_TE: expected finite numbers, got others")
        own_TE = torch.zeros_like(scores_TE, dtype=torch.bool).scatter(1, ids_TK.long(), True)
        if len(token_U := self._undecided(scores_TE, own_TE)):
            scores_TE[token_U] = self._ahead(scores_TE[token_U], own_TE[token_U], token_U)
        return Choice(scores_TE, own_TE)

    def _undecided(self, scores_TE: Tensor, own_TE: Tensor) -> Tensor:
        """Tokens of which an expert that was not chosen scores as much as one that was; of groups, all: int64 [U]."""
        if self.groups is not None:
            return torch.arange(len(scores_TE), device=scores_TE.device)
        keys_TE = preference(scores_TE, self.context(1))
        least_T = keys_TE.masked_fill(~own_TE, torch.inf).amin(dim=1)
        is_clear_T = least_T > keys_TE.masked_fill(own_TE, -torch.inf).amax(dim=1)
        return (~is_clear_T | (own_TE.sum(dim=1) != self.top_k)).nonzero().flatten()

    def _ahead(self, scores_UE: Tensor, own_UE: Tensor, token_U: Tensor) -> Tensor:
        """Scores whose top-k is the router's choice, which may lift an expert by rounding and no more."""
        context = self.context(1)
        wrong_U = (top_k_map(scores_UE, context) != own_UE).any(dim=1)
        if not bool(wrong_U.any()):
            return scores_UE
        rounding_U1 = _ROUNDING * preference(scores_UE, context).abs().amax(dim=1, keepdim=True)
        for ahead_UE in (torch.nextafter(scores_UE, torch.full_like(scores_UE, torch.inf)), scores_UE + rounding_U1):
            scores_UE = torch.where(wrong_U.unsqueeze(1) & own_UE, ahead_UE, scores_UE)
            best_UE = top_k_map(scores_UE, context)
            wrong_U = (best_UE != own_UE).any(dim=1)
            if not bool(wrong_U.any()):
                return scores_UE
        row = int(wrong_U.int().argmax())
        best, got = (brief(of_row.nonzero().flatten().tolist()) for of_row in (best_UE[row], own_UE[row]))
        raise UserError(
            f"{self.name}: ids_TK: expected the {self.top_k} best experts by the logits, {best}, got {got} of token "
            f"{int(token_U[row])}: the router read other logits"
        )


def find_moe_layers(model: torch.nn.Module) -> list[MoELayer]:
    """All MoE layers of a model, in its order.

    Raises:
        ValueError: no routers, or a family that is not known.
    """
    where = type(model).__name__
    found = [(name, module) for name, module in model.named_modules() if _ROUTER.search(type(module).__name__)]
    if not found:
        raise UserError(f"{where}: expected routers of classes ...TopKRouter, as transformers 5 has them; got none")
    config: Any = model.config
    values = config.to_dict()
    spec, layers = spec_of(values, where), []
    for place, (name, router) in enumerate(found):
        experts = model.get_submodule(name.rpartition(".")[0]).experts
        number = re.search(r"\.layers\.(\d+)\.", f".{name}")
        assert number is not None, name
        layer = MoELayer(name, int(number[1]), place / len(found), router, experts, spec)
        if spec.selection_bias != hasattr(router, _BIAS):
            raise UserError(f"expected {_BIAS}, by which {values['model_type']} selects experts", name)
        layers.append(layer)
    return layers
