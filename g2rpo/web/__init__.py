"""The web page (`g2rpo demo`)."""
