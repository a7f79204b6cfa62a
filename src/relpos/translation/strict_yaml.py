"""Strict YAML: plain values only, no duplicate keys, and bounds on size.

The bytes, the nesting levels, and the number of values after expanding aliases are bounded.
"""

import re
from typing import Any

import yaml
from yaml.composer import ComposerError
from yaml.nodes import CollectionNode, MappingNode, Node, ScalarNode

# PyYAML parses about 100,000 bytes a second
MOST_BYTES = 256 * 1024
_MOST_LEVELS = 50
_MOST_VALUES = 100_000


class YamlTextError(Exception):
    """A text is not YAML, or is refused; `problem` says why, and `line` where, counted from 1, if known."""

    def __init__(self, problem: str, line: int | None = None) -> None:
        super().__init__(problem)
        self.problem, self.line = problem, line


def read_yaml(text: str) -> Any:
    """The values in `text`: mappings, lists, text, numbers, true, false and null; dates are text.

    Raises:
        YamlTextError: the text is not YAML, is too large or nested too deeply, or has a duplicate key.
    """
    if len(text) > MOST_BYTES:
        raise YamlTextError(f"it must have at most {MOST_BYTES:,} characters; got {len(text):,}")
    loader = None
    try:
        loader = _Loader(text)  # a subclass of SafeLoader
        return loader.get_single_data()
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        problem = str(getattr(error, "problem", None) or error).splitlines()[0]
        context = getattr(error, "context", None)
        if problem.startswith("but ") and context:
            problem = f"{context}, {problem}"
        raise YamlTextError(problem, mark.line + 1 if mark else None) from None
    except (ValueError, KeyError, OverflowError) as error:
        # a tag that does not fit its value, such as !!int x, or a number with 5,000 digits
        mark = loader.constructed.start_mark if loader and loader.constructed else None
        said = (
            "a number of too many digits" if "digits" in str(error) else "a value that its tag does not fit"
        )
        raise YamlTextError(said, mark.line + 1 if mark else None) from None


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader with limits; 1e-9 is a number, as in YAML 1.2."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.constructed: Node | None = None
        self._level = 0
        # number of values in each node, with aliases expanded
        self._sizes: dict[int, int] = {}

    def compose_node(self, parent: Node | None, index: Any) -> Node | None:
        """Compose a node; refuses deep nesting and too many values."""
        is_alias, mark = self.check_event(yaml.AliasEvent), self.peek_event().start_mark
        self._level += 1
        if self._level > _MOST_LEVELS:
            raise ComposerError(None, None, f"nested more than {_MOST_LEVELS} levels deep", mark)
        node = super().compose_node(parent, index)
        self._level -= 1
        if is_alias and id(node) not in self._sizes:
            raise ComposerError(None, None, "an alias inside of what it stands for", mark)
        if not is_alias and node is not None:
            self._sizes[id(node)] = 1 + sum(self._sizes[id(child)] for child in _children(node))
        if self._sizes.get(id(node), 0) > _MOST_VALUES:
            raise ComposerError(None, None, f"more than {_MOST_VALUES:,} values, aliases written out", mark)
        return node

    def compose_mapping_node(self, anchor: Any) -> MappingNode:
        """Compose a mapping; refuses a duplicate key."""
        node = super().compose_mapping_node(anchor)
        lines: dict[tuple[str, str], int] = {}
        for key, _ in node.value:
            if not isinstance(key, ScalarNode):
                continue
            name, mark = (key.tag, key.value), key.start_mark
            if name in lines:
                raise ComposerError(
                    None,
                    None,
                    f"key {key.value[:60]!r} stands there twice, first in line {lines[name]}",
                    mark,
                )
            lines[name] = mark.line + 1
        return node

    def construct_object(self, node: Node, deep: bool = False) -> Any:
        """Construct the value of a node, and keep the node for error messages."""
        self.constructed = node
        return super().construct_object(node, deep)


def _whole_number(loader: _Loader, node: Any) -> int:
    """An integer; refused beyond int64, since no setting needs it and it may be slow to print."""
    value = yaml.SafeLoader.construct_yaml_int(loader, node)
    if abs(value) >= 2**63:
        raise YamlTextError("a number of too many digits", node.start_mark.line + 1)
    return value


def _children(node: Node) -> list[Node]:
    if isinstance(node, MappingNode):
        return [child for pair in node.value for child in pair]
    return node.value if isinstance(node, CollectionNode) else []


class Dumper(yaml.SafeDumper):
    """Writes YAML that `read_yaml` reads back: text such as 1e5 gets quotes."""


# dates are text, and only types that JSON has are kept; PyYAML's own tables stay unchanged
_Loader.yaml_constructors = {
    tag: constructor
    for tag, constructor in yaml.SafeLoader.yaml_constructors.items()
    if not tag or tag.rpartition(":")[2] not in ("timestamp", "binary", "set", "omap", "pairs")
}
_Loader.add_constructor("tag:yaml.org,2002:int", _whole_number)
_Loader.yaml_implicit_resolvers = {
    sign: [(tag, form) for tag, form in resolvers if not tag.endswith(":timestamp")]
    for sign, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
for _class in (_Loader, Dumper):
    _class.add_implicit_resolver(
        "tag:yaml.org,2002:float",
        re.compile(r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)[eE][-+]?[0-9]+$"),
        list("-+.0123456789"),
    )
