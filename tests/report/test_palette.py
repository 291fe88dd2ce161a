"""Colours that can be told from the page by every eye, light and dark; in grey the rest is told by marks."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest

from adaserve_jax.report.palette import COLOURS, SERIES_COLOURS, css_variables, shades

DEUTERANOPIA = np.array(
    [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.01182, 0.04294, 0.968881]]
)
PROTANOPIA = np.array(
    [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]]
)
"""Machado, Oliveira and Fernandes 2009, severity 1, on linear RGB."""
LEAST = 14.0
"""Of distances in L*a*b*; 2.3 is just noticed."""


def linear(name: str, *, dark: bool) -> np.ndarray:
    """f64[3], linear RGB."""
    value = np.array([*bytes.fromhex(COLOURS[name][dark][1:])]) / 255
    return np.where(value <= 0.04045, value / 12.92, ((value + 0.055) / 1.055) ** 2.4)


def contrast(one: str, other: str, *, dark: bool) -> float:
    """As WCAG 2.2 defines it."""
    weights = np.array([0.2126, 0.7152, 0.0722])
    low, high = sorted(float(linear(name, dark=dark) @ weights) for name in (one, other))
    return (high + 0.05) / (low + 0.05)


def lab(rgb: np.ndarray) -> np.ndarray:
    """CIE L*a*b* under D65."""
    to_xyz = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
    x, y, z = np.cbrt(np.clip(to_xyz @ rgb, 0.0089, None) / np.array([0.9505, 1.0, 1.089]))
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_text_and_series_stand_out(dark):
    for ground in ("page", "panel"):
        for text in ("ink", "muted", "focus"):
            assert contrast(text, ground, dark=dark) >= 4.5, (text, ground)
    assert contrast("warn-ink", "warn-page", dark=dark) >= 4.5
    for name in SERIES_COLOURS:
        assert contrast(name, "panel", dark=dark) >= 3, name


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("eye", [np.eye(3), DEUTERANOPIA, PROTANOPIA], ids=["usual", "deuteranopia", "protanopia"])
def test_series_differ_for_the_colour_blind(eye, dark):
    seen = {name: lab(np.clip(eye @ linear(name, dark=dark), 0, 1)) for name in SERIES_COLOURS}
    for one, other in combinations(SERIES_COLOURS, 2):
        assert np.linalg.norm(seen[one] - seen[other]) >= LEAST, (one, other)


def test_every_colour_has_a_variable_and_a_shade():
    assert shades(dark=True).keys() == shades(dark=False).keys() == COLOURS.keys()
    assert "--s0: #56b4e9;" in css_variables(dark=True) and "--s0: #0072b2;" in css_variables(dark=False)
