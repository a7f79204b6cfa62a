"""Functions of Python's own standard library as syntax trees, a text that every machine with Python has.

A parent stands before its children, and they in the order of the source. Names of variables are not kept: a
variable is a number, and only its occurrences tell it from another.
"""

import ast
import sysconfig
import warnings
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

# tests, tools and generated data are left out, and what pip installed
LEFT_OUT = {"test", "tests", "idlelib", "lib2to3", "turtledemo", "ensurepip", "site-packages", "pydoc_data"}
# these nodes only say what their parent's place says: reading or writing, or which operator
SILENT = (ast.expr_context, ast.operator, ast.unaryop, ast.cmpop, ast.boolop)
SHORTEST, LONGEST = 12, 48  # nodes
MOST_VARIABLES = 8
NO_VARIABLE = -1


@dataclass(frozen=True)
class Function:
    """One function of a module, a tuple of its nodes for each of their properties."""

    module: str
    kinds: tuple[str, ...]  # class of the node: Assign, Name, Call, ...
    words: tuple[str, ...]  # name of an attribute, a global, a keyword; type of a constant; else empty
    parents: tuple[int, ...]  # index of the parent, -1 for the function itself
    variables: tuple[int, ...]  # number of the variable that stands here, -1 where none does


def read_functions(folder: Path | None = None) -> list[Function]:
    """Functions with 12 to 48 nodes and 2 to 8 variables, by modules' names; none twice, none in another.

    Args:
        folder: where the modules are. Default: this Python's standard library.
    Raises:
        FileNotFoundError: there is no such function.
    """
    folder = Path(sysconfig.get_paths()["stdlib"]) if folder is None else folder
    found: dict[tuple, Function] = {}
    for path in sorted(folder.rglob("*.py")):
        inner = path.relative_to(folder)
        if LEFT_OUT.intersection(inner.parts):
            continue
        for definition in _definitions(_parsed(path)):
            function = tree_of(definition, inner.with_suffix("").as_posix())
            is_right = SHORTEST <= len(function.kinds) <= LONGEST
            if is_right and _is_question(function):
                # one that was copied into another module would be known before it is tested
                content = (function.kinds, function.words, function.parents, function.variables)
                found.setdefault(content, function)
    if not found:
        raise FileNotFoundError(
            f"folder must hold Python modules with functions; got {folder}. Check the path."
        )
    return list(found.values())


def split(functions: Sequence[Function]) -> tuple[list[Function], list[Function]]:
    """(training, held out): about a fifth of the top-level modules and packages is held out, each whole."""
    held_out = [is_held_out(function.module) for function in functions]
    return (
        [function for function, is_out in zip(functions, held_out, strict=True) if not is_out],
        [function for function, is_out in zip(functions, held_out, strict=True) if is_out],
    )


def is_held_out(module: str) -> bool:
    """Whether a module is for the test, by a checksum of its top-level name: the same on every machine."""
    return zlib.crc32(module.split("/")[0].encode()) % 5 == 0


def tree_of(definition: ast.AST, module: str) -> Function:
    """The nodes of a function in the order of the source."""
    nodes = list(_nodes(definition, -1, [0]))
    names: dict[str, int] = {}
    for node, _ in nodes:
        if _is_binding(node):
            names.setdefault(_word(node), len(names))
    variables = [names.get(_word(node), NO_VARIABLE) if _may_be_variable(node) else -1 for node, _ in nodes]
    return Function(
        module=module,
        kinds=tuple(type(node).__name__ for node, _ in nodes),
        words=tuple(
            _word(node) if variable == NO_VARIABLE else ""
            for (node, _), variable in zip(nodes, variables, strict=True)
        ),
        parents=tuple(parent for _, parent in nodes),
        variables=tuple(variables),
    )


def _parsed(path: Path) -> ast.AST:
    # old modules are not ours to mend
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)
        return ast.parse(path.read_bytes())


def _definitions(node: ast.AST) -> Iterator[ast.AST]:
    """Functions and methods, not those inside another function."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield child
        else:
            yield from _definitions(child)


def _nodes(node: ast.AST, parent: int, count: list[int]) -> Iterator[tuple[ast.AST, int]]:
    """Each node with the index of its parent; `count` holds how many have come so far."""
    index = count[0]
    count[0] += 1
    yield node, parent
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, SILENT):
            yield from _nodes(child, index, count)


def _is_question(function: Function) -> bool:
    """Whether there are several variables to choose from, and one that is used again."""
    uses = [variable for variable in function.variables if variable != NO_VARIABLE]
    return 2 <= len(set(uses)) <= MOST_VARIABLES and len(uses) > len(set(uses))


def _may_be_variable(node: ast.AST) -> bool:
    return isinstance(node, (ast.Name, ast.arg))


def _is_binding(node: ast.AST) -> bool:
    return isinstance(node, ast.arg) or (isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store))


def _word(node: ast.AST) -> str:
    for field in ("id", "arg", "attr", "name"):
        word = getattr(node, field, None)
        if isinstance(word, str):
            return word
    if isinstance(node, ast.Constant):
        return f"<{type(node.value).__name__}>"
    return ""
