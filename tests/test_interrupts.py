"""Ctrl-C at any point of a growth: whatever it meets, nothing is half-changed, and the same call works afterwards."""

import signal
import sys

import pytest
import torch
from conftest import LONG, ROOT
from families import build, fingerprint, lm_batches, same

from hf_growattn import Grower, GrowthConfig, patch_model
from hf_growattn.measure.guards import HeldInterrupts

SIZES = {"qk_dims": 2, "v_dims": 2}
WAYS = {"append": SIZES, "old dims, too": SIZES | {"update_existing": True}, "a budget": {"budget": 0.05}}
POINTS = 200 if LONG else 12
PACKAGE = str(ROOT / "hf_growattn")


class Interrupt:
    """Interrupts this process at the so-manieth call or return of a function of the package."""

    def __init__(self, at: int | None):
        self.at, self.count, self.where = at, 0, ""

    def __enter__(self):
        sys.setprofile(self.look)
        return self

    def __exit__(self, *error):
        sys.setprofile(None)

    def look(self, frame, event, argument):
        code = frame.f_code  # what ends a generator early swallows exceptions
        if event in ("call", "return") and code.co_filename.startswith(PACKAGE) and code.co_name[0] != "<":
            self.count += 1
            if self.count == self.at:
                self.where = f"{event} of {code.co_name} of {code.co_filename}"
                signal.raise_signal(signal.SIGINT)


def interrupt(call, at: int) -> str:
    """Interrupt a call; returns where."""
    ended, interrupt = False, Interrupt(at)
    try:
        with interrupt:
            call()
            ended = True
    except KeyboardInterrupt:
        pass
    assert not (ended and interrupt.where), f"swallowed in {interrupt.where}"
    return interrupt.where


def training(way):
    model = patch_model(build("gpt2-2")).train()
    model.config.name_or_path = "someone/base"
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model(**lm_batches()[0]).loss.backward()
    optimizer.step()
    return model, optimizer, Grower(model, GrowthConfig(**way), optimizer)


def test_a_second_interrupt_is_not_held():
    with pytest.raises(KeyboardInterrupt), HeldInterrupts():
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        pytest.fail("held")


def test_a_handler_of_the_users_own_stays():
    seen = []
    before = signal.signal(signal.SIGINT, lambda *_: seen.append(1))
    try:
        with HeldInterrupts():
            signal.raise_signal(signal.SIGINT)
            assert seen == [1]
        signal.raise_signal(signal.SIGINT)
        assert seen == [1, 1]
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("way", WAYS)
def test_a_growth_may_be_interrupted_anywhere(way):
    model, optimizer, grower = training(WAYS[way])
    before = fingerprint(model, optimizer)
    with Interrupt(None) as finding:
        growth = grower.find(lm_batches(4))
    for point in range(POINTS):
        where = interrupt(lambda: grower.find(lm_batches(4)), 1 + point * finding.count // POINTS)
        assert same(fingerprint(model, optimizer), before), where
    with Interrupt(None) as keeping:
        growth.keep()
    growth = None
    for point in range(POINTS):
        if growth is None:
            model, optimizer, grower = training(WAYS[way])
            growth = grower.find(lm_batches(4))
            before = fingerprint(model, optimizer)
        where = interrupt(growth.keep, 1 + point * keeping.count // POINTS)
        if not same(fingerprint(model, optimizer), before):  # it came after the last step
            assert model.config.extra_dims and model.config.name_or_path == "" and not growth.new_dims
            assert {p for group in optimizer.param_groups for p in group["params"]} == {*model.parameters()}, where
            growth = None
        else:
            assert model.config.name_or_path == "someone/base" and growth.new_dims
    assert growth is None or growth.keep().kept
