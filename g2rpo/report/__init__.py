"""The report of a run: one self-contained HTML page (`g2rpo report`)."""
