"""Claims about README.md and docs/: links, commands and paths hold, config.md is current, pages are short."""

from __future__ import annotations

import re
import runpy
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
import yaml

from moe_ep_bench.cli import COMMANDS, make_parser
from moe_ep_bench.config.files import load_experiments

ROOT = Path(__file__).parent.parent
GENERATED = ROOT / "docs" / "config.md"
PAGES = [ROOT / "README.md", *sorted(set((ROOT / "docs").glob("*.md")) - {GENERATED})]
RESULTS = [ROOT / "results" / "README.md", *sorted((ROOT / "results" / "reference").glob("*.md"))]
THIRTEEN = {name.partition(" ")[0] for name in COMMANDS}


def named(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


pages = pytest.mark.parametrize("page", [*PAGES, GENERATED, *RESULTS], ids=named)


def code(text: str) -> Iterator[str]:
    """Lines of code blocks without comments, continued ones joined, and inline code."""
    blocks = re.findall(r"^```\w*\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    for block in blocks:
        yield from block.replace("\\\n", " ").splitlines()
    yield from re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL))


def commands(text: str) -> Iterator[list[str]]:
    """The arguments of every call of moe-ep-bench in code."""
    for line in code(text):
        called = re.match(r"(?:\w+=\$\()?(?:\.venv/bin/)?moe-ep-bench (.+)", line)
        if called:
            yield shlex.split(called[1].partition(" | ")[0], comments=True)


def anchors(text: str) -> set[str]:
    """Where a page's links may lead, as GitHub names headings: words joined by hyphens, repeated ones numbered."""
    found: list[str] = []
    for heading in re.findall(
        r"^#+ +(.+?) *$", re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL), re.MULTILINE
    ):
        words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        slug = re.sub(r"[^\w\- ]", "", words.lower()).replace(" ", "-")
        repeated = sum(re.fullmatch(rf"{re.escape(slug)}(-\d+)?", one) is not None for one in found)
        found.append(f"{slug}-{repeated}" if repeated else slug)
    return set(found)


