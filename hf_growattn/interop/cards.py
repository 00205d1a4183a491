"""Model cards of grown models, and pushes to the Hub in one commit."""

import inspect
import shutil
import tempfile
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from huggingface_hub import (
    CommitInfo,
    CommitOperationAdd,
    CommitOperationDelete,
    HfApi,
    ModelCard,
    ModelCardData,
    metadata_load,
    metadata_save,
)
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id
from transformers import PreTrainedModel
from transformers.models.auto import modeling_auto

from ..growable.attention import attentions
from ..growable.folders import INDEX, find_replaced_weights, replacing
from ..growable.growths import origin_of
from ..growable.training_state import refuse_sharded
from ..model.compat import model_class_names
from ..model.configuration import PREFIX
from ..report.pictures import draw_growth, read_losses
from ..report.report import GrowthReport
from ..report.words import format_width, summary_of

CARD, PICTURE = "README.md", "growth.png"
REPO = "you/your-model"  # stands for the name of the repository in a card, until a push knows it
TASKS = {  # the Hub's name of the task, by the Auto class, in the order in which a model class is looked for
    "AutoModelForCausalLM": "text-generation",
    "AutoModelForSequenceClassification": "text-classification",
    "AutoModelForTokenClassification": "token-classification",
    "AutoModelForQuestionAnswering": "question-answering",
    "AutoModelForMaskedLM": "fill-mask",
    "AutoModelForMultipleChoice": "multiple-choice",
    "AutoModelForImageClassification": "image-classification",
    "AutoModelForImageTextToText": "image-text-to-text",
    "AutoModelForSpeechSeq2Seq": "automatic-speech-recognition",
    "AutoModelForCTC": "automatic-speech-recognition",
    "AutoModelForAudioClassification": "audio-classification",
    "AutoModelForSeq2SeqLM": "text2text-generation",
}


def task_of(class_name: str) -> tuple[str, str]:
    """The Auto class that loads a model class, and the Hub's name of its task."""
    for auto_class, task in TASKS.items():
        names = model_class_names(getattr(modeling_auto, auto_class)).values()
        if any(class_name in ((name,) if isinstance(name, str) else name) for name in names):
            return auto_class, task
    return "AutoModel", "feature-extraction"


def write_card(
    model: PreTrainedModel,
    folder: str | Path,
    reports: Iterable[GrowthReport] = (),
    base_model: str = "",
    dataset: str = "",
    log_history: Iterable[dict] = (),
) -> None:
    """Write the model card of a grown model, `README.md`, and where matplotlib is installed `growth.png`.

    The card calls the repository `you/your-model`; `growattn push` and `model.push_to_hub` put the real name there.

    Args:
        model: the grown model.
        folder: where to write; other files that lie there stay.
        reports: of its growths, as `Grower.grow` returned them.
        base_model: Hub id of the model that grew; by default what the model came from.
        dataset: Hub id of the data.
        log_history: `trainer.state.log_history` of the training.

    Raises:
        ValueError: the model is not growable.
    """
    if not model.config.model_type.startswith(PREFIX):
        raise ValueError(f"{type(model).__name__} is not growable: the card is for models that patch_model has seen.")
    reports, log_history = list(reports), list(log_history)
    base, dataset = (name if _is_hub_id(name) else "" for name in (base_model or origin_of(model), dataset))
    auto_class, task = task_of(type(model).__name__)
    steps = {entry["growth_loss_before"]: entry["step"] for entry in log_history if "growth_loss_before" in entry}
    held_out = read_losses(log_history, "eval_loss")
    has_picture = any(report.kept for report in reports) and find_spec("matplotlib") is not None
    data = ModelCardData(
        base_model=base or None,
        library_name="transformers",
        pipeline_tag=task,
        tags=["hf_growattn", "growattn"],
        datasets=[dataset] if dataset else None,
    )
    card = ModelCard.from_template(
        data,
        template_path=str(Path(__file__).with_name("card.md")),
        repo_id=REPO,
        auto_class=auto_class,
        base=base,
        dataset=dataset,
        family=model.config.model_type.removeprefix(PREFIX),
        widths=[
            [format_width((each.stock_width_of(role), each.width_of(role))) for role in ("key", "value")]
            for each in attentions(model)
        ],
        growths=[(steps.get(report.loss_before), summary_of(report)) for report in reports],
        losses=held_out[:1] + held_out[1:][-1:],
        picture=PICTURE if has_picture else None,
    )
    with replacing(Path(folder).resolve()) as partial:
        card.save(partial / CARD)
        if has_picture:
            draw_growth(reports, log_history).savefig(partial / PICTURE, dpi=110)


