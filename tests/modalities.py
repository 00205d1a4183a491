"""One line for each encoder-decoder, image and speech model: how to build a tiny one, and batches for its task."""

from collections.abc import Callable
from typing import Any

import torch
import transformers
from families import VOCABULARY
from transformers import AutoConfig

SEQ2SEQ = dict(
    vocab_size=VOCABULARY,
    d_model=64,
    encoder_layers=2,
    decoder_layers=2,
    encoder_attention_heads=4,
    decoder_attention_heads=4,
    encoder_ffn_dim=64,
    decoder_ffn_dim=64,
    init_std=0.3,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
    decoder_start_token_id=1,
    forced_eos_token_id=None,
    dropout=0.0,
)
TRANSLATION = SEQ2SEQ | dict(max_position_embeddings=64)
SPEECH = SEQ2SEQ | dict(num_mel_bins=80, max_source_positions=20, max_target_positions=64, begin_suppress_tokens=None)
SPEECH |= dict(suppress_tokens=None, num_labels=2)
IMAGES = dict(hidden_size=48, intermediate_size=64, num_attention_heads=4, num_hidden_layers=2)
IMAGES |= dict(image_size=16, patch_size=4, num_channels=3, num_labels=2)
TEXT = dict(vocab_size=VOCABULARY, hidden_size=48, intermediate_size=64, num_attention_heads=4, num_hidden_layers=2)
TEXT |= dict(max_position_embeddings=64, pad_token_id=0)
WAVES = dict(hidden_size=48, intermediate_size=64, num_attention_heads=4, num_hidden_layers=2, vocab_size=32)
WAVES |= dict(conv_dim=(32, 32), conv_stride=(4, 4), conv_kernel=(8, 8), num_feat_extract_layers=2, pad_token_id=0)
WAVES |= dict(num_conv_pos_embeddings=16, num_conv_pos_embedding_groups=4, mask_time_prob=0.0, layerdrop=0.0)


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def words(*shape: int, seed: int = 0, most: int = 90) -> torch.Tensor:
    return torch.randint(3, most, shape, generator=torch.Generator().manual_seed(seed))


def translation(seed: int) -> dict:
    source = words(4, 14, seed=seed)
    source[2:, 11:] = 0
    labels = source[:, :9].clone()
    return dict(input_ids=source, attention_mask=(source > 0).long(), labels=labels)


def pictures(seed: int) -> dict:
    pixels = noise(8, 3, 16, 16, seed=seed)
    return dict(pixel_values=pixels, labels=(pixels.mean((1, 2, 3)) > 0).long())


def pictures_with_text(seed: int) -> dict:
    return dict(input_ids=words(4, 10, seed=seed), pixel_values=noise(4, 3, 16, 16, seed=seed), return_loss=True)


def masked_pictures(seed: int) -> dict:
    return dict(pixel_values=noise(4, 3, 16, 16, seed=seed), noise=noise(4, 16, seed=seed))


def captions(seed: int) -> dict:
    return dict(pixel_values=noise(4, 3, 16, 16, seed=seed), labels=words(4, 8, seed=seed))


def prompted_captions(seed: int) -> dict:
    text = torch.cat([torch.full((3, 4), VOCABULARY - 1), words(3, 9, seed=seed)], 1)
    labels = text.masked_fill(text == VOCABULARY - 1, -100)
    mask = torch.ones_like(text)
    return dict(input_ids=text, attention_mask=mask, labels=labels, pixel_values=noise(3, 3, 16, 16, seed=seed))


def transcripts(seed: int) -> dict:
    return dict(input_features=noise(3, 80, 40, seed=seed), labels=words(3, 7, seed=seed))


def labelled_speech(seed: int) -> dict:
    return dict(input_features=noise(4, 80, 40, seed=seed), labels=torch.arange(4) % 2)


def waves(seed: int) -> dict:
    return dict(input_values=noise(4, 1600, seed=seed), labels=words(4, 5, seed=seed, most=31))


def long_waves(seed: int) -> dict:
    return dict(input_values=noise(3, 4000, seed=seed), labels=words(3, 7, seed=seed))


def answers(seed: int) -> dict:
    return dict(input_ids=words(4, 12, seed=seed), start_positions=torch.arange(4), end_positions=torch.arange(4) + 3)


def choices(seed: int) -> dict:
    return dict(input_ids=words(4, 3, 10, seed=seed), labels=torch.arange(4) % 3)


