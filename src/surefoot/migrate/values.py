"""Values of other programs' settings, as command lines and YAML write them."""

from typing import Any


def as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def is_null(value: Any) -> bool:
    return value is None or str(value).lower() in ("none", "null")


def parse_number(value: Any) -> Any:
    """Return the number that a text writes, in lists too; any other value as it is."""
    if isinstance(value, list):
        return [parse_number(item) for item in value]
    if isinstance(value, str):
        for kind in (int, float):
            try:
                return kind(value)
            except ValueError:
                continue
    return value
