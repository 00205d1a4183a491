"""Model cards, and transformers' own push: huggingface_hub's client against a local server that stands for the Hub."""

import os
import subprocess
import sys
import zipfile

import peft
import pytest
import torch
from conftest import ROOT
from families import add_dims, build, lm_batches, tokens
from hub_server import Hub, card_errors
from huggingface_hub import ModelCard, metadata_load
from packaging.version import Version
from test_layering import TRAVELLING
from transformers.integrations.peft import MIN_PEFT_VERSION

from hf_growattn import Grower, GrowthConfig, GrowthReport, patch_model, write_card
from hf_growattn.growable.attention import attentions
from hf_growattn.growable.growths import sync_config
from hf_growattn.report.words import summary_of

TOKEN = "hf_neverToBeSeenAnywhere"
CODE = {f"growattn/{name}.py" for name in TRAVELLING}


@pytest.fixture(scope="module")
def grown():
    """A grown model and the report of its growth."""
    torch.manual_seed(0)
    model = patch_model(build("llama-2"))
    report = Grower(model, GrowthConfig(qk_dims=3, v_dims=2, layers=[1])).find(lm_batches()).keep()
    assert report.kept
    return model, report


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


def logits(model):
    with torch.no_grad():
        return model.eval()(tokens()).logits


