"""How a pipeline's model runs: data type, attention, quantization; and the ready worker says so."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import tiny_models
from service_streamer.options.declare import SERVE, options_of
from service_streamer.options.table import GROUPS, ServeOptions
from service_streamer.pipelines import PipelineModel
from service_streamer.pipelines.precision import DTYPES, Precision, choose_precision
from service_streamer.pipelines.quantization import QUANTIZATIONS, quantization_config
from service_streamer.pipelines.weights import Loading, load_weights
from service_streamer.serve.opening import pool_options


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    transformers.utils.logging.disable_progress_bar()  # it starts a thread

    def built(name: str) -> Path:
        path = tmp_path_factory.getbasetemp() / f"precise-{name}"
        return path if path.is_dir() else tiny_models.build(name, path)

    return built


# The rule


@pytest.mark.parametrize(
    ("wanted", "saved", "model_type", "device", "has_bfloat16", "dtype", "reason"),
    [
        ("auto", ["float32"], "bert", "cpu", False, "auto", "as saved"),
        ("auto", ["bfloat16"], "bert", "cpu", False, "auto", "as saved"),
        ("auto", ["float32"], "gemma2", "cpu", False, "auto", "as saved"),
        ("auto", ["float32"], "bert", "cuda", True, "float16", "saved in float32"),
        ("auto", ["float32"], "bert", "cuda", False, "float16", "saved in float32"),
        ("auto", [], "bert", "cuda", True, "float16", "saved in float32"),
        ("auto", ["float64"], "bert", "cuda", True, "float16", "saved in float64"),
        ("auto", ["float16"], "bert", "cuda", True, "auto", "as saved"),
        ("auto", ["bfloat16"], "bert", "cuda", True, "auto", "as saved"),
        ("auto", ["bfloat16"], "bert", "cuda", False, "float16", "this GPU does not compute"),
        ("auto", ["float32", "bfloat16"], "clip", "cuda", True, "bfloat16", "was trained in"),
        ("auto", ["float32", "bfloat16"], "clip", "cuda", False, "float32", "was trained in"),
        ("auto", ["float32"], "gemma2", "cuda", True, "bfloat16", "type gemma2 exceed float16"),
        ("auto", ["float16"], "gemma3", "cuda", True, "bfloat16", "type gemma3 exceed float16"),
        ("auto", ["float16"], "glm4", "cuda", False, "float32", "this GPU does not compute"),
        ("auto", ["bfloat16"], "gemma2", "cuda", True, "auto", "as saved"),
        ("auto", ["bfloat16"], "gemma2", "cuda", False, "float32", "type gemma2 exceed float16"),
        ("float32", ["float16"], "bert", "cuda", True, "float32", "as requested"),
        ("bfloat16", ["float32"], "gemma2", "cpu", False, "bfloat16", "as requested"),
        ("float16", ["float32"], "bert", "cuda", True, "float16", "as requested"),
    ],
)  # fmt: skip
def test_the_data_type(
    wanted: str,
    saved: Collection[str],
    model_type: str,
    device: str,
    has_bfloat16: bool,
    dtype: str,
    reason: str,
) -> None:
    chosen = choose_precision(
        wanted, saved=saved, model_type=model_type, device=device, has_bfloat16=has_bfloat16
    )
    assert chosen.dtype == dtype
    assert reason in chosen.reason


def test_a_model_that_exceeds_float16_is_refused_in_it() -> None:
    with pytest.raises(ValueError, match="gemma2 cannot run in float16: their numbers exceed"):
        choose_precision(
            "float16", saved=["float32"], model_type="gemma2", device="cuda", has_bfloat16=True
        )


def test_the_command_line_offers_what_there_is() -> None:
    known = {each.name: each.kind for each in options_of(GROUPS[SERVE], SERVE)}
    assert known["dtype"].among == DTYPES  # type: ignore[attr-defined]
    assert known["quantization"].among == QUANTIZATIONS  # type: ignore[attr-defined]


# As a model is loaded. There is no GPU here: what is loaded stays on the CPU.


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Any, Precision]]:
    """Loads a classifier's weights as for a GPU, which computes bfloat16 or not."""
    precisions: list[str] = []
    monkeypatch.setattr(torch, "set_float32_matmul_precision", precisions.append)

    def load(source: Path, *, has_bfloat16: bool = True, **loading: Any) -> tuple[Any, Precision]:
        monkeypatch.setattr(
            torch.cuda, "is_bf16_supported", lambda including_emulation: has_bfloat16
        )
        precisions.clear()
        config = transformers.AutoConfig.from_pretrained(source)
        model, precision = load_weights(
            str(source), "text-classification", config, Loading(device="cuda:0", **loading), None
        )
        assert precisions == ["high"] * (precision.dtype == "float32")
        return model, precision

    return load


