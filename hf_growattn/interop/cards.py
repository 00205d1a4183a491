"""Model cards of grown models, and pushing a model with its card to the Hub: all in one commit, or not at all."""

import contextlib
import json
import math
import re
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import cast

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

from ..grow.provenance import origin_of
from ..growable.folders import is_weights
from ..growable.sharding import is_sharded
from ..model.configuration import PREFIX, layer_widths, stock_head_dim
from ..report.report import GrowthReport
from .costs import costs_of
from .figures import FIGURES, check_figures, growth_figures, read_figures

CARD, PICTURE = "README.md", "growth.png"
TAGS = ["hf_growattn", "growattn"]
TASKS = {  # by the end of a model class's name: the Auto class that loads it, and the Hub's name of its task
    "ForCausalLM": ("AutoModelForCausalLM", "text-generation"),
    "LMHeadModel": ("AutoModelForCausalLM", "text-generation"),
    "ForSequenceClassification": ("AutoModelForSequenceClassification", "text-classification"),
    "ForTokenClassification": ("AutoModelForTokenClassification", "token-classification"),
    "ForQuestionAnswering": ("AutoModelForQuestionAnswering", "question-answering"),
    "ForMaskedLM": ("AutoModelForMaskedLM", "fill-mask"),
    "ForMultipleChoice": ("AutoModelForMultipleChoice", "multiple-choice"),
    "ForImageClassification": ("AutoModelForImageClassification", "image-classification"),
    "": ("AutoModel", "feature-extraction"),
}
_FOLDERS = [place / "model_cards" for place in Path(__file__).parents[1:3]]  # as installed, and as in the sources
_TEMPLATE = next(folder for folder in _FOLDERS if folder.exists()) / "template.md"


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
        base_model: Hub id or folder of the model that grew; by default as the figures or the model know it. The card
            carries its licence over, but not that of a folder which only the figures name.
        picture: whether `growth.png` will lie beside the card.

    Returns:
        The card; `card.save(path)` writes it, `card.push_to_hub(repo_id)` pushes it alone.

    Raises:
        ValueError: the model is not growable, or the figures are none.
    """
    config = model.config
    if not config.model_type.startswith(PREFIX):
        raise ValueError(f"{type(model).__name__} is not growable: the card is for models that patch_model has seen.")
    figures = {"growths": list(map(growth_figures, reports))} if figures is None else figures
    check_figures(figures, "The dict of figures")
    figures = {"growths": [], "dataset": "", "before": {}} | {k: v for k, v in figures.items() if v is not None}
    if base_model or "base_model" not in figures:
        base_model, base_name, licence = _origin(base_model or origin_of(model))
    else:
        base_model, base_name, licence = _origin(figures["base_model"], given=False)
    auto_class, task = task_of(type(model).__name__)
    dataset = figures["dataset"]
    on_hub = _is_hub_id(dataset)
    dataset = dataset if on_hub else _plain(Path(dataset).name if Path(dataset).is_absolute() else dataset)
    evaluations = _evaluations(figures)
    evaluated = {
        "dataset_type": dataset if on_hub else "text",
        "dataset_name": dataset or "text",
        "dataset_split": "held out",
    }
    results = [
        EvalResult(task, metric_type=metric, metric_name=f"{metric} {name}", metric_value=round(value, 4), **evaluated)
        for name, *values in evaluations
        for metric, value in zip(("loss", "perplexity"), values)
    ]
    grew = any(growth["layers"] for growth in figures["growths"])  # and not only the model that it started from
    data = ModelCardData(
        base_model=base_model,
        **licence,
        library_name="transformers",
        pipeline_tag=task,
        tags=TAGS,
        datasets=[dataset] if on_hub else None,
        model_name=repo_id.split("/")[-1],
        eval_results=results or None,
    )
    return ModelCard.from_template(
        data,
        template_path=str(_TEMPLATE),
        repo_id=repo_id,
        form=form,
        auto_class=auto_class,
        base_model=base_model,
        base_name=base_name,
        licence=licence.get("license_name") or licence.get("license"),
        dataset=dataset,
        dataset_on_hub=on_hub,
        family=config.model_type.removeprefix(PREFIX),
        heads=config.num_attention_heads,
        stock_width=stock_head_dim(config),
        widths=[layer_widths(config, layer) for layer in range(config.num_hidden_layers)],
        costs=costs_of(model),
        parameters=model.num_parameters(),
        compared=[{**other, "name": _plain(other["name"])} for other in figures.get("compared") or []],
        parameters_before=figures["before"].get("parameters") if grew else None,
        growths=figures["growths"],
        evaluations=evaluations,
        picture=PICTURE if picture else None,
    )


def push_folder(
    folder: Path,
    repo_id: str,
    token: bool | str | None = None,
    revision: str | None = None,
    create_pr: bool = False,
    commit_message: str | None = None,
    commit_description: str | None = None,
) -> CommitInfo:
    """Push the files of a folder as one commit, and take weights of a former push away that they do not replace.

    `HfApi.upload_folder` may make several commits, between which the repository holds half a model. The arguments are
    as for `push_model`; the repository must be there.
    """
    api = HfApi(token=token)
    if revision is not None and not create_pr and not revision.startswith("refs/pr"):
        api.create_branch(repo_id, branch=revision, exist_ok=True)
    names = {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*")) if path.is_file()}
    former = {name for name in api.list_repo_files(repo_id, revision=revision) if is_weights(name)} - names.keys()
    operations = [*(CommitOperationAdd(*file) for file in names.items()), *map(CommitOperationDelete, sorted(former))]
    message = {"commit_message": commit_message or "Upload model", "commit_description": commit_description}
    return api.create_commit(repo_id, operations, **message, revision=revision, create_pr=create_pr)


def push_model(
    model: PreTrainedModel,
    repo_id: str,
    *,
    reports: Iterable[GrowthReport] = (),
    private: bool | None = None,
    token: bool | str | None = None,
    max_shard_size: int | str = "50GB",
    tags: Iterable[str] | None = None,
    **commit,
) -> CommitInfo:
    """Push a grown model in its native form with a card; this is `model.push_to_hub`.

    Args:
        model: the grown model.
        repo_id: where to; made if it is not there.
        reports: of the growths; with them the card is written anew, else a card that the repository has is kept.
        private: make a new repository private.
        token: of a user who may write; None takes the one of `hf auth login` or HF_TOKEN.
        max_shard_size: size of a file of weights at most, in bytes or as in "5GB".
        tags: for the card, beside those of this library.
        commit: `commit_message`, `commit_description`, `revision` (a branch, made if it is not there) and `create_pr`,
            as for `HfApi.create_commit`.

    Returns:
        The commit; it is the only one, so that the repository never holds half a model.

    Raises:
        ValueError: the model is not growable, or is spread over processes.
        huggingface_hub.errors.HfHubHTTPError: the Hub refused; nothing was changed there but for an empty repository.
    """
    if any(map(is_sharded, model.parameters())):
        raise ValueError(
            f"The model is spread over processes, which would all push. Call save_pretrained(folder) on all of them, "
            f"and push that folder from one: hf upload {repo_id} folder."
        )
    repo_id = HfApi().create_repo(repo_id, private=private, token=token, exist_ok=True).repo_id
    reports, card = list(reports), None
    with contextlib.suppress(EntryNotFoundError):
        card = None if reports else ModelCard.load(repo_id, token=cast(str, token))  # it takes True, too
    card = card or model_card(model, repo_id, reports=reports)
    card.data["tags"] = list(dict.fromkeys([*(card.data.get("tags") or []), *(tags or [])]))
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder, max_shard_size=max_shard_size)
        card.save(Path(folder, CARD))
        return push_folder(Path(folder), repo_id, token, **commit)


def _plain(text: str) -> str:
    """A text from elsewhere, as one line that is neither markdown nor HTML."""
    return re.sub(r"[^\w .,:;/+=%@()'\"-]+", " ", text).strip()


def _evaluations(figures: dict) -> list[tuple[str, float, float]]:
    """Name, held-out loss and perplexity of each moment that is worth telling, in the order of time."""
    held_out = (figures.get("with_growth") or figures.get("without_growth") or {}).get("held_out")
    if not held_out:
        return []
    losses = {f"before training, step {held_out[0][0]}": held_out[0][1]}
    for growth in figures["growths"]:
        for when, loss in zip(("before", "after"), growth.get("held_out") or ()):
            losses[f"{when} growth, step {growth.get('step', 'not recorded')}"] = loss
    losses[f"after training, step {held_out[-1][0]}"] = held_out[-1][1]
    return [(name, loss, math.exp(loss) if loss < 700 else math.inf) for name, loss in losses.items()]


def _is_hub_id(name: str) -> bool:
    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return not Path(name).exists()


def _origin(base: str, given: bool = True) -> tuple[str | None, str, dict]:
    """Follow a model's name to its Hub id, if there is one, what to call it, and its licence's metadata.

    What no user or model has `given`, but a file alone, may be any folder of this machine: nothing of it but its last
    name belongs into a card that others read.
    """
    if not base:
        return None, "none, trained from random weights", {}
    folder = Path(base)
    if given and (folder / FIGURES).is_file():  # of a training, whose model grew from another model in its turn
        return _origin(read_figures(folder).get("base_model") or "", given=False)
    hub_id, card = base if _is_hub_id(base) else None, {}
    try:
        if hub_id:
            info = HfApi().model_info(hub_id, timeout=10)  # asked once; downloads are tried again and again
            hub_id = info.id  # the one of today, should it have moved
            card = cast(ModelCardData, info.card_data).to_dict()
        elif given:
            card = ModelCard.load(folder / CARD, ignore_metadata_errors=True).data.to_dict()
    except Exception:  # no network, no such model, no card, or none that can be read: then nothing is known
        pass
    name = hub_id or f"`{_plain(folder.name) or '?'}`"
    tags = card.get("tags")
    if (isinstance(tags, list) and any(tag in TAGS for tag in tags)) or (given and _is_grown(folder)):  # on the way
        former = card.get("base_model")
        former = former[0] if isinstance(former, list) and former else former
        hub_id = former if isinstance(former, str) and _is_hub_id(former) else None
        name = hub_id or "not recorded"
    licence = {key: _plain(str(card[key])) for key in ("license", "license_name") if card.get(key)}
    link = card.get("license_link")
    if isinstance(link, str) and re.fullmatch(r"[\w.:/?#=&%~+-]+", link):
        licence["license_link"] = link
    return hub_id, name, licence


def _is_grown(folder: Path) -> bool:
    try:
        return json.loads((folder / "config.json").read_bytes())["model_type"].startswith(PREFIX)
    except (AttributeError, KeyError, OSError, RecursionError, TypeError, ValueError):  # no config, or none of a model
        return False
