"""Tests run on the CPU, whatever the machine has; ``-m gpu`` runs those that need a CUDA device, and only those."""

from __future__ import annotations

import os

import pytest


def _wants_gpu(config: pytest.Config) -> bool:
    return config.getoption("-m").strip() == "gpu"


def pytest_configure(config: pytest.Config) -> None:
    if not _wants_gpu(config):
        # Before anything asks torch; processes that tests start inherit it.
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if _wants_gpu(config):
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="runs with -m gpu, on a CUDA device"))
