"""Changes of JSON Schemas, which are applied to schemas alone: not to names of properties, nor to values."""

from collections.abc import Callable
from typing import Any

_BY_NAME = frozenset(("$defs", "definitions", "dependentSchemas", "patternProperties", "properties"))
"""The keys whose values are schemas by names, which mean nothing."""
_VALUES = frozenset(("const", "default", "enum", "examples"))
"""The keys whose values are no schemas."""


def change_schemas(schema: Any, change: Callable[[dict[str, Any]], dict[str, Any]]) -> Any:
    """Return a JSON Schema in which it and all schemas within it are changed, inner ones first."""
    if isinstance(schema, list):
        return [change_schemas(each, change) for each in schema]
    if not isinstance(schema, dict):
        return schema
    made = dict[str, Any]()
    for key, value in schema.items():
        if key in _BY_NAME and isinstance(value, dict):
            value = {name: change_schemas(each, change) for name, each in value.items()}
        elif key not in _VALUES:
            value = change_schemas(value, change)
        made[key] = value
    return change(made)
