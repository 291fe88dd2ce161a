"""Error responses: every failure of a request becomes `{"error": {"message", "type", "param", "code"}}`."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import FastAPI, HTTPException, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException as StarletteHTTPException

from adaserve_jax.errors import AdaServeError

MAX_MESSAGE = 1000
RETRY_AFTER_S = 1.0
"""Value of Retry-After where nothing better is known."""
_API_FIELD = {"json_schema": "response_format", "tool_calls": "tools"}  # names of the engine that differ from the API's
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "service_unavailable",
    504: "timeout_error",
}

_BOUNDS = {
    "too_short": "a list of at least {min_length}",
    "too_long": "a text of at most {max_length} characters",
    "greater_than_equal": "at least {ge}",
    "less_than": "below {lt}",
    "model_attributes_type": "a valid dictionary",
    "model_type": "a valid dictionary",
}
"""Wording of pydantic's errors of bounds, and of those that name a class, by their type."""

CODES: dict[str, str] = {
    "aborted": "503: the server stopped the request, because it shuts down",
    "ambiguous_length": "400: Content-Length stands beside Transfer-Encoding; the connection is closed",
    "context_length_exceeded": "400: the prompt, max_tokens alone, or min_tokens behind the prompt exceed the context",
    "crashes_engine": "400: the request was running at each of the engine's last crashes; it is set aside",
    "empty_prompt": "400: a prompt without a token",
    "engine_dead": "503: the engine process ended for good; the server must be restarted",
    "engine_error": "500: the engine failed on this request and goes on with the others",
    "engine_restarting": "503: the engine process ended and is started again; Retry-After says when to come again",
    "engine_stalled": "503: requests wait and the engine completes no step; it may recover",
    "headers_too_large": "431: the first line and the headers are larger than the server takes",
    "internal_error": "500: a bug in the server; it goes on",
    "invalid_adapter": "400: a folder holds no LoRA adapter that this model can be served with",
    "invalid_api_key": "401: the Authorization header is missing, given twice, or holds no key of this server",
    "invalid_grammar": "400: regex, choice or grammar is invalid, or cannot be enforced",
    "invalid_json": "400: the body is not JSON",
    "invalid_messages": "400: the chat template refuses the messages",
    "invalid_request": "400: the request is refused for the reason given",
    "invalid_schema": "400: response_format or tools hold no JSON schema, or one that cannot be enforced",
    "invalid_slo": (
        "400: a target is not a finite number above 0, the class is unknown, or an unknown field looks like a target"
    ),
    "invalid_text": "400: a text is not valid Unicode",
    "invalid_value": "400: a field has a wrong type or is out of range",
    "method_not_allowed": "405: the route exists for another method",
    "missing_field": "400: a field that must be there is not",
    "model_not_found": "404: the server serves another model, or has no such adapter",
    "no_adapter_slot": "400: as many LoRA adapters are loaded, or in use by running requests, as have room",
    "no_chat_template": "400: the model has no chat template; use /v1/completions",
    "no_token_allowed": "400: after a text, what the request forbids and asks for leaves no token",
    "not_allowed": "403: the API key is not an operator's and the route is for operators, or the route is off",
    "not_found": "404: there is no such route",
    "not_ready": "503: the engine still loads or compiles",
    "overloaded": "429: the request would wait too long for its turn; Retry-After says when it would not",
    "queue_full": "429: the queue is full; Retry-After says when to come again",
    "queue_timeout": "504: the request had not begun within its max_queue_ms",
    "rate_limited": "429: the API key is over one of its limits; Retry-After says when there is room",
    "request_too_large": "413: the body is larger than the server takes",
    "shutting_down": "503: the server finishes what it has and takes nothing new",
    "slo_infeasible": "400: a target is below what the machine gives one request alone; the message has the least",
    "too_many_values": "400: the body holds more JSON values than a request can need",
    "unsupported_content": "400: a message holds a part that is not text",
    "unsupported_parameter": "400: OpenAI's API or another server has the field, this one does not implement it",
}
"""Every error code: its status, and what it means."""


