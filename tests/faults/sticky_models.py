"""A GPU made of nothing that fails as a real one does, and models on it, importable by workers."""

from __future__ import annotations

import sys
import types
from typing import Any

from service_streamer import ManagedModel
from service_streamer.testing import Gate


class AcceleratorError(RuntimeError):
    """As torch's."""


TEXT = (
    "CUDA error: {}\nSearch for `cudaErrorAssert' in https://docs.nvidia.com/cuda/ for more "
    "information.\nCUDA kernel errors might be asynchronously reported at some other API call, so "
    "the stacktrace below might be incorrect.\n"
)
ASSERT = TEXT.format("device-side assert triggered")


class Gpu:
    """What torch's functions do in this process."""

    def __init__(self) -> None:
        self.is_initialized = True  # this process has a context
        self.error: Exception | None = None  # what every call raises
        self.probes = 0  # how often it was synchronized with

    def call(self) -> None:
        assert self.is_initialized, "it was touched"
        if self.error is not None:
            raise type(self.error)(*self.error.args)

    def module(self) -> Any:
        """A torch of which this process sees just what the real one would do."""

        def zeros(_: int, device: str) -> Any:
            assert device == "cuda:0"
            self.call()
            return types.SimpleNamespace(add_=lambda _: self.call())

        def synchronize(_: int | None = None) -> None:
            self.probes += 1
            self.call()

        torch: Any = types.ModuleType("torch")
        torch.AcceleratorError = AcceleratorError
        torch.OutOfMemoryError = type("OutOfMemoryError", (RuntimeError,), {})
        torch.Tensor = type("Tensor", (), {})
        torch.nn = types.SimpleNamespace(Parameter=type("Parameter", (), {}))
        torch.zeros = zeros
        torch.set_num_threads = lambda _: None
        torch._C = types.SimpleNamespace()
        torch.cuda = types.SimpleNamespace(
            is_initialized=lambda: self.is_initialized,
            current_device=lambda: 0,
            synchronize=synchronize,
            empty_cache=self.call,
        )
        return torch


def make_error(how: str) -> Exception:
    match how:
        case "assert":
            return AcceleratorError(ASSERT)
        case "without a name":
            return RuntimeError("CUDNN_STATUS_EXECUTION_FAILED")
    return ValueError("no word about it")  # "silent"


class OnGpu(ManagedModel):
    """Doubles, on a GPU; an item ``("fail", how)`` ends all use of it, as an index too large does.

    An item ``("wrapped", secret)`` does so, too, and raises an error that quotes it.
    """

    def init_model(self, gate: Gate | None = None) -> None:
        self.gpu = Gpu()
        sys.modules["torch"] = self.gpu.module()
        if gate is not None:
            gate.go_through()

    def predict(self, batch: list[Any]) -> list[Any]:
        for item in batch:
            match item:
                case "fail", how:
                    self.gpu.error = make_error(how)
                case "wrapped", secret:
                    self.gpu.error = make_error("assert")
                    try:
                        self.gpu.call()
                    except AcceleratorError as error:
                        raise ValueError(f"could not compute {secret}") from error
        try:
            self.gpu.call()
        except ValueError as error:
            raise ValueError("as any other") from error
        return [2 * item for item in batch]


class Spoiled(ManagedModel):
    """Doubles; fails everything from the item "spoil" on, as with no descriptors left."""

    def init_model(self) -> None:
        self.is_spoiled = False

    def predict(self, batch: list[Any]) -> list[Any]:
        if self.is_spoiled:
            raise OSError("too many open files")
        self.is_spoiled = "spoil" in batch
        return [2 * item for item in batch]


def in_thread(batch: list[Any]) -> list[Any]:
    """A model in a thread, whose GPU has failed."""
    sys.modules["torch"].zeros(1, device="cuda:0")
    return batch
