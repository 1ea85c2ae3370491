"""The numbers of this program do not move: routing, modelled times, answers, claims and figures beside frozen ones.

``tests/goldens/`` holds what the program gave when its numbers were frozen: a zip of CSV tables per run. Whole numbers
and words must be equal, floats to ``RTOL``. Frozen tables hold neither case ids nor file names: a row is found by its
policy, rank, batch and the like. Only the section "Reading results" knows how they lie on disk.

``python tests/goldens/make.py`` freezes what the present code gives. Do so only where a number should change.
"""

from __future__ import annotations

import copy
import hashlib
import io
import json
import os
import re
import shutil
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import yaml
from undrawn import nothing_drawn

from moe_ep_bench.analysis.compare import write_validation
from moe_ep_bench.analysis.paper_claims import load_claims, write_claims
from moe_ep_bench.bench.commands import route
from moe_ep_bench.cli import main
from moe_ep_bench.facts import CaseFacts
from moe_ep_bench.facts.words import case_label
from moe_ep_bench.results import ValidationDirectory

TESTS = Path(__file__).parent
GOLDENS = TESTS / "goldens"
ROOT = TESTS.parent
REFERENCE = ROOT / "results" / "reference"
TRACES = TESTS.parents[1] / "shared" / "traces"

# Sums in float64 and nine written digits differ by far less between machines.
RTOL = 1e-6
# What is left where equal numbers are subtracted.
ATOL = 1e-9

Spec = dict[str, Any]


@dataclass(frozen=True)
class Golden:
    """A command on a config, and which of its tables are frozen.

    Attributes:
        config: what the config says, or a file whose values are changed.
        points: runs of their own by name, each with the dotted keys that it changes.
        tables: keys of ``READERS``.
        tolerance: relative and absolute.
    """

    command: str
    config: Spec | str
    tables: list[str]
    points: dict[str, Spec] = field(default_factory=lambda: {"": {}})
    tolerance: tuple[float, float] = (RTOL, ATOL)

    @property
    def traces(self) -> list[str]:
        """Recordings without which this cannot be run."""
        return re.findall(rf"{TRACES}[\w/.-]+", json.dumps([self.config, self.points]))


def read_runs() -> dict[str, Golden]:
    """The runs of goldens/runs.yaml by name."""
    text = (GOLDENS / "runs.yaml").read_text().replace("$TRACES", str(TRACES)).replace("$TESTS", str(TESTS))
    return {name: Golden(**run) for name, run in yaml.safe_load(text)["runs"].items()}


def joined(policies: list[Any]) -> list[Spec]:
    """Policies of lists within a list, one after the other."""
    return [spec for part in policies for spec in (joined(part) if isinstance(part, list) else [part])]


RUNS = read_runs()

# Results whose figures, and whose tables of claims and of validation, are made anew; tests/test_golden_figures.py.
REFERENCES = {
    f"reference-{name.replace('/', '-')}": REFERENCE / name
    for name in (
        "decode-2cpu",
        "deepseek-v2-lite-recorded-2cpu",
        "quality-small-2cpu",
        "quickstart-2cpu",
        "validate-2cpu",
        "validate-2cpu/emulated",
        "validate-2cpu/real",
        "validate-model-2cpu",
        "validate-model-2cpu/emulated",
        "validate-model-2cpu/real",
        "whatif-skew",
        "whole-capacity-modelled",
    )
}


# ---- Reading results: all that knows how commands are called and how results lie on disk ----------------------------

# What the goldens call a word in any table (an expression) that the program has another name for.
WORDS: dict[str, str] = {
    "^inconclusive$": "cannot say",
    r"( tokens, EP \d+), no skew$": r"\1, synthetic, unskewed",
    ", no skew$": ", unskewed",
}

IDENTITY = ["run_id", "case_id", "comparison_id", "mode", "subject", "backend", "model", "reason", "num_ranks"]
CASE = ["label", "params"]


def _parts(directory: Path, folder: str) -> pd.DataFrame:
    """The rows of all cases in one folder, with what names a case in place of its id."""
    cases = json.loads((directory / "run.json").read_text())["cases"]
    found = pd.concat(map(pd.read_parquet, sorted((directory / folder).glob("*.parquet"))))
    parts = []
    for case_id, case in cases.items():
        rows = found[found["case_id"] == case_id]
        facts = CaseFacts.model_validate(case)
        rows.insert(0, "label", case_label(facts))
        rows.insert(1, "params", json.dumps(facts.policy_params, sort_keys=True))
        parts.append(rows.drop(columns=[*IDENTITY, "policy", "policy_params"], errors="ignore"))
    return pd.concat(parts, ignore_index=True)


