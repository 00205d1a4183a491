"""Model cards of grown models, and pushing a model with its card to the Hub: all in one commit, or not at all."""

import json
import math
import tempfile
from collections.abc import Iterable
from pathlib import Path

from huggingface_hub import (
    CommitInfo,
    CommitOperationAdd,
    CommitOperationDelete,
    EvalResult,
    HfApi,
    ModelCard,
    ModelCardData,
)
from huggingface_hub.errors import EntryNotFoundError, HFValidationError
from huggingface_hub.utils import validate_repo_id
from transformers import PreTrainedModel

from .configuration import PREFIX, layer_widths, stock_head_dim
from .folders import is_weights
from .report import GrowthReport, grown_layers

CARD, PICTURE, FIGURES = "README.md", "growth.png", "figures.json"
TAGS = ["hf_growattn", "growattn"]
TASKS = {  # by the end of a model class's name: the Auto class that loads it, and the Hub's name of its task
    "ForCausalLM": ("AutoModelForCausalLM", "text-generation"),
    "LMHeadModel": ("AutoModelForCausalLM", "text-generation"),
    "ForSequenceClassification": ("AutoModelForSequenceClassification", "text-classification"),
    "ForTokenClassification": ("AutoModelForTokenClassification", "token-classification"),
    "ForQuestionAnswering": ("AutoModelForQuestionAnswering", "question-answering"),
    "": ("AutoModel", "feature-extraction"),
}
_HERE = Path(__file__).parent
_PLACES = (_HERE, _HERE.parent)  # as it is installed, and as it lies in the sources
_TEMPLATE = next(place for place in _PLACES if (place / "model_cards").exists()) / "model_cards" / "template.md"


def task_of(class_name: str) -> tuple[str, str]:
    """The Auto class that loads a model of a class, and the Hub's name of its task."""
    return next(task for end, task in TASKS.items() if class_name.endswith(end))


def model_card(
    model: PreTrainedModel,
    repo_id: str,
    form: str = "native",
    reports: Iterable[GrowthReport] = (),
    figures: dict | None = None,
    base_model: str | None = None,
    picture: bool = False,
) -> ModelCard:
    """Write the card of a grown model: where it comes from, what grew where and why, what it gave, how to load it.

    Args:
        model: the grown model.
        repo_id: where it will be on the Hub.
        form: "native" or "stock", as it is pushed.
        reports: of its growths, as `Grower.grow` returned them.
        figures: instead, what a fine-tuning left in `figures.json`, evaluations included.
        base_model: Hub id or folder of the model that grew; by default as the figures or the model itself know it. Its
            licence is carried over; where the Hub cannot be asked, the card says that the licence is not known.
        picture: whether `growth.png` will lie beside the card.

    Returns:
        The card; `card.save(path)` writes it, `card.push_to_hub(repo_id)` pushes it alone.

    Raises:
        ValueError: the model is not growable.
    """
    config = model.config
    if not config.model_type.startswith(PREFIX):
        raise ValueError(f"{type(model).__name__} is not growable: the card is for models that patch_model has seen.")
    figures = figures or {"growths": [growth_figures(report) for report in reports]}
    base_model, base_name, licence = _origin(base_model or figures.get("base_model", config.name_or_path))
    auto_class, task = task_of(type(model).__name__)
    dataset = figures.get("dataset") or ""
    on_hub = _is_hub_id(dataset)
    dataset = dataset if on_hub or not Path(dataset).is_absolute() else Path(dataset).name
    evaluations = _evaluations(figures)
    data = ModelCardData(
        base_model=base_model,
        **licence,
        library_name="transformers",
        pipeline_tag=task,
        tags=TAGS,
        datasets=[dataset] if on_hub else None,
        model_name=repo_id.split("/")[-1],
        eval_results=_eval_results(evaluations, task, dataset if on_hub else "text", dataset or "text") or None,
    )
    return ModelCard.from_template(
        data,
        template_path=str(_TEMPLATE),
        repo_id=repo_id,
        form=form,
        auto_class=auto_class,
        base_model=base_model,
        base_name=base_name,
        licence=licence,
        dataset=dataset,
        dataset_on_hub=on_hub,
        family=config.model_type.removeprefix(PREFIX),
        heads=config.num_attention_heads,
        stock_width=stock_head_dim(config),
        widths=[layer_widths(config, layer) for layer in range(config.num_hidden_layers)],
        parameters=model.num_parameters(),
        parameters_before=figures.get("before", {}).get("parameters"),
        growths=figures["growths"],
        evaluations=evaluations,
        without_growth=(figures.get("without_growth") or {}).get("held_out"),
        picture=PICTURE if picture else None,
    )


def push_folder(
    folder: str | Path,
    repo_id: str,
    token: bool | str | None = None,
    revision: str | None = None,
    create_pr: bool = False,
    commit_message: str | None = None,
    commit_description: str | None = None,
) -> CommitInfo:
    """Push the files of a folder as one commit, and take weights of a former push away that they do not replace.

    `HfApi.upload_folder` may make several commits, between which the repository holds half a model. The arguments after
    `repo_id`, which must be there, are as for `push_model`.

    Raises:
        huggingface_hub.errors.HfHubHTTPError: the Hub refused, and has nothing of it.
    """
    api = HfApi()
    if revision is not None and not create_pr and not revision.startswith("refs/pr"):
        api.create_branch(repo_id, branch=revision, token=token, exist_ok=True)
    folder = Path(folder)
    names = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    there = api.list_repo_files(repo_id, revision=revision, token=token)
    former = [name for name in there if is_weights(name) and name not in names]
    return api.create_commit(
        repo_id,
        operations=[
            *(CommitOperationAdd(name, str(folder / name)) for name in names),
            *(CommitOperationDelete(name) for name in former),
        ],
        commit_message=commit_message or "Upload model",
        commit_description=commit_description,
        token=token,
        revision=revision,
        create_pr=create_pr,
    )


