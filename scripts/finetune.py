"""Fine-tune a causal language model by TRL's SFTTrainer, and let its attention heads grow on the way.

    pip install ".[trl]"
    python scripts/finetune.py --model_name_or_path my/llama --data_files my_text.txt --output_dir grown
    python scripts/finetune.py --model_name_or_path my/llama --config scripts/recipes/chat.yaml --output_dir grown

This is TRL's `trl sft` with four more lines, made to be copied. All options of TRL work, on the command line or in a
YAML file. By default all weights train; `--use_peft` trains LoRA, and growth next to it. On ordinary text LoRA alone is
the better choice: `growattn race` compares them.
"""

from dataclasses import dataclass, field
from pathlib import Path

from datasets import DatasetDict, load_dataset
from transformers import AutoModelForCausalLM, set_seed
from trl import (
    DatasetMixtureConfig,
    ModelConfig,
    ScriptArguments,
    SFTConfig,
    SFTTrainer,
    TrlParser,
    get_dataset,
    get_peft_config,
    get_quantization_config,
)
from trl.scripts.utils import DatasetConfig

from hf_growattn import GrowthCallback, GrowthConfig, patch_model, unpatch_model, write_card


@dataclass
class GrowthArguments:
    """What grows, and when; and files to train on."""

    data_files: list[str] | None = field(
        default=None, metadata={"help": ".txt, .jsonl, .csv or .parquet files of one kind, instead of --dataset_name"}
    )
    budget: float | None = field(
        default=None,
        metadata={"help": "weights that a growth may add, as a share of the model's (default: 0.02; 0: none)"},
    )
    qk_dims: int = field(default=0, metadata={"help": "instead: dims to add to every head's queries and keys"})
    v_dims: int = field(default=0, metadata={"help": "instead: dims to add to every head's values"})
    grow_steps: list[int] | None = field(
        default=None, metadata={"help": "grow after these steps (default: once, half-way)"}
    )
    growth_batches: int = field(default=16, metadata={"help": "how many of the last batches a growth reads"})

    def __post_init__(self):
        if self.budget is None and not (self.qk_dims or self.v_dims):
            self.budget = 0.02


def load_rows(script: ScriptArguments, mixture: DatasetMixtureConfig, files: list[str] | None) -> DatasetDict:
    """The data by splits: of files, of `datasets` in a YAML file, or of one name."""
    if files:
        kind = Path(files[0]).suffix[1:]
        reader = {"txt": "text", "jsonl": "json"}.get(kind, kind)
        mixture.datasets = [DatasetConfig(reader, data_files=files)]
    if mixture.datasets:
        return get_dataset(mixture)
    return load_dataset(script.dataset_name, script.dataset_config, streaming=script.dataset_streaming)


def main() -> None:
    """Read the options, train, and save."""
    parser = TrlParser([GrowthArguments, ScriptArguments, SFTConfig, ModelConfig, DatasetMixtureConfig])
    try:
        growth, script, training, chosen, mixture = parser.parse_args_and_config()
        config = None
        if growth.budget != 0:
            config = GrowthConfig(growth.qk_dims, growth.v_dims, growth.budget, seed=training.seed)
    except Exception as error:  # what YAML says may be anything
        parser.error(" ".join(str(error).split()))
    if not (chosen.model_name_or_path and (growth.data_files or mixture.datasets or script.dataset_name)):
        parser.error("give --model_name_or_path, and --data_files or --dataset_name")

    set_seed(training.seed)  # by which every process splits the data alike
    rows = load_rows(script, mixture, growth.data_files)
    model = AutoModelForCausalLM.from_pretrained(
        chosen.model_name_or_path,
        revision=chosen.model_revision,
        dtype=chosen.dtype,
        attn_implementation=chosen.attn_implementation,
        quantization_config=get_quantization_config(chosen),
    )
    trainer = SFTTrainer(
        patch_model(model),
        training,
        train_dataset=rows[script.dataset_train_split],
        eval_dataset=rows[script.dataset_test_split] if training.eval_strategy != "no" else None,
        peft_config=get_peft_config(chosen),
    )
    callback = None
    if config:
        callback = GrowthCallback(trainer, config, growth.grow_steps, growth.growth_batches)
        trainer.add_callback(callback)
    trainer.train(resume_from_checkpoint=training.resume_from_checkpoint)

    has_grown = bool(trainer.model.config.extra_dims)
    if not has_grown:
        unpatch_model(model)  # it is saved as the stock model that it is
    trainer.save_model()  # with the tokenizer; of LoRA the adapters, and the new dims in the folder `growth`
    if has_grown and not chosen.use_peft and trainer.is_world_process_zero():
        reports = callback.reports if callback else []
        write_card(model, training.output_dir, reports, chosen.model_name_or_path, script.dataset_name or "")


if __name__ == "__main__":
    main()
