"""Measuring: runs, figures, retention, results.json, table and plots."""
