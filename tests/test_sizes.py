"""What a request asks for, before anything of it is decoded: tables, and files of every format."""

from __future__ import annotations

import base64
import io
import json
import wave
from pathlib import Path
from typing import Any

import pytest
import transformers
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from http_in_process import (
    StubStreamer,
    asking,
    in_event_loop,
    in_still_time,
    pass_time,
    post,
    serving_as,
    settled,
)
from pipeline_cases import extensible, folder, item, loaded, refusal, served, variant
from service_streamer import PredictTimeout
from service_streamer.pipelines.sizes import (
    UNREADABLE,
    Sizes,
    image_pixels,
    length_of_inputs,
    sizes_of,
    sound_seconds,
)
from service_streamer.serve.cli.main import ServeOptions
from service_streamer.serve.http.admission import Admission, ServiceOptions
from service_streamer.serve.opening import _max_large_pixels

pytestmark = pytest.mark.xdist_group("transformers")


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
        ("PNG", "RGB", {}), ("PNG", "1", {}), ("GIF", "P", {}), ("BMP", "RGB", {}),
        ("JPEG", "RGB", {}), ("JPEG", "L", {"progressive": True}),
        ("JPEG", "RGB", {"exif": b"Exif\0\0" + b"x" * 60_000, "comment": b"y" * 60_000}),
        ("WEBP", "RGB", {}), ("WEBP", "RGBA", {}), ("WEBP", "RGB", {"lossless": True}),
        ("WEBP", "RGB", {"exif": b"Exif\0\0" + b"x" * 100}),
    ],
)  # fmt: skip
def test_the_size_of_an_image_is_that_of_its_header(
    kind: str, mode: str, options: dict[str, Any]
) -> None:
    for width, height in ((1, 1), (33, 700), (2000, 17)):
        content = file(kind, width, height, mode, **options)
        assert [image_pixels(each) for each in forms(content)] == [width * height] * 5
    odd = [b"", "", None, 3, {}, [], b"\xff\xd8", b"\xff\xd8\xff", b"GIF89a", "a" * 10, "é", b"BM"]
    assert {image_pixels(sent) for sent in odd} == {UNREADABLE}, "it counts as some"


@given(
    st.binary(max_size=60),
    st.sampled_from([b"\xff\xd8", b"\x89PNG\r\n\x1a\n", b"RIFF", b"BM", b""]),
)
def test_sizes_of_any_bytes_are_known(content: bytes, head: bytes) -> None:
    for value in forms(head + content):
        assert image_pixels(value) > 0
        assert sound_seconds(value) >= 0


def test_a_header_that_lies_gains_nothing() -> None:
    """A PNG that says first that it is small. Pillow believes the second header."""
    content = file("PNG", 1, 1, "1")[:33] + file("PNG", 3000, 3000, "1")[8:]
    assert Image.open(io.BytesIO(content)).size == (3000, 3000)
    assert image_pixels(content) == 1
    assert "its header has another size" in refusal(served("pictures"), content)


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
        assert "its header has another size" in refusal(served("pictures"), value)
    assert served("pictures").predict([form(base64.b64encode(file("PNG", 30, 30)).decode())])


@pytest.mark.parametrize(
    ("given", "most"),
    [
        ({"worker_num": 2}, 8), ({"worker_num": 2, "web_workers": 4}, 2), ({"web_workers": 64}, 1),
        ({"redis_broker": "url"}, 32),
    ],
)  # fmt: skip
def test_web_processes_share_the_bound_of_their_workers(given: dict[str, Any], most: int) -> None:
    options = ServeOptions(max_pixels=7, **{"redis_broker": None, **given})
    assert _max_large_pixels(options) == most * 7


def sound(seconds: float, rate: int = 16_000, width: int = 2, channels: int = 1) -> bytes:
    data = io.BytesIO()
    with wave.open(data, "wb") as writer:
        writer.setparams((channels, width, rate, 0, "NONE", ""))
        writer.writeframes(bytes(round(seconds * rate) * width * channels))
    return data.getvalue()


@pytest.mark.parametrize(
    ("content", "seconds"),
    [
        (sound(2), 2), (sound(0.5, rate=8000, width=1), 0.5), (sound(3, width=4, channels=2), 3),
        (extensible(sound(2, width=4), 3), 2), (extensible(sound(2, width=3)), 2),
        (sound(2)[:40] + b"\xff\xff\xff\xff" + sound(2)[44:], 2),  # as ffmpeg writes to a pipe
    ],
)  # fmt: skip
def test_the_length_of_a_sound(content: bytes, seconds: float) -> None:
    for value in forms(content):
        assert sound_seconds(value) == pytest.approx(seconds, abs=0.01)
    assert sound_seconds({"sampling_rate": 100, "raw": [0] * 250}) == 2.5
    assert sound_seconds({"sampling_rate": 0, "raw": [0]}) == 0
    assert sound_seconds({"sampling_rate": "x", "raw": 3}) == 0
    assert sound_seconds(b"\0" * 16_000) == 2, "by its bytes, since it has no header"


PICTURE = base64.b64encode(file("PNG", 3000, 2000, "1")).decode()
THUMBNAIL = base64.b64encode(file("PNG", 30, 20)).decode()


