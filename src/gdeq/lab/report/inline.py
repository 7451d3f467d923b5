"""Matplotlib's SVG made part of a page: its colours and font are the page's."""

from __future__ import annotations

import re
from html import escape

from gdeq.lab.report.figures import Figure
from gdeq.lab.report.methods import Look


def inline(svg: str, figure: Figure, looks: dict[str, Look], ink: str) -> str:
    """One ``<svg>`` element without sizes, namespaces, fonts, or names that another may have."""
    head, _, body = svg[svg.index("<svg") :].partition(">")
    box = re.search(r'viewBox="[\d. ]+"', head)
    body = re.sub(r"<(metadata|style)\b.*?</\1>", "", body, flags=re.DOTALL)
    body = re.sub(r'<g id="[^"]*"', "<g", body)
    body = re.sub(r'(\bid="|url\(#|xlink:href="#)', rf"\g<1>{figure.name}-", body)
    body = re.sub(r"font-family: [^;\"]*; ?", "", body)
    body = re.sub(r"\s*\n\s*", " ", body)
    body = body.replace(ink, "currentColor")
    for index, colour in enumerate(colours(looks)):
        body = body.replace(colour, f"var(--method-{index})")
    title = escape(figure.title)
    return f'<svg role="img" aria-label="{title}" {box.group() if box else ""}>{body}'


def colours(looks: dict[str, Look]) -> dict[str, str]:
    """Each colour on white once, with its twin on black."""
    return {look.light: look.dark for look in looks.values()}


def variables(looks: dict[str, Look], dark: bool) -> str:
    """The methods' colours as CSS, for a light or a dark page."""
    chosen = colours(looks).values() if dark else colours(looks)
    return " ".join(f"--method-{index}: {colour};" for index, colour in enumerate(chosen))