def push_model(
    model: PreTrainedModel,
    repo_id: str,
    *,
    reports: Iterable[GrowthReport] = (),
    commit_message: str | None = None,
    commit_description: str | None = None,
    private: bool | None = None,
    token: bool | str | None = None,
    revision: str | None = None,
    create_pr: bool = False,
    max_shard_size: int | str | None = "50GB",
    tags: list[str] | None = None,
) -> CommitInfo:
    """Push a grown model in its native form with a card; this is `model.push_to_hub`.

    Args:
        model: the grown model.
        repo_id: where to; made if it is not there.
        reports: of the growths; with them the card is written anew, else a card that the repository has is kept.
        commit_message: first line of the commit.
        commit_description: the rest of it.
        private: make a new repository private.
        token: of a user who may write; None takes the one of `hf auth login` or HF_TOKEN.
        revision: branch to push to, made if it is not there; None means the main one.
        create_pr: open a pull request instead.
        max_shard_size: size of a file of weights at most, in bytes or as in "5GB".
        tags: for the card, beside those of this library.

    Returns:
        The commit; it is the only one, so that the repository never holds half a model.

    Raises:
        ValueError: the model is not growable.
        huggingface_hub.errors.HfHubHTTPError: the Hub refused; nothing was changed there but for an empty repository.
    """
    repo_id = HfApi().create_repo(repo_id, private=private, token=token, exist_ok=True).repo_id
    reports = list(reports)
    card = None if reports else _card_on_hub(repo_id, token)
    card = card or model_card(model, repo_id, reports=reports)
    card.data.tags = list(dict.fromkeys([*(card.data.tags or []), *(tags or [])]))
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder, max_shard_size=max_shard_size)
        card.save(Path(folder, CARD))
        return push_folder(folder, repo_id, token, revision, create_pr, commit_message, commit_description)


def _card_on_hub(repo_id: str, token: bool | str | None) -> ModelCard | None:
    try:
        return ModelCard.load(repo_id, token=token)
    except EntryNotFoundError:
        return None


def source_of(base_model: str, dataset: str) -> dict:
    """What the training started from, for the model card: Hub ids, or whole paths that cannot be taken for one."""
    names = {"base_model": base_model, "dataset": dataset}
    return {key: str(Path(name).resolve()) if name and Path(name).exists() else name for key, name in names.items()}


def growth_figures(report: GrowthReport) -> dict:
    """One growth as `figures.json` has it, of what a report alone knows."""
    return {
        "growth_batches": [report.loss_before, report.loss_after],
        "added_parameters": report.added_parameters,
        "layers": grown_layers(report.figures()),
    }


def _evaluations(figures: dict) -> list[tuple[str, float, float]]:
    """Name, held-out loss and perplexity of each moment that is worth telling, in the order of time."""
    held_out = figures.get("with_growth", {}).get("held_out")
    if not held_out:
        return []
    losses = {f"before training, step {held_out[0][0]}": held_out[0][1]}
    for growth in figures["growths"]:
        for when, loss in zip(("before", "after"), growth["held_out"]):
            losses[f"{when} growth, step {growth['step']}"] = loss
    losses[f"after training, step {held_out[-1][0]}"] = held_out[-1][1]
    return [(name, loss, math.exp(loss)) for name, loss in losses.items()]


def _eval_results(evaluations: list[tuple[str, float, float]], task: str, dataset_type: str, dataset_name: str):
    where = dict(task_type=task, dataset_type=dataset_type, dataset_name=dataset_name, dataset_split="held out")
    return [
        EvalResult(**where, metric_type=metric, metric_name=f"{metric} {name}", metric_value=round(value, 4))
        for name, *values in evaluations
        for metric, value in zip(("loss", "perplexity"), values)
    ]


def _is_hub_id(name: str) -> bool:
    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return not Path(name).exists()


def _origin(base: str) -> tuple[str | None, str, dict]:
    """Follow a model's name to what it came from.

    Returns:
        The Hub id, if there is one, what to call it, and the licence's metadata.
    """
    if not base:
        return None, "none, trained from random weights", {}
    folder = Path(base)
    if (folder / FIGURES).exists():  # of a fine-tuning, whose model grew from another model in its turn
        return _origin(json.loads((folder / FIGURES).read_text()).get("base_model", ""))
    hub_id, card = base if _is_hub_id(base) else None, {}
    try:
        if hub_id:
            info = HfApi().model_info(hub_id, timeout=10)  # asked once; downloads are tried again and again
            hub_id, card = info.id, info.card_data.to_dict()  # its id is the one of today, should it have moved
        else:
            card = ModelCard.load(folder / CARD, ignore_metadata_errors=True).data.to_dict()
    except Exception:  # no network, no such model, no card, or none that can be read: then nothing is known
        pass
    name = hub_id or f"`{folder.name}`"
    if _is_grown(folder) or set(TAGS) & set(card.get("tags") or []):  # a stage on the way
        former = card.get("base_model")
        hub_id = former[0] if isinstance(former, list) else former
        name = hub_id or "not recorded"
    return hub_id, name, {key: card[key] for key in ("license", "license_name", "license_link") if card.get(key)}


def _is_grown(folder: Path) -> bool:
    config = folder / "config.json"
    return config.exists() and json.loads(config.read_text()).get("model_type", "").startswith(PREFIX)
