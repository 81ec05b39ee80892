"""The rows that a Python script trains and evaluates on: what `load_dataset` reads, and which part of it is taken."""

import ast
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

FILE_LOADERS = ("json", "csv", "parquet", "text", "arrow")
"""First arguments of `load_dataset` with which it reads `data_files`."""
LOAD_ARGUMENTS = ("path", "name", "data_dir", "data_files", "split")
"""Arguments of `load_dataset` that may be given by position."""
SPLIT_ARGUMENTS = ("test_size", "train_size")
"""Arguments of `train_test_split` that may be given by position."""
DEFAULT_TEST_SIZE = 0.25
"""Share that `train_test_split` of datasets holds out by itself."""


@dataclass(frozen=True)
class Origin:
    """The call that makes the rows of an expression."""

    call: ast.Call
    """A call of `load_dataset` or of `train_test_split`."""
    part: ast.expr | None
    """The part that is taken of its value: "test" in `rows["test"]`."""


@dataclass(frozen=True)
class Source:
    """The hub dataset or the files that a call of `load_dataset` reads."""

    path: str | list[str]
    """A hub id, or files."""
    subset: str | None
    split: str | None
    """The split that is to be named; None where the path says it."""


def name_of(call: ast.Call) -> str:
    """Return the last part of the name of what is called: `from_pretrained` of AutoModel.from_pretrained."""
    function = call.func
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


class Variables:
    """The variables of a script."""

    def __init__(self, tree: ast.Module) -> None:
        self._values: dict[str, list[ast.expr]] = {}
        for node in ast.walk(tree):
            if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                for target in targets:
                    if isinstance(target, ast.Name):
                        self._values.setdefault(target.id, []).append(node.value)

    def find_literal(self, node: ast.expr) -> Any:
        """Return the value of a literal, or of a variable that is one; the expression of anything else.

        A variable that is assigned several times has no known value.
        """
        if isinstance(node, ast.Name) and len(self._values.get(node.id, ())) == 1:
            node = self._values[node.id][0]
        try:
            return ast.literal_eval(node)
        except (TypeError, ValueError):
            return node

    def find_origin(self, node: ast.expr | None) -> Origin | None:
        """Return the call that makes the rows of an expression; None if it is another one.

        A variable has the value of its last assignment above. Methods of a dataset, such as `map`, are looked through.
        """
        part, line = None, getattr(node, "lineno", 0)
        while node is not None:
            if isinstance(node, ast.Call):
                if name_of(node) in ("load_dataset", "train_test_split"):
                    return Origin(node, part)
                node = node.func.value if isinstance(node.func, ast.Attribute) else None
            elif isinstance(node, ast.Subscript):
                part, node = node.slice, node.value
            elif isinstance(node, ast.Name):
                above = [value for value in self._values.get(node.id, ()) if value.lineno < line]
                node = max(above, key=lambda value: value.lineno, default=None)
                line = node.lineno if node is not None else 0  # each step goes up, so this ends
            else:
                node = None
        return None

    def find_source(self, origin: Origin | None) -> Source | None:
        """Return the source of the rows of a call of `load_dataset`; None if the script computes it."""
        if origin is None:
            return None
        arguments = self._find_arguments(origin.call, LOAD_ARGUMENTS)
        path: Any = arguments.get("path")
        files, subset = arguments.get("data_files"), arguments.get("name")
        split = arguments.get("split") if origin.part is None else self.find_literal(origin.part)
        if isinstance(split, ast.AST) or isinstance(subset, ast.AST):
            return None
        if path in FILE_LOADERS:
            path = files.get(str(split or "train").partition("[")[0]) if isinstance(files, dict) else files
            split = split if "[" in str(split) else None
        are_files = isinstance(path, list) and all(isinstance(file, str) for file in path) and split is None
        if not isinstance(path, str) and not are_files:
            return None
        return Source(path, subset, split)

    def find_held_out_share(self, call: ast.Call) -> Any:
        """Return the share, or the number, of the rows that `train_test_split` holds out; None if it is computed."""
        sizes = self._find_arguments(call, SPLIT_ARGUMENTS)
        test, train = sizes.get("test_size"), sizes.get("train_size")
        if isinstance(test, int | float):
            return test
        if test is None and isinstance(train, float):
            return round(1 - train, 6)
        if test is None and train is None:
            return DEFAULT_TEST_SIZE
        return None

    def _find_arguments(self, call: ast.Call, names: Sequence[str]) -> dict[str, Any]:
        """Return the arguments of a call that are given by position or by name."""
        positional = dict(zip(names, map(self.find_literal, call.args), strict=False))
        return {**positional, **{word.arg: self.find_literal(word.value) for word in call.keywords if word.arg}}