def broken_links(page: Path) -> list[str]:
    """Links of a page that lead to no file or heading, and addresses elsewhere that are none."""
    text = re.sub(r"^```.*?^```|`[^`\n]*`", "`", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    found = re.findall(r"\]\(\s*<?([^)>\s]*)[^)]*\)|^\[[^\]]+\]: *(\S+)|(?:href|src)=\"([^\"]*)\"", text, re.MULTILINE)
    broken = []
    for link in map("".join, found):
        address = urlsplit(link)
        if address.scheme or address.netloc:
            is_right = address.scheme in ("http", "https") and re.fullmatch(r"[\w-]+(\.[\w-]+)+(:\d+)?", address.netloc)
        else:
            target = page.parent / unquote(address.path) if address.path else page
            is_right = link and target.exists() and target.resolve().is_relative_to(ROOT)
            if is_right and address.fragment:
                is_right = target.suffix == ".md" and address.fragment in anchors(target.read_text())
        broken += [] if is_right else [link]
    return broken


@pytest.mark.parametrize("page", [*PAGES, GENERATED, *RESULTS, ROOT / "CHANGELOG.md"], ids=named)
def test_links_lead_to_files_and_headings(page: Path) -> None:
    assert not broken_links(page)


def test_links_that_lead_nowhere_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    (tmp_path / "other.md").write_text("# A *b*: c_d?\n```\n# no heading\n```\n## Twice\n## Twice\n")
    right = ["other.md", "#here", "other.md#a-b-c_d", "other.md#twice-1", "https://arxiv.org/abs/1"]
    wrong = [
        "no.md",
        "#there",
        "other.md#no-heading",
        "other.md#twice-2",
        "https:/arxiv.org",
        "ftp://x.org/a",
        "/etc/hosts",
        "",
    ]
    page = tmp_path / "page.md"
    page.write_text(
        "# Here\n`[code](no.md)`\n" + "".join(f"[a]({link})\n" for link in [*right, *wrong]) + "[a]: gone.md\n"
    )
    assert broken_links(page) == [*wrong, "gone.md"]


@pages
def test_paths_that_are_named_exist(page: Path) -> None:
    text = page.read_text()
    found = re.findall(r"\b(?:configs|launch|slurm|benchmarks|tests|moe_ep_bench)/[\w./-]*\w", text)
    assert not [path for path in found if not (ROOT / path).exists()]


@pages
def test_commands_parse(page: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By the parser of the program; a command that is only named has no arguments to parse."""
    for arguments in commands(page.read_text()):
        assert arguments[0] in THIRTEEN, arguments
        if " ".join(arguments) in {*COMMANDS, *THIRTEEN}:
            continue
        try:
            make_parser().parse_args(arguments)
        except SystemExit:
            pytest.fail(f"{' '.join(arguments)}: {capsys.readouterr().err}")


def test_commands_that_wait_for_a_gpu_name_configs_keys_and_steps_that_there_are() -> None:
    text = RESULTS[0].read_text().partition("## What still waits for a GPU")[2]
    found = [make_parser().parse_args(one) for one in commands(text) if one[0] == "run" and one[1:]]
    assert len(found) > 5
    for asked in found:
        load_experiments(ROOT / asked.config, asked.overrides, on_cpu=False)
    script = (ROOT / "launch" / "gpu_session.sh").read_text()
    steps = [step for names in re.findall(r"--only ([a-z][\w,-]+)", text) for step in names.split(",")]
    assert steps
    kinds = "step|show|virtual|decode|table|emulate papers|emulate emulate"
    assert set(steps) <= set(re.findall(rf"(?:^|\|\| )(?:{kinds}) ([\w-]+) ", script, re.MULTILINE))


def test_contributors_are_led_to_files_and_tables_that_there_are_and_to_every_room() -> None:
    text, package = (ROOT / "docs" / "contributing.md").read_text(), ROOT / "moe_ep_bench"
    paths = set(re.findall(r"(?<![\w./-])[a-z_][\w/]*(?:/|\.py|\.yaml|\.sh)(?![\w/.])", text))
    assert len(paths) > 50
    assert not [path for path in paths if not any((root / path).exists() for root in (package, ROOT))]
    tables = re.findall(r"`([\w/]+\.py)` \((`[^):]*`)", text)
    assert len(tables) > 12
    for path, names in tables:
        code = next(root / path for root in (package, ROOT) if (root / path).exists()).read_text()
        for name in re.findall(r"`(\w+)`", names):
            assert re.search(rf"^(class )?{name}\b", code, re.MULTILINE), (path, name)
    rooms = {path.name + "/" * path.is_dir() for path in package.iterdir() if not path.name.startswith("__")}
    assert rooms <= paths


def test_every_header_of_a_table_is_a_term() -> None:
    from moe_ep_bench.analysis.columns import COLUMNS, Column
    from moe_ep_bench.analysis.tables import VIEWS

    terms = set(re.findall(r"\*\*([^*]+)\*\*", (ROOT / "docs" / "terms.md").read_text()))
    own = [column for view in VIEWS.values() for column in view.columns if isinstance(column, Column)]
    headers = {column.header for column in [*COLUMNS.values(), *own]}
    headers |= {header for view in VIEWS.values() for header in view.headers.values()}
    shared = re.compile(r" (p99|speedup|verdict|nats|%)$")
    assert not [header for header in headers if not {header, shared.sub("", header)} & terms]


def test_gallery_and_site_leave_no_figure_and_no_page_out() -> None:
    reference = ROOT / "results" / "reference"
    drawn = {path.relative_to(reference).as_posix() for kind in ("png", "svg") for path in reference.rglob(f"*.{kind}")}
    drawn -= {name.removesuffix(".png") + ".svg" for name in drawn if name.endswith(".png")}
    site = runpy.run_path(str(ROOT / "docs" / "make_site.py"))
    assert drawn == set(yaml.safe_load((ROOT / "docs" / "gallery.yaml").read_text()))
    assert site["gallery_page"]().count("![") == len(drawn)
    navigation = (ROOT / "docs" / "mkdocs.yml").read_text()
    staged = {path.relative_to(ROOT).as_posix() for pattern in site["PAGES"] for path in ROOT.glob(pattern)}
    offered = set(re.findall(r": ([\w./-]+\.md)$", navigation, re.MULTILINE))
    assert offered == staged | {"docs/commands.md", "docs/gallery.md"}
    assert set(COMMANDS) == set(re.findall(r"^## (.+)$", site["commands_page"](), re.MULTILINE))


def test_reference_results_that_there_are_not_are_refused_before_anything_runs() -> None:
    command = ["bash", str(ROOT / "launch" / "references.sh"), "--only", "atlas,nothing"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert "--only nothing: expected one of lossless whatif-skew" in done.stderr


def test_readme_lists_every_command_and_policy() -> None:
    from moe_ep_bench.policies import POLICIES

    readme = (ROOT / "README.md").read_text()
    assert set(re.findall(r"^\| `([\w-]+)` \| [a-z]", readme, re.MULTILINE)) >= THIRTEEN
    assert not [name for name in POLICIES if f"`{name}`" not in readme]


def test_tree_of_the_readme_is_there() -> None:
    tree = re.search(r"^## The tree\n\n```\n(.*?)```", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    above = ROOT
    for line in tree[1].splitlines():
        indent, name = re.match(r"( *)(\S+)", line).groups()
        above = above if indent else ROOT
        assert (above / name).exists(), line
        above = above / name if not indent and name.endswith("/") else above


def test_config_of_the_readme_is_valid(tmp_path: Path) -> None:
    block = re.search(r"```yaml\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    (tmp_path / "mine.yaml").write_text(block[1])
    assert yaml.safe_load(block[1])["name"] == "mine"
    assert len(load_experiments(tmp_path / "mine.yaml", on_cpu=True)) == 1


def test_reference_of_keys_is_current_and_describes_each() -> None:
    page = runpy.run_path(str(ROOT / "docs" / "make_config.py"))["page"]()
    assert GENERATED.read_text() == page, "run: python docs/make_config.py"
    assert not [line for line in page.splitlines() if re.search(r"\|\s+\|$", line)]


def test_pages_are_short() -> None:
    pages = [*PAGES, GENERATED]
    words = {page: sum(any(map(str.isalnum, word)) for word in page.read_text().split()) for page in pages}
    assert words.pop(ROOT / "README.md") <= 1_050
    assert words.pop(GENERATED) <= 2_420, "a line a key"
    assert words.pop(ROOT / "docs" / "contributing.md") <= 280, "beside pages for users"
    assert words.pop(ROOT / "docs" / "atlas.md") <= 400, "sentences to quote"
    assert words.pop(ROOT / "docs" / "terms.md") <= 1_200, "a line a word of tables and notes"
    assert sum(words.values()) <= 8_860
