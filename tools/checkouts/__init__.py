"""Parts of compare_checkouts.py: the cases, how they are run, and how their results are compared."""
