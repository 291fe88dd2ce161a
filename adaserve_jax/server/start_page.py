"""Start page at /: what runs here, links, and a form that tries a request with a target.

The page is one file that holds no data and needs no key: its script asks the routes that have the data, with the key
that the user gives it. The policy sent with it allows this script and style, by their digests, and nothing else.
"""

from __future__ import annotations

import base64
import hashlib
import re
from pathlib import Path

from fastapi import APIRouter, Response

from adaserve_jax.server.settings import ServerSettings

PATH = "/"
_FILE = Path(__file__).with_suffix(".html")


def router(settings: ServerSettings, *, keyed: bool) -> APIRouter:
    """Return the route of the page. keyed: the server has API keys, so that the page asks for one."""
    routes = APIRouter()
    page = _FILE.read_text()
    policy = (
        f"default-src 'none'; script-src {_digest(page, 'script')}; style-src {_digest(page, 'style')}; "
        "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    marks = {"data-keyed": keyed, "data-dashboard": settings.dashboard}
    content = page.replace("<body>", " ".join(["<body", *(name for name, on in marks.items() if on)]) + ">")

    @routes.get(PATH, include_in_schema=False)
    async def start() -> Response:
        return Response(
            content, media_type="text/html", headers={"content-security-policy": policy, "cache-control": "no-cache"}
        )

    return routes


def _digest(page: str, tag: str) -> str:
    """Return the source expression of the page's one inline element of this tag."""
    (inline,) = re.findall(f"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
    return f"'sha256-{base64.b64encode(hashlib.sha256(inline.encode()).digest()).decode()}'"
