"""One line for each encoder of the library: how to build a tiny stock model of it, and batches that it learns from."""

import torch
from families import VOCABULARY, tokens
from transformers import AutoConfig, AutoModelForImageClassification, AutoModelForMaskedLM

TEXT = dict(
    vocab_size=VOCABULARY,
    hidden_size=48,
    intermediate_size=64,
    num_attention_heads=4,  # of 12: its root is no power of two, so that the order of roundings shows
    num_hidden_layers=2,
    max_position_embeddings=64,
    pad_token_id=0,
    hidden_dropout_prob=0.0,
    attention_probs_dropout_prob=0.0,
)
IMAGES = {key: TEXT[key] for key in ("hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers")}
IMAGES |= dict(image_size=16, patch_size=4, num_channels=3, num_labels=5)
MODERN = {key: value for key, value in TEXT.items() if not key.endswith("prob")}
ENCODERS = {
    "bert": TEXT,
    "roberta": TEXT,
    "xlm-roberta": TEXT,
    "electra": TEXT | dict(embedding_size=24),
    "distilbert": dict(vocab_size=VOCABULARY, dim=48, hidden_dim=64, n_heads=4, n_layers=2, max_position_embeddings=64),
    "esm": TEXT | dict(position_embedding_type="rotary", mask_token_id=1, token_dropout=True),
    "eurobert": MODERN | dict(num_key_value_heads=2, head_dim=12),
    "modernbert": MODERN | dict(local_attention=8, global_attn_every_n_layers=2, cls_token_id=2, sep_token_id=3),
    "vit": IMAGES,
    "dinov2": IMAGES | dict(mlp_ratio=2),
}
SEES = ("vit", "dinov2")


def build(name: str, attention: str = "sdpa"):
    """A stock model in evaluation mode, the same weights at every call, wide enough that attention is not uniform."""
    config = AutoConfig.for_model(name, **ENCODERS[name])
    auto_class = AutoModelForImageClassification if name in SEES else AutoModelForMaskedLM
    with torch.random.fork_rng():
        torch.manual_seed(7)
        model = auto_class.from_config(config, attn_implementation=attention)
        for parameter in model.parameters():
            if parameter.dim() == 2:
                torch.nn.init.normal_(parameter, std=0.2)
            elif parameter.dim() == 1:
                parameter.data += 0.1 * torch.randn_like(parameter)
    return model.eval()


def inputs(name: str, seed: int = 3, rows: int = 4) -> dict[str, torch.Tensor]:
    """Random images, or random tokens of which the last rows are padded on the right."""
    generator = torch.Generator().manual_seed(seed)
    if name in SEES:
        return {"pixel_values": torch.randn(rows, 3, 16, 16, generator=generator)}
    ids, mask = tokens(rows, 14, seed) % (VOCABULARY - 4) + 4, torch.ones(rows, 14, dtype=torch.long)
    mask[rows // 2 :, 11:] = 0
    return {"input_ids": ids.masked_fill(mask == 0, 0), "attention_mask": mask}


def batches(name: str, count: int = 4) -> list[dict[str, torch.Tensor]]:
    """What a model can learn: images by the brightest quarter, or every token's label from the one before it."""
    found = []
    for index in range(count):
        batch = inputs(name, 20 + index, rows=16 if name in SEES else 6)
        if name in SEES:
            quarters = batch["pixel_values"].unflatten(-1, (2, 8)).unflatten(-3, (2, 8)).mean((1, 3, 5)).flatten(1)
            labels = quarters.argmax(-1)
        else:
            labels = batch["input_ids"].roll(1, dims=1).masked_fill(batch["attention_mask"] == 0, -100)
            labels[:, 0] = -100
        found.append(batch | {"labels": labels})
    return found
