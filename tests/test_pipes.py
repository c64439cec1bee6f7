"""Frames over real pipes, in whole and in parts."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator

import pytest

import models
from service_streamer import Streamer
from service_streamer.workers.protocol import FrameReader, FrameWriter


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    os.set_blocking(writer, False)
    yield reader, writer
    os.close(reader)
    with contextlib.suppress(OSError):
        os.close(writer)


def available(reader: FrameReader) -> list[bytes]:
    """The frames of everything that can be read now."""
    frames: list[bytes] = []
    with contextlib.suppress(BlockingIOError):
        while True:
            frames += [bytes(frame) for frame in reader.read()]
    return frames


@pytest.mark.parametrize("size", [0, 1, 8, 65_528, 65_536, 1_000_000])
def test_a_frame_arrives_whole_whatever_the_pipe_takes_at_a_time(
    pipe: tuple[int, int], size: int
) -> None:
    reader, writer = FrameReader(pipe[0]), FrameWriter(pipe[1])
    frame = os.urandom(size)
    done = writer.write(frame)
    received: list[bytes] = []
    while not (received := received + available(reader)):
        assert not done, "neither end has anything left to do"
        done = writer.flush()
    assert received == [frame]
    assert writer.flush()
    assert available(reader) == []


def test_frames_keep_their_order_behind_one_that_does_not_fit(pipe: tuple[int, int]) -> None:
    reader, writer = FrameReader(pipe[0]), FrameWriter(pipe[1])
    frames = [bytes([i]) * (200_000 if i == 1 else 3) for i in range(5)]
    for frame in frames:
        writer.write(frame)
    received: list[bytes] = []
    while len(received) < 5:
        received += available(reader)
        writer.flush()
    assert received == frames


def test_what_a_finalizer_writes_during_a_flush_comes_after_it(
    pipe: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    reader, writer = FrameReader(pipe[0]), FrameWriter(pipe[1])
    frames = [b"first" * 40_000, b"second"]
    writer.write(frames[0])
    received = available(reader)
    write = os.write

    def interrupted(descriptor: int, data: bytes) -> int:
        count = write(descriptor, data)
        monkeypatch.undo()
        writer.write(frames[1])
        return count

    monkeypatch.setattr(os, "write", interrupted)
    while len(received) < 2:
        writer.flush()
        received += available(reader)
    assert received == frames


def test_a_frame_that_comes_byte_by_byte(pipe: tuple[int, int]) -> None:
    reader = FrameReader(pipe[0])
    for byte in (5).to_bytes(8, "little") + b"hell":
        os.write(pipe[1], bytes([byte]))
        assert available(reader) == []
    os.write(pipe[1], b"o")
    assert available(reader) == [b"hello"]


@pytest.mark.parametrize("sent", [b"", b"\x05", (5).to_bytes(8, "little") + b"hel"])
def test_the_other_end_closing_is_end_of_file_in_the_midst_of_a_frame_too(
    pipe: tuple[int, int], sent: bytes
) -> None:
    if sent:
        os.write(pipe[1], sent)
    os.close(pipe[1])
    with pytest.raises(EOFError):
        available(FrameReader(pipe[0]))


def test_frames_before_one_that_is_too_large_are_not_lost() -> None:
    reader, writer = os.pipe()
    os.write(writer, (1).to_bytes(8, "little") + b"a" + b"\xff" * 8)
    frames = FrameReader(reader)
    assert [bytes(frame) for frame in frames.read()] == [b"a"]
    os.write(writer, b".")
    with pytest.raises((MemoryError, OverflowError)):
        frames.read()
    os.close(reader)
    os.close(writer)


@pytest.mark.skipif(not hasattr(fcntl, "F_SETPIPE_SZ"), reason="only Linux's pipes can be widened")
def test_the_pipes_of_a_worker_hold_whole_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    with Streamer(models.echo) as streamer:
        streamer.wait_ready()
        assert wide_pipes() == 2
    control = fcntl.fcntl

    def refuse(descriptor: int, command: int, *args: int) -> int:
        if command == fcntl.F_SETPIPE_SZ:
            raise PermissionError("this user has too many")
        return control(descriptor, command, *args)

    monkeypatch.setattr(fcntl, "fcntl", refuse)
    with Streamer(models.echo) as streamer:
        assert streamer.predict([1]) == [1]
        assert wide_pipes() == 0


def wide_pipes() -> int:
    """How many pipes of this process hold four times as much as others."""
    sizes = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # it is no pipe, or gone
            sizes.append(fcntl.fcntl(int(name), fcntl.F_GETPIPE_SZ))
    return sizes.count(256 << 10)
