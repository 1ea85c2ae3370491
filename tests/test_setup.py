"""Claims about setting up: launch/setup.sh, with made-up packages and no network.

A *clone* holds launch/ and pins of a few packages. A *container* stands for a GPU container's Python: a virtual
environment with a made-up torch, Triton and Apex, and pip. An *index* holds empty wheels under the pinned names and
versions, and others that must not be taken.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import os
import platform
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"
# What NVIDIA calls a build between two releases; for pip it is older than 2.11.
CONTAINER = {"torch": "2.11.0a0+nv26.2", "triton": "3.5.1+nv26.2"}
PIP = Path(find_spec("pip").origin).parent
# Few, for pip takes its time.
PINS = {"torch": "2.13.0", "triton": "3.7.1", "megatron-core": "0.16.1", "numpy": "2.4.6", "pillow": "13.0.0"}
PYPROJECT = """[build-system]
requires = ["hatchling>=1.27"]
build-backend = "hatchling.build"
[project]
name = "moe-ep-bench"
dependencies = [
  "torch>=2.11",
  "megatron-core>=0.16.1",
  "matplotlib",
]
[project.optional-dependencies]
test = ["triton; sys_platform == 'linux'"]
tables = ["aiconfigurator-core"]
"""

pytestmark = pytest.mark.skipif(platform.machine() != "x86_64", reason="wheels are collected for x86-64")


def write_wheel(folder, name, version, *, requires=(), contents=None, tag="py3-none-any"):
    """Also the source of a stand-in for hatchling, so it stands on its own."""
    import zipfile

    stem = f"{name.replace('-', '_')}-{version}"
    metadata = [f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}", *(f"Requires-Dist: {r}" for r in requires)]
    wheel_info = f"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: {tag}\n"
    with zipfile.ZipFile(f"{folder}/{stem}-{tag}.whl", "w") as wheel:
        for path, text in (contents or {}).items():
            wheel.writestr(path, text)
        wheel.writestr(f"{stem}.dist-info/METADATA", "\n".join(metadata) + "\n")
        wheel.writestr(f"{stem}.dist-info/WHEEL", wheel_info)
        wheel.writestr(f"{stem}.dist-info/RECORD", "")
    return f"{stem}-{tag}.whl"


BUILD_BACKEND = f"""
import os
{inspect.getsource(write_wheel)}
def build_editable(wheel_directory, config_settings=None, metadata_directory=None):
    return write_wheel(wheel_directory, "moe-ep-bench", "0.1.0", contents={{"clone.pth": os.getcwd()}})
"""


def setup(clone, *arguments, cwd, **environment):
    """Run a clone's script with nothing of this machine's pip set-up, and with no way out to a network."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("PIP_", "PYTHON")) and "proxy" not in k.lower()}
    nowhere = "http://127.0.0.1:9"
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    kept |= {"HOME": str(cwd), "PATH": path, "https_proxy": nowhere, "http_proxy": nowhere, **environment}
    command = ["bash", clone / "launch/setup.sh", *arguments]
    return subprocess.run(command, cwd=cwd, env=kept, capture_output=True, text=True, timeout=600)


def snapshot(folder):
    """Every path with its size and time of change; caches of byte code are nobody's claim."""
    paths = (p for p in folder.rglob("*") if "__pycache__" not in p.parts)
    return {p: None if p.is_dir() else (p.lstat().st_size, p.lstat().st_mtime_ns) for p in paths}


def make_clone(folder):
    shutil.copytree(ROOT / "launch", folder / "launch")
    (folder / "launch/constraints.txt").write_text("".join(f"{name}=={pin}\n" for name, pin in PINS.items()))
    (folder / "pyproject.toml").write_text(PYPROJECT)
    (folder / "moe_ep_bench").mkdir()
    return folder


def furnish(packages, **versions):
    """Put pip, Apex and packages of these versions into a folder of packages that has no ensurepip."""
    packages.mkdir(exist_ok=True)
    (packages / "pip").symlink_to(PIP)
    (packages / "apex.py").touch()
    (packages / "sitecustomize.py").write_text("import sys; sys.modules['ensurepip'] = None\n")
    for name, version in versions.items():
        folder = packages / f"{name}-{version}.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


