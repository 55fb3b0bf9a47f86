"""The page in which one talks with a model: one document, which needs nothing from elsewhere."""

import base64
import hashlib
import re
from pathlib import Path

HERE = Path(__file__).parent
PARTS = {"/*STYLE*/": "page.css", "/*SCRIPT*/": "page.js"}  # placeholders in page.html
INLINE = re.compile(r"<(script|style)>(.*?)</\1>", re.DOTALL)


def document() -> str:
    """Returns the page, with its style and its script."""
    html = (HERE / "page.html").read_text(encoding="utf-8")
    for placeholder, name in PARTS.items():
        html = html.replace(placeholder, (HERE / name).read_text(encoding="utf-8"))
    return html


def policy(page: str, *more: str) -> str:
    """Returns the content security policy by which a page runs its own scripts, in its own style.

    Nothing else, and nothing from elsewhere, except for `more` directives.
    """
    sources: dict[str, list[str]] = {"script": [], "style": []}
    for kind, content in INLINE.findall(page):
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        sources[kind].append(f"'sha256-{digest}'")
    allowed = (f"{kind}-src {' '.join(digests)}" for kind, digests in sources.items())
    always = "img-src data:", "base-uri 'none'", "form-action 'none'"
    return "; ".join(["default-src 'none'", *allowed, *always, *more])