@pytest.mark.parametrize("names_dtype", [True, False], ids=["in its config", "in its weights"])
@pytest.mark.parametrize("saved", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("most", [10**9, 20_000], ids=["one file", "several"])
def test_a_gpu_gets_the_type_that_the_checkpoint_needs(
    folder: Callable[[str], Path],
    tmp_path: Path,
    on_gpu: Callable[..., tuple[Any, Precision]],
    names_dtype: bool,
    saved: str,
    most: int,
) -> None:
    own = tmp_path / "own"
    source = folder("classifier")
    model = transformers.AutoModelForSequenceClassification.from_pretrained(source)
    model.to(getattr(torch, saved)).save_pretrained(own, max_shard_size=most)
    assert (own / "model.safetensors").exists() == (most > 20_000)
    if not names_dtype:
        config = json.loads((own / "config.json").read_text())
        del config["dtype"]
        (own / "config.json").write_text(json.dumps(config))
    loaded, precision = on_gpu(own)
    wanted = "float16" if saved == "float32" else saved
    assert precision.dtype == wanted
    assert {each.dtype for each in loaded.parameters()} == {getattr(torch, wanted)}
    _, precision = on_gpu(own, has_bfloat16=False)
    assert precision.dtype == "float16"


def test_float32_stays_with_tf32(
    folder: Callable[[str], Path], on_gpu: Callable[..., tuple[Any, Precision]]
) -> None:
    loaded, precision = on_gpu(folder("classifier"), dtype="float32")
    assert loaded.dtype == torch.float32
    assert precision == ("float32", "as requested; matrix products use TF32")


@pytest.mark.parametrize("name", [name for name in tiny_models.MODELS if name != "entailment"])
def test_every_task_gives_answers_in_float16(folder: Callable[[str], Path], name: str) -> None:
    """As it does on a GPU: nothing in a pipeline may need float32."""
    model = PipelineModel()
    model.init_model(folder(name), dtype="float16")
    assert (model.description["dtype"], model.description["dtype_reason"]) == (
        "float16", "as requested",
    )  # fmt: skip
    json.dumps(model.predict([model.description["example"]] * 2))


# Attention


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_attention_is_that_which_was_chosen(folder: Callable[[str], Path], attention: str) -> None:
    model = PipelineModel()
    model.init_model(folder("classifier"), attention=attention)
    assert model.description["attention"] == attention
    assert model.model.model.config._attn_implementation == attention


def test_attention_that_cannot_be_had(
    folder: Callable[[str], Path],
    on_gpu: Callable[..., tuple[Any, Precision]],
    monkeypatch: pytest.MonkeyPatch,
    wording: Callable[..., None],
) -> None:
    hide = {r"'[^']*precise-\w+'": "'MODEL'"}
    flash = {"attention": "flash_attention_2"}
    with pytest.raises(ValueError, match="'flash_attention_2' needs a GPU; use 'sdpa' or leave"):
        PipelineModel().init_model(folder("classifier"), **flash)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"needs float16 or bfloat16, and the model .* float32"):
        on_gpu(folder("classifier"), dtype="float32", **flash)
    with pytest.raises(ImportError, match="needs flash-attn: pip install flash-attn, or use"):
        on_gpu(folder("classifier"), **flash)
    monkeypatch.setattr(transformers.BertForSequenceClassification, "_supports_sdpa", False)
    with pytest.raises(ValueError, match="does not support attention 'sdpa'; leave") as refused:
        on_gpu(folder("classifier"), attention="sdpa")
    wording(refused.value, hide=hide)


