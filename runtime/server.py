"""An OpenAI-compatible HTTP application over one `Runtime`: serve it, or mount it in an application of yours.

    with Runtime.open("bundles/smollm2-135m", max_queue=64) as runtime:
        app.mount("/llm", make_app(Service(runtime, ServiceOptions(model_name="smollm2"))))

    route                                    what
    POST /v1/chat/completions, /completions  OpenAI's, one choice; stream: true for server-sent events
    GET  /v1/models, /v1/models/{name}       the one model
    GET  /health                             200 while the process answers
    GET  /ready                              200 while requests are taken, else 503
    GET  /metrics                            Prometheus text

Nothing here touches the process: no signal, no logging handler, no module state.
"""

from __future__ import annotations

import time
from typing import Any

from fastapi import APIRouter, Depends, FastAPI, Request, Response
from starlette.exceptions import HTTPException

from xpress_export.runtime.server_exchange import KINDS, Exchange
from xpress_export.runtime.server_metrics import CONTENT_TYPE
from xpress_export.runtime.server_replies import Json, as_json, error_body
from xpress_export.runtime.server_service import HttpError, Service, ServiceOptions

__all__ = ["Service", "ServiceOptions", "make_app"]


def make_app(service: Service) -> FastAPI:
    """The application. It opens and closes nothing: the runtime is the caller's, until after the application ends."""
    app = FastAPI(title="xpress-export", docs_url=None, redoc_url=None)
    app.add_exception_handler(HttpError, _reply_error)
    app.add_exception_handler(HTTPException, _reply_error)
    app.add_exception_handler(Exception, _reply_error)  # a defect: answered, then logged by the server with its trace
    app.include_router(_status_routes(service))
    app.include_router(_model_routes(service))
    return app


def _status_routes(service: Service) -> APIRouter:
    routes = APIRouter()

    @routes.get("/health")
    async def health() -> Json:
        return {"status": "alive"}

    @routes.get("/ready")
    async def ready(response: Response) -> Json:
        response.status_code = 200 if service.ready else 503
        return {"status": "ready" if service.ready else "shutting down"}

    @routes.get("/metrics")
    async def metrics() -> Response:
        return Response(service.metrics.render(), media_type=CONTENT_TYPE)

    return routes


def _model_routes(service: Service) -> APIRouter:
    async def authorized(request: Request) -> None:
        service.authorize(request)

    routes = APIRouter(prefix="/v1")
    guard = [Depends(authorized)]
    card = {
        "id": service.options.model_name,
        "object": "model",
        "created": int(time.time()),
        "owned_by": "xpress-export",
        "xpress": {"max_context": service.runtime.max_context, "modes": list(service.runtime.modes)},
    }

    @routes.get("/models", dependencies=guard)
    async def models() -> Json:
        return {"object": "list", "data": [card]}

    @routes.get("/models/{name:path}", dependencies=guard)
    async def model(name: str) -> Json:
        if name != card["id"]:
            message = f"model {name!r} is not served here; this server has {card['id']!r}"
            raise HttpError(404, error_body(message, "invalid_request_error", "model", "model_not_found"))
        return card

    for path, route in (("/chat/completions", "chat"), ("/completions", "completions")):
        schema = {"content": {"application/json": {"schema": KINDS[route].model_json_schema()}}, "required": True}
        routes.add_api_route(
            path, _endpoint(service, route), methods=["POST"], name=route, openapi_extra={"requestBody": schema}
        )
    return routes


def _endpoint(service: Service, route: str) -> Any:
    async def answer(request: Request) -> Response:
        return await Exchange(service, route, request).answer()

    return answer


async def _reply_error(_request: Request, error: Exception) -> Response:
    """Every refusal in OpenAI's shape, the framework's own (404, 405) included."""
    if isinstance(error, HttpError):
        status, body, headers = error.status, error.body, error.headers
    elif not isinstance(error, HTTPException):
        status, body, headers = 500, error_body("internal error", "server_error", code="internal_error"), {}
    else:
        status, headers = error.status_code, dict(error.headers or {})
        body = error_body(str(error.detail), "invalid_request_error")
    return Response(as_json(body), status, headers, media_type="application/json")
