"""Score against cost: who is on the front, and whether a person can read the names."""

from typing import Any

import numpy as np
import pytest

from chasm.studies.report.pareto import Point, pareto_figure, pareto_front


def names(ax: Any) -> list[Any]:
    return [text for text in ax.texts if text.get_text()]


def marker(ax: Any, label: str) -> Any:
    return next(line for line in ax.get_lines() if line.get_label() == label)


def front(ax: Any) -> Any:
    return marker(ax, "Pareto front").get_xydata()


def test_the_front_is_what_nobody_beats() -> None:
    rng = np.random.default_rng(0)
    points = [(float(c), float(s)) for c, s in rng.integers(0, 12, (60, 2))]
    on = pareto_front(points)
    assert [points[i] for i in on] == sorted({points[i] for i in on})
    for i, (cost, score) in enumerate(points):
        beaten = any(c <= cost and s >= score and (c, s) != (cost, score) for c, s in points)
        assert beaten or points[i] in [points[j] for j in on]
        assert not (beaten and i in on)
    assert pareto_front([]) == []


def test_each_panel_has_its_own_front() -> None:
    points = [Point("a", 28.0, 0, 0.03), Point("b", 30.0, 5e3, 0.02), Point("c", 29.0, 2e3, 0.05)]
    left, right = pareto_figure(points, dict.fromkeys("abc", ""), "PSNR").axes
    assert front(left).tolist() == [[0, 28], [2, 29], [5, 30], [5, 30]]
    assert front(right).tolist() == [[20, 30], [50, 30]]


@pytest.mark.parametrize("seed", range(4))
def test_names_cover_neither_each_other_nor_a_marker(seed: int) -> None:
    rng = np.random.default_rng(seed)
    labels = {f"m{i}": ["GFNet", "Shared basis, signed gain", "DiffFNO, matched parameters"][i % 3] for i in range(16)}
    labels["chasm"] = "CHASM"
    scores = 29 + 0.3 * rng.normal(size=17)
    points = [
        Point(arm, score, float(10 ** rng.uniform(4, 4.6)), float(0.03 + 0.002 * rng.normal()))
        for arm, score in zip(labels, scores, strict=True)
    ]
    figure = pareto_figure(points, labels, "PSNR")
    figure.canvas.draw()
    for ax in figure.axes:
        texts = names(ax)
        assert len(texts) == 17
        boxes = [text.get_window_extent() for text in texts]
        at = [ax.transData.transform(line.get_xydata()[0]) for line in ax.get_lines() if line.get_marker() != "None"]
        inside = ax.get_window_extent()
        for i, box in enumerate(boxes):
            assert not any(box.overlaps(other) for other in boxes[i + 1 :])
            assert not any(box.contains(*place) for place in at)
            assert inside.contains(box.x0, box.y0)
            assert inside.contains(box.x1, box.y1)


def test_a_method_that_did_not_train_leaves_room_for_the_others() -> None:
    labels = {name: name for name in "abcdef"}
    points = [Point(name, 29.5 + 0.1 * i, 1e4, 0.03) for i, name in enumerate("abcde")]
    figure = pareto_figure([*points, Point("f", 20.9, 1e4, 0.03)], labels, "PSNR")
    for ax in figure.axes:
        assert ax.get_ylim()[0] > 28
        assert marker(ax, "f 20.9").get_marker() == "v"
        assert marker(ax, "f 20.9").get_ydata()[0] > 28
    alone = pareto_figure(points, labels, "PSNR").axes[0]
    assert all(line.get_marker() != "v" for line in alone.get_lines())


def test_what_is_not_known_is_left_out() -> None:
    labels = {"a": "a", "b": "b", "c": "c"}
    points = [Point("a", 20.0, None, 0.02), Point("b", 21.0, 1e3, None), Point("c", float("nan"), 1e3, 0.1)]
    left, right = pareto_figure(points, labels, "PSNR").axes
    assert [t.get_text() for t in names(left)] == ["b"]
    assert [t.get_text() for t in names(right)] == ["a"]
