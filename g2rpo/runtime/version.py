"""The version number of g2rpo."""

__version__ = "0.1.0"
