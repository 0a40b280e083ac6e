"""The web page of `g2rpo demo`: generate, explore a group, runs, vote.

context   the models and runs that are shown, and the limits
jobs      all work on models, in one thread: queue, progress, cancellation
app       the page; one module per tab: generate, explore, runs, vote
server    the address, the files that are served, the end of the session

Only this package imports gradio (the extra `demo`).
"""
