"""Run by torchrun: scripts/grow_sharded.py as it is, with notes on what each part of it held.

Usage: torchrun sharded_run.py NOTES [arguments of grow_sharded.py], where the first process writes NOTES.
"""

import copy
import sys
import weakref

import grow_sharded
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

from hf_growattn import Grower, GrowthConfig

PROBE = torch.arange(64).view(2, 32)
notes = {"losses": [], "whole": {}, "refusals": []}
sharded = []  # weak references to the parameters of every sharded model


def probe_loss(model):
    with torch.no_grad():
        return model(input_ids=PROBE, labels=PROBE).loss.item()


def refusal(training):
    try:
        Grower(training.model, GrowthConfig(qk_dims=2), training.optimizer).grow([PROBE])
    except ValueError as error:
        return str(error)
    return "none"


class NotedTraining(grow_sharded.Training):
    def __init__(self, checkpoint, step, arguments):
        super().__init__(checkpoint, step, arguments)
        sharded.extend(map(weakref.ref, self.model.parameters()))
        notes["refusals"].append(refusal(self))
        if step:  # to ask a fresh optimizer for its state would count as a step
            options = StateDictOptions(full_state_dict=True, cpu_offload=True)
            state = get_optimizer_state_dict(self.model, self.optimizer, options=options)
            notes["reloaded"] = {"optimizer": copy.deepcopy(state), "rate": self.scheduler.get_last_lr()}
        notes["reloaded_loss"] = probe_loss(self.model)  # leaves the root's parameters gathered
        notes["refusals"].append(refusal(self))

    def step(self, batch):
        notes["losses"].append(super().step(batch))
        notes["rate"] = self.scheduler.get_last_lr()
        return notes["losses"][-1]

    def gather(self):
        notes["rate_when_gathered"] = notes.get("rate_when_gathered", notes["rate"])
        weights, optimizer = super().gather()
        notes.setdefault("gathered", {"weights": weights, "optimizer": optimizer})
        return weights, optimizer


def noted_unsharded(*arguments, unsharded=grow_sharded.unsharded):
    notes.setdefault("alive_at_growth", sum(parameter() is not None for parameter in sharded))
    return unsharded(*arguments)


def noted_save(model, optimizer, tokenizer, target, save=grow_sharded.save):
    state = {name: dict(optimizer.state[parameter]) for name, parameter in model.named_parameters()}
    notes["whole"][target.name] = {"loss": probe_loss(model), "state": state}
    save(model, optimizer, tokenizer, target)
    if target.name == "trained":
        torch.save(notes, notes_file)


notes_file = sys.argv.pop(1)
grow_sharded.Training, grow_sharded.unsharded, grow_sharded.save = NotedTraining, noted_unsharded, noted_save
grow_sharded.main()
assert not dist.is_initialized()
