"""Fine-tune Whisper on transcribed speech, and let its encoder, decoder and cross-attention grow half-way.

    pip install ".[trl]" torchcodec
    python scripts/recipes/speech_to_text.py --output grown

It prints the training loss, what grew, and the loss on held-out rows. Then it loads the saved folder and transcribes a
held-out recording. `--dataset` is the id or folder of a dataset with columns `audio` and `transcription`; torchcodec
decodes the audio and needs FFmpeg. On ordinary text LoRA is the better choice, so compare with it.
"""

import argparse

import torch
from datasets import Audio, load_dataset
from transformers import AutoModelForSpeechSeq2Seq, AutoProcessor, Seq2SeqTrainer, Seq2SeqTrainingArguments

from hf_growattn import GrowthCallback, GrowthConfig, patch_model

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--model", default="openai/whisper-tiny")
parser.add_argument("--dataset", nargs="+", default=["PolyAI/minds14", "en-US"], help="arguments of load_dataset")
parser.add_argument("--language", default="en")
parser.add_argument("--output", default="grown-speech-to-text", help="folder for the grown model")
parser.add_argument("--steps", type=int, default=500)
parser.add_argument("--learning_rate", type=float, default=1e-5)
parser.add_argument("--budget", type=float, default=0.01, help="add at most this share of new weights")
arguments = parser.parse_args()


def encode(rows: list[dict]):
    """The recordings as log-mel spectrograms, (batch, mel bins, frames)."""
    audio = [row["audio"]["array"] for row in rows]
    return processor.feature_extractor(audio, sampling_rate=rate, return_tensors="pt")


def collate(rows: list[dict]) -> dict:
    """A training batch; padding is not predicted."""
    texts = processor.tokenizer(
        [row["transcription"] for row in rows],
        padding=True,
        truncation=True,
        max_length=model.config.max_target_positions,
        return_tensors="pt",
    )
    labels = texts.input_ids.masked_fill(texts.attention_mask == 0, -100)
    # The model puts <|startoftranscript|> before the labels itself.
    return {"input_features": encode(rows).input_features, "labels": labels[:, 1:]}


processor = AutoProcessor.from_pretrained(arguments.model)
processor.tokenizer.set_prefix_tokens(language=arguments.language, task="transcribe")
model = patch_model(AutoModelForSpeechSeq2Seq.from_pretrained(arguments.model, dtype=torch.float32))
model.generation_config.language, model.generation_config.task = arguments.language, "transcribe"
rate = processor.feature_extractor.sampling_rate
rows = load_dataset(*arguments.dataset, split="train")
if isinstance(rows.features["audio"], Audio):  # otherwise the rows hold arrays, which must have the model's rate
    rows = rows.cast_column("audio", Audio(sampling_rate=rate))
rows = rows.train_test_split(min(200, len(rows) // 10), seed=0)
options = Seq2SeqTrainingArguments(
    arguments.output,
    max_steps=arguments.steps,
    learning_rate=arguments.learning_rate,
    lr_scheduler_type="cosine",
    warmup_steps=0.05,
    per_device_train_batch_size=8,
    bf16=torch.cuda.is_available(),  # as autocast
    logging_steps=0.05,
    save_strategy="no",
    remove_unused_columns=False,  # the collator reads them
    report_to="none",
)
trainer = Seq2SeqTrainer(model, options, collate, rows["train"], rows["test"], processor)
trainer.add_callback(GrowthCallback(trainer, GrowthConfig(budget=arguments.budget)))
trainer.train()
print(f"Held-out loss: {trainer.evaluate()['eval_loss']:.4f}")
trainer.save_model()  # with the processor

model = AutoModelForSpeechSeq2Seq.from_pretrained(arguments.output).to(options.device)
row = rows["test"][0]
transcript = model.generate(**encode([row]).to(options.device))[0]
print(f"Expected: {row['transcription']}")
print(f"The grown model hears: {processor.decode(transcript, skip_special_tokens=True)}")
