"""The recipes for models beyond text run on tiny models, and their checkpoints load and generate in another process."""

import logging
import re

import datasets
import numpy
import torch
import transformers
from families import COMMON, GROUPED, HEADS_OF_16, word_tokenizer
from safetensors import safe_open
from tokenizers import pre_tokenizers
from transformers import AutoModel, AutoModelForImageTextToText, AutoModelForSpeechSeq2Seq, AutoProcessor

import hf_growattn  # noqa: F401  by which the Auto classes know grown checkpoints

# As that of SmolVLM: an image is one token here, of which the processor makes many.
TEMPLATE = """{%- for message in messages -%}
{{ message['role'] }}:
{%- for part in message['content'] %} {{ '<image>' if part['type'] == 'image' else part['text'] }}{% endfor -%}
<end_of_utterance>{{ '\n' }}
{%- endfor -%}
{%- if add_generation_prompt %}assistant:{% endif -%}"""
SIZES = dict(layers=2, attention_heads=4, ffn_dim=32)
SECOND = 16_000  # samples
WORDS = {"la": 300, "mi": 1200, "so": 4000}  # Hz
HEARD = "The grown model hears"


def run(forks, recipe: str, folder, *options) -> str:
    """Run a recipe for 32 steps on `model` and `data`; the held-out loss falls, and growth lowers it."""
    places = ["--model", folder / "model", "--dataset", folder / "data", "--output", folder / "grown"]
    environment = dict(CUDA_VISIBLE_DEVICES="", HF_DATASETS_CACHE=str(folder / "cache"))
    done = forks.run(f"scripts/recipes/{recipe}.py", *places, "--steps", 32, "--budget", 0.1, *options, **environment)
    assert done.returncode == 0, done.stderr
    losses = [float(loss) for loss in re.findall(r"'loss': '([\d.e-]+)'", done.stdout)]
    (held_out,) = re.findall(r"^Held-out loss: ([\d.]+)$", done.stdout, re.MULTILINE)
    found = re.findall(r"^Step 16:\nLoss before: ([\d.]+)\. It falls by ([\d.]+) ± ([\d.]+)", done.stdout, re.MULTILINE)
    ((before, fall, error),) = ([float(number) for number in numbers] for numbers in found)
    assert losses[0] > before > before - fall > float(held_out) and fall > error
    return done.stdout


def grown_modules(folder) -> set[str]:
    """The paths of the attention modules that have new dims in a checkpoint, without the numbers of layers."""
    with safe_open(folder / "model.safetensors", "pt") as file:
        names = [name.partition(".extra.")[0] for name in file.keys() if ".extra." in name]
    return {re.sub(r"\.\d+", "", name) for name in names}


def save_vision_language_model(folder) -> None:
    tokenizer = word_tokenizer()
    tiles = [f"<row_{row}_col_{column}>" for row in (1, 2) for column in (1, 2)]
    tokenizer.add_special_tokens({"additional_special_tokens": ["<global-img>", *tiles]})
    images = transformers.Idefics3ImageProcessorPil(size={"longest_edge": 32}, max_image_size={"longest_edge": 16})
    processor = transformers.Idefics3Processor(images, tokenizer, image_seq_len=4, chat_template=TEMPLATE)
    tokenizer.eos_token = "<end_of_utterance>"
    sizes = dict(head_dim=16, num_hidden_layers=2, vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id)
    config = transformers.Idefics3Config(
        text_config=COMMON | GROUPED | sizes | dict(model_type="llama"),
        vision_config=dict(image_size=16, patch_size=4, num_hidden_layers=2, **HEADS_OF_16),
        scale_factor=2,
        image_token_id=processor.image_token_id,
        pad_token_id=0,
    )
    transformers.Idefics3ForConditionalGeneration(config).save_pretrained(folder)
    processor.save_pretrained(folder)


def save_pictures(folder) -> None:
    """Red, green and blue pictures, with a word for the colour as the answer."""
    rows = []
    for index in range(200):  # so many that a growth, in the first epoch, reads no row twice
        picture = numpy.zeros((24, 32, 3), numpy.uint8)
        picture[..., index % 3] = 150 + index // 2
        rows.append({"image": picture, "query": f"w{40 + index % 7}", "label": [f"w{10 + index % 3}"]})
    text = datasets.Value("string")
    features = datasets.Features(image=datasets.Image(), query=text, label=datasets.List(text))
    folder.mkdir()
    datasets.Dataset.from_list(rows, features).to_parquet(folder / "train.parquet")


