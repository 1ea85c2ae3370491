"""``trace info`` states what a recording holds, on one screen."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
from trace_files import loads_entry, write_loads, write_trace

from moe_ep_bench.cli import main


def said_of(path: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, str]:
    assert main(["trace", "info", str(path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 24
    return {name: value for name, _, value in (line.partition("  ") for line in lines)}


def test_the_facts_of_the_file_are_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_trace(tmp_path / "toy.safetensors", length_S=(5, 1, 7), domain="poems")
    said = {name: value.strip() for name, value in said_of(path, capsys).items()}
    assert said["sha256"] == hashlib.sha256(path.read_bytes()).hexdigest()
    assert said["routing"] == "2 MoE layers, 8 experts, top-3"
    assert said["tokens"] == "13 in 3 sequences of 1 to 7 (median 5)"
    facts = {"file": "toy.safetensors", "model": "tiny", "phase": "prefill", "domain": "poems", "licence": "MIT"}
    assert facts.items() <= said.items()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, "not renormalised"),
        ({"normalised": True}, "their share of all experts' mass is unknown"),
        ({"equal": True, "score": "assumed equal"}, "nobody recorded scores"),
    ],
)
def test_what_scores_are_is_said(changes: dict, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert words in said_of(write_trace(tmp_path / "toy.safetensors", **changes), capsys)["scores"]


def test_gaps_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert " gaps" in said_of(write_trace(tmp_path / "toy.safetensors", gaps=True), capsys)["tokens"]


@pytest.mark.parametrize("make", [lambda path: None, lambda path: write_loads(path, loads_entry())])
def test_what_is_no_recording_is_one_line(make, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "loads.json"
    make(path)
    assert main(["trace", "info", str(path)]) == 2
    said = capsys.readouterr().err
    assert str(path) in said
    assert said.count("\n") == 1
