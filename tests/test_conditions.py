"""Conditions on columns choose rows, and can do nothing else; nothing that is read is code."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from results_builder import FakeComparison, standard_cases, write_run

import moe_ep_bench
from moe_ep_bench.analysis import plot
from moe_ep_bench.cli import main
from moe_ep_bench.config.conditions import holds, matching
from moe_ep_bench.errors import UserError

PACKAGE = Path(moe_ep_bench.__file__).parent
FEW = {"noise": 0.0, "num_batches": 2, "num_iterations": 1}


def frame(num_rows: int = 40, seed: int = 0) -> pd.DataFrame:
    generator = np.random.default_rng(seed)
    return pd.DataFrame(
        {
            "policy": generator.choice(["oea", "topk", "token drop"], num_rows),
            "budget": generator.integers(0, 5, num_rows).astype(float),
            "num_ranks": generator.integers(1, 9, num_rows),
            "is_ok": generator.random(num_rows) < 0.5,
        }
    )


# Of a frame without nulls pandas' own language says the same.
CONDITIONS = [
    "policy == 'oea'",
    "policy != 'oea' and budget in (1, 2)",
    "budget not in [0, 4] or not is_ok",
    "1 < budget <= 3",
    "not (policy == 'topk' or num_ranks >= 4)",
    "budget > num_ranks",
    "is_ok",
    "policy in ['token drop']",
    "-1 < budget and is_ok == True",
]


@pytest.mark.parametrize("condition", CONDITIONS)
def test_a_condition_chooses_the_rows_that_pandas_query_chooses(condition: str) -> None:
    rows = frame()
    found = matching(rows, condition)
    assert 0 < len(found) < len(rows)
    pd.testing.assert_frame_equal(found, rows.query(condition))


@pytest.mark.parametrize(
    ("condition", "expected"),
    [
        ("k == null", [False, True, False]),
        ("k != null", [True, False, True]),
        ("k != 1", [False, True, True]),
        ("k < 9", [True, False, True]),
        ("not k < 9", [False, True, False]),
        ("k in (1, null)", [True, True, False]),
        ("k not in (1, 2)", [False, True, False]),
        ("word == null or word == 'a'", [True, True, False]),
        ("absent == null", [True, True, True]),
        ("absent == 4", [False, False, False]),
        ("mixed == 'a'", [True, False, False]),
        ("mixed > 1", [False, True, False]),
        ("flag", [True, False, False]),
        ("flag == false", [False, False, True]),
        ("flag == true", [True, False, False]),
        ("", [True, True, True]),
    ],
)
def test_a_null_equals_itself_alone_and_has_no_order(condition: str, expected: list[bool]) -> None:
    rows = pd.DataFrame({"k": [1.0, np.nan, 2.0], "word": ["a", None, "b"], "mixed": ["a", 2, None]})
    rows["flag"] = [True, None, False]
    if condition:
        assert holds(rows, condition, [*rows, "absent"]).tolist() == expected
    else:
        assert len(matching(rows, condition)) == 3


NO_CONDITIONS = [
    "@pd.io.common.os.system('true')",
    "__import__('os').system('true')",
    "policy.str.len() > 1",
    "budget.isna()",
    "budget > 1 + 1",
    "budget == [x for x in (1, 2)]",
    "(lambda: 1) == budget",
    "budget if is_ok else policy",
    "f'{budget}' == policy",
    "b'oea' == policy",
    "budget[0] == 1",
    "budget == 1; is_ok",
    "budget := 1",
    "budget is None",
    "policy in budget",
    "1",
    "'oea'",
    "null",
    "()",
    " ",
    "budget ==",
    "not " * 2000 + "is_ok",
    "(" * 500,
    "-" * 900 + "1 == budget",
    "is_ok and " * 90 + "1",
    "\0",
]


@pytest.mark.parametrize("condition", NO_CONDITIONS, ids=lambda text: repr(text[:25]))
def test_what_is_no_condition_is_one_line(condition: str) -> None:
    with pytest.raises(UserError, match=r"^expected columns and literals, compared by ") as error:
        holds(frame(), condition)
    assert len(str(error.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("condition", "line"),
    [
        ("polcy == 'oea'", "expected a column, one of policy, budget, num_ranks, is_ok; got 'polcy' (did you mean pol"),
        ("policy > 3", "policy: has words; got a number: 3"),
        ("budget in (1, 'a')", "budget: has numbers; got words: 'a'"),
        ("policy", "policy: expected a comparison, as it has words"),
    ],
)
def test_a_column_that_is_unknown_or_of_another_kind_is_named(condition: str, line: str) -> None:
    with pytest.raises(UserError) as error:
        holds(frame(), condition)
    assert str(error.value).startswith(line)


# ---- a stranger's results --------------------------------------------------------------------------------------------


def hostile(touched: Path) -> dict[str, object]:
    """What a config's ``figures`` in run.json may try, by a pattern of the line that says so."""
    command = f"touch {touched}"
    line = {"x": "capacity_factor", "y": "dropped_share"}
    return {
        r"0\.where: expected columns and .*@pd.io": [{**line, "where": f"@pd.io.common.os.system('{command}')"}],
        r"0\.where: expected columns and .*__import__": [{**line, "where": f"__import__('os').system('{command}')"}],
        r"0\.x: expected a column": [{**line, "x": "facts"}],
        r"0\.by: expected a column": [{**line, "by": "{title.__class__}"}],
        r"0\.facet: expected a column": [{**line, "facet": "policy_params"}],
        r"0\.y: expected a column": [{**line, "y": "../../out"}],
        r"0\.where: expected a column": [{**line, "y": "median_ms", "where": "facts == null"}],
        r"0: expected": ["policy"],
        r"\w*: expected a valid list": 7,
        r"0\.z: Extra": [{**line, "z": 1}],
    }