def read_routing(directory: Path) -> pd.DataFrame:
    """A row per case, layer, rank and batch: every metric; loads of experts as digests, loads of ranks as they are."""
    rows = _parts(directory, "routing")
    for name in rows.columns.intersection(["load_E", "image_load_E"]):
        rows[name] = [None if load is None else digest(load) for load in rows[name]]
    if "load_R" in rows:
        rows["load_R"] = [" ".join(map(str, load)) for load in rows["load_R"]]
    return rows.drop(columns="slot_load_P", errors="ignore")  # in whose stead load_R and times are frozen


def read_times(directory: Path) -> pd.DataFrame:
    """A row per case, rank, batch, iteration, kind, layer and phase that takes time.

    ``layer`` is of whole models, and there only where a layer is what takes the time; their phases are of single
    layers, without sums over them.
    """
    rows = _parts(directory, "cases")
    rows = rows[rows["time_us"].abs() > ATOL]
    return rows.drop(columns=["launch", "host_us", "thread_cpu_us"])


def read_answers(directory: Path) -> pd.DataFrame:
    """A row per case and sequence: what a model's answers lost."""
    named = ["label", "params", "status", "batch", "stage", "item", "num_tokens"]
    rows = _parts(directory, "quality").pivot(index=named, columns="metric", values="value").reset_index()
    return rows.rename(columns={"item": "sequence"})


def read_claims(directory: Path) -> pd.DataFrame:
    """A row per claim, policy and traffic: the paper's number and ours."""
    rows = pd.read_csv(directory / "claims.csv")
    return rows.drop(columns=["comparison", "ours_of", "mode", "device", "links"])


def read_figures(directory: Path) -> dict[str, pd.DataFrame]:
    """The numbers of every figure in a directory, by the figure's name."""
    return {path.stem: pd.read_csv(path) for path in sorted(directory.glob("*.csv"))}


def tables_of_reference(directory: Path, folder: Path) -> dict[str, pd.DataFrame]:
    """Draw the figures of a results directory, or write its tables of validation, and read their numbers.

    Args:
        folder: an empty one.
    """
    copy = shutil.copytree(directory, folder / "copy", ignore=shutil.ignore_patterns("figures", "*.csv", "*.txt"))
    if (files := ValidationDirectory(copy)).pairs.is_file():
        write_validation(copy)
        return {"validation": pd.read_csv(files.table)}
    assert main(["plot", str(copy), "--out", str(folder / "figures"), "--format", "png"]) == 0
    tables = {f"figure-{name}": rows for name, rows in read_figures(folder / "figures").items()}
    if (copy / "claims.json").is_file():
        write_claims(load_claims(copy))
        tables["claims"] = read_claims(copy)
    return tables


def tables_of(golden: Golden, directory: Path) -> dict[str, pd.DataFrame]:
    """What one run left, by the table's name."""
    if golden.tables == ["figures"]:
        return {f"figure-{name}": rows for name, rows in read_figures(directory / "figures").items()}
    return {name: READERS[name](directory) for name in golden.tables}


READERS = {
    "routing": read_routing,
    "times": read_times,
    "answers": read_answers,
    "answers-routing": read_routing,
    "claims": read_claims,
}
# What finds a row of a table. Of others all their words do, and where those are equal the order of their numbers.
KEYS = {
    "routing": ["point", *CASE, "layer", "rank", "batch"],
    "times": ["point", *CASE, "rank", "batch", "iteration", "kind", "layer", "phase"],
    "answers": ["point", *CASE, "stage", "sequence"],
    "answers-routing": ["point", *CASE, "stage", "layer", "batch"],
}


# ---- Running and comparing ------------------------------------------------------------------------------------------


def digest(load_E: Sequence[int]) -> str:
    """Short and equal for equal whole numbers; never mistaken for a number itself."""
    return "x" + hashlib.sha256(np.asarray(load_E, dtype="<i8").tobytes()).hexdigest()[:12]


def missing_traces(golden: Golden) -> list[str]:
    return [path for path in golden.traces if not Path(path).is_file()]


def fresh_tables(golden: Golden, folder: Path) -> dict[str, pd.DataFrame]:
    """Run a golden's command on all its points; its tables as they would be frozen."""
    found: dict[str, list[pd.DataFrame]] = {}
    for number, (point, changes) in enumerate(golden.points.items()):
        config, out = folder / f"{number}.yaml", folder / str(number)
        config.write_text(yaml.safe_dump(config_of(golden, changes)))
        with nothing_drawn():
            if golden.command == "route" and "figures" not in golden.tables:
                route(config, out, ())  # without its table and figures
            else:
                assert main([golden.command, str(config), "--out", str(out)]) == 0
        for name, rows in tables_of(golden, out).items():
            found.setdefault(name, []).append(rows.assign(point=point))
    return {name: as_frozen(pd.concat(rows, ignore_index=True)) for name, rows in found.items()}


def fresh_reference(name: str, folder: Path) -> dict[str, pd.DataFrame]:
    """A reference's tables as they would be frozen."""
    with nothing_drawn():
        tables = tables_of_reference(REFERENCES[name], folder)
    return {table: as_frozen(rows) for table, rows in tables.items()}