def make_python(folder, **versions):
    """A virtual environment that stands for some machine's Python."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    furnish(folder / f"lib/python{PYTHON}/site-packages", **versions)
    return folder / "bin/python"


def make_plain(path, first=""):
    """This Python, with a pip for every environment at once: ensurepip takes half of a set-up's time."""
    path.write_text(f"""#!/bin/bash
{first}
[ "$1 $2" = "-m venv" ] || exec {sys.executable} "$@"
{sys.executable} -m venv --without-pip "${{@:3}}"
ln -sfn {PIP} "${{@: -1}}/lib/python{PYTHON}/site-packages/pip"
""")
    path.chmod(0o755)
    return path


@pytest.fixture(scope="module")
def clone(tmp_path_factory):
    return make_clone(tmp_path_factory.mktemp("clone"))


@pytest.fixture(scope="module")
def offline(tmp_path_factory):
    """What tells pip to take wheels from the index alone."""
    folder = tmp_path_factory.mktemp("index")
    # A build of torch has a local version, which == does not exclude.
    for build in ("cu130", "cu126"):
        write_wheel(folder, "torch", f"{PINS['torch']}+{build}", requires=["nvidia-cublas"])
    python = "cp{0}-cp{0}-manylinux_2_17_x86_64".format(PYTHON.replace(".", ""))
    write_wheel(folder, "megatron-core", PINS["megatron-core"], requires=["torch>=2.6", "numpy"], tag=python)
    write_wheel(folder, "matplotlib", "1.0", requires=["numpy", "pillow"])
    for name in ("triton", "numpy", "pillow"):
        write_wheel(folder, name, PINS[name])
        write_wheel(folder, name, "99.0")
    write_wheel(folder, "nvidia-cublas", "1.0")
    write_wheel(folder, "aiconfigurator-core", "0.12.0")
    write_wheel(
        folder, "hatchling", "1.33.0", contents={"hatchling/__init__.py": "", "hatchling/build.py": BUILD_BACKEND}
    )
    return {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(folder)}


@pytest.fixture(scope="module")
def container(tmp_path_factory):
    return make_python(tmp_path_factory.mktemp("container"), **CONTAINER, numpy="1.26.4")


@pytest.fixture(scope="module")
def environment(clone, container, offline, tmp_path_factory):
    """An environment on a container's torch from a folder of wheels, made by two at the same time."""
    folder = tmp_path_factory.mktemp("set up")
    before = snapshot(container.parent.parent)
    arguments = ["--system-torch", "--with", "test", "--python", container, "--venv", folder / "environment"]
    # NVIDIA's containers set it, with pins of their own.
    variables = {**offline, "PIP_CONSTRAINT": str(folder / "absent.txt")}
    with ThreadPoolExecutor() as pool:
        both = [pool.submit(setup, clone, *arguments, cwd=folder, **variables) for _ in range(2)]
        other, done = sorted((one.result() for one in both), key=lambda one: one.stdout)
    # What pip would say of a network that it cannot reach goes to stderr.
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"Setting up {folder / 'environment'} with Python")
    assert (other.returncode, other.stdout, other.stderr) == (0, "", ""), "it waits and takes what the first has made"
    assert snapshot(container.parent.parent) == before
    return folder / "environment"


def inside(environment, code):
    # Not in this folder: a Python that is given code finds modules where it runs.
    command = [environment / "bin/python", "-c", code]
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, cwd="/", env=variables, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def versions_in(environment, names):
    code = f"from importlib.metadata import version; print({{name: version(name) for name in {list(names)}}})"
    return ast.literal_eval(inside(environment, code))


def check_refused(done, says):
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert done.stderr.startswith("setup.sh: ")
    assert says in done.stderr


@pytest.fixture(scope="module")
def desk(tmp_path_factory):
    """A folder with a clone and what wrong arguments may name; it is the same after each."""
    folder = tmp_path_factory.mktemp("desk")
    make_clone(folder / "clone")
    (folder / "full").mkdir()
    (folder / "full/notes.txt").touch()
    make_python(folder / "old", torch="2.9.1")
    make_python(folder / "container", torch=CONTAINER["torch"])
    make_plain(folder / "plain")
    make_plain(folder / "other", '[[ "$2" != *"version_info[:2]"* ]] || exec echo 3.0')
    return folder


