"""`g2rpo embed`: encodes a run's prompts before the run, which then does not load the text encoders.

Only the text encoders are loaded, no transformer and no VAE. If started by torchrun, each process encodes its
share of the prompts; processes need not communicate, because shards of the cache are written atomically under
different names. Embeddings are kept: an interrupted command can be repeated and continues.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from g2rpo.config.settings import Settings
from g2rpo.costs.disk import check_disk
from g2rpo.data.embeddings import SHARDS, EmbeddingCache, Encoder
from g2rpo.data.prompts import ReadReport, read_prompts
from g2rpo.models.family import TextEncoders, Truncation, truncation_lines
from g2rpo.models.policy import Conditioning
from g2rpo.models.registry import load_text_encoders
from g2rpo.runtime.interrupt import interruptible
from g2rpo.runtime.processes import (
    any_process,
    check_environment,
    environment_number,
    gathered,
    rank,
    resolve_device,
    world_size,
)
from g2rpo.runtime.progress import note
from g2rpo.training.run_prompts import RunPrompts

INTERRUPTED = "interrupted; {} embeddings are kept; run the same command to continue"


@dataclass(frozen=True)
class Encoders:
    """A model's text encoders without its policy, as an `Encoder` for the embedding cache."""

    text: TextEncoders

    @property
    def device(self) -> torch.device:
        return self.text.device

    @property
    def encoder_identity(self) -> str:
        """Equal to the policy's, so that the policy finds these embeddings in the cache."""
        return self.text.identity

    def encode(self, prompts: list[str]) -> Conditioning:
        return self.text.encode(prompts)


def text_encoders(settings: Settings, device: torch.device) -> Encoders:
    """The text encoders of a run's model; their weights are read at the first prompt.

    Raises:
        ValueError: an unknown model, another kind of pipeline, or a max_sequence_length out of range.
    """
    encoders = load_text_encoders(settings.model, settings.policy_options(), device, family=settings.family)
    return Encoders(encoders)


@dataclass(frozen=True)
class EmbedResult:
    """The result of `embed_run`.

    Attributes:
        prompts: number of distinct prompts of the run.
        share: number of these that this process has to embed.
        already_embedded: number of the share that was in the cache before.
        added: number embedded now; less than share - already_embedded if interrupted.
        interrupted: whether a signal ended the command.
        truncations: prompts that an encoder truncates.
    """

    prompts: int
    share: int
    already_embedded: int
    added: int
    interrupted: bool
    truncations: list[Truncation]


def embed_run(settings: Settings, *, say: Callable[[str], None] = note) -> EmbedResult:
    """Embeds all prompts of a run into the cache and reports what was done.

    With several processes (torchrun's RANK, WORLD_SIZE, LOCAL_RANK) each embeds a share; the first prints.

    Args:
        say: receives the lines that the first process prints.

    Raises:
        ValueError: prompts or a model that cannot be read, or too little space for the embeddings.
    """
    check_environment(communicates=False)
    number, processes = environment_number("RANK", 0), max(1, environment_number("WORLD_SIZE", 1))
    say = _silent if number else say
    texts = RunPrompts.of(settings).texts
    policy = text_encoders(settings, _local_device(settings.device))
    # Shares of all prompts, not of the missing ones, because the processes read the cache at different times.
    share = texts[number::processes]
    filling = _Filling(EmbeddingCache(settings.cache), policy, share)
    already = len(share) - len(filling.missing)
    of_all = f" (this process's share of {processes}: {len(share)})" if processes > 1 else ""
    say(f"{len(texts)} different prompts{of_all}: {already} already embedded, {len(filling.missing)} to do")

    with interruptible():
        try:
            filling.run()
        except KeyboardInterrupt:
            say(INTERRUPTED.format(filling.added))
            return EmbedResult(len(texts), len(share), already, filling.added, True, [])
    truncations = policy.text.truncated(texts)
    sources = dict.fromkeys(source for source in (settings.prompts, settings.eval_prompts) if source)
    for line in (*(_summary(read_prompts(source)[1]) for source in sources), *map(str, truncations)):
        say(line)
    _report_disk(say, EmbeddingCache(settings.cache), policy)
    return EmbedResult(len(texts), len(share), already, filling.added, False, truncations)


