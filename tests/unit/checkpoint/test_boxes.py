"""Boxes, compared with masks of NumPy."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from iris_ray.checkpoint.boxes import Box, box_of, covers, pieces, span, volume, whole, within

SHAPES = st.lists(st.integers(1, 4), min_size=0, max_size=3).map(tuple)


@st.composite
def boxes(draw: st.DrawFn, shape: tuple[int, ...]) -> Box:
    bounds = (sorted(draw(st.lists(st.integers(0, n), min_size=2, max_size=2))) for n in shape)
    return tuple((start, end) for start, end in bounds)


@st.composite
def shape_and_boxes(draw: st.DrawFn, most: int = 6) -> tuple[tuple[int, ...], list[Box]]:
    shape = draw(SHAPES)
    return shape, draw(st.lists(boxes(shape), min_size=1, max_size=most))


def mask_of(box: Box, shape: tuple[int, ...]) -> np.ndarray:
    mask = np.zeros(shape, bool)
    mask[within(box, whole(shape))] = True
    return mask


@given(shape_and_boxes())
def test_pieces_have_each_reachable_element_once(drawn: tuple[tuple[int, ...], list[Box]]) -> None:
    shape, (wanted, *sources) = drawn
    found, missing = pieces(wanted, sources)
    times = np.zeros(shape, int)
    for box in (*missing, *(box for _, box in found)):
        times += mask_of(box, shape)
    assert (times == mask_of(wanted, shape)).all()
    for number, box in found:
        assert (mask_of(box, shape) <= mask_of(sources[number], shape)).all()
    assert not any((mask_of(box, shape) & mask_of(source, shape)).any() for box in missing for source in sources)


@given(shape_and_boxes())
def test_boxes_cover_array_if_they_have_every_element(drawn: tuple[tuple[int, ...], list[Box]]) -> None:
    shape, given_boxes = drawn
    assert covers(given_boxes, shape) == np.logical_or.reduce([mask_of(box, shape) for box in given_boxes]).all()


@given(shape_and_boxes(most=2))
def test_span_has_all_elements_of_inner_box(drawn: tuple[tuple[int, ...], list[Box]]) -> None:
    shape, (inner, *_) = drawn
    if volume(inner):
        numbers = np.arange(volume(whole(shape))).reshape(shape)[within(inner, whole(shape))]
        assert span(inner, whole(shape)) == (numbers.min(), numbers.max() + 1)


def test_box_of_jax_index_has_numbers_only() -> None:
    assert box_of((slice(None), slice(2, 4)), (3, 8)) == ((0, 3), (2, 4))
    assert box_of((), ()) == ()
