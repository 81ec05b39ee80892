"""Counts Python's objects by kind, in the process that has them: what a leak is made of, and where it is kept.

It takes up to a second or two of a thread and happens only when memory grows as a leak does. Objects that Python's
garbage collector does not track (bytes, strings, arrays) are found through the containers that hold them.
"""

import gc
import sys
from collections import defaultdict, deque
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from heapq import nlargest
from typing import Any

from surefoot.diagnostics.monitor.process_stats import OwnMemory

MOST_OBJECTS = 700_000
"""Counting more would hold up the program for seconds; one with torch and transformers loaded has about 400,000."""
KEPT_KINDS = 40
KEPT_HOLDERS = 10
CONTAINERS = frozenset({list, dict, set, tuple, deque})
PLAIN = frozenset({bytes, bytearray, str, *CONTAINERS})
"""Kinds whose size Python knows without asking code of theirs."""


@dataclass(frozen=True)
class Holder:
    """A container, and what it holds itself."""

    identity: int
    kind: str
    count: int
    """Of its entries."""
    held_bytes: int
    """Of the entries that are no containers."""
    name: str
    """`module.name` or `Class.name` of a variable that it is; empty where there is none."""


@dataclass(frozen=True)
class Census:
    """The objects of a process at one moment."""

    anonymous_bytes: int
    """Of the process."""
    kinds: Mapping[str, tuple[int, int]]
    """Kind -> (how many there are, their bytes), the largest ones."""
    holders: tuple[Holder, ...]
    """The largest ones."""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def read_census(said: Mapping[str, Any]) -> Census:
    """Raises: KeyError, TypeError for what `as_dict` did not write."""
    kinds = {kind: (int(many), int(size)) for kind, (many, size) in said["kinds"].items()}
    return Census(said["anonymous_bytes"], kinds, tuple(Holder(**one) for one in said["holders"]))


def take_census() -> Census | None:
    """Count the objects that can be reached from those that the garbage collector tracks; None where they are many.

    Tensors are let go of at once: what a step would free must not live longer because it is counted.
    """
    anonymous_bytes = OwnMemory().anonymous_bytes()
    size_of = _size_of()
    tracked = gc.get_objects()
    if len(tracked) > MOST_OBJECTS:
        return None
    tensors = _tensor_kinds()
    sizes = [(type(one), size_of(one)) for one in tracked if type(one) in tensors]
    tracked = [one for one in tracked if type(one) not in tensors]
    counts: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    held: list[tuple[int, Any]] = []
    untracked: set[int] = set()
    for kind, size in sizes:
        _count(kind, size, counts)
    for one in tracked:
        _count(type(one), size_of(one), counts)
        inside = 0
        for entry in gc.get_referents(one):
            size = size_of(entry)
            inside += size if type(entry) not in CONTAINERS else 0
            if size and not gc.is_tracked(entry) and id(entry) not in untracked:
                untracked.add(id(entry))
                _count(type(entry), size, counts)
        if inside and type(one) in CONTAINERS:
            held.append((inside, one))
    largest = nlargest(KEPT_HOLDERS, held, key=lambda both: both[0])
    holders = tuple(Holder(id(one), type(one).__name__, len(one), size, _name(one)) for size, one in largest)
    kinds = nlargest(KEPT_KINDS, counts.items(), key=lambda both: both[1][1])
    return Census(anonymous_bytes, {kind: (many, size) for kind, (many, size) in kinds}, holders)


def _count(kind: type, size: int, counts: dict[str, list[int]]) -> None:
    if size:
        name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
        counts[name][0] += 1
        counts[name][1] += size


def _tensor_kinds() -> frozenset[type]:
    torch = sys.modules.get("torch")
    return frozenset({torch.Tensor, torch.nn.Parameter}) if torch is not None else frozenset()


def _size_of() -> Callable[[object], int]:
    """A function for the bytes of an object, without those it refers to; 0 for kinds that are not looked at."""
    tensors, numpy = _tensor_kinds(), sys.modules.get("numpy")
    array = numpy.ndarray if numpy is not None else None

    def size(one: Any) -> int:
        kind = type(one)
        if kind in PLAIN:
            return sys.getsizeof(one)
        if kind in tensors:
            is_on_host = one.device.type == "cpu" and not one.is_sparse
            return int(one.numel() * one.element_size()) if is_on_host else 0
        return int(one.nbytes) if kind is array and one.base is None else 0

    return size


def _name(one: object) -> str:
    for referrer in gc.get_referrers(one):
        if type(referrer) is dict:
            variable = next((str(name) for name, value in list(referrer.items()) if value is one), "")
            owner = _owner(referrer)
        else:
            own = _attributes(referrer)
            variable = next((str(name) for name, value in list(own.items()) if value is one), "")
            owner = type(referrer).__qualname__
        if variable and owner:
            return f"{owner}.{variable}"
    return ""


def _owner(names: dict[Any, Any]) -> str:
    """The module or the kind of object whose variables these are."""
    for module in list(sys.modules.values()):
        if _attributes(module) is names:
            return str(names.get("__name__", ""))
    return next((type(one).__qualname__ for one in gc.get_referrers(names) if _attributes(one) is names), "")


def _attributes(one: object) -> dict[Any, Any]:
    """Its own variables, without running code of its kind; empty where it has none."""
    try:
        found = object.__getattribute__(one, "__dict__")
    except (AttributeError, TypeError):
        return {}
    return found if type(found) is dict else {}
