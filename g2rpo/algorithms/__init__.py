"""The methods as data, one file per method."""
