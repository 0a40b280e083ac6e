"""`g2rpo fetch`: lists what a run needs from the hub, with sizes and licences, and downloads it.

Files go to the hub's own cache (HF_HOME), from which models are loaded; cached files are not fetched again. A
model that is a local folder is only checked for completeness.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from g2rpo.models.family import ModelFamily
from g2rpo.models.loading.files import local_folder, read_json
from g2rpo.models.loading.reading import index_names, other_files
from g2rpo.models.registry import find_model, is_random, known_models
from g2rpo.models.tiny import is_tiny
from g2rpo.rewards.base import RewardSpec, Source
from g2rpo.rewards.registry import option_names, reward_facts


@dataclass(frozen=True)
class Need:
    """Something that a run loads, and what is missing of it on this machine.

    Attributes:
        what: "model", or "reward NAME".
        origin: the repository, or a description of where it comes from.
        licence, access: of the repository; otherwise empty.
        num_files, size_bytes: of all files.
        num_missing, missing_bytes: of the files that are not cached.
        source: files of a repository; None: nothing is fetched.
        family: of a model on the hub.
    """

    what: str
    origin: str
    licence: str = ""
    access: str = ""
    num_files: int = 0
    size_bytes: int = 0
    num_missing: int = 0
    missing_bytes: int = 0
    source: Source | None = None
    family: ModelFamily | None = None

    def __str__(self) -> str:
        if self.source is None:
            return f"{self.what}: {self.origin}"
        to_fetch = f"{size_text(self.missing_bytes)} to fetch" if self.num_missing else "all here"
        return (
            f"{self.what}: {self.origin}, {self.num_files} files, {size_text(self.size_bytes)}, {to_fetch}; "
            f"licence {self.licence}; {self.access}"
        )


OPEN, GRANTED, NO_LOGIN, REFUSED = "open", "gated, granted", "gated, not logged in", "gated, not granted"


def needs(
    model: str,
    rewards: Iterable[str],
    options: Mapping[str, Mapping[str, Any]] | None = None,
    *,
    family: str | None = None,
    code: Collection[str] | None = None,
) -> list[Need]:
    """Lists what a run with this model and these rewards needs; sizes and licences come from the hub.

    Args:
        model: as in `load_policy`.
        rewards: names; `module:function` is the user's own.
        options: reward -> its options; `path` and `tokenizer` replace its repositories.
        family: a custom family as "module:attribute".
        code: entries `module:attribute` that may be imported to see what they need; None: all.

    Raises:
        ValueError: no such model, folder, repository or reward, an incomplete folder, or no network.
    """
    if family is not None and code is not None and family not in code:
        raise ValueError(
            f"the settings name the custom family {family}, whose code is imported only if the command names "
            f"it: give family={family} after the file"
        )
    listed = [_model_need(model, family)]
    for name in dict.fromkeys(rewards):
        if ":" in name and code is not None and name not in code:
            listed.append(Need(f"reward {name}", "code that a run names, which is not imported here"))
            continue
        spec = reward_facts(name).spec  # a ValueError if there is no such reward
        if spec is None or not spec.sources:
            listed.append(Need(f"reward {name}", "your own code" if spec is None else spec.origin))
            continue
        for source in _reward_sources(spec, (options or {}).get(name, {})):
            if isinstance(source, Path):
                listed.append(Need(f"reward {name}", f"{source}: here"))
            elif source not in (need.source for need in listed):
                listed.append(_hub_need(f"reward {name}", source, _hub_info(source.repo)))
    return listed


def _reward_sources(spec: RewardSpec, options: Mapping[str, Any]) -> list[Source | Path]:
    """Where weights and tokenizer are: as published, or given by the options `path` and `tokenizer`."""
    sources: list[Source | Path] = []
    for key, source in zip(("path", "tokenizer"), spec.sources, strict=False):
        origin = str(options.get(key) or source.repo)
        local = Path(origin).expanduser()
        weights = sources[0] if sources and isinstance(sources[0], Path) else None
        beside = weights if weights is None or weights.is_dir() else weights.parent
        if local.exists():
            sources.append(local)
        elif not options.get(key) and beside and all((beside / file).is_file() for file in source.files):
            sources.append(beside)
        else:
            sources.append(replace(source, repo=origin))
    return sources


def fetch_needs(needed: Sequence[Need], say: Callable[[str], None] = print) -> None:
    """Downloads what is missing, after checks of permissions and disk space, and shows progress bars.

    Raises:
        ValueError: a gated repository without permission, too little disk space, or a failed download.
    """
    missing = [need for need in needed if need.num_missing]
    for need in missing:
        if need.access in (NO_LOGIN, REFUSED):
            raise ValueError(_gated(need.origin, need.access))
    if missing:
        say(_checked_space(sum(need.missing_bytes for need in missing)))
    for need in missing:
        say(f"fetching {need.origin} ({size_text(need.missing_bytes)})")
        folder = _download(need)
        say(f"{need.what}: {folder}")
    if not missing:
        say("nothing to fetch, everything is here")


def missing_files(folder: Path, family: ModelFamily) -> list[str]:
    """Lists the files of a model that a folder in diffusers layout lacks, without loading anything."""
    index = read_json(folder / "model_index.json")
    parts = family.parts
    missing = [f"{part} in model_index.json" for part in parts if (index.get(part) or [None])[0] is None]
    for part in parts:
        missing += _missing_of_part(folder, part)
    return missing


def _missing_of_part(folder: Path, part: str) -> list[str]:
    path = folder / part
    if part == "scheduler":
        return [] if (path / "scheduler_config.json").is_file() else [f"{part}/scheduler_config.json"]
    if part.startswith("tokenizer"):
        missing = [] if (path / "tokenizer_config.json").is_file() else [f"{part}/tokenizer_config.json"]
        vocabularies = ("tokenizer.json", "spiece.model", "vocab.json")
        if not any((path / name).is_file() for name in vocabularies):
            missing.append(f"{part}/{' or '.join(vocabularies)}")
        return missing
    missing = [] if (path / "config.json").is_file() else [f"{part}/config.json"]
    indexes = sorted(path.glob("*.safetensors.index.json"))
    shards = {shard for index in indexes for shard in index_names(index).values()}
    missing += [f"{part}/{shard}" for shard in sorted(shards) if not (path / shard).is_file()]
    if not indexes and not any(path.glob("*.safetensors")):
        missing.append(f"{part}/*.safetensors{other_files(path)}")
    return missing


def absent_model(model: str, family: str | None = None) -> str:
    """What of a model is not on this machine, as a text; "" if it is complete. The hub is not asked.

    Raises:
        ValueError: `model` is neither a folder, a hub name nor a model that is made here.
    """
    if is_random(model) or is_tiny(model) or Path(model).expanduser().is_dir():
        try:
            _model_need(model, family)
        except ValueError as error:
            return str(error)
        return ""
    known = known_models(family).get(model)
    patterns = ("model_index.json",) if known is None else tuple(f"{part}/*" for part in known.parts)
    folder = _cached(Source(model, ("model_index.json", *patterns)))
    if folder is None:
        return f"{model} is not in the hub's cache"
    of_family = known or find_model(folder, family)[0]
    missing = missing_files(folder, of_family)
    return f"{folder} lacks {', '.join(missing)}" if missing else ""


SERVER_OPTIONS = ("servers", "urls")
"""Options of rewards that servers compute, of which one names the servers."""


def absent_reward(name: str, options: Mapping[str, Any] | None = None) -> str:
    """What a reward needs that is not on this machine, as a text; "" if nothing. The hub is not asked.

    Raises:
        ValueError: there is no such reward.
    """
    facts = reward_facts(name)
    if facts.spec is None:
        return "" if facts.target is not None else facts.reason
    given = dict(options or {})
    known = option_names(facts.spec.factory) if facts.spec.factory is not None else None
    addresses = [option for option in SERVER_OPTIONS if option in (known or ())]
    if addresses and not any(given.get(option) for option in addresses):
        return f"no server is given (option {name}.{' or '.join(addresses)})"
    absent = [
        source.repo
        for source in _reward_sources(facts.spec, given)
        if isinstance(source, Source) and _cached(source) is None
    ]
    return f"{', '.join(dict.fromkeys(absent))}: not in the hub's cache" if absent else ""


def _cached(source: Source) -> Path | None:
    """The hub's snapshot of a repository on this machine; None if it lacks a file for one of the patterns."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        folder = Path(snapshot_download(source.repo, local_files_only=True))
    except (LocalEntryNotFoundError, HFValidationError):
        return None
    return folder if all(any(folder.glob(pattern)) for pattern in source.files) else None


