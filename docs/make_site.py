"""Build the site of README.md, docs/ and results/reference/: ``python docs/make_site.py OUT``.

Pages keep their places, so that links work on a code host and on the site alike. Made here, and not committed: the
commands' own help (docs/commands.md) and a gallery of the reference figures (docs/gallery.md), whose commands are those
of results/README.md. A page, link or anchor that is missing ends the build. It needs the extra ``docs``.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from moe_ep_bench.cli import COMMANDS, make_parser  # noqa: E402

STAGED = ROOT / "build" / "site"
PAGES = ["README.md", "CHANGELOG.md", "docs/*.md", "results/README.md", "results/reference/*.md"]
LINK = re.compile(r"\[([^\]]*)\]\(([^)#\s:]+)(?:#[^)\s]*)?\)")


def commands_page() -> str:
    """The help of every command, as the program prints it."""
    parts = ["# Commands", "", "*The program's own help.*", ""]
    for name in COMMANDS:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
            make_parser().parse_args([*name.split(), "--help"])
        parts += [f"## {name}", "", "```", printed.getvalue().rstrip(), "```", ""]
    return "\n".join(parts)


def commands_of_results() -> dict[str, str]:
    """By the name of a file or folder of results/reference/, the command that makes it, as results/README.md has it."""
    rows = re.findall(r"^\| (.+?) \|.*\| (.+?) \|$", (ROOT / "results" / "README.md").read_text(), re.MULTILINE)
    named = [(re.findall(r"`([\w.-]+)`|\]\(reference/([\w.-]+)\)", cell), command) for cell, command in rows]
    return {Path(a or b).stem: command for names, command in named for a, b in names}


def gallery_page() -> str:
    """Each figure of gallery.yaml with its sentence and its command."""
    commands, figures = commands_of_results(), yaml.safe_load((ROOT / "docs" / "gallery.yaml").read_text())
    parts = ["# Gallery", "", "Every figure of the reference results, the command behind it, and what it shows."]
    for name, of_name in itertools.groupby(figures, key=lambda path: Path(path.partition("/")[0]).stem):
        parts += ["", f"## {name}", "", f"Made by {commands[name]}"]
        for path in of_name:
            parts += ["", figures[path], "", f"![{path}](../results/reference/{path})"]
    return "\n".join(parts).replace("](../docs/", "](")


def staged_text(page: Path, text: str) -> str:
    """A page's text with links to folders as plain words, which a site has no page for; linked files are copied."""

    def link(found: re.Match[str]) -> str:
        words, target = found[1], found[2]
        other = (page.parent / target).resolve()
        if other.is_dir():
            return f"{words} (`{other.relative_to(ROOT)}/`)"
        copy = STAGED / other.relative_to(ROOT)
        if other.is_file() and other.suffix != ".md":
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(other, copy)
        return found[0]

    return LINK.sub(link, text)


def stage() -> None:
    """Lay the pages out as in the repository, with the files that they link to."""
    shutil.rmtree(STAGED, ignore_errors=True)
    pages = {path: path.read_text() for pattern in PAGES for path in sorted(ROOT.glob(pattern))}
    pages |= {ROOT / "docs" / "commands.md": commands_page(), ROOT / "docs" / "gallery.md": gallery_page()}
    for path, text in pages.items():
        staged = STAGED / path.relative_to(ROOT)
        staged.parent.mkdir(parents=True, exist_ok=True)
        staged.write_text(staged_text(path, text))


def main(out: Path) -> None:
    stage()
    build = ["mkdocs", "build", "--strict", "--config-file", str(ROOT / "docs" / "mkdocs.yml"), "--site-dir", str(out)]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    sys.exit(subprocess.run([sys.executable, "-m", *build], check=False, env=environment).returncode)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(Path(sys.argv[1]).resolve())
