"""Routes that change which LoRA adapters are served: POST /v1/load_lora_adapter and /v1/unload_lora_adapter."""

from __future__ import annotations

from pathlib import Path

from fastapi import APIRouter, Request, Response

from adaserve_jax.errors import CheckpointError
from adaserve_jax.server.body import BoundedRoute
from adaserve_jax.server.daemon_thread import in_thread
from adaserve_jax.server.errors import ApiError, invalid
from adaserve_jax.server.routes_generate import error_responses, warning_headers
from adaserve_jax.server.routes_info import model_list
from adaserve_jax.server.schema import LoadAdapterBody, ModelList, UnloadAdapterBody
from adaserve_jax.server.state import ServerState


def router(state: ServerState) -> APIRouter:
    """Return the routes. They are off, and answer 403, without `lora_folder`."""
    routes = APIRouter(tags=["models"], route_class=BoundedRoute)
    errors = error_responses(400, 401, 403, 404, 413, 503)

    @routes.post(
        "/v1/load_lora_adapter", operation_id="load_adapter", summary="Load a LoRA adapter; for operators",
        responses=errors,
    )  # fmt: skip
    async def load(body: LoadAdapterBody, http: Request, response: Response) -> ModelList:
        root = _allowed(state)
        state.require_ready()
        if body.lora_name == state.model_name:
            raise invalid(
                f"lora_name must be another name than the served model's, got {body.lora_name!r}", "lora_name"
            )
        folder = _inside(root, body.lora_path)
        replace = bool(body.load_inplace)
        try:
            await in_thread(
                lambda: state.client.load_adapter(body.lora_name, str(folder), replace=replace), "load-adapter"
            )
        except CheckpointError as error:
            raise invalid(str(error), "lora_path", "invalid_adapter") from None
        response.headers.update(warning_headers(body, http.query_params))
        return model_list(state)

    @routes.post(
        "/v1/unload_lora_adapter", operation_id="unload_adapter", summary="Unload a LoRA adapter; for operators",
        responses=errors,
    )  # fmt: skip
    async def unload(body: UnloadAdapterBody, http: Request, response: Response) -> ModelList:
        _allowed(state)
        state.require_ready()
        await in_thread(lambda: state.client.unload_adapter(body.lora_name), "unload-adapter")
        response.headers.update(warning_headers(body, http.query_params))
        return model_list(state)

    return routes


def _allowed(state: ServerState) -> Path:
    """Return the folder of adapters. Raises ApiError: the server was started without one."""
    if state.settings.lora_folder is None:
        raise ApiError(
            403,
            "adapters are not loaded or unloaded at run time; start the server with lora_folder",
            code="not_allowed",
        )
    return Path(state.settings.lora_folder).resolve()


def _inside(root: Path, path: str) -> Path:
    """Return the folder that a client names. Raises ApiError unless it is in `root`, links followed."""
    try:
        folder = (root / path).resolve()
        found = folder != root and folder.is_relative_to(root) and folder.is_dir()
    except (OSError, ValueError, RuntimeError):  # a name too long, a null byte, or links in a circle
        found, folder = False, root
    if not found:
        raise invalid(f"lora_path must be a folder in the server's lora_folder, got {path!r:.200}", "lora_path")
    return folder
