"""A census of a process's own Python objects by kind: what a leak consists of, and which container holds it.

It takes a thread up to two seconds and happens only when memory grows like a leak. Objects that Python's garbage
collector does not track (bytes, strings, arrays) are found through the containers that hold them.
"""

import gc
import sys
from collections import defaultdict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from heapq import nlargest
from typing import Any

from surefoot.diagnostics.monitor.process_stats import OwnMemory

MOST_OBJECTS = 700_000
"""Most objects to count: more would delay the program for seconds. With torch and transformers loaded, a program has
about 400,000.
"""
KEPT_KINDS = 40
KEPT_HOLDERS = 10
CONTAINERS = frozenset({list, dict, set, tuple, deque})
PLAIN = frozenset({bytes, bytearray, str, *CONTAINERS})
"""Kinds whose size Python knows without running their code."""


@dataclass(frozen=True)
class Holder:
    """A container, and what it holds directly."""

    identity: int
    kind: str
    count: int
    """Number of its entries."""
    held_bytes: int
    """Bytes of its entries that are no containers."""
    name: str
    """`module.name` or `Class.name` of the variable that refers to it; empty if there is none."""


@dataclass(frozen=True)
class Census:
    """The objects of a process at one moment."""

    anonymous_bytes: int
    """Anonymous memory of the process."""
    kinds: Mapping[str, tuple[int, int]]
    """Kind -> (number of objects, their bytes), for the largest kinds."""
    holders: tuple[Holder, ...]
    """The largest containers."""


def read_census(values: Mapping[str, Any]) -> Census:
    """Return the census from its fields in JSON. Raises: KeyError, TypeError for anything else."""
    kinds = {kind: (int(count), int(size)) for kind, (count, size) in values["kinds"].items()}
    return Census(values["anonymous_bytes"], kinds, tuple(Holder(**holder) for holder in values["holders"]))


def take_census() -> Census | None:
    """Count the objects that are reachable from those that the garbage collector tracks; None if there are too many.

    References to tensors are dropped at once: what a step would free must not live longer because it is counted.
    """
    anonymous_bytes = OwnMemory().anonymous_bytes()
    size_of = _make_size_function()
    tracked = gc.get_objects()
    if len(tracked) > MOST_OBJECTS:
        return None
    tensor_types = _find_tensor_types()
    sizes = [(type(value), size_of(value)) for value in tracked if type(value) in tensor_types]
    tracked = [value for value in tracked if type(value) not in tensor_types]
    counts: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    held: list[tuple[int, Any]] = []
    untracked: set[int] = set()
    for kind, size in sizes:
        _count(kind, size, counts)
    for container in tracked:
        _count(type(container), size_of(container), counts)
        inside = 0
        for entry in gc.get_referents(container):
            size = size_of(entry)
            inside += size if type(entry) not in CONTAINERS else 0
            if size and not gc.is_tracked(entry) and id(entry) not in untracked:
                untracked.add(id(entry))
                _count(type(entry), size, counts)
        if inside and type(container) in CONTAINERS:
            held.append((inside, container))
    largest = nlargest(KEPT_HOLDERS, held, key=lambda pair: pair[0])
    holders = tuple(
        Holder(id(container), type(container).__name__, len(container), size, _find_name(container))
        for size, container in largest
    )
    kinds = nlargest(KEPT_KINDS, counts.items(), key=lambda pair: pair[1][1])
    return Census(anonymous_bytes, {kind: (count, size) for kind, (count, size) in kinds}, holders)


def _count(kind: type, size: int, counts: dict[str, list[int]]) -> None:
    if size:
        name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
        counts[name][0] += 1
        counts[name][1] += size


def _find_tensor_types() -> frozenset[type]:
    torch = sys.modules.get("torch")
    return frozenset({torch.Tensor, torch.nn.Parameter}) if torch is not None else frozenset()


def _make_size_function() -> Callable[[object], int]:
    """Return a function for the bytes of an object, without those it refers to; 0 for kinds that are not counted."""
    tensors, numpy = _find_tensor_types(), sys.modules.get("numpy")
    array = numpy.ndarray if numpy is not None else None

    def size(value: Any) -> int:
        kind = type(value)
        if kind in PLAIN:
            return sys.getsizeof(value)
        if kind in tensors:
            is_on_host = value.device.type == "cpu" and not value.is_sparse
            return int(value.numel() * value.element_size()) if is_on_host else 0
        return int(value.nbytes) if kind is array and value.base is None else 0

    return size


def _find_name(container: object) -> str:
    for referrer in gc.get_referrers(container):
        is_namespace = type(referrer) is dict
        names = referrer if is_namespace else _read_attributes(referrer)
        variable = next((str(name) for name, value in list(names.items()) if value is container), "")
        owner = _find_owner(referrer) if is_namespace else type(referrer).__qualname__
        if variable and owner:
            return f"{owner}.{variable}"
    return ""


def _find_owner(names: dict[Any, Any]) -> str:
    """Return the name of the module or class whose variables these are."""
    for module in list(sys.modules.values()):
        if _read_attributes(module) is names:
            return str(names.get("__name__", ""))
    return next(
        (type(referrer).__qualname__ for referrer in gc.get_referrers(names) if _read_attributes(referrer) is names), ""
    )


def _read_attributes(value: object) -> dict[Any, Any]:
    """Return the object's own variables without running code of its class; empty if it has none."""
    try:
        attributes = object.__getattribute__(value, "__dict__")
    except (AttributeError, TypeError):
        return {}
    return attributes if type(attributes) is dict else {}
