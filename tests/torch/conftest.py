"""Shared fixtures of the torch tests."""
