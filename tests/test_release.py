"""Claims about a release: one version, the commit that code is of, a citation, and a page for a package index."""

from __future__ import annotations

import re
import runpy
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from hatchling import build

import moe_ep_bench
from moe_ep_bench.machine.commit import PACKAGE, commit_of

ROOT = Path(__file__).parent.parent
COMMIT_FILE = PACKAGE / "machine" / "commit.py"
# Of the Citation File Format 1.2.0: what a file must have, and what else it may.
CFF_NEEDS = {"cff-version", "message", "title", "authors"}
CFF_MAY = {
    *("abstract", "commit", "contact", "date-released", "doi", "identifiers", "keywords", "license", "license-url"),
    *("preferred-citation", "references", "repository", "repository-artifact", "repository-code", "type", "url"),
    "version",
}


def git(folder: Path, *arguments: str) -> str:
    who = ("-c", "user.name=a", "-c", "user.email=a@b")
    return subprocess.run(["git", *who, *arguments], cwd=folder, capture_output=True, text=True, check=True).stdout


def lone_package(folder: Path) -> Path:
    """A package of this name that has commit.py alone."""
    (folder / "moe_ep_bench" / "machine").mkdir(parents=True)
    shutil.copy(COMMIT_FILE, folder / "moe_ep_bench" / "machine")
    return folder / "moe_ep_bench"


def asked(package: Path) -> str | None:
    """The commit by the copy of commit.py in ``package``."""
    return runpy.run_path(str(package / "machine" / "commit.py"))["commit_of"]()


def test_version_stands_in_one_place_and_the_citation_has_it() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert "version" not in project
    assert "version" in project["dynamic"]
    assert re.fullmatch(r"\d+\.\d+\.\d+((a|b|rc)\d+)?", moe_ep_bench.__version__)
    assert str(yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"]) == moe_ep_bench.__version__


def test_version_command_says_version_and_commit_and_imports_no_torch() -> None:
    code = "import sys; from moe_ep_bench.cli import main\ntry: main(['--version'])\nfinally: "
    code += "assert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == f"moe-ep-bench {moe_ep_bench.__version__} (commit {commit_of() or 'unknown'})\n"


def test_commit_is_the_clones_and_changes_of_the_package_alone_make_it_dirty(tmp_path: Path) -> None:
    package = lone_package(tmp_path)
    git(tmp_path, "init", "--quiet")
    assert asked(package) is None, "a repository without a commit"
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "--quiet", "-m", "a")
    commit = git(tmp_path, "rev-parse", "HEAD").strip()
    (package / "commit.txt").write_text("of an earlier build\n")
    git(tmp_path, "update-index", "--refresh")
    (tmp_path / ".git" / "info" / "exclude").write_text("commit.txt\n")
    (tmp_path / "notes.txt").touch()
    assert asked(package) == commit
    (package / "new.py").touch()
    assert asked(package) == f"{commit}-dirty"


def test_commit_of_an_installed_package_is_its_stamp_and_not_that_of_a_repository_around_it(tmp_path: Path) -> None:
    git(tmp_path, "init", "--quiet")
    git(tmp_path, "commit", "--quiet", "--allow-empty", "-m", "another project")
    package = lone_package(tmp_path / "environment")
    assert asked(package) is None
    (package / "commit.txt").write_text(f"{'a' * 40}\n")
    assert asked(package) == "a" * 40


def test_citation_is_of_the_format() -> None:
    cff = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert set(cff) >= CFF_NEEDS
    assert set(cff) <= CFF_NEEDS | CFF_MAY
    assert (cff["cff-version"], cff["type"]) == ("1.2.0", "software")
    assert cff["license"] == tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["license"]
    assert cff["authors"]
    for author in cff["authors"]:
        assert set(author) & {"name", "family-names"}, author
    for text in (cff["message"], cff["title"], cff["abstract"], *cff["keywords"]):
        assert isinstance(text, str)
        assert text.strip()
    assert len(set(cff["keywords"])) == len(cff["keywords"])


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("[running](docs/running.md#a), [up](#tree)", "running, [up](#tree)"),
        ("![a picture](results/a.png)\n\n*Words.*", "*Words.*"),
        (
            "[paper](https://arxiv.org/abs/1) ![b](https://x.org/b.png)",
            "[paper](https://arxiv.org/abs/1) ![b](https://x.org/b.png)",
        ),
        ("[`code`](LICENSE)", "`code`"),
    ],
)
def test_page_of_an_index_keeps_only_links_that_it_can_follow(text: str, shown: str) -> None:
    pytest.importorskip("hatchling")
    assert runpy.run_path(str(ROOT / "hatch_build.py"))["without_relative_links"](text) == shown


def test_clone_is_installed_by_hatchling_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setitem(sys.modules, "editables", None)  # which set-up does not install
    assert (tmp_path / build.build_editable(str(tmp_path))).exists()


def releases(text: str) -> dict[str, tuple[int, ...]]:
    """The releases that lines of requirements start from or pin, by package; trailing zeros count for nothing."""
    found = re.findall(r"^([\w.-]+)(?:>=|==)([\d.]+)", text, re.MULTILINE)
    return {
        name.lower().replace("_", "-"): tuple(map(int, re.sub(r"(\.0)+$", "", release).split(".")))
        for name, release in found
    }


def test_oldest_packages_that_ci_tries_are_those_that_are_allowed() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    allowed = releases("\n".join(project["dependencies"]))
    assert len(allowed) == len(project["dependencies"]), "each has an oldest release"
    # The pins of Python 3.12 have the oldest torch.
    pinned = re.findall(r"^torch==([\d.]+)", (ROOT / "launch" / "constraints.txt").read_text(), re.MULTILINE)
    assert allowed.pop("torch") == min(releases(f"torch=={one}")["torch"] for one in pinned)
    tried = releases((ROOT / "launch" / "constraints-oldest.txt").read_text())
    assert {name: tried.get(name) for name in allowed} == allowed
