"""Models of each kind, tiny and random, in folders as ``save_pretrained`` writes them.

Their answers mean nothing, but they are as sharp as a trained model's: what changes an answer that
should not have changed is seen.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import service_streamer

#: The model that is shipped with the package.
DEFAULT_MODEL = Path(service_streamer.__file__).parent / "models" / "text_infilling"

TEXT = """
the quick brown fox jumps over the lazy dog and runs into the deep dark wood where nobody sees it
once upon a time there was a king who had three daughters and a garden with a golden apple tree
it was the best of times it was the worst of times it was the age of wisdom and of foolishness
"""

CHAT = (
    "{% for message in messages %}{% if message['role'] not in ('user', 'assistant') %}"
    "{{ raise_exception('there is no role ' + message['role']) }}{% endif %}"
    "{{ message['role'] + ': ' + message['content'] + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)

SHARP: dict[str, Any] = {
    "hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "num_hidden_layers": 2,
    "initializer_range": 0.5,
}  # fmt: skip

MODELS: dict[str, Callable[[Path], None]] = {}


def build(name: str, folder: Path) -> Path:
    """Write the model of this name into a folder."""
    import torch

    with torch.random.fork_rng():
        torch.manual_seed(0)
        MODELS[name](folder)
    return folder


@cache
def _root() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="tiny-models-")


@cache
def folder(name: str) -> Path:
    """The folder of a tiny model, which nothing may change; "" is the shipped one."""
    return build(name, Path(_root().name) / name) if name else DEFAULT_MODEL


def _model(function: Callable[[Path], None]) -> Callable[[Path], None]:
    MODELS[function.__name__] = function
    return function


def _words(folder: Path) -> Any:
    """The tokenizer of the shipped model: word pieces."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(DEFAULT_MODEL, model_max_length=32)
    tokenizer.save_pretrained(folder)
    return tokenizer


def _bytes(folder: Path, **special: str) -> Any:
    """Pieces of bytes, as GPT-2 has them."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320, show_progress=False, special_tokens=list(special.values()),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    tokenizer.train_from_iterator(TEXT.splitlines(), trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)
    fast.save_pretrained(folder)
    return fast


def _save(folder: Path, config: str, model: str, **values: Any) -> None:
    """Write a model of these classes of transformers, with a config of these values."""
    import transformers

    made = getattr(transformers, f"{config}Config")(**values)
    getattr(transformers, model)(made).save_pretrained(folder)


def _bert(folder: Path, *, kind: str, labels: Sequence[str] = (), **options: Any) -> None:
    size = len(_words(folder))
    if labels:
        options["id2label"] = dict(enumerate(labels))
        options["label2id"] = {name: number for number, name in enumerate(labels)}
    _save(folder, "Bert", kind, vocab_size=size, max_position_embeddings=32, **SHARP, **options)


_SEQUENCE, _TOKEN = "BertForSequenceClassification", "BertForTokenClassification"
_ENTAILMENT = ("contradiction", "neutral", "entailment")
_TAGS = ("O", "B-PER", "I-PER", "B-LOC", "I-LOC")
MODELS |= {
    "classifier": partial(_bert, kind=_SEQUENCE, labels=("bad", "fair", "good")),
    "entailment": partial(_bert, kind=_SEQUENCE, labels=_ENTAILMENT),
    "cross_encoder": partial(_bert, kind=_SEQUENCE, num_labels=1),
    "tagger": partial(_bert, kind=_TOKEN, labels=_TAGS),
    "features": partial(_bert, kind="BertModel"),
}


@_model
def roberta(folder: Path) -> None:
    """Positions begin behind the padding's, the mask is another, the tokenizer knows no limit."""
    special = {"bos_token": "<s>", "pad_token": "<pad>", "mask_token": "<mask>"}
    _save(
        folder, "Roberta", "RobertaForMaskedLM", vocab_size=len(_bytes(folder, **special)),
        max_position_embeddings=34, pad_token_id=1, **SHARP,
    )  # fmt: skip


_GPT2: dict[str, Any] = {
    "n_positions": 48, "n_embd": 16, "n_layer": 2, "n_head": 2, "initializer_range": 0.5
}  # fmt: skip


def _gpt2(folder: Path, kind: str, **more: Any) -> None:
    size = len(_bytes(folder, eos_token="<|endoftext|>"))
    _save(folder, "GPT2", kind, vocab_size=size, bos_token_id=0, eos_token_id=0, **_GPT2, **more)


#: Without a token for padding, as it is usual.
MODELS["gpt2"] = partial(_gpt2, kind="GPT2LMHeadModel")
#: A classifier that reads its answer off the last token that is no padding.
MODELS["last_token"] = partial(_gpt2, kind="GPT2ForSequenceClassification", num_labels=3)


