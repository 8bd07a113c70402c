"""Kinds of values, as error messages name them."""

from __future__ import annotations


def kind_of(value: object) -> str:
    """Name of a value's type in JSON, such as ``a list``, for error messages."""
    if value is None:
        return "null"
    names = {
        bool: "true or false",
        str: "a string",
        list: "a list",
        dict: "an object",
        int: "a number",
        float: "a number",
    }
    return names.get(type(value), f"a value of type {type(value).__name__}")


def type_of(value: object) -> str:
    """Python type of a value with its article, such as ``an int``, for error messages."""
    name = type(value).__name__
    return f"{'an' if name[0] in 'aeiouAEIO' else 'a'} {name}"
