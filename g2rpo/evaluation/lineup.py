"""The same images by several models: same prompts, seeds and conditions, each sampled once and kept.

    OUT/<label>/<steps>/00000.png …    image i has seed + i for every model
    OUT/<kind>.json                    the settings of these images; a call with other settings is refused

Images are sampled in fixed batches (batch b holds images b n … b n + n - 1) that the processes share, so the
number of processes does not change an image. Later calls may add models and steps.
"""

from __future__ import annotations

import gc
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from g2rpo.flow.schedule import Shift
from g2rpo.inference.images import save_png
from g2rpo.inference.names import labels_of, model_state, own_conditions
from g2rpo.inference.sample import SampleRequest, Segment, sample_images, sample_segments
from g2rpo.models.family import truncation_lines
from g2rpo.models.policy import Policy
from g2rpo.runtime.interrupt import Interrupt
from g2rpo.runtime.processes import any_process, gathered, rank, world_size
from g2rpo.runtime.progress import phase
from g2rpo.runtime.records import DamagedFile, read_record, write_record
from g2rpo.runtime.secrets import without_secrets

KINDS = ("evaluation", "gallery")
IMAGES_PER_LOAD = 256
"""Approximate number of images that two models sample together; both are loaded again for each such group."""


class Lineup:
    """Models, the images that are requested of them, and those that OUT holds already.

    Attributes:
        labels: names of the models, in order.
        conditions, shift: those of the first model, which all images share; None until they are known.
        described: reward -> its description; kept in OUT for `evaluate`.
    """

    def __init__(
        self,
        kind: str,
        models: Sequence[str],
        request: SampleRequest,
        out: Path,
        *,
        labels: Sequence[str] | None = None,
        more: Mapping[str, Any] | None = None,
        say: Callable[[str], None] = print,
    ) -> None:
        """Checks the models' files and OUT, without loading or writing anything.

        Args:
            kind: "evaluation" or "gallery".
            more: further settings that OUT depends on.

        Raises:
            ValueError: no such model, or OUT holds the results of other settings.
        """
        self.request, self.out, self.say = request, out, say
        self.truncations: set[str] = set()
        self.labels = labels_of(models, labels)
        self.models = dict(zip(self.labels, models, strict=True))
        for model in [*models, *([] if request.then is None else [request.then])]:
            request.check(model)
        self.conditions: dict[str, Any] | None = None
        self.shift: Shift | None = request.shift
        self.described: dict[str, str] = {}
        self._file = out / f"{kind}.json"
        more = {**(more or {}), **({} if request.then is None else {"then_state": model_state(request.then)})}
        self._settings = json.loads(json.dumps({**request.identity(), **more}, default=str))
        self._identities = {
            label: {"model": model, "state": model_state(model)} for label, model in self.models.items()
        }
        self._read(kind)

    def _check_no_folders(self) -> None:
        """Checks that the models' folders are not there, if no record says what is in them."""
        folders = (self.out / label for label in self.labels)
        if existing := next((folder for folder in folders if folder.exists()), None):
            raise ValueError(
                f"{existing} was not written by this command (no {self._file.name}); choose another --out"
            )

    def _read(self, kind: str) -> None:
        """Reads OUT/<kind>.json of an earlier call, whose images are kept."""
        others = [self.out / f"{other}.json" for other in KINDS if other != kind]
        if existing := next((file for file in others if file.exists()), None):
            raise ValueError(f"{self.out} contains other results ({existing.name}); choose another --out")
        if not self._file.is_file():
            return self._check_no_folders()
        try:
            before = read_record(self._file)
            settings, models, steps = before["settings"], before["models"], before["steps"]
            if "rewards" in settings:  # a record of an earlier version may hold secrets
                settings["rewards"] = without_secrets(settings["rewards"])
            self.conditions, self.shift = before["conditions"], before["shift"]
            self.described = before["described"]
        except DamagedFile as error:
            raise ValueError(
                f"{error}. This file records which images and scores are in the folder: restore it from a "
                "copy, or choose another --out"
            ) from error
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{self._file} was not written by this command; choose another --out") from error
        differences = [
            f"  {name}: {settings.get(name)} stored, {self._settings.get(name)} given"
            for name in {**settings, **self._settings}
            if settings.get(name) != self._settings.get(name)
        ]
        for label, identity in models.items():
            if label not in self._identities:
                differences.append(f"  models: {identity['model']} ({label}) is stored, but not given")
            elif self._identities[label] != identity:
                differences.append(f"  {label}: not the stored model, or changed since then")
        if next(iter(models), None) != self.labels[0]:
            differences.append(f"  the first model: {next(iter(models))} stored, {self.labels[0]} given")
        if omitted := sorted(set(steps) - set(self.request.steps)):
            differences.append(f"  steps: {', '.join(map(str, omitted))} stored, but not given")
        if differences:
            raise ValueError(
                f"{self.out} contains images with other settings:\n"
                + "\n".join(differences)
                + "\nGive what is stored (you may add models and steps), or choose another --out."
            )

    def write(self) -> None:
        """Writes OUT/<kind>.json, in the first process alone."""
        if rank():
            return
        self.out.mkdir(parents=True, exist_ok=True)
        record = {
            "settings": self._settings,
            "models": self._identities,
            "steps": list(self.request.steps),
            "conditions": self.conditions,
            "shift": self.shift,
            "described": self.described,
        }
        write_record(self._file, record, indent=2)

    def file(self, label: str, steps: int, index: int) -> Path:
        """Path of image `index`."""
        return self.out / label / str(steps) / f"{index:05d}.png"

    def sample(self, label: str, interrupt: Interrupt) -> None:
        """Samples the images of a model that OUT lacks; every process calls it.

        Raises:
            KeyboardInterrupt: on all processes, after a signal to any; finished images are kept.
            ValueError: as `open_policy`.
        """
        missing = [
            (steps, batch)
            for steps in self.request.steps
            for batch in self.request.batches()
            if not all(self.file(label, steps, index).is_file() for index in batch)
        ]
        missing = gathered(missing)[0]  # one view of the disk, before any process samples
        if any_process(interrupt.requested):
            raise KeyboardInterrupt
        if not missing:
            if self.conditions is not None:
                self.write()
            return
        policy = self.request.open(self.models[label], self.conditions)
        if self.conditions is None:
            self.conditions = policy.conditions
            for other in self.models.values():  # before the first model has sampled everything
                self.request.check(other, self.conditions)
        if self.shift is None:
            self.shift = policy.pipeline_shift()
        self.write()
        count = sum(len(batch) for _, batch in missing)
        self.say(f"{label}: {count} images to sample" + self._other_conditions(label))
        for line in truncation_lines(policy, self.request.texts):
            if line not in self.truncations:  # once for all models with the same encoders
                self.truncations.add(line)
                self.say(line)
        if len(missing) < world_size():
            self.say(
                f"{len(missing)} batches for {world_size()} processes; a smaller --batch would use them all"
            )
        opened, own_batches = [policy], missing[rank() :: world_size()]
        del policy
        interrupt.together(lambda: self._sample(opened, label, own_batches))
        opened.clear()
        gc.collect()  # a policy's hook may refer back to it, so reference counting does not free it
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def _is_shared(self, label: str) -> bool:
        """Whether another model takes the last steps of this one."""
        return self.request.then not in (None, self.models[label])

    def _groups(self, label: str, todo: Sequence[tuple[int, range]]) -> Iterator[tuple[int, list[int]]]:
        """(steps, image indices) sampled at once: one batch, or for two models several of the same steps."""
        size = max(1, IMAGES_PER_LOAD // self.request.batch) if self._is_shared(label) else 1
        for steps in dict.fromkeys(n for n, _ in todo):
            batches = [batch for n, batch in todo if n == steps]
            for low in range(0, len(batches), size):
                yield steps, [index for batch in batches[low : low + size] for index in batch]

    def _images(self, opened: list[Policy], label: str, steps: int, indices: Sequence[int]) -> Tensor:
        assert self.shift is not None
        all_texts, all_seeds = self.request.texts, self.request.seeds
        texts, seeds = [all_texts[i] for i in indices], [all_seeds[i] for i in indices]
        if not self._is_shared(label):
            return sample_images(
                opened[0], texts, num_steps=steps, shift=self.shift, seeds=seeds, batch=len(indices)
            )
        request, conditions = self.request, self.conditions
        then, first_steps = request.then, request.first_steps(steps)
        assert then is not None
        segments = [
            Segment(
                lambda: opened.pop() if opened else request.open(self.models[label], conditions), first_steps
            ),
            Segment(lambda: request.open(then, conditions), steps - first_steps),
        ]
        return sample_segments(segments, texts, shift=self.shift, seeds=seeds, batch=request.batch)

    def _sample(self, opened: list[Policy], label: str, todo: Sequence[tuple[int, range]]) -> None:
        texts, seeds = self.request.texts, self.request.seeds
        assert self.shift is not None and self.conditions is not None
        total = sum(len(batch) for _, batch in todo)
        with phase(label, total, "images"):
            for steps, indices in self._groups(label, todo):
                images = self._images(opened, label, steps, indices)
                info: dict[str, Any] = {"model": self.models[label], "num_steps": steps, "shift": self.shift}
                if self._is_shared(label):
                    info |= {"first_steps": self.request.first_steps(steps), "then": self.request.then}
                for image, index in zip(images, indices, strict=True):
                    own_info = {"seed": seeds[index], **info, **self.conditions}
                    save_png(image, self.file(label, steps, index), texts[index], own_info)

    def _other_conditions(self, label: str) -> str:
        """Names the conditions that differ from the model's own."""
        own, used = own_conditions(self.models[label]), self.conditions or {}
        different = [
            f"{name} {used.get(name)} (its own: {value})"
            for name, value in own.items()
            if used.get(name) != value
        ]
        why = "as requested" if label == self.labels[0] else f"as {self.labels[0]}, or as requested"
        return f", with {', '.join(different)}, {why}" if different else ""
