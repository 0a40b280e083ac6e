"""The commands: each one parses its arguments and calls the API."""
