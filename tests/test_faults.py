"""Faults that are real: death at any step of a save, a growth or a report; full and read-only disks; numbers that are
not finite; memory that is not there. What was there before is whole, and doing it again works.

GROWATTN_LONG=1 kills a save at every single change of the disk.
"""

import contextlib
import itertools
import os
import resource
import shutil
import signal
import subprocess
import sys
import traceback
from pathlib import Path

import pytest
import torch
import transformers
from conftest import LONG
from families import build, lm_batches
from test_growth import fingerprint, same
from test_saving import contents, grown
from transformers import AutoModelForCausalLM

from hf_growattn import Grower, GrowthConfig, export_model, patch_model, save_report
from hf_growattn.growable.attention import attentions

CONFIG = GrowthConfig(qk_dims=2, v_dims=2, oversampling=4)
CHANGES = ("os.", "shutil.", "ctypes.dlsym")  # of the disk, among the events that Python audits; and opening to write


@pytest.fixture(autouse=True)
def no_progress_bars():
    """Their lock is shared by forks, and one that dies with it would hold it for good."""
    transformers.logging.disable_progress_bar()
    yield
    transformers.logging.enable_progress_bar()


def in_child(work) -> int:
    """Run in a fork, which imports nothing anew; returns its exit code, or minus the signal that ended it."""
    child = os.fork()
    if child == 0:
        try:
            work()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def die_at_change(number: int) -> None:
    """Let this process be killed right before it changes the disk for the so-manieth time."""
    changes = itertools.count(1)

    def watch(event, arguments):
        writes = event == "open" and isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR)
        if (writes or (event.startswith(CHANGES) and event not in ("os.listdir", "os.scandir"))) and (
            next(changes) == number
        ):
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(watch)


def limit_files(size: int, deadly: bool) -> None:
    """Let no file of this process grow beyond a size: it fails as on a full disk, or dies in the middle of writing."""
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL if deadly else signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))


@contextlib.contextmanager
def disk(place: Path, size: str):
    """A disk of a given size, mounted at a place."""
    place.mkdir(parents=True)
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(place)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"mounting a disk is not allowed here: {done.stderr}")
    try:
        yield place
    finally:
        subprocess.run(["umount", "--lazy", str(place)], check=True)


def deaths(work, check, every: int = 1) -> int:
    """Kill some work at each of its changes of the disk, or at every so-manieth; check after each, and count them."""
    for death, number in enumerate(itertools.count(1, every)):

        def killed(number=number):
            die_at_change(number)
            work()

        code = in_child(killed)
        if code == 0:
            return death
        assert code == -signal.SIGKILL
        check()


@pytest.mark.parametrize("size", ["100KB", "1GB"])
def test_a_save_killed_at_any_step(size, tmp_path, record_property):
    """The former model or the new one loads, or none; what is not ours stays; saving again makes the new one whole."""
    target = tmp_path / "there" / "m"
    old, new = grown(4), grown(9)
    (tmp_path / "old" / "runs").mkdir(parents=True)
    for name in ("tokenizer.json", "runs/events", "model_ema.safetensors"):
        (tmp_path / "old" / name).write_text("not ours")
    old.save_pretrained(tmp_path / "old")
    foreign = {Path("tokenizer.json"), Path("runs/events"), Path("model_ema.safetensors")}
    states, found = [model.state_dict() for model in (old, new)], []

    def save():
        new.save_pretrained(target, max_shard_size=size)

    def start():
        shutil.rmtree(target.parent, ignore_errors=True)
        shutil.copytree(tmp_path / "old", target)

    def which() -> int | None:
        """The model that loads: 0 for the former one, 1 for the new one, None while the rest of a save is elsewhere."""
        try:
            loaded = AutoModelForCausalLM.from_pretrained(target).state_dict()
        except OSError as error:
            assert "did not finish: the rest of its files is in" in str(error)
            return None
        return next(index for index, state in enumerate(states) if same(state, loaded))

    def check():
        assert all((target / path).read_text() == "not ours" for path in foreign)
        found.append(which())
        save()
        assert which() == 1 and all((target / path).read_text() == "not ours" for path in foreign)
        start()

    start()
    count = deaths(save, check, every=1 if LONG else 3)
    start()
    for limit in (1, 2000, 50_000):  # dies in the middle of config.json, of code, of weights
        assert in_child(lambda limit=limit: (limit_files(limit, deadly=True), save())) == -signal.SIGXFSZ
        assert which() == 0
        check()
    assert count > 5
    # Amid the moves of its files none may load: a refusal, and never a mix of two saves.
    assert {0, 1} <= set(found)
    record_property("cases", f"{len(found)} deaths in a save")


