"""`g2rpo reproduce`: a published recipe with acceptance checks on the way, and a report of them."""
