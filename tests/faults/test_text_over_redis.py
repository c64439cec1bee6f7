"""Text that is generated over Redis: token by token that of this process."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from service_streamer import RedisStreamer, RedisWorker, Streamer
from service_streamer.pipelines import SteppedPipeline

PATH = str(Path(__file__).parent.parent.parent / "example" / "models" / "text_generation")


def item(inputs: Any, do: str = "generate", **parameters: Any) -> dict[str, Any]:
    return {"do": do, "inputs": inputs, "parameters": parameters}


ITEMS = [
    item("the quick fox", max_new_tokens=12, do_sample=False),
    item("it", max_new_tokens=20, temperature=1.5, seed=7, num_return_sequences=3),
    item("once upon", max_new_tokens=20, do_sample=False, stop=["e", "zz"]),
    item("a", "predict", max_new_tokens=9, temperature=1.2, seed=3, stop=["e "]),
]


@pytest.mark.long
def test_text_over_redis_is_that_of_one_process(
    host: Callable[..., RedisWorker], client: Callable[..., RedisStreamer]
) -> None:
    with Streamer(SteppedPipeline, 4, model_init_args=(PATH,)) as alone:
        wanted = [[*alone.stream(each, timeout=600)] for each in ITEMS]
    host(SteppedPipeline, 4, model_init_args=(PATH,))
    streamer = client()
    with ThreadPoolExecutor(len(ITEMS)) as threads:
        got = [*threads.map(lambda each: [*streamer.stream(each)], ITEMS)]
    assert got == wanted