@_model
def bare(folder: Path) -> None:
    """Without any special token: nothing to pad with, and nothing to end with."""
    _save(
        folder, "GPT2", "GPT2LMHeadModel", vocab_size=len(_bytes(folder)), bos_token_id=None,
        eos_token_id=None, **_GPT2,
    )  # fmt: skip


@_model
def xlnet(folder: Path) -> None:
    """Padding is in front, and the answer is read off the last token."""
    from transformers import PreTrainedTokenizerFast

    backend = _bytes(folder, pad_token="<pad>").backend_tokenizer
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", padding_side="left"
    )
    tokenizer.save_pretrained(folder)
    _save(
        folder, "XLNet", "XLNetForSequenceClassification", vocab_size=len(tokenizer), d_model=16,
        n_layer=2, n_head=2, d_inner=32, num_labels=3, initializer_range=0.5, pad_token_id=0,
    )  # fmt: skip


@_model
def chat(folder: Path) -> None:
    """Positions are relative, and there is a template for chats."""
    tokenizer = _bytes(folder, eos_token="</s>", pad_token="<pad>")
    tokenizer.chat_template = CHAT
    tokenizer.save_pretrained(folder)
    _save(
        folder, "Llama", "LlamaForCausalLM", vocab_size=len(tokenizer),
        max_position_embeddings=128, bos_token_id=None, eos_token_id=0, pad_token_id=1, **SHARP,
    )  # fmt: skip


@_model
def pictures(folder: Path) -> None:
    from transformers import ViTImageProcessor

    ViTImageProcessor(size={"height": 32, "width": 32}).save_pretrained(folder)
    labels = {0: "cat", 1: "dog", 2: "house"}
    sizes = {"image_size": 32, "patch_size": 8}
    _save(folder, "ViT", "ViTForImageClassification", id2label=labels, **sizes, **SHARP)


@_model
def detector(folder: Path) -> None:
    """Its processor keeps the shape of an image."""
    from transformers import YolosImageProcessor

    YolosImageProcessor(size={"shortest_edge": 32, "longest_edge": 64}).save_pretrained(folder)
    _save(
        folder, "Yolos", "YolosForObjectDetection", image_size=[64, 64], patch_size=8,
        num_detection_tokens=4, use_mid_position_embeddings=False, **SHARP,
    )  # fmt: skip


_EARS: dict[str, Any] = {
    **SHARP, "conv_dim": (8, 8), "conv_stride": (5, 4), "conv_kernel": (10, 4),
    "num_feat_extract_layers": 2, "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 2,
    "feat_extract_norm": "group",
}  # fmt: skip


@_model
def sounds(folder: Path) -> None:
    from transformers import Wav2Vec2FeatureExtractor

    Wav2Vec2FeatureExtractor().save_pretrained(folder)
    labels = {0: "yes", 1: "no"}
    _save(folder, "Wav2Vec2", "Wav2Vec2ForSequenceClassification", id2label=labels, **_EARS)


@_model
def spectrograms(folder: Path) -> None:
    """Every sound is cut or padded to 32 frames."""
    from transformers import ASTFeatureExtractor

    ASTFeatureExtractor(max_length=32, num_mel_bins=16).save_pretrained(folder)
    _save(
        folder, "AST", "ASTForAudioClassification", hidden_size=8, num_hidden_layers=1,
        num_attention_heads=2, intermediate_size=8, max_length=32, num_mel_bins=16,
        id2label={0: "yes", 1: "no"},
    )  # fmt: skip


@_model
def speech(folder: Path) -> None:
    from transformers import Wav2Vec2CTCTokenizer, Wav2Vec2FeatureExtractor

    names = ["<pad>", "<s>", "</s>", "<unk>", "|", *"ETAOINSHRDLU"]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "vocab.json").write_text(json.dumps({name: at for at, name in enumerate(names)}))
    Wav2Vec2CTCTokenizer(str(folder / "vocab.json")).save_pretrained(folder)
    Wav2Vec2FeatureExtractor().save_pretrained(folder)
    _save(folder, "Wav2Vec2", "Wav2Vec2ForCTC", vocab_size=len(names), **_EARS)


@_model
def t5(folder: Path) -> None:
    """Distances in place of positions."""
    size = len(_bytes(folder, eos_token="</s>", pad_token="<pad>"))
    _save(
        folder, "T5", "T5ForConditionalGeneration", vocab_size=size, d_model=16, d_kv=8, d_ff=32,
        num_layers=2, num_heads=2, initializer_factor=3.0, decoder_start_token_id=1,
        eos_token_id=0, pad_token_id=1,
    )  # fmt: skip