def config_of(golden: Golden, changes: Spec) -> Spec:
    config = golden.config
    values = yaml.safe_load((ROOT / config).read_text()) if isinstance(config, str) else copy.deepcopy(config)
    values.setdefault("name", "golden")
    for dotted, value in changes.items():
        *parents, last = dotted.split(".")
        section = values
        for parent in parents:
            section = section.setdefault(parent, {})
        section[last] = value
    return {**values, "policies": joined(values["policies"])}


def as_text(rows: pd.DataFrame) -> str:
    return rows.to_csv(index=False, float_format="%.9g", lineterminator="\n")


def as_frozen(rows: pd.DataFrame) -> pd.DataFrame:
    """A table as it is when it has been frozen and read again: in the goldens' words, without empty columns."""
    rows = rows.replace(WORDS, regex=True).dropna(axis="columns", how="all")
    return pd.read_csv(io.StringIO(as_text(rows)))


def freeze(name: str, tables: dict[str, pd.DataFrame]) -> None:
    """Write tables as one zip; equal tables give equal bytes."""
    with zipfile.ZipFile(GOLDENS / f"{name}.zip", "w", zipfile.ZIP_DEFLATED, compresslevel=9) as file:
        for table, rows in sorted(tables.items()):
            file.writestr(zipfile.ZipInfo(f"{table}.csv"), as_text(rows), zipfile.ZIP_DEFLATED)


def frozen_tables(name: str) -> dict[str, pd.DataFrame]:
    with zipfile.ZipFile(GOLDENS / f"{name}.zip") as file:
        return {table.removesuffix(".csv"): pd.read_csv(file.open(table)) for table in file.namelist()}


def words_of(column: pd.Series) -> pd.Series:
    """Whole numbers are alike whatever their type."""
    plain = column.astype(object).where(column.notna(), "")
    return plain.map(lambda value: f"{value:.15g}" if isinstance(value, int | float) else str(value))


def keyed(rows: pd.DataFrame, floats: Sequence[str], keys: Sequence[str] | None) -> pd.DataFrame:
    """Rows by what finds them, all words by default; where keys are equal, by their order when sorted by all else.

    All but ``floats`` become words, which have to be equal.
    """
    rows = rows.assign(**{name: words_of(rows[name]) for name in rows.columns.difference(floats)})
    keys = [name for name in keys or rows.columns.difference(floats) if name in rows]
    others = rows.columns.difference(keys)
    # Rounded, so that the last digits of equal numbers do not decide.
    order = rows[[*keys, *others]].map(lambda value: f"{value:.5e}" if isinstance(value, float) else value)
    return rows.loc[order.sort_values(list(order)).index].set_index(keys)


def assert_unmoved(name: str, fresh: dict[str, pd.DataFrame], rtol: float = RTOL, atol: float = ATOL) -> None:
    frozen = frozen_tables(name)
    missing = sorted(set(frozen) - set(fresh))
    assert not missing, f"{name}: tables {', '.join(missing)} are gone"
    for table, rows in frozen.items():
        gone = [column for column in rows if column not in fresh[table]]
        assert not gone, f"{name}, {table}: columns {', '.join(gone)} are gone"
        floats = rows.select_dtypes("float").columns
        pair = (keyed(one, floats, KEYS.get(table)) for one in (fresh[table][list(rows)], rows))
        words = f"{name}, {table}: fresh and frozen"
        pd.testing.assert_frame_equal(*pair, check_dtype=False, rtol=rtol, atol=atol, obj=words)


# ---- The tests ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_numbers_are_as_frozen(name: str, tmp_path: Path) -> None:
    golden = RUNS[name]
    missing = missing_traces(golden)
    if missing:
        assert "MOE_EP_BENCH_REQUIRE_TRACES" not in os.environ, f"{missing[0]} is missing"
        pytest.skip("no recorded traces in ../shared/traces")
    assert_unmoved(name, fresh_tables(golden, tmp_path), *golden.tolerance)


@pytest.mark.parametrize(("column", "moved"), [("retained_mass_all", 1 + 5e-6), ("num_pairs", 2), ("load_E", 2)])
def test_what_moves_is_found_and_rounding_is_not(column: str, moved: float) -> None:
    rows = frozen_tables("route-decode")["routing"]
    fresh = rows.sample(frac=1, random_state=1).assign(new_column=1, entropy=rows["entropy"] * (1 + 1e-8))
    assert_unmoved("route-decode", {"routing": fresh})
    fresh.loc[5, column] *= moved
    for changed in (fresh, rows.drop(index=7), rows.drop(columns="entropy")):
        with pytest.raises(AssertionError, match="route-decode, routing"):
            assert_unmoved("route-decode", {"routing": changed})