# What is asked, and what the one line says of it.
REFUSED = {
    "--frobnicate": "'--frobnicate'",
    "--venv full": "new or empty; full is neither",
    "--venv new --with test,vllm": "list of tables, models and test, not 'test,vllm'",
    "--venv new --cuda12 --system-torch": "it does not go with --system-torch",
    "--venv new --python absent": "3.11 or 3.12",
    "--venv new --check": "new is not set up: run launch/setup.sh where there is a network",
    "--venv new --system-torch --python old/bin/python": "old/bin/python has torch 2.9.1",
    "--venv container --system-torch --python container/bin/python": "container/bin/python belongs to",
}


@pytest.mark.parametrize("arguments", REFUSED)
def test_wrong_arguments_are_refused_in_one_line_and_leave_nothing(desk, arguments):
    before = snapshot(desk)
    check_refused(setup(desk / "clone", *arguments.split(), cwd=desk), REFUSED[arguments])
    assert snapshot(desk) == before


@pytest.mark.slow
def test_a_folder_of_wheels_installs_without_network_beside_the_containers_torch(environment, container):
    expected = PINS | CONTAINER
    assert versions_in(environment, expected) == expected
    packages = container.parent.parent / "lib" / f"python{PYTHON}" / "site-packages"
    assert inside(environment, "import apex; print(apex.__file__)") == str(packages / "apex.py")
    assert not [path for name in CONTAINER for path in environment.glob(f"lib/*/site-packages/{name}*")]


def test_a_later_plain_set_up_takes_an_environment_whose_pins_are_not_old(environment, clone, tmp_path):
    before = snapshot(environment)
    done = setup(clone, "--venv", environment, cwd=clone)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    other = make_clone(tmp_path / "other")
    with open(other / "launch/constraints.txt", "a") as constraints:
        constraints.write("# another pin\n")
    check_refused(setup(other, "--venv", environment, cwd=tmp_path), "was made with --system-torch")
    assert snapshot(environment) == before


def expected_torch(build):
    return f"{PINS['torch']}+{build}"


@pytest.mark.slow
@pytest.mark.parametrize(("flags", "build"), [([], "cu130"), (["--cuda12"], "cu126")])
def test_the_pins_are_installed_and_that_build_of_torch_is_kept(flags, build, clone, offline, tmp_path):
    plain, environment = make_plain(tmp_path / "python"), tmp_path / "environment"
    done = setup(clone, "--python", plain, "--venv", environment, "--with", "test", *flags, cwd=tmp_path, **offline)
    assert (done.returncode, done.stderr) == (0, "")
    assert f"  torch {expected_torch(build)}\n" in done.stdout, "a line for each package"
    assert done.stdout.endswith("  installing them ...\n")
    expected = PINS | {"torch": expected_torch(build)}
    assert versions_in(environment, expected) == expected
    made = snapshot(environment)
    assert setup(clone, "--python", plain, "--venv", environment, cwd=tmp_path).returncode == 0
    assert snapshot(environment) == made


def installed(environment):
    return {path.name.partition("-")[0] for path in environment.glob("lib/*/site-packages/*.dist-info")}


def test_what_only_extras_need_is_installed_with_them_and_stays_with_new_pins(offline, tmp_path):
    clone, environment = make_clone(tmp_path / "clone"), tmp_path / "environment"
    ask = ["--python", make_plain(tmp_path / "python"), "--venv", environment]
    few = {"torch", "nvidia_cublas", "megatron_core", "matplotlib", "numpy", "pillow", "hatchling", "moe_ep_bench"}
    assert setup(clone, *ask, cwd=tmp_path, **offline).returncode == 0
    assert installed(environment) == few
    assert "is not set up" in setup(clone, *ask, "--with", "tables", "--check", cwd=tmp_path).stderr
    assert setup(clone, *ask, "--with", "tables", cwd=tmp_path, **offline).returncode == 0
    assert installed(environment) == few | {"aiconfigurator_core"}
    made = snapshot(environment)
    assert setup(clone, *ask, "--check", cwd=tmp_path).returncode == 0
    assert setup(clone, *ask, "--with", "tables,tables", cwd=tmp_path).stdout == ""
    assert snapshot(environment) == made
    with open(clone / "launch/constraints.txt", "a") as constraints:
        constraints.write("# another pin\n")
    assert setup(clone, *ask, "--check", cwd=tmp_path).returncode == 2
    assert setup(clone, *ask, "--with", "test", cwd=tmp_path, **offline).returncode == 0
    assert installed(environment) == few | {"aiconfigurator_core", "triton"}
    assert (environment / ".extras").read_text() == "tables,test\n"


