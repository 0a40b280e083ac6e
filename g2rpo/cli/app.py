"""The command line: one file per command, listed here in the order of `g2rpo --help`.

A command parses its arguments, calls a function of the package and prints where the result is. A ValueError
raised anywhere below is something that the user can correct: its message is printed, and the exit code is 2.
A stop signal ends a command with exit code 130. All other exceptions propagate. Heavy imports are inside the
commands, so that `--help` and a misspelt option answer before torch is loaded.
"""

from typing import Annotated

import typer

import g2rpo
from g2rpo.cli.compare import compare
from g2rpo.cli.console import Commands
from g2rpo.cli.demo import demo
from g2rpo.cli.doctor import doctor
from g2rpo.cli.embed import embed
from g2rpo.cli.evaluate import evaluate
from g2rpo.cli.export import export
from g2rpo.cli.fetch import fetch
from g2rpo.cli.gallery import gallery
from g2rpo.cli.plan import plan
from g2rpo.cli.process import Program
from g2rpo.cli.report import report
from g2rpo.cli.reproduce import reproduce
from g2rpo.cli.run_command import RunCommand, TrainCommand
from g2rpo.cli.sample import sample
from g2rpo.cli.score import score
from g2rpo.cli.settings import settings
from g2rpo.cli.train import train

app = Program(
    cls=Commands,
    no_args_is_help=True,
    rich_markup_mode=None,  # square brackets in help and messages are lists, not styles
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)


def _version(requested: bool) -> None:
    if requested:
        print(g2rpo.__version__)
        raise typer.Exit


@app.callback()
def main(
    traceback: Annotated[
        bool, typer.Option("--traceback", help="Show the Python traceback of an error.")
    ] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Align flow-matching image models with preferences by reinforcement learning.

    The methods are G2RPO (arXiv:2510.01982), MixGRPO, DanceGRPO, Flow-GRPO and DiffusionNFT. For options and
    examples of a command, use `g2rpo COMMAND --help`.
    """


COMMANDS = (
    train,
    plan,
    settings,
    fetch,
    embed,
    sample,
    score,
    evaluate,
    gallery,
    compare,
    report,
    reproduce,
    demo,
    export,
    doctor,
)
COMMAND_CLASSES = {train: TrainCommand, **dict.fromkeys((plan, fetch, embed, compare), RunCommand)}
"""Commands with a class of their own: those that take a recipe and settings."""

for command in COMMANDS:
    app.command(cls=COMMAND_CLASSES.get(command))(command)
