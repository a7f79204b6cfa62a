"""Messages for pydantic's errors about a recipe: the key, the expected value, the given one, and a fix.

pydantic's own messages are written for programmers.
"""

import difflib
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import pydantic
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

# common misspellings of YAML's null
_WORDS_FOR_NULL = ("none", "nil", "nothing", "off", "no", "undefined", "nan")
_MOST_SHOWN = 60

_KINDS = {
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "string": "text",
    "path": "a path",
    "list": "a list",
    "tuple": "a list",
    "dict": "a mapping of keys to values",
    "model": "a mapping of keys to values",
}
_BOUNDS = {
    "greater_than": ("over", "gt"),
    "greater_than_equal": ("at least", "ge"),
    "less_than": ("under", "lt"),
    "less_than_equal": ("at most", "le"),
}


def error_message(error: pydantic.ValidationError, model: type[BaseModel], name: str) -> str:
    """The first three errors of `model` in one line, each after `name`, the recipe's name."""
    found = []
    for item in error.errors(include_url=False):
        sentence = f"{name}: {_sentence(item, model)}"
        if sentence not in found:
            found.append(sentence)
    return "; ".join(found[:3])


def short_yaml(value: Any) -> str:
    """`value` as YAML on one line, truncated if it is long."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, Mapping):
        pairs = (
            f"{key if isinstance(key, str) else short_yaml(key)}: {short_yaml(each)}"
            for key, each in value.items()
        )
        return _cut("{" + ", ".join(pairs) + "}")
    if isinstance(value, list | tuple):
        return _cut("[" + ", ".join(map(short_yaml, value)) + "]")
    # repr quotes text and paths
    return _cut(repr(value if isinstance(value, int | float) else str(value)))


def _cut(text: str) -> str:
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]} ..."


def _sentence(item: ErrorDetails, model: type[BaseModel]) -> str:
    kind, where, came = item["type"], item["loc"], item["input"]
    key, context = _cut(".".join(map(str, where))), item.get("ctx", {})
    if kind == "invalid_key":
        # a number, true or null as a key
        key = _cut(".".join([*map(str, where[:-1]), short_yaml(came)]))
    if kind in ("extra_forbidden", "invalid_key"):
        return f"unknown key {key!r}; {_nearest(str(where[-1]), _known_keys(model, where[:-1]))}"
    if kind == "missing" and isinstance(where[-1], str):
        return f"key {key!r} is missing"
    if kind == "missing":
        key, field = _cut(".".join(map(str, where[:-1]))), _field(model, where[:-1])
        return f"{key} must be {_wanted('tuple_type', field)}; got {short_yaml(came)}"
    if kind == "value_error":
        # a message of our own validators
        message = str(context["error"])
        is_told = isinstance(came, Mapping | list | tuple) or "got " in message or short_yaml(came) in message
        return ": ".join(filter(None, (key, message))) + ("" if is_told else f"; got {short_yaml(came)}")
    field = _field(model, where)
    rule = _rule(kind, context, field)
    return f"{key or 'it'} must {rule}; got {short_yaml(came)}{_advice(kind, field, came)}"


def _rule(kind: str, context: Mapping[str, Any], field: FieldInfo | None) -> str:
    """The predicate of the message: "be at least 1", "hold at most 2 values"."""
    if kind in _BOUNDS:
        words, bound = _BOUNDS[kind]
        return f"be {words} {_plain(context[bound])}"
    if kind == "finite_number":
        return "be a finite number"
    if kind == "literal_error":
        return f"be {context['expected']}"
    if kind in ("too_short", "too_long") and _length(field) is None:
        least = kind == "too_short"
        count = context["min_length" if least else "max_length"]
        return f"hold at {'least' if least else 'most'} {count} value{'' if count == 1 else 's'}"
    return f"be {_wanted(kind, field)}"


def _plain(bound: float) -> str:
    """A bound with all digits; the format `g` would round 1,048,576."""
    return f"{bound:,}" if isinstance(bound, int) else f"{bound:g}"


def _wanted(kind: str, field: FieldInfo | None) -> str:
    if kind == "int_from_float":
        return _KINDS["int"]
    length = _length(field)
    if length is not None and kind in ("tuple_type", "too_short", "too_long"):
        return f"a list of {length} values"
    # the default is for error types that no key of a recipe has today
    return _KINDS.get(kind.partition("_")[0], f"another value ({kind})")


def _advice(kind: str, field: FieldInfo | None, came: Any) -> str:
    """A fix for the value `came`, beginning with a semicolon; empty if none is known."""
    sort = kind.partition("_")[0]
    may_be_null = field is not None and type(None) in typing.get_args(field.annotation)
    if came is None:
        has_default = field is not None and not field.is_required()
        return "; leave out the key for its default" if has_default else ""
    if may_be_null and isinstance(came, str) and came.strip().casefold() in _WORDS_FOR_NULL:
        return "; write null"
    if sort in ("string", "path"):
        return _advice_on_text(came)
    if sort in ("int", "float"):
        return _advice_on_numbers(came, is_whole=sort == "int")
    if sort == "bool" and isinstance(came, str):
        return "; write one of these without quotes"
    if sort == "list":
        return f"; write [{short_yaml(came)}]"
    if sort == "model" and field is not None:
        return f"; its keys are {', '.join(_inner_model(field.annotation).model_fields)}"
    if kind == "literal_error" and isinstance(came, str) and field is not None:
        choices = map(str, typing.get_args(field.annotation))
        near = difflib.get_close_matches(came.casefold(), choices, n=1, cutoff=0.6)
        return f"; the nearest is {near[0]!r}" if near else ""
    return ""


def _advice_on_text(came: Any) -> str:
    if isinstance(came, bool):
        words = "yes, on and true" if came else "no, off and false"
        return f"; YAML reads {words} as {short_yaml(came)}: put the word in quotes"
    if isinstance(came, int | float):
        return f"; put it in quotes: '{came}'"
    if isinstance(came, list) and len(came) == 1 and isinstance(came[0], str):
        return f"; write {_cut(came[0])} without brackets"
    return ""


def _advice_on_numbers(came: Any, is_whole: bool) -> str:
    if isinstance(came, str):
        # 1,000 or "1000"
        plain = came.replace(",", "").strip()
        return f"; write {_cut(plain)}, without quotes or commas" if _is_number(plain) else ""
    return f"; write {int(came)}" if is_whole and isinstance(came, float) and came.is_integer() else ""


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _nearest(name: str, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(name[:100], known, n=1, cutoff=0.5)
    return f"the nearest is {near[0]!r}" if near else f"known here: {', '.join(known)}"


def _known_keys(model: type[BaseModel], where: Sequence[Any]) -> list[str]:
    """Keys of the section at `where`."""
    field = _field(model, where)
    return list((_inner_model(field.annotation) if field else model).model_fields)


def _length(field: FieldInfo | None) -> int | None:
    """The length of the tuple type in a key's annotation; None without one."""
    kinds = [field.annotation, *typing.get_args(field.annotation)] if field else []
    tuples = (typing.get_args(kind)[0] if typing.get_origin(kind) is Annotated else kind for kind in kinds)
    return next((len(typing.get_args(kind)) for kind in tuples if typing.get_origin(kind) is tuple), None)


def _field(model: type[BaseModel], where: Sequence[Any]) -> FieldInfo | None:
    """The field at `where`; an index into a list of models gives the list, any other index None."""
    found: FieldInfo | None = None
    inner: Any = model
    for part in where:
        if isinstance(part, str) and inner is not None and part in inner.model_fields:
            found = inner.model_fields[part]
            inner = _inner_model(found.annotation)
        elif inner is None:
            return None
    return found


def _inner_model(annotation: Any) -> Any:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    if typing.get_origin(annotation) in (list, typing.Union, types.UnionType):
        return next(filter(None, map(_inner_model, typing.get_args(annotation))), None)
    return None
