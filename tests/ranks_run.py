"""On two ranks: what growing together must bear. Run by torchrun.py. Each rank checks for itself."""

import warnings
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from families import build, fingerprint, lm_batches, same
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel
from torchrun import report

from hf_growattn import Grower, GrowthConfig, patch_model
from hf_growattn.growable.growths import set_dims
from hf_growattn.growable.training_state import all_gather, all_reduce_sum

CONFIG = GrowthConfig(qk_dims=2, v_dims=2)


def wrapped(variant="llama-2", **options):
    model = patch_model(build(variant)).train()
    ddp = DistributedDataParallel(model, **options)
    return model, ddp, torch.optim.AdamW(ddp.parameters(), lr=1e-3)


def mine(count, seed=11):
    """This rank's part of `count` batches for each rank."""
    return lm_batches(2 * count, seed)[dist.get_rank() :: 2]


def assert_alike(model):
    for name, parameter in model.named_parameters():
        everywhere = [torch.empty_like(parameter) for _ in range(2)]
        dist.all_gather(everywhere, parameter.detach())
        assert torch.equal(*everywhere), name


def train(ddp, optimizer, steps=2):
    """Train on; the gradients are those of both ranks' batches."""
    for batch in mine(steps, seed=31):
        ddp(**batch, use_cache=False).loss.backward()
        for name, parameter in ddp.named_parameters():
            everywhere = [torch.empty_like(parameter) for _ in range(2)]
            dist.all_gather(everywhere, parameter.grad)
            assert torch.equal(*everywhere), name
        optimizer.step()
        optimizer.zero_grad()


def settings_of_the_wrapper_and_hooks():
    calls = []

    def counted(state, bucket):
        calls.append(bucket)
        return allreduce_hook(state, bucket)

    for options in ({}, {"gradient_as_bucket_view": True}, {"static_graph": True}, {"find_unused_parameters": True}):
        model, ddp, optimizer = wrapped(**options)
        ddp.register_comm_hook(None, counted)
        train(ddp, optimizer)
        assert Grower(ddp, CONFIG, optimizer).find(mine(3)).keep().kept, options
        before = len(calls)
        train(ddp, optimizer)
        assert len(calls) > before and ddp.static_graph == options.get("static_graph", False)
        set_dims(ddp, {}, [optimizer])
        train(ddp, optimizer)
        assert_alike(model)


def existing_weights_move_too():
    """As far as where one rank has all batches."""
    config, gains = GrowthConfig(qk_dims=2, v_dims=2, update_existing=True), []
    everything = [batch for part in all_gather(mine(2)) for batch in part]
    for given in (mine(2), everything if dist.get_rank() == 0 else []):
        model, ddp, optimizer = wrapped("gpt2-2")
        reports = all_gather(Grower(ddp, config, optimizer).find(given).keep())
        assert reports[0].kept and reports[0] == reports[1]
        gains.append([layer.gain for layer in reports[0].layers])
        train(ddp, optimizer)
        assert_alike(model)
    assert gains[0] == pytest.approx(gains[1], rel=1e-3)  # sums in fp32, in another order


def a_parameter_that_the_wrapper_ignores():
    model = patch_model(build("llama-2")).train()
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["model.norm.weight"])
    ddp = DistributedDataParallel(model)
    assert Grower(ddp, CONFIG, torch.optim.AdamW(ddp.parameters())).find(mine(3)).keep().kept
    for batch in mine(1):
        ddp(**batch, use_cache=False).loss.backward()
    for parameter, is_averaged in ((model.model.norm.weight, False), (model.lm_head.weight, True)):
        everywhere = all_gather(parameter.grad)
        assert torch.equal(*everywhere) == is_averaged


def a_frozen_base():
    for around in (False, True):
        model, _, _ = wrapped()
        model.requires_grad_(False).lm_head.requires_grad_(True)
        ddp = DistributedDataParallel(model)
        passed = torch.nn.ModuleDict({"policy": ddp}) if around else ddp
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3, weight_decay=0.1)
        assert Grower(passed, CONFIG, optimizer).find(mine(3)).keep().kept
        stock, started = build("llama-2").state_dict(), {n: p.detach().clone() for n, p in model.named_parameters()}
        for batch in mine(2, seed=31):
            ddp(**batch, use_cache=False).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        assert_alike(model)
        for name, parameter in model.named_parameters():
            trains = ".extra." in name or name == "lm_head.weight"
            assert torch.equal(parameter, started[name]) != trains, name
            assert trains or torch.equal(parameter, stock[name]), name


def a_model_without_its_wrapper():
    """Nobody knows what is around a module, and its wrapper would leave new gradients as they are on each rank."""
    model, _, optimizer = wrapped()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert Grower(model, CONFIG, optimizer).find(mine(3)).keep().kept
    assert "no DistributedDataParallel is around the Grow" in "".join(str(each.message) for each in caught)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ddp = DistributedDataParallel(model)  # made again, it knows them
        train(ddp, torch.optim.AdamW(ddp.parameters(), lr=1e-3))
    assert_alike(model)