PUSH = """
import sys
import hf_growattn
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
model.push_to_hub("grown", max_shard_size="50KB", private=True, tags=["mine"])
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


def test_a_pushed_model_loads_with_the_library_and_by_the_code_that_it_carries(hub, grown, tmp_path):
    """In processes of their own: one pushes as transformers does, the others load."""
    model, _ = grown
    model.save_pretrained(tmp_path / "m")
    ran(hub, tmp_path, "-c", PUSH, tmp_path / "m")
    files, repository = hub.files("me/grown"), hub.repositories["me/grown"]
    assert repository.private and {*files} >= {"config.json", "model.safetensors.index.json", "README.md"} | CODE
    assert all(TOKEN.encode() not in b"".join(files.values()) for files in repository.commits.values())
    assert "mine" in ModelCard(files["README.md"].decode()).data.tags
    assert torch.equal(loaded_logits(hub, tmp_path / "with", "me/grown"), logits(model))
    without = loaded_logits(hub, tmp_path / "without", "me/grown", library="", own_code="yes")
    assert torch.equal(without, logits(model))


@pytest.fixture
def here(hub, tmp_path, monkeypatch):
    """The server stands for the Hub in this process too."""
    constants = {"ENDPOINT": hub.url, "HF_HUB_CACHE": str(tmp_path / "cache"), "HF_HUB_DISABLE_XET": True}
    constants["HUGGINGFACE_CO_URL_TEMPLATE"] = hub.url + "/{repo_id}/resolve/{revision}/{filename}"
    for name, value in constants.items():
        monkeypatch.setattr(f"huggingface_hub.constants.{name}", value)
    monkeypatch.setattr("transformers.utils.hub._hf_api", None)  # made once, for the Hub of that time
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    return hub


def test_what_is_pushed_is_what_was_saved(here, grown, tmp_path):
    half = {name: value.half() for name, value in grown[0].state_dict().items()}
    grown[0].save_pretrained(tmp_path / "m", push_to_hub=True, variant="fp16", state_dict=half)
    pushed = here.files("me/m")  # by default the folder's name
    assert "model.safetensors" not in pushed and {*pushed} >= {"config.json", *CODE}
    assert pushed["model.fp16.safetensors"] == (tmp_path / "m" / "model.fp16.safetensors").read_bytes()
    assert not (tmp_path / "m" / "README.md").exists()


@pytest.mark.skipif(Version(peft.__version__) < Version(MIN_PEFT_VERSION), reason="transformers asks for a newer peft")
def test_a_push_of_adapters_takes_the_new_dims_along(here, tmp_path):
    model = patch_model(build("llama-2"))
    add_dims(attentions(model)[0], 4)
    sync_config(model)
    model.add_adapter(peft.LoraConfig(target_modules=["q_proj"]))
    model.save_pretrained(tmp_path / "m", push_to_hub=True, repo_id="me/adapters")
    for name in ("adapter_model.safetensors", "growth/growth.safetensors"):
        assert here.files("me/adapters")[name] == (tmp_path / "m" / name).read_bytes()


def test_a_sharded_model_is_not_pushed_while_it_is_saved(here, tmp_path):
    """One process would wait for the others, which do not save a second time."""
    model = patch_model(build("llama-2"))
    model.lm_head.weight.ds_id = 0  # as DeepSpeed marks it
    with pytest.raises(ValueError, match="needs every weight whole"):
        model.save_pretrained(tmp_path / "m", push_to_hub=True)
    assert not (tmp_path / "m").exists() and not here.repositories


def test_a_push_that_fails_leaves_the_save(here, grown, tmp_path):
    here.broken = "commit"
    with pytest.raises(Exception, match="the server broke down"):
        grown[0].save_pretrained(tmp_path / "m", push_to_hub=True)
    assert (tmp_path / "m" / "model.safetensors").exists() and {*here.files("me/m")} == {".gitattributes"}


@pytest.mark.parametrize("patched", [True, False])
def test_no_card_says_that_a_model_grew_which_did_not(patched, tmp_path):
    model = build("llama-2")
    with pytest.raises(ValueError, match="has not grown"):
        write_card(patch_model(model) if patched else model, tmp_path)
    assert not list(tmp_path.iterdir())


def made_card(model, folder, *arguments) -> str:
    write_card(model, folder, *arguments)
    text = (folder / "README.md").read_text()
    assert card_errors(text) == []
    return text


def test_a_card_says_what_grew_and_how_to_load_it(grown, tmp_path):
    model, report = grown
    text = made_card(model, tmp_path, [report], "someone/base", "someone/words", "me/grown")
    data = metadata_load(tmp_path / "README.md")
    assert (data["base_model"], data["datasets"]) == ("someone/base", ["someone/words"])
    assert data["tags"] == ["hf_growattn", "growattn"] and data["library_name"] == "transformers"
    assert data["pipeline_tag"] == "text-generation" and "| 1 | 16 -> 19 | 16 -> 18 |" in text
    assert f"Growth 1. {' '.join(summary_of(report))}" in text
    assert text.count('from_pretrained("me/grown"') == 2 and '("me/grown", trust_remote_code=True)' in text
    assert made_card(model, tmp_path).count('from_pretrained("you/your-model"') == 2


def test_local_names_do_not_travel(grown, tmp_path):
    (tmp_path / "base").mkdir()
    (tmp_path / "secret.txt").write_text("")
    text = made_card(grown[0], tmp_path, [], str(tmp_path / "base"), str(tmp_path / "secret.txt"))
    assert str(tmp_path) not in text and "secret" not in text and "base_model" not in text
    assert text.count("not recorded") == 2


@pytest.mark.parametrize("task", ["SequenceClassification", "TokenClassification"])
def test_task_heads_and_a_growth_that_kept_nothing(task, tmp_path):
    import transformers

    model = patch_model(build("gpt2-2", getattr(transformers, f"AutoModelFor{task}")))
    add_dims(attentions(model)[0], 4)
    sync_config(model)
    text = made_card(model, tmp_path, [GrowthReport(1.0, 1.0, [], 0, {}, {})])
    assert f"AutoModelFor{task}.from_pretrained" in text and "| 0 | 16 -> 20 | 16 |" in text
    assert "Nothing was grown" in text
    assert "{{" not in text and "{%" not in text


def test_the_cards_of_this_project():
    cards = [path for path in (ROOT / "model_cards").glob("*.md") if path.name != "README.md"]
    for path in cards:
        text = path.read_text()
        assert card_errors(text) == [] and "## What grew" in text
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
import hf_growattn.interop.cards, torch, transformers
fields = dict(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, vocab_size=9)
model = hf_growattn.patch_model(transformers.LlamaForCausalLM(transformers.LlamaConfig(**fields)))
rows = torch.arange(8).reshape(2, 4)
assert hf_growattn.Grower(model, hf_growattn.GrowthConfig(v_dims=1)).find([rows, rows]).keep().kept
hf_growattn.write_card(model, "card")
print(hf_growattn.__file__, open("card/README.md").read())
"""
    environment = os.environ | {"PYTHONPATH": str(tmp_path / "site"), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.startswith(str(tmp_path / "site")), done.stderr
    assert "## What grew" in done.stdout