# The bound on the tokens of a forward pass


@pytest.mark.parametrize(
    ("name", "do", "parameters"),
    [
        ("", "predict", {}),
        ("classifier", "predict", {}),
        ("tagger", "predict", {}),
        ("features", "predict", {}),
        ("features", "embed", {}),
        ("entailment", "predict", {"candidate_labels": ["a", "b", "c", "d", "e", "f"]}),
    ],
)
def test_a_batch_is_computed_in_parts_within_the_bound(
    folder: Callable[[str], Path], name: str, do: str, parameters: dict[str, Any]
) -> None:
    mask = " [MASK]" if not name else ""
    texts = [f"{'good ' * count}{mask}" for count in (1, 9, 2, 8, 1, 3, 20)]
    items = [{"do": do, "inputs": text, "parameters": parameters} for text in texts]
    task = "zero-shot-classification" if name == "entailment" else None
    source = folder(name) if name else None
    free, bound = PipelineModel(), PipelineModel()
    free.init_model(source, task)
    bound.init_model(source, task, max_batch_tokens=24)
    shapes: list[torch.Size] = []
    bound.model.model.base_model.register_forward_pre_hook(
        lambda _, args, kwargs: shapes.append((args or [kwargs["input_ids"]])[0].shape),
        with_kwargs=True,
    )
    results = bound.predict(items)
    assert same(results, free.predict(items))
    assert len(shapes) > 1
    assert max(rows for rows, tokens in shapes if rows * tokens <= 24) > 1, "texts share a pass"
    assert all(rows * tokens <= 24 or rows == 1 for rows, tokens in shapes)


def same(left: Any, right: Any) -> bool:
    """Whether results are equal, but for the last digits of numbers."""
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[name], right[name]) for name in left)
    if isinstance(left, list):
        return len(left) == len(right) and all(map(same, left, right))
    return bool(left == (pytest.approx(right, 1e-3, 1e-4) if isinstance(right, float) else right))


@pytest.mark.parametrize("name", ["gpt2", "pictures", "sounds"])
def test_a_bound_on_tokens_without_effect_is_refused(
    folder: Callable[[str], Path], name: str
) -> None:
    with pytest.raises(ValueError, match=r"max_batch_tokens has no effect on .* than generation"):
        PipelineModel().init_model(folder(name), max_batch_tokens=8)


@pytest.mark.parametrize(
    ("options", "cost"),
    [({}, None), ({"max_batch_tokens": 512}, 2048), ({"max_batch_cost": 99.0}, 99),
     ({"max_batch_tokens": 512, "max_batch_cost": 99.0}, 99)],
)  # fmt: skip
def test_the_scheduler_gets_the_bound_in_bytes(options: dict[str, Any], cost: float) -> None:
    _, pool = pool_options(ServeOptions(**options))
    assert pool.max_batch_cost == cost
    assert (pool.model_init_kwargs or {})["max_batch_tokens"] == options.get("max_batch_tokens")


# Compilation


