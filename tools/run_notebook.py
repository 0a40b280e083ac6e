"""Executes a notebook and stores it with the outputs that readers of the repository should see.

    python tools/run_notebook.py examples/first_run.ipynb

The cells run in an empty folder, on this interpreter. Images and tables are stored, the images with a palette
so that the file stays small. Lines of progress, execution counts and times are left out, because they differ
from machine to machine. Exit code 1: a cell has failed, and the notebook is unchanged.
"""

import argparse
import base64
import io
import sys
import tempfile
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError
from nbformat import NotebookNode
from PIL import Image

SECONDS_PER_CELL = 600
PALETTE = 128
"""Colours of a stored image."""


def executed(notebook: Path, folder: Path) -> NotebookNode:
    """Executes all cells of a notebook in a folder, in a kernel of this interpreter.

    Args:
        notebook: the file; it is not changed.
        folder: working directory of the kernel.

    Returns:
        The notebook with all outputs.

    Raises:
        CellExecutionError: a cell has failed; the message holds the cell and the traceback.
    """
    node = nbformat.read(notebook, as_version=4)
    client = NotebookClient(
        node, timeout=SECONDS_PER_CELL, kernel_name="python3", resources={"metadata": {"path": str(folder)}}
    )
    client.execute()
    return node


def stored(node: NotebookNode) -> NotebookNode:
    """Removes from an executed notebook what differs between two executions; returns the same object.

    Left are images, as PNG with a palette, and tables: outputs of a kind other than "stream", without
    execution counts. Of an output with several representations, only PNG or else Markdown is kept.
    """
    for cell in node.cells:
        cell.metadata.pop("execution", None)
        if cell.cell_type != "code":
            continue
        cell.execution_count = None
        cell.outputs = [output for output in cell.outputs if output.output_type != "stream"]
        for output in cell.outputs:
            if output.output_type == "execute_result":
                output.execution_count = None
            data = output.get("data", {})
            if png := data.get("image/png"):
                output.data = {"image/png": with_palette(png)}
            elif table := data.get("text/markdown"):
                output.data = {"text/markdown": table}
    node.metadata = {"kernelspec": node.metadata["kernelspec"], "language_info": {"name": "python"}}
    return node


def with_palette(png: str) -> str:
    """Encodes a PNG in base64 again, with a palette of `PALETTE` colours."""
    buffer = io.BytesIO()
    with Image.open(io.BytesIO(base64.b64decode(png))) as image:
        image.convert("RGB").quantize(PALETTE).save(buffer, "png", optimize=True)
    return base64.b64encode(buffer.getvalue()).decode()


def main() -> int:
    """Executes and stores the notebook of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("notebook", type=Path)
    notebook = parser.parse_args().notebook
    with tempfile.TemporaryDirectory() as folder:
        try:
            node = executed(notebook, Path(folder))
        except CellExecutionError as error:
            print(error, file=sys.stderr)
            return 1
    nbformat.write(stored(node), notebook)
    return 0


if __name__ == "__main__":
    sys.exit(main())
