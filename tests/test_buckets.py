"""The shapes of a compiled model: every batch fits one, and few are compiled."""

from __future__ import annotations

import pytest

from service_streamer.pipelines.buckets import NO_BUCKETS, bucket, make_buckets


@pytest.mark.parametrize(
    ("n", "wanted"), [(1, 1), (2, 4), (4, 4), (5, 16), (16, 16), (17, 17), (99, 99)]
)
def test_the_smallest_bucket_that_holds_a_number(n: int, wanted: int) -> None:
    assert bucket(n, (1, 4, 16)) == wanted
    assert bucket(n, ()) == n


def test_the_buckets_of_a_model() -> None:
    buckets = make_buckets(48, 100)
    assert buckets.rows == (1, 2, 4, 8, 16, 32, 48)
    assert buckets.tokens == (16, 32, 64, 100)
    assert buckets.shape(33, 17) == (48, 32)
    assert buckets.shape(3, 101) == (4, 101), "a text beyond the limit is the model's to refuse"
    assert len(list(buckets.shapes())) == 28
    assert make_buckets(1, None).tokens == (16, 32, 64, 128, 256, 512)
    assert make_buckets(8, 9).tokens == (9,)


def test_images_have_one_shape() -> None:
    assert list(make_buckets(4, 0).shapes()) == [(1, 0), (2, 0), (4, 0)]
    assert make_buckets(4, 0).shape(3) == (4, 0)


def test_shapes_beyond_the_bound_on_tokens_are_not_compiled() -> None:
    shapes = list(make_buckets(8, 64, most=128).shapes())
    assert (8, 16) in shapes
    assert (8, 32) not in shapes
    assert (1, 64) in shapes
    assert (1, 256) in list(make_buckets(8, 256, most=128).shapes()), "one text always fits"


@pytest.mark.parametrize(
    ("most", "tokens", "parts"),
    [
        (None, [9, 1], [[0, 1]]),
        (None, [], [[]]),
        (20, [5, 5, 5, 5], [[0, 1, 2, 3]]),
        (20, [5, 5, 5, 6], [[0, 1, 2], [3]]),
        (20, [10, 1, 10, 1], [[1, 3], [0, 2]]),
        (20, [99, 1, 98], [[1], [2], [0]]),
        (1, [1, 1], [[0], [1]]),
    ],
)
def test_a_batch_is_divided_by_its_padded_tokens(
    most: int | None, tokens: list[int], parts: list[list[int]]
) -> None:
    assert NO_BUCKETS._replace(most=most).parts(tokens) == parts


def test_the_padding_of_a_bucket_counts() -> None:
    buckets = make_buckets(8, 64, most=128)
    assert buckets.parts([17] * 4) == [[0, 1, 2, 3]], "4 × 32"
    assert buckets.parts([17] * 5) == [[0, 1, 2, 3], [4]], "8 × 32 would be 256"
    shapes = set(buckets.shapes())
    for tokens in ([3] * 8, [3, 20, 40, 60, 60], list(range(1, 9))):
        for part in buckets.parts(tokens):
            assert buckets.shape(len(part), max(tokens[at] for at in part)) in shapes


def test_without_buckets_a_batch_keeps_its_shape() -> None:
    assert NO_BUCKETS.shape(3, 17) == (3, 17)
