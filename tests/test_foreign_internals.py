"""Private parts of other packages that this one relies on: which one has changed.

If a test fails after an upgrade, adapt the module that it names, and raise the upper bound of the
version in ``setup.cfg``.
"""

from __future__ import annotations

import concurrent.futures
import configparser
import importlib
import inspect
import multiprocessing.process
import re
from functools import reduce
from pathlib import Path
from typing import Any

import pytest

#: Packages whose internals are patched or called: a new version may break them silently.
BOUNDED = {"httptools", "pytest", "ray", "redis", "transformers"}


#: What is called or replaced there, and by which module.
CALLED = {
    "httptools:HttpRequestParser": "serve/http/connection.py",
    "redis:exceptions.NoScriptError": "redis/link.py",
    "concurrent.futures:_base._Waiter.add_cancelled": "future.py",
    "concurrent.futures:_base._Waiter.add_exception": "future.py",
    "concurrent.futures:_base._Waiter.add_result": "future.py",
    "concurrent.futures:_base.Future._invoke_callbacks": "future.py",
    "multiprocessing.reduction:DupFd": "workers/memory/shared_memory.py",
    "multiprocessing.spawn:get_executable": "workers/starting.py",
    "transformers:Pipeline.device_placement": "pipelines/generation.py",
    "transformers.pipelines.base:PipelineException": "pipelines/portable_errors.py",
    **{
        f"transformers.generation.utils:{name}": "pipelines/row_sampling.py"
        for name in (
            "GenerationMixin._prepare_generation_config",
            "GenerationMixin._prepare_special_tokens",
            "GenerationMixin._supports_logits_to_keep",
        )
    },
    **{
        f"transformers.generation.continuous_batching.continuous_api:{name}": "pipelines/paged.py"
        for name in (
            "ContinuousBatchingManager._create_batch_processor",
            "ContinuousBatchProcessor.prepare_next_batch",
            "ContinuousBatchProcessor._generation_step",
            "ContinuousBatchProcessor.update_batch",
            "ContinuousBatchProcessor.reset",
        )
    },
}  # fmt: skip

#: Arguments that are given.
ARGUMENTS = {
    "multiprocessing.util:Finalize": {"exitpriority"},
    "transformers.generation.utils:GenerationMixin.prepare_inputs_for_generation": {
        "next_sequence_length", "is_first_iteration", "past_key_values",
    },
    "transformers.generation.utils:GenerationMixin._get_logits_processor": {
        "generation_config", "input_ids_seq_length", "device", "model_kwargs",
    },
}  # fmt: skip

#: What source text says that no attribute shows.
SAID = {
    "transformers:PreTrainedModel.from_pretrained": ["output_loading_info"],
    "transformers.utils:hub": [
        f"_raise_exceptions_for_{name}"
        for name in ("gated_repo", "missing_entries", "connection_errors")
    ],
    "transformers.generation.continuous_batching.continuous_api:"
    "ModelRunner._forward_process_and_sample": ["self._sample(scores, output_ids)"],
}


def found(place: str) -> Any:
    """What a "package.module:name" names."""
    module, _, names = place.partition(":")
    return reduce(getattr, names.split("."), importlib.import_module(module))


def attributes_set_by(function: Any) -> set[str]:
    return set(re.findall(r"self\.(\w+)(?:: [^=\n]+)? = ", inspect.getsource(function)))


@pytest.mark.parametrize("place", CALLED)
def test_what_is_called_is_there(place: str) -> None:
    assert callable(found(place)), f"adapt service_streamer/{CALLED[place]}"


@pytest.mark.parametrize("place", ARGUMENTS)
def test_arguments_that_are_given_are_taken(place: str) -> None:
    assert ARGUMENTS[place] <= inspect.signature(found(place)).parameters.keys()


@pytest.mark.parametrize("place", SAID)
def test_source_text_says_what_is_relied_on(place: str) -> None:
    source = inspect.getsource(found(place))
    assert [text for text in SAID[place] if text not in source] == []


def test_versions_have_upper_bounds() -> None:
    config = configparser.ConfigParser()
    config.read(Path(__file__).parent.parent / "setup.cfg")
    lines = "\n".join(config["options.extras_require"].values()).splitlines()
    bounded = {re.split(r"[<>=]", line)[0] for line in lines if "<" in line}
    assert bounded == BOUNDED


def test_httptools_parser() -> None:
    """serve/http/connection.py: a request with ``Upgrade`` ends its parser at the body."""
    import httptools

    parser = httptools.HttpRequestParser(object())
    head = b"POST / HTTP/1.1\r\nUpgrade: h2c\r\nConnection: upgrade\r\nContent-Length: 2\r\n\r\n"
    with pytest.raises(httptools.HttpParserUpgrade) as upgrade:
        parser.feed_data(head + b"hi")
    assert upgrade.value.args[0] == len(head)


def test_redis_connections() -> None:
    """redis/link.py: ``Link`` and ``Address`` use connections without a client."""
    import redis

    pool = redis.ConnectionPool.from_url("redis://localhost:1")
    connection = pool.connection_class(**pool.connection_kwargs)
    assert hasattr(connection, "socket_timeout")
    for name in ("disconnect", "read_response", "send_command"):
        assert callable(getattr(connection, name)), name
    for name in ("get_connection", "release"):
        assert callable(getattr(pool, name)), name


def test_standard_futures() -> None:
    """future.py: ``Future`` has the fields of a standard one, and notifies its waiters."""
    standard: concurrent.futures.Future[None] = concurrent.futures.Future()
    names = ("condition", "done_callbacks", "exception", "result", "state", "waiters")
    assert vars(standard).keys() == {f"_{name}" for name in names}
    states = {"CANCELLED", "CANCELLED_AND_NOTIFIED", "FINISHED", "PENDING", "RUNNING"}
    assert states == {*found("concurrent.futures:_base._FUTURE_STATES")}


def test_multiprocessing() -> None:
    """workers/starting.py, workers/memory/shared_memory.py and the engine's end."""
    process: Any = multiprocessing.process
    assert isinstance(found("multiprocessing.process:_current_process._config"), dict)
    assert issubclass(process.AuthenticationString, bytes)
    assert isinstance(process.ORIGINAL_DIR, str)


def test_caches_of_transformers() -> None:
    """pipelines/cached_rows.py and cache_joining.py."""
    from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

    assert DynamicCache().layer_class_to_replicate is DynamicLayer
    kept = {"dtype", "device", "keys", "values", "is_initialized"}
    assert attributes_set_by(DynamicLayer.lazy_initialization) | {"dtype", "device"} == kept
    assert "cumulative_length" in attributes_set_by(DynamicSlidingWindowLayer.__init__)