def _is_hub_id(name: str) -> bool:
    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return not Path(name).exists()


def push_model(
    model: PreTrainedModel,
    repo_id: str,
    *,
    reports: Iterable[GrowthReport] = (),
    **options,
) -> CommitInfo:
    """Push a grown model with a card, in one commit; this is `model.push_to_hub`, whose other options work, too.

    Options that `push_folder` does not know, such as `variant` and `state_dict`, are those of `save_pretrained`.

    With `reports` of the growths the card is written again; without them a card in the repository stays.

    Raises:
        ValueError: the model is not growable, or is spread over processes.
        huggingface_hub.errors.HfHubHTTPError: the Hub refused; nothing was changed there but for an empty repository.
    """
    refuse_sharded(model, [])  # every process would push
    reports = list(reports)
    known, pushing = (inspect.signature(each).parameters for each in (PreTrainedModel.save_pretrained, push_folder))
    saving: dict[str, Any] = {"max_shard_size": "50GB"} | {
        name: options.pop(name) for name in {*options} & {*known} - {*pushing}
    }
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder, **saving)
        if reports:
            write_card(model, folder, reports)
        return push_folder(model, Path(folder), repo_id, **options)


def complete_card(model: PreTrainedModel, folder: Path, repo_id: str) -> None:
    """Write a card into a folder that has none, and name the repository in it."""
    card = folder / CARD
    if not card.exists():
        write_card(model, folder)
    card.write_text(card.read_text(encoding="utf-8").replace(REPO, repo_id), encoding="utf-8")


def push_folder(
    model: PreTrainedModel,
    folder: Path,
    repo_id: str,
    *,
    private: bool | None = None,
    token: bool | str | None = None,
    tags: Iterable[str] | None = None,
    revision: str | None = None,
    create_pr: bool = False,
    commit_message: str = "Upload model",
    commit_description: str | None = None,
) -> CommitInfo:
    """Push a folder in which a grown model was saved as one commit, with the options of `PreTrainedModel.push_to_hub`.

    It removes only the former weights that the new ones replace. `HfApi.upload_folder` may make several commits,
    between which the repository holds half a model.
    """
    api, card = HfApi(token=token), folder / CARD
    repo_id = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
    if revision is not None and not create_pr and not revision.startswith("refs/pr"):
        api.create_branch(repo_id, branch=revision, exist_ok=True)
    there = set(api.list_repo_files(repo_id, revision=revision))
    if not card.exists() and CARD in there:
        shutil.copy(api.hf_hub_download(repo_id, CARD, revision=revision), card)
    complete_card(model, folder, repo_id)
    if tags or not card.read_text(encoding="utf-8-sig").startswith("---"):  # no metadata
        metadata = metadata_load(card) or {}
        former, more = ([given] if isinstance(given, str) else given or [] for given in (metadata.get("tags"), tags))
        metadata_save(card, metadata | {"tags": list(dict.fromkeys([*former, *more]))})
    files = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if path.is_file()}
    index = Path(api.hf_hub_download(repo_id, INDEX, revision=revision)).read_bytes() if INDEX in there else None
    replaced = find_replaced_weights(set(files), index) & there
    return api.create_commit(
        repo_id,
        [*(CommitOperationAdd(*file) for file in files.items()), *map(CommitOperationDelete, replaced)],
        commit_message=commit_message,
        commit_description=commit_description,
        revision=revision,
        create_pr=create_pr,
    )
