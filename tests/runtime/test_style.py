"""The palette: contrast with its backgrounds, and colours that colour-blind readers can tell apart."""

import itertools

import numpy as np
import pytest

from g2rpo.runtime.style import DARK, LIGHT, STROKES, css_variables

# Machado, Oliveira and Fernandes (2009), severity 1, for linear RGB.
DEFICIENCIES = {
    "none": np.eye(3),
    "protanopia": np.array(
        [
            [0.152286, 1.052583, -0.204868],
            [0.114503, 0.786281, 0.099216],
            [-0.003882, -0.048116, 1.051998],
        ]
    ),
    "deuteranopia": np.array(
        [
            [0.367322, 0.860646, -0.227968],
            [0.280085, 0.672501, 0.047413],
            [-0.011820, 0.042940, 0.968881],
        ]
    ),
    "tritanopia": np.array(
        [
            [1.255528, -0.076749, -0.178779],
            [-0.078411, 0.930809, 0.147602],
            [0.004733, 0.691367, 0.303900],
        ]
    ),
}
OKABE_ITO = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
THEMES = pytest.mark.parametrize("theme", [LIGHT, DARK], ids=["light", "dark"])


def linear(colour):
    """#rrggbb as linear RGB [3]."""
    channels = np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    return np.where(channels <= 0.04045, channels / 12.92, ((channels + 0.055) / 1.055) ** 2.4)


def contrast(colour, other):
    """Contrast ratio of WCAG 2.1: (lighter luminance + 0.05) / (darker + 0.05)."""
    dark, light = sorted(float(linear(c) @ [0.2126, 0.7152, 0.0722]) for c in (colour, other))
    return (light + 0.05) / (dark + 0.05)


def oklab(rgb):
    """Linear RGB [3] in OKLab (Ottosson, 2020), where distances are about as large as they look."""
    to_cones = [
        [0.4122214708, 0.5363325363, 0.0514459929],
        [0.2119034982, 0.6806995451, 0.1073969566],
        [0.0883024619, 0.2817188376, 0.6299787005],
    ]
    to_lab = [
        [0.2104542553, 0.7936177850, -0.0040720468],
        [1.9779984951, -2.4285922050, 0.4505937099],
        [0.0259040371, 0.7827717662, -0.8086757660],
    ]
    return np.array(to_lab) @ np.cbrt(np.array(to_cones) @ np.clip(rgb, 0, 1))


def smallest_distance(colours):
    """Smallest distance of two colours, over all deficiencies."""
    return min(
        float(np.linalg.norm(oklab(matrix @ linear(a)) - oklab(matrix @ linear(b))))
        for matrix in DEFICIENCIES.values()
        for a, b in itertools.combinations(colours, 2)
    )


def test_the_formulas_by_known_values():
    assert contrast("#000000", "#ffffff") == pytest.approx(21)
    assert contrast("#777777", "#ffffff") == pytest.approx(4.48, abs=0.01)  # WCAG's well-known grey
    assert oklab(linear("#ffffff")) == pytest.approx([1, 0, 0], abs=1e-4)
    assert smallest_distance(OKABE_ITO) == pytest.approx(0.076, abs=0.001)


@THEMES
def test_series_have_a_contrast_of_three_to_one(theme):
    found = {(c, b): contrast(c, b) for c in theme.series for b in (theme.background, theme.panel)}
    assert len(theme.series) == 7 and min(found.values()) >= 3, found


@THEMES
def test_text_can_be_read(theme):
    for colour in (theme.text, theme.quiet, theme.link, theme.warning):
        for background in (theme.background, theme.panel):
            assert contrast(colour, background) >= 4.5, (colour, background)


@THEMES
def test_colour_blind_readers_can_tell_the_series_apart(theme):
    assert smallest_distance(theme.series) >= 0.11 > smallest_distance(OKABE_ITO)


@THEMES
def test_more_series_than_colours_have_other_strokes(theme):
    styles = [theme.series_style(i) for i in range(7 * len(STROKES))]
    assert len(set(styles)) == len(styles) and styles[0][1] == "-" and styles[7] == (styles[0][0], "--")
    assert theme.series_style(len(styles)) == styles[0]


def test_pages_get_both_themes():
    sheet = css_variables()
    light, dark = sheet.split("@media screen and (prefers-color-scheme: dark)")
    for text, theme in ((light, LIGHT), (dark, DARK)):
        assert f"--bg: {theme.background};" in text and f"--text: {theme.text};" in text
        assert f"--s6: {theme.series[6]};" in text