def test_a_vision_language_model(forks, tmp_path):
    save_vision_language_model(tmp_path / "model")
    save_pictures(tmp_path / "data")
    out = run(forks, "vision_language", tmp_path, "--learning_rate", 1e-3)
    assert grown_modules(tmp_path / "grown") == {"model.text_model.layers.self_attn"}
    model = AutoModelForImageTextToText.from_pretrained(tmp_path / "grown")
    stock = AutoModelForImageTextToText.from_pretrained(tmp_path / "model")
    for ours, theirs in zip(model.model.vision_model.parameters(), stock.model.vision_model.parameters(), strict=True):
        assert torch.equal(ours, theirs)  # frozen
    ((_, label),) = re.findall(r"^(w\d+) Expected: (w\d+)$", out, re.MULTILINE)
    assert re.search(rf"^The grown model answers: {label}\s*$", out, re.MULTILINE)


def save_whisper(folder) -> None:
    letters = {letter: number for number, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = transformers.WhisperTokenizer(vocab=letters, merges=[], pad_token="<|endoftext|>")
    tasks = ["<|startoftranscript|>", "<|en|>", "<|transcribe|>", "<|translate|>", "<|notimestamps|>"]
    tokenizer.add_special_tokens({"additional_special_tokens": tasks})
    ids = {token: tokenizer.convert_tokens_to_ids(token) for token in ["<|endoftext|>", *tasks]}
    extractor = transformers.WhisperFeatureExtractor(feature_size=16, chunk_length=1)  # seconds
    end = ids["<|endoftext|>"]
    sizes = {f"{side}_{name}": size for side in ("encoder", "decoder") for name, size in SIZES.items()}
    config = transformers.WhisperConfig(
        **sizes, vocab_size=len(tokenizer), num_mel_bins=16, d_model=32, max_source_positions=50, init_std=0.2,
        max_target_positions=32, decoder_start_token_id=ids["<|startoftranscript|>"], begin_suppress_tokens=None,
        suppress_tokens=None, **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), end),
    )  # fmt: skip
    model = transformers.WhisperForConditionalGeneration(config)
    model.generation_config = transformers.GenerationConfig(
        is_multilingual=True,
        lang_to_id={"<|en|>": ids["<|en|>"]},
        task_to_id={task: ids[f"<|{task}|>"] for task in ("transcribe", "translate")},
        no_timestamps_token_id=ids["<|notimestamps|>"],
        decoder_start_token_id=ids["<|startoftranscript|>"],
        eos_token_id=end,
        pad_token_id=end,
        max_length=32,
    )
    model.save_pretrained(folder)
    transformers.WhisperProcessor(extractor, tokenizer).save_pretrained(folder)


def tone(pitch: float) -> numpy.ndarray:
    return numpy.sin(2 * numpy.pi * pitch * numpy.arange(SECOND // 2) / SECOND).astype(numpy.float32)


def save_tones(folder) -> None:
    """Tones, with a word for the pitch as the transcript."""
    rows = []
    for shift in range(100):
        for word, pitch in WORDS.items():
            rows.append({"audio": {"array": tone(pitch + shift / 5), "sampling_rate": SECOND}, "transcription": word})
    folder.mkdir()
    datasets.Dataset.from_list(rows).to_parquet(folder / "train.parquet")


def test_whisper(forks, tmp_path, caplog):
    save_whisper(tmp_path / "model")
    save_tones(tmp_path / "data")
    out = run(forks, "speech_to_text", tmp_path, "--learning_rate", 1e-2)
    attentions = {"encoder.layers.self_attn", "decoder.layers.self_attn", "decoder.layers.encoder_attn"}
    assert grown_modules(tmp_path / "grown") == {f"model.{name}" for name in attentions}
    (expected,), (heard,) = (re.findall(rf"^{start}: (.*)$", out, re.MULTILINE) for start in ("Expected", HEARD))
    assert heard == expected
    model = AutoModelForSpeechSeq2Seq.from_pretrained(tmp_path / "grown")
    processor = AutoProcessor.from_pretrained(tmp_path / "grown")
    inputs = processor(audio=[tone(pitch) for pitch in WORDS.values()], sampling_rate=SECOND, return_tensors="pt")
    with caplog.at_level(logging.ERROR, logger="transformers"):  # Whisper's generate gives deprecated arguments
        ids = model.generate(**inputs)
    assert processor.batch_decode(ids, skip_special_tokens=True) == [*WORDS]


def test_records_in_a_short_form(forks, tmp_path):
    """Every line runs, and its last figures are those of the model that was loaded."""
    words = ["--matching_steps", 40, "--steps", 8, "--output", tmp_path / "linked"]
    done = forks.run("scripts/recipes/records.py", *words, CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith("It can match: of 8 candidates it finds ")
    assert re.search(r"^(LoRA wins|The winner is)", done.stdout, re.MULTILINE)
    shares = dict(re.findall(r"^Found among 64 candidates, (.*): (\d+)%$", done.stdout, re.MULTILINE))
    assert list(shares) == ["before", "trained by the winner, saved and loaded", "nearest neighbour"]
    assert int(shares["nearest neighbour"]) > 80
    assert AutoModel.from_pretrained(tmp_path / "linked").config.hidden_size == 64
