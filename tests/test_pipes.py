"""Frames over real pipes, in whole and in parts."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import pytest

from service_streamer.workers.pipes import FrameReader, FrameWriter


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    os.set_blocking(writer, False)
    yield reader, writer
    os.close(reader)
    with contextlib.suppress(OSError):
        os.close(writer)


@pytest.mark.parametrize("frame", [b"", b"x", b"x" * 8, b"x" * 65_536, b"x" * 1_000_000])
def test_a_frame_arrives_whole_whatever_the_pipe_takes_at_a_time(
    pipe: tuple[int, int], frame: bytes
) -> None:
    reader, writer = FrameReader(pipe[0]), FrameWriter(pipe[1])
    assert reader.read() is None
    done = writer.write(frame)
    while (received := reader.read()) is None:
        assert not done, "neither end has anything left to do"
        done = writer.flush()
    assert received == frame
    assert writer.flush()
    assert reader.read() is None


def test_frames_keep_their_order_behind_one_that_does_not_fit(pipe: tuple[int, int]) -> None:
    reader, writer = FrameReader(pipe[0]), FrameWriter(pipe[1])
    frames = [bytes([i]) * (200_000 if i == 1 else 3) for i in range(5)]
    for frame in frames:
        writer.write(frame)
    received = []
    while len(received) < 5:
        frame = reader.read()
        if frame is None:
            writer.flush()
        else:
            received.append(frame)
    assert received == frames


def test_a_frame_that_comes_byte_by_byte(pipe: tuple[int, int]) -> None:
    reader = FrameReader(pipe[0])
    for byte in (5).to_bytes(8, "little") + b"hell":
        os.write(pipe[1], bytes([byte]))
        assert reader.read() is None
    os.write(pipe[1], b"o")
    assert reader.read() == b"hello"


@pytest.mark.parametrize("sent", [b"", b"\x05", (5).to_bytes(8, "little") + b"hel"])
def test_the_other_end_closing_is_end_of_file_in_the_midst_of_a_frame_too(
    pipe: tuple[int, int], sent: bytes
) -> None:
    os.write(pipe[1], sent) if sent else None
    os.close(pipe[1])
    with pytest.raises(EOFError):
        FrameReader(pipe[0]).read()
