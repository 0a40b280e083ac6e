"""`python -m g2rpo`: the command line of g2rpo.cli."""

from g2rpo.cli.app import app

if __name__ == "__main__":
    app(prog_name="g2rpo")
