"""Read YAML files into strict pydantic models, with one line for every error.

A preset is a YAML file of a folder of data/ that users name without its ending. Its class says the folder:

``models``   ``models.ModelSpec``           shape of a model
``devices``  ``cost_model.devices.Device``  roofline of a device that is not here
``links``    ``cost_model.links.Links``     links between ranks that are not there
``skews``    ``workload.targets.Skews``     targets for synthetic workloads, by the model's name

Policies stand in all files alike: a name and fields, where a list in place of a value means one policy for each.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self, TypeVar, get_args

from pydantic import AfterValidator, BaseModel, ConfigDict, PlainSerializer, ValidationError

from moe_ep_bench.errors import UserError, brief, did_you_mean, naming, problem_error
from moe_ep_bench.files import parse_yaml, read_text
from moe_ep_bench.policies import Policy, make_policy

# Values of keys that take names too: a file of links or a device, or what a policy reads.
NAMES_FILE = re.compile(r"\.(yaml|safetensors)$")
# Bounds of whole numbers that have no other, so that a slip of the pen is a line and no endless plan: of sizes, of what
# is done one after the other, and of seeds.
MOST, MOST_RUNS, MOST_SEED = 2**31, 2**16, 2**63 - 1
DATA_DIR = Path(__file__).resolve().parent / "data"


class Strict(BaseModel):
    """Frozen, without unknown keys, infinities or NaN."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


_Kind = TypeVar("_Kind", bound=Strict)


class Preset(Strict):
    """What a YAML file of ``data/<FOLDER>/`` holds."""

    FOLDER: ClassVar[str]

    @classmethod
    def folder(cls) -> Path:
        return DATA_DIR / cls.FOLDER

    @classmethod
    def names(cls) -> list[str]:
        return sorted(path.stem for path in cls.folder().glob("*.yaml"))

    @classmethod
    @cache
    def named(cls, name: str, otherwise: str = "") -> Self:
        """Load a preset by its name.

        Raises:
            ValueError: one line: what is wrong with the file, or that there is none; then it lists ``otherwise`` and
                the names there are.
        """
        names = cls.names()
        if name not in names:
            raise UserError(
                f"expected {otherwise}one of {', '.join(names)}; got {brief(name)}{did_you_mean(name, names)}"
            )
        return cls._read(cls.folder() / f"{name}.yaml")

    @classmethod
    def load(cls, name_or_path: str) -> Self:
        """Load a preset by its name, or any file of the same form by its path, which ends in .yaml.

        Raises:
            ValueError: as ``named``.
        """
        path = Path(name_or_path)
        return cls._read(path) if path.suffix == ".yaml" else cls.named(name_or_path, "a path of a .yaml or ")

    @classmethod
    def _read(cls, path: Path) -> Self:
        return validated(cls, read_yaml(path), path)


def read_yaml(path: Path, unreadable: str = "cannot be read") -> dict[str, Any]:
    """Read the keys and values of a YAML file.

    Raises:
        UserError: one line that names the file.
    """
    try:
        text = read_text(path)
        with naming(str(path)):
            fields = parse_yaml(text)
    except OSError as error:
        raise UserError(f"{path}: {unreadable}: {error.strerror}") from None
    except ValueError as error:
        raise UserError(str(error)) from None
    if fields is None:
        raise UserError(f"{path}: expected keys with values, but the file is empty")
    if not isinstance(fields, dict):
        raise UserError(f"{path}: expected keys with values, got {type(fields).__name__}")
    return fields


def validated(kind: type[_Kind], fields: Any, where: object = "", *, strict: bool = True) -> _Kind:
    """Check the fields of a file.

    Args:
        where: the file; empty where a caller names it.
        strict: types are JSON's: neither true nor text is a number.

    Raises:
        UserError: one line: the file, the first unknown or else wrong key, what was expected and its value.
    """
    try:
        return kind.model_validate_json(json.dumps(fields), strict=strict)
    except ValidationError as error:
        problems = error.errors(include_url=False)
        # A key that is not known may be the one that is missing, misspelt.
        problem = next((other for other in problems if other["type"] == "extra_forbidden"), problems[0])
        raise _error_of(kind, fields, problem, str(where)) from None


def _error_of(kind: type[BaseModel], fields: Any, problem: Mapping[str, Any], where: str) -> UserError:
    """One error of pydantic's, with the dotted key as files have it."""
    models, value, keys, known = [kind], fields, [], list[str]()
    for part in problem["loc"]:
        there = {name: field for model in models for name, field in model.model_fields.items()}
        known = [*there, *(() if keys else getattr(kind, "BESIDE", ()))]
        models = models_in(there[part].annotation) if part in there else models
        try:
            value = value[part]
        except (LookupError, TypeError):
            continue  # Pydantic's name for a member of a union, or a key that is missing.
        keys.append(str(part))
    if problem["type"] == "missing":
        keys.append(str(problem["loc"][-1]))
    if problem["type"] == "extra_forbidden":
        return UserError(unknown_key(keys[-1], known), ".".join(keys), where=where)
    return problem_error(problem, ".".join(keys), where)


def unknown_key(key: str, known: Iterable[str]) -> str:
    """What is said of a key that is none of ``known``: what there is."""
    names = list(known)
    return f"no such key; expected one of {', '.join(names)}{did_you_mean(key, names)}"


def models_in(annotation: Any) -> list[type[BaseModel]]:
    """The models of a field's annotation: the annotation itself, or members of its union or tuple."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for part in get_args(annotation) for model in models_in(part)]


# ---- policies --------------------------------------------------------------------------------------------------------


def expand_policies(entries: Iterable[Mapping[str, Any]]) -> list[Policy]:
    """Make every policy of a file's entries once, in their order, with lists as values expanded.

    Raises:
        ValueError: naming the field and what is allowed.
    """
    return list(dict.fromkeys(map(make_policy, spelled_out(entries))))


def spelled_out(entries: Iterable[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """Entries of one policy each: lists as values expanded."""
    for entry in entries:
        choices = [value if isinstance(value, list) else [value] for value in entry.values()]
        yield from (dict(zip(entry, values, strict=True)) for values in itertools.product(*choices))


def _check_entry(entry: dict[str, Any]) -> dict[str, Any]:
    expand_policies([entry])
    return entry


def _without_folders(value: Any) -> Any:
    """Results say of a policy's files their names alone."""
    if isinstance(value, dict):
        return {key: _without_folders(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_without_folders(inner) for inner in value]
    return Path(value).name if isinstance(value, str) and NAMES_FILE.search(value) else value


PolicyEntry = Annotated[
    dict[str, Any], AfterValidator(_check_entry), PlainSerializer(_without_folders, when_used="json")
]
