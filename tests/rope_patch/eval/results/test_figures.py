"""Figures can be read without seeing red or green, and in grey."""

from itertools import combinations, pairwise

import pytest
from matplotlib import colormaps
from matplotlib.colors import to_rgb

from rope_patch.eval.results.figures import COLORS, DASHES, HATCHES, SHADES, draw_bars, ink_on, new_figure, save_figure

# what readers without green and without red cones see: Machado, Oliveira and Fernandes 2009, severity 1, linear RGB
BLIND = {
    "none": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "deutan": ((0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413), (-0.011820, 0.042940, 0.968881)),
    "protan": ((0.152286, 1.052583, -0.204868), (0.114503, 0.786281, 0.099216), (-0.003882, -0.048116, 1.051998)),
}


def linear(color):
    return [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in to_rgb(color)]


def luminance(color):
    return sum(w * c for w, c in zip((0.2126, 0.7152, 0.0722), linear(color), strict=True))


@pytest.mark.parametrize("eye", BLIND)
def test_no_two_curves_have_one_color(eye):
    seen = [[sum(w * c for w, c in zip(row, linear(color), strict=True)) for row in BLIND[eye]] for color in COLORS]
    for (i, a), (j, b) in combinations(enumerate(seen), 2):
        assert sum((x - y) ** 2 for x, y in zip(a, b, strict=True)) ** 0.5 > 0.1, (COLORS[i], COLORS[j])


def test_shades_go_from_dark_to_light_and_text_on_them_can_be_read():
    values = [k / 20 for k in range(21)]
    greys = [luminance(colormaps[SHADES](v)[:3]) for v in values]
    assert all(a < b for a, b in pairwise(greys))
    for value, grey in zip(values, greys, strict=True):
        ink = 1.0 if ink_on(value) == "white" else 0.0
        assert (max(ink, grey) + 0.05) / (min(ink, grey) + 0.05) > 2.9, value


def test_curves_and_bars_differ_without_colors():
    figure, (axes,) = new_figure()
    lines = [axes.plot([0, 1], [k, k])[0] for k in range(len(COLORS))]
    assert len({(line.get_linestyle(), str(line._dash_pattern)) for line in lines}) == len(DASHES) == len(COLORS)
    draw_bars(axes, ["a"], {str(k): [k + 1] for k in range(len(COLORS))})
    assert len({bar.get_hatch() for bar in axes.patches}) == len(HATCHES) == len(COLORS)


@pytest.mark.parametrize(
    ("path", "name"),
    [("fig", "fig"), ("fig.png", "fig"), ("fig.svg", "fig"), ("fig.v1", "fig.v1"), ("fig.v1.png", "fig.v1")],
)
def test_a_figure_keeps_its_name_up_to_its_ending(path, name, tmp_path):
    figure, _ = new_figure()
    files = save_figure(figure, tmp_path / path)
    assert files == [tmp_path / f"{name}.png", tmp_path / f"{name}.svg"]
    assert sorted(tmp_path.iterdir()) == files
