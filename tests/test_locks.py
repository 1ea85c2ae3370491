"""Who writes what in a results directory: one job per comparison, and no dead job in anybody's way."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from test_run import environment as child_environment

from moe_ep_bench import results

HOLDER = """
import sys, time
from pathlib import Path
from moe_ep_bench import results
with results.hold(Path(sys.argv[1]), {"one": "one"}):
    print("held", flush=True)
    time.sleep(float(sys.argv[2]))
"""


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[subprocess.Popen]:
    """Another process that holds the lock ``one``."""
    command = [sys.executable, "-c", HOLDER, str(tmp_path), "60"]
    other = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=child_environment())
    assert other.stdout is not None
    assert other.stdout.readline() == "held\n"
    yield other
    other.kill()
    other.communicate()


def test_what_another_job_holds_is_refused_by_its_name(holder: subprocess.Popen, tmp_path: Path) -> None:
    assert results.is_held(tmp_path, "one")
    expected = rf"--out {tmp_path}: a title: another job is writing this, process {holder.pid} on .*, begun 20.* UTC;"
    with pytest.raises(ValueError, match=expected), results.hold(tmp_path, {"one": "a title"}, patience_s=0.2):
        pass
    with results.hold(tmp_path, {"two": "another"}, patience_s=0.0):
        assert not results.is_held(tmp_path, "three")
    with pytest.raises(ValueError, match="another job"), results.hold(tmp_path, {"two": "", "one": ""}, patience_s=0.0):
        pass
    assert not results.is_held(tmp_path, "two"), "nothing stays held where one of several is refused"
    assert not results.lock_file(tmp_path, "two").exists()


def test_the_lock_of_a_job_that_was_killed_is_taken_over(holder: subprocess.Popen, tmp_path: Path) -> None:
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    assert results.lock_file(tmp_path, "one").exists()
    assert not results.is_held(tmp_path, "one")
    with results.hold(tmp_path, {"one": "one"}, patience_s=0.0):
        assert results.is_held(tmp_path, "one")
    assert not results.is_held(tmp_path, "one")


def test_a_successor_waits_for_a_job_that_is_just_ending(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HOLDER, str(tmp_path), "0.5"]
    other = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=child_environment())
    assert other.stdout is not None
    other.stdout.readline()
    with results.hold(tmp_path, {"one": "one"}, patience_s=30.0):
        pass
    other.communicate()
    assert other.returncode == 0
    assert not results.is_held(tmp_path, "one")