@pytest.mark.short_cases("pictures-predict-3")
@pytest.mark.parametrize(
    ("name", "do", "shapes"),
    [("", "predict", 9), ("classifier", "predict", 6), ("tagger", "predict", 6),
     ("features", "embed", 6), ("pictures", "predict", 3)],
)  # fmt: skip
def test_a_compiled_model_is_compiled_for_its_shapes_only(
    folder: Callable[[str], Path],
    name: str,
    do: str,
    shapes: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compiled: list[list[int]] = []

    def backend(graph: Any, inputs: list[Any]) -> Any:  # compiles to what the model is
        compiled.append([len(each) for each in inputs])
        return graph

    real = torch.compile
    monkeypatch.setattr(
        torch, "compile", lambda *args, **more: real(*args, backend=backend, **more)
    )
    torch._dynamo.reset()
    source = folder(name) if name else None
    free, model = PipelineModel(), PipelineModel()
    free.init_model(source)
    model.init_model(source, compile=True, batch_size=4)
    assert model.description["compiled"]
    assert len(list(model.buckets.shapes())) == shapes
    assert len(compiled) >= shapes
    before = len(compiled)
    example = model.description["example"]
    for rows in range(1, 5):
        inputs = [example] * rows
        if name != "pictures":
            inputs = [f"{'good ' * (7 * at % 20)}{'[MASK]' * (not name)}." for at in range(rows)]
        items = [{"do": do, "inputs": each, "parameters": {}} for each in inputs]
        assert same(model.predict(items), free.predict(items))
    assert len(compiled) == before, "every batch fits a shape that was compiled before"
    torch._dynamo.reset()


@pytest.mark.parametrize("name", ["gpt2", "detector", "speech"])
def test_models_that_cannot_be_compiled_are_refused(
    folder: Callable[[str], Path], name: str
) -> None:
    with pytest.raises(
        ValueError, match=r"models of \S+ cannot be compiled here; leave compile out"
    ):
        PipelineModel().init_model(folder(name), compile=True)


# Quantization


def test_quantization_that_cannot_be_had(
    folder: Callable[[str], Path],
    on_gpu: Callable[..., tuple[Any, Precision]],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    wording: Callable[..., None],
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _module: None)
    with pytest.raises(ImportError, match="needs optimum-quanto and accelerate: pip install opt"):
        quantization_config("quanto-int8", "cpu")
    with pytest.raises(ValueError, match=r"needs a GPU; on a CPU there are torchao-int8") as wrong:
        quantization_config("bitsandbytes-4bit", "cpu")
    wording(wrong.value)
    with pytest.raises(ValueError, match="must be one of bitsandbytes-8bit, "):
        quantization_config("gguf", "cuda")
    monkeypatch.setattr("importlib.util.find_spec", lambda module: module)
    four = quantization_config("bitsandbytes-4bit", "cuda", "bfloat16")
    assert (four.load_in_4bit, four.bnb_4bit_compute_dtype) == (True, torch.bfloat16)
    assert quantization_config("bitsandbytes-8bit", "cuda").load_in_8bit
    assert quantization_config("quanto-int4", "cpu").weights == "int4"
    monkeypatch.undo()
    own = tmp_path / "own"
    shutil.copytree(folder("classifier"), own)
    config = json.loads((own / "config.json").read_text())
    saved = {"quant_method": "quanto", "weights": "int8"}
    (own / "config.json").write_text(json.dumps({**config, "quantization_config": saved}))
    with pytest.raises(ValueError, match="was saved quantized; leave quantization out"):
        on_gpu(own, quantization="quanto-int8")


# Several devices


def test_a_model_on_several_devices(
    folder: Callable[[str], Path],
    on_gpu: Callable[..., tuple[Any, Precision]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(
        ValueError, match="over 2 GPUs, and torch sees 0 in its worker: it is built for"
    ):
        PipelineModel().init_model(folder("classifier"), devices=2)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with monkeypatch.context() as without:
        without.setattr("importlib.util.find_spec", lambda _module: None)
        with pytest.raises(ImportError, match="a model on 2 devices needs accelerate: pip install"):
            on_gpu(folder("classifier"), devices=2)
    asked: list[dict[str, Any]] = []

    def load(_source: str, **options: Any) -> Any:
        asked.append(options)
        raise OSError("no file")

    monkeypatch.setattr("importlib.util.find_spec", lambda module: module)
    monkeypatch.setattr(transformers.AutoModelForSequenceClassification, "from_pretrained", load)
    with pytest.raises(FileNotFoundError, match="cannot be loaded: no file"):
        on_gpu(folder("classifier"), devices=2)
    assert [each["device_map"] for each in asked] == ["auto"]
