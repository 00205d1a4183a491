"""Labels for rows without a transformer: a fitted metric's nearest neighbours, cosine, and logistic regression."""

import warnings

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, normalize, one_hot

SCALES = [2.0**power for power in range(-5, 6)]  # of distances: pairs do not quite differ as Gaussians do
RIDGE = 0.01  # of the mean variance, added where rows that belong together do not differ


def matched_pairs(batch: dict) -> Tensor:
    """Each row that was asked for, and a row given that has its label, (pairs, 2, features)."""
    given, labels = batch["given"], batch["labels"]
    shown, asked = batch["rows"].split([given.shape[1], labels.shape[1]], 1)
    place = (labels[..., None] == given[:, None]).float().argmax(-1)
    partners = shown.gather(1, place[..., None].expand_as(asked))
    return torch.stack((asked, partners), 2)[labels >= 0]


def shared_directions(pairs: Tensor) -> Tensor:
    """Directions in which rows that belong together differ little, the best first, (features, features).

    Along each of them the difference of a pair has variance 1, and the rows the largest variance possible.
    """
    difference = covariance(pairs[:, 0] - pairs[:, 1])
    difference += RIDGE * difference.diagonal().mean() * torch.eye(len(difference))
    whitening = torch.linalg.inv(torch.linalg.cholesky(difference)).T
    found = torch.linalg.eigh(whitening.T @ covariance(pairs[:, 1]) @ whitening)
    return whitening @ found.eigenvectors.flip(1)


def covariance(rows: Tensor) -> Tensor:
    """Of the columns of rows."""
    return torch.cov(rows.T).reshape(rows.shape[1], rows.shape[1])


def neighbour_scores(batch: dict, directions: Tensor, labels: int) -> Tensor:
    """Log-likelihoods of labels for the rows asked for, (episodes * asked, labels), if pairs differ as Gaussians do."""
    given = batch["given"]
    shown, asked = (batch["rows"] @ directions).split([given.shape[1], batch["labels"].shape[1]], 1)
    nearness = -torch.cdist(asked, shown).square() / 2
    has_label = one_hot(given, labels).bool().mT[:, None]  # (episodes, 1, labels, rows)
    return nearness[:, :, None].masked_fill(~has_label, -torch.inf).logsumexp(-1).flatten(0, 1)


def neighbour_loss(batches: list[dict], directions: Tensor, labels: int) -> float:
    """The mean loss of those likelihoods."""
    scores = [neighbour_scores(batch, directions, labels) for batch in batches]
    return cross_entropy(torch.cat(scores), torch.cat([batch["labels"].flatten() for batch in batches])).item()


def best_loss(seen: list[dict], batches: list[dict], directions: Tensor, labels: int) -> float:
    """The mean loss on batches, at the scale of distances that is best on those seen."""
    scale = min(SCALES, key=lambda scale: neighbour_loss(seen, directions * scale, labels))
    return neighbour_loss(batches, directions * scale, labels)


def at_length_one(batches: list[dict]) -> list[dict]:
    """The same with rows of length 1, whose distances order them as their cosines do."""
    return [batch | {"rows": normalize(batch["rows"], dim=-1)} for batch in batches]


def logistic_regression_loss(batches: list[dict]) -> float:
    """The mean loss of regressions, each fitted to the rows given in an episode."""
    from sklearn.linear_model import LogisticRegression

    losses = []
    for batch in batches:
        for rows, given, labels in zip(batch["rows"], batch["given"], batch["labels"]):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)  # that a row has a class of its own is meant here
                fitted = LogisticRegression().fit(rows[: len(given)].numpy(), given.numpy())
            known = labels >= 0
            scores = torch.tensor(fitted.decision_function(rows[len(given) :].numpy()))[known]
            places = torch.searchsorted(torch.tensor(fitted.classes_), labels[known])
            losses.append(cross_entropy(scores, places, reduction="none"))
    return torch.cat(losses).mean().item()
