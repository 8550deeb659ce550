"""Python's syntax trees of source files."""

import ast


def parse(source: str) -> ast.Module:
    """Return the syntax tree of Python source.

    CPython 3.11 counts the depth of all trees that are being made in one place, so a second one that a finalizer or
    another thread makes meanwhile is a SystemError: https://github.com/python/cpython/issues/106905. Parse again then.
    """
    try:
        return ast.parse(source)
    except SystemError:
        return ast.parse(source)
