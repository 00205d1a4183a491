"""Model cards, and pushing to the Hub: huggingface_hub's real client against a local server that stands for the Hub."""

import json
import os
import re
import shutil
import subprocess
import sys
import zipfile

import pytest
import torch
from command import call
from conftest import ROOT
from families import add_dims, build, lm_batches, tokens, word_tokenizer
from hub_server import Hub, Repository, card_errors
from huggingface_hub import HfApi, ModelCard

from hf_growattn import Grower, GrowthConfig, GrowthReport, patch_model, write_card
from hf_growattn.growable.attention import attentions
from hf_growattn.growable.growths import sync_config
from hf_growattn.report.words import summary_of

TOKEN = "hf_neverToBeSeenAnywhere"


@pytest.fixture(scope="module")
def grown():
    """A grown model and the report of its growth."""
    torch.manual_seed(0)
    model = patch_model(build("llama-2"))
    report = Grower(model, GrowthConfig(qk_dims=3, v_dims=2, layers=[1], oversampling=4)).find(lm_batches()).keep()
    assert report.kept
    return model, report


@pytest.fixture(scope="module")
def checkpoint(grown, tmp_path_factory):
    """A folder as a fine-tuning leaves it."""
    (model, report), folder = grown, tmp_path_factory.mktemp("checkpoint")
    word_tokenizer().save_pretrained(folder)
    model.save_pretrained(folder)
    history = [{"step": 0, "eval_loss": 3.0}, {"step": 4, **report.figures()}, {"step": 8, "eval_loss": 2.0}]
    write_card(model, folder, [report], "someone/base", "someone/words", history)
    (folder / "growth.png").write_bytes(b"\x89PNG")  # matplotlib may be missing
    (folder / "checkpoint-8").mkdir()
    (folder / "checkpoint-8" / "optimizer.pt").write_bytes(b"not to be pushed")
    return folder


@pytest.fixture
def hub():
    with Hub(TOKEN) as hub:
        yield hub


def client(hub, home, *command, token=TOKEN) -> subprocess.CompletedProcess:
    """Run Python in a fresh process with the real client, a cache of its own, and the server for the Hub."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "HUGGING"))}
    environment |= dict(HF_ENDPOINT=hub.url, HF_HOME=str(home), HF_HUB_DISABLE_XET="1", NO_PROXY="127.0.0.1")
    environment |= dict(OMP_NUM_THREADS="1", HF_HUB_DISABLE_TELEMETRY="1", **({"HF_TOKEN": token} if token else {}))
    command = [sys.executable, *map(str, command)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=home, timeout=300)
    assert TOKEN not in done.stdout + done.stderr
    return done


def ran(*arguments, **options) -> str:
    done = client(*arguments, **options)
    assert done.returncode == 0, done.stderr
    return done.stdout


def command(hub, home, *options) -> subprocess.CompletedProcess:
    return client(hub, home, "-m", "hf_growattn", "push", *options)


def push(*options):
    """The command in this process."""
    return call("push", *options)


def card_of(hub, repo: str) -> ModelCard:
    text = hub.files(repo)["README.md"].decode()
    assert card_errors(text) == []
    return ModelCard(text)


def logits(model):
    with torch.no_grad():
        return model.eval()(tokens()).logits


PUSH = """
import sys
import hf_growattn
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
model.push_to_hub("grown", max_shard_size="50KB", private=True, commit_message="first")
print(model.push_to_hub("me/grown", tags=["mine"], commit_message="second"))
model.push_to_hub("me/grown", revision="aside")
model.save_pretrained("saved", push_to_hub=True, repo_id="me/saved")
"""
LOAD = """
import sys, torch
repo, inputs, outputs, library, own_code = sys.argv[1:]
if library:
    import hf_growattn
else:
    sys.modules["hf_growattn"] = None  # as if it were not installed
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(repo, trust_remote_code=bool(own_code)).eval()
with torch.no_grad():
    torch.save(model(torch.load(inputs)).logits, outputs)
