"""Tests run on the CPU, whatever the machine has; ``-m gpu`` runs those that need a CUDA device, and only those.

So does ``-m slurm`` those that start a Slurm, and ``-m browser`` those that open a browser. ``-m seam`` holds our use
of Megatron-Core against the installed one.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from warm import Server, warm

# One seed for all: what CI finds, everyone finds. The machines are shared, so no example has a deadline.
settings.register_profile(
    "seeded", derandomize=True, deadline=None, max_examples=40, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("seeded")


# The longest files, which start processes; they begin first, so that none of them runs alone at the end.
LONGEST = (
    "docs_commands",
    "faults",
    "goldens",
    "validate",
    "layer",
    "run",
    "golden_figures",
    "graph_run",
    "guard",
    "setup",
    "model_run",
    "compile_kernels",
)

# Files whose processes are forked from one that has torch and Megatron-Core imported (tests/warm.py).
WARM = (
    "docs_commands",
    "benchmarks",
    "calibrate",
    "doctor",
    "emulate",
    "emulate_model",
    "faults",
    "graph_run",
    "guard",
    "layer",
    "model_run",
    "own_policies",
    "papers",
    "records",
    "run",
    "scopes",
    "shared_gpu",
    "sharing",
    "staged",
    "token_imbalance",
    "validate",
)

# Files whose tests look at no figure's pixels (tests/undrawn.py).
UNDRAWN = (
    "benchmarks",
    "conditions",
    "exchanges",
    "own_policies",
    "physics",
    "quality",
    "quality_tasks",
    "route",
    "tables",
)


@pytest.fixture(scope="session")
def traces() -> Path:
    """Recordings beside the repository; CI must have them."""
    folder = Path(__file__).resolve().parents[2] / "shared" / "traces"
    if not folder.is_dir():
        assert "MOE_EP_BENCH_REQUIRE_TRACES" not in os.environ, f"{folder} is missing"
        pytest.skip("no recorded traces in ../shared/traces")
    return folder


def _wants_gpu(config: pytest.Config) -> bool:
    return config.getoption("-m").strip() == "gpu"


class _AtOnce:
    """Says what failed at once, too: a lent GPU's minutes may end ahead of the tests."""

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            print(f"\n{report.nodeid}, {report.when}:\n{report.longreprtext}", file=sys.stderr, flush=True)


def pytest_configure(config: pytest.Config) -> None:
    # Processes of tests have more threads than there are cores; those that spin while they wait take ten times as long.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    # And two that share a tiny product wait more than they compute.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("MOE_EP_BENCH_THREADS", "1")
    # Or every process would compile the package anew.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    sys.dont_write_bytecode = False
    if _wants_gpu(config):
        if not hasattr(config, "workerinput"):  # of several processes the first
            config.pluginmanager.register(_AtOnce())
    else:
        # Before anything asks torch; processes that tests start inherit it.
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        # Before anything imports triton: its kernels then run in its interpreter.
        os.environ["TRITON_INTERPRET"] = "1"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    places = {f"test_{name}": place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path.stem, len(places)))
    for marker, reason in (
        ("scale", "runs with -m scale: draws many ranks and cases"),
        ("slurm", "runs with -m slurm, as root where slurm-wlm is installed"),
        ("browser", "runs with -m browser, where chromium is installed"),
        ("vllm", "runs with -m vllm, where vLLM is installed"),
    ):
        if config.getoption("-m").strip() != marker:
            for item in items:
                if item.get_closest_marker(marker):
                    item.add_marker(pytest.mark.skip(reason=reason))
    if _wants_gpu(config):
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="runs with -m gpu, on a CUDA device"))


def pytest_collection_finish() -> None:
    # What tests import stays: no collection of garbage need walk through it again, and fewer save a twentieth.
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 50, 50)


@pytest.fixture(scope="session")
def _server() -> Iterator[Server]:
    server = Server()
    yield server
    server.close()


@pytest.fixture(scope="module", autouse=True)
def _warm(request: pytest.FixtureRequest, _server: Server) -> Iterator[None]:
    # A fork of what has asked CUDA cannot use it.
    if request.path.stem.removeprefix("test_") in WARM and not _wants_gpu(request.config):
        with warm(_server):
            yield
    else:
        yield


@pytest.fixture(scope="module", autouse=True)
def _undrawn(request: pytest.FixtureRequest) -> Iterator[None]:
    if request.path.stem.removeprefix("test_") in UNDRAWN:
        from undrawn import nothing_drawn

        with nothing_drawn():
            yield
    else:
        yield


@pytest.fixture(scope="session")
def tiny_olmoe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a small checkpoint, ``tiny-olmoe``, and a text, ``words.txt``."""
    from hf_models import checkpoint

    folder = tmp_path_factory.mktemp("olmoe")
    checkpoint(folder / "tiny-olmoe", "olmoe")
    (folder / "words.txt").write_text("".join(f"{n}: the mean of {n * 7 % 13} and a word\n" for n in range(40)))
    return folder


class _Kept:
    """A patch of ``triton.language`` that stays."""

    def restore(self) -> None:
        pass


@pytest.fixture(scope="module")
def patched_once() -> Iterator[None]:
    """Let Triton's interpreter replace the operations of ``triton.language`` once.

    It does so anew for every call of a device function, ``tl.sum`` and its like included: most of its time.
    """
    from triton import language as tl
    from triton.runtime import interpreter

    patch, patched = interpreter._patch_lang, set()

    def patch_once(function: Callable[..., object]) -> _Kept:
        seen = frozenset(id(value) for value in function.__globals__.values() if value is tl or value is tl.core)
        if seen not in patched:
            patched.add(seen)
            patch(function)
        return _Kept()

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(interpreter, "_patch_lang", patch_once)
        yield


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the Triton kernels launched from here on, in order."""
    from triton.runtime.interpreter import InterpretedFunction

    names: list[str] = []
    run = InterpretedFunction.run

    def noted(self: InterpretedFunction, *args: object, **kwargs: object) -> object:
        names.append(self.fn.__name__)
        return run(self, *args, **kwargs)

    monkeypatch.setattr(InterpretedFunction, "run", noted)
    return names
