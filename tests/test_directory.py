"""What may lie in one results directory: results of one mode, one code and one set of conditions."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import pytest

from moe_ep_bench import files
from moe_ep_bench.files import write_json
from moe_ep_bench.results import RunDirectory

CONDITIONS = {"torch": "2.0", "device_name": "a processor"}
NOW = {"mode": "run", "scope": "layer", **CONDITIONS, "code": "today's"}


def leave_results(root: Path, mode: str = "run", scope: str = "layer", code: str = "", **more: str) -> RunDirectory:
    """A directory as an earlier command left it, of this code where nothing else is said."""
    about = {"mode": mode, "scope": scope, "hashes": {"code": code or NOW["code"]}}
    rows = {"run_id": "r", "comparisons": {}, "cases": {}}
    write_json(root / "run.json", {**about, "environment": {**CONDITIONS, **more}, **rows})
    return RunDirectory(root)


def files_in(root: Path) -> set[str]:
    return {path.name for path in root.iterdir()}


# What an earlier command left that was otherwise, how a line says so, and whether --force takes its place.
OTHERWISE = {
    "mode": ({"mode": "route"}, "mode route, here it is run; choose another directory$", False),
    "scope": ({"scope": "model"}, "scope model, here it is layer; choose another directory$", False),
    "package": ({"torch": "1.0"}, "torch 1.0, here it is 2.0; choose another directory$", False),
    "code": ({"code": "older"}, "code older, here it is .*; choose another directory or --force$", True),
    "nothing": ({"hostname": "elsewhere"}, "", True),
}


@pytest.mark.parametrize("what", OTHERWISE)
@pytest.mark.parametrize("force", [False, True])
def test_a_directory_holds_one_mode_scope_code_and_set_of_conditions(what: str, force: bool, tmp_path: Path) -> None:
    left, message, forced = OTHERWISE[what]
    directory, before = leave_results(tmp_path, **left), files_in(tmp_path)
    fits = not message or (force and forced)
    with contextlib.nullcontext() if fits else pytest.raises(ValueError, match=f"holds results with {message}"):
        directory.check_agreement(NOW if not force else {key: value for key, value in NOW.items() if key != "code"})
    assert files_in(tmp_path) == before


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"mode": "run", "environment": {}}'])
def test_a_description_that_is_none_is_named(content: str, tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text(content)
    with pytest.raises(ValueError, match=r"run.json: damaged, or not written by this program"):
        RunDirectory(tmp_path).check_agreement(NOW)


def test_a_new_directory_is_made_and_a_file_in_its_place_is_refused(tmp_path: Path) -> None:
    RunDirectory(tmp_path / "a" / "b").check_agreement(NOW)
    assert files_in(tmp_path / "a" / "b") == set()
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=f"--out {tmp_path}/file: is a file; expected a directory"):
        RunDirectory(tmp_path / "file").check_agreement(NOW)


def test_a_file_is_on_the_disk_before_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a machine that loses power leaves an empty file under a finished file's name."""
    done, fsync, replace = [], os.fsync, Path.replace

    def synced(descriptor: int) -> None:
        done.append(("synced", os.fstat(descriptor).st_size))
        fsync(descriptor)

    def renamed(path: Path, target: Path) -> Path:
        done.append(("renamed", path.stat().st_size))
        return replace(path, target)

    monkeypatch.setattr(files.os, "fsync", synced)
    monkeypatch.setattr(Path, "replace", renamed)
    write_json(tmp_path / "a.json", {"whole": True})
    size = (tmp_path / "a.json").stat().st_size
    assert done == [("synced", size), ("renamed", size)]
