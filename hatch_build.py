"""What a build adds: the commit that it is made from, and a README whose links lead somewhere on a package index."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from hatchling.metadata.plugin.interface import MetadataHookInterface


class Stamp(BuildHookInterface):
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        package = Path(self.root, "moe_ep_bench")
        known = runpy.run_path(str(package / "machine" / "commit.py"))
        commit, stamp = known["commit_of"](package), package / known["STAMP"]
        if version == "editable" or commit is None:  # An editable clone asks git.
            return
        self._folder = TemporaryDirectory()
        written = Path(self._folder.name, stamp.name)
        written.write_text(f"{commit}\n")
        build_data["force_include"][str(written)] = f"moe_ep_bench/{stamp.name}"


class Readme(MetadataHookInterface):
    def update(self, metadata: dict[str, Any]) -> None:
        text = Path(self.root, "README.md").read_text()
        metadata["readme"] = {"content-type": "text/markdown", "text": without_relative_links(text)}


def without_relative_links(text: str) -> str:
    """The text with pictures and links that need the repository beside it left out; a link's words stay."""
    text = re.sub(r"!\[[^\]]*\]\((?!\w+://)[^)]*\)\n*", "", text)
    return re.sub(r"\[([^\]]*)\]\((?!\w+://|#)[^)]*\)", r"\1", text)
