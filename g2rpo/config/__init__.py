"""Settings: recipes and overrides, validated."""