def a_loss_of_ones_own():
    """It gets the model, and another one calls the wrapper itself, which is as it was afterwards."""
    for is_of_wrapper in (False, True):
        model, ddp, optimizer = wrapped()

        def loss(given, batch, model=model, ddp=ddp if is_of_wrapper else None):
            assert given is model
            return (ddp or model)(**batch).loss

        expected = Grower(ddp, CONFIG, optimizer).measure(mine(3))
        report = Grower(ddp, CONFIG, optimizer, loss=loss).find(mine(3)).keep()
        assert report.kept and abs(report.loss_before - expected.loss_before) < 1e-6
        train(ddp, optimizer)
        assert_alike(model)


def in_the_middle_of_an_accumulation():
    model, ddp, optimizer = wrapped()
    with ddp.no_sync():
        ddp(**mine(1)[0], use_cache=False).loss.backward()
    assert Grower(ddp, CONFIG, optimizer).find(mine(3)).keep().kept
    ddp(**mine(1, seed=40)[0], use_cache=False).loss.backward()
    optimizer.step()
    assert_alike(model)


def a_single_sequence_on_each_rank():
    model, ddp, optimizer = wrapped()
    batch = {name: value[:1] for name, value in mine(1)[0].items()}
    assert Grower(ddp, CONFIG, optimizer).find([batch]).report.loss_before > 0
    assert_alike(model)


def one_verdict():
    """Sums of all ranks: by batches or by rows, of noise or not, with fewer batches on one rank, or none."""
    torch.manual_seed(dist.get_rank())
    noise = [dict.fromkeys(("input_ids", "labels"), torch.randint(2, 97, (2, 9))) for _ in range(4)]
    verdicts = []
    uneven = mine(5)[: 3 + 2 * dist.get_rank()]
    for given in (mine(4), mine(2), uneven, mine(4) if dist.get_rank() else [], noise, noise[: 1 + dist.get_rank()]):
        model, ddp, optimizer = wrapped()
        reports = all_gather(Grower(ddp, CONFIG, optimizer).grow(given))
        assert reports[0] == reports[1] and reports[0].kept == reports[0].holds == bool(model.config.extra_dims)
        verdicts.append(reports[0].holds)
        assert_alike(model)
    assert verdicts[0] and not verdicts[-1], verdicts
    assert [*all_reduce_sum(2**24 + 1)] == [2**25 + 2]  # squares of losses are summed so, and fp32 would round them


def _not_finite(value, model, batches):
    embeds = model.get_input_embeddings()(batches[2]["input_ids"]).detach()
    embeds[1, 3, 5] = value
    batches[2] = {"inputs_embeds": embeds, "labels": batches[2]["input_ids"]}


def _no_labels(model, batches):
    batches[2] = {**batches[2], "labels": torch.full_like(batches[2]["labels"], -100)}


def _no_memory(*_):
    torch.empty(1 << 60, dtype=torch.uint8)  # torch refuses


def a_failure_on_one_rank_is_one_on_both():
    """A batch that is not finite, or memory that is not there in a pass."""
    spoilt = {
        "no labels": (_no_labels, "loss of batch"),
        "NaN": (partial(_not_finite, torch.nan), "loss of batch"),
        "inf": (partial(_not_finite, torch.inf), "loss of batch"),
        "no memory in a pass": (lambda model, _: model.register_forward_hook(_no_memory), "memory"),
    }
    for name, (spoil, match) in spoilt.items():
        model, ddp, optimizer = wrapped()
        train(ddp, optimizer)
        before, batches = fingerprint(model, optimizer), mine(3)
        hook = spoil(model, batches) if dist.get_rank() == 1 else None
        with pytest.raises((ValueError, RuntimeError), match=match if dist.get_rank() == 1 else "another process"):
            Grower(ddp, CONFIG, optimizer).find(batches)
        if hook is not None:
            hook.remove()
        assert same(fingerprint(model, optimizer), before), name
        train(ddp, optimizer)
    assert Grower(ddp, CONFIG, optimizer).find(mine(3)).keep().kept
    train(ddp, optimizer)
    assert_alike(model)


def main(folder: Path) -> None:
    for check in (
        settings_of_the_wrapper_and_hooks,
        existing_weights_move_too,
        a_parameter_that_the_wrapper_ignores,
        a_frozen_base,
        a_model_without_its_wrapper,
        a_loss_of_ones_own,
        in_the_middle_of_an_accumulation,
        a_single_sequence_on_each_rank,
        one_verdict,
        a_failure_on_one_rank_is_one_on_both,
    ):
        check()
        report(check.__name__)
