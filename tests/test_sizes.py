"""What a request asks for, before anything of it is decoded: tables, and files of every format."""

from __future__ import annotations

import base64
import contextlib
import io
import time
import wave
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from service_streamer import InvalidInput
from service_streamer.options.table import ServeOptions
from service_streamer.pipelines import PipelineModel
from service_streamer.pipelines.inputs import read_image
from service_streamer.pipelines.sizes import (
    UNREADABLE,
    Sizes,
    image_pixels,
    sizes_of,
    sound_seconds,
)
from service_streamer.pipelines.texts import fit_text
from service_streamer.serve.http.admission import Admission, ServiceOptions
from service_streamer.serve.http.refusals import Refusal
from service_streamer.serve.opening import _max_large_pixels


def file(kind: str, width: int, height: int, mode: str = "RGB", **options: Any) -> bytes:
    data = io.BytesIO()
    Image.new(mode, (width, height)).save(data, kind, **options)
    return data.getvalue()


def forms(content: bytes) -> list[Any]:
    """All in which a file may be sent."""
    text = base64.b64encode(content).decode()
    lines = base64.encodebytes(content).decode()
    return [content, text, lines, f"data:image/png;base64,{text}", f"data:;base64,\n{lines}"]


@pytest.mark.parametrize(
    ("kind", "mode", "options"),
    [
        ("PNG", "RGB", {}),
        ("PNG", "1", {}),
        ("GIF", "P", {}),
        ("BMP", "RGB", {}),
        ("JPEG", "RGB", {}),
        ("JPEG", "L", {"progressive": True}),
        ("JPEG", "RGB", {"exif": b"Exif\0\0" + b"x" * 60_000, "comment": b"y" * 60_000}),
        ("WEBP", "RGB", {}),
        ("WEBP", "RGBA", {}),
        ("WEBP", "RGB", {"lossless": True}),
        ("WEBP", "RGB", {"exif": b"Exif\0\0" + b"x" * 100}),
    ],
)
@pytest.mark.parametrize(("width", "height"), [(1, 1), (33, 700), (2000, 17)])
def test_the_size_of_an_image_is_that_of_its_header(
    kind: str, mode: str, options: dict[str, Any], width: int, height: int
) -> None:
    content = file(kind, width, height, mode, **options)
    assert [image_pixels(each) for each in forms(content)] == [width * height] * 5
    assert read_image(content).size == (width, height)


@pytest.mark.parametrize(
    "sent",
    [b"", "", None, 3, {}, [], b"\xff\xd8", b"\xff\xd8\xff", b"GIF89a", "a" * 10, "é", b"BM"],
)
def test_what_is_no_image_counts_as_some(sent: Any) -> None:
    assert image_pixels(sent) == UNREADABLE


@given(
    st.binary(max_size=60),
    st.sampled_from([b"\xff\xd8", b"\x89PNG\r\n\x1a\n", b"RIFF", b"BM", b""]),
)
def test_it_never_raises(content: bytes, head: bytes) -> None:
    for value in forms(head + content):
        assert image_pixels(value) > 0
        assert sound_seconds(value) >= 0


def two_headers() -> bytes:
    """A PNG that says first that it is small. Pillow believes the second header."""
    small, large = file("PNG", 1, 1, "1"), file("PNG", 3000, 3000, "1")
    return small[:33] + large[8:]


def test_a_header_that_lies_gains_nothing() -> None:
    content = two_headers()
    assert Image.open(io.BytesIO(content)).size == (3000, 3000)
    assert image_pixels(content) == 1
    with pytest.raises(InvalidInput, match="its header has another size; save it again"):
        read_image(content)


@pytest.mark.parametrize(
    "form",
    [
        lambda text: "data:image/" + "x" * 300 + ";base64," + text,
        lambda text: "\x0b" + text,
        lambda text: text[:8] + "\u3000" + text[8:],
    ],
)
def test_a_form_in_which_it_looks_smaller_gains_nothing(form: Any) -> None:
    """A worker must not count other bytes than the web process did."""
    value = form(base64.b64encode(file("PNG", 3000, 3000, "1")).decode())
    if image_pixels(value) < 9_000_000:
        with pytest.raises(InvalidInput, match="its header has another size"):
            read_image(value)
    small = form(base64.b64encode(file("PNG", 30, 30, "1")).decode())
    assert read_image(small).size == (30, 30)


