"""What mkdocs asks while `make site` builds: pages that live outside docs/, links to them, and GitHub's anchors.

Documents stay as GitHub shows them. The site takes some from elsewhere in the repository, turns links to those into
links between pages, and leaves of links to files that are no pages their text.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files
from pymdownx.slugs import slugify

ROOT = Path(__file__).resolve().parent.parent
DOCS = "docs"
GUESTS = {
    "about.md": "README.md",
    "contributing.md": "CONTRIBUTING.md",
    "reporting.md": "SECURITY.md",
    "changelog.md": "CHANGELOG.md",
    "peers.md": "benchmarks/peers/README.md",
}
"""Pages of the site, and where in the repository they are."""
FENCED = re.compile(r"(^```.*?^```)", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(?P<image>!?)\[(?P<text>[^\]]*)\]\((?P<target>[^)#\s]+)(?P<anchor>#[^)\s]*)?\)")


def home_of(page: str) -> str:
    """Return the path in the repository of a page of the site."""
    return GUESTS.get(page, f"{DOCS}/{page}")


def page_of(path: str) -> str | None:
    """Return the page of the site that a path in the repository becomes; None: it becomes none."""
    if path.startswith(f"{DOCS}/"):
        return path.removeprefix(f"{DOCS}/")
    return {home: page for page, home in GUESTS.items()}.get(path)


def relinked(markdown: str, page: str) -> str:
    """`markdown` of a page with links as the site has them; one to what does not exist stays, for mkdocs to name."""
    here = posixpath.dirname(home_of(page))

    def relink(link: re.Match[str]) -> str:
        target, anchor = link["target"], link["anchor"] or ""
        path = posixpath.normpath(posixpath.join(here, target))
        if ":" in target or not (ROOT / path).exists():
            return link[0]
        other = page_of(path)
        if other is None:
            return link["text"]
        there = posixpath.relpath(other, posixpath.dirname(page) or ".")
        return f"{link['image']}[{link['text']}]({there}{anchor})"

    parts = FENCED.split(markdown)
    parts[::2] = [LINK.sub(relink, part) for part in parts[::2]]
    return "".join(parts)


def on_config(config: Any) -> Any:
    """Anchors of headings as GitHub makes them, so that links to them work in both."""
    config["mdx_configs"].setdefault("toc", {})["slugify"] = slugify(case="lower")
    return config


def on_files(files: Files, config: Any) -> Files:
    for page, home in GUESTS.items():
        files.append(File.generated(config, page, abs_src_path=str(ROOT / home)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    return relinked(markdown, page.file.src_uri)