@pytest.mark.parametrize(
    ("task", "items", "sizes"),
    [
        ("custom", ["a"], None), (None, ["a"], None), (["odd"], ["a"], None),
        ("fill-mask", ["abc", "de"], Sizes(characters=5)),
        ("fill-mask", [item("abc", top_k=2), {"a": 1}], Sizes(characters=3)),
        ("text-classification", [{"text": "ab", "text_pair": "c"}], Sizes(characters=3)),
        ("zero-shot-classification", [item("abc", candidate_labels="x,y")], Sizes(characters=6)),
        ("zero-shot-classification", [item("ab", candidate_labels=["x"])], Sizes(characters=2)),
        ("text-generation", ["abc"], Sizes(characters=3, tokens=256)),
        ("text-generation", [item("abc")], Sizes(characters=3, tokens=256)),
        (
            "text-generation",
            [item("a", "generate", max_new_tokens=50, num_return_sequences=3)] * 2,
            Sizes(characters=2, tokens=300),
        ),
        ("text-generation", [item([{"role": "user", "content": "abc"}], max_new_tokens=None)],
         Sizes(characters=7, tokens=256)),
        ("text-generation", [item([5, 6, 7], "generate", max_new_tokens=5)],
         Sizes(characters=12, tokens=5)),
        ("text-generation", [item("abc", "score"), item("de", "tokenize")],
         Sizes(characters=5)),
        ("text-classification", [item({"text": "ab", "text_pair": "c"}, "rerank")],
         Sizes(characters=3)),
        ("image-classification", [PICTURE, item(THUMBNAIL)], Sizes(6_000_600, 6_000_000)),
        ("audio-classification", [sound(2), {"sampling_rate": 1, "raw": [0]}],
         Sizes(seconds=3, longest=2)),
        ("audio-classification", [b"\0" * 16_000], Sizes(seconds=2)),  # at most
    ],
)  # fmt: skip
def test_sizes_are_the_sums_of_a_request(task: Any, items: Any, sizes: Sizes | None) -> None:
    assert sizes_of({"task": task}, items) == sizes


def test_size_of_an_answer_is_about_that_of_its_vectors() -> None:
    about = {"task": "feature-extraction", "vector_size": 10, "max_tokens": 8}
    tokens = item([1, 2, 3])
    for inputs, vectors in [
        (["a cat"], 3), (["12345678"], 4), (["é" * 4], 4), (["long" * 99], 8), ([tokens], 5),
        (["a cat", tokens], 8), ([{**item("long" * 99), "do": "embed"}], 1),
    ]:  # fmt: skip
        found = sizes_of(about, inputs)
        assert found is not None
        assert found.answer == 40 * vectors
    assert sizes_of({**about, "task": "fill-mask"}, ["a cat"]) == Sizes(characters=5)


class Pictures(StubStreamer):
    """A model of images, whose calls the test answers."""

    def __init__(self) -> None:
        super().__init__()
        self.is_held = True

    def model_description(self) -> dict[str, Any]:
        return {"operations": ["predict"], "task": "image-classification"}

    def late(self, timeout: float) -> PredictTimeout:
        return PredictTimeout(f"{timeout} s")


LIMITS = ServiceOptions(
    "m", max_pixels=6_000_600, max_large_pixels=12_000_000, max_audio_seconds=2,
    max_characters=10, max_tokens=100,
)  # fmt: skip


def refusal_by(admission: Admission, about: dict[str, Any], inputs: list[Any]) -> Any:
    try:
        admission.check(about, inputs)
    except Exception as refused:
        return refused
    raise AssertionError("it was admitted")


@pytest.mark.parametrize(
    ("task", "good", "bad", "says"),
    [
        ("fill-mask", ["x" * 10], ["x" * 6, "x" * 5], ("11 characters", "10 (--max-characters)")),
        ("text-generation", [item("a", max_new_tokens=100)], [item("a", max_new_tokens=101)],
         ("101 tokens", "100 (--max-tokens)")),
        ("image-classification", [PICTURE, THUMBNAIL], [PICTURE, THUMBNAIL, THUMBNAIL],
         ("6,001,200 pixels", "6,000,600 (--max-pixels)")),
        ("audio-classification", [sound(2)], [sound(2), sound(1)],
         ("3 seconds", "2 (--max-audio-seconds)")),
    ],
)  # fmt: skip
def test_a_request_that_costs_too_much_is_refused(
    task: str, good: Any, bad: Any, says: tuple[str, ...]
) -> None:
    admission = Admission(LIMITS)
    admission.check({"task": task}, good)
    refused = refusal_by(admission, {"task": task}, bad)
    for word in says:
        assert word in str(refused)
    assert refused.status == 413
    assert b'"code":"request_too_costly"' in refused.body


def test_a_sound_that_the_model_cannot_cut_is_refused() -> None:
    admission, about = Admission(LIMITS), {"task": "audio-classification", "max_sound_seconds": 1}
    admission.check(about, [sound(1), sound(1)])
    refused = refusal_by(admission, about, [sound(0.2), sound(1.2)])
    assert "2 seconds" in str(refused)
    assert "--max-batch-seconds" in str(refused)
    assert refused.status == 413


