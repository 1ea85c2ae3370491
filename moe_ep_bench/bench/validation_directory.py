"""The files of one ``validate``: two results directories, and what sets them against each other."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
from pydantic import BaseModel, Field, ValidationError

from moe_ep_bench.errors import UserError
from moe_ep_bench.files import inside, read_json, write_json

ALONE_SCHEMA = pa.schema(
    [
        ("comparison_id", pa.string()),
        ("case_id", pa.string()),
        ("rank", pa.int32()),
        ("batch", pa.int32()),
        ("repetition", pa.int32()),
        ("num_rows", pa.int64()),
        ("time_us", pa.float64()),
    ]
)


class _Pairs(BaseModel):
    pairs: list[tuple[str, str]] = Field(min_length=1)
    links: str


class ValidationDirectory:
    """Where things are; ``pairs`` says which comparison of ``real`` is which of ``emulated``, whose ids differ."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.links = root / "links.yaml"
        self.real, self.emulated = root / "real", root / "emulated"
        self.experts_alone = root / "experts-alone.parquet"
        self.pairs, self.text = root / "validation.json", root / "validation.txt"
        self.cases_table, self.phases_table = root / "validation.csv", root / "validation-phases.csv"
        self.figures = root / "figures"

    def write_pairs(self, pairs: Sequence[tuple[str, str]], links: str) -> None:
        """Say which comparisons belong together, (real, emulated) ids, and where the links are from, in words."""
        write_json(self.pairs, {"pairs": list(map(list, pairs)), "links": links})

    def read_pairs(self) -> tuple[list[tuple[str, str]], str]:
        """What ``write_pairs`` wrote.

        Raises:
            ValueError: one line that names the file: it is missing or damaged.
        """
        try:
            described = _Pairs.model_validate(read_json(inside(self.root, self.pairs)))
            return described.pairs, described.links
        except OSError:
            raise UserError(f"{self.pairs}: missing; `moe-ep-bench validate` writes it after both runs") from None
        except (ValueError, ValidationError):
            raise UserError(f"{self.pairs}: damaged, or not written by this program") from None
