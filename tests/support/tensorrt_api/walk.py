"""Walks a source as each version of TensorRT would, and tells which names that version lacks.

The module is called `trt` in every source that is walked. A name is looked for where it is known
what it belongs to: `trt.X`, a parameter, variable or attribute that is annotated with `trt.X`, or
what a call of these gives. Where that is not known, a name of two words or more is told that some
version of TensorRT has and the walked one has nowhere, such as `num_bindings`.

A guard is a condition that the walk can decide for the version it walks as:

    hasattr(trt.BuilderFlag, "FP16")        hasattr(engine, "device_memory_size_v2")
    version >= (10, 0)                      anything called `version`, and a tuple of numbers

with `and`, `or`, `not`, or by way of a variable. The branch that this version does not take is not
walked, nor what comes after one that returns or raises.
"""

from __future__ import annotations

import ast
import operator
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

Classes = dict[str, dict[str, str]]

_COMPARISONS = {
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
}
# Triton's configuration has it as well.
_OTHERS_TOO = frozenset({"max_batch_size"})


class Known(NamedTuple):
    """What is known of an expression.

    Attributes:
        kind: `module`, `class`, `object` (of the class `name`, or what gives one when called), or
            `truth` (`name` is then "yes" or "no").
    """

    kind: str
    name: str = ""


Names = dict[str, Known]


def lacking(source: str, names: Mapping[str, Classes], path: str = "") -> list[str]:
    """What `source` asks of a TensorRT that does not have it, one line each, by line number.

    Args:
        names: version → class → member → the class that it gives.
    """
    tree = ast.parse(source)
    some = frozenset().union(*(_members(classes) for classes in names.values()))
    lacks: dict[tuple[int, str], list[str]] = {}
    for version, classes in names.items():
        walk = _Walk(classes, version, some)
        walk.body(tree.body, {})
        for found in walk.found:
            lacks.setdefault(found, []).append(version)
    return [
        f"{path}:{line}: {what} is not in TensorRT {', '.join(versions)}, and no guard covers it"
        for (line, what), versions in sorted(lacks.items())
    ]


def _members(classes: Classes) -> frozenset[str]:
    return frozenset(member for members in classes.values() for member in members)


