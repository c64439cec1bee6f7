"""How a pipeline's model runs: data type, attention, quantization; and the ready worker says so."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import tiny_models
from cases import long_cases
from pipeline_cases import assert_close, compiles_to_itself, folder, item, loaded, served, variant
from service_streamer.pipelines import PipelineModel
from service_streamer.pipelines.precision import choose_precision
from service_streamer.serve.cli.main import ServeOptions
from service_streamer.serve.opening import pool_options

pytestmark = pytest.mark.xdist_group("transformers")

OnGpu = Callable[..., Any]


@pytest.mark.parametrize(
    ("wanted", "saved", "model_type", "device", "has_bfloat16", "dtype", "reason"),
    [
        ("auto", ["float32"], "bert", "cpu", False, "auto", "as saved"),
        ("auto", ["float32"], "gemma2", "cpu", False, "auto", "as saved"),
        ("auto", ["float32"], "bert", "cuda", True, "float16", "saved in float32"),
        ("auto", ["float32"], "bert", "cuda", False, "float16", "saved in float32"),
        ("auto", [], "bert", "cuda", True, "float16", "saved in float32"),
        ("auto", ["float64"], "bert", "cuda", True, "float16", "saved in float64"),
        ("auto", ["float16"], "bert", "cuda", True, "auto", "as saved"),
        ("auto", ["bfloat16"], "bert", "cuda", True, "auto", "as saved"),
        ("auto", ["bfloat16"], "bert", "cuda", False, "float16", "GPU"),
        ("auto", ["float32", "bfloat16"], "clip", "cuda", True, "bfloat16", "trained"),
        ("auto", ["float32", "bfloat16"], "clip", "cuda", False, "float32", "trained"),
        ("auto", ["float32"], "gemma2", "cuda", True, "bfloat16", "gemma2"),
        ("auto", ["float16"], "glm4", "cuda", False, "float32", "GPU"),
        ("auto", ["bfloat16"], "gemma2", "cuda", True, "auto", "as saved"),
        ("auto", ["bfloat16"], "gemma2", "cuda", False, "float32", "gemma2"),
        ("float32", ["float16"], "bert", "cuda", True, "float32", "as requested"),
        ("bfloat16", ["float32"], "gemma2", "cpu", False, "bfloat16", "as requested"),
        ("float16", ["float32"], "bert", "cuda", True, "float16", "as requested"),
    ],
)  # fmt: skip
def test_data_type_is_chosen_for_the_device(
    wanted: str, saved: Collection[str], model_type: str, device: str, has_bfloat16: bool,
    dtype: str, reason: str,
) -> None:  # fmt: skip
    chosen = choose_precision(
        wanted, saved=saved, model_type=model_type, device=device, has_bfloat16=has_bfloat16
    )
    assert chosen.dtype == dtype
    assert reason in chosen.reason
    with pytest.raises(ValueError, match="gemma2"):  # which exceeds it
        choose_precision(
            "float16", saved=saved, model_type="gemma2", device="cuda", has_bfloat16=has_bfloat16
        )


# As a model is loaded. There is no GPU here: what is loaded stays on the CPU.


class Loaded(Exception):
    """Stands for the move to a GPU."""


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> OnGpu:
    """Loads a model's weights as for a GPU, which computes bfloat16 or not."""
    precisions: list[str] = []
    monkeypatch.setattr(torch, "set_float32_matmul_precision", precisions.append)

    def move(model: Any, *_: Any) -> None:
        raise Loaded(model)

    def load(source: Path, *, has_bfloat16: bool = True, **options: Any) -> Any:
        precisions.clear()
        with monkeypatch.context() as patch:
            patch.setattr(torch.cuda, "is_available", lambda: True)
            patch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: has_bfloat16)
            patch.setattr(transformers.PreTrainedModel, "to", move)
            with pytest.raises(Loaded) as caught:
                PipelineModel("0").init_model(source, **options)
        [model] = caught.value.args
        assert precisions == ["high"] * (model.dtype == torch.float32), "TF32"
        return model

    return load