@pytest.mark.parametrize(
    ("given", "most"),
    [
        ({"worker_num": 2}, 8),
        ({"worker_num": 2, "web_workers": 4}, 2),
        ({"web_workers": 64}, 1),
        ({"redis_broker": "url"}, 32),
    ],
)
def test_web_processes_share_the_bound_of_their_workers(given: dict[str, Any], most: int) -> None:
    options = ServeOptions(max_pixels=7, **{"redis_broker": None, **given})
    assert _max_large_pixels(options) == most * 7


# -- sounds


def sound(seconds: float, rate: int = 16_000, width: int = 2, channels: int = 1) -> bytes:
    data = io.BytesIO()
    with wave.open(data, "wb") as writer:
        writer.setparams((channels, width, rate, 0, "NONE", ""))
        writer.writeframes(bytes(round(seconds * rate) * width * channels))
    return data.getvalue()


@pytest.mark.parametrize(
    ("content", "seconds"),
    [
        (sound(2), 2),
        (sound(0.5, rate=8000, width=1), 0.5),
        (sound(3, width=4, channels=2), 3),
        (sound(2)[:40] + b"\xff\xff\xff\xff" + sound(2)[44:], 2),  # as ffmpeg writes to a pipe
    ],
)
def test_the_length_of_a_sound(content: bytes, seconds: float) -> None:
    for value in forms(content):
        assert sound_seconds(value) == pytest.approx(seconds, abs=0.01)


def test_other_forms_of_sounds() -> None:
    assert sound_seconds({"sampling_rate": 100, "raw": [0] * 250}) == 2.5
    assert sound_seconds({"sampling_rate": 0, "raw": [0]}) == 0
    assert sound_seconds({"sampling_rate": "x", "raw": 3}) == 0
    assert sound_seconds(b"\0" * 16_000) == 2, "by its bytes, since it has no header"


# -- requests


def request(inputs: Any, do: str = "predict", **parameters: Any) -> dict[str, Any]:
    return {"do": do, "inputs": inputs, "parameters": parameters}


PICTURE = base64.b64encode(file("PNG", 3000, 2000, "1")).decode()
THUMBNAIL = base64.b64encode(file("PNG", 30, 20)).decode()


@pytest.mark.parametrize(
    ("task", "items", "sizes"),
    [
        ("custom", ["a"], None),
        (None, ["a"], None),
        (["odd"], ["a"], None),
        ("fill-mask", ["abc", "de"], Sizes(characters=5)),
        ("fill-mask", [request("abc", top_k=2), {"a": 1}], Sizes(characters=3)),
        ("text-classification", [{"text": "ab", "text_pair": "c"}], Sizes(characters=3)),
        ("zero-shot-classification", [request("abc", candidate_labels="x,y")], Sizes(characters=6)),
        ("zero-shot-classification", [request("ab", candidate_labels=["x"])], Sizes(characters=2)),
        ("text-generation", ["abc"], Sizes(characters=3, tokens=256)),
        ("text-generation", [request("abc")], Sizes(characters=3, tokens=256)),
        (
            "text-generation",
            [request("a", "generate", max_new_tokens=50, num_return_sequences=3)] * 2,
            Sizes(characters=2, tokens=300),
        ),
        ("text-generation", [request([{"role": "user", "content": "abc"}], max_new_tokens=None)],
         Sizes(characters=7, tokens=256)),
        ("text-generation", [request([5, 6, 7], "generate", max_new_tokens=5)],
         Sizes(characters=12, tokens=5)),
        ("text-generation", [request("abc", "score"), request("de", "tokenize")],
         Sizes(characters=5)),
        ("text-classification", [request({"text": "ab", "text_pair": "c"}, "rerank")],
         Sizes(characters=3)),
        ("image-classification", [PICTURE, request(THUMBNAIL)], Sizes(6_000_600, 6_000_000)),
        ("audio-classification", [sound(2), {"sampling_rate": 1, "raw": [0]}], Sizes(seconds=3)),
    ],
)  # fmt: skip
def test_what_a_request_asks_for(task: Any, items: Any, sizes: Sizes | None) -> None:
    assert sizes_of(task, items) == sizes


