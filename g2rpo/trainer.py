"""The training loop: one for every algorithm and every model.

    prompts -> conditioning -> rollout (explore, decode, score) -> advantages -> loss -> update -> metrics

The policy, the rewards and the algorithm come from the settings; nothing here asks which they are. A run
writes its folder as it goes and can be stopped at any moment: Ctrl-C (or SIGTERM) abandons a rollout, but
never an update, and leaves a checkpoint from which the same command goes on with the same numbers.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from g2rpo.algorithms import Algorithm
from g2rpo.before_after import Change, Comparison
from g2rpo.checkpoint import latest_checkpoint, load_checkpoint, read_state, save_checkpoint
from g2rpo.conditioning import EmbeddingCache
from g2rpo.config import check_same_run, read_settings
from g2rpo.distributed import seed_everything
from g2rpo.explore import sample
from g2rpo.interrupt import Interrupt, interruptible
from g2rpo.metrics import MetricsWriter, Progress, read_metrics
from g2rpo.models import resolve_device
from g2rpo.models.flux import FluxPolicy
from g2rpo.options import make_algorithm
from g2rpo.policy import Conditioning
from g2rpo.prompts import PromptStream, read_prompts
from g2rpo.reward_stats import invalid_share, reward_metrics, why_invalid
from g2rpo.rewards import CheckedReward, load_rewards
from g2rpo.rollout import Rollout, score
from g2rpo.run import Run, RunStopped
from g2rpo.saved import policy_of
from g2rpo.schedule import shifted_sigmas
from g2rpo.settings import Settings
from g2rpo.update import NotFinite, advantages_of, holding, learning_rate, reference_of, rows_of, update
from g2rpo.watch import PictureSet, Schedule, Watcher, write_curves


def train(settings: Settings) -> Run:
    """Train as the settings say, or go on where their run folder stopped.

    Raises:
        ValueError: settings or files that do not fit, before any model is loaded.
        RunStopped: too many samples without a reward, or a gradient that is not a number.
    """
    return Trainer(settings).run()


class Trainer:
    """State of a run: the policy, its optimizer, and how far it got."""

    def __init__(self, settings: Settings) -> None:
        if (processes := int(os.environ.get("WORLD_SIZE", "1"))) > 1:
            raise ValueError(
                f"started as one of {processes} processes (WORLD_SIZE={processes}), which would all write "
                f"{settings.out}: a run is one process so far; start it without torchrun"
            )
        settings = settings.resolved()
        settings.check_files()
        self.settings = settings
        self.out = Path(settings.out).expanduser()
        prompts, report = read_prompts(settings.prompts)
        eval_prompts = read_prompts(settings.eval_prompts)[0] if settings.eval_prompts else []
        eval_prompts = eval_prompts[: settings.num_eval_prompts]
        self.algorithm: Algorithm = make_algorithm(settings.algorithm, settings.algorithm_options())
        self.stream = PromptStream(prompts, settings.seed)
        self.checkpoint = self._checkpoint_to_resume()
        met = self.stream.at(0, settings.iterations * settings.prompts_per_iteration)
        self.comparison = Comparison.of(
            settings.compare_images, settings.eval_num_steps, met, prompts, eval_prompts
        )
        if self.checkpoint is not None and read_state(self.checkpoint)["iteration"] > 0:
            self.comparison = self.comparison.resumed(self.out)
        self.prompt_report = "; ".join(filter(None, (str(report), self.comparison.note)))

        if settings.deterministic:
            torch.use_deterministic_algorithms(True)
        # Rewards first: a misspelt one must not show only after gigabytes of policy were read.
        names = list(dict.fromkeys([*settings.rewards, *settings.eval_rewards]))
        self.rewards: dict[str, CheckedReward] = load_rewards(names, resolve_device(settings.device))
        self.policy: FluxPolicy = policy_of(settings)
        self.cache = EmbeddingCache(settings.cache)
        self.sigmas = shifted_sigmas(self.algorithm.num_steps, self.algorithm.shift)
        self.parameters = {n: p for n, p in self.policy.module.named_parameters() if p.requires_grad}
        self.optimizer = torch.optim.AdamW(
            self.parameters.values(),
            lr=settings.lr,
            betas=(settings.adam_beta1, settings.adam_beta2),
            eps=settings.adam_eps,
            weight_decay=settings.weight_decay,
            fused=True,
        )
        self.ema = {n: p.detach().clone() for n, p in self.parameters.items()} if settings.ema_decay else {}
        self.reference = reference_of(self.policy, bool(settings.lora_rank)) if settings.kl_beta else None
        self.step = 0
        self.watcher = Watcher(
            self.policy, self.rewards, self.cache, settings.eval_num_steps, self.algorithm.shift,
            settings.rollout_batch,
        )  # fmt: skip
        shown = prompts[: settings.num_sample_prompts]
        self.schedule = Schedule(
            PictureSet.of("evaluation", eval_prompts) if eval_prompts and settings.eval_every else None,
            PictureSet.of("own prompts", shown, settings.num_sample_prompts),
            settings.eval_every,
            settings.sample_every,
        )

    def _checkpoint_to_resume(self) -> Path | None:
        """The run folder's newest checkpoint, if these settings go on from it. Before any model is loaded."""
        settings = self.settings
        begun = (self.out / "config.toml").is_file()
        checkpoint = latest_checkpoint(self.out)
        if settings.resume == "never" and (begun or checkpoint is not None):
            raise ValueError(f"{self.out} holds a run and resume='never'; give another out=FOLDER")
        if settings.resume == "latest" and checkpoint is None:
            raise ValueError(f"resume='latest', but {self.out} holds no checkpoint; drop it to start a run")
        if begun or checkpoint is not None:
            check_same_run(read_settings(self.out), settings)
        if checkpoint is not None and (done := read_state(checkpoint)["iteration"]) > settings.iterations:
            raise ValueError(
                f"iterations={settings.iterations}, but {self.out} has done {done}; give at least so many"
            )
        return checkpoint

    def run(self) -> Run:
        """The loop."""
        settings = self.settings
        if self.checkpoint is not None:
            state = {"module": self.policy.module, "optimizer": self.optimizer}
            rest = load_checkpoint(self.checkpoint, state | ({"ema": self.ema} if self.ema else {}))
            self.step = rest["iteration"]
        else:  # a checkpoint brings its generators with it
            seed_everything(settings.seed)
        self.out.mkdir(parents=True, exist_ok=True)
        (self.out / "config.toml").write_text(settings.to_toml(), encoding="utf-8")
        last = min(settings.iterations, settings.stop_after or settings.iterations)
        changes: list[Change] = []
        writer = MetricsWriter(self.out, resumed_step=self.step or -1, tensorboard=settings.tensorboard)
        with writer, Progress(settings.iterations, self.step) as progress, interruptible() as interrupt:
            progress.note(self._described())
            try:
                self._embed(progress)
                if self.step == 0 and self.comparison.sets:
                    progress.note("drawing with the untrained model")
                    self.comparison.draw_before(self.watcher, self.out)
                self._watch(writer, progress, missing=self.step > 0)  # an interrupt may have cut it off
                while self.step < last:
                    self._iterate(writer, progress, interrupt)
                    self._watch(writer, progress)
                    if self.step % settings.checkpoint_every == 0 or self.step == last:
                        self.save()
                    if interrupt.asked:
                        raise KeyboardInterrupt
                if self.step == settings.iterations:
                    changes = self._after(progress)
            except KeyboardInterrupt:
                self.save()
                progress.note(f"interrupted; {self.step} iterations are saved, the same command goes on")
                return Run(self.out, self.step, False, True)
            except NotFinite as error:
                if error.steps_done == 0:  # else the weights are half an update on
                    self.save()
                kept = latest_checkpoint(self.out)
                raise RunStopped(
                    f"iteration {self.step + 1}: {error}. "
                    f"{f'The newest checkpoint is {kept}' if kept else 'There is no checkpoint yet'}; "
                    "the same command would end here again: start another out=FOLDER with a lower lr, or "
                    "look at the rewards of that iteration"
                ) from error
        write_curves(self.out / "curve.png", read_metrics(self.out / "metrics.jsonl"))
        return Run(self.out, self.step, self.step == settings.iterations, False, changes)

    def _iterate(self, writer: MetricsWriter, progress: Progress, interrupt: Interrupt) -> None:
        began = time.perf_counter()
        rollouts, cond, told = self.explore()
        with interrupt.deferred():  # an update and its line of metrics belong together
            learned = self.learn(rollouts, cond)
            metrics = {"step": self.step, "seconds": time.perf_counter() - began, **told, **learned}
            writer.write(metrics)
        progress.update(metrics)

    def explore(self) -> tuple[list[Rollout], Conditioning, dict[str, float]]:
        """First half of an iteration: its prompts, what the policy makes of them, what the rewards say."""
        settings, algorithm = self.settings, self.algorithm
        began = time.perf_counter()
        position = self.step * settings.prompts_per_iteration
        prompts = self.stream.at(position, settings.prompts_per_iteration)
        texts, metadata = [p.text for p in prompts], [p.metadata for p in prompts]
        cond = self.cache.get(self.policy, texts)
        samples = sample(
            self.policy,
            algorithm.plan.plan(algorithm.num_steps, settings.seed, self.step),
            self.sigmas,
            cond,
            group_size=settings.group_size,
            diffusion=algorithm.diffusion,
            eta=algorithm.eta,
            seed=settings.seed,
            iteration=self.step,
            prompt_indices=range(position, position + len(prompts)),
            rollout_batch=settings.rollout_batch,
            noise=settings.noise,
        )
        if self.policy.device.type == "cuda":
            torch.cuda.synchronize(self.policy.device)  # else its last forwards count as scoring
        explored = time.perf_counter()
        trained = {name: self.rewards[name] for name in settings.rewards}
        rollouts = score(self.policy, samples, trained, texts, metadata, decode_batch=settings.decode_batch)
        self._check_valid(rollouts)
        told = {"seconds_rollout": explored - began, "seconds_score": time.perf_counter() - explored}
        return rollouts, cond, {"nfe": samples.nfe["total"], **told}

    def learn(self, rollouts: Sequence[Rollout], cond: Conditioning) -> dict[str, float]:
        """Second half: advantages, loss, optimizer. Counts the iteration."""
        settings, algorithm = self.settings, self.algorithm
        began = time.perf_counter()
        advantages = advantages_of(rollouts, algorithm, list(settings.rewards.values()))
        rate = learning_rate(
            settings.lr, self.step, settings.iterations, settings.warmup_iterations, settings.lr_schedule
        )
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        learned = update(
            self.policy,
            algorithm,
            rows_of(rollouts, advantages),
            cond,
            self.sigmas,
            self.optimizer,
            max_grad_norm=settings.max_grad_norm,
            update_batch=settings.update_batch,
            reference=self.reference,
        )
        self._average()
        self.step += 1
        rewards = reward_metrics(rollouts, list(settings.rewards), advantages, algorithm.advantage_clip)
        return {**rewards, **learned, "lr": rate, "seconds_update": time.perf_counter() - began}

    @torch.no_grad()
    def _average(self) -> None:
        if self.ema:
            # Young averages follow quickly: the first iterations would otherwise be mostly the base model.
            decay = min(self.settings.ema_decay, (self.step + 1) / (self.step + 10))
            torch._foreach_lerp_(list(self.ema.values()), list(self.parameters.values()), 1 - decay)

    def _check_valid(self, rollouts: Sequence[Rollout]) -> None:
        share = invalid_share(rollouts)
        if share > self.settings.max_invalid_fraction:
            self.save()
            raise RunStopped(
                f"iteration {self.step + 1}: {share:.0%} of the samples have no reward "
                f"(max_invalid_fraction={self.settings.max_invalid_fraction}): "
                f"{why_invalid(rollouts, list(self.settings.rewards))}. A checkpoint of iteration "
                f"{self.step} is in {self.out}"
            )

    def save(self) -> None:
        """A checkpoint of the iterations done, unless it is there already."""
        latest = latest_checkpoint(self.out)
        if latest is not None and latest.name == f"step_{self.step:06d}":
            return
        state: dict[str, Any] = {
            "module": self.policy.module,
            "optimizer": self.optimizer,
            "prompt_position": self.step * self.settings.prompts_per_iteration,
        }
        save_checkpoint(
            self.out,
            self.step,
            state | ({"ema": self.ema} if self.ema else {}),
            keep_last=self.settings.keep_last,
            keep_every=self.settings.keep_every,
        )

    def _described(self) -> str:
        settings, count = self.settings, sum(p.numel() for p in self.parameters.values())
        plan = self.algorithm.plan.plan(self.algorithm.num_steps, settings.seed, self.step)
        nfe = plan.nfe(settings.group_size, self.policy.forwards_per_sample)["total"]
        what = f"adapters of rank {settings.lora_rank}" if settings.lora_rank else "all weights"
        where = f"from iteration {self.step} on, " if self.step else ""
        return (
            f"{settings.algorithm} on {settings.model}: {what} ({count / 1e6:.1f} M), "
            f"{settings.prompts_per_iteration} prompts x {nfe} forwards an iteration, {where}"
            f"{self.policy.device}, {settings.precision}; folder {self.out}\n{self.prompt_report}"
        )

    def _embed(self, progress: Progress) -> None:
        """Every prompt that the run will use through the text encoders, once; then they are dropped."""
        settings = self.settings
        per_iteration = settings.prompts_per_iteration
        ahead = self.stream.at(self.step * per_iteration, (settings.iterations - self.step) * per_iteration)
        texts = [p.text for p in ahead]
        for one in (self.schedule.evaluated, self.schedule.shown, *self.comparison.sets):
            texts += one.prompts if one is not None else ()
        missing = self.cache.missing(self.policy, list(dict.fromkeys(texts)))
        if missing:
            progress.note(f"embedding {len(missing)} prompts")
            self.cache.fill(self.policy, missing)
        self.policy.text.unload()

    def _watch(self, writer: MetricsWriter, progress: Progress, *, missing: bool = False) -> None:
        ends = self.step in (0, self.settings.iterations)
        with holding(self.parameters, self.ema):
            self.schedule.watch(
                self.watcher, self.out, self.step, writer, progress, ends=ends, missing=missing
            )

    def _after(self, progress: Progress) -> list[Change]:
        """The same pictures as before training, scored again: table, and pairs to look at."""
        if not self.comparison.sets:
            return []
        progress.note("drawing the same with the trained model")
        with holding(self.parameters, self.ema):
            return self.comparison.draw_after(self.watcher, self.out, list(self.settings.rewards))