# A stand-in for uv, which notes its arguments and what the two files hold, and installs nothing.
UV = """#!/bin/bash
echo "$@" >"$HOME/uv.txt"
while [ $# -gt 0 ]; do case $1 in --constraint | --requirement) cat "$2" >"$HOME/uv$1.txt" ;; esac; shift; done
exit ${UV_STATUS:-0}
"""


@pytest.mark.parametrize(
    ("flags", "variables", "is_used"),
    [
        ("", {}, True),
        ("", {"UV_STATUS": "2"}, True),
        ("--cuda12 --python ./plain", {}, False),
        ("--system-torch --python container/bin/python", {}, False),
        ("", {"PIP_NO_INDEX": "1"}, False),
        ("", {"PIP_INDEX_URL": "http://127.0.0.1:9"}, False),
    ],
)
def test_uv_installs_where_it_is_and_pip_has_no_place_of_its_own(desk, flags, variables, is_used, tmp_path):
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "uv").write_text(UV)
    (tmp_path / "bin" / "uv").chmod(0o755)
    environment = tmp_path / "environment"
    arguments = ["--venv", environment, *(flags or "--python ./plain").split()]
    # What this machine tells pip in files is not the claim's, and what waits for a network would try again.
    pip = {"PIP_CONFIG_FILE": os.devnull, "PIP_RETRIES": "0"} | variables
    path = f"{tmp_path / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = setup(desk / "clone", *arguments, cwd=desk, **{**pip, "PATH": path, "HOME": str(tmp_path)})
    assert done.returncode == 1, "pip finds nothing, neither the pins nor, after this uv, what installs the clone"
    assert not (environment / ".pins").exists()
    assert (tmp_path / "uv.txt").exists() == is_used
    if is_used:
        asked = (tmp_path / "uv.txt").read_text()
        assert asked.startswith(f"pip install --python {environment}/bin/python --constraint ")
        assert (tmp_path / "uv--constraint.txt").read_text() == (desk / "clone/launch/constraints.txt").read_text()
        assert (tmp_path / "uv--requirement.txt").read_text().split() == [
            *("hatchling>=1.27", "torch>=2.11", "megatron-core>=0.16.1", "matplotlib"),
        ]


# How an environment was made, what is asked for, and whether it is taken as it is.
MADE = [
    ("", "", True),
    ("", "--check", True),
    ("", "--cuda12 --python ./plain", False),
    ("--cuda12", "--system-torch --python container/bin/python", False),
    ("--system-torch", "--system-torch", True),
    ("", "--python ./other", False),
]


@pytest.mark.slow
@pytest.mark.parametrize(("made_with", "asked", "is_taken"), MADE)
def test_an_environment_of_another_kind_is_made_anew(desk, made_with, asked, is_taken, tmp_path):
    clone, environment = desk / "clone", tmp_path / "environment"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", environment], check=True)
    read = (clone / "pyproject.toml").read_bytes() + (clone / "launch/constraints.txt").read_bytes()
    for stamp, text in {"flags": made_with, "pins": hashlib.sha256(read).hexdigest(), "clone": clone}.items():
        (environment / f".{stamp}").write_text(f"{text}\n")
    (environment / "earlier").touch()
    done = setup(clone, "--venv", environment, *asked.split(), cwd=desk, PIP_NO_INDEX="1")
    assert (done.returncode, done.stdout.startswith("Setting up")) == ((0, False) if is_taken else (1, True))
    assert (environment / "earlier").exists() == is_taken, "what was made for another is not built upon"
