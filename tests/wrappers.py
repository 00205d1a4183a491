"""One line for each vision-language model: how to build a tiny one, and batches of text with images for it."""

import torch
from families import COMMON, GROUPED, VOCABULARY
from transformers import AutoConfig, AutoModelForImageTextToText

IMAGE = VOCABULARY - 1  # the token in whose place an image's features go
TEXT = COMMON | GROUPED | dict(num_hidden_layers=2, head_dim=16, eos_token_id=2)
VISION = dict(
    hidden_size=32,
    intermediate_size=32,
    num_attention_heads=2,
    num_hidden_layers=2,
    image_size=16,
    patch_size=8,
    num_channels=3,
    initializer_range=0.3,
)
QWEN_VISION = dict(
    depth=2, hidden_size=32, intermediate_size=32, num_heads=2, patch_size=8, spatial_merge_size=2, out_hidden_size=64
)
QWEN_VISION |= dict(temporal_patch_size=1, in_channels=3)
QWEN_TOKENS = dict(image_token_id=IMAGE, video_token_id=95, vision_start_token_id=94, vision_end_token_id=93)
ROPE = dict(rope_theta=10000.0, rope_type="default", mrope_section=[2, 3, 3])
WINDOWED = dict(sliding_window=8, layer_types=["sliding_attention", "full_attention"])
OTHER_TOKENS = dict(boi_token_index=95, eoi_token_index=94)

WRAPPERS = {
    "llava": dict(
        text_config=dict(model_type="llama", **TEXT),
        vision_config=dict(model_type="clip_vision_model", **VISION),
        image_token_index=IMAGE,
    ),
    "gemma3-images": dict(  # hands its masks over as a dict
        text_config=TEXT | WINDOWED,
        vision_config=dict(model_type="siglip_vision_model", **VISION),
        mm_tokens_per_image=4,
        image_token_index=IMAGE,
        **OTHER_TOKENS,
    ),
    "qwen3_vl": dict(
        text_config=TEXT | dict(rope_parameters=ROPE),
        vision_config=QWEN_VISION | dict(deepstack_visual_indexes=[0], num_position_embeddings=16),
        **QWEN_TOKENS,
    ),
    "smolvlm": dict(
        text_config=dict(model_type="llama", **TEXT),
        vision_config=VISION,
        image_token_id=IMAGE,
        scale_factor=1,
        pad_token_id=0,
    ),
}


def build(name: str):
    """A stock model in evaluation mode, the same weights at every call."""
    with torch.random.fork_rng():
        torch.manual_seed(7)
        config = AutoConfig.for_model(name.removesuffix("-images"), **WRAPPERS[name])
        return AutoModelForImageTextToText.from_config(config).eval()


def images(name: str, rows: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """An image a row, as the model's own processor would prepare it."""

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    if name == "qwen3_vl":
        return {"pixel_values": noise(rows * 4, 3 * 8 * 8), "image_grid_thw": torch.tensor([[1, 2, 2]] * rows)}
    if name == "smolvlm":
        return {"pixel_values": noise(rows, 1, 3, 16, 16)}
    return {"pixel_values": noise(rows, 3, 16, 16)}


def batch(name: str, rows: int = 3, seed: int = 0) -> dict[str, torch.Tensor]:
    """Images with text, in which each token follows from the one before it, and labels for the text."""
    generator = torch.Generator().manual_seed(seed)
    found = images(name, rows, generator)
    ids = torch.randint(3, 90, (rows, 16), generator=generator)
    for position in range(8, 16):
        ids[:, position] = 3 + 5 * ids[:, position - 1] % 87
    end = 3 if name == "qwen3_vl" else 6  # an image is one token there, and four elsewhere
    ids[:, 2:end] = IMAGE
    if name == "qwen3_vl":
        ids[:, 1], ids[:, end] = QWEN_TOKENS["vision_start_token_id"], QWEN_TOKENS["vision_end_token_id"]
    labels = ids.clone()
    labels[:, :8] = -100
    kinds = "token_type_ids" if name == "gemma3-images" else "mm_token_type_ids"
    if name.startswith(("qwen", "gemma")):
        found[kinds] = (ids == IMAGE).long()
    return found | {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}