def _model_need(model: str, custom: str | None) -> Need:
    if is_random(model):
        find_model(model, custom)  # raises a ValueError that lists them
        return Need("model", f"{model}: random weights, made when loaded")
    if is_tiny(model):
        find_model(model, custom)
        return Need("model", f"{model}: ships with g2rpo")
    if not Path(model).expanduser().is_dir() and model.count("/") == 1 and model[0] not in "./~":
        return _hub_model(model, custom)
    family, files = find_model(model, custom)  # raises a ValueError that says what a model may be
    assert files.folder is not None
    if missing := missing_files(files.folder, family):
        raise ValueError(
            f"{files.folder} is incomplete; it lacks {', '.join(missing)}. Copy them from the source of the "
            "model, or give its hub repository instead"
        )
    return Need("model", f"{files.folder}: complete")


def _hub_model(repo: str, custom: str | None) -> Need:
    """A model on the hub, whose model_index.json says of which family it is, unless the name is known."""
    info = _hub_info(repo)
    _check_files(Source(repo, ("model_index.json",)), info, "; it is not a pipeline in diffusers layout")
    family = known_models(custom).get(repo) or find_model(repo, custom)[0]
    source = Source(repo, ("model_index.json", *(f"{part}/*" for part in family.parts)))
    return replace(_hub_need("model", source, info), family=family)