_GPT2 = dict(vocab_size=VOCABULARY, n_embd=64, n_head=4, n_layer=2, n_positions=64, is_decoder=True)
_QFORMER = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32)
_QFORMER |= dict(encoder_hidden_size=48)
_SIDES = dict(num_hidden_layers=2, num_attention_heads=4)
_T5 = dict(vocab_size=VOCABULARY, d_model=64, d_kv=16, d_ff=64, num_layers=2, num_heads=4, decoder_start_token_id=0)
_OPT = dict(model_type="opt", word_embed_proj_dim=64, ffn_dim=64, **TEXT | dict(hidden_size=64))
_MOONSHINE = dict(vocab_size=VOCABULARY, hidden_size=64, intermediate_size=64, decoder_start_token_id=1, pad_token_id=0)
_MOONSHINE |= {f"{side}_{name}": size for side in ("encoder", "decoder") for name, size in _SIDES.items()}
_SWIN = dict(image_size=16, patch_size=2, embed_dim=16, depths=[1, 1], num_heads=[2, 2], window_size=2)
_CLIP = dict(vision_config=IMAGES, text_config=TEXT | dict(eos_token_id=2), projection_dim=24)
_MAE = dict(decoder_num_attention_heads=2, decoder_hidden_size=32, decoder_num_hidden_layers=1)
_MAE |= IMAGES | dict(decoder_intermediate_size=32)
_BLIP = dict(vision_config=IMAGES, qformer_config=_QFORMER, text_config=_OPT, num_query_tokens=4)
_BLIP |= dict(image_token_index=VOCABULARY - 1)
# The model class, its type, its config, and what makes a batch of a seed.
MODELS: dict[str, tuple[str, str, dict[str, Any], Callable[[int], dict]]] = {
    "bart": ("BartForConditionalGeneration", "bart", TRANSLATION, translation),
    "m2m_100": ("M2M100ForConditionalGeneration", "m2m_100", TRANSLATION, translation),
    "t5": ("T5ForConditionalGeneration", "t5", _T5, translation),
    "umt5": ("UMT5ForConditionalGeneration", "umt5", _T5, translation),
    "whisper": ("WhisperForConditionalGeneration", "whisper", SPEECH, transcripts),
    "whisper-encoder": ("WhisperForAudioClassification", "whisper", SPEECH, labelled_speech),
    "moonshine": ("MoonshineForConditionalGeneration", "moonshine", _MOONSHINE, long_waves),
    "wav2vec2": ("Wav2Vec2ForCTC", "wav2vec2", WAVES, waves),
    "beit": ("BeitForImageClassification", "beit", IMAGES, pictures),
    "swin": ("SwinForImageClassification", "swin", _SWIN, pictures),
    "clip": ("CLIPModel", "clip", _CLIP, pictures_with_text),
    "vit_mae": ("ViTMAEForPreTraining", "vit_mae", _MAE, masked_pictures),
    "vision-encoder-decoder": ("VisionEncoderDecoderModel", "vision-encoder-decoder", {}, captions),
    "blip-2": ("Blip2ForConditionalGeneration", "blip-2", _BLIP, prompted_captions),
    "bert-answers": ("BertForQuestionAnswering", "bert", TEXT, answers),
    "bert-choices": ("BertForMultipleChoice", "bert", TEXT, choices),
}


def _config(name: str):
    _, model_type, fields, _ = MODELS[name]
    if model_type != "vision-encoder-decoder":
        return AutoConfig.for_model(model_type, **fields)
    sides = AutoConfig.for_model("vit", **IMAGES), AutoConfig.for_model("gpt2", **_GPT2)
    sides[1].add_cross_attention = True
    kind = transformers.VisionEncoderDecoderConfig
    return kind.from_encoder_decoder_configs(*sides, decoder_start_token_id=1, pad_token_id=0)


def build(name: str):
    """A stock model in evaluation mode, the same weights at every call, wide enough that attention is not uniform."""
    with torch.random.fork_rng():
        torch.manual_seed(7)
        model = getattr(transformers, MODELS[name][0])(_config(name)).eval()
        for path, parameter in model.named_parameters():
            if parameter.dim() == 2 and "position" not in path:  # sinusoids are not saved
                torch.nn.init.normal_(parameter, std=0.2)
    return model


def batches(name: str, count: int = 4) -> list[dict]:
    """Batches that the model's own loss takes."""
    return [MODELS[name][3](seed) for seed in range(count)]
