"""Upload of an export to the Hugging Face Hub.

The destination is checked before the export is made: name, token, permission and network. A new repository
is private unless asked otherwise, because a publication cannot be taken back and the licence of a base model
may restrict it. An existing repository keeps its visibility and its other files.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from huggingface_hub import HfApi

LOGIN = "log in with `hf auth login`, or set HF_TOKEN to a token with the permission to write"


@dataclass(frozen=True)
class Destination:
    """A model repository on the hub.

    Attributes:
        repo: OWNER/NAME.
        public: whether a new repository is visible to everyone.
        endpoint: address of the hub; None = HF_ENDPOINT, else huggingface.co.
    """

    repo: str
    public: bool = False
    endpoint: str | None = None

    def prepare(self) -> None:
        """Checks that files can be written to the repository, and creates it if there is none.

        Raises:
            ValueError: no such name, no or a wrong token, no permission, or no network.
        """
        owner = self._owner()
        api = self._api()
        if api.token is None:
            raise ValueError(f"--push-to-hub {self.repo}: there is no token for {api.endpoint}; {LOGIN}")
        with self._errors(api, "be checked"):
            user = api.whoami()
            _check_owner(self.repo, owner, user)
            api.create_repo(self.repo, private=not self.public, exist_ok=True)

    def upload(self, folder: Path) -> str:
        """Uploads all files of an export, and returns the address of the repository.

        Raises:
            ValueError: the upload failed; the message has the command that repeats it.
        """
        api = self._api()
        repeated = f"hf upload {self.repo} {shlex.quote(str(folder))}"
        after = f"; the export is in {folder}, and `{repeated}` repeats the upload"
        with self._errors(api, "be written", after):
            api.upload_folder(
                repo_id=self.repo, folder_path=folder, commit_message="Upload a model trained by g2rpo"
            )
        return f"{api.endpoint}/{self.repo}"

    def _owner(self) -> str:
        from huggingface_hub.errors import HFValidationError
        from huggingface_hub.utils import validate_repo_id

        owner, slash, name = self.repo.partition("/")
        try:
            validate_repo_id(self.repo)
        except HFValidationError as error:
            raise ValueError(f"--push-to-hub {self.repo}: give OWNER/NAME ({error})") from error
        if not (slash and owner and name):
            raise ValueError(f"--push-to-hub {self.repo}: give OWNER/NAME, such as your-name/{self.repo}")
        return owner

    def _api(self) -> HfApi:
        from huggingface_hub import HfApi, get_token

        return HfApi(endpoint=self.endpoint, token=get_token())

    @contextmanager
    def _errors(self, api: HfApi, action: str, after: str = "") -> Iterator[None]:
        """Turns errors of calls to the hub into a ValueError that says what to do."""
        from huggingface_hub import errors

        try:
            yield
        except errors.HfHubHTTPError as error:
            status = error.response.status_code
            advice = {
                401: f"the token is not valid; {LOGIN}",
                403: f"the token has no permission for it; {LOGIN}",
            }.get(status, f"the hub answered {status} ({_first_line(error)}); try again later")
            raise ValueError(f"{self.repo} could not {action}: {advice}{after}") from error
        # HTTPError comes from the hub client's own HTTP library: no connection, time-outs.
        except (errors.HTTPError, errors.OfflineModeIsEnabled) as error:
            offline = (
                " (HF_HUB_OFFLINE is set)" if os.environ.get("HF_HUB_OFFLINE", "0") not in ("", "0") else ""
            )
            raise ValueError(
                f"{self.repo} could not {action}: {api.endpoint} cannot be reached{offline}; check the "
                f"network, or export without --push-to-hub and upload later{after}"
            ) from error


def _check_owner(repo: str, owner: str, user: dict[str, Any]) -> None:
    """Checks that a user may write to repositories of `owner`.

    Args:
        user: answer of `HfApi.whoami`.

    Raises:
        ValueError: the owner is neither the user nor an organisation of the user, or the token only reads.
    """
    name = user["name"]
    organisations = {entry["name"]: entry.get("roleInOrg") for entry in user.get("orgs", ())}
    if owner != name and organisations.get(owner, "read") == "read":
        others = [organisation for organisation, role in organisations.items() if role != "read"]
        allowed = " or ".join([name, *others])
        raise ValueError(
            f"--push-to-hub {repo}: the token belongs to {name}, who may not write to {owner!r}; use "
            f"{allowed} as the owner, or the token of another user"
        )
    if user.get("auth", {}).get("accessToken", {}).get("role") == "read":
        raise ValueError(f"--push-to-hub {repo}: the token of {name} can only read; {LOGIN}")


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]
