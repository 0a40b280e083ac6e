"""What the page shows: models, run folders, the session's folder, and limits."""

from __future__ import annotations

import gc
import json
import shutil
import tempfile
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from g2rpo.config.load import read_settings
from g2rpo.inference.names import check_model, labels_of, model_state, own_conditions
from g2rpo.inference.open import is_weights, open_policy, run_of
from g2rpo.models.options import as_resolution, size_text
from g2rpo.models.tiny import is_tiny
from g2rpo.run.folder import BEST, latest_checkpoint
from g2rpo.web.jobs import Jobs

if TYPE_CHECKING:
    from g2rpo.models.policy import Policy

EMBEDDED = ("tiny", "tiny@g2rpo")
"""Models that are shown without arguments: the embedded base and its tuned weights."""
RUNS = Path("runs")
"""Folder whose runs are shown without arguments."""
OPEN_POLICIES = 2
"""Number of models that stay in memory: those of a comparison."""


@dataclass(frozen=True)
class Limits:
    """Largest values that the page accepts."""

    steps: int = 100
    guidance: float = 20.0
    seed: int = 2**31 - 1
    group_size: int = 16
    vote_prompts: int = 200
    vote_images: int = 8
    gallery: int = 48
    upload_bytes: int = 2_000_000
    side_px: int = 2048


@dataclass(frozen=True)
class ShownModel:
    """A model of the menus.

    Attributes:
        label: its unique name on the page.
        model: what `open_policy` opens.
        conditions: conditions under which it is opened, unless it is compared with another model.
        base: label of the model that it was tuned from; None: not known, or it is no tuned model.
    """

    label: str
    model: str
    conditions: Mapping[str, Any] = field(default_factory=dict)
    base: str | None = None


