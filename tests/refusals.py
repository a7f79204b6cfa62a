"""Of an error tests compare the argument's name and the numbers, not the sentence around them."""

import re
from collections.abc import Callable, Iterable

import pytest


def refuses(
    call: Callable[[], object], error: type | tuple[type, ...], name: str, said: Iterable[object]
) -> None:
    """The message names the argument first, and says each of these as a word of its own."""
    with pytest.raises(error) as raised:
        call()
    message = str(raised.value)
    assert message.startswith(f"{name} must ")
    for word in map(str, said):
        is_said = re.search(rf"(?<!\d)(?<!\d\.){re.escape(word)}(?!\d)", message)
        assert is_said, f"{word!r} is not in {message!r}"
