"""The same pictures by several models: the same prompts, seeds and conditions, each drawn once and kept.

    OUT/<label>/<steps>/00000.png …    picture i has seed + i, whoever draws it
    OUT/<kind>.json                    what it was drawn with; other settings in the same OUT are refused

Pictures are drawn in fixed batches (batch b holds b n … b n + n - 1) and the processes share the batches, so
their number changes nothing. Later calls may add models and steps.
"""

from __future__ import annotations

import gc
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from g2rpo.data.prompts import Prompt
from g2rpo.data.stream import prompts_hash
from g2rpo.inference.images import save_png
from g2rpo.inference.names import check_model, labels_of, model_state, own_conditions
from g2rpo.inference.open import open_policy
from g2rpo.inference.sample import Segment, image_seeds, pipeline_shift, sample_images, sample_segments
from g2rpo.models.flux.policy import FluxPolicy
from g2rpo.runtime.interrupt import Interrupt
from g2rpo.runtime.processes import any_process, gathered, rank, world_size
from g2rpo.runtime.progress import show_progress

KINDS = ("evaluation", "gallery")
TOGETHER = 256
"""Pictures, about, that two models draw together; each is loaded anew for every such lot."""


@dataclass(frozen=True)
class Drawing:
    """What every model draws, and how.

    Attributes:
        prompts: each drawn `num_images` times; steps: numbers of Euler steps, each a set of its own.
        seed: picture i (prompt by prompt) has seed + i. shift: None: as the first model's files say.
        asked: arguments of `open_policy` (guidance, resolution, precision); None: the first model's own.
        base: model that LoRAs and bare weights belong to. batch: pictures a forward.
        then: a model that takes the last steps of all others (MixGRPO's hybrid inference, 2507.21802).
        first_share: of the steps, that they take first.
    """

    prompts: tuple[Prompt, ...]
    steps: tuple[int, ...]
    num_images: int = 1
    seed: int = 0
    shift: float | None = 3.0
    asked: Mapping[str, Any] = field(default_factory=dict)
    base: str | None = None
    device: str = "auto"
    batch: int = 16
    then: str | None = None
    first_share: float = 0.6

    def __post_init__(self) -> None:
        if not self.prompts:
            raise ValueError("no prompts: give a file of prompts or world:NAME")
        if not self.steps or any(n < 1 for n in self.steps) or len(set(self.steps)) < len(self.steps):
            raise ValueError(
                f"steps={','.join(map(str, self.steps))}: give numbers of denoising steps, at least 1 and "
                "each once, such as 10,20,50"
            )
        if self.num_images < 1 or self.batch < 1:
            raise ValueError(f"num_images={self.num_images}, batch={self.batch}: both are at least 1")
        if not 0 < self.first_share < 1:
            raise ValueError(f"first_share={self.first_share}: a share of the steps, between 0 and 1")
        if self.then is not None and min(self.steps) < 2:
            raise ValueError(f"one step cannot be shared with {self.then}: give 2 steps or more")

    def first_steps(self, steps: int) -> int:
        """How many of them come before `then` takes over: its share, rounded, but both take at least one."""
        return min(max(1, round(self.first_share * steps)), steps - 1)

    @property
    def every(self) -> list[Prompt]:
        """The prompt of each picture."""
        return [prompt for prompt in self.prompts for _ in range(self.num_images)]

    @property
    def seeds(self) -> list[int]:
        """The seed of each picture."""
        return image_seeds(self.seed, len(self.prompts) * self.num_images)

    def batches(self) -> Iterator[range]:
        """Places of the pictures of each batch."""
        count = len(self.prompts) * self.num_images
        return (range(low, min(low + self.batch, count)) for low in range(0, count, self.batch))

    def identity(self) -> dict[str, Any]:
        """What a picture depends on beside its model and number of steps, as JSON values."""
        return {
            "prompts": len(self.prompts),
            "prompts_hash": prompts_hash(self.prompts),
            "num_images": self.num_images,
            "seed": self.seed,
            "shift": "pipeline" if self.shift is None else float(self.shift),
            "base": self.base,
            **({} if self.then is None else {"then": self.then, "first_share": self.first_share}),
            **{name: value for name, value in self.asked.items() if value is not None},
        }


