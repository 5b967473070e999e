"""The HTTP application: its routes, and every error in OpenAI's shape."""

from __future__ import annotations

from importlib import metadata
from typing import Any

import msgspec
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException

import atom
from atom import envs
from atom.engine.router import EngineFailed, QueueFull
from atom.entrypoints.openai.chat import create_chat_completion
from atom.entrypoints.openai.completions import create_completion
from atom.entrypoints.openai.context import Context, Status
from atom.entrypoints.openai.errors import ApiError
from atom.entrypoints.openai.exchange import ClientGone, as_api_error
from atom.entrypoints.openai.gate import CLIENT_GONE, Gate
from atom.entrypoints.openai.metrics import CONTENT_TYPE
from atom.entrypoints.openai.protocol import ChatRequest, CompletionRequest

ENDPOINTS = frozenset(
    {
        "/health",
        "/metrics",
        "/version",
        "/v1/models",
        "/v1/completions",
        "/v1/chat/completions",
    }
)


def build_app(context: Context) -> FastAPI:
    """The application that serves ``context``."""
    app = FastAPI(
        title="ATOM",
        version=atom.__version__,
        description="OpenAI-compatible API of a mixture-of-experts model.",
        redirect_slashes=False,
    )
    _add_generation(app, context)
    _add_information(app, context)
    for kind in (ApiError, EngineFailed, QueueFull):
        app.add_exception_handler(kind, _answer_error)
    app.add_exception_handler(ClientGone, _answer_nobody)
    app.add_exception_handler(HTTPException, _answer_http_error)
    app.add_middleware(
        Gate, api_key=context.args.api_key, metrics=context.metrics, endpoints=ENDPOINTS
    )
    return app


def _add_generation(app: FastAPI, context: Context) -> None:
    @app.post("/v1/completions", **_documented(CompletionRequest))
    async def completions(request: Request) -> Response:
        """Continue one or more prompts."""
        return await create_completion(request, context)

    @app.post("/v1/chat/completions", **_documented(ChatRequest))
    async def chat_completions(request: Request) -> Response:
        """Answer a conversation's last turn."""
        return await create_chat_completion(request, context)


def _documented(kind: type[msgspec.Struct]) -> dict[str, Any]:
    """How a route's body appears in the OpenAPI document."""
    _, components = msgspec.json.schema_components([kind])
    inlined = _inline(components[kind.__name__], components)
    return {
        "response_model": None,
        "openapi_extra": {
            "requestBody": {
                "required": True,
                "content": {"application/json": {"schema": inlined}},
            }
        },
    }


def _inline(schema: Any, components: dict[str, Any]) -> Any:
    """The schema with each reference replaced by what it refers to; requests nest, but never in a circle."""
    if isinstance(schema, dict):
        if "$ref" in schema:
            return _inline(components[schema["$ref"].rpartition("/")[2]], components)
        return {key: _inline(value, components) for key, value in schema.items()}
    if isinstance(schema, list):
        return [_inline(item, components) for item in schema]
    return schema


def _add_information(app: FastAPI, context: Context) -> None:
    @app.head("/health", include_in_schema=False)
    @app.get("/health")
    async def health() -> JSONResponse:
        """200 when requests are taken, 503 otherwise, with the reason."""
        status = context.status
        body = {"status": str(status)}
        if context.router.failure is not None:
            body["error"] = str(context.router.failure)
        return JSONResponse(body, 200 if status is Status.OK else 503)

    @app.get("/metrics")
    async def metrics() -> Response:
        """Prometheus' text format."""
        return Response(context.metrics.text(), headers={"content-type": CONTENT_TYPE})

    @app.get("/version")
    async def version() -> dict[str, Any]:
        """Versions, what the wire carries (null while starting), and whether routing is a benchmark's."""
        ready = next((view.ready for view in context.router.ranks if view.ready), None)
        return {
            "version": atom.__version__,
            "torch": metadata.version("torch"),
            "transformers": metadata.version("transformers"),
            "wire": ready and ready.wire,
            "a_operand": ready and ready.a_operand,
            "transport": ready and ready.transport,
            "fake_eplb": envs.read("ATOM_FAKE_EPLB"),
        }

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        """The one model that is served."""
        return {"object": "list", "data": [_model(context)]}

    @app.get("/v1/models/{model:path}")
    async def model(model: str) -> dict[str, Any]:
        """One model by name."""
        if model != context.args.model_name:
            raise ApiError(
                404,
                f"model {model!r} does not exist: this server serves {context.args.model_name!r}.",
                param="model",
                code="model_not_found",
            )
        return _model(context)


def _model(context: Context) -> dict[str, Any]:
    return {
        "id": context.args.model_name,
        "object": "model",
        "created": context.created,
        "owned_by": "atom",
        "max_model_len": context.max_model_len,
    }


def _error_response(error: ApiError) -> Response:
    headers = {"connection": "close"} if error.status == 413 else {}
    if error.status == 429:
        headers["retry-after"] = "1"
    return Response(error.body(), error.status, headers, "application/json")


async def _answer_error(request: Request, error: Exception) -> Response:
    return _error_response(as_api_error(error))


async def _answer_nobody(request: Request, error: Exception) -> Response:
    return Response(status_code=CLIENT_GONE)


async def _answer_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    where = f"{request.method} {request.url.path}"
    match error.status_code:
        case 404:
            message = f"{where} does not exist: use one of {', '.join(sorted(ENDPOINTS))}."
            answer = ApiError(404, message, code="unknown_url")
        case 405:
            message = f"{where}: the path does not take this method."
            answer = ApiError(405, message, code="method_not_allowed")
        case status:
            answer = ApiError(status, str(error.detail))
    response = _error_response(answer)
    response.headers.update(error.headers or {})
    return response
