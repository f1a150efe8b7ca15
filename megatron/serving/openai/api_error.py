"""What a client is told of a request that is not answered, in OpenAI's form."""

from __future__ import annotations

from typing import Any

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}


class ApiError(Exception):
    """Report a request that is not answered: an HTTP status, and one line for the client."""

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code

    def content(self) -> dict[str, Any]:
        """Return the body of the response."""
        kind = _TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


def bad_value(name: str, wanted: str, value: object) -> ApiError:
    """Return what to tell of a field whose value cannot be."""
    shown = repr(value)
    return ApiError(400, f"{name} must be {wanted}, and is {shown[:60]}{'…' if len(shown) > 60 else ''}", param=name)