class WebContext:
    """The models and runs of a page, and the thread that works on them.

    Attributes:
        models: label -> model, in the order of the menus.
        runs: label -> run folder; some may have no checkpoint yet, and any may disappear.
        notes: what was left out, and why, as sentences.
        folder: the session's own folder, removed by `close`.
        votes: folder of the votes, which is kept.
        device: "auto", "cpu" or "cuda".
        limits: largest values that the page accepts.
        jobs: the thread of the models.
    """

    def __init__(
        self,
        given: Sequence[str] = (),
        *,
        device: str = "auto",
        base: str | None = None,
        family: str | None = None,
        conditions: Mapping[str, Any] | None = None,
        votes: str | Path = "votes",
        limits: Limits | None = None,
    ) -> None:
        """Finds the models and runs; no weights are loaded.

        Args:
            given: runs, folders of runs, and whatever `open_policy` opens; none: the embedded models and the
                runs in ./runs.
            device, base, family: as in `open_policy`.
            conditions: conditions that replace those of all models, such as the resolution.
            votes: folder for the votes; created with the first vote.
            limits: None: the defaults.

        Raises:
            ValueError: something given is neither a model nor a run.
        """
        self.device, self._base, self._family = device, base, family
        self._conditions = {name: value for name, value in (conditions or {}).items() if value is not None}
        self.votes, self.limits = Path(votes).expanduser(), limits or Limits()
        size = as_resolution(self._conditions.get("resolution"))
        if size is not None and max(size) > self.limits.side_px:
            raise ValueError(
                f"resolution={size_text(size)}: the page samples images of at most {self.limits.side_px} "
                "pixels per side; give a smaller one"
            )
        self.models: dict[str, ShownModel] = {}
        self.runs: dict[str, Path] = {}
        self.notes: list[str] = []
        self._searched = [Path(name).expanduser() for name in given or (RUNS,)]
        self._find(given)
        self.jobs = Jobs()
        self.folder = Path(tempfile.mkdtemp(prefix="g2rpo-demo-")).resolve()
        self._policies: OrderedDict[tuple[str, str, str], Policy] = OrderedDict()

    def close(self) -> None:
        """Stops the running job and removes the session's folder."""
        self.jobs.close()
        self._policies.clear()
        shutil.rmtree(self.folder, ignore_errors=True)

    @property
    def pair(self) -> tuple[str, str | None]:
        """Labels of the models that are compared at first: base and tuned; None: there is only one model."""
        for shown in self.models.values():
            if shown.base is not None:
                return shown.base, shown.label
        first, *others = self.models
        return first, others[0] if others else None

    def current_runs(self) -> dict[str, Path]:
        """Returns `runs`, with the runs that began since below what was given. Vanished ones stay."""
        known = set(self.runs.values())
        new = [run for folder in self._searched for run in runs_in(folder) if run not in known]
        if new:
            labels = labels_of([str(run) for run in (*self.runs.values(), *new)])[len(self.runs) :]
            added = {
                (str(run) if label in self.runs else label): run
                for label, run in zip(labels, new, strict=True)
            }
            self.runs = {**self.runs, **added}
        return self.runs

    @property
    def is_embedded(self) -> bool:
        """Whether all models are the embedded one, so that its prompts are examples."""
        roots = (self.models[shown.base] if shown.base else shown for shown in self.models.values())
        return all(is_tiny(root.model) for root in roots)

    def policy(self, label: str, conditions: Mapping[str, Any] | None = None) -> Policy:
        """Opens a model of the menus, or returns it if it is open and unchanged. Call it only in a job.

        Args:
            label: key of `models`.
            conditions: those of the model that it is compared with; None: its own.

        Raises:
            ValueError: no such model, or it cannot be opened (any more).
        """
        shown = self.model(label)
        wanted = {**(shown.conditions if conditions is None else conditions), **self._conditions}
        key = (label, model_state(shown.model), json.dumps(wanted, sort_keys=True, default=str))
        if key in self._policies:
            self._policies.move_to_end(key)
            return self._policies[key]
        for old in [other for other in self._policies if other[0] == label and other[1] != key[1]]:
            del self._policies[old]  # of an earlier checkpoint of a run in progress
        while len(self._policies) >= OPEN_POLICIES:
            self._policies.popitem(last=False)
            gc.collect()  # a policy's hook may refer back to it, so reference counting does not free it
        policy = open_policy(shown.model, base=self._base, device=self.device, family=self._family, **wanted)
        self._policies[key] = policy
        return policy

    def model(self, label: Any) -> ShownModel:
        """Returns a model of the menus.

        Raises:
            ValueError: there is none with this label.
        """
        if not isinstance(label, str) or label not in self.models:
            raise ValueError(f"no model {label!r} on this page; there are: {', '.join(self.models)}")
        return self.models[label]

    def _find(self, given: Sequence[str]) -> None:
        models: list[str] = []
        runs: list[Path] = []
        for name in given or EMBEDDED:
            path = Path(name).expanduser()
            if (run := run_of(path)) is not None:
                runs.append(run)
                models += [] if path == run else [name]
            elif folder_runs := runs_in(path):
                runs += folder_runs
            else:
                check_model(name, self._base, conditions=self._conditions, family=self._family)
                models.append(name)
        if not given:
            runs += runs_in(RUNS)
        self._add(models, list(dict.fromkeys(runs)), embedded=not given)

    def _add(self, models: Sequence[str], runs: Sequence[Path], *, embedded: bool) -> None:
        """Adds models and runs; each run adds its base, its newest and its best checkpoint."""
        base_of: dict[str, str] = {EMBEDDED[1]: EMBEDDED[0]}
        conditions: dict[str, dict[str, Any]] = {}
        bases: list[str] = []
        tuned: list[str] = []
        for run in runs:
            try:
                base, own = read_settings(run).model, own_conditions(str(run))
                check_model(base, conditions=own, family=self._family)
                bases.append(base)
                conditions.setdefault(base, own)
                for name in self._of_run(run):
                    tuned.append(name)
                    base_of[name] = base
            except (ValueError, OSError) as error:  # one bad run does not hide the others
                self.notes.append(f"{run} is not among the models: {error}")
        names = list(dict.fromkeys([*models, *bases, *tuned] if embedded else [*bases, *models, *tuned]))
        if not names:
            self.notes.append("No model of the runs can be opened; the embedded models are shown.")
            names = list(EMBEDDED)
        labels = dict(zip(names, labels_of(names), strict=True))
        for name, label in labels.items():
            base_label = labels.get(base_of.get(name, ""))
            self.models[label] = ShownModel(label, name, conditions.get(name, {}), base_label)
        if runs:
            self.runs = dict(zip(labels_of([str(run) for run in runs]), runs, strict=True))

    def _of_run(self, run: Path) -> list[str]:
        """Names of the models of a run: the newest checkpoint and the best one."""
        if latest_checkpoint(run) is None:
            self.notes.append(f"{run} contains no checkpoint yet; its base model is shown.")
            return []
        names = [str(run)]
        if (run / BEST).is_file():
            names.append(str(run / BEST))
        for name in names:
            check_model(name, conditions=self._conditions, family=self._family)
        return names


def runs_in(folder: Path) -> list[Path]:
    """Returns the runs directly in a folder, or two levels below (comparisons: ARM/SEED), by name."""
    if not folder.is_dir() or is_weights(folder):
        return []
    with suppress(OSError):
        return sorted(
            file.parent for pattern in ("*", "*/*") for file in folder.glob(f"{pattern}/config.toml")
        )
    return []
