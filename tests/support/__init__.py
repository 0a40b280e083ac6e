"""Helpers of the tests: small models and runs, processes, servers and files."""
