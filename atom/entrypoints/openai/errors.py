"""Errors in OpenAI's shape: ``{"error": {"message", "type", "param", "code"}}``."""

from __future__ import annotations

import msgspec


class ApiError(Exception):
    """An answer other than the one that was asked for.

    Attributes:
        status: HTTP status.
        message: what was given, what is allowed, the remedy.
        type: OpenAI's class of the error.
        param: the request's field at fault.
        code: machine-readable name of the error.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.type = type
        self.param = param
        self.code = code

    def body(self) -> bytes:
        """The JSON that the client gets."""
        return msgspec.json.encode(
            {
                "error": {
                    "message": self.message,
                    "type": self.type,
                    "param": self.param,
                    "code": self.code,
                }
            }
        )


def bad_value(message: str, param: str | None, code: str | None = None) -> ApiError:
    """400: a field holds what is not accepted."""
    return ApiError(400, message, param=param, code=code)


def unavailable(message: str, code: str) -> ApiError:
    """503: the server cannot take or finish requests now."""
    return ApiError(503, message, type="server_error", code=code)