class _Walk:
    """One walk, as one version."""

    def __init__(self, classes: Classes, version: str, some: frozenset[str]) -> None:
        self._classes = classes
        self._class_names = classes[""].keys()
        self._here = _members(classes)
        self._some = some
        self._version = tuple(map(int, version.split(".")))
        self.found: set[tuple[int, str]] = set()

    def body(self, statements: Iterable[ast.stmt], known: Names) -> bool:
        """Whether it never gets to its end."""
        statements = list(statements)
        for statement in statements:
            if isinstance(statement, ast.FunctionDef) and statement.returns is not None:
                self._remember(known, statement.name, self._annotated(statement.returns))
        return any(self._statement(statement, known) for statement in statements)

    def _statement(self, node: ast.stmt, known: Names) -> bool:
        if isinstance(node, ast.If):
            return self._branches(node, known)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            self._definition(node, known)
            return False
        if isinstance(node, ast.Assign | ast.AnnAssign):
            self._assignment(node, known)
            return False
        if isinstance(node, ast.Try):
            for part in (node.body, *(h.body for h in node.handlers), node.orelse, node.finalbody):
                self.body(part, known)
            return False
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.expr | ast.withitem | ast.keyword):
                self._see(child, known)
        for name in ("body", "orelse"):
            self.body(getattr(node, name, []), known)
        for case in getattr(node, "cases", []):
            self.body(case.body, dict(known))
        return isinstance(node, ast.Return | ast.Raise | ast.Continue | ast.Break)

    def _branches(self, node: ast.If, known: Names) -> bool:
        truth = self._truth(node.test, known)
        ends = [
            self.body(branch, known)
            for branch, taken in ((node.body, True), (node.orelse, False))
            if truth is None or truth is taken
        ]
        return all(ends)

    def _definition(
        self, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef, known: Names
    ) -> None:
        inside = dict(known)
        if isinstance(node, ast.ClassDef):
            for base in node.bases:
                self._see(base, known)
            for assignment in ast.walk(node):
                if isinstance(assignment, ast.AnnAssign):
                    self._remember(
                        inside, _dotted(assignment.target), self._annotated(assignment.annotation)
                    )
                elif isinstance(assignment, ast.Assign) and len(assignment.targets) == 1:
                    name = _dotted(assignment.targets[0])
                    if name.startswith("self."):
                        self._remember(inside, name, self._quietly(assignment.value, inside))
        else:
            arguments = node.args
            for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs):
                inside.pop(argument.arg, None)
                if argument.annotation is not None:
                    self._remember(inside, argument.arg, self._annotated(argument.annotation))
        for decorator in node.decorator_list:
            self._see(decorator, known)
        self.body(node.body, inside)

    def _assignment(self, node: ast.Assign | ast.AnnAssign, known: Names) -> None:
        value = None if node.value is None else self._see(node.value, known)
        if isinstance(node, ast.AnnAssign):
            value = self._annotated(node.annotation) or value
        elif isinstance(node.value, ast.expr) and value is None:
            truth = self._truth(node.value, known)
            value = None if truth is None else Known("truth", "yes" if truth else "no")
        for target in [node.target] if isinstance(node, ast.AnnAssign) else node.targets:
            if isinstance(target, ast.Attribute | ast.Subscript):
                self._see(target, known)
            self._remember(known, _dotted(target), value)

    def _see(self, node: ast.AST, known: Names) -> Known | None:
        """What an expression is; what it asks for in vain is noted."""
        if isinstance(node, ast.Name):
            return Known("module") if node.id == "trt" else known.get(node.id)
        if isinstance(node, ast.Attribute):
            return self._attribute(node, known)
        if isinstance(node, ast.Call):
            for argument in (*node.args, *node.keywords):
                self._see(argument, known)
            called = self._see(node.func, known)
            return Known("object", called.name) if called and called.kind == "class" else called
        if isinstance(node, ast.IfExp):
            truth = self._truth(node.test, known)
            seen = [
                self._see(branch, known)
                for branch, taken in ((node.body, True), (node.orelse, False))
                if truth is None or truth is taken
            ]
            return seen[0]
        if isinstance(node, ast.BoolOp):
            self._truth(node, known)
            return None
        for child in ast.iter_child_nodes(node):
            self._see(child, known)
        return None

    def _attribute(self, node: ast.Attribute, known: Names) -> Known | None:
        owner = self._see(node.value, known)
        name = node.attr
        if owner is None or owner.kind == "truth":
            remembered = known.get(_dotted(node))
            told = "_" in name.strip("_") and name not in _OTHERS_TOO
            if told and remembered is None and owner is None and name in self._some - self._here:
                self.found.add((node.lineno, f".{name}"))
            return remembered
        members = self._classes.get(owner.name if owner.kind != "module" else "", {})
        if name not in members and not name.startswith("__"):
            whole = f"trt.{owner.name}.{name}" if owner.name else f"trt.{name}"
            self.found.add((node.lineno, whole))
            return None
        if owner.kind == "module":
            return Known("class", name) if name in self._classes else None
        given = members.get(name, "")
        return Known("object", given) if given else None

    def _truth(self, node: ast.expr, known: Names) -> bool | None:
        """Whether a condition holds in this version; None where that depends on something else."""
        if isinstance(node, ast.BoolOp):
            stops_at = isinstance(node.op, ast.Or)
            decided = True
            for value in node.values:
                truth = self._truth(value, known)
                if truth is stops_at:
                    return stops_at
                decided = decided and truth is not None
            return not stops_at if decided else None
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            truth = self._truth(node.operand, known)
            return None if truth is None else not truth
        if isinstance(node, ast.Name) and (found := known.get(node.id)) and found.kind == "truth":
            return found.name == "yes"
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "hasattr":
            return self._has(node, known)
        return self._compared(node, known)

    def _has(self, node: ast.Call, known: Names) -> bool | None:
        owner, name = node.args
        if not isinstance(name, ast.Constant):
            return None
        if name.value not in self._some | self._class_names:
            self.found.add((node.lineno, f"hasattr(…, {name.value!r}): the name itself"))
            return False
        seen = self._see(owner, known)
        if seen is None or seen.kind == "truth":
            return name.value in self._here
        return name.value in self._classes.get("" if seen.kind == "module" else seen.name, {})

    def _compared(self, node: ast.expr, known: Names) -> bool | None:
        """What a comparison of `version` with one tuple comes to."""
        if isinstance(node, ast.Compare) and _dotted(node.left).split(".")[-1] == "version":
            compare = _COMPARISONS.get(type(node.ops[0]))
            right = node.comparators[0]
            if compare is not None and isinstance(right, ast.Tuple) and len(node.ops) == 1:
                numbers = (n.value for n in right.elts if isinstance(n, ast.Constant))
                return bool(compare(self._version, tuple(numbers)))
        self._see(node, known)
        return None

    def _annotated(self, node: ast.expr) -> Known | None:
        """`trt.X`, also as text, and with `| None`."""
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            return self._annotated(ast.parse(node.value, mode="eval").body)
        if isinstance(node, ast.BinOp):
            return self._annotated(node.left) or self._annotated(node.right)
        name = _dotted(node)
        return Known("object", name[len("trt.") :]) if name.startswith("trt.") else None

    def _quietly(self, node: ast.expr, known: Names) -> Known | None:
        before = set(self.found)
        seen = self._see(node, known)
        self.found = before
        return seen

    @staticmethod
    def _remember(known: Names, name: str, value: Known | None) -> None:
        if not name:
            return
        if value is None:
            # What was known of an attribute by its annotation stays known.
            if "." not in name:
                known.pop(name, None)
        else:
            known[name] = value


def _dotted(node: ast.AST) -> str:
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (owner := _dotted(node.value)):
        return f"{owner}.{node.attr}"
    return ""