"""


def loaded_logits(hub, home, repo, library="yes", own_code=""):
    """What a model of the Hub computes in a fresh process with an empty cache."""
    home.mkdir()
    torch.save(tokens(), home / "tokens.pt")
    ran(hub, home, "-c", LOAD, repo, home / "tokens.pt", home / "logits.pt", library, own_code)
    return torch.load(home / "logits.pt")


def test_pushed_by_the_model_and_loaded_elsewhere(hub, grown, tmp_path):
    """Shards over one file and one file over shards, which leave other weights; to a branch; by save_pretrained."""
    model, _ = grown
    model.save_pretrained(tmp_path / "m")
    foreign = ["model.safetensors", "model.fp16.safetensors", "model_ema.safetensors", "runs/model.safetensors"]
    hub.repositories["me/grown"] = Repository(private=True)
    hub.repositories["me/grown"].commit("main", dict.fromkeys(foreign, b"of someone else"))
    assert "commit" in ran(hub, tmp_path, "-c", PUSH, tmp_path / "m")
    repository = hub.repositories["me/grown"]
    _, first, second, _ = repository.commits.values()
    assert repository.private and set(repository.branches) == {"main", "aside"}
    foreign = {"model.fp16.safetensors", "model_ema.safetensors", "runs/model.safetensors"}
    assert "model.safetensors.index.json" in first and "model.safetensors" not in first
    assert {name for name in second if "safetensors" in name} == {"model.safetensors"} | foreign
    assert set(second) >= {"config.json", "README.md"} and "model.safetensors" in hub.files("me/saved")
    card = card_of(hub, "me/grown")
    written = card.data.to_dict()
    assert written["tags"] == ["hf_growattn", "growattn", "mine"] and written["library_name"] == "transformers"
    assert card.data.pipeline_tag == "text-generation" and "| 1 | 16 -> 19 | 16 -> 18 |" in card.text
    assert 'from_pretrained("me/grown", trust_remote_code=True)' in card.text
    assert TOKEN.encode() not in b"".join(b"".join(files.values()) for files in repository.commits.values())
    assert torch.equal(loaded_logits(hub, tmp_path / "elsewhere", "me/grown"), logits(model))


def test_the_command_from_a_checkpoint_to_a_loaded_model(hub, checkpoint, grown, tmp_path):
    done = command(hub, tmp_path, checkpoint, "me/your-model", "--private")
    assert done.returncode == 0, done.stderr
    files = hub.files("me/your-model")
    assert "/me/your-model/commit/" in done.stdout and len(hub.repositories["me/your-model"].commits) == 2
    assert set(files) >= {"config.json", "model.safetensors", "tokenizer.json", "README.md", "growth.png"}
    assert not any("checkpoint" in name for name in files)
    assert hub.repositories["me/your-model"].private
    assert TOKEN.encode() not in b"".join(files.values()) and str(tmp_path).encode() not in b"".join(files.values())
    card = card_of(hub, "me/your-model")
    assert (card.data.base_model, card.data.datasets) == ("someone/base", ["someone/words"])
    assert "| step 0 | 3.0000 |" in card.text and "| step 8 | 2.0000 |" in card.text
    assert f"Growth 1, at step 4. {' '.join(summary_of(grown[1]))}" in card.text
    assert card.text.count('from_pretrained("me/your-model"') == 2
    assert torch.equal(loaded_logits(hub, tmp_path / "elsewhere", "me/your-model"), logits(grown[0]))


@pytest.fixture
def here(hub, tmp_path, monkeypatch):
    """The server stands for the Hub in this process too."""
    constants = {"ENDPOINT": hub.url, "HF_HUB_CACHE": str(tmp_path / "cache"), "HF_HUB_DISABLE_XET": True}
    constants["HUGGINGFACE_CO_URL_TEMPLATE"] = hub.url + "/{repo_id}/resolve/{revision}/{filename}"
    for name, value in constants.items():
        monkeypatch.setattr(f"huggingface_hub.constants.{name}", value)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    return hub


def test_loaded_by_the_code_that_travels_along(here, grown, tmp_path):
    model, _ = grown
    model.push_to_hub("me/grown")
    if b"auto_map" not in here.files("me/grown")["config.json"]:
        pytest.skip("checkpoints do not carry their code yet")
    loaded = loaded_logits(here, tmp_path / "elsewhere", "me/grown", library="", own_code="yes")
    assert torch.equal(loaded, logits(model))


def test_a_card_that_is_there_is_kept_unless_there_is_more_to_tell(here, grown):
    model, report = grown
    HfApi().create_repo("me/grown")
    here.files("me/grown")["README.md"] = b"---\nlicense: mit\n---\nMy own words."
    model.push_to_hub("me/grown")
    card = card_of(here, "me/grown")
    assert card.data.license == "mit" and "My own words." in card.text
    model.push_to_hub("me/grown", reports=[report])
    text = card_of(here, "me/grown").text
    assert "My own words." not in text and summary_of(report)[0] in text


def test_a_branch_loses_its_own_former_weights_alone(here, grown):
    model, _ = grown
    HfApi().create_repo("me/weights")
    HfApi().create_branch("me/weights", branch="aside")
    repository, shard = here.repositories["me/weights"], "model-00001-of-00001.safetensors"
    index = json.dumps({"metadata": {}, "weight_map": {"some.weight": shard}}).encode()
    shards = {"model.safetensors.index.json": index, shard: b"former"}
    repository.commit("aside", here.files("me/weights") | shards)
    model.push_to_hub("me/weights", revision="aside")
    pushed = repository.commits[repository.branches["aside"]]
    assert not {*shards} & {*pushed} and "model.safetensors" in pushed
    here.files("me/weights")["model.safetensors.index.json"] = index
    model.push_to_hub("me/weights", revision="aside")  # where no such file is
    assert "model.safetensors.index.json" in here.files("me/weights")


def test_a_branch_keeps_its_own_card(here, grown):
    model, _ = grown
    HfApi().create_repo("me/branched")
    repository = here.repositories["me/branched"]
    here.files("me/branched")["README.md"] = b"---\nlicense: mit\n---\nOf the main branch."
    HfApi().create_branch("me/branched", branch="aside")
    repository.commit("aside", here.files("me/branched") | {"README.md": b"---\nlicense: mit\n---\nOf this branch."})
    model.push_to_hub("me/branched", revision="aside")
    pushed = repository.commits[repository.branches["aside"]]
    assert b"Of this branch." in pushed["README.md"] and "model.safetensors" in pushed


def test_an_edited_card_is_pushed_as_it_is_and_a_missing_one_is_written(here, checkpoint, tmp_path):
    folder = tmp_path / "edited"
    shutil.copytree(checkpoint, folder)
    edited = b"---\nlicense: mit\ntags: [mine]\n---\nMy own words: from_pretrained('you/your-model')."
    (folder / "README.md").write_bytes(edited)
    assert push(folder, "me/grown").code == 0
    assert here.files("me/grown")["README.md"] == edited.replace(b"you/your-model", b"me/grown")
    (folder / "README.md").unlink()
    assert push(folder, "me/other").code == 0
    card = card_of(here, "me/other")
    assert "| Base model | not recorded |" in card.text and 'from_pretrained("me/other")' in card.text


@pytest.mark.parametrize("tags, expected", [(None, []), ("mine", ["mine"])])
def test_a_card_without_metadata_is_pushed_with_some(tags, expected, here, grown):
    HfApi().create_repo("me/plain")
    here.files("me/plain")["README.md"] = b"\xef\xbb\xbf# My own words"
    grown[0].push_to_hub("me/plain", tags=tags)
    card = card_of(here, "me/plain")
    assert card.data.tags == expected and card.text == "# My own words"


def test_a_push_that_fails_half_way_leaves_nothing(here, checkpoint, monkeypatch):
    here.broken = "commit"
    done = push(checkpoint, "me/grown")
    assert done.code == 1 and re.search(r"Status/500", done.err), done
    assert len(here.uploads) == 2 and set(here.files("me/grown")) == {".gitattributes"}
    here.broken = None
    assert push(checkpoint, "me/grown").code == 0
    assert card_of(here, "me/grown").data.base_model == "someone/base"
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    assert re.search(r"401", push(checkpoint, "me/other").err)


def test_a_card_of_a_model_that_is_not_growable(tmp_path):
    with pytest.raises(ValueError, match="not growable"):
        write_card(build("llama-2"), tmp_path)


def made_card(model, folder, *arguments) -> str:
    write_card(model, folder, *arguments)
    text = (folder / "README.md").read_text()
    assert card_errors(text) == []
    return text


def test_a_dry_run_asks_nothing_of_the_hub(here, checkpoint, tmp_path):
    assert "would be pushed to me/grown" in push(checkpoint, "me/grown", "--dry-run", tmp_path / "look").out
    names = {path.name for path in (tmp_path / "look").iterdir()}
    assert names >= {"README.md", "model.safetensors", "config.json", "tokenizer.json", "growth.png"}
    assert "checkpoint-8" not in names and "me/grown" in (tmp_path / "look" / "README.md").read_text()
    assert not here.requests


def test_local_names_do_not_travel(grown, tmp_path):
    (tmp_path / "base").mkdir()
    (tmp_path / "secret.txt").write_text("")
    text = made_card(grown[0], tmp_path, [], str(tmp_path / "base"), str(tmp_path / "secret.txt"))
    assert str(tmp_path) not in text and "secret" not in text and "base_model" not in text
    assert text.count("not recorded") == 2


def test_losses_that_are_not_finite_stay_out(grown, tmp_path):
    history = [{"step": 0, "eval_loss": 2.0}, {"step": 4, "eval_loss": float("nan")}]
    text = made_card(grown[0], tmp_path, [], "", "", history)
    assert "| step 0 | 2.0000 |" in text and "| step 4 |" not in text


@pytest.mark.parametrize("task", ["SequenceClassification", "TokenClassification"])
def test_task_heads_and_a_growth_that_kept_nothing(task, tmp_path):
    import transformers

    model = patch_model(build("gpt2-2", getattr(transformers, f"AutoModelFor{task}")))
    add_dims(attentions(model)[0], 4)
    sync_config(model)
    text = made_card(model, tmp_path, [GrowthReport(1.0, 1.0, [], 0, {}, {})])
    assert f"AutoModelFor{task}.from_pretrained" in text and "| 0 | 16 -> 20 | 16 |" in text
    assert "Nothing was grown" in text and "growth.png" not in text
    assert "{{" not in text and "{%" not in text


def test_the_cards_of_this_project():
    cards = [path for path in (ROOT / "model_cards").glob("*.md") if path.name != "README.md"]
    for path in cards:
        text = path.read_text()
        assert card_errors(text) == [] and "## What grew" in text
        for picture in re.findall(r"!\[.*\]\((.*)\)", text):
            assert (path.parent / picture).exists(), picture
    assert "demo.md" in {path.name for path in cards}


def test_a_wheel_carries_the_template(tmp_path):
    """Built from what git would ship, and asked for a card where nothing of the sources is in sight."""
    pytest.importorskip("setuptools", minversion="77.0")
    source = tmp_path / "source"
    listed = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a git checkout")
    for name in filter(lambda name: (ROOT / name).is_file(), listed.stdout.splitlines()):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_bytes((ROOT / name).read_bytes())
    build_wheel = "from setuptools import build_meta; build_meta.build_wheel('..')"
    done = subprocess.run([sys.executable, "-c", build_wheel], cwd=source, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    parts = (path.relative_to(ROOT) for path in (ROOT / "hf_growattn").rglob("*"))
    assert all((tmp_path / "site" / part).is_file() for part in parts if part.suffix in (".py", ".html", ".json"))
    code = """
import hf_growattn.interop.cards, transformers
config = transformers.LlamaConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32)
model = hf_growattn.patch_model(transformers.LlamaForCausalLM(config))
hf_growattn.write_card(model, "card")
print(hf_growattn.__file__, open("card/README.md").read())
"""
    environment = os.environ | {"PYTHONPATH": str(tmp_path / "site"), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.startswith(str(tmp_path / "site")), done.stderr
    assert "## What grew" in done.stdout