@pytest.mark.parametrize("names_dtype", [True, False], ids=["in its config", "in its weights"])
@pytest.mark.parametrize("saved", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("most", [10**9, 20_000], ids=["one file", "several"])
def test_a_gpu_gets_the_type_that_the_checkpoint_needs(
    tmp_path: Path, on_gpu: OnGpu, names_dtype: bool, saved: str, most: int
) -> None:
    own = tmp_path / "own"
    model: Any = transformers.AutoModelForSequenceClassification.from_pretrained(
        folder("classifier")
    )
    model.to(getattr(torch, saved)).save_pretrained(own, max_shard_size=most)
    transformers.AutoTokenizer.from_pretrained(folder("classifier")).save_pretrained(own)
    assert (own / "model.safetensors").exists() == (most > 20_000)
    if not names_dtype:
        config = json.loads((own / "config.json").read_text())
        del config["dtype"]
        (own / "config.json").write_text(json.dumps(config))
    wanted = torch.float16 if saved == "float32" else getattr(torch, saved)
    assert {each.dtype for each in on_gpu(own).parameters()} == {wanted}
    assert on_gpu(own, has_bfloat16=False).dtype == torch.float16
    assert on_gpu(own, dtype="float32").dtype == torch.float32, "with TF32"


@pytest.mark.parametrize(
    "name", long_cases(*sorted({*tiny_models.MODELS} - {"entailment", "xlnet"}))
)
def test_every_task_gives_answers_in_float16(name: str) -> None:
    """As it does on a GPU: nothing in a pipeline may need float32."""
    model = loaded(folder(name), dtype="float16")
    assert model.description["dtype"] == "float16"
    assert model.description["dtype_reason"] == "as requested"
    json.dumps(model.predict([model.description["example"]] * 2))


def test_attention_is_that_which_was_chosen_unless_device_or_model_lacks_it(on_gpu: OnGpu) -> None:
    for name in ("eager", "sdpa"):
        assert loaded(folder("classifier"), attention=name).description["attention"] == name
    flash = {"attention": "flash_attention_2"}
    with pytest.raises(ValueError, match="GPU"):
        loaded(folder("classifier"), **flash)
    with pytest.raises(ValueError, match="float32"):
        on_gpu(folder("classifier"), dtype="float32", **flash)
    with pytest.raises(ImportError, match="flash-attn"):
        on_gpu(folder("classifier"), **flash)
    with pytest.raises(ValueError, match="'sdpa'"):
        on_gpu(folder("xlnet"), attention="sdpa")


@pytest.mark.parametrize(
    ("name", "do", "parameters"),
    [
        ("", "predict", {}), ("classifier", "predict", {}), ("tagger", "predict", {}),
        ("features", "predict", {}), ("features", "embed", {}),
        ("entailment", "predict", {"candidate_labels": ["a", "b", "c", "d", "e", "f"]}),
    ],
)  # fmt: skip
def test_a_batch_is_computed_in_parts_within_the_bound(
    name: str, do: str, parameters: dict[str, Any]
) -> None:
    mask = " [MASK]" if not name else ""
    texts = [f"{'good ' * count}{mask}" for count in (1, 9, 2, 8, 1, 3, 20)]
    items = [item(text, do, **parameters) for text in texts]
    task = "zero-shot-classification" if name == "entailment" else None
    bound = loaded(folder(name), task, max_batch_tokens=24)
    shapes: list[torch.Size] = []
    bound.model.model.base_model.register_forward_pre_hook(
        lambda _, args, kwargs: shapes.append((args or [kwargs["input_ids"]])[0].shape),
        with_kwargs=True,
    )
    assert_close(bound.predict(items), served(name, task).predict(items), 1e-4)
    assert len(shapes) > 1
    assert max(rows for rows, tokens in shapes if rows * tokens <= 24) > 1, "texts share a pass"
    assert all(rows * tokens <= 24 or rows == 1 for rows, tokens in shapes)


@pytest.mark.parametrize(
    ("options", "cost"),
    [({}, None), ({"max_batch_tokens": 512}, 2048), ({"max_batch_cost": 99.0}, 99),
     ({"max_batch_tokens": 512, "max_batch_cost": 99.0}, 99)],
)  # fmt: skip
def test_the_scheduler_gets_the_bound_in_bytes(options: dict[str, Any], cost: float) -> None:
    _, pool = pool_options(ServeOptions(**options))
    assert pool.max_batch_cost == cost
    assert (pool.model_init_kwargs or {})["max_batch_tokens"] == options.get("max_batch_tokens")


@pytest.mark.parametrize(
    ("name", "options", "shapes"),
    [
        ("pictures", {"batch_size": 3}, {(1, 0), (2, 0), (3, 0)}),
        ("features", {"batch_size": 5}, {*itertools.product((1, 2, 4, 5), (16, 32))}),
        ("features", {"batch_size": 8, "max_batch_tokens": 64},
         {(1, 16), (2, 16), (4, 16), (1, 32), (2, 32)}),
        ("features", {"batch_size": 4, "max_batch_tokens": 20}, {(1, 16), (1, 32)}),
    ],
    ids=str,
)  # fmt: skip
def test_every_batch_of_a_compiled_model_has_one_of_its_shapes(
    monkeypatch: pytest.MonkeyPatch, name: str, options: dict[str, Any], shapes: set[Any]
) -> None:
    example = served(name).description["example"]
    texts = [item("good " * (7 * at % 20) + ".", "embed") for at in range(options["batch_size"])]
    items: list[Any] = texts if name == "features" else [example] * options["batch_size"]
    wanted = served(name).predict(items)
    kind = transformers.ViTModel if name == "pictures" else transformers.BertModel
    usual, seen = kind.forward, set()

    def forward(self: Any, *args: Any, **inputs: Any) -> Any:
        [first, *_] = [*args, *inputs.values()]
        seen.add((len(first), 0) if name == "pictures" else tuple(inputs["input_ids"].shape))
        return usual(self, *args, **inputs)

    compiles_to_itself(monkeypatch)
    monkeypatch.setattr(kind, "forward", forward)
    model = loaded(folder(name), compile=True, **options)
    assert seen == shapes, "each is computed before the first batch, so that it is compiled then"
    if name == "pictures":
        assert model.description["batch_sizes"] == [1, 2, 3]
    for rows in range(1, len(items) + 1):
        assert_close(model.predict(items[:rows]), wanted[:rows], 1e-4)
    assert seen == shapes


@pytest.mark.parametrize(("name", "do"), [("pictures", "predict"), ("features", "embed")])
@pytest.mark.long
def test_a_compiled_model_is_compiled_before_its_first_batch_only(
    name: str, do: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled: list[int] = []

    def backend(graph: Any, inputs: list[Any]) -> Any:  # compiles to what the model is
        compiled.append(len(inputs))
        return graph

    real = torch.compile
    monkeypatch.setattr(
        torch, "compile", lambda *args, **more: real(*args, backend=backend, **more)
    )
    torch.compiler.reset()
    model = loaded(folder(name), compile=True, batch_size=4)
    assert model.description["compiled"]
    before = len(compiled)
    assert before >= 3
    example = model.description["example"]
    for rows in range(1, 5):
        inputs = [example] * rows
        if name != "pictures":
            inputs = [f"{'good ' * (7 * at % 20)}." for at in range(rows)]
        items = [item(each, do) for each in inputs]
        assert_close(model.predict(items), served(name).predict(items), 1e-4)
    assert len(compiled) == before, "every batch fits a shape that was compiled before"
    torch.compiler.reset()


def test_what_has_no_effect_on_a_model_is_refused() -> None:
    for name in ("gpt2", "pictures", "sounds"):
        with pytest.raises(ValueError, match="max_batch_tokens"):
            loaded(folder(name), max_batch_tokens=8)
    for name in ("gpt2", "pictures"):
        with pytest.raises(ValueError, match="max_batch_seconds"):
            loaded(folder(name), max_batch_seconds=8)
    for name in ("gpt2", "detector", "speech"):
        with pytest.raises(ValueError, match="compile"):
            loaded(folder(name), compile=True)


def test_quantization_is_refused_when_device_package_or_model_lacks_it(
    on_gpu: OnGpu, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    source = folder("classifier")
    with pytest.raises(ValueError, match="GPU"):
        loaded(source, quantization="bitsandbytes-4bit")
    with pytest.raises(ValueError, match="gguf"):
        on_gpu(source, quantization="gguf")
    saved = {"quant_method": "quanto", "weights": "int8"}
    with pytest.raises(ValueError, match="quantized"):
        on_gpu(
            variant("classifier", tmp_path, quantization_config=saved), quantization="quanto-int8"
        )
    monkeypatch.setattr("importlib.util.find_spec", lambda _module: None)
    with pytest.raises(ImportError, match="optimum-quanto"):
        loaded(source, quantization="quanto-int8")


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("bitsandbytes-4bit", {"load_in_4bit": True, "bnb_4bit_compute_dtype": torch.bfloat16}),
        ("bitsandbytes-8bit", {"load_in_8bit": True}),
        ("quanto-int4", {"weights": "int4"}),
    ],
)
def test_weights_are_quantized_as_requested(
    on_gpu: OnGpu, options_of_weights: list[dict[str, Any]], name: str, wanted: dict[str, Any]
) -> None:
    with pytest.raises(FileNotFoundError, match="no file"):
        on_gpu(folder("classifier"), quantization=name, dtype="bfloat16")
    config = options_of_weights[0]["quantization_config"]
    assert {name: getattr(config, name) for name in wanted} == wanted


@pytest.fixture
def options_of_weights(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What the weights are asked for with, where all packages are installed; there are none."""
    asked: list[dict[str, Any]] = []

    def load(_source: str, **options: Any) -> Any:
        asked.append(options)
        raise OSError("no file")

    monkeypatch.setattr("importlib.util.find_spec", lambda module: module)
    monkeypatch.setattr(transformers.AutoModelForSequenceClassification, "from_pretrained", load)
    return asked


def test_model_on_several_devices_needs_gpus_and_accelerate(
    on_gpu: OnGpu, options_of_weights: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    source = folder("classifier")
    with pytest.raises(ValueError, match="2 GPUs"):
        loaded(source, devices=2)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with monkeypatch.context() as without:
        without.setattr("importlib.util.find_spec", lambda _module: None)
        with pytest.raises(ImportError, match="accelerate"):
            on_gpu(source, devices=2)
    with pytest.raises(FileNotFoundError, match="no file"):
        on_gpu(source, devices=2)
    assert [each["device_map"] for each in options_of_weights] == ["auto"]
