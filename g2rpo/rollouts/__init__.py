"""From a plan to scored images: which steps get noise, the exploration, the scores."""
