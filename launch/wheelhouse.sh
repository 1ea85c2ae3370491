#!/usr/bin/env bash
# Collect the wheels that setup.sh needs, for a machine without network:
#   launch/wheelhouse.sh DIR [--python 3.11|3.12]
# --python  the Python of that machine (default 3.12); the one here may be another
# For Linux on x86-64 with glibc 2.28 or newer. DIR is new or empty. torch, its CUDA packages and triton stay out: they
# are gigabytes, and a GPU container has its own. There: launch/setup.sh --wheelhouse DIR --system-torch
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
expected="expected DIR [--python 3.11|3.12]"
folder=
version=3.12

fail() { echo "wheelhouse.sh: $1" >&2; exit 2; }
usage() { sed -n '2,/^[^#]/s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; }

while [ $# -gt 0 ]; do
  case $1 in
    -h | --help) usage; exit ;;
    --python) version=${2:-}; shift $(($# > 1 ? 2 : 1)) ;;
    -*) fail "unknown argument '$1'; $expected" ;;
    *) [ -z "$folder" ] || fail "two folders, $folder and $1; $expected"; folder=$1; shift ;;
  esac
done
case $version in 3.11 | 3.12) ;; *) fail "--python takes 3.11 or 3.12, not '$version'; $expected" ;; esac
[ -n "$folder" ] || fail "no folder given; $expected"
parent=$folder
until [ -e "$parent" ]; do parent=$(dirname "$parent"); done
if [ ! -d "$parent" ] || [ ! -w "$parent" ]; then fail "$parent is no folder to write to; $expected"; fi
[ -z "$(ls -A "$folder" 2>/dev/null)" ] ||
  fail "$folder is not empty, and old wheels would be taken for new ones; expected a folder that is new or empty"

# What pip is told to keep to here, as in a container, is not meant for these wheels.
unset PIP_CONSTRAINT
for python in python3.12 python3.11 python3 ''; do
  "$python" -c 'import pip, tomllib' 2>/dev/null && break
done
[ -n "$python" ] || fail "needs a Python here, 3.11 or newer, with pip"

exec "$python" - "$root" "$folder" "$version" <<'END_OF_PYTHON'
"""Let pip resolve for the other Python, with torch and triton as empty wheels; then check what it left.

pip chooses wheels by ``--python-version`` and ``--platform``, but reads markers ("; python_version < '3.12'") as
those of the Python it runs on. So markers are read here as well: what the other Python needs and pip did not see
is asked for by name in another round, what it does not need is left out.
"""

import shlex
import shutil
import subprocess
import sys
import tempfile
import tomllib
import zipfile
from email.parser import HeaderParser
from pathlib import Path

root, folder, python_version = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
MIB = 2**20
BIG_MIB = 8
TARGET = {
    "python_version": python_version,
    "python_full_version": f"{python_version}.0",
    "implementation_name": "cpython",
    "implementation_version": f"{python_version}.0",
    "platform_python_implementation": "CPython",
    "os_name": "posix",
    "sys_platform": "linux",
    "platform_system": "Linux",
    "platform_machine": "x86_64",
}
# pip takes these tags literally: it does not know that glibc 2.28 runs what was built for 2.17.
PLATFORMS = [f"manylinux_2_{minor}_x86_64" for minor in range(28, 4, -1)]
PLATFORMS += ["manylinux2014_x86_64", "manylinux2010_x86_64", "manylinux1_x86_64"]
CONTAINERS_OWN = ("torch", "triton")
# torch 2.11 takes no setuptools from 82 on, and setuptools must suit the torch it meets there.
SUITS_TORCH = "setuptools<82"


def download(into, *arguments):
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
    if subprocess.run([*command, "--only-binary=:all:", "--dest", into, *arguments]).returncode:
        sys.exit("wheelhouse.sh: pip found no such set of wheels; what it said is above")