def test_figures_of_a_strangers_results_cost_a_line_each_and_nothing_else(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(plot, "FIGURES", {"dropped": plot.FIGURES["dropped"]})
    touched, run = tmp_path / "touched", tmp_path / "run"
    write_run(run, [FakeComparison(cases=standard_cases()[:1] + standard_cases()[3:], **FEW)])
    content = json.loads((run / "run.json").read_text())
    for job in content["runs"].values():
        job["config"] = [{"figures": figures} for figures in hostile(touched).values()]
    (run / "run.json").write_text(json.dumps(content))
    for command in (["show", str(run), "--format", "html"], ["plot", str(run), "--format", "svg"]):
        assert main(command) == 1
        lines = capsys.readouterr().err.splitlines()
        found = [[bool(re.search(rf"figures\.{said}", line)) for said in hostile(touched)] for line in lines]
        assert [row.count(True) for row in found] == [1] * len(hostile(touched))
        assert [sum(column) for column in zip(*found, strict=True)] == [1] * len(hostile(touched))
    assert (run / "figures" / "dropped.svg").is_file()
    assert not touched.exists()


# ---- nothing that is read is code ------------------------------------------------------------------------------------

UNSAFE_MODULES = {"pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib"}
UNSAFE_NAMES = {"eval", "exec", "compile", "__import__"}
# What loads by a name, and who may: a policy's module, which the user names, and tables of this package's own.
BY_NAME = {
    "policies/__init__.py": ["module"],
    "kernels/__init__.py": ["f'{__name__}.{module}'"],
    "serving/vllm.py": ["module"],
}


def unsafe_calls(path: Path, source: str) -> list[str]:
    """Calls by which text or files could become code, as ``line: call``."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [alias.name for alias in node.names] + [getattr(node, "module", None) or ""]
            found += [f"{node.lineno}: {name}" for name in names if name.partition(".")[0] in UNSAFE_MODULES]
        if not isinstance(node, ast.Call):
            continue
        words, arguments = ast.unparse(node.func), {key.arg: ast.unparse(key.value) for key in node.keywords}
        last = words.rpartition(".")[2]
        is_constant = bool(node.args) and isinstance(node.args[0], ast.Constant)
        is_unsafe = words in UNSAFE_NAMES
        is_unsafe |= last in ("query", "eval") and "." in words and bool(node.args or node.keywords)
        is_unsafe |= words in ("torch.load", "pd.read_pickle", "torch.hub.load")
        is_unsafe |= words in ("np.load", "np.lib.format.read_array") and arguments.get("allow_pickle") != "False"
        is_unsafe |= words == "yaml.load" and "Loader" not in ast.unparse(node.args[1])
        is_unsafe |= last in ("unsafe_load", "full_load")
        is_unsafe |= arguments.get("trust_remote_code", "False") != "False"
        is_unsafe |= arguments.get("shell", "False") != "False" or words == "os.system"
        named = [ast.unparse(node.args[0])] if last == "import_module" and not is_constant else []
        is_unsafe |= named not in ([], BY_NAME.get(str(path), []))
        found += [f"{node.lineno}: {words}"] if is_unsafe else []
    return found


@pytest.mark.parametrize(
    "code",
    [
        "eval('1')", "rows.query('a')", "rows.eval('a')", "import pickle", "from pickle import loads", "torch.load(f)",
        "np.load(f)", "yaml.unsafe_load(t)", "importlib.import_module(name)", "subprocess.run(c, shell=True)",
        "AutoModel.from_pretrained(f, trust_remote_code=True)", "os.system(c)",
    ],
)  # fmt: skip
def test_code_that_runs_what_it_reads_would_be_found(code: str) -> None:
    assert unsafe_calls(Path("x.py"), code)


def test_nothing_in_the_package_runs_what_it_reads() -> None:
    paths = sorted(PACKAGE.rglob("*.py"))
    assert len(paths) > 100
    found = {
        str(path.relative_to(PACKAGE)): calls
        for path in paths
        if (calls := unsafe_calls(path.relative_to(PACKAGE), path.read_text()))
    }
    assert found == {}