def test_large_images_of_all_requests_have_a_bound() -> None:
    admission = Admission(LIMITS)
    for own in ({"task": "custom"}, {}):
        assert not admission.check(own, ["x" * 1000]).large, "a model of one's own takes any size"
    about = {"task": "image-classification"}
    assert admission.check(about, [PICTURE]).large == 6_000_000
    assert not admission.check(about, [THUMBNAIL]).large, "small ones go on"


def asks_for(picture: str) -> bytes:
    return post(json.dumps({"inputs": picture}).encode(), path=b"/predict")


@in_still_time
async def test_large_images_wait_for_their_turn() -> None:
    """Two may be decoded at a time."""
    streamer = Pictures()
    async with serving_as(streamer, LIMITS) as served:
        clients = [await asking(served.site, asks_for(PICTURE)) for _ in range(6)]
        assert len(streamer.open) == 2
        small = await asking(served.site, asks_for(THUMBNAIL))
        assert len(streamer.open) == 3, "small ones go on"
        clients[2].leave()
        await settled()
        streamer.open.pop(0).reply.end([1])
        await settled()
        assert clients[0].received.startswith(b"HTTP/1.1 200")
        assert len(streamer.open) == 3
        clients[1].leave()
        await settled()
        assert len(streamer.open) == 3, "the next one in its place"
        await pass_time(LIMITS.timeout)
        assert clients[5].received.startswith(b"HTTP/1.1 504")
        assert served.service.admission.large == 12_000_000
        for call in [*streamer.open]:
            streamer.open.remove(call)
            call.reply.end([1])
        await settled()
        for each in (small, clients[3], clients[4]):
            assert each.received.startswith(b"HTTP/1.1 200")
        assert served.service.admission.large == 0


@in_still_time
async def test_large_images_whose_turn_comes_too_late_are_refused_at_once() -> None:
    streamer = Pictures()
    async with serving_as(streamer, LIMITS) as served:
        clients = [await asking(served.site, asks_for(PICTURE)) for _ in range(4)]
        for _ in range(2):
            await pass_time(10.0)
            streamer.open.pop(0).reply.end([1])
            await settled()
        assert clients[1].received.startswith(b"HTTP/1.1 200")
        clients += [await asking(served.site, asks_for(PICTURE)) for _ in range(4)]
        *waiting, last = clients[4:]
        assert not any(each.received for each in waiting), "30 s at 10 s for each"
        assert last.received.startswith(b"HTTP/1.1 503")
        assert b"retry-after: 2" in last.received


@in_event_loop
async def test_what_leaves_while_others_do_gives_back_what_it_has_taken() -> None:
    admission = Admission(LIMITS)
    turns = [admission.enter(6_000_000, 30.0) for _ in range(4)]
    turns[2].cancel()
    admission.leave(6_000_000, turns[0], is_done=True)
    admission.leave(6_000_000, turns[2], is_done=False)
    assert turns[3].done()
    assert admission.large == 12_000_000
    for turn in (turns[1], turns[3]):
        admission.leave(6_000_000, turn, is_done=True)
    assert admission.large == 0


def test_costs_of_ones_own_are_those_of_the_inputs() -> None:
    length = length_of_inputs(len)
    assert [length("ab"), length(item([1, 2, 3])), length(item(None, "describe"))] == [2, 3, 1]


#: To count the tokens of two million characters took up to 53 s.
FAR_TOO_LONG = "中" * 900_000


@pytest.mark.parametrize(
    ("name", "do", "most"),
    [("features", "embed", 4096), ("chat", "generate", 65_536), ("xlnet", "predict", 500_000)],
)
def test_tokens_of_a_text_that_cannot_fit_are_not_even_counted(
    tmp_path: Path, name: str, do: str, most: int
) -> None:
    source = folder(name)
    if name == "chat":
        source = variant("chat", tmp_path, max_position_embeddings=2048)
    model, text = loaded(source), "a " * most
    assert f"{most + 1:,} characters" in refusal(model, item(text[: most + 1], do))
    assert "characters" in refusal(model, item(FAR_TOO_LONG, do))
    if name != "xlnet":  # which has no limit of tokens
        assert "characters" not in refusal(model, item(text[:most], do))


@pytest.mark.parametrize("side", ["right", "left"])
def test_a_text_that_cannot_fit_is_cut_before_its_tokens_are_made(
    side: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual, texts = transformers.PreTrainedTokenizerBase.__call__, []

    def call(self: Any, text: str, *args: Any, **options: Any) -> Any:
        texts.append(text)
        return usual(self, text.replace("É", "eel"), *args, **options)  # or it is not called

    monkeypatch.setattr(transformers.PreTrainedTokenizerBase, "__call__", call)
    model = loaded(folder("features"))
    long = "ab" * 2048 + "c"
    for text in (long, FAR_TOO_LONG):
        texts.clear()
        model.predict([item(text, "embed", truncation=True, truncation_side=side)])
        assert texts == [text[-4096:] if side == "left" else text[:4096]]
