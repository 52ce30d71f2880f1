"""The page at `/`, where people try the models and watch the server: its files, and how browsers may use them."""

import hashlib
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

FOLDER = Path(__file__).parent / "page"
TYPES = {".css": "text/css", ".html": "text/html", ".js": "text/javascript", ".svg": "image/svg+xml"}
"""Ends of names -> content types; those of `mimetypes` depend on the machine."""
HEADERS = {
    "Cache-Control": "no-cache",  # a browser asks each time, and gets 304 unless the server is another version
    "Content-Security-Policy": "; ".join(
        (
            "default-src 'self'",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
            "object-src 'none'",
            "require-trusted-types-for 'script'",  # no text of a model becomes HTML, even by mistake
            "trusted-types 'none'",
        )
    ),
    "Cross-Origin-Opener-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


def page_routes() -> list[Route]:
    """Make the routes of the page and its files. They need no key; what the page asks of the server does."""
    files = {file.name: file for file in sorted(FOLDER.iterdir()) if file.suffix in TYPES}
    paths = {name: f"/page/{name}" for name in files} | {"index.html": "/"}
    return [_route(path, files[name]) for name, path in paths.items()]


def _route(path: str, file: Path) -> Route:
    content = file.read_bytes()
    headers = {**HEADERS, "ETag": f'"{hashlib.sha256(content).hexdigest()[:32]}"'}

    async def send(request: Request) -> Response:
        known = request.headers.get("if-none-match", "")
        if headers["ETag"] in known:  # also of a list, or with the W/ of a proxy that compresses
            return Response(status_code=304, headers=headers)
        return Response(content, headers=headers, media_type=TYPES[file.suffix])

    return Route(path, send, include_in_schema=False)