def _hub_info(repo: str) -> Any:
    """Names, sizes and the card of a repository's files, which the hub tells of gated ones too."""
    from huggingface_hub import HfApi

    with _hub_errors(repo):
        return HfApi().model_info(repo, files_metadata=True)


def _check_files(source: Source, info: Any, remark: str = "") -> None:
    """Raises ValueError if the repository has no file for one of the names or patterns."""
    names = [file.rfilename for file in info.siblings or ()]
    if absent := [pattern for pattern in source.files if not any(fnmatch(name, pattern) for name in names)]:
        raise ValueError(
            f"{source.repo} on the hub contains no {', '.join(absent)}, which g2rpo needs{remark}"
        )


def _hub_need(what: str, source: Source, info: Any) -> Need:
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.utils import filter_repo_objects

    _check_files(source, info)
    sizes = {file.rfilename: file.size or 0 for file in info.siblings or ()}
    selected = list(filter_repo_objects(sizes, allow_patterns=[*source.files, *source.also]))
    missing = [
        name
        for name in selected
        if not isinstance(try_to_load_from_cache(source.repo, name, revision=info.sha), str)
    ]
    need = Need(
        what,
        source.repo,
        _licence(info),
        OPEN,
        num_files=len(selected),
        size_bytes=sum(sizes[name] for name in selected),
        num_missing=len(missing),
        missing_bytes=sum(sizes[name] for name in missing),
        source=source,
    )
    return replace(need, access=_access(source.repo)) if info.gated else need


def _licence(info: Any) -> str:
    """The licence on the repository's card; `license_name` comes first, because `license` is then "other"."""
    card = info.card_data or {}
    tags = (tag.removeprefix("license:") for tag in info.tags or () if tag.startswith("license:"))
    return str(card.get("license_name") or card.get("license") or next(tags, "not stated"))


def _access(repo: str) -> str:
    from huggingface_hub import HfApi, get_token
    from huggingface_hub.errors import GatedRepoError

    if get_token() is None:
        return NO_LOGIN
    with _hub_errors(repo):
        try:
            HfApi().auth_check(repo)
        except GatedRepoError:
            return REFUSED
    return GRANTED


def _download(need: Need) -> Path:
    from huggingface_hub import snapshot_download

    assert need.source is not None
    if need.family is not None:
        folder = local_folder(need.origin, need.family.parts)
        if missing := missing_files(folder, need.family):
            raise ValueError(f"{need.origin} was fetched into {folder}, but lacks {', '.join(missing)}")
        return folder
    with _hub_errors(need.origin):
        return Path(snapshot_download(need.origin, allow_patterns=[*need.source.files, *need.source.also]))


def _checked_space(needed: int) -> str:
    """Describes the hub's cache; raises ValueError if the downloads do not fit on its disk."""
    from huggingface_hub import constants

    cache = Path(constants.HF_HUB_CACHE).expanduser().absolute()
    nearest = next(folder for folder in (cache, *cache.parents) if folder.exists())
    if needed and not os.access(nearest, os.W_OK | os.X_OK):
        raise ValueError(
            f"{size_text(needed)} to fetch, but {nearest} is not writable; set HF_HOME to a folder that is"
        )
    free = shutil.disk_usage(nearest).free
    if needed > free:
        raise ValueError(
            f"{size_text(needed)} to fetch, but {cache} has {size_text(free)} free; free some space, or set "
            "HF_HOME to a folder on another disk"
        )
    return f"{size_text(needed)} to fetch into {cache}, which has {size_text(free)} free"


@contextmanager
def _hub_errors(repo: str) -> Iterator[None]:
    """Turns errors of calls to the hub into a ValueError that says what to do."""
    from huggingface_hub import errors

    try:
        yield
    except errors.GatedRepoError as error:
        raise ValueError(_gated(repo, REFUSED)) from error
    except (errors.RepositoryNotFoundError, errors.HFValidationError) as error:
        raise ValueError(
            f"the hub has no repository {repo!r} that you may read; check the name, and log in with `hf auth "
            "login` if it is private"
        ) from error
    # HTTPError comes from the hub client's own HTTP library: no connection, time-outs, a failing server.
    except (errors.HTTPError, errors.OfflineModeIsEnabled, errors.LocalEntryNotFoundError) as error:
        offline = " (HF_HUB_OFFLINE is set)" if os.environ.get("HF_HUB_OFFLINE", "0") not in ("", "0") else ""
        raise ValueError(
            f"the hub could not be reached for {repo!r}{offline}: {type(error).__name__}. Check the network, "
            "or fetch on a machine that has one and copy its HF_HOME"
        ) from error


def _gated(repo: str, access: str) -> str:
    login = "log in with `hf auth login`, " if access == NO_LOGIN else ""
    return (
        f"{repo} is gated ({access.removeprefix('gated, ')}): {login}accept its licence on "
        f"https://huggingface.co/{repo} and start again"
    )


def size_text(num_bytes: float) -> str:
    """Formats a size, such as `23.80 GB` or `4.19 MB`."""
    return f"{num_bytes / 1e9:,.2f} GB" if num_bytes >= 1e8 else f"{num_bytes / 1e6:,.2f} MB"
