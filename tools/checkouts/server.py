"""Runs `python -m g2rpo WORDS` again and again in forked processes, which saves importing torch each time.

Started as `python -c` with one checkout on the module path. Reads a JSON object per line: `words`, `folder`
(the working directory), `output` (a file) and `seconds` (the longest that it may take); answers with the exit
code. Only packages of others are imported ahead, so nothing here depends on the checkout's modules.
"""

import contextlib
import importlib
import json
import os
import runpy
import signal
import sys

AHEAD = (
    "torch", "torch.distributed.checkpoint.state_dict", "torch.distributed.fsdp", "torch.utils.tensorboard",
    "diffusers.models.transformers.transformer_flux", "diffusers.models.autoencoders.autoencoder_kl",
    "diffusers.loaders", "transformers.models.clip.modeling_clip", "transformers.models.t5.modeling_t5",
    "transformers.models.clip.tokenization_clip", "transformers.models.t5.tokenization_t5",
    "peft", "matplotlib.figure", "matplotlib.backends.backend_agg", "pydantic", "typer", "rich.live",
    "safetensors.torch", "psutil", "filelock", "httpx",
)  # fmt: skip


def run(words: list[str], folder: str, output: str, seconds: int) -> None:
    """In the forked process: the command, as `python -m g2rpo` would run it."""
    os.setsid()
    signal.alarm(seconds)
    os.chdir(folder)
    for number, path, flags in (
        (0, os.devnull, os.O_RDONLY),
        (1, output, os.O_WRONLY),
        (2, output, os.O_WRONLY),
    ):
        os.dup2(os.open(path, flags | os.O_APPEND), number)
    sys.path[0] = folder
    sys.argv = ["g2rpo", *words]
    runpy.run_module("g2rpo", run_name="__main__", alter_sys=True)


def main() -> None:
    """Answers until standard input ends."""
    for name in AHEAD:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    while line := sys.stdin.readline():
        process = os.fork()
        if process == 0:
            run(**json.loads(line))
            return
        _, status = os.waitpid(process, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


if __name__ == "__main__":
    main()