PAIR: dict[str, Any] = {
    "d_model": 16, "encoder_layers": 1, "decoder_layers": 2, "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32, "encoder_attention_heads": 2, "decoder_attention_heads": 2,
    "init_std": 0.5,
}  # fmt: skip


@_model
def bart(folder: Path) -> None:
    """Positions are counted from the first column on, padding or not."""
    size = len(_bytes(folder, eos_token="</s>", pad_token="<pad>"))
    _save(
        folder, "Bart", "BartForConditionalGeneration", vocab_size=size,
        max_position_embeddings=48, decoder_start_token_id=0, forced_eos_token_id=None,
        bos_token_id=0, eos_token_id=0, pad_token_id=1, **PAIR,
    )  # fmt: skip


@_model
def captions(folder: Path) -> None:
    """An encoder of images, and a decoder of texts."""
    from transformers import (
        GPT2Config,
        VisionEncoderDecoderConfig,
        VisionEncoderDecoderModel,
        ViTConfig,
        ViTImageProcessor,
    )

    tokenizer = _bytes(folder, eos_token="</s>", pad_token="<pad>")
    ViTImageProcessor(size={"height": 32, "width": 32}).save_pretrained(folder)
    encoder = ViTConfig(image_size=32, patch_size=8, **SHARP)
    decoder = GPT2Config(
        vocab_size=len(tokenizer), bos_token_id=0, eos_token_id=0, pad_token_id=1,
        add_cross_attention=True, **_GPT2,
    )  # fmt: skip
    config: Any = VisionEncoderDecoderConfig.from_encoder_decoder_configs(encoder, decoder)
    config.decoder_start_token_id, config.pad_token_id, config.eos_token_id = 0, 1, 0
    model: Any = VisionEncoderDecoderModel(config=config)
    model.generation_config.decoder_start_token_id = 0
    model.save_pretrained(folder)


def _is_word(tokenizer: Any, token: int) -> bool:
    word = tokenizer.convert_ids_to_tokens(token).removeprefix("\u0120")
    return word.isascii() and (word.isalpha() or token == tokenizer.eos_token_id or "." in word)


@_model
def whisper(folder: Path) -> None:
    """Sounds of up to two seconds are one text. It knows two languages."""
    from transformers import (
        WhisperConfig,
        WhisperFeatureExtractor,
        WhisperForConditionalGeneration,
        WhisperTokenizer,
    )

    fast = _bytes(folder, eos_token="<|endoftext|>")
    special = [
        "<|startoftranscript|>", "<|en|>", "<|fr|>", "<|translate|>", "<|transcribe|>",
        "<|startoflm|>", "<|startofprev|>", "<|nospeech|>", "<|notimestamps|>",
    ]  # fmt: skip
    words = json.loads(fast.backend_tokenizer.to_str())["model"]
    tokenizer: Any = WhisperTokenizer(
        vocab=words["vocab"], merges=[tuple(each) for each in words["merges"]],
        unk_token="<|endoftext|>", bos_token="<|endoftext|>",
    )  # fmt: skip
    tokenizer.add_tokens(special, special_tokens=True)
    tokenizer.add_tokens([f"<|{at * 0.02:.2f}|>" for at in range(101)], special_tokens=False)
    tokenizer.save_pretrained(folder)
    WhisperFeatureExtractor(feature_size=8, chunk_length=2).save_pretrained(folder)
    ids = dict(zip(special, tokenizer.convert_tokens_to_ids(special), strict=True))
    end = tokenizer.eos_token_id
    config = WhisperConfig(
        vocab_size=len(tokenizer), **PAIR, num_mel_bins=8, max_source_positions=100,
        max_target_positions=48, decoder_start_token_id=ids["<|startoftranscript|>"],
        bos_token_id=end, eos_token_id=end, pad_token_id=end, suppress_tokens=None,
        begin_suppress_tokens=None,
    )  # fmt: skip
    model: Any = WhisperForConditionalGeneration(config)
    defaults = model.generation_config
    defaults._from_model_config = False  # else they are not read
    defaults.is_multilingual = True
    defaults.lang_to_id = {name: ids[name] for name in ("<|en|>", "<|fr|>")}
    defaults.task_to_id = {name: ids[f"<|{name}|>"] for name in ("translate", "transcribe")}
    defaults.no_timestamps_token_id = ids["<|notimestamps|>"]
    defaults.suppress_tokens = [at for at in range(len(tokenizer)) if not _is_word(tokenizer, at)]
    defaults.begin_suppress_tokens = [end]
    defaults.max_length = 48
    model.save_pretrained(folder)
