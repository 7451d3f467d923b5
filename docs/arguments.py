"""For the API pages: arguments of a docstring as a list, with the defaults of an options class.

Our docstrings name arguments as ``name: text``, with continuation lines indented.
"""

from __future__ import annotations

import re
from typing import Any

import griffe

ARGUMENT = re.compile(r"^(?P<names>[a-z]\w*(?:, [a-z]\w*)*): (?P<text>.*)$")


class Arguments(griffe.Extension):
    def on_class_members(self, *, cls: griffe.Class, **_: Any) -> None:
        self.rewrite(cls)

    def on_function_instance(self, *, func: griffe.Function, **_: Any) -> None:
        self.rewrite(func)

    def rewrite(self, obj: griffe.Object) -> None:
        if obj.docstring is None:
            return
        lines, listed = [], False
        for line in obj.docstring.value.split("\n"):
            found = ARGUMENT.match(line)
            if found and not (lines and lines[-1].strip() and not listed):
                names = [
                    f"**{name}**{self.default(obj, name)}" for name in found["names"].split(", ")
                ]
                if not listed:
                    lines.append("")
                lines.append(f"- {', '.join(names)}: {found['text']}")
                listed = True
            elif listed and line.startswith("    "):
                lines.append("  " + line.strip())
            else:
                lines.append(line)
                listed = False
        obj.docstring.value = "\n".join(lines)

    def default(self, obj: griffe.Object, name: str) -> str:
        """`` = 18``, for an argument of a function, or of a class: of its __init__, or a field."""
        made = obj.members.get("__init__", obj) if obj.is_class else obj
        parameters = getattr(made, "parameters", None) or {}
        if name in parameters:
            value = parameters[name].default
        else:
            value = getattr(obj.members.get(name), "value", None)
        text = "" if value is None else str(value)
        if text.startswith("field(default="):
            text = text.removeprefix("field(default=").split(",")[0].rstrip(")")
        plain = text and "(" not in text and not text.isupper()  # a constant says nothing here
        return f" `= {text}`" if plain else ""
