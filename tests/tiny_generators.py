"""Models that generate, tiny and random, without a tokenizer: one of each kind of cache."""

from __future__ import annotations

from functools import cache
from typing import Any

from tiny_models import PAIR, SHARP

VOCABULARY = 97
_ENDS: dict[str, Any] = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
_COMMON: dict[str, Any] = {"vocab_size": VOCABULARY, "initializer_range": 0.5, **_ENDS}
_GPT2 = {**_COMMON, "n_positions": 256, "n_embd": 16, "n_layer": 2, "n_head": 2}
_LLAMA = {**_COMMON, **SHARP, "num_key_value_heads": 1, "max_position_embeddings": 256}
_PAIR = {
    **PAIR, "vocab_size": VOCABULARY, "max_position_embeddings": 256, "decoder_start_token_id": 2,
    "forced_eos_token_id": None, "bos_token_id": 0, "eos_token_id": None, "pad_token_id": 1,
}  # fmt: skip

#: The names of the config and of the model, before "Config" and in full, and the config's values.
_MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "gpt2": ("GPT2", "GPT2LMHeadModel", _GPT2),
    # Every other layer sees its last few tokens only, by a mask of its own.
    "gpt_neo": (
        "GPTNeo", "GPTNeoForCausalLM",
        {
            **_COMMON, "hidden_size": 16, "num_layers": 2, "num_heads": 2, "window_size": 7,
            "attention_types": [[["global", "local"], 1]], "max_position_embeddings": 256,
        },
    ),
    "llama": ("Llama", "LlamaForCausalLM", _LLAMA),
    # A sliding window that is shorter than the texts.
    "mistral": ("Mistral", "MistralForCausalLM", {**_LLAMA, "sliding_window": 6, "head_dim": 8}),
    # Layers with and without a sliding window.
    "gemma3": (
        "Gemma3Text", "Gemma3ForCausalLM",
        {
            **_LLAMA, "sliding_window": 5, "head_dim": 8,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
    # Positions begin at two.
    "opt": (
        "OPT", "OPTForCausalLM",
        {
            "vocab_size": VOCABULARY, "hidden_size": 16, "ffn_dim": 32, "num_hidden_layers": 2,
            "num_attention_heads": 2, "max_position_embeddings": 256, "init_std": 0.5,
            "word_embed_proj_dim": 16, **_ENDS, "pad_token_id": 1,
        },
    ),
    # Distances in place of positions.
    "bloom": (
        "Bloom", "BloomForCausalLM", {**_COMMON, "hidden_size": 16, "n_layer": 2, "n_head": 2}
    ),
    # A state in place of a cache of tokens.
    "mamba": (
        "Mamba", "MambaForCausalLM",
        {**_COMMON, "hidden_size": 16, "state_size": 4, "num_hidden_layers": 2},
    ),
    "t5": (
        "T5", "T5ForConditionalGeneration",
        {
            "vocab_size": VOCABULARY, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2,
            "num_heads": 2, "initializer_factor": 3.0, "decoder_start_token_id": 0,
            "eos_token_id": None, "pad_token_id": 0,
        },
    ),
    # Positions are counted from the first column on, padding or not.
    "bart": ("Bart", "BartForConditionalGeneration", _PAIR),
    # Positions are waves, counted from the first column on.
    "marian": ("Marian", "MarianMTModel", _PAIR),
    # Positions are counted by tokens that are no padding.
    "m2m": ("M2M100", "M2M100ForConditionalGeneration", _PAIR),
    # Its encoder reads features of sounds.
    "whisper": (
        "Whisper", "WhisperForConditionalGeneration",
        {
            **_PAIR, "num_mel_bins": 8, "max_source_positions": 10, "max_target_positions": 64,
            "bos_token_id": None, "suppress_tokens": None, "begin_suppress_tokens": None,
        },
    ),
}  # fmt: skip

#: Decoders of models whose encoder reads images.
_SEEING: dict[str, tuple[str, dict[str, Any]]] = {
    # It is told the positions.
    "eyes": ("GPT2", {**_GPT2, "add_cross_attention": True}),
    # It counts positions from the first column on.
    "trocr": (
        "TrOCR",
        {
            "vocab_size": VOCABULARY, "d_model": 16, "decoder_layers": 2,
            "decoder_attention_heads": 2, "decoder_ffn_dim": 32, "max_position_embeddings": 256,
            "init_std": 0.5, "cross_attention_hidden_size": 16, **_ENDS, "pad_token_id": 1,
        },
    ),
}  # fmt: skip

MAKERS = [*_MODELS, *_SEEING]
WITH_ENCODER = ("t5", "bart", "marian", "m2m", "whisper", "eyes", "trocr")
#: Those that count positions from the padding on.
SHIFTED = ("bart", "marian", "m2m", "trocr")
#: The shape of what encoders read that read no tokens.
EXAMPLES: dict[str, tuple[int, ...]] = {
    "whisper": (8, 20), "eyes": (3, 16, 16), "trocr": (3, 16, 16),
}  # fmt: skip


def _made(name: str) -> Any:
    import transformers

    if name in _MODELS:
        kind, model, values = _MODELS[name]
        return getattr(transformers, model)(getattr(transformers, f"{kind}Config")(**values))
    kind, values = _SEEING[name]
    sizes = {**SHARP, "num_hidden_layers": 1, "image_size": 16, "patch_size": 4}
    eyes = transformers.ViTConfig(**sizes)
    config: Any = transformers.VisionEncoderDecoderConfig.from_encoder_decoder_configs(
        eyes, getattr(transformers, f"{kind}Config")(**values)
    )
    config.decoder_start_token_id, config.pad_token_id = 2, 1
    pair: Any = transformers.VisionEncoderDecoderModel(config=config)
    pair.generation_config.decoder_start_token_id = 2
    return pair


@cache
def model_of(name: str) -> Any:
    """The model of this name. Do not change it."""
    import torch

    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = _made(name).eval()
    # Biases and the like begin at 0, which would hide that they are left out.
    with torch.no_grad():
        for at, parameter in enumerate(model.parameters()):
            if not parameter.any():
                parameter += torch.linspace(-1, 1, parameter.numel()).view(parameter.shape).roll(at)
    return model
