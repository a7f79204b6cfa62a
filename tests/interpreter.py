"""Tests that run Triton's interpreter: their mark `interpreted`, and an interpreter that wastes less time.

A pytest plugin. A test with the parameter `triton` gets the mark; modules of such tests set it themselves.
"""

from functools import cache
from typing import Any

import pytest

from relpos.backends.triton import backend as triton


def pytest_configure(config: pytest.Config) -> None:
    """Have the interpreter replace the functions of triton.language once a launch, not at every call."""
    if triton.UNAVAILABLE is not None or not triton.IS_INTERPRETED:
        return
    import triton.language as tl
    from triton.runtime import interpreter

    replace, numpy_dtype = interpreter._patch_lang, interpreter._get_np_dtype
    if getattr(replace, "replaces_once", False):
        return

    def replace_once(function: Any) -> Any:
        modules = [x for x in function.__globals__.values() if x is tl or x is tl.core]
        is_replaced = not any(tl.core.is_builtin(module.arange) for module in modules)
        return interpreter._LangPatchScope() if is_replaced else replace(function)

    replace_once.replaces_once = True
    cached = cache(numpy_dtype)
    interpreter._patch_lang = replace_once
    interpreter._get_np_dtype = lambda x: cached(x) if type(x) is tl.dtype else numpy_dtype(x)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what runs the backend `triton`, which is interpreted where there is no GPU."""
    if not triton.IS_INTERPRETED:
        return
    for item in items:
        parameters = item.callspec.params.values() if hasattr(item, "callspec") else ()
        if any(isinstance(x, str) and x == "triton" for x in parameters):
            item.add_marker(pytest.mark.interpreted)