def write_empty_wheel(into, name, version):
    with zipfile.ZipFile(into / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
        info = f"{name}-{version}.dist-info"
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")


def read_wheel(path):
    """Name, version and requirements of a wheel."""
    with zipfile.ZipFile(path) as wheel:
        name = next(n for n in wheel.namelist() if n.endswith(".dist-info/METADATA") and n.count("/") == 1)
        metadata = HeaderParser().parsestr(wheel.read(name).decode())
    requires = [Requirement(text) for text in metadata.get_all("Requires-Dist", [])]
    return canonicalize_name(metadata["Name"]), metadata["Version"], requires


def close(wheels, requirements):
    """The names that ``requirements`` lead to on the target, and the requirements among them that no wheel meets."""
    reached, unmet, seen = set(), [], set()
    todo = list(requirements)
    while todo:
        requirement = todo.pop()
        name = canonicalize_name(requirement.name)
        if str(requirement) in seen:
            continue
        seen.add(str(requirement))
        version, requires = wheels.get(name, (None, []))
        if version is None or not requirement.specifier.contains(version, prereleases=True):
            unmet.append(bare(requirement))
            continue
        reached.add(name)
        todo += [r for r in requires if applies(r, requirement.extras)]
    return reached, unmet


def applies(requirement, extras=()):
    return requirement.marker is None or any(
        requirement.marker.evaluate(TARGET | {"extra": extra}) for extra in ["", *extras]
    )


def bare(requirement):
    """The requirement without its marker, which has been read."""
    extras = f"[{','.join(sorted(requirement.extras))}]" if requirement.extras else ""
    return f"{requirement.name}{extras}{requirement.specifier}"


print(f"Collecting wheels for Python {python_version} (a minute or two) ...", flush=True)
with tempfile.TemporaryDirectory() as scratch:
    tools, stub, found = (Path(scratch, name) for name in ("tools", "stub", "found"))
    stub.mkdir()
    download(tools, "--no-deps", "packaging")
    sys.path[:0] = map(str, tools.glob("*.whl"))
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    project = tomllib.loads((root / "pyproject.toml").read_text())
    needs = [*project["build-system"]["requires"], *project["project"]["dependencies"], SUITS_TORCH]
    needs += project["project"]["optional-dependencies"]["test"]
    needs = [r for r in map(Requirement, needs) if applies(r)]

    lines = (line.partition("#")[0].strip() for line in (root / "launch/constraints.txt").read_text().splitlines())
    pins = {r.name: bare(r) for r in map(Requirement, filter(None, lines)) if applies(r)}
    for name in CONTAINERS_OWN:
        pins[name] += "+empty"
        write_empty_wheel(stub, name, pins[name].removeprefix(f"{name}=="))
    constraints = Path(scratch, "constraints.txt")
    constraints.write_text("\n".join(pins.values()))

    platforms = [f"--platform={platform}" for platform in PLATFORMS]
    options = [*platforms, "--implementation=cp", "--python-version", python_version]
    options += ["--find-links", stub, "--constraint", constraints]
    asked = [bare(requirement) for requirement in needs]
    while True:
        download(found, *options, *asked)
        paths = {path: read_wheel(path) for path in found.glob("*.whl")}
        reached, unmet = close({name: (version, requires) for name, version, requires in paths.values()}, needs)
        if not unmet:
            break
        if set(unmet) <= set(asked):
            sys.exit(f"wheelhouse.sh: pip leaves {', '.join(unmet)} unmet")
        asked += unmet
        shutil.rmtree(found)

    folder.mkdir(parents=True, exist_ok=True)
    for path, (name, _, _) in paths.items():
        if name in reached.difference(CONTAINERS_OWN):
            shutil.move(path, folder)

sizes_mib = {path.name: path.stat().st_size / MIB for path in folder.glob("*.whl")}
for name, size_mib in sorted(sizes_mib.items(), key=lambda item: -item[1]):
    if size_mib >= BIG_MIB:
        print(f"{size_mib:6.1f} MiB  {name}")
print(f"{sum(sizes_mib.values()):6.1f} MiB  in all, {len(sizes_mib)} wheels, without {' and '.join(CONTAINERS_OWN)}")
print(f"On the other machine: launch/setup.sh --wheelhouse {shlex.quote(str(folder))} --system-torch")
END_OF_PYTHON
