"""Private parts of other packages that this one relies on: which one has changed.

If a test fails after an upgrade, adapt the module that it names, and raise the upper bound of the
version in ``setup.cfg``.
"""

from __future__ import annotations

import concurrent.futures
import configparser
import inspect
import multiprocessing.process
import re
from concurrent.futures import _base
from multiprocessing import reduction, spawn, util
from pathlib import Path
from typing import Any

import pytest

#: Packages whose internals are patched or called: a new version may break them silently.
BOUNDED = {"httptools", "ray", "redis", "transformers"}


def attributes_set_by(function: Any) -> set[str]:
    return set(re.findall(r"self\.(\w+)(?:: [^=\n]+)? = ", inspect.getsource(function)))


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


def test_transformers_pipelines() -> None:
    """pipelines/loading.py, texts.py, generation.py and model.py."""
    import transformers
    from transformers import Pipeline, PreTrainedModel
    from transformers.models.auto import modeling_auto
    from transformers.pipelines import check_task
    from transformers.pipelines.base import PipelineException
    from transformers.utils.hub import cached_file

    from service_streamer.pipelines.loading import _CLASSES_OF
    from service_streamer.pipelines.weights import OWN_TASKS

    tables = {f"MODEL_FOR_{table}_MAPPING_NAMES" for each in _CLASSES_OF.values() for table in each}
    assert {"MODEL_MAPPING_NAMES", *tables} <= vars(modeling_auto).keys()
    assert all(check_task(task)[1]["pt"] for task in _CLASSES_OF.keys() - OWN_TASKS.keys())
    assert all(hasattr(transformers, name) for name in OWN_TASKS.values())
    assert callable(Pipeline.device_placement)
    assert issubclass(PipelineException, Exception)
    assert "output_loading_info" in inspect.getsource(PreTrainedModel.from_pretrained)
    hidden = ("gated_repo", "missing_entries", "connection_errors")
    source = inspect.getsource(inspect.getmodule(cached_file) or cached_file)
    assert all(f"_raise_exceptions_for_{name}" in source for name in hidden)


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
    assert issubclass(redis.exceptions.NoScriptError, redis.RedisError)


def test_ray_connections(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """ray/leaving.py, addresses.py, losses.py and cluster.py."""
    import ray
    from ray import exceptions
    from ray._common.utils import get_ray_address_file
    from ray._private import services, worker

    from service_streamer.ray import addresses, leaving, losses

    source = inspect.getsource(worker.connect)
    assert f'name="{leaving._LISTENER}"' in source
    file = tmp_path / "ray" / "ray_current_cluster"
    file.parent.mkdir()
    file.write_text("there:1\n")
    for name in ("RAY_TMPDIR", "TMPDIR"):
        with monkeypatch.context() as patch:
            patch.delenv("RAY_TMPDIR", raising=False)
            patch.setenv(name, str(tmp_path))
            assert get_ray_address_file(None) == str(file)
            assert addresses.last_started() == ("there:1", file)
    assert isinstance(services.find_gcs_addresses(), frozenset)
    ours = {"LeftCluster"}
    assert {*losses._ENDS} - ours <= vars(exceptions).keys()
    died = inspect.signature(exceptions.RayActorError.__init__).parameters
    assert {"actor_init_failed", "preempted"} <= died.keys()
    assert issubclass(exceptions.AuthenticationError, exceptions.RayError)
    assert callable(ray.util.client.ray.is_connected)
    assert hasattr(ray.runtime_context.RuntimeContext, "gcs_address")


def test_standard_futures() -> None:
    """future.py: ``Future`` has the fields of a standard one, and notifies its waiters."""
    standard: concurrent.futures.Future[None] = concurrent.futures.Future()
    assert vars(standard).keys() == {
        "_condition", "_done_callbacks", "_exception", "_result", "_state", "_waiters",
    }  # fmt: skip
    states = {"CANCELLED", "CANCELLED_AND_NOTIFIED", "FINISHED", "PENDING", "RUNNING"}
    assert states == {*_base._FUTURE_STATES}  # type: ignore[attr-defined]
    assert callable(_base.Future._invoke_callbacks)  # type: ignore[attr-defined]
    for name in ("add_cancelled", "add_exception", "add_result"):
        assert callable(getattr(_base._Waiter, name)), name  # type: ignore[attr-defined]


def test_multiprocessing() -> None:
    """workers/starting.py, workers/memory/shared_memory.py and the engine's end."""
    process: Any = multiprocessing.process
    assert isinstance(process.current_process()._config, dict)
    assert issubclass(process.AuthenticationString, bytes)
    assert isinstance(process.ORIGINAL_DIR, str)
    assert spawn.get_executable()
    assert callable(reduction.DupFd)
    assert "exitpriority" in inspect.signature(util.Finalize.__init__).parameters


def test_generation_of_transformers() -> None:
    """pipelines/row_sampling.py, cached_rows.py, cache_joining.py, paged.py."""
    from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer
    from transformers.generation.continuous_batching import ContinuousBatchingManager
    from transformers.generation.continuous_batching import continuous_api as api
    from transformers.generation.utils import GenerationMixin

    prepare = inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters
    assert {"next_sequence_length", "is_first_iteration", "past_key_values"} <= prepare.keys()
    processors = inspect.signature(GenerationMixin._get_logits_processor).parameters
    assert {
        "generation_config",
        "input_ids_seq_length",
        "device",
        "model_kwargs",
    } <= processors.keys()
    for name in (
        "_prepare_generation_config",
        "_prepare_special_tokens",
        "_supports_logits_to_keep",
    ):
        assert callable(getattr(GenerationMixin, name))
    assert DynamicCache().layer_class_to_replicate is DynamicLayer
    kept = {"dtype", "device", "keys", "values", "is_initialized"}
    assert attributes_set_by(DynamicLayer.lazy_initialization) | {"dtype", "device"} == kept
    assert "cumulative_length" in attributes_set_by(DynamicSlidingWindowLayer.__init__)
    assert callable(ContinuousBatchingManager._create_batch_processor)
    processor = api.ContinuousBatchProcessor
    for name in ("prepare_next_batch", "_generation_step", "update_batch", "reset"):
        assert callable(getattr(processor, name))
    assert "self._sample(scores, output_ids)" in inspect.getsource(
        api.ModelRunner._forward_process_and_sample
    )
