"""The limits of clients: keys, and the size and time of requests."""

import dataclasses
import hmac
from typing import TYPE_CHECKING

from jaxinfer.fields import AtLeast1, Positive, check_fields
from jaxinfer.http.errors import BadRequestError
from jaxinfer.models.vision.image_files import MAX_PIXELS

if TYPE_CHECKING:
    from starlette.requests import Request


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits of a server.

    Attributes:
      api_keys: the keys of which a request must have one ("Authorization: Bearer KEY" or "x-api-key: KEY"); none:
        anybody may ask.
      admin_keys: the keys of which a request that changes the server must have one; they are API keys, too. None: such
        requests are refused if there are API keys, and otherwise anybody may send them.
      max_body_bytes: bytes of a body.
      max_prompts: prompts of one completion.
      max_inputs: images or texts of one request for experts or an elastic service.
      max_image_pixels: pixels of an image that a client sends; larger ones are not decoded.
      cors_origins: origins whose pages may ask from a browser, such as "https://chat.example"; "*": all.
      timeout: seconds after which a request is given up, the time that it waits included; None: never.
    """

    api_keys: tuple[str, ...] = ()
    admin_keys: tuple[str, ...] = ()
    max_body_bytes: AtLeast1 = 8 << 20
    max_prompts: AtLeast1 = 256
    max_inputs: AtLeast1 = 64
    max_image_pixels: AtLeast1 = MAX_PIXELS
    cors_origins: tuple[str, ...] = ()
    timeout: Positive | None = 600.0

    def __post_init__(self) -> None:
        check_fields(self)

    def check_key(self, request: "Request", *, admin: bool = False) -> None:
        """Raise BadRequestError unless the request has one of the keys. Its time does not depend on the key.

        admin: whether it must be an admin key.
        """
        scheme, _, key = request.headers.get("authorization", "").partition(" ")
        bearer = key.strip().encode() if scheme.lower() == "bearer" else b""
        given = (bearer, request.headers.get("x-api-key", "").encode())
        known = [hmac.compare_digest(key, each.encode()) for key in given for each in self.api_keys + self.admin_keys]
        is_admin = [hmac.compare_digest(key, each.encode()) for key in given for each in self.admin_keys]
        if (self.api_keys or (admin and self.admin_keys)) and not any(known):
            raise BadRequestError("the API key is missing or wrong.", status=401, code="invalid_api_key")
        if admin and self.needs_key and not any(is_admin):
            why = "send one" if self.admin_keys else "the server has none"
            raise BadRequestError(
                f"this changes the server, which takes an admin key: {why}.", status=403, code="admin_key_required"
            )

    @property
    def needs_key(self) -> bool:
        """Whether a request that changes the server needs a key."""
        return bool(self.api_keys or self.admin_keys)

    async def read_body(self, request: "Request") -> bytes:
        """Read a body. Raises BadRequestError for one that is too large, before all of it is read."""
        body = bytearray()
        async for chunk in request.stream():
            body += chunk
            if len(body) > self.max_body_bytes:
                raise BadRequestError(
                    f"the body has more than {self.max_body_bytes:,} bytes.", status=413, code="request_too_large"
                )
        return bytes(body)
