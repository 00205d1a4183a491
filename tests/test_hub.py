"""Model cards, and pushing to the Hub: huggingface_hub's real client against a local server that stands for the Hub."""

import os
import re
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
from transformers import AutoModelForCausalLM

from hf_growattn import Grower, GrowthConfig, model_card, patch_model
from hf_growattn.growable.growths import attentions, sync_config
from hf_growattn.interop.cards import FIGURES, read_figures, save_figures

TOKEN = "hf_neverToBeSeenAnywhere"


@pytest.fixture(scope="module")
def grown():
    """A grown model and the report of its growth."""
    torch.manual_seed(0)
    model = patch_model(build("llama-2"))
    report = Grower(model, GrowthConfig(qk_dims=3, v_dims=2, layers=[1], oversampling=4)).grow(lm_batches())
    assert report.applied
    return model, report


@pytest.fixture(scope="module")
def checkpoint(grown, tmp_path_factory):
    """A folder as a fine-tuning leaves it."""
    (model, report), folder = grown, tmp_path_factory.mktemp("checkpoint")
    word_tokenizer().save_pretrained(folder)
    model.save_pretrained(folder)
    history = [{"step": 0, "eval_loss": 3.0}, {"step": 4, **report.figures()}, {"step": 8, "eval_loss": 2.0}]
    save_figures(folder, [report], model="someone/base", dataset="someone/words", log_history=history)
    (folder / "growth.png").write_bytes(b"\x89PNG")
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
    assert "figures.json" not in files and not any("checkpoint" in name for name in files)
    assert hub.repositories["me/your-model"].private
    assert TOKEN.encode() not in b"".join(files.values()) and str(tmp_path).encode() not in b"".join(files.values())
    card = card_of(hub, "me/your-model")
    assert (card.data.base_model, card.data.datasets) == ("someone/base", ["someone/words"])
    assert "| step 0 | 3.0000 |" in card.text and "| step 8 | 2.0000 |" in card.text
    (growth,) = read_figures(checkpoint)["growths"]
    assert f"At step 4, {growth['added_parameters']:,} weights were added" in card.text
    assert "](growth.png)" in card.text
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


def test_the_stock_form(here, checkpoint, grown):
    assert push(checkpoint, "me/stock", "--form", "stock").code == 0
    card = card_of(here, "me/stock")
    assert "import hf_growattn" not in card.text and "trust_remote_code" not in card.text
    stock = AutoModelForCausalLM.from_pretrained("me/stock")
    assert not stock.config.model_type.startswith("growattn")
    assert (logits(stock) - logits(grown[0])).abs().max() < 2e-4  # rescaled weights: equal but for fp32's rounding


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
    assert "My own words." not in text and f"loss of the growth batches was {report.loss_before:.4f}" in text


def test_a_push_that_fails_half_way_leaves_nothing(here, checkpoint, monkeypatch):
    here.broken = "commit"
    done = push(checkpoint, "me/grown", "--base", "someone/nowhere")
    assert done.code == 1 and re.search(r"Status/500", done.err), done
    assert len(here.uploads) == 2 and set(here.files("me/grown")) == {".gitattributes"}
    here.broken = None
    assert push(checkpoint, "me/grown", "--base", "someone/nowhere").code == 0
    assert card_of(here, "me/grown").data.base_model == "someone/nowhere"
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    assert re.search(r"401", push(checkpoint, "me/other").err)


def test_a_dry_run_asks_nothing_of_the_hub(here, checkpoint, tmp_path):
    assert "would be pushed to me/grown" in push(checkpoint, "me/grown", "--dry-run", tmp_path / "look").out
    names = {path.name for path in (tmp_path / "look").iterdir()}
    assert names >= {"README.md", "model.safetensors", "growth.png"}
    assert not here.requests


def test_a_card_of_a_model_that_is_not_growable():
    with pytest.raises(ValueError, match="not growable"):
        model_card(build("llama-2"), "me/m")


def test_local_names_do_not_travel(here, grown, tmp_path):
    """The card names a base or a text in a folder by its last name, and reads nothing there but figures."""
    model, _ = grown
    (tmp_path / "base").mkdir()
    (tmp_path / "secret.txt").write_text("")
    save_figures(tmp_path, [], model=str(tmp_path / "base"), dataset=str(tmp_path / "secret.txt"))
    for options in ({"figures": read_figures(tmp_path)}, {"base_model": str(tmp_path / "base")}):
        text = str(model_card(model, "me/grown", **options))
        assert str(tmp_path) not in text and "`base`" in text and "base_model" not in text
        assert ("secret.txt" in text) == ("figures" in options) and card_errors(text) == []
    assert "trained from random weights" in str(model_card(model, "me/grown"))


def test_a_grown_folder_leads_to_its_base_model(tmp_path):
    save_figures(tmp_path, [], model="someone/base", dataset="")
    save_figures(tmp_path, [], model=str(tmp_path), dataset="words")
    assert read_figures(tmp_path)["base_model"] == "someone/base"
    (tmp_path / FIGURES).write_text("{")
    save_figures(tmp_path, [], model=str(tmp_path), dataset="words")
    assert read_figures(tmp_path)["base_model"] == str(tmp_path)


def test_losses_that_are_not_finite_stay_out(tmp_path):
    history = [{"step": 0, "eval_loss": 2.0}, {"step": 4, "eval_loss": float("nan")}]
    save_figures(tmp_path, [], model="", dataset="", log_history=history)
    assert read_figures(tmp_path)["held_out"] == [[0, 2.0]]


@pytest.mark.parametrize("task", ["SequenceClassification", "TokenClassification"])
def test_task_heads_and_a_growth_that_kept_nothing(task):
    import transformers

    from hf_growattn import GrowthReport

    model = patch_model(build("gpt2-2", getattr(transformers, f"AutoModelFor{task}")))
    add_dims(attentions(model)[0], 4)
    sync_config(model)
    card = model_card(model, "me/grown", reports=[GrowthReport(1.0, 1.0, [], 0, {}, {})], picture=True)
    assert f"AutoModelFor{task}.from_pretrained" in card.text and card_errors(str(card)) == []
    assert "| 0 | 16 -> 20 | 16 |" in card.text and "nothing was added" in card.text and "](growth.png)" in card.text
    assert "{{" not in card.text and "{%" not in card.text


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
print(hf_growattn.__file__, hf_growattn.model_card(model, "me/grown"))
"""
    environment = os.environ | {"PYTHONPATH": str(tmp_path / "site"), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.startswith(str(tmp_path / "site")), done.stderr
    assert "## What grew" in done.stdout
