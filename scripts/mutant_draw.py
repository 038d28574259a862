"""The small faults that scripts/mutants.py plants in a module, and which of them are drawn."""

from __future__ import annotations

import ast
import copy
import hashlib
from collections.abc import Iterator
from typing import Any

PER_MODULE, SEED = 8, 0
SWAPS = """Lt LtE, LtE Lt, Gt GtE, GtE Gt, Eq NotEq, NotEq Eq, Is IsNot, IsNot Is, In NotIn, NotIn In, And Or, Or And,
    Add Sub, Sub Add, Mult Div, Div Mult, FloorDiv Mult, Mod Mult, Pow Mult, BitAnd BitOr, BitOr BitAnd"""
SWAPPED = {getattr(ast, a): getattr(ast, b) for a, b in (pair.split() for pair in SWAPS.split(","))}


def fault(node: ast.AST) -> ast.AST | None:
    """What stands in a node's place in a mutant; None where nothing is planted."""
    new = copy.deepcopy(node)
    match new:
        case ast.Compare(ops=[op, *_]):
            new.ops[0] = SWAPPED[type(op)]()
        case ast.BinOp(op=op) | ast.BoolOp(op=op) if type(op) in SWAPPED:
            new.op = SWAPPED[type(op)]()
        case ast.UnaryOp(op=ast.Not() | ast.USub() | ast.Invert(), operand=operand):
            return operand
        case ast.Constant(value=bool(value)):
            new.value = not value
        case ast.Constant(value=int(value)):
            new.value = value + 1
        case ast.Constant(value=float(value)):
            new.value = value * 1.5 or 1.0
        case ast.Expr(value=ast.Call()) | ast.AugAssign() | ast.Raise():
            return ast.Pass()
        case _:
            return None
    return new


def places(node: ast.AST, name: str = "", inside: bool = False) -> Iterator[tuple[str, ast.expr | ast.stmt, ast.AST]]:
    """(function, node, what takes its place) of each fault that the functions below a node could have.

    Annotations, default values, decorators and what is only said (messages of errors, f-strings) have none.
    """
    for field, value in ast.iter_fields(node):
        if field in ("annotation", "returns", "args", "decorator_list") and not isinstance(node, ast.Call):
            continue
        for child in value if isinstance(value, list) else [value]:
            if not isinstance(child, ast.AST) or isinstance(child, ast.JoinedStr):
                continue
            if inside and isinstance(child, ast.expr | ast.stmt) and (new := fault(child)) is not None:
                yield name, child, new
            if inside and field == "test" and isinstance(child, ast.expr) and isinstance(node, ast.If | ast.IfExp):
                yield name, child, ast.UnaryOp(ast.Not(), child)
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                yield from places(child, f"{name}.{child.name}", inside or not isinstance(child, ast.ClassDef))
            elif not isinstance(child, ast.Raise):
                yield from places(child, name, inside)


def draw(module: str, source: str, wanted: set[str]) -> list[dict[str, Any]]:
    """A module's mutants, at most one of a line: those that are wanted, then those of the smallest keys (a hash)."""
    text, found, times = source.encode(), [], {}
    starts = [0]
    for line in text.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    for function, node, new in places(ast.parse(source)):
        begin, end = starts[node.lineno - 1] + node.col_offset, starts[node.end_lineno - 1] + node.end_col_offset
        line = text[starts[node.lineno - 1] : starts[node.lineno]].decode().strip()
        what = f"{ast.unparse(node)} -> {ast.unparse(new)}"
        named = "|".join([module.partition("/")[0], function.rpartition(".")[2], line, what, str(SEED)])
        times[named] = times.get(named, 0) + 1
        key = hashlib.sha256(f"{named}|{times[named]}".encode()).hexdigest()[:12]
        put = ast.unparse(new) if isinstance(new, ast.stmt) else f"({ast.unparse(new)})"
        code = (text[:begin] + put.encode() + text[end:]).decode()
        found.append({"key": key, "line": node.lineno, "function": function[1:], "what": what[:160], "code": code})
    chosen: dict[int, dict[str, Any]] = {}
    for mutant in sorted(found, key=lambda mutant: (mutant["key"] not in wanted, mutant["key"])):
        chosen.setdefault(mutant["line"], mutant)
    return list(chosen.values())[:PER_MODULE]
