"""Pictures of the report: axes, labels, colours, panels, and what a mixer learned."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from chasm.studies.report import figures, learned
from chasm.studies.report.figures import colours, find_box
from chasm.studies.report.pareto import Point, pareto_figure


def test_axes_have_plain_numbers() -> None:
    points = [Point(f"m{i}", 12.9151 + i * 1e-5, 2000.0 + 900 * i, 0.030 + 1e-4 * i) for i in range(3)]
    labels = {p.arm: p.arm for p in points}
    wide = [*points, Point("wide", 12.9, 9e6, 4.0)]
    for figure in (
        pareto_figure(points, labels, "PSNR"),
        pareto_figure(wide, labels | {"wide": "wide"}, "PSNR"),
    ):
        figure.canvas.draw()
        for ax in figure.axes:
            assert ax.yaxis.get_offset_text().get_text() == ""
            low, high = ax.get_xlim()
            shown = [t for t, at in zip(ax.get_xticklabels(), ax.get_xticks(), strict=True) if low <= at <= high]
            assert sum(bool(t.get_text()) for t in shown) > 1


def test_long_labels_do_not_touch(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[Any] = []
    monkeypatch.setattr(figures, "source", lambda figure, kind="svg": kept.append(figure))
    image = np.random.default_rng(0).random((32, 32))
    names = ["Shared basis, signed gain", "SpectFormer, matched parameters", "DiffFNO, matched parameters", "a", "b"]
    figures.panel(image, ("zero-filled", image), dict.fromkeys(names, image), dict.fromkeys(names, "30.00 dB"))
    (figure,) = kept
    figure.canvas.draw()
    boxes = [ax.title.get_window_extent() for part in figure.subfigs for ax in part.axes if ax.get_title()]
    assert len(boxes) == 7
    for i, a in enumerate(boxes):
        assert not any(a.overlaps(b) for b in boxes[i + 1 :])


def test_what_was_learned_is_what_the_mixer_computes(tmp_path: Path) -> None:
    import chasm

    mixer = chasm.CHASM(6, size=(12, 16))
    with torch.no_grad():
        for parameter in mixer.parameters():
            parameter += 0.3 / mixer.step_scale * torch.randn_like(parameter)
    save_file({f"slots.2.{k}": v for k, v in mixer.state_dict().items()}, tmp_path / "w.safetensors")
    found = {x.axis: x for x in learned.read(tmp_path / "w.safetensors")}
    operators = mixer.operators(12, 16)
    for axis, x in found.items():
        assert x.slot == 2
        np.testing.assert_allclose(x.basis, operators[axis].U.detach(), atol=1e-6)
        np.testing.assert_allclose(x.gains, operators[axis].gains.detach(), atol=1e-6)
        assert x.rotation is not None
        assert x.rotation > 1
    flat = learned.Learned(0, "ch", np.eye(4), np.ones((9, 4)))
    assert (flat.rotation, flat.over_frequency, flat.over_directions) == (0.0, 0.0, 0.0)


def test_segmentation_and_colour_panels() -> None:
    from chasm.studies.report.figures import panel

    labels = np.zeros((30, 30), dtype=np.uint8)
    labels[4:9, 6:12] = 2
    grey = np.random.default_rng(0).random((30, 30)).astype(np.float16)
    source, is_labelled = panel(labels, ("input", grey), {"CHASM": np.roll(labels, 1, 0)}, {})
    assert is_labelled
    assert source.startswith("data:image/png")
    rgb = np.random.default_rng(0).random((3, 30, 24)).astype(np.float16)
    _, is_labelled = panel(rgb, ("bicubic", rgb * 0.5), {f"m{i}": rgb * 0.9 for i in range(9)}, {})
    assert not is_labelled


def test_classes_have_a_legend(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[Any] = []
    monkeypatch.setattr(figures, "source", lambda figure, kind="svg": drawn.append(figure))
    labels = np.zeros((30, 30), dtype=np.uint8)
    labels[4:9, 6:12] = 2
    figures.panel(labels, ("input", labels / 2), {"CHASM": labels}, {})
    legends = [ax.get_legend() for part in drawn[0].subfigs for ax in part.axes if ax.get_legend()]
    assert [entry.get_text() for entry in legends[0].get_texts()] == ["class 1", "class 2"]
    assert len(legends) == 1


def test_gains_are_coloured_on_a_logarithmic_scale_around_one() -> None:
    norm = learned.gain_colours([np.array([0.1, 1.0, 2.0])], is_log=True)
    assert [float(norm(g)) for g in (0.1, 1.0, 10.0)] == pytest.approx([0, 0.5, 1])
    signed = learned.gain_colours([np.array([-0.5, 1.2])], is_log=False)
    assert [float(signed(g)) for g in (-0.5, 1.0, 2.5)] == pytest.approx([0, 0.5, 1])


def test_the_box_lies_where_the_weight_is() -> None:
    weight = np.zeros((40, 60))
    weight[20:24, 50:54] = 1
    y, x, n = find_box(weight)
    assert weight[y : y + n, x : x + n].sum() == weight.sum()


def test_a_method_keeps_its_colour(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in a chart that some methods are not in: one without training has no learning curve."""
    assert len(set(colours(["baseline", "gfnet", "chasm"]).values())) == 3
    kept: list[Any] = []
    monkeypatch.setattr(figures, "source", lambda figure, kind="svg": kept.append(figure))
    labels = {"classical": "classical", "gfnet": "GFNet", "chasm": "CHASM"}
    kept.append(pareto_figure([Point(arm, 20.0, 1000, 0.01) for arm in labels], labels, "PSNR"))
    figures.learning([figures.Curve(a, 0, [1, 2], [1, 1], [1, 2], [9, 9]) for a in ("gfnet", "chasm")], labels, "PSNR")
    first, second = ({line.get_label(): line.get_color() for line in f.axes[0].get_lines()} for f in kept)
    assert [first[name] for name in ("GFNet", "CHASM")] == [second[name] for name in ("GFNet", "CHASM")]
