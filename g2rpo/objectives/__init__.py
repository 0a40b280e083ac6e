"""From rewards to advantages, from advantages to a loss."""
