"""Text generation on the CPU: by steps, by transformers' own continuous batching, and in eights.

``python -m adapters.generating '{"rounds": 1}'`` prints one row for each. 32 requests of 8 to 256
tokens each come at once; the model is a Llama of 7 M random weights. ``rate``: tokens per second.
``latency``: of a request, mean, seconds. Every text is compared with what ``generate`` gives.
"""

from __future__ import annotations

import contextlib
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from service_streamer import Streamer

REQUESTS, SHORTEST, LONGEST = 32, 8, 256
EIGHT = 8
ROOT = Path(__file__).resolve().parents[2]
TOKENIZER = ROOT / "example" / "models" / "text_generation"
PROMPT = "Once upon a midnight dreary, while I pondered, weak and weary"

#: A prompt of so many tokens, and how many are to follow.
Request = tuple[str, int]


def requests() -> list[Request]:
    rng = random.Random(0)
    words = PROMPT.split()
    return [
        (" ".join(words[: rng.randint(2, len(words))]), rng.randint(SHORTEST, LONGEST))
        for _ in range(REQUESTS)
    ]


def build(folder: Path) -> Path:
    """A Llama that says nothing sensible, and never ends a text by itself."""
    import torch
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(TOKENIZER)
    config = transformers.LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=256, intermediate_size=768, num_hidden_layers=7,
        num_attention_heads=8, num_key_value_heads=8, max_position_embeddings=512,
        tie_word_embeddings=True, bos_token_id=1, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    model: Any = transformers.LlamaForCausalLM(config)
    model.generation_config.eos_token_id = None
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def figures(took: Sequence[float], seconds: float) -> dict[str, float]:
    tokens = sum(count for _, count in requests())
    return {"rate": tokens / seconds, "latency": statistics.mean(took)}


def by_steps(folder: Path) -> dict[str, float]:
    with Streamer(
        "service_streamer.pipelines:PipelineModel",
        batch_size=REQUESTS,
        worker_timeout=None,
        cuda_devices=("cpu",),
        model_init_kwargs={"model": str(folder), "task": "text-generation"},
    ) as pool:
        pool.wait_ready()

        def ask(request: Request) -> float:
            prompt, count = request
            began, made = time.monotonic(), 0
            parameters = {"max_new_tokens": count, "do_sample": False}
            item = {"do": "generate", "inputs": prompt, "parameters": parameters}
            for output in pool.stream(item):
                made += output["tokens"]
            assert made == count, f"{made} tokens of {count}"
            return time.monotonic() - began

        with ThreadPoolExecutor(REQUESTS) as callers:
            list(callers.map(ask, [(PROMPT, 4)] * REQUESTS))  # the first ones
            began = time.monotonic()
            took = list(callers.map(ask, requests()))
            return figures(took, time.monotonic() - began)


def loaded(folder: Path, **options: Any) -> tuple[Any, Any]:
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, padding_side="left")
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, **options)
    return model.eval(), tokenizer


def by_manager(folder: Path) -> dict[str, float]:
    from transformers import ContinuousBatchingConfig, GenerationConfig

    model, tokenizer = loaded(folder, attn_implementation="sdpa")
    config: Any = GenerationConfig
    manager = model.init_continuous_batching(
        config(do_sample=False, eos_token_id=-1, max_new_tokens=LONGEST),
        # By itself it takes all memory, and many times as long.
        ContinuousBatchingConfig(page_size=32, num_blocks=320, max_batch_tokens=64),
    )
    manager.start()
    try:
        for number in range(2):  # the first ones
            manager.add_request(tokenizer(PROMPT)["input_ids"], str(number), max_new_tokens=4)
        for _ in range(2):
            assert manager.get_result(timeout=60) is not None
        began = time.monotonic()
        for number, (prompt, count) in enumerate(requests()):
            ids = tokenizer(prompt)["input_ids"]
            manager.add_request(ids, f"request {number}", max_new_tokens=count)
        took = list[float]()
        while len(took) < REQUESTS:
            assert manager.get_result(timeout=120) is not None
            took.append(time.monotonic() - began)
        return figures(took, took[-1])
    finally:
        manager.stop(block=True)


def in_eights(folder: Path) -> dict[str, float]:
    """Each batch of eight runs until its longest text is over."""
    import torch

    model, tokenizer = loaded(folder)
    tokenizer.pad_token_id = 0
    began, took = time.monotonic(), list[float]()
    with torch.no_grad():
        for at in range(0, REQUESTS, EIGHT):
            batch = requests()[at : at + EIGHT]
            inputs = tokenizer([prompt for prompt, _ in batch], return_tensors="pt", padding=True)
            inputs.pop("token_type_ids", None)
            most = max(count for _, count in batch)
            model.generate(**inputs, max_new_tokens=most, do_sample=False)
            took += [time.monotonic() - began] * EIGHT
    return figures(took, took[-1])


WAYS: dict[str, Callable[[Path], dict[str, float]]] = {
    "steps": by_steps,
    "manager": by_manager,
    "eights": in_eights,
}


def rows(ways: Sequence[str]) -> Iterator[dict[str, Any]]:
    from transformers.utils import logging

    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(sys.stderr):
        built = build(Path(folder))
        found = {way: WAYS[way](built) for way in ways}
    steps, others = found["steps"], {way: each for way, each in found.items() if way != "steps"}
    for way, each in found.items():
        yield {"point": {"way": way}, "figures": each}
    for way, each in others.items():
        yield {
            "point": {"way": f"steps / {way}"},
            "figures": {
                "times": steps["rate"] / each["rate"],
                "latency_ratio": steps["latency"] / each["latency"],
            },
        }


def main() -> None:
    options = json.loads(sys.argv[1]) if len(sys.argv) > 1 else {}
    for row in rows(options.get("ways", [*WAYS])):
        print(json.dumps(row), flush=True)
    print(json.dumps({"ended": True}), flush=True)


if __name__ == "__main__":
    main()