class EmbeddingInterrupted(Exception):
    """A signal ended a run before its first iteration. The embeddings made so far are kept."""


def embed_missing(
    settings: Settings,
    texts: Sequence[str],
    device: torch.device,
    policy: Encoder | None = None,
    *,
    check: bool = True,
) -> None:
    """Embeds a run's prompts that are not in the cache; the first step of `train`.

    The processes of the run share the work.

    Args:
        texts: the texts of the run (`RunPrompts.texts`).
        device: device of the text encoders.
        policy: a policy that was not loaded by its name, which encodes; None: the model's text encoders are
            loaded for it, and freed.
        check: compare the disk space that the run needs with the embeddings with the free space first.

    Raises:
        DiskFull: the run and its embeddings do not fit on the disk; nothing was encoded.
        EmbeddingInterrupted: a signal reached any of the processes; raised on all of them.
        ValueError: an error of `embed_run`.
    """
    say = _silent if rank() else note
    loaded: Encoders | None = None
    if policy is None:
        policy = loaded = text_encoders(settings, device)
    cache = EmbeddingCache(settings.cache)
    filling = _Filling(cache, policy, texts[rank() :: world_size()])
    for line in truncation_lines(policy, texts):
        say(line)
    missing = len(cache.missing(policy, texts))
    if check and any_process(missing > 0):
        check_disk(settings, missing)
    if missing:
        say(f"embedding {missing} prompts")
    with interruptible() as interrupt:
        try:
            interrupt.together(filling.run)
            if any_process(interrupt.requested):  # the signal reached a process that had finished its share
                raise KeyboardInterrupt
        except KeyboardInterrupt:
            say(INTERRUPTED.format(sum(gathered(filling.added))))
            raise EmbeddingInterrupted from None
    if loaded is not None:
        loaded.text.unload()
    if device.type == "cuda":
        torch.cuda.empty_cache()


class _Filling:
    """Embeds one process's prompts into the cache.

    Attributes:
        missing: prompts that were not in the cache at the start.
        added: number of these that have been embedded so far.
    """

    def __init__(self, cache: EmbeddingCache, encoders: Encoder, prompts: Sequence[str]) -> None:
        self._cache, self._encoders = cache, encoders
        self.missing, self.added = cache.missing(encoders, prompts, verify=True), 0

    def run(self) -> None:
        def count(done: int, total: int) -> None:
            self.added = done

        self._cache.fill(self._encoders, self.missing, progress=count)


def _local_device(setting: str) -> torch.device:
    device = resolve_device(setting)
    if device.type == "cuda" and os.environ.get("LOCAL_RANK"):
        return torch.device("cuda", environment_number("LOCAL_RANK", 0))
    return device


def _silent(line: str) -> None:
    pass


def _summary(report: ReadReport) -> str:
    notes = "".join(f"; {note}" for note in report.notes)
    duplicates = ", ".join(report.duplicates[:3]) + (", …" if len(report.duplicates) > 3 else "")
    return (
        f"{report.source}: {report.read} prompts read, {report.kept} kept, {len(report.duplicates)} repeated"
        f"{f' ({duplicates})' if duplicates else ''}, {report.empty_lines} empty lines{notes}"
    )


def _report_disk(say: Callable[[str], None], cache: EmbeddingCache, policy: Encoders) -> None:
    folder, count, size = cache.held(policy)
    say(f"{folder}: {count} embeddings of these encoders, {_size(size)}")
    if others := cache.other_encoders(policy):
        size = sum(file.stat().st_size for other in others for file in other.glob(SHARDS))
        names = ", ".join(other.name for other in others[:3]) + (", …" if len(others) > 3 else "")
        say(
            f"{cache.folder} also contains {_size(size)} of other encoders or settings (precision, "
            f"max_sequence_length), which this run does not use: {names}; identity.txt in each folder "
            "describes its encoder"
        )


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:,.2f} GB" if num_bytes >= 1e8 else f"{num_bytes / 1e6:,.2f} MB"