LIMITS = ServiceOptions(
    "m", max_pixels=6_000_600, max_large_pixels=12_000_000, max_audio_seconds=2,
    max_characters=10, max_tokens=100,
)  # fmt: skip


@pytest.mark.parametrize(
    ("task", "good", "bad", "says"),
    [
        ("fill-mask", ["x" * 10], ["x" * 6, "x" * 5], "have 11 characters, 10 (--max-characters)"),
        (
            "text-generation",
            [request("a", max_new_tokens=100)],
            [request("a", max_new_tokens=101)],
            "may have 101 tokens, 100 (--max-tokens)",
        ),
        (
            "image-classification",
            [PICTURE, THUMBNAIL],
            [PICTURE, THUMBNAIL, THUMBNAIL],
            "have 6,001,200 pixels, 6,000,600 (--max-pixels)",
        ),
        (
            "audio-classification",
            [sound(2)],
            [sound(2), sound(1)],
            "have 3 seconds, 2 (--max-audio-seconds)",
        ),
    ],
)
def test_what_costs_too_much_is_refused(task: str, good: Any, bad: Any, says: str) -> None:
    admission = Admission(LIMITS)
    admission.check({"task": task}, good)
    with pytest.raises(Refusal) as refused:
        admission.check({"task": task}, bad)
    text = str(refused.value).replace(" in total, but the service's limit is", ",")
    assert says in text
    assert refused.value.status == 413
    assert b'"code":"request_too_costly"' in refused.value.body


def test_a_model_of_ones_own_takes_what_it_likes() -> None:
    assert Admission(LIMITS).check({"task": "custom"}, ["x" * 1000]) == 0
    assert Admission(LIMITS).check({}, ["x" * 1000]) == 0


def test_large_images_of_all_requests_have_a_bound() -> None:
    admission = Admission(LIMITS)
    about = {"task": "image-classification"}
    with admission.holding(admission.check(about, [PICTURE])):
        with admission.holding(admission.check(about, [PICTURE])):
            assert admission.large == 12_000_000
            with pytest.raises(Refusal) as refused:
                admission.check(about, [PICTURE])
            assert refused.value.status == 503
            assert b'"code":"overloaded"' in refused.value.body
            assert admission.check(about, [THUMBNAIL]) == 0, "small ones go on"
        admission.check(about, [PICTURE])
    assert admission.large == 0


# -- texts that are far too long, in a worker


@pytest.mark.parametrize(
    ("length", "limit", "kept"),
    [
        (4096, 64, 4096), (4097, 64, 4096), (16_384, 512, 16_384), (16_385, 512, 16_384),
        (500_000, None, 500_000), (500_001, None, 500_000),
    ],
)  # fmt: skip
def test_a_text_that_cannot_fit_is_not_even_counted(
    length: int, limit: int | None, kept: int
) -> None:
    """To count the tokens of two million characters took up to 53 s."""
    tokenizer: Any = SimpleNamespace(truncation_side="right")
    text = "ab" * (length // 2) + "c" * (length % 2)
    assert fit_text(text, limit, tokenizer, truncates=True) == text[:kept]
    tokenizer.truncation_side = "left"
    assert fit_text(text, limit, tokenizer, truncates=True) == text[-kept:]
    if length == kept:
        assert fit_text(text, limit, tokenizer) == text
    else:
        with pytest.raises(InvalidInput, match=f"inputs.a: the text has {length:,} characters"):
            fit_text(text, limit, tokenizer, field="inputs.a")


TOO_LONG = "中" * 900_000


@pytest.mark.parametrize(
    "item",
    [
        TOO_LONG + "[MASK]",
        request("[MASK] and " + TOO_LONG, truncation=True),
    ],
)
def test_long_texts_in_a_worker(item: Any) -> None:
    model = PipelineModel("cpu")
    model.init_model()
    began = time.process_time()
    with contextlib.suppress(InvalidInput):
        assert model.predict([item])
    assert time.process_time() - began < 5  # of the processor: it took 25
