"""Models that generate, tiny and random, without a tokenizer: one of each kind of cache."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

VOCABULARY = 97
_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 256,
    "initializer_range": 0.5, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip
_ENDS: dict[str, Any] = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}


def _gpt2() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"vocab_size": VOCABULARY, "n_positions": 256, "n_embd": 16, "n_layer": 2, "n_head": 2}
    return GPT2LMHeadModel(GPT2Config(**sizes, initializer_range=0.5, **_ENDS))


def _gpt_neo() -> Any:
    """Every other layer sees its last few tokens only, by a mask of its own."""
    from transformers import GPTNeoConfig, GPTNeoForCausalLM

    return GPTNeoForCausalLM(
        GPTNeoConfig(
            vocab_size=VOCABULARY, hidden_size=16, num_layers=2, num_heads=2, window_size=7,
            attention_types=[[["global", "local"], 1]], max_position_embeddings=256,
            initializer_range=0.5, **_ENDS,
        )
    )  # fmt: skip


def _llama(**more: Any) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**{**_SIZES, **more}))


def _mistral() -> Any:
    """A sliding window that is shorter than the texts."""
    from transformers import MistralConfig, MistralForCausalLM

    return MistralForCausalLM(MistralConfig(**_SIZES, sliding_window=6, head_dim=8))


def _gemma3() -> Any:
    """Layers with and without a sliding window."""
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    return Gemma3ForCausalLM(
        Gemma3TextConfig(
            **_SIZES, sliding_window=5, head_dim=8,
            layer_types=["sliding_attention", "full_attention"],
        )
    )  # fmt: skip


def _opt() -> Any:
    """Positions begin at two."""
    from transformers import OPTConfig, OPTForCausalLM

    return OPTForCausalLM(
        OPTConfig(
            vocab_size=VOCABULARY, hidden_size=16, ffn_dim=32, num_hidden_layers=2,
            num_attention_heads=2, max_position_embeddings=256, init_std=0.5,
            word_embed_proj_dim=16, bos_token_id=None, eos_token_id=None, pad_token_id=1,
        )
    )  # fmt: skip


def _bloom() -> Any:
    """Distances in place of positions."""
    from transformers import BloomConfig, BloomForCausalLM

    return BloomForCausalLM(
        BloomConfig(
            vocab_size=VOCABULARY, hidden_size=16, n_layer=2, n_head=2, initializer_range=0.5,
            **_ENDS,
        )
    )  # fmt: skip


def _mamba() -> Any:
    """A state in place of a cache of tokens."""
    from transformers import MambaConfig, MambaForCausalLM

    return MambaForCausalLM(
        MambaConfig(
            vocab_size=VOCABULARY, hidden_size=16, state_size=4, num_hidden_layers=2,
            initializer_range=0.5, **_ENDS,
        )
    )  # fmt: skip


def _t5() -> Any:
    from transformers import T5Config, T5ForConditionalGeneration

    return T5ForConditionalGeneration(
        T5Config(
            vocab_size=VOCABULARY, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2,
            initializer_factor=3.0, decoder_start_token_id=0, eos_token_id=None, pad_token_id=0,
        )
    )  # fmt: skip


def _bart() -> Any:
    """Positions are counted from the first column on, padding or not."""
    from transformers import BartConfig, BartForConditionalGeneration

    return BartForConditionalGeneration(
        BartConfig(
            vocab_size=VOCABULARY, d_model=16, encoder_layers=1, decoder_layers=2,
            encoder_ffn_dim=32, decoder_ffn_dim=32, encoder_attention_heads=2,
            decoder_attention_heads=2, max_position_embeddings=256, init_std=0.5,
            decoder_start_token_id=2, forced_eos_token_id=None, bos_token_id=0,
            eos_token_id=None, pad_token_id=1,
        )
    )  # fmt: skip


def _whisper() -> Any:
    """Its encoder reads features of sounds."""
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    return WhisperForConditionalGeneration(
        WhisperConfig(
            vocab_size=VOCABULARY, d_model=16, encoder_layers=1, decoder_layers=2,
            encoder_ffn_dim=32, decoder_ffn_dim=32, encoder_attention_heads=2,
            decoder_attention_heads=2, num_mel_bins=8, max_source_positions=10,
            max_target_positions=64, init_std=0.5, decoder_start_token_id=2,
            bos_token_id=None, eos_token_id=None, pad_token_id=1, suppress_tokens=None,
            begin_suppress_tokens=None,
        )
    )  # fmt: skip


def _marian() -> Any:
    """Positions are waves, counted from the first column on."""
    from transformers import MarianConfig, MarianMTModel

    return MarianMTModel(
        MarianConfig(
            vocab_size=VOCABULARY, d_model=16, encoder_layers=1, decoder_layers=2,
            encoder_ffn_dim=32, decoder_ffn_dim=32, encoder_attention_heads=2,
            decoder_attention_heads=2, max_position_embeddings=256, init_std=0.5,
            decoder_start_token_id=2, forced_eos_token_id=None, eos_token_id=None, pad_token_id=1,
        )
    )  # fmt: skip


def _m2m() -> Any:
    """Positions are counted by tokens that are no padding."""
    from transformers import M2M100Config, M2M100ForConditionalGeneration

    return M2M100ForConditionalGeneration(
        M2M100Config(
            vocab_size=VOCABULARY, d_model=16, encoder_layers=1, decoder_layers=2,
            encoder_ffn_dim=32, decoder_ffn_dim=32, encoder_attention_heads=2,
            decoder_attention_heads=2, max_position_embeddings=256, init_std=0.5,
            decoder_start_token_id=2, forced_eos_token_id=None, eos_token_id=None, pad_token_id=1,
        )
    )  # fmt: skip


def _with_eyes(decoder: Any) -> Any:
    """Its encoder reads images."""
    from transformers import VisionEncoderDecoderConfig, VisionEncoderDecoderModel, ViTConfig

    sizes: dict[str, Any] = {
        "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1,
        "num_attention_heads": 2, "initializer_range": 0.5, "image_size": 16, "patch_size": 4,
    }  # fmt: skip
    config: Any = VisionEncoderDecoderConfig.from_encoder_decoder_configs(
        ViTConfig(**sizes), decoder
    )
    config.decoder_start_token_id, config.pad_token_id = 2, 1
    model: Any = VisionEncoderDecoderModel(config=config)
    model.generation_config.decoder_start_token_id = 2
    return model


def _eyes() -> Any:
    """Its decoder is told the positions."""
    from transformers import GPT2Config

    return _with_eyes(
        GPT2Config(
            vocab_size=VOCABULARY, n_positions=256, n_embd=16, n_layer=2, n_head=2,
            initializer_range=0.5, add_cross_attention=True, **_ENDS,
        )
    )  # fmt: skip


def _trocr() -> Any:
    """Its decoder counts positions from the first column on."""
    from transformers import TrOCRConfig

    return _with_eyes(
        TrOCRConfig(
            vocab_size=VOCABULARY, d_model=16, decoder_layers=2, decoder_attention_heads=2,
            decoder_ffn_dim=32, max_position_embeddings=256, init_std=0.5,
            cross_attention_hidden_size=16, bos_token_id=None, eos_token_id=None, pad_token_id=1,
        )
    )  # fmt: skip


MAKERS: dict[str, Callable[..., Any]] = {
    "gpt2": _gpt2, "gpt_neo": _gpt_neo, "llama": _llama, "mistral": _mistral, "gemma3": _gemma3,
    "opt": _opt, "bloom": _bloom, "mamba": _mamba, "t5": _t5, "bart": _bart, "marian": _marian,
    "m2m": _m2m, "whisper": _whisper, "eyes": _eyes, "trocr": _trocr,
}  # fmt: skip
WITH_ENCODER = ("t5", "bart", "marian", "m2m", "whisper", "eyes", "trocr")
#: Those that count positions from the padding on.
SHIFTED = ("bart", "marian", "m2m", "trocr")
#: The shape of what encoders read that read no tokens.
EXAMPLES: dict[str, tuple[int, ...]] = {
    "whisper": (8, 20),
    "eyes": (3, 16, 16),
    "trocr": (3, 16, 16),
}


@cache
def model_of(name: str) -> Any:
    """The model of this name. Do not change it."""
    import torch

    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = MAKERS[name]().eval()
    # Biases and the like begin at 0, which would hide that they are left out.
    with torch.no_grad():
        for at, parameter in enumerate(model.parameters()):
            if not parameter.any():
                parameter += torch.linspace(-1, 1, parameter.numel()).view(parameter.shape).roll(at)
    return model
