"""The guard of a run: after each evaluation it decides whether the run still improves what it should.

It compares the evaluation with the earlier ones, whose scores of every image are in RUN/evaluations, by the
rule of guard_rule.py. It draws no random number and changes no value of the run, and it keeps no state that a
checkpoint would have to store: a resumed run decides as an undisturbed one.

untrained metrics   the rewards of `eval_rewards` that are not trained; without one, and with the embedded
                    model and its prompts, the rewards of the embedded world; otherwise image statistics alone
warning             a line on the console and in RUN/warnings.jsonl, once per kind and metric
best checkpoint     at the first sign of a fall, RUN/best names the checkpoint nearest to the best
                    evaluation, so that it is not removed; with `keep_best` that checkpoint is exact
`on_warning`        "warn" goes on; "stop" saves a checkpoint and ends the run; "rollback" ends it as well,
                    and RUN/latest names the best checkpoint, so that every command opens the best weights

A rollback does not train on. The same data, in the same order, with the same reward, led to the warning; what
should change (a lower rate, a KL term, another reward) is for the user to decide, and makes another run.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from g2rpo.config.settings import Settings
from g2rpo.evaluation.guard_values import GuardValues
from g2rpo.evaluation.reward_drift import REPEATED, SCORES
from g2rpo.models.tiny import is_tiny
from g2rpo.rewards.base import Reward
from g2rpo.rewards.registry import CheckedReward, load_rewards
from g2rpo.rollouts.explore import Exploration
from g2rpo.run.best import kept_best
from g2rpo.run.folder import BEST, LATEST, STEP, damage, named_checkpoints, step_name, write_pointer
from g2rpo.run.metrics import read_metrics
from g2rpo.run.run import RunStopped
from g2rpo.run.warnings_file import append_warning, read_warnings
from g2rpo.runtime.processes import gathered, rank
from g2rpo.runtime.records import DamagedFile, read_record
from g2rpo.training.falls import Array, Evaluation
from g2rpo.training.guard_rule import (
    Finding,
    drift_findings,
    fall_scores,
    image_findings,
    pending_best,
    reward_drifts,
    reward_findings,
    rollout_findings,
)

LOG = logging.getLogger(__name__)

EMBEDDED_REWARDS = ("verifier", "tiny_clip")
"""Metrics of the embedded world for runs of the embedded model without a held-out metric."""

CONDITIONS = ("prompts", "seeds", "num_steps")
"""Entries of an evaluation record that must agree for images to be compared."""


class Guard:
    """Reads the evaluations of a run folder and warns about a run that fails."""

    def __init__(
        self,
        settings: Settings,
        rewards: Mapping[str, CheckedReward],
        embedded: Mapping[str, Reward],
    ) -> None:
        """Prepares the guard of a run.

        Args:
            settings: of the run.
            rewards: those of the run by name, trained and evaluated.
            embedded: rewards of the embedded world that only the guard uses.
        """
        self.on_warning = settings.on_warning
        self.keep_best = settings.keep_best
        self.evaluates = bool(settings.eval_every and settings.eval_prompts)
        pointwise = [name for name, reward in rewards.items() if not reward.groupwise]
        self.trained = {n: w for n, w in settings.rewards.items() if n in pointwise}
        self.trained_in_rollouts = dict(settings.rewards)
        self.untrained = [n for n in pointwise if n not in settings.rewards]
        self.embedded = list(embedded)
        self.values = GuardValues(embedded, tuple(self.trained), self.metrics)
        self._records: dict[int, dict[str, Any]] = {}
        self._lines: list[dict[str, Any]] | None = None

    @staticmethod
    def of(settings: Settings, rewards: Mapping[str, CheckedReward], device: torch.device) -> Guard:
        """Makes the guard of a run, and loads the embedded rewards that stand in for a held-out metric."""
        held_out = [n for n, r in rewards.items() if n not in settings.rewards and not r.groupwise]
        is_embedded = is_tiny(settings.model) and (settings.eval_prompts or "").startswith("world:")
        names = [name for name in EMBEDDED_REWARDS if name not in settings.rewards]
        needed = is_embedded and bool(settings.eval_every and names) and not held_out
        return Guard(settings, rewards, load_rewards(names, device) if needed else {})

    def describe(self) -> str:
        """One line about what is compared, for the start of a run."""
        if not self.evaluates:
            return (
                "guard: without evaluations (eval_every=0) it checks only the rollouts, and cannot notice "
                "that a reward is exploited"
            )
        action = {
            "warn": "",
            "stop": "; a warning stops the run",
            "rollback": "; a warning returns to the best checkpoint",
        }
        trained = " + ".join(self.trained) or "no pointwise reward"
        if self.untrained:
            against = f"held-out {', '.join(self.untrained)}"
        elif self.embedded:
            against = (
                f"{', '.join(self.embedded)} of the embedded world, because no eval_rewards are held out"
            )
        else:
            against = (
                "image statistics alone (grid, blur, saturation), because no eval_rewards are held out; to "
                "notice that a reward is exploited, add a reward that is not trained to eval_rewards"
            )
        return f"guard: compares {trained} with {against}{action[self.on_warning]}"

    def observe(self, metrics: Mapping[str, Any]) -> None:
        """Takes the metrics of an iteration; the first process keeps what the rule needs of them."""
        if rank() == 0 and self._lines is not None:
            self._lines.append(self._kept(metrics))

    def _kept(self, line: Mapping[str, Any]) -> dict[str, Any]:
        return {
            name: value
            for name, value in line.items()
            if name in ("step", "guard/group_spread", "guard/latent_rms") or name.startswith("reward/")
        }

    def check(self, out: Path, step: int) -> list[Finding]:
        """Returns what is wrong after iteration `step`; the same on every process, which all must call this.

        The first process reads the run folder, pins the best checkpoint and writes warnings.jsonl.
        """
        found: list[Finding] = []
        if rank() == 0:
            found = self.findings(out, step)
            best = pending_best(*self.compared(step))
            if best is not None:
                self._pin(out, best)
            found = self._new(out, step, found)
        return gathered(found)[0]

    def findings(self, out: Path, step: int) -> list[Finding]:
        """What the run folder shows after iteration `step`; writes nothing and does not communicate."""
        self._read(out, step)
        evaluations, trained, untrained = self.compared(step)
        found = reward_findings(evaluations, trained, untrained) + drift_findings(evaluations)
        found += image_findings(evaluations)
        lines = [line for line in self._lines or [] if line["step"] <= step]
        return found + rollout_findings(lines, self.trained_in_rollouts, self.evaluates)

    def compared(self, step: int) -> tuple[list[Evaluation], dict[str, float], list[str]]:
        """The evaluations until one of `step`, and the trained and the untrained metrics; none otherwise."""
        if step not in self._records:
            return [], {}, []
        evaluations = self._evaluations(step)
        scores = evaluations[-1].scores
        trained = {name: weight for name, weight in self.trained.items() if name in scores}
        return evaluations, trained, [name for name in self.untrained or self.embedded if name in scores]

    def metrics(self, out: Path, step: int) -> dict[str, float]:
        """Returns guard/fall_z/<metric> and guard/reward_drift/<reward>, on the first process.

        They are of the evaluation after iteration `step`.
        """
        if rank():
            return {}
        self._read(out, step)
        evaluations, trained, untrained = self.compared(step)
        if len(evaluations) < 2:
            return {}
        drifts = {f"guard/reward_drift/{n}": change for n, (change, _) in reward_drifts(evaluations).items()}
        falls = fall_scores(evaluations, trained, untrained)
        return {f"guard/fall_z/{name}": z for name, z in falls.items()} | drifts

    def stopped(self, out: Path, step: int, found: Sequence[Finding]) -> RunStopped:
        """The error that ends a run with on_warning stop or rollback, whose checkpoint of `step` is saved."""
        reasons = "; ".join(finding.message for finding in found)
        name, reward = kept_best(out)
        best = f"RUN/best is {name}, the best by {reward}" if name else "no checkpoint is marked as the best"
        if self.on_warning == "rollback" and name:
            if rank() == 0:
                write_pointer(out / LATEST, name)
            did = f"rolled back: {out} now opens {name}, the best by {reward}"
        else:
            did = f"stopped, with a checkpoint of iteration {step}; {best}"
        return RunStopped(
            f"iteration {step}: {reasons}. on_warning={self.on_warning!r}: {did}. The same command would end "
            "here again: start a new run (out=FOLDER) with a lower lr, a KL term (kl_beta) or another "
            "reward, or continue with on_warning=warn (docs/guard.md)"
        )

    def _read(self, out: Path, step: int) -> None:
        """Reads the records and the metrics that are not in memory yet."""
        folder = out / "evaluations"
        paths = sorted(folder.glob("step_*.json")) if self._lines is None else []
        for path in dict.fromkeys([*paths, folder / f"{step_name(step)}.json"]):
            match = STEP.fullmatch(path.stem)
            if match is None or int(match[1]) > step or not path.is_file():
                continue
            try:
                self._records[int(match[1])] = read_record(path)
            except DamagedFile as error:
                LOG.warning("the guard skips an evaluation: %s", error)
        if self._lines is None:
            file = out / "metrics.jsonl"
            lines = read_metrics(file) if file.is_file() else []
            self._lines = [self._kept(line) for line in lines if "seconds" in line]

    def _evaluations(self, step: int) -> list[Evaluation]:
        """The evaluations until that of `step` that have the same images."""
        steps = sorted(n for n in self._records if n <= step)
        last = self._records[step]
        alike = [n for n in steps if all(self._records[n].get(c) == last.get(c) for c in CONDITIONS)]
        names = [*last["scores"], *last.get("guard_scores", {})]
        return [self._evaluation(n, last, names) for n in alike]

    def _evaluation(self, step: int, last: Mapping[str, Any], names: Sequence[str]) -> Evaluation:
        record = self._records[step]
        scores = record["scores"] | record.get("guard_scores", {})
        images = len(last["prompts"])

        def is_same(name: str) -> bool:
            return all(
                record.get(k, {}).get(name) == last.get(k, {}).get(name) for k in ("judges", "options")
            )

        def of(name: str) -> Array:
            values = scores.get(name) if is_same(name) else None
            return np.full(images, np.nan) if values is None else np.array(values, dtype=np.float64)

        def entry(key: str) -> dict[str, Array]:
            return {name: np.array(values, dtype=np.float64) for name, values in record.get(key, {}).items()}

        first_images, repeated = (
            {name: values for name, values in entry(key).items() if is_same(name)}
            for key in (SCORES, REPEATED)
        )
        return Evaluation(
            step, {name: of(name) for name in names}, entry("statistics"), first_images, repeated
        )

    def _new(self, out: Path, step: int, found: Sequence[Finding]) -> list[Finding]:
        """Writes the warnings that are new, and returns them; with stop and rollback those known as well."""
        if not found:
            return []
        known = {(line["kind"], line.get("metric")) for line in read_warnings(out)}
        new = [finding for finding in found if (finding.kind, finding.metric) not in known]
        for finding in new:
            append_warning(
                out, step, finding.kind, finding.message, metric=finding.metric, **dict(finding.details)
            )
        return new if self.on_warning == "warn" else list(found)

    def _pin(self, out: Path, best_step: int) -> None:
        """Makes RUN/best name the intact checkpoint nearest to the best evaluation.

        With `keep_best` the run has marked it already.
        """
        if self.keep_best is not None:
            return
        steps = [n for n, path in named_checkpoints(out / "checkpoints") if not damage(path)]
        if steps:
            nearest = min(steps, key=lambda n: (abs(n - best_step), n))
            metric = (self.untrained or self.embedded or list(self.trained) or ["guard"])[0]
            write_pointer(out / BEST, step_name(nearest), metric)


def latent_metrics(samples: Exploration) -> dict[str, float]:
    """Size and variety of this process's rollouts of an iteration.

    Returns:
        guard/latent_rms, the root mean square of the clean latents; guard/group_spread, the standard
        deviation within the groups, relative to it; guard/velocity_rms/<k> of each noise step, where the
        rollout knows the velocity.
    """
    latents = samples.latents.float()
    size = latents.square().mean().sqrt()
    spread = latents.var(2, correction=0).mean().sqrt() / size
    values = {"guard/latent_rms": size, "guard/group_spread": spread}
    if samples.velocity is not None:
        each = samples.velocity.float().square().flatten(1).mean(1).sqrt()
        values |= {f"guard/velocity_rms/{k}": v for k, v in zip(samples.plan.noise_steps, each, strict=True)}
    return dict(zip(values, torch.stack(list(values.values())).double().tolist(), strict=True))


def mean_over_processes(metrics: Mapping[str, float]) -> dict[str, float]:
    """Replaces the values of guard/* by their means over the processes, which all must call this."""
    own = {name: value for name, value in metrics.items() if name.startswith("guard/")}
    every = gathered(own)
    return {**metrics, **{name: sum(of[name] for of in every) / len(every) for name in own}}