class ApiError(HTTPException):
    """One error response, raised anywhere below a route; the handlers of `add_handlers` send it."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ):
        super().__init__(status, message, dict(headers) if headers else None)
        self.message = message
        self.code = code
        self.param = param

    def body(self) -> dict[str, Any]:
        kind = _TYPES.get(self.status_code, "invalid_request_error")
        message = self.message if len(self.message) <= MAX_MESSAGE else self.message[:MAX_MESSAGE] + " ..."
        return {"error": {"message": message, "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> JSONResponse:
        return _AsciiResponse(self.body(), self.status_code, self.headers)


class _AsciiResponse(JSONResponse):
    """Response of JSON in ASCII, since an error may quote text that is not valid Unicode."""

    def render(self, content: Any) -> bytes:
        return json.dumps(content, separators=(",", ":")).encode("ascii")


def invalid(message: str, param: str | None, code: str = "invalid_value") -> ApiError:
    """Return the 400 for a wrong field."""
    return ApiError(400, message, code=code, param=param)


def retry_after(wait_s: float) -> str:
    """Return the value of the header: whole seconds, at least one."""
    return str(max(1, math.ceil(wait_s)))


def from_code(message: str, code: str, param: str | None = None, retry_after_s: float | None = None) -> ApiError:
    """Return the response of an error code, which decides the status. retry_after_s: None: unknown."""
    status = int(CODES.get(code, "400")[:3])
    wait_s = RETRY_AFTER_S if retry_after_s is None else retry_after_s
    headers = {"retry-after": retry_after(wait_s)} if status in (429, 503) else None
    return ApiError(status, message, code=code, param=_API_FIELD.get(param or "", param), headers=headers)


def from_validation(errors: Sequence[Mapping[str, Any]], body: Any) -> ApiError:
    """Return one 400 for pydantic's list of errors: the first wrong field, with everything that it could have been.

    Of a field of several types, it is about the one that the value fits best.
    """
    first = next((error for error in errors if error["type"] == "invalid_text"), errors[0])
    if first["type"] == "json_invalid":
        reason = first.get("ctx", {}).get("error", "unreadable")
        return ApiError(400, f"the body is not JSON: {reason} at character {first['loc'][-1]}", code="invalid_json")
    if len(first["loc"]) < 2:
        return ApiError(
            400, "the body must be a JSON object, sent as content-type application/json", code="invalid_json"
        )
    if first["type"] != "invalid_text":
        first = _closest(first, errors, body)
    param, path = str(first["loc"][1]), _field_path(first, body)
    where = _spelled(path)
    if first["type"] == "missing":
        return ApiError(400, f"{where} must be given", code="missing_field", param=param)
    alternatives = [first] if first["type"] == "invalid_text" else errors
    expected = dict.fromkeys(_expected(error) for error in alternatives if _field_path(error, body) == path)
    shown = repr(first.get("input"))
    shown = shown if len(shown) <= 80 else shown[:80] + "..."
    code = "invalid_slo" if param.startswith("slo_") else "invalid_value"
    code = "invalid_text" if first["type"] == "invalid_text" else code
    return ApiError(400, f"{where} must be {' or '.join(list(expected)[:4])}, got {shown}", code=code, param=param)


def _closest(first: Mapping[str, Any], errors: Sequence[Mapping[str, Any]], body: Any) -> Mapping[str, Any]:
    """Return the error that lies deepest in the value of the first wrong field, and there in the latest item.

    A field of several types has errors of each; those of a type that the value is not meant to be lie at its top.
    """
    length, above = len(first["loc"]), first["loc"][:-1]
    by_type: dict[Any, Mapping[str, Any]] = {}
    for error in errors:
        if error["loc"][: length - 1] == above:
            by_type.setdefault(tuple(error["loc"][:length]), error)
    path, best, progress = _field_path(first, body), first, (0, 0)
    for error in by_type.values():
        found = _field_path(error, body)
        reached = len(found), found[-1] if isinstance(found[-1], int) else -1
        if found[: len(path)] == path and reached > progress:
            best, progress = error, reached
    return best


def _field_path(error: Mapping[str, Any], body: Any) -> tuple[str | int, ...]:
    """Return ("messages", 0, "role") for pydantic's ("body", "messages", 0, "Message", "role"): no names of types."""
    location: Sequence[str | int] = error["loc"]
    path, value = [location[1]], body.get(location[1]) if isinstance(body, dict) else None
    for position, part in enumerate(location[2:], 2):
        missing = error["type"] == "missing" and position == len(location) - 1
        if isinstance(value, list) and isinstance(part, int):
            path, value = [*path, part], value[part]
        elif isinstance(value, dict) and (part in value or missing):
            path, value = [*path, part], value.get(part)
    return tuple(path)


def _spelled(path: Sequence[str | int]) -> str:
    """Return a path as messages write it: messages[0].role."""
    return str(path[0]) + "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path[1:])


def _expected(error: Mapping[str, Any]) -> str:
    if (bound := _BOUNDS.get(error["type"])) is not None:
        return bound.format(**error.get("ctx", {}))
    return str(error["msg"]).removeprefix("Input should be ").removeprefix("Value error, ")


def from_http(error: StarletteHTTPException) -> ApiError:
    """Return the response of an error of Starlette or FastAPI: no such route, wrong method, unreadable body."""
    if isinstance(error, ApiError):
        return error
    known = {
        404: ("not_found", "there is no such route; /docs lists them"),
        405: ("method_not_allowed", "this route exists for another method; the header 'allow' names it"),
    }
    unreadable = "the body is no readable JSON: not UTF-8, nested too deeply, or with a number of too many digits"
    code, message = known.get(error.status_code, ("invalid_json", unreadable))
    return ApiError(error.status_code, message, code=code, headers=error.headers)


def add_handlers(app: FastAPI) -> None:
    """Make `app` answer every error with an ApiError's body."""

    async def answer(_: Request, error: Exception) -> JSONResponse:
        if isinstance(error, RequestValidationError):
            return from_validation(error.errors(), error.body).response()
        if isinstance(error, AdaServeError):
            return from_code(str(error), error.code, error.param, error.retry_after_s).response()
        assert isinstance(error, StarletteHTTPException)
        return from_http(error).response()

    for kind in (RequestValidationError, AdaServeError, StarletteHTTPException):
        app.add_exception_handler(kind, answer)
