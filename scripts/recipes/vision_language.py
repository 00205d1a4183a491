"""Fine-tune a vision-language model on questions about images, and let its language model grow half-way.

    pip install ".[trl]"
    python scripts/recipes/vision_language.py --output grown

It prints the training loss, what grew, and the loss on held-out rows. Then it loads the saved folder and answers a
held-out question. The image encoder is frozen. For other data, pass the id or folder of a dataset with a column of
images as `--dataset`, and change `to_chat`. On ordinary text LoRA is the better choice, so compare with it.
"""

import argparse

import torch
from datasets import load_dataset
from transformers import AutoModelForImageTextToText, AutoProcessor, Trainer, TrainingArguments

from hf_growattn import GrowthCallback, GrowthConfig, patch_model

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--model", default="HuggingFaceTB/SmolVLM-256M-Instruct")
parser.add_argument("--dataset", nargs="+", default=["HuggingFaceM4/ChartQA"], help="arguments of load_dataset")
parser.add_argument("--output", default="grown-vision-language", help="folder for the grown model")
parser.add_argument("--steps", type=int, default=1000)
parser.add_argument("--learning_rate", type=float, default=2e-5)
parser.add_argument("--budget", type=float, default=0.01, help="add at most this share of new weights")
arguments = parser.parse_args()


def to_chat(row: dict) -> list[dict]:
    """A row of ChartQA as a question and its answer."""
    question = [{"type": "image"}, {"type": "text", "text": row["query"]}]
    answer = [{"type": "text", "text": row["label"][0]}]
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def encode(rows: list[dict], texts: list[str]):
    """Texts and their images as tensors, padded on the left, so that all texts end in the last column."""
    images = [[row["image"].convert("RGB")] for row in rows]
    return processor(text=texts, images=images, padding=True, padding_side="left", return_tensors="pt")


def to_prompt(row: dict) -> str:
    """The text up to the answer."""
    return processor.apply_chat_template(to_chat(row)[:-1], add_generation_prompt=True)


def collate(rows: list[dict]):
    """A training batch, whose loss is that of the answers alone."""
    texts = [processor.apply_chat_template(to_chat(row)) for row in rows]
    batch = encode(rows, texts)
    batch["labels"] = torch.full_like(batch["input_ids"], -100)
    for index, (row, text) in enumerate(zip(rows, texts)):
        # An image is one token in both texts here, so the difference is the length of the answer.
        length = len(processor.tokenizer(text).input_ids) - len(processor.tokenizer(to_prompt(row)).input_ids)
        batch["labels"][index, -length:] = batch["input_ids"][index, -length:]
    return batch


processor = AutoProcessor.from_pretrained(arguments.model)
# The checkpoint is bf16, which would round small steps of the optimizer away.
model = patch_model(AutoModelForImageTextToText.from_pretrained(arguments.model, dtype=torch.float32))
model.get_encoder(modality="image").requires_grad_(False)
rows = load_dataset(*arguments.dataset, split="train")
rows = rows.train_test_split(min(200, len(rows) // 10), seed=0)
options = TrainingArguments(
    arguments.output,
    max_steps=arguments.steps,
    learning_rate=arguments.learning_rate,
    lr_scheduler_type="cosine",
    warmup_steps=0.05,
    per_device_train_batch_size=4,
    bf16=torch.cuda.is_available(),  # as autocast
    logging_steps=0.05,
    save_strategy="no",
    remove_unused_columns=False,  # the collator reads them
    report_to="none",
)
trainer = Trainer(model, options, collate, rows["train"], rows["test"], processor)
trainer.add_callback(GrowthCallback(trainer, GrowthConfig(budget=arguments.budget)))
trainer.train()
print(f"Held-out loss: {trainer.evaluate()['eval_loss']:.4f}")
trainer.save_model()  # with the processor

model = AutoModelForImageTextToText.from_pretrained(arguments.output).to(options.device)
row = rows["test"][0]
inputs = encode([row], [to_prompt(row)]).to(options.device)
answer = model.generate(**inputs, max_new_tokens=30, do_sample=False)[0, inputs["input_ids"].shape[1] :]
print(f"{row['query']} Expected: {row['label'][0]}")
print(f"The grown model answers: {processor.decode(answer, skip_special_tokens=True)}")
