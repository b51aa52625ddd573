"""Tests that need no GPU."""
