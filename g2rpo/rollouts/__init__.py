"""Plan rules, exploration and scoring: from the plan of an iteration to groups of scored images."""
