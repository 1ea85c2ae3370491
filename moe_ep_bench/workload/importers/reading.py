"""What importers share: the user's facts about a recording, lines of JSON, and arrays held against what is expected.

Pickles are never read. Every error is a ValueError of one line that names the file and the place in it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moe_ep_bench.errors import UserError, brief, naming
from moe_ep_bench.files import is_whole_number, parse_json
from moe_ep_bench.models import ModelSpec, load_model
from moe_ep_bench.workload.writer import TraceWriter


@dataclass(frozen=True)
class ImportOptions:
    """Facts about a recording, as options of ``trace import`` give them, because its file does not.

    Attributes:
        preset: the model: a preset's name, its config.json, or a YAML file of the form of a preset.
        phase: prefill, decode or training.
        domain: part of a published recording; of others, what the texts are about.
    """

    preset: str = ""
    phase: str = ""
    domain: str = "unstated"
    licence: str = "unstated"

    def describe(self, writer: TraceWriter, score: str) -> ModelSpec:
        """Tell a writer of the model, which is returned, and what scores are. Raises ValueError: no such preset."""
        with naming("preset"):
            is_file = self.preset.endswith(".yaml")
            model = ModelSpec.load(self.preset) if is_file else load_model(self.preset)
        sizes = {"num_experts": model.num_experts, "top_k": model.top_k}
        writer.describe(**sizes, where=f"preset {self.preset}", model=model.name, score=score)
        return model


def lines(path: Path) -> Iterator[tuple[str, bytes]]:
    """Yield a file's lines without their ends, each with its place (``file:line``)."""
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            yield f"{path}:{number}", line.rstrip(b"\r\n")


def json_objects(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the JSON object of every line but empty ones, each with its place. Raises ValueError: a line is none."""
    for where, line in lines(path):
        if line.strip():
            record = parse_json(line, where)
            if not isinstance(record, dict):
                raise UserError(f"{where}: expected an object, got {brief(record)}")
            yield where, record


def whole_number(record: Any, name: str, where: str) -> int:
    """Read a whole number from 0 on of a JSON object. Raises ValueError: it is none, or there is no such object."""
    value = record.get(name) if isinstance(record, dict) else None
    if not is_whole_number(value):
        raise UserError(f"{where}: {name}: expected a whole number from 0, got {brief(value)}")
    return value


def checked(value: Any, where: str, shape: tuple[int | None, ...], kinds: str = "iu") -> NDArray[Any]:
    """Hold an array, or nested lists, against what a format expects.

    Args:
        shape: lengths by dimension, of which None takes any.
        kinds: of numpy's types; whole numbers, or with ``f`` real ones too.

    Raises:
        ValueError: another shape, or other things than numbers.
    """
    try:
        array = np.asarray(value)
    except (ValueError, OverflowError):
        raise UserError(f"{where}: expected lists of equal length, got {brief(value)}") from None
    lengths = zip(shape, array.shape, strict=False)
    fits = len(shape) == array.ndim and all(length in (None, got) for length, got in lengths)
    if not fits or array.dtype.kind not in kinds:
        wanted = "x".join("n" if length is None else str(length) for length in shape)
        got = f"{array.dtype} of shape {array.shape}" if value is array else brief(value)
        raise UserError(f"{where}: expected {'' if 'f' in kinds else 'whole '}numbers of shape {wanted}, got {got}")
    return array
