"""The fault campaign: kills, signals, lost processes, full disks, damaged files, bad inputs, failing servers.

    python -m tests.faults                    the long form; writes results/faults/report.md and report.json
    python -m tests.faults --short            the form of the normal suite (test_short.py)
    python -m tests.faults --only kills:17    one case again, with its folder kept

Every case starts the real command line in a process that is forked from one with all imports (jobs.py). What
happens in it, and when, is decided by the case's number and the seed alone (tracing.py).
"""
