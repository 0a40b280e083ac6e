"""The training loop: one for every algorithm and every model.

    prompts -> conditioning -> rollout (explore, decode, score) -> advantages -> loss -> update -> metrics

The policy, the rewards and the algorithm come from the settings; the loop does not know which they are. A run
can be stopped at any moment: a stop signal, such as Ctrl-C, abandons a rollout, never an update, and leaves a
checkpoint from which the same command continues with the same numbers. A second request (see stop_signals)
ends the run at once, and the checkpoint before it counts.

With several processes (torchrun), each explores its share of the prompts of an iteration. The rewards, which
all processes need for advantages and metrics, are gathered, and the first process writes the files.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

from g2rpo.algorithms.base import Algorithm
from g2rpo.config.checks import check_files, check_tails
from g2rpo.config.loggers import check_installed
from g2rpo.config.settings import Settings
from g2rpo.costs.disk import check_disk, export_note
from g2rpo.costs.memory import agreed_rollout_batch
from g2rpo.data.embeddings import EmbeddingCache
from g2rpo.evaluation.before_after import Change
from g2rpo.evaluation.monitor import Evaluator, subject_of
from g2rpo.evaluation.plots import write_curves
from g2rpo.flow.schedule import shifted_sigmas
from g2rpo.models.options import PolicyOptions
from g2rpo.models.policy import Conditioning, Policy, has_adapters, root_module, trained_parameters
from g2rpo.models.registry import check_policy, load_policy
from g2rpo.objectives.base import Context
from g2rpo.objectives.group_records import group_records
from g2rpo.objectives.stats import invalid_share, reward_metrics
from g2rpo.rewards.base import GroupReward, Reward
from g2rpo.rewards.exits import RewardUnusable
from g2rpo.rewards.registry import CheckedReward
from g2rpo.rollouts.explore import explore
from g2rpo.rollouts.score import Rollout, score
from g2rpo.run.best import is_best, mark_best, refresh_best
from g2rpo.run.checkpoint import check_checkpoint_space, load_checkpoint, save_checkpoint
from g2rpo.run.environment import record_start
from g2rpo.run.folder import latest_checkpoint, load_newest, read_state, repair_latest
from g2rpo.run.groups import append_groups, truncate_groups
from g2rpo.run.lock import begin_run, exclusive
from g2rpo.run.loggers import Loggers, flat_settings
from g2rpo.run.metrics import MetricsWriter, read_metrics
from g2rpo.run.run import checkpoint_to_resume, describe_run, mark_finished, restart_note
from g2rpo.run.warnings_file import truncate_warnings
from g2rpo.runtime.interrupt import interruptible
from g2rpo.runtime.processes import (
    any_process,
    end_processes,
    environment_number,
    gathered,
    is_first_process,
    rank,
    resolve_device,
    run_together,
    start_processes,
    world_size,
)
from g2rpo.runtime.progress import RunProgress, note, phase
from g2rpo.runtime.random import random_state, seed_everything
from g2rpo.runtime.sharding import check_sharded, sharding_mesh
from g2rpo.runtime.timing import Timer, forget_peak_memory, peak_memory
from g2rpo.training.components import Components, fingerprint
from g2rpo.training.curriculum import Curriculum
from g2rpo.training.ema import follow, swapped_weights, update_ema
from g2rpo.training.embed import EmbeddingInterrupted, embed_missing
from g2rpo.training.guard import Guard, latent_metrics, mean_over_processes
from g2rpo.training.optimizer import learning_rate, make_optimizer, set_learning_rate
from g2rpo.training.preflight import Preflight
from g2rpo.training.result import Run, finished_run, finished_text, interrupted_run, run_progress
from g2rpo.training.reward_checks import loaded_and_checked
from g2rpo.training.run_prompts import RunPrompts
from g2rpo.training.side_files import rebuild_untrained
from g2rpo.training.step_checks import REWARD, StepChecks
from g2rpo.training.stops import invalid_text, not_finite, reward_exited, too_many_invalid
from g2rpo.training.update import NotFinite, reference_of, update, velocity_with


def train(settings: Settings) -> Run:
    """Trains with these settings, or resumes the run in their run folder.

    A run that is finished is not loaded again: a line says so, and its result is returned.

    Raises:
        ValueError: settings or files that do not fit, or another run is using the folder; raised before any
            model is loaded.
        RunStopped: too many samples without a reward, a reward whose code ended the program, or a gradient
            that is not finite.
    """
    out = Path(_absolute_folders(settings)["out"])
    if (done := finished_run(settings)) is not None:
        note(finished_text(done))
        return done
    try:
        with exclusive(out):
            return Trainer(settings).run()
    except EmbeddingInterrupted:
        return interrupted_run(out)
    finally:
        end_processes()


def _absolute_folders(settings: Settings) -> dict[str, str]:
    return {name: str(Path(getattr(settings, name)).expanduser().absolute()) for name in ("out", "cache")}


def _check_before_loading(settings: Settings, policy: Policy | None) -> None:
    options = getattr(policy, "options", None)
    for_sampling = isinstance(options, PolicyOptions) and not options.trainable
    if policy is not None and (for_sampling or not trained_parameters(policy)):
        raise ValueError(
            "the given policy has no weights to train: it was loaded for sampling (trainable=False), or none "
            "of its weights requires a gradient; use g2rpo.load_policy with PolicyOptions(trainable=True)"
        )
    check_files(settings)
    if is_first_process():  # the others have no loggers
        check_installed(settings.loggers)


def _start_processes(device: torch.device) -> None:
    start_processes(device)
    forget_peak_memory(device)


def _use_deterministic_algorithms() -> None:
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # else cuBLAS sums as memory allows
    torch.use_deterministic_algorithms(True)


class Trainer:
    """The state of a run: policy, optimizer, rewards, prompts, and the number of iterations done."""

    preflight: Preflight | None = None  # during the first iteration of a run

    def __init__(
        self,
        settings: Settings,
        *,
        policy: Policy | None = None,
        rewards: Mapping[str, Reward | GroupReward] | None = None,
        algorithm: Algorithm | None = None,
    ) -> None:
        """Loads what a run needs, and nothing of it before all settings and files are checked.

        Args:
            settings: settings of the run.
            policy: the policy to train, in place of the settings' `model`; its options (LoRA, precision,
                guidance, …) are its own, and those of the settings have no effect.
            rewards: name -> reward to train, in place of the settings' `rewards`.
            algorithm: the method, in place of the settings' `algorithm` and its options.

        Objects that are given here are recorded as "injected" in RUN/config.toml; give the same ones to
        resume the run.

        Raises:
            ValueError: settings or files that do not fit.
        """
        components = Components(policy, rewards, algorithm)
        self.recorded_settings = settings = components.recorded(settings)
        _check_before_loading(settings, policy)
        # Code of a reward may change the working directory; the run stays in its folders.
        settings = settings.model_copy(update=_absolute_folders(settings))
        processes = max(1, environment_number("WORLD_SIZE", 1))
        if settings.prompts_per_iteration % processes:
            raise ValueError(
                f"prompts_per_iteration={settings.prompts_per_iteration} groups cannot be divided evenly "
                f"among {processes} processes; use a multiple of {processes}, or start fewer processes"
            )
        device = resolve_device(settings.device)
        _start_processes(device)
        mesh = sharding_mesh(device, settings.shard_size)
        self.settings = settings
        self.out = Path(settings.out)
        prompts = RunPrompts.of(settings, policy)
        self.algorithm = components.make_algorithm(settings)
        self.objective = self.algorithm.objective()
        check_tails(settings, self.objective)
        self.stream, self.comparison, self.evaluation_plan = (
            prompts.stream,
            prompts.comparison,
            prompts.evaluation,
        )
        self.checkpoint = checkpoint_to_resume(settings)
        kept = {} if self.checkpoint is None else read_state(self.checkpoint)
        self.curriculum = Curriculum(self.stream, settings.skip_flat, kept.get("focus"))
        step = kept.get("iteration", 0)
        self.comparison = self.comparison.resumed(self.out) if step else self.comparison
        self.prompt_report = "; ".join(filter(None, (*prompts.lines, self.comparison.note)))

        if settings.deterministic:
            _use_deterministic_algorithms()
        options = settings.policy_options()
        if policy is None:
            check_policy(settings.model, options, mesh=mesh, family=settings.family)
        # Objects in their place have no closed formulas: for them `_run` checks when the weights are known.
        self.sizes_known = policy is None and algorithm is None
        check_disk(settings, needed=self.sizes_known and step < settings.iterations)
        # Rewards first: a misspelt one must not show only after gigabytes of policy were read.
        self.rewards: dict[str, CheckedReward] = run_together(
            lambda: loaded_and_checked(
                lambda: components.load_rewards(settings, device), settings, prompts, device, policy
            )
        )
        self.guard = Guard.of(settings, self.rewards, device)
        # Before the policy: on a small GPU both do not fit.
        embed_missing(settings, prompts.texts, device, policy, check=self.sizes_known)
        self.rollout_batch = agreed_rollout_batch(settings, device, kept.get("rollout_batch"))
        given_policy = policy is not None
        if policy is None:
            policy = load_policy(
                settings.model, options, device=settings.device, mesh=mesh, family=settings.family
            )
        self.policy = policy
        self.cache = EmbeddingCache(settings.cache)
        if self.policy.negative_prompt is not None:
            self.policy.set_negative(self.cache.get(self.policy, [self.policy.negative_prompt]))
        self.sigmas = shifted_sigmas(self.algorithm.num_steps, self.algorithm.shift)
        self.parameters = trained_parameters(self.policy)
        self._check_weights(given_policy, kept.get("initial"))
        self.optimizer = make_optimizer(self.parameters.values(), settings)
        self._copy_initial_weights()
        self.step, self.mid_update = 0, False  # mid_update: the weights are not those of `step` iterations
        # Of the checkpoint before; the next line of metrics tells it.
        self.checkpoint_seconds: dict[str, float] = {}
        self.evaluator = Evaluator(
            self.policy,
            {name: reward for name, reward in self.rewards.items() if not reward.groupwise},
            self.cache,
            settings.eval_num_steps,
            self.algorithm.shift,
            self.rollout_batch,
            self.guard.values,
        )

    def _check_weights(self, given_policy: bool, stored: str | None) -> None:
        """Checks the weights before training.

        Args:
            given_policy: the policy was given as an object. A named model is the same at every start; an
                object may have been trained in the meantime.
            stored: fingerprint of the weights with which the resumed run began; None: none was stored.
        """
        check_sharded(self.parameters)
        self.initial = fingerprint(self.parameters) if given_policy else ""
        if given_policy and stored is not None and stored != self.initial:
            raise ValueError(
                f"the run in {self.out} began with other weights than those of the given policy; give a "
                "policy with the weights from before the training: the trained weights are loaded from the "
                "checkpoint"
            )

    def _copy_initial_weights(self) -> None:
        """Copies the weights before training; must precede `_restore`, which loads those of a checkpoint.

        The reference of the KL stays as it is here. The average and the behaviour weights begin here, and a
        checkpoint replaces them.
        """
        objective = self.objective

        def copied(needed: bool) -> dict[str, torch.Tensor]:
            return {name: p.detach().clone() for name, p in self.parameters.items()} if needed else {}

        self.reference = (
            reference_of(self.policy, has_adapters(self.policy)) if objective.needs_reference else None
        )
        self.ema = copied(self.settings.ema_decay > 0)
        self.behaviour = copied(objective.lag is not None)

    def run(self) -> Run:
        """Trains until the last iteration, `stop_after`, or a signal.

        Raises:
            ValueError: too little disk space, or another run at work in the folder; nothing was trained.
            RunStopped: as `train`.
        """
        with exclusive(self.out):
            return self._run()

    def _run(self) -> Run:
        settings = self.settings
        rebuilt = self._rebuild_side_files()
        self._restore()
        last = min(settings.iterations, settings.stop_after or settings.iterations)
        check_checkpoint_space(self.out, self.parameters, self._copies(), last - self.step)
        notes = [*rebuilt, "" if self.checkpoint else restart_note(self.out)]
        notes += [export_note(settings)] if self.sizes_known else []
        begin_run(self.out, self.recorded_settings)
        if self.checkpoint is not None:
            repair_latest(self.out, self.checkpoint)
        truncate_warnings(self.out, self.step or -1)
        writer = MetricsWriter(self.out, resumed_step=self.step or -1)
        if rank() == 0:
            truncate_groups(self.out, self.step or -1)
            record_start(self.out, self.step, self.policy.device)
        writer.add_sink(self._loggers())
        with (
            writer,
            run_progress(self.out, settings.iterations, self.step) as progress,
            interruptible() as interrupt,
        ):
            self.interrupt, self.random = interrupt, random_state()
            progress.note(describe_run(settings, self.algorithm, self.policy, self.parameters, self.step))
            notes += [refresh_best(self.out, settings.keep_best, self.step), self.prompt_report]
            notes += [self.guard.describe()]
            self.preflight = Preflight.if_due(settings, self.step, progress.note)
            try:
                changes = self._train(writer, progress, last, notes)
            except KeyboardInterrupt:
                return self._stopped(progress)
            except RewardUnusable as error:  # on all processes, and never amid an update
                self.save()
                raise reward_exited(self.out, self.step, error) from error
            except NotFinite as error:
                self.checks.report(self.out, progress.note)
                if error.steps_done == 0:  # else the weights are half an update on
                    self.save()
                raise not_finite(self.out, self.step + 1, error) from error
            finished = self.step == settings.iterations
            if rank() == 0:  # before the loggers end, which may take a while
                write_curves(self.out / "curve.png", read_metrics(self.out / "metrics.jsonl"))
                if finished:
                    mark_finished(self.out, self.step)
        return Run(self.out, self.step, finished, False, changes)

    def _loggers(self) -> Loggers:
        """Starts the loggers of the settings."""
        return Loggers(
            self.settings.loggers,
            self.out,
            flat_settings(self.recorded_settings),
            resumed_step=self.step or -1,
            on_cpu=self.policy.device.type == "cpu",
        )

    def _rebuild_side_files(self) -> list[str]:
        """Writes damaged records of the untrained model again; returns notes that name them.

        Must precede `_restore`: the policy still has the weights with which the run began. Evaluations have
        seeds of their own, and the checkpoint brings the state of the random generators.
        """
        return rebuild_untrained(
            self.out, self.checkpoint, self.comparison, self.evaluation_plan, self.evaluator
        )

    def _restore(self) -> None:
        """Loads the checkpoint of a resumed run; seeds the random generators of a new one."""
        self.checks = StepChecks(self.settings.on_nonfinite, self.settings.max_skips)
        if self.checkpoint is None:
            seed_everything(self.settings.seed)
            return
        state = {"module": root_module(self.policy), "optimizer": self.optimizer, "focus": self.curriculum}
        state |= self._copies()
        with phase("loading the checkpoint"):
            loaded = load_newest(self.out, lambda path: load_checkpoint(path, state))  # with its generators
        if loaded is None:
            raise ValueError(f"{self.checkpoint} was removed while the run was starting")
        self.checkpoint, stored = loaded
        self.step = stored["iteration"]
        self.checks.load_state_dict(stored.get("step_checks", {}))  # earlier versions stored none

    def _copies(self) -> dict[str, dict[str, torch.Tensor]]:
        """Copies of the trained weights that a checkpoint stores, by their name in it."""
        copies = {"ema": self.ema, "behaviour": self.behaviour}
        return {name: tensors for name, tensors in copies.items() if tensors}

    def _train(
        self, writer: MetricsWriter, progress: RunProgress, last: int, notes: Sequence[str]
    ) -> list[Change]:
        """Runs the iterations, with the images and evaluations before, between and after them."""
        descriptions = run_together(lambda: [reward.describe() for reward in self.rewards.values()])
        for line in filter(None, (*notes, *descriptions)):
            progress.note(line)
        if self.step == 0 and self.comparison.sets:
            progress.note("drawing the images before training")
            with phase("images before training"):
                self.comparison.draw_before(self.evaluator, self.out)
        if self._evaluate(writer, progress, missing=self.step > 0):  # an interrupt may have cut it off
            self.save(best=True)
        if self.step > 0:
            self._heed_guard(progress)
        while self.step < last:
            self._iterate(writer, progress)
            best = self._evaluate(writer, progress)
            if best or self.step % self.settings.checkpoint_every == 0 or self.step == last:
                self._save_timed(best, progress)
            self._heed_guard(progress)
            if any_process(self.interrupt.requested):
                raise KeyboardInterrupt
        return self._after(writer, progress) if self.step == self.settings.iterations else []

    def _save_timed(self, best: bool, progress: RunProgress) -> None:
        began = time.perf_counter()
        self.save(best=best)
        seconds = time.perf_counter() - began
        self.checkpoint_seconds = {"seconds_checkpoint": seconds}
        reason = f"the best yet by {self.settings.keep_best}: " if best else ""
        progress.note(f"{reason}checkpoint in {seconds:.1f} s")

    def _heed_guard(self, progress: RunProgress) -> None:
        """Shows what the guard finds after this iteration, and ends the run if the settings say so."""
        found = self.guard.check(self.out, self.step)
        for finding in found:
            progress.note(f"warning after iteration {self.step}: {finding.message} (docs/guard.md)")
        if found and self.settings.on_warning != "warn":
            self.save()
            raise self.guard.stopped(self.out, self.step, found)

    def _stopped(self, progress: RunProgress) -> Run:
        """After a signal: saves the iterations done, unless a second signal interrupts an update or this."""
        try:
            if not self.mid_update and not self.interrupt.requested_again:
                self.save()
        except KeyboardInterrupt:
            pass
        stopped = interrupted_run(self.out)
        lost = f" (of {self.step}: the last ones could not be saved)" if stopped.step < self.step else ""
        progress.note(
            f"interrupted; {stopped.step} iterations are saved{lost}; run the same command to continue"
        )
        return stopped

    def _iterate(self, writer: MetricsWriter, progress: RunProgress) -> None:
        began, interrupt = time.perf_counter(), self.interrupt
        with (
            interrupt.deferred(),
            swapped_weights(self.parameters, self.behaviour),
            self.policy.resident(),  # all gather the weights together
        ):
            rollouts, cond, rollout_metrics = interrupt.together(self.explore)
        with interrupt.deferred():  # an update and its line of metrics belong together
            rollout_metrics = mean_over_processes(rollout_metrics)
            update_metrics = self.learn(rollouts, cond)
            self.checks.report(self.out, progress.note)
            self.checks.end_iteration()
            seconds = time.perf_counter() - began
            metrics = {"step": self.step, "seconds": seconds, **rollout_metrics, **update_metrics}
            memory = peak_memory(self.policy.device)
            writer.write(metrics | self.checkpoint_seconds | memory)
            self.guard.observe(metrics)
            self.checkpoint_seconds = {}
            self.mid_update, self.random = False, random_state()
        progress.update(metrics | memory)

    def explore(self) -> tuple[list[Rollout], Conditioning, dict[str, float]]:
        """First half of an iteration: takes its prompts, samples their groups and scores the images.

        Each process explores its share of the prompts; within `policy.resident()` nothing is communicated.

        Returns:
            Rollouts and conditioning of this process's prompts, and the metrics of forwards and times.
        """
        settings, algorithm = self.settings, self.algorithm
        timer = Timer(self.policy.device)
        share = settings.prompts_per_iteration // world_size()
        positions = self.curriculum.upcoming(settings.prompts_per_iteration)[rank() * share :][:share]
        prompts = [self.stream.at(position, 1)[0] for position in positions]
        texts, metadata = [p.text for p in prompts], [p.metadata for p in prompts]
        cond = self.cache.get(self.policy, texts)
        samples = explore(
            self.policy,
            algorithm.plan(settings.seed, self.step, self.curriculum.spread()),
            self.sigmas,
            cond,
            group_size=settings.group_size,
            diffusion=algorithm.diffusion,
            eta=algorithm.eta,
            seed=settings.seed,
            iteration=self.step,
            prompt_indices=positions,
            rollout_batch=self.rollout_batch,
            noise=settings.noise,
            timer=timer,
            tails=nullcontext if self.objective.needs_latents else self.policy.tails,
        )
        trained = {name: self.rewards[name] for name in settings.rewards}
        for reward in trained.values():
            reward.last_error = None
        rollouts = score(
            self.policy,
            samples,
            trained,
            texts,
            metadata,
            decode_batch=settings.decode_batch,
            keep_latents=self.objective.needs_latents,
            timer=timer,
            first_images=self.preflight.first_images() if self.preflight else None,
        )
        if self.preflight:
            self.preflight.score_again(trained, self.policy.device)
        seconds = {f"seconds_{part}": value for part, value in timer.seconds().items()}
        trained_rows = samples.plan.nfe(settings.group_size, self.policy.forwards_per_sample)["update"]
        a_row = algorithm.forwards_per_row(samples.plan, settings.group_size, settings.gradient_checkpointing)
        nfe = {
            "nfe": samples.nfe["total"] * world_size(),
            "nfe_update": settings.prompts_per_iteration * trained_rows * a_row,
        }
        return rollouts, cond, {**nfe, **seconds, **latent_metrics(samples)}

    def learn(self, rollouts: Sequence[Rollout], cond: Conditioning) -> dict[str, float]:
        """Second half of an iteration: advantages, loss, optimizer steps. Counts it; returns metrics."""
        settings, algorithm = self.settings, self.algorithm
        began = time.perf_counter()
        every_rollout = [r for share in gathered([r.for_statistics() for r in rollouts]) for r in share]
        self.checks.begin_iteration(
            self.step + 1, [self.stream.at(r.prompt_index, 1)[0].text for r in every_rollout]
        )
        enough_valid = self._enough_valid(every_rollout)
        advantages = algorithm.advantages(every_rollout, list(settings.rewards.values()))
        if self.preflight:
            self.preflight.observe(every_rollout, advantages)
        first = rank() * len(rollouts)
        own = [one.to(self.policy.device) for one in advantages[first : first + len(rollouts)]]
        rate = learning_rate(
            settings.lr, self.step, settings.iterations, settings.warmup_iterations, settings.lr_schedule
        )
        set_learning_rate(self.optimizer, rate)
        context = Context(
            self.sigmas.to(self.policy.device),
            algorithm.diffusion,
            algorithm.eta,
            settings.seed,
            self.step,
        )
        self.mid_update = True
        learned = {"loss": math.nan, "grad_norm": math.nan}  # of an iteration without an update
        if enough_valid:
            learned = update(
                self.policy,
                self.objective,
                self.objective.rows(rollouts, own, context).split(algorithm.update, settings.group_size),
                cond,
                self.optimizer,
                max_grad_norm=settings.max_grad_norm,
                update_batch=settings.update_batch,
                reference=self.reference,
                behaviour=(
                    velocity_with(self.policy, self.parameters, self.behaviour) if self.behaviour else None
                ),
                checks=self.checks,
                before_first_step=self._report_preflight,
            )
        update_ema(self.ema, self.parameters, settings.ema_decay, self.step)
        self.step += 1
        if rank() == 0:
            append_groups(self.out, group_records(self.step, every_rollout, settings.rewards, advantages))
        if self.objective.lag is not None:
            follow(self.behaviour, self.parameters, self.objective.lag(self.step))
        names = list(settings.rewards)
        groupwise = [name for name in names if self.rewards[name].groupwise]
        rewards = reward_metrics(every_rollout, names, advantages, algorithm.advantage_clip, groupwise)
        rewards |= self.curriculum.observe(every_rollout, advantages, names)
        return {**rewards, **learned, "lr": rate, "seconds_update": time.perf_counter() - began}

    def _report_preflight(self, ratio_noise: float | None) -> None:
        if self.preflight:
            self.preflight.report(ratio_noise, self.objective.ratio_clip, self.optimizer)
            self.preflight = None

    def _enough_valid(self, rollouts: Sequence[Rollout]) -> bool:
        """Whether enough samples have a reward; otherwise the update is skipped, or the run stops."""
        if invalid_share(rollouts) <= self.settings.max_invalid_fraction:
            return True
        own_errors = gathered({name: e for name, r in self.rewards.items() if (e := r.last_error)})
        errors = {name: error for errors in own_errors for name, error in errors.items()}
        if self.checks.may_skip(invalid_text(self.settings, rollouts, errors), REWARD):
            return False
        self.save()
        raise too_many_invalid(self.settings, self.step, rollouts, errors)

    def save(self, best: bool = False) -> None:
        """Writes a checkpoint of the iterations done, unless it exists; with `best`, RUN/best names it."""
        latest, reward = latest_checkpoint(self.out), self.settings.keep_best if best else None
        if latest is not None and latest.name == f"step_{self.step:06d}":
            return mark_best(self.out, self.step, reward) if reward is not None else None
        state: dict[str, Any] = {"module": root_module(self.policy), "optimizer": self.optimizer}
        state |= {"focus": self.curriculum, "rollout_batch": self.rollout_batch, "random": self.random}
        state |= {"initial": self.initial} if self.initial else {}
        state["step_checks"] = self.checks.state_dict()
        state |= self._copies()
        keep = {"keep_last": self.settings.keep_last, "keep_every": self.settings.keep_every}
        with self.interrupt.deferred(), phase("saving a checkpoint", repeated=True):  # half of one is none
            save_checkpoint(self.out, self.step, state, best=reward, **keep)

    def _evaluate(self, writer: MetricsWriter, progress: RunProgress, *, missing: bool = False) -> bool:
        """Evaluates and draws a grid if due; returns whether this is the best model so far (keep_best)."""
        reward, ends = self.settings.keep_best, self.step in (0, self.settings.iterations)
        with self.interrupt.around(swapped_weights(self.parameters, self.ema)):
            evaluated = self.evaluation_plan.evaluate_if_due(
                self.evaluator, self.out, self.step, writer, progress, ends=ends, missing=missing
            )
        self.random = random_state()
        if reward is None or not evaluated:
            return False
        return any_process(rank() == 0 and is_best(self.out, reward, self.step))

    def _after(self, writer: MetricsWriter, progress: RunProgress) -> list[Change]:
        """Samples and scores the images of `draw_before` again, and writes the table and the pairs."""
        if not self.comparison.sets:
            return []
        progress.note("drawing the same prompts and seeds after training")
        with (
            self.interrupt.around(swapped_weights(self.parameters, self.ema)),
            phase("images after training"),
        ):
            subject = f"{subject_of(self.settings)} for {self.settings.iterations} iterations"
            changes = self.comparison.draw_after(
                self.evaluator, self.out, list(self.settings.rewards), subject
            )
        if rank() == 0:
            writer.images("before_after", self.step, self.comparison.pairs(self.out))
        return changes
