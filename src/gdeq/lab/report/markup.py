"""HTML in which text is text: what is not `Markup` is escaped, so run folders cannot inject."""

from __future__ import annotations

from html import escape

VOID = {"meta", "br"}
WIDE = 6  # columns, from which on a phone does not show a table whole


class Markup(str):
    """A piece of HTML that was made here."""


def tag(name: str, /, *children: object, **attributes: object) -> Markup:
    """An element; ``class_`` stands for class, and True for an attribute without a value."""
    words = [name]
    for key, value in attributes.items():
        clean = key.rstrip("_")
        words.append(clean if value is True else f'{clean}="{escape(str(value))}"')
    start = f"<{' '.join(words)}>"
    return Markup(start if name in VOID else f"{start}{join(*children)}</{name}>")


def join(*children: object) -> Markup:
    return Markup("".join(c if isinstance(c, Markup) else escape(str(c)) for c in children))


def table(head: list[Markup], body: list[list[object]], name: str = "") -> Markup:
    """A table in a box of its own, so that a phone scrolls it and not the page.

    The first column holds the row's name; a cell that is no `Markup` is plain text.
    """
    lines = []
    for first, *rest in body:
        cells = [tag("td", c) if not _is_cell(c) else Markup(c) for c in rest]
        lines.append(tag("tr", tag("th", first, scope="row"), *cells))
    made = tag("table", tag("thead", *head), tag("tbody", *lines), **({"id": name} if name else {}))
    box = tag("div", made, class_="scroll", tabindex="0")
    wide = bool(body) and len(body[0]) >= WIDE
    return join(tag("p", "scroll →", class_="hint"), box) if wide else box


def _is_cell(child: object) -> bool:
    return isinstance(child, Markup) and child.startswith("<td")


def header(*names: object) -> list[Markup]:
    """One line of column names; text columns, as `Markup`, bring their own cell."""
    cells = (n if isinstance(n, Markup) else tag("th", n, scope="col") for n in names)
    return [tag("tr", *cells)]
