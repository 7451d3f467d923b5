"""The methods' colours: read on light and dark pages, told apart by colour-blind readers."""

import itertools

import pytest

from gdeq.lab.report.methods import LOOKS, SPARE, looks
from gdeq.lab.report.style import CSS

# Machado, Oliveira & Fernandes 2009, severity 1, on linear RGB.
BLINDNESS = {
    "none": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "protanopia": (
        (0.152286, 1.052583, -0.204868),
        (0.114503, 0.786281, 0.099216),
        (-0.003882, -0.048116, 1.051998),
    ),
    "deuteranopia": (
        (0.367322, 0.860646, -0.227968),
        (0.280085, 0.672501, 0.047413),
        (-0.011820, 0.042940, 0.968881),
    ),
    "tritanopia": (
        (1.255528, -0.076749, -0.178779),
        (-0.078411, 0.930809, 0.147602),
        (0.004733, 0.691367, 0.303900),
    ),
}
ALL = {**LOOKS, **{f"spare {n}": look for n, look in enumerate(SPARE)}}


def linear(colour):
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    return [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]


def luminance(rgb):
    return 0.2126 * rgb[0] + 0.7152 * rgb[1] + 0.0722 * rgb[2]


def contrast(one, other):
    low, high = sorted(luminance(linear(colour)) for colour in (one, other))
    return (high + 0.05) / (low + 0.05)


def lab(rgb):
    r, g, b = (min(1.0, max(0.0, part)) for part in rgb)
    x = (0.4124 * r + 0.3576 * g + 0.1805 * b) / 0.9505
    y = 0.2126 * r + 0.7152 * g + 0.0722 * b
    z = (0.0193 * r + 0.1192 * g + 0.9505 * b) / 1.089
    fx, fy, fz = (t ** (1 / 3) if t > 0.008856 else 7.787 * t + 16 / 116 for t in (x, y, z))
    return 116 * fy - 16, 500 * (fx - fy), 200 * (fy - fz)


def seen(colour, kind):
    rgb = linear(colour)
    return lab([sum(m * c for m, c in zip(row, rgb, strict=True)) for row in BLINDNESS[kind]])


def apart(one, other, kind):
    pair = zip(seen(one, kind), seen(other, kind), strict=True)
    return sum((a - b) ** 2 for a, b in pair) ** 0.5


@pytest.mark.parametrize("name", ALL)
def test_colours_stand_out_from_the_page(name):
    assert "--page: #ffffff" in CSS
    assert "--page: #14171b" in CSS
    assert contrast(ALL[name].light, "#ffffff") >= 3
    assert contrast(ALL[name].dark, "#14171b") >= 3


@pytest.mark.parametrize("kind", BLINDNESS)
@pytest.mark.parametrize("page", ["light", "dark"])
def test_the_paper_s_four_methods_are_told_apart(kind, page):
    for one, other in itertools.combinations(LOOKS.values(), 2):
        assert apart(getattr(one, page), getattr(other, page), kind) >= 20, (one, other)


@pytest.mark.parametrize("kind", BLINDNESS)
@pytest.mark.parametrize("page", ["light", "dark"])
def test_all_colours_are_told_apart(kind, page):
    for one, other in itertools.combinations(ALL.values(), 2):
        assert apart(getattr(one, page), getattr(other, page), kind) >= 10, (one, other)


def test_no_two_markers_are_the_same():
    assert len({look.marker for look in ALL.values()}) == len(ALL)


def test_each_method_keeps_its_colour_whoever_else_is_there():
    many = looks(["GDEQ refine 2", "NPG", "GDEQ", "Implicit", "JFB"])
    assert {
        many[title] == LOOKS[title.lower()] for title in ("Implicit", "JFB", "NPG", "GDEQ")
    } == {True}
    assert many["GDEQ refine 2"] in SPARE
    assert looks(["NPG"])["NPG"] == LOOKS["npg"]