class Lineup:
    """Models, what they draw, and what of it is in OUT.

    Attributes:
        labels: of the models, in order. conditions, shift: what all are drawn with, once it is known.
    """

    def __init__(
        self,
        kind: str,
        models: Sequence[str],
        drawing: Drawing,
        out: Path,
        *,
        labels: Sequence[str] | None = None,
        more: Mapping[str, Any] | None = None,
        say: Callable[[str], None] = print,
    ) -> None:
        """Looks at the models' files and at OUT; loads and writes nothing.

        Args:
            kind: "evaluation" or "gallery". more: other settings that OUT belongs to.

        Raises:
            ValueError: no such model, or OUT belongs to something else.
        """
        self.drawing, self.out, self.say = drawing, out, say
        self.labels = labels_of(models, labels)
        self.models = dict(zip(self.labels, models, strict=True))
        for model in [*models, *([] if drawing.then is None else [drawing.then])]:
            check_model(model, drawing.base)
        self.conditions: dict[str, Any] | None = None
        self.shift: float | None = drawing.shift
        self.described: dict[str, str] = {}
        self._file = out / f"{kind}.json"
        more = {**(more or {}), **({} if drawing.then is None else {"then_state": model_state(drawing.then)})}
        self._settings = json.loads(json.dumps({**drawing.identity(), **more}, default=str))
        self._identities = {
            label: {"model": model, "state": model_state(model)} for label, model in self.models.items()
        }
        self._read(kind)

    def _read(self, kind: str) -> None:
        others = [self.out / f"{other}.json" for other in KINDS if other != kind]
        if taken := next((file for file in others if file.exists()), None):
            raise ValueError(f"{self.out} holds something else ({taken.name}); name another --out")
        if not self._file.is_file():
            if taken := next((self.out / one for one in self.labels if (self.out / one).exists()), None):
                raise ValueError(f"{taken} is not of this command (no {self._file.name}); name another --out")
            return
        try:
            before = json.loads(self._file.read_text(encoding="utf-8"))
            settings, models, steps = before["settings"], before["models"], before["steps"]
            self.conditions, self.shift = before["conditions"], before["shift"]
            self.described = before["described"]
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{self._file} is not of this command; name another --out") from error
        differences = [
            f"  {name}: {settings.get(name)} there, {self._settings.get(name)} given"
            for name in {**settings, **self._settings}
            if settings.get(name) != self._settings.get(name)
        ]
        for label, one in models.items():
            if label not in self._identities:
                differences.append(f"  models: {one['model']} ({label}) is there, and not given")
            elif self._identities[label] != one:
                differences.append(f"  {label}: another model than there, or changed since")
        if next(iter(models), None) != self.labels[0]:
            differences.append(f"  the first model is {next(iter(models))} there, {self.labels[0]} here")
        if left_out := sorted(set(steps) - set(self.drawing.steps)):
            differences.append(f"  steps: {', '.join(map(str, left_out))} there, and not given")
        if differences:
            raise ValueError(
                f"{self.out} holds pictures of other settings:\n"
                + "\n".join(differences)
                + "\nGive those again (models and steps may be added), or name another --out."
            )

    def write(self) -> None:
        """OUT/<kind>.json, by the first process."""
        if rank():
            return
        self.out.mkdir(parents=True, exist_ok=True)
        record = {
            "settings": self._settings,
            "models": self._identities,
            "steps": list(self.drawing.steps),
            "conditions": self.conditions,
            "shift": self.shift,
            "described": self.described,
        }
        write_whole(self._file, json.dumps(record, indent=2, ensure_ascii=False) + "\n")

    def file(self, label: str, steps: int, place: int) -> Path:
        """Where picture `place` lies."""
        return self.out / label / str(steps) / f"{place:05d}.png"

    def draw(self, label: str, interrupt: Interrupt) -> None:
        """What a model has not drawn yet; every process calls it.

        Raises:
            KeyboardInterrupt: on all processes, after a signal to any; what is drawn is kept.
            ValueError: as `open_policy`.
        """
        missing = [
            (steps, batch)
            for steps in self.drawing.steps
            for batch in self.drawing.batches()
            if not all(self.file(label, steps, place).is_file() for place in batch)
        ]
        missing = gathered(missing)[0]  # one view of the disk, before anybody draws this model
        if any_process(interrupt.requested):
            raise KeyboardInterrupt
        if not missing:
            if self.conditions is not None:
                self.write()
            return
        policy = self._open(self.models[label])
        if self.conditions is None:
            self.conditions = policy.conditions
        if self.shift is None:
            self.shift = pipeline_shift(policy.folder, policy.latent_shape[0])
        self.write()
        count = sum(len(batch) for _, batch in missing)
        self.say(f"{label}: {count} pictures to draw" + self._other_conditions(label))
        if len(missing) < world_size():
            self.say(
                f"{len(missing)} batches for {world_size()} processes; a smaller --batch occupies them all"
            )
        held, mine = [policy], missing[rank() :: world_size()]
        del policy
        interrupt.together(lambda: self._draw(held, label, mine))
        held.clear()
        gc.collect()  # a FluxPolicy's hook refers back to it, so it does not go by itself
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def _open(self, model: str) -> FluxPolicy:
        asked = {name: value for name, value in self.drawing.asked.items() if value is not None}
        with_ = asked | (self.conditions or {})
        return open_policy(model, base=self.drawing.base, device=self.drawing.device, **with_)

    def _shared(self, label: str) -> bool:
        """Whether another model takes its last steps."""
        return self.drawing.then not in (None, self.models[label])

    def _lots(self, label: str, todo: Sequence[tuple[int, range]]) -> Iterator[tuple[int, list[int]]]:
        """(steps, places) drawn at once: a batch; whole batches of one number of steps for two models."""
        size = max(1, TOGETHER // self.drawing.batch) if self._shared(label) else 1
        for steps in dict.fromkeys(n for n, _ in todo):
            batches = [batch for n, batch in todo if n == steps]
            for low in range(0, len(batches), size):
                yield steps, [place for batch in batches[low : low + size] for place in batch]

    def _images(self, held: list[FluxPolicy], label: str, steps: int, places: Sequence[int]) -> Tensor:
        assert self.shift is not None
        every, known = self.drawing.every, self.drawing.seeds
        texts, seeds = [every[place].text for place in places], [known[place] for place in places]
        if not self._shared(label):
            return sample_images(
                held[0], texts, num_steps=steps, shift=self.shift, seeds=seeds, batch=len(places)
            )
        then, first = self.drawing.then, self.drawing.first_steps(steps)
        assert then is not None
        segments = [
            Segment(lambda: held.pop() if held else self._open(self.models[label]), first),
            Segment(lambda: self._open(then), steps - first),
        ]
        return sample_segments(segments, texts, shift=self.shift, seeds=seeds, batch=self.drawing.batch)

    def _draw(self, held: list[FluxPolicy], label: str, todo: Sequence[tuple[int, range]]) -> None:
        every, seeds, done = self.drawing.every, self.drawing.seeds, 0
        assert self.shift is not None and self.conditions is not None
        total = sum(len(batch) for _, batch in todo)
        with show_progress(total, "pictures", "drawing", Console(stderr=True, quiet=rank() > 0)) as progress:
            for steps, batch in self._lots(label, todo):
                images = self._images(held, label, steps, batch)
                info: dict[str, Any] = {"model": self.models[label], "num_steps": steps, "shift": self.shift}
                if self._shared(label):
                    info |= {"first_steps": self.drawing.first_steps(steps), "then": self.drawing.then}
                for image, place in zip(images, batch, strict=True):
                    path = self.file(label, steps, place)
                    unfinished = path.with_suffix(".new.png")
                    own = {"seed": seeds[place], **info, **self.conditions}
                    save_png(image, unfinished, every[place].text, own)
                    os.replace(unfinished, path)
                done += len(batch)
                progress(done)

    def _other_conditions(self, label: str) -> str:
        """What a model would have drawn with by itself, where that is something else."""
        own, used = own_conditions(self.models[label]), self.conditions or {}
        other = [
            f"{name} {used.get(name)} (its own: {value})"
            for name, value in own.items()
            if used.get(name) != value
        ]
        as_ = "as asked" if label == self.labels[0] else f"as {self.labels[0]}, or as asked"
        return f", with {', '.join(other)}, {as_}" if other else ""


def write_whole(path: Path, text: str) -> None:
    """A text file in place of the one before, never half of it."""
    new = path.with_suffix(".new")
    new.write_text(text, encoding="utf-8")
    os.replace(new, path)