def test_a_save_where_no_file_may_grow(tmp_path):
    """The kernel refuses to write on: an OSError that names the place, and nothing has changed."""
    model = grown(9)
    grown(4).save_pretrained(tmp_path / "m")
    before = contents(tmp_path)

    def refused(save, size):
        limit_files(size, deadly=False)
        with pytest.raises(OSError, match=r"cannot be written.*on a disk with room"):
            save(tmp_path / "m")

    for save in (model.save_pretrained, lambda path: export_model(model, path)):
        for size in (1, 2000, 50_000):
            assert in_child(lambda save=save, size=size: refused(save, size)) == 0
            assert contents(tmp_path) == before


def test_full_and_read_only_disks_and_mounts(tmp_path):
    """A disk with room for one checkpoint and a half; the directory may be the mount itself; then it is read-only."""
    model, loaded = grown(9), AutoModelForCausalLM.from_pretrained
    grown(4).save_pretrained(tmp_path / "m")
    size = sum(len(content) for content in contents(tmp_path / "m").values())
    with disk(tmp_path / "disk", str(size * 3 // 2)) as place:
        grown(4).save_pretrained(place)
        assert contents(tmp_path / "m").keys() == {tmp_path / "m" / p.relative_to(place) for p in contents(place)}
        before = contents(place)
        for save in (model.save_pretrained, lambda path: export_model(model, path)):
            for target in (place, place / "m"):
                with pytest.raises(OSError, match="No space left on device"):
                    save(target)
                assert contents(place) == before
        subprocess.run(["mount", "-o", f"remount,size={4 * size}", place], check=True)
        model.save_pretrained(place)
        assert attentions(loaded(place))[0].width_of("key") == attentions(model)[0].width_of("key")
        model.save_pretrained(place / "m")
        before = contents(place)
        subprocess.run(["mount", "-o", "remount,ro", place], check=True)
        for target in (place, place / "m", place / "new"):
            with pytest.raises(OSError, match=f"Read-only file system.*{place}"):
                model.save_pretrained(target)
        assert contents(place) == before
    with disk(tmp_path / "outer", "1m") as outer, disk(outer / "inner", "4m") as inner:
        subprocess.run(["mount", "-o", "remount,ro", outer], check=True)
        model.save_pretrained(inner)  # the directory above cannot be written, this one can
        assert attentions(loaded(inner))[0].width_of("key") == attentions(model)[0].width_of("key")
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        model.save_pretrained(tmp_path / "file" / "m")


def go_on(checkpoint: Path, output: Path, die_at_pass: int | None = None) -> int:
    """Train two steps from a checkpoint, grow, train two more and save; returns the passes that the growth took."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint).train()
    optimizer, passes = torch.optim.AdamW(model.parameters(), lr=1e-3), itertools.count(1)
    grower = Grower(model, CONFIG, optimizer)
    if (checkpoint / "optimizer.pt").exists():
        optimizer.load_state_dict(torch.load(checkpoint / "optimizer.pt"))

    def train():
        for batch in lm_batches(2):
            model(**batch).loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    def count(*_):
        if next(passes) == die_at_pass:
            os.kill(os.getpid(), signal.SIGKILL)

    train()
    hook = model.register_forward_pre_hook(count)
    assert grower.find(lm_batches()).keep().kept
    hook.remove()
    train()
    model.save_pretrained(output)
    torch.save(optimizer.state_dict(), output / "optimizer.pt")
    return next(passes) - 1


def test_a_growth_killed_on_its_way(tmp_path, record_property):
    """The checkpoint that training came from is as it was, and training on from it ends as if nothing had been."""
    patch_model(build("llama-2")).save_pretrained(tmp_path / "0")
    go_on(tmp_path / "0", tmp_path / "1")
    passes = go_on(tmp_path / "1", tmp_path / "2")
    before, moments = contents(tmp_path), (1, passes // 3, passes)
    for moment in moments:
        killed = in_child(lambda moment=moment: go_on(tmp_path / "1", tmp_path / "again", moment))
        assert killed == -signal.SIGKILL and contents(tmp_path) == before
    go_on(tmp_path / "1", tmp_path / "again")
    weights = [folder / "model.safetensors" for folder in (tmp_path / "2", tmp_path / "again")]
    assert weights[0].read_bytes() == weights[1].read_bytes()
    record_property("cases", f"{len(moments)} deaths in a growth")


def test_a_report_killed_at_any_step_and_without_room(tmp_path, record_property):
    pytest.importorskip("matplotlib")
    one, other = (Grower(patch_model(build("llama-2")), CONFIG).find(lm_batches(n)).keep() for n in (2, 3))
    path = tmp_path / "r" / "report.html"
    save_report([one], path)
    former = path.read_bytes()

    def whole():
        text = path.read_text()
        assert text.startswith("<!DOCTYPE html>") and text.rstrip().endswith("</html>")

    count = deaths(lambda: save_report([other], path), whole)
    for size in (1, 5000):
        path.write_bytes(former)
        assert (
            in_child(lambda size=size: (limit_files(size, deadly=True), save_report([other], path))) == -signal.SIGXFSZ
        )
        assert path.read_bytes() == former

        def refused(size=size):
            limit_files(size, deadly=False)
            with pytest.raises(OSError, match="File too large"):
                save_report([other], path)

        assert in_child(refused) == 0 and path.read_bytes() == former
    save_report([other], path)
    whole()
    assert path.read_bytes() != former
    left = [each.name for each in path.parent.iterdir() if each != path]  # by processes that were killed
    assert all(name.startswith(".report.html.partial-") for name in left)
    assert count >= 2
    record_property("cases", f"{count + 2} deaths in a report")


def trained(variant: str = "llama-2"):
    """A model in training, and its optimizer with a state."""
    model = patch_model(build(variant)).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model(**lm_batches()[0]).loss.backward()
    optimizer.step()
    return model, optimizer


def goes_on(model, optimizer) -> None:
    """Training and growth work, after a growth that failed."""
    optimizer.zero_grad()
    model(**lm_batches()[1]).loss.backward()
    optimizer.step()
    assert Grower(model, CONFIG, optimizer).find(lm_batches()).keep().kept
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    assert held == {id(p) for p in model.parameters()} and all(p.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("variant", ["llama-2", "gpt2-2"])
def test_one_head_that_is_not_finite(variant, value):
    model, optimizer = trained(variant)
    for role in ("query", "key", "value", "output"):
        entry = attentions(model)[1].weight_of(role)[1, 2]
        kept = entry.clone()
        entry[3] = value
        before = fingerprint(model, optimizer)
        with pytest.raises(ValueError, match=r"loss of batch 0 is nan.*diverged model"):
            Grower(model, CONFIG, optimizer).find(lm_batches()).keep()
        assert same(fingerprint(model, optimizer), before)
        entry.copy_(kept)
    goes_on(model, optimizer)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_one_batch_that_is_not_finite(value):
    """One number of one token of one sequence: the error says which batch to leave out."""
    model, optimizer = trained()
    embedded = [
        {"inputs_embeds": model.get_input_embeddings()(batch["input_ids"]).detach(), "labels": batch["input_ids"]}
        for batch in lm_batches()
    ]
    embedded[2]["inputs_embeds"][1, 3, 5] = value
    before = fingerprint(model, optimizer)
    with pytest.raises(ValueError, match=r"loss of batch 1 is nan.*leave that batch out"):
        Grower(model, CONFIG, optimizer).find([embedded[index] for index in (0, 2, 1)]).keep()
    assert same(fingerprint(model, optimizer), before)
    assert Grower(model, CONFIG, optimizer).find(embedded[:2]).keep().kept


def test_memory_that_torch_refuses_in_any_pass(record_property):
    """An allocation that no machine serves, in one pass after the other until a growth gets through."""
    model, optimizer = trained()
    before, tried, needed, left = fingerprint(model, optimizer), 0, 1, 0

    def refused(*_):
        nonlocal left
        left -= 1
        if left == 0:
            torch.empty(1 << 60, dtype=torch.uint8)

    while True:
        left = needed
        hook = attentions(model)[1].module.register_forward_hook(refused)
        try:
            report = Grower(model, CONFIG, optimizer).find(lm_batches()).keep()
            break
        except RuntimeError as error:
            assert "memory" in str(error)
            tried += 1
            needed += max(needed // 2, 1)
        finally:
            hook.remove()
        assert same(fingerprint(model, optimizer), before)
    assert report.kept and tried >= 5
    goes_on(model, optimizer)
    record_property("cases", f"{tried} passes without memory")
