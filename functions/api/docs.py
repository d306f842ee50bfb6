"""What ``/openapi.json`` says of request bodies. Handlers read and validate bodies themselves, once."""

from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

_REF = "#/components/schemas/{model}"
_models: dict[str, type[BaseModel]] = {}


def body_of(model: type[BaseModel]) -> dict[str, Any]:
    """The ``requestBody`` of an operation that takes a model as JSON."""
    _models[model.__name__] = model
    schema = {"$ref": _REF.format(model=model.__name__)}
    return {"requestBody": {"content": {"application/json": {"schema": schema}}}}


def install(app: FastAPI) -> None:
    """Add the schemas of all bodies, and the key that requests carry, to the document of the app."""
    plain = app.openapi

    def with_bodies() -> dict[str, Any]:
        document = plain()
        components = document.setdefault("components", {})
        _, found = models_json_schema([(m, "validation") for m in _models.values()], ref_template=_REF)
        components.setdefault("schemas", {}).update(found["$defs"])
        components["securitySchemes"] = {"key": {"type": "apiKey", "in": "header", "name": "x-api-key"}}
        document["security"] = [{"key": []}]
        return document

    app.openapi = with_bodies  # type: ignore[method-assign]
