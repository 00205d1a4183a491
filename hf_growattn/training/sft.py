"""TRL's SFTTrainer as `finetune` and `race` use it: on rows that are ready, by any method, merged when saved."""

import copy
from collections.abc import Callable
from typing import cast

from datasets import Dataset
from torch import nn
from transformers import PreTrainedModel, set_seed
from trl.trainer.sft_config import SFTConfig
from trl.trainer.sft_trainer import SFTTrainer

from ..growable.growths import is_grown
from ..growable.models import unpatch_model
from .data import without_training
from .methods import scale_grown_rates
from .quantized import is_quantized, merge_adapters
from .trainer import loss_of


class MixTrainer(SFTTrainer):
    """SFTTrainer in which grown dims take `grown_share` of LoRA's learning rate."""

    grown_share = 1.0

    def create_optimizer(self, model=None):
        """Make the optimizer, once, of a wrapped model where the Trainer says so."""
        made = self.optimizer is not None
        optimizer = super().create_optimizer(model)
        if not made:
            trained = self.model if model is None else model
            scale_grown_rates(optimizer, cast(nn.Module, trained), self.grown_share)
        return optimizer


def make_trainer(model, tokenizer, data, training, peft_config=None, callbacks=None, method=None) -> SFTTrainer:
    """An SFTTrainer on a pair of rows from `prepare_rows`; `method` is that of `prepare_model`."""
    training = copy.copy(training)
    training.dataset_kwargs, training.assistant_only_loss = {"skip_prepare_dataset": True}, False  # labels are masked
    set_seed(training.seed)  # adapters begin alike; TRL 1.14 leaves that to the caller
    unrounded = {parameter: parameter.data for parameter in model.parameters() if parameter.requires_grad}
    trainer = MixTrainer(
        model,
        training,
        train_dataset=data[0],
        eval_dataset=data[1],
        processing_class=tokenizer,
        peft_config=peft_config,
        callbacks=callbacks,
    )
    for parameter, values in unrounded.items():
        parameter.data = values  # TRL rounds adapters of quantized models to bf16, which takes large steps to move
    if method:
        trainer.grown_share = method.grown_share(model.config.get_text_config().hidden_size)
    return trainer


def make_sft_loss(model, tokenizer, training: SFTConfig) -> Callable:
    """The loss that SFTTrainer lowers with these options, for a growth before the training."""
    row = Dataset.from_dict({"input_ids": [[0, 0]], "labels": [[0, 0]]})
    return loss_of(make_trainer(model, tokenizer, (row, None), without_training(training)))


def save_model(trainer: SFTTrainer, dense: Callable[[], PreTrainedModel]) -> None:
    """Save the model, adapters merged, as a stock one if nothing grew, and the tokenizer; every process calls this.

    Adapters of a quantized model are merged into the patched model that `dense` loads.
    """
    model = trainer.accelerator.unwrap_model(trainer.model, keep_fp32_wrapper=False, keep_torch_compile=False)
    if hasattr(model, "merge_and_unload"):
        model = merge_adapters(model, dense()) if is_quantized(model) else model.merge_and_unload()
    model.__dict__.pop("forward", None)  # TRL's own, which computes a loss without logits
    trainer.model = model if is_grown(model) else unpatch_model(model)
    trainer.save_model()
